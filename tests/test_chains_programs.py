"""Chains: programs for which they were wrong once."""

import random
import threading

import pytest
import torch
from torch import nn

import recollect
from chains import grads_of, plain, same
from recollect import CheckpointError
from recollect.schedules import Backward, Drop, Forward, Keep, Restore, Schedule, ScheduleError
from tools import LiveBytes


def both(make, length=6, slots=2, first=lambda state: state):
    """What a program leaves with the plain chain and with ours: gradients, then buffers."""
    found = []
    for chain in (plain, lambda *given: recollect.sequential(*given[:2], length=given[2], slots=slots)):
        torch.manual_seed(0)
        step, state, module = make()
        loss = first(chain(step, state, length)).square().sum()
        grads = grads_of(loss, list(module.parameters()))
        found.append([loss.detach(), *grads, *(buffer.clone() for buffer in module.buffers())])
    return found


# --- What steps change outside, and not from the first one on ---


@pytest.mark.parametrize("kind", ["batch norm", "without weights", "spectral norm"])
def test_another_layer_with_buffers_in_every_step(kind):
    def layer():
        if kind == "spectral norm":
            return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=kind == "batch norm"))

    def make():
        layers = nn.ModuleList([layer() for _ in range(6)])
        return (lambda state: (layers[state[1]](state[0]), state[1] + 1)), (torch.randn(8, 4), 0), layers

    for _ in range(2):
        assert same(*both(make, first=lambda state: state[0]))


def test_batch_norm_from_the_third_step_on():
    def make():
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))

        def step(state):
            h, i = state
            h = module[0](h)
            return (module[1](h) if i >= 2 else h), i + 1

        return step, (torch.randn(8, 4), 0), module

    assert same(*both(make, first=lambda state: state[0]))


def counting(weight):
    count = torch.zeros(3)

    def step(h):
        count.add_(1)
        return (h * weight * count.clone()).sin()

    return step, count


def test_a_closure_made_anew_changes_other_tensors():
    weight = torch.rand(3, requires_grad=True)
    for _ in range(3):
        wanted = grads_of(plain(counting(weight)[0], torch.ones(3), 6).sum(), [weight])
        step, count = counting(weight)
        assert same(grads_of(recollect.sequential(step, torch.ones(3), length=6, slots=2).sum(), [weight]), wanted)
        assert count[0] == 6


@pytest.mark.parametrize("check", ["none", "first"])
def test_a_tensor_that_only_later_steps_change(check):
    weight, count, seen = torch.rand(3, requires_grad=True), torch.zeros(3), torch.zeros(6)

    def step(state, *, reads):
        h, i = state
        if i >= 2:
            count.add_(1)
            seen[i] = h.detach().sum()
        return (h * weight * (1 + count if reads else 1)).sin(), i + 1

    def run(reads):
        return recollect.sequential(
            lambda state: step(state, reads=reads), (torch.ones(3), 0), length=6, slots=2, determinism_check=check
        )[0]

    y = run(reads=False)
    then = seen.clone()
    y.sum().backward()
    assert count[0] == 4
    assert torch.equal(seen, then)
    y = run(reads=True)
    with pytest.raises(CheckpointError, match=r"differ|change it in place, not from the first one on"):
        y.sum().backward()


# --- Steps that are not the same twice ---


def test_the_first_comparison_also_with_one_slot():
    weight = torch.rand(3, requires_grad=True)

    def step(h):
        return h * weight * random.random()

    def loop():
        return recollect.while_loop(
            lambda state: state[1] < 5, lambda state: (step(state[0]), state[1] + 1), (torch.ones(3), 0), slots=1
        )[0]

    for chain in (lambda: recollect.sequential(step, torch.ones(3), length=5, slots=1), loop):
        for _ in range(2):
            y = chain()
            with pytest.raises(CheckpointError, match="Recomputed values differ"):
                y.sum().backward()


# --- Tensors from outside ---


def test_a_history_that_only_a_pass_comes_by():
    """Made by the first step, and read by later ones: its gradient would go past whoever asks for it."""

    class Lazy:
        def __init__(self):
            self.weight = torch.rand(3, requires_grad=True)
            self.shifted = None

        def step(self, state):
            h, i = state
            if self.shifted is None:
                self.shifted = self.weight + 1
            return (h * self.shifted).sin(), i + 1

    lazy = Lazy()
    x = torch.ones(3, requires_grad=True)
    y, _ = recollect.while_loop(lambda state: state[1] < 6, lazy.step, (x, 0), slots=2)
    with pytest.raises(CheckpointError, match="has a history"):
        torch.autograd.grad(y.sum() + lazy.shifted.sum(), [lazy.shifted, lazy.weight])


def test_weights_that_are_computed_once():
    def make():
        layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        return (lambda h: layer(h).sin()), torch.randn(2, 4), layer

    with nn.utils.parametrize.cached():
        assert same(*both(make))


def test_a_leaf_in_slots_that_one_step_reads():
    class Holder:
        __slots__ = ("weight",)

    holder = Holder()
    holder.weight = torch.rand(3, requires_grad=True)

    def step(state):
        h, i = state
        return (h * holder.weight if i == 3 else h * 2), i + 1

    y, _ = recollect.sequential(step, (torch.ones(3), 0), length=6, slots=2)
    y.sum().backward()
    assert torch.equal(holder.weight.grad, torch.full((3,), 32.0))


def test_sparse_gradients():
    table = nn.Embedding(10, 4, sparse=True)
    places = torch.tensor([1, 2, 2])

    def step(h):
        return (h + table(places)).sin()

    (wanted,) = grads_of(plain(step, torch.zeros(3, 4), 6).sum(), [table.weight])
    (got,) = grads_of(recollect.sequential(step, torch.zeros(3, 4), length=6, slots=2).sum(), [table.weight])
    assert got.is_sparse
    assert torch.equal(got.to_dense(), wanted.to_dense())


def test_weights_that_are_frozen_before_backward():
    def grads(chain):
        weight, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        y = chain(lambda h: (h * weight).sin(), x)
        weight.requires_grad_(False)
        y.sum().backward()
        return [weight.grad, x.grad]

    got = grads(lambda step, x: recollect.sequential(step, x, length=6, slots=2))
    assert same(got, grads(lambda step, x: plain(step, x, 6)))


def test_a_first_state_from_inference_mode():
    with torch.inference_mode():
        x = torch.ones(3)
    weight = torch.rand(3, requires_grad=True)

    def step(h):
        return (h + weight).sin()

    wanted = grads_of(plain(step, x, 6).sum(), [weight])
    assert same(grads_of(recollect.sequential(step, x, length=6, slots=2).sum(), [weight]), wanted)


# --- Modes ---


@pytest.mark.parametrize("is_frozen", [False, True])
def test_attention_takes_the_path_that_it_takes_in_a_plain_chain(is_frozen):
    def make():
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        last = nn.Linear(8, 8)
        layer.requires_grad_(not is_frozen)
        module = nn.ModuleList([layer, last])

        def step(state):
            h, i = state
            return (layer(h) if i < 4 else last(h)), i + 1

        return step, (torch.randn(2, 3, 8), 0), module

    assert same(*both(make, first=lambda state: state[0]))
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_switch_for_fast_paths_is_put_back_after_threads():
    layer = nn.Linear(3, 3)

    def train():
        for _ in range(10):
            recollect.sequential(lambda h: layer(h).tanh(), torch.ones(1, 3), length=40, slots=3).sum().backward()

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.mha.get_fastpath_enabled()


def test_steps_that_turn_grad_mode_on_do_not_make_one_long_graph():
    weight = torch.rand(1000, requires_grad=True)

    @torch.enable_grad()
    def step(h):
        return (h * weight).sin(), h.sum()

    peaks = []
    for length in (50, 400):
        with LiveBytes() as live:
            y, outputs = recollect.sequential(step, torch.ones(1000), length=length, slots=3, outputs=True)
            (y.sum() + sum(outputs)).backward()
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] + 350 * 200  # an output of 4 bytes per step, and not a state of 4,000


def test_forward_mode():
    weight = torch.rand(3, requires_grad=True)

    def step(h):
        return (h * weight).sin()

    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(RuntimeError, match="forward-mode"):
            recollect.sequential(step, x, length=6, slots=2)
        with pytest.raises(RuntimeError, match="forward-mode"):
            recollect.while_loop(lambda h: True, step, x, slots=2)
        with torch.no_grad():
            y = recollect.sequential(step, x, length=6, slots=2)
            wanted = plain(step, x, 6)
        unpack = torch.autograd.forward_ad.unpack_dual
        assert torch.equal(unpack(y).tangent, unpack(wanted).tangent)


# --- Arguments ---


def test_a_sequential_with_a_forward_of_its_own():
    class Scaled(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 100

    scaled = Scaled(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.randn(1, 2)
    with pytest.raises(TypeError, match=r"a forward of its own, Scaled.*list\(functions\)"):
        recollect.sequential(scaled, x, slots=1)
    assert torch.equal(recollect.sequential(scaled, x, length=2, slots=1), scaled(scaled(x)))
    assert torch.equal(recollect.sequential(list(scaled), x, slots=1) * 100, scaled(x))


def test_a_schedule_that_goes_back_before_the_end():
    actions = [
        *(Keep(0), Forward(0, 1), Restore(0), Forward(0, 1), Forward(1, 2, graph=True)),
        *(Backward(1), Restore(0), Drop(0), Backward(0)),
    ]
    schedule = Schedule(actions=actions, length=2, slots=(1,))
    schedule.check()
    with pytest.raises(ScheduleError, match="before the last state is reached"):
        recollect.sequential(torch.sin, torch.ones(3), length=2, schedule=schedule)


def test_functions_by_name():
    with pytest.raises(TypeError, match="a list of functions"):
        recollect.sequential({"sin": torch.sin}, torch.ones(3), slots=1)


def test_a_budget_for_states_with_sparse_tensors():
    weight, eye = torch.rand(3, 3, requires_grad=True), torch.eye(3).to_sparse()

    def step(state):
        h, matrix = state
        return (matrix @ h * weight).sin(), matrix

    wanted = grads_of(plain(step, (torch.ones(3, 3), eye), 6)[0].sum(), [weight])
    y, _ = recollect.sequential(step, (torch.ones(3, 3), eye), length=6, budget="10 kB")
    assert same(grads_of(y.sum(), [weight]), wanted)


def test_measuring_steps_that_change_their_state():
    weight, count = torch.rand(3, requires_grad=True), torch.zeros(3)

    def step(state):
        h, n = state
        n.add_(1)
        return (h * weight * n.clone()).sin(), n

    with pytest.raises(CheckpointError, match=r"step 0 .* changes the state that it is given in place"):
        recollect.sequential(step, (torch.ones(3), count), length=6, budget="1 GiB")
