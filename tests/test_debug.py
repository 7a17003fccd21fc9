"""`debug=True`: an error shows the first place where forward and replay part, then both lists of operators."""

import contextlib
import inspect
import os
import re

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

import recollect
from recollect import dropin
from tools import CountOperators, Once, leaf

NOTE = "You are seeing this error because you passed `debug=True` to checkpoint"
THIS_FILE = os.path.basename(__file__)


def line_of(function, text):
    """The number of the line of `function` that contains `text`."""
    lines, start = inspect.getsourcelines(function)
    [offset] = [offset for offset, line in enumerate(lines) if text in line]
    return start + offset


def message_of(function, *inputs, **options):
    # Under the native check the message begins with what the values show: see test_values.py.
    y = recollect.checkpoint(function, *inputs, **{"debug": True, "determinism_check": "default", **options})
    with pytest.raises(recollect.CheckpointError) as info:
        y.sum().backward()
    return str(info.value)


def saves_less(x, first):
    y = x.sin()
    if first():
        y = y.exp()
    return y * 1.0


def saves_more(x, first):
    y = x.sin()
    return y if first() else y.exp()


def other_shape(x, first):
    y = x if first() else x[:1]
    return y.sin()


CASES = [
    (saves_less, {}, "A different number of tensors was saved"),
    (saves_more, {"early_stop": False}, "trying to save more tensors during recomputation"),
    (other_shape, {}, "Recomputed values for the following tensors have different metadata"),
]


@pytest.mark.parametrize(("function", "options", "phrase"), CASES)
def test_the_error_comes_first_then_the_place_then_both_lists(function, options, phrase):
    message = message_of(function, leaf(3), Once(), **options)
    assert message.startswith(phrase)
    place = re.search("(?i)they part", message).start()
    assert message.count("\n", 0, place) < 12, "within a few lines"
    forward = re.search("(?i)operators of the forward", message).start()
    replay = re.search("(?i)operators of the replay", message).start()
    assert place < forward < replay
    assert NOTE in message


@pytest.mark.parametrize(("function", "options", "phrase"), CASES)
def test_without_debug_the_message_says_to_pass_it(function, options, phrase):
    message = message_of(function, leaf(3), Once(), debug=False, **options)
    assert message.startswith(phrase)
    assert "debug=True" in message
    assert NOTE not in message
    assert "aten" not in message


def before_the_lists(message):
    return message[: re.search("(?i)operators of the forward", message).start()]


def after(message, heading):
    return message[re.search(f"(?i){heading}", message).end() :]


def test_the_place_names_operator_and_line_of_both_passes():
    def function(x, first):
        y = x.sin().sin()
        z = y.exp() if first() else other(y)  # parts here
        return z.tanh().tanh()

    def other(y):
        return y * 2.0  # or here

    message = message_of(function, leaf(3), Once())
    summary = before_the_lists(message)
    assert "aten.exp" in summary
    assert "aten.mul" in summary
    assert "aten.tanh" not in summary
    assert "aten.sin" not in summary
    assert f"{THIS_FILE}:{line_of(function, '# parts here')}" in summary
    assert f"{THIS_FILE}:{line_of(other, '# or here')}" in summary
    assert summary.index("aten.exp") < summary.index("aten.mul"), "the forward first"
    assert re.search("(?i)first 2 operators are the same", summary)


def test_a_detach_of_the_function_itself_counts():
    """The replay detaches what it packs; that is ours and left out, while the user's own is not."""

    def function(x, first):
        y = x.sin()
        return y * (y.detach() if first() else 2.0)  # here

    summary = before_the_lists(message_of(function, leaf(3), Once()))
    assert "aten.detach" in summary
    assert "aten.mul" in summary
    assert summary.count(f"{THIS_FILE}:{line_of(function, '# here')}") == 2


def test_a_difference_in_shape_only_is_a_place_too():
    def function(x, first):
        y = torch.cat([x, x] if first() else [x])  # here
        return y.sin()

    summary = before_the_lists(message_of(function, leaf(3), Once()))
    assert "aten.cat" in summary
    assert "[6]" in summary
    assert "[3]" in summary
    assert summary.count(f"{THIS_FILE}:{line_of(function, '# here')}") == 2


def test_a_replay_that_ends_before_the_forward_says_so():
    def function(x, first):
        y = x.sin()
        return y.exp() if first() else y  # here

    summary = before_the_lists(message_of(function, leaf(3), Once()))
    assert "aten.exp" in summary
    assert f"{THIS_FILE}:{line_of(function, '# here')}" in summary
    assert re.search("(?i)replay.*no (further|more|other)", summary)


def test_a_replay_that_goes_on_after_the_forward_says_so():
    summary = before_the_lists(message_of(saves_more, leaf(3), Once(), early_stop=False))
    assert "aten.exp" in summary
    assert f"{THIS_FILE}:{line_of(saves_more, 'y.exp()')}" in summary
    assert re.search("(?i)forward.*no (further|more|other)", summary)


def test_both_lists_are_complete_and_in_order():
    message = message_of(saves_less, leaf(3), Once())
    forward = after(message, "operators of the forward")
    replay = after(message, "operators of the replay")
    forward = forward[: len(forward) - len(replay)]
    assert re.findall(r"aten\.(\w+)", forward) == ["sin", "exp", "mul"]
    assert [name for name in re.findall(r"aten\.(\w+)", replay) if name != "detach"] == ["sin", "mul"]
    assert f"{THIS_FILE}:{line_of(saves_less, 'x.sin()')}" in forward
    assert f"{THIS_FILE}:{line_of(saves_less, 'x.sin()')}" in replay
    assert f"{THIS_FILE}:{line_of(saves_less, 'y.exp()')}" in forward
    assert f"{THIS_FILE}:{line_of(saves_less, 'y.exp()')}" not in replay


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleDict({"up": torch.nn.Linear(3, 3)})
        self.first = Once()

    def forward(self, x):
        y = self.inner["up"](x)
        return y.exp().exp() if self.first() else y.sin()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x)  # the block's line


def test_module_paths_and_the_lines_that_lead_there():
    message = message_of(Block(), leaf(2, 3))
    summary, forward = before_the_lists(message), after(message, "operators of the forward")
    assert "mlp" in summary
    assert re.search(r"Block\S*mlp", summary)
    assert re.search(r"aten\.addmm.*Block\S*mlp\S*inner\S*up", forward)
    assert f"{THIS_FILE}:{line_of(Mlp.forward, 'y.exp().exp()')}" in summary
    assert f"{THIS_FILE}:{line_of(Block.forward, 'block' + chr(39) + 's line')}" in forward, "callers are listed too"


def test_library_frames_are_left_out():
    message = message_of(Block(), leaf(2, 3))
    torch_folder = os.path.dirname(torch.__file__) + os.sep
    own_folder = os.path.dirname(recollect.__file__) + os.sep
    traces = before_the_lists(message).split(NOTE)[-1] + after(message, "operators of the forward")
    assert torch_folder not in traces
    assert own_folder not in traces
    assert THIS_FILE in traces


def test_the_callers_of_the_region_are_left_out():
    """They are the same for all its operators, and in the replay there are others."""

    def an_unrelated_caller():
        return recollect.checkpoint(saves_less, leaf(3), Once(), debug=True)

    y = an_unrelated_caller()
    with pytest.raises(recollect.CheckpointError) as info:
        y.sum().backward()
    assert "an_unrelated_caller" not in str(info.value)


@pytest.mark.parametrize("run", [dropin.checkpoint, recollect.checkpoint])
def test_debug_works_with_a_context_fn(run):
    forward, replay = CountOperators(), CountOperators()
    y = run(saves_less, leaf(3), Once(), use_reentrant=False, debug=True, context_fn=lambda: (forward, replay))
    with pytest.raises(recollect.CheckpointError, match=NOTE) as info:
        y.sum().backward()
    assert "aten.exp" in str(info.value)
    assert forward.names == ["sin", "exp", "mul"], "and modes in it see what they see without debug"


def test_debug_with_a_plain_context():
    message = message_of(saves_less, leaf(3), Once(), context_fn=lambda: (contextlib.nullcontext(),) * 2)
    assert NOTE in message


def test_remat_takes_debug():
    y = recollect.remat(saves_less, debug=True)(leaf(3), Once())
    with pytest.raises(recollect.CheckpointError, match=NOTE):
        y.sum().backward()


def test_debug_changes_no_result():
    def function(x):
        return torch.dropout(x.sin().exp(), 0.5, True).sin()

    def gradient(**options):
        torch.manual_seed(1)
        x = leaf(16)
        recollect.checkpoint(function, x, **options).sum().backward()
        return x.grad

    assert torch.equal(gradient(debug=True), gradient(debug=False))


def test_debug_keeps_the_stop():
    ended = []

    def function(x):
        y = x.sin()
        ended.append(True)
        return y

    recollect.checkpoint(function, leaf(3), debug=True).sum().backward()
    assert len(ended) == 1


def modes_seen(**options):
    seen = []

    def function(x):
        seen.append(_get_current_dispatch_mode())
        return x.sin()

    recollect.checkpoint(function, leaf(3), determinism_check="default", **options).sum().backward()
    assert len(seen) == 2
    return [mode is not None for mode in seen]


def test_it_costs_no_mode_when_it_is_off():
    assert modes_seen() == [False, False]
    assert modes_seen(debug=False) == [False, False]
    assert modes_seen(debug=True) == [True, True], "so that this test can tell"


def test_the_override_decides():
    with dropin.set_checkpoint_debug_enabled(False):
        assert modes_seen(debug=True) == [False, False]
        assert NOTE not in message_of(saves_less, leaf(3), Once())
    with dropin.set_checkpoint_debug_enabled(True):
        assert modes_seen(debug=False) == [True, True]
        assert NOTE in message_of(saves_less, leaf(3), Once(), debug=False)


def test_debug_in_nested_regions_tells_of_the_one_that_differs():
    first = Once()

    def inner(x):
        return saves_less(x, first)

    def outer(x):
        return recollect.checkpoint(inner, x.cos(), debug=True).tanh()

    # The outer replay runs the inner region again, whose own forward then is the shorter path.
    y = recollect.checkpoint(outer, leaf(3), debug=True)
    with pytest.raises(recollect.CheckpointError, match=NOTE) as info:
        y.sum().backward()
    assert "inner" in str(info.value)


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_an_exception_in_the_forward_leaves_no_mode(kind):
    def function(x):
        x.sin()
        raise kind("forward")

    with pytest.raises(kind):
        recollect.checkpoint(function, leaf(3), debug=True)
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_an_exception_in_the_replay_leaves_no_mode(kind):
    first = Once()

    def function(x):
        y = x.sin()
        if not first():
            raise kind("replay")
        return y.exp()

    y = recollect.checkpoint(function, leaf(3), debug=True)
    with pytest.raises(kind):
        y.sum().backward()
    assert _get_current_dispatch_mode() is None


def test_an_exception_in_the_replay_alone_is_noted():
    first = Once()

    def function(x):
        y = x.sin() if first() else x.cos()
        if y[0] > 0.5:
            raise KeyError("replay")
        return y.exp()

    y = recollect.checkpoint(function, torch.zeros(3, requires_grad=True), debug=True)
    with pytest.raises(KeyError, match="replay") as info:
        y.sum().backward()
    [note] = info.value.__notes__
    assert "It was raised in a replay of the checkpointed region" in note
    assert "cos" in note


def test_other_errors_carry_the_operators_too():
    def changes_what_was_saved(x):
        y = x.exp()
        y.add_(1)
        return y.sin()

    message = message_of(changes_what_was_saved, leaf(3))
    assert NOTE in message
    assert "aten.exp" in message
    assert "aten.add_" in message
    without = message_of(changes_what_was_saved, leaf(3), debug=False)
    assert "Pass debug=True" in without
    assert NOTE not in without


def test_a_replay_that_ran_to_its_end_is_not_called_stopped():
    def changes_what_was_saved(x):
        y = x.exp()
        y.add_(1)
        return y.sin()

    assert "stopped early" not in message_of(changes_what_was_saved, leaf(3), early_stop=False)
    assert "stopped early" in message_of(changes_what_was_saved, leaf(3))
