"""What docs/extending.md says is enough, done step by step for a format, a word, an operator, a layout, an integration.

Oracle: for values float64 and gfloat's codec, which share no code; for the rest what the built-in ones do.
"""

from dataclasses import dataclass

import gfloat
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gfloat import formats
from torch import nn

import hybridtensor as ht
from hybridtensor.formats import FP8_E4M3_ROW, REGISTRY, Format, register_format
from hybridtensor.inference import layouts
from hybridtensor.ops import Cast, CastRequest, Face, quantize
from hybridtensor.ops.library import define
from hybridtensor.quantizers.base import OneFormatQuantizer
from hybridtensor.recipes import spec, spec_of_config
from hybridtensor.subclasses import MasterWeight
from hybridtensor.testing import random_tensor

BLOCK = 48  # no kernel has it
FORMAT = Format("extended_e4m3_1x48", torch.float8_e4m3fn, 448.0, (1, BLOCK), torch.float32)


@dataclass(frozen=True)
class ExtendedQuantizer(OneFormatQuantizer):
    """FP8 with a scale per 48 elements."""

    @property
    def format(self):
        return FORMAT

    def cast(self, context):
        return Cast(FORMAT)


@pytest.fixture(autouse=True)
def _extended(monkeypatch):
    """Steps 1, 3 and 4: a record, a quantizer, a word; the definition of blocks in step 2 is there."""
    register_format(FORMAT)
    words = {**spec.WORDS, "extended": lambda role, gemm: ExtendedQuantizer()}
    for module in (spec, spec_of_config):
        monkeypatch.setattr(module, "WORDS", words)
    yield
    del REGISTRY[FORMAT.name]


def expected_values(x):
    """Return the values of a face ``[other, contraction]``, by gfloat and float64."""
    info = formats.format_info_ocp_e4m3
    rows = x.double().numpy()
    found = np.zeros_like(rows)
    for start in range(0, rows.shape[1], BLOCK):
        block = rows[:, start : start + BLOCK]
        encode = (np.float32(448.0) / np.abs(block).max(axis=1, keepdims=True).astype(np.float32)).astype(np.float32)
        scale = (np.float32(1.0) / encode).astype(np.float32)
        scaled = (block.astype(np.float32) * encode).astype(np.float64)
        codes = gfloat.round_ndarray(info, scaled, sat=True)
        found[:, start : start + BLOCK] = (codes.astype(np.float32) * scale).astype(np.float32)
    return torch.from_numpy(found).float()


def test_a_format_has_values_by_its_record_alone(device):
    x = random_tensor(40, 120, dtype=torch.float32)  # a partial block at the end
    made = ExtendedQuantizer().quantize(x.to(device))
    assert torch.equal(made.rowwise.dequantize().cpu(), expected_values(x))
    assert torch.equal(made.columnwise.dequantize().cpu(), expected_values(x.t().contiguous()).t())


PACKED = {"element": torch.float4_e2m1fn_x2, "max": 6.0, "elements_per_byte": 2, "ragged": False}
FP8 = {"element": torch.float8_e4m3fn, "max": 448.0}


@pytest.mark.parametrize(
    "record",
    [
        FP8 | {"scale_dtype": torch.float8_e4m3fn, "tensor_block": (None, None), "tensor_scale_max": 448.0},
        FP8 | {"scale_dtype": torch.float32, "hadamard": True},
        FP8 | {"scale_dtype": torch.bfloat16},
        FP8 | {"scale_dtype": torch.float8_e8m0fnu},
        FP8,
        PACKED | {"scale_dtype": torch.float32},
        PACKED | {"scale_dtype": torch.float8_e4m3fn, "tensor_block": (1, 32), "tensor_scale_max": 2688.0},
        {"element": torch.int8, "max": 127.0, "scale_dtype": torch.float32},
    ],
    ids=["two levels", "rotated", "bf16 scales", "scales between", "no scales", "E2M1", "tensor blocks", "int8"],
)
def test_a_record_that_no_definition_is_for_is_refused(record):
    """The built-in definitions know E2M1 under two levels, one rotation, and no other dtypes of scales."""
    fmt = Format("undefined", block=(1, 32), **record)
    x = random_tensor(32, 64)
    with pytest.raises(ValueError, match=r"quantize: no definition casts to undefined.*ops/references"):
        quantize(x, CastRequest(Cast(fmt), Cast(fmt)))


def a_face(matrix):
    """Return a face of FP8 with a scale per row, by torch alone."""
    scale = matrix.abs().amax(dim=1, keepdim=True).float() / 448
    return Face((matrix.float() / scale).to(torch.float8_e4m3fn), scale, None, FP8_E4M3_ROW)


class RowQuantizer(ht.Quantizer):
    """Makes its faces itself; ``change`` is a mistake in them."""

    rowwise_format = columnwise_format = FP8_E4M3_ROW
    change = staticmethod(lambda faces: faces)

    def faces(self, x, *, rowwise, columnwise, dtype, context=None):
        x = x.reshape(-1, x.shape[-1])
        return self.change((a_face(x) if rowwise else None, a_face(x.t().contiguous()) if columnwise else None))


def row_wise(**fields):
    return lambda faces: (faces[0]._replace(**{name: of(faces[0]) for name, of in fields.items()}), faces[1])


MISTAKES = {
    "elements": (row_wise(qdata=lambda face: face.qdata[:, 1:]), r"\[32, 63\].* but fp8_e4m3_row has .*\[32, 64\]"),
    "scales": (row_wise(scale=lambda face: face.scale[:1]), r"float32 \[1, 1\], but .*float32 \[32, 1\]"),
    "scales in a row": (row_wise(scale=lambda face: face.scale[:, 0]), r"float32 \[32\], but"),
    "dtype": (row_wise(qdata=lambda face: face.qdata.to(torch.float8_e5m2)), "of torch.float8_e5m2"),
    "scales' dtype": (row_wise(scale=lambda face: face.scale.bfloat16()), r"torch.bfloat16 \[32, 1\], but"),
    "format": (row_wise(format=lambda face: FORMAT), f"rowwise face in {FORMAT.name}, but rowwise_format is fp8"),
    "swapped": (lambda faces: faces[::-1], "rowwise face of"),
    "one": (lambda faces: faces[0], "returns a rowwise and a columnwise face, .* got a Face"),
    "nothing": (lambda faces: None, "returns a rowwise and a columnwise face, .* got None"),
    "tensors": (lambda faces: (faces[0].qdata, faces[1].qdata), "returns a Face as rowwise face, got a tensor"),
    "none": (lambda faces: (None, faces[1]), "made no rowwise face"),
}


@pytest.mark.parametrize(("change", "said"), MISTAKES.values(), ids=list(MISTAKES))
def test_faces_that_are_not_as_the_formats_say_are_refused(change, said):
    class Wrong(RowQuantizer):
        pass

    Wrong.change = staticmethod(change)
    with pytest.raises((TypeError, ValueError), match=rf"Wrong\(\): faces\(\) .*{said}"):
        Wrong().quantize(random_tensor(32, 64))


def test_a_quantizer_that_makes_its_faces_trains_and_compiles():
    """Oracle: the built-in quantizer of the same format, whose elements differ by the last bit at most."""
    config, own = (ht.HybridConfig(*[q] * 3) for q in (ht.Float8Quantizer(granularity="row"), RowQuantizer()))
    x, found = random_tensor(3, 8, 64, dtype=torch.float32), []
    for recipe, run in ((config, lambda net: net), (own, lambda net: net), (own, torch.compile)):
        torch.manual_seed(0)
        net = ht.quantize_(nn.Sequential(nn.Linear(64, 32)), recipe)
        options = {"fullgraph": True, "backend": "aot_eager"} if run is torch.compile else {}
        out = run(net, **options)(x)
        out.square().mean().backward()
        found.append((out.detach(), net[0].weight.grad))
    for expected, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, expected, rtol=0, atol=0.02 * expected.abs().max().item())


def test_defaults_of_faces_are_those_of_its_class():
    class Both(RowQuantizer):
        def faces(self, x, *, rowwise=True, columnwise=True, dtype=torch.float32):
            return super().faces(x, rowwise=rowwise, columnwise=columnwise, dtype=dtype)

    class Wrong(Both):
        change = staticmethod(lambda faces: faces[::-1])

    x = random_tensor(32, 64)
    assert [face.qdata.shape for face in Both().faces(x)] == [(32, 64), (64, 32)]
    with pytest.raises(ValueError, match="rowwise face of"):
        Wrong().faces(x)


def test_a_quantizer_that_knows_no_experts_is_named():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.weight = 2, nn.Parameter(torch.randn(2, 32, 64).bfloat16())

        def forward(self, x, offs):
            return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=offs)

    model, offs = Experts(), torch.tensor([8, 32], dtype=torch.int32)
    ht.quantize_(model, ht.HybridConfig(*[RowQuantizer()] * 3))
    with pytest.raises(
        ValueError, match=r"layer weight, .*: RowQuantizer\(\): faces\(\) .* by the 2 experts in its context"
    ):
        model(random_tensor(32, 64, dtype=torch.bfloat16), offs)


def test_a_cast_to_another_format_is_refused():
    class Wrong(ExtendedQuantizer):
        def cast(self, context):
            return Cast(FP8_E4M3_ROW)

    with pytest.raises(ValueError, match=f"Wrong.* a cast to its format, {FORMAT.name}, is required, got one to fp8"):
        Wrong().quantize(random_tensor(32, 96))


def test_a_word_trains_compiles_and_is_saved(device):
    config = ht.HybridConfig.parse("extended/fp8/extended+save_original_input")
    assert ht.HybridConfig.parse(str(config)) == config
    net = nn.Sequential(nn.Linear(96, 64), nn.SiLU(), nn.Linear(64, 96)).to(device)
    ht.quantize_(net, config)
    x = random_tensor(32, 96, dtype=torch.float32).to(device).requires_grad_()
    out = net(x)
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    of_input, of_weight = (expected_values(t.detach().cpu()) for t in (x, net[0].weight.dequantize()))
    first = F.linear(of_input.double(), of_weight.double(), net[0].bias.detach().cpu().double())
    torch.testing.assert_close(net[0](x).detach().cpu().double(), first, rtol=1e-5, atol=1e-5)
    told = str(ht.explain(net))
    assert FORMAT.name in told
    twin = ht.quantize_(nn.Sequential(nn.Linear(96, 64), nn.SiLU(), nn.Linear(64, 96)).to(device), config)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(x), net(x))


@pytest.fixture(scope="module")
def operator():
    def reference(x, factor):
        return (x.float() * factor).to(x.dtype)

    schema = "extended_scale(Tensor x, float factor) -> Tensor"
    return define(schema, reference=reference, fake=lambda x, factor: torch.empty_like(x))


def test_an_operator_of_the_namespace_passes_opcheck(operator):
    x = random_tensor(8, 16)
    torch.library.opcheck(operator, (x, 0.5), test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(operator(x, 0.5), x * 0.5)


def test_an_aten_operator_is_answered_by_its_table(monkeypatch):
    func = torch.ops.aten.logcumsumexp.default
    monkeypatch.delitem(MasterWeight.ops.handlers, func, raising=False)
    weight = MasterWeight(torch.full((4, 8), 0.25), ht.HybridConfig.parse("fp8"))
    with pytest.raises(NotImplementedError, match=r"aten\.logcumsumexp"):
        torch.logcumsumexp(weight, 0)
    monkeypatch.setitem(MasterWeight.ops.handlers, func, lambda func, args, kwargs: func(args[0].plain, *args[1:]))
    assert torch.equal(torch.logcumsumexp(weight, 0), torch.logcumsumexp(weight.plain, 0))


def test_a_layout_is_a_row(monkeypatch):
    def pack(face):
        return {"weight": face.qdata, "weight_scale": face.scale.contiguous()}

    row = layouts.Layout("extended", (FORMAT,), pack, {"quant_method": "extended"})
    net = ht.quantize_(nn.Sequential(nn.Linear(96, 64, bias=False)), "extended")
    with pytest.raises(ValueError, match="no layout holds it"):
        dict(ht.inference_tensors(net))
    monkeypatch.setitem(layouts.LAYOUTS, "extended", row)
    sent = dict(ht.inference_tensors(net, layout="extended"))
    assert sent.keys() == {"0.weight", "0.weight_scale"}
    values = sent["0.weight"].float() * sent["0.weight_scale"].repeat_interleave(BLOCK, dim=1)
    assert torch.equal(values, expected_values(net[0].weight.dequantize()))


PACKED_WRONGLY = {
    "nothing": (lambda face: None, "a dictionary.*got None"),
    "a list": (lambda face: [face.qdata], "a dictionary.*got a value of list"),
    "no tensors": (lambda face: {}, "a dictionary.*got {}"),
    "no tensor": (lambda face: {"weight": face.qdata, "scale": None}, "a tensor as 'scale'.*got None"),
}


@pytest.mark.parametrize(("pack", "said"), PACKED_WRONGLY.values(), ids=list(PACKED_WRONGLY))
def test_what_a_layout_packs_wrongly_is_refused(monkeypatch, pack, said):
    monkeypatch.setitem(layouts.LAYOUTS, "extended", layouts.Layout("extended", (FORMAT,), pack, {}))
    net = ht.quantize_(nn.Sequential(nn.Linear(96, 64, bias=False)), "extended")
    with pytest.raises(TypeError, match=f"inference_tensors: 0.weight: layout 'extended': {said}"):
        dict(ht.inference_tensors(net, layout="extended"))


class Callback:
    """An integration of a loop that knows three moments."""

    def setup(self, model, optimizer):
        ht.quantize_(model, "fp8_delayed", keep_bf16=["head"])
        self.after = ht.step_after(optimizer(model.parameters()), model)
        return self.after

    def save(self, model):
        return model.state_dict()

    def end(self, model):
        self.after.remove()
        return ht.plain_(model)


def test_an_integration_takes_public_names_alone():
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(64, 64), "head": nn.Linear(64, 8)})
    made, callback = [], Callback()
    callback.setup(model, lambda p: made.append(torch.optim.SGD(p, lr=0.1)) or made[0])
    x = random_tensor(16, 64, dtype=torch.float32)
    for _ in range(2):
        model["head"](model["body"](x)).square().mean().backward()
        made[0].step()
    state = model["body"].quantization_state
    assert state.amax_history.any()
    assert any("quantization_state" in name for name in callback.save(model))
    plain = callback.end(model)
    assert type(plain["body"].weight) is nn.Parameter
    assert not any("quantization_state" in name for name in plain.state_dict())
