"""The names that tensors have in checkpoints: those of the model, but for experts, which most
checkpoints have one by one, and for models of transformers, which know what theirs are called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hybridtensor.arguments import require_choice
from hybridtensor.inference.layouts import Packed

Named = Iterator[tuple[str, Tensor]]

_Revert = Callable[[str, Tensor], dict[str, Tensor]]
"""Gives what a checkpoint has in place of a parameter."""


class Names:
    """Gives tensors the names that they have in checkpoints of a model.

    Args:
        who: Begins messages.
        model: The model. transformers' own say how their stacks of experts are stored.
        experts: ``"separate"`` or ``"stacked"``.

    Raises:
        ValueError: If ``experts`` is another word.
    """

    def __init__(self, who: str, model: nn.Module, experts: str) -> None:
        require_choice(who, "experts", experts, ("separate", "stacked"))
        self._who, self._separate = who, experts == "separate"
        self._revert = _reverter(model) if self._separate else None

    def of_module(self, name: str, weight: Tensor | None = None) -> list[str]:
        """Return the names of the weights that checkpoints have for a parameter called ``name``.

        Args:
            name: Of a matrix, or of a stack.
            weight: The stack.
        """
        if weight is None or weight.dim() != 3:
            return list(self._stored(name, torch.empty(0, device="meta")))
        rows = torch.empty(weight.shape[0], 2 * max(weight.shape[1:]), 2, device="meta")
        if not self._separate:
            return [name]
        found = self._stored(name, rows)
        if list(found) != [name]:
            return list(found)
        prefix, parameter = _split(name)
        return [f"{prefix}{number}.{parameter}.weight" for number in range(weight.shape[0])]

    def places(self, name: str, count: int, rows: int) -> dict[str, Tensor]:
        """Return the names of the matrices that checkpoints have for a stack, and which of its
        ``count * rows`` rows each has.
        """
        prefix, parameter = _split(name)
        numbers = torch.arange(count * rows).view(count, rows, 1)
        found = self._stored(name, numbers)
        if list(found) == [name]:
            found = {f"{prefix}{e}.{parameter}.weight": of_one for e, of_one in enumerate(numbers)}
        return {stored: one.reshape(-1) for stored, one in found.items()}

    def of_values(self, name: str, values: Tensor) -> Named:
        """Yield values under the names of the checkpoint."""
        yield from self._stored(name, values).items()

    def of_matrix(self, name: str, packed: Packed) -> Named:
        """Yield the tensors of a weight called ``name``."""
        for suffix, tensor in packed.items():
            (stored,) = self._stored(name, torch.empty(0, device="meta"))
            yield f"{stored.removesuffix('weight')}{suffix}", tensor

    def of_experts(self, name: str, packed: list[Packed]) -> Named:
        """Yield the tensors of the weights of a stack called ``name``, a matrix each.

        Raises:
            ValueError: If a checkpoint has parts of these matrices, and a scale belongs to two.
        """
        if not self._separate:
            for suffix in packed[0]:
                tensors = [of_one[suffix] for of_one in packed]
                ending = (
                    "" if suffix in ("weight", "weight_packed") else suffix.removeprefix("weight")
                )
                yield f"{name}{ending}", _stacked(tensors)
            return
        prefix, parameter = _split(name)
        parts = self._parts(name, packed)
        for suffix in packed[0]:
            if parts:
                yield from self._cut(name, suffix, packed, parts)
                continue
            for number, of_one in enumerate(packed):
                yield f"{prefix}{number}.{parameter}.{suffix}", of_one[suffix]

    def _parts(self, name: str, packed: list[Packed]) -> dict[str, Tensor]:
        """Return what a checkpoint has in place of the elements of a stack; nothing if it has no rule."""
        found = self._stored(name, _stacked([next(iter(of_one.values())) for of_one in packed]))
        return {} if list(found) == [name] else found

    def _cut(self, name: str, suffix: str, packed: list[Packed], parts: dict[str, Tensor]) -> Named:
        """Yield one kind of tensors of a stack under the names that a checkpoint has for parts of it."""
        tensors, elements = [of_one[suffix] for of_one in packed], next(iter(packed[0].values()))
        of_all = tensors[0].dim() == 1  # a number for the matrix: each part has it
        if of_all:
            tensors = [one.expand(elements.shape[0], 1) for one in tensors]
        found = self._stored(name, _stacked(tensors))
        if found.keys() != parts.keys() or len({tuple(one.shape) for one in found.values()}) != 1:
            raise ValueError(
                f"{self._who}: {name}: {suffix} {list(tensors[0].shape)} of matrices {list(elements.shape)} "
                f"that end with the parts {list(parts)[:2]} ... of a checkpoint are required, got blocks that "
                "belong to two; choose sizes of whole blocks, or experts='stacked'"
            )
        for stored, one in found.items():
            part = one.reshape(-1)[:1] if of_all else one
            yield f"{stored.removesuffix('weight')}{suffix}", part

    def _stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if self._revert is None:
            return {name: tensor}
        found = self._revert(name, _bytes(tensor))
        return {stored: one.view(tensor.dtype) for stored, one in found.items()}


def _reverter(model: nn.Module) -> _Revert | None:
    """Return how transformers stores parameters of a model, or None if it is none of its own."""
    library = sys.modules.get("transformers")
    inner = getattr(model, "_orig_mod", model)
    if library is None or not isinstance(inner, library.PreTrainedModel):
        return None
    from transformers.core_model_loading import revert_weight_conversion

    def revert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = revert_weight_conversion(inner, {name: tensor})
        return found

    return revert


def _split(name: str) -> tuple[str, str]:
    """Return the module of a parameter, with a dot behind, and its own name."""
    module, _, parameter = name.rpartition(".")
    return f"{module}." if module else "", parameter


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack([_bytes(tensor) for tensor in tensors]).view(tensors[0].dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """Return elements of one byte as such: not every operation knows their dtype."""
    return (
        tensor.view(torch.uint8) if tensor.itemsize == 1 and tensor.dtype != torch.bool else tensor
    )
