"""Train with Lightning: a precision plugin of Trainer converts the module and advances its state."""

import torch
from lightning import LightningModule, Trainer
from torch import nn

from hybridtensor.integrations.lightning import HybridPrecision


class Autoencoder(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))

    def training_step(self, x, index):
        return (self.net(x) - x).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = torch.utils.data.DataLoader(torch.randn(512, 64), batch_size=32)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
torch.autograd.set_multithreading_enabled(False)  # a process has one GPU: no second thread competes with Python
module = Autoencoder()
Trainer(max_epochs=2, plugins=HybridPrecision("fp8", precision="bf16-mixed"), **quiet).fit(module, data)
print(f"loss {module.training_step(torch.randn(32, 64), 0).item():.3f}")
