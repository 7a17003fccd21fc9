"""A plan is made by ranks of a job together: the same on each, and good for the one that needs most."""

import importlib
import tempfile

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import recollect
from models import Layer, Stack
from process_group import collectives, result, run_on_ranks
from recollect import _solver
from recollect._bench import Bench
from recollect._calls import watch_calls

LAYERS = 6
profile = importlib.import_module("recollect.profile")


def made(count=LAYERS):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


def batch_of(rank):
    torch.manual_seed(rank)
    return torch.randn(4 + 4 * rank, 16, 32)  # the second rank needs more


def facts(plan):
    """What must be the same on all ranks."""
    data = plan.to_dict()
    decided = [(block["name"], block["decisions"]) for block in data["blocks"]]
    return {name: data[name] for name in ("budget", "plain", "predicted", "measured", "shapes", "notes")} | {
        "decided": decided
    }


def on_replicas(rank):
    """Planned, and wrapped in DDP after that."""
    model, batch = made(), batch_of(rank)
    plan = recollect.plan(model, batch, budget="60%", repeats=1)
    replicas = nn.parallel.DistributedDataParallel(model)
    with plan.apply(model):
        for _ in range(2):
            replicas(batch).sum().backward()
    return facts(plan), [one.grad.sum().item() for one in model.parameters()]


# Which modules are sharded, and whether their parameters are held from forward to backward.
SHARDED = {"layers": (True, True), "layers, held": (True, False), "the whole": (False, True)}


def shard(model, how):
    layers, after_forward = SHARDED[how]
    for layer in model.layers if layers else ():
        fully_shard(layer, reshard_after_forward=after_forward)
    return fully_shard(model)


def step(model, batch):
    torch.manual_seed(7)
    with collectives() as counted:
        model(batch).square().mean().backward()
    return [one.grad.full_tensor().clone() for one in model.parameters()], sorted(counted.values())


def on_shards(rank):
    """Planned as it is sharded; what comes of it, how the model was left, and whether it trains as without a plan."""
    found = {}
    for how in SHARDED:
        batch = batch_of(rank)
        expected, counts = step(shard(made(), how), batch)
        model = shard(made(), how)
        before = [one.to_local().clone() for one in model.parameters()]
        parameters, generator = list(model.parameters()), torch.get_rng_state()
        plan = recollect.plan(model, batch, budget="60%", repeats=1)
        left = {
            "parameters": all(map(torch.equal, before, (one.to_local() for one in model.parameters()))),
            "the same": all(one is other for one, other in zip(parameters, model.parameters(), strict=True)),
            "gradients": all(one.grad is None for one in model.parameters()),
            "generator": torch.equal(generator, torch.get_rng_state()),
        }
        with plan.apply(model):
            got, counts_under_plan = step(model, batch)
        found[how] = {
            "plan": facts(plan),
            "left": left,
            "equal": all(map(torch.equal, got, expected)),
            "collectives": total(counts_under_plan) == total(counts),
        }
        with plan.apply(made()):  # of one that is not sharded
            pass
    return found


def what_is_saved(rank):
    """Bytes that autograd saves in a step, weights apart, sharded or not."""
    found = []
    for model in (made(), *(shard(made(), how) for how in SHARDED)):
        bench = Bench(model, batch_of(rank), None, None)
        root, _ = watch_calls(model, bench.outside, bench.forward)
        found.append(root.bytes() // (1 + rank))
    return found


def total(counts):
    return sum(counts)


def in_a_pipeline(rank):
    """Each rank has a stage of its own."""
    stage, batch = made(4 + 2 * rank), batch_of(0)
    try:
        recollect.plan(stage, batch, budget="60%", repeats=1)
        together = "no error"
    except ValueError as error:
        together = str(error)
    groups = [distributed.new_group([one]) for one in range(2)]
    mine = recollect.plan(stage, batch, budget="60%", repeats=1, group=groups[rank])
    try:
        recollect.plan(stage, batch, budget="60%", group=groups[1 - rank])
        other = "no error"
    except (ValueError, TypeError) as error:
        other = str(error)
    everybody = [None, None]
    distributed.all_gather_object(everybody, (len(mine.blocks), mine.measured.peak <= mine.budget))
    curve = recollect.frontier(stage, batch, points=2, repeats=1, group=groups[rank])
    return together, everybody, other, len(curve.points) > 0


def what_is_refused(rank):
    found = {}
    wrapped = nn.parallel.DistributedDataParallel(made(2))
    for name, model, options in (("wrapped", wrapped, {}), ("group", made(2), {"group": "all"})):
        try:
            recollect.plan(model, batch_of(rank), budget="60%", **options)
        except (ValueError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Later(Layer):
    def forward(self, x):
        return super().forward(x + 1)


class Odd(Stack):
    """On one of the ranks a layer's input changes after its forward, so that it cannot be recomputed there."""

    rank = 0

    def forward(self, x):
        x = x * 1
        for layer in self.layers:
            y = layer(x)
            x = x.add_(y) if Odd.rank else x + y
        return x


def with_a_layer_that_fails_on_one_rank(rank):
    Odd.rank = rank
    torch.manual_seed(0)
    plan = recollect.plan(Odd(Later), torch.randn(4, 32, 32), budget="90%", repeats=1)
    return facts(plan)


def with_another_link_on_each_rank(rank):
    """And a solver that finds nothing on one of them, as where the time for it is over."""
    speeds, solve = profile.speeds_of_link, _solver.solve

    def solve_on_one_rank(*args, **options):
        if rank:
            raise _solver.InfeasibleError
        return solve(*args, **options)

    profile.speeds_of_link = lambda *_: ((1e12, 1e12), (1e7, 2e7))[rank]
    _solver.solve = solve_on_one_rank
    try:
        with tempfile.TemporaryDirectory() as folder:
            offload = recollect.Offload(to="disk", directory=folder, min_bytes=0)
            bench = Bench(made(), batch_of(rank), None, None)
            link = profile.measure(bench, repeats=1, offload=offload).link
            plan = recollect.plan(made(), batch_of(rank), budget="80%", repeats=1, offload=offload)
    finally:
        profile.speeds_of_link, _solver.solve = speeds, solve
    return link, facts(plan)


SCENARIOS = {
    one.__name__: one
    for one in (
        *(on_replicas, on_shards, what_is_saved, in_a_pipeline, what_is_refused),
        *(with_a_layer_that_fails_on_one_rank, with_another_link_on_each_rank),
    )
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(__name__, tmp_path_factory.mktemp("ranks"))


def plans(ranks):
    """All of them. (What is not the same on all ranks is an error of `result`.)"""
    replicas, shards = result(ranks, "on_replicas"), result(ranks, "on_shards")
    return {"replicas": replicas[0], **{how: one["plan"] for how, one in shards.items()}}


def test_all_ranks_have_the_same_plan(ranks):
    for how, plan in plans(ranks).items():
        assert any(decisions for _, decisions in plan["decided"]), how
        assert {name for name, _ in plan["decided"]} == {f"layers.{number}" for number in range(LAYERS)}, how
        assert plan["notes"] == [], how


def test_it_holds_on_the_rank_that_needs_most(ranks):
    for how, plan in plans(ranks).items():
        assert plan["measured"]["peak"] <= plan["budget"], how


def test_what_is_gathered_counts_for_as_long_as_it_is_there(ranks):
    peaks = {how: plan["plain"]["peak"] for how, plan in plans(ranks).items()}
    weights = 4 * sum(one.numel() for one in made().parameters())
    # Beside the shards, which are half of them, all are there at once or those of one layer, or of two, are.
    assert weights / 3 < peaks["layers, held"] - peaks["layers"] < weights


def test_what_is_gathered_is_no_activation(ranks):
    found = result(ranks, "what_is_saved")
    assert found == [found[0]] * (1 + len(SHARDED))


def test_gradients_are_reduced(ranks):
    _, gradients = result(ranks, "on_replicas")
    assert len(gradients) == 12 * LAYERS


@pytest.mark.parametrize("how", SHARDED)
def test_a_sharded_model_is_left_as_it_was(ranks, how):
    assert set(result(ranks, "on_shards")[how]["left"].values()) == {True}


@pytest.mark.parametrize("how", SHARDED)
def test_a_sharded_model_trains_as_without_a_plan(ranks, how):
    found = result(ranks, "on_shards")[how]
    assert (found["equal"], found["collectives"]) == (True, True)


def test_stages_of_a_pipeline_have_plans_of_their_own(ranks):
    together, everybody, other, has_curve = result(ranks, "in_a_pipeline")
    assert "rank 1 of the group have other parameters than rank 0" in together
    assert "group=" in together
    assert [fits for _, fits in everybody] == [True, True]
    assert everybody[0][0] != everybody[1][0]
    assert "group" in other
    assert has_curve


def test_what_cannot_be_planned_is_refused_on_all_ranks(ranks):
    found = result(ranks, "what_is_refused")
    assert found["wrapped"].startswith("ValueError: the model is wrapped in DistributedDataParallel: make the plan for")
    assert found["group"].startswith("TypeError: group must be a process group")


def test_one_process_needs_no_group():
    with pytest.raises(TypeError, match="group must be a process group"):
        recollect.plan(made(1), batch_of(0), budget="60%", group=3)


def test_what_fails_on_one_rank_is_ruled_out_on_all(ranks):
    plan = result(ranks, "with_a_layer_that_fails_on_one_rank")
    assert plan["measured"]["peak"] <= plan["budget"]
    assert not any(name in decisions for name, decisions in plan["decided"])


def test_the_slowest_link_counts_and_one_rank_decides(ranks):
    link, plan = result(ranks, "with_another_link_on_each_rank")
    assert link == (1e7, 2e7)
    assert plan["measured"]["peak"] <= plan["budget"]
