"""A multiple-choice knapsack along a chain: one choice per block, least seconds, every prefix of what is kept bounded.

Two programs over the blocks work together.

1. From the last block to the first, over memory in some thousand levels, everything rounded in favour of what is asked
   for (what is kept down, and so is the room for it): `rest[i][level]` is no more than what blocks i, i + 1, ... take
   where blocks before i keep `level`. It is a bound, and exact where all sizes are multiples of a level.
2. From the first block to the last, over answers to the blocks so far, with exact bytes: an answer is left out where
   another one keeps no more and takes no longer, where its seconds and the rest's bound come to no less than an answer
   that is known, and where it cannot be completed. That last test is exact: the most that blocks before i may keep for
   the remainder to fit at all is known for every i.

If nothing else is left out the second one finds the optimum and proves it. It goes on with at most so many answers,
those with the least bound, and then the least bound of what was left out bounds the optimum, so the gap that it reports
is true either way. What rounding loses is made up for by a second bound, with a price for every byte that is kept.

This is the multiple-choice knapsack (Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11), with a
capacity for every prefix in place of one for all.

Bad at: very many blocks with all sizes different, where a level is not much less than a block; the gap says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from recollect._problem import Problem

LEVELS = 4096
# How many answers are followed at a time: a few find a good one, and with that most others need not be followed.
FEW, MORE, MOST = 8, 128, 4096
_WORK = 2_500_000  # of answers times choices: about 0.3 s
_SAME = 1e-9  # what sums in floating point may differ by, relative

Options = list[list[int]]


class Found(NamedTuple):
    """An answer, its seconds, and what no answer takes less than."""

    chosen: list[int]
    seconds: float
    bound: float


class _Item(NamedTuple):
    k: int
    seconds: float
    kept: int
    need: int


class Chain:
    """The numbers of a problem without ties and without a link, reduced to what a choice of least seconds can use."""

    def __init__(self, problem: Problem, options: Options) -> None:
        """`options` are the indices of the choices of each block that may be taken."""
        self.items = [
            _undominated(
                [
                    _Item(k, choice.seconds, choice.kept, block.need(choice))
                    for k, choice in enumerate(block.choices)
                    if k in allowed
                ]
            )
            for block, allowed in zip(problem.blocks, options, strict=True)
        ]
        # Where there is no other moment, what blocks keep is not counted: nothing is ruled out.
        self.others = [-sum(max(item.kept for item in items) for items in self.items)] * (len(self.items) + 1)
        for moment in problem.moments:
            self.others[moment.after] = max(self.others[moment.after], moment.bytes)

    def least_peak(self) -> tuple[int, list[int]]:
        """The least peak that any choice reaches, and such a choice. Exact, and as fast as reading the problem."""
        # Whatever comes before a block adds the same to each of its choices' peaks, so what is best for the remainder
        # is best in every case.
        least, chosen = self.others[-1], []
        for items, other in zip(reversed(self.items), reversed(self.others[:-1]), strict=True):
            best, index = min((max(item.need, item.kept + least), item.k) for item in items)
            least = max(best, other)
            chosen.append(index)
        return least, chosen[::-1]

    def solve(self, budget: int, *, enough: float | None = None, quick: bool = False) -> Found | None:
        """Least seconds within `budget`; None where nothing fits.

        Args:
            budget: Bytes.
            enough: Stop when it is known whether so many seconds can be reached.
            quick: Follow few answers only.
        """
        fitted = self._fitted(budget)
        if fitted is None:
            return None
        steps, most = fitted
        bounds = [_Bounds(steps, most)]
        best = _follow(steps, bounds, FEW, Found([], math.inf, bounds[0].all))
        if _settled(best, enough):
            return best
        if not bounds[0].exact:
            bounds.append(_Bounds(steps, most, _prices(steps, most)))
            best = best._replace(bound=max(best.bound, min(bounds[1].all, best.seconds)))
        many = _WORK // sum(len(step.ks) for step in steps)
        for width in (MORE,) if quick else (MORE, min(max(many, MORE), MOST)):
            if _settled(best, enough):
                break
            best = _follow(steps, bounds, width, best)
        return best

    def _fitted(self, budget: int) -> tuple[list[_Step], list[int]] | None:
        """Per block the choices that are part of an answer, with the room for each; and the most before each block.

        Sizes are those above the least that the block keeps in any case: less is rounded, and numbers are smaller.
        """
        most = budget - self.others[-1]
        backwards: list[list[tuple[_Item, int]]] = []
        mosts = [most]
        for items, other in zip(reversed(self.items), reversed(self.others[:-1]), strict=True):
            rooms = [(item, min(budget - item.need, most - item.kept)) for item in items]
            most = min(budget - other, max(room for _, room in rooms))
            rooms = [(item, min(room, most)) for item, room in rooms]
            backwards.append(rooms)
            mosts.append(most)
        if most < 0:
            return None
        steps, bases, base = [], [], 0
        for rooms, most in zip(reversed(backwards), reversed(mosts[1:]), strict=True):
            usable = [(item, room - base) for item, room in rooms if room >= base]
            least = min(item.kept for item, _ in usable)
            bases.append(most - base)
            steps.append(
                _Step(
                    [item.k for item, _ in usable],
                    [item.seconds for item, _ in usable],
                    [item.kept - least for item, _ in usable],
                    [room for _, room in usable],
                )
            )
            base += least
        bases.append(mosts[0] - base)
        return steps, bases


class _Step(NamedTuple):
    """One block: four columns over its choices."""

    ks: list[int]
    seconds: list[float]
    kept: list[int]
    room: list[int]  # what blocks before may keep where this is chosen


def _undominated(items: list[_Item]) -> list[_Item]:
    kept: list[_Item] = []
    for item in sorted(items, key=lambda item: (item.seconds, item.kept, item.need, item.k)):
        if not any(other.kept <= item.kept and other.need <= item.need for other in kept):
            kept.append(item)
    return kept


def _settled(found: Found, enough: float | None) -> bool:
    if found.seconds <= found.bound * (1 + _SAME):
        return True
    return enough is not None and (found.seconds <= enough or found.bound > enough)


class _Bounds:
    """For every block and level of what is kept before it: what it and later ones take at least.

    What is lost by rounding is charged at a price per byte, and so is what is kept; the room is paid back at the same
    price (Lagrange). Any prices give a bound; at none it is the rounding's alone.
    """

    def __init__(self, steps: list[_Step], most: list[int], prices: list[float] | None = None) -> None:
        reached = [0]
        for step, after in zip(steps, most[1:], strict=True):
            reached.append(min(reached[-1] + max(step.kept), after))
        divisor = math.gcd(*(kept for step in steps for kept in step.kept))
        self.quantum = max(divisor, -(-max(reached) // LEVELS), 1)
        self.exact = self.quantum == max(divisor, 1)
        prices = prices or [0.0] * len(most)
        self.rest = [_floats([0.0] * (reached[-1] // self.quantum + 1))]
        self.price = [0.0]  # of a byte that is kept before a block
        levels = torch.arange(max(reached) // self.quantum + 1, dtype=torch.float64, device="cpu") * self.quantum
        for i in reversed(range(len(steps))):
            step, later = steps[i], self.rest[-1]
            price = self.price[-1] + prices[i + 1]
            if prices[i + 1]:
                later = later + (levels[: later.numel()] - most[i + 1]) * prices[i + 1]
            here = torch.full((reached[i] // self.quantum + 1,), math.inf, dtype=torch.float64, device="cpu")
            for seconds, kept, room in zip(step.seconds, step.kept, step.room, strict=True):
                first, lost = divmod(kept, self.quantum)
                count = min(room // self.quantum + 1, here.numel(), later.numel() - first)
                if count > 0:
                    part = here[:count]
                    torch.minimum(part, later[first : first + count] + (seconds + price * lost), out=part)
            self.rest.append(here)
            self.price.append(price)
        self.rest.reverse()
        self.price.reverse()
        self.all = max(float(self.rest[0][0]), 0.0)

    def after(self, i: int, kept: Tensor) -> Tensor:
        """What blocks from i on take at least, where those before keep so much."""
        level = kept // self.quantum
        bound = self.rest[i][level]
        return bound + (kept - level * self.quantum) * self.price[i] if self.price[i] else bound


def _prices(steps: list[_Step], most: list[int]) -> list[float]:
    """What more room before each block is worth, where choices can be mixed and a choice's own need is left aside.

    Then the best is to buy what saves most per byte, wherever all later prefixes have room for it, until none has: the
    prefixes form a chain, so being greedy is optimal. A block's price is what was being bought when its room ran out.
    """
    room = _floats(most[1:])
    offers = sorted(
        ((saved, i, kept) for i, step in enumerate(steps) for saved, kept in _hull(step)),
        key=lambda offer: (-offer[0], offer[1]),
    )
    price = [0.0] * (len(steps) + 1)
    closed = 0  # blocks before this one can take no more
    for saved, i, kept in offers:
        if i < closed:
            continue
        later = room[i:]
        later -= min(kept, float(later.min()))
        full = (later <= 0).nonzero()
        if full.numel():
            until = i + 1 + int(full[-1])
            price[closed:until] = [saved] * (until - closed)
            closed = until
            if closed == len(steps):
                break
    return [0.0] + [max(now - after, 0.0) for now, after in pairwise(price)]


def _hull(step: _Step) -> list[tuple[float, int]]:
    """(seconds saved per byte, bytes) from the least that is kept to the fastest, falling: the lower convex hull."""
    corners: list[tuple[int, float]] = []
    for kept, seconds in sorted(zip(step.kept, step.seconds, strict=True)):
        if corners and seconds >= corners[-1][1]:
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-2], (kept, seconds)):
            corners.pop()
        corners.append((kept, seconds))
    return [(_slope(one, other), other[0] - one[0]) for one, other in pairwise(corners)]


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (one[1] - other[1]) / (other[0] - one[0])


def _floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _follow(steps: list[_Step], bounds: list[_Bounds], width: int, best: Found) -> Found:
    """`best` or a better answer, following at most `width` answers to the blocks so far, and what that proves."""
    known = best.seconds
    left_out = math.inf
    kept = torch.zeros(1, dtype=torch.int64, device="cpu")
    seconds = torch.zeros(1, dtype=torch.float64, device="cpu")
    trail: list[tuple[Tensor, Tensor]] = []
    for i, step in enumerate(steps):
        room = torch.tensor(step.room, dtype=torch.int64, device="cpu")
        more = torch.tensor(step.kept, dtype=torch.int64, device="cpu")
        longer = torch.tensor(step.seconds, dtype=torch.float64, device="cpu")
        fits = kept[:, None] <= room
        before, choice = fits.nonzero(as_tuple=True)
        kept, seconds = kept[before] + more[choice], seconds[before] + longer[choice]
        rest = bounds[0].after(i + 1, kept)
        for other in bounds[1:]:
            rest = torch.maximum(rest, other.after(i + 1, kept))
        bound = seconds + rest
        if known < math.inf:
            hopeful = bound < known * (1 - _SAME)
            kept, seconds, bound, before, choice = (part[hopeful] for part in (kept, seconds, bound, before, choice))
            if not kept.numel():
                return Found(best.chosen, known, max(best.bound, min(known, left_out)))
        # Of those that keep no more, only what is faster: sorted by what is kept, seconds must fall.
        order = torch.argsort(seconds)
        order = order[torch.argsort(kept[order], stable=True)]
        sorted_seconds = seconds[order]
        least = torch.cummin(sorted_seconds, 0).values
        faster = torch.ones_like(order, dtype=torch.bool)
        faster[1:] = sorted_seconds[1:] < least[:-1]
        order = order[faster]
        if order.numel() > width:
            ranks = torch.argsort(bound[order], stable=True)
            left_out = min(left_out, float(bound[order[ranks[width]]]))
            order = order[ranks[:width]]
        kept, seconds = kept[order], seconds[order]
        trail.append((before[order], choice[order]))
    at = int(torch.argmin(seconds))
    total = float(seconds[at])
    chosen = []
    for step, (before, choice) in zip(reversed(steps), reversed(trail), strict=True):
        chosen.append(step.ks[int(choice[at])])
        at = int(before[at])
    return Found(chosen[::-1], total, max(best.bound, min(total, left_out)))
