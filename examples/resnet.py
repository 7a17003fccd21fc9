"""A ResNet in torch alone: blocks decided by their class. BatchNorm counts a batch once, though it runs twice."""

import torch
from torch import Tensor, nn

import recollect


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.path = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.path(x))


model = nn.Sequential(nn.Conv2d(3, 16, 3), *(Block() for _ in range(8)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
kept: dict[int, int] = {}


def pack(tensor: Tensor) -> Tensor:
    kept[tensor.data_ptr()] = tensor.nbytes
    return tensor


def train_step() -> int:
    """Gives the bytes that autograd keeps from the forward to the backward."""
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(2, 3, 32, 32)).square().mean()
    loss.backward()
    return sum(kept.values())


before = train_step()
recollect.apply(model, {Block: recollect.Recompute()})
after = train_step()
counted = model.get_buffer("1.path.1.num_batches_tracked").item()
print(f"kept: {before:,} bytes before, {after:,} after; batches that BatchNorm counted in two steps: {counted}")
