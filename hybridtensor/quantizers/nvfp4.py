"""NVFP4: blocks of 16 four-bit values under an E4M3 scale under an fp32 scale."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hybridtensor.arguments import require_choice, require_flag, require_int
from hybridtensor.formats import Format, get_format, work_out
from hybridtensor.quantizers.base import RoundingQuantizer, require_rounding

EDEN = "eden"


@dataclass(frozen=True)
class NVFP4Quantizer(RoundingQuantizer):
    """NVFP4: E2M1 values, an E4M3 scale per 16 along the contraction axis of each face, an fp32 scale per tensor.

    ::

        quantized = ht.NVFP4Quantizer(rounding="stochastic", seed=1).quantize(x)

    Args:
        row_scaled: An fp32 scale per row of a face instead of one per tensor.
        two_d: Blocks of 16x16, for weights: one face is the transpose of the other.
        hadamard: Rotate every 16 values along the contraction axis first, which spreads outliers.
            Both operands of a product need it, or neither.
        rounding: ``"nearest"``, or one that keeps the mean, for gradients: ``"stochastic"``, elements are rounded up
            or down at random (what is clipped loses its mean), or ``"eden"``, the scales are, after elements were
            rounded to nearest under a rotation of 128 values with random signs, which errs half as much. Both operands
            of a product need ``"eden"``, with one seed, or neither; ``hadamard`` is not for these.
        seed: Seed of the random rounding, from 0 to 2^29 - 1.
        four_over_six: Quantize every block twice, with its amax mapped to 6 and to 4, and store the result that has
            the smaller error: ``"mae"``, the sum of absolute errors, or ``"mse"``, of squared ones. What is stored is
            NVFP4 as ever. For weights and inputs.
        scale_max: Block scale of the block with the largest amax: 448, the largest E4M3 value, or 256, which leaves
            room for scales that are 1.5 times as large. By default 256 with ``four_over_six``, else 448.

    Raises:
        TypeError: If an option is of the wrong kind.
        ValueError: If a word is unknown, ``two_d`` comes with what works on rows (``row_scaled``, ``hadamard``),
            ``four_over_six`` with random rounding, or ``"eden"`` with another option of scales.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149; TransformerEngine's
    ``NVFP4BlockScaling``; Cook et al., "Four Over Six", arXiv 2512.02010; "Quartet II", arXiv 2601.22813 (``"eden"``).
    """

    row_scaled: bool = False
    two_d: bool = False
    hadamard: bool = False
    rounding: str = "nearest"
    seed: int = 0
    four_over_six: str | None = None
    scale_max: int | None = None

    def __post_init__(self) -> None:
        who = "NVFP4Quantizer"
        require_flag(who, row_scaled=self.row_scaled, two_d=self.two_d, hadamard=self.hadamard)
        require_rounding(who, self.rounding, self.seed, ("nearest", "stochastic", EDEN))
        for option in ("row_scaled", "hadamard"):
            if self.two_d and getattr(self, option):
                raise ValueError(
                    f"{who}: two_d makes both faces from 16x16 blocks, {option} works along the rows of one; "
                    "choose one of them"
                )
        self._check_scales()
        work_out(self)

    def _check_scales(self) -> None:
        """Raise ValueError for contradicting options of block scales; fill in ``scale_max``."""
        who = "NVFP4Quantizer"
        if self.four_over_six is not None:
            require_choice(who, "four_over_six", self.four_over_six, ("mae", "mse"))
        if self.four_over_six is not None and self.stochastic:
            raise ValueError(
                f"{who}: four_over_six compares the errors of rounding to nearest, got rounding={self.rounding!r}; use "
                "it for weights and inputs, and choose one of them for gradients"
            )
        # A block whose amax becomes 4 instead of 6 has a scale that is 1.5 times as large: 384 of
        # 256, which E4M3 has, but 672 of 448.
        if self.scale_max is None:
            object.__setattr__(self, "scale_max", 448 if self.four_over_six is None else 256)
        require_int(who, scale_max=self.scale_max)
        if self.scale_max not in (448, 256):
            raise ValueError(f"{who}: 448 or 256 is required as scale_max, got {self.scale_max}")
        if self.rounding != EDEN:
            return
        for option, value in (
            ("row_scaled", False),
            ("two_d", False),
            ("hadamard", False),
            ("scale_max", 448),
        ):
            if (got := getattr(self, option)) != value:
                raise ValueError(
                    f"{who}: {option}={value} is required with rounding='eden', which rotates and scales in a way of "
                    f"its own, got {got}; leave it out"
                )

    def __setstate__(self, fields: dict[str, object]) -> None:
        # pickles of before these fields were there
        super().__setstate__({"four_over_six": None, "scale_max": 448, **fields})

    @property
    def rule(self) -> str:  # type: ignore[override]
        """The error that selects one of two block scales, ``""`` without four over six."""
        return self.four_over_six or ""

    @functools.cached_property
    def format(self) -> Format:
        if self.rounding == EDEN:
            return get_format("nvfp4_eden")
        options = {
            "_row_scaled": self.row_scaled,
            "_16x16": self.two_d,
            "_hadamard": self.hadamard,
            "_max256": self.scale_max == 256,
        }
        return get_format("nvfp4" + "".join(name for name, chosen in options.items() if chosen))
