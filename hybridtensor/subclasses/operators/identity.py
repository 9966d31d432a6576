"""The aten operators of ``IdentityTensor``: the same operator on its source, wrapped again."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, overloads
from hybridtensor.subclasses.operators.common import bound, register_common
from hybridtensor.subclasses.operators.matmul import register_matmul
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor

aten = torch.ops.aten
table = IdentityTensor.ops


def _slice(x: IdentityTensor, dim: int, start: int, stop: int, step: int) -> IdentityTensor:
    return IdentityTensor(aten.slice.Tensor(x.source, dim, start, stop, step))


def _select(x: IdentityTensor, index: int) -> IdentityTensor:
    return IdentityTensor(aten.select.int(x.source, 0, index))


register_common(table, _slice, _select)
register_matmul(table)


@table.register(aten.t.default)
def _t(func: Func, args: Args, kwargs: Kwargs) -> IdentityTensor:
    source, turned = args[0].source, args[0].turned
    if turned is None:
        return IdentityTensor(source.t() if source.dim() < 3 else source.transpose(-2, -1))
    made = IdentityTensor(turned)
    made.turned = source
    return made


@table.register(
    aten.view.default,
    aten._unsafe_view.default,
    aten.clone.default,
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
)
def _on_source(func: Func, args: Args, kwargs: Kwargs) -> IdentityTensor:
    return IdentityTensor(func(args[0].source, *args[1:], **kwargs))


@table.register(aten.copy_.default)
def _copy_(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    dst: Tensor = args[0]
    src = args[1]
    non_blocking = bound(args[1:], kwargs, ("non_blocking", False))[0]
    values = src.source if isinstance(src, IdentityTensor) else src
    if isinstance(values, QuantizedTensor) and not _holds_quantized(dst):
        values = values.dequantize()
    (dst.source if isinstance(dst, IdentityTensor) else dst).copy_(
        values, non_blocking=non_blocking
    )
    return dst


def _holds_quantized(x: Tensor) -> bool:
    return isinstance(x, QuantizedTensor) or (
        isinstance(x, IdentityTensor) and isinstance(x.source, QuantizedTensor)
    )


@table.register(*overloads(aten.fill_, aten.zero_, aten.uniform_, aten.normal_))
def _fill_(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    x: IdentityTensor = args[0]
    func(x.source, *args[1:], **kwargs)
    return x


@table.register(aten.equal.default)
def _equal(func: Func, args: Args, kwargs: Kwargs) -> bool:
    a, b = (x.source if isinstance(x, IdentityTensor) else x for x in args)
    return torch.equal(a, b)
