"""`plan` and `frontier`: measure a step, decide, run what was decided, and correct.

A plan is not believed before it was run. The step is run under it and weighed; where that is not what was predicted,
the difference is taken off the budget and the problem is solved anew. What comes back has been seen to fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from recollect import _errors, _milp, _problem, _solver, report
from recollect._bench import Bench, Mark
from recollect._bench import Step as StepFunction
from recollect._decided import decided_of
from recollect._problem import Problem, Solution
from recollect._ranks import need_the_same, same, together, worst
from recollect._sizes import bytes_of, human
from recollect._solver import InfeasibleError
from recollect._stores.pool import memory_to_spare
from recollect._torch import is_compiled, is_wrapped_for_ranks
from recollect.plan import Plan, Step, planned, shapes_of
from recollect.policy import Offload
from recollect.profile import KEEP, Profile, Progress, decided, measure

_ATTEMPTS = 5
_CLOSE = 0.02  # a plan that comes so close to its budget is good enough
_MARGIN = 0.05  # of a device, for what its allocator cannot use
_WARM_UP = 3
_POINTS = 12
ALLOWED = ("recompute", "offload")


class BudgetError(ValueError):
    """No plan fits the budget.

    Attributes:
        smallest: The least bytes that a step needs at its peak, as far as could be found.
        where: The moment of the step that needs them.
    """

    def __init__(self, budget: int, smallest: int, where: str, *, is_measured: bool) -> None:
        how = "measured" if is_measured else "predicted"
        there, needed = _errors.describe_amount(budget, up=False), _errors.describe_amount(smallest, up=True)
        super().__init__(
            f"no plan fits into {there}: the smallest that would is {needed} ({how}: {smallest} bytes), which {where} "
            "needs. Raise the budget, make the batch smaller, or split what is computed there into modules"
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
    allow: Sequence[str] = ALLOWED,
    offload: Offload | None = None,
    host_budget: int | str | None = None,
    repeats: int = 3,
    gpu: str | None = None,
    group: Any = None,
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
        allow: What may be decided besides keeping: "recompute", "offload" or both. Offloading is considered where
            there is a CUDA device, or `offload` says where to, and needs the extra `plan`.
        offload: How to offload, such as `recollect.Offload(to="disk", directory="/scratch")`.
        host_budget: How many bytes may be offloaded at a time.
        repeats: How often times are taken; their median counts.
        gpu: Which GPU, for a model on the meta device: "A100", "H100" (the default), "H200", ...
        group: In a distributed job, the ranks that measure together and get the same plan, as a process group: all, if
            it is None. The ranks of a pipeline have different models: give the group of those that have the same stage.
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
    with together(group):
        _check(model, budget, time_budget, repeats)
        set_aside = bytes_of("reserve", reserve)
        host_bytes = None if host_budget is None else bytes_of("host_budget", host_budget)
        bench = Bench(model, batch, step, gpu)
        where = _where_to_offload(bench.device, allow, offload, host_bytes)
        profile = measure(bench, repeats=repeats, offload=where, progress=progress)
        if "recompute" not in allow:
            profile = profile.without_recomputing()
        trial = _Trial(bench, profile, repeats, progress, host_bytes)
        plain = trial.plain()
        if time_budget is not None:
            return trial.plan_for_time(plain.seconds * time_budget)
        assert budget is not None  # or `_check` would have said so
        limit = -worst([-_bytes(budget, plain, bench.device)])[0]
        return trial.plan_for_bytes(limit, limit - set_aside)


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
    group: Any = None,
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
        group: In a distributed job, the ranks that measure together.
        progress: Called as `(what, done, of)` while it goes on.

    Returns:
        The points and their plans, predicted from one measured step.

    Example:
        >>> import torch, recollect
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> curve = recollect.frontier(model, torch.randn(4, 32, 16))
        >>> curve.points[0].peak < curve.plain.peak
        True
    """
    if not isinstance(points, int) or points < 2:
        raise ValueError(f"points must be a number from 2 on, got {_errors.describe_value(points)}")
    with together(group):
        _check(model, 1, None, repeats)
        bench = Bench(model, batch, step, gpu)
        profile = measure(bench, repeats=repeats, progress=progress)
        trial = _Trial(bench, profile, repeats, progress)
        plans = tuple(trial.as_plan(one, None) for one in _solver.frontier(trial.problems[0], points))
        return Frontier(trial.plain(), tuple(one.predicted for one in plans), plans)


# --- Holding a plan to its word ---


class _Trial:
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
        # Offloading is predicted, and not measured alone. So both are run, with it and without, and the better counts.
        self.problems = [profile.problem()]
        if profile.link is not None:
            self.problems.append(profile.problem(offloading=True, host_bytes=host_bytes))
        self._seen: dict[tuple[int, ...], int] = {}  # peaks that were measured
        self._repeats = repeats
        self._tell = progress or (lambda what, done, of: None)

    def plain(self) -> Step:
        """A step without decisions: measured, or predicted if it does not fit."""
        keep = [KEEP] * len(self._profile.blocks)
        return self._predicted(keep, _problem.peak(self.problems[0], keep)[0])

    def _predicted(self, chosen: Sequence[int], peak: int, stalls: float = 0.0) -> Step:
        profile = self._profile
        added = sum(profile.option(number, choice).seconds for number, choice in enumerate(chosen))
        base = sum(profile.option(number, choice).seconds for number, choice in enumerate(profile.base))
        return Step(peak, profile.seconds + added + stalls - base)

    def _step_of(self, solution: Solution) -> Step:
        return self._predicted(solution.chosen, solution.peak, solution.stalls)

    def as_plan(self, solution: Solution, budget: int | None, ran: _Ran | None = None) -> Plan:
        """What a solution means."""
        profile, model = self._profile, self._bench.model
        return Plan(
            type(model).__name__,
            shapes_of(model),
            profile.device,
            budget,
            planned(profile, solution),
            self.plain(),
            self._step_of(solution),
            None if ran is None else ran.step,
            solution.gap,
            profile.is_estimated,
            self._curve,
            profile.marks if profile.is_plain else (),
            () if ran is None else ran.marks,
            tuple(note for kind in profile.kinds for note in kind.notes),
        )

    @functools.cached_property
    def _curve(self) -> tuple[Step, ...]:
        return tuple(self._step_of(one) for one in _solver.frontier(self.problems[0], _POINTS))

    def run(self, solution: Solution) -> _Ran | None:
        """A step under decisions; None if the device had not enough memory for it."""
        bench, profile = self._bench, self._profile
        decisions = {name: one for block in planned(profile, solution) for name, one in block.decisions.items()}
        ran = None
        with bench.leaving_nothing():
            try:
                with decided(bench.model, {"": decisions}, "first"):
                    for _ in range(_WARM_UP):  # replays are compared by value at first, and stores learn
                        bench.train()
                    marks = bench.weigh(
                        list(zip(map(bench.model.get_submodule, profile.blocks), profile.calls, strict=True))
                    )
                    ran = _Ran(Step(max(mark.peak for mark in marks), bench.seconds(self._repeats)), tuple(marks))
            except torch.OutOfMemoryError:
                pass
            bench.start_anew()
            bench.let_go()
        return None if worst([ran is None])[0] else ran

    def plan_for_bytes(self, budget: int, limit: int) -> Plan:
        """The fastest plan whose step was seen to stay within `limit` bytes, which are those of the budget or less."""
        found = [plan for problem in self.problems if (plan := self._held(problem, budget, limit)) is not None]
        if not found:
            tried = [self._smallest(problem, budget) for problem in self.problems]
            smallest, where, _ = min(tried, key=lambda one: one[0])
            # Where predictions are off by more than the choices are apart, the least may fit all the same.
            found = [plan for peak, _, plan in tried if plan is not None and peak <= limit]
            if not found:
                raise BudgetError(budget, smallest + budget - limit, where, is_measured=bool(self._seen))
        return min(found, key=lambda plan: (plan.measured or plan.predicted).seconds)

    def _held(self, problem: Problem, budget: int, limit: int) -> Plan | None:
        """A plan that was seen to fit, by one of the problems; None if it has none."""
        best: Plan | None = None
        correction = 0
        tried: set[tuple[int, ...]] = set()
        for attempt in range(_ATTEMPTS):
            self._tell("running the plan", attempt, _ATTEMPTS)
            try:
                solution = same(_solver.solve(problem, limit - correction))
            except InfeasibleError as error:
                if tried or error.smallest > limit * (1 + 2 * _CLOSE):
                    break
                solution = same(_solver.smallest(problem))  # so close that a prediction does not settle it
            if self._profile.is_estimated:
                return self.as_plan(solution, budget)
            if solution.chosen in tried:
                break
            tried.add(solution.chosen)
            ran = self.run(solution)
            if ran is None:
                correction += max(int(limit * _MARGIN), 1)
                continue
            self._seen[solution.chosen] = ran.step.peak
            if ran.step.peak <= limit:
                if best is None or best.measured is None or ran.step.seconds < best.measured.seconds:
                    best = self.as_plan(solution, budget, ran)
                if ran.step.peak >= limit * (1 - _CLOSE) or not any(solution.chosen):
                    break
            # What was predicted and what came out differ by so much: aim by as much beside the mark.
            correction = ran.step.peak - solution.peak
        self._tell("running the plan", _ATTEMPTS, _ATTEMPTS)
        return best

    def _smallest(self, problem: Problem, budget: int) -> tuple[int, str, Plan | None]:
        """The least bytes that a step needs, measured where it can be, what sets it, and the plan if it was run now."""
        solution = same(_solver.smallest(problem))
        where = _problem.peak(problem, solution.chosen)[1]
        plan = None
        if solution.chosen not in self._seen and not self._profile.is_estimated:
            ran = self.run(solution)
            if ran is not None:
                self._seen[solution.chosen] = ran.step.peak
                plan = self.as_plan(solution, budget, ran)
        return self._seen.get(solution.chosen, solution.peak), where, plan

    def plan_for_time(self, seconds: float) -> Plan:
        """The plan of the least memory whose step was seen to take no longer, or nearly so."""
        allowed = seconds - self.plain().seconds
        best: Plan | None = None
        for attempt in range(_ATTEMPTS):
            self._tell("running the plan", attempt, _ATTEMPTS)
            solution = same(
                min((_solver.within(problem, max(allowed, 0.0)) for problem in self.problems), key=lambda one: one.peak)
            )
            if self._profile.is_estimated:
                return self.as_plan(solution, None)
            ran = self.run(solution)
            if ran is None:
                raise torch.OutOfMemoryError(
                    f"the least memory for a step of {1e3 * seconds:.1f} ms is more than the device has: give a budget "
                    "of bytes instead"
                )
            best = self.as_plan(solution, None, ran)
            if ran.step.seconds <= seconds * (1 + _CLOSE) or not any(solution.chosen):
                break
            allowed -= ran.step.seconds - seconds
        self._tell("running the plan", _ATTEMPTS, _ATTEMPTS)
        assert best is not None
        return best


@dataclass(frozen=True)
class _Ran:
    step: Step
    marks: tuple[Mark, ...]


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
    if budget is not None:
        share_of(budget)
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats must be a number from 1 on, got {_errors.describe_value(repeats)}")
    if is_wrapped_for_ranks(model):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}: make the plan for the model itself, apply it, and wrap "
            "it after that. (A model that fully_shard has sharded is planned as it is.)"
        )
    if is_compiled(model):
        raise ValueError("the model is compiled: make the plan for the model itself, apply it, and compile after that")
    if any(decided_of(module) is not None for module in model.modules()):
        raise ValueError(
            "the model is decided already, by recollect.apply or a plan: take that off first, with handle.remove() or "
            "recollect.unapply(model)"
        )
    need_the_same([(name, tuple(one.shape), str(one.dtype)) for name, one in model.named_parameters()], _other_models)


def _other_models(ranks: Sequence[int]) -> Exception:
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return ValueError(
        f"the ranks that decide together must have the same model, but {which} of the group have other parameters than "
        "rank 0. Where ranks have different parts of a model, as in a pipeline, give group= those with the same part"
    )


def _where_to_offload(
    device: torch.device, allow: Sequence[str], offload: Offload | None, host_bytes: int | None
) -> Offload | None:
    """How blocks may be offloaded, None if they may not or cannot."""
    allowed = [allow] if isinstance(allow, str) else list(allow)
    for one in allowed:
        if one not in ALLOWED:
            raise _errors.not_one_of("allow", one, ALLOWED)
    if offload is not None and not isinstance(offload, Offload):
        raise TypeError(f"offload must be recollect.Offload(...) or None, got {_errors.describe_value(offload)}")
    if "offload" not in allowed:
        return None
    if offload is None:
        if device.type not in ("cuda", "meta") or not _milp.is_there():
            return None
        offload = Offload()
    elif not _milp.is_there():
        raise ImportError("a plan that offloads needs scipy: pip install 'recollect[plan]'")
    if host_bytes is not None and offload.to == "cpu":
        offload = dataclasses.replace(offload, max_host_bytes=host_bytes)
    return offload


def share_of(budget: int | str) -> float | None:
    """The share of the plain step's peak that a budget is, None if it is bytes or the device; raises if none of it."""
    words = budget.strip() if isinstance(budget, str) else ""
    if not words.endswith("%"):
        if words != "device":
            bytes_of("budget", budget)
        return None
    try:
        share = float(words[:-1]) / 100
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ValueError(f"budget must be more than 0% and at most 100% of the plain step, got {budget!r}")
    return share


def _bytes(budget: int | str, plain: Step, device: torch.device) -> int:
    share = share_of(budget)
    if share is not None:
        return int(plain.peak * share)
    return _free(device) if isinstance(budget, str) and budget.strip() == "device" else bytes_of("budget", budget)


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
