"""How long does it take to choose for every block, and how good is the answer?

Made-up models: layers that can be kept, recomputed, or recomputed in part, with more and more ways to do so, and with
offloading. "Alike" layers are the same but for the gradients that are alive in their backward, others differ in all
their sizes. Three budgets each, between the least peak there is and that of keeping everything; the table has the
slowest of the three, in time of the process on a core because others may use the machine too, and the largest gap that
was left open. The peers are what people do by hand: one choice for all
layers, every k-th layer kept, and the best step at a time, by seconds saved per byte.

    python benchmarks/solver.py [--most 1000]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from peers import describe_machine, print_table, version_of
from recollect import _solver
from recollect._problem import solution
from recollect._solver import Block, Choice, Link, Moment, Problem

GIB = 2**30
SHARES = (0.1, 0.4, 0.7)
CHAINS = ((24, 8), (100, 12), (200, 8), (1000, 12))
OFFLOADING = ((32, 8), (200, 8))


def layer(generator: random.Random, ways: int, *, offloading: bool) -> tuple[tuple[Choice, ...], float]:
    """Ways to treat a layer, the first keeps everything, the last nothing but its input; and its forward's seconds."""
    full = generator.randint(200, 400) * 2**20
    seconds = 0.004 * full / 2**28
    staying = ways // 2 if offloading else ways
    choices = []
    for way in range(staying):
        share = way / (staying - 1)
        kept = max(int(full * (1 - share) * generator.uniform(0.95, 1.0)), full // 20)
        choices.append(Choice(seconds * share**1.5, kept, full // 2 + kept // 2, full + full // 4))
    for way in range(ways - staying):
        like = choices[way]
        choices.append(replace(like, kept=0, forward=like.forward + like.kept // 4, out=like.kept))
    return tuple(choices), seconds


def problem(count: int, ways: int, *, alike: bool, offloading: bool = False) -> Problem:
    generator = random.Random(count * ways)
    layers = [layer(generator, ways, offloading=offloading) for _ in range(1 if alike else count)] * (
        count if alike else 1
    )
    blocks = tuple(
        Block(
            choices,
            base_forward=10 * GIB,
            base_backward=10 * GIB + (count - i) * 50 * 2**20,
            forward_seconds=seconds,
            backward_seconds=2 * seconds,
            name=f"layers.{i}",
            kind=0 if alike else None,
        )
        for i, (choices, seconds) in enumerate(layers)
    )
    link = Link(20e9, 20e9) if offloading else None
    return Problem(blocks, (Moment(11 * GIB, count, "loss"),), link=link, host_bytes=64 * GIB)


def by_hand(given: Problem, budget: int) -> Iterator[list[int]]:
    """What fits of: one choice for all, every k-th kept, one step after the other."""
    count, ways = len(given.blocks), len(given.blocks[0].choices)
    stays = [k for k in range(ways) if not given.blocks[0].choices[k].out]
    simple = [[k] * count for k in stays]
    simple += [[0 if i % every == 0 else stays[-1] for i in range(count)] for every in range(2, 10)]
    yield from (chosen for chosen in simple if _solver.peak(given, chosen)[0] <= budget)
    chosen = [stays[-1]] * count
    steps = sorted(
        (
            ((block.choices[stays[-1]].seconds - block.choices[k].seconds) / max(block.choices[k].kept, 1), i, k)
            for i, block in enumerate(given.blocks)
            for k in stays[:-1]
        ),
        reverse=True,
    )
    for _, i, k in steps:
        tried = [*chosen[:i], k, *chosen[i + 1 :]]
        faster = given.blocks[i].choices[k].seconds < given.blocks[i].choices[chosen[i]].seconds
        if faster and _solver.peak(given, tried)[0] <= budget:
            chosen = tried
    if _solver.peak(given, chosen)[0] <= budget:
        yield chosen


def row(given: Problem, *, what: str) -> list[str]:
    low = _solver.smallest(given).peak
    high = _solver.peak(given, [0] * len(given.blocks))[0]
    took, gap, ratio = 0.0, 0.0, 0.0
    for share in SHARES:
        budget = int(low + (high - low) * share)
        start = time.process_time()
        found = _solver.solve(given, budget)
        took = max(took, time.process_time() - start)
        gap = max(gap, found.gap)
        others = [solution(given, chosen, 0.0).seconds for chosen in by_hand(given, budget)]
        if others and found.seconds:
            ratio = max(ratio, min(others) / found.seconds)
    choices = len(given.blocks[0].choices)
    best = f"{ratio:.2f}" if ratio else "none fits"
    return [what, str(len(given.blocks)), str(choices), f"{took:.3f}", f"{gap:.2%}", best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1000, help="leave out models of more layers")
    most = parser.parse_args().most
    torch.set_num_threads(1)
    print(f"{describe_machine()}, scipy {version_of('scipy')}\n")
    rows = [
        row(problem(count, ways, alike=alike), what=f"chain, {'alike' if alike else 'all different'}")
        for count, ways in CHAINS
        if count <= most
        for alike in (True, False)
    ]
    for count, ways in OFFLOADING:
        if count <= most and version_of("scipy") != "not installed":
            for alike in (True, False):
                given = problem(count, ways, alike=alike, offloading=True)
                rows.append(row(given, what=f"offloading, {'alike' if alike else 'all different'}"))
    given = problem(24, 8, alike=False)
    rows.append(row(replace(given, tied=((0, 12), (3, 15), (5, 20))), what="three tied pairs"))
    print_table(["layers", "number", "choices each", "s, slowest", "gap, largest", "best by hand / solver"], rows)
    start = time.process_time()
    points = _solver.frontier(problem(100, 12, alike=True))
    print(
        f"\nfrontier of 100 alike layers with 12 choices: {len(points)} points in {time.process_time() - start:.2f} s"
    )


if __name__ == "__main__":
    main()
