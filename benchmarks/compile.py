"""What does a compiled step cost with our regions, and with torch's own?

A transformer whose every layer is a region, compiled as a whole, forward plus backward. Where the graphs are the same,
so is the work; what may differ is what Dynamo checks before it runs them. On the CPU the model is so small that this
shows; on a GPU it is one that a GPU has something to do with.

Every contestant has code of its own, because compiled code is kept with the code that it was made from, and is looked
up there. They run interleaved in one process, in a new random order every round; a ratio is the median of those of the
rounds. The number of graphs is counted: more than one would be a break or a recompilation.

    python benchmarks/compile.py [--rounds 60] [--layers 12] [--backend inductor] [--json compile.json]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint as stock
from torch import Tensor, nn

import recollect
from peers import describe_machine, print_table
from recollect import dropin

MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
VISIT = 3
Region = Callable[[nn.Module, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (q, k, v))
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        x = x + recollect.region("attn", self.attention)(x)
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


def regions() -> dict[str, Region]:
    """The contestants; those of one kind stand together, and torch's own first."""
    stock_matmuls = partial(stock.create_selective_checkpoint_contexts, MATMULS)
    our_matmuls = partial(dropin.create_selective_checkpoint_contexts, MATMULS)
    named = recollect.by_name({"attn": recollect.Save()})
    return {
        "no region": lambda layer, x: layer(x),
        "stock": lambda layer, x: stock.checkpoint(layer, x, use_reentrant=False),
        "recollect.checkpoint": lambda layer, x: recollect.checkpoint(layer, x),
        "recollect.dropin": lambda layer, x: dropin.checkpoint(layer, x, use_reentrant=False),
        "stock, products": lambda layer, x: stock.checkpoint(layer, x, use_reentrant=False, context_fn=stock_matmuls),
        "recollect.dropin, products": lambda layer, x: dropin.checkpoint(
            layer, x, use_reentrant=False, context_fn=our_matmuls
        ),
        "recollect, save_matmuls": lambda layer, x: recollect.checkpoint(
            layer, x, policy=recollect.policies.save_matmuls
        ),
        "recollect, attention by name": lambda layer, x: recollect.checkpoint(layer, x, policy=named),
    }


def compiled_step(region: Region, layers: nn.ModuleList, x: Tensor, backend: str) -> Callable[[], float]:
    def model(x: Tensor) -> Tensor:
        for layer in layers:
            x = region(layer, x)
        return x.square().mean()

    own = FunctionType(model.__code__.replace(), model.__globals__, "model", None, model.__closure__)
    compiled = torch.compile(own, backend=backend, fullgraph=True)

    def step() -> float:
        start = time.perf_counter()
        compiled(x).backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        layers.zero_grad()
        return seconds

    return step


def graphs_so_far() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def peak_mib(step: Callable[[], float]) -> str:
    if not torch.cuda.is_available():
        return "-"
    torch.cuda.reset_peak_memory_stats()
    step()
    return f"{torch.cuda.max_memory_allocated() / 2**20:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--backend", default="inductor" if on_gpu or shutil.which("g++") else "aot_eager")
    parser.add_argument("--json", help="write the numbers there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device, width, shape = ("cuda", 1024, (8, 1024)) if on_gpu else ("cpu", 32, (2, 16))
    layers = nn.ModuleList(Layer(width) for _ in range(options.layers)).to(device)
    x = torch.randn(*shape, width, device=device)
    print(f"{describe_machine()}; {options.layers} layers of width {width}, backend {options.backend}\n")

    steps, graphs, peaks = {}, {}, {}
    for name, region in regions().items():
        before = graphs_so_far()
        steps[name] = compiled_step(region, layers, x, options.backend)
        steps[name]()
        graphs[name], peaks[name] = graphs_so_far() - before, peak_mib(steps[name])
    compiled = graphs_so_far()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for number in range(options.rounds + 3):
        random.shuffle(order)
        for name in order:
            seconds = statistics.median(steps[name]() for _ in range(VISIT))
            if number >= 3:  # the first rounds warm up
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}

    rows, reference = [], "no region"
    found: dict[str, Any] = {}
    for name, seconds in medians.items():
        if name.startswith("stock"):
            reference = name
        against = "stock" if name == "recollect, attention by name" else reference
        ratio = statistics.median(own / other for own, other in zip(times[name], times[against], strict=True))
        found[name] = {"ms": seconds * 1e3, "ratio": ratio, "graphs": graphs[name], "peak MiB": peaks[name]}
        rows.append([name, f"{seconds * 1e3:.2f}", f"{ratio:.3f}", str(graphs[name]), peaks[name]])
    print_table(["", "ms", "of torch's own", "graphs", "peak MiB"], rows)
    print(f"\nCompiled anew in {options.rounds + 3} rounds: {graphs_so_far() - compiled}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
