"""Under torch.compile: regions are the compiler's own, decisions its tags, and it never traces the engine."""

import collections
import functools
import logging
import os
import shutil
import sys

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint as stock
from functorch.compile import aot_function, make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._functorch.partitioners import min_cut_rematerialization_partition

import recollect
from recollect import _compile, dropin
from tools import leaf

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at it
ROOT = os.path.dirname(recollect.__file__)


@pytest.fixture(autouse=True)
def _starts_afresh():
    # What torch says about in-place operators whenever it is given a context_fn.
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    level = logger.level
    logger.setLevel(logging.ERROR)
    torch._dynamo.reset()
    _compile._said.clear()
    yield
    torch._dynamo.reset()
    logger.setLevel(level)


class Graphs:
    """A backend that runs the graphs of forward and backward as they are, and keeps them."""

    def __init__(self):
        self.forward, self.backward = [], []
        compilers = {"fw_compiler": self._into(self.forward), "bw_compiler": self._into(self.backward)}
        self.backend = aot_autograd(partition_fn=min_cut_rematerialization_partition, **compilers)

    def _into(self, graphs):
        def compile_graph(graph, inputs):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return compile_graph

    def compile(self, function, **options):
        return torch.compile(function, backend=self.backend, **{"fullgraph": True, **options})

    @property
    def forward_counts(self):
        return count_nodes(self.forward)

    @property
    def recomputed(self):
        """How often each of OPERATORS occurs in the backward: none of them does for its own sake."""
        counts = count_nodes(self.backward)
        return {name: counts[name] for name in OPERATORS if counts[name]}


OPERATORS = ("tanh", "sigmoid", "_softmax", "gelu", "silu", "topk")


def count_nodes(graphs):
    nodes = (node for graph in graphs for node in graph.graph.nodes if node.op == "call_function")
    return collections.Counter(getattr(node.target, "overloadpacket", node.target).__name__ for node in nodes)


def gradients(function, *args, parameters=()):
    leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    return torch.autograd.grad(function(*args).sum(), [*leaves, *parameters])


def assert_close(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


# Every operator's result is needed by the backward of another, so that the compiler leaves none out.


def attention(x):
    return x.softmax(-1).sigmoid()


def act(x):
    return torch.nn.functional.gelu(x)


def mlp(x):
    return torch.nn.functional.silu(recollect.region("act", act)(x))


def block(x):
    x = x + recollect.region("attn", attention)(x)
    x = recollect.region("mlp", mlp)(x)
    return (x * x.tanh()).exp()


ALL = {"tanh": 1, "sigmoid": 1, "_softmax": 1, "gelu": 1, "silu": 1}


class Layer(torch.nn.Module):
    def __init__(self, policy=None):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.policy = policy
        self.rematted = recollect.remat(self.inner, policy=policy)

    def inner(self, x):
        return self.linear(x).tanh().sigmoid()

    def forward(self, x):
        return self.rematted(x)


# --- Regions ---

WAYS = {
    "checkpoint": lambda x: recollect.checkpoint(block, x),
    "remat": recollect.remat(block),
    "remat in a function": lambda x: recollect.remat(block)(x),
    "remat with options": recollect.remat(block, name="it", early_stop=False, preserve_rng_state="all"),
    "drop-in": lambda x: dropin.checkpoint(block, x, use_reentrant=False),
    "drop-in, torch's default": lambda x: dropin.checkpoint(
        block, x, use_reentrant=False, context_fn=stock.noop_context_fn, debug=False, early_stop=False
    ),
    "drop-in, reentrant": lambda x: dropin.checkpoint(block, x, use_reentrant=True),
    "drop-in, left open": lambda x: dropin.checkpoint(block, x),
    "sequential": lambda x: dropin.checkpoint_sequential([block, torch.sin], 2, x, use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_region_is_compiled_without_a_break_and_recomputed(way):
    x, graphs = leaf(4, 8), Graphs()
    plain = (lambda x: block(x).sin()) if way == "sequential" else block
    assert_close(gradients(graphs.compile(WAYS[way]), x), gradients(plain, x))
    assert len(graphs.forward) == len(graphs.backward) == 1
    assert graphs.recomputed == ALL


def test_the_graphs_are_those_of_torchs_own_regions():
    contexts = functools.partial(stock.create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default])
    for ours, torchs in (
        (lambda x: recollect.checkpoint(block, x), lambda x: stock.checkpoint(block, x, use_reentrant=False)),
        (
            lambda x: recollect.checkpoint(block, x, policy=TANH),
            lambda x: stock.checkpoint(block, x, use_reentrant=False, context_fn=contexts),
        ),
    ):
        x, graphs, expected = leaf(4, 8), Graphs(), Graphs()
        gradients(graphs.compile(lambda x: ours(ours(x))), x)  # noqa: B023
        gradients(expected.compile(lambda x: torchs(torchs(x))), x)  # noqa: B023
        for got, other in ((graphs.forward, expected.forward), (graphs.backward, expected.backward)):
            assert [graph.code for graph in got] == [graph.code for graph in other]


def test_without_a_region_the_compiler_recomputes_less():
    x, graphs = leaf(4, 8), Graphs()
    gradients(graphs.compile(block), x)
    assert graphs.recomputed != ALL


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "policy", [None, recollect.save_ops(torch.ops.aten.tanh), recollect.by_name({"attn": recollect.Save()})]
)
def test_the_backends_of_torch(backend, policy):
    x = leaf(4, 8)
    compiled = torch.compile(lambda x: recollect.checkpoint(block, x, policy=policy), backend=backend, fullgraph=True)
    for _ in range(2):
        assert_close(gradients(compiled, x), gradients(block, x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_inductor():
    x = leaf(4, 8)
    policy = recollect.by_name({"attn": recollect.Save()})
    compiled = torch.compile(lambda x: recollect.checkpoint(block, x, policy=policy), fullgraph=True)
    assert_close(gradients(compiled, x), gradients(block, x))


def test_arguments_of_any_structure():
    def structured(pair, *, mask, scale, early_stop, context_fn=2.0):
        return (pair["x"] * mask[0] * scale).tanh().sigmoid() * early_stop * context_fn

    x, y, graphs = leaf(4, 8), leaf(4, 8, seed=1), Graphs()
    region = recollect.remat(structured)

    def call(x, y):
        return region({"x": x}, mask=[y, None], scale=3, early_stop=x.cos(), context_fn=0.5)

    def plain(x, y):
        return structured({"x": x}, mask=[y, None], scale=3, early_stop=x.cos(), context_fn=0.5)

    assert_close(gradients(graphs.compile(call), x, y), gradients(plain, x, y))
    assert graphs.recomputed == {"tanh": 1, "sigmoid": 1}


def test_results_of_any_structure():
    def several(x):
        return {"a": x.tanh().sigmoid(), "b": (x.exp(), 3)}

    def call(x):
        result = recollect.checkpoint(several, x)
        return result["a"] + result["b"][0] * result["b"][1]

    x, graphs = leaf(4, 8), Graphs()
    assert_close(gradients(graphs.compile(call), x), gradients(lambda x: x.tanh().sigmoid() + x.exp() * 3, x))
    assert graphs.recomputed == {"tanh": 1, "sigmoid": 1}


def test_nested_regions():
    def outer(x):
        return recollect.checkpoint(block, x.sigmoid()).tanh()

    def torchs(x):
        return stock.checkpoint(block, x.sigmoid(), use_reentrant=False).tanh()

    x, graphs, expected = leaf(4, 8), Graphs(), Graphs()
    gradients(expected.compile(lambda x: stock.checkpoint(torchs, x, use_reentrant=False)), x)
    assert_close(gradients(graphs.compile(recollect.remat(outer)), x), gradients(outer, x))
    assert graphs.recomputed == expected.recomputed  # 2.11 saves what goes into the inner one


def test_a_module_that_is_wrapped_and_compiled():
    module, x, graphs = (
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Tanh()),
        leaf(4, 8),
        Graphs(),
    )
    region, parameters = recollect.remat(module), list(module.parameters())
    got = gradients(graphs.compile(region), x, parameters=parameters)
    assert_close(got, gradients(module, x, parameters=parameters))
    assert graphs.recomputed == {"gelu": 1, "tanh": 1}


def test_without_grad_mode():
    x, graphs = leaf(4, 8), Graphs()
    compiled = graphs.compile(WAYS["checkpoint"])
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x))
    assert not graphs.backward
    assert_close(gradients(compiled, x), gradients(block, x))


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_are_always_preserved(preserve):
    def drop(x):
        return torch.nn.functional.dropout(x, 0.5).sigmoid().tanh()

    x = torch.ones(4096, requires_grad=True)
    region = recollect.remat(drop, preserve_rng_state=preserve)
    compiled = torch.compile(region, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    dropped = y == torch.tensor(0.0).sigmoid().tanh()
    assert 1500 < dropped.sum() < 2500
    assert torch.equal(grad == 0, dropped)


def test_statistics_are_updated_once():
    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh())

    x, compiled, plain = leaf(4, 8), make(), make()
    call = torch.compile(recollect.remat(compiled), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        got = gradients(call, x, parameters=list(compiled.parameters()))
        assert_close(got, gradients(plain, x, parameters=list(plain.parameters())))
        assert_close(list(compiled.buffers()), list(plain.buffers()))


def test_in_place_operators_in_a_region_with_a_policy():
    def changing(x):
        y = x.sigmoid().mul(3)
        y.mul_(2)
        return y.tanh()

    x, graphs = leaf(4, 8), Graphs()
    region = recollect.remat(changing, policy=recollect.save_ops(torch.ops.aten.mul))
    assert_close(gradients(graphs.compile(region), x), gradients(changing, x))
    assert graphs.recomputed == {"sigmoid": 1, "tanh": 1}


# --- Recompilation ---


@pytest.mark.parametrize(
    "policy",
    [
        None,
        recollect.save_ops(torch.ops.aten.tanh),
        recollect.by_name({"attn": recollect.Save()}),
        lambda what, ctx: None,
    ],
)
@pytest.mark.parametrize("way", ["checkpoint", "remat", "made in each step"])
def test_no_step_compiles_anew(way, policy):
    region = recollect.remat(block, policy=policy)

    def step(x):
        if way == "checkpoint":
            return recollect.checkpoint(block, x, policy=policy)
        return region(x) if way == "remat" else recollect.remat(block, policy=policy)(x)

    if way == "made in each step" and policy is not None:
        pytest.skip("a policy is made outside of the compiled function")
    graphs = Graphs()
    compiled = graphs.compile(step)
    for seed in range(4):
        x = leaf(4, 8, seed=seed)
        assert_close(gradients(compiled, x), gradients(block, x))
    assert len(graphs.forward) == len(graphs.backward) == 1


@pytest.mark.parametrize("policy", [None, recollect.policies.save_matmuls])
def test_layers_that_are_compiled_one_by_one_share_a_graph(policy):
    layers, graphs, x = [Layer(policy) for _ in range(12)], Graphs(), leaf(4, 8)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]

    def model(x):
        for layer in layers:
            x = layer(x)
        return x

    expected = gradients(model, x, parameters=parameters)
    for layer in layers:
        layer.compile(backend=graphs.backend, fullgraph=True)
    assert_close(gradients(model, x, parameters=parameters), expected)
    assert len(graphs.forward) == len(graphs.backward) == 1


def keep(name):
    return lambda what, ctx: recollect.Save() if what == name else None


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="Dynamo takes functions with the same code for one")
def test_another_policy_of_the_same_code_compiles_anew():
    layer, x = torch.nn.Module(), leaf(4, 8)
    layer.policy = keep("attn")
    layer.forward = lambda x: recollect.checkpoint(block, x, policy=layer.policy)
    graphs = Graphs()
    compiled = graphs.compile(layer)
    gradients(compiled, x)
    assert graphs.recomputed == {"gelu": 1, "silu": 1, "tanh": 1}
    graphs.backward.clear()
    layer.policy = keep("mlp")
    gradients(compiled, x)
    assert graphs.recomputed == {"_softmax": 1, "sigmoid": 1, "tanh": 1}


# --- Decisions ---


def kept(*names):
    return {name: count for name, count in ALL.items() if name not in names}


SAVE, RECOMPUTE = recollect.Save(), recollect.Recompute()
TANH, GELU = recollect.save_ops(torch.ops.aten.tanh), recollect.save_ops(torch.ops.aten.gelu)
POLICIES = {
    "an operator": (TANH, kept("tanh")),
    "two operators": (TANH | recollect.save_ops(torch.ops.aten.gelu.default), kept("tanh", "gelu")),
    "nothing": (recollect.policies.save_nothing, ALL),
    "all but pointwise": (recollect.policies.save_everything_but_pointwise, kept("_softmax")),
    "a name": (recollect.by_name({"attn": SAVE}), kept("_softmax", "sigmoid")),
    "two names": (recollect.by_name({"attn": SAVE, "mlp": SAVE}), {"tanh": 1}),
    "a path": (recollect.by_name({"mlp/act": SAVE}), kept("gelu")),
    "a pattern": (recollect.by_name({"*/act": SAVE}), kept("gelu")),
    "recomputed in what is kept": (recollect.by_name({"mlp": SAVE, "mlp/act": RECOMPUTE}), kept("silu")),
    "kept in what is recomputed": (recollect.by_name({"mlp": RECOMPUTE, "mlp/act": SAVE}), kept("gelu")),
    "a name and an operator": (recollect.by_name({"attn": SAVE}) | TANH, {"gelu": 1, "silu": 1}),
    "an operator in a name that is recomputed": (
        recollect.by_name({"mlp": RECOMPUTE}) | recollect.save_ops(torch.ops.aten.silu),
        kept("silu"),
    ),
    "an operator in a name that is kept": (
        recollect.by_name({"attn": SAVE}) | (lambda what, ctx: RECOMPUTE),
        kept("_softmax", "sigmoid"),
    ),
    "an operator in a name with a policy of its own, which alone decides there": (
        recollect.by_name({"mlp": recollect.Recompute(policy=GELU)}) | recollect.save_ops(torch.ops.aten.silu),
        kept("gelu"),
    ),
    "a name in a name with a policy of its own": (
        recollect.by_name({"mlp": recollect.Recompute(policy=recollect.by_name({"act": SAVE}))}),
        kept("gelu"),
    ),
    "a policy of its own in what is kept": (
        recollect.by_name({"mlp": SAVE, "mlp/act": recollect.Recompute(policy=GELU)}),
        kept("gelu", "silu"),
    ),
    "the first decision": ((lambda what, ctx: RECOMPUTE if what is torch.ops.aten.tanh.default else None) | TANH, ALL),
    "a function": (
        lambda what, ctx: SAVE if what in ("mlp/act", torch.ops.aten.tanh.default) else None,
        kept("gelu", "tanh"),
    ),
    "a function of the path": (lambda what, ctx: SAVE if ctx.path == "mlp" and what != "mlp" else None, kept("silu")),
    "a function of shapes": (
        lambda what, ctx: SAVE if not isinstance(what, str) and ctx.args[0].shape == (4, 8) else None,
        {},
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_decision_is_a_tag(name):
    policy, expected = POLICIES[name]
    x, graphs = leaf(4, 8), Graphs()
    got = gradients(graphs.compile(lambda x: recollect.checkpoint(block, x, policy=policy)), x)
    assert_close(got, gradients(block, x))
    assert graphs.recomputed == expected


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_operators_are_kept_as_in_eager(name, count_operators):
    policy, expected = POLICIES[name]
    x = leaf(4, 8)
    y = recollect.checkpoint(block, x, policy=policy, early_stop=False)
    with count_operators() as operators:
        y.sum().backward()
    assert {one: operators.counts[one] for one in OPERATORS if operators.counts[one]} == expected


def test_a_name_inside_of_itself():
    def inner(x):
        return x.tanh()

    def outer(x):
        return recollect.region("part", inner)(x.sigmoid()).softmax(-1)

    def whole(x):
        return recollect.region("part", outer)(x).exp()

    for decisions, expected in (
        ({"part": SAVE}, {}),
        ({"part/part": SAVE}, {"sigmoid": 1, "_softmax": 1}),
        ({"part/part": RECOMPUTE, "part": SAVE}, {"tanh": 1}),
    ):
        x, graphs = leaf(4, 8), Graphs()
        region = recollect.remat(whole, policy=recollect.by_name(decisions))
        assert_close(gradients(graphs.compile(region), x), gradients(whole, x))
        assert graphs.recomputed == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (recollect.by_name({"attn": SAVE, "outside*": RECOMPUTE}), kept("_softmax", "sigmoid")),
        (recollect.by_name({"outside": SAVE, "mlp": SAVE}), kept("gelu", "silu")),
    ],
)
def test_names_around_a_region_are_not_part_of_its_paths(policy, expected):
    def whole(x):
        return recollect.region("outside", lambda x: recollect.checkpoint(block, x, policy=policy))(x)

    x, graphs = leaf(4, 8), Graphs()
    assert_close(gradients(graphs.compile(whole), x), gradients(block, x))
    assert graphs.recomputed == expected


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (recollect.by_name({"attn": SAVE}), recollect.by_name({"mlp": SAVE}), kept("_softmax", "sigmoid")),
        (None, recollect.by_name({"mlp": SAVE}), ALL),
        (None, TANH, ALL),
        (TANH, recollect.by_name({"*": RECOMPUTE}), kept("tanh")),
    ],
)
def test_a_region_inside_has_the_word(inner, outer, expected):
    def whole(x):
        return recollect.checkpoint(block, x.exp(), policy=inner).sin()

    x, graphs = leaf(4, 8), Graphs()
    region = recollect.remat(whole, policy=outer)
    assert_close(gradients(graphs.compile(region), x), gradients(lambda x: block(x.exp()).sin(), x))
    assert graphs.recomputed == expected


def test_a_function_is_asked_about_the_same_in_the_same_order():
    asked = []

    def policy(what, ctx):
        asked.append((str(what), ctx.path))
        return SAVE if str(what) in ("attn", "aten.gelu.default") else None

    x = leaf(4, 8)
    recollect.checkpoint(block, x, policy=policy)
    expected = [one for one in asked if one[1] != "attn" or one[0] == "attn"]  # nobody needs what is in a kept region
    asked.clear()
    gradients(Graphs().compile(lambda x: recollect.checkpoint(block, x, policy=policy)), x)
    assert asked == expected


def test_a_policy_with_a_state_is_asked_once_about_each_call():
    answers = iter([SAVE, RECOMPUTE] * 100)

    def chain(x):
        for _ in range(6):
            x = x.tanh()
        return x

    x, graphs = leaf(4, 8), Graphs()
    region = recollect.remat(chain, policy=lambda what, ctx: next(answers))
    assert_close(gradients(graphs.compile(region), x), gradients(chain, x))
    assert graphs.recomputed == {"tanh": 3}


def test_torch_gets_members_of_its_own_enum():
    x, tags = leaf(4, 8), collections.Counter()

    def partition(joint, inputs, **options):
        tags.update(node.meta.get("recompute") for node in joint.graph.nodes if node.name in ALL)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=partition)
    policy = recollect.by_name({"attn": SAVE, "mlp": RECOMPUTE})
    gradients(torch.compile(recollect.remat(block, policy=policy), backend=backend, fullgraph=True), x)
    own = stock.CheckpointPolicy
    assert tags == {own.MUST_SAVE: 2, own.MUST_RECOMPUTE: 2, own.PREFER_RECOMPUTE: 1}


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch leaves its modes behind where an operator fails")
@pytest.mark.parametrize(
    ("policy", "match"), [(3, "policy must be a policy"), (lambda what, ctx: "save", "must give recollect.Save")]
)
def test_a_policy_that_cannot_be_one(policy, match):
    x, w = leaf(4, 8), leaf(8, 8)
    compiled = torch.compile(lambda x: recollect.checkpoint(lambda x: x @ w, x, policy=policy), backend="aot_eager")
    with pytest.raises(Exception, match=match):
        compiled(x)


# --- What happens once ---


def test_what_is_pinned_is_saved():
    def route(x):
        weights, chosen = recollect.pin(torch.topk)(x.tanh(), 2, dim=-1)
        return (x.gather(-1, chosen) * weights).sigmoid().exp()

    def plain(x):
        weights, chosen = x.tanh().topk(2, dim=-1)
        return (x.gather(-1, chosen) * weights).sigmoid().exp()

    for policy in (None, TANH, recollect.by_name({"*": RECOMPUTE})):
        torch._dynamo.reset()
        x, graphs = leaf(4, 8), Graphs()
        region = recollect.remat(route, policy=policy)
        assert_close(gradients(graphs.compile(region), x), gradients(plain, x))
        assert graphs.recomputed == ({"sigmoid": 1} if policy is TANH else {"tanh": 1, "sigmoid": 1})


def test_pinned_within_a_named_region_that_is_kept():
    def route(x):
        return recollect.region("router", lambda x: recollect.pin(torch.topk)(x.tanh(), 2)[0])(x).sigmoid().exp()

    x, graphs = leaf(4, 8), Graphs()
    region = recollect.remat(route, policy=recollect.by_name({"router": SAVE}))
    assert_close(gradients(graphs.compile(region), x), gradients(lambda x: x.tanh().topk(2)[0].sigmoid().exp(), x))
    assert graphs.recomputed == {"sigmoid": 1}


def test_what_is_compiled_is_not_recomputing():
    def function(x):
        x = recollect.once(torch.tanh, x)
        return x.sigmoid() if recollect.is_recomputing() else x.exp()

    x, graphs = leaf(4, 8), Graphs()
    assert_close(gradients(graphs.compile(recollect.remat(function)), x), gradients(lambda x: x.tanh().exp(), x))
    assert graphs.recomputed == {"tanh": 1}


def test_a_side_effect_leads_to_the_eager_engine():
    noted = []

    def function(x):
        recollect.once(noted.append, 1)
        return x.tanh().sigmoid()

    x = leaf(4, 8)
    compiled = torch.compile(lambda x: recollect.checkpoint(function, x.sin()).exp(), backend="aot_eager")
    assert_close(gradients(compiled, x), gradients(lambda x: x.sin().tanh().sigmoid().exp(), x))
    assert noted == [1]


# --- What the compiler cannot do ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"determinism_check": "values"}, 'determinism_check="values" has no effect under torch.compile'),
        ({"debug": True}, "debug=True has no effect under torch.compile"),
        ({"policy": recollect.offload_ops(torch.ops.aten.tanh)}, r"Offload\(\) becomes Save\(\) under torch.compile"),
        ({"policy": recollect.by_name({"attn": recollect.Offload()})}, r"Offload\(\) becomes Save\(\)"),
    ],
)
def test_what_the_compiler_cannot_do_is_said_once(options, said):
    x = leaf(4, 8)
    region = recollect.remat(block, **options)
    compiled = torch.compile(region, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=said) as found:
        assert_close(gradients(compiled, x), gradients(block, x))
    assert len(found) == 1
    assert found[0].filename == __file__
    torch._dynamo.reset()
    again = functools.partial(recollect.checkpoint, block, **options)
    gradients(torch.compile(again, backend="aot_eager", fullgraph=True), x)  # warnings are errors here


def test_a_check_of_the_whole_run_is_said_too(monkeypatch):
    from recollect import _checkpoint

    monkeypatch.setattr(_checkpoint._Overrides, "check", "values")
    with pytest.warns(UserWarning, match="values"):
        gradients(Graphs().compile(WAYS["checkpoint"]), leaf(4, 8))


def test_what_is_offloaded_is_saved():
    x, graphs = leaf(4, 8), Graphs()
    policy = recollect.offload_ops(torch.ops.aten.tanh) | recollect.by_name({"attn": recollect.Offload()})
    with pytest.warns(UserWarning, match="Offload"):
        gradients(graphs.compile(recollect.remat(block, policy=policy)), x)
    assert graphs.recomputed == kept("tanh", "_softmax", "sigmoid")


@pytest.mark.parametrize(
    "options", [{}, {"determinism_check": "default"}, {"determinism_check": "none"}, {"early_stop": False}]
)
def test_what_makes_no_difference_is_not_said(options):
    gradients(Graphs().compile(lambda x: recollect.checkpoint(block, x, **options)), leaf(4, 8))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"determinism_check": "all"}, ValueError, "determinism_check must be one of"),
        ({"debug": "yes"}, TypeError, "debug must be True or False"),
        ({"preserve_rng_state": "some"}, TypeError, "preserve_rng_state must be"),
        ({"use_reentrant": True, "scale": 2}, ValueError, "Unexpected keyword arguments: scale"),
        ({"use_reentrant": True, "policy": TANH}, ValueError, "only supported when use_reentrant=False"),
    ],
)
def test_bad_options_are_errors_as_in_eager(options, error, match):
    compiled = torch.compile(lambda x: recollect.checkpoint(block, x, **options), backend="aot_eager")
    with pytest.raises(error, match=match):
        compiled(leaf(4, 8))


# --- Graph breaks ---


class Watched:
    """The block, with a graph break inside, and a note of every run whether it is a replay."""

    def __init__(self):
        self.runs = []

    def __call__(self, x):
        torch._dynamo.graph_break()
        self.runs.append(recollect.is_recomputing())
        return block(x)


BROKEN = {
    "checkpoint": lambda function, x: recollect.checkpoint(function, x),
    "remat": lambda function, x: recollect.remat(function)(x),
    "drop-in": lambda function, x: dropin.checkpoint(function, x, use_reentrant=False),
    "drop-in, reentrant": lambda function, x: dropin.checkpoint(function, x, use_reentrant=True),
    "with a policy": lambda function, x: recollect.checkpoint(function, x, policy=TANH),
    "with names": lambda function, x: recollect.checkpoint(function, x, policy=POLICIES["two names"][0]),
    "nested": lambda function, x: recollect.checkpoint(lambda x: recollect.checkpoint(function, x.sin()), x),
    "in a named region": lambda function, x: recollect.checkpoint(
        lambda x: recollect.region("part", function)(x.sin()), x, policy=recollect.by_name({"part": RECOMPUTE})
    ),
    "all checks": lambda function, x: recollect.checkpoint(function, x, determinism_check="values", debug=True),
}


@pytest.mark.parametrize("way", BROKEN)
def test_a_graph_break_inside_leads_to_the_eager_engine(way):
    watched, x, graphs = Watched(), leaf(4, 8), Graphs()

    def model(x, function):
        return BROKEN[way](function, x.sin() * 2).cos()

    model(x, watched).sum().backward()
    expected, expected_runs = x.grad, list(watched.runs)
    assert True in expected_runs
    compiled = graphs.compile(lambda x: model(x, watched), fullgraph=False)
    for _ in range(3):
        watched.runs.clear()
        x.grad = None
        compiled(x).sum().backward()
        assert_close([x.grad], [expected])
        assert watched.runs == expected_runs
    assert len(graphs.forward) == 2  # what is before it and what is after it


def test_a_graph_break_in_what_is_wrapped_and_compiled_as_a_whole():
    watched, x = Watched(), leaf(4, 8)
    compiled = torch.compile(recollect.remat(watched), backend="aot_eager")
    for _ in range(2):
        assert_close(gradients(compiled, x), gradients(block, x))
    assert watched.runs == [False, True] * 2


def test_a_named_region_with_a_break_outside_of_any_region():
    def part(x):
        torch._dynamo.graph_break()
        return block(x)

    x, graphs = leaf(4, 8), Graphs()
    compiled = graphs.compile(lambda x: recollect.region("part", part)(x.sin()).cos(), fullgraph=False)
    assert_close(gradients(compiled, x), gradients(lambda x: block(x.sin()).cos(), x))
    assert graphs.forward_counts["_softmax"] == 1  # what it calls is compiled for itself


def test_a_policy_that_is_made_in_the_compiled_function_is_not_lost():
    def region(x):
        return recollect.checkpoint(watched, x, policy=recollect.by_name({"attn": SAVE}))

    watched, x = Watched(), leaf(4, 8)
    compiled = torch.compile(region, backend="aot_eager")
    for _ in range(12):  # more than Dynamo compiles anew
        assert_close(gradients(compiled, x), gradients(block, x))
    assert watched.runs == [False, True] * 12


# --- The engine is never traced ---


@pytest.fixture
def traced():
    """The functions of recollect that Dynamo has begun to trace at; `all` has everybody's."""
    found = Found()

    def note(code, new):
        found.all.append(code.co_name)
        if code.co_filename.startswith(ROOT):
            found.append(code.co_name)

    handle = register_bytecode_hook(note)
    yield found
    handle.remove()


class Found(list):
    def __init__(self):
        super().__init__()
        self.all = []


class Chain(torch.nn.Sequential):  # Dynamo does not begin at a class of torch
    def forward(self, x):
        return super().forward(x)


MODULE = Chain(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Tanh())
EAGER = {
    "plain": lambda function, x: recollect.checkpoint(function, x),
    "values": lambda function, x: recollect.checkpoint(function, x, determinism_check="values"),
    "debug": lambda function, x: recollect.checkpoint(function, x, debug=True),
    "drop-in": lambda function, x: dropin.checkpoint(function, x, use_reentrant=False),
    "reentrant": lambda function, x: dropin.checkpoint(function, x, use_reentrant=True),
    "an operator": lambda function, x: recollect.checkpoint(function, x, policy=TANH),
    "a function": lambda function, x: recollect.checkpoint(function, x, policy=lambda what, ctx: SAVE),
    "names": lambda function, x: recollect.checkpoint(
        lambda x: recollect.region("mlp", function)(x).sin(), x, policy=POLICIES["two names"][0]
    ),
    "drop-in policy": lambda function, x: dropin.checkpoint(
        function,
        x,
        use_reentrant=False,
        context_fn=functools.partial(dropin.create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default]),
    ),
    "pinned": lambda function, x: recollect.checkpoint(lambda x: recollect.pin(function)(x).sin().exp(), x),
    "nested": lambda function, x: recollect.checkpoint(lambda x: recollect.checkpoint(function, x.sin()).exp(), x),
}


def grads_of(x):
    found = [x.grad, *(parameter.grad for parameter in MODULE.parameters())]
    x.grad = None
    MODULE.zero_grad()
    return found


@pytest.mark.parametrize("way", EAGER)
def test_a_backward_in_a_compiled_function(way, traced):
    def step(x):
        torch._dynamo.graph_break()
        EAGER[way](disabled, x.sin()).sum().backward()

    disabled = torch._dynamo.disable(MODULE)
    x = leaf(4, 8)
    step(x)
    expected = grads_of(x)
    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(2):
        compiled(x)
        assert_close(grads_of(x), expected)
    assert not traced


@pytest.mark.parametrize("way", ["plain", "reentrant", "a function", "names"])
def test_compiled_autograd_with_an_eager_region(way, traced):
    def step(x):
        EAGER[way](MODULE, x.sin()).sum().backward()

    x = leaf(4, 8)
    step(x)
    expected = grads_of(x)
    recollect.verify_again()
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            step(x)
        assert_close(grads_of(x), expected)
    assert not traced


@pytest.mark.parametrize(
    ("way", "how"),
    [*((way, "module.compile()") for way in EAGER), ("plain", "torch.compile"), ("names", "a layer inside")],
)
def test_a_region_around_what_is_compiled(way, how, traced):
    module, x, graphs = Chain(*MODULE), leaf(4, 8), Graphs()
    EAGER[way](module, x.sin()).sum().backward()
    expected = grads_of(x)
    recollect.verify_again()
    if how == "module.compile()":
        module.compile(backend=graphs.backend, fullgraph=True)
    elif how == "torch.compile":
        module = graphs.compile(module)
    else:
        module = Chain(Chain(*MODULE[:2]), *MODULE[2:])
        module[0].compile(backend=graphs.backend, fullgraph=True)
    for _ in range(3):
        EAGER[way](module, x.sin()).sum().backward()
        assert_close(grads_of(x), expected)
    assert len(graphs.forward) <= 2  # in the reentrant variant, one without grad mode
    assert not traced


def test_a_compiled_function_in_a_region_after_a_graph_break(traced):
    inner, graphs, x = Graphs(), Graphs(), leaf(4, 8)
    compiled_block = inner.compile(block)

    def function(x):
        torch._dynamo.graph_break()
        return compiled_block(x.sin())

    compiled = graphs.compile(lambda x: recollect.checkpoint(function, x.sin()), fullgraph=False)
    for _ in range(2):
        assert_close(gradients(compiled, x), gradients(lambda x: block(x.sin().sin()), x))
    assert len(inner.forward) == 1
    assert not traced


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_compiled_step_of_an_optimizer(optimizer, traced):
    module, graphs, x = torch.nn.Linear(8, 8), Graphs(), leaf(4, 8)
    optimize = optimizer(module.parameters(), lr=torch.tensor(0.1))
    step = graphs.compile(optimize.step, fullgraph=False)
    for _ in range(4):
        recollect.checkpoint(lambda x: module(x).tanh(), x).sum().backward()
        step()
    assert len(traced.all) == 1
    assert not traced


def test_every_file_is_hidden_from_the_compiler_or_looked_into():
    looked_into = {
        *("recollect", "recollect._engine", "recollect._checkpoint", "recollect._compile", "recollect.dropin"),
        *("recollect._engine.named", "recollect.policy", "recollect.policies"),
        *("recollect._engine.pinned", "recollect.explain", "recollect._watcher"),  # hidden, by themselves
        *("recollect._engine.opened", "recollect.composable", "recollect._decided"),  # the same, all or in part
        *("recollect.modules", "recollect._patterns", "recollect._sizes"),  # run before anything is compiled
        *("recollect.offload", "recollect._progress"),  # break the graph, or do nothing in it
        *("recollect._stores", "recollect._stores.statistics"),  # nothing that runs
        *("recollect._patch", "recollect._served", "recollect._names"),
        # Plans are made before anything is compiled.
        *(f"recollect.{name}" for name in ("fit", "plan", "profile", "report", "_bench", "_calls", "_candidates")),
        *(f"recollect.{name}" for name in ("_charts", "_page", "_meters", "_problem", "_solver", "_knapsack", "_ties")),
        *("recollect._milp", "recollect._ranks"),
        *(f"recollect.{name}" for name in ("_alone", "_aside", "_failures", "_options", "_plan_data", "_trial")),
        *("recollect._replays", "recollect._tried", "recollect._travel", "recollect._writes"),
        # Schedules are plain data; a chain breaks the graph, and is hidden by itself.
        *("recollect.schedules", "recollect.sequential"),
        *(name for name in sys.modules if name.startswith(("recollect._schedules", "recollect._chains"))),
        # Say what is to be done before anything is compiled.
        *("recollect._shard",),
    }
    hidden = {module.__name__ for module in _compile.HIDDEN}
    assert not hidden & looked_into
    loaded = {name for name in sys.modules if name.split(".")[0] == "recollect"}
    tools = ("cli", "_cli_tables", "_cli_target", "_cli_terminal", "_check", "_demo", "_doctor", "_run", "__main__")
    apart = {f"recollect.{name}" for name in tools}  # the command line
    integrations = {name for name in loaded if name.startswith("recollect.integrations")}
    assert hidden | looked_into == loaded - apart - integrations


# --- Contexts, and torch.utils.checkpoint replaced ---


def only_tanh(ctx, op, *args, **kwargs):
    enum = dropin.CheckpointPolicy
    return enum.MUST_SAVE if op is torch.ops.aten.tanh.default else enum.PREFER_RECOMPUTE


def bool_tanh(ctx, op, *args, **kwargs):
    return op is torch.ops.aten.tanh.default


def tanh_or_nothing(ctx, op, *args, **kwargs):
    return True if op is torch.ops.aten.tanh.default else None


def offloaded_tanh(ctx, op, *args, **kwargs):
    return dropin.CheckpointPolicy.MUST_CPU_OFFLOAD if op is torch.ops.aten.tanh.default else False


CONTEXTS = {
    "ours": functools.partial(dropin.create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default]),
    "ours with a function": functools.partial(dropin.create_selective_checkpoint_contexts, only_tanh),
    "ours with bools": functools.partial(dropin.create_selective_checkpoint_contexts, bool_tanh),
    "ours with nothing": functools.partial(dropin.create_selective_checkpoint_contexts, tanh_or_nothing),
    "torch's": functools.partial(stock.create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default]),
    "a function": lambda: dropin.create_selective_checkpoint_contexts(only_tanh, allow_cache_entry_mutation=True),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("call", [dropin.checkpoint, recollect.checkpoint])
def test_a_context_fn_with_two_modes(call, name):
    x, graphs = leaf(4, 8), Graphs()
    region = graphs.compile(lambda x: call(block, x, use_reentrant=False, context_fn=CONTEXTS[name]))
    for _ in range(2):
        assert_close(gradients(region, x), gradients(block, x))
    assert graphs.recomputed == kept("tanh")
    assert len(graphs.forward) == 1


def test_a_drop_in_policy_that_offloads():
    x, graphs = leaf(4, 8), Graphs()
    contexts = functools.partial(dropin.create_selective_checkpoint_contexts, offloaded_tanh)
    with pytest.warns(UserWarning, match=r"Offload\(\) becomes Save\(\)"):
        gradients(graphs.compile(lambda x: dropin.checkpoint(block, x, use_reentrant=False, context_fn=contexts)), x)
    assert graphs.recomputed == kept("tanh")


@pytest.mark.parametrize("got", [(1, 2), (None, None), None, (torch.no_grad(), torch.no_grad()), [3]])
def test_a_context_fn_with_anything_else(got):
    def contexts():
        return got

    compiled = Graphs().compile(lambda x: dropin.checkpoint(block, x, use_reentrant=False, context_fn=contexts))
    with pytest.raises(Exception, match="must generate a tuple of two `TorchDispatchMode`s") as caught:
        compiled(leaf(4, 8))
    assert isinstance(caught.value, AssertionError) or "AssertionError" in str(caught.value)


def test_a_policy_and_a_context_fn():
    x, graphs = leaf(4, 8), Graphs()
    policy = recollect.save_ops(torch.ops.aten.gelu) | recollect.by_name({"attn": SAVE})
    region = recollect.remat(block, policy=policy, context_fn=CONTEXTS["ours"])
    assert_close(gradients(graphs.compile(region), x), gradients(block, x))
    assert graphs.recomputed == {"silu": 1}


@pytest.fixture(params=["checkpoint", "every name"])
def replaced(request, monkeypatch):
    """`torch.utils.checkpoint` serves ours."""
    # Not the enum: torch 2.11 puts members of what it finds there on its nodes, and knows its own.
    every = [name for name in dropin.__all__ if name != "CheckpointPolicy"]
    for name in ["checkpoint"] if request.param == "checkpoint" else every:
        monkeypatch.setattr(stock, name, getattr(dropin, name))
    before = dict(vars(stock))
    yield stock
    assert vars(stock) == before


def test_regions_where_torchs_checkpoint_is_ours(replaced):
    for region, expected in (
        (lambda x: replaced.checkpoint(block, x, use_reentrant=False, early_stop=False, debug=False), ALL),
        (lambda x: replaced.checkpoint(block, x, use_reentrant=False, context_fn=CONTEXTS["ours"]), kept("tanh")),
        (lambda x: recollect.checkpoint(block, x), ALL),
        (recollect.remat(block, policy=POLICIES["a name"][0]), kept("_softmax", "sigmoid")),
    ):
        torch._dynamo.reset()
        x, graphs = leaf(4, 8), Graphs()
        compiled = graphs.compile(region)
        for _ in range(2):
            assert_close(gradients(compiled, x), gradients(block, x))
        assert len(graphs.forward) == 1
        assert graphs.recomputed == expected


def test_a_backend_without_autograd_where_torchs_checkpoint_is_ours(replaced):
    x = leaf(4, 8)
    compiled = torch.compile(
        lambda x: replaced.checkpoint(block, x, use_reentrant=False), backend="eager", fullgraph=True
    )
    assert_close(gradients(compiled, x), gradients(block, x))


def test_a_graph_break_where_torchs_checkpoint_is_ours(replaced):
    watched, x, graphs = Watched(), leaf(4, 8), Graphs()
    compiled = graphs.compile(lambda x: replaced.checkpoint(watched, x.sin(), use_reentrant=False), fullgraph=False)
    for _ in range(2):
        assert_close(gradients(compiled, x), gradients(lambda x: block(x.sin()), x))
    assert watched.runs == [False, True] * 2


def test_nested_regions_where_torchs_checkpoint_is_ours(replaced):
    def outer(x):
        return replaced.checkpoint(block, x.sigmoid(), use_reentrant=False).tanh()

    x, graphs = leaf(4, 8), Graphs()
    compiled = graphs.compile(lambda x: replaced.checkpoint(outer, x, use_reentrant=False))
    assert_close(gradients(compiled, x), gradients(outer, x))
    assert {**graphs.recomputed, "sigmoid": 2} == {**ALL, "sigmoid": 2, "tanh": 2}  # see test_nested_regions


# --- The parts of the compiler alone ---


@pytest.mark.parametrize("way", ["plain", "an operator", "drop-in policy", "names"])
def test_autograd_of_the_compiler_without_dynamo(way):
    x = leaf(4, 8)
    compiled = aot_function(lambda x: EAGER[way](block, x), fw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    assert_close(gradients(compiled, x), gradients(lambda x: EAGER[way](block, x), x))


def test_a_region_that_fails_while_the_compiler_traces_leaves_nothing_behind():
    x, w = leaf(4, 8), leaf(8, 8)
    compiled = aot_function(lambda x: recollect.checkpoint(lambda x: x @ w, x), fw_compiler=lambda graph, _: graph)
    with pytest.raises(Exception, match="FakeTensor"):  # of which w is none; the hooks are compared by a fixture
        compiled(x)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    class Model(torch.nn.Module):
        def forward(self, x):
            return recollect.checkpoint(block, x) + recollect.checkpoint(block, x, policy=TANH)

    x = leaf(4, 8)
    exported = torch.export.export(Model(), (x,), strict=strict)
    torch.testing.assert_close(exported.module()(x), 2 * block(x))
