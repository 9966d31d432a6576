"""Checkpoints of converted models: plain tensors in a folder of steps, checked by digests when they are loaded.

::

    from hybridtensor.distributed import checkpoint

    state = {"model": model, "optimizer": optimizer, "seen": torch.tensor(0)}
    checkpoint.save("runs/a", step, state)
    step = checkpoint.load("runs/a", state)  # the newest intact step, on any number of ranks

- ``save``, ``async_save``, ``load``, ``latest``, ``verify``: a folder of steps that survives crashes and bad disks. Its
  steps are checkpoints of ``torch.distributed.checkpoint``, which other tools read too.
- ``check_replicas``: compares values that must be the same on all ranks.
- ``HybridSavePlanner``, ``HybridLoadPlanner``: planners for direct calls of ``torch.distributed.checkpoint``.
- ``plain``: returns a state with plain tensors that alias the converted weights, for ``torch.save``, and for
  ``dcp.async_save`` of persistent weights.
- ``SafeReader``: reads checkpoints of ``torch.distributed.checkpoint`` without running code of their pickles.
"""

from hybridtensor.distributed.checkpoint.agreement import check_replicas
from hybridtensor.distributed.checkpoint.plain import plain
from hybridtensor.distributed.checkpoint.planners import HybridLoadPlanner, HybridSavePlanner
from hybridtensor.distributed.checkpoint.reading import load
from hybridtensor.distributed.checkpoint.store import Saving, async_save, save
from hybridtensor.untrusted.reader import SafeReader
from hybridtensor.untrusted.verifying import latest, verify

__all__ = [
    "HybridLoadPlanner",
    "HybridSavePlanner",
    "SafeReader",
    "Saving",
    "async_save",
    "check_replicas",
    "latest",
    "load",
    "plain",
    "save",
    "verify",
]
