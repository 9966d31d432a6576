"""Operators on the values of weights that are ``HybridTensor``: in-place arithmetic, reads, collectives."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtensor.ops.face import bytewise
from hybridtensor.subclasses.hybrid_tensor import HybridTensor
from hybridtensor.subclasses.observing import observe_read
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, of_layers, overloads, written_by
from hybridtensor.subclasses.operators.common import FUNCTIONAL
from hybridtensor.subclasses.operators.hybrid import (
    present_values,
    requantize_,
    require_outside_graphs,
)
from hybridtensor.subclasses.operators.reads import READS, WRITES
from hybridtensor.subclasses.quantizing import mark_overwritten
from hybridtensor.subclasses.structure import flatten

aten = torch.ops.aten
table = HybridTensor.ops


@table.register_others
def _write(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run in high precision, then quantize what the schema mutates; a trainable weight needs a master for small
    updates."""
    # A frozen weight's values are its dequantized faces. In those of a trainable weight small changes would be lost.
    weights: dict[int, tuple[HybridTensor, Tensor]] = {}

    def values(item: Tensor) -> Tensor:
        if not isinstance(item, HybridTensor):
            return item
        if item.config is None:
            table.refuse(func, args, kwargs)
        # One copy of values per weight, also where a list names it twice: both are then written,
        # and are quantized once.
        if id(item) not in weights:
            weights[id(item)] = item, present_values(item, str(func))
        return weights[id(item)][1]

    written = [id(item) for item in written_by(func, args, kwargs)]

    def beside(operand: object, target: object) -> object:
        """Return an operand of the weight's dtype in that of its values, which may be a master's."""
        if not (isinstance(operand, Tensor) and isinstance(target, HybridTensor)):
            return operand
        if id(operand) in written or operand.dtype != target.dtype:
            return operand
        return values(operand).to(values(target).dtype)

    first = args[0] if args else None
    if isinstance(first, (list, tuple)):  # of foreach optimizers, with an operand for each
        args = tuple(
            [beside(*pair) for pair in zip(each, first, strict=False)]
            if isinstance(each, (list, tuple)) and len(each) == len(first)
            else each
            for each in args
        )
    else:
        args = tuple(beside(each, first) for each in args)
    plain_args, plain_kwargs = tree_map_only(Tensor, values, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    for weight, changed in weights.values():
        if id(weight) in written:
            requantize_(weight, changed)
    of = {id(changed): weight for weight, changed in weights.values()}
    return tree_map_only(Tensor, lambda tensor: of.get(id(tensor), tensor), out)


@table.register(*overloads(aten.fill_, aten.zero_, aten.uniform_, aten.normal_))
def _fill_(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Draw or fill in high precision, then quantize."""
    values = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    return requantize_(args[0], func(values, *args[1:], **kwargs))


WRITES_OF_WEIGHTS = [op for op in WRITES if op not in table]
table.register(*WRITES_OF_WEIGHTS)(_write)


JOINS = (aten.cat.default, aten.stack.default)


@table.register(*JOINS)
def _join(func: Func, args: Args, kwargs: Kwargs) -> NoReturn:
    """Raise NotImplementedError: who joins weights writes the parts back, and quantized twice they change."""
    if not any(isinstance(leaf, HybridTensor) and leaf.config for leaf in tree_leaves(args)):
        table.refuse(func, args, kwargs)
    raise NotImplementedError(
        f"HybridTensor{of_layers(args)}: {func} would join persistent weights, as DistributedDataParallel does before "
        "it writes them; use fully_shard in its place, or call quantize_ without persistent=True"
    )


@table.register(aten.embedding.default)
def _embedding(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Look up rows of a weight that is the local part of a DTensor, of which ``F.embedding`` sees only that."""
    weight: HybridTensor = args[0]
    if weight.config is None:
        table.refuse(func, args, kwargs)
    observe_read(weight, "embedding")
    return func(weight.rows(), *args[1:], **kwargs)  # type: ignore[no-any-return]


READS_OF_WEIGHTS = [op for op in READS if op not in table]


@table.register(*READS_OF_WEIGHTS)
def _read(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Compute with the values of a weight's ``data``, as adapters and averaging do."""
    plain_args, plain_kwargs = tree_map_only(
        HybridTensor, lambda item: values_to_read(item, func), (args, kwargs)
    )
    return func(*plain_args, **plain_kwargs)


table.register_elementwise(reading=_read, writing=_write)


@HybridTensor.functions.register(torch.norm_except_dim)
def _norm(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Raise TypeError for ``weight_norm`` of a persistent weight: torch takes a NotImplementedError of a
    parametrization for one that has no inverse."""
    weight = args[0]
    if isinstance(weight, HybridTensor) and isinstance(weight, torch.nn.Parameter):
        raise TypeError(
            f"weight_norm: a weight in high precision is required, got one{of_layers(weight)} that is persistent; call "
            "quantize_ without persistent=True, or leave the layer out of it (keep_bf16)"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def values_to_read(weight: HybridTensor, func: Func, in_training: bool = False) -> Tensor:
    """Return plain values of a weight's ``data`` for ``func``.

    Raises:
        NotImplementedError: For a parameter, which models compute with, and where the values are gone.
    """
    if weight.config is None:
        table.refuse(func, (weight,), {})
    if weight.requires_grad or isinstance(weight, torch.nn.Parameter) or weight.is_gathered:
        _refuse_values(weight, func)
    require_outside_graphs(weight, func)
    observe_read(weight, func, in_training=in_training)
    known = weight.known_values
    if known is not None:
        return known.to(weight.dtype)
    if weight.record.values is not None:
        raise NotImplementedError(
            f"HybridTensor{of_layers(weight)}: {func} of a trainable weight needs its values in high precision, got "
            "faces only, in which small changes are lost, as those of an average; read the masters of "
            "hybridtensor.optim.MasterWeights, or dequantize()"
        )
    return weight.dequantize()


@table.register(*FUNCTIONAL)
def _gather(func: Func, args: Args, kwargs: Kwargs) -> object:
    """All-gather the highest-precision values available, as ``full_tensor()`` does."""

    def values(item: HybridTensor) -> Tensor:
        observe_read(item, func)
        known = item.known_values
        return (item.dequantize() if known is None else known.to(item.dtype)).contiguous()

    return func(*tree_map_only(HybridTensor, values, args), **kwargs)


def _refuse_values(weight: HybridTensor, func: Func) -> NoReturn:
    """Raise NotImplementedError for an operator that would compute with a weight in high precision."""
    which, instead = "that is persistent", "its data, call quantize_ without persistent=True"
    if weight.is_gathered:
        which, instead = "that FSDP2 gathered", "dequantize()"
    raise NotImplementedError(
        f"HybridTensor{of_layers(weight)}: {func} would compute with the values of a weight {which}, of which there "
        f"are quantized faces only; multiply it by F.linear, read {instead}, or leave the layer out of quantize_ "
        "(keep_bf16)"
    )


def _wait(work: torch.ScriptObject) -> None:
    """Wait for a collective, unless NCCL orders it on the stream."""
    unboxed = torch.distributed.Work.unbox(work)
    if unboxed is not None:
        unboxed.wait()


def _sendable(tensor: Tensor) -> Tensor:
    """Return a contiguous copy for collectives, as bytes where backends lack FP8."""
    # NCCL takes no strided tensors, as scales of blocks are, which lie block by block.
    return bytewise(tensor).clone(memory_format=torch.contiguous_format)


def _receive(tensor: Tensor, sent: Tensor) -> bool:
    """Copy a received ``_sendable`` tensor back; return whether it differs."""
    own = bytewise(tensor)
    changed = not torch.equal(own, sent)
    own.copy_(sent)
    return changed


def _broadcast_(func: Func, args: Args, kwargs: Kwargs) -> object:
    (weight,), *others = args
    out, changed = None, False
    for tensor in flatten(weight)[0]:
        sent = _sendable(tensor)
        out = func([sent], *others, **kwargs)
        _wait(out[1])
        changed = _receive(tensor, sent) or changed
    if changed:  # the rank that sends keeps its values in high precision
        mark_overwritten(weight)
        weight.high_precision.mark_copied(weight.dequantize, weight.taken)
    return out


def _scatter_(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Scatter the bytes of each rank's part, and its high-precision values."""
    (part,), given, *others = args
    original = part.original
    out = None
    sources: list[list[Tensor]] = [flatten(source)[0] for source in (given[0] if given else [])]
    targets = flatten(part)[0]
    if original is not None:
        targets = [*targets, original]
        for source, weight in zip(sources, given[0] if given else [], strict=True):
            source.append(present_values(weight, "scatter_"))
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
    part.record.receive_weight()
    mark_overwritten(part)
    return out


def _allreduce_(func: Func, args: Args, kwargs: Kwargs) -> object:
    """All-reduce in high precision, then quantize."""
    weights, *others = args
    values = [
        present_values(t, "allreduce_") if isinstance(t, HybridTensor) else t for t in weights
    ]
    out = func(values, *others, **kwargs)
    _wait(out[1])
    for weight, reduced in zip(weights, values, strict=True):
        if isinstance(weight, HybridTensor):
            requantize_(weight, reduced)
    return out


COLLECTIVES = {}
if torch.distributed.is_available():
    c10d = torch.ops.c10d
    COLLECTIVES = {c10d.broadcast_.default: _broadcast_, c10d.allreduce_.default: _allreduce_}
    COLLECTIVES[c10d.scatter_.default] = _scatter_
for collective, handler in COLLECTIVES.items():
    table.register(collective)(handler)
