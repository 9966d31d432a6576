"""The products of groups: by kernels on a GPU, and without one by those in Triton's interpreter.

Oracle: the loop over products of single faces, which test_scaled_mm compares with float64. Sums of so few terms differ
by the order of their additions: by one unit in the last place, 2^-7 of the largest element in bf16, 2^-10 in fp16; in
fp32 by 2^-17 of it, and where FP8 matrix units add, with some 13 bits below the largest, by 2^-10.
"""

import warnings

import numpy as np
import pytest
import tiers
import torch
from casting import cast_of
from kernels import require_kernels
from tiers import few

from hybridtensor.formats import get_format
from hybridtensor.ops import NO_INPUTS, CastRequest, Groups, grouped_kernel
from hybridtensor.ops.face import columnwise_of, high_precision
from hybridtensor.ops.grouped_cast import quantize_groups
from hybridtensor.ops.grouped_mm import by_kernels, grouped_product, reference, select_grouped_backend
from hybridtensor.testing import random_tensor

T, N, K, E = 150, 64, 128, 3
KINDS = ["fp8_e4m3_tensor", "fp8_e5m2_row", "fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128_fp32_scale",
         "mxfp8_e4m3", "mxfp8_e4m3_32x32", "mxfp4", "nvfp4", "nvfp4_row_scaled", "nvfp4_16x16", "identity",
         "of fp8_e4m3_tensor", "of nvfp4", "of mxfp8_e4m3_32x32"]  # fmt: skip
ENDS = [(5, 5, 130), (0, 150, 150), (0, 0, 0)]


@pytest.fixture
def small_tiles(device, monkeypatch):
    """In the interpreter tiles are as small as blocks allow."""
    require_kernels(device)
    if device == "cpu":
        for tiles, along in ((grouped_kernel.TILES, 64), (grouped_kernel.PARTIAL_TILES, 128)):
            for dtype in tiles:
                monkeypatch.setitem(tiles, dtype, grouped_kernel.ProductTile(32, 32, along, 8, 4, 1))
        monkeypatch.setattr(grouped_kernel, "PRECISE_TILE", grouped_kernel.ProductTile(32, 32, 128, 8, 4, 1))


def face(values, kind, groups, *, rowwise):
    """Return a face of tokens, or of a stack; ``of`` a format is what its rowwise face holds."""
    direction = 0 if rowwise else 1
    if kind == "identity":
        made = high_precision(values)._replace(groups=None if groups.ends is None else groups)
        return made if rowwise else columnwise_of(made, values.dtype)
    cast = cast_of(kind.removeprefix("of "))
    if kind.startswith("of "):
        made, _ = quantize_groups(values, groups, CastRequest(cast), NO_INPUTS)
        return made if rowwise else columnwise_of(made, values.dtype)
    request = CastRequest(cast) if rowwise else CastRequest(None, cast)
    return quantize_groups(values, groups, request, NO_INPUTS)[direction]


def operands(device, left, right, ends, dtype=torch.bfloat16):
    """Return the operands of the three products."""
    x, g = (random_tensor(T, size, dtype=dtype, seed=size, device=device) / 64 for size in (K, N))  # fp16 holds sums
    w = torch.stack([random_tensor(N, K, dtype=dtype, seed=seed, device=device) for seed in range(E)])
    step = 32 if device == "cpu" and "128" not in left + right else 128  # in the interpreter, no larger than it must be
    groups, stack = Groups(E, torch.tensor(ends, dtype=torch.int32, device=device), step), Groups(E)
    return [
        (face(x, left, groups, rowwise=True), face(w, right, stack, rowwise=True)),
        (face(g, left, groups, rowwise=True), face(w, right, stack, rowwise=False)),
        (face(g, left, groups, rowwise=False), face(x, right, groups, rowwise=False)),
    ]


def check(left, right, dtype):
    with np.errstate(all="ignore"):
        got = by_kernels(left, right, left.groups, dtype, False)
    expected = reference(left, right, left.groups, dtype, False)
    assert got.shape == expected.shape
    assert got.dtype == dtype
    on_units = left.qdata.is_cuda and dtype == torch.float32
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-10 if on_units else 2**-17}[dtype]
    largest = expected.double().abs().max()
    assert (got.double() - expected.double()).abs().max() <= tolerance * largest


@pytest.mark.parametrize("index", range(len(KINDS)), ids=KINDS)
def test_every_pair(device, index, small_tiles):
    others = few((0, 3, 10, 1, 7), 2) if device == "cpu" else range(len(KINDS))
    for other in others:
        pair = KINDS[index], KINDS[(index + other) % len(KINDS)]
        for number, (left, right) in enumerate(operands(device, *pair, ENDS[0])):
            check(left, right, torch.bfloat16)
            of_values = "identity" in pair or (pair[0].startswith("of") and number == 2)
            if not of_values and (tiers.LONG or device != "cpu" or other in (0, 3)):
                check(left, right, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(device, dtype, small_tiles):
    for pair in (("identity", "fp8_e4m3_row"), ("of fp8_e4m3_tensor", "identity")):
        for left, right in operands(device, *pair, ENDS[0], dtype):
            check(left, right, dtype)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("kind", ["fp8_e4m3_tensor", "fp8_e5m2_row", "identity", "mxfp8_e4m3"])
def test_rows_of_none_and_empty_groups_give_zeros(device, kind, ends, small_tiles):
    for number, (left, right) in enumerate(operands(device, kind, kind, ends)):
        check(left, right, torch.bfloat16)
        out = by_kernels(left, right, left.groups, torch.bfloat16, False)
        rest = out[ends[-1] :] if number < 2 else out[0 if ends[0] == 0 else 1]
        assert not rest.any()


@pytest.mark.parametrize("features", [20, 24])
@pytest.mark.parametrize("turned", [False, True])
def test_values_of_any_layout(device, features, turned, small_tiles):
    """Torch pads rows of results to 16 bytes, and takes groups along columns only at multiples of 8."""
    groups = Groups(2, torch.tensor((13, 120), dtype=torch.int32, device=device), 32)
    x, w = torch.randn(128, 64, device=device).bfloat16(), torch.randn(2, features, 64, device=device).bfloat16()
    x = x.t().contiguous().t() if turned else x
    tokens = high_precision(x)._replace(groups=groups)
    check(tokens, high_precision(w), torch.bfloat16)
    assert not by_kernels(tokens, high_precision(w), groups, torch.bfloat16, False)[120:].any()
    columns = columnwise_of(tokens, torch.bfloat16)
    check(columns, columns, torch.bfloat16)


def apart(tensor, begin):
    """Return the tensor with other elements between its rows, from another address."""
    *outer, width = tensor.shape
    wider = torch.zeros(*outer, 2 * width, dtype=torch.uint8, device=tensor.device)
    found = wider.view(tensor.dtype)[..., begin : width + begin]
    found.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return found


@pytest.mark.parametrize("begin", [16, 4], ids=["aligned", "not aligned"])
def test_operands_that_lie_otherwise(device, begin, small_tiles):
    """What was prepared for the operands before is not launched with them."""
    for left, right in operands(device, "fp8_e5m2_row", "fp8_e5m2_row", ENDS[0]):
        check(left, right, torch.bfloat16)
        check(*(one._replace(qdata=apart(one.qdata, begin)) for one in (left, right)), torch.bfloat16)


def test_products_of_nothing(device):
    groups = Groups(2, torch.zeros(2, dtype=torch.int32, device=device), 32)
    tokens, w = torch.empty(0, 64, device=device).bfloat16(), torch.ones(2, 32, 64, device=device).bfloat16()
    tokens = high_precision(tokens)._replace(groups=groups)
    assert by_kernels(tokens, high_precision(w), groups, torch.bfloat16, False).shape == (0, 32)
    columns = columnwise_of(tokens, torch.bfloat16)
    assert not by_kernels(columns, columns, groups, torch.bfloat16, False).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU is waited for")
def test_no_product_waits_for_the_device():
    """Nor does a cast: no tensor's value comes to the host."""
    for kind in KINDS:
        made = operands("cuda", kind, kind, ENDS[0])
        for left, right in made:
            grouped_product(left, right, torch.bfloat16, False)
        with warnings.catch_warnings():  # it says that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            for left, right in made:
                grouped_product(left, right, torch.bfloat16, False)
            x = torch.ones(T, K, dtype=torch.bfloat16, device="cuda")
            if not kind.startswith(("of", "identity")):
                quantize_groups(x, made[0][0].groups, CastRequest(cast_of(kind), cast_of(kind)), NO_INPUTS)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="matrix units are a GPU's")
@pytest.mark.parametrize("kind", ["fp8_e4m3_row", "fp8_e5m2_row"])
def test_long_sums_keep_their_bits(kind):
    """Of terms of one sign matrix units by themselves would lose a part in three: those of gradients add in fp32.

    Oracle: float64; a part in 64 is allowed to rounding elements, whose errors cancel.
    """
    tokens = 40000
    x = torch.rand(tokens, 32, device="cuda").bfloat16() + 1
    groups = Groups(2, torch.tensor((100, tokens), dtype=torch.int32, device="cuda"), 32)
    left, right = (face(x, name, groups, rowwise=False) for name in (kind, "fp8_e4m3_row"))
    out = by_kernels(left, right, groups, torch.bfloat16, False).double()
    long = x[100:].double()
    assert ((out[1] / (long.t() @ long)) - 1).abs().max() < 1 / 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="native products need a CUDA device")
def test_which_products_hardware_computes():
    def backend(left, right, dtype=torch.bfloat16):
        made = select_grouped_backend(get_format(left), get_format(right), dtype, torch.device("cuda"))
        return made.name, made.reason.partition(" ")[0]

    for left in ("fp8_e4m3_row", "fp8_e4m3_tensor", "fp8_e5m2_tensor"):
        assert backend(left, "fp8_e4m3_tensor") == ("native", "FP8")
    assert backend("mxfp8_e4m3", "mxfp8_e4m3")[0] == "emulated"
