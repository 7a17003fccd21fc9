"""Does a plan hold its budget, and what does the memory cost in time?

The Llama-style model of `offload.py` (16 layers on a GPU, a tiny one on a CPU) is planned for three budgets, and raced
against itself plain, fully checkpointed, and selectively checkpointed by PyTorch's own means. `--models` names others:
a ViT, a network like ResNet-50 and a U-Net.

Bytes are those at the peak of a step above weights and gradients, as the allocator counts them (`max_memory_allocated`;
on a CPU, storages). Budgets are shares of what the plain step takes. Plans are made as a user makes them, by
`recollect.plan`, each with a measured step of its own; what that takes stands in the last column. Contestants run
interleaved in one process, in a new random order every round; ratios are taken within a round.

    python benchmarks/fit.py [--rounds 8] [--shares 71 47 26] [--allow recompute offload]
                             [--models llama vit resnet unet] [--json fit.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as stock
from torch import Tensor, nn

import recollect
from offload import DEVICE, GIB, ON_GPU, TINY, Model, Sizes, directly
from peers import describe_machine, print_table
from recollect._meters import meter_of

Forward = Callable[[], Tensor]
UNIT, UNIT_NAME = (GIB, "GiB") if ON_GPU else (2**20, "MiB")


# --- Models ---


class Vit(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, patch: int, size: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        layer = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, 0.0, F.gelu, batch_first=True)
        self.layers = nn.ModuleList(layer(norm_first=True) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x.mean(1))
        return result


class Bottleneck(nn.Module):
    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(wide, narrow, 1, bias=False), nn.Conv2d(narrow, 4 * narrow, 1, bias=False)
        self.mix = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (narrow, narrow, 4 * narrow))
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and wide == 4 * narrow
        self.beside = nn.Identity() if same else nn.Conv2d(wide, 4 * narrow, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norms[0](self.down(x)))
        y = self.relu(self.norms[1](self.mix(y)))
        result: Tensor = self.relu(self.norms[2](self.up(y)) + self.beside(x))
        return result


class ResNet(nn.Module):
    def __init__(self, width: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, wide = [], width
        for stage, depth in enumerate(depths):
            narrow = width * 2**stage
            for number in range(depth):
                blocks.append(Bottleneck(wide, narrow, 2 if number == 0 and stage else 1))
                wide = 4 * narrow
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(wide, 1000)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return result


class Twice(nn.Sequential):
    def __init__(self, wide: int, width: int) -> None:
        layers: list[nn.Module] = []
        for channels in (wide, width):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
        super().__init__(*layers)


class Unet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Twice(a, b) for a, b in zip([width, *widths], widths[:-1], strict=False))
        self.middle = Twice(widths[-2], widths[-1])
        self.up = nn.ModuleList(Twice(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.first(x), []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        result: Tensor = self.last(x)
        return result


@dataclass(frozen=True)
class Subject:
    """A model, its batch, its step, and the names of the blocks that others would checkpoint."""

    name: str
    model: nn.Module
    batch: Any
    step: Callable[[Any, Any], Tensor]
    blocks: list[str]


def llama() -> Subject:
    sizes, dtype = (Sizes(), torch.bfloat16) if ON_GPU else (TINY, torch.float32)
    model = Model(sizes).to(DEVICE, dtype)
    x = torch.randn(sizes.batch, sizes.tokens, sizes.width, device=DEVICE, dtype=dtype, requires_grad=True)
    blocks = [f"layers.{number}" for number in range(sizes.layers)]
    return Subject("Llama-style", model, x, lambda model, x: model(x, directly), blocks)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def of_images(title: str, model: nn.Module, blocks: list[str], batch: int, size: int) -> Subject:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x = torch.randn(batch, 3, size, size, device=DEVICE, dtype=dtype)
    return Subject(title, model.to(DEVICE, dtype), x, mean_square, blocks)


def vit() -> Subject:
    model = Vit(24, 1024, 16, 14, 224) if ON_GPU else Vit(6, 64, 4, 8, 32)
    blocks = [f"layers.{n}" for n in range(len(model.layers))]
    return of_images("ViT", model, blocks, *((128, 224) if ON_GPU else (4, 32)))


def resnet() -> Subject:
    model = ResNet(64, (3, 4, 6, 3)) if ON_GPU else ResNet(8, (2, 2, 2))
    blocks = [f"blocks.{n}" for n in range(len(model.blocks))]
    return of_images("ResNet", model, blocks, *((256, 224) if ON_GPU else (4, 64)))


def unet() -> Subject:
    model = Unet(64, 4) if ON_GPU else Unet(8, 2)
    blocks = [*(f"down.{n}" for n in range(len(model.down))), "middle", *(f"up.{n}" for n in range(len(model.up)))]
    return of_images("U-Net", model, blocks, *((16, 512) if ON_GPU else (2, 32)))


SUBJECTS: dict[str, Callable[[], Subject]] = {"llama": llama, "vit": vit, "resnet": resnet, "unet": unet}


# --- Contestants ---


@dataclass
class Contestant:
    name: str
    enter: Callable[[], Any]  # what is in force around its steps: a context manager
    budget: int | None = None
    planned_in: float = 0.0
    predicted: int = 0
    seconds: list[float] = field(default_factory=list)
    peak: int = 0


class Patched:
    """Some blocks of a model called through PyTorch's own checkpoint, by their `forward`."""

    def __init__(self, model: nn.Module, names: list[str], **options: Any) -> None:
        self._modules = [model.get_submodule(name) for name in names]
        self._options = options

    def __enter__(self) -> None:
        for module in self._modules:
            module.forward = partial(stock.checkpoint, module.forward, use_reentrant=False, **self._options)

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            del module.forward


def selective(operators: list[Any]) -> dict[str, Any]:
    return {"context_fn": partial(stock.create_selective_checkpoint_contexts, operators)}


ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]


class Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def contestants(subject: Subject, shares: list[float], allow: list[str], fixed: int, plain: int) -> list[Contestant]:
    model, blocks = subject.model, subject.blocks
    found = [
        Contestant("plain", Nothing),
        Contestant("full, stock", partial(Patched, model, blocks)),
        Contestant("every other block, stock", partial(Patched, model, blocks[::2])),
        Contestant("every third kept, stock", partial(Patched, model, [b for n, b in enumerate(blocks) if n % 3])),
        Contestant("attention kept, stock", partial(Patched, model, blocks, **selective(ATTENTION))),
        Contestant(
            "products and attention kept, stock", partial(Patched, model, blocks, **selective(ATTENTION + PRODUCTS))
        ),
    ]
    for share in shares:
        budget = fixed + int((plain - fixed) * share / 100)
        start = time.perf_counter()
        try:
            plan = recollect.plan(model, subject.batch, budget=budget, step=subject.step, allow=allow)
        except ValueError as error:
            print(f"{subject.name} at {share:g}%: {error}\n")
            continue
        took = time.perf_counter() - start
        print(plan, "\n")
        name = f"recollect.plan, {share:g}%"
        found.append(Contestant(name, partial(plan.apply, model), budget, took, plan.predicted.peak))
    return found


class Race:
    """Steps of contestants over one model."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._weights = [*subject.model.parameters()]
        tensors = [*self._weights, *subject.model.buffers(), subject.batch]
        self._meter = meter_of(torch.device(DEVICE), tensors)

    def fixed(self) -> int:
        """Weights, buffers, the batch and gradients: what no plan can change."""
        self.clear()
        inputs = [self._subject.batch] if self._subject.batch.requires_grad else []
        gradients: int = sum(one.numel() * one.element_size() for one in (*self._weights, *inputs))
        return self._meter.now() + gradients

    def clear(self) -> None:
        for weight in (*self._weights, self._subject.batch):
            weight.grad = None

    def step(self) -> None:
        self._subject.step(self._subject.model, self._subject.batch).backward()

    def timed(self) -> float:
        self.clear()
        synchronise()
        start = time.perf_counter()
        self.step()
        synchronise()
        return time.perf_counter() - start

    def peak(self) -> int:
        self.clear()
        with self._meter.watching():
            self._meter.reset()
            self.step()
            return self._meter.peak()

    def run(self, racing: list[Contestant], rounds: int) -> None:
        for number in range(rounds + 1):
            order = list(racing)
            random.shuffle(order)
            for one in order:
                with one.enter():
                    for _ in range(3 if number == 0 else 1):
                        self.timed()  # does not count: it comes after another contestant's
                    if number == 0:
                        one.peak = self.peak()
                    else:
                        one.seconds.append(statistics.median(self.timed() for _ in range(2)))


def synchronise() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def report(subject: Subject, racing: list[Contestant], fixed: int) -> dict[str, Any]:
    plain = racing[0]
    rows, data = [], {}
    for one in racing:
        ratio = statistics.median(a / b for a, b in zip(one.seconds, plain.seconds, strict=True))
        above, of = one.peak - fixed, (one.peak - fixed) / (plain.peak - fixed)
        row = [
            one.name,
            f"{above / UNIT:.2f}",
            f"{of:.2f}",
            f"{1e3 * statistics.median(one.seconds):.1f}",
            f"{ratio:.3f}",
        ]
        if one.budget is None:
            row += ["", "", ""]
        else:
            row += [
                f"{(one.budget - fixed) / UNIT:.2f}",
                f"{(one.predicted - fixed) / UNIT:.2f}",
                f"{one.planned_in:.0f}",
            ]
        rows.append(row)
        data[one.name] = {"bytes": above, "seconds": one.seconds, "ratio": ratio, "budget": one.budget}
        if one.budget is not None and one.peak > one.budget:
            print(f"OVER BUDGET: {one.name} takes {one.peak} bytes, and may take {one.budget}")
    print(f"{subject.name}; above weights and gradients ({fixed / UNIT:.2f} {UNIT_NAME}):\n")
    heading = [UNIT_NAME, "of plain", "ms per step", "of plain", "budget", "predicted", "s to plan"]
    print_table(["", *heading], rows)
    print()
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="+", default=[71, 47, 26], help="budgets, in percent of plain")
    parser.add_argument("--allow", nargs="+", default=["recompute", "offload"])
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=["llama"])
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.manual_seed(0)
    if not ON_GPU:
        torch.set_num_threads(1)
    print(describe_machine(), "\n")
    everything = {}
    for name in options.models:
        subject = SUBJECTS[name]()
        race = Race(subject)
        fixed = race.fixed()
        race.step()
        plain = race.peak()
        racing = contestants(subject, options.shares, options.allow, fixed, plain)
        race.run(racing, options.rounds)
        everything[subject.name] = report(subject, racing, fixed)
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"machine": describe_machine(), "models": everything}, file, indent=1)


if __name__ == "__main__":
    main()
