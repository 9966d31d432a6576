"""The linear layers of experts: tokens that are sorted by expert, times a stack of weights.

Shape letters: ``T`` tokens, ``E`` experts, ``N`` out features, ``K`` in features.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.types import IntLikeType

from hybridtensor.arguments import require_tensor
from hybridtensor.linear.function import quantized_linear, require_plain_autograd
from hybridtensor.linear.operands import Weight, uses_other_layout
from hybridtensor.ops import Groups
from hybridtensor.ops.library import autocasts, is_traced
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import ROLES, layer_of
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.op_table import of_layers

# Padded rows of a group: 16 for a native sum over tokens, 32 for whole sectors of memory in columnwise faces (0.42 ms
# instead of 0.50 for 32768 x 7168; 64 and 128 gain nothing more)
_LEAST_STEP = 32


def grouped_linear(input: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    """Return each token's product with the weight of its expert, quantized as ``weight.config`` says.

    Every expert's scales are its own: the faces are those of ``linear`` of each expert's tokens and
    weight. What is saved for backward, and who shares it, is as there.

    Args:
        input: ``[T, K]``, sorted by expert.
        weight: ``[E, N, K]``.
        ends: int32 ``[E]``, on the input's device: where the tokens of each expert end, not
            decreasing. Tokens behind the last end give zeros, and get no gradient.

    Returns:
        ``[T, N]``, in the weight's dtype (under autocast: in autocast's).

    Raises:
        NotImplementedError: In a ``torch.func`` transform.
        TypeError: If an argument is of the wrong kind or dtype.
        ValueError: If shapes, dtypes or devices do not go together, or offsets decrease or are
            beyond the tokens (found on the CPU; on a GPU with ``debug(offsets=True)``).
    """
    require_plain_autograd(input)
    dtype = weight.dtype
    if autocasts(weight.device.type) and isinstance(input, Tensor) and input.is_floating_point():
        dtype = torch.get_autocast_dtype(weight.device.type)
    elif isinstance(input, Tensor) and input.dtype != dtype:
        raise ValueError(
            f"grouped_mm: one dtype is required, got tokens in {input.dtype} and weights in {dtype}; "
            "cast one, or use torch.autocast"
        )
    _check(input, weight, ends)
    _check_stack_layout(weight)
    _check_first(weight)
    if is_traced():
        # Not every compiler checks what ``_are`` assumes; this raises for another number when the graph runs.
        ends = ends.view(weight.shape[0])
    groups = Groups(weight.shape[0], ends, step_of(weight.recipe), weight.record.first or 0)
    return quantized_linear(input, weight, None, dtype, groups=groups)


def step_of(config: HybridConfig) -> int:
    """Return the row multiple of each group in columnwise faces: no block or rotation of a format crosses groups."""
    extents = [_LEAST_STEP]
    for role in ROLES:
        quantizer = getattr(config, role)
        extents += [
            quantizer.columnwise_format.block[1] or 1,
            quantizer.columnwise_format.step,
            quantizer.rowwise_format.block[0] or 1,
        ]
    return max(extents)


def _check(input: Tensor, weight: Weight, ends: Tensor) -> None:
    if not isinstance(input, HybridTensor):
        require_tensor("grouped_mm: input", input)
    for name, operand in (("tokens", input), ("offsets", ends)):
        if isinstance(operand, DTensor):
            raise TypeError(
                f"grouped_mm: the {name} of {layer_of(weight.record.layer)} are a DTensor, and its weight is none; "
                f"give the experts hybridtensor.distributed.ExpertParallel, or pass {name}.to_local()"
            )
    if input.dim() != 2 or weight.dim() != 3 or input.shape[1] != weight.shape[2]:
        raise ValueError(
            f"grouped_mm: tokens [T, K] and weights [E, N, K] are required, got {tuple(input.shape)} and "
            f"{tuple(weight.shape)}{of_layers((weight,))} (as F.linear takes them); sort tokens by expert, see "
            "quantize_'s transposed"
        )
    if ends.dtype != torch.int32 or ends.dim() != 1 or not _are(ends.shape[0], weight.shape[0]):
        raise ValueError(
            f"grouped_mm: int32 offsets [{weight.shape[0]}], one for each expert, are required, got "
            f"{ends.dtype} {list(ends.shape)}"
        )
    if not input.device == weight.device == ends.device:
        raise ValueError(
            "grouped_mm: operands on one device are required, got tokens on "
            f"{input.device}, weights on {weight.device} and offsets on {ends.device}; move them"
        )


def _are(count: IntLikeType, experts: int) -> bool:
    """Return whether there are as many offsets as experts; assume it of a number that is known when a graph runs."""
    alike = count == experts
    if isinstance(alike, torch.SymBool):
        torch._check(alike)
        return True
    return alike


def _check_stack_layout(weight: Weight) -> None:
    """Raise ValueError if a weight is multiplied in another layout than ``quantize_`` recorded (``transposed``)."""
    state = weight.record.layer
    if state is not None and state.transposed is not None and uses_other_layout(weight):
        layout = "[E, in, out]" if state.transposed else "[E, out, in]"
        raise ValueError(
            f"grouped_mm: the experts of {layer_of(state)} were converted as stored {layout}, and were multiplied in "
            "the other layout; say which are [E, in, out] by quantize_(..., transposed=[names]) or their "
            "module's is_transposed"
        )


def _check_first(weight: Weight) -> None:
    """Raise where delayed scales are not those of these experts: NotImplementedError of a matrix, which has one for
    all of it; ValueError where they belong to more experts than given, and the first one is unknown."""
    state = weight.record.layer
    if state is None or not state.slots:
        return
    known = {slot.partition("[")[2] for slot in state.slots}
    if "" in known:
        raise NotImplementedError(
            f"grouped_mm: {layer_of(state)} is a matrix with one delayed scale per operand, and {weight.shape[0]} "
            "groups of its rows were multiplied, each of which needs its own; give it a recipe without delayed "
            "scales, or leave it out of quantize_ (keep_bf16)"
        )
    if weight.record.first is None and len(known) != weight.shape[0]:
        raise ValueError(
            f"grouped_mm: {layer_of(state)} has delayed scales of {len(known)} experts, but weights of "
            f"{weight.shape[0]} on this rank; call hybridtensor.set_mesh_(model, mesh) once experts are "
            "distributed"
        )


def first_expert(weight: DTensor, dims: Iterable[int] | None = None) -> int:
    """Return the number of this rank's first expert; ``dims`` are the mesh dimensions of experts, all by default."""
    first, count, mesh = 0, weight.shape[0], weight.device_mesh
    for dim in range(mesh.ndim) if dims is None else dims:
        placement = weight.placements[dim]
        if isinstance(placement, Shard) and placement.dim == 0:
            largest = -(-count // mesh.size(dim))  # as torch cuts: the last parts may be smaller
            before = min(mesh.get_local_rank(dim) * largest, count)
            first, count = first + before, max(min(largest, count - before), 0)
    return first


def batched_linear(input: Tensor, weight: Weight) -> Tensor:
    """Return ``[E, T, N]`` of tokens ``[E, T, K]``, equally many per expert; see ``grouped_linear``."""
    if input.dim() != 3 or input.shape[0] != weight.shape[0]:
        raise ValueError(
            f"grouped_mm: tokens [E, T, K] for weights {tuple(weight.shape)}{of_layers((weight,))} are required, got "
            f"{tuple(input.shape)}; reshape them, or leave the layer out of quantize_ (keep_bf16)"
        )
    count, rows, features = input.shape
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=input.device) * rows
    out = grouped_linear(input.reshape(count * rows, features), weight, ends)
    return out.view(count, rows, weight.shape[1])
