"""Weights of a sharded model for inference engines, of the shapes of Llama 3 8B, over gathering bf16 and quantizing.

Start it with torchrun, one process per GPU: ``torchrun --nproc-per-node=2 benchmarks/export.py``. Every rank gets every
tensor, and lets go of it. Times are those of the host: what waits is a training loop.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import arguments, report
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hybridtensor as ht
from hybridtensor.dtensor import local

# Layers, width, hidden, width of keys, vocabulary
SIZES = {"cuda": (32, 4096, 14336, 1024, 128256), "cpu": (2, 256, 512, 128, 512)}
SQUARES = ht.HybridConfig(
    ht.Float8Quantizer("block", block="1x128"),
    ht.Float8Quantizer("block", block="128x128"),
    ht.Float8Quantizer("block", block="1x128"),
)
RECIPES = {"fp8": "fp8", "fp8_rowwise": "fp8_rowwise", "fp8 128x128": SQUARES, "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
BUCKETS = [64, 256, 1024]  # MiB


class Block(nn.Module):
    """The matrices of a block."""

    def __init__(self, width: int, hidden: int, keys: int) -> None:
        super().__init__()
        sizes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width)}
        sizes |= {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))


def make(kind: str) -> nn.Module:
    """Return a sharded model in bf16."""
    layers, width, hidden, keys, vocabulary = SIZES[kind]
    torch.manual_seed(0)
    model = nn.Module()
    with torch.device(kind):
        model.embed, model.head = (nn.Embedding(vocabulary, width).bfloat16() for _ in range(2))
        model.blocks = nn.ModuleList(Block(width, hidden, keys).bfloat16() for _ in range(layers))
    ht.quantize_(model, "fp8")
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def bf16_then_quantized(model: nn.Module, quantizer: ht.Quantizer) -> Iterator[Tensor]:
    """Yield what a loop over the parameters gives that gathers bf16 and quantizes."""
    for parameter in model.parameters():
        part = local(parameter)
        values = part.plain if isinstance(part, ht.MasterWeight) else part.detach()
        whole = DTensor.from_local(values.bfloat16(), parameter.device_mesh, parameter.placements).full_tensor()
        if not isinstance(part, ht.MasterWeight):
            yield whole
            continue
        face = quantizer.quantize(whole, columnwise=False).rowwise
        yield face.qdata
        yield face.scale


def measured(run: Callable[[], Iterator[Any]], repeats: int, device: str) -> tuple[float, float]:
    """Return the median of seconds, and the peak in MiB beyond what was there."""
    seconds, peak = [], 0.0
    for i in range(repeats + 1):
        dist.barrier()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in run():
            pass
        if device == "cuda":
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        if i:
            seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(seconds), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item(), peak


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    kind = "cuda" if options.device.startswith("cuda") else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    model, rows = make(kind), []
    chosen = [(name, BUCKETS if name == "fp8_rowwise" else BUCKETS[1:2], model.blocks) for name in RECIPES]
    for name, buckets, part in [*chosen, ("fp8_rowwise", BUCKETS[1:2], model)]:
        ht.set_config_(model, RECIPES[name])
        weights = [local(p) for p in part.parameters()]
        config = next(p for p in weights if isinstance(p, ht.MasterWeight)).config
        base, base_peak = measured(lambda c=config, p=part: bf16_then_quantized(p, c.weight), options.repeats, kind)
        nbytes = sum(tensor.nbytes for _, tensor in ht.inference_tensors(part))
        for bucket in buckets:
            run = lambda b=bucket, p=part: ht.inference_tensors(p, bucket_bytes=b * 2**20)  # noqa: E731
            seconds, peak = measured(run, options.repeats, kind)
            rows.append(
                {
                    "weights": "with embeddings" if part is model else "of linear layers",
                    "recipe": name,
                    "bucket MiB": bucket,
                    "ms": 1e3 * seconds,
                    "ms, bf16 then quantized": 1e3 * base,
                    "of its time": seconds / base,
                    "of its bytes": nbytes / sum(2 * p.numel() for p in part.parameters()),
                    "peak MiB": peak,
                    "its peak MiB": base_peak,
                }
            )
    if dist.get_rank() == 0:
        report("export_2_ranks", rows, options)
    dist.destroy_process_group()
