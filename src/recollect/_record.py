"""A record of one run of a region's function: operators, values, and what was read and changed from outside.

A dispatch mode sees every operator. For each it notes the line of user code, the open modules and, where values are
asked for, digests of its results. Tensors that the region neither was given nor made are told by their memory: which
ones it reads (a bias is read and never saved), and which ones it changes in place (running statistics: batch norm's
writes show neither in its schema nor in a version counter), with a copy from before the first change.

It also notes the plain variables that the user's code could see (globals, closures, attributes of `self`), so that a
difference can be explained. No tensor is kept alive but those copies.

What this is not: it compares nothing (`_differences.py`) and restores nothing (`_restored.py`).
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

from recollect._digest import Digest, alias_of, copies, digest, summary
from recollect._errors import Signature
from recollect._inputs import find_tensors
from recollect._shards import is_gathered
from recollect._torch import (
    METADATA_OPERATORS,
    OperatorMode,
    called_module,
    changes_arguments,
    copied_argument,
    dropout_argument,
    gives_more,
    gives_views,
    is_default_generator,
    is_library_file,
    is_work_of_fsdp,
    leaves_unwritten,
    locals_of,
    makes_unwritten_memory,
    may_be_unfilled,
    may_give_unwritten_memory,
    overwrites,
    process_groups,
    running_statistics,
    storage_key,
    version_of,
    without_any_torch_function,
    written_arguments,
)
from recollect._verify import call_site, is_boundary, signature

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
    memory: int


class Write:
    """A tensor from outside that an operator changed in place."""

    __slots__ = ("alias", "before", "is_read", "matters", "step", "tensor", "version")

    def __init__(self, tensor: Tensor, step: int, *, is_read: bool, matters: bool, keeps: bool) -> None:
        self.tensor = weakref.ref(tensor)
        self.alias = alias_of(tensor)  # over the same memory: what was changed may have been a `.data`, which is gone
        self.is_read = is_read  # by an operator that gives something else
        # Whether what it held before comes into what is read: it was read then, or it was changed rather than replaced.
        self.matters = is_read or matters
        self.before: Tensor | None = copies([tensor])[0] if self.matters or keeps else None
        self.version = version_of(tensor)
        self.step = step


class Saved(NamedTuple):
    """A tensor that autograd saved."""

    digest: Digest
    steps: int  # how many operators had begun
    memory: int


class Recorder(OperatorMode):
    """Records what runs under it.

    Without `results` no more than is needed to compare what autograd saves, and to name the operators in between: what
    is read and changed from outside is known by then. If it `keeps_all`, it has a copy of everything that is changed.
    """

    changes_of_weights = True  # whether a change in place of a leaf that needs grad is one of state

    def __init__(self, *, results: bool, ignored: frozenset[int] = frozenset(), keeps_all: bool = False) -> None:
        super().__init__()
        self._keeps_all = keeps_all
        self.ignored = ignored  # memory that the function changes, and on which nothing depends
        self.called_from = call_site(sys._getframe(1))
        self.call = 0  # the identity of the Python frame where the region begins, if it is a module's own call
        self.paused = False
        self._is_within = False  # an operator: it may be entered twice, above the modes of a part (`_engine/named.py`)
        self.muted = 0  # within a part that a replay does not run: its operators are left out
        self.results = results
        self.steps: list[Step] = []
        self.saved: list[Saved] = []
        self.reads: dict[int, Read] = {}
        self.writes: dict[int, Write] = {}
        self.variables: dict[CodeType, dict[str, Any]] = {}
        self.training: dict[int, tuple[weakref.ref[torch.nn.Module], bool]] = {}
        self.changed: set[int] = set()  # all memory from outside that was changed in place, weights too
        self.has_own_generators = False  # whether an operator was given a generator that is not torch's own
        self._values_read: set[int] = set()
        # Memory without values to compare: not written yet, or the workspace of a kernel, which need not fill it.
        self._unknown: set[int] = set()
        self._changes: list[tuple[int, int]] = []  # which operator changed which memory in place
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
        with without_any_torch_function():
            self._made.update(map(storage_key, find_tensors((result,), {})[0]))

    def save(self, tensor: Tensor) -> None:
        """Note a tensor that autograd saves."""
        with without_any_torch_function():
            self._save(tensor)

    def _save(self, tensor: Tensor) -> None:
        memory = storage_key(tensor)
        if memory in self.ignored:
            self.saved.append(Saved(None, len(self.steps), memory))
            return
        # A result of an operator that has ended is written. Others may be memory that the running one is yet to write.
        may_be_written = self.results and memory not in self._made and not tensor.requires_grad
        if memory in self._unknown or (may_be_written and may_be_unfilled(tensor)):
            self._unfilled.append((len(self.saved), tensor))
            self.saved.append(Saved(None, len(self.steps), memory))
        else:
            self.saved.append(Saved(digest(tensor), len(self.steps), memory))

    def change_of(self, slot: int) -> tuple[str, str | None] | None:
        """The operator that first changed a saved tensor in place, and its line."""
        if slot >= len(self.saved):
            return None
        saved = self.saved[slot]
        places = (place for place, memory in self._changes if memory == saved.memory and place >= saved.steps)
        place = next(places, None)
        return None if place is None else (str(self.steps[place].operator), self.steps[place].where)

    def fill(self) -> None:
        """Look at what was saved before its operator had written it."""
        for index, tensor in self._unfilled:
            if storage_key(tensor) not in self._unknown:
                self.saved[index] = self.saved[index]._replace(digest=digest(tensor))
        self._unfilled.clear()

    def made(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor came to be in this run."""
        return storage_key(tensor) in self._made

    def made_and_changed(self) -> set[int]:
        """The memory that came to be in this run and was changed in place then."""
        return self._made.intersection(memory for _, memory in self._changes)

    def read(self) -> list[Tensor]:
        """What operators were given from outside."""
        return [tensor for one in self.reads.values() if (tensor := one.tensor()) is not None]

    def called(self) -> list[torch.nn.Module]:
        """The modules whose calls were seen."""
        return [module for reference, _ in self.training.values() if (module := reference()) is not None]

    def ended(self) -> None:
        """The function has come to its end, or was stopped."""
        with without_any_torch_function():
            self._end()

    def _end(self) -> None:
        self.fill()
        self._made.clear()
        for place, write in list(self.writes.items()):
            tensor = write.tensor()
            # One that has a history now is no state but a part of the computation.
            if tensor is not None and tensor.requires_grad and not tensor.is_leaf:
                del self.writes[place]
            elif not write.is_read or not write.matters:
                # Nothing depends on what it held, so neither need it be put back nor does it count as different.
                # (Batch norm saves its running statistics and does not use them.)
                if not self._keeps_all:
                    write.before = None
                self.reads = {
                    key: one._replace(digest=None) if one.memory == place else one for key, one in self.reads.items()
                }
                self.saved = [one._replace(digest=None) if one.memory == place else one for one in self.saved]

    # --- Operators ---

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            self.paused
            or self._is_within
            or func in METADATA_OPERATORS
            or getattr(func, "namespace", "") in _NOT_THE_FUNCTION_S
        ):
            return func(*args, **kwargs)
        if process_groups and is_work_of_fsdp(sys._getframe().f_back):
            return self._pass_over(func, args, kwargs)
        if not self.results:
            return self._briefly(func, args, kwargs)
        code, line, modules = self._look_at_stack(sys._getframe().f_back)  # None in a thread of autograd's
        with without_any_torch_function():
            memory = self._before(func, args, kwargs)
        place = len(self.steps)
        muted = self.muted
        if not muted:
            self.steps.append(Step(func, code, line, modules, ()))
        result = self._run(func, args, kwargs)
        with without_any_torch_function():
            tensors = list(_tensors((result,)))
            self._made.update(key for key in map(storage_key, tensors) if key not in memory)
            self._look_at_results(func, args, tensors)
            if not muted:
                results = tuple(Result(signature(one), *self._values(func, one)) for one in tensors)
                self.steps[place] = self.steps[place]._replace(results=results)
                self.fill()
        return result

    def _briefly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.muted:
            frame = sys._getframe().f_back
            while frame is not None and is_library_file(frame.f_code.co_filename):
                frame = frame.f_back
            code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
            self.steps.append(Step(func, code, line, (), ()))
        result = self._run(func, args, kwargs)
        if self._unknown or self._unfilled or may_give_unwritten_memory(func):
            with without_any_torch_function():
                if self._unknown:
                    self._unknown -= {storage_key(one) for one in self._targets(func, args, kwargs)}
                self._look_at_results(func, args, list(_tensors((result,))))
                self.fill()
        return result

    def _pass_over(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that is not the function's, and take note of no more than that memory came to be here."""
        result = func(*args, **kwargs)
        with without_any_torch_function():
            given = {storage_key(one) for one in _tensors((*args, *kwargs.values()))}
            self._made.update(key for key in map(storage_key, _tensors((result,))) if key not in given)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_within = True
        try:
            return func(*args, **kwargs)
        finally:
            self._is_within = False

    def _targets(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """What an operator writes to."""
        if leaves_unwritten(operator, args):
            return []
        places = (*written_arguments(operator), *running_statistics(operator, args, kwargs))
        return list(_tensors(args[at] if at < len(args) else kwargs.get(name) for at, name in places))

    def _before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
        given = list(_tensors((*args, *kwargs.values())))
        self._look_at_arguments(func, args, kwargs, given)
        generator = kwargs.get("generator")
        if generator is not None and not is_default_generator(generator):
            self.has_own_generators = True
        return {storage_key(tensor) for tensor in given}

    def _look_at_results(self, operator: Any, args: Sequence[Any], tensors: list[Tensor]) -> None:
        keys = [storage_key(tensor) for tensor in tensors]
        source = copied_argument(operator)
        copies_unknown = source is not None and storage_key(args[source]) in self._unknown
        if makes_unwritten_memory(operator) or copies_unknown:
            self._unknown.update(keys)
        elif not gives_views(operator):
            self._unknown.difference_update(keys)
            if len(tensors) > 1 and tensors[0].is_floating_point():
                # Attention gives the seed of its random numbers, which is not written where it draws none.
                has_seed = dropout_argument(operator) is not None
                self._unknown.update(
                    key
                    for key, one in zip(keys, tensors, strict=True)
                    if one.dtype is torch.uint8 or (has_seed and not one.is_floating_point())
                )

    def _values(self, operator: Any, tensor: Tensor) -> tuple[Digest, Digest]:
        if (
            not self.results
            or (gives_views(operator) and not changes_arguments(operator))
            or storage_key(tensor) in self._unknown
        ):
            return None, None
        return digest(tensor), summary(tensor)

    def _look_at_arguments(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], given: list[Tensor]
    ) -> None:
        targets = self._targets(operator, args, kwargs)
        written = {id(one) for one in targets}
        # What is given twice, to be read and to be written to, is both.
        is_also_read = {id(one) for one in given if id(one) in written and _count(one, given) > _count(one, targets)}
        for tensor in given:
            key = storage_key(tensor)
            if id(tensor) in written:
                self._unknown.discard(key)
                if not self.muted:
                    self._changes.append((len(self.steps), key))
            owner = tensor if tensor._base is None else tensor._base
            # What is gathered for the first time comes to be inside, and is there for good.
            if key in self._made and not is_gathered(owner):
                continue
            if id(owner) not in self.reads and not self.muted:
                values = digest(owner) if self.results else None
                self.reads[id(owner)] = Read(weakref.ref(owner), signature(owner), values, len(self.steps), key)
            if id(tensor) in written:
                if key not in self.writes and self._is_state(owner):
                    replaces = tensor is owner and overwrites(operator) and id(tensor) not in is_also_read
                    is_read = key in self._values_read or gives_more(operator)
                    self.writes[key] = Write(
                        owner, len(self.steps), is_read=is_read, matters=not replaces, keeps=self._keeps_all
                    )
                self.changed.add(key)
            elif not gives_views(operator):
                self._values_read.add(key)
                if key in self.writes:
                    self.writes[key].is_read = True

    def _is_state(self, owner: Tensor) -> bool:
        return not owner.requires_grad or (self.changes_of_weights and owner.is_leaf)

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
            frame = frame.f_back if id(frame) != self.call else None
        return code, line, tuple(reversed(modules))


# What wrappers around a model do while a function runs, and not in every run of it. (What FSDP does besides is known by
# where it is done.)
_NOT_THE_FUNCTION_S = frozenset(("c10d", "_c10d_functional", "fsdp"))


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _count(tensor: Tensor, values: Iterable[Any]) -> int:
    return sum(one is tensor for one in _tensors(values))


_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)


def _variables(frame: FrameType) -> dict[str, Any]:
    """The plain variables that the code of `frame` could see from outside, in words."""
    code, seen = frame.f_code, {}
    for name in code.co_names:
        if name in frame.f_globals:
            seen[f"the global {name!r}"] = _in_words(frame.f_globals[name])
    with locals_of(frame) as local:
        for name in code.co_freevars:
            if name in local:
                seen[f"the closure's {name!r}"] = _in_words(local[name])
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
