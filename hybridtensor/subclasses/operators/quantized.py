"""The aten operators of ``QuantizedTensor``."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._prims_common import infer_size  # private; works out -1 as ``aten.view`` does

from hybridtensor.ops import Face
from hybridtensor.ops.face import FaceKind, face_layouts
from hybridtensor.ops.groups import stack_layouts
from hybridtensor.subclasses.op_table import Args, Func, Kwargs
from hybridtensor.subclasses.operators.common import (
    alias,
    bound,
    copy_inner_,
    outline,
    register_common,
    to_copy_options,
    to_copy_stride,
    values_for,
)
from hybridtensor.subclasses.operators.matmul import register_matmul
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor

aten = torch.ops.aten
table = QuantizedTensor.ops


def _slice_scale(
    scale: Tensor, block: int | None, axis: int, start: int, stop: int, step: int, extent: int
) -> Tensor:
    """Return the scales of a slice of one axis; raise if it cuts a block."""
    if block is None:
        return scale
    if block == 1:
        own: Tensor = aten.slice.Tensor(scale, axis, start, stop, step)
        return own
    _require_whole(block, start, stop, step, extent)
    blocks: Tensor = aten.slice.Tensor(scale, axis, start // block, -(-stop // block))
    return blocks


def _require_whole(block: int, start: int, stop: int, step: int, extent: int) -> None:
    """Raise ValueError if a slice of one axis cuts a block."""
    if step != 1 or start % block or (stop % block and stop != extent):
        raise ValueError(
            f"slice: blocks of {block} are cut by [{start}:{stop}:{step}] of {extent}; slice at multiples of {block}, "
            "or dequantize first"
        )


def _slice(x: QuantizedTensor, dim: int, start: int, stop: int, step: int) -> QuantizedTensor:
    """Slice the last dimension, or whole groups of rows of the first."""
    size = list(x.shape)
    size[dim] = len(range(start, stop, step))
    if x.is_stack and dim == 0:
        return x.map_inner(lambda t: aten.slice.Tensor(t, 0, start, stop, step), size=tuple(size))
    if x.is_stack:
        raise NotImplementedError(
            f"slice: whole matrices of a stack can be sliced, got dimension {dim} of {x!r}; dequantize first"
        )
    # Not the rows of zeros that complete a last block
    inner, columns = math.prod(x.shape[1:-1]), x.matrix_shape[1]
    if x.shape[-1] != columns or (dim == 0 and x.dim() > 2 and step != 1) or 0 < dim < x.dim() - 1:
        raise NotImplementedError(
            f"slice: the first or the last dimension of a face can be sliced, got dimension {dim} of {x!r} "
            f"(a {x.matrix_shape} matrix); dequantize first"
        )
    if dim == 0 and x.dim() > 1:
        logical_axis, extent = 0, x.shape[0] * inner
        start, stop = start * inner, stop * inner
    else:
        logical_axis, extent = 1, columns
    stored_axis = logical_axis if x.axis == -1 else 1 - logical_axis
    block = x.format.block[stored_axis]
    if stored_axis == 1 and x.format.drawn_signs:  # what is rotated together is more than a block
        _require_whole(x.format.step, start, stop, step, extent)
    scale = _slice_scale(x.scale, block, stored_axis, start, stop, step, extent)
    tensor_scale, cuts = x.tensor_scale, x.cuts_group or block is None
    if tensor_scale is not None and x.format.tensor_block is not None:
        tensor_scale = _slice_scale(
            tensor_scale, x.format.tensor_block[stored_axis], stored_axis, start, stop, step, extent
        )
        cuts = cuts or x.format.tensor_block[stored_axis] is None
    packed = 1
    if stored_axis == 1:  # whole blocks: the bounds are even
        packed, stop = x.format.elements_per_byte, x.format.stored(stop)
    qdata = aten.slice.Tensor(x.qdata, stored_axis, start // packed, stop // packed, step)
    face = Face(qdata, scale, tensor_scale, x.format)
    strides = [by * step if i == dim else by for i, by in enumerate(x.stride())]
    return QuantizedTensor(face, x.axis, x.nominal_dtype, tuple(size), tuple(strides), cuts)


def _select(x: QuantizedTensor, index: int) -> QuantizedTensor:
    return x.map_inner(
        lambda t: aten.select.int(t, 0, index), size=x.shape[1:], stride=x.stride()[1:]
    )


register_common(table, _slice, _select)
register_matmul(table)


@table.register(aten.t.default)
def _t(func: Func, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    x: QuantizedTensor = args[0]
    if not x.is_stack and (x.dim() != 2 or x.matrix_shape != tuple(x.shape)):
        raise NotImplementedError(
            f"t: only a matrix can be transposed, got {x!r} of a {x.matrix_shape} matrix; dequantize first"
        )
    # The last two dimensions are exchanged, and with them the directions
    size, stride = ((*of[:-2], of[-1], of[-2]) for of in (x.shape, x.stride()))
    return x.map_inner(lambda t: t, size=size, stride=stride, axis=-1 - x.axis)


@table.register(aten.view.default, aten._unsafe_view.default)
def _view(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Regroup or flatten leading dimensions; scale groups are unchanged."""
    x: QuantizedTensor = args[0]
    size = tuple(args[1])
    if -1 in size or math.prod(size) != x.numel():
        size = tuple(infer_size(size, x.numel()))  # which raises for another number of elements
    if size == tuple(x.shape):
        return alias(x)
    if x.qdata.dim() == 3 and size[1:] not in ((), x.matrix_shape):
        raise NotImplementedError(
            f"view: a stack of {x.matrix_shape} matrices stays one, or is flattened, got {size} for "
            f"{tuple(x.shape)}; dequantize first"
        )
    stride = None if x.is_contiguous() else _strides_of_view(x, size)
    if len(size) != 1 and size[-1] != x.matrix_shape[1]:
        raise NotImplementedError(
            f"view: {tuple(x.shape)} as {size} would split the scale groups of a {x.matrix_shape} matrix in "
            f"{x.format}; keep the last dimension {x.matrix_shape[1]}, or dequantize first"
        )
    return x.map_inner(lambda t: t, size=size, stride=stride)


def _strides_of_view(x: QuantizedTensor, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a view as torch finds them; raise RuntimeError where it takes a copy."""
    try:
        return outline(x).view(size).stride()
    except RuntimeError:
        raise RuntimeError(
            f"view: a tensor with strides {tuple(x.stride())} is not contiguous; call contiguous()"
        ) from None


@table.register(aten.clone.default)
def _clone(func: Func, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    x: QuantizedTensor = args[0]
    stride = to_copy_stride(x, kwargs.get("memory_format"))
    # The copy of a slice has the only use of its scales.
    return x.map_inner(torch.clone, size=x.shape, stride=stride, cuts_group=False)


@table.register(aten._to_copy.default)
def _to_copy(func: Func, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """Copy the bytes; a new dtype only changes the nominal one."""
    x: QuantizedTensor = args[0]
    dtype, options = to_copy_options(x, kwargs)
    stride = to_copy_stride(x, kwargs.get("memory_format"))
    return x.map_inner(
        lambda t: aten._to_copy(t, **options),
        size=x.shape,
        stride=stride,
        nominal_dtype=dtype,
        cuts_group=False,
    )


@table.register(aten._pin_memory.default)
def _pin_memory(func: Func, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    x: QuantizedTensor = args[0]
    return x.map_inner(lambda t: t.pin_memory())


@table.register(aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default)
def _new(func: Func, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """Allocate a face of the same format; zeros have scale 1."""
    x: QuantizedTensor = args[0]
    dtype, options = to_copy_options(x, kwargs)
    options.pop("non_blocking", None)
    if func is aten.empty_like.default:  # of a flattened view, too
        size, stack, matrix = tuple(x.shape), tuple(x.qdata.shape[:-2]), x.matrix_shape
    else:
        size = tuple(args[1])
        stack = size[:1] if x.is_stack else ()
        matrix = math.prod(size[len(stack) : -1]), size[-1] if size else 1
    matrix = matrix if x.axis == -1 else matrix[::-1]
    layouts = (
        stack_layouts(x.format, stack[0], *matrix) if stack else face_layouts(x.format, *matrix)
    )
    options.setdefault("device", x.qdata.device)
    tensors = [
        torch.empty_strided(shape, strides, dtype=of_part, **options)
        for shape, strides, of_part in layouts
    ]
    if func is aten.new_zeros.default:
        # With block scales of 1 a factor of 1: a value is element * scale * (tensor scale / tensor_scale_max).
        for tensor, value in zip(tensors, (0, 1, x.format.tensor_scale_max), strict=False):
            tensor.copy_(torch.full((), value, device=tensor.device))
    stride = None
    if func is aten.empty_like.default:
        stride = to_copy_stride(x, kwargs.get("memory_format"))
    face = Face.of(tensors, FaceKind(x.format))
    return QuantizedTensor(face, x.axis, dtype, size, stride)


@table.register(aten.copy_.default)
def _copy_(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Copy bytes between faces of one format, or dequantize into a plain tensor."""
    dst: Tensor = args[0]
    src = args[1]
    non_blocking = bound(args[1:], kwargs, ("non_blocking", False))[0]
    if not isinstance(dst, QuantizedTensor):
        dst.copy_(values_for(dst, src), non_blocking=non_blocking)
        return dst
    if not isinstance(src, QuantizedTensor):
        raise NotImplementedError(
            f"copy_: a face does not know how it was quantized, got a {type(src).__name__} for {dst!r}; "
            "use quantizer.update_(tensor, values)"
        )
    check_copy(dst, src)
    copy_inner_(dst, src, non_blocking=non_blocking)
    return dst


def check_copy(dst: QuantizedTensor, src: QuantizedTensor) -> None:
    """Raise ValueError if formats or shapes differ, or a shared scale group would change."""
    mine, theirs = (
        (dst.format, dst.axis, dst.matrix_shape),
        (src.format, src.axis, src.matrix_shape),
    )
    if mine != theirs:
        raise ValueError(
            f"copy_: faces of one format, axis and shape are required, got {dst!r} from {src!r}"
        )
    if dst.cuts_group and not _shared_scales_equal(dst, src):
        raise ValueError(
            f"copy_: {dst!r} is a slice through a scale group, and its new scale would change the rest of the group; "
            "write the whole tensor"
        )


def _shared_scales_equal(dst: QuantizedTensor, src: QuantizedTensor) -> bool:
    """Return whether the scales that a slice shares with its base are equal in ``src``."""
    pairs = [(dst.scale, src.scale)] if None in dst.format.block else []
    if dst.tensor_scale is not None and src.tensor_scale is not None:
        pairs.append((dst.tensor_scale, src.tensor_scale))
    return all(torch.equal(mine, theirs.to(mine.device)) for mine, theirs in pairs)


@table.register(aten.equal.default)
def _equal(func: Func, args: Args, kwargs: Kwargs) -> bool:
    """Compare faces bit for bit."""
    a, b = args
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
        raise TypeError(
            f"equal: two faces are required, got {type(a).__name__} and {type(b).__name__}; dequantize both"
        )
    if (a.format, a.axis, a.shape) != (b.format, b.axis, b.shape):
        return False
    return all(
        torch.equal(_bytes(getattr(a, n)), _bytes(getattr(b, n)))
        for n in a.inner_names
        if getattr(a, n) is not None
    )


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes in logical order; a one-column matrix counts as contiguous, but its bytes have no view."""
    return tensor.contiguous().view(-1).view(torch.uint8)
