"""Small models that plans are made for, on the CPU and on a GPU."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Layers, one after the other, called by attribute."""

    def __init__(self, kind=Layer, layers=4, width=32):
        super().__init__()
        self.layers = nn.ModuleList(kind(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Gpt(Stack):
    def __init__(self, layers=4, width=32, words=64, heads=2):
        super().__init__(lambda width: Layer(width, heads), layers, width)
        self.words = nn.Embedding(words, width)
        self.head = nn.Linear(width, words)

    def forward(self, text):
        return self.head(super().forward(self.words(text)))


def next_word(model, text):
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Shared(nn.Module):
    """One layer, called several times."""

    def __init__(self):
        super().__init__()
        self.layer = Layer(32)

    def forward(self, x):
        for _ in range(4):
            x = self.layer(x)
        return x


class Twice(nn.Module):
    def __init__(self, wide, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(wide, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))


class Unet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.ModuleList([Twice(3, width), Twice(width, 2 * width)])
        self.middle = Twice(2 * width, 4 * width)
        self.up = nn.ModuleList([Twice(6 * width, 2 * width), Twice(3 * width, width)])

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return x
