"""Chains on a GPU: its generator, its streams, states that leave the device, and sums in the order of autograd."""

import pytest
import torch
from torch import nn

import recollect
from chains import grads_of, plain, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make(width=64):
    torch.manual_seed(0)
    layer = nn.Linear(width, width, device="cuda")

    def step(x):
        return nn.functional.dropout(layer(layer(x).tanh()), 0.1) + 0.1 * torch.randn_like(x)

    return step, torch.randn(32, width, device="cuda", requires_grad=True), [*layer.parameters()]


@pytest.mark.parametrize("width", [64, 1024])  # the gradients of the latter are summed up in place
@pytest.mark.parametrize("slots", [1, 3, 10])
def test_gradients_are_those_of_the_plain_chain(width, slots):
    step, x, weights = make(width)
    torch.manual_seed(1)
    wanted = grads_of(plain(step, x, 20).square().sum(), [x, *weights])
    torch.manual_seed(1)
    y = recollect.sequential(step, x, length=20, slots=slots)
    torch.manual_seed(7)
    around = torch.cuda.get_rng_state()
    assert same(grads_of(y.square().sum(), [x, *weights]), wanted)
    assert torch.equal(torch.cuda.get_rng_state(), around)


@pytest.mark.parametrize("tiers", [{"device": 2, "cpu": 18}, {"device": 1, "cpu": 3, "disk": 16}, {"cpu": 20}])
def test_states_that_leave_the_device(tiers, monkeypatch):
    monkeypatch.setattr("recollect._chains.choice._rates", lambda device, to: (1e15, 1e15))
    step, x, weights = make(1024)
    torch.manual_seed(1)
    wanted = grads_of(plain(step, x, 20).square().sum(), [x, *weights])
    for _ in range(3):
        before = recollect.offload_stats().bytes_out
        torch.manual_seed(1)
        y = recollect.sequential(step, x, length=20, tiers=tiers)
        assert same(grads_of(y.square().sum(), [x, *weights]), wanted)
        assert recollect.offload_stats().bytes_out > before


def test_a_budget_holds():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(16))).cuda()
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)
    weights = [x, *model.parameters()]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    with pytest.raises(ValueError, match="is too small") as caught:
        recollect.sequential(model, x, budget=1)
    budget = 2 * caught.value.smallest
    recollect.sequential(model, x, budget=budget).sum().backward()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    recollect.sequential(model, x, budget=budget).sum().backward()
    # On top come the gradients of all weights, which a chain gives when all of it has gone backward, and the loss.
    gradients = sum(weight.nbytes for weight in model.parameters())
    assert torch.cuda.max_memory_allocated() - start <= budget + gradients + 2**20


def test_on_another_stream():
    step, x, weights = make()
    torch.manual_seed(1)
    wanted = grads_of(plain(step, x, 20).square().sum(), [x, *weights])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.manual_seed(1)
        y = recollect.sequential(step, x, length=20, slots=3)
    torch.cuda.current_stream().wait_stream(stream)
    assert same(grads_of(y.square().sum(), [x, *weights]), wanted)


def test_autocast():
    step, x, weights = make()

    def forward(chain):
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return chain().square().sum()

    wanted = grads_of(forward(lambda: plain(step, x, 9)), [x, *weights])
    got = grads_of(forward(lambda: recollect.sequential(step, x, length=9, slots=2)), [x, *weights])
    assert same(got, wanted)
