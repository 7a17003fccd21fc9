"""Replays compared by value: which ones are, for how long, and what the error says.

Whether a run of a function is recorded is read off the dispatch modes that it runs under: a record needs one.
"""

import functools
import gc
import os
import pathlib
import random
import subprocess
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import recollect
from recollect import CheckpointError, checkpoint, remat, save_ops
from tools import Once, garbage_collector_off, leaf

CHECKS = ["first", "values"]


@pytest.fixture(autouse=True)
def _nothing_is_verified():
    """The code of a test is the same for all its parameters, so what one has shown would count for the next."""
    recollect.verify_again()


# --- "values": every replay; "first": until one was equal ---


class Drifting:
    """A factor that a test changes between a forward and its replay."""

    factor = 1.0


def drifting(x):
    return (x.sin() * Drifting.factor).exp()


def drifts(call, *args):
    """Whether a replay with other values is an error."""
    y = call(leaf(3), *args)
    Drifting.factor = 2.0
    try:
        y.sum().backward()
    except CheckpointError as error:
        return "Recomputed values differ" in str(error)
    finally:
        Drifting.factor = 1.0
    return False


def steady(call, *args):
    call(leaf(3), *args).sum().backward()


def test_values_compares_every_replay():
    region = remat(drifting, determinism_check="values")
    for _ in range(3):
        steady(region)
        assert drifts(region)


def test_values_compares_every_replay_of_one_forward():
    y = checkpoint(drifting, leaf(3), determinism_check="values").sum()
    y.backward(retain_graph=True)
    Drifting.factor = 2.0
    try:
        with pytest.raises(CheckpointError, match="Recomputed values differ"):
            y.backward(retain_graph=True)
    finally:
        Drifting.factor = 1.0
    y.backward()


@pytest.mark.parametrize("option", [{}, {"determinism_check": "first"}])
def test_first_is_the_default_and_compares_until_one_is_equal(option):
    assert drifts(remat(drifting, **option))
    assert drifts(remat(drifting, **option)), "what was found different is not verified"
    steady(remat(drifting, **option))
    assert not drifts(remat(drifting, **option)), "later steps pay nothing, and see nothing"


def test_every_region_of_the_first_step_is_compared():
    """All forwards begin before the first replay ends; the one at fault is the last to be replayed."""
    x = leaf(3)
    y = checkpoint(drifting, x)
    z = checkpoint(drifting, checkpoint(drifting, y)).sum()
    gradient = torch.autograd.grad(z, y, retain_graph=True)[0]  # two of the three are equal
    Drifting.factor = 2.0
    try:
        with pytest.raises(CheckpointError, match="Recomputed values differ"):
            y.backward(gradient)
    finally:
        Drifting.factor = 1.0


@pytest.mark.parametrize("check", ["default", "none"])
def test_others_do_not_look_at_values(check):
    assert not drifts(remat(drifting, determinism_check=check))


class Recorded:
    """Notes for each run whether it is recorded."""

    def __init__(self):
        self.runs = []

    def note(self):
        self.runs.append(bool(_get_current_dispatch_mode_stack()))

    def __bool__(self):
        """Whether the last step was, in the forward and in the replay."""
        forward, replay = self.runs[-2:]
        assert forward is replay
        return forward


class Layer(nn.Module):
    def __init__(self, recorded):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.recorded = recorded

    def forward(self, x):
        self.recorded.note()
        return (x * self.weight).sin().exp()

    def method(self, x):
        return self(x)


class Plain:
    """Something with layers that is no module."""

    def __init__(self, recorded):
        self.layer = Layer(recorded)

    def __call__(self, x):
        return self.layer(x)

    def method(self, x):
        return self.layer(x)


def over_a_method(layer):
    method = layer.method
    return lambda x: method(x)


# How a region comes to a layer. Each is made anew for each step.
WAYS = {
    "module": (Layer, lambda layer: layer),
    "method": (Layer, lambda layer: layer.method),
    "forward": (Layer, lambda layer: layer.forward),
    "closure": (Layer, lambda layer: lambda x: layer(x)),
    "closure over a method": (Layer, over_a_method),
    "default of an argument": (Layer, lambda layer: lambda x, layer=layer: layer(x)),
    "partial": (Layer, lambda layer: functools.partial(lambda layer, x: layer(x), layer)),
    "partial of a keyword": (Layer, lambda layer: functools.partial(lambda x, layer: layer(x), layer=layer)),
    "partial of a method": (Layer, lambda layer: functools.partial(layer.method)),
    "decorated": (Layer, lambda layer: functools.wraps(layer.method)(lambda x: layer(x))),
    "sequential": (Layer, lambda layer: nn.Sequential(layer)[0]),
    "method of a plain object": (Plain, lambda plain: plain.method),
    "plain callable": (Plain, lambda plain: plain),
    "closure over a plain object": (Plain, lambda plain: lambda x: plain(x)),
}


@pytest.mark.parametrize(("kind", "way"), [pytest.param(*way, id=name) for name, way in WAYS.items()])
def test_a_function_is_known_again_in_the_next_step(kind, way):
    recorded = Recorded()
    one = kind(recorded)
    steady(lambda x: checkpoint(way(one), x))
    assert recorded
    for _ in range(2):
        steady(lambda x: checkpoint(way(one), x))
        assert not recorded


@pytest.mark.parametrize(("kind", "way"), [pytest.param(*way, id=name) for name, way in WAYS.items()])
def test_another_layer_with_the_same_code_is_another_function(kind, way):
    """The generator is verified, and the discriminator, of the same class, gets its first step."""
    if way in (WAYS["default of an argument"][1], WAYS["closure over a plain object"][1]):
        pytest.skip("there is no telling what is in there")
    one, other = kind(Recorded()), kind(recorded := Recorded())
    steady(lambda x: checkpoint(way(one), x))
    steady(lambda x: checkpoint(way(other), x))
    assert recorded


@pytest.mark.parametrize(("kind", "way"), [pytest.param(*way, id=name) for name, way in WAYS.items()])
@pytest.mark.parametrize("check", CHECKS)
def test_no_function_is_kept_alive(kind, way, check):
    with garbage_collector_off():
        one = kind(Recorded())
        function = way(one)
        references = [weakref.ref(one), *([] if type(function) is types.MethodType else [weakref.ref(function)])]
        for _ in range(2):
            steady(remat(function, determinism_check=check))
        del one, function
        assert [reference() for reference in references] == [None] * len(references)


def test_what_is_known_of_dead_functions_is_forgotten():
    before = len(recollect._known._everything)
    for _ in range(30):
        recorded = Recorded()
        layer = Layer(recorded)
        steady(remat(layer))
        assert recorded, "a new layer in the memory of an old one"
        namespace = {}
        exec("def function(x):\n    return x.sin().exp()", namespace)
        steady(remat(namespace["function"]))
        del layer, namespace
    gc.collect()
    assert len(recollect._known._everything) <= before + 2


def test_a_module_among_the_arguments_tells_calls_apart():
    def run(layer, x):
        return layer(x)

    first, second = Layer(Recorded()), Layer(recorded := Recorded())
    steady(lambda x: checkpoint(run, first, x))
    steady(lambda x: checkpoint(run, second, x))
    assert recorded


def test_two_names_are_two_functions():
    recorded = Recorded()

    def region(x):
        recorded.note()
        return x.sin().exp()

    for name in ("encoder", "decoder", None):
        steady(remat(region, name=name))
        assert recorded
        steady(remat(region, name=name))
        assert not recorded


def test_a_forward_without_a_backward_verifies_nothing():
    recorded = Recorded()
    layer = Layer(recorded)
    checkpoint(layer, leaf(3))
    y = checkpoint(layer, leaf(3)).sum()
    assert recorded.runs == [True, True]
    y.backward()
    checkpoint(layer, leaf(3))
    assert recorded.runs == [True, True, True, False]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_verifies_nothing(error):
    recorded, fails = Recorded(), Once()

    def region(x):
        recorded.note()
        y = x.sin().exp()
        if fails():
            raise error("on purpose")
        return y

    with pytest.raises(error, match="on purpose"):
        checkpoint(region, leaf(3))
    steady(lambda x: checkpoint(region, x))
    assert recorded.runs == [True, True, True]
    steady(lambda x: checkpoint(region, x))
    assert not recorded


@pytest.mark.parametrize("wrapped", [True, False])
def test_one_function_is_verified_again(wrapped):
    ours, other = Recorded(), Recorded()

    def one(x):
        ours.note()
        return x.sin().exp()

    def another(x):
        other.note()
        return x.sin().exp()

    for _ in range(2):
        steady(remat(one))
        steady(remat(another))
    recollect.verify_again(remat(one) if wrapped else one)
    steady(remat(one))
    steady(remat(another))
    assert ours
    assert not other
    steady(remat(one))
    assert not ours


@pytest.mark.parametrize(("kind", "way"), [pytest.param(*way, id=name) for name, way in WAYS.items()])
def test_everything_is_verified_again(kind, way):
    recorded = Recorded()
    one = kind(recorded)
    for asked in (lambda: recollect.verify_again(), lambda: recollect.verify_again(way(one))):
        for _ in range(2):
            steady(lambda x: checkpoint(way(one), x))
        assert not recorded
        asked()
        steady(lambda x: checkpoint(way(one), x))
        assert recorded


@pytest.mark.parametrize("bad", [3, "model", torch.ones(1)])
def test_only_a_function_is_verified_again(bad):
    with pytest.raises(TypeError, match="must be callable"):
        recollect.verify_again(bad)


def test_from_the_third_step_on_there_is_no_mode_and_no_digest(monkeypatch):
    made, recorded = [], Recorded()
    take = recollect._digest._digest_of
    monkeypatch.setattr(recollect._digest, "_digest_of", lambda tensor: made.append(tensor.shape) or take(tensor))
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Layer(recorded), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for _ in range(4):
        checkpoint(lambda x: model(x).tanh(), leaf(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(made))
    assert recorded.runs == [True, True, False, False, False, False, False, False]
    assert counts[0] > 0
    assert counts[1:] == counts[:1] * 3


SCRIPT = """
import torch, recollect
from recollect import dropin
def found(checkpoint, **options):
    factors = iter([1.0, 1.0, 1.0, 2.0])
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        y = checkpoint(lambda x: (x.sin() * next(factors)).exp(), x, **options)
        try:
            y.sum().backward()
        except recollect.CheckpointError:
            return True
    return False
print(found(recollect.checkpoint), found(dropin.checkpoint, use_reentrant=False),
      found(recollect.checkpoint, determinism_check="none"), found(recollect.checkpoint, determinism_check="values"))
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [("values", "True True True True"), ("none", "False False False False"), ("", "False False False True")],
)
def test_the_environment_decides_for_a_whole_run(value, expected):
    done = run_script(SCRIPT, RECOLLECT_CHECK=value)
    assert done.stdout.split("\n")[0] == expected, done.stderr


def test_the_environment_says_something_else():
    done = run_script("import recollect", RECOLLECT_CHECK="value")
    assert done.returncode
    assert "RECOLLECT_CHECK must be one of 'none', 'default', 'first', 'values', got 'value'" in done.stderr


def run_script(script, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


# --- Memory without values ---


class Junk(TorchDispatchMode):
    """New memory never holds the same."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in func.overloadpacket.__name__:
            self.count += 1
            result.fill_(self.count)
        return result


class Saves(torch.autograd.Function):
    """Saves a tensor that backward does not need."""

    @staticmethod
    def forward(ctx, x, tensor):
        ctx.save_for_backward(tensor)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def unwritten(x):
    return torch.empty_like(x)


def a_copy(x):
    return torch.empty_like(x).clone()


def a_copy_in_another_order(x):
    return torch.empty_like(x).t().copy_(torch.empty_like(x))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("make", [unwritten, a_copy, a_copy_in_another_order])
def test_memory_that_nobody_has_written_is_not_compared(make, check):
    with Junk() as junk:
        x = leaf(3, 3)
        for _ in range(2):
            checkpoint(lambda x: Saves.apply(x.sin(), make(x)).sin(), x, determinism_check=check).sum().backward()
    assert junk.count >= 4


@pytest.mark.parametrize("check", CHECKS)
def test_what_was_written_to_such_memory_is_compared(check):
    with Junk() as junk:
        y = checkpoint(
            lambda x: Saves.apply(x.sin(), a_copy(x).fill_(junk.count)).sin(), leaf(3), determinism_check=check
        )
        with pytest.raises(CheckpointError, match="Recomputed values differ"):
            y.sum().backward()


@pytest.mark.parametrize("check", CHECKS)
def test_a_copy_of_such_memory_that_an_inner_region_keeps(check):
    """Dropout draws into memory that it makes: if the policy wants a copy of that, there is nothing in it yet."""
    policy = save_ops(torch.ops.aten.empty_like, on_mutation="copy")

    def function(x):
        return checkpoint(torch.nn.functional.dropout, x.sin(), policy=policy).sin()

    grads = []
    with Junk():
        for call in (functools.partial(checkpoint, determinism_check=check), lambda function, x: function(x)):
            torch.manual_seed(0)
            x = leaf(3)
            call(function, x).sum().backward()
            grads.append(x.grad)
    assert torch.equal(*grads)


# --- What the error says ---


class Block(nn.Module):
    def __init__(self, between=100):
        super().__init__()
        self.between = between
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.gain = 1.0

    def forward(self, x):
        y = self.inner(x)
        for _ in range(self.between):
            y = y + 0.0
        return (y * self.gain).exp().sin()  # the gain


GAIN = 1 + pathlib.Path(__file__).read_text(encoding="utf-8").split("# the gain\n")[0].count("\n")


def error_of(region, between, *args, **options):
    y = checkpoint(region, *(args or (leaf(2, 3),)), **options)
    between()
    with pytest.raises(CheckpointError) as info:
        y.sum().backward()
    return info.value


def test_the_first_operator_that_differs_is_named():
    block = Block()
    error = error_of(block, lambda: setattr(block, "gain", 2.0))
    assert error.operator == "aten.mul.Tensor"
    assert error.where == f"{__file__}:{GAIN} in forward"
    assert "'gain' of Block was 1.0 in the forward and is 2.0" in error.cause
    message = str(error)
    assert all(fact in message for fact in ("aten.mul", error.where, error.cause, "Block", "float32[2, 3]", "norm"))
    assert len(message.splitlines()) <= 10
    assert max(map(len, message.splitlines())) <= 400


def test_under_values_the_operators_since_the_last_equal_one_are_named():
    block = Block(between=3)
    error = error_of(block, lambda: setattr(block, "gain", 2.0), determinism_check="values")
    assert f"{__file__}:{GAIN} in forward" in str(error)
    assert len(str(error).splitlines()) <= 14
    assert error.where in str(error)


def test_the_module_path_is_named():
    outer = nn.ModuleDict({"block": nn.ModuleList([Block()])})
    block = outer["block"][0]
    layer = block.inner[0]
    error = error_of(block, lambda: layer.register_forward_hook(lambda module, args, output: output * 2))
    assert "Block.inner.0" in str(error)
    assert error.where.startswith(__file__)


def test_the_operator_lists_are_for_debug_only():
    block = Block()
    error = error_of(block, lambda: setattr(block, "gain", 2.0), debug=True)
    assert len(str(error).splitlines()) > 200
    assert error.operator == "aten.mul.Tensor"


THE_GLOBAL = 1.0


def test_causes(monkeypatch):
    factor, table, training = 1.0, torch.ones(3), nn.Dropout(0.5).eval()

    def of_a_closure(x):
        return (x * factor).exp()

    def of_a_global(x):
        return (x * THE_GLOBAL).exp()

    def of_a_tensor(x):
        return (x * table).exp()

    def of_a_branch(x):
        return x.exp().sin() if factor == 3.0 else x.sin().exp()

    def of_training(x):
        return (training(x) * 2).exp() if training.training else x.exp()

    def rebind(value):
        nonlocal factor
        factor = value

    for region, between, words in [
        (of_a_closure, lambda: rebind(2.0), "the closure's 'factor' was 1.0 in the forward and is 2.0"),
        (of_a_global, lambda: monkeypatch.setitem(globals(), "THE_GLOBAL", 2.0), "the global 'THE_GLOBAL' was 1.0"),
        (of_a_tensor, lambda: table.mul_(2), "changed since the forward"),
        (of_a_branch, lambda: rebind(3.0), "another branch was taken: the closure's 'factor' was 2.0"),
    ]:
        error = error_of(region, between)
        assert words in error.cause
        assert error.cause in str(error)
        assert error.where.startswith(__file__)


def test_numbers_that_are_drawn_and_do_not_matter_hide_no_other_cause():
    block = Block()

    def region(x):
        random.random()
        return block(x)

    error = error_of(region, lambda: setattr(block, "gain", 2.0))
    assert "Python's random was drawn from" in error.cause
    assert "'gain' of Block was 1.0 in the forward and is 2.0" in error.cause


def test_a_parameter_of_another_dtype_is_not_another_branch():
    layer = nn.Linear(3, 3)
    error = error_of(layer, layer.double)
    assert "the parameter 'weight' of Linear (float64[3, 3] on cpu) was changed" in error.cause
    assert "branch" not in str(error)


def test_an_operator_that_no_line_of_user_code_runs():
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.Tanh())
    error = error_of(layers, lambda: None)
    assert "changed by aten.mul_.Tensor, at no line of user code" in str(error)


@pytest.mark.parametrize("check", ["default", "first", "values"])
def test_the_facts_are_there_for_other_errors_too(check):
    takes = Once()

    def region(x):
        return x.exp().exp() if takes() else x.sum().exp().exp()

    error = error_of(region, lambda: None, determinism_check=check)
    assert "different metadata" in str(error)
    assert error.where.startswith(__file__)
    assert (error.operator is None) is (check == "default")
    assert CheckpointError("made by hand").operator is None
    assert isinstance(error, RuntimeError)


def test_an_error_leaves_nothing_behind_and_the_function_works_afterwards():
    block = Block()
    error_of(block, lambda: setattr(block, "gain", 2.0))
    x, z = leaf(2, 3), leaf(2, 3)
    checkpoint(block, x).sum().backward()
    block(z).sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_an_error_of_the_function_in_a_replay_arrives_as_it_is():
    first = Once()

    def region(x):
        y = x.sin().exp()
        if not first():
            raise LookupError("only in the replay")
        return y.exp()

    with pytest.raises(LookupError, match="only in the replay"):
        checkpoint(region, leaf(3)).sum().backward()
