"""How bytes travel between a device and the host's memory.

A link begins a copy and gives the moment at which it will be done; nobody waits. A moment is what `torch.cuda.Event`
is: `query()` says whether it is past, `synchronize()` lets the host wait for it (without the GIL), and
`elapsed_time(later)` gives milliseconds once both are past.

CUDA. There are two streams besides the user's, one for each direction. Who may use memory when:
- A copy out is begun after what the current stream has been given so far (`now`). The source is held until the
  current stream has been told to wait for the copy (`flights.py`). If its memory was allocated for another stream, the
  allocator gives it to nobody before the current one is done with it too (`record_stream`).
- The target of a copy in is memory of the current stream, which may still have work to do in it: the copy is begun
  after that too. Who uses the target waits for the copy, on the device. A target that nobody has used is given to
  nobody before the copy is done (`record_stream`).
"""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from recollect._torch import current_cuda_stream


class Moment(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class Link(Protocol):
    """What a store needs to know of a device. All tensors that it is given are flat, of bytes."""

    device: torch.device

    def memory(self) -> int:
        """How many bytes the device has in all."""

    def host_memory(self, size: int) -> Tensor:
        """Memory of the host that can be copied to and from without a detour."""

    def empty(self, size: int) -> Tensor:
        """Memory of the device, for the current stream."""

    def now(self, stream: Any = None) -> Moment:
        """This moment in the work of a stream, the current one if None."""

    def copy_out(self, source: Tensor, host: Tensor, after: list[Moment]) -> Moment:
        """Begin a copy to the host as soon as some moments are past; gives when it is done."""

    def copy_in(self, host: Tensor, target: Tensor, after: list[Moment]) -> tuple[Moment, Moment]:
        """Begin a copy to the device as soon as some moments are past; gives when it begins and when it is done.

        The target's version is not moved: it moves when somebody changes what has arrived.
        """

    def current_stream(self) -> Any:
        """The stream that is in use at this point of the program."""

    def hold_back(self, moment: Moment, stream: Any) -> None:
        """Let a stream wait for a moment."""

    def use(self, target: Tensor, moment: Moment) -> None:
        """Let the current stream use what was copied in, from that moment on."""

    def abandon(self, target: Tensor, moment: Moment) -> None:
        """A target that nobody used is about to be let go of."""

    def can_be_used_now(self) -> bool:
        """Whether copies can be begun at this point of a program."""


class CudaLink:
    """A CUDA (or ROCm) device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._total_memory = torch.cuda.get_device_properties(device).total_memory
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

    def memory(self) -> int:
        return self._total_memory

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def now(self, stream: Any = None) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current_stream() if stream is None else stream)
        return event

    def copy_out(self, source: Tensor, host: Tensor, after: list[Moment]) -> Moment:
        _wait_for(self._out, after)
        current = self._copy(self._out, source, host)
        source.record_stream(current)  # of no effect if the memory is of that stream
        return self.now(self._out)

    def copy_in(self, host: Tensor, target: Tensor, after: list[Moment]) -> tuple[Moment, Moment]:
        _wait_for(self._in, after)
        begun = self.now(self._in)
        self._copy(self._in, host, target.data)
        return begun, self.now(self._in)

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> torch.cuda.Stream:
        """Copy on a stream; gives the current one."""
        current = self.current_stream()
        if torch.cuda.current_device() != self._index:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            return current
        # The same by hand, because the context takes longer than the rest.
        torch.cuda.set_stream(stream)
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(current)
        return current

    def current_stream(self) -> torch.cuda.Stream:
        return current_cuda_stream(self._index)

    def hold_back(self, moment: Moment, stream: Any) -> None:
        _wait_for(stream, [moment])

    def use(self, target: Tensor, moment: Moment) -> None:
        stream = self.current_stream()
        self.hold_back(moment, stream)
        target.record_stream(stream)  # as above

    def abandon(self, target: Tensor, moment: Moment) -> None:
        if not moment.query():
            target.record_stream(self._in)

    def can_be_used_now(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()


def _wait_for(stream: torch.cuda.Stream, moments: list[Moment]) -> None:
    for moment in moments:
        assert isinstance(moment, torch.cuda.Event)
        stream.wait_event(moment)


class PlainMoment:
    """A moment that is past."""

    __slots__ = ("_time",)

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: PlainMoment) -> float:
        return (end_event._time - self._time) * 1000


class PlainLink:
    """The CPU as a device: for what is to go further than the host's memory."""

    device = torch.device("cpu")

    def memory(self) -> int:
        return _host_memory()

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def now(self, stream: Any = None) -> Moment:
        return PlainMoment()

    def copy_out(self, source: Tensor, host: Tensor, after: list[Moment]) -> Moment:
        host.copy_(source)
        return PlainMoment()

    def copy_in(self, host: Tensor, target: Tensor, after: list[Moment]) -> tuple[Moment, Moment]:
        begun = PlainMoment()
        target.data.copy_(host)
        return begun, PlainMoment()

    def current_stream(self) -> Any:
        return None

    def hold_back(self, moment: Moment, stream: Any) -> None:
        pass

    def use(self, target: Tensor, moment: Moment) -> None:
        pass

    def abandon(self, target: Tensor, moment: Moment) -> None:
        pass

    def can_be_used_now(self) -> bool:
        return True


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_links: dict[torch.device, Link] = {}


def link_of(device: torch.device) -> Link | None:
    """The link to a device, None to one of a kind that is not known here."""
    link = _links.get(device)
    if link is None and device.type in ("cuda", "cpu"):
        link = _links.setdefault(device, CudaLink(device) if device.type == "cuda" else PlainLink())
    return link
