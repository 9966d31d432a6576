"""The package ``safetensors``, which only exports need."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def safetensors(who: str) -> ModuleType:
    """Import ``safetensors``; raise ImportError saying how to install it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            f"{who}: the package safetensors is not installed; pip install hybridtensor[export]"
        ) from error
    return safetensors


def save_file(
    who: str,
    library: ModuleType,
    tensors: dict[str, Tensor],
    path: Path,
    metadata: dict[str, str],
) -> None:
    """Write tensors into a new safetensors file; raise ValueError for a tensor of another library, OSError if it cannot
    be written."""
    for name, tensor in tensors.items():
        if is_traceable_wrapper_subclass(tensor):
            raise ValueError(
                f"{who}: {name} is a {type(tensor).__name__}, which files of safetensors cannot hold; dequantize "
                "it, or save it with its own library"
            )
    try:
        library.torch.save_file(tensors, path, metadata=metadata)
    except library.SafetensorError as error:  # is no OSError, whatever the system said
        raise OSError(
            f"{who}: {path.name} cannot be written: {error}; free space in {path.parent.parent}, or "
            "name another place"
        ) from error
