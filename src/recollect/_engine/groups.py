"""Groups: several backward calls that count as one pass, so that they share each replay.

A group is carried in torch's own thread-local state, because autograd's device threads see that and do not see
Python's. It owns the end of its pass: what its replays recovered and nobody took is dropped when the group object
dies.

Which calls may share. Each gradient is computed once: a node that gives one gradient in one call and another in a later
one (a linear layer whose input's gradient is needed at once and whose weight's can wait, as pipelines have it) asks
for its saved tensors twice, and they are held in between. A node that is asked for the same gradient twice belongs to
calls that overlap.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor

from recollect._torch import current_group, current_node, gradients_of, set_current_group


class GraphExecGroup:
    """Backward calls under one instance share one replay of each region. They must cover disjoint parts of the graph.

    Example:
        >>> import torch, recollect
        >>> from recollect.dropin import GraphExecGroup
        >>> calls = []
        >>> def block(a, b):
        ...     calls.append(1)
        ...     return a.exp(), b.sin().exp()
        >>> a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> x, y = recollect.checkpoint(block, a, b)
        >>> with GraphExecGroup():
        ...     x.sum().backward()
        ...     y.sum().backward()
        >>> len(calls)  # one forward, one replay
        2
    """

    __slots__ = ("__weakref__",)

    may_overlap = False  # whether calls that do are served by another replay, rather than refused

    @classmethod
    def _get_current_group(cls) -> Any:
        return current_group()

    def __enter__(self) -> GraphExecGroup:
        if current_group() is not None:
            raise RuntimeError("GraphExecGroup contexts cannot be nested: leave the one that is in force first")
        set_current_group(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_current_group(None)


class Shared:
    """What a replay recovered for all calls of a group."""

    __slots__ = ("_given", "tensors")

    def __init__(self, tensors: list[Tensor | None]) -> None:
        self.tensors = tensors
        self._given: dict[int, set[int]] = {}  # for which gradients, where others are yet to come

    def take(self, index: int) -> Tensor | None:
        """The tensor of a slot for the node that runs; None if a call before needed it for the same gradient."""
        tensor = self.tensors[index]
        if tensor is None:
            return None
        every, now = gradients_of(current_node())
        given = self._given.setdefault(index, set())
        if not given.isdisjoint(now):
            return None
        given |= now
        if given >= every:
            self.tensors[index] = None
        return tensor
