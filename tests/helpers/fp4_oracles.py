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


def philox_words(key: int, counter) -> list[int]:
    """Philox-4x32-10 in Python's integers."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & 0xFFFFFFFF, first >> 32 ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def halves_of(words) -> list[int]:
    return [half for word in words for half in (word & 0xFFFF, word >> 16)]


def eden_oracle(x: torch.Tensor, *, key: int, step: int, stream: int, first_row: int = 0, transposed: bool = False):
    """Round ``[M, K]`` through its scales, one group of 128 after the other.

    Args:
        x: The matrix, finite.
        key: Of the layer.
        step: Of the layer.
        stream: Of the face.
        first_row: Of the tensor's first row in the whole.
        transposed: ``x`` is the transpose of the tensor.

    Returns:
        E2M1 codes, one per uint8; E4M3 scales as fp32; the tensor scale; halves of the signs.
    """
    halves = halves_of(philox_words(key, (0, 0, step, stream // 8 * 8 + 7)))
    signs = np.array([-1 if halves[i // 16] >> i % 16 & 1 else 1 for i in range(128)], F32)
    values = as_float32(x)
    rows, columns = values.shape
    grouped = values.reshape(rows, columns // 128, 128) * (signs / F32(128))
    stride = 1
    while stride < 128:  # sums in fp32, as the fast transform's
        low = np.array([i for i in range(128) if not i & stride])
        sums, differences = (
            grouped[..., low] + grouped[..., low + stride],
            grouped[..., low] - grouped[..., low + stride],
        )
        grouped = grouped.copy()
        grouped[..., low], grouped[..., low + stride] = sums, differences
        stride *= 2
    rotated = grouped * F32(math.sqrt(128))
    most = F32(6 / (17 / 16 * 0.93))
    amax = np.abs(rotated).max()
    level = F32(1) if amax == 0 else F32(max(amax / F32(255.99) / most, F32(2.0**-126)))
    codes, scales = np.zeros(values.shape, np.uint8), np.zeros((rows, columns // 16), F32)
    width = rows if transposed else columns  # of the tensor
    for i, j in np.ndindex(rows, columns // 128):
        group = rotated[i, j].reshape(8, 16)
        base = np.array([F32(np.abs(block).max() / most / level) for block in group], F32).astype(E4M3).astype(F32)
        base[base == 0] = 1
        scaled = np.array([block / F32(one * level) for block, one in zip(group, base, strict=True)], F32)
        elements = np.clip(scaled, -6, 6).astype(E2M1)
        over, under = _tree(scaled * scaled), _tree(scaled * elements.astype(F32))
        wanted = base * (F32(1) if under == 0 else F32(over / under))
        for block in range(8):
            column = 128 * j + 16 * block
            row, along = (column, i) if transposed else (i, column)
            n = (first_row + row) * width + along
            drawn = halves_of(philox_words(key, (n // 8 & 0xFFFFFFFF, n // 8 >> 32, step, stream)))[n % 8]
            scales[i, column // 16] = _neighbour(wanted[block], Fraction(2 * drawn + 1, 2**17))
        codes[i, 128 * j : 128 * (j + 1)] = elements.reshape(-1).view(np.uint8)
    return codes, scales, level, halves


def _tree(products):
    sums = products.reshape(-1)
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


_POSITIVE = sorted(float(v) for v in np.arange(127, dtype=np.uint8).view(E4M3))


def _neighbour(wanted, uniform) -> float:
    """Return the upper of two E4M3 neighbours with the probability of where ``wanted`` lies between them."""
    up = next((i for i, value in enumerate(_POSITIVE) if value > wanted), None)
    if up is None:
        return _POSITIVE[-1]
    low, high = (Fraction(_POSITIVE[i]) for i in (up - 1, up))
    return float(high if (Fraction(float(wanted)) - low) / (high - low) + uniform >= 1 else low)
