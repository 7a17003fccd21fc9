"""`sequential` and `while_loop`: long chains of steps in bounded memory, with the least work.

A chain is x, f0(x), f1(f0(x)), ...: the layers of a deep network, the steps of a recurrent one, of a sampler, of a
solver, of a simulation. Backward needs every state in turn, from the last to the first. Keeping all of them takes
memory that grows with the length; keeping `c` of them and running steps again from there takes, with the right choice
of which, few runs: 10,000 steps with 50 slots run every step 2.9 times more, with 140 slots twice. Which ones to keep
is the matter of `recollect.schedules`, which names the papers; here schedules are chosen, and run (`_chains/`).

What it is bad at: steps that are cheaper than some 20 microseconds, where the call of a step costs more than the step;
chains that would fit into memory (there nothing is faster than keeping everything); and being differentiated twice.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from typing import Any

import torch

from recollect import _errors
from recollect._chains import node
from recollect._chains.chain import Chain, Options
from recollect._chains.structure import Mismatch, Structure
from recollect._checkpoint import checked_options, overridden
from recollect._engine import frame
from recollect._engine.frame import run_region
from recollect._torch import never_begin_in, never_look_into
from recollect.schedules import Schedule, ScheduleError, revolve

Step = Callable[[Any], Any]


@never_look_into
def sequential(
    functions: Step | Sequence[Step],
    x: Any,
    *,
    length: int | None = None,
    slots: int | None = None,
    budget: int | str | None = None,
    schedule: Schedule | None = None,
    tiers: Mapping[str, int] | None = None,
    outputs: bool = False,
    determinism_check: str = "first",
    preserve_rng_state: bool | str = True,
) -> Any:
    """Run a chain of steps, each on what the one before gave, and keep few of the states for backward.

    Backward runs steps again from the kept states, no more of them than it must. Parameters, closures and the first
    state get the gradients that the plain loop would give them, to the last bit.

    Of `slots`, `budget`, `schedule` and `tiers` at most one is given; without any, there are as many slots as
    it takes to run no step more than two times again: about the square root of twice the length.

    Args:
        functions: An `nn.Sequential`, a list of functions or modules; or one function, for `length` steps. Each takes a
            state and returns the next one.
        x: The first state: a tensor, or any structure of tensors, numbers, strings and None in tuples, lists, dicts and
            dataclasses. All states have the same structure.
        length: How many steps, where `functions` is one function.
        slots: How many states are kept at a time, the first one included. The running state and the step that is
            differentiated come on top. With as many slots as steps, every step is a region of its own.
        budget: Bytes for everything that is kept, as a number or as "2 GiB". The steps are measured first.
        schedule: One of `recollect.schedules`, for this length.
        tiers: How many states are kept where, for example `{"device": 10, "cpu": 100, "disk": 1000}`.
        outputs: Let every step return a pair, the next state and an output to which a loss may be attached.
        determinism_check: "first" compares the states of a function by value when it is run again for the first time;
            "values" always; "default" by shape, dtype and device; "none" not at all.
        preserve_rng_state: Let steps that are run again draw the same random numbers, as for `checkpoint`.

    Returns:
        The last state; with `outputs`, a pair of it and the list of all outputs.

    Raises:
        CheckpointError: In backward, if a gradient would be missing or wrong.
        TypeError: An argument of another kind than these, or a step that changes the structure of the state.
        ValueError: An argument out of range, a schedule of another length, a budget that one step does not fit into.

    Example:
        >>> import torch, recollect
        >>> cell = torch.nn.RNNCell(4, 8)
        >>> inputs = torch.randn(1000, 1, 4)
        >>> def step(state):
        ...     h, i = state
        ...     return cell(inputs[i], h), i + 1
        >>> h, i = recollect.sequential(step, (torch.zeros(1, 8), 0), length=1000, slots=10)
        >>> h.sum().backward()  # runs 3,636 steps again, and holds 10 states
        >>> cell.weight_hh.grad.shape
        torch.Size([8, 8])
    """
    steps, count = _checked_functions(functions, length)
    options = overridden(checked_options(determinism_check, False, True, preserve_rng_state, None, None))
    if not isinstance(outputs, bool):
        raise _errors.not_a_bool("outputs", outputs)
    chosen = _checked_choice(count, slots, budget, schedule, tiers)
    if count == 0:
        return (x, []) if outputs else x
    if not torch.is_grad_enabled():
        return _run_plainly(steps, x, count, outputs)
    if isinstance(chosen, int) and chosen >= count:
        return _run_as_regions(steps, x, count, outputs, options)
    plan = revolve(count, chosen) if isinstance(chosen, int) else chosen
    chain = Chain(steps, x, Options(options.determinism_check, options.preserve_rng_state, outputs))
    return node.run(chain, lambda first: first.carry_out(iter(plan), plan.length), lambda: plan)


# --- Arguments ---


def _checked_functions(functions: Any, length: Any) -> tuple[Step | Sequence[Step], int]:
    is_list = isinstance(functions, (torch.nn.Sequential, torch.nn.ModuleList)) or not callable(functions)
    if length is not None and not isinstance(functions, torch.nn.ModuleList) and callable(functions):
        if not isinstance(length, int) or isinstance(length, bool):
            raise TypeError(f"length must be a number of steps, got {_errors.describe_value(length)}")
        if length < 0:
            raise ValueError(f"length must be a number of steps, from 0 up, got {length}")
        return functions, length
    if not is_list:
        raise TypeError(
            f"functions is one function, {_errors.describe_function(functions)}: say how many steps to run, length=..."
        )
    if length is not None:
        raise ValueError(f"length has no meaning with a list of functions, which has one for each step, got {length!r}")
    if not hasattr(functions, "__len__") or not hasattr(functions, "__getitem__"):
        raise TypeError(
            "functions must be an nn.Sequential, a list of functions, or one function with length=..., "
            f"got {_errors.describe_value(functions)}"
        )
    steps = [functions[place] for place in range(len(functions))]
    for place, step in enumerate(steps):
        if not callable(step):
            raise _errors.not_callable(f"functions[{place}]", step)
    return steps, len(steps)


def _checked_choice(count: int, slots: Any, budget: Any, schedule: Any, tiers: Any) -> int | Schedule:
    """How many slots, or which schedule."""
    given = {
        name: value
        for name, value in (("slots", slots), ("budget", budget), ("schedule", schedule), ("tiers", tiers))
        if value is not None
    }
    if len(given) > 1:
        raise ValueError(f"of slots, budget, schedule and tiers at most one can be given, got {' and '.join(given)}")
    if slots is not None:
        return checked_slots(slots)
    if schedule is not None:
        return _checked_schedule(schedule, count)
    if budget is not None or tiers is not None:
        raise NotImplementedError
    return default_slots(count)


def checked_slots(slots: Any) -> int:
    """`slots`, if it is a number of states."""
    if not isinstance(slots, int) or isinstance(slots, bool):
        raise TypeError(f"slots must be a number of states, got {_errors.describe_value(slots)}")
    if slots < 1:
        raise ValueError(f"slots must be at least 1, for the first state, got {slots}")
    return slots


def default_slots(length: int) -> int:
    """The least number with which no step is run more than two times again: (c + 1)(c + 2) / 2 >= length."""
    slots = max(1, (isqrt(8 * length + 1) - 3) // 2)
    return slots if (slots + 1) * (slots + 2) // 2 >= length else slots + 1


_checked: weakref.WeakSet[Schedule] = weakref.WeakSet()


def _checked_schedule(schedule: Any, length: int) -> Schedule:
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule must be one of recollect.schedules, such as revolve(1000, 10), got "
            f"{_errors.describe_value(schedule)}"
        )
    if schedule.length != length:
        raise ScheduleError(f"the schedule is for {schedule.length} steps, and the chain has {length}")
    if schedule not in _checked:
        schedule.check()
        _checked.add(schedule)
    return schedule


# --- Without a schedule ---


def _run_plainly(steps: Step | Sequence[Step], x: Any, length: int, outputs: bool) -> Any:
    given = []
    for place in range(length):
        x = (steps if callable(steps) else steps[place])(x)
        if outputs:
            x, output = _pair(x, steps, place)
            given.append(output)
    return (x, given) if outputs else x


def _pair(result: Any, steps: Step | Sequence[Step], place: int) -> tuple[Any, Any]:
    if type(result) is not tuple or len(result) != 2:
        raise _errors.no_output(_describe(steps, place), result)
    return result


def _describe(steps: Step | Sequence[Step], place: int) -> str:
    function = steps if callable(steps) else steps[place]
    return f"step {place} of the chain ({_errors.describe_function(function)})"


def _run_as_regions(steps: Step | Sequence[Step], x: Any, length: int, outputs: bool, options: frame.Options) -> Any:
    """With a slot for every state: each step but the last is a region, in the order in which a schedule has them."""
    structure = Structure(x)
    given = []
    for place in range(length):
        step = steps if callable(steps) else steps[place]
        x = step(x) if place == length - 1 else run_region(step, (x,), {}, options)
        if outputs:
            x, output = _pair(x, steps, place)
            given.append(output)
        try:
            structure.leaves(x)
        except Mismatch as mismatch:
            raise _errors.other_structure(
                _describe(steps, place), mismatch.path, mismatch.expected, mismatch.got
            ) from None
    return (x, given) if outputs else x


never_begin_in(sys.modules[__name__])
