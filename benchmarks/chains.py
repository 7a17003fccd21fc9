"""What do long chains cost?

Two questions.

**Overhead**, over calling the step by hand: per forward that runs without a graph, and per step that is differentiated
(run with a graph, and backward through it). By hand is a loop without grad, and `detach`, the step and `backward` in a
loop. A chain of 1,000 steps is run with 4 and with 40 slots, which differ in the number of forwards alone: two
equations for the two numbers.

**Time and peak bytes** of an LSTM, a neural ODE (RK4 over a small MLP) and a 1-D wave equation, for 100, 1,000 and
10,000 steps: plain; `checkpoint_sequential` of PyTorch at the number of segments with which it takes the fewest bytes;
the schedules of `checkpoint_schedules` (PyPI) driven by hand, where it is installed; and recollect, with several
numbers of slots. Bytes are those of storages that are alive, followed by a dispatch mode in runs of their own.

All run interleaved in one process, on one thread of the CPU, in a new random order every round; the least time of all
rounds counts, in seconds of the processor. Gradients are compared with those of the plain chain, bit for bit.

    python benchmarks/chains.py [--rounds 5] [--models lstm ode wave] [--lengths 100 1000 10000] [--plots FOLDER]
                                [--json chains.json] [--skip-overhead] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint as stock
from torch import Tensor, nn

import recollect
from peers import describe_machine, print_table, version_of
from recollect._meters import StorageMeter
from recollect.schedules import extra_forwards

try:
    import checkpoint_schedules as peer
except ImportError:
    peer = None

State = tuple[Any, ...]
Run = Callable[[], Tensor]


# --- Models: a step, its first state, its weights ---


@dataclass(frozen=True)
class Model:
    name: str
    step: Callable[[State], State]
    first: State
    weights: list[Tensor]


def lstm() -> Model:
    torch.manual_seed(0)
    cell = nn.LSTMCell(16, 32)
    inputs = torch.randn(64, 8, 16)

    def step(state: State) -> State:
        h, c, i = state
        return *cell(inputs[i % 64], (h, c)), i + 1

    return Model("LSTM", step, (torch.zeros(8, 32), torch.zeros(8, 32), 0), [*cell.parameters()])


def ode() -> Model:
    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))
    h = 0.01

    def step(state: State) -> State:
        (x,) = state
        k1 = field(x)
        k2 = field(x + h / 2 * k1)
        k3 = field(x + h / 2 * k2)
        k4 = field(x + h * k3)
        return (x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4),)

    return Model("neural ODE", step, (torch.randn(64, 4),), [*field.parameters()])


def wave() -> Model:
    speed = torch.full((512,), 0.5, requires_grad=True)
    pulse = torch.exp(-(torch.linspace(-4, 28, 512) ** 2))

    def step(state: State) -> State:
        now, before = state
        bend = nn.functional.pad(now[2:] - 2 * now[1:-1] + now[:-2], (1, 1))
        return 2 * now - before + speed.square() * bend, now

    return Model("wave", step, (pulse, pulse.clone()), [speed])


MODELS = {"lstm": lstm, "ode": ode, "wave": wave}


def loss_of(state: State) -> Tensor:
    loss: Tensor = state[0].square().mean()
    return loss


# --- Contestants: each runs forward and backward ---


def plainly(model: Model, length: int) -> None:
    state = model.first
    for _ in range(length):
        state = model.step(state)
    loss_of(state).backward()


def with_stock(model: Model, length: int, segments: int) -> None:
    functions = [model.step] * length
    loss_of(stock.checkpoint_sequential(functions, segments, model.first, use_reentrant=False)).backward()


def with_recollect(model: Model, length: int, slots: int) -> None:
    loss_of(recollect.sequential(model.step, model.first, length=length, slots=slots)).backward()


def by_hand_with_peer(model: Model, length: int, slots: int) -> None:
    """What a user of `checkpoint_schedules` writes: no random numbers, no checks, gradients added up in `.grad`."""
    schedule = peer.MultistageCheckpointSchedule(length, slots, 0)  # its fastest to make, and optimal
    kept: dict[int, State] = {}
    state, graph, grads = model.first, None, None
    for action in schedule:
        if isinstance(action, peer.Forward):
            if action.write_ics:
                kept[action.n0] = state
            if action.write_adj_deps:
                given = detached(state)
                with torch.enable_grad():
                    state = model.step(given)
                graph = given, state
            else:
                with torch.no_grad():
                    for _ in range(action.n0, action.n1):
                        state = model.step(state)
        elif isinstance(action, peer.EndForward):
            assert graph is not None
            result = detached(graph[1])
            loss_of(result).backward()
            grads = [one.grad for one in tensors_of(result)]
        elif isinstance(action, peer.Reverse):
            assert graph is not None
            assert grads is not None
            given, results = graph
            pairs = [(one, grad) for one, grad in zip(tensors_of(results), grads, strict=True) if grad is not None]
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
            grads = [one.grad for one in tensors_of(given)]
            graph = None
        elif isinstance(action, (peer.Copy, peer.Move)):
            state = kept[action.n] if isinstance(action, peer.Copy) else kept.pop(action.n)
        elif isinstance(action, peer.EndReverse):
            return


def tensors_of(state: State) -> list[Tensor]:
    return [one for one in state if isinstance(one, Tensor)]


def detached(state: State) -> State:
    return tuple(one.detach().requires_grad_() if isinstance(one, Tensor) else one for one in state)


# --- Measuring ---


def seconds_of(work: Callable[[], object]) -> float:
    """Of this process: all runs on one thread, and others on the machine shall not count."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_of(model: Model, work: Callable[[], object]) -> int:
    """Bytes above what is there before."""
    gc.collect()
    meter = StorageMeter([*model.weights, *tensors_of(model.first)], "cpu")
    before = meter.now()
    with meter.watching():
        work()
    return meter.peak() - before


def grads_of(model: Model, work: Callable[[], object]) -> list[Tensor]:
    for weight in model.weights:
        weight.grad = None
    work()
    found = [weight.grad for weight in model.weights]
    for weight in model.weights:
        weight.grad = None
    return [grad for grad in found if grad is not None]


def interleaved(contestants: dict[str, Callable[[], object]], rounds: int, model: Model) -> dict[str, float]:
    """The least seconds of each."""
    best = dict.fromkeys(contestants, math.inf)
    for _ in range(rounds):
        for name in random.sample(list(contestants), len(contestants)):
            for weight in model.weights:
                weight.grad = None
            best[name] = min(best[name], seconds_of(contestants[name]))
    return best


def segments_of(length: int) -> Iterator[int]:
    root = math.isqrt(length)
    yield from sorted({max(1, root // 2), root, min(length, 2 * root)} if length <= 1000 else {root, 2 * root})


def slots_of(length: int) -> list[int]:
    return [slots for slots in ((10, 30, 100) if length <= 1000 else (30, 100, 300)) if slots < length]


def compare(model: Model, length: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant."""
    contestants: dict[str, Callable[[], object]] = {"plain": lambda: plainly(model, length)}
    weighed = {
        segments: peak_of(model, partial(with_stock, model, length, segments)) for segments in segments_of(length)
    }
    segments = min(weighed, key=weighed.__getitem__)
    contestants[f"checkpoint_sequential, {segments} segments"] = partial(with_stock, model, length, segments)
    for slots in slots_of(length):
        contestants[f"recollect, {slots} slots"] = partial(with_recollect, model, length, slots)
    if peer is not None:
        for slots in slots_of(length)[:2]:
            name = f"checkpoint_schedules by hand, {slots} slots"
            contestants[name] = partial(by_hand_with_peer, model, length, slots)
    peaks, grads = {}, {}
    for name, work in contestants.items():
        grads[name] = grads_of(model, lambda name=name, work=work: peaks.update({name: peak_of(model, work)}))  # type: ignore[misc]
    equal = {name: "yes" if all(map(torch.equal, found, grads["plain"])) else "no" for name, found in grads.items()}
    seconds = interleaved(contestants, rounds, model)
    return [
        {
            "model": model.name,
            "steps": length,
            "contestant": name,
            "seconds": seconds[name],
            "peak": peaks[name],
            "equal": equal[name],
        }
        for name in contestants
    ]


# --- Overhead ---


def small() -> Model:
    return Model("x.sin()", lambda state: (state[0].sin(),), (torch.randn(8, requires_grad=True),), [])


def overhead(model: Model, rounds: int) -> tuple[float, float, float, float]:
    """Seconds by hand, of a forward and of a differentiated step, and what recollect adds to each."""
    length, first = (
        1000,
        tuple(one.detach().requires_grad_() if isinstance(one, Tensor) else one for one in model.first),
    )
    step = model.step

    def forward_by_hand() -> None:
        state = first
        with torch.no_grad():
            for _ in range(length):
                state = step(state)

    def step_by_hand() -> None:
        given = detached(first)
        grads = [torch.ones_like(one) for one in tensors_of(given)]
        for _ in range(length):
            given = detached(first)
            torch.autograd.backward(tensors_of(step(given)), grads)

    def chain(slots: int) -> None:
        loss_of(recollect.sequential(step, first, length=length, slots=slots)).backward()

    few, many = 4, 40
    works: dict[str, Callable[[], object]] = {
        "forward": forward_by_hand,
        "step": step_by_hand,
        "few": lambda: chain(few),
        "many": lambda: chain(many),
    }
    for work in works.values():
        work()
    best = interleaved(works, rounds, model)
    forward, differentiated = best["forward"] / length, best["step"] / length
    # Every step is differentiated once, and every forward beyond that runs without a graph: see recollect.schedules.
    runs = {slots: extra_forwards(length, slots) for slots in (few, many)}
    per_forward = (best["few"] - best["many"]) / (runs[few] - runs[many])
    per_step = (best["many"] - runs[many] * per_forward) / length
    return forward, differentiated, per_forward - forward, per_step - differentiated


# --- Reports ---


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    import plotly.graph_objects as plots

    folder.mkdir(parents=True, exist_ok=True)
    for name, steps in sorted({(row["model"], row["steps"]) for row in rows}):
        own = [row for row in rows if (row["model"], row["steps"]) == (name, steps)]
        kinds = {row["contestant"].split(",")[0] for row in own}
        points = [
            plots.Scatter(
                x=[row["peak"] for row in own if row["contestant"].startswith(kind)],
                y=[row["seconds"] for row in own if row["contestant"].startswith(kind)],
                text=[row["contestant"] for row in own if row["contestant"].startswith(kind)],
                name=kind,
                mode="lines+markers",
            )
            for kind in sorted(kinds)
        ]
        labels = {
            "title": f"{name}, {steps:,} steps",
            "xaxis": {"title": "peak bytes", "type": "log"},
            "yaxis": {"title": "seconds, forward and backward"},
        }
        file = folder / f"{name.replace(' ', '_').lower()}_{steps}.html"
        plots.Figure(points, labels).write_html(file, include_plotlyjs="cdn")


def print_overhead(measured: dict[str, tuple[float, float, float, float]]) -> None:
    print_table(
        ["us", "forward by hand", "recollect adds", "differentiated by hand", "recollect adds"],
        [
            [name, *(f"{seconds * 1e6:.1f}" for seconds in (forward, adds, differentiated, adds_more))]
            for name, (forward, differentiated, adds, adds_more) in measured.items()
        ],
    )
    print("The aims are 15 us per forward and 60 us per differentiated step.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="*", type=int, default=[100, 1000, 10_000])
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--skip-overhead", action="store_true")
    parser.add_argument("--quick", action="store_true", help="shows that it runs")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.lengths = 1, [100]
    torch.set_num_threads(1)
    print(describe_machine() + f", checkpoint_schedules {version_of('checkpoint_schedules')}\n")
    models = [MODELS[name]() for name in options.models]
    measured = {}
    if not options.skip_overhead:
        measured = {model.name: overhead(model, 4 * options.rounds) for model in (small(), *models)}
        print_overhead(measured)
    rows = []
    for model in models:
        for length in options.lengths:
            own = compare(model, length, options.rounds if length <= 1000 else 1 + options.rounds // 5)
            rows += own
            plain = own[0]
            print(f"{plain['model']}, {length:,} steps")
            print_table(
                ["", "ms", "of plain", "peak KiB", "of plain", "equal gradients"],
                [
                    [
                        row["contestant"],
                        f"{row['seconds'] * 1e3:.1f}",
                        f"{row['seconds'] / plain['seconds']:.2f}",
                        f"{row['peak'] / 1024:.0f}",
                        f"{row['peak'] / plain['peak']:.3f}",
                        row["equal"],
                    ]
                    for row in own
                ],
            )
            print()
    if options.json:
        options.json.write_text(json.dumps({"overhead": measured, "rows": rows}, indent=1))
    if options.plots:
        plot(rows, options.plots)


if __name__ == "__main__":
    main()
