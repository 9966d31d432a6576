"""Between DTensors and their local tensors."""

from __future__ import annotations

import math
from typing import TypeVar, overload

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard  # private

T = TypeVar("T", bound=Tensor)


@overload
def local(tensor: DTensor) -> Tensor:
    """Return this rank's part."""


@overload
def local(tensor: T) -> T:
    """Return the tensor itself."""


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; any other tensor unchanged."""
    # The private ``_local_tensor``: the public ``to_local`` would be recorded by autograd, and
    # returns another object. Without it nothing of a sharded weight is found.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local(like: Tensor, part: Tensor) -> Tensor:
    """Return ``part``, in any dtype, as the local tensor of a DTensor like ``like``, or unchanged."""
    if not isinstance(like, DTensor):
        return part
    # The private ``_spec`` and constructor: the public ``from_local`` would be recorded by
    # autograd.
    spec = like._spec
    if part.dtype != like.dtype:
        meta = TensorMeta(like.shape, like.stride(), part.dtype)
        spec = spec.shallow_copy_with_tensor_meta(meta)
    return DTensor(part, spec, requires_grad=part.requires_grad)


def has_several_sections(tensor: DTensor) -> bool:
    """Return whether a rank's part of a tensor is several sections of it, as of two matrices stored in one."""
    placements = tensor.placements
    for dim, placement in enumerate(placements):
        if isinstance(placement, _StridedShard) and tensor.device_mesh.size(dim) > 1:
            # FSDP2's, too, of what is then cut along the same dimension by as many ranks: one section
            then = [
                tensor.device_mesh.size(other)
                for other in range(dim + 1, len(placements))
                if placements[other] == Shard(placement.dim)
            ]
            if placement.split_factor != math.prod(then):
                return True
    return False


def mesh_along(tensor: DTensor, name: str | None) -> DeviceMesh:
    """Return the mesh of a DTensor, or its dimension ``name`` if it has several."""
    mesh = tensor.device_mesh
    return mesh if mesh.ndim == 1 or name is None else mesh[name]


def placement_along(tensor: DTensor, name: str | None) -> Placement:
    """Return the placement of a DTensor along the mesh dimension ``name``."""
    names = tensor.device_mesh.mesh_dim_names or ()
    return tensor.placements[names.index(name) if name in names else 0]


def name_of(mesh: DeviceMesh) -> str | None:
    """Return the name of the first dimension of a mesh, or None."""
    return mesh.mesh_dim_names[0] if mesh.mesh_dim_names else None
