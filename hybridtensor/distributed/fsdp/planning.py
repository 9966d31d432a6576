"""By which plan a parameter that FSDP2 holds is gathered."""

from __future__ import annotations

from torch import Tensor

from hybridtensor.distributed.fsdp.plan import Plan, make_plan
from hybridtensor.distributed.fsdp.stack_plan import stack_plan
from hybridtensor.distributed.fsdp.torch_compat import ShardedParam
from hybridtensor.linear.kinds import is_linear
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.intercepting import InterceptingTensor


def plan_of(sharded: ShardedParam, config: HybridConfig) -> Plan:
    """Return the plan by which a weight is gathered with a recipe."""
    size, part = sharded.size, sharded.tensor
    if len(size) == 3 and isinstance(part, InterceptingTensor):
        return stack_plan(part, config, size, sharded.num_ranks, sharded.dim)
    others = [type(reader).__name__ for reader in sharded.readers if not is_linear(reader)]
    reader = others[0] if others and isinstance(sharded.tensor, MasterWeight) else ""
    return matrix_plan(part, config, size, sharded.num_ranks, sharded.dim, reader)


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
