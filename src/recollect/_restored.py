"""What a replay finds as the forward found it, besides its arguments and the ambient state, and how it is left behind.

Each part has one method, `restore`, as those of `_ambient.py` have.

- `Training`: whether modules are in training or in evaluation.
- `Swapped`: parameters that are there only for the time of the forward.
- `Buffers`: what the function changes in place outside of itself; a replay starts from what the forward started
  from, and leaves behind what it found.
- `Rebound`: buffers in whose place the function puts others; `Bindings` finds them.

What a recorded run has changed is found by `lasting`, and undone by `put_back`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from recollect._digest import copies, overwrite
from recollect._inputs import versions_of
from recollect._known import Known
from recollect._record import Recorder, Write
from recollect._torch import own_tensors, put_versions, storage_key

Undo = Any


class Training:
    """The modules of a function, and whether each was in training."""

    __slots__ = ("_modules", "flags")

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules
        self.flags = list(map(_training, modules))

    def restore(self) -> Undo | None:
        now = list(map(_training, self._modules))
        if now == self.flags:
            return None
        self._put(self.flags)
        return partial(self._put, now)

    def _put(self, flags: list[bool]) -> None:
        for module, flag in zip(self._modules, flags, strict=True):
            module.training = flag


_training: Callable[[torch.nn.Module], bool] = attrgetter("training")


class _Swapping(threading.local):
    replays = 0  # how many run in this thread for which parameters were put back


swapping = _Swapping()


class Swapped:
    """Parameters and buffers that a module has only for the time of a forward: `functional_call` put them there."""

    __slots__ = ("_tensors",)

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        everything = {id(one): one for module in modules for one in module.modules()}
        self._tensors = [
            (own, name, tensor)
            for module in everything.values()
            for own in own_tensors(module)
            for name, tensor in own.items()
        ]

    def restore(self) -> Undo:
        before = [(own, name, own[name]) for own, name, _ in self._tensors if name in own]
        self._put(self._tensors)
        swapping.replays += 1

        def undo() -> None:
            swapping.replays -= 1
            self._put(before)

        return undo

    @staticmethod
    def _put(tensors: list[tuple[dict[str, Any], str, Any]]) -> None:
        for own, name, tensor in tensors:
            own[name] = tensor


class Bindings:
    """Which tensors the buffers of modules are: a function may put others in their place (`self.mean = ...`)."""

    __slots__ = ("_before",)

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._before = [(id(module), own, dict(own)) for module in modules for own in own_tensors(module)[1:]]

    def changed(self) -> set[tuple[int, str]]:
        """Where there are other tensors by now, by module and name."""
        return {
            (place, name)
            for place, own, before in self._before
            for name in {**before, **own}
            if own.get(name, Bindings) is not before.get(name, Bindings)
        }

    def of(self, places: Collection[tuple[int, str]]) -> Rebound | None:
        """Those at some places."""
        found = [
            (own, name, before.get(name, Bindings))
            for module, own, before in self._before
            for place, name in places
            if place == module
        ]
        return Rebound(found) if found else None


class Rebound:
    """Buffers in whose place the forward put others, or that it made."""

    __slots__ = ("_before",)

    def __init__(self, before: list[tuple[dict[str, Any], str, Any]]) -> None:
        self._before = before

    def restore(self) -> Undo:
        after = [(own, name, own.get(name, Bindings)) for own, name, _ in self._before]
        self._put(self._before)
        return partial(self._put, after)

    @staticmethod
    def _put(tensors: list[tuple[dict[str, Any], str, Any]]) -> None:
        for own, name, tensor in tensors:
            if tensor is Bindings:  # there was none
                own.pop(name, None)
            else:
                own[name] = tensor


class Buffers:
    """Tensors that a function changes in place, with what they held before, where the function reads that."""

    __slots__ = ("_before", "_tensors")

    def __init__(self, tensors: Sequence[Callable[[], Tensor | None]], before: Sequence[Tensor | None]) -> None:
        self._tensors = tensors
        self._before = before

    @classmethod
    def of(cls, known: Known) -> Buffers | None:
        """As they are now, for a forward that is about to begin."""
        if not known.writes and not known.unseen:
            return None
        references: list[Callable[[], Tensor | None]] = []
        before: list[Tensor | None] = []
        unseen: list[tuple[Callable[[], Tensor | None], bool]] = [(one, True) for one in known.unseen]
        for get, is_read in [*known.writes.values(), *unseen]:
            tensor = get()
            if tensor is not None:
                references.append(weakref.ref(tensor))
                before.append(copies([tensor])[0] if is_read else None)
        return cls(references, before)

    @classmethod
    def recorded(cls, record: Recorder) -> Buffers | None:
        """As they were when a recorded forward first changed them."""
        writes = list(record.writes.values())
        return cls([partial(_itself, one.alias) for one in writes], [one.before for one in writes]) if writes else None

    def memory(self) -> list[int]:
        """Whose memory they are."""
        return [storage_key(tensor) for reference in self._tensors if (tensor := reference()) is not None]

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


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def put_back(writes: Sequence[Write]) -> None:
    """Undo what a run that kept all of it has changed."""
    overwrite([one.alias for one in writes], [one.before for one in writes if one.before is not None])
    owners = [
        (owner, one.version) for one in writes if (owner := one.tensor()) is not None and not owner.is_inference()
    ]
    put_versions([owner for owner, _ in owners], [version for _, version in owners])


def lasting(record: Recorder, modules: Sequence[torch.nn.Module]) -> list[tuple[Tensor, Write]]:
    """What a recorded run changed, as tensors that will be there in the next one, and how.

    What was changed may have been a `.data` or a view of a buffer: then it is the buffer, or what else was read there.
    """
    there = {}
    for read in record.reads.values():
        tensor = read.tensor()
        if tensor is not None:
            there[read.memory] = tensor
    for module in modules:
        there.update((storage_key(one), one) for one in (*module.buffers(), *module.parameters()))
    found = []
    for memory, write in record.writes.items():
        lives = write.tensor()
        owner = there.get(memory, lives) if lives is None or lives._base is None else lives
        if owner is not None and (owner.is_leaf or not owner.requires_grad):
            found.append((owner, write))
    return found
