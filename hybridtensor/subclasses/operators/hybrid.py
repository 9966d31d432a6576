"""The aten operators of ``HybridTensor``: mostly the same operator on both faces."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hybridtensor.arguments import HIGH_PRECISION
from hybridtensor.ops.library import is_traced
from hybridtensor.subclasses.faces import FaceTensor
from hybridtensor.subclasses.high_precision import whole
from hybridtensor.subclasses.hybrid_tensor import HybridTensor, is_of
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, of_layers
from hybridtensor.subclasses.operators.common import (
    FACTORIES,
    PRODUCTS,
    assignable,
    bound,
    copy_inner_,
    plain_like,
    refuse_products,
    register_common,
    values_for,
)
from hybridtensor.subclasses.operators.matmul import register_matmul, require_reader
from hybridtensor.subclasses.operators.quantized import check_copy
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor
from hybridtensor.subclasses.quantizing import mark_overwritten, refresh_, take_values_
from hybridtensor.subclasses.wrapper import WrapperTensor

aten = torch.ops.aten
table = HybridTensor.ops
T = TypeVar("T", bound=Tensor)


class _OnTensor(Protocol):
    """An operator whose result has its operand's class."""

    def __call__(self, tensor: T, /) -> T: ...


def _slice(x: HybridTensor, dim: int, start: int, stop: int, step: int) -> HybridTensor:
    """Slice the faces and the high-precision original, from which shards are made."""
    return _view(x, lambda tensor: aten.slice.Tensor(tensor, dim, start, stop, step))


def _select(x: HybridTensor, index: int) -> HybridTensor:
    return _view(x, lambda tensor: aten.select.int(tensor, 0, index))


def _view(x: HybridTensor, fn: _OnTensor) -> HybridTensor:
    made = _on_faces(x, fn)
    # Of all: as ``to_local()`` of a DTensor, and ``[:]``
    return made.view_of(x, whole if made.shape == x.shape else fn)


def _on_faces(x: HybridTensor, fn: _OnTensor) -> HybridTensor:
    try:
        return HybridTensor(*_faces(x, fn), x.config).like(x)
    except (ValueError, TypeError, NotImplementedError) as error:  # of a face, which knows no layer
        if not x.layer_name:
            raise
        raise type(error)(f"layer {x.layer_name}: {error}") from error


def _faces(x: HybridTensor, fn: _OnTensor) -> tuple[FaceTensor | None, FaceTensor | None]:
    # torch takes no view of a tensor whose memory FSDP2 has freed
    row, column = x.present("rowwise"), x.present("columnwise")
    # what one face is of the other, it stays: one memory, and one write for both
    if row is not None and is_of(column, row):
        row = fn(row)
        column = IdentityTensor(row)
    elif column is not None and is_of(row, column):
        column = fn(column)
        row = IdentityTensor(column)
    else:
        row, column = (None if face is None else fn(face) for face in (row, column))
    return row, column


register_common(table, _slice, _select)
register_matmul(table)
refuse_products(table, *PRODUCTS)


@table.register(aten.t.default)
def _t(func: Func, args: Args, kwargs: Kwargs) -> HybridTensor:
    """Transpose by swapping the faces."""
    turn: _OnTensor = aten.t.default if args[0].dim() < 3 else _turned
    row, column = (
        None if face is None else turn(face) for face in (args[0].rowwise, args[0].columnwise)
    )
    made = HybridTensor(column, row, args[0].config).view_of(args[0], turn)
    made.swapped = not args[0].swapped
    return made


@table.register(aten.t_.default)
def _transpose_in_place(func: Func, args: Args, kwargs: Kwargs) -> HybridTensor:
    """Transpose as ``nn.init.orthogonal_`` does with what ``new_empty`` made."""
    made: HybridTensor = args[0]
    if not made.record.is_new:
        table.refuse(func, args, kwargs)
    made.become(_t(aten.t.default, args, kwargs))
    return made


def _turned(tensor: T) -> T:
    return tensor.transpose(-2, -1)  # type: ignore[return-value]


_COPIES = (aten.clone.default, aten._pin_memory.default, aten._to_copy.default)


@table.register(*_COPIES, aten.new_zeros.default, aten.empty_like.default)
def _both_faces_and_original(func: Func, args: Args, kwargs: Kwargs) -> HybridTensor:
    def copy(tensor: T) -> T:
        copied: T = func(tensor, *args[1:], **kwargs)
        return copied

    x: HybridTensor = args[0]
    made = _on_faces(x, copy)
    if x.record.values is not None:
        made.record.values = x.high_precision.copied(copy, x.taken, same=func in _COPIES)
    made.is_saved = x.is_saved and func in _COPIES
    made.record.is_new = x.record.is_new + (func in FACTORIES)
    return made


@table.register(aten.view.default, aten._unsafe_view.default)
def _views(func: Func, args: Args, kwargs: Kwargs) -> HybridTensor:
    return _view(args[0], lambda tensor: func(tensor, *args[1:], **kwargs))


@table.register(aten.new_empty.default)
def _empty_faces(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    # Private in FSDP2: ``_chunk_with_empty`` makes the shards of ranks without rows by ``new_empty(0)``.
    if args[0].config is not None and tuple(args[1]) == (0,):
        raise ValueError(
            "fully_shard: a persistent weight has fewer rows than there are ranks, with shards "
            f"{tuple(args[0].shape)}; leave it out of quantize_, or use fewer ranks"
        )
    if len(args[1]) == 1:  # a vector is no part of a weight
        return plain_like(func, args, kwargs)
    made = _on_faces(args[0], lambda face: func(face, *args[1:], **kwargs))
    made.record.is_new = args[0].record.is_new + 1
    return made


@table.register(aten.copy_.default)
def _copy_(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Dequantize into a plain tensor, copy bytes between equal formats, and quantize anything else."""
    dst: Tensor = args[0]
    src = args[1]
    non_blocking = bound(args[1:], kwargs, ("non_blocking", False))[0]
    if not isinstance(dst, HybridTensor):
        require_reader("copy_", src)
        dst.copy_(values_for(dst, src), non_blocking=non_blocking)
        return dst
    if isinstance(src, HybridTensor) and _same_kind(dst, src) and not _is_empty_view(dst):
        _check_copy(dst, src)
        require_outside_graphs(dst, "copy_")
        # A model may be loaded after its optimizer: faces that its masters gave already stay what these give.
        unchanged = dst.high_precision.loaded and bool(_equal(aten.equal.default, (dst, src), {}))
        copy_inner_(dst, src, non_blocking=non_blocking)
        mark_overwritten(dst)
        values = src.known_values
        known = None if values is None else (values, src.high_precision.follows)
        dst.high_precision.mark_copied(
            src.dequantize,
            dst.taken,
            known=known,
            unchanged=unchanged,
            lost=src.high_precision.lost,
        )
        return dst
    values = src.dequantize() if isinstance(src, WrapperTensor) else src
    return requantize_(dst, values.to(dst.device).expand(dst.shape))


def _same_kind(dst: HybridTensor, src: HybridTensor) -> bool:
    """Return whether ``src`` has every face of ``dst`` in its format."""
    for name in dst.inner_names:
        mine, theirs = getattr(dst, name), getattr(src, name)
        if mine is not None and (theirs is None or _kind(mine) != _kind(theirs)):
            return False
    return dst.shape == src.shape


def _check_copy(dst: HybridTensor, src: HybridTensor) -> None:
    """Raise ValueError before any face is written if one cannot be."""
    for name in dst.inner_names:
        faces = getattr(dst, name), getattr(src, name)
        mine, theirs = (face.source if isinstance(face, IdentityTensor) else face for face in faces)
        if isinstance(mine, QuantizedTensor) and isinstance(theirs, QuantizedTensor):
            check_copy(mine, theirs)


def _kind(face: Tensor) -> tuple[object, ...]:
    source = getattr(face, "source", None)
    return type(face), getattr(face, "format", None), None if source is None else _kind(source)


def requantize_(dst: HybridTensor, values: Tensor) -> HybridTensor:
    """Quantize values into a persistent weight and return it; raise NotImplementedError without a recipe."""
    if dst.config is None:
        raise NotImplementedError(
            f"in-place write: {dst!r} has no recipe to quantize the new values with; "
            "use quantizer.update_(tensor, values)"
        )
    require_outside_graphs(dst, "in-place write")
    if not _is_empty_view(dst):
        # What casts do not read, float64 and integers, fp32 holds as well as the faces can
        refresh_(dst, values if values.dtype in HIGH_PRECISION else values.float())
    return dst


def _is_empty_view(weight: HybridTensor) -> bool:
    """Return whether nothing can be written; a rank's empty shard is no view, and takes part in collectives."""
    return weight.taken is not whole and not weight.numel()


@table.register(aten.set_data.default)
def _set_data(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Assign ``weight.data``: new faces; the master is updated."""
    weight, value = args
    if weight.config is None:
        raise NotImplementedError(
            f"HybridTensor.data: {weight!r} has no recipe to quantize the new values with; use copy_()"
        )
    values = assignable(weight, value)
    if not isinstance(value, HybridTensor):
        take_values_(weight, value, values)
    elif value.record is not weight.record:
        known = value.known_values
        take_values_(weight, value, values if known is None else known)


def present_values(weight: HybridTensor, who: str) -> Tensor:
    """Copy the highest-precision values available of a weight that is about to change."""
    known = weight.known_values
    if known is not None:
        return known.clone()
    if weight.is_gathered:
        raise NotImplementedError(
            f"HybridTensor{of_layers(weight)}: {who} of a weight that FSDP2 gathered, which has quantized faces "
            "only, and is dropped at the next reshard; call reshard() before it is written"
        )
    if weight.requires_grad or weight.record.values is not None:
        raise NotImplementedError(
            f"HybridTensor{of_layers(weight)}: {who} of a trainable weight needs its values in high precision, got "
            "faces only, in which small changes are lost; step it through "
            "hybridtensor.optim.MasterWeights"
        )
    return weight.dequantize()


def require_outside_graphs(weight: HybridTensor, who: Func | str) -> None:
    """Raise NotImplementedError for a persistent weight in a graph, or for an alias that a graph returned.

    A graph gets the faces, without the high-precision values. While Dynamo traces, the error breaks the graph, and the
    operator runs in eager code.
    """
    if weight.config is not None and (weight.record.is_of_graph or is_traced()):
        raise NotImplementedError(
            f"HybridTensor{of_layers(weight)}: {who} of a persistent weight in compiled code, or of an alias that "
            "compiled code returned: it has the quantized faces, not the high-precision values; leave both out of "
            "torch.compile"
        )


@table.register(aten.equal.default)
def _equal(func: Func, args: Args, kwargs: Kwargs) -> bool:
    a, b = args
    if not isinstance(a, HybridTensor) or not isinstance(b, HybridTensor):
        raise TypeError(
            f"equal: two hybrid tensors are required, got {type(a).__name__} and {type(b).__name__}"
        )
    for name in a.inner_names:
        mine, theirs = getattr(a, name), getattr(b, name)
        if (mine is None) != (theirs is None) or type(mine) is not type(theirs):
            return False
        if mine is not None and not torch.equal(mine, theirs):
            return False
    return True
