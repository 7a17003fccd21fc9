"""With the garbage collector off a step leaves nothing; bytes alive are as in plain autograd and not above stock's."""

import contextlib
import gc
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from recollect import CheckpointError, checkpoint, remat
from recollect.dropin import GraphExecGroup
from tools import LiveBytes, engine_objects, garbage_collector_off, in_backward, leaf


@pytest.fixture(autouse=True, scope="module")
def _look_only_at_what_the_tests_make():
    """Torch imports much at the first use of a dispatch mode, and again of one inside another: what it leaves then is
    for the collector, and a frame of the import keeps all that called it. Older objects are put out of its sight.
    """
    with LiveBytes():
        checkpoint(torch.sin, leaf(3), debug=True).sum().backward()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# --- Nothing is left ---


class Payload:
    """Something in the arguments that only the region could keep alive."""

    def __init__(self, value=None):
        self.value = value


class Watch:
    """Weak references to everything that must be gone at the end."""

    def __init__(self):
        self._references = []

    def __call__(self, value):
        self._references.append((repr(type(value)), weakref.ref(value)))
        return value

    def __len__(self):
        return len(self._references)

    def alive(self):
        return [name for name, reference in self._references if reference() is not None]


SITUATIONS = {}


def situation(function):
    SITUATIONS[function.__name__.replace("_", " ")] = function
    return function


def block_of(watch):
    def block(x, payload):
        y = watch(x.sin())
        z = watch(y.exp())
        return watch(z.cos())

    return block


def region_of(watch, function=None, **options):
    """A region with a payload among its arguments, its input and its result."""
    x = watch(leaf(3))
    h = watch(x * 2)
    return x, watch(checkpoint(function or block_of(watch), h, watch(Payload()), **options))


@situation
def a_whole_step(watch):
    _, y = region_of(watch)
    y.sum().backward()


@situation
def without_early_stop(watch):
    _, y = region_of(watch, early_stop=False)
    y.sum().backward()


@situation
def debug_mode(watch):
    _, y = region_of(watch, debug=True)
    y.sum().backward()


@situation
def remat_with_a_name(watch):
    remat(block_of(watch), name="block")(watch(leaf(3)), watch(Payload())).sum().backward()


@situation
def dropped_without_backward(watch):
    region_of(watch)


@situation
def dropped_without_backward_in_debug_mode(watch):
    region_of(watch, debug=True)


@situation
def nested_regions(watch):
    def outer(x, payload):
        y = watch(x.sin())
        z = checkpoint(block_of(watch), y, payload)
        return watch(checkpoint(block_of(watch), z, payload)).exp()

    _, y = region_of(watch, outer)
    y.sum().backward()


@situation
def nested_regions_dropped_without_backward(watch):
    region_of(watch, lambda x, payload: checkpoint(block_of(watch), x.sin(), payload))


@situation
def a_region_that_calls_itself(watch):
    def recursive(x, payload, depth=3):
        x = watch(x.sin())
        return checkpoint(recursive, x, payload, depth - 1).exp() if depth else x

    _, y = region_of(watch, recursive)
    y.sum().backward()


@situation
def retain_graph_and_then_dropped(watch):
    _, y = region_of(watch)
    for _ in range(3):
        y.sum().backward(retain_graph=True)


@situation
def a_partial_backward(watch):
    x, (one, two) = leaf(3), checkpoint(lambda x, payload: two_blocks(watch, x, payload), leaf(3), watch(Payload()))
    one.sum().backward(retain_graph=True)
    del x, two


def two_blocks(watch, x, payload):
    return block_of(watch)(x, payload), block_of(watch)(x * 2, payload)


@situation
def a_partial_backward_that_frees(watch):
    one, _ = checkpoint(lambda x, payload: two_blocks(watch, x, payload), leaf(3), watch(Payload()))
    one.sum().backward()


@situation
def a_group_of_backward_calls(watch):
    one, two = checkpoint(lambda x, payload: two_blocks(watch, x, payload), leaf(3), watch(Payload()))
    with GraphExecGroup():
        one.sum().backward()
        two.sum().backward()


@situation
def double_backward(watch):
    x, y = region_of(watch)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.grad(watch(grad).sum(), x)


@situation
def a_grad_inside_the_region(watch):
    def function(x, payload):
        y = watch(x.sin().exp())
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return watch(grad * y).cos()

    _, y = region_of(watch, function)
    y.sum().backward()


@situation
def an_exception_in_the_forward(watch):
    def function(x, payload):
        block_of(watch)(x, payload)
        raise ValueError("forward")

    with contextlib.suppress(ValueError):
        region_of(watch, function)


@situation
def an_exception_in_the_forward_of_an_inner_region(watch):
    def inner(x, payload):
        block_of(watch)(x, payload)
        raise ValueError("forward")

    with contextlib.suppress(ValueError):
        region_of(watch, lambda x, payload: checkpoint(inner, watch(x.sin()), payload))


@situation
def an_exception_in_the_replay(watch):
    def function(x, payload):
        y = block_of(watch)(x, payload)
        if in_backward():
            raise ValueError("replay")
        return y.exp()

    _, y = region_of(watch, function)
    with contextlib.suppress(ValueError):
        y.sum().backward()


@situation
def an_interrupt_in_the_replay(watch):
    def function(x, payload):
        y = watch(x.sin())
        if in_backward():
            raise KeyboardInterrupt
        return y.exp()

    _, y = region_of(watch, function)
    with contextlib.suppress(KeyboardInterrupt):
        y.sum().backward()


@situation
def an_exception_in_a_hook_during_backward(watch):
    def fail(grad):
        raise ValueError("hook")

    x, y = region_of(watch)
    x.register_hook(fail)
    with contextlib.suppress(ValueError):
        y.sum().backward(retain_graph=True)


def mismatch(watch, *functions, **options):
    remaining = list(functions)
    _, y = region_of(watch, lambda x, payload: remaining.pop(0)(x), **options)
    with contextlib.suppress(CheckpointError):
        y.sum().backward()
        raise AssertionError("a mismatch was expected")


@situation
def fewer_saved_tensors(watch):
    mismatch(watch, lambda x: watch(x.sin()).exp(), lambda x: watch(x + 1))


@situation
def fewer_saved_tensors_in_debug_mode(watch):
    mismatch(watch, lambda x: watch(x.sin()).exp(), lambda x: watch(x + 1), debug=True)


@situation
def more_saved_tensors(watch):
    mismatch(watch, lambda x: watch(x.sin()), lambda x: watch(x.sin()).exp(), early_stop=False)


@situation
def other_metadata(watch):
    mismatch(watch, lambda x: watch(x.sin()).exp(), lambda x: watch(x[:2]).sin().exp())


@situation
def an_input_changed_by_the_user(watch):
    t = watch(torch.ones(3))
    y = checkpoint(lambda x, t: watch((x * t).exp()), leaf(3), t)
    t.add_(1)
    with contextlib.suppress(CheckpointError):
        y.sum().backward()
        raise AssertionError("an error was expected")


@situation
def an_input_changed_by_the_region(watch):
    """The changed input holds the region's graph, and the region would hold the input."""
    y = checkpoint(lambda h, payload: watch(h.mul_(2).exp()), watch(leaf(3) * 1), watch(Payload()))
    with contextlib.suppress(CheckpointError):
        y.sum().backward()
        raise AssertionError("an error was expected")


@situation
def an_input_changed_by_the_region_and_dropped(watch):
    h = watch(leaf(3) * 1)
    checkpoint(lambda h, payload: watch(h.exp_()), h, watch(Payload()))


@situation
def an_input_changed_by_an_inner_region_and_dropped(watch):
    def outer(x, payload):
        h = watch(x * 1)
        checkpoint(lambda h: h.exp_(), h)
        return h.sin()

    region_of(watch, outer)


@situation
def an_input_at_depth_changed_by_the_region_and_dropped(watch):
    h = watch(leaf(3) * 1)
    checkpoint(lambda inside: watch(inside["h"][0].exp_()), {"h": [h, watch(Payload())]})


@situation
def a_saved_tensor_changed_inside(watch):
    def function(x, payload):
        y = watch(x.exp())
        y.add_(1)
        return y.sin()

    _, y = region_of(watch, function)
    with contextlib.suppress(CheckpointError):
        y.sum().backward()
        raise AssertionError("an error was expected")


@situation
def an_input_returned_unchanged(watch):
    h = watch(leaf(3) * 1)
    same, y = checkpoint(lambda h, payload: (h, watch(h.sin().exp())), h, watch(Payload()))
    (same + y).sum().backward()


@situation
def an_input_returned_unchanged_and_dropped(watch):
    checkpoint(lambda h, payload: (h, watch(h.sin().exp())), watch(leaf(3) * 1), watch(Payload()))


@situation
def a_result_put_into_a_list_among_the_arguments(watch):
    """The list holds the graph; the region must not hold the list."""

    def function(x, cache):
        cache.append(watch(x.sin().exp()))
        return cache[-1].cos()

    checkpoint(function, watch(leaf(3)), [])


@situation
def a_result_put_into_a_list_inside_a_tuple_among_the_arguments(watch):
    def function(x, caches):
        caches[0].append(watch(x.sin().exp()))
        return caches[0][-1].cos()

    checkpoint(function, watch(leaf(3)), ([],))


@situation
def a_result_put_into_a_user_object_among_the_arguments(watch):
    def function(x, payload):
        payload.value = watch(x.sin().exp())
        return payload.value.cos()

    _, y = region_of(watch, function)
    (y.sum() + 0).backward()


@situation
def the_stop_swallowed(watch):
    def function(x, payload):
        y = watch(x.sin())
        try:
            y = watch(y.exp().sin())
        except BaseException:
            watch(y.tanh().exp())
        return y

    _, y = region_of(watch, function)
    y.sum().backward()


@situation
def the_stop_translated(watch):
    def function(x, payload):
        try:
            return watch(x.exp()).sin()
        except BaseException as error:
            raise ValueError("translated") from error

    _, y = region_of(watch, function)
    y.sum().backward()


@situation
def the_stop_through_modules_with_hooks(watch):
    class Sin(nn.Module):
        def forward(self, x, payload):
            return watch(x.exp()).sin()

    module = Sin()
    module.register_forward_hook(lambda *_: None, always_call=True)
    _, y = region_of(watch, lambda x, payload: module(x, payload))
    y.sum().backward()


@situation
def save_on_cpu_around(watch):
    with save_on_cpu():
        _, y = region_of(watch)
    y.sum().backward()


@situation
def hooks_around_dropped_without_backward(watch):
    with saved_tensors_hooks(lambda tensor: watch(tensor.clone()), lambda tensor: tensor):
        region_of(watch)


@situation
def hooks_inside(watch):
    """Hooks that copy: with `save_on_cpu` a CPU tensor is packed as itself, and torch alone then makes a cycle."""

    def function(x, payload):
        with saved_tensors_hooks(lambda tensor: watch(tensor.detach().clone()), lambda tensor: tensor):
            y = watch(x.sin().exp())
        return y.cos()

    _, y = region_of(watch, function)
    y.sum().backward()


@situation
def an_access_outside_of_any_backward(watch):
    _, y = region_of(watch)
    for _ in range(2):
        watch(y.grad_fn._saved_self)


@situation
def an_access_outside_of_any_backward_of_a_nested_region(watch):
    _, y = region_of(watch, lambda x, payload: checkpoint(block_of(watch), x.sin(), payload))
    watch(y.grad_fn._saved_self)


@situation
def a_custom_function_that_reads_twice(watch):
    class ReadsTwice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(watch(x.exp()))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * ctx.saved_tensors[0]

    _, y = region_of(watch, lambda x, payload: ReadsTwice.apply(x))
    with contextlib.suppress(CheckpointError):
        y.sum().backward()
        raise AssertionError("an error was expected")


@situation
def an_input_that_is_changed_by_what_the_region_gave(watch):
    """It holds the graph then, and the region holds it."""
    x = watch(leaf(3))
    h = watch(x * 2)
    y = watch(h.add_(checkpoint(block_of(watch), h, watch(Payload()))))
    with contextlib.suppress(CheckpointError):
        y.sum().backward()
        raise AssertionError("an error was expected")


@situation
def a_context_fn_of_the_user(watch):
    contexts = [watch(SomeContext()) for _ in range(2)]
    _, y = region_of(watch, context_fn=lambda: tuple(contexts))
    y.sum().backward()


class SomeContext:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("name", SITUATIONS)
def test_nothing_is_left(name):
    watch = Watch()
    with garbage_collector_off():
        before = len(engine_objects())
        SITUATIONS[name](watch)
        assert watch.alive() == []
        assert len(engine_objects()) == before
    assert len(watch) > 0


def test_the_situations_would_notice_something_that_is_left():
    """The watch itself: a payload in a cycle stays as long as the collector is off."""
    watch = Watch()
    with garbage_collector_off():
        payload = watch(Payload())
        payload.value = payload
        del payload
        assert len(watch.alive()) == 1
    gc.collect()
    assert watch.alive() == []


def test_a_graph_that_is_kept_keeps_its_region_and_lets_go_of_it_after_backward():
    watch = Watch()
    with garbage_collector_off():
        before = len(engine_objects())
        y = checkpoint(lambda x, payload: x.sin().exp(), leaf(3), watch(Payload()))
        assert len(watch.alive()) == 1
        assert len(engine_objects()) > before
        y.sum().backward()
        # The result still exists; what the region needed for its replays does not.
        assert watch.alive() == []
        assert len(engine_objects()) == before


def test_many_steps_leave_no_trail():
    with garbage_collector_off():
        counts = []
        for _ in range(4):
            for _ in range(5):
                checkpoint(lambda x: checkpoint(torch.exp, x.sin()).cos(), leaf(3)).sum().backward()
            counts.append(len(gc.get_objects()))
    assert counts[-1] - counts[1] < 20


# --- Bytes alive ---

BYTES = 4 * 256


def sin_chain(x, length=8):
    for _ in range(length):
        x = x.sin()
    return x


def test_after_the_forward_only_the_output_is_alive():
    x = leaf(256)
    with garbage_collector_off(), LiveBytes() as live:
        y = checkpoint(sin_chain, x)
        assert live.now == BYTES
        plain = sin_chain(x)
        assert live.now == BYTES * (1 + 8)
        del plain
        checkpoint(sin_chain, x)
        assert live.now == BYTES
        del y
        assert live.now == 0


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("retain_graph", [True, False])
def test_recovered_tensors_die_as_they_are_used(early_stop, retain_graph):
    def alive_at_each_cos(function):
        """In the backward of sin: bytes alive after each cos, of which backward computes one per saved tensor."""
        x = leaf(256)
        with garbage_collector_off():
            y = function(x)
            grad = torch.ones(256)
            with LiveBytes() as live:
                torch.autograd.grad(y, x, grad, retain_graph=retain_graph)
        return [bytes_alive for name, bytes_alive in live.steps if name == "cos"]

    got = alive_at_each_cos(lambda x: checkpoint(sin_chain, x, early_stop=early_stop))
    # The first cos: seven recovered tensors, the cos; then the gradient so far comes in and one recovered tensor goes.
    assert got[0] == 8 * BYTES
    assert [before - after for before, after in pairwise(got[1:])] == [BYTES] * 6
    assert got[-1] <= 3 * BYTES


def test_bytes_at_each_step_of_backward_as_in_plain_autograd():
    def steps(function):
        x = leaf(256)
        with garbage_collector_off(), LiveBytes() as live:
            y = function(x)
            grad = torch.ones(256)
            start = len(live.steps)
            torch.autograd.grad(y, x, grad)
        return [bytes_alive for name, bytes_alive in live.steps[start:] if name == "cos"]

    got, plain = steps(lambda x: checkpoint(sin_chain, x)), steps(sin_chain)
    assert len(got) == len(plain) == 8
    assert all(ours <= theirs for ours, theirs in zip(got, plain, strict=True)), (got, plain)


def test_nothing_recovered_is_alive_after_a_partial_backward():
    x = leaf(256)
    with garbage_collector_off(), LiveBytes() as live:
        one, two = checkpoint(lambda x: (sin_chain(x), sin_chain(x * 2)), x)
        before = live.now
        torch.autograd.grad(one, x, torch.ones_like(one), retain_graph=True)
        assert live.now == before
        del one, two


def test_inner_regions_in_a_replay_keep_only_their_outputs():
    """The replay of the parent holds the inputs of its inner regions, not what they save."""

    def peak_of(early_stop):
        x = leaf(256)

        def outer(x):
            for _ in range(4):
                x = checkpoint(sin_chain, x, early_stop=early_stop)
            return x

        with garbage_collector_off():
            y = checkpoint(outer, x, early_stop=early_stop)
            grad = torch.ones(256)
            with LiveBytes() as live:
                torch.autograd.grad(y, x, grad)
        return live.peak

    # Inputs of four regions, what one of them saves, and the gradients of one node.
    assert peak_of(True) <= (4 + 8 + 3) * BYTES
    assert peak_of(False) <= (4 + 8 + 4) * BYTES


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1)) for _ in range(3)
        )

    def forward(self, x, region):
        for block in self.blocks:
            x = x + region(block, x)
        return x


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def _attention(self, x):
        q, k, v = (part.view(2, 8, 4, 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        weights = F.dropout((q @ k.transpose(-1, -2) / 2).softmax(-1), 0.1)
        return self.out((weights @ v).transpose(1, 2).reshape(2, 8, 16))

    def _block(self, x):
        x = x + self._attention(x)
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def forward(self, x, region):
        return region(self._block, region(self._block, x))


def chain(x, region):
    for _ in range(4):
        x = region(sin_chain, x)
    return x


def nested_chain(x, region):
    def pair(x):
        return region(sin_chain, region(sin_chain, x).exp()).exp()

    return region(pair, region(pair, x))


class KeepsAnAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.slope = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.slope


def in_one_region(function):
    return lambda x, region: region(function, x)


def graphs_that_die_at_once(x):
    for _ in range(6):
        x.sin().cos().exp().sum()
    return sin_chain(x, 2)


def leaves_made_inside(x):
    for _ in range(6):
        inner = x.detach().requires_grad_()
        inner.sin().cos().exp().sum()
        x = x + 1
    return sin_chain(x, 2)


def gradients_inside(x):
    for _ in range(6):
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner.sin().cos().exp().sum(), inner)
        x = x - 0.1 * slope
    return sin_chain(x, 2)


def attributes_of_custom_functions(x):
    for _ in range(4):
        x = KeepsAnAttribute.apply(x).exp()
    return x.repeat(8).sin().exp()


def hooks_of_tensors(x):
    for _ in range(4):
        x = x.sin()
        x.register_hook(x.detach().abs().mul)
    return x.repeat(8).sin().exp()


def saved_tensor_hooks_inside(x):
    for _ in range(4):
        with saved_tensors_hooks(torch.clone, lambda packed: packed):
            x = x.sin()
    return x.repeat(8).sin().exp()


MODELS = {
    "chain": (lambda: chain, (256,)),
    "nested chain": (lambda: nested_chain, (256,)),
    "mlp": (Mlp, (8, 16)),
    "transformer": (Transformer, (2, 8, 16)),
} | {
    function.__name__.replace("_", " "): (partial(in_one_region, function), (256,))
    for function in (
        graphs_that_die_at_once,
        leaves_made_inside,
        gradients_inside,
        attributes_of_custom_functions,
        hooks_of_tensors,
        saved_tensor_hooks_inside,
    )
}


def bytes_of_a_step(name, region):
    """Bytes alive after the forward, and at the peak of the step."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), leaf(*shape)
    with garbage_collector_off(), LiveBytes() as live:
        loss = model(x, region).sum()
        after_forward = live.now
        loss.backward()
    return after_forward, live.peak


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_never_above_stock_pytorch(name, early_stop):
    def ours(function, x):
        return checkpoint(function, x, early_stop=early_stop)

    def stock(function, x):
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False, early_stop=early_stop)

    our_kept, our_peak = bytes_of_a_step(name, ours)
    stock_kept, stock_peak = bytes_of_a_step(name, stock)
    plain_kept, _ = bytes_of_a_step(name, lambda function, x: function(x))
    assert our_kept <= stock_kept < plain_kept
    assert our_peak <= stock_peak
