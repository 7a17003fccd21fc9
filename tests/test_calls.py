"""Decisions for some of the calls of an operator in a region: this product, and not that one."""

import pickle

import pytest
import torch

import recollect
from recollect import Offload, Save, checkpoint, offload_ops, save_ops
from tools import CountOperators, leaf

aten = torch.ops.aten


def products(x, *weights):
    for weight in weights:
        x = (x @ weight).sin()
    return x


def replayed(policy, *, passes=1, function=products, early_stop=False):
    """How many products each backward runs besides its own, and the gradients, which must be plain autograd's."""
    leaves = [leaf(4, 4, seed=number) for number in range(5)]
    plain = torch.autograd.grad(function(*leaves).sum(), leaves)
    y = checkpoint(function, *leaves, policy=policy, early_stop=early_stop, determinism_check="default")
    counts = []
    for number in range(passes):
        with CountOperators() as counted:
            got = torch.autograd.grad(y.sum(), leaves, retain_graph=number < passes - 1)
        counts.append(counted.counts["mm"] - 8)
        assert all(map(torch.equal, got, plain))
    return counts


@pytest.mark.parametrize(("calls", "again"), [([0], 3), ([0, 2], 2), ((3,), 3), (range(4), 0), (iter([1, 2]), 2)])
def test_only_some_calls_are_kept(calls, again):
    calls = list(calls)
    assert replayed(save_ops(aten.mm, calls=calls)) == [again]
    assert replayed(offload_ops(aten.mm, calls=calls), passes=2) == [again, again]


def test_a_call_that_does_not_come_is_said():
    with pytest.warns(UserWarning, match=r"the policy recollect.save_ops\(aten.mm, calls=\[7\]\) matched nothing"):
        assert replayed(save_ops(aten.mm, calls=[7])) == [4]


def test_other_policies_decide_the_other_calls():
    first, second = save_ops(aten.mm, calls=[0]), save_ops(aten.mm, calls=[2])
    assert replayed(first | second) == [2]
    assert replayed(second | first | save_ops(aten.mm)) == [0]
    assert replayed(save_ops(aten.mm, aten.sin) | first) == [0]
    assert replayed(first | (lambda op, ctx: Save() if ctx.call == 1 else None)) == [2]


def test_a_function_is_told_the_number_of_the_call():
    seen = []

    def policy(op, ctx):
        if op is aten.mm.default:
            seen.append(ctx.call)
            return Save() if ctx.call in (1, 3) else None
        return None

    assert replayed(policy) == [2]
    assert seen == [0, 1, 2, 3]


def test_calls_count_from_the_beginning_of_each_region():
    def nested(x, *weights):
        x = checkpoint(products, x, *weights[:2], policy=save_ops(aten.mm, calls=[1]))
        return checkpoint(products, x, *weights[2:], policy=save_ops(aten.mm, calls=[1]))

    leaves = [leaf(4, 4, seed=number) for number in range(5)]
    plain = torch.autograd.grad(products(*leaves).sum(), leaves)
    for function in (nested, lambda *args: checkpoint(nested, *args)):
        for _ in range(2):
            assert all(map(torch.equal, torch.autograd.grad(function(*leaves).sum(), leaves), plain))


def test_compiled_regions_keep_the_same_calls():
    leaves = [leaf(4, 4, seed=number) for number in range(5)]
    policy = save_ops(aten.mm, calls=[0, 1, 2])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*args):
        return checkpoint(products, *args, policy=policy)

    y = compiled(*leaves)
    with CountOperators() as counted:
        got = torch.autograd.grad(y.sum(), leaves)
    assert counted.counts["mm"] == 8 + 1
    assert all(map(torch.equal, got, torch.autograd.grad(products(*leaves).sum(), leaves)))
    torch.compiler.reset()


def test_a_policy_of_calls_is_shown_and_pickled():
    policy = save_ops(aten.mm, calls=[0, 2])
    assert repr(policy) == "recollect.save_ops(aten.mm, calls=[0, 2])"
    again = pickle.loads(pickle.dumps(policy))
    assert repr(again) == repr(policy)
    assert replayed(again) == [2]


@pytest.mark.parametrize("calls", [3, "01", [], [-1], [1.0], [True], [None]])
def test_calls_are_numbers(calls):
    with pytest.raises(TypeError, match=r"calls must be numbers of calls, such as \[0, 2\]"):
        save_ops(aten.mm, calls=calls)


def test_offloaded_calls_are_kept():
    policy = offload_ops(aten.mm, calls=[0]) | save_ops(aten.mm, calls=[1])
    decided = policy.table[aten.mm.default]
    assert isinstance(decided.at(0), Offload)
    assert isinstance(decided.at(1), Save)
    assert decided.at(2) is None
    assert recollect.policy.ByCall({0: Save()}, Save()).before(Offload()).otherwise == Save()
