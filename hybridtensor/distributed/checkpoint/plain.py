"""Converted weights as plain tensors in the same memory, which is what checkpoints store.

A ``MasterWeight`` becomes its plain tensor. A ``HybridTensor`` becomes a dictionary of its faces' tensors,
``{"rowwise": {"qdata": ..., "scale": ...}, "columnwise": {...}}``, without a face that is requantized from the other
one. A DTensor of either becomes a DTensor, or a dictionary of DTensors, of the local shard. Nothing is copied: loading
into a result loads into the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel

from hybridtensor.dtensor import local, with_local
from hybridtensor.state.keys import WRAPPERS
from hybridtensor.subclasses import (
    FaceTensor,
    HybridTensor,
    IdentityTensor,
    MasterWeight,
    QuantizedTensor,
)
from hybridtensor.subclasses.followers import follows_rowwise, inner_tensors
from hybridtensor.subclasses.wrapper import contiguous_strides

StateDict: TypeAlias = dict[str, Any]
"""Names to tensors, numbers, and dictionaries and lists of them; or to what has a state dict."""

FaceTensors: TypeAlias = "Mapping[str, Tensor | FaceTensors]"
"""The plain tensors of a face, or of several, by name."""


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters under the names of the unwrapped model, tied ones under each name."""
    # The private tables, here and below: the public iterators leave tied names out
    for prefix, module in _modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}{name}", parameter


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters, as ``named_parameters`` yields them, and then the buffers of the state dict."""
    buffers = (
        (f"{prefix}{name}", buffer)
        for prefix, module in _modules(model)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )
    return [*named_parameters(model), *buffers]


def _modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those in it, each with what the names of its tensors begin with, which leaves out wrappers."""
    yield prefix, module
    for name, child in module._modules.items():
        hidden = name in WRAPPERS or (
            isinstance(module, DistributedDataParallel) and name == "module"
        )
        if child is not None:
            yield from _modules(child, prefix if hidden else f"{prefix}{name}.")


def plain(state: object) -> Any:
    """Return nested dictionaries and lists with plain tensors in place of converted weights.

    ::

        torch.save(checkpoint.plain({"model": model.state_dict()}), "model.pt")
    """
    if isinstance(state, Tensor):
        weight = local(state)
        return faces(state, weight) if isinstance(weight, HybridTensor) else plain_weight(state)
    if isinstance(state, Mapping):
        return {name: plain(value) for name, value in state.items()}
    # A named tuple is constructed from its fields, not from one iterable: it is stored as it is.
    if isinstance(state, (list, tuple)) and not hasattr(state, "_fields"):
        return type(state)(plain(value) for value in state)
    return state


def plain_weight(value: Tensor) -> Tensor:
    """Return the plain tensor of a master weight, or a DTensor of it; anything else as it is."""
    own = local(value)
    if not isinstance(own, MasterWeight):
        return value
    return with_local(value, own.master)


def _as_part_of(
    whole: DTensor,
    tensor: Tensor,
    size: tuple[int, ...],
    placements: tuple[Placement, ...] | None = None,
) -> DTensor:
    """Return ``tensor`` as the local tensor of a DTensor of ``size`` over the ranks of ``whole``."""
    # torch's private constructor and spec: ``from_local`` would be recorded by autograd. A torch
    # that changes them fails here, when a sharded weight is saved or loaded.
    meta = TensorMeta(torch.Size(size), contiguous_strides(size), tensor.dtype)
    spec = DTensorSpec(whole.device_mesh, tuple(placements or whole.placements), tensor_meta=meta)
    return DTensor(tensor, spec, requires_grad=False)


def memory_like(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate zeros of the shape of a tensor, in parts like it."""
    own = local(value)
    return with_local(value, torch.zeros(own.shape, dtype=dtype, device=own.device))


def faces(value: Tensor, weight: HybridTensor) -> FaceTensors:
    """Return the tensors of a persistent weight's faces, except a columnwise face requantized from the rowwise data."""
    found = {}
    for direction in weight.inner_names:
        face: FaceTensor | None = getattr(weight, direction)
        if face is not None and not (direction == "columnwise" and follows_rowwise(weight)):
            found[direction] = _face(value, face)
    return found


def _face(value: Tensor, face: FaceTensor) -> FaceTensors:
    if isinstance(face, IdentityTensor) and isinstance(face.source, QuantizedTensor):
        return {"source": _face(value, face.source)}
    tensors = inner_tensors(face)
    if isinstance(value, DTensor):
        return {name: _part_of_face(value, face, name, tensor) for name, tensor in tensors.items()}
    return dict(tensors)


def _part_of_face(whole: DTensor, face: FaceTensor, name: str, tensor: Tensor) -> DTensor:
    """Return one tensor of a local shard's face as a DTensor of that tensor in the whole face."""
    if isinstance(face, IdentityTensor):
        return _as_part_of(whole, tensor, tuple(whole.shape))
    if face.is_stack:  # whole experts, whose tensors follow each other
        if any(not isinstance(p, Replicate) and _cut_dim(p) != 0 for p in whole.placements):
            raise NotImplementedError(
                f"checkpoint: experts {tuple(whole.shape)} are placed as {whole.placements}, and only faces "
                "of whole ones can be stored; save masters only (faces=False)"
            )
        return _as_part_of(whole, tensor, (whole.shape[0], *tensor.shape[1:]))
    flipped = face.axis == 0
    rows, columns = reversed(whole.shape) if flipped else whole.shape
    fmt = face.format
    sizes = {
        "qdata": (rows, columns // fmt.elements_per_byte),
        "scale": fmt.scale_shape(rows, columns),
        "tensor_scale": fmt.tensor_scale_shape(rows, columns) or (0, 0),
    }
    blocks = {
        "qdata": (1, fmt.elements_per_byte),
        "scale": fmt.block,
        "tensor_scale": fmt.tensor_block or (None, None),
    }
    placements = _placements(whole, blocks[name], flipped)
    return _as_part_of(whole, tensor, sizes[name], placements)


def _placements(
    whole: DTensor, block: tuple[int | None, int | None], flipped: bool
) -> tuple[Placement, ...]:
    """Return the placements of a tensor that has one entry per ``block`` elements of a sharded matrix."""
    chunk = list(whole.shape)
    found: list[Placement] = []
    for placement, ranks in zip(whole.placements, whole.device_mesh.shape, strict=True):
        if isinstance(placement, Replicate):
            found.append(placement)
            continue
        dim = _cut_dim(placement)
        if dim is None:
            raise NotImplementedError(
                f"checkpoint: a persistent weight {tuple(whole.shape)} is placed as {placement}, "
                "and only faces of replicated or evenly sharded ones can be stored; save masters "
                "only (faces=False)"
            )
        axis = 1 - dim if flipped else dim
        extent = block[axis]
        # Dimensions of the mesh cut one after the other: the second one cuts the chunks of the
        # first.
        chunk[dim] = -(-chunk[dim] // ranks)
        if extent is None:
            found.append(Replicate())
            continue
        if ranks > 1 and chunk[dim] % extent:
            raise ValueError(
                f"checkpoint: shards of {chunk[dim]} of {whole.shape[dim]} along dimension {dim} "
                f"cut blocks of {extent}; use another number of ranks, or save masters only "
                "(faces=False)"
            )
        found.append(
            _StridedShard(axis, split_factor=placement.split_factor)
            if isinstance(placement, _StridedShard)
            else Shard(axis)
        )
    return tuple(found)


def _cut_dim(placement: Placement) -> int | None:
    """Return the dimension along which ranks have even parts of a tensor, or None of another placement."""
    # FSDP2's of a dimension that tensor or expert parallelism cut before; private to torch
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def common_to_parts(value: Tensor) -> dict[str, DTensor]:
    """Return the tensors of a persistent weight's faces, by name, that are stored once for parts of the weight on
    several ranks: scales that span the cut."""
    weight = local(value)
    if not isinstance(value, DTensor) or not isinstance(weight, HybridTensor):
        return {}
    return {
        name: tensor
        for name, tensor in tensors_of(faces(value, weight))
        if isinstance(tensor, DTensor)
        and any(
            isinstance(mine, Replicate) and not isinstance(whole, Replicate)
            for mine, whole in zip(tensor.placements, value.placements, strict=True)
        )
    }


def tensors_of(state: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a state under the names that they are stored under."""
    if isinstance(state, Tensor):
        yield name, state
        return
    pairs = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, (list, tuple))
        else ()
    )
    for key, value in pairs:
        yield from tensors_of(value, f"{name}.{key}" if name else str(key))
