"""MXFP4 against an oracle in whole numbers and ml_dtypes, torchao and gfloat. Comparisons are of bits."""

import gfloat
import numpy as np
import pytest
import torch
from casting import cast_of, quantize
from fp4_oracles import mxfp4_oracle
from gfloat.formats import format_info_ocp_e2m1
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples, in_turn
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from hybridtensor import MXFP4Quantizer
from hybridtensor.formats import MXFP4, MXFP4_32X32, MXFP4_HADAMARD
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.references.hadamard import rotate
from hybridtensor.ops.references.nvfp4 import unpack
from hybridtensor.testing import edge_tensor, random_tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RULES = {"rceil": "", "even": "even", "floor": "floor"}
CASES = [(fmt, rule) for fmt in (MXFP4, MXFP4_32X32, MXFP4_HADAMARD) for rule in RULES]


def cast_to(fmt, rule, **options):
    return cast_of(fmt.name, rule=RULES[rule], **options)


def check(x, fmt, rule):
    qdata, scale = quantize(x, row=cast_to(fmt, rule))
    codes, scales = mxfp4_oracle(rotate(x) if fmt.hadamard else x, scale_rounding=rule, block=fmt.block)
    assert (qdata.dtype, scale.dtype) == (torch.uint8, torch.float8_e8m0fnu)
    assert qdata.shape == (x.shape[0], x.shape[1] // 2)
    np.testing.assert_array_equal(scale.cpu().view(torch.uint8).numpy(), scales)
    np.testing.assert_array_equal(unpack(qdata).cpu().numpy(), codes)


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, DTYPES), ids=str)
def test_equals_the_oracle(case, dtype, device):
    x = random_tensor(64, 96, dtype=dtype, device=device)
    for view in (x, x.t(), x.flip(0), x[:32, :64]):
        check(view, *case)


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, DTYPES), ids=str)
def test_edge_values_equal_the_oracle(case, dtype, device):
    edges = edge_tensor(dtype, device).repeat(2, 3)[:32, :64].contiguous()
    for x in (edges, torch.where(edges.isinf(), 0, edges), torch.where(edges.isnan(), 0, edges), 0 * edges):
        check(x, *case)


@pytest.mark.parametrize("rule", RULES)
def test_scales_over_every_exponent(rule, device):
    """Amaxes at every exponent: at 1, 1.5, 1.75 and the numbers beside them, where rules change their mind."""
    powers = torch.ldexp(torch.ones(276), torch.arange(-149, 127))
    amaxes = torch.cat([powers * f for f in (1.0, 1.25, 1.5, 1.75)])
    near = [torch.nextafter(amaxes, torch.full_like(amaxes, end)) for end in (0.0, 3e38)]
    amax = torch.cat([amaxes, *near])[:, None]
    spread = torch.ldexp(torch.ones(32), -(torch.arange(32) // 4)) * torch.linspace(1, -0.3, 32)
    check((amax * spread).to(device), MXFP4, rule)


@pytest.mark.parametrize("rule", RULES)
def test_every_bf16_amax(rule, device):
    x = torch.arange(2**15).to(torch.uint16).view(torch.bfloat16)
    x = x[x.isfinite()]
    check(torch.stack([x, -x / 3, x / 7, 0 * x], dim=1).repeat(1, 8)[1::7].to(device), MXFP4, rule)


@pytest.mark.parametrize(("rule", "dtype"), in_turn(RULES, [torch.bfloat16, torch.float32]), ids=str)
def test_equals_torchao(rule, dtype, device):
    """Where scales are at least 2^-126, the smallest that torchao divides by."""
    x = random_tensor(64, 128, dtype=dtype, device=device)
    x = torch.where(x.abs() < 2.0**-110, 0, x)
    x[:, ::32] = torch.where(x[:, ::32] == 0, 1.0, x[:, ::32])
    mode = ScaleCalculationMode[rule.upper()]
    theirs_scale, theirs = to_mx(x.contiguous(), torch.float4_e2m1fn_x2, 32, mode)
    qdata, scale = quantize(x, row=cast_to(MXFP4, rule))
    assert torch.equal(scale.view(torch.uint8), theirs_scale.view(torch.uint8).reshape(scale.shape))
    ours, other = (unpack(q.view(torch.uint8)) for q in (qdata, theirs))
    assert torch.equal(ours, other)


def test_values_are_those_of_gfloat(device):
    """Of each code: OCP's E2M1 times a power of two."""
    codes = torch.arange(16, dtype=torch.uint8, device=device).repeat(2)
    qdata = (codes[::2] | codes[1::2] << 4)[None]
    for byte in (1, 100, 127, 130, 250):
        scale = torch.tensor([[byte]], dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
        got = dequantize(qdata, scale, None, format=MXFP4, dtype=torch.float32)
        wanted = [gfloat.decode_float(format_info_ocp_e2m1, int(code)).fval * 2.0 ** (byte - 127) for code in codes]
        assert got[0].tolist() == wanted


def test_what_each_rule_does_with_the_largest_value(device):
    """Of 6 to 8: rounded up, clipped, or by which is nearer."""
    x = torch.zeros(4, 32, device=device)
    x[:, 0] = torch.tensor([6.0, 6.5, 7.0, 7.9])
    largest = {}
    for rule in RULES:
        cast = cast_to(MXFP4, rule)
        made = quantize(x, row=cast)
        largest[rule] = dequantize(*made, None, format=MXFP4, dtype=torch.float32)[:, 0].tolist()
    assert largest == {"rceil": [6, 6, 8, 8], "even": [6, 6, 8, 8], "floor": [6, 6, 6, 6]}


@pytest.mark.parametrize("rule", ["rceil", "even"])
def test_what_is_clipped(rule, device):
    """Nothing with scales rounded up; with scales rounded to even at most a seventh of the amax, by 7 and 6."""
    x = torch.randn(256, 64, device=device)
    cast = cast_to(MXFP4, rule)
    qdata, scale = quantize(x, row=cast)
    unit = scale.float().repeat_interleave(32, 1)
    most = 6 if rule == "rceil" else 7
    assert (x.abs() <= most * unit).all()
    assert (x.abs() > 6 * unit).any() == (rule == "even")
    error = (dequantize(qdata, scale, None, format=MXFP4, dtype=torch.float32) - x).abs()
    assert (error <= unit).all()


def test_nan_and_inf(device):
    x = torch.ones(4, 64, device=device)
    x[0, 3], x[1, 5], x[2, 40] = float("nan"), float("inf"), float("-inf")
    for rule, of_inf in (("rceil", 254), ("even", 253), ("floor", 253)):
        qdata, scale = quantize(x, row=cast_to(MXFP4, rule))
        one = 125  # of an amax of 1
        assert scale.view(torch.uint8).tolist() == [[255, one], [of_inf, one], [one, of_inf], [one, one]]
        values = dequantize(qdata, scale, None, format=MXFP4, dtype=torch.float32)
        assert values[0, :32].isnan().all()
        assert not unpack(qdata)[0, :32].any()
        assert values[1, 5] == values[2, 40].neg() > 2.0**127
        assert values[3].eq(1).all()


class TestStochasticRounding:
    def quantize(self, x, step=0, **options):
        return quantize(x, row=cast_to(MXFP4, "rceil", stream=4), rounding=torch.tensor([1, step], device=x.device))

    def test_is_unbiased(self, device):
        """The mean over 4096 draws is within six standard errors; a draw is a coin between two neighbours."""
        x = torch.linspace(-1, 1, 32, device=device).repeat(4096, 1)
        qdata, scale = self.quantize(x)
        values = dequantize(qdata, scale, None, format=MXFP4, dtype=torch.float32).double()
        low, high = values.amin(0), values.amax(0)
        assert ((values.mean(0) - x[0].double()).abs() <= 6 * (high - low) / 2 / 4096**0.5 + 2.0**-15).all()
        assert (high > low).sum() >= 24

    def test_steps_draw_other_numbers(self, device):
        x = random_tensor(32, 64, device=device)
        assert torch.equal(self.quantize(x)[0], self.quantize(x)[0])
        assert not torch.equal(self.quantize(x)[0], self.quantize(x, step=1)[0])


@examples(25)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    st.sampled_from(CASES), st.sampled_from(DTYPES),
)  # fmt: skip
def test_finite_in_gives_finite_out_as_the_oracle_says(values, case, dtype):
    x = torch.tensor([values]).to(dtype)
    if x.isfinite().all() and case[0] is not MXFP4_32X32:
        check(x, *case)
        made = quantize(x, row=cast_to(*case))
        assert dequantize(*made, None, format=case[0], dtype=dtype).isfinite().all()


@pytest.mark.parametrize(("fmt", "rule"), CASES, ids=str)
def test_empty(fmt, rule, device):
    for shape in ((0, 64), (32, 0)):
        qdata, scale = quantize(torch.empty(shape, device=device), row=cast_to(fmt, rule))
        assert qdata.shape == (shape[0], shape[1] // 2)
        assert tuple(scale.shape) == fmt.scale_shape(*shape)


def test_a_quantizer_says_what_it_makes():
    assert MXFP4Quantizer().format is MXFP4
    assert MXFP4Quantizer(two_d=True).format is MXFP4_32X32
    assert MXFP4Quantizer(hadamard=True).format is MXFP4_HADAMARD
    with pytest.raises(ValueError, match=r"two_d makes both faces from 32x32 blocks, hadamard .* choose one of them"):
        MXFP4Quantizer(two_d=True, hadamard=True)
    with pytest.raises(ValueError, match="unknown scale_rounding 'ceil'; did you mean 'rceil'"):
        MXFP4Quantizer(scale_rounding="ceil")
