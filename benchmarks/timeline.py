"""How do the bytes alive develop over one training step? Draws the picture of the README.

A transformer of 12 blocks, once plain and once with every block a region: bytes alive after each operator of
forward and backward, counted as in memory.py. Every contestant has its own number of operators, so each line goes
from the first to the last of its own.

    python benchmarks/timeline.py [--svg docs/memory.svg]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from memory import MIB, StorageTracker, plainly, transformer
from peers import describe_machine, print_table
from recollect import dropin

BLOCKS = 12
COLOURS = {"plain": "#8b95a1", "recollect": "#1f7a5c"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 300, 64, 34, 40


class Timeline(StorageTracker):
    """Bytes alive after every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.points.append(self.alive)
        return result


def measure(checkpoint: Callable[..., Any]) -> tuple[list[int], int]:
    """Bytes alive after every operator, and how many operators belong to the forward."""
    torch.manual_seed(0)
    forward = transformer(checkpoint, BLOCKS)
    with Timeline() as timeline:
        loss = forward()
        in_forward = len(timeline.points)
        loss.backward()
    return timeline.points, in_forward


def path(points: Sequence[int], top: int) -> str:
    """An SVG path over the whole width; as many points as there are pixels are enough."""
    step = max(1, len(points) // WIDTH)
    kept = [max(points[i : i + step]) for i in range(0, len(points), step)]
    x = [LEFT + (WIDTH - LEFT - 12) * i / (len(kept) - 1) for i in range(len(kept))]
    y = [HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top for value in kept]
    return "M" + " L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def draw(lines: dict[str, list[int]]) -> str:
    top = max(max(points) for points in lines.values())
    base = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        '     font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" fill="#222">Bytes alive over one training step, {BLOCKS} transformer blocks</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = base - (base - TOP) * share
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e6e8"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{top * share / MIB:.0f} MiB</text>'
        )
    for number, (name, points) in enumerate(lines.items()):
        line, colour = path(points, top), COLOURS[name]
        area = f"{line} L{WIDTH - 12} {base} L{LEFT} {base} Z"
        parts.append(f'<path d="{area}" fill="{colour}" fill-opacity="0.18"/>')
        parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x = LEFT + 20 + number * 220
        parts.append(f'<rect x="{x}" y="{HEIGHT - 22}" width="12" height="12" fill="{colour}"/>')
        label = f"{name}: peak {max(points) / MIB:.1f} MiB"
        parts.append(f'<text x="{x + 18}" y="{HEIGHT - 12}" fill="#222">{label}</text>')
    parts.append(
        f'<text x="{WIDTH - 12}" y="{HEIGHT - 12}" text-anchor="end" fill="#555">forward, then backward</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", help="write the picture to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = {
        "plain": measure(plainly),
        "recollect": measure(partial(dropin.checkpoint, use_reentrant=False)),
    }
    rows = [
        [name, f"{points[in_forward - 1] / MIB:.1f}", f"{max(points) / MIB:.1f}", f"{len(points):,}"]
        for name, (points, in_forward) in measured.items()
    ]
    print_table(["", "MiB alive after the forward", "MiB at the peak", "operators"], rows)
    print(describe_machine())
    if options.svg:
        with open(options.svg, "w") as file:
            file.write(draw({name: points for name, (points, _) in measured.items()}))


if __name__ == "__main__":
    main()
