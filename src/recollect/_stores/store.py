"""Tensors away from their device: `put` gives a ticket, `get` brings the tensor back, `prefetch` begins to.

Rules.
- What is put is what the tensor was at that moment. A change in place afterwards must wait for the copy, but nobody can
  be made to wait who is not known beforehand (who does, calls `hold_back`). So in its first step a store lets the
  current stream wait for every copy, and later for those alone that were changed in the step before; a change that was
  not expected, and came before the copy was seen to be done, is an error when the tensor is asked for, and expected
  from then on.
- A storage that is put twice at the same version is copied once, and what comes back are views of one memory. Parts of
  it that count their changes apart (`unsafe_chunk`, as recurrent cells use it) are copied apart. A change that moves no
  version (through `.data`, by NumPy, a collective or a kernel that does not tell) is not seen, and may reach the copy.
- Not taken, and left to the caller: parameters, buffers and views of them, whatever was there after the step before
  and has not changed since (freeing nothing is not worth a copy), small tensors, those of other devices and
  of other kinds than plain strided ones, and everything when there is no room.
- At most `in_flight` bytes are on their way out at a time: then the device waits (`flights.py`). At most `ahead` bytes
  are back before they are asked for.
- A copy dies with its last ticket. Whoever lets go of the last one may be the garbage collector in the middle of
  anything: so that is only noted then, and the rest is done with the next call of the store.

What it does not know: media (`media.py`), what steps are like (`courses.py`), how tensors look (`forms.py`).
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._inputs import is_parameter
from recollect._stores.courses import Course, Step
from recollect._stores.flights import Flight, Flights
from recollect._stores.forms import Form, takes_whole_storage, values_alone, whole_storage
from recollect._stores.links import Link, Moment, link_of
from recollect._stores.media import Awaited, Held, Incoming, Journey, Medium
from recollect._stores.statistics import Counts
from recollect._torch import (
    StorageReference,
    at_end_of_pass,
    detach_below_autograd,
    graph_task_id,
    has_plain_memory,
    modules_being_called,
    out_of_sight,
    own_tensors,
    share_version_counter,
    storage_key,
    version_of,
)

_COURSES = 16  # how many are remembered: a search for a plan comes by many before it returns to the best
_WATCHED = 8  # tensors over one memory that count their changes apart
_LARGE, _LEARN_EVERY = 2000, 8  # what is known of a step with more places is looked at only every so many steps

Key = tuple[Any, ...]


class Copy:
    """What is in a medium of the memory behind one or several tensors."""

    __slots__ = (
        "__weakref__",
        "_graves",
        "aliases",
        "asked_in",
        "held",
        "incoming",
        "is_ahead",
        "is_sure",
        "key",
        "link",
        "place",
        "size",
        "source",
        "step",
        "storage",
        "taken",
        "tickets",
        "version",
        "watch",
    )

    def __init__(
        self, key: Key, tensor: Tensor, held: Held, link: Link, size: int, step: Step, graves: deque[_Grave]
    ) -> None:
        self.key = key
        # As long as this is held, the storage's identity, which the key has, is not another's.
        self.storage = StorageReference(tensor.untyped_storage())
        self.version = version_of(tensor)
        self.watch = _without_values(tensor)
        self.aliases: tuple[tuple[Tensor, int], ...] = ()  # over the same memory, with version counters of their own
        self.is_sure = False  # that no change in place could reach it
        self.link = link
        self.held = held
        self.size = size
        self.step = step
        self.place = len(step.sizes)
        self.tickets = 0
        self.taken = 0  # how many of them have come for what is on the device
        self.incoming: Incoming | None = None
        self.is_ahead = False  # whether what is on the device counts as being there ahead of its use
        self.source: Tensor | None = None  # where it stays there as it was
        self.asked_in = -1  # the last backward pass
        self._graves = graves

    def is_changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        if version_of(self.watch) != self.version:
            return True
        return bool(self.aliases) and any(version_of(one) != then for one, then in self.aliases)

    def is_watched_by(self, tensor: Tensor) -> bool:
        """Whether a change of a tensor counts as one of this."""
        if share_version_counter(tensor, self.watch):
            return True
        return bool(self.aliases) and any(share_version_counter(tensor, one) for one, _ in self.aliases)

    def __del__(self) -> None:
        self._graves.append((self.key, self.held, self.incoming, self.size if self.is_ahead else 0))


_Grave = tuple[Key, Held, Incoming | None, int]


class Ticket:
    """Stands for a tensor in a store."""

    __slots__ = ("copy", "form")

    def __init__(self, copy: Copy, form: Form) -> None:
        self.copy = copy
        self.form = form


class Store:
    """Tensors in a medium.

    Args:
        medium: Where they go.
        devices: From which types of devices.
        min_bytes: Those that are smaller stay where they are.
        in_flight: How many bytes may be on their way out; None for a 32nd of the device's memory.
        ahead: How many bytes may be back before they are asked for; None as above.
    """

    def __init__(
        self, medium: Medium, devices: tuple[str, ...], min_bytes: int, in_flight: int | None, ahead: int | None
    ) -> None:
        self.counts = Counts()
        self.medium = medium
        self._devices = devices
        self._min_bytes = min_bytes
        self._in_flight = in_flight
        self._ahead = ahead
        self._lock = threading.RLock()
        self._copies: dict[Key, weakref.ref[Copy]] = {}
        self._alive = 0
        self._link: Link | None = None  # of the last copy
        self._graves: deque[_Grave] = deque()
        self._flights = Flights()
        self._ahead_bytes = 0
        self._step: Step | None = None
        self._ended: Step | None = None  # the one before, until the device has come to its end
        self._courses: list[Course] = []
        self._steps = 0
        self._changes = False  # whether anything was ever changed in place after it was copied
        self._surprises: set[tuple[int, int]] = set()  # places and sizes of what was changed and not expected to be
        self._storages: list[tuple[Key, StorageReference]] = []  # of this step's copies
        # At the version that outlived a step, the last of each storage: one that is changed in every step has many.
        self._lasting: dict[int, tuple[Key, StorageReference]] = {}
        self._pass = -1
        self._waits: deque[tuple[Moment, Awaited]] = deque()  # of which is not known yet how long they were
        self._counted_at = 1000  # when there are more of them, they are counted

    # --- Out ---

    def put(self, tensor: Tensor) -> Ticket | None:
        """Begin to copy a tensor; None if it is not taken."""
        if not self._takes(tensor):
            return None
        link = link_of(tensor.device)
        if link is None or not link.can_be_used_now():
            return None
        with self._lock, out_of_sight():  # all of it: modes of the user's run code, which may wait for who waits here
            self._bury()
            if self._step is None or not self._alive or self._step.is_full():
                self._begin_step(link)
            elif self._ended is not None:
                self._learn_what_is_new()
            key = _key(tensor)
            copy, is_whole = self._find(key, tensor), True
            if copy is None and not takes_whole_storage(tensor):
                is_whole = False
                copy = self._find(_key_of_part(key, tensor), tensor)
            if copy is None:
                copy = self._copy(tensor, link, key, is_whole=is_whole)
            if copy is None:
                return None
            copy.tickets += 1
            return Ticket(copy, Form(tensor, is_whole=is_whole))

    def _takes(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device.type in self._devices
            and has_plain_memory(tensor)
            and min(tensor.nbytes, tensor.untyped_storage().nbytes()) >= max(self._min_bytes, 1)
            and not tensor.is_inference()
            and not is_parameter(tensor)
            and not (tensor.grad_fn is None and _is_of_a_module(tensor))
        )

    def _find(self, key: Key, tensor: Tensor) -> Copy | None:
        reference = self._copies.get(key)
        copy = None if reference is None else reference()
        # Equal versions say nothing where two count apart.
        return copy if copy is not None and copy.is_watched_by(tensor) and not copy.is_changed() else None

    def _copy(self, tensor: Tensor, link: Link, storage: Key, *, is_whole: bool) -> Copy | None:
        lasting = self._lasting.get(storage[0])
        if lasting is not None and lasting[0] == storage:
            return None
        source = whole_storage(tensor) if is_whole else values_alone(tensor)
        size = source.numel()
        stream = link.current_stream()
        begun = link.now(stream)
        held = self.medium.write(source, link, begun)
        if held is None:
            self.counts.bytes_kept += size
            return None
        step = self._step
        assert step is not None
        key = storage if is_whole else _key_of_part(storage, tensor)
        copy = Copy(key, tensor, held, link, size, step, self._graves)
        step.comes_to(size)
        reference = self._copies[key] = weakref.ref(copy)
        self._alive += 1
        self.counts.bytes_out += size
        if step.will_stay():
            copy.source = tensor.detach()
            self.counts.bytes_stayed += size
            self._count_ahead(copy)
        self._begin_flight(Flight(copy, stream, held.left, source), begun, size)
        step.is_on_one_device &= not step.copies or self._link is link
        self._link = link
        step.add(reference, size, begun, held.left)
        self._storages.append((storage, copy.storage))
        return copy

    def _begin_flight(self, flight: Flight, moment: Moment, size: int) -> None:
        course, place, link = None if self._step is None else self._step.course, flight.place, flight.link
        waits = (self._changes or self._steps == 1) if course is None else self._step_may_change(place)
        gone = -1 if course is None else course.gone_by(place)
        if waits or (place, size) in self._surprises:
            landed = self._flights.land_what_has_left(gone)
            flight.hold_back()
            flight.land()
            landed.append(flight)
        else:
            self._flights.begin(flight)
            landed = self._flights.land_what_has_left(gone)
            landed += self._flights.land_what_is_too_much(bound_of(self._in_flight, link))
        self._note_landed(link, moment, landed)

    def _step_may_change(self, place: int) -> bool:
        """Whether what was copied there was changed in a step that began like this one."""
        step = self._step
        return step is not None and any(
            place in one.changed and one.begins_like(step.signs) for one in self._courses if one.changed
        )

    def hold_back(self, ticket: Ticket) -> None:
        """The tensor of a ticket is about to be changed in place, seen or unseen: let that wait for the copy."""
        copy, link = ticket.copy, ticket.copy.link
        with self._lock:
            if copy.source is not None:  # it will not stay as it was
                self._let_go(copy)
            moment = link.now()
            link.hold_back(copy.held.left, link.current_stream())  # which need not be the one that it was copied on
            self._note_landed(link, moment, self._flights.land_one(copy))

    def also_watch(self, ticket: Ticket, alias: Tensor) -> None:
        """A tensor over the memory of a ticket's may count its changes apart: they are changes of this one too.

        Of many of them (each time step of a recurrent net has some) not all are watched: then all changes wait.
        """
        copy = ticket.copy
        with self._lock, out_of_sight():
            if copy.is_watched_by(alias):
                return
            if len(copy.aliases) < _WATCHED:
                copy.aliases += ((_without_values(alias), version_of(alias)),)
                return
            self._copies.pop(copy.key, None)  # nobody can tell any more whether the memory is as it was
            if not copy.is_sure:
                self.hold_back(ticket)

    def _land_what_has_left(self, link: Link, last_place: int) -> None:
        self._note_landed(link, link.now(), self._flights.land_what_has_left(last_place))

    def _note_landed(self, link: Link, moment: Moment, landed: list[Flight]) -> None:
        # The moments of two devices have no time between them.
        self._note_waits(moment, [flight for flight in landed if flight.link is link])

    # --- In ---

    def get(self, ticket: Ticket) -> Tensor:
        """The tensor of a ticket, on its device."""
        copy, form = ticket.copy, ticket.form
        with out_of_sight():
            with self._lock:
                self._bury()
                source, incoming = self._ask(copy)
            return form.again(source) if source is not None else form.of(incoming.take())

    def _ask(self, copy: Copy) -> tuple[Tensor | None, Any]:
        """What there is on the device of a copy, or is on its way there; what is needed next is sent for too."""
        source, incoming, is_first = copy.source, copy.incoming, not copy.taken
        if copy.is_changed():
            self._changes = True
            copy.step.note_change(copy.place)
            if not copy.is_sure:
                self._surprises.add((copy.place, copy.size))
                raise _errors.changed_before_it_left()
            source = None
        if incoming is not None and version_of(incoming.memory):  # changed in place by who got it before
            incoming.abandon()
            incoming = None
        is_there = source is not None or incoming is not None
        if is_first:
            self.counts.prefetch_hits += is_there
            self.counts.prefetch_misses += not is_there
        if not is_there:
            incoming = copy.incoming = self._fetch(copy)
        if is_first or not is_there:  # who comes later for the same need not wait
            self._note_asking(copy, incoming.journey if source is None and incoming is not None else None)
        copy.taken += 1
        if copy.taken >= copy.tickets:
            self._let_go(copy)
        copy.asked_in = self._note_pass()
        self._fetch_what_follows(copy.step, copy.place)
        return source, incoming

    def _note_asking(self, copy: Copy, journey: Journey | None) -> None:
        moment = copy.link.now()
        if journey is not None:
            self._note_waits(moment, [journey])
        copy.step.note_asking(copy.place, moment, journey)

    def _fetch_what_follows(self, step: Step, place: int) -> None:
        # Here and not in the forward, where the device may have nothing else to do meanwhile.
        if self._ended is not None:
            self._learn()
        if self._link is not None:
            course = step.course if step is self._step else None  # all flights are of the step that goes on
            gone = -1 if course is None else course.gone_when_asked_for(place)
            self._land_what_has_left(self._link, gone)
        for later in step.after(place):
            reference = step.copies[later] if later < len(step.copies) else None
            copy = None if reference is None else reference()
            if copy is not None and not self._fetch_ahead(copy):
                return

    def prefetch(self, tickets: Iterable[Ticket]) -> None:
        """Begin to bring tensors back, in this order, as far as they may be there ahead."""
        with self._lock, out_of_sight():
            self._bury()
            for ticket in tickets:
                if not self._fetch_ahead(ticket.copy):
                    return

    def _fetch_ahead(self, copy: Copy) -> bool:
        """Fetch a copy unless it is there, or was asked for already; whether there is room for it."""
        task = graph_task_id()
        if copy.incoming is not None or copy.source is not None or (copy.asked_in == task and task >= 0):
            return True
        bound = bound_of(self._ahead, copy.link)
        if self._ahead_bytes and self._ahead_bytes + copy.size > bound:
            return False
        try:
            copy.incoming = self._fetch(copy)
        except Exception:  # too little memory, a failed write: that is for who asks for it, if anybody does
            return False
        self._count_ahead(copy)
        return True

    def _fetch(self, copy: Copy) -> Incoming:
        incoming = copy.held.fetch()
        self.counts.bytes_in += copy.size
        return incoming

    def _count_ahead(self, copy: Copy) -> None:
        copy.is_ahead = True
        self._ahead_bytes += copy.size

    def _let_go(self, copy: Copy) -> None:
        """Hold no longer what is on the device of a copy: who needed it has it."""
        if copy.is_ahead:
            copy.is_ahead = False
            self._ahead_bytes -= copy.size
        copy.taken = 0
        copy.incoming = copy.source = None

    # --- Backward passes and steps ---

    def mark(self, results: list[Tensor], part: int) -> None:
        """Note that a forward has come so far: when backward comes by, it is time to fetch what it comes to later.

        For parts of a model that put nothing here between parts that do; `part` is another number for each.
        """
        nodes = [one.grad_fn for one in results if one.grad_fn is not None]
        if self._link is None or not nodes or not self._link.can_be_used_now():
            return
        with self._lock:
            self._bury()
            step, link = self._step, self._link
            if not self._alive or step is None or step.is_full():
                return
            place, moment = len(step.sizes), link.now()
            step.comes_to(-part)
            if step.course is not None:
                self._land_what_has_left(link, step.course.gone_by(place))
            step.add(None, 0, moment, moment)
        nodes[0].register_prehook(functools.partial(self._comes_by, weakref.ref(step), place))

    def _comes_by(self, step: weakref.ref[Step], place: int, _: object) -> None:
        with self._lock, out_of_sight():
            self._bury()
            if self._step is not None and self._step is step() and self._link is not None:
                self._step.note_asking(place, self._link.now(), None)
                self._note_pass()
                self._fetch_what_follows(self._step, place)

    def _note_pass(self) -> int:
        task = graph_task_id()
        if task >= 0 and task != self._pass:
            self._pass = task
            at_end_of_pass(self._pass_ended)
        return task

    def _pass_ended(self) -> None:
        """Let go of what was brought back for tickets that nobody came with."""
        with self._lock:
            self._pass = -1
            self._bury()
            if self._alive:
                self._flights.land_what_has_left()
            else:  # the step is over: nothing of it holds memory until the next one, however far ahead the host is
                self._flights.land_all()
            if self._step is None:
                return
            is_guess = self._step.course is None
            for reference in self._step.copies:
                copy = None if reference is None else reference()
                if copy is not None and copy.incoming is not None and (copy.taken or is_guess):
                    if not copy.taken:  # else somebody uses it, or is about to in another thread
                        copy.incoming.abandon()
                    self._let_go(copy)

    def _begin_step(self, link: Link) -> None:
        """The first copy while none is alive, or while some stay alive for so long that it can be no step."""
        # One whose end the device has not come to yet is kept for then; one without a backward shows nothing.
        if self._step is not None and self._step.askings and not self._alive and self._is_worth_it(self._step):
            if self._ended is not None:
                self._learn()
            self._ended = self._ended or self._step
        self._steps += 1
        self._lasting = {
            key[0]: (key, storage)
            for key, storage in (*self._lasting.values(), *self._storages)
            if not storage.expired()
        }
        self._storages = []
        self._flights.land_all()
        self._learn_what_is_new()
        self._step = Step(link.now(), self._courses)

    def _is_worth_it(self, step: Step) -> bool:
        """Whether there is time to learn from a step."""
        is_known = step.course is not None and step.course.is_settled()
        return len(step.sizes) <= _LARGE or self._steps % _LEARN_EVERY == 0 or not is_known

    def _learn_what_is_new(self) -> None:
        """What is not known yet is of use to this step already; all else can wait for the backward."""
        if self._ended is not None and (self._ended.course is None or not self._ended.course.is_settled()):
            self._learn()

    def _learn(self) -> None:
        """Learn from the step before, as soon as the device has come to its end: the host may be far ahead of it."""
        step, link = self._ended, self._link
        if step is None or link is None or not step.is_over():
            return
        self._ended = None
        course = step.learn(bound_of(self._ahead, link), self._courses)
        if course is not None:
            others = [one for one in self._courses if one.signs != course.signs]
            self._courses = [course, *others[: _COURSES - 1]]
            now = self._step
            if now is not None and now is not step and course.begins_like(now.signs):
                course.changed = course.changed | now.changed  # what has been seen meanwhile

    def _bury(self) -> None:
        """Release what belonged to copies that have died."""
        while self._graves:
            key, held, incoming, ahead = self._graves.popleft()
            reference = self._copies.get(key)
            if reference is not None and reference() is None:
                del self._copies[key]
            if incoming is not None:
                incoming.abandon()
            held.release()
            self._ahead_bytes -= ahead
            self._alive -= 1

    # --- Statistics ---

    def _note_waits(self, moment: Moment, all_awaited: Sequence[Awaited]) -> None:
        """The device may have to wait from a moment on: for the last of these, which is the last to be done."""
        for awaited in all_awaited[-1:]:
            self._waits.append((moment, awaited))
            if self._step is not None:
                self._step.note_stall(moment, awaited)
        if len(self._waits) > self._counted_at:
            self.count_waits()
            self._counted_at = 2 * len(self._waits) + 1000  # or a host far ahead of the device would count all the time

    def count_waits(self) -> None:
        """Add up how long the device waited for what came too late, as far as that is known by now."""
        with self._lock:
            self._bury()
            self._flights.land_what_has_left()
            for _ in range(len(self._waits)):
                moment, awaited = self._waits.popleft()
                late = awaited.late_by(moment)
                if late is None:
                    self._waits.append((moment, awaited))
                else:
                    self.counts.waited_seconds += max(late, 0.0) / 1000


def bound_of(chosen: int | None, link: Link) -> int:
    """How many bytes may be on their way out, or back ahead of their use."""
    return link.memory() // 32 if chosen is None else chosen


def _without_values(tensor: Tensor) -> Tensor:
    """What shares the version counter of a tensor, and holds none of its memory."""
    watch = detach_below_autograd(tensor)
    nothing = _nothing.get((tensor.dtype, tensor.device))
    if nothing is None:
        nothing = _nothing[tensor.dtype, tensor.device] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    watch.data = nothing
    return watch


_nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _key(tensor: Tensor) -> Key:
    """Of the memory behind a tensor as it is now."""
    return storage_key(tensor), tensor.untyped_storage().data_ptr(), version_of(tensor)


def _key_of_part(storage: Key, tensor: Tensor) -> Key:
    """Of the values of a tensor alone."""
    bits = tensor.is_conj(), tensor.is_neg()
    return *storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), bits


def _is_of_a_module(tensor: Tensor) -> bool:
    """Whether it is over the memory of a parameter or buffer of one of the modules that are being called."""
    memory = storage_key(tensor)
    for module in modules_being_called(sys._getframe(1)):
        for tensors in own_tensors(module):
            if any(one is not None and storage_key(one) == memory for one in tensors.values()):
                return True
    return False
