"""Lightning: a callback has the layers computed again in backward. The LightningModule stays as it is."""

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import recollect
from recollect.integrations.lightning import Recollect


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(4)))

    def training_step(self, batch: Tensor) -> Any:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


net = Net()
runs: list[bool] = []
net.layers[0].register_forward_pre_hook(lambda *_: runs.append(recollect.is_recomputing()))
callback = Recollect({"layers.*": recollect.Recompute(), "layers.*.self_attn": recollect.Save()})
data: Any = torch.randn(2, 16, 64)
quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
lightning.Trainer(max_steps=1, callbacks=[callback], **quiet).fit(net, DataLoader(data, batch_size=2))
print(f"runs of the first layer: {runs.count(False)} in forward, {runs.count(True)} in backward")
