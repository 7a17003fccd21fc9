"""Which choice for which block: least seconds within a budget of bytes, least bytes within seconds, and all between.

How it is done, by what there is to decide:

- a chain of blocks alone: `_knapsack.py`, exact in well under a second for hundreds of blocks;
- tied blocks: the same, with a search over the groups around it (`_ties.py`);
- offloading, where what is on its way makes every choice depend on others: a mixed-integer program (`_milp.py`), which
  needs scipy. Without scipy choices that offload are left alone.

Whatever finds an answer, it is worth what `_problem.py` says of it, to the byte, and it is never worse than what the
simpler ways find. An answer's gap is relative to the problem as it was given: where a solver was stopped, where
rounding left something open, or where choices were left alone, it says how much a better answer could save at most.

Pure numbers: nothing is measured here and nothing is known of modules.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from recollect import _milp, _ties
from recollect._errors import InfeasibleError, infeasible
from recollect._knapsack import Chain, Options
from recollect._problem import (
    NEVER,
    Block,
    Choice,
    Link,
    Moment,
    Problem,
    Solution,
    is_allowed,
    peak,
    solution,
    switches,
)

__all__ = [
    "Block",
    "Choice",
    "InfeasibleError",
    "Link",
    "Moment",
    "Problem",
    "Solution",
    "fastest",
    "frontier",
    "peak",
    "smallest",
    "solve",
    "within",
]

GAP = 0.005  # what a mixed-integer program may leave open
TIME_LIMIT = 4.0
_HALVINGS = 20
_SAME = 1e-9

Chosen = Sequence[int]


def solve(problem: Problem, budget: int, *, time_limit: float = TIME_LIMIT) -> Solution:
    """Least seconds within a budget.

    Args:
        problem: What to choose from.
        budget: Bytes.
        time_limit: Seconds for the mixed-integer program, where one is needed.

    Raises:
        InfeasibleError: Where nothing fits; it says what would.

    Example:
        >>> keep, recompute = Choice(0.0, kept=8, forward=8, backward=9), Choice(1.0, kept=1, forward=2, backward=9)
        >>> blocks = (Block((keep, recompute), kind=0),) * 4
        >>> solve(Problem(blocks), 20)
        Solution(chosen=(1, 1, 0, 0), seconds=2.0, peak=19, gap=0.0)
    """
    return _solve(problem, budget, [], time_limit)


def fastest(problem: Problem, *, time_limit: float = TIME_LIMIT) -> Solution:
    """Least seconds whatever the memory, and the least peak with those."""
    enough = sum(max(moment.bytes, 0) for moment in problem.moments)
    for block, ks in zip(problem.blocks, _options(problem, offloading=True), strict=True):
        choices = [block.choices[k] for k in ks]
        enough += max(0, *(max(block.need(choice), 0) + choice.kept + 2 * choice.out for choice in choices))
    found = _solve(problem, enough, [], time_limit)
    return _within(problem, found.seconds, [found.chosen], time_limit)


def smallest(problem: Problem, *, time_limit: float = TIME_LIMIT) -> Solution:
    """The least peak that any choice reaches, and the least seconds with it."""
    chosen = _least_peak(problem, time_limit)
    return _solve(problem, peak(problem, chosen)[0], [chosen], time_limit)


def within(problem: Problem, seconds: float, *, time_limit: float = TIME_LIMIT) -> Solution:
    """The least peak with at most so many seconds added to a step.

    Without offloading to within a millionth of what lies between the least peak of all and that of the fastest.

    Raises:
        ValueError: Where every choice adds more.
    """
    best = fastest(problem, time_limit=time_limit)
    if best.seconds > seconds * (1 + _SAME):
        raise ValueError(f"every choice adds at least {best.seconds} s to a step, {seconds} are allowed")
    return _within(problem, seconds, [best.chosen], time_limit)


def frontier(problem: Problem, points: int = 12, *, time_limit: float = TIME_LIMIT) -> list[Solution]:
    """From the smallest to the fastest: budgets at even distances, and no answer that another one makes useless.

    Args:
        problem: What to choose from.
        points: How many budgets are tried; at least two.
        time_limit: Seconds for each mixed-integer program.
    """
    first, last = smallest(problem, time_limit=time_limit), fastest(problem, time_limit=time_limit)
    found = [first]
    for step in range(1, points - 1):
        budget = first.peak + (last.peak - first.peak) * step // (points - 1)
        if budget > found[-1].peak:
            found.append(_solve(problem, budget, [found[-1].chosen], time_limit))
    useful: list[Solution] = []
    for one in sorted([*found, last], key=lambda one: (one.peak, one.seconds)):
        if not useful or one.seconds < useful[-1].seconds * (1 - _SAME):
            useful.append(one)
    return useful


# --- How ---


def _options(problem: Problem, *, offloading: bool) -> Options:
    """Which choices may be taken."""
    options = _ties.common(
        problem,
        [[k for k, choice in enumerate(block.choices) if offloading or not choice.out] for block in problem.blocks],
    )
    never = [{k for k, choice in enumerate(block.choices) if choice.kept >= NEVER} for block in problem.blocks]
    for group in problem.tied:
        for i in group:
            never[i] = set.union(*(never[j] for j in group))
    # All of a block's may be ruled out: then whatever is chosen fits into nothing.
    return [[k for k in some if k not in out] or some for some, out in zip(options, never, strict=True)]


def _offloads(problem: Problem) -> bool:
    return any(choice.out for block in problem.blocks for choice in block.choices)


def _solve(problem: Problem, budget: int, known: Iterable[Chosen], time_limit: float) -> Solution:
    """As `solve`; `known` are answers that may be as good as any."""
    found = _ties.least_seconds(problem, _options(problem, offloading=False), budget)
    bound, answers = (0.0 if found is None else found.bound), list(known)
    if found is not None:
        answers.append(found.chosen)
    hard = (problem.tied or _offloads(problem)) and _milp.is_there()
    if _offloads(problem):
        # With a link that takes no time and a host without end no answer is slower.
        relaxed = Chain(problem, _options(problem, offloading=True)).solve(budget)
        bound = relaxed.bound if relaxed is not None else 0.0
        if relaxed is not None and hard:
            answers.append(relaxed.chosen)
    best = _best(problem, budget, answers, bound)
    if hard and (best is None or best.gap > GAP):
        best = _by_milp(problem, budget, best, bound, time_limit)
    if best is None:
        chosen = _least_peak(problem, time_limit)
        least, where = peak(problem, chosen)
        if least > budget:
            raise infeasible(budget, least, where)
        best = solution(problem, chosen, bound)
    return best


def _by_milp(problem: Problem, budget: int, best: Solution | None, bound: float, time_limit: float) -> Solution | None:
    """`best` or a better one; None where nothing was found, which need not mean that there is nothing."""
    options = _options(problem, offloading=True)
    deadline = time.monotonic() + time_limit
    # Alike blocks together, which is quick; apart if that leaves a gap; and with a margin if a tolerance was used up.
    for apart, margin in ((False, 0.0), (True, 0.0), (True, 4e-6)):
        left = deadline - time.monotonic()
        if left <= 0.05:
            break
        answer = _milp.solve(
            problem,
            options,
            budget=budget,
            time_limit=left,
            gap=GAP / 2,
            apart=apart,
            margin=margin,
        )
        if not margin:
            bound = max(bound, answer.bound)
        fits = _best(problem, budget, answer.candidates, bound) is not None
        answers = [*answer.candidates, *([best.chosen] if best is not None else [])]
        best = _best(problem, budget, answers, bound)
        if best is not None:
            best = _best(problem, budget, [best.chosen, *_rest_anew(problem, budget, best)], bound)
        if best is not None and (best.gap <= GAP or (answer.apart and (fits or margin))):
            break
    return best


def _rest_anew(problem: Problem, budget: int, best: Solution) -> list[Chosen]:
    """The same blocks offloaded, and all others chosen anew: what a program leaves open is mostly there."""
    fixed = [
        [k] if block.choices[k].out else some
        for block, k, some in zip(problem.blocks, best.chosen, _options(problem, offloading=False), strict=True)
    ]
    found = None if problem.tied else Chain(problem, fixed).solve(budget)
    return [] if found is None else [found.chosen]


def _least_peak(problem: Problem, time_limit: float) -> Chosen:
    """A choice of the least peak of all."""
    answers: list[Chosen] = [_ties.least_peak(problem, _options(problem, offloading=False)).chosen]
    if _offloads(problem) and _milp.is_there():
        everything = _options(problem, offloading=True)
        relaxed = _ties.least_peak(problem, everything)
        answers += [relaxed.chosen] if is_allowed(problem, relaxed.chosen) else []
        least = min(peak(problem, chosen)[0] for chosen in answers)
        if least > relaxed.bound:
            answers += _small_by_milp(problem, math.inf, least, time_limit)
    return min(answers, key=lambda chosen: peak(problem, chosen)[0])


def _small_by_milp(problem: Problem, seconds: float, budget: int, time_limit: float) -> list[Chosen]:
    """Choices of a small peak within so many seconds; `budget` bytes are known to do."""
    deadline = time.monotonic() + time_limit
    found: list[Chosen] = []
    for apart, margin in ((False, 0.0), (True, 0.0), (True, 4e-6)):
        left = deadline - time.monotonic()
        if left <= 0.05:
            break
        answer = _milp.solve(
            problem,
            _options(problem, offloading=True),
            budget=budget,
            seconds=seconds,
            time_limit=left,
            gap=0.0 if apart else GAP / 10,
            apart=apart,
            margin=margin,
        )
        allowed = [
            chosen
            for chosen in answer.candidates
            if is_allowed(problem, chosen) and solution(problem, chosen, 0.0).seconds <= seconds
        ]
        found += allowed
        least = min((peak(problem, chosen)[0] for chosen in found), default=math.inf)
        if (answer.apart and allowed) or least <= answer.bound * (1 + GAP / 10):
            break
    return found


def _within(problem: Problem, seconds: float, known: Sequence[Chosen], time_limit: float) -> Solution:
    """As `within`; one of `known` at least takes no longer."""
    options = _options(problem, offloading=False)
    answers = [chosen for chosen in known if solution(problem, chosen, 0.0).seconds <= seconds]
    high = min(peak(problem, chosen)[0] for chosen in answers)
    # Nothing is below `low`, something is at `high`.
    low = int(_ties.least_peak(problem, options).bound) - 1
    for _ in range(_HALVINGS):
        if high - low <= 1:
            break
        budget = (low + high) // 2
        found = _ties.least_seconds(problem, options, budget, enough=seconds)
        if found is not None and solution(problem, found.chosen, 0.0).seconds <= seconds:
            answers.append(found.chosen)
            high = peak(problem, found.chosen)[0]
        else:
            low = budget
    if _offloads(problem) and _milp.is_there():
        answers += _small_by_milp(problem, seconds, high, time_limit)
    chosen = min(answers, key=lambda chosen: (peak(problem, chosen)[0], solution(problem, chosen, 0.0).seconds))
    return _solve(problem, peak(problem, chosen)[0], [chosen], time_limit)


def _best(problem: Problem, budget: int, answers: Iterable[Chosen], bound: float) -> Solution | None:
    """The fastest of these that is an answer, with as few switches as that allows."""
    found = [
        one
        for chosen in answers
        for arranged in _arrangements(problem, chosen)
        if peak(problem, arranged)[0] <= budget and is_allowed(problem, arranged)
        for one in [solution(problem, arranged, bound)]
    ]
    if not found:
        return None
    least = min(one.seconds for one in found)
    return min(
        (one for one in found if one.seconds <= least * (1 + _SAME)),
        key=lambda one: (switches(problem, one.chosen), one.peak),
    )


def _arrangements(problem: Problem, chosen: Chosen) -> list[list[int]]:
    """The choices of each kind's blocks in other orders: equal ones together, what keeps least first."""
    tied = {i for group in problem.tied for i in group}
    kinds: dict[int, list[int]] = {}
    for i, block in enumerate(problem.blocks):
        if block.kind is not None and i not in tied:
            kinds.setdefault(block.kind, []).append(i)
    found = [list(chosen)]
    for first in (_offloaded_first, _least_first, _falling_first):
        arranged = list(chosen)
        for places in kinds.values():
            block = problem.blocks[places[0]]
            ranked = sorted((chosen[i] for i in places), key=lambda k: (first(block, block.choices[k]), k))
            for i, k in zip(places, ranked, strict=True):
                arranged[i] = k
        if arranged not in found:
            found.append(arranged)
    return found


def _offloaded_first(block: Block, choice: Choice) -> tuple[float, ...]:
    return -choice.out, choice.kept, -block.need(choice)


def _least_first(block: Block, choice: Choice) -> tuple[float, ...]:
    return choice.kept, -choice.out, -block.need(choice)


def _falling_first(block: Block, choice: Choice) -> tuple[float, ...]:
    return choice.kept - block.need(choice), -choice.out
