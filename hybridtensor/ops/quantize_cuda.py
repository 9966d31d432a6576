"""Casting with kernels: what the operators in ``ops.quantize`` do on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridtensor.ops.cast import Cast, Hint, State
from hybridtensor.ops.cast_plan import key_of, plan_of
from hybridtensor.ops.kernel_library import on_device
from hybridtensor.ops.library import is_captured
from hybridtensor.ops.references.faces import define_faces


def quantize_cuda(
    x: Tensor,
    row: Cast | None,
    column: Cast | None,
    source: Cast | None,
    dtype: torch.dtype,
    state: State,
    out: list[Tensor] | None = None,
    hint: Hint | None = None,
) -> list[Tensor]:
    """Do what ``quantize`` says, with kernels, or into ``out`` what ``quantize_into`` says."""
    if x.numel() == 0:
        made = define_faces(x, row, column, source, dtype, state)
        return made if out is None else [target.copy_(t) for target, t in zip(out, made, strict=True)]
    _require_factors(state, row, column, source)
    x = _readable(x)
    if source is None or column is None:
        return _run(x, row, column, None, None, state, out, hint)
    if row is not None and row != source:
        of_row, of_column = (None, None) if out is None else (out[: _size(row)], out[_size(row) :])
        made = _run(x, row, None, None, None, state, of_row)
        return made + _run(x, None, column, source, dtype, state, of_column)
    return _run(x, row, column, source, dtype, state, out)


def writer_cuda(
    x: Tensor, row: Cast | None, column: Cast | None, source: Cast | None, dtype: torch.dtype, state: State,
    out: list[Tensor],
) -> Callable[[Tensor], object]:  # fmt: skip
    """Return what calls ``quantize_cuda`` with ``out``, worked out once where one cast makes all of it."""
    if x.numel() == 0 or _readable(x) is not x or (source is not None and row is not None and row != source):
        return lambda x: quantize_cuda(x, row, column, source, dtype, state, out)
    _require_factors(state, row, column, source)
    source = None if column is None else source
    plan = plan_of(key_of(x, row, column, source, None if source is None else dtype, state))

    def write(x: Tensor) -> None:
        with on_device(x.device):
            plan.run(x, state, out)

    return write


def _require_factors(state: State, *casts: Cast | None) -> None:
    if state.factors is None:
        for cast in casts:
            if cast is not None and cast.slot >= 0:
                raise ValueError(f"quantize: {cast} needs delayed scales, got none")


def _size(cast: Cast) -> int:
    """Return how many tensors a face has."""
    return 2 if cast.format.tensor_block is None else 3


def _readable(x: Tensor) -> Tensor:
    """Return ``x`` with rows that begin at multiples of 16 elements and bytes: threads read whole vectors.

    Kernels rely on it: for narrower reads Triton 3.6 lays tiles out in a way that it then reduces wrongly.
    """
    if x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    rows, columns = x.shape
    return x.new_empty(rows, -(-columns // 16) * 16)[:, :columns].copy_(x)


def _run(
    x: Tensor,
    row: Cast | None,
    column: Cast | None,
    source: Cast | None,
    held: torch.dtype | None,
    state: State,
    out: list[Tensor] | None,
    hint: Hint | None = None,
) -> list[Tensor]:
    """Cast by the plan for this kind of matrix."""
    plan = plan_of(key_of(x, row, column, source, held, state))
    with on_device(x.device):
        if hint is None or not plan.is_one_pow2_scale or is_captured():
            return plan.run(x, state, out)
        return plan.run_by(hint, x)


def measure_cuda(x: Tensor, row: Cast | None, column: Cast | None) -> tuple[Tensor, Tensor]:
    """Do what ``measure`` says, with a kernel."""
    x = _readable(x)
    measurement = plan_of(key_of(x, row, column, None, None, State())).measure
    if measurement is None:
        raise ValueError(f"measure: formats with scales per tensor or row are required, got {row} and {column}")
    with on_device(x.device):
        return measurement(x)


def measurer_cuda(x: Tensor, out: Tensor, row: Cast | None, column: Cast | None) -> Callable[[Tensor], object] | None:
    """Return what ``measurer`` returns, or None if a kernel cannot read ``x``."""
    if _readable(x) is not x:
        return None
    measurement = plan_of(key_of(x, row, column, None, None, State())).measurement_into

    def run(x: Tensor) -> None:
        with on_device(x.device):
            measurement(x, out)

    return run
