"""The values of weights in high precision, and the fp32 masters of persistent parameters."""

from __future__ import annotations

from torch import Tensor

from hybridtensor.dtensor import local
from hybridtensor.subclasses import HybridTensor, MasterWeight


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
