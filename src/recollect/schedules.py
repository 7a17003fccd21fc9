"""Optimal schedules over chains of steps, as plain data that knows nothing of torch."""

from __future__ import annotations

from functools import partial

from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore, ScheduleError
from recollect._schedules.revolve import extra_forwards, sweeps
from recollect._schedules.schedule import Schedule
from recollect._schedules.simulator import Counts

__all__ = [
    "Action",
    "Backward",
    "Counts",
    "Drop",
    "Forward",
    "Keep",
    "Restore",
    "Schedule",
    "ScheduleError",
    "extra_forwards",
    "revolve",
]


def revolve(length: int, slots: int) -> Schedule:
    """The least number of extra forwards over a chain of equal steps, with so many kept states.

    Args:
        length: How many steps.
        slots: How many states may be kept at a time; the chain's input is one of them.

    Example:
        >>> revolve(1000, 10).cost()
        3636
    """
    for name, value in (("length", length), ("slots", slots)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ScheduleError(f"{name} must be at least 1, got {value}")
    return Schedule(actions=partial(sweeps, length, slots), length=length, slots=(slots,), name="revolve")
