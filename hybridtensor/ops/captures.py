"""CUDA graphs that are captured now: what torch does not say of them, the driver does."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hybridtensor.ops.library import is_captured, is_captured_on_cuda

Stream = int | tuple[int, int]
"""The handle of a CUDA stream, with the number of the capture while one is captured on it; 0 on a CPU."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED of cuda.h


def stream_of(tensor: Tensor) -> Stream:
    """Return the current stream of a tensor's device: what runs on one stream runs in order."""
    if not tensor.is_cuda:
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(tensor.device.index)
    if not is_captured_on_cuda():
        return stream
    status, number = ctypes.c_int(), ctypes.c_uint64()
    found = ctypes.byref(status), ctypes.byref(number), None, None, None
    _call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found)
    # That of a device that is not current may be in no capture.
    return (stream, number.value) if status.value else stream


@contextlib.contextmanager
def loading_kernels() -> Iterator[None]:
    """Let this thread load kernels also while a CUDA graph is captured."""
    # In the default mode loading a module invalidates the capture, without an error of its own; torch's allocator
    # changes the mode around cudaMalloc likewise. Warm-up steps need not load every kernel of a capture: where this has
    # no table for a list of weights, it casts each.
    if not is_captured():
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange = functools.partial(_call, "cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    exchange()  # ``mode`` becomes the former one
    try:
        yield
    finally:
        exchange()


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Call a function of the CUDA driver."""
    function: Callable[..., int] = getattr(_driver(), name)
    error = function(*arguments)
    if error:
        raise RuntimeError(f"hybridtensor: {name} of the CUDA driver failed with error {error}")
