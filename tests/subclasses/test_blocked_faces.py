"""Faces with block scales, packed elements and tensor scales: operators that move values, and where they may cut.

The oracle is the plain tensor of dequantized values, with which moving must commute, bit for bit, on each face.
"""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

from hybridtensor import (
    Float8Quantizer,
    HybridQuantizer,
    HybridTensor,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    ops,
    quantize_,
)
from hybridtensor.formats import FP8_E4M3_TENSOR
from hybridtensor.ops import Groups
from hybridtensor.state import Context
from hybridtensor.subclasses.quantizing import face_tensor
from hybridtensor.subclasses.structure import flatten, unflatten
from hybridtensor.testing import random_tensor

QUANTIZERS = {
    "1x128": Float8Quantizer(granularity="block"),
    "128x128": Float8Quantizer(granularity="block", block=(128, 128), dtype="e5m2", pow2_scale=False),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8_2d": MXFP8Quantizer(two_d=True),
    "mxfp4": MXFP4Quantizer(),
    "mxfp4_2d": MXFP4Quantizer(two_d=True, scale_rounding="even"),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4_2d": NVFP4Quantizer(two_d=True),
    "nvfp4_rows": NVFP4Quantizer(row_scaled=True),
    "nvfp4_hadamard": NVFP4Quantizer(hadamard=True),
    "nvfp4_four_over_six": NVFP4Quantizer(four_over_six="mse"),
    "nvfp4_2d_four_over_six": NVFP4Quantizer(two_d=True, four_over_six="mae"),
    "hybrid": HybridQuantizer(MXFP8Quantizer(dtype="e5m2"), NVFP4Quantizer(hadamard=True)),
}
SHAPE = (256, 384)
MOVES = {
    "alias": lambda x: torch.ops.aten.alias.default(x),
    "detach": lambda x: x.detach(),
    "rows": lambda x: x[128:256],
    "columns": lambda x: x[:, 128:384],
    "split rows": lambda x: x.split(128)[1],
    "split columns": lambda x: x.split([128, 256], dim=1)[1],
    "transpose": lambda x: x.t(),
    "transpose twice": lambda x: x.t().t(),
    "view": lambda x: x.view(2, 128, 384),
    "view, rows": lambda x: x.view(2, 128, 384)[1:],
    "clone": lambda x: x.clone(),
    "copy": lambda x: x.to("cpu", copy=True),
}


def values(x):
    return [face.dequantize() for face in (x.rowwise, x.columnwise)]


@pytest.fixture(params=QUANTIZERS)
def hybrid(request):
    return QUANTIZERS[request.param].quantize(random_tensor(*SHAPE))


@pytest.mark.parametrize("move", MOVES)
def test_moving_commutes_with_dequantizing(hybrid, move):
    moved = MOVES[move](hybrid)
    expected = [MOVES[move](v) for v in values(hybrid)]
    if move == "transpose":
        expected.reverse()
    assert isinstance(moved, HybridTensor)
    for got, value in zip(values(moved), expected, strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_cut_through_a_block_is_refused(hybrid, dim):
    with pytest.raises(ValueError, match=r"blocks of \d+ are cut by \[0:9:1\] of \d+; slice at multiples of \d+"):
        hybrid.narrow(dim, 0, 9)
    with pytest.raises(ValueError, match="are cut by"):
        hybrid[::3]


@pytest.mark.parametrize("make", [torch.empty_like, lambda x: x.new_empty(128, 512), lambda x: x.new_zeros(128, 512)])
def test_new_faces_have_the_formats_shapes(hybrid, make):
    new = make(hybrid)
    for face, old in ((new.rowwise, hybrid.rowwise), (new.columnwise, hybrid.columnwise)):
        rows, columns = face.matrix_shape if face.axis == -1 else face.matrix_shape[::-1]
        assert face.format is old.format
        assert tuple(face.qdata.shape) == (rows, columns // face.format.elements_per_byte)
        assert tuple(face.scale.shape) == face.format.scale_shape(rows, columns)
        assert (face.qdata.dtype, face.scale.dtype) == (old.qdata.dtype, old.scale.dtype)
        of_tensor = face.format.tensor_scale_shape(rows, columns)
        assert (None if face.tensor_scale is None else tuple(face.tensor_scale.shape)) == of_tensor


def test_new_zeros_are_zero_and_can_be_filled(hybrid):
    zeros = hybrid.new_zeros(*SHAPE)
    assert all(v.eq(0).all() for v in values(zeros))
    assert all(face.scale.float().eq(1).all() for face in (zeros.rowwise, zeros.columnwise))
    zeros.copy_(hybrid)
    assert torch.equal(zeros, hybrid)
    zeros[128:].copy_(hybrid[:128])
    for mine, theirs in zip(values(zeros), values(hybrid), strict=True):
        assert torch.equal(mine[128:], theirs[:128])


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rows"])
def test_a_slice_under_a_shared_tensor_scale_keeps_it(name):
    a, b = (QUANTIZERS[name].quantize(random_tensor(*SHAPE, seed=seed)) for seed in (1, 2))
    with pytest.raises(ValueError, match="a slice through a scale group, and its new scale would change the rest"):
        a[128:].copy_(b[:128])
    a[128:].copy_(a[:128])  # the same tensor scales


@pytest.mark.parametrize("way", ["pickle", "torch.save", "deepcopy", "flatten"])
def test_survives_being_taken_apart(hybrid, way):
    if way == "pickle":
        again = pickle.loads(pickle.dumps(hybrid))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(hybrid, file)
        file.seek(0)
        again = torch.load(file, weights_only=True)
    elif way == "deepcopy":
        again = copy.deepcopy(hybrid)
    else:
        again = unflatten(*flatten(hybrid))
    assert torch.equal(again, hybrid)
    assert torch.equal(again.dequantize(), hybrid.dequantize())


def test_dequantizes_the_more_precise_face():
    x = random_tensor(64, 64)
    rows, columns = MXFP8Quantizer(), NVFP4Quantizer(hadamard=True)
    assert torch.equal(HybridQuantizer(rows, columns).quantize(x).dequantize(), rows.quantize(x).rowwise.dequantize())
    h = HybridQuantizer(columns, rows).quantize(x)
    assert torch.equal(h.dequantize(), h.columnwise.dequantize())
    plain = HybridQuantizer(columns, NVFP4Quantizer()).quantize(x)
    assert torch.equal(plain.dequantize(), plain.columnwise.dequantize())  # no rotation before one


def test_each_face_of_every_format_dequantizes_alone(hybrid):
    """Also a columnwise face on its own, rotated or packed."""
    x = random_tensor(*SHAPE)
    for face in (hybrid.rowwise, hybrid.columnwise):
        error = (face.dequantize().float() - x.float()).norm() / x.float().norm()
        assert error < (0.2 if face.format.elements_per_byte == 2 else 0.08)


def test_a_face_without_elements_of_its_own_is_refused():
    x = random_tensor(64, 64)
    row = ops.quantize(x, ops.CastRequest(ops.Cast(FP8_E4M3_TENSOR)))[0]
    for face in (ops.high_precision(x), ops.columnwise_of(row, torch.bfloat16)):
        with pytest.raises(ValueError, match="a face with elements and scales of its own is required, got one in"):
            QuantizedTensor(face, -1, torch.bfloat16, x.shape)


NO_MOVES = {
    "transpose": lambda x: x.transpose(0, x.dim()),
    "permute": lambda x: x.permute(1, x.dim()),
    "permute, twice": lambda x: x.permute(0, 0),
    "permute, too few": lambda x: x.permute(0),
    "slice": lambda x: torch.ops.aten.slice.Tensor(x, x.dim(), 0, 128),
    "split": lambda x: x.split(128, x.dim()),
    "split, negative": lambda x: x.split(-1),
    "split into nothing": lambda x: x.split(0),
    "split, too few": lambda x: x.split([128]),
    "split, too many": lambda x: x.split([128, 256]),
    "split, one negative": lambda x: x.split([256, -128, 128]),
    "unbind": lambda x: x.view(2, 128, 384).unbind(3),
}


@pytest.mark.parametrize("move", NO_MOVES)
def test_what_is_no_move_of_plain_tensors_raises(move):
    x = random_tensor(*SHAPE)
    for each in (x, QUANTIZERS["mxfp8"].quantize(x)):
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            NO_MOVES[move](each)


def tokens(name, shape):
    """Return the columnwise face of tokens as layers quantize them: rows of zeros complete the last block."""
    x = random_tensor(*shape)
    _, face = QUANTIZERS[name].faces(x, rowwise=False, columnwise=True, dtype=x.dtype, context=Context("input"))
    return face_tensor(face, 0, x.shape, x.dtype)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("shape", [(40, 64), (8, 64), (4, 6, 64), (3, 16, 64), (2, 3, 8, 64)], ids=str)
def test_slices_of_tokens_that_are_no_whole_blocks_keep_the_values_or_are_refused(name, shape):
    face = tokens(name, shape)
    block, inner = face.format.block[1], math.prod(shape[1:-1])
    for start, stop in itertools.combinations(range(shape[0] + 1), 2):
        ends = stop == shape[0] or stop * inner % block == 0
        if start * inner % block == 0 and ends:
            assert torch.equal(face[start:stop].dequantize(), face.dequantize()[start:stop])
        else:
            with pytest.raises(ValueError, match="are cut by"):
                face[start:stop]
    assert torch.equal(face.split(shape[0])[0].dequantize(), face.dequantize())


@pytest.mark.parametrize("make", [torch.empty_like, lambda x: x.new_empty(x.shape), lambda x: x.new_zeros(x.shape)])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4", "1x128"])
def test_new_faces_are_laid_out_as_casts_lay_them_out(make, name):
    """Also those of tokens that are no whole blocks, so that a copy into them fits."""
    face = tokens(name, (40, 64))
    new = make(face)
    for tensor, old in ((new.qdata, face.qdata), (new.scale, face.scale)):
        assert (tensor.shape, tensor.stride()) == (old.shape, old.stride())
    assert torch.equal(new.copy_(face).dequantize(), face.dequantize())


@pytest.fixture(params=["nvfp4", "mxfp8", "mxfp4", "1x128"])
def stack(request):
    """Return the faces of a stack of matrices."""
    context = Context("weight", groups=Groups(4))
    return QUANTIZERS[request.param].quantize(random_tensor(4, 128, 256), context=context)


@pytest.mark.parametrize("cut", [lambda x: x[:2], lambda x: x.split(128 * 256), lambda x: x[0], lambda x: x.t()])
def test_flattened_stacks_are_not_cut_as_stacks(cut, stack):
    for face in (stack.rowwise, stack.columnwise):
        flat = face.view(-1)
        with pytest.raises(NotImplementedError):
            cut(flat)
        assert torch.equal(flat.view(4, 128, 256).dequantize(), face.dequantize())


def test_empty_like_of_flattened_faces_holds_what_they_hold(stack):
    faces = [stack.rowwise, stack.columnwise, stack.rowwise[1], stack.columnwise[1]]
    for face in faces:
        flat = face.view(-1)
        new = torch.empty_like(flat)
        assert new.qdata.shape == face.qdata.shape
        assert torch.equal(new.copy_(flat).dequantize(), face.dequantize().view(-1))


def test_a_stack_of_no_matrices_has_values(stack):
    for face in (stack.rowwise[2:2], stack.columnwise[2:2]):
        values = face.dequantize()
        assert (values.shape, values.dtype) == ((0, 128, 256), face.dtype)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_rowwise"])
def test_a_flattened_view_of_persistent_experts_changes_them(recipe):
    class Experts(nn.Module):
        num_experts = 4

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(random_tensor(4 * 128, 256).view(4, 128, 256))

    flat, whole = (quantize_(Experts(), recipe, persistent=True).w for _ in range(2))
    flat.data.view(-1).mul_(3.0)
    whole.data.mul_(3.0)
    assert torch.equal(flat.original, whole.original)
    assert torch.equal(flat, whole)
