"""The zoo: every case is right, or an error that names the file and the line. Nothing is wrong without a word."""

import contextlib
import re
import warnings

import pytest
import torch
from torch import nn

import recollect
import zoo
from tools import assert_equal, leaf
from zoo import LIMITS, NAMED, RIGHT, TWICE, WRONG, ZOO, Case, DropIn, Plain, Recollect, judge, mentions, seeded

STEPS = 4  # the first is verified, the others go the short way


@pytest.fixture(autouse=True)
def _generators_are_registered_for_one_test_only(monkeypatch):
    registered = []

    def register(generator):
        registered.append(generator)
        return recollect_register(generator)

    recollect_register = recollect.register_generator
    monkeypatch.setattr(recollect, "register_generator", register)
    yield
    for generator in registered:
        recollect.unregister_generator(generator)


def cases(select=lambda case: True, among=ZOO):
    return [pytest.param(case, id=name) for name, case in among.items() if select(case)]


def expected_of(case, run):
    return seeded(case.program, Plain(run.steps))


@contextlib.contextmanager
def unless_it_warns(case):
    """Warnings are errors in tests; a case that is meant to warn comes to another one."""
    with warnings.catch_warnings():
        if case.warns:
            warnings.simplefilter("ignore")
        yield


def check_right(case, run):
    expected = expected_of(case, run)
    assert_equal(seeded(case.program, run), expected)


def check_error(case, run):
    """An error that names the line, and the shape where it is about a parameter; what else it says is returned."""
    expected_of(case, run)  # without regions the program is sound
    with pytest.raises(recollect.CheckpointError) as info, unless_it_warns(case):
        seeded(case.program, run)
    error, message = info.value, str(info.value)
    assert mentions(case, message), f"none of the lines {case.guilty} in\n{message}"
    assert re.search(case.shows, message), message
    return error


def check_facts(case, error):
    """The facts as attributes; the place and the operator stand in the message too."""
    message = str(error)
    if error.where is None:
        assert case.guard, f"no place in\n{message}"  # it was found before any operator had run
    else:
        assert mentions(case, error.where), f"{error.where} instead of {case.guilty} in\n{message}"
        place, _, name = error.where.partition(" in ")
        assert name
        assert place in message
    if case.cause:
        assert error.cause, f"no cause in\n{message}"
        assert re.search(case.cause, error.cause), f"{error.cause}\nis the cause in\n{message}"
    if case.operator:
        assert error.operator, f"no operator in\n{message}"
        assert re.match(rf"aten\.({case.operator})", error.operator), error.operator
        assert error.operator.rpartition(".")[0] in message


def check_twice(case, run):
    expected = expected_of(case, run)
    got = seeded(case.program, run)
    assert got.pop("effects") == 2 * expected.pop("effects")
    assert_equal(got, expected)


CHECKS = {
    RIGHT: check_right,
    NAMED: lambda case, run: check_facts(case, check_error(case, run)),
    TWICE: check_twice,
}


@pytest.mark.parametrize("case", cases())
def test_the_zoo(case):
    CHECKS[case.verdict](case, Recollect())


@pytest.mark.parametrize("case", cases(lambda case: case.later or case.guard))
def test_in_a_later_step(case):
    """State is kept apart and guards are on in steps that nothing is compared in."""
    CHECKS[case.verdict](case, Recollect(STEPS))


@pytest.mark.parametrize("case", cases(lambda case: case.verdict == RIGHT))
def test_what_is_right_stays_right_when_every_replay_is_compared(case):
    check_right(case, Recollect(STEPS if case.later else 1, check="values"))


@pytest.mark.parametrize("case", cases(lambda case: case.verdict == NAMED))
def test_when_every_replay_is_compared_the_error_leads_into_the_program(case):
    """Not every operator is looked at then: the error shows those since the last saved tensor that is equal."""
    with pytest.raises(recollect.CheckpointError, match=r"zoo\.py:\d+"), unless_it_warns(case):
        seeded(case.program, Recollect(STEPS if case.guard else 1, check="values"))


@pytest.mark.parametrize("case", cases(lambda case: case.dropin or case.guard))
@pytest.mark.parametrize("steps", [1, STEPS])
def test_the_drop_in(case, steps):
    run = DropIn(steps)
    if case.verdict == RIGHT:
        check_right(case, run)
    else:
        check_error(case, run)


@pytest.mark.parametrize("case", cases(among=LIMITS))
def test_what_the_default_does_not_see(case):
    """Written down in the docs; a change here is a change there."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert judge(case, Recollect(), expected_of(case, Recollect())) == case.verdict


@pytest.mark.parametrize("case", cases(lambda case: case.verdict == WRONG, among=LIMITS))
def test_what_the_default_does_not_see_is_seen_when_every_replay_is_compared(case):
    check_error(case, Recollect(check="values"))


@pytest.mark.parametrize("which", ["all", "this one"])
def test_what_the_default_does_not_see_is_seen_when_it_is_verified_again(which):
    """A region is traced again in the step after the request."""
    factors = iter([1.0, 1.0, 1.0, 2.0])

    def region(x):
        return (x.sin() * next(factors)).exp()

    recollect.verify_again()
    x = leaf(3)
    recollect.checkpoint(region, x).sum().backward()
    recollect.verify_again(*([] if which == "all" else [region]))
    y = recollect.checkpoint(region, x)
    with pytest.raises(recollect.CheckpointError, match=r"test_zoo\.py:\d+") as info:
        y.sum().backward()
    assert info.value.operator == "aten.mul.Tensor"


GUARDS_ON_LEAVES = ["optimizer step between", "bias stepped", "fused optimizer step", "weight replaced"]


@pytest.mark.parametrize("name", GUARDS_ON_LEAVES)
def test_none_switches_the_guards_off(name):
    case, run = ZOO[name], Recollect(check="none")
    got, expected = seeded(case.program, run), expected_of(case, run)
    assert not torch.equal(got["x"], expected["x"]), "the replay computed with the new weights"


def test_a_step_of_other_parameters_is_no_mistake():
    """Two models trained in turns, one between the forward and the backward of the other."""
    ours, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    for _ in range(STEPS):
        x = leaf(2, 3)
        y = recollect.checkpoint(lambda x: ours(x).tanh(), x)
        zoo.step_with(optimizer)
        y.sum().backward()
        z = leaf(2, 3)
        ours(z).tanh().sum().backward()
        assert torch.equal(x.grad, z.grad)


def test_random_numbers_that_are_not_preserved_are_said_once():
    """A program that does not want its numbers back is told what that means, and no more than once."""

    def region(x):
        return torch.nn.functional.dropout(x, 0.5).clone()  # nothing that backward needs, but a mask

    recollect.verify_again()
    x = leaf(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            recollect.checkpoint(region, x, preserve_rng_state=False, determinism_check="default").sum().backward()
    about = [one for one in caught if "preserve_rng_state" in str(one.message)]
    assert len(about) == 1
    assert issubclass(about[0].category, UserWarning)
    assert re.search(r"test_zoo\.py:\d+", str(about[0].message)) or about[0].filename == __file__


# --- The zoo itself ---


@pytest.mark.parametrize("case", [*cases(), *cases(among=LIMITS)])
def test_a_program_is_the_same_each_time_without_regions(case):
    assert_equal(expected_of(case, Plain()), expected_of(case, Plain()))
    assert judge(case, Plain(), expected_of(case, Plain())) == RIGHT


@pytest.mark.parametrize("case", cases(lambda case: case.verdict in (NAMED, WRONG)))
def test_a_case_that_is_to_be_named_marks_its_line(case):
    assert case.guilty


def test_verdicts():
    x = leaf(3)

    def judged(act, expected):
        def program(run):
            result = act()  # guilty
            return {"x": result}

        return judge(Case("", program, RIGHT), Plain(), expected)

    def fail(message):
        raise ValueError(message)

    line = Case("", judged, RIGHT).guilty[0]
    assert judged(lambda: x, {"x": x}) == zoo.RIGHT
    assert judged(lambda: x, {"x": x * 2}) == zoo.WRONG
    assert judged(lambda: fail("no place"), {}) == zoo.ELSEWHERE
    assert judged(lambda: fail(f"zoo.py:{line} in program"), {}) == zoo.NAMED
    assert judged(lambda: fail(f"zoo.py:{line}0 in program"), {}) == zoo.ELSEWHERE


def test_verdicts_tell_an_effect_from_a_gradient():
    x = leaf(3)
    case = Case("", lambda run: {"x": x, "effects": 2}, RIGHT)
    assert judge(case, Plain(), {"x": x, "effects": 1}) == TWICE
    assert judge(case, Plain(), {"x": x * 2, "effects": 1}) == WRONG
