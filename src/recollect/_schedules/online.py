"""Online: which states to keep while nobody knows where the chain will end.

After Stumm and Walther, New algorithms for optimal online checkpointing, SIAM Journal on Scientific Computing 32
(2010), and Wang, Moin and Iaccarino, Minimal repetition dynamic checkpointing algorithm for unsteady adjoint
calculation, SIAM Journal on Scientific Computing 31 (2009): what they prove to be possible is what is kept to here.

Let b(c, r) = C(c + r, c), and let l be the steps so far, b(c, r) < l <= b(c, r + 1). If the chain ended now with states
p(0) = 0 < p(1) < ... in slots, the last step would be differentiated at once, and the gaps between states by Revolve,
from the last one to the first, gap i with c - i slots. No step is run again more than r + 1 times, which is the least
possible, if and only if gap i is at most b(c - i, r) long, for all i, the open one at the end included. Therefore:

1. A state is kept as late as that allows, when the open gap is as long as it may be.
2. Those at 0, b(c, r), b(c, r) + b(c - 1, r), ... stay for as long as r does: at l = b(c, r + 1) there is no other way.
3. When there is no slot, one is freed: the last one, but for those, whose gaps make together one that is allowed. There
   is one always. (Take the first, but for those: its gap is part of the one between two of them, which is allowed.)

For r <= 1, so up to l = b(c, 2) = (c + 1)(c + 2) / 2, the number of extra forwards is the least possible too: all slots
are in use, and Revolve needs no more for gaps of these lengths. Beyond that there are a few more. By 3. what goes is
worth little, for a state that is close to the end covers a short gap. Measured up to 5,000 steps, there are at most
12.2% more extra forwards than with Revolve for 2 slots, 5.0% for 5, 1.1% for 10, 0.3% for 20.

A state is worth a slot only if another step follows the one that starts from it: `decide(i)` is therefore about state
i - 1. An executor has that at hand: it was what the step took that has just been run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from math import comb, inf

from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore, ScheduleError, check_int
from recollect._schedules.revolve import piece
from recollect._schedules.schedule import Schedule


class Online:
    """A schedule for a chain whose end shows only when it is reached. One object goes through one chain at a time.

    It goes like this::

        schedule = online(slots)
        for i in 0, 1, 2, ...:
            if the chain ends with state i: break
            for action in schedule.decide(i): ...    # Drop, and Keep(i - 1), whose state is at hand yet
            run step i
        for action in schedule.rest(i): ...          # begins with Backward(i - 1)

    Attributes:
        slots: How many states may be kept at a time.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._begin()

    def _begin(self) -> None:
        self._next = 0  # the state that is decided about next
        self._kept: list[int] = []
        self._due: float = 1  # the first state before which there is something to do
        self._set_repetitions(0)

    def _set_repetitions(self, r: int) -> None:
        c = self.slots
        self._r = r
        self._until = comb(c + r + 1, c)  # as long as there are no more steps than this
        self._longest = [comb(c - i + r, r) for i in range(c)]  # that gap i may be
        self._staying = [0, *accumulate(self._longest[:-1])]

    def decide(self, state: int) -> tuple[Action, ...]:
        """What to do where `state` has been reached and step `state` is about to be run.

        States come in order, from 0; with 0 a new chain begins.

        Returns:
            Nothing in most cases. Else a `Keep` of the state before, `state - 1`, after a `Drop` where all slots are
            taken.

        Example:
            >>> schedule = Online(2)
            >>> [schedule.decide(i) for i in range(5)]
            [(), (Keep(state=0, tier=0),), (Keep(state=1, tier=0),), (), (Drop(state=1, tier=0), Keep(state=3, tier=0))]
        """
        if state != self._next:
            if state != 0:
                raise ScheduleError(f"state must be the next one, {self._next}, or 0 for a new chain, got {state!r}")
            self._begin()
        self._next = state + 1
        if state < self._due:
            return ()
        return self._take(state - 1)

    def _take(self, new: int) -> tuple[Action, ...]:
        kept = self._kept
        actions: tuple[Action, ...] = (Keep(new),)
        if len(kept) == self.slots:
            actions = (Drop(kept.pop(self._dispensable(new))), *actions)
        kept.append(new)
        if self.slots == 1:  # which has the first state
            self._due = inf
            return actions
        while True:
            longest = new + self._longest[len(kept) - 1]
            place = bisect_right(self._staying, new)
            self._due = min([longest, *self._staying[place : place + 1]]) + 1
            if self._due < self._until:
                return actions
            self._set_repetitions(self._r + 1)

    def _dispensable(self, new: int) -> int:
        """The last of the kept states that can go, as its place among them."""
        kept, staying = self._kept, self._staying
        after = new
        for i in range(len(kept) - 1, 0, -1):
            place = bisect_left(staying, kept[i])
            stays = place < len(staying) and staying[place] == kept[i]
            if not stays and after - kept[i - 1] <= self._longest[i - 1]:
                return i
            after = kept[i]
        raise AssertionError("there is one always")

    def rest(self, length: int) -> Iterator[Action]:
        """The actions once the chain has ended with state `length`: from `Backward(length - 1)` on.

        They take the graph of the last step to be held. Who does not have it, because no step was known to be the last
        one, runs it again from state `length - 1`, which was at hand when the end was found.

        Raises:
            ScheduleError: If `decide` was not asked about exactly the states before `length`.
        """
        if length != self._next or not length:
            raise ScheduleError(f"length must be what decide() was asked about, {self._next} steps, got {length!r}")
        return _reverse(tuple(self._kept), length, self.slots)

    def schedule(self, length: int) -> Schedule:
        """The whole schedule, as it comes out for a chain that turns out to have so many steps.

        Example:
            >>> Online(10).schedule(66).cost(), Online(10).schedule(1000).cost()
            (120, 3636)
        """
        check_int("length", length)
        actions = partial(_whole, self.slots, length)
        return Schedule(actions=actions, length=length, slots=(self.slots,), name="online")

    def __repr__(self) -> str:
        return f"<online: any number of steps, {self.slots} slots>"


def _whole(slots: int, length: int) -> Iterator[Action]:
    online = Online(slots)
    running = 0
    for state in range(length):
        actions = online.decide(state)
        if actions:
            if running < state - 1:
                yield Forward(running, state - 1)
                running = state - 1
            yield from actions
    if running < length - 1:
        yield Forward(running, length - 1)
    yield Forward(length - 1, length, graph=True)
    yield from online.rest(length)


def _reverse(kept: tuple[int, ...], length: int, slots: int) -> Iterator[Action]:
    stop = length - 1
    yield Backward(stop)
    for i in range(len(kept) - 1, -1, -1):
        yield Restore(kept[i])
        yield from piece(kept[i], stop, slots - i)
        stop = kept[i]
