"""Columnwise faces of inputs that backward completes: shared by several layers, or gathered from ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.autograd import Variable

from hybridtensor.formats import Format
from hybridtensor.ops import Face
from hybridtensor.ops.library import backward_that_runs
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, OpTable
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor
from hybridtensor.subclasses.wrapper import Size, Stride, WrapperTensor


class SharedFace:
    """The columnwise face of an input, made in backward by the first layer that needs it, for all of them.

    Attributes:
        layers: How many layers' forwards saved the input.
        remaining: How many of their backwards have not taken the face yet.
        parts: Parts of all ranks that are being gathered, or None.
        face: The face, from the first of the backwards to the last.
    """

    __slots__ = ("face", "layers", "parts", "remaining")

    def __init__(self) -> None:
        self.layers = self.remaining = 0
        self.parts: list[Tensor] | None = None
        self.face: Face | None = None

    def take(self, make: Callable[[], Face]) -> Face:
        """Return the face; it is released with the last layer, or at the end of backward."""
        face = self.face
        if face is None:
            face, self.parts, self.remaining = make(), None, self.layers
            self.face = face
            # A layer whose gradients nobody asked for never takes the face: the end of backward releases it then.
            if self.layers > 1 and backward_that_runs() != -1:
                _call_after_backward(self._clear)
        self.remaining -= 1
        if self.remaining <= 0:
            self._clear()
        return face

    def _clear(self) -> None:
        self.face = None


class Sequence(Protocol):
    """Interface of ``distributed.sequence.layout``: how to gather the ranks' parts."""

    def start(self, face: Face, direction: str) -> list[Tensor]:
        """Start gathering all ranks' parts."""

    def finish(self, face: Face, direction: str, parts: list[Tensor], shape: torch.Size) -> Face:
        """Wait for the gather, and return the whole face."""


class ShardedFace(WrapperTensor):
    """The columnwise face of an activation that was quantized on its shards."""

    ops = OpTable("ShardedFace", "its tokens are on several ranks; give it to a linear layer")
    inner_names = ("source",)
    metadata_names = ("sequence", "quantize")
    transient_names = (*WrapperTensor.transient_names, "sharing")

    source: QuantizedTensor | IdentityTensor
    sequence: Sequence
    quantize: bool
    sharing: SharedFace

    @staticmethod
    def __new__(
        cls,
        source: QuantizedTensor | IdentityTensor,
        sequence: Sequence,
        quantize: bool,
        size: Size | None = None,
        stride: Stride = None,
    ) -> Self:
        made = cls._make(
            source.size() if size is None else size, stride, source.dtype, source.device
        )
        made.source, made.sequence, made.quantize = source, sequence, quantize
        made.sharing = SharedFace()
        return made

    @property
    def format(self) -> Format:
        return self.source.format

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ShardedFace({self.source!r} of {tuple(self.shape)}, {self.sequence})"


@ShardedFace.ops.register(
    torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default
)
def _alias(func: Func, args: Args, kwargs: Kwargs) -> ShardedFace:
    """Alias the face, as module hooks view their inputs; no other shape."""
    face: ShardedFace = args[0]
    if func is torch.ops.aten.view.default and tuple(args[1]) != tuple(face.shape):
        ShardedFace.ops.refuse(func, args, kwargs)
    made = face.map_inner(lambda tensor: tensor)
    made.sharing = face.sharing
    return made


# Private in torch: what FSDP2 and DDP end their backward by
_call_after_backward: Callable[[Callable[[], None]], None] = (
    Variable._execution_engine.queue_callback
)
