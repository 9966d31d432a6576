"""The words of a recipe's string: formats, modifiers and policies, and which quantizer each means where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from hybridtensor.formats import nearest
from hybridtensor.quantizers import (
    DelayedFloat8Quantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from hybridtensor.state import ROLES


class Gemm(NamedTuple):
    """One matrix product of a linear layer: its name and, per operand, the role and the direction of the face."""

    name: str
    left: tuple[str, str]
    right: tuple[str, str]


GEMMS = (
    Gemm("output", ("input", "rowwise"), ("weight", "rowwise")),
    Gemm("grad_input", ("grad_output", "rowwise"), ("weight", "columnwise")),
    Gemm("grad_weight", ("grad_output", "columnwise"), ("input", "columnwise")),
)
Word = Callable[[str, str], Quantizer]
Change = Callable[[str, Quantizer], Quantizer]


def _nvfp4(role: str, gemm: str) -> Quantizer:
    """Apply NVIDIA's recipe: 2-D weights, rotated operands of grad_weight, gradients rounded at random."""
    return NVFP4Quantizer(
        two_d=role == "weight",
        hadamard=gemm == "grad_weight",
        rounding="stochastic" if role == "grad_output" else "nearest",
    )


WORDS: dict[str, Word] = {
    "bf16": lambda role, gemm: IdentityQuantizer(),
    "fp8": lambda role, gemm: Float8Quantizer(dtype="e5m2" if role == "grad_output" else "e4m3"),
    "fp8_rowwise": lambda role, gemm: Float8Quantizer(granularity="row"),
    "fp8_block": lambda role, gemm: Float8Quantizer(
        granularity="block", block="128x128" if role == "weight" else "1x128"
    ),
    "fp8_delayed": lambda role, gemm: DelayedFloat8Quantizer(dtype="e5m2" if role == "grad_output" else "e4m3"),
    "mxfp8": lambda role, gemm: MXFP8Quantizer(),
    "nvfp4": _nvfp4,
}
POLICIES = {
    "high_precision": ("backward_override", "high_precision"),
    "dequantized": ("backward_override", "dequantized"),
    "save_original_input": ("save_original_input", True),
}


def _change(kind: type[Quantizer], roles: tuple[str, ...] = ROLES, **options: Any) -> Change:
    """Return what sets ``options`` of the quantizers of one ``kind`` in some roles."""

    def apply(role: str, quantizer: Quantizer) -> Quantizer:
        if isinstance(quantizer, HybridQuantizer):
            faces = apply(role, quantizer.rowwise), apply(role, quantizer.columnwise)
            return _merge(*faces, quantizer.columnwise_source)
        return dataclasses.replace(quantizer, **options) if role in roles and type(quantizer) is kind else quantizer

    return apply


def _of_rowwise(role: str, quantizer: Quantizer) -> Quantizer:
    """Make the columnwise faces of the forward's operands from what the forward saw."""
    if role == "grad_output":
        return quantizer
    row, column = (face_quantizer(quantizer, direction) for direction in ("rowwise", "columnwise"))
    return quantizer if row is None or column is None else HybridQuantizer(row, column, "rowwise_dequantized")


CHANGES: dict[str, Change] = {
    "pow2_scale": _change(Float8Quantizer, pow2_scale=True),
    "fp32_scale": _change(Float8Quantizer, pow2_scale=False),
    "most_recent": _change(DelayedFloat8Quantizer, algorithm="most_recent"),
    "mx_two_d": _change(MXFP8Quantizer, ("weight",), two_d=True),
    "mx_e5m2_grad": _change(MXFP8Quantizer, ("grad_output",), dtype="e5m2"),
    "one_d": _change(NVFP4Quantizer, ("weight",), two_d=False),
    "nearest": _change(NVFP4Quantizer, rounding="nearest"),
    "no_hadamard": _change(NVFP4Quantizer, hadamard=False),
    "row_scaled_input": lambda role, quantizer: _row_scaled(role, quantizer),
    "rowwise_dequantized": _of_rowwise,
    "rowwise_dequantized_weight": lambda role, q: _of_rowwise(role, q) if role == "weight" else q,
}


def _from_word(word: str, role: str, gemm: str) -> Quantizer:
    if word not in WORDS:
        raise ValueError(f"HybridConfig: unknown format {word!r}; {nearest(word, WORDS)}")
    return WORDS[word](role, gemm)


def roles_by_gemm(**chosen: str | Quantizer) -> dict[str, Quantizer]:
    """Return the quantizer of each role from what was chosen for each GEMM."""
    faces: dict[tuple[str, str], Quantizer] = {}
    for gemm in GEMMS:
        for role, direction in gemm[1:]:
            given = chosen[gemm.name]
            faces[role, direction] = _from_word(given, role, gemm.name) if isinstance(given, str) else given
    return {role: _merge(faces[role, "rowwise"], faces[role, "columnwise"]) for role in ROLES}


def _row_scaled(role: str, quantizer: Quantizer) -> Quantizer:
    """Scale the rowwise NVFP4 face of the input row by row."""
    row = face_quantizer(quantizer, "rowwise")
    if role != "input" or not isinstance(row, NVFP4Quantizer):
        return quantizer
    row = dataclasses.replace(row, row_scaled=True)
    if isinstance(quantizer, HybridQuantizer):
        return dataclasses.replace(quantizer, rowwise=row)
    return HybridQuantizer(row, quantizer)


def _merge(rowwise: Quantizer, columnwise: Quantizer, source: str = "original") -> Quantizer:
    return HybridQuantizer(rowwise, columnwise, source).simplified()


def simplified(quantizer: Quantizer) -> Quantizer:
    """Return the shortest quantizer that makes the same faces; see ``HybridQuantizer.simplified``."""
    return quantizer.simplified() if isinstance(quantizer, HybridQuantizer) else quantizer


def face_quantizer(quantizer: Quantizer, direction: str, *, any_source: bool = False) -> Quantizer | None:
    """Return the plain quantizer behind one face, or None where the face is not made from the original."""
    if not isinstance(quantizer, HybridQuantizer):
        return quantizer
    if direction == "columnwise" and quantizer.columnwise_source != "original" and not any_source:
        return None
    child: Quantizer = getattr(quantizer, direction)
    return child
