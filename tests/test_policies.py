"""Operator policies: what is kept is not run again, what is not kept is, and gradients stay plain autograd's.

Tests count operators and bytes, and compare bit for bit.
"""

import contextlib
import functools
import gc
import inspect
import pickle
import random
import re
import warnings
import weakref
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy

import recollect
from recollect import CheckpointError, Offload, Recompute, Save, checkpoint, offload_ops, policies, remat, save_ops
from recollect.dropin import GraphExecGroup, set_checkpoint_debug_enabled, set_checkpoint_early_stop
from recollect.dropin import checkpoint as dropin_checkpoint
from test_programs import PROGRAMS, run, run_plainly
from tools import IN_PLACE, CountOperators, LiveBytes, assert_equal, garbage_collector_off, leaf

aten = torch.ops.aten
early_stops = pytest.mark.parametrize("early_stop", [True, False])
ways = pytest.mark.parametrize("options", [{}, {"early_stop": False, "debug": True}], ids=["default", "to the end"])


def name_of(op):
    return op.overloadpacket.__name__ if isinstance(op, torch._ops.OpOverload) else op.name()


class Asked:
    """A function policy that notes the operators that it is asked about and keeps those with the given names."""

    def __init__(self, *kept, decision=None):
        self.kept, self.decision, self.all_names = kept, decision or Save(), []

    @property
    def names(self):
        """Without the detach of autograd itself, which no function wrote."""
        return [name for name in self.all_names if name != "detach"]

    def __call__(self, op, ctx):
        self.all_names.append(name_of(op))
        return self.decision if self.all_names[-1] in self.kept else None


class EverySecond:
    """Keeps the second, fourth, ... call of one operator, over all regions that it is given to."""

    def __init__(self, name="mm", decision=None):
        self.name, self.decision, self.calls = name, decision or Save(), 0

    def __call__(self, op, ctx):
        if name_of(op) != self.name:
            return None
        self.calls += 1
        return self.decision if self.calls % 2 == 0 else Recompute()


def everything(op, ctx):
    return Save(on_mutation="copy")


def loss_of(result):
    parts = [result] if isinstance(result, torch.Tensor) else result
    return sum((part.double() * torch.linspace(-1, 2, part.numel()).view(part.shape)).sum() for part in parts)


def step(function, leaves, passes=1):
    """Forward, and backward as often as asked: result, gradients of each pass, operators that ran."""
    torch.manual_seed(0)
    with CountOperators() as operators:
        result = function(*leaves)
        loss = loss_of(result)
        grads = [
            torch.autograd.grad(loss, leaves, retain_graph=index < passes - 1, allow_unused=True)
            for index in range(passes)
        ]
    return result, grads, operators.counts


def region(function, policy, **options):
    return lambda *args: checkpoint(function, *args, policy=policy, **options)


def run_again(function, *leaves, policy, passes=1, **options):
    """How often each operator ran on top of plain autograd's. Results and gradients must be plain's, bit for bit."""
    expected, expected_grads, plain = step(function, leaves, passes)
    result, grads, operators = step(region(function, policy, **options), leaves, passes)
    assert_equal(result, expected)
    assert_equal(grads, expected_grads)
    assert any(grad is not None and grad.abs().sum() > 0 for grad in grads[0])
    return operators - plain


def own_operators(function, *args):
    with torch.no_grad(), CountOperators() as seen:
        function(*args)
    return seen.names


def matrices(count=2):
    return [leaf(3, 3, seed=seed) for seed in range(count)]


def mm_sin_exp_cos(x, w):
    return (x @ w).sin().exp().cos()


def grad_of(result, *leaves, **options):
    return torch.autograd.grad(result.sum(), leaves, **options)


# --- Decisions are values ---

MAKE_DECISIONS = {
    "save": lambda: Save(),
    "save a copy": lambda: Save(on_mutation="copy"),
    "recompute": lambda: Recompute(),
    "offload": lambda: Offload(),
}


@pytest.mark.parametrize("name", MAKE_DECISIONS)
def test_decisions_compare_hash_and_are_written_as_what_makes_them(name):
    decision, other = MAKE_DECISIONS[name](), MAKE_DECISIONS[name]()
    assert decision == other
    assert hash(decision) == hash(other)
    assert [key for key, make in MAKE_DECISIONS.items() if make() == decision] == [name]
    assert eval(repr(decision), {"recollect": recollect, **vars(recollect)}) == decision


def test_the_defaults_of_decisions():
    assert Save() == Save(on_mutation="error")
    assert Offload() == Offload(to="cpu")


@pytest.mark.parametrize(
    ("decision", "attribute"), [(Save(), "on_mutation"), (Offload(), "to"), (Recompute(), "anything")]
)
def test_decisions_are_frozen(decision, attribute):
    before = repr(decision)
    with pytest.raises((AttributeError, TypeError)):
        setattr(decision, attribute, "copy")
    assert repr(decision) == before


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Save(on_mutation="clone"), "on_mutation"),
        (lambda: Save(on_mutation=None), "on_mutation"),
        (lambda: save_ops(aten.mm, on_mutation="keep"), "on_mutation"),
        (lambda: Offload(to="moon"), "to"),
        (lambda: Offload(to=None), "to"),
    ],
)
def test_a_value_that_there_is_not_is_named_with_its_argument(make, argument):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        make()


# --- What is refused ---


@pytest.mark.parametrize(
    ("wrong", "word"), [(torch.mm, "mm"), ("aten.mm", "aten.mm"), (None, "None"), (aten, "aten"), ([aten.mm], "list")]
)
def test_what_is_no_operator_is_refused_by_name(wrong, word):
    for make in (save_ops, offload_ops):
        with pytest.raises(TypeError, match=word) as info:
            make(aten.sin, wrong)
        assert "torch.ops" in str(info.value), "it says what it takes"


@pytest.mark.parametrize(
    ("answer", "word"),
    [(True, "True"), (False, "False"), (CheckpointPolicy.MUST_SAVE, "MUST_SAVE"), ("save", "save"), (Save, "Save")],
)
def test_a_function_that_gives_no_decision_is_refused(answer, word):
    with pytest.raises(TypeError, match=word):
        checkpoint(mm_sin_exp_cos, *matrices(), policy=lambda op, ctx: answer)


@pytest.mark.parametrize("wrong", [3, "save", [aten.mm], Save()], ids=repr)
def test_a_policy_that_is_none_is_refused_before_anything_runs(wrong):
    calls = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            with pytest.raises(TypeError, match="policy"):
                checkpoint(calls.append, leaf(3), policy=wrong)
            with pytest.raises(TypeError, match="policy"):
                remat(calls.append, policy=wrong)(leaf(3))
    assert calls == []


def test_a_policy_needs_the_variant_that_looks_inside():
    with pytest.raises(ValueError, match=r"policy.* only supported when use_reentrant=False"):
        checkpoint(mm_sin_exp_cos, *matrices(), policy=policies.save_matmuls, use_reentrant=True)


def test_what_a_policy_raises_reaches_the_caller_as_it_is():
    error = ZeroDivisionError("policy")

    def policy(op, ctx):
        raise error

    with pytest.raises(ZeroDivisionError) as info:
        checkpoint(mm_sin_exp_cos, *matrices(), policy=policy)
    assert info.value is error


def test_a_policy_combines_with_policies_and_functions_only():
    for wrong in (3, Save(), "save", None):
        with pytest.raises(TypeError):
            save_ops(aten.mm) | wrong


# --- Where a policy goes ---


def test_remat_takes_a_policy_and_leaves_arguments_of_that_name_alone():
    seen = []

    @remat(policy=save_ops(aten.mm))
    def block(x, w, *, policy):
        seen.append(policy)
        return (x @ w).sin().exp()

    x, w = matrices()
    with CountOperators() as operators:
        y = block(x, w, policy="mine")
        grads = grad_of(y, x, w)
    assert seen == ["mine"] * 2
    assert operators.counts["sin"] == 2
    assert operators.counts["mm"] == 1 + 2, "one in the forward, two in the backward of it"
    assert_equal(grads, grad_of((x @ w).sin().exp(), x, w))


def test_remat_takes_a_policy_for_a_module():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x = leaf(2, 3)
    with CountOperators() as operators:
        remat(module, policy=policies.save_matmuls)(x).sum().backward()
    assert operators.counts["addmm"] == 2
    assert torch.equal(x.grad, grad_of(module(x), x)[0])


def test_for_the_drop_in_a_policy_is_an_argument_of_the_function():
    seen = []
    dropin_checkpoint(lambda x, policy: seen.append(policy) or x.sin(), leaf(3), policy="mine", use_reentrant=False)
    assert seen == ["mine"]


def test_no_policy_is_plain_checkpointing():
    again = run_again(mm_sin_exp_cos, *matrices(), policy=None)
    assert (again["mm"], again["sin"], again["exp"], again["cos"]) == (1, 1, 1, 0)


@pytest.mark.parametrize("override", [set_checkpoint_early_stop, set_checkpoint_debug_enabled])
def test_the_overrides_of_other_options_leave_the_policy(override):
    for value in (True, False):
        with override(value):
            again = run_again(mm_sin_exp_cos, *matrices(), policy=save_ops(aten.mm))
        assert (again["mm"], again["sin"]) == (0, 1)


def test_without_grad_nothing_is_kept():
    x, w = matrices()
    with torch.no_grad(), LiveBytes() as live:
        y = checkpoint(mm_sin_exp_cos, x, w, policy=save_ops(aten.mm))
        assert live.now == y.nbytes


# --- What is kept is not run again ---


@ways
@pytest.mark.parametrize("passes", [1, 3])
def test_kept_operators_run_once_and_the_others_in_every_replay(options, passes):
    again = run_again(mm_sin_exp_cos, *matrices(), policy=save_ops(aten.mm, aten.exp), passes=passes, **options)
    assert again["mm"] == again["exp"] == 0
    assert again["sin"] == passes
    assert again["cos"] == (passes if options else 0)


@ways
def test_offloaded_operators_run_once(options):
    again = run_again(mm_sin_exp_cos, *matrices(), policy=offload_ops(aten.mm), passes=2, **options)
    assert again["mm"] == 0
    assert again["sin"] == 2


def test_everything_kept_runs_nothing_again():
    again = run_again(mm_sin_exp_cos, *matrices(), policy=everything, passes=2)
    assert not set(again) & {"mm", "sin", "exp", "cos"}


def test_an_overload_means_itself_and_a_packet_all_its_overloads():
    def function(x):
        return (x.sum(1).exp() * x.sum().exp()).sin()

    x = leaf(3, 3)
    assert run_again(function, x, policy=save_ops(aten.exp))["sum"] == 2
    assert run_again(function, x, policy=save_ops(aten.sum.default))["sum"] == 1
    assert run_again(function, x, policy=save_ops(aten.sum.dim_IntList))["sum"] == 1
    assert run_again(function, x, policy=save_ops(aten.sum))["sum"] == 0


def test_one_operator_called_often_is_kept_in_order():
    def function(x, w):
        for _ in range(4):
            x = (x @ w).sin()
        return x

    again = run_again(function, *matrices(), policy=policies.save_matmuls, passes=2, early_stop=False)
    assert again["mm"] == 0
    assert again["sin"] == 2 * 4


# --- Asking ---


def test_a_function_is_given_the_operator_its_arguments_and_no_path():
    calls = []

    def policy(op, ctx):
        calls.append((op, [value.shape if isinstance(value, torch.Tensor) else value for value in ctx.args], ctx.path))
        if op is aten._to_copy.default:
            assert ctx.kwargs["dtype"] is torch.float64
        return Save() if op is aten.sin.default else None

    checkpoint(lambda x, w: (x.to(torch.float64) @ w).sin(), leaf(2, 3), leaf(3, 4, dtype=torch.float64), policy=policy)
    assert calls == [
        (aten._to_copy.default, [(2, 3)], ""),
        (aten.mm.default, [(2, 3), (3, 4)], ""),
        (aten.sin.default, [(2, 4)], ""),
    ]


def test_a_decision_by_shape_keeps_this_matmul_and_not_that_one():
    def policy(op, ctx):
        return Save() if op is aten.mm.default and ctx.args[1].shape[1] > 3 else None

    x, w, v = leaf(2, 3), leaf(3, 5, seed=1), leaf(5, 2, seed=2)
    sizes = []

    class Sizes(CountOperators):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.mm.default:
                sizes.append(tuple(args[1].shape))
            return super().__torch_dispatch__(func, types, args, kwargs)

    y = checkpoint(lambda x, w, v: ((x @ w).sin() @ v).exp(), x, w, v, policy=policy)
    with Sizes():
        grads = grad_of(y, x, w, v)
    assert sizes.count((3, 5)) == 0
    assert sizes.count((5, 2)) == 1
    assert_equal(grads, grad_of(((x @ w).sin() @ v).exp(), x, w, v))


@ways
def test_a_policy_is_asked_once_per_operator_call(options):
    x, w = matrices()
    policy = Asked("mm")
    y = checkpoint(mm_sin_exp_cos, x, w, policy=policy, **options)
    expected = own_operators(mm_sin_exp_cos, x, w)
    assert policy.names == expected
    for _ in range(3):
        grad_of(y, x, w, retain_graph=True)
    assert policy.names == expected


def nested_in_plain_regions(function, depth, **options):
    """`function` in `depth` regions without a policy, with something to save around each."""

    def wrap(inner):
        return lambda x, w: checkpoint(lambda x, w: inner(x.tanh(), w).sin(), x, w, **options)

    for _ in range(depth):
        function = wrap(function)
    return function


@early_stops
@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_in_an_inner_region_is_asked_in_the_forward_only(depth, early_stop):
    x, w = matrices()
    policy = EverySecond()

    def block(x, w):
        return ((((x @ w).sin() @ w).exp().tanh() @ w).sin() @ w).cos()

    inner = region(block, policy, early_stop=early_stop)
    y = nested_in_plain_regions(inner, depth, early_stop=early_stop)(x, w)
    assert policy.calls == 4
    for again in (True, False):
        grads = grad_of(y, x, w, retain_graph=again)
        assert policy.calls == 4
    plain = block(*[x.tanh() if depth == 1 else x.tanh().tanh(), w])
    assert_equal(grads, grad_of(plain.sin() if depth == 1 else plain.sin().sin(), x, w))


@early_stops
@pytest.mark.parametrize("depth", [2, 3])
def test_policies_at_every_level_are_asked_in_the_forward_only(depth, early_stop):
    x, w = matrices()
    asked = [Asked("mm", "exp") for _ in range(depth)]

    def level(k, call):
        def function(x, w):
            x = (x @ w).sin()
            if k + 1 < depth:
                x = call(level(k + 1, call), x, w, policy=asked[k + 1], early_stop=early_stop)
            return (x.exp().tanh() @ w).cos()

        return function

    y = checkpoint(level(0, checkpoint), x, w, policy=asked[0], early_stop=early_stop)
    in_forward = [len(policy.all_names) for policy in asked]
    assert asked[-1].names == ["mm", "sin", "exp", "tanh", "mm", "cos"]
    for again in (True, False):
        grads = grad_of(y, x, w, retain_graph=again)
        assert [len(policy.all_names) for policy in asked] == in_forward
    plain = level(0, lambda function, x, w, **_: function(x, w))
    assert_equal(grads, grad_of(plain(x, w), x, w))


@early_stops
def test_every_second_matmul_over_regions_that_share_the_counter(early_stop):
    """The policy of torchtitan's configuration: one counter for all blocks of a model."""

    def model(x, *weights, call):
        for first in range(0, len(weights), 3):
            x = x + call(lambda x, a, b, c: (((x @ a).relu() @ b).tanh() @ c).sin(), x, *weights[first : first + 3])
        return x

    policy, leaves = EverySecond(), matrices(1 + 9)
    plain = functools.partial(model, call=lambda block, *args: block(*args))
    regions = functools.partial(model, call=remat(lambda block, *args: block(*args), policy=policy, early_stop=False))
    if early_stop:
        regions = functools.partial(model, call=remat(lambda block, *args: block(*args), policy=policy))
    _, expected, plain_operators = step(plain, leaves, 2)
    _, grads, operators = step(regions, leaves, 2)
    assert policy.calls == 9
    assert_equal(grads, expected)
    again = operators["mm"] - plain_operators["mm"]
    assert again == 2 * 5, "of nine matmuls four are kept; the third one of a block is not the last operator"


@early_stops
def test_a_policy_that_answers_at_random_is_safe(early_stop):
    generator = random.Random(3)

    def policy(op, ctx):
        return generator.choice([Save(), Recompute(), None, Offload()])

    x, w = matrices()
    for _ in range(8):
        run_again(mm_sin_exp_cos, x, w, policy=save_ops(aten.sin) | policy, passes=2, early_stop=early_stop)


@early_stops
def test_a_policy_that_draws_torchs_random_numbers_is_safe(early_stop):
    def policy(op, ctx):
        return Save(on_mutation="copy") if torch.rand(()) < 0.5 else None

    x = leaf(64)
    for seed in range(4):
        torch.manual_seed(seed)
        y = checkpoint(lambda x: F.dropout(F.dropout(x.sin().exp(), 0.5), 0.3), x, policy=policy, early_stop=early_stop)
        for _ in range(2):
            (grad,) = grad_of(y, x, retain_graph=True)
            assert torch.equal(grad != 0, y != 0), "the masks of the replay are those of the forward"


def test_what_a_policy_computes_is_no_concern_of_a_region_around():
    def by_value(op, ctx):
        return Save() if ctx.args[0].abs().max() > 0 else None

    def outer(call):
        return lambda x, w: call(lambda x, w: (x.abs() @ w).abs().sin(), x, w).exp() * (w @ x).abs()

    x, w = matrices()
    expected = grad_of(outer(lambda function, *args: function(*args))(x, w), x, w)
    inside = outer(lambda function, *args: checkpoint(function, *args, policy=by_value))
    for policy in (None, save_ops(aten.abs), everything, EverySecond("abs")):
        y = checkpoint(inside, x, w, policy=policy)
        for _ in range(2):
            assert_equal(grad_of(y, x, w, retain_graph=True), expected)


# --- Combining ---


def sin_is_recomputed(op, ctx):
    return Recompute() if op is aten.sin.default else None


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (save_ops(aten.mm) | save_ops(aten.sin), {"mm", "sin"}),
        (save_ops(aten.mm) | offload_ops(aten.sin) | save_ops(aten.exp), {"mm", "sin", "exp"}),
        (sin_is_recomputed | save_ops(aten.sin, aten.mm), {"mm"}),
        (save_ops(aten.sin, aten.mm) | sin_is_recomputed, {"mm", "sin"}),
        (sin_is_recomputed | save_ops(aten.exp) | everything, {"mm", "exp"}),
        (save_ops(aten.mm) | (sin_is_recomputed | save_ops(aten.sin, aten.exp)), {"mm", "exp"}),
        (policies.save_matmuls | policies.save_attention | save_ops(aten.exp), {"mm", "exp"}),
        (policies.save_matmuls | policies.save_nothing, {"mm"}),
        (recollect.by_name({"nowhere": Recompute()}) | save_ops(aten.mm), {"mm"}),
    ],
)
def test_the_first_decision_wins(policy, kept):
    again = run_again(mm_sin_exp_cos, *matrices(), policy=policy)
    assert {name for name in ("mm", "sin", "exp") if again[name] == 0} == kept


def test_a_function_after_a_decision_is_not_asked():
    asked = Asked("exp")
    checkpoint(mm_sin_exp_cos, *matrices(), policy=save_ops(aten.mm) | asked)
    assert asked.names == ["sin", "exp", "cos"]


def test_a_combination_does_not_change_its_parts():
    one, other = save_ops(aten.mm), save_ops(aten.sin)
    assert one | other is not one
    again = run_again(mm_sin_exp_cos, *matrices(), policy=one)
    assert (again["mm"], again["sin"]) == (0, 1)


@pytest.mark.parametrize("policy", [save_ops(aten.mm) | policies.save_attention, policies.save_matmuls], ids=repr)
def test_a_policy_that_was_used_can_be_pickled(policy):
    checkpoint(mm_sin_exp_cos, *matrices(), policy=policy)
    twin = pickle.loads(pickle.dumps(policy))
    assert repr(twin) == repr(policy)
    assert run_again(mm_sin_exp_cos, *matrices(), policy=twin)["mm"] == 0


def test_a_function_is_not_asked_about_copies_of_what_is_pinned():
    def block(x):
        weight, noise = recollect.pin(lambda x: (x.tanh(), torch.rand(3)))(x)
        return (x * weight + noise).sin().exp()

    asked = Asked("exp")
    checkpoint(block, leaf(3), policy=asked)
    assert asked.names == ["mul", "add", "sin", "exp"]


def test_the_first_of_two_ways_to_keep_wins():
    def function(x, w):
        y = x @ w
        y.add_(1)
        return y.sin()

    x, w = matrices()
    run_again(function, x, w, policy=save_ops(aten.mm, on_mutation="copy") | save_ops(aten.mm))
    with pytest.raises(CheckpointError, match="has been mutated"):
        run_again(function, x, w, policy=save_ops(aten.mm) | save_ops(aten.mm, on_mutation="copy"))


# --- Policies that are there ---


def test_save_matmuls():
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh())

    def function(x, y):
        batches = torch.bmm(module(x).sin().view(1, 3, 3), y.view(1, 3, 3))
        return torch.baddbmm(batches.exp(), batches, batches).cos().exp()

    again = run_again(function, *matrices(), policy=policies.save_matmuls, early_stop=False)
    assert not set(again) & {"mm", "addmm", "bmm", "baddbmm"}
    assert again["tanh"] == 2
    assert again["exp"] == 2


def test_save_attention():
    def function(q, k, v):
        return F.scaled_dot_product_attention(q.sin(), k, v, is_causal=True).exp().cos()

    leaves = [leaf(1, 2, 4, 8, seed=seed) for seed in range(3)]
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    again = run_again(function, *leaves, policy=policies.save_attention, early_stop=False)
    assert again[flash] == 0
    assert again["exp"] == again["sin"] == 1
    assert run_again(function, *leaves, policy=save_ops(aten.exp), early_stop=False)[flash] == 1


def test_save_attention_knows_flex_attention():
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import _create_empty_block_mask, _identity

    leaves = [leaf(1, 1, 16, 16, seed=seed) for seed in range(3)]
    mask = _create_empty_block_mask(*leaves[:2])
    scores = []

    def score(score, *indices):
        scores.append(score)
        return _identity(score, *indices)

    def function(q, k, v):
        return flex_attention(q.sin(), k, v, score, mask.as_tuple(), 0.25, {})[0].cos().exp()

    def traced(policy):
        y = checkpoint(function, *leaves, policy=policy, early_stop=False)
        scores.clear()
        grads = grad_of(y, *leaves)
        return len(scores), grads

    expected = grad_of(function(*leaves), *leaves)
    kept, grads = traced(policies.save_attention)
    not_kept, other = traced(save_ops(aten.cos))
    assert_equal(grads, expected)
    assert_equal(other, expected)
    assert kept < not_kept


@pytest.fixture
def one_process():
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_save_collectives(one_process):
    import torch.distributed._functional_collectives as collectives

    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd

    def function(x):
        return gather(x.sin(), 0, one_process).exp().cos()

    x = leaf(4, 3)
    again = run_again(function, x, policy=policies.save_collectives, passes=2)
    assert again["all_gather_into_tensor"] == 0
    assert again["sin"] == again["exp"] == 2
    assert run_again(function, x, policy=save_ops(aten.sin))["all_gather_into_tensor"] == 1


def test_save_nothing():
    again = run_again(mm_sin_exp_cos, *matrices(), policy=policies.save_nothing)
    assert (again["mm"], again["sin"], again["exp"], again["cos"]) == (1, 1, 1, 0)
    with LiveBytes() as live:
        y = checkpoint(mm_sin_exp_cos, *matrices(), policy=policies.save_nothing)
        assert live.now == 3 * y.nbytes, "the two leaves, which were made here, and the result"


def test_save_everything_but_pointwise():
    def function(x, w):
        y = F.layer_norm((x @ w).sin(), (3,)).softmax(-1)
        return (y.exp() * y.cumsum(0)).cos() + y.sum(0)

    options = {"policy": policies.save_everything_but_pointwise, "early_stop": False}
    again = run_again(function, *matrices(), **options)
    assert not set(again) & {"mm", "native_layer_norm", "_softmax", "cumsum"}
    assert again["sin"] == again["exp"] == again["cos"] == 1


@pytest.mark.parametrize(
    "policy", ["save_matmuls", "save_attention", "save_collectives", "save_nothing", "save_everything_but_pointwise"]
)
def test_the_policies_that_are_there_combine_from_both_sides(policy):
    policy = getattr(policies, policy)
    for combined in (policy | save_ops(aten.mm, aten.exp), save_ops(aten.mm, aten.exp) | policy):
        x, w = matrices()
        grads = grad_of(checkpoint(mm_sin_exp_cos, x, w, policy=combined), x, w)
        assert_equal(grads, grad_of(mm_sin_exp_cos(x, w), x, w))


# --- Backward in every way ---


def two_outputs(x, w):
    y = (x @ w).sin()
    return (y @ w).exp(), (y @ x).cos().exp()


@ways
def test_partial_backward(options):
    x, w = matrices()
    one, two = checkpoint(two_outputs, x, w, policy=policies.save_matmuls, **options)
    expected_one, expected_two = two_outputs(x, w)
    for part, plain in ((two, expected_two), (one, expected_one), (two, expected_two)):
        assert_equal(grad_of(part, x, w, retain_graph=True), grad_of(plain, x, w, retain_graph=True))


@early_stops
def test_partial_backward_that_frees_what_it_used(early_stop):
    def function(x, w):
        return (x @ w).sin().exp(), (w @ x).cos().exp()

    x, w = matrices()
    one, two = checkpoint(function, x, w, policy=policies.save_matmuls, early_stop=early_stop)
    expected = function(x, w)
    assert_equal(grad_of(two, x, w), grad_of(expected[1], x, w))
    assert_equal(grad_of(one, x, w), grad_of(expected[0], x, w))


def test_backward_for_one_input_only():
    x, w = matrices()
    checkpoint(mm_sin_exp_cos, x, w, policy=policies.save_matmuls).sum().backward(inputs=[w])
    assert x.grad is None
    assert_equal(w.grad, grad_of(mm_sin_exp_cos(x, w), w)[0])


def test_backward_calls_in_a_group():
    def function(x, w):
        return (x @ w).sin().exp(), (w @ x).cos().exp()

    x, w = matrices()
    one, two = checkpoint(function, x, w, policy=policies.save_matmuls)
    expected = function(x, w)
    with GraphExecGroup(), CountOperators() as operators:
        grads = [grad_of(one, x, w), grad_of(two, x, w)]
    assert operators.counts["mm"] == 2 * 2
    assert_equal(grads, [grad_of(part, x, w) for part in expected])


@ways
def test_double_backward(options):
    x, w = [leaf(3, 3, dtype=torch.float64, seed=seed) for seed in (0, 1)]

    def twice(function):
        grads = grad_of(function(x, w), x, w, create_graph=True)
        return [*grads, *torch.autograd.grad(sum(grad.sin().sum() for grad in grads), (x, w))]

    for policy in (policies.save_matmuls, everything, EverySecond("sin") | save_ops(aten.exp)):
        assert_equal(twice(region(mm_sin_exp_cos, policy, **options)), twice(mm_sin_exp_cos))


@ways
@pytest.mark.parametrize("retain_graph", [True, False])
def test_backward_inside_the_region(options, retain_graph):
    def function(x, w):
        y = (x @ w).sin().exp()
        inner = y if retain_graph else (x @ w).cos().exp()
        (grad,) = torch.autograd.grad(inner.sum(), x, retain_graph=retain_graph)
        return ((grad * y) @ w).cos().exp()

    for policy in (policies.save_matmuls, everything, EverySecond()):
        run_again(function, *matrices(), policy=policy, passes=2, **options)


def test_a_gradient_penalty_inside_the_region():
    def function(x, w):
        y = (x @ w).sin().exp()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, grad.pow(2).sum().sin()

    for policy in (policies.save_matmuls, everything, EverySecond()):
        run_again(function, *matrices(), policy=policy, passes=2)


def test_a_replay_that_differs_is_found_under_a_policy():
    class First:
        calls = 0

    def function(x, w):
        First.calls += 1
        y = (x @ w).sin()
        return y.exp().cos() if First.calls == 1 else y

    x, w = matrices()
    y = checkpoint(function, x, w, policy=policies.save_matmuls, debug=True)
    with pytest.raises(CheckpointError, match="A different number of tensors was saved") as info:
        grad_of(y, x, w)
    assert "aten.mm.default" in str(info.value)


def test_a_replay_that_runs_other_kept_operators_is_found():
    class First:
        calls = 0

    def function(x, w):
        First.calls += 1
        y = x @ w if First.calls == 1 else w @ x @ w
        return (y.sin() @ w).exp()

    x, w = matrices()
    y = checkpoint(function, x, w, policy=policies.save_matmuls, early_stop=False)
    with pytest.raises(CheckpointError):
        grad_of(y, x, w)


# --- A kept output that is changed in place ---


def changes_it(x, w):
    y = x @ w
    y.add_(1)
    return y.sin().exp()


def changes_a_view_of_it(x, w):
    y = x @ w
    y.t()[0].add_(1)
    return y.sin().exp()


def changes_it_without_grad(x, w):
    y = x @ w
    with torch.no_grad():
        y.add_(1)
    return y.sin().exp()


CHANGES = {changes_it: 2, changes_a_view_of_it: 2, changes_it_without_grad: 3}


@ways
@pytest.mark.parametrize("function", CHANGES)
def test_an_output_that_the_region_changes_is_an_error_that_names_both_operators(function, options):
    x, w = matrices()
    with pytest.raises(CheckpointError, match="has been mutated") as info:
        grad_of(checkpoint(function, x, w, policy=save_ops(aten.mm), **options), x, w)
    message, line = str(info.value), inspect.getsourcelines(function)[1] + CHANGES[function]
    assert re.search(r"\bmm\b", message)
    assert "add_" in message
    assert f"test_policies.py:{line}" in message


def test_an_output_that_is_changed_after_the_region_is_an_error_that_says_so():
    def function(x, w):
        y = x @ w
        return y, (y * 2).sin().exp()

    x, w = matrices()
    one, two = checkpoint(function, x, w, policy=save_ops(aten.mm))
    one.add_(1)
    with pytest.raises(CheckpointError, match="has been mutated") as info:
        grad_of(two, x, w)
    assert re.search(r"\bmm\b", str(info.value))
    assert re.search("after the region", str(info.value), re.IGNORECASE)
    assert "add_" not in str(info.value), "nobody saw who did it"


def test_a_change_that_no_replay_asks_about_is_no_error():
    def function(x, w):
        return (x @ w).sin().exp() @ w

    x, w = matrices()
    y = checkpoint(function, x, w, policy=policies.save_matmuls)
    y.add_(1)
    assert_equal(grad_of(y, x, w), grad_of(function(x, w), x, w))


@ways
@pytest.mark.parametrize("function", CHANGES)
def test_a_private_copy_survives_a_change(function, options):
    again = run_again(function, *matrices(), policy=save_ops(aten.mm, on_mutation="copy"), passes=3, **options)
    assert again["mm"] == 0


def changes_the_result_of_a_batched_product(x, w):
    """A product of more than two dimensions is mm and a view that does not say it is one."""
    y = torch.stack([x, x]) @ w
    y.add_(1)
    return y.sin().exp()


def changes_a_part_that_shares_memory_unsaid(x, w):
    y = x @ w
    torch.unsafe_split(y, 1)[0].add_(1)
    return y.sin().exp()


def right_or_refused(call, *leaves, expected):
    try:
        y = call(*leaves)
        grads = [grad_of(y, *leaves, retain_graph=True) for _ in range(2)]
    except CheckpointError as error:
        return "mutated" in str(error) or IN_PLACE in str(error)
    assert_equal(grads, [expected] * 2)
    return True


UNSAID = [changes_the_result_of_a_batched_product, changes_a_part_that_shares_memory_unsaid]


@early_stops
@pytest.mark.parametrize("function", UNSAID)
def test_a_change_through_memory_that_is_shared_unsaid_is_never_silently_wrong(function, early_stop):
    x, w = matrices()
    call = region(function, save_ops(aten.mm), early_stop=early_stop)
    assert right_or_refused(call, x, w, expected=grad_of(function(x, w), x, w))
    run_again(function, x, w, policy=save_ops(aten.mm, on_mutation="copy"), passes=2, early_stop=early_stop)


def test_a_change_after_the_region_through_memory_that_is_shared_unsaid_is_never_silently_wrong():
    def function(x, w):
        y = torch.stack([x, x]) @ w
        return y, (y * 2).sin().exp()

    def changed(call):
        def both(x, w):
            one, two = call(x, w)
            one.add_(1)
            return two

        return both

    x, w = matrices()
    expected = grad_of(function(x, w)[1], x, w)
    assert right_or_refused(changed(region(function, save_ops(aten.mm))), x, w, expected=expected)
    call = changed(region(function, save_ops(aten.mm, on_mutation="copy")))
    assert_equal(grad_of(call(x, w), x, w), expected)


FACTORIES = {
    aten.rand: lambda x: torch.rand(3, 3),
    aten.ones: lambda x: torch.ones(3, 3),
    aten.arange: lambda x: torch.arange(3.0),
    aten.zeros_like: lambda x: torch.zeros_like(x),
    aten.normal: lambda x: torch.normal(0.0, 1.0, (3, 3)),
}


@pytest.mark.parametrize("op", FACTORIES, ids=str)
def test_a_change_after_the_region_of_what_was_made_from_nothing_is_an_error(op):
    """Torch gives such tensors a version counter of their own when the mode has seen them."""

    def function(x, w):
        made = FACTORIES[op](x)
        return made, made[:1].detach(), made.unsqueeze_(0), (x.sin() * made).exp()

    for place in range(3):
        x, w = matrices()
        for policy in (save_ops(op), lambda what, ctx: Save()):
            y = region(function, policy)(x, w)
            y[place].add_(1)
            with pytest.raises(CheckpointError, match="has been mutated after the region's forward"):
                grad_of(y[-1], x)
        y = region(function, save_ops(op))(x, w)
        expected = grad_of((x.sin() * y[0].clone()).exp(), x)
        assert_equal([grad_of(y[-1], x, retain_graph=True), grad_of(y[-1], x)], [expected] * 2)


def test_what_was_made_from_nothing_and_changed_in_the_region_is_offloaded_as_it_was_then():
    def function(x, w):
        buffer = torch.zeros(3, 3)
        y = x.exp() * (buffer.sum() + 1)
        buffer.add_(1)
        return y.sin() * buffer.sum() + (y * buffer)

    x, w = matrices()
    expected = grad_of(function(x, w), x)
    call = region(function, lambda what, ctx: Offload("disk", min_bytes=0))
    for _ in range(4):  # what stays on the device is learnt from the step before
        assert_equal(grad_of(call(x, w), x), expected)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_recurrent_cells_are_never_silently_wrong(cell):
    """They change their products in place, through parts that share memory unsaid."""
    module = cell(3, 3)

    def function(x, w):
        result = module(x, (w, w.sin()) if cell is nn.LSTMCell else w)
        return (result[0] if cell is nn.LSTMCell else result).sin().exp()

    x, w = matrices()
    expected = grad_of(function(x, w), x, w)
    assert right_or_refused(region(function, policies.save_matmuls), x, w, expected=expected)


HOOKS = {
    "save_on_cpu": save_on_cpu,
    "identity": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "wrapped": lambda: saved_tensors_hooks(lambda tensor: [tensor], lambda packed: packed[0]),
    "copies": lambda: saved_tensors_hooks(torch.clone, lambda tensor: tensor),
}


@pytest.mark.parametrize("hooks", HOOKS)
def test_a_change_under_hooks_is_never_silently_wrong(hooks):
    def under_hooks(function, policy):
        def call(x, w):
            with HOOKS[hooks]():
                return checkpoint(function, x, w, policy=policy)

        return call

    x, w = matrices()
    for function in CHANGES:
        expected = grad_of(function(x, w), x, w)
        assert right_or_refused(under_hooks(function, save_ops(aten.mm)), x, w, expected=expected)
        y = under_hooks(function, save_ops(aten.mm, on_mutation="copy"))(x, w)
        assert_equal([grad_of(y, x, w, retain_graph=True) for _ in range(2)], [expected] * 2)


@pytest.mark.parametrize("function", CHANGES)
def test_a_change_in_an_inner_region_is_never_silently_wrong(function):
    x, w = matrices()
    expected = grad_of(function(x.tanh(), w).sin(), x, w)

    def inside(policy):
        inner = region(function, policy)
        return checkpoint(lambda x, w: inner(x.tanh(), w).sin(), x, w)

    y = inside(save_ops(aten.mm, on_mutation="copy"))
    assert_equal([grad_of(y, x, w, retain_graph=True) for _ in range(2)], [expected] * 2)
    assert right_or_refused(lambda *_: inside(save_ops(aten.mm)), x, w, expected=expected)


@pytest.mark.parametrize("around", ["nothing", "a region", "a region with a policy", *HOOKS])
def test_what_a_ready_made_policy_keeps_may_be_changed_anywhere(around):
    """In the region it is copied first; where that is not possible, it is computed again."""

    def called(function, x, w):
        if around in HOOKS:
            with HOOKS[around]():
                return checkpoint(function, x, w, policy=policies.save_matmuls)
        return checkpoint(function, x, w, policy=policies.save_matmuls)

    def after(x, w):
        y = called(lambda x, w: x.sin() @ w, x, w)
        y.add_(x)
        return y.sin()

    def after_plainly(x, w):
        y = x.sin() @ w
        y.add_(x)
        return y.sin()

    for function, plain in [(functools.partial(called, one), one) for one in CHANGES] + [(after, after_plainly)]:
        x, w = matrices()
        expected = grad_of(plain(x.tanh(), w).sin(), x, w)
        whole = lambda x, w, function=function: function(x.tanh(), w).sin()  # noqa: E731
        if around.startswith("a region"):
            policy = policies.save_matmuls if around.endswith("policy") else None
            y = checkpoint(whole, x, w, policy=policy, early_stop=False)
        else:
            y = whole(x, w)
        assert_equal([grad_of(y, x, w, retain_graph=True) for _ in range(2)], [expected] * 2)


def test_memory_that_has_yet_to_be_written_is_not_kept():
    def function(x, w):
        return F.dropout(x.sin() @ w, 0.4).tanh()

    for policy in (lambda op, ctx: Save(), save_ops(aten.empty_like, aten.mm, aten.bernoulli_)):
        x, w = matrices()
        torch.manual_seed(1)
        expected = grad_of(function(x, w), x, w)
        torch.manual_seed(1)
        assert_equal(grad_of(checkpoint(function, x, w, policy=policy), x, w), expected)


@ways
def test_another_shape_in_place_is_no_change_of_the_values(options):
    def function(x, w):
        y = x @ w
        y.t_().unsqueeze_(0)
        return (x[0] @ w).sin() * y.exp()  # a vector times a matrix is mm and then squeeze_

    for policy in (policies.save_matmuls, EverySecond()):
        run_again(function, *matrices(), policy=policy, passes=2, **options)


@early_stops
def test_vmap_and_jvp_inside_the_region(early_stop):
    def mapped(x, w):
        return torch.func.vmap(lambda row: (row @ w).sin())(x).exp() @ w

    def derived(x, w):
        return torch.func.jvp(lambda x: (x @ w).sin(), (x,), (w,))[1].exp() @ w

    for function in (mapped, derived):
        for policy in (policies.save_matmuls, everything):
            run_again(function, *matrices(), policy=policy, passes=2, early_stop=early_stop)


def test_a_private_copy_survives_a_change_after_the_region():
    def function(x, w):
        y = x @ w
        return y, (y * 2).sin().exp()

    def changed(function):
        x, w = matrices()
        one, two = function(x, w)
        one.add_(1)
        return [grad_of(two, x, w, retain_graph=True) for _ in range(2)]

    policy = save_ops(aten.mm, on_mutation="copy")
    assert_equal(changed(region(function, policy)), changed(function))


def test_a_private_copy_in_an_inner_region_that_an_outer_one_changes():
    def inner(x, w):
        y = x @ w
        return y, (y * 2).sin()

    def function(call):
        def outer(x, w):
            one, two = call(inner, x, w)
            one.mul_(2)
            return (one + two).exp()

        return outer

    x, w = matrices()
    policy = save_ops(aten.mm, on_mutation="copy")
    y = checkpoint(function(lambda inner, *args: checkpoint(inner, *args, policy=policy)), x, w)
    expected = grad_of(function(lambda inner, *args: inner(*args))(x, w), x, w)
    for _ in range(2):
        assert_equal(grad_of(y, x, w, retain_graph=True), expected)


# --- Kinds of operators ---


def in_place(x, w):
    return (x @ w).sin().mul(3).mul_(2).add_(x).sigmoid_() * w


def in_place_through_a_view(x, w):
    y = (x @ w).sin() * 2
    y.view(-1)[::2].mul_(3)
    return y.exp()


def views(x, w):
    return (x.t().view(3, 3, 1).transpose(0, 2)[0] @ w.unsqueeze(0).squeeze(0)).reshape(9)[1:7].exp().cos()


def out_argument(x, w):
    buffer = torch.empty(3, 3)
    with torch.no_grad():
        torch.sin(x, out=buffer)
    return (x * buffer).exp() @ w


def several_outputs(x, w):
    values, indices = (x @ w).sort(1)
    variance, mean = torch.var_mean(values, 0)
    return (values.exp().gather(1, indices) * mean).sin(), variance.cos(), *(x @ w).split(1)


def numbers(x, w):
    y = x @ w
    scale = y.sum().item()
    if torch.equal(y, x) or bool(y.sum() > 1e9):
        scale = 0.0
    return (y * scale).sin().exp()


def indexing(x, w):
    y = (x @ w).exp()
    return y[y[:, 0].argsort()].sin() * torch.where(y > 1, y, x)


def factories(x, w):
    return ((x @ w) * torch.arange(9.0).view(3, 3) + torch.eye(3)).sin().exp()


@torch.library.custom_op("recollect_test_policies::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.rand_like(x)
    return x * noise, noise


noisy.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


@torch.library.custom_op("recollect_test_policies::look", mutates_args=())
def look(x: torch.Tensor) -> None:
    assert x.isfinite().all()


@torch.library.custom_op("recollect_test_policies::count_and_double", mutates_args=("counter",))
def count_and_double(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter.add_(1)
    return x * 2


def custom_operators(x, w):
    counter = torch.zeros(3)
    y = (x @ w).sin()
    y = y * count_and_double(y.detach(), counter)
    look(y)
    return (noisy(y)[0].exp() * counter).sin(), noisy(y.cos())[0].exp()


KINDS = {
    in_place: [aten.mul_, aten.add_, aten.sigmoid_, aten.sin],
    in_place_through_a_view: [aten.view, aten.slice, aten.mul_, aten.sin],
    views: [aten.t, aten.view, aten.transpose, aten.select, aten.unsqueeze, aten.squeeze, aten.slice, aten.exp],
    out_argument: [aten.sin, aten.exp],
    several_outputs: [aten.sort, aten.var_mean, aten.split],
    numbers: [aten._local_scalar_dense, aten.equal, aten.sum],
    indexing: [aten.argsort, aten.sort, aten.index, aten.where],
    factories: [aten.arange, aten.eye],
    custom_operators: [
        torch.ops.recollect_test_policies.noisy,
        torch.ops.recollect_test_policies.look,
        torch.ops.recollect_test_policies.count_and_double,
    ],
}


@ways
@pytest.mark.parametrize("function", KINDS)
def test_every_kind_of_operator(function, options):
    for policy in (save_ops(*KINDS[function]), everything, EverySecond() | save_ops(*KINDS[function])):
        run_again(function, *matrices(), policy=policy, passes=2, **options)


@ways
@pytest.mark.parametrize("policy", [save_ops(aten.mm), EverySecond()], ids=["set", "counter"])
def test_an_operator_that_fails_and_is_caught_is_not_taken_for_the_next_one(policy, options):
    def function(x, w):
        try:
            y = x @ torch.ones(2, 2)
        except RuntimeError:
            y = x @ w
        return ((y.sin() @ w).exp() @ x).cos()

    run_again(function, *matrices(), policy=policy, passes=2, **options)


def test_operators_with_several_outputs_and_with_numbers_are_kept():
    again = run_again(several_outputs, *matrices(), policy=save_ops(aten.sort, aten.var_mean), early_stop=False)
    assert again["sort"] == again["var_mean"] == 0
    again = run_again(numbers, *matrices(), policy=save_ops(aten._local_scalar_dense, aten.mm))
    assert again["_local_scalar_dense"] == again["mm"] == 0


def two_dropouts(x, w):
    x = torch.native_dropout(x, 0.5, True)[0].sin()
    x = F.dropout(x.exp(), 0.3)
    return (torch.native_dropout(x @ w, 0.4, True)[0] + torch.randn(3, 3) * noisy(x)[0]).cos() * torch.rand_like(x)


@ways
@pytest.mark.parametrize(
    "names", ["native_dropout", "noisy", "randn", "rand_like", "bernoulli_", "mm", "native_dropout noisy randn"]
)
def test_what_is_kept_leaves_the_random_numbers_of_the_rest(names, options):
    again = run_again(two_dropouts, *matrices(), policy=Asked("sin", *names.split()), passes=2, **options)
    for name in set(names.split()) - {"bernoulli_"}:
        assert again[name] == 0


@early_stops
def test_keeping_one_random_operator_of_two_leaves_the_other_its_numbers(early_stop):
    def function(x, w):
        x = torch.native_dropout(x, 0.5, True)[0].sin()
        return torch.native_dropout(x @ w, 0.5, True)[0].exp().sin()

    for kept in (0, 1):
        every_second = EverySecond("native_dropout")
        every_second.calls = kept
        again = run_again(
            function, *matrices(), policy=every_second | save_ops(aten.mm), passes=2, early_stop=early_stop
        )
        assert again["native_dropout"] == 2
    everywhere = run_again(function, *matrices(), policy=save_ops(aten.native_dropout), early_stop=early_stop)
    assert everywhere["native_dropout"] == 0


def test_the_random_state_after_backward_is_that_of_plain_autograd():
    x, w = matrices()
    states = []
    for call in (two_dropouts, region(two_dropouts, Asked("native_dropout", "noisy"))):
        torch.manual_seed(5)
        y = call(x, w)
        states.append(torch.get_rng_state())
        grad_of(y, x, w)
        states.append(torch.get_rng_state())
    assert all(torch.equal(states[0], state) for state in states)


def test_a_kept_operator_leaves_a_generator_of_the_users_where_it_is():
    def grads(call):
        generator = torch.Generator().manual_seed(0)
        x = leaf(3)
        y = call(lambda x: (x * torch.rand(3, generator=generator)).sin().exp(), x)
        after = torch.rand(3, generator=generator)
        return grad_of(y, x), after, torch.rand(3, generator=generator)

    kept = grads(lambda function, x: checkpoint(function, x, policy=save_ops(aten.rand)))
    assert_equal(kept, grads(lambda function, x: function(x)))


def test_a_kept_operator_turns_no_generator_back_that_is_not_preserved():
    x = leaf(3)
    policy = save_ops(aten.native_dropout)
    y = checkpoint(lambda x: torch.native_dropout(x, 0.5, True)[0].exp(), x, policy=policy, preserve_rng_state=False)
    torch.rand(3)
    before = torch.get_rng_state()
    grad_of(y, x)
    assert torch.equal(torch.get_rng_state(), before)


class Twice(HigherOrderOperator):
    """A function applied twice."""

    def __init__(self):
        super().__init__("recollect_test_twice")
        self.runs = 0

    def __call__(self, function, x):
        return super().__call__(function, x)


twice = Twice()


@twice.py_impl(DispatchKey.CompositeExplicitAutograd)
def _twice_runs(function, x):
    twice.runs += 1
    return function(function(x))


class TwiceWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.save_for_backward(x)
        ctx.function = function
        with torch._C._AutoDispatchBelowAutograd():
            return twice(function, x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.function(ctx.function(x))
        return None, torch.autograd.grad(y, x, grad)[0]


twice.py_impl(DispatchKey.Autograd)(TwiceWithGrad.apply)


@pytest.mark.parametrize("kept", [True, False])
def test_higher_order_operators(kept):
    def function(x):
        return twice(torch.sin, x.exp()).cos().exp()

    x = leaf(3)
    expected = grad_of(function(x), x)
    y = checkpoint(function, x, policy=save_ops(twice if kept else aten.cos))
    before = twice.runs
    for passes in (1, 2):
        assert_equal(grad_of(y, x, retain_graph=True), expected)
        assert twice.runs - before == (0 if kept else passes)


def test_a_higher_order_operator_that_draws_leaves_the_random_numbers_of_the_rest():
    def function(x):
        noise = twice(lambda x: x * torch.rand(3), x.detach().exp())
        return (F.dropout(x.sin(), 0.5) * noise).exp()

    def grads(call):
        x = leaf(3)
        torch.manual_seed(1)
        return grad_of(call(x), x)

    for policy in (save_ops(twice), save_ops(aten.sin)):
        assert_equal(grads(region(function, policy)), grads(function))


def test_a_function_is_asked_about_higher_order_operators():
    asked = Asked("recollect_test_twice")
    checkpoint(lambda x: twice(torch.sin, x.exp()).cos(), leaf(3), policy=asked)
    assert asked.names == ["exp", "recollect_test_twice", "cos"]


class Wrapper(torch.Tensor):
    """A tensor inside; every operator is unwrapped, run and wrapped again."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self, **_):
        return f"Wrapper({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, Wrapper) else value

        def wrap(value):
            return Wrapper(value) if isinstance(value, torch.Tensor) else value

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


@ways
def test_a_wrapper_subclass(options):
    def grads(call):
        x, w = (Wrapper(value.detach()).requires_grad_() for value in matrices())
        y = call(x, w)
        passes = [torch.autograd.grad(y, (x, w), Wrapper(torch.ones(3, 3)), retain_graph=True) for _ in range(2)]
        assert type(y) is Wrapper
        return [[grad.inner for grad in grads] for grads in passes]

    for policy in (policies.save_matmuls, everything, offload_ops(aten.mm, aten.sin)):
        assert_equal(grads(region(mm_sin_exp_cos, policy, **options)), grads(mm_sin_exp_cos))


class Marked(torch.Tensor):
    """A subclass without anything of its own."""


def test_a_subclass_without_a_dispatch_of_its_own():
    def grads(call):
        x, w = (value.detach().as_subclass(Marked).requires_grad_() for value in matrices())
        seen = []

        def function(x, w):
            y = x @ w
            seen.append(type(y))
            return y.sin().exp()

        return [grad.as_subclass(torch.Tensor) for grad in grad_of(call(function, x, w), x, w)], set(seen)

    with_policy = grads(lambda function, *args: checkpoint(function, *args, policy=policies.save_matmuls))
    assert with_policy[1] == {Marked}
    assert_equal(with_policy[0], grads(lambda function, *args: function(*args))[0])


# --- Autocast ---


@early_stops
@pytest.mark.parametrize("backward_inside", [True, False])
def test_two_regions_that_share_a_weight_under_autocast(backward_inside, early_stop):
    """The weight is cast once, in the first region; the second one finds it in autocast's cache."""

    def grads(call):
        torch.manual_seed(0)
        linear = nn.Linear(4, 4)
        x = leaf(2, 4)
        with torch.autocast("cpu", torch.bfloat16):
            y = call(lambda x: linear(linear(x).sin()).sin(), call(lambda x: linear(x).sin().exp(), x)).float().sum()
            if backward_inside:
                return torch.autograd.grad(y, (x, *linear.parameters()))
        return torch.autograd.grad(y, (x, *linear.parameters()))

    expected = grads(lambda function, *args: function(*args))
    for policy in (save_ops(aten._to_copy, aten.addmm), save_ops(aten.addmm), EverySecond("_to_copy"), everything):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # where the cache leaves a region nothing to cast
            got = grads(lambda function, *args: checkpoint(function, *args, policy=policy, early_stop=early_stop))  # noqa: B023
        assert_equal(got, expected)


@early_stops
def test_autocast_inside_the_region(early_stop):
    def function(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (((x @ w).sin() @ w).exp() @ w).float().cos()

    for policy in (save_ops(aten._to_copy, aten.mm), policies.save_matmuls, EverySecond() | save_ops(aten.exp)):
        run_again(function, *matrices(), policy=policy, passes=2, early_stop=early_stop)


# --- A policy that does nothing says so ---


def warnings_of(function, policy, calls=1):
    x, w = matrices()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            grad_of(checkpoint(function, x, w, policy=policy), x, w)
    assert all(warning.category is UserWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_operators_that_never_matched_are_named_with_others_that_are_close():
    linear = nn.Linear(3, 3)
    [message] = warnings_of(lambda x, w: linear(x).sin().exp() * w, save_ops(aten.mm), calls=3)
    assert re.search(r"\bmm\b", message)
    assert re.search(r"\baddmm\b", message)


def test_an_overload_that_never_matched_is_named_with_the_one_that_ran():
    [message] = warnings_of(lambda x, w: (x.sum(1) * w).sin(), save_ops(aten.sum.default))
    assert "sum.default" in message
    assert "sum.dim_IntList" in message


def test_offloaded_operators_that_never_matched_are_named():
    [message] = warnings_of(mm_sin_exp_cos, offload_ops(aten.bmm), calls=2)
    assert "bmm" in message


def test_patterns_that_never_matched_are_named():
    [message] = warnings_of(mm_sin_exp_cos, recollect.by_name({"attention": Save()}), calls=2)
    assert "attention" in message


def test_ready_made_policies_that_never_matched_say_so_once():
    assert len(warnings_of(mm_sin_exp_cos, policies.save_collectives | policies.save_attention, calls=2)) == 1


def test_a_function_that_keeps_nothing_is_told_that_it_equals_plain_checkpointing():
    def keeps_nothing(op, ctx):
        return Recompute() if op is aten.mm.default else None

    [message] = warnings_of(mm_sin_exp_cos, keeps_nothing, calls=3)
    assert "plain checkpointing" in message
    assert "keeps_nothing" in message


@pytest.mark.parametrize(
    "policy",
    [
        lambda op, ctx: Save() if op is aten.t.default else None,
        lambda op, ctx: Save() if op is aten.relu_.default else None,
    ],
    ids=["views", "changes in place"],
)
def test_a_function_that_would_keep_what_cannot_be_kept_is_told_so_too(policy):
    def function(x, w):
        return (x.sin().relu_() @ w.t()).exp()

    [message] = warnings_of(function, policy, calls=2)
    assert "plain checkpointing" in message


@pytest.mark.parametrize(
    "policy",
    [
        policies.save_nothing,
        policies.save_matmuls,
        policies.save_matmuls | policies.save_attention,
        save_ops(aten.mm, aten.bmm),
        Asked("mm"),
        None,
    ],
    ids=["save_nothing", "save_matmuls", "one of two", "one of two operators", "a function", "no policy"],
)
def test_a_policy_that_does_something_does_not_warn(policy):
    assert warnings_of(mm_sin_exp_cos, policy, calls=2) == []


def test_two_policies_that_do_nothing_warn_both():
    assert len(warnings_of(mm_sin_exp_cos, save_ops(aten.bmm)) + warnings_of(mm_sin_exp_cos, save_ops(aten.tan))) == 2


# --- What is kept goes through the hooks around the region ---


def test_hooks_around_a_region_hold_what_is_kept():
    """Lists of numbers in the place of tensors: nothing but the hooks can have the kept values."""
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.tolist())
        return len(packed) - 1

    def unpack(index):
        unpacked.append(index)
        return torch.tensor(packed[index])

    x, w = matrices()
    x_values = (x @ w).tolist()
    with garbage_collector_off(), LiveBytes() as live:
        with saved_tensors_hooks(pack, unpack):
            y = checkpoint(mm_sin_exp_cos, x * 1, w * 1, policy=save_ops(aten.mm))
        assert live.now == y.nbytes, "nothing but the result"
    kept = packed.index(x_values)
    assert unpacked == []
    expected = grad_of(mm_sin_exp_cos(x, w), x, w)
    for passes in (1, 2):
        with CountOperators() as operators:
            assert_equal(grad_of(y, x, w, retain_graph=True), expected)
        assert operators.counts["mm"] == 2
        assert unpacked.count(kept) == passes


@early_stops
def test_save_on_cpu_around_a_region(early_stop):
    def function(call):
        def around(x, w):
            with save_on_cpu():
                return call(x.tanh(), w)

        return around

    leaves = matrices()
    _, expected, plain = step(function(mm_sin_exp_cos), leaves, 2)
    call = region(mm_sin_exp_cos, save_ops(aten.mm), early_stop=early_stop)
    _, grads, operators = step(function(call), leaves, 2)
    assert_equal(grads, expected)
    assert operators["mm"] == plain["mm"]


@early_stops
def test_hooks_inside_a_region(early_stop):
    def function(x, w):
        y = (x @ w).sin()
        with saved_tensors_hooks(lambda tensor: tensor * 1, lambda tensor: tensor):
            y = (y @ w).exp()
        return (y @ w).cos()

    for policy in (policies.save_matmuls, EverySecond(), everything):
        run_again(function, *matrices(), policy=policy, passes=2, early_stop=early_stop)


@early_stops
def test_an_outer_region_keeps_nothing_of_an_inner_one(early_stop):
    x, w = leaf(16, 16), leaf(16, 16, seed=1)
    inner = region(mm_sin_exp_cos, save_ops(aten.mm), early_stop=early_stop)

    def outer(x, w):
        return inner(x.tanh(), w).sin().exp()

    expected, plain_grads, plain = step(lambda x, w: mm_sin_exp_cos(x.tanh(), w).sin().exp(), [x, w], 2)
    with garbage_collector_off(), LiveBytes() as live:
        y = checkpoint(outer, x, w, early_stop=early_stop)
        assert live.now == y.nbytes
        del y
        assert live.now == 0
    result, grads, operators = step(lambda x, w: checkpoint(outer, x, w, early_stop=early_stop), [x, w], 2)
    assert_equal(result, expected)
    assert_equal(grads, plain_grads)
    assert operators["mm"] - plain["mm"] == 2, "once in each replay of the outer region, never in the inner one's"


# --- Memory ---

SIZE = 32
BYTES = 4 * SIZE * SIZE


def large(count=2):
    leaves = [leaf(SIZE, SIZE, seed=seed) for seed in range(count)]
    return [(value.detach() / 6).requires_grad_() for value in leaves]


def chain(x, w, length=6):
    for _ in range(length):
        x = (x @ w).sin()
    return x


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (save_ops(aten.mm), 6),
        (save_ops(aten.mm, aten.sin), 11),  # the last sin is the result
        (save_ops(aten.mm, on_mutation="copy"), 6),
        (offload_ops(aten.mm), 6),
        (policies.save_matmuls, 6),
        (policies.save_nothing, 0),
    ],
    ids=["one operator", "two operators", "copies", "offloaded", "save_matmuls", "save_nothing"],
)
def test_after_the_forward_what_is_kept_is_alive_and_nothing_else(policy, kept):
    x, w = large()
    with garbage_collector_off(), LiveBytes() as live:
        y = checkpoint(chain, x, w, policy=policy)
        assert live.now == (1 + kept) * BYTES
        del y
        assert live.now == 0


def test_a_kept_result_is_held_once():
    x, w = large()
    with garbage_collector_off(), LiveBytes() as live:
        y = checkpoint(lambda x, w: x.sin() @ w, x, w, policy=save_ops(aten.mm))
        assert live.now == BYTES
        reference = weakref.ref(y)
        del y
        assert live.now == 0
        assert reference() is None


def test_kept_views_take_no_memory():
    x, w = large()
    policy = save_ops(aten.mm, aten.t, aten.view)
    with LiveBytes() as live:
        y = checkpoint(lambda x, w: (x @ w).view(-1).view(SIZE, SIZE).t().sin().cos(), x, w, policy=policy)
        assert live.now == 2 * BYTES, "the matmul's output and the result"
        del y


@early_stops
def test_what_is_kept_dies_with_a_backward_that_frees_and_stays_with_one_that_retains(early_stop):
    x, w = large()
    with garbage_collector_off(), LiveBytes() as live:
        y = checkpoint(chain, x, w, policy=save_ops(aten.mm), early_stop=early_stop)
        loss = y.sum()
        before = live.now
        for _ in range(2):
            torch.autograd.grad(loss, (x, w), retain_graph=True)
            assert live.now == before
        torch.autograd.grad(loss, (x, w))
        assert live.now == before - 6 * BYTES
        del y, loss
        assert live.now == 0


def test_what_is_kept_for_one_output_dies_with_its_backward():
    x, w = large()
    with garbage_collector_off(), LiveBytes() as live:
        policy = save_ops(aten.mm)
        one, two = checkpoint(lambda x, w: (chain(x, w), chain(w, x)), x, w, policy=policy)
        assert live.now == (2 + 12) * BYTES
        torch.autograd.grad(one.sum(), (x, w))
        assert live.now <= (2 + 12) * BYTES
        torch.autograd.grad(two.sum(), (x, w))
        assert live.now == 2 * BYTES
        del one, two


@early_stops
def test_what_is_kept_is_freed_as_it_is_used(early_stop):
    def alive_at_each_cos(function):
        x, w = large()
        with garbage_collector_off(), LiveBytes() as live:
            y = function(x, w)
            grad = torch.ones(SIZE, SIZE)
            torch.autograd.grad(y, (x, w), grad)
        return [bytes_alive for name, bytes_alive in live.steps if name == "cos"]

    got = alive_at_each_cos(region(chain, save_ops(aten.mm), early_stop=early_stop))
    plain = alive_at_each_cos(chain)
    assert len(got) == len(plain) == 6
    assert all(ours <= theirs for ours, theirs in zip(got, plain, strict=True)), (got, plain)
    assert all(before > after for before, after in pairwise(got[1:])), got


class Payload:
    """Something in the arguments that only the region could keep alive."""


class StopHereError(Exception):
    pass


def whole_step(x, w, payload, **options):
    grad_of(checkpoint(lambda x, w, payload: chain(x, w), x, w, payload, **options), x, w)


def dropped_unused(x, w, payload, **options):
    checkpoint(lambda x, w, payload: chain(x, w), x, w, payload, **options)


def retained_and_dropped(x, w, payload, **options):
    y = checkpoint(lambda x, w, payload: chain(x, w), x, w, payload, **options)
    for _ in range(2):
        grad_of(y, x, w, retain_graph=True)


def partial_backward_and_dropped(x, w, payload, **options):
    one, _ = checkpoint(lambda x, w, payload: two_outputs(x, w), x, w, payload, **options)
    grad_of(one, x, w)


def nested_regions(x, w, payload, **options):
    def outer(x, w, payload):
        return checkpoint(lambda x, w, payload: chain(x, w), x.sin(), w, payload, **options).exp() @ w

    grad_of(checkpoint(outer, x, w, payload, **options), x, w)
    grad_of(checkpoint(outer, x, w, payload), x, w)


def second_derivative(x, w, payload, **options):
    y = checkpoint(lambda x, w, payload: chain(x, w), x, w, payload, **options)
    (grad,) = grad_of(y, x, create_graph=True)
    grad_of(grad, x)


def forward_that_fails(x, w, payload, **options):
    def function(x, w, payload):
        chain(x, w)
        raise StopHereError

    with contextlib.suppress(StopHereError):
        checkpoint(function, x, w, payload, **options)


def mutated(x, w, payload, **options):
    def function(x, w, payload):
        y = x @ w
        y.add_(1)
        return y.sin().exp()

    with contextlib.suppress(CheckpointError):
        grad_of(checkpoint(function, x, w, payload, **options), x, w)


@pytest.fixture
def _look_only_at_what_the_test_makes():
    whole_step(*large(), None, policy=save_ops(aten.mm), debug=True)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def objects_of_ours():
    # What is known of a function lives as long as its code, and of an operator for good; both hold nothing.
    ours = [value for value in gc.get_objects() if type(value).__module__.startswith("recollect")]
    return [value for value in ours if type(value).__name__ not in ("Known", "_Kind")]


@pytest.mark.usefixtures("_look_only_at_what_the_test_makes")
@pytest.mark.parametrize(
    "situation",
    [
        whole_step,
        dropped_unused,
        retained_and_dropped,
        partial_backward_and_dropped,
        nested_regions,
        second_derivative,
        forward_that_fails,
        mutated,
    ],
)
def test_nothing_is_left_without_the_garbage_collector(situation):
    policies_to_try = [save_ops(aten.mm), Asked("mm"), save_ops(aten.mm, on_mutation="copy"), offload_ops(aten.mm)]
    x, w = large()
    payload = Payload()
    reference = weakref.ref(payload)
    with garbage_collector_off(), LiveBytes() as live:
        before = len(objects_of_ours())
        for policy in policies_to_try:
            situation(x, w, payload, policy=policy)
            situation(x, w, payload, policy=policy, debug=True)
        assert len(objects_of_ours()) == before
        assert live.now == 0
        del payload
        assert reference() is None


# --- Programs ---

CHANGED_BY_THE_MODULE = {"convolution_and_batch_norm", "dropout_in_place", "rnn_cell"}
PROGRAM_POLICIES = {
    "everything": (lambda: everything, set()),
    "everything offloaded": (lambda: lambda op, ctx: Offload(), set(PROGRAMS)),
    "everything but pointwise": (lambda: policies.save_everything_but_pointwise, CHANGED_BY_THE_MODULE),
    "matmuls": (lambda: policies.save_matmuls, CHANGED_BY_THE_MODULE),
    "at random": (lambda: at_random(random.Random(1), Save(on_mutation="copy")), set()),
}


def at_random(generator, *decisions):
    return lambda op, ctx: generator.choice([None, Recompute(), *decisions])


@early_stops
@pytest.mark.parametrize("policy", PROGRAM_POLICIES)
def test_programs_under_policies_equal_plain_autograd(policy, early_stop):
    make, may_be_refused = PROGRAM_POLICIES[policy]
    wrong = []
    for name, program in PROGRAMS.items():
        expected = run_plainly(program)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # programs that have nothing to keep
            try:
                assert_equal(run(program, remat(policy=make(), early_stop=early_stop)), expected)
            except Exception as error:
                if name not in may_be_refused or "has been mutated" not in str(error):
                    wrong.append(f"{name}: {type(error).__name__}: {error}"[:300])
    assert wrong == [], "\n".join(wrong)


# --- Programs at random ---


def matmul_in_place(a, b):
    y = a @ b
    return y.mul_(0.3).add_(a)


def view_in_place(a, b):
    y = a * 0.5
    y.t()[1].mul_(b.detach()[0])
    return y


def gradient(a, b):
    c = a.detach().requires_grad_()
    (grad,) = torch.autograd.grad((c @ b.tanh()).sin().sum(), c)
    return a * grad


STEPS = {
    "gradient": gradient,
    "matmul": lambda a, b: (a @ b) / 3,
    "sin": lambda a, b: a.sin(),
    "exp": lambda a, b: a.tanh().exp(),
    "sum": lambda a, b: a - b,
    "dropout": lambda a, b: F.dropout(a, 0.5),
    "native dropout": lambda a, b: torch.native_dropout(a, 0.5, True)[0],
    "custom operator": lambda a, b: noisy(a)[0],
    "noise": lambda a, b: a * torch.rand_like(b),
    "view": lambda a, b: a.t(),
    "split": lambda a, b: torch.cat(a.split([1, 2])[::-1]),
    "sort": lambda a, b: a.sort(1)[0] + b.amax(1, keepdim=True),
    "softmax": lambda a, b: a * b.softmax(-1),
    "without grad": lambda a, b: a + b.detach().cos(),
    "matmul in place": matmul_in_place,
    "view in place": view_in_place,
}


@st.composite
def bodies(draw, inputs=2, depth=2):
    """Steps over numbered values: an operator with its operands, or a region with a body of its own."""
    steps, count = [], inputs
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from([*STEPS, *["region", "policy region"] * (4 if depth else 0)]))
        operands = (draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1)))
        if kind in STEPS:
            steps.append((kind, operands))
            count += 1
        else:
            outputs = draw(st.integers(1, 2))
            steps.append((kind, operands, draw(bodies(depth=depth - 1)), outputs))
            count += outputs
    return steps


def run_steps(steps, values, call):
    values = list(values)
    for kind, (a, b), *inside in steps:
        if kind in STEPS:
            values.append(STEPS[kind](values[a], values[b]))
        else:
            values += run_inside(kind, inside, values[a], values[b], call)
    return values


def run_inside(kind, inside, a, b, call):
    steps, outputs = inside
    return call(kind, lambda *given: tuple(run_steps(steps, given, call)[-outputs:]), a, b)


def passes_over(outputs, leaves, how):
    def grads(parts, retain_graph=True):
        loss = loss_of(parts)
        return torch.autograd.grad(loss, leaves, retain_graph=retain_graph, allow_unused=True)

    if how == "once":
        return [grads(outputs, retain_graph=False)]
    if how == "twice":
        return [grads(outputs), grads(outputs, retain_graph=False)]
    return [grads([part]) for part in (*outputs, outputs[0])]


IN_PLACE_STEPS = ("matmul in place", "view in place", "dropout")  # on the CPU an offloaded tensor just stays


def kinds_in(steps):
    for kind, _, *inside in steps:
        yield kind
        yield from kinds_in(inside[0]) if inside else ()


@settings(max_examples=80, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
@given(
    steps=bodies(),
    seed=st.integers(0, 99),
    how=st.sampled_from(["once", "twice", "partially"]),
    early_stop=st.booleans(),
    debug=st.booleans(),
)
def test_random_programs_with_random_decisions_equal_plain_autograd(steps, seed, how, early_stop, debug):
    asked = 0
    with_changes = any(kind in IN_PLACE_STEPS for kind in kinds_in(steps))
    decide = at_random(random.Random(seed), *([Save(on_mutation="copy")] if with_changes else [Save(), Offload()]))

    def policy(op, ctx):
        nonlocal asked
        asked += 1
        return decide(op, ctx)

    def plainly(kind, function, *args):
        return function(*args)

    def in_regions(kind, function, *args):
        chosen = policy if kind == "policy region" else None
        return checkpoint(function, *args, policy=chosen, early_stop=early_stop, debug=debug)

    results = []
    for call in (plainly, in_regions):
        leaves = [leaf(3, 3, dtype=torch.float64, seed=seed) for seed in (0, 1)]
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a policy that happens to keep nothing
            outputs = run_inside("policy region", (steps, 3), *leaves, call)
            asked_in_forward = asked
            grads = passes_over(outputs, leaves, how)
        results.append((outputs, grads, torch.get_rng_state()))
        assert asked == asked_in_forward
    assert_equal(results[1], results[0])


@settings(max_examples=30, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
@given(
    blocks=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4),
    copy=st.booleans(),
    early_stop=st.booleans(),
    outer=st.booleans(),
)
def test_every_second_matmul_of_random_models(blocks, copy, early_stop, outer):
    """Blocks with some matmuls each, in regions or not, all under one counter, perhaps in one more region."""
    policy = EverySecond(decision=Save(on_mutation="copy" if copy else "error"))
    count = sum(matmuls for matmuls, _ in blocks)

    def model(x, *weights, regions):
        weights = list(weights)
        for matmuls, wanted in blocks:
            mine = [weights.pop() for _ in range(matmuls)]
            if regions and wanted:
                x = x + checkpoint(block, x, *mine, policy=policy, early_stop=early_stop)
            else:
                x = x + block(x, *mine)
        return x

    def block(x, *weights):
        for w in weights:
            x = F.dropout((x @ w).sin(), 0.2)
            if copy:
                x = (x @ w).add_(x)
        return x

    def with_regions(*leaves):
        function = functools.partial(model, regions=True)
        return checkpoint(function, *leaves, early_stop=early_stop) if outer else function(*leaves)

    leaves = matrices(1 + count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a block with one matmul, which is not kept
        got, grads, _ = step(with_regions, leaves, 2)
    expected, expected_grads, _ = step(functools.partial(model, regions=False), leaves, 2)
    assert_equal(got, expected)
    assert_equal(grads, expected_grads)
    in_regions = sum(matmuls for matmuls, wanted in blocks if wanted)
    assert policy.calls == in_regions * (2 if copy else 1)
