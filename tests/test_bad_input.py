"""What cannot work is refused at the call, with the argument's name, what it got and what it takes."""

import contextlib
import functools

import pytest
import torch

import recollect
from recollect import dropin, remat
from tools import ambient_state, leaf


class Never:
    """A function that must not be called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return args[0].sin()


@pytest.fixture(autouse=True)
def _nothing_is_half_applied():
    state, numbers = ambient_state(), torch.get_rng_state()
    yield
    assert ambient_state() == state
    assert torch.equal(torch.get_rng_state(), numbers)
    x = leaf(3)
    recollect.checkpoint(torch.sin, x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos()), "the next region works"


def native(function, *args, **options):
    return recollect.checkpoint(function, *args, **options)


def frames(function, *args, **options):
    return dropin.checkpoint(function, *args, use_reentrant=False, **options)


def reentrant(function, *args, **options):
    return dropin.checkpoint(function, *args, use_reentrant=True, **options)


def wrapper(function, *args, **options):
    return remat(function, **options)(*args)


def decorator(function, *args, **options):
    return remat(**options)(function)(*args)


WAYS = [native, frames, reentrant, wrapper, decorator]
WAYS_WITH_OPTIONS = [native, frames, wrapper, decorator]


# --- function ---


@pytest.mark.parametrize("run", [native, frames, reentrant])
@pytest.mark.parametrize("wrong", [None, 3, "sin", leaf(2), [torch.sin], ...])
def test_a_function_that_is_not_callable(run, wrong):
    with pytest.raises(TypeError, match="function") as info:
        run(wrong, leaf(3))
    message = str(info.value)
    assert "callable" in message
    assert type(wrong).__name__ in message


@pytest.mark.parametrize("wrong", [3, "sin", leaf(2), [torch.sin], ...])
@pytest.mark.parametrize("wrap", [remat, lambda wrong: remat(early_stop=False)(wrong)])
def test_a_function_that_is_not_callable_is_refused_by_remat_at_once(wrap, wrong):
    with pytest.raises(TypeError, match="function") as info:
        wrap(wrong)
    message = str(info.value)
    assert "callable" in message
    assert type(wrong).__name__ in message


def test_none_as_a_function_is_refused_by_the_decorator():
    with pytest.raises(TypeError, match="function must be callable"):
        remat(early_stop=False)(None)


def test_the_arguments_are_not_called_by_mistake():
    with pytest.raises(TypeError, match="function"):
        recollect.checkpoint(leaf(3), torch.sin)


def test_an_empty_dict_of_names():
    with pytest.raises(TypeError, match=r"by_name takes a dict with at least one pattern and decision, got dict \{\}"):
        recollect.by_name({})


# --- Functions that do their work later ---


def generates(x):
    notes.append("ran")
    yield x.sin()


async def awaits(x):
    notes.append("ran")
    return x.sin()


async def generates_async(x):
    notes.append("ran")
    yield x.sin()


class Generating(torch.nn.Module):
    def forward(self, x):
        notes.append("ran")
        yield x.sin()


class CallGenerates:
    def __call__(self, x):
        notes.append("ran")
        yield x.sin()


class HasGenerator:
    def method(self, x):
        notes.append("ran")
        yield x.sin()


notes = []

LATER = [
    (generates, "generator"),
    (awaits, "coroutine"),
    (generates_async, "async"),
    (functools.partial(generates), "generator"),
    (functools.partial(awaits), "coroutine"),
    (HasGenerator().method, "generator"),
    (Generating(), "generator"),
    (CallGenerates(), "generator"),
]


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize(("function", "kind"), LATER)
def test_a_function_that_does_its_work_later(run, function, kind):
    notes.clear()
    with pytest.raises(TypeError, match="function") as info:
        run(function, leaf(3))
    assert kind in str(info.value)
    assert notes == []


@pytest.mark.parametrize(("function", "kind"), LATER[:-1])
def test_remat_refuses_it_before_the_first_call(function, kind):
    for wrap in (remat, remat(early_stop=False)):
        with pytest.raises(TypeError, match="function") as info:
            wrap(function)
        assert kind in str(info.value)


@pytest.mark.parametrize("run", WAYS)
def test_without_grad_it_is_refused_too(run):
    with torch.no_grad(), pytest.raises(TypeError, match="generator"):
        run(generates, leaf(3))


def test_the_message_says_which_function():
    with pytest.raises(TypeError, match="generates") as info:
        recollect.checkpoint(generates, leaf(3))
    assert __file__ in str(info.value)


# --- determinism_check ---


@pytest.mark.parametrize("run", WAYS_WITH_OPTIONS)
@pytest.mark.parametrize("wrong", ["strict", "", "None", None, True, 3])
def test_an_unknown_determinism_check(run, wrong):
    function = Never()
    with pytest.raises(ValueError, match="determinism_check") as info:
        run(function, leaf(3), determinism_check=wrong)
    message = str(info.value)
    assert repr(wrong) in message
    assert "'default'" in message
    assert "'none'" in message
    assert function.calls == 0


def test_remat_checks_determinism_check_before_it_gets_a_function():
    with pytest.raises(ValueError, match="determinism_check"):
        remat(determinism_check="strict")


# --- Options of remat ---


@pytest.mark.parametrize("name", ["use_reentrant", "earlystop", "function", "preserve_rng", "x"])
def test_an_unknown_option_of_remat(name):
    for wrap in (lambda **options: remat(Never(), **options), remat):
        with pytest.raises(TypeError, match=name) as info:
            wrap(**{name: True})
        message = str(info.value)
        assert "remat" in message
        for option in ("determinism_check", "debug", "early_stop", "preserve_rng_state", "context_fn", "name"):
            assert option in message


@pytest.mark.parametrize("wrong", [3, b"name", ["a"]])
def test_a_name_that_is_no_string(wrong):
    with pytest.raises(TypeError, match="name") as info:
        remat(torch.sin, name=wrong)
    assert type(wrong).__name__ in str(info.value)


def test_remat_takes_one_function_by_position():
    with pytest.raises(TypeError):
        remat(torch.sin, torch.cos)


# --- context_fn ---


@pytest.mark.parametrize("run", WAYS_WITH_OPTIONS)
@pytest.mark.parametrize("wrong", [None, 3, "noop", (contextlib.nullcontext(), contextlib.nullcontext())])
def test_a_context_fn_that_is_not_callable(run, wrong):
    function = Never()
    with pytest.raises(TypeError, match="context_fn") as info:
        run(function, leaf(3), context_fn=wrong)
    message = str(info.value)
    assert "callable" in message
    assert type(wrong).__name__ in message
    assert function.calls == 0


class OnlyEnters:
    def __enter__(self):
        raise AssertionError("must not be entered")


class OnlyLeaves:
    def __exit__(self, *_):
        raise AssertionError("must not be left")


class MustNotBeEntered(OnlyEnters, OnlyLeaves):
    pass


NOT_TWO_CONTEXTS = [
    None,
    3,
    contextlib.nullcontext(),
    (),
    (MustNotBeEntered(),),
    (MustNotBeEntered(),) * 3,
    (MustNotBeEntered(), None),
    (None, MustNotBeEntered()),
    (MustNotBeEntered(), OnlyEnters()),
    (OnlyLeaves(), MustNotBeEntered()),
    (contextlib.nullcontext, contextlib.nullcontext),
    {"forward": contextlib.nullcontext()},
    "ab",
]


@pytest.mark.parametrize("run", WAYS_WITH_OPTIONS)
@pytest.mark.parametrize("wrong", NOT_TWO_CONTEXTS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_context_fn_that_does_not_give_two_context_managers(run, wrong, grad):
    function = Never()
    with torch.set_grad_enabled(grad), pytest.raises(TypeError, match="context_fn") as info:
        run(function, leaf(3), context_fn=lambda: wrong)
    message = str(info.value)
    assert "two context managers" in message
    assert type(wrong).__name__ in message
    assert function.calls == 0


def test_an_exception_of_context_fn_leaves_as_it_is():
    error, function = KeyError("context_fn"), Never()

    def context_fn():
        raise error

    with pytest.raises(KeyError) as info:
        recollect.checkpoint(function, leaf(3), context_fn=context_fn)
    assert info.value is error
    assert function.calls == 0


def test_a_first_context_that_cannot_be_entered_leaves_nothing_behind():
    function = Never()
    with pytest.raises(AssertionError, match="must not be entered"):
        recollect.checkpoint(function, leaf(3), context_fn=lambda: (MustNotBeEntered(), contextlib.nullcontext()))
    assert function.calls == 0


def test_a_second_context_that_cannot_be_entered_leaves_nothing_behind():
    y = recollect.checkpoint(torch.sin, leaf(3), context_fn=lambda: (contextlib.nullcontext(), MustNotBeEntered()))
    with pytest.raises(AssertionError, match="must not be entered"):
        y.sum().backward()


# --- The call itself ---


@pytest.mark.parametrize("run", [native, frames, wrapper, decorator])
def test_a_call_that_does_not_fit_the_function_is_its_own_error(run):
    def function(x, z):
        return x * z

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'z'"):
        run(function, leaf(3))


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
def test_checkpoint_without_a_function(run):
    with pytest.raises(TypeError, match="function"):
        run()


@pytest.mark.parametrize("option", ["debug", "early_stop", "preserve_rng_state"])
@pytest.mark.parametrize("wrong", ["False", None, 1.0])
def test_options_that_are_neither_true_nor_false(option, wrong):
    allowed = "True, False or 'all'" if option == "preserve_rng_state" else "True or False"
    with pytest.raises(TypeError, match=f"{option} must be {allowed}, got {type(wrong).__name__}"):
        recollect.checkpoint(torch.sin, torch.ones(2, requires_grad=True), **{option: wrong})
    with pytest.raises(TypeError, match=f"{option} must be {allowed}"):
        recollect.remat(torch.sin, **{option: wrong})
