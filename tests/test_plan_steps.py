"""Plans for steps and models that are out of the ordinary: what fails in place, what steps change, bad input."""

import collections
import copy
import dataclasses
import gc
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recollect
from models import Gpt, Layer, Shared, Stack, next_word
from recollect import BudgetError, Plan, _alone, composable
from recollect._aside import Gradient
from recollect._bench import Bench, sum_of_outputs
from recollect._failures import ALONE, IN_PLACE, Failure, in_lines, reason_of
from recollect._meters import RealClock
from recollect.profile import measure


@pytest.fixture(autouse=True, scope="module")
def little_garbage():
    """Measuring collects garbage all the time, which takes long with all that torch brings along."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def batch_of(*shape):
    return torch.randn(*(shape or (4, 32, 32)))


def state_of(model):
    """All that there is to a model, as values that compare: objects by identity, tensors by value and version too."""
    state = {}
    for name, module in model.named_modules(remove_duplicate=False):
        state[name] = type(module), {key: _frozen(value) for key, value in vars(module).items()}
    for name, one in model.named_parameters():
        state[f"{name}, gradient"] = _frozen(one.grad), one.requires_grad
    state["random"] = torch.get_rng_state().tolist()
    return state


def _frozen(value):
    if isinstance(value, torch.Tensor):
        return id(value), value._version, value.detach().to_dense().tolist()
    if isinstance(value, dict):
        return id(value), [(key, _frozen(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return id(value), [_frozen(part) for part in value]
    return value if isinstance(value, (int, float, str, set)) else id(value)


def gradients(model, batch, step=sum_of_outputs):
    torch.manual_seed(3)
    model.zero_grad()
    step(model, batch).backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


def assert_good(plan, model, batch, step=sum_of_outputs):
    """A plan holds its budget, and gradients under it are those of the plain step."""
    assert plan.measured.peak <= plan.budget
    expected = gradients(copy.deepcopy(model), batch, step)
    with plan.apply(model):
        got = gradients(model, batch, step)
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


@pytest.fixture
def even_times(monkeypatch):
    """Everything takes the same time, so that the fewest decisions are the best: first of all, a block as a whole."""

    def seconds(clock, work, times):
        work()
        return 1.0

    monkeypatch.setattr(RealClock, "seconds", seconds)


# --- What works for a block by itself, and not within the step ---


class Later(Layer):
    """Does not save its input, which may change after it."""

    def forward(self, x):
        return super().forward(x + 1)


class ChangesInputs(Stack):
    def forward(self, x):
        x = x * 1
        for layer in self.layers:
            x = x.add_(layer(x))
        return x


@pytest.mark.usefixtures("even_times")
def test_a_choice_that_fails_within_the_step_is_ruled_out():
    model, batch = ChangesInputs(Later), batch_of()
    plan = recollect.plan(model, batch, budget="80%", repeats=1)
    assert_good(plan, model, batch)
    assert plan.decisions()
    assert not any(block.name in block.decisions for block in plan.blocks)  # no block as a whole
    (note,) = plan.notes
    assert note.startswith("Later: left out because of an error within the step: recompute")
    assert "modified by an inplace operation" in note
    assert note in str(plan)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).notes == plan.notes


@pytest.mark.usefixtures("even_times")
def test_a_choice_that_fails_leaves_no_memory_behind():
    """Inputs that are changed by what regions give hold the graph, which no collector of garbage sees."""
    model, batch = ChangesInputs(Later), batch_of()

    def large_tensors():
        gc.collect()
        return sum(type(one) is torch.Tensor and one.numel() > 1000 for one in gc.get_objects())

    found = []
    for _ in range(2):  # what values are compared by is made once
        assert recollect.plan(model, batch, budget="80%", repeats=1).notes
        found.append(large_tensors())
    assert found[0] == found[1]


class Counts(nn.Module):
    """Changes a buffer in every forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(32) for _ in range(4))
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        for layer in self.layers:
            x = layer(x)
        return x


def test_regions_of_the_users_that_wait_for_their_backward_are_left_alone():
    """Also if measuring changes their inputs for a while."""
    model, batch = Counts(), batch_of()
    y = model(batch)
    loss = recollect.checkpoint(lambda x, mean: ((x - mean).sin() * mean.cos()).sin(), y, model.mean).sum()
    recollect.plan(model, batch, budget="90%", repeats=1)
    loss.backward()


def test_a_region_that_could_not_begin_disturbs_no_plan():
    def pack(tensor):
        raise ValueError("no room")

    model, batch = Stack(), batch_of()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            recollect.checkpoint(model, batch.clone().requires_grad_())
    except ValueError:  # "it does not fit, so make a plan"
        assert recollect.plan(model, batch, budget="90%", repeats=1).measured


def test_ranks_warm_up_as_often_as_each_other(monkeypatch):
    """Each run of a block may hold collectives."""
    agreed = []

    def worst(values):
        agreed.append(values)
        return [7] if len(agreed) == 1 else values

    monkeypatch.setattr(_alone, "worst", worst)
    runs = []
    device = SimpleNamespace(is_estimated=False, device=torch.device("cuda"), clock=Clock())
    block = SimpleNamespace(train=lambda: runs.append(1), forward=lambda: None)
    keep = _alone.Candidate("keep")
    _alone._times(device, block, SimpleNamespace(module=nn.Linear(2, 2)), [keep], [0], 1)
    assert agreed[0] == [50]  # half a second of 10 ms each
    assert len(runs) == 7 + 1  # and one that does not count; the others are the clock's


class Clock:
    """Work takes 10 ms."""

    def seconds(self, work, times):
        return 0.01


class Whole(nn.Module):
    """Has no parts: it is recomputed as a whole or not at all."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x):
        for _ in range(4):
            x = ((x + 1) @ self.weight).sigmoid()
        return x


def test_if_nothing_works_the_error_says_what_and_why():
    model, batch = ChangesInputs(Whole), batch_of()
    before = state_of(model)
    with pytest.raises(
        BudgetError, match=r"\n  Whole: left out because of an error within the step: recompute.*inplace"
    ):
        recollect.plan(model, batch, budget="80%", repeats=1)
    assert state_of(model) == before
    assert recollect.plan(model, batch, budget="100%", repeats=1).decisions() == {}


@pytest.mark.usefixtures("even_times")
def test_a_module_that_is_called_several_times_is_ruled_out_for_all_its_calls():
    class Model(Shared):
        def __init__(self):
            super().__init__()
            self.layer = Later(32)

        def forward(self, x):
            x = x * 1
            for length in (32, 32, 32, 32, 32, 16, 16):
                part = x[:, :length]
                part.add_(self.layer(part))
            return x

    model, batch = Model(), batch_of()
    plan = recollect.plan(model, batch, budget="85%", repeats=1)
    assert_good(plan, model, batch)
    assert len(plan.notes) == 1


class Scaled(Layer):
    scale = 1.0

    def forward(self, x):
        return super().forward(x * Scaled.scale)


class Scales(Stack):
    """What a layer computes depends on a number that changes before its backward."""

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            Scaled.scale = 1.0 + number
            x = layer(x)
        return x


@pytest.mark.usefixtures("even_times")
def test_a_replay_that_computes_something_else_is_ruled_out_every_time():
    model, batch = Scales(Scaled), batch_of()
    for _ in range(2):  # what passed under other decisions proves nothing
        plan = recollect.plan(model, batch, budget="75%", repeats=1)
        assert_good(plan, model, batch)
        assert any("Recomputed values differ" in note for note in plan.notes)
        assert len(plan.notes) == 1


@pytest.mark.usefixtures("even_times")
def test_only_what_fails_is_ruled_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.wider, self.bad = Stack(layers=3), nn.Linear(32, 48), Scales(Scaled, 3, 48)

        def forward(self, x):
            return self.bad(self.wider(self.good(x)))

    model, batch = Model(), batch_of()
    plan = recollect.plan(model, batch, budget="65%", repeats=1)
    assert_good(plan, model, batch)
    assert "recompute" in {block.choice for block in plan.blocks if block.module == "Layer"}
    assert {note.partition(":")[0] for note in plan.notes} == {"Scaled"}


def test_for_a_time_choices_that_fail_are_ruled_out_too():
    plan = recollect.plan(ChangesInputs(Later), batch_of(), time_budget=10, repeats=1)
    assert plan.measured.peak < plan.plain.peak
    assert "within the step" in plan.notes[0]


@pytest.mark.parametrize("kinds", [(Layer, Later), (Later, Later)])
def test_a_step_that_does_not_fit_is_measured_with_what_can_be_recomputed(monkeypatch, kinds):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (
                nn.ModuleList(kind(width) for _ in range(3)) for kind, width in zip(kinds, (32, 48), strict=True)
            )
            self.wider = nn.Linear(32, 48)

        def forward(self, x):
            for layer in self.first:
                y = layer(x)
                x = y if kinds[0] is Layer else x.mul(1).add_(y)
            x = self.wider(x)
            for layer in self.second:
                x = x.add_(layer(x))
            return x

    weigh = Bench.weigh

    def short_of_memory(bench, blocks):
        if blocks and not any("recollect" in key for one in bench.model.modules() for key in vars(one)):
            raise torch.OutOfMemoryError("as if")
        return weigh(bench, blocks)

    monkeypatch.setattr(Bench, "weigh", short_of_memory)
    model, batch = Model(), batch_of()
    profile = measure(Bench(model, batch, None, None), repeats=1)
    assert not profile.is_plain
    named = dict(zip(profile.blocks, profile.base, strict=True))
    assert named["first.0"]
    assert not named["second.1"]
    (failure,) = profile.failures
    assert failure.way == "recompute"
    assert failure.when == IN_PLACE


def test_a_step_that_fails_is_not_blamed_on_choices():
    model, batch = Stack(), batch_of()
    calls = []

    def fails(model, batch):
        calls.append(1)
        if len(calls) > 6:
            raise ZeroDivisionError("in the step")
        return model(batch).sum()

    before = state_of(model)
    with pytest.raises(ZeroDivisionError, match="in the step"):
        recollect.plan(model, batch, step=fails, budget="70%", repeats=1)
    assert state_of(model) == before


def test_notes_are_one_line_for_each_reason():
    long = "an error that " + "goes on " * 40
    failures = [
        *(
            Failure("0", "Layer", way, ALONE, f"ValueError: saved tensor {n} of '{way}'")
            for n, way in enumerate("abcdef")
        ),
        Failure("0", "Layer", "g", IN_PLACE, "ValueError: saved tensor 3 of 'g'"),
        Failure("0", "Layer", "h", ALONE, reason_of(KeyError(long))),
        *(Failure(f"layers.{n}", "Layer", "", ALONE, "TypeError: no") for n in range(7)),
    ]
    lines = in_lines(failures)
    assert len(lines) == 4
    assert (
        lines[0]
        == "Layer: left out because of an error by itself: a; b; c and 3 more (ValueError: saved tensor 0 of 'a')"
    )
    assert lines[1].startswith("Layer: left out because of an error within the step: g (")
    assert (
        lines[3]
        == "Layer: kept because it cannot be run by itself: layers.0, layers.1, layers.2 and 4 more (TypeError: no)"
    )
    assert all(len(line) < 250 and "\n" not in line for line in lines)
    assert reason_of(ValueError()) == "ValueError"
    assert reason_of(ValueError("first (of file.py:3). second\nthird")) == "ValueError: first"


def test_a_block_that_cannot_be_run_alone_says_what_to_do():
    class Cache:
        def __init__(self):
            self.held = []

    class Remembers(Layer):
        def forward(self, x, cache):
            cache.held.append(x)
            return super().forward(x) + sum(cache.held)

    class Model(Stack):
        def forward(self, x):
            cache = Cache()
            for layer in self.layers:
                x = layer(x, cache)
            return x

    with pytest.raises(BudgetError, match=r"kept because it cannot be run by itself: layers\.0.* use_cache=False"):
        recollect.plan(Model(Remembers), batch_of(), budget="70%", repeats=1)


# --- What a step must not change ---


def decays(model, batch):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model(batch).sum()


def decays_afterwards_unseen(model, batch):
    loss = model(batch).sum()
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    return loss


def optimizes(model, batch):
    loss = model(batch).sum()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    return loss


def trains(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    return loss


def goes_backward(model, batch):
    loss = model(batch).sum()
    loss.backward()
    return loss


def goes_backward_for_a_part(model, batch):
    first, second = (model(part).sum() for part in batch.chunk(2))
    third = model(batch).sum()
    first.backward()
    return first + second + third + model(batch).sum()


def penalises(model, batch):
    x = batch.detach().requires_grad_()
    loss = model(x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (decays, r"step changes the model's parameters: aten\.mul_ .*layers\.0\.norm1\.weight .*in decays\."),
        (decays_afterwards_unseen, r"step changes the model's parameters.* in decays_afterwards_unseen\."),
        (optimizes, r"step changes the model's parameters: aten\._fused_adamw_.*The model is as it was"),
        (trains, r"step changes the model's parameters.* in trains\."),
        (goes_backward, "goes backward through all .* leave it to the measurement"),
        (goes_backward_for_a_part, "step has called backward on the loss that it returns, or on a part of it"),
        (penalises, "for a penalty on gradients there is no plan"),
    ],
)
def test_a_step_that_does_more_than_to_give_a_loss_is_refused_before_it_does(step, words):
    model, batch = Stack(), batch_of()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number) if number % 2 else None
    before = state_of(model)
    for make in (recollect.frontier, lambda *args, **options: recollect.plan(*args, budget="70%", **options)):
        with pytest.raises(ValueError, match=words):
            make(model, batch, step=step, repeats=1)
        assert state_of(model) == before


def accumulates(model, batch):
    *others, last = batch.split(2)
    for part in others:
        model(part).sum().backward()
    return model(last).sum()


@pytest.mark.parametrize("budget", ["100%", "70%"])
def test_a_step_that_accumulates_gradients(budget):
    model, batch = Stack(), batch_of(6, 32, 32)
    before = state_of(model)
    plan = recollect.plan(model, batch, step=accumulates, budget=budget, repeats=1)
    assert state_of(model) == before
    assert bool(plan.decisions()) == (budget == "70%")
    assert plan.predicted.peak == pytest.approx(plan.measured.peak, rel=0.06)
    # More than for a part alone, which finds no gradients there.
    assert plan.plain.peak > recollect.plan(model, batch[:2], budget="100%", repeats=1).plain.peak * 1.1
    assert_good(plan, model, batch, accumulates)


def test_an_optimizer_that_steps_in_backward_is_refused_before_it_does():
    model, batch = Stack(), batch_of()
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    handles = [one.register_post_accumulate_grad_hook(update) for one in model.parameters()]
    before = state_of(model)
    with pytest.raises(ValueError, match=r"parameters: aten.*, at .* in update\. .* take off hooks"):
        recollect.plan(model, batch, budget="85%", repeats=1)
    assert state_of(model) == before
    for handle in handles:
        handle.remove()
    assert recollect.plan(model, batch, budget="85%", repeats=1).decisions()


def test_what_only_looks_like_a_change_of_the_batch_is_none():
    step = lambda model, batch: model(batch.detach_().requires_grad_(False)).sum()  # noqa: E731
    assert measure(Bench(Stack(layers=2), batch_of(), step, None), repeats=1).is_plain


@pytest.mark.parametrize("unseen", [False, True])
def test_parameters_that_change_later_are_found(unseen):
    model, batch = Stack(), batch_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def changes_in_the_end(model, batch):
        calls.append(1)
        if len(calls) == 5 and unseen:
            for parameter in model.layers[2].parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        elif len(calls) == 5:
            with torch.no_grad():
                model.layers[2].norm1.weight.add_(1)
        return model(batch).sum()

    with pytest.raises(
        ValueError, match=r"has changed the model's parameters.*layers\.2\.norm1\.weight.*not as they were"
    ):
        recollect.plan(model, batch, step=changes_in_the_end, budget="70%", repeats=1)


class Normalised(Layer):
    """Keeps its weights at norm one, as some models do."""

    def forward(self, x):
        with torch.no_grad():
            self.out.weight.div_(self.out.weight.norm())
        return super().forward(x)


def test_what_modules_change_in_their_own_parameters_is_put_back():
    class Model(Stack):
        def __init__(self):
            super().__init__(Normalised)
            self.words = nn.Embedding(64, 32, max_norm=1.0)

        def forward(self, text):
            return super().forward(self.words(text))

    model, batch = Model(), torch.randint(64, (4, 32))
    before = state_of(model)
    plan = recollect.plan(model, batch, budget="80%", repeats=1)
    assert state_of(model) == before
    assert plan.measured.peak <= plan.budget


@pytest.mark.parametrize(
    ("batch", "step", "words"),
    [
        (
            batch_of(),
            lambda model, batch: model(batch.mul_(2)).sum(),
            r"write to batch \(float32\[4, 32, 32\] on cpu\)",
        ),
        ({"x": batch_of()}, lambda model, batch: model(batch["x"][:2].add_(1)).sum(), r"aten\.add_ is .* batch\['x'\]"),
        (
            [batch_of(), [batch_of()]],
            lambda model, batch: (model(batch[0]) - batch[1][0].zero_()).sum(),
            r"batch\[1\]\[0\]",
        ),
        (batch_of(), lambda model, batch: model(F.relu(batch, inplace=True)).sum(), r"have step work on a clone"),
    ],
)
def test_a_step_that_changes_its_batch_is_refused_before_it_does(batch, step, words):
    model, twin = Stack(), copy.deepcopy(batch)
    before = state_of(model)
    with pytest.raises(ValueError, match=f"the step changes its batch: .*{words}"):
        recollect.plan(model, batch, step=step, budget="70%", repeats=1)
    assert state_of(model) == before
    assert _frozen(batch)[1:] == _frozen(batch)[1:]
    for one, other in zip(
        recollect._inputs.find_tensors((batch,), {})[0], recollect._inputs.find_tensors((twin,), {})[0], strict=True
    ):
        assert torch.equal(one, other)
        assert one._version == 0


@dataclasses.dataclass
class Pair:
    x: object
    y: object


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda x, y: {"x": x, "y": y}, lambda model, batch: (model(batch.pop("x")) - batch.pop("y")).square().mean()),
        (lambda x, y: [x, y], lambda model, batch: (model(batch.pop(0)) - batch.pop()).square().mean()),
        (lambda x, y: (x, {"y": [y]}), lambda model, batch: (model(batch[0]) - batch[1]["y"].pop()).square().mean()),
        (
            lambda x, y: collections.UserDict(x=x, y=y),
            lambda model, batch: (model(batch.pop("x")) - batch.pop("y")).sum(),
        ),
        (Pair, lambda model, batch: (model(batch.x) - batch.__dict__.pop("y")).square().mean()),
    ],
)
def test_a_step_may_take_its_batch_apart(make, step):
    model, x, y = Stack(layers=2), batch_of(), batch_of()
    batch = make(x, y)
    profile = measure(Bench(model, batch, step, None), repeats=1)
    assert profile.is_plain
    held = vars(batch) if isinstance(batch, Pair) else batch
    found = [*held.values()] if hasattr(held, "values") else [*held]
    assert found[0] is x
    assert found[1] is y or found[1]["y"][0] is y


def test_an_iterator_is_no_batch():
    taken = []
    batches = (taken.append(1) or batch_of() for _ in range(9))
    with pytest.raises(TypeError, match=r"batch must be what one step gets, got generator .* give next\(batch\)"):
        recollect.plan(Stack(), batches, budget="70%", step=lambda model, batch: model(next(batch)).sum())
    assert not taken


# --- What is put back ---


class Remembers(Layer):
    def __init__(self, width):
        super().__init__(width)
        self.last = self.untouched = torch.ones(3)
        self.all, self.by_name, self.calls = [torch.zeros(2)], {"x": [1]}, 0
        self.mean = torch.zeros(width)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        y = super().forward(x)
        self.calls += 1
        self.last, self.late = y, y.mean()
        self.all.append(y.detach())
        self.by_name["x"].append(self.calls)
        self.by_name[f"y{self.calls}"] = y
        self.mean.add_(y.detach().mean((0, 1)))
        self.seen.data.add_(1)
        return y


def test_what_modules_remember_is_put_back():
    model, batch = Stack(Remembers), batch_of()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model.layers[0].mlp[0])  # has its weight as an attribute, which every forward sets
    nn.utils.parametrizations.spectral_norm(model.layers[1].mlp[0])  # has a class of its own
    model(batch)
    before = state_of(model)
    recollect.plan(model, batch, budget="85%", repeats=1)
    assert state_of(model) == before
    model.layers[0].last.sum().backward()  # its graph is as it was


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_are_the_same_objects_afterwards(fails):
    class Model(Stack):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(64, 32, sparse=True)
            self.scale = torch.ones(32, requires_grad=True)  # a leaf that is no parameter

        def forward(self, text):
            return super().forward(self.words(text) * self.scale)

    model, text = Model(), torch.randint(64, (4, 32))
    model(text).sum().backward()
    model.layers[1].norm1.weight.grad = None
    leaves = [*model.parameters(), model.scale]
    held = [leaf.grad for leaf in leaves]
    values = [None if grad is None else grad.clone() for grad in held]

    def step(model, text):
        if fails and model.layers[0].mlp[0].weight.grad is None:
            raise ZeroDivisionError
        return model(text).sum()

    if fails:
        with pytest.raises(ZeroDivisionError):
            recollect.plan(model, text, step=step, budget="80%", repeats=1)
    else:
        recollect.plan(model, text, budget="80%", repeats=1)
    for leaf, grad, value in zip(leaves, held, values, strict=True):
        assert leaf.grad is grad
        assert grad is None or torch.equal(grad.to_dense(), value.to_dense())


def test_a_gradient_waits_on_the_host_and_comes_back_as_the_same_tensor():
    leaf = torch.zeros(3, 4, requires_grad=True)
    leaf.grad = grad = torch.empty_strided((3, 4), (1, 3)).copy_(torch.arange(12.0).view(3, 4))
    expected, stride = grad.clone(), grad.stride()
    aside = Gradient(leaf, to_host=True)
    assert leaf.grad is None
    assert grad.untyped_storage().nbytes() == 0  # its memory is free
    leaf.grad = torch.ones(3, 4)
    aside.put_back()
    assert leaf.grad is grad
    assert torch.equal(grad, expected)
    assert grad.stride() == stride


@pytest.mark.parametrize("kind", ["part of a bucket", "view", "sparse", "with a graph", "none"])
def test_a_gradient_that_is_more_than_its_memory_stays(kind):
    leaf = torch.zeros(6, requires_grad=True)
    bucket = torch.arange(12.0)
    leaf.grad = grad = {
        "part of a bucket": bucket.detach()[6:],
        "view": bucket[:6],
        "sparse": torch.eye(6)[0].to_sparse(),
        "with a graph": (torch.ones(6, requires_grad=True) * 2),
        "none": None,
    }[kind]
    aside = Gradient(leaf, to_host=True)
    assert leaf.grad is None
    assert grad is None or grad.shape == (6,)
    leaf.grad = torch.ones(6)
    aside.put_back()
    assert leaf.grad is grad


# --- Models ---


class Lora(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down, self.up = nn.Linear(linear.in_features, 4), nn.Linear(4, linear.out_features)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def lora():
    model = Stack().requires_grad_(False)
    for layer in model.layers:
        layer.mlp[0], layer.mlp[2] = Lora(layer.mlp[0]), Lora(layer.mlp[2])
    return model


def half_frozen():
    model = Stack()
    model.layers[:2].requires_grad_(False)
    return model


def alternating():
    model = Stack()
    model.layers[2], model.layers[3] = model.layers[0], model.layers[1]
    return model


def scripted_part():
    model = Stack()
    model.layers[1].mlp = torch.jit.script(model.layers[1].mlp)
    return model


def one_mlp():
    model = Stack()
    for layer in model.layers:
        layer.mlp = model.layers[0].mlp
    return model


@pytest.mark.parametrize("make", [lora, half_frozen, alternating, one_mlp, scripted_part])
def test_a_budget_holds(make):
    model, batch = make(), batch_of()
    before = state_of(model)
    plan = recollect.plan(model, batch, budget="90%", repeats=1)
    assert state_of(model) == before
    assert plan.decisions()
    if make is scripted_part:
        assert plan.measured.peak <= plan.budget
    else:
        assert_good(plan, model, batch)


def test_what_blocks_share_is_not_decided_for_one_of_them():
    model = one_mlp()
    profile = measure(Bench(model, batch_of(), None, None), repeats=1)
    decided = {part for kind in profile.kinds for option in kind.options for part in option.decisions}
    assert "" in decided
    assert not any(part.startswith("mlp") for part in decided)


def test_a_plan_that_is_applied_goes_by_its_name(written):
    model, data = written
    plan = Plan.from_dict(json.loads(json.dumps(data)))
    with plan.apply(model) as handle:
        assert "by the plan for Stack" in str(handle)
        with pytest.raises(ValueError, match=r"is decided already, by the plan for Stack .* and now by the plan for"):
            plan.apply(model)


class Outputs(collections.OrderedDict):
    """Like those of transformers: a dict with attributes."""

    def __getattr__(self, name):
        return self[name]


@pytest.mark.parametrize(
    ("result", "factor"),
    [
        (lambda y: y, 1),
        (lambda y: (y, None, [y]), 2),
        (lambda y: {"logits": y, "more": {"y": y}}, 2),
        (lambda y: {"loss": 3 * y.sum(), "logits": y}, 3),
        (lambda y: Outputs(loss=3 * y.sum(), logits=y), 3),
        (lambda y: Outputs(logits=y), 1),
        (lambda y: Pair(y, y.detach()), 1),
        (lambda y: {"loss": None, "logits": y}, 1),
    ],
)
def test_the_loss_of_what_models_return(result, factor):
    class Model(nn.Linear):
        def forward(self, input, scale=1):
            return result(super().forward(input) * scale)

    model, x = Model(3, 3), torch.randn(2, 3)
    expected = factor * F.linear(x, model.weight, model.bias).sum()
    torch.testing.assert_close(sum_of_outputs(model, x), expected)
    for batch in ((x, 1), [x], {"input": x}, collections.UserDict(input=x, scale=1)):
        torch.testing.assert_close(sum_of_outputs(model, batch), expected)


def test_a_batch_in_a_mapping_of_another_kind_is_weighed():
    model, x = Stack(layers=2), batch_of()
    benches = [
        Bench(model, kind(x=x), lambda model, batch: model(batch["x"]).sum(), None)
        for kind in (dict, collections.UserDict)
    ]
    assert benches[0].meter.now() == benches[1].meter.now()


# --- Budgets at the edges ---


def test_the_peak_of_the_plain_step_decides_nothing_and_a_byte_less_does():
    model, text = Gpt(layers=2), torch.randint(64, (4, 33))
    plain = recollect.plan(model, text, step=next_word, budget="100%", repeats=1)
    assert plain.decisions() == {}
    assert plain.budget == plain.plain.peak == plain.measured.peak
    less = recollect.plan(model, text, step=next_word, budget=plain.budget - 1, repeats=1)
    assert less.decisions()
    assert less.measured.peak < plain.budget
    assert recollect.plan(model, text, step=next_word, budget=2**70, repeats=1).decisions() == {}


def test_a_budget_that_is_out_of_reach():
    model, batch = Stack(layers=2), batch_of()
    before = state_of(model)
    with pytest.raises(BudgetError, match=r"no plan fits into .* B: the smallest") as caught:
        recollect.plan(model, batch, budget="0.01%", repeats=1)
    assert caught.value.smallest > sum(one.nbytes for one in model.parameters())
    with pytest.raises(BudgetError, match=r"no plan fits into 1\.0 MiB with 1\.0 GiB set aside by reserve"):
        recollect.plan(model, batch, budget="1MiB", reserve="1GiB", repeats=1)
    assert state_of(model) == before


def test_a_model_that_is_a_block_itself_has_a_name():
    model, batch = Whole(32), batch_of()
    with pytest.raises(BudgetError, match="which backward of the model needs"):
        recollect.plan(model, batch, budget="50%", repeats=1)


# --- Bad input ---


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"budget": "12 elephants"}, ValueError, r'budget must be bytes .*"60%".*"device", got str \'12 elephants\''),
        ({"budget": 1.5}, TypeError, "budget must be bytes .* got float 1.5"),
        ({"budget": "nan%"}, ValueError, "budget must be more than 0%"),
        ({"time_budget": True}, ValueError, "time_budget must be a number from 1 on, got bool True"),
        ({"time_budget": 1.1, "reserve": "1GiB"}, ValueError, "reserve has no meaning with time_budget"),
        ({"budget": "80%", "allow": ()}, ValueError, r"allow must hold 'recompute', 'offload' or both, got tuple \(\)"),
        ({"budget": "80%", "allow": None}, ValueError, "allow must hold .* got NoneType None"),
        (
            {"budget": "80%", "allow": ["recompute", 5]},
            ValueError,
            "allow must be one of 'recompute', 'offload', got 5",
        ),
        ({"budget": "80%", "repeats": True}, ValueError, "repeats must be a number from 1 on, got bool True"),
        (
            {"budget": "80%", "gpu": "H200"},
            ValueError,
            "gpu is for a model on the meta device, got 'H200' for one on cpu",
        ),
        ({"budget": "80%", "step": 3}, TypeError, "step must be callable .* got int 3"),
        ({"budget": "80%", "progress": "yes"}, TypeError, "progress must be callable .* got str 'yes'"),
        (
            {"budget": "80%", "offload": recollect.Offload()},
            ValueError,
            r"offload must say where to.* Offload\(to='cpu'\)",
        ),
    ],
)
def test_arguments(options, error, words):
    model, batch = Stack(layers=1), batch_of()
    before = state_of(model)
    with pytest.raises(error, match=words):
        recollect.plan(model, batch, **options)
    assert state_of(model) == before


def test_what_may_not_be_decided_is_said():
    words = (
        r"\n  allow=\('offload',\): nothing may be recomputed\n  nothing can be offloaded, because the model is on cpu"
    )
    with pytest.raises(BudgetError, match=words):
        recollect.plan(Stack(layers=2), batch_of(), budget="70%", allow="offload", repeats=1)


def test_models_that_are_not_ready():
    with pytest.raises(ValueError, match=r"model has lazy parameters, .*: 0 \(LazyLinear\)"):
        recollect.plan(nn.Sequential(nn.LazyLinear(3)), torch.ones(2, 3), budget="70%")
    model = Stack()
    composable.checkpoint(model.layers[0])
    with pytest.raises(ValueError, match=r"decided already, .*composable"):
        recollect.plan(model, batch_of(), budget="70%")
    with torch.no_grad(), pytest.raises(ValueError, match=r"do not require grad.*torch\.no_grad"):
        recollect.plan(Stack(), batch_of(), budget="70%")


def test_nobody_is_warned_of_what_is_only_tried():
    frozen = Stack().requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(32, 4))  # hardly anything is saved, and letting go of it is of no use
    plan = recollect.plan(model, batch_of(), budget="100%", repeats=1)
    assert plan.decisions() == {}


# --- Files ---


@pytest.fixture(scope="module")
def written():
    torch.manual_seed(0)
    model = Stack()
    return model, recollect.plan(model, batch_of(), budget="60%", repeats=1).to_dict()


def places(value, path=()):
    """Every place in nested dicts and lists, of lists the first item alone."""
    if path:
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


@pytest.mark.parametrize(
    "wrong", [-1, "x", [["x"]], {"a": 1}, True, float("nan"), None, pytest.param(10**400, id="huge")]
)
def test_no_value_in_a_file_is_taken_on_trust(written, wrong):
    model, data = written
    data = json.loads(json.dumps(data))
    refused = []
    for path in places(data):
        if path[0] == "shapes" and len(path) > 1:
            continue
        *way, last = path
        damaged = json.loads(json.dumps(data))
        inner = damaged
        for key in way:
            inner = inner[key]
        inner[last] = wrong
        try:
            plan = Plan.from_dict(damaged)
        except ValueError as error:
            refused.append(str(error))
            continue
        assert str(plan)
        assert repr(plan)
        json.dumps(plan.to_dict())
        plan.apply(model).remove()
    assert len(refused) > 30
    assert all("damaged" in words or "version" in words for words in refused)


def test_what_is_damaged_is_named(written, tmp_path):
    _, data = written
    for change, words in (
        (
            lambda data: data["blocks"][1].update(kept="much"),
            r"blocks\[1\]\.kept must be a whole number from 0 on, got str",
        ),
        (lambda data: data.pop("plain"), "plain is missing"),
        (lambda data: data.update(colour="red"), "colour is not known"),
        (lambda data: data["shapes"].update(w=[1, 2.5]), r"shapes\['w'\]\[1\] must be a whole number"),
        (
            lambda data: data["blocks"][0]["decisions"].update(x={"decision": "forget"}),
            r"decision must be one of 'save'",
        ),
        (
            lambda data: data["blocks"][0]["decisions"].update(x={"decision": "save", "y": 1}),
            r"decisions\['x'\] is no decision",
        ),
        (
            lambda data: data["blocks"][0]["decisions"].update(
                x={"decision": "recompute", "keep": {"aten.nope.default": [0]}}
            ),
            r"decisions\['x'\] is no decision: .*nope",
        ),
        (
            lambda data: data["blocks"][0]["decisions"].update(
                x={"decision": "recompute", "inputs": {"decision": "save"}}
            ),
            "inputs are offloaded",
        ),
    ):
        damaged = json.loads(json.dumps(data))
        change(damaged)
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=f"plan.json cannot be used as a plan: .*{words}"):
            Plan.load(file)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b'{"version": true}', b"\x00" * 9])
def test_files_that_are_no_json(tmp_path, content):
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json cannot be used as a plan"):
        Plan.load(file)


def test_a_plan_that_cannot_be_written_leaves_nothing_behind(written, tmp_path):
    plan = Plan.from_dict(json.loads(json.dumps(written[1])))
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OSError, match=r"plan\.json"):
        plan.save(tmp_path / "plan.json")
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]
    plan.save(bytes(tmp_path / "other.json"))
    assert Plan.load(bytes(tmp_path / "other.json")).to_dict() == plan.to_dict()
