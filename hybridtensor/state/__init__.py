"""What quantizers remember from step to step, and how it advances."""

from hybridtensor.state.context import MAX_SEED, ROLES, Context
from hybridtensor.state.layer import DelayedRule, LayerState, StateTensors, required

__all__ = [
    "MAX_SEED",
    "ROLES",
    "Context",
    "DelayedRule",
    "LayerState",
    "StateTensors",
    "required",
]
