"""Train with Accelerate: one process, or several by ``accelerate launch`` with DDP or FSDP2.

``prepare`` quantizes before Accelerate wraps, and advances state after steps that were not skipped or accumulated.
"""

import torch
from accelerate import Accelerator
from torch import nn

from hybridtensor.integrations.accelerate import prepare

torch.autograd.set_multithreading_enabled(False)  # a process has one GPU: no second thread competes with Python
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(torch.randn(512, 64), batch_size=16)
model, optimizer, data = prepare(accelerator, model, optimizer, data, recipe="fp8_delayed")

for x in data:
    with accelerator.accumulate(model):
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.3f}")
