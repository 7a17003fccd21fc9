"""A record of one run of a region's function: operators, values, and what was read and changed from outside.

A dispatch mode sees every operator. For each it notes the line of user code, the open modules and, where values are
asked for, digests of its results. Tensors that the region neither was given nor made are told by their memory: which
ones it reads (a bias is read and never saved), and which ones it changes in place (running statistics: batch norm's
writes show neither in its schema nor in a version counter), with a copy from before the first change.

It also notes the plain variables that the user's code could see (globals, closures, attributes of `self`), so that a
difference can be explained. No tensor is kept alive but those copies.

What this is not: it compares nothing (`_differences.py`) and restores nothing (`_guards.py`).
"""

from __future__ import annotations

import reprlib
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from recollect._digest import Digest, copies, digest, summary
from recollect._errors import Signature
from recollect._inputs import find_tensors
from recollect._torch import (
    METADATA_OPERATORS,
    OperatorMode,
    called_module,
    gives_views,
    is_library_file,
    leaves_unwritten,
    makes_unwritten_memory,
    may_be_unfilled,
    running_statistics,
    storage_key,
    without_torch_function,
    written_arguments,
)
from recollect._verify import is_boundary, signature

R = TypeVar("R")


class Result(NamedTuple):
    """A tensor that an operator gave."""

    signature: Signature
    digest: Digest
    summary: Digest


class Step(NamedTuple):
    """One operator."""

    operator: Any
    code: CodeType | None  # of the innermost line of user code
    line: int
    modules: tuple[weakref.ref[torch.nn.Module], ...]  # whose calls were open, outermost first
    results: tuple[Result, ...]

    @property
    def where(self) -> str | None:
        """The line of user code."""
        return None if self.code is None else f"{self.code.co_filename}:{self.line} in {self.code.co_name}"


class Read(NamedTuple):
    """A tensor from outside that an operator was given."""

    tensor: weakref.ref[Tensor]
    signature: Signature
    digest: Digest
    step: int


class Write:
    """A tensor from outside that an operator changed in place."""

    __slots__ = ("before", "is_read", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.before: Tensor | None = copies([tensor])[0]
        self.is_read = False  # by an operator that gives something else


class Saved(NamedTuple):
    """A tensor that autograd saved."""

    digest: Digest
    steps: int  # how many operators had begun
    owner: int  # the identity of the tensor from outside that it is, or is a view of; 0 for one that was made inside


class Recorder(OperatorMode):
    """Records what runs under it; with `results`, the results of every operator too."""

    def __init__(self, *, results: bool) -> None:
        super().__init__()
        self.called_from = _call_site(sys._getframe(1))
        self.paused = False
        self.muted = 0  # within a part that a replay does not run: its operators are left out
        self.results = results
        self.steps: list[Step] = []
        self.saved: list[Saved] = []
        self.reads: dict[int, Read] = {}
        self.writes: dict[int, Write] = {}
        self.variables: dict[CodeType, dict[str, Any]] = {}
        self.training: dict[int, tuple[weakref.ref[torch.nn.Module], bool]] = {}
        self.makes_leaves = False
        self._values_read: set[int] = set()
        # Memory without values to compare: not written yet, or the workspace of a kernel, which need not fill it.
        self._unknown: set[int] = set()
        self._made: set[int] = set()  # memory that came to be under this mode
        self._unfilled: list[tuple[int, Tensor]] = []

    # --- Saved tensors ---

    def saving(self, hook: Callable[[Tensor], R]) -> Callable[[Tensor], R]:
        """A saved-tensor hook that notes the tensor too."""

        def recorded(tensor: Tensor) -> R:
            self.save(tensor)
            return hook(tensor)

        return recorded

    def adopt(self, result: Any) -> None:
        """Count the tensors in `result` as made in this run."""
        self._made.update(map(storage_key, find_tensors((result,), {})[0]))

    def save(self, tensor: Tensor) -> None:
        """Note a tensor that autograd saves."""
        with without_torch_function():
            self._save(tensor)

    def _save(self, tensor: Tensor) -> None:
        if tensor.requires_grad and tensor.is_leaf and storage_key(tensor) in self._made:
            self.makes_leaves = True
        owner = 0 if storage_key(tensor) in self._made else id(tensor if tensor._base is None else tensor._base)
        if not tensor.requires_grad and (may_be_unfilled(tensor) or storage_key(tensor) in self._unknown):
            self._unfilled.append((len(self.saved), tensor))
            self.saved.append(Saved(None, len(self.steps), owner))
        else:
            self.saved.append(Saved(digest(tensor), len(self.steps), owner))

    def fill(self) -> None:
        """Look at what was saved before its operator had written it."""
        for index, tensor in self._unfilled:
            if storage_key(tensor) not in self._unknown:
                self.saved[index] = self.saved[index]._replace(digest=digest(tensor))
        self._unfilled.clear()

    def made(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor came to be in this run."""
        return storage_key(tensor) in self._made

    def ended(self) -> None:
        """The function has come to its end, or was stopped."""
        self.fill()
        self._made.clear()
        for place, write in list(self.writes.items()):
            tensor = write.tensor()
            # One that has a history now is no state but a part of the computation.
            if tensor is None or (tensor.requires_grad and not tensor.is_leaf):
                del self.writes[place]
            elif not write.is_read:
                # Nothing depends on what it held, so neither need it be put back nor does it count as different.
                # (Batch norm saves its running statistics and does not use them.)
                write.before = None
                self.reads[place] = self.reads[place]._replace(digest=None)
                self.saved = [one._replace(digest=None) if one.owner == place else one for one in self.saved]

    # --- Operators ---

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or func in METADATA_OPERATORS or getattr(func, "namespace", "") in _NOT_THE_FUNCTION_S:
            return func(*args, **kwargs)
        code, line, modules = self._look_at_stack(sys._getframe(1))
        given = list(_tensors((*args, *kwargs.values())))
        memory = {storage_key(tensor) for tensor in given}
        self._look_at_arguments(func, args, kwargs, given)
        place = len(self.steps)
        muted = self.muted
        if not muted:
            self.steps.append(Step(func, code, line, modules, ()))
        result = func(*args, **kwargs)
        tensors = list(_tensors((result,)))
        self._made.update(key for key in map(storage_key, tensors) if key not in memory)
        self._look_at_results(func, args, tensors)
        if muted:
            return result
        with without_torch_function():
            results = tuple(Result(signature(one), *self._values(func, one)) for one in tensors)
        self.steps[place] = self.steps[place]._replace(results=results)
        self.fill()
        return result

    def _look_at_results(self, operator: Any, args: Sequence[Any], tensors: list[Tensor]) -> None:
        keys = [storage_key(tensor) for tensor in tensors]
        if makes_unwritten_memory(operator):
            self._unknown.update(keys)
        elif not gives_views(operator):
            self._unknown.difference_update(keys)
            if len(tensors) > 1 and tensors[0].is_floating_point():
                self._unknown.update(key for key, one in zip(keys, tensors, strict=True) if one.dtype is torch.uint8)

    def _values(self, operator: Any, tensor: Tensor) -> tuple[Digest, Digest]:
        if not self.results or gives_views(operator) or storage_key(tensor) in self._unknown:
            return None, None
        return digest(tensor), summary(tensor)

    def _look_at_arguments(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], given: list[Tensor]
    ) -> None:
        written = {
            id(one)
            for position, name in (*written_arguments(operator), *running_statistics(operator, args, kwargs))
            for one in _tensors((args[position] if position < len(args) else kwargs.get(name),))
        }
        for tensor in given:
            key = storage_key(tensor)
            if id(tensor) in written and not leaves_unwritten(operator, args):
                self._unknown.discard(key)
            if key in self._made:
                continue
            owner = tensor if tensor._base is None else tensor._base
            if id(owner) not in self.reads:
                with without_torch_function():
                    self.reads[id(owner)] = Read(
                        weakref.ref(owner), signature(owner), digest(owner) if self.results else None, len(self.steps)
                    )
            if id(tensor) in written:
                if id(owner) not in self.writes:
                    self.writes[id(owner)] = Write(owner)
                    self.writes[id(owner)].is_read = id(owner) in self._values_read
            elif not gives_views(operator):
                self._values_read.add(id(owner))
                if id(owner) in self.writes:
                    self.writes[id(owner)].is_read = True

    # --- Where, and what could be seen from there ---

    def _look_at_stack(
        self, frame: FrameType | None
    ) -> tuple[CodeType | None, int, tuple[weakref.ref[torch.nn.Module], ...]]:
        code, line = None, 0
        modules: list[weakref.ref[torch.nn.Module]] = []
        while frame is not None and not is_boundary(frame.f_code):
            here = frame.f_code
            if is_library_file(here.co_filename):
                module = called_module(frame)
                if module is not None:
                    modules.append(weakref.ref(module))
                    self.training.setdefault(id(module), (modules[-1], module.training))
            else:
                if code is None:
                    code, line = here, frame.f_lineno
                if here not in self.variables:
                    self.variables[here] = _variables(frame)
            frame = frame.f_back
        return code, line, tuple(reversed(modules))


def _call_site(frame: FrameType | None) -> str | None:
    """The line of user code that calls the region."""
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


# What wrappers around a model do while a function runs, and not in every run of it.
_NOT_THE_FUNCTION_S = frozenset(("c10d", "_c10d_functional", "fsdp"))


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)


def _variables(frame: FrameType) -> dict[str, Any]:
    """The plain variables that the code of `frame` could see from outside, in words."""
    code, seen = frame.f_code, {}
    local = frame.f_locals
    for name in code.co_freevars:
        if name in local:
            seen[f"the closure's {name!r}"] = _in_words(local[name])
    for name in code.co_names:
        if name in frame.f_globals:
            seen[f"the global {name!r}"] = _in_words(frame.f_globals[name])
    owner = local.get("self")
    if owner is not None and hasattr(owner, "__dict__"):
        for name, value in vars(owner).items():
            if not name.startswith("__") and name not in _OF_MODULES:
                seen[f"{name!r} of {type(owner).__name__}"] = _in_words(value)
    return seen


_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}


def _in_words(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return reprlib.repr(value)
    if isinstance(value, (list, tuple, set, dict)) and len(value) <= 8:
        parts = (*value, *value.values()) if isinstance(value, dict) else value
        if all(isinstance(part, _PLAIN) for part in parts):
            return reprlib.repr(value)
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} (number {id(value)})"
