"""Chains in a job of two ranks: every weight is done once, and gradients are reduced."""

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed, nn

import recollect
from chains import plain

RANKS = 2


class Model(nn.Module):
    def __init__(self, is_plain):
        super().__init__()
        self.cell, self.head = nn.RNNCell(4, 4), nn.Linear(4, 2)
        self._is_plain = is_plain

    def forward(self, x):
        def step(h):
            return self.cell(x, h)

        first = torch.zeros(len(x), 4)
        return self.head(
            plain(step, first, 20) if self._is_plain else recollect.sequential(step, first, length=20, slots=3)
        )


def train_on(rank, port, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        found = []
        for is_plain in (True, False):
            torch.manual_seed(0)
            model = nn.parallel.DistributedDataParallel(Model(is_plain), bucket_cap_mb=0.0001)
            torch.manual_seed(1 + rank)
            for _ in range(2):
                model(torch.randn(3, 4)).square().sum().backward()
            found.append([weight.grad for weight in model.parameters()])
        torch.save(found, os.path.join(folder, f"{rank}.pt"))
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(train_on, (port, str(folder)), nprocs=RANKS, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def test_gradients_are_those_of_the_plain_model(found):
    for wanted, got in found:
        assert all(map(torch.equal, got, wanted))


def test_gradients_are_the_same_on_all_ranks(found):
    assert all(map(torch.equal, found[0][1], found[1][1]))
