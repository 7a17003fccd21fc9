"""Decisions that are tried: put in force for a while, and whether a step works under them.

A step under decisions that were not tried before is compared with its replays by value, whatever is known of them from
earlier trials: what passes here is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from recollect._bench import Bench
from recollect._decided import decided_of
from recollect._engine.frame import frames_made
from recollect._failures import reason_of
from recollect._ranks import worst
from recollect.modules import apply
from recollect.policy import Decision


class decided:  # noqa: N801
    """Have blocks treated for a while: decisions by names within the block, by the names of the blocks."""

    def __init__(self, model: Module, decisions: Mapping[str, Mapping[str, Decision]], check: str = "default") -> None:
        self._model = model
        self._decisions = full_names(decisions)
        self._check = check
        self._handle: Any = None
        self._frames = frames_made()

    def __enter__(self) -> None:
        if not self._decisions:
            return
        self._handle = apply(self._model, by_module(self._model, self._decisions), determinism_check=self._check)
        self._frames.__enter__()
        for module in self._model.modules():
            one = decided_of(module)
            if one is not None:
                one.entry.settled = True  # what is only tried may be of no use, and nobody is to be warned of it

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._handle is None:
            return
        self._handle.remove()
        self._frames.__exit__()
        if error is not None:  # what was tried may change inputs of regions, and the graph stays alive then
            self._frames.release_what_cannot_be_replayed()


def full_names(decisions: Mapping[str, Mapping[str, Decision]]) -> dict[str, Decision]:
    """Decisions by names within the model, from those by names within its blocks."""
    return {
        f"{block}.{part}" if block and part else block or part: decision
        for block, own in decisions.items()
        for part, decision in own.items()
    }


def by_module(
    model: Module, decisions: Mapping[str, Decision], label: str = "a plan"
) -> Callable[[str, Module], Decision | None]:
    """Decisions by names of modules, which may have others too, as `apply` takes them; for people they have a label."""
    there = dict(model.named_modules(remove_duplicate=False))
    by_identity = {id(there[name]): decision for name, decision in decisions.items()}

    def decide(_: str, module: Module) -> Decision | None:
        return by_identity.get(id(module))

    decide.__qualname__ = label
    return decide


@dataclass(frozen=True)
class Outcome:
    """What came of a step: it worked, or the device had not enough memory, or why it failed."""

    fits: bool = True
    reason: str = ""

    @property
    def works(self) -> bool:
        return self.fits and not self.reason


def attempt(bench: Bench, decisions: Mapping[str, Mapping[str, Decision]]) -> Outcome:
    """Run a step under decisions; what counts is the rank for which it goes worst."""
    fits, reason = True, ""
    try:
        with decided(bench.model, decisions, "values"):
            bench.train()
    except torch.OutOfMemoryError:
        fits = False
    except Exception as error:
        reason = reason_of(error)
    bench.start_anew()
    if reason or not fits:
        bench.let_go()
    return Outcome(not worst([not fits])[0], worst([reason])[0])
