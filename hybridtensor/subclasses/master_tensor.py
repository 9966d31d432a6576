"""A high-precision weight that is quantized when it is used."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from hybridtensor.arguments import require_dtype, require_flag, wrong
from hybridtensor.dtensor import local
from hybridtensor.ops.autograd import version_of
from hybridtensor.ops.captures import Stream, stream_of
from hybridtensor.ops.library import is_captured
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state.training import callbacks_of_writes
from hybridtensor.subclasses.face_cache import place_of
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.op_table import OpTable
from hybridtensor.subclasses.quantized_when_used import QuantizedWhenUsed
from hybridtensor.subclasses.record import WeightRecord
from hybridtensor.subclasses.wrapper import Metadata, Size, Stride, WrapperTensor, require_plain


class MasterWeight(QuantizedWhenUsed):
    """A high-precision weight with the recipe by which linear layers quantize it.

    ::

        weight = model.blocks[0].weight  # after quantize_(model, "fp8")
        print(weight.config, weight.master)

    Optimizers, checkpoints and initialization see the high-precision tensor. ``faces`` quantizes it and caches the
    result until the next write.

    Attributes:
        plain: The plain tensor, for this package, which calls ``mark_written`` after each write. Others use ``master``.
        config: The recipe.
        place: Key of this view in the cache of faces.
    """

    ops = OpTable(
        "MasterWeight",
        "leave the layer out of quantize_ (keep_bf16), or, where no gradient is needed, operate on dequantize()",
    )
    functions = OpTable("MasterWeight", "", of_functions=True)
    inner_names = ("plain",)
    former_names: ClassVar[dict[str, str]] = {"master": "plain"}
    metadata_names = ("config",)
    transient_names = (*InterceptingTensor.transient_names, "_seen", "place")

    @staticmethod
    def __new__(
        cls,
        plain: Tensor,
        config: HybridConfig | None = None,
        size: Size | None = None,
        stride: Stride = None,
        *,
        requires_grad: bool | None = None,
    ) -> Self:
        if requires_grad is not None:
            return cls.parameter_of(plain, requires_grad)  # type: ignore[return-value]
        require_plain("MasterWeight", plain)
        if not isinstance(config, HybridConfig):
            advice = "HybridConfig.parse makes one of a string"
            raise wrong("MasterWeight", "a HybridConfig", config, advice)
        made = cls._make(plain.size(), plain.stride(), plain.dtype, plain.device)
        made.plain, made.config, made.place = plain, config, place_of(plain)
        made.record, made._seen = WeightRecord(), 0
        made.record.add_holder(plain)
        return made

    def alias(self, plain: Tensor) -> MasterWeight:
        """Return a wrapper of ``plain``, a view of this weight's memory: a write through either is seen by both."""
        # First: the alias shares torch's version counter, and would take uncounted writes of a graph as seen.
        self._count_graph_writes(version_of(self))
        new = type(self)(plain, self.config)
        new.record, new._seen = self.record, self._seen
        if plain is not self.plain:
            # Else this weight counts earlier writes at its next use, when the alias has faces of after them.
            self.record.count_writes(self.plain, version_of(self.plain))
            self.record.add_holder(plain)
        return new

    @property
    def master(self) -> Tensor:
        """An alias of the plain tensor, of the weight's shape and dtype; writes into it change the weight.

        While it, or a view of it, exists, faces are not cached: the weight is quantized at each use.
        """
        return self.record.alias_for_others(self.plain)

    def mark_written(self) -> None:
        """Record a write of ``plain``: it invalidates cached faces, and backward raises for tensors saved before."""
        mark_all_written([self])

    def data_ptr(self) -> int:
        """Return the address of the plain tensor; kernels that write it have to call ``mark_written``."""
        return self.plain.data_ptr()

    def carried(self) -> tuple[list[str], Metadata | None]:
        common = getattr(self.record.layer, "common", None)
        if common is not None:
            # torch calls this while it traces; active modes would record the update in the graph. The function that
            # disables them is private
            with _disable_current_modes():
                common.measure_written()
        return super().carried()

    def take_memory(self, plain: Tensor) -> None:
        """Replace the memory by ``plain``, of any shape, dtype and device; recipe and layer stay.

        Existing aliases and views keep the former memory.
        """
        made = type(self)(plain, self.config)
        made.record = self.record.successor()
        made.record.add_holder(plain)
        self.become(made)

    def become(self, other: Self) -> None:
        super().become(other)
        # ``_seen`` was copied from ``other``, but the version counter is still that of this object.
        self._seen = version_of(self)

    def share_memory_(self) -> Self:
        """Move the plain tensor to memory that processes share, whose writes each use counts: faces are not cached."""
        self.plain.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether processes share the memory; always true on a GPU, as of any tensor."""
        return bool(self.plain.is_shared())

    def numpy(self, *, force: bool = False) -> Any:
        """Return a numpy array that shares the memory of the plain tensor.

        Raises:
            RuntimeError: If the weight requires a gradient, unless ``force``.
        """
        require_flag("MasterWeight.numpy", force=force)
        if self.requires_grad and not force:
            raise RuntimeError(
                "MasterWeight: numpy() would lose the gradient that this weight requires; call "
                "detach().numpy()"
            )
        return self.master.numpy(force=force)

    def __get_tensor_shard__(self, index: object) -> Tensor:
        """Return the plain tensor to torch.distributed.checkpoint."""
        return self.master

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the high-precision values as a plain tensor: ``master``, or its cast to ``dtype``."""
        if dtype is None or dtype == self.dtype:
            return self.master
        require_dtype("MasterWeight.dequantize", dtype)
        return self.plain.to(dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self.config}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def mark_all_written(weights: list[MasterWeight]) -> None:
    """Call ``mark_written`` on the weights that one operator wrote (foreach optimizers)."""
    captured, streams = is_captured(), dict[torch.device, Stream]()
    plains = []
    for weight in weights:
        plain, record = weight.plain, weight.record
        record.mark_written(captured)
        device = plain.device
        stream = streams.get(device)
        if stream is None:
            stream = streams[device] = stream_of(plain)
        record.written_on = stream
        if not plain.is_inference():
            plains.append(plain)
    if plains:
        torch.autograd.graph.increment_version(plains)


def _count_writes(optimizer: Optimizer) -> None:
    """Count a write of each weight with a gradient that an optimizer has: kernels that get addresses, such as Triton's,
    write where no operator is called."""
    with torch._C.DisableTorchFunctionSubclass():  # ``grad`` would pass through it
        stepped = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        parts = map(local, stepped)
        mark_all_written([part for part in parts if isinstance(part, MasterWeight)])


callbacks_of_writes.append(_count_writes)


def _reduced_for_another_process(
    weight: MasterWeight,
) -> tuple[Callable[..., WrapperTensor], tuple[object, ...]]:
    """Reduce a weight as ``pickle`` does, and record that another process gets its memory, if it is a GPU's."""
    weight.record.is_interprocess = weight.record.is_interprocess or weight.plain.is_cuda
    return weight.__reduce_ex__(2)


ForkingPickler.register(MasterWeight, _reduced_for_another_process)
