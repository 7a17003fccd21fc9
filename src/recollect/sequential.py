"""Chains: run a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recollect._chains.chain import Chain, Options
from recollect._chains.node import run
from recollect.schedules import Schedule, revolve


def sequential(functions: Any, x: Any, *, length: int | None = None, slots: int | None = None, outputs: bool = False,
    schedule: Schedule | None = None, determinism_check: str = "first", preserve_rng_state: bool | str = True) -> Any:
    if schedule is None:
        n = length if length is not None else len(functions)
        schedule = revolve(n, slots)
    options = Options(determinism_check, preserve_rng_state, outputs)
    if not callable(functions) or isinstance(functions, (torch.nn.Sequential,)):
        functions = list(functions)
    chain = Chain(functions, x, options)
    return run(chain, lambda first: first.carry_out(iter(schedule), schedule.length), lambda: schedule)
