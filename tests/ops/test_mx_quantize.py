"""MXFP8 against an oracle in numpy and ml_dtypes, and against torchao. All comparisons are of bits."""

import ml_dtypes
import numpy as np
import pytest
import torch
from casting import mx_quantize
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from hybridtensor import formats
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.references.mx import e8m0_reciprocal, e8m0_round_up
from hybridtensor.testing import edge_tensor, mx_oracle, random_tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = [formats.MXFP8_E4M3, formats.MXFP8_E5M2, formats.MXFP8_E4M3_32X32, formats.MXFP8_E5M2_32X32]


def check(x, fmt):
    codes, scale = mx_quantize(x, fmt)
    expected_codes, expected_scale = mx_oracle(x, dtype=fmt.name.split("_")[1], block=fmt.block)
    assert (codes.dtype, scale.dtype) == (fmt.element, torch.float8_e8m0fnu)
    assert codes.is_contiguous()
    assert tuple(scale.shape) == fmt.scale_shape(*x.shape)
    np.testing.assert_array_equal(scale.cpu().view(torch.uint8).numpy(), expected_scale)
    np.testing.assert_array_equal(codes.cpu().view(torch.uint8).numpy(), expected_codes)
    return codes, scale


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEqualsOracle:
    def test_random(self, dtype, fmt, device):
        for shape in ((64, 96), (32, 32)):
            check(random_tensor(*shape, dtype=dtype, device=device), fmt)
        if fmt.block[0] == 1:
            check(random_tensor(3, 64, dtype=dtype, device=device), fmt)

    def test_edge_values(self, dtype, fmt, device):
        edges = edge_tensor(dtype, device)
        x = torch.zeros(32, 32, dtype=dtype, device=device)
        x[: edges.shape[0], : edges.shape[1]] = edges
        check(x, fmt)
        check(x.t(), fmt)

    def test_any_strides(self, dtype, fmt, device):
        x = random_tensor(96, 128, dtype=dtype, device=device)
        for view in (x.t(), x[::3, ::2], x.flip(0), x[:32].t()):
            check(view, fmt)


@pytest.mark.parametrize("fmt", FORMATS[:2], ids=str)
def test_scale_over_every_exponent_and_both_sides_of_it(fmt, device):
    """Also around every ``max * 2^k``, where the inexact ``1 / max`` decides."""
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    powers = torch.cat([powers, powers * 1.75])
    below, above = (torch.nextafter(powers, torch.full_like(powers, end)) for end in (0.0, 3e38))
    amax = torch.cat([powers, below, above]).nan_to_num(posinf=3e38)[:, None]
    x = torch.cat([amax, -amax / 3, torch.zeros(len(amax), 30)], dim=1).to(device)
    codes, scale = check(x, fmt)
    assert codes.float().abs().max() <= fmt.max
    values = codes.double() * scale.double().repeat_interleave(32, 1)
    # scales are rounded up: nothing finite is cut off, so the largest value keeps its relative precision
    normal = amax[:, 0].to(device) > 2.0**-110
    error = (values[:, 0] - x[:, 0].double()).abs()[normal] / x[normal, 0].double()
    assert error.max() <= 2.0 ** -(fmt.mantissa_bits + 1)


def test_e8m0_rounds_up_as_written_in_the_rule(device):
    cases = {
        0.0: 0, 2.0**-149: 0, 2.0**-127: 0, 2.0**-127 + 2.0**-149: 1, 2.0**-126: 1, 0.75: 127, 1.0: 127,
        1.0 + 2.0**-23: 128, 2.0**126: 253, 2.0**127: 254, 3.0e38: 254, float("inf"): 254,
    }  # fmt: skip
    bytes_ = e8m0_round_up(torch.tensor(list(cases), device=device))
    assert bytes_.tolist() == list(cases.values())
    every = torch.arange(255, device=device, dtype=torch.int32)
    scales = every.cpu().numpy().astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(e8m0_reciprocal(every).cpu().double().numpy(), 1.0 / scales)


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_agrees_with_torchao_on_random_data(dtype, element, device):
    fmt = formats.MXFP8_E4M3 if element == torch.float8_e4m3fn else formats.MXFP8_E5M2
    x = random_tensor(256, 256, dtype=dtype, device=device)
    scale, codes = to_mx(x, element, 32, ScaleCalculationMode.RCEIL)
    ours, our_scale = mx_quantize(x, fmt)
    assert torch.equal(our_scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(ours.view(torch.uint8), codes.view(torch.uint8))


def both(x):
    """Return codes and scale bytes, ours and torchao's, of one block."""
    scale, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    ours, our_scale = mx_quantize(x, formats.MXFP8_E4M3)
    as_bytes = [t.view(torch.uint8).flatten().tolist() for t in (ours, codes, our_scale, scale)]
    return (as_bytes[0], as_bytes[2][0]), (as_bytes[1], as_bytes[3][0])


def test_agrees_with_torchao_at_the_edges_but_for_those_below(device):
    ones = torch.ones(1, 32, device=device)
    with_inf = ones.clone()
    with_inf[0, 1] = float("inf")
    for x in (ones * 0, -ones * 0, ones * 448, ones * 3.5, ones * 3e38, ones * 2.0**-118, ones * 2.0**-140, with_inf):
        ours, theirs = both(x)
        assert ours == theirs


def test_known_disagreements_with_torchao(device):
    """Where its RCEIL mode is not what NVIDIA's kernels do."""
    ones = torch.ones(1, 32, device=device)
    # just above max * 2^k the scale must go up, or the value is cut off: torchao rounds the amax first
    for value in (1.75, 3.5, 7.0):
        (codes, scale), (their_codes, their_scale) = both(torch.nextafter(ones * value, ones * 1e9))
        assert scale == their_scale + 1
        assert (codes[0], their_codes[0]) == (118, 126)
    # below 2^-118 the scale is 2^-127, whose reciprocal torchao takes for zero: it loses the block
    for exponent in (-119, -126, -133):
        (codes, scale), (their_codes, their_scale) = both(ones * 2.0**exponent)
        assert scale == their_scale == 0
        assert codes[0] != 0
        assert their_codes[0] == 0
    # a NaN makes torchao's whole block NaN through its scale; here it stays alone
    with_nan = ones.clone()
    with_nan[0, 1] = float("nan")
    (codes, scale), (_, their_scale) = both(with_nan)
    assert (scale, their_scale) == (119, 255)
    assert codes.count(127) == 1


def test_edge_policy(device):
    ordinary = torch.linspace(-4, 4, 32)
    nan, inf = ordinary.clone(), ordinary.clone()
    nan[3], inf[3] = float("nan"), float("-inf")
    x = torch.stack([ordinary, torch.zeros(32), nan, inf]).to(device)
    codes, scale = mx_quantize(x, formats.MXFP8_E4M3)
    assert scale.view(torch.uint8)[:, 0].tolist() == [121, 0, 121, 254]
    assert codes[1].float().eq(0).all()
    assert codes[2].float().isnan().nonzero().flatten().tolist() == [3]
    kept = [i for i in range(32) if i != 3]
    assert torch.equal(codes[2].float()[kept], codes[0].float()[kept])
    assert codes[3].float()[3] == -448
    values = dequantize(codes, scale, None, format=formats.MXFP8_E4M3, dtype=torch.bfloat16)
    assert values[3].isfinite().all()
    assert values[:2].isfinite().all()


@examples(25)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    st.sampled_from(FORMATS[:2]),
    st.sampled_from(DTYPES),
)
def test_finite_in_gives_finite_out(values, fmt, dtype):
    x = torch.tensor([values]).to(dtype)
    if x.isfinite().all():
        codes, scale = mx_quantize(x, fmt)
        assert dequantize(codes, scale, None, format=fmt, dtype=dtype).isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_empty(fmt, device):
    for shape in ((0, 64), (32, 0)):
        codes, scale = mx_quantize(torch.empty(shape, device=device), fmt)
        assert codes.shape == shape
        assert tuple(scale.shape) == fmt.scale_shape(*shape)
