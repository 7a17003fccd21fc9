"""Models decided by `apply` under torch.compile: no graph break, and the backward recomputes what was decided."""

import copy

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounter

import recollect
from recollect import Offload, Recompute, Save, composable, policies
from test_compile import Graphs, _starts_afresh, assert_close  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x):
        return self.q(x).softmax(-1).sigmoid()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x, *, scale=1.0):
        x = x + self.attn(x) * scale
        h = self.mlp(x)
        return (h * h.tanh()).exp()


class Net(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.linspace(-1, 1, 24).reshape(3, 8)


def gradients(call, net, x):
    return torch.autograd.grad(call(x).sum(), list(net.parameters()))


def products(graphs):
    """How often the backward multiplies matrices for the sake of the forward."""
    return sum(node.target is torch.ops.aten.addmm.default for graph in graphs.backward for node in graph.graph.nodes)


MATMULS = Recompute(policy=policies.save_matmuls)


@pytest.mark.parametrize(
    ("decisions", "recomputed", "multiplied"),
    [
        ({"layers.*": Recompute()}, {"tanh": 2, "sigmoid": 2, "_softmax": 2, "gelu": 2}, 6),
        ({"layers.*": Recompute(), "layers.*.attn": Save()}, {"tanh": 2, "gelu": 2}, 4),
        ({"layers.*": Recompute(), "layers.1": Save()}, {"tanh": 1, "sigmoid": 1, "_softmax": 1, "gelu": 1}, 3),
        ({"layers.*": MATMULS}, {"tanh": 2, "sigmoid": 2, "_softmax": 2, "gelu": 2}, 0),
        ({"layers.*": Recompute(), "layers.*.mlp": MATMULS}, {"tanh": 2, "sigmoid": 2, "_softmax": 2, "gelu": 2}, 2),
        ({"layers.*": MATMULS, "layers.*.mlp": Recompute()}, {"tanh": 2, "sigmoid": 2, "_softmax": 2, "gelu": 2}, 4),
        ({"layers.*": MATMULS, "layers.*.mlp": Save()}, {"tanh": 2, "sigmoid": 2, "_softmax": 2}, 0),
        ({"": Recompute(), Attention: Save()}, {"tanh": 2, "gelu": 2}, 4),
        ({Attention: Recompute()}, {"sigmoid": 2, "_softmax": 2}, 2),
        ({"layers.*.attn": Recompute(), "layers.*.mlp.1": Save()}, {"sigmoid": 2, "_softmax": 2}, 2),
    ],
    ids=str,
)
def test_the_backward_recomputes_what_was_decided(net, x, decisions, recomputed, multiplied):
    expected = gradients(net, net, x)
    recollect.apply(net, decisions)
    graphs = Graphs()
    compiled = graphs.compile(net)
    for _ in range(3):
        assert_close(gradients(compiled, net, x), expected)
    found = graphs.recomputed
    cheap = {} if len(graphs.backward) == 1 else None
    assert cheap is not None, "compiled once"
    assert found == recomputed
    # The compiler may leave out a product whose result nobody needs, and never computes one that is kept.
    assert products(graphs) <= multiplied
    if not multiplied:
        assert products(graphs) == 0


def test_removed_means_plain(net, x):
    with recollect.apply(net, {"layers.*": Recompute()}):
        pass
    graphs = Graphs()
    gradients(graphs.compile(net), net, x)
    assert graphs.recomputed == {}


def test_no_recompilation_from_step_to_step_nor_for_a_copy(x):
    net = Net(4)
    recollect.apply(net, {"layers.*": Recompute(), "layers.*.attn": Save()})
    counter = CompileCounter()
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for _ in range(4):
        gradients(compiled, net, x)
    assert counter.frame_count == 1
    twin = copy.deepcopy(net)
    gradients(torch.compile(twin, backend=counter, fullgraph=True), twin, x)
    assert counter.frame_count == 1


def test_decisions_of_two_applies(net, x):
    recollect.apply(net, {"layers.*.attn": Save()})
    recollect.apply(net, {"layers.*": Recompute()})
    graphs = Graphs()
    gradients(graphs.compile(net), net, x)
    assert graphs.recomputed == {"tanh": 2, "gelu": 2}


def test_offload_is_said_once(net, x):
    recollect.apply(net, {"layers.*": Recompute(), "layers.*.attn": Offload()})
    graphs = Graphs()
    with pytest.warns(UserWarning, match=r"Offload\(\) becomes Save\(\) under torch.compile"):
        gradients(graphs.compile(net), net, x)
    assert graphs.recomputed == {"tanh": 2, "gelu": 2}


def test_a_compiled_module_inside_a_decided_one_and_around(net, x):
    """In eager: regions around what is compiled."""
    expected = gradients(net, net, x)
    recollect.apply(net, {"layers.*": Recompute(), "layers.0.attn": Save()})
    net.layers[0].mlp.compile(backend="eager")
    net.layers[1].compile(backend="aot_eager")
    for _ in range(2):
        assert_close(gradients(net, net, x), expected)


def test_a_graph_break_inside_falls_back_to_the_engine(net, x):
    expected = gradients(net, net, x)
    recomputing = []

    @torch.compiler.disable
    def breaks(module, args, output):
        recomputing.append(recollect.is_recomputing())
        return output

    net.layers[0].attn.register_forward_hook(breaks)
    recollect.apply(net, {"layers.*": Recompute()})
    compiled = torch.compile(net, backend="aot_eager")
    for _ in range(2):
        assert_close(gradients(compiled, net, x), expected)
    assert recomputing == [False, True] * 2


# --- composable.checkpoint ---


def test_a_module_checkpointed_in_place_is_a_region_of_the_compiler(net, x):
    expected = gradients(net, net, x)
    for layer in net.layers:
        composable.checkpoint(layer)
    graphs = Graphs()
    compiled = graphs.compile(net)
    for _ in range(3):
        assert_close(gradients(compiled, net, x), expected)
    assert len(graphs.backward) == 1
    assert graphs.recomputed == {"tanh": 2, "sigmoid": 2, "_softmax": 2, "gelu": 2}


def test_its_policy_its_switch_and_its_removal(net, x):
    composable.checkpoint(net.layers[0], policy=policies.save_matmuls)
    composable.checkpoint(net.layers[1])
    composable.checkpoint.state(net.layers[1]).enable_hook = False
    graphs = Graphs()
    gradients(graphs.compile(net), net, x)
    assert graphs.recomputed == {"tanh": 1, "sigmoid": 1, "_softmax": 1, "gelu": 1}
    assert products(graphs) == 0
    for layer in net.layers:
        composable.remove(layer)
        assert type(layer) is Block
    graphs = Graphs()
    gradients(graphs.compile(net), net, x)
    assert graphs.recomputed == {}


def test_a_copy_has_a_switch_of_its_own(net, x):
    composable.checkpoint(net.layers[0])
    twin = copy.deepcopy(net)
    composable.checkpoint.state(net.layers[0]).enable_hook = False
    graphs = Graphs()
    gradients(graphs.compile(twin), twin, x)
    assert graphs.recomputed == {"tanh": 1, "sigmoid": 1, "_softmax": 1, "gelu": 1}


def test_a_module_is_decided_once(net):
    composable.checkpoint(net.layers[0])
    with pytest.raises(ValueError, match=r"decided already, by recollect\.composable\.checkpoint"):
        recollect.apply(net, {"layers.0": Recompute()})
    recollect.apply(net, {"layers.1": Recompute()})
    with pytest.raises(ValueError, match=r"decided already, by 'layers\.1'"):
        composable.checkpoint(net.layers[1])
    assert composable.get_registry(net.layers[1]) is None


def test_a_graph_break_inside_a_module_checkpointed_in_place(net, x):
    expected = gradients(net, net, x)
    recomputing = []

    @torch.compiler.disable
    def breaks(module, args, output):
        recomputing.append(recollect.is_recomputing())
        return output

    net.layers[0].attn.register_forward_hook(breaks)
    composable.checkpoint(net.layers[0])
    compiled = torch.compile(net, backend="aot_eager")
    for _ in range(2):
        assert_close(gradients(compiled, net, x), expected)
    assert recomputing == [False, True] * 2
