"""NVFP4 against an oracle in numpy and ml_dtypes, and against torchao; rounding at random. Comparisons are of bits."""

import numpy as np
import pytest
import torch
from casting import nvfp4_quantize
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from hybridtensor import formats
from hybridtensor.ops.dequantize import dequantize, element_values
from hybridtensor.ops.references.hadamard import rotate
from hybridtensor.ops.references.nvfp4 import e2m1_encode, unpack
from hybridtensor.testing import decode_oracle, edge_tensor, nvfp4_oracle, random_tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = [formats.NVFP4, formats.NVFP4_16X16, formats.NVFP4_ROW_SCALED]
ROTATED = [formats.NVFP4_HADAMARD, formats.NVFP4_ROW_SCALED_HADAMARD]
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def check(x, fmt):
    qdata, scale, tensor_scale = nvfp4_quantize(x, fmt)
    row_scaled = fmt.tensor_block == (1, None)
    expected = nvfp4_oracle(rotate(x) if fmt.hadamard else x, block=fmt.block, row_scaled=row_scaled)
    assert (qdata.dtype, scale.dtype, tensor_scale.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    assert qdata.shape == (x.shape[0], x.shape[1] // 2)
    assert tuple(scale.shape) == fmt.scale_shape(*x.shape)
    assert tuple(tensor_scale.shape) == fmt.tensor_scale_shape(*x.shape)
    np.testing.assert_array_equal(tensor_scale.cpu().numpy(), expected[2])
    np.testing.assert_array_equal(scale.cpu().view(torch.uint8).numpy(), expected[1])
    np.testing.assert_array_equal(unpack(qdata).cpu().numpy(), expected[0])
    return qdata, scale, tensor_scale


@pytest.mark.parametrize("fmt", [*FORMATS, *ROTATED], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEqualsOracle:
    def test_random(self, dtype, fmt, device):
        for shape in ((64, 96), (16, 16)):
            check(random_tensor(*shape, dtype=dtype, device=device), fmt)
        if fmt.block[0] == 1:
            check(random_tensor(3, 64, dtype=dtype, device=device), fmt)

    def test_edge_values(self, dtype, fmt, device):
        edges = edge_tensor(dtype, device)
        x = torch.zeros(32, 32, dtype=dtype, device=device)
        x[: edges.shape[0], : edges.shape[1]] = edges
        for given_ in (x, x.t(), x[16:], x.nan_to_num(nan=1.0, posinf=1.0, neginf=-1.0)):
            check(given_, fmt)
        for i in range(0, 16, 4):
            check(x[i : i + 16, :16], fmt)

    def test_any_strides(self, dtype, fmt, device):
        x = random_tensor(96, 128, dtype=dtype, device=device)
        for view in (x.t(), x[::3, ::2], x.flip(0), x[:32].t()):
            check(view, fmt)


def test_scales_over_every_exponent(device):
    """Tensor scales at every exponent and both sides of it, with small and large blocks under each."""
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    below, above = (torch.nextafter(powers, torch.full_like(powers, end)) for end in (0.0, 3e38))
    amax = torch.cat([powers, below, above]).clamp(max=3.3e38)[:, None]
    spread = torch.ldexp(torch.ones(64), -(torch.arange(64) // 4)) * torch.linspace(1, -0.3, 64)
    check((amax * spread).to(device), formats.NVFP4_ROW_SCALED)


def test_dequantized_values_are_the_kernels(device):
    """``element * ((scale * amax) * (1 / 2688))``, every product rounded to fp32: by hand in numpy."""
    x = random_tensor(16, 64, device=device)
    qdata, scale, amax = nvfp4_quantize(x, formats.NVFP4)
    elements = decode_oracle(unpack(qdata).cpu().numpy(), "e2m1").astype(np.float32)
    of_block = scale.float().cpu().numpy() * np.float32(amax.item()) * (np.float32(1) / np.float32(2688))
    expected = elements * np.repeat(of_block, 16, axis=1)
    got = dequantize(qdata, scale, amax, format=formats.NVFP4, dtype=torch.float32)
    np.testing.assert_array_equal(got.cpu().numpy(), expected)


@pytest.mark.parametrize("fmt", [*FORMATS, *ROTATED], ids=str)
def test_error_is_within_half_a_step(fmt, device):
    """Against the (rotated) values: half the distance of E2M1 neighbours, plus what the E4M3 scale is off."""
    x = torch.randn(64, 128, device=device).bfloat16()
    qdata, scale, tensor_scale = nvfp4_quantize(x, fmt)
    values = dequantize(qdata, scale, tensor_scale, format=fmt, dtype=torch.float32)
    got = rotate(values).float() if fmt.hadamard else values
    exact = rotate(x).float() if fmt.hadamard else x.float()
    amax = exact.unflatten(1, (-1, 16)).abs().amax(2)
    if fmt.block[0] == 16:
        amax = amax.unflatten(0, (-1, 16)).amax(1).repeat_interleave(16, 0)
    step = amax.repeat_interleave(16, 1) / 3  # from 4 to 6 of 6
    rounding = 2.0**-7 if fmt.hadamard else 2.0**-20
    assert ((got - exact).abs() <= step * (0.5 + 2.0**-4) + rounding * amax.repeat_interleave(16, 1)).all()


def test_agrees_with_torchao_but_for_its_order_of_rounding(device):
    """torchao's ``nvfp4_quantize`` divides where the kernels multiply: few codes differ, by one step."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize as torchao_quantize
    from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

    x = random_tensor(256, 256, device=device)
    qdata, scale, _ = nvfp4_quantize(x, formats.NVFP4)
    theirs_scale, theirs = torchao_quantize(x, 16, per_tensor_amax_to_scale(x.abs().amax().float()))
    same_scale = scale.view(torch.uint8) == theirs_scale.view(torch.uint8).reshape(scale.shape)
    assert same_scale.float().mean() > 0.999
    ours, other = (unpack(q.view(torch.uint8)) for q in (qdata, theirs))
    same = (ours == other)[same_scale.repeat_interleave(16, 1)]
    assert same.float().mean() > 0.999
    assert ((ours & 7).int() - (other & 7).int()).abs()[same_scale.repeat_interleave(16, 1)].max() <= 1


def test_agrees_with_the_kernels_arithmetic_around_torchaos_encoder(device):
    """TransformerEngine's scale chain, one rounding per operation, around torchao's E2M1 encoder and packing."""
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4

    for fmt, rows in ((formats.NVFP4, 1), (formats.NVFP4_16X16, 16)):
        x = random_tensor(64, 128, device=device)
        tiles = x.float().abs().reshape(64 // rows, rows, 8, 16).amax(dim=(1, 3))
        encode = torch.full((), 2688.0, device=device) / x.abs().amax().float()
        scale = (tiles * (encode * (1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
        factor = 1.0 / (scale.float() * (1.0 / encode))
        scaled = x.float() * factor.repeat_interleave(rows, 0).repeat_interleave(16, 1)
        packed = pack_uint4(f32_to_f4_unpacked(scaled.clamp(-6, 6)))
        qdata, ours, _ = nvfp4_quantize(x, fmt)
        assert torch.equal(ours.view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(qdata, packed)


def test_known_disagreement_with_torchao_an_all_zero_tensor(device):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize as torchao_quantize
    from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

    x = torch.zeros(16, 32, device=device)
    theirs = torchao_quantize(x, 16, per_tensor_amax_to_scale(x.abs().amax()))[0]
    assert theirs.float().isnan().any()
    qdata, scale, amax = nvfp4_quantize(x, formats.NVFP4)
    assert dequantize(qdata, scale, amax, format=formats.NVFP4, dtype=torch.float32).eq(0).all()
    assert scale.float().eq(0).all()
    assert amax.item() == 2688


@pytest.mark.parametrize("fmt", [formats.NVFP4, formats.NVFP4_HADAMARD], ids=str)
def test_an_inf_leaves_other_blocks_at_tensor_scale_one(fmt, device):
    x = random_tensor(64, 64, device=device)
    x[5, 7] = float("inf")
    qdata, scale, tensor_scale = nvfp4_quantize(x, fmt)
    values = dequantize(qdata, scale, tensor_scale, format=fmt, dtype=torch.float32)
    assert tensor_scale.item() == 2688
    assert values.isfinite().all()
    x[5, :16] = values[5, :16] = 0
    assert (values - x.float()).norm() < 0.2 * x.float().norm()


def test_edge_policy(device):
    ordinary = torch.linspace(-4, 4, 32)
    nan, inf = ordinary.clone(), ordinary.clone()
    nan[3], inf[3] = float("nan"), float("-inf")
    x = torch.stack([ordinary, torch.zeros(32), nan, inf]).to(device)
    fmt = formats.NVFP4_ROW_SCALED
    qdata, scale, amax = nvfp4_quantize(x, fmt)
    values = dequantize(qdata, scale, amax, format=fmt, dtype=torch.float32)
    assert amax[:, 0].tolist() == [4, 2688, 4, 2688]
    assert values[1].eq(0).all()
    assert values[2, :16].isnan().all()  # E2M1 has no NaN: the scale of the block has one
    assert torch.equal(values[2, 16:], values[0, 16:])
    assert values[3].isfinite().all()
    assert values[3, 3] == -6 * 448
    whole = nvfp4_quantize(x[:3], formats.NVFP4)
    assert whole[1].float().isnan().sum() == 1
    negative_zero = nvfp4_quantize(torch.full((1, 16), -0.0, device=device), formats.NVFP4)[0]
    assert unpack(negative_zero).eq(8).all()


@examples(25)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16),
    st.sampled_from([formats.NVFP4, *ROTATED, formats.NVFP4_ROW_SCALED]),
    st.sampled_from(DTYPES),
)
def test_finite_in_gives_finite_out(values, fmt, dtype):
    x = torch.tensor([values]).to(dtype)
    if x.isfinite().all():
        result = nvfp4_quantize(x, fmt)
        assert dequantize(*result, format=fmt, dtype=dtype).isfinite().all()


class TestStochasticRounding:
    def quantize(self, x, fmt=formats.NVFP4, step=0, key=1, **options):
        return nvfp4_quantize(x, fmt, rounding=torch.tensor([key, step], device=x.device), **options)

    def test_picks_a_neighbour_and_keeps_what_is_exact(self, device):
        x = torch.linspace(-6.5, 6.5, 4096, device=device)
        for seed in range(8):
            u = torch.rand(4096, generator=torch.Generator().manual_seed(seed)).clamp(2**-17, 1 - 2**-17).to(device)
            values = GRID.to(device)[(e2m1_encode(x, u) & 7).long()]
            magnitude = x.abs().clamp(max=6)
            below = GRID.to(device)[torch.searchsorted(GRID.to(device), magnitude, right=True) - 1]
            above = GRID.to(device)[torch.searchsorted(GRID.to(device), magnitude).clamp(max=7)]
            assert ((values == below) | (values == above)).all()
        exact = torch.cat([GRID, -GRID]).to(device)
        assert torch.equal(e2m1_encode(exact, torch.full_like(exact, 1 - 2**-17)), e2m1_encode(exact))

    def test_is_unbiased(self, device):
        """The mean over 4096 draws of 32 values is within six standard errors: false alarms below 10^-7 per value."""
        x = torch.linspace(-1, 1, 32, device=device).repeat(4096, 1)
        qdata, scale, amax = self.quantize(x)
        values = dequantize(qdata, scale, amax, format=formats.NVFP4, dtype=torch.float32).double()
        combined = scale.double().repeat_interleave(16, 1) * amax.double() / 2688
        elements = element_values(qdata, formats.NVFP4).double()
        wanted = (x.double() / combined).clamp(-6, 6)
        low = elements.amin(0)
        high = elements.amax(0)
        deviation = (elements.mean(0) - wanted[0]).abs()
        # a draw is a coin between two neighbours: its variance is at most (high - low)^2 / 4
        assert (deviation <= 6 * (high - low) / 2 / 4096**0.5 + 2.0**-15).all()
        assert (high > low).sum() >= 28  # and it is a coin, where a value is not on the grid
        nearest = nvfp4_quantize(x[:1], formats.NVFP4)
        bias = (dequantize(*nearest, format=formats.NVFP4, dtype=torch.float32).double() - x[:1]).abs().max()
        assert bias > 10 * (values.mean(0) - (wanted * combined)[0]).abs().max()

    def test_the_same_key_and_step_give_the_same_bits(self, device):
        x = random_tensor(32, 64, device=device)
        first, again, other = self.quantize(x), self.quantize(x), self.quantize(x, step=1)
        assert torch.equal(first[0], again[0])
        assert not torch.equal(first[0], other[0])
        assert torch.equal(first[1].view(torch.uint8), other[1].view(torch.uint8))

    def test_shards_draw_what_the_whole_would_in_both_directions(self, device):
        x = torch.randn(64, 48, device=device).bfloat16()
        x[::32] = 5.0  # one amax for every shard
        whole, columns = self.quantize(x), self.quantize(x.t(), transposed=True)
        for first in (0, 32):
            part = self.quantize(x[first : first + 32], first_row=first)
            assert torch.equal(part[0], whole[0][first : first + 32])
            part = self.quantize(x[first : first + 32].t(), first_row=first, transposed=True)
            assert torch.equal(part[0], columns[0][:, first // 2 : first // 2 + 16])

    def test_devices_agree(self, device):
        x = random_tensor(32, 64)
        for fmt in (*FORMATS, *ROTATED):
            for a, b in zip(self.quantize(x.to(device), fmt), self.quantize(x, fmt), strict=True):
                assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("fmt", [*FORMATS, *ROTATED], ids=str)
def test_empty(fmt, device):
    for shape in ((0, 64), (32, 0)):
        qdata, scale, tensor_scale = nvfp4_quantize(torch.empty(shape, device=device), fmt)
        assert qdata.shape == (shape[0], shape[1] // 2)
        assert tuple(scale.shape) == fmt.scale_shape(*shape)
        assert tuple(tensor_scale.shape) == fmt.tensor_scale_shape(*shape)
