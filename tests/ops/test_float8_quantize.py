"""FP8 current scaling against an oracle in numpy and ml_dtypes. All comparisons are exact: bits of codes and scales."""

import numpy as np
import pytest
import torch
from casting import float8_quantize
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from hybridtensor import formats
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.testing import edge_tensor, float8_oracle, random_tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GRANULARITIES = ["tensor", "row", "1x128", "128x128"]
ELEMENTS = ["e4m3", "e5m2"]


def format_of(dtype, granularity, pow2_scale=False):
    suffix = "_fp32_scale" if "x" in granularity and not pow2_scale else ""
    return formats.get_format(f"fp8_{dtype}_{granularity}{suffix}")


def check(x, dtype, granularity, pow2_scale=False):
    fmt = format_of(dtype, granularity, pow2_scale)
    codes, scale = float8_quantize(x, fmt, pow2_scale=pow2_scale)
    expected_codes, expected_scale = float8_oracle(x, dtype=dtype, granularity=granularity, pow2_scale=pow2_scale)
    assert codes.dtype == fmt.element
    assert codes.is_contiguous()
    assert tuple(scale.shape) == fmt.scale_shape(*x.shape)
    np.testing.assert_array_equal(scale.cpu().numpy().view(np.uint32), expected_scale.view(np.uint32))
    np.testing.assert_array_equal(codes.cpu().view(torch.uint8).numpy(), expected_codes)
    return codes, scale


@pytest.mark.parametrize("pow2_scale", [False, True], ids=["fp32_scale", "pow2_scale"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEqualsOracle:
    def test_random(self, dtype, element, granularity, pow2_scale, device):
        for shape in ((70, 52), (1, 1), (129, 300), (128, 256)):
            check(random_tensor(*shape, dtype=dtype, device=device), element, granularity, pow2_scale)

    def test_edge_values(self, dtype, element, granularity, pow2_scale, device):
        for row in edge_tensor(dtype, device):
            check(row[None], element, granularity, pow2_scale)
        check(edge_tensor(dtype, device), element, granularity, pow2_scale)

    def test_any_strides(self, dtype, element, granularity, pow2_scale, device):
        x = random_tensor(24, 40, dtype=dtype, device=device)
        for view in (x.t(), x[::2, ::3], x[3:, 5:], x.flip(0), x[:1].expand(7, 40)):
            check(view, element, granularity, pow2_scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_empty_gives_empty_codes_and_scale_one(shape, granularity, device):
    fmt = format_of("e4m3", granularity)
    codes, scale = float8_quantize(torch.empty(shape, device=device), fmt)
    assert codes.shape == shape
    assert tuple(scale.shape) == fmt.scale_shape(*shape)
    assert scale.eq(1).all()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("pow2_scale", [False, True], ids=["fp32_scale", "pow2_scale"])
@pytest.mark.parametrize(
    ("granularity", "dtype"), [("row", torch.float32), *(("1x128", dtype) for dtype in DTYPES)], ids=str
)
def test_scale_over_every_exponent_and_both_sides_of_it(granularity, dtype, element, pow2_scale, device):
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    below, above = (torch.nextafter(powers, torch.full_like(powers, end)) for end in (0.0, 3e38))
    amax = torch.cat([powers, below, above])[:, None]
    x = torch.cat([amax, -amax / 3, torch.zeros_like(amax)], dim=1).to(dtype).to(device)
    codes, scale = check(x, element, granularity, pow2_scale)
    assert scale.isfinite().all()
    assert codes.float().abs().max() <= format_of(element, granularity, pow2_scale).max
    if pow2_scale and dtype == torch.float32:
        assert (scale.view(torch.int32) & 0x007FFFFF)[amax[:, 0].to(device) > 2.0**-100].eq(0).all()


def test_edge_policy(device):
    """The table of edge values: zero, NaN, Inf and tiny groups do what is promised and leave other groups alone."""
    ordinary = [1.0, -2.0, 4.0]
    rows = {
        "ordinary": ordinary,
        "zero": [0.0, 0.0, 0.0],
        "nan": [float("nan"), -2.0, 4.0],
        "inf": [float("inf"), -float("inf"), 4.0],
        "tiny": [1e-45, 0.0, -1e-45],
    }
    x = torch.tensor(list(rows.values()), device=device)
    codes, scale = float8_quantize(x, formats.FP8_E4M3_ROW)
    values = dict(zip(rows, codes.float() * scale, strict=True))
    scales = dict(zip(rows, scale[:, 0].tolist(), strict=True))
    torch.testing.assert_close(values["ordinary"], x[0], rtol=0, atol=0.05)
    assert scales["zero"] == 1
    assert values["zero"].eq(0).all()
    assert values["nan"].isnan().tolist() == [True, False, False]
    torch.testing.assert_close(values["nan"][1:], values["ordinary"][1:], rtol=0, atol=0)
    assert scales["nan"] == scales["ordinary"]
    assert scales["inf"] == 1
    assert values["inf"].tolist() == [448.0, -448.0, 4.0]
    assert values["tiny"].isfinite().all()


def test_infinite_input_does_not_spoil_a_per_tensor_face(device):
    x = torch.tensor([[1.0, float("inf")], [2.0, 3.0]], device=device)
    codes, scale = float8_quantize(x, formats.FP8_E4M3_TENSOR)
    assert (codes.float() * scale).tolist() == [[1.0, 448.0], [2.0, 3.0]]


@examples(25)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(ELEMENTS),
    st.sampled_from(GRANULARITIES),
    st.booleans(),
)
def test_finite_in_gives_finite_out(values, element, granularity, pow2_scale):
    fmt = format_of(element, granularity, pow2_scale)
    codes, scale = float8_quantize(torch.tensor([values]), fmt, pow2_scale=pow2_scale)
    assert dequantize(codes, scale, None, format=fmt, dtype=torch.float32).isfinite().all()
    assert scale.gt(0).all()


@examples(15)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_per_tensor_shards_with_the_whole_amax_agree(values):
    x = torch.tensor([values, values[::-1]])
    whole, scale = float8_quantize(x, formats.FP8_E4M3_TENSOR)
    for row, codes in zip(x, whole, strict=True):  # each shard has the whole's amax here
        part, part_scale = float8_quantize(row[None], formats.FP8_E4M3_TENSOR)
        assert torch.equal(part.view(torch.uint8)[0], codes.view(torch.uint8))
        assert torch.equal(part_scale, scale)


@pytest.mark.parametrize("fmt", [formats.FP8_E4M3_1X128, formats.FP8_E5M2_128X128], ids=str)
def test_formats_with_power_of_two_scales_need_no_telling(fmt):
    x = random_tensor(130, 140)
    for told, untold in zip(float8_quantize(x, fmt, pow2_scale=True), float8_quantize(x, fmt), strict=True):
        assert torch.equal(told.contiguous().view(torch.uint8), untold.contiguous().view(torch.uint8))
    assert (torch.frexp(float8_quantize(x, fmt)[1]).mantissa == 0.5).all()


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("pow2_scale", [False, True], ids=["fp32_scale", "pow2_scale"])
def test_agrees_with_torchao(granularity, pow2_scale, device):
    """torchao divides in float64 and rounds the quotient to fp32: the same scale, but for a rare double rounding."""
    x = random_tensor(96, 80, device=device)
    kind = ScalingGranularity.AXISWISE if granularity == "row" else ScalingGranularity.TENSORWISE
    theirs = hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        LinearMMConfig(),
        scaling_granularity=kind,
        axiswise_dim=-1 if granularity == "row" else None,
        round_scales_to_power_of_2=pow2_scale,
    )
    codes, scale = float8_quantize(x, formats.get_format(f"fp8_e4m3_{granularity}"), pow2_scale=pow2_scale)
    same = (scale == theirs._scale.reshape(scale.shape).reciprocal()).expand_as(x)
    assert same.float().mean() > 0.99
    assert torch.equal(codes.view(torch.uint8)[same], theirs._data.view(torch.uint8)[same])
