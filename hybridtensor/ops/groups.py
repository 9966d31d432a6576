"""Matrices with groups of rows, and stacks of matrices, as layers with several weights take them.

The tokens of a mixture of experts are a matrix ``[T, K]`` whose rows are sorted by expert; the experts' weights are a
stack ``[E, N, K]``. A scale never belongs to two experts: the faces are those of the matrices one by one, put together.

| face | elements | scales that span a group | other scales |
|---|---|---|---|
| of a stack, either | ``[E, other, contraction]`` | ``[E, ...]`` | ``[E, ...]`` |
| rowwise, of tokens | ``[T, K]`` | ``[E, 1, 1]`` | by row, or by block of padded rows |
| columnwise, of tokens | ``[K, P]`` | ``[E, 1 or K, 1]`` | by block of padded rows |

Shape letters: ``E`` experts, ``T`` tokens, ``N`` and ``K`` features, ``P`` padded rows: each group has whole steps of
them, at least one, so that no block crosses groups. What pads is zeros, and so are the rows that belong to no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.face import Face, Groups, TensorLayout, bytewise, face_layouts


class Group(NamedTuple):
    """The rows of one group: ``start`` to ``stop``, and ``size`` padded rows from ``padded`` on."""

    number: int
    start: int
    stop: int
    padded: int
    size: int


def padded_rows(rows: int, groups: Groups) -> int:
    """Return an upper bound of padded rows that does not depend on where groups end."""
    # A group pads by less than a step, an empty one by a whole one; what is left of the bound pads the rows of none.
    step = groups.step
    return (rows + step - 1) // step * step + groups.num_groups * step


def each_group(groups: Groups, rows: int) -> list[Group]:
    """Return the groups of a matrix; synchronizes with the device, and raises ValueError for bad ends."""
    ends = ends_of(groups).tolist()
    found, start, padded = [], 0, 0
    for index, stop in enumerate(ends):
        if not start <= stop <= rows:
            raise ValueError(
                f"grouped_mm: offsets that do not decrease, up to {rows} rows, are required, got {ends}"
            )
        size = max(-(-(stop - start) // groups.step), 1) * groups.step
        found.append(Group(index, start, stop, padded, size))
        start, padded = stop, padded + size
    return found


# Off by default: reading offsets waits for the device, in each grouped product.
_checks = False


def check_offsets(enabled: bool) -> bool:
    """Set whether offsets are checked on GPUs, and return the former setting."""
    global _checks
    before, _checks = _checks, enabled
    return before


def checked(groups: Groups, rows: int) -> None:
    """Raise ValueError for decreasing or too large offsets, if they are checked."""
    if _checks:
        each_group(groups, rows)


def rows_of_none(groups: Groups, found: Sequence[Group], rows: int) -> Group:
    """Return the rows after the last group, with that group's number."""
    last = found[-1]
    padded = last.padded + last.size
    return Group(last.number, last.stop, rows, padded, padded_rows(rows, groups) - padded)


def ends_of(groups: Groups) -> Tensor:
    """Return where the rows of each group end; raise ValueError for a stack."""
    if groups.ends is None:
        raise ValueError("grouped_mm: offsets are required, got a stack of matrices")
    return groups.ends


def stack_layouts(fmt: Format, count: int, other: int, contraction: int) -> list[TensorLayout]:
    """Return the layouts of the faces ``[other, contraction]`` of a stack of ``count`` matrices."""
    return [_stacked(layout, count) for layout in face_layouts(fmt, other, contraction)]


def _stacked(layout: TensorLayout, count: int) -> TensorLayout:
    rows, columns = layout.shape[-2:]
    return TensorLayout((count, rows, columns), (rows * columns, *layout.strides), layout.dtype)


def row_layouts(fmt: Format, groups: Groups, rows: int, columns: int) -> list[TensorLayout]:
    """Return the layouts of the rowwise face of grouped tokens ``[rows, columns]``."""
    layouts = list(face_layouts(fmt, rows, columns))
    blocks = [(1, None), fmt.block, fmt.tensor_block or (1, None)]
    for i, (across, _) in list(enumerate(blocks))[1 : len(layouts)]:
        if across is None:
            layouts[i] = _stacked(layouts[i], groups.num_groups)
        elif across > 1:
            layouts[i] = face_layouts(fmt, padded_rows(rows, groups), columns)[i]
    return layouts


def column_layouts(fmt: Format, groups: Groups, rows: int, columns: int) -> list[TensorLayout]:
    """Return the layouts of the columnwise face of grouped tokens ``[rows, columns]``, groups padded to blocks; raise
    ValueError if these are of other sizes."""
    if groups.step % fmt.step:
        raise ValueError(
            f"quantize_groups: a step that is a multiple of {fmt.step} is required for {fmt}, got {groups.step}"
        )
    layouts = list(face_layouts(fmt, columns, padded_rows(rows, groups)))
    blocks = [(1, 1), fmt.block, fmt.tensor_block or (1, 1)]
    for i, (_, along) in list(enumerate(blocks))[1 : len(layouts)]:
        if along is None:
            layouts[i] = _stacked(layouts[i], groups.num_groups)
    return layouts


def layouts_of(
    row: Format | None, column: Format | None, shape: Sequence[int], groups: Groups
) -> tuple[list[TensorLayout], list[TensorLayout]]:
    """Return the layouts of both faces, of tokens ``[T, K]`` or of a stack ``[E, N, K]``."""
    *_, rows, columns = shape
    if len(shape) == 3:
        count = shape[0]
        return (
            [] if row is None else stack_layouts(row, count, rows, columns),
            [] if column is None else stack_layouts(column, count, columns, rows),
        )
    return (
        [] if row is None else row_layouts(row, groups, rows, columns),
        [] if column is None else column_layouts(column, groups, rows, columns),
    )


def cut_rows(face: Face, group: Group) -> Face:
    """Slice the rowwise face of a group's rows."""
    rows = slice(group.start, group.stop)

    def part(scale: Tensor | None, block: tuple[int | None, int | None] | None) -> Tensor | None:
        across = None if block is None else block[0]
        if scale is None or across is None:
            return None if scale is None else scale[group.number]
        first = group.start if across == 1 else group.padded // across
        return scale.narrow(0, first, -(-(group.stop - group.start) // across))

    scale, tensor_scale = (
        part(face.scale, face.format.block),
        part(face.tensor_scale, face.format.tensor_block),
    )
    return Face(face.qdata[rows], scale, tensor_scale, face.format, face.dequantized_rowwise)


def cut_columns(face: Face, group: Group) -> Face:
    """Slice the columnwise face of a group's rows."""
    if face.dequantized_rowwise is not None:
        return cut_rows(face, group)
    fmt = face.format
    size = fmt.stored(group.stop - group.start)

    def part(scale: Tensor | None, block: tuple[int | None, int | None] | None) -> Tensor | None:
        along = None if block is None else block[1]
        if scale is None or along is None:
            return None if scale is None else scale[group.number]
        return scale.narrow(1, group.padded // along, -(-size // along))

    per_byte = fmt.elements_per_byte
    qdata = face.qdata.narrow(1, group.padded // per_byte, size // per_byte)
    return Face(qdata, part(face.scale, fmt.block), part(face.tensor_scale, fmt.tensor_block), fmt)


def matrix_of(face: Face, index: int) -> Face:
    """Return one matrix's face of a stack."""
    tensors = [None if t is None else t[index] for t in (face.qdata, face.scale, face.tensor_scale)]
    return face._replace(qdata=face.qdata[index], scale=tensors[1], tensor_scale=tensors[2])


def put_matrix(out: Sequence[Tensor], face: Face, index: int) -> None:
    """Write one matrix's face into its stack's."""
    for whole, tensor in zip(out, face.tensors(), strict=True):
        bytewise(whole[index]).copy_(bytewise(tensor))


def put_rows(out: Sequence[Tensor], face: Face, group: Group, *, spanning: bool = True) -> None:
    """Write a group's rowwise face into that of all tokens; without ``spanning`` no scales of whole groups."""
    _put(out, cut_rows(_face(out, face), group), face, None if spanning else 0)


def put_columns(out: Sequence[Tensor], face: Face, group: Group, *, spanning: bool = True) -> None:
    """Write a group's columnwise face into that of all tokens; see ``put_rows``."""
    whole = group._replace(stop=group.start + group.size)  # with what pads
    _put(out, cut_columns(_face(out, face), whole), face, None if spanning else 1)


def _face(tensors: Sequence[Tensor], like: Face) -> Face:
    return Face.of(list(tensors), like.kind)


def _put(out: Sequence[Tensor], target: Face, face: Face, axis: int | None) -> None:
    """Copy a face, except scales that span an axis."""
    blocks = (1, 1), face.format.block, face.format.tensor_block or (1, 1)
    for tensor, values, block in zip(target.tensors(), face.tensors(), blocks, strict=False):
        if axis is None or block[axis] is not None:
            bytewise(tensor).copy_(bytewise(values))
