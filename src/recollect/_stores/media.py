"""What a store writes to and reads from. Everything is flat memory of bytes here: shapes are the store's concern.

A medium begins to write and to read, and lets nobody wait; it says when it is done.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recollect._stores.links import Link, Moment
from recollect._stores.pool import Block, Pool


class Awaited(Protocol):
    """What a device may have to wait for. It holds no memory."""

    def late_by(self, moment: Moment) -> float | None:
        """How many milliseconds after a moment of the device it was done; None as long as that is not known."""


class Journey(Awaited, Protocol):
    """The times of a way back."""

    def milliseconds(self) -> float | None:
        """How long it took; None as long as that is not known."""


class Incoming(Protocol):
    """Bytes on their way back to the device."""

    memory: Tensor  # where they will be

    @property
    def journey(self) -> Journey: ...

    def take(self) -> Tensor:
        """The memory, which the current stream may use; the host waits only if it has to. May be called often."""

    def abandon(self) -> None:
        """Nobody will use them."""


class Held(Protocol):
    """Bytes in a medium."""

    left: Moment  # when the source was read, and its memory is free for others

    def fetch(self) -> Incoming:
        """Begin to bring them back to where they came from."""

    def release(self) -> None:
        """Nobody will fetch them again; some may still be on their way. Never waits."""


class Medium(Protocol):
    pool: Pool  # the host's memory that it uses

    def write(self, source: Tensor, link: Link, begun: Moment | None = None) -> Held | None:
        """Begin to write what a source is at a moment, now if None; gives None where there is no room."""


# --- The host's memory ---


class _FromHost:
    __slots__ = ("_link", "journey", "memory")

    def __init__(self, memory: Tensor, link: Link, journey: _Copying) -> None:
        self.memory = memory
        self.journey = journey
        self._link = link

    def take(self) -> Tensor:
        self._link.use(self.memory, self.journey.arrived)
        return self.memory

    def abandon(self) -> None:
        self._link.abandon(self.memory, self.journey.arrived)


class _Copying:
    __slots__ = ("_begun", "arrived")

    def __init__(self, begun: Moment, arrived: Moment) -> None:
        self._begun = begun
        self.arrived = arrived

    def late_by(self, moment: Moment) -> float | None:
        return moment.elapsed_time(self.arrived) if self.arrived.query() and moment.query() else None

    def milliseconds(self) -> float | None:
        return self._begun.elapsed_time(self.arrived) if self.arrived.query() else None


class _OnHost:
    __slots__ = ("_block", "_link", "left")

    def __init__(self, block: Block, link: Link, left: Moment) -> None:
        self._block = block
        self._link = link
        self.left = left

    def fetch(self) -> Incoming:
        link, block = self._link, self._block
        memory = link.empty(rounded(block.size))
        begun, arrived = link.copy_in(block.memory, memory[: block.size], [self.left, link.now()])
        block.is_used_until(arrived, (link.device, "in"))
        return _FromHost(memory, link, _Copying(begun, arrived))

    def release(self) -> None:
        self._block.give_back()


class HostMedium:
    """Page-locked memory of the host."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def write(self, source: Tensor, link: Link, begun: Moment | None = None) -> Held | None:
        block = self.pool.take(source.numel())
        if block is None:
            return None
        stream = link.device, "out"
        try:
            left = link.copy_out(source, block.memory, [begun or link.now(), *block.free_after(stream)])
        except BaseException:
            block.give_back()
            raise
        block.is_used_until(left, stream)
        return _OnHost(block, link, left)


def rounded(size: int) -> int:
    """As many bytes as there are in whole elements of any dtype."""
    return -(-size // 16) * 16
