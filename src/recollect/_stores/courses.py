"""What steps show for the next: in which order copies are asked for, when, and what that means for fetching.

A step begins with a copy while no other is alive, or when the one before has become too long to be one. Copies are
numbered by it: their places. A place may also be a mere mark, of no bytes, that backward comes by. Steps of a training
are alike, so the places of one, in the order in which they were asked for, with the time that the device computed in
between and the time that copies took, are the course that the next is expected to take. From it follows

- what is fetched ahead: at each asking, what would come too late if it were begun at the next one only. So nothing
  comes back much earlier than it has to, and memory is used for little of it at a time;
- what stays: what is asked for so soon after the first asking that it cannot be back in time;
- what is changed in place after it was copied: then whoever changes it has to wait for the copy;
- what has left by when.

That is an expectation and no more: a step that takes another course is served all the same, in reverse order. No two
steps take exactly as long, and the first ones take much longer. So what is expected is what some steps had in common,
the quickest of them, and then it is kept, so that steps hold the same memory at the same time; until the device has to
wait in several of them one after the other.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from recollect._stores.links import Moment
from recollect._stores.media import Awaited, Journey

if TYPE_CHECKING:
    import weakref

    from recollect._stores.store import Copy

_LOOKED_AT = 256  # how many places ahead, at most
SPARE = 0.08  # of the time that copies take: no two steps are alike, and a device that is cool or alone is faster
_SPARE_MS = 0.5
_SETTLED = 3  # steps that a course is learnt from
_STRIKES = 2  # steps that had to wait, until it is learnt anew
_FADING = 0.25  # of one, by a step that had not to
_HARMLESS = (
    0.005  # of the time of a step, that it may wait: where the device waits for the host anyway, it costs nothing
)
_LONGEST = 2**16  # of all that is noted of a step


class Course:
    """The places of a step in the order in which they are asked for, and the latest times to begin to fetch them."""

    __slots__ = (
        "_fetched_at",
        "_gone",
        "_gone_later",
        "_index",
        "_order",
        "_strikes",
        "changed",
        "rate",
        "seen",
        "signs",
        "stays",
    )

    def __init__(
        self,
        signs: list[int],
        changed: set[int],
        order: list[int],
        rate: float | None = None,
        fetched_at: list[int] | None = None,
        stays: Iterable[int] = (),
        gone: list[int] | None = None,
        gone_later: dict[int, int] | None = None,
    ) -> None:
        self.signs = signs  # by place: what they are known by
        self.changed = changed
        self._order = order
        self._index = {place: index for index, place in enumerate(order)}
        self.rate = rate  # bytes in a millisecond on the way back
        # By index in that order: with which asking to begin to fetch it; empty if there is nothing to tell times by.
        self._fetched_at = fetched_at or []
        self.stays = frozenset(stays)
        self._gone = gone or []  # by place: the last place that has left by then
        self._gone_later = gone_later or {}  # the same by when a place is asked for
        self.seen = 0  # in so many steps, besides the first: that one may not be like the others
        self._strikes = 0.0

    def is_settled(self) -> bool:
        return self.seen >= _SETTLED

    def holds_after(self, step: Step, order: Iterable[int]) -> bool:
        """Whether it is still what is to be expected, after one more step like it that asked in some order."""
        if self._index.keys() > set(order):
            return True  # a backward that went a part of the way says nothing of the others
        if not self.is_settled():
            return False
        if self.is_in(order) and step.was_smooth():
            self._strikes = max(self._strikes - _FADING, 0.0)
        else:
            self._strikes += 1
        return self._strikes < _STRIKES

    def is_in(self, order: Iterable[int]) -> bool:
        """Whether it has times, and its places are asked for in an order."""
        return bool(self._fetched_at) and self._order == list(order)

    def join(self, other: Course, ahead: int) -> None:
        """Expect what both say, of which the other was learnt before; at most so many bytes stay."""
        self.seen = other.seen + 1
        self._gone = list(map(min, self._gone, other._gone))
        self._gone_later = {
            place: min(gone, other.gone_when_asked_for(place)) for place, gone in self._gone_later.items()
        }
        self._fetched_at = list(map(min, self._fetched_at, other._fetched_at))
        both = self.stays | other.stays
        if sum(self.signs[place] for place in both) <= ahead:
            self.stays = both

    def begins_like(self, signs: list[int]) -> bool:
        """Whether a step with these places so far may be of this course."""
        return self.signs[: len(signs)] == signs

    def goes_on(self, place: int, sign: int) -> bool:
        return place < len(self.signs) and self.signs[place] == sign

    def gone_by(self, place: int) -> int:
        """The last place that has left when a step has come to `place`, -1 if none is known to have."""
        return self._gone[place] if place < len(self._gone) else -1

    def gone_when_asked_for(self, place: int) -> int:
        """The same for when backward asks for `place`."""
        return self._gone_later.get(place, -1)

    def after(self, place: int) -> Iterator[int]:
        """What to begin to fetch when `place` is asked for."""
        index = self._index.get(place)
        if index is None:
            yield from _in_reverse(place)
            return
        for later in range(index + 1, min(index + 1 + _LOOKED_AT, len(self._order))):
            if self._fetched_at and self._fetched_at[later] > index:
                return
            yield self._order[later]


def _in_reverse(place: int) -> Iterator[int]:
    return islice(range(place - 1, -1, -1), _LOOKED_AT)


class Step:
    """What has happened so far since a step began."""

    def __init__(self, begin: Moment, courses: list[Course]) -> None:
        self.begin = begin
        self.copies: list[weakref.ref[Copy] | None] = []  # by place; None for marks
        self.sizes: list[int] = []
        self.signs: list[int] = []  # the size of a copy; of a mark, a negative number for what has left it
        self.begun: list[Moment] = []
        self.left: list[Moment] = []
        # Where they were asked for, when, and how what was asked for came back.
        self.askings: list[tuple[int, Moment, Journey | None]] = []
        self.stalls: list[tuple[Moment, Awaited]] = []  # what the device waited for, and since when
        self.changed: set[int] = set()  # the places of what was changed in place
        self._courses = courses
        self.course = courses[0] if courses else None
        self.is_on_one_device = True

    def comes_to(self, sign: int) -> None:
        """Of which course that is, before anything is expected of it; `add` follows."""
        place = len(self.signs)
        self.signs.append(sign)
        if self.course is not None and not self.course.goes_on(place, sign):
            self.course = next((one for one in self._courses if one.begins_like(self.signs)), None)

    def add(self, copy: weakref.ref[Copy] | None, size: int, begun: Moment, left: Moment) -> None:
        self.copies.append(copy)
        self.begun.append(begun)
        self.sizes.append(size)
        self.left.append(left)

    def note_asking(self, place: int, moment: Moment, journey: Journey | None) -> None:
        if not self.is_full():
            self.askings.append((place, moment, journey))

    def note_stall(self, moment: Moment, awaited: Awaited) -> None:
        if not self.is_full():
            self.stalls.append((moment, awaited))

    def is_full(self) -> bool:
        """Whether it is too long to be a step: some graph stays alive, or is gone through again and again."""
        return len(self.sizes) + len(self.askings) + len(self.stalls) >= _LONGEST

    def note_change(self, place: int) -> None:
        """What was copied has been changed in place: the next step has to expect it."""
        self.changed.add(place)
        if self.course is not None:
            self.course.changed.add(place)

    def will_stay(self) -> bool:
        """Whether the copy that it has come to is expected to be asked for too soon to come back in time."""
        return self.course is not None and len(self.sizes) in self.course.stays

    def after(self, place: int) -> Iterator[int]:
        return _in_reverse(place) if self.course is None else self.course.after(place)

    def is_over(self) -> bool:
        """Whether the device has come to the end of it."""
        # All of them, for they are of several streams; the last first, which nearly always are the last to be past.
        moments = chain(reversed(self.left), (moment for _, moment, _ in reversed(self.askings)))
        return all(moment.query() for moment in moments)

    def was_smooth(self) -> bool:
        """Whether the device waited for no copy, or for so short that it says nothing."""
        if not self.is_on_one_device:
            return True
        took = self.begin.elapsed_time(self.askings[-1][1]) if self.askings else 0.0
        return _Clock(self.begin, self.stalls).waited <= min(_SPARE_MS, 10 * _HARMLESS * took) + _HARMLESS * took

    def learn(self, ahead: int, courses: list[Course]) -> Course | None:
        """The course to expect of the next step like this; None if nothing was asked for."""
        askings: dict[int, Moment] = {}
        for place, moment, _ in self.askings:
            askings.setdefault(place, moment)
        if not askings:
            return None
        known = next((one for one in courses if one.signs == self.signs), None)
        if known is not None and known.holds_after(self, askings):
            known.changed = self.changed | (known.changed - askings.keys())
            return known
        course = self._learn_anew(ahead, askings, next((one.rate for one in courses if one.rate is not None), None))
        if known is not None and known.is_in(askings) and course.is_in(askings):
            course.seen = 1
            if known.seen and not known.is_settled():
                course.join(known, ahead)
        return course

    def _learn_anew(self, ahead: int, askings: dict[int, Moment], rate: float | None) -> Course:
        """`rate` is for a step in which nothing came back."""
        order = list(askings)
        rate = self._rate_in() or rate
        if rate is None or not self.is_on_one_device:
            return Course(self.signs, self.changed, order)
        # All times are those of a device that never waits for a copy.
        clock = _Clock(self.begin, self.stalls)
        begun = [clock.time_of(moment) for moment in self.begun]
        needed = [clock.time_of(moment) for moment in askings.values()]
        left = _leaving_times(begun, self.sizes, self._rate_out() / (1 + SPARE))
        durations = [self.sizes[place] / rate for place in order]
        stays = _too_soon([self.sizes[place] for place in order], needed, [left[at] for at in order], durations, ahead)
        return Course(
            self.signs,
            self.changed,
            order,
            rate,
            _fetching(needed, _latest_begins(needed, durations, stays)),
            (order[index] for index in stays),
            _gone_by(begun, left),
            dict(zip(order, _gone_by(needed, left), strict=True)),
        )

    def _rate_in(self) -> float | None:
        """Bytes in a millisecond on the way back, None if nothing came back."""
        journeys = ((self.sizes[place], journey) for place, _, journey in self.askings if journey is not None)
        return _usual_rate((size, took) for size, one in journeys if (took := one.milliseconds()) is not None)

    def _rate_out(self) -> float:
        """Bytes in a millisecond on the way out: a copy starts when it is begun and the one before has left."""
        found, before = [], 0.0
        for size, begun, left in zip(self.sizes, self.begun, self.left, strict=True):
            if size:
                ended = self.begin.elapsed_time(left)
                found.append((size, ended - max(before, self.begin.elapsed_time(begun))))
                before = ended
        return _usual_rate(found) or math.inf


def _usual_rate(copies: Iterable[tuple[int, float]]) -> float | None:
    """The rate that half of the bytes travel at, or faster: some copies wait for memory to be allocated."""
    rates = sorted((size / took, size) for size, took in copies if took > 0)
    behind = sum(size for _, size in rates) / 2
    for rate, size in reversed(rates):
        behind -= size
        if behind <= 0:
            return rate
    return None


class _Clock:
    """Tells what the time would be if the device had not waited."""

    def __init__(self, begin: Moment, stalls: list[tuple[Moment, Awaited]]) -> None:
        self._begin = begin
        self._since: list[float] = []  # when each wait began, and how long all of them were until it ended
        self._waited: list[float] = []
        waited = 0.0
        for moment, awaited in stalls:
            late = awaited.late_by(moment)
            if late is not None and late > 0:
                waited += late
                self._since.append(begin.elapsed_time(moment))
                self._waited.append(waited)

    @property
    def waited(self) -> float:
        """In all."""
        return self._waited[-1] if self._waited else 0.0

    def time_of(self, moment: Moment) -> float:
        time = self._begin.elapsed_time(moment)
        before = bisect_left(self._since, time)
        return time - (self._waited[before - 1] if before else 0.0)


def _leaving_times(begun: list[float], sizes: list[int], rate: float) -> list[float]:
    """When each has left, one after the other."""
    left, time = [], 0.0
    for begin, size in zip(begun, sizes, strict=True):
        if size:
            time = max(time, begin) + size / rate
        left.append(time if size else begin)
    return left


def _gone_by(times: list[float], left: list[float]) -> list[int]:
    """For each of some times, in order, the last place that had left by then, with a bit to spare."""
    gone, last = [], -1
    for time in times:
        while last + 1 < len(left) and left[last + 1] + _SPARE_MS <= time:
            last += 1
        gone.append(last)
    return gone


def _too_soon(sizes: list[int], needed: list[float], left: list[float], durations: list[float], ahead: int) -> set[int]:
    """What cannot be back in time if fetching begins with the first asking, up to as many bytes as may be ahead."""
    stays, bytes_there, time = set(), 0, needed[0]
    for index, size in enumerate(sizes):
        arrival = max(time, left[index]) + durations[index]
        if size and arrival > needed[index] and bytes_there + size <= ahead:
            stays.add(index)
            bytes_there += size
        else:
            time = arrival
    return stays


def _latest_begins(needed: list[float], durations: list[float], stays: set[int]) -> list[float]:
    """When to begin to fetch each at the latest, one after the other, so that all are there in time to spare."""
    begins, latest = [0.0] * len(needed), math.inf
    for index in reversed(range(len(needed))):
        if index not in stays:
            latest = min(latest, needed[index]) - (1 + SPARE) * durations[index]
        begins[index] = latest
    return begins


def _fetching(needed: list[float], begins: list[float]) -> list[int]:
    """With which asking to begin to fetch each."""
    # Not the last one before it must begin but the one before that, to be on the safe side.
    return [max(bisect_left(needed, begin) - 2, 0) for begin in begins]
