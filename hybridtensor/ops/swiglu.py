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


def _reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate) * up).contiguous()


def _backward_reference(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    of_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return [of_gate.contiguous(), (grad * F.silu(gate)).contiguous()]


def _measured_reference(gate: Tensor, up: Tensor) -> list[Tensor]:
    y = _reference(gate, up)
    return [y, block_amax(y.view(-1, y.shape[-1]), (None, None)).view(1)]


def _measured_fake(gate: Tensor, up: Tensor) -> list[Tensor]:
    return [_fake(gate, up), gate.new_empty(1, dtype=torch.float32)]


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _backward_fake(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up)]


def swiglu_cuda(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of tensors ``[..., N]`` of one shape and dtype, contiguous."""
    # The kernels compute in fp32.
    if not gate.numel() or gate.dtype == torch.float64:
        return _reference(gate, up)
    out = _fake(gate, up)
    # The second ``out`` stands for the amax, which is not measured.
    _run("swiglu_kernel", [gate, up], [out, out], MEASURE=False)
    return out


def swiglu_measured_cuda(gate: Tensor, up: Tensor) -> list[Tensor]:
    """Return ``silu(gate) * up`` and its amax, fp32 ``[1]``."""
    if not gate.numel() or gate.dtype == torch.float64:
        return _measured_reference(gate, up)
    out, amax = _fake(gate, up), gate.new_zeros(1, dtype=torch.float32)
    _run("swiglu_kernel", [gate, up], [out, amax], MEASURE=True)
    return [out, amax]


def swiglu_backward_cuda(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    """Return the gradients of ``gate`` and ``up``, contiguous, all ``[..., N]``."""
    if not gate.numel() or gate.dtype == torch.float64:
        return _backward_reference(grad, gate, up)
    out = _backward_fake(grad, gate, up)
    _run("swiglu_backward_kernel", [grad, gate, up], out)
    return out


def _run(kernel: str, read: list[Tensor], written: list[Tensor], **constants: bool) -> None:
    rows = [_as_rows(x) for x in read]
    shape = rows[0].shape
    strides = tuple(x.stride(0) for x in rows)
    aligned = tuple(x.data_ptr() % 16 == 0 for x in (*rows, *written))
    with on_device(rows[0].device):
        launch = _launch(
            kernel, shape, strides, aligned, rows[0].dtype, rows[0].device, **constants
        )
        given = [argument for x in rows for argument in (x, x.stride(0))]
        launch(*given, *written, *shape)


def _as_rows(x: Tensor) -> Tensor:
    """View a tensor as a matrix with contiguous rows, copied only if necessary."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@functools.lru_cache(maxsize=1024)
def _launch(
    kernel: str, shape: torch.Size, strides: tuple[int, ...], aligned: tuple[bool, ...], dtype: torch.dtype,
    device: torch.device, **constants: bool,
) -> Launch:  # fmt: skip
    """Return the cached launch of one kind; its key is all that Triton specializes on."""
    (rows, columns), (bm, bn) = shape, _TILE
    programs = -(-rows // bm) * -(-columns // bn)
    on_gpu = device.type == "cuda"
    return Launch(
        "swiglu", kernel, programs, BM=bm, BN=bn, GPU=on_gpu, **constants, options={"num_warps": 8}
    )


swiglu = define("swiglu(Tensor gate, Tensor up) -> Tensor", reference=_reference, fake=_fake)
"""``silu(gate) * up`` of tensors ``[..., N]`` of one shape and dtype, contiguous; bits are torch's."""
implement("swiglu", swiglu_cuda)

swiglu_measured = define(
    "swiglu_measured(Tensor gate, Tensor up) -> Tensor[]",
    reference=_measured_reference,
    fake=_measured_fake,
)
"""The same, and its largest magnitude, fp32 ``[1]``; NaN does not count."""
implement("swiglu_measured", swiglu_measured_cuda)

swiglu_backward = define(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> Tensor[]",
    reference=_backward_reference,
    fake=_backward_fake,
)
"""The gradients of ``gate`` and ``up``."""
implement("swiglu_backward", swiglu_backward_cuda)
