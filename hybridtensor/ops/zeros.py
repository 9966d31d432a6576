"""Zeros that kernels raise to amaxes: fp32, many filled by one launch."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtensor.ops.captures import Stream, stream_of
from hybridtensor.ops.kernel_library import aligned_fp32, lasting
from hybridtensor.ops.library import is_captured, is_captured_on_cuda

_IN_CAPTURE = 4096  # numbers of a capture that are filled at once
_SINGLE = 256  # single numbers that are filled at once: 302 launches less in a step of Llama 1.2 B

_LOCK = threading.Lock()
# Where each capture takes zeros, and how many are taken, by device and stream. A weak reference: while
# ``reduce-overhead`` records a graph, torch raises if anything else than the graph's results keeps memory of its pool.
# While eager code is captured, amaxes of the weights' cached faces keep the memory from the first forward to the last
# backward.
_FILLED: dict[tuple[torch.device, Stream], tuple[weakref.ref[Tensor], int]] = {}
_READY: dict[tuple[int | None, int], list[Tensor]] = {}  # single zeros, by device and stream


def several_zeros(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Allocate fp32 zeros of several sizes at once, at addresses that kernels take."""
    rooms = list(map(aligned_fp32, sizes))
    with torch.inference_mode(False):
        memory = torch.zeros(sum(rooms), dtype=torch.float32, device=device)
        return [room[:size] for room, size in zip(memory.split(rooms), sizes, strict=True)]


def zeros(size: int, like: Tensor) -> Tensor:
    """Allocate fp32 zeros ``[size]`` on a tensor's device; while a CUDA graph is captured, those of many calls are
    filled by one launch."""
    # Amaxes of rows have a fill of their own: a few of them would use up what single ones share.
    if not is_captured() or 4 * size > _IN_CAPTURE:
        return like.new_zeros(size, dtype=torch.float32)
    key, room = (like.device, stream_of(like)), aligned_fp32(size)
    with _LOCK:
        known = _FILLED.get(key)
        memory, taken = (None, 0) if known is None else (known[0](), known[1])
        if memory is None or taken + room > len(memory):
            for other, (filled, _) in list(_FILLED.items()):
                if filled() is None:
                    del _FILLED[other]
            with torch.inference_mode(False):
                memory, taken = like.new_zeros(_IN_CAPTURE, dtype=torch.float32), 0
        _FILLED[key] = weakref.ref(memory), taken + room
        return memory[taken : taken + size]


def zero(like: Tensor) -> Tensor:
    """Return an unused fp32 zero ``[1]`` on a tensor's device."""
    device = like.device
    if device.type != "cuda" or is_captured_on_cuda():  # every replay raises it again
        return zeros(1, like)
    return one_of(device, torch._C._cuda_getCurrentRawStream(device.index))


def one_of(device: torch.device, stream: int) -> Tensor:
    """Return an unused zero that was filled on the current stream."""
    ready = _READY.setdefault((device.index, stream), [])
    while True:
        try:
            return ready.pop()  # forward and backward may run in two threads
        except IndexError:
            filled = lasting(functools.partial(_fill, device), device)
            ready.extend(filled[:, :1].unbind())


def _fill(device: torch.device) -> Tensor:
    return torch.zeros(_SINGLE, aligned_fp32(1), dtype=torch.float32, device=device)
