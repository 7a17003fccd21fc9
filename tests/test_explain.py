"""What `explain` shows: rows, operators, places, decisions, totals, and that nothing is left behind."""

import dataclasses
import gc
import html
import inspect
import json
import warnings

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import recollect
from recollect import Offload, Recompute, Save, by_name
from recollect.explain import Explanation, Row, explain
from tools import LiveBytes, ambient_state, engine_objects, garbage_collector_off, leaf

aten = torch.ops.aten
KIB = 1024
NOTHING = "Checkpointing this function saves nothing: "


def chain(x):
    return (x.sin().exp() * 2).tanh()


def rows_of(found, decision):
    return [row for row in found.rows if row.decision == decision]


def operators_of(found, decision):
    return [row.operator for row in rows_of(found, decision)]


def line_of(function, text):
    """`file:line in name` of the line of a function that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    place = next(index for index, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{first + place} in {function.__name__}"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))

    def forward(self, x):
        y = self.norm(x)
        y = self.mlp(y)
        return x + y


class Scale(torch.autograd.Function):
    """Saves an input and something of its own."""

    @staticmethod
    def forward(ctx, x, scale):
        wide = torch.cat([x, x])
        ctx.save_for_backward(x, wide)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, wide = ctx.saved_tensors
        return grad * wide[: len(x)] / x, None


def attention(x):
    return x.softmax(-1).exp()


def mlp(x):
    return x.sin().cos()


def two_regions(x):
    x = recollect.region("attn", attention)(x.sin())
    return recollect.region("mlp", mlp)(x).tanh() * 2


# --- Rows ---


def test_a_plain_chain():
    found = explain(chain, leaf(256, 4))
    assert [(row.operator, row.decision) for row in found.rows] == [
        ("aten.sin.default", "input"),
        ("aten.exp.default", "recomputed"),
        ("aten.tanh.default", "recomputed"),
    ]
    assert {(row.bytes, row.shape, row.dtype, row.device) for row in found.rows} == {
        (4 * KIB, (256, 4), "float32", "cpu")
    }
    assert [row.is_output for row in found.rows] == [False, False, True]
    assert found.totals == {"recomputed": 8 * KIB, "kept": 0, "offloaded": 0, "input": 4 * KIB}
    assert found.saves == 4 * KIB  # the output is the caller's


def test_the_public_name():
    assert isinstance(recollect.explain(chain, leaf(3)), Explanation)
    assert "explain" in recollect.__all__


def test_the_largest_come_first_and_equals_in_the_order_of_saving():
    found = explain(lambda x: x.sin().exp().sum(0).exp().sin(), leaf(8, 4))
    assert [row.bytes for row in found.rows] == [128, 128, 16, 16]
    assert [row.operator for row in found.rows] == [f"aten.{name}.default" for name in ("sin", "exp", "exp", "sin")]


def test_a_module_with_parameters():
    block = Block()
    found = explain(block, leaf(8, 16))
    assert operators_of(found, "parameter") == ["aten.addmm.default"] * 2 + ["aten.native_layer_norm.default"] * 2
    assert operators_of(found, "input") == ["aten.native_layer_norm.default"]
    assert sorted(operators_of(found, "recomputed")) == [
        "aten.addmm.default",  # norm's output
        "aten.addmm.default",  # gelu's output
        "aten.gelu.default",
        "aten.native_layer_norm.default",  # mean
        "aten.native_layer_norm.default",  # rstd
    ]
    assert "parameter" not in found.totals
    assert found.totals["recomputed"] == 4 * (8 * 16 + 8 * 64 + 8 * 64 + 8 + 8)


def test_the_module_path_and_the_line():
    found = explain(Block(), leaf(8, 16))
    places = {(row.module, row.line) for row in found.rows}
    in_mlp = line_of(Block.forward, "self.mlp(y)")
    assert places == {
        ("Block.norm", line_of(Block.forward, "self.norm(x)")),
        ("Block.mlp.0", in_mlp),
        ("Block.mlp.1", in_mlp),
        ("Block.mlp.2", in_mlp),
    }


def test_the_line_is_that_of_the_innermost_user_code():
    found = explain(lambda x: chain(x), leaf(3))
    assert {row.line for row in found.rows} == {line_of(chain, "return")}
    assert {row.module for row in found.rows} == {""}


def test_no_line_where_no_user_code_runs_inside():
    found = explain(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), leaf(3, 4))
    assert {(row.module, row.line) for row in found.rows} == {("Sequential.0", ""), ("Sequential.1", "")}


@dataclasses.dataclass
class Batch:
    data: torch.Tensor
    others: list


def test_inputs_at_any_depth_and_views_of_them():
    batch = Batch(leaf(4), [{"mask": leaf(4)}])

    def function(batch, *, scale):
        return (batch.data * scale).sin() * batch.others[0]["mask"].view(2, 2).t().reshape(4)

    found = explain(function, batch, scale=leaf(4))
    assert operators_of(found, "input") == ["aten.mul.Tensor"] * 2  # data and scale; a copy of the mask was made
    assert operators_of(found, "recomputed") == ["aten.sin.default", "aten.mul.Tensor", "aten.mul.Tensor"]
    found = explain(lambda batch: batch.others[0]["mask"].view(2, 2).t().sin(), batch)
    assert operators_of(found, "input") == ["aten.sin.default"]


def test_a_parameter_that_is_passed_is_an_input():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    assert operators_of(explain(lambda x, w: x @ w, leaf(3, 4), weight), "parameter") == []
    assert operators_of(explain(lambda x: x @ weight, leaf(3, 4)), "parameter") == ["aten.mm.default"]


def test_what_was_there_before_is_not_let_go_of():
    frozen, closed_over = torch.nn.Linear(4, 4).requires_grad_(False), torch.ones(4)
    found = explain(lambda x: frozen(x) * closed_over, leaf(3, 4))
    assert [(row.operator, row.decision) for row in found.rows] == [
        ("aten.addmm.default", "parameter"),
        ("aten.mul.Tensor", "outside"),
    ]
    assert set(found.totals.values()) == {0}
    assert found.saves == 0


def test_a_constant_that_the_function_makes_is_recomputed():
    found = explain(lambda x: x * torch.tensor([1.0, 2.0, 3.0]) * torch.ones(3), leaf(3))
    assert operators_of(found, "recomputed") == ["aten.mul.Tensor"] * 2


def test_a_leaf_that_the_function_makes_is_no_parameter():
    found = explain(lambda x: x * torch.ones(3, requires_grad=True), leaf(3))
    assert sorted(row.decision for row in found.rows) == ["input", "recomputed"]


# --- Which operator ---


def test_operators_in_place():
    found = explain(lambda x: x.clone().sin_().mul_(x.exp()), leaf(3))
    operators = sorted(row.operator for row in found.rows)
    assert operators == ["aten.exp.default", "aten.mul_.Tensor", "aten.mul_.Tensor", "aten.sin_.default"]


def test_operators_in_place_on_views():
    def function(x):
        y = x.clone()
        y[0].exp_()
        y[1].sin_()
        return y

    operators = {row.operator: row.line for row in explain(function, leaf(2, 3)).rows}
    assert operators == {
        "aten.exp_.default": line_of(function, "exp_"),
        "aten.sin_.default": line_of(function, "sin_"),
    }


def test_operators_that_make_no_node_are_not_blamed():
    def function(x):
        y = Scale.apply(x, 2.0)
        torch.ones(3) * 2
        return y.exp() + torch.zeros(3)

    found = explain(function, leaf(3))
    assert {row.operator for row in found.rows} == {"Scale.apply", "aten.exp.default"}


def test_a_custom_function():
    found = explain(lambda x: Scale.apply(x.sin(), 2.0) * 3, leaf(8))
    assert [(row.operator, row.bytes, row.decision) for row in found.rows] == [
        ("Scale.apply", 64, "recomputed"),
        ("aten.sin.default", 32, "input"),
        ("Scale.apply", 32, "recomputed"),
    ]


def test_an_operator_written_in_python():
    @torch.library.custom_op("recollect_tests::explained", mutates_args=())
    def explained(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    explained.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def function(x):
        y = explained(x * 2)
        return y + torch.ones(8)

    assert operators_of(explain(function, leaf(8)), "recomputed") == ["recollect_tests.explained.default"]


def test_a_custom_function_whose_result_is_dropped():
    def function(x):
        Scale.apply(x.sin(), 2.0)
        return x + 1

    leaves_a_frame = hasattr(torch.autograd.Function.apply, "__func__")  # else only the graph tells, which is gone
    assert operators_of(explain(function, leaf(8)), "recomputed") == ["Scale.apply" if leaves_a_frame else "?"] * 2


def test_outputs_and_inputs_of_one_operator():
    found = explain(lambda x: torch.nn.functional.layer_norm(x.sin(), (4,)), leaf(3, 4))
    assert [row.shape for row in found.rows if row.operator == "aten.native_layer_norm.default"] == [
        (3, 4),
        (3, 1),
        (3, 1),
    ]


# --- Named regions and policies ---


def test_paths_of_named_regions_are_shown_without_a_policy():
    def function(x):
        return recollect.region("outer", lambda x: recollect.region("inner", mlp)(x.exp()))(x.sin())

    found = explain(function, leaf(3))
    assert [(row.operator, row.region) for row in found.rows] == [
        ("aten.sin.default", ""),
        ("aten.exp.default", "outer"),
        ("aten.sin.default", "outer/inner"),
        ("aten.cos.default", "outer/inner"),
    ]


@pytest.mark.parametrize("around", [Save(), Recompute()], ids=["kept", "recomputed"])
def test_paths_are_whole_inside_of_a_region_with_a_policy_of_its_own(around):
    def block(x):
        act = recollect.region("act", lambda x: recollect.region("inner", torch.tanh)(x.exp()))
        return recollect.region("mlp", lambda x: act(x).cos())(x.sin()).sin()

    for policy in (by_name({"inner": Save()}), recollect.save_ops(torch.ops.aten.tanh)):
        found = explain(block, leaf(8), policy=by_name({"mlp": around, "mlp/act": Recompute(policy=policy)}))
        regions = {row.operator: row.region for row in found.rows if row.decision == "recomputed"}
        assert regions["aten.exp.default"] == "mlp/act"
        assert "mlp/act/inner" in {row.region for row in found.rows}


def test_a_named_region_that_is_kept():
    found = explain(two_regions, leaf(8), policy=by_name({"attn": Save(), "mlp": Recompute()}))
    assert [(row.operator, row.region, row.decision) for row in found.rows] == [
        ("aten.sin.default", "", "input"),
        ("aten._softmax.default", "attn", "kept"),
        ("aten.exp.default", "attn", "kept"),  # as saved by autograd inside
        ("aten.exp.default", "attn", "kept"),  # as the region's output
        ("aten.sin.default", "mlp", "kept"),  # which the next region saves too
        ("aten.cos.default", "mlp", "recomputed"),
        ("aten.tanh.default", "", "recomputed"),
    ]
    assert found.totals == {"recomputed": 64, "kept": 64, "offloaded": 0, "input": 32}


def test_operators_inside_of_a_kept_region():
    def inside(x):
        y, z = x.exp() * 2, x.exp() * 3
        return torch.atan2(y, z)

    def function(x):
        return recollect.region("inside", inside)(x.sin()) * 2

    found = explain(function, leaf(8), policy=by_name({"inside": Save()}))
    assert sorted(operators_of(found, "kept")) == [
        *["aten.atan2.default"] * 3,  # its inputs, and the region's output
        *["aten.exp.default"] * 2,
    ]


def test_the_argument_of_a_kept_region_is_not_kept_with_it():
    def function(x):
        return recollect.region("mlp", mlp)(x.exp() * 2).tanh() * 2

    found = explain(function, leaf(8), policy=by_name({"mlp": Save()}))
    assert [row.decision for row in found.rows if row.region == "mlp" and row.operator == "aten.sin.default"] == [
        "recomputed"
    ]


def test_a_named_region_that_is_offloaded():
    found = explain(two_regions, leaf(8), policy=by_name({"attn": Offload()}))
    assert {row.region for row in rows_of(found, "offloaded")} == {"attn", "mlp"}
    assert found.totals["offloaded"] == 64
    assert found.saves == 64  # on the CPU, offloading frees nothing


def test_recompute_inside_of_a_kept_region():
    def function(x):
        return recollect.region("a", lambda x: recollect.region("b", chain)(x.sin().exp() * 2))(x.sin()) * 2

    found = explain(function, leaf(8), policy=by_name({"a": Save(), "a/b": Recompute()}))
    decisions = {(row.operator, row.region): row.decision for row in found.rows}
    assert decisions["aten.exp.default", "a"] == "kept"
    assert decisions["aten.exp.default", "a/b"] == "recomputed"


def test_kept_operators():
    weight = torch.nn.Parameter(torch.ones(4, 4))

    def function(x):
        return (x.sin() @ weight).sin().exp() * 2

    found = explain(function, leaf(8, 4), policy=recollect.save_ops(aten.mm))
    assert [(row.operator, row.decision) for row in found.rows] == [
        ("aten.sin.default", "input"),
        ("aten.mm.default", "recomputed"),
        ("aten.mm.default", "kept"),  # its output
        ("aten.sin.default", "kept"),  # the same memory, as saved by the next operator
        ("aten.exp.default", "recomputed"),
        ("aten.mm.default", "parameter"),
    ]
    kept = rows_of(found, "kept")
    assert kept[0].storage == kept[1].storage
    assert {row.line for row in kept} == {line_of(function, "return")}
    assert found.totals == {"recomputed": 256, "kept": 128, "offloaded": 0, "input": 128}


def test_offloaded_operators():
    found = explain(chain, leaf(8), policy=recollect.offload_ops(aten.exp))
    assert operators_of(found, "offloaded") == ["aten.exp.default"] * 2
    assert found.totals["offloaded"] == 32


def test_a_kept_operator_inside_of_a_custom_function():
    found = explain(lambda x: Scale.apply(x.sin(), 2.0), leaf(8), policy=recollect.save_ops(aten.cat))
    assert sorted(operators_of(found, "kept")) == ["Scale.apply", "aten.cat.default"]


def test_a_policy_that_is_a_function():
    asked = []

    def policy(what, ctx):
        asked.append(str(what))
        return Save() if what == "attn" else None

    found = explain(two_regions, leaf(8), policy=policy)
    assert found.totals["kept"] == 64
    assert {"attn", "mlp", "aten.tanh.default"} <= set(asked)


def test_a_policy_that_keeps_nothing_is_told_of_in_the_notes():
    policy = by_name({"atn": Save()})
    found = explain(two_regions, leaf(8), policy=policy)
    assert f"The policy {policy!r} kept nothing here." in found.notes
    assert len(explain(two_regions, leaf(8), policy=by_name({"attn": Save()})).notes) == 1


# --- Regions inside ---


def test_a_checkpoint_inside():
    found = explain(lambda x: recollect.checkpoint(chain, x.sin()).exp(), leaf(8))
    assert sorted((row.operator, row.decision) for row in found.rows) == [
        ("aten.exp.default", "recomputed"),
        ("aten.exp.default", "recomputed"),  # the output
        ("aten.sin.default", "input"),
        ("aten.sin.default", "recomputed"),
        ("aten.tanh.default", "recomputed"),
        ("recollect.checkpoint", "recomputed"),  # its input, the same memory as what its first operator saves
    ]
    assert found.totals["recomputed"] == 4 * 32


def test_the_input_of_an_inner_region_is_nothing_that_autograd_saves():
    def inner(x):
        return (x + 1).sin()

    found = explain(lambda x: recollect.checkpoint(inner, x.exp() * 2), leaf(8))
    assert found.totals["recomputed"] == 3 * 32
    assert found.saves == explain(lambda x: inner(x.exp() * 2), leaf(8)).saves == 2 * 32


def test_a_region_around_decides_about_what_an_inner_one_keeps():
    inner = recollect.save_ops(aten.exp)
    found = explain(lambda x: recollect.checkpoint(chain, x, policy=inner), leaf(8))
    assert found.totals["kept"] == 0
    assert operators_of(found, "recomputed").count("aten.exp.default") == 2


def test_what_a_region_around_keeps_of_a_kept_region_inside_is_nothing_that_autograd_saves():
    def function(x):
        part = recollect.region("part", lambda x: (x * 2).exp())
        return recollect.checkpoint(part, x, policy=by_name({"part": Save()})) + 1

    found = explain(function, leaf(8), policy=recollect.save_ops(aten.mul))
    assert (found.totals["kept"], found.saves) == (32, 0)


def test_a_reentrant_checkpoint_inside():
    found = explain(lambda x: recollect.checkpoint(chain, x.sin(), use_reentrant=True), leaf(8))
    assert operators_of(found, "recomputed") == ["CheckpointFunction.apply"]


# --- Totals ---


def test_a_storage_is_counted_once_and_a_row_is_there_per_operator():
    def function(x):
        y = x.exp() * 2
        return y.sin() + y.cos() + y.view(2, 4).erf().view(8)

    found = explain(function, leaf(8))
    saved = {row.operator: row.storage for row in rows_of(found, "recomputed")}
    assert set(saved) == {f"aten.{name}.default" for name in ("exp", "sin", "cos", "erf")}
    assert len(set(saved.values())) == 2
    assert found.totals["recomputed"] == 2 * 32  # what exp gives, and y


def test_an_operator_that_saves_a_tensor_twice_has_one_row():
    found = explain(lambda x: (x.sin() * 2) ** 2 * x, leaf(8))
    assert len(explain(lambda x: x * x, leaf(8)).rows) == 1
    assert len(found.rows) == 4


def test_views_that_one_operator_saves_have_a_row_each():
    def function(x):
        q, k, v = (x * 2).chunk(3, dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v) * 2

    found = explain(function, leaf(1, 2, 4, 12))
    parts = [row for row in found.rows if row.storage == found.rows[0].storage]
    assert [row.bytes for row in parts] == [4 * 2 * 4 * 4] * 3
    assert found.totals["recomputed"] >= 4 * 2 * 4 * 12


def test_memory_that_is_used_again_counts_again():
    """A region lets tensors go at once: a later one gets the same address."""
    found = explain(lambda x: x.exp().exp().exp().exp() * 2, leaf(64))
    assert found.totals["recomputed"] == 4 * 256


def test_an_expanded_tensor_has_no_more_bytes_than_its_memory():
    found = explain(lambda x: x.exp().expand(100, 8) * leaf(8), leaf(8))
    assert max(row.bytes for row in found.rows) == 32
    assert (100, 8) in {row.shape for row in found.rows}


@pytest.mark.parametrize(
    "policy",
    [
        None,
        by_name({"attn": Save()}),
        by_name({"*": Save()}),
        recollect.save_ops(aten.exp),
        recollect.save_ops(aten.mul),
        recollect.save_ops(aten._softmax) | by_name({"mlp": Offload()}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("function", [chain, two_regions, Block()], ids=["chain", "regions", "module"])
@pytest.mark.filterwarnings("ignore:the policy")
def test_what_it_says_is_saved_is_what_memory_shows(function, policy):
    def alive(run):
        with LiveBytes() as memory:
            result = run(leaf(16, 16) * 1)
            now = memory.now
        del result
        return now

    plain = alive(function)
    ours = alive(lambda x: recollect.checkpoint(function, x, policy=policy))
    assert explain(function, leaf(16, 16) * 1, policy=policy).saves == max(plain - ours, 0)


# --- When it saves nothing ---


def the_note(*args, **kwargs):
    found = explain(*args, **kwargs)
    assert found.saves == 0
    return found.notes[0]


def test_it_says_what_is_saved():
    assert explain(chain, leaf(256, 4)).notes == ("Checkpointing this function saves 4.0 KiB.",)


def test_nothing_because_nothing_needs_grad():
    note = the_note(chain, leaf(3).detach())
    assert note == NOTHING + "autograd saves nothing in it, because nothing in it needs grad."


def test_nothing_because_the_operators_need_no_tensor():
    note = the_note(lambda x: x + 1, leaf(3))
    assert note == NOTHING + "autograd saves nothing in it, because the backward of its operators needs no tensor."


def test_nothing_because_all_is_an_input_a_parameter_or_the_output():
    linear = torch.nn.Linear(4, 4)
    alive = "and stays alive anyway."
    assert the_note(torch.sin, leaf(3)) == f"{NOTHING}everything that autograd saves in it is an input, {alive}"
    assert (
        the_note(lambda x: linear(x).exp(), leaf(3, 4)) == f"{NOTHING}everything that autograd saves in it is "
        f"a parameter, an input or the function's own output, {alive}"
    )


def test_nothing_because_the_policy_keeps_it():
    found = explain(lambda x: x.exp() * 2, leaf(3), policy=recollect.save_ops(aten.exp))
    assert found.notes == (
        f"{NOTHING}everything that autograd saves in it is kept by the policy, and stays alive anyway.",
    )


def test_nothing_because_a_replay_needs_as_much():
    assert the_note(lambda x: (x + 1).sin(), leaf(256, 4) * 2) == (
        f"{NOTHING}4.0 KiB that autograd saves is let go of, but 4.0 KiB is held that autograd would not save "
        "(computed inputs, which a replay needs, and what the policy keeps)."
    )
    assert explain(lambda x: (x + 1).sin(), leaf(256, 4)).saves == 4 * KIB  # a leaf is there anyway


# --- As text, data and HTML ---


def test_as_text():
    def function(x):
        return recollect.region("mlp", mlp)(x.exp()) * 2

    found = explain(function, leaf(256, 8))
    title, headings, *rows, totals, note = str(found).splitlines()
    assert title == f"What autograd saves in {found.function}"
    assert "test_as_text.<locals>.function" in title
    assert headings.split() == ["bytes", "shape", "dtype", "decision", "operator", "region", "module", "line"]
    assert [row.split()[:2] for row in rows] == [["8.0", "KiB"]] * 3
    for name, column in (
        ("shape", ["[256, 8]"] * 3),
        ("dtype", ["float32"] * 3),
        ("decision", ["recomputed"] * 3),
        ("operator", ["aten.exp.default", "aten.sin.default", "aten.cos.default"]),
        ("region", ["-", "mlp", "mlp"]),
        ("module", ["-", "-", "-"]),
    ):
        start = headings.index(name)
        assert [row[start:].split("  ")[0] for row in rows] == column
    assert rows[0].endswith(f"{found.rows[0].line.rpartition('/')[2]}")
    assert totals == (
        "Totals, each storage once and without parameters: recomputed 16.0 KiB, kept 0 B, offloaded 0 B, input 0 B"
    )
    assert note == "Checkpointing this function saves 16.0 KiB."
    assert not any(line.endswith(" ") for line in (headings, *rows))


def test_the_output_is_marked_in_the_text():
    assert "recomputed (output)" in str(explain(chain, leaf(3)))


def test_the_text_of_nothing():
    assert len(str(explain(lambda x: x + 1, leaf(3))).splitlines()) == 3


@pytest.mark.parametrize(
    ("size", "words"),
    [((1,), "4 B"), ((255,), "1020 B"), ((256,), "1.0 KiB"), ((384,), "1.5 KiB"), ((512, 512), "1.0 MiB")],
)
def test_bytes_for_people(size, words):
    assert str(explain(torch.sin, leaf(*size))).splitlines()[2].lstrip().startswith(f"{words}  ")


def test_huge_bytes_for_people():
    x = torch.empty(1 << 38, device="meta", requires_grad=True)
    assert "1.0 TiB" in str(explain(torch.sin, x))
    x = torch.empty((1 << 28) - 1, device="meta", requires_grad=True)
    assert "1.0 GiB" in str(explain(torch.sin, x))


def test_as_data():
    found = explain(two_regions, leaf(8), policy=by_name({"attn": Save()}))
    data = found.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert set(data) == {"function", "rows", "totals", "saves", "notes"}
    assert set(data["rows"][0]) == {field.name for field in dataclasses.fields(Row)}
    assert tuple(Row(**{**row, "shape": tuple(row["shape"])}) for row in data["rows"]) == found.rows
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rows[0].bytes = 0
    assert "\n" not in repr(found)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_as_data(layout):
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout, requires_grad=True)
    found = explain(lambda x: (x * x).relu().relu(), x)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert rows_of(found, "recomputed")
    assert str(found)


def test_html_is_escaped():
    function = lambda x: recollect.region("<b>&", torch.exp)(x.sin()) * 2  # noqa: E731
    text = explain(function, leaf(3), policy=by_name({"<b>&": Save()}))._repr_html_()
    assert "<td>&lt;b&gt;&amp;</td>" in text
    assert "in &lt;lambda&gt;</td>" in text
    assert "<b>" not in text
    assert "<lambda>" not in text
    assert text.count("<tr>") == 4
    assert html.unescape(text) != text


# --- No trace ---


def test_the_random_state_is_as_before():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    explain(lambda x: torch.nn.functional.dropout(x.sin(), 0.5), leaf(100))
    assert torch.equal(torch.rand(3), expected)


def test_gradients_are_untouched():
    block, x = Block(), leaf(8, 16)
    block.mlp[0].weight.grad = torch.ones(64, 16)
    explain(block, x, policy=recollect.save_ops(aten.addmm))
    assert x.grad is None
    assert torch.equal(block.mlp[0].weight.grad, torch.ones(64, 16))
    assert [name for name, value in block.named_parameters() if value.grad is not None] == ["mlp.0.weight"]


def test_nothing_stays_alive():
    storages = []

    def function(x):
        y = x.sin().exp()
        z = recollect.region("attn", attention)(y)
        storages.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (y, z))
        return z.sin()

    with garbage_collector_off():
        before = len(engine_objects())
        found = explain(function, leaf(8), policy=recollect.save_ops(aten.sin) | by_name({"attn": Save()}))
        assert all(storage.expired() for storage in storages)
        assert len(engine_objects()) == before
    assert found.totals["kept"]
    assert not any(isinstance(value, torch.Tensor) for value in gc.get_referents(found, *found.rows))


def test_casts_of_weights_do_not_stay_in_autocasts_cache():
    linear, x = torch.nn.Linear(4, 4), leaf(3, 4)
    with torch.autocast("cpu", torch.bfloat16), LiveBytes() as memory:
        explain(lambda x: linear(x).sin().exp(), x)
        assert memory.now == 0


def test_the_policys_one_warning_is_still_to_come():
    policy = by_name({"atn": Save()})
    explain(two_regions, leaf(8), policy=policy)
    assert not policy.settled
    with pytest.warns(UserWarning, match="matched nothing"):
        recollect.checkpoint(two_regions, leaf(8), policy=policy)
    explain(two_regions, leaf(8), policy=policy)
    assert policy.settled


def test_a_function_that_raises_leaves_no_trace():
    policy = recollect.save_ops(aten.exp)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)

    def function(x):
        torch.nn.functional.dropout(x.exp(), 0.5)
        raise ZeroDivisionError

    before = ambient_state()
    with pytest.raises(ZeroDivisionError):
        explain(function, leaf(8), policy=policy)
    assert ambient_state() == before
    assert torch.equal(torch.rand(3), expected)
    assert not policy.settled
    assert explain(chain, leaf(8), policy=policy).totals["kept"] == 32


def test_it_runs_the_function_once_and_with_grad():
    modes = []

    def function(x):
        modes.append(torch.is_grad_enabled())
        return chain(x)

    with torch.no_grad():
        assert len(explain(function, leaf(3)).rows) == 3
    assert modes == [True]


def test_inside_of_a_region():
    shown = []

    def function(x):
        shown.append(explain(two_regions, x, policy=by_name({"attn": Save()})).totals)
        return chain(x)

    x = leaf(8)
    recollect.checkpoint(function, x, policy=by_name({"*": Save()}) | recollect.save_ops(aten.exp)).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])
    assert shown[0] == shown[-1]


# --- What is asked ---


def test_every_other_keyword_goes_to_the_function():
    def function(x, debug, name, function):
        return x.sin() * debug * name * function

    assert explain(function, leaf(3), debug=2, name=3, function=4).rows


def test_bad_input_is_refused_as_by_checkpoint():
    for bad in ({"function": 3}, {"function": chain, "policy": "mm"}, {"function": chain, "policy": Save}):
        messages = []
        for run in (explain, recollect.checkpoint):
            with pytest.raises(TypeError) as info:
                run(bad["function"], leaf(3), policy=bad.get("policy"))
            messages.append(str(info.value))
        assert messages[0] == messages[1]


def test_functions_that_run_later_are_refused():
    def function(x):
        yield x.sin()

    with pytest.raises(TypeError, match="generator"):
        explain(function, leaf(3))


def test_no_warning_of_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain(two_regions, leaf(3), policy=recollect.save_ops(aten.mm))


# --- On an accelerator ---


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    """Offloading frees memory there, copies to the host save nothing, and the device's generator is put back."""
    x, weight = leaf(256, 256).detach().cuda().requires_grad_(), torch.nn.Parameter(torch.ones(256, 256).cuda())

    def inside(x):
        y, z = x.exp() * 2, x.exp() @ weight
        return torch.nn.functional.dropout(torch.atan2(y, z), 0.5)

    def function(x):
        return recollect.region("inside", inside)(x.sin()).sin().sin()

    torch.cuda.manual_seed(3)
    expected = torch.rand(3, device="cuda")
    for policy in (None, by_name({"inside": Save()}), by_name({"inside": Offload()}), recollect.offload_ops(aten.exp)):
        torch.cuda.manual_seed(3)
        found = explain(function, x, policy=policy)
        assert torch.equal(torch.rand(3, device="cuda"), expected)
        assert {row.device for row in found.rows} == {"cuda:0"}
        assert {row.operator for row in found.rows} <= {
            f"aten.{name}"
            for name in (
                "sin.default",
                "exp.default",
                "mm.default",
                "atan2.default",
                "native_dropout.default",
                "mul.Tensor",
            )
        }
        alive = []
        options = {"policy": policy, "determinism_check": "default"}  # digests take some bytes too
        for run in (function, lambda x, options=options: recollect.checkpoint(function, x, **options)):
            before = torch.cuda.memory_allocated()
            result = run(x)
            alive.append(torch.cuda.memory_allocated() - before)
            del result
        assert found.saves == alive[0] - alive[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_current_gpus_generator_is_put_back_where_no_argument_is_there():
    torch.cuda.manual_seed(3)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(3)
    explain(lambda x: x.cuda() * torch.rand(8, device="cuda"), leaf(8))
    assert torch.equal(torch.rand(3, device="cuda"), expected)


@pytest.mark.parametrize("make", [lambda module: module, lambda module: module.forward], ids=["module", "method"])
def test_what_remat_made_is_explained_as_its_region(make):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    policy = recollect.save_ops(torch.ops.aten.addmm)
    direct = recollect.explain(make(module), x, policy=policy)
    assert recollect.explain(recollect.remat(make(module), policy=policy), x).totals == direct.totals
    assert direct.totals["kept"]
    assert not recollect.explain(
        recollect.remat(make(module), policy=policy), x, policy=recollect.policies.save_nothing
    ).totals["kept"]


def test_a_decorated_function_is_explained_as_its_region():
    @recollect.remat(policy=recollect.save_ops(torch.ops.aten.exp))
    def function(x):
        return x.exp().sin().exp()

    assert recollect.explain(function, torch.ones(3, requires_grad=True)).totals["kept"]
