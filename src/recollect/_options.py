"""Ways to treat a kind of blocks, measured: what each costs, which are worth choosing from, and which do not work.

What this is not: nothing is measured here (`_alone.py`), and nothing is chosen (`_solver.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recollect._failures import Failure
from recollect.policy import Decision, Offload, Recompute

KEEP, RECOMPUTE = 0, "recompute"
_AT_MOST = 12  # ways to treat a block


@dataclass(frozen=True)
class Option:
    """A way to treat a block, measured.

    Attributes:
        name: In words.
        decisions: By names within the block, "" is the block itself.
        seconds: What a step takes more than if the block is kept.
        kept: Bytes that the block holds from its forward to its backward, its result apart.
        forward: Bytes at the worst moment of its forward, above what is there before.
        backward: The same of its backward, with the replay.
        out: Bytes that leave the device and come back.
        works: Whether it may be chosen.
    """

    name: str
    decisions: Mapping[str, Decision]
    seconds: float
    kept: int
    forward: int
    backward: int
    out: int = 0
    works: bool = True

    def recomputes(self) -> bool:
        """Whether anything is computed again."""
        return any(isinstance(one, Recompute) for one in self.decisions.values())


@dataclass(frozen=True)
class Kind:
    """Blocks that cannot be told apart."""

    module: str
    options: tuple[Option, ...]  # the first is to keep all of it
    forward_seconds: float
    backward_seconds: float
    failures: tuple[Failure, ...] = ()

    @property
    def recompute(self) -> int:
        """The option that recomputes all of it; if there is none that works, the one that keeps it."""
        return next((number for number, one in enumerate(self.options) if one.name == RECOMPUTE and one.works), KEEP)

    def ruling_out(self, failures: Sequence[Failure]) -> Kind:
        """The same, where some ways do not work."""
        ways = {one.way for one in failures}
        options = [dataclasses.replace(one, works=one.works and one.name not in ways) for one in self.options]
        return dataclasses.replace(self, options=tuple(options), failures=(*self.failures, *failures))

    def without_recomputing(self) -> Kind:
        """The same with the options alone that compute nothing again."""
        return dataclasses.replace(self, options=tuple(one for one in self.options if not one.recomputes()))

    def with_offloading(self, offload: Offload, price: float) -> Kind:
        """The same with ways to offload, where each byte adds `price` seconds though nobody waits for it.

        What these take is not measured alone, where there is nothing to hide copies behind, but told by the bytes and
        the link: see `_problem.py`.
        """
        recompute = self.options[self.recompute]
        ways = []
        for option in self.options:
            whole = option.decisions.get("")
            if whole is None:  # what is left of it, after parts were made regions, waits elsewhere
                ways.append(
                    dataclasses.replace(
                        option,
                        name="offload" if option.name == "keep" else f"offload, {option.name}",
                        decisions={"": offload, **option.decisions},
                        seconds=option.seconds + price * option.kept,
                        kept=0,
                        out=option.kept,
                    )
                )
            elif isinstance(whole, Recompute) and recompute.kept <= option.kept:
                ways.append(
                    dataclasses.replace(
                        option,
                        name=f"{option.name}, offload the input",
                        decisions={**option.decisions, "": dataclasses.replace(whole, inputs=offload)},
                        seconds=option.seconds + price * recompute.kept,
                        kept=option.kept - recompute.kept,
                        out=recompute.kept,
                    )
                )
        return dataclasses.replace(self, options=(*self.options, *(one for one in ways if one.out)))


def best_of(options: Sequence[Option]) -> list[Option]:
    """Those that no other beats in every respect, keep and recompute among them, and not too many."""
    fixed = [one for number, one in enumerate(options) if number == KEEP or one.name == RECOMPUTE]
    rest = sorted((one for one in options if one not in fixed), key=lambda one: (one.kept, one.seconds))
    found = [one for one in rest if not any(_beats(other, one) for other in options if other is not one)]
    while len(found) > _AT_MOST - len(fixed):
        # Of the two closest neighbours, one can be spared.
        gaps = [later.kept - earlier.kept for earlier, later in itertools.pairwise(found)]
        del found[gaps.index(min(gaps))]
    return fixed + found


def _beats(one: Option, other: Option) -> bool:
    mine = (one.kept, one.seconds, one.backward, one.forward, one.out)
    others = (other.kept, other.seconds, other.backward, other.forward, other.out)
    return all(a <= b for a, b in zip(mine, others, strict=True)) and mine != others
