"""What is kept is what the replay would have computed, or it is found out: programs that once were wrong."""

import copy
import dataclasses
import pickle
import weakref
from collections import OrderedDict, namedtuple
from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import recollect
from recollect import CheckpointError, Recompute, Save, by_name, checkpoint, dropin, policies, region, save_ops
from recollect._torch import share_version_counter
from tools import garbage_collector_off, leaf

aten = torch.ops.aten


def saving(*names):
    return by_name({name: Save() for name in names})


def grads(call, *leaves, passes=1, seed=5):
    torch.manual_seed(seed)
    y = call(*leaves)
    loss = sum(part.double().sin().sum() for part in (y if isinstance(y, tuple) else (y,)))
    return [torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True) for _ in range(passes)]


def assert_as_plain(function, *leaves, around=None, passes=2, **options):
    def call(*args):
        if around is None:
            return checkpoint(function, *args, **options)
        with around():
            return checkpoint(function, *args, **options)

    expected = grads(function, *leaves, passes=passes)
    for one, other in zip(grads(call, *leaves, passes=passes), expected, strict=True):
        for got, wanted in zip(one, other, strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or torch.equal(got, wanted)


@pytest.fixture
def x():
    return leaf(4, 4)


@pytest.fixture
def w():
    return leaf(4, 4, seed=1)


# --- Operators ---


@pytest.fixture
def one_process():
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_a_collective_that_hides_its_write_is_found_out(x, w, one_process):
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            torch.distributed.all_reduce(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad

    def function(x, w):
        return Reduce.apply(x @ w).sin().exp()

    y = checkpoint(function, x, w, policy=save_ops(aten.mm))
    with pytest.raises(CheckpointError, match=r"aten\.mm .* has been mutated by c10d\.allreduce_"):
        y.sum().backward()
    assert_as_plain(function, x, w, policy=policies.save_matmuls)


def test_a_replay_that_runs_a_kept_operator_less_often_is_found_out(x, w):
    table = []

    def function(x, w):
        if not table:
            with torch.no_grad():
                table.append(w @ w)
        return ((x @ table[0]).sin() @ w).exp()

    y = checkpoint(function, x, w, policy=policies.save_matmuls)
    with pytest.raises(CheckpointError, match="another place"):
        y.sum().backward()


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


def adds_in_place(x, w):
    y = x @ w
    y.add_(1)
    return y.sin().exp()


def test_hooks_that_hide_the_tensor_do_not_hide_its_change(x, w):
    with saved_tensors_hooks(Box, lambda box: box.tensor):
        y = checkpoint(adds_in_place, x, w, policy=save_ops(aten.mm))
    with pytest.raises(CheckpointError, match=r"has been mutated by aten\.add_"):
        y.sum().backward()


def test_hooks_that_hide_a_copy_serve_several_passes(x, w):
    def hooks():
        return saved_tensors_hooks(lambda tensor: Box(tensor.clone()), lambda box: box.tensor)

    assert_as_plain(adds_in_place, x, w, around=hooks, policy=save_ops(aten.mm))


def other_strides():
    return saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t)


def test_hooks_that_change_strides_do_not_change_random_masks(x):
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    image = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    convolved = save_ops(aten.convolution)
    assert_as_plain(lambda x: F.dropout(layer(x), 0.5).exp().sin(), image, around=other_strides, policy=convolved)

    def block(x):
        return F.dropout(region("a", lambda z: (z @ z).t())(x.exp()), 0.5).sin().exp()

    assert_as_plain(block, x, around=other_strides, policy=saving("a"))


def test_the_default_generator_passed_explicitly_is_preserved(x, w):
    def function(x, w):
        mask = torch.bernoulli(x.sigmoid().detach(), generator=torch.default_generator)
        return ((x * mask) * torch.rand_like(x)).sin() @ w

    assert_as_plain(function, x, w, policy=save_ops(aten.bernoulli))


@pytest.mark.parametrize("function", [lambda x, w: (x.sin()[0] @ w).exp(), lambda x, w: (x @ w).t_().exp()])
def test_another_shape_in_place_inside_a_plain_region_is_no_change(x, w, function):
    def outer(x, w):
        return checkpoint(function, x.tanh(), w, policy=policies.save_matmuls).sin()

    assert_as_plain(outer, x, w)


def test_a_change_in_an_inner_policy_region_is_told_as_what_it_is(x, w):
    y = checkpoint(lambda x, w: checkpoint(adds_in_place, x.tanh(), w, policy=save_ops(aten.mm)).sin(), x, w)
    with pytest.raises(CheckpointError, match=r"the output of aten\.mm that the policy keeps has been mutated"):
        y.sum().backward()


@pytest.mark.parametrize(
    "module",
    [
        nn.RMSNorm(4),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.SiLU(inplace=True)),
        nn.GRUCell(4, 4),
        nn.LSTMCell(4, 4),
    ],
    ids=lambda module: type(module).__name__,
)
@pytest.mark.parametrize("policy", [policies.save_matmuls, policies.save_everything_but_pointwise], ids=repr)
@pytest.mark.filterwarnings("ignore:the policy .* matched nothing")
def test_ready_made_policies_copy_what_a_module_changes_in_place(x, module, policy):
    def function(x):
        result = module(x * 2)
        return (result[0] if isinstance(result, tuple) else result).exp()

    assert_as_plain(function, x, policy=policy)


def test_an_operator_that_was_never_kept_may_run_more_often(x, w):
    runs = []

    def function(x, w):
        runs.append(1)
        y = (x @ w).sin()
        if len(runs) == 2:
            y.detach().cos()
        return (y.cos() @ w).exp()

    y = checkpoint(function, x, w, policy=lambda op, ctx: Save() if op is aten.mm.default else None)
    (got,) = torch.autograd.grad(y.sum(), x)
    runs.clear()
    assert torch.equal(got, torch.autograd.grad(function(x, w).sum(), x)[0])


def test_the_refusal_of_a_policy_does_not_hide_an_interrupt(x, w):
    def refuses(op, ctx):
        raise TypeError("mine")

    def function(x, w):
        try:
            x.mm(w)
        except TypeError:
            pass
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint(function, x, w, policy=refuses)
    with pytest.raises(TypeError, match="mine"):
        checkpoint(lambda x, w: x @ w, x, w, policy=refuses)


def test_a_drop_in_policy_that_answers_nonsense_is_named_also_under_an_infix_operator(x, w):
    def contexts():
        return dropin.create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: "save")

    with pytest.raises(TypeError, match="must return a CheckpointPolicy or a bool"):
        checkpoint(lambda x, w: x @ w, x, w, context_fn=contexts)


def test_version_counters_that_happen_to_be_one_apart_are_not_shared():
    left, right = torch.zeros(4).unsafe_chunk(2)
    assert not share_version_counter(left, right)
    right.add_(1)
    assert not share_version_counter(left, right)
    assert not share_version_counter(right, left)
    assert all(share_version_counter(left, one) for one in (left, left.detach(), left[:1]))
    assert (left._version, right._version) == (0, 1)


def test_one_pair_of_contexts_for_two_regions_is_refused(x, w):
    pair = dropin.create_selective_checkpoint_contexts([aten.mm.default])
    checkpoint(lambda x, w: x @ w, x, w, context_fn=lambda: pair)
    with pytest.raises(RuntimeError, match="Let context_fn make new ones"):
        checkpoint(lambda x, w: x @ w, x, w, context_fn=lambda: pair)


@pytest.mark.parametrize("name", [*policies.__all__, "save_ops", "by_name", "offload_ops"])
def test_policies_can_be_pickled_and_copied(x, w, name):
    made = {
        "save_ops": save_ops(aten.mm),
        "by_name": by_name({"a": Save()}),
        "offload_ops": recollect.offload_ops(aten.mm),
    }
    policy = made[name] if name in made else getattr(policies, name)
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert repr(other) == repr(policy)
        assert other.operators() == policy.operators()


@pytest.mark.parametrize("retain_graph", [False, True])
def test_what_a_stopped_replay_did_not_reach_is_let_go_of(x, w, retain_graph):
    """The last product is kept and never asked for: it goes when the replay ends, and not with the graph."""
    memory, gone = [], []

    def function(x, w):
        h = x.sin()
        y = (h @ w).sin() @ w
        if not memory:
            memory.append(StorageWeakRef(y.untyped_storage()))
            h.register_hook(lambda grad: gone.append(memory[0].expired()))
        return y.sum()

    loss = checkpoint(function, x, w, policy=save_ops(aten.mm))
    assert not memory[0].expired()
    loss.backward(retain_graph=retain_graph)
    assert gone == [not retain_graph]


# --- Named regions ---


def test_inside_a_kept_region_no_mode_counts_operators(x, w):
    """Two of them: the native policy's, and the drop-in's contexts."""

    def block(x, w):
        h = region("a", lambda z: (z @ w).sin())(x.exp())
        return ((h @ w).sin() @ w).exp()

    policy = saving("a") | save_ops(aten.mm)
    contexts = partial(dropin.create_selective_checkpoint_contexts, [aten.sin.default])
    assert_as_plain(block, x, w, passes=1, policy=policy, context_fn=contexts)


def test_a_policy_may_compute_on_the_arguments_of_a_region(x):
    def policy(what, ctx):
        return Recompute() if isinstance(what, str) and ctx.args[0].abs().max() < 100 else None

    def block(x):
        v = region("a", torch.sin)(x * 2).cos().exp()
        return v, v.sin().cos().sin().exp()

    with pytest.warns(UserWarning, match="kept nothing"):
        v, rest = checkpoint(block, x, policy=policy)
    del rest
    assert torch.equal(torch.autograd.grad(v.sum(), x)[0], torch.autograd.grad(block(x)[0].sum(), x)[0])


@dataclasses.dataclass
class Output(OrderedDict):
    h: torch.Tensor = None

    def __post_init__(self):
        OrderedDict.__setitem__(self, "h", self.h)


def test_a_result_that_is_a_dict_and_a_dataclass(x):
    def changed(output):
        output.h.mul_(3)
        return output.h

    def replaced(output):
        output.h = output.h.cos()
        return output.h

    for change in (changed, replaced):
        assert_as_plain(
            lambda x, c=change: c(region("a", lambda z: Output(z.sin() * 2))(x * 2)).exp(), x, policy=saving("a")
        )
    with garbage_collector_off():
        payload = Box(None)
        reference = weakref.ref(payload)
        y = checkpoint(
            lambda x, payload: region("a", lambda z: Output(z.sin() * 2))(x).h.exp(), x, payload, policy=saving("a")
        )
        del y, payload
        assert reference() is None


Pair = namedtuple("Pair", "one other")


class PairWithMore(Pair):
    pass


def test_a_named_tuple_with_something_more(x):
    def part(z):
        pair = PairWithMore(z.sin(), z.cos())
        pair.more = z.exp()
        return pair

    def block(x):
        pair = region("a", part)(x * 2)
        return (pair.one * pair.more).exp()

    assert_as_plain(block, x, policy=saving("a"))


def test_a_region_that_changes_a_plain_value_in_a_container(x):
    def block(x):
        given = [x * 2, 3.0]

        def part(given):
            given[1] = 5.0
            return given[0].sin()

        return (region("a", part)(given).cos() * given[1]).exp()

    assert_as_plain(block, x, policy=saving("a"))


def test_forward_mode_derivatives(x):
    def block(x):
        return region("a", torch.sin)(x * 2).sin()

    with fwAD.dual_level():
        dual = fwAD.make_dual(x, torch.ones_like(x))
        ours, plain = checkpoint(block, dual, policy=saving("a")), block(dual)
        assert torch.equal(fwAD.unpack_dual(ours).tangent, fwAD.unpack_dual(plain).tangent)
        one, other = (torch.autograd.grad(y.sum(), x)[0] for y in (ours, plain))
    assert torch.equal(one, other)


@pytest.mark.parametrize("changes", ["the argument", "the result"])
def test_inference_tensors(x, changes):
    def block(x):
        with torch.inference_mode():
            t = x.detach() * 2
            y = region("a", lambda t: t.mul_(3).sin() if changes == "the argument" else t.sin())(t)
            if changes == "the result":
                y.mul_(3)
        return x.sin() * t.clone() * y.clone()

    assert_as_plain(block, x, policy=saving("a"))


def test_a_result_without_grad_is_the_callers_own(x):
    def block(x):
        mask = region("mask", lambda z: z.detach().abs())(x * 2)
        before = mask.requires_grad
        mask.requires_grad_()
        return (x * mask.detach()).sin() * (1.0 if not before else 7.0)

    assert_as_plain(block, x, policy=saving("mask"))


def test_numbers_are_not_drawn_again_where_they_are_not_preserved(x):
    def block(x, further):
        y = region("a", lambda z: F.dropout(z.sin(), 0.5))(x * 2)
        return y.exp() if further else y

    for further in (False, False, True, True):
        torch.manual_seed(1)
        y = checkpoint(block, x, further, policy=saving("a"), preserve_rng_state=False)
        kept = y.detach() != (1.0 if further else 0.0)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad != 0, kept)


def test_a_transposed_argument_is_not_kept_for_a_view_of_it():
    def block(x):
        return region("a", lambda h: h.t() @ torch.ones(256, 2))((x * 2).t()).sin()

    rows = recollect.explain(block, leaf(256, 256), policy=saving("a")).rows
    assert not [row for row in rows if row.decision == "kept" and row.shape == (256, 256)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.named = region("a", self.layer)

    def forward(self, x):
        return self.named(x)


def test_a_copy_of_a_model_with_a_named_region_has_its_own_weights(x):
    model = Model()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.layer.weight.zero_()
            other.layer.bias.zero_()
        assert not other(x).any()
        assert model(x).any()


# --- Kept in nested regions, and changed through a view that counts its changes apart ---


def linear_then_changed(x, w):
    h = F.linear(x, w)  # a view of the product, by `_unsafe_view`
    y = (h + 1).sin()
    with torch.no_grad():
        h.mul_(2)
    return (y @ w).sin()


def linear_then_parts_changed(x, w):
    left, right = torch.unsafe_chunk(F.linear(x, w), 2, -1)
    y = (left + 1).sin()
    left.relu_()
    right.add_(1)
    return (torch.cat((y, left * 0.1 + right), -1) @ w).sin()


def linear_changed_by_who_is_around(x, w):
    def inner(x):
        h = F.linear(x, w)
        return (h + 1).sin(), h

    y, h = recollect.checkpoint(inner, x, policy=recollect.policies.save_matmuls, determinism_check="default")
    with torch.no_grad():
        h.mul_(2)
    return (y @ w).sin()


def offloaded(**options):
    decision = recollect.Offload(to="disk", **options)
    return lambda op, ctx: decision if op is torch.ops.aten.mm.default else None


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "policy",
    [recollect.policies.save_matmuls, offloaded(min_bytes=0), offloaded(min_bytes="1 GiB")],
    ids=["ready-made", "offloaded", "too small to be offloaded"],
)
@pytest.mark.parametrize("function", [linear_then_changed, linear_then_parts_changed, linear_changed_by_who_is_around])
def test_a_kept_product_that_is_changed_through_a_view_that_counts_apart(function, policy, depth):
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    region = function
    for _ in range(depth):
        region = partial(recollect.checkpoint, region, policy=policy, determinism_check="default")
    for _ in range(3):
        wanted = torch.autograd.grad(function(x, w).sum(), [x, w])
        assert all(map(torch.equal, torch.autograd.grad(region(x, w).sum(), [x, w]), wanted))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_a_policy_of_the_users_keeps_and_is_changed_so_is_an_error(depth):
    x, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    region = linear_then_changed
    for _ in range(depth):
        region = partial(
            recollect.checkpoint, region, policy=recollect.save_ops(torch.ops.aten.mm), determinism_check="default"
        )
    with pytest.raises(RuntimeError, match=r"aten\.mm.*has been mutated"):
        region(x, w).sum().backward()


def test_what_autograd_saved_in_a_kept_region_and_is_changed_is_an_error_that_names_the_region():
    made = []

    def middle(x):
        made.append(x.exp())
        return made[-1] * 2

    def function(x):
        return region("middle", middle)(x.sin()).sin()

    y = checkpoint(function, leaf(3), policy=saving("middle"))
    with torch.no_grad():
        made[0].mul_(2)  # which exp has saved
    with pytest.raises(
        CheckpointError, match=r"modified by an inplace operation: .*saved in the kept region 'middle' of .*function"
    ):
        y.sum().backward()
