"""A region whose replay differs, whose inputs or weights changed, or that is asked for what it cannot give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recollect._errors.kinds import CheckpointError, SavedTensorChangedError, Signature
from recollect._errors.words import describe_node, describe_signature, describe_tensor, note


def context_suppressed(region: str) -> RuntimeError:
    return RuntimeError(
        f"context_fn suppressed the exception that the forward of {region} raised: its first context manager's "
        "__exit__ returned a true value, and a region without a result cannot go on. Let it return None"
    )


def initialised_in_forward(device_type: str) -> RuntimeError:
    return RuntimeError(
        f"the accelerator {device_type!r} was initialised inside the forward of a checkpointed region that preserves "
        "RNG state, too late to record its random state at the region's start. Initialise it before the region "
        f"(torch.empty(1, device={device_type!r})), or pass preserve_rng_state=False"
    )


def input_changed(region: str, what: str, *, by_region: bool) -> CheckpointError:
    who = "by the region itself" if by_region else "after the region's forward had begun"
    error = CheckpointError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}. It is an input of the checkpointed region {region}, changed {who}: a replay must start from what the "
        "forward started from. Use the out-of-place operator, or pass a clone"
    )
    error.cause = f"{what}: an input changed in place, {who}"
    return error


def saved_tensor_changed(
    region: str, index: int, tensor: Tensor, node: object, details: str, change: tuple[str, str | None] | None
) -> CheckpointError:
    operator = f"that {describe_node(node)} saved " if node is not None else ""
    by = ""
    if change is not None:
        by = f" It was changed by {change[0]}, at {change[1] or 'no line of user code'}."
    error = SavedTensorChangedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"the tensor {operator}({describe_tensor(tensor)}, saved tensor {index} of the checkpointed region {region}). "
        "The function changed it after an operator had saved it. Plain autograd refuses this too. Use the out-of-place "
        f"operator, or change a clone.{by}{details or ('' if by else ' Pass debug=True to see the operators')}"
    )
    error.cause = "the function changed in place what an operator had saved"
    if change is not None:
        error.operator, error.where = change
    return error


def unpacked_twice(region: str, index: int, details: str, where: str | None) -> CheckpointError:
    error = CheckpointError(
        "Unpack is being triggered for a tensor that was already unpacked once in this backward: "
        f"saved tensor {index} of the checkpointed region {region}. Recovered tensors are freed as soon as they are "
        "used. A custom autograd Function must read ctx.saved_tensors once and keep the result in a local variable"
        f"{'' if where is None else f'. This is read at {where}'}{details}"
    )
    error.where, error.cause = where, "a saved tensor is read twice in one backward"
    return error


def groups_overlap(region: str, index: int, details: str, where: str | None) -> CheckpointError:
    return CheckpointError(
        "Unpack is being triggered for a tensor that was already unpacked once under this GraphExecGroup: "
        f"saved tensor {index} of the checkpointed region {region}. Performing two backward calls that overlap, that "
        "is, need the same saved tensor, is not possible in one group: give each call inputs= that lead through "
        "disjoint parts of the graph, or run one of them outside of the group. If there was only one call, a custom "
        f"autograd Function reads ctx.saved_tensors twice: let it keep the result in a local variable{details}"
    )


def different_replay(
    region: str,
    forward: int,
    replay: int,
    mismatches: Sequence[tuple[int, Signature, Signature]],
    details: str,
    finding: Any,
    place: str | None,
) -> CheckpointError:
    """The replay saved another number of tensors than the forward, or other ones; `details` come from `debug=True`."""
    message = []
    if replay != forward:
        what = (
            "A different number of tensors was saved in the forward and in the replay"
            if replay < forward
            else "trying to save more tensors during recomputation than in the forward"
        )
        message.append(
            f"{what} of the checkpointed region {region}: {forward} in the forward, {replay} in the replay. The "
            "function did not take the same path twice: look for a condition on something that changed in "
            "between (a global, a "
            "counter, train/eval, the time)."
        )
    if mismatches:
        message.append(
            "Recomputed values for the following tensors have different metadata than in the forward of the "
            f"checkpointed region {region}:"
        )
        message += [
            f"  saved tensor {index} of {forward}: {describe_signature(then)} in the forward, "
            f"{describe_signature(now)} in the replay"
            for index, then, now in mismatches[:10]
        ]
        if len(mismatches) > 10:
            message.append(f"  and {len(mismatches) - 10} more")
    return _with_finding(message, finding, details, place)


def _with_finding(message: list[str], finding: Any, details: str, place: str | None) -> CheckpointError:
    if finding is not None and finding.lines:
        message += finding.lines
    elif not details:
        message.append("Pass debug=True to see the operators of both and the first place where they part")
    if details:
        message.append(details)
    error = CheckpointError("\n".join(message))
    error.where = place
    if finding is not None:
        error.operator, error.where, error.cause = finding.operator, finding.where or place, finding.cause
    return error


def different_values(
    region: str, count: int, unequal: Any, signature: Signature, details: str, finding: Any, place: str | None
) -> CheckpointError:
    """The replay saved tensors of the right shapes with other values."""
    message = [
        "Recomputed values differ from those of the forward of the checkpointed region "
        f"{region}: saved tensor {unequal.slot} of {count} ({describe_signature(signature)})."
    ]
    return _with_finding(message, finding, details, place)


def add_note(error: Exception, region: str, finding: Any) -> None:
    """Say on an error of the user's function in a replay where the replay parts from the forward."""
    if finding is not None and finding.lines:
        lines = [
            f"It was raised in a replay of the checkpointed region {region}, and not in its forward.",
            *finding.lines,
        ]
        note(error, "\n".join(lines))


def weight_changed(region: str, what: str) -> CheckpointError:
    error = CheckpointError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}. The checkpointed region {region} reads it, and it was changed after the region's forward: a replay "
        "would compute with the new values, and the gradients would not belong to the outputs. Run backward before "
        "changing it"
    )
    error.cause = f"{what} was changed in place since the forward"
    return error


def weight_stepped(region: str, what: str) -> CheckpointError:
    error = CheckpointError(
        f"an optimizer stepped {what} between the forward of the checkpointed region {region} and its backward. The "
        "region reads it: a replay computes with the new values, and the gradients would not belong to the outputs. "
        "Run backward before the step"
    )
    error.cause = f"{what} was stepped by an optimizer since the forward"
    return error


def weight_replaced(region: str, then: str, now: str | None) -> CheckpointError:
    by = "is gone" if now is None else f"was replaced by another one, {now},"
    error = CheckpointError(
        f"{then}, which the checkpointed region {region} read in its forward, {by} before its backward: a replay would "
        "compute with other values, and the gradients would not belong to the outputs. Run backward first"
    )
    error.cause = f"{then} was replaced since the forward"
    return error


def began_to_change(region: str, what: str, operator: str, where: str | None) -> CheckpointError:
    error = CheckpointError(
        f"the checkpointed region {region} reads {what} and changes it in place ({operator}, at "
        f"{where or 'no line of user code'}), and did not in the forward that was looked at: what it held before this "
        "forward was not kept, so that a replay cannot start from there. Where a function begins to do other things, "
        "call recollect.verify_again() before. The gradients of this step are lost, and nothing was changed twice"
    )
    error.operator, error.where = operator, where
    error.cause = f"{what} is changed in place for the first time since the function was verified"
    return error


def gathered_twice(region: str, count: int) -> str:
    modules = "a module" if count == 1 else f"{count} modules"
    return (
        f"the checkpointed region {region} contains {modules} wrapped by FullyShardedDataParallel whose parameters its "
        "replay gathers, and backward gathers once more. Checkpoint each module inside of its wrapper: "
        "FullyShardedDataParallel(checkpoint_wrapper(layer)), or recollect.apply for the layers themselves; or shard "
        "with fully_shard, which gathers once"
    )


def another_leaf(region: str, index: int, then: str, now: str) -> CheckpointError:
    error = CheckpointError(
        f"the replay of the checkpointed region {region} does not use the weight that its forward used: where the "
        f"forward saved {then}, the replay saved another tensor ({now}), saved tensor {index}. Look for a "
        "variable that was bound anew since (a closure over a loop variable, a module or parameter that was replaced)"
    )
    error.cause = f"{then} was replaced by another tensor since the forward, or a closure sees another one"
    return error


def random_numbers_not_preserved(region: str, drawn: Sequence[str]) -> CheckpointError:
    error = CheckpointError(
        f"the checkpointed region {region} drew random numbers ({', '.join(drawn)}) and was told "
        "preserve_rng_state=False: its replay would draw others. Leave the option out, or draw outside of the region"
    )
    error.cause = f"{', '.join(drawn)} drawn from, and not preserved"
    return error


def different_outputs(region: str, forward: int, replay: int) -> CheckpointError:
    return CheckpointError(
        f"the reentrant region {region} returned {forward} results in the forward and {replay} in the replay: the "
        "function did not take the same path twice"
    )


DEBUG_NOTE = (
    "You are seeing this error because you passed `debug=True` to checkpoint (or set_checkpoint_debug_enabled(True))"
)


def plain_tensor_changed(tensor: Tensor, node: object) -> RuntimeError:
    operator = f"that {describe_node(node)} saved " if node is not None else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: the tensor "
        f"{operator}({describe_tensor(tensor)})"
    )


def reentrant_partial_backward() -> RuntimeError:
    return RuntimeError(
        "use_reentrant=True of torch.utils.checkpoint is incompatible with torch.autograd.grad() and with "
        "backward(inputs=...): "
        "it runs a whole backward of its own inside. Pass use_reentrant=False"
    )


def reentrant_without_grad() -> RuntimeError:
    return RuntimeError(
        "none of output has requires_grad=True, this checkpoint() is not necessary: in the replay no output of the "
        "function depended on anything that needs grad"
    )
