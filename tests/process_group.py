"""Ranks for tests: real processes of a gloo group, started once for all the scenarios of a test file.

A test file has `SCENARIOS`, functions of a rank by name; they run in this order on all ranks, and tests look at what
they gave back. A scenario that raises gives a `Failure`.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import os
import socket
import traceback
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed

import recollect
from tools import in_backward

_PATIENCE = 30  # seconds that a rank waits for another one
_LIMIT = 240  # seconds for all scenarios


class Failure(str):
    """The traceback of a scenario that raised."""


def run_on_ranks(name, folder, count=2):
    """What every scenario of a test file gives, by name, for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = mp.start_processes(_rank, (count, port, name, str(folder)), nprocs=count, join=False, start_method="spawn")
    ranks.join(_LIMIT, grace_period=5)
    for process in ranks.processes:
        if process.is_alive():
            process.kill()
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(count)]


def result(ranks, name):
    """What a scenario gave, which is the same on all ranks."""
    failures = [f"rank {rank}:\n{one[name]}" for rank, one in enumerate(ranks) if isinstance(one.get(name), Failure)]
    # A rank that waits for one that has failed says no more than that.
    for failure in sorted(failures, key=lambda one: "Timed out" in one or "Connection" in one):
        pytest.fail(failure)
    for rank, results in enumerate(ranks):
        assert name in results, f"rank {rank} came as far as {list(results)[-1]!r}"
    assert all(results[name] == ranks[0][name] for results in ranks)
    return ranks[0][name]


def _rank(rank, count, port, name, folder):
    faulthandler.enable()  # a process that dies of a signal says where
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning)  # what torch is about to rename
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    patience = datetime.timedelta(seconds=_PATIENCE)
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=patience)
    results = {}
    for one, scenario in importlib.import_module(name).SCENARIOS.items():
        try:
            results[one] = scenario(rank)
        except Exception:
            results[one] = Failure(traceback.format_exc())
        torch.save(results, Path(folder) / f"{rank}.pt")
        try:
            distributed.barrier()
        except RuntimeError:  # the others have failed, or wait for something else
            break
    os._exit(0)  # torch's own threads need not outlive the interpreter


@contextlib.contextmanager
def collectives():
    """Count collectives: a Counter of (what, how many elements all ranks have of it, when).

    When: "forward", "replay" or "backward". Functions of torch.distributed are replaced for a while. (A dispatch mode
    sees more, and now and then a process dies of it when gloo's threads let go of what they were given.)
    """
    seen = Counter()
    there = {name: vars(distributed)[name] for name in vars(distributed) if name.startswith(tuple(_KINDS))}

    def counting(name, function):
        kind = next(_KINDS[start] for start in _KINDS if name.startswith(start))

        def counted(*args, **kwargs):
            tensors = [part if isinstance(part, list) else [part] for part in (*args, *kwargs.values())]
            sizes = [sum(one.numel() for one in part) for part in tensors if isinstance(part[0], torch.Tensor)]
            when = "replay" if recollect.is_recomputing() else "backward" if in_backward() else "forward"
            seen[kind, max(sizes), when] += 1  # the whole is larger than a shard of it
            return function(*args, **kwargs)

        return counted

    for name, function in there.items():
        if callable(function) and not name.endswith("object"):
            setattr(distributed, name, counting(name, function))
    try:
        yield seen
    finally:
        for name, function in there.items():
            setattr(distributed, name, function)


_KINDS = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce"}
