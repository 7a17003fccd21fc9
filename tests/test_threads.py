"""Python threads: one model used by two at once, and one graph walked by two at once.

The programs draw no random numbers: the CPU generator belongs to the process.
"""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from recollect import checkpoint
from tools import assert_equal, leaf

ROUNDS = 200


@pytest.fixture(autouse=True)
def _switch_threads_often():
    """As often as Python lets them, so that a race has a chance to show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(*works):
    """Run all of them at once and give their results; the first exception of any is raised."""
    results, errors = [None] * len(works), []
    start = threading.Barrier(len(works))

    def run(place, work):
        try:
            start.wait(timeout=60)
            results[place] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    if errors:
        raise errors[0]
    return results


class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.depth = depth
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = self._region(layer, x, self.depth)
        return x

    def _region(self, layer, x, depth):
        def function(x):
            x = layer(x).tanh()
            return self._region(layer, x, depth - 1).exp() if depth > 1 else x

        return checkpoint(function, x) if depth else function(x)


def grads_of(model, x):
    return torch.autograd.grad(model(x).sum(), [x, *model.parameters()])


def plain_model(model):
    class Plain(Model):
        def _region(self, layer, x, depth):
            x = layer(x).tanh()
            return self._region(layer, x, depth - 1).exp() if depth > 1 else x

    plain = Plain(model.depth)
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("depth", [1, 3])
def test_two_threads_through_one_model(depth):
    torch.manual_seed(0)
    model = Model(depth)
    plain = plain_model(model)
    inputs = [leaf(2, 4, seed=seed) for seed in range(2)]
    expected = [grads_of(plain, x) for x in inputs]

    def work(place):
        def run():
            for _ in range(ROUNDS):
                assert_equal(grads_of(model, inputs[place]), expected[place])
            return "done"

        return run

    assert in_threads(work(0), work(1)) == ["done", "done"]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_two_threads_over_one_graph(depth, early_stop):
    x = leaf(4)

    def level(k):
        def function(x):
            x = x.sin().exp()
            return checkpoint(level(k - 1), x, early_stop=early_stop).cos() if k > 1 else x

        return function

    def plain(x, k):
        x = x.sin().exp()
        return plain(x, k - 1).cos() if k > 1 else x

    (expected,) = torch.autograd.grad(plain(x, depth).sum(), x)
    loss = checkpoint(level(depth), x, early_stop=early_stop).sum()

    def run():
        for _ in range(ROUNDS):
            assert_equal(torch.autograd.grad(loss, x, retain_graph=True)[0], expected)
        return "done"

    assert in_threads(run, run) == ["done", "done"]


def test_two_threads_over_one_graph_replay_once_each():
    calls, x = [], leaf(4)

    def function(x):
        calls.append(threading.get_ident())
        return x.sin().exp().sin()

    loss = checkpoint(function, x).sum()
    calls.clear()

    def run():
        torch.autograd.grad(loss, x, retain_graph=True)
        return threading.get_ident()

    for _ in range(20):
        identities = in_threads(run, run)
        assert sorted(calls) == sorted(identities)
        calls.clear()


def test_two_threads_over_disjoint_parts_of_one_region():
    a, b = leaf(4), leaf(4, seed=1)

    def function(a, b):
        return a.sin().exp(), b.exp().sin()

    expected = [torch.autograd.grad(part.sum(), leaf_)[0] for part, leaf_ in zip(function(a, b), (a, b), strict=True)]
    for _ in range(ROUNDS // 4):
        x, y = checkpoint(function, a, b)
        results = in_threads(
            lambda x=x: torch.autograd.grad(x.sum(), a)[0], lambda y=y: torch.autograd.grad(y.sum(), b)[0]
        )
        assert_equal(results, expected)


def test_two_threads_that_accumulate_into_one_leaf():
    x = leaf(4)
    ones = torch.ones(4, requires_grad=True)
    losses = [checkpoint(lambda x: (x * 2).exp().log().round() * ones, x).sum() for _ in range(2)]
    expected = 2 * torch.autograd.grad(losses[0], ones, retain_graph=True)[0]
    in_threads(losses[0].backward, losses[1].backward)
    assert torch.equal(ones.grad, expected)


def test_threads_that_read_saved_tensors_outside_of_any_backward():
    x = leaf(4)
    y = checkpoint(lambda x: x.sin().exp(), x)
    expected = x.sin().exp().detach()

    def run():
        return all(torch.equal(y.grad_fn._saved_result, expected) for _ in range(ROUNDS))

    assert in_threads(run, run) == [True, True]


def test_a_forward_in_one_thread_and_its_backward_in_another():
    x = leaf(4)
    (loss,) = in_threads(lambda: checkpoint(lambda x: checkpoint(torch.exp, x.sin()).cos(), x).sum())
    (grad,) = in_threads(lambda: torch.autograd.grad(loss, x)[0])
    assert torch.equal(grad, torch.autograd.grad(x.sin().exp().cos().sum(), x)[0])


GARBAGE_COLLECTIONS_THAT_SWITCH_THREADS = """
import gc, threading, time, torch, recollect

gc.callbacks.append(lambda *_: time.sleep(0))  # what any finalizer may do: let another thread run
gc.set_threshold(1, 1, 1)

def work():
    x = torch.ones(2, requires_grad=True)
    for _ in range(300):
        recollect.checkpoint(lambda x: x.sin().exp(), x).sum().backward()

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_a_garbage_collection_within_the_generator_s_lock_is_no_deadlock():
    # In a process of its own: threads that hold the interpreter and wait cannot be stopped from within.
    subprocess.run([sys.executable, "-c", GARBAGE_COLLECTIONS_THAT_SWITCH_THREADS], check=True, timeout=120)
