"""How many bytes are alive at the peak of forward plus backward?

Counted by a dispatch mode that follows every storage from the operator that makes it until it is freed: once, however
many views it has, and whether autograd, a region or the program holds it. What was there before (parameters, inputs) is
not counted; gradients are. Memory that a kernel takes and gives back while it runs is not seen.

    python benchmarks/memory.py [--json memory.json]

Exits with 1 if recollect's peak exceeds stock's anywhere.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peers import checkpoints, describe_machine, print_table

Checkpoint = Callable[..., Any]
Program = Callable[[Checkpoint], Callable[[], Tensor]]
MIB = 2**20


class StorageTracker(TorchDispatchMode):
    """Bytes of the storages made under it that are alive, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # of every storage met that is alive, by address
        self._foreign: set[int] = set()  # those of them that were there before

    def _forget(self, address: int) -> None:
        self._foreign.discard(address)
        self.alive -= self._sizes.pop(address)

    def _meet(self, values: Any, *, made_here: bool) -> None:
        for value in tree_leaves(values):
            if not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            address = storage._cdata
            if address not in self._sizes:
                self._sizes[address] = 0
                weakref.finalize(storage, self._forget, address)
                if not made_here:
                    self._foreign.add(address)
            if address not in self._foreign:  # an operator may also have resized it
                self.alive += storage.nbytes() - self._sizes[address]
                self._sizes[address] = storage.nbytes()
        self.peak = max(self.peak, self.alive)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._meet((args, kwargs), made_here=False)
        result = func(*args, **kwargs)
        self._meet(result, made_here=True)
        return result


def check_the_tracker() -> None:
    """Views count once, in-place operators nothing, what is freed no longer; what was there before never."""
    before = torch.ones(256, 1024)
    with StorageTracker() as tracker:
        before.t().add_(1)
        one = before * 2
        view = one.t()[3:]
        one.add_(1)
        assert tracker.alive == tracker.peak == MIB
        del one
        assert tracker.alive == MIB
        del view
        assert tracker.alive == 0
        one = torch.ones(256, 1024)
        one.resize_(512, 1024)
        assert tracker.alive == tracker.peak == 2 * MIB


# --- The programs: each gets a checkpoint function and gives a forward, all regions of which go through it ---


def pointwise(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x.sin().exp().tanh()
    return x


def chain(checkpoint: Checkpoint) -> Callable[[], Tensor]:
    leaf = torch.ones(256, 1024, requires_grad=True)

    def forward() -> Tensor:
        x = leaf
        for _ in range(4):
            x = checkpoint(pointwise, x)
        return x.sum()

    return forward


def nested_chain(checkpoint: Checkpoint) -> Callable[[], Tensor]:
    leaf = torch.ones(256, 1024, requires_grad=True)

    def level(depth: int, x: Tensor) -> Tensor:
        x = pointwise(x)
        for _ in range(2):
            x = checkpoint(level, depth - 1, x) if depth > 1 else pointwise(x)
        return pointwise(x)

    def forward() -> Tensor:
        x: Tensor = checkpoint(level, 3, leaf)
        return x.sum()

    return forward


def mlp(checkpoint: Checkpoint) -> Callable[[], Tensor]:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4))
    batch = torch.randn(512, 128)

    def forward() -> Tensor:
        x = batch
        for layer in layers:
            x = x + checkpoint(layer, x)
        return x.sum()

    return forward


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width)), 0.1)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


def transformer(checkpoint: Checkpoint, blocks: int) -> Callable[[], Tensor]:
    layers = nn.ModuleList(Block(128, 4) for _ in range(blocks))
    batch = torch.randn(4, 128, 128)

    def forward() -> Tensor:
        x = batch
        for layer in layers:
            x = checkpoint(layer, x)
        return x.sum()

    return forward


PROGRAMS: dict[str, Program] = {
    "chain of pointwise operators, 4 regions": chain,
    "nested chain, 3 deep": nested_chain,
    "MLP, 4 layers": mlp,
    "transformer block": partial(transformer, blocks=1),
    "transformer, 4 blocks": partial(transformer, blocks=4),
}


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def contestants() -> dict[str, Checkpoint]:
    return {"plain": plainly, **checkpoints()}


def measure(program: Program, checkpoint: Checkpoint) -> int | None:
    """Peak bytes, None if the contestant can't run it."""
    torch.manual_seed(0)
    forward = program(checkpoint)
    tracker = StorageTracker()
    try:
        with tracker:
            forward().backward()
    except NotImplementedError:  # torch_remat does not nest
        return None
    return tracker.peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    check_the_tracker()

    peaks = {
        title: {name: measure(program, checkpoint) for name, checkpoint in contestants().items()}
        for title, program in PROGRAMS.items()
    }
    rows, exceeded = [], []
    for title, peak in peaks.items():
        ours, theirs = peak["recollect"], peak["stock"]
        assert ours is not None, f"recollect failed on {title}"
        assert theirs is not None, f"stock failed on {title}"
        cells = ["refuses" if value is None else f"{value / MIB:.3f}" for value in peak.values()]
        rows.append([title, *cells, f"{ours / theirs:.3f}"])
        if ours > theirs:
            exceeded.append(f"{title}: {ours:,} bytes, stock has {theirs:,}")
    print_table(["peak MiB alive", *contestants(), "recollect / stock"], rows)
    print(describe_machine())
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": describe_machine(), "peak_bytes": peaks}, file, indent=1)
    for line in exceeded:
        print(f"above stock: {line}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    raise SystemExit(main())
