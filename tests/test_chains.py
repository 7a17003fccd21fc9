"""Chains: the order of the work, the gradients to the last bit, the memory, and everything that differentiates."""

import dataclasses
import gc
import threading
import weakref
from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import recollect
from chains import grads_of, plain, same
from recollect import schedules
from recollect.schedules import Backward, Forward
from tools import LiveBytes, ambient_state, key_of

SIZES = [(1, 1), (2, 1), (3, 1), (5, 2), (10, 3), (10, 9), (10, 10), (10, 30), (33, 4)]


def order_of(schedule):
    """Which steps a schedule runs, one after the other."""
    ran, graphs = [], set()
    for action in schedule:
        if isinstance(action, Forward):
            ran += range(action.start, action.stop)
            if action.graph:
                graphs.add(action.start)
        elif isinstance(action, Backward) and action.step not in graphs:
            ran.append(action.step)
    return ran


# --- The order of the work ---


@pytest.mark.parametrize(("length", "slots"), SIZES)
def test_steps_run_in_the_order_of_the_schedule(length, slots):
    ran = []

    def step(state):
        x, i = state
        ran.append(i)
        return x.sin(), i + 1

    x = torch.ones(2, requires_grad=True)
    y, count = recollect.sequential(step, (x, 0), length=length, slots=slots)
    assert (count, ran) == (length, list(range(length)))
    y.sum().backward()
    schedule = schedules.revolve(length, slots)
    assert ran == order_of(schedule)
    assert len(ran) - length == schedules.extra_forwards(length, slots)


def test_a_thousand_steps_with_ten_slots():
    count = 0

    def step(x):
        nonlocal count
        count += 1
        return x.sin()

    recollect.sequential(step, torch.ones(2, requires_grad=True), length=1000, slots=10).sum().backward()
    assert count == 1000 + 3636


def test_without_a_choice_no_step_is_run_more_than_twice_again():
    counts = [0] * 500

    def step(state):
        x, i = state
        counts[i] += 1
        return x.sin(), i + 1

    x = torch.ones(2, requires_grad=True)
    recollect.sequential(step, (x, 0), length=500)[0].sum().backward()
    assert max(counts) == 3


def test_a_schedule_of_ones_own():
    ran = []

    def step(state):
        ran.append(state[1])
        return state[0].sin(), state[1] + 1

    schedule = schedules.revolve(20, 3)
    x = torch.ones(2, requires_grad=True)
    recollect.sequential(step, (x, 0), length=20, schedule=schedule)[0].sum().backward()
    assert ran == order_of(schedule)


def test_nothing_is_run_again_when_backward_stops_at_the_results():
    count = 0

    def step(x):
        nonlocal count
        count += 1
        return x.sin()

    y = recollect.sequential(step, torch.ones(2, requires_grad=True), length=10, slots=2)
    torch.autograd.grad(y.sum(), y)
    assert count == 10


# --- Gradients, to the last bit ---


class Ode(nn.Module):
    """Uses its weights four times in a step: sums must be formed in the order of plain autograd."""

    def __init__(self, width=4):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))

    def forward(self, x, h=0.1):
        k1 = self.field(x)
        k2 = self.field(x + h / 2 * k1)
        k3 = self.field(x + h / 2 * k2)
        k4 = self.field(x + h * k3)
        return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


@pytest.mark.parametrize(("length", "slots"), SIZES)
def test_gradients_are_those_of_the_plain_chain(length, slots):
    torch.manual_seed(0)
    step, x = Ode(), torch.randn(3, 4, requires_grad=True)
    wanted = grads_of(plain(step, x, length).square().sum(), [x, *step.parameters()])
    y = recollect.sequential(step, x, length=length, slots=slots)
    assert torch.equal(y, plain(step, x, length))
    assert same(grads_of(y.square().sum(), [x, *step.parameters()]), wanted)


@pytest.mark.parametrize("slots", [1, 2, 4, 6, None])
@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList, list, tuple])
def test_lists_of_functions(kind, slots):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), torch.sin, nn.Linear(6, 3), nn.Tanh(), torch.Tensor.exp, nn.Linear(3, 3)]
    if kind is nn.Sequential or kind is nn.ModuleList:
        layers = [layer for layer in layers if isinstance(layer, nn.Module)]
    functions = kind(*layers) if kind is nn.Sequential else kind(layers)
    x = torch.randn(2, 4, requires_grad=True)
    weights = [x, *(weight for layer in layers if isinstance(layer, nn.Module) for weight in layer.parameters())]
    y = x
    for layer in layers:
        y = layer(y)
    wanted = grads_of(y.square().sum(), weights)
    got = recollect.sequential(functions, x, slots=slots)
    assert torch.equal(got, y)
    assert same(grads_of(got.square().sum(), weights), wanted)


def test_the_same_function_in_several_places_of_a_list():
    torch.manual_seed(0)
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    functions = [a, b, a, torch.sin, b, a, a]
    x = torch.randn(2, 3)
    y = x
    for function in functions:
        y = function(y)
    weights = [*a.parameters(), *b.parameters()]
    wanted = grads_of(y.sum(), weights)
    assert same(grads_of(recollect.sequential(functions, x, slots=2).sum(), weights), wanted)


def test_a_sequential_as_one_step():
    torch.manual_seed(0)
    step = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    wanted = grads_of(plain(step, x, 7).sum(), [x, *step.parameters()])
    got = recollect.sequential(step, x, length=7, slots=2)
    assert same(grads_of(got.sum(), [x, *step.parameters()]), wanted)


def test_random_numbers_are_drawn_again():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def step(x):
        return nn.functional.dropout(layer(x), 0.5) + 0.1 * torch.randn(4)

    x = torch.randn(2, 4, requires_grad=True)
    torch.manual_seed(1)
    wanted = grads_of(plain(step, x, 30).square().sum(), [x, *layer.parameters()])
    after = torch.get_rng_state()
    torch.manual_seed(1)
    y = recollect.sequential(step, x, length=30, slots=4)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(7)
    around = torch.get_rng_state()
    assert same(grads_of(y.square().sum(), [x, *layer.parameters()]), wanted)
    assert torch.equal(torch.get_rng_state(), around)


def test_generators_of_ones_own():
    import random

    rng = recollect.register_generator(random.Random(3))
    try:

        def step(x):
            return (x * rng.random()).sin()

        x = torch.ones(3, requires_grad=True)
        wanted = grads_of(plain(step, x, 20).sum(), [x])
        rng.seed(3)
        y = recollect.sequential(step, x, length=20, slots=3, preserve_rng_state="all")
        assert same(grads_of(y.sum(), [x]), wanted)
    finally:
        recollect.unregister_generator(rng)


# --- Everything that differentiates ---


def chain_of(length=20, slots=3):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)

    def step(state):
        return layer(state).tanh()

    return step, layer, x, recollect.sequential(step, x, length=length, slots=slots), plain(step, x, length)


def test_autograd_grad_and_backward_of_inputs():
    _, layer, x, y, wanted = chain_of()
    for inputs in ([x], [layer.weight], [layer.bias, x], [*layer.parameters(), x]):
        got = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
        assert same(got, torch.autograd.grad(wanted.sum(), inputs, retain_graph=True))
        assert x.grad is layer.weight.grad is None
    y.sum().backward(inputs=[layer.weight])
    assert x.grad is layer.bias.grad is None
    assert torch.equal(layer.weight.grad, torch.autograd.grad(wanted.sum(), layer.weight)[0])


def test_what_is_not_asked_for_is_not_computed():
    _, layer, x, y, _ = chain_of()
    counts = {}
    for name, inputs in (("state", [x]), ("all", [x, *layer.parameters()])):
        with torch.profiler.profile(acc_events=True) as profile:  # without it some versions warn
            torch.autograd.grad(y.sum(), inputs, retain_graph=True)
        counts[name] = sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::sum"))
    assert counts["state"] < counts["all"]


def test_a_second_backward_begins_again():
    _, layer, x, y, wanted = chain_of()
    first = grads_of_kept(y, x, layer)
    assert same(first, torch.autograd.grad(wanted.sum(), [x, *layer.parameters()], retain_graph=True))
    assert same(grads_of_kept(y, x, layer), first)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.sum().backward()


def grads_of_kept(y, x, layer):
    return torch.autograd.grad(y.sum(), [x, *layer.parameters()], retain_graph=True)


def test_a_chain_that_is_asked_for_nothing_runs_nothing():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    ran = []

    def step(x):
        ran.append(1)
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    Stop.apply(recollect.sequential(step, x, length=9, slots=2)).sum().backward()
    assert len(ran) == 9
    assert x.grad is None


def test_two_threads_over_one_graph():
    _, layer, x, y, wanted = chain_of(60)
    found = [None, None]

    def differentiate(place):
        found[place] = grads_of_kept(y, x, layer)

    threads = [threading.Thread(target=differentiate, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.autograd.grad(wanted.sum(), [x, *layer.parameters()])
    assert same(found[0], expected)
    assert same(found[1], expected)


def test_chains_in_several_threads():
    def train(place):
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.fill_(place / 10)
        x = torch.ones(2, 3, requires_grad=True)
        for _ in range(3):
            y = recollect.sequential(lambda h: layer(h).tanh(), x, length=40, slots=4)
            got = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
            wanted = torch.autograd.grad(plain(lambda h: layer(h).tanh(), x, 40).sum(), [x, *layer.parameters()])
            equal.append(same(got, wanted))

    equal = []
    threads = [threading.Thread(target=train, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 12


def test_twice_differentiated_is_refused_with_advice():
    _, _, x, y, _ = chain_of()
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*Pass slots of at least its length"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_with_a_slot_for_every_step_it_can_be():
    torch.manual_seed(0)
    x = torch.randn(3, requires_grad=True)

    def twice(run):
        (first,) = torch.autograd.grad(run().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    wanted = twice(lambda: plain(torch.sin, x, 6))
    assert same(twice(lambda: recollect.sequential(torch.sin, x, length=6, slots=6)), wanted)


def test_hooks_see_whole_gradients_once():
    _, layer, x, y, wanted = chain_of()
    seen = []
    handles = [
        layer.weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2),
        layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated")),
        x.register_hook(lambda grad: grad * 3),
    ]
    y.sum().backward()
    for handle in handles:
        handle.remove()
    expected = torch.autograd.grad(wanted.sum(), [layer.weight, x])
    assert seen[1:] == ["accumulated"]
    assert torch.equal(seen[0], expected[0])
    assert torch.equal(layer.weight.grad, expected[0] * 2)
    assert torch.equal(x.grad, expected[1] * 3)


def test_backward_in_a_backward():
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = recollect.sequential(torch.sin, x.detach().requires_grad_(), length=5, slots=2)
                y.sum().backward()
            return grad * x.cos()

    x = torch.ones(3, requires_grad=True)
    wanted = torch.autograd.grad(plain(torch.sin, x, 9).sum(), x)
    got = torch.autograd.grad(recollect.sequential(Inner.apply, x, length=9, slots=2).sum(), x)
    assert same(got, wanted)


def test_nothing_needs_grad():
    def step(x):
        return x.sin()

    y = recollect.sequential(step, torch.ones(3), length=10, slots=2)
    assert not y.requires_grad
    assert torch.equal(y, plain(step, torch.ones(3), 10))


def test_without_grad_mode_it_is_a_loop():
    ran = []

    def step(x):
        ran.append(torch.is_grad_enabled())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        y = recollect.sequential(step, x, length=10, slots=2)
    assert ran == [False] * 10
    assert not y.requires_grad
    with torch.inference_mode():
        assert torch.equal(recollect.sequential(step, x, length=10, slots=2), y)


def test_no_steps():
    x = torch.ones(3, requires_grad=True)
    assert recollect.sequential(torch.sin, x, length=0) is x
    assert recollect.sequential([], x, outputs=True) == (x, [])


def test_results_can_be_changed_in_place_as_those_of_a_plain_chain():
    x = torch.ones(3, requires_grad=True)
    y = recollect.sequential(lambda x: x.sin() + 1, x, length=5, slots=2)
    y.mul_(2).add_(1)
    wanted = torch.autograd.grad(plain(lambda x: x.sin() + 1, x, 5).mul(2).sum(), x)
    assert same(torch.autograd.grad(y.sum(), x), wanted)
    y = recollect.sequential(lambda x: x.exp(), x, length=3, slots=1)  # exp saves its result
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- States ---

Pair = namedtuple("Pair", "h c")


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: torch.Tensor
    note: str
    rest: dict


def test_states_of_any_structure():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)

    def step(state):
        h = layer(state["pair"].h).tanh()
        deep = state["deep"][0]
        return {
            "pair": Pair(h, state["pair"].c * h.sigmoid()),
            "deep": [Frozen(deep.h + h, deep.note + "x", OrderedDict(n=deep.rest["n"] + 1)), None],
            "last": deque([h.detach(), *state["last"]], maxlen=2),
            "count": state["count"] + 1,
        }

    def first():
        torch.manual_seed(1)
        tensors = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
        rest = OrderedDict(n=torch.tensor(3))
        state = {
            "pair": Pair(*tensors[:2]),
            "deep": [Frozen(tensors[2], "", rest), None],
            "last": deque([torch.zeros(2, 3), torch.zeros(2, 3)], maxlen=2),
            "count": 0,
        }
        return tensors, state

    def loss(state):
        return (state["pair"].c * state["deep"][0].h).sum() + state["pair"].h.sum()

    tensors, state = first()
    wanted_state = plain(step, state, 12)
    wanted = grads_of(loss(wanted_state), [*tensors, *layer.parameters()])
    tensors, state = first()
    got = recollect.sequential(step, state, length=12, slots=3)
    assert got["count"] == 12
    assert got["deep"][0].note == "x" * 12
    assert got["deep"][0].rest["n"] == 15
    assert not got["last"][0].requires_grad
    assert got["pair"].c.requires_grad
    assert torch.equal(got["last"][1], wanted_state["last"][1])
    assert same(grads_of(loss(got), [*tensors, *layer.parameters()]), wanted)


def test_needs_of_grad_are_those_of_the_plain_chain():
    weight = torch.ones(3, requires_grad=True)

    def step(state):
        a, b, time, constant = state
        return a + b, b * constant + (weight if time > 2 else 1), time + 1, constant

    state = (torch.ones(3), torch.ones(3), torch.tensor(0.0), torch.ones(3))
    for length in (1, 2, 3, 4, 5, 8):
        wanted = plain(step, state, length)
        got = recollect.sequential(step, state, length=length, slots=2)
        assert [one.requires_grad for one in got] == [one.requires_grad for one in wanted]


def test_a_tensor_in_two_places_of_a_state():
    x = torch.ones(3, requires_grad=True)

    def step(state):
        a, b = state
        c = (a * b).sin()
        return c, c

    wanted = torch.autograd.grad(plain(step, (x, x), 9)[1].sum(), x)
    got = recollect.sequential(step, (x, x), length=9, slots=2)
    assert same(torch.autograd.grad((got[1]).sum(), x), wanted)


def test_states_that_are_handed_on_unchanged():
    torch.manual_seed(0)
    x = torch.randn(5, 3, requires_grad=True)
    h = torch.zeros(3)

    def step(state):
        h, x, i = state
        return (h + x[i % 5] * x[(i + 1) % 5]).tanh(), x, i + 1

    wanted = torch.autograd.grad(plain(step, (h, x, 0), 17)[0].sum(), x)
    got = recollect.sequential(step, (h, x, 0), length=17, slots=3)
    assert same(torch.autograd.grad(got[0].sum(), x), wanted)


def test_a_step_that_changes_its_dict_in_place():
    def step(state):
        state["x"] = state["x"].sin()
        state["n"] += 1
        return state

    x = torch.ones(3, requires_grad=True)
    wanted = torch.autograd.grad(plain(step, {"x": x, "n": 0}, 12)["x"].sum(), x)
    state = {"x": x, "n": 0}
    got = recollect.sequential(step, state, length=12, slots=3)
    assert got["n"] == 12
    assert state["n"] == 0
    assert same(torch.autograd.grad(got["x"].sum(), x), wanted)


def test_shapes_and_dtypes_may_change():
    def step(x):
        return torch.cat([x, x[-1:].sin()]).to(torch.float64 if len(x) % 2 else torch.float32)

    x = torch.rand(2, requires_grad=True)
    wanted = torch.autograd.grad(plain(step, x, 11).sum(), x)
    got = recollect.sequential(step, x, length=11, slots=3)
    assert len(got) == 13
    assert same(torch.autograd.grad(got.sum(), x), wanted)


def test_a_gradient_that_ends_on_the_way():
    def step(state):
        h, i = state
        return (h.detach() if i == 6 else h).sin(), i + 1

    x = torch.ones(3, requires_grad=True)
    y, _ = recollect.sequential(step, (x, 0), length=12, slots=3)
    assert torch.autograd.grad(y.sum(), x, allow_unused=True) == (None,)


# --- Outputs ---


@pytest.mark.parametrize(("length", "slots"), SIZES)
def test_a_loss_on_outputs(length, slots):
    torch.manual_seed(0)
    cell, head = nn.RNNCell(3, 4), nn.Linear(4, 2)

    def step(h):
        h = cell(torch.ones(2, 3), h)
        return h, {"y": head(h), "label": "a"}

    h0 = torch.zeros(2, 4, requires_grad=True)
    weights = [h0, *cell.parameters(), *head.parameters()]

    def run(chain):
        h, outputs = chain()
        assert [one["label"] for one in outputs] == ["a"] * length
        return h.sum() + sum((one["y"].square().sum() * i for i, one in enumerate(outputs)), torch.zeros(()))

    def by_hand():
        h, outputs = h0, []
        for _ in range(length):
            h, output = step(h)
            outputs.append(output)
        return h, outputs

    wanted = grads_of(run(by_hand), weights)
    got = run(lambda: recollect.sequential(step, h0, length=length, slots=slots, outputs=True))
    assert same(grads_of(got, weights), wanted)


def test_a_loss_on_some_outputs_only():
    x = torch.ones(3, requires_grad=True)

    def step(x):
        x = x.sin()
        return x, (x * 2, x.argmax(), None)

    def by_hand():
        y, outputs = x, []
        for _ in range(10):
            y, output = step(y)
            outputs.append(output)
        return outputs

    _, outputs = recollect.sequential(step, x, length=10, slots=2, outputs=True)
    assert not outputs[0][1].requires_grad
    got = torch.autograd.grad(outputs[4][0].sum(), x)
    assert same(got, torch.autograd.grad(by_hand()[4][0].sum(), x))


def test_outputs_of_another_structure_from_step_to_step():
    x = torch.ones(3, requires_grad=True)

    def step(state):
        x, i = state
        x = x.sin()
        return (x, i + 1), ([x * i] * i if i % 3 else None)

    def by_hand():
        state, outputs = (x, 0), []
        for _ in range(7):
            state, output = step(state)
            outputs.append(output)
        return outputs

    def loss(outputs):
        return sum(one.sum() for output in outputs for one in output or ())

    wanted = torch.autograd.grad(loss(by_hand()), x)
    _, outputs = recollect.sequential(step, (x, 0), length=7, slots=2, outputs=True)
    assert [None if one is None else len(one) for one in outputs] == [None, 1, 2, None, 4, 5, None]
    assert same(torch.autograd.grad(loss(outputs), x), wanted)


# --- Memory ---


def test_live_states_are_never_more_than_slots():
    """Counted by storage: the slots, the running state, and the result of the step that runs."""
    length, slots, most = 100, 6, 0
    alive = {}

    def step(x):
        nonlocal most
        y = x.neg()  # saves nothing: all that lives is states
        alive[key_of(y)] = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
        for key in [key for key, one in alive.items() if one.expired()]:
            del alive[key]
        most = max(most, len(alive))
        return y

    x = torch.ones(64, requires_grad=True)
    y = recollect.sequential(step, x, length=length, slots=slots)
    assert most <= slots - 1 + 2  # the first state is x
    held = len(alive)
    assert held <= slots - 1 + 2  # the result, and what the last step was given
    loss = y.sum()
    del y
    loss.backward()
    assert most <= slots - 1 + 2


def test_bytes_of_a_chain_are_flat_in_its_length():
    def peak(length):
        with LiveBytes() as live:
            x = torch.ones(1000, requires_grad=True)
            recollect.sequential(lambda x: x.sin().cos(), x, length=length, slots=5).sum().backward()
        return live.peak

    peak(20)
    assert peak(400) == peak(40)


@pytest.mark.parametrize("is_differentiated", [True, False])
def test_nothing_is_left_behind(is_differentiated):
    layer = nn.Linear(4, 4)

    def step(state):
        state = layer(state).tanh()
        return state, (state.sum(), state)  # the latter may be kept too, and must not hold what keeps it

    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with LiveBytes() as live:
                x = torch.ones(2, 4, requires_grad=True)
                y, outputs = recollect.sequential(step, x, length=30, slots=4, outputs=True)
                node = weakref.ref(y.grad_fn)
                if is_differentiated:
                    (y.sum() + outputs[3][0]).backward()
                    layer.zero_grad()
                del x, y, outputs
            assert live.now == 0
            assert node() is None
    finally:
        gc.enable()


def test_a_failed_step_leaves_nothing_behind():
    def make(fails_at, *, again):
        seen = set()

        def step(state):
            x, i = state
            if i == fails_at and (not again or i in seen):
                raise KeyError("no")
            seen.add(i)
            return x.sin(), i + 1

        return step

    gc.collect()
    gc.disable()
    before = ambient_state()
    try:
        for fails_at in (0, 3, 9):
            with LiveBytes() as live:
                with pytest.raises(KeyError, match="no") as caught:
                    recollect.sequential(make(fails_at, again=False), (torch.ones(3, requires_grad=True), 0), length=10)
                assert f"step {fails_at} of the chain" in "".join(caught.value.__notes__)[:40]
                del caught
            assert live.now == 0
            assert ambient_state() == before
        for fails_at in (0, 3, 8):
            with LiveBytes() as live:
                x = torch.ones(3, requires_grad=True)
                y, _ = recollect.sequential(make(fails_at, again=True), (x, 0), length=10, slots=2)
                with pytest.raises(KeyError, match="no") as caught:
                    y.sum().backward()
                del x, y, caught
            assert live.now == 0
            assert ambient_state() == before
    finally:
        gc.enable()


class StubbornError(Exception):
    def __setattr__(self, name, value):
        if name == "__notes__":
            raise TypeError("no notes here")
        super().__setattr__(name, value)


def test_an_error_that_takes_no_notes_arrives_all_the_same():
    def step(x):
        if fails:
            raise StubbornError("mine")
        return x.sin()

    fails = True
    with pytest.raises(StubbornError, match="mine"):
        recollect.sequential(step, torch.ones(3, requires_grad=True), length=5)
    fails = False
    y = recollect.sequential(step, torch.ones(3, requires_grad=True), length=5, slots=2)
    fails = True
    with pytest.raises(StubbornError, match="mine"):
        y.sum().backward()


def test_large_gradients_are_summed_up_in_place():
    torch.manual_seed(0)
    layer = nn.Linear(512, 512)
    x = torch.randn(2, 512, requires_grad=True)

    def step(h):
        return layer(layer(h).tanh()).tanh()

    wanted = grads_of(plain(step, x, 12).sum(), [x, *layer.parameters()])
    peaks = {}
    for name, chain in (
        ("plain", plain),
        ("chain", lambda *given: recollect.sequential(given[0], given[1], length=12, slots=3)),
    ):
        with LiveBytes() as live:
            got = grads_of(chain(step, x, 12).sum(), [x, *layer.parameters()])
        peaks[name] = live.peak
        assert same(got, wanted)
        del got
    assert peaks["chain"] <= peaks["plain"]


def test_very_long_chains():
    """No recursion, no object per step."""
    import tracemalloc

    weight = torch.ones(2, requires_grad=True)

    def step(x):
        return x * weight

    def run(length):
        tracemalloc.start()
        x = torch.ones(2, requires_grad=True)
        y = recollect.sequential(step, x, length=length, slots=20, determinism_check="none")
        y.sum().backward()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    run(100)
    short = run(1000)
    assert run(20_000) < short + 30_000
    weight.grad = None
    recollect.sequential(step, torch.ones(2), length=100_000, slots=20, determinism_check="none").sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 100_000.0))


# --- Random chains ---


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_random_chains(data):
    length = data.draw(st.integers(1, 24))
    slots = data.draw(st.integers(1, 8))
    kinds = st.sampled_from(["sin", "linear", "dropout", "shared", "residual", "detached", "noise", "branch"])
    plan = [data.draw(kinds) for _ in range(length)]
    as_list = data.draw(st.booleans())
    has_outputs = data.draw(st.booleans())
    torch.manual_seed(length)
    shared = nn.Linear(3, 3)
    layers = [nn.Linear(3, 3) for _ in range(length)]
    outside = torch.randn(3, requires_grad=True)
    history = outside.exp()

    def apply(kind, i, h, c):
        if kind == "sin":
            return h.sin() * c, c
        if kind == "linear":
            return layers[i](h), c + h
        if kind == "dropout":
            return nn.functional.dropout(h, 0.3), c
        if kind == "shared":
            return shared(shared(h).tanh()), c
        if kind == "residual":
            return h + shared(c).tanh(), c * history
        if kind == "detached":
            return h * c.detach(), c
        if kind == "noise":
            return h + torch.randn(3), c
        return (h if h.sum() > 0 else -h) * outside, c.tanh()

    def step(state):
        h, c, i = state
        h, c = apply(plan[i], i, h, c)
        return ((h, c, i + 1), h * c) if has_outputs else (h, c, i + 1)

    x = torch.randn(2, 3, requires_grad=data.draw(st.booleans()))
    weights = [outside, *shared.parameters(), *(weight for layer in layers for weight in layer.parameters())]
    weights += [x] if x.requires_grad else []

    def loss(result):
        (h, c, _), outputs = result if has_outputs else (result, [])
        return (h * c).sum() + sum((one.sin().sum() for one in outputs), torch.zeros(()))

    def by_hand():
        state, outputs = (x, torch.ones(2, 3), 0), []
        for _ in range(length):
            state = step(state)
            if has_outputs:
                state, output = state
                outputs.append(output)
        return (state, outputs) if has_outputs else state

    torch.manual_seed(1)
    total = loss(by_hand())
    wanted = None
    if total.requires_grad:
        wanted = torch.autograd.grad(total, weights, allow_unused=True, retain_graph=True)
    torch.manual_seed(1)
    options = {"slots": slots, "outputs": has_outputs}
    if as_list:
        got = recollect.sequential([step] * length, (x, torch.ones(2, 3), 0), **options)
    else:
        got = recollect.sequential(step, (x, torch.ones(2, 3), 0), length=length, **options)
    got = loss(got)
    assert torch.equal(got, total)
    assert got.requires_grad == total.requires_grad
    if wanted is not None:
        found = torch.autograd.grad(got, weights, allow_unused=True)
        assert [one is None for one in found] == [one is None for one in wanted]
        if "residual" not in plan:  # which reads what is computed from another tensor that steps read
            assert same(found, wanted)
        for one, other in zip(found, wanted, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other)
