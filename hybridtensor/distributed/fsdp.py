"""FSDP2: shards of converted weights are quantized, and only the bytes of the face that is needed are gathered.

``fully_shard`` finds two hooks on a sharded weight. ``pre_all_gather`` returns what this rank sends,
``post_all_gather`` makes of what all ranks sent a ``HybridTensor``, the weight that the layers compute with. Its faces
have memory of their own that is there only while FSDP2 says that the weight is gathered, and only for the face that was
wanted; the tensor objects stay the same, so that autograd and compiled graphs can hold on to them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtensor.distributed.agreement import reduce_amaxes
from hybridtensor.distributed.payload import cut_out
from hybridtensor.distributed.plain import followers
from hybridtensor.distributed.plan import COLUMN, ROW, Plan, check_persistent, make_plan
from hybridtensor.distributed.shard import Shard, plan_of, shard_of
from hybridtensor.distributed.torch_compat import (
    MISSING,
    Sharded,
    everything,
    local,
    locate,
)
from hybridtensor.ops import Held, Operand
from hybridtensor.subclasses import HybridTensor, IdentityTensor, MasterWeight, QuantizedTensor
from hybridtensor.subclasses.hybrid_tensor import as_face
from hybridtensor.subclasses.wrapper import InterceptingTensor

_DIRECTIONS = (ROW, COLUMN)


def part_of(weight: Any) -> Any:
    """Return this rank's part of a weight that FSDP2 shards, gathered or not; any other weight as it is."""
    weight = local(weight)
    if isinstance(weight, HybridTensor) and weight.gathered is not None:
        return weight.gathered.sharded.tensor
    return weight


def let_go(weight: Any) -> None:
    """Have a gathered weight gathered anew before its next use."""
    if isinstance(weight, HybridTensor) and weight.gathered is not None:
        weight.gathered.sharded.let_go()


_found: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def find(module: nn.Module, tensor: Any) -> Shard:
    """Return the shard whose part ``tensor`` is, a parameter of ``module``.

    Raises:
        NotImplementedError: If FSDP2 does not know it.
    """
    known = _found.get(module)
    param = None if known is None else known()
    if param is not None and _is_part(param._hybridtensor_shard, tensor):
        return param._hybridtensor_shard  # type: ignore[no-any-return]
    for sharded in locate(module):
        if isinstance(sharded.tensor, InterceptingTensor):
            shard = shard_of(sharded)
            if _is_part(shard, tensor):
                _found[module] = weakref.ref(sharded.param)
                return shard
    raise NotImplementedError(
        f"fully_shard: a weight that FSDP2 of torch {torch.__version__} holds is required, got one of "
        f"{type(module).__name__} that it does not{f' ({MISSING})' if MISSING else ''}; use a torch from 2.11 to 2.13"
    )


def _is_part(shard: Shard, tensor: Any) -> bool:
    """Whether a tensor is this rank's part, or a copy of it on another device."""
    mine: Any = shard.sharded.tensor
    return mine is tensor or (mine.layer is tensor.layer and mine.shape == tensor.shape)


class _Gathering:
    """The two hooks; see ``InterceptingTensor``."""

    @staticmethod
    def pre_all_gather(tensor: Any, module: nn.Module) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends, and what the second half needs."""
        shard = find(module, tensor)
        with torch.no_grad():
            flat, sent = shard.send(tensor)
        return (flat,), (shard, sent)

    @staticmethod
    def post_all_gather(
        tensor: Any, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, out: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gathered weight, and what memory it takes."""
        shard, sent = metadata
        weight = shard.receive(tensor, outputs[0], sent, dtype, None if out is None else local(out))
        return weight, shard.faces.needed(*sent.wanted)

    @staticmethod
    def check_shards(weight: HybridTensor, size: int, dim: int) -> None:
        """Raise if parts of ``size`` along ``dim`` of a persistent weight cannot be gathered."""
        rows, columns = weight.shape
        num_ranks = -(-weight.shape[dim] // size)
        if num_ranks > 1:
            check_persistent(make_plan(weight.config, (rows, columns), num_ranks, dim), (rows, columns))

    @staticmethod
    def refresh(pairs: list[tuple[HybridTensor, Tensor]]) -> bool:
        """Quantize new values into parts of persistent weights, with one reduction for all; False if they are none."""
        known = persistent_parts()
        if not all(memory_of(part) in known for part, _ in pairs):
            return False
        shards = [shard_of(known[memory_of(part)]) for part, _ in pairs]
        for shard, (part, _) in zip(shards, pairs, strict=True):
            shard.adopt(part.config)
        with torch.no_grad():
            refresh_parts([(shard, values) for shard, (_, values) in zip(shards, pairs, strict=True)])
        return True


InterceptingTensor.gathering = _Gathering


def memory_of(part: HybridTensor) -> tuple[Any, ...]:
    """Return what a part has in common with all its aliases, such as ``parameter.data``."""
    return part.data_ptr() or id(part), part.shape, part.device  # nothing on the meta device has an address


def persistent_parts() -> dict[tuple[Any, ...], Sharded]:
    """Return what FSDP2 holds of persistent weights, by ``memory_of`` this rank's part."""
    return {memory_of(s.tensor): s for s in everything() if isinstance(s.tensor, HybridTensor)}


def refresh_parts(pairs: list[tuple[Shard, Tensor]]) -> None:
    """Quantize values into this rank's parts of persistent weights; on every rank the same weights."""
    waiting = [(shard, values) for shard, values in pairs if shard.plan.reduce is not None]
    for group in {id(shard.sharded.process_group): shard.sharded.process_group for shard, _ in waiting}.values():
        reduce_amaxes([(shard, values) for shard, values in waiting if shard.sharded.process_group is group])
    for shard, values in pairs:
        part: Any = shard.sharded.tensor
        made, _ = shard.quantize(values, part.state, rowwise=True, columnwise=part.columnwise is not None)
        for direction, face, operand in zip(_DIRECTIONS, (part.rowwise, part.columnwise), made, strict=True):
            if isinstance(operand, Operand) and isinstance(face, QuantizedTensor):
                fresh = cut_out(operand, direction, 0, values.shape[0])
                for target, source in zip((face.qdata, face.scale, face.tensor_scale), fresh, strict=False):
                    target.copy_(source)  # type: ignore[union-attr]
            elif isinstance(operand, Operand) and isinstance(face, IdentityTensor):
                plain = operand.data if direction == ROW else operand.data.t()
                face.source.copy_(plain[: values.shape[0]])
        for source, follower in followers(part).values():
            follower.copy_(source)


def sharded_as(part: HybridTensor, config: Any) -> Shard | None:
    """Return what FSDP2 shards ``part`` as, with another recipe, or None if it does not.

    Raises:
        ValueError: If a persistent weight cannot be sharded with that recipe.
    """
    sharded = persistent_parts().get(memory_of(part))
    if sharded is None:
        return None
    shard = shard_of(sharded)
    check_persistent(shard.plan_of(config), (sharded.size[0], sharded.size[1]))
    return shard


def remake_(part: HybridTensor, values: Tensor, config: Any) -> bool:
    """Give a part of a persistent weight the faces of another recipe, all ranks together; False if it is none."""
    shard = sharded_as(part, config)
    if shard is None:
        return False
    shard.adopt(config)
    if shard.plan.reduce is not None:
        reduce_amaxes([(shard, values)])
    with torch.no_grad():
        made, _ = shard.quantize(values, part.state, rowwise=True, columnwise=True)
    row, column = (
        _cut(operand, direction, values.shape[0]) for direction, operand in zip(_DIRECTIONS, made, strict=True)
    )
    part.rowwise, part.columnwise = as_face(row, -1, values, part.dtype), as_face(column, 0, values, part.dtype)
    part.config = config
    return True


def _cut(operand: Operand | Held | None, direction: str, rows: int) -> Operand | Held | None:
    """Return the first ``rows`` rows of a face, with memory of their own."""
    if isinstance(operand, Held):
        held = _cut(operand.rowwise, ROW, rows)
        return operand._replace(rowwise=held) if isinstance(held, Operand) else None
    if operand is None:
        return None
    tensors = [tensor.clone() for tensor in cut_out(operand, direction, 0, rows)]
    scale, tensor_scale = (tensors[index] if index < len(tensors) else None for index in (1, 2))
    return Operand(tensors[0], scale, tensor_scale, operand.format)


class Gathers(NamedTuple):
    """What FSDP2 sends of a weight.

    Attributes:
        forward: What travels before forward.
        backward: What travels before backward, where the weight is not kept until then.
        reason: Why values travel that could have been quantized before, or what is done otherwise than asked; or "".
    """

    forward: str
    backward: str
    reason: str


def gathers(module: nn.Module) -> Gathers | None:
    """Return what FSDP2 sends of the converted weight of ``module``, or None if it sends nothing."""
    for sharded in locate(module):
        tensor: Any = sharded.tensor
        if not isinstance(tensor, (MasterWeight, HybridTensor)) or sharded.num_ranks == 1:
            continue
        plan = plan_of(sharded, tensor.config)
        reasons = [plan.whole, plan.row.reason, plan.column.reason]
        if sharded.reshards_to_fewer_ranks:
            reasons.append("reshard_after_forward is taken as True: from fewer ranks FSDP2 gathers no extensions")
        forward, backward = (
            _sent(plan, wanted, sharded.dtype, tensor.dtype) for wanted in ((True, False), (False, True))
        )
        return Gathers(forward, backward, "; ".join(dict.fromkeys(reason for reason in reasons if reason)))
    return None


def _sent(plan: Plan, wanted: tuple[bool, bool], dtype: torch.dtype, master: torch.dtype) -> str:
    """Return in words what travels."""
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
    """Say whether backward runs the forward again (activation checkpointing), so that it needs both faces.

    By default that is found out: the first backward that does gathers a second time, later ones gather both faces at
    once. Compiled code cannot be watched, so that both are gathered for it; ``False`` promises that it recomputes
    nothing.

    Args:
        model: A model after ``fully_shard``.
        expected: True, False, or None to find out.

    Returns:
        ``model``.

    Raises:
        TypeError: If ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expect_recompute_: a module is required, got {type(model).__name__}; pass the model")
    for module in model.modules():
        for sharded in locate(module):
            if isinstance(sharded.tensor, (MasterWeight, HybridTensor)):
                shard_of(sharded).recompute = expected
    return model
