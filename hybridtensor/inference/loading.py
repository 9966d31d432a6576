"""Back from the folders of inference engines: bytes into persistent weights, values into all others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridtensor.arguments import require_flag, require_module, require_path, shown
from hybridtensor.formats import Format
from hybridtensor.inference.input_scales import stored_inputs
from hybridtensor.inference.layouts import Packed
from hybridtensor.inference.names import Names, prefix_of, stacked
from hybridtensor.inference.stored import (
    columnwise_of_stored,
    has_stack,
    in_format,
    packed_matrix,
    packed_stack,
    require_values,
    stored_face,
)
from hybridtensor.inference.weights import named
from hybridtensor.inference.writing import Inputs, write
from hybridtensor.layers import layers_of
from hybridtensor.ops import Face
from hybridtensor.ops.dequantize import face_values
from hybridtensor.ops.face import bytewise
from hybridtensor.ranks import is_sharded
from hybridtensor.subclasses import HybridTensor, IdentityTensor, QuantizedTensor
from hybridtensor.subclasses.faces import face_tensor
from hybridtensor.subclasses.followers import follows_rowwise
from hybridtensor.untrusted.safetensors_files import safetensors
from hybridtensor.untrusted.safetensors_folder import Folder

_WHO = "load_pretrained"


def load_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True
) -> nn.Module:
    """Load a folder of ``export_pretrained``, or a checkpoint in FP8 blocks of 128x128 (DeepSeek's) or with experts
    in MXFP4 (gpt-oss's, DeepSeek V4's), in place.

    ::

        ht.quantize_(model, "fp8_rowwise", persistent=True)
        ht.load_pretrained(model, "exported")

    Persistent weights get the stored bytes and scales; their columnwise faces are quantized from the dequantized
    values. Master and plain weights get these values, each rounded once to their dtype. The amax of NVFP4 is computed
    from the stored global scale; it is the original one if the weights were bf16. Scales of inputs are loaded into
    layers with delayed scales.

    If a load fails, the model is unchanged: everything is checked before the first write, and writes are undone. Links
    are followed only inside the folder, and from a snapshot of the Hugging Face hub into its blobs.

    Args:
        model: A model with the names of the folder, or of transformers; not sharded. For persistent weights call
            ``quantize_`` before, with the formats of the folder and ``persistent=True``.
        folder: Folder with ``model.safetensors``, or with several files and their index.
        strict: Whether to raise if a parameter or a tensor of the folder has no counterpart; otherwise a warning lists
            them.

    Returns:
        ``model``.

    Raises:
        ImportError: If ``safetensors`` is not installed.
        TypeError: If an argument is of the wrong kind.
        ValueError: If the folder does not exist; if a file is damaged, no regular file, or outside of the folder; if
            tensors are missing, left over, or of other shapes; if a weight is stored in another format than its
            recipe's.
        NotImplementedError: If the model is sharded.
    """
    require_module(_WHO, model)
    require_path(_WHO, folder)
    require_flag(_WHO, strict=strict)
    if is_sharded(model):
        raise NotImplementedError(
            f"{_WHO}: the model is sharded over ranks; load before fully_shard or parallelize_module"
        )
    library, path = safetensors(_WHO), Path(folder)
    with Folder(_WHO, library, path) as stored:
        prefix = prefix_of(model)
        # DeepSeek V4's checkpoints have names without the ``model.`` of transformers; that no name
        # begins with it is all that says so.
        bare = not any(name.startswith(prefix) for name in stored.unused)
        names = Names(_WHO, model, "separate", bare=bare)
        state, inputs, missing = _read(model, names, stored)
        left, files = stored.unused, stored.files
    if missing or left:
        where = f"{path} ({', '.join(files[:5])})"
        _report_left_out(where, len(state), missing, left, strict=strict)
    write(_WHO, model, state, inputs)
    return model


def _read(
    model: nn.Module, names: Names, stored: Folder
) -> tuple[dict[str, Tensor], Inputs, list[str]]:
    """Read parameters and buffers by name, and scales of inputs; and name the parameters that a folder lacks."""
    layers = {id(layer.weight): layer for layer in layers_of(model)}
    state: dict[str, Tensor] = {}
    inputs: Inputs = []
    missing = []
    for name, value in named(model):
        layer = layers.get(id(value))
        turned = layer is not None and layer.transposed
        with stored.naming_files():
            found = (
                _of_stack(stored, names, name, value, turned)
                if value.dim() == 3
                else _of_matrix(stored, names, name, value)
            )
            if found is None:
                missing.append(name)
                continue
            _require_place(name, value, found)
            _require_numbers(name, value, found)
            state[name] = found
            inputs += stored_inputs(stored, names, name, value, layer)
    return state, inputs, missing


def _report_left_out(
    where: str, loaded: int, missing: list[str], left: list[str], *, strict: bool
) -> None:
    """Raise ValueError, or warn, about parameters that a folder lacks, and tensors that a model lacks."""
    if strict:
        raise ValueError(
            f"{_WHO}: each parameter in the folder, and nothing else, is required, got no {missing[:5]} and "
            f"{left[:5]} besides, {len(missing)} and {len(left)} in all, in {where}; or pass strict=False"
        )
    warnings.warn(
        f"{_WHO}: {loaded} parameters and buffers were loaded from {where}; it has no {missing[:5]}, and of "
        f"{left[:5]} the model has none, {len(missing)} and {len(left)} in all",
        stacklevel=3,
    )


def _of_matrix(stored: Folder, names: Names, name: str, value: Tensor) -> Tensor | None:
    """Return the values or faces for a parameter or buffer; None if the folder has none."""
    (own,) = names.of_module(name)
    if not own.endswith("weight") or value.dim() != 2:
        biases = names.of_biases(name, value.shape)
        if own in stored or name in stored:
            tensor = stored[own if own in stored else name]
        elif biases and all(bias in stored for bias in biases):  # of experts, one by one
            tensor = torch.stack([_of_size(bias, stored[bias], value.shape[1:]) for bias in biases])
        else:
            return None
        if value.is_floating_point():
            require_values(own, tensor)
        elif tensor.dtype != value.dtype:
            raise ValueError(f"{_WHO}: {own} in {value.dtype} is required, got {tensor.dtype}")
        return tensor
    packed = packed_matrix(own, stored) or packed_matrix(name, stored)
    if not packed:
        return None
    face = stored_face(own, packed)
    return packed["weight"] if face is None else _as_value(name, value, face)


def _of_stack(
    stored: Folder, names: Names, name: str, value: Tensor, turned: bool
) -> Tensor | None:
    """Return the values or faces for a stack of experts, of the parts that a folder has; None if it lacks one.

    Args:
        stored: The folder.
        names: Of its tensors.
        name: Of the stack.
        value: The stack.
        turned: Whether it is stored ``[E, K, N]``.
    """
    rows = value.shape[2] if turned else value.shape[1]
    renamed = names.of_stack(name, value.shape[0], rows) or name
    own = name if has_stack(name, stored) else renamed
    if has_stack(own, stored):
        packed = packed_stack(own, stored)
        if any(one.shape[:1] != value.shape[:1] for one in packed.values()):
            raise ValueError(
                f"{_WHO}: {name} of {value.shape[0]} experts is required, got "
                f"{ {suffix: list(one.shape) for suffix, one in packed.items()} } in the folder"
            )
        if len(packed) == 1:
            (values,) = packed.values()
            require_values(name, values)
            return values
        each = [{k: one[e] for k, one in packed.items()} for e in range(value.shape[0])]
        return _joined(name, value, [_face(name, one) for one in each], turned)
    places = names.places(name, value.shape[0], rows)
    parts = {own: packed_matrix(own, stored) for own in places}
    if any(not packed for packed in parts.values()):
        return None
    faces = {own: stored_face(own, packed) for own, packed in parts.items()}
    if all(face is None for face in faces.values()):
        columns = value.shape[1] if turned else value.shape[2]
        whole = torch.empty(value.shape[0] * rows, columns, dtype=value.dtype)
        for own, place in places.items():
            _require_shape(own, (len(place), columns), parts[own]["weight"].shape)
            _require_numbers(own, value, parts[own]["weight"])
            whole[place] = parts[own]["weight"].to(value.dtype)
        values = whole.view(value.shape[0], rows, -1)
        return values.transpose(-2, -1) if turned else values
    of_expert: list[list[tuple[int, Face]]] = [[] for _ in range(value.shape[0])]
    for own, place in places.items():
        face = faces[own]
        if face is None:
            raise ValueError(
                f"{_WHO}: {own} with scales is required, as others of {name} have them, got none"
            )
        of_expert[int(place[0]) // rows].append((int(place[0]), face))
    return _joined(
        name,
        value,
        [_stacked_rows(name, sorted(some, key=lambda one: one[0])) for some in of_expert],
        turned,
    )


def _face(name: str, packed: Packed) -> Face:
    face = stored_face(name, packed)
    if face is None:
        raise ValueError(f"{_WHO}: {name}: scales are required, got none")
    return face


def _stacked_rows(name: str, parts: list[tuple[int, Face]]) -> Face:
    """Return the face of a matrix whose rows are those of several."""
    faces = [face for _, face in parts]
    block = faces[0].format.block[0]
    if block is not None and any(face.qdata.shape[0] % block for face in faces[:-1]):
        raise ValueError(
            f"{_WHO}: {name}: parts of whole blocks of {block} rows are required to be one matrix, got "
            f"{[face.qdata.shape[0] for face in faces]}"
        )
    first = faces[0]
    tensors = [
        torch.cat([bytewise(one) for one in some]).view(some[0].dtype)
        for some in zip(*(face.tensors() for face in faces), strict=True)
    ]
    shared = [first.format.block[0] is None, first.tensor_scale is not None]
    for index, is_shared in enumerate(shared, start=1):
        if is_shared and index < len(tensors):
            if bool((tensors[index] != tensors[index][:1]).any()):
                raise ValueError(
                    f"{_WHO}: {name}: one scale for the parts of an expert is required, got several; load into a "
                    "recipe with scales per row or block"
                )
            tensors[index] = tensors[index][:1]
    return Face.of(tensors, first.kind)


def _joined(name: str, value: Tensor, faces: list[Face], turned: bool) -> Tensor:
    """Return a stack of the faces of its matrices, as the parameter takes it."""
    rows, columns = value.shape[-2:][::-1] if turned else value.shape[-2:]
    for face in faces:
        _require_shape(name, (rows, columns), _size(face))
    fmt = _own_format(value)
    if fmt is None or not isinstance(value, HybridTensor):
        values = torch.stack([_values(name, face, value) for face in faces])
        return values.transpose(-2, -1) if turned else values
    own = [in_format(name, face, fmt) for face in faces]
    others = [column for face in own if (column := _columnwise(value, face)) is not None]
    whole = _hybrid(value, _stack_of(own), _stack_of(others) if others else None)
    return whole.transpose(-2, -1) if value.is_transposed else whole


def _stack_of(faces: list[Face]) -> Face:
    parts = zip(*(face.tensors() for face in faces), strict=True)
    return Face.of([stacked(some) for some in parts], faces[0].kind)


def _as_value(name: str, value: Tensor, face: Face) -> Tensor:
    """Return a face as a parameter takes it: as it is, or its values."""
    fmt = _own_format(value)
    if fmt is None or not isinstance(value, HybridTensor):
        return _values(name, face, value)
    size = value.shape[::-1] if value.is_transposed else value.shape
    _require_shape(name, size, _size(face))
    row = in_format(name, face, fmt)
    return _hybrid(value, row, _columnwise(value, row))


def _size(face: Face) -> tuple[int, int]:
    return face.qdata.shape[0], face.qdata.shape[1] * face.format.elements_per_byte


def _require_shape(name: str, needed: Sequence[int], found: Sequence[int]) -> None:
    """Raise ValueError for a matrix of another shape, which nothing could tell once it is a face."""
    if tuple(found) != tuple(needed):
        raise ValueError(
            f"{_WHO}: {name} of {list(needed)} is required, got {list(found)} in the folder"
        )


def _of_size(name: str, tensor: Tensor, size: Sequence[int]) -> Tensor:
    require_values(name, tensor)
    _require_shape(name, size, tensor.shape)
    return tensor


def _require_place(name: str, value: Tensor, found: Tensor) -> None:
    """Raise ValueError for a parameter or buffer without memory, or of another shape than what was read."""
    _require_shape(name, value.shape, found.shape)
    if value.is_meta:
        raise ValueError(
            f"{_WHO}: {name} with memory is required, got one on the meta device; call to_empty(device=...) first"
        )


def _require_numbers(name: str, value: Tensor, found: Tensor) -> None:
    """Raise ValueError for values that a dtype makes infinite, and for a parameter with NaN."""
    if isinstance(found, HybridTensor) or not found.is_floating_point():
        return
    if isinstance(value, nn.Parameter) and bool(found.isnan().any()):
        raise ValueError(
            f"{_WHO}: {name}: values that are numbers are required, got {int(found.isnan().sum())} NaN of "
            f"{found.numel()}; the file is damaged, or its model had diverged"
        )
    if found.dtype != value.dtype and bool(
        (found.isfinite() & ~found.to(value.dtype).isfinite()).any()
    ):
        raise ValueError(
            f"{_WHO}: {name}: values that {shown(value.dtype)} holds are required, got some up to "
            f"{float(found.abs().max()):.3g} in {shown(found.dtype)}; load into a model with another dtype"
        )


def _values(name: str, face: Face, value: Tensor) -> Tensor:
    """Return the values of a face in the dtype of a parameter, which must hold them."""
    values = face_values(face, value.dtype)
    if not bool(values.isfinite().all()):  # elements and scales are
        raise ValueError(
            f"{_WHO}: {name}: values that {shown(value.dtype)} holds are required, got larger ones; load into a "
            "model with another dtype"
        )
    return values.to(value.device)


def _columnwise(value: HybridTensor, row: Face) -> Face | None:
    """Return the columnwise face of a matrix of a persistent weight, if that has one of its own."""
    other = value.rowwise if value.is_transposed else value.columnwise
    if other is None or follows_rowwise(value):
        return None
    # A load is no step: its amaxes must not enter the histories of delayed scales.
    context = value.context._replace(record=False, groups=None)
    return columnwise_of_stored(value.recipe.weight, row, value.dtype, context)


def _hybrid(value: HybridTensor, row: Face, column: Face | None) -> HybridTensor:
    """Return faces as a tensor of the kind of a persistent weight, as linear layers have it."""
    turned = value.is_transposed
    size = (*value.shape[:-2], value.shape[-1], value.shape[-2]) if turned else tuple(value.shape)
    first = face_tensor(row, -1, size, value.dtype)
    if column is None and follows_rowwise(value) and isinstance(first, QuantizedTensor):
        return HybridTensor(first, IdentityTensor(first))
    return HybridTensor(first, face_tensor(column, 0, size, value.dtype))


def _own_format(value: Tensor) -> Format | None:
    """Return the format of the face that the forward multiplies of a persistent weight, or None."""
    if not isinstance(value, HybridTensor):
        return None
    face = value.columnwise if value.is_transposed else value.rowwise
    return None if face is None or face.format.is_identity else face.format
