"""What type checkers are asked about: each line that is wrong says so, and what is said of it."""

from collections import OrderedDict

import torch
from torch import nn
from torchao.quantization import FqnToConfig

import hybridtensor as ht
from hybridtensor.recipes.spec import GEMMS

model = nn.Linear(32, 32)
config = ht.HybridConfig.parse("fp8")


def factory(role: ht.QuantizerRole) -> ht.Quantizer:
    return ht.MXFP8Quantizer() if role.tensor_type == "weight" else ht.IdentityQuantizer()


ht.quantize_(model, "fp8")
ht.quantize_(model, "fp8/fp8_rowwise/bf16+pow2_scale", keep_bf16=["head"], persistent=True)
ht.quantize_(model, config)
ht.quantize_(model, factory)
ht.quantize_(model, FqnToConfig(OrderedDict({"up": config})))
ht.quantize_(model, ht.recipes.by_type(linear="fp8"))
ht.set_config_(model, "mxfp8")
speed: float = ht.explain(model, show=False).predicted_speed("b200")
time: float = ht.costs.cost(config.formats(GEMMS[0]))
loss: torch.Tensor = model(torch.ones(1, 32)).sum()

ht.quantize_(model, 3)  # wrong: arg-type
ht.quantize_("model", "fp8")  # wrong: arg-type
ht.quantize_(model, "fp8", persistent="no")  # wrong: arg-type
ht.quantize_(model, "fp8", keep=["head"])  # wrong: call-arg
ht.quantize_(model, ht.Float8Quantizer())  # wrong: arg-type
ht.set_config_(model, 8)  # wrong: arg-type
ht.recipes.by_type(linear=3)  # wrong: arg-type
ht.explain(3)  # wrong: arg-type
ht.HybridConfig.parse(8)  # wrong: arg-type
