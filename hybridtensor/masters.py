"""The values of weights in high precision, and the fp32 masters of persistent parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridtensor.dtensor import local
from hybridtensor.ranks import PATIENCE, Ranks, patience
from hybridtensor.subclasses import HybridTensor, MasterWeight

T = TypeVar("T")


def high_precision_values(weight: Tensor) -> Tensor:
    """Return the highest-precision values available of a weight, or of its local shard, as a plain tensor."""
    if isinstance(weight, MasterWeight):
        return weight.plain.detach()
    known = weight.known_values if isinstance(weight, HybridTensor) else weight
    return (weight.dequantize() if known is None else known).detach()


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


def set_master(parameter: Tensor, master: Tensor, *, follows: bool, loaded: bool = False) -> None:
    """Let ``master`` hold the values of a persistent parameter; see ``HighPrecisionValues.set_master``."""
    part = persistent_part(parameter)
    part.record.values = part.high_precision
    part.record.values.set_master(local(master), follows=follows, loaded=loaded)


def raising_everywhere(closure: Callable[[], T], parameters: Iterable[Tensor]) -> Callable[[], T]:
    """Wrap a closure so that an error of one rank is raised on all that hold parts of the parameters.

    These quantize the parameters together after each evaluation, and would wait for it.
    """

    def finished() -> T:
        loss = closure()
        patience()  # other ranks may be behind until gradients are reduced
        return loss

    meshes = dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor))
    evaluate = finished if meshes else closure
    for group in dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()):
        evaluate = functools.partial(Ranks("MasterWeights.step", group, PATIENCE).each, evaluate)
    return evaluate
