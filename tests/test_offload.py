"""Offloading: what leaves, what stays, that it comes back right, and what is left behind. See lazy_link.py."""

import contextlib
import copy
import errno
import gc
import os
import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import clockwork
import lazy_link
import recollect
from recollect import CheckpointError, Offload, Recompute, Save, by_name, offload_ops
from recollect._stores import chosen, courses, media
from recollect._stores import store as store_module
from recollect._stores.pool import Pool
from recollect._stores.ranges import Ranges
from recollect._torch import StorageReference, top_hooks

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("lazy")


@pytest.fixture
def lazy(monkeypatch):
    return lazy_link.install(monkeypatch)


def everything(**options):
    return recollect.offload(**{"min_bytes": 0, **options})


def stores():
    return list(chosen._stores.values())


def gradients(forward, leaves, around=contextlib.nullcontext, seed=3):
    torch.manual_seed(seed)
    with around():
        loss = forward().square().sum()
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def assert_as_plain(forward, leaves, around=everything, plain=None, steps=8):
    expected = gradients(plain or forward, leaves)
    for _ in range(steps):
        for got, wanted in zip(gradients(forward, leaves, around), expected, strict=True):
            assert (got is None and wanted is None) or torch.equal(got, wanted)


others = []  # stores of other tests in this process, which are theirs to look at


@pytest.fixture(scope="module", autouse=True)
def _only_stores_of_this_file():
    others[:] = stores()
    yield
    others.clear()


def assert_nothing_is_left():
    gc.collect()
    for store in [one for one in stores() if one not in others]:
        with store._lock:
            store._bury()
        assert store._alive == 0
        assert store._ahead_bytes == 0
        assert store.medium.pool.used == 0
        assert not store._copies


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert_nothing_is_left()


class Attention(nn.Module):
    def __init__(self, width=16, heads=2, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("scale", torch.randn(1, 6, width))

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.dropout(self.proj(attended) * self.scale, self.dropout)


class Block(nn.Module):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.attn = Attention(width, dropout=dropout)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(self.norm(x))


def transformer(layers=4, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout=dropout) for _ in range(layers)))


@pytest.fixture
def x():
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def leaves_of(model, *inputs):
    return [*inputs, *model.parameters()]


# --- Right ---


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("chance", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("options", [{}, {"in_flight": 0, "ahead": 0}, {"in_flight": 4000, "ahead": 9000}], ids=str)
def test_gradients_are_the_same(lazy, x, dropout, chance, options):
    lazy.chance = chance
    model = transformer(dropout=dropout)
    assert_as_plain(lambda: model(x), leaves_of(model, x), lambda: everything(**options))
    stats = recollect.offload_stats()
    assert stats.bytes_out > 0
    assert stats.bytes_in + stats.bytes_stayed > 0


REGIONS = {
    "around regions": lambda model, x: model(x),
    "a region around": lambda model, x: recollect.checkpoint(model, x),
    "regions in a region": lambda model, x: recollect.checkpoint(
        lambda x: recollect.checkpoint(model[2:], recollect.checkpoint(model[:2], x)), x
    ),
}


@pytest.mark.parametrize("shape", REGIONS)
def test_around_regions(x, shape):
    model = transformer(dropout=0.2)
    if shape == "around regions":
        recollect.apply(model, {"*": Recompute()})
    plain = copy.deepcopy(model)
    recollect.unapply(plain)
    got = [gradients(lambda: REGIONS[shape](model, x), leaves_of(model, x), everything) for _ in range(4)]
    for one in got:
        for mine, wanted in zip(one, gradients(lambda: plain(x), leaves_of(plain, x)), strict=True):
            assert torch.equal(mine, wanted)


def test_inside_of_a_region_it_keeps_what_would_be_recomputed_and_replays_put_nothing(x):
    w = torch.randn(16, 16, requires_grad=True)

    def function(x):
        with everything():
            x = (x @ w).exp().sin()
        return x.cos().exp()

    assert_as_plain(lambda: recollect.checkpoint(function, x), [x, w], contextlib.nullcontext, lambda: function(x))
    before = recollect.offload_stats().bytes_out
    y = recollect.checkpoint(function, x)
    put = recollect.offload_stats().bytes_out - before
    assert put > 0
    y.sum().backward()
    assert recollect.offload_stats().bytes_out - before == put


DECISIONS = {
    "modules": {"*": Offload(min_bytes=0)},
    "the first": {"0": Offload(min_bytes=0), "1": Offload(min_bytes=0)},
    "inputs": {"*": Recompute(inputs=Offload(min_bytes=0))},
    "inputs of one": {"1": Recompute(inputs=Offload(min_bytes=0)), "2": Recompute()},
    "parts of regions": {"*": Recompute(), "*.attn": Offload(min_bytes=0)},
    "operators": {"*": Recompute(policy=offload_ops(aten.addmm, aten.mm))},
    "parts of parts": {"*": Offload(min_bytes=0), "*.mlp": Recompute(inputs=Offload(min_bytes=0))},
}


@pytest.mark.parametrize("decisions", DECISIONS)
def test_decisions(x, decisions):
    model = transformer(dropout=0.2)
    plain = copy.deepcopy(model)
    recollect.apply(model, DECISIONS[decisions])
    for _ in range(6):
        got = gradients(lambda: model(x), leaves_of(model, x))
        for mine, wanted in zip(got, gradients(lambda: plain(x), leaves_of(plain, x)), strict=True):
            assert torch.equal(mine, wanted)
    if decisions != "operators":  # whose results are smaller than what is worth it
        assert recollect.offload_stats().bytes_out > 0


def test_named_regions_and_operators_that_are_offloaded(x):
    model = transformer(layers=1)

    def function(x):
        return model[0].mlp(recollect.region("attn", model[0].attn)(x)).exp()

    for policy in (
        by_name({"attn": Offload(min_bytes=0)}),
        lambda op, ctx: Offload(min_bytes=0) if op is aten.addmm.default else None,
    ):
        before = recollect.offload_stats().bytes_out
        assert_as_plain(
            lambda policy=policy: recollect.checkpoint(function, x, policy=policy),
            leaves_of(model, x)[:1],
            contextlib.nullcontext,
            lambda: function(x),
        )
        assert recollect.offload_stats().bytes_out > before


def test_only_the_input_of_a_layer_is_left_and_it_is_on_the_host(x):
    layer = recollect.remat(lambda x: x.sin().exp().sin(), inputs=Offload(min_bytes=0))
    h = x * 2
    y = layer(h).sum()
    assert recollect.offload_stats().bytes_out == h.nbytes
    y.backward()
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sin().sum(), x)
    assert torch.equal(x.grad, expected)


def test_retained_graphs(x):
    model = transformer(layers=2)
    leaves = leaves_of(model, x)
    expected = gradients(lambda: model(x), leaves)
    for _ in range(4):
        with everything():
            loss = model(x).square().sum()
        for keep in (True, True, False):
            for got, wanted in zip(torch.autograd.grad(loss, leaves, retain_graph=keep), expected, strict=True):
                assert torch.equal(got, wanted)


def test_partial_backwards_of_all_kinds(x):
    model = transformer(layers=3)
    leaves = leaves_of(model, x)
    expected = gradients(lambda: model(x), leaves)
    for _ in range(4):
        with everything():
            loss = model(x).square().sum()
        (last,) = torch.autograd.grad(loss, [leaves[-1]], retain_graph=True)
        assert torch.equal(last, expected[-1])
        torch.autograd.grad(loss, [model[1].norm.weight], retain_graph=True)
        for got, wanted in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
            assert torch.equal(got, wanted)


def test_second_derivatives(x):
    def twice(around):
        with around():
            y = (x.sin() * x.exp()).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    for _ in range(3):
        assert torch.equal(twice(everything), twice(contextlib.nullcontext))


def test_a_graph_that_dies_and_errors_in_the_middle_leave_nothing(x):
    model = transformer(layers=2)
    for _ in range(3):
        with everything():
            model(x)
        with contextlib.suppress(ZeroDivisionError), everything():
            model(x)
            raise ZeroDivisionError
        with everything():
            y = model(x) * 1
        y.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        del y
        assert_nothing_is_left()
    assert_as_plain(lambda: model(x), leaves_of(model, x))


def test_a_copy_that_cannot_be_begun_leaves_nothing(lazy, x, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    model = transformer(layers=1)
    with monkeypatch.context() as patch, everything():
        patch.setattr(lazy, "copy_out", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert_nothing_is_left()
    assert_as_plain(lambda: model(x), leaves_of(model, x), steps=3)


def test_micro_batches_between_each_other(x):
    model = transformer(layers=3)
    leaves = leaves_of(model, x)
    expected = gradients(lambda: model(x), leaves)
    for _ in range(5):
        losses = []
        for step in range(4):
            with everything(ahead=5000):
                losses.append(model(x).square().sum())
            if step >= 2:
                for got, wanted in zip(torch.autograd.grad(losses.pop(0), leaves), expected, strict=True):
                    assert torch.equal(got, wanted)
        for loss in losses:
            for got, wanted in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
                assert torch.equal(got, wanted)


def test_threads_share_a_store(x):
    problems = []

    def train(seed):
        try:
            torch.manual_seed(seed)
            w = torch.randn(16, 16, requires_grad=True)
            expected = gradients(lambda: (x @ w).sin().exp(), [w])
            for _ in range(30):
                with everything(in_flight=3000, ahead=3000):
                    loss = (x @ w).sin().exp().square().sum()
                if not torch.equal(torch.autograd.grad(loss, [w])[0], expected[0]):
                    problems.append("differs")
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_pass_that_ends_in_another_thread_takes_nothing_from_who_is_about_to_use_it(monkeypatch):
    store = chosen.store_of(Offload(min_bytes=0))
    tensor = torch.randn(100)
    tickets = [store.put(tensor), store.put(tensor)]
    take = media._FromHost.take

    def take_late(incoming):
        store._pass_ended()
        return take(incoming)

    monkeypatch.setattr(media._FromHost, "take", take_late)
    for ticket in tickets:
        assert torch.equal(store.get(ticket), tensor)
    del ticket, tickets


# --- What leaves, and how often ---


def test_a_storage_that_is_saved_thrice_is_copied_once_and_its_views_are_views(x):
    w = torch.randn(16, 48, requires_grad=True)
    with everything():
        qkv = x @ w
        q, k, v = qkv.chunk(3, -1)
        parts = [part.exp() * part for part in (q, k, v)]
        y = sum(parts)
    copied = [x.nbytes * 0, qkv.nbytes, *(part.nbytes for part in parts)]  # a leaf that needs grad stays
    assert recollect.offload_stats().bytes_out == sum(copied)
    y.sum().backward()
    assert recollect.offload_stats().bytes_in == sum(copied)


def test_what_is_saved_changed_and_saved_again_is_two_copies(x):
    def forward(change):
        h = x.sin()
        a = h * h
        h = change(h)
        return (a + h * h).sum()

    def in_place(h):
        with torch.no_grad():
            return h.mul_(2)

    (expected,) = torch.autograd.grad(forward(lambda h: h + h.detach()), x)
    for step in range(5):
        with everything():
            y = forward(in_place)
        assert recollect.offload_stats().bytes_out == (step + 1) * 2 * x.nbytes
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def test_a_change_that_was_not_expected_is_an_error_and_works_the_next_time(lazy, x):
    lazy.chance = 0.0

    def step(change):
        with everything():
            h = x.sin()
            y = h * h
            if change:
                with torch.no_grad():
                    h.mul_(2)
        return torch.autograd.grad(y.sum(), x)[0]

    expected = step(change=False)
    step(change=False)
    with pytest.raises(
        CheckpointError, match=r"modified by an inplace operation.*was changed before its copy was done"
    ):
        step(change=True)
    for _ in range(4):
        assert torch.equal(step(change=True), expected)


@pytest.mark.parametrize("retain", [False, True])
def test_an_operators_result_that_is_changed_afterwards_is_served_as_it_was(x, retain):
    def function(x):
        return x.clone().mul_(x).sin()

    def run(call):
        y = call(x.sin()).sin().sum()
        return [torch.autograd.grad(y, x, retain_graph=retain)[0] for _ in range(1 + retain)]

    expected = run(function)
    policy = lambda op, ctx: Offload(min_bytes=0) if op is aten.clone.default else None  # noqa: E731
    for _ in range(4):
        for got, wanted in zip(run(lambda x: recollect.checkpoint(function, x, policy=policy)), expected, strict=True):
            assert torch.equal(got, wanted)
    assert recollect.offload_stats().bytes_out > 0


def test_a_change_of_an_operators_result_is_seen_inside_of_the_mode_that_keeps_it(lazy, x):
    lazy.chance = 0.0
    w = torch.randn(16, 16, requires_grad=True)

    def function(x):
        h = (x.flatten(0, 1) @ w).relu_()
        return (h @ w).sin_()

    def policy(op, ctx):
        return Offload(min_bytes=0) if op is aten.mm.default else None

    assert_as_plain(
        lambda: recollect.checkpoint(function, x, policy=policy), [x, w], contextlib.nullcontext, lambda: function(x)
    )


@pytest.mark.parametrize("around", [contextlib.nullcontext, everything])
def test_a_change_that_is_seen_to_come_waits_for_the_copy_in_any_step(lazy, x, around):
    lazy.chance = 0.0
    w = torch.randn(16, 16, requires_grad=True)

    def step(change):
        def function(x):
            h = x.flatten(0, 1) @ w
            return (change(h[:4]) * 2 + h[4:8]).sin()

        region = lambda: recollect.checkpoint(function, x, policy=policy)  # noqa: E731
        assert_as_plain(region, [x, w], around, lambda: function(x), steps=1)

    def policy(op, ctx):
        return Offload(min_bytes=0) if op is aten.mm.default else None

    for _ in range(5):
        step(torch.relu)
    for change in (torch.relu_, torch.relu, torch.Tensor.sin_):
        step(change)


def test_an_output_that_is_changed_before_its_copy_is_done_is_computed_again(lazy, x):
    lazy.chance = 0.0
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
    plain = copy.deepcopy(model)
    recollect.apply(model, {"": Recompute(), "0": Offload(min_bytes=0)})
    for change in (False, False, True, True):
        for one in (model, plain):
            one[1].inplace = change
        expected = gradients(lambda: plain(x), leaves_of(plain, x))
        for got, wanted in zip(gradients(lambda: model(x), leaves_of(model, x)), expected, strict=True):
            assert torch.equal(got, wanted)
    assert recollect.offload_stats().bytes_out > 0


def test_a_kept_result_that_is_changed_out_of_the_blue_is_no_error(lazy, x):
    """The mode that keeps it sees the change, and lets it wait."""
    lazy.chance = 0.0
    changes = False

    def function(x):
        y = x.clone()
        return (y.mul_(x) if changes else y * x).sin()

    policy = lambda op, ctx: Offload(min_bytes=0) if op is aten.clone.default else None  # noqa: E731
    for step in range(6):
        changes = step in (2, 4)
        y = recollect.checkpoint(function, x.sin(), policy=policy).sum()
        assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(function(x.sin()).sum(), x)[0])


def test_a_change_that_was_a_surprise_once_is_expected_from_then_on(lazy, x):
    lazy.chance = 0.0

    def step(change, then):
        with everything():
            h = x.sin()
            y = h * h
            if change:
                with torch.no_grad():
                    h.mul_(2)
            for _ in range(then):
                y = y.sin()
        return torch.autograd.grad(y.sum(), x)[0]

    for _ in range(6):
        step(False, 1)
    with pytest.raises(CheckpointError, match="changed before its copy was done"):
        step(True, 2)  # not the course that it began like
    for _ in range(6):
        assert torch.equal(step(True, 2), step(False, 2))


def test_a_kept_product_does_not_wait_for_its_copy(lazy, x):
    """`F.linear` hands on a view of it that counts its changes apart, which is no change yet."""
    lazy.chance = 0.0
    layer = nn.Linear(16, 16, bias=False)
    in_flight = []
    for _ in range(3):
        y = recollect.checkpoint(lambda x: layer(x).sin(), x, policy=products_offloaded)
        in_flight.append(lazy.bytes_in_flight())
        y.sum().backward()
    assert in_flight == [0, x.nbytes, x.nbytes]  # in its first step a store waits for everything


def products_offloaded(op, ctx):
    return Offload(min_bytes=0) if op is aten.mm.default else None


def test_a_change_of_a_view_that_counts_apart_is_a_change_of_what_is_copied(lazy, x):
    """After the region, where no mode sees it."""
    lazy.chance = 0.0
    layer = nn.Linear(16, 16, bias=False)

    def step(change):
        def function(x):
            h = layer(x)
            return h.sin(), h

        y, h = recollect.checkpoint(function, x, policy=products_offloaded)
        if change:
            with torch.no_grad():
                h.mul_(2)
        return torch.autograd.grad(y.sum(), x)[0]

    expected = step(change=False)
    step(change=False)
    with pytest.raises(CheckpointError, match="was changed before its copy was done"):
        step(change=True)
    for _ in range(4):
        assert torch.equal(step(change=True), expected)


def test_what_was_changed_through_a_view_that_counts_apart_is_copied_anew():
    store = chosen.store_of(Offload(min_bytes=0))
    whole = torch.randn(16, 16).mul_(2)
    view = aten._unsafe_view(whole, [256])
    before = whole.clone()
    first = store.put(whole)
    store.also_watch(first, view)
    view.add_(1)
    second = store.put(whole)
    assert torch.equal(store.get(second), before + 1)
    assert second.copy is not first.copy


def test_of_many_views_that_count_apart_a_change_waits(lazy, x):
    """A recurrent net makes some in every time step, over one product."""
    lazy.chance = 0.0
    store = chosen.store_of(Offload(min_bytes=0))
    for step in range(3):
        whole = torch.randn(16, 16).mul_(2)
        ticket, before = store.put(whole), whole.clone()
        views = [aten._unsafe_view(whole, [256]) for _ in range(50)]
        for view in views:
            store.also_watch(ticket, view)
        assert len(ticket.copy.aliases) == store_module._WATCHED
        assert ticket.copy.held.left.query() or step == 0
        views[-1].add_(1)
        again = store.put(whole)
        assert torch.equal(store.get(again), before + 1)
        assert torch.equal(store.get(ticket), before)
        del ticket, again


class Serial(TorchFunctionMode):
    """A mode of the user's that takes a lock, and lets others run meanwhile."""

    lock = threading.RLock()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with self.lock:
            time.sleep(0)
            return func(*args, **(kwargs or {}))


class Square(torch.autograd.Function):
    """What it saves is packed outside of all torch functions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def test_no_code_of_the_users_runs_while_others_wait_for_the_store():
    def work():
        x = torch.randn(16, 16, requires_grad=True)
        for _ in range(40):
            with Serial(), everything():
                y = Square.apply(Square.apply(x * 1).tanh())
            y.sum().backward()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("is_used", [True, False])
def test_a_step_that_is_over_holds_no_memory_however_far_ahead_the_host_is(lazy, x, is_used):
    lazy.chance = 0.0  # no copy is seen to be done
    for _ in range(3):
        with everything(in_flight="1 GiB", ahead="1 GiB"):
            hidden = (x * 2).sin()
            source = StorageReference(hidden.untyped_storage())
            y = (hidden.exp() + 1).sum() if is_used else hidden.cos().sum()
            del hidden
        y.backward()
        del y
        assert source.expired()


@pytest.mark.parametrize("shape", ["around", "module", "in a region"])
def test_noise_that_is_saved_before_it_is_drawn(x, shape):
    model = nn.Sequential(nn.Linear(16, 16), nn.RReLU(), nn.Linear(16, 16), nn.RReLU())
    plain = copy.deepcopy(model)
    if shape != "around":
        offloaded = {"1": Offload(min_bytes=0), "3": Offload(min_bytes=0)}
        recollect.apply(model, offloaded if shape == "module" else {"": Recompute(), **offloaded})
    around = everything if shape == "around" else contextlib.nullcontext
    for _ in range(4):
        expected = gradients(lambda: plain(x), leaves_of(plain, x))
        for got, wanted in zip(gradients(lambda: model(x), leaves_of(model, x), around), expected, strict=True):
            assert torch.equal(got, wanted)


def test_what_is_never_copied():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))
            self.frozen = nn.Parameter(torch.randn(16, 16), requires_grad=False)
            self.register_buffer("table", torch.randn(32, 16))
            with torch.no_grad():  # as modules do; what was never written to could be memory that is yet to be
                for one in (self.weight, self.frozen, self.table):
                    one.mul_(2)

        def forward(self, x):
            return ((x * self.table[:16]) @ self.weight.t()) * self.frozen[0] * self.weight.detach()

    model = Model()
    x = torch.randn(16, 16, requires_grad=True)  # a leaf
    with everything():
        y = model(x).sum()
    assert recollect.offload_stats().bytes_out == x.nbytes  # the result of the first product
    y.backward()


def test_small_tensors_and_those_of_other_kinds_stay():
    x = torch.randn(300, requires_grad=True)
    for around in (lambda: recollect.offload(), lambda: recollect.offload(min_bytes="1.2 KB")):
        with around():
            y = x.sin().exp().sum()
        y.backward()
    assert recollect.offload_stats().bytes_out == x.nbytes  # 1,200 bytes, the result of exp
    a = torch.randn(4, 4).to_sparse().requires_grad_()
    with everything():
        y = torch.sparse.mm(a, torch.randn(4, 4, requires_grad=True)).sum()
    y.backward()


def test_what_outlives_a_step_unchanged_is_not_copied_again():
    mask, x = torch.randn(16, 16).mul_(2), torch.randn(16, 16, requires_grad=True)
    copied = []
    for _ in range(3):
        before = recollect.offload_stats().bytes_out
        with everything():
            y = (x.sin() * mask).sum()
        y.backward()
        copied.append((recollect.offload_stats().bytes_out - before) // mask.nbytes)
    assert copied == [1, 0, 0]


def test_what_outlives_a_step_and_is_changed_is_copied_again():
    mask, x = torch.randn(16, 16).mul_(2), torch.randn(16, 16, requires_grad=True)
    copied = []
    for _ in range(3):
        before = recollect.offload_stats().bytes_out
        mask.add_(1)
        with everything():
            y = (x.sin() * mask).sum()
        y.backward()
        copied.append((recollect.offload_stats().bytes_out - before) // mask.nbytes)
    assert copied == [1, 1, 1]


def test_without_room_it_stays_and_the_statistics_say_so(x):
    model = transformer()
    assert_as_plain(lambda: model(x), leaves_of(model, x), lambda: everything(max_host_bytes=500))
    stats = recollect.offload_stats()
    assert (stats.bytes_out, stats.pinned_bytes) == (0, 0)
    assert stats.bytes_kept > 0


def test_a_change_of_what_stayed_for_want_of_room_is_an_error(x):
    with everything(max_host_bytes=0):
        h = x.sin()
        y = h * h
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(CheckpointError, match=r"saved under recollect\.offload and that stayed where it was"):
        y.sum().backward()


def test_memory_of_the_host_is_used_again(x):
    model = transformer()
    options = {"in_flight": 2000, "ahead": 5000}
    gradients(lambda: model(x), leaves_of(model, x), lambda: everything(**options))
    allocations = recollect.offload_stats().pinned_allocations
    assert allocations == 1
    assert_as_plain(lambda: model(x), leaves_of(model, x), lambda: everything(**options), steps=20)
    assert recollect.offload_stats().pinned_allocations == allocations


def test_memory_of_the_host_that_is_still_read_is_not_overwritten(lazy):
    """What was asked for is on its way back when its copy dies, and another takes its place in the pool."""
    lazy.chance = 0.0
    store = chosen.store_of(Offload(min_bytes=0))
    for _ in range(3):
        first = store.put(torch.ones(1000))
        store.prefetch([first])
        incoming = first.copy.incoming
        del first
        second = store.put(torch.zeros(1000))
        lazy.hold_back(second.copy.held.left, lazy.current_stream())
        assert second.copy.held._block.memory.count_nonzero() == 0
        assert incoming.journey.arrived.time is not None  # it was read before it was overwritten
        del second, incoming


def test_what_is_asked_for_while_it_leaves_comes_back_when_it_has_left(lazy):
    lazy.chance = 0.0
    store = chosen.store_of(Offload(min_bytes=0, ahead=0))
    for size in (10, 1000, 2000):  # each a step of another kind
        tensor = torch.randn(size)
        ticket = store.put(tensor)
        assert torch.equal(store.get(ticket), tensor)
        del ticket


# --- Bounds ---


def test_no_more_is_on_its_way_out_than_may_be(lazy):
    lazy.chance = 0.0
    x = torch.randn(1000, requires_grad=True)
    most = 0
    for step in range(3):
        with everything(in_flight=5 * x.nbytes, ahead=0):
            y = x
            for _ in range(30):
                y = y.sin()
                most = max(most, lazy.bytes_in_flight())
        if step == 0:
            assert most <= x.nbytes  # the first step waits for each
        torch.autograd.grad(y.sum(), x)
    assert most == 5 * x.nbytes


def test_no_more_is_back_ahead_than_may_be(lazy):
    x = torch.randn(1000, requires_grad=True)
    for _ in range(3):
        with everything(ahead=4 * x.nbytes):
            y = x
            for _ in range(30):
                y = y.sin()
        (store,) = stores()
        most = []
        y.register_hook(lambda grad, most=most, store=store: most.append(store._ahead_bytes))
        z = y.sum()
        hooks = []
        node = y.grad_fn
        while node is not None and node.next_functions:
            hooks.append(node.register_prehook(lambda grads, most=most, store=store: most.append(store._ahead_bytes)))
            node = node.next_functions[0][0]
        torch.autograd.grad(z, x)
        assert 0 < max(most) <= 4 * x.nbytes
        del hooks, node, y, z


def test_from_the_second_step_on_everything_is_back_before_it_is_asked_for(x):
    model = transformer()
    recollect.apply(model, {"*": Recompute(), "*.attn": Offload(min_bytes=0)})
    hits = []
    for _ in range(4):
        before = recollect.offload_stats()
        gradients(lambda: model(x), leaves_of(model, x))
        after = recollect.offload_stats()
        hits.append((after.prefetch_hits - before.prefetch_hits, after.prefetch_misses - before.prefetch_misses))
    assert [misses for _, misses in hits[1:]] == [0, 0, 0]
    assert hits[-1][0] > 4
    assert recollect.offload_stats().hit_rate > 0.5


def test_a_step_of_another_kind_finds_its_own_course_again(x):
    models = [transformer(layers=2), transformer(layers=3)]
    for _ in range(6):
        for model in models:
            assert_as_plain(lambda model=model: model(x), leaves_of(model, x), steps=1)
    (store,) = stores()
    assert len(store._courses) == 2


def test_what_finds_no_memory_ahead_is_fetched_when_it_is_asked_for(lazy, x, monkeypatch):
    model = transformer(layers=2)
    expected = gradients(lambda: model(x), leaves_of(model, x))
    store = chosen.store_of(everything()._decision)
    empty, asking, is_ahead = lazy.empty, store._fetch_what_follows, []

    def ask_ahead(*args):
        is_ahead.append(True)
        asking(*args)
        is_ahead.clear()

    def no_memory(size):
        if is_ahead:
            raise torch.OutOfMemoryError("no memory")
        return empty(size)

    monkeypatch.setattr(lazy, "empty", no_memory)
    monkeypatch.setattr(store, "_fetch_what_follows", ask_ahead)
    for _ in range(3):
        for got, wanted in zip(gradients(lambda: model(x), leaves_of(model, x), everything), expected, strict=True):
            assert torch.equal(got, wanted)
    stats = recollect.offload_stats()
    assert stats.prefetch_misses > 0
    assert stats.bytes_in + stats.bytes_stayed >= stats.bytes_out


def test_several_devices_share_the_bounds_and_compare_no_times(lazy, monkeypatch):
    other = lazy_link.LazyLink(chance=0.0)
    lazy.chance = 0.0
    by_size = {1000: lazy, 2000: other}
    monkeypatch.setattr(lazy_link.Moment, "elapsed_time", _of_one_device(lazy_link.Moment.elapsed_time))
    store = chosen.store_of(Offload(min_bytes=0, in_flight=3000, ahead=3000))
    for _ in range(4):
        tensors = [torch.randn(size) for size in (1000, 2000) * 10]
        tickets = []
        for tensor in tensors:
            link = by_size[tensor.numel()]
            monkeypatch.setattr(store_module, "link_of", lambda _, link=link: link)
            tickets.append(store.put(tensor))
        for ticket, tensor in zip(reversed(tickets), reversed(tensors), strict=True):
            assert torch.equal(store.get(ticket), tensor)
        store.count_waits()
        del ticket, tickets


def _of_one_device(elapsed_time):
    def elapsed(self, later):
        assert self.link is later.link, "moments of two devices"
        return elapsed_time(self, later)

    return elapsed


# --- What is learnt ---


def test_nothing_is_learnt_before_all_streams_have_come_to_the_end(lazy):
    lazy.chance = 0.0
    memory = torch.zeros(8, dtype=torch.uint8)
    late = lazy.copy_out(memory, memory, [])
    past, reference = lazy.now(), None
    for left, asked in (([late, past], [past, past]), ([past, past], [late, past])):
        step = courses.Step(past, [])
        for place in range(2):
            step.add(reference, 8, past, left[place])
        for place in (1, 0):
            step.note_asking(place, asked[1 - place], None)
        assert not step.is_over()
    late.synchronize()
    assert step.is_over()
    assert step.learn(100, []) is not None


def test_what_is_asked_for_too_soon_stays():
    # Sizes of 10, each takes 2 ms; the first three are asked for at once, the others a long time later.
    stays = courses._too_soon([10] * 5, [0.0, 0.0, 1.0, 50.0, 60.0], [0.0] * 5, [2.0] * 5, ahead=100)
    assert stays == {0, 1, 2}
    assert courses._too_soon([10] * 5, [0.0, 0.0, 1.0, 50.0, 60.0], [0.0] * 5, [2.0] * 5, ahead=20) == {0, 1}
    # One that leaves late comes back late.
    assert courses._too_soon([10, 10], [0.0, 5.0], [0.0, 9.0], [2.0, 2.0], ahead=100) == {0, 1}
    assert courses._too_soon([0, 10], [0.0, 5.0], [3.0, 0.0], [0.0, 2.0], ahead=100) == set()


def test_when_to_begin_at_the_latest():
    spare = 1 + courses.SPARE
    begins = courses._latest_begins([0.0, 10.0, 11.0, 30.0], [1.0, 4.0, 4.0, 5.0], stays={0})
    assert begins[1:] == pytest.approx([11.0 - 8.0 * spare, 11.0 - 4.0 * spare, 30.0 - 5.0 * spare])


class At:
    """A moment at a time."""

    def __init__(self, time):
        self.time = time

    def elapsed_time(self, later):
        return later.time - self.time

    def query(self):
        return True

    def late_by(self, moment):
        return self.time - moment.time


def test_times_are_those_of_a_device_that_never_waits():
    clock = courses._Clock(At(0), [(At(10), At(15)), (At(20), At(18)), (At(30), At(40))])
    assert [clock.time_of(At(time)) for time in (0, 10, 16, 25, 40, 100)] == [0, 10, 11, 20, 25, 85]


def test_what_leaves_when():
    assert courses._leaving_times([0.0, 1.0, 2.0, 50.0], [100, 100, 0, 100], 10.0) == [10.0, 20.0, 2.0, 60.0]


def test_what_has_left_by_when():
    assert courses._gone_by([0.0, 5.0, 6.5, 90.0], [2.0, 5.4, 80.0]) == [-1, 0, 1, 2]


def test_marks_let_what_left_first_come_back_in_time(x):
    """Nothing is asked for while backward is in the layers that offload nothing."""
    model = transformer(layers=6)
    plain = copy.deepcopy(model)
    recollect.apply(model, {"0": Offload(min_bytes=0)})
    all_misses = []
    for _ in range(4):
        y = model(x)
        before = recollect.offload_stats()
        y.square().sum().backward()
        misses = recollect.offload_stats().prefetch_misses - before.prefetch_misses
        all_misses.append(misses)
        model.zero_grad()
        x.grad = None
    assert all_misses == [0, 0, 0, 0]  # in the first step nothing stays
    for got, wanted in zip(gradients(lambda: model(x), [x]), gradients(lambda: plain(x), [x]), strict=True):
        assert torch.equal(got, wanted)


def test_marks_come_and_go_with_decisions():
    model = transformer(layers=3)
    hooks = lambda: [len(one._forward_hooks) for one in model]  # noqa: E731
    handle = recollect.apply(model, {"0": Offload()})
    assert hooks() == [0, 1, 1]
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    handle.remove()
    assert hooks() == [0, 0, 0]
    for one in (twin, loaded):
        recollect.unapply(one)
        assert [len(part._forward_hooks) for part in one] == [0, 0, 0]
    with recollect.apply(model, {"1": Recompute(inputs=Offload())}):
        assert hooks() == [1, 0, 1]
    assert hooks() == [0, 0, 0]
    with recollect.apply(model, {"0": Save(), "1": Recompute()}):
        assert hooks() == [0, 0, 0]


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.down = nn.ModuleList(transformer(layers=2) for _ in range(2))
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
        self.up = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.never = nn.ModuleList()


def test_marks_are_made_at_every_level_and_within_containers():
    model = Unet()
    handle = recollect.apply(model, {"down.0.0.*": Offload(), "up.a": Recompute(inputs=Offload())})
    marked = [name for name, one in model.named_modules() if one._forward_hooks]
    others = ["down.0.1", "down.1.0", "down.1.1", "first", "middle.0", "middle.1.0", "middle.1.1", "up.b"]
    assert sorted(name for name in marked if not name.startswith("down.0.0")) == others
    handle.remove()
    assert not any(one._forward_hooks for one in model.modules())


def test_marks_of_several_handles_come_and_go_by_themselves():
    model = nn.Sequential(transformer(layers=2), transformer(layers=2), nn.Linear(4, 4))
    hooks = lambda: {name for name, one in model.named_modules() if one._forward_hooks}  # noqa: E731
    outer = recollect.apply(model, {"0": Offload()})
    marked = hooks()
    inner = recollect.apply(model[1], {"0": Recompute(inputs=Offload())})
    assert hooks() >= marked
    inner.remove()
    assert hooks() == marked
    inner = recollect.apply(model[1], {"0": Offload()})
    outer.remove()
    assert hooks() == {"1.1"}
    inner.remove()
    assert not hooks()


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)


def test_marks_are_left_where_hooks_can_be():
    model = nn.ModuleDict({"script": torch.jit.script(nn.Linear(4, 4)), "body": transformer(2), "holder": Holder()})
    handle = recollect.apply(model, {"body.0": Offload()})
    assert [name for name, one in model.named_modules() if one._forward_hooks] == ["body.1", "holder.one", "holder.two"]
    handle.remove()
    recollect.apply(model, {"body.0": Offload()}).remove()


def test_a_module_that_takes_no_hooks_leaves_nothing_half_decided():
    class Refusing(nn.Linear):
        def register_forward_hook(self, *args, **kwargs):
            raise RuntimeError("no hooks")

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Refusing(4, 4))
    with pytest.raises(RuntimeError, match="no hooks"):
        recollect.apply(model, {"0": Offload()})
    assert [type(one) for one in model] == [nn.Linear, nn.Linear, Refusing]
    assert not any(one._forward_hooks for one in model)
    recollect.apply(model, {"0": Recompute()}).remove()


def test_a_step_that_leaves_nothing_but_marks_is_not_noted_without_end(monkeypatch, lazy):
    monkeypatch.setattr(courses, "_LONGEST", 100)
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "decoder": nn.Linear(4, 4)})
    recollect.apply(model, {"encoder": Offload(min_bytes=0)})
    y = model["encoder"](torch.randn(2, 4, requires_grad=True))
    for _ in range(200):
        model["decoder"](y.detach().requires_grad_())
    (store,) = stores()
    assert len(store._step.sizes) <= 100
    y.sum().backward()


@pytest.mark.parametrize("seed", range(30))
def test_no_more_stays_than_may_be_ahead(monkeypatch, seed):
    """Also where steps differ in what they would let stay."""
    luck = random.Random(seed)
    link = clockwork.install(monkeypatch, 4e6, uneven=0.3)
    inputs = [torch.randn(luck.choice([128, 256, 512, 1024]), requires_grad=True) for _ in range(8)]
    ahead = luck.choice([4096, 5000, 8192, 10000])

    def takes(low, high):
        link.compute += luck.uniform(low, high)

    for _ in range(12):
        link.synchronize()
        results = []
        with recollect.offload(min_bytes=0, ahead=ahead):
            for one in inputs:
                results.append((one * 1).sin())
                takes(2e-4, 6e-4)
                results[-1].register_hook(lambda _: takes(2e-4, 9e-4))
        (store,) = stores()
        assert store._ahead_bytes <= ahead
        sum(one.sum() for one in results).backward()
        del results


def test_a_change_is_expected_also_after_a_step_of_another_kind(lazy):
    lazy.chance = 0.0
    x = torch.randn(64, requires_grad=True)
    for kind in "BBBBBBABABB":  # A does not change its first copy, which has the size of B's
        with everything():
            y = x * 1.0
            z = (y * y).sum()
            if kind == "B":
                with torch.no_grad():
                    y.mul_(2)
            for _ in range(2 if kind == "B" else 3):
                z = (z * torch.ones(50)).sin().sum()
        z.backward()
        for queue in (lazy.out, lazy.back):
            while queue:
                queue[0].run()


def test_a_change_is_expected_also_after_a_backward_that_went_a_part_of_the_way(lazy):
    lazy.chance = 0.0
    x = torch.randn(64, requires_grad=True)
    for step in range(12):
        with everything():
            y = x * 1.0
            z = (y * y).sin()
            with torch.no_grad():
                y.mul_(2)
            w = z.exp().sin()
        if step % 2:
            torch.autograd.grad(w.sum(), z)
        else:
            w.sum().backward()
        del w, y, z
        for queue in (lazy.out, lazy.back):
            while queue:
                queue[0].run()


def test_a_change_that_is_seen_while_a_course_is_looked_at_is_not_forgotten(monkeypatch):
    link = clockwork.install(monkeypatch, 1e6)
    x = torch.randn(64, requires_grad=True)
    for step in range(20):
        with everything():
            y = (x * x.detach()).sin() * 1.0
            z = y.sin()
            if step == 10:
                link.synchronize()
                recollect.offload_stats()  # sees that it has left
            if step >= 10:
                with torch.no_grad():
                    y.mul_(2)
        link.compute += 0.01
        z.register_hook(lambda _: setattr(link, "compute", link.compute + 0.01))
        z.sum().backward()
        link.compute += 0.01
        link.synchronize()


# --- What is left behind in the long run ---


def test_memory_that_outlives_steps_and_is_changed_in_each_is_remembered_once():
    batch, w = torch.empty(8, 8), torch.randn(8, 8, requires_grad=True)
    for _ in range(20):
        batch.copy_(torch.randn(8, 8))
        with everything():
            y = (batch @ w).sum()
        y.backward()
    (store,) = stores()
    assert len(store._lasting) == 1


def test_a_graph_that_stays_alive_lets_no_notes_grow_without_end(monkeypatch, x):
    monkeypatch.setattr(courses, "_LONGEST", 100)
    model = transformer(layers=1)
    expected = gradients(lambda: model(x), leaves_of(model, x))
    with everything():
        alive = model(x).square().sum()
    assert_as_plain(lambda: model(x), leaves_of(model, x), steps=20)
    (store,) = stores()
    for _ in range(20):
        for got, wanted in zip(
            torch.autograd.grad(alive, leaves_of(model, x), retain_graph=True), expected, strict=True
        ):
            assert torch.equal(got, wanted)
    step = store._step
    assert len(step.sizes) + len(step.askings) + len(step.stalls) <= 100 + 1
    assert len(store._storages) == len(step.sizes)


# --- Forms ---

FORMS = {
    "strided": lambda t: t[:, ::2],
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand(16, 16),
    "a part": lambda t: t[3:4],
    "a column": lambda t: t[:, 1],
    "a number": lambda t: t[2, 3],
    "conjugate": lambda t: torch.complex(t, t + 1).conj(),
    "a conjugate part": lambda t: torch.complex(t, t + 1).conj()[1:3],
    "negative": lambda t: torch.complex(t, t + 1).conj().imag,
    "a negative part": lambda t: torch.complex(t, t + 1).conj().imag[2:4],
    "bytes": lambda t: t > 0,
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "odd": lambda t: t.half().flatten()[:7],
}


@pytest.mark.parametrize("name", FORMS)
def test_tensors_come_back_as_they_were(name):
    store = chosen.store_of(Offload(min_bytes=0))
    original = FORMS[name](torch.randn(16, 16))
    ticket = store.put(original)
    for _ in range(2):
        back = store.get(ticket)
        assert torch.equal(back, original)
        assert (back.shape, back.stride(), back.dtype) == (original.shape, original.stride(), original.dtype)
        assert (back.is_conj(), back.is_neg()) == (original.is_conj(), original.is_neg())
        assert back.data_ptr() != original.data_ptr()
    del ticket


def test_who_changes_what_came_back_changes_it_for_nobody_else():
    store = chosen.store_of(Offload(min_bytes=0))
    base = torch.randn(8, 8)
    whole, part = store.put(base), store.put(base[2:6])
    store.get(whole).mul_(2)
    assert torch.equal(store.get(part), base[2:6])
    assert torch.equal(store.get(whole), base)
    del whole, part


def test_tickets_can_be_fetched_ahead_by_hand():
    store = chosen.store_of(Offload(min_bytes=0))
    tensors = [torch.randn(100) for _ in range(5)]
    tickets = [store.put(one) for one in tensors]
    store.prefetch(reversed(tickets))
    before = recollect.offload_stats().prefetch_hits
    for ticket, tensor in zip(reversed(tickets), reversed(tensors), strict=True):
        assert torch.equal(store.get(ticket), tensor)
    assert recollect.offload_stats().prefetch_hits == before + 5
    del ticket, tickets


def test_ranges_against_a_plain_list():
    import random

    luck = random.Random(0)
    ranges, taken = Ranges(10_000, 16), {}
    for _ in range(3000):
        if taken and luck.random() < 0.5:
            begin = luck.choice(list(taken))
            ranges.give(begin, taken.pop(begin))
        else:
            size = luck.randrange(1, 900)
            begin = ranges.take(size)
            if begin is not None:
                end = begin + -(-size // 16) * 16
                assert end <= 10_000
                assert all(end <= other or begin >= other + -(-length // 16) * 16 for other, length in taken.items())
                taken[begin] = size
    for begin, size in taken.items():
        ranges.give(begin, size)
    assert ranges.is_empty()
    assert ranges.take(10_000) == 0


def test_a_pool_keeps_within_its_limit():
    sizes = []

    def allocate(size):
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    pool = Pool(100 * 2**20, allocate)
    blocks = [pool.take(2**24) for _ in range(8)]
    assert sum(sizes) <= 100 * 2**20
    assert [block is not None for block in blocks] == [True] * 6 + [False] * 2
    for block in blocks[:6]:
        block.give_back()
    assert pool.used == 0


# --- What one asks for ---


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"to": "moon"}, ValueError, "to must be one of 'cpu', 'disk', got 'moon'"),
        ({"min_bytes": None}, TypeError, "min_bytes must be a number of bytes"),
        ({"min_bytes": -1}, ValueError, "min_bytes must be a number of bytes"),
        ({"ahead": "5 parsecs"}, ValueError, "ahead must be a number of bytes.*'5 parsecs'"),
        ({"in_flight": True}, TypeError, "in_flight must be a number of bytes"),
        ({"in_flight": 1.5}, TypeError, "in_flight must be a number of bytes"),
        ({"directory": "x"}, ValueError, 'directory has no meaning with to="cpu"'),
        ({"to": "disk", "directory": 3}, TypeError, "directory must be a path, got int 3"),
        ({"to": "disk", "max_host_bytes": 3}, ValueError, 'max_host_bytes has no meaning with to="disk"'),
    ],
)
def test_bad_options(options, kind, message):
    for make in (Offload, recollect.offload):
        with pytest.raises(kind, match=message):
            make(**options)


def test_bad_inputs():
    for make in (lambda: Recompute(inputs=Save()), lambda: recollect.remat(torch.sin, inputs=True)):
        with pytest.raises(TypeError, match=r"inputs must be recollect.Offload\(\), recollect.Shard\(...\) or None"):
            make()


@pytest.mark.parametrize(
    ("written", "bytes_"), [("1 KiB", 1024), ("1.5GB", 1_500_000_000), ("2mib", 2**21), ("7", 7), ("3 B", 3)]
)
def test_sizes_as_people_write_them(written, bytes_):
    assert Offload(min_bytes=written).min_bytes == bytes_


def test_decisions_are_values():
    assert Offload(max_host_bytes="1 GiB") == Offload(max_host_bytes=2**30)
    assert hash(Offload()) == hash(Offload(to="cpu"))
    assert pickle.loads(pickle.dumps(Recompute(inputs=Offload(ahead=3)))) == Recompute(inputs=Offload(ahead=3))


def test_it_can_be_entered_again_and_within_itself(x):
    around = everything()
    for _ in range(2):
        with around:
            with around:
                y = x.sin().exp()
            z = y.cos().sum()
        assert torch.equal(torch.autograd.grad(z, x)[0], torch.autograd.grad(x.sin().exp().cos().sum(), x)[0])


def test_it_can_be_left_in_any_order(x):
    one, other = everything(), everything()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert top_hooks() is not None
    other.__exit__(None, None, None)
    assert top_hooks() is None


def test_threads_may_share_it_and_each_leaves_what_it_entered():
    around = everything()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for thread in (one, other):
            thread.submit(around.__enter__).result()
        for thread in (one, other):
            thread.submit(around.__exit__, None, None, None).result()
            assert thread.submit(top_hooks).result() is None


def test_leaving_it_in_another_thread_is_an_error():
    around = everything()
    with around, ThreadPoolExecutor(1) as other:
        left = other.submit(around.__exit__, None, None, None)
        with pytest.raises(RuntimeError, match="left in a thread that has not entered it"):
            left.result()
    assert top_hooks() is None


def test_under_the_compiler(x):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager")
    assert_as_plain(lambda: compiled(x), leaves_of(model, x), steps=3)

    @torch.compile(backend="aot_eager")
    def inside(x):
        with everything():
            return model(x).sin()

    assert_as_plain(lambda: inside(x), leaves_of(model, x), contextlib.nullcontext, lambda: model(x).sin(), steps=3)


def test_autocast_and_modes_see_nothing_of_it(x):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    for around in (lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), everything):
        names = []
        with Names(), torch.autocast("cpu", dtype=torch.bfloat16), around():
            y = (x @ x.mT).exp().sum()
        y.backward()
        seen.append(names)
    assert seen[0] == seen[1]


# --- Disk ---


def on_disk(folder, **options):
    return lambda: everything(to="disk", directory=folder, **options)


@pytest.mark.parametrize("options", [{}, {"in_flight": 2000, "ahead": 4000}], ids=str)
def test_gradients_are_the_same_by_way_of_the_disk(tmp_path, x, options):
    model = transformer(dropout=0.2)
    assert_as_plain(lambda: model(x), leaves_of(model, x), on_disk(tmp_path / "new", **options))
    (store,) = stores()
    assert store.medium.bytes_written > 0
    assert store.medium.bytes_read > 0
    assert not list((tmp_path / "new").iterdir())


def test_decisions_for_the_disk(tmp_path, x):
    model = transformer(dropout=0.2)
    plain = copy.deepcopy(model)
    place = Offload("disk", directory=tmp_path, min_bytes=0)
    recollect.apply(model, {"0": place, "1": Recompute(inputs=place), "2": Recompute(), "2.attn": place})
    for _ in range(4):
        got = gradients(lambda: model(x), leaves_of(model, x))
        for mine, wanted in zip(got, gradients(lambda: plain(x), leaves_of(plain, x)), strict=True):
            assert torch.equal(mine, wanted)


def test_a_full_disk_is_an_error_in_the_forward_and_training_goes_on(tmp_path, x, monkeypatch):
    model = transformer(layers=2)
    leaves = leaves_of(model, x)
    state = copy.deepcopy(model.state_dict())

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "posix_fallocate", full)
        broken.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=f"{tmp_path}.*directory="):
            gradients(lambda: model(x), leaves, on_disk(tmp_path))
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert_as_plain(lambda: model(x), leaves, on_disk(tmp_path))
