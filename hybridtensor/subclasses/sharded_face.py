"""A columnwise face of which each rank has a part, until it is asked for."""

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
    """How the parts of ranks follow each other; a frozen value, ``distributed.sequence`` makes it."""

    def start(self, face: Face, direction: str) -> list[Tensor]:
        """Begin to gather the parts of all ranks."""

    def finish(self, face: Face, direction: str, parts: list[Tensor], shape: torch.Size) -> Face:
        """Wait for them, and return the whole face."""


class ShardedFace(WrapperTensor):
    """The columnwise face of an activation whose tokens were quantized where they were.

    Attributes:
        source: The face of this rank's tokens.
        sequence: How those of all ranks follow each other.
        quantize: Whether ``source`` has values that are quantized after they were gathered.
        sharing: What is kept while layers ask for the whole, outside of compiled graphs.
    """

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
        """That of the tokens' face."""
        return self.source.format

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ShardedFace({self.source!r} of {tuple(self.shape)}, {self.sequence})"


@ShardedFace.ops.register(
    torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default
)
def _alias(func: Func, args: Args, kwargs: Kwargs) -> ShardedFace:
    """Give the same face, as hooks of modules take a view of what comes; no other shape."""
    face: ShardedFace = args[0]
    if func is torch.ops.aten.view.default and tuple(args[1]) != tuple(face.shape):
        ShardedFace.ops.refuse(func)
    made = face.map_inner(lambda tensor: tensor)
    made.sharing = face.sharing
    return made
