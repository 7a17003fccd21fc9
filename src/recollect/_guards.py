"""What a region depends on besides its arguments: watched, and put back for a replay where that is possible.

- `Training`: whether modules are in training or in evaluation; put back for the replay.
- `Buffers`: what the function changes in place outside of itself; a replay starts from what the forward started
  from, and leaves behind what it found.
- `Leaves`: weights, which must be the same and unchanged: that cannot be put back, and is an error.
- `Stepped`: notices in a replay that it reads a parameter that an optimizer has stepped since the forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._digest import copies, overwrite
from recollect._inputs import versions_of
from recollect._known import Known
from recollect._record import Recorder
from recollect._torch import OperatorMode, put_versions, without_torch_function

Undo = Any


class Training:
    """The modules of a function, and whether each was in training."""

    __slots__ = ("_flags", "_modules")

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules
        self._flags = [module.training for module in modules]

    def restore(self) -> Undo | None:
        now = [module.training for module in self._modules]
        if now == self._flags:
            return None
        self._put(self._flags)
        return partial(self._put, now)

    def _put(self, flags: list[bool]) -> None:
        for module, flag in zip(self._modules, flags, strict=True):
            module.training = flag


class Buffers:
    """Tensors that a function changes in place, with what they held before, where the function reads that."""

    __slots__ = ("_before", "_tensors")

    def __init__(self, tensors: Sequence[weakref.ref[Tensor]], before: Sequence[Tensor | None]) -> None:
        self._tensors = tensors
        self._before = before

    @classmethod
    def of(cls, known: Known) -> Buffers | None:
        """As they are now, for a forward that is about to begin."""
        if not known.writes:
            return None
        references: list[weakref.ref[Tensor]] = []
        before: list[Tensor | None] = []
        for reference, is_read in list(known.writes.values()):
            tensor = reference()
            if tensor is not None:
                references.append(reference)
                before.append(copies([tensor])[0] if is_read else None)
        return cls(references, before)

    @classmethod
    def recorded(cls, record: Recorder) -> Buffers | None:
        """As they were when a recorded forward first changed them."""
        writes = list(record.writes.values())
        return cls([write.tensor for write in writes], [write.before for write in writes]) if writes else None

    def restore(self) -> Undo | None:
        pairs = [(reference(), before) for reference, before in zip(self._tensors, self._before, strict=True)]
        tensors = [tensor for tensor, _ in pairs if tensor is not None]
        after, versions = copies(tensors), versions_of(tensors)

        def undo() -> None:
            overwrite(tensors, after)
            counted = [index for index, tensor in enumerate(tensors) if not tensor.is_inference()]
            put_versions([tensors[index] for index in counted], [versions[index] for index in counted])

        read = [(tensor, before) for tensor, before in pairs if tensor is not None and before is not None]
        overwrite([tensor for tensor, _ in read], [before for _, before in read])
        return undo


# --- Weights ---


class Leaves:
    """The leaves that need grad which a region saved, itself or as a view, and those that it is known to read."""

    __slots__ = ("_arguments", "_known", "_versions", "by_slot", "watched")

    def __init__(self, arguments: Sequence[Tensor], known: Known) -> None:
        # Arguments have a guard of their own, and may come back through hooks as other tensors.
        self._arguments = arguments
        self._known = known
        self.by_slot: dict[int, Tensor] = {}
        self.watched: list[Tensor] = []  # must not change
        self._versions: list[int] = []

    def saved(self, index: int, tensor: Tensor) -> None:
        """Take note of a saved tensor that may be a leaf or a view of one."""
        with without_torch_function():
            # A view made without grad is a leaf, with a history: its base counts.
            leaf = tensor if tensor._base is None else tensor._base
            if leaf.is_leaf and leaf.requires_grad and not self._is_argument(leaf):
                self.by_slot[index] = leaf

    def _is_argument(self, leaf: Tensor) -> bool:
        with without_torch_function():
            return any(one is leaf or one._base is leaf for one in self._arguments)

    def forward_ended(self, record: Recorder | None) -> None:
        """The versions that count are those after the forward: what it changes itself is its own affair."""
        if record is None and not self.by_slot and not self._known.reads:
            self._arguments = ()
            return
        read: list[Tensor | None] = []
        if record is not None:
            read = [one.tensor() for one in record.reads.values()]
            for index, leaf in list(self.by_slot.items()):
                if record.made(leaf):
                    del self.by_slot[index]
        elif self._known.reads:
            read = [reference() for reference in self._known.reads]
        leaves = {id(leaf): leaf for leaf in self.by_slot.values()}
        for tensor in read:
            if tensor is not None and tensor.requires_grad and tensor.is_leaf and not self._is_argument(tensor):
                leaves[id(tensor)] = tensor
        self._arguments = ()
        self.watched = list(leaves.values())
        self.note_versions()

    def note_versions(self) -> None:
        """Take the versions of now for those that count."""
        if self.watched:
            self._versions = versions_of(self.watched)

    def find_change(self) -> Tensor | None:
        """The first that was changed in place since."""
        if not self.watched or versions_of(self.watched) == self._versions:
            return None
        pairs = zip(self.watched, versions_of(self.watched), self._versions, strict=True)
        return next(leaf for leaf, now, then in pairs if now != then)

    def is_another(self, index: int, tensor: Tensor) -> bool:
        """Whether a replay saves another leaf than the forward did, and not one that the function makes each time."""
        leaf = self.by_slot[index]
        if tensor is leaf:
            return False
        with without_torch_function():
            if tensor._base is leaf:
                return False
        if isinstance(leaf, torch.nn.Parameter):
            return True
        # If nobody but the graph and this guard holds it, it was made by the function.
        mine = sum(one is leaf for one in (*self.by_slot.values(), *self.watched))
        return not self._known.is_lenient and getrefcount(leaf) - mine > _ONLY_IN_THE_GRAPH


def _count_in_graph() -> int:
    leaf = torch.ones(1, requires_grad=True)
    result = leaf * 2
    count = getrefcount(leaf)
    del result
    return count


with torch.enable_grad(), torch.inference_mode(False):
    _ONLY_IN_THE_GRAPH = _count_in_graph()


class Stepped(OperatorMode):
    """Looks for parameters among the arguments of operators."""

    def __init__(self, suspects: set[int]) -> None:
        super().__init__()
        self._suspects = suspects
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
                if id(owner) in self._suspects:
                    self.found = owner
            elif isinstance(value, (list, tuple)):
                self._look(value)


def name_of(tensor: Tensor, modules: Sequence[torch.nn.Module]) -> str:
    """`the parameter 'mlp.up.weight' of Block`, or what kind of tensor it is."""
    for module in modules:
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, one in named:
                if one is tensor:
                    return f"the {kind} {name!r} of {type(module).__name__} ({_errors.describe_tensor(tensor)})"
    if isinstance(tensor, torch.nn.Parameter):
        return f"a parameter ({_errors.describe_tensor(tensor)})"
    leaf = "a leaf" if tensor.is_leaf and tensor.requires_grad else "a tensor"
    return f"{leaf} from outside of the function ({_errors.describe_tensor(tensor)})"
