"""What plans look like on many GPUs: prints docs/scale.md. Nothing is computed; one process plays one rank of them all.

    python docs/scale.py > docs/scale.md     takes some minutes
    python docs/scale.py --small             the same for a toy, in seconds

Two models on the meta device stand for one. `whole` is sharded by `fully_shard` over a fake process group of the real
size, and its shards are counted. FSDP does not run on the meta device, so a step is planned on `gathered`: what one GPU
computes with, in which all layers share the parameters of one, because no more than one layer's are there at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend "fake" known
from torch.utils._python_dispatch import TorchDispatchMode

import recollect

GPU = "H200"
MEMORY = 141e9  # bytes of one
USED = 0.9  # of it: the rest is for the CUDA context, NCCL and what fragments
HBM = 4.8e12  # bytes per second, as in recollect's own table of GPUs
NODE = 8
NVLINK = 450e9  # bytes per second and direction, of one GPU
NIC = 50e9  # likewise, to other nodes: 400 Gbit/s for each GPU
REACHED = 0.75  # of what data sheets say, as recollect assumes for kernels
STATE = 4 + 4 + 8  # bytes per parameter: itself, its gradient, two moments of AdamW; all float32
MOVED = 16 + 12  # bytes per parameter that AdamW reads and writes

gather_op = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
scatter_op = getattr(collectives, "reduce_scatter_single_autograd", None) or collectives.reduce_scatter_tensor_autograd


@dataclass(frozen=True)
class Shape:
    """A model, and how much of it one GPU is given to do."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    tokens: int  # of a sequence
    sequences: int  # for each GPU


@dataclass(frozen=True)
class Layout:
    """How many GPUs, and how many of them share each layer by tensor parallelism; the others share its parameters."""

    gpus: int
    tensor: int = 1

    @property
    def data(self) -> int:
        """How many share the parameters."""
        return self.gpus // self.tensor

    @property
    def data_link(self) -> float:
        """Bytes per second that one GPU receives from those that it shares parameters with."""
        if self.gpus <= NODE:
            return NVLINK
        return min(NVLINK, NIC * NODE / self.tensor)  # those of a node pass on to each other what its cards receive


SHAPES = [
    Shape("Llama-3 8B", 32, 4096, 32, 8, 14336, 128256, 8192, sequences=4),
    Shape("Llama-3 70B", 80, 8192, 64, 8, 28672, 128256, 8192, sequences=1),
]
LAYOUTS = [Layout(gpus, tensor) for gpus in (8, 64, 1024) for tensor in (1, 8)]
SMALL_SHAPES = [Shape("a toy", 4, 64, 8, 8, 256, 1024, 256, sequences=2)]
SMALL_LAYOUTS = [Layout(8), Layout(64, 8)]


# --- The model ---


class Block(nn.Module):
    """A layer, as one GPU has it: its share of heads and of the hidden width, between its share of every sequence."""

    def __init__(self, shape: Shape, mesh: DeviceMesh | None) -> None:
        super().__init__()
        ways = 1 if mesh is None else mesh.size()
        self.mesh = mesh
        self.size = shape.width // shape.heads  # of a head
        self.heads, self.kv_heads = shape.heads // ways, max(shape.kv_heads // ways, 1)
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q = nn.Linear(shape.width, self.heads * self.size, bias=False)
        self.k = nn.Linear(shape.width, self.kv_heads * self.size, bias=False)
        self.v = nn.Linear(shape.width, self.kv_heads * self.size, bias=False)
        self.o = nn.Linear(self.heads * self.size, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden // ways, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden // ways, bias=False)
        self.down = nn.Linear(shape.hidden // ways, shape.width, bias=False)

    def _attention(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = turned(self.q(x).view(batch, tokens, self.heads, self.size).transpose(1, 2), rotation)
        k = turned(self.k(x).view(batch, tokens, self.kv_heads, self.size).transpose(1, 2), rotation)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.size).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return result

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """One layer."""
        x = x + scattered(self._attention(gathered(self.norm1(x), self.mesh), rotation), self.mesh)
        inner = gathered(self.norm2(x), self.mesh)
        return x + scattered(self.down(F.silu(self.gate(inner)) * self.up(inner)), self.mesh)


class Llama(nn.Module):
    """Tokens in, loss out."""

    def __init__(self, shape: Shape, mesh: DeviceMesh | None) -> None:
        super().__init__()
        ways = 1 if mesh is None else mesh.size()
        self.mesh = mesh
        self.rows = shape.vocabulary // ways
        self.tokens = nn.Embedding(self.rows, shape.width)
        self.layers = nn.ModuleList(Block(shape, mesh) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, self.rows, bias=False)
        self.register_buffer("rotation", torch.empty(2, shape.tokens, shape.width // shape.heads), persistent=False)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(gathered(self.norm(x), self.mesh))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets % self.rows)

    def forward(self, text: Tensor) -> Tensor:
        """All of it."""
        x = scattered(self.tokens(text % self.rows), self.mesh)
        for layer in self.layers:
            x = layer(x, self.rotation)
        # One sequence's logits at a time: those of all would be the largest tensors of the step.
        losses = [recollect.checkpoint(self._loss, one, two) for one, two in zip(x.split(1), text, strict=True)]
        return torch.stack(losses).mean()


def turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions."""
    cosine, sine = rotation
    left, right = x.chunk(2, -1)
    result: Tensor = x * cosine + torch.cat([-right, left], -1) * sine
    return result


def gathered(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Whole sequences, from the shares that the GPUs of a tensor-parallel group have of them."""
    return x if mesh is None else gather_op(x, 1, mesh)


def scattered(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The sum of what they have computed, in shares."""
    return x if mesh is None else scatter_op(x, "sum", 1, mesh)


# --- What one GPU has and does ---


@contextlib.contextmanager
def meshes(layout: Layout) -> Iterator[tuple[DeviceMesh, DeviceMesh | None]]:
    """A fake process group of the real size, of which this is rank 0: for data, and for tensor parallelism."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("fake", rank=0, world_size=layout.gpus, store=store)
    try:
        mesh = init_device_mesh("cpu", (layout.data, layout.tensor), mesh_dim_names=("data", "tensor"))
        yield mesh["data"], mesh["tensor"] if layout.tensor > 1 else None
    finally:
        distributed.destroy_process_group()


def shards(shape: Shape, data: DeviceMesh, tensor: DeviceMesh | None) -> int:
    """Parameters that one GPU has for good."""
    with torch.device("meta"):
        whole = Llama(shape, tensor)
    for module in (*whole.layers, whole.tokens, whole.norm, whole.head, whole):
        fully_shard(module, mesh=data)
    return sum(parameter.to_local().numel() for parameter in whole.parameters())  # type: ignore[attr-defined]


def as_gathered(shape: Shape, tensor: DeviceMesh | None) -> Llama:
    """The model that one GPU computes with, of which one layer's parameters are there at a time."""
    with torch.device("meta"):
        model = Llama(shape, tensor).to(torch.bfloat16)
    modules = [dict(layer.named_modules()) for layer in model.layers]
    for own, (name, first) in itertools.product(modules[1:], modules[0].items()):
        if "weight" in dict(first.named_parameters(recurse=False)):
            own[name].weight = first.weight
    return model


class Sent(TorchDispatchMode):
    """Bytes that one GPU receives from those that it shares layers with, in the collectives that run under it."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        self.bytes = 0.0
        self._ways = ways

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith("_c10d_functional::") and name.split("::")[1].startswith(("all_gather", "reduce_scatter")):
            whole = result if "all_gather" in name else args[0]
            self.bytes += whole.numel() * whole.element_size() * (self._ways - 1) / self._ways
        return result


@dataclass(frozen=True)
class Row:
    """What comes out for one layout. Bytes and seconds are those of one GPU."""

    layout: Layout
    parameters: int  # of the shards
    layer: int  # parameters of one layer
    plan: recollect.Plan | None = None
    smallest: int = 0  # bytes that would do, where there is no plan
    sent: float = 0.0  # within the tensor-parallel group

    @property
    def states(self) -> int:
        """Parameters, gradients and moments."""
        return STATE * self.parameters

    @property
    def buffers(self) -> int:
        """The next layer's parameters, which come while this one computes, and the gradients of the last, which go."""
        return (2 + 4) * self.layer

    @property
    def peak(self) -> int:
        """All told, under the plan."""
        assert self.plan is not None
        return self.plan.predicted.peak + self.states + self.buffers

    @property
    def adam(self) -> float:
        """Seconds of AdamW's step."""
        return MOVED * self.parameters / HBM / REACHED

    @property
    def compute(self) -> float:
        """Seconds, under the plan."""
        assert self.plan is not None
        return self.plan.predicted.seconds + self.adam

    @property
    def tensor_seconds(self) -> float:
        """In collectives of tensor parallelism."""
        return self.sent / NVLINK / REACHED

    @property
    def data_seconds(self) -> float:
        """Parameters come twice, in bfloat16, and gradients go once, in float32."""
        whole = self.parameters * self.layout.data
        return (2 + 2 + 4) * whole * (self.layout.data - 1) / self.layout.data / self.layout.data_link / REACHED


def row(shape: Shape, layout: Layout, memory: float = MEMORY) -> Row:
    """Plan a step for one of the GPUs."""
    with meshes(layout) as (data, tensor):
        model = as_gathered(shape, tensor)
        found = Row(layout, shards(shape, data, tensor), sum(one.numel() for one in model.layers[0].parameters()))
        text = torch.zeros(shape.sequences * layout.tensor, shape.tokens, dtype=torch.long, device="meta")
        budget, reserve = int(USED * memory), found.states + found.buffers
        try:
            plan = recollect.plan(model, text, budget=budget, reserve=reserve, allow=("recompute",), gpu=GPU)
        except recollect.BudgetError as error:
            return Row(layout, found.parameters, found.layer, smallest=error.smallest)
        sent = Sent(layout.tensor)
        with plan.apply(model), sent:
            model(text).backward()
        return Row(layout, found.parameters, found.layer, plan, 0, sent.bytes)


# --- In words ---


def short(amount: float, digits: int = 2) -> str:
    """A number for people."""
    return f"{amount:,.{digits}f}" if amount >= 0.1 or not amount else f"{amount:.2g}"


def gigabytes(amount: float) -> str:
    """Bytes for people."""
    return short(amount / 1e9, 1)


def span(low: str, high: str) -> str:
    """Between two numbers."""
    return low if low == high else f"{low} to {high}"


def choices(plan: recollect.Plan) -> str:
    """What is decided, block by block in a row."""
    words = []
    for choice, group in itertools.groupby(plan.blocks, key=lambda block: block.choice):
        names = [block.name for block in group]
        first, last = names[0], names[-1]
        words.append(f"`{first}`{f' to `{last}`' if last != first else ''}: {choice}")
    return "; ".join(words)


def table(shape: Shape, rows: list[Row]) -> Iterator[str]:
    """Lines of Markdown."""
    titles = [
        *("GPUs", "tensor-parallel", "states, GB", "buffers, GB", "peak without a plan, GB", "peak, GB"),
        *("compute without a plan, s", "compute, s", "tensor, s", "data, s", "step, s", "tokens/s per GPU"),
    ]
    yield f"| {' | '.join(titles)} |"
    yield f"| {' | '.join(['---:'] * len(titles))} |"
    for one in rows:
        layout, plan = one.layout, one.plan
        cells = [f"{layout.gpus:,}", str(layout.tensor), gigabytes(one.states), gigabytes(one.buffers)]
        if plan is None:
            cells += ["", f"**does not fit**: {gigabytes(one.smallest)} at least", *[""] * 6]
        else:
            own, data, rest = one.compute + one.tensor_seconds, one.data_seconds, one.states + one.buffers
            least, most = max(own, data), own + data
            tokens = shape.sequences * shape.tokens
            cells += [gigabytes(plan.plain.peak + rest), gigabytes(one.peak), short(plan.plain.seconds + one.adam)]
            cells += [short(one.compute), short(one.tensor_seconds), short(data)]
            cells += [span(short(least), short(most)), span(f"{tokens / most:,.0f}", f"{tokens / least:,.0f}")]
        yield f"| {' | '.join(cells)} |"


INTRODUCTION = f"""\
# On many GPUs, on paper

What `recollect.plan` decides for Llama-3 8B and 70B on 8, 64 and 1,024 GPUs ({GPU}), without having one. **Nothing on
this page was measured.** Models are on the meta device, process groups are fake ones of the real size, bytes are
counted and times are a roofline's. It shows what has to be recomputed where, and which of the costs matter; it is no
promise of speed. This page is the output of `python docs/scale.py`, which runs in the tests at a small size.

## What is assumed

- **Sharding**: FSDP2 (`fully_shard`) shards parameters, gradients and AdamW's moments, {STATE} bytes per parameter
  (float32), over all GPUs, or over those that do not share layers by tensor parallelism. The **states** are those of
  rank 0, counted on the shards that `fully_shard` makes.
- **A step**: layers compute in bfloat16 on whole parameters, which are gathered layer by layer for the forward and
  again for backward. One layer's are there at a time, and its gradients: all layers of the model that is planned share
  those of one. (The sum that this makes stands for the copy that FSDP makes.) **Buffers** are the next layer's
  parameters, which are on their way, and a float32 copy of the last layer's gradients, which are leaving. Those of the
  embedding and of the head count as if they were there throughout.
- **The batch**: sequences of {SHAPES[0].tokens:,} tokens, {SHAPES[0].sequences} for each GPU with 8B,
  {SHAPES[1].sequences} with 70B; a tensor-parallel group works on those of all its GPUs. More GPUs mean a larger batch.
  The loss is computed sequence by sequence, each a region, whatever is planned.
- **Tensor parallel** groups lie within a node of {NODE}, with sequence parallelism: between layers a GPU has its share
  of each sequence, gathers whole ones before attention and before the perceptron, and scatters sums after them.
  Autograd saves the whole ones, which is why these steps need more memory than the others where nothing is decided.
- **The budget** is {100 * USED:.0f}% of {MEMORY / 1e9:.0f} GB. States and buffers are its `reserve=`. Only recomputing
  is allowed.
- **Times**: an operator takes what its arithmetic or its memory traffic takes at {100 * REACHED:.0f}% of the data
  sheet. **Compute** is the step under the plan, and AdamW's. **Tensor** and **data** are collectives, by their bytes
  over {NVLINK / 1e9:.0f} GB/s within a node and {NIC / 1e9:.0f} GB/s for each GPU between nodes, likewise at
  {100 * REACHED:.0f}%. Those of tensor parallelism are counted in a step under the plan, because a replay issues them
  again unless their results are kept; they hide behind nothing. Those of the parameters may hide behind everything or
  behind nothing: the **step** is between the two.

## What is left out

- Latency. At 1,024 ranks a ring has 1,023 hops, and each layer's gather waits for them: one would shard over fewer GPUs
  and replicate over the others.
- What the host takes to launch kernels, stragglers, input, the norm of gradients, logging.
- What collectives cost the kernels that run beside them.
- Pipelines, offloading, 8-bit arithmetic; compiled and fused kernels, which need less memory and less traffic.
- The planner does not know links: it takes a collective for a copy on the device, and so keeps the results of fewer of
  them than it should.
- What fragments in the allocator, beyond the {100 * (1 - USED):.0f}% that are set aside.
"""


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description="Prints docs/scale.md")
    parser.add_argument("--small", action="store_true", help="a toy, in seconds")
    small = parser.parse_args().small
    print(INTRODUCTION)
    for shape in SMALL_SHAPES if small else SHAPES:
        rows = []
        for layout in SMALL_LAYOUTS if small else LAYOUTS:
            print(shape.name, layout, file=sys.stderr)
            rows.append(row(shape, layout, 13e6 if small else MEMORY))
        print(f"## {shape.name}\n")
        print("\n".join(table(shape, rows)), end="\n\n")
        print("The plans:\n")
        for one in rows:
            if one.plan is not None:
                print(f"- **{one.layout.gpus:,} GPUs, tensor-parallel {one.layout.tensor}**: {choices(one.plan)}")
        print()


if __name__ == "__main__":
    main()
