"""Inputs of regions that ranks hold in copies: kept as one part per rank, gathered for the replay.

What is taken: tensors that were computed and need grad, large enough, of plain memory. A replicated DTensor is taken by
its local tensor; one that is sharded over these ranks is in parts already, and stays. Each tensor is cut into as many
parts of equal length as there are ranks, in the order of memory; the last ones are filled up with zeros where its
length is no multiple of that. A tensor that several regions are given is kept once.

The order of collectives. All ranks must begin the same gathers in the same order, so nothing here goes by what a rank
may have to itself: neither by time, nor by free memory, nor by what the garbage collector has left. A region is
gathered when its replay asks, and then its predecessor is begun too: the last region that autograd's graph leads to
from its inputs, if the running backward comes to that one at all. Both are the same on all ranks if graph and backward
are. What was begun for a pass counts for that pass alone.

No rank waits for another in vain because of what was dropped: a graph that dies without a backward begins no gather,
and one that was begun and is not asked for has been begun on all ranks. It is held until it is done.

Whether they are copies is compared, by digests of all bits, in the forward of regions whose replay is to be compared by
value: in the first step, or always.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from recollect import _errors
from recollect._digest import digest
from recollect._inputs import Arguments, is_parameter, name_of_tensor
from recollect._kept import without_history
from recollect._shard import Shard, Team, team_of
from recollect._torch import (
    Hooks,
    StorageReference,
    all_gather,
    at_end_of_pass,
    can_be_recorded,
    dtensor_like,
    graph_task_id,
    has_plain_memory,
    local_copy_of,
    node_number,
    sequence_number,
    storage_key,
    version_of,
    waited_for,
    will_run,
)

# --- One tensor ---


class _Part:
    """This rank's part of a tensor, and what makes a tensor of all parts."""

    __slots__ = ("__weakref__", "_dtype", "_length", "_shape", "_storage", "_stride", "values")

    def __init__(self, tensor: Tensor, team: Team) -> None:
        flat, self._stride = _in_order_of_memory(tensor)
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._storage = StorageReference(tensor.untyped_storage())  # so that its key is not another's
        self._length = flat.numel()
        length = -(-self._length // len(team))
        own = flat[team.rank * length : (team.rank + 1) * length]
        if own.numel() < length:
            values = own.new_zeros(length)
            values[: own.numel()].copy_(own)
        else:
            values = own.clone()
        self.values = values.view(torch.uint8)

    def of(self, gathered: Tensor) -> Tensor:
        """The tensor, of all parts one after the other."""
        values = gathered.view(self._dtype)
        if self._stride is not None:
            return values.as_strided(self._shape, self._stride).detach()
        return values[: self._length].view(self._shape).detach()


def _in_order_of_memory(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """The values in a row, and the strides with which they make the tensor; None if that takes them in their order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    stride = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -stride[dimension])
    permuted = tensor.permute(order)
    if permuted.is_contiguous():
        return permuted.reshape(-1), stride
    return tensor.reshape(-1), None


_parts: dict[tuple[Any, ...], weakref.ref[_Part]] = {}


def _part_of(tensor: Tensor, team: Team) -> _Part:
    """A new part, or the one that is kept of the same values already."""
    place = storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
    key = (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg(), version_of(tensor), team.ranks)
    part = _Part(tensor, team)
    known = _parts.get(key)
    kept = None if known is None else known()
    # A change through `.data` leaves the version as it was, so values are looked at: of this part alone, and only
    # where a region is given what one before it was.
    if kept is not None and can_be_recorded() and torch.equal(kept.values, part.values):
        return kept
    _parts[key] = weakref.ref(part, partial(_forget, key))
    return part


def _forget(key: tuple[Any, ...], reference: weakref.ref[_Part]) -> None:
    if _parts.get(key) is reference:
        del _parts[key]


class _Arrival:
    """All parts of a tensor, on their way."""

    __slots__ = ("_work", "memory")

    def __init__(self, part: _Part, team: Team) -> None:
        self._work: Any = None
        own = part.values
        self.memory = torch.empty(len(team) * own.numel(), dtype=own.dtype, device=own.device)
        self._work = all_gather(self.memory, own, team.group)

    def take(self) -> Tensor:
        self._work.wait()
        self._work = None
        return self.memory

    def __del__(self) -> None:
        if self._work is not None and not self._work.is_completed():
            _abandoned.append((self._work, self.memory))


_abandoned: list[tuple[Any, Tensor]] = []  # those that nobody asked for and that are not done: they write to memory


class _Begun(dict[int, _Arrival]):
    """What is on its way for one pass, which owns it: what nobody asks for is gone with it, also if it fails."""

    def __call__(self) -> None:
        """The pass has ended. Who owns it may live on."""
        self.clear()


# --- One region ---


class _Whole:
    """A tensor that is not cut."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Cut:
    """One that is: its number in the region, and the DTensor that it is inside of, if it is, without its values."""

    __slots__ = ("index", "like")

    def __init__(self, index: int, like: Any) -> None:
        self.index = index
        self.like = like


class Gathering:
    """The inputs of one region call: saved-tensor hooks for them."""

    _begun_for = -1  # the pass for which parts were begun last
    _arrivals: weakref.ref[_Begun] | None = None
    _asked_in = -1  # the last pass that came for one
    _before: tuple[Any, weakref.ref[Gathering]] | None = None  # the region before this one, and a node of it

    def __init__(self, team: Team, shard: Shard) -> None:
        self._team = team
        self._shard = shard
        self._parts: list[_Part] = []
        self._cut: list[tuple[Tensor, Tensor]] = []  # until the forward begins: tensors that were cut, and their values
        self._begun = 0

    @property
    def hooks(self) -> Hooks:
        return self._pack, self._unpack

    def _pack(self, tensor: Tensor) -> _Whole | _Cut:
        values: Tensor | None = tensor
        like = None
        if type(tensor) is not Tensor and tensor.requires_grad:
            values = waited_for(tensor)
            if values is tensor:
                values, like = local_copy_of(tensor, self._team.ranks)
        if values is None or not self._takes(tensor, values):
            return _Whole(without_history(tensor))
        self._cut.append((tensor, values))
        self._parts.append(_part_of(values, self._team))
        return _Cut(len(self._parts) - 1, like)

    def _takes(self, tensor: Tensor, values: Tensor) -> bool:
        return (
            tensor.requires_grad
            and tensor.grad_fn is not None
            and type(values) is Tensor
            and has_plain_memory(values)
            and values.nbytes >= max(int(self._shard.min_bytes), 1)
            and values.nbytes <= values.untyped_storage().nbytes()  # an expanded one would be kept several times
            and not is_parameter(tensor)
        )

    def begin(self, region: Callable[[], str], arguments: Arguments, *, compares: bool) -> None:
        """All inputs are packed, and the forward begins; `compares` if it is to be seen that they are copies."""
        cut, self._cut = self._cut, []
        if compares:
            _compare(self._team, self._shard, region, arguments, cut)
        line = _here.line
        if cut and line:
            self._before = _region_before([tensor.grad_fn for tensor, _ in cut], line)
        self._begun = sequence_number()

    def forward_ended(self, *, saved: bool) -> None:
        """The region has come to its end; `saved` if autograd saved anything there, so that a replay may come."""
        if self._parts and saved:
            _here.add(self._begun, sequence_number(), self)

    # --- In backward ---

    def _unpack(self, packed: _Whole | _Cut) -> Tensor:
        if isinstance(packed, _Whole):
            return packed.tensor
        index, task = packed.index, graph_task_id()
        with _lock:
            if task < 0:
                arrival = self._begin(index)
            else:
                arrivals = None if self._begun_for != task or self._arrivals is None else self._arrivals()
                if arrivals is None or index not in arrivals:
                    arrivals = self._begin_all(task)
                arrival = arrivals.pop(index)
                if self._asked_in != task:
                    self._asked_in = task
                    self._begin_what_follows(task)
        tensor = self._parts[index].of(arrival.take())
        return tensor if packed.like is None else dtensor_like(packed.like, tensor)

    def _begin(self, index: int) -> _Arrival:
        _abandoned[:] = [one for one in _abandoned if not one[0].is_completed()]
        return _Arrival(self._parts[index], self._team)

    def _begin_all(self, task: int) -> _Begun:
        arrivals = _Begun((index, self._begin(index)) for index in range(len(self._parts)))
        at_end_of_pass(arrivals)
        self._begun_for, self._arrivals = task, weakref.ref(arrivals)
        return arrivals

    def _begin_what_follows(self, task: int) -> None:
        if self._before is None:
            return
        node, reference = self._before
        before = reference()
        if before is not None and before._begun_for != task and will_run(node):
            before._begin_all(task)


_lock = threading.RLock()


# --- Which region is before another ---

_Line = list[tuple[int, int, weakref.ref[Gathering]]]
_FAR = 256  # so many nodes are looked at; the same on all ranks


class _Here(threading.local):
    """The regions of this thread in the order of their forwards: the numbers of autograd's nodes in each."""

    def __init__(self) -> None:
        self.line: _Line = []
        self._alive = 16

    def add(self, begun: int, ended: int, gathering: Gathering) -> None:
        if len(self.line) > 2 * self._alive:
            self.line = [one for one in self.line if one[2]() is not None]
            self._alive = max(16, len(self.line))
        self.line.append((begun, ended, weakref.ref(gathering)))


_here = _Here()


def _region_before(nodes: Sequence[Any], line: _Line) -> tuple[Any, weakref.ref[Gathering]] | None:
    """The last region that the graph leads to from some nodes, with a node of it."""
    first = line[0][0]  # not what is found, but where to stop looking
    waiting = [(-node_number(node), place, node) for place, node in enumerate(nodes)]
    heapq.heapify(waiting)
    seen = set()
    for _ in range(_FAR):
        if not waiting or -waiting[0][0] < first:
            return None
        number, _, node = heapq.heappop(waiting)
        found = _region_at(-number, line)
        if found is not None:
            return node, found
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                heapq.heappush(waiting, (-node_number(after), len(seen) + len(nodes), after))
    return None


def _region_at(number: int, line: _Line) -> weakref.ref[Gathering] | None:
    for begun, ended, reference in reversed(line):
        if begun <= number < ended:
            # One that is gone counts as if it had been taken out of the line already, as it may have been elsewhere.
            return None if reference() is None else reference
        if ended <= number:
            return None
    return None


# --- Whether they are copies ---


def _compare(
    team: Team,
    shard: Shard,
    region: Callable[[], str],
    arguments: Arguments,
    cut: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Raise, on all ranks alike, if they do not have the same tensors to cut. A collective."""
    own = [(_errors.describe_tensor(values), values.stride(), _bits(values)) for _, values in cut]
    everybody: list[Any] = [None] * len(team)
    distributed.all_gather_object(everybody, own, group=team.group)
    if all(one == own for one in everybody):
        return
    first, count = everybody[0], min(map(len, everybody))
    where = next((index for index in range(count) if any(one[index] != first[index] for one in everybody)), None)
    name = "" if where is None else name_of_tensor(arguments, cut[where][0])
    seen = [f"{len(one)} of them" if where is None else one[where][0] for one in everybody]
    others = [rank for rank, one in zip(team.ranks, everybody, strict=True) if one != first]
    raise _errors.inputs_differ(region(), repr(shard), name, dict(zip(team.ranks, seen, strict=True)), others)


_PIECE = 2**22  # what is made of one on the way, 64-bit integers, is bounded
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> list[int]:
    """What stands for all bits of a tensor: floating-point digests may overlook the last ones."""
    flat, _ = _in_order_of_memory(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    pieces = flat.view(_INTEGERS[flat.itemsize]).split(_PIECE)
    numbers = [part for piece in pieces for part in digest(piece) or ()]
    found: list[int] = torch.cat(numbers).tolist()
    return found


def gather_later(shard: Shard, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Gathering | None:
    """What keeps the inputs of a region in parts; None if there is but one rank to keep them."""
    team = team_of(shard, function, tensors)
    return Gathering(team, shard) if len(team) > 1 else None
