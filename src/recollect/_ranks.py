"""Ranks of a distributed job that measure together: they must do the same things in the same order, and decide alike.

Which ranks those are is said by a process group, which is in force for a while (`together`); all of them, if nobody
says. Where there is one process alone, nothing happens here. Objects travel by `torch.distributed`'s own means.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import distributed

from recollect import _errors

T = TypeVar("T")


class _Group(threading.local):
    now: Any = None


_group = _Group()


def _count() -> int:
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size(_group.now)


@contextlib.contextmanager
def together(group: Any) -> Iterator[None]:
    """Let the ranks of a process group, or all of them, measure together."""
    if group is not None:
        if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
            raise TypeError(
                "group must be a process group, such as torch.distributed.new_group(...) or mesh.get_group(), or None, "
                f"got {_errors.describe_value(group)}"
            )
        if distributed.get_rank(group) < 0:
            raise ValueError("group: this rank is not in it")
    before, _group.now = _group.now, group
    try:
        yield
    finally:
        _group.now = before


def same(value: T) -> T:
    """What the first rank has, on all of them."""
    if _count() == 1:
        return value
    group = _group.now
    values = [value]
    first = 0 if group is None else distributed.get_global_rank(group, 0)
    distributed.broadcast_object_list(values, src=first, group=group)
    return values[0]


def of_all(value: T) -> list[T]:
    """What each rank has."""
    if _count() == 1:
        return [value]
    everybody: list[Any] = [None] * _count()
    distributed.all_gather_object(everybody, value, group=_group.now)
    return everybody


def worst(values: Sequence[T]) -> list[T]:
    """The largest of each of some values, over all ranks, which must have as many of them."""
    if _count() == 1:
        return list(values)
    return [max(each) for each in zip(*of_all(list(values)), strict=True)]


def need_the_same(value: object, error: Callable[[Sequence[int]], Exception]) -> None:
    """Raise, on every rank, if some ranks have another value than the first; `error` is given which."""
    everybody = of_all(value)
    others = [rank for rank, one in enumerate(everybody) if one != everybody[0]]
    if others:
        raise error(others)
