"""High precision as a format, and a quantizer per direction."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtensor.arguments import require_choice, shown
from hybridtensor.formats import IDENTITY, Format, work_out
from hybridtensor.ops import CastRequest, Face, Faces, columnwise_of, high_precision, rowwise_values
from hybridtensor.quantizers.base import (
    ALONE,
    CastQuantizer,
    OneFormatQuantizer,
    Quantizer,
    one_face,
)
from hybridtensor.quantizers.plans import tokens
from hybridtensor.state import Context, DelayedRule


@dataclass(frozen=True)
class IdentityQuantizer(Quantizer, by_casts=True):
    """No quantization: faces hold the values in the nominal dtype.

    ::

        fp8, values = ht.Float8Quantizer("row"), ht.IdentityQuantizer()
        ht.quantize_(model, ht.HybridConfig(input=values, weight=fp8, grad_output=values))
    """

    @property
    def rowwise_format(self) -> Format:
        return IDENTITY

    columnwise_format = rowwise_format

    def faces(
        self,
        x: Tensor,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        context: Context = ALONE,
    ) -> Faces:
        values = tokens(x) if context.groups is None else x
        face = high_precision(values.to(dtype))._replace(groups=context.tokens_groups)
        return face if rowwise else None, columnwise_of(face, dtype) if columnwise else None


@dataclass(frozen=True)
class HybridQuantizer(CastQuantizer):
    """A quantizer for each direction.

    ::

        quantizer = ht.HybridQuantizer(ht.NVFP4Quantizer(), ht.MXFP8Quantizer(), "rowwise_dequantized")
        quantized = quantizer.quantize(x)

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
                    f"HybridQuantizer: a quantizer of one format is required for {direction}, got {shown(child)}; "
                    "use IdentityQuantizer() for high precision"
                )
        sources = ("original", "rowwise_dequantized")
        require_choice("HybridQuantizer", "columnwise_source", self.columnwise_source, sources)
        work_out(self)

    @functools.cached_property
    def repeatable(self) -> bool:  # type: ignore[override]
        """Whether the same input always gives the same bits."""
        return self.rowwise.repeatable and self.columnwise.repeatable

    @functools.cached_property
    def stochastic(self) -> bool:  # type: ignore[override]
        """Whether a direction rounds at random."""
        return self.rowwise.stochastic or self.columnwise.stochastic

    @functools.cached_property
    def draws_from_rowwise(self) -> bool:  # type: ignore[override]
        """Whether each step requantizes the columnwise face from the rowwise one with new random signs (EDEN)."""
        return self.requantizes and self.columnwise_format.drawn_signs

    @functools.cached_property
    def requantizes(self) -> bool:  # type: ignore[override]
        """Whether the columnwise face is quantized from the values that the rowwise face holds."""
        both = self.rowwise, self.columnwise
        return self.derives_columnwise and not any(
            isinstance(one, IdentityQuantizer) for one in both
        )

    @property
    def derives_columnwise(self) -> bool:  # type: ignore[override]
        """Whether the columnwise face is made from the values that the rowwise face holds, or has just these."""
        return self.columnwise_source == "rowwise_dequantized"

    @property
    def rowwise_format(self) -> Format:
        """Rowwise format of the rowwise quantizer."""
        return self.rowwise.rowwise_format

    @property
    def columnwise_format(self) -> Format:
        """Columnwise format of the columnwise quantizer."""
        return self.columnwise.columnwise_format

    def simplified(self) -> Quantizer:
        """Return the simplest quantizer of the same faces: a plain one, or a hybrid with ``columnwise_source``
        normalized."""
        if isinstance(self.rowwise, IdentityQuantizer):  # what the forward saw is the original
            return (
                self.rowwise
                if self.columnwise == self.rowwise
                else HybridQuantizer(self.rowwise, self.columnwise)
            )
        return self.rowwise if self._is_plain else self

    def delayed_rules(self, slot: str) -> dict[str, DelayedRule]:
        if self._is_plain:
            return self.rowwise.delayed_rules(slot)
        return self.rowwise.delayed_rules(f"{slot}_rowwise") | self.columnwise.delayed_rules(
            f"{slot}_columnwise"
        )

    @property
    def _is_plain(self) -> bool:
        """Whether both directions are this plain quantizer."""
        return self.columnwise_source == "original" and self.rowwise == self.columnwise

    def request(
        self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context
    ) -> CastRequest | None:
        if self._is_plain:
            return self.rowwise.request(
                rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context
            )
        # A direction that nobody asked for does not decide whether one cast is enough.
        of_row, of_column = self.rowwise, self.columnwise if columnwise else self.rowwise
        if not isinstance(of_row, OneFormatQuantizer) or not isinstance(
            of_column, OneFormatQuantizer
        ):
            return None
        derived = columnwise and self.derives_columnwise
        row = column = None
        if rowwise or derived:
            row = of_row.cast(context._replace(direction="rowwise"))
        if columnwise:
            column = of_column.cast(context._replace(direction="columnwise")).for_columnwise()
        if not derived:
            return CastRequest(row, column)
        return CastRequest(row if rowwise else None, column, row, dtype)

    def faces_apart(
        self, x: Tensor, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context
    ) -> Faces:
        if self._is_plain:
            return self.rowwise.faces(
                x, rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context
            )
        derived = columnwise and self.derives_columnwise
        if derived:  # which reads elements
            context = context._replace(values=(False, False))
        row = column = None
        if rowwise or derived:  # transient if not asked for
            of_row = context._replace(direction="rowwise")
            row = one_face(self.rowwise, x, "rowwise", dtype, of_row)
        if derived and row is not None:
            column = self.derive_columnwise(row, dtype, context)
        elif columnwise:
            of_column = context._replace(direction="columnwise")
            column = one_face(self.columnwise, x, "columnwise", dtype, of_column)
        return row if rowwise else None, column

    def derive_columnwise(self, row: Face, dtype: torch.dtype, context: Context) -> Face:
        """Return the columnwise face requantized from the rowwise data, or these data, dequantized when used."""
        if isinstance(self.columnwise, IdentityQuantizer):
            return columnwise_of(row, dtype)
        values, context = rowwise_values(row, dtype), context._replace(direction="columnwise")
        if context.state is not None and context.state.common_amax is not None:
            # which several weights have in common before they are quantized, not what their faces hold
            context = context._replace(state=context.state._replace(common_amax=None))
        return one_face(self.columnwise, values, "columnwise", dtype, context)


def of_direction(quantizer: Quantizer, direction: str) -> Quantizer:
    """Return the quantizer of the ``"rowwise"`` or the ``"columnwise"`` face."""
    if not isinstance(quantizer, HybridQuantizer):
        return quantizer
    return quantizer.rowwise if direction == "rowwise" else quantizer.columnwise


def by_direction(quantizer: Quantizer) -> tuple[Quantizer, Quantizer, bool]:
    """Return the quantizers of both faces, and whether the columnwise one is requantized from the rowwise data."""
    row, column = (of_direction(quantizer, direction) for direction in ("rowwise", "columnwise"))
    return row, column, quantizer.derives_columnwise


def is_its_transpose(quantizer: Quantizer) -> bool:
    """Return whether the columnwise face is the transpose of the rowwise one."""
    row, column, derived = by_direction(quantizer)
    # Stochastic rounding draws for each face by itself.
    alike = row == column and not derived and not quantizer.stochastic
    return alike and quantizer.rowwise_format.is_square
