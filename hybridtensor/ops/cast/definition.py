"""Casting by the definition: on a CPU, of matrices without elements, and of formats that have no kernels.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor.formats import Format
from hybridtensor.ops.cast.prepared import Faces, PreparedCast
from hybridtensor.ops.cast.request import Cast, CastInputs, CastRequest, check_rules
from hybridtensor.ops.dequantize import dequantize_reference, multipliable_values
from hybridtensor.ops.emulated_mm import sum_factors
from hybridtensor.ops.face import Face
from hybridtensor.ops.references import eden, float8, mx, nvfp4
from hybridtensor.ops.references.blocks import block_amax


def tensors_of(faces: Faces) -> list[Tensor]:
    """Return the tensors of the rowwise face, then those of the columnwise one."""
    return [tensor for face in faces if face is not None for tensor in face.tensors()]


class ReferenceCast(PreparedCast):
    """Cast by the definition, face by face."""

    def __init__(self, request: CastRequest) -> None:
        check_rules(request)
        for cast in request[:3]:
            if cast is not None:
                _require_definition(cast.format.base)
        self.request = request
        row, column = (None if cast is None else cast.for_qdata() for cast in request[:2])
        self._as_qdata = request._replace(row=row, column=column)

    def run(self, x: Tensor, inputs: CastInputs) -> Faces:
        if inputs.prologue is not None:
            x = inputs.prologue.matrix(x)
        (row, column), as_qdata = self.request[:2], self._as_qdata
        of_row = of_column = None
        if as_qdata.row is not None:
            of_row = _face(x, as_qdata.row, inputs, transposed=False)
        if as_qdata.column is not None:
            of_column = _columnwise(x, of_row, as_qdata, as_qdata.column, inputs)
        if row is not None and of_row is not None and row is not as_qdata.row:
            of_row = _values(of_row, row.format)
        if column is not None and of_column is not None and column is not as_qdata.column:
            of_column = _values(of_column, column.format)
        return of_row, of_column

    def run_into(self, x: Tensor, out: list[Tensor], inputs: CastInputs) -> None:
        for target, made in zip(out, tensors_of(self.run(x, inputs)), strict=True):
            target.copy_(made)
        increment_version(out)  # below a tensor's dispatch autograd does not see the copies

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        row, column = (_amax_block(cast) for cast in self.request[:2])
        return block_amax(x, row).view(-1), block_amax(x.t(), column).view(-1)

    def measure_into(self, x: Tensor, out: Tensor) -> None:
        of_row, of_column = self.measure(x)
        out.copy_(of_row if self.request.column is None else of_column)


def _amax_block(cast: Cast | None) -> tuple[int | None, None]:
    """Return the block of one amax: a row, or everything."""
    return (1 if cast is not None and cast.amax_per == "row" else None, None)


reference_cast = functools.lru_cache(maxsize=1024)(ReferenceCast)


def _values(face: Face, fmt: Format) -> Face:
    (values,), (factor,) = multipliable_values((face,), torch.bfloat16), sum_factors((face,))
    return Face(values, factor, None, fmt)


def _columnwise(
    x: Tensor, row: Face | None, request: CastRequest, cast: Cast, inputs: CastInputs
) -> Face:
    """Return the columnwise face.

    Args:
        x: The matrix.
        row: Its rowwise face, if that is known.
        request: What is asked for, as elements and scales.
        cast: How the face is made.
        inputs: The tensors that the request needs.
    """
    source, fmt = request.source, cast.format
    missing = -x.shape[0] % fmt.step
    if missing:  # zeros: they raise no amax, and are counted on in the draws
        x, inputs = _with_zero_rows(x, request, inputs, missing)
        row = None
    if source is not None:
        rowwise = row if row is not None else _face(x, source, inputs, transposed=False)
        if rowwise.scale is None:
            raise ValueError(
                f"quantize: a quantized rowwise face is required as source, got {source}"
            )
        values = dequantize_reference(
            rowwise.qdata,
            rowwise.scale,
            rowwise.tensor_scale,
            source.format.name,
            request.dtype or x.dtype,
        )
        return _face(values.t(), cast, inputs, transposed=True)
    alike = request.row == cast and inputs.row_amax is inputs.column_amax
    if row is not None and alike and fmt.is_square and fmt.elements_per_byte == 1:
        # one face is the transpose of the other: bytes are transposed, not values quantized
        qdata = row.qdata.t().clone(memory_format=torch.contiguous_format)
        scale = row.scale
        if scale is not None:
            scale = scale.t().clone(memory_format=torch.contiguous_format)
        return Face(qdata, scale, None, fmt)
    return _face(x.t(), cast, inputs, transposed=True)


def _with_zero_rows(
    x: Tensor, request: CastRequest, inputs: CastInputs, count: int
) -> tuple[Tensor, CastInputs]:
    """Return the matrix with ``count`` rows of zeros below, and what is known of its rows."""
    source, amax = request.source, inputs.row_amax
    if source is not None and source.amax_per == "row" and amax is not None:
        inputs = inputs._replace(row_amax=F.pad(amax, (0, count)))
    return F.pad(x, (0, 0, 0, count)), inputs


def _require_definition(fmt: Format) -> None:
    """Raise ValueError unless a module of ``references`` defines a format's elements and scales."""
    packed = fmt.element == torch.float4_e2m1fn_x2 and fmt.elements_per_byte == 2
    fp8 = fmt.element in (torch.float8_e4m3fn, torch.float8_e5m2) and fmt.elements_per_byte == 1
    if fmt.tensor_block is not None:
        is_known = packed and fmt.scale_dtype == torch.float8_e4m3fn and fmt.tensor_block[1] is None
    elif fmt.scale_dtype == torch.float8_e8m0fnu:
        is_known = (packed or fp8) and fmt.pow2_scale
    else:
        is_known = fp8 and fmt.scale_dtype == torch.float32 and not fmt.hadamard
    if not is_known:
        raise ValueError(
            f"quantize: no definition casts to {fmt} (elements {fmt.element}, {fmt.elements_per_byte} per byte, scales "
            f"{fmt.scale_dtype}, pow2_scale={fmt.pow2_scale}, tensor_block={fmt.tensor_block}, "
            f"hadamard={fmt.hadamard}); change the record, or add a definition to ops/references"
        )


def _face(matrix: Tensor, cast: Cast, inputs: CastInputs, *, transposed: bool) -> Face:
    """Return an ``[other, contraction]`` face, with its scales where ``face_layouts`` puts them."""
    fmt, tensor_scale = cast.format, None
    given = inputs.column_amax if transposed else inputs.row_amax
    amax = None if given is None else given[:, None].float()
    if amax is not None and amax.shape[0] > 1 and cast.amax_per != "row":  # of the matrix's rows
        amax = amax.amax(dim=0, keepdim=True)
    rounding = inputs.rounding if cast.stream >= 0 else None
    draws = nvfp4.Draws(rounding, cast.stream, inputs.first_row, transposed)
    if fmt.drawn_signs:
        qdata, scale, tensor_scale = eden.quantize(matrix, fmt, draws, amax)
    elif fmt.tensor_block is not None:
        qdata, scale, tensor_scale = nvfp4.quantize(matrix, fmt, draws, amax, cast.rule)
    elif fmt.scale_dtype == torch.float8_e8m0fnu:
        qdata, scale = mx.quantize(matrix, fmt, draws, cast.rule)
    elif cast.slot < 0:
        qdata, scale = float8.quantize(matrix, fmt, cast.pow2_scale, amax)
    elif inputs.encode_scale is not None:
        qdata, scale = float8.cast(matrix, fmt, inputs.encode_scale, inputs.record, cast.slot)
    else:
        raise ValueError(
            f"quantize: delayed scales are required for {cast}, got none; pass encode_scale"
        )
    if fmt.block[0] == 1 and fmt.block[1] is not None:
        scale = scale.t().clone(memory_format=torch.contiguous_format).t()
    return Face(qdata, scale, tensor_scale, fmt)
