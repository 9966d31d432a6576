"""MXFP4: blocks of 32 four-bit values under a shared power of two."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hybridtensor.arguments import require_choice, require_flag
from hybridtensor.formats import Format, get_format, work_out
from hybridtensor.quantizers.base import RoundingQuantizer, require_rounding


@dataclass(frozen=True)
class MXFP4Quantizer(RoundingQuantizer):
    """MXFP4: E2M1 values, a power-of-two scale per 32 along the contraction axis of each face.

    ::

        mxfp4, values = ht.MXFP4Quantizer(), ht.IdentityQuantizer()
        ht.quantize_(model, ht.HybridConfig(input=values, weight=mxfp4, grad_output=values))

    Args:
        scale_rounding: How a scale is rounded that follows from its block's amax: ``"rceil"``, rounded up, so that
            nothing is clipped; ``"floor"``, by the exponent alone, which clips up to a quarter of the largest values;
            or ``"even"``, as ``"floor"`` after rounding the magnitude to one mantissa bit.
        two_d: Blocks of 32x32, for weights: one face is the transpose of the other.
        hadamard: Rotate every 16 values along the contraction axis first, which spreads outliers.
            Both operands of a product need it, or neither.
        rounding: ``"nearest"``, or ``"stochastic"``: up or down at random so that the mean is kept (with ``"rceil"``;
            what is clipped loses it), for gradients.
        seed: Seed of the random rounding, from 0 to 2^29 - 1.

    Raises:
        TypeError: If an option is of the wrong kind.
        ValueError: If a word is unknown, or ``two_d`` comes with ``hadamard``, which works on rows.

    Source: OCP Microscaling Formats 1.0 (``"floor"``); TransformerEngine's rule for MXFP8 (``"rceil"``); torchao and
    compressed-tensors (``"even"``).
    """

    scale_rounding: str = "rceil"
    two_d: bool = False
    hadamard: bool = False
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        who = "MXFP4Quantizer"
        require_choice(who, "scale_rounding", self.scale_rounding, ("rceil", "even", "floor"))
        require_flag(who, two_d=self.two_d, hadamard=self.hadamard)
        require_rounding(who, self.rounding, self.seed)
        if self.two_d and self.hadamard:
            raise ValueError(
                f"{who}: two_d makes both faces from 32x32 blocks, hadamard works along the rows of one; choose one "
                "of them"
            )
        work_out(self)

    @property
    def rule(self) -> str:  # type: ignore[override]
        """The rule that rounds exponents, ``""`` for rounding up."""
        return "" if self.scale_rounding == "rceil" else self.scale_rounding

    @functools.cached_property
    def format(self) -> Format:
        options = {"_32x32": self.two_d, "_hadamard": self.hadamard}
        return get_format("mxfp4" + "".join(name for name, chosen in options.items() if chosen))
