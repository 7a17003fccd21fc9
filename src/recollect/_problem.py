"""What there is to choose from in one training step, and what a choice for every block comes to, exactly.

Blocks run forward in their order and backward in the reverse order. What a block's choice keeps is alive from the end
of its forward until its backward is over, so at the forward of block i, and at its backward, just what blocks before i
keep is there:

    base_forward[i]  + sum of kept[j] for j < i + forward[i]   must fit into the budget, and
    base_backward[i] + sum of kept[j] for j < i + backward[i]  likewise,
    bytes            + sum of kept[j] for j < after            for every other moment.

What is offloaded must be out before the forward is over, and back before the backward that asks for it. Each direction
of the link has the time in which later blocks run, and where that is too little, the step stalls:

    sum of out[j] for j >= i  <=  link.out  * (stall out  + sum of forward_seconds[k] for k > i), and
    sum of out[j] for j >= i  <=  link.back * (stall back + sum of backward_seconds[k] + seconds[k] for k > i),

for every i that offloads. So what later blocks recompute widens the window for coming back, and the earliest blocks
have the longest.

Plain numbers and arithmetic. Nothing is searched for here and nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to treat a block.

    Attributes:
        seconds: What it adds to a step. All of it is work in the backward, behind which what comes back can hide.
        kept: Bytes that it holds on the device from the end of the block's forward until its backward is over.
        forward: Bytes at the worst moment of the block's own forward, above what is there otherwise. What it keeps is
            part of that where it is there by then, and not added again.
        backward: The same for its own backward, with what is recomputed for it.
        out: Bytes that go to the host during the step and come back.
    """

    seconds: float
    kept: int
    forward: int = 0
    backward: int = 0
    out: int = 0

    def __post_init__(self) -> None:
        if not (
            math.isfinite(self.seconds) and min(self.seconds, self.kept, self.forward, self.backward, self.out) >= 0
        ):
            raise ValueError(f"a choice has seconds and bytes that are finite and not negative, got {self}")


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the step, and what can be chosen for it.

    Attributes:
        choices: At least one of them leaves everything on the device.
        base_forward: Bytes alive at its forward besides what blocks keep: weights, optimizer state, skips.
        base_backward: Likewise at its backward; gradients so far belong to it.
        forward_seconds: How long its forward takes.
        backward_seconds: How long its backward takes without what a choice adds.
        name: For messages.
        kind: Blocks of one kind have the same choices; neighbours among them get the same choice where that is free.
    """

    choices: tuple[Choice, ...]
    base_forward: int = 0
    base_backward: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    name: str = ""
    kind: int | None = None

    def need(self, choice: Choice) -> int:
        """Bytes alive at its worst moment besides what blocks before it keep."""
        return max(self.base_forward + choice.forward, self.base_backward + choice.backward)


@dataclass(frozen=True, slots=True)
class Moment:
    """Another moment of the step, such as the loss: `bytes` are alive besides what blocks 0 to after - 1 keep."""

    bytes: int
    after: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second to the host and back."""

    out: float
    back: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Blocks in the order of their forward, and what holds for all of them.

    Attributes:
        blocks: In the order of their forward.
        moments: Other moments that must fit.
        tied: Indices of blocks that must take the choice of the same index: one module that is called several times.
        link: The way to the host; None where no choice goes there.
        host_bytes: How much may be there at once; None where there is no limit.
    """

    blocks: tuple[Block, ...]
    moments: tuple[Moment, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()
    link: Link | None = None
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        kinds: dict[int, tuple[Choice, ...]] = {}
        for i, block in enumerate(self.blocks):
            if not any(choice.out == 0 for choice in block.choices):
                raise ValueError(f"{name_of(self, i)} has no choice that leaves everything on the device")
            if block.kind is not None and kinds.setdefault(block.kind, block.choices) != block.choices:
                raise ValueError(f"{name_of(self, i)} has other choices than blocks of its kind {block.kind}")
        for moment in self.moments:
            if not 0 <= moment.after <= len(self.blocks):
                raise ValueError(f"{moment} is after more blocks than there are, or after less than none")
        in_groups = [i for group in self.tied for i in group]
        if len(set(in_groups)) < len(in_groups) or not set(in_groups) <= set(range(len(self.blocks))):
            raise ValueError(f"a block is in one tied group at most, got {self.tied} for {len(self.blocks)} blocks")
        for group in self.tied:
            if not group:
                raise ValueError("a tied group has blocks, got one without")
            if len({len(self.blocks[i].choices) for i in group}) > 1:
                raise ValueError(f"tied blocks have as many choices each, those of {group} have not")
            if not set.intersection(*({k for k, c in enumerate(self.blocks[i].choices) if not c.out} for i in group)):
                raise ValueError(
                    f"blocks {group} are tied and have no common choice that leaves everything on the device"
                )
        if self.link is None and any(choice.out for block in self.blocks for choice in block.choices):
            raise ValueError("there are choices that offload, and no link")
        if self.link is not None and not min(self.link.out, self.link.back) > 0:
            raise ValueError(f"a link takes some bytes per second each way, got {self.link}")


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for every block, and what it comes to.

    Attributes:
        chosen: The index of a choice for every block.
        seconds: What the choices add to a step, stalls included.
        peak: Bytes at the worst moment.
        gap: The share of `seconds` that another answer within the budget could save at most; 0.0 where none is better.
        stalls: Seconds for which the step waits for the link.
    """

    chosen: tuple[int, ...]
    seconds: float
    peak: int
    gap: float
    stalls: float = 0.0


def name_of(problem: Problem, i: int) -> str:
    """What block i is called in messages."""
    return problem.blocks[i].name or f"block {i}"


def picked(problem: Problem, chosen: Sequence[int]) -> list[Choice]:
    """The choices at these indices."""
    return [block.choices[k] for block, k in zip(problem.blocks, chosen, strict=True)]


def peak(problem: Problem, chosen: Sequence[int]) -> tuple[int, str]:
    """Bytes at the worst moment of the step, and its name.

    Example:
        >>> block = Block((Choice(0.0, kept=8, forward=9, backward=9), Choice(1.0, kept=1, forward=3, backward=9)))
        >>> peak(Problem((block, block)), [0, 0]), peak(Problem((block, block)), [1, 0])
        ((17, 'forward of block 1'), (10, 'forward of block 1'))
    """
    there = [0]
    for choice in picked(problem, chosen):
        there.append(there[-1] + choice.kept)
    worst, where = 0, ""
    for i, (block, choice) in enumerate(zip(problem.blocks, picked(problem, chosen), strict=True)):
        for bytes_, what in (
            (block.base_forward + choice.forward, "forward"),
            (block.base_backward + choice.backward, "backward"),
        ):
            if there[i] + bytes_ > worst:
                worst, where = there[i] + bytes_, f"{what} of {name_of(problem, i)}"
    for number, moment in enumerate(problem.moments):
        if there[moment.after] + moment.bytes > worst:
            worst, where = there[moment.after] + moment.bytes, moment.name or f"moment {number}"
    return worst, where


def stalls(problem: Problem, chosen: Sequence[int]) -> float:
    """Seconds for which the step waits for the link, both ways together."""
    if problem.link is None:
        return 0.0
    gone, forward, backward, out, back = 0, 0.0, 0.0, 0.0, 0.0
    for block, choice in zip(reversed(problem.blocks), reversed(picked(problem, chosen)), strict=True):
        gone += choice.out
        if choice.out:
            out = max(out, gone / problem.link.out - forward)
            back = max(back, gone / problem.link.back - backward)
        forward += block.forward_seconds
        backward += block.backward_seconds + choice.seconds
    return out + back


def is_allowed(problem: Problem, chosen: Sequence[int]) -> bool:
    """Whether tied blocks agree and the host has room."""
    at_host = sum(choice.out for choice in picked(problem, chosen))
    return (problem.host_bytes is None or at_host <= problem.host_bytes) and all(
        len({chosen[i] for i in group}) <= 1 for group in problem.tied
    )


def switches(problem: Problem, chosen: Sequence[int]) -> int:
    """How often a block is treated unlike the block of its kind before it."""
    last: dict[int, int] = {}
    count = 0
    for block, k in zip(problem.blocks, chosen, strict=True):
        if block.kind is not None:
            count += last.get(block.kind, k) != k
            last[block.kind] = k
    return count


def solution(problem: Problem, chosen: Sequence[int], bound: float) -> Solution:
    """What `chosen` comes to, where no answer takes less than `bound` seconds."""
    waits = stalls(problem, chosen)
    seconds = math.fsum(choice.seconds for choice in picked(problem, chosen)) + waits
    gap = (seconds - bound) / seconds if seconds > 0 else 0.0
    # Sums in another order differ in the last digits.
    return Solution(tuple(chosen), seconds, peak(problem, chosen)[0], gap if gap > 1e-9 else 0.0, waits)
