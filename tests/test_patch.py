"""`patch_torch`: who is served by us, with which options, and that everything is as before once it is undone."""

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import types
import unittest.mock
import warnings

import pytest
import torch
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as wrapping
import torch.utils.checkpoint as stock
from torch.utils.checkpoint import checkpoint as imported_before

import recollect
from recollect import _served, composable, dropin, patch_torch
from tools import CountOperators, Once, leaf, patience

ORIGINALS = types.MappingProxyType(dict(vars(stock)))


class Holder:
    """What a program may have at class level, bound before any patch."""

    static = staticmethod(imported_before)
    error = stock.CheckpointError

    class Inner:
        deep = staticmethod(imported_before)


def holders():
    """Where torch's own and ours are bound now: in all modules but recollect's, and in the classes of this one."""
    names = {id(ORIGINALS[name]): f"torch's {name}" for name in dropin.__all__}
    names |= {id(getattr(dropin, name)): f"our {name}" for name in dropin.__all__}
    names |= {id(value): f"served {name}" for name, value in vars(_served).items() if inspect.isfunction(value)}
    owners = {name: module for name, module in list(sys.modules.items()) if isinstance(module, types.ModuleType)}
    owners |= {"Holder": Holder, "Inner": Holder.Inner}
    return {
        f"{name}.{key}": names[id(value.__func__ if type(value) is staticmethod else value)]
        for name, owner in owners.items()
        if not name.startswith("recollect")
        if type(owner) is type or not names.keys().isdisjoint(map(id, list(vars(owner).values())))
        for key, value in list(vars(owner).items())
        if id(value.__func__ if type(value) is staticmethod else value) in names
    }


@pytest.fixture(autouse=True)
def _is_undone():
    before = holders()
    yield
    after = holders()
    assert type(stock) is types.ModuleType
    assert {key: value for key, value in after.items() if key in before} == before
    assert [key for key, value in after.items() if key not in before and not value.startswith("torch's")] == []


@pytest.fixture
def module_named(monkeypatch):
    """Makes modules from their source, as an import would."""

    def make(name, source, kind=types.ModuleType):
        module = kind(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(textwrap.dedent(source), module.__dict__)
        return module

    return make


def is_ours(checkpoint, **options):
    """Whether a call is replayed by recollect."""
    seen = []

    def function(x):
        seen.append(recollect.is_recomputing())
        return x.sin().exp()

    x = leaf(3)
    checkpoint(function, x, **{"use_reentrant": False, **options}).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert len(seen) == 2
    return seen[-1]


# --- What is served ---


def test_every_name_of_the_drop_in_is_served_and_comes_back():
    with patch_torch():
        served = {name: getattr(stock, name) for name in dropin.__all__}
        assert all(served[name] is not ORIGINALS[name] for name in served)
        wrapped = {"checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts"}
        assert all(served[name] is getattr(dropin, name) for name in served if name not in wrapped)
        assert is_ours(torch.utils.checkpoint.checkpoint)
    assert all(getattr(stock, name) is ORIGINALS[name] for name in dropin.__all__)
    assert dict(vars(stock)) == ORIGINALS
    assert not is_ours(torch.utils.checkpoint.checkpoint)


def test_names_of_torch_that_are_not_ours_stay():
    others = {name for name in ORIGINALS if name not in dropin.__all__}
    with patch_torch():
        assert all(getattr(stock, name) is ORIGINALS[name] for name in others)
        assert set(dir(stock)) >= set(ORIGINALS)


def test_signatures_are_those_of_torch():
    with patch_torch():
        for name in ("checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts"):
            torchs = inspect.signature(ORIGINALS[name]).parameters
            assert list(inspect.signature(getattr(stock, name)).parameters) == list(torchs)


def test_a_call_that_is_newer_than_the_drop_in_is_torchs_own(monkeypatch):
    calls = []
    monkeypatch.setattr(_served, "_newer", frozenset({"of_later"}))
    monkeypatch.setattr(_served, "_torchs_checkpoint", lambda *args, **kwargs: calls.append((args, kwargs)))
    with patch_torch():
        stock.checkpoint(torch.sin, 1, use_reentrant=False, of_later=3)
        stock.checkpoint(use_reentrant=False)
    assert calls == [((torch.sin, 1), {"use_reentrant": False, "of_later": 3}), ((None,), {"use_reentrant": False})]


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils.checkpoint import checkpoint",
        "from torch.utils.checkpoint import *",
        "import torch.utils.checkpoint\ncheckpoint = torch.utils.checkpoint.checkpoint",
        "from torch.utils import checkpoint as module\ncheckpoint = module.checkpoint",
        "import importlib\ncheckpoint = getattr(importlib.import_module('torch.utils.checkpoint'), 'checkpoint')",
    ],
)
@pytest.mark.parametrize("when", ["before", "under"])
def test_names_that_modules_import(module_named, source, when):
    if when == "before":
        module = module_named("somebody", source)
        assert not is_ours(module.checkpoint)
    with patch_torch():
        if when == "under":
            module = module_named("somebody", source)
        assert is_ours(module.checkpoint)
    assert module.checkpoint is ORIGINALS["checkpoint"]


def test_all_kinds_of_names_in_modules_and_classes(module_named):
    source = """
        import torch.utils.checkpoint as stock
        names = {name: getattr(stock, name) for name in stock.__all__}
        globals().update({f"my_{name}": value for name, value in names.items()})
        module = stock

        class Block:
            run = staticmethod(stock.checkpoint)
            error = stock.CheckpointError

            class Inner:
                policy = stock.CheckpointPolicy
    """
    before = module_named("before", source)
    with patch_torch():
        under = module_named("under", source)
        for module in (before, under):
            for name in stock.__all__:
                assert getattr(module, f"my_{name}") is getattr(stock, name) is not ORIGINALS[name]
            assert is_ours(module.Block.run)
            assert is_ours(module.Block().run)
            assert module.Block.error is recollect.CheckpointError
            assert module.Block.Inner.policy is dropin.CheckpointPolicy
            assert is_ours(module.module.checkpoint)
        assert is_ours(Holder.static)
        assert is_ours(Holder.Inner.deep)
        assert Holder.error is recollect.CheckpointError
    for module in (before, under):
        assert all(getattr(module, f"my_{name}") is ORIGINALS[name] for name in stock.__all__)
        assert module.Block.run is ORIGINALS["checkpoint"]
        assert module.Block.error is ORIGINALS["CheckpointError"]
        assert module.Block.Inner.policy is ORIGINALS["CheckpointPolicy"]


def test_a_module_that_has_left_gets_its_names_back(module_named):
    module = module_named("leaving", "from torch.utils.checkpoint import checkpoint")
    with patch_torch():
        del sys.modules["leaving"]
        assert is_ours(module.checkpoint)
    assert module.checkpoint is ORIGINALS["checkpoint"]


def test_the_module_keeps_its_own_names_under_another_name_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "another_name", stock)
    with patch_torch():
        assert dict(vars(stock)) == ORIGINALS
        assert is_ours(stock.checkpoint)


def test_who_imports_from_recollect_keeps_what_he_has(module_named):
    source = """
        from recollect.dropin import checkpoint, GraphExecGroup, CheckpointPolicy
        from recollect import CheckpointError
    """
    module = module_named("knows_us", source)
    had = dict(vars(module))
    with patch_torch(determinism_check="values"):
        assert dict(vars(module)) == had
    assert dict(vars(module)) == had
    assert dropin.GraphExecGroup is not ORIGINALS["GraphExecGroup"]
    assert recollect.CheckpointError is dropin.CheckpointError


def test_the_parts_of_the_compiler_keep_torchs_own():
    from torch._functorch import partitioners
    from torch._higher_order_ops import wrap

    subgraphs = importlib.import_module("torch._higher_order_ops.invoke_subgraph")

    with patch_torch():
        assert partitioners.CheckpointPolicy is ORIGINALS["CheckpointPolicy"]
        assert wrap._CachingTorchDispatchMode is ORIGINALS["_CachingTorchDispatchMode"]
        assert subgraphs._CachedTorchDispatchMode is ORIGINALS["_CachedTorchDispatchMode"]
        # What they import when they are called they get from torch.utils.checkpoint as it is.
        namespace = {"__name__": "torch._higher_order_ops.wrap"}
        exec("from torch.utils.checkpoint import checkpoint", namespace)
        assert namespace["checkpoint"] is ORIGINALS["checkpoint"]


# --- What is out of reach ---


def test_originals_that_somebody_holds_go_on_as_torchs_own():
    original = ORIGINALS["checkpoint"]
    earlier = functools.partial(original, use_reentrant=False)
    contexts = functools.partial(
        ORIGINALS["create_selective_checkpoint_contexts"],
        lambda ctx, op, *args, **kwargs: op is torch.ops.aten.sin.default,
    )
    with patch_torch():
        assert not is_ours(earlier)
        assert not is_ours(earlier, context_fn=contexts)
        assert isinstance(contexts()[0], ORIGINALS["_CachingTorchDispatchMode"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_region_belongs_to_who_made_it(reentrant):
    x = leaf(3)
    before = stock.checkpoint(torch.sin, x, use_reentrant=reentrant)
    with patch_torch():
        before.sum().backward()
        assert torch.equal(x.grad, x.detach().cos())
        under = stock.checkpoint(torch.sin, x, use_reentrant=reentrant)
    x.grad = None
    under.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_partial_made_under_a_patch_is_torchs_own_when_it_is_undone(reentrant):
    with patch_torch(determinism_check="values"):
        partial = functools.partial(stock.checkpoint, use_reentrant=False)
        contexts = functools.partial(
            stock.create_selective_checkpoint_contexts,
            lambda ctx, op, *args, **kwargs: dropin.CheckpointPolicy.PREFER_RECOMPUTE,
        )
        sequential = functools.partial(stock.checkpoint_sequential, use_reentrant=reentrant)
        assert is_ours(partial)
        assert is_ours(partial, context_fn=contexts)
    assert not is_ours(partial, use_reentrant=reentrant)
    assert not is_ours(partial, context_fn=contexts)
    assert not is_ours(lambda function, x, **_: sequential([function, torch.nn.Identity()], 2, x))
    with patch_torch():
        assert is_ours(partial, use_reentrant=reentrant)


def test_what_is_served_can_be_pickled_under_a_patch_and_after():
    with patch_torch():
        partial = functools.partial(stock.checkpoint, use_reentrant=False)
        assert pickle.loads(pickle.dumps(partial)).func is stock.checkpoint
        assert pickle.loads(pickle.dumps(stock.CheckpointPolicy.MUST_SAVE)) is dropin.CheckpointPolicy.MUST_SAVE
        assert pickle.loads(pickle.dumps(stock)) is stock  # as those do who can pickle modules
    assert not is_ours(pickle.loads(pickle.dumps(partial)))


# --- Errors ---


def fails(checkpoint):
    first = Once()
    y = checkpoint(lambda x: (x if first() else x[:1]).sin(), leaf(3), use_reentrant=False)
    y.sum().backward()


def test_our_error_is_caught_by_whatever_name_of_torchs():
    torchs_own = ORIGINALS["CheckpointError"]
    assert issubclass(recollect.CheckpointError, torchs_own)
    with patch_torch():
        for error in (torchs_own, stock.CheckpointError, recollect.CheckpointError, RuntimeError):
            with pytest.raises(error, match="have different metadata"):
                fails(stock.checkpoint)
    with pytest.raises(torchs_own):
        fails(dropin.checkpoint)


# --- Modules that must not be asked ---


class Refuses(types.ModuleType):
    def __getattribute__(self, name):
        raise AssertionError(f"asked for {name}")


class Warns(types.ModuleType):
    def __getattr__(self, name):
        warnings.warn("asked", DeprecationWarning, stacklevel=2)
        raise AttributeError(name)


class Unhashable(type):
    def __eq__(cls, other):
        raise AssertionError("compared")

    __hash__ = None

    def __getattribute__(cls, name):
        raise AssertionError(f"asked for {name}")


class Proxy:
    @property
    def __class__(self):
        raise AssertionError("asked for __class__")


class Slotted:
    __slots__ = ()


def test_a_search_asks_nothing_and_warns_of_nothing(monkeypatch, tmp_path):
    odd = Refuses("odd")
    inside = types.ModuleType.__getattribute__(odd, "__dict__")
    kind = Unhashable("Kind", (), {"run": staticmethod(imported_before)})
    inside.update(checkpoint=imported_before, proxy=Proxy(), kind=kind, instance=object.__new__(kind))
    entries = {
        "odd": odd,
        "warns": Warns("warns"),
        "gone": None,
        "slotted": Slotted(),
        "proxy": Proxy(),
        "a class": kind,
    }
    for name, entry in entries.items():
        monkeypatch.setitem(sys.modules, name, entry)

    (tmp_path / "lazy_one.py").write_text("raise AssertionError('loaded')")
    spec = importlib.util.spec_from_file_location("lazy_one", tmp_path / "lazy_one.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_one", lazy)
    spec.loader.exec_module(lazy)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with patch_torch():
            assert is_ours(inside["checkpoint"])
            assert is_ours(type.__getattribute__(kind, "run"))
    assert inside["checkpoint"] is ORIGINALS["checkpoint"]
    assert type.__getattribute__(kind, "run") is ORIGINALS["checkpoint"]


def test_a_search_is_quick():
    took = []
    for _ in range(3):
        began = time.process_time()
        patch_torch().undo()
        took.append(time.process_time() - began)
    names = sum(len(vars(module)) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType))
    assert min(took) < patience(20e-6) * names, f"{min(took):.3f} s for {names} names"


# --- Others who do the same ---


def test_what_somebody_else_binds_meanwhile_is_left_to_him_with_a_warning(module_named, monkeypatch):
    mine, yours = module_named("mine", "from torch.utils.checkpoint import checkpoint, CheckpointError"), lambda: None
    patch = patch_torch()
    mine.checkpoint = yours
    stock.noop_context_fn = yours
    assert stock.noop_context_fn is yours
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        patch.undo()
    [warning] = caught
    assert "mine.checkpoint, torch.utils.checkpoint.noop_context_fn" in str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert mine.checkpoint is yours
    assert stock.noop_context_fn is yours
    assert mine.CheckpointError is ORIGINALS["CheckpointError"]
    stock.noop_context_fn = ORIGINALS["noop_context_fn"]


def test_a_warning_that_is_an_error_comes_after_all_is_put_back(module_named):
    mine = module_named("mine", "from torch.utils.checkpoint import checkpoint")
    patch = patch_torch()
    mine.checkpoint = None
    with pytest.warns(UserWarning, match="mine.checkpoint"):
        patch.undo()
    assert stock.checkpoint is ORIGINALS["checkpoint"]


def test_somebody_who_puts_his_own_there_for_a_while(monkeypatch):
    with patch_torch():
        with unittest.mock.patch("torch.utils.checkpoint.checkpoint") as theirs:
            assert stock.checkpoint is theirs
        assert is_ours(stock.checkpoint)
        with monkeypatch.context() as context:
            context.setattr(stock, "checkpoint", theirs)
            assert stock.checkpoint is theirs
        assert is_ours(stock.checkpoint)
        with monkeypatch.context() as context:
            context.delattr(stock, "checkpoint")
            assert not hasattr(stock, "checkpoint")
            with pytest.raises(AttributeError, match="checkpoint"):
                del stock.checkpoint
        assert is_ours(stock.checkpoint)


def test_a_patch_on_top_of_somebody_elses(monkeypatch, module_named):
    def theirs(*args, **kwargs):
        raise AssertionError("theirs")

    early = module_named("early", "from torch.utils.checkpoint import checkpoint")
    with monkeypatch.context() as context:
        context.setattr(stock, "checkpoint", theirs)
        late = module_named("late", "from torch.utils.checkpoint import checkpoint")
        with patch_torch():
            under = module_named("under", "from torch.utils.checkpoint import checkpoint")
            assert all(is_ours(module.checkpoint) for module in (early, late, under, stock))
        assert stock.checkpoint is late.checkpoint is under.checkpoint is theirs
    assert early.checkpoint is ORIGINALS["checkpoint"]


def test_a_class_that_somebody_gives_the_module_meanwhile():
    patch = patch_torch()
    served = type(stock)
    stock.__class__ = type("Theirs", (served,), {})
    patch.undo()
    assert stock.checkpoint is ORIGINALS["checkpoint"]
    with patch_torch():
        assert is_ours(stock.checkpoint)
    assert stock.checkpoint is ORIGINALS["checkpoint"]
    stock.__class__ = types.ModuleType


# --- The handle ---


def test_the_handle():
    patch = patch_torch()
    assert "in force" in repr(patch)
    with patch as entered:
        assert entered is patch
        assert is_ours(stock.checkpoint)
    assert "undone" in repr(patch)
    patch.undo()
    with pytest.raises(RuntimeError, match="undone"), patch:
        pass
    with pytest.raises(ZeroDivisionError), patch_torch():
        raise ZeroDivisionError
    assert not is_ours(stock.checkpoint)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
def test_patches_stack_and_are_undone_in_any_order(order, module_named):
    module = module_named("somebody", "from torch.utils.checkpoint import checkpoint")
    checks = ("none", "default", "values")
    patches = [patch_torch(determinism_check=check) for check in checks]
    left = [0, 1, 2]
    for number in order:
        assert check_in_force(module.checkpoint) == check_in_force(stock.checkpoint) == checks[left[-1]]
        patches[number].undo()
        patches[number].undo()
        left.remove(number)
    assert module.checkpoint is ORIGINALS["checkpoint"]


def check_in_force(checkpoint):
    """Tells the checks apart by what they let pass."""
    first, again = Once(), Once()
    try:
        checkpoint(lambda x: (x if first() else x * 2).sin(), leaf(3), use_reentrant=False).sum().backward()
    except recollect.CheckpointError:
        return "values"
    try:
        checkpoint(lambda x: (x if again() else x[:1]).sin(), leaf(3), use_reentrant=False).sum().backward()
    except recollect.CheckpointError:
        return "default"
    return "none"


def test_it_holds_for_all_threads():
    seen = []
    with patch_torch():
        thread = threading.Thread(target=lambda: seen.append(is_ours(stock.checkpoint)))
        thread.start()
        thread.join()
    assert seen == [True]


def test_threads_that_patch_and_undo_and_import_at_a_time():
    errors = []

    def work(number):
        try:
            for step in range(8):
                with patch_torch():
                    name = f"made_{number}_{step}"
                    module = sys.modules[name] = types.ModuleType(name)
                    exec("from torch.utils.checkpoint import checkpoint, CheckpointError", vars(module))
                    assert is_ours(stock.checkpoint)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = [sys.modules.pop(name) for name in list(sys.modules) if name.startswith("made_")]
    assert errors == []
    assert len(made) == 32
    assert all(module.checkpoint is ORIGINALS["checkpoint"] for module in made)
    assert all(module.CheckpointError is ORIGINALS["CheckpointError"] for module in made)


# --- Options ---


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"polcy": None}, TypeError, "no option 'polcy'; it takes reentrant, determinism_check"),
        ({"use_reentrant": False}, TypeError, "no option 'use_reentrant'"),
        ({"reentrant": "never"}, ValueError, "reentrant must be one of 'keep', 'replace', got 'never'"),
        ({"reentrant": True}, ValueError, "reentrant must be one of"),
        ({"determinism_check": "strict"}, ValueError, "determinism_check must be one of"),
        ({"debug": "yes"}, TypeError, "debug must be True or False"),
        ({"early_stop": None}, TypeError, "early_stop must be"),
        ({"preserve_rng_state": "some"}, TypeError, "preserve_rng_state must be"),
        ({"policy": 3}, TypeError, "policy"),
    ],
)
def test_options_are_checked_at_the_door(options, error, match):
    with pytest.raises(error, match=match):
        patch_torch(**options)
    assert stock.checkpoint is ORIGINALS["checkpoint"]


def test_without_options_it_is_the_drop_in():
    with patch_torch():
        assert check_in_force(stock.checkpoint) == "default"


@pytest.mark.parametrize("check", ["none", "default", "values"])
def test_a_check_is_a_default_and_the_caller_wins(check):
    with patch_torch(determinism_check=check):
        assert check_in_force(stock.checkpoint) == check
        for asked in ("none", "default", "values"):
            assert check_in_force(functools.partial(stock.checkpoint, determinism_check=asked)) == asked


def runs_to_the_end(**asked):
    ended = []

    def function(x):
        y = x.sin()
        ended.append(True)
        return y

    stock.checkpoint(function, leaf(3), use_reentrant=False, **asked).sum().backward()
    return len(ended) == 2


def test_early_stop_is_a_default_and_the_caller_wins():
    with patch_torch(early_stop=False):
        assert runs_to_the_end()
        assert not runs_to_the_end(early_stop=True)
    with patch_torch():
        assert not runs_to_the_end()
        assert runs_to_the_end(early_stop=False)


def message(**asked):
    with pytest.raises(recollect.CheckpointError) as info:
        fails(functools.partial(stock.checkpoint, **asked))
    return str(info.value)


def test_debug_is_a_default_and_the_caller_wins():
    with patch_torch(debug=True):
        assert "you passed `debug=True`" in message()
        assert "you passed `debug=True`" not in message(debug=False)
        # The reentrant variant has no use for it, and refuses it only from who asks for it there.
        assert is_ours(stock.checkpoint, use_reentrant=True)
        with pytest.warns(UserWarning, match="should be passed explicitly"):
            assert is_ours(stock.checkpoint, use_reentrant=None)
    with patch_torch():
        assert "you passed `debug=True`" not in message()
        with pytest.raises(ValueError, match="debug is only supported when use_reentrant=False"):
            stock.checkpoint(torch.sin, leaf(3), use_reentrant=True, debug=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_preserve_rng_state_is_a_default_and_the_caller_wins(reentrant):
    def same_numbers(**asked):
        drawn = []

        def function(x):
            drawn.append(torch.rand(1).item())
            return x.sin()

        stock.checkpoint(function, leaf(3), use_reentrant=reentrant, **asked).sum().backward()
        return drawn[0] == drawn[1]

    def same_numbers_in_a_chain(**asked):
        drawn = []

        def function(x):
            drawn.append(torch.rand(1).item())
            return x.sin()

        stock.checkpoint_sequential(
            [function, torch.sin], 2, leaf(3), use_reentrant=reentrant, **asked
        ).sum().backward()
        return drawn[0] == drawn[1]

    for same in (same_numbers, same_numbers_in_a_chain):
        with patch_torch(preserve_rng_state=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that numbers are drawn and not preserved
            assert not same()
            assert same(preserve_rng_state=True)
        with patch_torch():
            assert same()


def sines(policy, **asked):
    """How often `sin` runs in the forward and in the replay."""
    with patch_torch(policy=policy), CountOperators() as operators:
        x = leaf(3)
        stock.checkpoint(lambda x: x.exp().sin().exp().exp(), x, **{"use_reentrant": False, **asked}).sum().backward()
    return operators.counts["sin"]


def test_a_policy_is_a_default_and_a_context_fn_wins():
    policy = recollect.save_ops(torch.ops.aten.sin)
    assert sines(None) == 2
    assert sines(policy) == 1
    # The defaults of context_fn are no context_fn, ours and torch's.
    assert sines(policy, context_fn=dropin.noop_context_fn) == 1
    assert sines(policy, context_fn=ORIGINALS["noop_context_fn"]) == 1
    recompute = functools.partial(dropin.create_selective_checkpoint_contexts, [torch.ops.aten.cos.default])
    assert sines(policy, context_fn=recompute) == 2
    assert sines(policy, use_reentrant=True) == 2


def test_a_keyword_that_is_an_option_of_the_patch_alone_goes_to_the_function():
    seen = []

    def function(x, *, policy, reentrant):
        seen.append((policy, reentrant))
        return x.sin()

    with patch_torch():
        stock.checkpoint(function, leaf(3), use_reentrant=False, policy=1, reentrant=2).sum().backward()
    assert seen == [(1, 2)] * 2


def test_the_policy_holds_in_chains():
    with patch_torch(policy=recollect.save_ops(torch.ops.aten.sin)), CountOperators() as operators:
        chain = [torch.exp, torch.sin, torch.exp, torch.exp, torch.tanh, torch.tanh, torch.tanh, torch.tanh]
        stock.checkpoint_sequential(chain, 2, leaf(3), use_reentrant=False).sum().backward()
    assert operators.counts["sin"] == 1
    assert operators.counts["exp"] == 6


def test_early_stop_and_debug_overrides_are_ours():
    with patch_torch(), stock.set_checkpoint_early_stop(False), stock.set_checkpoint_debug_enabled(True):
        assert runs_to_the_end()
        assert "you passed `debug=True`" in message()


# --- The reentrant variant ---


@pytest.mark.parametrize("asked", [{"use_reentrant": True}, {}])
def test_keep_serves_the_reentrant_variant(asked):
    with patch_torch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = leaf(3)
        y = stock.checkpoint(torch.sin, x, **asked)
        with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint is incompatible"):
            torch.autograd.grad(y.sum(), x)
        assert is_ours(stock.checkpoint, use_reentrant=asked.get("use_reentrant"))


@pytest.mark.parametrize("asked", [{"use_reentrant": True}, {"use_reentrant": None}, {}])
def test_replace_serves_the_other_and_warns_of_nothing(asked):
    linear, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with patch_torch(reentrant="replace"):
        y = stock.checkpoint(lambda x, scale: (linear(x) * scale).sin(), x, scale=2.0, **asked)
        (got,) = torch.autograd.grad(y.sum(), linear.weight)
        z = stock.checkpoint_sequential(torch.nn.Sequential(linear, torch.nn.Tanh(), linear), 2, x, **asked)
        (in_chain,) = torch.autograd.grad(z.sum(), linear.weight)
    expected = torch.autograd.grad((linear(x) * 2.0).sin().sum(), linear.weight)[0]
    assert torch.equal(got, expected)
    expected = torch.autograd.grad(linear(linear(x).tanh()).sum(), linear.weight)[0]
    assert torch.equal(in_chain, expected)


def test_replace_takes_all_the_options():
    with patch_torch(reentrant="replace", policy=recollect.save_ops(torch.ops.aten.sin)):
        with CountOperators() as operators:
            stock.checkpoint(lambda x: x.exp().sin().exp().exp(), leaf(3), use_reentrant=True).sum().backward()
        assert operators.counts["sin"] == 1
        assert check_in_force(functools.partial(stock.checkpoint, determinism_check="values")) == "values"
    with patch_torch(reentrant="replace"), pytest.raises(TypeError, match="second input"):
        stock.checkpoint_sequential([torch.sin], 1, leaf(3), leaf(3))


def test_leaving_the_variant_open_warns_the_caller():
    with patch_torch():
        for call in (
            lambda: stock.checkpoint(torch.sin, leaf(3)),
            lambda: stock.checkpoint_sequential([torch.sin, torch.exp], 2, leaf(3)),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            [warning] = caught
            assert "the use_reentrant parameter should be passed explicitly" in str(warning.message)
            assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno)


# --- Wrappers of torch.distributed ---


@pytest.mark.parametrize("variant", list(wrapping.CheckpointImpl))
def test_checkpoint_wrapper(variant):
    seen = []

    class Block(torch.nn.Linear):
        def forward(self, x, scale=1.0):
            seen.append(recollect.is_recomputing())
            return super().forward(x).sin() * scale

    model = torch.nn.Sequential(Block(3, 3), Block(3, 3))
    x = leaf(2, 3)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    seen.clear()
    with patch_torch():
        wrapping.apply_activation_checkpointing(
            model,
            functools.partial(wrapping.checkpoint_wrapper, checkpoint_impl=variant),
            check_fn=lambda module: isinstance(module, Block),
        )
        assert isinstance(model[0], wrapping.CheckpointWrapper)
        model(x).sum().backward()
        assert seen == [False, False, True, True]
        model[0](x, scale=2.0).sum().backward()
        assert seen[4:] == [False, True]
    model.zero_grad()
    x.grad = None
    model(x).sum().backward()  # the wrapper keeps a partial, which is torch's own again
    assert seen[6:] == [False, False, False, False]
    for one, other in zip([x, *model.parameters()], expected, strict=True):
        assert torch.equal(one.grad, other)


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_sharded_modules(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    seen = []

    class Block(torch.nn.Linear):
        def forward(self, x):
            seen.append(recollect.is_recomputing())
            return super().forward(x).sin()

    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Block(4, 4), Block(4, 4)), leaf(2, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    seen.clear()
    mesh = init_device_mesh("cpu", (1,))
    with patch_torch(determinism_check="first"):
        wrapping.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(x).sum().backward()
    assert seen == [False, False, True, True]
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), grad)


# --- The module API ---


def test_the_module_api_gets_the_defaults(monkeypatch):
    import torch.distributed._composable as package

    original, calls = package.checkpoint, []
    monkeypatch.setattr(composable, "checkpoint", lambda module, **options: calls.append(options))
    policy, linear = recollect.save_ops(torch.ops.aten.sin), torch.nn.Linear(3, 3)
    with patch_torch(early_stop=False, policy=policy):
        served = package.checkpoint
        assert served is not original
        assert served.state(linear) is None
        served(linear)
        served(linear, early_stop=True, context_fn=dropin.create_selective_checkpoint_contexts)
    assert package.checkpoint is original
    defaults = {"determinism_check": "default", "debug": False, "preserve_rng_state": True, "use_reentrant": False}
    contexts = {"context_fn": dropin.create_selective_checkpoint_contexts}
    assert calls == [
        {**defaults, "early_stop": False, "policy": policy},
        {**defaults, "early_stop": True, "policy": None, **contexts},
    ]


def test_composable_checkpoint(module_named):
    import torch.distributed._composable as package
    import torch.distributed._composable.checkpoint_activation as home

    original = home.checkpoint
    seen = []

    class Block(torch.nn.Linear):
        def forward(self, x):
            seen.append(recollect.is_recomputing())
            return super().forward(x).exp().sin().exp().exp()

    mine = module_named("mine", "from torch.distributed._composable import checkpoint")
    earlier, x = original(Block(3, 3)), leaf(2, 3)
    with patch_torch(policy=recollect.save_ops(torch.ops.aten.sin)):
        assert package.checkpoint is home.checkpoint is mine.checkpoint is not original
        block = Block(3, 3)
        assert mine.checkpoint(block) is block
        assert mine.checkpoint.state(block).enable_hook
        with CountOperators() as operators:
            block(x).sum().backward()
        assert operators.counts["sin"] == 1
        assert seen == [False, True]
        earlier(x).sum().backward()  # goes on as torch's own
        assert seen[2:] == [False, False]
        with pytest.raises(NotImplementedError):
            mine.checkpoint(Block(3, 3), use_reentrant=True)
    assert package.checkpoint is home.checkpoint is mine.checkpoint is original
    assert type(home) is types.ModuleType


# --- torch.compile ---


class Compiled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def part(self, x):
        return self.second(self.first(x).sin().exp())


class ByName(Compiled):
    def forward(self, x):
        return imported_before(self.part, x, use_reentrant=False)


class ByAttribute(Compiled):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)


class InAChain(Compiled):
    def forward(self, x):
        chain = torch.nn.Sequential(self.first, torch.nn.Tanh(), self.second, torch.nn.Tanh())
        return stock.checkpoint_sequential(chain, 2, x, use_reentrant=False)


def keep_products(ctx, op, *args, **kwargs):
    policy = stock.CheckpointPolicy
    return policy.MUST_SAVE if op is torch.ops.aten.addmm.default else policy.MUST_RECOMPUTE


def contexts_of_his_own():
    return stock.create_selective_checkpoint_contexts(keep_products)


class WithContexts(Compiled):
    def forward(self, x):
        return stock.checkpoint(self.part, x, use_reentrant=False, context_fn=contexts_of_his_own)


@pytest.fixture
def compiler():
    """The compiler as if nothing had been compiled, and free to warn."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.compile
    torch._dynamo.reset()


def compiled(compiler, model, backend):
    """Gradients, and the operators of the graphs that the compiler makes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs = []

    def note(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    if backend == "aot_eager":
        backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    x, run = leaf(3, 4), compiler(model, backend=backend, fullgraph=True)
    for _ in range(2):
        grads = torch.autograd.grad(run(x).sum(), [x, *model.parameters()])
    return grads, graphs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [ByName, ByAttribute, WithContexts])
def test_the_compiler_makes_the_same_of_it(compiler, kind, backend):
    grads, graphs = compiled(compiler, kind(), backend)
    torch._dynamo.reset()
    with patch_torch(policy=recollect.policies.save_matmuls):
        under, under_graphs = compiled(compiler, kind(), backend)
    assert under_graphs == graphs
    assert len(graphs) == (0 if backend == "eager" else 2)
    for one, other in zip(under, grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_compiler_takes_chains_which_it_does_not_take_from_torch(compiler, backend):
    model, x = InAChain(), leaf(3, 4)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    with patch_torch():
        grads, _ = compiled(compiler, model, backend)
    for one, other in zip(grads, expected, strict=True):
        assert torch.equal(one, other)


def test_after_a_graph_break_the_engine_is_ours_and_is_not_traced(compiler):
    seen = []

    def part(x):
        seen.append(recollect.is_recomputing())
        torch._dynamo.graph_break()
        return x.sin().exp()

    def function(x):
        return torch.utils.checkpoint.checkpoint(part, x * 2, use_reentrant=False).cos()

    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph

    x = leaf(3)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    seen.clear()
    with patch_torch():
        got = torch.autograd.grad(compiler(function, backend=backend)(x).sum(), x)[0]
    assert torch.equal(got, expected)
    assert seen == [False, True]
    assert len(traced) <= 2, "x * 2 before, cos after"


def test_the_compiler_does_not_look_at_how_a_name_is_served(compiler):
    @torch._dynamo.disable(recursive=False)
    def ask(x):
        return x, stock.CheckpointError

    def frames():
        torch._dynamo.reset()
        counters.clear()
        compiler(lambda x: ask(x * 2)[0].cos(), backend="eager")(leaf(3))
        return counters["frames"]["total"]

    from torch._dynamo.utils import counters

    without = frames()
    with patch_torch():
        assert frames() == without


# --- A whole process ---


def test_nothing_of_the_compiler_is_loaded_and_nothing_warned():
    program = """
        import sys, torch
        from torch.utils.checkpoint import checkpoint
        import recollect
        recollect.patch_torch(policy=recollect.save_ops(torch.ops.aten.sin))
        x = torch.ones(3, requires_grad=True)
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        assert torch.equal(x.grad, x.cos())
        assert checkpoint.__module__.startswith("recollect")
        assert "torch._dynamo" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
