"""Where a replay stops: while the last tensor that is needed is packed, and never before that tensor is filled.

Of all operators, few write memory after they packed it: rrelu its noise, the batch norms their running statistics,
cuDNN's recurrent layers the state of their dropout. All of them but `rrelu_with_noise` pack a result too, so the last
thing they pack comes after their kernel. Everything else stops with the last pack: the kernels that run in a replay
are compared with those that had run in the forward when its last tensor was packed, neither more nor fewer.
"""

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from recollect import Recompute, Save, by_name, checkpoint, dropin, policies, region, remat, save_ops
from tools import IN_PLACE, CountOperators, assert_equal, leaf

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _unfilled_memory_is_nan(monkeypatch):
    """Memory that nobody has written often holds zeros, or what an equal run left there: then a test could not tell."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def plainly(function, *args, **_):
    return function(*args)


def nested(function, *args, **options):
    return checkpoint(lambda *args: checkpoint(function, *args, **options), *args, **options)


WAYS = {
    "a region": checkpoint,
    "nested": nested,
    "three deep": lambda function, *args: nested(lambda *args: checkpoint(function, *args), *args),
    "to the end": functools.partial(checkpoint, early_stop=False),
    "debug": functools.partial(checkpoint, debug=True),
    "unchecked": functools.partial(checkpoint, determinism_check="none"),
    "remat": lambda function, *args: remat(function)(*args),
    "drop-in": functools.partial(dropin.checkpoint, use_reentrant=False),
    "reentrant": functools.partial(dropin.checkpoint, use_reentrant=True),
    "a policy": functools.partial(checkpoint, policy=policies.save_everything_but_pointwise),
    # They write what they are given: their results are not kept instead of running them.
    "a policy that wants it": functools.partial(
        checkpoint, policy=save_ops(aten.rrelu_with_noise, aten.rrelu_with_noise_, aten.native_batch_norm)
    ),
    "a named region": lambda function, *args: checkpoint(
        lambda *args: region("inner", function)(*args), *args, policy=by_name({"inner": Recompute()})
    ),
    "a kept region": lambda function, *args: checkpoint(
        lambda *args: region("inner", function)(*args), *args, policy=by_name({"inner": Save()})
    ),
}


def outcome(call, program, leaves, passes=1):
    """What a program gives, its gradients at each pass, and where it leaves the generator."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
    wanted = [x for x in leaves if x.requires_grad]
    torch.manual_seed(0)
    result = program(call, *leaves)
    total = result.square().sum()
    grads = []
    for left in reversed(range(passes)):
        for x in wanted:
            x.grad = None
        total.backward(retain_graph=left > 0)
        grads += [x.grad for x in wanted]
    return result, grads, torch.get_rng_state()


def assert_like_plain(call, program, *leaves, passes=1):
    expected = outcome(plainly, program, leaves, passes)
    assert any(grad is not None for grad in expected[1])
    assert not any(torch.isnan(grad).any() for grad in expected[1] if grad is not None), "else nothing could be told"
    got = outcome(call, program, leaves, passes)
    assert_equal(got[0].detach(), expected[0].detach())
    assert_equal(got[1:], expected[1:])


# --- Operators that write what they packed ---


def own_noise(make, operator=aten.rrelu_with_noise):
    """The operator with noise of the caller's own: any memory of the input's shape and dtype."""
    return lambda x: operator(x, make(x), 0.125, 0.333, True)


def with_statistics(operator):
    """A norm over running statistics that are new at each call, as it writes them."""

    def function(x):
        statistics = torch.zeros(x.shape[-1]), torch.ones(x.shape[-1])
        result = operator(x.contiguous(), *statistics)
        return result if isinstance(result, torch.Tensor) else result[0]

    return function


def instance_norm(x):
    statistics = torch.zeros(x.shape[0]), torch.ones(x.shape[0])
    return F.instance_norm(x[None], *statistics)[0]


RRELU = {
    "F.rrelu": lambda x: F.rrelu(x, training=True),
    "torch.rrelu": lambda x: torch.rrelu(x, 0.1, 0.3, True),
    "nn.RReLU": nn.RReLU(),
    "nn.RReLU of one slope": nn.RReLU(0.2, 0.2),
    "not training": nn.RReLU().eval(),
    "own noise": own_noise(torch.empty_like),
    "own noise, filled before": own_noise(lambda x: torch.full_like(x, 7.0)),
    "own noise, detached": own_noise(lambda x: torch.empty_like(x).detach()),
    "own noise, written in place before": own_noise(lambda x: torch.empty_like(x).zero_()),
    "own noise, a row of a buffer": own_noise(lambda x: x.new_empty(2, *x.shape)[1]),
    "own noise, a view of a buffer": own_noise(lambda x: x.new_empty(x.numel()).view(x.shape)),
}
RRELU_IN_PLACE = {
    "F.rrelu_": lambda x: F.rrelu_(x, training=True),
    "F.rrelu in place": lambda x: F.rrelu(x, training=True, inplace=True),
    "torch.rrelu_": lambda x: torch.rrelu_(x, 0.1, 0.3, True),
    "nn.RReLU in place": nn.RReLU(inplace=True),
    "own noise in place": own_noise(torch.empty_like, aten.rrelu_with_noise_),
    "own noise in place, written before": own_noise(lambda x: torch.empty_like(x).zero_(), aten.rrelu_with_noise_),
}
NORMS = {
    "batch_norm": with_statistics(lambda x, *s: F.batch_norm(x, *s, training=True)),
    "native_batch_norm": with_statistics(lambda x, *s: aten.native_batch_norm(x, None, None, *s, True, 0.1, 1e-5)),
    "_native_batch_norm_legit": with_statistics(
        lambda x, *s: aten._native_batch_norm_legit(x, None, None, *s, True, 0.1, 1e-5)
    ),
    "_batch_norm_with_update": with_statistics(
        lambda x, *s: aten._batch_norm_with_update(x, torch.ones(6), torch.zeros(6), *s, 0.1, 1e-5)
    ),
    "instance_norm": instance_norm,
}
WRITERS = {**RRELU, **RRELU_IN_PLACE, **NORMS}


def without_using_it(y):
    y.exp().sin()
    return y


def under_autocast(operator, x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return operator(x @ w).float()


def with_a_backward_inside(operator, x, w):
    y = operator(x.sin())
    (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    return y * grad


PLACES = {
    "alone": lambda operator, x, w: operator(x * 1),
    "first": lambda operator, x, w: operator(x * 1).sin() @ w,
    "last": lambda operator, x, w: operator(x.sin() @ w),
    "last, then what saves nothing": lambda operator, x, w: (operator(x.sin()) + 1).t().contiguous(),
    "middle": lambda operator, x, w: operator(x.sin()).exp() @ w,
    "middle, the rest frozen": lambda operator, x, w: operator(x.sin()) @ w.detach(),
    "middle, the rest dead": lambda operator, x, w: without_using_it(operator(x.sin())),
    "the weight's part dead": lambda operator, x, w: [operator(x.sin()), x.cos() @ w][0],
    "twice in a row": lambda operator, x, w: operator(operator(x.sin())),
    "twice, with what saves nothing between": lambda operator, x, w: operator(operator(x.sin()) + 1),
    "twice, side by side": lambda operator, x, w: operator(x.sin()) + operator(x.cos()),
    "twice, the second dead": lambda operator, x, w: [operator(x.sin()), operator(x.cos())][0],
    "its input frozen": lambda operator, x, w: operator(x.detach().sin()) * x,
    "its input frozen, then another": lambda operator, x, w: operator(operator(x.detach().sin()) * x),
    "on a view": lambda operator, x, w: operator(x.sin()[1:].t()),
    "before its input's other use": lambda operator, x, w: operator(x.sin()) * x.cos(),
    "under autocast": under_autocast,
    "a backward inside": with_a_backward_inside,
}


def places_of(name):
    # The second of two in a row, in place, would overwrite the result that the first one saved.
    return [place for place in PLACES if not (name in RRELU_IN_PLACE and place == "twice in a row")]


def program_of(operator, place):
    return lambda call, x, w: call(functools.partial(PLACES[place], operator), x, w)


@pytest.mark.parametrize(("name", "place"), [(name, place) for name in WRITERS for place in places_of(name)])
def test_gradients_equal_plain_autograd(name, place):
    assert_like_plain(checkpoint, program_of(WRITERS[name], place), leaf(6, 6), leaf(6, 6, seed=1))


@pytest.mark.filterwarnings("ignore:the policy .* kept nothing")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITERS)
def test_gradients_in_every_kind_of_region(name, way):
    for place in places_of(name):
        if way in ("reentrant", "a policy that wants it") and place == "a backward inside":
            continue  # neither has a graph there to go through
        assert_like_plain(WAYS[way], program_of(WRITERS[name], place), leaf(6, 6), leaf(6, 6, seed=1))


@pytest.mark.parametrize("call", [checkpoint, nested], ids=["a region", "nested"])
@pytest.mark.parametrize("name", WRITERS)
def test_gradients_of_repeated_passes(name, call):
    for place in places_of(name):
        assert_like_plain(call, program_of(WRITERS[name], place), leaf(6, 6), leaf(6, 6, seed=1), passes=3)


@pytest.mark.parametrize("name", [*RRELU, *RRELU_IN_PLACE])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_in_other_precisions(dtype, name):
    operator = WRITERS[name]
    for place in places_of(name):
        assert_like_plain(checkpoint, program_of(operator, place), leaf(6, 6, dtype=dtype), leaf(6, 6, dtype=dtype))


SHAPES = {
    "a number": lambda x: x.sum(),
    "nothing": lambda x: x[:0].sin(),
    "a row": lambda x: x[2],
    "transposed": lambda x: x.sin().t(),
    "every second": lambda x: x.sin()[:, ::2],
    "expanded": lambda x: x.sin().expand(3, 6, 6),
    "of images, channels last": lambda x: x.sin().view(1, 2, 3, 6).to(memory_format=torch.channels_last),
    "a chunk": lambda x: x.sin().chunk(2)[1],
    "what unbind gives": lambda x: x.sin().unbind()[3],
    "a broadcast product": lambda x: x[:, :1] * x[:1],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_of_all_shapes_and_strides(shape):
    for call in (checkpoint, nested):
        assert_like_plain(
            call, lambda call, x: call(lambda x: F.rrelu(SHAPES[shape](x), training=True) + x.sum(), x), leaf(6, 6)
        )


def test_the_input_is_a_leaf_or_an_argument():
    for call in (checkpoint, nested):
        assert_like_plain(call, lambda call, x: call(lambda x: F.rrelu(x, training=True), x), leaf(40))
        assert_like_plain(call, lambda call, x: call(lambda y: F.rrelu(y, training=True), x.cos()), leaf(40))


def test_an_inner_region_that_begins_and_ends_with_it():
    def program(call, x):
        def inner(y):
            return F.rrelu(F.rrelu(y, training=True).sin(), training=True)

        return call(lambda x: F.rrelu(call(inner, F.rrelu(x, training=True)), training=True), x)

    assert_like_plain(checkpoint, program, leaf(40))
    assert_like_plain(checkpoint, program, leaf(40), passes=2)


def test_an_inner_region_whose_input_is_frozen_and_of_the_shape_of_what_is_packed_next():
    def program(call, x):
        def outer(x):
            frozen = torch.ones_like(x)
            return call(lambda x, frozen: F.rrelu(x, training=True) * frozen, x.sin(), frozen) * x.cos()

        return call(outer, x)

    assert_like_plain(checkpoint, program, leaf(40))


def test_noise_is_an_argument_of_the_region():
    def program(call, x, noise):
        return call(lambda x, noise: aten.rrelu_with_noise(x.sin(), noise, 0.125, 0.333, True), x, noise)

    for call in (checkpoint, nested):
        assert_like_plain(call, program, leaf(40), torch.full((40,), 7.0))


def test_noise_is_one_buffer_for_all_regions():
    """Plain autograd would use the noise that was written last for both; a replay writes its own again."""
    x, noise = leaf(40), torch.zeros(40)

    def layer(x):
        return aten.rrelu_with_noise(x.sin(), noise, 0.125, 0.333, True)

    torch.manual_seed(0)
    expected = F.rrelu(F.rrelu(x.sin(), 0.125, 0.333, True).sin(), 0.125, 0.333, True)
    (expected,) = torch.autograd.grad(expected.sum(), x)
    for _ in range(3):  # the first step is looked at more closely than the others, and must give the same
        torch.manual_seed(0)
        (grad,) = torch.autograd.grad(checkpoint(layer, checkpoint(layer, x)).sum(), x)
        assert torch.equal(grad, expected)


class KeepsItsInput(nn.Module):
    """Writes memory that was there before, and has autograd save it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(40))

    def forward(self, x):
        with torch.no_grad():
            self.kept.copy_(x)
        return x.sin() * self.kept


def test_a_buffer_that_the_region_writes_and_then_saves():
    for call in (checkpoint, nested):
        module = KeepsItsInput()
        for _ in range(3):
            assert_like_plain(call, lambda call, x, module=module: call(module, x), leaf(40))


def test_a_layer_that_ends_with_it():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.RReLU(), nn.Linear(6, 6), nn.RReLU())
    grads = []
    for call in (plainly, checkpoint, nested):
        torch.manual_seed(0)
        x = leaf(6, 6)
        call(model, call(model, x)).square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    assert_equal(grads[1], grads[0])
    assert_equal(grads[2], grads[0])


def test_the_graph_of_the_second_order():
    def program(call, x):
        y = call(lambda x: F.rrelu(x.sin(), training=True), x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return grad

    for call in (checkpoint, nested):
        assert_like_plain(call, program, leaf(40))
        assert_like_plain(call, program, leaf(40), passes=2)


def test_one_output_of_several():
    def function(x):
        return x.cos().exp(), F.rrelu(x.sin(), training=True), x.exp().sin()

    for wanted in ([0], [1], [0, 1], [1, 2]):
        assert_like_plain(
            checkpoint, lambda call, x, wanted=wanted: sum(call(function, x)[i] for i in wanted), leaf(40)
        )


def test_another_output_is_asked_for_first():
    """The replay is begun by a node that has nothing to do with the operator at which it ends."""
    grads = []
    for call in (plainly, checkpoint):
        x = leaf(40)
        torch.manual_seed(0)
        early, late = call(lambda x: (x.cos(), F.rrelu(x.sin(), training=True)), x)
        grads.append([])
        for output in (early, late, early):
            grads[-1] += torch.autograd.grad(output.square().sum(), x, retain_graph=True)
        grads[-1] += torch.autograd.grad(early.sum(), x, retain_graph=True)
        early.register_hook(lambda grad, late=late: grad + late.grad_fn._saved_noise)
        grads[-1] += torch.autograd.grad(early.sum(), x)
    assert_equal(*grads)


@pytest.mark.parametrize("name", [*RRELU, *RRELU_IN_PLACE])
def test_noise_that_is_read_outside_of_any_backward(name):
    noise = []
    for call in (plainly, checkpoint, nested):
        torch.manual_seed(0)
        y = call(lambda x: WRITERS[name](x.sin()), leaf(40))
        noise.append(y.grad_fn._saved_noise)
    if name != "not training":  # then nobody writes it
        assert_equal(noise[1], noise[0])
        assert_equal(noise[2], noise[0])


def test_torchscript_runs_the_operator():
    @torch.jit.script
    def scripted(x: torch.Tensor):
        return torch.nn.functional.rrelu(x.sin(), 0.125, 0.333, True)

    for _ in range(3):  # the executor makes another plan after its first runs
        assert_like_plain(checkpoint, lambda call, x: call(scripted, x), leaf(40))


class Wrapper(torch.Tensor):
    """A tensor inside; every operator is unwrapped, run and wrapped again."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrapped = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        result = func(*unwrapped, **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


def test_a_subclass_that_wraps_its_memory():
    inside = leaf(40).detach()
    noise = []
    for call in (plainly, checkpoint, nested):
        torch.manual_seed(0)
        x = Wrapper(inside).requires_grad_()
        y = call(lambda x: F.rrelu(x.sin(), training=True), x)
        noise.append(torch.autograd.grad(y, x, Wrapper(torch.ones(40)))[0].inner)
    assert_equal(noise[1], noise[0])
    assert_equal(noise[2], noise[0])


# --- Python's own operators: packed when their forward has returned ---


class WritesAfterSaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        memory = torch.empty_like(x)
        ctx.save_for_backward(memory, x)
        memory.copy_(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class SavesInSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        memory = torch.empty_like(x)
        memory.copy_(x.cos())
        return x.sin(), memory

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1], *inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        return grad * ctx.saved_tensors[0]


FUNCTIONS = {
    "saves, then writes": WritesAfterSaving.apply,
    "saves in setup_context": lambda x: SavesInSetup.apply(x)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_autograd_function_that_writes_what_it_saved(name):
    for place in PLACES:
        for call in (checkpoint, nested):
            assert_like_plain(call, program_of(FUNCTIONS[name], place), leaf(6, 6), leaf(6, 6, seed=1))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_autograd_function_ends_before_the_stop(name):
    assert_stops_exactly(lambda x: FUNCTIONS[name](x.exp()), leaf(4))


# --- Everything else stops with the last tensor it packs ---


def without_detach(names):
    """A replay detaches what it packs, a forward does not."""
    return [name for name in names if name != "detach"]


def ran_until_the_last_pack(function, *args):
    """The operators that had run in a forward when its last tensor was packed."""
    ran = []
    with CountOperators() as operators:

        def pack(tensor):
            ran[:] = operators.names
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            function(*args)
    return without_detach(ran)


def ran_in_the_replay(function, *args):
    """The operators of a replay."""
    replay = CountOperators()
    result = checkpoint(function, *args, context_fn=lambda: (CountOperators(), replay))
    result.sum().backward()
    return without_detach(replay.names)


def assert_stops_exactly(function, *args):
    torch.manual_seed(0)
    expected = ran_until_the_last_pack(function, *args)
    torch.manual_seed(0)
    assert ran_in_the_replay(function, *args) == expected
    assert_like_plain(checkpoint, lambda call, *args: call(function, *args), *args)


def of_module(module, *shape):
    return lambda: ((lambda x: module(x.sin())), leaf(*shape))


def of(function, *shapes):
    """A function and its inputs; the first goes through an operator, so that there is something to recompute."""
    return lambda: (
        lambda x, *others: function(x.sin(), *others),
        *(leaf(*shape, seed=seed) for seed, shape in enumerate(shapes)),
    )


def attention(x):
    return F.scaled_dot_product_attention(x, x.cos(), x.exp(), is_causal=True)


ORDINARY = {
    "mm": of(torch.mm, (3, 4), (4, 5)),
    "mm, the right one first": of(lambda x, w: w @ x, (3, 4), (5, 3)),
    "square mm": of(torch.mm, (4, 4), (4, 4)),
    "addmm": of(lambda x, w, b: torch.addmm(b, x, w), (3, 4), (4, 5), (5,)),
    "bmm": of(torch.bmm, (2, 3, 4), (2, 4, 5)),
    "baddbmm": of(lambda x, w, b: torch.baddbmm(b, x, w), (2, 3, 4), (2, 4, 5), (2, 3, 5)),
    "linear": of_module(nn.Linear(4, 4), 4, 4),
    "bilinear": of(lambda x, y: F.bilinear(x, y, torch.ones(2, 4, 4)), (3, 4), (3, 4)),
    "einsum": of(lambda x, w: torch.einsum("ij,jk->ik", x, w), (3, 4), (4, 5)),
    "conv1d": of_module(nn.Conv1d(2, 3, 3), 1, 2, 8),
    "conv2d": of_module(nn.Conv2d(2, 3, 3), 1, 2, 8, 8),
    "conv_transpose2d": of_module(nn.ConvTranspose2d(2, 3, 3), 1, 2, 4, 4),
    "gelu": of(F.gelu, (4,)),
    "gelu, tanh": of(lambda x: F.gelu(x, approximate="tanh"), (4,)),
    "silu": of(F.silu, (4,)),
    "mish": of(F.mish, (4,)),
    "elu": of(F.elu, (4,)),
    "relu": of(F.relu, (4,)),
    "leaky_relu": of(F.leaky_relu, (4,)),
    "prelu": of(F.prelu, (4,), (1,)),
    "hardtanh": of(F.hardtanh, (4,)),
    "softplus": of(F.softplus, (4,)),
    "logsigmoid": of(F.logsigmoid, (4,)),
    "glu": of(F.glu, (4,)),
    "sigmoid": of(torch.sigmoid, (4,)),
    "tanh": of(torch.tanh, (4,)),
    "softmax": of(lambda x: F.softmax(x, -1), (3, 4)),
    "log_softmax": of(lambda x: F.log_softmax(x, -1), (3, 4)),
    "logsumexp": of(lambda x: x.logsumexp(-1), (3, 4)),
    "layer_norm": of_module(nn.LayerNorm(4), 3, 4),
    "layer_norm without weights": of_module(nn.LayerNorm(4, elementwise_affine=False), 3, 4),
    "group_norm": of_module(nn.GroupNorm(2, 4), 2, 4, 3),
    "rms_norm": of_module(nn.RMSNorm(4), 3, 4),
    "batch_norm": of(lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True), (3, 4)),
    "batch_norm, not training": of(lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), (3, 4)),
    "instance_norm": of(lambda x: F.instance_norm(x), (2, 3, 4)),
    "dropout": of(F.dropout, (8,)),
    "alpha_dropout": of(lambda x: F.alpha_dropout(x, training=True), (8,)),
    "scaled_dot_product_attention": of(attention, (1, 2, 3, 4)),
    "multi-head attention": lambda: (
        lambda x: nn.MultiheadAttention(4, 2, batch_first=True)(x.sin(), x.cos(), x)[0],
        leaf(2, 3, 4),
    ),
    "transformer layer": lambda: (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), leaf(2, 3, 4)),
    "lstm": lambda: (lambda x: nn.LSTM(4, 4)(x.sin())[0], leaf(3, 2, 4)),
    "gru": lambda: (lambda x: nn.GRU(4, 4)(x.sin())[0], leaf(3, 2, 4)),
    "mul": of(torch.mul, (4,), (4,)),
    "mul by itself": of(lambda x: x * x, (4,)),
    "mul by a number": of(lambda x: x.exp() * 2, (4,)),
    "mul by a frozen tensor": of(lambda x: x * torch.full((4,), 3.0), (4,)),
    "div": of(torch.div, (4,), (4,)),
    "div of a frozen tensor": of(lambda x: torch.ones(4) / (2 + x), (4,)),
    "pow": of(lambda x: x**3, (4,)),
    "pow with an exponent": of(lambda x, y: (2 + x) ** y, (4,), (4,)),
    "sqrt": of(lambda x: (2 + x).sqrt(), (4,)),
    "exp": of(torch.exp, (4,)),
    "log": of(lambda x: (2 + x).log(), (4,)),
    "addcmul": of(torch.addcmul, (4,), (4,), (4,)),
    "addcdiv": of(torch.addcdiv, (4,), (4,), (4,)),
    "lerp": of(torch.lerp, (4,), (4,), (4,)),
    "where": of(lambda x, y: torch.where(x > 0, x, y), (4,), (4,)),
    "maximum": of(torch.maximum, (4,), (4,)),
    "atan2": of(torch.atan2, (4,), (4,)),
    "hypot": of(torch.hypot, (4,), (4,)),
    "hypot with a frozen tensor": of(lambda x: torch.hypot(x, torch.ones(4)), (4,)),
    "clamp": of(lambda x: x.clamp(-0.5, 0.5), (4,)),
    "abs": of(torch.abs, (4,)),
    "var": of(lambda x: x.var(-1), (3, 4)),
    "norm": of(lambda x: x.norm(), (4,)),
    "prod": of(lambda x: x.prod(), (4,)),
    "cumprod": of(lambda x: x.cumprod(0), (4,)),
    "amax": of(lambda x: x.amax(-1), (3, 4)),
    "max": of(lambda x: x.max(-1)[0], (3, 4)),
    "sort": of(lambda x: x.sort()[0], (4,)),
    "topk": of(lambda x: x.topk(2)[0], (4,)),
    "gather": of(lambda x: x.gather(0, torch.tensor([1, 2])), (4,)),
    "index_select": of(lambda x: x.index_select(0, torch.tensor([1, 2])), (4,)),
    "indexed": of(lambda x: x[torch.tensor([1, 2])], (4,)),
    "masked_fill": of(lambda x: x.masked_fill(torch.tensor([True, False, True, False]), 0), (4,)),
    "scatter": of(lambda x, y: x.scatter(0, torch.tensor([1, 2]), y), (4,), (2,)),
    "embedding": of(lambda w: F.embedding(torch.tensor([1, 2]), w), (4, 3)),
    "max_pool2d": of(lambda x: F.max_pool2d(x, 2), (1, 2, 4, 4)),
    "avg_pool2d": of(lambda x: F.avg_pool2d(x, 2), (1, 2, 4, 4)),
    "pad": of(lambda x: F.pad(x, (1, 1), mode="reflect"), (1, 4)),
    "interpolate": of(lambda x: F.interpolate(x, scale_factor=2.0), (1, 2, 4)),
    "cdist": of(torch.cdist, (3, 4), (5, 4)),
    "cosine_similarity": of(F.cosine_similarity, (3, 4), (3, 4)),
    "cross_entropy": of(lambda x: F.cross_entropy(x, torch.tensor([1, 2, 0])), (3, 4)),
    "mse_loss": of(lambda x: F.mse_loss(x, torch.ones(4)), (4,)),
    "l1_loss": of(lambda x: F.l1_loss(x, torch.ones(4)), (4,)),
    "smooth_l1_loss": of(lambda x: F.smooth_l1_loss(x, torch.ones(4)), (4,)),
    "kl_div": of(lambda x: F.kl_div(x, torch.full((4,), 0.25), reduction="sum"), (4,)),
    "inverse": of(lambda x: torch.linalg.inv(x + 3 * torch.eye(3)), (3, 3)),
    "solve": of(lambda x, b: torch.linalg.solve(x + 3 * torch.eye(3), b), (3, 3), (3, 2)),
    "fft": of(lambda x: torch.fft.rfft(x).abs(), (4,)),
    "mul_": of(lambda x, y: (2 * x).mul_(y), (4,), (4,)),
    "mul_ of a view": of(lambda x, y: [z := 2 * x, z[:2].mul_(y)][0], (4,), (2,)),
    "sigmoid_": of(lambda x: x.mul(2).sigmoid_(), (4,)),
    "foreach": of(lambda x, y: torch._foreach_mul([x, x.exp()], [y, y])[1], (4,), (4,)),
    "foreach in place": of(lambda x, y: [z := 2 * x, torch._foreach_mul_([z], [y])][0], (4,), (4,)),
    "rrelu of a frozen input": of(lambda x: x * F.rrelu(torch.ones(4), training=True), (4,)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_operator_is_cut_off_at_its_last_pack(name):
    torch.manual_seed(0)
    function, *args = ORDINARY[name]()
    if name in ("multi-head attention", "lstm", "gru"):  # they make their layer at each call: weights to be drawn again
        torch.manual_seed(0)
        assert ran_in_the_replay(function, *args) == ran_until_the_last_pack(function, *args)
    else:
        assert_stops_exactly(function, *args)


@pytest.mark.parametrize("name", ["mm", "addmm", "conv2d", "gelu", "mul", "bmm", "silu", "atan2", "where"])
def test_the_kernel_that_comes_last_is_not_run_again(name):
    function, *args = ORDINARY[name]()
    with CountOperators() as operators:
        function(*args)
    last = operators.names[-1]
    assert last not in ran_in_the_replay(function, *args)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "exp", "layer_norm", "scaled_dot_product_attention"])
def test_a_kernel_whose_result_is_packed_is_the_last_to_run(name):
    function, *args = ORDINARY[name]()
    after = []

    def followed(*args):
        result = function(*args)
        after.append(result.clone())
        return result

    replayed = ran_in_the_replay(followed, *args)
    with CountOperators() as operators:
        function(*args)
    assert len(after) == 1, "the replay did not come so far"
    assert without_detach(operators.names)[: len(replayed)] == replayed


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_operator_packs_nothing_that_it_writes_afterwards(name):
    """What the list of operators above rests on, but for running statistics, which are written and then not used."""
    packed = []

    def pack(tensor):
        packed.append((tensor, tensor.detach().clone()))
        return tensor

    torch.manual_seed(0)
    function, *args = ORDINARY[name]()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*args)
    changed = [not torch.equal(tensor, then) for tensor, then in packed]
    assert changed.count(True) == (2 if name == "batch_norm" else 0)
    assert changed[-2:] == [False] * len(changed[-2:]), "what is packed last is never written"


@pytest.mark.parametrize("name", WRITERS)
def test_the_writers_write_what_they_packed(name):
    """So that the tests above are known to be about something."""
    packed = []

    def pack(tensor):
        packed.append((tensor, tensor.detach().clone()))
        return tensor

    torch.manual_seed(0)
    x = leaf(6, 6).sin()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        WRITERS[name](x)
    changed = [not torch.equal(tensor.nan_to_num(9), then.nan_to_num(9)) for tensor, then in packed]
    if name == "not training":
        assert not any(changed)
    elif name in RRELU:
        assert changed == [True, False], "its noise, then its input, then the kernel"
    else:
        assert any(changed)
        assert not changed[-1], "its result comes last"


# Operators that write an argument which is neither their `self` nor an `out`. A new one is looked up in torch's
# derivatives: does its formula use what it writes, and does it use a result too?
WRITE_AN_ARGUMENT = {
    "rrelu_with_noise": "uses the noise and the input: the one that a stop must wait for",
    "rrelu_with_noise_": "uses the noise and the result",
    "_native_batch_norm_legit": "uses running statistics and results",
    "_batch_norm_with_update": "uses running statistics and results",
    "_fused_moving_avg_obs_fq_helper": "uses a result alone",
    "fused_moving_avg_obs_fake_quant": "calls the helper",
    "_cummax_helper": "no formula",
    "_cummin_helper": "no formula",
    "_flash_attention_forward_no_dropout_inplace": "no formula",
    "_cudnn_attention_forward_no_dropout_inplace": "no formula",
    "_amp_foreach_non_finite_check_and_unscale_": "no formula",
    "_amp_update_scale_": "no formula",
    "_fused_adam_": "no formula",
    "_fused_adamw_": "no formula",
    "_fused_sgd_": "no formula",
    "_fused_adagrad_": "no formula",
}


def has_kernels(schema):
    """Whether it is one of the dispatcher's, not one that TorchScript knows alone."""
    try:
        return torch._C._dispatch_has_kernel(f"{schema.name}.{schema.overload_name}".rstrip("."))
    except RuntimeError:
        return False


def test_no_other_operator_says_that_it_writes_an_argument():
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        written = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        tensors = [one for one in written if "Tensor" in str(one.type) and not one.kwarg_only]
        beside = [one for one in tensors if one.name != "self"]
        # Autograd refuses an `out` where a gradient is needed.
        if space == "aten" and beside and not schema.overload_name.endswith("out") and has_kernels(schema):
            found.add(name)
    assert "rrelu_with_noise" in found
    assert found <= set(WRITE_AN_ARGUMENT), found - set(WRITE_AN_ARGUMENT)


# --- An operator that must be waited for runs to its end, and no further than to the next pack ---


@pytest.mark.parametrize("name", [*RRELU, *RRELU_IN_PLACE])
def test_what_comes_after_the_operator_is_not_run_again(name):
    operator = WRITERS[name]

    def function(x):
        y = operator(x.sin())
        y.cos()  # packs its input, and is not needed
        return y

    x = leaf(4)
    with CountOperators() as operators:
        function(x)
    ran = ran_in_the_replay(function, x)
    assert "cos" in operators.names
    assert "cos" not in ran
    if name != "not training":
        assert ran == without_detach(operators.names[: operators.names.index("cos")])


@pytest.mark.parametrize("policy", [None, save_ops(aten.mm)], ids=["", "a policy"])
@pytest.mark.parametrize("name", RRELU)
def test_an_inner_region_after_the_operator_is_not_run_again(name, policy):
    x, w = leaf(6, 6), leaf(6, 6, seed=1)
    ran = []

    def inner(y):
        ran.append("inner")
        return y @ w

    def program(call, x):
        def function(x):
            y = WRITERS[name](x)
            call(inner, y)  # what it saves is not needed
            return y

        return call(function, x, policy=policy)

    assert_like_plain(checkpoint, program, x)
    assert len(ran) == 2  # one plain run, and one forward


@pytest.mark.parametrize("name", ["F.rrelu", "nn.RReLU", "F.rrelu_", "nn.RReLU in place"])
def test_a_replay_that_only_needs_what_came_before_does_not_reach_the_operator(name):
    operator, noted = WRITERS[name], []

    def function(x):
        y = x.sin().exp()
        noted.append("before")
        z = operator(y * 2)
        noted.append("after")
        return y, z

    x = leaf(4)
    y, z = checkpoint(function, x)
    del z
    gc.collect()
    noted.clear()
    y.sum().backward()
    assert noted == []
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


# --- Ordinary operators that pack two neighbours of one kind, the first of them frozen, as rrelu does ---

frozen = torch.full((4,), 0.75)


def held():
    return frozen


def made_inside():
    return torch.full((4,), 0.75)


def written_in_place():
    return torch.empty(4).fill_(0.75)


def a_view():
    return torch.full((2, 4), 0.75)[1]


def a_temporary():
    return torch.full((4,), 1.5) / 2


FROZEN = [held, made_inside, written_in_place, a_view, a_temporary]


PAIRS = {
    "maximum": lambda x, t: torch.maximum(x, t),
    "minimum": lambda x, t: torch.minimum(x, t),
    "fmax": lambda x, t: torch.fmax(x, t),
    "fmin": lambda x, t: torch.fmin(x, t),
    "max": lambda x, t: torch.max(x, t),
    "atan2": lambda x, t: torch.atan2(x, t),
    "logaddexp": lambda x, t: torch.logaddexp(x, t),
    "logaddexp2": lambda x, t: torch.logaddexp2(x, t),
    "xlogy": lambda x, t: torch.xlogy(x, t),
    "xlog1py": lambda x, t: torch.special.xlog1py(x, t),
    "clamp by a tensor": lambda x, t: torch.clamp(x, min=t),
    "clamp by two tensors": lambda x, t: torch.clamp(x, t, t + 1),
    "addcdiv by what needs grad": lambda x, t: torch.addcdiv(t, t, 2 + x),
    "lerp by what needs grad": lambda x, t: torch.lerp(t, t + 1, x),
    "mse_loss to what needs grad": lambda x, t: F.mse_loss(t, x),
    "smooth_l1_loss to what needs grad": lambda x, t: F.smooth_l1_loss(t, x),
    "huber_loss to what needs grad": lambda x, t: F.huber_loss(t, x),
    "binary_cross_entropy with weights": lambda x, t: F.binary_cross_entropy(x.sigmoid(), t, t),
    "binary_cross_entropy_with_logits with weights": lambda x, t: F.binary_cross_entropy_with_logits(x, t, t),
}


@pytest.mark.parametrize("make", FROZEN, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", PAIRS)
def test_a_frozen_neighbour_is_no_reason_to_run_the_last_kernel(name, make):
    assert_stops_exactly(lambda x: PAIRS[name](x.sin(), make()), leaf(4))


@pytest.mark.parametrize("make", FROZEN, ids=lambda make: make.__name__)
def test_a_frozen_argument_is_no_reason_to_run_the_last_kernel(make):
    assert_stops_exactly(lambda x, t: torch.maximum(x.sin(), t), leaf(4), make())


@pytest.mark.parametrize("make", FROZEN, ids=lambda make: make.__name__)
def test_a_frozen_neighbour_where_later_slots_are_dead(make):
    def function(x):
        y = torch.maximum(x.sin(), make())
        y.exp()
        return y

    replayed = ran_in_the_replay(function, leaf(4))
    assert "maximum" not in replayed
    assert "exp" not in replayed


@pytest.mark.parametrize("make", FROZEN, ids=lambda make: make.__name__)
def test_a_frozen_neighbour_in_nested_regions(make):
    kernels = []

    def inner(x):
        y = torch.maximum(x.sin(), make())
        kernels.append("maximum")
        return y

    x = leaf(4)
    nested(inner, x).sum().backward()
    assert kernels == ["maximum"]
    assert torch.equal(x.grad, torch.autograd.grad(torch.maximum(x.sin(), frozen).sum(), x)[0])


# --- Operators in place whose other operand is the memory they write ---

ALIASED = {
    "by itself": (lambda y: y.mul_(y), lambda y: y * y),
    "by a view of itself": (lambda y: y.mul_(y.view(4)), lambda y: y * y),
    "by itself detached": (lambda y: y.mul_(y.detach()), lambda y: y * y.detach()),
    "atan2_": (lambda y: y.atan2_(y), lambda y: torch.atan2(y, y)),
    "addcmul_": (lambda y: y.addcmul_(y, y), lambda y: y + y * y),
    "pow_": (lambda y: y.pow_(y), lambda y: y**y),
}


@pytest.mark.parametrize("then", [lambda y: y, torch.exp], ids=["last", "in the middle"])
@pytest.mark.parametrize("name", ALIASED)
def test_an_operand_that_is_overwritten_never_gives_a_wrong_gradient(name, then):
    """Plain autograd refuses it. A replay that ends before the kernel has the values from before, which are right."""
    in_place, out_of_place = ALIASED[name]
    x = leaf(4)

    with pytest.raises(RuntimeError, match=IN_PLACE):
        torch.autograd.grad(then(in_place(x.exp())).sum(), x)
    (expected,) = torch.autograd.grad(then(out_of_place(x.exp())).sum(), x)
    try:
        (grad,) = torch.autograd.grad(checkpoint(lambda x: then(in_place(x.exp())), x).sum(), x)
    except RuntimeError as error:
        if IN_PLACE not in str(error):
            raise
    else:
        assert torch.allclose(grad, expected)
