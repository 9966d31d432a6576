"""A recipe for each kind of layer."""

from __future__ import annotations

from typing import NamedTuple

from hybridtensor.arguments import require_kind
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.named import from_name
from hybridtensor.recipes.words import RecipeName


class ByType(NamedTuple):
    """A recipe for each kind of layer; ``by_type`` makes it.

    Attributes:
        linear: Recipe of linear layers, or None to leave them alone.
        grouped_linear: Recipe of experts, or None.
    """

    linear: HybridConfig | None
    grouped_linear: HybridConfig | None


def by_type(
    *,
    linear: RecipeName | str | HybridConfig | None = None,
    grouped_linear: RecipeName | str | HybridConfig | None = None,
) -> ByType:
    """Return a recipe that depends on what a layer is, for ``quantize_``.

    ::

        ht.quantize_(model, ht.recipes.by_type(linear="mxfp8", grouped_linear="fp8_rowwise"))

    Args:
        linear: Recipe of linear layers: a name, a spec or a config; None leaves them alone.
        grouped_linear: Recipe of experts.

    Raises:
        ValueError: If a name is unknown, or there is no recipe at all.
        TypeError: If one is of another kind.
    """
    made: list[HybridConfig | None] = []
    for kind, recipe in (("linear", linear), ("grouped_linear", grouped_linear)):
        kinds = (str, HybridConfig, type(None))
        require_kind("by_type", f"a recipe's name, a config or None as {kind}", recipe, kinds)
        made.append(from_name(recipe) if isinstance(recipe, str) else recipe)
    if made == [None, None]:
        raise ValueError(
            "by_type: a recipe for a kind of layer is required, got none; give linear or grouped_linear"
        )
    return ByType(*made)
