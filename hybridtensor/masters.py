"""Persistent parameters and their fp32 masters."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridtensor.dtensor import local
from hybridtensor.subclasses import HybridTensor


def follows_from_master(parameter: Tensor) -> bool:
    """Return whether a persistent parameter, or its local shard, always equals its quantized master."""
    part = persistent_part(parameter)
    return part.high_precision.follows and part.recipe.weight.repeatable


def persistent_part(parameter: Tensor) -> HybridTensor:
    """Return the local persistent weight of a parameter; raise TypeError if it is none any more."""
    part = local(parameter)
    if not isinstance(part, HybridTensor):
        raise TypeError(
            f"MasterWeights: a persistent parameter became {type(part).__name__}; make the "
            "optimizer anew"
        )
    return part


def values_of(part: HybridTensor) -> Tensor:
    """Return the high-precision values of a persistent parameter, or its dequantized ones without a master."""
    values = part.high_precision.current
    return (part.dequantize() if values is None else values).detach()


def sharded_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return ``part`` as the local tensor of a DTensor that is sharded like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    return DTensor.from_local(
        part, mesh, placements, shape=shape, stride=parameter.stride(), run_check=False
    )
