"""`torch.distributed.pipelining`: one replay for both halves of a backward that is split.

Zero-bubble schedules take the gradients of a stage's inputs first, so that the stage before can go on, and those of its
weights later, one call of autograd for every group of weights. Each call would replay the regions of the stage that it
comes by. `share_replays` makes one `GraphExecGroup` of all calls for a microbatch: every region is replayed once, and
what the weights still need is held until then, as it is without checkpointing.

Schedules that split nothing (GPipe, 1F1B, interleaved) need nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch.distributed.pipelining import PipelineStage

from recollect import _errors
from recollect._engine.groups import GraphExecGroup

_INPUTS, _WEIGHTS = "backward_one_chunk", "backward_weight_one_chunk"


class _Microbatch(GraphExecGroup):
    """The calls for one microbatch. A weight that is used twice leads two of them through the same nodes."""

    __slots__ = ()
    may_overlap = True


class _Sharing:
    """Stands before the two methods of a stage."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self._inputs, self._weights = getattr(stage, _INPUTS), getattr(stage, _WEIGHTS)
        self._groups: dict[int, _Microbatch] = {}
        setattr(stage, _INPUTS, self._backward)
        setattr(stage, _WEIGHTS, self._backward_weights)

    def _backward(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        if full_backward:
            return self._inputs(bwd_chunk_id, loss, full_backward, *args, **kwargs)
        group = _Microbatch()
        with group:
            result = self._inputs(bwd_chunk_id, loss, full_backward, *args, **kwargs)
        self._groups[bwd_chunk_id] = group
        return result

    def _backward_weights(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._groups.pop(bwd_chunk_id, None) or _Microbatch():
            return self._weights(bwd_chunk_id, *args, **kwargs)

    def remove(self) -> None:
        for name in (_INPUTS, _WEIGHTS):
            vars(self.stage).pop(name, None)
        self._groups.clear()


class Handle:
    """What `share_replays` did: `remove()` undoes it; as a context manager it does so at the end."""

    def __init__(self, sharing: list[_Sharing]) -> None:
        self._sharing = sharing

    def remove(self) -> None:
        """Leave the stages as they were."""
        for one in self._sharing:
            one.remove()
        self._sharing = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def share_replays(stages: PipelineStage | Iterable[PipelineStage]) -> Handle:
    """Let the two halves of a split backward share the replays of the regions in a stage.

    Args:
        stages: A stage of a pipeline, or the stages of this rank.

    Returns:
        A handle with `remove()`, which is also a context manager.

    Example:
        >>> import torch, recollect
        >>> from torch.distributed.pipelining import PipelineStage
        >>> from recollect.integrations.pipelining import share_replays
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> handle = recollect.apply(layers, {"": recollect.Recompute()})
        >>> stage = PipelineStage(layers, 0, 1, torch.device("cpu"))
        >>> shared = share_replays(stage)  # then ScheduleInterleavedZeroBubble([stage], ...)
        >>> shared.remove()
        >>> torch.distributed.destroy_process_group()
    """
    given = list(stages) if isinstance(stages, Iterable) else [stages]
    for one in given:
        if not (callable(getattr(one, _INPUTS, None)) and callable(getattr(one, _WEIGHTS, None))):
            raise TypeError(
                "stages must be a stage of torch.distributed.pipelining or several of them, "
                f"got {_errors.describe_value(one)}"
            )
        if isinstance(getattr(getattr(one, _INPUTS), "__self__", None), _Sharing):
            raise ValueError("stages: share_replays has been applied to this stage already; remove() its handle first")
    if not given:
        raise ValueError("stages must hold at least one stage, got none")
    return Handle([_Sharing(one) for one in given])
