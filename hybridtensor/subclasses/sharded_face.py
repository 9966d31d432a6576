"""A sharded columnwise face that is gathered when it is requested."""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops import Face
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, OpTable
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor
from hybridtensor.subclasses.shared_face import SharedFace
from hybridtensor.subclasses.wrapper import Size, Stride, WrapperTensor


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
    transient_names = ("sharing",)

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
        return cls._make(
            source.size() if size is None else size, stride, source.dtype, source.device
        )

    def __init__(
        self,
        source: QuantizedTensor | IdentityTensor,
        sequence: Sequence,
        quantize: bool,
        size: Size | None = None,
        stride: Stride = None,
    ) -> None:
        self.source, self.sequence, self.quantize = source, sequence, quantize
        self.sharing = SharedFace()

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
        ShardedFace.ops.refuse(func)
    made = face.map_inner(lambda tensor: tensor)
    made.sharing = face.sharing
    return made
