"""What quantizing needs of a layer's state, as the layer gives it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hybridtensor.ops import Hint
from hybridtensor.ops.amaxes import AmaxRecord, RecordedAmax, ReturnedAmaxes
from hybridtensor.state.dry_runs import is_dry_run


class Traced:
    """The layer that a graph was traced for: equal to that of any other, so that equal layers share graphs.

    Attributes:
        layer: Returns the ``LayerState``, or None if it is gone or the graph came from a file.
    """

    __slots__ = ("layer",)

    def __init__(self, layer: nn.Module | None = None) -> None:
        self.layer: Callable[[], nn.Module | None] = lambda: None
        if layer is not None:
            self.layer = weakref.ref(layer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traced)

    def __hash__(self) -> int:
        return hash(Traced)

    # The same text and bytes for each layer: they are part of the keys of torch's caches of graphs
    def __repr__(self) -> str:
        return "Traced()"

    def __reduce__(self) -> tuple[type[Traced], tuple[()]]:
        return Traced, ()


class StateTensors(NamedTuple):
    """The tensors of a layer's state that quantizing needs, with their slots.

    Attributes:
        rounding: int64 ``[2]``, the layer's key and the step; None where nothing rounds at random.
        encode_scale: fp32 ``[S]``, what values are multiplied with before a delayed cast; None without delayed scaling.
        amax: Where casts record amaxes, fp32 ``[S]``: what the step has in total, or what one forward and its backward
            have until they are committed; in a graph the address of a record, or ``ReturnedAmaxes``; None where
            nothing is recorded.
        slots: Names of the delayed scales.
        rank: Index of this rank's part of a batch; 0 where nothing rounds at random.
        name: Fully qualified name of the layer, for errors.
        hints: What speeds up casts of tensors like those before, by slot; None while compiling.
        common_amax: fp32 ``[1]``, what the weight is scaled by instead of its own amax, where several
            layers' weights have a common scale; or None.
        transposed: Whether the weight is stored ``[in, out]``, or each matrix of a stack; None for ``nn.Linear``.
        step_record: Where a backward commits amaxes; in a graph its address, int64 ``[1]``.
        traced: The layer that a graph is being traced for; None outside of graphs.
    """

    rounding: Tensor | None
    encode_scale: Tensor | None
    amax: RecordedAmax
    slots: tuple[str, ...] = ()
    rank: int = 0
    name: str = ""
    hints: dict[str, Hint] | None = None
    common_amax: Tensor | None = None
    transposed: bool | None = None
    step_record: AmaxRecord | Tensor | None = None
    traced: Traced | None = None

    def provisional(self) -> StateTensors:
        """Return a copy for one forward, whose amaxes ``commit`` records in its backward."""
        if self.step_record is None:
            return self
        if isinstance(self.step_record, Tensor):
            return self._replace(amax=ReturnedAmaxes(len(self.slots)))
        if is_dry_run():
            return self._replace(amax=None, step_record=None)
        return self._replace(amax=self.step_record.provisional())

    def in_backward(self) -> StateTensors:
        """Return a copy for backward: in a graph its amaxes are recorded at once."""
        if isinstance(self.amax, ReturnedAmaxes) and isinstance(self.step_record, Tensor):
            return self._replace(amax=self.step_record)
        return self

    def commit(
        self,
        of_weight: RecordedAmax = None,
        of_input: RecordedAmax = None,
        *,
        alone: bool = False,
    ) -> None:
        """Commit the amaxes of a forward and its backward, or of a forward ``alone``, fp32 ``[S]``, unless a graph
        records them itself."""
        record = self.step_record
        if isinstance(record, AmaxRecord):
            found = self.amax, of_weight, of_input
            of_input = of_input if isinstance(of_input, Tensor) else None
            if alone:
                record.commit_alone(found, of_input)
            else:
                record.commit(*found)
                record.add_input(of_input)

    def require_on(self, device: torch.device, who: object) -> None:
        """Raise ValueError unless all tensors are on ``device`` in their dtypes, because a kernel would use invalid
        addresses."""
        for tensor, dtype in ((self.encode_scale, torch.float32), (self.rounding, torch.int64)):
            if tensor is not None and tensor.dtype != dtype:
                raise ValueError(
                    f"{who}: {layer_of(self)} has its state in {tensor.dtype}, not {dtype}; cast the model "
                    "by to(), which leaves buffers of quantization_state as they are"
                )
            if tensor is not None and tensor.device != device:
                raise ValueError(
                    f"{who}: layer {self.name} has its state on {tensor.device}, and what is quantized is on "
                    f"{device}; move all of the model, or its buffers, by to()"
                )

    def position(self, slot: str) -> int:
        """Return the index of ``slot``; raise ValueError, or NotImplementedError for one of several experts."""
        if f"{slot}[0]" in self.slots:
            raise NotImplementedError(
                f"layer {self.name}: a product of one expert does not say which of the experts' delayed "
                "scales it takes; multiply by F.grouped_mm"
            )
        if slot not in self.slots:
            raise ValueError(
                f"layer {self.name!r}: no delayed scale {slot!r}; change recipes with set_config_"
            )
        return self.slots.index(slot)


def layer_of(state: object) -> str:
    """Return the name of the layer that a ``LayerState``, or its ``StateTensors``, belongs to, for errors."""
    name = getattr(state, "name", "")
    return f"layer {name}" if name else "a layer"


class CommonAmax(Protocol):
    """The interface of ``subclasses.common_scale.CommonScale``."""

    amax: Tensor | None
    version: int

    @property
    def modules(self) -> list[nn.Module | None]:
        """The layers; None for collected ones."""

    def measure_written(self) -> None:
        """Measure the weights that were written."""
