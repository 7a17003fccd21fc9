"""Tied blocks: one module that is called several times is treated one way.

Best first: ties are relaxed, and where the answer to that breaks one, its group is tried with each of its choices. What
is relaxed bounds what is not, so a branch ends where its bound is no better than an answer that is known. All of them
are tried if need be; where that is too much the search ends with the best one so far and the bound of what is left.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from recollect._knapsack import Chain, Found, Options
from recollect._problem import Problem, peak

Relaxed = Callable[[Options], Found | None]


def least_seconds(problem: Problem, options: Options, budget: int, *, enough: float | None = None) -> Found | None:
    """As `Chain.solve`, with ties."""
    if not problem.tied:
        return Chain(problem, options).solve(budget, enough=enough)

    def relaxed(some: Options) -> Found | None:
        return Chain(problem, some).solve(budget, quick=True)

    known = None
    smallest = least_peak(problem, options)
    if smallest.seconds <= budget:
        fixed = options
        for group in problem.tied:
            fixed = _with(fixed, group, smallest.chosen[group[0]])
        known = Chain(problem, fixed).solve(budget)
    size = sum(map(len, options))
    return _search(problem, options, relaxed, known, max(20, 20_000 // size), enough)


def least_peak(problem: Problem, options: Options) -> Found:
    """As `Chain.least_peak`, with ties; bytes stand where seconds would."""

    def relaxed(some: Options) -> Found:
        least, chosen = Chain(problem, some).least_peak()
        return Found(chosen, least, least)

    found = _search(problem, options, relaxed, None, max(100, 400_000 // max(1, sum(map(len, options)))), None)
    assert found is not None
    return found._replace(seconds=peak(problem, found.chosen)[0])


def common(problem: Problem, options: Options) -> Options:
    """Of tied blocks only what all of them may take."""
    for group in problem.tied:
        both = set.intersection(*(set(options[i]) for i in group))
        options = [sorted(both) if i in group else some for i, some in enumerate(options)]
    return options


def _search(
    problem: Problem, options: Options, relaxed: Relaxed, known: Found | None, limit: int, enough: float | None
) -> Found | None:
    counter = itertools.count()
    queue: list[tuple[float, int, Options, Found]] = []
    best, left_out = known, math.inf

    def add(some: Options) -> Found | None:
        nonlocal best, left_out
        found = relaxed(some)
        if found is None or (best is not None and found.bound >= best.seconds):
            return found
        if _broken(problem, found) is not None:
            heapq.heappush(queue, (found.bound, next(counter), some, found))
            return found
        left_out = min(left_out, found.bound)
        if best is None or found.seconds < best.seconds:
            best = found
        return found

    def branches(some: Options, found: Found) -> list[Options]:
        group = _broken(problem, found)
        assert group is not None
        return [_with(some, group, k) for k in some[group[0]]]

    root = add(options)
    if root is None:
        return None
    if best is None:  # straight down once, so that there is something to compare with
        some, found = options, root
        while _broken(problem, found) is not None:
            tried = [(branch, relaxed(branch)) for branch in branches(some, found)]
            fits = [(branch, answer) for branch, answer in tried if answer is not None]
            if not fits:
                break
            some, found = min(fits, key=lambda pair: pair[1].bound)
        else:
            best = found
    while queue and limit > 0:
        bound, _, some, found = heapq.heappop(queue)
        if best is not None:
            if bound >= best.seconds:
                break
            if enough is not None and (best.seconds <= enough or min(bound, left_out) > enough):
                heapq.heappush(queue, (bound, next(counter), some, found))
                break
        for branch in branches(some, found):
            add(branch)
            limit -= 1
    if best is None:
        return None
    return best._replace(bound=min(best.seconds, left_out, queue[0][0] if queue else math.inf))


def _broken(problem: Problem, found: Found) -> tuple[int, ...] | None:
    return next((group for group in problem.tied if len({found.chosen[i] for i in group}) > 1), None)


def _with(options: Options, group: tuple[int, ...], k: int) -> Options:
    return [[k] if i in group else some for i, some in enumerate(options)]
