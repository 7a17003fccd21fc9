"""The page about many GPUs: its script, at a small size, counts what is there and no more."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

import recollect

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def scale():
    spec = importlib.util.spec_from_file_location("scale", DOCS / "scale.py")
    module = sys.modules["scale"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scale"]


@pytest.fixture(scope="module")
def toy(scale):
    return scale.SMALL_SHAPES[0]


LOTS = 1e12


def matrices(shape):
    """Rows and other numbers of every parameter."""
    width, kv = shape.width, shape.width // shape.heads * shape.kv_heads
    layer = [(width, 1), (width, 1), (width, width), (kv, width), (kv, width), (width, width)]
    layer += [(shape.hidden, width), (shape.hidden, width), (width, shape.hidden)]
    return layer * shape.layers + [(shape.vocabulary, width), (width, 1), (shape.vocabulary, width)]


@pytest.mark.parametrize("gpus", [8, 48, 1024])
def test_states_are_those_of_the_shards(scale, toy, gpus):
    found = scale.row(toy, scale.Layout(gpus), LOTS)
    assert found.parameters == sum(-(-rows // gpus) * others for rows, others in matrices(toy))
    assert found.states == 16 * found.parameters
    assert not distributed.is_initialized()


def test_a_tensor_parallel_group_shares_every_matrix(scale, toy):
    layout = scale.Layout(64, 8)
    with scale.meshes(layout) as (data, tensor):
        assert (data.size(), tensor.size()) == (8, 8)
        whole, share = scale.Llama(toy, None), scale.Llama(toy, tensor)
    counts = [{name: one.numel() for name, one in model.named_parameters()} for model in (whole, share)]
    for name, count in counts[0].items():
        assert counts[1][name] * (1 if "norm" in name else 8) == count, name


def test_one_layers_parameters_are_there_at_a_time(scale, toy):
    model = scale.as_gathered(toy, None)
    first, *others = [list(layer.parameters()) for layer in model.layers]
    assert len(others) == toy.layers - 1
    assert all(one is two for layer in others for one, two in zip(layer, first, strict=True))
    rest = 2 * toy.vocabulary * toy.width + toy.width
    assert sum(one.numel() for one in model.parameters()) == sum(one.numel() for one in first) + rest
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}


def test_collectives_are_counted_with_those_of_replays(scale, toy):
    layout = scale.Layout(64, 8)
    size = toy.sequences * 8 * toy.tokens * toy.width * 2 * 7 / 8  # received for all sequences once
    free = scale.row(toy, layout, LOTS)
    assert not free.plan.decisions()
    # Four in the forward of a layer and four in its backward; the embedding's two; the loss's, with its replay.
    assert free.sent == size * (8 * toy.layers + 2 + 3)
    tight = scale.row(toy, layout, smallest_of(scale, toy, layout) * 1.01)
    assert tight.plan.decisions()
    assert size * (8 * toy.layers + 5) < tight.sent <= size * (12 * toy.layers + 5)


def smallest_of(scale, shape, layout):
    found = scale.row(shape, layout, 1e6)
    assert found.plan is None
    return found.smallest / scale.USED


@pytest.mark.parametrize("tensor", [1, 8])
def test_a_plan_fits_into_what_is_left(scale, toy, tensor):
    layout = scale.Layout(64, tensor)
    memory = 1.2 * smallest_of(scale, toy, layout)
    found = scale.row(toy, layout, memory)
    budget = int(scale.USED * memory)
    assert found.plan.is_estimated
    assert found.plan.budget == budget
    assert found.peak <= budget
    assert found.plan.plain.peak + found.states + found.buffers > budget
    assert all(not isinstance(one, recollect.Offload) for one in found.plan.decisions().values())
    assert found.compute > found.plan.plain.seconds


def test_collectives_take_what_their_bytes_take(scale, toy):
    base = scale.Row(scale.Layout(8), parameters=10**9, layer=10**8, sent=9e9)
    reached = scale.REACHED
    assert base.tensor_seconds == pytest.approx(9e9 / 450e9 / reached)
    for layout, link in [((8, 1), 450e9), ((64, 1), 400e9), ((1024, 8), 50e9)]:
        one = dataclasses.replace(base, layout=scale.Layout(*layout))
        received = 8e9 * (one.layout.data - 1)
        assert one.data_seconds == pytest.approx(received / link / reached)
    assert dataclasses.replace(base, layout=scale.Layout(8, 8)).data_seconds == 0
    assert base.buffers == 6 * 10**8


def test_the_script_prints_a_page(scale):
    command = [sys.executable, str(DOCS / "scale.py"), "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[:2] for line in rows] == [["| 8", "1"], ["| 64", "8"]]
    assert done.stdout.count("recompute") > 2


def test_the_page_is_of_this_script(scale):
    """Its words and its rows; the numbers take minutes."""
    page = (DOCS / "scale.md").read_text()
    assert page.startswith(scale.INTRODUCTION)
    for shape in scale.SHAPES:
        part = page.split(f"## {shape.name}\n")[1].split("\n## ")[0]
        rows = [line.split(" | ")[:2] for line in part.splitlines() if line.startswith("| ")][2:]
        assert rows == [[f"| {layout.gpus:,}", str(layout.tensor)] for layout in scale.LAYOUTS]
