"""Amounts of memory as people write them."""

from __future__ import annotations

import re
from typing import Any

from recollect import _errors

MIN_BYTES = 2**20  # tensors that are smaller are not worth being moved, unless somebody says so

_UNITS = {
    prefix + letter: base**power
    for base, letter in ((1000, "b"), (1024, "ib"))
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
    if prefix or letter == "b"
}


def bytes_of(argument: str, value: Any) -> int:
    """A number of bytes, given as such or as "512 MiB"; raises where `value` is neither."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get((match[2] or "b").lower()) if match else None
        if match and unit is not None:
            return int(float(match[1]) * unit)
    raise _errors.not_a_size(argument, value)


def human(amount: float) -> str:
    """`512 B`, `4.0 KiB`."""
    if amount < 1024:
        return f"{amount:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1023.95:  # or it would be shown as 1024.0
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"
