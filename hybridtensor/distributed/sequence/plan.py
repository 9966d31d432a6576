"""What of an activation is sent in which phase, when its tokens are on several ranks."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from hybridtensor.distributed.fsdp.plan import COLUMN, ROW, FacePlan, face_plan
from hybridtensor.quantizers import IdentityQuantizer, Quantizer
from hybridtensor.quantizers.hybrid import by_direction, is_its_transpose
from hybridtensor.recipes.config import HybridConfig


@dataclass(frozen=True)
class SequencePlan:
    """How the faces of an activation come to all ranks.

    Attributes:
        column: Where the columnwise face comes from: ``"bytes"``, those of all ranks; ``"values"``,
            gathered in high precision; ``"quantized"``, those quantized after they were gathered;
            ``"transposed"``, the rowwise face's bytes; ``"rowwise"``, what that one holds.
        reduce: Largest magnitudes that ranks must know of each other: of the ``"tensor"``, of a ``"column"``, or None.
        row_reduces: Whether the rowwise face is scaled by that of the tensor.
        column_reduces: What the columnwise face is scaled by: ``"tensor"``, ``"column"`` or None.
        reason: Why values are sent in high precision in both phases, as without this library; or "".
        column_reason: Why the columnwise face's do in backward; or "".
    """

    column: str
    reduce: str | None = None
    row_reduces: bool = False
    column_reduces: str | None = None
    reason: str = ""
    column_reason: str = ""


def sequence_plan(quantizer: Quantizer, tokens: int, num_ranks: int) -> SequencePlan:
    """Return the plan of an activation with ``tokens`` of one sequence on each of ``num_ranks`` ranks."""
    # ``int`` fixes a size that is traced: what a graph gathers depends on it.
    return _sequence_plan(quantizer, int(tokens), num_ranks)


@functools.lru_cache(maxsize=1024)
def _sequence_plan(quantizer: Quantizer, tokens: int, num_ranks: int) -> SequencePlan:
    row_quantizer, column_quantizer, derived = by_direction(quantizer)
    row = face_plan(row_quantizer, ROW, tokens, num_ranks)
    column = face_plan(column_quantizer, COLUMN, tokens, num_ranks)
    if row.kind == "values":
        return SequencePlan("values", reason="the rowwise face is in high precision")
    if row.kind == "whole" or row.reduce == "blocks":
        return SequencePlan("values", reason=row.reason or _cut(row, tokens))
    row_reduces = row.reduce == "tensor"
    if derived:
        return SequencePlan("rowwise", row.reduce, row_reduces)
    if is_its_transpose(quantizer):
        return SequencePlan("transposed", row.reduce, row_reduces)
    if isinstance(column_quantizer, IdentityQuantizer):
        why = "the columnwise face is in high precision"
        return SequencePlan("values", row.reduce, row_reduces, column_reason=why)
    if column.kind == "whole" or column.reduce == "blocks":
        why = column.reason or _cut(column, tokens)
        return SequencePlan("quantized", row.reduce, row_reduces, column_reason=why)
    reduce = "column" if column.reduce == "column" else column.reduce or row.reduce
    return SequencePlan("bytes", reduce, row_reduces, column.reduce)


def _cut(face: FacePlan, tokens: int) -> str:
    return f"{face.format}: {tokens} tokens of a sequence on a rank cut its blocks"


def input_plan(quantizer: Quantizer, tokens: int, num_ranks: int, several: bool) -> SequencePlan:
    """Return the plan of an input that ``several`` layers read."""
    plan = sequence_plan(quantizer, tokens, num_ranks)
    if plan.reason or not several or quantizer.repeatable:
        return plan
    return dataclasses.replace(plan, reason="each layer has its own scales, or draws of its own")


def gradient_plan(config: HybridConfig, tokens: int, num_ranks: int) -> SequencePlan:
    """Return the plan of a gradient; backward needs both of its faces at once."""
    plan = sequence_plan(config.grad_output, tokens, num_ranks)
    if plan.reason or plan.column in ("transposed", "rowwise"):
        return plan
    return dataclasses.replace(plan, reason="two faces are as many bytes as values")
