"""`Shard`: inputs of regions that ranks hold in copies, kept as one part per rank. Bytes, bits and collectives."""

import gc
import pickle
import threading
import time

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import distributed, nn
from torch.distributed import tensor as placements
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import recollect
from meshes import Collectives, equal, run_on_ranks
from tools import LiveBytes

RANKS = 4
SHAPE = (4, 6, 8)
SIZE = 4 * 6 * 8 * 4  # bytes of one input
REGIONS = 4
GATHER = "_allgather_base_"


def all_ranks():
    return recollect.Shard(distributed.group.WORLD, min_bytes=0)


class Block(nn.Module):
    def __init__(self, events=None, number=0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)
        self.events, self.number = [] if events is None else events, number

    def forward(self, x):
        if recollect.is_recomputing():
            self.events.append(f"replay {self.number}")
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    """An embedding, whose result is the first input, and regions one after the other."""

    def __init__(self, events=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.layers = nn.Sequential(*(Block(events, number) for number in range(REGIONS)))

    def forward(self, x):
        return self.layers(self.embed(x))


def a_batch(*shape, seed=1):
    return torch.randn(*(shape or SHAPE), generator=torch.Generator().manual_seed(seed))


def train(decision, batch, *, steps=2, prepare=None, check="first"):
    """Gradients, bytes kept after the forward, and what happened in forward and backward of the last step."""
    events = []
    model = Model(events)
    if prepare is not None:
        prepare(model)
    if decision is not None:
        recollect.apply(model, {"layers.*": decision}, determinism_check=check)
    for _ in range(steps):
        model.zero_grad()
        torch.manual_seed(3)
        events.clear()
        with LiveBytes() as live, Collectives(events):
            loss = model(batch).sum()
            kept, forward = settled(live) - loss.nbytes, events.copy()
            events.clear()
            loss.backward()
    grads = [one.grad for one in model.parameters()]
    grads = [one.to_local() if isinstance(one, DTensor) else one for one in grads]
    return grads, {"kept": kept, "forward": forward, "backward": events}


def settled(live):
    """The least that is alive for a moment: threads of gloo hold what was sent a little longer than it takes."""
    seen = [live.now]
    for _ in range(10):
        time.sleep(0.002)
        seen.append(live.now)
    return min(seen)


def first_and_later_steps(rank):
    expected, _ = train(None, a_batch())
    given = {}
    for name, inputs in (("whole", None), ("parts", all_ranks())):
        grads, given[name] = train(recollect.Recompute(inputs=inputs), a_batch())
        given[name]["equal"] = equal(grads, expected)
    for name, options in (("first", {"steps": 1}), ("values", {"check": "values"})):
        _, given[name] = train(recollect.Recompute(inputs=all_ranks()), a_batch(), **options)
        del given[name]["kept"]  # the threads of gloo hold for a moment what was sent for the comparison
    given["a comparison"] = []
    with Collectives(given["a comparison"]):
        distributed.all_gather_object([None] * RANKS, rank)
    return given


def lengths_that_do_not_divide(rank):
    given = {}
    for shape in ((3, 5, 8), (1, 1, 8)):
        expected, _ = train(None, a_batch(*shape))
        grads, counts = train(recollect.Recompute(inputs=all_ranks()), a_batch(*shape))
        given[str(shape)] = {"equal": equal(grads, expected), "kept": counts["kept"]}
    given["(7, 3)"] = no_multiple(rank)
    given["few"] = few_values(rank)
    return given


def no_multiple(rank):
    x = a_batch(7, 3).requires_grad_()
    region = recollect.remat(lambda x: x.sin().exp(), inputs=all_ranks())
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    region(x * 2).sum().backward()  # the first time, which is compared by value
    with LiveBytes() as live:
        loss = region(x * 2).sum()
        kept = live.now - loss.nbytes
    (grad,) = torch.autograd.grad(loss, x)
    return {"equal": torch.equal(grad, expected), "kept": kept}


def few_values(rank):
    """Fewer values than ranks: some keep nothing but zeros."""
    x = torch.ones(2, requires_grad=True)
    region = recollect.remat(lambda x: x.sin().exp(), inputs=all_ranks())
    (grad,) = torch.autograd.grad(region(x * 2).sum(), x)
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    return torch.equal(grad, expected)


def two_dimensions(rank):
    """Two groups of two: each keeps what its own ranks have, by all ways to say so."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = a_batch(seed=10 + mesh.get_local_rank("dp"))
    expected, _ = train(None, batch)
    ways = {
        "name and mesh": recollect.Shard("tp", mesh=mesh, min_bytes=0),
        "number and mesh": recollect.Shard(1, mesh=mesh, min_bytes=0),
        "from the end": recollect.Shard(-1, mesh=mesh, min_bytes=0),
        "mesh": recollect.Shard(mesh["tp"], min_bytes=0),
        "group": recollect.Shard(mesh.get_group("tp"), min_bytes=0),
        "name": recollect.Shard("tp", min_bytes=0),
    }
    given = {}
    for name, shard in ways.items():
        if name == "name":
            with mesh:
                grads, counts = train(recollect.Recompute(inputs=shard), batch)
        else:
            grads, counts = train(recollect.Recompute(inputs=shard), batch)
        given[name] = {"equal": equal(grads, expected), "kept": counts["kept"], "backward": counts["backward"]}
    try:
        train(recollect.Recompute(inputs=recollect.Shard("tp")), batch)
    except RuntimeError as error:
        given["no mesh"] = str(error)
    return given


def tensor_parallel(rank):
    """The real thing: a model whose layers are split over two ranks, beside collectives of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]

    def split(model):
        for block in model.layers:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    given = {}
    expected, _ = train(None, a_batch(), prepare=split)
    for name, policy in (("recompute", None), ("collectives", recollect.policies.save_collectives)):
        # Of which mesh it is, the weights say.
        decision = recollect.Recompute(policy=policy, inputs=recollect.Shard("tp", min_bytes=0))
        grads, counts = train(decision, a_batch(), prepare=split)
        given[name] = {"equal": equal(grads, expected), "backward": counts["backward"], "kept": counts["kept"]}
    return given


# --- What is cut, and what stays ---


def gathered_for(function, *args):
    """How many tensors are gathered for a region, and whether its gradients are right."""
    leaves = [one for one in args if isinstance(one, torch.Tensor) and one.requires_grad and one.is_leaf]
    expected = torch.autograd.grad(function(*args).sum(), leaves) if leaves else ()
    region = recollect.remat(function, inputs=all_ranks())
    region(*args).sum().backward()  # the first one is compared by value
    for one in leaves:
        one.grad = None
    with Collectives() as seen:
        region(*args).sum().backward()
    return {"gathers": seen.counts.get(GATHER, 0), "equal": not leaves or equal([x.grad for x in leaves], expected)}


def what_is_cut(rank):
    base = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    strides = []

    def over(make, function=lambda x: (x.sin() * 2).exp()):
        """A region on what `make` gives of a leaf, which is called inside, so that the region's input is no leaf."""
        x = base.clone().requires_grad_()
        inner = recollect.remat(lambda y: (strides.append(y.stride()), function(y))[1], inputs=all_ranks())

        def run():
            strides.clear()
            (grad,) = torch.autograd.grad(inner(make(x)).abs().sum(), x)
            return grad

        run()
        with Collectives() as seen:
            grad = run()
        (expected,) = torch.autograd.grad(function(make(x)).abs().sum(), x)
        return {
            "gathers": seen.counts.get(GATHER, 0),
            "equal": torch.equal(grad, expected),
            "same strides": len(set(strides)) == 1,
        }

    weight = nn.Parameter(base.clone())
    mask = base > 0
    given = {
        "computed": over(lambda x: x * 2),
        "transposed": over(lambda x: (x * 2).t()),
        "sliced": over(lambda x: (x * 2)[:, 1:4]),
        "expanded": over(lambda x: (x * 2).unsqueeze(1).expand(8, 3, 6)),
        "bfloat16": over(lambda x: (x * 2).bfloat16()),
        "double": over(lambda x: (x * 2).double()),
        "complex": over(lambda x: torch.complex(x * 2, x)),
        "conjugate": over(lambda x: torch.complex(x * 2, x).conj()),
        "channels last": over(lambda x: (x * 2).view(2, 2, 2, 6).to(memory_format=torch.channels_last)),
        "no values": over(lambda x: (x * 2)[:0]),
    }
    whole = {
        "leaf": (lambda x: x.sin().exp(), (base.clone().requires_grad_(),)),
        "parameter": (lambda x, w: (x.sin() @ w.t()).exp(), (base.clone().requires_grad_(), weight)),
        "a view of a parameter": (lambda x, w: (x.sin() @ w).exp(), (base.clone().requires_grad_(), weight.t())),
        "no grad": (lambda x, m: (x.sin() * m).exp(), (base.clone().requires_grad_(), mask)),
        "integers": (lambda x, i: x.sin()[i].exp(), (base.clone().requires_grad_(), torch.tensor([3, 1]))),
    }
    for name, (function, args) in whole.items():
        given[name] = gathered_for(function, *args)
    shard = recollect.Shard(distributed.group.WORLD, min_bytes=base.nbytes + 1)
    x = base.clone().requires_grad_()
    region = recollect.remat(lambda y: y.sin().exp(), inputs=shard)
    loss = region(x * 2).sum()  # not part of the count: torch 2.15 compares by the collective that gathers parts
    with Collectives() as seen:
        loss.backward()
    given["small"] = {"gathers": seen.counts.get(GATHER, 0), "equal": x.grad is not None}
    return given


def one_tensor_in_several_regions(rank):
    """As the memory of an encoder is, which every layer of a decoder is given: kept once, gathered for each."""
    events = []

    def attend(x, memory):
        return x + (x.tanh() * memory.sin()).exp()

    region = recollect.remat(attend, inputs=all_ranks())
    source = a_batch().requires_grad_()

    def run(call):
        events.clear()
        with LiveBytes() as live, Collectives(events):
            memory = source * 2
            x = memory.cos()
            for _ in range(3):
                x = call(x, memory)
            loss = x.sum()
            del x, memory
            kept = live.now - loss.nbytes
            events.clear()
            (grad,) = torch.autograd.grad(loss, source)
        return grad, kept, events.count(GATHER)

    expected, *_ = run(attend)
    run(region)
    grad, kept, gathers = run(region)
    outside = SIZE  # `cos` saves the memory itself, whole
    return {"equal": torch.equal(grad, expected), "kept": kept - outside, "gathers": gathers}


def dtensors(rank):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    shard = recollect.Shard("tp", min_bytes=0)  # the mesh is that of the input
    given = {}
    for name, placement in {"replicated": Replicate(), "sharded": placements.Shard(0)}.items():
        x = DTensor.from_local(a_batch(4, 8), mesh, [Replicate()], run_check=False)
        x = x.redistribute(placements=[placement]).detach().requires_grad_()
        seen = []

        def function(y, seen=seen):
            seen.append((type(y) is DTensor, str(y.placements), tuple(y.shape), y.requires_grad))
            return (y.sin() * 2).exp()

        region = recollect.remat(function, inputs=shard)
        region(x * 2).sum().backward()
        x.grad, expected = None, torch.autograd.grad(function(x * 2).sum(), x)[0]
        seen.clear()
        loss = region(x * 2).sum()
        with Collectives() as collectives:
            loss.backward()
        given[name] = {
            "equal": torch.equal(x.grad.to_local(), expected.to_local()),
            "gathers": collectives.counts.get(GATHER, 0),
            "alike": len(set(seen)) == 1 and len(seen) == 2,
        }
    return given


def what_a_collective_has_yet_to_give(rank):
    """The result of a functional collective, which is not there until somebody reads it."""
    x = a_batch(4, 8).requires_grad_()
    kinds, gather = [], getattr(functional, "all_gather_single_autograd", None)
    gather = gather or functional.all_gather_tensor_autograd  # its name up to 2.12

    def function(y):
        kinds.append(type(y).__name__)
        return (y.sin() * 2).exp()

    region = recollect.remat(function, inputs=all_ranks())

    def run(call):
        x.grad = None
        gathered = gather(x * 2, 0, distributed.group.WORLD)
        call(gathered).sum().backward()
        return x.grad

    expected = run(function)
    run(region)
    with Collectives() as seen:
        grad = run(region)
    return {"equal": torch.equal(grad, expected), "gathers": seen.counts.get(GATHER, 0), "kinds": kinds[:1]}


# --- Passes ---


def passes(rank):
    """What each backward gathers, and nothing else does."""
    events = []
    model = Model(events)
    handle = recollect.apply(model, {"layers.*": recollect.Recompute(inputs=all_ranks())})
    model.eval()
    given = {}

    def forward():
        middle = model.layers[:2](model.embed(a_batch()))
        return middle, model.layers[2:](middle).sum()

    def during(name, function):
        events.clear()
        with Collectives(events):
            result = function()
        given[name] = events.copy()
        return result

    def some_passes():
        middle, loss = forward()
        during("upper half", lambda: torch.autograd.grad(loss, middle, retain_graph=True))
        last = list(model.layers[3].parameters())
        during("weights of the last", lambda: torch.autograd.grad(loss, last, retain_graph=True))
        during("all", lambda: loss.backward(retain_graph=True))
        during("all again", lambda: loss.backward())
        return [one.grad for one in model.parameters()]

    def dies():
        forward()
        gc.collect()

    forward()[1].backward()  # the first step, which is compared by value
    model.zero_grad()
    grads = some_passes()
    during("dies", dies)

    def without_grad():
        with torch.no_grad():
            forward()

    during("without grad", without_grad)

    model.zero_grad()
    hook = model.layers[2].register_full_backward_hook(lambda *_: 1 / 0)
    _, loss = forward()
    try:
        during("fails", loss.backward)
    except ZeroDivisionError:
        given["fails"] = events.copy()
    hook.remove()
    model.zero_grad()
    during("after a failure", lambda: forward()[1].backward())
    once = [one.grad for one in model.parameters()]
    handle.remove()
    events.clear()
    model.zero_grad()
    forward()[1].backward()
    expected = [one.grad for one in model.parameters()]
    given["equal"] = equal(once, expected) and equal(grads, [2 * one for one in expected])
    return given


def microbatches(rank):
    """Several forwards before the first backward, as pipelines have them: each finds its own way back."""
    events = []
    model, plain = Model(events), Model().eval()
    recollect.apply(model, {"layers.*": recollect.Recompute(inputs=all_ranks())})
    model.eval()
    model(a_batch()).sum().backward()
    losses = [model(a_batch(seed=seed)).square().sum() for seed in (2, 3)]
    given = []
    for loss, seed in zip(losses, (2, 3), strict=True):
        model.zero_grad()
        events.clear()
        with Collectives(events):
            loss.backward()
        grads, happened = [one.grad for one in model.parameters()], events.copy()
        expected = torch.autograd.grad(plain(a_batch(seed=seed)).square().sum(), list(plain.parameters()))
        given.append({"events": happened, "equal": equal(grads, expected)})
    return given


def garbage_on_one_rank(rank):
    """What one rank happens to hold of graphs that are over does not make it gather anything else."""
    events = []
    model = Model(events)
    recollect.apply(model, {"layers.*": recollect.Recompute(inputs=all_ranks())})
    model.eval()
    model(a_batch()).sum().backward()
    held = []
    for _ in range(2):
        loss = model(a_batch()).sum()
        if rank == 1:
            held.append(loss)  # a step that was given up
        del loss
        x = model.embed(a_batch())
        side = model.layers[2](x)
        if rank == 2:
            held.append(side)  # a branch that the loss does not need
        del side
        loss = model.layers(x).sum()
        events.clear()
        with Collectives(events):
            loss.backward()
    return events


def inside_of_others(rank):
    """In a region, or under somebody's hooks, inputs belong to those around."""
    given = {}
    region = recollect.remat(lambda x: x.sin().exp(), inputs=all_ranks())
    x = a_batch().requires_grad_()
    (expected,) = torch.autograd.grad((x * 2).sin().exp().cos().exp().sum(), x)

    def outer(x):
        return region(x * 2).cos().exp()

    def through(call):
        with Collectives() as seen:
            (grad,) = torch.autograd.grad(call().sum(), x)
        return {"collectives": seen.counts, "equal": torch.equal(grad, expected)}

    def under_hooks():
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            return outer(x)

    given["region"] = through(lambda: recollect.checkpoint(outer, x))
    given["hooks"] = through(under_hooks)
    alone = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp"))
    single = recollect.remat(lambda x: x.sin().exp(), inputs=recollect.Shard("tp", mesh=alone, min_bytes=0))
    given["one rank"] = through(lambda: single(x * 2).cos().exp())
    return given


def in_another_thread(rank):
    """A backward that is not called where the forward was, and a second derivative."""
    region = recollect.remat(lambda x: x.sin().exp(), inputs=all_ranks())
    x = a_batch().requires_grad_()
    loss = region(region(x * 2)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sin().exp().sum(), x)

    def second(call):
        (first,) = torch.autograd.grad(call(x * 2).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    return {
        "equal": torch.equal(x.grad, expected),
        "second": torch.equal(second(region), second(lambda x: x.sin().exp())),
    }


# --- What is wrong ---


def not_copies(rank):
    """Errors, the same on all ranks, and before anything is wrong."""

    def message(call):
        try:
            call()
        except recollect.CheckpointError as error:
            return str(error)
        return ""

    def block(x, scale):
        return (x * scale["by"]).sin().exp()

    def run(x, scale=None, **options):
        region = recollect.remat(block, inputs=all_ranks(), **options)
        given = x.requires_grad_() * 2
        region(given, scale={"by": given if scale is None else scale}).sum().backward()

    x = a_batch(4, 8)
    other = x.clone()
    other[3, 7] = torch.nextafter(x[3, 7], torch.tensor(9.0)) if rank == 2 else x[3, 7]
    given = {"one bit": message(lambda: run(other))}
    given["shape"] = message(lambda: run(a_batch(4 + (rank == 1), 8)))
    given["dtype"] = message(lambda: run(x.double() if rank == 3 else x))
    needs = a_batch(4, 8, seed=7).requires_grad_(rank > 0)
    given["grad"] = message(lambda: run(x, needs * 2))
    scale = (a_batch(4, 8, seed=8) + rank).requires_grad_() * 1
    given["in a dict"] = message(lambda: run(x, scale))
    recollect.verify_again()
    run(x)
    given["later, not compared"] = message(lambda: run(other))
    given["later, by values"] = message(lambda: run(other, determinism_check="values"))
    recollect.verify_again()
    given["again"] = message(lambda: run(other))
    recollect.verify_again()
    run(x)
    return given


def changed_in_place(rank):
    region = recollect.remat(lambda x: x.sin().exp(), inputs=all_ranks())
    x = a_batch().requires_grad_()
    y = x * 2
    loss = region(y).sum()
    y.detach().zero_()
    with Collectives() as seen, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return seen.counts.get(GATHER, 0)


def changed_unseen(rank):
    """Between two regions that are given the same tensor, in a way that leaves its version as it was."""

    def function(x):
        return x.sin().exp()

    region = recollect.remat(function, inputs=all_ranks())
    x = a_batch().requires_grad_()
    region(x * 2).sum().backward()  # the first one is compared by value
    y = x * 2
    values, results = [], []
    for factor in (1, 3, 1):
        y.data.mul_(factor)
        values.append(y.detach().clone().requires_grad_())
        results.append(region(y).sum())
    grads = [torch.autograd.grad(result, y)[0] for result in results]
    return equal(grads, [torch.autograd.grad(function(one).sum(), one)[0] for one in values])


def groups_that_are_gone(rank):
    """The last scenario: it ends the job, and begins another."""
    x = a_batch().requires_grad_()
    region = recollect.remat(lambda x: x.sin().exp(), inputs=all_ranks())
    loss = region(x * 2).sum()
    store = distributed.distributed_c10d._get_default_store()
    distributed.barrier()
    distributed.destroy_process_group()
    given = {}
    try:
        loss.backward()
    except RuntimeError as error:
        given["message"] = str(error)
    store = distributed.PrefixStore("again", store)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    again = recollect.remat(lambda x: x.sin().exp(), inputs=all_ranks())
    again(x * 2).sum().backward()
    given["equal"] = torch.equal(x.grad, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])
    return given


SCENARIOS = [
    first_and_later_steps,
    lengths_that_do_not_divide,
    two_dimensions,
    tensor_parallel,
    what_is_cut,
    one_tensor_in_several_regions,
    dtensors,
    what_a_collective_has_yet_to_give,
    passes,
    microbatches,
    garbage_on_one_rank,
    inside_of_others,
    in_another_thread,
    not_copies,
    changed_in_place,
    changed_unseen,
    groups_that_are_gone,
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_on_ranks(__name__, RANKS, tmp_path_factory.mktemp("ranks"))


IN_ORDER = [GATHER, *[event for number in (3, 2, 1) for event in (GATHER, f"replay {number}")], "replay 0"]


# --- Bytes and order ---


def test_bytes_kept_fall_by_the_size_of_the_group(results):
    found = results.same("first_and_later_steps")
    assert found["whole"]["kept"] == REGIONS * SIZE
    assert found["parts"]["kept"] == REGIONS * SIZE // RANKS


def test_gradients_are_those_of_the_plain_model(results):
    found = results.same("first_and_later_steps")
    assert found["whole"]["equal"]
    assert found["parts"]["equal"]


def test_each_region_is_gathered_once_ahead_of_its_replay(results):
    """The next one is on its way before a replay begins: while that replay and its backward run."""
    found = results.same("first_and_later_steps")
    assert found["parts"]["backward"] == IN_ORDER
    assert found["first"]["backward"] == IN_ORDER
    assert found["whole"]["backward"] == [event for event in IN_ORDER if event != GATHER]


def test_a_forward_communicates_only_where_it_is_compared(results):
    """By objects, once for each region. In torch 2.15 these go by the collective that gathers parts, too."""
    found = results.same("first_and_later_steps")
    assert found["parts"]["forward"] == []
    for name in ("first", "values"):
        assert found[name]["forward"] == found["a comparison"] * REGIONS


def test_parts_are_filled_up_where_lengths_do_not_divide(results):
    found = results.same("lengths_that_do_not_divide")
    assert found["(3, 5, 8)"] == {"equal": True, "kept": REGIONS * 120 // RANKS * 4}
    assert found["(1, 1, 8)"] == {"equal": True, "kept": REGIONS * 8 // RANKS * 4}
    assert found["(7, 3)"] == {"equal": True, "kept": 6 * 4}  # 21 values in four parts: six, six, six and three
    assert found["few"]


@pytest.mark.parametrize("way", ["name and mesh", "number and mesh", "from the end", "mesh", "group", "name"])
def test_ranks_are_named_by_dimension_mesh_or_group(results, way):
    """Two groups of two ranks, with other data in each."""
    found = results.same("two_dimensions")[way]
    assert found == {"equal": True, "kept": REGIONS * SIZE // 2, "backward": IN_ORDER}


def test_a_name_alone_needs_a_mesh_that_is_entered(results):
    message = results.same("two_dimensions")["no mesh"]
    assert "inputs=Shard('tp') does not say of which mesh" in message
    assert "none of its arguments, nor of the weights of its module, is a DTensor" in message
    assert "Pass mesh=" in message


def test_beside_the_collectives_of_a_model_that_is_split(results):
    found = results.same("tensor_parallel")
    assert found["recompute"]["equal"]
    assert found["collectives"]["equal"]
    assert found["recompute"]["kept"] == REGIONS * SIZE // 2
    others = {name: [event for event in one["backward"] if event == "all_reduce"] for name, one in found.items()}
    assert len(others["collectives"]) == REGIONS  # of gradients
    assert len(others["recompute"]) == 2 * REGIONS  # and of the replays
    for one in found.values():
        assert [event for event in one["backward"] if event != "all_reduce"] == IN_ORDER


# --- What is cut, and what stays ---

CUT = ["computed", "transposed", "sliced", "bfloat16", "double", "complex", "conjugate", "channels last"]


@pytest.mark.parametrize("name", CUT)
def test_what_was_computed_and_needs_grad_is_cut(results, name):
    assert results.same("what_is_cut")[name] == {"gathers": 1, "equal": True, "same strides": True}


@pytest.mark.parametrize(
    "name", ["leaf", "parameter", "a view of a parameter", "no grad", "integers", "small", "expanded", "no values"]
)
def test_others_stay(results, name):
    found = results.same("what_is_cut")[name]
    assert (found["gathers"], found["equal"]) == (0, True)


def test_a_tensor_that_several_regions_take_is_kept_once(results):
    found = results.same("one_tensor_in_several_regions")
    assert found["equal"]
    assert found["kept"] == (3 + 1) * SIZE // RANKS
    assert found["gathers"] == 3 * 2


def test_a_replicated_dtensor_is_cut_and_a_sharded_one_is_in_parts_already(results):
    found = results.same("dtensors")
    assert found["replicated"] == {"equal": True, "gathers": 1, "alike": True}
    assert found["sharded"] == {"equal": True, "gathers": 0, "alike": True}


def test_results_of_collectives_are_waited_for(results):
    found = results.same("what_a_collective_has_yet_to_give")
    assert found["kinds"] == ["AsyncCollectiveTensor"]  # or it would show nothing
    assert found["equal"]
    assert found["gathers"] == 1


# --- Passes ---


def test_every_pass_gathers_for_itself(results):
    found = results.same("passes")
    assert found["equal"]
    assert found["all"] == found["all again"] == found["after a failure"] == IN_ORDER


def test_a_pass_gathers_nothing_that_it_does_not_come_to(results):
    assert results.same("passes")["weights of the last"] == [GATHER, "replay 3"]
    upper = results.same("passes")["upper half"]
    assert [event for event in upper if event != GATHER] == ["replay 3", "replay 2"]
    assert upper.count(GATHER) == 2 + 1  # the gradient of what is between is that of a node of the lower half


def test_a_graph_that_dies_gathers_nothing(results):
    found = results.same("passes")
    assert found["dies"] == found["without grad"] == []


def test_a_pass_that_fails_has_begun_the_same_on_all_ranks(results):
    assert results.same("passes")["fails"] == IN_ORDER[: IN_ORDER.index("replay 2") + 1]


def test_each_of_several_microbatches_finds_its_own_way_back(results):
    assert results.same("microbatches") == [{"events": IN_ORDER, "equal": True}] * 2


def test_garbage_that_a_rank_holds_changes_nothing(results):
    assert results.same("garbage_on_one_rank") == IN_ORDER


def test_it_means_nothing_inside_of_others(results):
    found = results.same("inside_of_others")
    assert found == {name: {"collectives": {}, "equal": True} for name in ("region", "hooks", "one rank")}


def test_backward_in_another_thread_and_second_derivatives(results):
    assert results.same("in_another_thread") == {"equal": True, "second": True}


# --- What is wrong ---


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("one bit", "copies of args[0] of the checkpointed region not_copies.<locals>.block ("),
        ("one bit", "float32[4, 8] on cpu, with other values or strides on rank 2 than on rank 0"),
        ("shape", "float32[4, 8] on cpu on rank 0; float32[5, 8] on cpu on rank 1; float32[4, 8] on cpu on rank 2"),
        ("dtype", "float32[4, 8] on cpu on rank 2; float64[4, 8] on cpu on rank 3"),
        ("grad", "copies of the tensors to keep"),
        ("grad", "1 of them on rank 0; 2 of them on rank 1"),
        ("in a dict", "copies of scale['by']"),
        ("in a dict", "on ranks 1, 2, 3 than on rank 0"),
        ("later, by values", "copies of args[0]"),
        ("again", "inputs=Shard(<process group of ranks [0, 1, 2, 3]>, min_bytes=0) keeps one part of it on each rank"),
    ],
)
def test_what_is_no_copy_is_an_error_on_all_ranks(results, case, says):
    assert says in results.same("not_copies")[case]


def test_later_steps_are_not_compared_unless_they_are_to_be(results):
    assert results.same("not_copies")["later, not compared"] == ""


def test_an_input_that_was_changed_in_place_is_found(results):
    assert results.same("changed_in_place") == 1


def test_each_region_keeps_the_values_that_its_forward_was_given(results):
    assert results.same("changed_unseen")


def test_a_backward_after_the_groups_are_gone(results):
    found = results.same("groups_that_are_gone")
    assert "the process groups of ranks 0, 1, 2, 3 were destroyed after its forward" in found["message"]
    assert found["equal"]


# --- The decision, where there are no ranks ---


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    distributed.destroy_process_group()


@pytest.mark.parametrize("over", [None, 1.5, True, torch.ones(2), ["tp"], placements.Shard(0)])
def test_what_names_no_ranks_is_refused(over):
    with pytest.raises(TypeError, match=r"over must be a mesh dimension \(a name or a number\)"):
        recollect.Shard(over)


def test_a_placement_gets_a_hint():
    with pytest.raises(TypeError, match="That is a placement of DTensors: name the mesh dimension"):
        recollect.Shard(placements.Shard(0))
    with pytest.raises(TypeError, match=r"inputs must be recollect.Offload\(\), recollect.Shard\(...\) or None"):
        recollect.Recompute(inputs=placements.Shard(0))


def test_dimensions_are_looked_up_at_once_where_there_is_a_mesh(mesh):
    with pytest.raises(ValueError, match=r"which has the dimensions \['dp', 'tp'\], got str 'pp'"):
        recollect.Shard("pp", mesh=mesh)
    for number in (2, -3):
        with pytest.raises(ValueError, match="over must be a dimension of the mesh"):
            recollect.Shard(number, mesh=mesh)
    with pytest.raises(ValueError, match="which has 2 dimensions without names"):
        recollect.Shard("tp", mesh=init_device_mesh("cpu", (1, 1)))
    with pytest.raises(ValueError, match=r"Name one of \['dp', 'tp'\]: recollect.Shard\('tp', mesh=mesh\)"):
        recollect.Shard(mesh)
    with pytest.raises(ValueError, match="mesh"):
        recollect.Shard(mesh["tp"], mesh=mesh)
    with pytest.raises(TypeError, match=r"mesh must be a torch.distributed.DeviceMesh or None, got str 'tp'"):
        recollect.Shard("tp", mesh="tp")
    with pytest.raises(ValueError, match="min_bytes must be a number of bytes"):
        recollect.Shard("tp", min_bytes="many")


def test_a_name_that_no_mesh_has_is_found_where_the_region_is_called(mesh):
    region = recollect.remat(torch.sin, inputs=recollect.Shard("pp"))
    with mesh, pytest.raises(ValueError, match="over must be a dimension of the mesh"):
        region(torch.ones(2, requires_grad=True))


def test_decisions_are_values(mesh):
    one, other = (recollect.Shard("tp", mesh=mesh) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != recollect.Shard("dp", mesh=mesh)
    assert repr(recollect.Shard("tp", min_bytes="1 KiB")) == "Shard('tp', min_bytes=1024)"
    assert recollect.Recompute(inputs=recollect.Shard("tp")) == recollect.Recompute(inputs=recollect.Shard("tp"))
    assert pickle.loads(pickle.dumps(recollect.Shard("tp"))) == recollect.Shard("tp")
    with pytest.raises(AttributeError):
        one.over = "dp"


def test_without_a_process_group_there_is_an_error():
    region = recollect.remat(torch.sin, inputs=recollect.Shard("tp"))
    with pytest.raises(RuntimeError, match=r"there is no process group: call torch.distributed.init_process_group"):
        region(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        region(torch.ones(2))  # where nothing is kept, nobody asks


def test_a_group_that_was_destroyed_is_refused(mesh):
    group = distributed.new_group([0])
    shard = recollect.Shard(group)
    distributed.destroy_process_group(group)
    assert "not there any more" in repr(shard)
    with pytest.raises(RuntimeError, match="or the group was destroyed"):
        recollect.remat(torch.sin, inputs=shard)(torch.ones(2, requires_grad=True))


def test_offloading_hooks_are_not_put_on_modules_for_it(mesh):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with recollect.apply(model, {"0": recollect.Recompute(inputs=recollect.Shard("tp", mesh=mesh))}):
        assert not model[1]._forward_hooks
