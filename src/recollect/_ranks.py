"""Ranks of a distributed job that measure together: they must do the same things in the same order, and decide alike.

Where there is one process alone, nothing happens here. Objects travel by `torch.distributed`'s own means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import distributed

T = TypeVar("T")


def _count() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def same(value: T) -> T:
    """What the first rank has, on all of them."""
    if _count() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def worst(values: Sequence[T]) -> list[T]:
    """The largest of each of some values, over all ranks, which must have as many of them."""
    if _count() == 1:
        return list(values)
    everybody: list[Sequence[T]] = [()] * _count()
    distributed.all_gather_object(everybody, list(values))
    return [max(each) for each in zip(*everybody, strict=True)]
