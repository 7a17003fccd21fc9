"""The reentrant variant: forward without a graph; backward runs the function again with one and backpropagates
through it.

It keeps no slots and compares nothing: the function is an autograd Function of its own, its tensor arguments are
saved through autograd, and a second backward inside the first does the work. So it sees only tensors that are
arguments themselves, and only a whole `.backward()`. Ambient state is restored as for frames.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recollect import _errors, _faults
from recollect._ambient import Ambient, Undo, undo_all
from recollect._engine.scope import here
from recollect._inputs import find_tensors
from recollect._torch import (
    backward_inside_backward,
    is_plain_backward,
    level_of_user_code,
    never_look_into,
    process_groups,
    set_grad_enabled,
)


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warn if no gradient can flow through a reentrant region that gets these inputs."""
    if not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        warnings.warn(
            "None of the inputs have requires_grad=True. Gradients will be None: the reentrant variant passes "
            "gradients only to "
            "tensors among its arguments. Pass use_reentrant=False, or let an input require grad",
            stacklevel=level_of_user_code(),
        )


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each tensor detached, with its own `requires_grad`; everything else as it is."""
    if not isinstance(inputs, tuple):
        raise _errors.only_tuples(inputs)
    return tuple(
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in inputs
    )


class CheckpointFunction(torch.autograd.Function):
    """`CheckpointFunction.apply(function, preserve_rng_state, *args)`."""

    @staticmethod
    @never_look_into
    def forward(ctx: Any, function: Callable[..., Any], preserve_rng_state: bool | str, *args: Any) -> Any:
        check_backward_validity(args)
        tensors = [value for value in args if isinstance(value, Tensor)]
        ctx.function = function
        everywhere, _ = find_tensors(args, {})
        preserve = preserve_rng_state if preserve_rng_state == "all" else bool(preserve_rng_state)
        ctx.ambient = Ambient(everywhere, preserve, (args, {}))
        ctx.others = tuple(None if isinstance(value, Tensor) else value for value in args)
        ctx.places = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        outside, here.reentrant = here.reentrant, "forward"
        try:
            result = function(*args)  # an autograd Function's forward runs without grad
        finally:
            here.reentrant = outside
        ctx.ambient.forward_ended()
        return result

    @staticmethod
    @never_look_into
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        try:
            return _backward(ctx, grads)
        except BaseException as error:
            if process_groups:
                region = partial(_errors.describe_function, ctx.function)
                _faults.raised(error, _errors.in_reentrant_backward, region)
            raise


def _backward(ctx: Any, grads: tuple[Tensor | None, ...]) -> Any:
    if not is_plain_backward():
        raise _errors.reentrant_partial_backward()
    values = list(ctx.others)
    for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
        values[place] = tensor
    detached = detach_variable(tuple(values))
    grad_was_enabled = torch.is_grad_enabled()
    outside = here.reentrant
    undo: list[Undo] = []
    try:
        ctx.ambient.restore(undo)
        set_grad_enabled(True)
        here.reentrant = "replay"
        result = ctx.function(*detached)
    finally:
        here.reentrant = outside
        set_grad_enabled(grad_was_enabled)
        undo_all(undo)
    results = (result,) if isinstance(result, Tensor) else result
    if len(results) != len(grads):
        raise _errors.different_outputs(_errors.describe_function(ctx.function), len(grads), len(results))
    pairs = [
        (value, grad)
        for value, grad in zip(results, grads, strict=True)
        if isinstance(value, Tensor) and value.requires_grad
    ]
    if not pairs:
        raise _errors.reentrant_without_grad()
    backward_inside_backward(*zip(*pairs, strict=True))
    return (None, None, *(value.grad if isinstance(value, Tensor) else None for value in detached))
