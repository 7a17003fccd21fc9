"""Policies and named regions on an accelerator: what is kept on the host, attention kernels, its generators."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import recollect
from recollect import dropin, policies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

aten = torch.ops.aten
MIB = 2**20


def leaves(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def grads_of(call, tensors, passes=1, seed=3):
    torch.manual_seed(seed)
    y = call(*tensors)
    return [torch.autograd.grad(y.float().sum(), tensors, retain_graph=i < passes - 1) for i in range(passes)]


def assert_as_plain(function, tensors, passes=2, **options):
    got = grads_of(lambda *xs: recollect.checkpoint(function, *xs, **options), tensors, passes)
    expected = grads_of(function, tensors, passes)
    for one, other in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def product(x, w):
    return ((x.sin() @ w).exp() @ w).sin()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "policy",
    [
        recollect.save_ops(aten.mm),
        recollect.offload_ops(aten.mm),
        policies.save_everything_but_pointwise,
        recollect.save_ops(aten.mm, on_mutation="copy"),
    ],
    ids=repr,
)
def test_gradients_are_those_of_plain_autograd(policy, early_stop):
    assert_as_plain(product, leaves((64, 64), (64, 64)), policy=policy, early_stop=early_stop)


def test_the_drop_in_keeps_offload_verdicts_on_the_host():
    x, w = leaves((512, 512), (512, 512))

    def policy(ctx, op, *args, **kwargs):
        chosen = dropin.CheckpointPolicy
        return chosen.MUST_CPU_OFFLOAD if op is aten.mm.default else chosen.PREFER_RECOMPUTE

    modes = []

    def context_fn():
        modes.append(dropin.create_selective_checkpoint_contexts(policy))
        return modes[-1]

    call = partial(dropin.checkpoint, product, use_reentrant=False, context_fn=context_fn)
    assert all(torch.equal(a, b) for a, b in zip(grads_of(call, (x, w))[0], grads_of(product, (x, w))[0], strict=True))
    y = call(x, w)
    (entry, _) = modes[-1][0].storage[aten.mm.default]
    assert entry.val.is_cuda
    del y


def kept_bytes(call, *tensors):
    gc.collect()
    recollect.offload_stats()  # lets stores release what has died
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what other streams were still using counts as allocated until somebody looks
    before = torch.cuda.memory_allocated()
    y = call(*tensors)
    torch.cuda.synchronize()
    recollect.offload_stats()  # looks what has left meanwhile
    held = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
    del y
    return held


def block(x, w):
    return recollect.region("mid", lambda h: (h @ w).exp() @ w)(x.sin()).sin() @ w


def test_bytes_on_the_device():
    x, w = leaves((1024, 1024), (1024, 1024))  # 4 MiB each

    def with_policy(policy):
        # Digests of a first replay take some bytes too.
        return lambda x, w: recollect.checkpoint(block, x, w, policy=policy, determinism_check="default")

    block(x, w)  # libraries take memory of their own when they are first used
    assert kept_bytes(with_policy(None), x, w) == 0
    assert kept_bytes(with_policy(recollect.save_ops(aten.mm)), x, w) == 8 * MIB  # the last one is the output
    assert kept_bytes(with_policy(recollect.offload_ops(aten.mm)), x, w) == 0
    # Kept: the output of exp, once for two operators, and the region's output; not the region's argument.
    assert kept_bytes(with_policy(recollect.by_name({"mid": recollect.Save()})), x, w) == 8 * MIB
    assert kept_bytes(with_policy(recollect.by_name({"mid": recollect.Offload()})), x, w) == 0


def test_frozen_weights_are_not_copied_to_the_host():
    frozen = torch.nn.Linear(64, 64, bias=False, device="cuda").requires_grad_(False)
    (x,) = leaves((64, 64))

    def function(x):
        return recollect.region("mid", lambda h: frozen(frozen(h).exp()))(x.sin()).sin()

    policy = recollect.by_name({"mid": recollect.Offload(min_bytes=0)})
    assert_as_plain(function, [x], policy=policy)
    before = recollect.offload_stats().bytes_out
    y = recollect.checkpoint(function, x, policy=policy)
    assert recollect.offload_stats().bytes_out - before == 2 * x.nbytes  # what exp saves, and the region's output
    del y


@pytest.mark.parametrize("decision", [recollect.Save(), recollect.Offload(), recollect.Recompute()], ids=repr)
def test_a_named_region(decision):
    policy = recollect.by_name({"mid": decision})
    tensors = leaves((64, 64), (64, 64))
    for _ in range(3):  # the second step knows whether replays come to the outputs
        assert_as_plain(block, tensors, policy=policy)
    with Counted() as counted:
        y = recollect.checkpoint(block, *tensors, policy=policy)
        forward = counted.names.count("mm")
        torch.autograd.grad(y.sum(), tensors)
    backward = 6  # two for each product
    again = 0 if not isinstance(decision, recollect.Recompute) else 2
    assert counted.names.count("mm") - forward - backward == again


@pytest.mark.parametrize("policy", [recollect.save_ops(aten.native_dropout), None], ids=["kept", "not kept"])
def test_random_numbers_after_a_kept_random_operator_are_the_same(policy):
    def function(x, w):
        return F.dropout(F.dropout(x @ w, 0.5).exp(), 0.5).sin() * F.dropout(x, 0.5)

    assert_as_plain(function, leaves((64, 64), (64, 64)), policy=policy)


def test_random_numbers_after_a_skipped_region_are_the_same():
    def function(x, w):
        h = recollect.region("mid", lambda x: F.dropout(x @ w, 0.5).exp())(x.sin())
        return F.dropout(h, 0.5).sin() * F.dropout(x, 0.5)

    assert_as_plain(function, leaves((64, 64), (64, 64)), policy=recollect.by_name({"mid": recollect.Save()}))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=str
)
def test_attention_is_not_run_again(backend, dropout):
    if backend == SDPBackend.CUDNN_ATTENTION and dropout:
        pytest.skip("cuDNN's attention draws its numbers in another way in each call")

    def function(q, k, v):
        with sdpa_kernel(backend):
            mixed = F.scaled_dot_product_attention(q * 2, k.sin(), v, dropout_p=dropout, is_causal=True)
        return F.dropout(mixed.exp(), 0.5).sin()

    tensors = leaves(*[(2, 4, 128, 64)] * 3, dtype=torch.bfloat16)
    try:
        grads_of(function, tensors)
    except RuntimeError as error:
        pytest.skip(f"not on this machine: {error}")
    got = grads_of(lambda *xs: recollect.checkpoint(function, *xs, policy=policies.save_attention), tensors, 2)
    expected = grads_of(function, tensors, 2)
    for one, other in zip(got, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-2)  # some of these kernels add in any order in backward
    with Counted() as counted:
        y = recollect.checkpoint(function, *tensors, policy=policies.save_attention)
        torch.autograd.grad(y.sum(), tensors)
    forwards = [name for name in counted.names if "attention" in name and "backward" not in name]
    assert len(forwards) == 1


@pytest.mark.filterwarnings("ignore")  # of the compiler, which runs it
def test_flex_attention_is_kept():
    flex_attention = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention

    def function(q, k, v):
        return flex_attention(q * 2, k.sin(), v).exp()

    tensors = leaves(*[(1, 2, 128, 64)] * 3)
    got = grads_of(lambda *xs: recollect.checkpoint(function, *xs, policy=policies.save_attention), tensors)
    for a, b in zip(got[0], grads_of(function, tensors)[0], strict=True):
        torch.testing.assert_close(a, b)


def test_shared_weights_under_autocast():
    layer = torch.nn.Linear(64, 64, device="cuda")

    def function(x):
        return layer(layer(x).exp()).sin()

    def twice(call):
        with torch.autocast("cuda", torch.bfloat16):
            return call(call(x))

    (x,) = leaves((64, 64))
    weights = [x, *layer.parameters()]
    for policy in (policies.save_matmuls, recollect.save_ops(aten._to_copy, aten.addmm), policies.save_nothing):
        call = partial(recollect.checkpoint, function, policy=policy)
        got = torch.autograd.grad(twice(call).float().sum(), weights)
        expected = torch.autograd.grad(twice(function).float().sum(), weights)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
