"""A plan is made by all ranks of a job together: the same on each, and good for the one that needs most."""

import json
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed, nn

import recollect
from models import Layer, Stack

RANKS = 2


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


def plan_on(rank, port, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        batch = torch.randn(2 + 2 * rank, 16, 32)  # the second rank needs more
        plan = recollect.plan(model, batch, budget="70%", repeats=1)
        replicas = nn.parallel.DistributedDataParallel(model)
        with plan.apply(model):
            for _ in range(2):
                replicas(batch).sum().backward()
        Odd.rank = rank
        odd = recollect.plan(Odd(Later), torch.randn(4, 32, 32), budget="90%", repeats=1)
        grads = [one.grad.sum().item() for one in model.parameters()]
        with open(os.path.join(folder, f"{rank}.json"), "w") as file:
            json.dump({"plan": plan.to_dict(), "odd": odd.to_dict(), "grads": grads}, file)
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(plan_on, (port, str(folder)), nprocs=RANKS, start_method="spawn")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_all_ranks_have_the_same_plan(plans):
    first, second = (one["plan"] for one in plans)
    for name in ("budget", "predicted", "measured", "shapes"):
        assert first[name] == second[name], name
    decided = [[(block["name"], block["decisions"]) for block in one["blocks"]] for one in (first, second)]
    assert decided[0] == decided[1]
    assert any(decisions for _, decisions in decided[0])


def test_it_holds_on_the_rank_that_needs_most(plans):
    for one in plans:
        assert one["plan"]["measured"]["peak"] <= one["plan"]["budget"]


def test_gradients_are_reduced(plans):
    assert plans[0]["grads"] == plans[1]["grads"]


def test_what_fails_on_one_rank_is_ruled_out_on_all(plans):
    first, second = (one["odd"] for one in plans)
    for one in (first, second):
        assert one["measured"]["peak"] <= one["budget"]
        assert not any(block["name"] in block["decisions"] for block in one["blocks"])
    assert [block["decisions"] for block in first["blocks"]] == [block["decisions"] for block in second["blocks"]]
    assert first["notes"] == second["notes"]
