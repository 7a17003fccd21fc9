"""The host's memory that copies go to: taken from the system in slabs, once, and used again from step to step.

Page-locked memory is slow to get, so nothing is given back to the system while a pool is there. Slabs are powers of two
in size, because that is what PyTorch rounds page-locked memory up to: what is counted here is what is really taken.

A block may be given back while the device still reads from it or writes to it. The next copy into its slab waits for
that, on the device; the host does not, so that it depends on no timing which places are free.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from recollect._stores.links import Moment
from recollect._stores.ranges import Ranges

_ALIGNMENT = 512
_SMALLEST, _LARGEST = 2**25, 2**30  # of slabs, unless what is asked for is larger still
_PARTS = 1000  # of a slab that are remembered


class _Slab:
    __slots__ = ("_parts", "busy", "memory", "ranges")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.ranges = Ranges(memory.numel(), _ALIGNMENT)
        # Until when each stream is at work in it: the later of two moments on a stream includes the earlier.
        self.busy: dict[object, Moment] = {}
        self._parts: dict[tuple[int, int], Tensor] = {}

    def part(self, begin: int, size: int) -> Tensor:
        """A part of the memory; the next step will ask for the same ones."""
        found = self._parts.get((begin, size))
        if found is None:
            if len(self._parts) >= _PARTS:
                self._parts.clear()
            found = self._parts[begin, size] = self.memory.narrow(0, begin, size)
        return found


class Block:
    """A part of the host's memory."""

    __slots__ = ("_begin", "_pool", "_slab", "memory", "size")

    def __init__(self, pool: Pool, slab: _Slab, begin: int, size: int) -> None:
        self._pool = pool
        self._slab = slab
        self._begin = begin
        self.size = size
        self.memory = slab.part(begin, size)

    def is_used_until(self, moment: Moment, stream: object) -> None:
        """A copy was begun on a stream."""
        self._slab.busy[stream] = moment

    def free_after(self, stream: object = None) -> list[Moment]:
        """What has to be past before anything is written to it on a stream, whose own work is in order anyway."""
        return [moment for one, moment in self._slab.busy.items() if one != stream]

    def wait_until_free(self) -> None:
        for moment in self.free_after():
            moment.synchronize()

    def give_back(self) -> None:
        self._pool.give(self._slab, self._begin, self.size)


class Pool:
    """Blocks of the host's memory, at most `limit` bytes in all."""

    def __init__(self, limit: int, allocate: Callable[[int], Tensor]) -> None:
        self.limit = limit
        self._allocate = allocate
        self._slabs: list[_Slab] = []
        self.bytes = 0
        self.used = 0
        self.peak = 0  # of the bytes in use
        self.allocations = 0

    def take(self, size: int) -> Block | None:
        """A block, None where there is no room within the limit."""
        for slab in self._slabs:
            begin = slab.ranges.take(size)
            if begin is not None:
                return self._block(slab, begin, size)
        largest = _power_of_two(self.limit - self.bytes + 1) // 2
        wanted = _power_of_two(max(size, min(max(_SMALLEST, self.bytes // 4), _LARGEST)))
        if largest < max(size, _ALIGNMENT):
            return None
        slab = _Slab(self._allocate(min(wanted, largest)))
        self._slabs.append(slab)
        self.bytes += slab.memory.numel()
        self.allocations += 1
        begin = slab.ranges.take(size)
        return None if begin is None else self._block(slab, begin, size)

    def start_over(self, size: int) -> None:
        """Let go of all memory, which nobody may use, and allow as much as a block of that size needs."""
        assert not self.used, "somebody uses a block"
        self._slabs.clear()
        self.bytes = 0
        self.limit = max(self.limit, _power_of_two(max(size, _ALIGNMENT)))

    def _block(self, slab: _Slab, begin: int, size: int) -> Block:
        self.used += size
        self.peak = max(self.peak, self.used)
        return Block(self, slab, begin, size)

    def give(self, slab: _Slab, begin: int, size: int) -> None:
        self.used -= size
        slab.ranges.give(begin, size)


def _power_of_two(size: int) -> int:
    """The next one, at least as large."""
    return 1 << max(size - 1, 0).bit_length()


def memory_to_spare() -> int:
    """Half of the host's memory that nobody uses now: for who sets no limit."""
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))]
    with contextlib.suppress(OSError, ValueError):  # a container may have less: "max" if not
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free.append(limit - used)
    return max(min(free) // 2, 0)
