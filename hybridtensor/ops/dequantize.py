"""Turn the elements and scales of a face back into high-precision values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridtensor.arguments import require_dtype
from hybridtensor.format_record import ROTATED_WITH_SIGNS
from hybridtensor.formats import Format, get_format
from hybridtensor.ops.cache import Cache
from hybridtensor.ops.face import Face
from hybridtensor.ops.kernel_library import Launch, on_device
from hybridtensor.ops.library import define, implement, runs_directly
from hybridtensor.ops.references import eden
from hybridtensor.ops.references.blocks import spread
from hybridtensor.ops.references.hadamard import rotate_back
from hybridtensor.ops.references.nvfp4 import e2m1_decode, unpack

_SIGNS = ROTATED_WITH_SIGNS // 16  # numbers behind tensor scales
_LARGE, _SMALLER = 2.0**64, 2.0**-16  # beyond the first, amax times a block scale could overflow


def element_values(qdata: Tensor, fmt: Format) -> Tensor:
    """Return the elements as fp32, ``[other, contraction]``."""
    return e2m1_decode(unpack(qdata)) if fmt.elements_per_byte > 1 else qdata.float()


def _exact(qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, fmt: Format) -> Tensor:
    """Return the dequantized elements in float64, which rounds nothing but divisions."""
    scales = scale.double()
    if tensor_scale is not None:
        scales = scales * (without_signs(tensor_scale, fmt).double() / fmt.tensor_scale_max)
    elements = element_values(qdata, fmt).double()
    values = elements * spread(scales, fmt.block, elements.shape)
    return _rotated_back(values, tensor_scale, fmt)


def without_signs(tensor_scale: Tensor, fmt: Format) -> Tensor:
    """Return the tensor scales without the signs stored behind them; see ``Format.drawn_signs``."""
    return tensor_scale[..., :-_SIGNS, :] if fmt.drawn_signs else tensor_scale


def signs_of(tensor_scale: Tensor) -> Tensor:
    """Return the signs behind tensor scales, ``[..., 8, 1]``; see ``Format.drawn_signs``."""
    return tensor_scale[..., -_SIGNS:, :]


def _rotated_back(values: Tensor, tensor_scale: Tensor | None, fmt: Format) -> Tensor:
    """Undo the rotation of a format."""
    if not fmt.hadamard:
        return values
    if fmt.drawn_signs and tensor_scale is not None:
        return eden.rotate_back(values, signs_of(tensor_scale)[:, 0])
    return rotate_back(values)


def dequantize_reference(
    qdata: Tensor,
    scale: Tensor,
    tensor_scale: Tensor | None,
    format: str | Format,
    dtype: torch.dtype,
    whole: bool = True,
) -> Tensor:
    """Define ``dequantize``; without ``whole``, ``multipliable_values``. Operators name the format."""
    fmt = get_format(format) if isinstance(format, str) else format
    if whole and dtype == torch.float64:
        return _exact(qdata, scale, tensor_scale, fmt)
    values = element_values(qdata, fmt)
    if not whole:
        values = (
            values * spread(scale.float(), fmt.block, values.shape) if fmt.scale_fits else values
        )
    elif tensor_scale is None:
        values = values * spread(scale.float(), fmt.block, values.shape)
    else:
        values = _two_level(values, scale, without_signs(tensor_scale, fmt), fmt)
    if whole:
        values = _rotated_back(values, tensor_scale, fmt)
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def _two_level(values: Tensor, scale: Tensor, tensor_scale: Tensor, fmt: Format) -> Tensor:
    """Multiply in the order of the kernels: ``element * ((scale * amax) * (1 / 2688))``."""
    # Powers of two, which change no rounding; of two numbers ``torch.where`` would make the default dtype
    one = torch.ones_like(tensor_scale)
    shift = torch.where(tensor_scale > _LARGE, _SMALLER, one)
    unit = (1.0 / torch.tensor(fmt.tensor_scale_max, dtype=torch.float32, device="cpu")).item()
    combined = (scale.float() * (tensor_scale * shift)) * unit
    return values * spread(combined, fmt.block, values.shape) / shift


def _fake(
    qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, format: str, dtype: torch.dtype
) -> Tensor:
    rows, columns = qdata.shape
    return qdata.new_empty((rows, columns * get_format(format).elements_per_byte), dtype=dtype)


_OP = define(
    "dequantize(Tensor qdata, Tensor scale, Tensor? tensor_scale, str format, ScalarType dtype) -> Tensor",
    reference=dequantize_reference,
    fake=_fake,
)
_PLANS: Cache[tuple[object, ...], Launch] = Cache()
_P, _Q = 32, 256
# As the kernel names them
_SCALES = {
    torch.float32: 1,
    torch.float8_e8m0fnu: 2,
    torch.float8_e4m3fn: 3,
}


def dequantize_cuda(
    qdata: Tensor,
    scale: Tensor,
    tensor_scale: Tensor | None,
    format: str | Format,
    dtype: torch.dtype,
    whole: bool = True,
) -> Tensor:
    """Implement ``dequantize`` by a kernel."""
    fmt = get_format(format) if isinstance(format, str) else format
    by_definition = qdata.numel() == 0 or dtype == torch.float64 or not fmt.has_kernels
    if by_definition or not qdata.is_contiguous() or qdata.data_ptr() % 16:
        return dequantize_reference(qdata, scale, tensor_scale, fmt, dtype, whole)
    other, along = qdata.shape[0], qdata.shape[1] * fmt.elements_per_byte
    out = torch.empty(other, along, dtype=dtype, device=qdata.device)
    num_scales = (
        0 if tensor_scale is None or not whole else without_signs(tensor_scale, fmt).size(0)
    )
    aligned = scale.data_ptr() % 16 == 0, tensor_scale is None or tensor_scale.data_ptr() % 16 == 0
    key = (fmt.name, dtype, whole, num_scales, qdata.shape, scale.stride(), qdata.device, aligned)
    launch = _PLANS.get(key)
    if launch is None:
        launch = _PLANS[key] = _launch(fmt, other, along, dtype, whole, num_scales)
    elements = qdata if qdata.dtype == torch.uint8 else qdata.view(torch.uint8)
    scales = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    tensor_scales = out if tensor_scale is None else tensor_scale
    with on_device(qdata.device):
        launch(elements, scales, scale.stride(0), scale.stride(1), tensor_scales, out, other, along)
    return out


def _launch(
    fmt: Format, other: int, along: int, dtype: torch.dtype, whole: bool, num_scales: int
) -> Launch:
    block = tuple(extent or 0 for extent in fmt.block)
    options: dict[str, int | None] = {"num_warps": 4}
    if (
        fmt.drawn_signs
    ):  # found by compiling only; products of subnormal numbers are rounded before they are added
        options = {"num_warps": 8, "enable_fp_fusion": False}
    return Launch(
        "dequantize", "dequantize_kernel", -(-other // _P) * -(-along // _Q),
        SCALE=_SCALES[fmt.scale_dtype] if fmt.scale_dtype and (whole or fmt.scale_fits) else 0,
        SIDE=block[0], LENGTH=block[1], TENSOR_SCALE=num_scales > 0,
        TENSOR_SCALE_PER_ROW=num_scales > 1,
        UNIT=1.0 / fmt.tensor_scale_max,
        E5M2=fmt.element == torch.float8_e5m2, BITS=8 // fmt.elements_per_byte,
        ROTATED=fmt.rotated if whole else 0, LARGEST=torch.finfo(dtype).max,
        EVEN=other % _P == 0 and along % _Q == 0, WIDE=_P * along >= 2**31, P=_P, Q=_Q, options=options,
    )  # fmt: skip


implement("dequantize", dequantize_cuda)


def multipliable_values(faces: Sequence[Face], dtype: torch.dtype) -> list[Tensor]:
    """Return each face's elements in ``dtype``, times the scales that vary along the contraction and fit exactly; only
    inside operators."""
    found = []
    for face in faces:
        fmt, scale, values = face.format, face.scale, face.qdata
        if scale is None or fmt.values_of is not None:
            values = values.to(dtype)
        elif values.is_cuda:
            values = dequantize_cuda(values, scale, None, fmt, dtype, False)
        elif fmt.scale_fits or fmt.elements_per_byte > 1:
            values = dequantize_reference(values, scale, None, fmt, dtype, False)
        else:
            values = values.to(dtype)  # what the definition comes to
        found.append(values)
    return found


def face_values(face: Face, dtype: torch.dtype) -> Tensor:
    """Dequantize a face, also of formats without a name; only inside operators, where no mode watches."""
    if face.scale is None:
        return face.qdata.to(dtype)
    run = dequantize_cuda if face.qdata.is_cuda else dequantize_reference
    return run(face.qdata, face.scale, face.tensor_scale, face.format, dtype)


def dequantize(
    qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, *, format: Format, dtype: torch.dtype
) -> Tensor:
    """Return the values of a face in ``dtype``: ``element * scale``, each product rounded to fp32.

    Two-level formats: ``element * ((scale * tensor_scale) / tensor_scale_max)``. Formats with a Hadamard rotation are
    rotated back. Saturates: rounding up to a power-of-two scale's grid can step just beyond the largest value of
    ``dtype``, and what was finite must stay finite. NaN stays NaN. In float64 the products are not rounded.

    Args:
        qdata: Elements, ``[other, contraction / elements_per_byte]``.
        scale: Block scales, ``format.scale_shape(other, contraction)``.
        tensor_scale: Second-level scale, fp32, ``[1 or other, 1]``, with signs behind it where these are drawn;
            ``None`` for one-level formats.
        format: The face's format.
        dtype: Dtype of the result: a floating-point dtype.

    Source: TransformerEngine, common/cast/fp8/dequantize_fp8.cuh and common/cast/nvfp4/dequantize_nvfp4.cuh.
    """
    require_dtype("dequantize", dtype)
    run: Callable[..., Tensor] = _OP
    if runs_directly(qdata):
        run = dequantize_cuda if qdata.is_cuda else dequantize_reference
    return run(qdata, scale, tensor_scale, format.name, dtype)
