"""Backward in two parts: ``torch.autograd.grad`` asks for the input's gradient, and later for the weight's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hybridtensor.linear.operands import Needs
from hybridtensor.ops.autograd import Ctx, Function
from hybridtensor.state import StateTensors, layer_of

# Private in torch, and what its hooks of several gradients ask
will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node
_PIPELINING = "torch.distributed.pipelining._backward"


def requested_gradients(ctx: Ctx, needs: Needs, state: StateTensors | None) -> Needs:
    """Return the gradients that this backward computes.

    Args:
        ctx: The autograd node of a layer.
        needs: The gradients that are needed, in one part of the backward or the other.
        state: That of the layer, for the error.

    Raises:
        NotImplementedError: If torch could not run a second part.
    """
    # ``ctx.needs_input_grad`` is the same in both parts of a backward. A graph has one part only.
    asked = list(needs)
    *of_bias, of_input, of_weight = ctx.next_functions  # of the bias if there is one
    for index, (node, _) in enumerate((of_input, of_weight, *of_bias)):
        if asked[index] and node is not None:
            try:  # noqa: SIM105  (a context costs more, in every backward)
                asked[index] = will_run(node)
            except RuntimeError:
                # In torch.autograd.grad it answers only for leaves that are left out
                pass
    if (
        needs.weight
        and not asked[1]
        and _PIPELINING in sys.modules
        and _nodes_go()
        and _is_first_part()
    ):
        raise NotImplementedError(
            f"linear: a zero-bubble schedule runs the backward of {layer_of(state)} in two parts, and torch "
            f"{torch.__version__} frees the nodes of autograd functions before the second; use GPipe, 1F1B or "
            "Interleaved1F1B, or torch 2.13"
        )
    return Needs(*asked)


def _is_first_part() -> bool:
    """Return whether a zero-bubble schedule runs this backward, maybe from an autograd thread."""
    code = sys.modules[_PIPELINING].stage_backward_input.__code__
    frame: FrameType | None
    # Of all threads: autograd runs a backward in a thread of its own for each device.
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code is code:
                return True
            frame = frame.f_back
    return False


class _Function(Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


@functools.cache
def _nodes_go() -> bool:
    """Return whether an autograd node is freed with its output, as before torch 2.13."""
    with torch.enable_grad():
        node = _Function.apply(torch.zeros(1, requires_grad=True)).grad_fn
    try:
        node._input_metadata  # noqa: B018  (what the second part reads)
    except RuntimeError:
        return True
    return False
