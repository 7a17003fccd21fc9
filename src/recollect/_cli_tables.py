"""Results for people: tables, which become lists where a terminal is too narrow for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from recollect._check import Comparison
from recollect._sizes import human
from recollect.explain import Explanation, Row
from recollect.fit import Frontier
from recollect.plan import HEADINGS, Plan, Step

_READABLE = 14  # a column of words in fewer characters is hard on the eyes


def _table(*headings: str, numbers: Iterable[int] = (), title: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        right = number in numbers
        # Words may be folded, numbers never.
        table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def fitted(table: Table, width: int) -> Table | str:
    """The table, or its rows one below the other if its words would be broken into pieces."""
    needed = 0
    for column in table.columns:
        longest = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
        needed += 3 + (longest if column.no_wrap else min(longest, _READABLE))
    if needed <= width:
        return table
    lines = []
    names, *others = table.columns
    rows = zip(*(column.cells for column in others), strict=True)
    for name, cells in zip(names.cells, rows, strict=True):
        lines.append(f"{names.header or ''} {name}".strip())
        lines += [f"  {column.header} {cell}" for column, cell in zip(others, cells, strict=True) if str(cell)]
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """`12.3 ms`."""
    return f"{1e3 * seconds:,.1f} ms"


def _times(one: float, other: float) -> str:
    return f"{one / other:.2f} x" if other else "-"


# --- Plans ---


def decisions(plan: Plan) -> Table:
    """What is decided; blocks that stand together and are treated alike in one row."""
    table = _table(*HEADINGS, numbers=(2, 3, 4))
    for cells in plan.rows():
        table.add_row(*cells)
    return table


def steps(named: Iterable[tuple[str, Step]]) -> Table:
    """Steps beside the first of them."""
    table = _table("step", "peak", "of plain", "time", "of plain", numbers=(1, 2, 3, 4))
    (name, plain), *rest = named
    table.add_row(name, human(plain.peak), "", milliseconds(plain.seconds), "")
    for name, one in rest:
        table.add_row(
            name,
            human(one.peak),
            _times(one.peak, plain.peak),
            milliseconds(one.seconds),
            _times(one.seconds, plain.seconds),
        )
    return table


def frontier(found: Frontier) -> Table:
    """From the least memory to the least time."""
    table = _table("peak", "of plain", "time", "of plain", "", numbers=(0, 1, 2, 3))
    plain = found.plain
    for point, name in (*((point, "") for point in found.points), (plain, " plain")):
        bar = Text("▇" * max(round(20 * point.peak / plain.peak), 1), style="cyan")
        table.add_row(
            human(point.peak),
            _times(point.peak, plain.peak),
            milliseconds(point.seconds),
            _times(point.seconds, plain.seconds),
            bar + Text(name),
        )
    return table


# --- What autograd saves ---


@dataclass(frozen=True)
class Group:
    """Rows that differ by nothing but the number of a layer."""

    bytes: int
    rows: tuple[Row, ...]
    module: str

    @property
    def first(self) -> Row:
        """One for all."""
        return self.rows[0]


def groups(found: Explanation) -> list[Group]:
    """What is saved, the most first. Parameters are there anyway, and left out."""
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in found.rows:
        if row.decision != "parameter":
            module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.module)
            alike.setdefault((row.operator, module, row.shape, row.dtype, row.line, row.decision), []).append(row)
    made = [Group(sum(row.bytes for row in rows), tuple(rows), _pattern(rows)) for rows in alike.values()]
    return sorted(made, key=lambda group: -group.bytes)


def _pattern(rows: Sequence[Row]) -> str:
    """`GPT.blocks.*.mlp.1`: a star for numbers that differ."""
    parts = zip(*(row.module.split(".") for row in rows), strict=True)
    return ".".join(names[0] if len(set(names)) == 1 else "*" for names in parts)


def saved(found: Explanation, top: int, shorten: str) -> Table:
    """The largest groups."""
    table = _table("bytes", "each", "shape", "dtype", "operator", "module", "line", numbers=(0, 1))
    for group in groups(found)[:top]:
        row, count = group.first, len(group.rows)
        table.add_row(
            human(group.bytes),
            human(row.bytes) if count == 1 else f"{count} x {human(row.bytes)}",
            str(list(row.shape)),
            row.dtype,
            row.operator.removesuffix(".default"),
            f"{group.module or '-'}{'' if row.decision == 'recomputed' else f' ({row.decision})'}",
            row.line.removeprefix(shorten) or "-",
        )
    return table


# --- The check ---


def verdict(found: Comparison) -> list[Text]:
    """In words: is it the same, and does it fit?"""
    yes, no = ("yes", "bold green"), ("no", "bold red")
    lines = [
        Text.assemble("gradients equal, bit for bit: ", no if found.different else yes),
        Text(f"loss {found.loss[0]:.9g} plain, {found.loss[1]:.9g} planned; {found.compared} tensors compared"),
    ]
    if found.different:
        more = f" and {len(found.different) - 3} more" if len(found.different) > 3 else ""
        lines.append(Text(f"not equal: {', '.join(found.different[:3])}{more}"))
        if found.repeats_itself is False:
            lines.append(
                Text("two plain steps differ as well: the step itself is not deterministic, and this says nothing")
            )
    if found.budget is not None:
        lines.append(
            Text.assemble(f"within the budget of {human(found.budget)}: ", yes if found.is_within_budget else no)
        )
    return lines


# --- The doctor ---


def findings(found: dict[str, Any]) -> list[Table | str]:
    """What is there, and what to do about what is not."""
    torch = found["torch"]
    cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
    wanted = f", of {torch['wanted']}" if torch["wanted"] else ""
    versions = f"recollect {found['recollect']}, Python {found['python']}, torch {torch['version']} ({cuda}{wanted})"

    extras = _table("extra", "", "for")
    for name, extra in found["extras"].items():
        missing = [package for package, version in extra["packages"].items() if version is None]
        there = ", ".join(f"{package} {version}" for package, version in extra["packages"].items() if version)
        state = Text(f"{there}", style="green")
        if missing:
            state = Text(f"no {', no '.join(missing)}: pip install 'recollect[{name}]'", style="yellow")
        extras.add_row(name, state, extra["for"])

    devices = _table("device", "name", "memory", "free", "to the host", "back", numbers=(2, 3, 4, 5))
    for device in found["devices"]:
        amounts = ["-" if device.get(key) is None else human(device[key]) for key in ("memory", "free")]
        speeds = ["-" if device.get(key) is None else f"{human(device[key])}/s" for key in ("to_host", "from_host")]
        name = device["name"] + (f": {device['error']}" if "error" in device else "")
        devices.add_row(device["device"], name, *amounts, *speeds)

    features = _table("not in every torch", "")
    for feature in found["features"]:
        state = Text("there", style="green")
        if not feature["there"]:
            state = Text(f"missing: {feature['without']}", style="yellow")
        features.add_row(feature["name"], state)

    lines = []
    for one in found["variables"]:
        close = f": did you mean {one['close'][0]}?" if one["close"] else ""
        lines.append(f"{one['name']}={one['value']}" + ("" if one["known"] else f" (nobody reads it{close})"))
    return [versions, extras, devices, features, *(lines or ["no environment variables of recollect are set"])]
