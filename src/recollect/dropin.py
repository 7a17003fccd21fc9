"""`torch.utils.checkpoint`, name for name: change the import and nothing else.

The behaviour is that of PyTorch 2.11 where it is a contract, and better where it is silent. The engine is ours.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recollect import _checkpoint, _errors
from recollect._ambient import DefaultDeviceType, get_device_states, set_device_states
from recollect._ambient import infer_device_type as _infer_device_type
from recollect._checkpoint import (
    ContextFn,
    chosen_variant,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
from recollect._engine.caching import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)
from recollect._engine.groups import GraphExecGroup
from recollect._engine.reentrant import CheckpointFunction, check_backward_validity, detach_variable
from recollect._errors import CheckpointError
from recollect._torch import never_begin

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "_CachedTorchDispatchMode",
    "_CachingTorchDispatchMode",
    "_infer_device_type",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]


@never_begin
def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool | str = True,
    **kwargs: Any,
) -> Any:
    """`recollect.checkpoint` with PyTorch's default for `use_reentrant`: None, which warns and means True.

    Example:
        >>> import torch
        >>> from recollect.dropin import checkpoint
        >>> x = torch.ones(3, requires_grad=True)
        >>> checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        >>> torch.equal(x.grad, x.cos())
        True
    """
    # By position: by name it would take as long again.
    return _checkpoint.run(
        function, args, kwargs, use_reentrant, context_fn, determinism_check, debug, early_stop, preserve_rng_state
    )


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a chain in `segments` pieces, each but the last of which is a region.

    Args:
        functions: An `nn.Sequential`, or anything with a length and indexing.
        segments: How many pieces; `len(functions) // segments` functions each, the rest goes to the last.
        input: What the first function gets.
        use_reentrant: As for `checkpoint`.
        **kwargs: `preserve_rng_state` only.

    Returns:
        What the last function returns.

    Example:
        >>> import torch
        >>> from recollect.dropin import checkpoint_sequential
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        >>> y = checkpoint_sequential(model, 3, torch.ones(2, 4), use_reentrant=False)
        >>> torch.equal(y, model(torch.ones(2, 4)))
        True
    """
    return run_chain(checkpoint, functions, segments, input, use_reentrant, kwargs, stacklevel=3)


def run_chain(
    region: Callable[..., Any],
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None,
    kwargs: dict[str, Any],
    *,
    stacklevel: int,
) -> Any:
    """`checkpoint_sequential`; `region` is the `checkpoint` that runs a piece."""
    if use_reentrant is not None and not isinstance(use_reentrant, bool):
        raise TypeError(
            f"use_reentrant must be None, True or False, got {_errors.describe_value(use_reentrant)}. (If this was "
            "meant as a second input: checkpoint_sequential takes one, so pass several as one tuple)"
        )
    reentrant = chosen_variant(use_reentrant, stacklevel=stacklevel)
    if unknown := [name for name in kwargs if name != "preserve_rng_state"]:
        raise _errors.unexpected_keywords(unknown)
    try:
        segments = operator.index(segments)
    except TypeError:
        raise TypeError(f"segments must be a whole number, got {_errors.describe_value(segments)}") from None
    if not (hasattr(functions, "__len__") and hasattr(functions, "__getitem__")):
        raise TypeError(
            f"functions must be an nn.Sequential or a sequence of callables, got {_errors.describe_value(functions)}"
        )
    if isinstance(functions, torch.nn.Sequential):
        chain: list[Any] = list(functions)  # indexing it takes longer the further back
    else:  # may have no more than a length and indexing
        chain = [functions[position] for position in range(len(functions))]
    if not chain:
        raise ValueError("functions must hold at least one function, got none")
    for position, function in enumerate(chain):
        if not callable(function):
            raise _errors.not_callable(f"functions[{position}]", function)
    if not 1 <= segments <= len(chain):
        raise ValueError(f"segments must be from 1 to {len(chain)}, the number of functions, got {segments}")

    value, size = input, len(chain) // segments
    for start in range(0, size * (segments - 1), size):
        piece = _Piece(chain[start : start + size])
        value = region(piece, value, use_reentrant=reentrant, **kwargs)
    return _Piece(chain[size * (segments - 1) :])(value)


class _Piece:
    """Some functions in a row, as one."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = functions

    def __call__(self, value: Any) -> Any:
        for function in self._functions:
            value = function(value)
        return value
