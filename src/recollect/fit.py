"""`plan` and `frontier`: measure a step, decide, run what was decided, and correct.

A plan is not believed before it was run (`_trial.py`). Here is what is asked for, and whether that makes sense.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from recollect import _errors, _milp, _solver, report
from recollect._bench import Bench
from recollect._bench import Step as StepFunction
from recollect._decided import decided_of, is_lazy
from recollect._ranks import need_the_same, together, worst
from recollect._sizes import bytes_of, human
from recollect._stores.pool import memory_to_spare
from recollect._torch import is_compiled, is_wrapped_for_ranks
from recollect._trial import MARGIN, Trial
from recollect._trial import BudgetError as BudgetError
from recollect.plan import Plan, Step
from recollect.policy import Offload
from recollect.profile import Progress, measure

ALLOWED = ("recompute", "offload")


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
    gradients, buffers, what modules remember, random generators and hooks.

    Args:
        model: Any module. On the meta device nothing is run: bytes are counted, times are those of a GPU on paper.
        batch: What `step` gets: the same tensors every time, in lists and dicts of its own.
        budget: The bytes that may be alive at the peak of the step, all told: a number, "40GiB", "60%" (of the peak of
            the plain step), or "device" (what is free there, less a margin).
        time_budget: Or how long the step may take, as a multiple of the plain step: 1.1 asks for the least memory
            within 10% more time.
        step: A function `(model, batch) -> loss`. By default the model is called on the batch (a dict gives keywords,
            a tuple or list positions), and the loss is the `loss` of what it gives, or the sum of it. It changes
            neither parameters nor the batch, and leaves the backward of that loss to others; where it accumulates
            gradients, it has gone backward for all but the last part of the batch.
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
        ValueError: If the step does something else than to compute a loss, or not the same every time.

    Example:
        >>> import torch, recollect
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> plan = recollect.plan(model, torch.randn(4, 32, 16), budget="70%")
        >>> plan.measured.peak <= plan.budget
        True
        >>> handle = plan.apply(model)
    """
    set_aside = bytes_of("reserve", reserve)
    _check_goal(budget, time_budget, set_aside)
    _check(model, batch, step, repeats, progress)
    host_bytes = None if host_budget is None else bytes_of("host_budget", host_budget)
    allowed = _allowed(allow)
    with together(group):
        _check_ranks(model)
        bench = Bench(model, batch, step, gpu)
        where = _where_to_offload(bench.device, allowed, offload, host_bytes)
        profile = measure(bench, repeats=repeats, offload=where, progress=progress)
        if "recompute" not in allowed:
            profile = profile.without_recomputing()
        trial = Trial(bench, profile, repeats, progress, host_bytes)
        if time_budget is not None:
            return trial.plan_for_time(time_budget)
        assert budget is not None  # or `_check_goal` would have said so
        limit = -worst([-_bytes(budget, trial.plain(), bench.device)])[0]
        return trial.plan_for_bytes(limit, limit - set_aside, list(_hints(bench.device, allowed, where)))


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
    _check(model, batch, step, repeats, progress)
    _check_count("points", points, 2)
    with together(group):
        _check_ranks(model)
        bench = Bench(model, batch, step, gpu)
        profile = measure(bench, repeats=repeats, progress=progress)
        trial = Trial(bench, profile, repeats, progress)
        plans = tuple(trial.as_plan(one, None) for one in _solver.frontier(trial.problem(), points))
        return Frontier(trial.plain(), tuple(one.predicted for one in plans), plans)


# --- What was asked for ---


def _check(model: Any, batch: Any, step: Any, repeats: Any, progress: Any) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_errors.describe_value(model)}")
    if isinstance(batch, Iterator):
        raise TypeError(
            f"batch must be what one step gets, got {_errors.describe_value(batch)}, which every step would take "
            "something from: give next(batch)"
        )
    for name, value in (("step", step), ("progress", progress)):
        if value is not None and not callable(value):
            raise _errors.not_callable(name, value)
    _check_count("repeats", repeats, 1)
    if is_wrapped_for_ranks(model):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}: make the plan for the model itself, apply it, and wrap "
            "it after that. (A model that fully_shard has sharded is planned as it is.)"
        )
    if is_compiled(model):
        raise ValueError("the model is compiled: make the plan for the model itself, apply it, and compile after that")
    for name, module in model.named_modules():
        if is_lazy(module):
            raise ValueError(
                f"model has lazy parameters, which its first call makes: {name or 'the model'} "
                f"({type(module).__name__}). Call it once, and plan then"
            )
    if any(decided_of(module) is not None for module in model.modules()):
        raise ValueError(
            "the model is decided already, by recollect.apply, a plan or composable.checkpoint: take that off first, "
            "with handle.remove(), recollect.unapply(model) or composable.remove(module)"
        )


def _check_ranks(model: Module) -> None:
    """Raise, on all ranks alike, if they have different models."""
    need_the_same([(name, tuple(one.shape), str(one.dtype)) for name, one in model.named_parameters()], _other_models)


def _other_models(ranks: Sequence[int]) -> Exception:
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return ValueError(
        f"the ranks that decide together must have the same model, but {which} of the group have other parameters than "
        "rank 0. Where ranks have different parts of a model, as in a pipeline, give group= those with the same part"
    )


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a number from {least} on, got {_errors.describe_value(value)}")


def _check_goal(budget: Any, time_budget: Any, reserve: int) -> None:
    if (budget is None) == (time_budget is None):
        raise TypeError(
            "plan takes a budget (bytes) or a time_budget (a multiple of the plain step's time), one of them"
        )
    if budget is not None:
        share_of(budget)
        return
    if isinstance(time_budget, bool) or not (isinstance(time_budget, (int, float)) and time_budget >= 1):
        raise ValueError(f"time_budget must be a number from 1 on, got {_errors.describe_value(time_budget)}")
    if reserve:
        raise ValueError(f"reserve has no meaning with time_budget, which sets no limit to memory, got {reserve} bytes")


def _allowed(allow: Any) -> list[str]:
    try:
        allowed = [allow] if isinstance(allow, str) else list(allow)
    except TypeError:
        allowed = []
    if not allowed:
        raise ValueError(f"allow must hold 'recompute', 'offload' or both, got {_errors.describe_value(allow)}")
    for one in allowed:
        if one not in ALLOWED:
            raise _errors.not_one_of("allow", one, ALLOWED)
    return allowed


def _where_to_offload(
    device: torch.device, allowed: Sequence[str], offload: Offload | None, host_bytes: int | None
) -> Offload | None:
    """How blocks may be offloaded, None if they may not or cannot."""
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
    elif offload.to == "cpu" and device.type == "cpu":
        raise ValueError(
            f"offload must say where to, for a model on {device}, got {offload!r}, where it is already: "
            'recollect.Offload(to="disk", directory=...)'
        )
    if host_bytes is not None and offload.to == "cpu":
        offload = dataclasses.replace(offload, max_host_bytes=host_bytes)
    return offload


def _hints(device: torch.device, allowed: Sequence[str], where: Offload | None) -> Iterator[str]:
    """What to say if no plan fits."""
    if "recompute" not in allowed:
        yield f"allow={tuple(allowed)}: nothing may be recomputed"
        if where is None:
            missing = "scipy is not installed" if device.type == "cuda" else f"the model is on {device}"
            yield f"nothing can be offloaded, because {missing} and offload= does not say where to"


def share_of(budget: int | str) -> float | None:
    """The share of the plain step's peak that a budget is, None if it is bytes or the device; raises if none of it."""
    words = budget.strip() if isinstance(budget, str) else ""
    if not words.endswith("%"):
        if words != "device":
            try:
                bytes_of("budget", budget)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    'budget must be bytes (2**30, "40 GiB"), a share of the plain step\'s peak ("60%") or "device", '
                    f"got {_errors.describe_value(budget)}"
                ) from None
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
        return int((free + torch.cuda.memory_reserved(device)) * (1 - MARGIN))
    if device.type == "cpu":
        return memory_to_spare()
    raise ValueError(
        f'budget="device" is for CUDA devices and the CPU, got a model on {device}: give a number of bytes'
    )
