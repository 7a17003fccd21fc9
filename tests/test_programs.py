"""Small programs times ways to run them: outputs, gradients and random state equal plain autograd's, bit for bit.

A program is built anew for every run: `build()` gives a function, its arguments and the leaves whose gradients count.
A way to run it takes the function and gives one that makes regions of it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

import recollect.dropin
from recollect import checkpoint, remat
from tools import assert_equal, leaf


@dataclasses.dataclass(frozen=True)
class Program:
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], list[torch.Tensor]]]
    random: bool = False


PROGRAMS: dict[str, Program] = {}


def program(build=None, *, random=False):
    """Add what is built here to the table."""
    if build is None:
        return lambda build: program(build, random=random)
    PROGRAMS[build.__name__] = Program(build, random)
    return build


def with_module(module, *args):
    """A module as a program: gradients for its parameters and the arguments."""
    leaves = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor) and value.requires_grad]
    return module, args, [*leaves, *module.parameters()]


class InnerRegions:
    wanted = True


def inner_region(function, *args):
    """A region that belongs to the program; none in the run without any."""
    return checkpoint(function, *args) if InnerRegions.wanted else function(*args)


# --- Functions ---


@program
def elementwise_chain():
    x = leaf(5)
    return lambda x: x.sin().exp().tanh().cos(), (x,), [x]


@program
def polynomial():
    x = leaf(5)
    return lambda x: 3 * x**3 - x**2 / (x.abs() + 1), (x,), [x]


@program
def two_matmuls():
    x, w, v = leaf(2, 3), leaf(3, 4, seed=1), leaf(4, 2, seed=2)
    return lambda x, w, v: (x @ w).relu() @ v, (x, w, v), [x, w, v]


@program
def softmax_cross_entropy():
    x, labels = leaf(4, 3), torch.tensor([0, 2, 1, 1])
    return lambda x, labels: F.cross_entropy(x * 2, labels), (x, labels), [x]


@program
def log_sum_exp():
    x = leaf(4, 3)
    return lambda x: x.logsumexp(1) - x.log_softmax(0).sum(1), (x,), [x]


@program
def in_place_relu():
    x = leaf(4, 3)
    return lambda x: (x * 2).relu_().add(1).sin(), (x,), [x]


@program
def in_place_chain():
    x = leaf(4)
    return lambda x: x.clone().mul_(3).add_(x).sigmoid_(), (x,), [x]


@program
def writes_into_a_buffer():
    x = leaf(3)

    def function(x):
        buffer = x.new_zeros(2, 3)
        buffer[0] = x.exp()
        buffer[1] = x.sin()
        return buffer.prod(0)

    return function, (x,), [x]


@program
def views():
    x = leaf(4, 6)
    return lambda x: x.view(2, 2, 6).transpose(0, 2).reshape(6, 4)[1:4, ::2].exp(), (x,), [x]


@program
def view_of_an_input_as_output():
    x = leaf(2, 3)
    return lambda x: (x.t(), x.exp()), (x,), [x]


@program
def unbind_and_stack():
    x = leaf(3, 4)
    return lambda x: torch.stack([row.sin() * i for i, row in enumerate(x.unbind(0))]).cumsum(0).exp(), (x,), [x]


@program
def several_outputs():
    x = leaf(4)
    return lambda x: (x.sin(), x.exp(), (x > 0), x.cos().detach()), (x,), [x]


@program
def dict_of_outputs():
    x, y = leaf(4), leaf(4, seed=1)
    return lambda x, y: {"sum": (x + y).exp(), "rest": [x * y, {"deep": y.sin()}], "n": 4}, (x, y), [x, y]


@program
def structured_inputs():
    x, y, z = leaf(3), leaf(3, seed=1), torch.ones(3)
    return lambda d, pair: (d["x"] * pair[0] + pair[1][0]).exp(), ({"x": x}, (y, [z])), [x, y]


@program
def gather_and_scatter():
    x, index = leaf(4, 3), torch.tensor([[0, 2], [1, 1], [2, 0], [0, 0]])
    return (
        lambda x, index: torch.zeros(4, 3).scatter_add(1, index, x.gather(1, index).exp()).sin(),
        (x, index),
        [x],
    )


@program
def fancy_indexing():
    x, index = leaf(5, 2), torch.tensor([4, 0, 0, 2])
    return lambda x, index: x.tanh()[index].exp() * x[x[:, 0].argsort()][:4], (x, index), [x]


@program
def top_k():
    x = leaf(6)
    return lambda x: x.sin().topk(3), (x,), [x]


@program
def sort_and_max():
    x = leaf(3, 4)
    return lambda x: (x.exp().sort(1)[0], x.cos().max(0)), (x,), [x]


@program
def where_and_clamp():
    x = leaf(6)
    return lambda x: torch.where(x > 0, x.exp(), x.sin()).clamp(-0.5, 0.5) * x, (x,), [x]


@program
def einsum():
    a, b = leaf(2, 3, 4), leaf(2, 4, 5, seed=1)
    return lambda a, b: torch.einsum("bij,bjk->bik", a.sin(), b).exp(), (a, b), [a, b]


@program
def loop_with_a_state():
    x, w = leaf(2, 3), leaf(3, 3, seed=1)

    def function(x, w):
        state = x
        for step in range(4):
            state = (state @ w).tanh() + step * x
        return state

    return function, (x, w), [x, w]


@program
def loop_as_long_as_the_data_says():
    x = leaf(4)

    def function(x):
        steps = 0
        while x.norm() < 50 and steps < 8:
            x = x * 2 + x.sin()
            steps += 1
        return x, steps

    return function, (x,), [x]


@program
def complex_numbers():
    x = leaf(4, dtype=torch.complex64)
    return lambda x: ((x * x.conj()).real.sqrt(), (x * 1j).exp()), (x,), [x]


@program
def fourier():
    x = leaf(8)
    return lambda x: torch.fft.irfft(torch.fft.rfft(x.sin()) * 2j).exp(), (x,), [x]


@program
def linear_algebra():
    x = leaf(3, 3, dtype=torch.float64)

    def function(x):
        matrix = x @ x.t() + 3 * torch.eye(3, dtype=torch.float64)
        return torch.linalg.cholesky(matrix), torch.linalg.solve(matrix, x), torch.logdet(matrix)

    return function, (x,), [x]


@program
def low_precision():
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    return lambda x, w: (x.bfloat16() @ w.bfloat16()).exp().float().sin(), (x, w), [x, w]


@program
def autocast():
    x, w = leaf(4, 4), leaf(4, 4, seed=1)

    def function(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return ((x @ w).exp() @ w).float().sin()

    return function, (x, w), [x, w]


@program
def no_grad_in_the_middle():
    x = leaf(4)

    def function(x):
        with torch.no_grad():
            scale = x.exp().sum()
        return (x * scale).sin().exp()

    return function, (x,), [x]


@program
def detached_branch():
    x = leaf(4)
    return lambda x: (x.exp().detach() * x.sin()).cos(), (x,), [x]


@program
def leaf_from_outside():
    w, x = leaf(3, 3), torch.ones(2, 3)
    return lambda x: (x @ w).exp(), (x,), [w]


@program
def empty_tensors():
    x, y = leaf(0, 3), leaf(2, 3, seed=1)
    return lambda x, y: torch.cat([x.exp(), y.sin()]).exp(), (x, y), [x, y]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


class SinCos(torch.autograd.Function):
    """Saves an output and something in between, marks one output as without gradient."""

    @staticmethod
    def forward(ctx, x):
        sin, cos = x.sin(), x.cos()
        rounded = sin.round()
        ctx.save_for_backward(sin, cos, rounded)
        ctx.mark_non_differentiable(rounded)
        return sin, cos, rounded

    @staticmethod
    def backward(ctx, grad_sin, grad_cos, _):
        sin, cos, rounded = ctx.saved_tensors
        return grad_sin * cos - grad_cos * sin + 0 * rounded


@program
def custom_function():
    x = leaf(4)
    return lambda x: Cube.apply(x.sin()).exp(), (x,), [x]


@program
def custom_function_with_several_outputs():
    x = leaf(4)
    return lambda x: tuple(value * 2 for value in SinCos.apply(x.exp())), (x,), [x]


# --- Modules ---


@program
def mlp():
    return with_module(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)), leaf(4, 3))


@program
def layer_norm():
    return with_module(nn.Sequential(nn.LayerNorm(4), nn.SiLU(), nn.LayerNorm(4)), leaf(3, 4))


@program
def group_norm():
    return with_module(nn.Sequential(nn.GroupNorm(2, 4), nn.Softplus()), leaf(2, 4, 3))


@program
def convolution_and_batch_norm():
    norm = nn.BatchNorm2d(2)
    norm.running_mean.fill_(0.1)
    return with_module(nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.ReLU(inplace=True)).eval(), leaf(2, 1, 5, 5))


@program
def pooling():
    return with_module(nn.Sequential(nn.MaxPool2d(2), nn.Sigmoid(), nn.AvgPool2d(2)), leaf(1, 1, 8, 8))


@program
def embedding():
    return with_module(nn.Sequential(nn.Embedding(7, 3), nn.Tanh()), torch.tensor([[1, 6], [1, 2]]))


@program
def attention():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, mask):
            result, weights = self.attention(x, x, x, attn_mask=mask, need_weights=True)
            return result, weights

    mask = torch.triu(torch.full((3, 3), -1e9), 1)
    return with_module(Attention(), leaf(2, 3, 4), mask)


@program
def scaled_dot_product():
    q, k, v = leaf(1, 2, 3, 4), leaf(1, 2, 3, 4, seed=1), leaf(1, 2, 3, 4, seed=2)
    return lambda q, k, v: F.scaled_dot_product_attention(q.sin(), k, v, is_causal=True).exp(), (q, k, v), [q, k, v]


@program
def transformer_layer():
    return with_module(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), leaf(2, 3, 4))


@program
def rnn_cell():
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, xs):
            state = xs.new_zeros(2, 4)
            for x in xs:
                state = self.cell(x, state)
            return state

    return with_module(Unrolled(), leaf(3, 2, 3))


@program
def lstm():
    return with_module(nn.LSTM(3, 4), leaf(3, 2, 3))


@program
def residual_blocks():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = x + inner_region(block, x)
            return x.exp()

    return with_module(Residual(), leaf(2, 3))


@program
def regions_in_regions():
    x = leaf(3)

    def innermost(x):
        return x.sin().exp()

    def middle(x):
        return inner_region(innermost, x.cos()) * x

    return lambda x: inner_region(middle, x.tanh()).sin(), (x,), [x]


@program
def gradient_penalty():
    x, w = leaf(3), leaf(3, seed=1)

    def function(x, w):
        y = (x * w).sin().exp()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, grad.pow(2).sum()

    return function, (x, w), [x, w]


@program
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)

        def forward(self, ids):
            return (self.embed(ids).tanh() @ self.embed.weight.t()).log_softmax(-1)

    return with_module(Tied(), torch.tensor([0, 3, 3]))


# --- Programs that draw random numbers ---


@program(random=True)
def dropout():
    return with_module(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.3)), leaf(4, 3))


@program(random=True)
def dropout_in_place():
    return with_module(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5, inplace=True), nn.Tanh()), leaf(4, 3))


@program(random=True)
def noise():
    x = leaf(4)
    return lambda x: (x + torch.randn(4)).exp() * torch.rand_like(x), (x,), [x]


@program(random=True)
def random_path():
    x = leaf(4)

    def function(x):
        for flip in torch.rand(5).tolist():
            x = x.sin().exp() if flip < 0.5 else x.cos()
        return x

    return function, (x,), [x]


@program(random=True)
def rrelu():
    return with_module(nn.Sequential(nn.Linear(3, 8), nn.RReLU()), leaf(4, 3))


@program(random=True)
def forked_generator():
    x = leaf(4)

    def function(x):
        with torch.random.fork_rng():
            noise = torch.rand(4)
        return (x * noise).sin().exp()

    return function, (x,), [x]


@program(random=True)
def attention_with_dropout():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.4, batch_first=True)
    return with_module(layer, leaf(2, 3, 4))


@program(random=True)
def nested_regions_with_dropout():
    x = leaf(32)

    def inner(x):
        return F.dropout(x.sin().exp(), 0.5)

    return lambda x: F.dropout(inner_region(inner, F.dropout(x, 0.2)).exp(), 0.5), (x,), [x]


# --- Ways to run a program ---


def region(**options):
    return lambda function: lambda *args: checkpoint(function, *args, **options)


def nested(**options):
    def wrap(function):
        def inner(*args):
            return checkpoint(function, *args, **options)

        return lambda *args: checkpoint(inner, *args, **options)

    return wrap


def nested_three_deep_with_work_around(function):
    def level(depth):
        def call(*args):
            side = torch.ones(2, requires_grad=True).exp()  # something to save before and after the next region
            result = checkpoint(level(depth - 1) if depth else function, *args)
            side.sin()
            return result

        return call

    return level(2)


def under(make_context, **options):
    def wrap(function):
        def call(*args):
            with make_context():
                return checkpoint(function, *args, **options)

        return call

    return wrap


WAYS = {
    "default": region(),
    "early_stop=False": region(early_stop=False),
    "determinism_check=none": region(determinism_check="none"),
    "debug": region(debug=True),
    "preserve_rng_state=False": region(preserve_rng_state=False),
    "nested": nested(),
    "nested, early_stop=False": nested(early_stop=False),
    "three deep": nested_three_deep_with_work_around,
    "under save_on_cpu": under(save_on_cpu),
    "under copying hooks": under(lambda: saved_tensors_hooks(torch.clone, torch.clone), early_stop=False),
    "remat": remat,
    "remat, early_stop=False": remat(early_stop=False, name="block"),
    "drop-in": lambda function: lambda *args: recollect.dropin.checkpoint(function, *args, use_reentrant=False),
}


def loss_of(result):
    """A number that depends on every output in its own way."""
    total = torch.zeros((), dtype=torch.float64)
    for value in tree_leaves(result):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            parts = torch.view_as_real(value) if value.is_complex() else value
            weights = torch.linspace(-1, 2, parts.numel(), dtype=torch.float64).view(parts.shape)
            total = total + (parts * weights).sum()
    return total


def run_plainly(program):
    InnerRegions.wanted = False
    try:
        return run(program, lambda function: function)
    finally:
        InnerRegions.wanted = True


def run(program, wrap):
    torch.manual_seed(3)
    function, args, leaves = program.build()
    torch.manual_seed(7)
    result = wrap(function)(*args)
    after_forward = torch.get_rng_state()
    loss = loss_of(result)
    passes = [torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=again) for again in (True, False)]
    return result, passes, (after_forward, torch.get_rng_state())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_outputs_gradients_and_random_state_equal_those_of_plain_autograd(name, way):
    program = PROGRAMS[name]
    if program.random and way == "preserve_rng_state=False":
        pytest.skip("other random numbers are what is asked for there")
    expected, expected_passes, expected_state = run_plainly(program)
    result, passes, state = run(program, WAYS[way])
    assert_equal(result, expected)
    assert_equal(passes, expected_passes)
    assert_equal(state, expected_state)
    assert any(grad is not None and grad.abs().sum() > 0 for grad in passes[0])


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.random])
def test_random_programs_depend_on_the_random_state(name):
    """So that the comparison above says something about preserving it."""

    def other_numbers(function):
        def call(*args):
            torch.manual_seed(12345)
            return function(*args)

        return call

    _, plain, _ = run_plainly(PROGRAMS[name])
    _, other, _ = run(PROGRAMS[name], other_numbers)
    pairs = [(one, two) for one, two in zip(plain[0], other[0], strict=True) if one is not None]
    assert not all(torch.equal(one, two) for one, two in pairs)
