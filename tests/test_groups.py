"""`GraphExecGroup`: several backward calls that share one replay."""

import gc
import threading
import weakref

import pytest
import torch

import recollect
from recollect.dropin import GraphExecGroup, checkpoint
from tools import leaf

OVERLAP = "Performing two backward calls that overlap"
NESTED = "GraphExecGroup contexts cannot be nested"


class Parts:
    """A region with outputs that have no operator in common; counts its calls."""

    def __init__(self, count=2):
        self.calls = 0
        self.inputs = [leaf(3, seed=seed) for seed in range(count)]

    def __call__(self, *inputs):
        self.calls += 1
        return tuple(self.part(x) for x in inputs)

    def part(self, x):
        return x.sin().exp().sum()

    def expected(self):
        return [torch.autograd.grad(self.part(x), x)[0] for x in self.inputs]

    def check(self, times=1):
        for x, grad in zip(self.inputs, self.expected(), strict=True):
            assert torch.equal(x.grad, grad * times)


def test_backward_calls_of_a_group_share_one_replay():
    parts = Parts(3)
    outputs = recollect.checkpoint(parts, *parts.inputs)
    with GraphExecGroup():
        for y in outputs:
            y.backward()
    assert parts.calls == 2
    parts.check()


def test_without_a_group_each_backward_call_replays():
    parts = Parts(3)
    for y in recollect.checkpoint(parts, *parts.inputs):
        y.backward()
    assert parts.calls == 4
    parts.check()


def test_entering_gives_the_instance():
    group = GraphExecGroup()
    with group as entered:
        assert entered is group


@pytest.mark.parametrize("early_stop", [True, False])
def test_calls_in_any_order(early_stop):
    parts = Parts(3)
    outputs = recollect.checkpoint(parts, *parts.inputs, early_stop=early_stop)
    with GraphExecGroup():
        for index in (1, 0, 2):
            outputs[index].backward()
    assert parts.calls == 2
    parts.check()


def test_inputs_make_calls_disjoint():
    """A chain of two linear layers: gradients for the activations first, for the weights after, as in pipelines."""
    calls = []

    def block(x, w1, w2):
        calls.append(1)
        return ((x @ w1).sin() @ w2).sin()

    def tensors():
        return leaf(2, 3), leaf(3, 3, seed=1), leaf(3, 3, seed=2)

    x, w1, w2 = tensors()
    expected = torch.autograd.grad(block(x, w1, w2).sum(), (x, w1, w2))
    calls.clear()
    y = recollect.checkpoint(lambda x, w1, w2: (block(x, w1, w2), (x * 2).exp()), x, w1, w2)
    with GraphExecGroup():
        y[0].sum().backward(inputs=[x, w1, w2])
        assert torch.equal(x.grad, expected[0])
        y[1].sum().backward(inputs=[x])
    assert len(calls) == 2
    assert torch.equal(w1.grad, expected[1])
    assert torch.equal(w2.grad, expected[2])


def test_autograd_grad_counts_as_a_call():
    parts = Parts()
    outputs = recollect.checkpoint(parts, *parts.inputs)
    with GraphExecGroup():
        got = [torch.autograd.grad(y, x)[0] for y, x in zip(outputs, parts.inputs, strict=True)]
    assert parts.calls == 2
    assert all(map(torch.equal, got, parts.expected()))


def test_several_regions_are_replayed_once_each():
    first, second = Parts(), Parts()
    a = recollect.checkpoint(first, *first.inputs)
    b = recollect.checkpoint(second, *second.inputs)
    with GraphExecGroup():
        (a[0] + b[0]).backward()
        (a[1] + b[1]).backward()
    assert (first.calls, second.calls) == (2, 2)
    first.check()
    second.check()


# --- Overlap ---


def test_overlapping_calls_are_an_error():
    parts = Parts()
    outputs = recollect.checkpoint(parts, *parts.inputs)
    with GraphExecGroup():
        outputs[0].backward(retain_graph=True)
        with pytest.raises(recollect.CheckpointError, match=OVERLAP):
            outputs[0].backward()
        outputs[1].backward()
    assert parts.calls == 2
    parts.check()


def test_overlap_in_a_part_that_both_need():
    def function(x):
        y = x.sin().exp()
        return y.sin(), y.cos()

    x = leaf(3)
    a, b = recollect.checkpoint(function, x)
    with GraphExecGroup():
        a.sum().backward(retain_graph=True)
        with pytest.raises(recollect.CheckpointError, match=OVERLAP):
            b.sum().backward(retain_graph=True)
    x.grad = None
    b.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(function(x)[1].sum(), x)[0])


def test_the_same_calls_without_a_group_are_fine():
    parts = Parts()
    outputs = recollect.checkpoint(parts, *parts.inputs)
    for y in outputs:
        y.backward(retain_graph=True)
        y.backward()
    parts.check(times=2)


def test_retain_graph_with_a_group_for_each_round():
    parts = Parts()
    outputs = recollect.checkpoint(parts, *parts.inputs)
    for round_ in range(3):
        with GraphExecGroup():
            for y in outputs:
                y.backward(retain_graph=round_ < 2)
    assert parts.calls == 4, "one forward and one replay per group"
    parts.check(times=3)


# --- Entering ---


def test_groups_cannot_be_nested():
    with GraphExecGroup() as outer:
        with pytest.raises(RuntimeError, match=NESTED):
            GraphExecGroup().__enter__()
        with pytest.raises(RuntimeError, match=NESTED):
            outer.__enter__()
    with GraphExecGroup():  # and the refusal left nothing behind
        pass


def test_a_refused_group_does_not_end_the_one_in_force():
    parts = Parts()
    outputs = recollect.checkpoint(parts, *parts.inputs)
    with GraphExecGroup():
        outputs[0].backward()
        with pytest.raises(RuntimeError, match=NESTED):
            GraphExecGroup().__enter__()
        outputs[1].backward()
    assert parts.calls == 2


def test_an_instance_entered_twice_is_one_group():
    parts = Parts(3)
    outputs = recollect.checkpoint(parts, *parts.inputs)
    group = GraphExecGroup()
    with group:
        outputs[0].backward()
    with group:
        outputs[1].backward()
    assert parts.calls == 2
    outputs[2].backward()
    assert parts.calls == 3, "outside of the group"
    parts.check()


def test_two_groups_in_a_row_replay_twice():
    parts = Parts()
    outputs = recollect.checkpoint(parts, *parts.inputs)
    for y in outputs:
        with GraphExecGroup():
            y.backward()
    assert parts.calls == 3
    parts.check()


def test_an_exception_ends_the_group():
    parts = Parts()
    outputs = recollect.checkpoint(parts, *parts.inputs)
    group = GraphExecGroup()

    def raises():
        with group:
            outputs[0].backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raises()
    outputs[1].backward()
    assert parts.calls == 3
    parts.check()
    with GraphExecGroup():
        pass


def test_an_exception_in_the_replay_leaves_the_group_usable():
    fails, calls = [True], []

    def function(x, z):
        calls.append(1)
        if len(calls) > 1 and fails:
            raise KeyError("replay")
        return x.sin().exp(), z.sin().exp()

    x, z = leaf(3), leaf(3, seed=1)
    a, b = recollect.checkpoint(function, x, z)
    with GraphExecGroup():
        with pytest.raises(KeyError, match="replay"):
            a.sum().backward()
        fails.clear()
        b.sum().backward()
    assert torch.equal(z.grad, torch.autograd.grad(z.sin().exp().sum(), z)[0])


def test_a_group_belongs_to_its_thread():
    parts = Parts()
    outputs = recollect.checkpoint(parts, *parts.inputs)
    errors = []

    def work():
        try:
            with GraphExecGroup():
                outputs[1].backward()
        except BaseException as error:
            errors.append(error)

    with GraphExecGroup():
        outputs[0].backward()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert errors == []
    assert parts.calls == 3, "another group, another replay"
    parts.check()


# --- What is left over ---


def noisy(made):
    """Saves one tensor per output that needs no grad, so that the very object is recovered."""

    def function(*inputs):
        outputs = []
        for x in inputs:
            noise = torch.full((3,), 2.0)
            made.append(weakref.ref(noise))
            outputs.append((x * noise).sum())
        return tuple(outputs)

    return function


def alive(made):
    return [reference() is not None for reference in made]


def test_what_is_left_over_is_dropped_with_the_group():
    made, inputs = [], [leaf(3, seed=seed) for seed in range(3)]
    outputs = recollect.checkpoint(noisy(made), *inputs)
    assert alive(made) == [False] * 3
    made.clear()
    gc.collect()
    gc.disable()
    try:
        group = GraphExecGroup()
        with group:
            outputs[0].backward(retain_graph=True)
            assert alive(made) == [False, True, True], "kept for the calls to come, the used one freed"
        outputs[1].backward(retain_graph=True)  # not in the group: takes nothing from it
        assert alive(made)[:3] == [False, True, True]
        del group
        assert not any(alive(made))
    finally:
        gc.enable()
    outputs[2].backward()
    assert all(torch.equal(x.grad, torch.full((3,), 2.0)) for x in inputs)


def test_nothing_is_left_over_after_a_with_statement():
    made, inputs = [], [leaf(3), leaf(3, seed=1)]
    outputs = recollect.checkpoint(noisy(made), *inputs)
    with GraphExecGroup():
        outputs[0].backward(retain_graph=True)
    assert not any(alive(made))


def test_a_graph_that_dies_in_the_group_takes_its_tensors_along():
    made, inputs = [], [leaf(3), leaf(3, seed=1)]
    outputs = list(recollect.checkpoint(noisy(made), *inputs))
    with GraphExecGroup():
        outputs[0].backward()
        assert any(alive(made))
        outputs.clear()
        assert not any(alive(made))


def test_a_group_does_not_keep_regions_alive():
    class Payload:
        pass

    def region():
        parts, payload = Parts(), Payload()

        def function(*inputs):
            assert payload is not None
            return parts(*inputs)

        outputs = recollect.checkpoint(function, *parts.inputs)
        outputs[0].backward()
        return weakref.ref(payload)

    with GraphExecGroup():
        assert region()() is None


# --- Regions inside regions ---


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nested_regions_are_replayed_once_each(order):
    outer, inner = [], []

    def inside(x):
        inner.append(1)
        return x.sin().exp()

    def outside(x, z):
        outer.append(1)
        return recollect.checkpoint(inside, x.cos()).sum(), recollect.checkpoint(inside, z.cos()).sum()

    inputs = leaf(3), leaf(3, seed=1)
    outputs = recollect.checkpoint(outside, *inputs)
    outer.clear()
    inner.clear()
    with GraphExecGroup():
        for index in order:
            outputs[index].backward()
    assert len(outer) == 1
    # The replay of the outer region runs each inner one once more, then each is replayed for itself.
    assert len(inner) <= 4
    for x in inputs:
        assert torch.equal(x.grad, torch.autograd.grad(x.cos().sin().exp().sum(), x)[0])


# --- The reentrant variant ---


def test_for_the_reentrant_variant_it_does_nothing():
    calls = []

    def function(x, z):
        calls.append(1)
        return x.sin().exp(), z.sin().exp()

    def gradients(group):
        x, z = leaf(3), leaf(3, seed=1)
        calls.clear()
        a, b = checkpoint(function, x, z, use_reentrant=True)
        if group:
            with GraphExecGroup():
                a.sum().backward(retain_graph=True)
                b.sum().backward(retain_graph=True)
        else:
            a.sum().backward(retain_graph=True)
            b.sum().backward(retain_graph=True)
        return len(calls), x.grad, z.grad

    got, expected = gradients(True), gradients(False)
    assert got[0] == expected[0] == 3
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[2], expected[2])


def test_reading_twice_in_one_call_is_not_blamed_on_overlap_alone():
    class ReadsTwice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * ctx.saved_tensors[0]

    y = recollect.checkpoint(ReadsTwice.apply, leaf(3))
    with (
        GraphExecGroup(),
        pytest.raises(recollect.CheckpointError, match="that was already unpacked once") as info,
    ):
        y.sum().backward()
    assert "If there was only one call" in str(info.value)


def test_a_group_entered_twice_in_an_unfinished_forward():
    def function(x):
        group = GraphExecGroup()
        y = x.sin().exp()
        with group:
            (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        z = (y * g).cos()
        with group:
            (h,) = torch.autograd.grad(z.sum(), y)
        return (x * g * h).sin()

    x = leaf(3)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(recollect.checkpoint(function, x).sum(), x)[0], expected)


# --- A backward that is split into gradients of inputs and of weights ---


class Layer:
    """Nodes that have the gradient of an input to give, and of a weight: a norm and two products."""

    def __init__(self):
        self.calls = 0
        self.x, self.scale = leaf(4, 6), leaf(6, seed=1)
        self.first, self.second = leaf(6, 6, seed=2), leaf(6, 6, seed=3)
        self.weights = (self.scale, self.first, self.second)

    def __call__(self, x):
        self.calls += 1
        return torch.tanh(torch.nn.functional.layer_norm(x, (6,), self.scale) @ self.first) @ self.second

    def expected(self):
        found = torch.autograd.grad(self(self.x).sum(), (self.x, *self.weights))
        self.calls = 0
        return found


def check(got, expected):
    assert all(map(torch.equal, got, expected))


def test_input_and_weights_share_one_replay():
    layer = Layer()
    grad_of_x, *grads = layer.expected()
    y = recollect.checkpoint(layer, layer.x).sum()
    with GraphExecGroup():
        check(torch.autograd.grad(y, layer.x, retain_graph=True), [grad_of_x])
        check(torch.autograd.grad(y, layer.second, retain_graph=True), [grads[2]])
    assert layer.calls == 2


def test_weights_one_after_the_other():
    """As pipelines do: from the nodes that the weights go into, with the gradients that came by there."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    layer = Layer()
    grad_of_x, *grads = layer.expected()
    y = recollect.checkpoint(layer, layer.x)
    group = GraphExecGroup()
    with group:
        found, parts = stage_backward_input([y], [torch.ones_like(y)], [layer.x], iter(layer.weights))
    check(found, [grad_of_x])
    assert len(parts) == 3
    with group:
        stage_backward_weight(iter(layer.weights), parts)
    check([weight.grad for weight in layer.weights], grads)
    assert layer.calls == 2


def test_only_what_other_gradients_need_is_held_between_the_calls():
    layer = Layer()
    y = recollect.checkpoint(layer, layer.x).sum()
    with GraphExecGroup():
        torch.autograd.grad(y, layer.x, retain_graph=True)
        frames = [one for one in gc.get_objects() if type(one).__name__ == "Shared"]
        recovered = [tensor is None for one in frames for tensor in one.tensors]
        del frames
    # tanh has one gradient to give, and gave it; the norm and the products have others to give yet.
    assert recovered.count(True) == 1
    assert len(recovered) > 4


def test_the_same_gradient_twice_is_an_overlap_all_the_same():
    layer = Layer()
    y = recollect.checkpoint(layer, layer.x).sum()
    with GraphExecGroup():
        torch.autograd.grad(y, layer.x, retain_graph=True)
        with pytest.raises(recollect.CheckpointError, match=OVERLAP):
            torch.autograd.grad(y, (layer.x, layer.second), retain_graph=True)


def test_the_same_gradient_beside_a_new_one_is_an_overlap():
    """Where every node has something to give yet, so that nothing has been let go of."""
    x, weight = leaf(3, 3), leaf(3, 3, seed=1)
    y = recollect.checkpoint(lambda x, weight: x @ weight, x, weight).sum()
    with GraphExecGroup():
        torch.autograd.grad(y, x, retain_graph=True)
        with pytest.raises(recollect.CheckpointError, match=OVERLAP):
            torch.autograd.grad(y, (x, weight), retain_graph=True)
        torch.autograd.grad(y, weight)


def test_a_group_may_allow_overlaps():
    class Lenient(GraphExecGroup):
        may_overlap = True

    layer = Layer()
    expected = layer.expected()
    y = recollect.checkpoint(layer, layer.x).sum()
    with Lenient():
        check(torch.autograd.grad(y, layer.x, retain_graph=True), expected[:1])
        check(torch.autograd.grad(y, (layer.x, *layer.weights)), expected)
    assert layer.calls == 3
