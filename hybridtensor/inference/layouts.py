"""The layouts that inference engines load: how the tensors of a face are named and stored in each.

A layout stores the bytes of a face as they are. Only what says the same in other words is rewritten:
a scale per tensor as one per row, scales of square blocks once for each row, a tensor scale as its
reciprocal, MXFP4 as NVFP4 where that has its exponents.

Shape letters: ``N, K`` a weight.

Source: the loaders of transformers 5 (``FineGrainedFP8Config``, ``Mxfp4Config``) and of compressed-tensors
0.20, which vLLM and SGLang share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridtensor import formats
from hybridtensor.arguments import nearest, require_kind, require_text, wrong
from hybridtensor.formats import Format
from hybridtensor.inference.recoded import nvfp4_of_mxfp4
from hybridtensor.ops import Face

Packed = dict[str, Tensor]
"""Tensors of a weight, by what their names end in."""

Settings = dict[str, Any]
"""What a configuration says: of weights or inputs, or all of it."""


@dataclass(frozen=True)
class Layout:
    """One layout.

    Attributes:
        name: What users call it.
        holds: The formats of faces that it can store.
        pack: Returns the tensors of a face ``[N, K]``.
        settings: What the configuration says of weights.
        stored_as: What compressed-tensors calls it; "" for the one of Hugging Face.
        block: Extents of blocks of which its readers need whole ones, if there are more than one.
        of_experts: Formats that only stacks of experts have, which have no others.
        whole_stacks: Whether these are stacks that models have as ``[E, K, N]``, each stored as one.
        released: Whether names are those of a released checkpoint, without the ``model.`` of transformers, and so is
            what it has in high precision.
        inputs: How its readers quantize inputs, by a rule of ``mismatch``, whatever the recipe; compressed-tensors'
            do what the configuration says.
    """

    name: str
    holds: tuple[Format, ...]
    pack: Callable[[Face], Packed]
    settings: Settings
    stored_as: str = ""
    block: tuple[int, int] = (1, 1)
    of_experts: tuple[Format, ...] = ()
    whole_stacks: bool = False
    released: bool = False
    inputs: str | None = None

    @property
    def has_input_scales(self) -> bool:
        """Whether it can store a scale of inputs per tensor: engines have that beside scales per tensor and per row."""
        return self.settings.get("strategy") in ("tensor", "channel")

    def packed(self, who: str, face: Face) -> Packed:
        """Store a face by ``pack``, as named tensors; raise TypeError if that makes anything else."""
        who, found = f"{who}: layout {self.name!r}", self.pack(face)
        if not isinstance(found, dict) or not found:
            raise wrong(who, "a dictionary of tensors, which its function returns,", found)
        for suffix, tensor in found.items():
            require_kind(who, f"a tensor as {suffix!r}", tensor, Tensor)
        return found

    def check(self, who: str, fmt: Format, size: tuple[int, int], axes: str) -> None:
        """Raise unless weights of a format and a size can be stored.

        Args:
            who: Begins the message: the function and the weight.
            fmt: Of the rowwise face.
            size: ``(N, K)``.
            axes: Of a stack, as the model has it, ``"ENK"`` or ``"EKN"``; "" for another weight.

        Raises:
            ValueError: If not, naming layouts that can.
        """
        if fmt not in self.holds:
            raise ValueError(
                f"{who}: a face of {_told(self.holds)} is required by layout {self.name!r}, got {fmt}; "
                f"{_advice(fmt, size, axes)}"
            )
        if not self._is_of(fmt, axes) and fmt in self.of_experts:
            stack = "a stack of experts [E, K, N]" if self.whole_stacks else "a stack of experts"
            raise ValueError(
                f"{who}: {stack} is required by layout {self.name!r}, which has nothing else in {fmt}, got another "
                f"weight; leave it alone with keep_bf16, or {_advice(fmt, size, axes)}"
            )
        if not self._is_of(fmt, axes):
            raise ValueError(
                f"{who}: a face of {_told(self.of_experts)} is required of experts by layout {self.name!r}, got {fmt}; "
                f"give them such weights, or {_advice(fmt, size, axes)}"
            )
        if not self._fits(fmt, size):
            raise ValueError(
                f"{who}: whole blocks of {self.block[0]}x{self.block[1]} are required by layout "
                f"{self.name!r}, whose readers cut others wrongly, got {list(size)}; {_advice(fmt, size, axes)}"
            )

    def can_hold(self, fmt: Format, size: tuple[int, int], axes: str) -> bool:
        """Return whether weights of a format and a size can be stored."""
        return fmt in self.holds and self._is_of(fmt, axes) and self._fits(fmt, size)

    def _is_of(self, fmt: Format, axes: str) -> bool:
        """Return whether experts, and only they, have one of the formats in ``of_experts``."""
        stacks = ("EKN",) if self.whole_stacks else ("EKN", "ENK")
        return not self.of_experts or (fmt in self.of_experts) == (axes in stacks)

    def _fits(self, fmt: Format, size: tuple[int, int]) -> bool:
        """Return whether ``size`` divides into whole blocks, where readers require it."""
        return fmt.block != self.block or all(
            n % b == 0 or n < b for n, b in zip(size, self.block, strict=True)
        )


def _told(some: Iterable[Format]) -> str:
    return " or ".join(str(fmt) for fmt in some)


def _advice(fmt: Format, size: tuple[int, int], axes: str) -> str:
    """Return advice for a face that a layout cannot store."""
    others = [layout.name for layout in LAYOUTS.values() if layout.can_hold(fmt, size, axes)]
    if others:
        return f"layouts that hold it: {', '.join(others)}"
    return (
        "no layout holds it; train the layer with a weight in 'fp8' (E4M3), 'fp8_rowwise', 'fp8_block', "
        "'mxfp8', 'mxfp4' or 'nvfp4', or export it in high precision with export_safetensors"
    )


def _scale(face: Face) -> Tensor:
    if face.scale is None:
        raise ValueError(f"inference layouts: a quantized face is required, got {face.format}")
    return face.scale


def _hf_fp8(face: Face) -> Packed:
    return {"weight": face.qdata, "weight_scale_inv": _scale(face).contiguous()}


def _hf_fp8_ue8m0(face: Face) -> Packed:
    exponents = _scale(face).to(torch.float8_e8m0fnu)  # exact: powers of two in the format's range
    return {"weight": face.qdata, "weight_scale_inv": exponents.contiguous()}


def _per_tensor(face: Face) -> Packed:
    return {"weight": face.qdata, "weight_scale": _scale(face).reshape(1)}


def _per_row(face: Face) -> Packed:
    rows = face.qdata.shape[0]
    return {"weight": face.qdata, "weight_scale": _scale(face).expand(rows, 1).contiguous()}


def _per_block(face: Face) -> Packed:
    return {"weight": face.qdata, "weight_scale": _scale(face).contiguous()}


def _by_row(face: Face) -> Tensor:
    """Return the scales of blocks, once for each row of a square one."""
    scale, across = _scale(face).view(torch.uint8), face.format.block[0] or 1
    return scale.repeat_interleave(across, dim=0)[: face.qdata.shape[0]].contiguous()


def _mxfp8(face: Face) -> Packed:
    return {"weight": face.qdata, "weight_scale": _by_row(face)}


def _mxfp4(face: Face) -> Packed:
    return {"weight_packed": face.qdata, "weight_scale": _by_row(face)}


def _hf_mxfp4(face: Face) -> Packed:
    # gpt-oss's checkpoints have blocks of 32 elements, which are 16 bytes, in a dimension of their
    # own.
    return {"blocks": face.qdata.unflatten(1, (-1, 16)), "scales": _by_row(face)}


def _hf_deepseek_v4(face: Face) -> Packed:
    if face.format not in _MXFP4:
        return {"weight": face.qdata, "scale": _hf_fp8_ue8m0(face)["weight_scale_inv"]}
    exponents = _by_row(face).view(torch.float8_e8m0fnu)
    # DeepSeek's checkpoints have two E2M1 elements in an int8.
    return {"weight": face.qdata.view(torch.int8), "scale": exponents}


def _nvfp4(face: Face) -> Packed:
    if face.format in _MXFP4:
        face = nvfp4_of_mxfp4(face)
    amax = face.tensor_scale
    if amax is None:
        raise ValueError("inference layouts: a face with a tensor scale is required, got none")
    return {
        "weight_packed": face.qdata,
        "weight_scale": _by_row(face).view(torch.float8_e4m3fn),
        # compressed-tensors divides by it, where its other scales multiply.
        "weight_global_scale": (face.format.tensor_scale_max / amax.float()).reshape(1),
    }


def _float8(strategy: str, **more: object) -> Settings:
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        **more,
    }


_TENSOR, _ROW = formats.FP8_E4M3_TENSOR, formats.FP8_E4M3_ROW
_SQUARES = formats.FP8_E4M3_128X128, formats.FP8_E4M3_128X128_FP32_SCALE
_MXFP4 = formats.MXFP4, formats.MXFP4_32X32
_HF = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_UE8M0 = {**_HF, "scale_fmt": "ue8m0"}
_OF_16 = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
_OF_32 = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("hf_fp8", _SQUARES, _hf_fp8, _HF, block=(128, 128), inputs="1x128"),
        Layout(
            "hf_fp8_ue8m0", _SQUARES[:1], _hf_fp8_ue8m0, _UE8M0, block=(128, 128), inputs="1x128",
        ),
        Layout(
            "hf_mxfp4", _MXFP4, _hf_mxfp4, {"quant_method": "mxfp4"}, of_experts=_MXFP4, whole_stacks=True,
        ),
        Layout(
            "hf_deepseek_v4", (*_SQUARES[:1], *_MXFP4), _hf_deepseek_v4, {**_UE8M0, "expert_dtype": "fp4"},
            block=(128, 128), of_experts=_MXFP4, released=True, inputs="1x128",
        ),
        Layout("ct_fp8_tensor", (_TENSOR,), _per_tensor, _float8("tensor"), "float-quantized"),
        Layout("ct_fp8_row", (_ROW, _TENSOR), _per_row, _float8("channel"), "float-quantized"),
        Layout(
            "ct_fp8_block", _SQUARES, _per_block, _float8("block", block_structure=[128, 128]),
            "float-quantized",
        ),
        Layout(
            "ct_mxfp8", (formats.MXFP8_E4M3, formats.MXFP8_E4M3_32X32), _mxfp8, _float8("group", **_OF_32),
            "mxfp8-quantized",
        ),
        Layout(
            "ct_mxfp4", _MXFP4, _mxfp4, {**_float8("group", **_OF_32), "num_bits": 4},
            "mxfp4-pack-quantized",
        ),
        Layout(
            "ct_nvfp4",
            (
                formats.NVFP4, formats.NVFP4_16X16, formats.NVFP4_MAX256, formats.NVFP4_16X16_MAX256, *_MXFP4,
            ),
            _nvfp4,
            {**_float8("tensor_group", **_OF_16), "num_bits": 4}, "nvfp4-pack-quantized",
        ),
    )
}  # fmt: skip
AUTO = "auto"


def require_layout(who: str, name: object) -> None:
    """Raise unless ``name`` is that of a layout, or ``"auto"``."""
    require_text(who, layout=name)
    if name != AUTO and name not in LAYOUTS:
        raise ValueError(f"{who}: unknown layout {name!r}; {nearest(str(name), [AUTO, *LAYOUTS])}")


def choose(
    who: str,
    name: str,
    fmt: Format,
    size: tuple[int, int],
    among: Iterable[Layout],
    *,
    axes: str = "",
) -> Layout:
    """Return the layout of a weight.

    Args:
        who: Begins messages: the function and the weight.
        name: Of a layout, or ``"auto"``.
        fmt: Format of the rowwise face.
        size: ``(N, K)``.
        among: What ``"auto"`` chooses from, best first.
        axes: Of a stack, as the model has it, ``"ENK"`` or ``"EKN"``; "" for another weight.

    Raises:
        ValueError: If no layout can hold it.
    """
    if name != AUTO:
        LAYOUTS[name].check(who, fmt, size, axes)
        return LAYOUTS[name]
    for layout in among:
        if layout.can_hold(fmt, size, axes):
            return layout
    raise ValueError(
        f"{who}: a face that a layout holds is required, got {fmt} of {list(size)}; "
        f"{_advice(fmt, size, axes)}"
    )
