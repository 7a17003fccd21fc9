"""Which step of a chain runs in this thread, and what happens once in it: `recollect.once` and `recollect.pin`.

What such a call gave is noted by the number of its step, in order, and handed out when the step is run again. Two
things differ from a region, where the graph of the forward is the one that is differentiated: a step that is run with
a graph has to have one. So a pinned function that gives tensors with gradients is called again, for their sake, and its
decisions (what it gives besides) are those of the first call; and what runs once gives nothing that a gradient may
reach.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._ambient import Access, RandomState
from recollect._engine import pinned
from recollect._engine.pinned import Entry, code_of, twin
from recollect._engine.scope import Scope, here
from recollect._inputs import find_tensors
from recollect._torch import as_inner_result

Function = Callable[..., Any]


class Notes:
    """Of one chain: what happened once, by step, in order."""

    __slots__ = ("access", "entries")

    def __init__(self, access: Access | None) -> None:
        self.access = access
        self.entries: dict[int, list[Entry]] = {}


class Stepping:
    """Steps of a chain at work in this thread."""

    __slots__ = ("_around", "_notes", "_scope", "is_again", "position", "replaying", "step")

    def __init__(self, notes: Notes, *, is_again: bool) -> None:
        self._notes = notes
        self._scope: Scope | None = here.scope
        self._around: Stepping | None = here.chain
        self.is_again = is_again  # whether these steps were run before
        around, scope = self._around, self._scope
        # Or something around the chain was.
        self.replaying = (
            is_again or (around is not None and around.replaying) or (scope is not None and scope.following)
        )
        self.step = 0
        self.position = 0  # among what happens once in this step

    def call(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_pinned: bool) -> Any:
        """Call a function that is pinned, or to run once."""
        position = self.position
        self.position = position + 1
        if self.is_again:
            return self._hand_out(position, function, args, kwargs, is_pinned=is_pinned)
        entry = Entry(code_of(function))
        entries = self._notes.entries.setdefault(self.step, [])
        del entries[position:]
        entries.append(entry)
        try:
            result = self._call_around(function, args, kwargs, is_pinned=is_pinned)
        except Exception as error:
            entry.error = twin(error)
            raise
        if self._notes.access is not None:
            entry.random = [RandomState(self._notes.access)]
        entry.keep(result, find_tensors(args, kwargs)[0])
        return result

    def _call_around(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_pinned: bool
    ) -> Any:
        """As if the chain were not there: a region or a chain around it may remember."""
        inner, here.scope, here.chain = (here.scope, here.chain), self._scope, self._around
        try:
            return (pinned.call_pinned if is_pinned else pinned.call_once)(function, args, kwargs)
        finally:
            here.scope, here.chain = inner

    def _hand_out(
        self, position: int, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_pinned: bool
    ) -> Any:
        entries = self._notes.entries.get(self.step, ())
        if position >= len(entries) or entries[position].code != code_of(function):
            raise _errors.noted_elsewhere(self.step, _errors.describe_function(function))
        entry = entries[position]
        if entry.error is not None:
            raise twin(entry.error)
        tensors = find_tensors(args, kwargs)[0]
        has_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        again: Iterator[Tensor] | None = None
        if has_graph and is_pinned:
            again = iter(find_tensors((function(*args, **kwargs),), {})[0])
        message = _errors.once_needs_no_grad(_errors.describe_function(function))

        def give(value: Tensor, _: bool, __: bool) -> Tensor:
            now = None if again is None else next(again, None)
            if not has_graph or not (value.is_floating_point() or value.is_complex()):
                return value
            return as_inner_result(value, tensors, message) if now is None else now

        result = entry.hand_out(tensors, give)
        for state in entry.random:
            state.put()
        return result


@contextlib.contextmanager
def stepping(notes: Notes, *, is_again: bool) -> Iterator[Stepping]:
    """Steps of a chain run: regions around it are none of their concern."""
    around = here.scope, here.chain
    here.chain = stepping = Stepping(notes, is_again=is_again)
    here.scope = None
    try:
        yield stepping
    finally:
        here.scope, here.chain = around
