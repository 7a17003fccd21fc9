"""A long sequence: every layer is recomputed, and its input, all that is left of it, waits off the device.

On a GPU it waits on the host; without one, on disk, to show that it does.
"""

import torch
from torch import nn

import recollect

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = nn.TransformerEncoderLayer(256, 4, batch_first=True, device=device)
model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
tokens = torch.randn(1, 2048, 256, device=device)  # 2 MiB, as the input of every layer

where = recollect.Offload(to="cpu" if device == "cuda" else "disk")
recollect.apply(model, {"layers.*": recollect.Recompute(inputs=where)})
for _ in range(2):
    before = recollect.offload_stats()
    model(tokens).square().mean().backward()
    after = recollect.offload_stats()
print(f"left the device: {(after.bytes_out - before.bytes_out) / 2**20:.0f} MiB")
