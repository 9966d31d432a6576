"""What quantizers remember from step to step, and how it advances."""

from hybridtensor.state.context import MAX_SEED, Context, require_context
from hybridtensor.state.keys import STATE, weight_of_state
from hybridtensor.state.layer import LayerState
from hybridtensor.state.ranks import Section, TrainingRanks
from hybridtensor.state.rules import ROLES, DelayedRule, required
from hybridtensor.state.tensors import StateTensors, Traced, layer_of

__all__ = [
    "MAX_SEED",
    "ROLES",
    "STATE",
    "Context",
    "DelayedRule",
    "LayerState",
    "Section",
    "StateTensors",
    "Traced",
    "TrainingRanks",
    "layer_of",
    "require_context",
    "required",
    "weight_of_state",
]
