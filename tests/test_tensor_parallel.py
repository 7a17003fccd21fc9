"""Regions whose tensors, weights and experts are spread over two ranks: the same gradients, and collectives counted."""

import contextlib
import threading
import weakref

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from meshes import Collectives, equal, run_on_ranks
from recollect import policies

RANKS = 2
WIDTH, HEAD = 16, 4


class Block(nn.Module):
    """A transformer layer; dropout comes last, so that a replay needs all of it."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (project(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(attended)
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def tensor_parallel_plan():
    split = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    return {**split, "o": RowwiseParallel(), "down": RowwiseParallel()}


def sequence_parallel_plan():
    along = Shard(1)
    split = {name: ColwiseParallel(input_layouts=along) for name in ("q", "k", "v", "up")}
    joined = {name: RowwiseParallel(output_layouts=along, use_local_output=False) for name in ("o", "down")}
    return {**split, **joined, "norm1": SequenceParallel(), "norm2": SequenceParallel()}


DECISIONS = {
    "plain": None,
    "recompute": recollect.Recompute(),
    "collectives": recollect.Recompute(policy=policies.save_collectives),
    "products": recollect.Recompute(policy=policies.save_matmuls),
    "attention": recollect.Recompute(policy=policies.save_attention),
}


class Products(TorchDispatchMode):
    """How many matrix products run on this rank."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        return func(*args, **(kwargs or {}))


def mesh_of_all():
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))


def steps(mesh, plan, decision, *, sharded):
    """Gradients, and the collectives of forward and backward, of the second step."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if sharded:  # random numbers for a part of a tensor need a generator that is aware of parts, which CPUs lack
        model.apply(lambda module: setattr(module, "p", 0.0))
    for block in model:
        parallelize_module(block, mesh, plan())
    if decision is not None:
        recollect.apply(model, {"*": decision})
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(5)
        given = x
        if sharded:
            given = DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])
        with Collectives() as forward:
            y = model(given)
        loss = (y.full_tensor() if sharded else y).square().sum()
        with Products() as products, Collectives() as backward:
            loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    grads = [x.grad, *(one.to_local() if isinstance(one, DTensor) else one for one in grads)]
    return grads, {"forward": forward.counts, "backward": backward.counts, "products": products.count}


def all_decisions(plan, *, sharded):
    mesh = mesh_of_all()
    given, expected = {}, None
    for name, decision in DECISIONS.items():
        grads, counts = steps(mesh, plan, decision, sharded=sharded)
        expected = grads if expected is None else expected
        given[name] = {"equal": equal(grads, expected), **counts}
    return given


def tensor_parallel(rank):
    return all_decisions(tensor_parallel_plan, sharded=False)


def sequence_parallel(rank):
    return all_decisions(sequence_parallel_plan, sharded=True)


def what_policies_see(rank):
    """A policy that is a function, on the tensor-parallel model."""
    mesh, seen = mesh_of_all(), set()

    def policy(op_or_name, context):
        shapes = [tuple(one.shape) for one in context.args if isinstance(one, torch.Tensor)]
        kinds = {type(one).__name__ for one in context.args if isinstance(one, torch.Tensor)}
        seen.add((str(op_or_name), str(shapes[:2]), str(sorted(kinds))))
        return recollect.Save() if "all_reduce" in str(op_or_name) else None

    grads, counts = steps(mesh, tensor_parallel_plan, recollect.Recompute(policy=policy), sharded=False)
    expected, plain = steps(mesh, tensor_parallel_plan, None, sharded=False)
    same = counts["backward"] == plain["backward"]
    return {"seen": sorted(seen), "equal": equal(grads, expected), "no more collectives": same}


# --- Experts ---


class Experts(nn.Module):
    """One expert on each rank; tokens go to the one that a router chose, and come back."""

    def __init__(self, rank, exchange):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, RANKS, bias=False)
        torch.manual_seed(1 + rank)
        self.expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.noise = iter([0.0, 3.0, -3.0, 5.0] * 10)  # other routes at every run, unless they are pinned
        self.exchange = exchange
        self.splits = []

    def route(self, x):
        biased = self.router(x) + torch.tensor([next(self.noise), 0.0])
        order = biased.argmax(-1).argsort(stable=True)
        send = torch.bincount(biased.argmax(-1), minlength=RANKS)
        receive = torch.empty_like(send)
        distributed.all_to_all_single(receive, send)
        return order, send.tolist(), receive.tolist()

    def forward(self, x):
        order, send, receive = recollect.pin(self.route)(x)
        self.splits.append((send, receive))
        gates = self.router(x).softmax(-1).amax(-1, keepdim=True)
        there = recollect.region("there", self.exchange)(x[order], receive, send)
        back = recollect.region("back", self.exchange)(self.expert(there), send, receive)
        return torch.zeros_like(x).index_copy(0, order, back) * gates


def functional_exchange(x, receive, send):
    return functional.all_to_all_single_autograd(x, receive, send, distributed.group.WORLD)


class InPlaceExchange(torch.autograd.Function):
    """The same with the collective of `torch.distributed`, which writes to its argument."""

    @staticmethod
    def forward(ctx, x, receive, send):
        ctx.splits = receive, send
        given = x.new_empty(sum(receive), *x.shape[1:])
        distributed.all_to_all_single(given, x.contiguous(), receive, send)
        return given

    @staticmethod
    def backward(ctx, grad):
        receive, send = ctx.splits
        given = grad.new_empty(sum(send), *grad.shape[1:])
        distributed.all_to_all_single(given, grad.contiguous(), send, receive)
        return given, None, None


def experts(rank):
    by_name = recollect.by_name({"there": recollect.Save(), "back": recollect.Save()})
    cases = {
        "recomputed": (functional_exchange, None),
        "kept": (functional_exchange, policies.save_collectives),
        "in place": (InPlaceExchange.apply, None),
        "in place, kept by name": (InPlaceExchange.apply, by_name),
    }
    given = {}
    for name, (exchange, policy) in cases.items():
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(10 + rank)).requires_grad_()
        plain = Experts(rank, exchange)
        plain(x).square().sum().backward()
        expected = [x.grad, *(one.grad for one in plain.parameters())]
        x.grad = None
        layer = Experts(rank, exchange)
        region = recollect.remat(layer, policy=policy)
        with Collectives() as forward:
            loss = region(x).square().sum()
        with Collectives() as backward:
            loss.backward()
        grads = [x.grad, *(one.grad for one in layer.parameters())]
        given[name] = {
            "equal": equal(grads, expected),
            "forward": forward.counts,
            "backward": backward.counts,
            "splits": layer.splits,
        }
    return given


# --- What is around a function ---


def in_another_thread(function):
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


@contextlib.contextmanager
def of_this_thread(group):
    """`torch.distributed._dist2.process_group`, of which torch 2.15 has only what is under it."""
    before = torch._C._distributed_c10d._current_process_group()
    torch._C._distributed_c10d._set_process_group(group)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_process_group(before)


def contexts(rank):
    """Meshes, default groups and what DTensors go by: from the forward, in a backward of another thread."""
    mesh = mesh_of_all()
    alone = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp"))
    other = distributed.new_group(list(range(RANKS)))
    constant = torch.arange(4.0)
    current = torch._C._distributed_c10d._current_process_group
    seen = []

    def function(x):
        spread = DTensor.from_local(x)  # over the mesh that is entered
        seen.append((spread.device_mesh.mesh_dim_names, distributed.group.WORLD is other, current() is other))
        return (spread.sin() + constant).exp().to_local()  # the constant counts as replicated

    def forward(x):
        with alone["tp"], mesh, implicit_replication(), of_this_thread(other):
            before, distributed.group.WORLD = distributed.group.WORLD, other
            try:
                return recollect.checkpoint(function, x)
            finally:
                distributed.group.WORLD = before

    x = torch.ones(4, requires_grad=True)
    world, y = distributed.group.WORLD, forward(x)

    def backward():
        with alone["dp"]:
            y.sum().backward()
            names = torch.distributed.device_mesh._mesh_resources.get_current_mesh().mesh_dim_names
            seen.append((names, distributed.group.WORLD is world, current() is None))

    in_another_thread(backward)
    (expected,) = torch.autograd.grad((x.sin() + constant).exp().sum(), x)
    return {"seen": seen, "equal": torch.equal(x.grad, expected)}


def handlers_of_the_backward(rank):
    """`loss_parallel` around the backward alone: its log_softmax is not that of a replay."""
    mesh = mesh_of_all()

    def function(x):
        return (x.sin() * x.detach().log_softmax(-1)).exp()

    x = distribute_tensor(torch.randn(3, 4), mesh, [Replicate()]).requires_grad_()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    y = recollect.checkpoint(function, x)
    with loss_parallel():
        y.sum().backward()
    return {"equal": torch.equal(x.grad.to_local(), expected.to_local())}


def what_backward_forbids(rank):
    """A context around the backward alone that forbids implicit redistribution does not forbid it to a replay."""
    from torch.distributed.tensor._utils import ExplicitRedistributionContext

    mesh = mesh_of_all()
    one, other = (distribute_tensor(torch.rand(4, 4), mesh, [Shard(dim)]) for dim in (0, 1))

    def function(x):
        return (x.sin() * (one + other).full_tensor()).exp()

    x = torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    y = recollect.checkpoint(function, x)
    with ExplicitRedistributionContext():
        y.sum().backward()
        with pytest.raises(RuntimeError, match="Implicit redistribution"):
            one + other
    return {"equal": torch.equal(x.grad, expected)}


def a_group_that_is_gone(rank):
    """A default group that was destroyed after the forward is not put back."""
    before, old = distributed.group.WORLD, distributed.new_group(list(range(RANKS)))
    x = torch.ones(3, requires_grad=True)
    distributed.group.WORLD = old
    try:
        y = recollect.checkpoint(lambda x: (x * distributed.get_world_size()).sin().exp(), x)
    finally:
        distributed.group.WORLD = before
    distributed.destroy_process_group(old)
    gone = weakref.ref(old)
    del old
    is_held = gone() is not None
    y.sum().backward()
    return {"world": distributed.group.WORLD is before, "has a gradient": x.grad is not None, "is held": is_held}


SCENARIOS = [
    tensor_parallel,
    sequence_parallel,
    what_policies_see,
    experts,
    contexts,
    handlers_of_the_backward,
    what_backward_forbids,
    a_group_that_is_gone,
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_on_ranks(__name__, RANKS, tmp_path_factory.mktemp("ranks"))


# --- Tensor and sequence parallel ---


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize("scenario", ["tensor_parallel", "sequence_parallel"])
def test_gradients_are_those_of_the_plain_model(results, scenario, name):
    for of_rank in results[scenario]:
        assert of_rank[name]["equal"]


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize(
    ("scenario", "forward"),
    [
        ("tensor_parallel", {"all_reduce": 4}),
        ("sequence_parallel", {"all_gather_into_tensor": 8, "reduce_scatter_tensor": 4}),
    ],
)
def test_the_forward_communicates_as_ever(results, scenario, forward, name):
    assert results.same(scenario)[name]["forward"] == forward


@pytest.mark.parametrize(
    ("scenario", "again"),
    [
        ("tensor_parallel", {"all_reduce": 4}),
        # The last collective of a block gives what nothing there saves: the replay stops before it.
        ("sequence_parallel", {"all_gather_into_tensor": 8, "reduce_scatter_tensor": 2}),
    ],
)
def test_a_replay_communicates_as_its_forward_did(results, scenario, again):
    found = results.same(scenario)
    plain = found["plain"]["backward"]
    with_replay = {name: plain[name] + again.get(name, 0) for name in plain}
    for name in ("recompute", "products", "attention"):
        assert found[name]["backward"] == with_replay


@pytest.mark.parametrize("scenario", ["tensor_parallel", "sequence_parallel"])
def test_a_replay_issues_no_collective_whose_result_is_kept(results, scenario):
    found = results.same(scenario)
    assert found["collectives"]["backward"] == found["plain"]["backward"]


@pytest.mark.parametrize("scenario", ["tensor_parallel", "sequence_parallel"])
def test_a_replay_computes_no_product_that_is_kept(results, scenario):
    found = results.same(scenario)
    assert found["products"]["products"] == found["plain"]["products"]
    # The last one of a block is not needed where the replay stops before what it is for.
    again = 12 if scenario == "tensor_parallel" else 10
    assert found["recompute"]["products"] == found["plain"]["products"] + again


def test_policies_see_operators_on_whole_tensors_and_the_collectives(results):
    for of_rank in results["what_policies_see"]:
        seen = {(operator, *about) for operator, *about in of_rank["seen"]}
        assert ("_c10d_functional.all_reduce.default", "[(2, 8, 16)]", "['Tensor']") in seen
        assert ("aten.addmm.default", "[(32,), (16, 16)]", "['DTensor']") in seen
        assert ("aten.mm.default", "[(16, 16), (16, 16)]", "['DTensor']") in seen
        assert ("aten._scaled_dot_product_flash_attention_for_cpu.default", "[(2, 2, 8, 4), (2, 2, 8, 4)]") in {
            one[:2] for one in seen
        }
        assert of_rank["equal"]
        assert of_rank["no more collectives"]


# --- Experts ---

EXCHANGES = ["recomputed", "kept", "in place", "in place, kept by name"]


@pytest.mark.parametrize("name", EXCHANGES)
def test_experts_get_the_same_tokens_again(results, name):
    for of_rank in results["experts"]:
        found = of_rank[name]
        assert found["equal"]
        forward, replay = found["splits"]
        assert forward == replay


def test_ranks_send_different_numbers_of_tokens(results):
    """Or the splits would say nothing."""
    first, second = (of_rank["recomputed"]["splits"][0] for of_rank in results["experts"])
    assert first != second
    assert first[0] != first[1]


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_in_backward_are_two_for_gradients_and_those_of_the_replay(results, name):
    found = results.same_part("experts", name, ("forward", "backward"))
    assert sum(found["forward"].values()) == 3  # how many go where, there, and back
    replayed = 0 if "kept" in name else 2
    assert sum(found["backward"].values()) == 2 + replayed


# --- What is around a function ---


def test_meshes_and_groups_of_the_forward_are_in_force_in_another_thread(results):
    for of_rank in results["contexts"]:
        forward, replay, after = of_rank["seen"]
        assert forward == replay == (("tp",), True, True)
        assert after == (("dp",), True, True)  # and what was in force there is so again
        assert of_rank["equal"]


@pytest.mark.parametrize("scenario", ["handlers_of_the_backward", "what_backward_forbids"])
def test_what_is_in_force_around_the_backward_alone_is_not_in_the_replay(results, scenario):
    for of_rank in results[scenario]:
        assert of_rank["equal"]


def test_a_group_that_was_destroyed_is_not_put_back(results):
    for of_rank in results["a_group_that_is_gone"]:
        assert of_rank == {"world": True, "has a gradient": True, "is held": False}
