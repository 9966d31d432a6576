"""``hybridtensor explain SPEC`` tells what a recipe does."""

import json

import pytest

from hybridtensor.__main__ import main


def test_of_a_layer(capsys):
    assert main(["explain", "nvfp4/fp8/bf16+one_d", "--size", "96x64"]) == 0
    printed = capsys.readouterr().out
    for words in ("Quantized layers: nvfp4/fp8/bf16+one_d", "96x64", "fp8_e5m2_tensor"):
        assert words in printed
    assert main(["explain", "fp8"]) == 0
    assert "2.00x on b200 (published" in capsys.readouterr().out


def test_data(capsys):
    assert main(["explain", "fp8", "--size", "128x64", "--dtype", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"][0]["shape"] == [128, 64]
    assert found["layers"][0]["dtype"] == "float32"
    assert [row["gemm"] for row in found["rows"]] == ["output", "grad_input", "grad_weight"]
    assert found["shares"] == {"fp8": {"parameters": 1.0, "products": 1.0}, "bf16": {"parameters": 0, "products": 0}}
    assert found["predicted_speed"] == {}
    assert found["saved_bytes_per_token"] == {"kept": 64.0, "plain": 256.0}
    main(["explain", "fp8", "--json"])
    b200 = json.loads(capsys.readouterr().out)["predicted_speed"]["b200"]
    assert b200 == {"over_bf16": 2.0, "without": 0.0, "how": "published", "counts_casts": False}


def test_of_a_model_that_is_in_no_memory(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="models are built from its configs")
    transformers.LlamaConfig(num_hidden_layers=64, hidden_size=8192, intermediate_size=28672).save_pretrained(tmp_path)
    assert main(["explain", "fp8", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.*.mlp.up_proj x64" in printed
    assert "lm_head   the output head" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fp9"], "unknown format 'fp9'"),
        (["fp8", "--size", "0x4"], "--size is OUTxIN, such as 4096x14336, got '0x4'"),
        (["mxfp8", "--size", "8x8"], "multiple of 32"),
        (["fp8", "--model", "nowhere"], "a folder with config.json is required, got nowhere"),
    ],
)
def test_what_is_wrong_is_told(arguments, told, capsys):
    assert main(["explain", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hybridtensor explain: ")
    assert told in error
