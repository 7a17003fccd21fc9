"""transformers: every layer of a model is computed again in backward, but for the matrix products in it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import recollect
from recollect.integrations.transformers import enable

config = LlamaConfig(num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=256)
model = LlamaForCausalLM(config).train()
enable(model, policy=recollect.policies.save_matmuls)

runs: list[bool] = []
model.model.layers[0].register_forward_pre_hook(lambda *_: runs.append(recollect.is_recomputing()))
tokens = torch.randint(256, (2, 32))
model(input_ids=tokens, labels=tokens).loss.backward()
print(f"runs of the first layer: {runs.count(False)} in forward, {runs.count(True)} in backward")
