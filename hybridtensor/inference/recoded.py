"""Faces in another format with the same values: MXFP4 as NVFP4.

Shape letters: ``N, K`` a weight.
"""

from __future__ import annotations

import torch

from hybridtensor import formats
from hybridtensor.ops import Face

_BIAS = 127  # of E8M0
_LOWEST, _HIGHEST = -9, 8  # powers of two that E4M3 has: 2**-9 is subnormal, 2**8 has 448 above it
_USUAL = -8  # in its range are the exponents of weights
_SMALLEST, _LARGEST = -127, 114  # where 2688 times it has a reciprocal that is normal in fp32
_MAGNITUDES = 0x77  # of the two elements of a byte, without signs


def nvfp4_of_mxfp4(face: Face) -> Face:
    """Return an MXFP4 face as NVFP4, element for element.

    A power of two per 32 becomes one in E4M3 for each 16, relative to a tensor scale that is a power of two, too:
    2**-8 wherever that goes, so that layers that engines fuse have one. Blocks of zeros have any scale.

    Args:
        face: ``[N, K]``, in blocks of 1x32 or 32x32.

    Raises:
        ValueError: If its exponents are further from each other than those of E4M3, or one is NaN.
    """
    if face.format not in (formats.MXFP4, formats.MXFP4_32X32) or face.scale is None:
        raise ValueError(f"a face in MXFP4 is required to be stored as NVFP4, got {face.format}")
    rows, across = face.qdata.shape[0], face.format.block[0] or 1
    exponents = face.scale.view(torch.uint8).to(torch.int32) - _BIAS
    exponents = exponents.repeat_interleave(across, 0)[:rows].repeat_interleave(2, 1)
    # Eight bytes are 16 elements, a block of NVFP4; blocks of zeros set no bounds.
    used = exponents[((face.qdata & _MAGNITUDES) != 0).unflatten(1, (-1, 8)).any(2)]
    low, high = (int(used.min()), int(used.max())) if used.numel() else (_USUAL, _USUAL)
    fewest, most = max(high - _HIGHEST, _SMALLEST), min(low - _LOWEST, _LARGEST)
    if fewest > most:
        raise ValueError(
            f"exponents within {_HIGHEST - _LOWEST} of each other, and up to {_LARGEST + _HIGHEST}, are required to be "
            f"stored as NVFP4, got {low} to {high}; choose layout='ct_mxfp4'"
        )
    tensor = min(max(_USUAL, fewest), most)
    powers = (exponents - tensor).clamp(_LOWEST, _HIGHEST)
    scale = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
    # A value is element * scale * amax / tensor_scale_max: of this amax a factor of 2**tensor is left.
    amax = torch.full((1, 1), formats.NVFP4.tensor_scale_max * 2.0**tensor, device=scale.device)
    return Face(face.qdata, scale.to(torch.float8_e4m3fn), amax, formats.NVFP4)
