"""One scale for the weights of several layers, as inference engines need that fuse these layers.

Formats with one scale per tensor, and NVFP4 with its tensor scale, take it from an amax. Weights with a common scale
take the largest of their amaxes. It is part of the state of each layer; it is updated before one of the weights is
quantized.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hybridtensor import ops
from hybridtensor.dtensor import local
from hybridtensor.formats import FP8_E4M3_TENSOR
from hybridtensor.ops import Cast, CastRequest
from hybridtensor.ops.captures import stream_of
from hybridtensor.ops.kernel_library import aligned_fp32
from hybridtensor.ops.library import dispatch_modes
from hybridtensor.quantizers import HybridQuantizer, Quantizer
from hybridtensor.subclasses.intercepting import InterceptingTensor

T = TypeVar("T")
_OF_TENSOR = CastRequest(Cast(FP8_E4M3_TENSOR))  # measures the amax that all formats take


class CommonScale:
    """The common scale of several layers' weights."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self.amax: Tensor | None = None
        self.version = 0
        self.order: Any = None  # a distributed.fsdp.stream_order.StreamOrder
        self._measured: list[tuple[object, ...]] = []

    @property
    def modules(self) -> list[nn.Module | None]:
        """The layers; None for collected ones."""
        return [module() for module in self._modules]

    def __deepcopy__(self, memo: dict[int, object]) -> CommonScale:
        """Copy the layers with one of them; a copy of a weight alone shares the common scale."""
        modules = self.modules
        if not any(id(module) in memo for module in modules):
            return self
        # In the memo before the layers are copied, whose states refer to this. The memo also keeps the copied layers,
        # which are held weakly here, until the copy of the model holds them.
        new = memo[id(self)] = type(self)([])
        new._modules = [weakref.ref(copy.deepcopy(module, memo)) for module in modules if module]
        return new

    def __getstate__(self) -> list[nn.Module | None]:
        return self.modules

    def __setstate__(self, modules: list[nn.Module | None]) -> None:
        CommonScale.__init__(self, (module for module in modules if module is not None))

    @property
    def num_weights(self) -> int:
        return len({id(part.record) for part in self.parts})

    @property
    def parts(self) -> list[InterceptingTensor]:
        """Return the weights, or their local shards; raise RuntimeError if a layer was collected, or is plain again."""
        modules = self.modules
        if None in modules:
            left = sum(module is not None for module in modules)
            raise RuntimeError(
                f"common_scale: of the layers of one common scale {left} are left; keep, copy or save the module "
                "that holds all of them"
            )
        found = [_part(module.weight) for module in modules if module is not None]  # type: ignore[arg-type]
        plain = {type(part).__name__ for part in found if not isinstance(part, InterceptingTensor)}
        if plain:
            raise RuntimeError(
                f"common_scale: layers of one common scale hold {sorted(plain)} beside quantized weights; quantize "
                "these layers alike"
            )
        return found

    def measure_written(self) -> None:
        """Measure master weights that were written; FSDP2's shards are measured in all-gathers, over all ranks."""
        weights: list[Any] = self.parts
        if any(weight.record.shard for weight in weights):
            return
        if not any(measures_tensor(weight.recipe.weight) for weight in weights):
            return
        others = {type(weight).__name__ for weight in weights} - {"MasterWeight"}
        if others:
            raise RuntimeError(
                f"common_scale: layers of one common scale hold {sorted(others)} beside master weights; shard "
                "and quantize these layers alike"
            )
        # Weak references, not ids: another record may have the id of one that is gone.
        stream = stream_of(weights[0].plain)
        captured = isinstance(stream, tuple)
        measured: list[tuple[object, ...]] = [
            (weakref.ref(weight.record), weight.changes, weight.config, weight.plain.data_ptr())
            for weight in weights
        ]
        # While a graph is captured nothing runs: what it measures is known to itself alone.
        measured.append((stream if captured else None,))
        written = measured != self._measured or (_is_replayed(weights) and not captured)
        if not written and not dispatch_modes():
            return
        version = self.version
        with torch.no_grad():
            self.measure([weight.source for weight in weights])
        self._measured = measured
        if not written:  # a mode that counts operators sees the same ones in each pass
            self.version = version

    def measure(self, values: Sequence[Tensor]) -> None:
        """Set the scale from the amax of all weights' values."""
        amaxes = torch.zeros(
            len(values), aligned_fp32(1), dtype=torch.float32, device=values[0].device
        )
        for matrix, out in zip(values, amaxes, strict=True):
            if matrix.numel():
                ops.prepare(matrix, _OF_TENSOR).measure_into(matrix, out[:1])
        self.set_amaxes([amaxes[:, 0].max()])

    def set_amaxes(self, amaxes: Sequence[Tensor]) -> None:
        """Set the scale to the largest of the weights' fp32 amaxes."""
        # An inference may be the first to measure, and training goes on with the same tensor.
        with torch.inference_mode(False), torch.no_grad():
            if self.amax is None or self.amax.device != amaxes[0].device:
                self.amax = torch.zeros(1, dtype=torch.float32, device=amaxes[0].device)
            self.amax.copy_(torch.stack(tuple(amaxes)).amax(0, keepdim=True))
        self.version += 1


def by_scale(
    items: Iterable[T], part_of: Callable[[T], InterceptingTensor]
) -> list[tuple[CommonScale, list[T]]]:
    """Group items by common scale; raise RuntimeError unless all weights of one are present."""
    found: dict[int, tuple[CommonScale, list[T]]] = {}
    for item in items:
        part = part_of(item)
        scale = getattr(part.record.layer, "common", None)
        if scale is not None and measures_tensor(part.recipe.weight):
            found.setdefault(id(scale), (scale, []))[1].append(item)
    for scale, members in found.values():
        if len({id(part_of(item).record) for item in members}) != scale.num_weights:
            raise RuntimeError(
                f"common_scale: {len(members)} of the {scale.num_weights} weights of a common scale were "
                "given, which are quantized together; shard and quantize their layers alike"
            )
    return list(found.values())


def _part(weight: Tensor) -> InterceptingTensor:
    """Return the local shard of a weight, also of a gathered one."""
    part: Any = local(weight)
    gathered = getattr(getattr(part, "record", None), "gathered", None)
    found: InterceptingTensor = part if gathered is None else gathered.sharded.tensor
    return found


def _is_replayed(weights: Sequence[InterceptingTensor]) -> bool:
    """Return whether a CUDA graph writes one of the weights, uncounted."""
    return any(weight.record.replayed for weight in weights)


@functools.lru_cache(maxsize=256)
def measures_tensor(quantizer: Quantizer) -> bool:
    """Return whether a face of a weight is scaled by the tensor's amax."""
    if isinstance(quantizer, HybridQuantizer):
        of_values = quantizer.columnwise_source == "original"
        return measures_tensor(quantizer.rowwise) or (
            of_values and measures_tensor(quantizer.columnwise)
        )
    fmt = quantizer.rowwise_format
    of_tensor = (None, None) in (fmt.block, fmt.tensor_block) and not fmt.hadamard
    return of_tensor and not fmt.is_identity and not quantizer.delayed_rules("weight")
