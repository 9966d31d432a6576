"""Activations that save less for backward than the operations that they consist of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridtensor.arguments import require_float
from hybridtensor.ops.library import is_traced
from hybridtensor.ops.swiglu import swiglu as forward_op
from hybridtensor.ops.swiglu import swiglu_backward as backward_op

_PLAIN = (Tensor, torch.nn.Parameter)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, the gated activation of most transformers.

    The bits are those of ``F.silu(gate) * up``, and so are the gradients'. Eager code runs one kernel in
    place of two, and one in place of four in backward, which keeps only ``gate`` and ``up``: two
    bytes less per element than torch keeps, in bf16. In graphs of ``torch.compile`` it is torch's
    operations, done again in backward, so that a plain layer behind it keeps nothing. For DTensors and in
    ``torch.func`` transforms it is torch's operations, too.

    Args:
        gate: ``[..., N]``, bf16, fp16 or fp32; rows may be strided, as after ``chunk``.
        up: Of the same shape, dtype and device.

    Raises:
        TypeError: If one is not a dense tensor of these dtypes.
        ValueError: If they differ in shape, dtype or device.
    """
    for name, x in (("gate", gate), ("up", up)):
        require_float(f"swiglu: {name}", x)
    if (
        gate.shape != up.shape
        or gate.dtype != up.dtype
        or gate.device != up.device
        or not gate.dim()
    ):
        told = [f"{x.dtype} {list(x.shape)} on {x.device}" for x in (gate, up)]
        raise ValueError(
            "swiglu: gate and up of one shape [..., N], dtype and device are required, got "
            + " and ".join(told)
        )
    plain = type(gate) in _PLAIN and type(up) in _PLAIN
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return checkpoint(_operations, gate, up, use_reentrant=False)  # type: ignore[no-any-return]
    if not plain or is_traced() or torch._C._are_functorch_transforms_active():
        return _operations(gate, up)
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return, no-untyped-call]


def _operations(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return forward_op(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: by operations that have gradients themselves
            sigmoid = torch.sigmoid(gate)
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            found = [grad * up * slope, grad * F.silu(gate)]
        else:
            found = backward_op(grad, gate, up)
        needed = ctx.needs_input_grad
        return tuple(x if needs else None for x, needs in zip(found, needed, strict=True))
