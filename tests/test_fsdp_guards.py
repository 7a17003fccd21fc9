"""Weights that change between a forward and its backward, under `fully_shard`: found, and nothing else is."""

import functools
import gc
import itertools
import re
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import recollect
from process_group import result, run_on_ranks
from recollect import _shards
from test_fsdp import applied, batch_of, equal, gradients, in_place, inside, made, rematted, several

CHECKS = ("default", "first", "values")
NESTINGS = (applied, in_place, inside, rematted, several)
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=2**-3),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw, fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
}


def loss_of(model, rank, step=0):
    return model(batch_of(rank, step)).square().mean()


def outcome(do):
    """What comes of it: an error of ours, in its first words, or nothing."""
    try:
        do()
    except recollect.CheckpointError as error:
        return str(error.cause)
    return None


def trained_once(model, rank):
    """A model that has gradients, and whose replays were compared."""
    loss_of(model, rank).backward()
    return model


# --- What must be found ---


def a_step(rank):
    """An optimizer's step, in the first replay of a function and in a later one."""
    found = {}
    for nesting, check, which in itertools.product(NESTINGS, CHECKS, OPTIMIZERS):
        if which != "sgd" and nesting is not applied:
            continue
        for first in (True, False):
            model = made(after=functools.partial(nesting, check=check))
            if first:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            else:
                trained_once(model, rank)
            optimizer = OPTIMIZERS[which](model.parameters())
            loss = loss_of(model, rank, 1)
            optimizer.step()
            found[f"{nesting.__name__} {check} {which} {'first' if first else 'later'}"] = outcome(loss.backward)
    return found


def a_step_on_what_is_read(rank):
    """A step on biases alone: functions read them, and save nothing of them."""
    found = {}

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))

    for nesting, check in itertools.product(NESTINGS, CHECKS[:2]):
        model = trained_once(made(before=freeze, after=functools.partial(nesting, check=check)), rank)
        optimizer = OPTIMIZERS["sgd"]([one for one in model.parameters() if one.requires_grad])
        loss = loss_of(model, rank, 1)
        optimizer.step()
        found[f"{nesting.__name__} {check}"] = outcome(loss.backward)
    return found


def by_hand(rank):
    """A change in place of one layer's shard, a state that is loaded, shards that are put in the place of others."""

    def change(model):
        with torch.no_grad():
            model.layers[1].inner[0].weight.mul_(2)

    def load(model):
        model.load_state_dict(made().state_dict())

    def replace(model):
        model.load_state_dict(made().state_dict(), assign=True)

    found = {}
    for nesting, check, do in itertools.product(NESTINGS, CHECKS[:2], (change, load, replace)):
        model = trained_once(made(after=functools.partial(nesting, check=check)), rank)
        loss = loss_of(model, rank, 1)
        do(model)
        found[f"{nesting.__name__} {check} {do.__name__}"] = outcome(loss.backward)
    return found


def between_two_backwards(rank):
    """What is held between forward and backward is let go of after the first backward."""
    found = {}
    for nesting, after_forward in itertools.product(NESTINGS, (True, False)):
        model = made(after=nesting, reshard_after_forward=after_forward)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        loss = loss_of(model, rank)
        loss.backward(retain_graph=True)
        optimizer.step()
        found[f"{nesting.__name__} {after_forward}"] = outcome(loss.backward)
    return found


def another_replay(rank):
    """A function that does something else in its replay is found as it is without ranks, in the first step."""
    found = {}
    for nesting in (applied, in_place, inside):
        model = made(after=nesting)
        model.layers[1].inner[1].forward = lambda x: nn.functional.gelu(x) * (1 + recollect.is_recomputing())
        found[nesting.__name__] = outcome(loss_of(model, rank).backward) is not None
    return found


# --- What must not be found ---


def without_alarm(rank):
    """Everything between a forward and its backward that leaves the weights of the regions as they are."""

    def other_model(model):
        other = fully_shard(nn.Linear(8, 8))
        other(batch_of(rank, 5)).sum().backward()
        OPTIMIZERS["sgd"](other.parameters()).step()

    def other_parameters(model):
        OPTIMIZERS["sgd"]([*model.first.parameters(), *model.last.parameters()]).step()

    def reshard(model):
        for module in (model, *model.layers):
            module.unshard()
            module.reshard()

    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def forget(model):
        model.zero_grad()

    def validate(model):
        with torch.no_grad():
            model.eval()(batch_of(rank, 7))
        model.train()

    def save(model):
        model.state_dict()

    found = {}
    changes = (other_model, other_parameters, reshard, clip, forget, validate, save)
    for do in changes:
        expected = None
        for nesting, check in [(None, None), *itertools.product(NESTINGS, CHECKS[:2])]:
            model = made(after=None if nesting is None else functools.partial(nesting, check=check))
            trained_once(model, rank)
            loss = loss_of(model, rank, 1)
            do(model)
            loss.backward()
            expected = expected or gradients(model)
            found[f"{do.__name__} {nesting and nesting.__name__} {check}"] = equal(gradients(model), expected)
    return found


def a_step_on_what_is_held(rank):
    """Where gathered weights are held until backward, a step in between does not reach them: gradients are right."""
    found = {}
    for which in OPTIMIZERS:
        expected = None
        for nesting, check in [(None, None), *itertools.product(NESTINGS, CHECKS)]:
            change = None if nesting is None else functools.partial(nesting, check=check)
            model = trained_once(made(after=change, reshard_after_forward=False), rank)
            optimizer = OPTIMIZERS[which](model.parameters())
            loss = loss_of(model, rank, 1)
            optimizer.step()
            optimizer.zero_grad()
            loss.backward()
            expected = expected or gradients(model)
            found[f"{which} {nesting and nesting.__name__} {check}"] = equal(gradients(model), expected)
    return found


def steps_within_backward(rank):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    found = {}
    expected = None
    for nesting in (None, *NESTINGS[:4]):
        model = made(after=nesting)
        for parameter in model.parameters():
            optimizer = OPTIMIZERS["sgd"]([parameter])
            parameter.register_post_accumulate_grad_hook(functools.partial(step_at_once, optimizer))
        for step in range(3):
            loss_of(model, rank, step).backward()
        weights = [one.full_tensor().detach().clone() for one in model.parameters()]
        expected = expected or weights
        found[f"{nesting and nesting.__name__}"] = equal(weights, expected)
    before = [one.full_tensor() for one in made().parameters()]
    found["stepped"] = not any(map(torch.equal, expected, before))
    return found


def step_at_once(optimizer, _):
    optimizer.step()
    optimizer.zero_grad()


def nothing_stays(rank):
    """Guards hold neither a model nor its shards."""
    model = trained_once(made(after=applied), rank)
    OPTIMIZERS["sgd"](model.parameters()).step()
    references = [weakref.ref(one) for one in (model, *model.parameters())]
    there = len(_shards._gathered)
    del model
    gc.collect()
    return there > 0, [one() for one in references].count(None) == len(references), len(_shards._gathered)


SCENARIOS = {
    one.__name__: one
    for one in (
        *(nothing_stays, a_step, a_step_on_what_is_read, by_hand, between_two_backwards, another_replay),
        *(without_alarm, a_step_on_what_is_held, steps_within_backward),
    )
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(__name__, tmp_path_factory.mktemp("guards"))


@pytest.mark.parametrize("name", ["a_step", "a_step_on_what_is_read", "between_two_backwards"])
def test_a_step_before_backward_is_an_error(ranks, name):
    found = result(ranks, name)
    assert [one for one, cause in found.items() if cause is None] == []
    for cause in found.values():
        assert cause.endswith(
            ("was changed in place since the forward", "was stepped by an optimizer since the forward")
        )
        assert re.match(r"the parameter '.*inner\.[03]\.(weight|bias)' of ", cause)


def test_a_change_by_hand_is_an_error(ranks):
    found = result(ranks, "by_hand")
    assert [one for one, cause in found.items() if cause is None] == []
    assert len(found) == len(NESTINGS) * 2 * 3
    for one, cause in found.items():
        if one.endswith("change"):
            assert "inner.0.weight" in cause, one


def test_a_different_replay_is_an_error(ranks):
    assert set(result(ranks, "another_replay").values()) == {True}


@pytest.mark.parametrize("name", ["without_alarm", "a_step_on_what_is_held", "steps_within_backward"])
def test_there_is_no_alarm(ranks, name):
    found = result(ranks, name)
    assert len(found) > 4
    assert [one for one, held in found.items() if not held] == []


def test_nothing_is_kept_alive(ranks):
    assert result(ranks, "nothing_stays") == (True, True, 0)
