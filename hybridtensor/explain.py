"""Say what runs: per layer and product the faces, the backend and why; what is saved for backward;
and what it comes to.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybridtensor.arguments import require_flag, require_kind, require_module
from hybridtensor.costs import TABLES, CostTable, table
from hybridtensor.distributed.fsdp.hooks import gathers, part_of
from hybridtensor.distributed.sequence.sends import sends
from hybridtensor.explanation.rows import GatherRow, GemmRow, LayerRow, Rows, SequenceRow
from hybridtensor.explanation.tables import tables
from hybridtensor.explanation.totals import (
    Share,
    predicted,
    saved_by,
    saved_bytes,
    saved_bytes_per_token,
    shares,
)
from hybridtensor.formats import Format
from hybridtensor.layers import Layer, is_of_no_layer, layers_of, names_without_weight
from hybridtensor.linear.layer_forward import has_own_forward
from hybridtensor.ops.grouped_mm import select_grouped_backend
from hybridtensor.ops.scaled_mm import select_backend
from hybridtensor.printed import Printed
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS
from hybridtensor.selection import coverage, is_frozen
from hybridtensor.subclasses import MasterWeight, is_converted
from hybridtensor.subclasses.common_scale import CommonScale

if TYPE_CHECKING:
    from rich.console import Group

__all__ = [
    "Explanation",
    "GatherRow",
    "GemmRow",
    "LayerRow",
    "SequenceRow",
    "explain",
    "saved_bytes_per_token",
]

_NO_WEIGHT = "it has no weight; a product with one that was moved elsewhere is not quantized"


class Explanation(Printed, Rows):
    """The result of ``explain``; printed, layers that differ only in numbers in their names are one line.

    Attributes:
        rows, skipped, gathers, shared, coverage, sequence, layers: See ``Rows``.
    """

    @property
    def shares(self) -> dict[str, Share]:
        """The share of each format in parameters and products."""
        return shares(self)

    @property
    def saved_bytes_per_token(self) -> tuple[float, float]:
        """Bytes per token that converted layers save of their inputs for backward, and that plain ones would."""
        return saved_bytes(self.layers)

    def predicted_speed(self, costs: str | CostTable = "h200") -> float:
        """Return the predicted speed of the model's matrix products, relative to BF16.

        Attention, norms and the optimizer are not counted, nor are layers smaller than those of the table.

        Args:
            costs: The name of a table, or a table; see ``hybridtensor.costs``.

        Raises:
            TypeError: If it is neither.
            ValueError: If there is no such table, or all layers are smaller than those of the table.
        """
        require_kind(
            "predicted_speed", "a table of costs, or the name of one,", costs, (str, CostTable)
        )
        prices = costs if isinstance(costs, CostTable) else table(costs)
        prediction = predicted(self, prices)
        if prediction is None:
            raise ValueError(
                f"predicted_speed: all layers have fewer than {prices.least_features} features in or out, the "
                f"least in the table of {prices.name}; pass a table that costs.measure makes of their sizes"
            )
        return prediction.speed

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable data."""
        found: dict[str, list[dict[str, object]]] = {
            field.name: [dict(vars(row)) for row in getattr(self, field.name)]
            for field in dataclasses.fields(self)
            if field.name in ("rows", "gathers", "sequence", "layers")
        }
        for layer in found["layers"]:
            layer |= {
                "config": str(layer["config"]),
                "dtype": str(layer["dtype"]).removeprefix("torch."),
            }
        kept, plain = self.saved_bytes_per_token
        return {
            **found,
            "skipped": dict(self.skipped),
            "shared": list(self.shared),
            "coverage": {
                **self.coverage._asdict(),
                "plain": [matrix._asdict() for matrix in self.coverage.plain],
            },
            "shares": {word: share._asdict() for word, share in self.shares.items()},
            "predicted_speed": {
                name: {
                    "over_bf16": prediction.speed,
                    "without": prediction.unknown,
                    "how": costs.how,
                    "counts_casts": costs.counts_casts,
                }
                for name, costs in TABLES.items()
                if (prediction := predicted(self, costs)) is not None
            },
            "saved_bytes_per_token": {"kept": kept, "plain": plain},
        }

    def __rich__(self) -> Group:
        return tables(self)


def _config_of(found: Layer) -> HybridConfig | None:
    """Return the recipe by which a layer's weight is multiplied; None if its products stay plain."""
    weight, recipe = part_of(found.weight), found.recipe
    if is_converted(weight) and not is_of_no_layer(weight):
        return weight.config
    # A weight that a parametrization computes has no recipe of its own; its layer has.
    return None if recipe is None else recipe.config


def explain(model: nn.Module, *, show: bool = False) -> Explanation:
    """Return the formats and the backend of each product of every linear layer of ``model`` on its device, and totals:
    share of each format, predicted speed, bytes saved for backward. ``print(explain(model))`` prints tables.

    ::

        ht.quantize_(model, "fp8")
        print(ht.explain(model))

    Layers that are alike but for numbers in their names are printed as one: ``layers.*.q_proj x32``.

    Args:
        model: A model, before or after ``quantize_``. Of one on the meta device, what would run on
            this machine's GPU, if there is one.
        show: Print the tables, too (needs ``rich``, as printing does).

    Returns:
        The rows, for programs; a prompt and notebooks show it as it is printed.

    Raises:
        TypeError: If an argument is of the wrong kind.
    """
    require_module("explain", model)
    require_flag("explain", show=show)
    rows: list[GemmRow] = []
    skipped, sent, shared, layers = [], [], [], []
    seen: set[int] = set()
    found_layers = list(layers_of(model))
    names = {found.module: found.name or "<root>" for found in found_layers}
    for found in found_layers:
        layer, module = found.name or "<root>", found.module
        weight, config = part_of(found.weight), _config_of(found)
        if config is not None:
            gathered = gathers(module, weight) if is_converted(weight) else None
            if gathered is not None:
                sent.append(GatherRow(layer, *gathered))
            # An alias may be written uncounted, so that no face of this weight is cached.
            if isinstance(weight, MasterWeight) and weight.is_held_elsewhere:
                shared.append(layer)
            row = _layer_row(found, config, seen, _common_scale(found, names))
            layers.append(row)
            rows += _gemm_rows(row, _runs_on(weight.device), grouped=found.is_stack)
        else:
            skipped.append((layer, found.why_skipped() or "not converted"))
    skipped += [(name or "<root>", _NO_WEIGHT) for name in names_without_weight(model)]
    explanation = Explanation(
        tuple(rows),
        tuple(skipped),
        tuple(sent),
        tuple(shared),
        coverage(model),
        _sequence(model),
        tuple(layers),
    )
    if show:
        from rich.console import Console

        Console().print(explanation)
    return explanation


def _runs_on(device: torch.device) -> torch.device:
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _sequence(model: nn.Module) -> tuple[SequenceRow, ...]:
    named = model.named_modules()
    return tuple(
        SequenceRow(name or "<root>", *sent) for name, module in named for sent in sends(module)
    )


def _layer_row(
    found: Layer, config: HybridConfig, seen: set[int], common_scale: tuple[str, ...]
) -> LayerRow:
    """Return the row of a layer; a weight in ``seen`` counts no parameters again."""
    weight = found.weight
    parameters = 0 if id(weight) in seen else weight.numel()
    seen.add(id(weight))
    _, in_features = found.size(tuple(part_of(weight).shape))
    shape = tuple(weight.shape)
    own = type(found.module).__name__ if has_own_forward(found.module) else ""
    return LayerRow(
        found.name or "<root>",
        config,
        shape,
        in_features,
        weight.dtype,
        parameters,
        common_scale,
        own,
        is_frozen(weight),
    )


def _common_scale(found: Layer, names: dict[nn.Module, str]) -> tuple[str, ...]:
    """Return the names of the layers that share a weight scale with this one."""
    scale = None if found.recipe is None else found.recipe.state.common
    if not isinstance(scale, CommonScale):
        return ()
    return tuple(
        names.get(module, "another model's") for module in scale.modules if module is not None
    )


def _gemm_rows(layer: LayerRow, device: torch.device, *, grouped: bool) -> list[GemmRow]:
    rows = []
    for gemm in GEMMS:
        left, right = layer.config.formats(gemm)
        backend = (
            select_grouped_backend(
                left, right, layer.dtype, device, of_weights=gemm.right[0] == "weight"
            )
            if grouped
            else select_backend(left, right, layer.dtype, device)
        )
        saved = saved_by(layer) if gemm.name == "grad_weight" else None
        operands = (
            _operand(layer.config, *gemm.left, left),
            _operand(layer.config, *gemm.right, right),
        )
        rows.append(GemmRow(layer.layer, gemm.name, *operands, backend.name, backend.reason, saved))
    return rows


def _operand(config: HybridConfig, role: str, direction: str, fmt: Format) -> str:
    if direction == "columnwise" and getattr(config, role).derives_columnwise:
        return f"{role}.{direction}: " + (
            "dequantized rowwise" if fmt.is_identity else f"{fmt} of rowwise"
        )
    return f"{role}.{direction}: {fmt}"
