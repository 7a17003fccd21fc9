"""Patterns over the names of modules, such as `layers.*.attn`.

A name is made of parts. `*`, `?` and `[...]` stand for something within one part, `**` for any number of parts, none
among them. So `layers.*` is every layer, and not what is inside of it.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence


class ModulePattern:
    """A pattern, checked when it is made."""

    def __init__(self, text: str) -> None:
        parts = text.split(".") if text else []
        for part in parts:
            if not part or ("**" in part and part != "**"):
                raise ValueError(
                    f"a pattern over module names is made of parts with dots between them, such as 'layers.*.attn', "
                    f"where '**' is a part by itself, got {text!r}"
                )
        self._parts = [None if part == "**" else re.compile(fnmatch.translate(part)).match for part in parts]

    def matches(self, name: str) -> bool:
        return _match(self._parts, name.split(".") if name else [])


def _match(pattern: Sequence[Callable[[str], object] | None], name: list[str]) -> bool:
    for place, part in enumerate(pattern):
        if part is None:
            rest = pattern[place + 1 :]
            return any(_match(rest, name[skipped:]) for skipped in range(place, len(name) + 1))
        if place == len(name) or not part(name[place]):
            return False
    return len(name) == len(pattern)


def close_names(wanted: str, names: Iterable[str]) -> list[str]:
    """The names that may have been meant, with a `*` where there is a number: `layers.*` for `layer.*`."""
    by_kind: dict[str, list[str]] = {}
    for name in filter(None, names):
        by_kind.setdefault(_kind_of(name), []).append(name)
    alike = by_kind.get(_kind_of(wanted))
    if alike is not None:  # all but the number is there
        return alike if len(alike) <= 3 else [alike[0], alike[1], "...", alike[-1]]
    kinds = list(by_kind)
    close = difflib.get_close_matches(_kind_of(wanted), kinds, n=3, cutoff=0.6)
    last = wanted.rpartition(".")[2]
    return close or [kind for kind in kinds if kind.rpartition(".")[2] == last][:3] or kinds[:6]


def _kind_of(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
