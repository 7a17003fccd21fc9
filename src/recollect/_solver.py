from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    seconds: float
    kept: int
    forward: int = 0
    backward: int = 0
    out: int = 0


@dataclass(frozen=True)
class Block:
    choices: tuple
    base_forward: int = 0
    base_backward: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    name: str = ""
    kind: Any = None


@dataclass(frozen=True)
class Moment:
    bytes: int
    after: int
    name: str = ""


@dataclass(frozen=True)
class Problem:
    blocks: tuple
    moments: tuple = ()
    tied: tuple = ()
    link: Any = None
    host_bytes: Any = None


@dataclass(frozen=True)
class Solution:
    chosen: tuple
    seconds: float
    peak: int
    gap: float
    stalls: float = 0.0


class InfeasibleError(ValueError):
    pass


def peak(problem, chosen):
    held = [0]
    for b, c in zip(problem.blocks, chosen):
        held.append(held[-1] + b.choices[c].kept)
    vals = []
    for i, (b, c) in enumerate(zip(problem.blocks, chosen)):
        vals.append((b.base_forward + held[i] + b.choices[c].forward, f"forward of {b.name}"))
        vals.append((b.base_backward + held[i] + b.choices[c].backward, f"backward of {b.name}"))
    for m in problem.moments:
        vals.append((m.bytes + held[m.after], m.name))
    return max(vals)
