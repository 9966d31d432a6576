"""``hybridtensor recipes``: the recipes that have names, and the words of all others."""

from __future__ import annotations

import argparse

from hybridtensor.commands.common import add_json, print_json
from hybridtensor.recipe_table import TABLE

FORMATS = {
    "bf16": "no quantization",
    "fp8": "a scale per tensor; E4M3, gradients E5M2",
    "fp8_rowwise": "E4M3, a scale per row",
    "fp8_block": "E4M3, a scale per 1x128, of weights per 128x128",
    "fp8_delayed": "as fp8, scaled by the amaxes of past steps",
    "mxfp8": "E4M3, a power-of-two scale per 32",
    "mxfp4": "E2M1, a power-of-two scale per 32; rotation in grad_weight, gradients rounded at random",
    "nvfp4": "E2M1, a scale per 16 (weights 16x16); rotation in grad_weight, gradients rounded at random",
}
"""The words of specs."""
MODIFIERS = {
    "high_precision": "backward in high precision, of the original operands",
    "dequantized": "backward in high precision, of the forward's dequantized operands",
    "save_original_input": "save the input itself for backward, and quantize it there",
    "fast_accum": "backward accumulates FP8 products in fewer bits on Hopper",
    "bf16_weight_values": "round weights to bf16 before they are quantized",
    "keep_faces": "cache faces that could be recomputed: a weight's faces until the weight is written",
    "free_faces": "make each face of a weight when it is used, and cache none",
    "pow2_scale": "fp8: scales are powers of two",
    "fp32_scale": "fp8_block: scales need not be powers of two",
    "e4m3_grad": "fp8, fp8_delayed: gradients in E4M3",
    "most_recent": "fp8_delayed: scale by the last step alone",
    "mx_two_d": "mxfp8, mxfp4: weights in blocks of 32x32",
    "mx_e5m2_grad": "mxfp8: gradients in E5M2",
    "mx_even": "mxfp4: the exponent of a scale is that of the amax, rounded to one mantissa bit",
    "mx_floor": "mxfp4: the exponent of a scale is that of the amax; clips",
    "one_d": "nvfp4: weights in blocks of 1x16",
    "nearest": "nvfp4, mxfp4: gradients rounded to nearest",
    "no_hadamard": "nvfp4, mxfp4: no rotation",
    "row_scaled_input": "nvfp4: an fp32 scale per row of the input in the forward",
    "four_over_six": "nvfp4: the largest value of a weight or input block becomes 6 or 4, whichever has less error",
    "four_over_six_weight": "four_over_six for weights only",
    "four_over_six_input": "four_over_six for inputs only",
    "four_over_six_mse": "four_over_six: squared errors instead of absolute ones",
    "four_over_six_448": "four_over_six: block scales up to 448 instead of 256",
    "eden": "nvfp4: backward rounds scales at random instead of elements, under random rotations of 128 values",
    "rowwise_dequantized": "columnwise faces of input and weight are quantized from the dequantized rowwise faces",
    "rowwise_dequantized_weight": "the same for the weight only",
}
"""The words after ``+``."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``recipes``."""
    add_json(command)


def run(given: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if given.json:
        named = [row._asdict() for row in TABLE]
        print_json({"recipes": named, "formats": FORMATS, "modifiers": MODIFIERS})
        return 0
    print("Named recipes:")
    for row in TABLE:
        same = "" if row.spec == row.name else f" ({row.spec})"
        print(f"  {row.name}{same}\n      {row.promise}")
    print(
        "\nFormats: one for all products, or output/grad_input/grad_weight, as in fp8/fp8_rowwise/bf16; of a\n"
        "product's operands left:right, as in fp8_block:mxfp4:"
    )
    _print_words(FORMATS)
    print("\nModifiers, after a +, as in nvfp4+one_d+nearest:")
    _print_words(MODIFIERS)
    return 0


def _print_words(words: dict[str, str]) -> None:
    width = max(map(len, words))
    for word, meaning in words.items():
        print(f"  {word:{width}}  {meaning}")
