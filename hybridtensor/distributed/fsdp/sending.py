"""What a rank sends of its local shard: high-precision values, or faces in a payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.payload import PayloadCast, WeightPayload
from hybridtensor.distributed.fsdp.plan import COLUMN, DIRECTIONS, ROW, Plan
from hybridtensor.linear.operands import Weight
from hybridtensor.state import LayerState, StateTensors
from hybridtensor.subclasses import HybridTensor, MasterWeight

if TYPE_CHECKING:
    from hybridtensor.distributed.fsdp.bundle import Bundle
    from hybridtensor.distributed.fsdp.shard import Shard


class HookMetadata(NamedTuple):
    """What ``pre_all_gather`` passes to ``post_all_gather`` of a weight.

    Attributes:
        wanted: Whether the rowwise face is wanted, and the columnwise one.
        bundle: The weights whose bytes are sent together, or None if the weight is sent alone, in high precision.
        number: Number of the weight in the bundle.
        has_work: Whether it sends the bundle's bytes, or is the last one, at which all have arrived.
    """

    wanted: tuple[bool, bool]
    bundle: Bundle | None = None
    number: int = 0
    has_work: bool = False


HookResult: TypeAlias = "tuple[tuple[Tensor, ...], tuple[Shard, HookMetadata]]"
"""What the first hook returns: the tensors that this rank sends, and for the second hook the shard and metadata."""


def whole_values(tensor: Weight, dtype: torch.dtype, padded_size: tuple[int, ...]) -> Tensor:
    """Return the local shard in ``dtype``, padded as FSDP2 requires."""
    values = (
        tensor.plain.to(dtype) if isinstance(tensor, MasterWeight) else tensor.dequantize(dtype)
    ).detach()
    if tuple(values.shape) != padded_size:
        padded = values.new_zeros(padded_size)
        padded[: values.shape[0]] = values
        return padded
    return values.contiguous()


def fill(
    payload: WeightPayload, tensor: Weight, shard: Shard, *, runs: bool = True
) -> PayloadCast | None:
    """Quantize the local shard, or a copy of it, into the payload; with ``runs=False`` return a single prepared cast
    instead of running it."""
    plan, names, dtype = payload.sending
    if "values" in names:
        target = payload.tensors["values"][0]
        target.copy_(_values(tensor, plan, dtype).reshape(target.shape))
    rowwise, columnwise = (direction in names for direction in DIRECTIONS)
    if not rowwise and not columnwise:
        return None
    if isinstance(tensor, HybridTensor):
        as_multiplied = tensor.detach().transpose(-2, -1) if tensor.is_transposed else tensor
        made = as_multiplied.faces(rowwise=rowwise, columnwise=columnwise, dtype=dtype)
        first = 0
    else:
        values = tensor.source
        part = shard.part(values, gathered_state(tensor))
        out = [target for name in DIRECTIONS for target in payload.tensors.get(name, [])]
        prepared = part.prepare_into(out, rowwise=rowwise, columnwise=columnwise)
        if prepared is not None:
            cast = PayloadCast(*prepared, out)
            # Values that the recipe rounds first are a temporary copy, which a launch for the whole
            # group, later, could no longer read.
            if values is tensor.plain and not runs:
                return cast
            cast.run(values)
            return None
        made, first = part.faces(rowwise=rowwise, columnwise=columnwise)
    for direction, face in zip(DIRECTIONS, made, strict=True):
        if face is not None and not face.follows_rowwise and direction in names:
            payload.fill(direction, face, first, tensor.shape[0])
    return None


def gathered_state(tensor: Weight) -> StateTensors | None:
    """Return the state of a weight's layer for casts of a gather, whose amaxes count if a backward follows on any
    rank."""
    state, layer = tensor.state, tensor.record.layer
    if state is None or not isinstance(layer, LayerState) or layer.record is None:
        return state
    # Also in forwards that record nothing (dry runs, ``without_recording``): FSDP2 may leave the weights gathered for
    # the one that follows.
    return state._replace(amax=layer.record.for_gather())


def _values(tensor: Weight, plan: Plan, dtype: torch.dtype) -> Tensor:
    """Return the high-precision data of a face, in ``dtype`` or to be rounded to it."""
    if isinstance(tensor, MasterWeight):
        return tensor.source
    row = plan.row.kind == "values"
    direction = ROW if row != tensor.is_transposed else COLUMN  # faces lie as the weight is stored
    return tensor.require_face(direction, name="weight", gemm="fully_shard").dequantize(dtype)
