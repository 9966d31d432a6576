"""The product of faces against float64, with derived bounds, and against torch's own scaled product."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from casting import float8_quantize, mx_quantize, nvfp4_quantize
from tiers import covered

from hybridtensor import formats, ops
from hybridtensor.formats import IDENTITY, get_format
from hybridtensor.ops.dequantize import dequantize, multipliable_values
from hybridtensor.ops.emulated_mm import block_factor, sum_factors
from hybridtensor.ops.face import Face
from hybridtensor.ops.native_mm import native_kind
from hybridtensor.ops.references.nvfp4 import unpack
from hybridtensor.ops.scaled_mm import Backend, scaled_mm, select_backend
from hybridtensor.testing import decode_oracle, exact_values, product_bound, random_tensor

TENSOR, ROW = formats.FP8_E4M3_TENSOR, formats.FP8_E4M3_ROW
GRAD, GRAD_ROW = formats.FP8_E5M2_TENSOR, formats.FP8_E5M2_ROW
BLOCKS, SQUARES = formats.FP8_E4M3_1X128, formats.FP8_E4M3_128X128
GRAD_BLOCKS = formats.FP8_E5M2_1X128
BLOCKS_FP32, SQUARES_FP32 = formats.FP8_E4M3_1X128_FP32_SCALE, formats.FP8_E4M3_128X128_FP32_SCALE
MX, MX_GRAD, MX_SQUARES = formats.MXFP8_E4M3, formats.MXFP8_E5M2, formats.MXFP8_E4M3_32X32
NV, NV_SQUARES, NV_ROWS = formats.NVFP4, formats.NVFP4_16X16, formats.NVFP4_ROW_SCALED
MX4, MX4_SQUARES, MX4_ROTATED = formats.MXFP4, formats.MXFP4_32X32, formats.MXFP4_HADAMARD
NV_ROTATED, NV_ROWS_ROTATED = formats.NVFP4_HADAMARD, formats.NVFP4_ROW_SCALED_HADAMARD

# Hopper's FP8 tensor cores add products aligned to 13 fraction bits or so before promoting to fp32.
HOPPER_ACCUMULATE = 2.0**-13

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PAIRS = [
    (TENSOR, TENSOR), (GRAD, TENSOR), (TENSOR, GRAD), (GRAD, GRAD), (ROW, ROW), (GRAD_ROW, ROW), (TENSOR, ROW),
    (ROW, IDENTITY), (IDENTITY, TENSOR),
]  # fmt: skip
BLOCK_PAIRS = [
    (BLOCKS, BLOCKS), (BLOCKS, SQUARES), (SQUARES, BLOCKS), (SQUARES, SQUARES), (BLOCKS_FP32, SQUARES_FP32),
    (BLOCKS_FP32, BLOCKS_FP32), (SQUARES_FP32, IDENTITY), (BLOCKS, ROW), (BLOCKS_FP32, TENSOR),
    (GRAD_BLOCKS, SQUARES), (BLOCKS, GRAD_BLOCKS),
]  # fmt: skip
MX_PAIRS = [
    (MX, MX), (MX_GRAD, MX), (MX_GRAD, MX_GRAD), (MX, MX_SQUARES), (IDENTITY, MX), (MX, BLOCKS), (MX, ROW),
    (MX_GRAD, SQUARES_FP32), (NV, NV), (NV, NV_SQUARES), (NV_ROWS, NV), (NV_ROWS, NV_ROWS), (NV, IDENTITY), (NV, MX),
    (MX4, MX4), (MX4, MX4_SQUARES), (MX, MX4), (MX4, NV), (MX4, ROW), (BLOCKS_FP32, MX4), (MX4_ROTATED, NV_ROTATED),
    (MX4, IDENTITY), (NV_ROWS, ROW), (NV, BLOCKS_FP32), (NV_ROTATED, NV_ROTATED), (NV_ROWS_ROTATED, NV_ROTATED),
    (BLOCKS, MX4), (GRAD_BLOCKS, MX4_SQUARES),
]  # fmt: skip


def face(x, fmt):
    """Return the operand of a matrix, and its exact values (in the rotated basis, if any) in float64."""
    if fmt.is_identity:
        return Face(x, None, None, fmt), x.double()
    if fmt.tensor_block is not None:
        operand = Face(*nvfp4_quantize(x, fmt), fmt)
    elif fmt.scale_dtype == torch.float8_e8m0fnu:
        operand = Face(*mx_quantize(x, fmt), None, fmt)
    else:
        operand = Face(*float8_quantize(x, fmt), None, fmt)
    return operand, exact_values(operand)


@pytest.mark.parametrize(
    ("shape", "pair", "out_dtype"),
    [
        *covered([(32, 48, 64), (5, 7, 24), (1, 1, 8), (33, 16, 40)], PAIRS, DTYPES),
        *covered([(32, 48, 256), (130, 257, 300), (1, 1, 128), (20, 16, 16)], BLOCK_PAIRS, DTYPES),
        *covered([(32, 96, 256), (64, 32, 32), (160, 64, 320)], MX_PAIRS, DTYPES),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_is_within_the_bound_of_float64(shape, pair, out_dtype, device):
    (m, n, k), (left, right) = shape, pair
    a, exact_a = face(random_tensor(m, k, device=device, seed=1), left)
    b, exact_b = face(random_tensor(n, k, device=device, seed=2), right)
    bias = random_tensor(n, device=device, seed=3)
    backend = select_backend(left, right, out_dtype, torch.device(device))
    accumulate = HOPPER_ACCUMULATE if backend.name == "native" else 2.0**-24
    for given in (None, bias):
        got = scaled_mm(a, b, bias=given, out_dtype=out_dtype)
        extended_a, extended_b = exact_a, exact_b.t()
        if given is not None:
            extended_a = torch.cat([exact_a, torch.ones_like(exact_a[:, :1])], dim=1)
            extended_b = torch.cat([exact_b.t(), given.double()[None]], dim=0)
        bound = product_bound(extended_a, extended_b, out_dtype, accumulate=accumulate, summands=1)
        if backend.name == "native" and given is not None:
            bound *= 2  # the bias may be added after rounding
        exact = extended_a @ extended_b
        in_range = exact.abs() + bound < torch.finfo(out_dtype).max
        error = (got.double() - exact).abs()
        assert got.dtype == out_dtype
        assert (error <= bound)[in_range].all(), (error / bound)[in_range].max()
        assert in_range.any()


@pytest.mark.parametrize("fmt", [TENSOR, ROW, BLOCKS, SQUARES, BLOCKS_FP32], ids=str)
def test_small_integers_multiply_exactly(fmt, device):
    """Codes that are small integers, with scale 1, have sums that fp32 holds: the product must be exact."""
    a = torch.randint(-8, 9, (17, 40)).to(torch.float8_e4m3fn).to(device)
    b = torch.randint(-8, 9, (23, 40)).to(torch.float8_e4m3fn).to(device)
    scales = [torch.ones(fmt.scale_shape(*t.shape), device=device) for t in (a, b)]
    got = scaled_mm(Face(a, scales[0], None, fmt), Face(b, scales[1], None, fmt), out_dtype=torch.bfloat16)
    exact = (a.double() @ b.double().t()).to(torch.bfloat16)
    assert torch.equal(got, exact)


@pytest.mark.parametrize("fmt", [TENSOR, ROW], ids=str)
def test_agrees_with_torch_scaled_mm(fmt, device):
    if fmt is ROW and device == "cpu" and torch.__version__ < "2.13":
        pytest.skip("torch's CPU product with a scale per row is newer")
    a, exact_a = face(random_tensor(32, 64, device=device, seed=1), fmt)
    b, exact_b = face(random_tensor(48, 64, device=device, seed=2), fmt)
    got = scaled_mm(a, b, out_dtype=torch.bfloat16)
    theirs = torch._scaled_mm(a[0], b[0].t(), a[1], b[1].t(), out_dtype=torch.bfloat16)
    bound = product_bound(exact_a, exact_b.t(), torch.bfloat16, accumulate=HOPPER_ACCUMULATE)
    assert ((got.double() - theirs.double()).abs() <= 2 * bound).all()


def test_a_huge_and_a_tiny_scale_do_not_overflow(device):
    a, exact_a = face(torch.full((4, 16), 1e38, device=device), TENSOR)
    b, exact_b = face(torch.full((4, 16), 1e-38, device=device), TENSOR)
    got = scaled_mm(a, b, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), exact_a @ exact_b.t(), rtol=1e-6, atol=0)


def test_finite_operands_of_any_size_give_no_nan_in_emulation():
    huge = torch.full((4, 32), 3.39e38)
    zero_sum = huge * torch.tensor([1.0, -1.0]).repeat(16)
    for fmt in (TENSOR, MX, MX_GRAD, NV, BLOCKS_FP32):
        a, b = face(zero_sum, fmt)[0], face(huge, fmt)[0]
        assert multipliable_values([a], torch.bfloat16)[0].isfinite().all()
        if fmt.pow2_scale:
            continue  # such scales are in the values, whose products are beyond fp32
        assert (scaled_mm(a, b, out_dtype=torch.float32) == 0).all()


def test_a_tensor_scale_multiplies_the_product(device):
    a, _ = face(random_tensor(8, 16, device=device), NV)
    b, _ = face(random_tensor(4, 16, device=device), ROW)
    plain = scaled_mm(a, b, out_dtype=torch.float32)
    doubled = scaled_mm(a._replace(tensor_scale=a.tensor_scale * 2), b, out_dtype=torch.float32)
    assert torch.equal(doubled, 2 * plain)


@pytest.mark.parametrize("fmt", [BLOCKS, SQUARES, MX, MX_SQUARES, NV, NV_SQUARES, NV_ROWS, TENSOR, ROW], ids=str)
def test_values_in_bfloat16_times_the_factor_are_exact(fmt, device):
    operand, values = face(random_tensor(64, 128, device=device), fmt)
    (factor,) = sum_factors([operand])
    assert not operand.format.scales_partial_sums
    (codes,) = multipliable_values([operand], torch.bfloat16)
    got = codes.double() * (1 if factor is None else factor.double())
    torch.testing.assert_close(got, values, rtol=2.0**-23, atol=0)  # the factor's own rounding


@pytest.mark.parametrize("fmt", [BLOCKS_FP32, SQUARES_FP32], ids=str)
def test_fp32_block_scales_stay_out_of_bfloat16_values(fmt, device):
    operand, values = face(random_tensor(130, 256, device=device), fmt)
    assert operand.format.scales_partial_sums
    for start in (0, 128):
        codes = multipliable_values([operand], torch.bfloat16)[0][:, start : start + 128].double()
        assert torch.equal(codes * block_factor(operand, start, start + 128).double(), values[:, start : start + 128])
    with pytest.raises(ValueError, match=r"a range inside a block of 128 is required, got \[64, 192\)"):
        block_factor(operand, 64, 192)


def test_values_with_their_block_scales_are_exact_in_bfloat16():
    """Why emulation may multiply in BF16: every code under every scale, as long as bf16's exponent reaches."""
    bytes_ = np.arange(256, dtype=np.uint8)
    e4m3, e5m2, e2m1 = decode_oracle(bytes_, "e4m3"), decode_oracle(bytes_, "e5m2"), decode_oracle(bytes_[:16], "e2m1")
    powers = 2.0 ** np.arange(-110, 110)
    for elements, scales in ((e2m1, e4m3), (e4m3, powers), (e5m2, powers)):
        products = np.outer(elements, scales)
        products = products[np.isfinite(products)]
        np.testing.assert_array_equal(products.astype(ml_dtypes.bfloat16).astype(np.float64), products)


@pytest.mark.parametrize("shape", [(0, 8, 16), (8, 0, 16), (8, 8, 0)], ids=str)
def test_empty_gives_zeros_or_the_bias(shape, device):
    m, n, k = shape
    a, _ = face(torch.empty(m, k, device=device), TENSOR)
    b, _ = face(torch.empty(n, k, device=device), TENSOR)
    bias = torch.arange(n, device=device, dtype=torch.bfloat16)
    assert torch.equal(scaled_mm(a, b, out_dtype=torch.bfloat16), torch.zeros(m, n, device=device).bfloat16())
    assert torch.equal(scaled_mm(a, b, bias=bias, out_dtype=torch.bfloat16), bias.expand(m, n))


ENDS = [
    (MX, NV), (NV, MX_GRAD), (MX, IDENTITY), (IDENTITY, NV), (MX, TENSOR), (ROW, NV_ROWS), (BLOCKS, MX),
    (MX, BLOCKS_FP32), (NV_SQUARES, SQUARES_FP32), (BLOCKS, MX4),
]  # fmt: skip


@pytest.mark.parametrize("pair", ENDS, ids=str)
@pytest.mark.parametrize("k", [7, 17, 129])
def test_one_operand_may_end_in_more_zeros(pair, k, device):
    """Oracle: the product of operands that both end in zeros up to whole blocks."""
    faces, whole = [], []
    for i, fmt in enumerate(pair):
        x = random_tensor(16 * (i + 1), k, device=device, seed=i)
        faces.append(face(F.pad(x, (0, -k % fmt.step)), fmt))
        whole.append(face(F.pad(x, (0, -k % 32)), fmt))
    got, expected = (scaled_mm(a[0], b[0], out_dtype=torch.float32) for a, b in (faces, whole))
    exact_a, exact_b = (F.pad(exact, (0, -exact.shape[1] % 32)) for _, exact in faces)
    backend = select_backend(*pair, torch.float32, torch.device(device))
    accumulate = HOPPER_ACCUMULATE if backend.name == "native" else 2.0**-24
    bound = product_bound(exact_a, exact_b.t(), torch.float32, accumulate=accumulate)
    for product in (got, expected):
        assert ((product.double() - exact_a @ exact_b.t()).abs() <= bound).all()


@pytest.mark.parametrize(("left", "right"), [(32, 48), (64, 30), (16, 64)])
def test_operands_of_other_lengths_are_refused(left, right, device):
    """Whole blocks of MX are 32 entries, of FP8 per tensor and of plain values one."""
    a = face(random_tensor(4, left, device=device), NV if left == 16 else MX)[0]
    b = face(random_tensor(4, right, device=device), MX if left == 16 else TENSOR)[0]
    with pytest.raises(ValueError, match=f"one contraction size is required, got {left} .* and {right} "):
        scaled_mm(a, b, out_dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("left", "right"), [(TENSOR, TENSOR), (GRAD, TENSOR), (TENSOR, GRAD), (ROW, ROW),
                                             (GRAD_ROW, ROW), (ROW, GRAD_ROW), (BLOCKS, BLOCKS), (BLOCKS, SQUARES),
                                             (SQUARES, BLOCKS), (BLOCKS_FP32, SQUARES_FP32)], ids=str)  # fmt: skip
@pytest.mark.skipif(not torch.cuda.is_available(), reason="native products need a CUDA device")
def test_native_products_run_and_padding_is_exact(left, right, out_dtype):
    """Every pair that is called native multiplies, at sizes cuBLASLt takes and at sizes that need padding."""
    device = torch.device("cuda")
    for m, n, k, fast in itertools.product((64, 37, 1, 300), (64, 50, 1, 256), (64, 70, 16, 640), (True, False)):
        a, exact_a = face(random_tensor(m, k, device=device, seed=1), left)
        b, exact_b = face(random_tensor(n, k, device=device, seed=2), right)
        if select_backend(left, right, out_dtype, device).name == "native":
            if m == 1:
                a = a._replace(qdata=a.qdata.t().contiguous().t())  # a row with stride 1
            got = scaled_mm(a, b, out_dtype=out_dtype, fast_accum=fast)
            bound = product_bound(exact_a, exact_b.t(), out_dtype, accumulate=HOPPER_ACCUMULATE)
            exact = exact_a @ exact_b.t()
            in_range = exact.abs() + bound < torch.finfo(out_dtype).max
            assert ((got.double() - exact).abs() <= bound)[in_range].all()


@pytest.mark.gpu
@pytest.mark.parametrize("k", [16, 64, 80, 144, 272])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="native products need a CUDA device")
def test_hardware_reads_a_partial_block_and_nothing_that_is_appended_to_scales(k):
    """What ``native_mm`` relies on. Oracle: the same product of elements that zeros pad to whole blocks."""
    blocks = -(-k // 128)
    left, right = (torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for n in (64, 256))
    scale = torch.rand(blocks, 64, device="cuda").as_strided((64, blocks), (1, 64))
    squares = torch.full((2, -(-blocks // 4) * 4), torch.nan, device="cuda")
    squares[:, :blocks] = torch.rand(2, blocks, device="cuda")
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128

    def product(a, b, of_squares):
        return F.scaled_mm(a, b.t(), scale, kinds[0], of_squares.t(), kinds[1], output_dtype=torch.float32)

    whole = (F.pad(t.view(torch.uint8), (0, -k % 128)).view(t.dtype) for t in (left, right))
    assert torch.equal(product(left, right, squares), product(*whole, squares.nan_to_num()))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 50, 256], ids=str)
@pytest.mark.parametrize(
    ("left", "right"), [(BLOCKS, SQUARES), (BLOCKS, BLOCKS), (TENSOR, TENSOR), (ROW, ROW)], ids=str
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="native products need a CUDA device")
def test_native_products_add_the_bias_before_they_round(left, right, columns):
    """Hopper's matrix units add it to their sum; where columns are padded per tensor and row, it comes after."""
    device, rounding = torch.device("cuda"), torch.finfo(torch.bfloat16).eps / 2
    a, exact_a = face(random_tensor(96, 256, device=device, seed=1), left)
    b, exact_b = face(random_tensor(columns, 256, device=device, seed=2), right)
    bias = random_tensor(columns, device=device, seed=3) * 8
    got = scaled_mm(a, b, bias=bias, out_dtype=torch.bfloat16)
    exact = exact_a @ exact_b.t()
    bound = product_bound(exact_a, exact_b.t(), torch.float32, accumulate=HOPPER_ACCUMULATE)
    if columns == 50 and left in (TENSOR, ROW):
        bound += rounding * exact.abs()
    total = exact + bias.double()
    assert ((got.double() - total).abs() <= bound + rounding * (total.abs() + bound)).all()


def test_backend_is_decided_in_one_place():
    cpu = torch.device("cpu")
    assert select_backend(IDENTITY, IDENTITY, torch.bfloat16, cpu).name == "high precision"
    assert select_backend(IDENTITY, TENSOR, torch.bfloat16, cpu) == Backend(
        "emulated", "one operand is in high precision"
    )
    assert select_backend(TENSOR, TENSOR, torch.bfloat16, cpu) == Backend(
        "emulated", "no matrix units for these formats on cpu"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks for the device's capability")
@pytest.mark.gpu
def test_backend_on_a_gpu():
    gpu = torch.device("cuda")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("Hopper or newer is required")
    assert select_backend(TENSOR, TENSOR, torch.bfloat16, gpu).name == "native"
    assert select_backend(ROW, ROW, torch.bfloat16, gpu).name == "native"
    assert "no hardware product" in select_backend(GRAD, GRAD, torch.bfloat16, gpu).reason
    assert "bfloat16 only" in select_backend(ROW, ROW, torch.float32, gpu).reason
    assert "no hardware product" in select_backend(ROW, TENSOR, torch.bfloat16, gpu).reason


def test_what_hardware_multiplies():
    names = {"whole": "torch._scaled_mm", "block": "1x128", "mx": "1x32", "nv": "1x16"}
    native = {
        (TENSOR, TENSOR): "whole", (GRAD, TENSOR): "whole", (ROW, ROW): "whole", (BLOCKS, SQUARES): "block",
        (BLOCKS_FP32, BLOCKS): "block", (SQUARES, BLOCKS): "block", (MX, MX_SQUARES): "mx", (MX_GRAD, MX): "mx",
        (NV, NV_ROWS): "nv", (NV_ROTATED, NV_ROTATED): "nv",
    }  # fmt: skip
    for pair, name in native.items():
        assert names[name] in native_kind(*pair).name
    for pair in ((SQUARES, SQUARES), (GRAD, GRAD), (MX_GRAD, MX_GRAD), (MX, BLOCKS), (NV, MX), (TENSOR, ROW), (NV, ROW),
                 (IDENTITY, MX), (BLOCKS, TENSOR), (GRAD_BLOCKS, SQUARES), (GRAD_BLOCKS, MX4)):  # fmt: skip
        assert native_kind(*pair) is None


@pytest.mark.parametrize("pair", [(MX, MX_SQUARES), (NV, NV_SQUARES), (NV_ROWS, NV)], ids=str)
def test_blackwell_products_get_operands_in_torchs_layout(pair, monkeypatch):
    """Without that hardware: what reaches torch has the documented shapes, types and order, and decodes back."""
    m, n, k = 40, 64, 96
    a, exact_a = face(random_tensor(m, k, seed=1), pair[0])
    b, exact_b = face(random_tensor(n, k, seed=2), pair[1])
    packed, block = (2, 16) if pair[0].tensor_block else (1, 32)

    def scaled_mm_of_torch(left, right, scale_a, recipe_a, scale_b, recipe_b, *, swizzle_a, swizzle_b, output_dtype):
        assert {recipe_a, recipe_b} == {getattr(F.ScalingType, f"BlockWise1x{block}")}
        assert {swizzle_a, swizzle_b} == {F.SwizzleType.SWIZZLE_32_4_4}
        assert right.stride(0) == 1  # column-major
        values = []
        for data, scale in ((left, scale_a), (right.t(), scale_b)):
            assert data.is_contiguous()
            assert (data.shape[1] * data.itemsize) % 16 == 0
            assert data.shape[0] % 16 == 0
            fmt = formats.NVFP4 if packed == 2 else MX
            plain = data.view(torch.uint8) if packed == 2 else data
            blocks = plain.shape[1] * packed // block
            unswizzled = unswizzle(scale, data.shape[0], blocks)
            elements = decode_oracle((unpack(plain) if packed == 2 else plain.view(torch.uint8)).numpy(),
                                     "e2m1" if packed == 2 else "e4m3")  # fmt: skip
            values.append(torch.from_numpy(elements) * unswizzled.double().repeat_interleave(block, 1))
            assert fmt.element == data.dtype
        return (values[0] @ values[1].t()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm_of_torch)
    bias = random_tensor(n, seed=3)
    got = native_kind(*pair).multiply(a, b, bias, torch.float32, False)
    bound = product_bound(exact_a, exact_b.t(), torch.float32)
    assert ((got.double() - exact_a @ exact_b.t() - bias.double()).abs() <= bound + 2.0**-24 * bias.abs()).all()


def unswizzle(scale, rows, columns):
    """Read scales back by the documented address of each."""
    tiles_across = -(-columns // 4)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
    address = ((r // 128) * tiles_across + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    return scale.view(torch.uint8)[address].view(scale.dtype).float()


def test_autocast_does_not_reach_the_accumulator():
    a, _ = face(random_tensor(16, 64), TENSOR)
    b, _ = face(random_tensor(16, 64), TENSOR)
    expected = scaled_mm(a, b, out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = scaled_mm(a, b, out_dtype=torch.float32)
    assert torch.equal(got, expected)


def test_a_rotated_and_an_unrotated_operand_are_refused():
    a, _ = face(random_tensor(8, 16), ROW)
    with pytest.raises(ValueError, match="same Hadamard basis, got nvfp4_hadamard and fp8_e4m3_row"):
        scaled_mm(a._replace(format=NV_ROTATED), a, out_dtype=torch.bfloat16)


def test_operands_that_do_not_fit_are_refused():
    a, _ = face(random_tensor(8, 16), TENSOR)
    b, _ = face(random_tensor(8, 24), TENSOR)
    with pytest.raises(ValueError, match="one contraction size is required"):
        scaled_mm(a, b, out_dtype=torch.bfloat16)
    elsewhere = Face(a[0].to("meta"), a[1].to("meta"), None, TENSOR)
    with pytest.raises(ValueError, match="one device are required, got cpu, meta"):
        scaled_mm(a, elsewhere, out_dtype=torch.bfloat16)
    assert dequantize(*a[:3], format=TENSOR, dtype=torch.float32).shape == (8, 16)


def test_operands_of_equal_formats_that_mean_something_else(device):
    """Faces of one format and shape, of which one is the rowwise face that its columnwise one is made of."""
    x, w = (random_tensor(64, 64, seed=seed, device=device) for seed in (0, 1))
    cast = ops.CastRequest(ops.Cast(get_format("fp8_e4m3_tensor")))
    (left, _), (right, _) = ops.quantize(x, cast), ops.quantize(w, cast)
    held = right._replace(dequantized_rowwise=torch.bfloat16)
    values = ops.rowwise_values(right, torch.bfloat16)
    for _ in range(2):
        plain = ops.product(left, right, out_dtype=torch.bfloat16)
        assert torch.equal(plain, ops.scaled_mm(left, right, out_dtype=torch.bfloat16))
        turned = ops.product(left, held, out_dtype=torch.bfloat16)
        assert torch.equal(turned, ops.product(left, ops.high_precision(values.t()), out_dtype=torch.bfloat16))
        assert not torch.equal(plain, turned)
