"""Triton kernels, imported when the first of them runs: the package itself needs neither Triton nor a GPU."""

from __future__ import annotations

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


@functools.cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's name of a dtype."""
    return getattr(
        importlib.import_module("triton.language"),
        {torch.bfloat16: "bfloat16", torch.float16: "float16"}.get(dtype, "float32"),
    )
