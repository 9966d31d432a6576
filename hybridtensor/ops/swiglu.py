"""A gated activation in one pass, and its gradients in another.

Shape letters: ``M`` rows, ``N`` columns.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.ops.kernel_library import Launch, on_device
from hybridtensor.ops.library import define, implement
from hybridtensor.ops.references.blocks import block_amax

_TILE = (4, 1024)


def _reference(gate: Tensor, up: Tensor, measure: bool) -> list[Tensor]:
    found = [(F.silu(gate) * up).contiguous()]
    return [*found, *(_amax(x) for x in found if measure)]


def gradients_by_torch(grad: Tensor, gate: Tensor, up: Tensor, packed: bool) -> list[Tensor]:
    """Return the gradients of ``gate`` and ``up``, ``packed`` in one or not, by operations of torch."""
    of_gate = torch.ops.aten.silu_backward(grad * up, gate)
    found = [of_gate.contiguous(), (grad * F.silu(gate)).contiguous()]
    return [torch.cat(found, dim=-1)] if packed else found


def _backward_reference(
    grad: Tensor, gate: Tensor, up: Tensor, packed: bool, measure: bool
) -> list[Tensor]:
    found = gradients_by_torch(grad, gate, up, packed)
    return [*found, *(_amax(x) for x in found if measure)]


def _amax(x: Tensor) -> Tensor:
    return block_amax(x.view(-1, x.shape[-1]), (None, None)).view(1)


def _fake(gate: Tensor, up: Tensor, measure: bool) -> list[Tensor]:
    found = [torch.empty_like(gate, memory_format=torch.contiguous_format)]
    return [*found, *(gate.new_empty(1, dtype=torch.float32) for _ in found if measure)]


def _backward_fake(
    grad: Tensor, gate: Tensor, up: Tensor, packed: bool, measure: bool
) -> list[Tensor]:
    if packed:
        found = [gate.new_empty(*gate.shape[:-1], 2 * gate.shape[-1])]
    else:
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up)]
    return [*found, *(gate.new_empty(1, dtype=torch.float32) for _ in found if measure)]


def swiglu_cuda(gate: Tensor, up: Tensor, measure: bool = False) -> list[Tensor]:
    """Return ``silu(gate) * up`` of tensors ``[..., N]`` of one shape and dtype, contiguous; and to ``measure`` its
    amax, fp32 ``[1]``."""
    # The kernels compute in fp32.
    if not gate.numel() or gate.dtype == torch.float64:
        return _reference(gate, up, measure)
    found = _fake(gate, up, False)
    amaxes = [gate.new_zeros(1, dtype=torch.float32) for _ in found if measure]
    # What is written stands for an amax that is not measured.
    _run("swiglu_kernel", [gate, up], [*found, *(amaxes or found)], MEASURE=measure)
    return [*found, *amaxes]


def swiglu_backward_cuda(
    grad: Tensor, gate: Tensor, up: Tensor, packed: bool = False, measure: bool = False
) -> list[Tensor]:
    """Return the gradients of ``gate`` and ``up``, contiguous ``[..., N]``, or ``packed`` in one ``[..., 2N]``; and to
    ``measure`` their amaxes, fp32 ``[1]``."""
    if not gate.numel() or gate.dtype == torch.float64:
        return _backward_reference(grad, gate, up, packed, measure)
    found = _backward_fake(grad, gate, up, packed, False)
    amaxes = [gate.new_zeros(1, dtype=torch.float32) for _ in found if measure]
    columns = gate.shape[-1]
    halves = [found[0][..., :columns], found[0][..., columns:]] if packed else found
    # The halves stand for amaxes that are not measured.
    raised = [amaxes[0], amaxes[-1]] if measure else halves
    stride = found[0].shape[-1]
    _run("swiglu_backward_kernel", [grad, gate, up], [*halves, *raised], stride, MEASURE=measure)
    return [*found, *amaxes]


def _run(
    kernel: str, read: list[Tensor], written: list[Tensor], *sizes: int, **constants: bool
) -> None:
    rows = [_as_rows(x) for x in read]
    shape = rows[0].shape
    strides = tuple(x.stride(0) for x in rows)
    aligned = tuple(x.data_ptr() % 16 == 0 for x in (*rows, *written))
    with on_device(rows[0].device):
        launch = _launch(
            kernel, shape, strides, sizes, aligned, rows[0].dtype, rows[0].device, **constants
        )
        given = [argument for x in rows for argument in (x, x.stride(0))]
        launch(*given, *written, *shape, *sizes)


def _as_rows(x: Tensor) -> Tensor:
    """View a tensor as a matrix with contiguous rows, copied only if necessary."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@functools.lru_cache(maxsize=1024)
def _launch(
    kernel: str, shape: torch.Size, strides: tuple[int, ...], sizes: tuple[int, ...], aligned: tuple[bool, ...],
    dtype: torch.dtype, device: torch.device, **constants: bool,
) -> Launch:  # fmt: skip
    """Return the cached launch of one kind; its key is all that Triton specializes on."""
    (rows, columns), (bm, bn) = shape, _TILE
    programs = -(-rows // bm) * -(-columns // bn)
    on_gpu = device.type == "cuda"
    return Launch(
        "swiglu", kernel, programs, BM=bm, BN=bn, GPU=on_gpu, **constants, options={"num_warps": 8}
    )


swiglu = define(
    "swiglu(Tensor gate, Tensor up, bool measure) -> Tensor[]", reference=_reference, fake=_fake
)
"""``silu(gate) * up`` of tensors ``[..., N]`` of one shape and dtype, contiguous, with the bits of torch; and to
``measure`` its largest magnitude, fp32 ``[1]``; NaN does not count."""
implement("swiglu", swiglu_cuda)

swiglu_backward = define(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up, bool packed, bool measure) -> Tensor[]",
    reference=_backward_reference,
    fake=_backward_fake,
)
"""The gradients of ``gate`` and ``up``, or one ``[..., 2N]`` of both if ``packed``; and to ``measure`` the largest
magnitude of each, fp32 ``[1]``; NaN does not count."""
implement("swiglu_backward", swiglu_backward_cuda)
