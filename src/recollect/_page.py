"""A page that stands alone: one HTML file with its style, its script and its charts, which asks nobody for anything.

- Text is escaped here, and only here: `text` for HTML, `label` for what a chart shows, `_json` for data in a script.
- Colours have names (`@keep`), and the style sheet says what they are, for light and for dark. The script puts them
  into the charts, and again when the reader's scheme changes.
- A policy in the page itself forbids every load, so that it cannot come to need a network by mistake.

What this is not: it knows nothing about plans (`report.py`) and does not draw (`_charts.py`).
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recollect import _errors

Figure = Mapping[str, Any]


def text(value: object) -> str:
    """A value as HTML, whatever is in it."""
    return html.escape(str(value))


def label(value: object, at_most: int | None = None) -> str:
    """A value as text of a chart, which would read tags and formulas in it; the middle goes if it is too long."""
    whole = str(value)
    if at_most is not None and len(whole) > at_most:
        head = (at_most - 1) // 3
        whole = f"{whole[:head]}…{whole[head + 1 - at_most :]}"
    return html.escape(whole).replace("$", "&#36;")


def page(title: str, body: Sequence[str]) -> str:
    """A page with these sections; figures in them are drawn."""
    return _PAGE.format(
        title=text(title), style=_STYLE, library=_library(), body="\n".join(one for one in body if one), script=_SCRIPT
    )


def section(heading: str, *parts: str) -> str:
    """A part of a page under a heading, from pieces of HTML."""
    return "\n".join(["<section>", f"<h2>{text(heading)}</h2>", *(part for part in parts if part), "</section>"])


def chart(name: str, figure: Figure, caption: str, colours: Iterable[tuple[str, str]] = ()) -> str:
    """A chart with a caption that says in words what it shows, and the meaning of its colours: `(colour, words)`.

    A colour of a line is given as `-colour`.
    """
    legend = ""
    for colour, words in colours:
        shape = "line" if colour.startswith("-") else "area"
        legend += f'<li><i class="{shape}" style="--c:var(--{colour.lstrip("-")})"></i>{text(words)}</li>'
    height = int(figure["layout"]["height"])
    return (
        f"<figure>{f'<ul class=legend>{legend}</ul>' if legend else ''}"
        f'<div class="chart" id="{name}" role="img" aria-labelledby="{name}-caption" style="height:{height}px"></div>'
        f'<figcaption id="{name}-caption">{text(caption)}</figcaption>'
        f'<script type="application/json" data-chart="{name}">{_json(figure)}</script></figure>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], foot: Sequence[str] = (), *, words: int = 2) -> str:
    """A table of plain text; the first `words` columns hold words, the others numbers."""
    kinds = ["word" if number < words else "number" for number in range(len(head))]

    def row(cells: Sequence[str], tag: str) -> str:
        made = []
        for number, (cell, title, kind) in enumerate(zip(cells, head, kinds, strict=True)):
            is_name = tag == "td" and number == 0
            role, scope = ("rowheader", ' scope="row"') if is_name else ("cell", "")
            if tag == "th":
                role, scope = "columnheader", ' scope="col"'
            name = "th" if is_name else tag
            made.append(f'<{name} class="{kind}" role="{role}"{scope} data-title="{text(title)}">{text(cell)}</{name}>')
        return f'<tr role="row">{"".join(made)}</tr>'

    body = "\n".join(row(cells, "td") for cells in rows)
    end = f'<tfoot role="rowgroup">{row(foot, "td")}</tfoot>' if foot else ""
    return (
        f'<table role="table"><thead role="rowgroup">{row(head, "th")}</thead>'
        f'<tbody role="rowgroup">\n{body}\n</tbody>{end}</table>'
    )


def save(made: str, path: str | os.PathLike[str]) -> None:
    """Write a page to a file; a reader sees the old one or the new one, and a failure leaves nothing behind."""
    target = os.fspath(path)
    folder = os.path.dirname(target) or os.curdir
    if os.path.isdir(target):
        raise _errors.cannot_write_report(target, "it is a directory")
    if not os.path.isdir(folder):
        raise _errors.cannot_write_report(target, f"there is no directory {folder}")
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:  # names may be anything
            file.write(made)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def _json(value: Any) -> str:
    """Data inside of a script: nothing in it can end the script, or begin another."""
    made = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return made.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value


def _library() -> str:
    """plotly.js, as the package brings it along."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise _errors.missing_extra("a report", "plotly", "report") from error
    return str(get_plotlyjs())


# --- The page ---

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
<noscript><p class="note">The charts need JavaScript; the captions and the table say the same in words.</p></noscript>
</main>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""

# Okabe and Ito's palette, which the colour-blind can tell apart, darkened or lightened for contrast with the page.
_STYLE = """
:root {
  --page: #f6f7f9; --surface: #ffffff; --ink: #1b1f24; --muted: #57606a; --line: #d8dde3; --grid: #e6e9ed;
  --keep: #0072b2; --part: #00866a; --recompute: #cc8400; --offload: #b85c93;
  --base: #b3bbc4; --rest: #dde1e6; --plain: #6c7681; --planned: #1b1f24; --budget: #b3261e; --predicted: #0072b2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --surface: #171b21; --ink: #e8ebef; --muted: #a3adb8; --line: #333a43; --grid: #2a3038;
    --keep: #4ea9df; --part: #2fb796; --recompute: #e2a72e; --offload: #d58fb9;
    --base: #59626d; --rest: #363e48; --plain: #a3adb8; --planned: #f2f4f7; --budget: #ff8577; --predicted: #4ea9df;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; line-height: 1.3; margin: 0 0 12px; }
.facts { color: var(--muted); margin: 0 0 20px; }
.facts b { color: var(--ink); font-weight: 600; }
.badge { display: inline-block; border: 1px solid currentColor; border-radius: 99px; padding: 0 10px;
  font-size: 13px; color: var(--budget); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 12px; }
.card, section { background: var(--surface); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 14px 18px 16px; border-top: 4px solid var(--c); }
.card h2 { font-size: 14px; color: var(--muted); margin: 0; font-weight: 600; }
.card p { margin: 0; color: var(--muted); font-variant-numeric: tabular-nums; }
.card .big { color: var(--ink); font-size: 32px; line-height: 1.25; font-weight: 650; letter-spacing: -0.02em; }
.card p b { color: var(--ink); font-weight: 600; }
section { margin-top: 16px; padding: 18px 20px 20px; }
figure { margin: 0; }
figcaption { color: var(--muted); font-size: 15px; margin-top: 8px; max-width: 80ch; }
.chart { width: 100%; min-width: 0; overflow: hidden; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 0; margin: 0 0 6px;
  font-size: 14px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; background: var(--c);
  margin-right: 7px; vertical-align: -1px; }
.legend i.line { width: 16px; height: 3px; vertical-align: 4px; }
.note { color: var(--muted); margin: 0; }
ul.notes { margin: 0; padding-left: 20px; }
table { border-collapse: collapse; width: 100%; font-size: 15px; }
thead th { position: sticky; top: 0; background: var(--surface); color: var(--muted); font-weight: 600; font-size: 13px;
  text-align: left; box-shadow: inset 0 -1px var(--line); }
th, td { padding: 6px 16px 6px 0; vertical-align: top; font-weight: inherit; text-align: left; }
tbody tr + tr > *, tfoot tr > * { border-top: 1px solid var(--grid); }
tfoot { font-weight: 600; }
th.number, td.number, thead th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums;
  padding-right: 0; padding-left: 16px; }
tbody th { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 14px; }
@media (max-width: 640px) {
  main { padding: 20px 12px 40px; }
  h1 { font-size: 23px; }
  section { padding: 14px 12px 16px; }
  .cards { gap: 10px; }
  .card { padding: 10px 14px 12px; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody, tfoot { display: block; }
  tr { display: grid; grid-template-columns: repeat(auto-fit, minmax(72px, 1fr)); gap: 0 12px; padding: 8px 0;
    border-top: 1px solid var(--line); }
  tbody tr:first-child { border-top: 0; }
  tr > * { border: 0 !important; padding: 0 !important; }
  th.word, td.word { grid-column: 1 / -1; }
  th.number, td.number { text-align: left; }
  td.number::before { content: attr(data-title); display: block; color: var(--muted); font-size: 12px;
    font-weight: 400; }
}
@media print { section, .card { break-inside: avoid; } thead th { position: static; } }
"""

_SCRIPT = """
"use strict";
(function () {
  var narrow = function (box) { return box.clientWidth < 560; };
  var painted = function (value, key, colours) {
    if (Array.isArray(value)) { return value.map(function (one) { return painted(one, key, colours); }); }
    if (value !== null && typeof value === "object") {
      var made = {};
      Object.keys(value).forEach(function (name) { made[name] = painted(value[name], name, colours); });
      return made;
    }
    if (typeof value === "string" && value[0] === "@" && /color$/.test(key)) {
      return colours.getPropertyValue("--" + value.slice(1)).trim();
    }
    return value;
  };
  var merge = function (into, from) {
    Object.keys(from).forEach(function (name) {
      var both = [into[name], from[name]].every(function (one) {
        return one !== null && typeof one === "object" && !Array.isArray(one);
      });
      if (both) { merge(into[name], from[name]); } else { into[name] = from[name]; }
    });
  };
  var charts = Array.from(document.querySelectorAll("script[data-chart]")).map(function (source) {
    var box = document.getElementById(source.dataset.chart);
    return { box: box, figure: JSON.parse(source.textContent), was: null };
  });
  var draw = function (chart) {
    var figure = painted(chart.figure, "", getComputedStyle(document.documentElement));
    chart.was = narrow(chart.box);
    if (chart.was) { merge(figure.layout, figure.narrow || {}); }
    chart.box.style.height = figure.layout.height + "px";
    // A finger scrolls the page.
    if (window.matchMedia("(pointer: coarse)").matches) { figure.layout.dragmode = false; }
    Plotly.react(chart.box, figure.data, figure.layout, { displayModeBar: false, responsive: true });
  };
  charts.forEach(draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () { charts.forEach(draw); });
  window.addEventListener("resize", function () {
    charts.forEach(function (chart) { if (narrow(chart.box) !== chart.was) { draw(chart); } });
  });
})();
"""
