"""The charts of a report, as plain data that plotly.js draws: bytes over a step, time against memory, bytes by block.

Works on plain data as `Plan.to_dict` gives it, and takes what is there. A moment is drawn as two points, the bytes at
its beginning and the most until the next one: the line goes through all that was measured and through nothing else.

What this is not: it measures nothing, and makes no page (`_page.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from recollect._page import Figure, label
from recollect._sizes import human

Data = Mapping[str, Any]
# Decisions by their effect: how they are told apart in charts, and in words.
KINDS = {"keep": "kept", "part": "kept in part", "recompute": "recomputed", "offload": "offloaded"}
_LAYERS = 40  # blocks that can be told apart in one chart
_BARS = 32
_TICKS, _TICKS_NARROW = 4, 2  # in each half of a step
_TICK, _TICK_NARROW = 13, 6  # characters
_NAME, _NAME_NARROW = 34, 18
_WIDTHS = {"between": 0.35}  # a moment's share of the axis: little happens between two blocks


@dataclass(frozen=True)
class Group:
    """Blocks that are shown as one."""

    name: str
    short: str
    module: str
    choice: str
    kind: str
    blocks: tuple[int, ...]
    kept: int
    saved: int
    out: int

    @property
    def recomputed(self) -> int:
        return max(self.saved - self.kept - self.out, 0)


def kind_of(block: Data) -> str:
    """Which of `KINDS` a decision is."""
    choice = block.get("choice", "keep")
    if block.get("out"):
        return "offload"
    return choice if choice in ("keep", "recompute") else "part"


def name_of(block: Data) -> str:
    return str(block.get("name") or "the model")


def grouped(blocks: Sequence[Data], at_most: int) -> list[Group]:
    """Every block by itself or, if they are too many, together with its like: neighbours first, then all."""

    def alike(number: int) -> tuple[str, str]:
        return str(blocks[number].get("module", "")), str(blocks[number].get("choice", "keep"))

    runs = [[number] for number in range(len(blocks))]
    if len(runs) > at_most:
        runs = [list(run) for _, run in groupby(range(len(blocks)), key=alike)]
    if len(runs) > at_most:
        by_kind: dict[tuple[str, str], list[int]] = {}
        for number in range(len(blocks)):
            by_kind.setdefault(alike(number), []).append(number)
        runs = list(by_kind.values())
    names = _short_names(blocks)
    return [_group([blocks[number] for number in run], run, names) for run in runs]


def _short_names(blocks: Sequence[Data]) -> list[str]:
    """Names for an axis: `layers.3` where all are in `model.layers`."""
    parts = [name_of(block).split(".") for block in blocks]
    common = 0
    while all(len(one) > common + 2 for one in parts) and len({one[common] for one in parts}) == 1:
        common += 1
    return [".".join(one[common:]) for one in parts]


def _group(members: Sequence[Data], numbers: Sequence[int], names: Sequence[str]) -> Group:
    first, last = members[0], members[-1]
    is_run = numbers[-1] - numbers[0] == len(numbers) - 1
    name, short = name_of(first), names[numbers[0]]
    if len(members) > 1 and is_run:
        name, short = f"{name} … {name_of(last)} ({len(members)})", f"{short} … {names[numbers[-1]]}"
    elif len(members) > 1:
        name, short = f"{len(members)} {first.get('module', 'blocks')}", f"{len(members)} {KINDS[kind_of(first)]}"
    kept, saved, out = (sum(int(one.get(what) or 0) for one in members) for what in ("kept", "saved", "out"))
    choice = str(first.get("choice", "keep"))
    return Group(name, short, str(first.get("module", "")), choice, kind_of(first), tuple(numbers), kept, saved, out)


# --- Bytes over a step ---


@dataclass(frozen=True)
class Curve:
    """Bytes alive over a step: two points for each moment but the last."""

    at: list[float]
    bytes: list[int]
    moments: list[int]  # of each point


def names_by_call(blocks: Sequence[Data]) -> dict[int, int]:
    """The block that each call of a step belongs to; without that knowledge, each block is called once and in order."""
    if blocks and all(block.get("calls") for block in blocks):
        return {int(call): number for number, block in enumerate(blocks) for call in block["calls"]}
    return {number: number for number in range(len(blocks))}


def where(mark: Data, blocks: Sequence[Data]) -> str:
    """A moment in words."""
    what, call = str(mark.get("what", "")), mark.get("block")
    number = None if call is None else names_by_call(blocks).get(call)
    name = f"block {call}" if number is None else name_of(blocks[number])
    fixed = {"start": "what comes first", "loss": "the backward of the loss", "end": "the end of the step"}
    return fixed.get(what) or (f"what follows {name}" if what == "between" else f"the {what} of {name}")


def highest(marks: Sequence[Data]) -> Data:
    """The moment with the peak."""
    return max(marks, key=lambda mark: int(mark["peak"]))


def predicted_marks(plain: Sequence[Data], blocks: Sequence[Data]) -> Sequence[Data]:
    """The moments of a step under a plan that was not run: those of the plain one, less what is no longer held then."""
    less = [int(block.get("saved") or 0) - int(block.get("kept") or 0) for block in blocks]
    made = []
    for mark, held in zip(plain, _held(plain, blocks), strict=True):
        before = sum(less[number] * share for number, share in held.items())
        # When its backward begins, a block has everything again that it did without.
        own = names_by_call(blocks).get(mark["block"]) if mark.get("what") == "backward" else None
        during = before - (less[own] * held.get(own, 0.0) if own is not None else 0.0)
        made.append({**mark, "now": int(mark["now"] - before), "peak": int(mark["peak"] - during)})
    return made


def _held(marks: Sequence[Data], blocks: Sequence[Data]) -> list[dict[int, float]]:
    """For each moment, the blocks that hold what they keep, and what share of it: more than one call, more shares."""
    by_call = names_by_call(blocks)
    shares = {number: 1 / max(len(block.get("calls") or ()), 1) for number, block in enumerate(blocks)}
    now: dict[int, None] = {}
    over: int | None = None
    made = []
    for mark in marks:
        if over is not None:  # the backward that began with the moment before has ended
            now.pop(over, None)
        call = mark.get("block")
        if mark.get("what") == "between" and call in by_call:
            now[call] = None
        over = call if mark.get("what") == "backward" else None
        held: dict[int, float] = {}
        for one in now if mark.get("what") != "end" else ():
            held[by_call[one]] = held.get(by_call[one], 0.0) + shares[by_call[one]]
        made.append(held)
    return made


def _places(marks: Sequence[Data]) -> list[float]:
    places = [0.0]
    for mark in marks:
        places.append(places[-1] + _WIDTHS.get(str(mark.get("what")), 1.0))
    return places


def _curve(marks: Sequence[Data], length: float | None = None) -> Curve:
    """The line through all moments, stretched to a length."""
    places = _places(marks)
    scale = 1.0 if length is None or not places[-2] else length / places[-2]
    curve = Curve([], [], [])
    for number, mark in enumerate(marks):
        points = [(places[number], mark["now"])]
        if number < len(marks) - 1:
            points.append(((places[number] + places[number + 1]) / 2, mark["peak"]))
        for at, size in points:
            curve.at.append(round(at * scale, 4))
            curve.bytes.append(int(size))
            curve.moments.append(number)
    return curve


def step_chart(plain: Sequence[Data], marks: Sequence[Data], blocks: Sequence[Data], budget: int | None) -> Figure:
    """Bytes over a step, plain and planned, and what each block holds of them."""
    shown = marks or plain
    length = _places(shown)[-2] or 1.0
    unit = _unit([mark["peak"] for mark in (*plain, *marks)] + ([budget] if budget else []))
    data: list[Data] = []
    if marks:
        data += _layers(_curve(marks), marks, blocks, unit)
    for words, own, colour in (("plain", plain, "@plain"), ("planned", marks, "@planned")):
        if own:
            curve = _curve(own, length)
            tips = [
                f"{words}: {human(size)} {'at most in ' if number % 2 else 'at the beginning of '}"
                f"{label(where(own[moment], blocks), 60)}"
                for number, (size, moment) in enumerate(zip(curve.bytes, curve.moments, strict=True))
            ]
            data.append(_line(curve.at, [unit.of(size) for size in curve.bytes], tips, colour))
    layout = _layout(340)
    layout["yaxis"] |= {"title": {"text": unit.name}, "rangemode": "tozero"}
    layout["xaxis"] |= {"range": [0, length], "showgrid": False} | _ticks(shown, blocks, _TICKS, _TICK)
    _draw_budget(layout, budget, unit, "left", "above")
    loss = next((at for at, mark in zip(_places(shown), shown, strict=False) if mark.get("what") == "loss"), None)
    if loss is not None:
        line = {"type": "line", "x0": loss, "x1": loss, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"].append({**line, "layer": "below", "line": {"color": "@line", "width": 1}})
        for words, anchor, shift in (("← forward", "right", -8), ("backward →", "left", 8)):
            place = {"x": loss, "xanchor": anchor, "xshift": shift, "y": 1, "yref": "paper", "yanchor": "bottom"}
            layout["annotations"].append({**place, "text": words, **_QUIET})
    return {
        "data": data,
        "layout": layout,
        "narrow": {"xaxis": _ticks(shown, blocks, _TICKS_NARROW, _TICK_NARROW), "height": 320},
    }


def _layers(curve: Curve, marks: Sequence[Data], blocks: Sequence[Data], unit: _Unit) -> Iterator[Data]:
    """Areas on top of each other: what is always there, what each block holds, and the rest."""
    held = _held(marks, blocks)
    sizes = [int(block.get("kept") or 0) for block in blocks]
    kept = [sum(sizes[number] * share for number, share in held[moment].items()) for moment in curve.moments]
    always = max(min(total - own for total, own in zip(curve.bytes, kept, strict=True)), 0)
    yield _area(curve.at, [unit.of(always)] * len(curve.at), f"always there: {human(always)}", "@base")
    # Blocks were weighed one by one; where they add up to more than was alive, each gives way by the same share.
    room = [min(1.0, (total - always) / own) if own else 1.0 for total, own in zip(curve.bytes, kept, strict=True)]
    groups = [group for group in grouped(blocks, _LAYERS) if group.kept]
    for group in groups:
        values = [
            sum(sizes[number] * held[moment].get(number, 0.0) for number in group.blocks) * share
            for moment, share in zip(curve.moments, room, strict=True)
        ]
        of = f" of {human(group.saved)}" if group.saved != group.kept else ""
        words = f"{label(group.name, 60)}<br>{label(group.choice, 60)}<br>holds {human(group.kept)}{of}"
        yield _area(
            curve.at, [unit.of(value) for value in values], words, f"@{group.kind}", 1.0 if len(groups) <= 16 else 0.25
        )
    rest = [
        unit.of(max(total - always - own * share, 0)) for total, own, share in zip(curve.bytes, kept, room, strict=True)
    ]
    yield _area(curve.at, rest, "everything else:<br>gradients, and what is needed for the moment", "@rest")


def _ticks(marks: Sequence[Data], blocks: Sequence[Data], count: int, at_most: int) -> dict[str, Any]:
    by_call = names_by_call(blocks)
    places, names = _places(marks), _short_names(blocks)
    values, words = [], []
    for what in ("forward", "backward"):
        own = [number for number, mark in enumerate(marks) if mark.get("what") == what and mark["block"] in by_call]
        every = max(math.ceil(len(own) / count), 1)
        for number in own[every // 2 :: every]:
            values.append((places[number] + places[number + 1]) / 2)
            name = names[by_call[marks[number]["block"]]]
            words.append(label(name if len(name) <= at_most else name.rpartition(".")[2], at_most))
    return {"tickmode": "array", "tickangle": 0, "tickvals": values, "ticktext": words}


# --- Time against memory ---


def frontier_chart(
    points: Sequence[Data],
    plain: Data | None,
    predicted: Data | None,
    measured: Data | None,
    budget: int | None,
    tips: Sequence[str] = (),
) -> Figure:
    """Peaks and step times: of plans that no other beats, of the plain step, and of one plan, foretold and run."""
    marked = [one for one in (plain, predicted, measured) if one]
    unit = _unit([one["peak"] for one in (*points, *marked)] + ([budget] if budget else []))
    ordered = sorted(enumerate(points), key=lambda one: one[1]["peak"])

    def tip(one: Data, words: str) -> str:
        return f"{words}{'<br>' if words else ''}{human(one['peak'])}, {milliseconds(one['seconds'])}"

    texts = [tip(one, label(tips[number], 60) if tips else "") for number, one in ordered]
    line = _line([], [], texts, "@predicted")
    line |= {"x": [1e3 * one["seconds"] for _, one in ordered], "y": [unit.of(one["peak"]) for _, one in ordered]}
    line |= {"mode": "lines+markers", "marker": {"size": 8, "color": "@predicted"}}
    data = [line] if points else []
    layout = _layout(340)
    # What is better than the curve is empty, and so is what is worse: words stand there.
    above = {"xanchor": "left", "xshift": 9, "yanchor": "bottom"}
    below = {"xanchor": "right", "xshift": -9, "yanchor": "top"}
    for one, words, symbol, side in (
        (plain, "plain", "square", above),
        (predicted, "this plan, predicted" if measured else "this plan", "diamond-open", None if measured else below),
        (measured, "this plan", "diamond", below),
    ):
        if not one:
            continue
        x, y = 1e3 * one["seconds"], unit.of(one["peak"])
        colour = "@plain" if one is plain else "@planned"
        marker = {"size": 13, "color": colour, "symbol": symbol, "line": {"color": "@surface", "width": 1.5}}
        if symbol.endswith("open"):
            marker["line"] = {"color": colour, "width": 2}
        data.append(_line([x], [y], [tip(one, words)], colour) | {"mode": "markers", "marker": marker})
        if side:
            text = {"text": f"<b>{words}</b>", **side, **_QUIET, "font": {"color": "@ink", "size": 14}}
            layout["annotations"].append({"x": x, "y": y, **text})
    layout["yaxis"] |= {"title": {"text": f"peak, {unit.name}"}, "rangemode": "tozero"}
    layout["xaxis"] |= {"title": {"text": "step, ms"}}
    times = [1e3 * one["seconds"] for one in (*points, *marked)]
    if times:
        room = max(max(times) - min(times), 0.02 * max(times), 1e-6)
        layout["xaxis"]["range"] = [min(times) - 0.12 * room, max(times) + 0.12 * room]
    _draw_budget(layout, budget, unit, "right", "below")
    return {"data": data, "layout": layout, "narrow": {"height": 300}}


# --- Bytes by block ---


def bars_chart(blocks: Sequence[Data]) -> Figure:
    """For each block what it would hold: the part that stays, that leaves, and that is computed again."""
    groups = grouped(blocks, _BARS)
    unit = _unit([group.kept + group.out + group.recomputed for group in groups])
    places = list(range(len(groups)))
    data = []
    for words, sizes, colour in (
        ("held on the device", [group.kept for group in groups], "@keep"),
        ("offloaded", [group.out for group in groups], "@offload"),
        ("computed again", [group.recomputed for group in groups], "@recompute"),
    ):
        tips = [
            f"{label(group.name, 60)}<br>{label(group.choice, 60)}<br>{words}: {human(size)} of {human(group.saved)}"
            for group, size in zip(groups, sizes, strict=True)
        ]
        marker = {"color": colour, "line": {"color": "@surface", "width": 1}}
        data.append(
            {"type": "bar", "orientation": "h", "x": [unit.of(size) for size in sizes], "y": places, "marker": marker}
            | {"hovertext": tips, "hoverinfo": "text", "textposition": "none"}
        )
    height = 64 + 26 * max(len(groups), 1)
    layout = _layout(height)
    names = {"tickmode": "array", "tickvals": places}
    layout |= {"barmode": "stack", "bargap": 0.25}
    layout["margin"] |= {"t": 4}
    layout["xaxis"] |= {"title": {"text": unit.name}, "rangemode": "tozero"}
    layout["yaxis"] |= {**names, "ticktext": [f"{label(group.short, _NAME)} " for group in groups]}
    layout["yaxis"] |= {"range": [len(groups) - 0.5, -0.5], "showgrid": False}
    return {
        "data": data,
        "layout": layout,
        "narrow": {"yaxis": {"ticktext": [f"{label(group.short, _NAME_NARROW)} " for group in groups]}},
    }


# --- What they have in common ---

_QUIET: Data = {"showarrow": False, "font": {"color": "@muted", "size": 13}}


@dataclass(frozen=True)
class _Unit:
    name: str
    size: int

    def of(self, amount: float) -> float:
        return round(amount / self.size, 4)


def _unit(amounts: Iterable[float]) -> _Unit:
    """The unit that the largest of some amounts is said in."""
    most = max(amounts, default=0)
    units = [_Unit(name, 1024**power) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))]
    return max((one for one in units if one.size <= most), key=lambda one: one.size, default=units[0])


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _line(at: Sequence[float], values: Sequence[float], tips: Sequence[str], colour: str) -> dict[str, Any]:
    made = {"type": "scatter", "mode": "lines", "x": list(at), "y": list(values), "hovertext": list(tips)}
    return made | {"hoverinfo": "text", "line": {"color": colour, "width": 2}}


def _area(at: Sequence[float], values: Sequence[float], words: str, colour: str, gap: float = 0.0) -> Data:
    # One text for the whole area: it is the same wherever the pointer stands in it.
    made = {"type": "scatter", "mode": "lines", "x": list(at), "y": list(values), "stackgroup": "held", "text": words}
    line = {"color": "@surface", "width": gap}
    return made | {"hoveron": "fills", "hoverinfo": "text", "fillcolor": colour, "line": line}


def _layout(height: int) -> dict[str, Any]:
    axis = {"gridcolor": "@grid", "linecolor": "@line", "zeroline": False, "automargin": True}
    font = {"family": "system-ui, sans-serif", "size": 13}
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 26, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {**font, "color": "@muted"},
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "@surface",
            "bordercolor": "@line",
            "font": {**font, "color": "@ink"},
            "align": "left",
        },
        "showlegend": False,
        "xaxis": {**axis},
        "yaxis": {**axis},
        "shapes": [],
        "annotations": [],
    }


def _draw_budget(layout: dict[str, Any], budget: int | None, unit: _Unit, side: str, layer: str) -> None:
    if not budget:
        return
    at = unit.of(budget)
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at}
    layout["shapes"].append({**line, "layer": layer, "line": {"color": "@budget", "width": 2, "dash": "dash"}})
    words = {"xref": "paper", "x": int(side == "right"), "xanchor": side, "y": at, "yanchor": "bottom"}
    font = {"font": {"color": "@budget", "size": 13}, "bgcolor": "@surface", "borderpad": 1, "yshift": 2}
    layout["annotations"].append({**words, "text": f"budget {human(budget)}", **_QUIET, **font})
