"""Which schedule for a budget or for tiers, from what the steps of a chain take.

A budget of bytes is for what the chain holds: states, graphs, the gradient of a state, and what a step needs while it
runs. Up to a hundred different steps, or some hundred equal ones, are planned one by one (Rotor). More different
ones are planned in groups of neighbours. More equal ones get as many slots as fit (Revolve).

Tiers are planned for equal steps: the mean time of all and the largest state, and what copies take over the link there.

Plans are remembered: in training the same one is asked for in every step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from recollect import _errors
from recollect._chains.chain import Chain
from recollect._chains.measured import Measured, measure, size_of
from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore
from recollect._stores.chosen import store_of
from recollect._stores.store import Store
from recollect._travel import speeds_of_link
from recollect.policy import Offload
from recollect.schedules import Chain as Numbers
from recollect.schedules import Schedule, ScheduleError, hrevolve, revolve, rotor

_DIFFERENT = 100  # steps that Rotor plans in about two seconds
_EQUAL = 400  # the same, of equal ones


# --- A budget ---


def for_budget(chain: Chain, length: int, budget: int) -> Schedule:
    """The fastest schedule that fits.

    Raises:
        ScheduleError: Nothing fits; its `minimum` is what would.
    """
    steps = measure(chain, length)
    given = sum({id(tensor): size_of(tensor) for tensor in chain.tensors}.values())
    if len(set(steps)) <= 2 and length > _EQUAL:
        return _with_slots(steps, length, given, budget)
    every = steps if len(steps) == length else steps * length
    size = 1 if len(set(every)) <= 2 else -(-length // _DIFFERENT)
    try:
        return _planned(tuple(every), given, budget, size)
    except ScheduleError:
        if size == 1:
            raise
        return _with_slots(steps, length, given, budget)


@functools.lru_cache(maxsize=32)
def _planned(steps: tuple[Measured, ...], given: int, budget: int, size: int) -> Schedule:
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    numbers = Numbers(
        forward_times=[sum(one.forward_time for one in group) for group in groups],
        backward_times=[sum(one.backward_time for one in group) for group in groups],
        output_bytes=[group[-1].output_bytes for group in groups],
        saved_bytes=[sum(one.saved_bytes for one in group) for group in groups],
        gradient_bytes=[group[-1].gradient_bytes for group in groups],
        forward_temporary_bytes=[max(one.forward_temporary_bytes for one in group) for group in groups],
        backward_temporary_bytes=[max(one.backward_temporary_bytes for one in group) for group in groups],
        input_bytes=given,
    )
    schedule = rotor(numbers, budget)
    if size == 1:
        return schedule
    actions = functools.partial(_taken_apart, schedule, size, len(steps))
    return Schedule(actions=actions, length=len(steps), slots=(None,), name=f"rotor over groups of {size} steps")


def _taken_apart(schedule: Schedule, size: int, length: int) -> Iterator[Action]:
    """A schedule over groups of steps as one over steps: a group's graph is the graphs of all of its steps."""
    held: set[int] = set()

    def graphs(group: int) -> Iterator[Action]:
        for step in range(group * size, min((group + 1) * size, length)):
            yield Forward(step, step + 1, graph=True)

    for action in schedule:
        if isinstance(action, Forward):
            if action.graph:
                held.add(action.start)
                yield from graphs(action.start)
            else:
                yield Forward(action.start * size, min(action.stop * size, length))
        elif isinstance(action, Backward):
            if action.step not in held:
                yield from graphs(action.step)
            for step in reversed(range(action.step * size, min((action.step + 1) * size, length))):
                yield Backward(step)
        else:
            kind: type[Keep | Restore | Drop] = type(action)
            yield kind(action.state * size, action.tier)


def _with_slots(steps: Sequence[Measured], length: int, given: int, budget: int) -> Schedule:
    """As many slots as fit beside the step that takes most; or all graphs, if they do."""
    state = max(given, *(one.output_bytes for one in steps))
    on_top = max(
        one.gradient_bytes
        + max(
            one.saved_bytes + max(one.forward_temporary_bytes, one.backward_temporary_bytes),
            2 * one.output_bytes + one.forward_temporary_bytes,
        )
        for one in steps
    )
    saved = max(one.saved_bytes for one in steps)
    if given + length * saved + on_top <= budget:
        return Schedule(actions=functools.partial(_all_graphs, length), length=length, slots=(None,), name="all graphs")
    slots = (budget - on_top) // max(state, 1)
    if slots < 1:
        error = ScheduleError(f"budget must be at least {state + on_top} bytes for this chain, got {budget}")
        error.minimum = state + on_top
        raise error
    return revolve(length, min(slots, length))


def _all_graphs(length: int) -> Iterator[Action]:
    return itertools.chain(
        (Forward(step, step + 1, graph=True) for step in range(length)),
        (Backward(step) for step in reversed(range(length))),
    )


# --- Tiers ---

PLACES = ("device", "cpu", "disk")


def checked_tiers(tiers: Any) -> dict[str, int]:
    """The tiers that have slots, the fastest first."""
    if not isinstance(tiers, Mapping):
        raise TypeError(
            'tiers must be a dict from places to numbers of states, such as {"device": 10, "cpu": 100}, got '
            f"{_errors.describe_value(tiers)}"
        )
    if not tiers:
        raise ValueError("tiers must name at least one tier: 'device', 'cpu' or 'disk'")
    for name, slots in tiers.items():
        if name not in PLACES:
            raise ValueError(f"tiers can be 'device', 'cpu' or 'disk', where there are stores, got {name!r}")
        if not isinstance(slots, int) or isinstance(slots, bool):
            raise TypeError(f"tiers[{name!r}] must be a number of states, got {_errors.describe_value(slots)}")
        if slots < 0:
            raise ValueError(f"tiers[{name!r}] must be a number of states, from 0 up, got {slots}")
    if not any(tiers.values()):
        raise ValueError("tiers must have room for at least one state, the first one, got 0 everywhere")
    return {name: tiers[name] for name in PLACES if tiers.get(name)}


def stores_of(tiers: Iterable[str], device: torch.device) -> tuple[Store | None, ...]:
    """Where each tier keeps tensors of a device; None where they stay."""
    return tuple(None if name in ("device", device.type) else store_of(Offload(to=name, min_bytes=0)) for name in tiers)


def for_tiers(chain: Chain, length: int, tiers: dict[str, int], device: torch.device) -> Schedule:
    """The fastest schedule with so many states in each tier."""
    away = {name: _rates(device, name) for name in tiers if name not in ("device", device.type)}
    if not away:
        return _over_tiers(length, tuple(tiers.items()), (), (), 1.0)
    steps = measure(chain, length)
    state = max(one.output_bytes for one in steps)
    forward = max(fmean(one.forward_time for one in steps), 1e-7)
    return _over_tiers(
        length,
        tuple(tiers.items()),
        tuple((name, _about(state / out / forward)) for name, (out, _) in away.items()),
        tuple((name, _about(state / back / forward)) for name, (_, back) in away.items()),
        1.0,
    )


@functools.lru_cache(maxsize=32)
def _over_tiers(
    length: int,
    tiers: tuple[tuple[str, int], ...],
    write: tuple[tuple[str, float], ...],
    read: tuple[tuple[str, float], ...],
    forward: float,
) -> Schedule:
    return hrevolve(length, dict(tiers), write=dict(write), read=dict(read), forward=forward)


@functools.cache
def _rates(device: torch.device, to: str) -> tuple[float, float]:
    return speeds_of_link(device, to, None)


def _about(number: float) -> float:
    """Two digits: so that measurements that are nearly alike give the same plan."""
    return float(f"{number:.2g}")
