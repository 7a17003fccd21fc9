"""What needs an accelerator: its backward threads, generators, streams and memory. Skipped where there is none."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as stock

import recollect
from recollect import dropin
from recollect._generators import Probe
from recollect.dropin import GraphExecGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gradients(function, *inputs, seed=0, **kwargs):
    torch.manual_seed(seed)
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    result = function(*inputs, **kwargs)
    grads = torch.autograd.grad(result.sum(), [x for x in inputs if x.requires_grad])
    torch.cuda.synchronize()
    return result, grads, torch.cuda.get_rng_state(), torch.get_rng_state()


def assert_same_as_plain(function, *inputs, **options):
    plain = gradients(function, *inputs)
    ours = gradients(lambda *xs: recollect.checkpoint(function, *xs, **options), *inputs)
    assert torch.equal(plain[0], ours[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], ours[1], strict=True))
    assert torch.equal(plain[2], ours[2])
    assert torch.equal(plain[3], ours[3])


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(64, 64, device="cuda")


@pytest.mark.parametrize("early_stop", [True, False])
def test_dropout_draws_the_same_numbers(x, early_stop):
    assert_same_as_plain(lambda x: F.dropout(x.sin(), 0.5).exp() * F.dropout(x, 0.3), x, early_stop=early_stop)


@pytest.mark.parametrize("early_stop", [True, False])
def test_rrelu_is_not_cut_off(x, early_stop):
    assert_same_as_plain(lambda x: F.rrelu(x * 2, training=True), x, early_stop=early_stop)
    assert_same_as_plain(lambda x: F.rrelu(x, training=True).sin() + 1, x, early_stop=early_stop)


def test_fork_rng_inside_a_region(x):
    def function(x):
        with torch.random.fork_rng():
            y = F.dropout(x, 0.5)
        return (y * x).sin()

    assert_same_as_plain(function, x)


def test_random_numbers_without_a_tensor_argument():
    weight = torch.randn(64, device="cuda", requires_grad=True)

    def function():
        return F.dropout(weight.sin(), 0.5).exp()

    torch.manual_seed(3)
    plain = torch.autograd.grad(function().sum(), weight)[0]
    torch.manual_seed(3)
    y = recollect.checkpoint(function)
    torch.rand(5, device="cuda")
    assert torch.equal(plain, torch.autograd.grad(y.sum(), weight)[0])


def test_random_numbers_though_the_arguments_are_on_meta(x):
    def function(a, like):
        return F.dropout(a.cuda().sin(), 0.5).exp()

    torch.manual_seed(3)
    a, like = x.cpu().requires_grad_(), torch.ones(1, device="meta")
    plain = torch.autograd.grad(function(a, like).sum(), a)[0]
    torch.manual_seed(3)
    y = recollect.checkpoint(function, a, like)
    torch.rand(5, device="cuda")
    around = torch.cuda.get_rng_state()
    assert torch.equal(plain, torch.autograd.grad(y.sum(), a)[0])
    assert torch.equal(torch.cuda.get_rng_state(), around)


def test_a_seed_set_inside_a_region(x):
    def function(a):
        y = F.dropout(a.sin(), 0.5)
        torch.manual_seed(7)
        return F.dropout(y.exp(), 0.5).sin()

    assert_same_as_plain(function, x)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("way", ["argument", "registered"])
def test_a_generator_of_the_users_on_the_device(x, early_stop, way):
    """With the option "all"."""
    generator = torch.Generator("cuda")

    def function(a, g):
        noise = torch.rand(a.shape, device="cuda", generator=generator if g is None else g)
        return (F.dropout(a.sin(), 0.5) * noise).exp().sin()

    def step(call):
        torch.manual_seed(5)
        generator.manual_seed(5)
        a = x.clone().requires_grad_()
        y = call(function, a, generator if way == "argument" else None)
        between = torch.rand(3, device="cuda", generator=generator)
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        return a.grad, between, torch.rand(3, device="cuda", generator=generator), torch.rand(3, device="cuda")

    if way == "registered":
        recollect.register_generator(generator)
    plain = step(lambda f, *args: f(*args))
    ours = step(lambda f, *args: recollect.checkpoint(f, *args, preserve_rng_state="all", early_stop=early_stop))
    recollect.unregister_generator(generator)
    assert all(torch.equal(p, o) for p, o in zip(plain, ours, strict=True))


def test_the_device_that_numbers_were_drawn_on_is_told():
    probe = Probe()
    assert probe.moved() == []
    torch.rand(3, device="cuda")
    assert probe.moved() == ["cuda:0's generator"]


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_devices
@pytest.mark.parametrize("argument", ["cuda:0", "cuda:1", "cpu"])
def test_random_numbers_on_a_device_that_no_argument_tells(x, argument):
    def function(a):
        y = F.dropout(a.to("cuda:0").sin(), 0.5)
        z = F.dropout(y.to("cuda:1").exp(), 0.5)
        return (z.sin() * torch.rand(64, device="cuda:1")).to("cuda:0") * y

    def step(call):
        torch.manual_seed(5)
        a = x.detach().to(argument).requires_grad_()
        y = call(function, a)
        between = torch.rand(3, device="cuda:1")
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        return a.grad, between, torch.rand(3, device="cuda:0"), torch.rand(3, device="cuda:1")

    plain, ours = step(lambda f, a: f(a)), step(recollect.checkpoint)
    assert all(torch.equal(p, o) for p, o in zip(plain, ours, strict=True))


@two_devices
def test_regions_of_two_devices_replayed_at_the_same_time(x):
    """Autograd has a thread for each device."""

    def tower(a):
        for _ in range(20):
            a = F.dropout(a.sin(), 0.5) + F.dropout(a, 0.3)
        return a

    def step(call):
        torch.manual_seed(5)
        a, b = (x.detach().to(f"cuda:{index}").requires_grad_() for index in range(2))
        u, v = a, b
        for _ in range(10):
            u, v = call(tower, u), call(tower, v)
        (u.sum() + v.sum().to("cuda:0")).backward()
        return a.grad, b.grad, torch.rand(3, device="cuda:0"), torch.rand(3, device="cuda:1")

    plain = step(lambda f, a: f(a))
    for _ in range(5):
        assert all(torch.equal(p, o) for p, o in zip(plain, step(recollect.checkpoint), strict=True))


@two_devices
def test_data_parallel():
    """Forwards of all devices at the same time, each in a thread of its own."""

    class Model(torch.nn.Module):
        def __init__(self, call):
            super().__init__()
            self.call = call

        def block(self, a):
            return F.dropout(F.dropout(a.sin(), 0.5).exp(), 0.3).sin()

        def forward(self, a):
            a = F.dropout(a, 0.1)
            for _ in range(10):
                a = self.call(self.block, a)
            return a

    def step(call):
        torch.manual_seed(5)
        a = torch.linspace(0, 1, 64 * 64, device="cuda").view(64, 64).requires_grad_()
        torch.nn.DataParallel(Model(call))(a).sum().backward()
        return a.grad

    plain = step(lambda f, a: f(a))
    for _ in range(5):
        assert torch.equal(plain, step(recollect.checkpoint))


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_region_that_mixes_cpu_and_cuda_is_replayed_once(x, early_stop):
    calls = []

    def function(a, b):
        calls.append(threading.get_ident())
        u = (a.sin() * a).exp()
        v = (b.sin() * b).exp()
        return u.cpu() * v + u.to("cpu").cos() * v.sin()

    b = torch.randn(64, 64)
    for _ in range(20):
        calls.clear()
        assert_same_as_plain(function, x, b, early_stop=early_stop)
        assert len(calls) == 3  # plain, forward, one replay


def test_nested_regions_over_cpu_and_cuda(x):
    def inner(a, b):
        return (a.sin() * a).cpu() * b.sin().exp()

    def outer(a, b):
        c = recollect.checkpoint(inner, a.cos(), b.cos())
        return recollect.checkpoint(inner, c.cuda(), c.tanh())

    for _ in range(10):
        assert_same_as_plain(outer, x, torch.randn(64, 64))


def test_regions_on_a_side_stream(x):
    stream = torch.cuda.Stream()
    streams = []

    def function(a):
        streams.append(torch.cuda.current_stream())
        for _ in range(20):
            a = (a @ a).sin() * a
        return a + 1

    def step(call):
        a = x.clone().requires_grad_()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = call(function, a)
            loss = y.sum()
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        torch.cuda.synchronize()
        return a.grad

    plain = step(lambda function, a: function(a))
    streams.clear()
    assert torch.equal(plain, step(recollect.checkpoint))
    assert streams == [stream, stream]


def test_a_cpu_node_that_asks_first_replays_on_the_regions_stream(x):
    stream = torch.cuda.Stream()
    streams = []

    def function(a, b):
        streams.append(torch.cuda.current_stream())
        return (b.sin() * b).exp() * (a.sin() * a).sum().cpu()

    a, b = x.clone().requires_grad_(), torch.randn(4, requires_grad=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = recollect.checkpoint(function, a, b)
    torch.cuda.current_stream().wait_stream(stream)
    y.sum().backward()
    torch.cuda.synchronize()
    assert streams == [stream, stream]
    assert torch.equal(a.grad, gradients(function, a, b)[1][0])
    assert torch.equal(b.grad, gradients(function, a, b)[1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(x, dtype):
    linear = torch.nn.Linear(64, 64, device="cuda")

    def run(call):
        linear.zero_grad()
        a = x.clone().requires_grad_()
        with torch.autocast("cuda", dtype):
            y = call(lambda a: linear(linear(a).sin()).exp(), a)
        y.float().sum().backward()
        return a.grad, linear.weight.grad.clone()

    plain, ours = run(lambda f, a: f(a)), run(recollect.checkpoint)
    assert all(torch.equal(p, o) for p, o in zip(plain, ours, strict=True))


def test_default_device_reaches_the_backward_thread(x):
    def function(a):
        return (a * torch.full((64,), 2.0)).sin()

    a = x.clone().requires_grad_()
    with torch.device("cuda"):
        y = recollect.checkpoint(function, a, early_stop=False)
    y.sum().backward()
    assert torch.equal(a.grad, 2 * (a * 2).cos())


def test_groups_reach_the_backward_threads(x):
    calls = []

    def function(a, b):
        calls.append(1)
        return a.sin().exp(), b.sin().exp()

    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    u, v = recollect.checkpoint(function, a, b)
    with GraphExecGroup():
        u.sum().backward()
        v.sum().backward()
    assert len(calls) == 2
    assert torch.equal(a.grad, b.grad)


def test_reentrant(x):
    def run(call):
        torch.manual_seed(5)
        a = x.clone().requires_grad_()
        call(lambda a: F.dropout(a.sin(), 0.5).exp(), a).sum().backward()
        return a.grad

    assert torch.equal(run(lambda f, a: f(a)), run(lambda f, a: dropin.checkpoint(f, a, use_reentrant=True)))


def test_an_accelerator_first_used_inside_the_forward_is_an_error():
    script = """
        import torch, recollect
        x = torch.ones(2, requires_grad=True)
        try:
            recollect.checkpoint(lambda x: x.cuda().sin(), x)
        except RuntimeError as error:
            assert "initialised inside the forward" in str(error), error
            print("refused")
        recollect.checkpoint(lambda x: x.cuda().sin(), x).sum().backward()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "refused", done.stderr


def block(width: int) -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True, device="cuda")


def peak_of(call, layers, x) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = x
    for layer in layers:
        y = call(layer, y)
    y.sum().backward()
    del y
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory_is_not_above_stocks():
    layers = [block(256) for _ in range(4)]
    x = torch.randn(8, 128, 256, device="cuda", requires_grad=True)
    calls = {
        "stock": lambda f, a: stock.checkpoint(f, a, use_reentrant=False),
        "ours": recollect.checkpoint,
        "plain": lambda f, a: f(a),
    }
    for call in calls.values():  # gradients and workspaces are there before anything is measured
        peak_of(call, layers, x)
    peaks = {name: peak_of(call, layers, x) for name, call in calls.items()}
    assert peaks["ours"] <= peaks["stock"] < peaks["plain"], peaks


def test_two_python_threads(x):
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).cuda()
    expected = gradients(layer, x)[1][0]
    wrong = []

    def work():
        for _ in range(50):
            a = x.clone().requires_grad_()
            grad = torch.autograd.grad(recollect.checkpoint(layer, a, preserve_rng_state=False).sum(), a)[0]
            torch.cuda.synchronize()
            if not torch.equal(grad, expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_backward_inside_that_needs_the_thread_that_waits(monkeypatch):
    """One device thread replays, another waits for it, and the replay's own backward needs the one that waits."""
    monkeypatch.setattr("recollect._engine.frame._PATIENCE", 1.0)

    def function(a, b):
        if torch._C._current_graph_task_id() >= 0:
            time.sleep(0.3)
        (g,) = torch.autograd.grad(b.sin().sum(), b)
        return a.sin().exp(), (b * g).exp()

    a, b = torch.randn(4, requires_grad=True), torch.randn(4, device="cuda", requires_grad=True)
    u, v = recollect.checkpoint(function, a, b)
    torch.autograd.backward([u.sum(), v.sum().cpu()])
    p, q = function(a, b)
    expected = torch.autograd.grad(p.sum() + q.sum().cpu(), [a, b])
    assert torch.equal(a.grad, expected[0])
    assert torch.equal(b.grad, expected[1])
