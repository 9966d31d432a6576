"""Errors of plans that cannot be carried out name the layers, and what to do."""

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor.distributed import checkpoint


def classifier():
    parts = {"body": nn.Linear(64, 64), "head": nn.Linear(64, 10), "other": nn.Linear(64, 12)}
    return nn.ModuleDict({"model": nn.ModuleDict(parts)})


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_layers_that_blocks_do_not_fit_are_named_as_keep_bf16_takes_them(recipe):
    names = ["model.head", "model.other"]
    with pytest.raises(ValueError, match=r"quantize_: layer model\.head, weight: .* got 10 of") as raised:
        ht.quantize_(classifier(), recipe)
    assert f"keep_bf16={names}" in str(raised.value)
    assert "pad the tensor" not in str(raised.value)
    model = ht.quantize_(classifier(), recipe, keep_bf16=names)
    assert isinstance(model["model"]["body"].weight, ht.MasterWeight)


def test_nothing_is_converted_if_one_layer_does_not_fit():
    model = classifier()
    with pytest.raises(ValueError, match="keep_bf16"):
        ht.quantize_(model, "mxfp8")
    assert not [p for p in model.parameters() if isinstance(p, ht.MasterWeight)]
    body = model["model"]["body"]
    assert ht.check(body, torch.ones(2, 64)).untouched == ("<root>",)  # nor noted as left alone


def test_a_model_itself_has_no_name_to_keep():
    with pytest.raises(ValueError, match=r"layer <root>, input: .* got 48 of .*; pad the tensor") as raised:
        ht.quantize_(nn.Linear(48, 64), "mxfp8")
    assert "keep_bf16" not in str(raised.value)


def test_a_model_without_linear_layers_is_told_what_it_has():
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    words = (
        r"but modules whose parameters are of BatchNorm2d, Conv2d; .*0\.weight \[8, 3, 3, 3\]: Conv2d is no nn.Linear.*"
    )
    with pytest.raises(ValueError, match=f"the model has no linear layers, {words}; pass a model that has nn"):
        ht.quantize_(convolutions, "fp8")

    class Snake(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.ones(1, 8, 1))

    words = r"the model has no linear layers, .*Snake has no num_experts that is its first extent"
    with pytest.raises(ValueError, match=words):
        ht.quantize_(nn.Sequential(Snake()), "fp8")
    with pytest.raises(ValueError, match="but modules without parameters; pass"):
        ht.quantize_(nn.ReLU(), "fp8")


class Stored(nn.Module):
    is_transposed = True

    def __init__(self, *size):
        super().__init__()
        self.num_experts = size[0]
        self.weight = nn.Parameter(torch.randn(*size[:-2], size[-1], size[-2]).transpose(-2, -1))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("size", [(64, 32), (2, 64, 32)], ids=["matrix", "experts"])
def test_a_weight_whose_strides_say_the_other_layout_is_named(size):
    model = nn.Sequential(Stored(*size))
    with pytest.raises(ValueError, match=r"layer 0.* contiguous rows is required, got strides .*; assign weight\.data"):
        ht.quantize_(model, "fp8")
    model[0].weight.data = model[0].weight.data.contiguous()
    ht.quantize_(model, "fp8")
    if len(size) == 2:
        model(torch.randn(16, 64)).sum().backward()


def test_a_lazy_layer_is_run_first():
    model = nn.Sequential(nn.LazyLinear(64))
    with pytest.raises(TypeError, match=r"layer 0: its weight is not initialized.*; run the model once"):
        ht.quantize_(model, "fp8")
    for name in ("gate", "up"):
        with pytest.raises(TypeError, match=rf"layer {name}: its weight is not initialized.*; run the model once"):
            ht.quantize_(nn.ModuleDict({name: nn.LazyLinear(64)}), "fp8")
    model(torch.ones(16, 64))
    assert isinstance(ht.quantize_(model, "fp8")[0].weight, ht.MasterWeight)


def test_a_lazy_layer_that_is_left_out(tmp_path):
    """``quantize_`` raised torch's error for it once everything was converted."""
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64)), "fp8", keep_bf16=["1"])
    assert isinstance(model[0].weight, ht.MasterWeight)
    assert dict(ht.explain(model).skipped) == {"1": "not converted"}
    for who, call in {
        "checkpoint": lambda: checkpoint.save(tmp_path, 1, {"model": model}),
        "mismatch": lambda: ht.mismatch(model, torch.ones(16, 64)),
        "export_pretrained": lambda: ht.export_pretrained(model, tmp_path / "out"),
        "inference_tensors": lambda: ht.inference_tensors(model),
        "inference_config": lambda: ht.inference_config(model),
    }.items():
        with pytest.raises(ValueError, match=rf"^{who}: .*1\.weight is of a lazy layer that never ran; run the model"):
            call()
    assert not list(tmp_path.iterdir())
