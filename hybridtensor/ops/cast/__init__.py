"""Casting a matrix into one or both faces: one request for every format and every pair, one launch where it can be.

Shape letters: ``M`` rows, ``K`` columns, ``S`` delayed scales of a layer.
"""

from __future__ import annotations

from torch import Tensor

from hybridtensor.ops.cast.definition import reference_cast
from hybridtensor.ops.cast.kernel import cast_on_gpu
from hybridtensor.ops.cast.multi_tensor import PreparedList, measure_all, quantize_all
from hybridtensor.ops.cast.operator import OperatorCast
from hybridtensor.ops.cast.prepared import Faces, PreparedCast, can_hold
from hybridtensor.ops.cast.request import (
    NO_INPUTS,
    Cast,
    CastInputs,
    CastRequest,
    Hint,
    check_inputs,
)
from hybridtensor.ops.library import is_traced, runs_directly

__all__ = [
    "NO_INPUTS",
    "Cast",
    "CastInputs",
    "CastRequest",
    "Faces",
    "Hint",
    "PreparedCast",
    "PreparedList",
    "can_hold",
    "measure_all",
    "prepare",
    "quantize",
    "quantize_all",
    "quantize_into",
]


def prepare(
    x: Tensor,
    request: CastRequest,
    inputs: CastInputs = NO_INPUTS,
    *,
    direct: bool | None = None,
) -> PreparedCast:
    """Return the cast for matrices with the layout of ``x``, and inputs of the kinds of ``inputs``.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32, any strides, may be empty; K is whole blocks of formats that need them. M is
            any: the columnwise face then is that of ``x`` with rows of zeros below, up to whole blocks.
        request: The faces to make, and their casts.
        inputs: What ``run`` will be given, or tensors of the same dtypes and alignment.
        direct: ``runs_directly(x)``, if it is known.

    Raises:
        ValueError: If amaxes are given for a format that does not measure, or of another shape, or
            a delayed scale is asked for and none is given.
    """
    if not (runs_directly(x) if direct is None else direct):
        check_inputs(x, request, inputs)
        return OperatorCast(request)
    if x.is_cuda and x.numel():
        return cast_on_gpu(x, request, inputs)
    if inputs is not NO_INPUTS or request.source is not None:
        check_inputs(x, request, inputs)
    return reference_cast(request)


def quantize(x: Tensor, request: CastRequest, inputs: CastInputs = NO_INPUTS) -> Faces:
    """Return the rowwise and the columnwise face of ``x``, made in one pass where the device has a kernel.

    The elements and scales of each format are those of ``docs/numerics.md``; ``ops.references`` defines them.

    Args:
        x: As for ``prepare``.
        request: The faces to make, and their casts.
        inputs: The tensors that the request needs beside ``x``.

    Raises:
        ValueError: As ``prepare``.
    """
    return prepare(x, request, inputs).run(x, inputs)


def quantize_into(
    x: Tensor, out: list[Tensor], request: CastRequest, inputs: CastInputs = NO_INPUTS
) -> None:
    """Write the faces of ``x`` into existing tensors: those of the rowwise face, then those of the columnwise one.

    Args:
        x: As for ``prepare``.
        out: Tensors like those of the faces that ``quantize`` returns.
        request: The faces to make, and their casts.
        inputs: The tensors that the request needs beside ``x``.

    Raises:
        ValueError: As ``prepare``; and if a tensor of ``out`` is not as ``quantize`` makes it: of
            other shape, strides, dtype or device, at an address that is no multiple of 16, or in
            memory that another one or ``x`` has, too. Nothing is written then.
    """
    if not is_traced() and not can_hold(out, x, request):
        got = ", ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()} on {t.device}" for t in out)
        raise ValueError(
            f"quantize_into: plain tensors of their own memory, as quantize makes them of {tuple(x.shape)} on "
            f"{x.device} for {request}, are required, got {got}; copy what quantize returns"
        )
    prepare(x, request, inputs).run_into(x, out, inputs)
