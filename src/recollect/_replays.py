"""How long the replays in a run take: what a decision to recompute costs, nearly all of it, without what else varies.

The same run with and without replays differs by that too. But two runs of anything differ anyway, on a GPU by a few
per cent of all of it, which is more than a small replay takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module

from recollect._calls import hooks_on
from recollect._inputs import Arguments
from recollect._stores.links import Moment, link_of


def replay_seconds(device: torch.device, modules: Iterable[Module], run: Callable[[], object]) -> float | None:
    """Run it, and give the seconds for which calls of modules go on in replays; None if that cannot be told."""
    watched = list(modules)
    link = link_of(device) if watched else None
    if link is None:
        run()
        return None if watched else 0.0
    spans: list[tuple[Moment, Moment]] = []
    begun: list[tuple[Module, Moment]] = []

    def before(module: Module, _: Arguments) -> None:
        begun.append((module, link.now()))

    def after(module: Module, _: Any) -> None:
        if not any(one is module for one, _ in begun):  # its call failed before it had begun, or was compiled
            return
        other = None
        while other is not module:
            other, start = begun.pop()
        if not begun:  # else it is within another one
            spans.append((start, link.now()))

    with hooks_on(watched, before, after, in_replays=True):
        run()
    for _, end in spans:
        end.synchronize()
    # Compiled modules, and those whose calls come by no hooks, are not seen.
    return sum(start.elapsed_time(end) for start, end in spans) / 1000 if spans else None
