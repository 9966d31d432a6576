"""Casts are planned once for each kind of tensor. Oracle: plans that are made anew for every cast."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor.quantizers import Quantizer
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context
from hybridtensor.testing import random_tensor


def gradients(recipe, device):
    """Return outputs and gradients of two models in turns, whose layers have other widths and delayed scales."""
    found = []
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64, bias=False)) for width in (32, 96)]
    configs = [HybridConfig.parse(spec) for spec in (recipe, f"bf16/{recipe}/bf16")]
    nets = [ht.quantize_(net.to(device), config) for net, config in zip(nets, configs, strict=True)]
    for step in range(3):
        for net in nets:
            y = net(random_tensor(32, 64, seed=step, dtype=torch.float32, device=device))
            y.square().mean().backward()
            found += [y.detach(), *(p.grad.clone() for p in net.parameters())]
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(p.grad)
            net.zero_grad()
            ht.step_(net)
    quantizers = [q for config in configs for q in (config.input, config.weight, config.grad_output)]
    return found, max(len(quantizer.plans) for quantizer in quantizers)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4"])
def test_plans_change_no_bit(recipe, device):
    kept, most = gradients(recipe, device)
    assert 0 < most < 16
    with patch.object(Quantizer, "plans", property(lambda quantizer: {})):
        anew, most = gradients(recipe, device)
    assert most == 0
    assert all(map(torch.equal, kept, anew))


def test_a_kind_of_tensor_is_planned_once():
    quantizer = ht.Float8Quantizer(pow2_scale=True)
    with patch.object(ht.Float8Quantizer, "request", autospec=True, side_effect=ht.Float8Quantizer.request) as planned:
        for rows in (32, 48, 64):
            quantizer.quantize(random_tensor(rows, 64))
        assert planned.call_count == 1
        quantizer.quantize(random_tensor(32, 64), columnwise=False)
        ht.Float8Quantizer().quantize(random_tensor(32, 64))
        assert planned.call_count == 3


def test_roles_have_plans_of_their_own():
    """Random numbers differ between an input and a weight of one layer."""
    quantizer = ht.NVFP4Quantizer(rounding="stochastic")
    state = ht.LayerState.of({"input": quantizer, "weight": quantizer}, name="layer").tensors()
    x = random_tensor(32, 64)
    first, second, again = (
        quantizer.quantize(x, context=Context(role, state)).rowwise.qdata for role in ("input", "weight", "input")
    )
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_layers_have_plans_by_their_delayed_scales():
    """The scale of a weight is the second of one layer, and the first of another."""
    quantizer, x = ht.DelayedFloat8Quantizer(), random_tensor(32, 64)
    roles = {"input": quantizer, "weight": quantizer}
    for layer, position in ((ht.LayerState.of(roles), 1), (ht.LayerState.of({"weight": quantizer}), 0)):
        layer.encode_scale.copy_(torch.tensor([2.0, 8.0])[-len(layer.slots) :])
        made = quantizer.quantize(x, context=Context("weight", layer.tensors()))
        assert made.rowwise.scale.item() == 1 / layer.encode_scale[position].item()


def test_extents_are_checked_for_every_shape():
    layer = ht.quantize_(nn.Linear(64, 64), "mxfp8")
    layer(torch.randn(7, 64))
    only_row = {"rowwise": True, "columnwise": False, "dtype": torch.bfloat16}
    for _ in range(2):
        ht.MXFP8Quantizer().faces(random_tensor(32, 64), **only_row)
        with pytest.raises(ValueError, match="the rowwise face in"):
            ht.MXFP8Quantizer().faces(random_tensor(32, 48), **only_row)
