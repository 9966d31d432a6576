"""Triton kernels, imported when the first of them runs: the package itself needs neither Triton nor a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch
from torch import Tensor

from hybridtensor.ops.captures import loading_kernels
from hybridtensor.ops.face import bytewise

ALIGNMENT = 16  # bytes: kernels are compiled for addresses that are multiples


def aligned_fp32(count: int) -> int:
    """Return the entries that ``count`` fp32 numbers take in a buffer of several whose addresses are aligned."""
    return -(-count // 4) * 4


@functools.cache
def kernels(name: str) -> ModuleType:
    """Return the module ``hybridtensor.kernels.<name>``."""
    try:
        return importlib.import_module(f"hybridtensor.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            "hybridtensor: Triton is not installed, which quantizing on a GPU needs; pip install triton"
        ) from error


class Launch:
    """A kernel, its grid and its compile-time constants.

    The first call compiles, by way of Triton's own launcher. Later ones skip the launcher's analysis of every argument,
    most of the host time of a small kernel, and its hooks: whoever keeps a ``Launch`` promises that the arguments stay
    of the same kind, that is of the same dtype, and divisible by 16 or not, as before.

    Args:
        module: Name in ``hybridtensor.kernels``.
        kernel: Name in the module.
        programs: Number of programs.
        options: Triton's, such as ``num_warps``.
        constants: Values of the kernel's compile-time parameters, in order.

    Attributes:
        take: What makes an argument of a tensor that is in a group, or of any: its address, once that is all that
            counts.
        is_compiled: Whether groups of arguments may be plain tuples: Triton compiles by the names of their fields.
    """

    def __init__(
        self,
        module: str,
        kernel: str,
        programs: int,
        *,
        options: dict[str, int | None],
        **constants: object,
    ) -> None:
        self._kernel = getattr(kernels(module), kernel)
        self._programs, self._constants = programs, constants
        self._options = {name: value for name, value in options.items() if value is not None}
        self._values = tuple(constants.values())
        self._run: Callable[..., None] | None = None  # once it is compiled
        self.is_compiled = False
        self.take: Callable[[torch.Tensor], torch.Tensor | int] = bytewise

    def __call__(self, *arguments: object) -> None:
        """Launch on the current stream of the current device."""
        if self._run is not None:
            arguments = tuple(
                [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            )
        self.start(*arguments)

    def start(self, *taken: object) -> None:
        """Launch with tensors converted by ``take``."""
        run = self._run
        if run is None:
            with loading_kernels():
                compiled = self._kernel[(self._programs,)](
                    *taken, **self._constants, **self._options
                )
            if compiled is not None:  # the interpreter compiles nothing
                # Private in Triton: what its own launcher passes, without the launch metadata and both hooks.
                fixed = compiled.function, compiled.packed_metadata, None, None, None
                # ``_fixed`` first: the thread of a backward may launch as soon as ``_run`` is there.
                self._fixed, self._run = fixed, compiled.run
                self.is_compiled = True
                # Of a tensor the launcher would ask the address in Python, and the driver whether it is one of the
                # device.
                self.take = torch.Tensor.data_ptr
            return
        # Private in torch, and what Triton's launcher asks, too: no Stream object is made.
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        run(self._programs, 1, 1, stream, *self._fixed, *taken, *self._values)


def lasting(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Allocate a tensor with ``make`` on the device's current stream, in memory that may outlive a CUDA graph."""
    # While ``reduce-overhead`` records a graph, and in the call before, all memory that the thread allocates is of the
    # graph's pool, and torch raises if any of it is kept. Memory of another thread is not.
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def on_stream() -> Tensor:
        with torch.cuda.stream(stream), torch.inference_mode(False):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_stream).result()


def is_current(device: torch.device) -> bool:
    """Return whether kernels launch on this device without entering a context."""
    return device.type != "cuda" or device.index == torch._C._cuda_getDevice()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels launch on a device."""
    return _HERE if is_current(device) else torch.cuda.device(device)


_HERE = contextlib.nullcontext()
