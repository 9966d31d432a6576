"""What a product counts as in ``torch.utils.flop_counter.FlopCounterMode``: as that of a plain layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from hybridtensor.formats import format_of_face


def product_flops(
    left: list[Tensor],
    left_format: str,
    right: list[Tensor],
    right_format: str,
    *_: object,
    **__: object,
) -> int | torch.SymInt:
    """Return the floating-point operations of ``scaled_mm``, whose arguments these are, as torch counts those of
    ``mm``; casts and scales are none."""
    (rows, entries), (columns, others) = (
        _extents(face[0], name) for face, name in ((left, left_format), (right, right_format))
    )
    flops: int | torch.SymInt
    flops = 2 * rows * columns * torch.sym_min(entries, others)  # no guard of a traced shape
    return flops


def _extents(codes: Tensor, name: str) -> tuple[int, int]:
    return codes.shape[0], codes.shape[1] * format_of_face(name).elements_per_byte


def count_as_product(operator: object) -> None:
    """Register an operator with ``scaled_mm``'s arguments in torch's FLOP counter."""
    count_flops(operator, product_flops)


def count_flops(operator: object, formula: Callable[..., object]) -> None:
    """Register an operator's FLOP formula in torch's counter."""
    _torch_counter().register_flop_formula(operator, get_raw=True)(formula)


def _torch_counter() -> ModuleType:
    """Import torch's counter, which copies the formulas; silence its message about Triton."""
    # Imported without Triton, the module prints that it does not count Triton kernels.
    logger = logging.getLogger("torch.utils.flop_counter")
    before, logger.disabled = logger.disabled, True
    try:
        import torch.utils.flop_counter as counter
    finally:
        logger.disabled = before
    return counter
