"""The online schedule: as good as Revolve as long as that is possible, and never more repetitions than needed."""

import time
from collections import Counter
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect.schedules import Backward, Drop, Forward, Keep, Restore, ScheduleError, extra_forwards, online
from tools import patience


def repetitions(length, slots):
    """The least number r such that no step has to be run again more than r times: with C(slots + r, r) >= length."""
    return next(r for r in range(length + 1) if comb(slots + r, slots) >= length)


@pytest.mark.parametrize("slots", range(1, 13))
def test_it_is_as_good_as_the_best_with_the_length_known_while_that_is_possible(slots):
    last = (slots + 1) * (slots + 2) // 2
    for length in range(1, last + 1):
        counts = online(slots).schedule(length).check()
        assert counts.extra == extra_forwards(length, slots)
        assert counts.peaks[0] <= slots


@pytest.mark.parametrize("slots", [2, 3, 4, 6, 9])
def test_no_step_is_run_again_more_often_than_it_has_to_be_at_any_length(slots):
    # The bound of Wang, Moin and Iaccarino: the least possible number of repetitions, whenever the chain ends.
    for length in [*range(1, 100), *range(100, 700, 23)]:
        again = Counter()
        for action in online(slots).schedule(length):
            if isinstance(action, Forward) and not action.graph:
                again.update(range(action.start, action.stop))
        assert max(again.values(), default=0) <= repetitions(length, slots), length


@pytest.mark.parametrize(("slots", "most"), [(2, 0.13), (3, 0.10), (5, 0.051), (8, 0.02), (12, 0.01), (20, 0.005)])
def test_beyond_it_stays_close_to_the_best(slots, most):
    for length in [*range(2, 400, 3), *range(400, 4000, 173)]:
        if slots == 2 and length > 1000:
            break
        best = extra_forwards(length, slots)
        assert best <= online(slots).schedule(length).check().extra <= best * (1 + most)


@given(st.integers(1, 500), st.integers(1, 60))
def test_any_length_with_any_slots_is_legal(length, slots):
    counts = online(slots).schedule(length).check()
    assert counts.peaks[0] <= slots
    assert extra_forwards(length, slots) <= counts.extra <= repetitions(length, slots) * length


# --- Driven step by step ---


def driven(schedule, length):
    """As an executor does it: nothing is known of the end but whether there is another step."""
    kept, runs, actions = set(), 0, []
    for state in range(length):
        for action in schedule.decide(state):
            actions.append(action)
            if isinstance(action, Keep):
                assert action.state == state - 1  # which is at hand
                kept.add(action.state)
            else:
                assert isinstance(action, Drop)
                kept.remove(action.state)
            assert len(kept) <= schedule.slots
        runs += 1
    assert runs == length
    return kept, actions


@pytest.mark.parametrize(("length", "slots"), [(1, 1), (2, 1), (3, 2), (30, 1), (30, 4), (200, 5), (66, 10), (500, 7)])
def test_driving_it_gives_the_same_as_knowing_the_length(length, slots):
    schedule = online(slots)
    kept, before = driven(schedule, length)
    rest = list(schedule.rest(length))
    assert rest[0] == Backward(length - 1)
    whole = list(schedule.schedule(length))
    ends = whole.index(Forward(length - 1, length, graph=True))
    assert [action for action in whole[:ends] if not isinstance(action, Forward)] == before
    assert whole[ends + 1 :] == rest
    # What is kept when the end shows is what the rest starts from, the last one first.
    first_restores = [action.state for action in rest if isinstance(action, Restore) and action.state in kept]
    assert list(dict.fromkeys(first_restores)) == sorted(kept, reverse=True)


def test_what_is_decided_does_not_depend_on_what_comes_after():
    longer, shorter = online(4), online(4)
    decided = [longer.decide(state) for state in range(300)]
    for length in (1, 2, 17, 150):
        assert [shorter.decide(state) for state in range(length)] == decided[:length]
        list(shorter.rest(length))


def test_it_starts_anew_with_state_0():
    schedule = online(3)
    first = driven(schedule, 40)
    assert driven(schedule, 40) == first


def test_states_come_in_order():
    schedule = online(3)
    schedule.decide(0)
    schedule.decide(1)
    with pytest.raises(ScheduleError, match="state must be the next one, 2, or 0 for a new chain, got 3"):
        schedule.decide(3)
    with pytest.raises(ScheduleError, match="2 steps, got 3"):
        schedule.rest(3)
    assert list(schedule.rest(2)) == [Backward(1), Restore(0), Drop(0), Backward(0)]


def test_deciding_is_quick():
    def timed(slots):
        schedule = online(slots)
        begin = time.process_time()
        for state in range(50_000):
            schedule.decide(state)
        return (time.process_time() - begin) / 50_000

    for slots in (20, 1000):
        assert min(timed(slots) for _ in range(3)) < patience(10e-6)
