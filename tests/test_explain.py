"""What explain says is what runs."""

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor import costs
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


def test_prints_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # else the width is that of the terminal that tests run in
    found = ht.explain(model())
    assert not capsys.readouterr().out
    print(found)
    printed = capsys.readouterr().out
    assert repr(found) == str(found) == printed.rstrip("\n")
    for word in (
        "mlp",
        "grad_output.columnwise",
        "fp8_e4m3_row",
        "emulated: no matrix units for these formats on cpu",
        "router",
    ):
        assert word in printed
    assert max(len(line) for line in printed.splitlines()) <= 80
    ht.explain(nn.Linear(4, 4), show=True)
    assert "not converted" in capsys.readouterr().out


def test_a_module_is_required():
    with pytest.raises(TypeError, match="a module is required, got str"):
        ht.explain("model")


def test_square_blocks_of_the_input_count_their_scales_once():
    square = ht.Float8Quantizer(granularity="block", block=(128, 128))
    config = ht.HybridConfig(input=square, weight=square, grad_output=square)
    assert saved_bytes_per_token(config, 300, torch.bfloat16) == 300 + 3 * 4 / 128


class Block(nn.Module):
    """The linear layers of a block of Llama-3 8B."""

    def __init__(self):
        super().__init__()
        sizes = {"q_proj": (4096, 4096), "k_proj": (4096, 1024), "v_proj": (4096, 1024), "o_proj": (4096, 4096),
                 "gate_proj": (4096, 14336), "up_proj": (4096, 14336), "down_proj": (14336, 4096)}  # fmt: skip
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(*size, bias=False))


def llama():
    with torch.device("meta"):
        parts = {"embed": nn.Embedding(128256, 4096), "layers": nn.ModuleList(Block() for _ in range(32))}
        return nn.ModuleDict({**parts, "lm_head": nn.Linear(4096, 128256, bias=False)}).bfloat16()


def printed_lines(capsys):
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_224_layers_are_less_than_40_lines(capsys):
    scales = [("*.q_proj", "*.k_proj", "*.v_proj"), ("*.gate_proj", "*.up_proj")]
    found = ht.explain(ht.quantize_(llama(), "fp8", common_scale=scales), show=True)
    lines = printed_lines(capsys)
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert sum(line.startswith(f"layers.*.{name} x32") for line in lines) == 1
    assert "One scale in common: layers.*.q_proj x32 with k_proj, v_proj" in lines
    assert "One scale in common: layers.*.gate_proj x32 with up_proj" in lines
    assert len(found.rows) == 224 * 3
    assert found.layers[0].common_scale == ("layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj")
    assert found.layers[3].common_scale == ()


def test_layers_that_differ_are_lines_of_their_own(capsys):
    layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 32)}) for _ in range(6))
    ht.quantize_(layers, "fp8", keep_bf16=["0"])
    ht.quantize_(layers[3], "mxfp8", name="3")
    ht.explain(layers, show=True)
    lines = [" ".join(line.split()) for line in printed_lines(capsys)]
    assert "[1-2,4-5].up x4 32x32 32" in lines
    assert "3.up 32x32 33" in lines
    assert "0.up not converted" in lines
    assert {"Quantized layers: fp8", "Quantized layers: mxfp8"} <= set(lines)


def of_h200(word):
    """Return what products in a format cost on an H200; what is emulated costs more than BF16."""
    (time,) = (row.time for row in costs.table("h200").rows if row.word == word)
    assert (time > 1) == (word in ("mxfp8", "nvfp4"))
    return time


def test_shares_of_formats_are_those_of_the_layers():
    found = ht.explain(ht.quantize_(llama(), "fp8/mxfp8/bf16"), show=False)
    linears = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    vocabulary = 128256 * 4096
    shares = found.shares
    assert list(shares) == ["bf16", "fp8", "mxfp8"]
    assert shares["fp8"].parameters == pytest.approx(linears / (linears + 2 * vocabulary))
    assert shares["mxfp8"].parameters == 0
    for word in ("fp8", "mxfp8"):
        assert shares[word].products == pytest.approx(linears / 3 / (linears + vocabulary))
    for column in zip(*shares.values(), strict=True):
        assert sum(column) == pytest.approx(1)
    small = 32 * 2 * 4096 * 1024  # of which only grad_weight, in BF16, is known
    h200, b200 = tuple(of_h200(word) for word in ("fp8", "mxfp8")), (0.5, 0.5)
    for device, times in (("h200", h200), ("b200", b200)):
        known = (linears - small) * (sum(times) + 1) / 3 + small / 3 + vocabulary
        of_bf16 = linears - small * 2 / 3 + vocabulary
        assert found.predicted_speed(device) == pytest.approx(of_bf16 / known)
    without = found.to_dict()["predicted_speed"]["h200"]["without"]
    assert without == pytest.approx(small * 2 / 3 / (linears + vocabulary))


@pytest.mark.parametrize(
    ("spec", "quantized"),
    [
        ("fp8/fp8_rowwise/bf16", (1, 2 / 3)),
        ("bf16/mxfp8/mxfp8", (0, 2 / 3)),
        ("fp8+high_precision", (1, 1 / 3)),
        ("bf16", (0, 0)),
        ("fp8", (1, 1)),
    ],
)
def test_products_in_high_precision_do_not_count_as_quantized(spec, quantized, capsys):
    """Wherever it is told: in the shares of formats, in the last line, in ``check``."""
    net = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), spec)
    found = ht.explain(net, show=True)
    plain = found.shares["bf16"]
    assert (1 - plain.parameters, 1 - plain.products) == pytest.approx(quantized)
    assert found.coverage[:2] == pytest.approx(quantized)
    told = f"Quantized: {quantized[0]:.1%} of the parameters, {quantized[1]:.1%} of the multiplications"
    assert told in " ".join(capsys.readouterr().out.split())
    checked = ht.check(net, torch.randn(32, 64, requires_grad=True))
    assert (checked.coverage[:2], checked.flops) == (found.coverage[:2], pytest.approx(quantized[1]))
    assert checked.problems == []


def test_where_a_format_is_emulated_is_said(capsys):
    ht.explain(ht.quantize_(nn.Linear(4096, 4096, device="meta"), "nvfp4"), show=True)
    lines = printed_lines(capsys)
    assert f"  {1 / of_h200('nvfp4'):.2f}x on h200 (measured); emulated there: nvfp4" in lines
    assert "  4.00x on b200 (published, casts not counted)" in lines


def test_speeds_of_layers_smaller_than_any_that_was_measured_are_not_told(capsys):
    found = ht.explain(ht.quantize_(nn.Linear(64, 4096), "fp8"), show=True)
    printed = capsys.readouterr().out
    assert "In total" in printed
    assert "h200" not in printed
    assert "Predicted speed" not in printed
    assert found.to_dict()["predicted_speed"] == {}
    with pytest.raises(ValueError, match="fewer than 4096 features in or out, the least in the table of h200"):
        found.predicted_speed()
    own = costs.measure("cpu", tokens=128, out_features=256, in_features=128, repeats=1)
    assert own.least_features == 128
    with pytest.raises(ValueError, match="fewer than 128 features"):
        found.predicted_speed(own)
    row = costs.Row("fp8", 0.25, True, "a test")
    assert found.predicted_speed(costs.CostTable("own", "cpu", "measured", True, (row,), 64)) == 4.0
    assert ht.explain(ht.quantize_(nn.Linear(64, 64), "bf16"), show=False).predicted_speed() == 1.0


def test_what_part_of_a_model_is_left_out_of_a_speed_is_told(capsys):
    ht.explain(ht.quantize_(llama(), "fp8"), show=True)
    part = 32 * 2 * 4096 * 1024 / (32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"over BF16, without {part:.1%} narrower than 4096:" in printed
    assert "x on h200 (measured), " in printed


def test_bytes_kept_are_those_of_all_layers_over_plain_ones(capsys):
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).bfloat16()
    found = ht.explain(ht.quantize_(model, "fp8"), show=True)
    assert found.saved_bytes_per_token == (64 + 128, 2 * (64 + 128))
    assert "Inputs kept for backward: 0.2 kB per token, 0.50 of plain layers' 0.4" in capsys.readouterr().out


@pytest.mark.parametrize("spec", ["fp8/fp8/bf16", "mxfp8", "fp8+save_original_input"])
def test_frozen_layers_keep_no_input_and_have_two_products(spec):
    """Oracles: what autograd saves, and torch's count of operations, of a frozen layer beside a trained adapter."""
    net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)).bfloat16()
    ht.quantize_(net, spec, keep_bf16=["1"])
    net[0].requires_grad_(False)
    found, kept = ht.explain(net), []
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        net[0](x)
    assert not [t for t in kept if not isinstance(t, nn.Parameter)]
    assert found.saved_bytes_per_token == (0, 0)
    assert found.rows[2].saved_bytes_per_token == 0
    assert "0 128x64 0" in " ".join(str(found).split())
    assert found.coverage.products == pytest.approx(2 / 5)
    assert ht.check(net, x).flops == pytest.approx(2 / 5)
    assert found.shares["bf16"].products == pytest.approx(3 / 5)
    row = costs.Row("fp8", 0.25, True, "a test"), costs.Row("mxfp8", 0.25, True, "a test")
    own = costs.CostTable("own", "cpu", "measured", True, row, 64)
    assert found.predicted_speed(own) == pytest.approx(5 / (2 * 0.25 + 3))


def test_a_weight_of_two_layers_counts_once():
    model = nn.ModuleDict({"a": nn.Linear(32, 32, bias=False), "b": nn.Linear(32, 32, bias=False)})
    model["b"].weight = model["a"].weight
    found = ht.explain(ht.quantize_(model, "fp8"), show=False)
    assert [layer.parameters for layer in found.layers] == [32 * 32, 0]
    assert found.shares["fp8"].parameters == 1


def test_notebooks_show_it_without_scripts_and_without_the_network():
    html = ht.explain(model(), show=False)._repr_html_()
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, [name for name, _ in attributes]))
    parser.feed(html)
    assert {tag for tag, _ in tags} <= {"pre", "span"}
    assert {name for _, names in tags for name in names} <= {"style"}
    assert "url(" not in html
    assert "Quantized layers: fp8/fp8_rowwise/bf16" in html
    assert "mlp" in html


def test_predictions_need_a_table():
    found = ht.explain(model(), show=False)
    with pytest.raises(ValueError, match="unknown table of costs 'h300'; did you mean 'h200'"):
        found.predicted_speed("h300")
    with pytest.raises(TypeError, match="a table of costs, or the name of one, is required, got 3"):
        found.predicted_speed(3)
