"""What stores have done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Of one store, as they grow."""

    bytes_out: int = 0
    bytes_in: int = 0
    bytes_kept: int = 0
    bytes_stayed: int = 0
    waited_seconds: float = 0.0
    prefetch_hits: int = 0
    prefetch_misses: int = 0


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """What offloading has done since the process began: `recollect.offload_stats()`.

    Attributes:
        bytes_out: Copied off the devices.
        bytes_in: Copied back.
        bytes_kept: Left on the device, because there was no room on the host within `max_host_bytes`.
        bytes_stayed: Left on the device besides being copied, because the step before showed that they are asked for
            too soon to be brought back in time.
        waited_seconds: How long devices waited: for a copy that came back too late, or because as much as `in_flight`
            allows was on its way out.
        pinned_bytes: The memory of the host that is held for copies now.
        peak_pinned_bytes: The most of it that was in use at a time, added up over all kinds of `Offload` in use.
        pinned_allocations: How often memory was taken from the system for it.
        prefetch_hits: How often something was asked for that had stayed, was back already, or on its way.
        prefetch_misses: How often it was not.
    """

    bytes_out: int
    bytes_in: int
    bytes_kept: int
    bytes_stayed: int
    waited_seconds: float
    pinned_bytes: int
    peak_pinned_bytes: int
    pinned_allocations: int
    prefetch_hits: int
    prefetch_misses: int

    @property
    def hit_rate(self) -> float | None:
        """The part of what was asked for that had been sent for ahead; None if nothing was asked for."""
        asked = self.prefetch_hits + self.prefetch_misses
        return self.prefetch_hits / asked if asked else None
