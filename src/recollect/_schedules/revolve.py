"""Revolve: the least number of extra forwards for a number of slots, in closed form.

Griewank and Walther, Algorithm 799: Revolve, ACM Transactions on Mathematical Software 26 (2000); the recursion and its
optimality: Griewank, Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation, Optimization Methods and Software 1 (1992).

Let b(c, r) = C(c + r, c). A piece of l steps with c slots, one of which has its first state, is cut into a left part of
j steps and a right part: run j steps, keep the state there, reverse the right part with c - 1 slots, come back, reverse
the left part with c slots. For the r with b(c, r - 1) < l <= b(c, r) every j with

    b(c, r - 2) <= j <= b(c, r - 1)   and   b(c - 1, r - 1) <= l - j <= b(c - 1, r)

takes r l - C(c + r, r - 1) extra forwards, the fewest. Among them is taken the one by Griewank and Walther that keeps
the fewest states on the way. The left part is one for r - 1 or less and the right part for r or less, so r is looked
for once, a cut is some looks into a table, and pieces that wait are on a stack of at most c + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore


def repetitions(length: int, slots: int) -> int:
    """How often the steps that are run again most often are run again, at best."""
    r, longest = 0, 1
    while longest < length:
        r += 1
        longest = longest * (slots + r) // r
    return r


def extra_forwards(length: int, slots: int) -> int:
    """The least number of forwards beyond one per step."""
    r = repetitions(length, slots)
    return r * length - comb(slots + r, r - 1) if r else 0


def whole(length: int, slots: int) -> Iterator[Action]:
    """The actions for a chain of that length, its forward included."""
    yield Keep(0)
    yield from piece(0, length, slots, last=length - 1)


def piece(start: int, stop: int, slots: int, *, last: int | None = None) -> Iterator[Action]:
    """The actions that differentiate steps `start` to `stop - 1`, where state `start` is the running one, and kept.

    Args:
        start: The first step.
        stop: The one after the last.
        slots: How many there are, the one of state `start` included.
        last: The step that is run with a graph first, because the forward ends with it.
    """
    c = max(1, min(slots, stop - start - 1))  # more would never be used
    r = repetitions(stop - start, c)
    # longest[c][r] = b(c, r). The zeros at the ends of rows and columns are what indices from -1 down find.
    longest = [[*(comb(k + i, k) for i in range(r + 1)), 0, 0] for k in range(c + 1)]
    longest += [[0] * (r + 3)] * 2

    waiting: list[tuple[int, int, int, int]] = []
    kept = True
    while True:
        while stop - start > 1:
            steps, row = stop - start, longest[c]
            while steps <= row[r - 1]:
                r -= 1
            if steps <= row[r - 1] + longest[c - 2][r - 1]:
                middle = start + max(1, row[r - 2])
            elif steps >= row[r] - longest[c - 3][r]:
                middle = start + row[r - 1]
            else:
                middle = stop - longest[c - 1][r - 1] - longest[c - 2][r - 1]
            waiting.append((start, middle, c, r))
            yield Forward(start, middle)
            start, c = middle, c - 1
            kept = stop - start > 1  # a single step is differentiated from the running state
            if kept:
                yield Keep(start)
        if kept:
            yield Drop(start)
        if start == last:
            yield Forward(start, stop, graph=True)
        yield Backward(start)
        if not waiting:
            return
        start, stop, c, r = waiting.pop()
        kept = True
        yield Restore(start)
