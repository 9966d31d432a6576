"""Faces of values, which products compute with where the device has no such elements.

Oracle: the face of elements and scales that the same cast makes, whose values ``multipliable_values`` and
``sum_factors`` return; products of both are compared bit for bit.
"""

import pickle

import pytest
import torch
from casting import cast_of
from tiers import LONG

from hybridtensor import ops
from hybridtensor.formats import (
    FP8_E4M3_1X128,
    FP8_E4M3_TENSOR,
    IDENTITY,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    format_of_face,
    get_format,
)
from hybridtensor.ops import Face, FaceKind
from hybridtensor.ops.dequantize import multipliable_values
from hybridtensor.ops.emulated_mm import sum_factors
from hybridtensor.ops.native_mm import native_kind
from hybridtensor.ops.scaled_mm import multiplies_values
from hybridtensor.testing import edge_tensor, random_tensor
from tests.ops.test_quantize import CASTS, bits, run, state  # noqa: F401  (run is a fixture)

OF_VALUES = [cast for cast in CASTS if cast.format.values is not None]


def faces_of(tensors, casts):
    """Return the faces that tensors hold, one after the other."""
    found = []
    for cast in casts:
        if cast is not None:
            count = cast.format.num_tensors
            found.append(Face.of(tensors[:count], FaceKind(cast.format)))
            tensors = tensors[count:]
    return found


def check(run, x, row, column, *, source=None):  # noqa: F811
    """Compare faces of which one or both are values."""
    plain = faces_of(run(x, row=row, column=column, source=source, **state(x.device)), (row, column))
    for of_row, of_column in ((True, True), (True, False), (False, True)):
        wanted = [
            cast and (cast.for_values() if values else cast) for cast, values in ((row, of_row), (column, of_column))
        ]
        made = faces_of(run(x, row=wanted[0], column=wanted[1], source=source, **state(x.device)), wanted)
        for got, codes in zip(made, plain, strict=True):
            if got.format is codes.format:
                assert all(map(torch.equal, map(bits, got.tensors()), map(bits, codes.tensors())))
                continue
            (expected,) = multipliable_values([codes], torch.bfloat16)
            torch.testing.assert_close(got.qdata, expected, rtol=0, atol=0, equal_nan=True)
            (factor,) = sum_factors([codes])
            assert (got.scale is None) == (factor is None)
            assert factor is None or torch.equal(got.scale, factor)


@pytest.mark.parametrize("cast", OF_VALUES, ids=str)
def test_values_are_those_of_the_elements(cast, run, device):  # noqa: F811
    for shape in ((64, 96), (160, 64)) if LONG else ((64, 96),):
        x = random_tensor(*shape, device=device)
        check(run, x, cast, cast.for_columnwise())
        check(run, x, cast, None)
        check(run, x, None, cast.for_columnwise())


@pytest.mark.parametrize("cast", OF_VALUES, ids=str)
def test_edges_and_any_number_of_rows(cast, run, device):  # noqa: F811
    check(run, edge_tensor(torch.bfloat16, device).repeat(2, 3)[:32, :64].contiguous(), cast, cast.for_columnwise())
    if cast.format.block[0] == 1:
        check(run, random_tensor(37, 64, device=device), cast, cast.for_columnwise())


@pytest.mark.parametrize("row", [cast_of("mxfp8_e4m3"), cast_of("nvfp4"), cast_of("nvfp4_row_scaled")], ids=str)
@pytest.mark.parametrize("column", [cast_of("mxfp8_e5m2"), cast_of("fp8_e4m3_row"), cast_of("nvfp4")], ids=str)
def test_with_another_format_and_of_what_the_rowwise_face_holds(row, column, run, device):  # noqa: F811
    x = random_tensor(64, 64, device=device)
    check(run, x, row, column)
    check(run, x, row, column, source=row)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("other", [MXFP8_E4M3, NVFP4, FP8_E4M3_1X128, FP8_E4M3_TENSOR, IDENTITY], ids=str)
@pytest.mark.parametrize("fmt", [MXFP8_E4M3, MXFP4, NVFP4], ids=str)
def test_products_are_those_of_the_elements(fmt, other, bias, out_dtype, device):
    """With values on either side, or on both."""
    a, b = random_tensor(48, 128, device=device), random_tensor(64, 128, seed=1, device=device)
    added = random_tensor(1, 64, seed=2, device=device)[0] if bias else None

    def face(x, fmt, values):
        if fmt.is_identity:
            return ops.high_precision(x)
        return ops.quantize(x, ops.CastRequest(ops.Cast(fmt.values if values and fmt.values else fmt)))[0]

    expected = ops.scaled_mm(face(a, fmt, False), face(b, other, False), bias=added, out_dtype=out_dtype)
    for left, right in ((True, True), (True, False), (False, True)):
        made = ops.product(face(a, fmt, left), face(b, other, right), bias=added, out_dtype=out_dtype)
        assert torch.equal(made, expected)


def test_who_multiplies_values(device):
    """What has no hardware before Blackwell; formats that have some never do."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    for fmt in (MXFP8_E4M3, NVFP4, get_format("nvfp4_hadamard")):
        assert multiplies_values(fmt, torch.device(device)) == (capability < (10, 0))
    for fmt in (IDENTITY, FP8_E4M3_TENSOR, FP8_E4M3_1X128, NVFP4.values):
        assert fmt.values is None
        assert not multiplies_values(fmt, torch.device(device))
    assert multiplies_values(MXFP4, torch.device(device))  # whatever the device


def test_formats_of_values():
    values = NVFP4.values
    assert values is NVFP4.values is format_of_face("nvfp4_values") is pickle.loads(pickle.dumps(values))
    assert values.base is NVFP4
    assert NVFP4.base is NVFP4
    assert (values.element, values.block, values.num_tensors) == (torch.bfloat16, (None, None), 2)
    assert MXFP8_E4M3.values.num_tensors == 1
    assert get_format("nvfp4_row_scaled").values.block == (1, None)
    assert format_of_face("nvfp4") is NVFP4
    assert native_kind(values, FP8_E4M3_TENSOR) is None  # whose blocks and scales are those of a native product
    with pytest.raises(ValueError, match="unknown format 'fp8_e4m3_row_values'"):
        format_of_face("fp8_e4m3_row_values")
    with pytest.raises(ValueError, match=r"unknown format 'nvfp4_values'; (?!.*_values)"):  # nothing is stored so
        get_format("nvfp4_values")
