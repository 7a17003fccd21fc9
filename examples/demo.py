"""A small transformer, trained plainly and with every block a region: what is kept, what is replayed, what it costs.

    python examples/demo.py [--tiny]

Both runs start from the same weights and draw the same dropout masks, so their gradients must be equal bit for bit.
Exits with 1 if they are not.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import recollect

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    heads: int
    tokens: int
    batch: int
    steps: int
    vocabulary: int = 512


TINY = Sizes(layers=2, width=32, heads=2, tokens=16, batch=2, steps=1)
ON_CPU = Sizes(layers=8, width=128, heads=4, tokens=128, batch=4, steps=7)
ON_GPU = Sizes(layers=24, width=1024, heads=16, tokens=1024, batch=8, steps=10)


# --- The model: torch alone, but for one line ---


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return functional.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width)), self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Transformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.checkpointed = False
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.randn(sizes.tokens, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads, dropout=0.1) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions
        for block in self.blocks:
            x = recollect.checkpoint(block, x) if self.checkpointed else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# --- Measuring ---


class Watch(TorchDispatchMode):
    """Counts the operators that run, and the bytes of the storages that they make and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self._sizes: dict[int, int] = {}  # of every storage alive that was met; 0 for what was there before

    @property
    def alive(self) -> int:
        return sum(self._sizes.values())

    def _meet(self, values: Any, *, new: bool) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes() if new else 0
                    weakref.finalize(storage, self._sizes.pop, storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._meet((args, kwargs), new=False)
        result = func(*args, **kwargs)
        self._meet(result, new=True)
        # Autograd and recollect use detach to hand tensors over: it computes nothing.
        self.operators += func is not torch.ops.aten.detach.default
        return result


class Trainer:
    """A model, its optimizer and what was measured on it."""

    def __init__(self, model: Transformer, *, checkpointed: bool) -> None:
        self.model = model
        self.model.checkpointed = checkpointed
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.seconds: list[float] = []
        self.kept = 0
        self.kept_on_gpu = 0
        self.forward_operators = 0
        self.backward_operators = 0

    def loss(self, text: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)  # the same dropout masks for every trainer
        logits = self.model(text[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def timed_step(self, text: Tensor, seed: int) -> None:
        start = now(text.device)
        self.optimizer.zero_grad()
        self.loss(text, seed).backward()
        self.optimizer.step()
        self.seconds.append(now(text.device) - start)

    def watched_step(self, text: Tensor, seed: int) -> None:
        """Not timed: watching is slow."""
        self.optimizer.zero_grad()
        before = gpu_bytes()
        with Watch() as watch:
            loss = self.loss(text, seed)
            self.kept, self.kept_on_gpu = watch.alive, gpu_bytes() - before
            self.forward_operators = watch.operators
            loss.backward()
            self.backward_operators = watch.operators - self.forward_operators


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def gpu_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def same_gradients(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


# --- The demo ---


def train(plain: Trainer, ours: Trainer, text: Tensor, steps: int, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=2 * (steps + 2))
        for step in range(steps + 2):
            for trainer in (plain, ours):
                if step <= steps:
                    trainer.timed_step(text, seed=step)
                else:
                    trainer.watched_step(text, seed=step)
                progress.advance(task)
        for trainer in (plain, ours):
            del trainer.seconds[0]  # warming up


def table(plain: Trainer, ours: Trainer, *, on_gpu: bool) -> Table:
    def mib(before: int, after: int) -> tuple[str, str, str]:
        return f"{before / MIB:,.1f} MiB", f"{after / MIB:,.1f} MiB", f"{after / before:.2f} x"

    result = Table()
    for heading in ("", "plain", "recollect", ""):
        result.add_column(heading, justify="left" if heading == "" else "right")
    result.add_row("activation bytes kept", *mib(plain.kept, ours.kept))
    if on_gpu:
        result.add_row("  by the CUDA allocator", *mib(plain.kept_on_gpu, ours.kept_on_gpu))
    replayed = ours.backward_operators - plain.backward_operators
    share = f"{replayed / ours.forward_operators:.0%} of forward's"
    result.add_row("operators replayed", "0", f"{replayed:,}", share)
    before, after = (statistics.median(trainer.seconds) for trainer in (plain, ours))
    result.add_row("step time (median)", f"{before * 1e3:,.1f} ms", f"{after * 1e3:,.1f} ms", f"{after / before:.2f} x")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model so small that it only shows that all works")
    options = parser.parse_args()

    # Some CUDA kernels add up in an order that changes from run to run: "equal bit for bit" needs those that don't.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)  # several threads on busy cores wait for each other: that would drown the difference
    sizes = TINY if options.tiny else ON_GPU if on_gpu else ON_CPU

    torch.manual_seed(0)
    model = Transformer(sizes).to(device)
    text = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens + 1), device=device)
    plain = Trainer(model, checkpointed=False)
    ours = Trainer(copy.deepcopy(model), checkpointed=True)

    console = Console()
    where = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"A transformer of {sizes.layers} blocks, {parameters / 1e6:.1f} M parameters, "
        f"{sizes.batch} x {sizes.tokens} tokens, on {where}",
        highlight=False,
    )
    train(plain, ours, text, sizes.steps, console)
    equal = same_gradients(plain.model, ours.model)
    console.print(table(plain, ours, on_gpu=on_gpu))
    console.print(f"gradients equal, bit for bit: {'[green]yes' if equal else '[red]no'}", highlight=False)
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
