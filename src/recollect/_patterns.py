"""Patterns over the names of modules, such as `layers.*.attn`.

A name is made of parts. `*`, `?` and `[...]` stand for something within one part, `**` for any number of parts, none
among them. So `layers.*` is every layer, and not what is inside of it.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable


class ModulePattern:
    """A pattern, checked when it is made."""

    def __init__(self, text: str) -> None:
        self._parts = tuple(text.split(".")) if text else ()
        for part in self._parts:
            if not part or ("**" in part and part != "**"):
                raise ValueError(
                    f"a pattern over module names is made of parts with dots between them, such as 'layers.*.attn', "
                    f"where '**' is a part by itself, got {text!r}"
                )

    def matches(self, name: str) -> bool:
        return _match(self._parts, tuple(name.split(".")) if name else ())


@functools.lru_cache(maxsize=4096)
def _match(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    if not pattern:
        return not name
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return any(_match(rest, name[skipped:]) for skipped in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], first) and _match(rest, name[1:])


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
