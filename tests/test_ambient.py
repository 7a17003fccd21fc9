"""What a function reads without being given it is in a replay as it was in the forward, and around it as it was."""

import contextlib
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import recollect
from recollect import dropin
from recollect.dropin import DefaultDeviceType, _infer_device_type, get_device_states, set_device_states
from tools import ambient_state, assert_equal, leaf


def gradient(y, x, **options):
    return torch.autograd.grad(y.sum(), x, **options)[0]


class StopHereError(Exception):
    pass


# --- Random numbers ---


def dropout(x):
    return torch.dropout(x.sin(), 0.5, True).exp()


def forks(x):
    # Leaves the generator where it was, and yet depends on where that is.
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(x.shape)
    return (x * noise).sin()


def forks_and_draws(x):
    return torch.dropout(forks(x), 0.5, True) * torch.rand(x.shape)


def seeds(x):
    before = torch.rand(x.shape)
    torch.manual_seed(5)
    return (x * before).sin() * torch.rand(x.shape)


def nests(x):
    y = recollect.checkpoint(dropout, x)
    return recollect.checkpoint(dropout, y * torch.rand(x.shape)).sin()


def draws_nothing(x):
    return x.sin().exp()


@pytest.mark.parametrize("function", [dropout, forks, forks_and_draws, seeds, nests, draws_nothing])
@pytest.mark.parametrize("early_stop", [True, False])
def test_every_replay_draws_the_numbers_of_the_forward(function, early_stop):
    x = leaf(32)
    torch.manual_seed(1)
    expected = gradient(function(x), x)
    torch.manual_seed(1)
    y = recollect.checkpoint(function, x, early_stop=early_stop)
    for seed in (2, 3):  # each replay from another state around it
        torch.manual_seed(seed)
        around = torch.get_rng_state()
        assert torch.equal(gradient(y, x, retain_graph=True), expected)
        assert torch.equal(torch.get_rng_state(), around), "the state around the replay is put back"


@pytest.mark.parametrize("function", [dropout, forks, seeds])
def test_the_forward_itself_draws_as_without_a_region(function):
    x = leaf(8)
    torch.manual_seed(1)
    expected, then = function(x), torch.rand(3)
    torch.manual_seed(1)
    got = recollect.checkpoint(function, x)
    assert torch.equal(got, expected)
    assert torch.equal(torch.rand(3), then)


def test_numbers_drawn_after_backward_are_those_of_a_plain_step():
    def step(run):
        torch.manual_seed(1)
        x = leaf(8)
        y = run(dropout, x)
        between = torch.rand(2)
        y.sum().backward()
        return x.grad, between, torch.rand(2)

    for got, expected in zip(step(recollect.checkpoint), step(lambda function, x: function(x)), strict=True):
        assert torch.equal(got, expected)


def test_the_state_around_a_replay_that_raises_is_put_back():
    calls = []

    def function(x):
        calls.append(1)
        y = dropout(x)
        if len(calls) > 1:
            raise StopHereError
        return y.sin()

    y = recollect.checkpoint(function, leaf(8))
    torch.manual_seed(2)
    around = torch.get_rng_state()
    with pytest.raises(StopHereError):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), around)


def test_the_state_around_a_replay_outside_of_backward_is_put_back():
    y = recollect.checkpoint(lambda x: dropout(x).sin(), leaf(8))
    torch.manual_seed(2)
    around = torch.get_rng_state()
    saved = y.grad_fn._saved_self
    assert saved.shape == (8,)
    assert torch.equal(torch.get_rng_state(), around)


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
def test_without_preserve_rng_state_the_replay_draws_from_where_the_generator_is(run):
    noises = []

    def function(x):
        noises.append(torch.rand(8))
        return (x * noises[-1]).sin()

    torch.manual_seed(1)
    first, second, third = (torch.rand(8) for _ in range(3))
    torch.manual_seed(1)
    x = leaf(8)
    run(function, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none").sum().backward()
    assert torch.equal(noises[0], first)
    assert torch.equal(noises[1], second)
    assert torch.equal(torch.rand(8), third), "and the generator has moved on"


# --- Autocast ---


class Autocast:
    """What a function sees of autocast, for each of its calls."""

    def __init__(self):
        self.seen = []

    def __call__(self, x, weight):
        self.seen.append(
            (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
        )
        return (x.sin() @ weight).exp().float()


OFF = contextlib.nullcontext
BF16 = {"dtype": torch.bfloat16}
F16 = {"dtype": torch.float16}


def autocast(**options):
    return lambda: torch.autocast("cpu", **options)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (autocast(**BF16), OFF),
        (OFF, autocast(**BF16)),
        (autocast(**BF16), autocast(**BF16)),
        (autocast(**F16), autocast(**BF16)),
        (autocast(**BF16), autocast(**F16)),
        (autocast(enabled=False), autocast(**BF16)),
        (autocast(**BF16), autocast(enabled=False)),
        (autocast(**BF16, cache_enabled=False), OFF),
        (autocast(**BF16, cache_enabled=False), autocast(**BF16)),
        (autocast(**BF16), autocast(**BF16, cache_enabled=False)),
    ],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_autocast_of_the_forward_is_in_force_in_the_replay(forward, backward, reentrant):
    x, weight, function = leaf(3, 4), leaf(4, 4, seed=1), Autocast()
    with forward():
        y = function(x, weight)
    with backward():
        y.sum().backward()
    expected = x.grad, weight.grad
    x.grad = weight.grad = None

    function.seen.clear()
    with forward():
        y = recollect.checkpoint(function, x, weight, use_reentrant=reentrant)
    with backward():
        around = ambient_state()
        y.sum().backward()
        assert ambient_state() == around
    then, now = function.seen
    assert now == then
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_dtype_and_cache_flag_are_restored_though_autocast_was_off(reentrant):
    """A region that switches autocast on by itself takes both from around it."""

    def function(x, weight):
        with torch.autocast("cpu"):
            seen.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))
            return (x.sin() @ weight).float().exp()

    seen = []
    x, weight = leaf(3, 4), leaf(4, 4, seed=1)
    with torch.autocast("cpu", enabled=False, dtype=torch.float16, cache_enabled=False):
        y = recollect.checkpoint(function, x, weight, use_reentrant=reentrant)
    y.sum().backward()
    assert seen == [(torch.float16, False)] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_replay_casts_is_not_found_by_the_next_forward(reentrant):
    """Casts of weights are cached as long as autocast is on: the next step has other weights."""

    def train(run):
        weight, x, results = leaf(4, 4, seed=1), leaf(3, 4), []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                y = run(lambda x: torch.mm(x, weight).sin(), x)
            results.append(y.detach())
            y.float().sum().backward()
            with torch.no_grad():
                weight.sub_(weight.grad)
        return [*results, weight.detach()]

    trained = train(lambda function, x: dropin.checkpoint(function, x, use_reentrant=reentrant))
    assert_equal(trained, train(lambda function, x: function(x)))


def test_autocast_around_a_replay_that_raises_is_put_back():
    calls = []

    def function(x):
        calls.append(1)
        if len(calls) > 1:
            raise StopHereError
        return x.sin()

    with torch.autocast("cpu", dtype=torch.float16):
        y = recollect.checkpoint(function, leaf(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = ambient_state()
        with pytest.raises(StopHereError):
            y.sum().backward()
        assert ambient_state() == around


def test_autocast_that_the_region_enters_by_itself_is_no_concern_of_ours():
    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ x).sin().float()

    x = leaf(3, 3)
    plain, y = function(x), recollect.checkpoint(function, x)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(gradient(y, x), gradient(plain, x))


def test_accelerator_autocast_off_in_the_forward_is_off_in_the_replay(monkeypatch):
    """Judged at the replay: the type is known though no argument lies there."""
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "cuda")
    seen = []

    def function(x):
        seen.append(torch.is_autocast_enabled("cuda"))
        return x.sin()

    y = recollect.checkpoint(function, leaf(3))
    torch.set_autocast_enabled("cuda", True)
    try:
        y.sum().backward()
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert seen == [False, False]


# --- The default device ---


class Devices:
    """Where a function's new tensors lie, for each of its calls."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen.append(torch.empty(1).device.type)
        return x.sin().exp()


META = lambda: torch.device("meta")  # noqa: E731
CPU = lambda: torch.device("cpu")  # noqa: E731


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        (META, OFF, "meta"),
        (META, CPU, "meta"),
        (META, META, "meta"),
        (CPU, META, "cpu"),
        (OFF, META, "cpu"),
        (OFF, OFF, "cpu"),
    ],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_device_context_around_the_forward_is_in_force_in_the_replay(forward, backward, expected, reentrant):
    function, x = Devices(), leaf(3)
    with forward():
        y = recollect.checkpoint(function, x, use_reentrant=reentrant)
    total = y.sum()
    with backward():
        around = ambient_state()
        total.backward()
        assert ambient_state() == around
    assert function.seen == [expected, expected]
    assert torch.equal(x.grad, gradient(x.sin().exp(), x))


def test_the_default_device_is_in_force_in_the_replay():
    function, x = Devices(), leaf(3)
    torch.set_default_device("meta")
    try:
        y = recollect.checkpoint(function, x)
    finally:
        torch.set_default_device(None)
    total = y.sum()
    total.backward()
    assert function.seen == ["meta", "meta"]

    function = Devices()
    total = recollect.checkpoint(function, x).sum()
    torch.set_default_device("meta")
    try:
        total.backward()
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert function.seen == ["cpu", "cpu"]


def test_a_device_context_with_tensors_made_inside():
    def function(x):
        return (x * torch.ones(3)).sin()

    with torch.device("meta"):
        x = torch.empty(3, requires_grad=True)
        y = recollect.checkpoint(function, x)
    y.sum().backward()  # the forward's own check would refuse tensors on the CPU
    assert x.grad.is_meta


# --- Grad mode ---


# --- Which kernels may be chosen ---


def attends(x):
    q = x.sin().view(1, 2, 4, 8)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q).exp()


def kernels():
    return (
        [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
        [torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()],
        torch._C._get_sdp_priority_order(),
        [torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled],
    )


def only_math():
    return sdpa_kernel(SDPBackend.MATH)


def math_last():
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)


def without_cudnn():
    return torch.backends.cudnn.flags(enabled=False, deterministic=True)


def without_onednn():
    return torch.backends.mkldnn.flags(enabled=False)


CHOICES = [contextlib.nullcontext, only_math, math_last, without_cudnn, without_onednn]


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("forward", CHOICES)
@pytest.mark.parametrize("backward", CHOICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_kernels_that_the_forward_could_choose_from_are_those_of_the_replay(forward, backward, reentrant):
    seen = []

    def function(x):
        seen.append(kernels())
        return attends(x)

    x, z = leaf(64), leaf(64)
    with forward():
        y = dropin.checkpoint(function, x, use_reentrant=reentrant)
        expected = attends(z)
    with backward():
        around = kernels()
        y.sum().backward()
        assert kernels() == around
        expected.sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert torch.equal(x.grad, z.grad)


def test_kernels_are_as_they_were_after_a_replay_that_raises():
    def function(x):
        if recollect.is_recomputing():
            raise StopHereError
        return attends(x)

    with only_math():
        y = recollect.checkpoint(function, leaf(64))
    around = kernels()
    with pytest.raises(StopHereError):
        y.sum().backward()
    assert kernels() == around


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("reentrant", [False, True])
def test_grad_mode_is_on_in_the_replay(around, reentrant):
    modes = []

    def function(x):
        modes.append(torch.is_grad_enabled())
        return x.sin()

    x = leaf(3)
    total = recollect.checkpoint(function, x, use_reentrant=reentrant).sum()
    with around():
        total.backward()
    assert modes[1:] == [True]
    assert torch.equal(x.grad, x.detach().cos())


def test_grad_mode_is_on_in_a_replay_outside_of_backward():
    modes = []

    def function(x):
        modes.append(torch.is_grad_enabled())
        return x.cos().sin()

    x = leaf(3)
    y = recollect.checkpoint(function, x)
    with torch.no_grad():
        assert torch.equal(y.grad_fn._saved_self, x.cos())
        assert not torch.is_grad_enabled()
    assert modes == [True, True]


def test_inference_mode_around_backward():
    modes = []

    def function(x):
        modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x.sin().exp()

    x = leaf(3)
    expected = gradient(x.sin().exp(), x)
    total = recollect.checkpoint(function, x).sum()
    with torch.inference_mode():
        total.backward()
        assert torch.is_inference_mode_enabled()
    assert modes[1:] == [(True, False)]
    assert torch.equal(x.grad, expected)


# --- Which accelerator ---


class Elsewhere(torch.Tensor):
    """A tensor without data that says it lies on some device, so that none is needed."""

    @staticmethod
    def __new__(cls, device):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), device=device)

    def __init__(self, device):
        pass

    def __repr__(self):
        return f"Elsewhere({self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].device)
        raise AssertionError(f"nothing may run on it, least of all {func}")


class Accelerator:
    """What torch.cuda is to recollect: device numbers and a generator each; a draw is a function of its state."""

    def __init__(self, count=3, initialised=True):
        self.states = [torch.tensor([10 * index, 0]) for index in range(count)]
        self._initialized = initialised
        self.current = 0
        self.log = []

    def is_initialized(self):
        return self._initialized

    def is_available(self):
        return True

    def current_device(self):
        return self.current

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, self._index(index)
        try:
            yield
        finally:
            self.current = before

    def _index(self, device):
        if device is None or isinstance(device, str):
            return self.current
        return device.index if isinstance(device, torch.device) else device

    def get_rng_state(self, device=None):
        assert self._initialized, "reading a generator would initialise the device"
        self.log.append(("get", self._index(device)))
        return self.states[self._index(device)].clone()

    def set_rng_state(self, state, device=None):
        self.log.append(("set", self._index(device)))
        self.states[self._index(device)] = state.clone()

    def draw(self, index):
        self.states[index][1] += 1
        return float(self.states[index].sum())


@pytest.fixture
def accelerator(monkeypatch):
    """A fake one, as "cuda"; the other types have no module."""
    fake = Accelerator()

    def get_device_module(device=None):
        if torch.device(device).type == "cuda":
            return fake
        raise RuntimeError(f"no module for {device}")

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # no streams of a real one
    return fake


@pytest.fixture
def default_type(monkeypatch):
    """Set the default type for one test."""

    def set_type(name):
        monkeypatch.setattr(DefaultDeviceType, "_default_device_type", name)

    set_type(None)
    return set_type


def test_the_default_type_is_cpu_without_an_accelerator(default_type, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert DefaultDeviceType.get_device_type() == "cpu"


def test_the_default_type_is_the_accelerator_and_resolved_once(default_type, monkeypatch):
    asked = []

    def current_accelerator(check_available=False):
        asked.append(check_available)
        return torch.device("xpu")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert DefaultDeviceType.get_device_type() == "xpu"
    assert DefaultDeviceType.get_device_type() == "xpu"
    assert asked == [True]


def test_the_default_type_can_be_named(default_type):
    DefaultDeviceType.set_device_type("hpu")
    assert DefaultDeviceType.get_device_type() == "hpu"
    DefaultDeviceType.set_device_type()
    assert DefaultDeviceType.get_device_type() == "cuda"
    assert _infer_device_type(torch.ones(1), 3, "text") == "cuda"
    assert _infer_device_type() == "cuda"
    assert _infer_device_type(Elsewhere("xpu:0")) == "xpu", "an argument tells"


def test_a_meta_tensor_counts_as_type_meta(default_type):
    default_type("hpu")
    assert _infer_device_type(torch.ones(1), torch.ones(1, device="meta")) == "meta"


def test_arguments_tell_at_any_depth(default_type):
    default_type("cpu")
    assert _infer_device_type([1, {"a": (torch.ones(1), Elsewhere("xpu:1"))}]) == "xpu"


def test_two_devices_of_one_type_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _infer_device_type(Elsewhere("cuda:0"), torch.ones(1), Elsewhere("cuda:1")) == "cuda"


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        (["xpu:0", "cuda:0"], "cuda"),
        (["cuda:0", "xpu:0"], "cuda"),
        (["xpu:0", "cpu", "meta", "xpu:1"], "xpu"),
        (["meta", "hpu:0"], "meta"),
        (["xpu:0", "hpu:0", "cuda:1", "cpu"], "cuda"),
    ],
)
def test_several_types_warn_once(devices, chosen):
    tensors = [Elsewhere(device) for device in devices]
    types = sorted({tensor.device.type for tensor in tensors} - {"cpu"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _infer_device_type(*tensors) == chosen
    [warning] = caught
    message = str(warning.message)
    assert "Tensor arguments, excluding CPU tensors, are detected on at least two types of devices" in message
    assert f"Device types: {types}" in message
    assert f"first device type: {tensors[0].device.type}" in message


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_over_several_types_warns_once(reentrant, accelerator):
    x = leaf(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = recollect.checkpoint(
            lambda x, *others: x.sin(), x, Elsewhere("xpu:0"), Elsewhere("cuda:0"), use_reentrant=reentrant
        )
        y.sum().backward()
    [warning] = caught
    assert "Device types: ['cuda', 'xpu'] first device type: xpu" in str(warning.message)
    assert torch.equal(x.grad, x.detach().cos())


# --- States of an accelerator's generators ---


def test_device_states_of_cpu_and_meta_are_none():
    assert get_device_states() == ([], [])
    assert get_device_states(torch.ones(2), 3, [torch.ones(1, device="meta")]) == ([], [])


def test_device_states_one_entry_per_tensor_in_order(accelerator):
    ids, states = get_device_states(
        Elsewhere("cuda:2"), [torch.ones(1), {"a": Elsewhere("cuda:0")}], "text", Elsewhere("cuda:2")
    )
    assert ids == [2, 0, 2]
    assert [state.tolist() for state in states] == [[20, 0], [0, 0], [20, 0]]


def test_device_states_are_put_back(accelerator):
    ids, states = get_device_states(Elsewhere("cuda:1"), Elsewhere("cuda:2"))
    drawn = [accelerator.draw(index) for index in (1, 2)]
    assert accelerator.states[1].tolist() == [10, 1]
    set_device_states(ids, states, device_type="cuda")
    assert [accelerator.draw(index) for index in (1, 2)] == drawn
    assert accelerator.current == 0
    assert [index for action, index in accelerator.log if action == "set"] == [1, 2]


def test_device_states_go_to_the_default_type(accelerator, default_type):
    default_type("cuda")
    set_device_states([1], [torch.tensor([7, 7])])
    assert accelerator.states[1].tolist() == [7, 7]


def test_device_states_of_meta_do_nothing(accelerator):
    set_device_states([0], [torch.tensor([7, 7])], device_type="meta")
    assert accelerator.log == []


# --- An accelerator's random numbers in a region ---


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_restores_the_generators_of_its_arguments_devices(accelerator, reentrant):
    draws = []

    def function(x, one, two):
        draws.append((accelerator.draw(1), accelerator.draw(2)))
        return x.sin()

    x = leaf(3)
    y = recollect.checkpoint(function, x, Elsewhere("cuda:1"), Elsewhere("cuda:2"), use_reentrant=reentrant)
    for index in range(3):  # somebody else draws before the backward
        accelerator.draw(index)
    around = [state.clone() for state in accelerator.states]
    y.sum().backward()
    assert draws[0] == draws[1]
    assert all(map(torch.equal, accelerator.states, around)), "put back"


def test_a_region_finds_devices_at_any_depth(accelerator):
    draws = []

    def function(x, *, options):
        draws.append(accelerator.draw(2))
        return x.sin()

    y = recollect.checkpoint(function, leaf(3), options={"masks": [Elsewhere("cuda:2")]})
    accelerator.draw(2)
    y.sum().backward()
    assert draws[0] == draws[1]


def test_a_region_without_preserve_rng_state_leaves_the_generators_alone(accelerator):
    def function(x, one):
        accelerator.draw(1)
        return x.sin()

    options = {"preserve_rng_state": False, "determinism_check": "none"}
    y = recollect.checkpoint(function, leaf(3), Elsewhere("cuda:1"), **options)
    y.sum().backward()
    assert accelerator.log == []
    assert accelerator.states[1].tolist() == [10, 2]


def test_generators_of_an_accelerator_are_put_back_after_a_replay_that_raises(accelerator):
    calls = []

    def function(x, one):
        calls.append(accelerator.draw(1))
        if len(calls) > 1:
            raise StopHereError
        return x.sin()

    y = recollect.checkpoint(function, leaf(3), Elsewhere("cuda:1"))
    accelerator.draw(1)
    around = accelerator.states[1].clone()
    with pytest.raises(StopHereError):
        y.sum().backward()
    assert calls[0] == calls[1]
    assert torch.equal(accelerator.states[1], around)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_accelerator_initialised_in_the_forward_is_an_error(accelerator, default_type, reentrant):
    default_type("cuda")
    accelerator._initialized = False

    def function(x):
        accelerator._initialized = True
        return x.sin()

    x = leaf(3)
    with pytest.raises(RuntimeError, match=r"(?i)initiali[sz]ed.*in.*forward"):
        recollect.checkpoint(function, x, use_reentrant=reentrant)

    accelerator._initialized = False
    recollect.checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_an_accelerator_that_stays_uninitialised_is_left_so(accelerator, default_type):
    default_type("cuda")
    accelerator._initialized = False
    y = recollect.checkpoint(dropout, leaf(3))
    y.sum().backward()
    assert accelerator.log == []
    assert not accelerator._initialized


def test_the_reentrant_variant_finds_devices_at_any_depth(accelerator):
    with pytest.warns(UserWarning, match="at least two types of devices") as caught:
        recollect.checkpoint(
            lambda x, others: x.sin(), leaf(3), [Elsewhere("xpu:0"), {"a": Elsewhere("cuda:0")}], use_reentrant=True
        )
    assert [warning.filename for warning in caught] == [__file__]


def test_generator_states_for_a_type_that_has_none():
    with pytest.raises(ValueError, match=r"device_type must name an accelerator .* got 'cpu'"):
        set_device_states([0], [torch.zeros(1)], device_type="cpu")
    set_device_states([], [], device_type="cpu")
    set_device_states([0], [torch.zeros(1)], device_type="meta")


def test_first_imported_where_torch_functions_are_off():
    """A lazy import inside a subclass's method must not make replays blind to subclasses."""
    script = """
        import torch
        seen = []
        class Noting(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                seen.append(function.__name__)
                return super().__torch_function__(function, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            import recollect
        x = torch.ones(3).as_subclass(Noting).requires_grad_()
        y = recollect.checkpoint(lambda x: x.sin().exp(), x, early_stop=False)
        seen.clear()
        y.sum().backward()
        assert "exp" in seen, seen
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
