"""By which plan a parameter that FSDP2 holds is gathered, and by which layer's state."""

from __future__ import annotations

import functools
import math

from torch import Tensor

from hybridtensor.distributed.fsdp.plan import (
    COLUMN,
    ROW,
    Plan,
    derived_plan,
    face_plan,
    make_plan,
)
from hybridtensor.distributed.fsdp.torch_compat import ShardedParam
from hybridtensor.linear.kinds import is_linear
from hybridtensor.linear.operands import WEIGHTS
from hybridtensor.linear.stack_forward import recipe_at
from hybridtensor.quantizers.hybrid import by_direction
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import layer_of
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.owners import go_by


def plan_of(sharded: ShardedParam, config: HybridConfig) -> Plan:
    """Return the plan by which a weight is gathered with a recipe."""
    part = sharded.tensor
    others = [type(reader).__name__ for reader in sharded.readers if not is_linear(reader)]
    reader = others[0] if others and isinstance(part, MasterWeight) else ""
    return plan_of_size(part, config, sharded.size, sharded.num_ranks, sharded.dim, reader)


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


def plan_of_size(
    weight: Tensor,
    config: HybridConfig,
    size: tuple[int, ...],
    num_ranks: int,
    dim: int,
    reader: str = "",
) -> Plan:
    """Return the plan of a weight of ``size`` as stored, a matrix or a stack of experts'; see ``make_plan``."""
    turned = isinstance(weight, InterceptingTensor) and weight.is_transposed
    matrix = (size[-1], size[-2]) if turned else (size[-2], size[-1])
    if len(size) == 3:
        return _stack_plan(config, size[0], matrix, num_ranks, dim)
    persistent = isinstance(weight, HybridTensor)
    return make_plan(config, matrix, num_ranks, dim, reader, turned=turned, persistent=persistent)


@functools.lru_cache(maxsize=1024)
def _stack_plan(
    config: HybridConfig, count: int, matrix: tuple[int, int], num_ranks: int, dim: int
) -> Plan:
    """Return the plan of a stack of ``count`` experts ``(N, K)``, sharded along ``dim``: whole experts are sent."""
    whole, rows = "", -(-count // num_ranks)
    if dim != 0:
        whole, rows = f"Shard({dim}): parts of every expert", count
    elif count % num_ranks:
        whole = f"{count} experts on {num_ranks} ranks: FSDP2 takes one tensor of the padded shard's shape"
    row_quantizer, column_quantizer, derived = by_direction(config.weight)
    # one rank's plan: no expert shares a scale with another one
    row = face_plan(row_quantizer, ROW, matrix[0], 1)
    column = face_plan(column_quantizer, COLUMN, matrix[0], 1)
    if derived:
        column = derived_plan(row, column, row_quantizer)
    values = row.kind == column.kind == "values"
    elements = math.prod(matrix) // (1 if dim == 0 else num_ranks)
    return Plan(row, column, values, num_ranks, rows, elements, whole, derived, matrix=matrix)
