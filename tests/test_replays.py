"""How long replays take, by a clock that goes on only where modules say so; and when that is what a way costs."""

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import recollect
from recollect import Recompute, Save, _alone
from recollect._decided import decided_of
from recollect._replays import replay_seconds
from recollect._stores import links

CPU = torch.device("cpu")


class Clock:
    device = CPU

    def __init__(self):
        self.time = 0

    def now(self, stream=None):
        return Moment(self.time)


class Moment:
    def __init__(self, time):
        self.time = time

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return 1000 * (later.time - self.time)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(links, "_links", {CPU: clock})
    return clock


class Taking(nn.Module):
    """Takes so many seconds, before anything is saved."""

    def __init__(self, clock, seconds, *parts):
        super().__init__()
        self.clock = [clock]
        self.seconds = seconds
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        self.clock[0].time += self.seconds
        for part in self.parts:
            x = part(x)
        return x.sin().exp()


def seconds_of(model, decisions, *names):
    x = torch.randn(3, requires_grad=True)
    with recollect.apply(model, decisions):
        return replay_seconds(CPU, map(model.get_submodule, names), lambda: model(x).sum().backward())


def test_what_is_run_again_counts_and_what_is_kept_does_not(clock):
    model = Taking(clock, 1, Taking(clock, 10), Taking(clock, 100))
    assert seconds_of(model, {"": Recompute()}, "") == 111
    assert clock.time == 222
    assert seconds_of(model, {"": Recompute(), "parts.1": Save()}, "") == 11
    assert seconds_of(model, {"parts.0": Recompute(), "parts.1": Recompute()}, "parts.0", "parts.1") == 110
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_replay_within_another_counts_once(clock):
    model = Taking(clock, 1, Taking(clock, 10))
    decisions = {"": Recompute(), "parts.0": Recompute(policy=recollect.save_ops(torch.ops.aten.exp))}
    before = clock.time
    found = seconds_of(model, decisions, "", "parts.0")
    assert found == clock.time - before - 11  # all but the forward


def test_without_replays_there_is_nothing_to_time(clock):
    model = Taking(clock, 1)
    assert replay_seconds(CPU, [], lambda: model(torch.randn(3))) == 0
    assert clock.time == 1  # it was run all the same


class Failing(nn.Module):
    """Catches what the call of its part raises, before hooks of ours have seen that it began."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        try:
            x = self.part(x)
        except RuntimeError:
            x = x.sin()
        return x.exp()


def test_a_call_that_fails_before_it_begins_takes_no_time(clock):
    model = Taking(clock, 1, Failing(Taking(clock, 10)))

    def fail(module, args):
        if module is model.parts[0].part:
            raise RuntimeError

    with nn.modules.module.register_module_forward_pre_hook(fail):
        assert seconds_of(model, {"": Recompute()}, "", "parts.0.part") == 1


def test_replays_that_are_not_seen_cannot_be_told(clock):
    model = Taking(clock, 1)
    model.compile(backend="eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert seconds_of(model, {"": Recompute()}, "") is None
    assert not [one for one in seen if "hook" in str(one.message)]
    assert clock.time > 0


def test_a_device_without_a_clock_cannot_tell(monkeypatch):
    monkeypatch.setattr(links, "_links", {})
    ran = []
    assert replay_seconds(torch.device("meta"), [nn.Linear(1, 1)], lambda: ran.append(1)) is None
    assert ran


@pytest.mark.parametrize(
    ("differences", "replayed", "expected"),
    [
        ([0.0, 0.1, 0.5], [0.4, 0.41, 0.4], 0.4),  # noise is 0.5
        ([-0.1, 0.0, 0.1], [0.4, 0.41, 0.4], 0.4),
        ([1.0, 1.1, 1.2], [0.4, 0.41, 0.4], 1.1),  # where it costs more than its replays
        ([0.0, 0.1, 0.5], [None, None, None], 0.1),
    ],
)
def test_a_way_adds_its_replays_unless_it_makes_another_difference(differences, replayed, expected):
    assert _alone._told_apart(differences, replayed, 0.5) == expected


@pytest.mark.parametrize(("noise", "expected"), [(30.0, 11), (0.0, 2.0)])
def test_a_block_is_priced_by_its_replays_where_its_runs_vary(clock, noise, expected):
    """By the wall it takes 100 seconds, every other time more by some noise, and 102 if it is recomputed."""
    model = Taking(clock, 1, Taking(clock, 10))
    x = torch.randn(3, requires_grad=True)

    class Wall:
        def seconds(self, work, times):
            if work is run.forward:
                return 30.0
            work()
            return 102.0 if decided_of(model) else 100.0 + noise * next(turns)

    turns = itertools.cycle([0.0, 1.0])
    run = SimpleNamespace(train=lambda: model(x).sum().backward(), forward=lambda: None)
    bench = SimpleNamespace(is_estimated=False, device=CPU, clock=Wall())
    ways = [_alone.Candidate("keep"), _alone.Candidate("recompute", {"": Recompute()})]
    _, _, added = _alone._times(bench, run, SimpleNamespace(module=model), ways, [0, 1], 3)
    assert added == {0: 0.0, 1: expected}
