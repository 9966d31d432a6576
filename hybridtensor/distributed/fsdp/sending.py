"""What a rank sends of its part of a weight: values, or faces in a payload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.payload import Payload, Remake
from hybridtensor.distributed.fsdp.plan import COLUMN, ROW, Plan
from hybridtensor.distributed.fsdp.scales import Part
from hybridtensor.ops.library import is_recorded
from hybridtensor.state import StateTensors
from hybridtensor.subclasses import HybridTensor, MasterWeight

Weight: TypeAlias = MasterWeight | HybridTensor
"""A rank's part of a converted weight, or the weight that FSDP2 gathered."""

_DIRECTIONS = (ROW, COLUMN)


def whole_values(tensor: Weight, dtype: torch.dtype, padded_size: tuple[int, ...]) -> Tensor:
    """Return the values of this rank's part in ``dtype``, padded as FSDP2 wants them."""
    values = (
        tensor.plain.to(dtype) if isinstance(tensor, MasterWeight) else tensor.dequantize(dtype)
    ).detach()
    if tuple(values.shape) != padded_size:
        padded = values.new_zeros(padded_size)
        padded[: values.shape[0]] = values
        return padded
    return values.contiguous()


def fill(
    payload: Payload,
    tensor: Weight,
    part_of: Callable[[Tensor, StateTensors | None], Part],
) -> Remake | None:
    """Make the bytes of this rank's part; return the cast that makes them again, if one cast does.

    Args:
        payload: Holds the bytes.
        tensor: This rank's part.
        part_of: Gives values all that they are quantized by.
    """
    if "values" in payload.names:
        target = payload.tensors["values"][0]
        target.copy_(_values(tensor, payload.plan, payload.dtype).reshape(target.shape))
    rowwise, columnwise = (direction in payload.names for direction in _DIRECTIONS)
    if not rowwise and not columnwise:
        return None
    if isinstance(tensor, HybridTensor):
        whole: Any = tensor.detach().transpose(-2, -1) if tensor.is_transposed else tensor
        made = whole.faces(rowwise=rowwise, columnwise=columnwise, dtype=payload.dtype)
        first = 0
    else:
        values = tensor.source
        part = part_of(values, tensor.state)
        out = [target for name in _DIRECTIONS for target in payload.tensors.get(name, [])]
        prepared = part.prepare_into(out, rowwise=rowwise, columnwise=columnwise)
        if prepared is not None:
            again = Remake(*prepared, out)
            again.run(values)
            return again if values is tensor.plain else None  # of what is not there next time
        made, first = part.faces(rowwise=rowwise, columnwise=columnwise)
    for direction, face in zip(_DIRECTIONS, made, strict=True):
        if face is not None and not face.follows_rowwise and direction in payload.names:
            payload.fill(direction, face, first, tensor.shape[0])
    return None


def _values(tensor: Weight, plan: Plan, dtype: torch.dtype) -> Tensor:
    """Return the values of a face in high precision, in ``dtype`` or to be rounded to it."""
    if isinstance(tensor, MasterWeight):
        return tensor.source
    row = plan.row.kind == "values"
    direction = ROW if row != tensor.is_transposed else COLUMN  # faces lie as the weight is stored
    return tensor.require_face(direction, name="weight", gemm="fully_shard").dequantize(dtype)


def can_be_kept(tensor: Weight, own: object, names: tuple[str, ...]) -> TypeGuard[MasterWeight]:
    """Return whether what is sent is made of a rank's part, quantized, and can be sent again until that is written.

    Args:
        tensor: What is sent.
        own: This rank's part, of which ``tensor`` may be a copy on the device of the computation.
        names: What the bytes are.
    """
    return (
        "values" not in names
        and isinstance(tensor, MasterWeight)
        and tensor is own
        and not (
            tensor.record.replayed or getattr(tensor.layer, "replayed", False) or is_recorded()
        )
    )
