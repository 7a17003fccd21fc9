"""Exceptions at every operator of forward and backward, from hooks and from context managers.

After each, the ambient state is as before, the exception has arrived unchanged, and the next step is right.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from recollect import CheckpointError, checkpoint
from tools import CountOperators, ambient_state, assert_equal, in_backward, leaf

FAULTS = (ValueError, KeyboardInterrupt)
faults = pytest.mark.parametrize("fault", FAULTS)


class FailAt(TorchDispatchMode):
    """Raises instead of running the operator number `position`."""

    def __init__(self, position, fault):
        super().__init__()
        self._left = position
        self._fault = fault

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._left == 0:
            self._left -= 1
            raise self._fault("injected")
        self._left -= 1
        return func(*args, **(kwargs or {}))


class Step:
    """A training step on fixed weights: dropout, autocast, in-place operators, a module and two inner regions."""

    def __init__(self, region=checkpoint, **options):
        self.x, self.w = leaf(4, 4), leaf(4, 4, seed=1)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        self.leaves = [self.x, self.w, *self.module.parameters()]
        self._region = lambda function, *args: region(function, *args, **options)

    def _inner(self, h):
        return F.dropout(h.sin().exp(), 0.5)

    def _outer(self, x, w):
        with torch.autocast("cpu", torch.bfloat16):
            h = x @ w
        h = self._region(self._inner, h.float()).mul_(2)
        h = self._region(self.module, h)
        return F.dropout(h, 0.3).cos()

    def forward(self):
        return self._region(self._outer, self.x, self.w).sum()

    def grads(self, loss, **options):
        return torch.autograd.grad(loss, self.leaves, **options)

    def run(self):
        torch.manual_seed(5)
        return self.grads(self.forward())


def plain(function, *args, **options):
    return function(*args)


EXPECTED = Step(plain).run()


def count(function):
    with CountOperators() as operators:
        function()
    return len(operators.names)


def surroundings():
    return ambient_state() | {"random state": torch.get_rng_state().tolist()}


def assert_as_before(before, step):
    assert surroundings() == before
    assert_equal(step.run(), EXPECTED)


OPTIONS = {
    "default": {},
    "early_stop=False": {"early_stop": False},
    "debug": {"debug": True},
}


@faults
@pytest.mark.parametrize("options", OPTIONS)
def test_at_each_operator_of_the_forward(options, fault):
    step = Step(**OPTIONS[options])
    total = count(step.forward)
    assert total > 10
    for position in range(total):
        before = ambient_state()  # the random state may have moved: the function drew before it failed
        with FailAt(position, fault), pytest.raises(fault, match="injected"):
            step.forward()
        assert ambient_state() == before
    assert_equal(step.run(), EXPECTED)


@faults
@pytest.mark.parametrize("options", OPTIONS)
def test_at_each_operator_of_the_backward_and_its_replays(options, fault):
    step = Step(**OPTIONS[options])
    torch.manual_seed(5)
    loss = step.forward()
    torch.manual_seed(99)  # so that a replay has something to put back
    total = count(lambda: step.grads(loss, retain_graph=True))
    assert total > 30
    for position in range(total):
        before = surroundings()
        with FailAt(position, fault), pytest.raises(fault, match="injected"):
            step.grads(loss, retain_graph=True)
        assert surroundings() == before
        if position % 5 == 0:  # the same graph still gives the right gradients
            assert_equal(step.grads(loss, retain_graph=True), EXPECTED)
    assert_as_before(surroundings_after_a_draw(), step)


def surroundings_after_a_draw():
    torch.rand(1)
    return surroundings()


@pytest.mark.parametrize("wrong", ["autocast", "default device", "grad mode", "random state"])
def test_state_around_a_failing_replay_is_put_back(wrong):
    """The state at the backward differs from that of the forward, which the replay restores for a while."""
    calls = []

    def function(x):
        calls.append((torch.is_autocast_enabled("cpu"), torch.get_default_device().type, torch.rand(1).item()))
        if in_backward():
            raise ValueError("in the replay")
        return x.sin().exp()

    x = leaf(3)
    torch.manual_seed(1)
    y = checkpoint(function, x)
    contexts = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "default device": lambda: torch.device("meta"),
        "grad mode": torch.no_grad,
        "random state": torch.random.fork_rng,
    }
    with contexts[wrong]():
        before = surroundings()
        with pytest.raises(ValueError, match="in the replay"):
            torch.autograd.grad(y, x, torch.ones(3, device="cpu"))
        assert surroundings() == before
    assert calls[0] == calls[1]


@faults
def test_in_the_function_between_operators(fault):
    def function(x, where):
        y = x.sin()
        if in_backward() if where == "replay" else not in_backward():
            raise fault("mine")
        return y.exp()

    x = leaf(3)
    before = surroundings()
    with pytest.raises(fault, match="mine"):
        checkpoint(function, x, "forward")
    y = checkpoint(function, x, "replay")
    with pytest.raises(fault, match="mine") as caught:
        torch.autograd.grad(y.sum(), x)
    assert type(caught.value) is fault
    assert caught.value.__cause__ is None
    assert surroundings() == before


def test_a_graph_that_survives_a_failed_forward_can_be_used():
    kept = []

    def function(x):
        y = x.sin().exp()
        if not in_backward():
            kept.append(y)
            raise ValueError("after a part")
        return y.cos().tanh()

    for early_stop in (True, False):
        x = leaf(3)
        with pytest.raises(ValueError, match="after a part"):
            checkpoint(function, x, early_stop=early_stop)
        (grad,) = torch.autograd.grad(kept.pop().sum(), x)
        assert torch.equal(grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


@faults
@pytest.mark.parametrize("when", ["forward", "replay"])
@pytest.mark.parametrize("hook", ["forward pre-hook", "forward hook", "always_call hook", "tensor hook", "node hook"])
def test_from_a_users_hook(hook, when, fault):
    armed = [False]

    def fail(*_):
        if armed[0] and (in_backward() == (when == "replay")):
            raise fault("from a hook")

    step = Step()
    linear = step.module[0]
    if hook == "forward pre-hook":
        handle = linear.register_forward_pre_hook(fail)
    elif hook == "forward hook":
        handle = linear.register_forward_hook(fail)
    elif hook == "always_call hook":
        handle = linear.register_forward_hook(fail, always_call=True)
    else:
        handle = None
        if when == "forward":
            pytest.skip("such a hook runs in backward only")
    torch.manual_seed(5)
    armed[0] = True
    before = ambient_state()
    if when == "forward":
        with pytest.raises(fault, match="from a hook"):
            step.forward()
        assert ambient_state() == before
    else:
        loss = step.forward()
        if hook == "tensor hook":
            handle = step.w.register_hook(fail)
        elif hook == "node hook":
            handle = loss.grad_fn.next_functions[0][0].register_prehook(fail)
        before = surroundings()
        with pytest.raises(fault, match="from a hook"):
            step.grads(loss)
        assert surroundings() == before
    handle.remove()
    assert_equal(step.run(), EXPECTED)


@faults
@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("side", ["pack", "unpack"])
def test_from_a_saved_tensor_hook(side, place, fault):
    def fail(value):
        raise fault("from a saved-tensor hook")

    def keep(value):
        return value

    hooks = (fail, keep) if side == "pack" else (keep, fail)

    def function(x):
        y = x.sin().exp()
        if place == "inside":
            with saved_tensors_hooks(*hooks):
                y = y.sin()
        return y.cos()

    def forward(x):
        if place == "inside":
            return checkpoint(function, x)
        with saved_tensors_hooks(*hooks):
            return checkpoint(function, x)

    x = leaf(3)
    before = surroundings()
    if side == "pack":
        with pytest.raises(fault, match="from a saved-tensor hook"):
            forward(x)
    else:
        y = forward(x).sum()
        with pytest.raises(fault, match="from a saved-tensor hook"):
            torch.autograd.grad(y, x)
    assert surroundings() == before
    assert_equal(Step().run(), EXPECTED)


@faults
@pytest.mark.parametrize("when", ["forward", "replay"])
@pytest.mark.parametrize("moment", ["enter", "exit"])
def test_from_a_context_of_the_user(moment, when, fault):
    class Context:
        def __enter__(self):
            if moment == "enter":
                raise fault("from a context")

        def __exit__(self, *_):
            if moment == "exit":
                raise fault("from a context")

    class Quiet:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    def context_fn():
        return (Context(), Quiet()) if when == "forward" else (Quiet(), Context())

    x = leaf(3)
    before = surroundings()
    if when == "forward":
        with pytest.raises(fault, match="from a context"):
            checkpoint(lambda x: x.sin().exp(), x, context_fn=context_fn)
    else:
        # Without early stop: after a stop the replay is complete, whatever a context says then.
        y = checkpoint(lambda x: x.sin().exp(), x, context_fn=context_fn, early_stop=False)
        with pytest.raises(fault, match="from a context"):
            torch.autograd.grad(y.sum(), x)
    assert surroundings() == before
    assert_equal(Step().run(), EXPECTED)


@faults
def test_an_interrupt_while_the_stop_unwinds_is_not_lost(fault):
    """What a `finally` block raises after the stop: an interrupt must arrive, an error means nothing any more."""

    def function(x):
        try:
            return x.sin().exp().sin()
        finally:
            if in_backward():
                raise fault("in finally")

    x = leaf(3)
    before = surroundings()
    y = checkpoint(function, x).sum()
    if fault is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            torch.autograd.grad(y, x)
    else:
        (grad,) = torch.autograd.grad(y, x)
        assert torch.equal(grad, torch.autograd.grad(x.sin().exp().sin().sum(), x)[0])
    assert surroundings() == before


def test_after_a_mismatch_the_next_step_works():
    calls = []

    def function(x):
        calls.append(1)
        return x.sin().exp() if len(calls) % 2 else x + 1

    x = leaf(3)
    before = surroundings()
    for _ in range(2):
        y = checkpoint(function, x).sum()
        with pytest.raises(CheckpointError):
            torch.autograd.grad(y, x)
        assert surroundings() == before
    assert_equal(Step().run(), EXPECTED)
