"""A frontier as a picture: one file of HTML, with an SVG in it and nothing to load."""

from __future__ import annotations

import html
import math

from recollect._sizes import human
from recollect.fit import Frontier
from recollect.plan import Step

_WIDTH, _HEIGHT, _LEFT, _BELOW, _EDGE = 760, 420, 78, 56, 24
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 820px; margin: 2em auto; padding: 0 1em }
body { color: #1b1f24; background: #fff }
@media (prefers-color-scheme: dark) { body { color: #e6e8eb; background: #14171a } }
svg { width: 100%; height: auto }
text { font-size: 12px; fill: currentColor }
.grid { stroke: currentColor; opacity: .12 }
.line { fill: none; stroke: #2563eb; stroke-width: 2 }
.point { fill: #2563eb }
.plain { fill: #d97706 }
table { border-collapse: collapse }
td, th { padding: .15em 1em; text-align: right; font-variant-numeric: tabular-nums }
"""


def page(found: Frontier, name: str) -> str:
    """All of the file."""
    title = f"What memory costs in time: {name}"
    rows = "".join(f"<tr><td>{'<td>'.join(_words(one, found.plain))}" for one in (*found.points, found.plain))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{_picture(found)}"
        "<p>Blue: plans, predicted from one measured step. Orange: the plain step.</p>"
        f"<table><tr><th>peak<th>of plain<th>time<th>of plain{rows}</table></html>\n"
    )


def _words(one: Step, plain: Step) -> tuple[str, str, str, str]:
    seconds = f"{1e3 * one.seconds:,.1f} ms"
    return human(one.peak), f"{one.peak / plain.peak:.2f}", seconds, f"{one.seconds / (plain.seconds or 1):.2f}"


def _picture(found: Frontier) -> str:
    steps = (*found.points, found.plain)
    peaks, times = _ticks([one.peak for one in steps], 1024), _ticks([1e3 * one.seconds for one in steps], 10)

    def x(peak: float) -> float:
        return _LEFT + (peak - peaks[0]) / (peaks[-1] - peaks[0]) * (_WIDTH - _LEFT - _EDGE)

    def y(ms: float) -> float:
        return _HEIGHT - _BELOW - (ms - times[0]) / (times[-1] - times[0]) * (_HEIGHT - _BELOW - _EDGE)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="time over memory">']
    for peak in peaks:
        parts.append(f'<path class="grid" d="M{x(peak):.1f} {_EDGE}V{_HEIGHT - _BELOW}"/>')
        parts.append(f'<text x="{x(peak):.1f}" y="{_HEIGHT - _BELOW + 18}" text-anchor="middle">{human(peak)}</text>')
    for ms in times:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(ms):.1f}H{_WIDTH - _EDGE}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:,g} ms</text>')
    line = " ".join(f"{x(one.peak):.1f},{y(1e3 * one.seconds):.1f}" for one in found.points)
    parts.append(f'<polyline class="line" points="{line}"/>')
    for one in steps:
        kind = "plain" if one is found.plain else "point"
        told = ", ".join(_words(one, found.plain))
        parts.append(
            f'<circle class="{kind}" cx="{x(one.peak):.1f}" cy="{y(1e3 * one.seconds):.1f}" r="5">'
            f"<title>{kind}: {told}</title></circle>"
        )
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">bytes at the peak of a step</text></svg>'
    )
    return "".join(parts)


def _ticks(values: list[float], base: int) -> list[float]:
    """From zero to above the largest, in five steps or so, each a round number of its unit."""
    most = max(*values, 1e-9)
    unit = float(base ** math.floor(math.log(most, base))) if base == 1024 and most >= 1 else 1.0
    rough = most / unit / 5
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(one * power for one in (1, 2, 2.5, 5, 10) if one * power >= rough) * unit
    return [size * number for number in range(math.ceil(most / size) + 1)]
