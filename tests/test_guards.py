"""Guards: what a region depends on is as it was in the forward, or is put back, or there is an error that says so.

Every case is tried in the first step, which is recorded, in a later one, which is not, and through the drop-in.
"""

import copy
import functools
import gc
import random
import types
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import recollect
from recollect import CheckpointError, _verification, checkpoint, dropin
from recollect._guards import Reading
from tools import IN_PLACE, assert_equal, leaf

drop_in = functools.partial(dropin.checkpoint, use_reentrant=False)
by_metadata = functools.partial(checkpoint, determinism_check="default")
by_value = functools.partial(checkpoint, determinism_check="values")
unchecked = functools.partial(checkpoint, determinism_check="none")

# How regions are run, and how many steps go well before the one that is looked at.
WAYS = {
    "first step": (checkpoint, 0),
    "later step": (checkpoint, 2),
    "values": (by_value, 1),
    "metadata": (by_metadata, 1),
    "drop-in": (drop_in, 0),
    "drop-in, later": (drop_in, 2),
}
RECORDED = ("first step", "values")
every_way = pytest.mark.parametrize("way", WAYS)
when_recorded = pytest.mark.parametrize("way", RECORDED)


@pytest.fixture(autouse=True)
def _nothing_is_verified():
    recollect.verify_again()


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))


def forward_then(way, function, between, *args):
    """Some steps that go well, a forward, and what is changed after it."""
    run, steps = WAYS[way]
    for _ in range(steps):
        run(function, *(args or (leaf(2, 4),))).sum().backward()
    y = run(function, *(args or (leaf(2, 4),)))
    between()
    return y


def check_refused(way, function, between, *args, match=None):
    y = forward_then(way, function, between, *args)
    with pytest.raises(CheckpointError, match=match) as info:
        y.sum().backward()
    return info.value


def step(parameters, kind=torch.optim.SGD, **options):
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = kind(parameters, lr=0.5, **options)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def add_to(*tensors):
    for tensor in tensors:
        tensor.add_(1)


# --- Weights that changed ---

CHANGES = {
    "SGD": lambda model: step(model.parameters()),
    "SGD, one by one": lambda model: step(model.parameters(), foreach=False),
    "SGD, fused": lambda model: step(model.parameters(), fused=True),
    "AdamW": lambda model: step(model.parameters(), torch.optim.AdamW),
    "AdamW, fused": lambda model: step(model.parameters(), torch.optim.AdamW, fused=True),
    "Adagrad, fused": lambda model: step(model.parameters(), torch.optim.Adagrad, fused=True),
    "SGD of the first weight": lambda model: step([model[0].weight]),
    "SGD of the first bias": lambda model: step([model[0].bias]),
    "fused SGD of the first bias": lambda model: step([model[0].bias], fused=True),
    "by hand": lambda model: add_to(model[0].weight),
    "the last weight, by hand": lambda model: add_to(model[2].weight),
    "a norm's weight, by hand": lambda model: add_to(model[3].weight),
    "a view, by hand": lambda model: add_to(model[0].weight.view(-1)[2:3]),
    "loaded": lambda model: model.load_state_dict(model_of(1).state_dict()),
    "initialised": lambda model: nn.init.normal_(model[2].weight),
}


@every_way
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changed(change, way):
    model = model_of()
    error = check_refused(way, model, lambda: CHANGES[change](model))
    message = str(error)
    assert error.cause
    assert error.cause in message or "[4" in message
    assert len(message.splitlines()) <= 8


@every_way
def test_a_step_that_clears_the_gradients(way):
    """A fused step moves no version counter; afterwards no gradient tells which weights it was about."""

    class Clearing(torch.optim.Adam):
        def step(self, closure=None):
            super().step(closure)
            self.zero_grad()

    model = model_of()
    check_refused(way, model, lambda: step(model.parameters(), Clearing, fused=True))


@every_way
def test_a_bias_that_changed_by_hand(way):
    """It is read and not saved, so only a recorded forward can tell; see below for what a later one knows."""
    if "drop-in" in way or way == "metadata":
        pytest.skip("no forward was recorded")
    model = model_of()
    check_refused(way, model, lambda: add_to(model[0].bias))


@when_recorded
@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("how", ["data in place", "data assigned", "through numpy", "from a vector"])
def test_a_weight_that_changed_without_a_trace(part, how, way):
    model = model_of()
    parameter = getattr(model[0], part)

    def between():
        if how == "data in place":
            parameter.data.add_(1)
        elif how == "data assigned":
            parameter.data = parameter.data + 1
        elif how == "through numpy":
            parameter.detach().numpy()[...] += 1
        else:
            nn.utils.vector_to_parameters(torch.arange(56.0), model.parameters())

    check_refused(way, model, between)


@every_way
@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: x @ model[0].weight.t(),
        lambda model, x: x * model[0].weight[0],
        lambda model, x: x.unsqueeze(1) * model[0].weight.view(1, 4, 4).expand(2, 4, 4),
        lambda model, x: torch.stack([x * part for part in model[0].weight.unbind()]),
        lambda model, x: torch.einsum("bi,oi->bo", x, model[0].weight),
        lambda model, x: F.layer_norm(x, (4,), model[0].weight.diagonal(), model[0].bias),
        lambda model, x: x * model[0].weight.mT.flatten().unflatten(0, (4, 4))[1],
    ],
    ids=["t", "index", "expand", "unbind", "einsum", "diagonal", "copied"],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_view_of_a_weight_is_guarded_as_the_weight(function, fused, way):
    model = model_of()
    error = check_refused(way, lambda x: function(model, x).exp(), lambda: step([model[0].weight], fused=fused))
    assert "0.weight" in str(error)


@every_way
@pytest.mark.parametrize("change", ["SGD", "SGD, fused", "AdamW", "by hand"])
def test_a_weight_under_autocast(change, way):
    """Saved is the cast weight, which is another tensor; plain autograd does not mind."""
    if change == "by hand" and ("drop-in" in way or way == "metadata"):
        pytest.skip("no forward was recorded")
    model = model_of()

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    check_refused(way, function, lambda: CHANGES[change](model))
    run, steps = WAYS[way]

    def around(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return run(*args)

    for _ in range(steps):
        around(model, leaf(2, 4)).sum().backward()
    y = around(model, leaf(2, 4)).sum()
    CHANGES[change](model)
    with pytest.raises(CheckpointError):
        y.backward()


@every_way
@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_among_the_arguments(fused, way):
    model = model_of()
    check_refused(
        way,
        lambda x, holder: F.linear(x, holder["weight"]).exp(),
        lambda: step([model[0].weight], fused=fused),
        leaf(2, 4),
        {"weight": model[0].weight},
    )


@every_way
@pytest.mark.parametrize("fused", [False, True])
def test_between_two_passes_over_one_graph(fused, way):
    model = model_of()
    y = forward_then(way, model, lambda: None).sum()
    y.backward(retain_graph=True)
    step([model[0].weight], fused=fused)
    with pytest.raises(CheckpointError):
        y.backward()


@every_way
@pytest.mark.parametrize("fused", [False, True])
def test_in_a_nested_region(fused, way):
    model = model_of()
    run, _ = WAYS[way]

    def outer(x):
        return run(lambda x: run(model, x.sin()).exp(), x * 2).tanh()

    check_refused(way, outer, lambda: step([model[0].weight], fused=fused))


@every_way
def test_a_message_names_the_parameter(way):
    model = nn.ModuleDict({"mlp": model_of()})
    error = check_refused(way, lambda x: model["mlp"](x), lambda: step(model["mlp"][2].parameters()))
    assert "'mlp.2.weight' of ModuleDict" in str(error)
    assert "float32[4, 4]" in str(error)
    assert error.where.startswith(__file__)


def test_a_message_keeps_autograd_s_phrase():
    model = model_of()
    check_refused("later step", model, lambda: add_to(model[0].weight), match=IN_PLACE)


@every_way
def test_other_weights_may_change(way):
    model, other = model_of(), model_of(1)
    x = leaf(2, 4)
    y = forward_then(way, model, lambda: [change(other) for change in CHANGES.values()], x)
    x.grad = None
    y.sum().backward()
    z = leaf(2, 4)
    model(z).sum().backward()
    assert torch.equal(x.grad, z.grad)


# --- Weights that are others ---


@every_way
@pytest.mark.parametrize("place", ["0.weight", "2.weight", "3.weight"])
def test_a_weight_that_was_replaced(place, way):
    model = model_of()
    index, name = place.split(".")

    def replace():
        setattr(model[int(index)], name, nn.Parameter(getattr(model[int(index)], name).detach().clone()))

    check_refused(way, model, replace, match="another")


@every_way
def test_a_module_that_was_replaced(way):
    model = model_of()
    check_refused(way, model, lambda: setattr(model, "0", nn.Linear(4, 4)), match="another")


@pytest.mark.parametrize("way", ["first step", "later step", "values"])
def test_a_bias_that_was_replaced(way):
    model = model_of()
    check_refused(way, model, lambda: setattr(model[0], "bias", nn.Parameter(torch.ones(4))))


@every_way
@pytest.mark.parametrize("kind", [lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 4)], ids=["norm", "linear"])
@pytest.mark.parametrize("how", ["loop variable", "index", "function"])
def test_a_late_binding_closure_over_modules(how, kind, way):
    """Norms begin with equal weights, so by their values they cannot be told apart."""
    run, steps = WAYS[way]
    layers = nn.ModuleList(kind() for _ in range(3))

    def forward(x):
        for index, layer in enumerate(layers):
            if how == "loop variable":
                x = run(lambda x: layer(x).exp(), x)  # noqa: B023
            elif how == "index":
                x = run(lambda x: layers[index](x).exp(), x)  # noqa: B023
            else:
                call = layer.forward
                x = run(lambda x: call(x).exp(), x)  # noqa: B023
        return x

    for layer in list(layers) * steps:
        run(layer, leaf(2, 4)).sum().backward()
    with pytest.raises(CheckpointError) as info:
        forward(leaf(2, 4)).sum().backward()
    assert info.value.where.startswith(__file__)
    assert info.value.cause


@every_way
def test_a_late_binding_closure_over_leaves(way):
    run, _ = WAYS[way]
    weights = [leaf(4, seed=seed) for seed in range(3)]

    def forward(x):
        for weight in weights:
            x = run(lambda x: (x * weight).sin(), x)  # noqa: B023
        return x

    with pytest.raises(CheckpointError):
        forward(leaf(2, 4)).sum().backward()


@when_recorded
def test_a_late_binding_closure_over_constants(way):
    run, _ = WAYS[way]
    tables = [leaf(4, seed=seed).detach() for seed in range(3)]

    def forward(x):
        for table in tables:
            x = run(lambda x: (x * table).sin(), x)  # noqa: B023
        return x

    with pytest.raises(CheckpointError) as info:
        forward(leaf(2, 4)).sum().backward()
    assert "in place of another one" in info.value.cause or "'table'" in info.value.cause


def right_or_refused(way, function, between, restore, model=None, args=(), **kwargs):
    """Whether it is right. It may be an error, but never has other gradients than plain autograd."""
    parameters = [] if model is None else list(model.parameters())

    def gradients(run):
        torch.manual_seed(1)
        x = leaf(2, 4)
        y = run(function, x, *args, **kwargs)
        between()
        for parameter in parameters:
            parameter.grad = None
        try:
            y.sum().backward()
        finally:
            restore()
        return [x.grad, *(None if p.grad is None else p.grad.clone() for p in parameters)]

    run, steps = WAYS[way]
    expected = gradients(plain)
    for _ in range(steps):
        run(function, leaf(2, 4), *args, **kwargs).sum().backward()
    try:
        got = gradients(run)
    except CheckpointError:
        return False
    assert_equal(got, expected)
    return True


@every_way
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_frozen_or_unfrozen_between(first, place, way):
    model = model_of()
    model[place].requires_grad_(first)
    right_or_refused(
        way, model, lambda: model[place].requires_grad_(not first), lambda: model[place].requires_grad_(first), model
    )


@every_way
def test_optimizers_that_step_within_backward_disturb_no_replay(way, monkeypatch):
    """Each parameter is stepped as soon as it has its gradient: most of a model, when its first layers are replayed."""
    run, steps = WAYS[way]
    looked = []
    monkeypatch.setattr(_verification, "Reading", lambda suspects: looked.append(list(suspects)))

    def train(run):
        model = nn.ModuleList(model_of(seed) for seed in range(3))
        optimizers = {one: torch.optim.AdamW([one], lr=0.1) for one in model.parameters()}

        def step(one):
            optimizers[one].step()
            optimizers[one].zero_grad()

        for one in model.parameters():
            one.register_post_accumulate_grad_hook(step)
        for _ in range(steps + 2):
            x = leaf(2, 4)
            for layer in model:
                x = x + run(layer, x)
            x.square().sum().backward()
        return [one.detach() for one in model.parameters()]

    assert_equal(train(run), train(plain))
    assert looked == []  # for what the replays of other layers read


@every_way
@pytest.mark.parametrize("where", ["only the forward", "forward and backward"])
def test_parameters_put_in_for_a_while(where, way):
    """`functional_call` puts the module's own parameters back before backward comes; the replay needs the others."""
    model = model_of()
    others = {name: (p + 1).detach().requires_grad_() for name, p in model.named_parameters()}
    run, steps = WAYS[way]
    for _ in range(steps):
        run(model, leaf(2, 4)).sum().backward()

    class Regional(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, run):
            y = run(self.model, x).exp()
            return y if where == "only the forward" else torch.autograd.grad(y.sum(), [x, *self.model.parameters()])

    def call(run):
        x = leaf(2, 4)
        given = {f"model.{name}": value for name, value in others.items()}
        result = torch.func.functional_call(Regional(), given, (x, run))
        return torch.autograd.grad(result.sum(), [x, *others.values()]) if torch.is_tensor(result) else result

    own = dict(model.named_parameters())
    for _ in range(2):
        assert_equal(call(run), call(plain))
        assert all(one is own[name] for name, one in model.named_parameters())
    x, z = leaf(2, 4), leaf(2, 4)
    run(model, x).sum().backward()  # with its own again
    model(z).sum().backward()
    assert torch.equal(x.grad, z.grad)


@every_way
def test_buffers_alone_put_in_for_a_while(way):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.full((3,), 2.0))

        def forward(self, x):
            return (x * self.scale).sin() * self.weight

    class Regional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Scaled()

        def forward(self, x, run):
            return run(self.inner, x)

    run, steps = WAYS[way]
    model = Regional()
    for _ in range(steps):
        model(leaf(2, 3), run).sum().backward()

    def call(run):
        x = leaf(2, 3)
        y = torch.func.functional_call(model, {"inner.scale": torch.arange(3.0)}, (x, run))
        return torch.autograd.grad(y.sum(), [x, *model.parameters()])

    for _ in range(2):
        assert_equal(call(run), call(plain))


@every_way
def test_parameters_that_were_computed_and_regions_in_regions(way):
    """A network makes the weights of another one, whose layers are regions in a region."""
    run, steps = WAYS[way]
    model, maker = model_of(), nn.Linear(3, sum(p.numel() for p in model_of().parameters()))
    for _ in range(steps):
        run(lambda x: run(model, x).exp(), leaf(2, 4)).sum().backward()

    def call(run):
        x, code = leaf(2, 4), leaf(3)
        made, given = maker(code), {}
        for name, p in model.named_parameters():
            given[name], made = made[: p.numel()].view_as(p), made[p.numel() :]

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x):
                return run(lambda x: run(self.model, x.sin()).exp(), x)

        twice = Twice()
        y = torch.func.functional_call(twice, {f"model.{name}": value for name, value in given.items()}, (x,))
        del given, made
        z = twice(x)  # with its own, before the backward of the other
        return torch.autograd.grad((y.square() + z).sum(), [x, code, *maker.parameters(), *model.parameters()])

    for _ in range(2):
        assert_equal(call(run), call(plain))


def test_none_switches_the_guards_off():
    model = model_of()
    for change in CHANGES.values():
        x = leaf(2, 4)
        y = unchecked(model, x)
        change(model)
        y.sum().backward()
        z = leaf(2, 4)
        model(z).sum().backward()
        assert torch.equal(x.grad, z.grad), "the replay computed with the new weights"
    x = leaf(2, 4)
    y = unchecked(lambda x: model(x), x)
    model[0] = nn.Linear(4, 4)
    y.sum().backward()


# --- Training and evaluation ---


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout(0.5))

    def forward(self, x):
        return self.inner(x).exp() * (2 if self.training else 3)

    def method(self, x):
        return self(x).sin()


class Holder:
    def __init__(self, model):
        self.model = model

    def method(self, x):
        return self.model(x).sin()


def over_a_method(model):
    method = model.method
    return lambda x: method(x)


REACHED = {
    "itself": lambda model: model,
    "method": lambda model: model.method,
    "closure": lambda model: lambda x: model(x).sin(),
    "closure over a method": over_a_method,
    "closure over a list": lambda model: (lambda models: lambda x: models[0](x).sin())([model]),
    "closure over a dict": lambda model: (lambda models: lambda x: models["m"](x).sin())({"m": model}),
    "closure over a function": lambda model: (lambda call: lambda x: call(x).sin())(lambda x: model(x)),
    "partial": lambda model: functools.partial(lambda model, x: model(x).sin(), model),
    "partial of a keyword": lambda model: functools.partial(lambda x, model: model(x).sin(), model=model),
    "partial of a list": lambda model: functools.partial(lambda models, x: models[0](x).sin(), [model]),
    "default of an argument": lambda model: lambda x, model=model: model(x).sin(),
    "default of a keyword": lambda model: lambda x, *, model=model: model(x).sin(),
    "method of a plain object": lambda model: Holder(model).method,
    "closure over a plain object": lambda model: (lambda holder: lambda x: holder.model(x).sin())(Holder(model)),
}
FLIPS = {
    "eval": (lambda model: model.eval(), lambda model: model.train()),
    "train": (lambda model: model.train(), lambda model: model.eval()),
    "a submodule": (lambda model: model.inner[2].eval(), lambda model: model.train()),
    "two modules": (lambda model: model.inner[1:].eval(), lambda model: model.train()),
}


@every_way
@pytest.mark.parametrize("flip", FLIPS)
@pytest.mark.parametrize("reached", REACHED)
def test_modes_of_modules(reached, flip, way):
    model = Model()
    there, back = FLIPS[flip]
    back(model)
    function = REACHED[reached](model)
    right = right_or_refused(way, function, lambda: there(model), lambda: back(model), model)
    assert right or reached not in ("itself", "method", "closure", "partial"), "it can be put back"


@every_way
@pytest.mark.parametrize("flip", FLIPS)
@pytest.mark.parametrize(
    "wrap",
    [lambda model: model, lambda model: [model], lambda model: {"m": (model,)}, Holder],
    ids=["itself", "list", "dict", "object"],
)
def test_modes_of_modules_among_the_arguments(wrap, flip, way):
    model = Model()

    def function(x, given):
        while not isinstance(given, nn.Module):
            given = given.model if isinstance(given, Holder) else given["m"] if isinstance(given, dict) else given[0]
        return given(x).exp()

    there, back = FLIPS[flip]
    back(model)
    args = (wrap(model),)
    right = right_or_refused(way, function, lambda: there(model), lambda: back(model), model, args)
    assert right or not isinstance(args[0], nn.Module), "it can be put back"
    right_or_refused(way, function, lambda: there(model), lambda: back(model), model, given=args[0])


@every_way
def test_modes_are_left_as_they_are_found(way):
    model = Model()
    forward_then(way, model, model.eval).sum().backward()
    assert not any(module.training for module in model.modules())
    failing = iter([False] * (2 * WAYS[way][1] + 1) + [True])

    def fails(x):
        y = model(x)
        if next(failing):
            raise ValueError("in the replay")
        return y.exp()

    model.train()
    y = forward_then(way, fails, model.eval)
    with pytest.raises(ValueError, match="in the replay"):
        y.sum().backward()
    assert not any(module.training for module in model.modules())


# --- Default dtype and device ---


@pytest.fixture
def _defaults_come_back():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.usefixtures("_defaults_come_back")
@every_way
def test_the_default_dtype(way):
    def function(x):
        return (x * torch.tensor([0.1] * 4) + torch.rand(4) + torch.ones(4) / 3).sin() * torch.tensor(1 / 3)

    for then, now in [(torch.float32, torch.float64), (torch.float64, torch.float32)]:

        def between(now=now):
            torch.set_default_dtype(now)

        def restore(then=then):
            torch.set_default_dtype(then)

        restore()
        assert right_or_refused(way, function, between, restore)
        between()
        assert torch.get_default_dtype() is now


@pytest.mark.usefixtures("_defaults_come_back")
@every_way
@pytest.mark.parametrize("device", ["meta", torch.device("cpu", 0)])
def test_the_default_device(device, way):
    def function(x):
        return (x * torch.full((4,), 0.1) + torch.rand(4)).sin()

    assert right_or_refused(
        way, function, lambda: torch.set_default_device(device), lambda: torch.set_default_device(None)
    )
    x = leaf(2, 4)
    y = forward_then(way, function, lambda: None, x)
    with torch.device(device):
        y.sum().backward()
        assert torch.get_default_device() == torch.device(device)


# --- Random numbers that are not preserved ---


def fresh(function):
    """The same function with code of its own, of which nothing is known."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)


def draws(x):
    return torch.rand(8) + x.sin().exp()  # the replay draws it too, and nothing that is saved depends on it


def steady(x):
    return x.sin().exp()


def warnings_of(work):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [one for one in caught if "preserve_rng_state" in str(one.message)]


def train(run, *functions):
    for function in functions:
        run(function, leaf(8), preserve_rng_state=False).sum().backward()


@pytest.mark.parametrize("run", [checkpoint, by_metadata, drop_in], ids=["first", "default", "drop-in"])
def test_a_warning_once_per_function(run):
    one, other = fresh(draws), fresh(draws)
    (first,) = warnings_of(lambda: train(run, one))
    assert issubclass(first.category, UserWarning)
    assert first.filename == __file__ or f"{__file__}:" in str(first.message)
    assert "draws" in str(first.message)
    assert not warnings_of(lambda: train(run, one, one))
    assert len(warnings_of(lambda: train(run, other, one, other))) == 1


@pytest.mark.parametrize("run", [checkpoint, by_metadata, drop_in], ids=["first", "default", "drop-in"])
def test_a_warning_once_for_lambdas(run):
    namespace = {"torch": torch}
    exec("lambdas = [lambda x: torch.rand(8) + x.sin().exp() for _ in range(3)]", namespace)  # with code of their own
    assert len(warnings_of(lambda: train(run, *namespace["lambdas"]))) == 1


def test_no_warning_without_random_numbers():
    def work():
        for run in (checkpoint, by_value, by_metadata, drop_in):
            train(run, steady, steady)
            run(fresh(draws), leaf(8)).sum().backward()
        train(unchecked, fresh(draws))

    assert not warnings_of(work)


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), lambda: random.random(), lambda: numpy.random.rand()],
    ids=["torch", "random", "numpy"],
)
def test_an_error_under_values(draw):
    def function(x):
        return (x * float(draw())).exp()

    with pytest.raises(CheckpointError, match="random numbers"):
        by_value(function, leaf(8), preserve_rng_state=False).sum().backward()
    by_value(function, leaf(8), preserve_rng_state="all").sum().backward()


def test_the_model_is_not_copied():
    """Guards hold references: a deep copy of a model that was checkpointed is a model of its own."""
    model = model_of()
    checkpoint(model, leaf(2, 4)).sum().backward()
    twin = copy.deepcopy(model)
    x, z = leaf(2, 4), leaf(2, 4)
    y = checkpoint(twin, x)
    step(model.parameters(), fused=True)
    y.sum().backward()
    twin(z).sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_what_is_saved_after_the_last_needed_tensor_is_not_taken_for_another_leaf():
    # With early stop off the replay goes on; the leaf that the function makes itself is dead by then.
    scale = torch.arange(4.0)
    x, w = leaf(4), leaf(4)

    def block(a):
        own = (result := a * w).detach().requires_grad_()
        torch.autograd.grad((own.sin() * scale).sum(), own)
        return result

    drop_in(block, x, early_stop=False).sum().backward()
    assert torch.equal(x.grad, w)
    assert torch.equal(w.grad, x)


@pytest.mark.parametrize("way", ["later step", "metadata", "drop-in"])
def test_what_was_stepped_and_is_gone_by_now_is_not_taken_for_another(way):
    """Python gives its identity to the next tensor."""
    run, steps = WAYS[way]
    stepped = []

    def function(x):
        if recollect.is_recomputing():
            stepped.clear()
        for _ in range(20):
            x = x.sin()
        return x

    for _ in range(steps):
        run(function, leaf(4)).sum().backward()
    y = run(function, leaf(4))
    stepped += [nn.Parameter(torch.ones(4)) for _ in range(20)]
    for parameter in stepped:
        parameter.grad = torch.ones(4)
    torch.optim.SGD(stepped, lr=0.1).step()
    del parameter
    gc.collect()  # the optimizer
    y.sum().backward()


def test_another_tensor_with_the_identity_of_one_that_is_gone_is_not_taken_for_it():
    gone, other = torch.ones(4), torch.ones(4)
    reading = Reading([gone])
    reading._suspects[id(other)] = reading._suspects.pop(id(gone))  # as Python may give it
    with reading:
        gone.view(2, 2).sin()
        del gone
        other.sin()
    assert reading.found is None


def test_a_guard_does_not_run_a_parametrization():
    class Counted(nn.Module):
        calls = 0

        def forward(self, bias):
            Counted.calls += 1
            return bias

    layer, x = nn.Linear(4, 4), leaf(2, 4)
    checkpoint(layer, x).sin().sum().backward()
    y = checkpoint(layer, x).sin().sum()
    parametrize.register_parametrization(layer, "bias", Counted())
    before = Counted.calls
    with pytest.raises(CheckpointError, match="bias"):
        y.backward()
    assert Counted.calls == before


def test_a_plain_view_of_a_subclass_does_not_wake_it():
    class Loud(torch.Tensor):
        heard = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.heard.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    weight = torch.Tensor._make_subclass(Loud, leaf(4).detach(), True)

    def function(x):
        with torch._C.DisableTorchFunctionSubclass():
            view = weight.view(2, 2)
        assert type(view) is torch.Tensor
        assert type(view._base) is Loud
        return (x * view.sin()).cos()

    function(leaf(2, 2))
    once = list(Loud.heard)
    Loud.heard.clear()
    y = drop_in(function, leaf(2, 2))
    assert Loud.heard == once
    y.sum().backward()
    assert Loud.heard == once * 2
