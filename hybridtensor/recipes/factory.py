"""A config by a function that chooses a quantizer for each role."""

from __future__ import annotations

from collections.abc import Callable

from hybridtensor.quantizers import Quantizer
from hybridtensor.recipes.config import HybridConfig, QuantizerRole
from hybridtensor.state import ROLES


def from_factory(
    factory: Callable[[QuantizerRole], Quantizer], name: str, kind: str = "linear"
) -> HybridConfig:
    """Call a factory for a layer's three quantizers; raise TypeError or RuntimeError naming the role."""
    made: dict[str, Quantizer] = {}
    for role in (QuantizerRole(kind, tensor_type, name) for tensor_type in ROLES):
        try:
            made[role.tensor_type] = factory(role)
        except Exception as error:
            raise RuntimeError(
                f"quantizer factory: {factory!r} raised for {role}: {error}"
            ) from error
        if not isinstance(made[role.tensor_type], Quantizer):
            raise TypeError(
                f"quantizer factory: a quantizer is required, {factory!r} returned "
                f"{made[role.tensor_type]!r} for {role}; return IdentityQuantizer() for high "
                "precision"
            )
    return HybridConfig(*(made[role] for role in ROLES))
