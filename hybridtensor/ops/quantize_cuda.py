"""``ops.quantize`` on a GPU: what is measured first, which kernel runs with which arguments.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.dequantize import dequantize_reference
from hybridtensor.ops.kernel_library import kernels, triton_dtype
from hybridtensor.ops.library import implement
from hybridtensor.ops.quantize import Cast, empty_face, parse, quantize_reference

_NONE, _GIVEN, _TENSOR, _ROW, _BLOCK, _MX, _NVFP4, _NVFP4_ROW = range(8)  # as the kernels name them
_MEASURED = (_TENSOR, _ROW, _NVFP4, _NVFP4_ROW)
_PER_ROW = (_ROW, _NVFP4_ROW)
_FP32_MAX = torch.finfo(torch.float32).max
_TILE = 128
_FLAT_BLOCK, _FLAT_STEPS = 8192, 4


class _Face(NamedTuple):
    """A cast as the kernels see it."""

    kind: int
    side: int = 1
    e5m2: bool = False
    pow2: bool = False
    rotated: bool = False
    slot: int = -1
    stream: int = -1

    @classmethod
    def of(cls, cast: Cast | None) -> _Face:
        """Translate a cast."""
        if cast is None:
            return cls(_NONE)
        fmt = cast.format
        return cls(
            _kind(fmt, cast.slot), fmt.block[0] or 1, fmt.element == torch.float8_e5m2,
            cast.pow2_scale or fmt.pow2_scale, fmt.hadamard, cast.slot, cast.stream,
        )  # fmt: skip


def _kind(fmt: Format, slot: int) -> int:
    if fmt.tensor_block is not None:
        return _NVFP4 if fmt.tensor_block[0] is None else _NVFP4_ROW
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        return _MX
    if fmt.block[1] is not None:
        return _BLOCK
    if slot >= 0:
        return _GIVEN
    return _TENSOR if fmt.block[0] is None else _ROW


def quantize_cuda(
    x: Tensor,
    row: str,
    column: str,
    source: str,
    dtype: torch.dtype,
    factors: Tensor | None,
    amaxes: Tensor | None,
    rounding: Tensor | None,
    first_row: int,
) -> list[Tensor]:
    """Implement ``quantize``."""
    if x.numel() == 0:
        return quantize_reference(x, row, column, source, dtype, factors, amaxes, rounding, first_row)
    row_cast, column_cast, source_cast = parse(row), parse(column), parse(source)
    state = factors, amaxes, rounding, first_row
    rows, columns = x.shape
    row_out = empty_face(x, row_cast, rows, columns)
    column_out = empty_face(x, column_cast, columns, rows)
    first = _Face.of(source_cast or row_cast)
    second = _Face.of(column_cast)
    if source_cast is not None and second.kind in _MEASURED:  # what is measured has to be there first
        held = row_out if row_cast == source_cast else empty_face(x, source_cast, rows, columns)
        _cast(x, first, _Face(_NONE), held, [], False, dtype, state)
        values = dequantize_reference(held[0], held[1], held[2] if len(held) == 3 else None, source_cast.name, dtype)
        _cast(values, _Face(_NONE), second, [], column_out, False, dtype, state)
    else:
        _cast(x, first, second, row_out, column_out, source_cast is not None, dtype, state)
    return row_out + column_out


implement("quantize", quantize_cuda)

State = tuple[Tensor | None, Tensor | None, Tensor | None, int]


def _cast(
    x: Tensor, row: _Face, column: _Face, row_out: list[Tensor], column_out: list[Tensor], from_row: bool,
    dtype: torch.dtype, state: State,
) -> None:  # fmt: skip
    """Measure ``x`` if a face needs it, and cast it into both."""
    triton = kernels("quantize")
    factors, amaxes, rounding, first_row = state
    (m, k), (stride_m, stride_k) = x.shape, x.stride()
    even = m % _TILE == 0 and k % _TILE == 0
    wide = _TILE * max(stride_m, stride_k, m, k) >= 2**31
    shape = {"EVEN": even, "WIDE": wide, "BM": _TILE, "BK": _TILE}
    row_measured, column_measured, measured = _measure(x, row, column, shape)
    row_tensors, row_strides = _arguments(row_out, x)
    column_tensors, column_strides = _arguments(column_out, x)
    bits = 4 if column.kind in (_NVFP4, _NVFP4_ROW) else 8
    grid = (-(-m // _TILE) * -(-k // _TILE),)
    dtype = dtype if from_row else x.dtype
    triton.cast_kernel[grid](
        x, stride_m, stride_k, m, k,
        row_tensors[0], row_tensors[1], *row_strides, row_tensors[2], row_measured, row.slot, row.stream,
        column_tensors[0], column_tensors[1], *column_strides, column_tensors[2], column_measured, column.slot,
        column.stream,
        x if factors is None else factors, x if amaxes is None else amaxes, x if rounding is None else rounding,
        first_row,
        ROW_KIND=row.kind, ROW_SIDE=row.side, ROW_E5M2=row.e5m2, ROW_POW2=row.pow2, ROW_ROTATED=row.rotated,
        ROW_STOCHASTIC=row.stream >= 0, ROW_STORE=bool(row_out),
        COLUMN_KIND=column.kind, COLUMN_SIDE=column.side, COLUMN_E5M2=column.e5m2, COLUMN_POW2=column.pow2,
        COLUMN_ROTATED=column.rotated, COLUMN_STOCHASTIC=column.stream >= 0, COLUMN_PACK=m % (32 // bits) == 0,
        ROW_OVERFLOW=_overflow(row, x.dtype), COLUMN_OVERFLOW=_overflow(column, dtype), NOTE=amaxes is not None,
        FROM_ROW=from_row, DECODED_DTYPE=triton_dtype(dtype), DECODED_MAX=torch.finfo(dtype).max,
        REVERSED=measured, ALIGNED=k % 8 == 0, HW=converts_to_fp8(x.device),
        **shape, R=8, num_warps=4,
    )  # fmt: skip


def _overflow(face: _Face, dtype: torch.dtype) -> float:
    """Return what a factor is where it is beyond fp32."""
    return torch.finfo(dtype).max if face.kind == _BLOCK else _FP32_MAX


def _arguments(out: list[Tensor], x: Tensor) -> tuple[list[Tensor], tuple[int, int]]:
    """Return codes, scales and levels as the kernel takes them, with the scales' strides; ``x`` stands for nothing."""
    if not out:
        return [x, x, x], (0, 0)
    codes, scales = (t if t.dtype == torch.float32 else t.view(torch.uint8) for t in out[:2])
    return [codes, scales, out[2] if len(out) == 3 else x], (scales.stride(0), scales.stride(1))


def _measure(x: Tensor, row: _Face, column: _Face, shape: dict[str, Any]) -> tuple[Tensor, Tensor, bool]:
    """Return the amaxes that each face needs, and whether there are any."""
    faces = row, column
    if not any(face.kind in _MEASURED for face in faces):
        return x, x, False
    (m, k), (stride_m, stride_k) = x.shape, x.stride()
    sizes = [extent if face.kind in _PER_ROW else 1 for face, extent in zip(faces, x.shape, strict=True)]
    shared = all(f.kind in _MEASURED and f.kind not in _PER_ROW and not f.rotated for f in faces)
    buffer = torch.zeros(sizes[0] + sizes[1], dtype=torch.float32, device=x.device)
    targets = buffer[: sizes[0]], buffer[: sizes[0]] if shared else buffer[sizes[0] :]
    wanted = [face.kind in _MEASURED for face in faces]
    wanted[1] = wanted[1] and not shared
    plain = [w and face.kind not in _PER_ROW and not face.rotated for w, face in zip(wanted, faces, strict=True)]
    triton = kernels("quantize")
    if x.is_contiguous() and sum(wanted) == sum(plain) == 1:
        target = targets[plain.index(True)]
        step = _FLAT_BLOCK * _FLAT_STEPS
        triton.measure_flat_kernel[(-(-m * k // step),)](
            x, target, m * k, BLOCK=_FLAT_BLOCK, STEPS=_FLAT_STEPS, num_warps=8
        )
    else:
        triton.measure_kernel[(-(-m // _TILE) * -(-k // _TILE),)](
            x, stride_m, stride_k, m, k, *targets,
            ROW=wanted[0], ROW_PER_ROW=row.kind in _PER_ROW, ROW_ROTATED=row.rotated,
            COLUMN=wanted[1], COLUMN_PER_ROW=column.kind in _PER_ROW, COLUMN_ROTATED=column.rotated,
            **shape, R=8, num_warps=4,
        )  # fmt: skip
    return *targets, True


def converts_to_fp8(device: torch.device) -> bool:
    """Whether the device rounds to FP8 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
