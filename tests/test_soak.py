"""Many steps of a small model under all features: its gradients stay right and the process does not grow.

`RECOLLECT_SOAK` says how many steps; `make soak` takes 2,000. Memory is looked at twice: after half of them, when
everything that is remembered from step to step has been learnt, and at the end.
"""

import contextlib
import copy
import ctypes
import gc
import itertools
import math
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu

import recollect
from recollect import Offload, Recompute, Save, by_name, offload_ops, policies, region, save_ops
from tools import assert_equal

STEPS = int(os.environ.get("RECOLLECT_SOAK", "240"))
WIDTH, BATCH = 64, 128
# What is measured moves by some 0.3 MB. An activation is 32 KiB: 120 steps that leave one behind each come to 4 MB.
ALLOWED_BYTES = 2 * 2**20
ALLOWED_OBJECTS = 50

aten = torch.ops.aten
once = getattr(recollect, "once", lambda function, *args: function(*args))
pin = getattr(recollect, "pin", lambda function: function)
HAS_ONCE = hasattr(recollect, "once")


def resident_bytes():
    """What the process holds in memory, if the system tells.

    Without what the C library has been given back and holds for later: that comes and goes by 3 MB with the turns that
    the threads of backward take.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


class Block(nn.Module):
    """Attention over the batch and a gated perceptron, in named parts."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def attention(self, x):
        q, k, v = self.qkv(x)[None, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)[0, 0]

    def count(self):
        self.calls += 1
        return self.calls

    def perceptron(self, x):
        order = pin(torch.argsort)(x.detach().sum(-1))
        x = region("act", F.gelu)(self.up(x[order]))
        return F.dropout(self.down(x), 0.2)

    def forward(self, x):
        once(self.count)
        x = x + region("attn", self.attention)(x)
        return x + region("mlp", self.perceptron)(self.norm(x))


class Model(nn.Module):
    """Stages of blocks, each stage and each block a region; or `plain`, without any."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.plain = False
        self.turns = 0

    def policies(self):
        """New ones for each step, as programs that build them in their forward have."""

        def asked(what, ctx):
            if not isinstance(what, str):
                return None
            self.turns += 1
            return Save() if (self.turns - 1) % 3 else None

        return (
            by_name({"attn": Save(), "mlp/act": Recompute(), "mlp": Offload()}),
            policies.save_matmuls | by_name({"mlp": Save()}),
            offload_ops(aten.addmm) | save_ops(aten.gelu, on_mutation="copy"),
            asked,
            policies.save_everything_but_pointwise,
            None,
        )

    def run(self, function, x, **options):
        return function(x) if self.plain else recollect.checkpoint(function, x, **options)

    def forward(self, x, step):
        each = itertools.cycle(self.policies())
        each = list(itertools.islice(each, step % 6, step % 6 + 4))
        for number, stage in enumerate(self.stages):

            def run_stage(x, stage=stage, number=number):
                for block, policy in zip(stage, each[2 * number :], strict=False):
                    x = self.run(block, x, policy=policy)
                return x

            with save_on_cpu() if number and step % 2 else contextlib.nullcontext():
                x = self.run(run_stage, x, early_stop=bool(step % 3), debug=step % 50 == 0)
        return self.head(x)


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    labels = (x[:, :4] * 2).argmax(-1)
    loss = F.cross_entropy(model(x, number), labels)
    if number % 7 == 0:
        torch.autograd.grad(loss, list(model.head.parameters()), retain_graph=True)
    if number % 11 == 0:
        with contextlib.suppress(ZeroDivisionError):
            recollect.checkpoint(fails, x.clone().requires_grad_())
    if number % 13 == 0:
        a_function_of_this_step(x.clone().requires_grad_())
    if number % 100 == 0:
        recollect.explain(Block(), x, policy=by_name({"attn": Save()}))
    if number % (STEPS // 8) == 0:
        compare_with_plain(model, x, labels, number)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def fails(x):
    x.sin().exp()
    raise ZeroDivisionError


def a_function_of_this_step(x):
    """What is remembered of a function must go when the function goes."""
    code = (lambda x: region("part", torch.sin)(x.exp()).exp()).__code__.replace()
    function = types.FunctionType(code, globals())
    recollect.checkpoint(function, x, policy=by_name({"part": Save()})).sum().backward()


def compare_with_plain(model, x, labels, number):
    state, grads = torch.get_rng_state(), []
    for plain in (True, False):
        twin = copy.deepcopy(model)
        twin.plain = plain
        torch.set_rng_state(state)
        loss = F.cross_entropy(twin(x, number), labels)
        grads.append(torch.autograd.grad(loss, list(twin.parameters())))
    torch.set_rng_state(state)
    assert_equal(grads[1], grads[0])


@pytest.mark.skipif(STEPS < 100, reason="too few steps to tell")
def test_memory_stays_flat_over_many_steps():
    """In a process of its own: what other tests leave behind moves the memory of a process about by megabytes."""
    ended = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def soak():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, seen = [], []
    for number in range(1, STEPS + 1):
        losses.append(step(model, optimizer, number))
        if number in (STEPS // 2, STEPS):
            gc.collect()
            seen.append((len(gc.get_objects()), resident_bytes()))  # in this order: the list takes memory too
    (objects_before, bytes_before), (objects_after, bytes_after) = seen
    assert objects_after - objects_before <= ALLOWED_OBJECTS
    if bytes_before is not None:
        assert bytes_after - bytes_before <= ALLOWED_BYTES
    assert math.fsum(losses[-50:]) < math.fsum(losses[:50]), "it does not learn"
    if HAS_ONCE:
        assert {block.calls for stage in model.stages for block in stage} == {STEPS}


if __name__ == "__main__":
    soak()
