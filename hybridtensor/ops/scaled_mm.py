"""Multiply two faces: natively where the device has the formats, else by exact emulation.

Shape letters: ``M`` rows of the left operand, ``N`` columns of the right one, ``K`` contraction.
Both operands come as ``[other, K]`` matrices, so the product is ``left @ right.T``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import REGISTRY, Format, format_of_face
from hybridtensor.ops.cache import Cache
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.emulated_mm import multiply_emulated
from hybridtensor.ops.face import Face, FaceKind, high_precision
from hybridtensor.ops.flops import count_as_product
from hybridtensor.ops.groups import matrix_of
from hybridtensor.ops.library import define, is_traced, runs_directly
from hybridtensor.ops.native_mm import Multiply, NativeKind, native_kind
from hybridtensor.ops.reencoding import reencodes


class Backend(NamedTuple):
    """How a GEMM runs: ``name`` is ``high precision``, ``native`` or ``emulated``; ``reason`` says why."""

    name: str
    reason: str


def check_multipliable(left: Format, right: Format) -> None:
    """Raise ValueError unless the product of two formats is defined."""
    if _basis(left) != _basis(right):
        raise ValueError(
            f"both operands need the same Hadamard basis, got {left} and {right}; give both the rotation or neither"
        )


def _basis(fmt: Format) -> tuple[bool, bool]:
    """Return the rotation that both operands must share."""
    return fmt.hadamard, fmt.drawn_signs


@functools.lru_cache(maxsize=1024)
def select_backend(
    left: Format, right: Format, out_dtype: torch.dtype, device: torch.device
) -> Backend:
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
    for fmt in (left, right):
        if not fmt.has_kernels:
            return Backend("emulated", f"{fmt} has no kernels: its definition casts and reads it")
    kind = native_kind(left, right)
    if kind is None:
        return Backend("emulated", f"no hardware product of {left} and {right}")
    capability = torch.cuda.get_device_capability(device)
    if not kind.first <= capability < kind.end:
        return Backend(
            "emulated", f"{kind.name} needs compute capability {kind.first}, got {capability}"
        )
    if kind.bf16_only and out_dtype != torch.bfloat16:
        return Backend("emulated", f"{kind.name} gives bfloat16 only, got {out_dtype}")
    return Backend("native", kind.name)


@functools.lru_cache(maxsize=1024)
def multiplies_values(fmt: Format, device: torch.device) -> bool:
    """Return whether products use a format's bf16 ``values`` because the device cannot multiply its elements.

    Products that re-encode the right operand do not count: whose weight it is asks ``reencodes``.
    """
    # Casting into values saves writing and reading elements: with 8192 tokens mxfp8 is at 0.967x of BF16 instead of
    # 0.898x, nvfp4 at 0.815x instead of 0.763x.
    if fmt.values is None:
        return False
    alike = (other for other in list(REGISTRY.values()) if _basis(other) == _basis(fmt))
    pairs = ((left, right) for other in alike for left, right in ((fmt, other), (other, fmt)))
    return all(
        select_backend(*pair, torch.bfloat16, device).name != "native" or reencodes(*pair)
        for pair in pairs
    )


def _on_any_device(
    left: list[Tensor],
    left_format: str,
    right: list[Tensor],
    right_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    a = Face.of(left, FaceKind(format_of_face(left_format)))
    b = Face.of(right, FaceKind(format_of_face(right_format)))
    return cached_multiply(a, b, bias, out_dtype)(a, b, bias, out_dtype, fast_accum)


@functools.lru_cache(maxsize=1024)
def _native(
    left: Format, right: Format, out_dtype: torch.dtype, device: torch.device
) -> NativeKind | None:
    """Return the native product of two formats on ``device``, or None."""
    if select_backend(left, right, out_dtype, device).name != "native":
        return None
    return native_kind(left, right)


def _is_known_to_compilers(left: Face, right: Face, out_dtype: torch.dtype) -> bool:
    """Return whether a graph may have torch's own operator: static sizes, so that padding adds no guard."""
    # torch's pass that overlaps gathers and products (_micro_pipeline_tp) finds only torch's own operator.
    kind = _native(left.format, right.format, out_dtype, left.qdata.device)
    sizes = (*left.qdata.shape, *right.qdata.shape)
    return kind is not None and kind.in_graphs and all(type(size) is int for size in sizes)


def _fake(
    left: list[Tensor],
    left_format: str,
    right: list[Tensor],
    right_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return left[0].new_empty((left[0].shape[0], right[0].shape[0]), dtype=out_dtype)


_OP = define(
    "scaled_mm(Tensor[] left, str left_format, Tensor[] right, str right_format, Tensor? bias, "
    "ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=_on_any_device,
    fake=_fake,
)
count_as_product(_OP.overloadpacket)


def scaled_mm(
    left: Face,
    right: Face,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Return ``left @ right.T + bias`` of two faces, ``[M, N]``.

    Element values are multiplied exactly and summed in fp32; scales that do not vary along K multiply the sum, the bias
    is added, and the result is rounded once (natively per tensor with an fp16 or fp32 result: the bias is added after
    rounding). Zero-size operands give zeros. Of two formats one may store more zeros at the end of K than the other;
    see ``Format.stored``. Of two faces that are rotated under signs that were drawn, NaN unless these are the same.

    Args:
        left: A rowwise face ``[M, K]``.
        right: A columnwise face, stored ``[N, K]``.
        bias: ``[N]``, added to every row.
        out_dtype: Dtype of the result.
        fast_accum: Let the hardware accumulate with fewer bits (Hopper, per tensor and per row); no effect elsewhere.

    Raises:
        ValueError: If K differs, the devices differ, or the formats' product is not defined.
    """
    if runs_directly(left.qdata):
        return cached_multiply(left, right, bias, out_dtype)(
            left, right, bias, out_dtype, fast_accum
        )
    _check_operands(left, right, bias)
    if is_traced() and _is_known_to_compilers(left, right, out_dtype):
        return _choose(left, right, bias, out_dtype)(left, right, bias, out_dtype, fast_accum)
    operands = left.tensors(), left.format.name, right.tensors(), right.format.name
    return _OP(*operands, bias, out_dtype, fast_accum)


_MULTIPLY: Cache[tuple[object, ...], Multiply] = Cache()


def cached_multiply(
    left: Face, right: Face, bias: Tensor | None, out_dtype: torch.dtype
) -> Multiply:
    """Return the cached function that multiplies operands of this kind, checked when it is chosen."""
    a, b = left.qdata, right.qdata
    key = (
        left.format,
        right.format,
        left.dequantized_rowwise,
        right.dequantized_rowwise,
        a.shape,
        b.shape,
        a.device,
        b.device,
        None if bias is None else bias.device,
        out_dtype,
    )
    multiply = _MULTIPLY.get(key)
    if multiply is None:
        multiply = _MULTIPLY[key] = _choose(left, right, bias, out_dtype)
    return multiply


def _choose(left: Face, right: Face, bias: Tensor | None, out_dtype: torch.dtype) -> Multiply:
    """Choose the function that multiplies operands of this kind."""
    if not (left.dequantized_rowwise is right.dequantized_rowwise is None):
        return matrix_product
    if left.format.is_identity and right.format.is_identity:
        return _multiply_plain
    _check_operands(left, right, bias)
    if 0 in (*left.qdata.shape, *right.qdata.shape):
        return _multiply_empty
    kind = _native(left.format, right.format, out_dtype, left.qdata.device)
    return multiply_emulated if kind is None else kind.multiply


def _check_operands(left: Face, right: Face, bias: Tensor | None) -> None:
    """Raise ValueError for operands that cannot be multiplied."""
    a, b = left.qdata, right.qdata
    if left.format is not right.format:
        check_multipliable(left.format, right.format)
    contraction, other = (
        a.shape[1] * left.format.elements_per_byte,
        b.shape[1] * right.format.elements_per_byte,
    )
    step, other_step = left.format.step, right.format.step
    if (
        contraction != other
        if step == other_step
        else not _can_be_as_many(contraction, step, other, other_step)
    ):
        raise ValueError(
            f"scaled_mm: one contraction size is required, got {contraction} ({left.format}) and "
            f"{other} ({right.format})"
        )
    if a.device != b.device or (bias is not None and bias.device != a.device):
        devices = [str(t.device) for t in (a, b, bias) if t is not None]
        raise ValueError(
            f"scaled_mm: operands on one device are required, got {', '.join(devices)}; move them"
        )


def _can_be_as_many(left: int, left_step: int, right: int, right_step: int) -> bool:
    """Return whether one contraction can be stored as ``left`` and ``right`` entries; comparisons add no graph
    guards."""
    # Both comparisons are true for all valid sizes, so that guards on them never cause another graph.
    return left < right + left_step and right < left + right_step


def matrix_product(
    left: Face, right: Face, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Return ``left @ right.T + bias``: a plain product in high precision, otherwise ``scaled_mm``."""
    # A dequantized rowwise face is materialized here, for this product only.
    a = left if left.dequantized_rowwise is None else _dequantized(left)
    b = right if right.dequantized_rowwise is None else _dequantized(right)
    if a.format.is_identity and b.format.is_identity:
        return _multiply_plain(a, b, bias, out_dtype, fast_accum)
    return scaled_mm(a, b, bias=bias, out_dtype=out_dtype, fast_accum=fast_accum)


def _multiply_plain(
    left: Face, right: Face, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    columns = right.qdata.t()
    return torch.mm(left.qdata, columns) if bias is None else torch.addmm(bias, left.qdata, columns)


def _multiply_empty(
    left: Face, right: Face, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    a, b = left.qdata, right.qdata
    zeros = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    return zeros if bias is None else zeros + bias.to(out_dtype)


def _dequantized(face: Face) -> Face:
    """Dequantize a columnwise face stored as the rowwise one."""
    return high_precision(rowwise_values(face, face.dequantized_rowwise or face.qdata.dtype).t())


def rowwise_values(face: Face, dtype: torch.dtype) -> Tensor:
    """Return ``[other, contraction]`` of a face in ``dtype``, of a stack for each matrix."""
    if face.scale is None:
        return face.qdata.to(dtype)
    if face.qdata.dim() == 3:
        matrices = [matrix_of(face, index) for index in range(face.qdata.shape[0])]
        if not matrices:
            other, width = face.qdata.shape[1:]
            return face.qdata.new_empty(
                (0, other, width * face.format.elements_per_byte), dtype=dtype
            )
        return torch.stack([rowwise_values(matrix, dtype) for matrix in matrices])
    return dequantize(face.qdata, face.scale, face.tensor_scale, format=face.format, dtype=dtype)
