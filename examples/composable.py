"""The module API of torch.distributed: checkpoint in place, then shard. No wrapper, no other names.

Shards where it is started by torchrun; by python alone, the model stays whole.
"""

import os

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import recollect
from recollect.composable import checkpoint

layers = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(4)))
runs: list[bool] = []
layers[0].register_forward_pre_hook(lambda *_: runs.append(recollect.is_recomputing()))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
for layer in layers:
    checkpoint(layer, policy=recollect.policies.save_matmuls)
    if "RANK" in os.environ:
        fully_shard(layer)
layers(torch.randn(2, 16, 64)).square().mean().backward()
print(f"runs of the first layer: {runs.count(False)} in forward, {runs.count(True)} in backward")
