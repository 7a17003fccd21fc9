"""A wave on a string, simulated until it has come to the other end: which speed of sound does it tell of?"""

import importlib.util
import time

import torch
from torch import Tensor

import recollect

LENGTH, POINTS = 1000, 256
State = tuple[Tensor, Tensor]
true_speed = 0.5 + 0.2 * torch.linspace(0, 3, POINTS).sin()
speed = torch.full((POINTS,), 0.5, requires_grad=True)
pulse = torch.exp(-(torch.linspace(-4, 28, POINTS) ** 2))


def run(c: Tensor, slots: int) -> Tensor:
    def step(state: State) -> State:
        now, before = state
        bend = torch.nn.functional.pad(now[2:] - 2 * now[1:-1] + now[:-2], (1, 1))
        return 2 * now - before + c.square() * bend, now

    now, _ = recollect.sequential(step, (pulse, pulse), length=LENGTH, slots=slots)
    return torch.as_tensor(now)


target = run(true_speed, 1).detach()
slots, seconds = [4, 8, 16, 32, 64], []
for count in slots:
    start = time.perf_counter()
    (grad,) = torch.autograd.grad((run(speed, count) - target).square().sum(), speed)
    seconds.append(time.perf_counter() - start)

if importlib.util.find_spec("plotly"):
    import plotly.graph_objects as plots

    labels = {"title": "wave, 1,000 steps", "xaxis_title": "bytes of kept states", "yaxis_title": "seconds"}
    plots.Figure(plots.Scatter(x=[2 * count * pulse.nbytes for count in slots], y=seconds), labels).write_html("w.html")
print(f"the gradient says at {int((grad != 0).sum())} of {POINTS} points of the string how its speed should change")
