"""`plan` and `frontier`: measure a step, decide, run what was decided, and correct.

A plan is not believed before it was run. The step is run under it and weighed; where that is not what was predicted,
the difference is taken off the budget and the problem is solved anew. What comes back has been seen to fit.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from recollect import _errors, _solver, report
from recollect._bench import Bench, Mark
from recollect._bench import Step as StepFunction
from recollect._decided import decided_of
from recollect._sizes import bytes_of, human
from recollect._solver import InfeasibleError, Problem, Solution
from recollect._stores.pool import memory_to_spare
from recollect.plan import Plan, Planned, Step, planned, shapes_of
from recollect.profile import Profile, Progress, decided, measure

_ATTEMPTS = 5
_CLOSE = 0.02  # a plan that comes so close to its budget is good enough
_MARGIN = 0.05  # of a device, for what its allocator cannot use
ALLOWED = ("recompute", "offload")


class BudgetError(ValueError):
    """No plan fits the budget.

    Attributes:
        smallest: The least bytes that a step needs at its peak, as far as could be found.
        where: The moment of the step that needs them.
    """

    def __init__(self, budget: int, smallest: int, where: str, *, is_measured: bool) -> None:
        how = "measured" if is_measured else "predicted"
        super().__init__(
            f"no plan fits into {human(budget)}: the smallest that would is {human(smallest)} ({how}), which "
            f"{where} needs. Raise the budget, make the batch smaller, or split what is computed there into modules"
        )
        self.smallest = smallest
        self.where = where


def plan(
    model: Module,
    batch: Any,
    *,
    budget: int | str | None = None,
    time_budget: float | None = None,
    step: StepFunction | None = None,
    reserve: int | str = 0,
    repeats: int = 3,
    gpu: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide for a model so that a training step fits into a budget and takes as little time as possible.

    A step is measured, and run again under the plan until it is seen to fit. The model is left as it was: parameters,
    gradients, buffers, random generators and hooks.

    Args:
        model: Any module. On the meta device nothing is run: bytes are counted, times are those of a GPU on paper.
        batch: What `step` gets.
        budget: The bytes that may be alive at the peak of the step, all told: a number, "40GiB", "60%" (of the peak of
            the plain step), or "device" (what is free there, less a margin).
        time_budget: Or how long the step may take, as a multiple of the plain step: 1.1 asks for the least memory
            within 10% more time.
        step: A function `(model, batch) -> loss`. By default the model is called on the batch (a dict gives keywords,
            a tuple or list positions), and the loss is the `loss` of what it gives, or the sum of it.
        reserve: Bytes of the budget to set aside for what is not there yet when the plan is made, such as the state
            of an optimizer before its first step.
        repeats: How often times are taken; their median counts.
        gpu: Which GPU, for a model on the meta device: "A100", "H100" (the default), "H200", ...
        progress: Called as `(what, done, of)` while it goes on.

    Returns:
        A plan. `plan.apply(model)` puts it in force.

    Raises:
        BudgetError: If no plan fits; it says the smallest budget that would, and what sets it.

    Example:
        >>> import torch, recollect
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> plan = recollect.plan(model, torch.randn(4, 32, 16), budget="70%")
        >>> plan.measured.peak <= plan.budget
        True
        >>> handle = plan.apply(model)
    """
    _check(model, budget, time_budget, repeats)
    bench = Bench(model, batch, step, gpu)
    profile = measure(bench, repeats=repeats, progress=progress)
    problem = profile.problem()
    trial = _Trial(bench, profile, problem, repeats, progress)
    plain = trial.plain()
    if time_budget is not None:
        return trial.plan_for_time(plain.seconds * time_budget)
    assert budget is not None
    limit = _bytes(budget, plain, bench.device)
    return trial.plan_for_bytes(limit, limit - bytes_of("reserve", reserve))


@dataclass(frozen=True)
class Frontier:
    """What memory costs in time: the plans that no other beats, from the least memory to the least time.

    Attributes:
        plain: The step without decisions.
        points: Peak and time of each plan, predicted.
        plans: The plans themselves, not run; `recollect.plan` with one of these peaks as its budget runs one.
    """

    plain: Step
    points: tuple[Step, ...]
    plans: tuple[Plan, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists and numbers, fit for JSON."""
        return {
            "plain": dataclasses.asdict(self.plain),
            "points": [dataclasses.asdict(point) for point in self.points],
            "plans": [one.to_dict() for one in self.plans],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a page with the curve and its plans.

        One HTML file that needs no network. Needs plotly: `pip install 'recollect[report]'`.

        Args:
            path: Of the file, which is replaced if it is there.

        Raises:
            ImportError: If plotly is not installed.
            OSError: If there can be no such file.
        """
        report.write_frontier(self.to_dict(), path)

    def __str__(self) -> str:
        lines = [f"{'peak':>10}  {'of plain':>8}  {'step':>12}  {'of plain':>8}"]
        for point in (*self.points, self.plain):
            lines.append(
                f"{human(point.peak):>10}  {point.peak / self.plain.peak:8.2f}  {1e3 * point.seconds:9.1f} ms  "
                f"{point.seconds / self.plain.seconds:8.2f}"
            )
        lines[-1] += "  (plain)"
        return "\n".join(lines)


def frontier(
    model: Module,
    batch: Any,
    *,
    step: StepFunction | None = None,
    points: int = 12,
    repeats: int = 3,
    gpu: str | None = None,
    progress: Progress | None = None,
) -> Frontier:
    """What every amount of memory costs in time.

    Args:
        model: As for `plan`, and likewise the others.
        batch: What `step` gets.
        step: A function `(model, batch) -> loss`.
        points: How many plans, at most.
        repeats: How often times are taken.
        gpu: For a model on the meta device.
        progress: Called as `(what, done, of)` while it goes on.

    Returns:
        The points and their plans, predicted from one measured step.

    Example:
        >>> import torch, recollect
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)))
        >>> curve = recollect.frontier(model, torch.randn(512, 64))
        >>> curve.points[0].peak < curve.plain.peak
        True
    """
    _check(model, 1, None, repeats)
    if not isinstance(points, int) or points < 2:
        raise ValueError(f"points must be a number from 2 on, got {_errors.describe_value(points)}")
    bench = Bench(model, batch, step, gpu)
    profile = measure(bench, repeats=repeats, progress=progress)
    trial = _Trial(bench, profile, profile.problem(), repeats, progress)
    solutions = _solver.frontier(trial.problem, points)
    plans = tuple(trial.as_plan(one, None, None, ()) for one in solutions)
    return Frontier(trial.plain(), tuple(one.predicted for one in plans), plans)


# --- Holding a plan to its word ---


class _Trial:
    """Solves a problem, and runs what comes out."""

    def __init__(
        self, bench: Bench, profile: Profile, problem: Problem, repeats: int, progress: Progress | None
    ) -> None:
        self._bench = bench
        self._profile = profile
        self.problem = problem
        self._repeats = repeats
        self._tell = progress or (lambda what, done, of: None)
        self._keep = tuple(0 for _ in profile.blocks)

    def plain(self) -> Step:
        return self._predicted(self._keep)

    def _predicted(self, chosen: Sequence[int]) -> Step:
        profile = self._profile
        added = sum(profile.option(number, choice).seconds for number, choice in enumerate(chosen))
        base = sum(profile.option(number, choice).seconds for number, choice in enumerate(profile.base))
        return Step(_solver.peak(self.problem, tuple(chosen))[0], profile.seconds + added - base)

    def as_plan(
        self,
        solution: Solution,
        budget: int | None,
        measured: Step | None,
        marks: Sequence[Mark],
        notes: Sequence[str] = (),
    ) -> Plan:
        profile = self._profile
        points = tuple(self._predicted(one.chosen) for one in _solver.frontier(self.problem, 12))
        return Plan(
            type(self._bench.model).__name__,
            shapes_of(self._bench.model),
            profile.device,
            budget,
            planned(profile, solution),
            self.plain(),
            self._predicted(solution.chosen),
            measured,
            solution.gap,
            profile.is_estimated,
            points,
            profile.marks if profile.is_plain else (),
            tuple(marks),
            tuple(notes),
        )

    def run(self, blocks: Sequence[Planned]) -> tuple[Step, list[Mark]] | None:
        """A step under decisions; None if the device had not enough memory for it."""
        bench = self._bench
        with bench.leaving_nothing():
            try:
                with decided(bench.model, {"": {n: d for one in blocks for n, d in one.decisions.items()}}, "first"):
                    bench.train()  # the first time replays are compared by value
                    bench.train()
                    marks = bench.weigh([bench.model.get_submodule(name) for name in self._profile.blocks])
                    return Step(max(mark.peak for mark in marks), bench.seconds(self._repeats)), marks
            except torch.OutOfMemoryError:
                return None
            finally:
                bench.start_anew()
                gc.collect()

    def plan_for_bytes(self, budget: int, limit: int) -> Plan:
        """The fastest plan whose step was seen to stay within `limit` bytes."""
        best: Plan | None = None
        correction, tried, smallest_seen = 0, set(), math.inf
        for attempt in range(_ATTEMPTS):
            self._tell("running the plan", attempt, _ATTEMPTS)
            try:
                solution = _solver.solve(self.problem, limit - correction)
            except InfeasibleError as error:
                solution = _solver.smallest(self.problem)
                if best is not None or solution.chosen in tried:
                    break
                if solution.peak > limit * (1 + 2 * _CLOSE):
                    raise BudgetError(budget, error.smallest + budget - limit, error.where, is_measured=False) from None
            if solution.chosen in tried:
                break
            tried.add(solution.chosen)
            blocks = planned(self._profile, solution)
            ran = None if self._profile.is_estimated else self.run(blocks)
            if self._profile.is_estimated:
                best = self.as_plan(solution, budget, None, ())
                break
            if ran is None:
                correction += max(int(limit * _MARGIN), 1)
                continue
            measured, marks = ran
            smallest_seen = min(smallest_seen, measured.peak)
            if measured.peak <= limit:
                found = self.as_plan(solution, budget, measured, marks)
                if best is None or found.predicted.seconds < best.predicted.seconds:
                    best = found
                if measured.peak >= limit * (1 - _CLOSE) or not any(solution.chosen):
                    break
            # What was predicted and what came out differ by so much: aim by as much beside the mark.
            wrong = measured.peak - solution.peak
            if wrong == correction:
                break
            correction = wrong
        self._tell("running the plan", _ATTEMPTS, _ATTEMPTS)
        if best is None:
            where = _solver.peak(self.problem, _solver.smallest(self.problem).chosen)[1]
            needed = int(smallest_seen) if smallest_seen < math.inf else limit
            raise BudgetError(budget, needed + budget - limit, where, is_measured=smallest_seen < math.inf)
        return best

    def plan_for_time(self, seconds: float) -> Plan:
        """The plan of the least memory whose step was seen to take no longer, or nearly so."""
        base = self.plain().seconds
        allowed = seconds - base
        best: Plan | None = None
        for attempt in range(_ATTEMPTS):
            self._tell("running the plan", attempt, _ATTEMPTS)
            solution = _solver.within(self.problem, max(allowed, 0.0))
            if self._profile.is_estimated:
                best = self.as_plan(solution, None, None, ())
                break
            ran = self.run(planned(self._profile, solution))
            if ran is None:
                break
            measured, marks = ran
            best = self.as_plan(solution, None, measured, marks)
            if measured.seconds <= seconds * (1 + _CLOSE) or not any(solution.chosen):
                break
            allowed -= measured.seconds - seconds
        self._tell("running the plan", _ATTEMPTS, _ATTEMPTS)
        if best is None:
            raise torch.OutOfMemoryError("the least memory within that time is more than the device has")
        return best


# --- What was asked for ---


def _check(model: Any, budget: Any, time_budget: Any, repeats: Any) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_errors.describe_value(model)}")
    if (budget is None) == (time_budget is None):
        raise TypeError(
            "plan takes a budget (bytes) or a time_budget (a multiple of the plain step's time), one of them"
        )
    if time_budget is not None and not (isinstance(time_budget, (int, float)) and time_budget >= 1):
        raise ValueError(f"time_budget must be a number from 1 on, got {_errors.describe_value(time_budget)}")
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats must be a number from 1 on, got {_errors.describe_value(repeats)}")
    if any(decided_of(module) is not None for module in model.modules()):
        raise ValueError(
            "the model is decided already, by recollect.apply or a plan: take that off first, with handle.remove() or "
            "recollect.unapply(model)"
        )


def _bytes(budget: int | str, plain: Step, device: torch.device) -> int:
    if isinstance(budget, str) and budget.strip() == "device":
        return _free(device)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1])
        except ValueError:
            share = math.nan
        if not 0 < share <= 100:
            raise ValueError(f"budget must be more than 0% and at most 100%, got {budget!r}")
        return int(plain.peak * share / 100)
    return bytes_of("budget", budget)


def _free(device: torch.device) -> int:
    """What the process has of a device, and what it could get, less a margin."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int((free + torch.cuda.memory_reserved(device)) * (1 - _MARGIN))
    if device.type == "cpu":
        return memory_to_spare()
    raise ValueError(
        f'budget="device" is for CUDA devices and the CPU, got a model on {device}: give a number of bytes'
    )
