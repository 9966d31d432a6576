"""Ranks of one machine: starting them, and what each is to the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from model import Transformer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class Rank:
    """One of ``size`` processes that train together; without FSDP2 the only one."""

    number: int = 0
    size: int = 1
    sharded: bool = False

    def part(self, batch: Tensor) -> Tensor:
        """Return this rank's rows of a batch."""
        return batch.chunk(self.size)[self.number]

    def mean(self, value: Tensor) -> float:
        """Return the mean over all ranks."""
        value = value.detach().clone()
        if self.sharded:
            dist.all_reduce(value)
        return value.item() / self.size

    def shard(self, model: Transformer, device: torch.device) -> None:
        """Shard a model over all ranks: each block on its own, then the rest."""
        if self.sharded:
            mesh = init_device_mesh(device.type, (self.size,))
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)


def check_ranks(size: int | None, device: torch.device, batch: int) -> None:
    """Raise for a number of ranks that this machine or the batch does not allow."""
    if size is None:
        return
    if size < 1:
        raise ValueError(f"--fsdp: at least 1 rank is required, got {size}")
    if device.index is not None:
        raise ValueError(f"--fsdp: a device without a number is required, got --device {device}; each rank takes one")
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ValueError(f"--fsdp: at most a rank per GPU is required, got {size} for {torch.cuda.device_count()}")
    if batch % size:
        raise ValueError(
            f"--fsdp: a number that divides the batch of {batch} is required, got {size}; change one of them"
        )


def is_started() -> bool:
    """Whether this process is a rank already."""
    return "LOCAL_RANK" in os.environ


def become_ranks(size: int) -> None:
    """Replace this process by one that starts ``size`` ranks of the same command line and waits for them."""
    python = [sys.executable, *(f"-W{option}" for option in sys.warnoptions)]
    threads = str(max(1, (os.cpu_count() or 1) // size))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "--no-python"]
    sys.stdout.flush()
    os.execve(sys.executable, [*python, *launcher, *python, *sys.argv], {"OMP_NUM_THREADS": threads, **os.environ})


def without_rank() -> dict[str, str]:
    """Return the environment for a process that is not a rank of this run."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


@contextmanager
def joined(size: int | None, device: str) -> Iterator[tuple[Rank, str]]:
    """Join the process group, if there is one; give this rank and its device."""
    if size is None:
        yield Rank(), device
        return
    number = int(os.environ["LOCAL_RANK"])
    own = None
    if device.startswith("cuda"):
        own = torch.device("cuda", number)
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own else "gloo", device_id=own)
    try:
        yield Rank(dist.get_rank(), dist.get_world_size(), sharded=True), str(own or device)
    finally:
        dist.destroy_process_group()
