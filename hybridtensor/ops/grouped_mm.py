"""Multiply tokens that are sorted by expert with the experts' weights: one product per group.

| left | right | product |
|---|---|---|
| rowwise, of tokens ``[T, K]`` | either, of a stack ``[E, N, K]`` | ``[T, N]``: each row with its group's weight |
| columnwise, of tokens ``[N, T]`` | columnwise, of the same tokens ``[K, T]`` | ``[E, N, K]``: each group's sum |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.face import Face, FaceKind, Groups
from hybridtensor.ops.flops import count_flops
from hybridtensor.ops.groups import cut_columns, cut_rows, each_group, matrix_of
from hybridtensor.ops.library import define
from hybridtensor.ops.scaled_mm import (
    Backend,
    check_multipliable,
    matrix_product,
    select_backend,
)


def grouped_product(left: Face, right: Face, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Return the product of every group: the bits of ``product`` of each on the CPU.

    Rows of tokens that belong to no group give zeros, and so does a sum over no rows.

    Args:
        left: Of tokens, with their groups.
        right: Of a stack of weights, or of the same tokens.
        out_dtype: Dtype of the result.
        fast_accum: As for ``scaled_mm``.

    Raises:
        ValueError: If there are not as many weights as groups, or the formats' product is not
            defined.
    """
    groups = left.groups
    if groups is None or groups.ends is None:
        raise ValueError("grouped_mm: tokens with groups are required on the left, got none")
    check_multipliable(left.format, right.format)
    if right.qdata.dim() == 3 and right.qdata.shape[0] != groups.num_groups:
        raise ValueError(
            f"grouped_mm: a weight for each of {groups.num_groups} groups is required, got {right.qdata.shape[0]}"
        )
    operands = (left.tensors(), _text(left.kind), right.tensors(), _text(right.kind))
    out: Tensor = _OP(*operands, groups.ends, groups.num_groups, groups.step, out_dtype, fast_accum)
    return out


def select_grouped_backend(
    left: Format, right: Format, out_dtype: torch.dtype, device: torch.device
) -> Backend:
    """Decide how the products of groups run on ``device``, as ``select_backend`` does for one."""
    one = select_backend(left, right, out_dtype, device)
    return Backend(one.name, f"group by group, {one.reason}")


def _text(kind: FaceKind) -> str:
    dtype = kind.dequantized_rowwise
    return f"{kind.format.name}|{'' if dtype is None else str(dtype).removeprefix('torch.')}"


def _kind(text: str) -> FaceKind:
    name, dtype = text.split("|")
    return FaceKind(get_format(name), getattr(torch, dtype) if dtype else None)


def _others(tensors: list[Tensor], text: str) -> int:
    """Return the rows of a face, or of each face of a stack."""
    kind, (rows, width) = _kind(text), tensors[0].shape[-2:]
    per_byte = 1 if kind.format.is_identity else kind.format.elements_per_byte
    return rows if kind.dequantized_rowwise is None else width * per_byte


def _shape(
    left: list[Tensor], left_kind: str, right: list[Tensor], right_kind: str, count: int
) -> tuple[int, ...]:
    rows, columns = _others(left, left_kind), _others(right, right_kind)
    return (rows, columns) if right[0].dim() == 3 else (count, rows, columns)


def _reference(
    left: list[Tensor],
    left_kind: str,
    right: list[Tensor],
    right_kind: str,
    ends: Tensor,
    count: int,
    step: int,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    a, b = Face.of(left, _kind(left_kind)), Face.of(right, _kind(right_kind))
    shape = _shape(left, left_kind, right, right_kind, count)
    out = left[0].new_zeros(shape, dtype=out_dtype)
    by_row = right[0].dim() == 3
    for group in each_group(Groups(count, ends, step), _room(left[0], a, by_row)):
        if group.start == group.stop:
            continue
        one = cut_rows(a, group) if by_row else cut_columns(a, group)
        other = matrix_of(b, group.number) if by_row else cut_columns(b, group)
        target = out[group.start : group.stop] if by_row else out[group.number]
        target.copy_(matrix_product(one, other, out_dtype=out_dtype, fast_accum=fast_accum))
    return out


def _room(qdata: Tensor, face: Face, by_row: bool) -> int:
    """Return how many tokens there can be."""
    if by_row or face.dequantized_rowwise is not None:
        return qdata.shape[0]
    return qdata.shape[1] * face.format.elements_per_byte


def _fake(
    left: list[Tensor],
    left_kind: str,
    right: list[Tensor],
    right_kind: str,
    ends: Tensor,
    count: int,
    step: int,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    shape = _shape(left, left_kind, right, right_kind, count)
    return left[0].new_empty(shape, dtype=out_dtype)


_OP = define(
    "grouped_mm(Tensor[] left, str left_kind, Tensor[] right, str right_kind, Tensor ends, int count, "
    "int step, ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=_reference,
    fake=_fake,
)


def _flops(
    left: list[Tensor], left_kind: str, right: list[Tensor], right_kind: str, *_: Any, **__: Any
) -> Any:
    """Return the operations of all groups as torch counts those of ``_grouped_mm``: of all tokens."""
    rows, columns = _others(left, left_kind), _others(right, right_kind)
    a, by_row = Face.of(left, _kind(left_kind)), right[0].dim() == 3
    if by_row:
        return 2 * rows * columns * left[0].shape[1] * a.format.elements_per_byte
    return 2 * rows * columns * _room(left[0], a, by_row)


count_flops(_OP.overloadpacket, _flops)
