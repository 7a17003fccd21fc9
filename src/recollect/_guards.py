"""What must not have changed since the forward when a replay runs: it cannot be put back, and is an error.

- `Leaves`: weights, which must be the same and unchanged.
- `Reading`: notices in a replay that it reads something that was changed, or stepped, since the forward.
- `Gathers`: notices in a function's first replay that modules inside gather their parameters for it alone.

What is put back for a replay instead: `_restored.py`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from recollect import _errors
from recollect._inputs import versions_of
from recollect._known import Known
from recollect._record import Recorder
from recollect._shards import are_one, source_of
from recollect._torch import (
    PLAIN_TYPES,
    OperatorMode,
    Sharded,
    gathers_twice,
    level_of_user_code,
    parameter_of,
    process_groups,
    storage_key,
    without_torch_function,
)

Undo = Any


# --- Weights ---


def _base_of(tensor: Tensor) -> Tensor | None:
    """What a tensor is a view of, without asking a subclass."""
    if type(tensor) in PLAIN_TYPES:
        return tensor._base
    with without_torch_function():
        return tensor._base


def leaf_of(tensor: Tensor) -> Tensor | None:
    """The leaf that needs grad and that a tensor is, or is a view of."""
    # A view made without grad is a leaf, with a history: its base counts.
    base = _base_of(tensor)
    leaf = tensor if base is None else base
    if type(leaf) in PLAIN_TYPES:
        return leaf if leaf.is_leaf and leaf.requires_grad else None
    with without_torch_function():
        return leaf if leaf.is_leaf and leaf.requires_grad else None


class _Gathered:
    """A weight that is gathered from shards, and how those were when a forward ended. Holds none of them."""

    __slots__ = ("_goes_away", "_shards", "_source", "_versions", "tensor")

    def __init__(self, tensor: Tensor, source: Sharded) -> None:
        shards = source.shards()
        self.tensor = weakref.ref(tensor)
        self._source = source
        self._goes_away = source.goes_away_after_forward()
        self._shards = [weakref.ref(shard) for shard in shards]
        self._versions = versions_of(shards)

    def is_changed(self, *, was_replayed: bool) -> bool:
        """Whether it was let go of since, and is gathered from others, or from the same ones changed in place."""
        source = self._source
        if not (self._goes_away or source.is_away() or (was_replayed and source.goes_away_after_backward())):
            return False
        shards = source.shards()
        return versions_of(shards) != self._versions or any(map(is_not, shards, (one() for one in self._shards)))


class Leaves:
    """The leaves that a region saved, themselves or as a view, and what else it is known to read from outside.

    Holds none of it. A graph holds its leaves; one that has died, inside the function or since, holds none.
    """

    # Defaults on the class: most of it is there only where a forward was recorded.
    _watched: Sequence[weakref.ref[Tensor]] = ()  # must not change
    _versions: Sequence[int] = ()
    _at_home: Sequence[Tensor | None] = ()  # the parameters that the function reads, where its modules have them
    _others: Sequence[weakref.ref[Tensor]] = ()
    _versions_of_others: Sequence[int] = ()
    _gathered: Sequence[_Gathered] = ()  # what of all that is gathered from shards
    _was_replayed = False

    def __init__(self, known: Known) -> None:
        self._known = known
        # With those that are arguments, until the forward has ended.
        self.by_slot: dict[int, weakref.ref[Tensor]] = {}

    def forward_ended(self, tensors: Sequence[Tensor], record: Recorder | None) -> Mapping[int, Tensor]:
        """The versions that count are those after the forward: what it changes itself is its own affair.

        The `tensors` of the arguments have a guard of their own. The other leaves that were saved are returned.
        """
        arguments = {id(one) for one in tensors} | {id(one._base) for one in tensors}
        saved = {slot: leaf for slot, one in self.by_slot.items() if (leaf := one()) is not None}
        if not arguments.isdisjoint(map(id, saved.values())):
            for slot in [slot for slot, leaf in saved.items() if id(leaf) in arguments]:
                del saved[slot], self.by_slot[slot]
        read: list[Tensor | None] = []
        if record is not None:
            read = [one.tensor() for one in record.reads.values() if one.memory not in record.changed]
            for slot in [slot for slot, leaf in saved.items() if record.made(leaf)]:
                del saved[slot], self.by_slot[slot]
        elif self._known.reads:
            read = [reference() for reference in self._known.reads]
            self._at_home = self._known.at_home()
        leaves = those_saved = {id(leaf): leaf for leaf in saved.values()}
        if record is not None and record.changed:
            leaves = {key: leaf for key, leaf in leaves.items() if storage_key(leaf) not in record.changed}
        others = {}
        for tensor in read:
            if tensor is None or id(tensor) in leaves or id(tensor) in arguments:
                continue
            if tensor.is_leaf and tensor.requires_grad:
                leaves[id(tensor)] = tensor
            elif not tensor.requires_grad:
                others[id(tensor)] = tensor
        watched = list(leaves.values())
        self._watched = list(map(weakref.ref, watched))
        self._versions = versions_of(watched)
        if process_groups:
            read_there = (*watched, *others.values())
            self._gathered = [_Gathered(one, source) for one in read_there if (source := source_of(one)) is not None]
        if others:
            self._others = [weakref.ref(tensor) for tensor in others.values()]
            self._versions_of_others = versions_of(list(others.values()))
        return those_saved

    def _there(self) -> list[Tensor]:
        """The watched leaves; no longer those that are gone."""
        there = [leaf for one in self._watched if (leaf := one()) is not None]
        if len(there) != len(self._watched):
            alive = set(map(id, there))
            pairs = zip(self._watched, self._versions, strict=True)
            self._versions = [then for one, then in pairs if id(one()) in alive]
            self._watched = list(map(weakref.ref, there))
        return there

    def _changed_leaves(self) -> list[Tensor]:
        there = self._there()
        pairs = zip(there, versions_of(there), self._versions, strict=True)
        return [leaf for leaf, now, then in pairs if now != then]

    def _gathered_anew(self) -> list[Tensor]:
        """What a replay reads of other values: its shards were changed in place since the forward, or replaced."""
        changed = [one.tensor() for one in self._gathered if one.is_changed(was_replayed=self._was_replayed)]
        return [tensor for tensor in changed if tensor is not None]

    def saved(self) -> list[Tensor]:
        """The leaves that stand in slots."""
        return [leaf for one in self.by_slot.values() if (leaf := one()) is not None]

    def read(self) -> list[Tensor]:
        """All that is watched."""
        return [*self._there(), *(tensor for one in self._others if (tensor := one()) is not None)]

    def replay_ended(self) -> None:
        """Take the versions of now for those that count: what the function itself changes is its own affair."""
        self._was_replayed = True
        if self._watched:
            self._versions = versions_of(self._there())

    def are_as_they_were(self) -> bool:
        """Whether everything that is watched is in its place and unchanged."""
        if self._watched and versions_of(self._there()) != self._versions:
            return False
        if self._others and self._changed_others():
            return False
        if self._gathered and self._gathered_anew():
            return False
        return not self._at_home or all(map(is_, self._at_home, self._known.at_home()))

    def find_change(self) -> Tensor | None:
        """The first saved leaf that was changed in place since."""
        saved = set(map(id, self.saved()))
        changed = self._changed_leaves() + self._gathered_anew()
        return next((leaf for leaf in changed if id(leaf) in saved), None)

    def changed(self, *, others: bool) -> list[Tensor]:
        """What else was changed in place since: read and not saved, `others` than leaves too."""
        found = self._changed_leaves()
        found += [one for one in self._gathered_anew() if others or one.requires_grad]
        return found + self._changed_others() if others else found

    def _changed_others(self) -> list[Tensor]:
        pairs = zip(self._others, self._versions_of_others, strict=True)
        there = [(tensor, then) for one, then in pairs if (tensor := one()) is not None]
        return [tensor for tensor, then in there if versions_of((tensor,)) != [then]]

    def is_another(self, slot: int, tensor: Tensor) -> bool:
        """Whether a replay saves another leaf than the forward did."""
        leaf = self.by_slot[slot]()
        return leaf is None or (tensor is not leaf and _base_of(tensor) is not leaf)

    def replaced(self) -> tuple[Tensor, Tensor | None] | None:
        """A parameter of a module in whose place another one stands now, and that one."""
        for (module, name), then in zip(self._known.homes, self._at_home, strict=False):
            owner = module()
            now = None if owner is None else parameter_of(owner, name)
            if then is None or owner is None or now is then or (now is not None and are_one(then, now)):
                continue
            return then, now
        return None


class Reading(OperatorMode):
    """Looks for some tensors among the arguments of operators, as long as what these compute is of use."""

    def __init__(self, suspects: Iterable[Tensor]) -> None:
        super().__init__()
        # By identity, which another one may get when they are gone.
        self._suspects = {id(one): weakref.ref(one) for one in suspects}
        self.found: Tensor | None = None
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.found is None and not self.paused:
            self._look((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def _look(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                owner = value if value._base is None else value._base
                suspect = self._suspects.get(id(owner))
                if suspect is not None and suspect() is owner:
                    self.found = owner
            elif isinstance(value, (list, tuple)):
                self._look(value)


class Gathers:
    """Warns, once per function, if modules in it gather their parameters for a replay and then again for backward."""

    __slots__ = ("_known", "_region")

    def __init__(self, known: Known, region: Callable[[], str]) -> None:
        self._known = known
        self._region = region

    def restore(self) -> Undo | None:
        if self._known.gathers_are_known:
            return None
        self._known.gathers_are_known = True
        found: list[str] = []

        def look(module: torch.nn.Module, _: object) -> None:
            if gathers_twice(module):
                found.append(type(module).__name__)

        handle = register_module_forward_pre_hook(look)

        def undo() -> None:
            handle.remove()
            if found:
                warnings.warn(_errors.gathered_twice(self._region(), len(found)), stacklevel=level_of_user_code())

        return undo


def name_of(tensor: Tensor, modules: Sequence[torch.nn.Module]) -> str:
    """`the parameter 'mlp.up.weight' of Block`, or what kind of tensor it is."""
    for module in modules:
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, one in named:
                if one is tensor or (kind == "parameter" and are_one(one, tensor)):
                    return f"the {kind} {name!r} of {type(module).__name__} ({_errors.describe_tensor(tensor)})"
    if isinstance(tensor, torch.nn.Parameter):
        return f"a parameter ({_errors.describe_tensor(tensor)})"
    leaf = "a leaf" if tensor.is_leaf and tensor.requires_grad else "a tensor"
    return f"{leaf} from outside of the function ({_errors.describe_tensor(tensor)})"
