"""FP4 with a choice of scales, one block at a time in numpy and ml_dtypes: nothing here is the package's."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

F32 = np.float32
FP32_MAX = np.finfo(F32).max
E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def as_float32(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().to(torch.float32).numpy()


def amax_of(values: np.ndarray) -> np.float32:
    numbers = np.abs(values[~np.isnan(values)])
    return F32(numbers.max()) if numbers.size else F32(0)


def four_over_six_oracle(
    x: torch.Tensor, *, metric: str, scale_max: int, block=(1, 16), row_scaled: bool = False, transposed: bool = False
):
    """Quantize ``[M, K]`` along its last dimension.

    Args:
        x: The matrix.
        metric: ``"mae"`` or ``"mse"``.
        scale_max: 448 or 256.
        block: Extent of a scale block.
        row_scaled: A tensor scale per row.
        transposed: ``x`` is a transpose: the errors of a square block are added up by its columns.

    Returns:
        E2M1 codes, one per uint8; E4M3 scale bytes, one per block; tensor scales, fp32; which blocks chose 4.
    """
    values = as_float32(x)
    across, along = block
    codes = np.zeros(values.shape, np.uint8)
    shape = -(-values.shape[0] // across), -(-values.shape[1] // along)
    scales, fours = np.zeros(shape, np.uint8), np.zeros(shape, bool)
    levels = [amax_of(row) for row in (values if row_scaled else [values])]
    levels = [F32(6 * scale_max) if level in (0, np.inf) else level for level in levels]
    with np.errstate(all="ignore"):
        for i, j in np.ndindex(*shape):
            rows, columns = slice(across * i, across * (i + 1)), slice(along * j, along * (j + 1))
            part, level = values[rows, columns], levels[i] if row_scaled else levels[0]
            found = _one_block(part, level, metric, scale_max, transposed)
            codes[rows, columns], scales[i, j], fours[i, j] = found
    return codes, scales, np.array(levels, F32).reshape(-1, 1), fours


def _one_block(part, level, metric, scale_max, transposed):
    encode = min(F32(6 * scale_max) / level, FP32_MAX)
    base = F32(F32(amax_of(part) / F32(6)) * encode)
    clean = np.where(np.isnan(part), F32(0), part)
    candidates = []
    for wanted in (base, F32(base * F32(1.5))):
        scale = np.minimum(wanted, F32(448)).astype(E4M3)
        factor = min(F32(1) / F32(F32(scale) * F32(F32(1) / encode)), FP32_MAX)
        elements = np.clip(clean * factor, F32(-6), F32(6)).astype(E2M1)
        candidates.append((scale, elements, error_of(elements, scale, clean, level, metric, scale_max, transposed)))
    four = bool(candidates[1][2] < candidates[0][2])
    scale, elements, _ = candidates[four]
    byte = 0x7F if np.isnan(part).any() else int(scale.view(np.uint8))
    return elements.view(np.uint8) & 0xF, byte, four


def error_of(elements, scale, part, level, metric, scale_max, transposed=False) -> np.float32:
    """Return the error of a block, added up element after element, and rows of a square one in a tree."""
    held = elements.astype(F32) * F32(scale)
    held = held * level
    held = held / F32(6 * scale_max)
    differences = held - part
    errors = np.abs(differences) if metric == "mae" else differences * differences
    sums = []
    for row in errors.T if transposed else errors:
        total = F32(0)
        for error in row:
            total = F32(total + error)
        sums.append(total)
    if len(sums) > 1:
        sums += [F32(0)] * (16 - len(sums))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [F32(a + b) for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def mxfp4_oracle(x: torch.Tensor, *, scale_rounding: str, block=(1, 32)):
    """Quantize ``[M, K]`` along its last dimension; exponents by whole numbers and fractions, not by bits.

    Returns:
        E2M1 codes, one per uint8, and E8M0 scale bytes, one per block.
    """
    values = as_float32(x)
    across, along = block
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((-(-values.shape[0] // across), -(-values.shape[1] // along)), np.uint8)
    for i, j in np.ndindex(*scales.shape):
        place = slice(across * i, across * (i + 1)), slice(along * j, along * (j + 1))
        part = values[place]
        if np.isnan(part).any():
            scales[i, j] = 255
            continue
        exponent = _exponent(float(np.abs(part).max()), scale_rounding)
        with np.errstate(over="ignore"):
            scaled = np.clip(part.astype(np.float64) * 2.0**-exponent, -6, 6)
        codes[place], scales[i, j] = scaled.astype(E2M1).view(np.uint8) & 0xF, exponent + 127
    return codes, scales


def _exponent(amax: float, rule: str) -> int:
    if amax == 0:
        return -127
    if amax == np.inf:
        return 127 if rule == "rceil" else 126
    exponent = math.frexp(amax)[1] - 1
    if rule == "rceil":
        wanted = Fraction(float(F32(amax) * (F32(1) / F32(6))))  # which subnormal numbers round
        found = next(e for e in range(exponent - 4, exponent + 1) if wanted <= Fraction(2) ** e)
    else:
        mantissa = Fraction(amax) / Fraction(2) ** exponent  # from 1 on, below 2: to 1, 1.5 or 2
        found = exponent - 2 + (rule == "even" and mantissa >= Fraction(7, 4))
    return max(min(found, 127), -127)


def nearly_tied(rows: int, columns: int, side: int = 1) -> torch.Tensor:
    """Return blocks ``[side, 16]`` whose errors with 6 and with 4 are the same numbers in another order: in fp32 their
    sums differ by what is rounded away, and so by the order in which they are added up.

    The amax of the matrix, in its first block, is 1536: with scales up to 256 blocks are encoded as they are. 4.5 + d
    is off by 0.5 + d with a scale of 1, and by d with one of 1.5; 4 - d the other way round; what is below 0.25 alike.
    """
    x = torch.zeros(rows, columns)
    size = side * 16
    pairs = size * 5 // 16
    for i, j in np.ndindex(rows // side, columns // 16):
        if (i, j) == (0, 0):
            x[0, 0] = 1536.0
            continue
        d = torch.rand(pairs) * 0.2
        upper = 4.5 + d
        same = torch.rand(size - 2 * pairs - 1) * 0.2
        block = torch.cat([torch.tensor([6.0]), upper, 4 - (upper - 4.5), same])
        block = block[torch.randperm(size)].view(side, 16)
        x[side * i : side * (i + 1), 16 * j : 16 * (j + 1)] = block
    return x
