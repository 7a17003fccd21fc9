"""Inside a part of a function that is kept: what becomes of the tensors that autograd saves there, and who looks on.

Hooks are pushed over the frame's. They keep what autograd saves, except the part's arguments and views of them: those
become slots of the frame, as they would if some later operator had saved them.

A kept part has no other inside, so one pair of hooks serves all those of one run of a function, in turn. `Inside` is
what the hooks know of the one that is open. They live as long as the graph: when a part ends, nothing of it may be
left there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._engine.scope import Scope
from recollect._inputs import by_hand, with_stride
from recollect._kept import Kept, is_written, without_history
from recollect._stores.store import Store
from recollect._torch import Hooks, pop_hooks, pop_hooks_of, push_hooks

# A kept part as its hooks see it: its path; the tensors of its arguments, and their identities; a list that takes the
# places of those that autograd saves, in order; and a store for what is kept.
Part = tuple[str, Sequence[Tensor], list[int], list[int], Store | None]
NO_PART: Part = ("", (), [], [], None)


class Inside:
    """Which kept part is open."""

    __slots__ = ("part",)

    def __init__(self, part: Part = NO_PART) -> None:
        self.part = part


def hooks_of(inside: Inside, scope: Scope, outside: Hooks, around: Hooks | None) -> Hooks:
    """The hooks: `outside` are those of the frame, and what is kept is handed to `around`, where there are any."""
    frame, watch = scope.frame, scope.watch
    frame_pack, frame_unpack = outside

    def pack(tensor: Tensor) -> Any:
        path, tensors, given, used, store = inside.part
        if id(tensor) in given:
            used.append(given.index(id(tensor)))
            return frame_pack(tensor)
        if tensor._base is not None:
            index = find_whole(tensor, tensors, given)
            if index is not None:
                used.append(index)
                return _ViewOf(frame_pack(tensors[index]), tensor, tensors[index])
        if watch is not None:
            watch(tensor, "kept" if store is None else "offloaded")
        if around is not None:
            kept = Kept(tensor, hooks=around, is_being_saved=True)
        elif store is not None and is_written(tensor):
            kept = Kept(tensor, store=store)
        else:
            kept = Kept(without_history(tensor))
        kept.path = path
        return kept

    def unpack(packed: Any) -> Tensor:
        if type(packed) is int:  # a slot
            return frame_unpack(packed)
        if type(packed) is _ViewOf:
            return packed.of(frame_unpack(packed.slot))
        frame.differentiated |= not frame.finished
        if packed.is_changed():
            raise _errors.kept_saved_tensor_changed(frame.region(), packed.path)
        value: Tensor = packed.get()
        return value

    return pack, unpack


def call_within(
    scope: Scope,
    hooks: Hooks | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_pinned: bool = False,
) -> Any:
    """Call the function of a kept part: nothing inside is decided by operators, and regions inside are kept too.

    What is pinned does not happen in the replays of the regions around either: they are not to see it.
    """
    resume = None
    if is_pinned or scope.modes or scope.trace is not None or scope.recorder is not None:
        resume = _hush((scope, *scope.outer()) if is_pinned else (scope,))
    outside, scope.saving = scope.saving, True
    try:
        if hooks is None:
            return function(*args, **kwargs)
        try:
            push_hooks(*hooks)
            result = function(*args, **kwargs)
        except BaseException:
            pop_hooks_of(hooks[0])
            raise
        pop_hooks()
        return result
    finally:
        scope.saving = outside
        if resume is not None:
            resume()


def call_unseen(scope: Scope, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of ours: what it runs to keep or to hand out is no operator of the user's to anybody who looks.

    Else one that counts operators would take a copy made here for the function's own.
    """
    if scope.around is None and not scope.modes and scope.trace is None and scope.recorder is None:
        return function(*args)
    resume = _hush((scope, *scope.outer()))
    try:
        return function(*args)
    finally:
        resume()


def _hush(scopes: Iterable[Scope]) -> Callable[[], None]:
    """Let nobody who looks at the operators of these functions see any; gives what undoes it."""
    recorders = [one.recorder for one in scopes if one.recorder is not None]
    modes = [mode for one in scopes for mode in (*one.modes, one.trace) if mode is not None]
    paused = [mode for mode in modes if not mode.paused]
    for mode in paused:
        mode.paused = True
    for recorder in recorders:
        recorder.muted += 1

    def resume() -> None:
        for mode in paused:
            mode.paused = False
        for recorder in recorders:
            recorder.muted -= 1

    return resume


def pack_again(scope: Scope, tensors: Sequence[Tensor], used: Sequence[int]) -> None:
    """In a replay that does not run a part: pack the arguments that were saved in it."""
    if not used:
        return
    by_hand.packing = True
    try:
        for index in used:
            scope.pack(tensors[index])
    finally:
        by_hand.packing = False


# --- Arguments, and views of them ---


class _ViewOf:
    """A saved tensor that is a view of an argument: the argument's slot, and how to get from one to the other."""

    needs_replay = True
    __slots__ = ("_argument_stride", "_offset", "_shape", "_stride", "slot")

    def __init__(self, slot: Any, tensor: Tensor, argument: Tensor) -> None:
        self.slot = slot
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._argument_stride = argument.stride()
        self._offset = tensor.storage_offset() - argument.storage_offset()

    def of(self, argument: Tensor) -> Tensor:
        if argument.stride() != self._argument_stride:  # a parent's hooks may give the values in another order
            argument = with_stride(argument, self._argument_stride)
        return argument.as_strided(self._shape, self._stride, argument.storage_offset() + self._offset)


def find_whole(tensor: Tensor, tensors: Sequence[Tensor], given: list[int]) -> int | None:
    """The argument that `tensor` is a view of; `given` are the identities of the arguments."""
    base = tensor._base
    if base is None:
        return None
    if id(base) in given:
        return given.index(id(base)) if _is_plain_view(tensor, base) else None
    relatives = (index for index, one in enumerate(tensors) if one._base is base and _covers(one, tensor))
    return next(relatives, None)


def _is_plain_view(tensor: Tensor, of: Tensor) -> bool:
    """Whether `tensor` reads the memory of another as that one does, only in another order."""
    return (
        type(tensor) is type(of) is Tensor
        and tensor.layout is of.layout is torch.strided
        and (tensor.dtype, tensor.is_conj(), tensor.is_neg()) == (of.dtype, of.is_conj(), of.is_neg())
    )


def _covers(argument: Tensor, tensor: Tensor) -> bool:
    """Whether an argument without gaps holds all the memory of `tensor`, a view of the same base."""
    if not _is_plain_view(tensor, argument) or not tensor.numel() or not argument.numel():
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    if span != argument.numel():
        return False
    first = tensor.storage_offset() - argument.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first >= 0 and last < argument.numel()
