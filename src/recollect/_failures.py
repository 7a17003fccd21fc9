"""Ways to treat blocks that do not work, and what a reader is told of them: a line for each reason.

Messages of errors name regions, shapes and numbers, so that hardly two are equal. Those that differ in such things
alone are one reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALONE, IN_PLACE = "by itself", "within the step"
_LENGTH = 140
_SHORT = 60
_NAMED = 3


@dataclass(frozen=True)
class Failure:
    """A way that does not work.

    Attributes:
        block: The name of the block that it was tried on.
        module: The class of the block.
        way: The name of the option, "" if the block cannot be run at all.
        when: `ALONE` or `IN_PLACE`.
        reason: In one line.
    """

    block: str
    module: str
    way: str
    when: str
    reason: str


def reason_of(error: BaseException) -> str:
    """`ValueError: no data`: the first sentence of an error, in a line that is not too long."""
    first = next(iter(str(error).strip().splitlines()), "").split(". ")[0].rstrip(".:")
    first = re.sub(r" \([^()]*\)", "", first)  # files, shapes
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return _short(words, _LENGTH)


def _short(words: str, length: int) -> str:
    return words if len(words) <= length else f"{words[: length - 3]}..."


def in_lines(failures: Iterable[Failure]) -> list[str]:
    """What is left out and why, a line for each class of blocks and each reason.

    Example:
        >>> failed = [Failure("0", "Layer", way, ALONE, "ValueError: no 7") for way in ("recompute", "recompute 0.mlp")]
        >>> in_lines(failed)
        ['Layer: left out because of an error by itself: recompute; recompute 0.mlp (ValueError: no 7)']
    """
    groups: dict[tuple[object, ...], list[Failure]] = {}
    for one in failures:
        groups.setdefault((one.module, one.when, bool(one.way), _bare(one.reason)), []).append(one)
    return [_line(group) for group in groups.values()]


def _bare(reason: str) -> str:
    return re.sub(r"'[^']*'|\[[^]]*]|\d+|\.\.\.$", "", reason)


def _line(group: Sequence[Failure]) -> str:
    first = group[0]
    if first.way:
        ways = _few([_short(one.way, _SHORT) for one in group], "; ")
        return f"{first.module}: left out because of an error {first.when}: {ways} ({first.reason})"
    blocks = _few([one.block or "the model" for one in group], ", ")
    return f"{first.module}: kept because it cannot be run {first.when}: {blocks} ({first.reason})"


def _few(words: Iterable[str], between: str) -> str:
    each = list(dict.fromkeys(words))
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED + 1 else ""
    return between.join(each[:_NAMED] if more else each) + more
