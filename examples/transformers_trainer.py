"""transformers: the Trainer's own `gradient_checkpointing=True`, served by recollect."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import recollect

config = LlamaConfig(num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=256)
model = LlamaForCausalLM(config)
runs: list[bool] = []
model.model.layers[0].register_forward_pre_hook(lambda *_: runs.append(recollect.is_recomputing()))

data: Any = [{"input_ids": row, "labels": row} for row in torch.randint(256, (8, 32))]
quiet: Any = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
with recollect.patch_torch(determinism_check="first"):
    Trainer(
        model, TrainingArguments("out", max_steps=1, gradient_checkpointing=True, **quiet), train_dataset=data
    ).train()
print(f"runs of the first layer: {runs.count(False)} in forward, {runs.count(True)} in backward")
