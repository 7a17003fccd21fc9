"""What there is to choose from in one training step, and what a choice for every block comes to, exactly.

Blocks run forward in their order and backward in the reverse order. What a block's choice keeps is alive from the end
of its forward until its backward is over, so at the forward of block i, and at its backward, just what blocks before i
keep is there:

    base_forward[i]  + sum of kept[j] for j < i + forward[i]   must fit into the budget, and
    base_backward[i] + sum of kept[j] for j < i + backward[i]  likewise,
    bytes            + sum of kept[j] for j < after            for every other moment.

What is offloaded is away for some of that time only, because the link takes as long as it takes. Nobody waits for it:
what is late is on the device instead. Blocks leave in their order, each once its forward is over, and come back in the
reverse order, each before its backward begins:

    leaving[i + 1] = out[i] + max(0, leaving[i] - link.out * forward_seconds[i])
    back[i + 1]    = out[i] + max(0, back[i] - link.back * (backward_seconds[i] + seconds[i]))

are the bytes of blocks up to i that are still leaving when the forward of block i is over, and those that must be back
by the end of the backward of block i + 1. So the earliest blocks have the longest, and what later blocks recompute
widens the window for coming back. In the sums above there is besides

    leaving[i]                             at the forward of block i, and at a moment after i blocks,
    back[i - 1] + out[i - 1]               at the backward of block i: fetching begins a block earlier than it must,
    leaving[n] - link.out * time - out[i]  at the same, if that is more: time is that of later blocks' backward,
    max(leaving[n], back[n])               when the forward of all n is over.

Plain numbers and arithmetic. Nothing is searched for here and nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

NEVER = 2**50  # bytes that are kept by what must not be chosen: more than there are, and sums still fit a number


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to treat a block.

    Attributes:
        seconds: What it adds to a step. All of it is work in the backward, beside which bytes can come back.
        kept: Bytes that it holds on the device from the end of the block's forward until its backward is over; NEVER if
            it must not be chosen.
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
    """Bytes per second to the host and back.

    Attributes:
        out: To the host.
        back: From the host.
        in_flight: How many bytes may be on their way in each direction, those of one block apart; None for any.
    """

    out: float
    back: float
    in_flight: int | None = None


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
        seconds: What the choices add to a step.
        peak: Bytes at the worst moment.
        gap: The share of `seconds` that another answer within the budget could save at most; 0.0 where none is better.
    """

    chosen: tuple[int, ...]
    seconds: float
    peak: int
    gap: float


def without_offloading(problem: Problem, first: int) -> Problem:
    """The same where none of so many first blocks may offload."""
    more = 1 + max((block.kind for block in problem.blocks if block.kind is not None), default=0)
    stays = [
        replace(
            block,
            kind=None if block.kind is None else block.kind + more,  # those of one kind have the same choices
            choices=tuple(replace(one, kept=NEVER) if one.out else one for one in block.choices),
        )
        for block in problem.blocks[:first]
    ]
    return replace(problem, blocks=(*stays, *problem.blocks[first:]))


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
    choices = picked(problem, chosen)
    there = [0]
    for choice in choices:
        there.append(there[-1] + choice.kept)
    leaving, back = _on_the_way(problem, choices)
    at_backward = _at_backward(problem, choices, leaving[-1], back)
    worst, where = 0, ""
    for i, (block, choice) in enumerate(zip(problem.blocks, choices, strict=True)):
        for bytes_, what in (
            (_whole(leaving[i]) + block.base_forward + choice.forward, "forward"),
            (_whole(at_backward[i]) + block.base_backward + choice.backward, "backward"),
        ):
            if there[i] + bytes_ > worst:
                worst, where = there[i] + bytes_, f"{what} of {name_of(problem, i)}"
    late = [*leaving[:-1], max(leaving[-1], back[-1])]
    for number, moment in enumerate(problem.moments):
        bytes_ = there[moment.after] + _whole(late[moment.after]) + moment.bytes
        if bytes_ > worst:
            worst, where = bytes_, moment.name or f"moment {number}"
    return worst, where


def _on_the_way(problem: Problem, choices: Sequence[Choice]) -> tuple[list[float], list[float]]:
    """What is leaving when the forward of each block begins, and must be back when its backward ends; and of all."""
    leaving, back, link = [0.0], [0.0], problem.link
    for block, choice in zip(problem.blocks, choices, strict=True):
        left, came = (0.0, 0.0) if link is None else _moved(link, block, choice)
        leaving.append(choice.out + max(0.0, leaving[-1] - left))
        back.append(choice.out + max(0.0, back[-1] - came))
    return leaving, back


def _moved(link: Link, block: Block, choice: Choice) -> tuple[float, float]:
    """What the link carries while a block is computed: out during its forward, and back during its backward."""
    return link.out * block.forward_seconds, link.back * (block.backward_seconds + choice.seconds)


def _at_backward(problem: Problem, choices: Sequence[Choice], leaving: float, back: Sequence[float]) -> list[float]:
    """What is there at the backward of each block of what others have offloaded."""
    found = [0.0] * len(choices)
    for i in reversed(range(len(choices))):
        early = back[i - 1] + choices[i - 1].out if i else 0.0
        found[i] = max(early, leaving - choices[i].out, 0.0)
        if problem.link is not None:
            leaving -= problem.link.out * (problem.blocks[i].backward_seconds + choices[i].seconds)
    return found


def _whole(bytes_: float) -> int:
    return math.ceil(bytes_ - 1e-6)


def is_allowed(problem: Problem, chosen: Sequence[int]) -> bool:
    """Whether tied blocks agree, the host has room, and no more is on its way than may be."""
    choices = picked(problem, chosen)
    return (
        (problem.host_bytes is None or sum(choice.out for choice in choices) <= problem.host_bytes)
        and all(len({chosen[i] for i in group}) <= 1 for group in problem.tied)
        and _excess_on_the_way(problem, choices) <= 0.0
    )


def _excess_on_the_way(problem: Problem, choices: Sequence[Choice]) -> float:
    """By how many bytes more is on its way than may be, those of the block apart that has just been computed."""
    if problem.link is None or problem.link.in_flight is None:
        return 0.0
    most = problem.link.in_flight + 1e-6
    ways = _on_the_way(problem, choices)
    return max((way[i + 1] - choice.out - most for way in ways for i, choice in enumerate(choices)), default=0.0)


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
    seconds = math.fsum(choice.seconds for choice in picked(problem, chosen))
    gap = (seconds - bound) / seconds if seconds > 0 else 0.0
    # Sums in another order differ in the last digits.
    return Solution(tuple(chosen), seconds, peak(problem, chosen)[0], gap if gap > 1e-9 else 0.0)
