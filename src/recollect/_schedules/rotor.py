"""Rotor: the least time for a chain of different steps within a number of bytes.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory (INRIA report RR-9302, 2019).

A piece is steps s to t, where state s is held by someone else. With m bytes, and the gradient g(t) among them, it is
differentiated in the cheaper one of two ways, where they fit:

    hold the graph of step s:   E(s, t, m) = E(s + 1, t, m - A(s))
    cut at state q, s < q <= t: E(s, t, m) = (uf(s) + ... + uf(q - 1)) + E(q, t, m - a(q)) + E(s, q - 1, m)

E is the extra time: of forwards without a graph. (What is left out, one forward and one backward of every step, is the
same in all schedules.) a(q) is state q, A(s) what is held for the graph of step s, its output included.

This is optimal among persistent schedules, in which what is kept stays until its step is differentiated. One that
throws states away and computes them anew may be better where sizes differ very much.

**Memory.** For every piece there is a curve over at most `levels` + 1 amounts of memory, evenly spaced: the least extra
time found within that amount, and the exact number of bytes that the schedule behind it needs. Amounts in between are
rounded down, unless the schedule of the next amount fits in. Therefore sums of bytes are exact, a schedule never needs
more than it says, and it is never worse than one from sizes that are rounded upwards to levels. Beside its curve, every
piece has the schedule that takes the fewest bytes of all, exactly: so there is an answer for every budget that is
enough, and the minimum that an error names is the true one. Where all sizes are multiples of a level the whole is
exact, and the level is their greatest common divisor where that is possible.

**Time.** O(n^3 levels) with n steps, and most of it is never looked at: the curves fall with memory, so that for a
range of amounts the cut is not worth a look if at the upper end it is no better than what is known at the lower end.
Pieces of equal steps have equal curves, which are made once.

Bad at: more than some 200 different steps, for time and memory; put steps together, or use Revolve.
"""

from __future__ import annotations

from array import array
from itertools import accumulate
from math import gcd, inf

from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore, ScheduleError
from recollect._schedules.chain import Chain

LEVELS = 500
_FEW = 12  # a range of so many amounts is looked at one by one
_MOST = 30_000_000  # numbers in the curves: about half a gigabyte, and half a minute
_HOLD = 0  # in place of a cut, which is at 1 or later


def persistent(chain: Chain, budget: int, levels: int) -> list[Action]:
    """The actions of the best schedule found.

    Raises:
        ScheduleError: If the budget is too small for any schedule; its `minimum` says what is enough.
    """
    curves = _Curves(chain, budget - chain.input_bytes, levels)
    minimum = curves.least[0][chain.length - 1] + chain.input_bytes
    if budget < minimum:
        error = ScheduleError(f"budget must be at least {minimum} bytes for this chain, got {budget}")
        error.minimum = minimum
        raise error
    return _actions(curves, chain, budget - chain.input_bytes)


def _actions(curves: _Curves, chain: Chain, room: int) -> list[Action]:
    last = chain.length - 1
    actions: list[Action] = []
    # What is to be done, the next at the end. A piece, with the memory for it, and whether it starts from a slot; or a
    # step whose graph is held.
    waiting: list[int | tuple[int, int, int, bool]] = [(0, last, room, False)]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, int):
            actions.append(Backward(entry))
            continue
        s, t, m, from_slot = entry
        if from_slot:
            actions.append(Restore(s))
        cut = curves.choice(s, t, m) if s < t else _HOLD
        if cut:
            if not from_slot:
                actions.append(Keep(s))
            actions.append(Forward(s, cut))
            waiting += [(s, cut - 1, m, True), (cut, t, m - chain.output_bytes[cut - 1], False)]
            continue
        if from_slot:
            actions.append(Drop(s))
        if s < t or s == last:
            actions.append(Forward(s, s + 1, graph=True))
        waiting.append(s)
        if s < t:
            waiting.append((s + 1, t, m - chain.saved_bytes[s], False))
    return actions


def _names(kind: list[int], amounts: int, levels: int) -> list[list[int]]:
    """A number for every piece, the same for pieces of equal steps.

    Raises:
        ScheduleError: If there are so many that their curves would take too much memory, and time.
    """
    n = len(kind)
    names: dict[tuple[int, int], int] = {}
    name: list[list[int]] = []
    if 6 * n * n <= _MOST:
        for s in range(n):
            row = [-1] * n
            for t in range(s, n):
                row[t] = names.setdefault((row[t - 1] if t > s else -1, kind[t]), len(names))
            name.append(row)
    if not name or 2 * len(names) * amounts + 6 * n * n > _MOST:
        raise ScheduleError(
            f"chain must be shorter, or levels fewer, or more of its steps alike: {n} steps with {levels} levels take "
            "too much memory to plan. Take several steps as one; or, where all are alike, use revolve"
        )
    return name


class _Curves:
    """For every piece: the fewest bytes it takes, and the least extra time over memory.

    `extra[s][t][k]` is the least extra time found within `amounts[k]`, and `needs[s][t][k]` what that takes. Both start
    to mean something one place before the first amount that is enough: there is the schedule of the fewest bytes.
    """

    def __init__(self, chain: Chain, room: int, levels: int) -> None:
        n = chain.length
        self._chain, self._room = chain, max(room, 0)
        self._times = [0, *accumulate(chain.forward_times)]
        self._set_amounts(levels)
        kinds: dict[object, int] = {}
        kind = [
            kinds.setdefault(numbers, len(kinds))
            for numbers in zip(
                chain.forward_times,
                chain.output_bytes,
                chain.saved_bytes,
                chain.gradient_bytes,
                chain.forward_temporary_bytes,
                chain.backward_temporary_bytes,
                strict=True,
            )
        ]
        self._set_ranges(all_differ=len(kinds) == n)
        self._name = _names(kind, len(self._amounts), levels)
        self.least = [[0] * n for _ in range(n)]
        self._extra: list[list[list[float]]] = [[[]] * n for _ in range(n)]
        self._needs: list[list[array[int]]] = [[array("q")] * n for _ in range(n)]
        # The same, less the state that the piece starts from: `extra` at amounts[k] - a(s).
        self._right: list[list[list[float]]] = [[[]] * n for _ in range(n)]
        self._good = [[0] * n for _ in range(n)]  # a cut that was good, to be tried first nearby
        self._make_all()

    def _make_all(self) -> None:
        chain, n = self._chain, self._chain.length
        made: dict[int, tuple[int, int]] = {}
        moved: dict[tuple[int, int], list[float]] = {}
        for t in range(n):
            for s in range(t, -1, -1):
                name = self._name[s][t]
                if name in made:
                    i, j = made[name]
                    self.least[s][t], self._good[s][t] = self.least[i][j], self._good[i][j] + s - i
                    self._extra[s][t], self._needs[s][t] = self._extra[i][j], self._needs[i][j]
                else:
                    made[name] = (s, t)
                    self._make(s, t)
                if s and self.least[s][t] <= self._room:
                    held = chain.output_bytes[s - 1]
                    if (name, held) not in moved:
                        moved[name, held] = self._moved(s, t, held, self.least[s][t] + held, 1, self._top)
                    self._right[s][t] = moved[name, held]

    def _set_amounts(self, levels: int) -> None:
        chain, room = self._chain, self._room
        unit = gcd(
            *chain.output_bytes,
            *chain.saved_bytes,
            *chain.gradient_bytes,
            *chain.forward_temporary_bytes,
            *chain.backward_temporary_bytes,
        )
        if not unit or room // unit > levels:
            unit = max(1, -(-room // levels))
        self._unit = unit
        self._top = room // unit + 1
        self._bottom = room - self._top * unit  # below zero: no piece takes that little
        self._amounts = [self._bottom + k * unit for k in range(self._top + 1)]

    def _set_ranges(self, *, all_differ: bool) -> None:
        """For every s, the amounts that a piece from s on can be left with: all but what steps before it may hold.

        Where pieces share curves, they start in several places, and curves are made in full.
        """
        chain, n = self._chain, self._chain.length
        self._lowest, self._highest = [1] * n, [self._top] * n
        if all_differ:
            held = [0, *accumulate(chain.saved_bytes)]
            for s in range(n):
                self._lowest[s] = max(1, self._level(self._room - held[s]) - 1)  # one less, for amounts in between
                self._highest[s] = self._level(self._room - chain.output_bytes[s - 1]) if s else self._top

    def _level(self, bytes: int) -> int:
        """The first amount that is enough for so many bytes."""
        return -((self._bottom - bytes) // self._unit)

    def _find(self, s: int, t: int, m: int) -> float:
        """The least extra time known for a piece, with exactly so many bytes."""
        if m < self.least[s][t]:
            return inf
        k = self._level(m)
        return self._extra[s][t][k if self._needs[s][t][k] <= m else k - 1]

    def choice(self, s: int, t: int, m: int) -> int:
        """Where to cut a piece, or `_HOLD`: the best that is known for so many bytes."""
        chain = self._chain
        best, found = _HOLD, inf
        if m >= self._hold_bytes(s, t):
            found = self._find(s + 1, t, m - chain.saved_bytes[s])
        for cut, sweep in enumerate(self._sweeps(s, t), s + 1):
            if m < sweep:
                break
            time = self._times[cut] - self._times[s]
            time += self._find(cut, t, m - chain.output_bytes[cut - 1]) + self._find(s, cut - 1, m)
            if time < found:
                best, found = cut, time
        return best

    def _hold_bytes(self, s: int, t: int) -> int:
        """What the forward and the backward of step s take, where its graph is held until t is differentiated."""
        chain = self._chain
        return chain.saved_bytes[s] + max(
            chain.gradient_bytes[t] + chain.forward_temporary_bytes[s],
            chain.gradient_bytes[s] + chain.backward_temporary_bytes[s],
        )

    def _sweeps(self, s: int, t: int) -> list[int]:
        """What running from s to s + 1, to s + 2, ..., to t takes, beside the gradient for t."""
        chain = self._chain
        needed, before, most = [], 0, 0
        for step in range(s, t):
            most = max(most, before + chain.output_bytes[step] + chain.forward_temporary_bytes[step])
            before = chain.output_bytes[step]
            needed.append(most + chain.gradient_bytes[t])
        return needed

    def _make(self, s: int, t: int) -> None:
        chain, top = self._chain, self._top
        if s == t:
            self.least[s][t] = self._hold_bytes(s, s)
            self._good[s][t] = s + 1
            self._extra[s][t] = [0.0] * (top + 1)
            self._needs[s][t] = array("q", [self.least[s][t]]) * (top + 1)
            return
        hold = self._hold_bytes(s, t)
        low_hold = max(hold, chain.saved_bytes[s] + self.least[s + 1][t])
        sweeps = self._sweeps(s, t)
        own_least = self.least[s]
        lows = [
            max(sweep, chain.output_bytes[step] + self.least[step + 1][t], own_least[step])
            for step, sweep in enumerate(sweeps, s)
        ]
        least = self.least[s][t] = min(low_hold, *lows)
        if least > self._room:
            return

        extra = self._moved(s + 1, t, chain.saved_bytes[s], low_hold, self._lowest[s], self._highest[s])
        cuts = [_HOLD] * (top + 1)
        good = self._search(s, t, lows, extra, cuts)
        self._extra[s][t], self._good[s][t] = extra, good

        # What each takes; and no more memory takes longer.
        needs = self._needs[s][t] = array("q", [0]) * (top + 1)
        first = self._level(least)
        if first >= self._lowest[s]:
            needs[first - 1] = least
            extra[first - 1] = self._extra_at_least(s, t, least, low_hold, lows)
        for k in range(max(first, self._lowest[s]), self._highest[s] + 1):
            if extra[k] >= extra[k - 1]:
                extra[k], needs[k] = extra[k - 1], needs[k - 1]
            elif cuts[k]:
                cut = cuts[k]
                right = self._needs_moved(cut, t, chain.output_bytes[cut - 1], k)
                needs[k] = max(right, self._needs[s][cut - 1][k], sweeps[cut - 1 - s])
            else:
                needs[k] = max(self._needs_moved(s + 1, t, chain.saved_bytes[s], k), hold)

    def _extra_at_least(self, s: int, t: int, least: int, low_hold: int, lows: list[int]) -> float:
        """The extra time within the fewest bytes."""
        chain = self._chain
        found = inf
        if low_hold == least:
            found = self._find(s + 1, t, least - chain.saved_bytes[s])
        for cut, low in enumerate(lows, s + 1):
            if low == least:
                time = self._times[cut] - self._times[s]
                time += self._find(cut, t, least - chain.output_bytes[cut - 1]) + self._find(s, cut - 1, least)
                found = min(found, time)
        return found

    def _moved(self, s: int, t: int, held: int, low: int, lowest: int, highest: int) -> list[float]:
        """The extra time at amounts[lowest] to amounts[highest] less `held` bytes, where `low` are needed for it."""
        shift, first = held // self._unit, max(lowest, self._level(low))
        if first > highest:
            return [inf] * (self._top + 1)
        extra, needs, start, stop = self._extra[s][t], self._needs[s][t], first - shift, highest - shift + 1
        moved = [inf] * first
        moved += [
            here if need + held <= amount else below
            for here, below, need, amount in zip(
                extra[start:stop],
                extra[start - 1 : stop - 1],
                needs[start:stop],
                self._amounts[first : highest + 1],
                strict=True,
            )
        ]
        moved += [inf] * (self._top - highest)
        return moved

    def _needs_moved(self, s: int, t: int, held: int, k: int) -> int:
        """What the schedule takes that `_moved` has found at amounts[k], with what is held."""
        needs, i = self._needs[s][t], k - held // self._unit
        return held + (needs[i] if needs[i] + held <= self._amounts[k] else needs[i - 1])

    def _search(self, s: int, t: int, lows: list[int], extra: list[float], cuts: list[int]) -> int:
        """Put the best cuts, and the extra time with them, where they are better than what is there."""
        lowest, highest = self._lowest[s], self._highest[s]
        start = self._times[s]
        own, good = self._extra[s], s + 1
        # From a cut that was good for a piece nearby, outwards: with a good one known, others are soon left out.
        hint = min(max(self._good[s][t - 1], s + 1), t)
        for cut in sorted(range(s + 1, t + 1), key=lambda cut: abs(cut - hint)):
            i, k = max(lowest, self._level(lows[cut - 1 - s])), highest
            if i > k:
                continue
            time = self._times[cut] - start
            right, left = self._right[cut][t], own[cut - 1]
            ranges: list[tuple[int, int]] = []
            while True:
                if time + right[k] + left[k] < extra[i]:
                    if k - i >= _FEW:
                        middle = (i + k) >> 1
                        ranges.append((i, middle))
                        i = middle + 1
                        continue
                    for at in range(i, k + 1):
                        value = time + right[at] + left[at]
                        if value < extra[at]:
                            extra[at], cuts[at], good = value, cut, cut
                if not ranges:
                    break
                i, k = ranges.pop()
        return good
