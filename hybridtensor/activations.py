"""Activations and norms that save less for backward than the operations that they consist of, and quantize what
they return for the layers that read it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.arguments import require_float, require_number
from hybridtensor.linear.output_gradients import Output, output_of, swiglu_gradients
from hybridtensor.linear.products import with_shape
from hybridtensor.linear.readers import Into, Readers, modules_of, readers_of
from hybridtensor.ops import norm
from hybridtensor.ops.autograd import Ctx, Function
from hybridtensor.ops.library import is_batched, is_traced, left_whole
from hybridtensor.ops.order import prefer_recompute
from hybridtensor.ops.prologue import Gated, Normed
from hybridtensor.ops.swiglu import gradients_by_torch
from hybridtensor.ops.swiglu import swiglu as forward_op
from hybridtensor.quantizers import tokens

_PLAIN = (Tensor, torch.nn.Parameter)


def swiglu(
    gate: Tensor, up: Tensor | None = None, *, into: Into = (), outputs_of: Into = ()
) -> Tensor:
    """Return ``silu(gate) * up``, the gated activation of most transformers.

    The bits are those of ``F.silu(gate) * up``, and so are the gradients'. Eager code runs one kernel in place of two,
    and one in place of four in backward, which keeps only ``gate`` and ``up``: two bytes less per element than torch
    keeps, in bf16. In graphs of ``torch.compile`` it is torch's operations, recomputed in backward, so that a plain
    layer behind it keeps nothing. For DTensors and in ``torch.func`` transforms it is torch's operations, too.

    With ``into`` and ``outputs_of``, eager code casts what it computes, in backward, too::

        layers = self.gate_proj, self.up_proj
        y = self.down_proj(ht.swiglu(*(layer(x) for layer in layers), into=self.down_proj, outputs_of=layers))

    Of the output of one layer that computes both, backward writes one gradient, where torch concatenates two::

        y = self.down_proj(ht.swiglu(self.gate_up_proj(x), into=self.down_proj, outputs_of=self.gate_up_proj))

    Args:
        gate: ``[..., N]``, bf16, fp16 or fp32; rows may be strided, as after ``chunk``. Without ``up``
            ``[..., 2 * N]``: the gate, and behind it what is gated.
        up: Of the same shape, dtype and device.
        into: The layers that read what is returned; any other reader raises. Where that saves a pass, it then is a
            ``HybridTensor`` with the faces that they would make, to the same bits: with one scale per tensor, current
            or delayed, and with MXFP8 where the device multiplies it. Else it is the values: with other scales, and of
            layers that do not quantize alike, are sharded, not converted, wrapped or hooked, or run under autocast.
        outputs_of: The layer that returned ``gate``, and the one that returned ``up``; nothing else may read these or
            their gradients. With one scale per tensor, current or delayed, and without bias, backward then hands each
            layer its gradient as a ``HybridTensor`` with the faces that it would make, to the same bits; adding another
            gradient to it raises. Else, and if something hooked or retained it, the gradient is a plain tensor.

    Raises:
        TypeError: If one is not a dense tensor of these dtypes, or ``into`` or ``outputs_of`` no modules.
        ValueError: If they differ in shape, dtype or device, or ``outputs_of`` is not one layer per tensor.
    """
    given = (gate,) if up is None else (gate, up)
    for name, x in zip(("gate", "up"), given, strict=False):
        require_float(f"swiglu: {name}", x)
    _require_halves(gate, up)
    layers, makers = modules_of("swiglu", into), modules_of("swiglu", outputs_of, "outputs_of")
    if makers and len(makers) != len(given):
        raise ValueError(
            f"swiglu: one layer of each of {len(given)} tensors is required as outputs_of, got {len(makers)}; name "
            "the layer that returned gate, and the one that returned up"
        )
    plain = all(type(x) in _PLAIN for x in given)
    if not plain or is_traced() or torch._C._are_functorch_transforms_active():
        return _operations(*(gate.chunk(2, dim=-1) if up is None else given))
    like = gate.detach().chunk(2, dim=-1)[0] if up is None and layers else gate
    readers = readers_of(layers, like, given)
    outputs: list[Output] = [None] * len(given)
    if makers and gate is not up:
        outputs = [output_of(layer, x) for layer, x in zip(makers, given, strict=True)]
    y: Tensor = _SwiGLU.apply(gate, up, readers, outputs)
    return y


def _require_halves(gate: Tensor, up: Tensor | None) -> None:
    """Raise ValueError unless the gate and what it gates are as ``swiglu`` takes them."""
    if up is None:
        if not gate.dim() or gate.shape[-1] % 2:
            raise ValueError(
                f"swiglu: a gate of shape [..., 2 * N] is required without up, got {list(gate.shape)}; pass up, too"
            )
    elif (
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


@left_whole
def _operations(gate: Tensor, up: Tensor) -> Tensor:
    y = F.silu(gate) * up
    prefer_recompute(y)
    return y


class _GateCtx(Ctx):
    outputs: Sequence[Output]


class _SwiGLU(Function):
    @staticmethod
    def forward(
        ctx: _GateCtx,
        gate: Tensor,
        up: Tensor | None,
        readers: Readers | None,
        outputs: Sequence[Output],
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.outputs = outputs
        gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
        if readers is None:
            return forward_op(gate, up, False)[0]
        if readers.plan.scales_by_amax:
            return readers.cast(*forward_op(gate, up, True))
        return readers.cast_computed(gate, Gated(tokens(up)))

    @staticmethod
    def backward(ctx: _GateCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        packed = up is None
        gate, up = gate.chunk(2, dim=-1) if packed else (gate, up)
        if torch.is_grad_enabled():  # create_graph: by operations that have gradients themselves
            sigmoid = torch.sigmoid(gate)
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            found: Sequence[Tensor] = [grad * up * slope, grad * F.silu(gate)]
            found = [torch.cat(list(found), dim=-1)] if packed else found
        elif is_batched(grad):  # of which our operators know nothing
            found = gradients_by_torch(grad, gate, up, packed)
        else:
            nodes = [node for node, _ in ctx.next_functions[: len(ctx.outputs)]]
            found = swiglu_gradients(grad, gate, up, nodes, ctx.outputs)
        of_gate, of_up, *_ = *found, None
        needs_gate, needs_up, *_ = ctx.needs_input_grad
        return of_gate if needs_gate else None, of_up if needs_up else None, None, None


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
        if readers is None or readers.plan.scales_by_amax:
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
        # create_graph, or several gradients at once: by operations that have gradients, and rules for that
        if torch.is_grad_enabled() or is_batched(grad):
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
