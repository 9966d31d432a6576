"""Matrices that a cast computes while it reads what they are made of, so that they are never stored.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from hybridtensor.kernels.groups import Address, GatedMatrix, Matrix, NormedMatrix

_ALIGNMENT = 16  # bytes
_FAR = 2**23  # between rows: beyond, offsets in a tile of 128 would take 64 bits


def like_rows(x: Tensor, rows: int) -> Tensor:
    """Return zeros that lie as ``rows`` rows of a matrix ``[M, K]`` with contiguous rows would."""
    return x.new_zeros(rows, x.stride(0))[:, : x.shape[1]]


class Gated(NamedTuple):
    """The matrix ``silu(x) * up``, ``[M, K]``, each operation rounded to the dtype of ``x``."""

    up: Tensor

    def matrix(self, x: Tensor) -> Tensor:
        return F.silu(x) * self.up

    def with_rows(self, rows: int) -> Gated:
        """Return the same of another number of rows, whose values do not matter."""
        return Gated(like_rows(self.up, rows))

    def is_readable(self) -> bool:
        """Return whether kernels can read the operands with the layout of ``x``."""
        along, across = self.up.stride()
        near = along < _FAR and along % 16 == 0
        return across == 1 and near and self.up.data_ptr() % _ALIGNMENT == 0

    def key(self) -> tuple[int, ...]:
        """Return a key of what Triton specializes on, except addresses."""
        return GATED, self.up.stride(0)

    def of(self, plain: Matrix, addresses: tuple[Address, ...]) -> GatedMatrix:
        """Return the matrix as a kernel argument."""
        return GatedMatrix(*plain, addresses[0], self.up.stride(0))


class Normed(NamedTuple):
    """The matrix ``weight * (factor * x)`` in fp32, rounded once; ``factor`` fp32 ``[M]``, ``weight`` ``[K]``."""

    factor: Tensor
    weight: Tensor

    def matrix(self, x: Tensor) -> Tensor:
        return (self.weight.float() * (self.factor[:, None] * x.float())).to(x.dtype)

    def with_rows(self, rows: int) -> Normed:
        """Return the same of another number of rows, whose values do not matter."""
        return Normed(self.factor.new_zeros(rows), self.weight)

    def is_readable(self) -> bool:
        """Return whether kernels can read the operands with the layout of ``x``."""
        parts = (self.factor, self.weight)
        return all(part.stride(0) == 1 and part.data_ptr() % _ALIGNMENT == 0 for part in parts)

    def key(self) -> tuple[int, ...]:
        """Return a key of what Triton specializes on, except addresses."""
        return (NORMED,)

    def of(self, plain: Matrix, addresses: tuple[Address, ...]) -> NormedMatrix:
        """Return the matrix as a kernel argument."""
        return NormedMatrix(*plain, *addresses)


Prologue = Gated | Normed
MatrixArgument = Matrix | GatedMatrix | NormedMatrix
NONE, GATED, NORMED = range(3)  # as the kernels name them


def as_argument(
    plain: Matrix, prologue: Prologue | None, take: Callable[[Tensor], Address]
) -> MatrixArgument:
    """Return a matrix, maybe with a prologue, as a kernel argument; ``take`` converts tensors."""
    return plain if prologue is None else prologue.of(plain, tuple(map(take, prologue)))
