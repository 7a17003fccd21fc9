"""Which parts of a piece of memory, or of a file, are free.

First fit, and neighbours grow together again. Steps of a training take and give in the same order each time, so that
each finds the places of the one before.
"""

from __future__ import annotations

from bisect import bisect_left


class Ranges:
    """The free ranges of `size` bytes; all that is taken is rounded up to `alignment`."""

    __slots__ = ("_alignment", "_free", "free_bytes", "size")

    def __init__(self, size: int, alignment: int) -> None:
        self.size = size
        self.free_bytes = size
        self._alignment = alignment
        self._free: list[tuple[int, int]] = [(0, size)]  # where each begins and ends, in order

    def take(self, size: int) -> int | None:
        """Where a range of that size now is, None if there is none free."""
        size = self._rounded(size)
        if size > self.free_bytes:
            return None
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                if end - begin == size:
                    del self._free[index]
                else:
                    self._free[index] = (begin + size, end)
                self.free_bytes -= size
                return begin
        return None

    def give(self, begin: int, size: int) -> None:
        """Give back what was taken."""
        size = self._rounded(size)
        self.free_bytes += size
        end = begin + size
        index = bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))

    def is_empty(self) -> bool:
        return self.free_bytes == self.size

    def _rounded(self, size: int) -> int:
        size = max(size, 1)  # nothing at all has a place of its own too: an empty range would have no order
        return -(-size // self._alignment) * self._alignment
