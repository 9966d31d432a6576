"""A high-precision weight that is quantized when it is used."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from hybridtensor.ops import Held, Operand
from hybridtensor.ops.library import is_captured, is_recorded
from hybridtensor.state import Context
from hybridtensor.subclasses.hybrid_tensor import Face, as_face
from hybridtensor.subclasses.op_table import OpTable
from hybridtensor.subclasses.wrapper import InterceptingTensor


class WriteCounter:
    """Counts writes to one memory; shared by every alias and view of it, even across ``.data``.

    Attributes:
        count: The writes.
        replayed: Whether one went into a CUDA graph: its replays write without being counted.
    """

    __slots__ = ("count", "replayed")

    def __init__(self) -> None:
        self.count, self.replayed = 0, False


class MasterWeight(InterceptingTensor):
    """A high-precision weight with the recipe by which linear layers quantize it.

    To optimizers, checkpoints and initialization it is the high-precision tensor: they read and write ``master``.
    ``faces`` quantizes it and keeps the result until the next write.

    Attributes:
        master: The plain tensor.
        config: The recipe (a ``HybridConfig``).
    """

    ops = OpTable("MasterWeight", "operate on dequantize(), or on a plain copy of the weight")
    functions = OpTable("MasterWeight", "")
    inner_names = ("master",)
    metadata_names = ("config",)
    transient_names = ("writes", "_cached")

    master: Tensor
    config: Any
    writes: WriteCounter
    _cached: tuple[tuple[Any, ...], Operand | None, Operand | Held | None] | None

    @staticmethod
    def __new__(
        cls,
        master: Tensor,
        config: Any,
        size: torch.Size | tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> Self:
        return cls._make(master.size(), master.stride(), master.dtype, master.device)

    def __init__(
        self,
        master: Tensor,
        config: Any,
        size: torch.Size | tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> None:
        self.master, self.config = master, config
        self.writes, self._cached = WriteCounter(), None

    def alias(self, master: Tensor) -> MasterWeight:
        """Wrap ``master``, a view of this weight's memory: a write through either is seen by both."""
        new = type(self)(master, self.config).like(self)
        new.writes = self.writes
        return new

    @property
    def version(self) -> tuple[int, int, int]:
        """What changes with every write."""
        with torch._C.DisableTorchFunctionSubclass():  # which attributes of a tensor would pass through
            return self.writes.count, _version(self), _version(self.master)

    def note_write(self) -> None:
        """Record that ``master`` was written to, so that no cached face and no saved tensor outlives it."""
        self.writes.count += 1
        self.writes.replayed = self.writes.replayed or is_captured()
        if not self.master.is_inference():
            torch.autograd.graph.increment_version(self.master)

    def operands(
        self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype
    ) -> tuple[Operand | None, Operand | Held | None]:
        """Return the operands asked for, quantized from ``master``, with nominal dtype ``dtype``.

        A face is made once per write, recipe and dtype, and a face that was made for evaluation does not stand in the
        way of training: what is missing is added. While compiling, faces are made in the graph instead; while
        something records what runs, or replays what writes the weight, they are made anew and not kept.
        """
        if torch.compiler.is_compiling():
            return self._quantized(rowwise, columnwise, dtype)
        if self.writes.replayed or getattr(self.layer, "replayed", False) or is_recorded():
            with torch.no_grad():
                return self._quantized(rowwise, columnwise, dtype)
        key = (*self.version, getattr(self.layer, "version", None), self.config, dtype)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, None, None)
        _, row, column = self._cached
        if (rowwise and row is None) or (columnwise and column is None):
            with torch.no_grad():
                row, column = self._quantized(True, columnwise or column is not None, dtype)
            self._cached = (key, row, column)
        return (row if rowwise else None), (column if columnwise else None)

    def _quantized(
        self, rowwise: bool, columnwise: bool, dtype: torch.dtype
    ) -> tuple[Operand | None, Operand | Held | None]:
        """Return operands, made now."""
        made: tuple[Operand | None, Operand | Held | None] = self.config.weight.operands(
            self.master, rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=Context("weight", self.state)
        )
        return made

    def faces(self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype) -> tuple[Face | None, Face | None]:
        """Return what ``operands`` returns as faces."""
        row, column = self.operands(rowwise=rowwise, columnwise=columnwise, dtype=dtype)
        return as_face(row, -1, self.master, dtype), as_face(column, 0, self.master, dtype)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Give torch.distributed.checkpoint the plain tensor: checkpoints do not know of quantization."""
        return self.master

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the high-precision values as a plain tensor: ``master`` itself, or its cast to ``dtype``."""
        return self.master if dtype is None else self.master.to(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self.config}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


torch.serialization.add_safe_globals([MasterWeight])
