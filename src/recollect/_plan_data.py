"""Plans as data: decisions as dicts of plain values, and plain values into dataclasses, checked on the way.

A file may be damaged, or written by hand. Whatever is in it, reading gives what the types of a plan's fields promise,
or raises a `ValueError` that says where that is not so.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from recollect import _errors
from recollect._candidates import keep_calls
from recollect._torch import operator_from_name
from recollect.policy import ByCall, Decision, Offload, Operators, Recompute, Save, SaveOrCopy

# --- Decisions ---


def encode(decision: Decision) -> dict[str, Any]:
    """A decision as plain values."""
    if isinstance(decision, Offload):
        return {
            "decision": "offload",
            **{one.name: getattr(decision, one.name) for one in dataclasses.fields(decision)},
        }
    if isinstance(decision, Save):
        return {"decision": "save"}
    made: dict[str, Any] = {"decision": "recompute"}
    if isinstance(decision.inputs, Offload):
        made["inputs"] = encode(decision.inputs)
    elif decision.inputs is not None:
        raise TypeError(f"a plan says where inputs wait by recollect.Offload(), and cannot hold {decision.inputs!r}")
    if decision.policy is not None:
        made["keep"] = _encode_policy(decision.policy)
    return made


def _encode_policy(policy: Any) -> dict[str, Any]:
    table = policy.operators() if isinstance(policy, Operators) else {}
    by_call = {str(operator): sorted(one.calls) for operator, one in table.items() if isinstance(one, ByCall)}
    if len(by_call) != len(table) or not table:
        raise TypeError(f"a plan keeps operators call by call, and cannot hold the policy {policy!r}")
    return by_call


def decode(data: Any, where: str = "decision") -> Decision:
    """What `encode` was given."""
    rest = dict(_checked(data, dict, "a dict", where))
    kind = rest.pop("decision", None)
    try:
        if kind == "save":
            return Save(**rest)
        if kind == "offload":
            return Offload(**rest)
        if kind == "recompute":
            return _decode_recompute(where, **rest)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where} is no decision: {error}") from error
    raise _errors.not_one_of(f"{where}.decision", kind, ("save", "recompute", "offload"))


def _decode_recompute(where: str, inputs: Any = None, keep: Any = None) -> Recompute:
    offload = None if inputs is None else decode(inputs, f"{where}.inputs")
    if offload is not None and not isinstance(offload, Offload):
        raise ValueError(f"inputs are offloaded, got {offload!r}")
    calls = {} if keep is None else read(Mapping[str, tuple[int, ...]], keep, f"{where}.keep")
    table = {operator_from_name(name): ByCall(dict.fromkeys(each, SaveOrCopy())) for name, each in calls.items()}
    return Recompute(policy=keep_calls(table) if table else None, inputs=offload)


# --- Everything else ---

_TOO_LARGE = 2**63  # for any bytes, and to be counted with as a float


def read(kind: Any, data: Any, where: str = "") -> Any:
    """Plain values as a value of some type: a dataclass, a tuple, a mapping, a number, a string, a decision.

    Args:
        kind: The type, as it is written in annotations.
        data: Dicts, lists, strings and numbers.
        where: What a reader calls it.

    Raises:
        ValueError: If it is no such value.

    Example:
        >>> read(tuple[int, ...], [1, 2], "shape")
        (1, 2)
        >>> read(tuple[int, ...], [1, "x"], "shape")
        Traceback (most recent call last):
        ValueError: shape[1] must be a whole number from 0 on, got str 'x'
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind == Decision:
        return decode(data, where)
    if origin in (Union, types.UnionType):
        (some,) = (one for one in parts if one is not type(None))
        return None if data is None else read(some, data, where)
    if origin is tuple:
        items = _checked(data, list, "a list", where)
        return tuple(read(parts[0], item, f"{where}[{number}]") for number, item in enumerate(items))
    if origin is collections.abc.Mapping:
        entries = _checked(data, dict, "a dict", where)
        return {name: read(parts[1], value, f"{where}[{name!r}]") for name, value in entries.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, where)
    if kind is int or kind is float:
        return _number(kind, data, where)
    return _checked(data, kind, {str: "a string", bool: "true or false"}[kind], where)


def _read_dataclass(kind: Any, data: Any, where: str) -> Any:
    entries = _checked(data, dict, "a dict", where)
    hints = get_type_hints(kind)
    fields = {one.name: one for one in dataclasses.fields(kind)}
    dot = f"{where}." if where else ""
    for name in entries:
        if name not in fields:
            raise ValueError(f"{dot}{name} is not known")
    given = {}
    for name, one in fields.items():
        if name in entries:
            given[name] = read(hints[name], entries[name], f"{dot}{name}")
        elif one.default is dataclasses.MISSING:
            raise ValueError(f"{dot}{name} is missing")
    return kind(**given)


def _number(kind: Any, data: Any, where: str) -> Any:
    whole = isinstance(data, int) and not isinstance(data, bool)
    if whole and data >= _TOO_LARGE:
        raise _not(data, "a number that is not so large", where)
    if kind is int:
        if not whole or data < 0:
            raise _not(data, "a whole number from 0 on", where)
        return data
    if not (whole or isinstance(data, float)) or not (math.isfinite(data) and data >= 0):
        raise _not(data, "a number from 0 on", where)
    return float(data)


def _checked(data: Any, kind: type, words: str, where: str) -> Any:
    if type(data) is not kind:
        raise _not(data, words, where)
    return data


def _not(data: Any, words: str, where: str) -> ValueError:
    return ValueError(f"{where or 'a plan'} must be {words}, got {_errors.describe_value(data)}")
