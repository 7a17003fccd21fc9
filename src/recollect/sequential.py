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
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from recollect import _errors
from recollect._chains import node
from recollect._chains.chain import Chain, Options
from recollect._chains.choice import PLACES, checked_tiers, for_budget, for_tiers, stores_of
from recollect._chains.first import FirstRun
from recollect._chains.structure import Mismatch, Structure
from recollect._checkpoint import checked_options, overridden
from recollect._engine import frame
from recollect._engine.frame import run_region
from recollect._sizes import bytes_of
from recollect._torch import in_dual_level, never_begin_in, never_look_into
from recollect.schedules import Forward, Restore, Schedule, ScheduleError, online, revolve

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
    state get the gradients that the plain loop would give them, to the last bit. (Sums of three and more may be rounded
    in another order where something outside of the chain, a loss on `outputs` or a chain or region within a step, adds
    to them, and under autocast, whose cache would sum them up in half precision.)

    Of `slots`, `budget`, `schedule` and `tiers` at most one is given; without any, there are as many slots as
    it takes to run no step more than two times again: about the square root of twice the length.

    Args:
        functions: An `nn.Sequential`, a list of functions or modules; or one function, for `length` steps. Each takes a
            state and returns the next one. What a step hands on to later ones has to be in the state: what it leaves
            elsewhere, in a list or an attribute, has no gradient.
        x: The first state: a tensor, or any structure of tensors, numbers, strings and None in tuples, lists, dicts and
            dataclasses. All states have the same structure.
        length: How many steps, where `functions` is one function.
        slots: How many states are kept at a time, the first one included. The running state and the step that is
            differentiated come on top. With as many slots as steps, every step is a region of its own.
        budget: Bytes for everything that is kept, as a number or as "2 GiB". The steps are measured first.
        schedule: One of `recollect.schedules`, for this length.
        tiers: How many states are kept where, for example `{"device": 10, "cpu": 100, "disk": 1000}`.
        outputs: Let every step return a pair, the next state and an output to which a loss may be attached. An output
            is a tensor of its own, also where it is the state: the gradient at it is of what was made of it outside of
            the chain, and it must not be changed in place.
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
    if in_dual_level():
        raise _errors.chain_in_dual_level()
    chain = Chain(steps, x, Options(options.determinism_check, options.preserve_rng_state, outputs))
    plan = _plan(chain, count, chosen)
    return node.run(chain, lambda first: first.carry_out(iter(plan), plan.length), lambda: plan)


@never_look_into
def while_loop(
    cond: Callable[[Any], Any],
    step: Step,
    x: Any,
    *,
    slots: int,
    outputs: bool = False,
    determinism_check: str = "first",
    preserve_rng_state: bool | str = True,
) -> Any:
    """Run a step for as long as a condition on the state holds, and keep few of the states for backward.

    `sequential` for a number of steps that shows only when they have been run: a solver that stops when it is close
    enough, a sampler, a search. Up to `(slots + 1) * (slots + 2) / 2` steps it runs no more of them again than it would
    if the number had been known; beyond that some percent more.

    Args:
        cond: Takes a state; whether another step is to be run. It has no part in the gradient, and is not asked again
            in backward: it must not change anything that steps depend on, random generators included.
        step: Takes a state and returns the next one.
        x: The first state, of any structure, as for `sequential`.
        slots: How many states are kept at a time, the first one included. Two running states and the step that is
            differentiated come on top.
        outputs: As for `sequential`.
        determinism_check: As for `sequential`.
        preserve_rng_state: As for `sequential`.

    Returns:
        The first state for which the condition does not hold; with `outputs`, a pair of it and the list of all outputs.

    Example:
        >>> import torch, recollect
        >>> a = torch.tensor(2.0, requires_grad=True)
        >>> def newton(x):
        ...     return x - (x * x - a) / (2 * x)
        >>> root = recollect.while_loop(lambda x: (x * x - a).abs() > 1e-6, newton, torch.tensor(1.0), slots=3)
        >>> root.backward()
        >>> torch.isclose(a.grad, 0.5 / a.sqrt())
        tensor(True)
    """
    for name, function in (("cond", cond), ("step", step)):
        if not callable(function):
            raise _errors.not_callable(name, function)
    options = overridden(checked_options(determinism_check, False, True, preserve_rng_state, None, None))
    if not isinstance(outputs, bool):
        raise _errors.not_a_bool("outputs", outputs)
    schedule = online(checked_slots(slots))
    if not torch.is_grad_enabled():
        return _loop_plainly(cond, step, x, outputs)
    if in_dual_level():
        raise _errors.chain_in_dual_level()
    chain = Chain(step, x, Options(options.determinism_check, options.preserve_rng_state, outputs))
    length = 0

    def first(run: FirstRun) -> None:
        nonlocal length
        length = run.carry_out_until(cond, schedule)

    result = node.run(chain, first, lambda: schedule.schedule(length))
    if length:
        return result
    return (x, []) if outputs else x


def _loop_plainly(cond: Callable[[Any], Any], step: Step, x: Any, outputs: bool) -> Any:
    given: list[Any] = []
    while cond(x):
        x = step(x)
        if outputs:
            x, output = _pair(x, step, len(given))
            given.append(output)
    return (x, given) if outputs else x


def _plan(chain: Chain, length: int, chosen: int | Schedule | _Budget | dict[str, int]) -> Schedule:
    if isinstance(chosen, int):
        return revolve(length, chosen)
    if not isinstance(chosen, _Budget):
        device = next((tensor.device for tensor in chain.tensors if not tensor.is_cpu), torch.device("cpu"))
        chain.stores = stores_of(chosen.tiers if isinstance(chosen, Schedule) else chosen, device)
        return chosen if isinstance(chosen, Schedule) else for_tiers(chain, length, chosen, device)
    try:
        return for_budget(chain, length, chosen.bytes)
    except ScheduleError as error:
        if error.minimum is None:
            raise
        raise _errors.budget_too_small(chosen.bytes, error.minimum) from None


@dataclass(frozen=True)
class _Budget:
    bytes: int


# --- Arguments ---


def _checked_functions(functions: Any, length: Any) -> tuple[Step | Sequence[Step], int]:
    is_list = isinstance(functions, (torch.nn.Sequential, torch.nn.ModuleList)) or not callable(functions)
    has_own_forward = isinstance(functions, torch.nn.Sequential) and (
        type(functions).forward is not torch.nn.Sequential.forward or "forward" in vars(functions)
    )
    if has_own_forward and length is None:
        raise TypeError(
            f"functions is an nn.Sequential with a forward of its own, {type(functions).__name__}, which its modules "
            "one after the other would leave out: give them as list(functions), or it as one function with length=..."
        )
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
    is_sequence = hasattr(functions, "__len__") and hasattr(functions, "__getitem__")
    if not is_sequence or isinstance(functions, (Mapping, str, bytes)):
        raise TypeError(
            "functions must be an nn.Sequential, a list of functions, or one function with length=..., "
            f"got {_errors.describe_value(functions)}"
        )
    steps = [functions[place] for place in range(len(functions))]
    for place, step in enumerate(steps):
        if not callable(step):
            raise _errors.not_callable(f"functions[{place}]", step)
    return steps, len(steps)


def _checked_choice(
    count: int, slots: Any, budget: Any, schedule: Any, tiers: Any
) -> int | Schedule | _Budget | dict[str, int]:
    """How many slots, or which schedule, or what to make one for."""
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
    if budget is not None:
        return _Budget(bytes_of("budget", budget))
    if tiers is not None:
        return checked_tiers(tiers)
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
    for name in schedule.tiers:
        if name not in PLACES:
            raise ScheduleError(f"the schedule has a tier {name!r}; there are stores for 'device', 'cpu' and 'disk'")
    if schedule not in _checked:
        schedule.check()
        for action in schedule:
            if isinstance(action, Forward) and action.stop == length:
                break
            if isinstance(action, Restore):
                raise ScheduleError(f"the schedule has {action} before the last state is reached, which nothing needs")
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
