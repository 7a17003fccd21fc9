"""The state that a region changes in place ends up as after one forward, and a replay starts from what its forward did.

Everything is compared with the same program without regions, where nothing is run twice.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import recollect
from recollect import CheckpointError, Recompute, Save, _verification, by_name, checkpoint
from tools import assert_equal, leaf

POLICIES = {
    "kept": by_name({"kept": Save()}),
    "recomputed": by_name({"kept": Recompute()}),
    "products": recollect.policies.save_matmuls,
    "all operators": recollect.policies.save_everything_but_pointwise,
}


@pytest.fixture(autouse=True)
def _nothing_is_verified():
    recollect.verify_again()


def plain(function, *args, **options):
    return function(*args)


def nested(run, depth):
    """A way to run a function in so many regions, one in the other."""

    def call(function, *args, **options):
        for _ in range(depth - 1):
            function = functools.partial(lambda inner, *args: run(inner, *args), function)
        return run(function, *args, **options)

    return call


class Counter(nn.Module):
    """A buffer that is counted up, and read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count.clone()


class Observer(nn.Module):
    """As in quantisation: the range so far, and what it makes of the input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.full((6,), torch.inf))
        self.register_buffer("high", torch.full((6,), -torch.inf))

    def forward(self, x):
        with torch.no_grad():
            torch.minimum(self.low, x.amin(0), out=self.low)
            self.high.copy_(torch.maximum(self.high, x.amax(0)))
        return x / (self.high - self.low).clamp(min=0.1)


class Queue(nn.Module):
    """A memory that is read, and then written at a place that moves on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.ones(8, 6))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        scores = x @ self.memory.clone().T
        place = int(self.place)
        self.memory[place : place + 4] = x.detach()
        self.memory.index_fill_(1, torch.tensor([5]), 0.5)
        self.place.add_(4).remainder_(8)
        return (scores @ self.memory.clone()).tanh()


class Codebook(nn.Module):
    """Averages of what was assigned to each code, which are the codes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sums", torch.eye(6)[:5] + 0.1)
        self.register_buffer("sizes", torch.ones(5))

    def forward(self, x):
        codes = self.sums / self.sizes[:, None]
        nearest = torch.cdist(x.detach(), codes).argmin(1)
        chosen = F.one_hot(nearest, 5).type_as(x)
        self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.sums.lerp_(chosen.T @ x.detach(), 0.1)
        return x * codes[nearest] + (codes[nearest] - x).square()


class Average(nn.Module):
    """A running average in a plain attribute, and a log that is only written."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(6)
        self.log = torch.zeros(100)
        self.number = 0

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.log[3] = x.detach().norm()
        self.log[:2].add_(1)
        return x - self.mean


STATES = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "batch norm, all batches": lambda: nn.BatchNorm1d(6, momentum=None),
    "batch norm of images": lambda: nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.BatchNorm2d(2), nn.Flatten()),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "counter": Counter,
    "observer": Observer,
    "queue": Queue,
    "codebook": Codebook,
    "average": Average,
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "new spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
}
REACHED = {
    "module": lambda model: model,
    "closure": lambda model: lambda x: model(x).exp() * 0.1,
    "closure over a list": lambda model: (lambda models: lambda x: models[0](x).exp() * 0.1)([model]),
    "method": lambda model: model.forward,
}


def state_of(model):
    state = [tensor.detach().clone() for tensor in model.state_dict().values()]
    for module in model.modules():
        state += [value.clone() for value in vars(module).values() if isinstance(value, torch.Tensor) and value.is_leaf]
    return state


def train(run, make, reach, *, passes=1, regions=1, steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), make(), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for _ in range(steps):
        x = torch.randn(4, 6, requires_grad=True)
        y = sum(run(reach(model), x * (number + 1)) for number in range(regions))
        for number in range(passes):
            (y.square().sum() * (number + 1)).backward(retain_graph=number < passes - 1)
        seen.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters()), *state_of(model)])
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("check", ["first", "values"])
@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("state", STATES)
def test_state_is_as_after_one_forward(state, reached, check, early_stop):
    run = functools.partial(checkpoint, determinism_check=check, early_stop=early_stop)
    expected = train(plain, STATES[state], REACHED[reached])
    assert_equal(train(run, STATES[state], REACHED[reached]), expected)


@pytest.mark.parametrize("how", [{"passes": 3}, {"regions": 2}, {"passes": 2, "regions": 3}], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("state", STATES)
def test_state_of_several_passes_and_regions(state, depth, how):
    """The second region starts from the state that the first one left behind."""
    expected = train(plain, STATES[state], REACHED["closure"], **how)
    assert_equal(train(nested(checkpoint, depth), STATES[state], REACHED["closure"], **how), expected)


@pytest.mark.parametrize("state", STATES)
def test_state_in_a_region_inside(state):
    """The outer region has other things to do before and after it."""

    def reach(run):
        def make(model):
            return lambda x: run(lambda x: model(x.sin()), x.exp() * 0.1).exp() * 0.1

        return make

    expected = train(plain, STATES[state], reach(plain), regions=2)
    assert_equal(train(checkpoint, STATES[state], reach(checkpoint), regions=2), expected)


@pytest.mark.filterwarnings("ignore:the policy")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", STATES)
def test_state_under_a_policy(state, policy):
    def reach(model):
        return lambda x: model[2:](recollect.region("kept", model[:2])(x.sin())).exp() * 0.1

    policy = POLICIES[policy]

    expected = train(plain, STATES[state], reach)
    assert_equal(train(functools.partial(checkpoint, policy=policy), STATES[state], reach), expected)


@pytest.mark.parametrize("steps", [1, 3])
def test_state_that_is_changed_after_the_forward_stays_so(steps):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Counter())
    for _ in range(steps):
        y = checkpoint(lambda x: model(x).exp() * 0.1, leaf(4, 6))
        model[1].reset_running_stats()
        model[2].count.fill_(7)
        state = state_of(model)
        y.sum().backward()
        assert_equal(state_of(model), state)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("fails", [ValueError, KeyboardInterrupt])
def test_state_after_a_replay_that_fails(fails, steps):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Counter())
    calls = iter([False] * (2 * steps - 1) + [True])

    def function(x):
        y = model(x).exp() * 0.1
        if next(calls):
            raise fails("on purpose")
        return y.sin()

    for _ in range(steps - 1):
        checkpoint(function, leaf(4, 6)).sum().backward()
    y = checkpoint(function, leaf(4, 6))
    state = state_of(model)
    with pytest.raises(fails, match="on purpose"):
        y.sum().backward()
    assert_equal(state_of(model), state)


def test_state_in_a_forward_that_raises_is_as_plain_code_leaves_it():
    model = nn.Sequential(nn.Linear(6, 6), Counter())
    twin = copy.deepcopy(model)

    def function(x, model):
        model(x)
        raise ValueError("on purpose")

    for one, run in ((model, checkpoint), (twin, plain)):
        with pytest.raises(ValueError, match="on purpose"):
            run(function, leaf(4, 6), one)
    assert_equal(state_of(model), state_of(twin))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double().float(),
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        lambda model: setattr(model[1], "running_mean", model[1].running_mean.clone()),
        lambda model: model.eval() and model.train(),
        lambda model: None,
    ],
    ids=["cast", "assigned", "set", "mode", "nothing"],
)
def test_state_whose_tensors_were_replaced_between_steps(change):
    """The buffers of a module that is cast or moved are other tensors afterwards."""

    def train(run):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        for _ in range(2):
            for _ in range(2):
                run(model, leaf(4, 6)).sum().backward()
            change(model)
        return state_of(model)

    assert_equal(train(checkpoint), train(plain))


def test_state_that_changes_only_in_training():
    """The first steps are with frozen statistics, as when a model is tuned."""

    def train(run):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        for mode in (False, False, True, True):
            run(model.train(mode), leaf(4, 6)).sum().backward()
        return state_of(model)

    assert_equal(train(checkpoint), train(plain))


@pytest.mark.parametrize("steps", [1, 3])
def test_state_that_is_itself_saved(steps):
    """Autograd saves the very buffer that the region has changed."""
    count = torch.zeros(())

    def function(x):
        count.add_(1)
        return (x * count).exp()

    for number in range(1, steps + 1):
        x, z = leaf(3), leaf(3)
        checkpoint(function, x).sum().backward()
        (z * number).exp().sum().backward()
        assert count == number
        assert torch.equal(x.grad, z.grad)


def test_other_graphs_do_not_notice_that_state_was_put_back():
    """What another graph saved of it is still what it saved: no version counter moves for good."""
    counter = Counter()
    for _ in range(3):
        y = checkpoint(lambda x: counter(x).exp() * 0.1, leaf(6))
        x = leaf(6)
        other = (x * counter.count).sum()
        y.sum().backward()
        other.backward()
        assert torch.equal(x.grad, counter.count.expand(6))


# --- What the first forward does not show ---


def one_by_one(run, make, forwards, *, pending=1):
    """Gradients and state after each step; `forwards` calls a model and gives a result, in turn, each in its region."""
    torch.manual_seed(0)
    model, seen = make(), []
    for number in range(0, len(forwards), pending):
        results = [forward(run, model, leaf(4, 6)) for forward in forwards[number : number + pending]]
        for result in results:
            result.exp().sum().backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        seen.append([gradients, state_of(model)])
        model.zero_grad()
    return seen


def in_region(run, model, x):
    return run(model, x)


def check_state(make, forwards, **how):
    for check in ("first", "values"):
        recollect.verify_again()
        run = functools.partial(checkpoint, determinism_check=check)
        assert_equal(one_by_one(run, make, forwards, **how), one_by_one(plain, make, forwards, **how))


class Started(nn.Module):
    """Codes that the first batch gives; later ones are averages."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("codes", torch.zeros(4, 6))
        self.register_buffer("is_started", torch.tensor(False))

    def forward(self, x):
        x = self.linear(x)
        if not self.is_started:
            self.codes.copy_(x.detach())
            self.is_started.fill_(True)
        self.codes.lerp_(x.detach(), 0.1)
        return (x - self.codes).tanh()


def test_state_that_the_first_forward_fills_and_later_ones_change():
    check_state(Started, [in_region] * 4)


@pytest.mark.parametrize("state", ["batch norm", "old spectral norm", "observer"])
def test_state_of_a_part_whose_mode_changes(state):
    """The statistics are frozen in the first steps, while the rest is in training."""

    def frozen(run, model, x):
        model[1].eval()
        return run(model, x)

    def thawed(run, model, x):
        model[1].train()
        return run(model, x)

    def make():
        return nn.Sequential(nn.Linear(6, 6), STATES[state]())

    check_state(make, [frozen, frozen, thawed, thawed, frozen, thawed])


class Experts(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), STATES[state](), nn.Tanh()) for _ in range(4))

    def forward(self, x, number):
        return self.experts[number](x)


@pytest.mark.parametrize("pending", [1, 2, 4])
@pytest.mark.parametrize("state", ["batch norm", "batch norm, all batches", "counter", "old spectral norm"])
def test_state_of_a_part_that_the_first_forward_leaves_out(state, pending):
    def forward(number):
        return lambda run, model, x: run(model, x, number)

    check_state(lambda: Experts(state), [forward(number % 4) for number in range(12)], pending=pending)


def test_state_of_a_part_that_was_seen_in_another_mode_and_is_reached_by_another_way():
    """Several forwards count before the first replay comes to a batch norm, and stops there."""

    def forward(number, mode):
        def call(run, model, x):
            return run(model.train().experts[0].train(mode) and model, x, number)

        return call

    ways = [(0, False), (1, True), (0, True), (0, True), (1, True), (0, False), (0, True), (0, True)]
    check_state(lambda: Experts("batch norm"), [forward(*way) for way in ways], pending=2)


def test_state_of_a_module_that_takes_the_place_of_another():
    def replace(run, model, x):
        model[1] = nn.BatchNorm1d(6)
        return run(model, x)

    def make():
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())

    check_state(make, [in_region, in_region, replace, in_region])


_model = None


def _global_model(x):
    return _model(x)


def test_state_of_models_that_nothing_shows():
    global _model

    def forward(number):
        def call(run, models, x):
            global _model
            _model = models[number]
            return run(_global_model, x)

        return call

    def make():
        return nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))

    check_state(make, [forward(number % 2) for number in range(6)])
    _model = None


def test_leaves_that_are_new_in_each_step_do_not_have_each_replay_recorded(monkeypatch):
    layer, recorded = nn.Linear(6, 6), []

    class Counted(_verification.Recorder):
        def __init__(self, **options):
            recorded.append(options)
            super().__init__(**options)

    monkeypatch.setattr(_verification, "Recorder", Counted)
    for _ in range(12):
        noise = leaf(6)
        recollect.checkpoint(lambda x, noise=noise: layer(x * noise), leaf(2, 6)).sum().backward()
    assert len(recorded) == 2  # the first forward and its replay


class Late(nn.Module):
    """Counts and averages from some step on, and may read the average."""

    def __init__(self, *, reads):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.reads, self.has_begun = reads, False

    def forward(self, x):
        x = self.linear(x)
        if self.has_begun:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.mean).tanh() if self.reads else x.tanh()


def begin(run, model, x):
    model.has_begun = True
    return run(model, x)


def test_state_that_begins_to_change_later():
    check_state(lambda: Late(reads=False), [in_region, in_region, begin, begin, begin])


def test_state_that_begins_to_change_later_and_is_read():
    model = Late(reads=True)
    checkpoint(model, leaf(4, 6)).sum().backward()
    y = begin(checkpoint, model, leaf(4, 6))
    state = state_of(model)
    with pytest.raises(CheckpointError, match=r"reads the buffer 'mean' of Late .*and changes it in place") as info:
        y.sum().backward()
    assert "aten.lerp_" in info.value.operator
    assert info.value.where.startswith(f"{__file__}:{Late.forward.__code__.co_firstlineno + 3} in forward")
    assert "for the first time" in info.value.cause
    assert_equal(state_of(model), state)
    model.zero_grad()
    twin = copy.deepcopy(model)
    assert_equal(one_by_one(checkpoint, lambda: model, [begin] * 2), one_by_one(plain, lambda: twin, [begin] * 2))


class ReadLate(Late):
    def forward(self, x):
        x = self.linear(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.mean).tanh() if self.has_begun else x.tanh()


def test_state_that_is_read_later():
    check_state(lambda: ReadLate(reads=True), [in_region, in_region, begin, begin])


class Lazy(nn.Module):
    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(6))
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.mean).tanh()


@pytest.mark.parametrize("make", [Lazy, nn.LazyBatchNorm1d])
def test_state_that_the_first_forward_makes(make):
    check_state(lambda: nn.Sequential(nn.Linear(6, 6), make()), [in_region] * 4)


class Rebound(nn.Module):
    """As modules are often written: not in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        x = self.linear(x)
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        self.count = self.count + 1
        return (x - self.mean).tanh()


@pytest.mark.parametrize("pending", [1, 3])
def test_state_that_is_put_in_the_place_of_the_old(pending):
    check_state(Rebound, [in_region] * 6, pending=pending)


class Normalised(nn.Linear):
    """Its weight is kept normalised, which done twice is not the same to the last bit."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True)).mul_(0.9)
        return super().forward(x)


def test_weights_that_a_forward_changes():
    check_state(lambda: nn.Sequential(nn.Linear(6, 6), Normalised(6, 6)), [in_region] * 3)
