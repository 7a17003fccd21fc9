"""Revolve: as few extra forwards as the formula says and as a search finds, at any length, without recursion."""

import inspect
import sys
import time
import tracemalloc
from collections import Counter, deque
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect.schedules import Backward, Forward, Keep, extra_forwards, revolve
from tools import patience


def by_formula(length, slots):
    r = next(r for r in range(length + 1) if comb(slots + r, slots) >= length)
    return r * length - comb(slots + r, r - 1) if r else 0


def by_search(longest, most):
    """The fewest forwards without a graph, for all lengths and slots: every first place to keep a state is tried."""
    table = {(length, 1): length * (length - 1) // 2 for length in range(1, longest + 1)}
    for slots in range(2, most + 1):
        table[1, slots] = 0
        for length in range(2, longest + 1):
            # From state 0 to j, which is kept or, for the last step alone, need not be; the right part; the left one.
            table[length, slots] = min(j + table[length - j, slots - 1] + table[j, slots] for j in range(1, length))
    return table


@pytest.mark.parametrize("slots", range(1, 13))
def test_extra_forwards_are_those_of_the_formula(slots):
    for length in range(1, 201):
        counts = revolve(length, slots).check()
        assert counts.extra == counts.cost == by_formula(length, slots) == extra_forwards(length, slots)
        assert counts.peaks[0] <= slots


def test_no_other_choice_of_states_takes_fewer():
    table = by_search(200, 12)
    assert all(extra_forwards(*sizes) == found for sizes, found in table.items())
    assert len(table) == 200 * 12


def test_a_thousand_steps_with_ten_slots():
    assert revolve(1000, 10).cost() == 3636


@given(st.integers(1, 400), st.integers(1, 500))
def test_any_length_with_any_slots_is_legal(length, slots):
    counts = revolve(length, slots).check()
    assert counts.extra == by_formula(length, slots)
    assert counts.peaks[0] <= min(slots, max(1, length - 1))
    assert counts.restores[0] == length - 1


@pytest.mark.parametrize(("length", "slots"), [(13, 2), (50, 3), (66, 10), (67, 10), (200, 5)])
def test_no_step_is_run_more_often_than_it_has_to_be(length, slots):
    runs = Counter()
    for action in revolve(length, slots):
        if isinstance(action, Forward):
            runs.update(range(action.start, action.stop))
        elif isinstance(action, Backward) and action.step != length - 1:
            runs[action.step] += 1
    r = next(r for r in range(length) if comb(slots + r, slots) >= length)
    assert max(runs.values()) == r + 1
    assert len(runs) == length


def fewest_keeps(longest, slots):
    """Of the schedules with the fewest extra forwards, the fewest states that are written on the way."""
    best = {}
    for c in range(slots + 1):
        best[1, c] = 0
        for length in range(2, longest + 1) if c else ():
            best[length, c] = min(
                (length - j > 1) + best[length - j, c - 1] + best[j, c]
                for j in range(1, length)
                if (length - j == 1 or c > 1)
                and j + by_formula(length - j, max(c - 1, 1)) + by_formula(j, c) == by_formula(length, c)
            )
    return best


def test_it_keeps_no_more_states_on_the_way_than_needed():
    best = fewest_keeps(60, 6)
    for length in range(8, 61):
        for slots in range(1, 7):
            assert revolve(length, slots).check().keeps == (1 + best[length, slots],), (length, slots)


def test_the_forward_comes_first_and_ends_with_the_graph_of_the_last_step():
    actions = list(revolve(100, 5))
    ends = actions.index(Forward(99, 100, graph=True))
    assert actions[ends + 1] == Backward(99)
    assert actions[0] == Keep(0)
    assert sum(isinstance(action, Keep) for action in actions[:ends]) == 5
    assert not any(action.graph for action in actions[:ends] if isinstance(action, Forward))
    assert not any(action.graph for action in actions[ends + 1 :] if isinstance(action, Forward))


# --- Long ones ---


def test_a_long_schedule_is_made_while_it_is_read():
    begin = time.process_time()
    assert next(iter(revolve(10_000_000, 50))) == Keep(0)
    assert time.process_time() - begin < patience(0.1)
    tracemalloc.start()
    try:
        deque(revolve(20_000, 20), maxlen=0)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_it_takes_no_recursion():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 40)
    try:
        counts = revolve(100_000, 20).check()
    finally:
        sys.setrecursionlimit(limit)
    assert counts.extra == by_formula(100_000, 20) == 534_220
    assert counts.peaks == (20,)


def test_an_action_takes_a_microsecond_or_two():
    best = min(timed(revolve(100_000, 20)) for _ in range(3))
    assert best < patience(4e-6)


def timed(schedule):
    begin = time.process_time()
    number = sum(1 for _ in schedule)
    return (time.process_time() - begin) / number
