"""Operands that weights are, by where their columnwise face is until backward; see ``operands``.

| class | from |
|---|---|
| ``GivenWeight`` | a persistent weight, whose faces are the parameter |
| ``MasterOperand`` | a weight in high precision in eager code, whose faces are cached or quantized when needed |
| ``TracedMaster`` | the same in a graph: forward and backward each quantize one face |
| ``Operand`` | the same under ``keep_faces="always"``: forward quantizes both faces |
| ``RequantizedWeight`` | a persistent weight whose columnwise face backward requantizes with random signs |
| ``GatheredWeight`` | a weight whose columnwise face FSDP2 gathers again for backward |
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hybridtensor.linear.operands import (
    Needs,
    Operand,
    Weight,
    note_other_layout,
    required_columnwise,
    uses_other_layout,
)
from hybridtensor.linear.weight_buckets import bucket_of
from hybridtensor.ops import Face
from hybridtensor.ops.amaxes import AmaxRecord
from hybridtensor.ops.captures import stream_of
from hybridtensor.ops.cast.compile_ahead import weight_casts
from hybridtensor.ops.library import is_traced
from hybridtensor.quantizers import HybridQuantizer
from hybridtensor.quantizers.hybrid import by_direction
from hybridtensor.quantizers.plans import recorded_in_backward
from hybridtensor.state import Context, StateTensors, layer_of
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.face_cache import ForwardUse
from hybridtensor.subclasses.observing import for_products_of_weight


class MasterOperand(Operand):
    """A weight in high precision whose columnwise face is cached or quantized in backward."""

    __slots__ = ("_config", "_context", "_dtype", "_forward", "_record", "_seen", "_weight")

    def __init__(
        self,
        weight: MasterWeight,
        needs: Needs,
        dtype: torch.dtype,
        amax_record: AmaxRecord | None,
        context: Context,
    ) -> None:
        self._forward = ForwardUse(trained=any(needs), backward_follows=needs.input)
        self._seen = seen = weight.seen(dtype)
        if isinstance(seen.stamp.scales, tuple):
            context = weight.context  # with the common scale as it is now
        self._context = context
        stream = stream_of(weight.plain)
        if weight.record.face_cache.is_old(seen.stamp, stream):
            bucket = bucket_of(weight)
            if bucket is not None:  # with its neighbours in the model: two launches for all of them
                bucket.add_rows(weight)
        cached = weight.faces_in_eager_code(
            seen.stamp,
            stream,
            context,
            forward=self._forward,
            columnwise=False,
            amax_record=amax_record,
        )
        super().__init__(cached.row, None, cached.amax_record)
        self._weight: MasterWeight | None = weight
        self._dtype, self._config, self._record = dtype, weight.config, weight.record

    def save(self) -> list[Tensor]:
        self._row = None
        self._record.face_cache.end_forward(self._config.keep_faces, self._forward)
        # Nothing is saved: backward asks the weight, and raises if that was written since.
        return []

    def columnwise(self, saved: list[Tensor], after: Tensor | None = None) -> Face:
        """Return the columnwise face; raise RuntimeError if the weight or its scales changed since forward, or it
        was freed."""
        weight = self._weight
        if weight is None:
            raise RuntimeError(
                "linear: second backward through a freed graph; pass retain_graph=True to the first backward"
            )
        # What stands there now may be no weight of ours
        known = isinstance(weight, MasterWeight) and weight.record is self._record
        seen = weight.seen(self._dtype) if known else None
        # Counted writes only: that an alias may have written is no reason to raise.
        if seen is None or seen.writes != self._seen.writes:
            raise RuntimeError(
                f"grad_input: the weight of {layer_of(self._context.state)} was written or replaced between its "
                "forward and backward; do that after backward, or leave the layer out of quantize_ (keep_bf16)"
            )
        if weight.config is self._config or weight.config == self._config:
            if seen.stamp.scales != self._seen.stamp.scales:
                raise RuntimeError(
                    f"grad_input: the scales of the weight of {layer_of(self._context.state)} changed between its "
                    "forward and backward; call step_, and write weights that have a common_scale with it, after "
                    "backward"
                )
            if self._record.face_cache.awaits_column:
                bucket = bucket_of(weight)
                if bucket is not None:  # those of all whose forward is over, in one launch
                    bucket.add_columns(weight)
            column = weight.faces_in_eager_code(
                seen.stamp,
                stream_of(weight.plain),
                self._context,
                forward=None,
                columnwise=True,
                amax_record=self.amax_record,
            ).column
        else:  # another recipe was set since forward
            _, column = weight.quantized(
                rowwise=False,
                columnwise=True,
                dtype=self._dtype,
                config=self._config,
                context=self._context,
            )
        return required_columnwise(column)

    def release(self, *, used: bool) -> None:
        if used:
            self._record.face_cache.end_backward(self._config.keep_faces)
        if not _is_retained():
            self._weight = None  # as autograd lets go of what it saved, though the loss lives on


class TracedMaster(Operand):
    """A weight in high precision in a traced graph: forward and backward each quantize one face."""

    __slots__ = ("_context", "_dtype", "_weight")

    def __init__(
        self,
        weight: MasterWeight,
        needs: Needs,
        dtype: torch.dtype,
        state: StateTensors | None,
        record: bool,
    ) -> None:
        weight.check_common_scale()
        self._weight, self._dtype = weight, dtype
        context = weight.context._replace(state=state)
        context = for_products_of_weight(context, dtype, weight.config, weight.device)
        with weight_casts():
            of_forward = context
            if needs.input:
                context = context._replace(amaxes=weight.amaxes(dtype))
                of_forward = recorded_in_backward(context, weight.config.weight)
            self._context = context
            row, _ = weight.quantized(
                rowwise=True,
                columnwise=False,
                dtype=dtype,
                context=of_forward._replace(record=record),
            )
        super().__init__(row, None)

    def columnwise(self, saved: list[Tensor], after: Tensor | None = None) -> Face:
        self._weight.check_common_scale()
        context = self._context.in_backward()._replace(after=after)
        with weight_casts():
            _, column = self._weight.quantized(
                rowwise=False, columnwise=True, dtype=self._dtype, context=context
            )
        return required_columnwise(column)


class GivenWeight(Operand):
    """A weight whose faces came with it: persistent, or gathered by FSDP2."""

    __slots__ = ()
    is_given = True


class GatheredWeight(GivenWeight):
    """A weight that FSDP2 gathers again for backward; its storage is freed in between.

    ::

        fully_shard(layer)
        layer.unshard()
        gathered = ht.linear.weight_operand(layer.weight, needs, x.dtype, context, layer.weight.context)
    """

    __slots__ = ("_dtype", "_weight")

    def __init__(self, weight: HybridTensor, row: Face | None, dtype: torch.dtype) -> None:
        super().__init__(row, None)
        self._weight, self._dtype = weight, dtype

    def columnwise(self, saved: list[Tensor], after: Tensor | None = None) -> Face:
        column = self._weight.faces(rowwise=False, columnwise=True, dtype=self._dtype)[1]
        return required_columnwise(column)


class RequantizedWeight(GivenWeight):
    """A persistent weight whose columnwise face backward requantizes from the rowwise one, with random signs (EDEN)."""

    __slots__ = ("_context", "_dtype", "_quantizer")

    def __init__(
        self, row: Face | None, quantizer: HybridQuantizer, dtype: torch.dtype, context: Context
    ) -> None:
        super().__init__(row, None)
        self._quantizer, self._dtype, self._context = quantizer, dtype, context

    def save(self) -> list[Tensor]:
        self._column = self.rowwise()
        return super().save()

    def columnwise(self, saved: list[Tensor], after: Tensor | None = None) -> Face:
        row, context = super().columnwise(saved), self._context._replace(after=after)
        return self._quantizer.derive_columnwise(row, self._dtype, context)


def weight_operand(
    weight: Weight, needs: Needs, dtype: torch.dtype, context: Context, of_weight: Context
) -> Operand:
    """Return the operand of a weight: quantized now, cached, persistent or gathered.

    ::

        context = ht.Context("input", weight.state)
        right = ht.linear.weight_operand(weight, needs, x.dtype, context, weight.context)

    Args:
        weight: The weight.
        needs: Which gradients backward will be asked for.
        dtype: Dtype of the computation.
        context: The input's, of which the state, ``record`` and ``direct`` hold for the call.
        of_weight: ``weight.context``.
    """
    if isinstance(weight, MasterWeight):
        state = context.state
        traced = not context.direct and is_traced()
        if traced and weight.config.keep_faces != "always":
            return TracedMaster(weight, needs, dtype, state, context.record)
        recording = None
        if state is not None and context.record and _is_delayed(state.slots):
            recording = state
        if traced:
            amax = None if recording is None else recording.amax
            return Operand(
                *weight.faces(rowwise=True, columnwise=needs.input, dtype=dtype, amax_record=amax)
            )
        record = None if recording is None else recording.step_record
        return MasterOperand(
            weight, needs, dtype, record if isinstance(record, AmaxRecord) else None, of_weight
        )
    gathered, quantizer = weight.is_gathered, weight.recipe.weight
    if uses_other_layout(weight):
        _require_faces_alike(weight)
        if is_traced():
            note_other_layout(weight)
    later = gathered or quantizer.draws_from_rowwise
    row, column = weight.faces(rowwise=True, columnwise=needs.input and not later, dtype=dtype)
    if gathered:
        return GatheredWeight(weight, row, dtype)
    if needs.input and isinstance(quantizer, HybridQuantizer) and quantizer.draws_from_rowwise:
        return RequantizedWeight(row, quantizer, weight.dtype, of_weight)
    return GivenWeight(row, column)


def _require_faces_alike(weight: HybridTensor) -> None:
    """Raise NotImplementedError for a weight that is multiplied in the other layout than it is stored in, by faces that
    the recipe quantizes unlike each other: each of them would be in the product of the other."""
    row, column, derived = by_direction(weight.recipe.weight)
    if row == column and not derived:
        return
    where = "gathered by FSDP2" if weight.is_gathered else "persistent"
    where = "persistent, or gathered by FSDP2," if is_traced() else where
    raise NotImplementedError(
        f"linear: the weight of {layer_of(weight.record.layer)} is {where} and was multiplied in the other layout "
        "than it is stored in (its transpose by F.linear, or x @ weight), so that output would read the face of "
        f"grad_input, which {weight.recipe} quantizes in another way; give the layer a recipe with one weight format "
        "for both, or leave it out of quantize_ (keep_bf16)"
    )


@functools.lru_cache(maxsize=1024)
def _is_delayed(slots: tuple[str, ...]) -> bool:
    return any(slot.startswith("weight") for slot in slots)


# Whether the backward that runs now retains its graph: private, and what AOTAutograd asks, too.
_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
