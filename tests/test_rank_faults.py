"""An error in a distributed job says on which rank and in which region, and what other ranks had said before.

In a process group of one rank. tests/test_killed_ranks.py has pairs of them.
"""

import contextlib
import json
import logging
import os
import sys
import time
import weakref
from functools import partial

import pytest
import torch
from torch import distributed, nn

import recollect
from recollect import _faults, checkpoint, dropin
from recollect._torch import at_end_of_pass
from tools import in_backward, leaf

KEY = "recollect/fault"
HERE = os.path.basename(__file__)


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


class Fails(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


def raises_in_replay(x, error):
    y = x.sin()
    if in_backward():
        raise error
    return y.exp()


def fine(x):
    return x.sin().exp()


# --- One rank alone ---


class Counting:
    """A store that notes what it was asked."""

    def __init__(self, store):
        self.asked = []
        self._store = store

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self._store, name)


@pytest.fixture
def store(monkeypatch):
    """A process group of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    store = Counting(_faults.default_store())
    monkeypatch.setattr(_faults, "default_store", lambda: store)
    monkeypatch.setattr(_faults, "_words", _faults._Words())
    yield store
    distributed.destroy_process_group()
    assert not _faults._passes


def word(store):
    return json.loads(store.get(KEY)) if store.check([KEY]) else None


def leave_word(store, **other):
    full = {"rank": 3, "at": 0.0, "where": "in a replay of the checkpointed region Other", "error": "KeyError: 1"}
    store.set(KEY, json.dumps(full | other))


SAID = "rank 3 had failed before, at 00:00:00 UTC, in a replay of the checkpointed region Other: KeyError: 1"


def error_of(function, *args):
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - what it is, is asked afterwards
        function(*args)
    return caught.value


def backward_of(function, *args):
    checkpoint(function, leaf(3), *args).sum().backward()


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_in_a_replay_says_rank_and_region_and_leaves_word(store, kind):
    given = kind("boom\nand more")
    error = error_of(backward_of, raises_in_replay, given)
    assert error is given
    assert error.args == ("boom\nand more",)
    assert error.__cause__ is None
    assert f"on rank 0 of 1, in a replay of the checkpointed region raises_in_replay ({__file__}:" in notes_of(error)
    left = word(store)
    assert left["rank"] == 0
    assert "in a replay of the checkpointed region raises_in_replay" in left["where"]
    assert left["error"] == f"{kind.__name__}: boom"
    assert abs(time.time() - left["at"]) < 60


def test_the_name_of_a_region_is_in_it(store):
    region = recollect.remat(raises_in_replay, name="third layer")
    error = error_of(region(leaf(3), ValueError()).sum().backward)
    assert "region 'third layer', raises_in_replay" in notes_of(error)


def test_nothing_is_noted_where_there_is_no_process_group():
    assert notes_of(error_of(backward_of, raises_in_replay, ValueError("boom"))) == ""


def test_nothing_is_asked_while_all_is_well(store):
    for _ in range(2):
        backward_of(fine)
        backward_of(lambda x: checkpoint(fine, x).cos())
        dropin.checkpoint(fine, leaf(3), use_reentrant=True).sum().backward()
    assert store.asked == []


@pytest.mark.parametrize("kind", [RuntimeError, distributed.DistBackendError])
def test_one_that_may_follow_from_anothers_carries_it_and_leaves_no_word(store, kind):
    leave_word(store)
    error = error_of(backward_of, raises_in_replay, kind("connection closed"))
    assert SAID in notes_of(error)
    assert "on rank 0 of 1" in notes_of(error)
    assert word(store)["rank"] == 3


def test_one_of_its_own_carries_it_and_leaves_word_too(store):
    leave_word(store)
    assert SAID in notes_of(error_of(backward_of, raises_in_replay, ValueError("mine")))
    assert word(store)["error"] == "ValueError: mine"


def test_a_word_is_told_once(store):
    leave_word(store)
    assert SAID in notes_of(error_of(backward_of, raises_in_replay, RuntimeError("first")))
    assert SAID not in notes_of(error_of(backward_of, raises_in_replay, RuntimeError("second")))
    assert word(store)["error"] == "RuntimeError: second"
    assert "failed before" not in notes_of(error_of(backward_of, raises_in_replay, RuntimeError("third")))
    leave_word(store, rank=2)
    assert "rank 2 had failed before" in notes_of(error_of(backward_of, raises_in_replay, RuntimeError("fourth")))


@pytest.mark.parametrize(
    "value", ["", "nonsense", "[]", '{"rank": 1}', '{"rank": 1, "at": "x", "where": 1, "error": 2}']
)
def test_a_word_that_is_not_one_does_no_harm(store, value):
    store.set(KEY, value)
    assert notes_of(error_of(backward_of, raises_in_replay, ValueError())).count("recollect: ") == 1


def test_a_store_that_does_not_answer_is_not_waited_for(store, monkeypatch):
    class Silent:
        def check(self, keys):
            time.sleep(30)

    monkeypatch.setattr(_faults, "default_store", Silent)
    monkeypatch.setattr(_faults, "_PATIENCE", 0.1)
    begun = time.monotonic()
    assert "on rank 0" in notes_of(error_of(backward_of, raises_in_replay, ValueError()))
    assert time.monotonic() - begun < 10


def test_a_store_that_is_gone(store, monkeypatch):
    def gone():
        raise distributed.DistNetworkError("broken pipe")

    monkeypatch.setattr(_faults, "default_store", gone)
    assert "on rank 0" in notes_of(error_of(backward_of, raises_in_replay, ValueError()))


class StubbornError(Exception):
    def add_note(self, note):
        raise TypeError("no notes here")


def test_an_error_that_takes_no_notes_arrives_all_the_same(store):
    given = StubbornError("mine")
    assert error_of(backward_of, raises_in_replay, given) is given
    assert word(store)["error"] == "StubbornError: mine"


def test_a_replay_that_differs_is_noted(store):
    def function(x):
        return x + 1 if in_backward() else x.sin().exp()

    error = error_of(backward_of, function)
    assert type(error) is recollect.CheckpointError
    assert "in a replay of the checkpointed region" in notes_of(error)
    assert word(store)["error"].startswith("CheckpointError: A different number of tensors was saved")


def test_an_input_that_was_changed_is_noted(store):
    x = leaf(3).exp()
    y = checkpoint(fine, x)
    x.mul_(2)
    assert "in a replay of the checkpointed region fine" in notes_of(error_of(y.sum().backward))


@pytest.mark.parametrize(("run", "name"), [(2, "outer"), (3, "inner")])
def test_of_nested_regions_the_one_that_was_being_replayed_is_named(store, run, name):
    """The inner function runs in the forward, in the replay of the outer one, and in its own."""
    calls = []

    def inner(x):
        calls.append(1)
        y = x.sin().exp()
        if len(calls) == run:
            raise ValueError(run)
        return y.cos()

    def outer(x):
        return checkpoint(inner, x.sin()).sin()

    error = error_of(backward_of, outer)
    assert error.args == (run,)
    assert notes_of(error).count("recollect: ") == 1
    assert f"<locals>.{name} (" in notes_of(error)


def test_the_reentrant_variant(store):
    def backward(*args):
        dropin.checkpoint(*args, use_reentrant=True).sum().backward()

    notes = notes_of(error_of(backward, raises_in_replay, leaf(3), ValueError()))
    assert "in the backward of the checkpointed region raises_in_replay" in notes
    notes = notes_of(error_of(backward, Fails.apply, leaf(3), ValueError()))  # not in its function
    assert "in the backward of the checkpointed region" in notes


# --- Errors that pass no replay ---


def fails_in_backward(x, error):
    """The first operator of the region, so that the region is over and gone when it fails."""
    return Fails.apply(x, error).sin().exp()


@contextlib.contextmanager
def nothing_traces():
    assert sys.gettrace() is None
    yield
    assert sys.gettrace() is None


LAST = "in a backward that had replayed the checkpointed region"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_elsewhere_in_backward_names_the_region_that_was_replayed_last(store, kind):
    given = kind("boom")
    with nothing_traces():
        error = error_of(backward_of, fails_in_backward, given)
    assert error is given
    assert f"on rank 0 of 1, {LAST} fails_in_backward ({__file__}" in notes_of(error)
    assert word(store)["error"] == f"{kind.__name__}: boom"


def test_an_error_that_is_not_pythons(store):
    def function(x):
        return (x * torch.ones(3)).requires_grad_().exp()

    x = leaf(3)
    y = checkpoint(function, x)
    loss = y.sum()
    loss.register_hook(lambda grad: grad)
    with nothing_traces():
        x.register_hook(lambda grad: grad.new_ones(7))  # autograd's own refusal
        error = error_of(loss.backward)
    assert type(error) is RuntimeError
    assert f"{LAST} " in notes_of(error)


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_what_fails_at_the_end_of_the_pass(store, way):
    """As DDP's wait for its buckets does."""

    def at_the_end(grad):
        def wait():
            raise RuntimeError("connection closed")

        at_end_of_pass(wait)

    leave_word(store)
    x = leaf(3)
    x.register_hook(at_the_end)
    y = checkpoint(fine, x).sum()
    with nothing_traces():
        error = error_of(y.backward if way == "backward" else partial(torch.autograd.grad, y, x))
    assert f"{LAST} fine" in notes_of(error)
    assert SAID in notes_of(error)


def test_a_backward_inside_of_a_backward(store):
    def hook(grad):
        with torch.enable_grad():
            backward_of(fails_in_backward, ValueError("inside"))

    x = leaf(3)
    x.register_hook(hook)
    with nothing_traces():
        error = error_of(checkpoint(fine, x).sum().backward)
    assert notes_of(error).count("recollect: ") == 1
    assert f"{LAST} fails_in_backward" in notes_of(error)


def test_before_any_replay_nothing_is_noted(store):
    y = Fails.apply(checkpoint(fine, leaf(3)), ValueError())
    assert notes_of(error_of(y.sum().backward)) == ""


@pytest.mark.parametrize("function", [fails_in_backward, partial(fails_in_backward), "lambda", "module", "method"])
def test_every_kind_of_function_has_a_name(store, function):
    class Block(nn.Module):
        def forward(self, x, error):
            return fails_in_backward(x, error)

    block, names = Block(), ("Block",)
    if function == "lambda":
        captured = torch.ones(3)
        function, names = (lambda x, error: fails_in_backward(x, error) * captured), ("<lambda>",)
    elif function == "module":
        function = block
    elif function == "method":
        function = block.forward
    else:
        names = ("fails_in_backward",)
    notes = notes_of(error_of(backward_of, function, ValueError()))
    assert any(name in notes for name in names)
    assert HERE in notes


def test_a_debugger_is_left_alone_and_the_log_says_it(store, caplog):
    def tracer(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        error = error_of(backward_of, fails_in_backward, ValueError())
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert notes_of(error) == ""
    ((name, level, said),) = caplog.record_tuples
    assert (name, level) == ("recollect", logging.ERROR)
    assert f"on rank 0 of 1, {LAST} fails_in_backward" in said


def test_under_a_debugger_nothing_is_raised_either(store, monkeypatch):
    """A backward whose process group was destroyed before it failed."""
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def destroyed(grad):
        distributed.destroy_process_group()
        raise ValueError

    x = leaf(3)
    x.register_hook(destroyed)
    y = checkpoint(fine, x).sum()
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        error_of(y.backward)
    finally:
        sys.settrace(before)
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert lost == []


def test_a_name_keeps_nothing_alive(store):
    def region(x, factor):
        return (x * factor).sin()

    def closure(factor):
        return lambda x: region(x, factor)

    def regions(y):
        kept = []
        for make in (closure, lambda factor: partial(region, factor=factor)):
            factor = torch.ones(3)
            kept.append(weakref.ref(factor))
            y = checkpoint(make(factor), y)
        return y, kept

    gone = []
    x = leaf(3).exp()
    x.register_hook(lambda grad: gone.extend(one() is None for one in kept))
    y, kept = regions(x)
    y.sum().backward()
    assert gone == [True, True]
