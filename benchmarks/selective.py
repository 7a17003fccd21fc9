"""What does it cost to keep some things and recompute others?

1. Per operator: a chain of `sin` on 8 floats as one region, one thread. What a policy over operators adds to plain
   checkpointing, per operator, with all outputs kept or none.
2. Per named region: a chain of 50 regions of one `sin` each; what a call adds to plain checkpointing. That of a kept
   region is the whole of it, with the hooks and the operator that its replay leaves out taken off.
3. On a GPU, a Llama-style model of 24 layers, hidden size 512, batch 1, 256 tokens, bound by the CPU: time of a step
   with attention kept, and with matrix products and attention kept; and the peak memory with a batch of 8 x 2048, where
   activations and not gradients make the peak.

Contestants run interleaved in one process, in a new random order every round.

    python benchmarks/selective.py [--rounds 60] [--json selective.json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as stock
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from peers import describe_machine, print_table
from recollect import dropin, policies

SIN, MM = torch.ops.aten.sin.default, torch.ops.aten.mm.default
LENGTHS = (4, 104)
CALLS = 50
VISIT = 3
Checkpoint = Callable[..., Tensor]

stock_checkpoint = partial(stock.checkpoint, use_reentrant=False)
our_checkpoint = partial(dropin.checkpoint, use_reentrant=False)


def interleaved(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median seconds of each step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for round_number in range(rounds + 3):
        random.shuffle(order)
        for name in order:
            seconds = statistics.median(steps[name]() for _ in range(VISIT))
            if round_number >= 3:  # the first rounds warm up
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def timed(call: Checkpoint, function: Callable[[Tensor], Tensor]) -> float:
    x, grad = torch.ones(8, requires_grad=True), torch.ones(8)
    start = time.perf_counter()
    call(function, x).backward(grad)
    return time.perf_counter() - start


# --- Per operator ---


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def chain(n: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for _ in range(n):
            x = x.sin()
        return x

    return run


CHAINS = {n: chain(n) for n in LENGTHS}


def keep_none(module: Any) -> Callable[..., Any]:
    return lambda ctx, op, *args, **kwargs: module.CheckpointPolicy.PREFER_RECOMPUTE


def keep_all(module: Any) -> Callable[..., Any]:
    return lambda ctx, op, *args, **kwargs: module.CheckpointPolicy.MUST_SAVE


def with_contexts(checkpoint: Checkpoint, make: Callable[[], Any]) -> Checkpoint:
    return partial(checkpoint, context_fn=make)


def operator_contestants() -> dict[str, tuple[Checkpoint, str, str]]:
    """Name -> how to call it, whose plain checkpointing it adds to, whose addition it is compared with."""
    ours, theirs = dropin.create_selective_checkpoint_contexts, stock.create_selective_checkpoint_contexts
    nothing_kept = recollect.save_ops(MM)
    nothing_kept.settled = True  # or it says once that it matches nothing
    rows: dict[str, tuple[Checkpoint, str, str]] = {
        "stock": (stock_checkpoint, "", ""),
        "recollect": (our_checkpoint, "", ""),
        "two modes that do nothing": (with_contexts(our_checkpoint, lambda: (Nothing(), Nothing())), "recollect", ""),
    }
    for kind, operators, function in (("none kept", [MM], keep_none), ("all kept", [SIN], keep_all)):
        listed, asked = f"stock, list, {kind}", f"stock, function, {kind}"
        native = nothing_kept if kind == "none kept" else recollect.save_ops(SIN)
        rows |= {
            listed: (with_contexts(stock_checkpoint, partial(theirs, operators)), "stock", listed),
            asked: (with_contexts(stock_checkpoint, partial(theirs, function(stock))), "stock", asked),
            f"recollect, list, {kind}": (with_contexts(our_checkpoint, partial(ours, operators)), "recollect", listed),
            f"recollect, function, {kind}": (
                with_contexts(our_checkpoint, partial(ours, function(dropin))),
                "recollect",
                asked,
            ),
            f"recollect, save_ops, {kind}": (partial(recollect.checkpoint, policy=native), "recollect", listed),
        }
    return rows


def per_operator(rounds: int) -> dict[str, dict[str, float]]:
    rows = operator_contestants()
    steps = {f"{name} {n}": partial(timed, call, CHAINS[n]) for name, (call, _, _) in rows.items() for n in LENGTHS}
    times = interleaved(steps, rounds)
    short, long = LENGTHS
    slope = {name: (times[f"{name} {long}"] - times[f"{name} {short}"]) / (long - short) * 1e6 for name in rows}
    added = {name: slope[name] - slope[base] for name, (_, base, _) in rows.items() if base}
    found = {}
    for name, (_, base, peer) in rows.items():
        if base:
            found[name] = {"added": added[name], "ratio": added[name] / added[peer] if peer else float("nan")}
    return found


# --- Per named region ---


def regions(part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for _ in range(CALLS):
            x = part(x)
        return x.sin()

    return run


def per_region(rounds: int) -> dict[str, float]:
    plain, named = regions(torch.sin), regions(recollect.region("part", torch.sin))
    kept = recollect.by_name({"part": recollect.Save()})
    recomputed = recollect.by_name({"part": recollect.Recompute()})
    steps = {
        "plain": partial(timed, recollect.checkpoint, plain),
        "no policy": partial(timed, recollect.checkpoint, named),
        "recomputed": partial(timed, partial(recollect.checkpoint, policy=recomputed), named),
        "kept": partial(timed, partial(recollect.checkpoint, policy=kept), named),
    }
    times = interleaved(steps, rounds)
    return {name: (times[name] - times["plain"]) / CALLS * 1e6 for name in steps if name != "plain"}


# --- A model ---


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = recollect.region("sdpa", F.scaled_dot_product_attention)(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + recollect.region("attn", self.attention)(self.norms[0](x), cos, sin)
        h = self.norms[1](x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class Model(nn.Module):
    def __init__(
        self, layers: int = 24, width: int = 512, heads: int = 8, tokens: int = 256, words: int = 1000
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        angles = torch.outer(torch.arange(tokens), 10000 ** -torch.linspace(0, 1, width // heads // 2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, words: Tensor, checkpoint: Checkpoint) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = checkpoint(layer, x, self.cos, self.sin)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


ATTENTION = list(policies.save_attention.table or ())
PRODUCTS_TOO = ATTENTION + list(policies.save_matmuls.table or ())


def model_contestants() -> dict[str, Checkpoint]:
    theirs, ours = stock.create_selective_checkpoint_contexts, dropin.create_selective_checkpoint_contexts
    products_too = policies.save_attention | policies.save_matmuls
    by_name = {name: recollect.by_name({name: recollect.Save()}) for name in ("attn", "attn/sdpa")}
    native = recollect.checkpoint
    return {
        "no checkpointing": lambda function, *args: function(*args),
        "stock": stock_checkpoint,
        "recollect": our_checkpoint,
        "stock, attention by operator": partial(stock_checkpoint, context_fn=partial(theirs, ATTENTION)),
        "recollect drop-in, attention by operator": partial(our_checkpoint, context_fn=partial(ours, ATTENTION)),
        "recollect, attention by operator": partial(native, policy=policies.save_attention),
        "recollect, attention kernel by name": partial(native, policy=by_name["attn/sdpa"]),
        "recollect, attention block by name": partial(native, policy=by_name["attn"]),
        "stock, products and attention": partial(stock_checkpoint, context_fn=partial(theirs, PRODUCTS_TOO)),
        "recollect, products and attention": partial(native, policy=products_too),
    }


def on_a_model(rounds: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    model = Model().to("cuda", torch.bfloat16)
    words = torch.randint(0, 1000, (1, 256), device="cuda")

    def step(checkpoint: Checkpoint) -> float:
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(words, checkpoint).backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    contestants = model_contestants()
    times = interleaved({name: partial(step, call) for name, call in contestants.items()}, rounds)
    model = Model(tokens=2048).to("cuda", torch.bfloat16)
    words = torch.randint(0, 1000, (8, 2048), device="cuda")

    def peak(checkpoint: Checkpoint) -> float:
        for _ in range(2):  # the first step learns which outputs of named regions no replay asks for
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            model(words, checkpoint).backward()
            torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    peaks = {name: peak(call) for name, call in contestants.items()}
    return {name: {"ms": times[name] * 1e3, "peak MiB": peaks[name]} for name in contestants}


def print_model(found: dict[str, dict[str, float]]) -> None:
    rows: Sequence[Sequence[str]] = [
        [
            name,
            f"{cost['ms']:.1f}",
            f"{cost['ms'] / found['stock']['ms']:.2f}",
            f"{cost['ms'] / found['recollect']['ms']:.2f}",
            f"{cost['peak MiB']:.1f}",
        ]
        for name, cost in found.items()
    ]
    print_table(["", "ms per step", "of stock's", "of recollect's", "peak MiB, 8 x 2048 tokens"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": describe_machine()}
    operators = found["operators"] = per_operator(options.rounds)
    rows = [
        [name, f"{cost['added']:.1f}", "" if cost["ratio"] != cost["ratio"] else f"{cost['ratio']:.2f}"]
        for name, cost in operators.items()
    ]
    print_table(["", "us added per operator", "of stock's"], rows)
    print()
    calls = found["regions"] = per_region(options.rounds)
    print_table(["a named region that is", "us added per call"], [[name, f"{us:.1f}"] for name, us in calls.items()])
    print()
    if torch.cuda.is_available():
        found["model"] = on_a_model(options.rounds)
        print_model(found["model"])
    else:
        print("The model is left out: it needs a GPU")
    print(describe_machine())
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
