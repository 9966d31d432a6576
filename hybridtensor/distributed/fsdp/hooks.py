"""FSDP2 hooks: quantize local shards of converted weights, and all-gather only the face that is needed.

FSDP2 calls two hooks of a sharded weight. ``pre_all_gather`` returns the payload of this rank; ``post_all_gather``
returns the gathered ``HybridTensor`` that the layers multiply. Storage of its faces is allocated only between the
all-gather and the reshard, and only for the requested face. The tensor objects stay the same, because autograd and
compiled graphs keep references to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hybridtensor.arguments import require_flag, require_module
from hybridtensor.distributed.fsdp.agreement import reduce_amaxes, update_common_scales
from hybridtensor.distributed.fsdp.group import group_of
from hybridtensor.distributed.fsdp.plan import COLUMN, ROW, Plan, check_persistent
from hybridtensor.distributed.fsdp.planning import plan_of, plan_of_size
from hybridtensor.distributed.fsdp.sending import HookMetadata, HookResult
from hybridtensor.distributed.fsdp.shard import Shard, shard_of
from hybridtensor.distributed.fsdp.torch_compat import MISSING, ShardedParam, all_params, params_of
from hybridtensor.dtensor import local
from hybridtensor.ops import Face
from hybridtensor.recipes.config import HybridConfig, weight_values
from hybridtensor.state import LayerState
from hybridtensor.state.step import after_step
from hybridtensor.subclasses import HybridTensor, is_converted
from hybridtensor.subclasses.followers import followers, inner_tensors
from hybridtensor.subclasses.high_precision import whole
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.quantizing import face_tensors, mark_overwritten, quantize_weight
from hybridtensor.subclasses.record import WeightRecord


def part_of(weight: Tensor) -> Tensor:
    """Return the local tensor of a weight that FSDP2 shards; any other weight unchanged."""
    part = local(weight)
    if isinstance(part, HybridTensor) and part.record.gathered is not None:
        part = part.record.gathered.sharded.tensor
    return part


def reshard(weights: Iterable[Tensor]) -> None:
    """Free gathered weights, whose faces have a former recipe: they are gathered again before their next use."""
    for weight in weights:
        if isinstance(weight, HybridTensor) and weight.record.gathered is not None:
            weight.record.gathered.sharded.reshard()


def _after_step(model: nn.Module, states: list[LayerState]) -> None:
    """Free weights that are still gathered, with faces of the scales, signs or numbers of the step before."""
    changed = {state for state in states if state.steps_change_weight}
    for sharded in all_params() if changed else ():
        if isinstance(sharded.tensor, InterceptingTensor) and sharded.tensor.layer in changed:
            sharded.reshard()


after_step.append(_after_step)


def find(module: nn.Module, tensor: InterceptingTensor) -> Shard:
    """Return the shard record of a parameter of ``module``; raise NotImplementedError if FSDP2 does not know it."""
    record = tensor.record
    known: Shard | None = None if record.shard is None else record.shard()
    if known is not None and _is_part(known, tensor):
        return known
    for sharded in params_of(module):
        if isinstance(sharded.tensor, InterceptingTensor):
            shard = shard_of(sharded)
            if _is_part(shard, tensor):
                record.shard = weakref.ref(shard)
                return shard
    raise NotImplementedError(
        f"fully_shard: FSDP2 of torch {torch.__version__} does not know the weight of a "
        f"{type(module).__name__} that it gathers{f' ({MISSING})' if MISSING else ''}; use a torch "
        "from 2.11 to 2.13"
    )


def _is_part(shard: Shard, tensor: InterceptingTensor) -> bool:
    """Return whether a tensor is the local shard, or a copy of it on another device."""
    # With CPU offload FSDP2 calls the hook of ``local_tensor.to(device)``: a new object with a
    # record of its own. Layer and shape say which weight it is a copy of.
    mine = shard.sharded.tensor
    return isinstance(mine, InterceptingTensor) and (
        mine.record is tensor.record or (mine.layer is tensor.layer and mine.shape == tensor.shape)
    )


def shard_of_part(part: HybridTensor) -> Shard | None:
    """Return the shard record of a persistent weight's local shard or an alias of it, or None without FSDP2."""
    record = part.record
    known: Shard | None = None if record.shard is None else record.shard()
    if known is not None and _record_of(known.sharded) is record:
        return known
    for sharded in all_params():
        if _record_of(sharded) is record:
            shard = shard_of(sharded)
            record.shard = weakref.ref(shard)
            return shard
    return None


def _is_apart(shard: Shard, view: HybridTensor) -> bool:
    """Return whether a view of a local shard is quantized alone; raise NotImplementedError if it shares scales."""
    if plan_of(shard.sharded, view.recipe).reduce is None:
        return True
    name = "" if view.state is None else view.state.name
    raise NotImplementedError(
        f"in-place write: a view of {name and f'{name}, '}a persistent weight {shard.sharded.size} is written, whose "
        "scales follow from the parts of all ranks; write the weight"
    )


def _record_of(sharded: ShardedParam) -> WeightRecord | None:
    tensor = sharded.tensor
    return tensor.record if isinstance(tensor, HybridTensor) else None


class _FSDPHooks:
    """The two FSDP2 hooks, ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``; see ``InterceptingTensor``."""

    @staticmethod
    def pre_all_gather(tensor: Any, module: nn.Module) -> HookResult:
        """Return the payload, and the shard record and plan for ``post_all_gather``."""
        reference = tensor.record.shard
        known: Shard | None = None if reference is None else reference()
        if known is not None and known.prepared is not None:
            # The first hook of this gather prepared the results of all its weights. Each serves once: FSDP2 may
            # gather again.
            part, result = known.prepared
            if part is tensor and result is not None:
                known.prepared = None
                return result
        # Attributes of a weight would pass through its torch function, here and in all that follows
        with torch._C.DisableTorchFunctionSubclass():
            shard = find(module, tensor)
            group = group_of(shard.sharded)
            if torch.is_grad_enabled():  # FSDP2's own calls run without gradients
                with torch.no_grad():
                    return group.send(shard, tensor)
            return group.send(shard, tensor)

    @staticmethod
    def post_all_gather(
        tensor: Any,
        outputs: tuple[Tensor, ...],
        metadata: tuple[Shard, HookMetadata],
        dtype: torch.dtype,
        out: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gathered weight, and the tensors whose storage FSDP2 manages."""
        shard, of_weight = metadata
        # Under tensor parallelism FSDP2 wraps what the first call returned into a DTensor, and
        # passes that one from the second call on.
        gathered = None if out is None else local(out)
        return shard.receive(tensor, outputs, of_weight, dtype, gathered)

    @staticmethod
    def check_shards(weight: InterceptingTensor, size: int, dim: int) -> None:
        """Raise if shards of ``size`` along ``dim`` of a persistent weight cannot be gathered."""
        # ``fully_shard`` splits by ``torch.chunk``, which passes the size of a part only; of ranks
        # without a part nothing is seen here.
        shape, num_ranks = tuple(weight.shape), -(-weight.shape[dim] // size)
        if num_ranks == 1:
            return
        plan = plan_of_size(weight, weight.recipe, shape, num_ranks, dim)
        check_persistent(weight, plan, shape)

    @staticmethod
    def refresh(
        pairs: list[tuple[HybridTensor, Tensor]],
    ) -> list[tuple[HybridTensor, Tensor]]:
        """Quantize new values into local shards of persistent weights with one all-reduce; return the pairs without
        FSDP2."""
        found, others = [], []
        for part, values in pairs:
            shard = shard_of_part(part)
            if shard is None or (part.taken is not whole and _is_apart(shard, part)):
                others.append((part, values))
                continue
            shard.adopt(part.recipe)
            found.append((shard, weight_values(part.recipe, values)))
        if found:
            with torch.no_grad():
                refresh_parts(found)
        return others


InterceptingTensor.fsdp_hooks = _FSDPHooks()


def refresh_parts(pairs: list[tuple[Shard, Tensor]]) -> None:
    """Quantize values into local shards of persistent weights; every rank passes the same weights."""
    waiting = [(shard, values) for shard, values in pairs if shard.plan.reduce is not None]
    # Persistent weights: ``shard_of_part`` found the shards by these.
    parts: list[Any] = [shard.sharded.tensor for shard, _ in pairs]
    # In the order of the weights, which is the same on all ranks: collectives have to match. Weights on different
    # meshes cannot share one.
    for group in dict.fromkeys(shard.sharded.process_group for shard, _ in waiting):
        reduce_amaxes(
            [(shard, values) for shard, values in waiting if shard.sharded.process_group is group]
        )
    written = [(shard, part, values) for (shard, values), part in zip(pairs, parts, strict=True)]
    update_common_scales(written)
    for shard, part, values in written:
        columnwise = part.columnwise is not None
        made, first = shard.part(values, part.state).faces(rowwise=True, columnwise=columnwise)
        turned = part.detach().transpose(-2, -1) if part.is_transposed else part
        for face, axis, fresh in zip(
            (turned.rowwise, turned.columnwise), (0, 1), made, strict=True
        ):
            if fresh is None or face is None or fresh.follows_rowwise:
                continue
            if shard.plan.matrix is None:
                fresh = fresh.cut(axis, first, values.shape[0])
            for target, source in zip(inner_tensors(face).values(), fresh.tensors(), strict=True):
                target.copy_(source)
        # Mostly none: such a face aliases the rowwise one, unless something copied the two apart.
        for source, follower in followers(part).values():
            follower.copy_(source)
        mark_overwritten(part)


def sharded_as(part: HybridTensor, config: HybridConfig) -> Shard | None:
    """Return the shard record of a local shard, or None; raise ValueError if it cannot be sharded with recipe
    ``config``."""
    shard = shard_of_part(part)
    if shard is None:
        return None
    check_persistent(part, plan_of(shard.sharded, config), shard.sharded.size)
    return shard


def remake_(part: HybridTensor, values: Tensor, config: HybridConfig) -> bool:
    """Requantize a local shard with another recipe on all ranks; return False if FSDP2 does not shard it."""
    shard = sharded_as(part, config)
    if shard is None:
        return False
    shard.adopt(config)
    if shard.plan.matrix is not None:
        # Whole experts, which share no scale with those of other ranks: quantized as without FSDP2, but by their
        # numbers among all.
        context = shard.part(values, part.state).context()
        fresh = quantize_weight(config, values, context, part.layer, part.dtype)
        part.rowwise, part.columnwise, part.config = fresh.rowwise, fresh.columnwise, config
        return True
    values = weight_values(config, values)
    if shard.plan.reduce is not None:
        reduce_amaxes([(shard, values)])
    with torch.no_grad():
        columnwise = not config.weight.draws_from_rowwise  # else each step requantizes it
        made, _ = shard.part(values, part.state).faces(rowwise=True, columnwise=columnwise)
    row, column = (_cut(face, axis, values.shape[0]) for axis, face in enumerate(made))
    if row is not None and column is not None and column.follows_rowwise:
        column = row._replace(
            dequantized_rowwise=column.dequantized_rowwise
        )  # shares the rowwise memory
    part.rowwise, part.columnwise = face_tensors((row, column), values.shape, part.dtype)
    part.config = config
    return True


def _cut(face: Face | None, axis: int, rows: int) -> Face | None:
    if face is None:
        return None
    cut = face.cut(axis, 0, rows)
    # Views would keep the memory of the rows appended for the cast.
    return Face.of([tensor.clone() for tensor in cut.tensors()], cut.kind)


def gathers(module: nn.Module, weight: Tensor) -> tuple[str, str, str] | None:
    """Describe what FSDP2 all-gathers of a converted weight before forward and backward, and why in high precision, or
    ``""``; None without FSDP2."""
    for sharded in params_of(module):
        tensor = sharded.tensor
        if tensor is not weight or not is_converted(tensor) or sharded.num_ranks == 1:
            continue
        plan = plan_of(sharded, tensor.recipe)
        reasons = [plan.whole]
        reasons += [face.reason for face in (plan.row, plan.column) if face.kind == "whole"]
        if sharded.reshards_to_fewer_ranks:
            reasons.append(
                "reshard_after_forward is taken as True: from fewer ranks FSDP2 gathers no extensions"
            )
        forward, backward = (
            _sent(plan, wanted, sharded.dtype, tensor.dtype)
            for wanted in ((True, False), (False, True))
        )
        return forward, backward, "; ".join(dict.fromkeys(filter(None, reasons)))
    return None


def _sent(plan: Plan, wanted: tuple[bool, bool], dtype: torch.dtype, master: torch.dtype) -> str:
    """Describe the all-gathered faces with their formats, or the dtype in high precision."""
    words = {
        "whole": f"values, {_name(plan.whole_dtype(dtype, master))}",
        "values": f"values, {_name(dtype)}",
        ROW: f"rowwise, {plan.row.format}",
        COLUMN: f"columnwise, {plan.column.format}",
    }
    return " + ".join(words[part] for part in plan.sends(*wanted))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def expect_recompute_(model: nn.Module, expected: bool | None) -> nn.Module:
    """Set whether backward reruns forward (activation checkpointing), and so needs both faces.

    ::

        fully_shard(model)
        ht.distributed.expect_recompute_(model, True)

    By default a recomputation is detected: the first backward that recomputes gathers a second time, later ones gather
    both faces at once. In compiled code it cannot be detected, so both faces are always gathered; ``False`` promises
    that nothing is recomputed.

    Args:
        model: A model after ``fully_shard``.
        expected: True, False, or None to detect it.

    Returns:
        ``model``.

    Raises:
        TypeError: If an argument is of the wrong kind.
    """
    require_module("expect_recompute_", model)
    if expected is not None:
        require_flag("expect_recompute_", expected=expected)
    modules = set(model.modules())
    for sharded in all_params():
        if is_converted(sharded.tensor) and not modules.isdisjoint(sharded.readers):
            shard_of(sharded).expect(expected)
    return model
