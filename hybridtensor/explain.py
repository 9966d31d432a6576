"""Say what runs: per layer and product the faces, the backend and why, and what is saved for
backward.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from hybridtensor.arguments import require_flag, require_module
from hybridtensor.distributed.fsdp.hooks import gathers, part_of
from hybridtensor.distributed.sequence.travels import travels
from hybridtensor.formats import Format
from hybridtensor.layers import layers_of
from hybridtensor.ops.grouped_mm import select_grouped_backend
from hybridtensor.ops.scaled_mm import select_backend
from hybridtensor.quantizers import HybridQuantizer, IdentityQuantizer, Quantizer
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS
from hybridtensor.selection import Coverage, coverage
from hybridtensor.subclasses import MasterWeight, is_converted

if TYPE_CHECKING:
    from rich.console import Group, RenderableType


@dataclass(frozen=True)
class GemmRow:
    """One product of one layer.

    Attributes:
        layer: Fully qualified name; ``<root>`` for the model itself.
        gemm: ``output``, ``grad_input`` or ``grad_weight``.
        left: Role, direction and format of the left operand's face:
            ``input.rowwise: fp8_e4m3_tensor``.
        right: The same of the right one.
        backend: ``native``, ``emulated`` or ``high precision``.
        reason: Why that backend.
        saved_bytes_per_token: Bytes that the layer's input costs per token until backward, on the
            ``grad_weight`` row; None on the others.
    """

    layer: str
    gemm: str
    left: str
    right: str
    backend: str
    reason: str
    saved_bytes_per_token: float | None = None


@dataclass(frozen=True)
class GatherRow:
    """What FSDP2 sends of one layer's weight.

    Attributes:
        layer: Fully qualified name.
        forward: What travels before forward.
        backward: What travels before backward, where the weight is not kept until then.
        reason: Why values travel that could have been quantized before, or what is done otherwise
            than asked; or "".
    """

    layer: str
    forward: str
    backward: str
    reason: str


@dataclass(frozen=True)
class SequenceRow:
    """What ranks send of an activation whose tokens they share.

    Attributes:
        module: Fully qualified name of the module with the style.
        tensor: ``input`` or ``grad_output``.
        forward: What travels before forward, or "" for nothing.
        backward: What travels in backward, or "".
        reason: Why values travel; or for which numbers of tokens bytes do.
    """

    module: str
    tensor: str
    forward: str
    backward: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found.

    Attributes:
        rows: The products of converted layers.
        skipped: The layers left alone, with the reason.
        gathers: What FSDP2 sends, for weights that it shards.
        shared: The layers whose weight is quantized anew at each use, because someone else holds
            its memory: a state dict, ``weight.master``, or what was made from these.
        coverage: How much of the model is quantized, and which large matrices are not.
        sequence: What sequence parallelism sends, for modules with the styles of
            ``hybridtensor.distributed``.
    """

    rows: tuple[GemmRow, ...]
    skipped: tuple[tuple[str, str], ...]
    gathers: tuple[GatherRow, ...] = ()
    shared: tuple[str, ...] = ()
    coverage: Coverage = field(default_factory=lambda: Coverage(0.0, 0.0, ()))
    sequence: tuple[SequenceRow, ...] = ()

    def __rich__(self) -> Group:
        """Render as tables."""
        from rich import box
        from rich.console import Group
        from rich.table import Table

        table = Table(title="Quantized layers", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("layer / product", overflow="fold", min_width=13)
        for header in ("left operand", "right operand", "backend"):
            table.add_column(header, no_wrap=True)
        for layer, rows in itertools.groupby(self.rows, key=lambda row: row.layer):
            of_layer = list(rows)
            table.add_row(
                f"[bold]{layer}", f"saves {of_layer[-1].saved_bytes_per_token:.0f} B/token", "", ""
            )
            for row in of_layer:
                operands = (operand.replace(": ", "\n") for operand in (row.left, row.right))
                table.add_row(
                    f"  {row.gemm}", *operands, row.backend, end_section=row.gemm == "grad_weight"
                )
        reasons = dict.fromkeys(f"{row.backend}: {row.reason}" for row in self.rows)
        parts: list[RenderableType] = [table, *reasons] if self.rows else []
        if self.gathers:
            sent = Table(title="Gathered by FSDP2", box=box.SIMPLE_HEAD)
            for header in ("layer", "before forward", "before backward", "why"):
                sent.add_column(header, overflow="fold")
            for gather in self.gathers:
                sent.add_row(gather.layer, gather.forward, gather.backward, gather.reason)
            parts.append(sent)
        if self.sequence:
            sent = Table(title="Gathered by sequence parallelism", box=box.SIMPLE_HEAD)
            for header in ("module", "tensor", "before forward", "in backward", "why"):
                sent.add_column(header, overflow="fold")
            for travelling in self.sequence:
                sent.add_row(*vars(travelling).values())
            parts.append(sent)
        if self.shared:
            names = ", ".join(self.shared)
            parts.append(
                f"Quantized anew at each use, as someone else holds memory of the weight: {names}"
            )
        if self.skipped:
            left_alone = Table(
                "layer", "why", title="Left in high precision", box=box.SIMPLE_HEAD, pad_edge=False
            )
            for name, reason in self.skipped:
                left_alone.add_row(name, reason)
            parts.append(left_alone)
        others = [matrix for matrix in self.coverage.plain if not matrix.deliberate]
        if others:
            table = Table("parameter", "shape", "why", box=box.SIMPLE_HEAD, pad_edge=False)
            table.title = "Large matrices that no recipe reaches"
            for matrix in others:
                table.add_row(matrix.name, str(list(matrix.shape)), matrix.why)
            parts.append(table)
        parts.append(str(self.coverage).capitalize())
        return Group(*parts)


def explain(model: nn.Module, *, show: bool = True) -> Explanation:
    """Print, and return, what the products of every linear layer of ``model`` are made of on its
    device.

    Args:
        model: A model, before or after ``quantize_``.
        show: Print the tables (needs ``rich``).

    Returns:
        The rows, for programs.
    """
    require_module("explain", model)
    require_flag("explain", show=show)
    rows: list[GemmRow] = []
    skipped, sent, shared = [], [], []
    for found in layers_of(model):
        layer, module = found.name or "<root>", found.module
        weight, recipe = part_of(found.weight), found.recipe
        config = weight.config if is_converted(weight) else recipe and recipe.config
        if config is not None:
            gathered = gathers(module, weight) if is_converted(weight) else None
            if gathered is not None:
                sent.append(GatherRow(layer, *gathered))
            if isinstance(weight, MasterWeight) and weight.record.is_shared(weight.plain):
                shared.append(layer)
            _, in_features = found.size(tuple(weight.shape))
            rows += _layer_rows(
                layer, config, weight.dtype, weight.device, in_features, grouped=found.is_stack
            )
        else:
            skipped.append((layer, found.why_skipped() or "not converted"))
    sequence = [
        SequenceRow(name or "<root>", *travelling)
        for name, module in model.named_modules()
        for travelling in travels(module)
    ]
    explanation = Explanation(
        tuple(rows), tuple(skipped), tuple(sent), tuple(shared), coverage(model), tuple(sequence)
    )
    if show:
        from rich.console import Console

        Console().print(explanation)
    return explanation


def _layer_rows(
    layer: str,
    config: HybridConfig,
    dtype: torch.dtype,
    device: torch.device,
    in_features: int,
    *,
    grouped: bool,
) -> list[GemmRow]:
    rows = []
    for gemm in GEMMS:
        left, right = config.formats(gemm)
        select = select_grouped_backend if grouped else select_backend
        backend = select(left, right, dtype, device)
        saved = (
            saved_bytes_per_token(config, in_features, dtype)
            if gemm.name == "grad_weight"
            else None
        )
        operands = (_operand(config, *gemm.left, left), _operand(config, *gemm.right, right))
        rows.append(GemmRow(layer, gemm.name, *operands, backend.name, backend.reason, saved))
    return rows


def _operand(config: HybridConfig, role: str, direction: str, fmt: Format) -> str:
    if direction == "columnwise" and _is_of_rowwise(getattr(config, role)):
        return f"{role}.{direction}: " + (
            "dequantized rowwise" if fmt.is_identity else f"{fmt} of rowwise"
        )
    return f"{role}.{direction}: {fmt}"


def _is_of_rowwise(quantizer: Quantizer) -> bool:
    return (
        isinstance(quantizer, HybridQuantizer)
        and quantizer.columnwise_source == "rowwise_dequantized"
    )


def _num_blocks(extent: int, block: int | None) -> int:
    return 1 if block is None else -(-extent // block)


def saved_bytes_per_token(config: HybridConfig, in_features: int, dtype: torch.dtype) -> float:
    """Return the bytes per token that a layer keeps of its input until backward.

    Scales shared by all tokens (one per tensor, one per column) are left out: they do not grow with
    the tokens. So are the zeros that fill the last block of tokens.

    Args:
        config: The layer's recipe.
        in_features: Features of the input.
        dtype: High-precision dtype of the input.
    """
    quantizer = config.input
    if config.save_original_input:
        return in_features * dtype.itemsize
    if (
        _is_of_rowwise(quantizer)
        and isinstance(quantizer, HybridQuantizer)
        and isinstance(quantizer.columnwise, IdentityQuantizer)
    ):
        return quantizer.rowwise_format.bytes_per_row(in_features, dtype)
    column = quantizer.columnwise_format
    if column.element is None:
        return in_features * dtype.itemsize
    across, along = column.block
    blocks = 0.0 if along is None else _num_blocks(in_features, across) / along
    scales = 0.0 if column.scale_dtype is None else blocks * column.scale_dtype.itemsize
    return in_features / column.elements_per_byte + scales
