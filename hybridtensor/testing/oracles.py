"""An implementation of the numerics that shares no code with the library: numpy and ml_dtypes, one group at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

_ELEMENTS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def float8_oracle(
    x: Tensor, *, dtype: str, granularity: str, pow2_scale: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a matrix to FP8 along its last dimension.

    Args:
        x: ``[M, K]``, any floating-point dtype.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        granularity: ``"tensor"`` or ``"row"``.
        pow2_scale: Round scales down to powers of two.

    Returns:
        Codes, uint8 ``[M, K]``, and the scales to multiply them with, fp32 ``[1 or M, 1]``.
    """
    element, largest = _ELEMENTS[dtype]
    values = x.detach().cpu().to(torch.float32).numpy()  # exact for bf16 and fp16
    groups = values if granularity == "row" else values.reshape(1, -1)
    scales = np.array([_scale(group, largest, pow2_scale) for group in groups], dtype=np.float32).reshape(-1, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values * scales  # fp32 product, rounded to nearest even
        codes = np.clip(scaled, -largest, largest).astype(element).view(np.uint8)
        codes[np.isnan(values)] = 0x7F
        return codes, np.float32(1) / scales


def _scale(group: np.ndarray, largest: float, pow2_scale: bool) -> np.float32:
    finite_or_inf = group[~np.isnan(group)]
    amax = np.float32(np.abs(finite_or_inf).max()) if finite_or_inf.size else np.float32(0)
    if amax == 0 or np.isinf(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(largest) / amax
    if np.isinf(scale):
        scale = np.finfo(np.float32).max
    if pow2_scale:
        _, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), int(exponent) - 1)
    return np.float32(scale)
