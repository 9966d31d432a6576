"""High precision as a format, and a quantizer per direction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtensor.formats import IDENTITY, Format
from hybridtensor.ops import Casts, Held, Operand
from hybridtensor.ops.operand import plain_operand
from hybridtensor.quantizers.base import (
    ALONE,
    OneFormatQuantizer,
    Operands,
    Quantizer,
    cast_together,
    require_choice,
    tokens,
)
from hybridtensor.state import Context, DelayedRule


@dataclass(frozen=True)
class IdentityQuantizer(Quantizer):
    """No quantization: faces hold the values in the nominal dtype."""

    @property
    def rowwise_format(self) -> Format:
        """The identity format, as for the columnwise face."""
        return IDENTITY

    columnwise_format = rowwise_format

    def operands(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context = ALONE
    ) -> Operands:
        """See ``Quantizer.operands``; both share one tensor, ``x`` itself where the dtype fits."""
        values = tokens(x).to(dtype)
        return plain_operand(values) if rowwise else None, plain_operand(values.t()) if columnwise else None


@dataclass(frozen=True)
class HybridQuantizer(Quantizer):
    """A quantizer for each direction.

    Args:
        rowwise: Makes the rowwise face.
        columnwise: Makes the columnwise face.
        columnwise_source: What the columnwise face is made from: ``"original"``, the tensor itself, or
            ``"rowwise_dequantized"``, what a product with the rowwise face saw. An ``IdentityQuantizer`` of the latter
            stores nothing: its face is the rowwise one, dequantized when used.

    Raises:
        TypeError: If ``rowwise`` or ``columnwise`` is not a plain quantizer.
        ValueError: If ``columnwise_source`` is unknown.
    """

    rowwise: Quantizer
    columnwise: Quantizer
    columnwise_source: str = "original"

    def __post_init__(self) -> None:
        for direction in ("rowwise", "columnwise"):
            child = getattr(self, direction)
            if not isinstance(child, Quantizer) or isinstance(child, HybridQuantizer):
                raise TypeError(
                    f"HybridQuantizer: a quantizer of one format is required for {direction}, got {child!r}; "
                    "use IdentityQuantizer() for high precision"
                )
        sources = ("original", "rowwise_dequantized")
        require_choice("HybridQuantizer", "columnwise_source", self.columnwise_source, sources)

    @property
    def repeatable(self) -> bool:  # type: ignore[override]
        """Whether both directions repeat themselves."""
        return self.rowwise.repeatable and self.columnwise.repeatable

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        """Whether a direction rounds at random."""
        return self.rowwise.stochastic or self.columnwise.stochastic

    @property
    def rowwise_format(self) -> Format:
        """Rowwise format of the rowwise quantizer."""
        return self.rowwise.rowwise_format

    @property
    def columnwise_format(self) -> Format:
        """Columnwise format of the columnwise quantizer."""
        return self.columnwise.columnwise_format

    def simplified(self) -> Quantizer:
        """Return the plain quantizer that makes the same faces, or this one without a source that means nothing."""
        if isinstance(self.rowwise, IdentityQuantizer):  # what the forward saw is the original
            return self.rowwise if self.columnwise == self.rowwise else HybridQuantizer(self.rowwise, self.columnwise)
        return self.rowwise if self._is_plain else self

    def delayed_rules(self, slot: str) -> dict[str, DelayedRule]:
        """See ``Quantizer.delayed_rules``: one scale per direction, unless both directions are the same quantizer."""
        if self._is_plain:
            return self.rowwise.delayed_rules(slot)
        return self.rowwise.delayed_rules(f"{slot}_rowwise") | self.columnwise.delayed_rules(f"{slot}_columnwise")

    @property
    def _is_plain(self) -> bool:
        """Whether this is the plain quantizer of both directions."""
        return self.columnwise_source == "original" and self.rowwise == self.columnwise

    def casts(self, *, rowwise: bool, columnwise: bool, context: Context = ALONE) -> Casts | None:
        """See ``Quantizer.casts``: there are none where a direction is in high precision."""
        if self._is_plain:
            return self.rowwise.casts(rowwise=rowwise, columnwise=columnwise, context=context)
        if not isinstance(self.rowwise, OneFormatQuantizer) or not isinstance(self.columnwise, OneFormatQuantizer):
            return None
        of_row, of_column = _by_direction(context)
        of_rowwise = columnwise and self.columnwise_source == "rowwise_dequantized"
        row = self.rowwise.cast(of_row) if rowwise or of_rowwise else None
        column = self.columnwise.cast(of_column).for_columnwise() if columnwise else None
        return Casts(row if rowwise else None, column, row if of_rowwise else None)

    def operands(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context = ALONE
    ) -> Operands:
        """See ``Quantizer.operands``."""
        if self._is_plain:
            return self.rowwise.operands(x, rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context)
        casts = self.casts(rowwise=rowwise, columnwise=columnwise, context=context)
        if casts is not None:
            return cast_together(x, casts, dtype, context)
        of_row, of_column = _by_direction(context)
        of_rowwise = columnwise and self.columnwise_source == "rowwise_dequantized"
        row: Operand | None = None
        column: Operand | Held | None = None
        if rowwise or of_rowwise:  # transient if not asked for
            row = self.rowwise.operands(x, rowwise=True, columnwise=False, dtype=dtype, context=of_row)[0]
        if of_rowwise and row is not None:
            column = self.of_rowwise(row, dtype, of_column)
        elif columnwise:
            column = self.columnwise.operands(x, rowwise=False, columnwise=True, dtype=dtype, context=of_column)[1]
        return row if rowwise else None, column

    def of_rowwise(self, row: Operand, dtype: torch.dtype, context: Context) -> Operand | Held | None:
        """Make the columnwise operand from the rowwise one."""
        held = plain_operand(row.data.t()) if row.scale is None else Held(row, dtype)
        if isinstance(self.columnwise, IdentityQuantizer):
            return held
        values = (held.values() if isinstance(held, Held) else held).data.t()
        return self.columnwise.operands(values, rowwise=False, columnwise=True, dtype=dtype, context=context)[1]


def _by_direction(context: Context) -> tuple[Context, Context]:
    """Return the context of either direction's quantizer."""
    return context._replace(direction="rowwise"), context._replace(direction="columnwise")
