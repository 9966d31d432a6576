"""Matrices that are computed while a kernel reads them, so that they are never stored.

Each value is rounded to the dtype of what it is computed of, as if it had been stored.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# What a matrix is computed of.
GATED = tl.constexpr(1)
NORMED = tl.constexpr(2)


@triton.jit
def sigmoid_denominator(x, GPU: tl.constexpr):
    """Return ``1 + exp(-x)``, on a GPU by the function that torch's kernels call; the interpreter has another."""
    return 1.0 + (libdevice.exp(-x) if GPU else tl.exp(-x))


@triton.jit
def gated(gate, up, KIND: tl.constexpr, GPU: tl.constexpr):
    """Return ``silu(gate) * up`` of fp32 values, rounded as the separate operations of torch in ``KIND``, as fp32."""
    activated = tl.div_rn(gate, sigmoid_denominator(gate, GPU)).to(KIND).to(tl.float32)
    return (activated * up).to(KIND).to(tl.float32)


@triton.jit
def normed(x, factor, weight, KIND: tl.constexpr):
    """Return ``weight * (factor * x)`` of fp32 values, rounded once to ``KIND``, as fp32."""
    return (weight * (factor * x)).to(KIND).to(tl.float32)
