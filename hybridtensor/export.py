"""Weights as safetensors files: in high precision for other tools, or as quantized faces.

Needs the package ``safetensors``: ``pip install hybridtensor[export]``.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridtensor.arguments import (
    place,
    require_choice,
    require_file,
    require_flag,
    require_in_range,
    require_kind,
    require_memory,
    require_module,
    require_path,
    require_timeout,
)
from hybridtensor.distributed.checkpoint.plain import named_tensors
from hybridtensor.dtensor import local, with_local
from hybridtensor.formats import get_format
from hybridtensor.inference.stored import require_scales
from hybridtensor.layers import is_of_no_layer
from hybridtensor.ops import Face
from hybridtensor.optim import MasterWeights
from hybridtensor.ranks import TIMEOUT, together
from hybridtensor.state import weight_of_state
from hybridtensor.state.contract import is_first_rank
from hybridtensor.subclasses import (
    FaceTensor,
    HybridTensor,
    IdentityTensor,
    MasterWeight,
    QuantizedTensor,
)
from hybridtensor.subclasses.followers import follows_rowwise
from hybridtensor.subclasses.quantizing import quantize, quantize_weight
from hybridtensor.untrusted.files import own_folder
from hybridtensor.untrusted.safetensors_files import safetensors, save_file

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_KEY, _VERSION = "hybridtensor", 1
_KEYS = {"version", "weights", "digest"}

Description: TypeAlias = dict[str, Any]
"""What the metadata of a file tells of a weight or face, as JSON."""


def export_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    dtype: str = "bf16",
    *,
    columnwise: bool = False,
    masters: MasterWeights | None = None,
    timeout: datetime.timedelta = TIMEOUT,
) -> Path:
    """Write the weights of ``model`` into one safetensors file, which appears only once it is complete.

    ::

        ht.export_safetensors(model, "model.safetensors", "bf16")

    In high precision the file has the names and tensors of the plain model, so that Hugging Face and other tools can
    read it. Buffers are written unchanged, the state of quantizers is not. Tied weights are written under their first
    name, and the metadata maps the other names to it, as ``safetensors.torch.save_model`` does.

    All ranks of a sharded model must call it, and the first writes; if one fails, all raise. Others may call it alone.

    Args:
        model: Any module.
        path: The file; an existing one is replaced, a missing folder made.
        dtype: ``"bf16"``, ``"fp16"``, ``"fp32"``: dtype of floating-point tensors. ``"quantized"``: converted weights
            as elements and scales, ``<name>.rowwise.qdata`` and so on, with their formats in the metadata;
            ``load_safetensors`` reads them.
        columnwise: Also write columnwise faces, which only training needs.
        masters: Optimizer with the fp32 values of persistent weights; without it, these are dequantized.
        timeout: How long to wait for the slowest rank of a sharded model.

    Returns:
        The path of the file, which the first rank has written when any rank returns; of a model that is not sharded,
        when the first rank returns.

    Raises:
        ImportError: If ``safetensors`` is not installed.
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is wrong, a tensor is on meta or too large for fp16, or a weight has no forward face.
        NotImplementedError: If ``dtype`` is ``"quantized"`` and the model is sharded; for a stage of a pipeline.
        OSError: If the file cannot be written; of a sharded model RuntimeError, on every rank.
        RuntimeError: If a rank is gone; on every rank.
    """
    require_module("export_safetensors", model)
    require_timeout("export_safetensors", timeout)
    library = safetensors("export_safetensors")
    first = is_first_rank("export_safetensors", model)
    everyone = together("export_safetensors", model, timeout)
    everyone(lambda: _check(path, dtype, columnwise, masters))
    tensors, metadata = everyone(lambda: _collect(model, dtype, columnwise, masters))
    target = Path(path)

    def write() -> None:
        if first:
            whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            _write(library, whole, metadata, target)

    everyone(write)
    return target


def _check(
    path: str | os.PathLike[str], dtype: str, columnwise: bool, masters: MasterWeights | None
) -> None:
    """Raise for arguments of the wrong kind."""
    require_file("export_safetensors", path)
    require_flag("export_safetensors", columnwise=columnwise)
    if masters is not None:
        require_kind("export_safetensors", "optim.MasterWeights", masters, MasterWeights)
    require_choice("export_safetensors", "dtype", dtype, (*DTYPES, "quantized"))


@torch.no_grad()
def _collect(
    model: nn.Module, dtype: str, columnwise: bool, masters: MasterWeights | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of the file, and its metadata."""
    of = {} if masters is None else {id(w): m.detach() for w, m in masters.masters().items()}
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    weights: dict[str, Description] = {}
    for name, value, first in _named(model):
        quantized = dtype == "quantized" and not is_of_no_layer(local(value))
        if first != name:
            metadata[name] = first
        elif quantized and isinstance(local(value), (MasterWeight, HybridTensor)):
            weights[name] = _add_faces(tensors, name, value, columnwise)
        else:
            tensors[name] = _in_high_precision(name, value, of, DTYPES.get(dtype))
    if dtype == "quantized":
        digest = _digest(weights, tensors, metadata)
        description = {"version": _VERSION, "weights": weights, "digest": digest}
        metadata[_KEY] = json.dumps(description, sort_keys=True)
    return tensors, metadata


def _digest(weights: Description, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> str:
    """Return a digest of all that the header of a file tells, but of the place of each tensor."""
    description = {
        name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()
    }
    tied = {name: first for name, first in metadata.items() if name != _KEY}
    return hashlib.sha256(
        json.dumps([weights, description, tied], sort_keys=True).encode()
    ).hexdigest()


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Yield name and tensor of all that is exported, and the first name of the same tensor."""
    first: dict[int, str] = {}
    for name, value in named_tensors(model):
        if weight_of_state(name) is None:
            require_memory("export_safetensors", name, value)
            yield name, value, first.setdefault(id(value), name)


def _in_high_precision(
    name: str, value: Tensor, masters: dict[int, Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Return the whole tensor, in ``dtype`` if it is a floating-point one."""
    part = local(value)
    if isinstance(part, HybridTensor):
        known = part.dequantize() if part.original is None else part.original
        values = local(masters.get(id(value), known))
    else:
        values = part.plain if isinstance(part, MasterWeight) else part.detach()
    if dtype is not None and values.is_floating_point():
        values = values.to(dtype)
    whole = with_local(value, values.detach())
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return require_in_range("export_safetensors", name, value, whole)


def _add_faces(
    tensors: dict[str, Tensor], name: str, value: Tensor, columnwise: bool
) -> Description:
    """Add the tensors of a weight's faces; return what they are."""
    if not isinstance(value, (MasterWeight, HybridTensor)):
        raise NotImplementedError(
            f"export_safetensors: {name} is sharded, and a quantized export needs the whole "
            "weight; load the checkpoint in one process and export there"
        )
    weight = value if isinstance(value, HybridTensor) else _quantized(value, columnwise)
    description: Description = {
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "faces": {},
    }
    if value.config is not None:
        description |= {"recipe": str(value.config), "fingerprint": value.config.fingerprint()}
    # The face that the forward multiplies
    forward = "columnwise" if value.is_transposed else "rowwise"
    directions = ("rowwise", "columnwise") if columnwise else (forward,)
    for direction in directions:
        face = getattr(weight, direction)
        if "rowwise" in description["faces"] and follows_rowwise(weight):
            description["faces"][direction] = {"follows": "rowwise"}
        elif face is not None:
            description["faces"][direction] = _add_face(tensors, f"{name}.{direction}", face)
    if not description["faces"]:
        raise ValueError(
            f"export_safetensors: the weight {name} has no {forward} face; pass columnwise=True"
        )
    return description


def _quantized(weight: MasterWeight, columnwise: bool) -> HybridTensor:
    """Quantize a master weight as the next forward would, and record nothing."""
    context = weight.context._replace(record=False)
    if weight.is_transposed:
        return quantize_weight(weight.config, weight.plain, context, weight.layer)
    return quantize(weight.config.weight, weight.source, columnwise=columnwise, context=context)


def _add_face(tensors: dict[str, Tensor], prefix: str, face: FaceTensor) -> Description:
    if isinstance(face, IdentityTensor):
        if isinstance(face.source, QuantizedTensor):
            return {"of": _add_face(tensors, f"{prefix}.source", face.source)}
        tensors[f"{prefix}.source"] = face.source.clone()
        return {"format": face.format.name}
    for part_name in face.parts()[0]:
        tensor = getattr(face, part_name)
        if tensor.dtype == torch.float8_e8m0fnu:  # exponents: not every reader knows the dtype
            tensor = tensor.view(torch.uint8)
        tensors[f"{prefix}.{part_name}"] = tensor.clone()
    return {"format": face.format.name, "axis": face.axis}


def load_safetensors(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Read what ``export_safetensors`` wrote: plain tensors, and a ``HybridTensor`` for each quantized weight.

    ::

        ht.export_safetensors(model, "model.safetensors", "quantized")
        tensors = ht.load_safetensors("model.safetensors")

    A loaded ``HybridTensor`` has no recipe. It can be dequantized, multiplied, or loaded into a persistent weight of
    the same formats with ``load_state_dict``; a columnwise face that is not in the file is then quantized from the
    dequantized rowwise one.

    Args:
        path: The file.
        device: Device of the returned tensors.

    Raises:
        ImportError: If ``safetensors`` is not installed.
        TypeError: If ``path`` is no path, or ``device`` no device or its name.
        ValueError: If there is no regular file at ``path``, or no such device on this machine; if the file is damaged,
            names a format that is not known, lacks a tensor, or has one of another shape or dtype, or scales that are
            no numbers above zero. Other bits of the tensors themselves, and of the names in a file in high precision,
            are not checked.
        OSError: If the file cannot be read.
    """
    require_path("load_safetensors", path)
    device = place("load_safetensors", device)
    if not Path(path).is_file():
        raise ValueError(
            f"load_safetensors: a file is required, got {os.fspath(path)!r}; export one first"
        )
    library = safetensors("load_safetensors")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter by builds without CUDA
        raise ValueError(
            f"load_safetensors: the device {device} cannot be used: {error}; name one that this machine has"
        ) from error
    try:
        return _load(library, path, device)
    except OSError:
        raise
    except Exception as error:  # damaged files raise whatever they like
        raise ValueError(
            f"load_safetensors: {path} is not what export_safetensors writes: {error}"
        ) from error


def _load(
    library: ModuleType, path: str | os.PathLike[str], device: str | torch.device
) -> dict[str, Tensor]:
    with library.safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    description = json.loads(metadata.get(_KEY, '{"version": 1, "weights": {}}'))
    if description["version"] != _VERSION:
        raise ValueError(f"it has version {description['version']}, this library reads {_VERSION}")
    digest = _digest(description["weights"], tensors, metadata)  # before faces are taken out
    for name, weight in description["weights"].items():
        tensors[name] = _take_weight(tensors, name, weight)
    if not description.keys() <= _KEYS or description.get("digest", digest) != digest:
        raise ValueError("what it tells of its tensors is not what was written")
    tied = {name: first for name, first in metadata.items() if name not in ("format", _KEY)}
    return tensors | {name: tensors[first] for name, first in tied.items()}


def _take_weight(tensors: dict[str, Tensor], name: str, description: Description) -> HybridTensor:
    """Take the tensors of the faces of a weight out of ``tensors``."""
    size, dtype = tuple(int(n) for n in description["shape"]), _dtype(description["dtype"])
    faces: dict[str, FaceTensor] = {}  # the rowwise one first
    for direction, face in sorted(description["faces"].items(), reverse=True):
        if face.get("follows") == "rowwise":
            row = faces["rowwise"]
            faces[direction] = IdentityTensor(
                row.source if isinstance(row, IdentityTensor) else row
            )
        else:
            faces[direction] = _take_face(tensors, f"{name}.{direction}", face, size, dtype)
    return HybridTensor(faces.get("rowwise"), faces.get("columnwise"))


def _dtype(name: str) -> torch.dtype:
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    found = known.get(name)
    if found is None:
        raise ValueError(f"{name!r} is no high-precision dtype")
    return found


def _take_face(
    tensors: dict[str, Tensor],
    prefix: str,
    description: Description,
    size: tuple[int, ...],
    dtype: torch.dtype,
) -> FaceTensor:
    if "of" in description:
        source = _take_face(tensors, f"{prefix}.source", description["of"], size, dtype)
        return IdentityTensor(source)
    fmt = get_format(description["format"])
    if fmt.is_identity:
        return IdentityTensor(_take(tensors, f"{prefix}.source", size, dtype))
    axis = description["axis"]
    if axis not in (-1, 0) or len(size) not in (2, 3):
        raise ValueError(
            f"{prefix} has size {size} and axis {axis!r}, not those of a matrix or a stack and -1 or 0"
        )
    (*stack, rows, columns) = size
    other, contraction = (rows, columns) if axis == -1 else (columns, rows)

    def take(name: str, shape: tuple[int, int], of: torch.dtype | None) -> Tensor:
        return _take(tensors, f"{prefix}.{name}", (*stack, *shape), of)

    second = fmt.tensor_scale_shape(other, contraction)
    qdata = take("qdata", (other, contraction // fmt.elements_per_byte), fmt.storage)
    scale = take("scale", fmt.scale_shape(other, contraction), fmt.scale_dtype)
    tensor_scale = None if second is None else take("tensor_scale", second, torch.float32)
    require_scales(f"{prefix}.scale", scale, "load_safetensors")
    if tensor_scale is not None and not bool((tensor_scale.isfinite() & (tensor_scale >= 0)).all()):
        raise ValueError(f"{prefix}.tensor_scale has amaxes that are infinite, NaN or below zero")
    return QuantizedTensor(Face(qdata, scale, tensor_scale, fmt), axis, dtype, size)


def _take(
    tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    if name not in tensors:
        raise ValueError(f"it has no tensor {name}, of which its metadata tells")
    tensor = tensors.pop(name)
    if dtype == torch.float8_e8m0fnu and tensor.dtype == torch.uint8:
        tensor = tensor.view(dtype)
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"{name} has {tuple(tensor.shape)} of {tensor.dtype}, not {tuple(shape)} of {dtype}"
        )
    return tensor


def _write(
    library: ModuleType, tensors: dict[str, Tensor], metadata: dict[str, str], target: Path
) -> None:
    """Write a file under another name, bring it to the disk, and rename it."""
    with own_folder(target) as own:
        partial = own / target.name
        save_file("export_safetensors", library, tensors, partial, metadata)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(target)
