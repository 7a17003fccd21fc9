"""The simulator: carries a schedule out on numbers alone, refuses the first action that is not legal, and counts.

It is the judge of every schedule, so it shares nothing with what makes them: it knows what the five actions mean, the
times and sizes of the chain, and the limits. It holds what an executor would hold: the running state, the kept states,
the graphs. States are values with an identity here. A state that is kept while it is the running one is there once; one
that is computed a second time while it is kept is there twice.

In bytes, at any moment: the states of the fastest tier, the running state, what is held for graphs with their inputs,
the gradient of the result or, later, of the step that was differentiated last, and what the step that runs needs on
top. The gradient of the result counts from the start, and the result itself as long as the graph of the last step does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore, ScheduleError
from recollect._schedules.chain import Chain


@dataclass(frozen=True)
class Counts:
    """What a schedule does, as counted by the simulator.

    Attributes:
        actions: How many actions there are.
        forwards: Steps run, with or without a graph; those that a `Backward` runs are among them.
        extra: Forwards beyond one per step.
        keeps: States written, per tier.
        restores: States read back, per tier.
        peaks: The most slots in use at a time, per tier.
        cost: The time of the extra forwards, of writes and of reads.
        bytes: The most memory in use at a time, where the chain's sizes are known; else None.
    """

    actions: int
    forwards: int
    extra: int
    keeps: tuple[int, ...]
    restores: tuple[int, ...]
    peaks: tuple[int, ...]
    cost: float
    bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a schedule has to keep to, and what its actions cost.

    Attributes:
        length: The number of steps.
        slots: How many states may be kept at a time, per tier; None where there is no limit.
        write: The time to keep a state, per tier.
        read: The time to restore one, per tier.
        forward: The time of a step's forward, where there is no chain to tell.
        chain: Times and sizes.
        budget: The limit on bytes, where there is one.
    """

    length: int
    slots: tuple[int | None, ...]
    write: tuple[float, ...]
    read: tuple[float, ...]
    forward: float = 1
    chain: Chain | None = None
    budget: int | None = None


def simulate(actions: Iterable[Action], limits: Limits) -> Counts:
    """Carry `actions` out.

    Raises:
        ScheduleError: At the first action that is not legal, or when not everything has been done at the end.
    """
    machine = _Machine(limits)
    do = {
        Forward: machine.forward,
        Keep: machine.keep,
        Restore: machine.restore,
        Drop: machine.drop,
        Backward: machine.backward,
    }
    number = -1
    for number, action in enumerate(actions):
        carry_out = do.get(type(action))
        if carry_out is None:
            raise ScheduleError(f"action {number} is none: {action!r}")
        try:
            carry_out(action)  # type: ignore[operator]
        except _IllegalError as why:
            raise ScheduleError(f"action {number}, {action}, is not legal: {why}") from None
    return machine.counts(number + 1)


class _IllegalError(Exception):
    """Why an action is not legal."""


class _Machine:
    """What would be in memory while a schedule is carried out."""

    def __init__(self, limits: Limits) -> None:
        tiers = len(limits.slots)
        self._limits = limits
        self._left = limits.length  # steps to be differentiated yet
        self._running: _State | None = _State(0, holders=1)
        self._kept: list[dict[int, _State]] = [{} for _ in range(tiers)]
        self._graphs: dict[int, tuple[_State, _State]] = {}
        self._keeps, self._restores, self._peaks = [0] * tiers, [0] * tiers, [0] * tiers
        self._forwards = 0
        self._extra = 0
        self._cost: float = 0
        self._bytes = _Bytes(limits.chain, limits.budget) if limits.chain is not None else None
        if limits.chain is not None:
            self._reached: list[float] = [0, *accumulate(limits.chain.forward_times)]

    def forward(self, action: Forward) -> None:
        start, stop = action.start, action.stop
        state = self._must_run(start)
        if action.graph:
            if stop != start + 1:
                raise _IllegalError("a graph is held of one step at a time")
            if start in self._graphs:
                raise _IllegalError("a graph of that step is held already")
            if stop > self._left:
                raise _IllegalError(f"step {start} has been differentiated")
        elif not start < stop:
            raise _IllegalError("it has to run at least one step")
        elif stop >= self._left:
            raise _IllegalError(f"step {self._left - 1} is the next to be differentiated: it is run with a graph only")
        self._forwards += stop - start
        if not action.graph:
            self._extra += stop - start
            if self._limits.chain is None:
                self._cost += (stop - start) * self._limits.forward
            else:
                self._cost += self._reached[stop] - self._reached[start]
        if self._bytes is not None:
            self._bytes.run(state, stop, graph=action.graph)
        self._running = _State(stop, holders=1)
        if action.graph:  # which holds the state from here on
            self._graphs[start] = (state, self._running)
            self._running.in_graph = True
            return
        self._let_go(state)
        if self._bytes is not None:
            self._bytes.begin(self._running)

    def keep(self, action: Keep) -> None:
        holders = self._tier(action.tier)
        state = self._must_run(action.state)
        if action.state in holders:
            raise _IllegalError("that tier has this state already")
        limit = self._limits.slots[action.tier]
        if limit is not None and len(holders) >= limit:
            raise _IllegalError(f"the slots of that tier, {limit}, are all in use")
        if action.state >= self._left:
            raise _IllegalError(f"nothing starts from state {action.state} any more")
        holders[action.state] = state
        if action.tier == 0:
            state.holders += 1
        self._keeps[action.tier] += 1
        self._cost += self._limits.write[action.tier]
        self._peaks[action.tier] = max(self._peaks[action.tier], len(holders))

    def restore(self, action: Restore) -> None:
        state = self._in_slot(action)
        self._restores[action.tier] += 1
        self._cost += self._limits.read[action.tier]
        if self._running is not None:
            self._let_go(self._running)
        if action.tier == 0:
            state.holders += 1
            self._running = state
        else:
            self._running = _State(action.state, holders=1)
            if self._bytes is not None:
                self._bytes.begin(self._running)

    def drop(self, action: Drop) -> None:
        state = self._in_slot(action)
        del self._kept[action.tier][action.state]
        if action.tier == 0:
            self._let_go(state)

    def backward(self, action: Backward) -> None:
        step = action.step
        if step != self._left - 1:
            raise _IllegalError(f"step {self._left - 1} is next" if self._left else "all steps are differentiated")
        graph = self._graphs.pop(step, None)
        if graph is None:
            if step == self._limits.length - 1:
                raise _IllegalError("the last step is run with a graph, in the forward, which gives the result")
            self._must_run(step)
            self._forwards += 1
        if self._bytes is not None:
            self._bytes.differentiate(step, with_graph=graph is not None)
        if graph is not None:
            taken, made = graph
            if self._bytes is not None:
                self._bytes.release(step, made)
            self._let_go(taken)
        if self._running is not None:
            self._let_go(self._running)
            self._running = None
        self._left -= 1

    def counts(self, actions: int) -> Counts:
        if self._left:
            raise ScheduleError(f"the schedule ends after {actions} actions, and step {self._left - 1} is left")
        for tier, holders in enumerate(self._kept):
            if holders:
                raise ScheduleError(f"the schedule ends, and state {min(holders)} is still in a slot of tier {tier}")
        return Counts(
            actions,
            self._forwards,
            self._extra,
            tuple(self._keeps),
            tuple(self._restores),
            tuple(self._peaks),
            self._cost,
            None if self._bytes is None else self._bytes.peak,
        )

    def _must_run(self, index: int) -> _State:
        if self._running is None:
            raise _IllegalError("there is no running state")
        if self._running.index != index:
            raise _IllegalError(f"the running state is {self._running.index}")
        return self._running

    def _tier(self, tier: int) -> dict[int, _State]:
        if not 0 <= tier < len(self._kept):
            raise _IllegalError(f"there are {len(self._kept)} tiers, counted from 0")
        return self._kept[tier]

    def _in_slot(self, action: Restore | Drop) -> _State:
        state = self._tier(action.tier).get(action.state)
        if state is None:
            raise _IllegalError("that tier has no such state")
        return state

    def _let_go(self, state: _State) -> None:
        state.holders -= 1
        if not state.holders and self._bytes is not None:
            self._bytes.end(state)


class _State:
    """One value of a state. It has its own memory, unless a graph that is held made it."""

    __slots__ = ("holders", "in_graph", "index")

    def __init__(self, index: int, *, holders: int) -> None:
        self.index, self.holders, self.in_graph = index, holders, False


class _Bytes:
    """The memory that is in use, and the most of it so far."""

    def __init__(self, chain: Chain, budget: int | None) -> None:
        self._chain, self._budget = chain, budget
        self._states = (chain.input_bytes, *chain.output_bytes)
        self._used = chain.input_bytes
        self._gradient = chain.gradient_bytes[-1]
        self.peak = 0
        self._reach(0)

    def _reach(self, on_top: int) -> None:
        amount = self._used + self._gradient + on_top
        self.peak = max(self.peak, amount)
        if self._budget is not None and amount > self._budget:
            raise _IllegalError(f"it takes {amount} bytes, and the budget is {self._budget}")

    def begin(self, state: _State) -> None:
        self._used += self._states[state.index]
        self._reach(0)

    def end(self, state: _State) -> None:
        if not state.in_graph:
            self._used -= self._states[state.index]

    def run(self, state: _State, stop: int, *, graph: bool) -> None:
        chain = self._chain
        if graph:
            self._reach(chain.saved_bytes[state.index] + chain.forward_temporary_bytes[state.index])
            self._used += chain.saved_bytes[state.index]
            return
        # From the second step on, what the first one took may be gone.
        gone = 0 if state.holders > 1 or state.in_graph else self._states[state.index]
        taken = 0
        for step in range(state.index, stop):
            self._reach(taken + chain.output_bytes[step] + chain.forward_temporary_bytes[step])
            taken = chain.output_bytes[step] - gone

    def differentiate(self, step: int, *, with_graph: bool) -> None:
        chain = self._chain
        if with_graph:
            self._reach(chain.backward_temporary_bytes[step])
        else:
            on_top = max(chain.forward_temporary_bytes[step], chain.backward_temporary_bytes[step])
            self._reach(chain.saved_bytes[step] + on_top)
        self._gradient = chain.gradient_bytes[step - 1] if step else 0

    def release(self, step: int, made: _State) -> None:
        """The graph of a step is let go of. What it made may be in a slot, or the running state, yet."""
        self._used -= self._chain.saved_bytes[step]
        made.in_graph = False
        if made.holders:
            self._used += self._states[made.index]
