"""MXFP4 weights in FP8 matrix units. The kernels run on a GPU, and without one in Triton's interpreter.

Oracles: ml_dtypes for what bytes mean, and for whether E4M3 holds a number; float64 for products.
"""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from casting import float8_quantize
from kernels import require_kernels

from hybridtensor import formats
from hybridtensor.ops import Groups, multiplies_values
from hybridtensor.ops.face import Face
from hybridtensor.ops.grouped_mm import by_kernels, select_grouped_backend
from hybridtensor.ops.native_mm import native_kind
from hybridtensor.ops.reencoding import Reencoded, reencodes
from hybridtensor.ops.scaled_mm import scaled_mm
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context
from hybridtensor.subclasses.observing import for_products_of_weight
from hybridtensor.testing import exact_values, product_bound, random_tensor

BLOCKS, GRAD, SQUARES = formats.FP8_E4M3_1X128, formats.FP8_E5M2_1X128, formats.FP8_E4M3_128X128
MX4, MX4_SQUARES = formats.MXFP4, formats.MXFP4_32X32
# Hopper's FP8 tensor cores add products aligned to 13 fraction bits or so before promoting to fp32.
HOPPER_ACCUMULATE = 2.0**-13
DEEPSEEK = "fp8_block:mxfp4/fp8_block/fp8_block+rowwise_dequantized_weight"


@pytest.fixture(autouse=True)
def quiet():
    """Without numpy's word on overflows in the interpreter: of branches that ``where`` does not take."""
    with np.errstate(all="ignore"):
        yield


def weight(rows, columns, fmt, device, seed=0, spans=()):
    """Return an MXFP4 face of random bytes, with random scales 2^-5 to 2^3.

    ``spans`` are triples of row, block of 32 columns and code of E8M0 that replaces the scale there.
    """
    drawn = np.random.default_rng(seed)
    codes = torch.from_numpy(drawn.integers(0, 256, (rows, columns // 2), dtype=np.uint8))
    scale = drawn.integers(122, 131, fmt.scale_shape(rows, columns)).astype(np.uint8)
    for row, block, code in spans:
        scale[row // fmt.block[0], block] = code
    lie = torch.from_numpy(scale).t().contiguous().t() if fmt.block[0] == 1 else torch.from_numpy(scale)
    return Face(codes.to(device), lie.to(device).view(torch.float8_e8m0fnu), None, fmt)


def values_of(face):
    """Return what a face's bytes mean, in float64, by ml_dtypes."""
    packed = face.qdata.view(torch.uint8).cpu().numpy()
    scale = face.scale.cpu()
    if face.format.elements_per_byte == 2:
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
        elements = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    else:
        elements = packed.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = scale.double().numpy() if scale.dtype == torch.float32 else (
        scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    )  # fmt: skip
    for axis, block in enumerate(face.format.block):
        scales = scales.repeat(block, axis).take(range(elements.shape[axis]), axis)
    return elements * scales


def fits(face):
    """Return for each 128x128 block whether scales of what is not zero are within 2^11, at most 2^125, and none NaN."""
    codes = face.qdata.cpu().numpy()
    scale = face.scale.view(torch.uint8).cpu().numpy().astype(int).repeat(face.format.block[0], 0)[: codes.shape[0]]
    any_element = (codes & 0x77).reshape(*scale.shape, 16).any(-1)
    found = np.zeros([-(-codes.shape[0] // 128), -(-scale.shape[1] // 4)], dtype=bool)
    for row, column in np.ndindex(found.shape):
        cut = np.s_[row * 128 : (row + 1) * 128, column * 4 : (column + 1) * 4]
        used = scale[cut][any_element[cut]]
        apart = np.ptp(used) if used.size else 0
        found[row, column] = apart <= 11 and used.max(initial=0) <= 252 and (scale[cut] < 255).all()
    return found


SPANS = {
    "near": (),
    "as far as possible": ((3, 1, 131), (3, 2, 120)),
    "one further": ((3, 1, 131), (3, 2, 119)),
    "far": ((3, 1, 140), (3, 6, 118), (5, 5, 100)),
    "NaN": ((130, 0, 255),),
    "huge": tuple((row, block, 254) for row in range(256) for block in range(8)),
    "tiny": tuple((row, block, 0) for row in range(256) for block in range(8)),
    "small": tuple((row, block, 11) for row in range(256) for block in range(8)),
}


@pytest.mark.parametrize("fmt", [MX4, MX4_SQUARES], ids=str)
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_blocks_are_exact_or_said_not_to_be(spans, fmt, device):
    require_kernels(device)
    face = weight(256, 256, fmt, device, spans=SPANS[spans])
    made = Reencoded(face)
    exact = values_of(face)
    blocks = fits(face)
    assert made.face.format is SQUARES
    assert np.array_equal(made._misfits.cpu().numpy()[0] == 0, blocks)
    got = values_of(made.face)
    for row, column in np.argwhere(blocks):
        cut = np.s_[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
        assert np.array_equal(got[cut], exact[cut])
        assert np.array_equal(np.signbit(got[cut]), np.signbit(exact[cut]))


@pytest.mark.parametrize("code", [252, 253])
def test_the_largest_scale_is_one_whose_values_fp32_holds(code, device):
    """6 * 2^125 is below 2^128, 6 * 2^126 is not."""
    require_kernels(device)
    codes = torch.full((128, 64), 0x77, dtype=torch.uint8, device=device)
    scale = torch.full((128, 4), code, dtype=torch.uint8, device=device)
    face = Face(codes, scale.view(torch.float8_e8m0fnu), None, MX4)
    made = Reencoded(face)
    exact = values_of(face).max() <= torch.finfo(torch.float32).max
    assert (made._misfits.item() == 0) == exact == (code == 252)
    assert not exact or np.array_equal(values_of(made.face), values_of(face))


@pytest.mark.parametrize("zeros", [False, True])
def test_scales_of_zeros_do_not_count(zeros, device):
    """A row that an expert never used has the smallest scale."""
    require_kernels(device)
    codes = torch.full((128, 64), 0x71, dtype=torch.uint8)
    scale = torch.full((128, 4), 120, dtype=torch.uint8)
    scale[9] = 0
    if zeros:
        codes[9] = 0x80
    face = Face(codes.to(device), scale.to(device).view(torch.float8_e8m0fnu), None, MX4)
    made = Reencoded(face)
    assert made._misfits.item() == (not zeros)
    assert not zeros or np.array_equal(values_of(made.face), values_of(face))


@pytest.mark.parametrize("code", [0x00, 0x22], ids=["zeros", "ones"])
def test_a_scale_that_is_nan_makes_nan_of_any_element(code, device):
    require_kernels(device)
    codes = torch.full((128, 64), code, dtype=torch.uint8, device=device)
    scale = torch.full((128, 4), 127, dtype=torch.uint8, device=device)
    scale[7, 2] = 255
    made = Reencoded(Face(codes, scale.view(torch.float8_e8m0fnu), None, MX4))
    left = Face(*float8_quantize(torch.ones(64, 128, device=device), BLOCKS), None, BLOCKS)
    out = torch.zeros(64, 128, device=device)
    made.overwrite_(out, left)
    expected = torch.full_like(out, 128.0 if code else 0.0)
    expected[:, 7] = torch.nan
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("shape", [(32, 32), (160, 96), (16, 384)], ids=str)
def test_weights_that_end_inside_a_block(shape, device):
    require_kernels(device)
    face = weight(*shape, MX4, device, seed=1)
    made = Reencoded(face)
    assert made.face.qdata.shape == shape
    assert made.face.scale.shape == SQUARES.scale_shape(*shape)
    assert not made._misfits.any()
    assert np.array_equal(values_of(made.face), values_of(face))


def operands(left, right, device, rows=70, columns=256, contraction=256, spans=SPANS["far"]):
    x = random_tensor(rows, contraction, device=device, seed=1)
    a = Face(*float8_quantize(x, left), None, left)
    return a, weight(columns, contraction, right, device, spans=spans)


@pytest.mark.parametrize("left", [BLOCKS, GRAD], ids=str)
@pytest.mark.parametrize("right", [MX4, MX4_SQUARES], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_of_misfits_are_overwritten_and_no_others(left, right, out_dtype, device):
    """Oracle: float64, within the bound of one sum in fp32 of factors that are exact."""
    require_kernels(device)
    a, b = operands(left, right, device)
    bias = random_tensor(256, device=device, seed=3)
    made = Reencoded(b)
    dirty = made._misfits[0].any(1).repeat_interleave(128)
    assert dirty[:128].all()
    assert not dirty[128:].any()
    for given in (None, bias):
        out = torch.full((70, 256), 7.0, dtype=out_dtype, device=device)
        made.overwrite_(out, a, given)
        assert (out[:, ~dirty] == 7).all()
        exact_a, exact_b = exact_values(a), exact_values(b).t()
        if given is not None:
            exact_a = torch.cat([exact_a, torch.ones_like(exact_a[:, :1])], dim=1)
            exact_b = torch.cat([exact_b, given.double()[None]], dim=0)
        bound = product_bound(exact_a, exact_b, out_dtype)
        assert ((out.double() - exact_a @ exact_b).abs() <= bound)[:, dirty].all()


@pytest.mark.parametrize("spans", ["near", "far", "NaN"])
def test_grouped_products(spans, device, monkeypatch):
    """Experts of which one has a block that E4M3 does not hold. Oracle: float64 of each group's rows."""
    require_kernels(device)
    if device == "cpu":
        from hybridtensor.ops import grouped_kernel

        monkeypatch.setitem(grouped_kernel.PARTIAL_TILES, None, grouped_kernel.ProductTile(32, 32, 128, 8, 4, 1))
    ends, tokens = (40, 40, 100), 110
    a, _ = operands(BLOCKS, MX4, device, rows=tokens)
    stack = [weight(256, 256, MX4, device, seed=e, spans=SPANS[spans] if e == 2 else ()) for e in range(3)]
    right = Face(
        torch.stack([face.qdata for face in stack]),
        torch.stack([face.scale.view(torch.uint8) for face in stack]).view(torch.float8_e8m0fnu),
        None,
        MX4,
    )
    groups = Groups(3, torch.tensor(ends, dtype=torch.int32, device=device), 128)
    out = by_kernels(a._replace(groups=groups), right, groups, torch.bfloat16, False)
    exact_a = exact_values(a)
    start = 0
    for face, end in zip(stack, ends, strict=True):
        exact = exact_a[start:end] @ exact_values(face).t()
        bound = product_bound(exact_a[start:end], exact_values(face).t(), torch.bfloat16, accumulate=HOPPER_ACCUMULATE)
        got = out[start:end].double()
        assert (got.isnan() == exact.isnan()).all()
        assert ((got - exact).abs() <= bound)[~exact.isnan()].all()
        start = end
    assert not out[ends[-1] :].any()
    assert out.isnan().any() == (spans == "NaN")


def test_which_products_are_reencoded():
    for left in (BLOCKS, GRAD, formats.FP8_E4M3_1X128_FP32_SCALE):
        for right in (MX4, MX4_SQUARES):
            assert reencodes(left, right)
            kind = native_kind(left, right)
            assert kind is None if left is GRAD else "re-encoded" in kind.name  # torch's product is of E4M3 alone
    for pair in ((SQUARES, MX4), (MX4, BLOCKS), (MX4, SQUARES), (BLOCKS, formats.MXFP4_HADAMARD),
                 (BLOCKS, formats.NVFP4), (formats.FP8_E4M3_ROW, MX4), (formats.MXFP8_E4M3, MX4)):  # fmt: skip
        assert not reencodes(*pair)


def test_a_weight_keeps_the_elements_that_its_product_reencodes(monkeypatch):
    """As on Hopper: FP4 elements where the product is native, bf16 values where no hardware multiplies them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    context, device = Context("weight"), torch.device("cuda", 7)

    def values(spec, dtype=torch.bfloat16):
        return for_products_of_weight(context, dtype, HybridConfig.parse(spec), device).values

    assert values(DEEPSEEK) == (False, True)
    assert values("fp8_block:mxfp4/fp8_block:mxfp4/fp8_block") == (False, False)
    assert values("mxfp4") == (True, True)
    assert values(DEEPSEEK, torch.float32) == (False, False)


def test_weights_alone_keep_their_values_where_no_product_reencodes_them():
    """Recipes whose MXFP4 is emulated everywhere cast straight to bf16 values, as before."""
    assert multiplies_values(MX4, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="native products need a CUDA device")
@pytest.mark.parametrize("spans", SPANS, ids=str)
@pytest.mark.parametrize("left", [BLOCKS, GRAD], ids=str)
def test_native_products(spans, left):
    """Dense products on Hopper, with blocks that are exact and such that are not."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 products with block scales are Hopper's")
    assert multiplies_values(MX4, device)
    for out_dtype, rows in ((torch.bfloat16, 300), (torch.float32, 64), (torch.float16, 1)):
        a, b = operands(left, MX4, device, rows=rows, spans=SPANS[spans])
        bias = random_tensor(256, device=device, seed=3)
        got = scaled_mm(a, b, bias=bias, out_dtype=out_dtype).double()
        exact_a = torch.cat([exact_values(a), torch.ones_like(a.qdata[:, :1]).double()], dim=1)
        exact_b = torch.cat([exact_values(b).t(), bias.double()[None]], dim=0)
        exact = exact_a @ exact_b
        bound = 2 * product_bound(exact_a, exact_b, out_dtype, accumulate=HOPPER_ACCUMULATE)
        usable = exact.abs() + bound < torch.finfo(out_dtype).max
        assert (got.isnan() == exact.isnan()).all() or spans == "huge"
        assert ((got - exact).abs() <= bound)[usable].all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU is waited for")
def test_no_product_waits_for_the_device():
    a, b = operands(BLOCKS, MX4, "cuda")
    scaled_mm(a, b, out_dtype=torch.bfloat16)
    with warnings.catch_warnings():  # it says that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        scaled_mm(a, b, out_dtype=torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="matrix units are a GPU's")
def test_what_the_backend_is_called():
    device = torch.device("cuda")
    made = select_grouped_backend(BLOCKS, MX4, torch.bfloat16, device)
    assert (made.name, "re-encoded" in made.reason) == ("native", True)
    assert select_grouped_backend(BLOCKS, MX4, torch.bfloat16, device, of_weights=False).name == "emulated"
