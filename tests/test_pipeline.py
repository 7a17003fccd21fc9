"""Regions in the stages of pipelines, under every schedule: the same gradients, and replays counted."""

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

import recollect
from meshes import equal, run_on_ranks
from recollect.dropin import GraphExecGroup
from recollect.integrations.pipelining import share_replays

RANKS = 2
LAYERS, MICROBATCHES, WIDTH = 8, 4, 8
# Each with the stages that a rank has, of how many there are.
SCHEDULES = {
    "ScheduleGPipe": (lambda rank: [rank], 2),
    "Schedule1F1B": (lambda rank: [rank], 2),
    "ScheduleInterleaved1F1B": (lambda rank: [rank, rank + 2], 4),
    "ScheduleInterleavedZeroBubble": (lambda rank: [rank, rank + 2], 4),
    "ScheduleZBVZeroBubble": (lambda rank: [rank, 3 - rank], 4),
}
SPLIT = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]


class Block(nn.Module):
    """Nodes of all kinds for a split backward: a norm and products with weights, a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.twice = nn.Linear(WIDTH, WIDTH) if self.is_tied else nn.Identity()
        self.runs = 0

    is_tied = False

    def forward(self, x):
        self.runs += 1
        x = x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))
        return self.twice(self.twice(x).sin())


class Tied(Block):
    is_tied = True


class QuietStage(pipelining.PipelineStage):
    """Torch 2.11 begins with a word to every neighbour, also of a rank to itself if it has both: gloo refuses that."""

    def _get_init_p2p_neighbors_ops(self):
        return [one for one in super()._get_init_p2p_neighbors_ops() if one.peer != self.group_rank]


def step(rank, name, kind, decision, *, share):
    """Gradients of this rank's stages in the second step, and how often each block ran in it."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(kind() for _ in range(LAYERS)))
    stages_of, count = SCHEDULES[name]
    numbers, size = stages_of(rank), LAYERS // count
    parts = [layers[number * size : (number + 1) * size] for number in numbers]
    if decision is not None:
        for part in parts:
            recollect.apply(part, {"*": decision})
    stages = [QuietStage(part, number, count, torch.device("cpu")) for part, number in zip(parts, numbers, strict=True)]
    handle = share_replays(stages) if share else None
    batch, target = (torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    kind = getattr(pipelining, name)
    schedule = kind(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    blocks = [block for part in parts for block in part]
    for _ in range(2):
        for part in parts:
            part.zero_grad()
        for block in blocks:
            block.runs = 0
        torch.manual_seed(3)
        keywords = {"target": target, "losses": []} if count - 1 in numbers else {}
        schedule.step(*([batch] if 0 in numbers else []), **keywords)
    if handle is not None:
        handle.remove()
    return [one.grad for part in parts for one in part.parameters()], {block.runs for block in blocks}


def schedules(rank):
    given = {}
    for name in SCHEDULES:
        expected, runs = step(rank, name, Block, None, share=False)
        given[name, "plain"] = {"equal": True, "runs": runs}
        for way, share in (("recompute", False), ("shared", True)):
            if name in SPLIT or not share:
                grads, runs = step(rank, name, Block, recollect.Recompute(), share=share)
                given[name, way] = {"equal": equal(grads, expected), "runs": runs}
    return given


def under_policies(rank):
    """A split backward of regions whose operators are kept in part."""
    name = "ScheduleZBVZeroBubble"
    expected, _ = step(rank, name, Block, None, share=False)
    given = {}
    for way, decision in {
        "products": recollect.Recompute(policy=recollect.policies.save_matmuls),
        "norms": recollect.Recompute(policy=recollect.save_ops(torch.ops.aten.native_layer_norm)),
    }.items():
        grads, runs = step(rank, name, Block, decision, share=True)
        given[way] = {"equal": equal(grads, expected), "runs": runs}
    return given


def a_weight_that_is_used_twice(rank):
    name = "ScheduleZBVZeroBubble"
    expected, _ = step(rank, name, Tied, None, share=False)
    grads, runs = step(rank, name, Tied, recollect.Recompute(), share=True)
    return {"equal": equal(grads, expected), "runs": runs}


SCENARIOS = [schedules, under_policies, a_weight_that_is_used_twice]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_on_ranks(__name__, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_microbatch_is_replayed_once(results, name):
    for of_rank in results["schedules"]:
        plain, found = of_rank[name, "plain"], of_rank[name, "shared" if name in SPLIT else "recompute"]
        assert plain["runs"] == {MICROBATCHES}
        assert found == {"equal": True, "runs": {2 * MICROBATCHES}}


@pytest.mark.parametrize("name", SPLIT)
def test_without_a_group_every_call_of_a_split_backward_replays(results, name):
    """One for the inputs, one for each of three groups of weights; the first stage has no inputs to split off."""
    first, second = (of_rank[name, "recompute"] for of_rank in results["schedules"])
    assert first == {"equal": True, "runs": {2 * MICROBATCHES, 5 * MICROBATCHES}}
    assert second == {"equal": True, "runs": {5 * MICROBATCHES}}


@pytest.mark.parametrize("way", ["products", "norms"])
def test_a_split_backward_under_a_policy(results, way):
    for of_rank in results["under_policies"]:
        assert of_rank[way] == {"equal": True, "runs": {2 * MICROBATCHES}}


def test_a_weight_that_is_used_twice_takes_one_replay_more(results):
    """Its gradient leads through nodes that the inputs' gradient led through."""
    first, second = results["a_weight_that_is_used_twice"]
    assert first == {"equal": True, "runs": {2 * MICROBATCHES, 3 * MICROBATCHES}}
    assert second == {"equal": True, "runs": {3 * MICROBATCHES}}


# --- The interface ---


class Stage:
    def __init__(self):
        self.calls = []

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        self.calls.append((bwd_chunk_id, loss, full_backward, last_backward, GraphExecGroup._get_current_group()))

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        self.calls.append((bwd_chunk_id, last_backward, GraphExecGroup._get_current_group()))


def test_both_halves_for_a_microbatch_are_in_one_group():
    stage = Stage()
    with share_replays(stage):
        stage.backward_one_chunk(0, "loss", full_backward=False)
        stage.backward_one_chunk(1, full_backward=False, last_backward=True)
        stage.backward_weight_one_chunk(0)
        stage.backward_weight_one_chunk(1, last_backward=True)
        stage.backward_one_chunk(2)
    (*first, a), (*second, b), (*third, c), (*fourth, d), (*fifth, e) = stage.calls
    assert first == [0, "loss", False, False]
    assert second == [1, None, False, True]
    assert third == [0, False]
    assert fourth == [1, True]
    assert fifth == [2, None, True, False]
    assert a is c is not None
    assert b is d is not None
    assert a is not b
    assert e is None  # nothing to share in a backward that is not split


def test_removing_it_leaves_the_stage_as_it_was():
    stage = Stage()
    share_replays([stage]).remove()
    stage.backward_one_chunk(0, full_backward=False)
    assert stage.calls[0][-1] is None
    assert set(vars(stage)) == {"calls"}


@pytest.mark.parametrize(
    ("stages", "error", "message"),
    [
        (nn.Linear(2, 2), TypeError, "stages must be a stage of torch.distributed.pipelining or several"),
        ([], ValueError, "at least one stage"),
        ([Stage(), 3], TypeError, "got int 3"),
    ],
)
def test_what_is_no_stage_is_refused(stages, error, message):
    with pytest.raises(error, match=message):
        share_replays(stages)


def test_a_stage_is_not_taken_twice():
    stage = Stage()
    with share_replays(stage), pytest.raises(ValueError, match="has been applied to this stage already"):
        share_replays(stage)
