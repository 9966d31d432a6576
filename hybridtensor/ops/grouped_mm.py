"""Multiply tokens that are sorted by expert with the experts' weights: one product per group.

| left | right | product |
|---|---|---|
| rowwise, of tokens ``[T, K]`` | either, of a stack ``[E, N, K]`` | ``[T, N]``: each row with its group's weight |
| columnwise, of tokens ``[N, T]`` | columnwise, of the same tokens ``[K, T]`` | ``[E, N, K]``: each group's sum |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.cast.planning import aligned
from hybridtensor.ops.face import Face, FaceKind, Groups
from hybridtensor.ops.flops import count_flops
from hybridtensor.ops.grouped_kernel import (
    multiplies_codes,
    multiply_groups,
    reencodes_weights,
)
from hybridtensor.ops.groups import checked, cut_columns, cut_rows, each_group, matrix_of
from hybridtensor.ops.library import define, implement, runs_directly
from hybridtensor.ops.scaled_mm import (
    Backend,
    check_multipliable,
    matrix_product,
    select_backend,
)


def grouped_product(
    left: Face, right: Face, out_dtype: torch.dtype, fast_accum: bool, direct: bool = False
) -> Tensor:
    """Return the product of every group: the bits of ``product`` of each on the CPU."""
    groups = left.groups
    if groups is None or groups.ends is None:
        raise ValueError("grouped_mm: tokens with groups are required on the left, got none")
    check_multipliable(left.held_format, right.held_format)
    if right.qdata.dim() == 3 and right.qdata.shape[0] != groups.num_groups:
        raise ValueError(
            f"grouped_mm: a weight for each of {groups.num_groups} groups is required, got {right.qdata.shape[0]}"
        )
    if left.qdata.is_cuda and (direct or runs_directly(left.qdata)):
        return by_kernels(left, right, groups, out_dtype, fast_accum)
    operands = (left.tensors(), _text(left.kind), right.tensors(), _text(right.kind))
    return _OP(*operands, groups.ends, groups.num_groups, groups.step, out_dtype, fast_accum)


def select_grouped_backend(
    left: Format,
    right: Format,
    out_dtype: torch.dtype,
    device: torch.device,
    *,
    of_weights: bool = True,
) -> Backend:
    """Decide how grouped products run on ``device``; see ``select_backend``.

    ``of_weights`` says that the right operand is a stack of weights, not tokens.
    """
    one = select_backend(left, right, out_dtype, device)
    if device.type != "cuda" or torch.version.hip is not None:
        return Backend(one.name, f"group by group, {one.reason}")
    if one.name == "high precision":
        return one
    if multiplies_codes(left, right, device):
        return Backend("native", "FP8 matrix units, in a grouped kernel")
    if of_weights and reencodes_weights(left, right, device):
        return Backend(
            "native", "FP8 matrix units, in a grouped kernel, of MXFP4 re-encoded to E4M3"
        )
    if not (left.has_kernels and right.has_kernels):
        return Backend("emulated", f"group by group, {one.reason}")
    reason = one.reason if one.name == "emulated" else f"no grouped product of {left} and {right}"
    return Backend("emulated", f"{reason}; its values, by hybridtensor's grouped kernel")


# Schemas of operators have no type for formats: they are sent as text.
def _text(kind: FaceKind) -> str:
    dtype = kind.dequantized_rowwise
    return f"{kind.format.name}|{'' if dtype is None else str(dtype).removeprefix('torch.')}"


def _kind(text: str) -> FaceKind:
    name, dtype = text.split("|")
    return FaceKind(get_format(name), getattr(torch, dtype) if dtype else None)


def _others(face: Face) -> int:
    """Return the rows of a face, or of each face of a stack."""
    rows, width = face.qdata.shape[-2:]
    per_byte = 1 if face.format.is_identity else face.format.elements_per_byte
    return rows if face.dequantized_rowwise is None else width * per_byte


def _shape(left: Face, right: Face, groups: Groups) -> tuple[int, ...]:
    rows, columns = _others(left), _others(right)
    return (rows, columns) if right.qdata.dim() == 3 else (groups.num_groups, rows, columns)


def reference(
    left: Face, right: Face, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Reference definition of the product of every group: a loop that synchronizes with the device."""
    out = left.qdata.new_zeros(_shape(left, right, groups), dtype=out_dtype)
    by_row = right.qdata.dim() == 3
    for group in each_group(groups, _room(left, by_row)):
        if group.start == group.stop:
            continue
        one = cut_rows(left, group) if by_row else cut_columns(left, group)
        other = matrix_of(right, group.number) if by_row else cut_columns(right, group)
        target = out[group.start : group.stop] if by_row else out[group.number]
        target.copy_(matrix_product(one, other, None, out_dtype, fast_accum))
    return out


def by_kernels(
    left: Face, right: Face, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Run kernels without synchronizing with the device."""
    if torch.version.hip is not None or not (left.format.has_kernels and right.format.has_kernels):
        return reference(left, right, groups, out_dtype, fast_accum)
    shape, qdata = _shape(left, right, groups), left.qdata
    if 0 in (*shape, *qdata.shape, *right.qdata.shape):
        return qdata.new_zeros(shape, dtype=out_dtype)
    checked(groups, _room(left, right.qdata.dim() == 3))
    groups = groups._replace(ends=aligned(groups.ends))
    return multiply_groups(left, right, groups, out_dtype, fast_accum)


def _operator(
    run: Callable[[Face, Face, Groups, torch.dtype, bool], Tensor],
) -> Callable[..., Tensor]:
    """Return a function with the operator's arguments."""

    def on_arguments(
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
        return run(a, b, Groups(count, ends, step), out_dtype, fast_accum)

    return on_arguments


def _room(face: Face, by_row: bool) -> int:
    """Return an upper bound of the number of tokens."""
    if by_row or face.dequantized_rowwise is not None:
        return face.qdata.shape[0]
    return face.qdata.shape[1] * face.format.elements_per_byte


def _fake(
    left: Face, right: Face, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    return left.qdata.new_empty(_shape(left, right, groups), dtype=out_dtype)


_OP = define(
    "grouped_mm(Tensor[] left, str left_kind, Tensor[] right, str right_kind, Tensor ends, int count, "
    "int step, ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=_operator(reference),
    fake=_operator(_fake),
)
implement("grouped_mm", _operator(by_kernels))


def _flops(
    left: list[Tensor],
    left_kind: str,
    right: list[Tensor],
    right_kind: str,
    *_: object,
    **__: object,
) -> int:
    """Count the operations of all groups as torch does for ``_grouped_mm``: by all tokens."""
    # All tokens, also those of no group: where groups end is known on the device only.
    a, b = Face.of(left, _kind(left_kind)), Face.of(right, _kind(right_kind))
    by_row = right[0].dim() == 3
    along = a.qdata.shape[1] * a.format.elements_per_byte if by_row else _room(a, by_row)
    return 2 * _others(a) * _others(b) * along


count_flops(_OP.overloadpacket, _flops)
