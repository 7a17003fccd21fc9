"""H-Revolve: against a search over every schedule there is, and against its own formula, for two and three tiers."""

import heapq
import itertools
import time
from functools import lru_cache
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recollect._schedules import hrevolve as module
from recollect.schedules import ScheduleError, extra_forwards, hrevolve, revolve
from tools import patience

NAMES = ("device", "cpu", "disk")


def made(length, tiers, forward=1):
    """From (slots, write, read) per tier."""
    names = NAMES[: len(tiers)]
    return hrevolve(
        length,
        {name: tier[0] for name, tier in zip(names, tiers, strict=True)},
        write={name: tier[1] for name, tier in zip(names, tiers, strict=True)},
        read={name: tier[2] for name, tier in zip(names, tiers, strict=True)},
        forward=forward,
    )


def best_of_all(length, tiers):
    """The least cost of any schedule of any form, by Dijkstra's algorithm over what is kept and what is running."""
    number = itertools.count()
    queue = [(0, next(number), (length, 0, tuple(frozenset() for _ in tiers)))]
    done = set()
    while queue:
        cost, _, where = heapq.heappop(queue)
        if where in done:
            continue
        done.add(where)
        left, running, kept = where
        if not left:
            return cost
        following = []
        if running == left - 1:
            rest = tuple(states - {left - 1} for states in kept)
            following.append((0, (left - 1, None, rest)))
        elif running is not None:
            following.append((1, (left, running + 1, kept)))
        for k, (slots, write, read) in enumerate(tiers):
            following += [(read, (left, state, kept)) for state in kept[k] if state != running]
            if running is not None and running not in kept[k]:
                # Into a free slot, or into that of any other state.
                gone = [None] if len(kept[k]) < slots else kept[k]
                for other in gone:
                    states = (kept[k] - {other}) | {running}
                    following.append((write, (left, running, (*kept[:k], states, *kept[k + 1 :]))))
        for more, there in following:
            if there not in done:
                heapq.heappush(queue, (cost + more, next(number), there))
    return None


def rising(random, tiers, most_slots=3):
    """Tiers that take no less than those before them, neither to write nor to read."""
    write = read = 0
    for _ in range(tiers):
        write, read = write + random.choice([0, 0, 1, 2, 3, 0.5]), read + random.choice([0, 0, 1, 2, 3, 0.5])
        yield random.randint(1, most_slots), write, read


@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_schedule_of_any_form_is_better(number):
    random = Random(number)
    for _ in range(120 if number < 3 else 40):
        tiers = list(rising(random, number, most_slots=3 if number < 3 else 2))
        length = random.randint(1, 8 if number < 3 else 7)
        counts = made(length, tiers).check()
        assert counts.cost == best_of_all(length, tiers), (length, tiers)


def by_formula(length, tiers, forward=1):
    """The recursion of the paper, as it stands."""

    @lru_cache(None)
    def kept(k, n, m):
        if n == 1:
            return 0
        read = tiers[k][2]
        best = alone(k - 1, n, tiers[k - 1][0]) if k else inf
        for j in range(1, n) if m else ():
            best = min(best, j * forward + alone(k, n - j, m - 1) + read + kept(k, j, m))
        return best

    @lru_cache(None)
    def alone(k, n, m):
        if n == 1:
            return 0
        best = alone(k - 1, n, tiers[k - 1][0]) if k else inf
        return min(best, tiers[k][1] + kept(k, n, m)) if m else best

    return alone(len(tiers) - 1, length, tiers[-1][0])


NUMBERS = st.sampled_from([0, 0, 0.25, 1, 2, 3.5, 10, 50])
TIERS = st.lists(st.tuples(st.integers(1, 6), NUMBERS, NUMBERS), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), TIERS, st.sampled_from([1, 0.1, 3]))
def test_any_tiers_at_any_cost_take_what_the_formula_says_and_are_legal(length, tiers, forward):
    schedule = made(length, tiers, forward)
    counts = schedule.check()
    assert counts.cost == pytest.approx(by_formula(length, tiers, forward), rel=1e-9, abs=1e-9)
    assert all(peak <= tier[0] for peak, tier in zip(counts.peaks, tiers, strict=True))


def test_one_tier_for_nothing_is_revolve():
    for length, slots in [(1, 1), (2, 5), (30, 3), (100, 7)]:
        assert made(length, [(slots, 0, 0)]).cost() == extra_forwards(length, slots)
    assert list(made(50, [(4, 0, 0)])) == list(revolve(50, 4))


def test_a_tier_that_costs_nothing_is_as_good_as_more_slots():
    assert made(60, [(3, 0, 0), (4, 0, 0)]).cost() == extra_forwards(60, 7)


def test_a_tier_that_costs_too_much_is_left_alone():
    schedule = made(60, [(3, 0, 0), (40, 1e6, 1e6)])
    assert schedule.cost() == extra_forwards(60, 3)
    assert (schedule.peak("device"), schedule.peak("cpu")) == (3, 0)


def test_more_slots_and_cheaper_copies_never_cost_more():
    costs = [made(80, [(3, 0, 0), (slots, 2, 2)]).cost() for slots in range(1, 30)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]
    costs = [made(80, [(3, 0, 0), (5, copy / 4, copy / 2)]).cost() for copy in range(30)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_costs_scale_with_their_unit():
    one = made(70, [(3, 0.5, 0.25), (8, 2, 3)])
    thousandth = made(70, [(3, 0.0005, 0.00025), (8, 0.002, 0.003)], forward=0.001)
    assert thousandth.cost() == pytest.approx(one.cost() / 1000)


# --- Long ones ---

DEFAULT = [(10, 0, 0), (100, 1, 1), (1000, 10, 10)]


def test_thousands_of_steps_take_seconds():
    def timed():
        begin = time.process_time()
        schedule = made(2000, DEFAULT)
        return time.process_time() - begin, schedule

    seconds, schedule = min((timed() for _ in range(2)), key=lambda pair: pair[0])
    assert seconds < patience(8)
    assert schedule.name == "hrevolve"  # exact
    counts = schedule.check()
    # Between what as many slots would take for nothing, and what the first tier takes alone.
    assert extra_forwards(2000, 1110) < counts.cost < extra_forwards(2000, 10)
    assert all(peak <= slots for peak, (slots, _, _) in zip(counts.peaks, DEFAULT, strict=True))


def test_beyond_that_slower_tiers_are_cut_at_multiples():
    schedule = made(20_000, DEFAULT)
    assert schedule.name.startswith("hrevolve (slower tiers cut at multiples of ")
    counts = schedule.check()
    assert all(peak <= slots for peak, (slots, _, _) in zip(counts.peaks, DEFAULT, strict=True))
    assert counts.cost < extra_forwards(20_000, 10) / 1.5
    assert max(map(len, str(schedule).splitlines())) <= 79


@pytest.mark.parametrize("length", [60, 61, 67, 71, 72])
@pytest.mark.parametrize("blocks", [5, 9, 20])
def test_multiples_are_legal_and_not_far_from_the_best(monkeypatch, length, blocks):
    tiers = [(4, 0, 0), (5, 1, 1), (8, 3, 2)]
    best = made(length, tiers).cost()
    monkeypatch.setattr(module, "_BLOCKS", blocks)
    coarse = made(length, tiers)
    assert coarse.name != "hrevolve"
    counts = coarse.check()
    assert best <= counts.cost <= best * 1.25
    assert all(peak <= tier[0] for peak, tier in zip(counts.peaks, tiers, strict=True))


def test_work_that_would_take_too_long_is_made_less(monkeypatch):
    tiers = [(2, 0, 0), (40, 0.1, 0.1)]
    assert made(300, tiers).name == "hrevolve"
    monkeypatch.setattr(module, "_WORK", 1000)
    coarse = made(300, tiers)
    assert "multiples of" in coarse.name
    coarse.check()


def test_too_many_slots_that_take_time_in_the_fastest_tier_are_refused():
    with pytest.raises(ScheduleError, match=r"fewer slots in the fastest .* at most 100 for 100000 steps, got 101"):
        made(100_000, [(101, 0.1, 0), (5, 1, 1)])


def test_a_hundred_thousand_steps():
    counts = made(100_000, [(20, 0, 0), (50, 1, 1)]).check()
    assert extra_forwards(100_000, 70) < counts.cost < extra_forwards(100_000, 20)
