"""DistributedDataParallel and regions: every gradient is reduced once, and equal to that of one process."""

import contextlib
import functools
import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import recollect
from process_group import result, run_on_ranks
from recollect import composable, policies

WIDTH, STEPS = 8, 2


# --- Models ---


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.replays = 0

    def forward(self, x):
        self.replays += recollect.is_recomputing()
        return x + self.down(self.dropout(self.up(x).tanh())).tanh()


class Model(nn.Module):
    """Layers that are called one after the other by `call`, which frameworks make a checkpoint of."""

    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.last = nn.Linear(WIDTH, 4)
        self.call = lambda layer, x: layer(x)
        self.rank = 0

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return self.last(x)


class Shared(Model):
    """A weight that two layers have, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.layers[1].up.weight = self.layers[0].up.weight

    def forward(self, x):
        return super().forward(self.call(self.layers[2], x))


class Unused(Model):
    """A layer that the second rank passes over, and one that nobody calls."""

    def __init__(self):
        super().__init__()
        self.spare = Block()

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = x if self.rank == number == 1 else self.call(layer, x)
        return self.last(x)


class Normalised(Model):
    """Buffers that every forward changes, once."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.up = nn.Sequential(layer.up, nn.BatchNorm1d(2 * WIDTH))


# --- Regions ---


def applied(model):
    recollect.apply(model, {"**.layers.*": recollect.Recompute()})


def with_products(model):
    recollect.apply(model, {Block: recollect.Recompute(policy=policies.save_matmuls)})


def in_place(model):
    for module in list(model.modules()):
        if isinstance(module, Block):
            composable.checkpoint(module)


def stock_calls(model, **options):
    """As a framework does: `patch_torch` serves it."""
    model = getattr(model, "module", model)
    model.call = lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, **options)


def patched(model):
    stock_calls(model, use_reentrant=False)


def patched_reentrant(model):
    stock_calls(model, use_reentrant=True)


REGIONS = (applied, with_products, in_place, patched)
PATCHES = {
    patched: {"determinism_check": "first"},
    patched_reentrant: {"reentrant": "replace", "determinism_check": "first"},
}
OPTIONS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
}


# --- Training ---


def batch_of(rank, step):
    torch.manual_seed(100 * rank + step)
    return torch.randn(4, WIDTH, requires_grad=True)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=2**-3)


def alone(kind, batches=1):
    """What all ranks do, in one process: gradients of some steps, and buffers of each rank at the end."""
    torch.manual_seed(0)
    model = kind()
    optimizer = optimizer_of(model)
    buffers = [[one.clone() for one in model.buffers()] for _ in range(2)]
    seen = []
    for step in range(STEPS):
        sums, sent = [], buffers[0]  # the first rank's buffers are sent to all before each forward
        for rank in range(2):
            put(model, sent)
            model.rank = rank
            model.zero_grad()
            for number in range(batches):
                model(batch_of(rank, 10 * step + number)).square().mean().backward()
            sums.append([torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()])
            buffers[rank] = [one.clone() for one in model.buffers()]
        model.zero_grad()
        for parameter, *grads in zip(model.parameters(), *sums, strict=True):
            parameter.grad = sum(one / 2 for one in grads)
        seen.append([one.grad.clone() for one in model.parameters()])
        optimizer.step()
    return seen, buffers


def put(model, values):
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def reduce_and_count(seen, bucket):
    seen.update(id(one) for one in bucket.parameters())
    return allreduce_hook(None, bucket)


def train(kind, rank, region=None, place="before", batches=1, count=True, **options):
    """The same on ranks; and how often each gradient was reduced in each step, if that is counted."""
    torch.manual_seed(0)
    model = kind()
    model.rank = rank
    with recollect.patch_torch(**PATCHES[region]) if region in PATCHES else contextlib.nullcontext():
        if region is not None and place == "before":
            region(model)
        replicas = DistributedDataParallel(model, bucket_cap_mb=0.0005, **options)
        if region is not None and place == "after":
            region(replicas)
        reduced = Counter()
        if count:
            replicas.register_comm_hook(reduced, reduce_and_count)
        optimizer = optimizer_of(model)
        seen, counts = [], []
        for step in range(STEPS):
            reduced.clear()
            for number in range(batches):
                with contextlib.nullcontext() if number == batches - 1 else replicas.no_sync():
                    replicas(batch_of(rank, 10 * step + number)).square().mean().backward()
            seen.append([torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in model.parameters()])
            counts.append([reduced[id(one)] for one in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    if region is not None:
        layers = [layer for layer in model.layers if layer.replays]
        assert len(layers) == (2 if kind is Unused and rank == 1 else 3), f"{region.__name__} {place}: no replay"
    return seen, counts, [one.clone() for one in model.buffers()]


def equal(got, expected):
    return all(
        torch.equal(*pair) for one, other in zip(got, expected, strict=True) for pair in zip(one, other, strict=True)
    )


def every_way(rank, kind, options=tuple(OPTIONS), batches=1, regions=REGIONS):
    """By region, place, options and whether a hook counts: whether gradients are right, and reduced once."""
    expected, buffers = alone(kind, batches)
    found = {}
    for region, name in itertools.product((None, *regions), options):
        for place, count in [("before", True), ("before", False)] if region is None else WAYS:
            got, counts, own = train(kind, rank, region, place, batches, count, **OPTIONS[name])
            once = all(one == 1 for step in counts for one in step) if count else "not counted"
            right = equal(got, expected) and equal([own], [buffers[rank]])
            found[f"{region and region.__name__} {place} {name} {count}"] = right, once
    return found


WAYS = [("before", True), ("after", True), ("after", False)]


def unused_here(rank):
    """Only `find_unused_parameters` knows of parameters that are not used; a static graph, if that never changes."""
    return every_way(rank, Unused, ("unused",))


def replaced(rank):
    """Requests for the reentrant variant, served with the other one: with it DDP needs a static graph."""
    return every_way(rank, Shared, ("plain", "unused", "static"), regions=(patched_reentrant,))


SCENARIOS = {
    "a model": functools.partial(every_way, kind=Model),
    "a shared parameter": functools.partial(every_way, kind=Shared),
    "accumulation": functools.partial(every_way, kind=Model, options=("plain", "unused", "views"), batches=3),
    "buffers": functools.partial(every_way, kind=Normalised, options=("plain", "static")),
    "unused on one rank": unused_here,
    "the reentrant variant, replaced": replaced,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(__name__, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_those_of_one_process(ranks, name):
    found = result(ranks, name)
    assert [way for way, (right, _) in found.items() if not right] == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_gradient_is_reduced_once(ranks, name):
    found = result(ranks, name)
    counted = {way: once for way, (_, once) in found.items() if once != "not counted"}
    assert counted
    assert [way for way, once in counted.items() if not once] == []
