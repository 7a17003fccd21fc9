"""Checkpoint a module in place: `checkpoint(module)`, and `contract`, the decorator that such APIs are made with.

`checkpoint` installs a region on the module through hooks. The module stays what it is: no wrapper, no
other names. Every call of it is a region, from our hook before its forward, which stands first among its own hooks
when it is installed, to the end of the forward. A replay calls the module again, so the other hooks run too.

What is installed on a module stands in its `__dict__`, with nothing in it that refers to the module: so a copy and a
pickled module are checkpointed too, with their own weights and state, and a replica for another device works with the
original's. What is open while a forward runs belongs to the thread, not to the module (`_engine/calls.py`).

The compiler cannot begin a region in a hook. For it alone the module is decided as `recollect.apply` would.

What this is not: `recollect.apply`, which decides for many modules by name.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from recollect import _errors
from recollect._checkpoint import (
    RUN_LATER,
    ContextFn,
    PolicyLike,
    checked_options,
    contexts_of,
    noop_context_fn,
    overridden,
    refuse_if_it_runs_later,
    refuse_to_run_later,
)
from recollect._decided import Decided, Entry, decided_of, install, take_off, why_not
from recollect._engine.calls import ModuleFunction, call_awaited, end_of_call, is_awaited
from recollect._engine.frame import Options
from recollect._engine.opened import WatchedCall, open_region
from recollect._engine.scope import Scope, Watch, here
from recollect._inputs import Arguments
from recollect._torch import is_failed_call, never_begin
from recollect.policy import Policy, Recompute

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)

# Names that stay the same from process to process: a pickled module has them.
_STATES = "_recollect_composable_states"
_REGISTRY = "_recollect_composable_registry"


# --- The contract ---


class State:
    """What an API remembers of one application: any attribute that it likes."""


class RegistryItem:
    """Stands for one application of an API."""


class Api(Protocol[P, R_co, S_co]):
    """What `contract` makes of a function."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Apply it to a module or to a list of modules."""

    def state(self, module: nn.Module) -> S_co | None:
        """The state of its application to `module`; None where it has not been applied."""


def contract(
    state_cls: type[S] = State,  # type: ignore[assignment]
) -> Callable[[Callable[P, R]], Api[P, R, S]]:
    """Make an API that is applied to modules in place, at most once to each, and that changes no names.

    The function takes a module or a list of modules first, and returns as many; None means what it was given. Each call
    of it has a state of its own, shared by the modules of the call: `api.state(module)`. Of modules in a list of which
    one contains the other, the outer one has the state. If the function raises, it has not been applied.

    Args:
        state_cls: What makes a state. Without it, states take any attribute.

    Returns:
        A decorator.

    Example:
        >>> import torch
        >>> from recollect.composable import contract, get_registry
        >>> @contract()
        ... def count_calls(module):
        ...     state = count_calls.state(module)
        ...     state.calls = 0
        ...     def hook(*_):
        ...         state.calls += 1
        ...     module.register_forward_hook(hook)
        >>> layer = count_calls(torch.nn.Linear(2, 2))
        >>> _ = layer(torch.ones(1, 2))
        >>> count_calls.state(layer).calls, list(get_registry(layer))
        (1, ['count_calls'])
    """
    if not isinstance(state_cls, type):
        raise TypeError(f"state_cls must be a class, got {_errors.describe_value(state_cls)}. (Write @contract().)")

    def decorate(function: Callable[P, R]) -> Api[P, R, S]:
        name = function.__name__

        @functools.wraps(function)
        def api(module: Any, *args: Any, **kwargs: Any) -> Any:
            modules = _roots(_modules_in(module, f"the first argument of {name}"))
            for one in modules:
                if name in (get_registry(one) or ()) or _state_of(api, one) is not None:
                    raise _errors.applied_twice(name, one)
                if sum(other is one for other in modules) > 1:
                    raise _errors.applied_twice(name, one)
            state, item = state_cls(), RegistryItem()
            before = list(map(_names_in, modules))
            for one in modules:
                vars(one).setdefault(_STATES, {})[api] = state
                vars(one).setdefault(_REGISTRY, OrderedDict())[name] = item
            try:
                result = function(module, *args, **kwargs)
                updated = module if result is None else result
                after = list(map(_names_in, _roots(_modules_in(updated, f"what {name} returns"))))
                if len(after) != len(before):
                    raise _errors.other_number_of_modules(name, len(before), len(after))
                for names, others in zip(before, after, strict=True):
                    for kind in names:
                        if names[kind] != others[kind]:
                            raise _errors.names_changed(kind, names[kind], others[kind])
            except BaseException:
                for one in modules:
                    _take_off(api, one)
                raise
            return updated

        def state_of(module: nn.Module) -> Any:
            _modules_in(module, "module", lists=False)
            return _state_of(api, module)

        api.state = state_of  # type: ignore[attr-defined]
        return cast(Api[P, R, S], api)

    return decorate


def get_registry(module: nn.Module) -> OrderedDict[str, RegistryItem] | None:
    """The APIs that were applied to a module, by name and in order; None if there is none.

    Example:
        >>> import torch
        >>> from recollect import composable
        >>> layer = torch.nn.Linear(2, 2)
        >>> composable.get_registry(layer)
        >>> list(composable.get_registry(composable.checkpoint(layer)))
        ['checkpoint']
    """
    _modules_in(module, "module", lists=False)
    return vars(module).get(_REGISTRY) or None


def _state_of(api: Any, module: nn.Module) -> Any:
    return vars(module).get(_STATES, {}).get(api)


def _take_off(api: Any, module: nn.Module) -> None:
    for key, entry in ((_STATES, api), (_REGISTRY, api.__name__)):
        entries = vars(module).get(key)
        if entries is not None:
            entries.pop(entry, None)
            if not entries:
                del vars(module)[key]


def _modules_in(value: Any, what: str, *, lists: bool = True) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return [value]
    if not lists or not isinstance(value, (list, tuple)) or not all(isinstance(one, nn.Module) for one in value):
        raise _errors.not_a_module(what, value, lists=lists)
    return list(value)


def _roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are not part of another one."""
    if len(modules) < 2:
        return list(modules)
    parts = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in parts]


def _names_in(module: nn.Module) -> dict[str, list[str]]:
    return {
        "parameters": [name for name, _ in module.named_parameters()],
        "buffers": [name for name, _ in module.named_buffers()],
        "modules": [name for name, _ in module.named_modules()],
    }


# --- checkpoint ---


class CheckpointState:
    """What `checkpoint` remembers of a module: its options, and the two hooks.

    Attributes:
        is_applied: Whether the module has the hooks.
        is_enabled: Whether its user wants them to do something.
        context_fn: As for `recollect.checkpoint`.
    """

    def __init__(self) -> None:
        self.is_applied = False
        self.is_enabled = False
        self._options = Options()
        self.context_fn: ContextFn = noop_context_fn
        self._handles: list[RemovableHandle] = []

    def install(self, module: nn.Module, options: Options, context_fn: ContextFn) -> None:
        """Give a module the hooks."""
        self._options = options
        self.context_fn = context_fn
        if decided_of(module) is None and why_not(module, may_be_lazy=True) is None:
            entry = Entry("recollect.composable.checkpoint", Recompute(policy=options.policy))
            install(module, Decided(type(module).__name__, entry, options, hooked=self))
        self._handles = self._register(module)
        self.is_enabled = self.is_applied = True

    def _register(self, module: nn.Module) -> list[RemovableHandle]:
        return [
            # First, so that what the other hooks compute is part of the region, and is recomputed as it was.
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after_forward, prepend=True, always_call=True),
        ]

    @property
    def policy(self) -> Policy | None:
        """What is kept all the same."""
        return self._options.policy

    def uninstall(self) -> None:
        """Take them off again."""
        self.is_enabled = self.is_applied = False
        _remove_all(self._handles)

    @contextlib.contextmanager
    def lent_to(self, module: nn.Module) -> Iterator[None]:
        """Give the module the hooks for a replay of what was begun before they were taken off."""
        # If it has those of another application, these will do.
        handles = self._register(module) if checkpoint.state(module) is None else []
        try:
            yield
        finally:
            _remove_all(handles)

    @property
    def enable_hook(self) -> bool:
        """Whether a call of the module becomes a region. Set it to False to run the module plainly.

        It is False in this thread during the module's own replay.
        """
        scope = self._scope()
        return self.is_enabled and (scope is None or not scope.replaying)

    @enable_hook.setter
    def enable_hook(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise _errors.not_a_bool("enable_hook", value)
        self.is_enabled = value

    @property
    def _ac_generator(self) -> object | None:
        """What is open in this thread while a forward of the module runs."""
        scope = self._scope()
        return None if scope is None else scope.opened

    def _scope(self) -> Scope | None:
        """The innermost region of the module that runs in this thread."""
        scope = here.scope
        while scope is not None:
            function = scope.frame.function
            if isinstance(function, ModuleFunction) and function.applied is self:
                return scope
            scope = scope.around
        return None

    @never_begin
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The hook before the module's forward: begins a region, or the region's part of a replay."""
        if torch.compiler.is_compiling():
            return None
        caller = sys._getframe(1)
        awaited = here.awaited
        if awaited is not None and is_awaited(module, caller):
            here.awaited = None  # for this call; those inside are regions as they were in the forward
            return awaited.begin(caller, args, kwargs)
        if self.is_enabled:
            context_fn = self.context_fn
            contexts = None if context_fn is noop_context_fn else contexts_of(context_fn)
            if torch.is_grad_enabled():
                function = ModuleFunction(module, self)
                open_region(function, args, kwargs, overridden(self._options), contexts, caller)
        return None

    @never_begin
    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The hook after the forward, also called if something failed before it."""
        if torch.compiler.is_compiling():
            return
        caller = sys._getframe(1)
        failed = is_failed_call(caller)
        end_of_call(caller, sys.exc_info()[1] if failed else None)
        if self.is_enabled and not failed and isinstance(output, RUN_LATER):
            refuse_to_run_later(module, output)


def _remove_all(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


_OPTION_NAMES = ("context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state", "policy")


@contract(CheckpointState)
def checkpoint(
    module: nn.Module,
    *,
    use_reentrant: bool | None = False,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "first",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool | str = True,
    policy: PolicyLike | None = None,
    **unknown: Any,
) -> nn.Module:
    """Let every call of a module be a region: `recollect.checkpoint` without a change to who calls it.

    Args:
        module: Any module. It is changed in place; its names, parameters and `state_dict` stay as they are.
        use_reentrant: Not supported but for False.
        context_fn: As for `recollect.checkpoint`; called once per call of the module.
        determinism_check: As for `recollect.checkpoint`.
        debug: As for `recollect.checkpoint`.
        early_stop: As for `recollect.checkpoint`.
        preserve_rng_state: As for `recollect.checkpoint`.
        policy: As for `recollect.checkpoint`.
        **unknown: Refused.

    Returns:
        The same module. `checkpoint.state(module).enable_hook = False` lets it run plainly for a while, and
        `remove(module)` takes it off.

    Example:
        >>> import torch
        >>> from recollect import composable
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> model = torch.nn.Sequential(composable.checkpoint(block), torch.nn.Linear(4, 1))
        >>> model(torch.ones(2, 4)).sum().backward()  # runs the block again
        >>> list(model.state_dict())
        ['0.0.weight', '0.0.bias', '1.weight', '1.bias']
    """
    if not isinstance(module, nn.Module):
        raise _errors.not_a_module("module", module, lists=False)
    if isinstance(module, torch.jit.ScriptModule):
        raise _errors.takes_no_hooks(module)
    if use_reentrant:
        raise _errors.not_in_composable()
    if unknown:
        raise _errors.unexpected_keywords(list(unknown), _OPTION_NAMES)
    if not callable(context_fn):
        raise _errors.not_callable("context_fn", context_fn)
    options = checked_options(determinism_check, debug, early_stop, preserve_rng_state, None, policy)
    refuse_if_it_runs_later(module)
    decided = decided_of(module)
    if decided is not None and decided.hooked is None:
        label, decision = decided.entry.label, repr(decided.entry.decision)
        raise _errors.decided_twice(
            type(module).__name__, label, decision, "recollect.composable.checkpoint", "a region"
        )
    state = checkpoint.state(module)
    assert state is not None, "contract has just made it"
    state.install(module, options, context_fn)
    return module


def call_watched(module: nn.Module, arguments: Arguments, options: Options, watch: Watch) -> Any:
    """Call a module that `checkpoint` was applied to, for once with other options, and watch its region."""
    state = checkpoint.state(module)
    assert state is not None, "only then there is a hook to begin it"
    return call_awaited(WatchedCall(ModuleFunction(module, state), options, watch), *arguments)


def remove(module: nn.Module) -> nn.Module:
    """Take `checkpoint` off a module: it is then as it was before. What was begun can still be replayed.

    Args:
        module: One that `checkpoint` was applied to.

    Returns:
        The same module.

    Example:
        >>> import torch
        >>> from recollect import composable
        >>> layer = composable.checkpoint(torch.nn.Linear(2, 2))
        >>> composable.get_registry(composable.remove(layer))
    """
    state = checkpoint.state(module)
    if state is None:
        raise _errors.not_applied("checkpoint", module)
    state.uninstall()
    _take_off(checkpoint, module)
    decided = decided_of(module)
    if decided is not None and decided.hooked is state:
        take_off(module)
    return module


__all__ = ["checkpoint", "contract", "get_registry", "remove"]
