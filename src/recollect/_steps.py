"""What is remembered from one training step to the next, for a function.

A step often makes its functions anew (a lambda, a partial, a bound method), so what stands for a function is its
code. What stands for the call of a module is the module: all modules are called by the same code.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch.nn import Module

T = TypeVar("T")


def _code_of(function: Any) -> Any:
    """What stands for a function from step to step: its code, because a lambda is made anew each time."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Module) and function.__name__ in _CALLS:
        return owner
    if not hasattr(function, "__code__"):
        function = getattr(function, "__wrapped__", function)
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", None) or type(function)


_CALLS = ("__call__", Module.__call__.__name__)


class ByCode(Generic[T]):
    """Something remembered from step to step for each function, for as long as its code is there.

    Code objects are told apart by identity: their own comparison reads all of their code.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def __getitem__(self, function: Any) -> T:
        code = _code_of(function)
        place = id(code)
        entry = self._entries.get(place)
        if entry is None:
            entries = self._entries
            entry = entries[place] = (weakref.ref(code, lambda _: entries.pop(place, None)), self._make())
        return entry[1]
