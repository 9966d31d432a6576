"""The three products of a linear layer, given operands.

| product       | left operand                 | right operand          |
|---------------|------------------------------|------------------------|
| `output`      | `input.rowwise`              | `weight.rowwise.t()`   |
| `grad_input`  | `grad_output.rowwise`        | `weight.columnwise`    |
| `grad_weight` | `grad_output.columnwise.t()` | `input.columnwise`     |

With groups in the context, operands are tokens sorted by expert and stacks of weights, and the
products are those of ``ops.grouped_mm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor import ops
from hybridtensor.linear.operands import Needs, Operand, gradient_faces
from hybridtensor.ops import Face, after
from hybridtensor.ops.amaxes import ReturnedAmaxes, commit
from hybridtensor.ops.autograd import version_of
from hybridtensor.ops.library import is_traced
from hybridtensor.quantizers import tokens
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context, LayerState, StateTensors, layer_of
from hybridtensor.subclasses import HybridTensor, IdentityTensor
from hybridtensor.subclasses.observing import (
    may_hold_values,
    observe_operand,
    observe_product,
    observers,
)
from hybridtensor.subclasses.operators.matmul import take_face
from hybridtensor.subclasses.wrapper import WrapperTensor

# The overload: looking it up in each call would take twice as long as the view
_unsafe_view = torch.ops.aten._unsafe_view.default


class Gradients(NamedTuple):
    """The gradients of a linear layer; None where one is not needed.

    ::

        gradients = backward.gradients(grad_output, saved)
        print(gradients.input, gradients.weight)
    """

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def output(
    input: Face, weight: Face, bias: Tensor | None, dtype: torch.dtype, direct: bool
) -> Tensor:
    """Return ``input @ weight.T + bias`` of two rowwise faces, ``[tokens, out_features]`` in
    ``dtype``; see ``ops.product``.

    ::

        y = ht.linear.output(left.rowwise(), right.rowwise(), None, x.dtype, direct=False)
    """
    return ops.product(input, weight, bias=bias, out_dtype=dtype, fast_accum=True, direct=direct)


def plain_output(
    input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, trained: bool
) -> Tensor:
    """Return bitwise what the plain module computes, of rowwise faces in high precision; in the input's own shape.

    ``trained``: whether the weight that the plain module multiplies requires a gradient, in whatever mode.
    """
    face = take_face(input, "rowwise", name="input", gemm="output")
    values = face.dequantize() if isinstance(face, IdentityTensor) else face.detach()
    x = values.to(dtype)
    # If the weight requires a gradient, also under no_grad, ``F.linear`` flattens a strided batch into one product and
    # adds the bias afterwards. Below autograd, as here, ``F.linear`` cannot see that it requires one.
    if x.dim() == 2:
        return F.linear(x, weight, bias)
    if x.is_contiguous() or not trained:
        out = F.linear(x, weight, bias)
        return with_shape(out, out.shape)  # here F.linear returns views
    out = with_shape(torch.mm(tokens(x), weight.t()), (*x.shape[:-1], weight.shape[0]))
    return out if bias is None else out + bias


def with_shape(out: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape ``out`` without making it a view: views from custom autograd functions cannot be written in place, or
    have FSDP2's hooks."""
    return _unsafe_view(out, shape)  # type: ignore[no-any-return]


class Backward(NamedTuple):
    """The two products of backward, and what they need from forward.

    ::

        backward, saved = ht.linear.Backward.save(left, right, weight.config, needs, context)
        gradients = backward.gradients(grad_output, saved)

    Attributes:
        input: The input's operand.
        weight: The weight's operand.
        num_saved: How many of the saved tensors are the input's, which come first; the rest are the weight's.
        config: The recipe in forward.
        needs: Which gradients will be asked for, in one backward or in two parts of it.
        context: The context of the input in forward.
        layer: State of the layer, for observers and to mark that its backward ran; or None.
        draws: Count of the changes of the layer's random numbers until forward; 0 without any.
    """

    input: Operand
    weight: Operand
    num_saved: int
    config: HybridConfig
    needs: Needs
    context: Context
    layer: object = None
    draws: int = 0

    @classmethod
    def save(
        cls,
        input: Operand,
        weight: Operand,
        config: HybridConfig,
        needs: Needs,
        context: Context,
        layer: object = None,
    ) -> tuple[Backward, list[Tensor]]:
        """Return the two products of backward, and the tensors that they need until then."""
        of_input, draws = input.save(), _draws(context.state)
        backward = cls(input, weight, len(of_input), config, needs, context, layer, draws)
        return backward, [*of_input, *weight.save()]

    def with_ends(self, ends: Tensor) -> Backward:
        """Return this object with the saved offsets of tokens."""
        groups = self.context.groups
        if groups is None:
            raise ValueError("backward: the tokens of experts came without groups")
        context = self.context._replace(groups=groups._replace(ends=ends))
        return self._replace(context=context)

    def gradients(
        self,
        grad: Tensor,
        saved: list[Tensor],
        amaxes: Sequence[Tensor] = (),
        asked: Needs | None = None,
        direct: bool = False,
    ) -> Gradients:
        """Return the gradients.

        Args:
            grad: The output's gradient, ``[tokens, out_features]``; of any shape if it is quantized already.
            saved: What ``save`` returned.
            amaxes: What ``graph_amaxes`` returned in forward.
            asked: Which of the needed gradients this backward computes, all by default; another one computes the rest.
            direct: Whether no mode or tracer observes operators on the gradient; see ``runs_directly``.
        """
        needs, count, dtype = self.needs if asked is None else asked, self.num_saved, grad.dtype
        fast = self.config.fast_accum  # else in fp32: long sums of one sign lost up to 29 %
        state, done = self.context.state, None
        if state is not None and state.slots:
            done = self._begin_backward(state, amaxes, grad)
        of_input, of_weight = saved[:count], saved[count:]
        if needs.weight:
            # Gathered while the gradient is cast and multiplied
            self.input.begin(of_input, grad)
        traced, plain = not direct and is_traced(), None
        if isinstance(grad, HybridTensor):
            row, column = gradient_faces(grad, needs, dtype)
        else:
            plain, values = grad, may_hold_values(dtype, self.context.groups)
            context = self.context.of_gradient(done, values, direct)
            row, column = self.config.grad_output.faces(
                grad, rowwise=needs.input, columnwise=needs.weight, dtype=dtype, context=context
            )
            if done is not None and any(
                face is not None and not face.format.is_identity for face in (row, column)
            ):
                done = None  # the casts come after it
        if observers:
            observe_operand(self.layer, "grad_output", grad, self.input)
        grad_input = grad_weight = None
        if row is not None:
            right = self.weight.columnwise(of_weight, row.qdata if traced else None)
            if observers:
                observe_product(self.layer, "grad_input", row, right, dtype)
            grad_input = ops.product(row, right, out_dtype=dtype, fast_accum=fast, direct=direct)
            row = None  # its memory is for the weight's gradient
        self.weight.release(used=needs.input or not self.needs.input)  # room for what follows
        if column is not None:
            right = self.input.columnwise(of_input, plain if traced else None)
            if column.groups is not None:
                right = right._replace(groups=column.groups)
            if observers:
                observe_product(self.layer, "grad_weight", column, right, dtype)
            grad_weight = self._grad_weight(column, right, dtype, direct)
        # Summed in the cast it would be 2.7 % faster at most, and its bits would depend on the recipe.
        grad_bias = grad.sum(dim=0) if needs.bias else None
        gradients = Gradients(grad_input, grad_weight, grad_bias)
        return gradients if state is None else self._committed(gradients, state, done)

    def _begin_backward(
        self, state: StateTensors, amaxes: Sequence[Tensor], grad: Tensor
    ) -> Tensor | None:
        """Record that the backward of a layer with delayed scales runs; in a graph as ``commit_in_graph``."""
        if isinstance(state.amax, ReturnedAmaxes):
            return commit_in_graph(state, amaxes, self.weight, plain_part(grad))
        if isinstance(self.layer, LayerState):
            self.layer.mark_backward(recorded=state.step_record is not None)
        return None

    def _require_same_draws(self) -> None:
        """Raise RuntimeError if ``step_`` ran since forward: input and gradient are rotated under other signs then."""
        if _draws(self.context.state) != self.draws:
            raise RuntimeError(
                f"grad_weight: the random signs of {layer_of(self.context.state)} were drawn again between its forward "
                "and backward; call step_ after backward"
            )

    def _grad_weight(self, grad: Face, input: Face, dtype: torch.dtype, direct: bool) -> Tensor:
        """Return the weight's gradient ``[out, in]``, or of each expert, in the memory order of the parameter."""
        state, fast = self.context.state, self.config.fast_accum
        if grad.format.drawn_signs:
            self._require_same_draws()
        if state is None or not state.transposed:
            return ops.product(grad, input, out_dtype=dtype, fast_accum=fast, direct=direct)
        # In another order autograd would copy it: 6 of 135 ms in a step of four blocks of GPT-OSS.
        turned = ops.product(input, grad, out_dtype=dtype, fast_accum=fast, direct=direct)
        return turned.transpose(-2, -1)

    def _committed(
        self, gradients: Gradients, state: StateTensors, done: Tensor | None
    ) -> Gradients:
        """Commit the amaxes of forward and backward; in a graph the gradients depend on ``done``, so that the commit is
        not dropped."""
        if state.step_record is not None:
            state.commit(self.weight.amax_record, self.input.amax_record)
        if done is None:
            return gradients
        last = next(i for i in (2, 1, 0) if gradients[i] is not None)  # the smallest that is there
        return Gradients(
            *(after(g, done) if i == last and g is not None else g for i, g in enumerate(gradients))
        )


def graph_amaxes(state: StateTensors | None) -> list[Tensor]:
    """Return the amaxes that a forward measured in a graph; backward commits them."""
    measured = None if state is None else state.amax
    return measured.tensors if isinstance(measured, ReturnedAmaxes) else []


def commit_in_graph(
    state: StateTensors, amaxes: Sequence[Tensor], weight: Operand, before: Tensor
) -> Tensor | None:
    """Commit the ``amaxes`` of a forward in a graph, once ``before`` is computed; return a tensor that later results
    must depend on, or None in eager code."""
    if not (isinstance(state.amax, ReturnedAmaxes) and isinstance(state.step_record, Tensor)):
        return None
    # It also says that the layer was used: if a gather recorded the weight's amax, it counts.
    is_gathered = weight.is_given and any(s.startswith("weight") for s in state.slots)
    if not amaxes and not is_gathered:
        return None
    return commit(state.step_record, list(amaxes), before, len(state.slots))


def committed_alone(out: Tensor, input: Operand, weight: Operand, context: Context) -> Tensor:
    """Commit the amaxes of a forward that no backward follows, as of frozen layers before all that is trained, and
    return its output."""
    state = context.state
    if state is None or state.step_record is None:
        return out
    state.commit(weight.amax_record, input.amax_record, alone=True)
    done = commit_in_graph(state, graph_amaxes(state), weight, out)
    return out if done is None else after(out, done)


def _draws(state: StateTensors | None) -> int:
    """Return a count of the changes of a layer's random numbers; 0 without any."""
    return 0 if state is None or state.rounding is None else version_of(state.rounding)


def plain_part(grad: Tensor) -> Tensor:
    """Return a plain tensor of a gradient, which may be quantized."""
    while isinstance(grad, WrapperTensor):
        names, _ = grad.parts()
        grad = getattr(grad, names[0])
    return grad
