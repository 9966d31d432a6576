"""Ranks of one machine: starting them, and what each is to the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from model import Size, Transformer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import hybridtensor as ht


@dataclass(frozen=True)
class Degrees:
    """How many ranks a model is spread over.

    Attributes:
        fsdp: Ranks that have other parts of a batch, and of each weight (FSDP2); None is one, without FSDP2.
        tp: Ranks that have other parts of each layer, and of each sequence; None is one, without DTensors.
    """

    fsdp: int | None = None
    tp: int | None = None

    @property
    def size(self) -> int | None:
        """The number of ranks; None for a process alone."""
        return None if self.fsdp is None and self.tp is None else (self.fsdp or 1) * (self.tp or 1)


@dataclass(frozen=True)
class Rank:
    """One of ``size`` processes that train together; by default the only one."""

    number: int = 0
    size: int = 1
    degrees: Degrees = Degrees()

    @property
    def sharded(self) -> bool:
        """Whether the model is spread over ranks."""
        return self.degrees.size is not None

    def part(self, batch: Tensor) -> Tensor:
        """Return this rank's rows of a batch: those of one tensor-parallel group are the same."""
        return batch.chunk(self.degrees.fsdp or 1)[self.number // (self.degrees.tp or 1)]

    def mean(self, value: Tensor) -> float:
        """Return the mean over all ranks."""
        value = value.detach().clone()
        if self.sharded:
            dist.all_reduce(value)
        return value.item() / self.size

    def shard(self, model: Transformer, device: torch.device) -> None:
        """Cut the layers of a model, then shard what is left of it: each block on its own, then the rest."""
        if not self.sharded:
            return
        shape = (self.degrees.fsdp or 1, self.degrees.tp or 1)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
        if self.degrees.tp is not None:
            cut(model, mesh["tp"])
        ht.set_mesh_(model, mesh)
        if self.degrees.fsdp is not None:
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh["dp"])


def cut(model: Transformer, mesh: DeviceMesh) -> None:
    """Give each rank a part of each layer, and outside of attention and MLP a part of each sequence."""
    columns, rows = ht.distributed.ColwiseParallel, ht.distributed.RowwiseParallel
    tokens, everything = Shard(1), Replicate()

    def gathered(*others: None) -> ht.distributed.PrepareModuleInput:
        layouts, wanted = (tokens, *others), (everything, *others)
        return ht.distributed.PrepareModuleInput(input_layouts=layouts, desired_input_layouts=wanted)

    for block in model.blocks:
        styles = {
            "attention_norm": SequenceParallel(), "attention": gathered(None), "attention.qkv": columns(),
            "attention.out": rows(output_layouts=tokens),
            "mlp_norm": SequenceParallel(), "mlp": gathered(), "mlp.gate_proj": columns(), "mlp.up": columns(),
            "mlp.down": rows(output_layouts=tokens),
        }  # fmt: skip
        parallelize_module(block, mesh, styles)
    ends = {
        "embed": rows(input_layouts=everything, output_layouts=tokens), "norm": SequenceParallel(),
        "lm_head": columns(input_layouts=tokens, output_layouts=everything),
    }  # fmt: skip
    parallelize_module(model, mesh, ends)


def check_ranks(degrees: Degrees, device: torch.device, size: Size) -> None:
    """Raise for a number of ranks that this machine, the batch or the model does not allow."""
    ranks = degrees.size
    if ranks is None:
        return
    for option, degree in (("--fsdp", degrees.fsdp), ("--tp", degrees.tp)):
        if degree is not None and degree < 1:
            raise ValueError(f"{option}: at least 1 rank is required, got {degree}")
    option = "--tp" if degrees.fsdp is None else "--fsdp"
    if device.index is not None:
        raise ValueError(f"{option}: a device without a number is required, got --device {device}; each rank takes one")
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(f"{option}: at most a rank per GPU is required, got {ranks} for {torch.cuda.device_count()}")
    if size.batch % (degrees.fsdp or 1):
        raise ValueError(
            f"--fsdp: a number that divides the batch of {size.batch} is required, got {degrees.fsdp}; "
            "change one of them"
        )
    if size.heads % (degrees.tp or 1):
        raise ValueError(f"--tp: a number that divides the {size.heads} heads is required, got {degrees.tp}")


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
def joined(degrees: Degrees, device: str) -> Iterator[tuple[Rank, str]]:
    """Join the process group, if there is one; give this rank and its device."""
    if degrees.size is None:
        yield Rank(), device
        return
    number = int(os.environ["LOCAL_RANK"])
    own = None
    if device.startswith("cuda"):
        own = torch.device("cuda", number)
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own else "gloo", device_id=own)
    try:
        yield Rank(dist.get_rank(), dist.get_world_size(), degrees), str(own or device)
        dist.barrier()  # a rank that leaves closes connections that others still read from
    finally:
        dist.destroy_process_group()
