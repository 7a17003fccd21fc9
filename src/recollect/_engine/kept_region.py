"""One call of a named region that is kept (`Save`, or `Offload`: the same in a store).

- Forward. What autograd saves inside is kept, except the region's arguments and views of them (inside.py). The
  outputs are kept too, and the random state after the region.
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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recollect import _errors
from recollect._ambient import access_to
from recollect._engine.inside import NO_PART, Inside, call_unseen, call_within, find_whole, hooks_of, pack_again
from recollect._engine.scope import Scope
from recollect._inputs import copy_of, find_tensors, is_transparent, rebuild, versions_of
from recollect._kept import Kept, hooks_into
from recollect._steps import ByCode
from recollect._stores.chosen import store_of
from recollect._stores.store import Store
from recollect._torch import (
    PLAIN_TYPES,
    Hooks,
    as_inner_result,
    graph_is_kept,
    in_transform,
    pop_hooks_of,
    push_hooks,
    storage_key,
    top_hooks,
)
from recollect.policy import Decision, Offload

if TYPE_CHECKING:
    from recollect._engine.frame import Frame


class Mark:
    """A named region in the journal: what was decided, and whether its outputs were kept.

    It does not change, so that the calls of a region share it. Whether outputs are kept is known when a call has ended:
    then the other form takes its place.
    """

    __slots__ = ("_other", "decision", "packs_outputs", "path")

    def __init__(self, path: str, decision: Decision | None, packs_outputs: bool = False) -> None:
        self.path = path
        self.decision = decision
        self.packs_outputs = packs_outputs
        self._other: Mark | None = None

    def with_outputs(self) -> Mark:
        if self._other is None:
            self._other = Mark(self.path, self.decision, True)
        return self._other


# Whether any replay came to the outputs of a region, by path in a function; those without a replay are missing.
_reached: ByCode[dict[str, bool]] = ByCode(dict)


class KeptRegions:
    """What a frame keeps of its named regions."""

    __slots__ = ("by_place", "put_random", "reached", "read_random")

    def __init__(self, frame: Frame) -> None:
        self.by_place: dict[int, _KeptRegion] = {}  # in the journal
        self.reached = _reached[frame.function]
        self.read_random, self.put_random = access_to(frame.ambient)

    def let_go(self) -> None:
        """Let go of all outputs."""
        for region in self.by_place.values():
            region.outputs = None

    def replay_ended(self, packed: int) -> str | None:
        """A replay that packed so many tensors has ended: the path of a region that it should have come by."""
        missed = None
        for region in self.by_place.values():
            if region.seen != _VISITED:
                self.reached.setdefault(region.path, False)
                if region.seen != _PASSED and region.before < packed:
                    missed = missed or region.path
            region.seen = _UNSEEN
        return missed


_UNSEEN, _PASSED, _VISITED = range(3)


class _KeptRegion:
    """What is kept of one call."""

    __slots__ = ("arguments", "before", "end", "outputs", "path", "random", "seen", "template", "version")

    def __init__(self, path: str, before: int, end: int, arguments: Sequence[int] | None) -> None:
        self.path = path
        self.before = before  # how many slots the frame had when the region began
        self.end = end  # the journal's position behind it
        self.arguments = arguments  # those that were saved inside, in order; None: it changed them
        self.seen = _UNSEEN  # by the running replay: it came by, and it needed the outputs
        self.outputs: Any = None  # what is kept of the result's tensors, each once; of an argument its place
        self.template: Any = _ALONE  # the result, with _Places for its tensors
        self.version: int  # of an output that is simply held, without its history
        self.random: Any  # where the random generators stood behind it


_ALONE = object()  # the result is a tensor, and `outputs` no list


class _Place:
    """Stands in a result for the tensor with this number."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


# --- In the forward ---


class _Keeper:
    """What the kept regions in one forward of a function have in common."""

    __slots__ = ("hooks", "inside", "is_simple", "regions")

    def __init__(self, scope: Scope) -> None:
        self.is_simple = scope.watch is None and scope.trace is None
        self.inside = Inside()
        self.hooks = hooks_of(self.inside, scope, (scope.pack, scope.unpack), scope.frame.around)
        # It is the frame's, and not the keeper, whose hooks hold the frame.
        self.regions = scope.frame.kept_regions = KeptRegions(scope.frame)


def keep(
    scope: Scope, place: int, mark: Mark, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    keeper: _Keeper = scope.keeper
    if keeper is None:
        keeper = scope.keeper = _Keeper(scope)
    call = _look_at(args, kwargs)
    tensors, given, _, _ = call
    path, before = mark.path, scope.packed()
    store = store_of(mark.decision) if type(mark.decision) is Offload else None
    used: list[int] = []
    around = top_hooks()
    if around is not None and around[0] is scope.pack:
        around, inside = scope.frame.around, keeper.inside
        inside.part = path, tensors, given, used, store
        try:
            result = call_within(scope, keeper.hooks, function, args, kwargs)
        finally:
            inside.part = NO_PART
    else:  # the function has pushed hooks of its own: they decide
        result = call_within(scope, None, function, args, kwargs)
    regions = keeper.regions
    is_usual = keeper.is_simple and store is None and around is None and _is_usual(call, result)
    is_unchanged = is_usual or _is_unchanged(call, args, kwargs)
    region = _KeptRegion(path, before, scope.position, tuple(used) if is_unchanged else None)
    keeps = mark.packs_outputs
    if not scope.following:
        # Where random numbers are not preserved, running it again would draw others.
        is_needed = regions.reached.get(path, True) or not scope.frame.options.preserve_rng_state
        keeps = is_needed and is_unchanged and (is_usual or _can_be_handed_out(call, result))
        if keeps:
            scope.frame.journal[place] = mark.with_outputs()
    if keeps:
        if is_usual:
            region.outputs, region.version = result.detach(), result._version
        else:
            call_unseen(scope, _keep_outputs, scope, region, result, given, around, store)
        region.random = regions.read_random()
    regions.by_place[place] = region
    return result


# A call: its tensors, their identities and versions, and what its containers hold. _PLAIN if it has nothing but tensors
# of no subclass, none of which was made in inference mode; None if it has no container that could change.
_Call = tuple[Sequence[Tensor], list[int], list[int], Any]
_PLAIN = object()


def _look_at(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    if not kwargs:
        given, versions = [], []
        try:
            for value in args:
                if type(value) not in PLAIN_TYPES:
                    break
                given.append(id(value))
                versions.append(value._version)
            else:
                return args, given, versions, _PLAIN
        except RuntimeError:
            pass
    tensors, flat = find_tensors(args, kwargs)
    return tensors, list(map(id, tensors)), versions_of(tensors), None if flat else _contents((args, kwargs))


def _is_usual(call: _Call, result: Any) -> bool:
    """Whether a call of plain tensors has changed none of them, and given one that is its own and needs grad.

    The short way to what `_is_unchanged` and `_can_be_handed_out` find out.
    """
    tensors, _, versions, contents = call
    if contents is not _PLAIN or type(result) is not Tensor or result.is_leaf or in_transform():
        return False
    memory = storage_key(result)
    for tensor, version in zip(tensors, versions):  # noqa: B905 - to say `strict` costs as much as the rest of it
        if tensor._version != version or storage_key(tensor) == memory:
            return False
    return True


def _is_unchanged(call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors, _, versions, contents = call
    if versions_of(tensors) != versions:
        return False
    return contents is None or contents is _PLAIN or _are_same(contents, _contents((args, kwargs)))


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


def _can_be_handed_out(call: _Call, result: Any) -> bool:
    """Not if an output shares memory with an argument that it is not, or with another output, or cannot be told to."""
    tensors, given, _, contents = call
    if in_transform() or (contents is not _PLAIN and any(map(Tensor.is_inference, tensors))):
        return False
    is_tensor = isinstance(result, Tensor)
    if not is_tensor and not is_transparent(result):
        return False
    memories = list(map(storage_key, tensors))
    for output in (result,) if is_tensor else _tensors_in(result):
        if id(output) not in given:
            memory = storage_key(output)
            if memory in memories or _is_odd(output):
                return False
            memories.append(memory)
    return True


def _tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a result, each once."""
    return list({id(output): output for output in find_tensors((result,), {})[0]}.values())


def _is_odd(tensor: Tensor) -> bool:
    """Whether it cannot be made otherwise, or changes unseen.

    A view that was made without grad of something that needs it; a tensor made in inference mode.
    """
    return (tensor._base is not None and tensor.is_leaf and tensor.requires_grad) or tensor.is_inference()


def _keep_outputs(
    scope: Scope, region: _KeptRegion, result: Any, given: list[int], around: Hooks | None, store: Store | None
) -> None:
    if isinstance(result, Tensor):
        region.outputs = _kept_output(scope, result, given, around, store)
        return
    outputs = _tensors_in(result)
    region.outputs = [_kept_output(scope, output, given, around, store) for output in outputs]
    numbers = {id(output): number for number, output in enumerate(outputs)}
    region.template = rebuild(result, Tensor, lambda output: _Place(numbers[id(output)]))


def _kept_output(
    scope: Scope, tensor: Tensor, given: list[int], around: Hooks | None, store: Store | None
) -> Kept | int:
    if id(tensor) in given:
        return given.index(id(tensor))
    needs_grad = tensor.requires_grad
    if needs_grad and tensor.is_leaf and tensor._base is None:
        return Kept(tensor)  # handed out as itself: gradients go there
    if scope.watch is not None:
        scope.watch(tensor, "kept" if store is None else "offloaded")
    if around is not None:
        kept = Kept(tensor.detach(), hooks=around)
    else:
        kept = Kept(tensor.detach()) if store is None else Kept(tensor, store=store)
    if needs_grad:
        kept.needs_grad = True
    return kept


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


# --- In the replay ---


def replay(
    scope: Scope, place: int, mark: Mark, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    frame = scope.frame
    regions: KeptRegions | None = frame.kept_regions
    region = None if regions is None else regions.by_place.get(place)
    tensors = find_tensors(args, kwargs)[0]
    if regions is None or region is None:  # a backward inside the region, which has not ended yet
        return _run_again(scope, tensors, function, args, kwargs)
    region.seen = _PASSED
    if scope.packed() != region.before:
        raise _errors.other_regions(frame.region(), region.path)
    if region.arguments is not None:
        pack_again(scope, tensors, region.arguments)  # the replay may stop here
    region.seen = _VISITED
    regions.reached[region.path] = True
    # A backward inside the function may go through the region: then its history is needed.
    if region.outputs is not None and not frame.differentiated:
        try:
            result = call_unseen(scope, _hand_out, region, tensors)
        except _errors.SavedTensorChangedError:
            pass
        else:
            if scope.recorder is not None:
                scope.recorder.adopt(result)
            scope.position = region.end
            regions.put_random(region.random)
            return result
    return _run_again(scope, tensors if region.arguments is None else (), function, args, kwargs)


def _hand_out(region: _KeptRegion, tensors: Sequence[Tensor]) -> Any:
    """The kept result; raises SavedTensorChangedError if a part of it was changed in place."""
    outputs, again = region.outputs, graph_is_kept()
    if not again:
        region.outputs = None
    if type(outputs) is Tensor:
        if outputs._version != region.version:
            raise _errors.SavedTensorChangedError
        return as_inner_result(outputs, tensors, _errors.served_from_memory(region.path))
    if region.template is _ALONE:
        return _output(outputs, tensors, region.path, again)
    given = [_output(one, tensors, region.path, again) for one in outputs]
    return rebuild(region.template, _Place, lambda place: given[place.index])


def _output(one: Kept | int, tensors: Sequence[Tensor], path: str, again: bool) -> Tensor:
    if isinstance(one, int):
        return tensors[one]
    if one.is_changed():
        raise _errors.SavedTensorChangedError
    value: Tensor = one.get()
    if again and one.may_be_changed_in_replay():
        value = copy_of(value)
    if one.needs_grad:
        return as_inner_result(value, tensors, _errors.served_from_memory(path))
    return value if value.requires_grad else value.detach()  # the caller may do to it what it likes


def _run_again(
    scope: Scope,
    arguments: Sequence[Tensor],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a kept region in the replay. Its graph is of no use, and what it saves is nobody's but `arguments`."""
    tensors = list(arguments)
    frame_pack, given = scope.pack, list(map(id, tensors))

    def pack(tensor: Tensor) -> Tensor:
        index = given.index(id(tensor)) if id(tensor) in given else find_whole(tensor, tensors, given)
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
