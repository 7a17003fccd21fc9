"""Every exception of recollect and how its message is built.

A message says what happened, where, what was expected and got, and what to do. Phrases that programs match on
(the contract gives them in quotes) stand here and nowhere else.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Signature = tuple[Any, ...]


class CheckpointError(RuntimeError):
    """A replay cannot give backward what the forward had: it would have been a guess."""


# --- Words ---


def describe_signature(signature: Signature) -> str:
    shape, dtype, device = signature
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def describe_tensor(tensor: Tensor) -> str:
    try:
        return describe_signature((tensor.shape, tensor.dtype, tensor.device))
    except Exception:  # a subclass or a nested tensor without a shape
        return type(tensor).__name__


def describe_function(function: Callable[..., Any], name: str | None = None) -> str:
    """`Block.forward (model.py:12)`, as far as it can be known; never raises."""
    inner: Any = function
    while hasattr(inner, "func") and hasattr(inner, "keywords"):  # functools.partial
        inner = inner.func
    forward = getattr(type(inner), "forward", None) if not hasattr(inner, "__code__") else None
    label = getattr(inner, "__qualname__", None) or type(inner).__name__
    code = getattr(inner if forward is None else forward, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{name!r}, {label}{where}" if name else f"{label}{where}"


def describe_value(value: object) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"


# --- Bad input ---


def not_callable(argument: str, value: object) -> TypeError:
    return TypeError(f"{argument} must be callable (a function, a method, a module), got {describe_value(value)}")


def not_one_of(argument: str, value: object, allowed: Sequence[str]) -> ValueError:
    return ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def not_a_bool(argument: str, value: object) -> TypeError:
    return TypeError(f"{argument} must be True or False, got {describe_value(value)}")


def unexpected_keywords(names: Sequence[str]) -> ValueError:
    return ValueError("Unexpected keyword arguments: " + ",".join(names))


def unknown_option(function: str, name: str, allowed: Sequence[str]) -> TypeError:
    return TypeError(f"{function} has no option {name!r}; it takes {', '.join(allowed)}")


def only_non_reentrant(options: Sequence[str]) -> ValueError:
    return ValueError(
        f"{' and '.join(options)} {'is' if len(options) == 1 else 'are'} only supported when use_reentrant=False: "
        "the reentrant variant has no saved tensors to compare and no replay to put a context around"
    )


def bad_contexts(got: object) -> TypeError:
    return TypeError(
        "context_fn must return two context managers, one for the forward and one for the replay, "
        f"got {describe_value(got)}"
    )


def runs_later(function: Callable[..., Any], kind: str) -> TypeError:
    return TypeError(
        f"function gave a {kind}: {describe_function(function)} does its work only when that is run, which would be "
        "after its "
        "region has ended, so nothing of it could be recomputed. Checkpoint a function that computes its result "
        "when called"
    )


# --- Errors of a region ---


def context_suppressed(region: str) -> RuntimeError:
    return RuntimeError(
        f"context_fn suppressed the exception that the forward of {region} raised: its first context manager's "
        "__exit__ "
        "returned a true value, and a region without a result cannot go on"
    )


def initialised_in_forward(device_type: str) -> RuntimeError:
    return RuntimeError(
        f"the accelerator {device_type!r} was initialised inside the forward of a checkpointed region that preserves "
        "RNG state, "
        "too late to record its random state at the region's start. Initialise it before the region "
        f"(torch.empty(1, device={device_type!r})), or pass preserve_rng_state=False"
    )


def input_changed(region: str, what: str, *, by_region: bool) -> CheckpointError:
    who = "by the region itself" if by_region else "after the region's forward had begun"
    return CheckpointError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}. It is an input of the checkpointed region {region}, changed {who}, and the replay would start from "
        "the "
        "changed values. Use the out-of-place operator, or pass a clone"
    )


def saved_tensor_changed(region: str, index: int, tensor: Tensor, node: object) -> CheckpointError:
    operator = f"that {_node_name(node)} saved " if node is not None else ""
    return CheckpointError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"the tensor {operator}({describe_tensor(tensor)}, saved tensor {index} of the checkpointed region {region}). "
        "The function changed it after an operator had saved it. Plain autograd refuses this too. Use the out-of-place "
        "operator, or change a clone; debug=True lists the operators"
    )


def _node_name(node: Any) -> str:
    try:
        return str(node.name())
    except Exception:
        return type(node).__name__


def unpacked_twice(region: str, index: int) -> CheckpointError:
    return CheckpointError(
        "Unpack is being triggered for a tensor that was already unpacked once in this backward: "
        f"saved tensor {index} of the checkpointed region {region}. Recovered tensors are freed as soon as they are "
        "used. A custom "
        "autograd Function must read ctx.saved_tensors once and keep the result in a local variable"
    )


def groups_overlap(region: str, index: int) -> CheckpointError:
    return CheckpointError(
        "Performing two backward calls that overlap, that is, need the same saved tensor, is not possible under one "
        f"GraphExecGroup: saved tensor {index} of the checkpointed region {region} was already used. Give each call "
        "inputs= that "
        "lead through disjoint parts of the graph, or run one of them outside of the group"
    )


_NEXT_STEP = "Pass debug=True to see the operators of both and the first place where they part"


def fewer_saved(region: str, forward: int, replay: int, details: str) -> CheckpointError:
    return CheckpointError(
        "A different number of tensors was saved in the forward and in the replay of the checkpointed region "
        f"{region}: {forward} in the forward, {replay} in the replay. The function did not take the same path twice: "
        "look for "
        "a condition on something that changed in between (a global, a counter, train/eval, the "
        f"time).{details or ' ' + _NEXT_STEP}"
    )


def more_saved(region: str, forward: int, replay: int, details: str) -> CheckpointError:
    return CheckpointError(
        f"trying to save more tensors during recomputation than in the forward of the checkpointed region {region}: "
        f"{forward} in the forward, {replay} in the replay. The function did not take the same path twice: look for "
        "a condition "
        "on something that changed in between (a global, a counter, train/eval, the "
        f"time).{details or ' ' + _NEXT_STEP}"
    )


def different_metadata(
    region: str, mismatches: Sequence[tuple[int, Signature, Signature]], total: int, details: str
) -> CheckpointError:
    lines = [
        f"  saved tensor {index} of {total}: {describe_signature(then)} in the forward, {describe_signature(now)} in "
        "the replay"
        for index, then, now in mismatches[:10]
    ]
    if len(mismatches) > 10:
        lines.append(f"  and {len(mismatches) - 10} more")
    return CheckpointError(
        "Recomputed values for the following tensors have different metadata than in the forward of the checkpointed "
        f"region {region}:\n" + "\n".join(lines) + (details or f"\n{_NEXT_STEP}")
    )


DEBUG_NOTE = (
    "You are seeing this error because you passed `debug=True` to checkpoint (or set_checkpoint_debug_enabled(True))"
)


# --- The reentrant variant ---


def reentrant_partial_backward() -> RuntimeError:
    return RuntimeError(
        "use_reentrant=True of torch.utils.checkpoint is incompatible with torch.autograd.grad() and with "
        "backward(inputs=...): "
        "it runs a whole backward of its own inside. Pass use_reentrant=False"
    )


def reentrant_without_grad() -> RuntimeError:
    return RuntimeError(
        "none of output has requires_grad=True, this checkpoint() is not necessary: in the replay no output of the "
        "function "
        "depended on anything that needs grad"
    )


def only_tuples(value: object) -> RuntimeError:
    return RuntimeError(f"Only tuple of tensors is supported. Got {type(value).__name__}")
