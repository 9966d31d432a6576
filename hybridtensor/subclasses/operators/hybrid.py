"""What ``HybridTensor`` answers to aten operators: mostly the same operator on both faces."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hybridtensor.subclasses.hybrid_tensor import HybridTensor, is_of
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.observing import note_read
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, overloads
from hybridtensor.subclasses.operators.common import assignable, bound, register_common
from hybridtensor.subclasses.operators.matmul import register_matmul, require_reader
from hybridtensor.subclasses.operators.reads import READS
from hybridtensor.subclasses.quantizing import note_overwritten, refresh_, take_values_
from hybridtensor.subclasses.structure import flatten
from hybridtensor.subclasses.wrapper import WrapperTensor

aten = torch.ops.aten
table = HybridTensor.ops
T = TypeVar("T", bound=Tensor)


class _OnTensor(Protocol):
    """An operator whose result is of its operand's class."""

    def __call__(self, tensor: T, /) -> T: ...


def _slice(x: HybridTensor, dim: int, start: int, stop: int, step: int) -> HybridTensor:
    """Slice the faces, and what the weight was made from: shards begin from it."""
    return _view(x, lambda tensor: aten.slice.Tensor(tensor, dim, start, stop, step))


def _select(x: HybridTensor, index: int) -> HybridTensor:
    return _view(x, lambda tensor: aten.select.int(tensor, 0, index))


def _view(x: HybridTensor, fn: _OnTensor) -> HybridTensor:
    return _on_faces(x, fn).view_of(x, fn)


def _on_faces(x: HybridTensor, fn: _OnTensor) -> HybridTensor:
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
    return HybridTensor(row, column, x.config).like(x)


register_common(table, _slice, _select)
register_matmul(table)


@table.register(aten.t.default)
def _t(func: Func, args: Args, kwargs: Kwargs) -> HybridTensor:
    """Transpose: the columnwise face becomes the rowwise one, and the other way round."""
    turn: _OnTensor = aten.t.default if args[0].dim() < 3 else _turned
    row, column = (
        None if face is None else turn(face) for face in (args[0].rowwise, args[0].columnwise)
    )
    made = HybridTensor(column, row, args[0].config).view_of(args[0], turn)
    made.swapped = not args[0].swapped
    return made


def _turned(tensor: T) -> T:
    """Return each matrix of a stack transposed."""
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
    return made


@table.register(aten.view.default, aten._unsafe_view.default)
def _views(func: Func, args: Args, kwargs: Kwargs) -> HybridTensor:
    return _view(args[0], lambda tensor: func(tensor, *args[1:], **kwargs))


@table.register(aten.new_empty.default)
def _both_faces(func: Func, args: Args, kwargs: Kwargs) -> HybridTensor:
    if func is aten.new_empty.default and args[0].config is not None and tuple(args[1]) == (0,):
        raise ValueError(
            f"fully_shard: rows for every rank are required, got a persistent weight with fewer, "
            f"of shards {tuple(args[0].shape)}; leave it out of quantize_, or use fewer ranks"
        )
    return _on_faces(args[0], lambda face: func(face, *args[1:], **kwargs))


@table.register(aten.is_pinned.default)
def _is_pinned(func: Func, args: Args, kwargs: Kwargs) -> bool:
    return all(tensor.is_pinned() for tensor in flatten(args[0])[0])


@table.register(aten.copy_.default)
def _copy_(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Dequantize into a plain tensor; copy bytes between equal faces; quantize anything else again."""
    dst, src = args[0], args[1]
    non_blocking = bound(args[1:], kwargs, ("non_blocking", False))[0]
    if not isinstance(dst, HybridTensor):
        require_reader("copy_", src)
        dst.copy_(src.dequantize(dst.dtype), non_blocking=non_blocking)
        return dst  # type: ignore[no-any-return]
    if isinstance(src, HybridTensor) and _same_kind(dst, src):
        unchanged = dst.high_precision.loaded and bool(_equal(aten.equal.default, (dst, src), {}))
        for name in dst.inner_names:
            if getattr(dst, name) is not None:
                getattr(dst, name).copy_(getattr(src, name), non_blocking=non_blocking)
        note_overwritten(dst)
        current = None if src.record.values is None else src.high_precision.current
        known = None if current is None else (src.taken(current), src.high_precision.follows)
        dst.high_precision.note_copied(src.dequantize, dst.taken, known=known, unchanged=unchanged)
        return dst
    values = src.dequantize() if isinstance(src, WrapperTensor) else src
    return _requantize_(dst, values.to(dst.device).expand(dst.shape))


def _same_kind(dst: HybridTensor, src: HybridTensor) -> bool:
    """Whether ``src`` has every face of ``dst``, in its format, so that bytes can be copied."""
    for name in dst.inner_names:
        mine, theirs = getattr(dst, name), getattr(src, name)
        if mine is not None and (theirs is None or _kind(mine) != _kind(theirs)):
            return False
    return dst.shape == src.shape


def _kind(face: Tensor) -> tuple[object, ...]:
    source = getattr(face, "source", None)
    return type(face), getattr(face, "format", None), None if source is None else _kind(source)


def _requantize_(dst: HybridTensor, values: Tensor) -> HybridTensor:
    if dst.config is None:
        raise NotImplementedError(
            f"in-place write: {dst!r} has no recipe to quantize the new values with; "
            "use quantizer.update_(tensor, values)"
        )
    refresh_(dst, values)
    return dst


@table.register(aten.set_data.default)
def _set_data(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Take other faces, as ``weight.data = values`` takes other memory; the master follows."""
    weight, value = args
    if weight.config is None:
        raise NotImplementedError(
            f"HybridTensor.data: a weight with a recipe is required, got {weight!r}; use copy_()"
        )
    values = assignable(weight, value)
    if not isinstance(value, HybridTensor):
        take_values_(weight, value, values)
    elif value.record is not weight.record:
        known = _known_values(value)
        take_values_(weight, value, values if known is None else known)


def _known_values(weight: HybridTensor) -> Tensor | None:
    """Return the high-precision values of a weight, in memory that may change; or None."""
    current = None if weight.record.values is None else weight.high_precision.current
    return None if current is None else weight.taken(current)


UPDATES = overloads(
    aten.add_, aten.addcdiv_, aten.addcmul_, aten.clamp_, aten.clamp_max_, aten.clamp_min_, aten.div_, aten.lerp_,
    aten.masked_fill_, aten.mul_, aten.neg_, aten.sub_,
)  # fmt: skip


@table.register(*UPDATES)
def _update_(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Change the values in high precision, then quantize.

    Those of a frozen weight are what its faces hold. A trainable weight needs better ones: in its
    faces, small changes would be lost.
    """
    dst, *others = args
    if not isinstance(dst, HybridTensor) or any(isinstance(t, WrapperTensor) for t in others):
        raise NotImplementedError(
            f"HybridTensor: {func} of a weight and plain tensors is required, got "
            f"{', '.join(type(t).__name__ for t in args)}; call dequantize() first"
        )
    return _requantize_(dst, func(_present_values(dst, str(func)), *others, **kwargs))


def _present_values(weight: HybridTensor, who: str) -> Tensor:
    """Return a copy of the best values that there are of a weight which is about to change."""
    known = _known_values(weight)
    if known is not None:
        return known.clone()
    if weight.requires_grad or (weight.record.values is not None and weight.high_precision.is_lost):
        raise NotImplementedError(
            f"HybridTensor: {who} of a trainable weight needs its values in high precision, got "
            "faces only, in which small changes are lost; step it through "
            "hybridtensor.optim.MasterWeights"
        )
    return weight.dequantize()


@table.register(*overloads(aten.fill_, aten.zero_, aten.uniform_, aten.normal_))
def _fill_(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Draw or fill in high precision, then quantize."""
    values = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    return _requantize_(args[0], func(values, *args[1:], **kwargs))


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


# Who joins weights writes the parts back, as DistributedDataParallel does: quantized twice, they change
_JOINS = (aten.cat.default, aten.stack.default)
READS_OF_WEIGHTS = [op for op in READS if op not in table and op not in _JOINS]


@table.register(*READS_OF_WEIGHTS)
def _read(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Give plain values of a weight's ``data``, as merging and initializing adapters and averaging read it: in
    high precision where they are known, as in-place operators take them.

    A parameter itself raises: a model that computes with it would do so in high precision without a
    word.
    """

    def values(item: object) -> object:
        if isinstance(item, (list, tuple)):
            return [values(inner) for inner in item]
        if not isinstance(item, HybridTensor):
            return item
        if item.config is None or item.requires_grad or isinstance(item, torch.nn.Parameter):
            table.refuse(func)
        note_read(item, func)
        known = _known_values(item)
        if known is not None:
            return known.to(item.dtype)
        if item.record.values is not None:
            raise NotImplementedError(
                f"HybridTensor: {func} of a trainable weight needs its values in high precision, got faces only, in "
                "which small changes are lost, as those of an average; read the masters of "
                "hybridtensor.optim.MasterWeights, or dequantize()"
            )
        return item.dequantize()

    return func(*map(values, args), **{name: values(item) for name, item in kwargs.items()})


def _wait(work: torch.ScriptObject) -> None:
    """Wait for a collective; there is nothing to wait for where NCCL orders it on the stream."""
    unboxed = torch.distributed.Work.unbox(work)
    if unboxed is not None:
        unboxed.wait()


def _sendable(tensor: Tensor) -> Tensor:
    """Return a copy that collectives take: contiguous, which scales that lie block by block are not,
    and bytes where backends know no FP8.
    """
    own = tensor if tensor.itemsize > 1 else tensor.view(torch.uint8)
    return own.clone(memory_format=torch.contiguous_format)


def _receive(tensor: Tensor, sent: Tensor) -> bool:
    """Write what ``_sendable`` gave, and a collective filled; return whether it is another."""
    own = tensor if tensor.itemsize > 1 else tensor.view(torch.uint8)
    changed = not torch.equal(own, sent)
    own.copy_(sent)
    return changed


def _broadcast_(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Send the bytes of the faces, so that all ranks have the same."""
    (weight,), *others = args
    out, changed = None, False
    for tensor in flatten(weight)[0]:
        sent = _sendable(tensor)
        out = func([sent], *others, **kwargs)
        _wait(out[1])
        changed = _receive(tensor, sent) or changed
    if changed:  # the rank that sends keeps its values in high precision
        note_overwritten(weight)
        weight.high_precision.note_copied(weight.dequantize, weight.taken)
    return out


def _scatter_(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Send each rank the bytes of its part, and the values in high precision that go with them."""
    (part,), given, *others = args
    original = part.original
    out = None
    sources: list[list[Tensor]] = [flatten(source)[0] for source in (given[0] if given else [])]
    targets = flatten(part)[0]
    if original is not None:
        targets = [*targets, original]
        for source, weight in zip(sources, given[0] if given else [], strict=True):
            source.append(_present_values(weight, "scatter_"))
    for i, tensor in enumerate(targets):
        sent = _sendable(tensor)
        out = func(
            [sent],
            [[_sendable(source[i]) for source in sources]] if given else [],
            *others,
            **kwargs,
        )
        _wait(out[1])
        _receive(tensor, sent)
    note_overwritten(part)
    return out


def _allreduce_(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Reduce values in high precision, then quantize."""
    weights, *others = args
    values = [
        _present_values(t, "allreduce_") if isinstance(t, HybridTensor) else t for t in weights
    ]
    out = func(values, *others, **kwargs)
    _wait(out[1])
    for weight, reduced in zip(weights, values, strict=True):
        if isinstance(weight, HybridTensor):
            _requantize_(weight, reduced)
    return out


COLLECTIVES = {}
if torch.distributed.is_available():
    c10d = torch.ops.c10d
    COLLECTIVES = {c10d.broadcast_.default: _broadcast_, c10d.allreduce_.default: _allreduce_}
    COLLECTIVES[c10d.scatter_.default] = _scatter_
for collective, handler in COLLECTIVES.items():
    table.register(collective)(handler)
