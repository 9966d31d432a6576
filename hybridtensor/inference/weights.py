"""What of a model inference engines get: every parameter and buffer once, and of converted weights the
face that the forward multiplies.

Shape letters: ``N, K`` a weight, ``E`` experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from hybridtensor.arguments import require_shape
from hybridtensor.distributed.checkpoint.plain import named_tensors
from hybridtensor.distributed.fsdp.hooks import part_of
from hybridtensor.distributed.fsdp.planning import plan_of
from hybridtensor.distributed.fsdp.shard import Shard, shard_of
from hybridtensor.distributed.fsdp.torch_compat import ShardedParam, all_params
from hybridtensor.dtensor import has_several_sections, local
from hybridtensor.formats import (
    FP8_E4M3_1X128,
    FP8_E4M3_1X128_FP32_SCALE,
    FP8_E4M3_ROW,
    FP8_E4M3_TENSOR,
    IDENTITY,
    Format,
)
from hybridtensor.inference.layouts import LAYOUTS, Layout, choose
from hybridtensor.inference.names import Names, of_transformers
from hybridtensor.layers import Layer, is_of_no_layer, layers_of
from hybridtensor.linear.operands import Weight
from hybridtensor.state import LayerState, weight_of_state
from hybridtensor.subclasses import HybridTensor, is_converted

_INPUT = ("input", "input_rowwise")
_HUGGING_FACE = {  # by the formats of inputs that engines then make
    "hf_fp8_ue8m0": {FP8_E4M3_1X128},
    "hf_fp8": {FP8_E4M3_1X128, FP8_E4M3_1X128_FP32_SCALE},
    "hf_mxfp4": {IDENTITY},
    "hf_deepseek_v4": {FP8_E4M3_1X128},
}


class Exported(NamedTuple):
    """A parameter or buffer.

    Attributes:
        name: Fully qualified, without those of wrappers.
        value: What the module holds: if it is sharded, a DTensor.
        layer: Whose weight it is, if the forward quantizes it; else None.
        layout: In which that is stored.
        format: Of what is stored.
        sharded: What FSDP2 knows of it, if it shards it.
        dtype: Of its values, whatever others have; None if they are like others.
    """

    name: str
    value: Tensor
    layer: Layer | None = None
    layout: Layout | None = None
    format: Format | None = None
    sharded: ShardedParam | None = None
    dtype: torch.dtype | None = None

    @property
    def part(self) -> Any:
        """This rank's part."""
        return part_of(self.value)

    @property
    def matrix(self) -> tuple[int, int]:
        """``(N, K)``, as linear layers have it."""
        rows, columns = self.value.shape[-2:]
        return (columns, rows) if self.is_turned else (rows, columns)

    @property
    def is_turned(self) -> bool:
        """Whether it is a stack that is stored ``[E, K, N]``."""
        return is_converted(self.part) and bool(self.part.is_transposed)

    @property
    def axes(self) -> str:
        """Axes of a stack of experts as stored, ``"ENK"`` or ``"EKN"``; "" for a matrix."""
        return "" if self.value.dim() != 3 else "EKN" if self.is_turned else "ENK"

    @property
    def input_scales(self) -> Tensor | None:
        """Delayed scales that quantized inputs are multiplied with, fp32 ``[1]``, of a stack ``[E]``; None if the layer
        measures inputs, or the layout has no place for them.
        """
        if self.layer is None or self.layer.recipe is None or self.layout is None:
            return None
        state = self.layer.recipe.state
        slots = input_slots(state)
        if not slots or not self.layout.has_input_scales or state.encode_scale is None:
            return None
        return state.encode_scale[slots].reciprocal()

    @property
    def shard(self) -> Shard | None:
        """What FSDP2 shards, or None."""
        return None if self.sharded is None else shard_of(self.sharded)


def input_slots(state: LayerState) -> list[int]:
    """Return which delayed scales are those of the input that forward multiplies: one, or one per expert."""
    return [i for i, slot in enumerate(state.slots) if slot.partition("[")[0] in _INPUT]


def exported(who: str, model: nn.Module, layout: str) -> list[Exported]:
    """Return the parameters and buffers of ``model``, with the layout of each converted weight.

    Args:
        who: Begins messages.
        model: Any model.
        layout: Name of a layout, or ``"auto"``.

    Raises:
        ValueError: If no layout holds a weight, or not the one that is named.
        NotImplementedError: If a quantized weight of a linear layer is stored ``[in, out]``.
    """
    _let_go(model)
    _check_adapters(who, model)
    _check_converted(who, model)
    # By what is stored: two layers with a tied weight are one tensor in a checkpoint, under its
    # first name.
    layers = {id(_held(layer.weight)): layer for layer in layers_of(model)}
    managed = {id(sharded.tensor): sharded for sharded in all_params()}
    found = [_of(who, name, value, layers.get(id(value)), managed) for name, value in named(model)]
    quantized = [one for one in found if one.format is not None]
    among = _candidates(quantized)
    for i, one in enumerate(found):
        if one.format is not None:
            chosen = choose(
                f"{who}: {one.name}", layout, one.format, one.matrix, among, axes=one.axes
            )
            found[i] = one._replace(layout=chosen)
    if quantized:
        _check_experts(who, found)
        _check_kept(who, model, found)
        _check_readers(who, model, {id(one.value): one.name for one in quantized})
    return _with_dtypes(model, found)


def names_of(who: str, model: nn.Module, experts: str, found: list[Exported]) -> Names:
    """Return the names of exported tensors in their layouts."""
    return Names(who, model, experts, bare=_released(found))


def _released(found: list[Exported]) -> bool:
    return any(one.layout is not None and one.layout.released for one in found)


def _with_dtypes(model: nn.Module, found: list[Exported]) -> list[Exported]:
    """Set FP32 for the tensors that Transformers keeps in FP32 whatever the model's dtype (biases of routers); released
    checkpoints store norms in BF16 all the same.
    """
    known = getattr(of_transformers(model), "_keep_in_fp32_modules_strict", None) or ()
    released = _released(found)
    kept = [name for name in known if not (released and "norm" in name)]
    # As Transformers matches them: "gate.weight" anywhere in a name
    pattern = re.compile("|".join(name.replace("*", ".*") for name in kept))
    return [
        one._replace(dtype=torch.float32) if kept and pattern.search(one.name) else one
        for one in found
    ]


def _let_go(model: nn.Module) -> None:
    """Have FSDP2 undo its gathers of a model: of what is gathered it has computed copies."""
    modules = {id(module) for module in model.modules()}
    for sharded in all_params():
        if any(id(reader) in modules for reader in sharded.readers):
            sharded.reshard()


def _check_adapters(who: str, model: nn.Module) -> None:
    """Raise ValueError where layers have adapters, which no layout stores beside a weight."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            raise ValueError(
                f"{who}: layers without adapters are required, got {name} with one; call merge_and_unload() first"
            )


def _check_converted(who: str, model: nn.Module) -> None:
    """Raise ValueError where a layer quantizes a tensor that is no weight of its own: its values would be exported."""
    for layer in layers_of(model):
        if layer.recipe is None or layer.recipe.config.weight.rowwise_format.is_identity:
            continue
        if parametrize.is_parametrized(layer.module, layer.parameter):
            got = "one that a parametrization computes; call remove_parametrizations, and quantize_ again"
        elif not is_converted(part_of(layer.weight)):
            got = f"a {type(layer.weight).__name__} that took its place; call quantize_ again"
        else:
            continue
        raise ValueError(
            f"{who}: {layer.parameter_name}: a weight that quantize_ made is required, got {got}"
        )


def _check_experts(who: str, found: list[Exported]) -> None:
    """Raise ValueError if only some of a module's expert stacks are quantized in a layout that stores all or none."""
    chosen = {
        _module(one.name): one.layout.name
        for one in found
        if one.layout is not None and one.format in one.layout.of_experts
    }
    for one in found:
        if one.layout is None and one.value.dim() == 3 and _module(one.name) in chosen:
            raise ValueError(
                f"{who}: all stacks of {_module(one.name)} in MXFP4 are required by layout "
                f"{chosen[_module(one.name)]!r}, got {one.name} in high precision; quantize it, too, or leave the "
                "others alone with keep_bf16"
            )


def _check_kept(who: str, model: nn.Module, found: list[Exported]) -> None:
    """Raise ValueError for quantized weights that Transformers reads in high precision only."""
    kept = list(getattr(of_transformers(model), "_keep_in_fp32_modules", None) or ())
    for one in found if kept else ():
        if one.layout is None or not one.layout.released:
            continue
        from transformers.quantizers.quantizers_utils import should_convert_module

        if not should_convert_module(_module(one.name), kept):
            raise ValueError(
                f"{who}: {one.name}: a weight in high precision is required by layout {one.layout.name!r}, as "
                f"checkpoints of its model have it, got {one.format}; leave it alone with keep_bf16"
            )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _candidates(quantized: list[Exported]) -> list[Layout]:
    """Return the layouts that ``"auto"`` chooses from: Hugging Face's, if one holds all weights and quantizes inputs as
    their recipes do: per 1x128, with gpt-oss's experts not at all.
    """
    inputs = {one.part.recipe.input.rowwise_format for one in quantized}
    for name, known in _HUGGING_FACE.items():
        layout = LAYOUTS[name]
        if (
            inputs
            and inputs <= known
            and all(
                one.format and layout.can_hold(one.format, one.matrix, one.axes)
                for one in quantized
            )
        ):
            return [layout]
    return [layout for layout in LAYOUTS.values() if layout.stored_as]


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each parameter and buffer that is exported, tied ones once."""
    seen: set[int] = set()
    for name, value in named_tensors(model):
        value = _held(value)
        if weight_of_state(name) is None and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _held(value: Tensor) -> Tensor:
    """Return the DTensor that FSDP2 shards of a weight that is gathered now; any other as it is."""
    part = local(value)
    if isinstance(part, HybridTensor) and part.record.gathered is not None:
        held: Tensor = part.record.gathered.sharded.param.sharded_param
        return held
    return value


def _of(
    who: str, name: str, value: Tensor, layer: Layer | None, managed: dict[int, ShardedParam]
) -> Exported:
    """Return a parameter as it is exported, its layout still to be chosen."""
    require_shape(who, name, value)
    if isinstance(value, DTensor) and has_several_sections(value):
        raise ValueError(
            f"{who}: {name}: one section on each rank is required, got {list(value.shape)} placed as "
            f"{value.placements}; save_pretrained the model, load it in one process, and export that"
        )
    part = part_of(value)
    if layer is None or not is_converted(part) or is_of_no_layer(part):
        return Exported(name, value)
    fmt = _format(who, name, part)
    if fmt.is_identity:
        return Exported(name, value)
    if part.is_transposed and not layer.is_stack:
        raise NotImplementedError(
            f"{who}: a weight [out, in] is required, got {name} of a {type(layer.module).__name__} with weight "
            "[in, out], for which engines have no layout; leave it out of quantize_ (keep_bf16), or export values: "
            "plain_ on a copy of the model"
        )
    one = Exported(name, value, layer, None, fmt, managed.get(id(part)))
    return one if not isinstance(value, DTensor) else one._replace(format=_of_parts(who, one, fmt))


def _format(who: str, name: str, part: Weight) -> Format:
    """Return the format of the face that the forward multiplies."""
    if not isinstance(part, HybridTensor):
        return part.recipe.weight.rowwise_format
    face = part.columnwise if part.is_transposed else part.rowwise
    if face is None:
        raise ValueError(
            f"{who}: {name}: a persistent weight with the face that the forward multiplies is required, got "
            "none; load one with both faces"
        )
    return face.format


def _of_parts(who: str, one: Exported, fmt: Format) -> Format:
    """Return the format in which the parts of tensor-parallel ranks, each with scales of its own, are one face.

    Raises:
        ValueError: If there is none.
    """
    shard = one.shard
    part = one.part.shape if shard is None else shard.sharded.size
    sizes = tuple(part[-2:][::-1]) if one.is_turned else tuple(part[-2:])
    cut = [mine != whole for mine, whole in zip(sizes, one.matrix, strict=True)]
    # Whether scales along each axis go beyond a part
    shared = [extent is None or sizes[axis] % extent for axis, extent in enumerate(fmt.block)]
    if not any(cut[axis] and shared[axis] for axis in (0, 1)) and not (
        any(cut) and fmt.tensor_block
    ):
        return fmt
    values = one.sharded is not None and plan_of(one.sharded, one.part.recipe).row.kind != "bytes"
    whole = one.sharded is not None and bool(plan_of(one.sharded, one.part.recipe).whole)
    # The scale of a part is that of all its rows: together the parts are a face with a scale per row.
    if fmt is FP8_E4M3_TENSOR and not cut[1] and not (values or whole):
        return FP8_E4M3_ROW
    raise ValueError(
        f"{who}: {one.name}: scales that end with each tensor-parallel rank's part {list(sizes)} are required, "
        f"got {fmt} of {list(one.matrix)}, of which every part has its own; use a recipe with blocks that "
        "divide the part, such as 'fp8_block' or 'mxfp8', or export the checkpoint in one process"
    )


def _check_readers(who: str, model: nn.Module, weights: dict[int, str]) -> None:
    """Raise ValueError where a quantized weight is that of an embedding, too, which reads values."""
    for name, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and id(_held(module.weight)) in weights
        ):
            raise ValueError(
                f"{who}: {name} reads the values of {weights[id(_held(module.weight))]}, which linear layers "
                "quantize, and no layout has both; leave the tied layer alone with keep_bf16"
            )
