"""The reentrant variant: forward without a graph, and a backward of its own inside the backward."""

import warnings

import pytest
import torch

import recollect
from recollect.dropin import CheckpointFunction, check_backward_validity, checkpoint, detach_variable
from tools import FREED, IN_PLACE, CountOperators, leaf

NO_INPUT = "None of the inputs have requires_grad=True. Gradients will be None"
INCOMPATIBLE = "torch.utils.checkpoint is incompatible"


def reentrant(function, *args, **options):
    return checkpoint(function, *args, use_reentrant=True, **options)


def frames(function, *args, **options):
    return checkpoint(function, *args, use_reentrant=False, **options)


def plainly(function, *args):
    return function(*args)


def sin_exp(x):
    return x.sin().exp()


# --- How it runs ---


@pytest.mark.parametrize("run", [reentrant, lambda function, x: CheckpointFunction.apply(function, True, x)])
def test_forward_without_a_graph_and_backward_on_detached_inputs(run):
    seen = []

    def function(x):
        y = x.sin()
        seen.append((torch.is_grad_enabled(), y.requires_grad, x))
        return y.exp()

    x = leaf(3)
    y = run(function, x)
    assert y.requires_grad
    y.sum().backward()
    forward, replay = seen
    assert forward[:2] == (False, False)
    assert replay[:2] == (True, True)
    assert replay[2] is not x
    assert replay[2].is_leaf
    assert replay[2].data_ptr() == x.data_ptr(), "detached, not copied"
    assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])


def test_the_function_always_runs_in_full():
    forward, replay = CountOperators(), CountOperators()
    modes = [forward, replay]

    def function(x):
        with modes.pop(0):
            return x.sin().sin().sin()

    y = reentrant(function, leaf(3), early_stop=True)
    y.sum().backward()
    assert forward.names == ["sin"] * 3
    assert replay.counts["sin"] == 3


def test_parameters_inside_get_their_gradients():
    module, x = torch.nn.Linear(3, 3), leaf(2, 3)
    reentrant(module, x).sum().backward()
    got = module.weight.grad, module.bias.grad, x.grad
    module.zero_grad()
    x.grad = None
    module(x).sum().backward()
    assert torch.equal(got[0], module.weight.grad)
    assert torch.equal(got[1], module.bias.grad)
    assert torch.equal(got[2], x.grad)


def test_only_tensors_that_are_arguments_themselves_take_part():
    x = leaf(3)
    with pytest.warns(UserWarning, match=NO_INPUT):
        y = reentrant(lambda parts: parts[0].sin(), [x])
    assert not y.requires_grad

    base, other = leaf(3), leaf(3, seed=1)
    inner = other * 1  # its graph is not the region's business
    seen = []

    def function(x, parts):
        seen.append(parts[0])
        return x.sin() * 2

    reentrant(function, base, [inner]).sum().backward()
    assert seen == [inner, inner], "what is in a list comes back as it is, not detached"
    assert torch.equal(base.grad, base.detach().cos() * 2)


def test_non_tensor_arguments_and_outputs_pass_through():
    marker = object()

    def function(x, scale, nothing, options):
        return x.sin() * scale, "text", nothing, options, marker, 3

    x, options = leaf(3), {"a": 1}
    y, text, nothing, given, same, number = reentrant(function, x, 2.0, None, options)
    assert (text, nothing, number) == ("text", None, 3)
    assert given is options
    assert same is marker
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x.sin() * 2.0).sum(), x)[0])


@pytest.mark.parametrize("result", [None, "text", 3])
def test_a_single_non_tensor_output_passes_through(result):
    assert reentrant(lambda x: result, leaf(3)) == result


@pytest.mark.parametrize("use", ["both", "computed", "input"])
def test_inputs_returned_unchanged(use):
    def gradients(run):
        x, z = leaf(3), leaf(3, seed=1)
        y, same, frozen = run(lambda x, z: (x.sin() * z, z, torch.ones(2)), x, z)
        assert torch.equal(same, z)
        assert not frozen.requires_grad or run is reentrant
        parts = {"both": y.sum() + (same * same).sum(), "computed": y.sum(), "input": (same * same).sum()}
        parts[use].backward()
        return [torch.zeros(3) if tensor.grad is None else tensor.grad for tensor in (x, z)]

    for got, expected in zip(gradients(reentrant), gradients(plainly), strict=True):
        assert torch.equal(got, expected)


def test_inputs_without_grad_get_none():
    x, frozen = leaf(3), torch.ones(3)
    y = reentrant(lambda x, frozen: x * frozen, x, frozen)
    y.sum().backward()
    assert frozen.grad is None
    assert torch.equal(x.grad, torch.ones(3))


def test_integer_and_unused_outputs():
    x = leaf(5)
    values, indices, _unused = reentrant(lambda x: (*x.sort(), x.exp()), x)
    assert not indices.requires_grad
    (values * torch.arange(5.0)).sum().backward()
    got, x.grad = x.grad, None
    (x.sort().values * torch.arange(5.0)).sum().backward()
    assert torch.equal(got, x.grad)


def test_without_grad_it_runs_the_function():
    with torch.no_grad():
        y = reentrant(sin_exp, leaf(3))
    assert not y.requires_grad


# --- Several backwards ---


def test_retain_graph_allows_several_backwards_then_autograds_own_error():
    calls, x = [], leaf(3)

    def function(x):
        calls.append(1)
        return sin_exp(x)

    y = reentrant(function, x).sum()
    grads = []
    for retain_graph in (True, True, False):
        x.grad = None
        y.backward(retain_graph=retain_graph)
        grads.append(x.grad)
    assert len(calls) == 4
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[0], torch.autograd.grad(sin_exp(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match=FREED):
        y.backward()
    assert len(calls) == 4


def test_an_input_changed_in_place_is_autograds_own_error():
    x = leaf(3) * 1
    y = reentrant(sin_exp, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        y.sum().backward()


def test_inputs_go_through_saved_tensor_hooks_around_the_call():
    packed, x = [], leaf(3)

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
        y = reentrant(sin_exp, x)
    assert len(packed) == 1
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])


# --- What it refuses ---


@pytest.mark.parametrize(
    "partial",
    [
        lambda y, x: torch.autograd.grad(y, x),
        lambda y, x: y.backward(inputs=[x]),
        lambda y, x: torch.autograd.backward([y], inputs=[x]),
    ],
)
def test_partial_backward_is_refused(partial):
    calls, x = [], leaf(3)

    def function(x):
        calls.append(1)
        return sin_exp(x)

    y = reentrant(function, x).sum()
    with pytest.raises(RuntimeError, match=INCOMPATIBLE):
        partial(y, x)
    assert calls == [1], "refused before the replay"


@pytest.mark.parametrize("function", [lambda x: x.detach(), lambda x: (x.detach().sin(), 3), lambda x: torch.ones(3)])
def test_no_output_that_needs_grad_is_refused(function):
    x = leaf(3)
    result = reentrant(function, x)
    y = result if isinstance(result, torch.Tensor) else result[0]
    with pytest.raises(
        RuntimeError, match="none of output has requires_grad=True, this checkpoint\\(\\) is not necessary"
    ):
        y.sum().backward()


def test_no_input_that_needs_grad_warns():
    module = torch.nn.Linear(3, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = reentrant(module, torch.ones(2, 3))
    [warning] = caught
    assert NO_INPUT in str(warning.message)
    assert issubclass(warning.category, UserWarning)
    assert not y.requires_grad


@pytest.mark.parametrize("inputs", [(), (torch.ones(2),), [torch.ones(2), 3, None], ([leaf(2)], "text")])
def test_check_backward_validity_warns(inputs):
    with pytest.warns(UserWarning, match=NO_INPUT):
        check_backward_validity(inputs)


def test_check_backward_validity_is_silent_where_a_gradient_flows():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_backward_validity((3, torch.ones(2), leaf(2)))
        check_backward_validity(iter([leaf(2)]))


def test_detach_variable_keeps_requires_grad_and_passes_others():
    x, frozen, marker = leaf(3) * 1, torch.ones(3), object()
    inner = [leaf(2)]
    got = detach_variable((x, frozen, marker, inner, None))
    assert isinstance(got, tuple)
    assert got[0] is not x
    assert got[0].is_leaf
    assert got[0].requires_grad
    assert got[0].data_ptr() == x.data_ptr()
    assert not got[1].requires_grad
    assert got[2] is marker
    assert got[3] is inner
    assert got[4] is None
    assert detach_variable(()) == ()


@pytest.mark.parametrize("wrong", [[torch.ones(2)], torch.ones(2), None, {"a": torch.ones(2)}])
def test_detach_variable_takes_a_tuple_only(wrong):
    with pytest.raises(RuntimeError, match="Only tuple of tensors is supported") as info:
        detach_variable(wrong)
    assert type(wrong).__name__ in str(info.value)


# --- Ambient state ---


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers(preserve):
    noises = []

    def function(x):
        noises.append(torch.rand(8))
        return (x * noises[-1]).sin()

    x = leaf(8)
    torch.manual_seed(1)
    y = reentrant(function, x, preserve_rng_state=preserve)
    torch.manual_seed(2)
    around = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(noises[0], noises[1]) is preserve
    assert torch.equal(torch.get_rng_state(), around) is preserve


@pytest.mark.parametrize("preserve", [True, False])
def test_apply_takes_preserve_rng_state_by_position(preserve):
    noises = []

    def function(x):
        noises.append(torch.rand(8))
        return (x * noises[-1]).sin()

    CheckpointFunction.apply(function, preserve, leaf(8)).sum().backward()
    assert torch.equal(noises[0], noises[1]) is preserve


def test_random_state_is_put_back_if_the_replay_raises():
    calls = []

    def function(x):
        calls.append(torch.rand(1))
        if len(calls) > 1:
            raise KeyError("replay")
        return x.sin()

    x = leaf(3)
    y = reentrant(function, x)
    around = torch.get_rng_state()
    with pytest.raises(KeyError, match="replay"):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), around)
    y = reentrant(sin_exp, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])


def test_an_exception_in_the_forward_leaves_as_it_is():
    error = KeyError("forward")

    def function(x):
        raise error

    with pytest.raises(KeyError) as info:
        reentrant(function, leaf(3))
    assert info.value is error


@pytest.mark.parametrize("inside_first", [True, False])
def test_a_weight_shared_under_autocast_gets_both_gradients(inside_first):
    """Autocast keeps casts of weights: one made without a graph, in the region, must not serve the rest.

    The region's backward is one of its own, so its part of the gradient is added in the weight's own dtype. Without the
    cache plain autograd does the same, which makes it the run to compare with, bit for bit.
    """

    def gradients(run, cache_enabled):
        x, weight = leaf(3, 4), leaf(4, 4, seed=1)

        def function(x):
            return (x @ weight).float().sin()

        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
            if inside_first:
                inside = run(function, x)
                outside = function(inside)
            else:
                outside = run(function, function(x))
        outside.sum().backward()
        return x.grad, weight.grad

    got, expected = gradients(reentrant, True), gradients(plainly, False)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_a_weight_shared_by_two_regions_under_autocast_gets_both_gradients():
    def gradients(run, cache_enabled):
        x, weight = leaf(3, 4), leaf(4, 4, seed=1)

        def function(x):
            return (x @ weight).float().sin()

        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
            y = run(function, run(function, x)).sum()
            y.backward()  # inside the context, so that the casts of the forward are still kept
        return x.grad, weight.grad

    got, expected = gradients(reentrant, True), gradients(plainly, False)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


# --- Regions inside regions ---


def nested(outer, inner):
    def function(x, weight):
        y = outer(lambda x, weight: inner(lambda x: (x @ weight).sin(), x.exp()).tanh(), x, weight)
        return y.cos()

    return function


# In the forward of the outer region nothing that is computed needs grad: the inner one says so, and it does no harm.
@pytest.mark.filterwarnings(f"ignore:{NO_INPUT}:UserWarning")
@pytest.mark.parametrize(("outer", "inner"), [(reentrant, reentrant), (reentrant, frames), (frames, reentrant)])
@pytest.mark.parametrize("times", [1, 2])
def test_nested_regions_of_both_variants(outer, inner, times):
    def gradients(function):
        x, weight = leaf(3, 4), leaf(4, 4, seed=1)
        y = function(x, weight).sum()
        for time in range(times):
            y.backward(retain_graph=time + 1 < times)
        return x.grad, weight.grad

    got, expected = gradients(nested(outer, inner)), gradients(nested(plainly, plainly))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_three_deep_with_random_numbers():
    def function(run):
        def drops(x):
            return torch.dropout(x.sin(), 0.5, True)

        def middle(x):
            return drops(run(drops, x).exp())

        return lambda x: drops(run(middle, x))

    def gradient(run):
        torch.manual_seed(7)
        x = leaf(16)
        y = run(function(run), x)
        torch.manual_seed(8)
        y.sum().backward()
        return x.grad

    expected = gradient(plainly)
    assert torch.equal(gradient(reentrant), expected)
    assert torch.equal(gradient(frames), expected)


def test_in_a_chain_of_both_variants():
    def chain(runs):
        def function(x):
            for run in runs:
                x = run(sin_exp, x)
            return x

        return function

    x = leaf(3)
    expected = torch.autograd.grad(chain([plainly] * 4)(x).sum(), x)[0]
    chain([reentrant, frames, reentrant, frames])(x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_native_takes_it_too():
    x = leaf(3)
    y = recollect.checkpoint(sin_exp, x, use_reentrant=True)
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_another_number_of_results_in_the_replay_says_so(counts):
    calls = []

    def function(x):
        calls.append(1)
        return (x.sin(),) * counts[len(calls) - 1]

    x = leaf(3)
    y = recollect.checkpoint(function, x, use_reentrant=True)
    with pytest.raises(
        recollect.CheckpointError, match=rf"returned {counts[0]} results .* and {counts[1]} in the replay"
    ):
        y[0].sum().backward()
