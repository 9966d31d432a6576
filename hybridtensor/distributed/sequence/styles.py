"""Drop-in replacements of torch's parallel styles, which gather quantized bytes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from hybridtensor.distributed.sequence.gather import Gathering, GatherInput, ScatterOutput
from hybridtensor.distributed.sequence.layout import SequenceLayout
from hybridtensor.distributed.sequence.plan import SequencePlan, sequence_plan
from hybridtensor.dtensor import local
from hybridtensor.linear.layer_forward import recipe_of, runs_linear
from hybridtensor.linear.operands import WEIGHTS
from hybridtensor.ops.library import autocasts
from hybridtensor.quantizers import Quantizer
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context
from hybridtensor.subclasses import HybridTensor


class ColwiseParallel(torch_styles.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel`` whose input is quantized on its shard.

    With ``input_layouts=Shard(dim)`` of a dimension of tokens, ranks send the bytes of the face that
    each phase needs instead of values: the rowwise one in forward, the columnwise one in backward,
    for which only the shard's is saved. What a ``PrepareModuleInput`` gathered is taken as it is.
    Where a recipe's scale blocks do not fit the shards, values are gathered as torch does;
    ``explain`` says so.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mark(module, self)
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_input_fn(
        input_layouts: tuple[Placement, ...],
        desired_input_layouts: tuple[Placement, ...],
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> Any:
        # torch's private hook, which its own ``_apply`` installs
        x = inputs[0]
        if isinstance(x, HybridTensor):
            return x
        if isinstance(mod, nn.Linear):
            gathered = gathered_input(x, [mod], input_layouts[0], device_mesh)
            if gathered is not None:
                return gathered
        return torch_styles.ColwiseParallel._prepare_input_fn(
            input_layouts, desired_input_layouts, mod, inputs, device_mesh
        )


class PrepareModuleInput(torch_styles.PrepareModuleInput):
    """``torch.distributed.tensor.parallel.PrepareModuleInput`` that quantizes an input once, on its
    shard, for all column-parallel layers of the module.

    They must have the style ``ColwiseParallel`` of this module, and one quantizer of their inputs;
    otherwise, or where its blocks do not fit the shards, values are gathered as torch does, and
    ``explain`` says so. Nothing but those layers may read the input.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mark(module, self)
        module.register_forward_pre_hook(
            _Preparation(self, device_mesh, _names(module)), with_kwargs=True
        )
        return module


class _Preparation:
    """The hook of a module whose inputs are gathered.

    Args:
        style: Says how.
        mesh: Where.
        names: Of the linear layers in the module.
    """

    def __init__(self, style: PrepareModuleInput, mesh: DeviceMesh, names: Sequence[str]) -> None:
        self.style, self.mesh, self.names = style, mesh, names

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the inputs."""
        style = self.style
        layouts, desired = style.input_layouts or (), style.desired_input_layouts or ()
        if layouts and len(args) != len(layouts):
            raise ValueError(
                f"PrepareModuleInput: as many inputs as layouts, {len(layouts)}, are required, got {len(args)}"
            )
        layers = self.layers(module)
        pairs = zip(layouts, desired, strict=True) if layouts else [(None, None)] * len(args)
        made = [
            self._prepared(layers, x, layout, wanted)
            for x, (layout, wanted) in zip(args, pairs, strict=True)
        ]
        named = {
            name: self._prepared(
                layers,
                x,
                style.input_kwarg_layouts.get(name),
                style.desired_input_kwarg_layouts.get(name),
            )
            for name, x in kwargs.items()
        }
        return tuple(made), named

    def layers(self, module: nn.Module) -> list[nn.Linear]:
        """Return the column-parallel layers of the module."""
        found: list[Any] = [module.get_submodule(name) for name in self.names]
        return [layer for layer in found if _is_column_parallel(layer)]

    def _prepared(
        self, layers: list[nn.Linear], x: Any, layout: Placement | None, wanted: Placement | None
    ) -> Any:
        if layout is not None and isinstance(wanted, Replicate):
            gathered = gathered_input(x, layers, layout, self.mesh)
            if isinstance(gathered, DTensor) and self.style.use_local_output:
                return gathered.to_local()
            if gathered is not None:
                return gathered
        return self.style._prepare_input_arg(x, self.mesh, layout, wanted)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel`` whose output's gradient is quantized on
    its shard.

    With ``output_layouts=Shard(dim)`` of a dimension of tokens, backward gathers bytes where both
    faces of the gradient come from one payload: one scale per tensor, or square blocks. Elsewhere
    two faces are as many bytes as values, which are gathered as torch does; so they are for a layer
    with a bias, whose gradient is a sum of values. ``explain`` says so.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mark(module, self)
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement, ...],
        use_local_output: bool,
        mod: nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        # torch's private hook, which its own ``_apply`` installs
        if isinstance(mod, nn.Linear):
            scattered = scattered_output(outputs, mod, output_layouts[0])
            if scattered is not None:
                whole = DTensor.from_local(scattered, device_mesh, output_layouts, run_check=False)
                return scattered if use_local_output else whole
        return torch_styles.RowwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )


_STYLE = "_hybridtensor_styles"


def mark(module: nn.Module, style: ParallelStyle) -> None:
    """Have ``explain`` find the style of a module."""
    module.__dict__[_STYLE] = (*module.__dict__.get(_STYLE, ()), style)


class Travels(NamedTuple):
    """What of an activation ranks send.

    Attributes:
        tensor: ``"input"`` or ``"grad_output"``.
        forward: What travels before forward, or "" for nothing.
        backward: What travels in backward.
        reason: Why values travel; or how many tokens of a sequence a rank needs a multiple of, for
            bytes to travel.
    """

    tensor: str
    forward: str
    backward: str
    reason: str


def travels(module: nn.Module) -> list[Travels]:
    """Return in words what the styles of a module send."""
    found = []
    for style in module.__dict__.get(_STYLE, ()):
        if isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear):
            if isinstance(style.output_layouts[0], Shard):
                found.append(_of_gradient(module))
        elif isinstance(style, ColwiseParallel) and isinstance(module, nn.Linear):
            if isinstance(style.input_layouts[0], Shard):
                found.append(_of_input([module]))
        elif isinstance(style, PrepareModuleInput) and _gathers(style):
            layers = [
                m for m in module.modules() if isinstance(m, nn.Linear) and _is_column_parallel(m)
            ]
            found.append(_of_input(layers))
    return found


def _gathers(style: PrepareModuleInput) -> bool:
    """Return whether a style gathers anything."""
    given = [*(style.input_layouts or ()), *style.input_kwarg_layouts.values()]
    wanted = [*(style.desired_input_layouts or ()), *style.desired_input_kwarg_layouts.values()]
    return any(
        isinstance(a, Shard) and isinstance(b, Replicate)
        for a, b in zip(given, wanted, strict=True)
    )


_ANY = 1 << 20  # tokens that no block cuts


def _of_input(layers: list[nn.Linear]) -> Travels:
    config = config_of(layers)
    if config is None:
        return Travels(
            "input", "values", "", "its layers quantize it by different recipes, or not at all"
        )
    plan = input_plan(config.input, _ANY, 2, len(layers) > 1)
    if plan.reason:
        return Travels("input", "values", "", plan.reason)
    backward = {
        "bytes": f"columnwise, {config.input.columnwise_format}", "values": "values", "quantized": "values",
    }.get(plan.column, "")  # fmt: skip
    forward = f"rowwise, {config.input.rowwise_format}"
    return Travels("input", forward, backward, plan.column_reason or _multiple(config.input))


def _of_gradient(layer: nn.Linear) -> Travels:
    config = config_of([layer])
    if config is None or not _takes_faces(layer):
        why = (
            "the bias needs a sum of values"
            if layer.bias is not None
            else "its forward is not Linear's"
        )
        why = "it is not quantized" if config is None else why
        return Travels("grad_output", "", "values", why)
    plan = gradient_plan(config, _ANY, 2)
    sent = "values" if plan.reason else f"rowwise, {config.grad_output.rowwise_format}"
    return Travels("grad_output", "", sent, plan.reason or _multiple(config.grad_output))


def _multiple(quantizer: Quantizer) -> str:
    """Return the number of tokens that a rank needs a multiple of, in words; or ""."""
    extents = [quantizer.rowwise_format.block[0], quantizer.columnwise_format.block[1]]
    most = max(extent or 1 for extent in extents)
    return f"where a rank has a multiple of {most} tokens of a sequence" if most > 1 else ""


def _names(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if name and isinstance(layer, nn.Linear)]


def _is_column_parallel(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return isinstance(weight, DTensor) and Shard(0) in weight.placements


def config_of(layers: Sequence[nn.Linear]) -> HybridConfig | None:
    """Return the recipe by which the inputs of all layers are quantized, or None if they differ."""
    found = None
    for layer in layers:
        weight = layer._parameters.get("weight")
        part: Any = None if weight is None else local(weight)
        if not isinstance(part, WEIGHTS) or part.config is None:
            return None
        if found is not None and found.input != part.config.input:
            return None
        found = part.config
    return found


def _takes_faces(layer: nn.Linear) -> bool:
    """Return whether the product is the last that a layer does, so that its gradient may be
    quantized.
    """
    return layer.bias is None and runs_linear(layer)


def _require_common_scales(layer: nn.Linear, mesh: DeviceMesh) -> None:
    """Raise ValueError where ranks that send each other bytes have delayed scales of their own."""
    recipe = None if torch.compiler.is_compiling() else recipe_of(layer)
    if recipe is None or recipe.state.encode_scale is None:
        return
    groups = recipe.state.ranks.groups
    if None in groups or mesh.get_group() in groups:
        return
    raise ValueError(
        f"linear: layer {recipe.state.name} has delayed scales, which tensor-parallel ranks must have "
        "in common, got ranks without them; call hybridtensor.set_mesh_ with the tp dimension"
    )


def _is_even(x: DTensor) -> bool:
    """Return whether all ranks have as many tokens: what a gather of bytes takes."""
    (layout,) = x.placements
    return not isinstance(layout, Shard) or x.shape[layout.dim] % x.device_mesh.size() == 0


def tokens_of(x: Tensor, layout: Placement | None) -> int | None:
    """Return how many tokens of a sequence this rank has, or None if no tokens are split."""
    if not isinstance(layout, Shard) or not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    dim = layout.dim % x.dim()
    return x.shape[dim] if dim < min(2, x.dim() - 1) else None


def gathered_input(
    x: Any, layers: Sequence[nn.Linear], layout: Placement, mesh: DeviceMesh
) -> HybridTensor | DTensor | None:
    """Return the whole of an input: quantized, or in values where scale blocks do not fit the
    shards; None if it is none of tokens, or the layers need other faces.

    Args:
        x: This rank's tokens, or a DTensor of all.
        layers: What reads it.
        layout: How it is split.
        mesh: Over which it is.
    """
    if isinstance(x, DTensor):
        if x.placements != (layout,) or not _is_even(x):
            return None
        x = x.to_local()
    if config_of(layers) is None or tokens_of(x, layout) is None or not isinstance(layout, Shard):
        return None
    _require_common_scales(layers[0], mesh)
    needed = torch.is_grad_enabled() and any(layer.weight.requires_grad for layer in layers)
    weight: Any = layers[0].weight
    dim, several = layout.dim % x.dim(), len(layers) > 1
    gathered: HybridTensor | DTensor = _gather_input(x, weight, dim, several, needed)
    return gathered


# Dynamo cannot look into a weight that a graph makes; what traces after it can
@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def _gather_input(
    x: Tensor, weight: DTensor, dim: int, several: bool, columnwise: bool
) -> HybridTensor | DTensor:
    part: Any = local(weight)
    mesh, quantizer = weight.device_mesh, part.config.input
    if autocasts(x.device.type):  # as the layer would cast what was gathered
        x = x.to(torch.get_autocast_dtype(x.device.type))
    plan = input_plan(quantizer, x.shape[dim], mesh.size(), several)
    if plan.reason:
        _tell_once(part, "input", plan.reason)
        values = DTensor.from_local(x, mesh, [Shard(dim)], run_check=False)
        return values.redistribute(placements=[Replicate()])
    context = Context("input", part.state, record=torch.is_grad_enabled())
    layout, rank = _layout(x, mesh, dim), mesh.get_local_rank()
    gathering = Gathering(quantizer, context, plan, layout, dim, columnwise, rank)
    return GatherInput.apply(x, gathering)  # type: ignore[no-any-return, no-untyped-call]


def input_plan(quantizer: Quantizer, tokens: int, num_ranks: int, several: bool) -> SequencePlan:
    """Return the plan of an input, which ``several`` layers read, or one."""
    plan = sequence_plan(quantizer, tokens, num_ranks)
    if plan.reason or not several or quantizer.repeatable:
        return plan
    return dataclasses.replace(plan, reason="each layer has its own scales, or draws of its own")


def scattered_output(y: Any, layer: nn.Linear, layout: Placement) -> Tensor | None:
    """Return this rank's tokens of a sum over ranks, whose gradient is gathered quantized where one
    payload has both faces; None if they are no tokens, or the layer needs the gradient's values.
    """
    if not isinstance(y, DTensor) or config_of([layer]) is None or not _takes_faces(layer):
        return None
    count = tokens_of(y, layout)
    if count is None or not isinstance(layout, Shard) or count % y.device_mesh.size():
        return None
    _require_common_scales(layer, y.device_mesh)
    weight: Any = layer.weight
    scattered: Tensor = _scatter_output(y, weight, layout.dim % y.dim())
    return scattered


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def _scatter_output(y: DTensor, weight: DTensor, dim: int) -> Tensor:
    part: Any = local(weight)
    mesh = weight.device_mesh
    plan = gradient_plan(part.config, y.shape[dim] // mesh.size(), mesh.size())
    if plan.reason:
        _tell_once(part, "grad_output", plan.reason)
        return y.redistribute(placements=[Shard(dim)]).to_local()
    values = y.to_local(grad_placements=[Replicate()])
    context, rank = Context("grad_output", part.state), mesh.get_local_rank()
    layout = _layout(values, mesh, dim)
    gathering = Gathering(part.config.grad_output, context, plan, layout, dim, True, rank)
    return ScatterOutput.apply(values, gathering)  # type: ignore[no-any-return, no-untyped-call]


def gradient_plan(config: HybridConfig, tokens: int, num_ranks: int) -> SequencePlan:
    """Return the plan of a gradient, of which backward needs both faces at once."""
    plan = sequence_plan(config.grad_output, tokens, num_ranks)
    if plan.reason or plan.column in ("transposed", "rowwise"):
        return plan
    return dataclasses.replace(plan, reason="two faces are as many bytes as values")


def _tell_once(weight: Any, role: str, reason: str) -> None:
    """Log why values are gathered, at the first call."""
    name = "" if weight.state is None else weight.state.name
    if (name, role, reason) not in _told:
        _told.add((name, role, reason))
        _logger.info("layer %s, %s: values are gathered, not bytes: %s", name, role, reason)


_told: set[tuple[str, str, str]] = set()
_logger = logging.getLogger("hybridtensor")


def _layout(x: Tensor, mesh: DeviceMesh, dim: int) -> SequenceLayout:
    return SequenceLayout(mesh.get_group().group_name, mesh.size(), dim > 0)
