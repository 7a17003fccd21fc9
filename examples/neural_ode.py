"""A neural ODE: Runge and Kutta's fourth order over a small network, differentiated through every step."""

import importlib.util
import time

import torch
from torch import Tensor, nn

import recollect

LENGTH, H = 300, 0.02
field = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


def step(x: Tensor) -> Tensor:
    k1 = field(x)
    k2 = field(x + H / 2 * k1)
    k3 = field(x + H / 2 * k2)
    k4 = field(x + H * k3)
    return torch.add(x, k1 + 2 * k2 + 2 * k3 + k4, alpha=H / 6)


x = plain = torch.randn(64, 2)
for _ in range(LENGTH):
    plain = step(plain)
wanted = torch.autograd.grad(plain.square().mean(), [*field.parameters()])
slots, seconds, equal = [1, 2, 4, 8, 16, 32], [], True
for count in slots:
    start = time.perf_counter()
    y = recollect.sequential(step, x, length=LENGTH, slots=count)
    found = torch.autograd.grad(y.square().mean(), [*field.parameters()])
    seconds.append(time.perf_counter() - start)
    equal &= all(map(torch.equal, found, wanted))

if importlib.util.find_spec("plotly"):
    import plotly.graph_objects as plots

    labels = {"title": "neural ODE, 300 steps", "xaxis_title": "bytes of kept states", "yaxis_title": "seconds"}
    plots.Figure(plots.Scatter(x=[count * x.nbytes for count in slots], y=seconds), labels).write_html("ode.html")
print(f"gradients with {slots} slots are equal to those of the plain chain, to the last bit: {equal}")
