"""The names that tensors have in checkpoints: those of the model, but for experts, which most
checkpoints have one by one, and for models of transformers, which know what theirs are called.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridtensor.arguments import require_choice
from hybridtensor.inference.layouts import Packed
from hybridtensor.ops.face import bytewise

Named = Iterator[tuple[str, Tensor]]

_BIAS = "_bias"
_SIDE = 128  # rows of a block, where scales are not of rows
_ENDINGS = {"weight": "", "weight_packed": "", "scale": "_scale_inv"}  # of whole stacks
_Revert = Callable[[str, Tensor], dict[str, Tensor]]
"""Gives what a checkpoint has in place of a parameter."""


class Names:
    """Gives tensors the names that they have in checkpoints of a model.

    Args:
        who: Begins messages.
        model: The model. transformers' own say how their stacks of experts are stored.
        experts: ``"separate"`` or ``"stacked"``.
        bare: Whether names come without the prefix of a model of transformers, as in checkpoints of DeepSeek V4.

    Raises:
        ValueError: If ``experts`` is another word.
    """

    def __init__(self, who: str, model: nn.Module, experts: str, *, bare: bool = False) -> None:
        require_choice(who, "experts", experts, ("separate", "stacked"))
        self._who, self._separate = who, experts == "separate"
        self._revert = _reverter(model, bare) if self._separate else None

    def of_module(self, name: str, weight: Tensor | None = None) -> list[str]:
        """Return the names of the weights that checkpoints have for a parameter called ``name``.

        Args:
            name: Of a matrix, or of a stack.
            weight: The stack.
        """
        if weight is None or weight.dim() != 3:
            # transformers converts names together with tensors; where names are wanted, an empty
            # one will do.
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

    def of_stack(self, name: str, count: int, rows: int) -> str | None:
        """Return the name under which checkpoints have a stack as the model has it; None if they have other tensors."""
        numbers = _numbered(count, rows)
        found = self._stored(name, numbers)
        is_whole = len(found) == 1 and torch.equal(next(iter(found.values())), numbers)
        return next(iter(found)) if is_whole else None

    def of_values(self, name: str, values: Tensor) -> Named:
        """Yield values under the names of the checkpoint."""
        yield from self._stored(name, values).items()

    def of_biases(self, name: str, shape: Sequence[int]) -> list[str]:
        """Return the names of the biases of experts whose matrices a checkpoint has one by one; none of anything else.

        Args:
            name: Of a parameter, that of the stack of the matrices with ``_bias`` behind.
            shape: ``[E, N]``.
        """
        if not self._separate or not name.endswith(_BIAS) or len(shape) != 2:
            return []
        prefix, parameter = _split(name.removesuffix(_BIAS))
        rows = torch.empty(shape[0], shape[1], 2, device="meta")
        known = self._stored(f"{prefix}{parameter}", rows).keys() | self._stored(name, rows).keys()
        if known != {name, f"{prefix}{parameter}"}:
            return []
        return [f"{prefix}{number}.{parameter}.bias" for number in range(shape[0])]

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
        if not self._separate or "blocks" in packed[0]:
            yield from _as_stack(name, packed)
            return
        count, rows = len(packed), next(iter(packed[0].values())).shape[0]
        stored = self._rule(name, count, rows)
        if stored is not None:
            yield from _as_stack(stored, packed)
            return
        places = self.places(name, count, rows)
        prefix, parameter = _split(name)
        own = f"{prefix}0.{parameter}.weight" in places
        for suffix in packed[0]:
            if own:
                for number, of_one in enumerate(packed):
                    yield f"{prefix}{number}.{parameter}.{suffix}", of_one[suffix]
                continue
            for stored, place in places.items():
                expert, first = divmod(int(place[0]), rows)
                part = self._part(name, packed[expert], suffix, first, len(place))
                yield f"{stored.removesuffix('weight')}{suffix}", part

    def _rule(self, name: str, count: int, rows: int) -> str | None:
        """Return under which name a checkpoint has a whole stack, if it has; None if it has its matrices.

        Raises:
            ValueError: If it has matrices that are not rows of one expert's.
        """
        found = self._stored(name, _numbered(count, rows))
        whole = self.of_stack(name, count, rows)
        if list(found) == [name] and whole == name:
            return None
        if whole is not None:
            return whole
        for stored, part in found.items():
            flat = part[..., 0].reshape(-1)
            rows_of_one = part.dim() == 2 and part.shape[1] == 2 and stored.endswith("weight")
            in_order = rows_of_one and torch.equal(flat, flat[0] + torch.arange(len(flat)))
            if not in_order or int(flat[0]) // rows != int(flat[-1]) // rows:
                raise ValueError(
                    f"{self._who}: {name}: a stack that checkpoints store as it is, or as rows of each expert, is "
                    f"required, got {stored} {list(part.shape)}; choose experts='stacked'"
                )
        return None

    def _part(self, name: str, packed: Packed, suffix: str, first: int, rows: int) -> Tensor:
        """Return one kind of tensors of ``rows`` rows from ``first`` on of an expert's matrix."""
        tensor, elements = packed[suffix], next(iter(packed.values()))
        if tensor.dim() == 1:  # a number for the matrix: each part has it
            return tensor
        per_entry = 1 if tensor.shape[0] == elements.shape[0] else _SIDE
        if first % per_entry or (rows % per_entry and first + rows != elements.shape[0]):
            raise ValueError(
                f"{self._who}: {name}: {suffix} that ends with the parts of {rows} rows that a checkpoint has is "
                f"required, got blocks of {per_entry} that belong to two; choose sizes of whole blocks, or "
                "experts='stacked'"
            )
        return tensor[first // per_entry : -(-(first + rows) // per_entry)].contiguous()

    def _stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if self._revert is None:
            return {name: tensor}
        found = self._revert(name, bytewise(tensor))
        return {stored: one.view(tensor.dtype) for stored, one in found.items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that ``torch.compile`` or data parallelism wraps."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module) or (
        isinstance(model, DistributedDataParallel) and (inner := model.module) is not None
    ):
        model = inner
    return model


def of_transformers(model: nn.Module) -> nn.Module | None:
    """Return the Transformers model that ``model`` is or wraps, or None."""
    library, inner = sys.modules.get("transformers"), unwrapped(model)
    return inner if library is not None and isinstance(inner, library.PreTrainedModel) else None


def prefix_of(model: nn.Module) -> str:
    """Return the prefix of the base model's parameter names in a Transformers model (``"model."``); "" for others."""
    inner = of_transformers(model)
    return f"{inner.base_model_prefix}." if inner is not None and inner.base_model_prefix else ""


def _reverter(model: nn.Module, bare: bool) -> _Revert | None:
    """Return how transformers stores parameters of a model, or None if it is none of its own."""
    inner = of_transformers(model)
    if inner is None:
        return None
    from transformers.core_model_loading import revert_weight_conversion

    prefix = prefix_of(model) if bare else ""

    def revert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        with _as_made(inner) if bare else contextlib.nullcontext():
            found: dict[str, Tensor] = revert_weight_conversion(
                inner, {name.removeprefix(prefix): tensor}
            )
        if bare and "self_attn.kv_norm" in name:  # which DeepSeek V4 has by that name, too
            found = {
                stored.replace(".attn.norm", ".attn.kv_norm"): t for stored, t in found.items()
            }
        return found

    return revert


@contextlib.contextmanager
def _as_made(model: nn.Module) -> Iterator[None]:
    """Hide the weight conversions of the checkpoint a model came from: Transformers then uses all it knows."""
    loaded = model.__dict__.pop("_weight_conversions", None)
    try:
        yield
    finally:
        if loaded is not None:
            model._weight_conversions = loaded


def _as_stack(name: str, packed: list[Packed]) -> Named:
    """Yield the tensors of all experts as one each."""
    for suffix in packed[0]:
        ending = _ENDINGS.get(suffix, f"_{suffix.removeprefix('weight_')}")
        yield f"{name}{ending}", stacked([of_one[suffix] for of_one in packed])


def _numbered(count: int, rows: int) -> Tensor:
    """Return a stack of numbers of rows: Transformers converts tensors only, and these tell what it stores where."""
    return torch.arange(count * rows).view(count, rows, 1).expand(count, rows, 2).contiguous()


def _split(name: str) -> tuple[str, str]:
    """Return the module of a parameter, with a dot behind, and its own name."""
    module, _, parameter = name.rpartition(".")
    return f"{module}." if module else "", parameter


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape and dtype as one."""
    return torch.stack([bytewise(tensor) for tensor in tensors]).view(tensors[0].dtype)
