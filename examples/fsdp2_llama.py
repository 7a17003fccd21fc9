"""FSDP2: shard a Llama, plan it under a budget on all ranks together, train it.

`torchrun --nproc-per-node 8 examples/fsdp2_llama.py 70GiB` on GPUs; where there are none, it is a small one.
"""

import sys
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import recollect

device = torch.accelerator.current_accelerator() or torch.device("cpu")
distributed.init_process_group()
small = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
size, shape = {**small, "intermediate_size": 192}, (8, 96)
if device.type != "cpu":
    torch.accelerator.set_device_index(distributed.get_node_local_rank())
    size, shape = {}, (1, 8192)
with device:
    model: Any = LlamaForCausalLM(LlamaConfig(**size))  # type: ignore[arg-type]
    tokens = torch.randint(256, shape)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model)
batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
state = sum(2 * weight.to_local().nbytes for weight in model.parameters())  # what AdamW is going to keep
plan = recollect.plan(model, batch, budget=sys.argv[1] if len(sys.argv) > 1 else "65%", reserve=state)
plan.apply(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(10):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if distributed.get_rank() == 0:
    print(plan, f"{distributed.get_world_size()} ranks trained under {plan.budget:,} bytes each", sep="\n")
distributed.destroy_process_group()
