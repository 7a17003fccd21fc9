"""The five things a schedule may say, and the error for one that says something it may not.

A chain has steps 0, 1, ..., length - 1. State i is what step i takes; state `length` is the result. One state is the
running one. Others are kept in slots, which belong to tiers: tier 0 is the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


class ScheduleError(ValueError):
    """A schedule that cannot be carried out, or an argument from which none can be made.

    Attributes:
        minimum: The least amount that would do, where the error is about a budget that is too small; else None.
    """

    __module__ = "recollect.schedules"  # where users find it
    minimum: int | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """Run steps `start` to `stop - 1` from the running state, `start`. `stop` is the running state then.

    With `graph`, of one step only, what differentiates it is held until its `Backward`.
    """

    start: int
    stop: int
    graph: bool = False


@dataclass(frozen=True, slots=True)
class Keep:
    """Put the running state, `state`, into a slot of a tier. It stays the running state."""

    state: int
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Restore:
    """Make a kept state the running one. Its slot stays occupied."""

    state: int
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the slot of a state."""

    state: int
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Differentiate a step: with the graph that is held of it, or else by running it once from the running state.

    The running state is used up either way. Steps are differentiated in the order length - 1, ..., 1, 0.
    """

    step: int


Action: TypeAlias = Forward | Keep | Restore | Drop | Backward


def check_int(name: str, value: object, least: int = 1) -> None:
    """Raise unless `value` is an int of at least that much."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ScheduleError(f"{name} must be at least {least}, got {value}")
