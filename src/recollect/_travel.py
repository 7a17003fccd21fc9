"""What the way to the host or to disk takes: how fast it is, and what it costs the work that goes on beside it."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable

import torch

from recollect._meters import RealClock
from recollect._ranks import worst
from recollect._stores import links

LINK_BYTES = 2**27  # that are moved to see how fast a link is
_LEAST = 1e-14  # seconds for a byte
_BUSY = 0.5  # of the time of the work beside which copies are looked at: they go both ways, maybe taking turns


def speeds_of_link(device: torch.device, to: str, directory: str | None) -> tuple[float, float]:
    """Bytes per second from a device to where `Offload` puts them, and back."""
    size = LINK_BYTES
    clock = RealClock(device)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    if to == "cpu":
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        ways = (lambda: host.copy_(source, non_blocking=True), lambda: source.copy_(host, non_blocking=True))
        for way in ways:
            way()  # warms up
        out, back = (size / clock.seconds(way, 4) for way in ways)
        return out, back
    content = bytes(size)
    with tempfile.TemporaryFile(dir=directory) as file:

        def write() -> None:
            file.write(content)
            os.fsync(file.fileno())

        out = size / clock.seconds(write, 1)
        file.seek(0)
        back = size / clock.seconds(file.read, 1)
    return out, back


def price_of_copies(
    device: torch.device, work: Callable[[], object], seconds: float, link: tuple[float, float], repeats: int
) -> float:
    """Seconds that work takes longer for each byte that goes to the host and comes back beside it.

    Nobody waits for these bytes. But they go through the device's memory too, and take a part of its power.
    """
    clock, copies = RealClock(device), links.link_of(device)
    rate = -worst([-min(link)])[0]  # ranks do the same, or they would wait for each other
    size = min(LINK_BYTES, int(rate * seconds * _BUSY))
    if copies is None or size < 2**20:
        return 0.0
    count = int(rate * seconds * _BUSY) // size
    sources, hosts = [], []
    try:
        for _ in range(2):
            sources.append(torch.empty(size, dtype=torch.uint8, device=device))
            hosts.append(copies.host_memory(size))
    except torch.OutOfMemoryError:
        pass
    if worst([len(hosts) < 2])[0]:
        return 0.0

    def with_copies() -> None:
        for _ in range(count):
            copies.copy_out(sources[0], hosts[0], [copies.now()])
            copies.copy_in(hosts[1], sources[1], [copies.now()])
        work()

    try:
        with_copies()
        longer = statistics.median(clock.seconds(with_copies, 1) - clock.seconds(work, 1) for _ in range(repeats))
    finally:
        clock.wait()  # or their memory would be somebody else's before they are through
    # Noise may be more than all of it, but nothing is for nothing, and no more than work that waits for it.
    return min(max(longer / (size * count), _LEAST), 1 / link[0] + 1 / link[1])
