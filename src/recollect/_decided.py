"""A module that is decided: how its calls come to pass through a decision, and what that means where it is called.

How a module is decided. Its class becomes a subclass made on the spot, of the same name, that decides in `__call__`,
around the module's hooks and its forward; what was decided stands in the module's `__dict__`. So a copy, a pickled
model and a replica decide for themselves, with their own weights, and neither a `forward` that somebody put on the
module nor its signature is touched. One class stays above ours: the one that `torch.nn.utils.parametrize` makes for a
single module and takes off again.

What a decision means depends on what is around the module when it is called:

==============  ===============================  =============================  =============================
                in no region                     in one that is recomputed      in one that is kept
==============  ===============================  =============================  =============================
`Save()`        nothing                          kept, and not run again        nothing
`Recompute()`   a region of its own              run again with it, under the   a region of its own
                                                 policy of this decision alone
`Offload()`     what autograd saves is kept on   kept on the host, and not run  nothing
                the host                         again
==============  ===============================  =============================  =============================

So an inner decision refines the outer one, and nothing is run more than twice. What is kept is run again all the same
where `_engine/kept_region.py` says so: where its output is changed in place, or is the memory of its input.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from recollect import _compile, _errors
from recollect._checkpoint import RUN_LATER, noop_context_fn, overridden, refuse_to_run_later, run_compiled
from recollect._engine.frame import Options, run_region
from recollect._engine.kept_region import Mark, call_with_store
from recollect._engine.named import call_part
from recollect._engine.scope import Scope, here
from recollect._inputs import find_tensors, is_parameter
from recollect._torch import level_of_user_code, never_begin, storage_key
from recollect.policy import Decision, Offload, Recompute

_KEY = "_recollect_decided"


class Entry:
    """One line of `decisions`, and whether it was seen to be of use.

    It is the same object for all the modules that it decides, and for their copies.
    """

    def __init__(self, label: str, decision: Decision) -> None:
        self.label = label
        self.decision = decision
        self.settled = False
        self._waiting: set[int] = set()  # the modules that have not been called yet

    def decides(self, module: Module) -> None:
        """One more."""
        self._waiting.add(id(module))

    def overrides(self) -> None:
        """It takes the place of another one: that is a use."""
        self.settled = True

    def was_of_no_use(self, module: Module | None, why: str) -> None:
        """Warn once if that goes for all its modules."""
        self._waiting.discard(id(module))
        if self._waiting or self.settled:
            return
        self.settled = True
        warnings.warn(
            f"the decision {self.label}: {self.decision!r} of recollect.apply changes nothing: {why}",
            UserWarning,
            stacklevel=level_of_user_code(),
        )

    def __deepcopy__(self, memo: Any) -> Entry:
        return self

    def __reduce__(self) -> Any:
        return _settled_entry, (self.label, self.decision)


def _settled_entry(label: str, decision: Decision) -> Entry:
    entry = Entry(label, decision)
    entry.settled = True  # what it is of use for is not known where a model was loaded
    return entry


class Hooked(Protocol):
    """What knows of a module whose regions its hooks begin. The compiler has no place for a region that begins so."""

    is_enabled: bool
    context_fn: Callable[[], Any]


class Decided:
    """What was decided for a module."""

    __slots__ = ("entry", "has_parts", "hooked", "is_copied", "is_inside", "name", "options")

    def __init__(
        self,
        name: str,
        entry: Entry,
        options: Options,
        is_inside: bool = False,
        has_parts: bool = False,
        hooked: Hooked | None = None,
    ) -> None:
        self.name = name
        self.entry = entry
        self.options = options
        # For the compiler, which cannot ask what is around a module when it is called.
        self.is_inside = is_inside  # of one that is recomputed
        self.has_parts = has_parts  # which are decided themselves
        self.hooked = hooked  # where hooks begin the regions, but for those of the compiler
        self.is_copied = False  # whether a copy of the module may have the same class

    def __deepcopy__(self, memo: Any) -> Decided:
        self.is_copied = True
        twin = Decided(*self._values())
        twin.hooked = copy.deepcopy(self.hooked, memo)
        return twin

    def __reduce__(self) -> Any:
        return Decided, self._values()

    def _values(self) -> tuple[Any, ...]:
        """None but the last ever changes: a copy shares them, and its policy is asked as it is."""
        return (self.name, self.entry, self.options, self.is_inside, self.has_parts, self.hooked)


class DecidedModule:
    """Stands first among the bases of the class of a decided module."""

    def __init_subclass__(cls) -> None:
        """Keep what the module's own class does for its subclasses from happening: this is none."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        decided: Decided | None = self.__dict__.get(_KEY)
        if decided is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        hooked, compiling = decided.hooked, is_dynamo_compiling()
        if hooked is not None and not (compiling and hooked.is_enabled):
            return call(*args, **kwargs)
        run = _call_compiled if compiling else _call
        return run(self, decided, call, args, kwargs)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        kind: Any = type(self)
        if not _is_decided(kind) or not isinstance(made, tuple):
            return made
        # Who unpickles makes the module from its own class, and decides it there. Its state comes later, if at all.
        function, args, *rest = made
        own = own_class(kind)
        args = tuple(own if one is kind else one for one in args)
        return _made_and_decided, (self.__dict__.get(_KEY), own if function is kind else function, args), *rest


@never_begin
def _call(
    module: Module, decided: Decided, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    scope = here.scope
    if scope is not None:
        return _call_in_region(module, decided, scope, call, args, kwargs)
    entry = decided.entry
    if type(entry.decision) is Recompute:
        options = overridden(decided.options)
        if entry.settled:
            result = run_region(call, args, kwargs, options)
        else:
            result = _run_watched(module, entry, call, args, kwargs, options)
        if isinstance(result, RUN_LATER):
            refuse_to_run_later(call, result)
        return result
    if type(entry.decision) is Offload:
        return call_with_store(entry.decision, decided.name, call, args, kwargs)
    if not entry.settled:
        entry.was_of_no_use(module, "where it is called nothing is recomputed")
    return call(*args, **kwargs)


def _call_in_region(
    module: Module,
    decided: Decided,
    scope: Scope,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    entry = decided.entry
    decision = entry.decision
    if scope.saving and type(decision) is not Recompute:
        if not entry.settled:
            entry.was_of_no_use(module, "it is called inside of what is kept as a whole")
        return call(*args, **kwargs)
    if not scope.saving and scope.policy is None and type(decision) is Recompute and decision.policy is None:
        if not entry.settled:
            entry.was_of_no_use(module, "it is called inside of what is recomputed as a whole")
        return call(*args, **kwargs)
    entry.settled = True
    mark = Mark(decided.name, decision)
    return call_part(scope, mark, call, args, kwargs, overridden(decided.options))


@never_begin  # where it would begin here
def _call_compiled(
    module: Module, decided: Decided, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What Dynamo reads: it knows no scopes, so that what is around the module is taken from its place in the model."""
    if not is_dynamo_compiling():  # it has read this far, and then come to a graph break
        return call(*args, **kwargs) if decided.hooked else _call(module, decided, call, args, kwargs)
    decision = decided.entry.decision
    if type(decision) is Recompute:
        context_fn = noop_context_fn if decided.hooked is None else decided.hooked.context_fn
        return run_compiled(call, args, kwargs, decided.options, context_fn, has_parts=decided.has_parts)
    kept = type(decision).__name__
    if decided.is_inside:
        return _compile.run_kept(kept, call, args, kwargs)
    if kept == "Offload":
        _compile.say("offload")
    return call(*args, **kwargs)


def _run_watched(
    module: Module,
    entry: Entry,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    """Run a region and see whether it lets go of anything that would not be there anyway."""
    # Inputs that wait elsewhere, or in parts, are not kept as they would be anyway.
    there = set(map(storage_key, find_tensors(args, kwargs)[0])) if options.inputs is None else set()

    def watch(tensor: Tensor, fate: str) -> None:
        if fate == "recomputed" and not is_parameter(tensor) and storage_key(tensor) not in there:
            entry.settled = True

    result = run_region(call, args, kwargs, options, watch=watch)
    if not entry.settled and not isinstance(result, RUN_LATER):
        entry.was_of_no_use(
            module, "autograd saves nothing in there but what is kept anyway, such as inputs and weights"
        )
    return result


# --- The classes of decided modules ---

_classes: weakref.WeakValueDictionary[type[Module], type[Module]] = weakref.WeakValueDictionary()


def own_class(kind: type[Module]) -> type[Module]:
    """The class that a module had before it was decided, if `kind` is one of those made here."""
    own: type[Module] = kind.__bases__[1] if _is_decided(kind) else kind
    return own


def _decided_class(own: type[Module]) -> type[Module]:
    made = _classes.get(own)
    if made is None:
        names = ("__module__", "__qualname__", "__doc__")
        namespace = {name: getattr(own, name) for name in names}
        if "__firstlineno__" in vars(own):  # Python 3.13 finds the source of a class by it
            namespace["__firstlineno__"] = vars(own)["__firstlineno__"]
        if hasattr(own, "__deepcopy__"):
            namespace["__deepcopy__"] = _deepcopy
        meta: Any = type(own)
        kind = _kind_over(meta)
        made = _classes[own] = kind(own.__name__, (DecidedModule, own), namespace)
    return made


@functools.cache
def _kind_over(kind: Any) -> Any:
    """A metaclass over that of a module's own class, for which undecided modules of that class pass as decided ones.

    Who shards by class takes it from the first module with some name, and finds the others by isinstance.
    """

    def passes(self: type, instance: Any) -> bool:
        if _is_decided(self):
            return isinstance(instance, own_class(self))
        is_one: bool = kind.__instancecheck__(self, instance)
        return is_one

    return type("DecidedKind", (kind,), {"__instancecheck__": passes})


def _deepcopy(module: Module, memo: Any) -> Any:
    """The copy that a module's own `__deepcopy__` makes, which may leave out what was decided."""
    made: Any = super(DecidedModule, module).__deepcopy__(memo)  # type: ignore[misc]
    decided: Decided | None = module.__dict__.get(_KEY)
    if decided is not None and isinstance(made, Module):
        install(made, copy.deepcopy(decided))
    return made


def _made_and_decided(decided: Decided | None, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    made = make(*args)
    if decided is not None and isinstance(made, Module):  # None: a part of a decided Sequential, `model[:2]`
        install(made, decided)
    return made


def _is_decided(kind: type) -> bool:
    """Whether a class is one of those made here, and no subclass that others made of it."""
    return DecidedModule in kind.__bases__


def _is_parametrized(module: Module) -> bool:
    """Whether `torch.nn.utils.parametrize` made the class of a module, for this one alone and from another class."""
    return is_parametrized(module) and len(type(module).__bases__) == 1


def _parametrized_class(kind: type[Module]) -> type[Module]:
    """A class like the one that parametrizes a module, over a decided one. Not that itself: copies have it too."""
    namespace = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    meta: Any = type(kind)
    made: type[Module] = meta(kind.__name__, (_decided_class(kind.__bases__[0]),), namespace)
    return made


def install(module: Module, decided: Decided) -> None:
    """Let the calls of a module be decided."""
    kind = type(module)
    if not issubclass(kind, DecidedModule):
        try:
            made = _parametrized_class(kind) if _is_parametrized(module) else _decided_class(kind)
            object.__setattr__(module, "__class__", made)
        except TypeError as error:
            why = f"no class can be derived from its own, {kind.__name__} ({error}). Decide for the module around it"
            raise _errors.cannot_be_decided(decided.name, why) from error
    module.__dict__[_KEY] = decided


def why_not(module: Module, *, may_be_lazy: bool) -> str | None:
    """Why a module cannot be decided, in words, if it cannot; `may_be_lazy` if some module of the model is."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a scripted module, whose calls do not come through Python. Decide for the module around it"
    if may_be_lazy and any(map(is_lazy, module.modules())):
        return "it has lazy parameters, which the first call makes. Call the model once, and decide then"
    return None


def look_at_places(model: Module) -> None:
    """Let the decided modules of a model know which of them are inside of one that is recomputed."""
    recomputed: dict[str, Decided] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        decided = decided_of(module)
        if decided is None:
            continue
        parts = name.split(".") if name else []
        around = [recomputed.get(".".join(parts[:length])) for length in range(len(parts))]
        for outer in around:
            if outer is not None:
                decided.is_inside = outer.has_parts = True
        if type(decided.entry.decision) is Recompute:
            recomputed[name] = decided


def is_lazy(module: Module) -> bool:
    """Whether the first call is yet to make the module's parameters, and maybe to change its class."""
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def decided_of(module: Module) -> Decided | None:
    """What was decided for a module, if anything was. Who gave it another class has taken that off."""
    found: Decided | None = module.__dict__.get(_KEY)
    return found if isinstance(module, DecidedModule) else None


def is_decided_by(module: Module, decided: Decided) -> bool:
    """Whether it is this that was decided for a module."""
    return module.__dict__.get(_KEY) is decided


def take_off(module: Module) -> None:
    """Undo `install`."""
    decided: Decided | None = module.__dict__.pop(_KEY, None)
    kind = type(module)
    if _is_decided(kind):
        object.__setattr__(module, "__class__", own_class(kind))
    elif _is_parametrized(module) and _is_decided(kind.__bases__[0]) and not (decided is None or decided.is_copied):
        kind.__bases__ = (own_class(kind.__bases__[0]),)
    # Else a class that others derived from ours stays: without a decision it does nothing.
