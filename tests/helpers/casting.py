"""Casts by keyword, as lists of plain tensors: what tests of operators compare with their oracles."""

import warnings

import numpy as np
import torch
from kernels import require_kernels

from hybridtensor import ops
from hybridtensor.formats import get_format
from hybridtensor.ops import Cast, CastInputs, CastRequest
from hybridtensor.ops.cast import kernel
from hybridtensor.ops.cast.definition import reference_cast


def cast_of(name, **options):
    return Cast(get_format(name), **options)


OF_EACH_KIND = [
    cast_of("fp8_e4m3_tensor"),
    cast_of("fp8_e4m3_row"),
    cast_of("fp8_e5m2_tensor", slot=1),
    cast_of("fp8_e4m3_1x128"),
    cast_of("fp8_e5m2_128x128_fp32_scale"),
    cast_of("mxfp8_e4m3"),
    cast_of("nvfp4"),
    cast_of("nvfp4_row_scaled"),
    cast_of("nvfp4_16x16"),
    cast_of("nvfp4_hadamard", stream=12),
    cast_of("nvfp4_max256", rule="mse"),
    cast_of("nvfp4_16x16_max256", rule="mae"),
    cast_of("mxfp4", rule="even"),
    cast_of("mxfp4_32x32"),
]
"""A cast of each kind that matrices are cast by together."""


def bits(tensor):
    """Return what is stored as integers, flat, so that NaN are compared, too."""
    flat = tensor.reshape(-1).clone()
    return flat.view(torch.uint8 if flat.itemsize == 1 else torch.int32)


def request_of(row=None, column=None, source=None, dtype=None):
    return CastRequest(row, column, source, dtype if source is not None else None)


def inputs_of(
    encode_scale=None, amax_record=None, rounding=None, first_row=0, row_amax=None, column_amax=None, hint=None
):
    return CastInputs(encode_scale, amax_record, rounding, first_row, row_amax, column_amax, hint)


def quantize(x, *, row=None, column=None, source=None, dtype=None, **inputs):
    """Return the tensors of the rowwise face, then those of the columnwise one."""
    faces = ops.quantize(x, request_of(row, column, source, dtype or x.dtype), inputs_of(**inputs))
    return [tensor for face in faces if face is not None for tensor in face.tensors()]


def interpreted(
    x, *, row=None, column=None, source=None, dtype=None, out=None, **inputs,
):  # fmt: skip
    """Quantize with the kernels, on a CPU."""
    require_kernels("cpu")
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)  # numpy's word on what kernels may do
        return by_kernels(x, request_of(row, column, source, dtype or x.dtype), inputs_of(**inputs), out)


def by_kernels(x, request, inputs, out=None):
    """Return the tensors of the faces, or write them into ``out``; of no elements there is nothing to cast."""
    cast = kernel.cast_on_gpu(x, request, inputs) if x.numel() else reference_cast(request)
    if out is not None:
        cast.run_into(x, out, inputs)
        return out
    return [tensor for face in cast.run(x, inputs) if face is not None for tensor in face.tensors()]


def quantize_into(x, out, *, row=None, column=None, source=None, dtype=None, **inputs):
    ops.quantize_into(x, out, request_of(row, column, source, dtype or x.dtype), inputs_of(**inputs))


def measure(x, *, row=None, column=None):
    return ops.prepare(x, request_of(row, column)).measure(x)


def float8_quantize(x, format, *, pow2_scale=False):
    return quantize(x, row=Cast(format, pow2_scale=pow2_scale))


def float8_cast(x, encode_scale, amax_record, index, format):
    return quantize(x, row=Cast(format, slot=index), encode_scale=encode_scale, amax_record=amax_record)


def mx_quantize(x, format):
    return quantize(x, row=Cast(format))


def nvfp4_quantize(x, format, *, rounding=None, stream=0, first_row=0, transposed=False):
    cast = Cast(format, stream=-1 if rounding is None else stream)
    faces = {"column": cast} if transposed else {"row": cast}
    return quantize(x.t() if transposed else x, **faces, rounding=rounding, first_row=first_row)
