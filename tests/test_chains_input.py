"""Chains: bad input is refused at the door, before a step is run."""

import collections

import pytest
import torch
from torch import nn

import recollect
from recollect import schedules


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x.sin()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"slots": 0}, ValueError, "slots must be at least 1, for the first state, got 0"),
        ({"slots": -3}, ValueError, "slots must be at least 1"),
        ({"slots": 2.5}, TypeError, "slots must be a number of states, got float 2.5"),
        ({"slots": True}, TypeError, "slots must be a number of states, got bool True"),
        ({"slots": 2, "budget": "1 GiB"}, ValueError, "at most one can be given, got slots and budget"),
        ({"length": -1}, ValueError, "length must be a number of steps, from 0 up, got -1"),
        ({"length": 3.0}, TypeError, "length must be a number of steps, got float 3.0"),
        ({"length": None}, TypeError, r"functions is one function.*say how many steps to run, length="),
        ({"budget": "many"}, ValueError, "budget must be a number of bytes"),
        ({"budget": 1.5}, TypeError, "budget must be a number of bytes"),
        ({"schedule": schedules.revolve(9, 2)}, ValueError, "the schedule is for 9 steps, and the chain has 10"),
        ({"schedule": [1, 2]}, TypeError, "schedule must be one of recollect.schedules"),
        (
            {"schedule": schedules.hrevolve(10, {"device": 2, "tape": 3})},
            ValueError,
            "the schedule has a tier 'tape'",
        ),
        ({"tiers": {"tape": 3}}, ValueError, "tiers.*'device', 'cpu' or 'disk'.*'tape'"),
        ({"tiers": {}}, ValueError, "tiers must name at least one tier"),
        ({"tiers": {"device": 0}}, ValueError, "tiers.*at least one state"),
        ({"tiers": {"device": -1}}, ValueError, r"tiers\['device'\] must be a number of states, from 0 up, got -1"),
        ({"tiers": {"device": "many"}}, TypeError, r"tiers\['device'\] must be a number of states, got str 'many'"),
        ({"tiers": [3]}, TypeError, "tiers must be a dict"),
        ({"outputs": 1}, TypeError, "outputs must be True or False, got int 1"),
        ({"determinism_check": "sometimes"}, ValueError, "determinism_check must be one of"),
        ({"preserve_rng_state": "some"}, TypeError, "preserve_rng_state must be"),
    ],
)
def test_options(options, kind, message):
    step = Counting()
    with pytest.raises(kind, match=message):
        recollect.sequential(step, torch.ones(3, requires_grad=True), **{"length": 10, **options})
    assert step.calls == 0


@pytest.mark.parametrize(
    ("functions", "options", "kind", "message"),
    [
        ([torch.sin, 3], {}, TypeError, r"functions\[1\] must be callable .*got int 3"),
        (7, {}, TypeError, "functions must be an nn.Sequential, a list of functions, or one function with length="),
        (iter([torch.sin]), {}, TypeError, "functions must be an nn.Sequential"),
        ([torch.sin], {"length": 3}, ValueError, "length has no meaning with a list of functions"),
        (nn.ModuleList([nn.Tanh()]), {"length": 3}, ValueError, "length has no meaning with a list of functions"),
    ],
)
def test_functions(functions, options, kind, message):
    with pytest.raises(kind, match=message):
        recollect.sequential(functions, torch.ones(3), **options)


class Opaque:
    def __init__(self):
        self.tensor = torch.ones(3, requires_grad=True)


def holds_itself():
    state = [torch.ones(3)]
    state.append(state)
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (Opaque(), r"got Opaque .* at state\. A tensor inside of it would be left without its gradient"),
        ({"a": [torch.ones(3), Opaque()]}, r"got Opaque .* at state\['a'\]\[1\]"),
        (collections.Counter(), "got Counter"),
        (holds_itself(), "must not hold itself"),
    ],
)
@pytest.mark.parametrize("slots", [2, 10])
def test_states_that_cannot_be_taken_apart(state, message, slots):
    step = Counting()
    with pytest.raises(TypeError, match=message):
        recollect.sequential(step, state, length=10, slots=slots)
    assert step.calls == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state[0], r"at state it was given a tuple of length 2 and returned a tensor \(float32\[3\]"),
        (lambda state: list(state), "at state it was given a tuple of length 2 and returned a list of length 2"),
        (lambda state: (*state, 1), "a tuple of length 2 and returned a tuple of length 3"),
        (lambda state: (state[0], {"n": 1}), r"at state\[1\] .* with keys 'm' and returned a dict with keys 'n'"),
        (lambda state: (None, state[1]), r"at state\[0\] it was given a tensor and returned NoneType None"),
        (lambda state: (state[0], {"m": state[0]}), r"at state\[1\]\['m'\] it was given a value that is no tensor"),
        (lambda state: (state[0], {"m": Opaque()}), r"at state\[1\]\['m'\] .* and returned Opaque"),
    ],
)
@pytest.mark.parametrize(("slots", "at"), [(2, 3), (2, 0), (2, 9), (10, 3)])
def test_steps_that_change_the_structure(change, message, slots, at):
    ran = []

    def step(state):
        ran.append(1)
        result = (state[0].sin(), {"m": state[1]["m"] + 1})
        return change(result) if state[1]["m"] == at else result

    with pytest.raises(TypeError, match=rf"step {at} of the chain .* changes the structure.*{message}"):
        recollect.sequential(step, (torch.ones(3, requires_grad=True), {"m": 0}), length=10, slots=slots)
    assert len(ran) == at + 1


@pytest.mark.parametrize("slots", [2, 10])
def test_steps_without_an_output(slots):
    with pytest.raises(TypeError, match=r"every step returns a tuple of two.*step 0 of the chain"):
        recollect.sequential(torch.sin, torch.ones(3, requires_grad=True), length=10, slots=slots, outputs=True)
    with torch.no_grad(), pytest.raises(TypeError, match="every step returns a tuple of two"):
        recollect.sequential(torch.sin, torch.ones(3), length=10, slots=slots, outputs=True)


def test_a_schedule_that_cannot_be_carried_out():
    bad = schedules.Schedule(actions=lambda: [schedules.Backward(0)], length=1, slots=(1,))
    step = Counting()
    with pytest.raises(schedules.ScheduleError):
        recollect.sequential(step, torch.ones(3, requires_grad=True), length=1, schedule=bad)
    assert step.calls == 0
