"""Handlers of aten operators that the tensor classes share; a class registers those that fit it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from hybridtensor.ops.library import is_captured
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.master_tensor import MasterWeight
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, OpTable, name_of_weights, of_layers
from hybridtensor.subclasses.structure import flatten
from hybridtensor.subclasses.wrapper import WrapperTensor

aten = torch.ops.aten

FACTORIES = (
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
)
"""What makes a new tensor of a weight's class: FSDP2 pads shards so, and ``to_empty`` allocates so."""

PLAIN_LIKE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_full.default,
    aten.new_ones.default,
)


PRODUCTS = (
    aten.addmv.default,
    aten.bmm.default,
    aten.baddbmm.default,
)
"""Products that no class quantizes where they come from below autograd."""


FUNCTIONAL = [
    getattr(torch.ops._c10d_functional, name).default
    for name in (
        "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce", "all_reduce_coalesced",
        "all_to_all_single", "broadcast", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
    )
    if torch.distributed.is_available()
]  # fmt: skip
if (
    torch.distributed.is_available()
):  # private: what ``redistribute`` calls on a GPU from one dimension to another
    FUNCTIONAL.append(torch.ops._dtensor.shard_dim_alltoall.default)
"""Collectives whose results are tensors of their own: they read a weight."""


def refuse_products(table: OpTable, *funcs: Func) -> None:
    """Raise for products below autograd with weights of layers."""

    @table.register(*funcs)
    def _refuse(func: Func, args: Args, kwargs: Kwargs) -> NoReturn:
        raise below_autograd(func, (args, kwargs))


def below_autograd(product: object, values: object) -> NotImplementedError:
    """Return the error of a product that no layer sees, where only one of a layer's three could be quantized, and the
    input not at all."""
    return NotImplementedError(
        f"{product}: a product below autograd with {name_of_weights(values)}, where only some of its three products "
        "could be quantized; call F.linear in the layer's forward (the one that takes DTensors), x @ weight.t(), "
        "weight @ x, or F.grouped_mm for experts, or leave the layer out of quantize_ (keep_bf16)"
    )


def alias(tensor: Tensor) -> Tensor:
    """Return a new wrapper object over the same plain tensors, recursively."""
    if not isinstance(tensor, WrapperTensor):
        return tensor
    return tensor.map_inner(alias).alias_of(tensor)


W = TypeVar("W", bound=WrapperTensor)
SliceAlong = Callable[[W, int, int, int, int], Tensor]
"""A class's slice: ``(tensor, dim, start, stop, step)``, with the bounds normalized."""
Select = Callable[[W, int], Tensor]
"""A class's way to one matrix of a stack: ``(tensor, index)``, with the index in range."""


def bound(args: Args, kwargs: Kwargs, *names_and_defaults: tuple[str, object]) -> list[Any]:
    """Return the operands after the first, with defaults."""
    given = dict(zip((name for name, _ in names_and_defaults), args[1:], strict=False)) | kwargs
    return [given.get(name, default) for name, default in names_and_defaults]


def _dim_of(x: Tensor, dim: int) -> int:
    """Return a dimension counted from the first; raise IndexError if the tensor does not have it."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"{type(x).__name__}: a dimension from {-x.dim()} to {x.dim() - 1} is required, got {dim}; pass one that "
            f"{tuple(x.shape)} has"
        )
    return dim % x.dim()


def slice_bounds(args: Args, kwargs: Kwargs) -> tuple[int, int, int, int]:
    """Normalize the operands of ``aten.slice`` to ``(dim, start, stop, step)``, in range."""
    dim, start, stop, step = bound(
        args, kwargs, ("dim", 0), ("start", None), ("end", None), ("step", 1)
    )
    shape = args[0].shape
    dim = _dim_of(args[0], dim)
    start, stop, step = slice(start, sys.maxsize if stop is None else stop, step).indices(
        shape[dim]
    )
    # ``x[5:2]`` is empty in torch, of no negative size.
    return dim, start, max(start, stop), step


def register_common(table: OpTable, slice_: SliceAlong[W], select: Select[W]) -> None:
    """Register aliasing, no-op views, slicing, transposing, comparison of sizes and memory, and plain ``*_like``."""
    table.register(aten.detach.default, aten.alias.default, aten.lift_fresh.default)(_alias)
    table.register(aten.as_strided.default)(_as_strided)
    table.register(aten.is_same_size.default)(_is_same_size)
    table.register(aten.is_set_to.default)(_is_set_to)
    table.register(aten.is_pinned.default)(_is_pinned)
    table.register(*PLAIN_LIKE)(plain_like)
    _register_slicing(table, slice_)
    _register_selecting(table, select)
    _register_transposing(table)


def _alias(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    return alias(args[0])


def _as_strided(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    size, stride, offset = bound(
        args, kwargs, ("size", None), ("stride", None), ("storage_offset", 0)
    )
    x = args[0]
    if tuple(size) == tuple(x.shape) and tuple(stride) == tuple(x.stride()) and not offset:
        return alias(x)
    raise NotImplementedError(
        f"as_strided: only the tensor's own shape {tuple(x.shape)} and strides are representable by "
        f"{x!r}, got {tuple(size)}, {tuple(stride)}, offset {offset}; dequantize first"
    )


def _is_same_size(func: Func, args: Args, kwargs: Kwargs) -> bool:
    return bool(args[0].shape == args[1].shape)


def _is_set_to(func: Func, args: Args, kwargs: Kwargs) -> bool:
    """Return whether two tensors are the same part of the same memory."""
    first, second = (flatten(tensor)[0] for tensor in args)
    return len(first) == len(second) and all(map(func, first, second))


def _is_pinned(func: Func, args: Args, kwargs: Kwargs) -> bool:
    return all(tensor.is_pinned() for tensor in flatten(args[0])[0])


def plain_like(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Return a plain tensor: optimizer state must never be quantized by accident."""
    x = args[0]
    options = {"dtype": x.dtype, "device": x.device}
    options |= {name: value for name, value in kwargs.items() if value is not None}
    made: Tensor = func(outline(x), *args[1:], **options)
    return made


def _register_slicing(table: OpTable, slice_: SliceAlong[W]) -> None:
    def cut(x: W, dim: int, start: int, stop: int, step: int) -> Tensor:
        is_whole = (start, stop, step) == (0, x.shape[dim], 1)
        return alias(x) if is_whole else slice_(x, dim, start, stop, step)

    @table.register(aten.slice.Tensor)
    def _slice(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
        return cut(args[0], *slice_bounds(args, kwargs))

    @table.register(aten.split.Tensor, aten.split_with_sizes.default)
    def _split(func: Func, args: Args, kwargs: Kwargs) -> list[Tensor]:
        name = "split_size" if func is aten.split.Tensor else "split_sizes"
        sizes, dim = bound(args, kwargs, (name, None), ("dim", 0))
        x = args[0]
        dim = _dim_of(x, dim)
        extent = x.shape[dim]
        _require_parts(x, sizes, extent)
        # fully_shard splits a parameter into parts of one size: this is the moment to refuse it
        if (
            isinstance(x, torch.nn.Parameter)
            and isinstance(sizes, int)
            and hasattr(x, "check_shards")
        ):
            x.check_shards(sizes, dim)
        if isinstance(sizes, int):
            sizes = (
                [min(sizes, extent - start) for start in range(0, extent, sizes)] if extent else [0]
            )
        ends = list(itertools.accumulate(sizes))
        return [cut(x, dim, end - size, end, 1) for size, end in zip(sizes, ends, strict=True)]


def _require_parts(x: Tensor, sizes: int | list[int], extent: int) -> None:
    """Raise ValueError unless ``sizes``, of all parts or of each, make up ``extent``."""
    if isinstance(sizes, int):
        fits = sizes > 0 or sizes == extent == 0
    else:
        fits = sum(sizes) == extent and all(size >= 0 for size in sizes)
    if not fits:
        raise ValueError(
            f"split: parts that make up {extent} are required, got {sizes} of {tuple(x.shape)}; pass one positive "
            "size, or sizes of that sum"
        )


def _register_selecting(table: OpTable, select: Select[W]) -> None:
    @table.register(aten.select.int)
    def _select(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
        x, (dim, index) = args[0], bound(args, kwargs, ("dim", 0), ("index", 0))
        count = _require_stack(x, dim)
        if not -count <= index < count:
            raise IndexError(
                f"select: an index from {-count} to {count - 1} is required, got {index}"
            )
        return select(x, index % count)

    @table.register(aten.unbind.int)
    def _unbind(func: Func, args: Args, kwargs: Kwargs) -> list[Tensor]:
        x, (dim,) = args[0], bound(args, kwargs, ("dim", 0))
        return [select(x, index) for index in range(_require_stack(x, dim))]


def _require_stack(x: Tensor, dim: int) -> int:
    """Return the number of matrices of a stack cut along ``dim``; raise NotImplementedError for anything else."""
    if _dim_of(x, dim) or not getattr(x, "is_stack", False):
        raise NotImplementedError(
            f"select: only the matrices of a stack can be selected, got dimension {dim} of "
            f"{x!r}{of_layers(x)}; dequantize first"
        )
    return x.shape[0]


def _register_transposing(table: OpTable) -> None:
    """Register every transposing operator as the class's ``t``."""

    @table.register(aten.transpose.int)
    def _transpose(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
        dims = {_dim_of(args[0], dim) for dim in args[1:3]}
        return alias(args[0]) if len(dims) == 1 else _t(table, args[0], dims)

    @table.register(aten.permute.default)
    def _permute(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
        x = args[0]
        order = [_dim_of(x, dim) for dim in args[1]]
        if sorted(order) != list(range(x.dim())):
            raise ValueError(
                f"permute: each of {x.dim()} dimensions is required once, got {tuple(args[1])}; pass all of them"
            )
        moved = {dim for place, dim in enumerate(order) if dim != place}
        return _t(table, x, moved) if moved else alias(x)


def _t(table: OpTable, x: Tensor, dims: set[int]) -> Tensor:
    if x.dim() != 2 and not (dims == {1, 2} and getattr(x, "is_stack", False)):
        raise NotImplementedError(
            f"transpose: only a matrix, or each of a stack, can be transposed, got dimensions {dims} of "
            f"{x!r}{of_layers(x)}; dequantize first"
        )
    transposed: Tensor = table.call(aten.t.default, (x,), {})
    return transposed


def to_copy_options(x: Tensor, kwargs: Kwargs) -> tuple[torch.dtype, Kwargs]:
    """Return the new nominal dtype and the other operands of ``aten._to_copy``; raise TypeError for an integer
    dtype."""
    dtype = kwargs.get("dtype") or x.dtype
    if not dtype.is_floating_point:
        raise TypeError(
            f"{type(x).__name__}: a floating-point dtype is required, got {dtype}; dequantize first"
        )
    kept = {
        k: v
        for k, v in kwargs.items()
        if k in ("device", "non_blocking", "pin_memory") and v is not None
    }
    return dtype, kept


def values_for(dst: Tensor, src: WrapperTensor) -> Tensor:
    """Return the values of ``src`` for a copy into a plain tensor, rounded once where that is possible."""
    is_possible = dst.is_floating_point() and dst.dtype.itemsize > 1
    return src.dequantize(dst.dtype if is_possible else None)


def copy_inner_(dst: WrapperTensor, src: WrapperTensor, *, non_blocking: bool) -> None:
    """Copy each inner tensor that ``dst`` has from the one of ``src``."""
    for name in dst.parts()[0]:
        getattr(dst, name).copy_(getattr(src, name), non_blocking=non_blocking)


def outline(x: Tensor) -> Tensor:
    """Return a tensor without memory that lies as ``x``: torch works out how its views and copies lie."""
    return torch.empty_strided(x.shape, x.stride(), device="meta")


def to_copy_stride(x: Tensor, memory_format: torch.memory_format | None) -> tuple[int, ...] | None:
    """Return the strides of a copy: this tensor's, without the gaps of a slice, or contiguous if requested."""
    if memory_format in (None, torch.preserve_format):
        reach = sum((extent - 1) * by for extent, by in zip(x.shape, x.stride(), strict=True))
        like = x if reach + 1 == x.numel() else torch.empty_like(outline(x))
        return tuple(like.stride())
    if memory_format == torch.contiguous_format:
        return None
    raise ValueError(
        f"{type(x).__name__}: contiguous or preserved strides are possible, got {memory_format}"
    )


def assignable(weight: InterceptingTensor, value: object) -> Tensor:
    """Return the plain values assigned to ``weight.data``; raise if FSDP2 or a CUDA graph prevents the assignment."""
    who = f"{type(weight).__name__}.data{of_layers(weight)}"
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{who}: a floating-point tensor is required, got {got}; cast it")
    record = weight.record
    if record.shard is not None or record.gathered is not None:
        raise RuntimeError(
            f"{who}: FSDP2 manages the memory of this weight, and would go on with what it has; "
            "write values with copy_() instead"
        )
    if getattr(weight, "_fsdp_flattened", False):  # private: FullyShardedDataParallel's mark
        raise NotImplementedError(
            f"{who}: FullyShardedDataParallel(use_orig_params=True) compares addresses of parameters, "
            "which a quantized weight has none of; pass use_orig_params=False, or use fully_shard"
        )
    if is_captured():
        raise RuntimeError(
            f"{who}: a CUDA graph is being captured, whose replays would use the former memory; "
            "write values with copy_() instead"
        )
    if isinstance(value, WrapperTensor):
        return value.plain if isinstance(value, MasterWeight) else value.dequantize()
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        raise TypeError(
            f"{who}: a plain dense tensor is required, got {type(value).__name__} "
            f"({value.layout}); convert it"
        )
    return value.detach()
