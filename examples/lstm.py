"""An LSTM over a long sequence, with a loss on every output, in the memory of a few states: time against memory."""

import importlib.util
import time

import torch
from torch import Tensor, nn

import recollect

LENGTH = 400
State = tuple[Tensor, Tensor, int]
cell, head = nn.LSTMCell(8, 32), nn.Linear(32, 8)
sequence, runs = torch.randn(LENGTH + 1, 4, 8), 0


def step(state: State) -> tuple[State, Tensor]:
    global runs
    runs += 1
    h, c, i = state
    h, c = cell(sequence[i], (h, c))
    return (h, c, i + 1), (head(h) - sequence[i + 1]).square().mean()


first = (torch.zeros(4, 32), torch.zeros(4, 32), 0)
slots, seconds = [2, 4, 8, 16, 32, 64, 128], []
for count in slots:
    runs, start = 0, time.perf_counter()
    _, losses = recollect.sequential(step, first, length=LENGTH, slots=count, outputs=True)
    torch.stack(losses).mean().backward()
    seconds.append(time.perf_counter() - start)
    print(f"{count:4} states of {2 * first[0].nbytes} bytes kept: {runs - LENGTH} steps run again, {seconds[-1]:.2f} s")

if importlib.util.find_spec("plotly"):
    import plotly.graph_objects as plots

    memory = [count * 2 * first[0].nbytes for count in slots]
    labels = {"title": "LSTM, 400 steps", "xaxis_title": "bytes of kept states", "yaxis_title": "seconds"}
    plots.Figure(plots.Scatter(x=memory, y=seconds), labels).write_html("lstm.html")
print(f"with 128 slots every step but the last was run again {(runs - LENGTH) / (LENGTH - 1):.1f} times")
