"""Buckets of weights: neighbours in a model that two launches quantize, in place of two launches for each.

The first of a bucket that is used after an optimizer step makes the rowwise faces of all, or ``step_`` does; the first
backward makes the columnwise faces of all whose forward is over. A weight takes part if a forward outside of graphs
of torch.compile used it after the write before; what it gets has the bits that it would make by itself.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridtensor import ops
from hybridtensor.dtensor import local
from hybridtensor.ops import CastInputs, Faces
from hybridtensor.ops.captures import Stream, stream_of
from hybridtensor.ops.library import is_recorded, is_traced, runs_directly
from hybridtensor.ops.zeros import several_zeros
from hybridtensor.quantizers.plans import CastPlan, cast_plan, measuring_plan
from hybridtensor.state import Context, LayerState
from hybridtensor.state.step import after_step
from hybridtensor.subclasses import MasterWeight
from hybridtensor.subclasses.face_cache import CachedFaces, Stamp
from hybridtensor.subclasses.observing import observers
from hybridtensor.subclasses.record import WeightRecord

_BUCKET = 2**26
"""Elements of a bucket: so much memory the faces take that are made before they are needed; a launch of that size takes
the device longer than the host."""
_AFTER_STEP = 2**28
"""Elements that ``step_`` quantizes for the next forward: at that time a model holds no activations."""


class WeightBucket:
    """Neighbouring weights that had one recipe, dtype and device; those that still have are cast together."""

    def __init__(self, layers: Iterable[tuple[nn.Module, str]]) -> None:
        self._layers = [(weakref.ref(layer), name) for layer, name in layers]
        self.is_alone = len(self._layers) == 1

    def weights(self) -> Iterator[MasterWeight]:
        """Yield the present weights."""
        for reference, name in self._layers:
            layer = reference()
            weight = None if layer is None else _weight_of(layer, name)
            if weight is not None:
                yield weight

    def add_rows(self, asking: MasterWeight) -> None:
        """Quantize the rowwise faces of weights written since their last forward; nothing if ``asking`` must be
        quantized alone."""
        with _as_tensors():
            self._run(_Jobs.add_for_forward, asking)

    def add_columns(self, asking: MasterWeight) -> None:
        """Quantize the columnwise faces that backwards will need, of weights whose forward is over, as ``add_rows``."""
        with _as_tensors():
            self._run(_Jobs.add_for_backward, asking)

    def refresh(self) -> int:
        """Quantize the rowwise faces of weights written since their last forward, and return the number of elements;
        call it under ``_as_tensors``."""
        return self._run(_Jobs.add_for_forward, None)

    def _run(self, add: Callable[[_Jobs, MasterWeight], None], asking: MasterWeight | None) -> int:
        jobs = _Jobs()
        seen = set[WeightRecord]()  # several modules may have one weight
        if asking is not None:
            # First: else each layer of a model whose weights are cast alone looks through all others, in vain.
            add(jobs, asking)
            if not jobs.found:
                return 0
            seen.add(asking.record)
        for weight in self.weights():
            if weight.record not in seen:
                seen.add(weight.record)
                add(jobs, weight)
        return jobs.run()


@contextlib.contextmanager
def _as_tensors() -> Iterator[None]:
    """Disable gradients and torch functions, so that attributes of weights are cheap."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


class _Job:
    """One weight's cast, with what it depends on (``stamp``) and the cache that receives the faces."""

    __slots__ = ("_context", "_stamp", "_weight", "cached", "plain")

    def __init__(
        self, weight: MasterWeight, stamp: Stamp, context: Context, cached: CachedFaces
    ) -> None:
        self._weight, self._stamp, self._context = weight, stamp, context
        self.plain, self.cached = weight.plain, cached

    def inputs(self, plan: CastPlan) -> CastInputs:
        """Return the tensors that a cast needs besides the weight: amaxes to scale by, and where to record them."""
        context, cached = self._context, self.cached
        state = context.state
        if state is not None and state.amax is not cached.amax_record:
            context = context._replace(state=state._replace(amax=cached.amax_record))
        return plan.inputs(self.plain, context, cached.amaxes)

    def store(self, made: Faces) -> None:
        weight, cached = self._weight, self.cached
        row, column = made
        faces = cached._replace(row=row or cached.row, column=column or cached.column)
        weight.record.face_cache.store(weight.place, self._stamp, faces, stream_of(self.plain))


Kind = tuple[CastPlan, CastPlan | None, int]
"""What casts that are done together have in common: the cast on one device, what is measured before, or None, and how
many amaxes the cast records, in new memory."""


class _Jobs:
    """The casts of one bucket, and the plans that its weights share."""

    def __init__(self) -> None:
        self.found: dict[tuple[Kind, bool], list[_Job]] = {}
        self._plans: dict[object, tuple[CastPlan | None, CastPlan | None]] = {}

    def plans(
        self,
        context: Context,
        dtype: torch.dtype,
        weight: MasterWeight,
        rowwise: bool,
        columnwise: bool,
    ) -> tuple[CastPlan | None, CastPlan | None]:
        """Return the cast plan and, if the rowwise face is made, the plan that measures."""
        state = context.state
        of_state = None if state is None else (state.slots, state.encode_scale is None)
        # Recipe and device: those of a part of the model may be others since the weights were put into a bucket. An id
        # of the recipe will do: the weights hold their recipes for as long as this lives.
        quantizer, device = weight.config.weight, weight.plain.device
        key = id(weight.config), of_state, dtype, rowwise, columnwise, context.values, device
        known = self._plans.get(key)
        if known is None:
            plan = cast_plan(quantizer, rowwise, columnwise, dtype, context, device)
            measuring = measuring_plan(quantizer, dtype, context, device) if rowwise else None
            suits = (each is None or each.request.suits_lists for each in (plan, measuring))
            known = self._plans[key] = (plan, measuring) if all(suits) else (None, None)
        return known

    def add_for_forward(self, weight: MasterWeight) -> None:
        """Add the cast of the next forward, unless its face is cached."""
        record = weight.record
        faces, plain, config = record.face_cache, weight.plain, weight.config
        use, dtype, stream = faces.last_use, faces.dtype, stream_of(plain)
        if use is None or dtype is None:  # compiled code leaves no use
            return
        if not _takes_part(weight, stream):
            return
        stamp = weight.stamp(dtype)
        if not faces.is_old(stamp, stream) or record.is_held_elsewhere:
            return
        if not _is_written_for(stream, record.written_on):
            return  # a stream that overlaps the optimizer waits for the write in the layer's own forward
        if weight.is_rounded_first or config.keep_faces == "never":  # only when it is used
            return
        faces.begin(stamp, stream, forward=True)
        after_forward, _ = faces.lifetime(config.keep_faces)
        both = use.backward_follows and after_forward
        context = weight.context
        if use.trained and not after_forward and not faces.is_evaluated:  # only products read it
            context = weight.context_of_products(context, dtype)
        plan, measuring = self.plans(context, dtype, weight, True, both)
        if plan is None:
            return
        state, records = context.state, 0
        if use.trained and plan.needs.delayed and state is not None and state.amax is not None:
            records = len(state.slots)
        self._add((plan, measuring, records), _Job(weight, stamp, context, CachedFaces()))

    def add_for_backward(self, weight: MasterWeight) -> None:
        """Add the cast of the next backward, unless its face is cached."""
        faces = weight.record.face_cache
        dtype = faces.dtype
        plain, config = weight.plain, weight.config
        stream = stream_of(plain)
        if dtype is None or not faces.awaits_column or not _takes_part(weight, stream):
            return
        stamp = weight.stamp(dtype)
        # Another stream does not wait for what the forward measured.
        cached = faces.current(weight.place, stamp, stream)
        if cached is None or cached.column is not None:
            return
        if weight.is_rounded_first or config.keep_faces == "never":
            return
        _, after_backward = faces.lifetime(config.keep_faces)
        context = weight.context
        if not after_backward:
            context = weight.context_of_products(context, dtype)
        plan, _ = self.plans(context, dtype, weight, False, True)
        if plan is not None and not (any(plan.measured) and cached.amaxes[1] is None):
            self._add((plan, None, 0), _Job(weight, stamp, context, cached))

    def _add(self, kind: Kind, job: _Job) -> None:
        self.found.setdefault((kind, job.cached.amax_record is None), []).append(job)

    def run(self) -> int:
        """Measure and cast the weights, one launch per kind, and cache the faces; return the number of elements."""
        total = 0
        for ((plan, measuring, records), _), jobs in self.found.items():
            plains = [job.plain for job in jobs]
            if measuring is not None:
                # One launch for all weights: each cast by itself takes the host 25 us.
                found = ops.measure_all(plains, measuring.request)
                for job, amaxes in zip(jobs, found, strict=True):
                    job.cached = job.cached._replace(amaxes=measuring.of_measured(*amaxes))
            if records:
                _make_records(jobs, records)
            made = ops.quantize_all(plains, plan.run_request, [job.inputs(plan) for job in jobs])
            for job, faces in zip(jobs, made, strict=True):
                job.store(faces)
            total += sum([plain.numel() for plain in plains])
        return total


def _make_records(jobs: list[_Job], size: int) -> None:
    """Allocate records of ``size`` amaxes for casts."""
    records = several_zeros([size] * len(jobs), jobs[0].plain.device)
    for job, record in zip(jobs, records, strict=True):
        job.cached = job.cached._replace(amax_record=record)


def _weight_of(layer: nn.Module, name: str) -> MasterWeight | None:
    """Return a layer's weight, this rank's part of it under tensor parallelism; None for one of another class."""
    weight: object = layer._parameters.get(name)
    if type(weight) is not MasterWeight:
        part = local(weight) if isinstance(weight, DTensor) else None
        if type(part) is not MasterWeight:
            return None
        weight = part
    return weight


def _takes_part(weight: MasterWeight, stream: Stream) -> bool:
    """Return whether a weight can be quantized in a bucket, on a stream."""
    record = weight.record
    state = record.layer
    # A common scale is measured from all of its weights, and kernels of lists cannot read a view, as of a transpose.
    if not isinstance(state, LayerState) or state.common is not None or state.transposed:
        return False
    # Replays of a CUDA graph write without being counted, but there are none while another one is captured.
    if (record.replayed or state.replayed) and not isinstance(stream, tuple):
        return False
    if record.shard is not None or record.gathered is not None:
        return False
    shape = weight.place[0]
    return type(weight.plain) in _PLAIN and len(shape) == 2 and 0 not in shape


_PLAIN = (Tensor, nn.Parameter)


def _is_written_for(stream: Stream, written_on: Stream | None) -> bool:
    """Return whether work on a stream comes after a write: in a capture, after all that was written before it."""
    if written_on is None or not isinstance(stream, tuple):
        return written_on == stream
    return written_on == stream or not (
        isinstance(written_on, tuple) and written_on[1] == stream[1]
    )


# Keyed by the layer's state, not by the weight: ``weight.data = ...`` and ``swap_tensors`` replace
# weights, and weak references to a wrapper would make the latter refuse.
_BUCKETS: weakref.WeakKeyDictionary[LayerState, WeightBucket] = weakref.WeakKeyDictionary()
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, list[WeightBucket]] = weakref.WeakKeyDictionary()


def bucket_of(weight: MasterWeight) -> WeightBucket | None:
    """Return the bucket of a weight, or None if it is quantized alone now."""
    layer = weight.record.layer
    bucket = _BUCKETS.get(layer) if isinstance(layer, LayerState) else None
    if bucket is None or bucket.is_alone or observers or weight.record.is_held_elsewhere:
        return None
    return bucket if runs_directly(weight.plain) else None


def bucket_weights(model: nn.Module) -> list[WeightBucket]:
    """Put neighbouring weights of one recipe, dtype and device into buckets, and return these."""
    members: list[list[tuple[nn.Module, str]]] = []
    # Index and elements, by what the weights have in common
    open_ones: dict[object, tuple[int, int]] = {}
    for layer in model.modules():
        for name in layer._parameters:
            weight = _weight_of(layer, name)
            if weight is None or not _takes_part(weight, stream_of(weight.plain)):
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
    with _as_tensors():
        for bucket in bucket_weights(model) if buckets is None else buckets:
            if total <= _AFTER_STEP:
                total += bucket.refresh()


after_step.append(_after_step)
