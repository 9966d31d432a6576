"""Measuring the operands and products of one step as they run.

Of every face a stretch along its first axis is measured, which moves from sample to sample; of every product the same
stretches of both operands. Nothing synchronizes with the device, except the offsets of experts' tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtensor.layers import layers_of
from hybridtensor.ops import Face
from hybridtensor.subclasses.observing import Observer
from hybridtensor.watching.operands import Call, Values
from hybridtensor.watching.statistics import (
    Part,
    face_sizes,
    measure_face,
    measure_product,
    part_of,
)
from hybridtensor.watching.sums import GEMMS, OPERANDS, Sums, Watched, watched_layers

_OF_PRODUCT = 256  # entries of each operand


class Sampler(Observer):
    """Observer of one step: sums of measurements, the order of faces, and unmeasured products with the reason."""

    def __init__(self, model: torch.nn.Module, rows: int) -> None:
        self.layers, device = watched_layers(model)
        self._model, self._rows, self._turn = model, rows, 0
        self.sums = Sums(self.layers, device)
        self.order: dict[tuple[int, int], None] = {}
        self.unseen: dict[tuple[int, str], str] = {}
        self._calls: dict[int, Call] = {}
        self._now: Call | None = None

    def begin(self, turn: int) -> None:
        self._turn = turn
        self.sums.clear()
        self.order.clear()
        self.unseen.clear()
        self.end()

    def measured(self) -> list[Watched]:
        """Return the layers with their present recipes."""
        for layer in layers_of(self._model):
            recipe = layer.recipe
            known = None if recipe is None else self.layers.get(id(recipe.state))
            if known is not None and recipe is not None:
                self.layers[id(recipe.state)] = known._replace(config=recipe.config)
        return list(self.layers.values())

    def end(self) -> None:
        self._calls.clear()
        self._now = None

    # -- what layers tell

    def observe_operand(self, layer: object, role: str, values: Tensor, call: object) -> None:
        self._now = None
        if id(layer) in self.layers and call is not None:
            # ``Call`` refers to the call, so that no other one gets its id meanwhile.
            self._now = self._calls.setdefault(id(call), Call(call, self._turn))
            self._now.add(role, values)

    @torch.no_grad()
    def observe_product(
        self, layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype
    ) -> None:
        watched, now = self.layers.get(id(layer)), self._now
        if watched is None or now is None:
            return
        # Out of sight of dispatch modes: selective checkpointing keeps results, and finds them changed if they are
        # sums, and a counter of FLOPs counts products.
        with _disable_current_modes():
            if gemm == "output" and left.groups is not None:
                now.choose(left.groups, left.qdata.shape[0])
            reason = self._measure(watched, now, gemm, left, right)
        if reason is not None:
            self.unseen.setdefault((watched.number, gemm), reason)
        if gemm == "output":
            now.operands.pop("input", None)
        elif gemm == "grad_weight":
            self._calls.pop(id(now.key), None)

    # -- measuring

    def _measure(
        self, watched: Watched, now: Call, gemm: str, left: Face, right: Face
    ) -> str | None:
        """Measure a product and its operands; return the reason if it is not measured, or None."""
        if left.groups is not None and now.expert is None:
            self._calls.pop(id(now.key), None)
            return "no expert had tokens"
        now.take()
        first, second = GEMMS[gemm]
        a = self._measured(watched, now, first, left)
        b = self._measured(watched, now, second, right)
        if a is None or b is None:
            role = OPERANDS[first if a is None else second][0]
            where = "in whole blocks on this rank" if role == "weight" else "on this rank"
            return f"the values of its {role} are not known {where}"
        product = _aligned(now, gemm, a, b)
        if product is None:
            return "a rotation goes across the parts of its weight"
        target = self.sums.at(watched.place + now.place).products[gemm]
        target.add_(measure_product(*product).square_())
        return None

    def _measured(self, watched: Watched, now: Call, place: int, face: Face) -> Part | None:
        """Measure a part of a face and return it; None if its values are unknown."""
        role, direction = OPERANDS[place]
        known = now.known(role, direction)
        if known is None:
            return None
        if now.expert is not None:
            face = now.expert.face(face, role, direction)
        part = self._part(now, role, direction, known, face)
        if part is not None and face.scale is not None:
            self._add_face(watched, now, place, known, part)
            self.order.setdefault((watched.number, place))
        return part

    def _add_face(self, watched: Watched, now: Call, place: int, known: Values, part: Part) -> None:
        """Add a face's numbers to the sums, and the amaxes of all experts."""
        numbers = measure_face(part, known.amaxes[now.place - known.place])
        at = watched.place + now.place
        target = self.sums.at(at).faces[place]
        target.counts.add_(numbers.counts)
        target.norms.add_(numbers.norms.square_())
        torch.maximum(target.maxima, numbers.maxima, out=target.maxima)  # NaN stays
        if len(known.amaxes) > 1:
            self.sums.add_amaxes(watched.place + known.place, place, known.amaxes)
        self.sums.add_sizes(at, place, face_sizes(part))

    def _part(self, now: Call, role: str, direction: str, known: Values, face: Face) -> Part | None:
        """Slice the measured stretch of a face; None if the known part ends within a block."""
        rowwise = direction == "rowwise"
        if role == "input" and not rowwise and now.input_columns is not None:
            return part_of(face, known.matrix, now.input_columns[1], known.matrix.shape[0])
        matrix = known.matrix if rowwise else known.matrix.t()
        before = 0  # entries of the face that others know
        if known.dim is not None:
            axis = known.dim if rowwise else 1 - known.dim
            if not _in_whole_blocks(face, axis, known.first, matrix.shape[axis]):
                return None
            if axis == 1:
                face = face.cut(1, known.first, matrix.shape[1])
            else:
                before = known.first
        first, count = now.stretch(matrix.shape[0], self._rows)
        return part_of(face, matrix[first : first + count], before + first, count)


def _in_whole_blocks(face: Face, axis: int, first: int, count: int) -> bool:
    """Return whether ``count`` entries from ``first`` on are whole blocks of a face."""
    dim, fmt = face.stored_dim(axis), face.format
    per_byte = fmt.elements_per_byte if face.scale is not None and dim == 1 else 1
    step = max(fmt.block[dim] or 1, per_byte, fmt.step if dim == 1 and fmt.drawn_signs else 1)
    last = first + count
    return first % step == 0 and (last % step == 0 or last == face.qdata.shape[dim] * per_byte)


def _aligned(now: Call, gemm: str, left: Part, right: Part) -> tuple[Part, Part] | None:
    """Return both operands, cut to the locally known contraction; None if that cuts a rotated block."""
    first, extent = 0, right.values.shape[1]
    contracted = {"output": 1, "grad_input": 0}.get(gemm)  # axis of the weight
    weight = now.operands.get("weight")
    if weight is not None and weight.dim is not None and weight.dim == contracted:
        first = weight.first
    whole = first == 0 and left.values.shape[1] == extent
    together = left.face.format.step
    if not whole and left.face.format.hadamard and (first % together or extent % together):
        return None
    cut = slice(first, first + extent)
    left = left._replace(
        values=left.values[:_OF_PRODUCT, cut], quantized=left.quantized[:_OF_PRODUCT, cut]
    )
    return left, right._replace(
        values=right.values[:_OF_PRODUCT], quantized=right.quantized[:_OF_PRODUCT]
    )
