"""The simulator: carries a schedule out on numbers alone, refuses the first action that is not legal, and counts.

It is the judge of every schedule, so it shares nothing with what makes them: it knows the meaning of the five actions,
the sizes and times of the chain, and the limits. What it holds is what an executor would hold: the running state, the
kept states, the graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore, ScheduleError


@dataclass(frozen=True)
class Counts:
    """What a schedule does, as counted by the simulator.

    Attributes:
        forwards: Steps run, with or without a graph, those that a `Backward` runs included.
        extra: Forwards beyond one per step.
        keeps: States written, per tier.
        restores: States read back, per tier.
        peaks: The most slots in use at a time, per tier.
    """

    forwards: int
    extra: int
    keeps: tuple[int, ...]
    restores: tuple[int, ...]
    peaks: tuple[int, ...]


def simulate(actions: Iterable[Action], *, length: int, slots: tuple[int | None, ...]) -> Counts:
    """Carry `actions` out.

    Raises:
        ScheduleError: At the first action that is not legal, or when not all has been done at the end.
    """
    tiers = len(slots)
    kept: list[set[int]] = [set() for _ in slots]
    keeps, restores, peaks = [0] * tiers, [0] * tiers, [0] * tiers
    graphs: set[int] = set()
    running: int | None = 0
    left = length  # steps still to be differentiated
    forwards = 0
    reached = False

    number = -1
    for number, action in enumerate(actions):

        def wrong(why: str, number: int = number, action: Action = action) -> ScheduleError:
            return ScheduleError(f"action {number}, {action}, is not legal: {why}")

        if isinstance(action, (Keep, Restore, Drop)):
            state, tier = action.state, action.tier
            if not 0 <= tier < tiers:
                raise wrong(f"there are {tiers} tiers, from 0")
            holders = kept[tier]
            if isinstance(action, Keep):
                if running != state:
                    raise wrong(_running(running))
                if state in holders:
                    raise wrong("that tier has this state already")
                limit = slots[tier]
                if limit is not None and len(holders) >= limit:
                    raise wrong(f"all {limit} slots of that tier are in use")
                holders.add(state)
                keeps[tier] += 1
                peaks[tier] = max(peaks[tier], len(holders))
            elif state not in holders:
                raise wrong("that tier has no such state")
            elif isinstance(action, Restore):
                running = state
                restores[tier] += 1
            else:
                holders.remove(state)
        elif isinstance(action, Forward):
            if running != action.start:
                raise wrong(_running(running))
            if not action.start < action.stop <= left:
                raise wrong(f"it must run at least one step, and only steps that are still needed, up to {left - 1}")
            if action.graph:
                if action.stop != action.start + 1:
                    raise wrong("a graph is held of one step at a time")
                if action.start in graphs:
                    raise wrong("a graph of that step is held already")
                graphs.add(action.start)
            elif action.stop == length:
                raise wrong("the last step is run once, with its graph: it is differentiated first")
            running = action.stop
            reached = reached or running == length
            forwards += action.stop - action.start
        elif isinstance(action, Backward):
            if action.step != left - 1:
                raise wrong(f"step {left - 1} is next" if left else "all steps have been differentiated")
            if action.step in graphs:
                graphs.remove(action.step)
            elif not reached:
                raise wrong("the result has not been computed yet")
            elif running != action.step:
                raise wrong(f"no graph is held of that step, and {_running(running)}")
            else:
                forwards += 1
            running = None
            left -= 1
        else:
            raise ScheduleError(f"action {number} is not an action: {action!r}")

    if left:
        raise ScheduleError(f"the schedule ends after {number + 1} actions, before step {left - 1} is differentiated")
    for tier, holders in enumerate(kept):
        if holders:
            raise ScheduleError(f"the schedule ends with state {min(holders)} in a slot of tier {tier}")
    return Counts(forwards, forwards - length, tuple(keeps), tuple(restores), tuple(peaks))


def _running(running: int | None) -> str:
    return "there is no running state" if running is None else f"the running state is {running}"
