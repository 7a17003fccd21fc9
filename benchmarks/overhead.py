"""What does a region cost, and what does a saved tensor cost, beyond the work itself?

A chain of n `sin` on 8 floats, one thread, forward plus backward. The work itself is "forward twice and backward
once" of the plain chain; overhead is what exceeds it. A straight line through the overheads gives the cost per
saved tensor (slope) and per region (what is left at n = 0). The last column is a region as people have them: a block
with 14 modules, 10 parameters and 25 saved tensors, of which 10 are parameters or views of them. Contestants run
interleaved in one process, in a new random order every round: in a fixed order whoever runs after the slowest looks
worse than it is.

    python benchmarks/overhead.py [--rounds 300] [--json overhead.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as stock

import recollect
from peers import describe_machine, print_table, torch_remat_checkpoint
from recollect import dropin

LENGTHS = (4, 104)
BLOCK = 0  # stands for the block among the lengths
VISIT = 5  # runs in a row; their median counts, so that no one pays for the caches that another left behind
WORK = "the work itself"
Step = Callable[[int], float]


def chain(n: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n):
            x = x.sin()
        return x

    return run


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4))
        self.layers = torch.nn.ModuleList(layers)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        result: torch.Tensor = self.norm(x)
        return result


FUNCTIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {n: chain(n) for n in LENGTHS} | {BLOCK: Block()}
SHAPES = dict.fromkeys(LENGTHS, (8,)) | {BLOCK: (2, 8)}


def the_work(n: int) -> float:
    """Forward twice and backward once, without checkpointing."""
    x = torch.ones(SHAPES[n], requires_grad=True)
    run = FUNCTIONS[n]
    start = time.perf_counter()
    y = run(x)
    y = run(x)
    y.backward(torch.ones(SHAPES[n]))
    return time.perf_counter() - start


def bare_hooks(n: int) -> float:
    """The floor: hooks that do nothing, in forward, replay and backward."""
    x = torch.ones(SHAPES[n], requires_grad=True)
    run = FUNCTIONS[n]
    start = time.perf_counter()
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = run(x)
    y.backward(torch.ones(SHAPES[n]))
    return time.perf_counter() - start


class Enough(BaseException):
    """Stops the replay of the smallest engine."""


def smallest_engine(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Numbers for saved tensors, one replay that stops early, and nothing else: no checks, no random state."""
    count = 0
    recovered: list[Any] = []

    def pack(tensor: torch.Tensor) -> int:
        nonlocal count
        count += 1
        return count - 1

    def unpack(index: int) -> torch.Tensor:
        if not recovered:
            replay()
        tensor: torch.Tensor = recovered[index]
        recovered[index] = None
        return tensor

    def replay() -> None:
        def pack_again(tensor: torch.Tensor) -> torch.Tensor:
            recovered.append(tensor.detach() if tensor.requires_grad else tensor)
            if len(recovered) == count:
                raise Enough
            last: torch.Tensor = recovered[-1]
            return last

        hooks = torch.autograd.graph.saved_tensors_hooks(pack_again, lambda tensor: tensor)
        with contextlib.suppress(Enough), torch.enable_grad(), hooks:
            run(x)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return run(x)


def checkpointed(call: Callable[..., Any], **options: Any) -> Step:
    def step(n: int) -> float:
        x = torch.ones(SHAPES[n], requires_grad=True)
        run = FUNCTIONS[n]
        start = time.perf_counter()
        y = call(run, x, **options)
        y.backward(torch.ones(SHAPES[n]))
        return time.perf_counter() - start

    return step


def contestants() -> dict[str, Step]:
    found: dict[str, Step] = {
        WORK: the_work,
        "bare hooks (floor)": bare_hooks,
        "the smallest engine (floor)": checkpointed(smallest_engine),
        "stock": checkpointed(stock.checkpoint, use_reentrant=False),
        "recollect": checkpointed(dropin.checkpoint, use_reentrant=False),
        "recollect, native": checkpointed(recollect.checkpoint),
        "recollect, no RNG": checkpointed(dropin.checkpoint, use_reentrant=False, preserve_rng_state=False),
        "stock reentrant": checkpointed(stock.checkpoint, use_reentrant=True),
        "recollect reentrant": checkpointed(dropin.checkpoint, use_reentrant=True),
    }
    remat = torch_remat_checkpoint()
    if remat is not None:
        found["torch_remat (never preserves RNG)"] = checkpointed(remat)
    return found


def measure(rounds: int) -> dict[str, dict[str, float]]:
    steps = contestants()
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for name in steps for n in FUNCTIONS}
    order = list(steps)
    for round_number in range(rounds + 5):
        random.shuffle(order)
        for n in FUNCTIONS:
            for name in order:
                seconds = statistics.median(steps[name](n) for _ in range(VISIT))
                if round_number >= 5:  # the first rounds warm up
                    times[name, n].append(seconds)
    short, long = LENGTHS
    result = {}
    for name in steps:
        over = {n: statistics.median(times[name, n]) - statistics.median(times[WORK, n]) for n in FUNCTIONS}
        per_tensor = (over[long] - over[short]) / (long - short)
        result[name] = {
            "region": (over[short] - short * per_tensor) * 1e6,
            "tensor": per_tensor * 1e6,
            "block": over[BLOCK] * 1e6,
        }
    del result[WORK]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options.rounds)
    rows = []
    for name, cost in result.items():
        base = result["stock reentrant" if "reentrant" in name else "stock"]
        rows.append(
            [
                name,
                f"{cost['region']:.1f}",
                f"{cost['region'] / base['region']:.2f}",
                f"{cost['tensor']:.2f}",
                # The reentrant variant hooks nothing: there is no cost per tensor to compare.
                "" if "reentrant" in name else f"{cost['tensor'] / base['tensor']:.2f}",
                f"{cost['block']:.0f}",
                f"{cost['block'] / base['block']:.2f}",
            ]
        )
    columns = ["", "us per region", "of stock's", "us per saved tensor", "of stock's", "us per block", "of stock's"]
    print_table(columns, rows)
    print(describe_machine())
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": describe_machine(), "overhead": result}, file, indent=1)


if __name__ == "__main__":
    main()
