"""Optimal schedules for chains of steps: which states to keep, which steps to run again, in which order.

To differentiate a chain its states are needed from the last to the first, and they are computed from the first to the
last. Keeping all of them takes memory that grows with the chain; keeping the input alone takes time that grows with the
square of its length. In between, c kept states are enough for a chain of C(c + r, c) steps if every step may be run
again r times (Griewank, 1992): 10 kept states do for 1,000 steps with less than 4 extra forwards per step, 20 for
100,000 with less than 6.

| function | steps | given | gives |
| --- | --- | --- | --- |
| `revolve(length, slots)` | all alike | slots | the fewest extra forwards |
| `rotor(chain, budget)` | each with its times and sizes | bytes | the least time; keeps graphs too, where they fit |
| `hrevolve(length, tiers)` | all alike | slots in several tiers, their costs | the least time, copies included |
| `online(slots)` | all alike, their number not known | slots | the fewest repetitions of any step |

- Revolve: Griewank and Walther, Algorithm 799, ACM TOMS 26 (2000). Optimal, in closed form, at any length.
- Rotor: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, Optimal checkpointing for heterogeneous chains, INRIA
  RR-9302 (2019). Optimal among schedules in which what is kept stays until its step is differentiated, up to memory
  being counted in levels. Bad at more than some 200 steps that all differ.
- H-Revolve: Herrmann and Pallez, ACM TOMS 46 (2020). Optimal where a slower tier takes no less to write and to read, up
  to some thousand steps; beyond that close to it. It has no overlap of copies with computation.
- Online: Stumm and Walther, SIAM J. Sci. Comput. 32 (2010); Wang, Moin and Iaccarino, SIAM J. Sci. Comput. 31 (2009).
  As good as Revolve up to (c + 1)(c + 2) / 2 steps; the fewest possible repetitions of any step at every length.

All of them are bad at steps that do not form a chain: a step may use its own state only, and parameters.

A schedule is plain data: an iterable of `Forward`, `Keep`, `Restore`, `Backward` and `Drop`. Those for equal steps are
made while they are read, with no recursion and no list, so that they may be as long as you like. `check()` carries a
schedule out on numbers alone, refuses what is not legal and counts; `cost()` and `peak()` are two of the counts;
`print(schedule)` draws it.

What is counted: the chain's input takes a slot like other states. The running state, and the step that is being
differentiated, come on top. The last step is run once, with its graph, since it is differentiated first; of every other
step one run is needed with a graph and the others, which are the extra forwards, are without.

This module and what it is made of know nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isfinite

from recollect._schedules.actions import (
    Action,
    Backward,
    Drop,
    Forward,
    Keep,
    Restore,
    ScheduleError,
    check_int,
)
from recollect._schedules.chain import Chain
from recollect._schedules.hrevolve import Cuts, Tier
from recollect._schedules.online import Online
from recollect._schedules.revolve import extra_forwards as _extra_forwards
from recollect._schedules.revolve import whole
from recollect._schedules.rotor import LEVELS, persistent
from recollect._schedules.schedule import Schedule
from recollect._schedules.simulator import Counts

__all__ = [
    "Action",
    "Backward",
    "Chain",
    "Counts",
    "Drop",
    "Forward",
    "Keep",
    "Online",
    "Restore",
    "Schedule",
    "ScheduleError",
    "extra_forwards",
    "hrevolve",
    "online",
    "revolve",
    "rotor",
]


def revolve(length: int, slots: int) -> Schedule:
    """The fewest extra forwards over a chain of equal steps, with so many kept states.

    Args:
        length: How many steps.
        slots: How many states may be kept at a time; the chain's input is one of them.

    Example:
        >>> schedule = revolve(5, 2)
        >>> print(schedule)
        revolve: 5 steps, 6 extra forwards (1.20 per step)
        at most 2 of 2 kept; 2 writes, 4 reads
        <BLANKLINE>
          1 o>->o>->-<
          2 o   o>-<
          3 o   o<
          4 o>-<
          5 o<
        <BLANKLINE>
            o kept  > run  # run, graph held  = graph held  < differentiated
        >>> revolve(1000, 10).cost()
        3636
    """
    check_int("length", length)
    check_int("slots", slots)
    return Schedule(actions=partial(whole, length, slots), length=length, slots=(slots,), name="revolve")


def extra_forwards(length: int, slots: int) -> int:
    """What `revolve(length, slots)` costs, in closed form: to choose a number of slots by.

    Example:
        >>> [extra_forwards(100_000, slots) for slots in (10, 20, 40, 80)]
        [832040, 534220, 386756, 304716]
    """
    check_int("length", length)
    check_int("slots", slots)
    return _extra_forwards(length, slots)


def rotor(chain: Chain, budget: int, *, levels: int = LEVELS) -> Schedule:
    """The least extra time over a chain of different steps, within a number of bytes.

    Graphs of steps are held where there is room for them, so that with enough of it nothing is run again.

    Args:
        chain: The times and sizes of the steps.
        budget: The bytes for everything that the chain holds: states, its input among them, graphs, the gradient, and
            what a step needs while it runs.
        levels: How many amounts of memory to tell apart. More take longer, and may find a better schedule.

    Raises:
        ScheduleError: If the budget is too small. Its `minimum` is the least that is enough.

    Example:
        >>> chain = Chain(
        ...     forward_times=[1, 1, 5, 1, 1],
        ...     backward_times=[2, 2, 10, 2, 2],
        ...     output_bytes=[10, 10, 10, 10, 10],
        ...     saved_bytes=[40, 40, 20, 40, 40],
        ...     input_bytes=10,
        ... )
        >>> print(rotor(chain, 100))
        rotor: 5 steps, 3 extra forwards (0.60 per step)
        at most 2 kept; 2 writes, 2 reads
        at most 100 bytes in use
        <BLANKLINE>
          1 o>->-#o>-<
          2 o    <o<
          3 o<-<
        <BLANKLINE>
            o kept  > run  # run, graph held  = graph held  < differentiated
        >>> rotor(chain, 200).cost()
        0
        >>> rotor(chain, 50)
        Traceback (most recent call last):
            ...
        recollect.schedules.ScheduleError: budget must be at least 70 bytes for this chain, got 50
    """
    if not isinstance(chain, Chain):
        raise TypeError(f"chain must be a recollect.schedules.Chain, got {type(chain).__name__} {chain!r}")
    check_int("budget", budget, 0)
    check_int("levels", levels)
    return Schedule(
        actions=persistent(chain, budget, levels),
        length=chain.length,
        slots=(None,),
        name="rotor",
        chain=chain,
        budget=budget,
    )


def hrevolve(
    length: int,
    tiers: Mapping[str, int],
    *,
    write: Mapping[str, float] | None = None,
    read: Mapping[str, float] | None = None,
    forward: float = 1,
) -> Schedule:
    """The least time over a chain of equal steps, with slots in several tiers.

    Args:
        length: How many steps.
        tiers: How many states may be kept at a time, per tier, the fastest first.
        write: The time to keep a state, by tier; nothing for those left out.
        read: The time to restore a state, by tier; nothing for those left out.
        forward: The time of a step's forward, in the unit of the others.

    Example:
        >>> schedule = hrevolve(12, {"device": 2, "cpu": 4}, write={"cpu": 1.5}, read={"cpu": 1})
        >>> print(schedule)
        hrevolve: 12 steps, 18 extra forwards (1.50 per step)
        at most device 2 of 2, cpu 2 of 4; 9 writes, 11 reads
        <BLANKLINE>
          1 1>->->1>->->0>->->0>->-<
          2 1     1     0     0>-<
          3 1     1     0     0<
          4 1     1     0>0>-<
          5 1     1     0 0<
          6 1     1     0<
          7 1     1>0>-<
          8 1     0 0<
          9 1     0<
         10 1>0>-<
         11 0 0<
         12 0<
        <BLANKLINE>
            0-1 kept (tier)  > run  # run, graph held  = graph held  < differentiated
        >>> schedule.cost(), schedule.peak("cpu")
        (23.0, 2)
    """
    check_int("length", length)
    if not isinstance(tiers, Mapping) or not tiers:
        expected = 'a mapping from names to slots, such as {"device": 10, "cpu": 100}'
        raise TypeError(f"tiers must be {expected}, got {tiers!r}")
    for name, slots in tiers.items():
        check_int(f"tiers[{name!r}]", slots)
    writes, reads = _times("write", write, tiers), _times("read", read, tiers)
    _check_time("forward", forward)
    if not forward:
        raise ScheduleError("forward must be more than 0: it is what writes and reads are weighed against")
    cuts = Cuts(length, [Tier(*numbers) for numbers in zip(tiers.values(), writes, reads, strict=True)], forward)
    coarse = "" if cuts.block == 1 else f" (slower tiers cut at multiples of {cuts.block} steps)"
    return Schedule(
        actions=cuts.actions,
        length=length,
        slots=tuple(tiers.values()),
        tiers=tuple(tiers),
        name=f"hrevolve{coarse}",
        write=writes,
        read=reads,
        forward=forward,
    )


def _times(argument: str, given: Mapping[str, float] | None, tiers: Mapping[str, int]) -> tuple[float, ...]:
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument} must be a mapping from names of tiers to times, got {given!r}")
    for name, time in given.items():
        if name not in tiers:
            raise ScheduleError(f"{argument} must be about the tiers {', '.join(map(repr, tiers))}, got {name!r}")
        _check_time(f"{argument}[{name!r}]", time)
    return tuple(given.get(name, 0) for name in tiers)


def _check_time(argument: str, time: object) -> None:
    if not isinstance(time, (int, float)) or isinstance(time, bool):
        raise TypeError(f"{argument} must be a number, got {type(time).__name__} {time!r}")
    if not isfinite(time) or time < 0:
        raise ScheduleError(f"{argument} must be finite and not negative, got {time!r}")


def online(slots: int) -> Online:
    """A schedule for a chain whose length shows only at its end.

    Args:
        slots: How many states may be kept at a time; the chain's input is one of them.

    Example:
        >>> schedule = online(3)
        >>> schedule.schedule(10).cost(), revolve(10, 3).cost()  # the same up to (3 + 1) * (3 + 2) / 2 steps
        (15, 15)
        >>> schedule.schedule(100).cost(), revolve(100, 3).cost()
        (513, 490)
    """
    check_int("slots", slots)
    return Online(slots)
