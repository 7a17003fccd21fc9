"""Schedules as plain data: what the simulator allows and counts, what it refuses, and how schedules are drawn."""

import ast
import copy
import doctest
import pickle
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recollect.schedules
from recollect.schedules import (
    Backward,
    Chain,
    Drop,
    Forward,
    Keep,
    Online,
    Restore,
    Schedule,
    ScheduleError,
    extra_forwards,
    hrevolve,
    online,
    revolve,
    rotor,
)

# Three steps with one slot, written out.
THREE = [
    *(Keep(0), Forward(0, 2), Forward(2, 3, graph=True), Backward(2)),
    *(Restore(0), Forward(0, 1), Backward(1)),
    *(Restore(0), Drop(0), Backward(0)),
]
SMALL = Chain(
    forward_times=[1, 2, 4, 8, 16],
    backward_times=[1, 2, 4, 8, 16],
    output_bytes=[5, 4, 3, 2, 1],
    saved_bytes=[9, 8, 7, 6, 5],
    input_bytes=6,
)


def made(actions, length=3, slots=(1,), **options):
    return Schedule(actions=actions, length=length, slots=slots, **options)


# --- What is counted ---


def test_the_counts_of_a_schedule_written_out():
    counts = made(THREE).check()
    assert counts.actions == len(THREE)
    assert counts.forwards == 6  # 0, 1, 2; 0, 1; 0
    assert counts.extra == counts.cost == 3
    assert (counts.keeps, counts.restores, counts.peaks, counts.bytes) == ((1,), (2,), (1,), None)


def test_cost_and_peak_are_counts():
    schedule = made(THREE)
    assert (schedule.cost(), schedule.peak()) == (3, 1)


def test_writes_and_reads_cost_what_they_are_said_to_in_every_tier():
    actions = [
        *(Keep(0, 1), Keep(0), Forward(0, 1), Keep(1, 1), Forward(1, 2), Forward(2, 3, graph=True), Backward(2)),
        *(Restore(1, 1), Backward(1), Restore(0, 1), Restore(0), Backward(0), Drop(0), Drop(0, 1), Drop(1, 1)),
    ]
    schedule = made(actions, slots=(1, 2), tiers=("near", "far"), write=(0.5, 10), read=(0.25, 100), forward=1000)
    counts = schedule.check()
    assert counts.cost == 2 * 1000 + 0.5 + 2 * 10 + 0.25 + 2 * 100
    assert (counts.keeps, counts.restores, counts.peaks) == ((1, 2), (1, 2), (1, 2))
    assert (schedule.peak(), schedule.peak("near"), schedule.peak("far")) == (1, 1, 2)


def test_a_schedule_can_be_read_again_and_again():
    listed = made(THREE)
    assert list(listed) == list(listed) == THREE
    schedule = revolve(20, 3)
    assert list(schedule) == list(schedule)
    first, second = iter(schedule), iter(schedule)
    assert [next(first), next(first), next(second)] == [Keep(0), Forward(0, 10), Keep(0)]


def test_schedules_and_actions_are_values():
    assert Keep(1) == Keep(1, 0) != Restore(1)
    assert len({Keep(1), Keep(1), Drop(1), Restore(1), Forward(1, 2), Forward(1, 2, graph=True), Backward(1)}) == 6
    with pytest.raises(AttributeError):
        Keep(1).state = 2
    with pytest.raises(AttributeError):
        revolve(3, 1).length = 4
    for schedule in (made(THREE), revolve(30, 3), rotor(SMALL, 40), hrevolve(30, {"a": 2, "b": 2}, write={"b": 1})):
        for other in (pickle.loads(pickle.dumps(schedule)), copy.copy(schedule)):
            assert list(other) == list(schedule)
            assert other.check() == schedule.check()


# --- Bytes, by hand ---


def bytes_of(actions, chain, **options):
    return made(actions, length=chain.length, slots=(None,), chain=chain, **options).check().bytes


def chain_with(**changed):
    numbers = {
        "forward_times": [1, 1, 1],
        "backward_times": [1, 1, 1],
        "output_bytes": [10, 20, 40],
        "saved_bytes": [1010, 2020, 4040],
        "gradient_bytes": [0, 0, 0],
        "input_bytes": 5,
    }
    return Chain(**{**numbers, **changed})


PLAIN = [Forward(i, i + 1, graph=True) for i in range(3)] + [Backward(i) for i in (2, 1, 0)]


def test_graphs_take_what_is_saved_and_the_input():
    assert bytes_of(PLAIN, chain_with()) == 5 + 1010 + 2020 + 4040


def test_temporaries_count_while_their_step_runs():
    everything = 5 + 1010 + 2020 + 4040
    assert bytes_of(PLAIN, chain_with(forward_temporary_bytes=[0, 0, 7])) == everything + 7
    assert bytes_of(PLAIN, chain_with(forward_temporary_bytes=[0, 7, 0])) == everything
    assert bytes_of(PLAIN, chain_with(forward_temporary_bytes=[0, 5000, 0])) == 5 + 1010 + 2020 + 5000
    assert bytes_of(PLAIN, chain_with(backward_temporary_bytes=[0, 0, 7])) == everything + 7
    assert bytes_of(PLAIN, chain_with(backward_temporary_bytes=[0, 5000, 0])) == 5 + 1010 + 2020 + 5000


def test_gradients_count_from_the_start_and_change_with_every_backward():
    everything = 5 + 1010 + 2020 + 4040
    assert bytes_of(PLAIN, chain_with(gradient_bytes=[0, 0, 3])) == everything + 3
    assert bytes_of(PLAIN, chain_with(gradient_bytes=[0, 9000, 0])) == 5 + 1010 + 2020 + 9000
    assert bytes_of(PLAIN, chain_with(gradient_bytes=[9000, 0, 0])) == 5 + 1010 + 9000


def test_states_count_once_where_they_are_kept_and_running():
    # The most is where step 2 runs: states 0, and 2, which is in no slot, and what it saves; or where step 1 does.
    assert bytes_of(THREE, chain_with()) == 5 + 20 + 4040
    assert bytes_of(THREE, chain_with(saved_bytes=[10, 20, 40])) == 5 + 20 + 40
    assert bytes_of(THREE, chain_with(saved_bytes=[10, 5000, 40])) == 5 + 10 + 5000


def test_states_that_are_only_passed_through_are_gone():
    chain = chain_with(saved_bytes=[10, 20, 40], output_bytes=[10, 1, 1])
    # Steps 0 and 1 in one go, from the input, which is not kept: 5 + 10, then 10 + 1.
    once = [Forward(0, 2), Forward(2, 3, graph=True), Backward(2)]
    with pytest.raises(ScheduleError, match="step 1 is left"):
        bytes_of(once, chain)
    with pytest.raises(ScheduleError, match="takes 15 bytes, and the budget is 14"):
        bytes_of(once, chain, budget=14)
    with pytest.raises(ScheduleError, match="takes 41 bytes, and the budget is 40"):  # state 2 and what step 2 saves
        bytes_of(once, chain, budget=40)


def test_a_state_that_is_computed_anew_while_it_is_kept_counts_twice():
    chain = chain_with(saved_bytes=[10, 20, 40], output_bytes=[10, 20, 40])
    anew = [
        *(Keep(0), Forward(0, 1), Keep(1), Forward(1, 2), Keep(2), Forward(2, 3, graph=True), Backward(2)),
        *(Restore(0), Drop(0), Forward(0, 1, graph=True), Drop(2), Backward(1), Backward(0), Drop(1)),
    ]
    # States 0, 1 and 2 are kept and step 2's graph is held, 75 in all; then again 0, and what step 0 saves, state 1.
    assert bytes_of(anew, chain) == 5 + 10 + 20 + 40
    chain = chain_with(saved_bytes=[10, 20, 40], output_bytes=[10, 20, 40], backward_temporary_bytes=[0, 50, 0])
    assert bytes_of(anew, chain) == 5 + 10 + 10 + 20 + 50


def test_slower_tiers_take_no_memory_of_the_fastest():
    chain = chain_with(saved_bytes=[10, 20, 40])
    far = [replace_tier(action, 1) for action in THREE]
    options = {"length": 3, "tiers": ("near", "far"), "chain": chain}
    assert made(far, slots=(0, 1), **options).check().bytes == 20 + 40  # the input is not there when step 2 runs
    assert made(THREE, slots=(1, 0), **options).check().bytes == 5 + 20 + 40


def replace_tier(action, tier):
    return type(action)(action.state, tier) if isinstance(action, (Keep, Restore, Drop)) else action


# --- What is refused ---

ILLEGAL = {
    "another running state": ([Keep(0), Forward(1, 2)], "the running state is 0"),
    "no running state": ([*THREE[:4], Forward(0, 1)], "there is no running state"),
    "no step": ([Keep(0), Forward(0, 0)], "at least one step"),
    "backwards": ([Keep(0), Forward(0, -1)], "at least one step"),
    "a graph of two steps": ([Keep(0), Forward(0, 2, graph=True)], "one step at a time"),
    "a graph of no step": ([Keep(0), Forward(0, 0, graph=True)], "one step at a time"),
    "a graph twice": ([Keep(0), Forward(0, 1, graph=True), Restore(0), Forward(0, 1, graph=True)], "held already"),
    "a graph too late": (
        [Forward(0, 2), Keep(2), Forward(2, 3, graph=True), Backward(2), Restore(2), Forward(2, 3, graph=True)],
        "step 2 has been differentiated",
    ),
    "the last step without a graph": ([Keep(0), Forward(0, 3)], "step 2 is the next to be differentiated"),
    "a step that is done": ([*THREE[:5], Forward(0, 2)], "step 1 is the next to be differentiated"),
    "keeping another state": ([Keep(1)], "the running state is 0"),
    "keeping twice": ([Keep(0), Keep(0)], "has this state already"),
    "too many slots": ([Keep(0), Forward(0, 1), Keep(1)], "the slots of that tier, 1, are all in use"),
    "keeping what is done": ([Forward(0, 2), Forward(2, 3, graph=True), Keep(3)], "nothing starts from state 3"),
    "a tier that is not there": ([Keep(0, 1)], "there are 1 tiers, counted from 0"),
    "a tier below the first": ([Keep(0, -1)], "there are 1 tiers, counted from 0"),
    "restoring what is not kept": ([Keep(0), Restore(1)], "has no such state"),
    "restoring from another tier": ([Keep(0), Restore(0, 1)], "there are 1 tiers"),
    "dropping what is not kept": ([Drop(0)], "has no such state"),
    "dropping twice": ([Keep(0), Drop(0), Drop(0)], "has no such state"),
    "differentiating out of order": ([*THREE[:3], Backward(1)], "step 2 is next"),
    "differentiating twice": ([*THREE[:4], Backward(2)], "step 1 is next"),
    "differentiating from another state": ([*THREE[:4], Restore(0), Backward(1)], "the running state is 0"),
    "differentiating from no state": ([*THREE[:4], Backward(1)], "there is no running state"),
    "differentiating before the result": (
        [Keep(0), Forward(0, 2), Backward(2)],
        "in the forward, which gives the result",
    ),
    "going on after the end": ([*THREE, Backward(0)], "all steps are differentiated"),
    "ending before the end": (THREE[:-2], "step 0 is left"),
    "ending with a slot in use": ([a for a in THREE if a != Drop(0)], "state 0 is still in a slot of tier 0"),
    "nothing at all": ([], "ends after 0 actions, and step 2 is left"),
    "something else": ([Keep(0), "Forward"], "action 1 is none: 'Forward'"),
}


@pytest.mark.parametrize("kind", ILLEGAL)
def test_the_simulator_refuses(kind):
    actions, why = ILLEGAL[kind]
    with pytest.raises(ScheduleError, match=why):
        made(actions).check()


def test_it_says_which_action_it_refuses():
    with pytest.raises(ScheduleError, match=r"^action 1, Keep\(state=0, tier=0\), is not legal: "):
        made([Keep(0), Keep(0)]).check()


def test_a_budget_that_is_exceeded_is_refused_at_the_action_that_does():
    chain = chain_with()
    assert bytes_of(PLAIN, chain, budget=7075) == 7075
    with pytest.raises(ScheduleError, match=r"action 2, .* it takes 7075 bytes, and the budget is 7074"):
        bytes_of(PLAIN, chain, budget=7074)


EXAMPLES = {
    "revolve": revolve(14, 3),
    "rotor": rotor(SMALL, 33),
    "hrevolve": hrevolve(14, {"near": 2, "far": 3}, write={"far": 0.5}, read={"far": 0.5}),
    "online": online(3).schedule(14),
}


def altered(schedule, actions):
    return Schedule(
        actions=actions,
        length=schedule.length,
        slots=schedule.slots,
        tiers=schedule.tiers,
        chain=schedule.chain,
        budget=schedule.budget,
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_action_is_left_out_unnoticed(name):
    actions = list(EXAMPLES[name])
    altered(EXAMPLES[name], actions).check()
    assert {type(action) for action in actions} == {Forward, Keep, Restore, Drop, Backward}
    for left_out in range(len(actions)):
        with pytest.raises(ScheduleError):
            altered(EXAMPLES[name], actions[:left_out] + actions[left_out + 1 :]).check()


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_action_is_done_twice_unnoticed(name):
    actions = list(EXAMPLES[name])
    for twice, action in enumerate(actions):
        again = altered(EXAMPLES[name], [*actions[:twice], action, *actions[twice:]])
        if isinstance(action, Restore):  # which is legal, and costs
            assert sum(again.check().restores) == 1 + sum(EXAMPLES[name].check().restores)
        else:
            with pytest.raises(ScheduleError):
                again.check()


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_slot_fewer_is_not_enough(name):
    schedule = EXAMPLES[name]
    for tier, peak in enumerate(schedule.check().peaks):
        fewer = tuple(peak - 1 if i == tier else slots for i, slots in enumerate(schedule.slots))
        short = Schedule(actions=tuple(schedule), length=schedule.length, slots=fewer, tiers=schedule.tiers)
        with pytest.raises(ScheduleError, match="are all in use"):
            short.check()


# --- Drawings ---


def test_a_short_schedule_is_drawn_in_full():
    assert str(revolve(10, 3)).splitlines() == [
        "revolve: 10 steps, 15 extra forwards (1.50 per step)",
        "at most 3 of 3 kept; 6 writes, 9 reads",
        "",
        "  1 o>->->->o>->->o>->-<",
        "  2 o       o     o>-<",
        "  3 o       o     o<",
        "  4 o       o>o>-<",
        "  5 o       o o<",
        "  6 o       o<",
        "  7 o>o>o>-<",
        "  8 o o o<",
        "  9 o o<",
        " 10 o<",
        "",
        "    o kept  > run  # run, graph held  = graph held  < differentiated",
    ]


def test_graphs_that_are_held_are_drawn():
    schedule = made([Keep(0), Forward(0, 1, graph=True), *THREE_MORE], length=3, slots=(2,))
    assert [line[4:] for line in str(schedule).splitlines()[3:-2]] == ["o#o>-<", "o=o<", "o<o"]


THREE_MORE = [
    *(Keep(1), Forward(1, 2), Forward(2, 3, graph=True), Backward(2), Restore(1), Backward(1)),
    *(Restore(0), Drop(0), Drop(1), Backward(0)),
]


def test_a_schedule_with_many_sweeps_is_cut_short():
    lines = str(revolve(36, 2)).splitlines()
    assert "... 12 more sweeps" in lines
    assert len(lines) == 24 + 1 + 5
    assert lines[-3] == " 36 o<"


def test_a_long_schedule_is_summed_up():
    assert str(revolve(1000, 10)).splitlines() == [
        "revolve: 1,000 steps, 3,636 extra forwards (3.64 per step)",
        "at most 10 of 10 kept; 714 writes, 999 reads",
        "",
        "    kept when the forward ends (o; # graph), 14 steps a column:",
        "    o...................o................o...........o.......o.....o....o.o.o",
        "    how often a step is run, on the average (9: or more):",
        "    5555555555555555555545555555555555554555555555554555555544555554555454444",
    ]


def test_a_long_schedule_that_holds_graphs_is_summed_up():
    chain = Chain(forward_times=[1] * 72, backward_times=[1] * 72, output_bytes=[2] * 72, saved_bytes=[5] * 72)
    lines = str(rotor(chain, 72 * 4)).splitlines()
    assert set(lines[5].strip()) == {"#", "o", "."}
    runs = [int(times) for times in lines[7].strip()]
    assert len(runs) == 72
    assert sum(runs) == rotor(chain, 72 * 4).check().forwards


def test_tiers_are_drawn_by_their_number():
    schedule = hrevolve(100, {"device": 2, "cpu": 5}, write={"cpu": 1}, read={"cpu": 1})
    text = str(schedule)
    assert "at most device 2 of 2, cpu 5 of 5" in text
    kept = text.splitlines()[4].strip()
    assert kept[0] == "1"
    assert set(kept) == {"0", "1", "."}


@given(
    st.one_of(
        st.builds(revolve, st.integers(1, 300), st.integers(1, 40)),
        st.builds(lambda length, slots: online(slots).schedule(length), st.integers(1, 300), st.integers(1, 40)),
        st.builds(hrevolve, st.integers(1, 300), st.just({"device": 3, "a long name": 5, "disk": 10_000})),
    )
)
def test_drawings_fit_a_terminal(schedule):
    lines = str(schedule).splitlines()
    assert max(map(len, lines)) <= 79
    assert len(lines) <= 24 + 8
    assert str(schedule) == str(schedule)
    assert all(line.isascii() for line in lines)


def test_reprs_are_short():
    assert repr(revolve(1000, 10)) == "<revolve: 1000 steps, slots {'device': 10}>"
    assert repr(online(4)) == "<online: any number of steps, 4 slots>"


# --- Bad input ---

GOOD = {
    "forward_times": [1, 2],
    "backward_times": [1, 2],
    "output_bytes": [3, 3],
    "saved_bytes": [3, 4],
}


def two(**changed):
    return Chain(**{**GOOD, **changed})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: revolve(0, 1), ScheduleError, "length must be at least 1, got 0"),
        (lambda: revolve(1.5, 1), TypeError, "length must be an int, got float 1.5"),
        (lambda: revolve(True, 1), TypeError, "length must be an int, got bool True"),
        (lambda: revolve(5, 0), ScheduleError, "slots must be at least 1, got 0"),
        (lambda: revolve(5, "3"), TypeError, "slots must be an int, got str '3'"),
        (lambda: extra_forwards(0, 1), ScheduleError, "length must be at least 1, got 0"),
        (lambda: extra_forwards(1, None), TypeError, "slots must be an int, got NoneType None"),
        (lambda: online(0), ScheduleError, "slots must be at least 1, got 0"),
        (lambda: online(2.0), TypeError, "slots must be an int, got float 2.0"),
        (lambda: online(2).schedule(0), ScheduleError, "length must be at least 1, got 0"),
        (lambda: online(2).decide(1), ScheduleError, "state must be the next one, 0, or 0 for a new chain, got 1"),
        (lambda: online(2).rest(0), ScheduleError, "length must be what decide.. was asked about, 0 steps, got 0"),
        (lambda: online(2).rest(1), ScheduleError, "length must be what decide.. was asked about, 0 steps, got 1"),
        (lambda: rotor([1, 2], 10), TypeError, r"chain must be a recollect.schedules.Chain, got list \[1, 2\]"),
        (lambda: rotor(SMALL, "1 GiB"), TypeError, "budget must be an int, got str '1 GiB'"),
        (lambda: rotor(SMALL, -1), ScheduleError, "budget must be at least 0, got -1"),
        (lambda: rotor(SMALL, 50, levels=0), ScheduleError, "levels must be at least 1, got 0"),
        (lambda: hrevolve(0, {"a": 1}), ScheduleError, "length must be at least 1, got 0"),
        (lambda: hrevolve(5, {}), TypeError, "tiers must be a mapping from names to slots"),
        (lambda: hrevolve(5, [("a", 1)]), TypeError, "tiers must be a mapping from names to slots"),
        (lambda: hrevolve(5, {"a": 0}), ScheduleError, r"tiers\['a'\] must be at least 1, got 0"),
        (lambda: hrevolve(5, {"a": 1.0}), TypeError, r"tiers\['a'\] must be an int, got float 1.0"),
        (lambda: hrevolve(5, {"a": 1}, write={"b": 1}), ScheduleError, "write must be about the tiers 'a', got 'b'"),
        (lambda: hrevolve(5, {"a": 1}, read={"a": -1}), ScheduleError, r"read\['a'\] must be finite and not negative"),
        (lambda: hrevolve(5, {"a": 1}, read={"a": "1"}), TypeError, r"read\['a'\] must be a number, got str '1'"),
        (lambda: hrevolve(5, {"a": 1}, write=3), TypeError, "write must be a mapping from names of tiers to times"),
        (lambda: hrevolve(5, {"a": 1}, forward=0), ScheduleError, "forward must be more than 0"),
        (lambda: hrevolve(5, {"a": 1}, forward=float("nan")), ScheduleError, "forward must be finite"),
        (lambda: made(5), TypeError, "actions must be a sequence of actions, or a function that gives them anew"),
        (lambda: made(iter(THREE)), TypeError, "actions must be a sequence of actions, or a function"),
        (lambda: made(THREE, length=0), ScheduleError, "length must be an int of at least 1, got 0"),
        (lambda: made(THREE, slots=1), TypeError, "slots must be a tuple with one entry per tier, got 1"),
        (lambda: made(THREE, slots=(1, 2)), ScheduleError, r"slots must have one entry for each of the tiers"),
        (lambda: made(THREE, write=(1, 2)), ScheduleError, r"write must have one entry for each of the tiers"),
        (lambda: made(THREE, chain=SMALL), ScheduleError, "length must be the chain's, 5 steps, got 3"),
        (lambda: made(THREE).peak("disk"), ScheduleError, "tier must be one of 'device', got 'disk'"),
        (
            lambda: two(forward_times=[]),
            ScheduleError,
            "forward_times must have a number for at least",
        ),
        (lambda: two(forward_times=3), TypeError, "forward_times must be a sequence of numbers"),
        (lambda: two(forward_times="12"), TypeError, "forward_times must be a sequence of numbers"),
        (
            lambda: two(forward_times=[1, "2"]),
            TypeError,
            r"forward_times\[1\] must be a number, got '2'",
        ),
        (lambda: two(output_bytes=[1.5, 1]), TypeError, r"output_bytes\[0\] must be an int, got 1.5"),
        (
            lambda: two(saved_bytes=[3, -4]),
            ScheduleError,
            r"saved_bytes\[1\] must be finite and not neg",
        ),
        (
            lambda: two(saved_bytes=[3]),
            ScheduleError,
            "saved_bytes must have one number per step, 2 as",
        ),
        (
            lambda: two(saved_bytes=[3, 2]),
            ScheduleError,
            r"saved_bytes\[1\] must include the step's outp",
        ),
        (
            lambda: two(backward_times=[1, float("inf")]),
            ScheduleError,
            r"backward_times\[1\] must be finite",
        ),
        (lambda: two(input_bytes=-1), ScheduleError, "input_bytes must be finite and not negative, got -1"),
        (lambda: two(gradient_bytes=[1]), ScheduleError, "gradient_bytes must have one number per step"),
    ],
)
def test_bad_input_is_refused_at_the_door(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_every_error_is_a_value_error():
    assert issubclass(ScheduleError, ValueError)
    assert ScheduleError("x").minimum is None


def test_a_chain_is_a_value():
    chain = Chain(**GOOD)
    assert chain == Chain(**{name: tuple(numbers) for name, numbers in GOOD.items()})
    assert hash(chain) == hash(Chain(**GOOD))
    assert chain.gradient_bytes == (3, 3)
    assert chain.forward_temporary_bytes == chain.backward_temporary_bytes == (0, 0)
    with pytest.raises(AttributeError):
        chain.input_bytes = 3


# --- Of what it is made ---

ROOT = Path(recollect.schedules.__file__).parent


def test_it_knows_nothing_of_torch_nor_of_other_packages():
    files = [ROOT / "schedules.py", *(ROOT / "_schedules").glob("*.py")]
    assert len(files) > 8
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                ours = name.startswith("recollect._schedules.")
                assert ours or name.split(".")[0] in sys.stdlib_module_names, f"{file.name} imports {name}"


def test_the_public_names_are_all_there():
    assert set(recollect.schedules.__all__) >= {"revolve", "rotor", "hrevolve", "online", "Schedule", "ScheduleError"}
    assert all(hasattr(recollect.schedules, name) for name in recollect.schedules.__all__)
    assert isinstance(online(1), Online)


def test_the_page_about_chains_is_true():
    page = Path(__file__).parent.parent / "docs" / "chains.md"
    blocks = re.findall(r"^```pycon\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    # Blank lines are part of what is printed there, and no end of it.
    source = "\n".join(re.sub(r"\n\n", "\n<BLANKLINE>\n", block) for block in blocks)
    test = doctest.DocTestParser().get_doctest(source, {}, "chains.md", str(page), 0)
    failed, tried = doctest.DocTestRunner().run(test)
    assert tried > 10
    assert not failed
