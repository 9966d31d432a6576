"""Faces from the tensors that checkpoints of engines have: what ``layouts`` packs, unpacked.

Shape letters: ``N, K`` a weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtensor import formats
from hybridtensor.arguments import shown
from hybridtensor.formats import Format
from hybridtensor.inference.layouts import Packed
from hybridtensor.ops import Face
from hybridtensor.ops.dequantize import face_values
from hybridtensor.ops.transpose import transposed
from hybridtensor.quantizers import HybridQuantizer, Quantizer
from hybridtensor.quantizers.base import one_face
from hybridtensor.state import Context
from hybridtensor.untrusted.safetensors_folder import Folder

_WHO = "load_pretrained"
SUFFIXES = ("weight", "weight_packed", "weight_scale_inv", "weight_scale", "weight_global_scale")
_VALUES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NAN = 0x7F  # of E4M3, without its sign
_LARGEST = 252  # exponent of MXFP4: 6 * 2**125 is finite in fp32
_GROUPS = {
    formats.MXFP8_E4M3_32X32: formats.MXFP8_E4M3,
    formats.MXFP4_32X32: formats.MXFP4,
    formats.NVFP4_16X16: formats.NVFP4,
    formats.NVFP4_16X16_MAX256: formats.NVFP4_MAX256,
}
_LEVELS = formats.NVFP4, formats.NVFP4_MAX256  # which differ in what a global scale means
_POW2 = {formats.FP8_E4M3_128X128: formats.FP8_E4M3_128X128_FP32_SCALE}
Tensors = Mapping[str, Tensor] | Folder
"""Tensors by name."""


def packed_matrix(name: str, tensors: Tensors) -> Packed:
    """Return the tensors of a weight called ``name``, by what their names end in."""
    prefix = name.removesuffix("weight")
    found = {s: tensors[prefix + s] for s in SUFFIXES if prefix + s in tensors}
    if found and "weight_scale_inv" not in found and f"{prefix}scale" in tensors:
        found["weight_scale_inv"] = tensors[f"{prefix}scale"]  # DeepSeek V4's name
    _require_one_spelling(name, found)
    return _as_packed(found)


def _as_packed(found: Packed) -> Packed:
    """Rename and view DeepSeek V4's int8 experts as packed MXFP4; return other tensors unchanged."""
    elements = found.get("weight")
    scale = found.get("weight_scale_inv", found.get("weight_scale"))
    if elements is None or scale is None:
        return found
    if (elements.dtype, scale.dtype) != (torch.int8, torch.float8_e8m0fnu):
        return found
    return {"weight_packed": elements.view(torch.uint8), "weight_scale": scale}


def has_stack(name: str, tensors: Tensors) -> bool:
    """Return whether experts are stored as one stack: by the parameter's name, or as blocks and scales (MXFP4)."""
    return any(one in tensors for one in (name, *_halves(name)))


def _halves(name: str) -> tuple[str, str]:
    return f"{name}_blocks", f"{name}_scales"


def packed_stack(name: str, tensors: Tensors) -> Packed:
    """Return the tensors of a stack that is stored as one, as ``names`` calls them."""
    if any(half in tensors for half in _halves(name)):
        return _of_blocks(name, tensors)
    found = {}
    for suffix in ("weight_scale_inv", "weight_scale", "weight_global_scale"):
        own = f"{name}{suffix.removeprefix('weight')}"
        if own in tensors:
            found[suffix] = tensors[own]
    if name in tensors:
        elements = tensors[name]
        is_packed = "weight_global_scale" in found or elements.dtype == torch.uint8
        found["weight_packed" if is_packed else "weight"] = elements
    _require_one_spelling(name, found)
    return _as_packed(found)


def _of_blocks(name: str, tensors: Tensors) -> Packed:
    """Return the tensors of a stack as gpt-oss stores it, blocks of 32 elements and their exponents."""
    halves = _halves(name)
    there = {one: tensors[one] for one in (name, *halves) if one in tensors}
    if list(there) != list(halves):
        raise ValueError(
            f"{_WHO}: {name}: {halves[0]} with {halves[1]} are required, and nothing besides, got {list(there)}"
        )
    blocks, scales = there.values()
    of_bytes = blocks.dtype == scales.dtype == torch.uint8
    if not of_bytes or blocks.dim() != 4 or blocks.shape != (*scales.shape, 16):
        raise ValueError(
            f"{_WHO}: {name}: uint8 blocks [E, rows, groups, 16] with uint8 scales [E, rows, groups] are required, got "
            f"{shown(blocks.dtype)} {list(blocks.shape)} with {shown(scales.dtype)} {list(scales.shape)}"
        )
    return {"weight_packed": blocks.flatten(2), "weight_scale": scales}


def _require_one_spelling(name: str, packed: Packed) -> None:
    """Raise ValueError for elements or scales of a weight by two names, of which nothing says which are meant, and
    for scales alone.
    """
    for one, other in (("weight_scale", "weight_scale_inv"), ("weight", "weight_packed")):
        if one in packed and other in packed:
            raise ValueError(
                f"load_pretrained: {name}: {one} or {other} is required, got both; remove one of them"
            )
    if packed and not {"weight", "weight_packed"} & packed.keys():
        raise ValueError(
            f"load_pretrained: {name}: elements are required beside scales, got {sorted(packed)} alone"
        )
    if "weight" in packed and "weight_global_scale" in packed:
        raise ValueError(
            f"load_pretrained: {name}: weight_packed is required beside weight_global_scale, got weight"
        )


def require_values(name: str, stored: Tensor) -> None:
    """Raise ValueError for elements of a quantized format, which are no values without scales."""
    if stored.dtype not in _VALUES:
        raise ValueError(
            f"load_pretrained: {name}: scales are required beside elements in {shown(stored.dtype)}, got none"
        )


def require_elements(name: str, elements: Tensor, scale: Tensor) -> None:
    """Raise ValueError unless elements in E4M3 are numbers, and no scale makes them infinite."""
    bad = int(((elements.view(torch.uint8) & _NAN) == _NAN).sum())
    if bad:
        raise ValueError(
            f"load_pretrained: {name}: elements that are numbers are required, got {bad} NaN of {elements.numel()}; "
            "the file is damaged, or its model had diverged"
        )
    if not bool((scale.float() * torch.finfo(elements.dtype).max).isfinite().all()):
        raise ValueError(
            f"load_pretrained: {name}: scales are required with which elements are finite, got up to "
            f"{float(scale.float().max()):.3g}; the file is damaged, or was written by something else"
        )


def require_scales(name: str, scale: Tensor, who: str = _WHO) -> None:
    """Raise ValueError unless scales are numbers above zero; those of NVFP4's blocks may be zero.

    Args:
        name: Of the weight.
        scale: Numbers; exponents (E8M0, or their bytes), of which 255 is NaN; or E4M3.
        who: Begins messages.
    """
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        bad = scale.view(torch.uint8) == 255
    elif scale.dtype == torch.float8_e4m3fn:
        bad = scale.view(torch.uint8) > 126  # NaN, or a sign
    elif scale.dtype in _VALUES:
        numbers = scale.float()  # as they are taken
        bad = ~(numbers.isfinite() & (numbers > 0))
    else:
        raise ValueError(
            f"{who}: {name}: scales in a floating-point dtype are required, got {shown(scale.dtype)}"
        )
    if bool(bad.any()):
        raise ValueError(
            f"{who}: {name}: finite scales above zero are required, got {int(bad.sum())} others of "
            f"{scale.numel()}; the file is damaged, or was written by something else"
        )


def stored_face(name: str, packed: Packed) -> Face | None:
    """Return the face that a matrix is stored as; None if it is stored in high precision.

    Args:
        name: Of the matrix, for errors.
        packed: Its tensors, by what their names end in.

    Raises:
        ValueError: If they go together in no layout.
    """
    if "weight_packed" in packed:
        return _nvfp4(name, packed) if "weight_global_scale" in packed else _mxfp4(name, packed)
    elements, scale = packed["weight"], packed.get("weight_scale_inv", packed.get("weight_scale"))
    if scale is None:
        require_values(name, elements)
        return None
    require_scales(name, scale)
    if elements.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{_WHO}: {name}: elements in float8_e4m3fn are required, got {elements.dtype} with scales"
        )
    if elements.dim() != 2:
        raise ValueError(
            f"{_WHO}: {name}: a matrix is required, got {list(elements.shape)} with scales"
        )
    rows, columns = elements.shape
    fmt = _format(scale, rows, columns, in_squares="weight_scale_inv" in packed)
    if fmt is None:
        raise ValueError(
            f"{_WHO}: {name}: scales of a layout of inference_tensors are required, got {scale.dtype} "
            f"{list(scale.shape)} for a matrix {[rows, columns]}"
        )
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)  # exponents
    require_elements(name, elements, scale)
    if fmt is formats.MXFP8_E4M3:
        return Face(elements, scale, None, fmt)
    return Face(elements, scale.float().reshape(fmt.scale_shape(rows, columns)), None, fmt)


def _format(scale: Tensor, rows: int, columns: int, *, in_squares: bool) -> Format | None:
    """Return the format that scales of such a dtype and shape belong to, or None."""
    squares = formats.FP8_E4M3_128X128_FP32_SCALE
    if in_squares:
        return squares if tuple(scale.shape) == squares.scale_shape(rows, columns) else None
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        fits = columns % 32 == 0 and tuple(scale.shape) == (rows, columns // 32)
        return formats.MXFP8_E4M3 if fits else None
    if scale.numel() == 1:
        return formats.FP8_E4M3_TENSOR
    for fmt in (formats.FP8_E4M3_ROW, squares):
        if tuple(scale.shape) == fmt.scale_shape(rows, columns):
            return fmt
    return None


def _mxfp4(name: str, packed: Packed) -> Face:
    codes, scale = packed["weight_packed"], packed.get("weight_scale")
    rows, width = codes.shape if codes.dim() == 2 else (0, 0)
    shape = rows, width // 16
    fits = codes.dtype == torch.uint8 and codes.dim() == 2 and width % 16 == 0
    if not fits or scale is None or scale.itemsize != 1 or tuple(scale.shape) != shape:
        raise ValueError(
            f"{_WHO}: {name}: uint8 weight_packed of whole blocks of 32 with weight_scale {list(shape)}, or of 16 with "
            f"weight_scale and one weight_global_scale, are required, got {list(codes.shape)} with others"
        )
    require_scales(name, scale.view(torch.uint8))
    if scale.numel() and int(scale.view(torch.uint8).max()) > _LARGEST:
        raise ValueError(
            f"{_WHO}: {name}: exponents up to {_LARGEST} are required, with which elements are finite, got "
            f"{int(scale.view(torch.uint8).max())}; the file is damaged, or was written by something else"
        )
    return Face(codes, scale.view(torch.float8_e8m0fnu), None, formats.MXFP4)


def _nvfp4(name: str, packed: Packed) -> Face:
    codes, scale, level = (
        packed["weight_packed"],
        packed.get("weight_scale"),
        packed.get("weight_global_scale"),
    )
    if codes.dim() != 2:
        raise ValueError(
            f"{_WHO}: {name}: a matrix weight_packed is required, got {list(codes.shape)}"
        )
    rows, columns = codes.shape[0], codes.shape[1] * 2
    if (
        codes.dtype != torch.uint8
        or scale is None
        or level is None
        or level.numel() != 1
        or scale.itemsize != 1
        or columns % 16
        or tuple(scale.shape) != (rows, columns // 16)
    ):
        raise ValueError(
            f"{_WHO}: {name}: uint8 weight_packed {list(codes.shape)} with weight_scale {[rows, columns // 16]} and "
            "one weight_global_scale are required, got others"
        )
    require_scales(name, scale.view(torch.float8_e4m3fn))
    require_scales(name, level)
    fmt = next((fmt for fmt in _LEVELS if _has_level(fmt, level)), formats.NVFP4)
    amax = amax_of(level, fmt).view(1, 1)
    require_scales(name, amax)
    return Face(codes, scale.view(torch.float8_e4m3fn), amax, fmt)


def _has_level(fmt: Format, level: Tensor) -> bool:
    """Return whether an amax has just that global scale."""
    return bool((fmt.tensor_scale_max / amax_of(level, fmt) == level).all())


def amax_of(level: Tensor, fmt: Format = formats.NVFP4) -> Tensor:
    """Return an amax of which ``level`` is the global scale: one that is a bfloat16, as of weights in that
    dtype, if there is one.
    """
    most = fmt.tensor_scale_max
    near = most / level.double()
    first = near.float().reshape(1)
    found = first
    # Several amaxes may have one global scale: the nearest, tried last, is taken.
    for steps in (-2, -1, 1, 2, 0):
        # Neighbours in fp32: their bits, as integers, are one apart.
        bits = first.view(torch.int32) + steps
        found = torch.where(
            most / bits.view(torch.float32) == level, bits.view(torch.float32), found
        )
    short = near.to(torch.bfloat16).float().reshape(1)
    return torch.where(most / short == level, short, found)


def in_format(name: str, face: Face, fmt: Format) -> Face:
    """Return a face in another format that holds the same values.

    Raises:
        ValueError: If that cannot hold them.
    """
    scale = face.scale
    if face.format is fmt or scale is None:
        return face
    one_by_16 = _GROUPS.get(fmt, fmt)
    amax = face.tensor_scale
    if amax is not None and {face.format, one_by_16} == set(_LEVELS):  # the global scale stays
        amax = amax_of(face.format.tensor_scale_max / amax, one_by_16).view(1, 1)
        face = face._replace(tensor_scale=amax, format=one_by_16)
        if fmt is one_by_16:
            return face
    sizes = face.qdata.shape[0], face.qdata.shape[1]
    if scale.numel() == 1 and fmt in _POW2.values() and fmt.scale_shape(*sizes) == (1, 1):
        return face._replace(format=fmt)  # one block: a scale of the tensor
    if scale.numel() == 1 and face.format in _POW2.values() and fmt is formats.FP8_E4M3_TENSOR:
        return face._replace(format=fmt)
    if scale.numel() == 1 and face.format is formats.FP8_E4M3_TENSOR and fmt in _POW2:
        face = face._replace(format=_POW2[fmt]) if fmt.scale_shape(*sizes) == (1, 1) else face
    if fmt in _POW2 and face.format is _POW2[fmt]:
        # Powers of two are those whose mantissa ``frexp`` gives as 0.5.
        if bool((torch.frexp(scale)[0] == 0.5).all()):
            return face._replace(format=fmt)
    elif fmt in _GROUPS and face.format is _GROUPS[fmt]:
        side = fmt.block[0] or 1
        bits = scale.view(torch.uint8)
        if bits.shape[0] % side == 0:
            squares = bits.unflatten(0, (-1, side))
            if bool((squares == squares[:, :1]).all()):
                return face._replace(scale=squares[:, 0].contiguous().view(scale.dtype), format=fmt)
    elif (fmt, face.format) == (formats.FP8_E4M3_TENSOR, formats.FP8_E4M3_ROW):
        if bool((scale == scale[:1]).all()):
            return face._replace(scale=scale[:1].contiguous(), format=fmt)
    elif (fmt, face.format) == (formats.FP8_E4M3_ROW, formats.FP8_E4M3_TENSOR):
        return face._replace(scale=scale.expand(face.qdata.shape[0], 1).contiguous(), format=fmt)
    raise ValueError(
        f"load_pretrained: {name}: a weight stored as {fmt} is required, got {face.format} whose scales that "
        f"cannot hold; quantize_ with a recipe whose weight is {face.format}, or without persistent=True"
    )


def columnwise_of_stored(
    quantizer: Quantizer, row: Face, dtype: torch.dtype, context: Context
) -> Face:
    """Return the columnwise face that goes with a rowwise one that was read: its transpose where formats say so,
    else made of the values that it holds, whatever those were once made of.

    Args:
        quantizer: Of the weight.
        row: ``[N, K]``.
        dtype: Of a face in high precision.
        context: Which tensor this is.
    """
    if isinstance(quantizer, HybridQuantizer):
        if quantizer.derives_columnwise:
            return quantizer.derive_columnwise(row, dtype, context)
    elif row.format.is_square and row.scale is not None:
        return transposed(row)
    values = face_values(row, torch.float32)
    return one_face(quantizer, values, "columnwise", dtype, context)
