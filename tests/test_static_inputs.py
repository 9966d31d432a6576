"""Delayed scales of inputs in exports: what engines read, and what comes back.

Oracle: compressed-tensors' own configuration and modules; the model that was exported.
"""

import json

import pytest
import torch
from checkpointing import bits
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from experts import EXPERTS, WIDTH, Mixture
from safetensors.torch import load_file, save_file
from torch import nn

import hybridtensor as ht
from hybridtensor.layers import layers_of
from hybridtensor.testing import random_tensor


def model(kind="linear", spec="fp8_delayed", *, steps=2, seed=0, persistent=True):
    torch.manual_seed(seed)
    net = Mixture() if kind == "experts" else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
    ht.quantize_(net, spec, persistent=persistent)
    for step in range(steps):
        x = random_tensor(64, WIDTH, seed=step, dtype=torch.float32)
        net(3.0 * x).square().mean().backward()
        ht.step_(net)
    return net


def encode_scales(net):
    found = [layer.recipe.state for layer in layers_of(net) if layer.recipe is not None]
    return [
        state.encode_scale[[slot.startswith("input") for slot in state.slots]]
        for state in found
        if state.encode_scale is not None
    ]


@pytest.mark.parametrize("layout", ["auto", "ct_fp8_row"])
def test_engines_read_the_scales_that_forward_uses(layout):
    net = model()
    config = ht.inference_config(net, layout, static_inputs=True)
    tensors = dict(ht.inference_tensors(net, layout, static_inputs=True))
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    assert scheme.input_activations.dynamic is False
    for name, encode in zip(("0", "2"), encode_scales(net), strict=True):
        layer = nn.Linear(WIDTH, WIDTH)
        initialize_module_for_quantization(layer, scheme, force_zero_point=False)
        scale = tensors[f"{name}.input_scale"]
        assert (scale.shape, scale.dtype) == (layer.input_scale.shape, torch.float32)
        assert encode != 1
        assert torch.equal(scale, encode.reciprocal())
    dynamic = ht.inference_config(net, layout)["config_groups"]["group_0"]["input_activations"]
    assert dynamic["dynamic"] is True
    assert not any("input_scale" in name for name, _ in ht.inference_tensors(net, layout))


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("kind", "experts"), [("linear", "separate"), ("experts", "separate"), ("experts", "stacked")])
def test_they_come_back(kind, experts, persistent, tmp_path):
    net, other = model(kind, persistent=persistent), model(kind, steps=0, seed=1, persistent=persistent)
    folder = ht.export_pretrained(net, tmp_path / "out", experts=experts, static_inputs=True, dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    count = {"linear": 2, "separate": 3 * EXPERTS, "stacked": 3}[kind if kind == "linear" else experts]
    assert sum("input_scale" in name for name in stored) == count
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    ht.load_pretrained(other, folder)
    for ours, theirs in zip(encode_scales(other), encode_scales(net), strict=True):
        assert torch.equal(ours.reciprocal(), theirs.reciprocal())
        torch.testing.assert_close(ours, theirs, rtol=2**-23, atol=0)  # of several with one reciprocal


WRONG = {
    "no number": (torch.tensor([float("nan")]), "finite scales above zero"),
    "zero": (torch.zeros(1), "finite scales above zero"),
    "several": (torch.ones(3), "one scale of inputs per layer"),
    "integers": (torch.ones(1, dtype=torch.int64), "scales in a floating-point dtype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_scales_that_are_none_change_nothing(name, tmp_path):
    scale, told = WRONG[name]
    tensors = {k: t.clone() for k, t in ht.inference_tensors(model(), static_inputs=True)}
    save_file(tensors | {"2.input_scale": scale}, tmp_path / "model.safetensors")
    net = model(steps=0, seed=1)
    before = bits(net)
    with pytest.raises(ValueError, match=rf"2\.input_scale: {told}.*model\.safetensors"):
        ht.load_pretrained(net, tmp_path)
    assert bits(net) == before


@pytest.mark.parametrize("persistent", [True, False])
def test_a_write_that_fails_restores_the_scales(persistent, tmp_path, monkeypatch):
    folder = ht.export_pretrained(model(), tmp_path / "out", static_inputs=True, dtype=torch.float32)
    net = model(seed=1, persistent=persistent)
    before = bits(net)
    load = nn.Module.load_state_dict

    def failing(self, *args, **kwargs):
        load(self, *args, **kwargs)
        if self is net[2].quantization_state:
            raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "load_state_dict", failing)
        with pytest.raises(OSError, match="the device is gone"):
            ht.load_pretrained(net, folder)
    assert bits(net) == before
    ht.load_pretrained(net, folder)
    assert bits(net) != before


def test_what_has_none(tmp_path):
    with pytest.raises(ValueError, match="inference_config: static_inputs requires a layer with delayed scales"):
        ht.inference_config(model(spec="fp8"), static_inputs=True)
    with pytest.raises(ValueError, match=r"inference_tensors: static_inputs requires .* none measured of 0\.weight"):
        ht.inference_tensors(model(steps=0), static_inputs=True)
    with pytest.raises(ValueError, match="none measured of"):
        ht.export_pretrained(model(steps=0), tmp_path / "out", static_inputs=True)
    assert not list(tmp_path.iterdir())
    folder = ht.export_pretrained(model(), tmp_path / "out", static_inputs=True)
    with pytest.raises(ValueError, match=r"\['0\.input_scale', '2\.input_scale'\] besides"):
        ht.load_pretrained(model(spec="fp8"), folder)
