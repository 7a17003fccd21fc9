"""The store of a decision: one for each kind of `Offload` that is in use, for the whole process."""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor

from recollect._stores.disk import DiskMedium
from recollect._stores.media import HostMedium, Medium
from recollect._stores.pool import Pool, memory_to_spare
from recollect._stores.statistics import OffloadStats
from recollect._stores.store import Store
from recollect.policy import Offload

_stores: dict[Offload, Store] = {}
_lock = threading.Lock()
_STAGING = 2**29  # bytes of the host's memory for what is on its way to disk and back
_DEVICES = {"cpu": ("cuda",), "disk": ("cuda", "cpu")}  # from which tensors go there


def store_of(decision: Offload) -> Store:
    """Where a decision puts tensors. What it has learnt and allocated is there for the next step."""
    store = _stores.get(decision)
    if store is None:
        with _lock:
            store = _stores.get(decision)
            if store is None:
                store = _stores[decision] = _make(decision)
    return store


def _make(decision: Offload) -> Store:
    min_bytes, in_flight, ahead = (
        None if size is None else int(size) for size in (decision.min_bytes, decision.in_flight, decision.ahead)
    )
    medium: Medium
    if decision.to == "disk":
        directory = None if decision.directory is None else os.fspath(decision.directory)
        medium = DiskMedium(directory, in_flight or _STAGING, _page_locked)
    else:
        limit = memory_to_spare() if decision.max_host_bytes is None else int(decision.max_host_bytes)
        medium = HostMedium(Pool(limit, _page_locked))
    return Store(medium, _DEVICES[decision.to], min_bytes or 0, in_flight, ahead)


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def mark(results: list[Tensor], part: int) -> None:
    """Tell the stores that something has left for how far the forward has come, and by the number of which part."""
    for store in list(_stores.values()):
        store.mark(results, part)


def offload_stats() -> OffloadStats:
    """What offloading has done since the process began; the difference of two says what it did in between.

    Example:
        >>> import torch, recollect
        >>> before = recollect.offload_stats()
        >>> with recollect.offload():
        ...     loss = torch.ones(3, requires_grad=True).exp().sum()  # too small to be copied
        >>> recollect.offload_stats().bytes_out - before.bytes_out
        0
    """
    stores = list(_stores.values())
    for store in stores:
        store.count_waits()
    counts, pools = [store.counts for store in stores], [store.medium.pool for store in stores]
    return OffloadStats(
        bytes_out=sum(one.bytes_out for one in counts),
        bytes_in=sum(one.bytes_in for one in counts),
        bytes_kept=sum(one.bytes_kept for one in counts),
        bytes_stayed=sum(one.bytes_stayed for one in counts),
        waited_seconds=sum(one.waited_seconds for one in counts),
        pinned_bytes=sum(pool.bytes for pool in pools),
        peak_pinned_bytes=sum(pool.peak for pool in pools),
        pinned_allocations=sum(pool.allocations for pool in pools),
        prefetch_hits=sum(one.prefetch_hits for one in counts),
        prefetch_misses=sum(one.prefetch_misses for one in counts),
    )
