"""A device that is none, with a clock of its own: how long a step takes where copies go on beside the computation.

Tensors of the CPU; every operator takes the device a time that is reckoned, copies take theirs on two queues, and the
host is ahead of the device. All streams work in order, so every moment is known at once. What the device waits for
copies is counted (`waited`), whoever makes it wait.
"""

from __future__ import annotations

import itertools
import random

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recollect._stores import chosen, links

PER_OPERATOR = 5e-6  # that the host takes, in seconds


class Moment:
    """A point in the work of a stream; whether it is past is asked by the host, which has a time of its own."""

    def __init__(self, link, time):
        self.link = link
        self.time = time

    def query(self):
        return self.time <= self.link.host

    def synchronize(self):
        self.link.host = max(self.link.host, self.time)

    def elapsed_time(self, later):
        return (later.time - self.time) * 1000


class Link:
    """Copies at `rate` bytes per second each way, less when both ways are in use, and now and then at another one."""

    device = torch.device("cpu")

    def __init__(self, rate, uneven=0.0):
        self.rate = rate
        self.uneven = uneven
        self.per_allocation = 0.0  # of page-locked memory, in seconds of the host
        self.pace = 1.0  # of the computation of a step; less is faster
        self.luck = random.Random(0)
        self.host = self.compute = self.out = self.back = self.waited = 0.0

    def memory(self):
        return 2**40

    def host_memory(self, size):
        self.host += self.per_allocation
        return torch.empty(size, dtype=torch.uint8)

    def empty(self, size):
        return torch.empty(size, dtype=torch.uint8)

    def now(self, stream=None):
        return Moment(self, self.compute)

    def _seconds(self, size, is_shared):
        return size / self.rate / (0.92 if is_shared else 1.0) * self.about_one()

    def about_one(self):
        return 1 + self.uneven * self.luck.uniform(-1, 1)

    def copy_out(self, source, host, after):
        host.copy_(source)
        begun = max(self.out, self.host, *(one.time for one in after))
        self.out = begun + self._seconds(source.numel(), self.back > begun)
        return Moment(self, self.out)

    def copy_in(self, host, target, after):
        target.data.copy_(host)
        begun = max(self.back, self.host, *(one.time for one in after))
        self.back = begun + self._seconds(host.numel(), self.out > begun)
        return Moment(self, begun), Moment(self, self.back)

    def current_stream(self):
        return None

    def hold_back(self, moment, stream):
        self.waited += max(moment.time - self.compute, 0.0)
        self.compute = max(self.compute, moment.time)

    def use(self, target, moment):
        self.hold_back(moment, None)

    def abandon(self, target, moment):
        pass

    def can_be_used_now(self):
        return True

    def synchronize(self):
        self.host = max(self.host, self.compute, self.out, self.back)
        self.compute = max(self.compute, self.host)


class Working(TorchDispatchMode):
    """Operators take the device time: products by their arithmetic, all others by the memory that they go through."""

    def __init__(self, link, per_operation, per_byte):
        super().__init__()
        self._link = link
        self._per_operation = per_operation
        self._per_byte = per_byte
        self.pace = 1.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, result)) if isinstance(one, torch.Tensor)]
        link = self._link
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            one, other = args[-2:]
            seconds = self._per_operation * one.numel() * other.shape[-1]
        elif any(one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr() for one, two in _pairs(tensors)):
            seconds = 0.0  # views, and what is changed in place, for which it is little
        else:
            seconds = self._per_byte * sum(one.nbytes for one in tensors)
        link.compute = max(link.compute, link.host) + seconds * self.pace
        link.host += PER_OPERATOR
        return result


def _pairs(tensors):
    return itertools.combinations(tensors, 2)


def install(monkeypatch, rate, uneven=0.0):
    """Let `Offload(to="cpu")` and `recollect.offload` take tensors of the CPU for ones of that device."""
    link = Link(rate, uneven)
    monkeypatch.setattr(links, "_links", {Link.device: link})
    monkeypatch.setattr(chosen, "_stores", {})
    monkeypatch.setattr(chosen, "_page_locked", link.host_memory)
    monkeypatch.setitem(chosen._DEVICES, "cpu", ("cpu",))
    return link
