"""Layers that read one input, such as q, k and v, or gate and up, quantize it once and save its faces once.

In eager execution, by remembering the last input of a thread; in a compiled graph equal casts are one node anyway.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridtensor.ops import Held, Operand
from hybridtensor.ops.library import is_recorded

Operands = tuple[Operand | None, Operand | Held | None]


class _Last(threading.local):
    """The last input that was quantized by a thread, as long as it lives.

    Attributes:
        input: The input, weakly.
        key: Everything else that its operands depend on.
        operands: What it was quantized to.
        readers: The weights that it was quantized for.
    """

    input: weakref.ref[Tensor] | None = None
    key: tuple[Any, ...] = ()
    operands: Operands | None = None
    readers: tuple[Any, ...] = ()


_last = _Last()


def quantize_once(input: Tensor, weight: Any, how: tuple[Any, ...], make: Callable[[], Operands]) -> Operands:
    """Return ``make()``, or what it returned for another weight and this very input, unchanged since.

    A weight that comes again is a new pass: then nothing is taken over, as what changed the input (the replay of a CUDA
    graph) may not have been counted. Nothing is taken over, either, where what runs may run again without Python; nor
    of an input that autograd has not recorded: numpy, ``.data`` and collectives write buffers, and nothing counts it.

    Args:
        input: What is quantized.
        weight: What the operands are multiplied with.
        how: What else they depend on, compared with ``==``.
        make: Quantizes.
    """
    if torch.compiler.is_compiling() or input.grad_fn is None or is_recorded():
        return make()
    last, reader = _last, getattr(weight, "writes", None) or weakref.ref(weight)
    key = (input._version, _stream(input), *how)
    if last.input is not None and last.input() is input and last.key == key and not _is_among(reader, last.readers):
        operands = last.operands
        if operands is not None:
            last.readers = (*last.readers, reader)
            return operands
    operands = make()
    last.input, last.key, last.operands, last.readers = _until_death(input, last), key, operands, (reader,)
    return operands


def _until_death(input: Tensor, last: _Last) -> weakref.ref[Tensor]:
    """Return a reference whose end lets go of the operands, if they are still those of ``input``."""
    kept = last.__dict__  # of this thread; the input may die in another

    def forget(reference: weakref.ref[Tensor]) -> None:
        if kept.get("input") is reference:
            kept.update(input=None, operands=None)

    return weakref.ref(input, forget)


def _stream(input: Tensor) -> int:
    """Return what the cast is ordered by: work on another stream may run before it."""
    return torch._C._cuda_getCurrentRawStream(input.device.index) if input.is_cuda else 0


def _is_among(reader: Any, readers: tuple[Any, ...]) -> bool:
    """Whether a weight was seen before: by its memory, or by itself."""
    if isinstance(reader, weakref.ref):
        return any(isinstance(seen, weakref.ref) and seen() is reader() for seen in readers)
    return any(seen is reader for seen in readers)
