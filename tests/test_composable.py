"""Modules that are checkpointed in place: the contract, the hooks, and everything that may happen around them."""

import contextlib
import copy
import dataclasses
import functools
import io
import pickle
import subprocess
import sys
import threading
import types
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect import _torch, dropin
from recollect._engine import calls
from recollect._engine.scope import here
from recollect.composable import checkpoint, contract, get_registry, remove
from tools import (
    LiveBytes,
    Once,
    ambient_state,
    assert_equal,
    engine_objects,
    garbage_collector_off,
    hooks_in_force,
    leaf,
)


class Block(nn.Module):
    """Saves five tensors, draws random numbers, and counts how often it runs."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.down(self.dropout(self.up(x).sin())).exp()


class Failing(nn.Module):
    """Does some work and raises what it is told to."""

    def __init__(self, error=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.error = error

    def forward(self, x):
        y = self.linear(x).sin()
        if self.error is not None:
            raise self.error
        return y.exp()


def seeded(make=Block, seed=0):
    torch.manual_seed(seed)
    return make()


def pair(make=Block, **options):
    """A module that is checkpointed, and an equal one that is not."""
    plain = seeded(make)
    module = copy.deepcopy(plain)
    assert checkpoint(module, **options) is module
    return module, plain


def gradients(module, x, *, run=None, seed=1, **call):
    """The result and all gradients of one step."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = module(x) if run is None else run(module, x)
    y.sum().backward()
    return [y.detach(), x.grad, *(None if one.grad is None else one.grad.clone() for one in module.parameters())]


def assert_same_step(module, plain, x=None, *, steps=2, **options):
    x = leaf(3, 4) if x is None else x
    for step in range(steps):
        assert_equal(gradients(module, x, seed=step, **options), gradients(plain, x, seed=step, **options))


def assert_clean(module=None):
    """No state is left behind, in the thread or in the module."""
    assert hooks_in_force() is None
    assert here.scope is None
    assert here.awaited is None
    if module is not None:
        state = checkpoint.state(module)
        assert state._ac_generator is None
        assert state.enable_hook is True


@pytest.fixture(params=["guarded", "by hooks alone"])
def _with_and_without_guard(request, monkeypatch):
    """Where torch has no place for a guard around the forward, the hooks do what they can."""
    if request.param != "guarded":
        monkeypatch.setattr(calls, "replace_forward", lambda *_: False)


both_ways = pytest.mark.usefixtures("_with_and_without_guard")


# --- The contract ---


def test_each_call_has_a_state_of_its_own():
    @contract()
    def api1(module):
        api1.state(module).value = "any"
        return module

    @contract()
    def api2(module):
        return module

    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert api1(one) is one
    assert api1(other) is other
    assert api1.state(one).value == "any"
    assert api1.state(one) is not api1.state(other)
    assert api1.state(one) != api1.state(other), "states compare by identity"
    assert api2.state(one) is None
    api1.state(one).anything = 3
    assert api1.state(one).anything == 3
    assert api2.state(one) is None, "asking installs nothing"
    assert list(get_registry(one)) == ["api1"]


def test_a_state_of_a_class_of_ones_own():
    class MyState:
        def __init__(self):
            self.count = 7

    @contract(MyState)
    def api(module):
        assert type(api.state(module)) is MyState

    module = nn.Linear(2, 2)
    assert api(module) is module, "None means what it was given"
    assert api.state(module).count == 7
    assert api.__name__ == "api"


def test_the_registry_is_in_order_and_none_where_there_is_none():
    apis = []
    for name in ("first", "second", "third"):

        def function(module):
            return module

        function.__name__ = name
        apis.append(contract()(function))
    module = nn.Sequential(nn.Linear(2, 2))
    assert get_registry(module) is None
    for api in apis[::-1]:
        api(module)
    registry = get_registry(module)
    assert list(registry) == ["third", "second", "first"]
    assert len(set(map(id, registry.values()))) == 3
    assert registry["first"] != registry["second"], "items compare by identity"
    assert get_registry(module[0]) is None


def test_modules_of_one_call_share_state_and_item():
    @contract()
    def multi(modules):
        return modules

    modules = [nn.Linear(2, 2) for _ in range(5)]
    given = modules[:3]
    assert multi(given) is given
    multi(modules[3:])
    states = [multi.state(module) for module in modules]
    assert states[0] is states[1] is states[2]
    assert states[3] is states[4] is not states[0]
    items = [get_registry(module)["multi"] for module in modules]
    assert items[0] is items[2] is not items[3]
    with pytest.raises(
        AssertionError,
        match=r"Each distinct composable distributed API can only be applied to a module once. "
        "multi has already been applied to the following module:",
    ):
        multi([nn.Linear(2, 2), modules[4]])


def test_nothing_is_applied_to_the_others_if_one_of_a_list_is_refused():
    @contract()
    def multi(modules):
        return modules

    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    multi([one])
    before = vars(other).copy()
    with pytest.raises(AssertionError, match="multi has already been applied"):
        multi([other, one])
    assert vars(other) == before
    with pytest.raises(AssertionError, match="multi has already been applied"):
        multi([other, other])
    assert vars(other) == before
    multi([other])


def test_the_outer_one_of_two_nested_modules_has_the_state():
    @contract()
    def multi(modules):
        return modules

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    multi([model[0][0], model[0], model[1]])
    assert multi.state(model[0]) is multi.state(model[1]) is not None
    assert multi.state(model[0][0]) is None
    multi([model[0][0]])


def test_a_second_application_is_refused():
    @contract()
    def api1(module):
        return module

    module = nn.Linear(2, 2)
    state = api1.state(api1(module))
    with pytest.raises(AssertionError, match="api1 has already been applied"):
        api1(module)
    assert api1.state(module) is state

    def another():
        @contract()
        def api1(module):
            return module

        return api1

    with pytest.raises(AssertionError, match="api1 has already been applied"):
        another()(module)
    assert another().state(module) is None, "the name is taken, the state is not its own"


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(1))


def wrap_a(module):
    module.a = nn.Sequential(module.a)


def reorder(module):
    a = module.a
    del module.a
    module.a = a


def drop_buffer(module):
    del module.steps


def add_buffer(module):
    module.register_buffer("more", torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "kind", "details"),
    [
        (wrap_a, "parameters", ["missing: 'a.weight', 'a.bias'", "new: 'a.0.weight', 'a.0.bias'"]),
        (reorder, "parameters", ["changed its order: 'a.weight', 'a.bias', 'b.weight', 'b.bias'"]),
        (drop_buffer, "buffers", ["missing: 'steps'"]),
        (add_buffer, "buffers", ["new: 'more'"]),
        (lambda module: setattr(module, "act", nn.ReLU()), "modules", ["new: 'act'"]),
        (lambda module: delattr(module, "b"), "parameters", ["missing: 'b.weight', 'b.bias'"]),
    ],
)
def test_an_api_that_changes_names_is_refused(change, kind, details):
    @contract()
    def api(module):
        change(module)
        return module

    module = WithBuffer()
    with pytest.raises(RuntimeError) as info:
        api(module)
    message = str(info.value)
    assert f"Checking {kind}: Composable distributed API implementations cannot modify FQNs." in message
    for detail in details:
        assert detail in message
    assert api.state(module) is None
    assert get_registry(module) is None


def test_an_api_may_return_other_modules_with_the_same_names():
    @contract()
    def doubled(module):
        return copy.deepcopy(module).double()

    module = nn.Linear(2, 2)
    other = doubled(module)
    assert other is not module
    assert other.weight.dtype == torch.float64

    @contract()
    def swapped(modules):
        return [copy.deepcopy(one) for one in modules]

    assert len(swapped([nn.Linear(2, 2), nn.ReLU()])) == 2

    @contract()
    def fewer(modules):
        return modules[:1]

    with pytest.raises(AssertionError, match="given 2 and returned 1"):
        fewer([nn.Linear(2, 2), nn.ReLU()])

    @contract()
    def renamed_in_a_list(modules):
        return [nn.Sequential(one) for one in modules]

    with pytest.raises(RuntimeError, match="Checking parameters: Composable distributed API"):
        renamed_in_a_list([nn.Linear(2, 2)])


def test_an_api_that_raises_has_not_been_applied():
    @contract()
    def api(module, fail):
        assert api.state(module) is not None
        if fail:
            raise fail

    module = nn.Linear(2, 2)
    before = vars(module).copy()
    for error in (ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            api(module, error)
        assert vars(module) == before
    api(module, fail=None)
    assert api.state(module) is not None


@pytest.mark.parametrize("wrong", [3, None, "model", nn.Linear, [nn.Linear(2, 2), 3], {nn.Linear(2, 2)}])
def test_an_api_takes_modules_only(wrong):
    @contract()
    def api(module):
        raise AssertionError("it must not be called")

    with pytest.raises(TypeError, match=r"the first argument of api must be a torch.nn.Module or a list of them"):
        api(wrong)
    for ask in (api.state, get_registry, checkpoint.state):
        with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got"):
            ask(wrong)


def test_an_api_returns_modules_only():
    @contract()
    def api(module):
        return 3

    with pytest.raises(TypeError, match=r"what api returns must be a torch.nn.Module or a list of them, got int 3"):
        api(nn.Linear(2, 2))


def test_the_decorator_without_parentheses_is_refused():
    with pytest.raises(TypeError, match=r"state_cls must be a class, got function .*Write @contract\(\)"):

        @contract
        def api(module):
            return module


# --- What is installed ---


def test_the_module_stays_what_it_is():
    model = nn.Sequential(Block(), nn.Linear(4, 1))
    names = [list(dict(found())) for found in (model.named_parameters, model.named_buffers, model.named_modules)]
    kinds, keys, text = [type(one) for one in model.modules()], list(model.state_dict()), repr(model)
    assert checkpoint(model[0]) is model[0]
    assert [
        list(dict(found())) for found in (model.named_parameters, model.named_buffers, model.named_modules)
    ] == names
    assert all(isinstance(one, kind) for one, kind in zip(model.modules(), kinds, strict=True))
    assert list(model.state_dict()) == keys
    assert repr(model) == text
    assert isinstance(model[0], Block)
    assert "forward" not in vars(model[0])
    model.load_state_dict(seeded(lambda: nn.Sequential(Block(), nn.Linear(4, 1))).state_dict())


def test_a_step_is_the_same_bit_for_bit_and_runs_the_forward_twice():
    module, plain = pair()
    assert_same_step(module, plain, steps=3)
    assert (module.runs, plain.runs) == (6, 3)


def test_nothing_that_is_computed_inside_outlives_the_forward():
    def forward_bytes(module):
        x = leaf(64, 4)
        module(x)  # what is made once
        with LiveBytes() as alive:
            y = module(x)
            return alive.now - y.untyped_storage().nbytes()

    module, plain = pair(functools.partial(Block, 0.0))
    assert forward_bytes(module) == 0
    assert forward_bytes(plain) > 0


def test_a_replay_stops_early(count_operators):
    module, _ = pair(lambda: nn.Sequential(nn.Tanh(), nn.Sigmoid()), early_stop=True)
    y = module(leaf(3))
    with count_operators() as operators:
        y.sum().backward()
    assert (operators.counts["tanh"], operators.counts["sigmoid"]) == (1, 1)

    class Sine(nn.Module):
        def forward(self, x):
            return x.sin()

    module, _ = pair(Sine)
    y = module(leaf(3))
    with count_operators() as operators:
        y.sum().backward()
    assert operators.counts["sin"] == 0


def test_the_default_check_is_the_native_one():
    class Unsteady(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0

        def forward(self, x):
            return (x.sin() * self.scale).exp()

    module = checkpoint(Unsteady())
    y = module(leaf(3))
    module.scale = 3.0
    with pytest.raises(recollect.CheckpointError) as info:
        y.sum().backward()
    message = str(info.value)
    assert "the checkpointed region test_the_default_check_is_the_native_one.<locals>.Unsteady (" in message or (
        "the checkpointed region Unsteady (" in message
    )
    assert "aten.mul in Unsteady, at" in message
    assert "'scale' of Unsteady was 2.0 in the forward and is 3.0" in message
    assert info.value.where.endswith("in forward")
    assert "test_composable.py" in info.value.where
    assert_clean(module)


def test_each_module_is_verified_once():
    modules = [checkpoint(seeded(seed=seed)) for seed in range(2)]
    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(here.scope is not None and here.scope.recorder is not None)
            return func(*args, **(kwargs or {}))

    def recorded(module):
        seen.clear()
        y = module(leaf(3, 4))
        with Look():
            y.sum().backward()
        return any(seen)

    assert recorded(modules[0]) is True
    assert recorded(modules[0]) is False
    assert recorded(modules[1]) is True, "another module with the same code"
    assert recorded(modules[1]) is False
    modules[0].eval()
    assert recorded(modules[0]) is True, "it may do other things in evaluation"
    recollect.verify_again(modules[0])
    assert recorded(modules[0]) is True


# --- Options ---


def test_a_reentrant_one_is_refused():
    module = nn.Linear(2, 2)
    with pytest.raises(
        NotImplementedError,
        match=r"use_reentrant=True is not supported in composable checkpoint. Please use "
        "torch.utils.checkpoint.checkpoint instead.",
    ):
        checkpoint(module, use_reentrant=True)
    for allowed in (False, None):
        checkpoint(module, use_reentrant=allowed)
        remove(module)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"foo": 1}, ValueError, "Unexpected keyword arguments: foo"),
        ({"foo": 1, "bar": 2}, ValueError, "Unexpected keyword arguments: foo,bar"),
        ({"determinism_check": "last"}, ValueError, "determinism_check must be one of 'none', 'default'"),
        ({"debug": "yes"}, TypeError, "debug must be True or False, got str 'yes'"),
        ({"early_stop": None}, TypeError, "early_stop must be True or False"),
        ({"preserve_rng_state": "some"}, TypeError, "preserve_rng_state must be True, False or 'all'"),
        ({"context_fn": 3}, TypeError, "context_fn must be callable"),
        ({"policy": 3}, TypeError, "policy must be a policy"),
    ],
)
def test_bad_options_are_refused_at_the_door(options, error, message):
    module = nn.Linear(2, 2)
    before = {name: copy.copy(value) for name, value in vars(module).items()}
    with pytest.raises(error, match=message):
        checkpoint(module, **options)
    assert vars(module) == before
    checkpoint(module)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"the first argument of checkpoint must be a torch.nn.Module"):
        checkpoint(torch.sin)
    linear = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got list"):
        checkpoint([linear])
    assert get_registry(linear) is None


def test_it_is_applied_once():
    module = checkpoint(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="checkpoint has already been applied"):
        checkpoint(module)
    assert len(module._forward_pre_hooks) == 1


@pytest.mark.parametrize("kind", ["generator", "coroutine", "result"])
def test_a_forward_that_runs_later_is_refused(kind):
    class Later(nn.Module):
        if kind == "generator":

            def forward(self, x):
                yield x.sin()

        elif kind == "coroutine":

            async def forward(self, x):
                return x.sin()

        else:

            def forward(self, x):
                return (one.sin() for one in [x])

    if kind == "result":
        with pytest.raises(TypeError, match=r"got .*Later .*which gives a generator"):
            checkpoint(Later())(leaf(3))
    else:
        with pytest.raises(TypeError, match=f"got .*Later .*which gives a {kind}"):
            checkpoint(Later())
    assert_clean()


def test_context_fn_is_called_once_per_forward_and_its_contexts_are_around_both():
    log = []

    @contextlib.contextmanager
    def manager(name):
        log.append(f"enter {name}")
        try:
            yield
        finally:
            log.append(f"exit {name}")

    def context_fn():
        log.append("called")
        return manager("forward"), contextlib.ExitStack()

    module, plain = pair(context_fn=context_fn)
    y = module(leaf(3, 4))
    assert log == ["called", "enter forward", "exit forward"]
    y.sum().backward()
    assert log == ["called", "enter forward", "exit forward"]
    assert_same_step(module, plain, steps=1)
    assert log.count("called") == 2
    with torch.no_grad():
        module(leaf(3, 4))
    assert log[6:] == ["called"], "neither is entered without grad"


class Again:
    """A context that can be entered several times."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __enter__(self):
        self.log.append(("enter", self.name))

    def __exit__(self, kind, value, tb):
        self.log.append(("exit", self.name, kind))
        return


def test_the_context_of_the_replay_is_entered_anew_each_time():
    log = []
    module, _ = pair(context_fn=lambda: (Again(log, "forward"), Again(log, "replay")), early_stop=False)
    y = module(leaf(3, 4)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert (
        log
        == [("enter", "forward"), ("exit", "forward", None)]
        + [
            ("enter", "replay"),
            ("exit", "replay", None),
        ]
        * 2
    )


def test_dispatch_modes_in_the_contexts_see_the_modules_operators():
    seen = {"forward": [], "replay": []}

    class See(TorchDispatchMode):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[self.name].append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    class Two(nn.Module):
        def forward(self, x):
            return x.sin().exp()

    module = Two()
    module.register_forward_hook(lambda module, args, result: result.tan())
    checkpoint(module, context_fn=lambda: (See("forward"), See("replay")), determinism_check="default")
    module(leaf(3)).sum().backward()
    assert seen == {"forward": ["sin", "exp"], "replay": ["detach", "sin", "exp", "detach"]} or seen == {
        "forward": ["sin", "exp"],
        "replay": ["detach", "sin", "exp"],
    }


def test_selective_checkpointing_by_the_drop_ins_contexts(count_operators):
    contexts = functools.partial(
        dropin.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.sin.default]
    )
    module, plain = pair(context_fn=contexts)
    y = module(leaf(3, 4))
    with count_operators() as operators:
        y.sum().backward()
    assert (operators.counts["addmm"], operators.counts["sin"], operators.counts["exp"]) == (0, 0, 1)
    assert_same_step(module, plain)


@pytest.mark.parametrize(
    "policy",
    [
        recollect.save_ops(torch.ops.aten.addmm),
        lambda op_or_name, ctx: recollect.Save() if "addmm" in str(op_or_name) else None,
        recollect.policies.save_matmuls | recollect.save_ops(torch.ops.aten.gelu),
    ],
)
def test_a_policy(policy, count_operators):
    module, plain = pair(policy=policy)
    y = module(leaf(3, 4))
    with count_operators() as operators:
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    assert operators.counts["addmm"] == 0
    assert operators.counts["sin"] == 2
    assert_same_step(module, plain)


def test_a_policy_that_matches_nothing_is_told_of():
    module = checkpoint(Block(), policy=recollect.save_ops(torch.ops.aten.conv2d))
    with pytest.warns(UserWarning, match="matched nothing in Block") as caught:
        module(leaf(3, 4))
    assert caught[0].filename == __file__


def test_a_policy_that_refuses_says_so():
    def wrong(op_or_name, ctx):
        return True

    module = checkpoint(Block(), policy=wrong)
    with pytest.raises(TypeError, match=r"must give recollect.Save\(\), Recompute"):
        module(leaf(3, 4))
    assert_clean(module)


def test_the_overrides_of_the_process_count():
    module = checkpoint(seeded())
    with dropin.set_checkpoint_early_stop(False):
        y = module(leaf(3, 4))
    ended = []
    module.register_forward_hook(lambda *_: ended.append(1))
    y.sum().backward()
    assert ended == [1], "the replay ran to its end"

    module = checkpoint(seeded())
    with dropin.set_checkpoint_debug_enabled(True):
        y = module(leaf(3, 4))
    module.up = nn.Linear(4, 9)
    module.down = nn.Linear(9, 4)
    with pytest.raises(recollect.CheckpointError, match="debug=True"):
        y.sum().backward()
    assert_clean(module)


def test_debug_lists_the_operators_of_both_runs():
    once = Once()

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            x = self.inner(x)
            return x.sin().exp() if once() else x.cos().exp()

    model = nn.Sequential(checkpoint(Branch(), debug=True, determinism_check="default"))
    y = model(leaf(3)).sum()
    with pytest.raises(recollect.CheckpointError) as info:  # noqa: PT012
        y.backward(torch.ones(()))  # the values differ and nothing else
        raise recollect.CheckpointError("no error under the drop-in's check")
    assert "no error" in str(info.value)

    once = Once()
    module = Branch()
    module.forward = types.MethodType(lambda self, x: self.inner(x).sin().exp() if once() else self.inner(x), module)
    model = nn.Sequential(checkpoint(module, debug=True, determinism_check="default"))
    y = model(leaf(3)).sum()
    with pytest.raises(recollect.CheckpointError) as info:
        y.backward()
    message = str(info.value)
    forward, replay = message.split("Operators of the replay")
    line = "aten.t.default -> float32[3, 3] on cpu in Branch.inner"
    assert line in forward
    assert line in replay, "the model around it is not on the path, neither here nor there"


def test_random_numbers_are_not_preserved_if_the_user_says_so():
    module = checkpoint(seeded(), preserve_rng_state=False, determinism_check="values")
    y = module(leaf(3, 4))
    with pytest.raises(recollect.CheckpointError, match="preserve_rng_state=False"):
        y.sum().backward()
    assert_clean(module)


# --- How a module is called ---


def test_several_calls_in_one_forward():
    def run(module, x):
        y = module(x)
        return module(y) * module(module(x)) + y

    module, plain = pair()
    assert_same_step(module, plain, run=run)


def test_shared_between_two_parents():
    class Parents(nn.Module):
        def __init__(self):
            super().__init__()
            shared = Block()
            self.one = nn.Sequential(nn.Linear(4, 4), shared)
            self.other = nn.Sequential(shared, nn.Linear(4, 4))

        def forward(self, x):
            return self.other(self.one(x)).tanh()

    plain = seeded(Parents)
    module = copy.deepcopy(plain)
    checkpoint(module.one[1])
    assert checkpoint.state(module.other[0]) is not None
    assert_same_step(module, plain)
    checkpoint(module.one)
    assert_same_step(module, plain)
    checkpoint(module)
    assert_same_step(module, plain)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.3)
        self.regions = []

    def forward(self, x, depth=3):
        if checkpoint.state(self) is not None:
            self.regions.append((depth, recollect.is_recomputing(), checkpoint.state(self).enable_hook))
        x = self.dropout(self.linear(x).sin())
        if depth:
            x = self(x, depth=depth - 1) * self(x.cos(), depth - 1)
        return x.tanh()


@both_ways
@pytest.mark.parametrize("early_stop", [True, False])
def test_recursion(early_stop):
    module, plain = pair(Recursive, early_stop=early_stop)
    assert_same_step(module, plain)
    assert_clean(module)


def test_enable_hook_is_false_during_its_own_replay_alone():
    module = checkpoint(seeded(Recursive), early_stop=False)
    y = module(leaf(3, 4), depth=1)
    assert module.regions == [(1, False, True), (0, False, True), (0, False, True)]
    module.regions.clear()
    y.sum().backward()
    # The outer replay calls the inner ones as regions; each of these is then replayed by itself.
    assert module.regions == [(1, True, False), (0, True, True), (0, True, True), (0, True, False), (0, True, False)]
    assert checkpoint.state(module).enable_hook is True


@pytest.mark.parametrize("outer", ["checkpoint", "remat", "composable", "reentrant"])
@pytest.mark.parametrize("early_stop", [True, False])
@both_ways
def test_nested_in_an_outer_region(outer, early_stop):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = nn.Linear(4, 4), Block(), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.block(self.first(x).sin()).tanh()).exp()

    plain = seeded(Outer)
    module = copy.deepcopy(plain)
    checkpoint(module.block, early_stop=early_stop)
    if outer == "composable":
        checkpoint(module, early_stop=early_stop)

    def run(one, x):
        if one is plain or outer == "composable":
            return one(x)
        if outer == "remat":
            return recollect.remat(one, early_stop=early_stop)(x)
        if outer == "reentrant":
            return dropin.checkpoint(one, x, use_reentrant=True)
        return recollect.checkpoint(one, x, early_stop=early_stop)

    assert_same_step(module, plain, run=run)
    assert_clean(module.block)


@both_ways
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("way", ["functions", "modules", "mixed"])
def test_a_stop_cuts_modules_short_at_any_depth(depth, way):
    """The replay of the outermost region stops within the forward of the innermost module."""

    class Nest(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.inner = Nest(depth - 1) if depth else None
            self.level = depth

        def forward(self, x):
            x = self.linear(x).sin()
            if self.inner is not None:
                if not self.is_plain and (way == "functions" or (way == "mixed" and self.level % 2)):
                    x = recollect.checkpoint(self.inner, x)
                else:
                    x = self.inner(x)
            return x.exp()

    Nest.is_plain = True
    plain = seeded(lambda: Nest(depth))
    module = copy.deepcopy(plain)
    for one in module.modules():
        if isinstance(one, Nest):
            one.is_plain = False
            checkpoint(one)
            one.register_forward_hook(lambda *_: None, always_call=True)
    assert_same_step(module, plain)
    assert_clean(module)
    before = ambient_state()

    class Cut(nn.Module):
        """Saves its last tensor inside of the inner module."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) if self.inner is not None else x.sin().cos()

    cut = None
    for _ in range(depth + 1):
        cut = checkpoint(Cut(cut))
    x, expected = leaf(3), leaf(3)
    cut(x).sum().backward()
    expected.sin().cos().sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert ambient_state() == before
    assert_clean(cut)


def test_keyword_arguments_and_containers():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *more, scale, parts, **rest):
            total = self.linear(x) * scale
            for one in (*more, *parts["list"], *rest.values()):
                total = total + one.sin()
            parts["list"].append(x)
            return total.exp()

    def run(module, x):
        return module(x, x * 2, scale=x.sin(), parts={"list": [x, x.cos()]}, extra=x.tan())

    module, plain = pair(Many)
    assert_same_step(module, plain, run=run)


def test_an_input_that_was_changed_is_named():
    module = checkpoint(nn.Sequential(nn.Tanh(), nn.Tanh()))
    x = leaf(3) * 1
    y = module(x)
    x.mul_(2)
    with pytest.raises(recollect.CheckpointError, match=r"args\[0\] .*Sequential.*, changed after"):
        y.sum().backward()

    class Masked(nn.Module):
        def forward(self, x, *, mask):
            return (x * mask["of"]).sin()

    module = checkpoint(Masked())
    mask = torch.ones(3)
    y = module(leaf(3), mask={"of": mask})
    mask.zero_()
    with pytest.raises(recollect.CheckpointError, match=r"mask\['of'\]"):
        y.sum().backward()
    assert_clean(module)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    state: dict


@pytest.mark.parametrize(
    "shape",
    [
        lambda a, b: {"a": a, "b": [b, (a, None)]},
        lambda a, b: Output(a, {"b": b}),
        lambda a, b: (a, b, "text", 3),
        lambda a, b: [a, b],
    ],
)
def test_outputs_of_any_structure(shape):
    class Shaped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return shape(self.linear(x).sin(), x.exp())

    def run(module, x):
        result = module(x)
        parts = result.__dict__ if isinstance(result, Output) else result
        tensors = [one for one in torch.utils._pytree.tree_leaves(parts) if isinstance(one, torch.Tensor)]
        return sum(one.tan() for one in tensors)

    module, plain = pair(Shaped)
    assert type(module(leaf(3, 4))) is type(plain(leaf(3, 4)))
    assert_same_step(module, plain, run=run)


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens).sin())

    plain = seeded(Tied)
    module = copy.deepcopy(plain)
    checkpoint(module)
    assert module.head.weight is module.embedding.weight
    tokens = torch.tensor([[0, 3, 5]])
    for one in (module, plain):
        one(tokens).tan().sum().backward()
    assert torch.equal(module.head.weight.grad, plain.head.weight.grad)


def test_training_and_evaluation():
    module, plain = pair()
    for one in (module, plain):
        one.eval()
    assert_same_step(module, plain)
    for one in (module, plain):
        one.train()
    assert_same_step(module, plain)
    x = leaf(3, 4)
    torch.manual_seed(0)
    y = module(x)
    module.eval()  # between forward and backward: it is put back for the replay
    y.sum().backward()
    assert module.training is False
    expected = leaf(3, 4)
    torch.manual_seed(0)
    plain(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_without_grad_it_runs_plainly():
    module = checkpoint(seeded())
    before = len(engine_objects())
    with torch.no_grad():
        y = module(leaf(3, 4))
    assert not y.requires_grad
    assert module.runs == 1
    assert len(engine_objects()) == before
    with torch.inference_mode():
        module(leaf(3, 4))
    assert_clean(module)


@both_ways
def test_a_user_who_switches_it_off_runs_it_plainly():
    module, plain = pair()
    state = checkpoint.state(module)
    assert state.enable_hook is True
    state.enable_hook = False
    assert state.enable_hook is False
    before = len(engine_objects())
    y = module(leaf(3, 4))
    assert len(engine_objects()) == before
    y.sum().backward()
    assert module.runs == 1
    assert_same_step(module, plain)
    state.enable_hook = True
    y = module(leaf(3, 4))
    state.enable_hook = False
    y.sum().backward()  # what was begun as a region is replayed
    assert module.runs == 5
    state.enable_hook = True
    assert_clean(module)
    with pytest.raises(TypeError, match="enable_hook must be True or False, got int 3"):
        state.enable_hook = 3


@both_ways
def test_switched_off_and_on_while_a_forward_runs():
    class Switching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, depth=1):
            state = checkpoint.state(self)
            if state is not None and depth:
                state._enabled = False
            y = self.linear(x).sin()
            if depth:
                y = self(y, depth=0)
            if state is not None:
                state._enabled = True
            return y.exp()

    module, plain = pair(Switching)
    assert_same_step(module, plain)
    assert_clean(module)


def test_the_second_backward_and_the_freed_graph():
    module, plain = pair(functools.partial(Block, 0.0))
    results = []
    for one in (module, plain):
        x = leaf(3, 4)
        y = one(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.sin().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in one.parameters())])
        y = one(x).sum()
        y.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            y.backward()
    assert_equal(*results)


def test_scripted_modules_inside():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    for _ in range(3):  # TorchScript runs another graph once it has seen a few runs
        scripted(leaf(3, 4)).sum().backward()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = scripted
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(self.linear(x).sin())

    torch.manual_seed(0)
    plain, module = Outer(), Outer()
    module.load_state_dict(plain.state_dict())
    checkpoint(module)
    for _ in range(3):
        for one in (module, plain):
            one.zero_grad()
        x, expected = leaf(3, 4), leaf(3, 4)
        module(x).exp().sum().backward()
        plain.inner = scripted
        got = [x.grad, module.linear.weight.grad.clone(), scripted[0].weight.grad.clone()]
        scripted.zero_grad()
        plain(expected).exp().sum().backward()
        assert_equal(got, [expected.grad, plain.linear.weight.grad, scripted[0].weight.grad])
    assert_clean(module)


# --- Other hooks of the module ---


def scale_args(module, args):
    return (args[0] * 2, *args[1:])


def scale_everything(module, args, kwargs):
    return (args[0].cos(), *args[1:]), {name: value * 3 for name, value in kwargs.items()}


def tan_of_result(module, args, result):
    return result.tan()


def result_times_kwargs(module, args, kwargs, result):
    return result * kwargs["scale"]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, scale):
        return self.dropout(self.linear(x).sin()) * scale


HOOKS = {
    "pre-hook": lambda module, prepend: module.register_forward_pre_hook(scale_args, prepend=prepend),
    "pre-hook with keywords": lambda module, prepend: module.register_forward_pre_hook(
        scale_everything, with_kwargs=True, prepend=prepend
    ),
    "hook": lambda module, prepend: module.register_forward_hook(tan_of_result, prepend=prepend),
    "hook with keywords": lambda module, prepend: module.register_forward_hook(
        result_times_kwargs, with_kwargs=True, prepend=prepend
    ),
    "always called": lambda module, prepend: module.register_forward_hook(
        lambda *_: None, always_call=True, prepend=prepend
    ),
    "backward hook": lambda module, prepend: module.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,)),
    "backward pre-hook": lambda module, prepend: module.register_full_backward_pre_hook(lambda _, go: (go[0] * 3,)),
}


@both_ways
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_its_own(hook, prepend, when, early_stop):
    plain = seeded(Scaled)
    module = copy.deepcopy(plain)
    for one in (plain, module):
        if one is module and when == "after":
            checkpoint(module, early_stop=early_stop)
        HOOKS[hook](one, prepend)
        if one is module and when == "before":
            checkpoint(module, early_stop=early_stop)

    def run(module, x):
        return module(x.sin(), scale=x.exp())

    assert_same_step(module, plain, run=run)
    assert_clean(module)


@both_ways
@pytest.mark.parametrize("early_stop", [True, False])
def test_all_kinds_of_hooks_together(early_stop):
    plain = seeded(Scaled)
    module = copy.deepcopy(plain)
    for one in (plain, module):
        for prepend in (True, False):
            for register in HOOKS.values():
                register(one, prepend)
        if one is module:
            checkpoint(module, early_stop=early_stop)
        for prepend in (True, False):
            for register in HOOKS.values():
                register(one, prepend)

    def run(module, x):
        return module(x.sin(), scale=x.exp())

    assert_same_step(module, plain, run=run)
    assert_clean(module)


@both_ways
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("kind", ["pre-hook", "hook"])
def test_hooks_for_all_modules(kind, draws, early_stop):
    """They run before ours, save tensors, draw random numbers and replace what they are given."""

    def change(value):
        return (value * torch.rand_like(value)).sin() if draws else (value * value.exp()).sin()

    def pre_hook(module, args):
        return (change(args[0]),) if isinstance(module, Block) else None

    def hook(module, args, result):
        return change(result) if isinstance(module, Block) else None

    handle = register_module_forward_pre_hook(pre_hook) if kind == "pre-hook" else register_module_forward_hook(hook)
    try:
        module, plain = pair(early_stop=early_stop)
        assert_same_step(module, plain)
    finally:
        handle.remove()
    assert_clean(module)


def test_the_other_hooks_run_again_in_the_replay():
    log = []
    module = seeded()
    module.register_forward_pre_hook(lambda *_: log.append("before"))
    checkpoint(module, early_stop=False)
    module.register_forward_pre_hook(lambda *_: log.append("gather"), prepend=True)
    module.register_forward_hook(lambda *_: log.append("after"))
    y = module(leaf(3, 4))
    assert log == ["gather", "before", "after"]
    y.sum().backward()
    assert log == ["gather", "before", "after"] * 2


def test_hooks_know_that_a_module_is_recomputed():
    log = []
    module = seeded()
    module.register_forward_pre_hook(lambda *_: log.append(recollect.is_recomputing()))
    module.register_forward_hook(lambda *_: log.append(recollect.is_recomputing()))
    checkpoint(module, early_stop=False)
    module.register_forward_pre_hook(lambda *_: log.append(recollect.is_recomputing()), prepend=True)
    module.register_forward_hook(recollect.skip_on_replay(lambda *_: log.append("skipped")))
    module(leaf(3, 4)).sum().backward()
    assert log == [False, False, False, "skipped", True, True, True]


def test_our_hook_after_the_forward_runs_before_the_others():
    seen = []

    def look(*_):
        seen.append((hooks_in_force(), here.scope, checkpoint.state(module)._ac_generator))

    module = seeded()
    module.register_forward_hook(look)
    checkpoint(module)
    module.register_forward_hook(look)
    module(leaf(3, 4))
    assert seen == [(None, None, None)] * 2


def test_what_other_hooks_save_after_the_forward_is_not_part_of_the_region():
    weight = torch.full((4,), 2.0, requires_grad=True)
    plain = seeded(functools.partial(Block, 0.0))
    module = copy.deepcopy(plain)
    for one in (module, plain):
        one.register_forward_hook(lambda module, args, result: (result * weight).sin())
    checkpoint(module, early_stop=False)
    assert_same_step(module, plain)


def test_a_hook_in_the_forward_that_did_not_run_in_the_replay_is_an_error_of_values():
    module = seeded(functools.partial(Block, 0.0))
    once = Once()
    module.register_forward_pre_hook(lambda module, args: (args[0] * 2,) if once() else None)
    checkpoint(module)
    y = module(leaf(3, 4))
    with pytest.raises(recollect.CheckpointError):
        y.sum().backward()
    assert_clean(module)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.parametrize("when", ["before", "after"])
def test_norms_that_are_hooks(norm, when):
    """The old ones compute the weight in a pre-hook, and one of them changes a buffer there, in every run."""
    plain = nn.Linear(4, 4)
    module = copy.deepcopy(plain)
    if when == "after":
        checkpoint(module)
    for one in (plain, module):
        torch.manual_seed(0)
        norm(one)
    if when == "before":
        checkpoint(module)

    def run(module, x):
        return module(x.sin()).exp()

    for step in range(3):
        assert_equal(
            gradients(module, leaf(3, 4), run=run, seed=step), gradients(plain, leaf(3, 4), run=run, seed=step)
        )
        assert_equal(dict(module.named_buffers()), dict(plain.named_buffers()))


def test_a_pre_hook_that_draws_random_numbers():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.raw = nn.Parameter(torch.ones(4, 4))
            self.dropout = nn.Dropout(0.5)
            self.register_forward_pre_hook(lambda module, _: setattr(module, "weight", F.dropout(module.raw, 0.5)))

        def forward(self, x):
            return self.dropout((x @ self.weight).sin())

    torch.manual_seed(0)
    module, plain = checkpoint(Dropped()), Dropped()
    assert_same_step(module, plain, run=lambda module, x: module(x).exp())


def test_batch_norm_counts_once():
    module, plain = pair(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()))
    assert_same_step(module, plain, leaf(5, 4), steps=3)
    assert_equal(dict(module.named_buffers()), dict(plain.named_buffers()))
    assert module[1].num_batches_tracked == 3


def test_a_call_of_ones_own_around_the_modules():
    class Called(Block):
        def __call__(self, x, *, times=2):
            for _ in range(times):
                x = super().__call__(x * 2)
            return x

    module, plain = pair(Called)
    assert_same_step(module, plain)


def test_lazy_modules():
    torch.manual_seed(0)
    module = checkpoint(nn.Sequential(nn.LazyLinear(4), nn.Tanh()))
    x = leaf(3, 5)
    module(x).exp().sum().backward()
    expected = leaf(3, 5)
    F.linear(expected, module[0].weight, module[0].bias).tanh().exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)


# --- Copies ---


def test_a_deep_copy_is_checkpointed_with_its_own_weights_and_state():
    module, plain = pair(policy=recollect.policies.save_matmuls, context_fn=noop_pair)
    module(leaf(3, 4)).sum().backward()
    twin = copy.deepcopy(module)
    state, twins = checkpoint.state(module), checkpoint.state(twin)
    assert twins is not None
    assert twins is not state
    assert list(get_registry(twin)) == ["checkpoint"]
    assert get_registry(twin)["checkpoint"] is not get_registry(module)["checkpoint"]
    with torch.no_grad():
        for one in (*twin.parameters(), *plain.parameters()):
            one.mul_(0.5)
    before = module.runs
    assert_same_step(twin, plain)
    assert module.runs == before, "the original is not called"
    assert twin.runs == before + 4
    state.enable_hook = False
    assert twins.enable_hook is True
    remove(twin)
    assert checkpoint.state(module) is state
    assert len(module._forward_hooks) == 1
    assert_same_step(twin, plain)
    assert twin.runs == before + 6


def noop_pair():
    return contextlib.nullcontext(), contextlib.nullcontext()


def test_a_copy_made_between_forward_and_backward():
    module, plain = pair()
    torch.manual_seed(1)
    x = leaf(3, 4)
    y = module(x)
    twin = copy.deepcopy(module)
    y.sum().backward()
    torch.manual_seed(1)
    expected = leaf(3, 4)
    plain(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert all(one.grad is None for one in twin.parameters())
    assert_same_step(twin, plain)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_module(how):
    module, plain = pair(policy=recollect.save_ops(torch.ops.aten.addmm), early_stop=False)
    model = nn.Sequential(module, nn.Linear(4, 4))
    model(leaf(3, 4)).sum().backward()
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert checkpoint.state(loaded[0]) is not None
    assert checkpoint.state(loaded[0]) is not checkpoint.state(module)
    assert list(get_registry(loaded[0])) == ["checkpoint"]
    runs = loaded[0].runs
    assert_same_step(loaded[0], plain)
    assert loaded[0].runs == runs + 4
    with pytest.raises(AssertionError, match="checkpoint has already been applied"):
        checkpoint(loaded[0])
    remove(loaded[0])
    assert not loaded[0]._forward_hooks
    assert not loaded[0]._forward_pre_hooks
    assert_same_step(loaded[0], plain)
    assert loaded[0].runs == runs + 6


def test_a_module_that_was_saved_by_another_process(tmp_path):
    file = tmp_path / "model.pt"
    save = (
        "import sys, torch\n"
        "from torch import nn\n"
        "from recollect import composable\n"
        "model = composable.checkpoint(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), policy=None)\n"
        "model.register_forward_hook(print)\n"
        "torch.save(model, sys.argv[1])\n"
    )
    load = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "from recollect import composable\n"
        "assert composable.checkpoint.state(model).enable_hook\n"
        "model.register_forward_pre_hook(lambda module, args: print('called'))\n"
        "assert len(model._forward_pre_hooks) == 2, 'its number is not taken'\n"
        "model(torch.ones(2, 4, requires_grad=True)).exp().sum().backward()\n"
    )
    for program in (save, load):
        done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("called") == 2


@pytest.mark.parametrize("first", ["composable", "apply"])
def test_together_with_apply(first):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x).tanh()
            return x

    plain = seeded(Model)
    module = copy.deepcopy(plain)
    decisions = {"": recollect.Recompute(), "blocks.*.up": recollect.Save()}
    if first == "apply":
        recollect.apply(module, decisions)
    checkpoint(module.blocks[0])
    if first == "composable":
        recollect.apply(module, decisions)
    assert_same_step(module, plain)
    twin = copy.deepcopy(module)
    assert_same_step(twin, plain)
    recollect.unapply(module)
    assert_same_step(module, plain)
    remove(module.blocks[0])
    assert get_registry(module.blocks[0]) is None
    assert_same_step(module, plain)


# --- Taking it off ---


def test_it_is_taken_off_without_a_trace():
    module = seeded()
    own = module.register_forward_hook(lambda *_: None)

    def look():
        return {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(module).items()
            if name != "runs"
        }

    before = look()
    assert remove(checkpoint(module, early_stop=False)) is module
    assert look() == before
    assert get_registry(module) is None
    assert checkpoint.state(module) is None
    own.remove()
    left = len(engine_objects())
    y = module(leaf(3, 4))
    assert len(engine_objects()) == left
    y.sum().backward()
    assert module.runs == 1
    with pytest.raises(ValueError, match=r"module must be one that checkpoint was applied to(.|\n)*Block\("):
        remove(module)
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module"):
        remove("module")
    checkpoint(module)


def test_other_apis_stay_when_it_is_taken_off():
    @contract()
    def mine(module):
        return module

    module = mine(checkpoint(nn.Linear(2, 2)))
    remove(module)
    assert list(get_registry(module)) == ["mine"]
    assert mine.state(module) is not None


@pytest.mark.parametrize("then", ["left off", "applied again"])
def test_taken_off_between_forward_and_backward(then):
    module, plain = pair(early_stop=False)
    module.register_forward_hook(lambda module, args, result: result.sin())
    plain.register_forward_hook(lambda module, args, result: result.sin())

    def run(module, x):
        y = module(x)
        if checkpoint.state(module) is not None:
            remove(module)
            if then == "applied again":
                checkpoint(module)
        return y

    assert_same_step(module, plain, run=run, steps=1)
    if then == "left off":
        assert get_registry(module) is None
        assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (0, 1)
    assert_clean()


def test_taken_off_while_its_forward_runs():
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            if checkpoint.state(self) is not None:
                remove(self)
            return self.linear(x).sin().exp()

    module, plain = pair(Leaving)
    assert_same_step(module, plain)
    assert_clean()


# --- Exceptions ---


class Interrupt(BaseException):
    """Neither an Exception nor known to anybody."""


ERRORS = [ValueError, TypeError, KeyboardInterrupt, SystemExit, GeneratorExit, Interrupt]


def assert_works(module):
    """A step of the module is right, and leaves no state."""
    plain = copy.deepcopy(module)
    remove(plain)
    assert_same_step(module, plain)
    assert_clean(module)


@both_ways
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("first", [True, False])
def test_an_exception_in_the_forward(kind, first):
    error = kind("from the forward")
    module = checkpoint(seeded(Failing))
    if not first:  # else it is recorded, by a dispatch mode
        module(leaf(3, 4)).sum().backward()
    before = ambient_state()
    module.error = error
    try:
        module(leaf(3, 4))
    except BaseException as raised:
        assert raised is error  # noqa: PT017
        module.error = None
        if calls.replace_forward is _torch.replace_forward or isinstance(error, Exception):
            assert ambient_state() == before, "at once"
            assert_clean(module)
        assert_works(module)
        assert ambient_state() == before
    else:
        raise AssertionError("nothing was raised")
    assert_works(module)
    assert ambient_state() == before


@both_ways
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", ["pre-hook", "prepended pre-hook", "hook", "prepended hook", "backward hook"])
def test_an_exception_in_another_hook(kind, place):
    error = kind("from a hook")
    fails = []

    def fail(*_):
        if fails:
            raise error

    module = checkpoint(seeded())
    if place == "backward hook":
        module.register_full_backward_hook(lambda *_: None)
        module.forward = types.MethodType(lambda self, x: (fail(), Block.forward(self, x))[1], module)
    elif "pre-hook" in place:
        module.register_forward_pre_hook(fail, prepend="prepended" in place)
    else:
        module.register_forward_hook(fail, prepend="prepended" in place)
    module(leaf(3, 4)).sum().backward()
    before = ambient_state()
    fails.append(1)
    try:
        module(leaf(3, 4))
    except BaseException as raised:
        assert raised is error  # noqa: PT017
        fails.clear()
        if isinstance(error, Exception):
            assert ambient_state() == before
            assert_clean(module)
        x = leaf(3)
        x.sin().exp().sum().backward()
        expected = x.grad.clone()
        assert ambient_state() == before, "what is cut off ends with the next tensor that is saved, at the latest"
        assert torch.equal(expected, x.detach().sin().exp() * x.detach().cos())
        assert_clean(module)
    module(leaf(3, 4)).sum().backward()
    assert ambient_state() == before


def interrupted_before_its_forward(module):
    """An interrupt that only the frame of the module's call tells of; gives the exception, which holds that frame."""
    armed = [True]

    def interrupt(*_):
        if armed:
            raise KeyboardInterrupt

    handle = module.register_forward_pre_hook(interrupt)
    try:
        module(leaf(3, 4))
    except KeyboardInterrupt as error:
        return error
    finally:
        handle.remove()
    raise AssertionError("it was not interrupted")


@both_ways
def test_what_was_cut_off_does_not_disturb_plain_autograd():
    module = checkpoint(seeded())
    error = interrupted_before_its_forward(module)
    assert hooks_in_force() is not None, "nobody told"
    x = leaf(3)
    y = x.sin()  # saves its input
    z = y.exp()  # saves its result
    assert hooks_in_force() is None
    (first,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    first.sum().backward()
    expected = leaf(3)
    (once,) = torch.autograd.grad(expected.sin().exp().sum(), expected, create_graph=True)
    once.sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert_clean(module)
    assert error is not None


def test_what_was_cut_off_leaves_autograds_own_check_in_force():
    module = checkpoint(seeded())
    error = interrupted_before_its_forward(module)
    x = leaf(3) * 1
    y = x.sin()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert error is not None


def test_what_was_cut_off_ends_with_the_exception():
    module = checkpoint(seeded())
    with garbage_collector_off():
        error = interrupted_before_its_forward(module)
        assert hooks_in_force() is not None
        del error
        assert_clean(module)


@both_ways
@pytest.mark.parametrize("by", ["region", "module", "replay", "double backward", "save_on_cpu", "region around"])
def test_what_was_cut_off_ends_with_whatever_comes_next(by):
    module = checkpoint(seeded())
    other = checkpoint(seeded(seed=1))
    x = leaf(3)
    begun = recollect.checkpoint(torch.sin, x).exp().sum()
    for one in (module, other):
        one(leaf(3, 4)).sum().backward()
    before = ambient_state()
    if by == "region around":

        def region(x):
            region.error = interrupted_before_its_forward(module)
            return x.sin().exp()

        recollect.checkpoint(region, leaf(3), determinism_check="default")
        assert ambient_state() == before
        return
    error = interrupted_before_its_forward(module)
    if by == "region":
        recollect.checkpoint(torch.sin, leaf(3))
    elif by == "module":
        other(leaf(3, 4)).sum().backward()
    elif by == "replay":
        begun.backward()  # autograd puts back at the end what was in force at the start
        leaf(3).sin()
    elif by == "double backward":
        torch.autograd.grad(begun, x, create_graph=True)
        leaf(3).sin()
    else:
        with torch.autograd.graph.save_on_cpu():
            mine = hooks_in_force()
            other(leaf(3, 4))
            assert hooks_in_force() == mine
    assert ambient_state() == before
    assert_clean(module)
    assert error is not None
    assert_works(module)


def test_what_was_cut_off_belongs_to_its_thread():
    module = checkpoint(seeded())
    held = []

    def work():
        held.append(interrupted_before_its_forward(module))
        mine = hooks_in_force()
        held.append(mine is not None)
        taken.set()
        dropped.wait(60)
        other = checkpoint(seeded())
        other(leaf(3, 4)).sum().backward()
        held.append(hooks_in_force())

    taken, dropped = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    taken.wait(60)
    with torch.autograd.graph.save_on_cpu():
        mine = hooks_in_force()
        del held[0]  # the frame of the other thread's call dies here
        assert hooks_in_force() == mine
    dropped.set()
    thread.join(60)
    assert held == [True, None]
    assert_clean(module)


@both_ways
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("outer", ["region", "module", "module with contexts"])
def test_an_exception_deep_inside(kind, outer):
    """The exception passes through modules and regions, and is caught in the middle or at the top."""

    class Outer(nn.Module):
        def __init__(self, inner, catches):
            super().__init__()
            self.inner, self.catches = inner, catches
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            x = self.linear(x).sin()
            try:
                x = self.inner(x)
            except BaseException:
                if not self.catches or isinstance(sys.exc_info()[1], recollect._engine.replay.Stop):
                    raise
                x = x.cos()
            return x.exp()

    for catches in (True, False):
        inner = checkpoint(Failing(kind("deep")))
        middle = Outer(nn.Sequential(inner), catches=catches)
        options = {"policy": recollect.policies.save_matmuls} if outer == "module with contexts" else {}
        if outer != "region":
            checkpoint(middle, **options)
        before = ambient_state()

        def run(x, middle=middle):
            return recollect.checkpoint(middle, x) if outer == "region" else middle(x)

        if catches:
            x = leaf(3, 4)
            run(x).sum().backward()
            expected = leaf(3, 4)
            middle.linear(expected).sin().cos().exp().sum().backward()
            assert torch.equal(x.grad, expected.grad)
        else:
            with pytest.raises(kind, match="deep"):
                run(leaf(3, 4))
            if outer != "region":
                leaf(3).sin()  # nobody tells of an interrupt where there is no guard
        assert ambient_state() == before
        assert_clean(inner)
        inner.error = None
        run(leaf(3, 4)).sum().backward()
        assert ambient_state() == before


@pytest.mark.parametrize("kind", ERRORS)
def test_the_context_of_the_forward_gets_the_exception_first(kind):
    log = []

    class Notes:
        def __enter__(self):
            return self

        def __exit__(self, kind, value, tb):
            log.append(value)

    error = kind("x")
    module = checkpoint(Failing(error), context_fn=lambda: (Notes(), contextlib.nullcontext()))
    with pytest.raises(kind) as info:
        module(leaf(3, 4))
    assert log == [error]
    assert info.value is error
    assert info.value.__context__ is None
    assert_clean(module)


def test_a_context_that_would_suppress_an_exception():
    module = checkpoint(Failing(ValueError("x")), context_fn=lambda: (contextlib.suppress(ValueError), noop_pair()[1]))
    with pytest.raises(RuntimeError, match=r"context_fn suppressed .*Failing"):
        module(leaf(3, 4))
    assert_clean(module)
    module.error = None
    module(leaf(3, 4)).sum().backward()


@pytest.mark.parametrize("wrong", ["raises", "gives one", "fails to enter"])
def test_a_context_fn_that_fails(wrong):
    class Locked:
        def __enter__(self):
            raise LookupError("locked")

        def __exit__(self, *_):
            return None

    def context_fn():
        if wrong == "raises":
            raise LookupError("locked")
        return contextlib.nullcontext() if wrong == "gives one" else (Locked(), contextlib.nullcontext())

    module = checkpoint(seeded(), context_fn=context_fn)
    with pytest.raises(TypeError if wrong == "gives one" else LookupError):
        module(leaf(3, 4))
    assert_clean(module)
    assert module.runs == 0


@both_ways
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", ["forward", "pre-hook", "prepended pre-hook", "hook"])
def test_an_exception_in_the_replay(kind, place):
    error = kind("from the replay")
    fails = []

    def fail(*_):
        if fails:
            raise error

    module = checkpoint(seeded(), early_stop=False)
    if place == "forward":
        module.forward = types.MethodType(lambda self, x: (fail(), Block.forward(self, x))[1], module)
    elif place == "hook":
        module.register_forward_hook(fail)
    else:
        module.register_forward_pre_hook(fail, prepend="prepended" in place)
    before = ambient_state()
    x = leaf(3, 4)
    y = module(x)
    fails.append(1)
    with pytest.raises(kind) as info:
        y.sum().backward(retain_graph=True)
    assert info.value is error
    assert ambient_state() == before
    assert_clean(module)
    fails.clear()
    y.sum().backward()
    assert x.grad is not None
    assert ambient_state() == before


def test_an_exception_does_not_hold_itself():
    class Held(Exception):  # noqa: N818
        pass

    def once(**options):
        module = checkpoint(Failing(), **options)
        module.forward = types.MethodType(raising, module)
        try:
            module(leaf(3, 4))
        except (Held, KeyboardInterrupt) as error:
            return weakref.ref(error)
        raise AssertionError

    def raising(self, x):
        self.linear(x)
        raise kind

    class HeldInterrupt(KeyboardInterrupt):
        pass

    for kind in (Held, HeldInterrupt):
        for options in (
            {},
            {"determinism_check": "none"},
            {"policy": recollect.policies.save_matmuls},
            {"context_fn": noop_pair},
        ):
            with garbage_collector_off():
                assert once(**options)() is None, (kind, options)


# --- Threads ---


def in_threads(*works):
    """Run all of them at once; the first exception of any is raised."""
    errors, start = [], threading.Barrier(len(works))

    def run(work):
        try:
            start.wait(60)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.fixture
def _switch_threads_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switch_threads_often")
@both_ways
def test_two_threads_call_one_module():
    module, plain = pair(functools.partial(Block, 0.0))
    weight = plain.up.weight

    def work(seed):
        def run():
            for number in range(40):
                x = leaf(3, 4, seed=seed + number)
                y = module(x)
                got = torch.autograd.grad(y.sum(), [x, module.up.weight])
                expected_x = leaf(3, 4, seed=seed + number)
                expected = torch.autograd.grad(plain(expected_x).sum(), [expected_x, weight])
                assert_equal(got, expected)
                assert hooks_in_force() is None
                assert here.scope is None

        return run

    in_threads(work(0), work(1000), work(2000))
    assert_clean(module)


def test_one_thread_replays_while_another_runs_a_forward():
    """`enable_hook` is False in the thread of the replay alone."""
    module = checkpoint(seeded(functools.partial(Block, 0.0)))
    y = module(leaf(3, 4))
    seen, replaying, done = {}, threading.Event(), threading.Event()

    def wait_in_the_replay(*_):
        if recollect.is_recomputing():
            seen["replay"] = checkpoint.state(module).enable_hook
            replaying.set()
            done.wait(60)

    module.register_forward_pre_hook(wait_in_the_replay)

    def other():
        replaying.wait(60)
        seen["forward"] = checkpoint.state(module).enable_hook
        seen["generator"] = checkpoint.state(module)._ac_generator
        before = len(engine_objects())
        other.result = module(leaf(3, 4))
        seen["regions"] = len(engine_objects()) - before
        done.set()

    in_threads(lambda: y.sum().backward(), other)
    assert seen["replay"] is False
    assert seen["forward"] is True
    assert seen["generator"] is None
    assert seen["regions"] > 0, "it became a region"
    other.result.sum().backward()


def test_replicas_for_other_devices():
    module, plain = pair(functools.partial(Block, 0.0))
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        twin = child._replicate_for_data_parallel()
        for key, parameter in child.named_parameters():
            setattr(twin, key, parameter * 2)
        replica._modules[name] = twin
    assert checkpoint.state(replica) is checkpoint.state(module)
    with torch.no_grad():
        for one in plain.parameters():
            one.mul_(2)
    x, expected = leaf(3, 4), leaf(3, 4)
    replica(x).sum().backward()
    plain(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad * 2)
    assert replica.runs == 2
    assert module.runs == 0


@pytest.mark.usefixtures("_switch_threads_often")
@both_ways
def test_replicas_in_threads():
    module, plain = pair(functools.partial(Block, 0.0))
    replicas = [module._replicate_for_data_parallel() for _ in range(3)]
    for replica in replicas:
        for name, child in module.named_children():
            twin = child._replicate_for_data_parallel()
            for key, parameter in child.named_parameters():
                setattr(twin, key, parameter.clone())
            replica._modules[name] = twin
    inputs = [leaf(3, 4, seed=seed) for seed in range(3)]
    outputs = [None] * 3

    def work(index):
        def run():
            outputs[index] = replicas[index](inputs[index])

        return run

    in_threads(*map(work, range(3)))
    sum(one.sum() for one in outputs).backward()
    for index in range(3):
        expected = leaf(3, 4, seed=index)
        plain(expected).sum().backward()
        assert torch.equal(inputs[index].grad, expected.grad)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert_clean(module)


# --- Memory ---


@both_ways
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"policy": recollect.policies.save_matmuls}])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_leaves_nothing_behind(options, hooked):
    module = checkpoint(seeded(), **options)
    if hooked:
        module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        module.register_forward_hook(
            lambda module, args, result: None if result is None else result.sin(), always_call=True
        )
        module.register_full_backward_hook(lambda *_: None)

    def step():
        x = leaf(3, 4)
        y = module(x)
        y.sum().backward()
        module.zero_grad()
        return weakref.ref(x), weakref.ref(y)

    for _ in range(2):
        step()
    with garbage_collector_off():
        before = len(engine_objects())
        references = [reference for _ in range(3) for reference in step()]
        assert [reference() for reference in references] == [None] * 6
        assert len(engine_objects()) == before


@both_ways
def test_what_a_graph_keeps_dies_with_it():
    module = checkpoint(seeded())
    with garbage_collector_off():
        before = len(engine_objects())
        x = leaf(3, 4) * 1
        given = weakref.ref(x)
        y = module(x)
        del x
        assert given() is not None, "a replay needs it"
        del y
        assert given() is None
        assert len(engine_objects()) == before


def test_a_module_dies_without_the_garbage_collector():
    with garbage_collector_off():
        module = checkpoint(seeded())
        module(leaf(3, 4)).sum().backward()
        module(leaf(3, 4))
        reference = weakref.ref(module)
        del module
        assert reference() is None


@pytest.mark.parametrize("nested", [False, True])
def test_bytes_alive_are_those_of_a_region(nested):
    def peak(run):
        x = leaf(64, 64)
        run(x).sum().backward()
        run(x).sum().backward()
        with LiveBytes() as alive:
            run(x).sum().backward()
        return alive.peak

    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers)

    def as_regions(x):
        for layer in layers:
            x = recollect.checkpoint(layer, x)
        return x

    plain = peak(lambda x: recollect.checkpoint(as_regions, x) if nested else as_regions(x))
    for layer in layers:
        checkpoint(layer)
    if nested:
        checkpoint(model)
    assert peak(model) <= plain


# --- What else works in there ---


def test_named_regions_and_pinned_calls_inside():
    runs = []

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def attention(self, x):
            runs.append("attention")
            return x.softmax(-1)

        def forward(self, x):
            recollect.once(runs.append, "once")
            weights, chosen = recollect.pin(self.route)(self.linear(x))
            x = recollect.region("attn", self.attention)(x.gather(-1, chosen) * weights)
            return x.sin().exp()

        def route(self, x):
            runs.append("route")
            return torch.topk(x, 2)

    def plain_forward(module, x):
        weights, chosen = torch.topk(module.linear(x), 2)
        return (x.gather(-1, chosen) * weights).softmax(-1).sin().exp()

    module = checkpoint(seeded(Routed), policy=recollect.by_name({"attn": recollect.Save()}))
    plain = seeded(Routed)
    for step in range(2):
        runs.clear()
        got = gradients(module, leaf(3, 4), seed=step)
        assert runs == ["once", "route", "attention"]
        assert_equal(got, gradients(plain, leaf(3, 4), run=plain_forward, seed=step))


@both_ways
def test_what_other_hooks_pin_does_not_get_into_the_regions_journal():
    log = []

    class Once(nn.Module):
        def forward(self, x):
            recollect.once(log.append, "forward")
            return x.sin().exp()

    module = checkpoint(Once(), early_stop=False, policy=recollect.by_name({"named": recollect.Save()}))
    named = recollect.region("named", lambda: log.append("named"))
    for prepend in (True, False):
        module.register_forward_pre_hook(lambda *_: recollect.once(log.append, "before"), prepend=prepend)
    module.register_forward_hook(lambda *_: recollect.once(log.append, "after"))
    module.register_forward_hook(lambda *_: named())
    module.register_forward_pre_hook(lambda *_: named(), prepend=True)
    x = leaf(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the policy matches nothing inside
        y = module(x)
    assert log == ["named", "before", "before", "forward", "after", "named"]
    log.clear()
    y.sum().backward()
    # Those outside of the region run again, that within it does not, nor what its own pre-hooks do within it.
    assert log == ["named", "before", "after", "named"]


def test_explain_shows_what_the_module_saves_under_its_own_policy():
    module = seeded(functools.partial(Block, 0.0))
    expected = recollect.explain(module, leaf(3, 4), policy=recollect.policies.save_matmuls)
    checkpoint(module, policy=recollect.policies.save_matmuls)
    found = recollect.explain(module, leaf(3, 4))
    assert found.rows == expected.rows
    assert str(found) == str(expected)
    assert_clean(module)


def test_explain_of_a_model_with_such_modules():
    module = seeded(functools.partial(Block, 0.0))
    model = nn.Sequential(nn.Linear(4, 4), checkpoint(module))
    found = recollect.explain(model, leaf(3, 4))
    modules = {row.module for row in found.rows}
    assert "Sequential.1.up" in modules
    assert "Sequential.0" in modules


def test_messages_name_the_class_of_the_module():
    class Unlucky(Block):
        pass

    module = checkpoint(Unlucky())
    y = module(leaf(3, 4))
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(recollect.CheckpointError, match="Unlucky") as info:
        y.sum().backward()
    assert "'up.weight' of Unlucky" in str(info.value)
    assert "ModuleFunction" not in str(info.value)
    assert "calls.py" not in str(info.value)


def test_groups_share_one_replay():
    runs = []

    class Two(nn.Module):
        def forward(self, a, b):
            runs.append(1)
            return a.sin().exp(), b.sin().exp()

    module = checkpoint(Two())
    inputs = leaf(3), leaf(3, seed=1)
    outputs = module(*inputs)
    with dropin.GraphExecGroup():
        for one, other in zip(outputs, inputs, strict=True):
            one.sum().backward(inputs=[other])
    assert len(runs) == 2


def test_a_backward_inside_the_forward():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x).sin().exp()
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return grad.sin() + y

    module, plain = pair(Inside)
    assert_same_step(module, plain, run=lambda module, x: module(x * 1))
    assert_clean(module)


def test_autocast_and_subclasses_of_tensors_around():
    module, plain = pair()

    def run(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    assert_same_step(module, plain, run=run)


def test_saved_tensor_hooks_of_the_user_around_and_inside():
    class Offloading(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                x = self.linear(x).sin()
            return x.exp()

    def run(module, x):
        with torch.autograd.graph.save_on_cpu():
            return module(x.sin())

    module, plain = pair(Offloading)
    assert_same_step(module, plain, run=run)


def test_transforms_that_refuse_hooks_leave_no_state():
    module = checkpoint(seeded(functools.partial(Block, 0.0)))
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: module(x).sum())(torch.ones(3, 4))
    assert_clean(module)
    assert_works(module)


def test_the_compiler_sees_a_plain_module():
    module, plain = pair(functools.partial(Block, 0.0))
    compiled = torch.compile(module, backend="eager")
    x, expected = leaf(3, 4), leaf(3, 4)
    compiled(x).sum().backward()
    plain(expected).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)
    assert_clean(module)


# --- Odd programs ---


@pytest.mark.parametrize("prepend", [True, False])
def test_a_hook_that_changes_the_keyword_arguments_in_place(prepend):
    def double(module, args, kwargs):
        kwargs["scale"] = kwargs["scale"] * 2

    plain = seeded(Scaled)
    module = checkpoint(copy.deepcopy(plain))
    for one in (module, plain):
        one.register_forward_pre_hook(double, with_kwargs=True, prepend=prepend)

    def run(module, x):
        y = module(x, scale=x.exp())
        y.sum().backward(retain_graph=True)
        return y

    assert_same_step(module, plain, run=run)


@both_ways
def test_a_hook_that_calls_the_module_itself():
    busy = []

    def probe(module, args):
        if isinstance(module, Block) and not busy:
            busy.append(1)
            try:
                with torch.no_grad():
                    module(torch.zeros(1, 4))
                module(torch.ones(1, 4))
            finally:
                busy.clear()

    module, plain = pair(functools.partial(Block, 0.0))
    handle = register_module_forward_pre_hook(probe)
    try:
        assert_same_step(module, plain)
    finally:
        handle.remove()
    assert_clean(module)


def test_a_scripted_module_takes_no_hooks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got a scripted module"):
        checkpoint(module)
    assert get_registry(module) is None
