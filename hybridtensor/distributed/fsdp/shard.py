"""One weight that FSDP2 shards: its plan, what it depends on, and its gathered faces."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.agreement import (
    Exchange,
    check_recipes,
    common_scale_of,
    order_of,
    reduce_written,
)
from hybridtensor.distributed.fsdp.gathered_faces import GatheredFaces, uncounted_writes
from hybridtensor.distributed.fsdp.plan import COLUMN, ROW, Plan, check_persistent
from hybridtensor.distributed.fsdp.planning import go_by_its_layer, plan_of
from hybridtensor.distributed.fsdp.scales import Part
from hybridtensor.distributed.fsdp.sending import (
    HookMetadata,
    HookResult,
    gathered_state,
    whole_values,
)
from hybridtensor.distributed.fsdp.stream_order import StreamOrder
from hybridtensor.distributed.fsdp.torch_compat import ShardedParam, alloc_storage, hooks_read
from hybridtensor.linear.operands import Weight, graphs_read_both
from hybridtensor.ops import Face
from hybridtensor.recipes.config import HybridConfig, weight_values
from hybridtensor.state import Context, LayerState, StateTensors
from hybridtensor.subclasses import FaceTensor, HybridTensor, MasterWeight
from hybridtensor.subclasses.common_scale import CommonScale
from hybridtensor.subclasses.intercepting import InterceptingTensor

if TYPE_CHECKING:
    from hybridtensor.distributed.fsdp.group import Gather


class Shard:
    """A weight that FSDP2 shards: its plan, amaxes and gathered faces.

    Attributes:
        sharded: The parameter as FSDP2 holds it.
        config: Recipe of the last gather; set by ``adopt``, like ``plan``.
        plan: How the weight is gathered.
        has_recipe: Whether a recipe was adopted.
        faces: Faces of the gathered weight, after the first gather.
        amaxes: Amaxes over all shards, fp32, of shape ``plan.amaxes``, or None.
        amaxes_order: Order of the streams that use ``amaxes``, or None.
        exchange: Reduces the amaxes of all shards, if this is the first of them; or None.
        agreed: Recipe that all ranks were found to have; they compare another one, by value.
        reduced: ``written`` when ``amaxes`` were reduced: these collectives follow only writes that all ranks count.
        contents: What the faces that the last gather sent were made of, see ``agree_on_writes``; None if unknown. Here
            possible writes through aliases count, too.
        replayed: Whether a CUDA graph writes the weight, or its scales, uncounted.
        gathers: Each kind of gather of the weight's group, by the requested faces; shared by the group.
        prepared: The local shard and the first hook's result as the group prepared them; the result is None if the
            hook has work to do. None if nothing is prepared.
    """

    def __init__(self, sharded: ShardedParam) -> None:
        self.sharded = sharded
        self.config: HybridConfig
        self.plan: Plan
        self.has_recipe = False
        self.faces: GatheredFaces | None = None
        self.amaxes: Tensor | None = None
        self.amaxes_order: StreamOrder | None = None
        self.exchange: Exchange | None = None
        self.agreed: HybridConfig | None = None
        self.reduced: tuple[object, ...] | None = None
        self.contents: tuple[object, ...] | None = None
        self.replayed = False
        self.gathers: dict[tuple[bool, bool], Gather] = {}
        self.prepared: tuple[Weight, HookResult | None] | None = None
        self._expected: bool | None = None
        self._recomputed = self._traced = self._copied = False
        self._made_for: tuple[Plan, torch.dtype] | None = None
        self._dtype: torch.dtype | None = None

    @property
    def cast_dtype(self) -> torch.dtype:
        """Dtype of faces in high precision, and of what a rowwise face holds that is quantized again: there the
        weight's, which rounds once, as of a weight that is not sharded."""
        return self.sharded.tensor.dtype if self.config.weight.requantizes else self.sharded.dtype

    def adopt(self, config: HybridConfig) -> None:
        """Adopt a recipe, and make its plan."""
        if not self.has_recipe or self.config is not config:
            # The gathers of the whole group, which shares this dictionary: what was prepared for
            # them has this weight's former plan.
            self.config, self.plan, self.has_recipe = config, plan_of(self.sharded, config), True
            self.gathers.clear()
            if isinstance(self.sharded.tensor, HybridTensor):
                check_persistent(self.sharded.tensor, self.plan, self.sharded.size)

    def is_measured(self, tensor: object) -> TypeGuard[MasterWeight]:
        """Return whether quantizing the local shard needs amaxes of other ranks or weights."""
        if not isinstance(tensor, MasterWeight):
            return False
        return self.plan.reduce is not None or common_scale_of(tensor) is not None

    @property
    def common(self) -> CommonScale | None:
        """The common scale of this weight, or None."""
        return common_scale_of(self.sharded.tensor)

    def written(self, part: MasterWeight) -> tuple[object, ...]:
        """Return a key that changes with every counted in-place write, but not with aliases: ranks may have others."""
        return part.record, self.sharded.version, part.written, self.config

    # -- before the gather

    def agree_on_writes(self, part: Weight, *, adopts: bool) -> bool:
        """Return whether the local shard may have been written since the last gather. If so, compare a new recipe with
        other ranks', and reduce amaxes.

        ``adopts``: Whether to adopt a new recipe now: not between a forward and its backward.
        """
        record, config = part.record, part.config
        layer = record.layer
        # The record itself, so that nothing else gets its address; and the DTensor's version, which
        # graphs increment
        contents: tuple[object, ...] = record, config, layer
        # Nothing that a persistent weight sends is cached, so that its writes need not be noticed.
        if isinstance(part, MasterWeight):
            scales = getattr(layer, "version", None)
            contents = record, config, layer, self.sharded.version, part.changes, scales
        if contents == self.contents and config is self.config:
            return False
        if adopts or not self.has_recipe:
            self.adopt(part.recipe)
        if self._dtype is not self.sharded.dtype:
            self._dtype = self.sharded.dtype
            self.gathers.clear()
        self._agree(part)
        self.replayed = record.replayed or getattr(layer, "replayed", False)
        if self.common is not None and isinstance(part, MasterWeight):
            # also writes of the other weights with this common scale
            contents = (*contents[:-1], part.scales)
            if contents == self.contents:
                return False
        self.contents = contents
        if isinstance(layer, LayerState) and layer.record is not None:
            layer.record.settle_gathers()
        return True

    def wants(self, rowwise: bool, columnwise: bool) -> tuple[bool, bool]:
        """Return which faces a gather needs: both where backward recomputes, or saved-tensor hooks read faces."""
        found = self._recomputed or self._traced
        again = found if self._expected is None else self._expected
        return rowwise or again, columnwise or self._copied

    def expect(self, recompute: bool | None) -> None:
        """Set whether backward may rerun forward, which needs the rowwise face; None finds out."""
        self._expected = recompute
        self.gathers.clear()

    def send_whole(self, tensor: Weight) -> Tensor:
        """Return the high-precision local shard ``[n, K]``."""
        self.sharded.gather_into([])
        dtype = self.plan.whole_dtype(self.sharded.dtype, tensor.dtype)
        return whole_values(tensor, dtype, self.sharded.padded_size)

    def needed(self, wanted: tuple[bool, bool]) -> list[Tensor] | None:
        """Return the tensors of the requested faces, or None if they do not exist yet."""
        if self.faces is None or self._made_for != (self.plan, self.sharded.dtype):
            return None
        return self.faces.needed(*wanted)

    def _agree(self, part: Weight) -> None:
        """Agree with the other ranks where this weight was written or has a new recipe."""
        if self.agreed is not self.config:
            # By value, before the collective: an equal recipe in another object is agreed on
            # already, and all ranks must come to the same answer.
            if self.agreed != self.config:
                check_recipes([shard for shard, _ in self.with_all()])
            self.agreed = self.config
        if self.is_measured(part):
            reduce_written(self, part)

    def with_all(self) -> list[tuple[Shard, InterceptingTensor]]:
        """Return all converted weights under the same root, with their present recipes, and the local shards."""
        found, adopts = [], not self.sharded.before_backward
        for sharded in self.sharded.under_the_same_root():
            part = sharded.tensor
            if isinstance(part, InterceptingTensor):
                shard = shard_of(sharded)
                if adopts or not shard.has_recipe:
                    shard.adopt(part.recipe)
                found.append((shard, part))
        return found

    def order_amaxes(self) -> None:
        """Make the current stream wait for the one that reduces amaxes."""
        if self.amaxes_order is not None and self.amaxes is not None:
            self.amaxes_order.wait_for_last_use(self.amaxes)
        common = self.common
        if common is not None and common.amax is not None:
            order_of(common).wait_for_last_use(common.amax)

    def part(self, values: Tensor, state: StateTensors | None) -> Part:
        """Return the local shard with all that it is quantized by."""
        tensor: Any = self.sharded.tensor
        section, first = tensor.record.section, tensor.record.first or 0
        if tensor.is_transposed:
            values = values.transpose(-2, -1)
        of_ranks = self.plan, self.sharded.rank, self.amaxes
        return Part(values, self.config.weight, *of_ranks, state, self.cast_dtype, section, first)

    def forward_face(self) -> Face | None:
        """Return the rowwise face of the local shard as the next forward gathers it, recording nothing; None in high
        precision."""
        # All ranks call this for the same weights in the same order.
        tensor: Any = self.sharded.tensor
        if not self.sharded.before_backward or not self.has_recipe:
            self.adopt(tensor.recipe)
        self._agree(tensor)
        if self.plan.whole or self.plan.row.kind != "bytes":
            return None
        if isinstance(tensor, HybridTensor):
            as_multiplied = tensor.transpose(-2, -1) if tensor.is_transposed else tensor
            return as_multiplied.forward_face()
        self.order_amaxes()
        part = self.part(tensor.source, tensor.state)._replace(record=False)
        (row, _), first = part.faces(rowwise=True, columnwise=False)
        if row is None or self.plan.matrix is not None:
            return row
        return row.cut(0, first, tensor.shape[0])

    # -- after the gather

    def receive(
        self,
        tensor: Weight,
        outputs: tuple[Tensor, ...],
        metadata: HookMetadata,
        dtype: torch.dtype,
        out: HybridTensor | None,
    ) -> tuple[HybridTensor, list[Tensor]]:
        """Return the gathered weight, ``out`` if given, and the tensors that are allocated now."""
        faces = self.faces
        if out is None or faces is None or self._made_for != (self.plan, dtype):
            faces, out = self._start(tensor, dtype, out)
            # FSDP2 allocates what it knew before the gather
            for one in faces.needed(*metadata.wanted):
                alloc_storage(one)
            self.sharded.free_on_reshard(faces.needed(*metadata.wanted))
        out.config, record, own = self.config, out.record, tensor.record
        record.layer, record.first = own.layer, own.first
        needed = faces.needed(*metadata.wanted)
        if metadata.bundle is not None:
            if metadata.has_work:
                metadata.bundle.receive(metadata.number, outputs)
            return out, needed
        with uncounted_writes(needed):
            self._fill_from_values(faces, tensor, outputs[0], metadata.wanted)
        self.sharded.gather_into([])
        return out, needed

    @torch.no_grad()
    def _start(
        self, tensor: Weight, dtype: torch.dtype, out: HybridTensor | None
    ) -> tuple[GatheredFaces, HybridTensor]:
        """Create the faces of the gathered weight, without storage, and the weight."""
        with torch._C.DisableTorchFunctionSubclass():
            faces = self.faces
            if faces is None or self._made_for != (self.plan, dtype):
                faces = self._new_faces(tensor, dtype)
            # Modules, autograd and compiled graphs hold the weight of the first gather: another
            # plan gives this object other faces.
            if out is None:
                out = HybridTensor(faces.row, faces.column)
                out.record.gathered = self
            else:
                out.rowwise, out.columnwise = faces.row, faces.column
        return faces, out

    def _new_faces(self, tensor: Weight, dtype: torch.dtype) -> GatheredFaces:
        # The first gather may be one of an evaluation, and inference tensors cannot be saved for a
        # backward later.
        with torch.inference_mode(False):
            size, turned = self.sharded.size, tensor.is_transposed
            if self.plan.matrix is not None:
                size = (size[0], *self.plan.matrix)
            elif turned:
                size = size[::-1]
            self.faces = GatheredFaces(self.plan, size, dtype, self.sharded.device, turned)
        self._made_for = self.plan, dtype
        return self.faces

    def _fill_from_values(
        self, faces: GatheredFaces, tensor: Weight, received: Tensor, wanted: tuple[bool, bool]
    ) -> None:
        """Quantize a weight that was gathered in high precision."""
        self.order_amaxes()
        size = self.sharded.size
        stored = received.view(-1)[: math.prod(size)].view(size)
        values = stored.transpose(-2, -1) if tensor.is_transposed else stored
        source, (rowwise, columnwise) = weight_values(self.config, values), self.plan.fills(*wanted)
        made = self.config.weight.faces(
            source,
            rowwise=rowwise,
            columnwise=columnwise,
            dtype=self.cast_dtype,
            context=self._context(tensor),
        )
        faces.copy_from(made)
        if wanted[0] and faces.values is not None:
            faces.values.copy_(stored)

    def requantize(self, faces: GatheredFaces) -> None:
        """Quantize the columnwise face from the gathered rowwise one, as an unsharded weight does."""
        self.order_amaxes()
        quantizer: Any = self.config.weight
        with uncounted_writes(faces.of(COLUMN)):
            context = self._context(self.sharded.tensor)
            made = quantizer.derive_columnwise(faces.plain(ROW), self.cast_dtype, context)
            faces.copy_from((None, made))

    def _context(self, tensor: Any) -> Context:
        """Return the quantizers' context of the whole weight, from that of the local shard."""
        context: Context = tensor.context._replace(state=gathered_state(tensor))
        if context.groups is None:
            return context
        count = self.sharded.size[0]
        return context._replace(groups=context.groups._replace(num_groups=count))

    # -- in between

    def mark_traced(self) -> None:
        """Record that a compiled graph holds the faces; raise NotImplementedError if it reads high precision, too."""
        if self.plan.read:
            raise NotImplementedError(
                "fully_shard: compiled code cannot read the values of a weight "
                f"{self.sharded.size}: {self.plan.whole}; leave these layers out of torch.compile, "
                "or the weight out of quantize_"
            )
        if not self._traced:
            self._traced = True
            self.gathers.clear()
        # A graph saves the columnwise face, too, which only backward gathers, and may read it.
        both = hooks_read() or graphs_read_both(self.config, self.sharded.size)
        if both and self.sharded.in_forward and not (self.is_there(ROW) and self.is_there(COLUMN)):
            self._gather_both("_copied")

    def _gather_both(self, reason: str) -> None:
        """Gather both faces of the group's weights now, and later where the attribute ``reason`` says."""
        self.gathers.clear()
        for sharded in self.sharded.of_the_group():
            if isinstance(sharded.tensor, InterceptingTensor):
                setattr(shard_of(sharded), reason, True)
        self.sharded.gather_again()

    @property
    def values(self) -> Tensor | None:
        """The high-precision gathered weight in the dtype of the computation, if something reads it."""
        return None if self.faces is None else self.faces.values

    def is_there(self, direction: str) -> bool:
        """Return whether a face of the gathered weight is gathered."""
        return self.faces is not None and self.faces.is_there(direction)

    def require(self, direction: str) -> FaceTensor:
        """Return a face of the gathered weight; gather again if it is not there.

        So it is the first time that a backward runs a forward again (activation checkpointing): from then on, backward
        gathers both faces. And in a forward that finds what was prefetched for a backward.

        Raises:
            RuntimeError: If it is not there, and cannot be gathered now, or recomputation was said not to happen.
        """
        if self.faces is not None and self.faces.is_there(direction):
            return self.faces.stored(direction)
        again = self.sharded.before_backward and self._expected is not False
        if self.faces is None or not (again or self.sharded.in_forward):
            raise RuntimeError(
                f"fully_shard: the {direction} face of a weight {self.sharded.size} was not "
                "gathered, only the other one was; say expect_recompute_(model, True) if backward "
                "runs the forward again, or multiply by F.linear, or keep the weight with "
                "reshard_after_forward=False"
            )
        if again:
            self._gather_both("_recomputed")
        else:
            self.sharded.gather_again()
        return self.faces.stored(direction)


def shard_of(sharded: ShardedParam) -> Shard:
    """Return the shard record of an FSDP2 parameter, created at the first call."""
    # FSDP2's own record has it: a table of ours, even a weak one, would keep that alive through ``Shard.sharded``
    shard: Shard | None = getattr(sharded.param, "_hybridtensor_shard", None)
    if shard is None:
        go_by_its_layer(sharded)
        shard = sharded.param._hybridtensor_shard = Shard(sharded)  # type: ignore[attr-defined]
    return shard
