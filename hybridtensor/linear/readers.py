"""Quantizing a norm's or activation's result for the layers that use it, while it is computed and without storing
it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from hybridtensor import ops
from hybridtensor.arguments import require_items, wrong
from hybridtensor.linear.layer_forward import runs_linear
from hybridtensor.linear.operands import WEIGHTS, Weight
from hybridtensor.ops import CastInputs, Faces
from hybridtensor.ops.library import autocasts, runs_directly
from hybridtensor.ops.prologue import Prologue
from hybridtensor.quantizers import CastPlan, cast_plan, tokens
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context, LayerState
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.faces import face_tensor
from hybridtensor.subclasses.observing import observers
from hybridtensor.subclasses.record import ReadBy

Into = nn.Module | Iterable[nn.Module]


class Readers(NamedTuple):
    """How sibling layers quantize their common input: the plan, the first layer's context, and the layers."""

    plan: CastPlan
    context: Context
    read_by: ReadBy

    def cast(self, y: Tensor, amax: Tensor) -> HybridTensor:
        """Quantize a tensor ``[..., K]`` whose amax is known."""
        return self._cast(y, self.plan.inputs(tokens(y), self.context, (amax, amax)))

    def cast_computed(self, x: Tensor, prologue: Prologue) -> HybridTensor:
        """Quantize the tensor that ``prologue`` computes from ``x`` ``[..., K]``, of matrices ``[M, K]``."""
        inputs = self.plan.inputs(tokens(x), self.context)
        return self._cast(x, inputs._replace(prologue=prologue))

    def _cast(self, x: Tensor, inputs: CastInputs) -> HybridTensor:
        faces = ops.quantize(tokens(x), self.plan.request, inputs)
        made = quantized_tensor(faces, x.shape, x.dtype, self.read_by)
        made.record.amaxes = None if self.context.state is None else self.context.state.amax
        return made


def quantized_tensor(
    faces: Faces, shape: torch.Size, dtype: torch.dtype, read_by: ReadBy
) -> HybridTensor:
    """Return faces of a matrix as a tensor ``[..., K]`` that nobody else may read."""
    row, column = faces
    made = HybridTensor(face_tensor(row, -1, shape, dtype), face_tensor(column, 0, shape, dtype))
    made.record.readers = read_by
    return made


def readers_of(layers: list[nn.Module], x: Tensor, operands: Iterable[Tensor]) -> Readers | None:
    """Return the common quantizer of sibling layers' input, or None where they need high precision, or a compiler
    fuses casts."""
    if not layers or not 1 < x.dim() <= 4 or not x.numel():
        return None
    # Observers compare operands with their high-precision values; under autocast each layer casts
    # its input to a dtype that the producer does not know.
    if observers or autocasts(x.device.type):
        return None
    if not all(runs_directly(operand) for operand in operands):
        return None
    weights = [weight for layer in layers if (weight := _weight_of(layer, x)) is not None]
    config = _common_recipe(weights) if len(weights) == len(layers) else None
    if config is None:
        return None
    first = weights[0]
    grad = torch.is_grad_enabled()
    columnwise = grad and any(weight.requires_grad for weight in weights)
    state = first.state
    if grad and state is not None:
        state = state.provisional()
    context = Context("input", state, record=grad, section=first.record.section)
    plan = cast_plan(config.input, True, columnwise, x.dtype, context, x.device)
    # Fused and in turn, a gated matrix of 8192 x 14336 takes about 312 and 361 us per tensor, 276 and 307 in MXFP8; per
    # row it would take 443 and 380, in NVFP4 542 and 427.
    if plan is None or not plan.gains_by_fusing(x.device):
        return None
    read_by = ReadBy(tuple(weight.record for weight in weights), config.input)
    return Readers(plan, context, read_by)


def modules_of(who: str, given: Into, name: str = "into") -> list[nn.Module]:
    """Return one or several layers, which were given as ``name``, as a list; raise TypeError for anything else."""
    if isinstance(given, nn.Module) and not isinstance(given, nn.ModuleList):
        return [given]
    what, advice = f"linear layers as {name}", "pass modules"
    layers = require_items(who, what, given, advice)
    for layer in layers:
        if not isinstance(layer, nn.Module):
            raise wrong(who, what, layer, advice)
    return layers


def _weight_of(layer: nn.Module, x: Tensor) -> Weight | None:
    """Return a layer's weight if its input may be quantized, or None: something before the product reads the input."""
    if not isinstance(layer, nn.Linear) or not runs_linear(layer) or _is_watched(layer):
        return None
    weight: object = layer._parameters.get("weight")
    if not isinstance(weight, WEIGHTS) or weight.config is None:
        return None
    alike = weight.dtype == x.dtype and weight.device == x.device
    return weight if alike and weight.shape[-1] == x.shape[-1] else None


def _is_watched(layer: nn.Module) -> bool:
    """Return whether hooks see a layer's input in high precision; reads torch's private hook tables."""
    return any(
        (
            # Public methods add hooks, none lists them.
            layer._forward_pre_hooks,
            layer._forward_hooks,
            modules._global_forward_pre_hooks,
            modules._global_forward_hooks,
        )
    )


def _scale_alike(weights: list[Weight]) -> bool:
    """Return whether layers have equal delayed scales of their input, and round it alike."""
    layers = [weight.record.layer for weight in weights]
    if weights[0].recipe.input.stochastic or not all(
        isinstance(layer, LayerState) for layer in layers
    ):
        return False
    first, *others = [
        (layer.lineage, layer.slots) for layer in layers if isinstance(layer, LayerState)
    ]
    return first[0] is not None and all(other == first for other in others)


def _common_recipe(weights: list[Weight]) -> HybridConfig | None:
    """Return the recipe by which all layers quantize their input, or None."""
    config = weights[0].recipe
    if len(weights) > 1 and not config.input.repeatable and not _scale_alike(weights):
        return None
    same = all(weight.recipe.input == config.input for weight in weights)
    keeps = any(weight.recipe.save_original_input for weight in weights)
    return config if same and not keeps else None
