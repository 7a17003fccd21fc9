"""What a careless change breaks, and nothing but these tests would find (see mutants.py)."""

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mutants
import recollect
from recollect import CheckpointError, Save, _ambient, checkpoint, pin, region
from tools import assert_equal, leaf

# --- When something fails ---


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_every_step_is_undone_whichever_fails(fails, fault):
    undone = []

    def step(number):
        undone.append(number)
        if number == fails:
            raise fault(number)

    with pytest.raises(fault):
        _ambient.undo_all([partial(step, number) for number in range(3)])
    assert undone == [2, 1, 0]


def test_a_forward_that_failed_is_not_the_region_that_runs_here():
    """Or what it was given would live as long as the thread."""

    def function(x):
        x.sin().exp()
        raise ValueError("on purpose")

    gc.disable()
    try:
        x = leaf(3)
        given = weakref.ref(x)
        with pytest.raises(ValueError, match="on purpose"):
            checkpoint(function, x)
        del x
        assert given() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("check", ["default", "first", "values"])
def test_a_changed_weight_is_named_before_the_function_can_fail_on_it(check):
    weight = leaf(3)

    def function(x):
        if weight.isnan().any():
            raise ValueError("the function's own")
        return (x * weight).sin()

    y = checkpoint(function, leaf(3), determinism_check=check)
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="modified by an inplace operation"):
        y.sum().backward()


# --- Decisions ---


def test_decisions_inside_and_after_an_inner_region_are_told_apart():
    def inner(x):
        return x * pin(torch.amax)(x.detach())

    def outer(x):
        x = checkpoint(inner, x.sin()).exp()
        return (x * pin(torch.amax)(x.detach())).sin()

    x = leaf(3)
    expected = torch.autograd.grad(outer(x).sum(), x)
    assert_equal(torch.autograd.grad(checkpoint(outer, x).sum(), x), expected)


# --- What is compared ---

scale = 2.0


def test_what_a_policy_computes_is_not_taken_for_an_operator_of_the_function(monkeypatch):
    def policy(what, context):
        if not isinstance(what, str):
            return None
        return Save() if context.args[0].detach().abs().amax() > 0 else None

    def function(x):
        return (region("cosine", torch.cos)(x.sin()) * scale).exp()

    y = checkpoint(lambda x: checkpoint(function, x, policy=policy), leaf(3))
    monkeypatch.setitem(globals(), "scale", 3.0)
    with pytest.raises(CheckpointError, match=r"first operator whose result differs: aten\.mul"):
        y.sum().backward()


@pytest.mark.parametrize("size", [3, 1000])
def test_noise_is_compared_when_it_is_written(size):
    """Before that it is whatever was in its memory, which is another thing every time."""
    x = leaf(size)
    for value in range(8):
        fill_free_memory(size, value)
        y = checkpoint(lambda x: F.rrelu(x.sin(), 0.1, 0.9, True).exp(), x, determinism_check="values")
        fill_free_memory(size, value + 0.5)
        y.sum().backward()


def fill_free_memory(size, value):
    for _ in range(2):
        tensors = [torch.full((size,), float(value)) for _ in range(20)]
        del tensors


def test_what_a_policy_computes_is_not_the_functions():
    def policy(what, ctx):
        if isinstance(what, str):
            ctx.args[0].abs().sum().item()
            return recollect.Save() if what == "kept" else recollect.Recompute()
        return None

    turn = [2.0]

    def function(x):
        x = recollect.region("kept", torch.cos)(x)
        return recollect.region("part", lambda x: x.sin() * turn[0])(x).exp()

    x = torch.ones(3, requires_grad=True)
    y = recollect.checkpoint(function, x, policy=policy)
    turn[0] = 3.0
    with pytest.raises(recollect.CheckpointError) as info:
        y.sum().backward()
    assert info.value.operator == "aten.mul.Tensor"


def test_a_decision_in_a_kept_region_inside_a_plain_one():
    """What is kept in it belongs to the region around, whose replay does not make the decision again."""

    def middle(x):
        return region("kept", lambda x: pin(torch.sin)(x.sin()))(x)

    policy = recollect.by_name({"kept": Save()})
    x = leaf(4)
    for _ in range(3):
        y = checkpoint(lambda x: checkpoint(middle, x, policy=policy), x).sin().sum()
        assert_equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(x.sin().sin().sin().sum(), x)[0])


def test_a_policy_around_does_not_see_what_happens_once():
    def inner(x):
        return x * pin(torch.rand)(4)

    def middle(x):
        return checkpoint(inner, x.sin())

    policy = recollect.save_ops(torch.ops.aten.rand, torch.ops.aten.sin)
    x = leaf(4)
    for function in (middle, lambda x: checkpoint(middle, x)):
        torch.manual_seed(0)
        (grad,) = torch.autograd.grad(checkpoint(function, x, policy=policy).sin().sum(), x)
        torch.manual_seed(0)
        noise = torch.rand(4)
        assert_equal(grad, torch.autograd.grad((x.sin() * noise).sin().sum(), x)[0])


# --- The faults themselves ---


@pytest.mark.parametrize("fault", mutants.FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_fault_can_be_planted_where_the_code_is_now(fault):
    mutants.plant(fault, Path(recollect.__file__).parent.parent)
