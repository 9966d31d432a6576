"""A model computed with an engine's weights: its products are caught where torch's functions are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridtensor import formats
from hybridtensor.distributed.checkpoint.plain import named_parameters
from hybridtensor.formats import Format
from hybridtensor.inference.engine import (
    Decoded,
    decoded_input,
    decoded_weight,
    product,
    rule,
    static_input,
)
from hybridtensor.inference.input_scales import scales_beside
from hybridtensor.inference.stored import packed_matrix, packed_stack
from hybridtensor.inference.weights import Exported
from hybridtensor.quantizers import OneFormatQuantizer
from hybridtensor.subclasses.op_table import Args, Func, Kwargs

RULES = ("tensor", "token", "1x128", "1x32", "1x16")
_OF_FORMAT: dict[Format, str | None] = {
    formats.FP8_E4M3_TENSOR: "tensor",
    formats.FP8_E4M3_ROW: "token",
    formats.FP8_E4M3_1X128: "1x128",
    formats.FP8_E4M3_1X128_FP32_SCALE: "1x128",
    formats.MXFP8_E4M3: "1x32",
    formats.NVFP4: "1x16",
    formats.IDENTITY: None,
}


class EngineWeight(NamedTuple):
    """A weight of the engine.

    Attributes:
        matrices: One, or one for each expert.
        is_stack: Whether it is of experts.
        inputs: How its inputs are quantized, or None.
        scales: Scales of inputs that are stored, fp32 ``[1]``, as many as matrices; or None: inputs are measured.
    """

    matrices: list[Decoded]
    is_stack: bool
    inputs: OneFormatQuantizer | None
    scales: tuple[Tensor, ...] | None = None

    @property
    def input_format(self) -> str:
        """The format of quantized inputs, for people."""
        if self.inputs is None:
            return "none"
        return str(self.inputs.format) if self.scales is None else f"{self.inputs.format}, static"

    def cut(self, count: int) -> EngineWeight:
        """Return ``count`` matrices: one per expert, or the row groups of one matrix."""
        if self.is_stack:
            return self
        scales = None if self.scales is None else self.scales * count
        matrix = self.matrices[0]
        rows = len(matrix.elements) // count
        parts = [matrix.rows(i * rows, rows) for i in range(count)]
        return self._replace(matrices=parts, scales=scales)

    def linear(self, x: Tensor, bias: Tensor | None, expert: int = 0) -> Tensor:
        """Return the product of tokens of any shape with one matrix."""
        flat = x.reshape(-1, x.shape[-1])
        if self.inputs is None:
            given = Decoded(flat.float())
        elif self.scales is None:
            given = decoded_input(flat, self.inputs)
        else:
            given = static_input(flat, self.scales[expert].to(flat.device))
        out = product(given, self.matrices[expert], bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])


class Engine(TorchFunctionMode):
    """Computes products with the weights of a model by the engine's.

    Args:
        weights: By the address of the parameters in whose place they are.
    """

    def __init__(self, weights: dict[int, EngineWeight]) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        found = [self._weights.get(_address(arg)) for arg in args if isinstance(arg, Tensor)]
        weight = next((one for one in found if one is not None), None)
        if weight is None or func not in _PRODUCTS:
            return func(*args, **kwargs)
        return _PRODUCTS[func](weight, *args, **kwargs)


def _linear(weight: EngineWeight, x: Tensor, at: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a matrix, or by rows of one: what ``at`` is a view of, where its memory begins."""
    rows, columns = weight.matrices[0].elements.shape
    expert, begin = divmod(int(at.storage_offset()), rows * columns)
    if at.shape != (rows, columns):
        if at.stride() != (columns, 1) or at.shape[1] != columns:
            raise NotImplementedError(
                f"mismatch: products with a weight, or with whole rows of one, are required, got {list(at.shape)} of "
                f"{[rows, columns]}; leave the layer out of quantize_ (keep_bf16)"
            )
        of_rows = weight.matrices[expert].rows(begin // columns, len(at))
        matrices = [*weight.matrices[:expert], of_rows, *weight.matrices[expert + 1 :]]
        weight = weight._replace(matrices=matrices)
    return weight.linear(x, bias, expert)


def _matmul(weight: EngineWeight, x: Tensor, at: Tensor) -> Tensor:
    """Multiply by the transpose of a matrix; anything else reads the values, which shows."""
    if at.dim() == 2 and at.shape[0] == weight.matrices[0].elements.shape[1]:
        return _linear(weight, x, at.t())
    return torch.matmul(x, at)


def _grouped(
    weight: EngineWeight, x: Tensor, at: Tensor, offs: Tensor | None = None, **options: object
) -> Tensor:
    """Multiply tokens sorted by expert, or row groups; rows of no expert become zeros."""
    weight = weight if offs is not None else weight.cut(x.shape[0])
    out = x.new_zeros(*x.shape[:-1], weight.matrices[0].elements.shape[0])
    if offs is None:
        for e in range(len(weight.matrices)):
            out[e] = weight.linear(x[e], None, e)
        return out
    begin = 0
    for e, end in enumerate(offs.tolist()):
        if end > begin:
            out[begin:end] = weight.linear(x[begin:end], None, e)
        begin = end
    return out


_PRODUCTS: dict[Func, Callable[..., Tensor]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    torch._grouped_mm: _grouped,
    torch.bmm: lambda weight, x, at: _grouped(weight, x, at),
}
if hasattr(F, "grouped_mm"):
    _PRODUCTS[F.grouped_mm] = _grouped


def _address(tensor: Tensor) -> int:
    # By memory, not by identity: models multiply by views of their weights, such as ``weight[e]``
    # and ``weight.t()``.
    return tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else 0


def engine_weight(
    who: str, one: Exported, known: Mapping[str, Tensor], activation: str | None
) -> EngineWeight:
    """Return a weight as the engine has it.

    Args:
        who: Begins messages.
        one: The weight.
        known: The tensors that the engine has, stacks of experts as one each.
        activation: The engine's rule for inputs; None is that of the layout, or the recipe's.

    Raises:
        ValueError: If a tensor is missing, or the recipe's rule is no engine's.
    """
    config = one.part.recipe
    name = activation
    if activation is None and one.layout is not None and not one.layout.stored_as:
        name = one.layout.inputs  # whatever the recipe: its configuration says so
    elif activation is None:
        fmt = config.input.rowwise_format
        if fmt not in _OF_FORMAT:
            raise ValueError(
                f"{who}: {one.name}: inputs that an engine quantizes alike are required, got {fmt}; name the "
                f"engine's rule: activation= one of {', '.join(RULES)}"
            )
        name = _OF_FORMAT[fmt]
    pow2 = one.layout is not None and "scale_fmt" in one.layout.settings
    inputs = None if name is None else rule(name, pow2)
    is_stack = one.value.dim() == 3
    packed = packed_stack(one.name, known) if is_stack else packed_matrix(one.name, known)
    if not packed.keys() & {"weight", "weight_packed"} or len(packed) < 2:
        raise ValueError(
            f"{who}: elements and scales of {one.name} are required among the tensors, got {list(packed)}"
        )
    each = (
        [{k: part[e] for k, part in packed.items()} for e in range(one.value.shape[0])]
        if is_stack
        else [packed]
    )
    scales = None
    if name == "tensor":  # the one rule whose scales are stored
        scales = scales_beside(who, one.name, known, len(each) if is_stack else None)
    return EngineWeight([decoded_weight(of_one) for of_one in each], is_stack, inputs, scales)


def put_weights(engine: nn.Module, weights: Mapping[str, EngineWeight]) -> Engine:
    """Take the values of converted weights away, and return the mode that multiplies by those of the engine."""
    placed = {}
    parameters = dict(named_parameters(engine))
    for name, weight in weights.items():
        # memory of its own, by which it is known; whatever reads the values shows
        parameters[name].data = torch.full_like(parameters[name], float("nan"))
        placed[_address(parameters[name])] = weight
    return Engine(placed)
