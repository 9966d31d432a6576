"""Inputs that find mistakes."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.arguments import place, require_dtype, require_int

EDGE_VALUES = (
    0.0, -0.0, 1.0, -1.0, 448.0, -448.0, 57344.0, 240.0, 2.0**-6, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 2.0**-16, 2.0**-17,
    1.0625, 1.1875, 17.0, 19.0, 1e-3, -1e-3, 2.0**-126, 2.0**-133, 2.0**-149, 65504.0, 3.0e38, -3.0e38, 0.1, 127.0,
)  # fmt: skip
"""Zeros, powers of two, format maxima, ties of E4M3 and E5M2, subnormals of every dtype,
near-overflow.
"""


def _require(who: str, dtype: object, device: object) -> None:
    require_dtype(who, dtype)
    place(who, device)


def edge_tensor(dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Return a matrix ``[18, 28]`` whose rows are edge cases of a scale group.

    ::

        quantized = ht.Float8Quantizer("row").quantize(testing.edge_tensor(torch.bfloat16), columnwise=False)

    Rows 0-11: all edge values at one magnitude. Then: all zero, one Inf, one NaN, all NaN, all
    subnormal, one huge value among tiny ones. Values beyond ``dtype`` become its Inf or zero.
    """
    _require("edge_tensor", dtype, device)
    edges = torch.tensor(EDGE_VALUES, dtype=torch.float64)
    rows = [edges * 2.0**exponent for exponent in (-40, -20, -10, -5, -1, 0, 1, 2, 5, 8)]
    rows += [edges.flip(0), edges.roll(3)]
    ones = torch.ones(len(EDGE_VALUES), dtype=torch.float64)
    inf, nan, huge = ones.clone(), ones.clone(), ones * 2.0**-20
    inf[3], nan[5], huge[7] = float("-inf"), float("nan"), 2.0**14
    rows += [ones * 0, inf, nan, ones * float("nan"), ones * 2.0**-140, huge]
    return torch.stack(rows).to(dtype).to(device)


def random_tensor(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Tensor:
    """Return normal values whose rows and columns differ in magnitude by powers of two up to 2^8.

    ::

        x = testing.random_tensor(64, 128, dtype=torch.float32, seed=1)
    """
    _require("random_tensor", dtype, device)
    require_int("random_tensor", seed=seed)
    if not shape:
        raise ValueError(
            "random_tensor: a shape is required, got none; give the extent of each dimension"
        )
    for extent in shape:
        require_int("random_tensor", at_least=0, extent=extent)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cpu")
    for dim in {0, len(shape) - 1}:
        spread = torch.randint(-4, 5, (shape[dim],), generator=generator, device="cpu").float()
        x *= torch.exp2(spread).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return x.to(dtype).to(device)
