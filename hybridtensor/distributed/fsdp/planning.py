"""By which plan a parameter that FSDP2 holds is gathered, and by which layer's state."""

from __future__ import annotations

from torch import Tensor

from hybridtensor.distributed.fsdp.plan import Plan, make_plan
from hybridtensor.distributed.fsdp.stack_plan import stack_plan
from hybridtensor.distributed.fsdp.torch_compat import ShardedParam
from hybridtensor.linear.kinds import is_linear
from hybridtensor.linear.operands import WEIGHTS, layer_of
from hybridtensor.linear.stack_forward import recipe_at
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.owners import go_by


def plan_of(sharded: ShardedParam, config: HybridConfig) -> Plan:
    """Return the plan by which a weight is gathered with a recipe."""
    size, part = sharded.size, sharded.tensor
    if len(size) == 3 and isinstance(part, InterceptingTensor):
        return stack_plan(part, config, size, sharded.num_ranks, sharded.dim)
    others = [type(reader).__name__ for reader in sharded.readers if not is_linear(reader)]
    reader = others[0] if others and isinstance(sharded.tensor, MasterWeight) else ""
    return matrix_plan(part, config, size, sharded.num_ranks, sharded.dim, reader)


def go_by_its_layer(sharded: ShardedParam) -> None:
    """Let a sharded weight that came from another layer go by the state of the layer that has it now.

    Raises:
        NotImplementedError: If a factory, such as ``new_zeros``, made the parameter of a weight, and it is no layer's.
    """
    part, places = sharded.tensor, sharded.places
    if not isinstance(part, WEIGHTS):
        return
    found = [(module, recipe_at(module, name)) for module, name in places]
    for module, recipe in found:
        if recipe is not None and (part.layer is not recipe.state or part.record.is_new):
            go_by(recipe, part.record, part.config, module)
    # FSDP2 makes shards by a factory, of an adapter's parameter by a second one
    if part.record.is_new > 1 and not any(recipe for _, recipe in found):
        module, name = places[0]
        raise NotImplementedError(
            f"fully_shard: {name} of {type(module).__name__} was made of the weight of {layer_of(part.layer)} by "
            "new_zeros, new_empty or empty_like, and would be gathered as that weight, quantized; make parameters of "
            "adapters by torch.zeros or torch.empty"
        )


def matrix_plan(
    weight: Tensor,
    config: HybridConfig,
    size: tuple[int, ...],
    num_ranks: int,
    dim: int,
    reader: str = "",
) -> Plan:
    """Return the plan of a linear weight of ``size`` as stored, sharded along ``dim``."""
    if isinstance(weight, InterceptingTensor) and weight.is_transposed:
        return make_plan(config, (size[1], size[0]), num_ranks, dim, reader, turned=True)
    persistent = isinstance(weight, HybridTensor)
    return make_plan(config, (size[0], size[1]), num_ranks, dim, reader, persistent=persistent)
