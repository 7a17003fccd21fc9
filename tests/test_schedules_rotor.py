"""Rotor: against a search over every persistent schedule there is, within its budget, and quick."""

import heapq
import itertools
import time
from functools import lru_cache
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recollect.schedules import Backward, Chain, Drop, Forward, Keep, Restore, ScheduleError, revolve, rotor
from tools import patience


def best_of_all(chain, budget):
    """The least extra time over all persistent schedules, by Dijkstra's algorithm over what is in memory; or None.

    Persistent: a state or a graph that is kept stays until its step is differentiated, and that happens as soon as its
    turn has come and its graph is there. Written from the meaning of the actions; it knows nothing of pieces.
    """
    n = chain.length
    sizes = [chain.input_bytes, *chain.output_bytes]

    def at_rest(left, running, kept, graphs):
        alive = kept | graphs | ({running} if running is not None else set())
        states = sum(sizes[state] for state in alive if state - 1 not in graphs)
        gradient = chain.gradient_bytes[left - 1] if left else 0
        return states + gradient + sum(chain.saved_bytes[step] for step in graphs)

    start = (n, 0, frozenset(), frozenset())
    number = itertools.count()
    queue = [(0, next(number), start)]
    done = set()
    while queue:
        cost, _, where = heapq.heappop(queue)
        if where in done:
            continue
        done.add(where)
        left, running, kept, graphs = where
        if not left:
            return cost
        free = budget - at_rest(*where)
        if free < 0:
            continue
        following = []
        if left - 1 in graphs:
            if chain.backward_temporary_bytes[left - 1] <= free:
                following.append((0, (left - 1, None, kept - {left - 1}, graphs - {left - 1})))
        elif running is not None and running < left:
            saved, output = chain.saved_bytes[running], chain.output_bytes[running]
            temporary = chain.forward_temporary_bytes[running]
            following.append((0, (left, running, kept | {running}, graphs)))
            if running < left - 1 and output + temporary <= free:
                following.append((chain.forward_times[running], (left, running + 1, kept, graphs)))
            if running not in graphs and saved + temporary <= free:
                following.append((0, (left, running + 1, kept, graphs | {running})))
        if left - 1 not in graphs:
            following += [(0, (left, state, kept, graphs)) for state in kept]
        for more, there in following:
            if there not in done:
                heapq.heappush(queue, (cost + more, next(number), there))
    return None


def agrees(chain, budget):
    expected = best_of_all(chain, budget)
    if expected is None:
        with pytest.raises(ScheduleError, match="budget must be at least") as caught:
            rotor(chain, budget)
        assert caught.value.minimum > budget
        return
    counts = rotor(chain, budget).check()
    assert counts.cost == expected
    assert counts.bytes <= budget


def chain_of(steps, input_bytes=1):
    """From (time, output, on top of it saved, gradient, temporary forward, temporary backward) per step."""
    times, outputs, more, gradients, forward, backward = zip(*steps, strict=True)
    return Chain(
        forward_times=times,
        backward_times=times,
        output_bytes=outputs,
        saved_bytes=[output + on_top for output, on_top in zip(outputs, more, strict=True)],
        gradient_bytes=gradients,
        forward_temporary_bytes=forward,
        backward_temporary_bytes=backward,
        input_bytes=input_bytes,
    )


def budgets(chain):
    everything = chain.input_bytes + sum(chain.saved_bytes) + max(chain.gradient_bytes)
    return range(everything + max(chain.forward_temporary_bytes + chain.backward_temporary_bytes) + 1)


# --- Against everything that could be done ---

TIMES, OUTPUTS, MORE, GRADIENTS, TEMPORARIES = (1, 3), (0, 1, 2), (0, 1, 3), (1, 2), (0, 2)


def test_every_chain_of_one_or_two_steps_with_small_sizes():
    kinds = list(itertools.product((1,), OUTPUTS, MORE, GRADIENTS, TEMPORARIES, TEMPORARIES))
    number = 0
    for length in (1, 2):
        for steps in itertools.product(kinds, repeat=length):
            chain = chain_of(steps)
            # At the least, at all there is to hold, and between.
            for budget in {*list(budgets(chain))[::3], budgets(chain)[-1]}:
                agrees(chain, budget)
                number += 1
    assert number > 10_000


def test_every_chain_of_three_steps_with_small_sizes():
    kinds = list(itertools.product(TIMES, (1, 2), (0, 2), (1,), (0,), (0,)))
    for steps in itertools.product(kinds, repeat=3):
        chain = chain_of(steps)
        for budget in budgets(chain):
            agrees(chain, budget)


SIZES = st.integers(0, 3)
STEPS = st.tuples(st.integers(0, 4), SIZES, st.integers(0, 4), SIZES, SIZES, SIZES)


@settings(max_examples=80, deadline=None)
@given(st.lists(STEPS, min_size=4, max_size=7), st.integers(0, 2), st.data())
def test_chains_of_up_to_seven_steps(steps, input_bytes, data):
    chain = chain_of(steps, input_bytes)
    agrees(chain, data.draw(st.sampled_from(budgets(chain))))


def test_chains_of_seven_steps_at_every_budget():
    random = Random(7)
    for _ in range(2):
        chain = chain_of([(random.randint(1, 4), *(random.randint(0, 3) for _ in range(5))) for _ in range(7)])
        for budget in budgets(chain):
            agrees(chain, budget)


# --- Within the budget ---


def different_steps(length, seed, unit=1_000_003):
    """Steps that have nothing in common, least of all a divisor."""
    random = Random(seed)
    outputs = [random.randint(unit, 8 * unit) for _ in range(length)]
    return Chain(
        forward_times=[random.uniform(1, 10) for _ in range(length)],
        backward_times=[random.uniform(2, 20) for _ in range(length)],
        output_bytes=outputs,
        saved_bytes=[int(output * random.uniform(1.2, 6)) for output in outputs],
        forward_temporary_bytes=[random.randint(0, unit) for _ in range(length)],
        backward_temporary_bytes=[random.randint(0, 9 * unit) for _ in range(length)],
        input_bytes=random.randint(1, unit),
    )


def minimum_of(chain):
    with pytest.raises(ScheduleError, match="budget must be at least") as caught:
        rotor(chain, 0)
    assert str(caught.value.minimum) in str(caught.value)
    return caught.value.minimum


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6), st.integers(1, 40), st.floats(0, 1))
def test_no_budget_is_exceeded_however_sizes_are_rounded(length, seed, levels, part):
    chain = different_steps(length, seed)
    least = minimum_of(chain)
    most = chain.input_bytes + sum(chain.saved_bytes) + max(chain.gradient_bytes)
    budget = int(least + part * max(0, most - least))
    schedule = rotor(chain, budget, levels=levels)
    assert schedule.peak() <= budget
    assert schedule.check().bytes == schedule.peak()


@pytest.mark.parametrize("levels", [1, 2, 7, 500])
def test_the_minimum_is_exact_and_enough(levels):
    for seed in range(20):
        chain = different_steps(9, seed)
        least = minimum_of(chain)
        assert rotor(chain, least, levels=levels).peak() == least
        with pytest.raises(ScheduleError, match=f"at least {least} bytes for this chain, got {least - 1}"):
            rotor(chain, least - 1, levels=levels)


def with_sizes_rounded_upwards(chain, budget, levels):
    """The usual program over whole levels: how much extra time it finds, or infinity."""
    unit = -(-budget // levels)

    def up(sizes):
        return [-(-size // unit) for size in sizes]

    a, saved, gradient = up(chain.output_bytes), up(chain.saved_bytes), up(chain.gradient_bytes)
    forward, backward = up(chain.forward_temporary_bytes), up(chain.backward_temporary_bytes)

    @lru_cache(None)
    def extra(s, t, m):
        if m < 0:
            return inf
        hold = saved[s] + max(gradient[t] + forward[s], gradient[s] + backward[s])
        if s == t:
            return 0 if m >= hold else inf
        best = extra(s + 1, t, m - saved[s]) if m >= hold else inf
        sweep = before = 0
        for cut in range(s + 1, t + 1):
            sweep, before = max(sweep, before + a[cut - 1] + forward[cut - 1]), a[cut - 1]
            if sweep + gradient[t] <= m:
                time = sum(chain.forward_times[s:cut])
                best = min(best, time + extra(cut, t, m - a[cut - 1]) + extra(s, cut - 1, m))
        return best

    return extra(0, chain.length - 1, budget // unit - up([chain.input_bytes])[0])


def test_it_is_never_worse_than_with_sizes_rounded_upwards():
    better = 0
    for seed in range(12):
        chain = different_steps(12, seed)
        for part in (0.3, 0.5, 0.8):
            budget = max(minimum_of(chain), int(sum(chain.saved_bytes) * part))
            usual = with_sizes_rounded_upwards(chain, budget, 60)
            ours = rotor(chain, budget, levels=60).cost()
            assert ours <= usual + 1e-9
            better += ours < usual - 1e-9
    assert better > 10


def test_more_memory_never_takes_longer():
    chain = different_steps(20, 5)
    least = minimum_of(chain)
    costs = [rotor(chain, budget).cost() for budget in range(least, 2 * sum(chain.saved_bytes), 10**7)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0


def test_with_enough_memory_nothing_is_run_again():
    chain = different_steps(30, 2)
    schedule = rotor(chain, 10**10)
    assert [action for action in schedule if isinstance(action, (Keep, Restore, Drop))] == []
    assert list(schedule)[:30] == [Forward(step, step + 1, graph=True) for step in range(30)]
    assert list(schedule)[30:] == [Backward(step) for step in reversed(range(30))]


def test_where_graphs_do_not_fit_equal_steps_go_as_with_revolve():
    # A state is one byte, a graph too many; the gradient and the step that is differentiated take the same always.
    for length, slots in [(10, 3), (20, 4), (35, 4), (40, 2)]:
        chain = Chain(
            forward_times=[1] * length,
            backward_times=[1] * length,
            output_bytes=[1] * length,
            saved_bytes=[1000] * length,
            input_bytes=1,
        )
        # Besides the slots: the state that the differentiated step starts from, which is in no slot.
        budget = slots + 1 + 1000 + 1
        assert rotor(chain, budget, levels=5000).cost() == revolve(length, slots).cost()


def test_sizes_of_nothing():
    chain = Chain(forward_times=[1, 1, 1], backward_times=[1, 1, 1], output_bytes=[0] * 3, saved_bytes=[0] * 3)
    assert rotor(chain, 0).cost() == 0


# --- How long it takes ---


def timed(chain, budget):
    begin = time.process_time()
    schedule = rotor(chain, budget)
    return time.process_time() - begin, schedule


@pytest.mark.parametrize("part", [0.15, 0.5])
def test_a_hundred_different_steps_take_seconds(part):
    chain = different_steps(100, 1)
    budget = int(sum(chain.saved_bytes) * part)
    seconds, schedule = timed(chain, budget)
    assert seconds < patience(4)
    assert schedule.peak() <= budget


def equal_steps(length):
    numbers = {"output_bytes": 1_000_003, "saved_bytes": 4_130_001, "forward_times": 1, "backward_times": 2}
    return Chain(**{name: [number] * length for name, number in numbers.items()})


def test_equal_steps_are_planned_at_once():
    seconds, schedule = timed(equal_steps(200), 100 * 4_130_001)
    assert seconds < patience(1)
    assert schedule.peak() <= 100 * 4_130_001


def test_too_many_different_steps_are_refused_at_the_door():
    begin = time.process_time()
    with pytest.raises(ScheduleError, match=r"must be shorter, .*: 400 steps with 500 levels take too much memory"):
        rotor(different_steps(400, 1), 10**9)
    with pytest.raises(ScheduleError, match=r"must be shorter, .* where all are alike, use revolve"):
        rotor(equal_steps(100_000), 10**9)
    assert time.process_time() - begin < patience(2)
