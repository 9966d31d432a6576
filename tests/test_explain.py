"""What explain says is what runs."""

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor.explain import saved_bytes_per_token
from hybridtensor.ops import select_backend
from hybridtensor.recipes.spec import GEMMS


def model(spec="fp8/fp8_rowwise/bf16"):
    parts = nn.ModuleDict({"mlp": nn.Linear(64, 32), "router": nn.Linear(64, 4), "other": nn.Linear(8, 8)})
    return ht.quantize_(parts, spec, filter_fn=lambda m, name: name == "mlp")


def test_rows_name_faces_formats_and_backend(device):
    m = model().to(device)
    rows = ht.explain(m, show=False).rows
    assert [(r.layer, r.gemm, r.left, r.right) for r in rows] == [
        ("mlp", "output", "input.rowwise: fp8_e4m3_tensor", "weight.rowwise: fp8_e4m3_tensor"),
        ("mlp", "grad_input", "grad_output.rowwise: fp8_e4m3_row", "weight.columnwise: fp8_e4m3_row"),
        ("mlp", "grad_weight", "grad_output.columnwise: identity", "input.columnwise: identity"),
    ]
    for row, gemm in zip(rows, GEMMS, strict=True):
        formats = m["mlp"].weight.config.formats(gemm)
        decided = select_backend(*formats, torch.float32, torch.device(device))
        assert (row.backend, row.reason) == decided
    assert [r.saved_bytes_per_token for r in rows] == [None, None, 64 * 4]


def test_skipped_layers_have_a_reason():
    skipped = dict(ht.explain(model(), show=False).skipped)
    assert "router" in skipped["router"]
    assert skipped["other"] == "not converted"


def test_dequantized_faces_are_told_apart():
    rows = ht.explain(ht.quantize_(nn.Linear(8, 8), "fp8+dequantized"), show=False).rows
    assert rows[1].right == "weight.columnwise: dequantized rowwise"
    assert rows[0].layer == "<root>"


def test_prints_a_table(capsys):
    ht.explain(model())
    printed = capsys.readouterr().out
    for word in (
        "mlp",
        "grad_output.columnwise",
        "fp8_e4m3_row",
        "emulated: no matrix units for these formats on cpu",
        "router",
    ):
        assert word in printed
    assert max(len(line) for line in printed.splitlines()) <= 80
    ht.explain(nn.Linear(4, 4))
    assert "not converted" in capsys.readouterr().out


def test_a_module_is_required():
    with pytest.raises(TypeError, match="a module is required, got str"):
        ht.explain("model")


def test_square_blocks_of_the_input_count_their_scales_once():
    square = ht.Float8Quantizer(granularity="block", block=(128, 128))
    config = ht.HybridConfig(input=square, weight=square, grad_output=square)
    assert saved_bytes_per_token(config, 300, torch.bfloat16) == 300 + 3 * 4 / 128
