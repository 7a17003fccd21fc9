"""A plan: a decision for each block of a model, made from a profile and a budget. Plain data, fit for a file.

What this is not: nothing is measured here, and nothing is run. `fit.py` makes plans and holds them to their word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch.nn import Module

from recollect import _errors, report
from recollect._bench import Mark
from recollect._plan_data import encode, read
from recollect._sizes import human
from recollect._tried import by_module, full_names
from recollect.modules import Handle, apply
from recollect.policy import Decision, Offload, Recompute
from recollect.profile import Profile

_VERSION = 1
# Bytes that nobody has: the plan knows how much is on its way, so all of it may be at once. The same number in all
# plans, because every kind of `Offload` has memory, files and threads of its own for as long as the process lives.
_UNBOUNDED = 2**50


@dataclass(frozen=True)
class Step:
    """What a step takes: bytes at its peak, and seconds."""

    peak: int
    seconds: float


@dataclass(frozen=True)
class Planned:
    """What a plan decides about one block.

    Attributes:
        name: Of the module.
        module: Its class.
        choice: The decision in words.
        decisions: By full names of modules.
        kept: Bytes that it holds from its forward to its backward.
        saved: What it would hold if it were kept.
        seconds: What the decision adds to a step.
        out: Bytes that go to the host and come back.
        calls: Which calls of the step are its own; the `block` of a mark is the number of a call.
    """

    name: str
    module: str
    choice: str
    decisions: Mapping[str, Decision]
    kept: int
    saved: int
    seconds: float
    out: int = 0
    calls: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Decisions for the blocks of a model. Print it, `apply` it, `save` it, look at its `report`.

    Attributes:
        model: The class that it is for.
        shapes: Of the model's parameters, by name: it is for no other.
        device: Where it was measured.
        budget: Bytes that a step may have at its peak, None if the plan was made for a time.
        blocks: What is decided.
        plain: A step without any decisions; predicted if it did not fit.
        predicted: A step under the plan, before it was run.
        measured: The same, run; None if it was not.
        gap: By what share the time that is added may be longer than the shortest possible, by these predictions.
        is_estimated: Whether nothing was run, and times are those of a GPU on paper.
        frontier: Other plans: their peaks and times, predicted.
        plain_marks: The moments of a step without decisions, if there was one.
        marks: The moments of a step under the plan.
        notes: What there is to say about it.
    """

    model: str
    shapes: Mapping[str, tuple[int, ...]]
    device: str
    budget: int | None
    blocks: tuple[Planned, ...]
    plain: Step
    predicted: Step
    measured: Step | None
    gap: float
    is_estimated: bool
    frontier: tuple[Step, ...] = ()
    plain_marks: tuple[Mark, ...] = ()
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()

    def decisions(self) -> dict[str, Decision]:
        """By names of modules, as `recollect.apply` takes them."""
        return {name: decision for block in self.blocks for name, decision in block.decisions.items()}

    def apply(self, model: Module, **options: Any) -> Handle:
        """Have a model decided by the plan.

        Args:
            model: The model that the plan was made for, or one with the same modules and parameters.
            **options: As for `recollect.apply`.

        Returns:
            The handle of `recollect.apply`.
        """
        if not isinstance(model, Module):
            raise TypeError(f"model must be a torch.nn.Module, got {_errors.describe_value(model)}")
        self._check(model)
        decisions = self.decisions()
        if not decisions:
            return Handle(model, [], [])
        there = {name for name, _ in model.named_modules(remove_duplicate=False)}
        missing = [name for name in decisions if name not in there]
        if missing:
            raise _errors.plan_of_another_model(self.model, [f"has no module {name}" for name in missing])
        return apply(model, by_module(model, decisions, f"the plan for {self.model}"), **options)

    def _check(self, model: Module) -> None:
        now = shapes_of(model)
        differences = [
            *(f"has no parameter {name} {list(shape)}" for name, shape in self.shapes.items() if name not in now),
            *(
                f"has a parameter {name} {list(shape)} besides"
                for name, shape in now.items()
                if name not in self.shapes
            ),
            *(
                f"has {name} of shape {list(now[name])} instead of {list(shape)}"
                for name, shape in self.shapes.items()
                if name in now and now[name] != tuple(shape)
            ),
        ]
        if differences:
            raise _errors.plan_of_another_model(self.model, differences)

    # --- As data ---

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers, fit for JSON."""
        made = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        made["version"] = _VERSION
        made["shapes"] = {name: list(shape) for name, shape in self.shapes.items()}
        made["blocks"] = [
            {
                **{field.name: getattr(block, field.name) for field in dataclasses.fields(block)},
                "decisions": {name: encode(decision) for name, decision in block.decisions.items()},
                "calls": list(block.calls),
            }
            for block in self.blocks
        ]
        for name in ("plain", "predicted", "measured"):
            one = getattr(self, name)
            made[name] = None if one is None else dataclasses.asdict(one)
        for name in ("frontier", "plain_marks", "marks"):
            made[name] = [dataclasses.asdict(one) for one in getattr(self, name)]
        made["notes"] = list(self.notes)
        return made

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """What `to_dict` gave."""
        version = data.get("version") if isinstance(data, dict) else None
        if version != _VERSION or isinstance(version, bool):
            got = _errors.describe_value(version if isinstance(data, dict) else data)
            if isinstance(data, dict) and "version" not in data:
                got = "a dict without one"
            raise ValueError(f"a plan of version {_VERSION} is expected, got {got}")
        try:
            made = read(cls, {name: value for name, value in data.items() if name != "version"})
        except ValueError as error:
            raise ValueError(f"not a plan, or a damaged one: {error}") from error
        assert isinstance(made, Plan)
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, as JSON."""
        target = _path(path)
        text = json.dumps(self.to_dict(), indent=1)
        temporary = f"{target}.{os.getpid()}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:  # a reader sees the old plan or the new one
                file.write(text)
            os.replace(temporary, target)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            if isinstance(error, OSError):
                raise type(error)(error.errno, error.strerror, target) from None  # not the name that nobody gave
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote."""
        with open(_path(path), "rb") as file:
            content = file.read()
        try:
            return cls.from_dict(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fsdecode(path)} cannot be used as a plan: {error}") from error

    # --- For people ---

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a page about it: bytes over a step, what memory costs in time, and what is decided for each block.

        One HTML file that needs no network. Needs plotly: `pip install 'recollect[report]'`.

        Args:
            path: Of the file, which is replaced if it is there.

        Raises:
            ImportError: If plotly is not installed.
            OSError: If there can be no such file.
        """
        report.write(self.to_dict(), path)

    def __str__(self) -> str:
        rows = [HEADINGS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self.title()]
        for row in rows:
            cells = [
                cell.rjust(width) if n > 1 else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        lines += [
            f"{name:9}  peak {human(one.peak):>10}  step {1e3 * one.seconds:9.1f} ms" for name, one in self.steps()
        ]
        return "\n".join([*lines, *self.notes])

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Cells for `HEADINGS`: what is decided, a row for blocks that stand together and are treated alike."""
        for _, run in groupby(self.blocks, key=lambda block: (block.module, block.choice)):
            group = list(run)
            first, last = group[0], group[-1]
            names = first.name or "the model" if len(group) == 1 else f"{first.name} ... {last.name} ({len(group)})"
            held, saved, seconds = (sum(getattr(one, what) for one in group) for what in ("kept", "saved", "seconds"))
            yield names, first.choice, human(held), human(saved), f"{1e3 * seconds:,.1f} ms"

    def title(self) -> str:
        """What it is for, and what it comes from."""
        goal = "the least memory within a time" if self.budget is None else f"a budget of {human(self.budget)}"
        how = "estimated, nothing was run" if self.is_estimated else f"measured on {self.device}"
        return f"A plan for {self.model}, for {goal}; {how}"

    def steps(self) -> Iterator[tuple[str, Step]]:
        """The plain step, and that under the plan as it was predicted and measured."""
        yield "plain", self.plain
        yield "predicted", self.predicted
        if self.measured is not None:
            yield "measured", self.measured

    def __repr__(self) -> str:
        return (
            f"<Plan for {self.model}: {len(self.blocks)} blocks, peak {human((self.measured or self.predicted).peak)}>"
        )


HEADINGS = ("modules", "decision", "held", "of", "time added")


def _path(path: Any) -> str:
    """A path as a string. `open` would take a number as well, for a file that somebody else has open."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be a path, got {_errors.describe_value(path)}")
    return os.fsdecode(path)


def shapes_of(model: Module) -> dict[str, tuple[int, ...]]:
    """What tells a model from another one."""
    return {name: tuple(one.shape) for name, one in model.named_parameters()}


def planned(profile: Profile, chosen: Sequence[int]) -> tuple[Planned, ...]:
    """What a choice for every block of a profile means; calls of one module are one block."""
    found: dict[str, Planned] = {}
    for number, (name, choice) in enumerate(zip(profile.blocks, chosen, strict=True)):
        option, keep = profile.option(number, choice), profile.option(number, 0)
        before = found.get(name)
        found[name] = Planned(
            name,
            profile.kinds[profile.kind_of[number]].module,
            option.name,
            {part: _unbounded(decision) for part, decision in full_names({name: option.decisions}).items()},
            option.kept + (before.kept if before else 0),
            keep.kept + (before.saved if before else 0),
            option.seconds + (before.seconds if before else 0.0),
            option.out + (before.out if before else 0),
            (*(before.calls if before else ()), number),
        )
    return tuple(found.values())


def _unbounded(decision: Decision) -> Decision:
    """A decision that lets everything be on its way at once, unless it has bounds."""
    if isinstance(decision, Offload):
        return dataclasses.replace(
            decision, in_flight=decision.in_flight or _UNBOUNDED, ahead=decision.ahead or _UNBOUNDED
        )
    if isinstance(decision, Recompute) and isinstance(decision.inputs, Offload):
        inputs = _unbounded(decision.inputs)
        return dataclasses.replace(decision, inputs=inputs)  # type: ignore[arg-type]
    return decision
