"""Selective checkpointing: which operators' outputs a region keeps, and what its replay does with them."""

import contextlib
import gc
import inspect
import itertools
import re
import threading
import weakref
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as stock
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

import recollect
from recollect import CheckpointError, checkpoint, dropin, remat
from recollect.dropin import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    GraphExecGroup,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)
from tools import CountOperators, LiveBytes, Once, assert_equal, garbage_collector_off, leaf

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE

MUTATED = "has been mutated"
EXTRA_TIME = "Trying to backward an extra time"
NOT_FOUND = "not found in storage"

early_stops = pytest.mark.parametrize("early_stop", [True, False], ids=["stopping early", "to the end"])


def save_everything(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_SAVE


def recompute_everything(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def offload_everything(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_CPU_OFFLOAD


class EverySecond:
    """Saves every second call of an operator, or of those it is given, counting each pass for itself."""

    def __init__(self, *ops, start=0):
        self.ops, self.start = ops, start
        self.counts = Counter()

    def __call__(self, ctx, op, *args, **kwargs):
        if self.ops and op not in self.ops:
            return RECOMPUTE
        key = (ctx.is_recompute, op)
        self.counts[key] += 1
        return SAVE if (self.counts[key] + self.start) % 2 else RECOMPUTE


class Noting:
    """Takes the verdicts of another policy and notes what it was asked."""

    def __init__(self, policy=recompute_everything):
        self.policy, self.asked = policy, {False: [], True: []}

    def __call__(self, ctx, op, *args, **kwargs):
        self.asked[ctx.is_recompute].append(op)
        return self.policy(ctx, op, *args, **kwargs)

    @property
    def times(self):
        return len(self.asked[False]), len(self.asked[True])


POLICIES = {
    "a list of none": list,
    "recompute everything": lambda: recompute_everything,
    "save everything": lambda: save_everything,
    "offload everything": lambda: offload_everything,
    "save every second": EverySecond,
    "save every other second": lambda: EverySecond(start=1),
}
policies = pytest.mark.parametrize("policy_of", POLICIES.values(), ids=POLICIES)


def selective(policy, *, allow_cache_entry_mutation=False, **options):
    """A way to call a function as a region under `policy`."""

    def context_fn():
        return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=allow_cache_entry_mutation)

    return partial(checkpoint, context_fn=context_fn, **options)


def plainly(function, *args):
    return function(*args)


def step(call, build):
    """One forward and backward of what `build` makes: its outputs, the gradients, the random state after both."""
    function, args, leaves = build()
    torch.manual_seed(5)
    result = call(function, *args)
    outputs = [part for part in tree_leaves(result) if isinstance(part, torch.Tensor) and part.requires_grad]
    torch.autograd.backward(outputs, [output.detach().cos() for output in outputs])
    assert all(part.grad is not None for part in leaves)
    return result, [part.grad for part in leaves], torch.get_rng_state()


def assert_as_plain(call, build):
    assert_equal(step(call, build), step(plainly, build))


def of(function, *shapes):
    """Builds `function` with a leaf for each shape."""

    def build():
        leaves = [leaf(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        return function, leaves, leaves

    return build


def ran_in_backward(y):
    with CountOperators() as operators:
        y.sum().backward()
    return operators.counts


def chain(x):
    return x.sin().tanh().exp().sin()


def names(ops):
    return [op.overloadpacket.__name__ for op in ops]


# --- The names ---


def test_the_policies_have_the_values_of_torchs():
    assert [(policy.name, policy.value) for policy in CheckpointPolicy] == [
        ("MUST_SAVE", 0),
        ("PREFER_SAVE", 1),
        ("MUST_RECOMPUTE", 2),
        ("PREFER_RECOMPUTE", 3),
        ("MUST_CPU_OFFLOAD", 4),
        ("PREFER_CPU_OFFLOAD", 5),
    ]


def test_the_context_of_a_policy_tells_the_pass():
    assert SelectiveCheckpointContext(is_recompute=True).is_recompute is True
    assert SelectiveCheckpointContext(is_recompute=False).is_recompute is False


def test_the_contexts_are_dispatch_modes_of_their_two_classes():
    for given in ([aten.sin.default], save_everything):
        first, second = create_selective_checkpoint_contexts(given)
        assert isinstance(first, _CachingTorchDispatchMode)
        assert isinstance(second, _CachedTorchDispatchMode)
    assert issubclass(_CachingTorchDispatchMode, TorchDispatchMode)
    assert issubclass(_CachedTorchDispatchMode, TorchDispatchMode)


def test_the_names_are_exported():
    assert {
        "CheckpointPolicy",
        "SelectiveCheckpointContext",
        "create_selective_checkpoint_contexts",
        "SAC_IGNORED_OPS",
        "_CachingTorchDispatchMode",
        "_CachedTorchDispatchMode",
    } <= set(dropin.__all__)


# --- Verdicts ---


def test_a_list_saves_these_operators_and_recomputes_the_others():
    x = leaf(4)
    y = selective([aten.tanh.default, aten.exp.default], early_stop=False)(chain, x)
    counts = ran_in_backward(y)
    assert (counts["tanh"], counts["exp"]) == (0, 0)
    assert counts["sin"] == 2
    assert_equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])


SAVING = {
    "MUST_SAVE": True,
    "PREFER_SAVE": True,
    "MUST_RECOMPUTE": False,
    "PREFER_RECOMPUTE": False,
    "MUST_CPU_OFFLOAD": True,
    "PREFER_CPU_OFFLOAD": True,
}
VERDICTS = [
    *(pytest.param(CheckpointPolicy[name], saved, id=name) for name, saved in SAVING.items()),
    *(pytest.param(stock.CheckpointPolicy[name], saved, id=f"torch's {name}") for name, saved in SAVING.items()),
    pytest.param(True, True, id="True"),
    pytest.param(False, False, id="False"),
]


@pytest.mark.parametrize(("verdict", "saved"), VERDICTS)
def test_a_verdict_decides_whether_the_operator_runs_again(verdict, saved):
    def policy(ctx, op, *args, **kwargs):
        return verdict if op is aten.tanh.default else False

    x = leaf(4)
    with LiveBytes() as live:
        y = selective(policy)(lambda x: chain(x).sum(), x)
        kept = live.now - y.nbytes
    assert kept == (x.nbytes if saved else 0)
    counts = ran_in_backward(y)
    assert counts["tanh"] == (0 if saved else 1)
    assert (counts["sin"], counts["exp"]) == (1, 1)
    assert_equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])


def test_the_policy_is_asked_for_every_operator_in_both_passes():
    asked = []

    def policy(ctx, op, *args, **kwargs):
        assert isinstance(ctx, SelectiveCheckpointContext)
        asked.append((ctx.is_recompute, op, args, kwargs))
        return op is aten.add.Tensor

    x = leaf(3)
    sine = x.detach().sin()
    y = selective(policy, early_stop=False)(lambda x: torch.add(x.sin(), x, alpha=2).exp(), x)
    in_forward = asked.copy()
    y.sum().backward()
    in_replay = asked[len(in_forward) :]
    for again, calls in ((False, in_forward), (True, in_replay)):
        assert [call[:2] for call in calls] == [
            (again, aten.sin.default),
            (again, aten.add.Tensor),
            (again, aten.exp.default),
        ]
        _, _, args, kwargs = calls[1]
        assert [tuple(arg.shape) for arg in args] == [(3,), (3,)]
        assert torch.equal(args[0].detach(), sine)
        assert torch.equal(args[1].detach(), x.detach())
        assert kwargs == {"alpha": 2}


@pytest.mark.parametrize("policy", [save_everything, recompute_everything, offload_everything])
@pytest.mark.parametrize(("early_stop", "times"), [(True, (3, 2)), (False, (3, 3))])
def test_rule_5_a_policy_over_three_sines_is_asked_three_times_then_two(policy, early_stop, times):
    noting = Noting(policy)
    y = selective(noting, early_stop=early_stop)(lambda x: x.sin().sin().sin(), leaf(3))
    assert noting.times == (3, 0)
    y.sum().backward()
    assert noting.times == times


def test_a_policy_can_tell_calls_of_one_operator_apart_by_their_arguments():
    def policy(ctx, op, *args, **kwargs):
        return op is aten.sin.default and args[0].shape[0] == 2

    x = leaf(4)
    y = selective(policy)(lambda x: (x[:2].sin() + x[2:].sum().expand(1).sin()).exp().cos(), x)
    counts = ran_in_backward(y)
    # The other one, and one that is the derivative of the cosine.
    assert counts["sin"] == 2


@early_stops
@pytest.mark.parametrize("start", [0, 1])
def test_saved_outputs_come_back_in_order_for_each_operator(early_stop, start):
    def function(x):
        total = 0
        for index in range(1, 6):
            total = total + ((x * index).sin() * (x / index).tanh()).exp()
        return total.sin()

    call = selective(EverySecond(aten.sin.default, aten.tanh.default, start=start), early_stop=early_stop)
    assert_as_plain(call, of(function, (4,)))


def test_operators_that_the_policy_runs_itself_are_not_asked_about():
    def by_value(ctx, op, *args, **kwargs):
        return (args[0].detach().abs() + 1).sum().item() > 6

    noting = Noting(by_value)
    assert_as_plain(selective(noting), of(lambda x: x.sin().exp().tanh().sin(), (4,)))
    assert names(noting.asked[False]) == ["sin", "exp", "tanh", "sin"]


def test_one_policy_serves_many_regions():
    call = selective([aten.tanh.default])

    def model(call, x):
        for _ in range(4):
            x = call(chain, x)
        return x

    x = leaf(4)
    counts = ran_in_backward(model(call, x))
    assert counts["tanh"] == 0
    assert counts["exp"] == 4
    assert_equal(x.grad, torch.autograd.grad(model(plainly, x).sum(), x)[0])


@pytest.mark.parametrize(
    "run",
    [
        checkpoint,
        partial(dropin.checkpoint, use_reentrant=False),
        lambda function, *args, context_fn: remat(function, context_fn=context_fn)(*args),
    ],
    ids=["checkpoint", "dropin", "remat"],
)
def test_every_way_to_make_a_region_takes_the_contexts(run):
    x = leaf(4)
    y = run(chain, x, context_fn=partial(create_selective_checkpoint_contexts, [aten.tanh.default]))
    assert ran_in_backward(y)["tanh"] == 0
    assert_equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
def test_torchs_own_contexts_work_in_a_region():
    x = leaf(4)
    context_fn = partial(stock.create_selective_checkpoint_contexts, [aten.tanh.default])
    y = checkpoint(chain, x, context_fn=context_fn)
    assert ran_in_backward(y)["tanh"] == 0
    assert_equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])


# --- What cannot be a policy ---


@pytest.mark.parametrize("wrong", [torch.sin, "aten::sin", aten, None, 3])
def test_an_entry_that_is_no_operator_is_refused(wrong):
    with pytest.raises(ValueError, match="Expected op in `op_list` to be an OpOverload"):
        create_selective_checkpoint_contexts([aten.sin.default, wrong])


def test_a_packet_is_refused_with_what_to_write_instead():
    with pytest.raises(ValueError, match="Expected op in `op_list` to be an OpOverload") as info:
        create_selective_checkpoint_contexts([aten.mm])
    assert "update the OpOverloadPacket to a specific OpOverload" in str(info.value)
    assert "mm" in str(info.value)


def test_only_a_packet_is_told_so():
    with pytest.raises(ValueError, match="OpOverload") as info:
        create_selective_checkpoint_contexts([torch.sin])
    assert "OpOverloadPacket" not in str(info.value)


@pytest.mark.parametrize("wrong", [None, 3, "mm", (aten.mm.default,), {aten.mm.default}, CheckpointPolicy.MUST_SAVE])
def test_neither_list_nor_callable_is_refused(wrong):
    with pytest.raises(TypeError, match=r"either a function or a list of ops\."):
        create_selective_checkpoint_contexts(wrong)


def test_a_higher_order_operator_may_be_in_the_list():
    create_selective_checkpoint_contexts([torch.ops.higher_order.cond, aten.sin.default])


def test_a_policy_that_says_nothing_of_an_operator_has_it_recomputed(count_operators):
    def policy(ctx, op, *args, **kwargs):
        if op == aten.exp.default:
            return CheckpointPolicy.MUST_SAVE
        return None

    x = leaf(3)
    y = selective(policy)(lambda x: x.sin().exp().cos(), x)
    with count_operators() as operators:
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert (operators.counts["sin"], operators.counts["exp"]) == (1 + 1, 0)  # the replay; once for the gradient of cos
    assert torch.equal(grad, torch.autograd.grad(x.sin().exp().cos().sum(), x)[0])


@pytest.mark.parametrize("wrong", ["save", 0, CheckpointPolicy])
def test_an_answer_that_is_no_verdict_is_refused(wrong):
    with pytest.raises(TypeError, match="CheckpointPolicy"):
        selective(lambda ctx, op, *args, **kwargs: wrong)(chain, leaf(3))


@pytest.mark.parametrize("in_replay", [False, True])
def test_an_exception_of_the_policy_leaves_as_it_is(in_replay):
    error = ZeroDivisionError("policy")

    def policy(ctx, op, *args, **kwargs):
        if ctx.is_recompute is in_replay:
            raise error
        return True

    def run():
        selective(policy)(chain, leaf(3)).sum().backward()

    with pytest.raises(ZeroDivisionError) as info:
        run()
    assert info.value is error


# --- Passes that disagree ---


def saves_only_in(replay):
    def policy(ctx, op, *args, **kwargs):
        return op is aten.tanh.default and ctx.is_recompute is replay

    return policy


@early_stops
def test_saved_in_the_replay_only_is_an_error_that_names_the_operator(early_stop):
    y = selective(saves_only_in(replay=True), early_stop=early_stop)(chain, leaf(3))
    with pytest.raises(RuntimeError, match=NOT_FOUND) as info:
        y.sum().backward()
    assert "aten.tanh" in str(info.value)


@early_stops
def test_saved_in_the_forward_only_is_an_error_that_names_the_operator(early_stop):
    y = selective(saves_only_in(replay=False), early_stop=early_stop)(chain, leaf(3))
    with pytest.raises(RuntimeError) as info:
        y.sum().backward()
    assert "aten.tanh" in str(info.value)


def test_another_call_of_the_operator_saved_than_in_the_forward_is_an_error():
    counts = Counter()

    def policy(ctx, op, *args, **kwargs):
        counts[ctx.is_recompute, op] += 1
        return op is aten.tanh.default and counts[ctx.is_recompute, op] == (2 if ctx.is_recompute else 1)

    y = selective(policy)(lambda x: (x * 2).tanh().exp().tanh().exp().sin(), leaf(3))
    with pytest.raises(RuntimeError, match=r"aten\.tanh"):
        y.sum().backward()


def test_a_counter_that_both_passes_share_is_an_error_and_not_a_wrong_gradient():
    counter = itertools.count()

    def policy(ctx, op, *args, **kwargs):
        return op is aten.mm.default and next(counter) % 2 == 0

    def function(x, v, w):
        return x.mm(v).sin().mm(w).sin().mm(v).sin()

    y = selective(policy)(function, leaf(3, 3), leaf(3, 3, seed=1), leaf(3, 3, seed=2))
    with pytest.raises(RuntimeError, match=r"aten\.mm"):
        y.sum().backward()


def test_one_call_more_of_a_saved_operator_in_the_replay_is_an_error_that_names_it():
    first = Once()

    def function(x):
        y = x.tanh()
        return (y if first() else y.tanh()).exp()

    y = selective([aten.tanh.default], early_stop=False)(function, leaf(3))
    with pytest.raises(RuntimeError, match=NOT_FOUND) as info:
        y.sum().backward()
    assert "aten.tanh" in str(info.value)


def test_an_operator_that_only_the_replay_runs_and_saves_is_an_error_that_names_it():
    first = Once()

    def function(x):
        return (x.sin() if first() else x.cos()).exp()

    y = selective([aten.sin.default, aten.cos.default])(function, leaf(3))
    with pytest.raises(RuntimeError, match=NOT_FOUND) as info:
        y.sum().backward()
    assert "aten.cos" in str(info.value)


def test_a_replay_of_other_shapes_is_still_found_out():
    first = Once()

    def function(x):
        return (x.tanh() if first() else x[:1].tanh()).sin()

    y = selective(recompute_everything)(function, leaf(3))
    with pytest.raises(CheckpointError, match="different metadata"):
        y.sum().backward()


# --- Changed in place ---


torch.library.define("recollect_tests_selective::double_", "(Tensor(a!) x) -> ()")


@torch.library.impl("recollect_tests_selective::double_", "CPU")
def _double(x):
    x.mul_(2)


CHANGES = {}


def changes(kept, by):
    """Adds a function that changes what `kept` gave, on the line that ends in `# here`."""

    def add(function):
        CHANGES[function.__name__] = (function, kept, by)
        return function

    return add


@changes(aten.sin.default, by="mul_")
def method(x):
    y = x.sin()
    z = y.exp()
    y.mul_(2)  # here
    return y.cos() * z


@changes(aten.sin.default, by="add_")
def augmented_assignment(x):
    y = x.sin()
    z = y.exp()
    y += 1  # here
    return y.cos() * z


@changes(aten.sin.default, by="zero_")
def part_of_it(x):
    y = x.sin()
    z = y.exp()
    y[1:].zero_()  # here
    return y.cos() * z


@changes(aten.sin.default, by="copy_")
def assignment(x):
    y = x.sin()
    z = y.exp()
    y[0] = x[1]  # here
    return y.cos() * z


@changes(aten.sin.default, by="mul")
def as_out(x):
    y = x.sin()
    z, d = y.exp(), y.detach()
    torch.mul(d, 2, out=d)  # here
    return y.cos() * z


@changes(aten.sin.default, by="_foreach_mul_")
def one_of_a_list(x):
    y = x.sin()
    z = y.exp()
    torch._foreach_mul_([x.tanh(), y], 2)  # here
    return y.cos() * z


@changes(aten.sin.default, by="double_")
def custom_operator(x):
    y = x.sin()
    z = y.exp()
    torch.ops.recollect_tests_selective.double_(y.detach())  # here
    return y.cos() * z


@changes(aten.max.dim, by="mul_")
def one_of_several_outputs(x):
    values, _ = x.max(0)
    z = values.exp()
    values.mul_(2)  # here
    return values.cos() * z


changes_in_place = pytest.mark.parametrize(("function", "kept", "by"), CHANGES.values(), ids=CHANGES)


@changes_in_place
def test_a_kept_output_changed_in_the_region_is_an_error_with_both_operators_and_the_line(function, kept, by):
    lines, first = inspect.getsourcelines(function)
    line = first + next(index for index, text in enumerate(lines) if text.endswith("# here\n"))
    y = selective([kept])(function, leaf(2, 3))
    with pytest.raises(RuntimeError, match=MUTATED) as info:
        y.sum().backward()
    message = str(info.value)
    assert str(kept.overloadpacket) in message
    assert re.search(rf"\.{by}\b", message)
    assert f"{Path(__file__).name}:{line}" in message


@changes_in_place
def test_what_a_list_leaves_out_may_change(function, kept, by):
    assert_as_plain(selective([aten.cos.default]), of(function, (2, 3)))


@changes_in_place
@pytest.mark.parametrize("hooks", ["that copy", "that do not copy"])
def test_a_change_is_not_missed_under_hooks_around_the_region(function, kept, by, hooks):
    x = leaf(2, 3)
    with save_on_cpu() if hooks == "that do not copy" else saved_tensors_hooks(torch.clone, torch.clone):
        y = selective([kept])(function, x)
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert MUTATED in str(error)  # noqa: PT017
    else:
        assert_equal(x.grad, torch.autograd.grad(function(x).sum(), x)[0])


def test_a_kept_output_changed_after_the_region_is_an_error_that_says_so():
    sine, y = selective([aten.sin.default])(lambda x: ((s := x.sin()), s.cos()), leaf(3))
    with torch.no_grad():
        sine.mul_(2)
    with pytest.raises(RuntimeError, match=MUTATED) as info:
        y.sum().backward()
    assert "aten.sin" in str(info.value)
    assert "after" in str(info.value)
    assert "mul_" not in str(info.value)


def test_a_kept_output_that_was_made_from_nothing_and_changed_after_the_region_is_an_error():
    def function(x):
        noise = torch.rand(4, 4)
        return noise, (x.sin() * noise).exp()

    x = leaf(4, 4)
    noise, y = selective([aten.rand.default])(function, x)
    noise.add_(1)
    with pytest.raises(RuntimeError, match=MUTATED):
        y.sum().backward()


def test_allow_cache_entry_mutation_takes_the_changed_value():
    x = leaf(3)
    call = selective([aten.sin.default], allow_cache_entry_mutation=True, determinism_check="default")
    sine, y = call(lambda x: ((s := x.sin()), s.cos()), x)
    with torch.no_grad():
        sine.mul_(2)
    y.sum().backward()
    x_then = x.detach()
    assert_equal(x.grad, -(x_then.sin() * 2).sin() * x_then.cos())


def test_allow_cache_entry_mutation_goes_for_changes_in_the_region():
    call = selective([aten.sin.default], allow_cache_entry_mutation=True)
    assert_as_plain(call, of(lambda x: x.sin().relu_().exp(), (4,)))


def test_a_kept_output_may_change_if_no_replay_asks_for_it():
    x = leaf(3)
    y = selective([aten.sin.default])(torch.sin, x)
    y.detach().mul_(2)
    y.sum().backward()
    assert_equal(x.grad, x.detach().cos())


MUTATING = {
    "add_": (lambda x: (x * 2).add_(x).sin(), aten.add_.Tensor),
    "relu_": (lambda x: (x * 2).relu_().exp().sin(), aten.relu_.default),
    "copy_": (lambda x: torch.empty_like(x).copy_(x).sin(), aten.copy_.default),
    "fill_": (lambda x: (x * torch.empty_like(x).fill_(3)).sin(), aten.fill_.Scalar),
    "index_put_": (lambda x: (x * 2).index_put_((torch.tensor([0, 2]),), x[:2]).sin(), aten.index_put_.default),
    "transpose_": (lambda x: ((x * 2).view(2, 2).transpose_(0, 1) * x.view(2, 2)).sin(), aten.transpose_.default),
    "two of them": (lambda x: (x * 2).add_(x).add_(x).sin(), aten.add_.Tensor),
    "rrelu": (lambda x: F.rrelu(x * 2, training=True).sin(), aten.rrelu_with_noise.default),
    "dropout": (lambda x: F.dropout(x * 2, 0.5).sin(), aten.bernoulli_.float),
}


@early_stops
@pytest.mark.parametrize(("function", "op"), MUTATING.values(), ids=MUTATING)
def test_an_operator_that_changes_its_input_is_run_again_even_if_saved(function, op, early_stop):
    assert_as_plain(selective([op], early_stop=early_stop), of(function, (4,)))


def test_what_an_operator_run_again_does_is_done_in_the_replay():
    y = selective([aten.add_.Tensor])(lambda x: (x * 2).add_(x).exp().sin(), leaf(4))
    assert ran_in_backward(y)["add_"] == 1


# --- Ignored operators ---


def test_the_ignored_operators_are_detach_and_those_that_read_metadata():
    assert aten.detach.default in SAC_IGNORED_OPS
    assert aten.sym_size.default in SAC_IGNORED_OPS
    assert aten.is_contiguous.default in SAC_IGNORED_OPS
    assert torch.ops.prim.device.default in SAC_IGNORED_OPS
    assert set(SAC_IGNORED_OPS) >= set(stock.SAC_IGNORED_OPS)
    assert aten.sin.default not in SAC_IGNORED_OPS
    assert aten.view.default not in SAC_IGNORED_OPS


@early_stops
def test_a_detach_is_never_asked_about(early_stop):
    def function(x):
        y = x.sin()
        return (y * y.detach()).exp().sin()

    noting = Noting(save_everything)
    assert_as_plain(selective(noting, early_stop=early_stop), of(function, (4,)))
    assert aten.detach.default not in noting.asked[False] + noting.asked[True]
    assert names(noting.asked[False]) == ["sin", "mul", "exp", "sin"]


class Wrapper(torch.Tensor):
    """A tensor inside, every operator unwrapped, run and wrapped again; also asked for its sizes."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            dispatch_sizes_strides_policy="sizes",
            dispatch_device=True,
        )

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


def with_wrapper(call, function):
    x = Wrapper(leaf(4).detach()).requires_grad_()
    y = call(function, x)
    assert type(y) is Wrapper
    y.backward(Wrapper(torch.ones(y.shape)))
    return y.inner.detach(), x.grad.inner


@policies
@early_stops
@pytest.mark.parametrize(
    "function",
    [chain, lambda x: (x.view(2, 2).t() * x.view(2, 2).sin()).exp().sin(), lambda x: x.max(0).values * x.sin()],
    ids=["chain", "views", "several outputs"],
)
def test_tensor_subclasses(policy_of, early_stop, function):
    got = with_wrapper(selective(policy_of(), early_stop=early_stop), function)
    assert_equal(got, with_wrapper(plainly, function))


def test_operators_that_read_the_metadata_of_a_subclass_are_never_asked_about():
    def function(x):
        assert x.shape == (4,)
        assert x.is_contiguous()
        assert x.device.type == "cpu"
        assert (x.numel(), x.dim(), x.stride(), x.storage_offset()) == (4, 1, (1,), 0)
        return x.sin().view(2, 2).exp().sin()

    noting = Noting(save_everything)
    with_wrapper(selective(noting, early_stop=False), function)
    assert names(noting.asked[False]) == names(noting.asked[True]) == ["sin", "view", "exp", "sin"]


def test_a_subclass_without_a_wrapper():
    class Mine(torch.Tensor):
        pass

    def run(call):
        x = leaf(4).detach().as_subclass(Mine).requires_grad_()
        y = call(chain, x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return type(y), y.detach(), grad

    assert_equal(run(selective(save_everything)), run(plainly))


# --- What operators return ---


calls_of = Counter()


@torch.library.custom_op("recollect_tests_selective::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    calls_of["triple"] += 1
    return x * 3


triple.register_autograd(lambda ctx, grad: grad * 3)


@torch.library.custom_op("recollect_tests_selective::count_positive", mutates_args=())
def count_positive(x: torch.Tensor) -> int:
    calls_of["count_positive"] += 1
    return int((x > 0).sum())


@torch.library.custom_op("recollect_tests_selective::look_at", mutates_args=())
def look_at(x: torch.Tensor) -> None:
    calls_of["look_at"] += 1


@torch.library.custom_op("recollect_tests_selective::accumulate", mutates_args={"total"})
def accumulate(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    calls_of["accumulate"] += 1
    total += x
    return x * 2


@torch.library.custom_op("recollect_tests_selective::halves", mutates_args=())
def halves(x: torch.Tensor) -> list[torch.Tensor]:
    calls_of["halves"] += 1
    return [part.clone() for part in x.chunk(2)]


halves.register_autograd(lambda ctx, grads: torch.cat(grads))


@pytest.fixture(autouse=True)
def _no_calls_yet():
    calls_of.clear()


PROGRAMS = {}


def program(*shapes):
    def add(function):
        PROGRAMS[function.__name__.strip("_")] = of(function, *shapes)
        return function

    return add


@program((4,))
def _chain(x):
    return chain(x)


@program((2, 3), (3, 4), (4, 2))
def two_matmuls(x, v, w):
    return (x @ v).relu() @ w


@program((4, 3), (3,), (3,))
def layer_norm(x, weight, bias):
    return F.layer_norm(x * 2, (3,), weight, bias).sin()


@program((4, 3))
def maximum_along_a_dimension(x):
    values, indices = (x * 2).max(1)
    return values.sin() * indices


@program((4, 3))
def the_largest_and_the_order(x):
    values, indices = x.exp().topk(2)
    ordered, order = x.sin().sort(0)
    return (values.sum() * ordered).exp(), indices, order


@program((6, 2))
def split_and_unbind(x):
    a, b, c = (x * 2).split(2)
    d, e = (x * 3).unbind(1)
    return (a * b.sin() + c).exp(), (d * e).sin()


@program((2, 6))
def views(x):
    y = x.sin()
    return (y.view(3, 4).t()[1:, ::2] * y.view(-1)[:1].expand(3, 2)).exp().reshape(-1)


@program((4,))
def views_of_inputs(x):
    return (x.view(2, 2).t() * x.unsqueeze(0).expand(2, 4)[:, :2]).exp()


@program((4,))
def views_of_what_needs_no_grad(x):
    mask = torch.ones(2, 2)
    return (mask.view(-1) * x).exp(), mask.t(), mask[0]


@program((4,))
def a_view_as_output(x):
    y = x.sin()
    return y.view(2, 2), y.exp()


@program((4,))
def constants(x):
    return (x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.tensor(3.0)).sin().exp() * torch.zeros(4).cos()


@program((4,))
def complex_numbers(x):
    y = torch.view_as_complex((x * 2).view(2, 2))
    return torch.view_as_real(y * y.conj()).exp(), torch.fft.fft(x).abs()


@program((4,), (4,))
def lists_of_tensors(x, y):
    a, b = torch._foreach_mul([x, y], 2.0)
    c, d = torch._foreach_exp([a, b])
    return (c * d).sin()


@program((4,))
def numbers_and_truths(x):
    y = x.sin()
    if (y.sum() > 100).item() or torch.equal(y, x):
        y = y * 2
    return (y * y.detach().max().item()).exp().sin()


@program((4,))
def masks_and_indices(x):
    chosen = x[x > x.median()]
    return (chosen.sin() * chosen.numel()).exp(), x.nonzero(), x[torch.tensor([2, 0, 2])].exp()


@program((5,))
def nothing_at_all(x):
    return x[:0].sin().exp(), x.exp().sin()


@program((4,))
def without_grad_inside(x):
    with torch.no_grad():
        scale = x.exp().sum()
    return (x.sin() * scale).exp()


@program((2, 3, 4))
def attention(x):
    q, k, v = x.sin(), x.cos(), x.tanh()
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0].exp().sin()


@program((4, 4))
def decomposition(x):
    values, vectors = torch.linalg.eigh(x @ x.t() + torch.eye(4))
    return values.exp().sin(), (vectors.abs() * values).sin()


@program((4, 4), (4, 2))
def sparse(x, w):
    return torch.sparse.mm((x * 2).to_sparse(), w).sin()


@program((3, 4))
def vectorised(x):
    return torch.vmap(lambda row: (row.sin() * row.sum()).exp())(x).sin()


@program((4,))
def custom_operators(x):
    y = triple(x.sin())
    look_at(y)
    a, b = halves(y.exp())
    return (a * b * count_positive(x)).sin()


OFFSETS = torch.tensor([0, 2, 6])
torch.nested.nested_tensor_from_jagged(torch.zeros(6, 1), OFFSETS)  # the first one makes tensors for all later ones


@program((6, 3))
def nested_tensors(x):
    y = torch.nested.nested_tensor_from_jagged(x.sin(), OFFSETS)
    z = torch.nested.as_nested_tensor([x[:2].sin(), x[2:]], layout=torch.strided)
    return (y * y * y).exp().values().sin(), torch.nested.to_padded_tensor(z * 2, 0.0).exp()


@program((4,))
def inference_inside(x):
    with torch.inference_mode():
        scale = x.exp().sum().item()
    return (x * scale).sin().exp()


@program((4,))
def other_devices(x):
    assert torch.empty(3, device="meta").sin().exp().is_meta
    return x.sin().exp()


@program((4,))
def tangents(x):
    return torch.func.jvp(torch.sin, (x,), (torch.ones(4),))[1].exp()


@program((4,))
def hooks_of_its_own(x):
    with save_on_cpu():
        y = x.sin().exp()
    return y.tanh().sin()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, y.sin())
        return y

    @staticmethod
    def backward(ctx, grad):
        x, sine = ctx.saved_tensors
        return 2 * x * grad * sine


@program((4,))
def a_function_of_autograd(x):
    return Square.apply(x.sin()).exp().sin()


@policies
@pytest.mark.parametrize("build", PROGRAMS.values(), ids=PROGRAMS)
def test_gradients_are_plain_autograds(build, policy_of):
    assert_as_plain(selective(policy_of()), build)


@pytest.mark.parametrize("policy", [save_everything, recompute_everything])
@pytest.mark.parametrize("build", PROGRAMS.values(), ids=PROGRAMS)
def test_gradients_are_plain_autograds_without_early_stop(build, policy):
    assert_as_plain(selective(policy, early_stop=False), build)


@pytest.mark.parametrize("build", PROGRAMS.values(), ids=PROGRAMS)
def test_the_policy_is_asked_the_same_in_the_replay_as_in_the_forward(build):
    function, args, _ = build()
    noting = Noting(EverySecond())
    outputs = tree_leaves(selective(noting, early_stop=False)(function, *args))
    next(output for output in outputs if output.requires_grad).sum().backward()
    assert noting.asked[False] == noting.asked[True]


def test_a_saved_custom_operator_is_not_run_again():
    op = torch.ops.recollect_tests_selective.triple.default
    build = of(lambda x: triple(triple(x.sin())).exp().sin(), (4,))
    assert_as_plain(selective([op]), build)
    assert calls_of["triple"] == 4, "two in this step and two in the plain one"


def test_a_saved_operator_that_gives_a_number_or_nothing_is_not_run_again():
    number = torch.ops.recollect_tests_selective.count_positive.default
    nothing = torch.ops.recollect_tests_selective.look_at.default

    def function(x):
        assert look_at(x) is None
        count = count_positive(x)
        assert type(count) is int
        return (x.sin() * count).exp().sin()

    selective([number, nothing])(function, leaf(4)).sum().backward()
    assert calls_of == {"look_at": 1, "count_positive": 1}
    assert_as_plain(selective([number, nothing]), of(function, (4,)))


def test_a_saved_custom_operator_that_changes_an_argument_is_run_again():
    op = torch.ops.recollect_tests_selective.accumulate.default

    def function(x):
        total = torch.zeros(4)
        y = accumulate(x.detach().sin(), total)
        return (x * y * total).exp().sin()

    selective([op])(function, leaf(4)).sum().backward()
    assert calls_of["accumulate"] == 2
    assert_as_plain(selective([op]), of(function, (4,)))


@pytest.mark.parametrize(
    ("op", "name", "build"),
    [
        (aten.native_layer_norm.default, "native_layer_norm", PROGRAMS["layer_norm"]),
        (aten.max.dim, "max", PROGRAMS["maximum_along_a_dimension"]),
        (aten.topk.default, "topk", PROGRAMS["the_largest_and_the_order"]),
        (aten._foreach_exp.default, "_foreach_exp", PROGRAMS["lists_of_tensors"]),
        (aten._local_scalar_dense.default, "_local_scalar_dense", PROGRAMS["numbers_and_truths"]),
        (aten.equal.default, "equal", PROGRAMS["numbers_and_truths"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operators_of_every_kind_of_result_are_saved(op, name, build):
    assert_as_plain(selective([op]), build)
    below = []

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            below.append(func)
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watched(mode):
        with Below(), mode:
            yield

    def context_fn():
        first, second = create_selective_checkpoint_contexts([op])
        return first, watched(second)

    function, args, _ = build()
    output = tree_leaves(checkpoint(function, *args, context_fn=context_fn, early_stop=False))[0]
    output.sum().backward()
    assert below
    assert op not in below


@pytest.mark.parametrize(
    ("op", "build"),
    [(aten.split.Tensor, PROGRAMS["split_and_unbind"]), (aten.view.default, PROGRAMS["views"])],
    ids=["split", "view"],
)
def test_a_view_with_a_save_verdict_is_run_again_and_stays_a_view(op, build):
    assert_as_plain(selective([op]), build)


def test_the_base_of_a_view_with_a_save_verdict_may_be_changed():
    def function(x):
        y = x.sin()
        view = y.view(-1)
        z = view.exp()
        y.mul_(2)
        return view.cos() * z

    assert_as_plain(selective([aten.view.default]), of(function, (2, 3)))


def test_saved_statistics_of_a_batch_norm_are_updated_once():
    def build():
        norm = nn.BatchNorm1d(3)
        x = leaf(4, 3)
        return lambda x: norm(x * 2).sin(), (x,), [x, *norm.parameters()]

    assert_as_plain(selective([aten.native_batch_norm.default]), build)
    norm, once = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = leaf(4, 3)
    selective([aten.native_batch_norm.default])(lambda x: norm(x * 2).sin(), x).sum().backward()
    once(x * 2)
    assert_equal(norm.running_mean, once.running_mean)
    assert_equal(norm.running_var, once.running_var)


# --- Higher-order operators ---


class _Twice(torch._ops.HigherOrderOperator):
    def __init__(self):
        super().__init__("recollect_tests_twice")

    def __call__(self, function, x):
        return super().__call__(function, x)


twice = _Twice()


@twice.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
def _twice(function, x):
    calls_of["twice"] += 1
    return function(function(x))


class _TwiceWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch._C._AutoDispatchBelowAutograd():
            return twice(function, x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.function(ctx.function(x))
        return None, torch.autograd.grad(y, x, grad)[0]


twice.py_autograd_impl(_TwiceWithGrad.apply)


@pytest.mark.parametrize(("policy", "calls"), [([twice], 1), (recompute_everything, 2)], ids=["saved", "recomputed"])
def test_higher_order_operators_reach_the_policy(policy, calls):
    def function(x):
        return twice(torch.sin, x.exp()).tanh().sin()

    asked = []

    def asking(ctx, op, *args, **kwargs):
        asked.append((ctx.is_recompute, op))
        return op in policy if isinstance(policy, list) else policy(ctx, op, *args, **kwargs)

    selective(asking)(function, leaf(3)).sum().backward()
    assert (False, twice) in asked
    assert (True, twice) in asked
    assert calls_of["twice"] == calls
    assert_as_plain(selective(policy), of(function, (3,)))


@policies
def test_a_condition(policy_of):
    def function(x):
        y = torch.ops.higher_order.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x.exp(),))
        return y[0].tanh().sin()

    assert_as_plain(selective(policy_of()), of(function, (3,)))


def test_a_saved_condition_is_not_run_again():
    ran = []

    def branch(x):
        ran.append(x.shape)
        return (x.sin(),)

    def function(x):
        return torch.ops.higher_order.cond(torch.tensor(True), branch, branch, (x.detach(),))[0] * x.exp()

    selective([torch.ops.higher_order.cond], early_stop=False)(function, leaf(3)).sum().backward()
    assert len(ran) == 1


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_flex_attention(saved, differentiated):
    op = torch.ops.higher_order.flex_attention
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu").as_tuple()

    def double(score, b, h, i, j):
        calls_of["score"] += 1
        return score * 2

    def function(*inputs):
        given = [x.sin() if differentiated else x.detach().sin() for x in inputs]
        y = op(*given, double, mask, 0.5, {})[0]
        return (y * inputs[0] * inputs[1] * inputs[2]).exp().sin()

    build = of(function, *[(1, 1, 16, 8)] * 3)
    assert_as_plain(selective([op] if saved else []), build)
    if not differentiated:  # otherwise it is also called to be traced
        assert calls_of["score"] == (2 if saved else 3), "one of them in the plain step"


# --- Random numbers ---


NOISES = {
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout": lambda x: F.dropout(x, 0.5),
    "randperm": lambda x: torch.randperm(x.numel()).float(),
    "multinomial": lambda x: torch.multinomial(torch.ones(4), 4).float(),
}


class EverySecondRandom(EverySecond):
    def __call__(self, ctx, op, *args, **kwargs):
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return RECOMPUTE
        return super().__call__(ctx, op, *args, **kwargs)


@early_stops
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_kept_random_operator_leaves_the_others_their_numbers(noise, start, early_stop):
    def function(x):
        for _ in range(3):
            x = (x * noise(x) + noise(x)).sin()
        return F.dropout(x, 0.25).exp()

    assert_as_plain(selective(EverySecondRandom(start=start), early_stop=early_stop), of(function, (4,)))


def test_a_kept_random_operator_leaves_the_region_after_it_its_numbers():
    def build():
        x = leaf(4)

        def function(x):
            return (x * torch.rand_like(x)).sin().exp()

        return lambda x, call: call(function, call(function, x)), (x,), [x]

    def run(call):
        return step(lambda function, x: function(x, call), build)

    assert_equal(run(selective([aten.rand_like.default])), run(plainly))


# --- Autocast ---


TO_COPY = aten._to_copy.default
AUTOCAST_POLICIES = {
    "save everything": lambda: save_everything,
    "save the casts": lambda: [TO_COPY],
    "save the products": lambda: [aten.mm.default],
    "save every second product": lambda: EverySecond(aten.mm.default),
    "save every second": EverySecond,
}


@early_stops
@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("policy_of", AUTOCAST_POLICIES.values(), ids=AUTOCAST_POLICIES)
def test_weights_shared_under_autocast(policy_of, cache_enabled, early_stop):
    def run(call):
        x, w, v = leaf(3, 3), leaf(3, 3, seed=1), leaf(3, 3, seed=2)

        def block(x, w, v):
            return x.exp().mm(w).sin().mm(v).sin().mm(w).tanh()

        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
            y = x.mm(v)
            for _ in range(3):
                y = call(block, y, w, v)
        y.float().sum().backward()
        return y, [x.grad, w.grad, v.grad]

    # One policy per region: those that count do it per region.
    assert_equal(run(lambda *args: selective(policy_of(), early_stop=early_stop)(*args)), run(plainly))


def test_the_cast_of_a_leaf_is_not_asked_about_and_that_of_an_activation_is():
    def block(x, w):
        return x.exp().mm(w)

    noting = Noting(save_everything)
    with torch.autocast("cpu", torch.bfloat16):
        y = selective(noting, early_stop=False)(block, leaf(3, 3), leaf(3, 3, seed=1))
    y.sum().backward()
    assert names(noting.asked[False]) == names(noting.asked[True]) == ["exp", "_to_copy", "mm"]


def test_autocast_inside_the_region():
    def block(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = x.exp().mm(w).sin().mm(w)
        return y.float().sin()

    assert_as_plain(selective(save_everything), of(block, (3, 3), (3, 3)))


# --- How much is kept and for how long ---


def kept_by(call, function=chain):
    """Bytes that are alive after the forward besides its result."""
    x = leaf(1000)
    with LiveBytes() as live:
        y = call(lambda x: function(x).sum(), x)
        return (live.now - y.nbytes) / x.nbytes


def test_recomputing_everything_is_plain_checkpointing():
    y, plain = selective(recompute_everything)(chain, leaf(4)), checkpoint(chain, leaf(4))
    assert ran_in_backward(y) == ran_in_backward(plain)
    assert kept_by(selective(recompute_everything)) == kept_by(checkpoint) == 0


def test_recomputing_everything_allows_a_second_backward_like_plain_checkpointing():
    x = leaf(4)
    y = selective(recompute_everything)(chain, x).sum()
    y.backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.backward()
    assert_equal(x.grad, first)


def test_saving_everything_runs_nothing_again_and_keeps_more_than_no_checkpointing():
    x = leaf(4)
    counts = ran_in_backward(selective(save_everything)(chain, x))
    assert (counts["sin"], counts["tanh"], counts["exp"]) == (0, 0, 0)
    function = lambda x: (x * 2 + 1).sin().exp()  # noqa: E731
    assert kept_by(plainly, function) == 2
    assert kept_by(selective(save_everything), function) == 4


def test_a_list_keeps_the_outputs_of_its_operators_and_nothing_else():
    assert kept_by(selective([aten.tanh.default])) == 1
    assert kept_by(selective([aten.tanh.default, aten.exp.default])) == 2
    assert kept_by(selective([aten.tanh.default], debug=True)) == 1


def first_kept(mode, op):
    return StorageWeakRef(mode.storage[op][0].val.untyped_storage())


@pytest.mark.parametrize("policy", [save_everything, offload_everything, [aten.sin.default]])
def test_an_entry_is_freed_when_the_replay_has_used_it(policy):
    modes = create_selective_checkpoint_contexts(policy)
    kept, alive = [], []

    def function(x):
        y = x.sin() + 1
        alive.extend(not reference.expired() for reference in kept)
        return y.exp().sin()

    y = checkpoint(function, leaf(1000), context_fn=lambda: modes)
    kept.append(first_kept(modes[0], aten.sin.default))
    assert not kept[0].expired()
    alive.clear()
    y.sum().backward()
    assert alive == [False]


def test_all_entries_are_freed_when_the_backward_has_ended():
    x = leaf(1000)
    with LiveBytes() as live:
        y = selective(save_everything)(lambda x: chain(x).sum(), x)
        y.backward()
        x.grad = None
        assert live.now == y.nbytes


def test_entries_that_a_stopped_replay_did_not_reach_are_freed_with_the_graph():
    x = leaf(1000)
    with LiveBytes() as live:
        y = selective(save_everything)(lambda x: (x.sin() * 2 + 1).sum(), x)
        assert live.now == 3 * x.nbytes + y.nbytes
        y.backward()
        x.grad = None
        assert live.now == y.nbytes


def test_entries_are_freed_when_the_graph_dies_unused():
    x = leaf(1000)
    with LiveBytes() as live:
        y = selective(save_everything)(lambda x: chain(x).sum(), x)
        assert live.now == 4 * x.nbytes + y.nbytes
        del y
        assert live.now == 0


def test_entries_are_freed_when_the_forward_fails():
    def function(x):
        chain(x)
        raise ZeroDivisionError

    x = leaf(1000)
    with LiveBytes() as live:
        with contextlib.suppress(ZeroDivisionError):
            selective(save_everything)(function, x)
        assert live.now == 0


SITUATIONS = {}


def situation(function):
    SITUATIONS[function.__name__.replace("_", " ")] = function
    return function


@situation
def a_whole_step(run):
    run(chain, save_everything).backward()


@situation
def a_whole_step_to_the_end(run):
    run(chain, EverySecond(), early_stop=False).backward()


@situation
def debug(run):
    run(chain, EverySecond(), debug=True).backward()


@situation
def dropped_without_backward(run):
    run(chain, save_everything)


@situation
def offloaded(run):
    run(chain, offload_everything).backward()


@situation
def dropped_while_offloaded(run):
    run(chain, offload_everything)


@situation
def an_unused_entry(run):
    run(lambda x: x.sin() * 2, save_everything).backward()


@situation
def hooks_around_it(run):
    with saved_tensors_hooks(lambda tensor: tensor.detach() + 0, lambda tensor: tensor):
        y = run(chain, save_everything)
    y.backward()


@situation
def inside_another_region(run):
    checkpoint(lambda: run(chain, save_everything)).backward()


@situation
def inside_another_region_dropped(run):
    checkpoint(lambda: run(chain, save_everything))


@situation
def an_extra_backward(run):
    y = run(chain, save_everything)
    y.backward(retain_graph=True)
    with contextlib.suppress(RuntimeError):
        y.backward()


@situation
def passes_that_disagree(run):
    for replay in (True, False):
        y = run(chain, saves_only_in(replay=replay))
        with contextlib.suppress(RuntimeError):
            y.backward()


@situation
def a_changed_entry(run):
    y = run(method, save_everything)
    with contextlib.suppress(RuntimeError):
        y.backward()


@situation
def an_error_in_the_forward(run):
    def function(x):
        chain(x)
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        run(function, save_everything)


@situation
def an_error_in_the_replay(run):
    first = Once()

    def function(x):
        y = chain(x)
        if first():
            return y
        raise ZeroDivisionError

    y = run(function, save_everything, early_stop=False)
    with contextlib.suppress(ZeroDivisionError):
        y.backward()


@situation
def random_numbers(run):
    run(lambda x: F.dropout(x * torch.rand_like(x), 0.5).sin(), [aten.rand_like.default]).backward()


@pytest.fixture(scope="module")
def _older_objects_out_of_sight():
    """The collector looks only at what the tests make, which is much faster."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_older_objects_out_of_sight")
@pytest.mark.parametrize("work", SITUATIONS.values(), ids=SITUATIONS)
def test_nothing_is_left_without_the_garbage_collector(work):
    references = []

    def run(function, policy, **options):
        modes = create_selective_checkpoint_contexts(policy)
        references.extend(weakref.ref(mode) for mode in modes)
        x = leaf(100)
        references.append(weakref.ref(x))
        return checkpoint(lambda x: function(x).sum(), x, context_fn=lambda: modes, **options)

    with garbage_collector_off():
        with LiveBytes() as live:
            work(run)
            assert live.now == 0
        assert references
        assert all(reference() is None for reference in references)


# --- Several backwards ---


@early_stops
@pytest.mark.parametrize("op", [aten.tanh.default, aten.exp.default, aten.sin.default], ids=str)
def test_a_second_backward_is_an_error(op, early_stop):
    """Also if the first one stopped before the last entry of an operator, as with the sine here."""
    y = selective([op], early_stop=early_stop)(chain, leaf(3)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=EXTRA_TIME):
        y.backward()


def test_a_second_backward_without_the_graph_is_autograds_error():
    y = selective([aten.tanh.default])(chain, leaf(3)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.backward()


def test_a_second_backward_of_another_output_is_an_error():
    a, b = selective([aten.tanh.default])(lambda x: (x.tanh().exp(), x.tanh().sin()), leaf(3))
    a.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=EXTRA_TIME):
        b.sum().backward()


def test_a_second_backward_is_an_error_if_the_first_left_entries_unused():
    a, b = selective([aten.tanh.default])(lambda x: (x.tanh().exp(), (x * 2).tanh().sin()), leaf(3))
    del b
    a.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=EXTRA_TIME):
        a.sum().backward()


def test_a_double_backward_is_a_second_one():
    x = leaf(3)
    y = selective([aten.tanh.default])(chain, x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert_equal(grad.detach(), torch.autograd.grad(chain(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match=EXTRA_TIME):
        grad.sum().backward()


def test_several_backwards_in_a_group_share_the_cache():
    x = leaf(3)
    calls = []

    def function(x):
        calls.append(True)
        return x.tanh().exp(), x.tanh().sin()

    a, b = selective([aten.tanh.default])(function, x)
    with CountOperators() as operators, GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert len(calls) == 2
    assert operators.counts["tanh"] == 0
    expected = x.detach().requires_grad_()
    a, b = function(expected)
    a.sum().backward()
    b.sum().backward()
    assert_equal(x.grad, expected.grad)


def test_several_calls_of_autograd_over_several_regions():
    x = leaf(3)
    call = selective([aten.tanh.default])
    parts = [call(chain, x * index) for index in range(3)]
    grads = [torch.autograd.grad(part.sum(), x)[0] for part in reversed(parts)]
    assert_equal(grads, [torch.autograd.grad(chain(x * index).sum(), x)[0] for index in (2, 1, 0)])


@pytest.mark.parametrize("which", [0, 1])
def test_a_backward_for_some_inputs_only(which):
    def function(x, w):
        return x.mm(w).tanh().mm(w).sin()

    tensors = leaf(2, 2), leaf(2, 2, seed=1)
    y = selective([aten.mm.default, aten.tanh.default])(function, *tensors)
    y.sum().backward(inputs=[tensors[which]])
    assert_equal(tensors[which].grad, torch.autograd.grad(function(*tensors).sum(), tensors[which])[0])
    assert tensors[1 - which].grad is None


def grad_inside(x):
    z = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(z.sin().exp().sum(), z)
    return (x * grad).tanh().sin()


def test_a_backward_inside_the_region():
    assert_as_plain(selective([aten.tanh.default]), of(grad_inside, (4,)))


@early_stops
@pytest.mark.parametrize("policy", [[aten.sin.default], [aten.exp.default], save_everything], ids=["sin", "exp", "all"])
def test_a_backward_inside_the_region_that_needs_the_cache_is_the_one_that_is_allowed(policy, early_stop):
    y = selective(policy, early_stop=early_stop)(grad_inside, leaf(4))
    with pytest.raises(RuntimeError, match=EXTRA_TIME):
        y.sum().backward()


def test_a_backward_in_another_thread():
    x = leaf(4)
    y = selective([aten.tanh.default])(chain, x).sum()
    counts = []
    thread = threading.Thread(target=lambda: counts.append(ran_in_backward(y)))
    thread.start()
    thread.join()
    assert counts[0]["tanh"] == 0
    assert_equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])


# --- The modes ---


def test_the_modes_are_innermost_while_the_function_runs():
    modes = create_selective_checkpoint_contexts([aten.tanh.default])
    innermost = []

    def function(x):
        innermost.append(_get_current_dispatch_mode_stack()[-1])
        return chain(x)

    with CountOperators():
        y = checkpoint(function, leaf(3), context_fn=lambda: modes, determinism_check="default")
    with CountOperators():
        y.sum().backward()
    assert innermost == list(modes)


def test_the_storage_maps_an_operator_to_its_entries_in_order():
    first, second = create_selective_checkpoint_contexts([aten.sin.default, aten.tanh.default])
    made = []

    def function(x):
        made[:] = [x.sin(), x.cos(), x.tanh(), (x * 2).sin()]
        return sum(made).exp()

    y = checkpoint(function, leaf(3), context_fn=lambda: (first, second))
    for mode in (first, second):
        entries = mode.storage[aten.sin.default]
        assert len(entries) == 2
        assert len(mode.storage[aten.tanh.default]) == 1
        assert not mode.storage.get(aten.cos.default)
        for entry, expected in ((entries[0], made[0]), (entries[1], made[3])):
            assert_equal(entry.val, expected.detach())
            assert entry.val.grad_fn is None
            assert entry.val.data_ptr() == expected.data_ptr()
    y.sum().backward()


def test_the_storage_holds_a_tuple_of_entries_for_several_outputs():
    first, second = create_selective_checkpoint_contexts([aten.native_layer_norm.default])
    y = checkpoint(lambda x: F.layer_norm(x, (3,)).sin(), leaf(2, 3), context_fn=lambda: (first, second))
    [entries] = first.storage[aten.native_layer_norm.default]
    assert isinstance(entries, tuple)
    assert_equal([entry.val.shape for entry in entries], [torch.Size([2, 3]), torch.Size([2, 1]), torch.Size([2, 1])])
    y.sum().backward()


def test_the_storage_is_empty_when_the_replay_has_used_it():
    modes = create_selective_checkpoint_contexts([aten.tanh.default])
    checkpoint(chain, leaf(3), context_fn=lambda: modes).sum().backward()
    for mode in modes:
        assert all(not entries for entries in mode.storage.values())


class NotingForward(_CachingTorchDispatchMode):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


class NotingReplay(_CachedTorchDispatchMode):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


def policy_for_tanh(ctx, op, *args, **kwargs):
    return op is aten.tanh.default


@early_stops
@pytest.mark.parametrize("policy", [policy_for_tanh, recompute_everything, save_everything])
def test_subclasses_of_the_modes(policy, early_stop):
    made = []

    def context_fn():
        storage = defaultdict(list)
        made.append((NotingForward(policy, storage), NotingReplay(policy, storage, False)))
        return made[-1]

    assert_as_plain(partial(checkpoint, context_fn=context_fn, early_stop=early_stop), of(chain, (4,)))
    [(first, second)] = made
    assert names(first.seen) == ["sin", "tanh", "exp", "sin"], "the function's own operators and nothing of ours"
    in_replay = [name for name in names(second.seen) if name != "detach"]
    assert in_replay == ["sin", "tanh", "exp", "sin"][: 3 if early_stop else 4]
    assert names(second.seen).count("detach") == 4, "one for each tensor saved"


@pytest.mark.parametrize("how", ["drop-in", "native"])
def test_a_mode_around_backward_sees_the_hooks_at_work(how):
    """A detach for each saved tensor at least. Where there are none but the engine's own modes, nobody is shown it."""
    context_fn = partial(create_selective_checkpoint_contexts, [aten.tanh.default])
    options = {"context_fn": context_fn} if how == "drop-in" else {"policy": recollect.save_ops(aten.tanh)}
    y = checkpoint(chain, leaf(4), **options)
    with CountOperators() as around:
        y.sum().backward()
    assert around.counts["detach"] >= 4


@pytest.mark.parametrize("how", ["drop-in", "native"])
def test_dispatch_modes_work_after_a_replay_that_was_stopped(how):
    """The stop is raised where modes are switched off for the hook."""
    context_fn = partial(create_selective_checkpoint_contexts, [aten.tanh.default])
    options = {"context_fn": context_fn} if how == "drop-in" else {"policy": recollect.save_ops(aten.tanh)}
    seen = []

    def caught(x):  # user code that sees the stop pass by
        try:
            return chain(x)
        finally:
            with CountOperators() as counted:
                torch.ones(2).sin()
            seen.append(counted.counts["sin"])

    checkpoint(caught, leaf(4), **options).sum().backward()
    assert seen == [1, 1]
    with CountOperators() as counted:
        torch.ones(2).sin()
    assert counted.counts["sin"] == 1


@pytest.mark.parametrize("replay", [False, True])
def test_passes_that_disagree_are_found_out_over_a_storage_of_the_user(replay):
    storage, policy = defaultdict(list), saves_only_in(replay=replay)
    modes = NotingForward(policy, storage), NotingReplay(policy, storage, False)
    y = checkpoint(chain, leaf(3), context_fn=lambda: modes)
    with pytest.raises(RuntimeError, match=r"aten\.tanh"):
        y.sum().backward()


def test_a_subclass_that_decides_by_itself():
    """Operators that it keeps from the policy are not asked about, in both passes."""

    class Passing:
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.exp.default:
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    class Forward(Passing, _CachingTorchDispatchMode):
        pass

    class Replay(Passing, _CachedTorchDispatchMode):
        pass

    noting = Noting(save_everything)
    storage = defaultdict(list)
    modes = Forward(noting, storage), Replay(noting, storage, False)
    x = leaf(4)
    y = checkpoint(chain, x, context_fn=lambda: modes)
    assert ran_in_backward(y)["exp"] == 1
    assert aten.exp.default not in noting.asked[False] + noting.asked[True]
    assert_equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])


def test_the_modes_inside_managers_of_the_user():
    entered = []

    @contextlib.contextmanager
    def around(mode, name):
        with mode:
            entered.append(name)
            yield

    def context_fn():
        first, second = create_selective_checkpoint_contexts([aten.tanh.default])
        return around(first, "forward"), around(second, "replay")

    x = leaf(4)
    y = checkpoint(chain, x, context_fn=context_fn)
    assert ran_in_backward(y)["tanh"] == 0
    assert entered == ["forward", "replay"]
    assert_equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])


def test_under_modes_of_the_user_every_operator_is_seen_once():
    x = leaf(4)
    with CountOperators() as operators:
        y = selective(save_everything)(chain, x)
    assert [name for name in operators.names if name != "detach"] == ["sin", "tanh", "exp", "sin"]
    assert_equal(y, chain(x))


# --- Calling context_fn ---


def test_context_fn_is_called_once_for_each_region():
    calls = []

    def context_fn():
        calls.append(True)
        return create_selective_checkpoint_contexts([aten.tanh.default])

    x = leaf(3)
    for count in (1, 2, 3):
        y = checkpoint(chain, x, context_fn=context_fn)
        assert len(calls) == count
        y.sum().backward()
        assert len(calls) == count


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_asked_and_nothing_kept(mode):
    noting = Noting(save_everything)
    x = leaf(1000)
    with mode(), LiveBytes() as live:
        y = selective(noting)(chain, x)
        assert live.now == y.nbytes
    assert noting.times == (0, 0)
    assert torch.equal(y, chain(x))


def test_a_function_without_anything_to_save():
    x = torch.ones(3)
    y = selective(save_everything)(chain, x)
    assert not y.requires_grad
    assert torch.equal(y, chain(x))


@pytest.mark.parametrize("in_replay", [False, True])
def test_an_exception_of_the_function_leaves_as_it_is(in_replay):
    first, error = Once(), ZeroDivisionError("function")

    def function(x):
        y = chain(x)
        if first() is not in_replay:
            raise error
        return y

    def run():
        selective(save_everything, early_stop=False)(function, leaf(3)).sum().backward()

    with pytest.raises(ZeroDivisionError) as info:
        run()
    assert info.value is error
    assert error.__cause__ is None


# --- Debug ---


@early_stops
@policies
def test_debug_changes_nothing(policy_of, early_stop):
    assert_as_plain(selective(policy_of(), early_stop=early_stop, debug=True), of(chain, (4,)))


def test_debug_saves_the_same_operators():
    y = selective([aten.tanh.default], debug=True)(chain, leaf(4))
    assert ran_in_backward(y)["tanh"] == 0


def test_debug_lists_the_operators_when_a_replay_differs():
    first = Once()

    def function(x):
        y = x.tanh()
        return y.sin() if first() else y[:1].sin()

    y = selective([aten.tanh.default], debug=True)(function, leaf(3))
    with pytest.raises(CheckpointError) as info:
        y.sum().backward()
    message = str(info.value)
    assert "You are seeing this error because you passed `debug=True` to checkpoint" in message
    assert "aten.tanh" in message
    assert "aten.slice" in message


# --- Hooks around the region ---


def test_kept_values_go_through_the_hooks_around_the_region():
    def function(x, w):
        return x.mm(w).sin().sum()

    def run(call):
        tensors = leaf(20, 30), leaf(30, 50, seed=1)
        with LiveBytes() as live:
            with saved_tensors_hooks(lambda tensor: tensor.tolist(), torch.tensor):
                y = call(function, *tensors)
            kept = live.now - y.nbytes
        y.backward()
        return kept, [tensor.grad for tensor in tensors]

    assert_equal(run(selective([aten.mm.default])), (0, run(plainly)[1]))


def test_kept_values_are_given_to_the_hooks_around_the_region_once():
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor

    def unpack(tensor):
        unpacked.append(tuple(tensor.shape))
        return tensor

    tensors = leaf(2, 3), leaf(3, 5, seed=1)
    with saved_tensors_hooks(pack, unpack):
        y = selective([aten.mm.default])(lambda x, w: x.mm(w).sin(), *tensors)
    assert packed.count((2, 5)) == 1
    y.sum().backward()
    assert unpacked.count((2, 5)) == 1


@policies
def test_save_on_cpu_around_the_region(policy_of):
    def call(function, *args):
        with save_on_cpu():
            return selective(policy_of())(function, *args)

    assert_as_plain(call, of(chain, (4,)))


# --- Nesting ---


def nest_of(calls):
    """A function that runs itself through each of the calls, one inside another."""

    def function(x, depth=0):
        y = x.sin().tanh()
        if depth < len(calls):
            y = calls[depth](partial(function, depth=depth + 1), y).exp()
        return y.tanh().sin()

    return function


NESTED = {
    "plain": checkpoint,
    "save": selective(save_everything),
    "list": selective([aten.tanh.default]),
}


@early_stops
@pytest.mark.parametrize("kinds", list(itertools.product(NESTED, repeat=3)), ids=" in ".join)
def test_nested_regions(kinds, early_stop):
    calls = [partial(NESTED[kind], early_stop=early_stop) for kind in reversed(kinds)]
    expected = step(plainly, of(nest_of([plainly] * 3), (4,)))
    assert_equal(step(plainly, of(nest_of(calls), (4,))), expected)


@pytest.mark.parametrize("policy", [save_everything, offload_everything, [aten.tanh.default]])
def test_a_plain_region_around_a_selective_one_keeps_nothing_of_it(policy):
    assert kept_by(checkpoint, lambda x: selective(policy)(chain, x.cos())) == 0


def test_a_plain_region_around_a_selective_one_runs_what_it_saves_once():
    x = leaf(4)

    def function(call, x):
        return call(chain, x.cos())

    y = checkpoint(function, selective([aten.tanh.default]), x)
    assert ran_in_backward(y)["tanh"] == 1
    assert_equal(x.grad, torch.autograd.grad(function(plainly, x).sum(), x)[0])


def test_a_selective_region_sees_and_saves_the_operators_of_a_plain_one_inside():
    noting = Noting(policy_for_tanh)
    x = leaf(4)
    y = selective(noting)(lambda x: checkpoint(chain, x.cos()).exp(), x)
    assert names(noting.asked[False]) == ["cos", "sin", "tanh", "exp", "sin", "exp"]
    y.sum().backward()
    assert_equal(x.grad, torch.autograd.grad(chain(x.cos()).exp().sum(), x)[0])


def test_inner_and_outer_policies_are_asked_for_themselves():
    inner, outer = Noting(save_everything), Noting()
    y = selective(outer)(lambda x: selective(inner)(torch.tanh, x.sin()).exp(), leaf(3))
    assert names(inner.asked[False]) == ["tanh"]
    assert names(outer.asked[False]) == ["sin", "tanh", "exp"]
    y.sum().backward()


# --- Models ---


class Block(nn.Module):
    """A transformer block as in the large ones: no biases, so every projection is an mm."""

    def __init__(self, width=8, hidden=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(h)
        h = self.norm_after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


SAVED_IN_MODELS = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default,
}


def every_second_product():
    """The policy of a well-known training framework: a counter for each pass, made anew for each region."""
    counts = defaultdict(int)

    def policy(ctx, op, *args, **kwargs):
        key = "recompute" if ctx.is_recompute else "forward"
        if op == aten.mm.default:
            counts[key] += 1
        save = op in SAVED_IN_MODELS and not (op == aten.mm.default and counts[key] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize(
    "op", [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.tanh.default, aten.bernoulli_.float], ids=str
)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True), (2, 3, 8)),
        (lambda: nn.LSTM(8, 4, num_layers=2, dropout=0.25), (5, 2, 8)),
        (
            lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            (2, 3, 8),
        ),
    ],
    ids=["encoder", "lstm", "convolution"],
)
def test_modules(make, shape, op):
    def build():
        torch.manual_seed(1)
        module, x = make(), leaf(*shape)
        return module, (x,), [x, *module.parameters()]

    assert_as_plain(selective([op]), build)


@early_stops
def test_every_second_product_of_transformer_blocks(early_stop):
    def run(call):
        torch.manual_seed(1)
        blocks = nn.ModuleList(Block() for _ in range(2))
        optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
        x, losses, products = leaf(2, 5, 8).detach(), [], 0
        for _ in range(2):
            h = x
            for block in blocks:
                h = call(block, h)
            loss = h.square().mean()
            losses.append(loss.detach())
            with CountOperators() as operators:
                loss.backward()
            products = operators.counts["mm"]
            optimizer.step()
            optimizer.zero_grad()
        return losses, [weight.detach() for weight in blocks.parameters()], products

    losses, weights, products = run(partial(checkpoint, context_fn=every_second_product, early_stop=early_stop))
    expected_losses, expected_weights, expected_products = run(plainly)
    assert_equal([losses, weights], [expected_losses, expected_weights])
    assert products == expected_products + 2 * 3, "three of the seven of each block"
