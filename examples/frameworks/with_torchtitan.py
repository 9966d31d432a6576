"""torchtitan: the model spec of a training config, quantized. Give its name as ``--module`` to ``torchtitan.train``.

Running this file only builds the debug model, which needs no GPU.
"""

import torch
from torchtitan.models.llama3 import model_registry

from hybridtensor.integrations.torchtitan import HybridConverter, advancing

torch.autograd.set_multithreading_enabled(False)  # a process has one GPU: no second thread competes with Python

converter = HybridConverter.Config(recipe="fp8", keep_bf16=["layers.0", "layers.5"])
spec = advancing(model_registry("debugmodel", converters=[converter]))  # the model_spec of a Trainer.Config

with torch.device("meta"):
    model = spec.model.build()
model.verify_module_protocol()
print(model.layers["1"].feed_forward.w2.weight.config)
