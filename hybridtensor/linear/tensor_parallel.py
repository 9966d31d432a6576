"""A linear layer whose weight is a DTensor: the layer runs on the local parts.

Each rank multiplies its part of the weight as if it were a layer of its own; placements say what the parts of input and
output are. So there is one implementation of the three products, and each part of a weight has the scales of that part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from hybridtensor.dtensor import local
from hybridtensor.linear.function import linear, require_plain_autograd
from hybridtensor.linear.operands import QUANTIZED, WEIGHTS, Weight
from hybridtensor.ops.autograd import Function
from hybridtensor.ops.library import left_whole
from hybridtensor.state import LayerState, Section
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.op_table import Args, Func, Kwargs
from hybridtensor.subclasses.wrapper import contiguous_strides


class _Placed(NamedTuple):
    """Placements of operands, output and gradients along one mesh dimension."""

    input: Placement
    grad_input: Placement
    grad_weight: Placement
    output: Placement
    grad_bias: Placement


def _placed(weight: Placement, given: Placement, last: int) -> _Placed:
    """Return the placements of a product by those of weight and input; ``last`` is the input's last dimension."""
    replicate, partial = Replicate(), Partial()
    if weight == Shard(0):  # column parallel
        return _Placed(replicate, partial, weight, Shard(last), weight)
    if weight == Shard(1):  # row parallel
        return _Placed(Shard(last), Shard(last), weight, partial, replicate)
    need = given if given.is_shard() and given != Shard(last) else replicate
    # With its own tokens a rank has a part of the sum that the weight's gradient is; with all tokens it has all of
    # it.
    of_all = partial if need.is_shard() else replicate
    return _Placed(need, need, of_all, need, of_all)


# Dynamo cannot look into a weight that a graph makes; what traces after it can
@left_whole
def sharded_linear(input: Tensor, weight: DTensor, bias: DTensor | None = None) -> Tensor:
    """Return ``F.linear`` of a weight whose local part is a weight of this library, as a DTensor.

    Args:
        input: A DTensor ``[..., in_features]`` on the weight's mesh, which is redistributed where
            it has to be; or a ``HybridTensor`` of all that this rank multiplies.
        weight: ``[out_features, in_features]``, replicated or sharded along either dimension.
        bias: A DTensor ``[out_features]``, or None.

    Raises:
        TypeError: If the input or bias is a plain tensor.
        ValueError: If they are on different meshes.
    """
    require_plain_autograd(input)
    if any(placement != Shard(0) for placement in weight.placements):
        require_own_tokens(input)
    mesh, last = weight.device_mesh, input.dim() - 1
    _check("input", input, weight)
    given = input.placements if isinstance(input, DTensor) else (Replicate(),) * mesh.ndim
    placed = [_placed(w, x, last) for w, x in zip(weight.placements, given, strict=True)]
    needed, grad_input, grad_weight, out, grad_bias = (
        list(one) for one in zip(*placed, strict=True)
    )
    shape = (*input.shape[:-1], weight.shape[0])
    x: Tensor = input
    if isinstance(input, DTensor):
        if list(given) != needed:
            input = input.redistribute(placements=needed)
        x = input.to_local(grad_placements=grad_input)
    # Without a gradient there is nothing to place, in inference mode no view
    w: Any = local(weight)
    if torch.is_grad_enabled():
        w = weight.to_local(grad_placements=grad_weight)
    b: Tensor | None = None
    if bias is not None:
        _check("bias", bias, weight)
        b = bias.to_local(grad_placements=grad_bias)
        # Row parallel, the output is a sum over ranks, and so is the bias, of parts as torch's DTensor makes them.
        parts = math.prod(
            mesh.size(dim) for dim, placed in enumerate(weight.placements) if placed == Shard(1)
        )
        if parts > 1:
            if torch.is_autocast_enabled(b.device.type):
                # Before it is divided: a third in bfloat16 is another one than in fp32.
                b = b.to(torch.get_autocast_dtype(b.device.type))
            b = _Part.apply(b, parts)
    # Every attribute of the weight would pass through its torch function.
    with torch._C.DisableTorchFunctionSubclass():
        mark_section(weight, w)
        y = linear(x, w, b)
    # Given, because ``from_local`` takes shards for even ones: it multiplies this rank's extent by the number of
    # ranks.
    stride = contiguous_strides(shape)
    return DTensor.from_local(y, mesh, out, run_check=False, shape=torch.Size(shape), stride=stride)


class ShardedLinearMode(TorchFunctionMode):
    """Torch function mode that runs ``F.linear`` on the local tensors of DTensor weights."""

    def __torch_function__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is F.linear:
            operands = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            weight = operands["weight"]
            if isinstance(weight, DTensor) and isinstance(local(weight), WEIGHTS):
                return sharded_linear(operands["input"], weight, operands.get("bias"))
        return func(*args, **(kwargs or {}))


def require_shardable(layer: nn.Module, state: LayerState) -> None:
    """Raise unless a layer can run on parts of its weight.

    Raises:
        NotImplementedError: If the weight is stored ``[in, out]``.
        ValueError: If random rounding cannot know which ranks hold equal data.
    """
    if state.rounding is not None and not state.ranks.named:
        raise ValueError(
            f"linear: layer {state.name} rounds stochastically, and no mesh says which tensor-parallel ranks "
            "hold the same rows of a batch; call hybridtensor.set_mesh_(model, mesh)"
        )
    if state.transposed:
        raise NotImplementedError(
            f"linear: tensor parallelism shards layer {state.name}, a {type(layer).__name__} with weight [in, "
            "out]; leave it whole, or leave it out of quantize_ (keep_bf16)"
        )


def mark_section(weight: DTensor, part: Weight, dims: Sequence[int] | None = None) -> None:
    """Record the local weight's section of the layer; raise ValueError if that cuts blocks of its formats."""
    # Private, one object for as long as the parameter is cut so: working out the section asks the mesh 20 times.
    record, spec = part.record, weight._spec
    known = record.cut
    if dims is None and known is not None and known[0] is spec and known[1] is record.section:
        return
    if record.section is None and (dims is None or len(dims) == weight.device_mesh.ndim):
        name = "" if part.state is None else part.state.name
        who = f"linear: layer {name}, a part {list(part.shape)} of {list(weight.shape)}"
        part.recipe.check_sizes(part.shape[0], part.shape[1], who)
    record.section = section_of(weight, dims)
    record.cut = None if dims is not None else (spec, record.section)


def section_of(weight: DTensor, dims: Iterable[int] | None = None) -> Section:
    """Return this rank's section of the layer's matrix; ``dims`` are the tensor-parallel mesh dimensions, all by
    default."""
    index, count, first = [0, 0], [1, 1], [0, 0]
    size = list(weight.shape)
    for dim in range(weight.device_mesh.ndim) if dims is None else dims:
        placement = weight.placements[dim]
        if isinstance(placement, Shard):
            along, parts = placement.dim, weight.device_mesh.size(dim)
            mine = weight.device_mesh.get_local_rank(dim)
            largest = -(-size[along] // parts)  # as torch cuts: the last parts may be smaller
            first[along] += min(mine * largest, size[along])
            index[along], count[along] = index[along] * parts + mine, count[along] * parts
            size[along] = max(min(largest, size[along] - mine * largest), 0)
    return Section(index[0], count[0], first[0], index[1], count[1])


class _Part(Function):
    """Autograd function of a rank's part of a bias in a sum over ranks; its gradient is equal on all."""

    @staticmethod
    def forward(ctx: object, bias: Tensor, parts: int) -> Tensor:
        return bias / parts

    @staticmethod
    def backward(ctx: object, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def require_own_tokens(input: object) -> None:
    """Raise ValueError for an input of ``PrepareModuleInput`` unless the layer is column-parallel: its gradient is a
    sum over ranks."""
    if isinstance(input, HybridTensor) and input.is_of_all_ranks:
        raise ValueError(
            "linear: hybridtensor.distributed gathered the input of a layer that is not column-parallel; "
            "give it ColwiseParallel, or prepare the input with torch's PrepareModuleInput"
        )


def _check(name: str, x: Tensor, weight: DTensor) -> None:
    """Raise unless a tensor is a DTensor on the weight's mesh."""
    if name == "input" and isinstance(x, QUANTIZED):
        return
    if isinstance(x, DTensor) and isinstance(local(x), QUANTIZED):
        raise ValueError(
            "linear: the input is a DTensor of quantized tokens, whose gradient would be summed twice; give "
            "the layer hybridtensor.distributed.ColwiseParallel"
        )
    if not isinstance(x, DTensor):
        layer = getattr(getattr(local(weight), "layer", None), "name", "") or "without a name"
        raise TypeError(
            f"linear: the weight of layer {layer} is a DTensor and its {name} a {type(x).__name__}; "
            "parallelize_module prepares inputs, DTensor.from_local makes one; under FSDP2, layers are "
            "called from the forward of the module that fully_shard was given: shard one that holds all "
            "their callers"
        )
    if x.device_mesh != weight.device_mesh:
        raise ValueError(
            f"linear: one mesh is required, got {name} on {x.device_mesh} and a weight on "
            f"{weight.device_mesh}; redistribute the {name}"
        )
