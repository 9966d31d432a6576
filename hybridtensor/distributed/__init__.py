"""Process groups: what of this library touches more than one rank lives here."""

from hybridtensor.distributed.fsdp import expect_recompute_

__all__ = ["expect_recompute_"]
