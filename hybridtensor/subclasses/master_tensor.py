"""A high-precision weight that is quantized when it is used."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtensor.arguments import require_dtype, require_flag, wrong
from hybridtensor.ops import Face, Faces
from hybridtensor.ops.amaxes import AmaxRecord, Notes
from hybridtensor.ops.library import is_captured, is_recorded, is_traced
from hybridtensor.quantizers.plans import measured
from hybridtensor.recipes.config import HybridConfig, weight_values
from hybridtensor.state import Context, LayerState
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.kept_faces import Amaxes, Kept, Place, Seen, Stamp, place_of, stream_of
from hybridtensor.subclasses.observing import for_products, observers
from hybridtensor.subclasses.op_table import OpTable
from hybridtensor.subclasses.record import WeightRecord, read_version, version_of
from hybridtensor.subclasses.wrapper import Metadata, Size, Stride, require_plain


class MasterWeight(InterceptingTensor):
    """A high-precision weight with the recipe by which linear layers quantize it.

    To optimizers, checkpoints and initialization it is the high-precision tensor. ``faces``
    quantizes it and keeps the result until the next write.

    Attributes:
        plain: The plain tensor. Inside this package it is only read, or written with
            ``note_write``; ``master`` hands it out.
        config: The recipe.
        place: Which view of the memory of the weight this is.
    """

    ops = OpTable("MasterWeight", "operate on dequantize(), or on a plain copy of the weight")
    functions = OpTable("MasterWeight", "")
    inner_names = ("plain",)
    former_names: ClassVar[dict[str, str]] = {"master": "plain"}
    metadata_names = ("config",)
    transient_names = (*InterceptingTensor.transient_names, "_seen", "place")

    plain: Tensor
    config: HybridConfig
    place: Place
    _seen: int

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
        return cls._make(plain.size(), plain.stride(), plain.dtype, plain.device)

    def __init__(
        self,
        plain: Tensor,
        config: HybridConfig | None = None,
        size: Size | None = None,
        stride: Stride = None,
        *,
        requires_grad: bool | None = None,
    ) -> None:
        if config is None:
            return  # ``parameter_of`` made all of it
        self.plain, self.config, self.place = plain, config, place_of(plain)
        self.record, self._seen = WeightRecord(), 0
        self.record.add_holder(plain)

    def alias(self, plain: Tensor) -> MasterWeight:
        """Return a wrapper of ``plain``, a view of this weight's memory: a write through either is
        seen by both.
        """
        self._count_graph_writes(version_of(self))
        new = type(self)(plain, self.config)
        new.record, new._seen = self.record, self._seen
        if plain is not self.plain:
            self.record.add_holder(plain)
        return new

    @property
    def master(self) -> Tensor:
        """An alias of the plain tensor. What is written into it is seen by the next use of the
        weight.

        While the alias lives, or anything made from it, the weight is quantized anew at each use.
        """
        return self.record.hand_out(self.plain)

    @property
    def source(self) -> Tensor:
        """The plain values that faces are made of: ``plain``, unless the recipe rounds them before."""
        return weight_values(self.config, self.plain)

    @property
    def version(self) -> tuple[int, int]:
        """A value that changes with every write, also with those that others may have made through
        what was handed out.
        """
        writes = self.writes
        self.record.count_others(self.plain, version_of(self.plain))
        return writes, self.record.changes

    @property
    def writes(self) -> int:
        """How many writes are counted, with those of compiled code, of which this takes note."""
        self._count_graph_writes(version_of(self))
        return self.record.writes + self.record.compiled_writes

    @property
    def written(self) -> tuple[int, int]:
        """A value that changes with every counted write; on all ranks alike where all ranks write."""
        return self.writes, version_of(self.plain)

    @property
    def state_version(self) -> int | tuple[int | None, int] | None:
        """A value that changes with the scales that the layer remembers, or has in common with others."""
        layer = self.record.layer
        version = None if layer is None else getattr(layer, "version", None)
        common = getattr(layer, "common", None)
        return version if common is None else (version, common.version)

    def seen(self) -> Seen:
        """Count writes that no handler saw, measure a common scale again that they changed, and return the counts."""
        record, plain = self.record, self.plain
        layer: Any = record.layer
        scales: int | tuple[int | None, int] | None = None
        if type(layer) is LayerState:  # in a graph its tensors, which have no version
            scales, common = layer.version, layer.common
            if common is not None:
                common.renew()
                scales = scales, common.version
        try:
            own, of_plain = read_version(self), read_version(plain)
        except RuntimeError:  # a tensor of inference mode has none
            own, of_plain = version_of(self), version_of(plain)
        if own != self._seen:
            self._count_graph_writes(own)
        record.count_others(plain, of_plain)
        return Seen(record.changes, scales, (record.writes, of_plain, own))

    def stamp(self, dtype: torch.dtype, seen: Seen | None = None) -> Stamp:
        """What faces depend on now.

        Args:
            dtype: Dtype of the computation.
            seen: ``self.seen()``, where that was just asked.
        """
        seen = self.seen() if seen is None else seen
        return seen.changes, seen.scales, self.config, dtype

    def _count_graph_writes(self, version: int) -> None:
        """Count writes of compiled graphs: they increment torch's version of this object.

        Views and ``detach()`` share that version with what they were taken from, ``data`` begins
        one of its own at 0.
        """
        if version != self._seen:
            self._seen = version
            if version:
                record = self.record
                record.changes += 1
                record.compiled_writes += 1
                if (
                    record.writes == record.counted_writes
                ):  # no handler saw it, so its stream is not known
                    record.written_on = None
                record.counted_writes = record.writes

    def note_write(self) -> None:
        """Record that ``plain`` was written to, so that no cached face and no saved tensor outlives
        it.
        """
        note_writes([self])

    def faces(
        self,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        noted: AmaxRecord | Tensor | Notes | None = None,
    ) -> Faces:
        """Return the faces asked for, those in high precision in ``dtype``.

        While compiling, they are made in the graph; else see ``faces_in_eager_code``.

        Args:
            rowwise: Return the rowwise face, for a forward.
            columnwise: Return the columnwise face.
            dtype: Dtype of the computation.
            noted: Where amaxes are recorded: what a backward will commit to, or what it commits, fp32 ``[S]``; in a
                graph ``Notes``, or an address; None where a face is for evaluation.
        """
        if is_traced():
            self.check_common_scale()
            kept = self._made(rowwise, columnwise, dtype, self.context, noted)
        else:
            kept = self.faces_in_eager_code(
                rowwise=rowwise, columnwise=columnwise, dtype=dtype, noted=noted
            )
        return kept.row if rowwise else None, kept.column if columnwise else None

    def faces_in_eager_code(
        self,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        trained: bool = False,
        backward_follows: bool = False,
        noted: AmaxRecord | Tensor | Notes | None = None,
        context: Context | None = None,
        stamp: Stamp | None = None,
    ) -> Kept:
        """Return the faces asked for, and maybe others.

        Faces are kept as the recipe's ``keep_faces`` says, and used as long as nothing was written; a
        face that was made for evaluation does not stand in the way of training: what is missing is
        added. While something records what runs, or replays what writes the weight, they are made anew and not kept.

        Args:
            rowwise: See ``faces``.
            columnwise: See ``faces``.
            dtype: See ``faces``.
            trained: The forward is one of training.
            backward_follows: A backward will ask for the columnwise face: one cast makes both, if they are
                kept.
            noted: See ``faces``.
            context: ``self.context``, where that is known.
            stamp: ``self.stamp(dtype)``, where that was just asked.
        """
        record, plain = self.record, self.plain
        layer: Any = record.layer  # outside of graphs a LayerState, or None
        stamp = self.stamp(dtype) if stamp is None else stamp
        context = self.context if context is None else context
        if record.replayed or is_recorded() or (layer is not None and layer.replayed):
            context = for_products(context, dtype, row=True, column=True)
            with torch.no_grad():
                return self._made(rowwise, columnwise, dtype, context, noted)
        use = rowwise, trained, backward_follows
        kept = record.kept.use(self.place, stamp, stream_of(plain), *use)
        wanted = rowwise, columnwise, trained, backward_follows
        if not torch.is_grad_enabled():  # as inside of autograd functions
            return self._completed(kept, stamp, *wanted, noted, context)
        with torch.no_grad():
            return self._completed(kept, stamp, *wanted, noted, context)

    def _completed(
        self,
        kept: Kept,
        stamp: Stamp,
        rowwise: bool,
        columnwise: bool,
        trained: bool,
        backward_follows: bool,
        noted: AmaxRecord | Tensor | Notes | None,
        context: Context,
    ) -> Kept:
        """Return what is kept, with what is missing."""
        outlast, outlast_step = self.record.kept.lifetime(self.config.keep_faces)
        both = backward_follows and outlast
        lasting = outlast_step if columnwise else not trained or outlast
        unmeasured = noted is not None and kept.noted is None  # it was made for evaluation
        row, column = kept.row, kept.column
        if lasting or observers:  # not only products read the faces
            row, column = _of_elements(row), _of_elements(column)
        row_is_missing = rowwise and (row is None or unmeasured)
        column_is_missing = (columnwise or both) and (column is None or unmeasured)
        if not (row_is_missing or column_is_missing):
            return kept
        dtype = stamp[-1]
        amaxes = kept.amaxes
        unknown = (
            amaxes[0] is None and amaxes[1] is None
        )  # comparing tensors takes longer than all else here
        if backward_follows and not both and unknown:
            amaxes = self.amaxes(dtype, context)
        if not lasting:
            context = for_products(context, dtype, row=True, column=True)
        noted = noted if kept.noted is None else kept.noted
        made = self._made(row_is_missing, column_is_missing, dtype, context, noted, amaxes)
        kept = Kept(made.row or row, made.column or column, amaxes, made.noted)
        self.record.kept.keep(self.place, stamp, kept)
        return kept

    def _made(
        self,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        context: Context,
        noted: AmaxRecord | Tensor | Notes | None,
        amaxes: Amaxes = (None, None),
    ) -> Kept:
        """Return faces that are made now, with where their amaxes are recorded."""
        if isinstance(noted, AmaxRecord):
            noted = noted.provisional()
        if context.state is not None and context.state.amax is not noted:
            context = context._replace(state=context.state._replace(amax=noted))
        row, column = self.quantized(rowwise, columnwise, dtype, amaxes=amaxes, context=context)
        return Kept(row, column, amaxes, noted)

    def amaxes(self, dtype: torch.dtype, context: Context | None = None) -> Amaxes:
        """Return what both faces are scaled by, measured at once, if they are to be made one by one."""
        context = self.context if context is None else context
        return measured(self.config.weight, self.source, dtype, context).amaxes

    def quantized(
        self,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        *,
        record: bool = True,
        amaxes: Amaxes = (None, None),
        after: Tensor | None = None,
        config: HybridConfig | None = None,
        context: Context | None = None,
    ) -> Faces:
        """Return faces that are made now, and not kept.

        Args:
            rowwise: Make the rowwise face.
            columnwise: Make the columnwise face.
            dtype: Dtype of the computation.
            record: Take note of amaxes.
            amaxes: What they are scaled by, where that was measured before.
            after: What a graph computes before.
            config: A recipe instead of the weight's.
            context: A context instead of the weight's, which has the state as it is now.
        """
        context = self.context if context is None else context
        if record is not context.record or after is not None or amaxes is not context.amaxes:
            context = context._replace(record=record, amaxes=amaxes, after=after)
        config = self.config if config is None else config
        values = weight_values(config, self.plain)
        return config.weight.faces(
            values, rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context
        )

    @torch.no_grad()
    def forward_face(self) -> Face:
        """Return the rowwise face that the next forward multiplies, and take note of nothing: neither
        of the face, nor of amaxes. It shares the memory of the one that is kept, if one is.
        """
        stamp = self.stamp(self.dtype)
        row = self.record.kept.rowwise(self.place, stamp)
        made = self.quantized(True, False, self.dtype, record=False)[0] if row is None else row
        if made is None:
            raise ValueError(f"MasterWeight: {self.config.weight} made no rowwise face")
        return made

    def renew_common_scale(self) -> None:
        """Measure what was written of the weights that this one has a common scale with."""
        common = getattr(self.record.layer, "common", None)
        if common is not None:
            common.renew()

    def check_common_scale(self) -> None:
        """Raise where a graph writes the weight before it uses it: its common scale is an input."""
        state = self.state
        if state is not None and state.common_amax is not None and self.writes:
            raise NotImplementedError(
                "common_scale: a weight that is written outside of the graph that uses it is required, got a "
                "write and then a product in one graph; compile the optimizer's step by itself"
            )

    def carried(self) -> tuple[list[str], Metadata | None]:
        """See ``InterceptingTensor.carried``: a graph takes the common scale as it is now."""
        # torch asks in the middle of tracing, whose modes would take this for a part of the graph;
        # the way out of them is private
        with _disable_current_modes():
            self.renew_common_scale()
        return super().carried()

    def take_memory(self, plain: Tensor) -> None:
        """Be ``plain`` from now on, of any shape, dtype and device, with the same recipe and layer.

        Aliases and views so far keep the memory that they have.
        """
        made = type(self)(plain, self.config)
        made.record = self.record.successor()
        made.record.add_holder(plain)
        self.become(made)

    def become(self, other: Self) -> None:
        """See ``InterceptingTensor.become``."""
        super().become(other)
        self._seen = version_of(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a numpy array in the same memory, as the plain tensor would.

        Raises:
            RuntimeError: If a gradient is required, unless ``force``.
        """
        require_flag("MasterWeight.numpy", force=force)
        if self.requires_grad and not force:
            raise RuntimeError(
                "MasterWeight: numpy() of a weight without gradient is required, got one that "
                "requires it; call detach().numpy()"
            )
        return self.master.numpy(force=force)

    def __get_tensor_shard__(self, index: object) -> Tensor:
        """Give torch.distributed.checkpoint the plain tensor: checkpoints do not know of
        quantization.
        """
        return self.master

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the high-precision values as a plain tensor: ``master``, or its cast to ``dtype``."""
        if dtype is None or dtype == self.dtype:
            return self.master
        require_dtype("MasterWeight.dequantize", dtype)
        return self.plain.to(dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self.config}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def note_writes(weights: list[MasterWeight]) -> None:
    """Do ``note_write`` for weights that one operator wrote, as optimizers write all of them."""
    captured, streams = is_captured(), dict[torch.device, int]()
    plains = []
    for weight in weights:
        plain, record = weight.plain, weight.record
        record.note_write(captured)
        device = plain.device
        stream = streams.get(device)
        if stream is None:
            stream = streams[device] = stream_of(plain)
        record.written_on = stream
        if not plain.is_inference():
            plains.append(plain)
    if plains:
        torch.autograd.graph.increment_version(plains)


def _of_elements(face: Face | None) -> Face | None:
    """Return a face, or None if it is one of values, which only products read."""
    return None if face is None or face.format.values_of is not None else face


torch.serialization.add_safe_globals([MasterWeight])
