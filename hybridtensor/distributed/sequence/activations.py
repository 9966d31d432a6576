"""Inputs of layers: gathered quantized, or in high precision where scale blocks do not fit shards."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hybridtensor.distributed.sequence.gather import GatherInput, ScatterOutput, SequenceGather
from hybridtensor.distributed.sequence.layout import SequenceLayout
from hybridtensor.distributed.sequence.plan import gradient_plan, input_plan
from hybridtensor.dtensor import local, mesh_along, name_of
from hybridtensor.linear.layer_forward import recipe_of, runs_linear
from hybridtensor.linear.operands import WEIGHTS
from hybridtensor.ops.library import autocasts, left_whole
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context
from hybridtensor.subclasses import HybridTensor


def config_of(layers: Sequence[nn.Linear]) -> HybridConfig | None:
    """Return the recipe by which the inputs of all layers are quantized, or None if they differ."""
    found = None
    for layer in layers:
        weight = layer._parameters.get("weight")
        part = None if weight is None else local(weight)
        if not isinstance(part, WEIGHTS) or part.config is None:
            return None
        if found is not None and found.input != part.config.input:
            return None
        found = part.config
    return found


def takes_faces(layer: nn.Linear) -> bool:
    """Return whether the product is the layer's last operation (no bias), so that its gradient may be quantized."""
    return layer.bias is None and runs_linear(layer)


def _require_common_scales(layer: nn.Linear, mesh: DeviceMesh) -> None:
    """Raise ValueError where ranks that exchange quantized data have separate delayed scales."""
    recipe = None if torch.compiler.is_dynamo_compiling() else recipe_of(layer)
    if recipe is None or recipe.state.encode_scale is None:
        return
    groups = recipe.state.ranks.groups
    # by their ranks: DTensor may bring another mesh of the same ranks, which it met before
    if None in groups or _ranks_of(mesh.get_group()) in map(_ranks_of, groups):
        return
    raise ValueError(
        f"linear: layer {recipe.state.name} has delayed scales that differ between tensor-parallel ranks; "
        "call hybridtensor.set_mesh_ with the tp dimension"
    )


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks


def _is_even(x: DTensor) -> bool:
    """Return whether all ranks have equally many tokens, as a gather of bytes requires."""
    (layout,) = x.placements
    return not isinstance(layout, Shard) or x.shape[layout.dim] % x.device_mesh.size() == 0


def tokens_of(x: Tensor, layout: Placement | None) -> int | None:
    """Return the number of a sequence's tokens on this rank, or None if tokens are not sharded."""
    if not isinstance(layout, Shard) or not x.is_floating_point():
        return None
    dim = layout.dim % x.dim()
    return x.shape[dim] if dim < min(2, x.dim() - 1) else None


def gathered_input(
    x: object, layers: Sequence[nn.Linear], layout: Placement, mesh: DeviceMesh
) -> HybridTensor | DTensor | None:
    """Return the whole input, quantized or in high precision; None if it has no tokens or the layers need other
    faces."""
    if isinstance(x, DTensor):
        if x.placements != (layout,) or not _is_even(x):
            return None
        x = x.to_local()
    if not isinstance(x, Tensor) or not isinstance(layout, Shard):
        return None
    if config_of(layers) is None or tokens_of(x, layout) is None:
        return None
    _require_common_scales(layers[0], mesh)
    needed = torch.is_grad_enabled() and any(layer.weight.requires_grad for layer in layers)
    weight: Any = layers[0].weight
    dim, several = layout.dim % x.dim(), len(layers) > 1
    gathered: HybridTensor | DTensor = _gather_input(x, weight, dim, name_of(mesh), several, needed)
    return gathered


# Dynamo cannot look into a weight that a graph makes; what traces after it can


@left_whole
def _gather_input(
    x: Tensor, weight: DTensor, dim: int, name: str | None, several: bool, columnwise: bool
) -> HybridTensor | DTensor:
    part: Any = local(weight)  # the layer's own FSDP2 gathers it later
    mesh, quantizer = mesh_along(weight, name), part.config.input
    if autocasts(x.device.type):  # as the layer would cast what was gathered
        x = x.to(torch.get_autocast_dtype(x.device.type))
    plan = input_plan(quantizer, x.shape[dim], mesh.size(), several)
    if plan.reason:
        _tell_once(part.layer_name, "input", plan.reason)
        values = DTensor.from_local(x, mesh, [Shard(dim)], run_check=False)
        return values.redistribute(placements=[Replicate()])
    state, recording = part.state, torch.is_grad_enabled()
    if recording and state is not None:
        state = state.provisional()
    context = Context("input", state, record=recording)
    layout, rank = _layout(mesh, dim), mesh.get_local_rank()
    gathering = SequenceGather(quantizer, context, plan, layout, dim, columnwise, rank)
    gathered: HybridTensor = GatherInput.apply(x, gathering)
    return gathered


def scattered_output(y: object, layer: nn.Linear, layout: Placement) -> Tensor | None:
    """Reduce-scatter an output with a quantized gradient gather; None without tokens or if values are needed."""
    if not isinstance(y, DTensor) or config_of([layer]) is None or not takes_faces(layer):
        return None
    count = tokens_of(y, layout)
    if count is None or not isinstance(layout, Shard) or count % y.device_mesh.size():
        return None
    _require_common_scales(layer, y.device_mesh)
    weight: Any = layer.weight
    scattered: Tensor = _scatter_output(y, weight, layout.dim % y.dim(), name_of(y.device_mesh))
    return scattered


@left_whole
def _scatter_output(y: DTensor, weight: DTensor, dim: int, name: str | None) -> Tensor:
    part: Any = local(weight)
    mesh = mesh_along(weight, name)
    plan = gradient_plan(part.config, y.shape[dim] // mesh.size(), mesh.size())
    if plan.reason:
        _tell_once(part.layer_name, "grad_output", plan.reason)
        return y.redistribute(placements=[Shard(dim)]).to_local()
    values = y.to_local(grad_placements=[Replicate()])
    context, rank = Context("grad_output", part.state), mesh.get_local_rank()
    layout = _layout(mesh, dim)
    gathering = SequenceGather(part.config.grad_output, context, plan, layout, dim, True, rank)
    scattered: Tensor = ScatterOutput.apply(values, gathering)
    return scattered


@functools.cache
def _tell_once(layer: str, role: str, reason: str) -> None:
    """Log why tokens are gathered in high precision, at the first call."""
    _logger.info("layer %s, %s: values are gathered, not bytes: %s", layer, role, reason)


_logger = logging.getLogger("hybridtensor")


def _layout(mesh: DeviceMesh, dim: int) -> SequenceLayout:
    return SequenceLayout(mesh.get_group().group_name, mesh.size(), dim > 0)
