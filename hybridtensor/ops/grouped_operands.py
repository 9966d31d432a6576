"""Operands of the products of groups, as kernels take them: elements, and what scales them where.

Shape letters: ``T`` tokens, ``E`` groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.kernels.groups import Address, Side, SideConstants
from hybridtensor.ops.dequantize import face_values, multipliable_values, signs_of, without_signs
from hybridtensor.ops.emulated_mm import sum_factors
from hybridtensor.ops.face import Face, Groups

PARTIAL = 128  # entries of the contraction that share a scale of partial sums
_ELEMENTS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}  # as the kernels name them


class KernelOperand(NamedTuple):
    """An operand as grouped kernels take it: elements, factors of whole sums, and scales of partial sums."""

    data: Tensor
    factor: Tensor | None
    scales: Tensor | None
    side: int
    padded: bool
    turned: bool

    @property
    def rows(self) -> int:
        return self.data.shape[-1 if self.turned else -2]

    @property
    def constants(self) -> SideConstants:
        element = _ELEMENTS.get(self.data.dtype, 0)
        return SideConstants(element, self.factor is not None, self.side)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Strides of the tensors, in the order of ``Side``."""
        data, factor, scales = self.data, self.factor, self.scales
        along, other = (-2, -1) if self.turned else (-1, -2)
        by_group = by_row = 0
        if factor is not None:
            by_group = factor.stride(0) if factor.dim() == 3 else 0
            by_row = factor.stride(-2) if factor.dim() == 2 or factor.shape[1] > 1 else 0
        lie = 0 if data.dim() == 2 else data.stride(0), data.stride(other), data.stride(along)
        if scales is None:
            return (*lie, by_group, by_row, 0, 0, 0)
        between = scales.stride(0) if scales.dim() == 3 else 0
        return (*lie, by_group, by_row, between, scales.stride(-2), scales.stride(-1))

    def taken(self, take: Callable[[Tensor], Address], numbers: tuple[int, ...]) -> Side:
        """Return the kernel's argument; ``numbers`` are those of an operand that lies alike."""
        data = take(self.data)
        factor = data if self.factor is None else take(self.factor)
        scales = data if self.scales is None else take(self.scales)
        group, other, along, by_group, by_row, *of_scales = numbers
        return Side(data, group, other, along, factor, by_group, by_row, scales, *of_scales)


def kernel_operand(
    face: Face, groups: Groups, dtype: torch.dtype | None, *, rowwise: bool
) -> KernelOperand:
    """Return an operand: stored elements, or with ``dtype`` dequantized; ``rowwise`` if stored by row."""
    fmt, turned = face.format, face.dequantized_rowwise is not None
    if face.scale is None or face.follows_rowwise:
        data = face.qdata
        if face.scale is not None and face.dequantized_rowwise is not None:
            values = face_values(_by_rows(face, groups), face.dequantized_rowwise)
            data = values.view(*data.shape[:-1], values.shape[1])
        data = data if dtype is None else data.to(dtype)
        return KernelOperand(data, None, None, 0, padded=not turned, turned=turned)
    data, partial = face.qdata, fmt.block[1] == PARTIAL
    if dtype is not None:
        flat = _by_rows(face, groups) if rowwise and fmt.scale_fits else _as_matrix(face)
        (values,), partial = multipliable_values((flat,), dtype), fmt.scales_partial_sums
        data = values.view(*data.shape[:-1], values.shape[1])
    (factor,) = sum_factors((face,))
    return KernelOperand(
        data,
        factor,
        face.scale if partial else None,
        (fmt.block[0] or 1) if partial else 0,
        padded=True,
        turned=False,
    )


def _as_matrix(face: Face) -> Face:
    """Return a face as that of one matrix, without scales."""
    return face._replace(qdata=face.qdata.reshape(-1, face.qdata.shape[-1]))


def _by_rows(face: Face, groups: Groups) -> Face:
    """Return a rowwise face as that of one matrix with a scale per row."""
    spread = _over_matrices if face.qdata.dim() == 3 else over_groups
    fmt, matrix = face.format, _as_matrix(face)
    if face.scale is not None:
        matrix = matrix._replace(scale=spread(face.scale, fmt.block[0], face.qdata, groups))
    if face.tensor_scale is not None and fmt.tensor_block is not None:
        tensor_scale = without_signs(face.tensor_scale, fmt)
        tensor_scale = spread(tensor_scale, fmt.tensor_block[0], face.qdata, groups)
        if fmt.drawn_signs:  # of every matrix the same
            tensor_scale = torch.cat((tensor_scale, signs_of(face.tensor_scale[0])))
        matrix = matrix._replace(tensor_scale=tensor_scale)
    return matrix._replace(format=_of_rows(fmt))


def _over_matrices(scale: Tensor, across: int | None, qdata: Tensor, groups: Groups) -> Tensor:
    count, rows = qdata.shape[:2]
    if across is None:
        scale = scale.expand(count, rows, scale.shape[2])
    elif across > 1:
        scale = scale.repeat_interleave(across, dim=1)[:, :rows]
    return scale.reshape(count * rows, scale.shape[2])


def over_groups(scale: Tensor, across: int | None, qdata: Tensor, groups: Groups) -> Tensor:
    """Return a scale for each row of ``qdata``, from scales per ``across`` rows of each group (None: one per group)."""
    if across == 1:
        return scale
    rows = torch.arange(qdata.shape[0], device=qdata.device)
    ends = (
        rows[:0]
        if groups.ends is None
        else groups.ends.long().clamp(0, rows.shape[0]).cummax(0).values
    )
    group = torch.searchsorted(ends, rows, right=True).clamp(max=groups.num_groups - 1)
    if across is None:
        return scale[group, 0]
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    sizes = (((ends - starts + groups.step - 1) // groups.step).clamp(min=1)) * groups.step
    padded = sizes.cumsum(0) - sizes
    return scale[(padded[group] + rows - starts[group]) // across]


@functools.cache
def _of_rows(fmt: Format) -> Format:
    if fmt.drawn_signs:  # read by as many tensor scales as lie before the signs
        return fmt
    tensor_block = None if fmt.tensor_block is None else (1, None)
    block = (1, fmt.block[1])
    return dataclasses.replace(
        fmt, name=f"{fmt.name} by row", block=block, tensor_block=tensor_block
    )
