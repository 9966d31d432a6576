"""Launches of the cast kernels, for matrices with one layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.kernels.groups import (
    Address,
    FaceConstants,
    Matrix,
    Output,
    Parts,
    Sizes,
    State,
    TileConstants,
)
from hybridtensor.ops.cast.request import NO_INPUTS, Cast, CastInputs
from hybridtensor.ops.cast.tiles import KernelFace, Tiling, converts_to_fp8, overlaps_kernels
from hybridtensor.ops.face import FaceKind, TensorLayout, numeric_layouts
from hybridtensor.ops.kernel_library import Launch
from hybridtensor.ops.prologue import Prologue, as_argument

Take = Callable[[Tensor], Address]
"""What makes an argument of a kernel of a tensor; see ``Launch.take``."""
Outs = tuple[list[Tensor], list[Tensor]]
"""Tensors of the rowwise and of the columnwise face."""

_WAVE = 8  # programs per multiprocessor that run at once
_NO_STRIDES = (0, 0)
_DTYPES = {torch.bfloat16: 1, torch.float16: 2}  # as the kernel names them
_FP32 = 3  # also for wider dtypes: no value of a face needs them


class FaceOutput:
    """The tensors of one face that a kernel writes: their format and layouts."""

    def __init__(
        self,
        kind: FaceKind | None,
        layouts: tuple[TensorLayout, ...],
        device: torch.device | None = None,
    ) -> None:
        self.kind, self.layouts = kind, layouts
        self.scale_strides = layouts[1].strides[-2:] if len(layouts) > 1 else _NO_STRIDES
        self._makers = [
            functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in layouts
        ]

    @classmethod
    def of(
        cls, cast: Cast | None, other: int, contraction: int, device: torch.device | None = None
    ) -> FaceOutput:
        if cast is None:
            return cls(None, ())
        layouts = numeric_layouts(cast.format, other, contraction)
        return cls(FaceKind(cast.format), layouts, device)

    def sizes(self, measured: int) -> Sizes:
        """Return the strides between several matrices' parts of a face; amaxes are ``measured`` apart."""
        apart = [layout.strides[0] if len(layout.shape) == 3 else 0 for layout in self.layouts]
        qdata, scales, tensor_scales = (*apart, 0, 0, 0)[:3]
        return Sizes(qdata, scales, tensor_scales, measured)

    def empty(self) -> list[Tensor]:
        return [make() for make in self._makers]

    def arguments(
        self, tensors: list[Tensor], amax: Address, nothing: Address, take: Take
    ) -> tuple[Address, Address, int, int, Address, Address]:
        """Return the fields of ``Output``; ``nothing`` replaces absent tensors, ``take`` converts tensors to
        arguments."""
        count = len(tensors)
        if not count:
            return nothing, nothing, 0, 0, nothing, amax
        other, along = self.scale_strides
        scales = take(tensors[1]) if count > 1 else nothing
        tensor_scales = take(tensors[2]) if count > 2 else nothing
        return take(tensors[0]), scales, other, along, tensor_scales, amax


class Several(NamedTuple):
    """Strides between matrices that are cast together: groups of rows, or a stack."""

    tokens: bool
    stride: int
    pitch: int
    row_sizes: Sizes
    column_sizes: Sizes

    def parts(self, plan: Address) -> Parts:
        return Parts(plan, self.stride, self.pitch)

    def arguments(self, plan: Address) -> tuple[Parts, Sizes, Sizes]:
        """Return the further arguments of the kernel that casts several matrices."""
        return self.parts(plan), self.row_sizes, self.column_sizes


class KernelTask(NamedTuple):
    """What the launches of one cast share: the matrix, its tiling, both faces and their outputs; ``source_dtype`` is
    that of the dequantized rowwise face, if the columnwise one is requantized from it, else None."""

    matrix: Matrix
    dtype: torch.dtype
    device: torch.device
    tiling: Tiling
    faces: tuple[KernelFace, KernelFace]
    outputs: tuple[FaceOutput, FaceOutput]
    source_dtype: torch.dtype | None
    several: Several | None = None

    def constants(
        self, column: KernelFace, record: tuple[bool, bool], *, store: bool
    ) -> dict[str, FaceConstants | TileConstants | int]:
        """Return the kernels' compile-time constants by name; ``store`` is whether the rowwise face is written."""
        m, k, row = self.matrix.M, self.matrix.K, self.faces[0]
        if self.several is not None and self.several.tokens:
            m = self.several.pitch
        return {
            "ROW_FACE": row.constants(self.dtype, k, record=record[0], store=store),
            "COLUMN_FACE": column.constants(
                self.source_dtype or self.dtype, m, record=record[1], store=True
            ),
            "TILE": self.tiling.constants,
            "REQUANTIZED": 0
            if self.source_dtype is None
            else _DTYPES.get(self.source_dtype, _FP32),
            "HW": converts_to_fp8(self.device),
        }

    def arguments(
        self,
        x: Tensor,
        outs: Outs,
        amaxes: tuple[Tensor, Tensor],
        launch: Launch,
        prologue: Prologue | None = None,
    ) -> tuple[tuple[Address, ...], tuple[Address, ...], tuple[Address, ...]]:
        """Return the matrix and both faces as kernel arguments; ``x`` also replaces absent tensors."""
        take, (row, column) = launch.take, self.outputs
        taken, (row_amax, column_amax) = take(x), amaxes
        of_row = row.arguments(outs[0], taken if row_amax is x else take(row_amax), taken, take)
        of_column = column.arguments(
            outs[1], taken if column_amax is x else take(column_amax), taken, take
        )
        matrix: tuple[Any, ...] = (taken, *self.matrix[1:])
        if prologue is not None:
            matrix = as_argument(Matrix(*matrix), prologue, take)
        if launch.is_compiled:
            return matrix, of_row, of_column
        return (
            matrix if prologue is not None else Matrix(*matrix),
            Output(*of_row),
            Output(*of_column),
        )


def _plain_output(
    tensors: list[Tensor], strides: tuple[int, ...], nothing: int, amax: int
) -> tuple[int, ...]:
    """Return the fields of ``Output`` of elements and scales, or of a face that is not requested."""
    if not tensors:
        return nothing, nothing, 0, 0, nothing, amax
    qdata, scales = tensors
    return qdata.data_ptr(), scales.data_ptr(), *strides, nothing, amax


class CastLaunch:
    """The kernel that casts; ``reverse`` starts at the end, where the pass before it ended and the cache is warm."""

    def __init__(
        self,
        task: KernelTask,
        *,
        column: KernelFace | None = None,
        record: tuple[bool, bool] = (False, False),
        store: bool,
        reverse: bool = False,
    ) -> None:
        row, own = task.faces
        column = own if column is None else column
        # Only after a kernel that measures, which lets this one start before it ends.
        following = reverse and overlaps_kernels(task.device)
        self._task, self._numbers = task, (row.slot, row.stream, column.slot, column.stream)
        several = task.several
        self._lies, self._strides = task.matrix[1:], [out.scale_strides for out in task.outputs]
        self._is_plain = all(len(o.layouts) in (0, 2) for o in task.outputs)
        constants: dict[str, object] = {
            **task.constants(column, record, store=store),
            "REVERSED": reverse,
            "FOLLOWING": following,
        }
        if several is not None:
            constants["TOKENS"] = several.tokens
        self._launch = Launch(
            "quantize" if several is None else "grouped_quantize",
            "cast_kernel" if several is None else "grouped_cast_kernel",
            task.tiling.number,
            options=task.tiling.options | ({"launch_pdl": True} if following else {}),
            **constants,
        )

    def __call__(
        self,
        x: Tensor,
        outs: Outs,
        amaxes: tuple[Tensor, Tensor],
        inputs: CastInputs,
        plan: Tensor | None = None,
    ) -> None:
        """Launch the cast of ``x``; ``plan`` says which rows each row of tiles has, for groups of rows."""
        launch, several = self._launch, self._task.several
        if inputs is NO_INPUTS and self._is_plain and launch.is_compiled:  # most casts
            at, (row_amax, column_amax) = x.data_ptr(), amaxes
            of_row = at if row_amax is x else row_amax.data_ptr()
            of_column = of_row if column_amax is row_amax else column_amax.data_ptr()
            (of_rows, of_columns), (row_strides, column_strides) = outs, self._strides
            launch.start(
                (at, *self._lies),
                _plain_output(of_rows, row_strides, at, of_row),
                _plain_output(of_columns, column_strides, at, of_column),
                (at, at, at),
                0,
                *self._numbers,
                *(
                    ()
                    if several is None
                    else several.arguments(at if plan is None else plan.data_ptr())
                ),
            )
            return
        matrix, row, column = self._task.arguments(x, outs, amaxes, launch, inputs.prologue)
        taken, first_row = matrix[0], 0
        state: tuple[Address, ...] = (taken, taken, taken)
        if inputs is not NO_INPUTS:
            given, first_row = (inputs[0], inputs.record, inputs[2]), inputs[3]
            state = tuple([taken if t is None else launch.take(t) for t in given])
        if not launch.is_compiled:
            state = State(*state)
        given_plan = taken if plan is None else launch.take(plan)
        of_several = () if several is None else several.arguments(given_plan)
        launch.start(matrix, row, column, state, first_row, *self._numbers, *of_several)


class RecastLaunch:
    """The kernel that recasts with the true amax."""

    def __init__(self, task: KernelTask, *, store: bool) -> None:
        programs = 2
        if task.device.type == "cuda":
            properties = torch.cuda.get_device_properties(task.device)
            # As many as run at once: they loop over the tiles if the scale changed, and seldom have anything to do.
            programs = _WAVE * properties.multi_processor_count
        self._task = task
        self._launch = Launch(
            "quantize",
            "recast_kernel",
            min(task.tiling.number, programs),
            options=task.tiling.options,
            **task.constants(task.faces[1], (False, False), store=store),
        )

    def __call__(
        self, x: Tensor, outs: Outs, now: Tensor, guess: Tensor, prologue: Prologue | None
    ) -> None:
        """Cast ``x`` again if the amax ``now`` gives another scale than ``guess``."""
        launch = self._launch
        arguments = self._task.arguments(x, outs, (now, now), launch, prologue)
        launch.start(*arguments, launch.take(guess))
