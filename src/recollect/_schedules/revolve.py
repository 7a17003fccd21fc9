"""Revolve: the least number of extra forwards for a number of slots, in closed form.

Griewank and Walther, Algorithm 799: Revolve, ACM Transactions on Mathematical Software 26 (2000); Griewank, Achieving
logarithmic growth of temporal and spatial complexity in reverse automatic differentiation (1992).

Let b(c, r) = C(c + r, c). A piece of l steps with c slots, one of which holds its first state, is split into a left
part of j steps and a right part: run j steps, keep the state there, reverse the right part with c - 1 slots, come back,
reverse the left part with c. With r such that b(c, r - 1) <= l <= b(c, r) every j with

    b(c, r - 2) <= j <= b(c, r - 1)   and   b(c - 1, r - 1) <= l - j <= b(c - 1, r)

is optimal, and leaves a left part for r - 1 and a right part for r. So r is looked for once, and every split is two
looks into a table: there is no search, and pieces that wait are on a stack of at most c.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore


def repetitions(length: int, slots: int) -> int:
    """The most times that a step has to be run again, in the best schedule."""
    r = 0
    while comb(slots + r, slots) < length:
        r += 1
    return r


def extra_forwards(length: int, slots: int) -> int:
    """The least number of forwards beyond one per step."""
    r = repetitions(length, slots)
    return r * length - comb(slots + r, r - 1) if r else 0


def sweeps(length: int, slots: int) -> Iterator[Action]:
    """The actions, one after the other."""
    last = length - 1
    slots = max(1, min(slots, last))  # more are never used
    r = repetitions(length, slots)
    # longest[c][r + 1]: the longest piece for c slots and r repetitions. None is possible with r = -1.
    longest = [[0, *(comb(c + k, c) for k in range(r + 1))] for c in range(slots + 1)]

    waiting: list[tuple[int, int, int, int]] = []
    start, stop, c = 0, length, slots
    yield Keep(0)
    kept = True
    while True:
        while stop - start > 1:
            steps = stop - start
            middle = start + min(longest[c][r], steps - longest[c - 1][r])
            waiting.append((start, middle, c, r - 1))
            yield Forward(start, middle)
            start, c = middle, c - 1
            kept = stop - start > 1  # a single step is differentiated from the running state
            if kept:
                yield Keep(start)
        if kept:
            yield Drop(start)
        if start == last:
            yield Forward(last, length, graph=True)
        yield Backward(start)
        if not waiting:
            return
        start, stop, c, r = waiting.pop()
        kept = True
        yield Restore(start)
