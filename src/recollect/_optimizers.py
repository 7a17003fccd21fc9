"""Counts the steps of optimizers.

A fused optimizer, or one that works on `.data`, changes parameters without a trace in their version counters. Every
`torch.optim.Optimizer` runs this file's hook before a step (which may let go of the gradients); what is noted is which
parameters it steps, and when. Nothing is kept alive by it. Of shards (FSDP), what a function reads is noted too: what
was gathered from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recollect._shards import changed_by_step, gathered_from
from recollect._torch import never_look_into


class Steps:
    """The steps of all optimizers of this process."""

    count = 0


# For each parameter, by identity, the number of its last step; and what takes it out of there when it is gone.
_last: dict[int, int] = {}
_references: dict[int, weakref.ref[Tensor]] = {}


@never_look_into  # a compiled step would be compiled anew each time, because of the number
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    Steps.count += 1
    number = Steps.count
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _note(parameter, number)
                for gathered in changed_by_step(parameter):
                    _note(gathered, number)


def _note(parameter: Tensor, number: int) -> None:
    place = id(parameter)
    if place not in _references:
        _references[place] = weakref.ref(parameter, partial(_forget, place))
    _last[place] = number


def _forget(place: int, _: object) -> None:
    _references.pop(place, None)
    _last.pop(place, None)


def stepped_since(count: int) -> dict[int, Tensor]:
    """The parameters that were stepped after the `count`-th step, by identity."""
    # A copy made at once: a garbage collection in between may take entries out.
    there = [(place, one()) for place, one in _references.copy().items() if _last.get(place, 0) > count]
    return {place: parameter for place, parameter in there if parameter is not None}


def stepped_among(tensors: Iterable[Tensor | None], count: int) -> list[Tensor]:
    """Which of some tensors were stepped after the `count`-th step, themselves or as what they are gathered from."""
    found = []
    for tensor in tensors:
        if tensor is not None:
            if _last.get(id(tensor), 0) > count:
                found.append(tensor)
            found += [one for one in gathered_from(tensor) if _last.get(id(one), 0) > count]
    return found


register_optimizer_step_pre_hook(_before_step)
