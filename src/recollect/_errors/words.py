"""How messages call what they speak of: tensors, functions, nodes of a graph, amounts."""

from __future__ import annotations

import contextlib
import functools
import reprlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from recollect._errors.kinds import Signature


def describe_signature(signature: Signature) -> str:
    shape, dtype, device = signature
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def describe_tensor(tensor: Tensor) -> str:
    try:
        return describe_signature((tensor.shape, tensor.dtype, tensor.device))
    except Exception:  # a subclass or a nested tensor without a shape
        return type(tensor).__name__


def describe_function(function: Callable[..., Any], name: str | None = None) -> str:
    """`Block (model.py:12)`, as far as it can be known; never raises."""
    label, code = _label_and_code(function)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{name!r}, {label}{where}" if name else f"{label}{where}"


def place_of(function: Callable[..., Any]) -> str | None:
    """`model.py:12 in forward`, where a function begins; None if it is not written in Python."""
    _, code = _label_and_code(function)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _label_and_code(function: Callable[..., Any]) -> tuple[str, Any]:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, type):  # MyFunction.apply is a method of torch's own class
        inner = getattr(owner, "forward", inner)
    elif isinstance(owner, Module) and inner.__name__ in (Module.__call__.__name__, "__call__"):
        inner = owner
    if not hasattr(inner, "__code__") and callable(getattr(inner, "__wrapped__", None)):
        return _label_and_code(inner.__wrapped__)
    label = getattr(inner, "__qualname__", None) or type(inner).__name__
    kind: Any = type(inner)
    runs = inner if hasattr(inner, "__code__") else getattr(kind, "forward", kind.__call__)
    return label, getattr(runs, "__code__", None)


def describe_value(value: object) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"


def describe_amount(amount: int, *, up: bool) -> str:
    """`3.2 GiB`, rounded upwards for what is needed, so that who gives that much gives enough, else downwards."""
    power = next((power for power in range(4) if amount < 1024 ** (power + 1)), 4)
    if power == 0:
        return f"{amount} B"
    tenths = -(-amount * 10 // 1024**power) if up else amount * 10 // 1024**power
    return f"{tenths / 10:.1f} {'KMGT'[power - 1]}iB"


def note(error: BaseException, text: str) -> None:
    """`error.add_note(text)`; Python 3.10 does not show notes, but programs can read them."""
    with contextlib.suppress(Exception):  # an error that takes no notes is raised all the same
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]


def describe_node(node: Any) -> str:
    try:
        return str(node.name())
    except Exception:
        return type(node).__name__
