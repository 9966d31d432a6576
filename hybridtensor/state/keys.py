"""What the state of a layer is called in checkpoints, and the numbers that follow from names."""

from __future__ import annotations

import hashlib

from torch import Tensor

STATE = "quantization_state"
"""Name of the state in its layer; that of a stack of experts' weights is ``<weight>_<STATE>``."""
FORMER_NAMES = {"scale": "encode_scale"}  # of buffers, in checkpoints before they had these names
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What ``torch.compile``, activation checkpointing and FSDP1 call the module that they wrap."""


def weight_of_state(name: str) -> str | None:
    """Return the weight whose state an entry of a state dict is, or None."""
    owner, state, rest = f".{name}".partition(f"{STATE}.")
    if not state or not rest or owner[-1] not in "._":
        return None
    return (f"{owner}weight" if owner.endswith(".") else owner[:-1])[1:]


def has_layer(state_dict: dict[str, Tensor], prefix: str) -> bool:
    """Return whether a state dict has the weight, or the state, of the layer whose state begins with ``prefix``."""
    weight = weight_of_state(f"{prefix}rounding") or prefix
    owner, dot, name = weight.rpartition(".")
    names = prefix, weight, f"{owner}{dot}parametrizations.{name}."
    return any(key.startswith(names) for key in state_dict)


def take_former_names(state_dict: dict[str, Tensor], prefix: str) -> None:
    """Rename former entries of a state dict to their present names."""
    for former, name in FORMER_NAMES.items():
        if f"{prefix}{former}" in state_dict:
            state_dict[f"{prefix}{name}"] = state_dict.pop(f"{prefix}{former}")


def key_of_name(name: str) -> int:
    """Return the key of a layer's random numbers, the same whatever wraps modules of the model."""
    return hash64(".".join(part for part in name.split(".") if part not in WRAPPERS))


def hash64(text: str) -> int:
    """Return a signed 64-bit hash of a text, stable across processes."""
    # Signed, as int64 buffers hold it.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
