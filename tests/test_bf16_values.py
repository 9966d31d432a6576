"""``bf16_weight_values``: what is quantized of fp32 masters is what they are in bf16.

Oracle: a model without it whose masters hold bf16 values.
"""

import copy

import pytest
import torch
from experts import ENDS, Experts, offsets
from torch import nn

import hybridtensor as ht
from hybridtensor.testing import random_tensor

SPECS = ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "fp8_delayed", "fp8+dequantized", "mxfp8+high_precision",
         "mxfp8+save_original_input", "mxfp8/nvfp4/bf16"]  # fmt: skip


def rounded(model):
    """Return a copy whose weights of linear layers hold bf16 values."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            if p.dim() > 1:
                p.copy_(p.bfloat16().float())
    return twin


def twins(make, spec, **options):
    torch.manual_seed(0)
    plain = make()
    return ht.quantize_(copy.deepcopy(plain), f"{spec}+bf16_weight_values", **options), ht.quantize_(
        rounded(plain), spec, **options
    )


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))


def same(one, other):
    assert torch.equal(one, other)
    assert one.dtype == other.dtype


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("autocast", [False, True])
def test_products_are_those_of_bf16_values(spec, autocast):
    models = twins(mlp, spec)
    found = []
    for model in models:
        x = random_tensor(32, 64, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", enabled=autocast):
            y = model(x)
        y.sum().backward()
        found.append([y, x.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        same(one, other)


@pytest.mark.parametrize("spec", SPECS)
def test_masters_stay_in_fp32(spec):
    model, _ = twins(mlp, spec)
    before = model[0].weight.dequantize().clone()
    assert not torch.equal(before, before.bfloat16().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    model(random_tensor(32, 64, dtype=torch.float32)).sum().backward()
    grad = model[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[0].weight.dequantize(), before - 2.0**-12 * grad)


@pytest.mark.parametrize("spec", ["fp8", "mxfp8", "nvfp4", "fp8_rowwise", "mxfp8/nvfp4/bf16"])
def test_persistent_weights(spec):
    """Made, updated from fp32 masters, and given other recipes."""
    model, twin = twins(mlp, spec, persistent=True)
    optimizers = [ht.optim.MasterWeights(torch.optim.SGD, m.parameters(), lr=0.1) for m in (model, twin)]

    def alike():
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            if isinstance(a, ht.HybridTensor):
                for direction in ("rowwise", "columnwise"):
                    same(*(getattr(w, direction).dequantize(torch.float32) for w in (a, b)))

    alike()
    for _ in range(2):
        for m in (model, twin):
            m(random_tensor(32, 64, dtype=torch.float32)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        masters = optimizers[0].masters()
        with torch.no_grad():
            for own, other in zip(model.parameters(), twin.parameters(), strict=True):
                other.copy_(masters[own].bfloat16().float() if own.dim() > 1 else own)
        alike()
    for m, ending in ((model, "+bf16_weight_values"), (twin, "")):
        ht.set_config_(m, f"fp8_rowwise{ending}")
    alike()


def test_a_step_rounds_no_weight_that_it_does_not_quantize(monkeypatch):
    """Its rounded values are memory of their own, so that it is quantized where it is used."""
    model = ht.quantize_(nn.Sequential(*(nn.Linear(32, 32) for _ in range(2))), "fp8+bf16_weight_values")
    weights = [layer.weight for layer in model]
    assert all(weight.is_rounded_first and weight.source is not weight.plain for weight in weights)
    rounded = ht.quantize_(nn.Linear(32, 32, dtype=torch.bfloat16), "fp8+bf16_weight_values").weight
    assert not rounded.is_rounded_first
    assert rounded.source is rounded.plain
    model(random_tensor(8, 32, dtype=torch.float32)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    monkeypatch.setattr(type(weights[0]), "source", property(lambda weight: pytest.fail("rounded")))
    ht.step_(model)


def test_experts():
    model, twin = twins(Experts, "mxfp8")
    x = random_tensor(160, 64, dtype=torch.float32)
    same(model(x, offsets(ENDS[0])), twin(x, offsets(ENDS[0])))


def test_what_is_exported_is_the_quantized_bf16_export():
    model, _ = twins(mlp, "fp8_rowwise")
    exported = ht.quantize_(ht.plain_(copy.deepcopy(model), torch.bfloat16), "fp8_rowwise")
    for (_, one), (_, other) in zip(ht.inference_tensors(model), ht.inference_tensors(exported), strict=True):
        same(one.view(torch.uint8), other.view(torch.uint8))


def test_nothing_to_round_is_refused():
    with pytest.raises(ValueError, match="bf16_weight_values is for weights that are quantized, got none"):
        ht.HybridConfig.parse("bf16+bf16_weight_values")
    with pytest.raises(TypeError, match="bf16_weight_values is True or False"):
        ht.HybridConfig(*[ht.Float8Quantizer()] * 3, bf16_weight_values=1)


def test_compiled():
    model, twin = twins(mlp, "mxfp8")
    x = random_tensor(32, 64, dtype=torch.float32)
    same(torch.compile(model, backend="aot_eager", fullgraph=True)(x), twin(x))
