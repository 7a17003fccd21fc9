"""One call of a named region that is kept (`Save`, or `Offload`: the same in a store).

- Forward. Hooks of its own are pushed over the frame's: what autograd saves inside is kept, except the region's
  arguments and views of them, which become slots of the frame, as they would if some later operator had saved
  them. The outputs are kept too, and the random state after the region.
- Replay. The function is not run: the arguments that were saved inside are packed again, in the same order, and the
  kept outputs are handed out as results that need grad, so that what follows packs as before.

Where that is not possible the function is run in the replay after all, and what it saves is let go of, but for
the arguments: an output was changed in place, or shares memory with an argument or another output; the region
changed its arguments; the kept outputs were used up by a backward that did not retain the graph; or they were not
kept in the first place. The last is for outputs that no replay ever asks for, because it stops before: whether one
does is remembered from step to step, per function and path.

Kept tensors pass the hooks around the frame (`_kept.py`). So a region around the frame decides first.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from recollect import _errors
from recollect._ambient import RandomState
from recollect._engine.scope import Scope
from recollect._inputs import (
    by_hand,
    copy_of,
    find_tensors,
    is_transparent,
    rebuild,
    versions_of,
    with_stride,
)
from recollect._kept import Kept, Slot, hooks_into, is_written, without_history
from recollect._steps import ByCode
from recollect._stores.chosen import store_of
from recollect._stores.store import Store
from recollect._torch import (
    Hooks,
    as_inner_result,
    graph_is_kept,
    in_dual_level,
    pop_hooks_of,
    push_hooks,
    storage_key,
    top_hooks,
)
from recollect._verify import OperatorTrace
from recollect.policy import Decision, Offload

P = ParamSpec("P")
R = TypeVar("R")


class Mark:
    """A named region in the journal: what was decided, and what its forward came to."""

    __slots__ = ("after", "decision", "packs_outputs", "path")

    def __init__(self, path: str, decision: Decision | None) -> None:
        self.path = path
        self.decision = decision
        self.after = 0  # the journal's position behind the region
        self.packs_outputs = False  # whether the outputs were kept


# --- Whether replays get as far as a region's outputs ---

# For the paths in a function, whether any replay came to the outputs; those without a replay are missing.
_reached: ByCode[dict[str, bool]] = ByCode(dict)


class _KeptRegion:
    """What a frame keeps of one call of a named region."""

    __slots__ = (
        "_fates",
        "_passed",
        "_visited",
        "after",
        "arguments",
        "before",
        "changes_arguments",
        "outputs",
        "path",
    )

    def __init__(self, fates: dict[str, bool], path: str, before: int) -> None:
        self.before = before  # how many slots the frame had when the region began
        self._passed = False  # whether the running replay came by
        self._fates = fates
        self.path = path
        self._visited = False  # and needed the outputs
        self.arguments: list[int] = []  # those that were saved inside, in order
        self.changes_arguments = False
        self.outputs: Any = None  # the result with an _Output for each tensor; None: not kept
        self.after: RandomState | None = None

    def may_be_reached(self) -> bool:
        return self._fates.get(self.path, True)

    def visited(self) -> None:
        self._visited = True
        self._fates[self.path] = True

    def comes(self, packed: int) -> bool:
        """The replay comes by; whether it does so where the forward did."""
        self._passed = True
        return packed == self.before

    def replay_ended(self, packed: int) -> bool:
        """Whether the replay came by, unless it ended before."""
        passed, visited = self._passed, self._visited
        self._passed = self._visited = False
        if not visited:
            self._fates.setdefault(self.path, False)
        return passed or packed <= self.before


class _Output:
    """A kept tensor of a region's result."""

    __slots__ = ("kept", "needs_grad")

    def __init__(self, kept: Kept, needs_grad: bool) -> None:
        self.kept = kept
        self.needs_grad = needs_grad


class _Argument:
    """Stands in a kept result for an argument that was returned."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


# --- Inside a kept region ---


def call_within(
    scope: Scope,
    hooks: Hooks | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_pinned: bool = False,
) -> Any:
    """Call the function of a kept region: nothing inside is decided by operators, and regions inside are kept too.

    What is pinned does not happen in the replays of the regions around either: they are not to see it.
    """
    outside, scope.saving = scope.saving, True
    around = [scope, *scope.outer()] if is_pinned else [scope]
    recorders = [one.recorder for one in around if one.recorder is not None]
    modes = [mode for one in around for mode in (*one.modes, one.trace) if mode is not None]
    paused = [mode for mode in modes if not mode.paused]
    for mode in paused:
        mode.paused = True
    for recorder in recorders:
        recorder.muted += 1
    try:
        if hooks is None:
            return function(*args, **kwargs)
        push_hooks(*hooks)
        try:
            return function(*args, **kwargs)
        finally:
            pop_hooks_of(hooks[0])
    finally:
        scope.saving = outside
        for mode in paused:
            mode.paused = False
        for recorder in recorders:
            recorder.muted -= 1


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


def _places(tensors: list[Tensor]) -> dict[int, int]:
    """Where in a call each of its tensors stands first, by identity."""
    places: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(id(tensor), index)
    return places


def _find_whole(tensor: Tensor, tensors: list[Tensor], places: dict[int, int]) -> int | None:
    """The argument that `tensor` is a view of."""
    base = tensor._base
    if base is None:
        return None
    index = places.get(id(base))
    if index is not None:
        return index if _is_plain_view(tensor, base) else None
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


def keep(
    scope: Scope, place: int, mark: Mark, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    frame = scope.frame
    tensors, flat = find_tensors(args, kwargs)
    versions = versions_of(tensors)
    kept = _KeptRegion(_reached[frame.function], mark.path, scope.packed())
    store = store_of(mark.decision) if isinstance(mark.decision, Offload) else None
    around, hooks = top_hooks(), None
    if around is not None and around[0] is scope.pack:  # else the function has pushed hooks of its own: they decide
        hooks = hooks_inside(scope, kept.arguments, kept.path, tensors, around, frame.around, store)
        around = frame.around
    given, contents = list(tensors), None if flat else _contents((args, kwargs))
    try:
        result = call_within(scope, hooks, function, args, kwargs)
    finally:
        tensors.clear()  # the hooks, which have it, live as long as the graph
    kept.changes_arguments = versions_of(given) != versions or (
        contents is not None and not _are_same(contents, _contents((args, kwargs)))
    )
    if scope.following:
        keeps = mark.packs_outputs
    else:
        mark.after = scope.position
        # Where random numbers are not preserved, running it again would draw others.
        may_be_reached = kept.may_be_reached() or not frame.options.preserve_rng_state
        keeps = not kept.changes_arguments and may_be_reached and not in_dual_level() and not _aliases(given, result)
        mark.packs_outputs = keeps
    if keeps:
        kept.outputs = _unseen(scope, _kept_result)(scope, result, given, around, store)
        kept.after = RandomState.like(frame.ambient)
    if frame.kept_regions is None:
        frame.kept_regions = {}
    frame.kept_regions[place] = kept
    return result


def _unseen(scope: Scope, function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose operators are none of the user's: the trace of `debug` does not show them."""
    trace: OperatorTrace | None = scope.trace
    return function if trace is None else trace.without(function)


def _contents(value: Any, seen: set[int] | None = None) -> list[Any]:
    """All that the containers in `value` hold, in order."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    if isinstance(value, dict):
        parts: Iterable[Any] = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, deque)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).values() if hasattr(value, "__dict__") else ()
    else:
        return [value]
    seen.add(id(value))
    return [one for part in parts for one in _contents(part, seen)]


def _are_same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(one is other for one, other in zip(before, after, strict=True))


def hooks_inside(
    scope: Scope,
    used: list[int],
    path: str,
    tensors: list[Tensor],
    outside: Hooks,
    around: Hooks | None,
    store: Store | None = None,
) -> Hooks:
    """Hooks that keep what autograd saves, but for the arguments `tensors` and views of them, noted in `used`."""
    frame, watch, places = scope.frame, scope.watch, _places(tensors)
    frame_pack, frame_unpack = outside

    def pack(tensor: Tensor) -> Any:
        index = places.get(id(tensor))
        if index is not None:
            used.append(index)
            return frame_pack(tensor)
        index = _find_whole(tensor, tensors, places)
        if index is not None:
            used.append(index)
            return _ViewOf(frame_pack(tensors[index]), tensor, tensors[index])
        if watch is not None:
            watch(tensor, "kept" if store is None else "offloaded")
        if around is not None:
            return Kept(tensor, hooks=around)
        if store is not None and is_written(tensor):
            return Kept(tensor, store=store)
        return Kept(without_history(tensor))

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Slot):
            return frame_unpack(packed)
        if isinstance(packed, _ViewOf):
            return packed.of(frame_unpack(packed.slot))
        frame.differentiated |= not frame.finished
        if packed.is_changed():
            raise _errors.kept_saved_tensor_changed(frame.region(), path)
        value: Tensor = packed.get()
        return value

    return pack, unpack


def call_with_store(
    decision: Offload, path: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function that is in no region: what autograd saves in it goes to a store."""
    if top_hooks() is not None:
        return function(*args, **kwargs)  # whoever is around decides
    pack, unpack = hooks_into(
        store_of(decision),
        lambda: _errors.kept_saved_tensor_changed(_errors.describe_function(function), path),
    )
    push_hooks(pack, unpack)
    try:
        return function(*args, **kwargs)
    finally:
        pop_hooks_of(pack)


def _is_odd(tensor: Tensor) -> bool:
    """Whether it cannot be made otherwise, or changes unseen.

    A view that was made without grad of something that needs it; a tensor made in inference mode.
    """
    return tensor.is_inference() or (tensor._base is not None and tensor.is_leaf and tensor.requires_grad)


def _aliases(arguments: list[Tensor], result: Any) -> bool:
    """Whether an output shares memory with an argument that it is not, or with another output, or cannot be told to."""
    if any(argument.is_inference() for argument in arguments):
        return True
    if isinstance(result, Tensor):
        if any(result is argument for argument in arguments):
            return False
        return _is_odd(result) or storage_key(result) in map(storage_key, arguments)
    if not is_transparent(result):
        return True
    memories = {storage_key(argument) for argument in arguments}
    given = {id(argument) for argument in arguments}
    seen: dict[int, int] = {}
    for output in find_tensors((result,), {})[0]:
        if id(output) not in given:
            memory = storage_key(output)
            if _is_odd(output) or memory in memories or seen.setdefault(memory, id(output)) != id(output):
                return True
    return False


def _kept_result(scope: Scope, result: Any, arguments: list[Tensor], around: Hooks | None, store: Store | None) -> Any:
    # In a list, because a result of None means something.
    if isinstance(result, Tensor) and not any(result is argument for argument in arguments):
        return [_kept_output(scope, result, around, store)]
    made: dict[int, Any] = {id(argument): _Argument(index) for index, argument in enumerate(arguments)}

    def keep(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            made[id(tensor)] = _kept_output(scope, tensor, around, store)
        return made[id(tensor)]

    return [rebuild(result, Tensor, keep)]


def _kept_output(scope: Scope, tensor: Tensor, around: Hooks | None, store: Store | None) -> _Output:
    needs_grad = tensor.requires_grad
    if needs_grad and tensor.is_leaf and tensor._base is None:
        return _Output(Kept(tensor), needs_grad=False)
    if scope.watch is not None:
        scope.watch(tensor, "kept" if store is None else "offloaded")
    if store is not None and around is None:
        return _Output(Kept(tensor, store=store), needs_grad)
    return _Output(Kept(tensor.detach(), hooks=around), needs_grad)


# --- In the replay ---


def replay(
    scope: Scope, place: int, mark: Mark, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    regions = scope.frame.kept_regions
    kept = None if regions is None else regions.get(place)
    if kept is not None and not kept.comes(scope.packed()):
        raise _errors.other_regions(scope.frame.region(), mark.path)
    if kept is None or kept.changes_arguments:  # None: a backward inside the region, which has not ended yet
        if kept is not None:
            kept.visited()
        return _run_again(scope, find_tensors(args, kwargs)[0], function, args, kwargs)
    tensors = find_tensors(args, kwargs)[0]
    by_hand.packing = True
    try:
        for index in kept.arguments:
            scope.pack(tensors[index])
    finally:
        by_hand.packing = False
    kept.visited()  # if the replay stops, it does so above
    # A backward inside the function may go through the region: then its history is needed.
    if kept.outputs is not None and not scope.frame.differentiated:
        try:
            result = _unseen(scope, _hand_out)(kept.outputs, tensors, mark.path)
            if scope.recorder is not None:
                scope.recorder.adopt(result)
        except _errors.SavedTensorChangedError:
            pass
        else:
            scope.position = mark.after
            if kept.after is not None:
                kept.after.put()
            if not graph_is_kept():
                kept.outputs = None
            return result
    return _run_again(scope, [], function, args, kwargs)


def _hand_out(outputs: Any, tensors: list[Tensor], path: str) -> Any:
    """The kept result; raises SavedTensorChangedError if a part of it was changed in place."""
    made: dict[int, Tensor] = {}

    def give(output: _Output | _Argument) -> Tensor:
        if isinstance(output, _Argument):
            return tensors[output.index]
        if id(output) in made:
            return made[id(output)]
        kept = output.kept
        if kept.is_changed():
            raise _errors.SavedTensorChangedError
        value: Tensor = kept.get()
        if graph_is_kept() and kept.may_be_changed_in_replay():
            value = copy_of(value)
        if output.needs_grad:
            value = as_inner_result(value, tensors, _errors.served_from_memory(path))
        elif not value.requires_grad:
            value = value.detach()  # the caller may do to it what it likes
        made[id(output)] = value
        return value

    (result,) = outputs
    return give(result) if isinstance(result, _Output) else rebuild(result, (_Output, _Argument), give)


def _run_again(
    scope: Scope, tensors: list[Tensor], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a kept region in the replay. Its graph is of no use, and what it saves belongs to nobody but `tensors`."""
    frame_pack, places = scope.pack, _places(tensors)

    def pack(tensor: Tensor) -> Tensor:
        index = places.get(id(tensor))
        if index is None:
            index = _find_whole(tensor, tensors, places)
        if index is not None:
            frame_pack(tensors[index])
        return tensor.detach() if tensor.requires_grad else tensor

    outside = top_hooks()
    owns_hooks = outside is not None and outside[0] is frame_pack
    try:
        return call_within(scope, (pack, _identity) if owns_hooks else None, function, args, kwargs)
    finally:
        tensors.clear()  # one that the region changed in place holds the hooks


def _identity(packed: Tensor) -> Tensor:
    return packed
