"""What a policy keeps: changed since, asked for by another operator, or used up."""

from __future__ import annotations

import functools
from typing import Any

from recollect._errors.kinds import CheckpointError, SavedTensorChangedError
from recollect._errors.words import describe_value


def kept_output_changed(operator: str, changed_by: str, where: str | None) -> CheckpointError:
    who = f"by {changed_by}" if changed_by else "after the region's forward had ended"
    error = CheckpointError(
        f"the output of {operator} that the policy keeps has been mutated {who}: the replay would be handed "
        'another value. Use the out-of-place operator, keep a private copy (recollect.Save(on_mutation="copy")), or '
        f"let the policy recompute {operator}"
    )
    error.operator = changed_by.split(",")[0].split(" ")[0] or operator
    error.where, error.cause = where, f"the kept output of {operator} was changed in place {who}"
    return error


def called_more_often(region: str, operator: str, times: int) -> CheckpointError:
    return CheckpointError(
        f"{operator}, whose outputs are kept, ran {times} times in the forward of the checkpointed region {region} and "
        "more often in its replay: the function did not take the same path twice"
    )


def called_elsewhere(region: str, operator: str) -> CheckpointError:
    return CheckpointError(
        f"{operator}, whose outputs are kept, ran at another place in the replay of the checkpointed region {region} "
        "than in its forward: the function did not take the same path twice (something that it makes at its first call "
        "only?)"
    )


def not_kept(operator: str) -> CheckpointError:
    return CheckpointError(
        f"{operator} encountered during recomputation but not found in storage: the policy says now that its output "
        "was kept, and said otherwise in the forward. It is asked in both passes (ctx.is_recompute) and must decide "
        "alike; one with a counter must count the passes apart"
    )


def kept_in_vain(operator: str) -> CheckpointError:
    return CheckpointError(
        f"the output of {operator} was kept in the forward, and the policy says now that it is recomputed. It is "
        "asked in both passes (ctx.is_recompute) and must decide alike; one with a counter must count the passes apart"
    )


def backward_again(operator: str) -> CheckpointError:
    return CheckpointError(
        f"Trying to backward an extra time through a region whose kept output of {operator} was used and freed. The "
        "contexts of create_selective_checkpoint_contexts serve one backward; recollect.checkpoint(..., policy=...) "
        "serves several"
    )


def contexts_used_twice() -> RuntimeError:
    return RuntimeError(
        "the contexts of create_selective_checkpoint_contexts serve one call of a region, and these were used before. "
        "Let context_fn make new ones: context_fn=functools.partial(create_selective_checkpoint_contexts, policy)"
    )


def not_an_overload(operator: object, *, is_packet: bool) -> ValueError:
    more = ". Please update the OpOverloadPacket to a specific OpOverload" if is_packet else ""
    example = f", for example {operator}.default" if is_packet else ""
    return ValueError(
        f"Expected op in `op_list` to be an OpOverload or a higher-order operator, got {describe_value(operator)}"
        f"{more}{example}"
    )


def operator_hint(value: Any) -> str:
    """What to write instead of `torch.mm`."""
    name = getattr(value, "__name__", None)
    return f". (torch.ops.aten.{name}?)" if callable(value) and isinstance(name, str) and name.isidentifier() else ""


def other_regions(region: str, path: str) -> CheckpointError:
    return CheckpointError(
        f"the replay of the checkpointed region {region} did not come by the named region {path!r} as the forward did: "
        "the function did not take the same path twice, or a decision of recollect.apply was made or removed in between"
    )


def kept_saved_tensor_changed(region: str, path: str) -> CheckpointError:
    return CheckpointError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor that "
        f"autograd saved in the kept region {path!r} of {region}. Plain autograd refuses this too. Use the "
        "out-of-place operator, or change a clone"
    )


def offloaded_tensor_changed() -> CheckpointError:
    return CheckpointError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor that "
        "autograd saved under recollect.offload and that stayed where it was. Plain autograd refuses this too. Use the "
        "out-of-place operator, or change a clone"
    )


def offload_left_in_another_thread() -> RuntimeError:
    return RuntimeError(
        "recollect.offload was left in a thread that has not entered it. Hooks on saved tensors are a thread's own, so "
        "leave it in the thread that entered it, which goes on offloading until then"
    )


def changed_before_it_left() -> SavedTensorChangedError:
    return SavedTensorChangedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor that "
        "was being offloaded was changed before its copy was done, so that the copy may be of either. Plain autograd "
        "refuses such a change too, if it was autograd that saved the tensor. In the next step the change waits for "
        "the copy; to be sure from the first step on, use the out-of-place operator, or change a clone"
    )


def changed_through_a_view() -> SavedTensorChangedError:
    return SavedTensorChangedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: an output "
        "that a policy keeps was changed through a view of it that counts its changes apart, as the one that F.linear "
        "gives. Use the out-of-place operator, change a clone, or let the policy recompute what makes it"
    )


@functools.cache
def served_from_memory(path: str) -> str:
    return (
        f"backward inside a checkpointed function through the named region {path!r}: its replay was handed the "
        "kept output of that region, which has no history. Let the policy recompute the region"
    )


def pinned_elsewhere(region: str, function: str) -> CheckpointError:
    error = CheckpointError(
        f"the replay of the checkpointed region {region} came to {function}, which is pinned or to run once, where the "
        "forward did something else: the function did not take the same path twice before it got there"
    )
    error.cause = "another branch was taken"
    return error


def not_in_reentrant(function: str) -> RuntimeError:
    return RuntimeError(
        f"{function} is pinned, or to run once, inside a region of the reentrant variant, which remembers nothing from "
        "its forward. Pass use_reentrant=False, or ask recollect.is_recomputing()"
    )
