"""Watch a region's forward: every tensor that is saved in it, by which operator, on which line, and over which memory.

The engine tells of every tensor that autograd saves and of every tensor that a policy keeps, while it happens
(`scope.Watch`). A dispatch mode around the region notes the operators. What is noted holds no tensor.

Which operator. Autograd numbers its nodes, and the number does not move while an operator runs: one that saves its
inputs does so before it is dispatched under the same number, one that saves its outputs does so after. An operator
that works in place first makes a clone, which has a number of its own; on a view it adds nodes when it is done. An
autograd Function, inside of which other operators run, is read off the stack.

What this is not: it draws no conclusions (explain.py).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from recollect._engine.scope import here
from recollect._engine.selective import keep_results
from recollect._inputs import by_hand, find_tensors, is_parameter
from recollect._kept import Kept
from recollect._torch import (
    METADATA_OPERATORS,
    TorchDispatchMode,
    changes_arguments,
    is_library_file,
    sequence_number,
    without_torch_function,
)
from recollect._verify import signature, user_code


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor that an operator saved, or an output that the policy keeps.

    Attributes:
        bytes: Of the tensor; the memory behind it may be larger.
        shape: Its shape.
        dtype: "float32".
        device: "cpu", "cuda:0".
        operator: What saved it; for an output that the policy keeps, what made it; "?" where that is not known.
        region: The path of the named regions around it, "" outside of any.
        module: The path of the modules around it, "" outside of any.
        line: The line of user code inside the function, as "file:line in function"; "" if there is none.
        decision: "kept", "recomputed", "offloaded", "input", "parameter" or "outside".
        is_output: Whether the function returns it, or another view of its memory.
        storage: A number that rows over the same memory share.
    """

    bytes: int
    shape: tuple[Any, ...]
    dtype: str
    device: str
    operator: str
    region: str
    module: str
    line: str
    decision: str
    is_output: bool = False
    storage: int = -1


def _as_tuples(shape: Any) -> Any:
    """A shape of plain numbers; the ragged dimension of a nested tensor has a name instead."""
    if isinstance(shape, tuple):
        return tuple(map(_as_tuples, shape))
    return shape if isinstance(shape, int) else str(shape)


# --- The memory behind a tensor ---


def _pieces(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory of their own that a tensor consists of: mostly itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        return [piece for name in names for piece in _pieces(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def memory_of(tensors: Iterable[Tensor]) -> dict[Any, int]:
    """The storages behind tensors, and their bytes.

    The keys are weak references: a later storage at the same address is not taken for one that is gone, and none
    stays alive for being noted.
    """
    found: dict[Any, int] = {}
    for piece in (piece for tensor in tensors for piece in _pieces(tensor)):
        try:
            storage = piece.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a layout of its own
            found[id(piece)] = piece.numel() * piece.element_size()
        else:
            found[StorageWeakRef(storage)] = storage.nbytes()
    return found


def _size(tensor: Tensor) -> int:
    """The bytes of a tensor; an expanded one has no more of them than its memory."""
    return sum(min(piece.numel() * piece.element_size(), *memory_of([piece]).values()) for piece in _pieces(tensor))


# --- Watching ---

_OWN_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Python in 2.13; in 2.15 it is not, and leaves no frame to be read.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
_KEEPING = {Kept.__init__.__code__: Kept, keep_results.__code__: keep_results}
_CLONE = torch.ops.aten.clone.default
_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # torch.tensor([1.0]) ends in it: a view in form, and yet new


@dataclass(slots=True)
class Saving:
    """One call of `watch`."""

    row: Row  # as the engine told it; the operator is empty if the one that saves is yet to be seen
    memory: dict[Any, int]
    view: Any  # how the memory is read
    is_parameter: bool
    number: int  # autograd's at the time, -1 for an output that the policy keeps
    by_autograd: bool  # not by the policy, nor as an input of an inner region
    writer: str  # the last operator before, if that one writes to its arguments


class Watcher(TorchDispatchMode):
    """Notes operators as a mode, and what is saved as a `Watch`. It holds no tensor."""

    supports_higher_order_operators = True

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.savings: list[Saving] = []
        self.policy_kept = False
        self._paused = False
        self._given = memory_of(arguments)
        self._made: dict[Any, str] = {}  # the storages that operators made, and which did
        self._operators: dict[int, str] = {}  # by autograd's number
        self._clones: set[int] = set()
        self._writer = ""
        self.nodes: dict[int, str] = {}  # what autograd calls its nodes, by number; for Functions that leave no frame

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        name, number = str(func), sequence_number()
        if func is _CLONE:
            self._clones.add(number)
        elif func not in METADATA_OPERATORS and not _is_in_a_function(func) and not _is_in_kept(sys._getframe(1)):
            self._operators.setdefault(number, name)
            self._writer = name if changes_arguments(func) else ""
        result = func(*args, **kwargs)
        self._paused = True
        try:
            with without_torch_function():
                given = {} if func is _LIFT_FRESH else memory_of(find_tensors(args, kwargs)[0])
                made = memory_of(find_tensors((result,), {})[0])
            self._made.update((one, name) for one in made if one not in given)
        finally:
            self._paused = False
        return result

    def watch(self, tensor: Tensor, decision: str) -> None:
        self._paused = True
        try:
            with torch.no_grad(), without_torch_function():
                self._watch(tensor, decision, sys._getframe(1))
        finally:
            self._paused = False

    def _watch(self, tensor: Tensor, decision: str, frame: FrameType) -> None:
        scope = here.scope
        assert scope is not None, "hooks of a region are in force while its function runs"
        memory = memory_of([tensor])
        packer = _packer(frame)
        if packer is Kept:  # an inner region keeps it, as was just told, by handing it to this one, which decides
            self.savings[-1].row = dataclasses.replace(self.savings[-1].row, decision=decision)
            return
        if decision == "recomputed" or (scope.saving and packer is not keep_results):
            number, by_autograd = sequence_number(), not by_hand.packing
            operator = packer or self._operators.get(number, "")
        else:
            number, by_autograd = -1, False
            operator = next((self._made[one] for one in memory if one in self._made), "?")
        self.policy_kept = self.policy_kept or decision != "recomputed"
        shape, dtype, device = signature(tensor)
        module, lines = user_code(frame)
        row = Row(
            bytes=_size(tensor),
            shape=_as_tuples(shape),
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            operator=operator,
            region=scope.whole_path(),
            module=module,
            line=lines[-1] if lines else "",
            decision=decision,
        )
        has_view = tensor.layout is torch.strided and not tensor.is_nested
        view = (tensor.storage_offset(), tensor.stride()) if has_view else None
        self.savings.append(Saving(row, memory, view, is_parameter(tensor), number, by_autograd, self._writer))

    def decision_for(self, saving: Saving, one: Any) -> str:
        """What becomes of one of the storages behind a saving. One that was there before the call stays alive."""
        if one in self._given:
            return "input"
        if one in self._made:
            return saving.row.decision
        return "parameter" if saving.is_parameter else "outside"

    def operator_of(self, saving: Saving) -> str:
        """What saved it, now that all operators are known."""
        number = saving.number
        after_clone = self._operators.get(number + 1) if number + 1 in self._clones else None
        known = saving.row.operator or self.nodes.get(number - 1) or self._operators.get(number)
        return known or after_clone or saving.writer or "?"


def _is_in_a_function(operator: Any) -> bool:
    """Whether an operator runs inside of an autograd Function that leaves no frame: what it saves is not its doing."""
    return _APPLY is None and not torch.is_grad_enabled() and getattr(operator, "namespace", "aten") == "aten"


def _is_in_kept(frame: FrameType | None) -> bool:
    """Whether `Kept` runs an operator, to copy to the host, in the midst of another operator."""
    while frame is not None and is_library_file(frame.f_code.co_filename):
        if _KEEPING.get(frame.f_code) is Kept:
            return True
        frame = frame.f_back
    return False


def _packer(frame: FrameType | None) -> Any:
    """Who tells of a tensor, other than an operator that saves it: `Kept`, which hands it to a region's hook,
    `keep_results` for an operator's result, or the name of what saves it, or "".
    """
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        if frame.f_code in _KEEPING:
            return _KEEPING[frame.f_code]
        frame = frame.f_back
    if by_hand.packing:
        return "recollect.checkpoint"  # its inputs
    name = frame.f_locals["cls"].__name__ if frame is not None and frame.f_code is _APPLY else ""
    # Of operators that are written in Python (`torch.library`) the operator itself is seen.
    return f"{name}.apply" if name and not name.startswith("GeneratedBackwardFor_") else ""
