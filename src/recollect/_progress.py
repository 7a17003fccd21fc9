"""Where some parts of a model are offloaded and others are not, the others tell how far backward has come.

What was offloaded first is needed last. It has to be on its way back while backward is still busy with parts that
offload nothing and ask for nothing, so these parts leave marks in the graph: one forward hook on each module that is
called before or after one that is offloaded. In the forward it is there that memory goes back which has left by then.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from recollect._engine.scope import here
from recollect._inputs import find_tensors
from recollect._stores.chosen import mark
from recollect._torch import never_begin, remove_forward_hooks
from recollect.policy import Decision, Offload, Recompute


def is_offloaded(decision: Decision | None) -> bool:
    """Whether it sends anything to a store when a module is called outside of a region."""
    return isinstance(decision, Offload) or (isinstance(decision, Recompute) and isinstance(decision.inputs, Offload))


class _Mark:
    """A forward hook that leaves marks. A copy of the module has it too, and its marks are the same."""

    __slots__ = ("_part",)

    def __init__(self, part: int) -> None:
        self._part = part

    def __call__(self, module: Module, args: Any, result: Any) -> None:
        if not is_dynamo_compiling():
            self._tell(result)

    @never_begin
    def _tell(self, result: Any) -> None:
        if here.scope is None or not here.scope.following:
            mark(find_tensors((result,), {})[0], self._part)


def watch(name: str, module: Module) -> RemovableHandle:
    """Let a module leave marks; its name tells it from others."""
    return module.register_forward_hook(_Mark(1 + zlib.crc32(name.encode())))


def stop_watching(modules: Iterable[Module]) -> None:
    """Also those that are copies of watched ones."""
    for module in modules:
        remove_forward_hooks(module, _Mark)
