"""Describe what is sent of activations."""

from __future__ import annotations

from typing import TypeAlias

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from hybridtensor.distributed.expert_parallel import ExpertParallel, dispatch_sends
from hybridtensor.distributed.sequence.activations import (
    config_of,
    takes_faces,
)
from hybridtensor.distributed.sequence.plan import gradient_plan, input_plan
from hybridtensor.distributed.sequence.styles import (
    STYLES,
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    column_parallel,
)
from hybridtensor.quantizers import Quantizer

Sent: TypeAlias = tuple[str, str, str, str]
"""What ranks send of an activation: tensor, forward, backward and reason, as a ``SequenceRow`` of ``explain`` has them.
The tensor ``"tokens"`` is that of tokens which go to their experts.
"""


def sends(module: nn.Module) -> list[Sent]:
    """Describe what the parallel styles of a module send."""
    found = []
    for style, mesh in module.__dict__.get(STYLES, ()):
        if isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear):
            if isinstance(style.output_layouts[0], Shard):
                found.append(_of_gradient(module))
        elif isinstance(style, ColwiseParallel) and isinstance(module, nn.Linear):
            if isinstance(style.input_layouts[0], Shard):
                found.append(_of_input([module]))
        elif isinstance(style, ExpertParallel):
            forward, reason = dispatch_sends(style, module)
            of_gradient = style.gradients
            backward = "values" if of_gradient is None else f"rowwise, {of_gradient.rowwise_format}"
            found.append(("tokens", forward, backward, reason))
        elif isinstance(style, PrepareModuleInput) and _gathers(style):
            found.append(_of_input(column_parallel(module.modules(), mesh)))
    return found


def _gathers(style: PrepareModuleInput) -> bool:
    pairs = [*zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True)]
    wanted = style.desired_input_kwarg_layouts
    pairs += [(given, wanted.get(name)) for name, given in style.input_kwarg_layouts.items()]
    return any(isinstance(a, Shard) and isinstance(b, Replicate) for a, b in pairs)


_ANY = 1 << 20  # tokens that no block cuts


def _of_input(layers: list[nn.Linear]) -> Sent:
    config = config_of(layers)
    if config is None:
        return "input", "values", "", "its layers quantize it by different recipes, or not at all"
    plan = input_plan(config.input, _ANY, 2, len(layers) > 1)
    if plan.reason:
        return "input", "values", "", plan.reason
    backward = {
        "bytes": f"columnwise, {config.input.columnwise_format}", "values": "values", "quantized": "values",
    }.get(plan.column, "")  # fmt: skip
    forward = f"rowwise, {config.input.rowwise_format}"
    return "input", forward, backward, plan.column_reason or _multiple(config.input)


def _of_gradient(layer: nn.Linear) -> Sent:
    config = config_of([layer])
    if config is None or not takes_faces(layer):
        why = (
            "the bias needs a sum of values"
            if layer.bias is not None
            else "its forward is not Linear's"
        )
        why = "it is not quantized" if config is None else why
        return "grad_output", "", "values", why
    plan = gradient_plan(config, _ANY, 2)
    sent = "values" if plan.reason else f"rowwise, {config.grad_output.rowwise_format}"
    return "grad_output", "", sent, plan.reason or _multiple(config.grad_output)


def _multiple(quantizer: Quantizer) -> str:
    """Return the multiple of tokens per rank that quantized gathers need, as text, or ""."""
    extents = [quantizer.rowwise_format.block[0], quantizer.columnwise_format.block[1]]
    most = max(extent or 1 for extent in extents)
    return f"where a rank has a multiple of {most} tokens of a sequence" if most > 1 else ""
