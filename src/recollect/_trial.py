"""Plans that are held to their word: solve, run what comes out, and correct.

- Where a step under a plan is not what was predicted, the difference is taken off the budget and the problem is solved
  anew. What comes back has been seen to fit.
- A choice that works for a block by itself need not work within the step: its input may be changed later, or a replay
  may find something else than the forward did. Then it is found out which choice that is, it is ruled out for blocks of
  that kind, and the problem is solved anew.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from recollect import _errors, _problem, _solver
from recollect._bench import Bench, Mark
from recollect._failures import IN_PLACE, Failure, in_lines, reason_of
from recollect._options import KEEP
from recollect._problem import NEVER, Problem, Solution
from recollect._ranks import same, worst
from recollect._solver import InfeasibleError
from recollect._tried import attempt, decided
from recollect.plan import Plan, Step, planned, shapes_of
from recollect.policy import Decision
from recollect.profile import Profile, Progress

MARGIN = 0.05  # of a device, for what its allocator cannot use
_ATTEMPTS = 5
_MORE_ATTEMPTS = 2  # at what is no more than another way
_SLOW = 1.01  # times what was predicted
_CLOSE = 0.02  # a plan that comes so close to its budget is good enough
_VARIES = 0.005  # of a budget, left free where something is offloaded: no two steps send it in the same time
_WARM_UP = 4
_POINTS = 12


class BudgetError(ValueError):
    """No plan fits the budget.

    Attributes:
        smallest: The least bytes that a step needs at its peak, as far as could be found.
        where: The moment of the step that needs them.
    """

    def __init__(
        self,
        budget: int,
        smallest: int,
        where: str,
        *,
        is_measured: bool,
        reserve: int = 0,
        notes: Sequence[str] = (),
    ) -> None:
        how = "measured" if is_measured else "predicted"
        there, needed = _errors.describe_amount(budget, up=False), _errors.describe_amount(smallest, up=True)
        aside = f" with {_errors.describe_amount(reserve, up=True)} set aside by reserve" if reserve else ""
        super().__init__(
            f"no plan fits into {there}{aside}: the smallest that would is {needed} ({how}: {smallest} bytes), which "
            f"{where} needs. Raise the budget, make the batch smaller, or split what is computed there into modules"
            + "".join(f"\n  {note}" for note in notes)
        )
        self.smallest = smallest
        self.where = where


class _RuledOutError(Exception):
    """A solution does not work; what is to blame is ruled out from now on."""


@dataclass(frozen=True)
class _Ran:
    step: Step
    marks: tuple[Mark, ...]


def _peak_of(marks: Sequence[Mark]) -> int:
    return max(mark.peak for mark in marks)


class _Found(NamedTuple):
    solution: Solution
    ran: _Ran | None
    correction: int = 0  # bytes by which steps had been seen to take more than was predicted


def _solved(problem: Problem, budget: int) -> Solution | None:
    """None if nothing fits."""
    try:
        return _solver.solve(problem, budget)
    except InfeasibleError:
        return None


class Trial:
    """Solves the problem that a profile poses, and runs what comes out."""

    def __init__(
        self,
        bench: Bench,
        profile: Profile,
        repeats: int,
        progress: Progress | None,
        host_bytes: int | None = None,
    ) -> None:
        self._bench = bench
        self._profile = profile
        self._host_bytes = host_bytes
        self._ran: dict[tuple[int, ...], _Ran | None] = {}  # what came of them
        self._curve: tuple[Step, ...] | None = None
        self._repeats = repeats
        self._tell = progress or (lambda what, done, of: None)

    # --- What there is to solve, and what a solution means ---

    def problem(self, *, offloading: bool = False) -> Problem:
        """With what is known by now."""
        return self._profile.problem(offloading=offloading, host_bytes=self._host_bytes if offloading else None)

    def _ways(self) -> tuple[bool, ...]:
        # Offloading is predicted, and not measured alone. So both are run, with it and without, and the better counts.
        return (False,) if self._profile.link is None else (False, True)

    def plain(self) -> Step:
        """A step without decisions: measured, or predicted if it does not fit."""
        keep, profile = [KEEP] * len(self._profile.blocks), self._profile
        if profile.is_plain:
            return Step(_peak_of(profile.marks), profile.seconds)
        return self._predicted(keep, _problem.peak(self.problem(), keep)[0])

    def _predicted(self, chosen: Sequence[int], peak: int) -> Step:
        profile = self._profile
        added = sum(profile.option(number, choice).seconds for number, choice in enumerate(chosen))
        base = sum(profile.option(number, choice).seconds for number, choice in enumerate(profile.base))
        return Step(peak, profile.seconds + added - base)

    def _step_of(self, solution: Solution) -> Step:
        return self._predicted(solution.chosen, solution.peak)

    def as_plan(self, solution: Solution, budget: int | None, ran: _Ran | None = None, correction: int = 0) -> Plan:
        """What a solution means."""
        predicted = self._step_of(solution)
        profile, model = self._profile, self._bench.model
        if self._curve is None:
            self._curve = tuple(self._step_of(one) for one in _solver.frontier(self.problem(), _POINTS))
        return Plan(
            type(model).__name__,
            shapes_of(model),
            profile.device,
            budget,
            planned(profile, solution.chosen),
            self.plain(),
            dataclasses.replace(predicted, peak=predicted.peak + correction),
            None if ran is None else ran.step,
            solution.gap,
            profile.is_estimated,
            self._curve,
            profile.marks if profile.is_plain else (),
            () if ran is None else ran.marks,
            tuple(in_lines(profile.failures)),
        )

    # --- Running ---

    def _decisions(self, chosen: Sequence[int]) -> dict[str, Mapping[str, Decision]]:
        return {"": {name: one for block in planned(self._profile, chosen) for name, one in block.decisions.items()}}

    def run(self, solution: Solution) -> _Ran | None:
        """A step under decisions; None if the device had not enough memory for it.

        Raises:
            _RuledOutError: If it fails because of one of the choices.
        """
        bench, profile = self._bench, self._profile
        decisions = self._decisions(solution.chosen)
        modules = list(zip(map(bench.model.get_submodule, profile.blocks), profile.calls, strict=True))
        ran = None
        with bench.leaving_nothing():
            outcome = attempt(bench, decisions)
            reason = outcome.reason
            if outcome.works:
                try:
                    with decided(bench.model, decisions, "first"):
                        for _ in range(_WARM_UP):  # stores learn
                            bench.train()
                        # Twice: what is on its way, and when the host sees that it is gone, varies a bit.
                        marks = bench.weigh(modules)
                        seconds = bench.seconds(self._repeats)
                        marks = max(marks, bench.weigh(modules), key=_peak_of)
                        ran = _Ran(Step(_peak_of(marks), seconds), tuple(marks))
                except torch.OutOfMemoryError:
                    pass
                except _errors.CheckpointError as error:
                    reason = reason_of(error)
            bench.start_anew()
            bench.let_go()
            (reason,) = worst([reason])
            if reason:
                self._rule_out(solution.chosen, reason)
                raise _RuledOutError(reason)
        return None if worst([ran is None])[0] else ran

    def _rule_out(self, chosen: Sequence[int], reason: str) -> None:
        """Find the choices that do not work within the step, and go on without them.

        They are added one after the other to what is known to work. What a step raises on its own comes out as it is.
        """
        profile, bench = self._profile, self._bench
        now = list(profile.base)
        with decided(bench.model, self._decisions(now)):
            bench.train()
        families = [profile.families[kind] for kind in profile.kind_of]
        suspects = dict.fromkeys((families[n], choice) for n, choice in enumerate(chosen) if choice != now[n])
        if not suspects:
            raise ValueError(f"the step fails now and then, with nothing decided: {reason}")
        failures: dict[int, list[Failure]] = {}
        blamed = []
        for family, choice in suspects:
            own = [n for n, one in enumerate(chosen) if (families[n], one) == (family, choice)]
            tried = [choice if n in own else one for n, one in enumerate(now)]
            outcome = attempt(bench, self._decisions(tried))
            if outcome.works:
                now = tried
            elif outcome.reason:
                blamed.append((own[0], outcome.reason))
        if not blamed:  # it fails now and then, or on a device that has no room for finding out
            blamed = [(next(n for n, c in enumerate(chosen) if (families[n], c) == one), reason) for one in suspects]
        for number, why in blamed:
            kind = profile.kind_of[number]
            name = profile.option(number, chosen[number]).name
            failure = Failure(profile.blocks[number], profile.kinds[kind].module, name, IN_PLACE, why)
            failures.setdefault(kind, []).append(failure)
        self._profile, self._curve = profile.ruling_out(failures), None

    # --- For bytes ---

    def plan_for_bytes(self, budget: int, limit: int, hints: Sequence[str] = ()) -> Plan:
        """The fastest plan whose step was seen to stay within `limit` bytes, which are those of the budget or less."""
        limit = min(limit, NEVER - 1)
        found = [one for offloading in self._ways() if (one := self._held(offloading, limit)) is not None]
        if found:
            found += self._begun_later(found[-1], limit)  # the one that offloads, if there is one
        if not found:
            smallest, where, is_measured = min(map(self._smallest, self._ways()))
            raise BudgetError(
                budget,
                smallest + max(budget - limit, 0),
                where,
                is_measured=is_measured,
                reserve=max(budget - limit, 0),
                notes=[*hints, *in_lines(self._profile.failures)],
            )
        best = min(found, key=self._seconds_of)
        return self.as_plan(best.solution, budget, best.ran, best.correction)

    def _seconds_of(self, found: _Found) -> float:
        return (found.ran.step if found.ran else self._step_of(found.solution)).seconds

    def _begun_later(self, best: _Found, limit: int) -> Iterator[_Found]:
        """The same without offloading anything of the first blocks, where a plan that does came out slow.

        What is offloaded first has the longest to come back, so solutions begin with it. But sending the tensors of a
        block takes the host longer than computing it, and when a step begins the host is not ahead of the device yet.
        """
        problem = self.problem(offloading=True)
        places = [n for n, one in enumerate(_problem.picked(problem, best.solution.chosen)) if one.out]
        if best.ran is None or not places or best.ran.step.seconds <= self._step_of(best.solution).seconds * _SLOW:
            return
        for first in (places[len(places) // 2], places[-1] + 1):
            found = self._held(True, limit, first, best.correction, _MORE_ATTEMPTS)
            if found is not None:
                yield found

    def _held(
        self,
        offloading: bool,
        limit: int,
        first: int = 0,
        correction: int | None = None,
        most: int = _ATTEMPTS,
    ) -> _Found | None:
        """What was seen to fit, with offloading, from the block `first` on, or without; None if nothing was."""
        best: _Found | None = None
        if offloading:
            limit -= int(limit * _VARIES)
        if correction is None:  # tensors leave as a whole, and the sums go by bytes
            correction = self._profile.largest if offloading and not self._profile.is_estimated else 0
        attempts = 0
        tried: set[tuple[int, ...]] = set()
        what = "offloading from a later block on" if first else "running the plan"
        while attempts < most:
            self._tell(what, attempts, most)
            problem = self.problem(offloading=offloading)
            if first:
                problem = _problem.without_offloading(problem, first)
            solution = same(_solved(problem, limit - correction))
            if solution is None:
                if best is not None or first or self._profile.is_estimated:
                    break
                solution = same(_solver.smallest(problem))  # that it does not fit is a prediction too
            if self._profile.is_estimated:
                return _Found(solution, None)
            if solution.chosen in tried:
                break
            tried.add(solution.chosen)
            try:
                ran = self._run_once(solution)
            except _RuledOutError:
                continue
            attempts += 1
            if ran is None:
                correction += max(int(limit * MARGIN), 1)
                continue
            if ran.step.peak <= limit:
                if best is None or best.ran is None or ran.step.seconds < best.ran.step.seconds:
                    best = _Found(solution, ran, correction)
                if ran.step.peak >= limit * (1 - _CLOSE) or not any(solution.chosen):
                    break
            # What was predicted and what came out differ by so much: aim by as much beside the mark.
            correction = ran.step.peak - solution.peak
        self._tell(what, most, most)
        return best

    def _run_once(self, solution: Solution) -> _Ran | None:
        """As `run`; what ran already, to find another plan, is not run again."""
        if solution.chosen not in self._ran:
            self._ran[solution.chosen] = self.run(solution)
        return self._ran[solution.chosen]

    def _smallest(self, offloading: bool) -> tuple[int, str, bool]:
        """The least budget that a step needs, what sets it, and whether it was measured or predicted."""
        while True:
            problem = self.problem(offloading=offloading)
            solution = same(_solver.smallest(problem))
            where = _problem.peak(problem, solution.chosen)[1]
            if not self._profile.is_estimated:
                try:
                    self._run_once(solution)
                except _RuledOutError:
                    continue
            least = [self._budget_of(chosen, ran.step.peak) for chosen, ran in self._ran.items() if ran is not None]
            if least:
                return min(least), where, True
            return self._budget_of(solution.chosen, solution.peak), where, False

    def _budget_of(self, chosen: Sequence[int], peak: int) -> int:
        """The least budget that is not too small for a plan of some peak."""
        offloads = any(self._profile.option(number, choice).out for number, choice in enumerate(chosen))
        return math.ceil(peak / (1 - _VARIES)) if offloads else peak

    # --- For a time ---

    def plan_for_time(self, times: float) -> Plan:
        """The plan of the least memory whose step was seen to take so many times the plain one at most, or nearly."""
        plain = self.plain().seconds
        seconds = plain * times
        allowed = seconds - plain
        attempts = 0
        while True:
            self._tell("running the plan", attempts, _ATTEMPTS)
            within = max(allowed, 0.0) if attempts < _ATTEMPTS - 1 else 0.0  # at last, nothing that takes time
            problems = [self.problem(offloading=one) for one in self._ways()]
            solution = same(min((_solver.within(one, within) for one in problems), key=lambda one: one.peak))
            if self._profile.is_estimated:
                return self.as_plan(solution, None)
            try:
                ran = self.run(solution)
            except _RuledOutError:
                continue
            if ran is None:
                raise torch.OutOfMemoryError(
                    f"the least memory for a step of {1e3 * seconds:.1f} ms is more than the device has: give a budget "
                    "of bytes instead"
                )
            attempts += 1
            if ran.step.seconds <= seconds * (1 + _CLOSE) or not any(solution.chosen) or attempts == _ATTEMPTS:
                break
            allowed -= ran.step.seconds - seconds
        self._tell("running the plan", _ATTEMPTS, _ATTEMPTS)
        return self.as_plan(solution, None, ran)
