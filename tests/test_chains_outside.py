"""Chains: what steps depend on besides their state, and what is around a chain."""

import contextvars
import gc
import random

import pytest
import torch
from torch import nn

import recollect
from chains import grads_of, plain, same
from recollect import CheckpointError
from tools import LiveBytes, ambient_state


def run(step, state, length, slots=3, **options):
    return recollect.sequential(step, state, length=length, slots=slots, **options)


def compare(step, state, length, tensors, slots=3, first=lambda state: state):
    wanted = grads_of(first(plain(step, state, length)).square().sum(), tensors)
    got = grads_of(first(run(step, state, length, slots)).square().sum(), tensors)
    assert same(got, wanted)
    assert any(grad is not None for grad in got)


# --- Tensors from outside ---


def test_leaves_of_a_closure_and_of_the_globals():
    a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    globals()["OUTSIDE"] = torch.rand(3, requires_grad=True)

    def step(x, *, extra=b):
        return (x * a + extra).sin() * OUTSIDE  # noqa: F821

    try:
        compare(step, torch.rand(3), 13, [a, b, OUTSIDE])  # noqa: F821
    finally:
        del globals()["OUTSIDE"]


def test_a_tensor_with_a_history():
    torch.manual_seed(0)
    embedding, cell = nn.Embedding(11, 3), nn.RNNCell(3, 3)
    tokens = torch.arange(11)
    weights = [*embedding.parameters(), *cell.parameters()]

    def loss(chain):
        inputs = embedding(tokens)[:, None] * 2

        def step(state):
            h, i = state
            return cell(inputs[i], h), i + 1

        return chain(step, (torch.zeros(1, 3), 0))[0].sum()

    wanted = grads_of(loss(lambda step, state: plain(step, state, 11)), weights)
    for _ in range(2):
        assert same(grads_of(loss(lambda step, state: run(step, state, 11)), weights), wanted)


def test_a_tensor_with_a_history_that_is_read_late():
    """Which is found, because the function is seen to have it."""
    torch.manual_seed(0)
    weight = torch.rand(8, 3, requires_grad=True)

    def loss(chain):
        rows = [row.exp() for row in weight]

        def step(state):
            h, i = state
            return h * rows[i], i + 1

        return chain(step, (torch.ones(3), 0))[0].sum()

    wanted = grads_of(loss(lambda step, state: plain(step, state, 8)), [weight])
    assert same(grads_of(loss(lambda step, state: run(step, state, 8)), [weight]), wanted)


def test_another_layer_in_every_step():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(9))

    def step(state):
        h, i = state
        return layers[i](h).tanh(), i + 1

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.unused = layers, nn.Linear(3, 3)

        def step(self, state):
            return self.advance(*state)

        def advance(self, h, i):
            return self.layers[i](h).tanh(), i + 1

    model = Model()
    handle = model.unused.weight.register_hook(lambda grad: grad * 2)  # would fail on None
    for one in (step, model.step):
        compare(one, (torch.ones(3), 0), 9, [*layers.parameters()], first=lambda state: state[0])
    handle.remove()


def test_what_an_input_was_computed_from_is_read_too():
    """The gradient of the weight comes by the input, and from the steps, and must not come twice."""
    torch.manual_seed(0)
    weight = torch.rand(5, 3, requires_grad=True)

    def loss(chain):
        inputs = weight.exp() * 2

        def step(state):
            h, i = state
            return (h + inputs[i]).sin() * weight[0], i + 1

        return chain(step, (torch.ones(3), 0))[0].sum()

    wanted = grads_of(loss(lambda step, state: plain(step, state, 5)), [weight])
    (got,) = grads_of(loss(lambda step, state: run(step, state, 5)), [weight])
    torch.testing.assert_close(got, wanted[0])


def test_the_history_of_an_input_is_left_to_the_rest_of_the_program():
    weight = torch.rand(3, requires_grad=True)
    inputs = (weight.exp() * 2).sin()
    inputs.retain_grad()
    y = run(lambda h: h * inputs, torch.ones(3), 6)
    (y.sum() + inputs.sum()).backward()
    got = weight.grad, inputs.grad
    weight.grad = None
    again = (weight.exp() * 2).sin()
    again.retain_grad()
    (plain(lambda h: h * again, torch.ones(3), 6).sum() + again.sum()).backward()
    torch.testing.assert_close(got, (weight.grad, again.grad))


def test_a_large_history():
    weight = torch.rand(3, requires_grad=True)
    inputs = plain(torch.sin, weight, 1500)
    (wanted,) = torch.autograd.grad(plain(lambda h: h * inputs, torch.ones(3), 6).sum(), weight, retain_graph=True)
    (got,) = torch.autograd.grad(run(lambda h: h * inputs, torch.ones(3), 6).sum(), weight)
    assert torch.equal(got, wanted)


def test_a_function_of_autograd_on_a_tensor_that_is_cut_off():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad * b, grad * a

    weight = torch.rand(3, requires_grad=True)
    inputs = weight.exp()
    y = run(lambda h: Product.apply(h, inputs) + weight, torch.ones(3), 6)
    with pytest.raises(CheckpointError, match="Make it a part of the state"):
        y.sum().backward()
    compare(lambda h: Product.apply(h, weight), torch.ones(3), 6, [weight])


def test_a_leaf_that_is_read_only_when_a_step_is_run_again():
    hidden: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("hidden")
    hidden.set([torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)])

    def step(x):
        weight, late = hidden.get()
        return x * weight * (late if recollect.is_recomputing() else late.detach())

    y = run(step, torch.ones(3), 6)
    with pytest.raises(CheckpointError, match=r"step [34] of the chain .* reads a leaf .*gradient would be missing"):
        y.sum().backward()


def test_a_leaf_that_a_step_makes_for_itself():
    def step(x):
        probe = torch.ones(3, requires_grad=True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad((probe * x.detach()).sin().sum(), probe)
        return (x * probe * slope).sin()

    x = torch.rand(3, requires_grad=True)
    compare(step, x, 8, [x])


def test_a_step_that_needs_grad_only_later():
    weight = torch.rand(3, requires_grad=True)
    hidden: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("hidden")
    hidden.set(weight)

    def step(state):
        h, i = state
        return (h * hidden.get() if i == 5 else h * 2), i + 1

    y, _ = run(step, (torch.ones(3), 0), 6)  # the last step, whose graph is held, reads it
    y.sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 32.0))
    y, _ = run(step, (torch.ones(3, requires_grad=True), 0), 9)
    with pytest.raises(CheckpointError, match="gradient would be missing"):
        y.sum().backward()


def test_what_needs_grad_only_on_the_way_is_not_missed():
    weight = torch.rand(3, requires_grad=True)
    hidden = contextvars.ContextVar("hidden")  # in which nobody looks
    hidden.set(weight)

    def step(state):
        h, i = state
        return (h * hidden.get() if i == 5 else h * 2), i + 1

    compare(step, (torch.ones(3), 0), 9, [weight], first=lambda state: state[0])

    def with_output(state):
        h, i = state
        return (h * 2, i + 1), (hidden.get() * 2 if i == 5 else torch.ones(3))

    (y, _), outputs = run(with_output, (torch.ones(3, requires_grad=True), 0), 9, outputs=True)
    assert not outputs[5].requires_grad
    with pytest.raises(CheckpointError, match="gradient would be missing"):
        y.sum().backward()


def test_weights_in_the_state():
    weight = torch.rand(3, requires_grad=True)
    compare(lambda state: (state[0] * state[1].sin(), weight), (torch.ones(3), weight), 7, [weight], first=sum_of)
    layer = nn.Linear(3, 3)
    compare(lambda state: (layer(state[0]), state[1]), (torch.ones(3), layer.weight), 7, [layer.bias], first=sum_of)


def sum_of(state):
    return state[0].sum() + state[1].sum()


def test_a_step_whose_parameters_are_frozen():
    layer = nn.Linear(3, 3).requires_grad_(False)
    x = torch.rand(2, 3, requires_grad=True)
    compare(lambda h: layer(h).tanh(), x, 7, [x])
    assert not run(layer, torch.rand(2, 3), 7).requires_grad


# --- What must not change ---


def test_weights_that_change_before_backward():
    layer = nn.Linear(3, 3)
    y = run(layer, torch.rand(2, 3), 6)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(CheckpointError, match="parameter 'weight' of Linear"):
        y.sum().backward()
    y = run(layer, torch.rand(2, 3), 6)
    layer.weight.grad = torch.ones(3, 3)
    torch.optim.SGD(layer.parameters(), fused=True).step()
    with pytest.raises(CheckpointError, match=r"optimizer stepped|modified by an inplace"):
        y.sum().backward()


def test_data_that_changes_before_backward():
    data = torch.rand(9, 3)
    unread = torch.zeros(1)

    def step(state):
        h, i = state
        if i > 20:
            h = h * unread
        return h * data[i], i + 1

    x = torch.ones(3, requires_grad=True)
    y, _ = run(step, (x, 0), 9)
    unread.add_(1)
    wanted = torch.autograd.grad(plain(step, (x, 0), 9)[0].sum(), x)
    assert same(torch.autograd.grad(y.sum(), x, retain_graph=True), wanted)
    data.add_(1)
    with pytest.raises(CheckpointError, match=r"a tensor from outside of the function \(float32\[9, 3\] on cpu\)"):
        y.sum().backward()


def test_a_first_state_that_changes_before_backward():
    x = torch.rand(3, requires_grad=True)
    h = x * 1
    y = run(torch.sin, h, 6)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_steps_that_change_their_state_in_place():
    x = torch.rand(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad") as caught:
        run(lambda h: h.mul_(2), x * 1, 6)
    assert "step 0 of the chain" in caught.value.__notes__[0]

    def counts(state):
        h, n = state
        n += 1
        return h.sin(), n

    with pytest.raises(CheckpointError, match=r"step 0 of the chain .* changes the state that it is given in place"):
        run(counts, (x, torch.zeros(1)), 6)

    def counts_later(state):
        h, n = state
        return h.sin(), (n.add_(1) if h.sum() < 1.8 else n + 1)

    # Where no state is kept, nobody minds.
    y, n = run(counts_later, (torch.ones(3, requires_grad=True), torch.zeros(1)), 6, slots=1)
    assert n == 6
    y.sum().backward()


def test_a_kept_state_that_a_later_step_changes():
    def step(state):
        h, n, i = state
        if i == 5:
            n.add_(1)
        return h.sin(), n, i + 1

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(CheckpointError, match=r"changed in place|changes the state that it is given in place"):
        run(step, (x, torch.zeros(1), 0), 9, slots=4)[0].sum().backward()


# --- What steps change from outside ---


def test_running_statistics_are_updated_once():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(7)))
    x = torch.randn(5, 4, requires_grad=True)
    start = {name: value.clone() for name, value in layers.state_dict().items()}
    wanted = grads_of(layers(x).square().sum(), [x, *layers.parameters()])
    after = {name: value.clone() for name, value in layers.state_dict().items()}
    for _ in range(2):
        layers.load_state_dict(start)
        y = recollect.sequential(layers, x, slots=2)
        assert same(grads_of(y.square().sum(), [x, *layers.parameters()]), wanted)
        assert same(list(layers.state_dict().values()), list(after.values()))


@pytest.mark.parametrize("slots", [1, 3])
def test_state_outside_that_steps_read_and_change(slots):
    torch.manual_seed(0)
    layer = nn.utils.spectral_norm(nn.Linear(4, 4))
    norm = nn.BatchNorm1d(4)
    total = torch.zeros(1)

    def step(x):
        total.add_(1)
        return norm(layer(x)).tanh() * total.item()

    x = torch.randn(5, 4, requires_grad=True)
    tensors = [x, *layer.parameters(), *norm.parameters()]
    layer(x)
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    wanted = grads_of(plain(step, x, 11).square().sum(), tensors)
    after = layer.weight_u.clone()
    for _ in range(2):
        layer.load_state_dict(start)
        total.zero_()
        y = run(step, x, 11, slots)
        assert torch.equal(layer.weight_u, after)
        got = grads_of(y.square().sum(), tensors)
        assert same(got, wanted)
        assert torch.equal(layer.weight_u, after)
        assert total == 11


def test_modes_of_modules_are_put_back():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(5, 4, requires_grad=True)
    torch.manual_seed(1)
    wanted = grads_of(plain(layer, x, 8).sum(), [x])
    torch.manual_seed(1)
    y = run(layer, x, 8)
    layer.eval()
    assert same(grads_of(y.sum(), [x]), wanted)
    assert not layer[1].training


def test_functional_call():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    parameters = {name: torch.randn_like(one, requires_grad=True) for name, one in layer.named_parameters()}

    class Whole(nn.Module):
        def __init__(self, chain):
            super().__init__()
            self.layer, self.chain = layer, chain

        def forward(self, x):
            return self.chain(self.layer, x)

    def grads(chain):
        given = {f"layer.{name}": one for name, one in parameters.items()}
        y = torch.func.functional_call(Whole(chain), given, (torch.ones(2, 3),))
        return torch.autograd.grad(y.sum(), list(parameters.values()))

    assert same(grads(lambda f, x: run(f, x, 7)), grads(lambda f, x: plain(f, x, 7)))


# --- What is around ---


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache):
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    seen = set()

    def step(h):
        y = layer(h)
        seen.add(y.dtype)
        return y.float().tanh()

    def forward(chain):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            layer(x)  # fills the cache, with a history
            return chain().square().sum()

    wanted = grads_of(forward(lambda: plain(step, x, 9)), [x, *layer.parameters()])
    got = grads_of(forward(lambda: run(step, x, 9)), [x, *layer.parameters()])
    assert seen == {torch.bfloat16}
    if cache:  # the plain chain sums up in bfloat16, at the one weight that was cast
        torch.testing.assert_close(got, wanted, rtol=3e-2, atol=3e-2)
    else:
        assert same(got, wanted)


def test_default_device_and_dtype():
    x = torch.ones(3, requires_grad=True)

    def step(h):
        assert torch.get_default_dtype() is torch.float64
        assert torch.empty(0).device.type == "cpu"
        return h.sin() + torch.zeros(3)

    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("cpu"):
            y = run(step, x, 6)
    finally:
        torch.set_default_dtype(torch.float32)
    y.sum().backward()


def test_ambient_state_is_as_before():
    before = ambient_state()
    y = run(torch.sin, torch.ones(3, requires_grad=True), 6)
    assert ambient_state() == before
    y.sum().backward()
    assert ambient_state() == before


def test_is_recomputing():
    seen = []

    def step(h):
        seen.append(recollect.is_recomputing())
        return h.sin()

    y = run(step, torch.ones(3, requires_grad=True), 6, 2)
    assert seen == [False] * 6
    y.sum().backward()
    assert all(seen[6:])
    assert not recollect.is_recomputing()


def test_what_happens_once():
    losses = []

    def step(h):
        recollect.once(losses.append, round(float(h.detach().sum()), 4))
        return h.sin()

    x = torch.ones(3, requires_grad=True)
    wanted = torch.autograd.grad(plain(step, x, 9).sum(), x)
    plainly = list(losses)
    losses.clear()
    got = torch.autograd.grad(run(step, x, 9).sum(), x)
    assert losses == plainly
    assert same(got, wanted)


def test_what_is_pinned():
    torch.manual_seed(0)
    draws = random.Random(0)

    def step(h):
        factor = recollect.pin(draws.random)()
        weights, chosen = recollect.pin(torch.topk)(h.softmax(-1), 2)
        return h.scatter_add(-1, chosen, weights * factor).sin()

    x = torch.randn(2, 5, requires_grad=True)
    wanted = torch.autograd.grad(plain(step, x, 9).sum(), x)
    draws.seed(0)
    assert same(torch.autograd.grad(run(step, x, 9).sum(), x), wanted)


def test_once_gives_nothing_that_a_gradient_reaches():
    def step(h):
        return recollect.once(torch.sin, h) + h

    y = run(step, torch.ones(3, requires_grad=True), 6)
    with pytest.raises(RuntimeError, match=r"a gradient reaches .*sin.*recollect\.pin"):
        y.sum().backward()


# --- Regions, chains and compilers, inside and around ---


def test_regions_inside_of_steps():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    losses = []

    def block(x):
        recollect.once(losses.append, 1)
        return nn.functional.dropout(layer(x).tanh(), 0.2)

    policy = recollect.save_ops(torch.ops.aten.addmm)

    def step(x):
        return recollect.checkpoint(block, x, policy=policy) + recollect.region("name", torch.sin)(x)

    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(1)
    wanted = grads_of(plain(step, x, 9).square().sum(), [x, *layer.parameters()])
    losses.clear()
    torch.manual_seed(1)
    got = grads_of(run(step, x, 9).square().sum(), [x, *layer.parameters()])
    assert same(got, wanted)
    assert len(losses) == 9


def test_modules_inside_of_steps_that_are_decided():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.2))
    model = nn.Sequential(block, nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(1)
    wanted = grads_of(plain(model, x, 9).square().sum(), [x, *model.parameters()])
    handle = recollect.apply(model, {"0": recollect.Recompute(), "0.1": recollect.Save()})
    torch.manual_seed(1)
    got = grads_of(run(model, x, 9).square().sum(), [x, *model.parameters()])
    handle.remove()
    assert same(got, wanted)


def test_a_chain_inside_of_a_region():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    losses, seen = [], []

    def step(x):
        seen.append(recollect.is_recomputing())
        recollect.once(losses.append, 1)
        return nn.functional.dropout(layer(x).tanh(), 0.2)

    def block(x):
        return run(step, x.sin(), 9).sin()

    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(1)
    wanted = grads_of(plain(step, x.sin(), 9).sin().sum(), [x, *layer.parameters()])
    losses.clear()
    seen.clear()
    torch.manual_seed(1)
    with LiveBytes() as live:
        y = recollect.checkpoint(block, x)
        assert live.now == y.nbytes  # a region holds nothing that was computed inside
        got = grads_of(y.sum(), [x, *layer.parameters()])
    assert same(got, wanted)
    assert len(losses) == 9
    assert seen[:9] == [False] * 9
    assert all(seen[9:])


def test_a_chain_inside_of_a_chain():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    losses = []

    def inner(x):
        recollect.once(losses.append, 1)
        return nn.functional.dropout(layer(x).tanh(), 0.2)

    def outer(chain):
        return lambda x: chain(inner, x, 5) + x

    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(1)
    wanted = grads_of(plain(outer(plain), x, 6).square().sum(), [x, *layer.parameters()])
    losses.clear()
    torch.manual_seed(1)
    got = run(outer(lambda step, x, length: run(step, x, length, 2)), x, 6, 2)
    got = grads_of(got.square().sum(), [x, *layer.parameters()])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert len(losses) == 30


def test_hooks_on_saved_tensors_around_a_chain():
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run(torch.sin, x, 9)
    assert packed == [(3,)]
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(plain(torch.sin, x, 9).sum(), x)[0])
    y.sum().backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own doing
def test_under_torch_compile():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def model(x):
        return run(lambda h: layer(h).tanh(), x.sin(), 9).cos().sum()

    x = torch.randn(3, 4, requires_grad=True)
    wanted = grads_of(model(x), [x, *layer.parameters()])
    got = grads_of(torch.compile(model, backend="aot_eager")(x), [x, *layer.parameters()])
    assert same(got, wanted)
    compiled = torch.compile(lambda h: layer(h).tanh(), backend="aot_eager")
    got = grads_of(run(compiled, x.sin(), 9).cos().sum(), [x, *layer.parameters()])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


# --- Determinism ---


def test_a_step_that_is_not_the_same_twice():
    calls = 0

    def step(x):
        nonlocal calls
        calls += 1
        return (x * (1 + calls / 1000)).sin()

    y = run(step, torch.ones(3, requires_grad=True), 20)
    with pytest.raises(CheckpointError, match=r"Recomputed values differ.*step \d+ of the chain"):
        y.sum().backward()
    run(step, torch.ones(3, requires_grad=True), 20, determinism_check="none").sum().backward()


@pytest.mark.parametrize(("check", "expected"), [("first", [1, 0]), ("values", [1, 1]), ("default", [0, 0])])
def test_when_values_are_compared(check, expected, monkeypatch):
    looks = []
    monkeypatch.setattr("recollect._chains.first.digest", lambda tensor: looks.append(tensor))

    def step(x):
        return x.sin()

    for number in expected:
        looks.clear()
        run(step, torch.ones(3, requires_grad=True), 12, determinism_check=check).sum().backward()
        assert bool(looks) == bool(number)
    recollect.verify_again(step)
    looks.clear()
    run(step, torch.ones(3, requires_grad=True), 12, determinism_check="first").sum().backward()
    assert looks


def test_a_step_that_gives_another_shape_when_it_is_run_again():
    def step(x):
        return torch.cat([x, x]).sin()[: 4 if recollect.is_recomputing() else 3]

    y = run(step, torch.ones(3, requires_grad=True), 12, determinism_check="default")
    with pytest.raises(CheckpointError, match=r"is float32\[4\] on cpu when the step is run again, and was"):
        y.sum().backward()


def test_the_garbage_collector_has_nothing_to_do():
    layer = nn.Linear(4, 4)

    def block(x):
        return run(lambda h: recollect.checkpoint(layer, h).tanh(), x, 9)

    recollect.checkpoint(block, torch.ones(2, 4)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            recollect.checkpoint(block, torch.ones(2, 4, requires_grad=True)).sum().backward()
            layer.zero_grad()
        assert live.now == 0
    finally:
        gc.enable()
