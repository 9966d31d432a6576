"""Casts that compute the matrix while they read it.

Oracle: the same cast of the matrix itself, which ``test_quantize`` compares with the definitions; the matrix by the
operators that return it, which ``test_swiglu`` and ``test_norm`` compare with torch and float64.
"""

import functools
import warnings

import numpy as np
import pytest
import torch
from casting import cast_of, request_of
from kernels import require_kernels
from tiers import covered

from hybridtensor import ops
from hybridtensor.ops import CastInputs, Hint
from hybridtensor.ops.cast.kernel import cast_on_gpu
from hybridtensor.ops.cast.operator import OperatorCast
from hybridtensor.ops.norm import norm_cuda
from hybridtensor.ops.prologue import Gated, Normed
from hybridtensor.ops.swiglu import swiglu_cuda
from hybridtensor.testing import random_tensor
from tests.ops.test_quantize import CASTS, WAYS, bits, in_kinds, state

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _kernels(device):
    """Without numpy's word on overflows in the interpreter, which are meant."""
    require_kernels(device)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield


@functools.cache
def gated(device, rows=80, columns=192, dtype=torch.bfloat16, apart=0):
    """Return what is read, the prologue, and the matrix."""
    x, up = (random_tensor(rows, columns + apart, seed=i, device=device).to(dtype)[:, :columns] for i in range(2))
    return x, Gated(up), swiglu_cuda(x, up)[0]


@functools.cache
def normed(device, rows=80, columns=192, dtype=torch.bfloat16, apart=0):
    """The same for a norm."""
    x = random_tensor(rows, columns + apart, device=device).to(dtype)[:, :columns]
    weight = 1 + random_tensor(1, columns, seed=7, device=device)[0].to(dtype) / 4
    y, factor = norm_cuda(x, weight, 1e-5, False)
    return x, Normed(factor, weight), y


MADE = {"gated": gated, "normed": normed}


def faces(x, request, **given):
    inputs = CastInputs(**given)
    return [t for face in cast_on_gpu(x, request, inputs).run(x, inputs) if face is not None for t in face.tensors()]


def check(made, request, *, hint=False):
    x, prologue, matrix = made
    notes = []
    results = []
    for read, of_it in ((x, prologue), (matrix, None)):
        given = state(x.device)
        given |= {"hint": Hint()} if hint else {}
        for _ in range(1 + hint):  # the second one goes by the hint
            results.append(faces(read, request, **given, prologue=of_it))
        notes.append(given["amax_record"])
    half = len(results) // 2
    for mine, expected in zip(results[:half], results[half:], strict=True):
        for got, want in zip(mine, expected, strict=True):
            assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
            assert torch.equal(bits(got), bits(want))
    assert torch.equal(*notes)


@pytest.mark.parametrize(("row", "column", "way", "kind"), in_kinds(WAYS, [*MADE]), ids=str)
def test_the_faces_are_those_of_the_matrix(row, column, way, kind, device):
    kept, source = [(row, None), (row, row), (None, row)][way]
    check(MADE[kind](device), request_of(kept, column.for_columnwise(), source))


@pytest.mark.parametrize(
    ("kind", "dtype", "layout"), covered([*MADE], DTYPES, ["ragged", "rows apart", "no whole vectors", "one row"])
)
def test_layouts(kind, dtype, layout, device):
    shape = {"ragged": (37, 160, 0), "rows apart": (32, 64, 64), "no whole vectors": (32, 64, 3), "one row": (1, 64, 0)}
    rows, columns, apart = shape[layout]
    x, prologue, matrix = MADE[kind](device, rows, columns, dtype, apart)
    if layout == "no whole vectors":  # made first, by torch
        matrix = prologue.matrix(x)
    for cast in (CASTS[0], CASTS[3], CASTS[9]):
        check((x, prologue, matrix), request_of(cast, cast))


@pytest.mark.parametrize("kind", MADE)
def test_a_hint_holds_for_it(kind, device):
    cast = cast_of("fp8_e4m3_tensor", pow2_scale=True)
    check(MADE[kind](device), request_of(cast, cast), hint=True)


@pytest.mark.parametrize("kind", MADE)
def test_nan_and_inf(kind, device):
    for cast in (CASTS[0], CASTS[5], CASTS[9], CASTS[12]):
        x, prologue, _ = MADE[kind](device, 32, 128)
        x[3, 5], x[17, 64] = float("nan"), float("inf")
        if kind == "gated":
            matrix = swiglu_cuda(x, prologue.up)[0]
        else:
            matrix, factor = norm_cuda(x, prologue.weight, 1e-5, False)
            prologue = prologue._replace(factor=factor)
        check((x, prologue, matrix), request_of(cast, cast))


@pytest.mark.parametrize("kind", MADE)
def test_the_definition(kind, device):
    """On a CPU, and where operators are watched: the cast of what ``matrix`` returns, on a GPU also of a kernel."""
    x, prologue, _ = MADE[kind](device)
    request = request_of(CASTS[3], CASTS[3])
    expected = ops.quantize(prologue.matrix(x), request)
    inputs = CastInputs(prologue=prologue)
    for made in (ops.quantize(x, request, inputs), OperatorCast(request).run(x, inputs)):
        for face, want in zip(made, expected, strict=True):
            assert all(map(torch.equal, map(bits, face.tensors()), map(bits, want.tensors())))
