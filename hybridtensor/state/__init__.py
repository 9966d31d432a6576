"""What quantizers remember from step to step, and how it advances."""

from hybridtensor.state.context import MAX_SEED, Context, require_context
from hybridtensor.state.layer import ROLES, DelayedRule, LayerState, StateTensors, required

__all__ = [
    "MAX_SEED",
    "ROLES",
    "Context",
    "DelayedRule",
    "LayerState",
    "StateTensors",
    "require_context",
    "required",
]
