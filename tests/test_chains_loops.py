"""Chains: loops of unknown length, budgets and tiers."""

import gc
from itertools import pairwise

import pytest
import torch
from torch import nn

import recollect
from chains import grads_of, plain, same
from recollect import schedules
from recollect.schedules import Backward, Forward, Keep
from tools import LiveBytes


def counting(length):
    return lambda state: state[1] < length


def advance(state):
    x, i = state
    return x.sin(), i + 1


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 6, 10, 30, 77])
def test_gradients_of_a_loop(length, slots):
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    ran = []

    def step(state):
        h, i = state
        ran.append(i)
        return nn.functional.dropout(layer(h).tanh(), 0.1), i + 1

    x = torch.randn(2, 3, requires_grad=True)
    torch.manual_seed(1)
    wanted = grads_of(plain(step, (x, 0), length)[0].square().sum(), [x, *layer.parameters()])
    ran.clear()
    torch.manual_seed(1)
    y, count = recollect.while_loop(counting(length), step, (x, 0), slots=slots)
    assert (count, ran) == (length, list(range(length)))
    assert same(grads_of(y.square().sum(), [x, *layer.parameters()]), wanted)
    # The last step is run once more than a schedule has it: nobody knew that it was the last.
    assert len(ran) == length + 1 + schedules.online(slots).schedule(length).cost()


def test_a_loop_that_never_runs():
    x = torch.ones(3, requires_grad=True)
    assert recollect.while_loop(lambda x: False, torch.sin, x, slots=2) is x
    assert recollect.while_loop(lambda x: False, torch.sin, x, slots=2, outputs=True) == (x, [])


def test_a_loop_until_it_is_close_enough():
    a = torch.tensor([2.0, 5.0], requires_grad=True)
    asked = []

    def is_far(x):
        asked.append(torch.is_grad_enabled())
        return (x * x - a).abs().max() > 1e-3

    root = recollect.while_loop(is_far, lambda x: (x + a / x) / 2, torch.ones(2), slots=2)
    count = len(asked)
    root.sum().backward()
    assert torch.allclose(a.grad, 0.5 / a.detach().sqrt(), rtol=1e-2)
    assert asked == [False] * count


def test_outputs_of_a_loop_and_a_second_backward():
    x = torch.ones(3, requires_grad=True)

    def step(state):
        x, i = state
        return (x.sin(), i + 1), x * i

    (_, count), outputs = recollect.while_loop(counting(11), step, (x, 0), slots=2, outputs=True)
    assert (count, len(outputs)) == (11, 11)
    by_hand, state = [], (x, 0)
    for _ in range(11):
        state, output = step(state)
        by_hand.append(output)
    wanted = torch.autograd.grad(sum(by_hand).sum(), x)
    for _ in range(2):
        assert same(torch.autograd.grad(sum(outputs).sum(), x, retain_graph=True), wanted)


def test_a_loop_in_a_region_and_without_grad():
    x = torch.ones(3, requires_grad=True)
    wanted = torch.autograd.grad(plain(torch.sin, x, 9).sum(), x)

    def block(x):
        return recollect.while_loop(counting(9), advance, (x, 0), slots=2)[0]

    assert same(torch.autograd.grad(recollect.checkpoint(block, x).sum(), x), wanted)
    with torch.no_grad():
        assert torch.equal(block(x), plain(torch.sin, x, 9))


def test_states_of_a_loop_are_never_more_than_slots_and_two():
    with LiveBytes() as live:
        x = torch.ones(1000, requires_grad=True)
        y, _ = recollect.while_loop(
            counting(200), lambda state: (state[0].neg(), state[1] + 1), (x, 0), slots=5, determinism_check="none"
        )
        y.sum().backward()
        del x, y
    # Those in slots, two running, the result, and two gradients.
    assert live.peak <= (5 + 2 + 1 + 2) * 4000 + 100
    assert live.now == 0


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((3, torch.sin), {"slots": 2}, TypeError, "cond must be callable"),
        ((torch.sin, 3), {"slots": 2}, TypeError, "step must be callable"),
        ((torch.sin, torch.sin), {"slots": 0}, ValueError, "slots must be at least 1"),
        ((torch.sin, torch.sin), {"slots": "x"}, TypeError, "slots must be a number of states"),
        ((torch.sin, torch.sin), {"slots": 2, "outputs": 0}, TypeError, "outputs must be True or False"),
    ],
)
def test_bad_input_of_a_loop(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        recollect.while_loop(*arguments, torch.ones(3), **options)


def test_errors_in_a_loop_leave_nothing_behind():
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            x = torch.ones(3, requires_grad=True)
            with pytest.raises(ZeroDivisionError):
                recollect.while_loop(lambda state: 1 / (4 - state[1]), advance, (x, 0), slots=2)
        del x
        assert live.now == 0
    finally:
        gc.enable()


# --- Budgets ---


def layers(count=24):
    torch.manual_seed(0)
    widths = [8 * (1 + place % 5) for place in range(count + 1)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Dropout(0.1)) for a, b in pairwise(widths)))


def smallest(functions, x, **options):
    with pytest.raises(ValueError, match=r"a budget of 1 B is too small for the chain.*\(\d+ bytes\)") as caught:
        recollect.sequential(functions, x, budget=1, **options)
    return caught.value.smallest


def peak_of(work, weights):
    for weight in weights:
        weight.grad = None
    gc.collect()
    with LiveBytes() as live:
        work()
    for weight in weights:
        weight.grad = None
    return live.peak


def test_a_budget_holds_and_more_of_it_is_faster():
    model = layers()
    x = torch.randn(256, 8, requires_grad=True)
    weights = [x, *model.parameters()]
    of_weights = sum(weight.nbytes for weight in weights)
    torch.manual_seed(1)
    wanted = grads_of(model(x).square().sum(), weights)
    plain_peak = peak_of(lambda: model(x).square().sum().backward(), weights)
    least = smallest(model, x)
    assert least < plain_peak / 3
    runs = []
    for module in model:
        module.register_forward_hook(lambda *_: runs.append(1))
    counts = []
    for budget in (least, int(least * 1.3), least * 2, plain_peak * 2):
        torch.manual_seed(1)
        recollect.sequential(model, x, budget=budget).square().sum().backward()  # learns
        runs.clear()
        torch.manual_seed(1)
        y = recollect.sequential(model, x, budget=budget)
        assert same(grads_of(y.square().sum(), weights), wanted)
        counts.append(len(runs))
        peak = peak_of(lambda budget=budget: recollect.sequential(model, x, budget=budget).sum().backward(), weights)
        assert peak <= budget + of_weights + 3 * 256 * 8 * 4  # the loss, and what is the program's
    assert counts[0] > counts[1] > counts[-1]
    assert counts[-1] == len(model)


@pytest.mark.parametrize("length", [2, 8])
def test_what_the_gradients_of_weights_take_on_the_way_is_in_a_budget(length):
    weight, x = torch.ones(64, requires_grad=True), torch.randn(128, 64, requires_grad=True)
    step = lambda x: x.sin() + weight.expand(8, 128, 64).exp().sum(0)  # noqa: E731
    least = smallest(step, x, length=length)
    run = lambda: recollect.sequential(step, x, length=length, budget=least).sum().backward()  # noqa: E731
    run()  # learns
    assert peak_of(run, [x, weight]) <= least + weight.nbytes


def test_weights_with_a_history_count_alike():
    leaf, x = torch.ones(64, requires_grad=True), torch.randn(128, 64, requires_grad=True)
    weight = leaf * 1
    steps = [  # two functions: what one takes is known then
        lambda x: x.sin() + weight.expand(8, 128, 64).exp().sum(0),
        lambda x: x.sin() + leaf.expand(8, 128, 64).exp().sum(0),
    ]
    first, second = (smallest(step, x, length=8) for step in steps)
    assert first == second


def test_gradients_of_a_weight_of_several_steps_are_summed_within_a_budget():
    weight, x = torch.randn(256, 256, requires_grad=True), torch.randn(16, 256, requires_grad=True)
    step = lambda x: (x @ weight).sin()  # noqa: E731
    least = smallest(step, x, length=8)
    run = lambda: recollect.sequential(step, x, length=8, budget=least).sum().backward()  # noqa: E731
    run()  # learns
    assert peak_of(run, [x, weight]) <= least + weight.nbytes + x.nbytes + 64  # the sum, and what is the program's


def test_sparse_gradients_within_a_budget():
    torch.manual_seed(0)
    words, index = nn.Embedding(100, 16, sparse=True), torch.randint(0, 100, (64,))
    x = torch.randn(64, 16, requires_grad=True)
    recollect.sequential(lambda x: (x + words(index)).sin(), x, length=10, budget=100_000).sum().backward()
    got, words.weight.grad = words.weight.grad.to_dense(), None
    plain(lambda x: (x + words(index)).sin(), x, 10).sum().backward()
    assert torch.allclose(got, words.weight.grad.to_dense())


def test_measuring_what_is_known_puts_back_what_steps_change_outside():
    def count_of(rows, **options):
        count = torch.zeros(())

        def step(state):
            count.add_(1)
            return state.sin() * (2 + 0 * count)

        recollect.sequential(step, torch.randn(rows, 8, requires_grad=True), length=6, **options).sum().backward()
        return count.item()

    assert count_of(4, slots=2) == 6
    assert count_of(5, budget=10**6) == 6  # the function is known by now, and changes another tensor


def test_a_budget_for_equal_steps():
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)

    def step(x):
        return layer(layer(x).tanh()).tanh()

    x = torch.randn(64, 16, requires_grad=True)
    for length, factors in ((50, (1, 3)), (500, (4, 8))):
        least = smallest(step, x, length=length)
        wanted = grads_of(plain(step, x, length).sum(), [x, *layer.parameters()])
        for budget in (*(factor * least for factor in factors), "1 GiB"):
            y = recollect.sequential(step, x, length=length, budget=budget)
            assert same(grads_of(y.sum(), [x, *layer.parameters()]), wanted)


def test_measuring_leaves_nothing_behind():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(5)))
    x = torch.randn(8, 4, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    smallest(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert same(list(model.state_dict().values()), list(before.values()))
    assert all(weight.grad is None for weight in model.parameters())
    wanted = grads_of(model(x).sum(), [x, *model.parameters()])
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    torch.set_rng_state(random)
    got = grads_of(recollect.sequential(model, x, budget="1 MiB").sum(), [x, *model.parameters()])
    assert same(got, wanted)
    assert same(list(model.state_dict().values()), list(after.values()))


def test_measuring_puts_back_what_steps_change_outside():
    total = torch.zeros(1)

    def step(x):
        total.add_(1)
        return (x * total.item()).sin()

    x = torch.ones(3, requires_grad=True)
    smallest(step, x, length=9)
    assert total == 0
    recollect.sequential(step, x, length=9, budget="1 MiB").sum().backward()
    assert total == 9


def test_more_different_steps_than_are_planned_one_by_one(monkeypatch):
    monkeypatch.setattr("recollect._chains.choice._DIFFERENT", 6)
    model = layers(20)
    x = torch.randn(256, 8, requires_grad=True)
    torch.manual_seed(1)
    wanted = grads_of(model(x).square().sum(), [x, *model.parameters()])
    least = smallest(model, x)
    for budget in (least, 2 * least, 3 * least, 10 * least):
        torch.manual_seed(1)
        y = recollect.sequential(model, x, budget=budget)
        assert same(grads_of(y.square().sum(), [x, *model.parameters()]), wanted)


def test_graphs_that_are_held_are_not_run_again():
    """A schedule that holds graphs on its way."""
    ran = []

    def step(state):
        ran.append(state[1])
        return advance(state)

    actions = [
        *(Keep(0), Forward(0, 2), Keep(2), Forward(2, 3, graph=True), Forward(3, 4, graph=True)),
        *(Backward(3), Backward(2), schedules.Drop(2), schedules.Restore(0), schedules.Drop(0)),
        *(Forward(0, 1, graph=True), Forward(1, 2, graph=True), Backward(1), Backward(0)),
    ]
    schedule = schedules.Schedule(actions=actions, length=4, slots=(2,))
    x = torch.ones(3, requires_grad=True)
    y, _ = recollect.sequential(step, (x, 0), length=4, schedule=schedule)
    for _ in range(2):
        got = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert same(got, torch.autograd.grad(plain(torch.sin, x, 4).sum(), x))
    assert ran == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1]


# --- Tiers ---


@pytest.mark.parametrize("bytes_per_second", [1e3, 1e15])
def test_states_on_disk(bytes_per_second, monkeypatch):
    monkeypatch.setattr("recollect._chains.choice._rates", lambda device, to: (bytes_per_second, bytes_per_second))
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)

    def step(state):
        h, i = state
        return layer(h).tanh(), i + 1

    x = torch.randn(512, 64, requires_grad=True)
    wanted = grads_of(plain(step, (x, 0), 40)[0].sum(), [x, *layer.parameters()])
    before = recollect.offload_stats()
    y, _ = recollect.sequential(step, (x, 0), length=40, tiers={"device": 1, "disk": 39}, determinism_check="none")
    assert same(grads_of(y.sum(), [x, *layer.parameters()]), wanted)
    after = recollect.offload_stats()
    written, read = after.bytes_out - before.bytes_out, after.bytes_in - before.bytes_in
    if bytes_per_second == 1e3:
        assert written == read == 0
    else:
        assert written > 20 * x.nbytes
        # What is needed back at once stays on the device besides, as earlier steps of the process may have shown.
        assert read + after.bytes_stayed - before.bytes_stayed >= written


def test_a_schedule_over_tiers():
    x = torch.ones(300_000, requires_grad=True)
    wanted = torch.autograd.grad(plain(torch.sin, x, 30).sum(), x)
    schedule = schedules.hrevolve(30, {"device": 2, "cpu": 2, "disk": 5}, write={"disk": 2}, read={"disk": 2})
    assert schedule.check().keeps[2] > 0
    before = recollect.offload_stats()
    y = recollect.sequential(torch.sin, x, length=30, schedule=schedule)
    assert same(torch.autograd.grad(y.sum(), x), wanted)
    assert recollect.offload_stats().bytes_out - before.bytes_out >= x.nbytes * (schedule.check().keeps[2] - 1)


def test_tiers_without_a_store_of_their_own():
    x = torch.ones(3, requires_grad=True)
    wanted = torch.autograd.grad(plain(torch.sin, x, 30).sum(), x)
    for tiers in ({"cpu": 3}, {"device": 2, "cpu": 4}, {"device": 4, "cpu": 0}):
        y = recollect.sequential(torch.sin, x, length=30, tiers=tiers)
        assert same(torch.autograd.grad(y.sum(), x), wanted)


def test_what_copies_to_a_tier_take_is_measured():
    from recollect._chains.choice import _rates

    out, back = _rates(torch.device("cpu"), "disk")
    assert 1e5 < out < 1e12
    assert 1e5 < back < 1e12
