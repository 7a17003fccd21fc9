"""Which shards a gathered parameter comes from.

Under FSDP a function reads parameters that are gathered for it, and optimizers step others, the shards. What was
gathered keeps its identity and its version, also if the shards have changed meanwhile and it is gathered anew. So who
guards a parameter has to ask here what to look at besides.

What is known is looked up once per parameter. Nothing is kept alive by it. Where there are no ranks, nothing happens
here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from recollect._torch import Sharded, flattened, fully_sharded, mesh_of, process_groups

# By identity: what is known of a leaf, None if it is gathered from nowhere.
_leaves: dict[int, tuple[weakref.ref[Tensor], Sharded | None]] = {}
# By identity of a shard, or of what was taken for one: what is gathered from it.
_gathered: dict[int, dict[int, weakref.ref[Tensor]]] = {}


def source_of(leaf: Tensor) -> Sharded | None:
    """Where a leaf is gathered from; None if it is a parameter like any other, or none at all."""
    if not isinstance(leaf, Parameter):
        return None
    known = _leaves.get(id(leaf))
    if known is None or known[0]() is not leaf:
        for gathered, place in fully_sharded():
            _learn(gathered, place)
        known = _leaves.get(id(leaf))
        if known is None or known[0]() is not leaf:
            known = _learn(leaf, flattened(leaf))
    source = known[1]
    if source is not None:
        _tie(leaf, source.shards())
    return source


def is_gathered(tensor: Tensor) -> bool:
    """Whether it is gathered from anywhere."""
    return bool(process_groups) and source_of(tensor) is not None


def _learn(leaf: Tensor, source: Sharded | None) -> tuple[weakref.ref[Tensor], Sharded | None]:
    known = _leaves[id(leaf)] = weakref.ref(leaf, partial(_forget, _leaves, id(leaf))), source
    return known


def _tie(leaf: Tensor, shards: Iterable[Tensor]) -> None:
    """Note what a leaf is gathered from: loading a state may put other shards in the place of those before."""
    for shard in shards:
        there = _gathered_from(shard)
        if id(leaf) not in there:
            there[id(leaf)] = weakref.ref(leaf, partial(_forget, there, id(leaf)))


def _gathered_from(shard: Tensor) -> dict[int, weakref.ref[Tensor]]:
    there = _gathered.get(id(shard))
    if there is None:
        there = _gathered[id(shard)] = {}
        weakref.finalize(shard, _gathered.pop, id(shard), None)
    return there


def _forget(where: dict[int, Any], place: int, _: object) -> None:
    where.pop(place, None)


def gathered_from(shard: Tensor) -> list[Tensor]:
    """What is known to be gathered from a shard."""
    there = _gathered.get(id(shard)) if _gathered else None
    return [] if not there else [leaf for one in list(there.values()) if (leaf := one()) is not None]


def changed_by_step(shard: Tensor) -> Iterator[Tensor]:
    """What was gathered from a shard that is about to be stepped, and is not there now: it will be other values."""
    if process_groups and id(shard) not in _gathered and mesh_of(shard) is not None:
        # Nobody has saved it: a function may read it all the same, as it does a bias.
        _gathered_from(shard)
        for gathered, place in fully_sharded():
            _learn(gathered, place)
            _tie(gathered, place.shards())
    for leaf in gathered_from(shard):
        known = _leaves.get(id(leaf))
        if known is not None and known[1] is not None and known[1].is_away():
            yield leaf


def are_one(leaf: Tensor, other: Tensor) -> bool:
    """Whether two parameters are the same one: gathered, and a shard of it."""
    if not process_groups:
        return False
    return any(
        shard is there
        for one, there in ((leaf, other), (other, leaf))
        if (source := source_of(one)) is not None
        for shard in source.shards()
    )
