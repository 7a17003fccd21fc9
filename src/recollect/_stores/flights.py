"""What is on its way out: its memory must wait for the copy, and no longer.

The source of a copy is held until the stream that uses its memory has been told to wait for the copy. From then on
whatever that stream does comes after it, so the memory can go back to the allocator at once: the host need not know
that the copy is done, and it may be far ahead of the device. The stream is told

- when a step before has shown that the copy is done by then, so that nothing waits in fact;
- when the host sees that it is done;
- when somebody is about to change it, and says so;
- when more bytes are in flight than may be: then the stream waits, and memory does not grow.

For memory of another stream than the one that is told, the allocator takes care (`record_stream` in `links.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recollect._stores.links import Moment

if TYPE_CHECKING:
    from recollect._stores.store import Copy


class Flight:
    """One copy on its way out."""

    __slots__ = ("_stream", "copy", "left", "link", "place", "size", "source")

    def __init__(self, copy: Copy, stream: Any, left: Moment, source: Tensor) -> None:
        self.copy = weakref.ref(copy)
        self.place = copy.place
        self.left = left
        self.source: Tensor | None = source
        self.size = copy.size if copy.source is None else 0  # what stays there anyway does not wait for its copy
        self.link = copy.link
        self._stream = stream

    def hold_back(self) -> None:
        """Let the stream that uses the memory wait until the copy is done."""
        self.link.hold_back(self.left, self._stream)

    def late_by(self, moment: Moment) -> float | None:
        """How many milliseconds after a moment the copy was done; None as long as that is not known."""
        return moment.elapsed_time(self.left) if self.left.query() and moment.query() else None

    def land(self) -> None:
        """Its memory waits no longer; a change in place comes after the copy now, if there was none yet."""
        self.source = None
        copy = self.copy()
        if copy is not None and not copy.is_changed():
            copy.is_sure = True


class Flights:
    """Those that have not landed, in the order in which they began, which is that in which they end."""

    def __init__(self) -> None:
        self._flying: deque[Flight] = deque()
        self._bytes = 0

    def begin(self, flight: Flight) -> None:
        self._flying.append(flight)
        self._bytes += flight.size

    def land_what_has_left(self, last_place: int = -1) -> list[Flight]:
        """Those that are done as the host sees, or are expected to be, all up to a place; gives the latter."""
        landed = []
        while self._flying:
            flight = self._flying[0]
            if not flight.left.query():
                if flight.place > last_place:
                    break
                flight.hold_back()
                landed.append(flight)
            self._land_first()
        return landed

    def land_one(self, copy: Copy) -> list[Flight]:
        """Let the stream wait for one copy, if it has not landed; gives its flight."""
        flights = [flight for flight in self._flying if flight.copy() is copy]
        for flight in flights:
            flight.hold_back()
            self._flying.remove(flight)
            self._bytes -= flight.size
            flight.land()
        return flights

    def land_what_is_too_much(self, bound: int) -> list[Flight]:
        """Let streams wait for the first ones, until the others are within bounds; gives those that are waited for."""
        landed = []
        while self._bytes > bound and len(self._flying) > 1:
            self._flying[0].hold_back()
            landed.append(self._land_first())
        return landed

    def land_all(self) -> None:
        """At the end of a step."""
        while self._flying:
            self._flying[0].hold_back()
            self._land_first()

    def _land_first(self) -> Flight:
        flight = self._flying.popleft()
        self._bytes -= flight.size
        flight.land()
        return flight
