"""Weights under `fully_shard` that are changed by hand between a forward and its backward, frozen ones above all.

A function reads what was gathered, and a change is made to the shards.
"""

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import recollect
from process_group import result, run_on_ranks
from test_fsdp import MIXED, applied, equal, in_place, inside, made, parts, rematted, several
from test_fsdp_guards import loss_of, outcome, trained_once

NESTINGS = (applied, in_place, inside, parts, rematted, several)
WEIGHT, BIAS = "layers.1.inner.0.weight", "layers.1.inner.0.bias"


def freeze_all(model):
    model.requires_grad_(False)


def freeze_two(model):
    for name in (WEIGHT, BIAS):
        model.get_parameter(name).requires_grad_(False)


FROZEN = {"all": freeze_all, "two": freeze_two, "none": None}


def double(model, name):
    with torch.no_grad():
        model.get_parameter(name).mul_(2)


def found_after(change, rank, *, nesting=applied, frozen="two", check="first", trained=True, **options):
    """What is found in a backward before which something was changed."""
    model = made(before=FROZEN[frozen], after=functools.partial(nesting, check=check), **options)
    if trained:
        trained_once(model, rank)
    loss = loss_of(model, rank, 1)
    change(model)
    return outcome(loss.backward)


# --- What must be found ---


def in_a_later_step(rank):
    """Frozen ones alone in their unit and beside others; biases, which are read and never saved."""
    return {
        f"{nesting.__name__} {frozen} {name}": found_after(
            functools.partial(double, name=name), rank, nesting=nesting, frozen=frozen
        )
        for nesting, frozen, name in itertools.product(NESTINGS, FROZEN, (WEIGHT, BIAS))
    }


def in_the_first_step(rank):
    return {
        f"{nesting.__name__} {name}": found_after(
            functools.partial(double, name=name), rank, nesting=nesting, trained=False
        )
        for nesting, name in itertools.product(NESTINGS, (WEIGHT, BIAS))
    }


def in_other_ways(rank):
    """By a copy, by a state that is loaded, by shards that are put in the place of others; in low precision."""

    def copy(model):
        with torch.no_grad():
            model.get_parameter(WEIGHT).copy_(model.get_parameter(WEIGHT) * 3)

    def load(model):
        model.load_state_dict(made().state_dict())

    def replace(model):
        model.load_state_dict(made(before=FROZEN["two"]).state_dict(), assign=True)

    found = {
        f"{nesting.__name__} {change.__name__}": found_after(change, rank, nesting=nesting)
        for nesting, change in itertools.product((applied, inside), (copy, load, replace))
    }
    change = functools.partial(double, name=WEIGHT)
    for nesting, frozen in itertools.product((applied, inside), ("all", "two")):
        found[f"{nesting.__name__} {frozen} mixed"] = found_after(
            change, rank, nesting=nesting, frozen=frozen, mp_policy=MIXED
        )
        # Gathered weights that are held are those that the module has: they themselves are changed.
        found[f"{nesting.__name__} {frozen} held"] = found_after(
            change, rank, nesting=nesting, frozen=frozen, reshard_after_forward=False
        )
    return found


def between_two_backwards(rank):
    """What is held between forward and backward is let go of after the first backward."""
    found = {}
    for nesting, frozen, name in itertools.product((applied, inside), ("two", "none"), (WEIGHT, BIAS)):
        model = made(before=FROZEN[frozen], after=nesting, reshard_after_forward=False)
        trained_once(model, rank)
        loss = loss_of(model, rank, 1)
        loss.backward(retain_graph=True)
        double(model, name)
        found[f"{nesting.__name__} {frozen} {name}"] = outcome(loss.backward)
    return found


def another_operator(rank):
    """Of what a replay does differently, the error says the operator: what is done to gather weights is not it."""
    found = {}
    for nesting in (applied, inside, several):
        model = made(before=FROZEN["two"], after=nesting)
        model.layers[1].inner[1].forward = lambda x: x.cos() if recollect.is_recomputing() else x.sin()
        with pytest.raises(recollect.CheckpointError) as caught:
            loss_of(model, rank).backward()
        found[nesting.__name__] = caught.value.operator
    return found


# --- What must not be found ---


def without_alarm(rank):
    """Gradients as without regions, where what regions read is as it was."""

    def nothing(model, shards):
        pass

    def another_weight(model, shards):
        with torch.no_grad():
            shards["first.bias"].mul_(2)
            shards["last.bias"].mul_(2)

    def write_nothing(model, shards):
        model.state_dict()
        for layer in model.layers:
            layer.unshard()
            layer.reshard()

    def what_is_held(model, shards):
        """A change of shards does not reach what was gathered from them."""
        with torch.no_grad():
            shards[WEIGHT].mul_(2)
            shards[BIAS].mul_(2)

    found, expected = {}, []
    for change in (nothing, another_weight, write_nothing, what_is_held):
        options = {"reshard_after_forward": change is not what_is_held}
        for frozen, nesting in itertools.product(("two", "none"), (None, applied, inside, several)):
            model = made(before=FROZEN[frozen], after=nesting, **options)
            shards = dict(model.named_parameters())
            trained_once(model, rank)
            model.zero_grad()
            loss = loss_of(model, rank, 1)
            change(model, shards)
            loss.backward()
            grads = [one.grad.full_tensor().clone() for one in shards.values() if one.grad is not None]
            if nesting is None:
                expected = grads
            found[f"{change.__name__} {frozen} {nesting and nesting.__name__}"] = equal(grads, expected)
    return found


def nothing_stays(rank):
    """A graph holds neither the shards nor what is gathered from them."""
    model = trained_once(made(before=FROZEN["two"], after=applied), rank)
    references = [weakref.ref(one) for one in (model, *model.parameters())]
    loss_of(model, rank, 1).backward()
    del model
    gc.collect()
    return [one() for one in references].count(None) == len(references)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def block(self, x):
        return self.norm.forward(x).sin().exp()

    def forward(self, x):
        return recollect.checkpoint(self.block, x)


def a_registered_method(rank):
    """What FSDP puts around a method of torch's own is not taken for all that the method does."""
    model = Normed()
    fully_shard(model.norm)
    register_fsdp_forward_method(model.norm, "forward")
    fully_shard(model)
    for _ in range(2):
        model(torch.arange(32.0).view(4, 8).requires_grad_()).sum().backward()
    return model.norm.num_batches_tracked.item()


SCENARIOS = {
    one.__name__: one
    for one in (
        *(in_a_later_step, in_the_first_step, in_other_ways, between_two_backwards, another_operator),
        *(without_alarm, nothing_stays, a_registered_method),
    )
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(__name__, tmp_path_factory.mktemp("frozen"))


@pytest.mark.parametrize("name", ["in_a_later_step", "in_the_first_step", "between_two_backwards"])
def test_a_change_by_hand_is_an_error_that_names_the_weight(ranks, name):
    found = result(ranks, name)
    assert [one for one, cause in found.items() if cause is None] == []
    for one, cause in found.items():
        last = one.rpartition(".")[2]
        assert f"0.{last}' of " in cause, one
        assert cause.endswith(("was changed in place since the forward", "was changed since the forward")), one


def test_a_change_is_an_error_whichever_way_it_is_made(ranks):
    found = result(ranks, "in_other_ways")
    assert [one for one, cause in found.items() if cause is None] == []
    assert len(found) == 6 + 8


def test_errors_name_the_function_s_own_operators(ranks):
    assert result(ranks, "another_operator") == dict.fromkeys(("applied", "inside", "several"), "aten.cos.default")


def test_there_is_no_alarm(ranks):
    found = result(ranks, "without_alarm")
    assert len(found) == 4 * 2 * 4
    assert [one for one, held in found.items() if not held] == []


def test_nothing_is_kept_alive(ranks):
    assert result(ranks, "nothing_stays")


def test_statistics_in_a_registered_method_are_as_after_one_forward(ranks):
    assert result(ranks, "a_registered_method") == 2
