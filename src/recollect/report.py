"""What a plan does, as a page to look at: one HTML file that needs no network.

The page is made from plain data, as `Plan.to_dict` gives it. Whatever is missing there is left out on the page, with a
word where a reader would look for it. `_charts.py` draws, `_page.py` is the page.

What this is not: nothing is measured or decided here.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recollect import _charts, _errors, _page
from recollect._charts import KINDS, kind_of, milliseconds, name_of
from recollect._page import text
from recollect._sizes import human

Data = Mapping[str, Any]


def write(plan_data: Data, path: str | os.PathLike[str]) -> None:
    """Write the page of a plan to a file.

    Args:
        plan_data: What `Plan.to_dict` gives.
        path: Of the file, which is replaced if it is there.

    Raises:
        ImportError: If plotly is not installed.
    """
    _page.save(html_of(plan_data), path)


def write_frontier(frontier_data: Data, path: str | os.PathLike[str]) -> None:
    """Write the page of a frontier to a file, given what `Frontier.to_dict` gives."""
    _page.save(html_of_frontier(frontier_data), path)


def html_of(plan_data: Data) -> str:
    """The page of a plan, given what `Plan.to_dict` gives."""
    if not isinstance(plan_data, Mapping):
        raise TypeError(f"plan_data must be what Plan.to_dict() gives, got {_errors.describe_value(plan_data)}")
    title = f"A plan for {_model(plan_data)}"
    return _page.page(
        title,
        [
            *_header(title, plan_data),
            _step_section(plan_data),
            _frontier_section(plan_data),
            _bars_section(plan_data),
            _table_section(plan_data),
            _notes_section(plan_data),
        ],
    )


def html_of_frontier(frontier_data: Data) -> str:
    """The page of a frontier, given what `Frontier.to_dict` gives."""
    if not isinstance(frontier_data, Mapping):
        got = _errors.describe_value(frontier_data)
        raise TypeError(f"frontier_data must be what Frontier.to_dict() gives, got {got}")
    plans = frontier_data.get("plans") or ()
    points, plain = frontier_data.get("points") or (), frontier_data.get("plain")
    about = plans[0] if plans else {}
    title = f"What memory costs in time, for {_model(about)}"
    decided = [_counted(plan.get("blocks") or ()) for plan in plans] if len(plans) == len(points) else []
    head = ("plan", "decisions", "peak", "of plain", "step", "of plain")
    rows = [
        (f"plan {number}", decided[number - 1] if decided else "", *_row(point, plain))
        for number, point in enumerate(points, 1)
    ]
    if plain:
        rows.append(("plain", "nothing is decided", *_row(plain, plain)))
    return _page.page(
        title,
        [
            f"<h1>{text(title)}</h1>",
            f'<p class="facts">{_facts(about)}</p>',
            _page.section(
                "Peak against time",
                _frontier_figure(points, plain, None, None, None, decided)
                if points
                else _nothing("There are no plans."),
            ),
            _page.section("The plans", _page.table(head, rows)) if rows else "",
        ],
    )


# --- The header ---


def _model(data: Data) -> str:
    return str(data.get("model") or "a model")


def _header(title: str, data: Data) -> Iterator[str]:
    yield f"<h1>{text(title)}</h1>"
    budget, gap = data.get("budget"), data.get("gap")
    goal = f"for a budget of <b>{human(budget)}</b>" if budget else "for the least memory within a time"
    facts = [_facts(data), goal]
    if isinstance(gap, (int, float)) and math.isfinite(gap):
        best = "the least that is possible" if gap <= 0 else f"at most {_percent(gap)} more than the least possible"
        facts.append(f"the time it adds is <b>{best}</b>, by its predictions")
    yield f'<p class="facts">{"; ".join(facts)}</p>'
    plain = data.get("plain")
    cards = [
        _card(words, data.get(name), None if name == "plain" else plain, colour, budget, missing)
        for name, words, colour, missing in (
            ("plain", "Plain", "plain", "not known"),
            ("predicted", "Predicted", "predicted", "not known"),
            ("measured", "Measured", "planned", "the plan was not run"),
        )
    ]
    yield f'<div class="cards">{"".join(cards)}</div>'


def _facts(data: Data) -> str:
    if not data.get("device"):
        return "Where it was made is not known"
    device = text(data["device"])
    if data.get("is_estimated"):
        return (
            f'<span class="badge">estimated</span> Nothing was run: times are those of a GPU on paper (<b>{device}</b>)'
        )
    return f"Measured on <b>{device}</b>"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def _ratio(one: Data, plain: Data | None, what: str) -> str:
    if not plain or not plain.get(what):
        return ""
    return f"{one[what] / plain[what]:.2f}"


def _card(title: str, one: Data | None, plain: Data | None, colour: str, budget: int | None, missing: str) -> str:
    lines = [f"<h2>{text(title)}</h2>"]
    if one is None:
        lines += ['<p class="big" aria-hidden="true">&ndash;</p>', f"<p>{text(missing)}</p>"]
    else:
        memory, time = (_ratio(one, plain, what) for what in ("peak", "seconds"))
        peak = f"<b>{memory}&times;</b> plain, at its peak" if memory else "at its peak"
        step = f", <b>{time}&times;</b> plain" if time else ""
        lines.append(f'<p class="big">{human(one["peak"])}</p>')
        lines.append(f"<p>{peak}</p>")
        lines.append(f"<p><b>{milliseconds(one['seconds'])}</b> a step{step}</p>")
        if budget:
            lines.append(f"<p>{_against(int(one['peak']), budget)}</p>")
    return f'<div class="card" style="--c:var(--{colour})">{"".join(lines)}</div>'


def _against(peak: int, budget: int) -> str:
    if peak == budget:
        return "exactly the budget"
    return f"{human(abs(budget - peak))} {'below' if peak < budget else 'above'} the budget"


# --- Sections ---


def _nothing(why: str) -> str:
    return f'<p class="note">{text(why)}</p>'


def _step_section(data: Data) -> str:
    heading = "Bytes alive over one step"
    blocks, budget = data.get("blocks") or (), data.get("budget")
    plain, marks = data.get("plain_marks") or (), data.get("marks") or ()
    if not plain and not marks:
        return _page.section(heading, _nothing("No step was weighed moment by moment."))
    is_predicted = not marks and bool(blocks)
    shown = _charts.predicted_marks(plain, blocks) if is_predicted else marks
    sentences = []
    if plain:
        top = _charts.highest(plain)
        sentences.append(f"Plain, the step peaks at {human(top['peak'])}, in {_charts.where(top, blocks)}.")
    if marks:
        top = _charts.highest(marks)
        limit = f": {_against(top['peak'], budget)} of {human(budget)}" if budget else ""
        sentences.append(f"Under the plan it peaks at {human(top['peak'])}, in {_charts.where(top, blocks)}{limit}.")
    elif shown:
        sentences.append("The plan was not run: its line is the plain one, less what blocks no longer hold.")
    there = dict.fromkeys(kind_of(block) for block in blocks if block.get("kept"))
    legend = [("-plain", "plain")] if plain else []
    if shown:
        legend.append(("-planned", "under the plan"))
        legend += [(kind, f"blocks that are {words}") for kind, words in KINDS.items() if kind in there]
        legend += [("base", "always there"), ("rest", "everything else")]
    figure = _charts.step_chart(plain, shown, blocks, budget)
    return _page.section(heading, _page.chart("step", figure, " ".join(sentences), legend))


def _frontier_section(data: Data) -> str:
    points = data.get("frontier") or ()
    heading = "What memory costs in time"
    if not points:
        return _page.section(heading, _nothing("No other plans were looked at."))
    plain, predicted, measured = (data.get(name) for name in ("plain", "predicted", "measured"))
    figure = _frontier_figure(points, plain, predicted, measured, data.get("budget"), ())
    return _page.section(heading, figure)


def _frontier_figure(
    points: Sequence[Data],
    plain: Data | None,
    predicted: Data | None,
    measured: Data | None,
    budget: int | None,
    tips: Sequence[str],
) -> str:
    least = min(points, key=lambda one: (one["peak"], one["seconds"]))
    fastest = min(points, key=lambda one: (one["seconds"], one["peak"]))
    sentences = [
        f"{'One plan' if len(points) == 1 else f'{len(points)} plans'} that no other beats by the predictions, from "
        f"{_in_words(least)} to {_in_words(fastest)}."
    ]
    legend = [("predicted", "plans, predicted")]
    if plain:
        legend.append(("plain", "the plain step"))
        sentences.append(f"The plain step: {_in_words(plain)}.")
    if predicted or measured:
        said = [f"{_in_words(one)} {how}" for one, how in ((predicted, "predicted"), (measured, "measured")) if one]
        legend.append(
            ("planned", "this plan, predicted (hollow) and measured" if measured and predicted else "this plan")
        )
        sentences.append(f"This plan: {', '.join(said)}.")
    figure = _charts.frontier_chart(points, plain, predicted, measured, budget, tips)
    return _page.chart("frontier", figure, " ".join(sentences), legend)


def _in_words(step: Data) -> str:
    return f"{human(step['peak'])} in {milliseconds(step['seconds'])}"


def _bars_section(data: Data) -> str:
    heading = "What becomes of what blocks save"
    blocks = data.get("blocks") or ()
    if not blocks:
        return _page.section(heading, _nothing("The plan decides about no block."))
    groups = _charts.grouped(blocks, len(blocks))
    saved, kept, out, again = (
        sum(getattr(group, what) for group in groups) for what in ("saved", "kept", "out", "recomputed")
    )
    caption = (
        f"Of {human(saved)} that {_counted_blocks(len(blocks))} would hold, {human(kept)} stay on the device, "
        f"{human(out)} leave it and come back, and {human(again)} are computed again."
    )
    legend = [
        (colour, words)
        for colour, words, size in (
            ("keep", "held on the device", kept),
            ("offload", "offloaded", out),
            ("recompute", "computed again", again),
        )
        if size
    ]
    return _page.section(heading, _page.chart("blocks", _charts.bars_chart(blocks), caption, legend))


def _table_section(data: Data) -> str:
    blocks = data.get("blocks") or ()
    if not blocks:
        return ""
    kept, saved = (sum(int(block.get(what) or 0) for block in blocks) for what in ("kept", "saved"))
    seconds = sum(float(block.get("seconds") or 0) for block in blocks)
    rows = [
        (
            name_of(block),
            str(block.get("choice", "keep")),
            human(block.get("kept") or 0),
            human(block.get("saved") or 0),
            milliseconds(block.get("seconds") or 0),
        )
        for block in blocks
    ]
    head = ("module", "decision", "held", "of", "time added")
    foot = ("all", _counted(blocks), human(kept), human(saved), milliseconds(seconds))
    return _page.section("The plan", _page.table(head, rows, foot))


def _notes_section(data: Data) -> str:
    notes = data.get("notes") or ()
    listed = "".join(f"<li>{text(note)}</li>" for note in notes)
    return _page.section("Notes", f'<ul class="notes">{listed}</ul>') if notes else ""


def _counted(blocks: Sequence[Data]) -> str:
    """How many blocks are decided in which way."""
    counts = Counter(kind_of(block) for block in blocks)
    return ", ".join(f"{counts[kind]} {words}" for kind, words in KINDS.items() if counts[kind])


def _counted_blocks(count: int) -> str:
    return "one block" if count == 1 else f"{count} blocks"


def _row(point: Data, plain: Data | None) -> tuple[str, str, str, str]:
    return (
        human(point["peak"]),
        _ratio(point, plain, "peak"),
        milliseconds(point["seconds"]),
        _ratio(point, plain, "seconds"),
    )
