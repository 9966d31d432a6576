"""What of a model a recipe can be for: weights of linear layers, and stacks of experts' weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrize

from hybridtensor.distributed.fsdp.hooks import part_of
from hybridtensor.distributed.fsdp.torch_compat import params_of
from hybridtensor.linear.kinds import is_linear, stores_transposed
from hybridtensor.linear.layer_forward import require_own_forward, set_recipe
from hybridtensor.linear.stack_forward import recipe_at, set_stack_recipe
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import STATE, LayerState
from hybridtensor.subclasses import is_converted
from hybridtensor.subclasses.owners import LayerRecipe, is_of_another, is_shared, settle

SKIPPED_NAMES = {
    "lm_head": "the output head: its error goes straight into the logits",
    "router": "a router: small, and its rounding flips which expert is chosen",
    "gate": "a router's gate: narrower than its input, and its rounding flips which expert is chosen",
    "shared_expert_gate": "the gate of a shared expert: one number per token, which scales all that it returns",
}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode; at the end each module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # Not by ``train()``, which would set all submodules alike.
        for module, training in modes.items():
            module.training = training


class Layer(NamedTuple):
    """A linear layer, or experts with one stack of weights; ``transposed`` if stored ``[in, out]`` or ``[E, in,
    out]``, ``is_head`` if its model says that it is the output head."""

    name: str
    module: nn.Module
    parameter: str = "weight"
    transposed: bool = False
    is_head: bool = False

    @property
    def weight(self) -> Tensor:
        """The parameter or tensor at the weight's name, without updating a parametrization."""
        if not parametrize.is_parametrized(self.module, self.parameter):
            plain: Tensor = getattr(self.module, self.parameter)
            return plain
        # In training mode ``spectral_norm`` takes a step of its power iteration whenever the weight is read.
        with evaluating(self.module.get_submodule(f"parametrizations.{self.parameter}")):
            computed: Tensor = getattr(self.module, self.parameter)
            return computed

    @property
    def is_stack(self) -> bool:
        """Whether the weight is a stack of experts, multiplied by tokens sorted by expert."""
        return not is_linear(self.module)

    @property
    def kind(self) -> str:
        """``module_type`` of a ``QuantizerRole``."""
        return "grouped_linear" if self.is_stack else "linear"

    @property
    def parameter_name(self) -> str:
        """Fully qualified name of the weight."""
        if self.is_stack:
            return self.name
        return f"{self.name}.{self.parameter}" if self.name else self.parameter

    @property
    def state_name(self) -> str:
        """Name of the submodule that holds the quantizer state."""
        return f"{self.parameter}_{STATE}" if self.is_stack else STATE

    @property
    def recipe(self) -> LayerRecipe | None:
        """The weight's recipe, and the state that it goes by: the layer's own, or that of another module which has the
        weight, too. None before ``quantize_``."""
        known, part = recipe_at(self.module, self.parameter), part_of(self.weight)
        if not is_converted(part) or part.config is None:
            return known
        if known is None:
            if not self.is_stack or is_of_no_layer(part):
                return None
            # A hook, such as pruning, renamed it since
            state = part.layer if isinstance(part.layer, LayerState) else LayerState(self.name)
            return LayerRecipe(part.config, state)
        if isinstance(part.layer, LayerState) and is_shared(part.record, self.module):
            return known._replace(state=part.layer)
        return known

    @property
    def state(self) -> LayerState | None:
        """The state that the layer goes on with where it gets a recipe; None before ``quantize_``."""
        recipe, part = self.recipe, part_of(self.weight)
        if recipe_at(self.module, self.parameter) is not None or not is_converted(part):
            return None if recipe is None else recipe.state
        state = part.layer
        if not isinstance(state, LayerState) or is_of_another(part.record, self.module):
            return None  # a copy has that of the other layer, which keeps it
        return state

    def set_recipe(self, config: HybridConfig, state: LayerState) -> None:
        """Make the module apply a recipe to any tensor at the weight's name."""
        if self.is_stack:
            set_stack_recipe(self.module, self.parameter, config, state)
        else:
            set_recipe(self.module, config, state)

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return out and in features of a weight, or of each expert."""
        rows, columns = shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    def parallel_dims(self) -> list[int]:
        """Return the mesh dimensions of a weight that is a DTensor, without those over which FSDP2 shards it."""
        if not isinstance(self.weight, DTensor):
            return []
        place = (self.module, self.parameter)
        held = [sharded.mesh for sharded in params_of(self.module) if place in sharded.places]
        mesh = self.weight.device_mesh
        names = mesh.mesh_dim_names or ()
        of_fsdp = {name for other in held for name in other.mesh_dim_names or ()}
        if held and not of_fsdp:  # a mesh without names is all of it
            return []
        return [dim for dim in range(mesh.ndim) if not names or names[dim] not in of_fsdp]

    def why_skipped(self) -> str | None:
        """Return why ``quantize_`` skips this layer by default, or None."""
        # torch's class of ``MultiheadAttention.out_proj``, and of nothing else.
        if type(self.module) is nn.modules.linear.NonDynamicallyQuantizableLinear:
            return "nn.MultiheadAttention computes with its weight below autograd"
        if self.is_stack and not self._is_of_experts():
            return f"{type(self.module).__name__} has no num_experts that is its first extent"
        return SKIPPED_NAMES.get(self._kind_of_name())

    def _is_of_experts(self) -> bool:
        """Return whether the first extent of a weight is its module's number of experts: all, or those of the rank."""
        weight, count = self.weight, getattr(self.module, "num_experts", None)
        if not isinstance(count, int) or min(weight.shape[1:]) <= 1:
            return False
        if count == weight.shape[0] or not isinstance(weight, DTensor):
            return count == weight.shape[0]
        dims = [dim for dim in self.parallel_dims() if weight.placements[dim] == Shard(0)]
        return count * math.prod(map(weight.device_mesh.size, dims)) == weight.shape[0]

    def _kind_of_name(self) -> str:
        """Return the key of ``SKIPPED_NAMES`` that applies to a layer, or ""."""
        *outer, name = self.name.split(".")
        # Of routers that are modules of their own, the layers inside have any name
        names = [name] if self.is_stack else [*outer, name]
        if self.is_head or name == "lm_head":
            return "lm_head"
        if "router" in names:
            return "router"
        if name == "shared_expert_gate":
            return name
        return "gate" if "gate" in names and not self._gates_values() else ""

    def _gates_values(self) -> bool:
        """Return whether a gate belongs to an MLP or attention; a router's is narrow, with one output per expert."""
        if nn.parameter.is_lazy(self.weight):  # whose size nobody knows: it is refused, not skipped
            return True
        outputs, inputs = self.size(tuple(self.weight.shape))
        return self.is_stack or outputs >= inputs


class AbsentLayer(NamedTuple):
    """The name of a weight whose layer is not in the model, and that layer's recipe."""

    name: str
    recipe: LayerRecipe


def is_of_no_layer(tensor: object) -> bool:
    """Return whether products with a tensor of ours stay plain, as an adapter's, whether or not its layer ran."""
    if not is_converted(tensor) or not tensor.record.is_new:
        return False
    settle(tensor.record, tensor.config)
    return tensor.is_of_no_layer


def layers_of(model: nn.Module, root: str = "") -> Iterator[Layer]:
    """Yield every layer that a recipe can be for; three-dimensional parameters of torch's own modules are not
    experts."""
    heads = _heads_of(model)
    # FSMT says that the embedding is its head, to which a layer is tied
    tied = {id(weight) for head in heads for weight in head.parameters()}
    for name, module in model.named_modules(prefix=root):
        require_own_forward(name, module)
        if is_linear(module):
            if not _has_weight(module):
                continue
            is_head = module in heads or id(module._parameters.get("weight")) in tied
            transposed = stores_transposed(module)
            yield Layer(name, module, transposed=transposed, is_head=is_head)
        elif not parametrize.type_before_parametrizations(module).__module__.startswith(
            "torch.nn."
        ):
            for parameter, weight in _tensors_of(module):
                if weight.dim() == 3 and weight.is_floating_point():
                    full = f"{name}.{parameter}" if name else parameter
                    yield Layer(full, module, parameter, _is_transposed(module, parameter, weight))


def names_without_weight(model: nn.Module) -> Iterator[str]:
    """Yield the names of linear layers that have no weight: LyCORIS and others move it to modules of their own."""
    for name, module in model.named_modules():
        if is_linear(module) and not _has_weight(module):
            yield name


def _has_weight(module: nn.Module) -> bool:
    return (
        parametrize.is_parametrized(module, "weight") or getattr(module, "weight", None) is not None
    )


def weights_of_absent_layers(model: nn.Module, layers: list[Layer]) -> Iterator[AbsentLayer]:
    """Yield the weights of a model that modules took over, and whose layers are not among its converted ``layers``."""
    converted = [layer for layer in layers if layer.recipe is not None]
    states = {layer.recipe.state for layer in converted if layer.recipe is not None}
    had = {id(part_of(layer.weight)) for layer in converted}
    for name, parameter in model.named_parameters():
        part = part_of(parameter)
        if not is_converted(part) or part.config is None or is_of_no_layer(part) or id(part) in had:
            continue  # plain, an adapter's, or in a layer, which lets it go by its own state
        if isinstance(part.layer, LayerState) and part.layer not in states:
            yield AbsentLayer(name, LayerRecipe(part.config, part.layer))


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters, and tensors that its parametrizations compute, by name."""
    for name, parameter in module._parameters.items():
        if parameter is not None and not nn.parameter.is_lazy(parameter):
            yield name, parameter
    if parametrize.is_parametrized(module):
        for name, _ in module.get_submodule("parametrizations").named_children():
            yield name, Layer(name, module, name).weight


def _heads_of(model: nn.Module) -> set[nn.Module]:
    """Return the output heads of a model and of its parts, and all modules inside of them, where they can be asked:
    models of Transformers have ``get_output_embeddings``, whatever they call the head."""
    heads = set[nn.Module]()
    for module in model.modules():
        ask = getattr(type(module), "get_output_embeddings", None)
        head = None if ask is None else ask(module)
        if isinstance(head, nn.Module):
            heads.update(head.modules())
    return heads


def _is_transposed(module: nn.Module, parameter: str, weight: Tensor) -> bool:
    """Return whether a stack is stored ``[E, in, out]``, by ``quantize_``, its module's attribute, or name and
    shape."""
    part = part_of(weight)
    state = part.layer if is_converted(part) else None
    if isinstance(state, LayerState) and state.transposed is not None:
        return state.transposed
    said = getattr(module, "is_transposed", None)
    return _by_shape(module, parameter, weight) if said is None else bool(said)


def _by_shape(module: nn.Module, parameter: str, weight: Tensor) -> bool:
    """Return whether ``hidden_size`` is where only ``[E, in, out]`` has it: first in up projections (Llama 4), last
    in down. Square matrices are stored as the module's others."""
    width, (_, rows, columns) = getattr(module, "hidden_size", None), weight.shape
    if rows == columns:
        others = [
            (name, other)
            for name, other in module._parameters.items()
            if other is not None and other.dim() == 3 and other.shape[1] != other.shape[2]
        ]
        return any(_by_shape(module, name, other) for name, other in others)
    if (rows == width) == (columns == width):
        return False
    down = "down" in parameter
    is_known = down or "up" in parameter or "gate" in parameter
    return is_known and (columns == width if down else rows == width)
