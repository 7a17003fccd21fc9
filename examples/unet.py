"""A U-Net in torch alone: regions by pattern, with skips that lead from the way down, past others, to the way up."""

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d

import recollect


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.GELU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, 8), block(8, 16), block(16, 32)])
        self.up = nn.ModuleList([block(32 + 16, 16), block(16 + 8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        skips = [x := down(max_pool2d(x, 2)) for down in self.down]
        for up, skip in zip(self.up, skips[-2::-1], strict=True):
            x = up(torch.cat([interpolate(x, scale_factor=2), skip], dim=1))
        return x


model = UNet()
runs: list[str] = []
for name, module in model.named_modules():
    if name in ("down.0", "up.0"):
        module.register_forward_pre_hook(lambda *_, name=name: runs.append(name))
recollect.apply(model, {"down.*": recollect.Recompute(), "up.*": recollect.Recompute()})
model(torch.randn(2, 3, 32, 32)).square().mean().backward()
print(f"regions as they ran, the last one first in backward: {' '.join(runs)}")
