"""`Schedule`: actions over a chain of known length, with the limits that they keep; made anew at each iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from recollect._schedules.actions import Action, ScheduleError
from recollect._schedules.chain import Chain
from recollect._schedules.diagram import draw
from recollect._schedules.simulator import Counts, Limits, simulate


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Schedule:
    """The order of forwards and backwards over a chain: an iterable of actions, and the limits that they keep to.

    The functions of `recollect.schedules` make them. One of your own is made from a list of actions, or from a function
    that gives them from the first one on each time that it is called; `check()` says whether it can be carried out.

    Attributes:
        actions: The actions, or what gives them.
        length: How many steps the chain has.
        slots: How many states may be kept at a time, per tier; None where there is no limit on their number.
        tiers: The names of the tiers, the fastest first.
        name: What made it.
        write: The time to keep a state, per tier; nothing where it is not given.
        read: The time to restore a state, per tier; nothing where it is not given.
        forward: The time of a step's forward, where there is no chain to tell.
        chain: The times and sizes of the steps, where they are known.
        budget: The limit on bytes, where there is one.

    Example:
        >>> from recollect.schedules import Backward, Drop, Forward, Keep, Restore, Schedule
        >>> actions = [
        ...     *(Keep(0), Forward(0, 1), Forward(1, 2, graph=True)),
        ...     *(Backward(1), Restore(0), Drop(0), Backward(0)),
        ... ]
        >>> Schedule(actions=actions, length=2, slots=(1,)).cost()
        1
    """

    actions: Sequence[Action] | Callable[[], Iterable[Action]]
    length: int
    slots: tuple[int | None, ...]
    tiers: tuple[str, ...] = ("device",)
    name: str = "schedule"
    write: tuple[float, ...] = ()
    read: tuple[float, ...] = ()
    forward: float = 1
    chain: Chain | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.actions):
            if isinstance(self.actions, Iterator) or not isinstance(self.actions, Iterable):
                raise TypeError(
                    f"actions must be a sequence of actions, or a function that gives them anew, got {self.actions!r}"
                )
            object.__setattr__(self, "actions", tuple(self.actions))
        if not isinstance(self.length, int) or isinstance(self.length, bool) or self.length < 1:
            raise ScheduleError(f"length must be an int of at least 1, got {self.length!r}")
        for name in ("slots", "tiers", "write", "read"):
            given = getattr(self, name)
            if not given and name in ("write", "read"):
                given = (0,) * len(self.tiers)
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise TypeError(f"{name} must be a tuple with one entry per tier, got {given!r}")
            object.__setattr__(self, name, tuple(given))
            if len(getattr(self, name)) != len(self.tiers):
                raise ScheduleError(f"{name} must have one entry for each of the tiers {self.tiers}, got {given!r}")
        if self.chain is not None and self.chain.length != self.length:
            raise ScheduleError(f"length must be the chain's, {self.chain.length} steps, got {self.length}")

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions() if callable(self.actions) else self.actions)

    def check(self) -> Counts:
        """Carry the schedule out on numbers alone, and count.

        Raises:
            ScheduleError: At the first action that is not legal, which it names, with the reason.
        """
        limits = Limits(
            length=self.length,
            slots=self.slots,
            write=self.write,
            read=self.read,
            forward=self.forward,
            chain=self.chain,
            budget=self.budget,
        )
        return simulate(self, limits)

    def cost(self) -> float:
        """What it takes beyond a plain run: the time of extra forwards, of writes and of reads.

        A forward counts 1 where no times were given, so that it is the number of extra forwards then.
        """
        return self._counts.cost

    def peak(self, tier: str | None = None) -> int:
        """The most that is held at a time: bytes, where the chain's sizes are known, else kept states.

        Args:
            tier: Count the states that are kept in this tier. Without it, those in the fastest tier.
        """
        if tier is None:
            return self._counts.peaks[0] if self._counts.bytes is None else self._counts.bytes
        if tier not in self.tiers:
            raise ScheduleError(f"tier must be one of {', '.join(map(repr, self.tiers))}, got {tier!r}")
        return self._counts.peaks[self.tiers.index(tier)]

    @cached_property
    def _counts(self) -> Counts:
        return self.check()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.length} steps, slots {dict(zip(self.tiers, self.slots, strict=True))}>"

    def __str__(self) -> str:
        return draw(self, self.name, self.length, self.tiers, self.slots, self._counts)
