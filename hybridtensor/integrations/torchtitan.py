"""torchtitan: a converter of model configs, and specs whose models convert and advance themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from hybridtensor.arguments import require_kind, reusable
from hybridtensor.convert import Options, quantize_
from hybridtensor.mesh import set_mesh_
from hybridtensor.selection import Recipe
from hybridtensor.state.layer import LayerState
from hybridtensor.state.step import step_after
from hybridtensor.state.training import layer_states

if TYPE_CHECKING:
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.distributed import ParallelDims


class TitanLayerState(LayerState, Module):
    """A layer's state that follows torchtitan's Module protocol, which its models are checked for."""


class HybridConverter(ModelConfigConverter):
    """Quantize a model when it is built: one of the ``converters`` of a model registry.

    ::

        spec = advancing(model_registry("8B", converters=[HybridConverter.Config(recipe="nvfp4")]))

    Args:
        config: The recipe as a name or spec, and ``keep_bf16`` of ``quantize_``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """What ``HybridConverter`` needs to know."""

        recipe: str = "fp8"
        keep_bf16: list[str] = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return a config of the same fields that builds a quantized model."""
        kind, recipe = type(model_config), self.config

        class Converted(kind):  # type: ignore[misc, valid-type]
            def build(self, **kwargs: object) -> nn.Module:
                model = kind.build(self, **kwargs)
                return _convert(model, recipe.recipe, keep_bf16=recipe.keep_bf16)

        given = (known.name for known in dataclasses.fields(model_config) if known.init)
        return Converted(**{name: getattr(model_config, name) for name in given})


def quantized(spec: ModelSpec, recipe: Recipe, **options: Unpack[Options]) -> ModelSpec:
    """Return ``spec`` with models that are quantized before they are parallelized, and advance.

    ::

        spec = quantized(model_registry("8B"), ht.recipes.nvfp4(seed=1))

    Args:
        spec: What a model registry returns.
        recipe: As for ``quantize_``; any kind.
        options: More arguments of ``quantize_``.

    Raises:
        TypeError: If ``spec`` is none.
    """
    require_kind("quantized", "a ModelSpec", spec, ModelSpec)
    parallelize: Callable[..., nn.Module] = spec.parallelize_fn
    options = reusable(options)

    def convert_and_parallelize(model: nn.Module, **arguments: object) -> nn.Module:
        return parallelize(_convert(model, recipe, **options), **arguments)

    return advancing(dataclasses.replace(spec, parallelize_fn=convert_and_parallelize))


def advancing(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with optimizers that advance the state of its models after each step.

    ::

        converter = HybridConverter.Config(recipe="fp8")
        spec = advancing(model_registry("8B", converters=[converter]))

    Args:
        spec: What a model registry returns, with a ``HybridConverter`` among its converters.

    Raises:
        TypeError: If ``spec`` is none.
        NotImplementedError: When training begins: if a recipe with state is to train experts that
            are spread over ranks.
    """
    require_kind("advancing", "a ModelSpec", spec, ModelSpec)
    build: Callable[..., None] | None = spec.post_optimizer_build_fn

    def build_and_advance(
        optimizers: OptimizersContainer, parts: list[nn.Module], parallel_dims: ParallelDims
    ) -> None:
        if build is not None:
            build(optimizers, parts, parallel_dims)
        for part in parts:
            if layer_states(part):
                _name_ranks(part, parallel_dims)
        step_after(optimizers, nn.ModuleList(parts))

    return dataclasses.replace(spec, post_optimizer_build_fn=build_and_advance)


def _convert(model: nn.Module, recipe: Recipe, **options: Unpack[Options]) -> nn.Module:
    """Quantize a model, and have its state be modules as torchtitan's are."""
    for state in layer_states(quantize_(model, recipe, **options)):
        # The class of this very object: the layer's weight and its forward refer to it.
        state.__class__ = TitanLayerState
    return model


def _name_ranks(part: nn.Module, parallel_dims: ParallelDims) -> None:
    """Say which ranks train a part of the model, and what each has of it."""
    if parallel_dims.ep_enabled:
        raise NotImplementedError(
            "advancing: a recipe without state is required for expert parallel models, got one with; "
            "use fp8, fp8_rowwise, fp8_block or mxfp8"
        )
    folded = parallel_dims.spmd_backend == "partial_dtensor"
    batch = ("dp_replicate", "fsdp") if folded else ("dp_replicate", "dp_shard", "cp")
    mesh = parallel_dims.get_activated_mesh([*batch, "tp"])
    names = tuple(name for name in mesh.mesh_dim_names if name not in ("cp", "tp"))
    set_mesh_(part, mesh, dp=names)
