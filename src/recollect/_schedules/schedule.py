"""`Schedule`: actions over a chain of known length, with the limits they keep; made anew each time it is iterated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from recollect._schedules.actions import Action
from recollect._schedules.simulator import Counts, simulate


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Schedule:
    """The order of forwards and backwards over a chain: an iterable of actions, and the limits that they keep.

    Attributes:
        actions: Gives the actions from the first, each time that it is called.
        length: How many steps the chain has.
        slots: How many states may be kept at a time, per tier; None where only bytes are limited.
        tiers: The names of the tiers, the fastest first.
        name: What made it, for people.
    """

    actions: Callable[[], Iterable[Action]]
    length: int
    slots: tuple[int | None, ...]
    tiers: tuple[str, ...] = ("device",)
    name: str = "schedule"

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions())

    def check(self) -> Counts:
        """Carry the schedule out on numbers alone.

        Raises:
            ScheduleError: At the first action that is not legal.
        """
        return simulate(self, length=self.length, slots=self.slots)

    def cost(self) -> int:
        """What it takes beyond a plain run: forwards that are run again."""
        return self.check().extra

    def peak(self) -> int:
        """The most states that are kept at a time."""
        return sum(self.check().peaks)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.length} steps, slots {self.slots}>"
