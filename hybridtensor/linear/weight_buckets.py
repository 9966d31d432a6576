"""Buckets of weights: neighbours in a model that two launches quantize, in place of two launches for each.

The first of a bucket that is used after an optimizer step makes the rowwise faces of all, or ``step_`` does; the first
backward makes the columnwise faces of all whose forward is over. A weight takes part if a forward in eager code used it
after the write before; what it gets has the bits that it would make by itself.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridtensor import ops
from hybridtensor.dtensor import local
from hybridtensor.ops import CastInputs, Faces
from hybridtensor.ops.library import is_recorded, is_traced, runs_directly
from hybridtensor.quantizers.plans import CastPlan, cast_plan, measuring_plan
from hybridtensor.state import Context, LayerState
from hybridtensor.state.step import after_step
from hybridtensor.subclasses import MasterWeight
from hybridtensor.subclasses.kept_faces import Kept, Seen, Stamp, stamp_of, stream_of
from hybridtensor.subclasses.observing import for_products, observers

_BUCKET = 2**26
"""Elements of a bucket: so much memory the faces take that are made before they are needed; a launch of that size takes
the device longer than the host."""
_AFTER_STEP = 2**28
"""Elements that ``step_`` quantizes for the next forward: at that time a model holds no activations."""
_ALIGNED = 4  # amaxes: kernels are compiled for addresses that are multiples of 16 bytes


class WeightBucket:
    """Neighbouring weights of one recipe, dtype and device.

    Args:
        layers: The layers, and how they call their weights.

    Attributes:
        is_alone: Whether this is a bucket of one weight.
    """

    def __init__(self, layers: Iterable[tuple[nn.Module, str]]) -> None:
        self._layers = [(weakref.ref(layer), name) for layer, name in layers]
        self.is_alone = len(self._layers) == 1

    def weights(self) -> Iterator[MasterWeight]:
        """Yield the weights as they are now, those that can be quantized together with others."""
        for reference, name in self._layers:
            layer = reference()
            weight = None if layer is None else _weight_of(layer, name)
            if weight is not None:
                yield weight

    def refresh(self) -> int:
        """Make the faces that forwards will use, of weights that were written since a forward used them.

        Returns:
            How many elements that took.
        """
        with _as_tensors():
            jobs = [job for weight in self.weights() if (job := _for_forward(weight)) is not None]
            _run(jobs)
        return sum([job.plain.numel() for job in jobs])

    def add_columns(self) -> None:
        """Make the columnwise faces that backwards will ask for, of weights whose forward is over."""
        with _as_tensors():
            _run([job for weight in self.weights() if (job := _for_backward(weight)) is not None])


@contextlib.contextmanager
def _as_tensors() -> Iterator[None]:
    """Record no gradients, and keep attributes of weights from passing through torch functions."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


class _Job:
    """A cast of one weight.

    Args:
        weight: The weight.
        stamp: What its faces depend on.
        context: Which tensor it is.
        plan: The cast.
        kept: What is kept of the weight.
        measuring: What is measured before, or None.
        records: How many amaxes the cast records, in new memory; 0 for none.

    Attributes:
        plain: The plain tensor of the weight.
        kind: Casts of one kind are done together.
    """

    __slots__ = (
        "_context",
        "_stamp",
        "_weight",
        "kept",
        "kind",
        "measuring",
        "plain",
        "plan",
        "records",
    )

    def __init__(
        self,
        weight: MasterWeight,
        stamp: Stamp,
        context: Context,
        plan: CastPlan,
        kept: Kept,
        measuring: CastPlan | None = None,
        records: int = 0,
    ) -> None:
        self._weight, self._stamp, self._context = weight, stamp, context
        self.plain, self.plan, self.measuring = weight.plain, plan, measuring
        self.kept, self.records = kept, records
        self.kind = plan, measuring, records, kept.noted is None

    def inputs(self) -> CastInputs:
        """Collect the tensors that the cast needs beside the weight: amaxes to scale by, and where to record them."""
        context, kept = self._context, self.kept
        state = context.state
        if state is not None and state.amax is not kept.noted:
            state = state._replace(amax=kept.noted)
        context = context._replace(state=state, amaxes=kept.amaxes)
        return self.plan.inputs(self.plain, context)

    def keep(self, made: Faces) -> None:
        """Keep the faces that were made."""
        plain, kept = self.plain, self.kept
        row, column = made
        kept = Kept(row or kept.row, column or kept.column, kept.amaxes, kept.noted)
        self._weight.record.kept.keep(plain, self._stamp, kept, stream_of(plain))


def _for_forward(weight: MasterWeight) -> _Job | None:
    """Return the cast that the next forward would do, or None if there is nothing to do before."""
    record = weight.record
    faces = record.kept
    use, dtype = faces.last_use, faces.dtype
    if use is None or dtype is None:
        return None
    plain, config = weight.plain, weight.config
    stamp = stamp_of(weight.seen(), config, dtype)
    if not faces.is_old(stamp) or record.is_held_elsewhere:
        return None
    if record.written_on != stream_of(plain):
        return None  # a stream that overlaps the optimizer waits for the write in the layer's own forward
    if weight.source is not plain or config.keep_faces == "never":
        return None  # rounded before, into memory of its own; or to be made when it is used
    faces.begin(stamp, forward=True)
    outlast, _ = faces.lifetime(config.keep_faces)
    both, context = use.backward_follows and outlast, weight.context
    if use.trained and not outlast:
        context = for_products(context, dtype, row=True, column=True)
    plan = cast_plan(config.weight, True, both, dtype, context, plain.device)
    if plan is None or not plan.suits_lists:
        return None
    measuring = measuring_plan(config.weight, dtype, context, plain.device)
    if measuring is not None and not measuring.suits_lists:
        return None
    state, records = context.state, 0
    if use.trained and plan.needs.delayed and state is not None and state.amax is not None:
        records = len(state.slots)
    return _Job(weight, stamp, context, plan, Kept(), measuring, records)


def _for_backward(weight: MasterWeight) -> _Job | None:
    """Return the cast that the next backward would do, or None if there is nothing to do before."""
    record = weight.record
    faces = record.kept
    dtype = faces.dtype
    if dtype is None or not faces.awaits_column:
        return None
    plain, config = weight.plain, weight.config
    stamp = stamp_of(weight.seen(), config, dtype)
    kept = faces.current(plain, stamp)
    if kept is None or kept.column is not None or weight.source is not plain:
        return None
    if faces.used_on != stream_of(plain):
        return None  # this stream does not wait for what that forward measured
    if config.keep_faces == "never":
        return None
    context, (_, outlast) = weight.context, faces.lifetime(config.keep_faces)
    if not outlast:
        context = for_products(context, dtype, row=True, column=True)
    plan = cast_plan(config.weight, False, True, dtype, context, plain.device)
    if plan is None or not plan.suits_lists or (any(plan.measured) and kept.amaxes[1] is None):
        return None
    return _Job(weight, stamp, context, plan, kept)


def _run(jobs: list[_Job]) -> None:
    """Measure and cast weights, those of one kind together, and keep the faces."""
    kinds: dict[object, list[_Job]] = {}
    for job in jobs:
        kinds.setdefault(job.kind, []).append(job)
    for alike in kinds.values():
        first, plains = alike[0], [job.plain for job in alike]
        if first.measuring is not None:
            found = ops.measure_all(plains, first.measuring.request)
            for job, each in zip(alike, found, strict=True):
                job.kept = job.kept._replace(amaxes=first.measuring.of_measured(*each))
        if first.records:
            _make_records(alike)
        inputs = [job.inputs() for job in alike]
        made = ops.quantize_all(plains, first.plan.run_request, inputs)
        for job, faces in zip(alike, made, strict=True):
            job.keep(faces)


def _make_records(jobs: list[_Job]) -> None:
    """Have casts record amaxes, each in its part of new memory."""
    size = jobs[0].records
    room = -(-size // _ALIGNED) * _ALIGNED
    memory = torch.zeros(len(jobs) * room, dtype=torch.float32, device=jobs[0].plain.device)
    for index, job in enumerate(jobs):
        noted = memory.as_strided((size,), (1,), index * room)
        job.kept = job.kept._replace(noted=noted)


def _weight_of(layer: nn.Module, name: str) -> MasterWeight | None:
    """Return the weight of a layer, if it can be quantized together with others."""
    weight: object = layer._parameters.get(name)
    if isinstance(weight, DTensor):
        weight = local(weight)
    if type(weight) is not MasterWeight:
        return None
    record = weight.record
    state = record.layer
    if not isinstance(state, LayerState) or state.common is not None or state.replayed:
        return None
    if record.shard is not None or record.gathered is not None or record.replayed:
        return None
    plain = weight.plain
    return weight if type(plain) in _PLAIN and plain.dim() == 2 and plain.numel() else None


_PLAIN = (Tensor, nn.Parameter)


_BUCKETS: weakref.WeakKeyDictionary[LayerState, WeightBucket] = weakref.WeakKeyDictionary()
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, list[WeightBucket]] = weakref.WeakKeyDictionary()


def refresh_bucket(weight: MasterWeight, seen: Seen, dtype: torch.dtype) -> None:
    """Before a forward uses a weight: if it was written since the last one, quantize it with its neighbours.

    Args:
        weight: The weight.
        seen: ``weight.seen()``.
        dtype: Dtype of the computation.
    """
    record = weight.record
    if record.kept.is_old(stamp_of(seen, weight.config, dtype)) and not record.is_held_elsewhere:
        bucket = _bucket_of(weight)
        if bucket is not None:
            bucket.refresh()


def add_columns_of_bucket(weight: MasterWeight) -> None:
    """Before a backward uses a weight: if its columnwise face is to be made, make it with its neighbours'."""
    record = weight.record
    if record.kept.awaits_column and not record.is_held_elsewhere:
        bucket = _bucket_of(weight)
        if bucket is not None:
            bucket.add_columns()


def _bucket_of(weight: MasterWeight) -> WeightBucket | None:
    """Return the bucket of a weight, or None where it is quantized by itself."""
    layer = weight.record.layer
    if observers or not isinstance(layer, LayerState) or not runs_directly(weight.plain):
        return None
    bucket = None if is_recorded() else _BUCKETS.get(layer)
    return None if bucket is None or bucket.is_alone else bucket


def bucket_weights(model: nn.Module) -> list[WeightBucket]:
    """Put the weights of a model into buckets, neighbours of one recipe, dtype and device, and return those."""
    members: list[list[tuple[nn.Module, str]]] = []
    open_ones: dict[
        object, tuple[int, int]
    ] = {}  # index and elements, by what the weights have in common
    for layer in model.modules():
        for name in layer._parameters:
            weight = _weight_of(layer, name)
            if weight is None:
                continue
            kind = weight.config, weight.plain.dtype, weight.plain.device
            index, size = open_ones.get(kind, (-1, _BUCKET))
            own = weight.plain.numel()
            if size + own > _BUCKET:
                index, size = len(members), 0
                members.append([])
            members[index].append((layer, name))
            open_ones[kind] = index, size + own
    buckets = _OF_MODELS[model] = [WeightBucket(layers) for layers in members]
    for bucket in buckets:
        for weight in bucket.weights():
            if isinstance(weight.record.layer, LayerState):
                _BUCKETS[weight.record.layer] = bucket
    return buckets


def _after_step(model: nn.Module, states: list[LayerState]) -> None:
    """Quantize weights for the next forward, as far as memory allows."""
    if observers or is_traced() or is_recorded():
        return
    buckets = _OF_MODELS.get(model)
    total = 0
    for bucket in bucket_weights(model) if buckets is None else buckets:
        if total <= _AFTER_STEP:
            total += bucket.refresh()


after_step.append(_after_step)
