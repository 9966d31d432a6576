"""Dequantizing against float64; exact, since one fp32 product of these values is rounded once."""

import importlib

import numpy as np
import pytest
import torch
from casting import float8_quantize
from recorder import recorded

from hybridtensor import formats
from hybridtensor.formats import Format
from hybridtensor.ops.dequantize import dequantize, dequantize_cuda
from hybridtensor.testing import edge_tensor, random_tensor

BLOCKED = formats.register_format(
    Format("test_blocked_2x4", torch.float8_e4m3fn, 448.0, block=(2, 4), scale_dtype=torch.float32)
)


@pytest.mark.parametrize("fmt", [formats.FP8_E4M3_TENSOR, formats.FP8_E5M2_ROW], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_is_the_fp32_product_rounded_to_the_dtype(fmt, dtype, device):
    codes, scale = float8_quantize(random_tensor(33, 20, device=device), fmt)
    got = dequantize(codes, scale, None, format=fmt, dtype=dtype)
    product = codes.double().cpu().numpy() * scale.double().cpu().numpy()
    expected = torch.from_numpy(product.astype(np.float32)).to(dtype)
    assert got.dtype == dtype
    assert torch.equal(got.cpu(), expected)


def test_block_scales_and_a_tensor_scale_multiply(device):
    codes = torch.arange(5 * 6, device=device).reshape(5, 6).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]], device=device)  # partial blocks at both edges
    tensor_scale = torch.tensor([[0.5]], device=device)
    got = dequantize(codes, scale, tensor_scale, format=BLOCKED, dtype=torch.float32)
    expected = codes.float().clone()
    for i in range(5):
        for j in range(6):
            expected[i, j] *= scale[i // 2, j // 4] * 0.5
    assert torch.equal(got, expected)
    if device == "cpu" and not torch.cuda.is_available():
        pytest.importorskip("triton", reason="Triton's interpreter is needed")
        kernel = dequantize_cuda(codes, scale, tensor_scale, BLOCKED.name, torch.float32)
        assert torch.equal(kernel, expected)


def test_what_was_finite_stays_finite(device):
    """With a power-of-two scale the largest values round up to 2^128, or 65536 in fp16: they saturate."""
    for x, dtype in ((3.3e38, torch.float32), (3.3e38, torch.bfloat16), (65504.0, torch.float16)):
        codes, scale = float8_quantize(
            torch.tensor([[x, -x]], dtype=dtype, device=device), formats.FP8_E4M3_ROW, pow2_scale=True
        )
        got = dequantize(codes, scale, None, format=formats.FP8_E4M3_ROW, dtype=dtype)
        largest = torch.finfo(dtype).max
        assert got.tolist() == [[largest, -largest]]


def test_a_launch_is_kept_for_addresses_of_one_kind_only(monkeypatch):
    """Triton compiles for addresses that are multiples of 16, which scales of a slice need not have."""
    module = importlib.import_module("hybridtensor.ops.dequantize")
    made = recorded(monkeypatch, module)
    monkeypatch.setattr(module, "_PLANS", {})
    codes = torch.zeros(8, 32).to(torch.float8_e4m3fn)
    scales, levels = torch.ones(9, 1), torch.ones(9, 1)
    for scale, level in ((scales[:8], levels[:8]), (scales[1:], levels[:8]), (scales[:8], levels[1:])):
        for _ in range(2):
            dequantize_cuda(codes, scale, level, formats.FP8_E4M3_ROW.name, torch.float32)
    assert len(made) == 3


def test_nan_stays_nan(device):
    codes, scale = float8_quantize(edge_tensor(torch.float32, device), formats.FP8_E4M3_ROW)
    got = dequantize(codes, scale, None, format=formats.FP8_E4M3_ROW, dtype=torch.bfloat16)
    assert torch.equal(got.isnan(), edge_tensor(torch.float32, device).isnan())


def test_other_dtypes_are_refused():
    codes, scale = float8_quantize(random_tensor(2, 2), formats.FP8_E4M3_TENSOR)
    with pytest.raises(TypeError, match=r"floating-point dtype is required, got torch\.int8"):
        dequantize(codes, scale, None, format=formats.FP8_E4M3_TENSOR, dtype=torch.int8)
