"""Drop-in replacements of torch's parallel styles, which gather quantized bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from hybridtensor.distributed.sequence.activations import (
    gathered_input,
    scattered_output,
)
from hybridtensor.dtensor import name_of, placement_along
from hybridtensor.state.contract import require_contract
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.op_table import Args, Kwargs


class ColwiseParallel(torch_styles.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel`` whose input is quantized on its shard.

    ::

        plan = {"blocks.0": ht.distributed.ColwiseParallel(input_layouts=Shard(0))}
        parallelize_module(model, mesh["tp"], plan)

    With ``input_layouts=Shard(dim)`` of a dimension of tokens, ranks send the bytes of the face that each phase needs
    instead of values: the rowwise one in forward, the columnwise one in backward, for which only the shard's is saved.
    What a ``PrepareModuleInput`` gathered is taken as it is. Where a recipe's scale blocks do not fit the shards,
    values are gathered as torch does; ``explain`` says so.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mark(module, self, device_mesh)
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_input_fn(
        input_layouts: tuple[Placement, ...],
        desired_input_layouts: tuple[Placement, ...],
        mod: nn.Module,
        inputs: Args,
        device_mesh: DeviceMesh,
    ) -> object:
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

    ::

        once = ht.distributed.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        plan = {"mlp": once, "mlp.gate_proj": ht.distributed.ColwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)

    They must have the style ``ColwiseParallel`` of this module, and one quantizer of their inputs;
    otherwise, or where its blocks do not fit the shards, values are gathered as torch does, and
    ``explain`` says so. Nothing but those layers may read the input.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mark(module, self, device_mesh)
        module.register_forward_pre_hook(
            _Preparation(self, device_mesh, _names(module)), with_kwargs=True
        )
        return module


class _Preparation:
    """The forward pre-hook of a module whose inputs are gathered."""

    def __init__(self, style: PrepareModuleInput, mesh: DeviceMesh, names: Sequence[str]) -> None:
        self.style, self.mesh, self.names = style, mesh, names

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
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
        return column_parallel([module.get_submodule(name) for name in self.names], self.mesh)

    def _prepared(
        self, layers: list[nn.Linear], x: object, layout: Placement | None, wanted: Placement | None
    ) -> object:
        if layout is not None and isinstance(wanted, Replicate):
            gathered = gathered_input(x, layers, layout, self.mesh)
            if isinstance(gathered, DTensor) and self.style.use_local_output:
                return gathered.to_local()
            if gathered is not None:
                return gathered
        # Private in torch: what its own hook calls for each input.
        return self.style._prepare_input_arg(x, self.mesh, layout, wanted)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel`` whose output's gradient is quantized on its shard.

    ::

        plan = {"blocks.1": ht.distributed.RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(model, mesh["tp"], plan)

    With ``output_layouts=Shard(dim)`` of a dimension of tokens, backward gathers bytes where both
    faces of the gradient come from one payload: one scale per tensor, or square blocks. Elsewhere
    two faces are as many bytes as values, which are gathered as torch does; so they are for a layer
    with a bias, whose gradient is a sum of values. ``explain`` says so.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mark(module, self, device_mesh)
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement, ...],
        use_local_output: bool,
        mod: nn.Module,
        outputs: object,
        device_mesh: DeviceMesh,
    ) -> object:
        # torch's private hook, which its own ``_apply`` installs
        if isinstance(mod, nn.Linear):
            scattered = scattered_output(outputs, mod, output_layouts[0])
            if scattered is not None:
                whole = DTensor.from_local(scattered, device_mesh, output_layouts, run_check=False)
                return scattered if use_local_output else whole
        return torch_styles.RowwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )


STYLES = "_hybridtensor_styles"


def mark(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Let ``explain`` find a module's style and mesh; raise RuntimeError on all ranks where recipes differ."""
    require_contract(
        f"{type(style).__name__} of {type(module).__name__}", module, mesh.get_all_groups()
    )
    module.__dict__[STYLES] = (*module.__dict__.get(STYLES, ()), (style, mesh))


def _names(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if name and isinstance(layer, nn.Linear)]


def column_parallel(modules: Iterable[nn.Module], mesh: DeviceMesh) -> list[nn.Linear]:
    """Return the linear layers whose out features are spread over a mesh of one dimension."""
    found: list[nn.Linear] = []
    for layer in modules:
        if isinstance(layer, nn.Linear):
            weight = layer._parameters.get("weight")
            if isinstance(weight, DTensor) and placement_along(weight, name_of(mesh)) == Shard(0):
                found.append(layer)
    return found
