"""Is the cost linear? In the saved tensors of a region, in regions in a row, in calls of nested regions.

Everything is a chain of `sin` on 8 floats, one thread, forward plus backward. For tensors and regions the cost is what
exceeds the work itself ("forward twice and backward once" of the plain chain). For nesting it is the whole time over
the number of calls of the nested function, counted: every level replays the levels around it, so the calls grow with
the square of the depth.

Contestants and sizes run interleaved in one process, in a new random order every round. Costs are taken round by round,
against the work in the same round, since a busy machine changes its speed all the time; shown are the median over the
rounds and, in brackets, its quartiles: a ratio means little where those lie far apart. The clock is the thread's CPU
time.

Python's garbage collector runs (`--gc frozen`), but leaves alone what was there at the start (`gc.freeze`). With
`--gc on` a step of thousands of regions or tensors, anyone's, sets off a full collection that goes through all of
torch's own objects, some 100 ms. `--gc off` shows what is left without it: the difference at large sizes is
the collector going through the objects that live until backward.

    python benchmarks/scaling.py [--rounds 25] [--gc frozen|on|off] [--json scaling.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from peers import checkpoints, describe_machine, print_table

WORK = "the work itself"
Function = Callable[[torch.Tensor], torch.Tensor]
Checkpoint = Callable[..., Any]


# --- The three questions ---


def chain(n: int) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n):
            x = x.sin()
        return x

    return run


def one_region(checkpoint: Checkpoint, n: int) -> Function:
    """n saved tensors."""
    return partial(checkpoint, chain(n))


PER_REGION = 4
SHORT = chain(PER_REGION)


def regions_in_a_row(checkpoint: Checkpoint, n: int) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n):
            x = checkpoint(SHORT, x)
        return x

    return run


class Nest:
    """`depth` regions, each inside the one before; counts the calls of their function."""

    def __init__(self, checkpoint: Checkpoint, depth: int) -> None:
        self.checkpoint = checkpoint
        self.depth = depth
        self.calls = 0

    def level(self, depth: int, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x.sin()
        if depth > 1:
            x = self.checkpoint(self.level, depth - 1, x)
        return x.sin()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.checkpoint(self.level, self.depth, x)
        return result


# --- Timing ---


def run_step(function: Function) -> float:
    x = torch.ones(8, requires_grad=True)
    start = time.thread_time()
    function(x).backward(torch.ones(8))
    return time.thread_time() - start


def run_work(n: int) -> float:
    """Forward twice and backward once, without checkpointing."""
    x = torch.ones(8, requires_grad=True)
    function = chain(n)
    start = time.thread_time()
    y = function(x)
    y = function(x)
    y.backward(torch.ones(8))
    return time.thread_time() - start


Key = tuple[str, int]  # contestant, size


@dataclass
class Contest:
    """Steps to time; those that can't run are left out, with the reason."""

    steps: dict[Key, Callable[[], float]]
    failed: dict[Key, str] = field(default_factory=dict)

    def run(self, rounds: int) -> dict[Key, list[float]]:
        """Seconds, one number per round."""
        visits: dict[Key, int] = {}
        for key, step in self.steps.items():
            try:
                # Short runs several times in a row, so that no one pays for the caches that another left behind.
                visits[key] = 9 if step() < 0.02 else 1
            except NotImplementedError:  # torch_remat does not nest
                self.failed[key] = "refuses"
            except RecursionError:
                self.failed[key] = "too deep"
        times: dict[Key, list[float]] = {key: [] for key in visits}
        order = list(times)
        for _ in range(rounds):
            random.shuffle(order)
            for key in order:
                times[key].append(statistics.median(self.steps[key]() for _ in range(visits[key])))
        return times


Costs = dict[str, dict[int, list[float] | str]]  # microseconds by contestant and size, one number per round


def beyond_the_work(
    shape: Callable[[Checkpoint, int], Function], sizes: tuple[int, ...], per_unit: int, rounds: int
) -> Costs:
    """Microseconds per unit (a saved tensor, a region of `per_unit` saved tensors) that exceed the work itself."""
    steps: dict[Key, Callable[[], float]] = {(WORK, n): partial(run_work, n * per_unit) for n in sizes}
    for name, checkpoint in checkpoints().items():
        for n in sizes:
            steps[name, n] = partial(run_step, shape(checkpoint, n))
    contest = Contest(steps)
    times = contest.run(rounds)
    costs: Costs = {name: {} for name in checkpoints()}
    for name, cost in costs.items():
        for n in sizes:
            cost[n] = contest.failed.get((name, n)) or [
                (whole - work) / n * 1e6 for whole, work in zip(times[name, n], times[WORK, n], strict=True)
            ]
    return costs


def per_call(depths: tuple[int, ...], rounds: int) -> tuple[Costs, dict[int, int]]:
    """Microseconds per executed call of the nested function, and recollect's number of those calls."""
    nests = {(name, depth): Nest(call, depth) for name, call in checkpoints().items() for depth in depths}
    contest = Contest({key: partial(run_step, nest) for key, nest in nests.items()})
    times = contest.run(rounds)
    costs: Costs = {name: {} for name in checkpoints()}
    calls: dict[int, int] = {}
    for (name, depth), nest in nests.items():
        if (name, depth) in contest.failed:
            costs[name][depth] = contest.failed[name, depth]
            continue
        nest.calls = 0
        run_step(nest)
        costs[name][depth] = [seconds / nest.calls * 1e6 for seconds in times[name, depth]]
        if name == "recollect":
            calls[depth] = nest.calls
    return costs, calls


# --- Showing ---


def cell(cost: list[float] | str) -> str:
    if isinstance(cost, str):
        return cost
    low, middle, high = statistics.quantiles(cost, n=4)
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


def show(title: str, costs: Costs, base: int) -> None:
    """One row per contestant; the last column is the largest size over `base`, median over median."""
    sizes = list(next(iter(costs.values())))
    rows = []
    for name, cost in costs.items():
        first, last = cost[base], cost[sizes[-1]]
        ratio = ""
        if not isinstance(first, str) and not isinstance(last, str):
            ratio = f"{statistics.median(last) / statistics.median(first):.2f}"
        rows.append([name, *map(cell, cost.values()), ratio])
    print_table([title, *(f"{size:,}" for size in sizes), f"{sizes[-1]:,} / {base:,}"], rows)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--gc", choices=("frozen", "on", "off"), default="frozen", help="the garbage collector")
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    if options.gc == "frozen":
        gc.freeze()
    elif options.gc == "off":
        gc.disable()

    tensors = beyond_the_work(one_region, (100, 1000, 10_000), 1, options.rounds)
    show("us per saved tensor, by tensors in one region", tensors, 100)
    regions = beyond_the_work(regions_in_a_row, (10, 100, 1000), PER_REGION, options.rounds)
    show(f"us per region of {PER_REGION} saved tensors, by regions in a row", regions, 100)
    nested, calls = per_call((1, 5, 10, 25, 50), options.rounds)
    show("us per executed call, by nesting depth", nested, 10)
    print("executed calls by depth:", ", ".join(f"{depth}: {number:,}" for depth, number in calls.items()))
    print(describe_machine())
    if options.json:
        result = {"tensors": tensors, "regions": regions, "nested": nested, "calls": calls}
        with open(options.json, "w") as file:
            json.dump({"machine": describe_machine(), "scaling": result}, file, indent=1)


if __name__ == "__main__":
    main()
