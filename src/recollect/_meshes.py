"""What a function takes from `torch.distributed` without being given it: put back for a replay.

- The default process groups: of the process, and of this thread.
- The device meshes that are entered (`with mesh:`), which belong to a thread: a backward may run in another.
- What DTensors go by: whether plain tensors count as replicated, which redistributions are allowed and how they are
  planned, the handlers that `loss_parallel` puts in.

A context that replaces functions of torch instead, as `context_parallel` does, is not seen: backward has to run in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from recollect._torch import Setting, distributed_settings


class Meshes:
    """All of it, as it is now in this thread."""

    __slots__ = ("_seen", "_settings")

    def __init__(self) -> None:
        self._settings = distributed_settings()
        self._seen = [read() for read, _ in self._settings]

    def restore(self) -> Callable[[], object] | None:
        """Put it in force; return how to undo that, None if there was nothing to do."""
        now = [read() for read, _ in self._settings]
        if now == self._seen:
            return None
        _put(self._settings, self._seen, now)
        return partial(_put, self._settings, now, self._seen)


def _put(settings: Sequence[Setting], values: Sequence[Any], others: Sequence[Any]) -> None:
    """Put the values that differ from the others, which are in force."""
    for (_, put), value, other in zip(settings, values, others, strict=True):
        if value != other:
            put(value)
