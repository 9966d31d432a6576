"""The aten operators of ``MasterWeight``: those of its high-precision tensor, with writes counted.

There are four kinds of handlers: *views and copies* return a ``MasterWeight``; *writes* and *collectives* run in place
and are recorded; *reads* return plain tensors. Matrix products belong to ``hybridtensor.linear``, which quantizes them,
and reach this table only from below autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtensor.subclasses.master_tensor import MasterWeight, mark_all_written
from hybridtensor.subclasses.observing import observe_read
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, of_layers, written_by
from hybridtensor.subclasses.operators.common import (
    FACTORIES,
    FUNCTIONAL,
    PRODUCTS,
    assignable,
    refuse_products,
)
from hybridtensor.subclasses.operators.reads import READS, WRITES

aten = torch.ops.aten
table = MasterWeight.ops

VIEWS = [
    aten.alias.default, aten.as_strided.default, aten.detach.default, aten.diagonal.default, aten.expand.default,
    aten.lift_fresh.default, aten.permute.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.squeeze.default, aten.squeeze.dim, aten.t.default, aten.transpose.int,
    aten.unbind.int, aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default,
]  # fmt: skip

COPIES = [aten.clone.default, aten._pin_memory.default, aten._to_copy.default, *FACTORIES]

COLLECTIVES = [
    getattr(torch.ops.c10d, name).default
    for name in (
        "_allgather_base_", "_reduce_scatter_base_", "allgather_", "allreduce_", "allreduce_coalesced_", "alltoall_",
        "alltoall_base_", "broadcast_", "recv_", "recv_any_source_", "reduce_", "reduce_scatter_", "scatter_", "send",
    )
    if torch.distributed.is_available()
]  # fmt: skip

FUNCTIONAL_WRITES = [
    getattr(torch.ops._c10d_functional, name).default
    for name in ("all_reduce_", "all_reduce_coalesced_", "broadcast_")
    if torch.distributed.is_available()
]


def _unwrap(value: object) -> object:
    """Replace master weights by their plain tensors, also in nested lists."""
    if isinstance(value, MasterWeight):
        return value.plain
    if isinstance(value, (list, tuple)):
        # Lists of foreach optimizers have a tensor per parameter, most of them plain: these need no call.
        return [item if type(item) is Tensor else _unwrap(item) for item in value]
    return value


def _run(func: Func, args: Args, kwargs: Kwargs) -> Any:
    unwrapped = [_unwrap(a) for a in args]
    return func(*unwrapped, **{name: _unwrap(value) for name, value in kwargs.items()})


@table.register(*VIEWS)
def _view(func: Func, args: Args, kwargs: Kwargs) -> MasterWeight | list[MasterWeight]:
    x: MasterWeight = args[0]
    if func in (aten.detach.default, aten.alias.default, aten.lift_fresh.default):
        return x.alias(x.plain)  # the same tensor object: one version counter for all
    out = _run(func, args, kwargs)
    if isinstance(out, (list, tuple)):
        return [x.alias(piece) for piece in out]
    return x.alias(out)


@table.register(*COPIES)
def _copy(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    out = _run(func, args, kwargs)
    if not out.is_floating_point():
        return out  # type: ignore[no-any-return]
    made = MasterWeight(out, args[0].config).like(args[0])
    made.record.is_new = args[0].record.is_new + (func in FACTORIES)
    return made


@table.register(aten.t_.default)
def _transpose_in_place(func: Func, args: Args, kwargs: Kwargs) -> MasterWeight:
    """Transpose as ``nn.init.orthogonal_`` does with what ``new_empty`` made."""
    weight: MasterWeight = args[0]
    if not weight.record.is_new:
        table.refuse(func, args, kwargs)
    weight.become(weight.alias(weight.plain.t()))
    weight.mark_written()
    return weight


@table.register(aten.set_data.default)
def _set_data(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Assign ``weight.data`` as for plain tensors."""
    weight, value = args
    values = assignable(weight, value)
    if values is weight.plain:
        weight.mark_written()
    else:
        weight.take_memory(values)


@table.register(*WRITES, *FUNCTIONAL_WRITES)
def _write(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run in place and record the write on every master weight that the schema mutates."""
    out = _run(func, args, kwargs)
    written = list(written_by(func, args, kwargs))
    mark_all_written([weight for weight in written if isinstance(weight, MasterWeight)])
    # The wrappers that were passed, where ``func`` returned their plain tensors.
    if not func._schema.returns:
        return None
    return written if isinstance(out, list) else written[0]


@table.register_others
def _write_of_others(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run other libraries' operators on the plain tensors, and record the writes."""
    out = _run(func, args, kwargs)
    mark_all_written(list(_weights(list(written_by(func, args, kwargs)))))
    weights = {id(weight.plain): weight for weight in _weights((*args, *kwargs.values()))}
    return tree_map_only(Tensor, lambda tensor: weights.get(id(tensor), tensor), out)


@table.register(*COLLECTIVES)
def _collective(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run a collective on the plain tensors; schemas of collectives do not declare what they mutate."""
    out = _run(func, args, kwargs)
    # Also those that are only sent: a write too many quantizes once more, one too few would keep old faces.
    mark_all_written(list(_weights((*args, *kwargs.values()))))
    if func is _SCATTER:
        for part in _weights(args[0]):
            _check_part(part)
            part.record.receive_weight()
    return out


_SCATTER = torch.ops.c10d.scatter_.default if torch.distributed.is_available() else None


def _check_part(part: MasterWeight) -> None:
    """Raise ValueError if a rank's part of a layer cuts blocks of its formats."""
    name = "" if part.state is None else part.state.name
    *_, rows, columns = part.shape
    part.config.check_sizes(
        rows, columns, f"distribute_tensor: layer {name}, a part {[rows, columns]}"
    )


def _wait(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Wait for an in-place functional collective."""
    _run(func, args, kwargs)
    x: MasterWeight = args[0]
    x.mark_written()
    return x


if torch.distributed.is_available():
    table.register(torch.ops._c10d_functional.wait_tensor.default)(_wait)


def _weights(value: object) -> Iterator[MasterWeight]:
    """Yield the master weights in an argument, also in lists."""
    if isinstance(value, MasterWeight):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _weights(item)


_BY_NUMBER = (aten.index.Tensor, aten.index_select.default)


# The bits of a weight, as optimizers read and write them that round at random, have torch's version counter of it.
@table.register(*READS, *FUNCTIONAL, aten.view.dtype)
def _read(func: Func, args: Args, kwargs: Kwargs) -> object:
    for weight in _weights((*args, *kwargs.values())):
        observe_read(weight, func)
    if func in _BY_NUMBER and isinstance(args[0], MasterWeight) and args[0].dim() == 3:
        raise NotImplementedError(
            f"MasterWeight{of_layers(args)}: {func} would copy the weights of experts {tuple(args[0].shape)} for each "
            "token, as values; multiply them by F.grouped_mm (in Transformers experts_implementation='grouped_mm'), or "
            "read them by dequantize()"
        )
    return _run(func, args, kwargs)


table.register_elementwise(reading=_read, writing=_write)
refuse_products(table, aten.mm.default, aten.addmm.default, aten.linear.default, *PRODUCTS)
