"""Groups: several backward calls that count as one pass, so that they share each replay.

A group is carried in torch's own thread-local state, because autograd's device threads see that and do not see
Python's. It owns the end of its pass: what its replays recovered and nobody took is dropped when the group object
dies.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from recollect._torch import current_group, set_current_group


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
