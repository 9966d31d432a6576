"""FP8: scales from the values themselves, per tensor, row or block, or from the steps before."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hybridtensor.arguments import require_choice, require_flag, require_int, shown
from hybridtensor.formats import Format, get_format, work_out
from hybridtensor.ops import Cast
from hybridtensor.quantizers.base import OneFormatQuantizer
from hybridtensor.state import Context, DelayedRule


@dataclass(frozen=True)
class Float8Quantizer(OneFormatQuantizer):
    """FP8 with current scaling: the scales come from the values that are being quantized.

    ::

        row = ht.Float8Quantizer("row")
        ht.quantize_(model, ht.HybridConfig(input=row, weight=row, grad_output=row))

    Args:
        granularity: ``"tensor"``: one scale; ``"row"``: one per row in the rowwise face and one per
            column in the columnwise face; ``"block"``: one per ``block``.
        dtype: Element, ``"e4m3"`` (range 448) or ``"e5m2"`` (range 57344).
        pow2_scale: Round scales down to powers of two; by default for blocks only.
        block: ``(1, 128)``, along the contraction axis of each face, or ``(128, 128)``, where one face is the transpose
            of the other; also written ``"1x128"``. For granularity ``"block"``, by default ``(1, 128)``.

    Raises:
        ValueError: If a word is unknown, or a block is given for another granularity.
    """

    granularity: str = "tensor"
    dtype: str = "e4m3"
    pow2_scale: bool | None = None
    block: str | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        who = "Float8Quantizer"
        require_choice(who, "granularity", self.granularity, ("tensor", "row", "block"))
        require_choice(who, "dtype", self.dtype, ("e4m3", "e5m2"))
        blocked = self.granularity == "block"
        # As in TransformerEngine, whose Float8BlockScaling takes powers of two unless it is asked
        # for FP32 scales, and current scaling does not.
        if self.pow2_scale is None:
            object.__setattr__(self, "pow2_scale", blocked)
        require_flag(who, pow2_scale=self.pow2_scale)
        if isinstance(self.block, (tuple, list)):
            object.__setattr__(self, "block", "x".join(str(extent) for extent in self.block))
        if blocked:
            object.__setattr__(self, "block", "1x128" if self.block is None else self.block)
            require_choice(who, "block", self.block, ("1x128", "128x128"))
        elif self.block is not None:
            raise ValueError(
                f"{who}: block is for granularity 'block', got {shown(self.block)} with {self.granularity!r}"
            )
        work_out(self)

    @functools.cached_property
    def format(self) -> Format:
        """``fp8_<dtype>_<granularity or block>``."""
        suffix = "_fp32_scale" if self.block is not None and not self.pow2_scale else ""
        return get_format(f"fp8_{self.dtype}_{self.block or self.granularity}{suffix}")

    def cast(self, context: Context) -> Cast:
        return self._cast

    @functools.cached_property
    def _cast(self) -> Cast:
        return Cast(self.format, pow2_scale=bool(self.pow2_scale))


_MAX_MARGIN = 64  # beyond, scales would leave fp32 for ordinary values


@dataclass(frozen=True)
class DelayedFloat8Quantizer(OneFormatQuantizer):
    """FP8 with delayed scaling: one scale per tensor, from the amaxes of past steps.

    ::

        e4m3, e5m2 = (ht.DelayedFloat8Quantizer(dtype, history_length=16) for dtype in ("e4m3", "e5m2"))
        ht.quantize_(model, ht.HybridConfig(input=e4m3, weight=e4m3, grad_output=e5m2))

    The scale is known before the tensor is, so that a cast reads it once. The state, a scale and an amax history per
    tensor (per direction in a hybrid), belongs to the layer: ``quantize_`` makes it, ``step_`` updates it.

    Args:
        dtype: Element, ``"e4m3"`` (range 448) or ``"e5m2"`` (range 57344).
        margin: Powers of two to stay below the largest element.
        history_length: Steps whose amaxes count.
        algorithm: ``"max"`` over the history, or ``"most_recent"``.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a word is unknown, the history is empty, or the margin is not within -64 and 64.

    Source: TransformerEngine's ``DelayedScaling`` recipe, with its defaults.
    """

    dtype: str = "e4m3"
    margin: int = 0
    history_length: int = 1024
    algorithm: str = "max"

    repeatable = False

    def __post_init__(self) -> None:
        who = "DelayedFloat8Quantizer"
        require_choice(who, "dtype", self.dtype, ("e4m3", "e5m2"))
        require_choice(who, "algorithm", self.algorithm, ("max", "most_recent"))
        require_int(who, margin=self.margin, history_length=self.history_length)
        if not -_MAX_MARGIN <= self.margin <= _MAX_MARGIN:
            raise ValueError(
                f"{who}: a margin from -{_MAX_MARGIN} to {_MAX_MARGIN} is required, got {self.margin}"
            )
        if self.history_length < 1:
            raise ValueError(
                f"{who}: a history_length of at least 1 is required, got {self.history_length}"
            )
        work_out(self)

    @functools.cached_property
    def format(self) -> Format:
        return get_format(f"fp8_{self.dtype}_tensor")

    def delayed_rules(self, slot: str) -> dict[str, DelayedRule]:
        return {
            slot: DelayedRule(self.format.max, self.margin, self.history_length, self.algorithm)
        }

    def cast(self, context: Context) -> Cast:
        """Return the cast; raise ValueError without a state that holds the scale."""
        state = context.state
        if state is None or state.encode_scale is None:
            raise ValueError(
                f"{context}: DelayedFloat8Quantizer has no layer's state to take its scale from; convert a "
                "model with quantize_, or pass context=Context(role, "
                f"LayerState.of({{role: quantizer}}).tensors())"
            )
        return Cast(self.format, slot=state.position(context.slot))
