"""The weights of a model as inference engines load them: the bytes that the forward multiplies."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridtensor.arguments import (
    require_choice,
    require_dtype,
    require_flag,
    require_in_range,
    require_int,
    require_memory,
    require_module,
    require_timeout,
)
from hybridtensor.distributed.checkpoint.agreement import check_arguments
from hybridtensor.inference.input_scales import SUFFIX, check_inputs
from hybridtensor.inference.layouts import AUTO, require_layout
from hybridtensor.inference.names import Names
from hybridtensor.inference.sources import places_of, size_of, whole_tensors
from hybridtensor.inference.weights import Exported, exported, names_of
from hybridtensor.ops import Face
from hybridtensor.ops.groups import matrix_of
from hybridtensor.ranks import TIMEOUT, Ranks, is_sharded, together
from hybridtensor.state.contract import is_first_rank

BUCKET = 256 * 2**20
_WHO = "inference_tensors"


class Wanted(NamedTuple):
    """What ``inference_tensors`` is asked for; see there."""

    layout: str
    experts: str
    dtype: torch.dtype = torch.bfloat16
    bucket_bytes: int = BUCKET
    ranks: str = "all"
    static_inputs: bool = False


def inference_tensors(
    model: nn.Module,
    layout: str = AUTO,
    *,
    experts: str = "separate",
    dtype: torch.dtype = torch.bfloat16,
    bucket_bytes: int = BUCKET,
    ranks: str = "all",
    static_inputs: bool = False,
    timeout: datetime.timedelta = TIMEOUT,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights of a model in the layout of an inference engine.

    ::

        for name, tensor in ht.inference_tensors(model):
            engine_weights[name] = tensor.clone()

    For converted weights it yields the quantized data and scales of the rowwise face, which the next forward
    multiplies; other tensors are cast to ``dtype``. Tied weights are yielded once, under their first name. The tensors
    may alias cached faces: copy what must outlive the next write. All ranks of a sharded model (FSDP2, tensor and
    expert parallel) must iterate to the end: they exchange quantized bytes, in buckets.

    Args:
        model: Any model.
        layout: ``"hf_fp8"``, ``"hf_fp8_ue8m0"``, ``"hf_mxfp4"``, ``"hf_deepseek_v4"``, ``"ct_fp8_tensor"``,
            ``"ct_fp8_row"``, ``"ct_fp8_block"``, ``"ct_mxfp8"``, ``"ct_mxfp4"``, ``"ct_nvfp4"``. ``"auto"`` chooses one
            of Hugging Face's if it can store all weights and its engines quantize inputs as the recipes do (per 1x128;
            with gpt-oss's experts not at all), else the layout of compressed-tensors for each weight's format.
        experts: ``"separate"`` yields each expert under a name of its own: that of the checkpoint for models of
            transformers, else ``experts.3.w1.weight``. ``"stacked"``, and always ``"hf_mxfp4"``, uses the model's.
        dtype: Dtype of tensors that are not quantized, except those that Transformers keeps in FP32.
        bucket_bytes: Bytes of whole tensors that are sent together; at least one tensor.
        ranks: Ranks that get the tensors: ``"all"``, or ``"first"``, of a whole model: others get none.
        static_inputs: Whether to export delayed scales of inputs as ``input_scale``, in the layouts of
            compressed-tensors per tensor or row; otherwise engines measure inputs.
        timeout: How long to wait for the slowest rank of a sharded model.

    Yields:
        Names and plain tensors. ``weight`` float8_e4m3fn ``[N, K]`` with ``weight_scale_inv`` or ``weight_scale``, or
        ``weight_packed`` uint8 ``[N, K / 2]`` with ``weight_scale`` and ``weight_global_scale``; of a stack
        ``NAME_blocks`` uint8 ``[E, N, K / 32, 16]`` with ``NAME_scales``; of DeepSeek V4 ``weight`` float8_e4m3fn, of
        experts int8 ``[N, K / 2]``, with ``scale``; ``input_scale`` fp32 ``[1]``.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If no layout, or not the given one, can store a weight, with an alternative; of a meta tensor; if
            ranks differ. Everywhere, before anything is sent, but for MXFP4 exponents that NVFP4 cannot hold, and for
            values that are too large for fp16.
        RuntimeError: If a rank is gone; on every rank.
    """
    wanted = Wanted(layout, experts, dtype, bucket_bytes, ranks, static_inputs)
    return tensors_for(_WHO, model, timeout, wanted)


def tensors_for(
    who: str, model: nn.Module, timeout: datetime.timedelta, wanted: Wanted
) -> Iterator[tuple[str, Tensor]]:
    """Iterate as ``inference_tensors`` does; ``who`` begins messages."""
    require_module(who, model)
    require_timeout(who, timeout)
    mine = wanted.ranks == "all" or is_first_rank(who, model)
    names, found = together(who, model, timeout)(lambda: _read(who, model, wanted))
    everyone = Ranks(who, None, timeout) if is_sharded(model) else None
    if everyone is not None:
        given = {name: str(value) for name, value in wanted._asdict().items()}
        check_arguments(everyone, **given, timeout=str(timeout), weights=_digest(found))
    return _named(who, wanted, names, found, mine, everyone)


def _stacks_to_split(found: Iterable[Exported]) -> set[str]:
    """Return the names of stacks whose experts get names of their own in quantized layouts."""
    of_layouts = [one for one in found if one.layout is not None and one.value.dim() == 3]
    return {one.name for one in of_layouts if one.layout and not one.layout.whole_stacks}


def _read(who: str, model: nn.Module, wanted: Wanted) -> tuple[Names, list[Exported]]:
    """Check arguments, and find what is exported and its names: on all ranks, as one may have another argument."""
    require_layout(who, wanted.layout)
    require_dtype(who, wanted.dtype)
    require_int(who, at_least=1, bucket_bytes=wanted.bucket_bytes)
    require_choice(who, "ranks", wanted.ranks, ("all", "first"))
    require_flag(who, static_inputs=wanted.static_inputs)
    found = exported(who, model, wanted.layout)
    for one in found:
        require_memory(who, one.name, one.value)
    if wanted.static_inputs:
        check_inputs(who, found)
    return names_of(who, model, wanted.experts, found), found


def _digest(found: list[Exported]) -> str:
    """Return a digest of what every rank must export alike, or gathers would mix or wait for ever."""
    described = [
        (one.name, tuple(one.value.shape), str(one.format), one.layout and one.layout.name)
        for one in found
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _named(
    who: str,
    wanted: Wanted,
    names: Names,
    found: list[Exported],
    mine: bool,
    everyone: Ranks | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, a bucket after the other; none unless they are ``mine``."""
    places, stacks, seen = places_of(found), _stacks_to_split(found), set[str]()
    dtype, first_only = wanted.dtype, wanted.ranks == "first"
    failed: Exception | None = None
    for bucket in _buckets(found, dtype, wanted.bucket_bytes):
        if everyone is not None:  # gathers wait as long as their own groups say
            everyone.each(lambda: None)
        # Every rank takes part in every gather, also one that gets nothing, and one that has
        # failed: the others would wait.
        for one, whole in whole_tensors(bucket, places, dtype, first_only):
            if whole is None or not mine or failed is not None:
                continue
            try:
                pairs = list(_packed(who, one, whole, names, stacks, wanted.static_inputs))
                _check_new(who, one, pairs, seen)
            except Exception as error:  # other ranks may wait in gathers to come
                failed = error
                continue
            yield from pairs
    if failed is not None:
        raise failed


def _check_new(who: str, one: Exported, pairs: list[tuple[str, Tensor]], seen: set[str]) -> None:
    """Raise ValueError if a name was there before."""
    for name, _ in pairs:
        if name in seen:
            raise ValueError(
                f"{who}: one tensor for each name is required, got a second {name!r}, of "
                f"{one.name}; rename the parameter, or choose experts='stacked'"
            )
        seen.add(name)


def _buckets(found: list[Exported], dtype: torch.dtype, most: int) -> Iterator[list[Exported]]:
    """Yield what is exported, as much at a time as is gathered together."""
    bucket: list[Exported] = []
    nbytes = 0
    for one in found:
        size = size_of(one, dtype)
        if bucket and nbytes + size > most:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(one)
        nbytes += size
    if bucket:
        yield bucket


def _packed(
    who: str,
    one: Exported,
    whole: Face | Tensor,
    names: Names,
    stacks: set[str],
    static_inputs: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of what is exported as its layout stores them."""
    if one.layout is None or isinstance(whole, Tensor):
        if isinstance(whole, Tensor):
            require_in_range(who, one.name, one.value, whole)
        biases = names.of_biases(one.name, one.value.shape)
        if biases and one.name.removesuffix("_bias") in stacks and isinstance(whole, Tensor):
            yield from zip(biases, whole.unbind(0), strict=True)
        elif isinstance(whole, Tensor):
            yield from names.of_values(one.name, whole)
        return
    faces = [whole]
    if one.value.dim() == 3:
        faces = [matrix_of(whole, expert) for expert in range(one.value.shape[0])]
    try:
        packed = [one.layout.packed(f"{who}: {one.name}", face) for face in faces]
    except ValueError as error:
        raise ValueError(f"{who}: {one.name}: {error}") from error
    scales = one.input_scales if static_inputs else None
    for of_one, scale in zip(packed, () if scales is None else scales, strict=False):
        of_one[SUFFIX] = scale.reshape(1)
    if one.value.dim() == 3:
        yield from names.of_experts(one.name, packed)
    else:
        yield from names.of_matrix(one.name, packed[0])
