"""Which modules are linear layers, and which of them store their weight ``[in, out]``.

``nn.Linear`` multiplies by the transpose of its weight ``[out, in]``, and so do libraries' own classes. Others, of
which the best known is the ``Conv1D`` of GPT-2 in Transformers, multiply by a weight ``[in, out]`` as it is:
``torch.addmm(bias, x, weight)`` or ``x @ weight``. Classes that are not derived of ``nn.Linear`` are listed here by
name, so that no library is imported, or say ``is_transposed``, as modules of experts do, and have a matrix ``weight``.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

_LISTED = {"transformers.pytorch_utils.Conv1D"}


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, with either storage of its weight."""
    if isinstance(module, nn.Linear):
        return not _shows_a_weight(module)
    return is_listed(type(module)) or (_says_transposed(module) is not None and _has_matrix(module))


def _shows_a_weight(module: nn.Module) -> bool:
    """Return whether ``weight`` is only a property: it shows that of a layer inside, as in PEFT's subclasses of
    ``nn.Linear``, or computes one."""
    if "weight" in module._parameters or parametrize.is_parametrized(module, "weight"):
        return False
    return isinstance(getattr(type(module), "weight", None), property)


def stores_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose weight is stored ``[in, out]``."""
    if not is_linear(module) or isinstance(module, nn.Linear):
        return False
    return is_listed(type(module)) or _says_transposed(module) is True


def _says_transposed(module: nn.Module) -> bool | None:
    """Return how a module says that it stores its weight, or None."""
    said = getattr(module, "is_transposed", None)
    return said if isinstance(said, bool) else None


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module has a matrix ``weight``, maybe parametrized."""
    weight = module._parameters.get("weight")
    if parametrize.is_parametrized(module, "weight"):
        weight = next(module.get_submodule("parametrizations.weight").parameters(), None)
    return weight is not None and weight.dim() == 2


def is_listed(cls: type[nn.Module]) -> bool:
    """Return whether a class, or a base class, is listed by name."""
    return any(f"{base.__module__}.{base.__qualname__}" in _LISTED for base in cls.__mro__)
