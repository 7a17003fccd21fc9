"""Ranks of a distributed job: over which inputs are kept, and notes about those that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recollect._errors.kinds import CheckpointError
from recollect._errors.words import describe_value


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
