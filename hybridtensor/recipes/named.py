"""Named recipes: a table of names, specs and sources, and a function for each.

Formats per product (*left* x *right* operand; E4 = FP8 E4M3, E5 = FP8 E5M2, MX = MXFP8 E4M3, M4 = MXFP4, NV = NVFP4,
HP = high precision; the weight is the right operand of the first two products, the input of the third):

| recipe                                        | output    | grad_input | grad_weight |
|-----------------------------------------------|-----------|------------|-------------|
| ``bf16``                                      | HP x HP   | HP x HP    | HP x HP     |
| ``fp8``                                       | E4 x E4   | E5 x E4    | E5 x E4     |
| ``fp8_delayed``                               | E4 x E4   | E5 x E4    | E5 x E4     |
| ``fp8_rowwise``                               | E4 x E4   | E4 x E4    | E4 x E4     |
| ``fp8_rowwise_hp_grad_weight``                | E4 x E4   | E4 x E4    | HP x HP     |
| ``fp8_block``                                 | E4 x E4   | E4 x E4    | E4 x E4     |
| ``fp8_high_precision_backward``               | E4 x E4   | HP x HP    | HP x HP     |
| ``fp8_dequantized_backward``                  | E4 x E4   | HP x HP    | HP x HP     |
| ``mxfp8``                                     | MX x MX   | MX x MX    | MX x MX     |
| ``mxfp8_dequantized_backward``                | MX x MX   | HP x HP    | HP x HP     |
| ``high_precision_fwd_mxfp8_bwd``              | HP x HP   | MX x MX    | MX x MX     |
| ``nvfp4``                                     | NV x NV   | NV~ x NV   | NV~ h NV    |
| ``nvfp4_1d_weight``                           | NV x NV   | NV~ x NV'  | NV~ h NV    |
| ``nvfp4_dequantized_backward``                | NV x NV   | HP x HP    | HP x HP     |
| ``mxfp8_fwd_nvfp4_bwd``                       | MX x MX   | NV~ x NV'  | NV~ h NV    |
| ``nvfp4_fwd_mxfp8_bwd``                       | NV x NV   | MX x MX'   | MX x MX'    |
| ``nvfp4_row_scaled_fwd_mxfp8_bwd``            | NVr x NV  | MX x MX'   | MX x MX'    |
| ``nvfp4_row_scaled_fwd_high_precision_bwd``   | NVr x NV  | HP x HP    | HP x HP     |
| ``quartet2``                                  | NV6 x NV6 | NVe h NVe' | NVe h NVe'  |
| ``deepseek_v4_experts``                       | E4 x M4   | E4 x E4'   | E4 x E4     |
| ``gpt_oss_experts``                           | HP x M4   | HP x HP    | HP x HP     |

``~``: rounded stochastically. ``h``: both operands under the Hadamard rotation. ``'``: made from what the forward saw,
quantized a second time. ``r``: an fp32 scale per row. ``6``: four over six. ``e``: MS-EDEN. FP8 has a scale per tensor,
row or block as the name says; MX and M4 one per 32 values; NV one per 16, or per 16x16 of weights that are quantized
once for both directions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hybridtensor.arguments import nearest, require_text
from hybridtensor.quantizers import DelayedFloat8Quantizer, Float8Quantizer, Quantizer
from hybridtensor.recipe_table import TABLE
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import Faces
from hybridtensor.recipes.words import RecipeName

_ROWS = {row.name: row for row in TABLE}

Recipe = Callable[..., HybridConfig]
_recipes: dict[str, Recipe] = {}
RECIPES: Mapping[str, Recipe] = MappingProxyType(_recipes)


def _recipe(function: Recipe) -> Recipe:
    """Return a function of ``RECIPES`` with its docstring extended by the table's text."""
    row, options = _ROWS[function.__name__], function.__doc__
    example = f'    ht.quantize_(model, "{row.name}")  # or ht.recipes.{row.name}()'
    parts = [row.promise, "::", example, *([options] if options else []), f"Spec: ``{row.spec}``."]
    function.__doc__ = "\n\n".join([*parts, f"Source: {row.source}"])
    _recipes[row.name] = function
    return function


def _without_options(name: str) -> Callable[[], HybridConfig]:
    """Return the function of a recipe that has no options."""

    def recipe() -> HybridConfig:
        return HybridConfig.parse(_ROWS[name].spec)

    recipe.__name__ = recipe.__qualname__ = name
    return _recipe(recipe)


def _with_options(
    name: str, concerned: Callable[[Quantizer], bool], **options: object
) -> HybridConfig:
    """Return a recipe with ``options`` set on its ``concerned`` quantizers."""
    config = HybridConfig.parse(_ROWS[name].spec)
    faces = Faces.of_config(config)
    for operand, quantizer in faces.quantizers.items():
        if concerned(quantizer):
            faces.quantizers[operand] = dataclasses.replace(quantizer, **options)
    return HybridConfig(**faces.by_role())


def _with_pow2_scale(name: str, default: bool = False) -> Recipe:
    """Return the function of a recipe with current scaling."""

    def recipe(*, pow2_scale: bool = default) -> HybridConfig:
        """Return the recipe of the table; ``pow2_scale`` rounds encode scales down to powers of two."""
        return _with_options(
            name, lambda one: isinstance(one, Float8Quantizer), pow2_scale=pow2_scale
        )

    recipe.__name__ = recipe.__qualname__ = name
    return _recipe(recipe)


def _with_seed(name: str, what: str = "the random numbers of its rounding") -> Recipe:
    """Return the function of a recipe that rounds at random."""

    def recipe(*, seed: int = 0) -> HybridConfig:
        return _with_options(name, lambda one: one.stochastic, seed=seed)

    recipe.__doc__ = f"Return the recipe of the table; ``seed`` chooses {what}."
    recipe.__name__ = recipe.__qualname__ = name
    return _recipe(recipe)


bf16 = _without_options("bf16")
fp8 = _with_pow2_scale("fp8")


@_recipe
def fp8_delayed(
    *, margin: int = 0, history_length: int = 1024, algorithm: str = "max"
) -> HybridConfig:
    """Return the recipe of the table; see ``DelayedFloat8Quantizer`` for its options."""
    options = {"margin": margin, "history_length": history_length, "algorithm": algorithm}
    return _with_options(
        "fp8_delayed", lambda one: isinstance(one, DelayedFloat8Quantizer), **options
    )


fp8_rowwise = _with_pow2_scale("fp8_rowwise")
fp8_rowwise_hp_grad_weight = _without_options("fp8_rowwise_hp_grad_weight")
fp8_block = _with_pow2_scale("fp8_block", default=True)
fp8_high_precision_backward = _without_options("fp8_high_precision_backward")
fp8_dequantized_backward = _without_options("fp8_dequantized_backward")
mxfp8 = _without_options("mxfp8")
mxfp8_dequantized_backward = _without_options("mxfp8_dequantized_backward")
high_precision_fwd_mxfp8_bwd = _without_options("high_precision_fwd_mxfp8_bwd")
nvfp4 = _with_seed("nvfp4")
nvfp4_1d_weight = _with_seed("nvfp4_1d_weight")
nvfp4_dequantized_backward = _without_options("nvfp4_dequantized_backward")
mxfp8_fwd_nvfp4_bwd = _with_seed("mxfp8_fwd_nvfp4_bwd")
nvfp4_fwd_mxfp8_bwd = _without_options("nvfp4_fwd_mxfp8_bwd")
nvfp4_row_scaled_fwd_mxfp8_bwd = _without_options("nvfp4_row_scaled_fwd_mxfp8_bwd")
nvfp4_row_scaled_fwd_high_precision_bwd = _without_options(
    "nvfp4_row_scaled_fwd_high_precision_bwd"
)
quartet2 = _with_seed("quartet2", "its rotations and random numbers")
deepseek_v4_experts = _without_options("deepseek_v4_experts")
gpt_oss_experts = _without_options("gpt_oss_experts")


def from_name(name: RecipeName | str) -> HybridConfig:
    """Return the recipe called ``name``, or the config that ``HybridConfig.parse`` makes of it.

    ::

        config = ht.recipes.from_name("fp8+dequantized")

    Raises:
        TypeError: If it is no string.
        ValueError: If it is neither, with the nearest known name.
    """
    require_text("from_name", name=name)
    if name in RECIPES:
        return RECIPES[name]()
    try:
        return HybridConfig.parse(name)
    except ValueError as error:
        hint = "" if {*"+/:"} & {*name} else f"; or a recipe: {nearest(name, RECIPES)}"
        raise ValueError(f"{error}{hint}") from None
