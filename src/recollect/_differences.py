"""Where two recorded runs of a function part, and why.

A replay counts as different by what it saves, because that alone reaches a gradient. What is in the records besides
(results of operators, tensors from outside, variables, flags of modules, generators) serves to say where the difference
began and what the likely cause is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from recollect import _errors
from recollect._digest import Numbers, difference, read
from recollect._guards import name_of
from recollect._record import Read, Recorder, Result, Step
from recollect._torch import operator_name
from recollect._verify import module_path


class Finding(NamedTuple):
    """The first difference."""

    operator: str | None
    where: str | None
    cause: str | None
    lines: list[str]


class Unequal(NamedTuple):
    """A saved tensor whose values differ."""

    slot: int
    by: float  # relative to the norm


def first_unequal(
    forward: Recorder, replay: Recorder, alive: Sequence[int], dtypes: Sequence[torch.dtype]
) -> Unequal | None:
    """The first saved tensor whose values differ, of those that somebody still asks for."""
    count = min(len(forward.saved), len(replay.saved), len(alive))
    places = [index for index in range(count) if alive[index]]
    then = read([forward.saved[index].digest for index in places])
    now = read([replay.saved[index].digest for index in places])
    for index, before, after in zip(places, then, now, strict=True):
        if before is not None and after is not None:
            by = difference(before, after, dtypes[index])
            if by:
                return Unequal(index, by)
    return None


def explain(
    forward: Recorder,
    replay: Recorder,
    slot: int | None,
    *,
    modules: Sequence[torch.nn.Module],
    drawn: Sequence[str],
    preserves_all: bool,
    stopped: bool,
) -> Finding:
    """Say where the two part.

    `slot` is the first that differs; `drawn` names generators that the forward drew from and that are not preserved.
    """
    place, by = _first_step(forward.steps, replay.steps, stopped=stopped)
    outside = _first_read(forward, replay, place)
    lines: list[str] = []
    step: Step | None = None
    site = forward.called_from
    if place is None and outside is None:
        if slot is not None:
            lines, step = _since_last_equal(replay, slot, site)
    elif outside is not None:
        step = _at(replay.steps, outside.step) or _at(forward.steps, outside.step)
        if step is not None:
            lines.append(f"The first operator that reads another value: {_step_in_words(step, site)}.")
    elif place is not None:
        lines, step = _parting(forward.steps, replay.steps, place, by, site)
    branched = place is not None and by == 0 and not _is_same_operator(forward.steps, replay.steps, place)
    cause = _cause(forward, replay, outside, modules, drawn, branched=branched, preserves_all=preserves_all)
    if cause is not None:
        lines.append(f"Likely cause: {cause}.")
    where = None if step is None else step.where
    return Finding(None if step is None else str(step.operator), where or forward.called_from, cause, lines)


def _at(steps: Sequence[Step], place: int) -> Step | None:
    return steps[place] if place < len(steps) else None


def _first_step(forward: Sequence[Step], replay: Sequence[Step], *, stopped: bool) -> tuple[int | None, float]:
    """The first operator that differs, and how much its result does: 0 if it is another operator."""
    count = min(len(forward), len(replay))
    numbers = [
        read([result.digest for step in steps[:count] for result in step.results]) for steps in (forward, replay)
    ]
    positions = [0, 0]
    for place in range(count):
        then, now = forward[place], replay[place]
        if then.operator is not now.operator or (
            # One that a stop cut off has no results.
            now.results and [one.signature for one in then.results] != [one.signature for one in now.results]
        ):
            return place, 0.0
        by = 0.0
        for k, result in enumerate(then.results[: len(now.results)]):
            before, after = numbers[0][positions[0] + k], numbers[1][positions[1] + k]
            if before is not None and after is not None:
                by = max(by, difference(before, after, result.signature[1]))
        positions[0] += len(then.results)
        positions[1] += len(now.results)
        if by:
            return place, by
    if len(replay) > len(forward) or (len(replay) < len(forward) and not stopped):
        return count, 0.0
    return None, 0.0


def _is_same_operator(forward: Sequence[Step], replay: Sequence[Step], place: int) -> bool:
    then, now = _at(forward, place), _at(replay, place)
    return then is not None and now is not None and then.operator is now.operator


def _first_read(forward: Recorder, replay: Recorder, place: int | None) -> Read | None:
    """The first tensor from outside with other values than in the forward, not later than the operator at `place`."""
    then, now = list(forward.reads.values()), list(replay.reads.values())
    count = min(len(then), len(now))
    numbers = [read([one.digest for one in reads[:count]]) for reads in (then, now)]
    for index in range(count):
        if place is not None and now[index].step > place:
            break
        before, after = numbers[0][index], numbers[1][index]
        if then[index].signature != now[index].signature:
            is_same = then[index].step == now[index].step
            return now[index] if is_same and _is_same_operator(forward.steps, replay.steps, now[index].step) else None
        if before is not None and after is not None and difference(before, after, then[index].signature[1]):
            return now[index]
    return None


def _parting(
    forward: Sequence[Step], replay: Sequence[Step], place: int, by: float, site: str | None
) -> tuple[list[str], Step | None]:
    then, now = _at(forward, place), _at(replay, place)
    step = now or then
    if by and then is not None and now is not None:
        lines = [f"The first operator whose result differs: {_step_in_words(now, site)}."]
        lines += [
            f"  {name}: {_result_in_words(result)}"
            for name, one in (("forward", then), ("replay ", now))
            for result in one.results
        ]
        lines.append(f"  They differ by about {_percent(by)} of the norm.")
        return lines, step
    lines = [f"The first {place} operators are the same. Then they part:" if place else "They part at once:"]
    for name, one_step in (("forward", then), ("replay ", now)):
        lines.append(f"  {name}: {'no further operator' if one_step is None else _step_in_words(one_step, site)}")
    return lines, step


def _since_last_equal(replay: Recorder, slot: int, site: str | None) -> tuple[list[str], Step | None]:
    saved = replay.saved
    first = saved[slot - 1].steps if 0 < slot <= len(saved) else 0
    last = saved[slot].steps if slot < len(saved) else len(replay.steps)
    steps = replay.steps[first:last] or replay.steps[max(first - 1, 0) : first]
    if not steps:
        return [
            "No operator made it: it is an argument or a tensor from outside, and has other values now (through "
            "saved-tensor hooks around the region, say)."
        ], None
    lines = ["The operators since the last saved tensor that is equal:"]
    lines += [f"  {_step_in_words(step, site)}" for step in steps[:8]]
    if len(steps) > 8:
        lines.append(f"  and {len(steps) - 8} more")
    return lines, steps[0]


def _cause(
    forward: Recorder,
    replay: Recorder,
    outside: Read | None,
    modules: Sequence[torch.nn.Module],
    drawn: Sequence[str],
    *,
    branched: bool,
    preserves_all: bool,
) -> str | None:
    causes = [f"{name} was drawn from in the forward and is not preserved" for name in drawn]
    if not drawn and forward.has_own_generators and not preserves_all:
        causes.append(
            "a torch.Generator of your own is drawn from, which is not preserved (recollect.register_generator, and "
            'preserve_rng_state="all")'
        )
    if outside is not None and not causes:
        tensor = outside.tensor()
        known = {id(one.tensor()) for one in forward.reads.values()}
        name = "a tensor from outside" if tensor is None else name_of(tensor, modules)
        # One that is gone by now was put in the place of another, as the forward put it there.
        is_same = tensor is not None and id(tensor) in known
        changed = "was changed since the forward" if is_same else "is read in place of another one"
        causes.append(f"{name} {changed}")
    flags = [
        f"{type(module).__name__} was in {_mode(then)} in the forward and is in {_mode(now[1])}"
        for place, (reference, then) in forward.training.items()
        if (now := replay.training.get(place)) is not None and now[1] != then and (module := reference()) is not None
    ]
    causes += flags[:2]
    if outside is None and not flags:  # numbers may be drawn, and not matter
        causes += _rebound(forward, replay)[:2]
    if not causes:
        return "another branch was taken" if branched else None
    return ("another branch was taken: " if branched else "") + "; ".join(causes)


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _rebound(forward: Recorder, replay: Recorder) -> list[str]:
    found = []
    for code, then in forward.variables.items():
        now = replay.variables.get(code, {})
        for name, value in then.items():
            if name in now and now[name] != value:
                found.append(f"{name} was {value} in the forward and is {now[name]}")
        found += [f"{name} was not there in the forward and is {now[name]}" for name in now if name not in then]
    return list(dict.fromkeys(found))


def _step_in_words(step: Step, site: str | None) -> str:
    modules = [module for reference in step.modules if (module := reference()) is not None]
    path = module_path(modules)
    inside = f" in {path}" if path else ""
    where = step.where or f"no line of user code; the region is called at {site}"
    return f"{operator_name(step.operator)}{inside}, at {where}"


def _result_in_words(result: Result) -> str:
    words = _errors.describe_signature(result.signature)
    (numbers,) = read([result.summary])
    if numbers is not None:
        norm, largest = _merged(numbers)
        words += f", norm {norm:.6g}, largest {largest:.6g}"
    return words


def _merged(numbers: Numbers) -> tuple[float, float]:
    norms, largest = zip(*numbers.parts, strict=True)
    return math.sqrt(sum(norm * norm for norm in norms)), max(largest)


def _percent(by: float) -> str:
    return "all" if math.isinf(by) else f"{100 * by:.2g}%"
