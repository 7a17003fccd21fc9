"""Accelerate: decide, then prepare. FSDP shards around what is decided (on accelerators; elsewhere it is left out).

Started by `accelerate launch examples/accelerate_fsdp.py`, or by python for one process.
"""

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import recollect

layers = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(4)))
runs: list[bool] = []
layers[0].register_forward_pre_hook(lambda *_: runs.append(recollect.is_recomputing()))
recollect.apply(layers, {nn.TransformerEncoderLayer: recollect.Recompute()})

by_layer: Any = {"transformer_cls_names_to_wrap": ["TransformerEncoderLayer"]}
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **by_layer)
accelerator = Accelerator(fsdp_plugin=plugin)
model, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters()))
accelerator.backward(model(torch.randn(2, 16, 64, device=accelerator.device)).square().mean())
optimizer.step()
print(f"runs of the first layer: {runs.count(False)} in forward, {runs.count(True)} in backward")
