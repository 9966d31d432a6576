"""What ``explain`` finds, as records for programs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hybridtensor.recipes.config import HybridConfig
from hybridtensor.selection import Coverage


@dataclass(frozen=True)
class GemmRow:
    """One product of one layer.

    Attributes:
        layer: Fully qualified name; ``<root>`` for the model itself.
        gemm: ``output``, ``grad_input`` or ``grad_weight``.
        left: Role, direction and format of the left operand's face: ``input.rowwise: fp8_e4m3_tensor``.
        right: The same of the right one.
        backend: ``native``, ``emulated`` or ``high precision``.
        reason: Why that backend.
        saved_bytes_per_token: Bytes that the layer's input costs per token until backward, on the
            ``grad_weight`` row; None on the others.
    """

    layer: str
    gemm: str
    left: str
    right: str
    backend: str
    reason: str
    saved_bytes_per_token: float | None = None


@dataclass(frozen=True)
class LayerRow:
    """One converted layer.

    Attributes:
        layer: Fully qualified name; ``<root>`` for the model itself.
        config: Its recipe.
        shape: Shape of its weight; of a stack of experts ``[E, out, in]``, or ``[E, in, out]``.
        in_features: Features of its input.
        dtype: Dtype of its weight.
        parameters: Number of elements of its weight; 0 if an earlier layer has the same weight.
        common_scale: Layers whose weights have one scale in common with this one's, itself included.
        own_forward: Name of the layer's class if that has a forward of its own, which may read the weight instead of
            multiplying by it; else "".
        is_frozen: Whether its weight asks for no gradient: then it has no ``grad_weight``, and keeps no input for it.
    """

    layer: str
    config: HybridConfig
    shape: tuple[int, ...]
    in_features: int
    dtype: torch.dtype
    parameters: int
    common_scale: tuple[str, ...] = ()
    own_forward: str = ""
    is_frozen: bool = False


@dataclass(frozen=True)
class GatherRow:
    """The all-gathers of one layer's weight under FSDP2.

    Attributes:
        layer: Fully qualified name.
        forward: Description of the all-gather before forward.
        backward: What is sent before backward, where the weight is not kept until then.
        reason: Why values are sent that could have been quantized before, or what is done otherwise than asked; or "".
    """

    layer: str
    forward: str
    backward: str
    reason: str


@dataclass(frozen=True)
class SequenceRow:
    """The gathers of an activation whose tokens are sharded.

    Attributes:
        module: Fully qualified name of the module with the style.
        tensor: ``input`` or ``grad_output``.
        forward: Description of the gather in forward, or "" for none.
        backward: Description of the gather in backward, or "".
        reason: Why values are sent; or for which numbers of tokens bytes do.
    """

    module: str
    tensor: str
    forward: str
    backward: str
    reason: str


@dataclass(frozen=True)
class Rows:
    """All that ``explain`` finds.

    Attributes:
        rows: The products of converted layers.
        skipped: The layers left alone, with the reason.
        gathers: What FSDP2 sends, for weights that it shards.
        shared: The layers whose weight is quantized anew at each use, because someone else holds
            its memory: a state dict, ``weight.master``, or what was made from these.
        coverage: Quantized share of the model, and the large matrices that are plain.
        sequence: What sequence parallelism sends, for modules with the styles of ``hybridtensor.distributed``.
        layers: The converted layers.
    """

    rows: tuple[GemmRow, ...]
    skipped: tuple[tuple[str, str], ...]
    gathers: tuple[GatherRow, ...] = ()
    shared: tuple[str, ...] = ()
    coverage: Coverage = field(default_factory=lambda: Coverage(0.0, 0.0, ()))
    sequence: tuple[SequenceRow, ...] = ()
    layers: tuple[LayerRow, ...] = ()
