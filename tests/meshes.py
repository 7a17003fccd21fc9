"""Scenarios that run on all ranks of one job, which is started once for a test file.

A scenario is a function of the rank that gives plain values. The ranks run all of them, one after the other; the tests
look at what they gave.
"""

import datetime
import importlib
import os
import socket
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

TIMEOUT = datetime.timedelta(seconds=60)  # that nothing hangs


class Results:
    """What the ranks gave: `results["scenario"]` is a list by rank."""

    def __init__(self, by_rank):
        self._by_rank = by_rank

    def __getitem__(self, name):
        found = [of_rank[name] for of_rank in self._by_rank]
        for rank, (_, error) in enumerate(found):
            if error is not None:
                pytest.fail(f"on rank {rank}:\n{error}")
        return [value for value, _ in found]

    def same(self, name):
        """What all ranks gave alike."""
        first, *others = self[name]
        assert others == [first] * len(others)
        return first

    def same_part(self, name, case, keys):
        """The same for some of what they gave for one case of a scenario."""
        first, *others = [{key: of_rank[case][key] for key in keys} for of_rank in self[name]]
        assert others == [first] * len(others)
        return first


def run_on_ranks(module, count, folder):
    """Run the `SCENARIOS` of a test module on so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = module.rpartition(".")[2]
    mp.start_processes(_work, (name, count, port, str(folder)), nprocs=count, start_method="spawn")
    return Results([torch.load(Path(folder) / f"{rank}.pt") for rank in range(count)])


def _work(rank, module, count, port, folder):
    sys.path.insert(0, str(Path(__file__).parent))
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=TIMEOUT)
    given = {}
    for scenario in importlib.import_module(module).SCENARIOS:
        distributed.barrier()
        try:
            given[scenario.__name__] = scenario(rank), None
        except BaseException:
            given[scenario.__name__] = None, traceback.format_exc()
    torch.save(given, Path(folder) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


class Collectives(TorchDispatchMode):
    """The collectives that are issued under it, in order: `names`, and how often: `counts["all_reduce"]`.

    Not torch's own CommDebugMode, which loses its way among modules that are called in backward.
    """

    def __init__(self, events=None):
        super().__init__()
        self.names = [] if events is None else events

    @property
    def counts(self):
        return dict(Counter(self.names))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(one, "device_mesh") for one in types):
            return NotImplemented  # a DTensor becomes its local tensors first
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap", "barrier")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def equal(got, expected):
    """Whether all gradients are the same, bit by bit."""
    pairs = list(zip(got, expected, strict=True))
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs) and bool(pairs)
