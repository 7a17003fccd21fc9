"""What do the checks cost in a training step?

A Llama-style model, every layer a region: a step with `determinism_check` "none", "default", "first" (from the third
step on, and the first step by itself) and "values", and with PyTorch's own checkpointing. On a GPU the model is large
enough that the GPU is what one waits for; on a CPU the numbers only show that it runs.

Contestants run interleaved in one process, in a new random order every round.

    python benchmarks/verification.py [--rounds 15] [--json verification.json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as stock
from torch import Tensor, nn
from torch.nn import functional

import recollect
from peers import describe_machine, print_table


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        h = self.norm2(x)
        result: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return result


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        for layer in self.layers:
            x = call(layer, x)
        return x


def time_step(model: Model, x: Tensor, call: Callable[..., Tensor]) -> float:
    synchronise()
    start = time.perf_counter()
    model(x, call).float().square().mean().backward()
    synchronise()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.manual_seed(0)
    if torch.cuda.is_available():
        sizes = {"layers": 8, "width": 4096, "heads": 32}
        model, x = Model(**sizes).to("cuda", torch.bfloat16), torch.randn(4, 2048, 4096, device="cuda").bfloat16()
    else:
        sizes = {"layers": 2, "width": 128, "heads": 4}
        model, x = Model(**sizes), torch.randn(2, 64, 128)
    contestants: dict[str, Callable[..., Any]] = {
        "stock": partial(stock.checkpoint, use_reentrant=False),
        **{
            f"recollect, {check}": partial(recollect.checkpoint, determinism_check=check)
            for check in ("none", "default", "first", "values")
        },
    }
    time_step(model, x, contestants["stock"])
    first_step = time_step(model, x, contestants["recollect, first"])
    peaks: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for number in range(options.rounds + 2):
        random.shuffle(order)
        for name in order:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            seconds = time_step(model, x, contestants[name])
            if number >= 2:  # the first rounds warm up, and verify
                times[name].append(seconds)
                peaks[name] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["recollect, default"]
    rows = [
        [name, f"{1e3 * seconds:.1f}", f"{seconds / base:.3f}", f"{peaks[name] / 2**30:.2f}"]
        for name, seconds in medians.items()
    ]
    rows.append(["recollect, first: the first step", f"{1e3 * first_step:.1f}", f"{first_step / base:.3f}", ""])
    print(f"Step of {sizes}, input {list(x.shape)}, every layer a region; medians of {options.rounds} rounds")
    print_table(["", "ms", 'of "default"', "peak GiB"], rows)
    print(describe_machine())
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"times": times, "peaks": peaks, "first_step": first_step}, file)


if __name__ == "__main__":
    main()
