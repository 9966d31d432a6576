"""What to try where a format has more noise than expected."""

from __future__ import annotations

import dataclasses

from hybridtensor.formats import REGISTRY, Format
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS, Spec
from hybridtensor.watching.judging import Judged
from hybridtensor.watching.records import FaceRow

_NOT_FINITE = (
    "a look at the step before, at the learning rate and at loss scaling: NaN and Inf come from the "
    "values, whatever the format"
)


def remedy(one: Judged, recipe: str) -> str:
    """Suggest a recipe with a wider format in the product, or BF16 for the layer."""
    if one.not_finite is not None:
        return _NOT_FINITE
    product = _product_of(one)
    words = _wider(_formats(one))
    if "fp8_delayed" in recipe and one.row.statistics.get("overflows%", 0.0) > 0:
        words = ("fp8",)  # scales of former steps are too small for this one
    changed = ((word, _changed(recipe, product, word)) for word in words)
    tried = [
        f"the recipe {spec} for this layer ({word} for {product}: {_WHY[word]})"
        for word, spec in changed
        if spec is not None
    ]
    if one.row.layer != "<root>":
        tried.append(f"keep_bf16=[{one.row.layer!r}]")
    elif not tried:
        tried.append("bf16 for this product")
    return ", or ".join(tried)


_WHY = {
    "fp8": "scales of the step itself, elements of 8 bits",
    "fp8_rowwise": "a scale per row, which an outlier elsewhere does not move",
    "mxfp8": "a scale per 32 values, which an outlier elsewhere does not move",
    "bf16": "no quantization",
}


def _wider(formats: list[Format]) -> tuple[str, ...]:
    """Return wider formats to try: smaller scale groups first, then more bits."""
    if any(fmt.elements_per_byte > 1 for fmt in formats):
        return ("mxfp8",)
    if any(fmt.block == (None, None) for fmt in formats):
        return ("fp8_rowwise", "mxfp8")
    if any(fmt.block[1] is None for fmt in formats):
        return ("mxfp8",)
    return ("bf16",)


def _formats(one: Judged) -> list[Format]:
    names = (one.row.format,) if isinstance(one.row, FaceRow) else one.row.formats
    found = (REGISTRY.get(name.removesuffix(", dequantized")) for name in names)
    return [fmt for fmt in found if fmt is not None and not fmt.is_identity]


def _product_of(one: Judged) -> str:
    """Return the product of a finding, or that which a face is an operand of."""
    for gemm in GEMMS:
        if one.row.name in (".".join(gemm.left), ".".join(gemm.right)):
            return gemm.name
    return one.row.name


def _changed(recipe: str, product: str, word: str) -> str | None:
    """Replace a product's word in a recipe; None if that is invalid or no change."""
    names = [gemm.name for gemm in GEMMS]
    if product not in names:
        return None
    try:
        spec = Spec.parse(recipe)
        words = list(spec.words)
        words[names.index(product)] = word
        changed = dataclasses.replace(spec, words=(words[0], words[1], words[2]))
        before = HybridConfig.parse(recipe)
        # a modifier of the former word may have nothing to change any more
        for modifiers in (changed.modifiers, ()):
            text = str(dataclasses.replace(changed, modifiers=modifiers))
            try:
                return text if HybridConfig.parse(text) != before else None
            except ValueError:
                continue
    except ValueError:
        pass
    return None
