"""Sound programs: every check and guard must let them pass, with the gradients and the state of plain autograd.

Each takes `run`, which calls a function with arguments as a region or plainly, and takes several steps of training:
in the first everything is compared, in the later ones nothing is recorded.
"""

import contextlib
import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, parametrize, prune

import recollect
from recollect import Offload, Recompute, Save, by_name, save_ops
from tools import Identity

STEPS = 3
SOUND = {}


STATEFUL = set()  # what changes state in its forward, which is put back only for functions that were once recorded


def sound(program):
    SOUND[program.__name__.replace("_", " ")] = program
    return program


def stateful(program):
    STATEFUL.add(program.__name__.replace("_", " "))
    return sound(program)


def seeded(program, run):
    torch.manual_seed(0)
    result = program(run)
    return [result, torch.get_rng_state()]


def plain(function, *args, **options):
    return function(*args)


def clones(tensors):
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def train(run, model, *shape, forward=None, optimizer=None, loss=lambda y: y.square().sum(), make=torch.randn):
    """Some steps of training: outputs, gradients and what becomes of the model."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for _ in range(STEPS):
        x = make(*shape)
        if x.is_floating_point():
            x.requires_grad_()
        y = run(model, x) if forward is None else forward(x)
        loss(y).backward()
        seen.append(clones([y, x.grad, *(parameter.grad for parameter in model.parameters())]))
        optimizer.step()
        optimizer.zero_grad()
    return [seen, clones(model.state_dict().values())]


# --- Layers ---


def mlp(*inside, width=6):
    return nn.Sequential(nn.Linear(width, width), *inside, nn.Tanh(), nn.Linear(width, width))


@sound
def dropouts(run):
    model = mlp(nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2))
    return train(run, model, 4, 6)


@sound
def random_layers(run):
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout2d(0.4), nn.FractionalMaxPool2d(2, output_size=3), nn.RReLU())
    return train(run, model, 2, 2, 8, 8)


@sound
def random_operators(run):
    def function(x):
        x = x + torch.randn_like(x) * torch.rand(6) + torch.bernoulli(torch.full((6,), 0.5))
        x = F.gumbel_softmax(x, hard=True) * x + x[torch.randperm(4)]
        return x.sin() * torch.multinomial(x.detach().softmax(-1), 6, replacement=True).exp2()

    return train(run, nn.Linear(6, 6), 4, 6, forward=lambda x: run(function, x))


@sound
def random_numbers_in_a_fork(run):
    def function(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            y = F.dropout(x).sin()
        return (y + torch.rand(6)).exp()

    return train(run, nn.Linear(6, 6), 4, 6, forward=lambda x: run(function, x))


@stateful
def batch_norms(run):
    model = nn.Sequential(
        nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.BatchNorm1d(4, momentum=None)
    )
    return train(run, model, 5, 3, 7)


@stateful
def other_norms(run):
    model = nn.Sequential(
        nn.Conv1d(4, 4, 1),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.LayerNorm(7),
        nn.RMSNorm(7),
        nn.LocalResponseNorm(2),
    )
    return train(run, model, 5, 4, 7)


@sound
def lstm(run):
    model = nn.LSTM(4, 5, num_layers=2, dropout=0.3, batch_first=True)
    return train(run, model, 2, 6, 4, forward=lambda x: run(model, x)[0])


@sound
def gru(run):
    model = nn.GRU(4, 5, bidirectional=True)
    packed = functools.partial(nn.utils.rnn.pack_padded_sequence, lengths=torch.tensor([6, 3]))
    return train(run, model, 6, 2, 4, forward=lambda x: run(lambda x: model(packed(x))[0].data, x))


@sound
def attention(run):
    model = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = torch.full((5, 5), -torch.inf).triu(1)

    def function(x):
        return model(x, x, x, key_padding_mask=padding.float() * -1e9, attn_mask=causal)[0]

    return train(run, model, 2, 5, 8, forward=lambda x: run(function, x))


@sound
def transformer(run):
    layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=bool(i)) for i in range(3))

    def forward(x):
        for layer in layers:
            x = run(layer, x)
        return x

    return train(run, layers, 2, 5, 8, forward=forward)


@sound
def pretrained_style_decoder(run):
    """Rotary tables made once, grouped heads, a gate: every layer gets a dict and gives a tuple."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp_norm = nn.RMSNorm(8), nn.RMSNorm(8)
            self.qkv, self.out = nn.Linear(8, 16, bias=False), nn.Linear(8, 8, bias=False)
            self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x, *, tables, use_cache=False):
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (4, 4)).transpose(1, 2).split([2, 1, 1], 1)
            q, k = (one * tables["cos"] + one.roll(2, -1) * tables["sin"] for one in (q, k))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=0.1)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return (x + self.down(F.silu(self.gate(self.mlp_norm(x))) * self.up(self.mlp_norm(x))),)

    layers = nn.ModuleList(Layer() for _ in range(2))
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    tables = {"cos": angles.cos(), "sin": angles.sin()}

    def forward(x):
        for layer in layers:
            x = run(functools.partial(layer.__call__, tables=tables), x)[0]
        return x

    return train(run, layers, 2, 5, 8, forward=forward)


@sound
def embedding_with_sparse_gradients(run):
    table, out = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 6)
    model = nn.Sequential(table, out)
    return train(run, model, 9, (4,), make=torch.randint)


@sound
def embedding_with_a_largest_norm(run):
    """The forward scales rows of the weight in place, and finds them scaled in the replay."""
    model = nn.Sequential(nn.Embedding(9, 6, max_norm=0.5), nn.Linear(6, 6), nn.Tanh())
    return train(run, model, 9, (4,), make=torch.randint)


@sound
def embedding_with_a_largest_norm_twice(run):
    """A siamese network: the second forward scales other rows than the first."""
    model = nn.Sequential(nn.Embedding(9, 6, max_norm=0.5), nn.Linear(6, 6), nn.Tanh())
    return train(run, model, 9, (4,), make=torch.randint, forward=lambda x: run(model, x) + run(model, (x + 3) % 9))


@sound
def embedding_bag(run):
    model = nn.Sequential(nn.EmbeddingBag(9, 6, mode="max"), nn.Tanh())
    return train(run, model, 9, (4, 3), make=torch.randint)


@stateful
def old_spectral_norm(run):
    return train(run, mlp(nn.utils.spectral_norm(nn.Linear(6, 6))), 4, 6)


@stateful
def new_spectral_norm(run):
    return train(run, mlp(parametrizations.spectral_norm(nn.Linear(6, 6))), 4, 6)


@sound
def weight_norm_and_orthogonal(run):
    model = mlp(parametrizations.weight_norm(nn.Linear(6, 6)), parametrizations.orthogonal(nn.Linear(6, 6)))
    return train(run, model, 4, 6)


@sound
def parametrized(run):
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    model = mlp(nn.Linear(6, 6))
    parametrize.register_parametrization(model[1], "weight", Symmetric())

    def cached(x):
        with parametrize.cached():
            return model(model(x))

    return train(run, model, 4, 6, forward=lambda x: run(cached, x))


@sound
def lora(run):
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(6, 6).requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(F.dropout(self.down(x), 0.1))

    layers = nn.ModuleList(Lora() for _ in range(3))

    def forward(x):
        for layer in layers:
            x = run(layer, x).tanh()
        return x

    trained = torch.optim.AdamW([parameter for parameter in layers.parameters() if parameter.requires_grad])
    return train(run, layers, 4, 6, forward=forward, optimizer=trained)


@sound
def pruned(run):
    model = mlp()
    prune.random_unstructured(model[0], "weight", 0.5)
    return train(run, model, 4, 6)


@stateful
def fake_quantisation(run):
    observed = quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return train(run, mlp(observed, quantization.FusedMovingAvgObsFakeQuantize()), 4, 6)


@sound
def a_weight_that_is_clipped_in_the_forward(run):
    model = mlp()

    def function(x):
        with torch.no_grad():
            model[0].weight.clamp_(-0.3, 0.3)
        return model(x)

    def loss(y):
        y.sum().backward(retain_graph=True)
        return y.square().sum()

    return train(run, model, 4, 6, forward=lambda x: run(function, x), loss=loss)


@sound
def scripted_submodule(run):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    for _ in range(3):
        scripted(torch.randn(2, 6, requires_grad=True)).sum().backward()  # before that it still changes
    scripted.zero_grad()
    return train(run, mlp(scripted), 4, 6)


@sound
def traced_submodule(run):
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    traced = torch.jit.trace(inner, torch.randn(4, 6))
    for _ in range(3):
        traced(torch.randn(4, 6, requires_grad=True)).sum().backward()
    traced.zero_grad()
    return train(run, mlp(traced), 4, 6)


# --- Dtypes and layouts ---


@sound
def autocast_with_a_shared_weight(run):
    model = nn.Linear(6, 6)

    def function(x):
        return F.linear(model(x).tanh(), model.weight).float().exp() * 0.1

    def forward(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(function, x) + run(function, x + 1)

    return train(run, model, 4, 6, forward=forward)


@sound
def autocast_in_the_region(run):
    model = mlp()

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            y = model(x)
        with torch.autocast("cpu", enabled=False):
            return model(y.float())

    return train(run, model, 4, 6, forward=lambda x: run(function, x))


@sound
def several_dtypes(run):
    model = mlp()

    def function(x):
        y = model(x).double().cumsum(0).bfloat16() * x.bfloat16()
        return torch.fft.fft(y.float()).abs() * (x > 0) + torch.complex(x, x).conj().imag.neg() + x.half().exp().float()

    return train(run, model, 4, 6, forward=lambda x: run(function, x))


@sound
def sparse_and_nested(run):
    graph = torch.eye(4).to_sparse()
    rows = torch.eye(4).to_sparse_csr()

    def function(x):
        y = torch.sparse.mm(graph, x.sin()) + torch.sparse.mm(rows, x.cos())
        nested = torch.nested.as_nested_tensor([y[0], y[1, :3], y[2]])
        return (nested * nested).to_padded_tensor(0.0).exp()

    return train(run, nn.Linear(6, 6), 4, 6, forward=lambda x: run(function, x))


@sound
def nan_and_inf(run):
    def function(x):
        hidden = x.masked_fill(x > 1, -torch.inf).softmax(-1)
        return Identity.apply(hidden, None, x.detach().log(), 1 / (x > 0).float()) * x.exp()

    return train(run, nn.Linear(6, 6), 4, 6, forward=lambda x: run(function, x))


@sound
def views_and_in_place(run):
    model = mlp()

    def function(x):
        y = model(x)
        y[:, 0] = y[:, 1] * 2
        y.view(-1)[::2].mul_(0.5)
        z = y.relu_().t().contiguous().t()
        z += torch.zeros_like(z).index_add_(0, torch.tensor([0, 0, 1]), x[:3])
        return z.sin_().unfold(1, 3, 1).exp()

    return train(run, model, 4, 6, forward=lambda x: run(function, x))


# --- Autograd ---


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        y = x.sin()
        ctx.save_for_backward(x, y, factor, torch.ones(2))
        ctx.mark_non_differentiable(z := x > 0)
        return y * factor, z

    @staticmethod
    def backward(ctx, grad, _):
        x, y, factor, ones = ctx.saved_tensors
        return grad * x.cos() * factor * ones[0], (grad * y).sum()


@sound
def custom_functions(run):
    factor = nn.Parameter(torch.tensor(2.0))

    def function(x):
        y, positive = Scaled.apply(x, factor)
        return Scaled.apply(y.exp() * positive, factor)[0]

    return train(run, nn.ParameterList([factor]), 4, 6, forward=lambda x: run(function, x))


@sound
def weights_made_in_the_region(run):
    """Leaves that no two runs share."""

    def function(x):
        weight = torch.randn(6, 6).requires_grad_()
        bias = torch.zeros(6, requires_grad=True)
        return (x @ weight + bias).tanh() * weight.exp().sum() * torch.ones(6, requires_grad=True)

    return train(run, nn.Linear(6, 6), 4, 6, forward=lambda x: run(function, x))


@sound
def modules_made_in_the_region(run):
    """A random projection, anew in each step."""

    def function(x):
        return nn.Linear(6, 6)(x).tanh() * nn.Parameter(torch.ones(6))

    return train(run, nn.Linear(6, 6), 4, 6, forward=lambda x: run(function, x))


@sound
def a_step_of_learning_in_the_region(run):
    """As in meta-learning: a copy of a weight is trained inside."""
    model = nn.Linear(6, 6)

    def function(x):
        weight = model.weight.detach().clone().requires_grad_()
        inner = torch.optim.SGD([weight], lr=0.1)
        F.linear(x.detach(), weight).square().mean().backward()
        inner.step()
        return F.linear(x, weight.detach()).tanh() * model(x).tanh()

    return train(run, model, 4, 6, forward=lambda x: run(function, x))


@sound
def weights_from_another_network(run):
    hyper, steps = nn.Linear(3, 36), torch.randn(STEPS, 3)
    codes = iter(steps)

    def forward(x):
        weight = hyper(next(codes)).view(6, 6)
        bias = weight.sum(0)
        return run(lambda x: F.linear(x, weight, bias).tanh().exp(), x)

    return train(run, hyper, 4, 6, forward=forward)


@sound
def weights_cast_outside(run):
    """A copy in another precision, made anew for each step and closed over."""
    model = nn.Linear(6, 6)

    def forward(x):
        weight = model.weight.bfloat16()
        return run(lambda x: F.linear(x.bfloat16(), weight).tanh().float().exp(), x)

    return train(run, model, 4, 6, forward=forward)


@sound
def gradient_penalty(run):
    critic = nn.Sequential(nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 1))

    def loss(y):
        (slope,) = torch.autograd.grad(y.sum(), loss.x, create_graph=True)
        return y.mean() + (slope.norm(dim=1) - 1).square().mean()

    def forward(x):
        loss.x = x
        return run(critic, x)

    return train(run, critic, 4, 6, forward=forward, loss=loss)


@sound
def several_backward_passes(run):
    model = mlp(nn.Dropout(0.5))

    def loss(y):
        y.sum().backward(retain_graph=True)
        torch.autograd.grad(y[0].sum(), list(model.parameters()), retain_graph=True)
        return y.square().sum()

    return train(run, model, 4, 6, loss=loss)


@stateful
def nested_regions(run):
    layers = nn.ModuleList(mlp(nn.Dropout(0.3), nn.BatchNorm1d(6)) for _ in range(2))

    def inner(layer, x):
        return run(lambda x: layer(x).tanh(), x).exp() * 0.1

    def outer(x):
        for layer in layers:
            x = run(inner, layer, x)
        return x.sin()

    return train(run, layers, 4, 6, forward=lambda x: run(outer, x))


@sound
def backward_in_the_region(run):
    model = mlp()

    def function(x):
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(run(model, inner).square().sum(), inner)
        return model(x + 0.1 * slope).exp() * 0.1

    return train(run, model, 4, 6, forward=lambda x: run(function, x))


@sound
def without_grad_in_the_region(run):
    teacher, model = mlp(nn.BatchNorm1d(6)), mlp()

    def function(x):
        with torch.no_grad():
            target = teacher(x)
        with torch.inference_mode():
            count = int((target > 0).sum())
        return (model(x) - target).exp() * count

    return train(run, model, 4, 6, forward=lambda x: run(function, x))


@sound
def exceptions_in_the_region(run):
    model = mlp()

    def function(x):
        for width in (5, 6):
            with contextlib.suppress(RuntimeError):
                x = model(x) * torch.ones(width)
        try:
            torch.linalg.cholesky(-torch.eye(2))
        except torch.linalg.LinAlgError:
            x = x.exp()
        return x.sin()

    return train(run, model, 4, 6, forward=lambda x: run(function, x))


@sound
def results_of_every_kind(run):
    model = mlp()

    def function(x):
        y = model(x)
        return {"y": y.exp(), "constant": y.detach().sin(), "count": len(x), "none": None, "given": x}

    def forward(x):
        result = run(function, x)
        return result["y"] + result["constant"] * result["count"] + result["given"]

    return train(run, model, 4, 6, forward=forward)


@sound
def vmap_and_hooks_in_the_region(run):
    model = mlp()

    def function(x):
        y = torch.vmap(lambda row: F.dropout(row.sin()) * row, randomness="different")(x)
        with torch.autograd.graph.save_on_cpu():
            y = model(y).exp()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            return y.tanh()

    return train(run, model, 4, 6, forward=lambda x: run(function, x))


# --- Policies ---


def with_policy(make_policy):
    """A chain with a kept part, an operator that draws, a view and a nested region."""

    def program(run):
        first, second = mlp(nn.Dropout(0.2)), mlp(nn.BatchNorm1d(6))

        def attend(x):
            return F.dropout((x @ x.T).softmax(-1), 0.2) @ x

        def function(x):
            x = x + recollect.region("attn", attend)(x)
            x = recollect.region("mlp", first)(x).relu()
            x = recollect.region("norm", lambda x: run(second, x).neg().mul_(0.1))(x)
            return x.view(-1).sin().view_as(x) + torch.rand(6)

        return train(
            run, nn.ModuleList([first, second]), 4, 6, forward=lambda x: run(function, x, policy=make_policy())
        )

    return program


SOUND["keeping: products"] = with_policy(lambda: recollect.policies.save_matmuls)
SOUND["keeping: everything"] = with_policy(lambda: recollect.policies.save_everything_but_pointwise)
SOUND["keeping: dropout"] = with_policy(lambda: save_ops(torch.ops.aten.native_dropout, torch.ops.aten.bernoulli_))
SOUND["keeping: offloading products"] = with_policy(
    lambda: recollect.offload_ops(torch.ops.aten.mm, torch.ops.aten.addmm)
)
SOUND["keeping: one region"] = with_policy(lambda: by_name({"attn": Save()}))
SOUND["keeping: all regions"] = with_policy(lambda: by_name({"*": Save()}))
SOUND["keeping: the nested region"] = with_policy(lambda: by_name({"norm": Save(), "attn": Offload()}))
SOUND["keeping: none"] = with_policy(lambda: by_name({"*": Recompute()}))
SOUND["keeping: regions and operators"] = with_policy(
    lambda: by_name({"mlp": Save()}) | recollect.policies.save_matmuls
)


# --- Training loops ---


@sound
def gradient_accumulation(run):
    layers = nn.ModuleList(mlp(nn.Dropout(0.2)) for _ in range(2))

    def forward(x):
        for part in x.detach().chunk(2)[:-1]:
            run(lambda y: layers[1](run(layers[0], y)), part).square().sum().backward()
        return run(lambda y: layers[1](run(layers[0], y)), x)

    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    return train(run, layers, 4, 6, forward=forward, optimizer=optimizer)


@sound
def steps_in_backward(run):
    """Each parameter is stepped as soon as its gradient is there, while the regions before it wait for theirs."""
    layers = nn.ModuleList(mlp(nn.Dropout(0.2)) for _ in range(3))
    optimizers = {p: torch.optim.SGD([p], lr=0.1, fused=True) for p in layers.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    def forward(x):
        for layer in layers:
            x = run(lambda x, layer=layer: x + run(layer, x), x)
        return x

    return train(run, layers, 4, 6, forward=forward)


@sound
def a_last_bias_that_is_stepped_in_backward(run):
    """Its gradient is there before anything that is saved is asked for, and its value matters to nothing saved."""
    weight, bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in (weight, bias)}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in (weight, bias):
        parameter.register_post_accumulate_grad_hook(step)
    model = nn.ParameterList([weight, bias])
    return train(run, model, 4, 6, forward=lambda x: run(lambda x: (x @ weight).tanh() + bias, x))


@sound
def two_models_with_two_optimizers(run):
    generator, critic = mlp(), mlp(nn.Dropout(0.2))
    ours, theirs = (torch.optim.Adam(model.parameters(), fused=True) for model in (generator, critic))
    seen = []
    for _ in range(STEPS):
        fake = run(generator, torch.randn(4, 6))
        theirs.zero_grad()
        (run(critic, fake.detach()).mean() - run(critic, torch.randn(4, 6)).mean()).backward()
        theirs.step()  # between the generator's forward and its backward
        ours.zero_grad()
        run(critic, fake).mean().backward()
        seen.append(clones([p.grad for p in (*generator.parameters(), *critic.parameters())]))
        ours.step()
    return seen


@stateful
def an_average_of_the_weights(run):
    """It is updated while a graph of the model is waiting."""
    model = mlp(nn.BatchNorm1d(6))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)

    def forward(x):
        y = run(model, x)
        average.update_parameters(model)
        return y

    return [train(run, model, 4, 6, forward=forward), clones(average.state_dict().values())]


@sound
def weights_tied_across_regions(run):
    table = nn.Embedding(9, 6)
    model = nn.Sequential(table, mlp())

    def forward(x):
        return run(lambda y: F.linear(y.tanh(), table.weight), run(model, x))

    return train(run, model, 9, (4,), make=torch.randint, forward=forward)


@sound
def one_region_many_times(run):
    cell = nn.GRUCell(6, 6)

    def forward(x):
        state = torch.zeros(4, 6)
        for _ in range(4):
            state = run(cell, x, state)
        return state

    return train(run, cell, 4, 6, forward=forward)


@sound
def a_whole_step_with_other_parameters(run):
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(nn.Dropout(0.2))

        def forward(self, x):
            loss = run(self.inner, x).square().sum()
            return torch.autograd.grad(loss, [x, *self.inner.parameters()])

    step, seen = Step(), []
    for _ in range(STEPS):
        parameters = {name: torch.randn_like(p).requires_grad_() for name, p in step.named_parameters()}
        seen.append(list(torch.func.functional_call(step, parameters, (torch.randn(4, 6, requires_grad=True),))))
    return seen


@stateful
def a_model_that_changes_between_steps(run):
    """Layers unfrozen, replaced and copied, precision and mode changed: between steps all of that is fine."""
    model = mlp(nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    changes = [
        lambda: model[0].requires_grad_(False),
        lambda: model[0].requires_grad_(True),
        lambda: setattr(model[3], "weight", nn.Parameter(torch.randn(6, 6))),
        lambda: model.eval(),
        lambda: model.train(),
        lambda: model.load_state_dict(copy.deepcopy(model.state_dict())),
        lambda: model[0].weight.data.mul_(2),
        lambda: model.append(nn.Linear(6, 6)),
        lambda: model.double().float(),
    ]
    for change in changes:
        x = torch.randn(4, 6, requires_grad=True)
        run(model, x).square().sum().backward()
        seen.append(clones([x.grad, *(p.grad for p in model.parameters())]))
        optimizer.step()
        model.zero_grad()
        change()
    return seen
