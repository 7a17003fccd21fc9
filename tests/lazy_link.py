"""A device that is none: tensors of the CPU, whose copies are made as late as they may be.

Nothing happens when a copy is begun. It is made when somebody waits for it, or when the program looks whether it is
done and luck has it, or never. So whoever lets go of a source too early, reuses memory of the host that is still to be
read, or reads a target that has not arrived, is found out.
"""

import ctypes
import random
import threading
import time

import torch

from recollect._stores import chosen, links
from recollect._torch import StorageReference


class Moment:
    """A point in the work of a queue of copies; without one, it is past."""

    def __init__(self, link, copy=None):
        self.link = link
        self.copy = copy
        self.time = time.perf_counter() if copy is None else None

    def pass_by(self):
        with self.link.lock:
            while self.time is None:
                self.copy.queue[0].run()

    def query(self):
        if self.time is None and self.link.luck.random() < self.link.chance:
            self.pass_by()
        return self.time is not None

    def synchronize(self):
        self.pass_by()

    def elapsed_time(self, later):
        assert None not in (self.time, later.time), "a time was asked for that is not known yet"
        return (later.time - self.time) * 1000


class Copy:
    """Knows addresses, and holds nothing: that is for others to do."""

    def __init__(self, link, queue, source, target, after):
        self.queue = queue
        self.after = after
        self.done = Moment(link, self)
        self.size = source.numel()
        self.is_abandoned = False
        self._addresses = target.data_ptr(), source.data_ptr()
        self._memory = [StorageReference(one.untyped_storage()) for one in (target, source)]
        queue.append(self)

    def run(self):
        assert self.queue.pop(0) is self
        for moment in self.after:
            moment.pass_by()
        if not self.is_abandoned:
            assert not any(one.expired() for one in self._memory), "memory was let go of that a copy still needs"
            ctypes.memmove(*self._addresses, self.size)
        self.done.time = time.perf_counter()


class LazyLink:
    """The CPU as a device with two queues for copies."""

    device = torch.device("cpu")

    def __init__(self, chance=0.1, memory=2**40):
        self.lock = threading.RLock()
        self.luck = random.Random(0)
        self.chance = chance
        self._memory = memory
        self.out, self.back = [], []

    def memory(self):
        return self._memory

    def host_memory(self, size):
        return torch.empty(size, dtype=torch.uint8)

    def empty(self, size):
        return torch.full((size,), 255, dtype=torch.uint8)

    def now(self, stream=None):
        return Moment(self)

    def copy_out(self, source, host, after):
        return Copy(self, self.out, source, host, after).done

    def copy_in(self, host, target, after):
        copy = Copy(self, self.back, host, target, after)
        begun = Moment(self)
        return begun, copy.done

    def current_stream(self):
        return "the only one"

    def hold_back(self, moment, stream):
        assert stream == "the only one"
        moment.pass_by()

    def use(self, target, moment):
        moment.pass_by()

    def abandon(self, target, moment):
        with self.lock:
            if moment.time is None:
                moment.copy.is_abandoned = True

    def can_be_used_now(self):
        return True

    def bytes_in_flight(self):
        return sum(copy.size for copy in self.out)


def install(monkeypatch):
    """Let `Offload(to="cpu")` and `recollect.offload` take tensors of the CPU for ones of a device."""
    link = LazyLink()
    monkeypatch.setattr(links, "_links", {LazyLink.device: link})
    monkeypatch.setattr(chosen, "_stores", {})
    monkeypatch.setitem(chosen._DEVICES, "cpu", ("cpu",))
    return link
