"""Triton kernels, imported when the first of them runs: the package itself needs neither Triton nor
a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import torch


@functools.cache
def kernels(name: str) -> Any:
    """Return the module ``hybridtensor.kernels.<name>``.

    Raises:
        ImportError: If Triton is missing, with the command that installs it.
    """
    try:
        return importlib.import_module(f"hybridtensor.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            "hybridtensor: quantizing on a GPU needs Triton, got none; install it: pip install triton"
        ) from error


class Launch:
    """A kernel, its grid and its compile-time constants.

    The first call compiles, by way of Triton's own launcher. Later ones skip the launcher's
    analysis of every argument, most of the host time of a small kernel, and its hooks: whoever
    keeps a ``Launch`` promises that the arguments stay of the same kind, that is of the same dtype,
    and divisible by 16 or not, as before.

    Args:
        module: Name in ``hybridtensor.kernels``.
        kernel: Name in the module.
        programs: How many programs run.
        options: Triton's, such as ``num_warps``.
        constants: Values of the kernel's compile-time parameters, in order.
    """

    def __init__(
        self,
        module: str,
        kernel: str,
        programs: int,
        *,
        options: dict[str, int | None],
        **constants: Any,
    ) -> None:
        self._kernel = getattr(kernels(module), kernel)
        self._programs, self._constants = programs, constants
        self._options = {name: value for name, value in options.items() if value is not None}
        self._values = tuple(constants.values())
        self._compiled: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether only addresses and numbers are taken from now on, whatever the dtypes of tensors."""
        return self._compiled is not None

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel on the current stream of the current device."""
        compiled = self._compiled
        if compiled is None:
            self._compiled = self._kernel[(self._programs,)](
                *arguments, **self._constants, **self._options
            )  # None in the interpreter, which compiles nothing
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        compiled.run(
            self._programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *map(_address, arguments), *self._values,
        )  # fmt: skip


def _address(argument: Any) -> Any:
    """Return the address of a tensor, groups with addresses in place of tensors, or a number.

    Of a tensor the launcher would ask the address in Python, and the driver whether it is one of
    the device.
    """
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, tuple):
        return tuple(map(_address, argument))
    return argument


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` the current one, which kernels run on."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
