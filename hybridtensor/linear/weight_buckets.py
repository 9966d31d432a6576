"""Buckets of weights: neighbours in a model that two launches quantize, in place of two launches for each.

The first of a bucket that is used after an optimizer step makes the rowwise faces of all, or ``step_`` does; the first
backward makes the columnwise faces of all whose forward is over. A weight takes part if a forward in eager code used it
after the write before; what it gets has the bits that it would make by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridtensor import ops
from hybridtensor.dtensor import local
from hybridtensor.ops import CastRequest, Faces
from hybridtensor.ops.library import is_recorded, is_traced, runs_directly
from hybridtensor.quantizers.plans import CastPlan, cast_plan, measuring_plan
from hybridtensor.state import Context, LayerState
from hybridtensor.state.step import after_step
from hybridtensor.subclasses import MasterWeight
from hybridtensor.subclasses.kept_faces import Amaxes, Kept, Seen, Stamp, stream_of
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
        with torch.inference_mode(False), torch.no_grad():
            jobs = [job for weight in self.weights() if (job := _for_forward(weight)) is not None]
            _run(jobs)
        return sum(job.plain.numel() for job in jobs)

    def add_columns(self) -> None:
        """Make the columnwise faces that backwards will ask for, of weights whose forward is over."""
        with torch.inference_mode(False), torch.no_grad():
            _run([job for weight in self.weights() if (job := _for_backward(weight)) is not None])


class _Job(NamedTuple):
    """A cast of one weight.

    Attributes:
        weight: The weight.
        plain: Its plain tensor.
        stamp: What its faces depend on.
        context: Which tensor it is, with what the faces are scaled by if that is known.
        plan: The cast.
        measuring: What is measured before, or None.
        kept: What is kept of the weight.
        records: How many amaxes the cast records, in new memory; 0 for none.
    """

    weight: MasterWeight
    plain: Tensor
    stamp: Stamp
    context: Context
    plan: CastPlan
    measuring: CastPlan | None
    kept: Kept
    records: int = 0


def _for_forward(weight: MasterWeight) -> _Job | None:
    """Return the cast that the next forward would do, or None if there is nothing to do before."""
    record = weight.record
    faces = record.kept
    use, dtype = faces.last_use, faces.dtype
    if use is None or dtype is None:
        return None
    stamp = Stamp.of(weight.seen(), weight.config, dtype)
    if not faces.is_old(stamp) or record.is_held_elsewhere:
        return None
    plain, config, context = weight.plain, weight.config, weight.context
    if record.written_on != stream_of(plain):
        return None  # a stream that overlaps the optimizer waits for the write in the layer's own forward
    if weight.source is not plain or config.keep_faces == "never":
        return None  # rounded before, into memory of its own; or to be made when it is used
    faces.begin(stamp, forward=True)
    outlast, _ = faces.lifetime(config.keep_faces)
    both = use.backward_follows and outlast
    if use.trained and not outlast:
        context = for_products(context, dtype, row=True, column=True)
    plan = cast_plan(config.weight, True, both, dtype, context, plain.device)
    if plan is None or not _can_run(plan.request):
        return None
    measuring = measuring_plan(config.weight, dtype, context, plain.device)
    if measuring is not None and not _can_run(measuring.request):
        return None
    state, records = context.state, 0
    if state is not None and state.amax is not None:
        if use.trained and config.weight.delayed_rules("weight"):
            records = len(state.slots)
        context = context._replace(state=state._replace(amax=None))
    return _Job(weight, plain, stamp, context, plan, measuring, Kept(), records)


def _for_backward(weight: MasterWeight) -> _Job | None:
    """Return the cast that the next backward would do, or None if there is nothing to do before."""
    record = weight.record
    faces = record.kept
    dtype = faces.dtype
    if dtype is None or not faces.awaits_column:
        return None
    plain, config, context = weight.plain, weight.config, weight.context
    stamp = Stamp.of(weight.seen(), weight.config, dtype)
    kept = faces.current(plain, stamp)
    if kept is None or kept.column is not None or weight.source is not plain:
        return None
    if faces.used_on != stream_of(plain):
        return None  # this stream does not wait for what that forward measured
    if config.keep_faces == "never":
        return None
    _, outlast = faces.lifetime(config.keep_faces)
    if not outlast:
        context = for_products(context, dtype, row=True, column=True)
    plan = cast_plan(config.weight, False, True, dtype, context, plain.device)
    if (
        plan is None
        or not _can_run(plan.request)
        or (any(plan.measured) and kept.amaxes[1] is None)
    ):
        return None
    context = context._replace(amaxes=kept.amaxes)
    if context.state is not None:
        context = context._replace(state=context.state._replace(amax=kept.noted))
    return _Job(weight, plain, stamp, context, plan, None, kept)


def _can_run(request: CastRequest) -> bool:
    """Return whether matrices of a list can be cast so: from themselves, by amaxes of what is not rotated."""
    casts = [cast for cast in (request.row, request.column) if cast is not None]
    return request.source is None and not any(
        cast.measures is not None and cast.format.hadamard for cast in casts
    )


def _run(jobs: list[_Job]) -> None:
    """Measure and cast weights, those of one kind together, and keep the faces."""
    kinds: dict[tuple[object, ...], list[_Job]] = {}
    for job in jobs:
        measuring = None if job.measuring is None else job.measuring.request
        key = job.plan.run_request, measuring, job.records, job.kept.noted is None
        kinds.setdefault(key, []).append(job)
    for alike in kinds.values():
        first, plains = alike[0], [job.plain for job in alike]
        request = first.plan.run_request
        if first.measuring is not None:
            found = ops.measure_all(plains, first.measuring.request)
            alike = [_with_amaxes(job, *each) for job, each in zip(alike, found, strict=True)]
        if first.records:
            alike = _with_records(alike)
        inputs = [job.plan.inputs(job.plain, job.context) for job in alike]
        for job, made in zip(alike, ops.quantize_all(plains, request, inputs), strict=True):
            _keep(job, made)


def _with_amaxes(job: _Job, of_row: Tensor, of_column: Tensor) -> _Job:
    if job.measuring is None:
        return job
    amaxes: Amaxes = job.measuring.of_measured(of_row, of_column)
    return job._replace(
        context=job.context._replace(amaxes=amaxes), kept=job.kept._replace(amaxes=amaxes)
    )


def _with_records(jobs: list[_Job]) -> list[_Job]:
    """Return casts that record amaxes, each in its part of new memory."""
    size = jobs[0].records
    room = -(-size // _ALIGNED) * _ALIGNED
    memory = torch.zeros(len(jobs) * room, dtype=torch.float32, device=jobs[0].plain.device)
    done = []
    for index, job in enumerate(jobs):
        noted, state = memory.as_strided((size,), (1,), index * room), job.context.state
        context = job.context
        if state is not None:
            context = context._replace(state=state._replace(amax=noted))
        done.append(job._replace(context=context, kept=job.kept._replace(noted=noted)))
    return done


def _keep(job: _Job, made: Faces) -> None:
    row, column = made
    before = job.kept
    kept = before._replace(row=row or before.row, column=column or before.column)
    job.weight.record.kept.keep(job.plain, job.stamp, kept, stream_of(job.plain))


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
    if record.kept.is_old(Stamp.of(seen, weight.config, dtype)) and not record.is_held_elsewhere:
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
