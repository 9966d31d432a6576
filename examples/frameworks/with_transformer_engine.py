"""TransformerEngine: a recipe of this library for its layers, and so for Megatron. Needs a GPU."""

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe

from hybridtensor.integrations.transformer_engine import qfactory

torch.autograd.set_multithreading_enabled(False)  # a process has one GPU: no second thread competes with Python
layer = te.Linear(1024, 1024, params_dtype=torch.bfloat16, device="cuda")
x = torch.randn(256, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
with te.autocast(enabled=True, recipe=CustomRecipe(qfactory=qfactory("fp8/fp8/bf16"))):
    y = layer(x)
y.square().mean().backward()
print(f"gradient norm {layer.weight.grad.norm().item():.3f}")
