"""Triton's interpreter, for kernels on a machine without a GPU: set up before Triton is imported.

It rounds to bfloat16 wrongly; ``repair`` has ml_dtypes do that. Kernels round to FP8 by themselves there.
"""

import importlib
import os

import ml_dtypes
import numpy as np

_DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


def use():
    """Run kernels in the interpreter from now on, if Triton is there."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        interpreter = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return
    theirs = interpreter._convert_float

    def convert(x, source, target, rounding):
        names = str(source), str(target)
        if not set(names) <= set(_DTYPES):
            return theirs(x, source, target, rounding)
        values = np.ascontiguousarray(x).view(_DTYPES[names[0]])
        with np.errstate(over="ignore", invalid="ignore"):
            result = values.astype(_DTYPES[names[1]])
        return result.view(f"uint{8 * result.itemsize}").reshape(x.shape)

    interpreter._convert_float = convert
