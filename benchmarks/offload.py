"""What does offloading cost in a training step?

A Llama-style model of 16 layers, width 2048, MLP 8192, 32 heads and 8 of keys and values, a batch of 4 x 4096 tokens,
bfloat16; the loss is over hidden states, so that the layers are what is measured. It runs plain, with full
checkpointing, with `Recompute(inputs=Offload())` for every layer, with some of the first layers offloaded, about as
much as the link carries meanwhile (and plain, with as many bytes copied beside it by hand), with everything offloaded,
and under PyTorch's own `save_on_cpu`. On a CPU a tiny model only shows that it runs.

All models have the same weights. Contestants run interleaved in one process, in a new random order every round; a visit
is one step that does not count and two that do. Ratios are taken within a round, and their median over the rounds
counts. Peak memory is what a step takes above what was there before it: activations, gradients, the rest. Gradients
are compared with those of the plain model bit for bit, once, with deterministic kernels (attention's backward adds
in any order otherwise).

Beside it stands the physical limit: what the link carries in each direction, alone, in both at once and while the GPU
computes, and the time that it needs for the bytes of "everything".

    python benchmarks/offload.py [--rounds 10] [--quick] [--json offload.json]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as stock
from torch import Tensor, nn

import recollect
from peers import describe_machine, print_table

GIB, GB = 2**30, 1e9
WARM_UP = 3
COUNTED = 2  # steps of a visit
SLOW_EVERY = 4  # save_on_cpu takes part in one of so many rounds
AIM_TIME, AIM_LINK = 1.02, 1.2
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

PLAIN = "plain"
FULL = "full checkpoint, stock"
EVERYTHING = "everything offloaded"
Call = Callable[..., Tensor]


# --- The model ---


@dataclass(frozen=True)
class Sizes:
    layers: int = 16
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    kv_heads: int = 8
    batch: int = 4
    tokens: int = 4096


TINY = Sizes(layers=4, width=64, hidden=256, heads=4, kv_heads=2, batch=2, tokens=32)


class Norm(nn.Module):
    """RMS norm in float32, as Llama has it: it saves the input in float32 and the normalised values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return self.weight * (wide * scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        narrow = sizes.kv_heads * self.head
        self.q, self.out = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(sizes.width, narrow, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class Feed(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(sizes.width), Norm(sizes.width)
        self.attn, self.mlp = Attention(sizes), Feed(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Model(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)
        half = sizes.width // sizes.heads // 2
        angles = torch.outer(torch.arange(sizes.tokens), 10000 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """The loss; `call` calls a layer."""
        for layer in self.layers:
            x = call(layer, x, self.cos, self.sin)
        loss: Tensor = self.norm(x).float().square().mean()
        return loss


def twin(model: Model) -> Model:
    """Another model with the very same weights, for decisions of its own."""
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def saved_bytes(model: Model, x: Tensor) -> int:
    """Of the storages that autograd saves in a plain forward, weights left out."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())}
    held: dict[int, Tensor] = {}  # holds on to the tensors: an address that is free again would count as known

    def pack(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x, directly)
    return sum(one.untyped_storage().nbytes() for address, one in held.items() if address not in weights)


# --- The contestants ---


def directly(layer: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return layer(*args)


@dataclass(frozen=True)
class Contestant:
    forward: Callable[[], Tensor]
    reference: str = ""  # what its time is compared with
    aim: float | None = None
    every: int = 1  # takes part in one of so many rounds


# What the link is given to carry beside a plain step: the first layers, and how many of them that is.
WINDOWS: dict[str, tuple[tuple[str, ...], float]] = {
    "2 layers offloaded": (("layers.0", "layers.1"), 2.0),
    "2 layers and an MLP offloaded": (("layers.0", "layers.1", "layers.2.mlp"), 2.62),
    "3 layers offloaded": (("layers.0", "layers.1", "layers.2"), 3.0),
}


def contestants(model: Model, x: Tensor, in_flight: int) -> dict[str, Contestant]:
    def decided(decisions: dict[str | type[nn.Module], Any]) -> Callable[[], Tensor]:
        own = twin(model)
        recollect.apply(own, decisions)
        return partial(own, x, directly)

    def within(make: Callable[[], Any]) -> Callable[[], Tensor]:
        own = twin(model)

        def forward() -> Tensor:
            with make():
                loss: Tensor = own(x, directly)
            return loss

        return forward

    of_the_window = recollect.Offload(in_flight=in_flight, ahead=in_flight)
    bytes_of_a_layer = saved_bytes(model, x) // len(model.layers)
    windows: dict[str, Contestant] = {}
    for name, (parts, layers) in WINDOWS.items():
        beside = beside_copies(twin(model), x, int(bytes_of_a_layer * layers))
        windows[f"plain, as many bytes copied as with {name}"] = Contestant(beside, PLAIN)
        windows[name] = Contestant(decided(dict.fromkeys(parts, of_the_window)), PLAIN, AIM_TIME)
    save_on_cpu = partial(torch.autograd.graph.save_on_cpu, pin_memory=ON_GPU)
    return {
        PLAIN: Contestant(partial(twin(model), x, directly)),
        FULL: Contestant(partial(twin(model), x, partial(stock.checkpoint, use_reentrant=False)), PLAIN),
        "full checkpoint, recollect": Contestant(decided({"layers.*": recollect.Recompute()}), FULL),
        "full checkpoint, inputs offloaded": Contestant(
            decided({"layers.*": recollect.Recompute(inputs=recollect.Offload())}), FULL, AIM_TIME
        ),
        **windows,
        EVERYTHING: Contestant(within(recollect.offload), PLAIN),
        "everything, stock save_on_cpu": Contestant(within(save_on_cpu), PLAIN, every=SLOW_EVERY),
    }


def beside_copies(model: Model, x: Tensor, size: int) -> Callable[[], Tensor]:
    """A plain step while as many bytes go out from its beginning on, and come back from the beginning of backward on.

    They have nothing to do with it: this is what it costs that memory and the link are shared.
    """
    if not ON_GPU:
        return partial(model, x, directly)
    chunk = 2**28
    device, host = torch.empty(chunk, dtype=torch.uint8, device=DEVICE), torch.empty(chunk, dtype=torch.uint8)
    host = host.pin_memory()
    out, back = torch.cuda.Stream(), torch.cuda.Stream()

    def copy_on(stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for begin in range(0, size, chunk):
                some = min(chunk, size - begin)
                target[:some].copy_(source[:some], non_blocking=True)

    def forward() -> Tensor:
        copy_on(out, device, host)
        loss: Tensor = model(x, directly)
        assert loss.grad_fn is not None
        loss.grad_fn.register_prehook(lambda grads: copy_on(back, host, device))
        return loss

    return forward


# --- Steps ---


def synchronise() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def allocated() -> int:
    """Bytes that nobody else can have: also those that were let go of, and wait for a copy."""
    return torch.cuda.memory_stats()["active_bytes.all.current"] if ON_GPU else 0


def peak_allocated() -> int:
    return torch.cuda.memory_stats()["active_bytes.all.peak"] if ON_GPU else 0


class Bench:
    """Runs steps of contestants over one set of weights."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights  # and the input

    def clear(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def step(self, contestant: Contestant) -> tuple[float, int]:
        """Its seconds, and the bytes at its peak."""
        self.clear()
        synchronise()
        before = allocated()
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        contestant.forward().backward()
        synchronise()
        seconds = time.perf_counter() - start
        return seconds, peak_allocated() - before

    def after_forward(self, contestant: Contestant) -> int:
        """Bytes that are held on the device when the forward is through and all copies have left."""
        self.clear()
        synchronise()
        before = allocated()
        loss = contestant.forward()
        synchronise()
        recollect.offload_stats()
        held = allocated() - before
        loss.backward()
        return held

    def gradients(self, contestant: Contestant) -> list[Tensor]:
        self.clear()
        with deterministic():
            contestant.forward().backward()
        found = [weight.grad for weight in self.weights]
        self.clear()
        return [grad for grad in found if grad is not None]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


# --- Measuring ---


@dataclass
class Measured:
    seconds: dict[int, float] = field(default_factory=dict)  # by round
    peak: int = 0
    after_forward: int = 0
    steps: int = 0  # after the warm-up, those that do not count for the time with them
    stats: dict[str, float] = field(default_factory=dict)  # what those steps added to the library's statistics

    def per_step(self, name: str) -> float:
        return self.stats[name] / self.steps

    @property
    def copies(self) -> bool:
        return any(self.stats[name] for name in ("bytes_out", "bytes_in", "bytes_stayed"))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds.values())

    @property
    def hit_rate(self) -> float | None:
        asked = self.stats["prefetch_hits"] + self.stats["prefetch_misses"]
        return self.stats["prefetch_hits"] / asked if asked else None

    def over(self, other: Measured) -> float:
        """The median of the ratios within a round."""
        both = self.seconds.keys() & other.seconds.keys()
        return statistics.median(self.seconds[one] / other.seconds[one] for one in both)

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "median": self.median}


COUNTS = (
    "bytes_out",
    "bytes_in",
    "bytes_stayed",
    "waited_seconds",
    "pinned_allocations",
    "prefetch_hits",
    "prefetch_misses",
)


def counts() -> dict[str, float]:
    stats = recollect.offload_stats()
    return {name: getattr(stats, name) for name in COUNTS}


def warm_up(bench: Bench, racing: dict[str, Contestant]) -> tuple[dict[str, Measured], list[str]]:
    """Warm up each contestant and see what its forward holds; who has other gradients than the plain model?"""
    measured, differ = {}, []
    expected: list[Tensor] = []
    for name, contestant in racing.items():
        for _ in range(WARM_UP):
            bench.step(contestant)
        found = bench.gradients(contestant)
        if name == PLAIN:
            expected, found = found, bench.gradients(contestant)  # two plain steps, if the kernels are deterministic
        if not same(found, expected):
            differ.append(name)
        measured[name] = Measured(after_forward=bench.after_forward(contestant))
        bench.step(contestant)
        del found
        gc.collect()
    return measured, differ


def print_verdict(number: int, differ: list[str]) -> None:
    if PLAIN in differ:
        print("Two plain steps give different gradients, so that no others can be compared with them.\n")
    elif differ:
        print(f"WRONG: other gradients than the plain ones: {'; '.join(differ)}.\n")
    else:
        print(f"Gradients of all {number} contestants equal the plain ones bit for bit.\n")


def measure(bench: Bench, racing: dict[str, Contestant], measured: dict[str, Measured], rounds: int) -> None:
    gc.freeze()  # a collection in the middle of a step need not go through all of torch's own objects
    for number in range(rounds):
        order = [name for name, one in racing.items() if number % one.every == 0]
        random.shuffle(order)
        for name in order:
            gc.collect()
            one, before = measured[name], counts()
            steps = [bench.step(racing[name]) for _ in range(1 + COUNTED)]
            one.steps += len(steps)
            for key, value in counts().items():
                one.stats[key] = one.stats.get(key, 0) + value - before[key]
            one.seconds[number] = statistics.median(seconds for seconds, _ in steps[1:])
            one.peak = max(one.peak, *(peak for _, peak in steps[1:]))
    gc.unfreeze()


# --- The link ---


@dataclass(frozen=True)
class Link:
    """Bytes per second. `out` is from the device to the host."""

    out: float
    back: float
    both_out: float
    both_back: float
    computing_out: float
    computing_back: float
    slowdown: float  # of the computation, by copies in both directions


def measure_link(size: int = 2**28, copies: int = 16) -> Link:
    device = torch.empty(2, size, dtype=torch.uint8, device="cuda")
    host = torch.empty(2, size, dtype=torch.uint8, pin_memory=True)
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def seconds_of(work: Callable[[], Any], stream: torch.cuda.Stream) -> Callable[[], float]:
        """Start the work on a stream; what comes back waits for it and gives its time."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record()
            work()
            end.record()

        def wait() -> float:
            end.synchronize()
            milliseconds: float = start.elapsed_time(end)
            return milliseconds / 1e3

        return wait

    def copy_out() -> None:
        for _ in range(copies):
            host[0].copy_(device[0], non_blocking=True)

    def copy_back() -> None:
        for _ in range(copies):
            device[1].copy_(host[1], non_blocking=True)

    def compute() -> None:
        for _ in range(80):  # about as long as the copies
            torch.mm(factor, factor)

    def rates(*directions: Callable[[], None], computing: bool = False) -> tuple[list[float], float]:
        """Bytes per second in each direction; seconds of the computation beside it."""
        torch.cuda.synchronize()
        beside = seconds_of(compute, torch.cuda.current_stream()) if computing else lambda: 0.0
        waits = [seconds_of(one, stream) for one, stream in zip(directions, streams, strict=False)]
        return [size * copies / wait() for wait in waits], beside()

    for _ in range(2):  # the first time warms up
        (out,), _ = rates(copy_out)
        (back,), _ = rates(copy_back)
        (both_out, both_back), _ = rates(copy_out, copy_back)
        (computing_out,), _ = rates(copy_out, computing=True)
        (computing_back,), _ = rates(copy_back, computing=True)
        _, alone = rates(computing=True)
        _, beside = rates(copy_out, copy_back, computing=True)
    return Link(out, back, both_out, both_back, computing_out, computing_back, beside / alone)


# --- Showing ---


def print_times(racing: dict[str, Contestant], measured: dict[str, Measured]) -> None:
    rows = []
    for name, one in measured.items():
        contestant = racing[name]
        ratio = f"{one.over(measured[contestant.reference]):.3f}" if contestant.reference else ""
        aim = "" if contestant.aim is None else f"at most {contestant.aim:g}"
        memory = [f"{value / GIB:.1f}" if ON_GPU else "" for value in (one.after_forward, one.peak)]
        rows.append([name, f"{1e3 * one.median:.1f}", ratio, contestant.reference, aim, *memory])
    print_table(["", "ms per step", "times", "that of", "aim", "GiB after the forward", "GiB at the peak"], rows)
    print()


def print_copies(measured: dict[str, Measured]) -> None:
    rows = []
    for name, one in measured.items():
        if one.copies:
            moved = [f"{one.per_step(key) / GIB:.2f}" for key in ("bytes_out", "bytes_in", "bytes_stayed")]
            waited = [f"{1e3 * one.per_step(key):.1f}" for key in ("waited_seconds",)]
            hits = "" if one.hit_rate is None else f"{one.hit_rate:.3f}"
            allocations = f"{one.stats['pinned_allocations']:g} in {one.steps}"
            rows.append([name, *moved, *waited, hits, allocations])
    if not rows:
        print("Nothing was offloaded: without an accelerator everything is on the host already.\n")
        return
    header = ["per step", "GiB out", "GiB in", "GiB stayed", "ms GPU waited", "prefetch hits"]
    print_table([*header, "pinned allocations in steps"], rows)
    print("\nThe aim is that no step after the warm-up allocates pinned memory.\n")


def print_link(link: Link) -> None:
    print_table(
        ["GB/s over the link", "out", "in"],
        [
            ["alone", f"{link.out / GB:.1f}", f"{link.back / GB:.1f}"],
            ["both at once", f"{link.both_out / GB:.1f}", f"{link.both_back / GB:.1f}"],
            ["while the GPU computes", f"{link.computing_out / GB:.1f}", f"{link.computing_back / GB:.1f}"],
        ],
    )
    print(f"\nMatrix products take {link.slowdown:.3f} times as long beside copies in both directions.\n")


def print_limit(link: Link, measured: dict[str, Measured]) -> dict[str, float]:
    """What the link needs for everything, and how the measured steps compare with it."""
    one, plain = measured[EVERYTHING], measured[PLAIN]
    needed = one.per_step("bytes_out") / link.out + one.per_step("bytes_in") / link.back
    limit = max(needed, plain.median)
    rows = [
        [name, f"{1e3 * measured[name].median:.1f}", f"{measured[name].median / limit:.3f}", aim]
        for name, aim in ((EVERYTHING, f"at most {AIM_LINK:g}"), ("everything, stock save_on_cpu", ""))
        if name in measured
    ]
    print(
        f"For the bytes of everything offloaded the link needs {1e3 * needed:.1f} ms, a plain step takes "
        f"{1e3 * plain.median:.1f} ms. The longer of the two is the limit, one direction after the other.\n"
    )
    print_table(["", "ms per step", "times the limit", "aim"], rows)
    print()
    return {"needed": needed, "limit": limit, "ratio": one.median / limit}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="three rounds at most")
    parser.add_argument(
        "--window-in-flight",
        type=float,
        metavar="GIB",
        default=6.0,
        help="the bounds on what is in flight and ahead for the first layers, in GiB",
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only contestants with one of these in their names")
    parser.add_argument("--json", help="also write the numbers to this file")
    return parser.parse_args()


def chosen(racing: dict[str, Contestant], words: list[str] | None) -> dict[str, Contestant]:
    """Those with one of the words in their names, and what they are compared with."""
    if words is None:
        return racing
    names = {name for name in racing if any(word in name for word in words)}
    wanted = names | {racing[name].reference for name in names} | {PLAIN, FULL}
    return {name: one for name, one in racing.items() if name in wanted}


def main() -> None:
    options = parse()
    # Before anything runs on the GPU: cuBLAS is deterministic with it; it is as much as torch takes by itself.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(0)
    sizes, dtype = (Sizes(), torch.bfloat16) if ON_GPU else (TINY, torch.float32)
    rounds = min(options.rounds, 3) if options.quick else options.rounds
    in_flight = int(options.window_in_flight * GIB)

    model = Model(sizes).to(DEVICE, dtype)
    x = torch.randn(sizes.batch, sizes.tokens, sizes.width, device=DEVICE, dtype=dtype, requires_grad=True)
    racing = chosen(contestants(model, x, in_flight), options.only)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    saved = saved_bytes(model, x)
    print(describe_machine())
    print(f"{sizes}, {dtype}; weights {weights / GIB:.3f} GiB, saved by a plain forward {saved / GIB:.3f} GiB")

    bench = Bench([*model.parameters(), x])
    measured, differ = warm_up(bench, racing)
    print_verdict(len(racing), differ)
    measure(bench, racing, measured, rounds)
    print_times(racing, measured)
    print_copies(measured)
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "sizes": dataclasses.asdict(sizes),
        "saved_bytes": saved,
        "gradients_differ": differ,
        "steps": {name: one.as_json() for name, one in measured.items()},
    }
    if ON_GPU:
        link = measure_link()
        found["link"] = dataclasses.asdict(link)
        print_link(link)
        if EVERYTHING in measured:
            found["everything"] = print_limit(link, measured)
    else:
        print("The link is left out: it needs a GPU.")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    if differ and PLAIN not in differ:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
