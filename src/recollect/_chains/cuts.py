"""Where the graph of a step is cut off from what was there before it.

A tensor from outside with a history is an edge that leads out of the step's graph. Mostly that does no harm: when a
step is differentiated, autograd is asked for the gradient there and goes no further. It does where

- another tensor that is asked for lies further on (an embedding that is read, and whose weight is read as well): its
  gradient would contain what comes by the edge, and then come by there once more;
- the graph behind the edge is large: autograd looks through all of it for every step;
- the tensor retains its gradient: it would take that of every step.

Then a leaf stands for the tensor, wherever torch's functions are given it (a torch-function mode), while a step is
run with a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from recollect._chains.outside import edge_of
from recollect._torch import LEAF_NODE, out_of_sight

_LARGE = 1000  # nodes


def find_cuts(tensors: Sequence[Tensor]) -> list[int]:
    """The places of those for which a leaf has to stand."""
    with_history = [place for place, tensor in enumerate(tensors) if tensor.grad_fn is not None]
    if not with_history:
        return []
    asked_for = {edge_of(tensor) for tensor in tensors}
    return [place for place in with_history if tensors[place].retains_grad or _leads_on(tensors[place], asked_for)]


def _leads_on(tensor: Tensor, asked_for: set[Any]) -> bool:
    """Whether something that is asked for lies behind a tensor, or too much to look for it."""
    seen: set[Any] = {tensor.grad_fn}
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        if len(seen) > _LARGE:
            return True
        for edge in waiting.pop().next_functions:
            node: Any = edge[0]
            if node is None:
                continue
            if edge in asked_for:
                return True
            if node.__class__ is LEAF_NODE:
                if id(node.variable) in asked_for:
                    return True
            elif node not in seen:
                seen.add(node)
                waiting.append(node)
    return False


class StandIns(TorchFunctionMode):
    """Leaves that stand for tensors, as long as this mode is in force."""

    def __init__(self, tensors: Sequence[Tensor], places: Sequence[int]) -> None:
        super().__init__()
        with out_of_sight():
            self.leaves = {place: tensors[place].detach().requires_grad_() for place in places}
        self._by_identity = {id(tensors[place]): leaf for place, leaf in self.leaves.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(self._instead, args), **{key: self._instead(value) for key, value in (kwargs or {}).items()})

    def _instead(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._by_identity.get(id(value), value)
        kind = type(value)
        if (kind is list or kind is tuple) and any(isinstance(one, (Tensor, list, tuple)) for one in value):
            return kind(map(self._instead, value))
        return value
