"""What is known about a function from one call of it to the next.

A function is known by its code, by the modules that it belongs to (itself, the owner of a method, what a closure, a
partial or an argument brings along), and by the name of its region: a lambda is made anew in each step, and the
layers of a model share their code. Nothing is kept alive by what is known of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor
from torch.nn import Module

Key = tuple[Any, ...]


class Known:
    """What earlier calls have shown."""

    __slots__ = ("__weakref__", "_references", "_tree", "is_lenient", "looked", "reads", "verified", "warned", "writes")

    def __init__(self, references: list[weakref.ref[Any]], modules: list[Module]) -> None:
        self._references = references
        self._tree = [weakref.ref(one) for module in modules for one in module.modules()]
        self.verified = False  # whether a replay was compared by value and found equal
        self.looked = 0  # how often it was looked whether it draws random numbers which are not preserved
        self.warned = False  # that it draws random numbers which are not preserved
        # The leaves that need grad which it reads, from outside; None once two calls differed.
        self.reads: list[weakref.ref[Tensor]] | None = []
        # What it changes in place, from outside; with it, whether that is read too.
        self.writes: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self.is_lenient = False  # makes leaves of its own, which a replay makes anew

    def modules(self) -> list[Module]:
        """All modules of which it is known that they belong to the function."""
        return [module for reference in self._tree if (module := reference()) is not None]

    def learn(self, reads: list[Tensor], writes: list[tuple[Tensor, bool]], *, makes_leaves: bool) -> None:
        """Take over what a recorded forward has shown."""
        self.is_lenient |= makes_leaves
        if self.reads is not None:
            before = [reference() for reference in self.reads]
            same = len(before) == len(reads) and all(one is other for one, other in zip(before, reads, strict=True))
            if not before:
                self.reads = [weakref.ref(tensor) for tensor in reads]
            elif not same:
                self.reads = None
        for tensor, is_read in writes:
            place = id(tensor)
            is_read |= place in self.writes and self.writes[place][1]
            reference = weakref.ref(tensor, functools.partial(_forget, weakref.ref(self), place))
            self.writes[place] = (reference, is_read)


def _forget(known: weakref.ref[Known], place: int, _: object) -> None:
    there = known()
    if there is not None:
        there.writes.pop(place, None)


_everything: dict[Key, Known] = {}


def known_of(function: Callable[..., Any], args: tuple[Any, ...], name: str | None) -> Known:
    """What is known of a function that is called with these arguments."""
    modules: list[Module] = []
    code = _look_into(function, modules)
    for value in args:
        if isinstance(value, Module):
            modules.append(value)
    key = (id(code), name, *map(id, modules))
    known = _everything.get(key)
    return _make(key, code, modules) if known is None else known


def _look_into(function: Any, modules: list[Module]) -> Any:
    """The code of a function; the modules that it brings along are added to `modules`."""
    kind = type(function)
    if kind is FunctionType:
        if function.__closure__ is not None:
            for cell in function.__closure__:
                try:
                    value = cell.cell_contents
                except ValueError:  # nothing in it yet
                    continue
                if isinstance(value, Module):
                    modules.append(value)
                elif isinstance(value, MethodType) and isinstance(value.__self__, Module):
                    modules.append(value.__self__)
        return function.__code__
    if isinstance(function, Module):
        modules.append(function)
        return kind
    if kind is MethodType:
        if isinstance(function.__self__, Module):
            modules.append(function.__self__)
        return getattr(function.__func__, "__code__", function.__func__)
    if isinstance(function, functools.partial):
        modules += [value for value in (*function.args, *function.keywords.values()) if isinstance(value, Module)]
        return _look_into(function.func, modules)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and callable(wrapped):
        return _look_into(wrapped, modules)
    return function if isinstance(function, type) or kind.__name__ == "builtin_function_or_method" else kind


def _make(key: Key, code: Any, modules: list[Module]) -> Known:
    def drop(_: object) -> None:
        _everything.pop(key, None)

    references = []
    for one in (code, *modules):
        try:
            references.append(weakref.ref(one, drop))
        except TypeError:  # what cannot be referred to weakly (a method of C) does not die either, as a rule
            pass
    known = _everything[key] = Known(references, modules)
    return known


def all_known(function: Callable[..., Any] | None = None) -> Iterator[Known]:
    """Everything that is known, or what is known of one function."""
    code = None if function is None else id(_look_into(function, []))
    return iter([known for key, known in list(_everything.items()) if code is None or key[0] == code])
