"""Folders for inference engines: what transformers loads of them, and what comes back.

Oracles: ``from_pretrained`` on its own; for what comes back, bitwise, the weights that were exported.
"""

import contextlib
import copy
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from experts import EXPERTS, HIDDEN, WIDTH, Experts
from inference_models import FAMILIES, WEIGHTS, recipe, values_of
from safetensors.torch import load_file, save_file
from tiers import in_turn
from torch import nn
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, GraniteMoeConfig

import hybridtensor as ht
from hybridtensor.__main__ import main
from hybridtensor.distributed import checkpoint
from hybridtensor.inference.stored import amax_of

PLAIN_LAYOUTS = [
    "hf_fp8",
    "ct_fp8_row",
    "ct_fp8_tensor",
    "ct_mxfp8",
    "ct_fp8_block",
    "hf_fp8_ue8m0",
    "ct_nvfp4",
    "ct_mxfp4",
]


FP8 = torch.ones(64, 64).to(torch.float8_e4m3fn)


def stored(scale, elements=FP8, **others):
    return {"0.weight": elements, "0.weight_scale": scale, **others}


def nvfp4(level=1.0, code=56):
    scale = torch.full((64, 4), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = {"0.weight_packed": torch.zeros(64, 32, dtype=torch.uint8), "0.weight_scale": scale}
    return {**packed, "0.weight_global_scale": torch.full((1,), level)}


NO_SCALES, BAD_SCALES = "scales are required beside elements in", "finite scales above zero are required"
BAD = {
    "FP8 experts without scales": (NO_SCALES, {"experts.w1": torch.ones(EXPERTS, HIDDEN, WIDTH).to(FP8.dtype)}),
    "int8": (NO_SCALES, {"0.weight": torch.ones(64, 64, dtype=torch.int8)}),
    "int64": (NO_SCALES, {"0.weight": torch.ones(64, 64, dtype=torch.int64)}),
    "E5M2": (NO_SCALES, {"0.weight": FP8.to(torch.float8_e5m2)}),
    "FP8 bias": (NO_SCALES, {"0.weight": torch.ones(64, 64), "0.bias": torch.ones(64).to(FP8.dtype)}),
    "NaN": (BAD_SCALES, stored(torch.full((64, 1), float("nan")))),
    "Inf": (BAD_SCALES, stored(torch.tensor([float("inf")]))),
    "zero": (BAD_SCALES, stored(torch.tensor([0.0]))),
    "negative": (BAD_SCALES, stored(-torch.ones(64, 1))),
    "exponents of NaN": (BAD_SCALES, stored(torch.full((64, 2), 255, dtype=torch.uint8))),
    "int32": ("scales in a floating-point dtype are required", stored(torch.ones(64, 1, dtype=torch.int32))),
    "both spellings": ("got both", stored(torch.ones(1), **{"0.weight_scale_inv": torch.ones(1, 1)})),
    "a global scale of zero": (BAD_SCALES, nvfp4(level=0.0)),
    "an infinite global scale": (BAD_SCALES, nvfp4(level=float("inf"))),
    "negative blocks": (BAD_SCALES, nvfp4(code=0xB8)),
    "blocks of NaN": (BAD_SCALES, nvfp4(code=0x7F)),
}


def family(name, layout, persistent=False, seed=0):
    torch.manual_seed(seed)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[name]), dtype=torch.bfloat16).eval()
    return ht.quantize_(plain, recipe(layout), persistent=persistent)


def faces(model):
    """Return the bytes of all rowwise faces, and of all other parameters."""
    found = {}
    for name, p in model.named_parameters():
        tensors = [p.detach()]
        if isinstance(p, ht.HybridTensor):
            face = p.rowwise if p.rowwise is not None else p.columnwise
            tensors = face.face.tensors()
        found[name] = [t.contiguous().view(torch.uint8) for t in tensors]
    return found


def alike(one, other):
    one, other = faces(one), faces(other)
    assert one.keys() == other.keys()
    for name in one:
        for mine, theirs in zip(one[name], other[name], strict=True):
            assert torch.equal(mine, theirs), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "hf_fp8"), ("mixtral", "hf_fp8"), ("qwen3_moe", "hf_fp8"), ("llama", "hf_fp8_ue8m0"),
     ("llama", "ct_fp8_row"), ("llama", "ct_mxfp8"), ("llama", "ct_fp8_tensor"), ("llama", "ct_fp8_block")],
)  # fmt: skip
def test_transformers_loads_it(name, layout, tmp_path):
    """Its weights are the values of the faces, rounded to bf16; so is what it computes."""
    model = family(name, layout)
    folder = ht.export_pretrained(model, tmp_path / "out", layout)
    from transformers import CompressedTensorsConfig, FineGrainedFP8Config

    options = {}
    if layout.startswith("ct"):
        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    elif torch.cuda.is_available():  # else it dequantizes unasked
        options = {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    expected = ht.plain_(copy.deepcopy(model))
    with torch.no_grad():
        for own, theirs in zip(expected.named_parameters(), model.parameters(), strict=True):
            if isinstance(theirs, ht.MasterWeight):
                quantizer = theirs.config.weight
                values = theirs.dequantize()
                stack = values if values.dim() == 3 else values[None]
                made = torch.stack([values_of(one.contiguous(), quantizer, torch.float32) for one in stack])
                own[1].copy_(made.view(values.shape))
    for (n, mine), theirs in zip(loaded.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.float(), theirs.float()), n
    x = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, expected(x).logits)


@pytest.mark.parametrize(("layout", "name"), in_turn(PLAIN_LAYOUTS, ["llama", "mixtral", "qwen3_moe"]))
def test_it_comes_back_bitwise(name, layout, tmp_path):
    """Each model in turn; ``test_transformers_loads_it`` and ``test_stacks_come_back`` have other pairs."""
    model = family(name, layout, persistent=True)
    folder = ht.export_pretrained(model, tmp_path / "out", layout)
    back = ht.load_pretrained(family(name, layout, persistent=True, seed=1), folder)
    alike(model, back)
    x = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(model(x).logits, back(x).logits)


@pytest.mark.parametrize("experts", ["separate", "stacked"])
@pytest.mark.parametrize("layout", ["ct_fp8_row", "ct_nvfp4", "ct_mxfp8", "ct_fp8_tensor"])
def test_stacks_come_back(layout, experts, tmp_path):
    class Stacks(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.is_transposed = 3, False
            self.w1, self.w2 = (nn.Parameter(torch.randn(3, 128, 64).bfloat16()) for _ in range(2))

    torch.manual_seed(0)
    one, other = (ht.quantize_(Stacks(), recipe(layout), persistent=True) for _ in range(2))
    folder = ht.export_pretrained(one, tmp_path / "out", layout, experts=experts)
    alike(one, ht.load_pretrained(other, folder))


def test_values_for_weights_that_are_not_persistent(tmp_path):
    folder = ht.export_pretrained(family("llama", "hf_fp8", persistent=True), tmp_path / "out")
    persistent = family("llama", "hf_fp8", persistent=True)
    master, plain = family("llama", "hf_fp8", seed=1), ht.plain_(family("llama", "hf_fp8", seed=2))
    for model in (master, plain):
        ht.load_pretrained(model, folder)
        for theirs, mine in zip(persistent.parameters(), model.parameters(), strict=True):
            values = theirs.rowwise.dequantize() if isinstance(theirs, ht.HybridTensor) else theirs
            got = mine.dequantize() if isinstance(mine, ht.MasterWeight) else mine
            assert torch.equal(got, values)


def test_what_deepseek_wrote(tmp_path):
    """FP32 scales that are no powers of two, a last block that is partial, and scales called ``scale``."""
    torch.manual_seed(0)
    squares = ht.Float8Quantizer("block", block="128x128", pow2_scale=False)
    weight = squares.quantize(torch.randn(576, 256), columnwise=False).rowwise
    for name in ("weight_scale_inv", "scale"):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"0.weight": weight.qdata, f"0.{name}": weight.scale}, folder / "model.safetensors")
        config = ht.HybridConfig(*[squares] * 3)
        model = ht.quantize_(nn.Sequential(nn.Linear(256, 576, bias=False)), config, persistent=True)
        ht.load_pretrained(model, folder)
        assert torch.equal(model[0].weight.rowwise.qdata.view(torch.uint8), weight.qdata.view(torch.uint8))
        assert torch.equal(model[0].weight.rowwise.scale, weight.scale)
        column = model[0].weight.columnwise.dequantize(torch.float32)
        assert torch.equal(column, weight.dequantize(torch.float32))
    other = ht.HybridConfig(*[ht.Float8Quantizer("block", block="128x128")] * 3)
    model = ht.quantize_(nn.Sequential(nn.Linear(256, 576, bias=False)), other, persistent=True)
    with pytest.raises(ValueError, match=r"stored as fp8_e4m3_128x128 is required, got fp8_e4m3_128x128_fp32_scale"):
        ht.load_pretrained(model, tmp_path / "scale")


def test_files_index_and_config(tmp_path):
    model = family("llama", "hf_fp8")
    tensors = {name: tensor.clone() for name, tensor in ht.inference_tensors(model)}
    folder = ht.export_pretrained(model, tmp_path / "out", shard_bytes=400_000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for file in files:
        for name, tensor in load_file(folder / file).items():
            assert index["weight_map"].pop(name) == file
            assert torch.equal(tensor.view(torch.uint8), tensors.pop(name).view(torch.uint8))
    assert not tensors
    assert not index["weight_map"]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"] == ht.inference_config(model)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class TestWhatIsWrong:
    def test_a_folder_that_is_there(self, tmp_path):
        with pytest.raises(ValueError, match="a folder that is not there is required"):
            ht.export_pretrained(family("llama", "hf_fp8"), tmp_path)
        with pytest.raises(ValueError, match="a folder whose parent is there is required"):
            ht.export_pretrained(family("llama", "hf_fp8"), tmp_path / "a" / "b")

    def test_nothing_is_left_of_an_export_that_fails(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            "safetensors.torch.save_file", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("full"))
        )
        with pytest.raises(OSError, match="full"):
            ht.export_pretrained(family("llama", "hf_fp8"), tmp_path / "out")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("fails", [False, True])
    def test_temporary_folders_of_others_stay(self, fails, tmp_path, monkeypatch):
        """Processes of two containers may have one number, and write to one storage at one time."""
        other = tmp_path / f".out.partial-{os.getpid()}"
        other.mkdir()
        (other / "model.safetensors").write_bytes(b"half")
        make, save = tempfile.mkdtemp, safetensors.torch.save_file
        ours = []
        monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: ours.append(make(**options)) or ours[-1])

        def saving(*arguments, **options):
            assert Path(ours[0]).parent == tmp_path
            if fails:
                raise OSError("full")
            save(*arguments, **options)

        monkeypatch.setattr("safetensors.torch.save_file", saving)
        model = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8")
        with pytest.raises(OSError, match="full") if fails else contextlib.nullcontext():
            ht.export_pretrained(model, tmp_path / "out")
        assert (other / "model.safetensors").read_bytes() == b"half"
        assert {path.name for path in tmp_path.iterdir()} == {other.name, *([] if fails else ["out"])}
        assert len(ours) == 1

    def test_everybody_may_read_what_the_umask_lets_them(self, tmp_path):
        folder = ht.export_pretrained(nn.Linear(4, 4), tmp_path / "out")
        (tmp_path / "made").mkdir()
        assert folder.stat().st_mode == (tmp_path / "made").stat().st_mode

    def test_files_that_are_not_there(self, tmp_path):
        model = family("llama", "hf_fp8", persistent=True)
        with pytest.raises(
            ValueError,
            match=r"^load_pretrained: a folder on this machine is required, got .*; export or download it first",
        ):
            ht.load_pretrained(model, tmp_path / "nowhere")
        with pytest.raises(ValueError, match="files of safetensors are required"):
            ht.load_pretrained(model, tmp_path)
        folder = ht.export_pretrained(model, tmp_path / "out", shard_bytes=400_000)
        (folder / "digests.json").unlink()
        next(folder.glob("model-00002*")).unlink()
        with pytest.raises(ValueError, match=r"without \['model-00002"):
            ht.load_pretrained(model, folder)
        (folder / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(ValueError, match="an index with a weight_map is required"):
            ht.load_pretrained(model, folder)

    def test_tensors_that_are_missing_or_left_over(self, tmp_path):
        layers = [nn.Sequential(nn.Linear(128, 128, bias=b)) for b in (True, False)]
        for bias, model in zip(("bias", "none"), layers, strict=True):
            ht.export_pretrained(ht.quantize_(model, "fp8", persistent=True), tmp_path / bias)
        with pytest.raises(ValueError, match=r"got no \['0\.bias'\] and \[\] besides"):
            ht.load_pretrained(layers[0], tmp_path / "none")
        with pytest.raises(ValueError, match=r"got no \[\] and \['0\.bias'\] besides"):
            ht.load_pretrained(layers[1], tmp_path / "bias")
        with pytest.warns(UserWarning, match="were loaded from"):
            ht.load_pretrained(layers[1], tmp_path / "bias", strict=False)

    def test_other_formats_and_shapes(self, tmp_path):
        folder = ht.export_pretrained(family("llama", "hf_fp8", persistent=True), tmp_path / "out")
        with pytest.raises(ValueError, match=r"a weight stored as mxfp8_e4m3 is required, got fp8_e4m3_128x128"):
            ht.load_pretrained(family("llama", "ct_mxfp8", persistent=True), folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(2, 2)
        (tmp_path / "bad").mkdir()
        save_file(tensors, tmp_path / "bad" / "model.safetensors")
        with pytest.raises(
            ValueError, match=r"up_proj\.weight: scales of a layout .* \[2, 2\] for a matrix \[384, 256\]"
        ):
            ht.load_pretrained(family("llama", "hf_fp8", persistent=True), tmp_path / "bad")


def test_an_amax_of_bfloat16_comes_back_from_its_reciprocal():
    """All positive bfloat16 whose quotient is a normal fp32."""
    amax = torch.arange(0x0300, 0x7F80, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    level = 2688.0 / amax
    kept = level.isfinite() & (level > 2**-126)
    found = torch.cat([amax_of(one[None]) for one in level[kept][::97]])
    assert torch.equal(found, amax[kept][::97])


@pytest.mark.parametrize("layout", WEIGHTS)
def test_every_layout_is_written_and_read(layout, tmp_path):
    """Matrices alone, fp32: elements and scales come back."""
    made = [ht.quantize_(nn.Sequential(nn.Linear(256, 128)), recipe(layout), persistent=True) for _ in range(2)]
    ht.load_pretrained(made[1], ht.export_pretrained(made[0], tmp_path / "out", layout, dtype=torch.float32))
    assert torch.equal(
        made[0][0].weight.rowwise.qdata.view(torch.uint8), made[1][0].weight.rowwise.qdata.view(torch.uint8)
    )
    assert torch.equal(made[0][0].weight.rowwise.scale.float(), made[1][0].weight.rowwise.scale.float())


SAME_COLUMNS = ["fp8", "nvfp4/nvfp4/bf16", "mxfp8+mx_two_d", "mxfp8+dequantized", "mxfp8+rowwise_dequantized"]
OTHER_COLUMNS = ["fp8_rowwise", "mxfp8/nvfp4/bf16", "fp8+high_precision", "mxfp8"]


@pytest.mark.parametrize("spec", [*SAME_COLUMNS, *OTHER_COLUMNS])
def test_columnwise_faces_are_made_of_what_was_read(spec, tmp_path):
    """Transposes of square ones, and faces of the rowwise one, are what they were; others are quantized anew, of
    the values of the rowwise face.
    """
    made = [ht.quantize_(nn.Sequential(nn.Linear(256, 128)).bfloat16(), spec, persistent=True) for _ in range(2)]
    ht.load_pretrained(made[1], ht.export_pretrained(made[0], tmp_path / "out"))
    one, other = (model[0].weight for model in made)
    alike(*made)
    column = other.columnwise.dequantize(torch.float32)
    if spec in SAME_COLUMNS:
        assert torch.equal(column, one.columnwise.dequantize(torch.float32))
        return
    quantizer, values = one.config.weight, other.rowwise.dequantize(torch.float32)
    if isinstance(quantizer, ht.HybridQuantizer):
        quantizer = quantizer.columnwise
    expected = quantizer.quantize(values, rowwise=False, dtype=torch.bfloat16).columnwise
    assert torch.equal(column, expected.dequantize(torch.float32))


class TestTheCommand:
    def test_a_folder_of_transformers(self, tmp_path, capsys):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"]), dtype=torch.bfloat16)
        plain.save_pretrained(tmp_path / "plain")
        (tmp_path / "plain" / "tokenizer.json").write_text("{}")
        assert main(["export", str(tmp_path / "plain"), str(tmp_path / "out"), "--recipe", "mxfp8"]) == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / "out")
        expected = dict(ht.inference_tensors(ht.quantize_(plain, "mxfp8")))
        got = load_file(tmp_path / "out" / "model.safetensors")
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name].view(torch.uint8), t.view(torch.uint8)) for name, t in expected.items())
        assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"

    @pytest.mark.parametrize("persistent", [False, True])
    def test_checkpoints_of_a_run(self, persistent, tmp_path, capsys):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"]), dtype=torch.float32)
        plain.config.save_pretrained(tmp_path / "config")
        model = ht.quantize_(plain, "fp8_rowwise", persistent=persistent)
        checkpoint.save(tmp_path / "run", 3, {"model": model})
        command = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--recipe", "fp8_rowwise", "--dtype", "fp32"]
        assert main(command) == 1
        assert "--config is required" in capsys.readouterr().err
        command += ["--config", str(tmp_path / "config"), *(["--persistent"] if persistent else [])]
        assert main(command) == 0
        got, expected = load_file(tmp_path / "out" / "model.safetensors"), dict(ht.inference_tensors(model))
        assert all(torch.equal(got[name].view(torch.uint8), t.view(torch.uint8)) for name, t in expected.items())

    def test_static_scales_of_a_run(self, tmp_path, capsys):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"]), dtype=torch.bfloat16)
        plain.config.save_pretrained(tmp_path / "config")
        model = ht.quantize_(plain, "fp8_delayed")
        model(input_ids=torch.arange(8)[None]).logits.float().square().mean().backward()
        ht.step_(model)
        checkpoint.save(tmp_path / "run", 3, {"model": model})
        command = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--recipe", "fp8_delayed", "--static-inputs"]
        assert main([*command, "--config", str(tmp_path / "config")]) == 0
        got = load_file(tmp_path / "out" / "model.safetensors")
        expected = dict(ht.inference_tensors(model, static_inputs=True))
        scales = [name for name in got if name.endswith("input_scale")]
        assert scales
        assert all(torch.equal(got[name], expected[name]) for name in scales)

    @pytest.mark.parametrize(
        ("source", "folder", "options", "told"),
        [
            ("nowhere", "out", [], "or one of a run's checkpoints, is required, got .*nowhere"),
            (".", "there", [], "a new folder whose parent is there is required, got .*there"),
            (".", "no/out", [], "a new folder whose parent is there is required, got .*no/out"),
            (".", "out", ["--static-inputs"], "--static-inputs requires a run's checkpoints"),
            (".", "out", ["--step", "0"], "--step requires a run's checkpoints"),
            (".", "out", ["--config", "."], "--config requires a run's checkpoints"),
            (".", "out", ["--entry", "ema"], "--entry requires a run's checkpoints"),
            (".", "out", ["--persistent"], "--persistent requires a run's checkpoints"),
        ],
    )
    def test_what_is_wrong_is_told(self, source, folder, options, told, tmp_path, capsys):
        (tmp_path / "there").mkdir()
        assert main(["export", str(tmp_path / source), str(tmp_path / folder), "--recipe", "fp8", *options]) == 1
        assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize("layout", ["ct_fp8_block", "hf_fp8", "ct_fp8_tensor", "ct_fp8_row"])
@pytest.mark.parametrize("size", [(64, 64), (128, 128), (1, 128)])
def test_matrices_of_one_block_come_back(layout, size, tmp_path):
    made = [ht.quantize_(nn.Sequential(nn.Linear(*size[::-1])), recipe(layout), persistent=True) for _ in range(2)]
    alike(
        made[0],
        ht.load_pretrained(made[1], ht.export_pretrained(made[0], tmp_path / "out", layout, dtype=torch.float32)),
    )


class TestWhatIsDoubtful:
    def test_nothing_is_written_by_a_load_that_fails(self, tmp_path):
        one = ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8", persistent=True)
        other = ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), "fp8", persistent=True)
        before = faces(copy.deepcopy(other))
        folder = ht.export_pretrained(one, tmp_path / "out")
        with pytest.raises(ValueError, match=r"1\.weight of \[32, 64\] is required, got \[64, 64\] in the folder"):
            ht.load_pretrained(other, folder)
        assert all(torch.equal(a, b) for n in before for a, b in zip(before[n], faces(other)[n], strict=True))

    def test_exports_of_models_without_memory(self, tmp_path):
        model = ht.quantize_(nn.Linear(128, 128, device="meta"), "fp8_block")
        assert ht.inference_config(model)
        with pytest.raises(ValueError, match=r"^export_pretrained: weight is on the meta device, .*to_empty"):
            ht.export_pretrained(model, tmp_path / "a")
        assert not list(tmp_path.iterdir())

    def test_layouts_that_do_not_fit(self, tmp_path):
        model = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "mxfp8")
        with pytest.raises(ValueError, match=r"^export_pretrained: 0\.weight.*hf_fp8"):
            ht.export_pretrained(model, tmp_path / "a", "hf_fp8")
        assert not list(tmp_path.iterdir())

    def test_models_without_memory(self, tmp_path):
        folder = ht.export_pretrained(ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8"), tmp_path / "out")
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(64, 64))
        with pytest.raises(ValueError, match="meta device; call to_empty"):
            ht.load_pretrained(empty, folder)

    def test_elements_without_scales(self, tmp_path):
        save_file({"0.weight": torch.ones(64, 64).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"0\.weight: scales are required beside elements"):
            ht.load_pretrained(nn.Sequential(nn.Linear(64, 64, bias=False)), tmp_path)

    @pytest.mark.parametrize("name", BAD)
    def test_tensors_that_cannot_be_a_weight(self, name, tmp_path):
        """Each was loaded as values, or as NaN, without a word."""
        said, tensors = BAD[name]
        stacked = any(key.startswith("experts") for key in tensors)
        model = nn.ModuleDict(
            {"experts": Experts(EXPERTS)} if stacked else {"0": nn.Linear(64, 64, bias="0.bias" in tensors)}
        )
        before = [p.detach().clone() for p in model.parameters()]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=said):
            ht.load_pretrained(model, tmp_path, strict=not stacked)
        assert all(map(torch.equal, model.parameters(), before))

    def test_what_is_not_loaded_is_told(self, tmp_path):
        save_file({"0.weight": torch.ones(64, 64), "other": torch.ones(1)}, tmp_path / "model.safetensors")
        model = nn.Sequential(nn.Linear(64, 64))
        with pytest.warns(
            UserWarning, match=r"1 parameters .* no \['0\.bias'\], and of \['other'\] the model has none"
        ):
            ht.load_pretrained(model, tmp_path, strict=False)
        assert torch.equal(model[0].weight, torch.ones(64, 64))

    def test_exponents_as_bytes(self, tmp_path):
        weight = torch.ones(64, 64).to(torch.float8_e4m3fn)
        scale = torch.full((1, 1), 120, dtype=torch.uint8)
        save_file({"0.weight": weight, "0.weight_scale_inv": scale}, tmp_path / "model.safetensors")
        plain = ht.load_pretrained(nn.Sequential(nn.Linear(64, 64, bias=False)), tmp_path)
        assert torch.equal(plain[0].weight, torch.full((64, 64), 2.0**-7))

    def test_files_that_nobody_listed(self, tmp_path):
        folder = ht.export_pretrained(ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8"), tmp_path / "out")
        save_file({"0.bias": torch.zeros(64)}, folder / "zz.safetensors")
        with pytest.raises(ValueError, match=r"files of digests\.json are required, got zz\.safetensors besides"):
            ht.load_pretrained(nn.Sequential(nn.Linear(64, 64)), folder)
        (folder / "digests.json").unlink()
        with pytest.raises(ValueError, match=r"each tensor in one file is required, got \['0\.bias'\] in zz\.safe"):
            ht.load_pretrained(nn.Sequential(nn.Linear(64, 64)), folder)

    def test_parts_of_experts_that_end_inside_a_block(self, tmp_path):
        config = copy.deepcopy(FAMILIES["mixtral"])
        config.intermediate_size, config.num_hidden_layers = 192, 1
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        squares = ht.Float8Quantizer("block", block="128x128")
        tensors = {}
        for name, values in ht.inference_tensors(plain):
            tensors[name] = values.contiguous()
            if ".experts." in name:
                face = squares.quantize(values.contiguous(), columnwise=False).rowwise
                tensors[name], tensors[name + "_scale_inv"] = face.qdata, face.scale.contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="parts of whole blocks of 128 rows are required to be one matrix"):
            ht.load_pretrained(plain, tmp_path)


@pytest.mark.parametrize("kind", ["persistent", "master", "plain"])
def test_square_stacks_that_are_stored_transposed_come_back(kind, tmp_path):
    """Nothing in the shapes tells which way they are stored."""

    class Stored(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.is_transposed = 3, True
            self.w1 = nn.Parameter(torch.randn(3, 64, 64).bfloat16())

    torch.manual_seed(0)
    one = ht.quantize_(Stored(), "fp8_rowwise", persistent=True)
    folder = ht.export_pretrained(one, tmp_path / "out", experts="stacked")
    other = Stored() if kind == "plain" else ht.quantize_(Stored(), "fp8_rowwise", persistent=kind == "persistent")
    ht.load_pretrained(other, folder)
    values = other.w1 if kind == "plain" else other.w1.dequantize()
    expected = one.w1.columnwise.dequantize()  # what the forward multiplies, as it is stored
    if kind == "persistent":
        values = other.w1.columnwise.dequantize()
    assert torch.equal(values, expected)


@pytest.mark.parametrize("spec", ["bf16", "fp8_rowwise", "fp8_block", "nvfp4", "static"])
def test_stacks_that_checkpoints_only_rename_come_back(spec, tmp_path):
    """Values, faces and scales of inputs: ``load_pretrained`` looked for a matrix per expert, and raised."""
    config = GraniteMoeConfig(hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
                              num_key_value_heads=1, num_local_experts=4, vocab_size=64)  # fmt: skip
    kind = "fp8_delayed" if spec == "static" else spec
    one, other = (AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16) for _ in range(2))
    for model in (one, other):
        ht.quantize_(model, kind, persistent=kind != "bf16")
    if spec == "static":
        one(torch.arange(24).view(2, 12)).logits.square().mean().backward()
        ht.step_(one)
    ht.load_pretrained(other, ht.export_pretrained(one, tmp_path / "out", static_inputs=spec == "static"))
    alike(other, one)
    if spec == "static":
        x = torch.arange(24).view(2, 12)
        with torch.no_grad():
            torch.testing.assert_close(other(x).logits, one(x).logits, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["ct_fp8_row", "auto"])
def test_what_transformers_keeps_in_fp32_is_stored_in_fp32(layout, tmp_path):
    """Ernie's router, whose weight in BF16 chose other experts."""
    config = Ernie4_5_MoeConfig(hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=2,
                                num_attention_heads=2, num_key_value_heads=1, moe_num_experts=4, moe_k=2,
                                moe_layer_start_index=1, vocab_size=64)  # fmt: skip
    one, other = (AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval() for _ in range(2))
    kept = {name: p.detach().clone() for name, p in one.named_parameters() if p.dtype == torch.float32}
    assert any("gate.weight" in name for name in kept)
    ht.quantize_(one, "fp8_rowwise")
    ht.load_pretrained(ht.quantize_(other, "fp8_rowwise"), ht.export_pretrained(one, tmp_path / "out", layout))
    for name, p in other.named_parameters():
        assert name not in kept or torch.equal(p, kept[name]), name
