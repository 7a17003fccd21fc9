"""`checkpoint_sequential`: a chain in pieces, each but the last a region."""

import re

import numpy as np
import pytest
import torch

from recollect.dropin import checkpoint_sequential
from tools import hooks_in_force, leaf


class Counted(torch.nn.Module):
    """A sine that counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x.sin()


def chain(length):
    return [Counted() for _ in range(length)]


def gradient(function, x):
    return torch.autograd.grad(function(x).sum(), x)[0]


def run_plainly(functions):
    def run(x):
        for function in functions:
            x = function(x)
        return x

    return run


CONTAINERS = [list, tuple, torch.nn.ModuleList, lambda functions: torch.nn.Sequential(*functions)]


class Indexed:
    """Length and indexing, and nothing else."""

    def __init__(self, functions):
        self.functions = functions

    def __len__(self):
        return len(self.functions)

    def __getitem__(self, index):
        return self.functions[index]


@pytest.mark.parametrize("container", [*CONTAINERS, Indexed])
@pytest.mark.parametrize("reentrant", [True, False])
def test_every_kind_of_chain(container, reentrant):
    functions, x = [torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3), torch.nn.Tanh()], leaf(2, 3)
    run_plainly(functions)(x).sum().backward()
    parameters = [x, *functions[0].parameters(), *functions[2].parameters()]
    expected = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    y = checkpoint_sequential(container(functions), 2, x, use_reentrant=reentrant)
    assert torch.equal(y, run_plainly(functions)(x))
    y.sum().backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(parameters, expected, strict=True))


@pytest.mark.parametrize(
    ("length", "segments", "replayed"),
    [
        (1, 1, 0),
        (4, 1, 0),
        (4, 2, 2),
        (4, 4, 3),
        (5, 2, 2),  # pieces of two: 2 + 3
        (7, 3, 4),  # 2 + 2 + 3
        (5, 3, 2),  # pieces of one: 1 + 1 + 3
        (5, 4, 3),
        (6, 3, 4),
    ],
)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_every_piece_but_the_last_is_replayed(length, segments, replayed, container, reentrant):
    functions, x = chain(length), leaf(3)
    y = checkpoint_sequential(container(functions), segments, x, use_reentrant=reentrant)
    assert [function.calls for function in functions] == [1] * length
    y.sum().backward()
    assert [function.calls for function in functions] == [2] * replayed + [1] * (length - replayed)
    assert torch.equal(x.grad, gradient(run_plainly([torch.sin] * length), x))


@pytest.mark.parametrize("segments", [2, 3])
def test_each_piece_is_a_region_of_its_own(segments):
    """The last piece but one is replayed first, and by itself."""
    order = []

    def numbered(number):
        def function(x):
            order.append(number)
            return x.sin()

        return function

    y = checkpoint_sequential([numbered(number) for number in range(6)], segments, leaf(3), use_reentrant=False)
    order.clear()
    y.sum().backward()
    assert order == {2: [0, 1, 2], 3: [2, 3, 0, 1]}[segments]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_that_occurs_twice_runs_twice(reentrant):
    shared, x = Counted(), leaf(3)
    model = torch.nn.Sequential(shared, shared, torch.nn.Tanh(), shared)
    y = checkpoint_sequential(model, 2, x, use_reentrant=reentrant)
    assert shared.calls == 3
    assert torch.equal(y, x.sin().sin().tanh().sin())


def test_the_input_may_be_any_value():
    def add(pair):
        return pair[0].sin() + pair[1]

    x, z = leaf(3), leaf(3, seed=1)
    checkpoint_sequential([add, torch.sin, torch.sin], 3, (x, z), use_reentrant=False).sum().backward()
    expected = torch.autograd.grad((x.sin() + z).sin().sin().sum(), (x, z))
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(z.grad, expected[1])


# --- Keywords ---


@pytest.mark.filterwarnings("ignore:the checkpointed region")
@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_preserve_rng_state_goes_to_every_region(preserve, reentrant):
    noises = []

    def function(x):
        noises.append(torch.rand(8))
        return (x * noises[-1]).sin()

    x = leaf(8)
    y = checkpoint_sequential([function] * 3, 3, x, use_reentrant=reentrant, preserve_rng_state=preserve)
    y.sum().backward()
    first, second, _, second_again, first_again = noises
    assert torch.equal(first, first_again) is preserve
    assert torch.equal(second, second_again) is preserve


@pytest.mark.parametrize("name", ["debug", "context_fn", "early_stop", "determinism_check", "scale"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_other_keywords_are_refused(name, reentrant):
    functions = chain(2)
    with pytest.raises(ValueError, match=f"Unexpected keyword arguments: {name}"):
        checkpoint_sequential(functions, 2, leaf(3), use_reentrant=reentrant, **{name: None})
    assert [function.calls for function in functions] == [0, 0]


def test_use_reentrant_is_the_fourth_argument():
    functions = chain(2)
    checkpoint_sequential(functions, 2, leaf(3), False).sum().backward()
    assert [function.calls for function in functions] == [2, 1]


@pytest.mark.parametrize("wrong", [torch.ones(3), 1, 0, "False", (), [True]])
def test_use_reentrant_that_is_no_bool_is_refused(wrong):
    functions = chain(2)
    with pytest.raises(TypeError, match="use_reentrant") as info:
        checkpoint_sequential(functions, 2, leaf(3), wrong)
    assert type(wrong).__name__ in str(info.value)
    assert [function.calls for function in functions] == [0, 0]


# --- Segments ---


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("wrong", [0, -1, 4, 100])
def test_segments_out_of_range_are_refused(container, wrong):
    functions = chain(3)
    with pytest.raises(ValueError, match="segments") as info:
        checkpoint_sequential(container(functions), wrong, leaf(3), use_reentrant=False)
    message = str(info.value)
    assert re.search(rf"got {wrong}\b", message)
    assert "1" in message
    assert "3" in message
    assert [function.calls for function in functions] == [0, 0, 0]
    assert hooks_in_force() is None


@pytest.mark.parametrize("wrong", [2.0, "2", None, [2], torch.tensor(2.0)])
def test_segments_that_are_no_whole_number_are_refused(wrong):
    functions = chain(3)
    with pytest.raises(TypeError, match="segments") as info:
        checkpoint_sequential(functions, wrong, leaf(3), use_reentrant=False)
    assert type(wrong).__name__ in str(info.value)
    assert [function.calls for function in functions] == [0, 0, 0]


def test_an_empty_chain_is_refused():
    with pytest.raises(ValueError, match="functions"):
        checkpoint_sequential([], 1, leaf(3), use_reentrant=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_index_beyond_the_length_is_never_asked_for(reentrant):
    class Around(Indexed):
        def __getitem__(self, index):
            return self.functions[index % len(self)]

    class Keyed(Indexed):
        def __getitem__(self, index):
            return dict(enumerate(self.functions))[index]

    functions, x = [torch.sin, torch.exp, torch.tanh], leaf(3)
    for container in (Keyed, Around):
        assert torch.equal(
            checkpoint_sequential(container(functions), 2, x, use_reentrant=reentrant), run_plainly(functions)(x)
        )


@pytest.mark.parametrize("wrong", [torch.sin, 3, None])
def test_functions_that_cannot_be_indexed_are_refused(wrong):
    with pytest.raises(TypeError):
        checkpoint_sequential(wrong, 1, leaf(3), use_reentrant=False)


def test_a_function_that_is_not_callable_is_refused():
    with pytest.raises(TypeError, match="callable"):
        checkpoint_sequential([torch.sin, 3, torch.sin], 1, leaf(3), use_reentrant=False)


def test_an_exception_in_a_piece_leaves_no_state():
    def raises(x):
        raise KeyError("second")

    for functions, segments in (([torch.sin, raises, torch.sin], 3), ([raises, torch.sin], 2)):
        with pytest.raises(KeyError, match="second"):
            checkpoint_sequential(functions, segments, leaf(3), use_reentrant=False)
        assert hooks_in_force() is None


def test_segments_may_be_any_integer():
    x = leaf(3)
    y = checkpoint_sequential([torch.sin, torch.exp], np.int64(2), x, use_reentrant=False)
    assert torch.equal(y, x.sin().exp())


def test_what_is_no_function_is_named_by_its_place():
    with pytest.raises(TypeError, match=r"functions\[1\] must be callable"):
        checkpoint_sequential([torch.sin, 3], 1, leaf(3), use_reentrant=False)
