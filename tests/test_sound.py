"""Sound programs pass every check, with the gradients and the state of plain autograd; nobody notices the checks."""

import functools
import gc
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import CheckpointError, Save, by_name, checkpoint, dropin
from sound import SOUND, STATEFUL, clones, plain, seeded
from tools import CountOperators, LiveBytes, assert_equal, garbage_collector_off, leaf

CHECKS = ["first", "values"]


@pytest.fixture(autouse=True)
def _nothing_is_verified():
    recollect.verify_again()


@functools.cache
def expected(name):
    """What plain autograd makes of a program."""
    return seeded(SOUND[name], plain)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SOUND)
def test_no_false_alarm(name, check, early_stop):
    def region(function, *args, policy=None):
        return checkpoint(function, *args, determinism_check=check, early_stop=early_stop, policy=policy)

    assert_equal(seeded(SOUND[name], region), expected(name))


@pytest.mark.parametrize("name", [name for name in SOUND if name not in STATEFUL and "keeping" not in name])
def test_no_false_alarm_in_the_drop_in(name):
    def region(function, *args):
        return dropin.checkpoint(function, *args, use_reentrant=False)

    assert_equal(seeded(SOUND[name], region), expected(name))


# --- Other surroundings ---


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("check", CHECKS)
def test_a_compiled_function_in_the_region(backend, check):
    torch._dynamo.reset()
    model, dropout = nn.Linear(6, 6), nn.Dropout(0.3)

    def inner(x):
        return dropout(model(x)).tanh() * model.weight.exp().sum()

    compiled = torch.compile(inner, backend=backend)

    def train(run):
        torch.manual_seed(0)
        seen = []
        for _ in range(3):
            x = torch.randn(4, 6, requires_grad=True)
            run(lambda x: compiled(x).exp(), x).sum().backward()
            seen.append(clones([x.grad, *(p.grad for p in model.parameters())]))
            model.zero_grad()
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        train(plain)  # it is compiled once and for all
        expected = train(plain)
        assert_equal(train(lambda *args: checkpoint(*args, determinism_check=check)), expected)


def test_threads_verify_one_function_at_once():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def gradients(run):
        x = leaf(4, 6)
        return torch.autograd.grad(run(model, x).exp().sum(), [x, *model.parameters()])

    expected, results = gradients(plain), {}

    def work(number):
        for _ in range(20):
            recollect.verify_again()
            results[number] = gradients(checkpoint)
            assert_equal(results[number], expected)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(results) == 3
    assert all(torch.equal(*pair) for result in results.values() for pair in zip(result, expected, strict=True))


@pytest.mark.parametrize("check", CHECKS)
def test_a_backward_in_another_thread(check):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    torch.manual_seed(0)
    x, z = leaf(4, 6), leaf(4, 6)
    y = checkpoint(lambda x: model(x).tanh().exp(), x, determinism_check=check).sum()
    state = clones(model.state_dict().values())
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join(timeout=60)
    assert_equal(clones(model.state_dict().values()), state)
    torch.manual_seed(0)
    model(z).tanh().exp().sum().backward()
    assert torch.equal(x.grad, z.grad)


@pytest.mark.parametrize("check", CHECKS)
def test_forward_mode_in_the_forward(check):
    x = leaf(3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        y = checkpoint(lambda x: x.sin().exp(), dual, determinism_check=check)
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
        assert torch.equal(tangent, x.sin().exp() * x.cos())
        y.sum().backward()


@pytest.mark.parametrize("check", CHECKS)
def test_fake_tensors(check):
    """For an estimate of memory, say; afterwards real ones are compared again."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(4, 6, requires_grad=True)
        checkpoint(lambda x: (x @ x.T).softmax(-1).exp(), x, determinism_check=check).sum().backward()
        assert x.grad.shape == (4, 6)
    factor = iter([1.0, 2.0])
    with pytest.raises(CheckpointError, match="Recomputed values differ"):
        checkpoint(lambda x: (x * next(factor)).exp(), leaf(3), determinism_check=check).sum().backward()


# What would end the process is tried in another one.
SURROUNDINGS = {
    "meta device": "with torch.device('meta'): run(x)",
    "double": "torch.set_default_dtype(torch.float64); run(x)",
    "half": "torch.set_default_dtype(torch.float16); run(x)",
    "deterministic": "torch.use_deterministic_algorithms(True); run(x)",
    "autocast": "with torch.autocast('cpu', torch.bfloat16): run(x)",
    "anomaly": "with torch.autograd.detect_anomaly(check_nan=True): run(x)",
    "made in inference mode": "with torch.inference_mode(): t = torch.ones(3)\nrun(x, m=t.add)",
    "fake parameters": "with FakeTensorMode(): m = nn.Linear(3, 3); run(torch.ones(2, 3, requires_grad=True), m=m)",
    "wrapped parameters": "run(x, m=nn.Parameter(Wrapper(torch.ones(3))).mul)",
    "wrapped input": "run(Wrapper(torch.ones(3)).requires_grad_())",
}
SETUP = """
import warnings; warnings.simplefilter("ignore")
import torch, recollect
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, a):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
    def __init__(self, a):
        self.a = a
    def __tensor_flatten__(self):
        return ["a"], None
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [one.a if isinstance(one, Wrapper) else one for one in args]
        result = func(*args, **(kwargs or {}))
        return Wrapper(result) if isinstance(result, torch.Tensor) else result
def run(x, m=lambda x: x):
    for check in ("first", "values"):
        y = recollect.checkpoint(lambda x: (m(x) * 2).exp().sin(), x, determinism_check=check)
        y.sum().backward()
x = torch.ones(3, requires_grad=True)
"""


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_first_digests_of_a_process(name):
    """What digests are made with is made for the first of them, wherever that is."""
    script = SETUP + SURROUNDINGS[name] + "\nprint('done')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", f"{done.returncode}: {done.stderr[-2000:]}"


SHARDED = """
import warnings; warnings.simplefilter("ignore")
import torch, recollect, functools
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
def train(run, inside):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)))
    for layer in model:
        if inside:
            layer.forward = functools.partial(run, layer.forward)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, seen = torch.optim.AdamW(model.parameters()), []
    for _ in range(3):
        x = y = torch.randn(4, 6, requires_grad=True)
        for layer in model:
            y = layer(y) if inside else run(layer, y)
        y.square().sum().backward()
        seen += [x.grad, *(p.grad.full_tensor().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen
for inside in (True, False):
    expected = train(lambda function, x: function(x), inside)
    for check in ("first", "values", "default"):
        got = train(functools.partial(recollect.checkpoint, determinism_check=check), inside)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True)), (inside, check)
weight = nn.Parameter(distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)]))
for check in ("default", "first", "values"):
    x = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()]).requires_grad_()
    recollect.checkpoint(lambda x: (x @ weight).exp().tanh(), x, determinism_check=check).sum().backward()
print("done")
dist.destroy_process_group()
"""


def test_sharded_parameters():
    """FSDP gathers the same leaf again for the replay, with or without the region inside; and DTensors themselves."""
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, timeout=240, check=False)
    assert "done" in done.stdout, f"{done.returncode}: {done.stderr[-2000:]}"


# --- Nobody notices ---


def workload(run):
    """A step with everything that is looked at: weights, buffers, random numbers, views, a nested region."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
    second = nn.Linear(6, 6)

    def function(x):
        y = first(x).relu_()
        y = run(lambda y: second(y).tanh().exp(), y)
        return (y.view(-1) * 2).view(4, 6).sin()

    def step():
        x = torch.randn(4, 6, requires_grad=True)
        run(function, x).square().sum().backward()
        return clones([x.grad, *(p.grad for p in (*first.parameters(), *second.parameters()))])

    return step


class CountFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def flops_of(step):
    with FlopCounterMode(display=False) as mode:
        step()
    return mode.get_flop_counts()


def operators_of(step):
    with CountOperators() as mode:
        step()
    return mode.names


def functions_of(step):
    # That attributes are read is seen too, and is not promised to be hidden.
    with CountFunctions() as mode:
        step()
    return [name for name in mode.names if name != "__get__"]


def bytes_of(step):
    with LiveBytes() as mode:
        step()
    return mode.steps


def numbers_of(step):
    step()
    return torch.get_rng_state().tolist()


def gradients_of(step):
    return [gradient.tolist() for gradient in step()]


def deterministic(step):
    torch.use_deterministic_algorithms(True)
    try:
        return gradients_of(step)
    finally:
        torch.use_deterministic_algorithms(False)


OBSERVERS = [
    flops_of,
    operators_of,
    functions_of,
    bytes_of,
    numbers_of,
    gradients_of,
    deterministic,
]


@pytest.mark.parametrize("check", ["first", "values", "default"])
@pytest.mark.parametrize("observe", OBSERVERS)
def test_checks_are_not_seen(observe, check):
    """What an observer sees in three steps is what it sees without any checks."""

    def observed(check):
        step = workload(lambda *args: checkpoint(*args, determinism_check=check))
        return [observe(step) for _ in range(3)]

    assert observed(check) == observed("none")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", [CountOperators, CountFunctions])
def test_checks_are_not_seen_by_modes_in_the_region(kind, check):
    def observed(check):
        seen = []

        def function(x):
            with kind() as mode:
                y = F.dropout(x).sin().exp()
            seen.append(mode.names)
            return y

        checkpoint(function, leaf(3), determinism_check=check, early_stop=False).sum().backward()
        return seen

    assert observed(check) == observed("none")


@pytest.mark.parametrize("check", CHECKS)
def test_checks_are_not_seen_by_hooks_for_saved_tensors(check):
    def observed(check):
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
            step = workload(lambda *args: checkpoint(*args, determinism_check=check))
            step()
        return packed

    assert observed(check) == observed("none")


@pytest.mark.parametrize("check", CHECKS)
def test_a_region_sees_the_state_around_it(check):
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
            return func(*args, **(kwargs or {}))

    model = nn.Linear(3, 3)

    def observed(check):
        seen.clear()
        with Mode(), torch.autocast("cpu", torch.bfloat16):
            checkpoint(lambda x: model(x).exp(), leaf(2, 3), determinism_check=check).sum().backward()
        return list(seen)

    assert observed(check) == observed("none")


# --- Nothing is kept ---


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", [None, by_name({"kept": Save()}), recollect.policies.save_matmuls])
@pytest.mark.parametrize("check", CHECKS)
def test_no_tensor_lives_longer(check, policy, early_stop):
    """At each point of a step as many of the tensors made inside are alive as without checks."""

    def observed(check):
        made, counts = [], []
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))

        def note(tensor):
            made.append(weakref.ref(tensor))
            return tensor

        def function(x):
            y = note(note(model(x)).exp())
            y = recollect.region("kept", lambda y: note(y @ note(y.T).sin()))(y)
            return note(note(torch.rand(4)) * y).sin()

        with garbage_collector_off():
            for _ in range(3):
                x = leaf(4, 6)
                y = checkpoint(function, x, determinism_check=check, early_stop=early_stop, policy=policy)
                counts.append(sum(one() is not None for one in made))
                y.sum().backward()
                counts.append(sum(one() is not None for one in made))
                del x, y
                counts.append(sum(one() is not None for one in made))
        return counts

    assert observed(check) == observed("none")


def halved(h):
    h = h.sin() + 1
    h = h.sin() + 1
    return h.sin() + 1


@pytest.mark.parametrize("check", CHECKS)
def test_a_local_variable_lives_no_longer(check):
    """A function lets go of its argument as soon as it has bound the name anew."""

    def observed(check):
        with LiveBytes() as alive:
            checkpoint(lambda x: halved(x.exp() + 1).exp(), leaf(100), determinism_check=check).sum().backward()
        return alive.steps

    assert observed(check) == observed("none")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("ends", ["backward", "dropped", "forward raises", "replay raises"])
def test_nothing_is_left_behind(check, ends):
    calls = []

    def function(x, model):
        calls.append(None)
        y = model(x).tanh().exp()
        if (ends, len(calls)) in (("forward raises", 1), ("replay raises", 2)):
            raise ValueError("on purpose")
        return y

    with garbage_collector_off():
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        x = leaf(4, 6)
        references = [weakref.ref(one) for one in (x, model, *model.parameters(), *model.buffers())]
        try:
            y = checkpoint(function, x, model, determinism_check=check)
            if ends != "dropped":
                y.sum().backward()
        except ValueError:
            assert ends.endswith("raises")
        y = None
        del model, x
        assert [one() for one in references] == [None] * len(references)
        gc.collect()


@pytest.mark.parametrize("check", CHECKS)
def test_an_error_keeps_no_tensor(check):
    factors = iter([1.0, 2.0])
    with garbage_collector_off():
        x = leaf(3)
        reference = weakref.ref(x)
        with pytest.raises(CheckpointError) as info:
            checkpoint(lambda x: (x * next(factors)).exp(), x, determinism_check=check).sum().backward()
        error = info.value.with_traceback(None)
        del info, x
        assert reference() is None
        assert error.where
