"""Multiply two faces: natively where the device has the formats, else by exact emulation.

Shape letters: ``M`` rows of the left operand, ``N`` columns of the right one, ``K`` contraction.
Both operands come as ``[other, K]`` matrices, so the product is ``left @ right.T``.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.dequantize import expand_scale
from hybridtensor.ops.library import define

_PER_TENSOR = (None, None)
_PER_ROW = (1, None)
_NATIVE_ALIGNMENT = 16  # cuBLASLt: leading dimensions in multiples of 16 bytes


class Backend(NamedTuple):
    """How a GEMM runs: ``name`` is ``high precision``, ``native`` or ``emulated``; ``reason`` says why."""

    name: str
    reason: str


def check_multipliable(left: Format, right: Format) -> None:
    """Raise ValueError unless the product of faces in these formats is defined."""
    if left.hadamard != right.hadamard:
        raise ValueError(
            f"both operands need the same Hadamard basis, got {left} and {right}; give both the rotation or neither"
        )


def select_backend(left: Format, right: Format, out_dtype: torch.dtype, device: torch.device) -> Backend:
    """Decide how ``left @ right.T`` runs on ``device``. The one place where that is decided.

    Args:
        left: Format of the left operand's face.
        right: Format of the right operand's face.
        out_dtype: Dtype of the product.
        device: Where the operands are.
    """
    check_multipliable(left, right)
    if left.is_identity and right.is_identity:
        return Backend("high precision", "both operands are in high precision")
    if left.is_identity or right.is_identity:
        return Backend("emulated", "one operand is in high precision")
    if device.type != "cuda" or torch.version.hip is not None:
        return Backend("emulated", f"no FP8 matrix units on {device.type}")
    if left.block != right.block or left.block not in (_PER_TENSOR, _PER_ROW):
        return Backend("emulated", f"no hardware product of {left} and {right}")
    if left.element == right.element == torch.float8_e5m2:
        return Backend("emulated", "no hardware product of two E5M2 operands")
    capability = torch.cuda.get_device_capability(device)
    needed = (8, 9) if left.block == _PER_TENSOR else (9, 0)
    if capability < needed:
        return Backend("emulated", f"compute capability {needed} is required, got {capability}")
    if left.block == _PER_ROW and out_dtype != torch.bfloat16:
        return Backend("emulated", f"the per-row product is bfloat16 only, got {out_dtype}")
    return Backend("native", "torch._scaled_mm")


def scaled_mm_reference(
    left: Tensor,
    left_scale: Tensor | None,
    left_tensor_scale: Tensor | None,
    left_format: str,
    right: Tensor,
    right_scale: Tensor | None,
    right_tensor_scale: Tensor | None,
    right_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Define ``scaled_mm``: emulate unless the device multiplies the formats itself."""
    a = _Operand(left, left_scale, left_tensor_scale, get_format(left_format))
    b = _Operand(right, right_scale, right_tensor_scale, get_format(right_format))
    with _no_autocast(left.device):
        if 0 in (left.shape[0], left.shape[1], right.shape[0]):
            zeros = torch.zeros(left.shape[0], right.shape[0], dtype=out_dtype, device=left.device)
            return zeros if bias is None else zeros + bias.to(out_dtype)
        if select_backend(a.format, b.format, out_dtype, left.device).name == "native":
            return _native(a, b, bias, out_dtype, fast_accum)
        return _emulated(a, b, bias, out_dtype)


class _Operand(NamedTuple):
    data: Tensor  # [other, K]
    scale: Tensor | None
    tensor_scale: Tensor | None
    format: Format

    def codes(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return values in ``dtype`` and the factors, ``[other, 1]`` or ``[1, 1]``, left for the accumulator."""
        if self.scale is None:
            return self.data.to(dtype), None
        values, factor = self.data.to(dtype), self.scale
        if self.format.block[1] is not None:  # scales vary along K: they go into the values
            values = values * expand_scale(self.scale, self.format, self.data.shape).to(dtype)
            factor = torch.ones(1, 1, dtype=torch.float32, device=self.data.device)
        return values, factor if self.tensor_scale is None else factor * self.tensor_scale


def _emulated(a: _Operand, b: _Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply the element values, which BF16 holds exactly, into an fp32 accumulator; then scale and round once."""
    high_precision = [o.data.dtype for o in (a, b) if o.format.is_identity]
    dtype = high_precision[0] if high_precision else torch.bfloat16
    if a.data.device.type != "cuda":
        dtype = torch.float32  # the only CPU product with an fp32 result
    left, left_factor = a.codes(dtype)
    right, right_factor = b.codes(dtype)
    out = _mm_float32(left, right.t())
    if left_factor is not None and right_factor is not None:
        out *= left_factor * right_factor.t()  # multiplied together first: one may be huge, the other tiny
    elif left_factor is not None:
        out *= left_factor
    elif right_factor is not None:
        out *= right_factor.t()
    if bias is not None:
        out += bias
    return out.to(out_dtype)


def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return the fp32 product of two matrices of one dtype."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


def _native(a: _Operand, b: _Operand, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Call ``torch._scaled_mm``, padding K and N with zeros to what cuBLASLt needs: zeros add nothing."""
    if a.scale is None or b.scale is None:
        raise ValueError("scaled_mm: two quantized operands are required for the native product")
    columns = b.data.shape[0]
    pad_k = -a.data.shape[1] % _NATIVE_ALIGNMENT
    pad_n = -columns % _NATIVE_ALIGNMENT
    per_row = b.scale.shape[0] == columns and b.format.block == _PER_ROW
    fused_bias = bias if out_dtype == torch.bfloat16 and not pad_n else None
    out = torch._scaled_mm(
        _pad(a.data, 0, pad_k),
        _pad(b.data, pad_n, pad_k).t(),
        a.scale,
        (F.pad(b.scale, (0, 0, 0, pad_n), value=1.0) if per_row and pad_n else b.scale).t(),
        bias=fused_bias,
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
    )
    out = out[:, :columns] if pad_n else out
    return out if bias is None or fused_bias is not None else out + bias.to(out_dtype)


def _pad(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Return contiguous codes with zero codes appended.

    A single row counts as contiguous whatever its stride, but cuBLASLt reads that stride as the leading dimension.
    """
    if not rows and not columns:
        return codes.contiguous().as_strided(codes.shape, (codes.shape[1], 1))
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _fake(
    left: Tensor,
    left_scale: Tensor | None,
    left_tensor_scale: Tensor | None,
    left_format: str,
    right: Tensor,
    right_scale: Tensor | None,
    right_tensor_scale: Tensor | None,
    right_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=out_dtype)


_OP = define(
    "scaled_mm(Tensor left, Tensor? left_scale, Tensor? left_tensor_scale, str left_format, "
    "Tensor right, Tensor? right_scale, Tensor? right_tensor_scale, str right_format, "
    "Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=scaled_mm_reference,
    fake=_fake,
)


def scaled_mm(
    left: tuple[Tensor, Tensor | None, Tensor | None, Format],
    right: tuple[Tensor, Tensor | None, Tensor | None, Format],
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Return ``left @ right.T + bias`` of two faces, ``[M, N]``.

    Element values are multiplied exactly and summed in fp32; per-tensor and per-row scales multiply the sum, the
    bias is added, and the result is rounded once (natively with an fp16 or fp32 result: the bias is added after
    rounding). Zero-size operands give zeros.

    Args:
        left: ``(data [M, K], scale, tensor_scale, format)`` of a rowwise face; scales ``None`` for the identity.
        right: The same of a columnwise face, stored ``[N, K]``.
        bias: ``[N]``, added to every row.
        out_dtype: Dtype of the result.
        fast_accum: Let the hardware accumulate with fewer bits (Hopper); no effect elsewhere.

    Raises:
        ValueError: If K differs, the devices differ, or the formats' product is not defined.
    """
    a, b = left[0], right[0]
    check_multipliable(left[3], right[3])
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"scaled_mm: the contraction sizes must match, got {tuple(a.shape)} times {tuple(b.shape)} transposed"
        )
    if a.device != b.device or (bias is not None and bias.device != a.device):
        devices = [str(t.device) for t in (a, b, bias) if t is not None]
        raise ValueError(f"scaled_mm: operands on one device are required, got {', '.join(devices)}; move them")
    out: Tensor = _OP(*left[:3], left[3].name, *right[:3], right[3].name, bias, out_dtype, fast_accum)
    return out
