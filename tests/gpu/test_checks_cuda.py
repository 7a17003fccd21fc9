"""Values that are compared on a GPU: digests there, no waiting in the forward, kernels that are not bit-stable."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recollect
from recollect import _digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def is_seen(then, now):
    before, after = _digest.read([_digest.digest(then), _digest.digest(now)])
    return bool(_digest.difference(before, after, then.dtype))


@pytest.fixture(autouse=True)
def _nothing_is_verified():
    recollect.verify_again()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [7, 4096 * 5 + 3, 4096 * 4096 + 4096 * 7 + 1])
def test_digests_see_what_they_should(dtype, size):
    torch.manual_seed(0)
    values = torch.randn(size, device="cuda").to(dtype)
    assert not is_seen(values, values.clone())
    assert is_seen(values, values.roll(1))
    assert is_seen(values, values.roll(4096)) is (
        size > 4096 or (size == 7 and bool((values != values.roll(4096)).any()))
    )
    assert is_seen(values, values * 1.1)
    assert is_seen(values, F.dropout(values, 0.1))


def test_integers_and_bools_are_exact():
    numbers = torch.arange(4096 * 3 + 5, device="cuda")
    other = numbers.clone()
    other[-1] += 1
    assert is_seen(numbers, other)
    assert is_seen(numbers > 7, numbers > 8)
    assert not is_seen(numbers, numbers.clone())


WAITS_FOR_NOTHING = """
import sys, torch, recollect
from torch import nn
layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64)).cuda()
x = torch.randn(8, 64, device="cuda", requires_grad=True)
recollect.checkpoint(layer, x, determinism_check=sys.argv[1]).sum().backward()  # what is made once is made
recollect.verify_again()
torch.cuda.set_sync_debug_mode("error")
recollect.checkpoint(layer, x, determinism_check=sys.argv[1])
print("done")
"""


@pytest.mark.parametrize("check", ["first", "values"])
def test_the_forward_does_not_wait(check):
    # In a process of its own: the mode stays in force.
    command = [sys.executable, "-c", WAITS_FOR_NOTHING, check]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr[-2000:]


@pytest.mark.parametrize("check", ["first", "values"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_layer_is_no_false_alarm(check, dropout, dtype):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout, batch_first=True).to("cuda", dtype)
    x = torch.randn(2, 16, 64, device="cuda", dtype=dtype, requires_grad=True)
    for _ in range(3):
        recollect.checkpoint(layer, x, determinism_check=check).float().square().sum().backward()
    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    for _ in range(3):
        y = recollect.checkpoint(F.scaled_dot_product_attention, q, k, v, dropout_p=dropout, determinism_check=check)
        y.float().square().sum().backward()


def test_atomics_are_no_false_alarm():
    index = torch.randint(0, 50, (20000,), device="cuda")

    def function(x):
        return torch.zeros(50, 16, device="cuda").index_add(0, index, x.sin()).exp()

    x = torch.randn(20000, 16, device="cuda", requires_grad=True)
    for _ in range(5):
        (recollect.checkpoint(function, x, determinism_check="values") * 1e-30).sum().backward()


def test_batch_norm_and_a_drift_on_the_gpu():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).cuda()
    x = torch.randn(4, 3, 16, 16, device="cuda", requires_grad=True)
    for step in range(1, 4):
        recollect.checkpoint(model, x).square().sum().backward()
        assert model[1].num_batches_tracked.item() == step
    scale = 2.0

    def function(x):
        return (x.sin() * scale).exp()  # guilty

    y = recollect.checkpoint(function, x)
    scale = 3.0
    with pytest.raises(recollect.CheckpointError, match=r"aten\.mul") as info:
        y.sum().backward()
    assert "scale" in info.value.cause


def test_a_fused_step_between_is_noticed():
    layer = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    for check in ("first", "default"):
        layer(x).sum().backward()
        y = recollect.checkpoint(lambda x: layer(x).tanh(), x, determinism_check=check)
        optimizer.step()
        with pytest.raises(recollect.CheckpointError, match="stepped"):
            y.sum().backward()


def test_a_cuda_graph_is_captured_without_checks():
    layer = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).cuda()
    x = torch.randn(4, 16, device="cuda", requires_grad=True)

    def step():
        recollect.checkpoint(layer, x, preserve_rng_state=False).sum().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
        x.grad = None
    torch.cuda.synchronize()
    recollect.verify_again()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    graph.replay()
    torch.cuda.synchronize()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(x.grad, expected)
