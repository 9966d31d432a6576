"""Measuring the operands and products of one step as they run.

Of every face, some entries along its first axis are measured, a stretch that moves from sample to
sample; of every product the same stretches of both operands. Nothing is read from the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.layers import layers_of
from hybridtensor.ops import Face
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.wrapper import WrapperTensor
from hybridtensor.watching.statistics import (
    Part,
    face_sizes,
    measure_face,
    measure_product,
    part_of,
)
from hybridtensor.watching.sums import GEMMS, OPERANDS, Sums, Watched, watched_layers

_ALIGNED = 128  # no block of a format is longer
_KEPT = 128  # features of an input that are kept until backward
_OF_PRODUCT = 256  # entries of each operand


class Values(NamedTuple):
    """Values of an operand that are known here.

    Attributes:
        matrix: ``[rows, columns]``; of a weight that ranks share, this rank's rows.
        amax: Their largest magnitude, NaN if there is one.
        first: The first of these rows in the operand.
    """

    matrix: Tensor
    amax: Tensor
    first: int = 0


class Call:
    """What is known of one forward until its backward.

    Attributes:
        key: What stands for it.
        forward: Whether the next product is that of the forward.
        operands: Values of operands, by role; that of the input until the forward has its product.
        input_columns: A stretch of the input's features for backward, ``[features, tokens]``; where it begins.
    """

    def __init__(self, key: object) -> None:
        self.key = key  # held, so that no other one gets its address
        self.forward = True
        self.operands: dict[str, Values] = {}
        self.input_columns: tuple[Values, int] | None = None


class Sampler:
    """Observer of one step.

    Args:
        model: Its converted layers are watched.
        rows: How many entries of each face are measured, at most.

    Attributes:
        layers: By the state that stands for them.
        sums: What is measured.
        order: Faces in the order in which they were first used: places of layer and operand.
        unseen: Names of layers with products that are not measured, and why.
    """

    def __init__(self, model: torch.nn.Module, rows: int) -> None:
        self.layers, device = watched_layers(model)
        self._model, self._rows, self._turn = model, rows, 0
        self.sums = Sums(self.layers, device)
        self.order: dict[tuple[int, int], None] = {}
        self.unseen: dict[str, str] = {}
        self._calls: dict[int, Call] = {}
        self._now: Call | None = None

    def begin(self, turn: int) -> None:
        """Begin another step."""
        self._turn = turn
        self.sums.clear()
        self.order.clear()
        self.end()

    def measured(self) -> list[Watched]:
        """Return the layers with the recipes that they have now, which may have changed since the last step."""
        for layer in layers_of(self._model):
            recipe = layer.recipe
            known = None if recipe is None else self.layers.get(id(recipe.state))
            if known is not None and recipe is not None:
                self.layers[id(recipe.state)] = known._replace(config=recipe.config)
        return list(self.layers.values())

    def end(self) -> None:
        """Let go of what was kept for a backward."""
        self._calls.clear()
        self._now = None

    # -- what layers tell

    @torch.no_grad()
    def note_operand(self, layer: object, role: str, values: Tensor, call: object) -> None:
        """See ``Observer.note_operand``."""
        if id(layer) not in self.layers:
            return
        self._now = now = self._calls.setdefault(id(call), Call(call))
        now.forward = role != "grad_output"
        if role == "weight":
            known = _of_weight(values)
        elif isinstance(values, WrapperTensor):
            known = None
        else:
            matrix = values.detach().reshape(-1, values.shape[-1])
            known = Values(matrix, _amax(matrix))
        if known is None or known.matrix.numel() == 0:
            return
        now.operands[role] = known
        if role == "input":
            first, count = self._stretch(known.matrix.shape[1], _KEPT)
            columns = known.matrix[:, first : first + count].t().contiguous()
            now.input_columns = Values(columns, known.amax), first

    @torch.no_grad()
    def note_product(
        self, layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype
    ) -> None:
        """See ``Observer.note_product``."""
        watched, now = self.layers.get(id(layer)), self._now
        if watched is None or now is None or now.forward != (gemm == "output"):
            return  # the last one: a forward without a backward is not told of
        if left.groups is not None or right.groups is not None:
            self.unseen[watched.name] = (
                "experts: where their tokens end is known on the device alone"
            )
            return
        first, second = GEMMS[gemm]
        a = self._measured(watched, now, first, left)
        b = self._measured(watched, now, second, right)
        product = None if a is None or b is None else _aligned(now, gemm, a, b)
        if product is not None:
            target = self.sums.at(watched.place).products[gemm]
            target.add_(measure_product(*product).square_())
        if gemm == "output":
            now.operands.pop("input", None)
            self._now = None
        elif gemm == "grad_weight":
            self._calls.pop(id(now.key), None)

    def note_read(self, layer: object, reader: str) -> None:
        """See ``Observer.note_read``: of no interest here."""

    # -- measuring

    def _measured(self, watched: Watched, now: Call, place: int, face: Face) -> Part | None:
        """Return the part of a face that is measured, after measuring it; None if its values are not known."""
        role, direction = OPERANDS[place]
        known = now.operands.get(role)
        if (role, direction) == ("input", "columnwise"):
            known = None if now.input_columns is None else now.input_columns[0]
        if known is None:
            return None
        part = self._part(now, role, direction, known, face)
        if part is not None and face.scale is not None:
            numbers = measure_face(part, known.amax)
            target = self.sums.at(watched.place).faces[place]
            target.counts.add_(numbers.counts)
            target.norms.add_(numbers.norms.square_())
            torch.maximum(target.maxima, numbers.maxima, out=target.maxima)  # NaN stays
            self.sums.add_sizes(watched.place, place, face_sizes(part))
            self.order.setdefault((watched.number, place))
        return part

    def _part(self, now: Call, role: str, direction: str, known: Values, face: Face) -> Part | None:
        matrix = known.matrix
        if direction == "rowwise":
            first, count = self._stretch(matrix.shape[0], self._rows)
            return part_of(face, matrix[first : first + count], known.first + first, count)
        if role == "input" and now.input_columns is not None:
            return part_of(face, matrix, now.input_columns[1], matrix.shape[0])
        cut = face if role != "weight" else _of_rows(face, known.first, matrix.shape[0])
        if cut is None:
            return None
        first, count = self._stretch(matrix.shape[1], self._rows)
        return part_of(cut, matrix[:, first : first + count].t(), first, count)

    def _stretch(self, extent: int, most: int) -> tuple[int, int]:
        """Return where this sample's stretch of an axis begins, and how long it is."""
        if extent <= most:
            return 0, extent
        steps = (extent - most) // _ALIGNED + 1
        return (self._turn * 7) % steps * _ALIGNED, most


def _of_rows(face: Face, first: int, rows: int) -> Face | None:
    """Return what a columnwise face has of a rank's rows; None where these end within a block."""
    dim = 0 if face.dequantized_rowwise is not None else 1
    extent = face.qdata.shape[dim] * (
        face.format.elements_per_byte if face.scale is not None and dim == 1 else 1
    )
    if rows == extent:
        return face
    step = 16 if face.format.hadamard else max(face.format.block[dim] or 1, 2)
    return None if first % step or rows % step else face.cut(dim, first, rows)


def _aligned(now: Call, gemm: str, left: Part, right: Part) -> tuple[Part, Part] | None:
    """Return as much of both operands as a product takes; of a gradient, where a weight is known in part, those
    features. None where they end within what is rotated together.
    """
    first, extent = 0, right.values.shape[1]
    if gemm == "grad_input":
        first = now.operands["weight"].first
    if first % 16 or (left.values.shape[1] != extent and extent % 16):
        return None
    cut = slice(first, first + extent)
    left = left._replace(
        values=left.values[:_OF_PRODUCT, cut], quantized=left.quantized[:_OF_PRODUCT, cut]
    )
    return left, right._replace(
        values=right.values[:_OF_PRODUCT], quantized=right.quantized[:_OF_PRODUCT]
    )


def _amax(matrix: Tensor) -> Tensor:
    """Return the largest magnitude, NaN if there is one; 0 of nothing."""
    if matrix.numel() == 0:
        return matrix.new_zeros(())
    norm: Tensor = torch.linalg.vector_norm(matrix, torch.inf)
    return norm


def _of_weight(weight: Any) -> Values | None:
    """Return the values of a weight that are known on this rank, or None."""
    first, part = 0, weight
    gathered = weight.record.gathered if isinstance(weight, HybridTensor) else None
    if gathered is not None:
        sharded = gathered.sharded
        if sharded.dim != 0:
            return None
        part, first = sharded.tensor, sharded.rank * -(-sharded.size[0] // sharded.num_ranks)
    if part.dim() != 2:
        return None
    if isinstance(part, MasterWeight):
        values: Tensor | None = part.source.detach()
    else:
        values = part.high_precision.current if part.record.values is not None else None
    return None if values is None else Values(values, _amax(values), first)
