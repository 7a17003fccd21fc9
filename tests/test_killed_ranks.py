"""Ranks that raise, are killed, or do not come to a collective: the others end, and every error says where and who.

Pairs of gloo ranks that all run at once. In one pair nobody ends, and each scenario has a process group of its own; in
the others a rank does.
"""

import contextlib
import json
import os
import signal
import socket
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed, nn

import recollect
from tools import in_backward

LAST = "in a backward that had replayed the checkpointed region"

RANKS = 2
SOON = timedelta(seconds=2)
LONG = timedelta(seconds=60)


class Reduce(torch.autograd.Function):
    """A collective in the forward, in the backward, or in both; or none."""

    @staticmethod
    def forward(ctx, x, group, where):
        ctx.group, ctx.where = group, where
        y = x.clone()
        if where in ("forward", "both"):
            distributed.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if ctx.where in ("backward", "both"):
            distributed.all_reduce(grad, group=ctx.group)
        return grad, None, None


class Layer(nn.Module):
    """A layer with a collective, and something that may happen in its replay on one of the ranks."""

    def __init__(self, group, where, happens=None):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.group, self.where, self.happens = group, where, happens

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.happens is not None and in_backward():
            self.happens()
        return Reduce.apply(y, self.group, self.where).tanh()


def build(*args):
    """Two layers, of which the second is the one that matters."""
    torch.manual_seed(0)
    return nn.Sequential(Layer(None, "nowhere"), Layer(*args))


def x_of(rank):
    return torch.linspace(-1, 1, 16).view(2, 8) + rank


def attempt(run):
    """What a step raised, what it said, and how long it took."""
    begun = time.monotonic()
    error = None
    try:
        run()
    except Exception as caught:
        error = caught
    return {
        "error": type(error).__name__,
        "message": str(error),
        "notes": "\n".join(getattr(error, "__notes__", ())),
        "seconds": time.monotonic() - begun,
    }


def fail():
    raise ValueError("a bad batch")


def step(model, rank, decisions=None):
    with recollect.apply(model, decisions or {"*": recollect.Recompute()}):
        model(x_of(rank)).sum().backward()


def scenario_raise_in_replay(rank, group, folder):
    """One raises in a replay, the other waits in its own."""
    model = build(group, "forward", fail if rank == 1 else None)
    return attempt(partial(step, model, rank))


def scenario_raise_while_the_other_is_in_backward(rank, group, folder):
    """The collective is in the backward of the layer, not in what is replayed."""
    model = build(group, "backward", fail if rank == 1 else None)
    return attempt(partial(step, model, rank))


def scenario_ddp(rank, group, folder):
    """No collective in the layers: the other one waits for DDP's at the end of its backward."""
    model = build(None, "nowhere", fail if rank == 1 else None)
    with recollect.apply(model, {"*": recollect.Recompute()}):
        replicas = nn.parallel.DistributedDataParallel(model, process_group=group)
        return attempt(lambda: replicas(x_of(rank)).sum().backward())


def scenario_timeout(rank, group, folder):
    """The other rank does not come."""
    model = build(group, "forward")
    with recollect.apply(model, {"*": recollect.Recompute()}):
        loss = model(x_of(rank)).sum()
        if rank == 1:
            return None
        return attempt(loss.backward)


def scenario_all_raise(rank, group, folder):
    """After an error that all have caught, the same model is right in the next step."""
    errors = [fail]
    model = build(group, "both", lambda: errors and errors.pop()())
    result = attempt(partial(step, model, rank))
    model.zero_grad()
    step(model, rank)
    again = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    model(x_of(rank)).sum().backward()
    plain = [one.grad for one in model.parameters()]
    return result | {"equal": all(map(torch.equal, again, plain)), "alike": len(again)}


def to_disk(folder):
    return recollect.Recompute(inputs=recollect.Offload(to="disk", directory=folder, min_bytes=0))


def scenario_disk(rank, group, folder):
    """Inputs of layers are on disk when the replay fails."""
    errors = [fail]
    model = build(group, "forward", lambda: errors and errors.pop()())
    result = attempt(partial(step, model, rank, {"*": to_disk(folder)}))
    result |= {"names": os.listdir(folder), "written": recollect.offload_stats().bytes_out}
    model.zero_grad()
    step(model, rank, {"*": to_disk(folder)})
    return result | {"after": os.listdir(folder)}


SCENARIOS = {
    name.removeprefix("scenario_"): (one, LONG if name.endswith(("all_raise", "disk")) else SOON)
    for name, one in list(globals().items())
    if name.startswith("scenario_")
}


def all_alive(rank, folder):
    """Nobody dies: each scenario has a process group of its own, because one that has failed is of no more use."""
    groups = {name: distributed.new_group(timeout=timeout, backend="gloo") for name, (_, timeout) in SCENARIOS.items()}
    results = {}
    for name, (run, _) in SCENARIOS.items():
        files = os.path.join(folder, f"{name}-{rank}")
        os.mkdir(files)
        results[name] = run(rank, groups[name], files)
        distributed.barrier()
    return results


def ends(rank, folder, *, who, where):
    """One rank ends in the middle of backward; the other has a minute, and needs none."""
    files = os.path.join(folder, f"files-{rank}")
    os.mkdir(files)

    def die():
        if rank == who:
            assert segments_in(files)
            os.kill(os.getpid(), signal.SIGKILL)

    happens = {"raises in a replay": fail if rank == who else None, "killed in a replay": die}
    model = build(None, "forward", happens.get(where))
    if where == "killed in backward":
        model[1].register_full_backward_pre_hook(lambda *_: die())
    return attempt(partial(step, model, rank, {"*": to_disk(files)}))


def segments_in(folder):
    """The nameless files that this process has open in a folder."""
    there = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{one}")
            there += [path] if path.startswith(folder) else []
    return there


PAIRS = {
    "alive": all_alive,
    "raises": partial(ends, who=1, where="raises in a replay"),
    "killed": partial(ends, who=1, where="killed in backward"),
    "host killed": partial(ends, who=0, where="killed in a replay"),  # the rank that has the store
}


def run_rank(number, ports, folder):
    name, rank = list(PAIRS)[number // RANKS], number % RANKS
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[number // RANKS]))
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=LONG)
    own = os.path.join(folder, name)
    os.makedirs(own, exist_ok=True)
    result = PAIRS[name](rank, own)
    with open(os.path.join(folder, f"{name}.{rank}.json"), "w") as file:
        json.dump(result, file)
    os._exit(0)  # the group is broken, and nobody needs it any more


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in PAIRS]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=run_rank, args=(number, ports, str(folder))) for number in range(len(PAIRS) * RANKS)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + 120
    for process in processes:
        process.join(max(until - time.monotonic(), 0))
    hang = [process for process in processes if process.is_alive()]
    for process in hang:
        process.kill()
    assert not hang
    found = {
        name: [
            json.loads(path.read_text()) if (path := folder / f"{name}.{rank}.json").exists() else None
            for rank in range(RANKS)
        ]
        for name in PAIRS
    }
    codes = {name: [processes[at * RANKS + rank].exitcode for rank in range(RANKS)] for at, name in enumerate(PAIRS)}
    return found, codes, folder


@pytest.fixture
def alive(results):
    found, codes, _ = results
    assert codes["alive"] == [0, 0]

    def of(name):
        return [one[name] for one in found["alive"]]

    return of


BAD = "ValueError: a bad batch"


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("raise_in_replay", "in a replay of the checkpointed region '1', Layer"),
        ("raise_while_the_other_is_in_backward", f"{LAST} '1', Layer"),
        ("ddp", f"{LAST} '0', Layer"),
    ],
)
def test_who_waits_for_a_rank_that_raised_is_told(alive, name, own):
    waited, raised = alive(name)
    assert raised["error"] == "ValueError"
    assert "on rank 1 of 2, in a replay of the checkpointed region '1', Layer" in raised["notes"]
    assert raised["seconds"] < 5
    assert waited["error"] in ("RuntimeError", "DistBackendError", "DistNetworkError")
    assert f"on rank 0 of 2, {own}" in waited["notes"]
    assert "rank 1 had failed before" in waited["notes"]
    assert f"in a replay of the checkpointed region '1', Layer ({__file__}" in waited["notes"]
    assert BAD in waited["notes"]
    assert waited["seconds"] < SOON.total_seconds() + 5


def test_a_collective_that_times_out_names_the_region(alive):
    waited, _ = alive("timeout")
    assert "on rank 0 of 2, in a replay of the checkpointed region '1', Layer" in waited["notes"]
    assert "failed before" not in waited["notes"]  # what was said in earlier scenarios is told
    assert 0.9 * SOON.total_seconds() < waited["seconds"] < SOON.total_seconds() + 5


def test_after_an_error_on_all_ranks_the_next_step_is_right(alive):
    for one in alive("all_raise"):
        assert one["error"] == "ValueError"
        assert one["message"] == "a bad batch"
        assert one["alike"] == 4
        assert one["equal"]


def test_no_files_are_left_by_an_error(alive):
    for one in alive("disk"):
        assert one["error"] == "ValueError"
        assert one["written"] > 0
        assert one["names"] == one["after"] == []


def check_who_waited(found, other, folder):
    assert found["error"] in ("RuntimeError", "DistBackendError", "DistNetworkError")
    assert f"on rank {other} of 2, in a replay of the checkpointed region '1', Layer" in found["notes"]
    assert found["seconds"] < 30  # of the minute that the process group has
    assert [list((folder / f"files-{rank}").iterdir()) for rank in range(RANKS)] == [[], []]


@pytest.mark.parametrize(("name", "who"), [("killed", 1), ("host killed", 0)])
def test_who_waits_for_a_killed_rank_ends_soon_and_names_the_region(results, name, who):
    found, codes, folder = results
    other = 1 - who
    assert codes[name][who] == -signal.SIGKILL
    assert codes[name][other] == 0
    assert found[name][who] is None
    check_who_waited(found[name][other], other, folder / name)


def test_a_rank_that_raised_and_ended_has_left_word(results):
    found, codes, folder = results
    assert codes["raises"] == [0, 0]
    waited, raised = found["raises"]
    assert raised["error"] == "ValueError"
    check_who_waited(waited, 0, folder / "raises")
    assert "rank 1 had failed before" in waited["notes"]
    assert BAD in waited["notes"]
