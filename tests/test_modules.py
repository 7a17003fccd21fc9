"""`apply`: decisions for the modules of a model.

The plain model is the reference, bit for bit, and forwards are counted. Classes, copies and pickles: test_decided.py.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import re
import warnings
from collections import Counter, OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recollect
from recollect import (
    CheckpointError,
    Offload,
    Recompute,
    Save,
    _verification,
    by_name,
    checkpoint,
    policies,
    region,
    save_ops,
)
from recollect.dropin import set_checkpoint_early_stop
from tools import IN_PLACE, CountOperators, LiveBytes, assert_equal, leaf

mm = torch.ops.aten.mm
addmm = torch.ops.aten.addmm


# --- Models that count ---

RUNS: Counter = Counter()


@pytest.fixture(autouse=True)
def _count_from_zero():
    RUNS.clear()


class Counted(nn.Module):
    """Counts its forwards under the name that it has in its model."""

    name = ""

    def forward(self, *args, **kwargs):
        RUNS[self.name] += 1
        return self.compute(*args, **kwargs)


class Part(Counted):
    """Some work that saves its results."""

    def __init__(self, width=4, p=0.0):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(p)

    def compute(self, x):
        return self.dropout(self.linear(x).tanh()).sin()


class Block(Counted):
    def __init__(self, width=4, p=0.0):
        super().__init__()
        self.attn, self.mlp = Part(width, p), Part(width, p)

    def compute(self, x):
        return (x + self.mlp(x + self.attn(x))).sin()


class Model(Counted):
    def __init__(self, layers=2, width=4, p=0.0):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width, p) for _ in range(layers))

    def compute(self, x):
        x = self.embed(x).sin()
        for layer in self.layers:
            x = layer(x)
        return x


def made(kind, *args, **kwargs):
    """A model with the same weights each time."""
    torch.manual_seed(0)
    model = kind(*args, **kwargs)
    for name, module in model.named_modules():
        if isinstance(module, Counted):
            module.name = name
    return model


def run(model, *args, seed=1, backward=None, **kwargs):
    """One step: the result, all gradients and buffers, the random state after the forward and at the end."""
    torch.manual_seed(seed)
    args = [arg.detach().clone().requires_grad_() if isinstance(arg, torch.Tensor) else arg for arg in args]
    result = model(*args, **kwargs)
    between = torch.get_rng_state()
    (backward or torch.Tensor.backward)(total(result))
    grads = [arg.grad for arg in args if isinstance(arg, torch.Tensor)] + [one.grad for one in model.parameters()]
    state = [*copied(grads), *copied(model.buffers()), between, torch.get_rng_state()]
    model.zero_grad()
    return state


def copied(tensors):
    return [None if one is None else one.detach().clone() for one in tensors]


def total(result):
    if isinstance(result, torch.Tensor):
        return (result * torch.linspace(1, 2, result.numel()).view(result.shape)).sum()
    values = result.values() if isinstance(result, dict) else vars(result).values() if is_data(result) else result
    return sum(total(value) for value in values if isinstance(value, torch.Tensor) or is_container(value))


def is_data(value):
    return dataclasses.is_dataclass(value) and not isinstance(value, dict)


def is_container(value):
    return isinstance(value, (dict, list, tuple)) or is_data(value)


def assert_as_plain(model, decisions, *args, steps=3, **options):
    """The same for some steps as the plain model, which `model` is at first; gives the forwards of the last step."""
    plain = copy.deepcopy(model)
    with recollect.apply(model, decisions, **options):
        for step in range(steps):
            expected = run(plain, *args, seed=step)
            RUNS.clear()
            assert_equal(run(model, *args, seed=step), expected)
            runs = dict(RUNS)
    RUNS.clear()
    assert_equal(run(model, *args, seed=9), run(plain, *args, seed=9))
    return runs


# --- What a decision means, and where ---


@pytest.mark.parametrize("keep", [Save(), Offload()], ids=["save", "offload"])
def test_a_kept_module_inside_a_recomputed_one_is_not_run_again(keep):
    runs = assert_as_plain(made(Model, p=0.3), {"layers.*": Recompute(), "layers.*.attn": keep}, leaf(3, 4))
    assert runs == {"": 1} | {f"layers.{i}": 2 for i in (0, 1)} | {
        f"layers.{i}.{part}": 1 + (part == "mlp") for i in (0, 1) for part in ("attn", "mlp")
    }


DECISIONS = {
    "none": None,
    "save": Save(),
    "offload": Offload(),
    "recompute": Recompute(),
    "policy": Recompute(policy=save_ops(addmm)),
}


class Nested(Counted):
    """Three modules in each other, each with work before and after."""

    def __init__(self, depth=3):
        super().__init__()
        self.work = nn.Linear(4, 4)
        self.inner = Nested(depth - 1) if depth > 1 else nn.Tanh()

    def compute(self, x):
        return F.dropout(self.inner(self.work(x).sin()).exp(), 0.2).tanh()


def most_runs(model, decisions):
    """How often the table in `_decided.py` lets each module run in one step."""
    allowed, around = {}, None
    for name in ("", "inner", "inner.inner"):
        decision = decisions.get(name)
        if isinstance(decision, Recompute):
            around = "recomputed"
        elif decision is not None and around == "recomputed":
            around = "kept"
        allowed[name] = 2 if around == "recomputed" else 1
    return allowed


@pytest.mark.filterwarnings("ignore:.*changes nothing")
@pytest.mark.parametrize("names", list(itertools.product(DECISIONS, repeat=3)), ids="-".join)
def test_three_deep_in_all_combinations(names):
    chosen = zip(("", "inner", "inner.inner"), (DECISIONS[name] for name in names), strict=True)
    decisions = {path: decision for path, decision in chosen if decision is not None}
    if not decisions:
        return
    model = made(Nested)
    runs = assert_as_plain(model, decisions, leaf(3, 4))
    allowed = most_runs(model, decisions)
    assert all(runs[name] <= allowed[name] for name in allowed), (runs, allowed)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("check", ["first", "values", "default", "none"])
def test_options_reach_the_regions(check, early_stop):
    decisions = {"layers.*": Recompute(), "layers.*.attn": Save()}
    runs = assert_as_plain(
        made(Model, p=0.3), decisions, leaf(3, 4), determinism_check=check, early_stop=early_stop, debug=True
    )
    assert runs["layers.0.attn"] == 1


def test_early_stop_and_the_overrides_of_a_run():
    class Ending(Counted):
        def compute(self, x):
            y = x.sin().exp()
            RUNS["end"] += 1
            return y

    model = made(nn.Sequential, Ending())
    for options, stop, expected in (({}, None, 1), ({"early_stop": False}, None, 2), ({}, False, 2), ({}, True, 1)):
        RUNS.clear()
        override = contextlib.nullcontext() if stop is None else set_checkpoint_early_stop(stop)
        with override, recollect.apply(model, {"0": Recompute()}, determinism_check="none", **options):
            model(leaf(3)).sum().backward()
        assert RUNS["end"] == expected


def test_overrides_reach_a_region_inside_a_kept_module():
    class Ending(Counted):
        def compute(self, x):
            y = x.sin().exp()
            RUNS["end"] += 1
            return y

    model = made(nn.Sequential, nn.Sequential(nn.Sequential(Ending()), nn.Tanh()), nn.Tanh())
    decisions = {"": Recompute(), "0": Save(), "0.0": Recompute()}
    for stop, expected in ((True, 1), (False, 2)):
        RUNS.clear()
        with set_checkpoint_early_stop(stop), recollect.apply(model, decisions, determinism_check="none"):
            model(leaf(3)).sum().backward()
        assert RUNS["end"] == expected


def test_the_bytes_that_it_is_for():
    def kept(decisions):
        model = made(nn.Sequential, *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU()) for _ in range(4)))
        x = torch.randn(16, 64)
        with recollect.apply(model, decisions) if decisions else contextlib.nullcontext():
            model(x).sum().backward()  # verified once
            with LiveBytes() as live:
                y = model(x)
                bytes_alive = live.now
            y.sum().backward()
        return bytes_alive // x.nbytes

    # What tanh and gelu give in each layer; what gelu gives; that, and what tanh gives in all of them or in one.
    assert kept(None) == 8
    assert kept({"*": Recompute()}) == 4
    assert kept({"*": Recompute(), "*.1": Save()}) == 8
    assert kept({"*": Recompute(), "1": Save()}) == 5


# --- Which modules ---


def decided(model, decisions, **options):
    """What is decided for the names of a model."""
    with recollect.apply(model, decisions, **options) as handle:
        lines = [line.rpartition("  <- ") for line in str(handle).splitlines()]
    names = [name for name, _ in model.named_modules()]
    return {name: decision for name, (_, arrow, decision) in zip(names, lines, strict=True) if arrow}


def test_later_entries_win():
    found = decided(
        made(Model),
        {"layers.*": Recompute(), "layers.1": Save(), Part: Offload(), "**.mlp": Recompute(), "layers.0.attn": Save()},
    )
    assert found == {
        "layers.0": "Recompute() by 'layers.*'",
        "layers.0.attn": "Save(on_mutation='error') by 'layers.0.attn'",
        "layers.0.mlp": "Recompute() by '**.mlp'",
        "layers.1": "Save(on_mutation='error') by 'layers.1'",
        "layers.1.attn": "Offload(to='cpu') by Part",
        "layers.1.mlp": "Recompute() by '**.mlp'",
    }


def test_types_stand_for_their_subclasses_too():
    assert set(decided(made(Model), {Counted: Recompute()})) == {
        "",
        "layers.0",
        "layers.0.attn",
        "layers.0.mlp",
        "layers.1",
        "layers.1.attn",
        "layers.1.mlp",
    }


def test_the_class_of_a_decided_module_stands_for_all_of_its_kind():
    model = made(Model)
    recollect.apply(model, {"layers.0": Recompute()})
    recollect.apply(made(Model), {type(model.layers[0]): Recompute()})
    with pytest.raises(ValueError, match=r"layers\.0 is decided already"):
        recollect.apply(model, {type(model.layers[0]): Recompute()})


def test_a_function_decides():
    asked = []

    def decide(name, module):
        asked.append((name, type(module).__name__))
        return Recompute() if isinstance(module, Block) else Save() if name.endswith("attn") else None

    found = decided(made(Model, 1), decide)
    assert {name: one.split(" by ")[0] for name, one in found.items()} == {
        "layers.0": "Recompute()",
        "layers.0.attn": "Save(on_mutation='error')",
    }
    assert all("decide" in one for one in found.values())
    assert ("layers", "ModuleList") not in asked  # which is never called
    assert len(asked) == len(set(asked)) == len([*made(Model, 1).modules()]) - 1


def test_the_model_itself_and_everything_in_it():
    assert set(decided(made(Model, 1), {"": Recompute()})) == {""}
    found = decided(made(Model, 1), {"**": Recompute()})
    assert "layers" not in found
    assert len(found) == len([*made(Model, 1).modules()]) - 1


def test_containers():
    model = nn.Module()
    model.parts = nn.ModuleDict({"a": Part(), "b": nn.ModuleList([Part(), Part()])})
    model.forward = lambda x: model.parts["b"][1](model.parts["b"][0](model.parts["a"](x)))
    assert set(decided(model, {"parts.*": Recompute(), "parts.b.*": Save()})) == {"parts.a", "parts.b.0", "parts.b.1"}
    with pytest.raises(
        ValueError,
        match=r"'parts\.b' matches parts\.b \(ModuleList\) only, which is never called in Module; decide for what is "
        r"inside: 'parts\.b\.\*'",
    ):
        recollect.apply(model, {"parts.b": Recompute()})
    with pytest.raises(ValueError, match=r"ModuleDict matches parts \(ModuleDict\) only, which is never called"):
        recollect.apply(model, {nn.ModuleDict: Recompute()})


def test_a_module_that_is_called_without_a_forward():
    class Direct(nn.Module):
        def __call__(self, x):
            RUNS["direct"] += 1
            return x.sin().exp()

    model = nn.Sequential(Direct(), nn.Tanh())
    with recollect.apply(model, {"0": Recompute()}):
        model(leaf(3)).sum().backward()
        with pytest.raises(ValueError, match="0 is decided already"):
            recollect.apply(model, {"0": Save()})
    assert RUNS["direct"] == 2


def test_modules_that_are_equal_are_still_two():
    class Equal(Part):
        def __eq__(self, other):
            return isinstance(other, Equal)

        def __hash__(self):
            return 1

    model = made(nn.Sequential, Equal(), Equal(), nn.Tanh())
    model[1].name = "1"
    with recollect.apply(model, {"0": Recompute(), "1": Recompute()}):
        model(leaf(3, 4)).sum().backward()
    assert RUNS == {"0": 2, "1": 2}


def test_a_module_with_two_names_is_found_by_both():
    shared = Part()
    model = made(nn.Sequential, OrderedDict(a=shared, b=nn.Tanh(), c=shared))
    runs = assert_as_plain(model, {"c": Recompute()}, leaf(3, 4))
    assert runs == {"a": 4}  # called twice, and each call is a region
    handle = recollect.apply(model, {"a": Recompute()})
    assert str(handle).splitlines()[-1] == "  c: Part (the same as a)  <- Recompute() by 'a'"


@pytest.mark.parametrize(
    ("decisions", "error", "message"),
    [
        ({"layer.*": Save()}, ValueError, r"'layer\.\*' matches no module of Model; close to it: layers\.\*"),
        (
            {"layers.7": Save()},
            ValueError,
            r"'layers\.7' matches no module of Model; close to it: layers\.0, layers\.1$",
        ),
        ({"**.atn": Save()}, ValueError, r"close to it: .*attn"),
        ({nn.LayerNorm: Save()}, ValueError, r"LayerNorm matches no module of Model; close to it: .*Linear"),
        ({}, ValueError, "at least one pattern"),
        ({"layers..0": Save()}, ValueError, r"parts with dots between them.*got 'layers\.\.0'"),
        ({"layers.*": "save"}, TypeError, r"Recompute\(\) or Offload\(\) for 'layers\.\*', got str 'save'"),
        ({"layers.*": None}, TypeError, r"for 'layers\.\*', got NoneType"),
        ({3: Save()}, TypeError, "patterns over module names .* got int 3"),
        ({int: Save()}, TypeError, "subclasses of torch.nn.Module as keys, got type"),
        (None, TypeError, "decisions must be a dict .* got NoneType None"),
        ([("layers.*", Save())], TypeError, "decisions must be a dict"),
        (lambda name, module: None, ValueError, "gave None for every module of Model"),
        (lambda name, module: True, TypeError, r"decisions, asked about '', must give .* got bool True"),
    ],
)
def test_decisions_that_cannot_be_meant(decisions, error, message):
    model = made(Model)
    before = states_of(model)
    with pytest.raises(error, match=message):
        recollect.apply(model, decisions)
    assert states_of(model) == before


def test_a_model_that_is_none():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        recollect.apply(run, {"": Save()})
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        recollect.unapply(None)


@pytest.mark.parametrize("option", [{"determinism_check": "always"}, {"early_stop": "no"}, {"preserve_rng_state": "x"}])
def test_bad_options_change_nothing(option):
    model = made(Model)
    before = states_of(model)
    with pytest.raises((TypeError, ValueError), match=next(iter(option))):
        recollect.apply(model, {"layers.*": Recompute()}, **option)
    assert states_of(model) == before


# --- Taking it off, and stacking ---


def states_of(model):
    """Everything of a model that could be changed: classes and attributes of all its modules, by identity."""
    return [
        (name, type(one), {key: id(value) for key, value in vars(one).items()}) for name, one in model.named_modules()
    ]


@pytest.mark.parametrize("leave", ["remove", "with", "unapply", "remove twice", "with an error"])
def test_the_model_is_as_before(leave):
    model = made(Model)
    before = states_of(model)
    handle = recollect.apply(model, {"**": Recompute(), "layers.*.attn": Save()})
    assert states_of(model) != before
    if leave == "with":
        with handle as entered:
            assert entered is handle
    elif leave == "with an error":
        with pytest.raises(RuntimeError, match="mine"), handle:
            raise RuntimeError("mine")
    elif leave == "unapply":
        recollect.unapply(model)
    else:
        handle.remove()
    if leave == "remove twice":
        handle.remove()
    assert states_of(model) == before


def test_several_stack_and_are_taken_off_in_any_order():
    for first in (0, 1):
        model = made(Model)
        before = states_of(model)
        handles = [
            recollect.apply(model, {"layers.*": Recompute()}),
            recollect.apply(model, {"layers.*.attn": Save()}),
        ]
        run(model, leaf(3, 4))
        RUNS.clear()
        run(model, leaf(3, 4))
        assert RUNS["layers.0.attn"] == 1
        assert RUNS["layers.0"] == 2
        handles[first].remove()
        RUNS.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(model, leaf(3, 4))
        assert RUNS["layers.0.attn"] == (1 if first == 0 else 2)
        handles[1 - first].remove()
        assert states_of(model) == before


def test_two_decisions_for_one_module_are_an_error_that_names_both():
    model = made(Model)
    recollect.apply(model, {"layers.*": Recompute()})
    before = states_of(model)
    with pytest.raises(ValueError, match="decided already") as error:
        recollect.apply(model, {"layers.*.attn": Save(), "**.1": Save()})
    assert states_of(model) == before  # not even in part
    assert str(error.value).startswith(
        "layers.1 is decided already, by 'layers.*': Recompute(), and now by '**.1': Save(on_mutation='error'). "
    )


def test_an_old_handle_leaves_a_new_decision_alone():
    model = made(Model)
    old = recollect.apply(model, {"layers.*": Recompute()})
    recollect.unapply(model)
    new = recollect.apply(model, {"layers.*": Save()})
    state = states_of(model)
    old.remove()
    assert states_of(model) == state
    new.remove()


def test_a_decision_that_changes_between_forward_and_backward_is_no_secret():
    model = made(Model)
    for late, early in (({"layers.*.attn": Save()}, {"layers.*": Recompute()}), ({"layers.*": Recompute()}, None)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outer = recollect.apply(model, early) if early else contextlib.nullcontext()
            with outer:
                with recollect.apply(model, late):
                    y = model(leaf(3, 4)).sum()
                if early is None:  # a region knows what it runs
                    y.backward()
                    continue
                with pytest.raises(
                    CheckpointError, match=r"'layers\.1\.attn'.* a decision of recollect.apply was made or"
                ):
                    y.backward()
                y = model(leaf(3, 4)).sum()
                with (
                    recollect.apply(model, late),
                    pytest.raises(
                        CheckpointError, match=r"'layers\.1\.attn'.* a decision of recollect.apply was made or"
                    ),
                ):
                    y.backward()


class Remembers(nn.Module):
    """Passes something on beside its result, which a replay that does not run it finds changed."""

    def forward(self, x):
        self.last = x.detach().exp()
        return x.sin()


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Remembers()

    def forward(self, x):
        return (self.part(x) * self.part.last).sin().exp()


def test_a_model_is_verified_again_under_decisions_that_it_has_not_had():
    model = nn.Sequential(Reads())

    def two_forwards(decisions):
        with recollect.apply(model, decisions) if decisions else contextlib.nullcontext():
            y = model(leaf(3))
            model(leaf(3) * 2)
            y.sum().backward()

    with recollect.apply(model, {"0": Recompute()}):
        for _ in range(2):
            two_forwards(None)
        with pytest.raises(CheckpointError, match=r"Recomputed values differ.*'0', Reads"):
            two_forwards({"0.part": Save()})


def test_a_model_is_not_verified_again_under_decisions_that_it_has_had(monkeypatch):
    records = []

    class Noted(_verification.Recorder):
        def __init__(self, **options):
            super().__init__(**options)
            records[-1] += 1

    monkeypatch.setattr(_verification, "Recorder", Noted)
    model = made(Model)
    for _ in range(5):
        records.append(0)
        with recollect.apply(model, {"layers.*": Recompute(policy=save_ops(addmm)), "layers.*.attn": Save()}):
            run(model, leaf(3, 4))
    assert records[0] == 4  # two layers, forward and replay
    assert records[3:] == [0, 0]


def test_the_summary(capsys):
    model = made(Model, 1)
    handle = recollect.apply(model, {"layers.*": Recompute(), "layers.*.mlp": Recompute(policy=save_ops(addmm))})
    handle.summary()
    assert capsys.readouterr().out == (
        "Model\n"
        "  embed: Linear\n"
        "  layers: ModuleList\n"
        "    0: Block  <- Recompute() by 'layers.*'\n"
        "      attn: Part\n"
        "        linear: Linear\n"
        "        dropout: Dropout\n"
        "      mlp: Part  <- Recompute(policy=recollect.save_ops(aten.addmm)) by 'layers.*.mlp'\n"
        "        linear: Linear\n"
        "        dropout: Dropout\n"
    )
    assert repr(handle) == "<decisions for 2 modules of Model; print() shows them>"
    handle.remove()
    assert "<-" not in str(handle)
    del model
    assert str(handle) == "the model is gone"
    assert "a model that is gone" in repr(handle)


# --- Decisions that are of no use ---


def warned(model, decisions, *args, times=2):
    with recollect.apply(model, decisions), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            model(*args).sum().backward()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("decisions", "who", "why"),
    [
        ({"layers.*.attn": Save()}, r"'layers\.\*\.attn': Save\(", "where it is called nothing is recomputed"),
        (
            {"layers.*": Recompute(), "layers.*.attn": Recompute()},
            r"'layers\.\*\.attn': Recompute\(\)",
            "it is called inside of what is recomputed as a whole",
        ),
        (
            {"layers.*": Recompute(), "layers.*.attn": Save(), "layers.*.attn.linear": Save()},
            r"'layers\.\*\.attn\.linear': Save\(",
            "it is called inside of what is kept as a whole",
        ),
        ({"embed": Recompute()}, "'embed': Recompute", "autograd saves nothing in there but what is kept anyway"),
        (
            {"layers.*.attn": Recompute(), "layers.*.attn.*": Save()},
            None,
            None,
        ),
    ],
)
def test_a_decision_that_changes_nothing_warns_once(decisions, who, why):
    messages = warned(made(Model), decisions, leaf(3, 4))
    if who is None:
        assert messages == []
        return
    (message,) = messages
    assert re.search(f"the decision {who}.* of recollect.apply changes nothing: {why}", message)


def test_a_recomputed_view_warns_once():
    (message,) = warned(nn.Sequential(nn.Tanh(), nn.Flatten()), {"1": Recompute()}, leaf(3, 4))
    assert "'1': Recompute() of recollect.apply changes nothing: autograd saves nothing in there" in message


def test_one_that_moves_the_inputs_is_of_use(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inputs = recollect.Offload(to="disk", directory=tmp_path, min_bytes=0)
    recollect.apply(model, {"1": recollect.Recompute(inputs=inputs)})
    before = recollect.offload_stats().bytes_out
    model(torch.randn(3, 2)).sum().backward()
    assert recollect.offload_stats().bytes_out - before == 24


def test_a_recomputed_module_in_which_everything_is_kept():
    model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    (message,) = warned(model, {"1": Recompute(), "1.0": Save()}, leaf(3, 4))
    assert message.startswith("the decision '1': Recompute() of recollect.apply changes nothing")


def test_an_entry_that_later_ones_leave_nothing_to():
    with pytest.warns(
        UserWarning, match=r"'layers\.1': Save.* changes nothing: later entries decide for all the modules"
    ):
        recollect.apply(made(Model), {"layers.1": Save(), "layers.*": Recompute()})


@pytest.mark.parametrize(
    "decisions",
    [
        {"layers.*": Recompute()},
        {"layers.*": Recompute(), "layers.0": Save()},  # that layer is not recomputed
        {"layers.*": Recompute(), "layers.*.attn": Save(), "layers.*.attn.linear": Recompute(policy=save_ops(addmm))},
        {"layers.0": Recompute(), "layers.*.attn": Save()},  # of use in one of them
        {"layers.*": Offload()},
        {"layers.*.attn": Recompute()},
    ],
)
def test_a_decision_of_some_use_does_not_warn(decisions):
    assert warned(made(Model), decisions, leaf(3, 4)) == []


def test_nothing_is_said_where_nothing_is_recorded():
    model = made(Model)
    with recollect.apply(model, {"layers.*.attn": Save()}), torch.no_grad():
        model(leaf(3, 4))


# --- All kinds of modules ---


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    rest: object = None


class Gives(Counted):
    """A module that gives its results in some container."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def compute(self, x, *, scale=1.0, mask=None):
        h = (self.linear(x) * scale).tanh()
        h = h if mask is None else h * mask
        if self.kind == "dict":
            return {"h": h, "more": [h.sin(), None]}
        if self.kind == "dataclass":
            return Output(h, {"twice": h * 2})
        if self.kind == "tuple":
            return h, h.cos(), "text"
        return h


class Takes(Counted):
    def __init__(self, kind):
        super().__init__()
        self.gives = Gives(kind)

    def compute(self, x, *, mask=None):
        out = self.gives(x.exp(), scale=0.5, mask=mask)
        if isinstance(out, dict):
            h = out["h"] + out["more"][0]
        elif isinstance(out, Output):
            h = out.hidden + out.rest["twice"]
        else:
            h = out[0] + out[1] if isinstance(out, tuple) else out
        return h.sin().exp()


@pytest.mark.parametrize(
    "decision", [Save(), Offload(), Recompute(policy=save_ops(addmm))], ids=["save", "host", "ops"]
)
@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "dataclass"])
def test_containers_of_results(kind, decision):
    runs = assert_as_plain(made(Takes, kind), {"": Recompute(), "gives": decision}, leaf(3, 4))
    assert runs == {"": 2, "gives": 1 if not isinstance(decision, Recompute) else 2}


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "dataclass"])
def test_a_region_that_gives_a_container(kind):
    model, plain = made(Gives, kind), made(Gives, kind)
    with recollect.apply(model, {"": Recompute()}):
        assert_equal(run(model, leaf(3, 4)), run(plain, leaf(3, 4)))


def test_keyword_arguments():
    mask = torch.rand(3, 4)
    model, plain = made(Takes, "tensor"), made(Takes, "tensor")
    with recollect.apply(model, {"": Recompute(), "gives": Save()}):
        assert_equal(run(model, leaf(3, 4), mask=mask), run(plain, leaf(3, 4), mask=mask))
        with pytest.raises(TypeError, match="unexpected keyword argument 'maks'"):
            model(leaf(3, 4), maks=mask)


def test_two_models_with_the_same_names_learn_nothing_of_each_other():
    class Order(Counted):
        def __init__(self, first):
            super().__init__()
            self.part, self.first = Part(), first

        def compute(self, x):
            return self.part(x).sin().exp() if self.first else self.part(x.sin().exp())

    # Whether a replay comes to what a part gives is remembered: in one model none does, in the other each does.
    for first in (False, True):
        model = made(nn.Sequential, Order(first))
        with recollect.apply(model, {"0": Recompute(), "0.part": Save()}):
            for _ in range(2):
                RUNS.clear()
                run(model, leaf(3, 4))
                assert RUNS["0.part"] == 1


def test_tied_weights():
    model = made(Model)
    model.layers[1].attn.linear.weight = model.layers[0].attn.linear.weight
    model.layers[1].mlp.linear.weight = model.layers[0].attn.linear.weight
    assert_as_plain(model, {"layers.*": Recompute(), "layers.*.attn": Save()}, leaf(3, 4))
    assert model.layers[1].attn.linear.weight is model.layers[0].attn.linear.weight


class Shares(Counted):
    """A module with two parents, called several times by each."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Caller(), Caller()
        self.two.shared = self.one.shared

    def compute(self, x):
        return self.two(self.one(x))


class Caller(Counted):
    def __init__(self):
        super().__init__()
        self.shared = Part(p=0.3)

    def compute(self, x):
        return (self.shared(x) + self.shared(x * 2)).exp().tanh()


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        ({"*.shared": Recompute()}, 8),
        ({"one": Recompute(), "*.shared": Save()}, 4),
        ({"": Recompute(), "*.shared": Save()}, 4),
        ({"": Recompute(), "one.shared": Save(), "two": Recompute(policy=save_ops(torch.ops.aten.exp))}, 4),
        ({"one": Recompute(), "two.shared": Recompute(policy=save_ops(addmm))}, 8),
    ],
)
def test_a_shared_module_called_several_times(decisions, expected):
    runs = assert_as_plain(made(Shares), decisions, leaf(3, 4))
    assert runs["two.shared" if "two.shared" in runs else "one.shared"] == expected


def test_batch_norm_and_dropout():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Tanh()) for _ in range(3))
    )
    for decisions in (
        {"*": Recompute()},
        {"*": Recompute(), "*.1": Save()},
        {"": Recompute(), "0": Save(), "0.1": Recompute(), "*.2": Save()},
        {"": Recompute(), "*": Recompute(policy=policies.save_everything_but_pointwise)},
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*changes nothing")
            assert_as_plain(copy.deepcopy(model), decisions, leaf(3, 4))


def test_eval_mode():
    model = made(Model, p=0.5).eval()
    assert_as_plain(model, {"layers.*": Recompute(), "layers.*.attn": Save()}, leaf(3, 4))


def test_train_and_eval_between_forward_and_backward():
    model, plain = made(Model, p=0.5), made(Model, p=0.5)
    with recollect.apply(model, {"layers.*": Recompute(), "layers.*.attn": Save()}):
        got = run(model, leaf(3, 4), backward=lambda loss: (model.eval(), loss.backward()))
    assert_equal(got, run(plain, leaf(3, 4)))


def test_no_grad_and_inference_mode_run_plainly(count_operators):
    model, plain = made(Model), made(Model)
    x = torch.randn(3, 4)
    with recollect.apply(model, {"layers.*": Recompute(), "layers.*.attn": Save()}):
        for mode in (torch.no_grad, torch.inference_mode):
            RUNS.clear()
            with mode(), count_operators() as operators:
                y = model(x)
            with mode(), count_operators() as expected:
                z = plain(x)
            assert operators.names == expected.names
            assert torch.equal(y, z)
            assert not y.requires_grad
            assert RUNS["layers.0"] == 2  # once each


def test_a_part_without_grad_inside_of_what_is_recomputed():
    class Teacher(Counted):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def compute(self, x):
            with torch.no_grad():
                target = self.part(x)
            return (self.part(x) - target.cos()).exp()

    runs = assert_as_plain(made(Teacher), {"": Recompute(), "part": Save()}, leaf(3, 4))
    assert runs == {"": 2, "part": 3}


def test_autocast():
    model = made(Model, p=0.3)

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x).float()

    assert_as_plain(
        Cast(),
        {"inner.layers.*": Recompute(), "**.attn": Save(), "**.mlp": Recompute(policy=policies.save_matmuls)},
        leaf(3, 4),
    )


BACKWARDS = {
    "once": torch.Tensor.backward,
    "twice": lambda loss: (loss.backward(retain_graph=True), loss.backward()),
    "three times": lambda loss: [loss.backward(retain_graph=True) for _ in range(3)],
}


@pytest.mark.parametrize("backward", BACKWARDS.values(), ids=BACKWARDS)
@pytest.mark.parametrize("inner", [Save(), Offload(), Recompute(policy=save_ops(addmm))], ids=["save", "host", "ops"])
def test_several_backward_passes(inner, backward):
    model, plain = made(Model, p=0.3), made(Model, p=0.3)
    with recollect.apply(model, {"layers.*": Recompute(), "layers.*.attn": inner}):
        for _ in range(2):
            assert_equal(run(model, leaf(3, 4), backward=backward), run(plain, leaf(3, 4), backward=backward))


@pytest.mark.parametrize("inner", [Save(), Offload(), Recompute(policy=save_ops(addmm))], ids=["save", "host", "ops"])
def test_double_backward(inner):
    def gradients(model):
        x = leaf(3, 4)
        torch.manual_seed(3)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        grads = copied([x.grad, *(one.grad for one in model.parameters())])
        model.zero_grad()
        return grads

    model, plain = made(Model, p=0.3), made(Model, p=0.3)
    with recollect.apply(model, {"layers.*": Recompute(), "layers.*.attn": inner, "embed": Offload()}):
        for _ in range(2):
            assert_equal(gradients(model), gradients(plain))


def test_gradients_accumulate_over_forwards_before_one_backward():
    def accumulated(model):
        torch.manual_seed(5)
        losses = [model(leaf(3, 4, seed=i)).sum() for i in range(3)]
        for loss in losses[1:]:
            loss.backward()
        losses[0].backward()
        grads = copied(one.grad for one in model.parameters())
        model.zero_grad()
        return grads

    model, plain = made(Model, p=0.3), made(Model, p=0.3)
    with recollect.apply(model, {"layers.*": Recompute(), "layers.*.attn": Save()}):
        assert_equal(accumulated(model), accumulated(plain))


def test_a_training_loop_with_an_optimizer():
    def trained(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        torch.manual_seed(5)
        for i in range(4):
            model(leaf(3, 4, seed=i)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    model, plain = made(Model, p=0.3), made(Model, p=0.3)
    with recollect.apply(model, {"layers.*": Recompute(), "layers.*.attn": Save()}):
        assert_equal(dict(trained(model)), dict(trained(plain)))


@pytest.mark.parametrize("where", ["attn", "mlp", "layer"])
@pytest.mark.parametrize("caught", [True, False])
def test_an_exception_in_a_decided_module(where, caught):
    class Failing(nn.Module):
        def forward(self, x):
            if RUNS["fails"] > 0:
                raise ZeroDivisionError("mine")
            return x

    class Tries(Counted):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(p=0.3), Block(p=0.3)])

        def compute(self, x):
            for layer in self.layers:
                try:
                    x = layer(x)
                except ZeroDivisionError:
                    if not caught:
                        raise
                    x = x * 2
            return x.sin()

    model = made(Tries)
    for layer in model.layers:
        if where == "layer":
            layer.register_forward_hook(lambda module, args, output: Failing()(output))
        else:
            getattr(layer, where).linear = nn.Sequential(nn.Linear(4, 4), Failing())
    plain = copy.deepcopy(model)
    for decisions in (
        {"layers.*": Recompute(), "layers.*.attn": Save(), "layers.*.mlp": Recompute(policy=save_ops(addmm))},
        {"": Recompute(), "layers.*": Save(), "layers.*.attn": Recompute()},
    ):
        with recollect.apply(model, decisions):
            RUNS["fails"] = 1
            if caught:
                assert_equal(run(model, leaf(3, 4)), run(plain, leaf(3, 4)))
            else:
                with pytest.raises(ZeroDivisionError, match="mine"):
                    model(leaf(3, 4))
            RUNS["fails"] = 0
            assert_equal(run(model, leaf(3, 4)), run(plain, leaf(3, 4)))


# --- Regions of the user's around and inside ---


def test_a_decided_model_inside_of_an_undecided_one():
    def outer():
        return nn.Sequential(nn.Linear(4, 4), made(Model, p=0.3), nn.Tanh())

    torch.manual_seed(7)
    model = outer()
    plain = copy.deepcopy(model)
    with recollect.apply(model[1], {"layers.*": Recompute(), "layers.*.attn": Save()}):
        assert_equal(run(model, leaf(3, 4)), run(plain, leaf(3, 4)))
        RUNS.clear()
        run(model, leaf(3, 4))
    assert RUNS["layers.0.attn"] == 1


@pytest.mark.parametrize("policy", [None, by_name({"x": Save()}) | policies.save_matmuls], ids=["plain", "policy"])
@pytest.mark.parametrize("depth", [1, 2])
def test_decided_modules_inside_the_users_own_region(depth, policy):
    model, plain = made(Model, p=0.3), made(Model, p=0.3)
    decisions = {"layers.*.attn": Save(), "layers.*.mlp": Recompute(policy=save_ops(addmm))}

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            def call(x, depth=depth):
                inner = functools.partial(call, depth=depth - 1) if depth > 1 else model
                return checkpoint(inner, x, policy=policy).sin()

            return call(x)

    class Plain(Own):
        def __init__(self):
            nn.Module.__init__(self)
            self.model = plain

        def forward(self, x):
            x = plain(x)
            for _ in range(depth):
                x = x.sin()
            return x

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*matched nothing")
        with recollect.apply(model, decisions):
            for _ in range(2):
                RUNS.clear()
                got = run(Own(), leaf(3, 4))
                runs = dict(RUNS)
                assert_equal(got, run(Plain(), leaf(3, 4)))
    if depth == 1:
        assert runs["layers.0.attn"] == 1
        assert runs["layers.0"] == 2


class Named(Counted):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def compute(self, x):
        def inner(x):
            RUNS["act"] += 1
            return x.sin().cos()

        return region("act", inner)(self.linear(x).exp().tanh()).exp()


class HasNamed(Counted):
    def __init__(self):
        super().__init__()
        self.named = Named()

    def compute(self, x):
        return self.named(x.sin()).sin().exp()


@pytest.mark.filterwarnings("ignore:.*matched nothing")
@pytest.mark.parametrize(
    ("decisions", "act"),
    [
        ({"named": Recompute(policy=by_name({"act": Save()}))}, 1),
        ({"": Recompute(policy=by_name({"act": Save()}))}, 1),  # names are the user's, modules are no part of a path
        ({"": Recompute(), "named": Recompute(policy=by_name({"act": Save()}))}, 1),
        ({"": Recompute(policy=by_name({"act": Save()})), "named": Recompute()}, 2),  # its own policy, which is none
        ({"": Recompute(policy=by_name({"act": Recompute()})), "named": Save()}, 2),
        ({"": Recompute(), "named": Recompute(policy=lambda what, ctx: Save() if what == "act" else None)}, 1),
        ({"": Recompute(), "named": Save()}, 1),
    ],
)
def test_named_regions_inside_decided_modules(decisions, act):
    runs = assert_as_plain(made(HasNamed), decisions, leaf(3, 4))
    assert runs["act"] == act


def test_paths_of_named_regions_do_not_depend_on_decisions():
    paths = []

    def policy(what, ctx):
        if isinstance(what, str):
            paths.append(what)

    for decisions in ({"named": Save()}, None):
        model = made(HasNamed)
        if decisions is not None:
            recollect.apply(model, decisions)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint(model, leaf(3, 4), policy=policy)
    assert paths == ["act", "act"]


# --- Policies ---


def count_of(model, name, decisions, **options):
    with recollect.apply(model, decisions, **options):
        run(model, leaf(3, 4))
        with CountOperators() as operators:
            run(model, leaf(3, 4))
    return operators.counts[name]


def test_a_policy_of_a_decision_keeps_operators():
    plain = count_of(made(Model), "addmm", {"layers.*": Recompute()})
    assert plain == 5 + 4
    assert count_of(made(Model), "addmm", {"layers.*": Recompute(policy=save_ops(addmm))}) == 5
    # Of a part alone, where the rest is recomputed; and of all but that part.
    attn = {"layers.*": Recompute(), "layers.*.attn": Recompute(policy=save_ops(addmm))}
    assert count_of(made(Model), "addmm", attn) == 7
    rest = {"layers.*": Recompute(policy=save_ops(addmm)), "layers.*.attn": Recompute()}
    assert count_of(made(Model), "addmm", rest) == 7


def test_a_policy_that_is_a_function_is_asked_in_the_forward_alone():
    asked = []
    every_other = itertools.cycle([Save(), None, Recompute()])

    def policy(what, ctx):
        asked.append(what)
        return next(every_other) if what in (addmm.default, torch.ops.aten.sin.default) else None

    for decisions in (
        {"layers.*": Recompute(policy=policy)},
        {"layers.*": Recompute(), "layers.*.attn": Recompute(policy=policy)},
        {"": Recompute(), "layers.*": Save(), "layers.*.mlp": Recompute(policy=policy)},
        {"": Recompute(policy=policy), "layers.*.mlp": Recompute(policy=policy)},
    ):
        assert_as_plain(made(Model, p=0.3), decisions, leaf(3, 4))
        model = made(Model)
        with recollect.apply(model, decisions):
            y = model(leaf(3, 4)).sum()
            asked.clear()
            y.backward(retain_graph=True)
            y.backward()
        assert asked == []


def test_a_policy_that_matches_nothing_in_its_module_says_so():
    model = made(Model)
    decisions = {"layers.*": Recompute(), "layers.*.attn": Recompute(policy=save_ops(torch.ops.aten.bmm))}
    with recollect.apply(model, decisions), pytest.warns(UserWarning, match=r"save_ops\(aten\.bmm\) matched nothing"):
        model(leaf(3, 4))


class InPlace(Counted):
    """`h = self.mlp(x); h += x`, as in many residual networks."""

    def __init__(self, inner=None):
        super().__init__()
        self.mlp = inner or nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def compute(self, x):
        h = self.mlp(x.sin())
        h += x
        return h.sin().exp()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "policy",
    [policies.save_matmuls, policies.save_everything_but_pointwise, save_ops(addmm, on_mutation="copy")],
    ids=["save_matmuls", "save_everything_but_pointwise", "copy"],
)
def test_a_result_changed_in_place_after_a_part_with_a_policy(policy, nested):
    decisions = {"": Recompute(), "mlp": Recompute(policy=policy)}
    model = made(InPlace)
    if nested:
        model = made(nn.Sequential, model, nn.Tanh())
        decisions = {"": Recompute(), "0": Save(), "0.mlp": Recompute(policy=policy)}
    assert_as_plain(model, decisions, leaf(3, 4))


def test_a_result_changed_in_place_after_a_region_with_a_ready_made_policy():
    for options in ({}, {"early_stop": False}):
        assert_as_plain(made(InPlace), {"mlp": Recompute(policy=policies.save_matmuls)}, leaf(3, 4), **options)


def test_in_place_after_chosen_operators_is_an_error_that_names_it():
    model = made(InPlace)
    with recollect.apply(model, {"": Recompute(), "mlp": Recompute(policy=save_ops(addmm))}):
        y = model(leaf(3, 4))
        with pytest.raises(CheckpointError, match=r"the output of aten\.addmm that the policy keeps has been mutated"):
            y.sum().backward()


def test_in_place_after_a_kept_module_runs_it_again():
    model = made(InPlace, made(Part))
    model.mlp.name = "mlp"
    runs = assert_as_plain(model, {"": Recompute(), "mlp": Save()}, leaf(3, 4))
    assert runs == {"": 2, "mlp": 2}


def test_in_place_on_what_autograd_saved_is_refused_as_ever():
    model = made(InPlace, nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    for decisions in (
        {"": Recompute()},
        {"mlp": Offload()},
        {"": Recompute(), "mlp": Save()},
        {"": Recompute(), "mlp": Offload()},
    ):
        with recollect.apply(model, decisions), pytest.raises(RuntimeError, match=IN_PLACE):
            model(leaf(3, 4)).sum().backward()


# --- Messages ---


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.scale = 2.0

    def forward(self, x):
        return (self.part(x) * self.scale).sin().exp()


@pytest.mark.filterwarnings("ignore:.*matched nothing")
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    "decisions",
    [
        {"0": Recompute()},
        {"0": Recompute(), "0.part": Save()},
        {"0": Recompute(), "0.part": Recompute(policy=save_ops(addmm))},
        {"0": Recompute(policy=save_ops(addmm)), "0.part": Recompute()},
        {"0": Recompute(), "0.part": Recompute(policy=lambda what, ctx: Save() if what is addmm.default else None)},
    ],
)
def test_an_error_names_the_module_and_the_operator_that_differs(decisions, debug):
    model = nn.Sequential(Scaled())
    with recollect.apply(model, decisions, debug=debug):
        y = model(leaf(3, 4))
        model[0].scale = 3.0
        with pytest.raises(CheckpointError, match=r"the checkpointed region '0', Scaled") as error:
            y.sum().backward()
    assert "The first operator whose result differs: aten.mul in Scaled" in str(error.value)
    assert "'scale' of Scaled was 2.0 in the forward and is 3.0" in str(error.value)
    assert ("part at" in str(error.value) or "Then they part" in str(error.value)) is False


def test_a_module_that_does_its_work_later_is_refused():
    class Generator(nn.Module):
        def forward(self, x):
            yield x.sin()

    model = Generator()
    with recollect.apply(model, {"": Recompute()}), pytest.raises(TypeError, match="which gives a generator"):
        model(leaf(3))


def test_explain_sees_decisions():
    model = made(Model, 1)
    with recollect.apply(model, {"layers.*.attn": Save(), "layers.*.mlp": Recompute(policy=save_ops(addmm))}):
        rows = recollect.explain(model, leaf(3, 4)).rows
    kept = {row.module for row in rows if row.decision == "kept"}
    assert any(".attn" in module for module in kept)
    assert all(row.region == "" for row in rows)


# --- Hooks ---


@pytest.mark.parametrize(
    ("decisions", "times"),
    [
        # Of a hook before and after the forward of the layer and of `attn`, in forward and backward together.
        ({"layers.*": Recompute()}, {"layer before": 2, "layer after": 1, "attn before": 2, "attn after": 2}),
        (
            {"layers.*": Recompute(), "layers.*.attn": Save()},
            {"layer before": 2, "layer after": 1, "attn before": 1, "attn after": 1},
        ),
        (
            {"layers.*": Recompute(), "layers.*.attn": Recompute(policy=save_ops(addmm))},
            {"layer before": 2, "layer after": 1, "attn before": 2, "attn after": 2},
        ),
        ({"layers.*.attn": Recompute()}, {"layer before": 1, "layer after": 1, "attn before": 2, "attn after": 1}),
        ({"layers.*.attn": Offload()}, {"layer before": 1, "layer after": 1, "attn before": 1, "attn after": 1}),
    ],
)
def test_hooks_are_part_of_what_is_decided(decisions, times):
    def with_hooks():
        model, seen = made(Model, 1), Counter()
        for name, module in (("layer", model.layers[0]), ("attn", model.layers[0].attn)):

            def before(module, args, name=name):
                seen[f"{name} before"] += 1
                return tuple(arg * 2 for arg in args)

            def after(module, args, output, name=name):
                seen[f"{name} after"] += 1
                return output * 3

            def backward(module, grad_input, grad_output, name=name):
                seen[f"{name} backward"] += 1
                return tuple(grad * 5 for grad in grad_input)

            def backward_before(module, grad_output, name=name):
                seen[f"{name} backward before"] += 1
                return tuple(grad * 7 for grad in grad_output)

            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
            module.register_full_backward_hook(backward)
            module.register_full_backward_pre_hook(backward_before)
        return model, seen

    plain, expected = with_hooks()
    model, seen = with_hooks()
    with recollect.apply(model, decisions):
        for step in range(3):
            seen.clear()
            assert_equal(run(model, leaf(3, 4), seed=step), run(plain, leaf(3, 4), seed=step))
    gradient_hooks = {f"{name} {hook}": 1 for name in ("layer", "attn") for hook in ("backward", "backward before")}
    assert seen == times | gradient_hooks
    assert expected == Counter(dict.fromkeys(times | gradient_hooks, 3))


def test_hooks_registered_later_count_too():
    model = made(Model, 1)
    with recollect.apply(model, {"layers.*": Recompute(), "layers.*.attn": Save()}):
        seen = []
        handle = model.layers[0].attn.register_forward_hook(lambda *_: seen.append("attn"))
        run(model, leaf(3, 4))
        assert seen == ["attn"]
        handle.remove()
        run(model, leaf(3, 4))
        assert seen == ["attn"]
