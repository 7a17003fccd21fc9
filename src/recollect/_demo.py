"""The model of `recollect demo`: a small GPT with dropout, in torch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """How large it is."""

    layers: int
    width: int
    heads: int
    tokens: int
    batch: int
    vocabulary: int = 512


TINY = Sizes(layers=4, width=16, heads=2, tokens=64, batch=4, vocabulary=64)
ON_CPU = Sizes(layers=8, width=128, heads=4, tokens=128, batch=4)
ON_ACCELERATOR = Sizes(layers=24, width=1024, heads=16, tokens=1024, batch=8)


class Block(nn.Module):
    """Attention and a perceptron, each beside a skip."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return functional.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width)), self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self._attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.randn(sizes.tokens, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads, dropout=0.1) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        """All layers."""
        x = self.tokens(text) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(model: nn.Module, text: Tensor) -> Tensor:
    """The step."""
    logits = model(text[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def sizes_for(device: torch.device, *, tiny: bool) -> Sizes:
    """As large as a device computes in a moment."""
    return TINY if tiny else ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def build(sizes: Sizes, device: torch.device) -> tuple[GPT, Tensor]:
    """A model and a batch, the same in every run."""
    torch.manual_seed(0)
    model = GPT(sizes).to(device)
    return model, torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens + 1), device=device)
