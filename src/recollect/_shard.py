"""`Shard`: over which ranks the inputs of a region are kept, one part on each, and the process group for that.

Ranks that work on the same tensors, as those of tensor parallel do, hold the input of a layer in copies. Which ranks
these are is said by a dimension of a device mesh or by a process group; it is found out when a region's forward
begins, because a model may be decided before there are any groups.

A group of its own. The parts are gathered while backward goes on with other things, and collectives of one group are
matched in the order in which they are issued. So each such group of ranks gets a second one that nobody else uses,
with the same backend and timeout, when it is first needed. Its members alone take part in making it.

What this is not: nothing is kept or sent here (`_gathering.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any

from torch import Tensor, distributed
from torch.nn import Module

from recollect import _errors
from recollect._sizes import MIN_BYTES, bytes_of
from recollect._torch import current_mesh, group_exists, is_group, is_mesh, mesh_of, new_group_like


@dataclass(frozen=True, slots=True)
class Shard:
    """Keep the inputs of a region in parts, one on each of the ranks that have copies of them.

    Every rank keeps one part, and all parts are gathered again for the replay, ahead of it where another such region is
    computed from this one's results: while that one's backward runs. What is kept so are the tensors among the
    arguments that were computed and need grad; all others stay as they are.

    All ranks of the group must call the same regions in the same order and run the same backward passes over them, as
    tensor parallel asks for anyway: gathering is a collective. So is reading a saved tensor of such a region by hand;
    and where the replay of a region is compared by value, in the first step that is, so is its forward, which sees
    whether the ranks do have copies. `recollect.verify_again` is called on all ranks or on none.

    Args:
        over: A dimension of the mesh, by name or by number; a device mesh of one dimension, such as `mesh["tp"]`; or a
            process group.
        mesh: The device mesh of the dimension. By default the one that is entered (`with mesh:`) where the region is
            called, or else that of a DTensor among its arguments or the weights of its module.
        min_bytes: Smaller tensors stay where they are. A number of bytes or a string such as "1 MiB".

    Example:
        >>> import recollect
        >>> recollect.Recompute(inputs=recollect.Shard("tp"))
        Recompute(inputs=Shard('tp'))
    """

    over: Any
    _: KW_ONLY
    mesh: Any = None
    min_bytes: int | str = MIN_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_bytes", bytes_of("min_bytes", self.min_bytes))
        over, mesh = self.over, self.mesh
        if mesh is not None and not is_mesh(mesh):
            raise TypeError(f"mesh must be a torch.distributed.DeviceMesh or None, got {_errors.describe_value(mesh)}")
        if is_mesh(over) or is_group(over):
            if mesh is not None:
                raise _errors.not_with("mesh", mesh, f"over={over!r}, which says it all")
            if is_mesh(over) and over.ndim != 1:
                raise _errors.one_dimension(over)
        elif not isinstance(over, str) and (isinstance(over, bool) or not isinstance(over, int)):
            raise _errors.not_ranks(over)
        elif mesh is not None:
            _dimension(over, mesh)

    def __repr__(self) -> str:
        given = [f"<process group of ranks {_ranks_of(self.over)}>" if is_group(self.over) else repr(self.over)]
        if self.mesh is not None:
            given.append(f"mesh={self.mesh!r}")
        if self.min_bytes != MIN_BYTES:
            given.append(f"min_bytes={self.min_bytes!r}")
        return f"Shard({', '.join(given)})"


def _ranks_of(group: Any) -> list[int] | str:
    return distributed.get_process_group_ranks(group) if group_exists(group) else "that are not there any more"


def _dimension(over: str | int, mesh: Any) -> int:
    """The number of a dimension of a mesh."""
    if isinstance(over, str):
        names: Sequence[str] = mesh.mesh_dim_names or ()
        if over not in names:
            raise _errors.no_such_dimension(over, mesh)
        return names.index(over)
    count: int = mesh.ndim
    if not -count <= over < count:
        raise _errors.no_such_dimension(over, mesh)
    return over % count


# --- The ranks that are meant ---


@dataclass(frozen=True, slots=True)
class Team:
    """Ranks that have copies of the same tensors."""

    _group: weakref.ref[Any]  # weak, because `destroy_process_group` is to be the end of it
    ranks: tuple[int, ...]  # in the whole job; ascending, as they are in the group
    rank: int  # this one's place among them

    @property
    def group(self) -> Any:
        """The process group for gathering, and for nothing else."""
        group = self._group()
        if group is None:
            raise _errors.group_is_gone(self.ranks)
        return group

    def __len__(self) -> int:
        return len(self.ranks)


# By the group of the same ranks that the user has.
_teams: weakref.WeakKeyDictionary[Any, Team] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def team_of(shard: Shard, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Team:
    """The ranks that a decision means where a function is called as a region, with these tensors."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise _errors.no_process_group(repr(shard))
    group = _group_of(shard, function, tensors)
    if not (is_group(group) and group_exists(group)):
        raise _errors.not_a_member(repr(shard))
    team = _teams.get(group)
    if team is None:
        with _lock:
            team = _teams.get(group)
            if team is None:
                team = _teams[group] = _make(group)
    return team


def _group_of(shard: Shard, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    over = shard.over
    if is_group(over):
        return over
    if is_mesh(over):
        return over.get_group()
    mesh = shard.mesh
    if mesh is None:
        mesh = current_mesh()
    if mesh is None:
        owner = getattr(function, "__self__", function)
        weights = owner.parameters() if isinstance(owner, Module) else ()
        mesh = next((found for found in map(mesh_of, chain(tensors, weights)) if found is not None), None)
    if mesh is None:
        raise _errors.no_mesh(repr(shard))
    return mesh.get_group(_dimension(over, mesh))


def _make(group: Any) -> Team:
    ranks = tuple(sorted(distributed.get_process_group_ranks(group)))
    own = new_group_like(group, ranks) if len(ranks) > 1 else group
    return Team(weakref.ref(own), ranks, ranks.index(distributed.get_rank()))
