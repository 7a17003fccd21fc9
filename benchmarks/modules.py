"""What does `recollect.apply` cost: once, for a model of 100 layers, and at every call of a decided layer?

The same model is run by hand (`recollect.checkpoint(layer, x)` in its forward; the kept part as a named region) and
decided by `apply`. Layers are as small as they can be, and there are many, so that the difference per layer shows;
the contestants run interleaved in one process, in a new random order every round, and the median over the rounds of
the difference within a round counts. It is the time of the process on one core, because a few microseconds do not show
in what a clock says on a machine that others use too.

    python benchmarks/modules.py [--rounds 100]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import recollect
from peers import describe_machine, print_table

LAYERS = 100
AIM_MS = 50.0
AIM_US = 5.0
KEEP = recollect.by_name({"attn": recollect.Save()})
Step = Callable[[], float]


# --- Once ---


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q(x) * self.k(x) * self.v(x))
        return y


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(2), nn.LayerNorm(2)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Dropout(0.1), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


DECISIONS: dict[str, dict[str | type[nn.Module], recollect.Save | recollect.Recompute | recollect.Offload]] = {
    "one pattern": {"layers.*": recollect.Recompute()},
    "four patterns": {
        "layers.*": recollect.Recompute(),
        "layers.*.attn": recollect.Save(),
        "layers.3": recollect.Save(),
        "layers.*.mlp": recollect.Recompute(policy=recollect.policies.save_matmuls),
    },
    "every module, by `**`, and linear layers by class": {"**": recollect.Recompute(), nn.Linear: recollect.Save()},
}


def time_apply(rounds: int) -> list[list[str]]:
    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    rows = []
    for name, decisions in DECISIONS.items():
        on, off = [], []
        for _ in range(rounds):
            start = time.process_time()
            handle = recollect.apply(model, decisions)
            middle = time.process_time()
            handle.remove()
            off.append(time.process_time() - middle)
            on.append(middle - start)
        rows.append([name, f"{statistics.median(on) * 1e3:.1f}", f"{statistics.median(off) * 1e3:.1f}"])
    print(f"{LAYERS} layers, {len(list(model.modules()))} modules; the aim is at most {AIM_MS:g} ms\n")
    return rows


# --- At every call ---


class Small(nn.Module):
    """A layer of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.act = nn.Tanh(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.attn(x))
        return y


class Named(Small):
    """The same, its first part a named region."""

    def __init__(self) -> None:
        super().__init__()
        self.part = recollect.region("attn", self.attn)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.part(x))
        return y


def chain(layers: nn.ModuleList, call: Callable[[nn.Module, Tensor], Tensor]) -> Step:
    def step() -> float:
        x = torch.ones(8, requires_grad=True)
        start = time.process_time()
        y = x
        for layer in layers:
            y = call(layer, y)
        y.backward(torch.ones(8))
        return time.process_time() - start

    return step


def decided(kind: type[nn.Module], **decisions: recollect.Save | recollect.Recompute) -> Step:
    layers = nn.ModuleList(kind() for _ in range(LAYERS))
    recollect.apply(layers, {"*": recollect.Recompute(), **{f"*.{name}": one for name, one in decisions.items()}})
    return chain(layers, lambda layer, x: layer(x))


def by_hand(kind: type[nn.Module], policy: recollect.policy.Policy | None = None) -> Step:
    layers = nn.ModuleList(kind() for _ in range(LAYERS))
    return chain(layers, lambda layer, x: recollect.checkpoint(layer, x, policy=policy))


def time_calls(rounds: int) -> list[list[str]]:
    steps = {
        "a layer, by hand": by_hand(Small),
        "a layer, decided": decided(Small),
        "a layer with a kept part, by hand": by_hand(Named, KEEP),
        "a layer with a kept part, decided": decided(Small, attn=recollect.Save()),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for round_ in range(rounds + 5):
        random.shuffle(order)
        for name in order:
            took = min(steps[name]() for _ in range(2)) / LAYERS
            if round_ >= 5:
                times[name].append(took)
    rows = []
    for name in steps:
        hand = name.replace("decided", "by hand")
        more = statistics.median(one - other for one, other in zip(times[name], times[hand], strict=True))
        added = "" if name == hand else f"{more * 1e6:+.1f}"
        rows.append([name, f"{statistics.median(times[name]) * 1e6:.1f}", added])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(describe_machine())
    print_table(["decisions", "ms for apply", "ms for remove"], time_apply(max(5, rounds // 10)))
    print(f"\nForward and backward of a layer; the aim is at most {AIM_US:g} us more than by hand\n")
    print_table(["", "us per layer", "us more than by hand"], time_calls(rounds))


if __name__ == "__main__":
    main()
