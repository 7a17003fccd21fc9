"""What a function does with tensors of its own, and with the graph that its replay makes of them."""

import weakref

import pytest
import torch
from torch import nn

import recollect
from recollect import checkpoint
from recollect.dropin import CheckpointError
from tools import IN_PLACE, garbage_collector_off, leaf


def gradients_of(function, *leaves, call):
    for one in leaves:
        one.grad = None
    call(function, *leaves).sum().backward()
    return [one.grad for one in leaves]


def assert_as_plain(function, *leaves, **options):
    expected = gradients_of(function, *leaves, call=lambda function, *args: function(*args))
    actual = gradients_of(function, *leaves, call=lambda function, *args: checkpoint(function, *args, **options))
    assert all(map(torch.equal, actual, expected))


CHECKS = pytest.mark.parametrize("check", ["default", "none", "first", "values"])


# --- `.data`, which autograd does not see ---


class SavesItsResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y


@CHECKS
@pytest.mark.parametrize("new", [torch.zeros_like, torch.round, lambda _: torch.empty(0)])
@pytest.mark.parametrize("operator", [torch.exp, torch.sigmoid, lambda x: x.softmax(-1), SavesItsResult.apply])
def test_other_data_for_a_result_that_its_operator_saved(operator, new, check):
    """Plain autograd keeps the old data; a replay must not show the new."""

    def function(x):
        h = operator(x)
        y = h * 2
        h.data = new(h.data)
        return y.sin().sin()

    assert_as_plain(function, leaf(3), determinism_check=check)


@CHECKS
def test_a_weight_that_is_let_go_of_after_use_and_gathered_for_backward(check):
    full = torch.tensor([1.0, 2.0, 3.0])
    weight = nn.Parameter(full.clone())

    def gather(_):
        weight.data = full.clone()

    def function(x):
        gather(None)
        y = x * weight
        weight.data = torch.empty(0)
        y.register_hook(gather)
        return y.sin().sin()

    assert_as_plain(lambda x: function(x), leaf(3), determinism_check=check)
    gather(None)


@pytest.mark.parametrize("change", [lambda h: h.unsqueeze_(0), lambda h: h.t_(), lambda h: h.mul_(1)])
@pytest.mark.parametrize("operator", [torch.exp, torch.sin])
def test_another_shape_for_a_saved_tensor_is_a_change_like_any_other(operator, change):
    def function(x):
        h = operator(x)
        y = h.cos()
        change(h)
        return y.sin().sin()

    for call in (checkpoint, lambda function, x: function(x)):
        with pytest.raises(RuntimeError, match=IN_PLACE):
            call(function, leaf(3, 2)).sum().backward()


# --- What is left behind ---


def test_a_tensor_that_the_function_leaves_behind_can_be_differentiated():
    """A feature extractor with two losses, one after the other: the replay has put its own tensor there."""

    def run(call):
        features = {}

        def function(x):
            features["h"] = x.sin()
            return features["h"].sin()

        x = leaf(3)
        call(function, x).sum().backward(retain_graph=True)
        features["h"].exp().sum().backward()
        return x.grad

    assert torch.equal(run(checkpoint), run(lambda function, x: function(x)))


def test_a_tensor_that_a_whole_replay_leaves_behind_can_be_differentiated():
    left = []

    def function(x):
        y = x.sin().exp()
        left.append(y.sin())
        return y.cos()

    x = leaf(3)
    checkpoint(function, x, early_stop=False).sum().backward()
    function(x)
    _, replayed, plain = (one.sum() for one in left)
    assert torch.equal(torch.autograd.grad(replayed, x)[0], torch.autograd.grad(plain, x)[0])


def test_a_leaf_that_the_function_makes_is_no_stranger():
    def function(x):
        weight = torch.full((3,), 2.0, requires_grad=True)
        return (x.sin() * weight).exp()

    for _ in range(2):
        assert_as_plain(function, leaf(3))


def test_a_leaf_in_the_place_of_one_that_is_gone():
    """A view made without grad leads to its base by no edge of the graph, so that nothing holds the base."""
    weights, x = [leaf(3)], leaf(3)

    def function(x):
        with torch.no_grad():
            view = weights[0][:]
        return (x * view).sin()

    y = checkpoint(function, x)
    gone = weakref.ref(weights.pop())
    weights.append(leaf(3, seed=1))
    assert gone() is None
    with pytest.raises(CheckpointError, match=r"where the forward saved a leaf that is gone, the replay saved another"):
        y.sum().backward()


def test_a_leaf_of_the_function_that_no_edge_leads_to():
    def function(x):
        weight = torch.full((3,), 2.0, requires_grad=True)
        with torch.no_grad():
            view = weight[:]
        return (x * view).sin()

    for _ in range(2):
        assert_as_plain(function, leaf(3))


def test_a_leaf_that_goes_with_a_part_of_the_graph():
    """Before the replay, or between two of them: the others are watched as before."""
    weight, made = leaf(3, seed=1), []

    def function(x):
        inner = torch.full((3,), 2.0, requires_grad=True)
        made.append(weakref.ref(inner))
        return x.sin() * inner, x * weight, x.exp().sin()

    x = leaf(3)
    with garbage_collector_off():
        for retain_graph in (False, True):
            own, other, last = checkpoint(function, x)
            if retain_graph:
                (own + last).sum().backward(retain_graph=True)
            forwards = made[0]
            assert forwards() is not None
            del own
            assert forwards() is None
            made.clear()
            x.grad = None
            last.sum().backward(retain_graph=True)
            last.sum().backward()
            assert torch.equal(x.grad, 2 * torch.autograd.grad(x.exp().sin().sum(), x)[0])
            with torch.no_grad():
                weight.mul_(2)
            with pytest.raises(CheckpointError, match=IN_PLACE):
                other.sum().backward()
            del other, last
            made.clear()


# --- A backward inside ---


def test_a_backward_inside_finds_what_the_replay_saved():
    def function(x):
        y = x.sin()
        (inner,) = torch.autograd.grad(y.exp().sum(), y, retain_graph=True)
        return y * inner

    assert_as_plain(function, leaf(5))


def test_a_backward_inside_after_the_stop_was_swallowed():
    seen = []

    def function(x):
        y = x.sin()
        try:
            y = y.exp().sin()
        except BaseException:
            pass
        a, b = leaf(3), leaf(3, seed=1)
        seen.append(torch.autograd.grad((a.sin() + b.exp().cos()).sum(), (a, b)))
        return y

    checkpoint(function, leaf(3)).sum().backward()
    assert len(seen) == 2
    assert all(map(torch.equal, *seen))


def test_what_nobody_asks_for_is_not_kept():
    """Slots that an earlier pass has freed: their tensors are there for a backward inside, and then no longer."""
    made, seen = [], []

    def function(x, mask):
        first, noise = x.sin(), mask * 2
        made[:] = [weakref.ref(noise), weakref.ref(first)]
        early = first * noise
        (slope,) = torch.autograd.grad(early.sum(), first, retain_graph=True)
        return early, (early * slope).exp().sin()

    x, mask = leaf(5), leaf(5, seed=1).detach()
    with garbage_collector_off():
        early, late = checkpoint(function, x, mask)
        early.sum().backward()
        late.register_hook(lambda _: seen.append(len(made)))
        early.register_hook(lambda _: seen.append([one() for one in made]))
        (gradient,) = torch.autograd.grad(late.sum(), early)
    assert seen == [2, [None, None]]
    early, late = function(x, mask)
    assert torch.equal(gradient, torch.autograd.grad(late.sum(), early)[0])


# --- What holds it ---


def test_a_pass_that_fails_leaves_nothing_recovered():
    made = []

    def fail(grad):
        raise ValueError("in the middle of backward")

    def function(x):
        made.clear()
        for _ in range(4):
            x = x.sin()
            if recollect.is_recomputing():
                made.append(weakref.ref(x.untyped_storage()))
            else:
                x.register_hook(fail)
        return x.sin()

    with garbage_collector_off():
        y = checkpoint(function, leaf(3))
        with pytest.raises(ValueError, match="in the middle") as caught:
            y.sum().backward()
        del caught
        assert [one() for one in made] == [None] * 4


def test_an_access_through_an_inner_region_leaves_nothing_while_the_graph_lives():
    made = []

    def inner(x):
        return x.exp().sin()

    def outer(x):
        a = x.sin()
        b = a.sin()
        made[:] = [weakref.ref(one.untyped_storage()) for one in (a, b)]
        return checkpoint(inner, b.sin())

    with garbage_collector_off():
        y = checkpoint(outer, leaf(3))
        for _ in range(2):
            assert y.grad_fn._saved_self is not None
            assert [one() for one in made] == [None, None]


class Payload:
    """Something that only a graph holds."""


def test_the_graph_of_a_replay_does_not_outlive_it():
    made, seen = [], []

    class Stash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.payload = Payload()
            made.append(weakref.ref(ctx.payload))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def alive():
        return sum(one() is not None for one in made)

    def function(x):
        for _ in range(3):
            x = Stash.apply(x.sin())
            if not recollect.is_recomputing():
                x.register_hook(lambda _: seen.append(alive()))
        return x.exp()

    with garbage_collector_off():
        y = checkpoint(function, leaf(3))
        y.sum().backward(retain_graph=True)
        assert len(made) == 6
        assert seen == [3, 3, 3], "those of the forward"
        del y
        assert alive() == 0
