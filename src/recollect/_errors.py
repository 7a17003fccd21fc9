"""Every exception of recollect and how its message is built.

A message says what happened, where, what was expected and got, and what to do. Phrases that programs match on
(the contract gives them in quotes) stand here and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import CheckpointError as TorchsCheckpointError

Signature = tuple[Any, ...]


class CheckpointError(TorchsCheckpointError):
    """A replay cannot give backward what the forward had: it would have been a guess.

    A subclass of torch's own, so that programs which catch that one catch this too, however they came by the name.

    Attributes:
        operator: The first operator that differs, where that is known: "aten.mul.Tensor".
        where: The line of user code that ran it, else where the region's function begins: "model.py:12 in forward".
        cause: The likely cause, in words, where one was found.
    """

    operator: str | None = None
    where: str | None = None
    cause: str | None = None


class SavedTensorChangedError(CheckpointError):
    """A recovered tensor was changed in place by the function itself, or one in a store before it was copied."""


class InfeasibleError(ValueError):
    """A budget into which nothing fits, whatever is chosen.

    Attributes:
        smallest: The least number of bytes that would do.
        where: The moment of the step that sets it: "backward of layers.7".
    """

    smallest: int = 0
    where: str = ""


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
    """`Block (model.py:12)`, as far as it can be known; never raises."""
    label, code = _label_and_code(function)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{name!r}, {label}{where}" if name else f"{label}{where}"


def place_of(function: Callable[..., Any]) -> str | None:
    """`model.py:12 in forward`, where a function begins; None if it is not written in Python."""
    _, code = _label_and_code(function)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _label_and_code(function: Callable[..., Any]) -> tuple[str, Any]:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, type):  # MyFunction.apply is a method of torch's own class
        inner = getattr(owner, "forward", inner)
    elif isinstance(owner, Module) and inner.__name__ in (Module.__call__.__name__, "__call__"):
        inner = owner
    if not hasattr(inner, "__code__") and callable(getattr(inner, "__wrapped__", None)):
        return _label_and_code(inner.__wrapped__)
    label = getattr(inner, "__qualname__", None) or type(inner).__name__
    kind: Any = type(inner)
    runs = inner if hasattr(inner, "__code__") else getattr(kind, "forward", kind.__call__)
    return label, getattr(runs, "__code__", None)


def no_such_modules(label: str, model: str, never_called: Sequence[str], close: Sequence[str]) -> ValueError:
    """`never_called` matched, and are containers without a forward."""
    if never_called:
        what = f"matches {', '.join(never_called[:3])} only, which is never called"
        hint = f"decide for what is inside: {label[:-1]}.*'" if label.endswith("'") else "decide for what is inside"
        return ValueError(f"{label} {what} in {model}; {hint}")
    hint = f"; close to it: {', '.join(close)}" if close else ""
    return ValueError(f"{label} matches no module of {model}{hint}")


def cannot_be_decided(name: str, why: str) -> TypeError:
    return TypeError(f"{name or 'the model itself'} cannot be decided by recollect.apply: {why}")


def decided_twice(name: str, before: str, decision_before: str, now: str, decision: str) -> ValueError:
    return ValueError(
        f"{name or 'the model itself'} is decided already, by {before}: {decision_before}, and now by {now}: "
        f"{decision}. "
        "Remove the first (handle.remove(), or recollect.unapply(model)), or put both in one dict, where the later "
        "entry wins"
    )


def describe_value(value: object) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"


def describe_amount(amount: int, *, up: bool) -> str:
    """`3.2 GiB`, rounded upwards for what is needed, so that who gives that much gives enough, else downwards."""
    power = next((power for power in range(4) if amount < 1024 ** (power + 1)), 4)
    if power == 0:
        return f"{amount} B"
    tenths = -(-amount * 10 // 1024**power) if up else amount * 10 // 1024**power
    return f"{tenths / 10:.1f} {'KMGT'[power - 1]}iB"


# --- Bad input ---


def infeasible(budget: int, smallest: int, where: str) -> InfeasibleError:
    error = InfeasibleError(
        f"nothing fits into {describe_amount(budget, up=False)}: a step takes at least "
        f"{describe_amount(smallest, up=True)}; the {where} sets it. Give more, or make the batch smaller"
    )
    error.smallest, error.where = smallest, where
    return error


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def not_ranks(over: object) -> TypeError:
    hint = ""
    if type(over).__name__ in ("Shard", "Replicate", "Partial"):
        hint = '. That is a placement of DTensors: name the mesh dimension, as in recollect.Shard("tp", mesh=mesh)'
    return TypeError(
        "over must be a mesh dimension (a name or a number), a torch.distributed.DeviceMesh of one dimension or a "
        f"process group, got {describe_value(over)}{hint}"
    )


def one_dimension(mesh: Any) -> ValueError:
    names = list(mesh.mesh_dim_names or range(mesh.ndim))
    return ValueError(
        f"over must be a mesh of one dimension, got {mesh!r}, which has {mesh.ndim}. Name one of {names}: "
        f"recollect.Shard({names[-1]!r}, mesh=mesh)"
    )


def no_such_dimension(over: object, mesh: Any) -> ValueError:
    names = mesh.mesh_dim_names
    there = f"the dimensions {list(names)}" if names else f"{mesh.ndim} dimensions without names"
    return ValueError(f"over must be a dimension of the mesh, which has {there}, got {describe_value(over)}")


def no_process_group(shard: str) -> RuntimeError:
    return RuntimeError(
        f"inputs={shard} keeps the inputs of a region on several ranks, and there is no process group: call "
        "torch.distributed.init_process_group() before the model, or leave inputs= out where there is one rank"
    )


def no_mesh(shard: str) -> RuntimeError:
    return RuntimeError(
        f"inputs={shard} does not say of which mesh: no mesh is entered where the region is called, and none of its "
        "arguments, nor of the weights of its module, is a DTensor. Pass mesh=, or the mesh itself: "
        "recollect.Shard(mesh['tp'])"
    )


def not_a_member(shard: str) -> RuntimeError:
    return RuntimeError(
        f"inputs={shard}: this rank is not in that process group, or the group was destroyed. A region is called on "
        "the ranks that keep its inputs"
    )


def group_is_gone(ranks: Sequence[int]) -> RuntimeError:
    return RuntimeError(
        f"the parts of a region's inputs cannot be gathered: the process groups of {_ranks(ranks)} were destroyed "
        "after its forward. Call torch.distributed.destroy_process_group() when no backward is left to run"
    )


def inputs_differ(region: str, shard: str, name: str, seen: dict[int, str], others: Sequence[int]) -> CheckpointError:
    """`seen` is what each rank has, `others` are the ranks that have something else than the first."""
    kinds, first = set(seen.values()), min(seen)
    what = f"{name or 'the tensors to keep'} of the checkpointed region {region}"
    if len(kinds) > 1:
        difference = "; ".join(f"{one} on rank {rank}" for rank, one in seen.items())
    else:
        difference = f"{kinds.pop()}, with other values or strides on {_ranks(others)} than on rank {first}"
    error = CheckpointError(
        f"The ranks do not have copies of {what}: {difference}. inputs={shard} keeps one part of it on each rank, so "
        "it must be the same on all of them, bit by bit. What is different on each rank, such as a part of a batch or "
        "of a sequence, is in parts already: leave inputs= out, or make it a DTensor that says so"
    )
    error.cause = "an input differs between the ranks that keep it together"
    return error


def not_callable(argument: str, value: object) -> TypeError:
    return TypeError(f"{argument} must be callable (a function, a method, a module), got {describe_value(value)}")


def not_one_of(argument: str, value: object, allowed: Sequence[str]) -> ValueError:
    return ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def not_a_size(argument: str, value: object) -> Exception:
    kind = ValueError if isinstance(value, (int, str)) and not isinstance(value, bool) else TypeError
    return kind(f'{argument} must be a number of bytes, such as 2**30 or "1 GiB", got {describe_value(value)}')


def not_with(argument: str, value: object, other: str) -> ValueError:
    return ValueError(f"{argument} has no meaning with {other}, got {value!r}")


def not_a_bool(argument: str, value: object, or_else: str | None = None) -> TypeError:
    allowed = "True or False" if or_else is None else f"True, False or {or_else!r}"
    return TypeError(f"{argument} must be {allowed}, got {describe_value(value)}")


def not_a_loss(value: object) -> TypeError:
    return TypeError(
        "step must return the loss: a tensor with one element that requires grad, "
        f"got {describe_tensor(value) if isinstance(value, Tensor) else describe_value(value)}"
    )


def nothing_to_decide(model: str) -> ValueError:
    return ValueError(
        f"there is nothing to plan for in {model}: autograd saves nothing in its modules that could be let go of. Is "
        "it in training, with parameters that require grad, and called by the step?"
    )


def step_changes(module: str) -> ValueError:
    return ValueError(
        f"the step is not the same from one time to the next: {module or 'the model'} is called another number of "
        "times, or with tensors of other shapes. A plan is for one shape of batch: plan for the largest, with a step "
        "that does the same every time"
    )


def plan_of_another_model(model: str, differences: Sequence[str]) -> ValueError:
    shown = "".join(f"\n  {one}" for one in differences[:12])
    more = f"\n  and {len(differences) - 12} more" if len(differences) > 12 else ""
    return ValueError(f"the plan was made for another model than this one ({model} then). This one{shown}{more}")


def unexpected_keywords(names: Sequence[str], allowed: Sequence[str] = ()) -> ValueError:
    instead = f". What is taken: {', '.join(allowed)}" if allowed else ""
    return ValueError("Unexpected keyword arguments: " + ",".join(names) + instead)


def unknown_option(function: str, name: str, allowed: Sequence[str]) -> TypeError:
    return TypeError(f"{function} has no option {name!r}; it takes {', '.join(allowed)}")


def only_non_reentrant(options: Sequence[str]) -> ValueError:
    return ValueError(
        f"{' and '.join(options)} {'is' if len(options) == 1 else 'are'} only supported when use_reentrant=False, got "
        "use_reentrant=True: the reentrant variant runs the function as a whole and looks at nothing inside"
    )


def bad_contexts(got: object) -> TypeError:
    return TypeError(
        "context_fn must return two context managers, one for the forward and one for the replay, "
        f"got {describe_value(got)}"
    )


def not_dispatch_modes(got: object) -> AssertionError:
    return AssertionError(
        "under torch.compile a context_fn must generate a tuple of two `TorchDispatchMode`s, such as those of "
        f"create_selective_checkpoint_contexts, got {describe_value(got)}"
    )


def policy_and_contexts(mode: object) -> TypeError:
    return TypeError(
        "under torch.compile a policy goes together with a context_fn that gives the modes of "
        f"create_selective_checkpoint_contexts, and with no other, got {describe_value(mode)}: pass one of the two"
    )


def runs_later(function: Callable[..., Any], kind: str) -> TypeError:
    return TypeError(
        f"function must compute its result when it is called, got {describe_function(function)}, which gives "
        f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}: it would do its work after its region has ended, and nothing "
        "of it could be recomputed"
    )


# --- Errors of a region ---


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
    operator = f"that {_node_name(node)} saved " if node is not None else ""
    by = "" if change is None else f" It was changed by {change[0]}, at {change[1]}."
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


def _node_name(node: Any) -> str:
    try:
        return str(node.name())
    except Exception:
        return type(node).__name__


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


def note(error: BaseException, text: str) -> None:
    """`error.add_note(text)`; Python 3.10 does not show notes, but programs can read them."""
    with contextlib.suppress(Exception):  # an error that takes no notes is raised all the same
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]


# Every note about a rank begins so. An error that has one has been told about already.
RANK_NOTE = "recollect: "


def on_rank(rank: int, ranks: int, where: str) -> str:
    return f"{RANK_NOTE}on rank {rank} of {ranks}, {where}."


def other_rank(rank: int, at: str, where: str, error: str) -> str:
    return f"{RANK_NOTE}rank {rank} had failed before, at {at} UTC, {where}: {error}"


def in_replay(region: str) -> str:
    return f"in a replay of the checkpointed region {region}"


def in_reentrant_backward(region: str) -> str:
    return f"in the backward of the checkpointed region {region}"


def in_backward(region: str) -> str:
    return f"in a backward that had replayed the checkpointed region {region} last"


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


# --- Selective checkpointing ---


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


def operator_hint(value: object) -> str:
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
        "refuses such a change of what it has saved. In the next step the change waits for the copy; to be sure from "
        "the first step on, use the out-of-place operator, or change a clone"
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


# --- Chains ---


def add_step(error: Exception, step: str, *, again: bool = False) -> None:
    """Say on an error of the user's step which one it was."""
    if not isinstance(error, CheckpointError):
        note(error, f"It was raised in {step}{', which was run again for backward' if again else ''}.")


def opaque_state(path: str, value: object) -> TypeError:
    return TypeError(
        "a state is made of tensors and plain values (numbers, strings, None) in tuples, lists, dicts, deques, named "
        f"tuples and dataclasses, got {describe_value(value)} at state{path}. A tensor inside of it would be left "
        "without its gradient: take it apart, or let the step read it from outside if it stays the same"
    )


def other_structure(step: str, path: str, expected: str, got: str) -> TypeError:
    return TypeError(
        f"{step} changes the structure of the state: at state{path} it was given {expected} and returned {got}. All "
        "states of a chain are alike; tensors may change their shapes, and plain values may change"
    )


def no_output(step: str, got: object) -> TypeError:
    return TypeError(
        f"with outputs=True every step returns a tuple of two, the next state and its output; {step} returned "
        f"{describe_value(got)}"
    )


def step_changes_state(step: str, number: int) -> CheckpointError:
    error = CheckpointError(
        f"{step} changes the state that it is given in place, and state {number} is kept, to be run from again. "
        "(One of the variables needed for gradient computation has been modified by an inplace operation.) Use "
        "out-of-place operators in the step, or let it begin with a clone"
    )
    error.cause = f"step {number} changes its state in place"
    return error


def kept_state_changed(step: str, number: int) -> CheckpointError:
    error = CheckpointError(
        f"state {number} of the chain, which {step} takes, was kept and has been changed in place since, by a step "
        "that was handed on a tensor of it or by the program. (One of the variables needed for gradient computation "
        "has been modified by an inplace operation.) Use out-of-place operators, or change a clone"
    )
    error.cause = f"state {number} was changed in place"
    return error


def first_state_changed(step: str) -> CheckpointError:
    error = CheckpointError(
        f"the first state of the chain, which {step} takes, has been modified by an inplace operation since: it cannot "
        "be run from again. Use the out-of-place operator, or pass a clone"
    )
    error.cause = "the first state was changed in place"
    return error


def unknown_history(step: str, node: object) -> CheckpointError:
    error = CheckpointError(
        f"{step} reads a tensor that it was not given and that has a history (it is a result of {_node_name(node)}), "
        "and it cannot be told which tensor that is, so its gradient would be missing. Make it a part of the state, "
        "which the step returns unchanged"
    )
    error.cause = "a tensor from outside, with a history, that cannot be found"
    return error


def unknown_leaf(step: str, what: str) -> CheckpointError:
    error = CheckpointError(
        f"{step} reads {what}, which no step has read when the chain was run first: its gradient would be missing. "
        "Let steps read the same tensors from outside whenever they are run, give the functions as a list, one for "
        "each step, or make it a part of the state"
    )
    error.cause = f"{what} is read only when the step is run again"
    return error


def not_cut(step: str, node: object) -> CheckpointError:
    error = CheckpointError(
        f"{step} reads a tensor that it was not given (a result of {_node_name(node)}), and also something which that "
        "was computed from, and hands it to an autograd Function or to C: its gradient cannot be told from that of the "
        "other. Make it a part of the state, which the step returns unchanged"
    )
    error.cause = "a tensor from outside, with a history that the step reads too"
    return error


def needs_more(step: str) -> CheckpointError:
    error = CheckpointError(
        f"what {step} gives needs grad now, and did not where the same function was run first on a state with the same "
        "needs: a gradient would be missing. The step does not do the same every time; give the functions as a list, "
        "one for each step, or let a tensor of the first state require grad"
    )
    error.cause = "a step does not always give results that need grad"
    return error


def other_outputs(step: str, then: int, now: int) -> CheckpointError:
    error = CheckpointError(
        f"{step} gave an output of {then} tensors and gives one of {now} when it is run again: it did not take the "
        "same path twice"
    )
    error.cause = "another branch was taken"
    return error


def other_state(step: str, then: Sequence[Signature], now: Sequence[Signature]) -> CheckpointError:
    place = next(place for place, (one, other) in enumerate(zip(then, now, strict=True)) if one != other)
    error = CheckpointError(
        f"tensor {place} of the state that {step} gives is {describe_signature(now[place])} when the step is run "
        f"again, and was {describe_signature(then[place])}: the steps did not do the same twice"
    )
    error.cause = "steps that are not the same twice"
    return error


def other_values(step: str, place: int, signature: Signature, apart: float) -> CheckpointError:
    error = CheckpointError(
        f"Recomputed values differ from those of the forward: tensor {place} of the state that {step} gives "
        f"({describe_signature(signature)}) is another one when steps are run again, by {apart:.1e} of its norm. "
        "Somewhere between the kept state before it and this one, a step depends on something that is neither in the "
        'state nor preserved: a global, a counter, another random generator (preserve_rng_state="all"), the time'
    )
    error.cause = "steps that are not the same twice"
    return error


def budget_too_small(budget: int, minimum: int) -> InfeasibleError:
    error = InfeasibleError(
        f"a budget of {describe_amount(budget, up=False)} is too small for the chain: one step, its state and its "
        f"gradient take {describe_amount(minimum, up=True)} ({minimum} bytes) with a single state kept. Give that much"
    )
    error.smallest, error.where = minimum, "the step that takes most"
    return error


@functools.cache
def once_needs_no_grad(function: str) -> str:
    return (
        f"a gradient reaches {function}, which runs once in a step of a chain: what it gave has no history when the "
        "step is run again. Use recollect.pin, or call it outside of recollect.once"
    )


def noted_elsewhere(step: int, function: str) -> CheckpointError:
    error = CheckpointError(
        f"step {step} of the chain came to {function}, which is pinned or to run once, where it did something else "
        "when it was run first: it did not take the same path twice before it got there"
    )
    error.cause = "another branch was taken"
    return error


def chain_differentiated_twice() -> RuntimeError:
    return RuntimeError(
        "a chain cannot be differentiated twice (create_graph=True): the graph of its backward would hold every step, "
        "which is what its slots are there to avoid. Pass slots of at least its length, with which every step is a "
        "region of its own and can be, or give fewer steps to the chain"
    )


def chain_in_dual_level() -> RuntimeError:
    return RuntimeError(
        "a chain has no forward-mode derivative, and it runs within torch.autograd.forward_ad: its tangents would be "
        "lost. Run it under torch.no_grad(), where it is a plain loop, or pass slots of at least its length, with "
        "which every step is a region of its own"
    )


def late_change(chain: str, what: str) -> CheckpointError:
    error = CheckpointError(
        f"steps of the chain that begins with {chain} read {what} and change it in place, not from the first one on "
        "but later, and what it held where they are run again from is not known. Make it a part of the state, or give "
        "the functions as a list, one for each step"
    )
    error.cause = f"{what} is changed in place by a later step"
    return error


def chain_freed() -> RuntimeError:
    return RuntimeError(
        "Trying to backward through the graph a second time: what the chain had kept was freed by the first backward. "
        "Pass retain_graph=True to that one"
    )


# --- Modules that are checkpointed in place ---


def not_a_module(what: str, value: object, *, lists: bool) -> TypeError:
    allowed = "a torch.nn.Module or a list of them" if lists else "a torch.nn.Module"
    return TypeError(f"{what} must be {allowed}, got {describe_value(value)}")


def takes_no_hooks(module: object) -> TypeError:
    return TypeError(
        f"module must be one that takes hooks, got a scripted module ({type(module).__name__}): apply it to a module "
        "that calls this one, or use recollect.checkpoint"
    )


def not_in_composable() -> NotImplementedError:
    return NotImplementedError(
        "use_reentrant=True is not supported in composable checkpoint. Please use torch.utils.checkpoint.checkpoint "
        "instead. (recollect.dropin.checkpoint has it too.)"
    )


def applied_twice(name: str, module: object) -> AssertionError:
    return AssertionError(
        "Each distinct composable distributed API can only be applied to a module once. "
        f"{name} has already been applied to the following module:\n{module}"
    )


def not_applied(name: str, module: object) -> ValueError:
    return ValueError(f"module must be one that {name} was applied to; it has not been applied to this one:\n{module}")


def other_number_of_modules(name: str, given: int, returned: int) -> AssertionError:
    return AssertionError(
        f"{name} must return as many modules as it was given (or None, which means these): it was given {given} and "
        f"returned {returned}. A module inside of another one in the list is not counted"
    )


def names_changed(kind: str, before: Sequence[str], after: Sequence[str]) -> RuntimeError:
    lines = [f"Checking {kind}: Composable distributed API implementations cannot modify FQNs."]
    missing = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    if missing:
        lines.append(f"What is missing: {', '.join(map(repr, missing))}")
    if new:
        lines.append(f"What is new: {', '.join(map(repr, new))}")
    then, now = ([name for name in one if name in before and name in after] for one in (before, after))
    if then != now:
        moved = [name for name, other in zip(then, now, strict=True) if name != other]
        lines.append(
            f"What changed its order: {', '.join(map(repr, moved))}. (They cannot modify the order of FQNs either.)"
        )
    return RuntimeError("\n".join(lines))


def plain_tensor_changed(tensor: Tensor, node: object) -> RuntimeError:
    operator = f"that {_node_name(node)} saved " if node is not None else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: the tensor "
        f"{operator}({describe_tensor(tensor)})"
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
        "function depended on anything that needs grad"
    )


def only_tuples(value: object) -> RuntimeError:
    return RuntimeError(f"Only tuple of tensors is supported. Got {type(value).__name__}")


# --- Files that tensors are offloaded to ---

_DISK_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.ENOENT: "the directory is gone",
    errno.ENOTDIR: "it is not a directory",
    errno.EEXIST: "it is not a directory",
    errno.EACCES: "it may not be written to",
    errno.EPERM: "it may not be written to",
    errno.EROFS: "the file system is read-only",
}
_ANOTHER_DIRECTORY = 'Use another directory, recollect.Offload(to="disk", directory=...)'


def not_written_to_disk(directory: str, wanted: int, free: int | None, cause: BaseException) -> Exception:
    """Files could not be made or written; `free` is None where nobody can tell."""
    code = cause.errno if isinstance(cause, OSError) else None
    reason = _DISK_REASONS.get(code, "") if code is not None else ""
    message = (
        f"could not offload {wanted} bytes to a file in {directory}: {reason or cause or type(cause).__name__} "
        f"({'an unknown number of' if free is None else free} bytes are free there). Nothing else was lost: the step "
        f"can be run again. {_ANOTHER_DIRECTORY}, free some room in this one, or offload less"
    )
    return CheckpointError(message) if code is None else OSError(code, message)


def not_read_from_disk(directory: str, wanted: int, cause: BaseException) -> Exception:
    message = (
        f"could not bring back {wanted} bytes that were offloaded to a file in {directory}: "
        f"{cause or type(cause).__name__}. Run the step again, and if it happens again look after the disk. "
        f"{_ANOTHER_DIRECTORY}"
    )
    if isinstance(cause, OSError) and cause.errno is not None:
        return OSError(cause.errno, message)
    return CheckpointError(message)


def torn_on_disk(directory: str, wanted: int, what: str) -> CheckpointError:
    error = CheckpointError(
        f"{wanted} bytes that were offloaded to a file in {directory} did not come back as they were written: {what}. "
        "Somebody else wrote to the file, or the disk is failing; gradients would have been wrong. Run the step "
        f"again. {_ANOTHER_DIRECTORY}"
    )
    error.cause = what
    return error


def written_by_another_process(directory: str, wanted: int) -> RuntimeError:
    return RuntimeError(
        f"{wanted} bytes were offloaded to a file in {directory} before this process was forked, and belong to its "
        "parent, which may write over them at any time. Run forward and backward in the same process"
    )


# --- Reports ---


def missing_extra(what: str, package: str, extra: str) -> ImportError:
    return ImportError(
        f"{what} needs {package}, which is not installed: pip install 'recollect[{extra}]'", name=package
    )


def cannot_write_report(path: str, why: str) -> OSError:
    return OSError(f"the report cannot be written to {path}: {why}. Give the path of a file in a directory that exists")
