"""Process groups: what of this library touches more than one rank lives here."""

from hybridtensor.distributed.expert_parallel import ExpertParallel
from hybridtensor.distributed.fsdp.hooks import expect_recompute_
from hybridtensor.distributed.master_weights import quantize_master_weights
from hybridtensor.distributed.sequence.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "PrepareModuleInput",
    "RowwiseParallel",
    "expect_recompute_",
    "quantize_master_weights",
]
