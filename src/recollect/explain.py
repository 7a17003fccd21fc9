"""What is saved in a function, by whom, how much, and what becomes of it.

The function is run once as a region and watched: the engine tells of every tensor that autograd saves and of every
tensor that a policy keeps, while it happens. A dispatch mode around the region notes the operators. From both comes
a table, which is plain data: it holds no tensor.

Words. A row is one tensor saved by one operator. Its decision is that of the memory behind it: "parameter", "input"
and "outside" (made before the call and not passed to it: a buffer, a closed-over tensor) stay alive whatever a region
does; "kept" and "offloaded" are the policy's; "recomputed" is what a region lets go of. Where there are several claims
on the same memory, the first of these holds.

What this is not: nothing is timed and no peak is found. What saved-tensor hooks inside the function take is theirs,
and not shown.
"""

from __future__ import annotations

import dataclasses
import html
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recollect import _errors, composable
from recollect._ambient import RandomState
from recollect._checkpoint import RUN_LATER, PolicyLike, checked_options, refuse_to_run_later
from recollect._engine.frame import run_region
from recollect._inputs import find_tensors
from recollect._sizes import human
from recollect._torch import (
    accelerator_module,
    function_nodes,
    is_initialised,
    never_begin,
    without_torch_function,
)
from recollect._watcher import Row, Saving, Watcher, memory_of
from recollect.policy import ByCall, Decision, Policy, Question, Recompute

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
        amounts = ", ".join(f"{decision} {human(amount)}" for decision, amount in self.totals.items())
        return f"Totals, each storage once and without parameters: {amounts}"


_HEADINGS = ("bytes", "shape", "dtype", "decision", "operator", "region", "module", "line")


def _cells(row: Row) -> tuple[str, ...]:
    decision = f"{row.decision} (output)" if row.is_output and row.decision == "recomputed" else row.decision
    line = row.line.removeprefix(os.getcwd() + os.sep)
    words = (str(_as_lists(row.shape)), row.dtype, decision, row.operator, row.region, row.module, line)
    return (human(row.bytes), *(word or "-" for word in words))


def _as_lists(shape: Any) -> Any:
    return [_as_lists(part) for part in shape] if isinstance(shape, tuple) else shape


class _Named(Policy):
    """A policy, or none, that wants to know of named regions, so that their paths are there to be shown."""

    settled = True  # that it matches nothing is said in the notes, and left to be said of the policy itself

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy

    def operators(self) -> Mapping[Any, Decision | ByCall] | None:
        return {} if self._policy is None else self._policy.table

    def decides_names(self) -> bool:
        return True

    def decide(self, what: Any, question: Question) -> Decision | None:
        policy = self._policy
        if policy is None or (isinstance(what, str) and not policy.decides_names()):
            return None
        decision = policy.decide(what, question)
        if isinstance(decision, Recompute) and decision.policy is not None:
            return dataclasses.replace(decision, policy=_Named(decision.policy))
        return decision


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

    def add(self, saving: Saving, decision: str) -> None:
        self.decision = min(self.decision, decision, key=_claim)
        self.by_autograd = self.by_autograd or saving.by_autograd
        self.can_leave = saving.row.device.partition(":")[0] not in ("cpu", "meta")


def _explanation(
    watcher: Watcher, function: Callable[..., Any], arguments: list[Tensor], result: Any, policy: Policy | None
) -> Explanation:
    results = find_tensors((result,), {})[0]
    outputs = memory_of(results)
    storages: dict[Any, _Storage] = {}
    for saving in watcher.savings:
        for one, size in saving.memory.items():
            storage = storages.setdefault(one, _Storage(len(storages), size, one in outputs))
            storage.add(saving, watcher.decision_for(saving, one))

    saved = {one for one, storage in storages.items() if storage.by_autograd}
    dropped = sum(storages[one].size for one in saved if storages[one].is_let_go())
    # A leaf is its owner's; what was computed lives as long as somebody needs it, and a replay does.
    held = memory_of(argument for argument in arguments if not argument.is_leaf)
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


def _rows(watcher: Watcher, storages: dict[Any, _Storage]) -> tuple[Row, ...]:
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
        says = f"Checkpointing this function saves {human(dropped - added)}"
        if added:
            says += f": {human(dropped)} that autograd saves is let go of, {human(added)} {_ADDED}"
        return says + "."
    if not decisions:
        why = "the backward of its operators needs no tensor" if needs_grad else "nothing in it needs grad"
        why = f"autograd saves nothing in it, because {why}"
    elif not dropped:
        *most, last = (words for decision, words in _DECISIONS.items() if decision in decisions)
        which = f"{', '.join(most)} or {last}" if most else last
        why = f"everything that autograd saves in it is {which}, and stays alive anyway"
    else:
        why = f"{human(dropped)} that autograd saves is let go of, but {human(added)} {_ADDED}"
    return f"Checkpointing this function saves nothing: {why}."


_ADDED = "is held that autograd would not save (computed inputs, which a replay needs, and what the policy keeps)"


def _random_state(arguments: list[Tensor]) -> RandomState:
    """Of the CPU, of the arguments' devices and of the current accelerator."""
    tensors = list(arguments)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and is_initialised(accelerator_module(accelerator.type)):
        tensors.append(torch.empty(0, device=accelerator))
    return RandomState.now(tensors)


@never_begin
def explain(
    function: Callable[..., Any], /, *args: Any, policy: PolicyLike | None = None, **kwargs: Any
) -> Explanation:
    """Run `function` once, as `checkpoint` would, and tell what autograd saves in it and what becomes of that.

    The graph is dropped and random generators are put back. What the function itself changes stays changed, such as
    the running statistics of a BatchNorm.

    Args:
        function: A function or module, or what `remat` or `composable.checkpoint` made of one.
        *args: Its arguments.
        policy: As for `checkpoint`; the function's own where it has one (`remat`, `composable.checkpoint`) and no other
            is given.
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
    chosen = getattr(function, "recollect_options", None)
    if chosen is not None:  # made by `remat`: its function is the region, with the policy that it was given
        function = function.__wrapped__  # type: ignore[attr-defined]
        policy = chosen.policy if policy is None else policy
    module = function if isinstance(function, torch.nn.Module) else None
    applied = None if module is None else composable.checkpoint.state(module)
    if applied is not None:
        policy = applied.policy if policy is None else policy
    options = checked_options("default", False, True, True, None, policy)
    arguments = find_tensors(args, kwargs)[0]
    with without_torch_function():
        watcher = Watcher(arguments)
    before = _random_state(arguments)
    try:
        with torch.enable_grad(), watcher:
            named = dataclasses.replace(options, policy=_Named(options.policy))
            if module is None or applied is None:
                result = run_region(function, args, kwargs, named, watch=watcher.watch)
            else:
                result = composable.call_watched(module, (args, kwargs), named, watcher.watch)
        watcher.nodes = function_nodes(find_tensors((result,), {})[0])
    finally:
        before.put()
        torch.clear_autocast_cache()  # it would hold casts of weights that were made here
    if isinstance(result, RUN_LATER):
        refuse_to_run_later(function, result)
    with without_torch_function():
        return _explanation(watcher, function, arguments, result, options.policy)


__all__ = ["Explanation", "Row", "explain"]
