"""A module that is decided: how its calls come to pass through a decision, and what that means where it is called.

How a module is decided. Its class becomes a subclass made on the spot, of the same name, that decides in `__call__`,
around the module's hooks and its forward; what was decided stands in the module's `__dict__`. So a copy, a pickled
model and a replica decide for themselves, with their own weights, and neither a `forward` that somebody put on the
module nor its signature is touched.

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

So an inner decision refines the outer one, and nothing is run more than twice.
"""

from __future__ import annotations

import copyreg
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from recollect._checkpoint import overridden
from recollect._engine.frame import Options, run_region
from recollect._engine.kept_region import call_on_host
from recollect._engine.named import call_part
from recollect._engine.scope import Scope, here
from recollect._inputs import find_tensors, is_parameter
from recollect._torch import level_of_user_code, storage_key
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

    def was_of_no_use(self, module: Module, why: str) -> None:
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


class Decided:
    """What was decided for a module."""

    __slots__ = ("entry", "name", "options")

    def __init__(self, name: str, entry: Entry, options: Options) -> None:
        self.name = name
        self.entry = entry
        self.options = options

    def __reduce__(self) -> Any:
        return Decided, (self.name, self.entry, self.options)


class DecidedModule:
    """Stands first among the bases of the class of a decided module."""

    def __init_subclass__(cls) -> None:
        """Keep what the module's own class does for its subclasses from happening: this is none."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        decided: Decided | None = self.__dict__.get(_KEY)
        if decided is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        scope = here.scope
        if scope is not None:
            return _call_in_region(self, decided, scope, call, args, kwargs)  # type: ignore[arg-type]
        entry = decided.entry
        if type(entry.decision) is Recompute:
            options = overridden(decided.options)
            if entry.settled:
                return run_region(call, args, kwargs, options)
            return _run_watched(self, entry, call, args, kwargs, options)  # type: ignore[arg-type]
        if type(entry.decision) is Offload:
            return call_on_host(decided.name, call, args, kwargs)
        if not entry.settled:
            entry.was_of_no_use(self, "where it is called nothing is recomputed")  # type: ignore[arg-type]
        return call(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        if not _is_decided(type(self)) or not isinstance(made, tuple):
            return made
        # Who unpickles finds the module's own class, and derives from it there.
        own = _own_class(type(self))
        if made[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_new_decided, (own, *made[1][1:]), *made[2:])
        return (own if made[0] is type(self) else made[0], *made[1:])


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
    if not scope.saving and not scope.has_policy and type(decision) is Recompute and decision.policy is None:
        if not entry.settled:
            entry.was_of_no_use(module, "it is called inside of what is recomputed as a whole")
        return call(*args, **kwargs)
    entry.settled = True
    outside, scope.path = scope.path, decided.name
    try:
        return call_part(scope, decided.name, decision, call, args, kwargs, options=decided.options)
    finally:
        scope.path = outside


def _run_watched(
    module: Module,
    entry: Entry,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    """Run a region and see whether it lets go of anything that would not be there anyway."""
    there = set(map(storage_key, find_tensors(args, kwargs)[0]))

    def watch(tensor: Tensor, fate: str) -> None:
        if not entry.settled and not is_parameter(tensor) and storage_key(tensor) not in there:
            entry.settled = True

    result = run_region(call, args, kwargs, options, watch=watch)
    if not entry.settled:
        entry.was_of_no_use(module, "autograd saves nothing in there but inputs and weights, which are kept anyway")
    return result


# --- The classes of decided modules ---

_classes: weakref.WeakValueDictionary[type[Module], type[Module]] = weakref.WeakValueDictionary()


def _own_class(decided: type) -> type[Module]:
    """The class that a module had before it was decided."""
    own: type[Module] = decided.__bases__[1]
    return own


def _decided_class(own: type[Module]) -> type[Module]:
    made = _classes.get(own)
    if made is None:
        names = ("__module__", "__qualname__", "__doc__")
        namespace = {name: getattr(own, name) for name in names}
        kind: Any = type(own)
        made = _classes[own] = kind(own.__name__, (DecidedModule, own), namespace)
    return made


def _new_decided(own: type[Module], *args: Any) -> Module:
    made = _decided_class(own)
    return made.__new__(made, *args)


def _is_decided(kind: type) -> bool:
    """Whether a class is one of those made here, and no subclass that others made of it."""
    return DecidedModule in kind.__bases__


def install(module: Module, decided: Decided) -> None:
    """Let the calls of a module be decided."""
    kind = type(module)
    if not issubclass(kind, DecidedModule):
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{decided.name or 'the model'} is a scripted module, whose calls do not come through Python: decide "
                "for the module that calls it"
            )
        try:
            object.__setattr__(module, "__class__", _decided_class(kind))
        except TypeError as error:
            raise TypeError(
                f"{decided.name or 'the model'} ({kind.__name__}) cannot be decided: its class cannot be derived from "
                f"({error}). Use recollect.composable.checkpoint for it"
            ) from error
    module.__dict__[_KEY] = decided


def decided_of(module: Module) -> Decided | None:
    """What was decided for a module, if anything was."""
    found: Decided | None = module.__dict__.get(_KEY)
    return found


def take_off(module: Module) -> None:
    """Undo `install`."""
    module.__dict__.pop(_KEY, None)
    # Who derived another class from ours in the meantime keeps it; without a decision it does nothing.
    if _is_decided(type(module)):
        object.__setattr__(module, "__class__", _own_class(type(module)))
