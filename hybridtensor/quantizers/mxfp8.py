"""MXFP8: blocks of 32 under a shared power of two."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hybridtensor.arguments import require_choice, require_flag
from hybridtensor.formats import Format, get_format, work_out
from hybridtensor.ops import Cast
from hybridtensor.quantizers.base import OneFormatQuantizer
from hybridtensor.state import Context


@dataclass(frozen=True)
class MXFP8Quantizer(OneFormatQuantizer):
    """MXFP8: one power-of-two scale, rounded up, per 32 values along the contraction axis of each face.

    ::

        mxfp8, square = ht.MXFP8Quantizer(), ht.MXFP8Quantizer(two_d=True)
        ht.quantize_(model, ht.HybridConfig(input=mxfp8, weight=square, grad_output=mxfp8))

    Args:
        dtype: Element, ``"e4m3"`` (range 448) or ``"e5m2"`` (range 57344).
        two_d: Blocks of 32x32, for weights: one face is the transpose of the other, so that both GEMMs see one value.

    Raises:
        ValueError: If the dtype is unknown.

    Source: OCP Microscaling Formats 1.0; TransformerEngine's ``MXFP8BlockScaling``.
    """

    dtype: str = "e4m3"
    two_d: bool = False

    def __post_init__(self) -> None:
        require_choice("MXFP8Quantizer", "dtype", self.dtype, ("e4m3", "e5m2"))
        require_flag("MXFP8Quantizer", two_d=self.two_d)
        work_out(self)

    @functools.cached_property
    def format(self) -> Format:
        """``mxfp8_<dtype>``, with ``_32x32`` in two dimensions."""
        return get_format(f"mxfp8_{self.dtype}{'_32x32' if self.two_d else ''}")

    def cast(self, context: Context) -> Cast:
        return Cast(self.format)
