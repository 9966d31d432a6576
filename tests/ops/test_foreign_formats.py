"""Records that users register: what kernels are not written for is cast, read and multiplied by its definition.

Oracle: the definitions on a CPU, of the same bits.
"""

import dataclasses

import pytest
import torch

import hybridtensor as ht
from hybridtensor.formats import REGISTRY, get_format, register_format
from hybridtensor.ops import (
    Cast,
    CastInputs,
    CastRequest,
    Groups,
    prepare,
    product,
    quantize,
    quantize_groups,
)
from hybridtensor.ops.cast import kernel
from hybridtensor.ops.cast.definition import ReferenceCast
from hybridtensor.ops.cast.kernel import cast_on_gpu
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.native_mm import native_kind
from hybridtensor.ops.scaled_mm import select_backend
from hybridtensor.quantizers.base import OneFormatQuantizer
from hybridtensor.testing import random_tensor


def foreign(name, of, **fields):
    return dataclasses.replace(get_format(of), name=f"foreign_{name}", **fields)


SAME = foreign("same", "fp8_e4m3_1x128")
FORMATS = {
    fmt.name: fmt
    for fmt in (
        foreign("1x64", "fp8_e4m3_1x128", block=(1, 64)),
        foreign("64x64", "fp8_e4m3_128x128", block=(64, 64)),
        foreign("1x48_fp32", "fp8_e4m3_1x128_fp32_scale", block=(1, 48)),
        foreign("32x32_fp32", "fp8_e4m3_128x128_fp32_scale", block=(32, 32)),
        foreign("max_240", "fp8_e4m3_tensor", max=240.0),
        foreign("row_max_240", "fp8_e4m3_row", max=240.0),
        foreign("mxfp8_64", "mxfp8_e4m3", block=(1, 64)),
        foreign("mxfp8_16x16", "mxfp8_e5m2_32x32", block=(16, 16)),
        foreign("nvfp4_32", "nvfp4", block=(1, 32)),
        foreign("nvfp4_8", "nvfp4", tensor_scale_max=128.0 * 6.0),
    )
}
SHAPE = 128, 192


@pytest.fixture(autouse=True, scope="module")
def _registered():
    names = [register_format(fmt).name for fmt in (*FORMATS.values(), SAME)]
    yield
    for name in names:
        del REGISTRY[name]


def faces(fmt, device, rows=SHAPE[0], seed=0):
    x = random_tensor(rows, SHAPE[1], seed=seed, dtype=torch.bfloat16).to(device)
    return x, quantize(x, CastRequest(Cast(fmt), Cast(fmt)))


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(*(t.cpu().contiguous().view(torch.uint8) for t in (ours, theirs)))


@pytest.mark.parametrize("name", FORMATS)
def test_faces_and_values_are_those_of_the_definition(name, device):
    fmt = FORMATS[name]
    assert not fmt.has_kernels
    for found, expected in zip(faces(fmt, device)[1], faces(fmt, "cpu")[1], strict=True):
        assert_same(found.tensors(), expected.tensors())
        for dtype in (torch.bfloat16, torch.float32):
            values, theirs = (dequantize(*f[:3], format=fmt, dtype=dtype) for f in (found, expected))
            assert_same([values], [theirs])


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_values(name, device):
    """Oracle: float64 products of dequantized faces; fp32 sums of 192 products differ by less than 192 half units."""
    fmt = FORMATS[name]
    left, right = (faces(fmt, device, seed=seed)[1][0] for seed in (1, 2))
    a, b = (dequantize(*f[:3], format=fmt, dtype=torch.float64) for f in (left, right))
    got = product(left, right, out_dtype=torch.float32).double()
    bound = 192 * 2.0**-24 * (a.abs() @ b.abs().t())
    assert ((got - a @ b.t()).abs() <= bound).all()
    assert native_kind(fmt, fmt) is None
    reason = select_backend(fmt, fmt, torch.bfloat16, torch.device(device)).reason
    assert device == "cpu" or f"{fmt} has no kernels" in reason


@pytest.mark.parametrize("name", FORMATS)
def test_groups_are_those_of_the_definition(name, device):
    fmt, made = FORMATS[name], []
    for where in (device, "cpu"):
        x = random_tensor(2 * 128, SHAPE[1], seed=3, dtype=torch.bfloat16).view(2, 128, -1).to(where)
        request = CastRequest(Cast(fmt), Cast(fmt))
        stack = quantize_groups(x, Groups(2), request, CastInputs())
        ends = torch.tensor([128, 256], dtype=torch.int32, device=where)
        tokens = quantize_groups(x.flatten(0, 1), Groups(2, ends, 128), request, CastInputs())
        out = product(tokens[0], stack[0], out_dtype=torch.bfloat16)
        made.append([t for face in (*stack, *tokens) for t in face.tensors()] + [out])
    *ours, out = made[0]
    *theirs, expected = made[1]
    assert_same(ours, theirs)
    torch.testing.assert_close(out.cpu(), expected, rtol=2**-7, atol=2**-7)  # sums in another order


def test_kernels_are_looked_up_by_all_but_the_name(caplog):
    assert SAME.has_kernels
    request = CastRequest(Cast(FORMATS["foreign_mxfp8_64"]), None)
    x = random_tensor(*SHAPE, dtype=torch.bfloat16)
    kernel._say_without_kernels.cache_clear()
    assert isinstance(cast_on_gpu(x, request, CastInputs(first_row=1)), ReferenceCast)
    assert "format foreign_mxfp8_64 has no kernels" in caplog.text
    assert not request.has_kernels
    assert not FORMATS["foreign_mxfp8_64"].values.has_kernels
    assert isinstance(prepare(x, request), ReferenceCast)


@dataclasses.dataclass(frozen=True)
class ForeignQuantizer(OneFormatQuantizer):
    fmt: str = "foreign_nvfp4_32"

    @property
    def format(self):
        return get_format(self.fmt)

    def cast(self, context):
        return Cast(self.format)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_train_as_on_a_cpu(name, compiled, device):
    """Oracle: the same layer on a CPU, of the same faces: sums in fp32 in another order, rounded to bf16."""
    quantizer, found = ForeignQuantizer(name), []
    for where in (device, "cpu"):
        torch.manual_seed(0)
        net = torch.nn.Linear(192, 128, dtype=torch.bfloat16).to(where)
        ht.quantize_(net, ht.HybridConfig(quantizer, quantizer, quantizer))
        run = torch.compile(net, backend="aot_eager") if compiled and where == device else net
        x = random_tensor(128, 192, seed=5, dtype=torch.bfloat16).to(where).requires_grad_()
        y = run(x)
        y.backward(random_tensor(128, 128, seed=6, dtype=torch.bfloat16).to(where))
        found.append([t.detach().cpu() for t in (y, x.grad, net.weight.grad, net.bias.grad)])
    torch._dynamo.reset()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-10 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", FORMATS)
def test_explain_says_that_the_definition_runs(name, monkeypatch):
    """Of a model that is in no memory, what a GPU would run is told without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.device("meta"):
        net = torch.nn.Linear(192, 128, dtype=torch.bfloat16)
    quantizer = ForeignQuantizer(name)
    ht.quantize_(net, ht.HybridConfig(quantizer, quantizer, quantizer))
    found = ht.explain(net)
    assert {row.backend for row in found.rows} == {"emulated"}
    assert f"{name} has no kernels: its definition casts and reads it" in " ".join(str(found).split())
