"""Casting the gradients of a gated activation while they are computed.

Oracle: the casts of the gradients that the kernels of ``ops.swiglu`` store, which ``test_swiglu`` compares with torch.
"""

import numpy as np
import pytest
import torch
from kernels import require_kernels
from tiers import covered

from hybridtensor.formats import get_format
from hybridtensor.ops import Cast, CastInputs, CastRequest
from hybridtensor.ops.cast.kernel import cast_on_gpu
from hybridtensor.ops.cast.swiglu_gradients import cast_swiglu_gradients, scales_are_known
from hybridtensor.ops.swiglu import swiglu_backward_cuda
from hybridtensor.testing import random_tensor


@pytest.fixture(autouse=True)
def _kernels(device):
    """Without numpy's word on overflows in the interpreter, which are meant."""
    require_kernels(device)
    with np.errstate(all="ignore"):
        yield


def request(row="fp8_e5m2_tensor", column="fp8_e5m2_tensor", slots=(1, 1)):
    casts = [name and Cast(get_format(name), slot=slot) for name, slot in zip((row, column), slots, strict=True)]
    return CastRequest(*casts)


def inputs(device, record=True):
    scales = torch.tensor([2.0, 8.0, 0.5], device=device)
    return CastInputs(encode_scale=scales, amax_record=torch.zeros(3, device=device) if record else None)


def operands(device, rows, columns, dtype=torch.bfloat16, packed=False):
    grad, gate, up = (random_tensor(rows, columns, seed=i, device=device).to(dtype) for i in range(3))
    gate.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), 1e30], device=device).to(dtype)
    return (grad, *torch.cat([gate, up], dim=-1).chunk(2, dim=-1)) if packed else (grad, gate, up)


def tensors(faces):
    return [t for face in faces if face is not None for t in face.tensors()]


def assert_same_bits(made, expected):
    assert len(made) == len(expected)
    for got, want in zip(made, expected, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        as_bits = torch.uint8 if got.itemsize == 1 else torch.int32
        assert torch.equal(got.view(as_bits), want.view(as_bits))


REQUESTS = {
    "both": request(),
    "rowwise": request(column=None),
    "columnwise": request(row=None),
    "two formats": request("fp8_e4m3_tensor", "fp8_e5m2_tensor", slots=(0, 2)),
}


@pytest.mark.parametrize(
    ("asked", "packed", "rows", "dtype"),
    covered([*REQUESTS], [False, True], [64, 37], [torch.bfloat16, torch.float16, torch.float32]),
)
def test_faces_are_those_of_stored_gradients(asked, packed, rows, dtype, device):
    asked = REQUESTS[asked]
    assert scales_are_known(asked)
    matrices = operands(device, rows, 128 if packed else 144, dtype, packed)
    given = [inputs(device) for _ in range(1 if packed else 2)]
    expected = [inputs(device) for _ in given]
    made = cast_swiglu_gradients(*matrices, [asked] * len(given), given)
    stored = swiglu_backward_cuda(*matrices, packed)
    for got, of_got, x, of_x in zip(made, given, stored, expected, strict=True):
        assert_same_bits(tensors(got), tensors(cast_on_gpu(x, asked, of_x).run(x, of_x)))
        assert torch.equal(of_got.amax_record, of_x.amax_record)
        assert of_x.amax_record.any()


def test_amaxes_are_recorded_only_where_they_are_wanted(device):
    matrices, asked = operands(device, 32, 64), REQUESTS["both"]
    (row, _), _ = cast_swiglu_gradients(*matrices, [asked] * 2, [inputs(device, record=False)] * 2)
    (expected, _), _ = cast_swiglu_gradients(*matrices, [asked] * 2, [inputs(device), inputs(device)])
    assert_same_bits(row.tensors(), expected.tensors())


def test_strides_are_those_of_each_matrix(device):
    grad, gate, up = operands(device, 48, 64)
    apart = torch.cat([grad, up, gate], dim=-1)
    views = apart[:, :64], apart[:, 128:], apart[:, 64:128]
    for packed in (1, 2):
        one, other = (
            cast_swiglu_gradients(*given, [REQUESTS["both"]] * packed, [inputs(device) for _ in range(packed)])
            for given in ((grad, gate, up), views)
        )
        for made, expected in zip(one, other, strict=True):
            assert_same_bits(tensors(made), tensors(expected))


@pytest.mark.parametrize("why", ["odd strides", "columns", "address", "a half tile", "nothing"])
def test_what_kernels_cannot_read_is_left(why, device):
    columns, given = (72, [inputs(device)] * 2) if why == "odd strides" else (64, [inputs(device)] * 2)
    matrices = list(operands(device, 32, columns))
    if why == "columns":
        matrices[1] = matrices[1].t().contiguous().t()
    elif why == "address":
        matrices[2] = torch.cat([matrices[2].flatten(), matrices[2].flatten()])[3 : 3 + 32 * 64].view(32, 64)
    elif why == "a half tile":
        matrices, given = list(operands(device, 32, 96)), [inputs(device)]
    elif why == "nothing":
        matrices = [x[:0] for x in matrices]
    assert cast_swiglu_gradients(*matrices, [REQUESTS["both"]] * len(given), given) is None


@pytest.mark.parametrize("unlike", [0, 1])
def test_gradients_that_are_cast_otherwise_are_left(unlike, device):
    """One of which amaxes are recorded and one of which none are; other formats, other scales."""
    matrices, alike = operands(device, 32, 64), [REQUESTS["both"]] * 2
    given = [inputs(device), inputs(device)]
    given[unlike] = inputs(device, record=False)
    assert cast_swiglu_gradients(*matrices, alike, given) is None
    for other in ("two formats", "rowwise"):
        requests = list(alike)
        requests[unlike] = REQUESTS[other]
        assert cast_swiglu_gradients(*matrices, requests, [inputs(device), inputs(device)]) is None


def test_other_casts_gain_nothing():
    current, blocks = (Cast(get_format(name)) for name in ("fp8_e4m3_tensor", "fp8_e4m3_1x128"))
    drawn = Cast(get_format("fp8_e5m2_tensor"), slot=0, stream=3)
    for cast in (current, blocks, drawn):
        assert not scales_are_known(CastRequest(cast, cast))
