"""A gather of activations and the products that read it: in turn, and in symmetric memory's fused operators.

Start it with torchrun, one process per GPU: ``torchrun --nproc-per-node=2 benchmarks/fused_gather.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import arguments, report, time_alternating
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

TOKENS = (8192, 32768)
# features of the input, and of the outputs of all ranks: query, key and value; gate and up of Llama-3 8B
GATHERED = {"attention": (4096, (4096, 1024, 1024)), "mlp": (4096, (14336, 14336))}
SCATTERED = {"attention": (4096, 4096), "mlp": (14336, 4096)}  # features of the input of all ranks, of the output
c10d = torch.ops._c10d_functional


def quantized(*shape: int) -> Tensor:
    """Return random FP8 values."""
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def products(x: Tensor, weights: list[Tensor], one: Tensor) -> list[Tensor]:
    """Return the product of ``x`` and each weight."""
    if x.dtype == torch.bfloat16:
        return [x @ w for w in weights]
    return [torch._scaled_mm(x, w, one, one, out_dtype=torch.bfloat16, use_fast_accum=True) for w in weights]


def gather(x: Tensor, group: str, ranks: int) -> Tensor:
    """Return the tokens of all ranks."""
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x.view(torch.uint8), ranks, group))
    return whole.view(x.dtype)  # type: ignore[no-any-return]


def fused_gather(x: Tensor, weights: list[Tensor], one: Tensor, group: str) -> Any:
    """Return the tokens of all ranks, and the products that were computed while they came."""
    if x.dtype == torch.bfloat16:
        return torch.ops.symm_mem.fused_all_gather_matmul(x, weights, 0, group)
    count, none = len(weights), [None] * len(weights)
    return torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        x, weights, one, [one] * count, 0, group, none, none, [torch.bfloat16] * count, [True] * count
    )


def scatter(y: Tensor, group: str, ranks: int) -> Tensor:
    """Return this rank's tokens of a sum over ranks."""
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(y, "sum", ranks, group))  # type: ignore[no-any-return]


def fused_scatter(x: Tensor, weight: Tensor, one: Tensor, group: str) -> Tensor:
    """Return this rank's tokens of a product that is sent while it is computed."""
    operators = torch.ops.symm_mem
    if x.dtype == torch.bfloat16:
        return operators.fused_matmul_reduce_scatter(x, weight, "sum", 0, group)  # type: ignore[no-any-return]
    shape = [x.shape[0], weight.shape[1]]
    return operators.fused_scaled_matmul_reduce_scatter(  # type: ignore[no-any-return]
        x, weight, one, one, "sum", 0, 0, group, shape, None, None, torch.bfloat16, True
    )


def cases(tokens: int, dtype: torch.dtype, group: str, ranks: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return by name what is compared: the product alone, the collective alone, both in turn, both at once."""
    one = torch.ones((), device="cuda")
    made: dict[str, dict[str, Callable[[], Any]]] = {}

    def random(*shape: int) -> Tensor:
        return quantized(*shape) if dtype != torch.bfloat16 else torch.randn(*shape, device="cuda", dtype=dtype)

    for name, (features, outputs) in GATHERED.items():
        weights, x = [random(n // ranks, features).t() for n in outputs], random(tokens // ranks, features)
        whole = gather(x, group, ranks)
        made[f"gather, {name}"] = {
            "products": partial(products, whole, weights, one),
            "collective": partial(gather, x, group, ranks),
            "in turn": lambda x=x, w=weights: products(gather(x, group, ranks), w, one),
            "fused": partial(fused_gather, x, weights, one, group),
        }
    for name, (features, output) in SCATTERED.items():
        weight, x = random(output, features // ranks).t(), random(tokens, features // ranks)
        (y,) = products(x, [weight], one)
        made[f"reduce-scatter, {name}"] = {
            "products": partial(products, x, [weight], one),
            "collective": partial(scatter, y, group, ranks),
            "in turn": lambda x=x, w=weight: scatter(products(x, [w], one)[0], group, ranks),
            "fused": partial(fused_scatter, x, weight, one, group),
        }
    return made


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    if not options.device.startswith("cuda"):
        raise SystemExit("fused_gather: GPUs are required, symmetric memory is theirs; start it with torchrun")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group, ranks = dist.distributed_c10d._get_default_group().group_name, dist.get_world_size()
    symmetric.enable_symm_mem_for_group(group)
    rows = []
    for tokens in TOKENS:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for name, variants in cases(tokens, dtype, group, ranks).items():
                ms = time_alternating(variants, "cuda", options.repeats, lead=2, count=10)
                speed = {"in turn / fused": ms["in turn"] / ms["fused"]}
                rows.append({"tokens": tokens, "dtype": str(dtype)[6:], "collective of": name, **ms, **speed})
                if dist.get_rank() == 0:
                    print(rows[-1], flush=True)
    if dist.get_rank() == 0:
        report(f"fused_gather_{ranks}_ranks", rows, options)
    dist.destroy_process_group()
