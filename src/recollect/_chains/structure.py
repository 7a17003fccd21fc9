"""What a state is made of: containers, tensors, and other values in them; the same for all states of a chain.

A state is taken apart into its leaves whenever it is kept or differentiated, and put together anew from them, so a
step that changes a list or a dict that it was given changes nothing that is kept. Tensors are leaves, and so are plain
values: numbers, strings, None. What cannot be taken apart is refused: a tensor inside of it would be left without its
gradient.

Not `_inputs.py`, which takes arguments as they come and leaves alone what it does not know.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._inputs import is_named_tuple

# Values that nothing can change in place.
_ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None), range, slice, torch.Size))
_ATOMIC = (Enum, type, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Mismatch(Exception):  # noqa: N818 - a signal, which becomes an error where the step is known
    """A value is not of this structure: where in it, what was expected there, and what stands there."""

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(path, expected, got)
        self.path = path
        self.expected = expected
        self.got = got


class _Part:
    """One place of a structure; its path says where, as a reader would write it: `['h'][0]`."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def take(self, value: Any, leaves: list[Any]) -> None:
        """Add the leaves of `value` to `leaves`; raises `Mismatch` where it is of another structure."""
        raise NotImplementedError

    def build(self, leaves: Any) -> Any:
        """A value made of the next ones of an iterator over leaves."""
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError

    def refuse(self, value: Any) -> Mismatch:
        return Mismatch(self.path, self.describe(), in_words(value))


class _TensorPart(_Part):
    __slots__ = ()

    def take(self, value: Any, leaves: list[Any]) -> None:
        if not isinstance(value, Tensor):
            raise self.refuse(value)
        leaves.append(value)

    def build(self, leaves: Any) -> Any:
        return next(leaves)

    def describe(self) -> str:
        return "a tensor"


class _ValuePart(_Part):
    __slots__ = ()

    def take(self, value: Any, leaves: list[Any]) -> None:
        if type(value) not in _ATOMS and not _is_atom(value):
            raise self.refuse(value)
        leaves.append(value)

    def build(self, leaves: Any) -> Any:
        return next(leaves)

    def describe(self) -> str:
        return "a value that is no tensor"


class _SequencePart(_Part):
    """A tuple, a named tuple, a list or a deque."""

    __slots__ = ("_kind", "_make", "_parts", "_tensors")

    def __init__(self, path: str, value: Any, parts: list[_Part]) -> None:
        super().__init__(path)
        self._kind = type(value)
        self._make: Any = getattr(self._kind, "_make", self._kind)
        if self._kind is deque:
            maximum = value.maxlen
            self._make = lambda items: deque(items, maximum)
        self._parts = parts
        # Of most states all parts are leaves, and then they are looked at without a call for each.
        self._tensors = None
        if all(type(part) in (_TensorPart, _ValuePart) for part in parts):
            self._tensors = [type(part) is _TensorPart for part in parts]

    def take(self, value: Any, leaves: list[Any]) -> None:
        if type(value) is not self._kind or len(value) != len(self._parts):
            raise self.refuse(value)
        if self._tensors is not None:
            for part, one, is_tensor in zip(self._parts, value, self._tensors, strict=True):
                if isinstance(one, Tensor) is not is_tensor or not (is_tensor or type(one) in _ATOMS or _is_atom(one)):
                    raise part.refuse(one)
            leaves += value
            return
        for part, one in zip(self._parts, value, strict=True):
            part.take(one, leaves)

    def build(self, leaves: Any) -> Any:
        return self._make([part.build(leaves) for part in self._parts])

    def describe(self) -> str:
        return f"a {self._kind.__name__} of length {len(self._parts)}"


class _DictPart(_Part):
    __slots__ = ("_kind", "_parts")

    def __init__(self, path: str, value: Any, parts: dict[Any, _Part]) -> None:
        super().__init__(path)
        self._kind = type(value)
        self._parts = parts

    def take(self, value: Any, leaves: list[Any]) -> None:
        if type(value) is not self._kind or value.keys() != self._parts.keys():
            raise self.refuse(value)
        for key, part in self._parts.items():
            part.take(value[key], leaves)

    def build(self, leaves: Any) -> Any:
        return self._kind((key, part.build(leaves)) for key, part in self._parts.items())

    def describe(self) -> str:
        return f"a {self._kind.__name__} with keys {_shortly(self._parts)}"


class _DataclassPart(_Part):
    __slots__ = ("_kind", "_parts")

    def __init__(self, path: str, value: Any, parts: dict[str, _Part]) -> None:
        super().__init__(path)
        self._kind = type(value)
        self._parts = parts

    def take(self, value: Any, leaves: list[Any]) -> None:
        if type(value) is not self._kind or not getattr(value, "__dict__", self._parts).keys() <= self._parts.keys():
            raise self.refuse(value)
        for name, part in self._parts.items():
            part.take(getattr(value, name), leaves)

    def build(self, leaves: Any) -> Any:
        # Not by its constructor, which may check, count or convert.
        value = object.__new__(self._kind)
        for name, part in self._parts.items():
            object.__setattr__(value, name, part.build(leaves))  # also if it is frozen
        return value

    def describe(self) -> str:
        return f"a {self._kind.__name__} with fields {_shortly(self._parts)}"


class Structure:
    """The structure of one value, for others to be taken apart by.

    Raises:
        TypeError: There is something in the value that is neither a container, nor a tensor, nor a plain value.
    """

    __slots__ = ("_part", "_sole", "tensors")

    def __init__(self, value: Any) -> None:
        self._part = _part_of(value, "", ())
        self._sole = type(self._part) is _TensorPart
        leaves: list[Any] = []
        self._part.take(value, leaves)
        # The places of the tensors among the leaves.
        self.tensors = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))

    def leaves(self, value: Any) -> list[Any]:
        """The leaves of a value of this structure; raises `Mismatch` if it is of another."""
        if self._sole and isinstance(value, Tensor):
            return [value]
        leaves: list[Any] = []
        self._part.take(value, leaves)
        return leaves

    def build(self, leaves: Sequence[Any]) -> Any:
        """The value that has these leaves."""
        return leaves[0] if self._sole else self._part.build(iter(leaves))


def _part_of(value: Any, path: str, around: tuple[int, ...]) -> _Part:
    if isinstance(value, Tensor):
        return _TensorPart(path)
    kind = type(value)
    if kind in _ATOMS or _is_atom(value):
        return _ValuePart(path)
    if id(value) in around:
        raise TypeError(f"the state must not hold itself: its {kind.__name__} at state{path} does")
    around = (*around, id(value))
    if kind in (tuple, list, deque) or is_named_tuple(value):
        return _SequencePart(
            path, value, [_part_of(one, f"{path}[{place}]", around) for place, one in enumerate(value)]
        )
    if kind in (dict, OrderedDict):
        return _DictPart(path, value, {key: _part_of(one, f"{path}[{key!r}]", around) for key, one in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, (list, dict, tuple)):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        if getattr(value, "__dict__", dict.fromkeys(names)).keys() <= set(names):
            return _DataclassPart(
                path, value, {name: _part_of(getattr(value, name), f"{path}.{name}", around) for name in names}
            )
    raise _errors.opaque_state(path, value)


def _is_atom(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return isinstance(value, _ATOMIC) or (numpy is not None and isinstance(value, numpy.generic))


def in_words(value: Any) -> str:
    """What a value is, as far as its structure goes."""
    if isinstance(value, Tensor):
        return f"a tensor ({_errors.describe_tensor(value)})"
    kind = type(value)
    if isinstance(value, (tuple, list, deque)):
        return f"a {kind.__name__} of length {len(value)}"
    if isinstance(value, dict):
        return f"a {kind.__name__} with keys {_shortly(value)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"a {kind.__name__}"
    return _errors.describe_value(value)


def _shortly(names: Any) -> str:
    shown = ", ".join(map(repr, list(names)[:8]))
    return f"{shown}, ..." if len(names) > 8 else shown or "none"
