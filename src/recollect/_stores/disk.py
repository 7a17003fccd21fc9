"""Files as a medium, for what is longer than the host's memory.

Two threads write and two read. Who writes never waits for who reads, so that these can wait for those:
- A write has its bytes copied to a block of staging memory by the link, and a thread takes them from there. If there
  is no block free, the caller waits for one: there are never more than `in_flight` bytes, unless a single write is
  larger than that, which then is alone.
- A read waits for its write, and for a block of staging memory, unless the device is the host itself.
- Who is done with a block puts it in a queue, without a lock, and who needs one looks there. So nothing that ends ever
  waits, and a garbage collection meets no lock that its own thread holds.

An error of a thread is raised by who asks for the bytes or by the next write, whichever comes first; then all goes on.
After a fork the child begins anew, with files, memory and threads of its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

from torch import Tensor

from recollect import _errors
from recollect._stores.files import Files, Place, TornError, not_written
from recollect._stores.links import Link, Moment
from recollect._stores.media import Held, Incoming, rounded
from recollect._stores.pool import Block, Pool

_THREADS = 2  # for each direction


class _Staging:
    """The host's memory that bytes pass through."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._given: SimpleQueue[tuple[Block, Moment | None]] = SimpleQueue()
        self._leaving: deque[tuple[Block, Moment | None]] = deque()  # given, and the device reads some of them still
        self._taken = 0  # blocks, those that are leaving too
        self._turn = threading.Lock()

    def take(self, size: int) -> Block:
        """A block that nobody uses; waits until there is one. Who has a block already must not ask for another."""
        with self._turn:
            while True:
                self._collect()
                block = self.pool.take(size)
                if block is None and not self._taken:
                    # Larger than the limit, or than any slab.
                    self.pool.start_over(size)
                    block = self.pool.take(size)
                    assert block is not None
                if block is not None:
                    self._taken += 1
                    return block
                if self._leaving and (moment := self._leaving[0][1]) is not None:
                    moment.synchronize()
                else:
                    self._leaving.append(self._given.get())

    def give(self, block: Block, moment: Moment | None = None) -> None:
        """The block is free once that moment is past."""
        self._given.put((block, moment))

    def _collect(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._leaving.append(self._given.get_nowait())
        for _ in range(len(self._leaving)):
            block, moment = self._leaving.popleft()
            if moment is None or moment.query():
                block.give_back()
                self._taken -= 1
            else:
                self._leaving.append((block, moment))


class _Crew:
    """The threads and what they share. It knows nothing of the files but their places."""

    def __init__(self, directory: str, pool: Pool) -> None:
        self.process = os.getpid()
        self.directory = directory
        self.staging = _Staging(pool)
        self.failed: SimpleQueue[Place] = SimpleQueue()
        self.bytes_written = 0
        self.bytes_read = 0
        self._counting = threading.Lock()
        # They start threads when there is work, and end them with the medium or, once all is done, with the process.
        self.writers = ThreadPoolExecutor(_THREADS, "recollect-write")
        self.readers = ThreadPoolExecutor(_THREADS, "recollect-read")

    def write(self, place: Place, block: Block, left: Moment) -> None:
        try:
            left.synchronize()
            place.write(block.memory)
            self.count(written=place.size)
        except BaseException as error:  # for who asks for the bytes, or who writes next
            place.error = error.with_traceback(None)
            self.failed.put(place)
        self.staging.give(block)
        place.written.set()

    def count(self, written: int = 0, read: int = 0) -> None:
        with self._counting:
            self.bytes_written += written
            self.bytes_read += read

    def raise_if_failed(self, place: Place) -> None:
        if place.error is not None:
            place.is_told = True
            raise not_written(self.directory, place.size, place.error) from place.error

    def raise_failures(self) -> None:
        """The first that nobody was told of and that somebody may still ask for; the others are told to who asks."""
        places = []
        with contextlib.suppress(Empty):
            while True:
                places.append(self.failed.get_nowait())
        for place in places:
            if not place.is_told and not place.is_released:
                self.raise_if_failed(place)


# --- The medium ---


class _Reading:
    """The times of one, and no memory."""

    __slots__ = ("arrived", "copied", "done", "took")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.arrived: Moment | None = None
        self.copied: Moment | None = None  # since when, if there was a copy after the read
        self.took = 0.0  # milliseconds of the read

    def late_by(self, moment: Moment) -> float | None:
        arrived = self._past_arrival()
        return moment.elapsed_time(arrived) if arrived is not None and moment.query() else None

    def milliseconds(self) -> float | None:
        arrived = self._past_arrival()
        if arrived is None:
            return None
        return self.took + (0 if self.copied is None else self.copied.elapsed_time(arrived))

    def _past_arrival(self) -> Moment | None:
        arrived = self.arrived if self.done.is_set() else None
        return arrived if arrived is not None and arrived.query() else None


class _FromDisk:
    __slots__ = ("_crew", "_error", "_is_abandoned", "_link", "_place", "journey", "memory")

    def __init__(self, memory: Tensor, link: Link, crew: _Crew, place: Place) -> None:
        self.memory = memory
        self._link = link
        self._crew = crew
        self._place = place
        self.journey = _Reading()
        self._error: BaseException | None = None
        self._is_abandoned = False

    def bring(self, after: list[Moment]) -> None:
        """The work of a thread."""
        try:
            self._place.written.wait()
            if self._place.error is None and not self._is_abandoned:
                self._bring(after)
                self._crew.count(read=self._place.size)
        except BaseException as error:
            self._error = error.with_traceback(None)
        self._place.readers.discard(self)
        self.journey.done.set()
        self._abandon_if_done()

    def _bring(self, after: list[Moment]) -> None:
        target, staging = self.memory[: self._place.size], self._crew.staging
        if self._link.device.type == "cpu":
            self._read(target)
            self.journey.arrived = self._link.now()
            return
        block = staging.take(self._place.size)
        try:
            self._read(block.memory)
            self.journey.copied, self.journey.arrived = self._link.copy_in(block.memory, target, after)
        finally:
            staging.give(block, self.journey.arrived)

    def _read(self, memory: Tensor) -> None:
        begun = time.perf_counter()
        self._place.read(memory)
        self.journey.took = (time.perf_counter() - begun) * 1000

    def take(self) -> Tensor:
        self.journey.done.wait()
        self._crew.raise_if_failed(self._place)
        error, size, directory = self._error, self._place.size, self._crew.directory
        if isinstance(error, TornError):
            raise _errors.torn_on_disk(directory, size, str(error))
        if error is not None:
            raise _errors.not_read_from_disk(directory, size, error) from error
        assert self.journey.arrived is not None
        self._link.use(self.memory, self.journey.arrived)
        return self.memory

    def abandon(self) -> None:
        # Here or in the thread, whichever comes last; both is as good.
        self._is_abandoned = True
        if self.journey.done.is_set():
            self._abandon_if_done()

    def _abandon_if_done(self) -> None:
        if self._is_abandoned and self.journey.arrived is not None:
            self._link.abandon(self.memory, self.journey.arrived)


class _OnDisk:
    __slots__ = ("_crew", "_link", "_place", "_released", "left")

    def __init__(self, place: Place, link: Link, left: Moment, crew: _Crew, released: deque[Place]) -> None:
        self._place = place
        self._link = link
        self.left = left
        self._crew = crew
        self._released = released

    def fetch(self) -> Incoming:
        place, link, crew = self._place, self._link, self._crew
        if crew.process != os.getpid():
            raise _errors.written_by_another_process(crew.directory, place.size)
        if place.written.is_set():
            crew.raise_if_failed(place)
        incoming = _FromDisk(link.empty(rounded(place.size)), link, crew, place)
        place.readers.add(incoming)
        try:
            crew.readers.submit(incoming.bring, [link.now()])
        except BaseException:
            place.readers.discard(incoming)
            raise
        return incoming

    def release(self) -> None:
        if not self._place.is_released:
            self._place.is_released = True
            self._released.append(self._place)


class DiskMedium:
    """Files in a directory; `allocate` gives memory of the host, of which about `in_flight` bytes are used."""

    pool: Pool

    def __init__(self, directory: str | None, in_flight: int, allocate: Callable[[int], Tensor]) -> None:
        self._directory = directory
        self._in_flight = in_flight
        self._allocate = allocate
        self._begin()

    def _begin(self) -> None:
        self.pool = Pool(self._in_flight, self._allocate)
        self._files = Files(self._directory)
        self._crew = _Crew(self._files.directory, self.pool)

    @property
    def bytes_written(self) -> int:
        return self._crew.bytes_written

    @property
    def bytes_read(self) -> int:
        return self._crew.bytes_read

    @property
    def file_bytes(self) -> int:
        """The room that is reserved now."""
        return self._files.bytes

    def write(self, source: Tensor, link: Link, begun: Moment | None = None) -> Held:
        if self._crew.process != os.getpid():
            self._begin()
        crew, files, size = self._crew, self._files, source.numel()
        crew.raise_failures()
        try:
            place = files.take(size)
        except OSError as error:
            raise not_written(crew.directory, size, error) from error
        try:
            block, left = crew.staging.take(size), None
            try:
                left = link.copy_out(source, block.memory, [begun or link.now(), *block.free_after()])
                crew.writers.submit(crew.write, place, block, left)
            except BaseException:
                crew.staging.give(block, left)
                raise
        except BaseException:
            place.written.set()
            files.released.append(place)
            raise
        return _OnDisk(place, link, left, crew, files.released)
