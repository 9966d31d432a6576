"""Weights as safetensors: what other tools read, and what is read back here."""

import json
import math
import os
import resource
import signal
import sys

import pytest
import torch
from any_layer import ANY_LAYER
from hugging_face import llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig
from torchao.quantization import quantize_ as torchao_quantize_

import hybridtensor as ht
from hybridtensor.subclasses.structure import flatten

RECIPES = ANY_LAYER


def make(spec, persistent=False, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.Linear(256, 128))
    return ht.quantize_(model, spec, persistent=persistent) if spec else model


def read(path):
    return load_file(path, torch.get_default_device().type)


def load(path):
    return ht.load_safetensors(path, torch.get_default_device())


def metadata(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("spec", ["fp8_delayed", "nvfp4", "bf16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_high_precision_is_the_plain_model(spec, dtype, tmp_path):
    model, plain = make(spec), make(None)
    path = ht.export_safetensors(model, tmp_path / "model.safetensors", dtype)
    assert metadata(path) == {"format": "pt"}
    got, wanted = read(path), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    expected = {k: v.to(wanted) if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[k], v) and got[k].dtype == v.dtype for k, v in expected.items())
    plain.load_state_dict(got)


@pytest.mark.usefixtures("default_device")
def test_persistent_weights_give_their_masters_or_what_they_hold(tmp_path):
    model = make("fp8", persistent=True)
    originals = make(None).state_dict()["0.weight"]
    first = read(ht.export_safetensors(model, tmp_path / "a", "fp32"))["0.weight"]
    assert torch.equal(first, originals)  # trainable ones hold on to it
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    held = read(ht.export_safetensors(model, tmp_path / "b", "fp32"))["0.weight"]
    masters = read(ht.export_safetensors(model, tmp_path / "c", "fp32", masters=optimizer))["0.weight"]
    assert torch.equal(held, model[0].weight.dequantize())
    assert torch.equal(masters, originals)
    assert not torch.equal(held, masters)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_reads_back_bit_for_bit(recipe, tmp_path):
    persistent = make(recipe, persistent=True)
    expected = persistent[0].weight
    for model in (persistent, make(recipe)):
        path = ht.export_safetensors(model, tmp_path / "model.safetensors", "quantized", columnwise=True)
        weight = load(path)["0.weight"]
        pairs = zip(flatten(weight)[0], flatten(expected.detach())[0], strict=True)
        assert all(same(a.contiguous(), b.contiguous()) for a, b in pairs)
        assert str(weight.columnwise) == str(expected.columnwise)
        told = json.loads(metadata(path)["hybridtensor"])["weights"]["0.weight"]
        assert told["recipe"] == str(expected.config)
        assert told["faces"]["rowwise"]["format"] == expected.rowwise.format.name
    assert torch.equal(weight.dequantize(), expected.dequantize())
    assert torch.equal(weight.columnwise.dequantize(), expected.columnwise.dequantize())


@pytest.mark.usefixtures("default_device")
def test_quantized_loads_into_a_persistent_model(tmp_path):
    path = ht.export_safetensors(make("mxfp8"), tmp_path / "model.safetensors", "quantized", columnwise=True)
    model = make("mxfp8", persistent=True, seed=1)
    model.load_state_dict(load(path))
    assert torch.equal(model[2].weight.detach(), make("mxfp8", persistent=True)[2].weight.detach())


def test_only_the_rowwise_face_is_written_unless_asked(tmp_path):
    for persistent in (False, True):
        path = ht.export_safetensors(make("fp8", persistent), tmp_path / "model.safetensors", "quantized")
        written = {name for name in load_file(path) if name.startswith("0.weight")}
        assert written == {"0.weight.rowwise.qdata", "0.weight.rowwise.scale"}
        assert ht.load_safetensors(path)["0.weight"].columnwise is None


def test_exporting_takes_no_note_in_delayed_scaling(tmp_path):
    model = make("fp8_delayed")
    ht.export_safetensors(model, tmp_path / "model.safetensors", "quantized")
    assert not model[0].quantization_state.amax.any()


def test_tied_weights_are_written_once(tmp_path):
    model = nn.ModuleDict({"embed": nn.Embedding(32, 32), "out": nn.Linear(32, 32, bias=False)})
    model["out"].weight = model["embed"].weight
    ht.quantize_(model, "fp8")
    for dtype in ("bf16", "quantized"):
        path = ht.export_safetensors(model, tmp_path / dtype, dtype)
        assert metadata(path)["out.weight"] == "embed.weight"
        assert {name.partition(".")[0] for name in load_file(path)} == {"embed"}
        read = ht.load_safetensors(path)
        assert read["out.weight"] is read["embed.weight"]


def test_names_are_those_of_the_model_that_nothing_wraps(tmp_path):
    path = ht.export_safetensors(torch.compile(make("fp8")), tmp_path / "model.safetensors")
    assert "0.weight" in load_file(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_hugging_face_loads_it(tmp_path):
    transformers = pytest.importorskip("transformers", reason="Hugging Face's loader is tested with transformers")
    model = llama(tie_word_embeddings=True)
    model.config.save_pretrained(tmp_path)
    ht.export_safetensors(ht.quantize_(model, "fp8"), tmp_path / "model.safetensors")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = {name: value.bfloat16() for name, value in model.state_dict().items()}
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


class TestBadInput:
    def test_arguments(self, tmp_path):
        model, path = make("fp8"), tmp_path / "a"
        with pytest.raises(ValueError, match=r"unknown dtype 'int4'; known: bf16, fp16, fp32, quantized"):
            ht.export_safetensors(model, path, "int4")
        with pytest.raises(TypeError, match="a module is required, got dict"):
            ht.export_safetensors({}, path)
        with pytest.raises(TypeError, match=r"optim.MasterWeights is required, got a value of AdamW"):
            ht.export_safetensors(model, path, masters=torch.optim.AdamW(model.parameters()))
        assert not list(tmp_path.iterdir())

    def test_parameters_that_are_too_large_for_fp16(self, tmp_path):
        """They were written as Inf. Buffers are not refused: masks are filled with the largest number."""
        model = ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16(), "fp8")
        model.register_buffer("mask", torch.full((2,), torch.finfo(torch.bfloat16).min))
        model[1].weight.data[3] = 1e5
        error = r"1\.weight: values up to 65504 are required in float16, got 1 others of 64; choose bfloat16"
        with pytest.raises(ValueError, match=f"export_safetensors: {error}"):
            ht.export_safetensors(model, tmp_path / "a", "fp16")
        with pytest.raises(ValueError, match=f"export_pretrained: {error}"):
            ht.export_pretrained(model, tmp_path / "b", dtype=torch.float16)
        assert not list(tmp_path.iterdir())
        ht.export_safetensors(model, tmp_path / "a", "bf16")
        model[1].weight.data[3] = 1
        ht.export_pretrained(model, tmp_path / "b", dtype=torch.float16)

    def test_paths(self, tmp_path):
        (tmp_path / "file").touch()
        for path in (tmp_path, tmp_path / "file" / "a"):
            with pytest.raises(ValueError, match=rf"^export_safetensors: the path of a file is required, got {path}, "):
                ht.export_safetensors(make("fp8"), path)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        path = ht.export_safetensors(make("fp8"), tmp_path / "new" / "folder" / "a")
        assert load(path)

    def test_models_that_never_ran_or_are_of_torchao(self, tmp_path):
        for dtype in ("bf16", "quantized"):
            with pytest.raises(
                ValueError, match=r"^export_safetensors: weight is of a lazy layer that never ran; run the"
            ):
                ht.export_safetensors(nn.LazyLinear(4), tmp_path / "a", dtype)
        model = nn.Sequential(nn.Linear(64, 64))
        torchao_quantize_(model, Int8WeightOnlyConfig())
        with pytest.raises(
            ValueError, match=r"^export_safetensors: 0\.weight is a Int8Tensor, which files of safetensors"
        ):
            ht.export_safetensors(model, tmp_path / "a")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("dtype", ["bf16", "quantized"])
    def test_models_without_memory(self, dtype, tmp_path):
        model = make("fp8").to("meta")
        with pytest.raises(ValueError, match=r"^export_safetensors: 0\.weight is on the meta device, .*to_empty"):
            ht.export_safetensors(model, tmp_path / "a", dtype)

    def test_files(self, tmp_path):
        path = ht.export_safetensors(make("mxfp8"), tmp_path / "a", "quantized")
        tensors, told = load_file(path), metadata(path)
        cases = {
            "unknown format 'mxfp9'": (
                tensors, told | {"hybridtensor": told["hybridtensor"].replace("mxfp8_e4m3", "mxfp9")},
            ),
            "0.weight.rowwise.scale": ({k: v for k, v in tensors.items() if "scale" not in k}, told),
            r"has \(256, 3\) of torch.float8_e8m0fnu, not \(256, 4\)": (
                tensors | {"0.weight.rowwise.scale": tensors["0.weight.rowwise.scale"][:, :3].contiguous()}, told,
            ),
            "it has version 2, this library reads 1": (tensors, told | {"hybridtensor": '{"version": 2}'}),
            "'int8' is no high-precision dtype": (
                tensors, told | {"hybridtensor": told["hybridtensor"].replace("float32", "int8")},
            ),
        }  # fmt: skip
        for message, (contents, header) in cases.items():
            save_file(contents, tmp_path / "b", metadata=header)
            with pytest.raises(ValueError, match=message):
                ht.load_safetensors(tmp_path / "b")
        os.mkfifo(tmp_path / "pipe")
        for absent in (tmp_path / "c", tmp_path, tmp_path / "pipe"):
            with pytest.raises(ValueError, match=r"^load_safetensors: a file is required"):
                ht.load_safetensors(absent)

    def test_a_file_that_cannot_be_read(self, tmp_path, monkeypatch):
        path = ht.export_safetensors(make("fp8"), tmp_path / "a")

        def denied(*args, **options):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("safetensors.safe_open", denied)
        with pytest.raises(PermissionError):
            ht.load_safetensors(path)

    def test_a_device_that_is_not_there(self, tmp_path):
        path = ht.export_safetensors(make("fp8"), tmp_path / "a")
        with pytest.raises(ValueError, match=r"^load_safetensors: the device cuda:99 cannot"):
            ht.load_safetensors(path, "cuda:99")

    def test_a_full_disk(self, tmp_path):
        """safetensors raises an error of its own: ``OSError`` is what is promised."""
        path = ht.export_safetensors(make("fp8"), tmp_path / "a")
        before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # a file cannot grow: what a full disk does too
        try:
            for export, name in ((ht.export_safetensors, "a"), (ht.export_pretrained, "b")):
                with pytest.raises(OSError, match=rf"^{export.__name__}: .* cannot be written: .*File too large"):
                    export(make("fp8", seed=1), tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = ht.export_safetensors(make("fp8"), tmp_path / "a")
        before = path.read_bytes()

        def full(tensors, filename, metadata):
            filename.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(OSError, match="No space left"):
            ht.export_safetensors(make("fp8", seed=1), path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_temporary_files_of_others_stay(self, tmp_path):
        other = tmp_path / f".a.partial-{os.getpid()}"
        other.write_bytes(b"half")
        path = ht.export_safetensors(make("fp8"), tmp_path / "a")
        assert other.read_bytes() == b"half"
        assert sorted(tmp_path.iterdir()) == [other, path]

    def test_without_the_package(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(ImportError, match=r"^export_safetensors: .*pip install hybridtensor\[export\]"):
            ht.export_safetensors(make("fp8"), tmp_path / "a")
        (tmp_path / "b").touch()
        with pytest.raises(ImportError, match=r"^load_safetensors: .*pip install hybridtensor\[export\]"):
            ht.load_safetensors(tmp_path / "b")


@pytest.mark.parametrize(
    ("spec", "part", "value", "told"),
    [
        ("fp8_rowwise", "scale", math.nan, r"0\.weight\.rowwise\.scale: finite scales above zero are required"),
        ("fp8_rowwise", "scale", -1.0, r"0\.weight\.rowwise\.scale: finite scales above zero are required"),
        ("mxfp8", "scale", 255, r"0\.weight\.rowwise\.scale: finite scales above zero are required"),
        ("nvfp4", "tensor_scale", math.inf, r"0\.weight\.rowwise\.tensor_scale has amaxes that are infinite"),
        ("fp8_rowwise", "scale", None, r"it has no tensor 0\.weight\.rowwise\.scale, of which its metadata tells"),
    ],
    ids=["nan", "negative", "exponent", "amax", "missing"],
)
def test_scales_that_are_none(spec, part, value, told, tmp_path):
    path = ht.export_safetensors(ht.quantize_(nn.Sequential(nn.Linear(64, 64)), spec), tmp_path / "a", "quantized")
    tensors, header = load_file(path), metadata(path)
    name = f"0.weight.rowwise.{part}"
    if value is None:
        del tensors[name]
    else:
        tensors[name].view(torch.uint8 if spec == "mxfp8" else torch.float32)[0] = value
    save_file(tensors, path, metadata=header)
    with pytest.raises(ValueError, match=f"{path} is not what export_safetensors writes: .*{told}"):
        ht.load_safetensors(path)
