"""Number formats as data: one frozen record per format, everything else derived from it.

A face of a tensor is a matrix of elements, ``[other, contraction]`` with the contraction axis last, and a matrix of
scales, one per *block* of elements. ``Format.block`` gives the extent of a block along those two axes; ``None`` means
the whole axis. One scale per tensor is therefore ``(None, None)``, one per row ``(1, None)``, 1x128 ``(1, 128)``.
Two-level formats have a *tensor scale* on top, one per tensor or one per row: the largest magnitude that it saw.

A new format is a new record here, a reference function and a kernel in ``ops`` and ``kernels``, and a quantizer.
"""

from __future__ import annotations

import torch

from hybridtensor.format_record import REGISTRY as REGISTRY
from hybridtensor.format_record import Format, get_format, register_format, with_kernels
from hybridtensor.format_record import format_of_face as format_of_face
from hybridtensor.format_record import work_out as work_out

__all__ = [
    "E2M1_MAX",
    "E4M3_MAX",
    "E5M2_MAX",
    "FP8_E4M3_1X128",
    "FP8_E4M3_1X128_FP32_SCALE",
    "FP8_E4M3_128X128",
    "FP8_E4M3_128X128_FP32_SCALE",
    "FP8_E4M3_ROW",
    "FP8_E4M3_TENSOR",
    "FP8_E5M2_1X128",
    "FP8_E5M2_1X128_FP32_SCALE",
    "FP8_E5M2_128X128",
    "FP8_E5M2_128X128_FP32_SCALE",
    "FP8_E5M2_ROW",
    "FP8_E5M2_TENSOR",
    "IDENTITY",
    "MXFP4",
    "MXFP4_32X32",
    "MXFP4_HADAMARD",
    "MXFP8_E4M3",
    "MXFP8_E4M3_32X32",
    "MXFP8_E5M2",
    "MXFP8_E5M2_32X32",
    "NVFP4",
    "NVFP4_16X16",
    "NVFP4_16X16_MAX256",
    "NVFP4_EDEN",
    "NVFP4_HADAMARD",
    "NVFP4_HADAMARD_MAX256",
    "NVFP4_MAX256",
    "NVFP4_ROW_SCALED",
    "NVFP4_ROW_SCALED_HADAMARD",
    "NVFP4_ROW_SCALED_HADAMARD_MAX256",
    "NVFP4_ROW_SCALED_MAX256",
    "Format",
    "get_format",
    "register_format",
]

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E2M1_MAX = 6.0

IDENTITY = with_kernels(Format("identity", element=None, max=float("inf")))


_FLOAT8 = {"e4m3": (torch.float8_e4m3fn, E4M3_MAX), "e5m2": (torch.float8_e5m2, E5M2_MAX)}


def _float8(
    kind: str, granularity: str, block: tuple[int | None, int | None], pow2_scale: bool = False
) -> Format:
    name = f"fp8_{kind}_{granularity}"
    return with_kernels(Format(name, *_FLOAT8[kind], block, torch.float32, pow2_scale))


def _mx(kind: str, block: tuple[int, int]) -> Format:
    name = f"mxfp8_{kind}" if block[0] == 1 else f"mxfp8_{kind}_{block[0]}x{block[1]}"
    return with_kernels(
        Format(name, *_FLOAT8[kind], block, torch.float8_e8m0fnu, pow2_scale=True, ragged=False)
    )


def _mxfp4(name: str, block: tuple[int, int] = (1, 32), hadamard: bool = False) -> Format:
    return with_kernels(
        Format(
            name,
            torch.float4_e2m1fn_x2,
            E2M1_MAX,
            block,
            torch.float8_e8m0fnu,
            pow2_scale=True,
            ragged=False,
            elements_per_byte=2,
            hadamard=hadamard,
        )
    )


def _nvfp4(
    name: str,
    block: tuple[int, int] = (1, 16),
    tensor_block: tuple[int | None, None] = (None, None),
    hadamard: bool = False,
    scale_max: float = E4M3_MAX,
) -> Format:
    return with_kernels(
        Format(
            name,
            torch.float4_e2m1fn_x2,
            E2M1_MAX,
            block,
            torch.float8_e4m3fn,
            ragged=False,
            elements_per_byte=2,
            tensor_block=tensor_block,
            tensor_scale_max=scale_max * E2M1_MAX,
            hadamard=hadamard,
        )
    )


FP8_E4M3_TENSOR = _float8("e4m3", "tensor", (None, None))
FP8_E5M2_TENSOR = _float8("e5m2", "tensor", (None, None))
FP8_E4M3_ROW = _float8("e4m3", "row", (1, None))
FP8_E5M2_ROW = _float8("e5m2", "row", (1, None))

# Scales per block are powers of two unless the name says fp32_scale.
FP8_E4M3_1X128 = _float8("e4m3", "1x128", (1, 128), pow2_scale=True)
FP8_E5M2_1X128 = _float8("e5m2", "1x128", (1, 128), pow2_scale=True)
FP8_E4M3_128X128 = _float8("e4m3", "128x128", (128, 128), pow2_scale=True)
FP8_E5M2_128X128 = _float8("e5m2", "128x128", (128, 128), pow2_scale=True)
FP8_E4M3_1X128_FP32_SCALE = _float8("e4m3", "1x128_fp32_scale", (1, 128))
FP8_E5M2_1X128_FP32_SCALE = _float8("e5m2", "1x128_fp32_scale", (1, 128))
FP8_E4M3_128X128_FP32_SCALE = _float8("e4m3", "128x128_fp32_scale", (128, 128))
FP8_E5M2_128X128_FP32_SCALE = _float8("e5m2", "128x128_fp32_scale", (128, 128))

MXFP8_E4M3 = _mx("e4m3", (1, 32))
MXFP8_E5M2 = _mx("e5m2", (1, 32))
MXFP8_E4M3_32X32 = _mx("e4m3", (32, 32))
MXFP8_E5M2_32X32 = _mx("e5m2", (32, 32))

MXFP4 = _mxfp4("mxfp4")
MXFP4_32X32 = _mxfp4("mxfp4_32x32", (32, 32))
MXFP4_HADAMARD = _mxfp4("mxfp4_hadamard", hadamard=True)

NVFP4 = _nvfp4("nvfp4")
NVFP4_16X16 = _nvfp4("nvfp4_16x16", block=(16, 16))
NVFP4_ROW_SCALED = _nvfp4("nvfp4_row_scaled", tensor_block=(1, None))
NVFP4_HADAMARD = _nvfp4("nvfp4_hadamard", hadamard=True)
NVFP4_ROW_SCALED_HADAMARD = _nvfp4(
    "nvfp4_row_scaled_hadamard", tensor_block=(1, None), hadamard=True
)

# Block scales up to 256 instead of 448: room for one that is 1.5 times as large, as four over six tries.
NVFP4_MAX256 = _nvfp4("nvfp4_max256", scale_max=256.0)
NVFP4_16X16_MAX256 = _nvfp4("nvfp4_16x16_max256", block=(16, 16), scale_max=256.0)
NVFP4_ROW_SCALED_MAX256 = _nvfp4("nvfp4_row_scaled_max256", tensor_block=(1, None), scale_max=256.0)
NVFP4_HADAMARD_MAX256 = _nvfp4("nvfp4_hadamard_max256", hadamard=True, scale_max=256.0)
NVFP4_ROW_SCALED_HADAMARD_MAX256 = _nvfp4(
    "nvfp4_row_scaled_hadamard_max256", tensor_block=(1, None), hadamard=True, scale_max=256.0
)

# Rounded through their scales, under a rotation whose signs are drawn; the tensor scale decodes as it is.
NVFP4_EDEN = with_kernels(
    Format(
        "nvfp4_eden",
        torch.float4_e2m1fn_x2,
        E2M1_MAX,
        (1, 16),
        torch.float8_e4m3fn,
        ragged=False,
        elements_per_byte=2,
        hadamard=True,
        tensor_block=(None, None),
        drawn_signs=True,
    )
)
