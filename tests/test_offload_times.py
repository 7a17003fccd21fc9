"""Offloading on a device with a clock of its own: no step waits for a copy that had the time. See clockwork.py.

A model of 16 layers whose forward takes the device 90 ms; what a layer saves takes the link 33 ms each way. So the
first three layers leave during the forward, and come back while others go backward.
"""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clockwork
import recollect
from recollect import Offload, Recompute, Save, _problem
from recollect._stores import chosen, pool, store
from recollect._stores.courses import SPARE

LAYERS, WIDTH, TOKENS = 16, 32, 64
aten = torch.ops.aten


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
        self.mlp = Gated()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def saved_by_a_layer():
    layer, x = Layer(), torch.randn(TOKENS, WIDTH, requires_grad=True)
    sizes = {}

    def pack(tensor):
        memory = tensor.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    del y
    return sum(sizes.values()) - sum(one.nbytes for one in layer.parameters())


class Training:
    """Steps of a model on the device with a clock."""

    def __init__(self, monkeypatch, uneven):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        products, others = (self._forward_alone(*per) for per in ((1e-9, 0.0), (0.0, 1e-9)))
        rate = saved_by_a_layer() / 0.033
        self.link = clockwork.install(monkeypatch, rate, uneven)
        # Of 90 ms, 60 are for products.
        self.working = clockwork.Working(self.link, 1e-9 * 0.06 / products, 1e-9 * 0.03 / others)

    def _forward_alone(self, per_operation, per_byte):
        link = clockwork.Link(1.0)
        link.host = -1e9  # far ahead
        with clockwork.Working(link, per_operation, per_byte):
            self.model(self.x)
        return link.compute

    def step(self):
        """How long it takes, and how long of that the device waits for copies."""
        link = self.link
        self.model.zero_grad()
        link.synchronize()
        begin, waited = link.compute, link.waited
        self.working.pace = link.about_one() * link.pace
        with self.working:
            self.model(self.x).sum().backward()
        return link.compute - begin, link.waited - waited

    def waits(self, decisions, steps=20, warm_up=2):
        """Of each step once the first two have shown what steps are like, as parts of what they take without."""
        with recollect.apply(self.model, decisions):
            found = [self.step() for _ in range(steps)][warm_up:]
        return [waited / (took - waited) for took, waited in found]


away = Offload(min_bytes=0)
products = recollect.save_ops(aten.mm, calls=[0, 1])
DECISIONS = {
    "one layer": {"0": away},
    "two layers": {"0": away, "1": away},
    "two layers and a part of the third": {"0": away, "1": away, "2.mlp": away},
    "three layers": dict.fromkeys("012", away),
    "the third": {"2": away},
    "two layers, partly recomputed": dict.fromkeys("01", away) | {f"{n}.mlp": Recompute(policy=products) for n in "01"},
    "inputs": {"*": Recompute(inputs=away)},
    "inputs, and parts kept": {"*": Recompute(inputs=away), "*.attn": Save()},
}


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize("uneven", [0.0, 0.04], ids=["even", "uneven"])
def test_steps_wait_for_no_copy(monkeypatch, name, uneven):
    waits = Training(monkeypatch, uneven).waits(DECISIONS[name])
    assert max(waits) < 1e-3, waits
    assert recollect.offload_stats().bytes_out > 0


@pytest.mark.parametrize("name", ["one layer", "two layers", "inputs"])
def test_what_has_left_in_time_holds_no_memory_when_backward_begins(monkeypatch, name):
    """Though the host is ahead, and cannot see that it has left: that much is what plans count on."""
    training = Training(monkeypatch, 0.0)
    with recollect.apply(training.model, DECISIONS[name]):
        for _ in range(3):
            training.step()
        with training.working:
            loss = training.model(training.x).sum()
        (store,) = chosen._stores.values()
        in_flight = sum(flight.size for flight in store._flights._flying)
        loss.backward()
    last = 0 if name != "inputs" else training.x.nbytes  # of the last layer, which has had no time
    assert in_flight <= last


def test_what_the_device_waits_for_is_counted(monkeypatch):
    """Also where a change in place waits for a copy, behind others that are on their way."""
    link = clockwork.install(monkeypatch, rate=1e6)
    x = torch.randn(64, 64, requires_grad=True)
    for step in range(6):
        link.synchronize()
        waited, counted = link.waited, recollect.offload_stats().waited_seconds
        with recollect.offload(min_bytes=0):
            y = x
            for _ in range(4):
                y = (y * 1.5).sin()
                link.compute += 0.04
            changed = y * 1.5
            z = changed.sin()
            with torch.no_grad():
                changed.mul_(2)
            link.compute += 0.01
        link.compute += 0.2
        z.sum().backward()
        link.synchronize()
        if step:
            assert recollect.offload_stats().waited_seconds - counted == pytest.approx(link.waited - waited)
    assert link.waited > waited


def test_more_than_the_link_carries_is_waited_for(monkeypatch):
    """The clock itself: it would show a wait."""
    waits = Training(monkeypatch, 0.0).waits({"*": Offload(min_bytes=0, ahead=1)}, steps=4)
    assert min(waits) > 0.5, waits


@pytest.mark.parametrize("uneven", [0.0, 0.02], ids=["even", "uneven"])
def test_other_steps_in_between_make_no_step_wait(monkeypatch, uneven):
    """Also not the first after them, though all steps begin alike, and some pass by parts that copy nothing there."""
    training = Training(monkeypatch, uneven)
    names = ["two layers", "two layers and a part of the third", "one layer", "three layers"]
    for name in names:
        training.waits(DECISIONS[name], steps=3)
    luck = random.Random(0)
    for _ in range(6):
        luck.shuffle(names)
        for name in names:
            waits = training.waits(DECISIONS[name], steps=3, warm_up=0)
            assert max(waits) < 1e-3, (name, waits)


# --- Memory ---


class Watched(Training):
    """Notes what the store holds on the device when the forward of each layer is over, and before its backward."""

    def __init__(self, monkeypatch, uneven):
        super().__init__(monkeypatch, uneven)
        self.leaving, self.early = {}, {}

    def step(self):
        hooks = [layer.register_forward_hook(self._forward_is_over) for layer in self.model]
        took = super().step()
        for hook in hooks:
            hook.remove()
        return took

    def _forward_is_over(self, layer, args, result):
        number = [*self.model].index(layer)
        stores = [*chosen._stores.values()]
        self.leaving[number] = sum(flight.size for store in stores for flight in store._flights._flying)

        def backward(_):
            self.early[number + 1] = sum(store._ahead_bytes for store in stores)  # when the one after it is over

        result.register_hook(backward)

    def as_problem(self, decisions, link):
        blocks = []
        for number in range(LAYERS):
            out = saved_by_a_layer() if str(number) in decisions else 0
            choices = (_problem.Choice(0.0, 0), _problem.Choice(0.0, 0, out=out))
            blocks.append(_problem.Block(choices, forward_seconds=0.09 / LAYERS, backward_seconds=0.18 / LAYERS))
        return _problem.Problem(tuple(blocks), link=link)


@pytest.mark.parametrize("name", ["one layer", "two layers", "three layers", "the third"])
@pytest.mark.parametrize("uneven", [0.0, 0.02], ids=["even", "uneven"])
def test_plans_count_what_is_on_its_way(monkeypatch, name, uneven):
    training = Watched(monkeypatch, uneven)
    training.link.per_allocation = 0.03  # the first step shows copies that take long
    monkeypatch.setattr(pool, "_SMALLEST", 1)
    slow = training.link.rate * 0.92 / (1 + SPARE)
    problem = training.as_problem(DECISIONS[name], _problem.Link(slow, slow))
    leaving, back = _problem._on_the_way(problem, _problem.picked(problem, [1] * LAYERS))
    tensor = TOKENS * 4 * WIDTH * 4  # the largest: what is on its way in part is there as a whole
    with recollect.apply(training.model, DECISIONS[name]):
        for step in range(8):
            training.step()
            if step < 4:
                continue
            for number in range(LAYERS):
                assert training.leaving[number] <= leaving[number + 1] + tensor, (step, number)
            for number in range(1, LAYERS):
                most = max(back[number - 1] + problem.blocks[number - 1].choices[1].out, leaving[-1])
                assert training.early[number] <= most + tensor, (step, number)
    assert max(training.leaving.values()) > saved_by_a_layer() / 2
    assert max(training.early.values()) > saved_by_a_layer() / 4


def test_steps_hold_the_same_memory_though_they_take_other_times(monkeypatch):
    training = Watched(monkeypatch, 0.03)
    held = []
    with recollect.apply(training.model, DECISIONS["three layers"]):
        for _ in range(25):
            training.step()
            held.append((training.leaving, training.early))
            training.leaving, training.early = {}, {}
    assert all(one == held[5] for one in held[5:])


def test_a_course_that_is_kept_is_left_when_it_does_not_hold_any_more(monkeypatch):
    training = Training(monkeypatch, 0.0)
    with recollect.apply(training.model, DECISIONS["two layers"]):
        for _ in range(6):
            training.step()
        training.link.rate *= 0.8
        waits = [training.step()[1] for _ in range(6)]
    assert max(waits[:2]) > 1e-3
    assert max(waits[3:]) < 1e-3, waits


def test_first_steps_that_take_long_are_forgotten(monkeypatch):
    """The very first lets all copies wait. The next is a step of another kind, and the device is still cold."""
    training = Training(monkeypatch, 0.0)
    training.waits(DECISIONS["one layer"], steps=1, warm_up=0)
    waits = []
    with recollect.apply(training.model, DECISIONS["two layers"]):
        for pace in (5.0, 1.0, 1.0, 1.0, 1.0, 1.0):
            training.link.pace = pace
            waits.append(training.step()[1])
    assert max(waits[2:]) < 1e-3, waits


def test_the_quickest_of_the_first_steps_is_what_is_expected(monkeypatch):
    training = Training(monkeypatch, 0.0)
    waits = []
    with recollect.apply(training.model, DECISIONS["two layers"]):
        for pace in (1.0, 0.8, 1.0, 1.4, 0.85, 0.85, 0.85):
            training.link.pace = pace
            waits.append(training.step()[1])
    assert max(waits[3:]) < 1e-3, waits


@pytest.mark.parametrize("pace", [0.6, 3.0])
def test_one_step_that_is_unlike_the_others_changes_nothing(monkeypatch, pace):
    training = Watched(monkeypatch, 0.0)
    with recollect.apply(training.model, DECISIONS["three layers"]):
        for _ in range(6):
            training.step()
        before = training.leaving, training.early
        monkeypatch.setattr(training.link, "pace", pace)
        training.step()
        monkeypatch.setattr(training.link, "pace", 1.0)
        for _ in range(3):
            training.leaving, training.early = {}, {}
            assert training.step()[1] < 1e-3
            assert (training.leaving, training.early) == before


@pytest.mark.parametrize("others", [1, 2])
def test_a_course_is_left_too_if_steps_between_did_not_have_to_wait(monkeypatch, others):
    training = Training(monkeypatch, 0.0)
    waits = []
    with recollect.apply(training.model, DECISIONS["two layers"]):
        for step in range(30):
            training.link.pace = 0.75 if step >= 8 and step % (1 + others) == 0 else 1.0
            waits.append(training.step()[1])
    assert max(waits[8:]) > 5e-3
    assert max(waits[20:]) < 1e-3, waits


def test_a_step_that_is_short_is_not_forgiven_what_a_long_one_is(monkeypatch):
    link = clockwork.install(monkeypatch, rate=100e6)
    x = torch.randn(1024, requires_grad=True)
    waits = []
    for step in range(16):
        link.synchronize()
        before, seconds = link.waited, 20e-6 if step < 6 else 12e-6
        y = x
        with recollect.offload(min_bytes=0):
            for _ in range(20):
                y = y.sin()
                link.compute += seconds
                y.register_hook(lambda _, seconds=seconds: setattr(link, "compute", link.compute + 2 * seconds))
        y.sum().backward()
        waits.append(link.waited - before)
    assert max(waits[6:]) > 3e-4
    assert max(waits[10:]) < 1e-4, waits


@pytest.mark.parametrize("part", [1, 10, 15])
def test_a_backward_that_goes_a_part_of_the_way_says_nothing_of_the_rest(monkeypatch, part):
    link = clockwork.install(monkeypatch, rate=2e6)
    x = torch.randn(1024, requires_grad=True)
    waits = []
    for step in range(16):
        link.synchronize()
        before, y, between = link.waited, x, []
        with recollect.offload(min_bytes=0):
            for _ in range(20):
                y = y.sin()
                link.compute += 1e-3
                y.register_hook(lambda _: setattr(link, "compute", link.compute + 2e-3))
                between.append(y)
        if step % 2:
            torch.autograd.grad(y.sum(), between[part])
        else:
            y.sum().backward()
        del y, between
        waits.append(link.waited - before)
    assert max(waits[4:]) < 1e-4, waits


@pytest.mark.parametrize("is_ahead", [True, False], ids=["the host is ahead", "the host waits"])
def test_forwards_without_a_backward_keep_nothing_from_being_learnt(monkeypatch, is_ahead):
    training = Watched(monkeypatch, 0.0)
    waits = []
    with recollect.apply(training.model, DECISIONS["two layers"]):
        for step in range(20):
            if step == 10:
                training.link.rate *= 0.7
            waits.append(training.step()[1])
            if 4 < step < 10:
                assert training.leaving[LAYERS - 1] == 0
            if not is_ahead:
                training.link.synchronize()
            with training.working:
                training.model(training.x).sum()
    assert max(waits[10:]) > 1e-3
    assert max(waits[14:]) < 1e-3, waits


def test_a_host_that_is_more_than_a_step_ahead_learns_too(monkeypatch):
    training = Watched(monkeypatch, 0.0)
    link = training.link
    with recollect.apply(training.model, DECISIONS["two layers"]):
        monkeypatch.setattr(link, "synchronize", lambda: setattr(link, "host", max(link.host, link.compute - 0.4)))
        for _ in range(16):
            training.step()
    assert training.leaving[LAYERS - 1] == 0


def test_a_copy_of_a_model_takes_the_course_that_is_known(monkeypatch):
    training = Watched(monkeypatch, 0.0)
    original, models = training.model, []
    for step in range(8):
        training.model = copy.deepcopy(original)
        models.append(training.model)  # so that none has the address of another
        recollect.apply(training.model, DECISIONS["two layers"])
        waited = training.step()[1]
        if step > 1:
            assert waited < 1e-3
            assert training.leaving[LAYERS - 1] == 0


def test_long_steps_of_several_kinds_are_all_learnt(monkeypatch):
    link = clockwork.install(monkeypatch, rate=1e12)
    monkeypatch.setattr(store, "_LARGE", 10)
    x = torch.randn(8, requires_grad=True)
    for _ in range(4):
        for length in (21, 22):
            link.synchronize()
            with recollect.offload(min_bytes=0):
                y = x
                for _ in range(length):
                    y = y.sin()
            y.sum().backward()
            del y
    (one,) = chosen._stores.values()
    assert {len(course.signs) for course in one._courses} >= {20, 21}
