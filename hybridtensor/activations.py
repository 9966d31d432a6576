"""Activations and norms that save less for backward than the operations that they consist of, and quantize what
they return for the layers that read it.
"""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.arguments import require_float, require_number
from hybridtensor.linear.function import with_shape
from hybridtensor.linear.readers import Into, Readers, modules_of, readers_of
from hybridtensor.ops import norm
from hybridtensor.ops.autograd import Ctx, Function
from hybridtensor.ops.library import is_traced, left_whole
from hybridtensor.ops.order import prefer_recompute
from hybridtensor.ops.prologue import Gated, Normed
from hybridtensor.ops.swiglu import swiglu as forward_op
from hybridtensor.ops.swiglu import swiglu_backward as backward_op
from hybridtensor.ops.swiglu import swiglu_measured as measured_op
from hybridtensor.quantizers import tokens

_PLAIN = (Tensor, torch.nn.Parameter)


def swiglu(gate: Tensor, up: Tensor, *, into: Into = ()) -> Tensor:
    """Return ``silu(gate) * up``, the gated activation of most transformers.

    The bits are those of ``F.silu(gate) * up``, and so are the gradients'. Eager code runs one kernel in place of two,
    and one in place of four in backward, which keeps only ``gate`` and ``up``: two bytes less per element than torch
    keeps, in bf16. In graphs of ``torch.compile`` it is torch's operations, recomputed in backward, so that a plain
    layer behind it keeps nothing. For DTensors and in ``torch.func`` transforms it is torch's operations, too.

    With ``into``, eager code casts while it computes::

        return self.down_proj(ht.swiglu(self.gate_proj(x), self.up_proj(x), into=self.down_proj))

    Args:
        gate: ``[..., N]``, bf16, fp16 or fp32; rows may be strided, as after ``chunk``.
        up: Of the same shape, dtype and device.
        into: The layers that read what is returned; any other reader raises. Where that saves a pass, it then is a
            ``HybridTensor`` with the faces that they would make, to the same bits: with one scale per tensor, current
            or delayed, and with MXFP8 where the device multiplies it. Else it is the values: with other scales, and of
            layers that do not quantize alike, are sharded, not converted, wrapped or hooked, or run under autocast.

    Raises:
        TypeError: If one is not a dense tensor of these dtypes, or ``into`` no modules.
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
        shown = [f"{x.dtype} {list(x.shape)} on {x.device}" for x in (gate, up)]
        raise ValueError(
            "swiglu: gate and up of one shape [..., N], dtype and device are required, got "
            + " and ".join(shown)
        )
    layers, plain = modules_of("swiglu", into), type(gate) in _PLAIN and type(up) in _PLAIN
    if not plain or is_traced() or torch._C._are_functorch_transforms_active():
        return _operations(gate, up)
    readers = readers_of(layers, gate, (gate, up))
    y: Tensor = _SwiGLU.apply(gate, up, readers)
    return y


@left_whole
def _operations(gate: Tensor, up: Tensor) -> Tensor:
    y = F.silu(gate) * up
    prefer_recompute(y)
    return y


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Ctx, gate: Tensor, up: Tensor, readers: Readers | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        if readers is None:
            return forward_op(gate, up)
        if readers.scale_by_amax:
            return readers.cast(*measured_op(gate, up))
        return readers.cast_computed(gate, Gated(tokens(up)))

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: by operations that have gradients themselves
            sigmoid = torch.sigmoid(gate)
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            found = [grad * up * slope, grad * F.silu(gate)]
        else:
            found = backward_op(grad, gate, up)
        needed = ctx.needs_input_grad[:2]
        return *(x if needs else None for x, needs in zip(found, needed, strict=True)), None


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, into: Into = ()
) -> Tensor:
    """Return ``weight * x / sqrt(mean(x ** 2) + eps)`` over the last dimension, rounded once.

    The factor of a row is computed in float64, the rest in fp32.

    Eager code runs one kernel, and one and a sum in backward, which keeps only ``x``, the weight and a factor
    per row. In graphs of ``torch.compile``, for DTensors, for more than 16384 features and in ``torch.func``
    transforms it is ``F.rms_norm``. ::

        x = ht.rms_norm(x, self.norm.weight, self.norm.eps, into=(self.q_proj, self.k_proj, self.v_proj))

    Args:
        x: ``[..., N]``, bf16, fp16 or fp32.
        weight: ``[N]``, of the dtype of ``x``, or None.
        eps: Added to the mean square; None is the smallest step from 1 in fp32, as torch takes it.
        into: The layers that read what is returned; see ``swiglu``.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the weight has another shape, dtype or device.
    """
    require_float("rms_norm: x", x)
    if not x.dim():
        raise ValueError("rms_norm: x of shape [..., N] is required, got a scalar")
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    require_number("rms_norm", eps=eps)
    if weight is not None:
        _require_weight(weight, x)
    layers, given = modules_of("rms_norm", into), (x,) if weight is None else (x, weight)
    plain = all(type(one) in _PLAIN for one in given)
    if (
        not plain
        or is_traced()
        or x.shape[-1] > norm.MOST_COLUMNS
        or torch._C._are_functorch_transforms_active()
    ):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    (eps,) = struct.unpack("f", struct.pack("f", eps))  # fp32, as kernels take it
    readers = readers_of(layers, x, given)
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    y: Tensor = _RMSNorm.apply(x, weight, eps, readers)
    return y


def _require_weight(weight: Tensor, x: Tensor) -> None:
    """Raise unless a weight is as ``rms_norm`` takes it."""
    require_float("rms_norm: weight", weight)
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype or weight.device != x.device:
        shown = [f"{t.dtype} {list(t.shape)} on {t.device}" for t in (weight, x)]
        raise ValueError(
            f"rms_norm: a weight of {x.shape[-1]} elements, of the dtype and device of x, is required, "
            f"got {shown[0]} for {shown[1]}"
        )


class _NormCtx(Ctx):
    eps: float


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: _NormCtx, x: Tensor, weight: Tensor, eps: float, readers: Readers | None
    ) -> Tensor:
        matrix = tokens(x)
        if readers is None or readers.scale_by_amax:
            y, factor, *amax = norm.rms_norm(matrix, weight, eps, readers is not None)
            out: Tensor = with_shape(y, x.shape)
            if readers is not None:
                out = readers.cast(out, *amax)
        else:
            factor = norm.rms_norm_factors(matrix, eps)
            out = readers.cast_computed(x, Normed(factor, weight))
        ctx.save_for_backward(x, weight, factor)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: _NormCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factor = ctx.saved_tensors
        matrix = tokens(x)
        if torch.is_grad_enabled():  # create_graph: by operations that have gradients themselves
            of_x, of_weight = norm.backward(
                tokens(grad), matrix, weight, norm.factors(matrix, ctx.eps)
            )
        else:
            of_x, of_weight = norm.rms_norm_backward(tokens(grad), matrix, weight, factor)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        return (
            of_x.view(x.shape) if needs_x else None,
            of_weight if needs_weight else None,
            None,
            None,
        )
