"""What is saved in a function, by whom, how much, and what becomes of it.

The function is run once as a region and watched: the engine tells of every tensor that autograd saves and of every
tensor that a policy keeps, while it happens. A dispatch mode around the region notes the operators. From both comes
a table, which is plain data: it holds no tensor.

Words. A row is one tensor saved by one operator. Its decision is that of the memory behind it: "parameter", "input"
and "outside" (made before the call and not passed to it: a buffer, a closed-over tensor) stay alive whatever a region
does; "kept" and "offloaded" are the policy's; "recomputed" is what a region lets go of. Where there are several claims
on the same memory, the first of these holds.

Which operator. Autograd numbers its nodes, and the number does not move while an operator runs: one that saves its
inputs does so before it is dispatched under the same number, one that saves its outputs does so after. An operator
that works in place first makes a clone, which has a number of its own; on a view it adds nodes when it is done. An
autograd Function, inside of which other operators run, is read off the stack.

What this is not: nothing is timed and no peak is found. What saved-tensor hooks inside the function take is theirs,
and not shown.
"""

from __future__ import annotations

import dataclasses
import html
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from recollect import _errors
from recollect._ambient import RandomState
from recollect._checkpoint import _RUN_LATER, PolicyLike, _options, _refuse_to_run_later
from recollect._engine.frame import run_region
from recollect._engine.scope import here
from recollect._inputs import by_hand, find_tensors
from recollect._stores import Kept
from recollect._torch import (
    METADATA_OPERATORS,
    TorchDispatchMode,
    accelerator_module,
    changes_arguments,
    is_initialised,
    is_library_file,
    sequence_number,
    without_torch_function,
)
from recollect._verify import signature, user_code
from recollect.policy import Decision, Policy, Question

# By their claims on memory, and what a row with the decision is, in words.
_DECISIONS = {
    "parameter": "a parameter",
    "input": "an input",
    "outside": "a tensor from outside",
    "kept": "kept by the policy",
    "offloaded": "offloaded by the policy to where it is already",
    "recomputed": "the function's own output",
}
_claim = tuple(_DECISIONS).index
_COUNTED = ("recomputed", "kept", "offloaded", "input")


# --- What is found ---


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


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain` found. Print it, or take the data.

    Attributes:
        function: What was run, in words.
        rows: A `Row` for every tensor and operator, the largest first.
        totals: Bytes per decision, each storage once. Parameters and tensors from outside are left out.
        saves: The bytes by which a region holds less than plain autograd: what autograd saves and is recomputed or
            offloaded to another device, except the function's own output, which the caller has; less what the
            region holds in addition, computed inputs that autograd would not save and what the policy keeps.
        notes: What there is to say about it, in sentences; among them why a region would save nothing.
    """

    function: str
    rows: tuple[Row, ...]
    totals: Mapping[str, int]
    saves: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers, fit for JSON."""
        return {
            "function": self.function,
            "rows": [{**dataclasses.asdict(row), "shape": _as_lists(row.shape)} for row in self.rows],
            "totals": dict(self.totals),
            "saves": self.saves,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [self._title()]
        if self.rows:
            table = [_HEADINGS, *map(_cells, self.rows)]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for size, *words in table:
                cells = [size.rjust(widths[0]), *(word.ljust(w) for word, w in zip(words, widths[1:], strict=True))]
                lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, self._total(), *self.notes])

    def __repr__(self) -> str:
        return f"<Explanation of {self.function}: {len(self.rows)} rows, {dict(self.totals)}>"

    def _repr_html_(self) -> str:
        def row(tag: str, cells: Iterable[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        body = "".join(row("td", _cells(one)) for one in self.rows)
        after = "".join(f"<p>{html.escape(text)}</p>" for text in (self._total(), *self.notes))
        return f"<table><caption>{html.escape(self._title())}</caption>{row('th', _HEADINGS)}{body}</table>{after}"

    def _title(self) -> str:
        return f"What autograd saves in {self.function}"

    def _total(self) -> str:
        amounts = ", ".join(f"{decision} {_human(amount)}" for decision, amount in self.totals.items())
        return f"Totals, each storage once and without parameters: {amounts}"


_HEADINGS = ("bytes", "shape", "dtype", "decision", "operator", "region", "module", "line")


def _cells(row: Row) -> tuple[str, ...]:
    decision = f"{row.decision} (output)" if row.is_output and row.decision == "recomputed" else row.decision
    line = row.line.removeprefix(os.getcwd() + os.sep)
    words = (str(_as_lists(row.shape)), row.dtype, decision, row.operator, row.region, row.module, line)
    return (_human(row.bytes), *(word or "-" for word in words))


def _as_lists(shape: Any) -> Any:
    return [_as_lists(part) for part in shape] if isinstance(shape, tuple) else shape


def _as_tuples(shape: Any) -> Any:
    """A shape of plain numbers; the ragged dimension of a nested tensor has a name instead."""
    if isinstance(shape, tuple):
        return tuple(map(_as_tuples, shape))
    return shape if isinstance(shape, int) else str(shape)


def _human(amount: float) -> str:
    """`512 B`, `4.0 KiB`."""
    if amount < 1024:
        return f"{amount:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1023.95:  # or it would be shown as 1024.0
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


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


def _memory(tensors: Iterable[Tensor]) -> dict[Any, int]:
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
    return sum(min(piece.numel() * piece.element_size(), *_memory([piece]).values()) for piece in _pieces(tensor))


def _is_parameter(tensor: Tensor) -> bool:
    """Whether it is a leaf that needs grad, or a parameter that is frozen, or a view of one."""
    owner = tensor if tensor._base is None else tensor._base
    return isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad)


# --- Watching ---

_OWN_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_KEEP = Kept.__init__.__code__
_CLONE = torch.ops.aten.clone.default
_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # torch.tensor([1.0]) ends in it: a view in form, and yet new


@dataclass(slots=True)
class _Saving:
    """One call of `watch`."""

    row: Row  # as the engine told it; the operator is empty if the one that saves is yet to be seen
    memory: dict[Any, int]
    view: Any  # how the memory is read
    is_parameter: bool
    number: int  # autograd's at the time, -1 for an output that the policy keeps
    by_autograd: bool  # not by the policy, nor as an input of an inner region
    writer: str  # the last operator before, if that one writes to its arguments


class _Watcher(TorchDispatchMode):
    """Notes operators as a mode, and what is saved as a `Watch`. It holds no tensor."""

    supports_higher_order_operators = True

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.savings: list[_Saving] = []
        self.policy_kept = False
        self._paused = False
        self._given = _memory(arguments)
        self._made: dict[Any, str] = {}  # the storages that operators made, and which did
        self._operators: dict[int, str] = {}  # by autograd's number
        self._clones: set[int] = set()
        self._writer = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        name, number = str(func), sequence_number()
        if func is _CLONE:
            self._clones.add(number)
        elif func not in METADATA_OPERATORS and not _is_in_kept(sys._getframe(1)):
            self._operators.setdefault(number, name)
            self._writer = name if changes_arguments(func) else ""
        result = func(*args, **kwargs)
        self._paused = True
        try:
            with without_torch_function():
                given = {} if func is _LIFT_FRESH else _memory(find_tensors(args, kwargs)[0])
                made = _memory(find_tensors((result,), {})[0])
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
        memory = _memory([tensor])
        packer = _packer(frame)
        if packer is Kept:  # an inner region keeps it, as was just told, by handing it to this one, which decides
            self.savings[-1].row = dataclasses.replace(self.savings[-1].row, decision=decision)
            return
        if decision == "recomputed" or scope.saving:
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
            region=scope.path,
            module=module,
            line=lines[-1] if lines else "",
            decision=decision,
        )
        has_view = tensor.layout is torch.strided and not tensor.is_nested
        view = (tensor.storage_offset(), tensor.stride()) if has_view else None
        self.savings.append(_Saving(row, memory, view, _is_parameter(tensor), number, by_autograd, self._writer))

    def decision_for(self, saving: _Saving, one: Any) -> str:
        """What becomes of one of the storages behind a saving. One that was there before the call stays alive."""
        if one in self._given:
            return "input"
        if one in self._made:
            return saving.row.decision
        return "parameter" if saving.is_parameter else "outside"

    def operator_of(self, saving: _Saving) -> str:
        """What saved it, now that all operators are known."""
        number = saving.number
        after_clone = self._operators.get(number + 1) if number + 1 in self._clones else None
        return saving.row.operator or self._operators.get(number) or after_clone or saving.writer or "?"


def _is_in_kept(frame: FrameType | None) -> bool:
    """Whether `Kept` runs an operator, to copy to the host, in the midst of another operator."""
    while frame is not None and is_library_file(frame.f_code.co_filename):
        if frame.f_code is _KEEP:
            return True
        frame = frame.f_back
    return False


def _packer(frame: FrameType | None) -> Any:
    """Who hands a tensor to a region's hook, other than an operator: `Kept`, or the name of what does, or ""."""
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        if frame.f_code is _KEEP:
            return Kept
        frame = frame.f_back
    if by_hand.packing:
        return "recollect.checkpoint"  # its inputs
    name = frame.f_locals["cls"].__name__ if frame is not None and frame.f_code is _APPLY else ""
    # Of operators that are written in Python (`torch.library`) the operator itself is seen.
    return f"{name}.apply" if name and not name.startswith("GeneratedBackwardFor_") else ""


class _Named(Policy):
    """A policy, or none, that wants to know of named regions, so that their paths are there to be shown."""

    settled = True  # that it matches nothing is said in the notes, and left to be said of the policy itself

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy

    def operators(self) -> Mapping[Any, Decision] | None:
        return {} if self._policy is None else self._policy.table

    def decides_names(self) -> bool:
        return True

    def decide(self, what: Any, question: Question) -> Decision | None:
        policy = self._policy
        if policy is None or (isinstance(what, str) and not policy.decides_names()):
            return None
        return policy.decide(what, question)


# --- Putting it together ---


@dataclass(slots=True)
class _Storage:
    """What all rows over one storage come to."""

    number: int
    size: int
    is_output: bool
    decision: str = "recomputed"
    by_autograd: bool = False
    can_leave: bool = False  # by being offloaded

    def is_let_go(self) -> bool:
        leaves = self.decision == "recomputed" or (self.decision == "offloaded" and self.can_leave)
        return leaves and not self.is_output

    def add(self, saving: _Saving, decision: str) -> None:
        self.decision = min(self.decision, decision, key=_claim)
        self.by_autograd = self.by_autograd or saving.by_autograd
        self.can_leave = saving.row.device.partition(":")[0] not in ("cpu", "meta")


def _explanation(
    watcher: _Watcher, function: Callable[..., Any], arguments: list[Tensor], result: Any, policy: Policy | None
) -> Explanation:
    results = find_tensors((result,), {})[0]
    outputs = _memory(results)
    storages: dict[Any, _Storage] = {}
    for saving in watcher.savings:
        for one, size in saving.memory.items():
            storage = storages.setdefault(one, _Storage(len(storages), size, one in outputs))
            storage.add(saving, watcher.decision_for(saving, one))

    saved = {one for one, storage in storages.items() if storage.by_autograd}
    dropped = sum(storages[one].size for one in saved if storages[one].is_let_go())
    # A leaf is its owner's; what was computed lives as long as somebody needs it, and a replay does.
    held = _memory(argument for argument in arguments if not argument.is_leaf)
    for one, storage in storages.items():
        if storage.decision in ("kept", "offloaded") and not storage.is_let_go():
            held[one] = storage.size
    added = sum(size for one, size in held.items() if one not in saved and one not in outputs)

    decisions = {storage.decision for storage in storages.values()}
    needs_grad = any(tensor.requires_grad for tensor in results)
    notes = [_verdict(decisions, dropped, added, needs_grad)]
    if policy is not None and not watcher.policy_kept:
        notes.append(f"The policy {policy!r} kept nothing here.")
    return Explanation(
        function=_errors.describe_function(function),
        rows=_rows(watcher, storages),
        totals={
            decision: sum(storage.size for storage in storages.values() if storage.decision == decision)
            for decision in _COUNTED
        },
        saves=max(dropped - added, 0),
        notes=tuple(notes),
    )


def _rows(watcher: _Watcher, storages: dict[Any, _Storage]) -> tuple[Row, ...]:
    rows: dict[Any, Row] = {}
    for position, saving in enumerate(watcher.savings):
        behind = max((storages[one] for one in saving.memory), key=lambda storage: storage.size)
        row = dataclasses.replace(
            saving.row,
            operator=watcher.operator_of(saving),
            decision=behind.decision,
            is_output=behind.is_output,
            storage=behind.number,
        )
        # A call that saves the same twice, as x * x does, has one row for it.
        call = (saving.number, 0) if saving.number >= 0 else (-1, position)
        rows.setdefault((call, saving.view, row), row)
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))


def _verdict(decisions: set[str], dropped: int, added: int, needs_grad: bool) -> str:
    """What a region saves; if nothing, why."""
    if dropped > added:
        says = f"Checkpointing this function saves {_human(dropped - added)}"
        if added:
            says += f": {_human(dropped)} that autograd saves is let go of, {_human(added)} {_ADDED}"
        return says + "."
    if not decisions:
        why = "the backward of its operators needs no tensor" if needs_grad else "nothing in it needs grad"
        why = f"autograd saves nothing in it, because {why}"
    elif not dropped:
        *most, last = (words for decision, words in _DECISIONS.items() if decision in decisions)
        which = f"{', '.join(most)} or {last}" if most else last
        why = f"everything that autograd saves in it is {which}, and stays alive anyway"
    else:
        why = f"{_human(dropped)} that autograd saves is let go of, but {_human(added)} {_ADDED}"
    return f"Checkpointing this function saves nothing: {why}."


_ADDED = "is held that autograd would not save (computed inputs, which a replay needs, and what the policy keeps)"


def _random_state(arguments: list[Tensor]) -> RandomState:
    """Of the CPU, of the arguments' devices and of the current accelerator."""
    tensors = list(arguments)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and is_initialised(accelerator_module(accelerator.type)):
        tensors.append(torch.empty(0, device=accelerator))
    return RandomState.now(tensors)


def explain(
    function: Callable[..., Any], /, *args: Any, policy: PolicyLike | None = None, **kwargs: Any
) -> Explanation:
    """Run `function` once, as `checkpoint` would, and tell what autograd saves in it and what becomes of that.

    The graph is dropped and random generators are put back. What the function itself changes stays changed, such as
    the running statistics of a BatchNorm.

    Args:
        function: A function or module.
        *args: Its arguments.
        policy: As for `checkpoint`.
        **kwargs: Every other keyword goes to `function`.

    Returns:
        A table to print, with the rows and totals as data. Largest first; each row has the bytes, shape and dtype of
        a tensor, the operator that saved it, the named region, module and line of code, and the decision: "kept",
        "recomputed" or "offloaded", or "input", "parameter" or "outside" for what stays alive anyway.

    Example:
        >>> import torch
        >>> from recollect.explain import explain
        >>> x = torch.ones(256, 4, requires_grad=True)
        >>> found = explain(lambda x: (x.sin().exp() * 2).tanh(), x)
        >>> for row in found.rows:
        ...     print(row.bytes, row.shape, row.operator, row.decision)
        4096 (256, 4) aten.sin.default input
        4096 (256, 4) aten.exp.default recomputed
        4096 (256, 4) aten.tanh.default recomputed
        >>> found.saves  # the result of tanh is the caller's
        4096
        >>> print(explain(torch.exp, x))  # doctest: +ELLIPSIS, +NORMALIZE_WHITESPACE
        What autograd saves in ...exp
          bytes  shape     dtype    decision             operator          region  module  line
        4.0 KiB  [256, 4]  float32  recomputed (output)  aten.exp.default  -       -       -
        Totals, each storage once and without parameters: recomputed 4.0 KiB, kept 0 B, offloaded 0 B, input 0 B
        Checkpointing this function saves nothing: everything that autograd saves in it is the function's own output,
        and stays alive anyway.
    """
    if not callable(function):
        raise _errors.not_callable("function", function)
    options = _options("default", False, True, True, None, policy)
    arguments = find_tensors(args, kwargs)[0]
    with without_torch_function():
        watcher = _Watcher(arguments)
    before = _random_state(arguments)
    try:
        with torch.enable_grad(), watcher:
            named = dataclasses.replace(options, policy=_Named(options.policy))
            result = run_region(function, args, kwargs, named, watch=watcher.watch)
    finally:
        before.put()
        torch.clear_autocast_cache()  # it would hold casts of weights that were made here
    if isinstance(result, _RUN_LATER):
        _refuse_to_run_later(function, result)
    with without_torch_function():
        return _explanation(watcher, function, arguments, result, options.policy)


__all__ = ["Explanation", "Row", "explain"]
