"""torch.distributed as torchtitan uses it: wrappers with a policy over operators, unchanged and served by recollect."""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recollect


def keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(4)]
runs: list[bool] = []
layers[0].register_forward_pre_hook(lambda *_: runs.append(recollect.is_recomputing()))
with recollect.patch_torch(determinism_check="first"):
    contexts: Any = {"context_fn": lambda: create_selective_checkpoint_contexts(keep_products)}
    model = nn.Sequential(*(checkpoint_wrapper(layer, **contexts) for layer in layers))
    model(torch.randn(8, 64)).square().mean().backward()
print(f"runs of the first layer: {runs.count(False)} in forward, {runs.count(True)} in backward")
