"""Checkpoints of converted models: what is stored are plain tensors, and what is loaded is what was written.

::

    from hybridtensor.distributed import checkpoint

    state = {"model": model, "optimizer": optimizer, "seen": torch.tensor(0)}
    checkpoint.save("runs/a", step, state)
    step = checkpoint.load("runs/a", state)  # the newest good one, on any number of ranks

- ``save``, ``async_save``, ``load``, ``latest``, ``verify``: a folder of steps that survives crashes and bad disks. Its
  steps are checkpoints of ``torch.distributed.checkpoint``, which other tools read too.
- ``check_replicas``: whether ranks that should have the same values do.
- ``HybridSavePlanner``, ``HybridLoadPlanner``: for who calls ``torch.distributed.checkpoint`` themselves.
- ``plain``: any state with plain tensors for converted weights, in the same memory: for
  ``torch.save``, and for ``dcp.async_save`` of persistent weights.
- ``SafeReader``: reads the pickle in ``torch.distributed.checkpoint`` without running what it says.
"""

from hybridtensor.distributed.checkpoint.agreement import check_replicas
from hybridtensor.distributed.checkpoint.plain import plain
from hybridtensor.distributed.checkpoint.planners import HybridLoadPlanner, HybridSavePlanner
from hybridtensor.distributed.checkpoint.reading import latest, load, verify
from hybridtensor.distributed.checkpoint.store import Saving, async_save, save
from hybridtensor.distributed.checkpoint.untrusted.reader import SafeReader

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
