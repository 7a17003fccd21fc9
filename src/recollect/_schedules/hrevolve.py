"""H-Revolve: equal steps, and slots in several tiers, each with its time for a write and for a read.

Herrmann and Pallez, H-Revolve: A framework for adjoint computation on synchronous hierarchical platforms, ACM
Transactions on Mathematical Software 46 (2020).

For tier k with c(k) slots, of which m are free, write w(k), read r(k), and u for a forward, the least extra time for a
piece of n steps is

    P(k, n, m), where its first state is in tier k:  the less of O(k - 1, n, c(k - 1)) and, over all cuts j,
                                                     j u + O(k, n - j, m - 1) + r(k) + P(k, j, m)
    O(k, n, m), where it is the running one alone:   the less of O(k - 1, n, c(k - 1)) and w(k) + P(k, n, m)

and nothing for n = 1, which is differentiated from the running state. No copy is taken to go on beside computation.

Slower tiers have the older states. Where a slower tier takes no less, neither to write nor to read, no schedule of any
form was found to be better. Where one does take less, this is the best of the schedules of that form.

**Time.** A curve is P or O over n. Where the curves are convex, as in the fastest tier, the best j never falls as n
grows, and is followed. Else, since they consist of straight lines, it is at the end of a line, where one of the two
bends upwards: no other is tried. And where a tier has slots enough for whatever would be best, one curve does for all
m. Where all that still takes too long, cuts in the slower tiers are at multiples of some number of steps only, and the
name of the schedule says so. The part in the fastest tier is exact always.

Bad at: hundreds of slots in a slower tier, thousands of steps, and writes and reads for next to nothing, all together:
those multiples are coarse then.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore, ScheduleError
from recollect._schedules.revolve import extra_forwards, piece

_FASTEST = 10_000_000  # slots times steps in the fastest tier: some seconds
_BLOCKS = 4096  # places for cuts in the slower tiers, at most
_WORK = 150_000_000  # cuts to be tried in one slower tier: some seconds
_NOISE = 1e-9  # a bend by less than this part of a forward is from rounding


@dataclass(frozen=True)
class Tier:
    """A tier's slots, and what a write and a read take."""

    slots: int
    write: float
    read: float


class Cuts:
    """Where to cut, for every piece that may come up.

    Slower tiers have pieces of whole blocks, with or without the steps that are left over at the chain's end. In most
    cases a block is one step.
    """

    def __init__(self, length: int, tiers: Sequence[Tier], forward: float) -> None:
        self._length, self._tiers, self._forward = length, tiers, forward
        noise = _NOISE * forward
        if tiers[0].write == tiers[0].read == 0:
            self._fastest = None  # Revolve has it in closed form
        else:
            self._fastest = _Fastest(length, tiers[0], forward, noise)
        self.block = -(-length // _BLOCKS) if len(tiers) > 1 else 1
        while True:
            try:
                self._slower = self._plan(noise)
                return
            except _TooLongError:
                self.block *= 2

    def _plan(self, noise: float) -> list[_Slower]:
        length, block = self._length, self.block
        over = length % block
        lengths = [range(0, length + 1, block), range(over, length + 1, block) if over else range(0)]
        slots = self._tiers[0].slots
        if self._fastest is not None:
            curves = [[self._fastest.least[n] for n in family] for family in lengths]
        else:
            curves = [[self._forward * extra_forwards(n, slots) if n else inf for n in family] for family in lengths]
        slower = []
        for tier in self._tiers[1:]:
            slower.append(_Slower(curves, tier, block * self._forward, noise))
            curves = slower[-1].least
        return slower

    def actions(self) -> Iterator[Action]:
        """The actions, one after the other."""
        last = self._length - 1
        waiting: list[tuple[int, int, int, int]] = []
        start, stop, tier = 0, self._length, len(self._tiers) - 1
        free, kept = self._tiers[tier].slots, False
        while True:
            steps = stop - start
            if steps > 1:
                if not kept:
                    while tier and not self._is_kept(tier, steps, free):
                        tier -= 1
                        free = self._tiers[tier].slots
                    yield Keep(start, tier)
                cut = self._cut(tier, steps, free)
                if cut:
                    waiting.append((start, start + cut, tier, free))
                    yield Forward(start, start + cut)
                    start, free, kept = start + cut, free - 1, False
                    continue
                if tier:
                    yield Drop(start, tier)
                    tier -= 1
                    free, kept = self._tiers[tier].slots, False
                    continue
                yield from piece(start, stop, free, last=last)
            else:
                if kept:
                    yield Drop(start, tier)
                if start == last:
                    yield Forward(start, stop, graph=True)
                yield Backward(start)
            if not waiting:
                return
            start, stop, tier, free = waiting.pop()
            kept = True
            yield Restore(start, tier)

    def _is_kept(self, tier: int, steps: int, free: int) -> bool:
        layer = self._slower[tier - 1].layer(free)
        family, blocks = self._place(steps)
        return layer is not None and bool(layer.kept[family][blocks])

    def _cut(self, tier: int, steps: int, free: int) -> int:
        """After how many steps to cut a piece that starts from a tier; 0 where those below, or Revolve, take over."""
        if not tier:
            return 0 if self._fastest is None else self._fastest.cut(steps, free)
        layer = self._slower[tier - 1].layer(free)
        family, blocks = self._place(steps)
        return 0 if layer is None else layer.cuts[family][blocks] * self.block

    def _place(self, steps: int) -> tuple[int, int]:
        blocks, over = divmod(steps, self.block)
        return (1 if over else 0), blocks


class _TooLongError(Exception):
    """There are too many places for cuts."""


class _Curve:
    """Numbers over n = 0, 1, ...; where they bend upwards; and whether they never bend downwards.

    There may be infinite ones before the others, and after them. Both ends of the others count as bends upwards.
    """

    def __init__(self, noise: float, values: Sequence[float] = ()) -> None:
        self.values: list[float] = []
        self.bends: list[int] = []
        self.is_convex = True
        self.first = 0  # that is not infinite
        self._noise = noise
        for value in values:
            self.append(value)

    def append(self, value: float) -> None:
        values = self.values
        values.append(value)
        n = len(values) - 1
        if not n or values[-2] == inf:
            if value != inf and not self.bends:
                self.first = n
                self.bends.append(n)
        elif n > 1 and values[-3] != inf:
            bend = value - 2 * values[-2] + values[-3]
            if bend > self._noise:
                self.bends.append(n - 1)
            elif bend < -self._noise:
                self.is_convex = False


class _Sums:
    """The least a(j) + h(n - j) over j >= 1, and its j, for n in rising order. The curves may grow meanwhile."""

    def __init__(self, a: _Curve, h: _Curve) -> None:
        self._a, self._h = a, h
        self._j = 1

    def least(self, n: int) -> tuple[float, int]:
        a, h, last = self._a.values, self._h.values, n - self._h.first
        if self._a.is_convex and self._h.is_convex:
            j = self._j
            found = a[j] + h[n - j]
            while j < last:
                value = a[j + 1] + h[n - j - 1]
                if value > found:
                    break
                j, found = j + 1, value
            self._j = j
            return found, j
        cuts = self._a.bends[: bisect_right(self._a.bends, last)]
        rests = self._h.bends[: bisect_right(self._h.bends, n - 1)]
        from_cuts = [a[j] + h[n - j] for j in cuts]
        from_rests = [a[n - rest] + h[rest] for rest in rests]
        found = min(from_cuts)
        other = min(from_rests)
        if other < found:
            return other, n - rests[from_rests.index(other)]
        return found, cuts[from_cuts.index(found)]


class _Fastest:
    """The fastest tier, where its writes and reads take time."""

    def __init__(self, length: int, tier: Tier, forward: float, noise: float) -> None:
        slots = max(1, min(tier.slots, length - 1))  # more would never be used
        if slots * length > _FASTEST:
            raise ScheduleError(
                f"tiers must have fewer slots in the fastest tier, if its writes and reads take time: at most "
                f"{_FASTEST // length} for {length} steps, got {tier.slots}"
            )
        above = _Curve(noise, [inf, 0, *([inf] * (length - 1))])
        self._cuts: list[array[int]] = []
        for _ in range(slots):
            cuts = array("l", [0, 0])
            a = _Curve(noise, [inf, forward + tier.read])
            sums = _Sums(a, above)
            following = _Curve(noise, [inf, 0])
            for n in range(2, length + 1):
                found, j = sums.least(n)
                cuts.append(j)
                a.append(n * forward + tier.read + found)
                following.append(tier.write + found)
            self._cuts.append(cuts)
            above = following
        self.least = above.values

    def cut(self, steps: int, free: int) -> int:
        return self._cuts[min(free, len(self._cuts)) - 1][steps]


class _Slower:
    """A tier with others below it. Its pieces come in two families: of whole blocks, and of some blocks with a rest.

    Args:
        below: The curves O of the tiers below, for the two families.
        tier: This one.
        forward: The time of a block.
        noise: Bends by less are from rounding.
    """

    def __init__(self, below: Sequence[Sequence[float]], tier: Tier, forward: float, noise: float) -> None:
        unlimited = _Layer(below, tier, forward, noise)
        self._is_unlimited = max(max(used, default=0) for used in unlimited.used) <= tier.slots
        self._layers = [unlimited]
        if not self._is_unlimited:
            blocks = len(below[0])
            if blocks > 64 and tier.slots * blocks * unlimited.bends // 4 > _WORK:
                raise _TooLongError
            self._layers = []
            alone = [_Curve(noise, curve) for curve in below]
            for slots in range(1, tier.slots + 1):
                self._layers.append(_Layer(below, tier, forward, noise, slots=slots, fewer=alone, unlimited=unlimited))
                alone = self._layers[-1].alone
        self.least = [curve.values for curve in self._layers[-1].alone]

    def layer(self, free: int) -> _Layer | None:
        """For so many free slots; None where there are none."""
        if not free:
            return None
        return self._layers[0 if self._is_unlimited else free - 1]


class _Layer:
    """The curves of a tier for one number of free slots, and the cuts behind them.

    Args:
        below: As for `_Slower`, like the next three.
        tier: Likewise.
        forward: Likewise.
        noise: Likewise.
        slots: How many are free; None where their number is no limit.
        fewer: The curves O for one slot fewer.
        unlimited: The layer without a limit, which is right wherever it does not use more.
    """

    def __init__(
        self,
        below: Sequence[Sequence[float]],
        tier: Tier,
        forward: float,
        noise: float,
        *,
        slots: int | None = None,
        fewer: Sequence[_Curve] | None = None,
        unlimited: _Layer | None = None,
    ) -> None:
        self.alone = [_Curve(noise), _Curve(noise)]  # O
        self.cuts = [array("l"), array("l")]
        self.kept = [bytearray(), bytearray()]
        self.used: list[list[int]] = [[], []]  # slots, from the running state alone
        self._kept_least: list[list[float]] = [[], []]  # P
        self._kept_used: list[list[int]] = [[], []]
        left = _Curve(noise)  # with the way there and the read: j u + r + P
        for family in range(2):
            sums = _Sums(left, self.alone[family] if fewer is None else fewer[family])
            for blocks, lowest in enumerate(below[family]):
                found, cut = inf, 0
                if unlimited is not None and slots is not None and unlimited._kept_used[family][blocks] <= slots:
                    found, cut = unlimited._kept_least[family][blocks], unlimited.cuts[family][blocks]
                elif blocks + family > 1:
                    found, cut = sums.least(blocks)
                if lowest <= found:
                    found, cut = lowest, 0
                used = max(1 + self.used[family][blocks - cut], self._kept_used[0][cut]) if cut else 1
                if family == 0:
                    left.append(blocks * forward + tier.read + found)
                is_kept = tier.write + found < lowest
                self.alone[family].append(tier.write + found if is_kept else lowest)
                self.cuts[family].append(cut)
                self.kept[family].append(is_kept)
                self.used[family].append(used if is_kept else 0)
                self._kept_least[family].append(found)
                self._kept_used[family].append(used)
        self.bends = len(left.bends) + sum(len(curve.bends) for curve in self.alone)
