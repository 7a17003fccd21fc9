"""The solver against every answer there is, against what people do by hand, and with and without scipy."""

import itertools
import math
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from recollect import _knapsack, _milp, _solver
from recollect._errors import describe_amount
from recollect._problem import NEVER, is_allowed, solution, switches, without_offloading
from recollect._solver import Block, Choice, InfeasibleError, Link, Moment, Problem, frontier, peak, smallest, solve

GIB = 2**30


# --- Every answer there is ---


def every_answer(problem):
    """(peak, seconds) of every choice that is allowed, from the definitions and nothing of the solver's."""
    blocks = problem.blocks
    for chosen in itertools.product(*(range(len(block.choices)) for block in blocks)):
        if any(len({chosen[i] for i in group}) > 1 for group in problem.tied):
            continue
        picked = [block.choices[k] for block, k in zip(blocks, chosen, strict=True)]
        if problem.host_bytes is not None and sum(c.out for c in picked) > problem.host_bytes:
            continue
        kept = [0, *itertools.accumulate(c.kept for c in picked)]
        pairs = list(zip(blocks, picked, strict=True))
        link, count = problem.link or Link(1.0, 1.0), len(blocks)

        def late(i, end, per, pairs=pairs):
            """Of blocks i to end - 1, one after the other: what the time after each of them did not suffice for."""
            worst = 0.0
            for first in range(i, end):
                sent = sum(c.out for _, c in pairs[first:end])
                worst = max(worst, sent - sum(per(b, c) for b, c in pairs[first + 1 : end]))
            return worst

        def goes(b, c, link=link):
            return link.out * b.forward_seconds

        def comes(b, c, link=link):
            return link.back * (b.backward_seconds + c.seconds)

        if link.in_flight is not None and any(
            late(0, i, per) - per(*pairs[i]) > link.in_flight + 1e-6 for i in range(count) for per in (goes, comes)
        ):
            continue
        moments = []
        for i, (b, c) in enumerate(pairs):
            passed = link.out * sum(b.backward_seconds + c.seconds for b, c in pairs[i + 1 :])
            early = late(0, i - 1, comes) + pairs[i - 1][1].out if i else 0
            there = max(0, early, late(0, count, goes) - passed - c.out)
            moments.append(kept[i] + b.base_forward + c.forward + late(0, i, goes))
            moments.append(kept[i] + b.base_backward + c.backward + there)
        for moment in problem.moments:
            there = late(0, moment.after, goes)
            if moment.after == count:
                there = max(there, late(0, count, comes))
            moments.append(kept[moment.after] + moment.bytes + there)
        yield max(0, *(math.ceil(bytes_ - 1e-6) for bytes_ in moments)), sum(c.seconds for c in picked)


def least_seconds(answers, budget):
    return min((seconds for bytes_, seconds in answers if bytes_ <= budget), default=None)


@st.composite
def problems(draw, most=2000, offloading=False, ties=False, unit=1):
    """Small problems; sometimes all blocks are of one kind."""
    amounts = st.integers(0, 12).map(lambda n: n * unit)
    # Less than nothing where a step lets go of what a block holds before its backward.
    there = st.integers(draw(st.sampled_from([0, 0, -9])), 12).map(lambda n: n * unit)

    def choices():
        return draw(
            st.lists(
                st.builds(
                    Choice,
                    seconds=st.integers(0, 9).map(float),
                    kept=amounts,
                    forward=amounts,
                    backward=amounts,
                    out=st.sampled_from([0, 0, unit, 3 * unit, 7 * unit]) if offloading else st.just(0),
                ),
                min_size=1,
                max_size=4,
            ).map(lambda found: (*found, replace(found[0], out=0)) if all(c.out for c in found) else tuple(found))
        )

    count = draw(st.integers(1, 8))
    alike = draw(st.booleans())
    falls, rises = draw(st.integers(-2, 2)) * unit, draw(st.integers(-2, 2)) * unit
    blocks, shared, total = [], choices(), 1
    for i in range(count):
        own = shared if alike else choices()
        total *= len(own)
        if total > most:
            break
        same = alike and draw(st.integers(0, 5)) > 0
        base = (3 * unit + i * rises, (20 - i) * falls) if same else (draw(there), draw(there))
        times = (1.0, 2.0) if same else (float(draw(st.integers(0, 3))), float(draw(st.integers(0, 3))))
        blocks.append(Block(own, *base, *times, name=f"layers.{i}", kind=0 if alike else None))
    moments = draw(st.lists(st.builds(Moment, bytes=there, after=st.integers(0, len(blocks))), max_size=2))
    tied = []
    if ties:
        places = draw(st.permutations(range(len(blocks))))
        for group in (places[:2], places[2:5]):
            lengths = {len(blocks[i].choices) for i in group}
            free = [{k for k, c in enumerate(blocks[i].choices) if not c.out} for i in group]
            if len(group) > 1 and len(lengths) == 1 and set.intersection(*free):
                tied.append(tuple(group))
    link = None
    if offloading:
        out, back = (draw(st.integers(1, 4)) * float(unit) for _ in range(2))
        link = Link(out, back, draw(st.none() | amounts))
    host = draw(st.none() | amounts) if offloading else None
    return Problem(tuple(blocks), tuple(moments), tuple(tied), link, host)


def check(problem, answers, budget, found, slack=0.0):
    best = least_seconds(answers, budget)
    assert best is not None
    assert found.peak == peak(problem, found.chosen)[0] <= budget
    assert is_allowed(problem, found.chosen)
    assert found.seconds == pytest.approx(solution(problem, found.chosen, 0.0).seconds)
    assert found.seconds >= best - 1e-6
    if slack is not None:
        assert found.seconds <= best * (1 + slack) + 1e-6
    assert 0 <= found.gap <= 1
    assert found.seconds * (1 - found.gap) <= best + 1e-6, "the gap says too little"
    if best and found.seconds > best * (1 + 1e-6):
        assert found.gap > 0


def check_all(problem, slack=0.0):
    answers = list(every_answer(problem))
    peaks = sorted({bytes_ for bytes_, _ in answers})
    for budget in {peaks[0], peaks[len(peaks) // 3], peaks[len(peaks) // 2], peaks[-1]}:
        check(problem, answers, budget, solve(problem, budget), slack)
    if peaks[0] > 0:
        with pytest.raises(InfeasibleError) as caught:
            solve(problem, peaks[0] - 1)
        assert caught.value.smallest == peaks[0]
    least = smallest(problem)
    assert least.peak == peaks[0]
    check(problem, answers, peaks[0], least, slack)
    fast = _solver.fastest(problem)
    fewest = min(seconds for _, seconds in answers)
    assert fast.seconds == pytest.approx(fewest, rel=slack, abs=1e-6)
    return answers, fast


WITHOUT_HASTE = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


@WITHOUT_HASTE
@given(problem=problems(most=5000))
def test_a_chain_is_solved_as_trying_everything_does(problem):
    answers, fast = check_all(problem)
    assert fast.peak == min(bytes_ for bytes_, seconds in answers if seconds <= fast.seconds)


def test_blocks_may_keep_more_than_the_budget_where_a_step_lets_go_of_some_of_it():
    keep, recompute = Choice(0.0, kept=8, forward=8, backward=8), Choice(1.0, kept=1, forward=8, backward=8)
    blocks = [Block((keep, recompute), base, base) for base in (0, 0, -16, -16)]
    problem = Problem(tuple(blocks), (Moment(-16, 4),))
    assert solve(problem, 16).chosen == _solver.fastest(problem).chosen == (0, 0, 0, 0)


@settings(deadline=None, max_examples=3)
@given(st.data())
def test_eight_blocks_of_four_choices(data):
    amounts = st.integers(0, 12)
    some = st.tuples(*[st.builds(Choice, amounts.map(float), amounts, amounts, amounts)] * 4)
    problem = Problem(tuple(Block(data.draw(some)) for _ in range(8)))
    answers = list(every_answer(problem))
    for budget in (smallest(problem).peak, max(bytes_ for bytes_, _ in answers) // 2):
        assume(least_seconds(answers, budget) is not None)
        check(problem, answers, budget, solve(problem, budget))


@WITHOUT_HASTE
@given(problem=problems(most=1000, unit=1013), shift=st.integers(0, 1012))
def test_where_memory_is_rounded_and_few_answers_are_followed_the_gap_is_true(problem, shift):
    blocks = tuple(
        replace(
            block,
            choices=tuple(replace(c, kept=c.kept + (shift * i * (k + 1)) % 997) for k, c in enumerate(block.choices)),
            kind=None,
        )
        for i, block in enumerate(problem.blocks)
    )
    problem = replace(problem, blocks=blocks)
    answers = list(every_answer(problem))
    peaks = sorted({bytes_ for bytes_, _ in answers})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_knapsack, "LEVELS", 12)
        patch.setattr(_knapsack, "FEW", 1)
        patch.setattr(_knapsack, "MORE", 2)
        patch.setattr(_knapsack, "MOST", 3)
        for budget in peaks[:: max(1, len(peaks) // 5)]:
            check(problem, answers, budget, solve(problem, budget), slack=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_knapsack, "LEVELS", 12)
        for budget in peaks[:: max(1, len(peaks) // 5)]:
            check(problem, answers, budget, solve(problem, budget))


@WITHOUT_HASTE
@given(problem=problems(ties=True))
def test_ties_are_kept_and_cost_no_more_than_they_must(problem):
    check_all(problem, slack=_solver.GAP)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems(most=700, offloading=True))
def test_offloading_is_solved_as_trying_everything_does(problem):
    check_all(problem, slack=_solver.GAP * 1.01)


def test_a_moment_that_takes_nothing_by_itself_bounds_what_is_kept_when_offloading():
    goes, stays = Choice(0.0, 0, out=1), Choice(0.0, 1)
    times = {"forward_seconds": 1.0, "backward_seconds": 1.0}
    blocks = (Block((goes, stays), **times), Block((goes, Choice(0.0, 0)), **times), Block((stays,), **times))
    problem = Problem(blocks, (Moment(bytes=0, after=3),), link=Link(1.0, 1.0))
    assert solve(problem, 1).chosen == (0, 1, 0)  # what the last block keeps is all that there is room for


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems(most=700, offloading=True, ties=True))
def test_offloading_with_ties(problem):
    check_all(problem, slack=_solver.GAP * 1.01)


@WITHOUT_HASTE
@given(problem=problems(most=700), seconds=st.integers(0, 40))
def test_the_least_peak_within_seconds(problem, seconds):
    answers = list(every_answer(problem))
    best = min((bytes_ for bytes_, took in answers if took <= seconds), default=None)
    if best is None:
        with pytest.raises(ValueError, match="adds at least"):
            _solver.within(problem, seconds)
    else:
        found = _solver.within(problem, seconds)
        assert (found.peak, found.seconds <= seconds) == (best, True)
        assert found.seconds == pytest.approx(least_seconds(answers, best))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems(most=400, offloading=True, ties=True), seconds=st.integers(0, 40))
def test_the_least_peak_within_seconds_with_all_there_is(problem, seconds):
    answers = list(every_answer(problem))
    best = min((bytes_ for bytes_, took in answers if took <= seconds), default=None)
    assume(best is not None)
    found = _solver.within(problem, seconds)
    assert found.seconds <= seconds
    assert found.peak == pytest.approx(best, rel=_solver.GAP)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems(most=400, ties=True))
def test_a_frontier_falls_from_the_smallest_to_the_fastest(problem):
    answers = list(every_answer(problem))
    found = frontier(problem, points=6)
    assert found[0].peak == min(bytes_ for bytes_, _ in answers)
    assert found[-1].seconds == pytest.approx(min(seconds for _, seconds in answers))
    for one, other in itertools.pairwise(found):
        assert one.peak < other.peak
        assert one.seconds > other.seconds
    for one in found:
        assert one.seconds == pytest.approx(least_seconds(answers, one.peak), rel=_solver.GAP)


# --- Larger ones, against what people do by hand ---


def layer(scale, number, speed=1.0):
    """Keep everything, nothing but the input, the attention, the products; the same offloaded."""
    full = scale * 40
    second = speed * scale * 1e-6
    return (
        Choice(0.0, full, full, full + 9 * scale),
        Choice(second, full // 20, full // 2, full + 11 * scale),
        Choice(second * 0.8, full // 8 + number, full // 2, full + 10 * scale),
        Choice(second * 0.25, full * 6 // 10, full * 8 // 10, full + 10 * scale),
    )


def mixed(count, alike):
    scales = [1_000_003 if alike else 700_001 + 7919 * (i * i % 83) for i in range(count)]
    blocks = tuple(
        Block(
            layer(scale, 0 if alike else i),
            base_forward=10**8,
            base_backward=10**8 + (count - i) * scale,
            forward_seconds=scale * 1e-6,
            backward_seconds=scale * 2e-6,
            name=f"layers.{i}",
            kind=0 if alike else None,
        )
        for i, scale in enumerate(scales)
    )
    return Problem(blocks, (Moment(2 * 10**8, count, "loss"),))


def by_hand(problem):
    """Everything recomputed, every k-th kept, one choice for all, greedy by seconds saved per byte."""
    count = len(problem.blocks)
    for k in range(4):
        yield [k] * count
    for every in range(2, 9):
        yield [0 if i % every == 0 else 1 for i in range(count)]
        yield [1 if i % every == 0 else 0 for i in range(count)]


def greedy(problem, budget):
    chosen = [1] * len(problem.blocks)
    while True:
        steps = []
        for i, block in enumerate(problem.blocks):
            now = block.choices[chosen[i]]
            for k, other in enumerate(block.choices):
                if other.seconds < now.seconds:
                    steps.append(((now.seconds - other.seconds) / max(other.kept - now.kept, 1), i, k))
        for _, i, k in sorted(steps, reverse=True):
            tried = [*chosen[:i], k, *chosen[i + 1 :]]
            if peak(problem, tried)[0] <= budget:
                chosen = tried
                break
        else:
            return chosen


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.9])
def test_never_worse_than_what_is_done_by_hand(alike, share):
    problem = mixed(24, alike)
    low, high = smallest(problem), _solver.fastest(problem)
    budget = int(low.peak + (high.peak - low.peak) * share)
    found = solve(problem, budget)
    assert found.peak <= budget
    assert found.gap < 1e-3
    compared = 0
    for chosen in [*by_hand(problem), greedy(problem, budget)]:
        if peak(problem, chosen)[0] <= budget:
            compared += 1
            assert found.seconds <= solution(problem, chosen, 0.0).seconds * (1 + 1e-9)
    assert compared


def with_offloading(problem, speed=25e9):
    blocks = []
    for block in problem.blocks:
        keep, none, attention, _ = block.choices
        sent = (
            replace(choice, kept=0, out=choice.kept, seconds=choice.seconds + choice.kept * 1e-12)
            for choice in (replace(keep, forward=keep.forward * 5 // 4), attention, none)
        )
        blocks.append(replace(block, choices=(*block.choices, *sent)))
    return replace(problem, blocks=tuple(blocks), link=Link(speed, speed), host_bytes=2 * 10**9)


@pytest.mark.parametrize("alike", [True, False])
def test_offloading_is_never_worse_than_leaving_it_alone_and_hides_behind_the_computation(alike):
    plain = mixed(24, alike)
    # As fast as half of a layer's activations in the time of its forward.
    problem = with_offloading(plain, speed=20e6)
    low, high = smallest(plain), _solver.fastest(plain)
    for share in (0.1, 0.5):
        budget = int(low.peak + (high.peak - low.peak) * share)
        alone, found = solve(plain, budget), solve(problem, budget)
        assert found.seconds < alone.seconds * 0.98
        assert found.gap <= _solver.GAP
        assert found.peak <= budget
        assert is_allowed(problem, found.chosen)
    assert smallest(problem).peak < low.peak


def test_no_more_is_on_its_way_than_may_be():
    goes = (Choice(1.0, 9, 9, 9), Choice(0.0, 0, 9, 9, out=9))
    blocks = tuple(Block(goes, forward_seconds=1.0, backward_seconds=1.0) for _ in range(3))
    for in_flight, most in ((None, 3), (11, 3), (8, 2), (4, 1)):
        # 9 leave, 5 are left when the next 9 begin to, and so on.
        problem = Problem(blocks, link=Link(4.0, 4.0, in_flight))
        numbers = [sum(chosen) for chosen in itertools.product((0, 1), repeat=3) if is_allowed(problem, chosen)]
        assert max(numbers) == most
        assert sum(_solver.fastest(problem).chosen) == most


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems(most=700, offloading=True, unit=1_000_000_007))
def test_numbers_as_they_are_on_a_device(problem):
    check_all(problem, slack=_solver.GAP * 1.01)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems(most=500, offloading=True), out=st.integers(0, 9))
def test_what_must_not_be_chosen_is_as_if_it_were_not_there(problem, out):
    never = Choice(0.0, NEVER, 1, 1, out)
    blocks = tuple(replace(one, choices=(*one.choices, never)) for one in problem.blocks)
    ruled_out = replace(problem, blocks=blocks)
    for find in (smallest, _solver.fastest):
        assert find(ruled_out) == find(problem)


U = 1_000_000_007


@pytest.mark.parametrize(
    ("blocks", "rest", "budget", "best"),
    [
        (  # more than the solver could scale, once
            tuple(
                Block(
                    (
                        Choice(0.006, 0, U, U, 3 * U),
                        Choice(0.004267494916865445, 5 * U, 4996754053, 12325106094, U),
                        Choice(0.002, 4 * U, 9 * U, 945754940, 3 * U),
                        Choice(0.00589102721531681, 3 * U, 4 * U, 6 * U),
                    ),
                    base * U,
                    0,
                    0.001,
                    0.002,
                    kind=0,
                )
                for base in (3, 1, -1, -3)
            ),
            {"moments": (Moment(0, 4),), "link": Link(2000.000014e9, 2000.000014e9, 6 * U), "host_bytes": 6 * U},
            None,
            10 * U,
        ),
        (  # a moment of less than nothing
            (
                Block(
                    (
                        Choice(0.0, 0, 0, 0, 7),
                        Choice(0.0, 6, 12, 10),
                        Choice(1.0, 0, 5, 2, 3),
                        Choice(6.0, 2, 10, 9, 7),
                    ),
                    3,
                    0,
                    1.0,
                    2.0,
                    kind=0,
                ),
            )
            * 4,
            {"moments": (Moment(-5, 4),), "link": Link(2.0, 2.0)},
            12,
            2.0,
        ),
        (  # what is there rises from block to block
            tuple(
                Block((Choice(0.0, 0, 0, 3, 1), Choice(3.0, 0), Choice(2.0, 2, 3, 2, 1)), *base, kind=0)
                for base in ((1, 9), (-3, 34))
            ),
            {"link": Link(2.0, 4.0)},
            37,
            2.0,
        ),
    ],
    ids=["large numbers", "less than nothing", "rising"],
)
def test_what_was_found_to_be_not_the_best(blocks, rest, budget, best):
    problem = Problem(blocks, **rest)
    if budget is None:
        assert smallest(problem).peak == best
    else:
        assert solve(problem, budget).seconds == best


def test_offloading_over_a_slow_link_stays_away():
    problem = with_offloading(mixed(12, True), speed=1.0)
    plain = mixed(12, True)
    budget = (smallest(plain).peak + _solver.fastest(plain).peak) // 2
    found = solve(problem, budget)
    assert found.seconds == pytest.approx(solve(plain, budget).seconds, rel=_solver.GAP)
    assert not any(problem.blocks[i].choices[k].out for i, k in enumerate(found.chosen))


def test_time_for_a_program_that_is_up_at_once_gives_what_the_chain_gives():
    plain = mixed(12, False)
    problem = with_offloading(plain, speed=20e6)
    budget = (smallest(plain).peak + _solver.fastest(plain).peak) // 2
    found = solve(problem, budget, time_limit=0.0)
    assert found.seconds <= solve(plain, budget).seconds
    assert found.gap > _solver.GAP


# --- Neighbours alike ---


def test_equal_choices_stand_together_and_what_keeps_most_comes_last():
    problem = mixed(16, True)
    low, high = smallest(problem), _solver.fastest(problem)
    for share in (0.1, 0.3, 0.5, 0.7):
        found = solve(problem, int(low.peak + (high.peak - low.peak) * share))
        kept = [problem.blocks[0].choices[k].kept for k in found.chosen]
        assert kept == sorted(kept)
        assert switches(problem, found.chosen) == len(set(found.chosen)) - 1


def test_a_switch_stays_where_it_pays():
    choices = Choice(0.0, 10, 10, 10), Choice(1.0, 0, 10, 14)
    block = Block(choices, kind=0)
    # In the middle there is no room for a replay, and at the end none for what two of them keep.
    problem = Problem((block, replace(block, base_backward=12), block), (Moment(10, 3),))
    assert solve(problem, 24).chosen == (1, 0, 1)


def test_kinds_are_permuted_one_by_one_and_tied_blocks_are_left_alone():
    keep, drop = Choice(0.0, 10, 10, 10), Choice(1.0, 0, 10, 10)
    one, other = Block((keep, drop), kind=0), Block((drop, keep), kind=1)
    problem = Problem((one, other) * 4, tied=((0, 2),))
    found = solve(problem, 40)
    assert found.seconds == least_seconds(list(every_answer(problem)), 40)
    assert found.chosen[0] == found.chosen[2]
    assert switches(problem, found.chosen) <= 2


# --- Too little ---


def test_the_error_says_how_much_would_do_and_what_sets_it():
    block = Block((Choice(0.0, GIB, GIB, GIB), Choice(1.0, 0, GIB, 3 * GIB)), base_backward=GIB // 10, name="layers.7")
    with pytest.raises(
        InfeasibleError, match=r"into 1\.0 GiB: .* at least 1\.1 GiB; the backward of layers\.7 sets it"
    ) as caught:
        solve(Problem((block,)), GIB)
    assert caught.value.smallest == GIB + GIB // 10
    assert caught.value.where == "backward of layers.7"
    assert isinstance(caught.value, ValueError)


def test_other_moments_set_it_too():
    block = Block((Choice(0.0, 5, 5, 5),))
    problem = Problem((block, block), (Moment(100, 1, "loss"), Moment(7, 2)))
    with pytest.raises(InfeasibleError, match="at least 105 B; the loss sets it"):
        solve(problem, 104)
    assert peak(problem, (0, 0)) == (105, "loss")
    assert peak(replace(problem, moments=(Moment(100, 1),)), (0, 0)) == (105, "moment 0")
    assert peak(Problem((block, block)), (0, 0)) == (10, "forward of block 1")


@pytest.mark.parametrize(
    ("amount", "up", "down"),
    [
        (0, "0 B", "0 B"),
        (1023, "1023 B", "1023 B"),
        (1024, "1.0 KiB", "1.0 KiB"),
        (1025, "1.1 KiB", "1.0 KiB"),
        (5 * GIB // 2, "2.5 GiB", "2.5 GiB"),
        (3 * 2**40 + 1, "3.1 TiB", "3.0 TiB"),
        (2**51, "2048.0 TiB", "2048.0 TiB"),
    ],
)
def test_what_is_needed_is_rounded_upwards(amount, up, down):
    assert (describe_amount(amount, up=True), describe_amount(amount, up=False)) == (up, down)


def test_nothing_to_choose():
    assert solve(Problem(()), 0) == _solver.Solution((), 0.0, 0, 0.0)
    assert frontier(Problem(())) == [_solver.Solution((), 0.0, 0, 0.0)]
    only = Problem((Block((Choice(1.0, 2, 3, 4),)),))
    assert solve(only, 4) == smallest(only) == _solver.fastest(only) == _solver.Solution((0,), 1.0, 4, 0.0)


CHOICE = Choice(1.0, 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Choice(-1.0, 0), "not negative"),
        (lambda: Choice(math.nan, 0), "finite"),
        (lambda: Choice(0.0, 0, out=-1), "not negative"),
        (lambda: Problem((Block(()),)), "block 0 has no choice that leaves everything"),
        (lambda: Problem((Block((Choice(0.0, 0, out=1),), name="a"),), link=Link(1, 1)), "a has no choice that leaves"),
        (lambda: Problem((Block((CHOICE, Choice(0.0, 0, out=1))),)), "no link"),
        (lambda: Problem((), link=Link(0.0, 1.0)), "some bytes per second"),
        (lambda: Problem((), (Moment(1, 1),)), "after more blocks than there are"),
        (lambda: Problem((Block((CHOICE,), kind=1), Block((CHOICE, CHOICE), kind=1))), "other choices than .* kind 1"),
        (lambda: Problem((Block((CHOICE,)),) * 2, tied=((0, 1), (1, 0))), "one tied group at most"),
        (lambda: Problem((Block((CHOICE,)),), tied=((0, 1),)), "one tied group at most"),
        (lambda: Problem((), tied=((),)), "has blocks"),
        (lambda: Problem((Block((CHOICE,)), Block((CHOICE, CHOICE))), tied=((0, 1),)), "as many choices each"),
        (
            lambda: Problem(
                (Block((CHOICE, Choice(0.0, 0, out=1))), Block((Choice(0.0, 0, out=1), CHOICE))),
                tied=((0, 1),),
                link=Link(1, 1),
            ),
            "no common choice",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# --- Without scipy ---


@pytest.fixture
def no_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert not _milp.is_there()


def test_scipy_is_there():
    assert _milp.is_there()


@pytest.mark.usefixtures("no_scipy")
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(problem=problems(ties=True))
def test_ties_need_no_scipy(problem):
    check_all(problem)


@pytest.mark.usefixtures("no_scipy")
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(problem=problems(most=700, offloading=True, ties=True))
def test_what_offloads_is_left_alone_without_scipy_and_the_gap_knows(problem):
    answers = list(every_answer(problem))
    stays = replace(problem, host_bytes=0)
    alone = list(every_answer(stays))
    peaks = sorted({bytes_ for bytes_, _ in alone})
    for budget in (peaks[0], peaks[-1]):
        found = solve(problem, budget)
        assert all(block.choices[k].out == 0 for block, k in zip(problem.blocks, found.chosen, strict=True))
        assert found.seconds == pytest.approx(least_seconds(alone, budget))
        assert found.seconds * (1 - found.gap) <= least_seconds(answers, budget) + 1e-9
    assert smallest(problem).peak == peaks[0]
    if peaks[0]:
        with pytest.raises(InfeasibleError):
            solve(problem, peaks[0] - 1)


@pytest.mark.usefixtures("no_scipy")
def test_many_tied_groups_are_searched_in_part_and_the_gap_is_true():
    problem = mixed(24, False)
    tied = replace(problem, tied=tuple((i, i + 12) for i in range(12)))
    low, high = smallest(tied), _solver.fastest(tied)
    for share in (0.0, 0.3):
        budget = int(low.peak + (high.peak - low.peak) * share)
        found, free = solve(tied, budget), solve(problem, budget)
        assert found.peak <= budget
        assert is_allowed(tied, found.chosen)
        assert free.seconds * (1 - free.gap) <= found.seconds
        assert 0 <= found.gap < 0.2


def test_first_blocks_that_may_not_offload_are_alike_among_themselves():
    choices = (
        Choice(0.0, kept=9, forward=9, backward=9),
        Choice(1.0, kept=1, forward=9, backward=9),
        Choice(0.5, 0, 9, 9, out=9),
    )
    problem = Problem((Block(choices, forward_seconds=9.0, backward_seconds=9.0, kind=0),) * 6, link=Link(9.0, 9.0))
    assert solve(problem, 40).chosen[0] == 2
    restricted = without_offloading(problem, 2)
    found = solve(restricted, 40)
    assert 2 not in found.chosen[:2]
    assert 2 in found.chosen
    assert switches(restricted, found.chosen) <= 2
    assert without_offloading(problem, 0) == problem
