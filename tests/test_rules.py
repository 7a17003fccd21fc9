"""The replay rules, one section each. Tests count what ran, in which order, and compare gradients bit for bit."""

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from recollect import CheckpointError, checkpoint
from recollect.dropin import set_checkpoint_early_stop
from tools import (
    FREED,
    IN_PLACE,
    CountOperators,
    Identity,
    ambient_state,
    assert_equal,
    garbage_collector_off,
    hooks_in_force,
    in_backward,
    leaf,
)

early_stops = pytest.mark.parametrize("early_stop", [True, False])


def plainly(function, *args, **kwargs):
    """`checkpoint` without the region, to run a program both ways."""
    for option in ("early_stop", "determinism_check", "debug", "preserve_rng_state"):
        kwargs.pop(option, None)
    return function(*args, **kwargs)


def both_ways(program, *leaves):
    """What `program(checkpoint, *leaves)` gives and the gradients, with regions and without: they must be equal."""
    results = []
    for call in (plainly, checkpoint):
        torch.manual_seed(0)
        result = program(call, *leaves)
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        total = sum(value.abs().sum() for value in outputs if value.requires_grad)
        results.append((outputs, torch.autograd.grad(total, leaves, allow_unused=True)))
    (expected, expected_grads), (outputs, grads) = results
    assert_equal(outputs, expected)
    assert_equal(grads, expected_grads)
    assert any(grad is not None for grad in grads)


def grad_of(result, *leaves, **options):
    return torch.autograd.grad(result.sum(), leaves, **options)


# --- 1. The innermost region owns a saved tensor ---


def test_rule_1_outer_regions_do_not_see_what_an_inner_one_saved():
    log = []

    def inner(x):
        log.append("inner")
        return x.exp().sin()

    def outer(x):
        log.append("outer")
        return checkpoint(inner, x)

    x = leaf(3)
    y = checkpoint(outer, x)
    log.clear()
    (grad,) = grad_of(y, x)
    # All that the outer region saved is the inner one's input: with that its replay stops, before the inner one runs.
    assert log == ["outer", "inner"]
    assert torch.equal(grad, grad_of(x.exp().sin(), x)[0])


def test_rule_1_hooks_that_the_function_pushes_win_over_the_regions():
    packed, unpacked, calls = [], [], []

    def pack(tensor):
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    def unpack(index):
        unpacked.append(index)
        return packed[index]

    def function(x):
        calls.append("function")
        with saved_tensors_hooks(pack, unpack):
            return x.exp().sin()

    x = leaf(3)
    y = checkpoint(function, x)
    (grad,) = grad_of(y, x)
    assert calls == ["function"], "the region saved nothing, so there is nothing to replay for"
    assert [torch.equal(one, x.exp()) for one in packed] == [True, True]
    assert sorted(unpacked) == [0, 1]
    assert torch.equal(grad, grad_of(x.exp().sin(), x)[0])


def test_rule_1_hooks_of_the_function_beside_saved_tensors_of_the_region():
    def program(call, x):
        def function(x):
            y = x.exp()
            with saved_tensors_hooks(lambda tensor: tensor * 1, lambda tensor: tensor):
                y = y.sin()
            return y.exp()

        return call(function, x)

    both_ways(program, leaf(3))


def test_rule_1_save_on_cpu_inside_a_region():
    def program(call, x):
        def function(x):
            with save_on_cpu():
                y = x.exp().sin()
            return y.cos()

        return call(function, x)

    both_ways(program, leaf(3))


def test_rule_1_hooks_around_the_call_see_exactly_the_inputs():
    packed, unpacked, calls = [], [], []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    def unpack(index):
        unpacked.append(index)
        return packed[index]

    def function(a, nested, *, c):
        calls.append(hooks_in_force()[0] is pack)
        return (a * nested["b"][0] * c).exp()

    a, b, c = leaf(3), torch.rand(3), leaf(3, seed=1)
    with saved_tensors_hooks(pack, unpack):
        y = checkpoint(function, a, {"b": [b]}, c=c)
    assert [any(one is given for given in (a, b, c)) for one in packed] == [True, True, True]
    assert len({id(one) for one in packed}) == 3
    assert calls == [False], "the region's own hooks are in force inside"
    assert unpacked == []
    grads = grad_of(y, a, c)
    assert sorted(unpacked) == [0, 1, 2]
    assert_equal(grads, grad_of((a * b * c).exp(), a, c))


@early_stops
def test_rule_1_save_on_cpu_around_a_region(early_stop):
    def program(call, x, w):
        with save_on_cpu():
            h = x * 2
            return call(lambda h, w: (h @ w).sin().exp(), h, w, early_stop=early_stop)

    both_ways(program, leaf(3, 3), leaf(3, 3, seed=1))


def test_rule_1_save_on_cpu_between_an_outer_and_an_inner_region():
    def program(call, x):
        def outer(x):
            y = x.exp()
            with save_on_cpu():
                y = call(lambda y: y.sin().exp(), y)
            return y.cos()

        return call(outer, x)

    both_ways(program, leaf(3))


def test_rule_1_without_saved_tensor_hooks_the_users_message_and_a_clean_state():
    before = ambient_state()
    x = leaf(3)
    with disable_saved_tensors_hooks("no hooks in this house"):
        with pytest.raises(RuntimeError, match="no hooks in this house"):
            checkpoint(torch.sin, x)
        assert hooks_in_force() is None
    assert ambient_state() == before
    assert torch.equal(grad_of(checkpoint(torch.sin, x), x)[0], x.cos())


def test_rule_1_without_saved_tensor_hooks_in_the_replay_the_users_message_and_a_clean_state():
    x = leaf(3)
    y = checkpoint(lambda x: x.sin().exp(), x)
    with disable_saved_tensors_hooks("not now"), pytest.raises(RuntimeError, match="not now"):
        grad_of(y, x, retain_graph=True)
    assert torch.equal(grad_of(y, x)[0], grad_of(x.sin().exp(), x)[0])


def test_rule_1_without_saved_tensor_hooks_for_an_inner_region():
    refusals = []

    def function(x):
        y = x.sin()
        try:
            with disable_saved_tensors_hooks("user"):
                y = checkpoint(torch.exp, y)
        except RuntimeError as error:
            refusals.append(str(error))
        return y.exp()

    x = leaf(3)
    # Already forbidden: torch refuses to forbid hooks while some are in force.
    (grad,) = grad_of(checkpoint(function, x), x)
    assert len(refusals) == 2
    assert torch.equal(grad, grad_of(x.sin().exp(), x)[0])


# --- 2. The inputs of an inner region are saved tensors of its parent ---


def nest(log, depth, *, around, early_stop=True):
    """`depth` functions, each a region that calls the next; `around` puts an operator after that call as well."""

    def level(k):
        def function(x):
            log.append(k)
            x = x.sin()
            if k + 1 < depth:
                x = checkpoint(level(k + 1), x, early_stop=early_stop)
            return x.exp() if around else x

        return function

    return level(0)


def plain_nest(x, depth, *, around):
    for _ in range(depth):
        x = x.sin()
    for _ in range(depth if around else 0):
        x = x.exp()
    return x


def test_rule_2_regions_around_replay_outermost_first_and_each_once():
    log, x = [], leaf(3)
    y = checkpoint(nest(log, 5, around=False), x)
    assert log == [0, 1, 2, 3, 4]
    log.clear()
    (grad,) = grad_of(y, x)
    assert log == [0, 1, 2, 3, 4], "every replay stops at the input of the next region"
    assert torch.equal(grad, grad_of(plain_nest(x, 5, around=False), x)[0])


def test_rule_2_the_exact_order_when_every_level_needs_its_end():
    log, x = [], leaf(3)
    y = checkpoint(nest(log, 4, around=True), x)
    assert log == [0, 1, 2, 3]
    log.clear()
    (grad,) = grad_of(y, x)
    # A replay of level k runs those inside it as forwards; each level is replayed for itself once.
    assert log == [0, 1, 2, 3, *[1, 2, 3], *[2, 3], 3]
    assert torch.equal(grad, grad_of(plain_nest(x, 4, around=True), x)[0])


def test_rule_2_the_exact_order_without_early_stop():
    log, x = [], leaf(3)
    y = checkpoint(nest(log, 4, around=False, early_stop=False), x, early_stop=False)
    log.clear()
    (grad,) = grad_of(y, x)
    assert log == [0, 1, 2, 3, *[1, 2, 3], *[2, 3], 3]
    assert torch.equal(grad, grad_of(plain_nest(x, 4, around=False), x)[0])


def test_rule_2_each_pass_replays_every_level_again():
    log, x = [], leaf(3)
    y = checkpoint(nest(log, 3, around=False), x)
    for _ in range(3):
        log.clear()
        grad_of(y, x, retain_graph=True)
        assert log == [0, 1, 2]


def test_rule_2_two_inner_regions_need_one_replay_of_their_parent():
    log = []

    def inner(name):
        def function(x):
            log.append(name)
            return x.sin().exp()

        return function

    def outer(x):
        log.append("outer")
        return checkpoint(inner("b"), checkpoint(inner("a"), x))

    x = leaf(3)
    y = checkpoint(outer, x)
    assert log == ["outer", "a", "b"]
    log.clear()
    (grad,) = grad_of(y, x)
    # The parent's replay runs a to get the input of b and stops there.
    assert log == ["outer", "a", "b", "a"]
    assert torch.equal(grad, grad_of(x.sin().exp().sin().exp(), x)[0])


def test_rule_2_the_same_function_in_two_regions_of_one_graph():
    calls = []

    def block(x):
        calls.append(in_backward())
        return x.sin().exp()

    x = leaf(3)
    (grad,) = grad_of(checkpoint(block, checkpoint(block, x)), x)
    assert calls == [False, False, True, True]
    assert torch.equal(grad, grad_of(x.sin().exp().sin().exp(), x)[0])


def test_rule_2_the_result_of_one_region_call_used_twice_is_replayed_once():
    calls = []

    def block(x):
        calls.append(in_backward())
        return x.sin().exp()

    x = leaf(3)
    y = checkpoint(block, x)
    (grad,) = grad_of(y * y.cos(), x)
    assert calls == [False, True]
    expected = x.sin().exp()
    assert torch.equal(grad, grad_of(expected * expected.cos(), x)[0])


@early_stops
def test_rule_2_a_region_that_calls_itself(early_stop):
    def program(call, x):
        def recursive(x, depth):
            x = x.sin()
            if depth:
                x = call(recursive, x, depth - 1, early_stop=early_stop)
            return x * x.exp()

        return call(recursive, x, 3, early_stop=early_stop)

    both_ways(program, leaf(3))


@early_stops
def test_rule_2_a_region_whose_replay_makes_the_same_region_and_its_backward_on_the_side(early_stop):
    sides = []

    def function(x):
        y = x.sin().exp()
        if in_backward() and not sides:
            sides.append(1)
            with saved_tensors_hooks(lambda one: one, lambda one: one):  # so that nothing is saved in the region
                side = leaf(3, seed=5)
                z = checkpoint(function, side, early_stop=early_stop)
                with torch.enable_grad():
                    (grad,) = grad_of(z, side)
                assert torch.equal(grad, grad_of(side.sin().exp().cos(), side)[0])
        return y.cos()

    x = leaf(3)
    (grad,) = grad_of(checkpoint(function, x, early_stop=early_stop), x)
    assert sides == [1]
    assert torch.equal(grad, grad_of(x.sin().exp().cos(), x)[0])


def test_rule_2_the_replay_gets_the_original_tensors():
    seen = []

    def function(x, h, extras, *, c):
        seen.append((x, h, extras["t"], c))
        return (x * h * extras["t"] * c).exp()

    x, c, t = leaf(3), leaf(3, seed=1), torch.rand(3)
    h = x * 2
    checkpoint(function, x, h, {"t": t}, c=c).sum().backward()
    assert len(seen) == 2
    for forward, replay in zip(*seen, strict=True):
        assert replay is forward
    assert h.grad_fn is not None


def test_rule_2_inner_replays_get_leaves_as_themselves():
    w, x, seen = leaf(3), leaf(3, seed=1), []

    def inner(h, w):
        seen.append(w)
        return (h * w).exp()

    checkpoint(lambda x: checkpoint(inner, x.sin(), w), x).sum().backward()
    assert len(seen) >= 2
    assert all(one is w for one in seen)


def test_rule_2_a_recovered_tensor_without_grad_is_the_very_object_of_the_replay():
    made, came_back = [], []

    def function(x):
        made.append(torch.rand(3))
        return Identity.apply(x, came_back, made[-1]).exp()

    checkpoint(function, leaf(3)).sum().backward()
    assert len(made) == 2
    assert came_back[0][0] is made[1]


def test_rule_2_an_inner_region_gets_the_very_object_that_its_parents_replay_saved():
    made, seen = [], []

    def inner(x, t):
        seen.append(t)
        return (x * t).exp()

    def outer(x):
        made.append(torch.full((3,), 2.0))
        return checkpoint(inner, x, made[-1])

    checkpoint(outer, leaf(3)).sum().backward()
    assert len(made) == 2
    assert [seen[0] is made[0], seen[-1] is made[1]] == [True, True]


def test_rule_2_a_recovered_tensor_with_grad_is_cut_off_from_the_replays_graph():
    came_back = []

    def function(x):
        return Identity.apply(x, came_back, x.sin()).exp()

    x = leaf(3)
    checkpoint(function, x).sum().backward(retain_graph=True)
    saved = came_back[0][0]
    assert torch.equal(saved, x.sin())


# --- 3. A replay starts as if no region were active ---


@early_stops
def test_rule_3_a_replay_inside_another_regions_forward_saves_nothing_there(early_stop):
    w, x, first = leaf(3), leaf(3, seed=1), [True]
    y = checkpoint(lambda w: w.sin().exp().sin(), w, early_stop=early_stop)

    def other(x):
        h = x.exp()
        if first and first.pop():
            y.sum().backward()
        return h.sin()

    # If y's replay had packed into this region, its own replay would find fewer tensors than its forward.
    z = checkpoint(other, x, early_stop=False)
    assert torch.equal(w.grad, grad_of(w.sin().exp().sin(), w)[0])
    assert torch.equal(grad_of(z, x)[0], grad_of(x.exp().sin(), x)[0])


def test_rule_3_hooks_around_the_backward_call_see_nothing_of_the_replay():
    packed, x = [], leaf(3)
    y = checkpoint(lambda x: x.sin().exp(), x)
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        (grad,) = grad_of(y, x)
    assert packed == []
    assert torch.equal(grad, grad_of(x.sin().exp(), x)[0])


def test_rule_3_regions_met_in_the_replay_count_as_usual():
    made, alive_later = [], []

    def inner(x):
        kept = torch.rand(3)  # dies with the inner region's forward, also in the replay of the outer one
        made.append(weakref.ref(kept))
        return Identity.apply(x, None, kept).exp()

    def outer(x):
        y = checkpoint(inner, x)
        alive_later.append(made[-1]() is not None)
        return y.sin()

    checkpoint(outer, leaf(3)).sum().backward()
    assert len(made) == 3
    assert alive_later == [False, False]


# --- 4. Recovered tensors belong to one backward pass ---


def test_rule_4_a_second_pass_replays_again():
    calls = []

    def function(x):
        calls.append(1)
        return x.sin().exp()

    x = leaf(3)
    y = checkpoint(function, x)
    grads = [grad_of(y, x, retain_graph=True)[0] for _ in range(3)]
    assert len(calls) == 4
    expected = grad_of(x.sin().exp(), x)[0]
    assert all(torch.equal(grad, expected) for grad in grads)


def test_rule_4_nothing_recovered_survives_the_pass_under_retain_graph():
    made = []

    def function(x):
        for _ in range(3):
            kept = torch.rand(3)
            made.append(weakref.ref(kept))
            x = Identity.apply(x, None, kept)
        return x.exp()

    with garbage_collector_off():
        y = checkpoint(function, leaf(3))
        assert [reference() for reference in made] == [None] * 3
        y.sum().backward(retain_graph=True)
        assert len(made) == 6
        assert [reference() for reference in made] == [None] * 6


def test_rule_4_each_is_dropped_as_soon_as_it_has_been_handed_over():
    made, alive = [], []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept = torch.rand(3)
            made.append(weakref.ref(kept))
            ctx.save_for_backward(kept)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            alive.append(sum(reference() is not None for reference in made))
            assert len(ctx.saved_tensors) == 1
            return grad

    def function(x):
        for _ in range(4):
            x = Watch.apply(x)
        return x

    with garbage_collector_off():
        x = leaf(3)
        checkpoint(lambda x: function(x).exp(), x).sum().backward(retain_graph=True)
    # Each backward sees its own and those of the nodes that come after it.
    assert alive == [4, 3, 2, 1]


def test_rule_4_what_a_partial_backward_leaves_is_dropped_at_its_end():
    made, calls = {}, []

    def function(a, b):
        calls.append(1)
        outputs = []
        for name, x in (("a", a), ("b", b)):
            kept = torch.rand(3)
            made[name] = weakref.ref(kept)
            outputs.append(Identity.apply(x, None, kept).exp())
        return outputs

    with garbage_collector_off():
        a, b = leaf(3), leaf(3, seed=1)
        x, y = checkpoint(function, a, b)
        grad_of(x, a, retain_graph=True)
        assert {name: reference() for name, reference in made.items()} == {"a": None, "b": None}
        assert torch.equal(grad_of(y, b)[0], b.exp())
        assert len(calls) == 3


def test_rule_4_what_a_failed_backward_leaves_is_dropped_too():
    made = []

    def function(x):
        kept = torch.rand(3)
        made.append(weakref.ref(kept))
        x = Identity.apply(x, None, kept)
        x.register_hook(fail)
        return x.exp()

    def fail(grad):
        raise ValueError("hook")

    with garbage_collector_off():
        y = checkpoint(function, leaf(3))
        try:
            y.sum().backward(retain_graph=True)
        except ValueError:
            pass
        assert len(made) == 2
        assert [reference() for reference in made] == [None, None]


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        return grad * (y + again) / 2


@early_stops
def test_rule_4_reading_saved_tensors_twice_is_an_error(early_stop):
    x = leaf(3)
    y = checkpoint(lambda x: ReadsTwice.apply(x).sin(), x, early_stop=early_stop)
    with pytest.raises(CheckpointError, match="Unpack is being triggered for a tensor that was already unpacked once"):
        grad_of(y, x)


def test_rule_4_disjoint_passes_replay_for_themselves():
    calls = []

    def function(a, b):
        calls.append(1)
        return a.sin().exp(), b.exp().sin()

    a, b = leaf(3), leaf(3, seed=1)
    x, y = checkpoint(function, a, b)
    assert torch.equal(grad_of(x, a)[0], grad_of(a.sin().exp(), a)[0])
    assert torch.equal(grad_of(y, b)[0], grad_of(b.exp().sin(), b)[0])
    assert len(calls) == 3


def test_rule_4_overlapping_passes():
    def program(call, x, w):
        shared, more = call(lambda x, w: ((h := (x * w).sin()).exp(), h.cos()), x, w)
        first = grad_of(shared, x, w, retain_graph=True)
        second = grad_of(more, x, w, retain_graph=True)
        return [*first, *second, (shared + more)]

    both_ways(program, leaf(3), leaf(3, seed=1))


@early_stops
def test_rule_4_a_pass_inside_another_over_the_same_region(early_stop):
    def program(call, x):
        inner_grads = []
        y = call(lambda x: x.sin().exp().sin().exp(), x, early_stop=early_stop)

        def once(grads):
            handle.remove()
            inner_grads.append(torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0])

        # Runs after the region was replayed for the outer pass, and before that pass has used all it recovered.
        handle = y.grad_fn.next_functions[0][0].register_prehook(once)
        outer_grads = grad_of(y, x, retain_graph=True)
        assert len(inner_grads) == 1
        return [*outer_grads, *inner_grads, y]

    both_ways(program, leaf(3))


def test_rule_4_a_pass_inside_another_gets_its_own_replay():
    calls, x = [], leaf(3)

    def function(x):
        calls.append(1)
        return x.sin().exp().sin().exp()

    y = checkpoint(function, x)

    def once(grads):
        handle.remove()
        torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)

    handle = y.grad_fn.next_functions[0][0].register_prehook(once)
    grad_of(y, x, retain_graph=True)
    assert len(calls) == 3


def test_rule_4_outside_of_any_backward_each_access_is_a_pass_of_its_own():
    calls = []

    def function(x):
        calls.append(1)
        return x.sin().exp()

    x = leaf(3)
    y = checkpoint(function, x)
    assert torch.equal(y.grad_fn._saved_result, x.sin().exp())
    assert torch.equal(y.grad_fn._saved_result, x.sin().exp())
    assert torch.equal(y.grad_fn.next_functions[0][0]._saved_self, x)
    assert len(calls) == 4
    assert torch.equal(grad_of(y, x)[0], grad_of(x.sin().exp(), x)[0])


def test_rule_4_an_access_outside_of_any_backward_keeps_nothing():
    made = []

    def function(x):
        for _ in range(3):
            kept = torch.rand(3)
            made.append(weakref.ref(kept))
            x = Identity.apply(x, None, kept)
        return x

    with garbage_collector_off():
        y = checkpoint(function, leaf(3))
        assert len(y.grad_fn.saved_tensors) == 1
        assert len(made) == 6
        assert [reference() for reference in made] == [None] * 6


def test_rule_4_an_access_outside_of_any_backward_reaches_through_nested_regions():
    log, x = [], leaf(3)
    y = checkpoint(nest(log, 3, around=False), x)
    log.clear()
    assert torch.equal(y.grad_fn._saved_self, x.sin().sin())
    assert log == [0, 1, 2]


def test_rule_4_an_access_outside_of_any_backward_is_one_pass_also_for_the_regions_around():
    log = []

    def inner(a, b):
        log.append("inner")
        return (a * b).exp()

    def outer(x):
        log.append("outer")
        return checkpoint(inner, x.sin(), x.cos())

    x = leaf(3)
    y = checkpoint(outer, x)
    log.clear()
    assert torch.equal(y.grad_fn._saved_result, (x.sin() * x.cos()).exp())
    assert log == ["outer", "inner"], "two inputs of the inner region, one replay of the outer one"


def test_rule_4_an_access_inside_the_unfinished_forward():
    def function(x):
        y = x.sin().exp()
        if not in_backward():
            assert torch.equal(y.grad_fn.next_functions[0][0]._saved_self, x)
        return y.cos()

    x, depth = leaf(3), []

    def guarded(x):
        # The replay of the access would otherwise make an access of its own.
        depth.append(1)
        return function(x) if len(depth) == 1 else x.sin().exp().cos()

    y = checkpoint(guarded, x)
    assert len(depth) == 2
    assert torch.equal(grad_of(y, x)[0], grad_of(x.sin().exp().cos(), x)[0])


# --- 5. Stop early ---


def test_rule_5_one_sin_in_forward_and_backward_together():
    x = leaf(3)
    with CountOperators() as operators:
        checkpoint(torch.sin, x).sum().backward()
    assert operators.counts["sin"] == 1
    assert torch.equal(x.grad, x.cos())


def test_rule_5_without_it_the_function_runs_to_its_end():
    x, ended = leaf(3), []

    def function(x):
        y = x.sin()
        ended.append(1)
        return y

    with CountOperators() as operators:
        checkpoint(function, x, early_stop=False).sum().backward()
    assert operators.counts["sin"] == 2
    assert len(ended) == 2


def test_rule_5_the_override_is_read_in_the_forward():
    x = leaf(3)
    with CountOperators() as operators:
        with set_checkpoint_early_stop(False):
            y = checkpoint(torch.sin, x)
        y.sum().backward()
    assert operators.counts["sin"] == 2
    y = checkpoint(torch.sin, x)
    with set_checkpoint_early_stop(False), CountOperators() as operators:
        y.sum().backward()
    assert operators.counts["sin"] == 0


def test_rule_5_a_mode_over_three_sin_sees_three_then_two_and_a_detach_per_packed_tensor():
    forward, replay = CountOperators(), CountOperators()
    y = checkpoint(lambda x: x.sin().sin().sin(), leaf(3), context_fn=lambda: (forward, replay))
    y.sum().backward()
    assert forward.names == ["sin"] * 3
    assert replay.counts == {"sin": 2, "detach": 3}


def test_rule_5_the_last_matmul_is_not_run_again():
    x, w, v = leaf(2, 3), leaf(3, 3, seed=1), leaf(3, 3, seed=2)
    forward, replay = CountOperators(), CountOperators()
    y = checkpoint(lambda x, w, v: (x @ w) @ v, x, w, v, context_fn=lambda: (forward, replay))
    grads = grad_of(y, x, w, v)
    assert (forward.counts["mm"], replay.counts["mm"]) == (2, 1)
    assert_equal(grads, grad_of((x @ w) @ v, x, w, v))


def test_rule_5_a_last_product_with_a_constant_mask_is_not_run_again():
    forward, replay = CountOperators(), CountOperators()
    x, mask = leaf(3), torch.tensor([1.0, 0.0, 1.0])
    y = checkpoint(lambda x, mask: x.sin() * mask, x, mask, context_fn=lambda: (forward, replay))
    (grad,) = grad_of(y, x)
    assert (forward.counts["mul"], replay.counts["mul"]) == (1, 0)
    assert torch.equal(grad, x.cos() * mask)


MASKS = {
    "held by a variable": lambda x: _times(x, (x > 0).float()),
    "held by nobody else": lambda x: x.sin() * (x > 0).float(),
    "on the left": lambda x: torch.ones(3) * x.sin(),
    "a view": lambda x: x.sin() * torch.ones(2, 3)[0],
    "dropout": lambda x: F.dropout(x.sin(), 0.5),
}


def _times(x, mask):
    return x.sin() * mask


@pytest.mark.parametrize("kind", MASKS)
def test_rule_5_a_last_product_with_a_mask_made_inside_is_not_run_again(kind):
    forward, replay = CountOperators(), CountOperators()
    both_ways(lambda call, x: call(MASKS[kind], x), leaf(3))
    x = leaf(3)
    grad_of(checkpoint(MASKS[kind], x, context_fn=lambda: (forward, replay)), x)
    assert (forward.counts["mul"], replay.counts["mul"]) == (1, 0)
    assert (forward.counts["sin"], replay.counts["sin"]) == (1, 1)


def test_rule_5_an_operator_that_saves_its_result_runs_again_and_nothing_after_it():
    forward, replay = CountOperators(), CountOperators()
    x = leaf(3)
    y = checkpoint(lambda x: (x.sin().exp() + 1).clone(), x, context_fn=lambda: (forward, replay))
    grad_of(y, x)
    assert forward.counts == {"sin": 1, "exp": 1, "add": 1, "clone": 1}
    assert replay.counts == {"sin": 1, "exp": 1, "detach": 2}


def test_rule_5_only_what_is_still_needed_counts():
    forward, replay = CountOperators(), CountOperators()

    def function(x):
        y = x.sin()
        return y.cos(), y.exp().tanh().sinh()

    x = leaf(3)
    kept, dropped = checkpoint(function, x, context_fn=lambda: (forward, replay))
    del dropped
    (grad,) = grad_of(kept, x)
    assert replay.counts == {"sin": 1, "detach": 2}
    assert torch.equal(grad, grad_of(x.sin().cos(), x)[0])


def test_rule_5_a_region_that_saved_nothing_is_never_replayed():
    calls = []

    def function(x):
        calls.append(1)
        return x * 2 + 1

    x = leaf(3)
    (grad,) = grad_of(checkpoint(function, x, early_stop=False), x)
    assert calls == [1]
    assert torch.equal(grad, torch.full((3,), 2.0))


RRELU = {
    "alone": lambda x: F.rrelu(x, training=True),
    "first": lambda x: F.rrelu(x, training=True).sin().exp(),
    "last": lambda x: F.rrelu(x.sin(), training=True),
    "last, times two": lambda x: F.rrelu(x.sin(), training=True) * 2,
    "middle": lambda x: F.rrelu(x.sin(), training=True).exp(),
    "twice": lambda x: F.rrelu(F.rrelu(x.sin(), training=True), training=True),
    "in place": lambda x: F.rrelu_(x * 2, training=True),
    "in place, in the middle": lambda x: F.rrelu_(x * 2, training=True).sin(),
    "module": lambda x: nn.RReLU(inplace=False).train()(x.cos()),
    "not training": lambda x: F.rrelu(x.sin()),
}


@early_stops
@pytest.mark.parametrize("position", RRELU)
def test_rule_5_noise_that_is_filled_after_packing(position, early_stop):
    function = RRELU[position]
    both_ways(lambda call, x: call(function, x, early_stop=early_stop), leaf(40))


@early_stops
def test_rule_5_noise_where_a_later_part_of_the_graph_has_died(early_stop):
    def program(call, x):
        y, dropped = call(lambda x: ((y := F.rrelu(x.sin(), training=True)), y.exp().sin()), x, early_stop=early_stop)
        del dropped
        return y

    both_ways(program, leaf(40))


def test_rule_5_noise_read_outside_of_any_backward():
    x = leaf(40)
    torch.manual_seed(0)
    expected = F.rrelu(x, training=True).grad_fn._saved_noise
    torch.manual_seed(0)
    y = checkpoint(lambda x: F.rrelu(x, training=True), x)
    assert torch.equal(y.grad_fn._saved_noise, expected)


def test_rule_5_except_exception_around_the_stop_does_not_set_off_the_fallback():
    fallbacks = []

    def function(x):
        try:
            return x.exp().sin()
        except Exception:
            fallbacks.append(1)
            return x.cos()

    x = leaf(3)
    (grad,) = grad_of(checkpoint(function, x), x)
    assert fallbacks == []
    assert torch.equal(grad, grad_of(x.exp().sin(), x)[0])


@pytest.mark.parametrize(
    "swallow", ["except BaseException", "bare except", "suppress", "__exit__", "return in finally"]
)
def test_rule_5_swallowing_the_stop_completes_the_replay(swallow):
    after = []

    class Swallow:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return True

    def function(x):
        y = x.exp()
        z = y
        if swallow == "except BaseException":
            try:
                z = y.sin()
            except BaseException:
                pass
        elif swallow == "bare except":
            try:
                z = y.sin()
            except:  # noqa: E722
                pass
        elif swallow == "suppress":
            with contextlib.suppress(BaseException):
                z = y.sin()
        elif swallow == "__exit__":
            with Swallow():
                z = y.sin()
        else:

            def run():
                try:
                    return y.sin()
                finally:
                    if in_backward():
                        return y  # noqa: B012

            z = run()
        after.append(in_backward())
        return z if not in_backward() else z.tanh().sinh().cosh()  # what is saved from here on is ignored

    x = leaf(3)
    (grad,) = grad_of(checkpoint(function, x), x)
    assert after == [False, True]
    assert torch.equal(grad, grad_of(x.exp().sin(), x)[0])


def test_rule_5_swallowing_the_stop_in_a_loop_of_attempts():
    attempts = []

    def function(x):
        for _ in range(3):
            try:
                attempts.append(in_backward())
                return x.exp().sin()
            except BaseException:
                continue
        return x

    x = leaf(3)
    (grad,) = grad_of(checkpoint(function, x), x)
    assert attempts[:2] == [False, True]
    assert torch.equal(grad, grad_of(x.exp().sin(), x)[0])


def test_rule_5_the_stop_turned_into_another_exception_still_counts():
    def function(x):
        try:
            return x.exp().sin()
        except BaseException as error:
            raise ValueError("translated") from error

    x = leaf(3)
    (grad,) = grad_of(checkpoint(function, x), x)
    assert torch.equal(grad, grad_of(x.exp().sin(), x)[0])


def test_rule_5_an_exception_before_the_stop_is_not_taken_for_it():
    def function(x):
        y = x.exp()
        if in_backward():
            raise ValueError("in the replay")
        return y.sin()

    x = leaf(3)
    with pytest.raises(ValueError, match="in the replay"):
        grad_of(checkpoint(function, x), x)


def test_rule_5_an_interrupt_after_a_swallowed_stop_is_not_lost():
    def function(x):
        with contextlib.suppress(BaseException):
            return x.exp().sin()
        raise KeyboardInterrupt

    x = leaf(3)
    with pytest.raises(KeyboardInterrupt):
        grad_of(checkpoint(function, x), x)


def test_rule_5_finally_blocks_and_context_managers_that_it_cuts_short_run():
    log = []

    @contextlib.contextmanager
    def manager(name):
        log.append(f"enter {name}")
        try:
            yield
        finally:
            log.append(f"leave {name}")

    def function(x):
        try:
            with manager("outer"), manager("inner"):
                return x.exp().sin()
        finally:
            log.append("finally")

    x = leaf(3)
    y = checkpoint(function, x)
    expected = ["enter outer", "enter inner", "leave inner", "leave outer", "finally"]
    assert log == expected
    log.clear()
    grad_of(y, x)
    assert log == expected


class Sin(nn.Module):
    def forward(self, x, scale=1.0):
        return (x * scale).sin()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Sin()

    def forward(self, x):
        return self.inner(x.exp(), scale=2.0)


def hooked_modules(log):
    """An outer and an inner module with always_call hooks of every kind, which write to `log`."""
    module = Outer()

    def hook(name):
        return lambda module, args, result: log.append((name, len(args), result is None))

    def hook_with_kwargs(name):
        return lambda module, args, kwargs, result: log.append((name, len(args), dict(kwargs), result is None))

    module.register_forward_hook(hook("outer"), always_call=True)
    module.inner.register_forward_hook(hook("inner"), always_call=True)
    module.inner.register_forward_hook(hook_with_kwargs("inner, kwargs"), always_call=True, with_kwargs=True)
    module.inner.register_forward_hook(lambda *_: log.append("only if it ended"))
    return module


def test_rule_5_always_call_hooks_that_it_cuts_short_run_once_innermost_first():
    log, x = [], leaf(3)
    module = hooked_modules(log)
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, args, result: log.append(("everywhere", type(module).__name__)), always_call=True
    )
    try:
        y = checkpoint(module, x)
        assert log == [
            ("everywhere", "Sin"),
            ("inner", 1, False),
            ("inner, kwargs", 1, {"scale": 2.0}, False),
            "only if it ended",
            ("everywhere", "Outer"),
            ("outer", 1, False),
        ]
        log.clear()
        (grad,) = grad_of(y, x)
    finally:
        everywhere.remove()
    assert log == [
        ("everywhere", "Sin"),
        ("inner", 1, True),
        ("inner, kwargs", 1, {"scale": 2.0}, True),
        ("everywhere", "Outer"),
        ("outer", 1, True),
    ]
    assert torch.equal(grad, grad_of(module(x), x)[0])


def test_rule_5_always_call_hooks_run_once_where_the_replay_ends_by_itself():
    log, x = [], leaf(3)
    y = checkpoint(hooked_modules(log), x, early_stop=False)
    expected = log.copy()
    log.clear()
    grad_of(y, x)
    assert log == expected


@pytest.mark.parametrize("how", ["swallowed", "translated"])
def test_rule_5_always_call_hooks_run_where_user_code_catches_the_stop(how):
    log, x = [], leaf(3)
    module = hooked_modules(log)

    def function(x):
        try:
            return module(x)
        except BaseException as error:
            if how == "translated":
                raise RuntimeError("translated") from error
            return x

    y = checkpoint(function, x)
    log.clear()
    (grad,) = grad_of(y, x)
    assert log == [("inner", 1, True), ("inner, kwargs", 1, {"scale": 2.0}, True), ("outer", 1, True)]
    assert torch.equal(grad, grad_of(Outer()(x), x)[0])


def test_rule_5_always_call_hooks_and_the_fallback_of_user_code_between_two_modules():
    log, fallbacks, x = [], [], leaf(3)
    inner = Sin()
    inner.register_forward_hook(lambda *_: log.append("inner"), always_call=True)

    class Careful(nn.Module):
        def forward(self, x):
            try:
                return inner(x.exp())
            except Exception:
                fallbacks.append(1)
                return x.cos()

    outer = Careful()
    outer.register_forward_hook(lambda *_: log.append("outer"), always_call=True)
    (grad,) = grad_of(checkpoint(outer, x), x)
    assert log == ["inner", "outer"] * 2
    assert fallbacks == []
    assert torch.equal(grad, grad_of(x.exp().sin(), x)[0])


def test_rule_5_always_call_hooks_of_a_module_that_a_hook_of_another_cuts_short():
    log, x = [], leaf(3)
    inner, outer = Sin(), Sin()
    inner.register_forward_hook(lambda *_: log.append("inner"), always_call=True)
    # The hook saves the last needed tensor, after the first always_call hook of its module has run.
    outer.register_forward_hook(lambda *_: log.append("first"), always_call=True)
    outer.register_forward_hook(lambda module, args, result: result.exp().sin())
    outer.register_forward_hook(lambda *_: log.append("last"), always_call=True)
    (grad,) = grad_of(checkpoint(lambda x: outer(inner(x)), x), x)
    assert log == ["inner", "first", "last"] * 2
    assert torch.equal(grad, grad_of(x.sin().sin().exp().sin(), x)[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@early_stops
def test_rule_5_the_stop_inside_torchscript(early_stop):
    @torch.jit.script
    def scripted(x):
        return x.exp().sin()

    def program(call, x):
        return call(lambda x: scripted(x.cos()), x, early_stop=early_stop)

    both_ways(program, leaf(3))
    both_ways(lambda call, x: call(lambda x: scripted(x).tanh(), x, early_stop=early_stop), leaf(3))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_rule_5_the_stop_inside_a_scripted_module_runs_hooks_around_it():
    log, x = [], leaf(3)

    class Scripted(nn.Module):
        def forward(self, x):
            return x.exp().sin()

    inner = torch.jit.script(Scripted())
    outer = nn.Sequential(inner)
    outer.register_forward_hook(lambda *_: log.append("outer"), always_call=True)
    (grad,) = grad_of(checkpoint(outer, x), x)
    assert log == ["outer", "outer"]
    assert torch.equal(grad, grad_of(x.exp().sin(), x)[0])


# --- 6. Backward inside a region ---


@early_stops
@pytest.mark.parametrize("retain_graph", [True, False])
def test_rule_6_grad_inside(early_stop, retain_graph):
    def program(call, x):
        def function(x):
            y = x.sin().exp()
            (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=retain_graph)
            # Without retain_graph what y needed is gone by now.
            return (grad * x).cos() + (y.cos() if retain_graph else 0)

        return call(function, x, early_stop=early_stop)

    both_ways(program, leaf(3))


@early_stops
def test_rule_6_grad_with_create_graph_inside(early_stop):
    def program(call, x):
        def function(x):
            y = x.sin().exp()
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return (grad * grad).sin() + y

        return call(function, x, early_stop=early_stop)

    both_ways(program, leaf(3))


@early_stops
def test_rule_6_backward_inside_to_a_leaf_made_inside(early_stop):
    def program(call, x):
        def function(x):
            z = x.detach().requires_grad_()
            z.sin().exp().sum().backward()
            return (x * z.grad).sin()

        return call(function, x, early_stop=early_stop)

    both_ways(program, leaf(3))


@early_stops
@pytest.mark.parametrize("retain_graph", [True, False])
def test_rule_6_grad_inside_an_inner_region(early_stop, retain_graph):
    def program(call, x):
        def inner(h):
            y = h.exp().sin()
            (grad,) = torch.autograd.grad(y.sum(), h, retain_graph=retain_graph)
            return (grad * h).tanh()

        def outer(x):
            return call(inner, x.cos(), early_stop=early_stop).exp()

        return call(outer, x, early_stop=early_stop)

    both_ways(program, leaf(3))


@early_stops
@pytest.mark.parametrize("retain_graph", [True, False])
def test_rule_6_grad_through_a_finished_inner_region_inside_the_outer_one(early_stop, retain_graph):
    def program(call, x):
        def outer(x):
            h = x.cos()
            y = call(lambda h: h.exp().sin(), h, early_stop=early_stop)
            (grad,) = torch.autograd.grad(y.sum(), h, retain_graph=retain_graph)
            return (grad * x).tanh() + (y if retain_graph else 0)

        return call(outer, x, early_stop=early_stop)

    both_ways(program, leaf(3))


@early_stops
def test_rule_6_several_grads_inside_one_after_the_other(early_stop):
    def program(call, x):
        def function(x):
            total = x
            for _ in range(3):  # gradient descent on the side
                y = (total * x).sin().exp()
                (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
                total = total - grad
            return total.exp()

        return call(function, x, early_stop=early_stop)

    both_ways(program, leaf(3))


@early_stops
def test_rule_6_saved_tensors_that_were_freed_inside_are_skipped(early_stop):
    calls = []

    def function(x):
        calls.append(1)
        y = x.sinh().exp()
        torch.autograd.grad(y.sum(), x)
        return x.cos()

    x = leaf(3)
    (grad,) = grad_of(checkpoint(function, x, early_stop=early_stop), x)
    assert len(calls) == 3, "the forward, the replay for the grad inside it, the replay for the grad after it"
    assert torch.equal(grad, -x.sin())


# --- 7. Memory (bytes and leftovers are counted in test_memory.py) ---


def test_rule_7_nothing_computed_inside_outlives_the_forward_but_the_outputs():
    made = []

    def function(x):
        for _ in range(3):
            x = x.exp()
            made.append(weakref.ref(x))
        made.pop()
        return x

    with garbage_collector_off():
        x = leaf(3)
        y = checkpoint(function, x)
        assert [reference() for reference in made] == [None, None]
        del y


def test_rule_7_a_graph_that_dies_without_backward_is_not_replayed():
    calls = []

    def function(x):
        calls.append(1)
        return x.sin().exp()

    x = leaf(3)
    y = checkpoint(function, x)
    del y
    gc.collect()
    assert calls == [1]


def test_rule_7_a_part_of_the_graph_that_is_not_asked_for_is_not_replayed():
    calls = []

    def function(name):
        def named(x):
            calls.append(name)
            return x.sin().exp()

        return named

    a, b = leaf(3), leaf(3, seed=1)
    y = checkpoint(function("a"), a) + checkpoint(function("b"), b)
    grad_of(y, a, retain_graph=True)
    assert calls == ["a", "b", "a"]


def test_rule_7_a_freed_graph_is_dropped_without_a_replay():
    made, calls = [], []

    def function(x):
        calls.append(1)
        y = x.exp()
        made.append(weakref.ref(y))
        return y.sin()

    with garbage_collector_off():
        x = leaf(3)
        y = checkpoint(function, x)
        y.sum().backward()
        assert len(calls) == 2
        assert [reference() for reference in made] == [None, None]
        assert y.grad_fn is not None


# --- 8. Mismatch is an error ---


def changing(*functions):
    """A function that does something else at each call."""
    remaining = list(functions)
    return lambda x: remaining.pop(0)(x)


@early_stops
def test_rule_8_fewer_saved_tensors(early_stop):
    x = leaf(3)
    y = checkpoint(changing(lambda x: x.sin().exp().sin(), lambda x: x.sin()), x, early_stop=early_stop)
    with pytest.raises(CheckpointError, match="A different number of tensors was saved") as caught:
        grad_of(y, x)
    assert isinstance(caught.value, RuntimeError)
    assert "3 in the forward, 1 in the replay" in str(caught.value)


@early_stops
def test_rule_8_no_saved_tensor_at_all(early_stop):
    x = leaf(3)
    y = checkpoint(changing(lambda x: x.sin(), lambda x: x + 1), x, early_stop=early_stop)
    with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
        grad_of(y, x)


def test_rule_8_more_saved_tensors_without_early_stop():
    x = leaf(3)
    y = checkpoint(changing(lambda x: x.sin(), lambda x: x.sin().exp()), x, early_stop=False)
    with pytest.raises(CheckpointError, match="trying to save more tensors during recomputation"):
        grad_of(y, x)


def test_rule_8_more_saved_tensors_after_an_early_stop_are_not_seen():
    x = leaf(3)
    y = checkpoint(changing(lambda x: x.sin(), lambda x: x.sin().exp()), x)
    assert torch.equal(grad_of(y, x)[0], x.cos())


OTHER_METADATA = {
    "shape": (lambda x: x.sin().exp(), lambda x: x[:2].sin().exp()),
    "dtype": (lambda x: x.sin().exp(), lambda x: x.double().sin().exp()),
    "device": (
        lambda x: Identity.apply(x, None, torch.zeros(2)),
        lambda x: Identity.apply(x, None, torch.zeros(2, device="meta")),
    ),
}


@early_stops
@pytest.mark.parametrize("what", OTHER_METADATA)
def test_rule_8_other_metadata(what, early_stop):
    x = leaf(3)
    y = checkpoint(changing(*OTHER_METADATA[what]), x, early_stop=early_stop)
    phrase = "Recomputed values for the following tensors have different metadata"
    with pytest.raises(CheckpointError, match=phrase) as caught:
        grad_of(y, x)
    then_and_now = {"shape": ("[3]", "[2]"), "dtype": ("float32", "float64"), "device": ("cpu", "meta")}[what]
    assert all(word in str(caught.value) for word in then_and_now)


def test_rule_8_other_metadata_passes_without_a_check():
    x, came_back = leaf(3), []
    functions = [
        lambda x: Identity.apply(x, came_back, torch.zeros(2)),
        lambda x: Identity.apply(x, came_back, torch.zeros(5)),
    ]
    grad_of(checkpoint(changing(*functions), x, determinism_check="none"), x)
    assert [tuple(saved.shape) for saved in came_back[0]] == [(5,)]


@early_stops
def test_rule_8_a_wrong_number_is_an_error_also_without_a_check(early_stop):
    x = leaf(3)
    function = changing(lambda x: x.sin().exp().sin(), lambda x: x.sin())
    y = checkpoint(function, x, early_stop=early_stop, determinism_check="none")
    with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
        grad_of(y, x)


def test_rule_8_after_a_mismatch_nothing_is_left_and_a_right_replay_works():
    def right(x):
        return x.sin().exp().sin()

    x = leaf(3)
    y = checkpoint(changing(right, lambda x: x.sin(), right), x)
    before = ambient_state()
    with pytest.raises(CheckpointError):
        grad_of(y, x, retain_graph=True)
    assert ambient_state() == before
    assert torch.equal(grad_of(y, x)[0], grad_of(right(x), x)[0])


def test_rule_8_a_mismatch_in_an_inner_region():
    inner = changing(lambda x: x.sin().exp(), lambda x: x.sin())
    x = leaf(3)
    y = checkpoint(lambda x: checkpoint(inner, x.cos()), x)
    with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
        grad_of(y, x)


# --- 9. Freed graphs stay freed; changed inputs are errors ---


@early_stops
def test_rule_9_a_second_backward_over_a_freed_graph_is_autograds_own_error(early_stop):
    calls = []

    def function(x):
        calls.append(1)
        return x.sin().exp()

    x = leaf(3)
    y = checkpoint(function, x, early_stop=early_stop)
    grad_of(y, x)
    with pytest.raises(RuntimeError, match=FREED) as caught:
        grad_of(y, x)
    assert not isinstance(caught.value, CheckpointError)
    assert len(calls) == 2


def test_rule_9_a_freed_graph_of_nested_regions():
    log, x = [], leaf(3)
    y = checkpoint(nest(log, 3, around=True), x)
    grad_of(y, x)
    log.clear()
    with pytest.raises(RuntimeError, match=FREED):
        grad_of(y, x)
    assert log == []


def test_rule_9_accessing_a_freed_saved_tensor_is_autograds_own_error():
    x = leaf(3)
    y = checkpoint(torch.exp, x)
    grad_of(y, x)
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = y.grad_fn._saved_result


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    others: list


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: tuple


class ModelOutput(OrderedDict):
    """As in transformers: an ordered dict whose entries are attributes too."""

    def __init__(self, **entries):
        super().__init__(entries)
        self.__dict__.update(entries)


class Interval(tuple):
    """A tuple that is not made from a sequence."""

    def __new__(cls, start, end):
        return super().__new__(cls, (start, end))


Pair = namedtuple("Pair", "first second")

# name of the changed input in the message, and the arguments with the tensor `t` at that place
PLACES = {
    "args[1]": lambda t: ((t,), {}),
    "args[1]['mask']": lambda t: (({"mask": t},), {}),
    "args[1][2]": lambda t: (([1, "text", t],), {}),
    "args[1][0][1]": lambda t: ((((None, t),),), {}),
    "args[1].ids": lambda t: ((Batch(t, []),), {}),
    "args[1].others[0]['deep']": lambda t: ((Batch(None, [{"deep": t}]),), {}),
    "args[1].values[1]": lambda t: ((Frozen((1, t)),), {}),
    "args[1][1]": lambda t: ((Pair(None, t),), {}),
    "args[1]['cached']": lambda t: ((defaultdict(list, cached=t),), {}),
    "args[1]['hidden']": lambda t: ((ModelOutput(hidden=t),), {}),
    "args[1][0]": lambda t: ((Interval(t, None),), {}),
    "args[1]['last'][0]": lambda t: ((OrderedDict(first=1, last=[t]),), {}),
    "mask": lambda t: ((), {"mask": t}),
    "masks[1]['x']": lambda t: ((), {"masks": [0, {"x": t}]}),
}


def find_in(value):
    """The tensor in arguments made by PLACES."""
    if isinstance(value, torch.Tensor):
        return value
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((found for found in map(find_in, value) if found is not None), None)
    return None


@early_stops
@pytest.mark.parametrize("place", PLACES)
def test_rule_9_an_input_that_the_user_changed_is_named(place, early_stop):
    x, t = leaf(3), torch.rand(3)
    args, kwargs = PLACES[place](t)

    def function(x, *args, **kwargs):
        # Plain autograd would not need t: the product is with a copy.
        return (x + find_in((args, kwargs))).exp()

    y = checkpoint(function, x, *args, early_stop=early_stop, **kwargs)
    t.add_(1)
    with pytest.raises(RuntimeError, match=IN_PLACE) as caught:
        grad_of(y, x)
    assert f" {place} " in str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_rule_9_an_input_that_the_region_itself_changed_is_named(place):
    x, t = leaf(3), torch.rand(3)
    args, kwargs = PLACES[place](t)

    def function(x, *args, **kwargs):
        return (x + find_in((args, kwargs)).add_(1)).exp()

    y = checkpoint(function, x, *args, **kwargs)
    with pytest.raises(RuntimeError, match=IN_PLACE) as caught:
        grad_of(y, x)
    assert f" {place} " in str(caught.value)
    assert "by the region itself" in str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_rule_9_inputs_at_any_depth_take_part(place):
    x, t = leaf(3), leaf(3, seed=1)

    def program(call, x, t):
        args, kwargs = PLACES[place](t.sin())
        return call(lambda x, *args, **kwargs: (x * find_in((args, kwargs))).exp(), x, *args, **kwargs)

    both_ways(program, x, t)


@early_stops
@pytest.mark.parametrize("place", PLACES)
def test_rule_9_inputs_of_an_inner_region_at_any_depth_take_part(place, early_stop):
    def program(call, x, t):
        def outer(x, t):
            args, kwargs = PLACES[place](t.sin())

            def inner(x, *args, **kwargs):
                return (x * find_in((args, kwargs))).exp()

            return call(inner, x, *args, early_stop=early_stop, **kwargs).cos()

        return call(outer, x, t, early_stop=early_stop)

    both_ways(program, leaf(3), leaf(3, seed=1))


@pytest.mark.parametrize("place", PLACES)
def test_rule_9_an_input_that_an_inner_region_itself_changed_is_named(place):
    def inner(x, *args, **kwargs):
        return (x + find_in((args, kwargs)).add_(1)).exp()

    def outer(x):
        args, kwargs = PLACES[place](torch.ones(3))
        return checkpoint(inner, x, *args, **kwargs)

    x = leaf(3)
    with pytest.raises(RuntimeError, match=IN_PLACE) as caught:
        grad_of(checkpoint(outer, x), x)
    assert f" {place} " in str(caught.value)


def test_rule_9_a_changed_leaf_is_an_error():
    x = leaf(3)
    y = checkpoint(lambda x: (x + 1).exp(), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        grad_of(y, x)


def test_rule_9_a_nonleaf_input_that_the_region_changed_is_an_error():
    x = leaf(3)
    y = checkpoint(lambda h: h.add_(1).exp(), x * 2)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        grad_of(y, x)


def test_rule_9_no_error_where_no_replay_is_needed():
    x, t = leaf(3), torch.rand(3)
    y = checkpoint(lambda x, t: (x + t) * 2, x, t)
    t.add_(1)
    assert torch.equal(grad_of(y, x)[0], torch.full((3,), 2.0))
    y = checkpoint(lambda h: h.mul_(2).add_(1), x * 2)
    assert torch.equal(grad_of(y, x)[0], torch.full((3,), 4.0))


def test_rule_9_no_error_where_the_part_that_needs_a_replay_has_died():
    x, t = leaf(3), torch.rand(3)
    kept, dropped = checkpoint(lambda x, t: (x + t, (x * t).exp()), x, t)
    del dropped
    t.add_(1)
    assert torch.equal(grad_of(kept, x)[0], torch.ones(3))


def test_rule_9_an_input_of_an_inner_region_changed_by_its_parent():
    x = leaf(3)

    def outer(x):
        t = torch.ones(3)
        y = checkpoint(lambda x, t: (x * t).exp(), x, t)
        t.add_(1)
        return (y * t).sin()

    with pytest.raises(RuntimeError, match=IN_PLACE):
        grad_of(checkpoint(outer, x), x)


def test_rule_9_an_input_of_an_inner_region_changed_by_that_region():
    x = leaf(3)

    def outer(x):
        t = torch.ones(3)
        return checkpoint(lambda x, t: (x * t.add_(1)).exp(), x, t).sin()

    with pytest.raises(RuntimeError, match=IN_PLACE):
        grad_of(checkpoint(outer, x), x)


@pytest.mark.parametrize("hooks", ["save_on_cpu", "identity"])
@pytest.mark.parametrize("kind", ["leaf", "not a leaf", "without grad"])
def test_rule_9_an_input_under_hooks_that_the_user_changed(hooks, kind):
    x = leaf(3)
    t = {"leaf": leaf(3, seed=1), "not a leaf": x * 2, "without grad": torch.rand(3)}[kind]
    with save_on_cpu() if hooks == "save_on_cpu" else saved_tensors_hooks(lambda one: one, lambda one: one):
        y = checkpoint(lambda x, t: (x * t).exp(), x, t)
    with torch.no_grad():
        t.add_(1)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        grad_of(y, x)


def test_rule_9_a_view_as_input():
    def program(call, x):
        h = x * 2
        return call(lambda one, two: (one * two).exp(), h[0], h[1:].t())

    both_ways(program, leaf(3, 2))


def test_rule_9_a_view_as_input_whose_base_was_changed():
    x = leaf(3)
    base = torch.rand(2, 3)
    y = checkpoint(lambda x, row: (x * row).exp(), x, base[0])
    base[1].add_(1)  # another row: the version belongs to the whole storage, as in autograd
    with pytest.raises(RuntimeError, match=IN_PLACE):
        grad_of(y, x)


def test_rule_9_one_tensor_in_two_places_stays_one():
    seen = []

    def function(a, b, inside):
        seen.append(a is b and inside[0] is a)
        return (a * b * inside[0]).exp()

    x = leaf(3)
    (grad,) = grad_of(checkpoint(function, x, x, [x]), x)
    assert seen == [True, True]
    assert torch.equal(grad, grad_of((x * x * x).exp(), x)[0])


def test_rule_9_inputs_that_share_memory():
    def program(call, x):
        h = x * 2
        return call(lambda h, view: (h * view[:, :1]).exp(), h, h.view(2, 3))

    both_ways(program, leaf(2, 3))


def test_rule_9_inputs_that_share_memory_one_of_them_changed():
    x, t = leaf(3), torch.rand(3)
    y = checkpoint(lambda x, one, other: (x * one * other).exp(), x, t, t.view(3, 1).squeeze(1))
    t.add_(1)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        grad_of(y, x)


def test_rule_9_an_input_that_is_returned_unchanged():
    x, t = leaf(3), torch.rand(3)
    same, y, t_again = checkpoint(lambda x, t: (x, x.sin().exp(), t), x, t)
    assert same is x
    assert t_again is t
    assert torch.equal(grad_of(y + same, x)[0], grad_of(x.sin().exp() + x, x)[0])


CONTAINERS = {
    "list": (list, lambda value: value),
    "list in a tuple": (lambda: ([],), lambda value: value[0]),
    "list in a dict": (lambda: {"cache": []}, lambda value: value["cache"]),
    "list in a dataclass": (lambda: Batch(None, []), lambda value: value.others),
    "list in a list": (lambda: [[]], lambda value: value[0]),
}


@pytest.mark.parametrize("with_tensor", [True, False])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_rule_9_containers_are_given_to_the_replay_as_they_were(kind, with_tensor):
    x, seen = leaf(3), []
    make, find = CONTAINERS[kind]
    container = make()
    if with_tensor:
        find(container).append(x * 2)

    def function(x, container):
        parts = find(container)
        seen.append(len(parts))
        parts.append(x.exp())
        return sum(parts).sin()

    y = checkpoint(function, x, container)
    assert len(find(container)) == with_tensor + 1, "the forward works on what it was given"
    (grad,) = grad_of(y, x)
    assert seen == [with_tensor, with_tensor]
    assert torch.equal(grad, grad_of(sum([x * 2, x.exp()] if with_tensor else [x.exp()]).sin(), x)[0])


SHARED = {
    "list twice": (lambda h: (container := [h], container), lambda one, other: (one, other)),
    "list and a tuple with it": (lambda h: (container := [h], (container,)), lambda one, other: (one, other[0])),
    "list and a dict with it": (
        lambda h: (container := [h], {"same": container}),
        lambda one, other: (one, other["same"]),
    ),
}


@pytest.mark.parametrize("kind", SHARED)
def test_rule_9_one_container_in_two_places_stays_one(kind):
    make, find = SHARED[kind]

    def function(x, one, other):
        one, same = find(one, other)
        one.append(x.exp())
        return same[-1].sin()

    x = leaf(3)
    one, other = make(x * 2)
    (grad,) = grad_of(checkpoint(function, x, one, other), x)
    assert torch.equal(grad, grad_of(x.exp().sin(), x)[0])


def test_rule_9_an_input_of_an_inner_region_changed_by_its_parent_never_gives_a_wrong_gradient():
    x = leaf(3)

    def outer(x):
        t = torch.ones(3)
        y = checkpoint(lambda x, t: (x * t).exp(), x, t)
        t.add_(1)  # after everything that the parent's replay is needed for
        return y

    y = checkpoint(outer, x)
    try:
        (grad,) = grad_of(y, x)
    except CheckpointError:
        grad = None  # a refusal is right too
    assert grad is None or torch.equal(grad, x.exp())


@early_stops
def test_rule_9_a_saved_tensor_changed_in_place_inside_is_refused_by_the_operators_name(early_stop):
    def function(x):
        y = x.exp()
        y.add_(1)
        return y.sin()

    x = leaf(3)
    with pytest.raises(RuntimeError, match=IN_PLACE):  # so does plain autograd
        grad_of(function(x), x)
    with pytest.raises(RuntimeError, match=IN_PLACE) as caught:
        grad_of(checkpoint(function, x, early_stop=early_stop), x)
    assert "ExpBackward" in str(caught.value)


@early_stops
def test_rule_9_a_saved_input_of_an_operator_changed_in_place_inside_is_refused(early_stop):
    def function(x):
        y = x * 2
        z = y.sin()
        y.mul_(3)
        return z * y.exp()

    x = leaf(3)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        grad_of(function(x), x)
    with pytest.raises(RuntimeError, match=IN_PLACE) as caught:
        grad_of(checkpoint(function, x, early_stop=early_stop), x)
    assert "SinBackward" in str(caught.value)


@early_stops
def test_rule_9_a_saved_tensor_without_grad_changed_in_place_inside_is_refused(early_stop):
    def function(x):
        t = torch.ones(3)
        y = x * t
        t.mul_(2)
        return y.exp()

    x = leaf(3)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        grad_of(function(x), x)
    with pytest.raises(RuntimeError, match=IN_PLACE) as caught:
        grad_of(checkpoint(function, x, early_stop=early_stop), x)
    assert "MulBackward" in str(caught.value)


@early_stops
def test_rule_9_a_tensor_changed_before_it_is_saved_or_never_saved_is_fine(early_stop):
    def program(call, x):
        def function(x):
            y = x * 2
            y.add_(1)
            z = y.sin()
            z.mul_(2)
            return z.relu_()

        return call(function, x, early_stop=early_stop)

    both_ways(program, leaf(3))


# --- 10. Everything that differentiates works ---


def test_rule_10_backward_and_backward_of_some_inputs():
    a, b = leaf(3), leaf(3, seed=1)
    y = checkpoint(lambda a, b: (a * b.sin()).exp(), a, b)
    y.sum().backward(inputs=[a], retain_graph=True)
    assert b.grad is None
    expected = grad_of((a * b.sin()).exp(), a, b)
    assert torch.equal(a.grad, expected[0])
    a.grad = None
    y.sum().backward()
    assert_equal((a.grad, b.grad), expected)


def test_rule_10_backward_to_something_inside_a_region():
    inside = []

    def function(x):
        h = x.sin()
        if not in_backward():
            inside.append(h)
        return h.exp()

    x = leaf(3)
    y = checkpoint(function, x)
    (grad,) = torch.autograd.grad(y.sum(), inside)
    assert torch.equal(grad, y)


@early_stops
def test_rule_10_double_backward(early_stop):
    def program(call, x):
        y = call(lambda x: x.sin().exp() * x, x, early_stop=early_stop)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (grad2,) = torch.autograd.grad(grad.sum(), x, create_graph=True)
        return [y, grad, grad2, (grad * grad2).sin()]

    both_ways(program, leaf(3))


@early_stops
def test_rule_10_double_backward_through_nested_regions(early_stop):
    def program(call, x):
        def outer(x):
            return call(lambda h: h.sin().exp(), x.cos(), early_stop=early_stop).tanh()

        y = call(outer, x, early_stop=early_stop)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return [y, grad, grad.exp()]

    both_ways(program, leaf(3))


@pytest.mark.parametrize("early_stop", [True, False])
def test_rule_10_gradgradcheck(early_stop):
    x, w = leaf(3, 2, dtype=torch.float64), leaf(2, 2, dtype=torch.float64, seed=1)

    def function(x, w):
        return checkpoint(lambda x, w: (x @ w).tanh().exp(), x, w, early_stop=early_stop)

    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))


def test_rule_10_forward_mode_in_the_forward():
    x, direction = leaf(3), torch.rand(3)

    def run(call):
        with forward_ad.dual_level():
            y = call(lambda x: x.sin().exp() * x, forward_ad.make_dual(x, direction))
            primal, tangent = forward_ad.unpack_dual(y)
            return primal, tangent, grad_of(primal, x, retain_graph=True)[0], grad_of(y, x)[0]

    primal, tangent, *grads = run(checkpoint)
    expected_primal, expected_tangent, *expected_grads = run(plainly)
    assert torch.equal(primal, expected_primal)
    assert torch.equal(tangent, expected_tangent)
    assert_equal(grads, expected_grads)


def test_rule_10_several_outputs_some_without_grad():
    def program(call, x):
        values, indices, size, none = call(lambda x: (*x.sin().exp().topk(2), len(x), None), x)
        assert (size, none) == (4, None)
        assert not indices.requires_grad
        return [values, indices]

    both_ways(program, leaf(4))


def test_rule_10_outputs_of_any_structure():
    x = leaf(3)
    result = checkpoint(lambda x: {"a": [x.sin(), (x.exp(),)], "b": Batch(x.cos(), ["text"]), "c": 3}, x)
    assert list(result) == ["a", "b", "c"]
    assert isinstance(result["b"], Batch)
    total = result["a"][0] + result["a"][1][0] + result["b"].ids
    assert torch.equal(grad_of(total, x)[0], grad_of(x.sin() + x.exp() + x.cos(), x)[0])


def test_rule_10_inputs_without_grad_and_weights_with():
    w, x = leaf(3, 3), torch.rand(2, 3)
    assert torch.equal(
        grad_of(checkpoint(lambda x: (x @ w).exp(), x), w)[0],
        grad_of((x @ w).exp(), w)[0],
    )


def test_rule_10_no_tensor_inputs_at_all():
    w, calls = leaf(3), []

    def function(scale=2.0):
        calls.append(scale)
        return (w * scale).exp()

    y = checkpoint(function, scale=3.0)
    assert torch.equal(grad_of(y, w)[0], grad_of((w * 3.0).exp(), w)[0])
    assert torch.equal(grad_of(checkpoint(function), w)[0], grad_of((w * 2.0).exp(), w)[0])
    assert calls == [3.0, 3.0, 2.0, 2.0]


def test_rule_10_nothing_that_needs_grad():
    calls = []
    y = checkpoint(lambda x: calls.append(1) or x.sin().exp(), torch.rand(3))
    assert not y.requires_grad
    assert calls == [1]


def test_rule_10_tensors_in_a_user_object():
    class Holder:
        def __init__(self, t):
            self.t = t

    def program(call, x):
        return call(lambda holder: (holder.t * 2).sin().exp(), Holder(x.cos()))

    both_ways(program, leaf(3))


@early_stops
def test_rule_10_tensors_in_a_user_object_given_to_an_inner_region(early_stop):
    class Holder:
        def __init__(self, t):
            self.t = t

    def program(call, x):
        def outer(x):
            return call(lambda holder: (holder.t * 2).sin().exp(), Holder(x.cos()), early_stop=early_stop).tanh()

        return call(outer, x, early_stop=early_stop)

    both_ways(program, leaf(3))


IN_PLACE_PROGRAMS = {
    "relu_ of a fresh tensor": lambda x: (x * 2).relu_().sin(),
    "chain": lambda x: (x * 1).add_(1).mul_(2).exp_(),
    "into a slice": lambda x: _set(torch.zeros(4, 3), x),
    "index_put_": lambda x: (x * 2).index_put_((torch.tensor([0]),), x[1]).exp(),
    "on a view": lambda x: _on_view(x * 2),
    "copy_": lambda x: torch.zeros(3, 3).copy_(x).sin(),
    "dropout in place": lambda x: F.dropout(x.exp() * 1, 0.5, training=True, inplace=True),
}


def _set(buffer, x):
    buffer[0] = x[0].sin()
    buffer[1:] = x.exp()
    return buffer.cos()


def _on_view(h):
    h[0].mul_(torch.tensor([2.0, 3.0, 4.0]))
    h.view(-1)[3:].zero_()
    return h.exp()


@early_stops
@pytest.mark.parametrize("name", IN_PLACE_PROGRAMS)
def test_rule_10_in_place_operators(name, early_stop):
    both_ways(lambda call, x: call(IN_PLACE_PROGRAMS[name], x, early_stop=early_stop), leaf(3, 3))


VIEW_PROGRAMS = {
    "view as output": lambda x: x.sin().view(-1),
    "views of one tensor as outputs": lambda x: tuple(x.sin().unbind(0)),
    "view of the input as output": lambda x: (x.t(), x.sin()),
    "chunks": lambda x: [one.exp() for one in x.sin().chunk(3)],
    "expand and transpose": lambda x: x.sin().unsqueeze(0).expand(2, 3, 3).transpose(0, 1).exp(),
    "as_strided": lambda x: x.sin().as_strided((2, 2), (1, 2)).exp(),
}


@early_stops
@pytest.mark.parametrize("name", VIEW_PROGRAMS)
def test_rule_10_views(name, early_stop):
    both_ways(lambda call, x: call(VIEW_PROGRAMS[name], x, early_stop=early_stop), leaf(3, 3))


def test_rule_10_an_output_changed_in_place_by_the_user():
    both_ways(lambda call, x: call(lambda x: x.sin(), x).mul_(2).exp(), leaf(3))


@early_stops
def test_rule_10_batch_norm_in_training(early_stop):
    results = []
    for call in (plainly, checkpoint):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(3), leaf(4, 3)
        y = call(lambda x, norm=norm: norm(x.sin()).exp(), x, early_stop=early_stop)
        results.append((y, torch.autograd.grad(y.cos().sum(), [x, *norm.parameters()])))
    assert_equal(results[1], results[0])


def test_rule_10_complex_tensors():
    x = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    both_ways(lambda call, x: call(lambda x: (x * x.conj() * 1j).exp().sin(), x).abs(), x)
    both_ways(lambda call, x: call(lambda x: torch.fft.fft(x.exp()).real, x), x)


def test_rule_10_integer_tensors():
    index = torch.tensor([2, 0, 1, 1])
    both_ways(lambda call, x: call(lambda x, index: x.sin()[index].exp(), x, index), leaf(3))
    both_ways(lambda call, x: call(lambda x, index: x.exp() * index[:3] ** 2, x, index), leaf(3))


def test_rule_10_zero_size_tensors():
    both_ways(lambda call, x: call(lambda x: x.sin().exp(), x), leaf(0, 3))
    both_ways(lambda call, x: call(lambda x: (x @ x.t()).exp(), x), leaf(3, 0))
    both_ways(lambda call, x: call(lambda x: x.sin().exp(), x), torch.tensor(1.0, requires_grad=True))


@early_stops
def test_rule_10_sparse_tensors(early_stop):
    matrix = torch.eye(3).to_sparse()

    def multiply(matrix, x):
        return torch.sparse.mm(matrix, x.sin()).exp()

    both_ways(lambda call, x: call(multiply, matrix, x, early_stop=early_stop), leaf(3, 2))

    def scatter(values, x):
        indices = torch.tensor([[0, 1, 2], [2, 0, 1]])
        made = torch.sparse_coo_tensor(indices, values.exp(), (3, 3), check_invariants=True)
        return torch.sparse.mm(made, x).sin()

    both_ways(lambda call, values, x: call(scatter, values, x, early_stop=early_stop), leaf(3), leaf(3, 2, seed=1))


def test_rule_10_a_sparse_gradient():
    table, ids = leaf(5, 2), torch.tensor([1, 3, 1])
    grads = []
    for call in (plainly, checkpoint):
        y = call(lambda ids: F.embedding(ids, table, sparse=True).exp(), ids)
        grads.append(torch.autograd.grad(y.sum(), table)[0])
    assert grads[1].is_sparse
    assert torch.equal(grads[1].to_dense(), grads[0].to_dense())


def test_rule_10_meta_tensors():
    x = torch.empty(3, 2, device="meta", requires_grad=True)
    w = torch.empty(2, 4, device="meta", requires_grad=True)
    calls = []

    def function(x, w):
        calls.append(1)
        return (x @ w).exp().sin()

    grads = grad_of(checkpoint(function, x, w), x, w)
    assert [(grad.device.type, tuple(grad.shape)) for grad in grads] == [("meta", (3, 2)), ("meta", (2, 4))]
    assert len(calls) == 2


@early_stops
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("nested_regions", [False, True])
def test_rule_10_nested_tensors(layout, early_stop, nested_regions):
    def program(call, a, b):
        def function(t):
            h = torch.relu(t * 2) if layout == torch.strided else t.sin().exp()
            if nested_regions:
                h = call(lambda h: h * h * 3, h, early_stop=early_stop)
            return h * h

        t = torch.nested.as_nested_tensor([a, b], layout=layout)
        return torch.cat([part.reshape(-1) for part in call(function, t, early_stop=early_stop).unbind()])

    both_ways(program, leaf(2, 3), leaf(4, 3, seed=1))


def test_rule_10_nested_tensors_made_anew_in_the_replay():
    def strided(a, b):
        t = torch.nested.as_nested_tensor([a.sin(), b.sin()], layout=torch.strided)
        return torch.cat([part.reshape(-1) for part in (t * t * t).unbind()]).exp()

    both_ways(lambda call, a, b: call(strided, a, b), leaf(2, 3), leaf(4, 3, seed=1))

    def jagged(values, offsets):
        t = torch.nested.nested_tensor_from_jagged(values.sin(), offsets)
        return (t * t * t).exp().values()

    # The ragged dimension is known by its offsets: they come from outside, or it would be another one in the replay.
    both_ways(lambda call, values: call(jagged, values, torch.tensor([0, 2, 6])), leaf(6, 3))


class Logging(torch.Tensor):
    """Writes down every function that is called with it."""

    log = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.log.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_rule_10_a_logging_subclass_and_nothing_of_ours_in_its_log():
    def run(call, early_stop=True):
        x = leaf(3).detach().as_subclass(Logging).requires_grad_()
        Logging.log.clear()
        seen = []

        def function(x):
            seen.append(type(x))
            return x.sin().exp()

        y = call(function, x, early_stop=early_stop)
        in_forward = list(Logging.log)
        Logging.log.clear()
        (grad,) = torch.autograd.grad(y, x, torch.ones(3))
        in_backward_pass = [name for name in Logging.log if name in ("sin", "exp", "detach", "__get__")]
        return y.as_subclass(torch.Tensor), grad.as_subclass(torch.Tensor), type(y), seen, in_forward, in_backward_pass

    y, grad, kind, seen, in_forward, in_replay = run(checkpoint, early_stop=False)
    expected_y, expected_grad, expected_kind, _, expected_in_forward, _ = run(plainly)
    assert torch.equal(y, expected_y)
    assert torch.equal(grad, expected_grad)
    assert kind is expected_kind is Logging
    assert seen == [Logging, Logging]
    assert in_forward == expected_in_forward
    assert [name for name in in_replay if name in ("sin", "exp")] == ["sin", "exp"]


class Wrapper(torch.Tensor):
    """A wrapper subclass: a tensor inside, every operator unwrapped, run and wrapped again."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self, **_):
        return f"Wrapper({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, Wrapper) else value

        def wrap(value):
            return Wrapper(value) if isinstance(value, torch.Tensor) else value

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


@early_stops
@pytest.mark.parametrize("nested", [False, True])
def test_rule_10_a_wrapper_subclass(early_stop, nested):
    def run(call):
        x = Wrapper(leaf(3).detach()).requires_grad_()
        seen = []

        def block(x):
            seen.append(type(x))
            return (x.sin().exp() * x).cos()

        def function(x):
            return call(block, x.tanh(), early_stop=early_stop).exp() if nested else block(x)

        y = call(function, x, early_stop=early_stop)
        y.backward(Wrapper(torch.ones(3)))
        return y.inner, x.grad.inner, seen

    y, grad, seen = run(checkpoint)
    expected_y, expected_grad, _ = run(plainly)
    assert torch.equal(y.detach(), expected_y.detach())
    assert torch.equal(grad, expected_grad)
    assert set(seen) == {Wrapper}


def test_rule_10_under_a_users_dispatch_mode():
    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.ops.aten.sin.default else result

    def run(call, x):
        with Doubling():
            y = call(lambda x: x.sin().exp(), x)
            return [y, *grad_of(y, x)]

    x = leaf(3)
    assert_equal(run(checkpoint, x), run(plainly, x))


def test_rule_10_gradients_of_parameters_through_hooks_on_tensors():
    def program(call, x):
        seen = []

        def function(x):
            h = x.sin()
            h.register_hook(lambda grad: grad * 2)
            return h.exp()

        y = call(function, x)
        y.register_hook(lambda grad: seen.append(grad.clone()) or grad * 3)
        return y

    both_ways(program, leaf(3))


def test_rule_10_anomaly_mode():
    with torch.autograd.set_detect_anomaly(True):
        both_ways(lambda call, x: call(lambda x: call(torch.exp, x.sin()).cos(), x), leaf(3))


def test_rule_10_an_optimizer_step_between_two_steps():
    def step(x, model, call):
        return call(model[1:], call(model[0], x))

    weights = []
    for call in (plainly, checkpoint):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            call(step, torch.ones(2, 3), model, call).sum().backward()
            optimizer.step()
        weights.append(list(model.parameters()))
    assert_equal(weights[1], weights[0])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("inner", ["ours", "stock", "stock, reentrant"])
@pytest.mark.parametrize("outer", ["ours", "stock", "stock, reentrant"])
def test_rule_10_regions_of_ours_and_of_stock_pytorch_in_each_other(outer, inner):
    regions = {
        "ours": checkpoint,
        "stock": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        "stock, reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    }

    def run(outer, inner):
        torch.manual_seed(0)
        x = leaf(8)
        outer(lambda x: inner(lambda h: F.dropout(h.exp(), 0.5).sin(), x.cos()).tanh(), x).sum().backward()
        return x.grad

    assert torch.equal(run(regions[outer], regions[inner]), run(plainly, plainly))


def test_rule_10_batched_gradients():
    both = []
    for call in (plainly, checkpoint):
        x = leaf(3)
        y = call(lambda x: x.sin().exp(), x)
        both.append(torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True))
    assert_equal(both[1], both[0])


# --- Inputs of inner regions keep their place in the graph, and hooks around a region are believed ---


@pytest.mark.parametrize("around", ["a region", "hooks that copy"])
def test_rule_2_inner_inputs_are_connected_to_each_other(around):
    """One argument was computed from another: a gradient between them must be found in the replay too."""

    def inner(h, x):
        (g,) = torch.autograd.grad((h.sin() * h).sum(), x, create_graph=True)
        return (g * h).sin()

    def program(call, x):
        if around == "a region":
            return call(lambda x: call(inner, x.tanh().exp(), x), x)
        with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return call(inner, x.tanh().exp(), x)

    x = leaf(3)
    both_ways(program, x)


def test_rule_1_hooks_around_a_region_may_change_what_they_give_back():
    x = leaf(3)
    with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t * 2):
        y = checkpoint(lambda x: x.sin(), x, determinism_check="default")
    assert torch.equal(grad_of(y, x)[0], (2 * x).cos())


@pytest.mark.parametrize("kind", [lambda h: defaultdict(int, a=h), lambda h: type("Mine", (dict,), {})(a=h)])
def test_rule_9_containers_that_are_left_alone_are_watched_in_inner_regions_too(kind):
    def outer(x):
        h = x.tanh() * 1.0
        y = checkpoint(lambda d: d["a"].sin().exp(), kind(h))
        with torch.no_grad():
            h.mul_(2.0)
        return y

    x = leaf(3)
    with pytest.raises(CheckpointError, match=rf"args\[0\]\['a'\].*|{IN_PLACE}"):
        grad_of(checkpoint(outer, x), x)


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: F.layer_norm(x, (3,)),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1])),
        lambda x: F.cosine_similarity(x, torch.ones(2, 3)),
        lambda x: x * torch.ones(2, 3),
    ],
)
def test_rule_5_an_operator_that_saves_its_results_is_the_last_to_run(operator):
    after = []

    def function(x):
        y = operator(x)
        after.append(1)
        return y

    x = leaf(2, 3)
    y = checkpoint(function, x)
    grad_of(y, x)
    assert len(after) == 1


@early_stops
def test_rule_5_noise_that_the_function_holds_itself(early_stop):
    def function(x):
        noise = torch.full_like(x, 7.0)
        return torch.ops.aten.rrelu_with_noise(x, noise, 0.125, 0.333, True)

    both_ways(lambda call, x: call(function, x, early_stop=early_stop), leaf(20))


@pytest.mark.parametrize(
    ("forward", "replay", "phrase", "early_stop"),
    [
        (lambda x: x.sin().exp().sin(), lambda x: x[:1].sin(), "A different number of tensors was saved", True),
        (lambda x: x.sin(), lambda x: x[:1].sin().exp().sin(), "trying to save more tensors during", False),
    ],
)
def test_rule_8_another_number_and_other_shapes_say_both(forward, replay, phrase, early_stop):
    calls = []

    def function(x):
        calls.append(1)
        return (forward if len(calls) == 1 else replay)(x)

    x = leaf(3)
    y = checkpoint(function, x, early_stop=early_stop)
    with pytest.raises(CheckpointError, match=phrase) as info:
        grad_of(y, x)
    assert "have different metadata" in str(info.value)


# --- Found by random programs and by a review ---


@pytest.mark.parametrize("debug", [False, True])
def test_rule_5_inputs_of_an_inner_region_are_not_taken_for_unfilled_memory(debug):
    calls = []

    def inner(m, h):
        calls.append(1)
        return (m * h).sin().exp()

    x = leaf(3)
    y = checkpoint(lambda x, m: checkpoint(inner, m, x.sin()), x, torch.ones(3), debug=debug)
    grad_of(y, x)
    assert len(calls) == 2, "one forward and one replay: the outer replay stops at the inner region's inputs"


def test_rule_6_memory_that_is_reused_after_a_backward_inside():
    def function(x):
        y = x.exp()
        (g,) = torch.autograd.grad(y.sum(), x)
        with torch.no_grad():
            y.zero_()
        return (x * g).sin()

    both_ways(lambda call, x: call(function, x, early_stop=False), leaf(3))


def test_rule_7_a_forward_that_raises_after_changing_its_input_leaves_nothing():
    class Payload:
        pass

    def function(h, payload):
        h.exp_()
        raise ValueError

    with garbage_collector_off():
        payload = Payload()
        alive = weakref.ref(payload)
        h = leaf(3) * 2
        with contextlib.suppress(ValueError):
            checkpoint(function, h, payload)
        del h, payload
        assert alive() is None


def test_rule_7_anomaly_mode_inside_a_region_leaves_nothing():
    class Payload:
        pass

    def function(x, payload):
        a = x.sin()
        b = a.tanh()
        with torch.autograd.set_detect_anomaly(True):
            (g,) = torch.autograd.grad(b.sum(), a, create_graph=True)
            torch.autograd.grad(g.sum(), b, retain_graph=True)
        return a.clone()

    with garbage_collector_off():
        payload = Payload()
        alive = weakref.ref(payload)
        y = checkpoint(function, leaf(3), payload)
        del y, payload
        assert alive() is None


def test_rule_10_hooks_that_give_values_back_in_another_order_of_memory():
    """Dropout draws in the order of memory."""

    def program(call, x):
        with saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
            return call(lambda x: torch.dropout(x, 0.5, True).sin(), x.t())

    both_ways(program, leaf(3, 5))


def test_rule_10_an_inference_tensor_as_argument_of_an_inner_region():
    with torch.inference_mode():
        t = torch.ones(3)

    def program(call, x):
        return call(lambda x, t: call(lambda h, t: (h + t).sin().exp(), x.cos(), t), x, t)

    both_ways(program, leaf(3))


def test_rule_8_a_function_with_any_attribute_can_be_named():
    from unittest import mock

    x = leaf(3)
    y = checkpoint(mock.Mock(side_effect=lambda x: x.sin().exp()), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(CheckpointError, match=IN_PLACE):
        grad_of(y, x)


def test_rule_9_names_are_made_for_errors_only_and_shared_containers_are_entered_once():
    class Key:
        def __repr__(self):
            raise AssertionError("not to be asked")

    nest = [leaf(3)]
    for _ in range(60):
        nest = [nest, nest]
    x = leaf(3)
    y = checkpoint(lambda x, nest, d: x.sin().exp(), x, nest, {Key(): x})
    assert torch.equal(grad_of(y, x)[0], x.sin().exp() * x.cos())


def test_rule_2_the_place_in_the_graph_also_where_torch_has_no_saved_tensors_of_their_own(monkeypatch):
    """PyTorch 2.11: a node is made that saves the tensor."""
    monkeypatch.setattr("recollect._torch._make_saved_tensor", None)
    modes = CountOperators(), CountOperators()

    def inner(h, x):
        (g,) = torch.autograd.grad((h.sin() * h).sum(), x, create_graph=True)
        return (g * h).sin()

    both_ways(lambda call, x: call(lambda x: call(inner, x.tanh().exp(), x), x), leaf(3))
    y = checkpoint(lambda x: checkpoint(lambda h: h.exp(), x.sin()), leaf(3), context_fn=lambda: modes)
    assert modes[0].counts == {"sin": 1, "exp": 1}
    y.sum().backward()


def view_without_grad(x):
    with torch.no_grad():
        return x[:]


@pytest.mark.parametrize("check", ["first", "default"])
@pytest.mark.parametrize("make", [view_without_grad, lambda x: view_without_grad(x).requires_grad_()], ids=["", "leaf"])
def test_rule_2_a_view_made_without_grad_as_input_of_an_inner_region(make, check):
    """It says that it needs grad, because its base does, and operators pass it over."""

    def program(call, x):
        seen = []

        def inner(view, x):
            seen.append((view.requires_grad, view.is_leaf))
            return (x.tanh() * view).sin()  # a product saves one of its operands if only the other needs grad

        def outer(x):
            return call(inner, make(x), x, determinism_check=check)

        y = call(outer, x.exp(), determinism_check=check)
        (grad,) = grad_of(y, x, retain_graph=True)
        assert set(seen) == {(True, True)}
        return y, grad

    both_ways(program, leaf(3))


class InUnits(torch.Tensor):
    """Has an attribute, which it hands on, and operators of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        units = [value.units for value in args if isinstance(value, InUnits) and hasattr(value, "units")]
        if isinstance(result, InUnits) and units:
            result.units = units[0]
        return result

    def rotate(self):
        return self.sin() * self.units


@pytest.mark.parametrize("check", ["first", "default"])
def test_rule_10_a_subclass_with_operators_of_its_own_as_input_of_an_inner_region(check):
    def program(call, x):
        def function(x):
            def inner(x):
                assert type(x) is InUnits
                return x.rotate().exp().exp()

            return call(inner, x.tanh(), determinism_check=check)

        given = x.exp().as_subclass(InUnits)
        given.units = 3
        return call(function, given, determinism_check=check).as_subclass(torch.Tensor)

    both_ways(program, leaf(3))


@pytest.mark.parametrize("kind", [Logging, Wrapper])
def test_rule_2_a_view_of_a_subclass_made_without_grad_as_input_of_an_inner_region(kind):
    def run(call):
        seen = []

        def inner(view, x):
            seen.append((type(view), view.requires_grad, view.is_leaf))
            return (x.tanh() * view).sin()

        values = leaf(3).detach()
        x = (Wrapper(values) if kind is Wrapper else values.as_subclass(Logging)).requires_grad_()
        Logging.log.clear()
        with CountOperators() as operators:
            y = call(lambda x: call(inner, view_without_grad(x), x), x.exp())
        log, ran = list(Logging.log), [name for name in operators.names if name != "detach"]
        y.sum().backward()
        assert set(seen) == {(kind, True, True)}
        return x.grad.inner if kind is Wrapper else x.grad.as_subclass(torch.Tensor), log, ran

    for got, expected in zip(run(checkpoint), run(plainly), strict=True):
        assert_equal(got, expected)


class SigmoidInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.sigmoid_())
        return x

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


def in_regions(call, depth, function, *args, **options):
    """`function` in so many regions around each other."""
    if depth > 1:
        return call(lambda *args: in_regions(call, depth - 1, function, *args, **options), *args, **options)
    return call(function, *args, **options)


def grads_of_a_change(change, call, x, depth=1, **options):
    def function(x, w):
        y = x.sin() * w.cos()
        change(y[:2])
        return y

    y = in_regions(call, depth, function, x.cos(), x.exp(), **options)
    (first,) = torch.autograd.grad(y.sum() + y.exp().sum(), x, create_graph=True)
    return y, first


@early_stops
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rule_10_double_backward_through_a_change_of_a_view_that_is_gone(depth, early_stop):
    """Its node stands in the graph twice then: as the change of the base, and as itself. Both ask for what it saved."""
    both_ways(
        lambda call, x: grads_of_a_change(torch.sigmoid_, call, x, depth, early_stop=early_stop),
        leaf(3),
    )


def test_rule_10_double_backward_through_a_change_by_a_function_of_a_view_that_is_gone_is_refused():
    """It could not be told from a Function that reads what it saved twice."""
    x = leaf(3)
    _, first = grads_of_a_change(SigmoidInPlace.apply, checkpoint, x)
    with pytest.raises(CheckpointError, match="Unpack is being triggered for a tensor that was already unpacked once"):
        grad_of(first, x)


@early_stops
def test_rule_7_the_stop_within_the_handler_of_an_exception_leaves_nothing(early_stop):
    """The stop has then that exception as its context, whose traceback holds the frames of the function."""
    made = []

    def function(x):
        y = x.sin()
        made.append(weakref.ref(y))
        try:
            raise ValueError
        except ValueError:
            return y.sigmoid()

    with garbage_collector_off():
        x = leaf(3)
        checkpoint(function, x, early_stop=early_stop).sum().backward()
        assert len(made) == 2
        assert [reference() for reference in made] == [None, None]
    assert torch.equal(x.grad, grad_of(x.sin().sigmoid(), x)[0])
