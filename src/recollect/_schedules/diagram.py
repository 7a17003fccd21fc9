"""A schedule as a small drawing for terminals. It draws what it is told, and judges nothing.

A short schedule is drawn in full: steps from left to right, and a row for every sweep, which ends where a state is
restored. A long one is summed up in three lines, each column standing for several steps. Plain ASCII; never more than
`WIDTH` columns and some `ROWS` rows, however long the schedule is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from textwrap import wrap

from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore
from recollect._schedules.simulator import Counts

WIDTH = 79
ROWS = 24
_MARGIN = 4
_COLUMNS = WIDTH - _MARGIN - 1
_MOST = "9"  # as a digit for how often a step is run: this often or more


def draw(
    actions: Iterable[Action],
    name: str,
    length: int,
    tiers: tuple[str, ...],
    slots: tuple[int | None, ...],
    counts: Counts,
) -> str:
    """The drawing, in lines."""
    title = _title(name, length, tiers, slots, counts)
    lines = [*(line for text in title for line in wrap(text, WIDTH)), ""]
    if 2 * length <= _COLUMNS:
        rows = [f"{number:>{_MARGIN - 1}} {row}" for number, row in enumerate(_rows(actions, length, len(tiers)), 1)]
        if len(rows) > ROWS:
            head = ROWS * 2 // 3
            tail = ROWS - head
            between = f"{'...':>{_MARGIN - 1}} {len(rows) - ROWS} more sweeps"
            rows = [*rows[:head], between, *rows[-tail:]]
        lines += [*rows, "", _legend(len(tiers))]
    else:
        lines += _summary(actions, length, len(tiers))
    return "\n".join(lines)


def _title(
    name: str, length: int, tiers: tuple[str, ...], slots: tuple[int | None, ...], counts: Counts
) -> Iterator[str]:
    yield f"{name}: {_of(length, 'step')}, {_of(counts.extra, 'extra forward')} ({counts.extra / length:.2f} per step)"
    used = []
    for tier, limit, peak in zip(tiers, slots, counts.peaks, strict=True):
        states = f"{peak:,} of {limit:,}" if limit is not None else f"{peak:,}"
        used.append(f"{states} kept" if len(tiers) == 1 else f"{tier} {states}")
    yield f"at most {', '.join(used)}; {_of(sum(counts.keeps), 'write')}, {_of(sum(counts.restores), 'read')}"
    if counts.bytes is not None:
        yield f"at most {_of(counts.bytes, 'byte')} in use"


def _of(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _legend(tiers: int) -> str:
    kept = "o kept" if tiers == 1 else f"0-{tiers - 1} kept (tier)"
    return f"{'':{_MARGIN}}{kept}  > run  # run, graph held  = graph held  < differentiated"


def _rows(actions: Iterable[Action], length: int, tiers: int) -> Iterator[str]:
    """A line per sweep: a character for every state, and one for every step after it."""
    kept: dict[int, set[int]] = {}
    held: set[int] = set()
    row = _Row(length)
    for action in actions:
        if isinstance(action, Restore):
            if row.ends:
                yield str(row)
                row = _Row(length)
                for state, its_tiers in kept.items():
                    row.state(state, _symbol(its_tiers, tiers))
                for step in held:
                    row.step(step, "=")
        elif isinstance(action, Forward):
            for step in range(action.start, action.stop):
                row.step(step, "#" if action.graph else ">")
                if step > action.start:
                    row.state(step, "-")
            if action.start not in kept:
                row.state(action.start, "-")
            if action.graph:
                held.add(action.start)
        elif isinstance(action, Keep):
            kept.setdefault(action.state, set()).add(action.tier)
            row.state(action.state, _symbol(kept[action.state], tiers))
        elif isinstance(action, Drop):
            kept[action.state].discard(action.tier)  # it stays in this row, at whose start it was there
            if not kept[action.state]:
                del kept[action.state]
        else:
            row.step(action.step, "<")
            if action.step not in held:
                row.state(action.step, "-")
            held.discard(action.step)
            row.ends = True
    yield str(row)


def _symbol(its_tiers: set[int], tiers: int) -> str:
    return "o" if tiers == 1 else str(min(its_tiers))


class _Row:
    """A sweep as characters."""

    def __init__(self, length: int) -> None:
        self._characters = [" "] * (2 * length)
        self.ends = False

    def state(self, state: int, character: str) -> None:
        if self._characters[2 * state] in " -":
            self._characters[2 * state] = character

    def step(self, step: int, character: str) -> None:
        self._characters[2 * step + 1] = character

    def __str__(self) -> str:
        return "".join(self._characters).rstrip()


def _summary(actions: Iterable[Action], length: int, tiers: int) -> list[str]:
    """What is kept when the forward ends, and how often steps are run."""
    columns = min(_COLUMNS - 1, length)
    changes = [0] * (length + 1)
    kept: dict[int, set[int]] = {}
    graphs: set[int] = set()
    held: set[int] = set()
    forward_ended = False
    for action in actions:
        if isinstance(action, Forward):
            changes[action.start] += 1
            changes[action.stop] -= 1
            if action.graph:
                graphs.add(action.start)
                if not forward_ended and action.stop < length:  # that of the last step is there always
                    held.add(action.start)
        elif isinstance(action, Backward):
            forward_ended = True
            if action.step not in graphs:
                changes[action.step] += 1
                changes[action.step + 1] -= 1
        elif forward_ended:
            continue
        elif isinstance(action, Keep):
            kept.setdefault(action.state, set()).add(action.tier)
        elif isinstance(action, Drop):
            kept[action.state].discard(action.tier)
            if not kept[action.state]:
                del kept[action.state]
    runs = list(accumulate(changes))
    states, times = [], []
    for column in range(columns):
        steps = range(column * length // columns, (column + 1) * length // columns)
        here = [_symbol(kept[step], tiers) for step in steps if step in kept]
        states.append(min(here) if here else "#" if any(step in held for step in steps) else ".")
        mean = (2 * sum(runs[step] for step in steps) + len(steps)) // (2 * len(steps))  # rounded, halves upwards
        times.append(str(mean) if mean < int(_MOST) else _MOST)
    margin = " " * _MARGIN
    kinds = "o" if tiers == 1 else f"0-{tiers - 1}: tier"
    return [
        f"{margin}kept when the forward ends ({kinds}; # graph), {_of(-(-length // columns), 'step')} a column:",
        margin + "".join(states),
        f"{margin}how often a step is run, on the average ({_MOST}: or more):",
        margin + "".join(times),
    ]
