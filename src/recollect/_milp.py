"""The same choice as a mixed-integer linear program, for what a chain of blocks does not cover: the link and ties.

Solved by HiGHS through `scipy.optimize.milp`, which is loaded when it is asked for. One binary variable per block and
choice, tied blocks share theirs; running sums (what is kept before a block, what goes out and what is computed after
it) are variables of their own, which keeps the matrix sparse.

Neighbours that are alike are one run with a count for each choice, so that the solver does not look at every order of
the same counts. What is alive besides what blocks keep may rise or fall from one to the next by the same amount, as
gradients do. The rows then speak of the order that is best for memory, whatever the counts are: from the first block
on, first what lowers it, by rising need, then the others by falling need - rise. (Johnson's rule for two machines,
1954; it is an exchange argument.) What is on its way they know before and after a run, and not within it. So where
blocks are together the program asks for less, what it bounds is bounded truly, and whoever asked sees what an answer
comes to, and may ask again with all blocks apart.

Answers are rounded to whole numbers and are to be checked by whoever asked: the solver keeps a row only within 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from recollect._problem import Block, Choice, Problem

Row = dict[int, float]
_FAILED = 4  # the status of a solver that lost its way among tiny numbers


class Answer(NamedTuple):
    """Candidates to be checked, none where the solver found none in its time; what the objective is no less than.

    `apart` says whether the blocks were all apart.
    """

    candidates: list[list[int]]
    bound: float
    apart: bool


class _Run(NamedTuple):
    first: int
    length: int
    columns: list[int]
    ks: list[int]
    choices: list[Choice]
    memory: list[_Memory]


class _Way(NamedTuple):
    leaving: list[int]  # columns, before each run and at the end
    back: list[int]
    work: list[int]  # seconds of backward


class _Memory(NamedTuple):
    needs: list[int]  # per choice, at the first block of the run
    rises: list[int]  # per choice, from one block to the next
    order: list[int]  # as positions in the lists of the run


def is_there() -> bool:
    """Whether scipy is."""
    try:
        from scipy.optimize import milp  # noqa: F401
    except ImportError:
        return False
    return True


def solve(
    problem: Problem,
    options: Sequence[Sequence[int]],
    *,
    budget: int,
    seconds: float | None = None,
    time_limit: float,
    gap: float,
    apart: bool = False,
    margin: float = 0.0,
) -> Answer:
    """Least seconds within `budget`; with `seconds`, the least peak within both.

    Args:
        problem: What to choose from.
        options: The indices of the choices of each block that may be taken.
        budget: Bytes.
        seconds: At most so many; infinity is allowed.
        time_limit: For the solver, in seconds; where alike blocks are together it takes half of that.
        gap: Stop when the answer is proven to be within this share of the optimum.
        apart: Leave alike blocks apart.
        margin: Tighten every bound by this share, so that the solver's tolerance does not carry an answer beyond it.
    """
    return _Program(problem, options, budget, seconds, apart, margin).run(time_limit, gap)


class _Program:
    def __init__(
        self,
        problem: Problem,
        options: Sequence[Sequence[int]],
        budget: int,
        seconds: float | None,
        apart: bool,
        margin: float,
    ) -> None:
        self.problem = problem
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.whole: list[int] = []
        self.rows: list[tuple[Row, float, float]] = []
        choices = [block.choices[k] for block, allowed in zip(problem.blocks, options, strict=True) for k in allowed]
        self.byte = 1 / max(budget, 1)
        self.second = 1 / (max((choice.seconds for choice in choices), default=0.0) or 1.0)
        self.keep = 1 - margin
        self.of_peak = seconds is not None
        self.peak = self.column(1.0 if self.of_peak else 0.0, budget * self.byte * self.keep)
        self.runs = self.all_runs(options, apart)
        self.way = self.on_the_way() if any(choice.out for choice in choices) else None
        self.memory()
        total = {column: choice.seconds * self.second for column, choice in self.counted()}
        if seconds is None:
            for column, cost in total.items():
                self.cost[column] += cost
        elif math.isfinite(seconds):
            self.row(total, high=seconds * self.second * self.keep)

    # --- Building ---

    def column(self, cost: float = 0.0, upper: float = math.inf, *, whole: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.cost) - 1

    def row(self, terms: Row, *, low: float = -math.inf, high: float = math.inf) -> None:
        if low > -math.inf or high < math.inf:
            self.rows.append((terms, low, high))

    def counted(self) -> list[tuple[int, Choice]]:
        """Every column of a choice, once per block or run that it stands for, with seconds added up where tied."""
        sums: dict[int, list[Choice]] = {}
        for run in self.runs:
            for column, choice in zip(run.columns, run.choices, strict=True):
                sums.setdefault(column, []).append(choice)
        return [
            (column, Choice(math.fsum(choice.seconds for choice in parts), 0, out=sum(choice.out for choice in parts)))
            for column, parts in sums.items()
        ]

    def all_runs(self, options: Sequence[Sequence[int]], apart: bool) -> list[_Run]:
        blocks = self.problem.blocks
        group_of = {i: number for number, group in enumerate(self.problem.tied) for i in group}
        columns_of: dict[int, list[int]] = {}
        borders = {moment.after for moment in self.problem.moments}
        runs: list[_Run] = []
        i = 0
        while i < len(blocks):
            block, ks = blocks[i], list(options[i])
            choices = [block.choices[k] for k in ks]
            end = i + 1
            # Else a row of a choice that does not occur could ask for more than what is there.
            ahead = _memory(block, choices, blocks[i + 1] if i + 1 < len(blocks) else block)
            pairs = [pair for one in ahead for pair in zip(one.needs, one.rises, strict=True)]
            rising = all(need >= max(rise, 0) for need, rise in pairs)
            while (
                not apart
                and rising
                and end < len(blocks)
                and end not in borders
                and not group_of.keys() & {i, end}
                and _alike(block, blocks[i + 1], blocks[end], end - i)
                and list(options[end]) == ks
            ):
                end += 1
            columns = columns_of.get(group_of.get(i, -1))
            if columns is None:
                columns = [self.column(upper=end - i, whole=True) for _ in ks]
                self.row(dict.fromkeys(columns, 1.0), low=end - i, high=end - i)
                if i in group_of:
                    columns_of[group_of[i]] = columns
            memory = _memory(block, choices, blocks[i + 1] if end - i > 1 else block)
            runs.append(_Run(i, end - i, columns, ks, choices, memory))
            i = end
        return runs

    def memory(self) -> None:
        there = self.column(upper=0.0)
        others: dict[int, int] = {}
        for moment in self.problem.moments:
            others[moment.after] = max(others.get(moment.after, moment.bytes), moment.bytes)
        for number, run in enumerate(self.runs):
            self.moment(others.get(run.first), there, self.way.leaving[number] if self.way else None)
            kept = [choice.kept * self.byte for choice in run.choices]
            if run.length == 1:
                self.fit_one(number, there)
            else:
                used = [self.column(upper=1.0, whole=True) for _ in run.columns]  # whether a choice occurs at all
                for column, one in zip(run.columns, used, strict=True):
                    self.row({column: 1.0, one: -float(run.length)}, high=0.0)
                    self.row({one: 1.0, column: -1.0}, high=0.0)
                for memory in run.memory:
                    self.fit(run, memory, used, there)
            after = self.column()
            self.row({there: 1.0, after: -1.0, **dict(zip(run.columns, kept, strict=True))}, low=0.0, high=0.0)
            there = after
        for late in (self.way.leaving[-1], self.way.back[-1]) if self.way else (None,):
            self.moment(others.get(len(self.problem.blocks)), there, late)

    def fit(self, run: _Run, memory: _Memory, used: list[int], there: int) -> None:
        needs = [need * self.byte for need in memory.needs]
        terms: Row = {there: 1.0, self.peak: -1.0}
        # Along blocks that choose alike memory rises or falls steadily: the last or the first of them decides.
        for c in memory.order:
            rise = memory.rises[c] * self.byte
            before, terms = terms, {**terms, run.columns[c]: rise}
            self.row({**terms, used[c]: needs[c] - rise} if rise > 0 else {**before, used[c]: needs[c]}, high=0.0)

    def fit_one(self, number: int, there: int) -> None:
        run = self.runs[number]
        block = self.problem.blocks[run.first]
        forward, backward = (
            self.of_run(run, [bytes_ * self.byte for bytes_ in needs])
            for needs in (
                [block.base_forward + choice.forward for choice in run.choices],
                [block.base_backward + choice.backward for choice in run.choices],
            )
        )
        base: Row = {there: 1.0, self.peak: -1.0}
        way = self.way
        if way is None:
            self.row({**base, **forward}, high=0.0)
            self.row({**base, **backward}, high=0.0)
            return
        self.row({**base, **forward, way.leaving[number]: 1.0}, high=0.0)
        before = self.runs[number - 1] if number else None
        if before is None:
            self.row({**base, **backward}, high=0.0)
        elif before.length > 1:
            self.row({**base, **backward, way.back[number]: 1.0}, high=0.0)
        else:
            sent = self.of_run(before, [choice.out * self.byte for choice in before.choices])
            self.row(_sum(base, backward, sent, {way.back[number - 1]: 1.0}), high=0.0)
        # What is still leaving since the forward, while later blocks have gone backward.
        rate = self.rate_out
        gone = [
            -choice.out * self.byte + rate * (block.backward_seconds + choice.seconds) * self.second
            for choice in run.choices
        ]
        passed = {way.leaving[-1]: 1.0, way.work[-1]: -rate, way.work[number]: rate}
        self.row(_sum(base, backward, passed, self.of_run(run, gone)), high=0.0)

    def of_run(self, run: _Run, values: Sequence[float]) -> Row:
        return dict(zip(run.columns, values, strict=True))

    def moment(self, bytes_: int | None, there: int, late: int | None) -> None:
        if bytes_ is not None:
            terms = {there: 1.0, self.peak: -1.0}
            self.row(terms if late is None else {**terms, late: 1.0}, high=-bytes_ * self.byte)

    def on_the_way(self) -> _Way:
        """Columns for bytes that are on their way, before each run and at the end; windows for them."""
        link = self.problem.link
        assert link is not None
        per = self.byte / self.second  # bytes by unit of bytes, per seconds by unit of seconds
        self.rate_out, rate_back = link.out * per, link.back * per
        most = math.inf if link.in_flight is None else link.in_flight * self.byte * self.keep
        way = _Way([self.column(upper=0.0)], [self.column(upper=0.0)], [self.column(upper=0.0)])
        everything: Row = {}
        for run in self.runs:
            block = self.problem.blocks[run.first]
            out = self.of_run(run, [choice.out * self.byte for choice in run.choices])
            everything = _sum(everything, out)
            forward = self.rate_out * block.forward_seconds * self.second
            seconds = [(block.backward_seconds + choice.seconds) * self.second for choice in run.choices]
            came = self.of_run(run, [-rate_back * one for one in seconds])
            leaving, back, work = (columns[-1] for columns in way)
            now, now_back, now_work = self.column(), self.column(), self.column()
            # What is late after the run is no less than what all of it is late, and than that of its own bytes alone.
            self.row({leaving: 1.0, now: -1.0, **out}, high=forward * run.length)
            self.row({now: -1.0, **out}, high=forward * (run.length - 1))
            self.row({leaving: 1.0}, high=forward + most)
            self.row(_sum({back: 1.0, now_back: -1.0}, out, came), high=0.0)
            if run.length == 1:
                self.row({now_back: -1.0, **out}, high=0.0)
                self.row({back: 1.0, **came}, high=most)
            else:
                least = rate_back * block.backward_seconds * self.second
                self.row(_sum({now_back: -1.0}, out, came), high=-least)
                self.row({back: 1.0}, high=rate_back * max(seconds) + most)
            self.row({work: 1.0, now_work: -1.0, **self.of_run(run, seconds)}, low=0.0, high=0.0)
            for columns, one in zip(way, (now, now_back, now_work), strict=True):
                columns.append(one)
        if self.problem.host_bytes is not None:
            self.row(everything, high=self.problem.host_bytes * self.byte * self.keep)
        return way

    # --- Solving ---

    def run(self, time_limit: float, gap: float) -> Answer:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        rows, columns, values = [], [], []
        for number, (terms, _, _) in enumerate(self.rows):
            for column, value in terms.items():
                if value:
                    rows.append(number)
                    columns.append(column)
                    values.append(value)
        matrix = coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.cost)))
        apart = all(run.length == 1 for run in self.runs)
        options = {"time_limit": time_limit if apart else time_limit / 2, "mip_rel_gap": gap}
        for presolve in (True, False):
            result = milp(
                self.cost,
                integrality=self.whole,
                bounds=Bounds([0.0] * len(self.upper), self.upper),
                constraints=LinearConstraint(
                    matrix.tocsr(), [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
                ),
                options={**options, "presolve": presolve},
            )
            if result.status != _FAILED:
                break
        unit = self.byte if self.of_peak else self.second
        bound = getattr(result, "mip_dual_bound", None)
        if bound is None or not math.isfinite(bound):
            bound = 0.0
        return Answer(
            [] if result.x is None else self.candidates(result.x),
            max(bound / unit, 0.0),
            apart,
        )

    def candidates(self, values: Any) -> list[list[int]]:
        found: list[list[int]] = []
        orders = [
            (run.memory[0].order, run.memory[-1].order, sorted(run.memory[0].order, key=lambda c: -run.choices[c].out))
            for run in self.runs
        ]
        for best_for in range(3):
            chosen: list[int] = []
            for run, order in zip(self.runs, orders, strict=True):
                for c in order[best_for]:
                    chosen += [run.ks[c]] * round(float(values[run.columns[c]]))
            if chosen not in found:
                found.append(chosen)
        return found


def _alike(first: Block, second: Block, other: Block, distance: int) -> bool:
    """Whether `other` goes on as `first` and `second` begin, so far from the first."""
    return first.kind is not None and other == replace(
        first,
        name=other.name,
        base_forward=first.base_forward + distance * (second.base_forward - first.base_forward),
        base_backward=first.base_backward + distance * (second.base_backward - first.base_backward),
    )


def _memory(block: Block, choices: list[Choice], following: Block) -> list[_Memory]:
    """What is there at the forward and at the backward; one for both where that is the same from block to block."""
    steps = following.base_forward - block.base_forward, following.base_backward - block.base_backward
    forward = [block.base_forward + choice.forward for choice in choices]
    backward = [block.base_backward + choice.backward for choice in choices]
    if steps == (0, 0):
        return [_ordered([block.need(choice) for choice in choices], 0, choices)]
    return [_ordered(forward, steps[0], choices), _ordered(backward, steps[1], choices)]


def _ordered(needs: list[int], step: int, choices: list[Choice]) -> _Memory:
    rises = [choice.kept + step for choice in choices]
    order = sorted(range(len(choices)), key=lambda c: (-choices[c].out, choices[c].kept))
    order.sort(key=lambda c: (0, needs[c]) if rises[c] <= 0 else (1, rises[c] - needs[c]))
    return _Memory(needs, rises, order)


def _sum(*rows: Row) -> Row:
    """Tied runs have columns in common, so that terms of several are added."""
    total: Row = {}
    for row in rows:
        for column, value in row.items():
            total[column] = total.get(column, 0.0) + value
    return total
