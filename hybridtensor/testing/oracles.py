"""The numerics once more, sharing no code with the library: numpy and ml_dtypes, one scale group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from hybridtensor.arguments import (
    require_choice,
    require_flag,
    require_float,
    require_int,
    require_kind,
    wrong,
)

_ELEMENTS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
_FP32_MAX = np.finfo(np.float32).max
_WHOLE = 2**62
_ONE = np.float32(1)
_GRANULARITIES = {
    "tensor": (_WHOLE, _WHOLE),
    "row": (1, _WHOLE),
    "1x128": (1, 128),
    "128x128": (128, 128),
}


def float8_oracle(
    x: Tensor, *, dtype: str, granularity: str, pow2_scale: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a matrix to FP8 along its last dimension.

    ::

        codes, scales = testing.float8_oracle(x, dtype="e4m3", granularity="row")

    Args:
        x: ``[M, K]``, any floating-point dtype.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        granularity: ``"tensor"``, ``"row"``, ``"1x128"`` or ``"128x128"``.
        pow2_scale: Round scales down to powers of two.

    Returns:
        Codes, uint8 ``[M, K]``, and the scales to multiply them with, fp32, one per block.
    """
    _require("float8_oracle", x, dtype)
    require_choice("float8_oracle", "granularity", granularity, _GRANULARITIES)
    require_flag("float8_oracle", pow2_scale=pow2_scale)
    element, largest = _ELEMENTS[dtype]
    values = _float32(x)
    block = _GRANULARITIES[granularity]
    overflow = torch.finfo(x.dtype).max if "x" in granularity else _FP32_MAX
    codes = np.zeros(values.shape, dtype=np.uint8)

    def encode(group: np.ndarray) -> tuple[np.ndarray, np.float32]:
        factor = _factor(_amax(group), largest, pow2_scale, np.float32(overflow))
        return _cast(group * factor, element, largest), _ONE / factor

    scales = _per_block(values, block, codes, encode)
    return codes, scales


def mx_oracle(
    x: Tensor, *, dtype: str, block: tuple[int, int] = (1, 32)
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a matrix to MXFP8 along its last dimension.

    ::

        codes, scales = testing.mx_oracle(x, dtype="e4m3")

    Returns:
        Codes, uint8 ``[M, K]``, and E8M0 scale bytes, one per block.
    """
    _require("mx_oracle", x, dtype, block)
    element, largest = _ELEMENTS[dtype]
    values = _float32(x)
    codes = np.zeros(values.shape, dtype=np.uint8)

    def encode(group: np.ndarray) -> tuple[np.ndarray, int]:
        amax = _amax(group)
        with np.errstate(over="ignore"):
            wanted = amax * (_ONE / np.float32(largest))
        # Smallest power of two that is not below what is wanted
        exponent = 127 if np.isinf(wanted) else -127
        while (
            not np.isinf(wanted)
            and exponent < 127
            and np.float64(2.0) ** exponent < np.float64(wanted)
        ):
            exponent += 1
        return _cast(
            group * np.float32(np.float64(2.0) ** -exponent), element, largest
        ), exponent + 127

    scales = _per_block(values, block, codes, encode)
    return codes, scales.astype(np.uint8)


def nvfp4_oracle(
    x: Tensor, *, block: tuple[int, int] = (1, 16), row_scaled: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize a matrix to NVFP4 along its last dimension, to nearest, without rotation.

    ::

        codes, scales, tensor_scales = testing.nvfp4_oracle(x)

    Returns:
        E2M1 codes, one per uint8, ``[M, K]``; E4M3 scale bytes, one per block; tensor scales, fp32.
    """
    _require("nvfp4_oracle", x, block=block)
    require_flag("nvfp4_oracle", row_scaled=row_scaled)
    values = _float32(x)
    codes = np.zeros(values.shape, dtype=np.uint8)
    amaxes = [_amax(group) for group in (values if row_scaled else [values])]
    amaxes = [np.float32(2688) if a == 0 or np.isinf(a) else a for a in amaxes]

    def encode_in(tensor_amax: np.float32) -> Callable[[np.ndarray], tuple[np.ndarray, int]]:
        with np.errstate(over="ignore"):
            s_enc = min(np.float32(2688) / tensor_amax, _FP32_MAX)

        def encode(group: np.ndarray) -> tuple[np.ndarray, int]:
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                wanted = _amax(group) * np.float32(s_enc * (_ONE / np.float32(6)))
                scale = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
                enc = min(
                    _ONE / np.float32(scale.astype(np.float32) * np.float32(_ONE / s_enc)),
                    _FP32_MAX,
                )
                clean = np.where(np.isnan(group), np.float32(0), group)
                scaled = np.clip(clean * enc, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            byte = 0x7F if np.isnan(group).any() else int(scale.view(np.uint8))
            return scaled & 0xF, byte

        return encode

    if row_scaled and len(values):
        pieces = [values[i : i + 1] for i in range(values.shape[0])]
        scales = np.concatenate(
            [
                _per_block(v, block, codes[i : i + 1], encode_in(amaxes[i]))
                for i, v in enumerate(pieces)
            ]
        )
    else:
        scales = _per_block(values, block, codes, encode_in(amaxes[0] if amaxes else _ONE))
    return codes, scales.astype(np.uint8), np.array(amaxes, dtype=np.float32).reshape(-1, 1)


def decode_oracle(qdata: np.ndarray, element: str) -> np.ndarray:
    """Return the float64 values of codes, one per byte; ``element`` is ``e4m3``, ``e5m2``, ``e2m1`` or ``e8m0``.

    ::

        codes, scales = testing.float8_oracle(x, dtype="e4m3", granularity="row")
        values = testing.decode_oracle(codes, "e4m3") * scales
    """
    kinds = {
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "e2m1": ml_dtypes.float4_e2m1fn,
        "e8m0": ml_dtypes.float8_e8m0fnu,
    }
    require_kind("decode_oracle", "a numpy array", qdata, np.ndarray)
    require_choice("decode_oracle", "element", element, kinds)
    values: np.ndarray = qdata.view(kinds[element]).astype(np.float64)
    return values


def _require(who: str, x: object, dtype: str = "e4m3", block: object = (1, 1)) -> None:
    require_float(who, x, rank=2)
    if getattr(x, "is_meta", False):
        raise ValueError(f"{who}: a tensor with values is required, got one on the meta device")
    require_choice(who, "dtype", dtype, _ELEMENTS)
    if not isinstance(block, tuple) or len(block) != 2:
        raise wrong(who, "a block of two extents", block)
    require_int(who, at_least=1, rows=block[0], columns=block[1])


def _float32(x: Tensor) -> np.ndarray:
    values: np.ndarray = x.detach().cpu().to(torch.float32).numpy()  # exact for bf16 and fp16
    return values


def _blocks(
    shape: tuple[int, ...], block: tuple[int, int]
) -> Iterator[tuple[int, int, slice, slice]]:
    for i, start in enumerate(range(0, shape[0], block[0])):
        for j, left in enumerate(range(0, shape[1], block[1])):
            yield i, j, slice(start, start + block[0]), slice(left, left + block[1])


def _per_block(
    values: np.ndarray,
    block: tuple[int, int],
    codes: np.ndarray,
    encode: Callable[[np.ndarray], tuple[np.ndarray, np.floating | float]],
) -> np.ndarray:
    """Encode every block into ``codes`` and return the scales; an empty axis still has one block."""
    counts = [
        1 if b == _WHOLE else -(-extent // b) for extent, b in zip(values.shape, block, strict=True)
    ]
    scales = np.ones(counts, dtype=np.float32)
    for i, j, rows, columns in _blocks(values.shape, block):
        with np.errstate(over="ignore", invalid="ignore"):
            codes[rows, columns], scales[i, j] = encode(values[rows, columns])
    return scales


def _amax(group: np.ndarray) -> np.float32:
    numbers = group[~np.isnan(group)]
    return np.float32(np.abs(numbers).max()) if numbers.size else np.float32(0)


def _cast(scaled: np.ndarray, element: type, largest: float) -> np.ndarray:
    codes: np.ndarray = np.clip(scaled, -largest, largest).astype(element).view(np.uint8)
    codes[np.isnan(scaled)] = 0x7F
    return codes


def _factor(amax: np.float32, largest: float, pow2_scale: bool, overflow: np.float32) -> np.float32:
    if amax == 0 or np.isinf(amax):
        return _ONE
    with np.errstate(over="ignore"):
        scale = np.float32(largest) / amax
    scale = overflow if np.isinf(scale) else scale
    if pow2_scale:
        _, exponent = np.frexp(scale)
        scale = np.ldexp(_ONE, int(exponent) - 1)
    return np.float32(scale)
