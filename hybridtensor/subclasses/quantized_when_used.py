"""The faces of a weight in high precision, and when they must be quantized again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtensor.ops import Face, Faces
from hybridtensor.ops.amaxes import AmaxRecord, RecordedAmax
from hybridtensor.ops.autograd import read_version, version_of
from hybridtensor.ops.captures import Stream, stream_of
from hybridtensor.ops.library import dispatch_modes, is_traced
from hybridtensor.quantizers.plans import Amaxes, measured_amaxes
from hybridtensor.recipes.config import HybridConfig, weight_values
from hybridtensor.state import Context, LayerState
from hybridtensor.subclasses.face_cache import (
    EVALUATION,
    CachedFaces,
    ForwardUse,
    Place,
    Seen,
    Stamp,
)
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.observing import for_products_of_weight, observers


class QuantizedWhenUsed(InterceptingTensor):
    """The quantization of a ``MasterWeight`` for linear layers, with cached faces."""

    plain: Tensor
    config: HybridConfig
    place: Place
    _seen: int  # torch's version counter of this object, when writes of compiled code were looked for last

    @property
    def source(self) -> Tensor:
        """The plain tensor that is quantized: ``plain``, or its bf16 rounding by the recipe."""
        return weight_values(self.config, self.plain)

    @property
    def is_rounded_first(self) -> bool:
        """Whether ``source`` is not ``plain``: it is rounded to bf16 at each use, into memory of its own."""
        return self.config.bf16_weight_values and self.plain.dtype != torch.bfloat16

    def context_of_products(self, context: Context, dtype: torch.dtype) -> Context:
        """Return the context of faces that only products read, from the weight's; see ``for_products_of_weight``."""
        if observers or dtype != torch.bfloat16 or context.groups is not None:
            return context
        config, known = self.config, self.record.for_products
        if known is None or known[0] is not context or known[1] is not config:
            made = for_products_of_weight(context, dtype, config, self.plain.device)
            known = self.record.for_products = context, config, made
        return known[2]

    @property
    def changes(self) -> int:
        """A number that changes with every write, and every possible write through an alias."""
        self._count_unobserved()
        return self.record.changes

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether someone else holds the memory now, maybe another process, and may write it uncounted."""
        self._count_unobserved()
        return self.record.is_held_elsewhere

    @property
    def written(self) -> tuple[int, int]:
        """A value that changes with every counted write, equally on all ranks that write."""
        _, of_plain = self._count_unobserved()
        record = self.record
        # Not ``changes``: those that only may have happened are not alike on all ranks. A rank that returned an alias
        # would reduce amaxes alone, and wait for the others.
        return record.writes + record.compiled_writes, of_plain

    @property
    def scales(self) -> int | tuple[int | None, int] | None:
        """A value that changes with the layer's remembered scales and common scale."""
        layer = self.record.layer
        version = None if layer is None else getattr(layer, "version", None)
        common = getattr(layer, "common", None)
        return version if common is None else (version, common.version)

    def seen(self, dtype: torch.dtype) -> Seen:
        """Count unobserved writes, update a changed common scale, and return the weight's state and the stamp of faces
        in ``dtype``."""
        record = self.record
        layer = record.layer
        scales: int | tuple[int | None, int] | None = None
        if isinstance(layer, LayerState):  # in a graph its tensors, which have no version
            scales, common = layer.version, layer.common
            if common is not None:
                # First: it counts writes of sibling weights, too, and may change the version that is read next.
                common.measure_written()
                scales = scales, common.version
        own, of_plain = self._count_unobserved()
        stamp = Stamp(record.changes, scales, self.config, dtype)
        return Seen(stamp, (record.writes, of_plain, own))

    def stamp(self, dtype: torch.dtype) -> Stamp:
        """What faces depend on now: write counts, scales, recipe and ``dtype``."""
        return self.seen(dtype).stamp

    def _count_unobserved(self) -> tuple[int, int]:
        """Count writes that no handler saw, and return torch's version counters of this object and the plain tensor."""
        plain = self.plain
        try:
            # Attempted first: asking whether a tensor has a counter takes longer than reading it, and every use comes
            # here.
            own, of_plain = read_version(self), read_version(plain)
        except RuntimeError:  # a tensor of inference mode has none
            own, of_plain = version_of(self), version_of(plain)
        if own != self._seen:
            self._count_graph_writes(own)
        self.record.count_others(plain, of_plain)
        return own, of_plain

    def _count_graph_writes(self, version: int) -> None:
        """Count writes of compiled graphs: they increment torch's version of this object."""
        # Views and ``detach()`` share torch's version counter with their base; ``data`` starts one at 0.
        if version != self._seen:
            self._seen = version
            if version:
                record = self.record
                record.changes += 1
                record.compiled_writes += 1
                # No handler saw it, so its stream is not known
                if record.writes == record.counted_writes:
                    record.written_on = None
                record.counted_writes = record.writes

    def faces(
        self,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        amax_record: AmaxRecord | RecordedAmax = None,
    ) -> Faces:
        """Return the faces asked for, those in high precision in ``dtype``."""
        if is_traced():
            self.check_common_scale()
            cached = self._new_faces(rowwise, columnwise, dtype, self.context, amax_record)
        else:
            cached = self.faces_in_eager_code(
                self.stamp(dtype),
                stream_of(self.plain),
                self.context,
                forward=EVALUATION if rowwise else None,
                columnwise=columnwise,
                amax_record=amax_record,
            )
        return cached.row if rowwise else None, cached.column if columnwise else None

    def faces_in_eager_code(
        self,
        stamp: Stamp,
        stream: Stream,
        context: Context,
        *,
        forward: ForwardUse | None,
        columnwise: bool,
        amax_record: AmaxRecord | RecordedAmax = None,
    ) -> CachedFaces:
        """Return the faces asked for, and maybe others.

        Faces are cached as the recipe's ``keep_faces`` says, until the next write; missing ones are added. Under a
        dispatch mode, or if replays of a graph write the weight, they are quantized at each use.

        Args:
            stamp: ``self.stamp(dtype)`` now.
            stream: ``stream_of(self.plain)`` now.
            context: ``self.context``, now or in forward.
            forward: The forward that needs the rowwise face; None in a backward, which does not. If a backward
                follows, one cast makes both faces, if they are cached.
            columnwise: Whether the columnwise face is needed now.
            amax_record: Where amaxes are recorded if faces are quantized now.
        """
        # Autograd functions run without gradients already, and asking takes less time than ``no_grad``
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.faces_in_eager_code(
                    stamp,
                    stream,
                    context,
                    forward=forward,
                    columnwise=columnwise,
                    amax_record=amax_record,
                )
        record = self.record
        layer: Any = record.layer  # outside of graphs a LayerState, or None
        # A checkpointing policy counts calls: a cast in its first pass only would shift what it has saved. Replays of a
        # graph count no writes, but there are none while another graph is captured.
        replayed = record.replayed or (layer is not None and layer.replayed)
        if dispatch_modes() or (replayed and not isinstance(stream, tuple)):
            if replayed:
                record.face_cache.clear()  # of those that a capture left
            context = self.context_of_products(context, stamp.dtype)
            rowwise = forward is not None
            return self._new_faces(rowwise, columnwise, stamp.dtype, context, amax_record)
        cached = record.face_cache.use(self.place, stamp, stream, forward)
        made = self._with_missing(cached, stamp, forward, columnwise, amax_record, context)
        if made is not cached:
            record.face_cache.store(self.place, stamp, made, stream)
        return made

    def _with_missing(
        self,
        cached: CachedFaces,
        stamp: Stamp,
        forward: ForwardUse | None,
        columnwise: bool,
        amax_record: AmaxRecord | RecordedAmax,
        context: Context,
    ) -> CachedFaces:
        """Return the cached faces, with those that are missing quantized now."""
        trained, backward_follows = EVALUATION if forward is None else forward
        after_forward, after_backward = self.record.face_cache.lifetime(self.config.keep_faces)
        both = backward_follows and after_forward
        stays = after_backward if columnwise else not trained or after_forward
        # Evaluation records no amax, which training needs
        unmeasured = amax_record is not None and cached.amax_record is None
        row, column = cached.row, cached.column
        if stays or observers:  # not only products read the faces
            row, column = _of_elements(row), _of_elements(column)
        row_is_missing = forward is not None and (row is None or unmeasured)
        column_is_missing = (columnwise or both) and (column is None or unmeasured)
        if not (row_is_missing or column_is_missing):
            return cached
        dtype = stamp.dtype
        amaxes = cached.amaxes
        # Comparing tensors takes longer than all else here
        unknown = amaxes[0] is None and amaxes[1] is None
        if backward_follows and not both and unknown:
            # One pass measures for both faces, of which backward makes the second one later from the same values.
            amaxes = self.amaxes(dtype, context)
        if not stays:
            context = self.context_of_products(context, dtype)
        amax_record = amax_record if cached.amax_record is None else cached.amax_record
        made = self._new_faces(
            row_is_missing, column_is_missing, dtype, context, amax_record, amaxes
        )
        return made._replace(row=made.row or row, column=made.column or column)

    def _new_faces(
        self,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        context: Context,
        amax_record: AmaxRecord | RecordedAmax,
        amaxes: Amaxes = (None, None),
    ) -> CachedFaces:
        """Quantize faces now, scaled by ``amaxes`` where these are known, with where their amaxes are recorded."""
        if isinstance(amax_record, AmaxRecord):
            amax_record = amax_record.provisional()
        if context.state is not None and context.state.amax is not amax_record:
            context = context._replace(state=context.state._replace(amax=amax_record))
        if amaxes is not context.amaxes:
            context = context._replace(amaxes=amaxes)
        row, column = self.quantized(
            rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context
        )
        return CachedFaces(row, column, amaxes, amax_record)

    def amaxes(self, dtype: torch.dtype, context: Context | None = None) -> Amaxes:
        """Measure both faces' amaxes at once, if they are quantized one by one."""
        context = self.context if context is None else context
        return measured_amaxes(self.config.weight, self.source, dtype, context)

    def quantized(
        self,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        config: HybridConfig | None = None,
        context: Context | None = None,
    ) -> Faces:
        """Quantize faces now, without caching; ``config`` and ``context`` replace the weight's own."""
        context = self.context if context is None else context
        config = self.config if config is None else config
        values = weight_values(config, self.plain)
        if config.weight.requantizes:
            # Also under autocast: what the rowwise face holds is rounded once, not twice
            dtype = self.dtype
        return config.weight.faces(
            values, rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context
        )

    @torch.no_grad()
    def forward_face(self) -> Face:
        """Return the rowwise face of the next forward without recording amaxes or caching; may alias the cached
        face."""
        stamp = self.stamp(self.dtype)
        row = self.record.face_cache.rowwise(self.place, stamp, stream_of(self.plain))
        if row is None:
            context = self.context._replace(record=False)
            row, _ = self.quantized(
                rowwise=True, columnwise=False, dtype=self.dtype, context=context
            )
        if row is None:
            raise ValueError(f"MasterWeight: {self.config.weight} made no rowwise face")
        return row

    def check_common_scale(self) -> None:
        """Raise if a graph writes a weight before using it: its common scale is a graph input."""
        state = self.state
        if state is None or state.common_amax is None:
            return
        self._count_graph_writes(version_of(self))
        if self.record.writes or self.record.compiled_writes:
            raise NotImplementedError(
                "common_scale: one graph writes a weight and then multiplies by it, and takes its common "
                "scale from before; compile the optimizer's step by itself"
            )


def _of_elements(face: Face | None) -> Face | None:
    """Return a face, or None if it is dequantized ``values``, which only products read."""
    return None if face is None or face.format.values_of is not None else face
