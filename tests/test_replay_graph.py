"""The graph that a replay makes: what holds it, for how long, and what it is good for afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import recollect
from recollect.dropin import CheckpointError, checkpoint


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Payload:
    """Something that only a graph holds."""


class Stash(torch.autograd.Function):
    """Holds a payload as long as its node lives."""

    made: list[weakref.ref[Payload]]

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.payload = Payload()
        Stash.made.append(weakref.ref(ctx.payload))
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


def alive() -> int:
    return sum(one() is not None for one in Stash.made)


@pytest.fixture(autouse=True)
def no_payloads() -> None:
    Stash.made = []


def test_what_a_replay_leaves_behind_cannot_be_differentiated() -> None:
    left: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        left.append(y.sin())
        return y.cos()

    x = torch.ones(3, requires_grad=True)
    checkpoint(function, x, use_reentrant=False, early_stop=False).sum().backward()
    assert len(left) == 2
    with pytest.raises(CheckpointError, match=r"after the replay has ended.*recollect\.once") as caught:
        left[1].sum().backward()
    assert "function" in str(caught.value)


def test_a_backward_inside_finds_what_the_replay_saved() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        (inner,) = torch.autograd.grad(y.exp().sum(), y)
        return y * inner

    x, plain = (torch.linspace(0, 1, 5, requires_grad=True) for _ in range(2))
    checkpoint(function, x, use_reentrant=False).sum().backward()
    function(plain).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_the_graph_goes_with_what_was_recovered() -> None:
    """Node by node, as in a plain backward: nothing of the replay is left when the pass has ended."""
    seen: list[int] = []

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = Stash.apply(x.sin())
            if x.requires_grad and not recollect.is_recomputing():
                x.register_hook(lambda _: seen.append(alive()))
        return x.exp()

    x = torch.ones(3, requires_grad=True)
    y = checkpoint(function, x, use_reentrant=False)
    assert alive() == 3
    y.sum().backward(retain_graph=True)
    # Three of the forward until the end; of the replay those whose output's gradient is yet to come.
    assert seen == [5, 4, 3]
    assert alive() == 3
    del y
    assert alive() == 0


def test_inner_regions_of_a_replay_do_not_outlive_it() -> None:
    seen: list[int] = []

    def inner(x: Tensor) -> Tensor:
        return Stash.apply(x.sin()).cos()

    def outer(x: Tensor) -> Tensor:
        y = checkpoint(inner, x, use_reentrant=False).exp()
        y.register_hook(lambda _: seen.append(alive()))  # when y, which exp saved, is yet to be used
        return y.sin()

    x = torch.ones(3, requires_grad=True)
    y = checkpoint(outer, x, use_reentrant=False)
    assert alive() == 1
    y.sum().backward()
    assert seen == [1]
    del y
    assert alive() == 0


def test_a_pass_that_fails_leaves_nothing_recovered() -> None:
    made: list[weakref.ref[Tensor]] = []

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("in the middle of backward")

    def function(x: Tensor) -> Tensor:
        made.clear()
        for _ in range(4):
            x = x.sin()
            if recollect.is_recomputing():
                made.append(weakref.ref(x))
            elif x.requires_grad:
                x.register_hook(fail)
        return x.sin()

    y = checkpoint(function, torch.ones(3, requires_grad=True), use_reentrant=False)
    with pytest.raises(ValueError, match="in the middle") as caught:
        y.sum().backward()
    del caught
    assert [one() for one in made] == [None] * 4


def test_a_leaf_that_the_function_makes_is_no_stranger() -> None:
    def function(x: Tensor) -> Tensor:
        weight = torch.full((3,), 2.0, requires_grad=True)
        return (x.sin() * weight).exp()

    x, plain = (torch.linspace(0, 1, 3, requires_grad=True) for _ in range(2))
    for _ in range(2):
        checkpoint(function, x, use_reentrant=False).sum().backward()
        function(plain).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_what_nobody_asks_for_goes_with_the_replay() -> None:
    """Slots that an earlier pass has freed: their tensors are there for a backward inside, and then no longer."""
    made: list[weakref.ref[Tensor]] = []
    seen: list[int] = []

    def function(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        first, noise = x.sin(), mask * 2
        made[:] = [weakref.ref(noise), weakref.ref(first)]
        early = first * noise
        (slope,) = torch.autograd.grad(early.sum(), first, retain_graph=True)
        return early, (early * slope).exp().sin()

    x, plain, mask = (torch.linspace(0, 1, 5, requires_grad=one) for one in (True, True, False))
    early, late = checkpoint(function, x, mask, use_reentrant=False)
    early.sum().backward()
    late.register_hook(lambda _: seen.append(len(made)))
    early.register_hook(lambda _: seen.append(sum(one() is not None for one in made)))
    (gradient,) = torch.autograd.grad(late.sum(), early)
    assert seen == [2, 0]
    early, late = function(plain, mask)
    assert torch.equal(gradient, torch.autograd.grad(late.sum(), early, retain_graph=True)[0])
    early.sum().backward()
    assert torch.equal(x.grad, plain.grad)
