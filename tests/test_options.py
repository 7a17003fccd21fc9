"""What the caller may ask of a region: the options of `checkpoint`, the overrides, `context_fn`, the exported names."""

import contextlib
import sys
import threading
import warnings

import pytest
import torch

import recollect
from recollect import dropin
from tools import CountOperators, Once, hooks_in_force, leaf

EXPLICITLY = "the use_reentrant parameter should be passed explicitly"
DEBUG_NOTE = "You are seeing this error because you passed `debug=True` to checkpoint"


def sin_exp(x):
    return x.sin().exp()


class Noting:
    """A context manager that notes when it is entered and left, and with what."""

    def __init__(self, notes, name, on_enter=None, suppress=False):
        self.notes, self.name, self.on_enter, self.suppress = notes, name, on_enter, suppress

    def __enter__(self):
        self.notes.append(f"enter {self.name}")
        if self.on_enter is not None:
            self.on_enter()
        return self

    def __exit__(self, kind, error, traceback):
        self.notes.append(f"exit {self.name}")
        self.error = error
        return self.suppress


def fails_in_replay(x, first):
    """Saves one tensor fewer in the replay than in the forward."""
    y = x.sin()
    return y.exp() if first() else y


def message_of_failure(run, **options):
    first = Once()
    y = run(fails_in_replay, leaf(3), first, **options)
    with pytest.raises(recollect.CheckpointError) as info:
        y.sum().backward()
    return str(info.value)


def runs_to_its_end(call):
    """Whether the replay of a region goes on after the last tensor that it needs."""
    ended = []

    def function(x):
        y = x.sin()
        ended.append(True)
        return y

    y = call(function)
    ended.clear()
    return y, lambda: bool(ended)


# --- Names ---

SECTIONS_2_TO_6 = {
    "checkpoint",
    "checkpoint_sequential",
    "CheckpointError",
    "CheckpointFunction",
    "check_backward_validity",
    "detach_variable",
    "get_device_states",
    "set_device_states",
    "noop_context_fn",
    "set_checkpoint_early_stop",
    "DefaultDeviceType",
    "set_checkpoint_debug_enabled",
    "GraphExecGroup",
    "_infer_device_type",
}
SECTION_7 = {
    "CheckpointPolicy",
    "SelectiveCheckpointContext",
    "create_selective_checkpoint_contexts",
    "SAC_IGNORED_OPS",
    "_CachingTorchDispatchMode",
    "_CachedTorchDispatchMode",
}


def test_dropin_exports_the_names_of_torch_utils_checkpoint():
    exported = set(dropin.__all__)
    assert exported >= SECTIONS_2_TO_6
    assert exported <= SECTIONS_2_TO_6 | SECTION_7, "more than the contract names"
    assert all(hasattr(dropin, name) for name in exported)
    assert len(dropin.__all__) == len(exported)


def test_every_name_of_dropin_is_torchs():
    import torch.utils.checkpoint as stock

    assert all(hasattr(stock, name) for name in dropin.__all__)


def test_recollect_exports_its_names():
    assert set(recollect.__all__) >= {"CheckpointError", "checkpoint", "remat"}
    assert all(hasattr(recollect, name) for name in recollect.__all__)
    assert recollect.CheckpointError is dropin.CheckpointError
    assert issubclass(recollect.CheckpointError, RuntimeError)


# --- Arguments and results ---


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
def test_other_keywords_go_to_the_function(run):
    seen = []

    def function(x, *, scale, name, function=None):
        seen.append((scale, name, function))
        return x.sin() * scale

    x = leaf(3)
    # `function` is taken by the signature of checkpoint itself, everything else is free.
    run(
        function, x, scale=2.0, name="n", use_reentrant=False, preserve_rng_state=True, early_stop=False
    ).sum().backward()
    assert seen == [(2.0, "n", None)] * 2
    assert torch.equal(x.grad, torch.autograd.grad((x.sin() * 2.0).sum(), x)[0])


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
def test_returns_what_the_function_returns_of_any_structure(run):
    class Result:
        pass

    def function(x):
        result = Result()
        result.parts = {"a": [x.sin(), None], "b": ("text", 3)}
        return result

    x = leaf(3)
    result = run(function, x, use_reentrant=False)
    assert type(result) is Result
    assert result.parts["b"] == ("text", 3)
    assert result.parts["a"][1] is None
    result.parts["a"][0].sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


# --- use_reentrant ---


@pytest.mark.parametrize("given", [{}, {"use_reentrant": None}])
def test_dropin_without_use_reentrant_warns_the_caller_and_is_reentrant(given):
    grad_modes = []

    def function(x):
        grad_modes.append(torch.is_grad_enabled())
        return x.sin()

    x = leaf(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        y = dropin.checkpoint(function, x, **given)
        y.sum().backward()
    [warning] = caught
    assert warning.category is UserWarning
    assert EXPLICITLY in str(warning.message).splitlines()[0]
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert grad_modes == [False, True]
    assert torch.equal(x.grad, x.detach().cos())


def test_native_with_use_reentrant_none_warns_the_caller_too():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        y = recollect.checkpoint(torch.sin, leaf(3), use_reentrant=None)
    [warning] = caught
    assert warning.category is UserWarning
    assert EXPLICITLY in str(warning.message).splitlines()[0]
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert "CheckpointFunction" in type(y.grad_fn).__name__


def test_sequential_without_use_reentrant_warns_the_caller_once():
    functions = [torch.sin, torch.exp, torch.cos, torch.sin]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        dropin.checkpoint_sequential(functions, 4, leaf(3))
    [warning] = caught
    assert warning.category is UserWarning
    assert EXPLICITLY in str(warning.message).splitlines()[0]
    assert (warning.filename, warning.lineno) == (__file__, line)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_use_reentrant_false_never_warns(requires_grad):
    x = leaf(3).detach().requires_grad_(requires_grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for y in (
            dropin.checkpoint(sin_exp, x, use_reentrant=False),
            dropin.checkpoint_sequential([torch.sin, torch.exp], 2, x, use_reentrant=False),
            recollect.checkpoint(sin_exp, x),
        ):
            assert torch.equal(y, sin_exp(x))
            if requires_grad:
                y.sum().backward()


def test_native_default_is_not_reentrant():
    grad_modes = []

    def function(x, *, scale):
        grad_modes.append(torch.is_grad_enabled())
        return (x * scale).sin()

    recollect.checkpoint(function, leaf(3), scale=2.0)
    assert grad_modes == [True]


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
def test_reentrant_refuses_keywords_for_the_function(run):
    calls = []
    with pytest.raises(ValueError, match="Unexpected keyword arguments: a,b"):
        run(calls.append, leaf(3), use_reentrant=True, a=1, b=2)
    assert calls == []


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext())}, ["context_fn"]),
        ({"debug": True}, ["debug"]),
        (
            {"debug": True, "context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext())},
            ["debug", "context_fn"],
        ),
    ],
)
def test_reentrant_refuses_context_fn_and_debug(run, options, named):
    calls = []
    with pytest.raises(ValueError, match="only supported when use_reentrant=False") as info:
        run(calls.append, leaf(3), use_reentrant=True, **options)
    assert all(name in str(info.value) for name in named)
    assert calls == []


def test_leaving_use_reentrant_open_refuses_the_same():
    with (
        pytest.warns(UserWarning, match=EXPLICITLY),
        pytest.raises(ValueError, match="Unexpected keyword arguments: a"),
    ):
        dropin.checkpoint(torch.sin, leaf(3), a=1)


@pytest.mark.parametrize("options", [{"determinism_check": "none"}, {"early_stop": False}, {"early_stop": True}])
def test_reentrant_ignores_determinism_check_and_early_stop(options):
    ended = []

    def function(x):
        y = x.sin()
        ended.append(True)
        return y

    x = leaf(3)
    dropin.checkpoint(function, x, use_reentrant=True, **options).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert len(ended) == 2, "the reentrant variant always runs to the end"


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_default_context_fns_count_as_none(reentrant):
    import torch.utils.checkpoint as stock

    for context_fn in (dropin.noop_context_fn, stock.noop_context_fn):
        x = leaf(3)
        y = dropin.checkpoint(sin_exp, x, use_reentrant=reentrant, context_fn=context_fn)
        y.sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])


def test_noop_context_fn_gives_two_contexts():
    first, second = dropin.noop_context_fn()
    with first, second:
        pass


# --- determinism_check ---


def other_shape(x, first):
    return (x if first() else x[:1]).sin()


def other_dtype(x, first):
    return (x if first() else x.double()).sin()


def other_device(x, first):
    return (x if first() else x.to("meta")).sin()


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
@pytest.mark.parametrize("options", [{}, {"determinism_check": "default"}])
@pytest.mark.parametrize(
    ("function", "then", "now"),
    [(other_shape, "[3]", "[1]"), (other_dtype, "float32", "float64"), (other_device, "cpu", "meta")],
)
def test_default_check_compares_shape_dtype_and_device(run, function, then, now, options):
    y = run(function, leaf(3), Once(), use_reentrant=False, **options)
    with pytest.raises(recollect.CheckpointError) as info:
        y.sum().backward()
    message = str(info.value)
    assert "Recomputed values for the following tensors have different metadata" in message
    assert then in message
    assert now in message


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
def test_check_none_compares_nothing(run):
    x = leaf(3)
    run(other_shape, x, Once(), use_reentrant=False, determinism_check="none").sum().backward()
    # What the replay saved was taken for what the forward saved: the cosine of the first element for all.
    assert torch.equal(x.grad, x.detach()[:1].cos().expand(3))

    x = leaf(3)
    run(other_dtype, x, Once(), use_reentrant=False, determinism_check="none").sum().backward()
    assert torch.equal(x.grad, x.detach().double().cos().float())


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
@pytest.mark.parametrize("wrong", ["strict", "", "Default", None, 3])
def test_unknown_check_is_an_error_that_lists_what_is_allowed(run, wrong):
    calls = []
    with pytest.raises(ValueError, match="determinism_check") as info:
        run(calls.append, leaf(3), use_reentrant=False, determinism_check=wrong)
    assert "default" in str(info.value)
    assert "none" in str(info.value)
    assert repr(wrong) in str(info.value)
    assert calls == []


# --- early_stop ---


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
@pytest.mark.parametrize(
    ("options", "to_the_end"), [({}, False), ({"early_stop": True}, False), ({"early_stop": False}, True)]
)
def test_early_stop_option(run, options, to_the_end):
    y, ended = runs_to_its_end(lambda function: run(function, leaf(3), use_reentrant=False, **options))
    y.sum().backward()
    assert ended() is to_the_end


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("override", [True, False])
def test_early_stop_override_beats_the_argument_and_is_read_in_the_forward(override, given):
    with dropin.set_checkpoint_early_stop(override):
        y, ended = runs_to_its_end(lambda function: recollect.checkpoint(function, leaf(3), early_stop=given))
    y.sum().backward()
    assert ended() is not override

    y, ended = runs_to_its_end(lambda function: recollect.checkpoint(function, leaf(3), early_stop=given))
    with dropin.set_checkpoint_early_stop(override):
        y.sum().backward()
    assert ended() is not given, "the backward's setting does not count"


def test_early_stop_overrides_nest_and_are_undone():
    def stops():
        y, ended = runs_to_its_end(lambda function: recollect.checkpoint(function, leaf(3)))
        y.sum().backward()
        return not ended()

    with dropin.set_checkpoint_early_stop(False):
        assert not stops()
        with dropin.set_checkpoint_early_stop(True):
            assert stops()
        assert not stops()
        with pytest.raises(ZeroDivisionError), dropin.set_checkpoint_early_stop(True):
            raise ZeroDivisionError
        assert not stops()
    assert stops()


def test_overrides_hold_for_remat():
    with dropin.set_checkpoint_early_stop(False), dropin.set_checkpoint_debug_enabled(True):
        y, ended = runs_to_its_end(lambda function: recollect.remat(function)(leaf(3)))
    y.sum().backward()
    assert ended()


def in_other_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_overrides_are_process_wide():
    make = lambda: runs_to_its_end(lambda function: recollect.checkpoint(function, leaf(3)))  # noqa: E731
    with dropin.set_checkpoint_early_stop(False):
        y, ended = in_other_thread(make)
    y.sum().backward()
    assert ended()

    with dropin.set_checkpoint_debug_enabled(True):
        message = in_other_thread(lambda: message_of_failure(recollect.checkpoint))
    assert DEBUG_NOTE in message


def test_a_thread_that_runs_already_sees_the_overrides():
    entered, made = threading.Event(), []

    def work():
        entered.wait(10)
        made.append(runs_to_its_end(lambda function: recollect.checkpoint(function, leaf(3))))

    thread = threading.Thread(target=work)
    thread.start()
    with dropin.set_checkpoint_early_stop(False):
        entered.set()
        thread.join()
    y, ended = made[0]
    y.sum().backward()
    assert ended()


# --- debug ---


@pytest.mark.parametrize(
    ("override", "given", "shown"),
    [
        (True, False, True),
        (True, True, True),
        (False, True, False),
        (False, False, False),
        (None, True, True),
        (None, False, False),
    ],
)
def test_debug_override(override, given, shown):
    with dropin.set_checkpoint_debug_enabled(override):
        message = message_of_failure(recollect.checkpoint, debug=given)
    assert (DEBUG_NOTE in message) is shown


def test_debug_override_is_read_in_the_forward():
    with dropin.set_checkpoint_debug_enabled(True):
        y = recollect.checkpoint(fails_in_replay, leaf(3), Once())
    with pytest.raises(recollect.CheckpointError, match=DEBUG_NOTE):
        y.sum().backward()

    y = recollect.checkpoint(fails_in_replay, leaf(3), Once())
    with dropin.set_checkpoint_debug_enabled(True), pytest.raises(recollect.CheckpointError) as info:
        y.sum().backward()
    assert DEBUG_NOTE not in str(info.value)


def test_debug_overrides_nest_and_are_undone():
    def shown():
        return DEBUG_NOTE in message_of_failure(recollect.checkpoint)

    with dropin.set_checkpoint_debug_enabled(True):
        assert shown()
        with dropin.set_checkpoint_debug_enabled(False):
            assert not shown()
            with dropin.set_checkpoint_debug_enabled(None):
                assert not shown()
        with dropin.set_checkpoint_debug_enabled(None):
            assert not shown(), "None leaves it to the argument, which is False"
        assert shown()
        with pytest.raises(ZeroDivisionError), dropin.set_checkpoint_debug_enabled(False):
            raise ZeroDivisionError
        assert shown()
    assert not shown()


def test_the_debug_override_does_not_concern_the_reentrant_variant():
    x = leaf(3)
    with dropin.set_checkpoint_debug_enabled(True):
        y = dropin.checkpoint(sin_exp, x, use_reentrant=True)
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])


# --- context_fn ---


def with_notes(**second):
    notes = []

    def context_fn():
        notes.append("context_fn")
        return Noting(notes, "forward"), Noting(notes, "replay", **second)

    return notes, context_fn


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
@pytest.mark.parametrize("early_stop", [True, False])
def test_context_fn_is_called_once_and_the_second_manager_entered_at_each_replay(run, early_stop):
    notes, context_fn = with_notes()

    def function(x):
        notes.append("function")
        return sin_exp(x)

    x = leaf(3)
    y = run(function, x, use_reentrant=False, context_fn=context_fn, early_stop=early_stop)
    once = ["enter replay", "function", "exit replay"]
    assert notes == ["context_fn", "enter forward", "function", "exit forward"]
    y.sum().backward(retain_graph=True)
    assert notes[4:] == once
    y.sum().backward()
    assert notes[4:] == once + once

    run(function, x, use_reentrant=False, context_fn=context_fn)
    assert notes[10:] == ["context_fn", "enter forward", "function", "exit forward"], "once per region call"


def test_the_replay_manager_is_inside_the_restored_rng_and_autocast():
    seen = []

    def look():
        seen.append((torch.get_rng_state(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    _, context_fn = with_notes(on_enter=look)
    torch.manual_seed(3)
    at_entry = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.float16):
        y = recollect.checkpoint(lambda x: torch.dropout(x.sin(), 0.5, True), leaf(8), context_fn=context_fn)
    torch.manual_seed(4)
    y.sum().backward()
    [(state, enabled, dtype)] = seen
    assert torch.equal(state, at_entry)
    assert enabled
    assert dtype is torch.float16


def test_numbers_drawn_by_both_managers_leave_the_function_its_own():
    notes, draw = [], lambda: torch.rand(3)

    def context_fn():
        return Noting(notes, "forward", on_enter=draw), Noting(notes, "replay", on_enter=draw)

    x, noises = leaf(3), []

    def function(x):
        noises.append(torch.rand(3))
        return (x * noises[-1]).sin()

    torch.manual_seed(1)
    y = recollect.checkpoint(function, x, context_fn=context_fn)
    torch.manual_seed(2)
    y.sum().backward()
    assert torch.equal(noises[0], noises[1])


class BoomError(Exception):
    pass


class BaseError(BaseException):
    pass


@pytest.mark.parametrize("kind", [BoomError, BaseError, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_exception_in_the_forward_reaches_the_first_manager_then_the_caller(kind):
    notes, error = [], kind("forward")
    first, second = Noting(notes, "forward"), Noting(notes, "replay")

    def function(x):
        x.sin()
        raise error

    with pytest.raises(kind) as info:
        recollect.checkpoint(function, leaf(3), context_fn=lambda: (first, second))
    assert info.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert first.error is error
    assert notes == ["enter forward", "exit forward"]
    assert hooks_in_force() is None


@pytest.mark.parametrize("kind", [BoomError, BaseError])
def test_a_first_manager_that_suppresses_is_an_error(kind):
    notes, error = [], kind("forward")

    def function(x):
        raise error

    def context_fn():
        return Noting(notes, "forward", suppress=True), Noting(notes, "replay")

    with pytest.raises(RuntimeError, match="context_fn suppressed") as info:
        recollect.checkpoint(function, leaf(3), context_fn=context_fn)
    assert info.value.__cause__ is error
    assert hooks_in_force() is None


def test_a_manager_that_raises_by_itself_is_not_mistaken_for_suppressing():
    error = BoomError("on leaving")

    @contextlib.contextmanager
    def raising():
        yield
        raise error

    with pytest.raises(BoomError) as info:
        recollect.checkpoint(sin_exp, leaf(3), context_fn=lambda: (raising(), contextlib.nullcontext()))
    assert info.value is error
    assert hooks_in_force() is None


def test_a_replay_manager_that_suppresses_everything_does_not_break_the_stop():
    x = leaf(3)
    y = recollect.checkpoint(
        sin_exp, x, context_fn=lambda: (contextlib.nullcontext(), contextlib.suppress(BaseException))
    )
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])


@pytest.mark.parametrize("kind", [BoomError, BaseError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("options", [{}, {"debug": True}, {"early_stop": False}])
@pytest.mark.parametrize("with_context", [True, False])
def test_exception_in_the_replay_leaves_backward_as_it_is(kind, options, with_context):
    first, error = Once(), kind("replay")

    def function(x):
        y = x.sin()
        if not first():
            raise error
        return y.exp()

    notes, context_fn = with_notes()
    chosen = {"context_fn": context_fn} if with_context else {}
    y = recollect.checkpoint(function, leaf(3), **options, **chosen)
    with pytest.raises(kind) as info:
        y.sum().backward()
    assert info.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert hooks_in_force() is None
    if with_context:
        assert notes[-2:] == ["enter replay", "exit replay"]


def test_the_replay_manager_gets_the_exception_of_the_replay():
    first, error, notes = Once(), BoomError("replay"), []
    manager = Noting(notes, "replay")

    def function(x):
        if not first():
            raise error
        return sin_exp(x)

    y = recollect.checkpoint(function, leaf(3), context_fn=lambda: (contextlib.nullcontext(), manager))
    with pytest.raises(BoomError):
        y.sum().backward()
    assert manager.error is error


# --- Dispatch modes in the contexts ---


def mixed(x):
    """Saves tensors that require grad, tensors that do not, inputs and outputs."""
    mask = torch.ones(3)
    y = (x * mask).sin().exp()
    return y.max(0).values * y.sum()


def packed_with_grad(function, *args):
    """How many tensors that require grad autograd asks hooks to pack."""
    packed = []

    def pack(tensor):
        packed.append(tensor.requires_grad)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*args)
    return sum(packed)


def own_operators(function, *args):
    """Those of the function itself: with grad, autograd would add its own detach for every output that it saves."""
    with torch.no_grad(), CountOperators() as seen:
        function(*args)
    return seen.names


@pytest.mark.parametrize("function", [sin_exp, mixed, lambda x: (x * torch.ones(3)).sum()])
def test_modes_see_the_functions_own_operators_and_one_detach_per_packed_tensor(function):
    x = leaf(3)
    plain = own_operators(function, x)
    forward, replay = CountOperators(), CountOperators()
    y = recollect.checkpoint(function, x, context_fn=lambda: (forward, replay), early_stop=False)
    assert forward.names == plain
    y.backward(torch.ones_like(y))
    assert forward.names == plain
    assert [name for name in replay.names if name != "detach"] == plain
    assert replay.names.count("detach") == packed_with_grad(function, x)


def test_modes_see_no_more_of_a_region_inside():
    def function(x):
        return recollect.checkpoint(sin_exp, x.cos()).sin()

    x = leaf(3)
    plain = own_operators(lambda x: sin_exp(x.cos()).sin(), x)
    forward, replay = CountOperators(), CountOperators()
    y = recollect.checkpoint(function, x, context_fn=lambda: (forward, replay), early_stop=False)
    y.sum().backward()
    assert forward.names == plain
    assert [name for name in replay.names if name != "detach"] == plain


def test_a_stopped_replay_shows_its_mode_no_operator_that_is_not_needed():
    forward, replay = CountOperators(), CountOperators()
    y = recollect.checkpoint(lambda x: x.sin().sin().sin(), leaf(3), context_fn=lambda: (forward, replay))
    y.sum().backward()
    assert forward.names == ["sin"] * 3
    assert [name for name in replay.names if name != "detach"] == ["sin"] * 2
    assert replay.names.count("detach") == 3


# --- Grad mode off ---


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_function_runs_plainly(run, mode):
    notes, context_fn = with_notes()
    hooks = []

    def function(x):
        hooks.append(hooks_in_force())
        return sin_exp(x)

    x = leaf(3)
    with mode():
        y = run(function, x, use_reentrant=False, context_fn=context_fn)
        assert torch.equal(y, sin_exp(x))
    assert not y.requires_grad
    assert notes == ["context_fn"], "called, and neither manager entered"
    assert hooks == [None]


def test_without_grad_options_are_still_checked():
    calls = []
    with torch.no_grad():
        with pytest.raises(ValueError, match="determinism_check"):
            recollect.checkpoint(calls.append, leaf(3), determinism_check="strict")
        with pytest.raises(TypeError, match="context_fn"):
            recollect.checkpoint(calls.append, leaf(3), context_fn=lambda: None)
        with pytest.raises(TypeError, match="function"):
            recollect.checkpoint(None, leaf(3))
    assert calls == []


def test_without_grad_an_exception_leaves_as_it_is():
    error = BoomError()

    def function(x):
        raise error

    with torch.no_grad(), pytest.raises(BoomError) as info:
        recollect.checkpoint(
            function, leaf(3), context_fn=lambda: (contextlib.suppress(BoomError), contextlib.nullcontext())
        )
    assert info.value is error
