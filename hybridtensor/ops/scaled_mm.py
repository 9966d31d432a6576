"""Multiply two faces: natively where the device has the formats, else by exact emulation.

Shape letters: ``M`` rows of the left operand, ``N`` columns of the right one, ``K`` contraction.
Both operands come as ``[other, K]`` matrices, so the product is ``left @ right.T``.
"""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.finish import finish
from hybridtensor.ops.library import define, runs_directly
from hybridtensor.ops.native_mm import native_kind
from hybridtensor.ops.operand import Held, Operand

_PARTIAL_SUM = 128  # block length of the formats whose scales multiply partial sums


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


@functools.lru_cache(maxsize=1024)
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
        return Backend("emulated", f"no matrix units for these formats on {device.type}")
    kind = native_kind(left, right)
    if kind is None:
        return Backend("emulated", f"no hardware product of {left} and {right}")
    capability = torch.cuda.get_device_capability(device)
    if not kind.first <= capability < kind.end:
        return Backend("emulated", f"{kind.name} needs compute capability {kind.first}, got {capability}")
    if kind.bf16_only and out_dtype != torch.bfloat16:
        return Backend("emulated", f"{kind.name} gives bfloat16 only, got {out_dtype}")
    return Backend("native", kind.name)


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
    a = Operand(left, left_scale, left_tensor_scale, get_format(left_format))
    b = Operand(right, right_scale, right_tensor_scale, get_format(right_format))
    return _multiply(a, b, bias, out_dtype, fast_accum)


def _multiply(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Return the product, by whichever backend."""
    left, right = a.data, b.data
    with _no_autocast(left.device):
        if 0 in (left.shape[0], left.shape[1], right.shape[0]):
            zeros = torch.zeros(left.shape[0], right.shape[0], dtype=out_dtype, device=left.device)
            return zeros if bias is None else zeros + bias.to(out_dtype)
        kind = native_kind(a.format, b.format)
        if kind is not None and select_backend(a.format, b.format, out_dtype, left.device).name == "native":
            return kind.multiply(a, b, bias, out_dtype, fast_accum).contiguous()  # where it was padded
        return _emulated(a, b, bias, out_dtype)


def _emulated(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply values that BF16 holds exactly, into an fp32 accumulator; then scale and round once.

    Block scales that are powers of two, or E4M3 over E2M1 elements, go into the values. FP32 block scales would not
    fit: they multiply the partial sum of their block. Everything coarser multiplies the whole sum.
    """
    high_precision = [o.data.dtype for o in (a, b) if o.format.is_identity]
    dtype = high_precision[0] if high_precision else torch.bfloat16
    if a.data.device.type != "cuda":
        dtype = torch.float32  # the only CPU product with an fp32 result
    left, right = a.values(dtype), b.values(dtype)
    if out_dtype == dtype == torch.bfloat16 and bias is None and not (a.scales_sum or b.scales_sum):
        return torch.mm(left, right.t())
    if a.scales_partial_sums or b.scales_partial_sums:
        out = _sum_of_blocks(a, b, left, right)
    else:
        out = _mm_float32(left, right.t())
    right_factor = b.factor()
    return finish(out, a.factor(), None if right_factor is None else right_factor.t(), bias, out_dtype)


def _sum_of_blocks(a: Operand, b: Operand, left: Tensor, right: Tensor) -> Tensor:
    """Return the sum of the blocks' partial products, each times its fp32 scales."""
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float32, device=left.device)
    for start in range(0, left.shape[1], _PARTIAL_SUM):
        stop = min(start + _PARTIAL_SUM, left.shape[1])
        part = _mm_float32(left[:, start:stop], right[:, start:stop].t())
        factor = _outer(a.block_factor(start, stop), b.block_factor(start, stop))
        total += part if factor is None else part * factor
    return total


def _outer(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the factor of each element of the product; multiplied first: one may be huge, the other tiny.

    Saturates: beyond fp32 it would make NaN of a sum that is zero.
    """
    if left is None or right is None:
        return left if right is None else right.t()
    return (left * right.t()).clamp(max=torch.finfo(torch.float32).max)


def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return the fp32 product of two matrices of one dtype."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


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
    left: Operand,
    right: Operand,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Return ``left @ right.T + bias`` of two faces, ``[M, N]``.

    Element values are multiplied exactly and summed in fp32; scales that do not vary along K multiply the sum, the
    bias is added, and the result is rounded once (natively per tensor with an fp16 or fp32 result: the bias is added
    after rounding). Zero-size operands give zeros.

    Args:
        left: A rowwise face ``[M, K]``.
        right: A columnwise face, stored ``[N, K]``.
        bias: ``[N]``, added to every row.
        out_dtype: Dtype of the result.
        fast_accum: Let the hardware accumulate with fewer bits (Hopper, per tensor and per row); no effect elsewhere.

    Raises:
        ValueError: If K differs, the devices differ, or the formats' product is not defined.
    """
    a, b = left.data, right.data
    check_multipliable(left.format, right.format)
    if left.contraction != right.contraction:
        raise ValueError(
            f"scaled_mm: the contraction sizes must match, got {left.contraction} ({left.format}) and "
            f"{right.contraction} ({right.format})"
        )
    if a.device != b.device or (bias is not None and bias.device != a.device):
        devices = [str(t.device) for t in (a, b, bias) if t is not None]
        raise ValueError(f"scaled_mm: operands on one device are required, got {', '.join(devices)}; move them")
    if runs_directly(a):
        return _multiply(left, right, bias, out_dtype, fast_accum)
    operands = (*left[:3], left.format.name, *right[:3], right.format.name)
    out: Tensor = _OP(*operands, bias, out_dtype, fast_accum)
    return out


def product(
    left: Operand | Held,
    right: Operand | Held,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Return ``left @ right.T + bias``: the plain product of plain values, ``scaled_mm`` of anything else."""
    a = left.values() if isinstance(left, Held) else left
    b = right.values() if isinstance(right, Held) else right
    if a.scale is None and b.scale is None:
        columns = b.data.t()
        return torch.mm(a.data, columns) if bias is None else torch.addmm(bias, a.data, columns)
    return scaled_mm(a, b, bias=bias, out_dtype=out_dtype, fast_accum=fast_accum)
