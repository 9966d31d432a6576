"""Quantizing into tensors: ``quantizer.quantize`` and ``quantizer.update_``.

Quantizers make faces and do not depend on the tensor classes; the two methods that return tensors are added here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor import ops
from hybridtensor.arguments import require_dtype, require_flag, require_float, wrong
from hybridtensor.ops import Cast, Faces, Groups
from hybridtensor.ops.library import compiled_in_callers_only, is_traced
from hybridtensor.quantizers import Quantizer, cast_plan, tokens
from hybridtensor.quantizers.base import ALONE
from hybridtensor.recipes.config import HybridConfig, weight_values
from hybridtensor.state import Context, LayerState, Section, StateTensors, layer_of, require_context
from hybridtensor.subclasses.common_scale import by_scale, measures_tensor
from hybridtensor.subclasses.faces import FaceTensor, face_tensor, turned
from hybridtensor.subclasses.high_precision import HighPrecisionValues, whole
from hybridtensor.subclasses.hybrid_tensor import HybridTensor
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.master_tensor import MasterWeight
from hybridtensor.subclasses.op_table import of_layers
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor
from hybridtensor.subclasses.structure import flatten
from hybridtensor.subclasses.wrapper import WrapperTensor


def quantize(
    quantizer: Quantizer,
    x: Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    dtype: torch.dtype | None = None,
    context: Context = ALONE,
) -> HybridTensor:
    """Quantize ``x``.

    Args:
        quantizer: Makes the faces.
        x: bf16, fp16 or fp32, one to four dimensions, any strides, may be empty. Leading dimensions count as one (the
            tokens): rowwise scale groups run along the last dimension, columnwise ones along the tokens.
        rowwise: Make the rowwise face.
        columnwise: Make the columnwise face. A face's bits never depend on whether the other is made.
        dtype: Nominal dtype of the result; by default that of ``x``.
        context: The layer and role of the tensor. Delayed scaling needs one, with a state;
            without one, stochastic rounding draws from torch's generator.

    Returns:
        A ``HybridTensor`` without gradient, which shares no memory with ``x``; a face not asked for is None.

    Raises:
        TypeError: If ``x`` is not a dense tensor of those dtypes, or an argument of another kind.
        ValueError: If ``x`` has no dimension or more than four, cannot be cut into blocks (layers
            take any number of tokens, a tensor whole blocks of them), or no face is asked for.
    """
    who = type(quantizer).__name__
    x = _plain(who, x)
    require_flag(who, rowwise=rowwise, columnwise=columnwise)
    require_context(who, context)
    if dtype is not None:
        require_dtype(who, dtype)
    if not 1 <= x.dim() <= 4:
        raise ValueError(
            f"{who}: one to four dimensions are required, got shape {tuple(x.shape)}; reshape it"
        )
    if not rowwise and not columnwise:
        raise ValueError(
            f"{who}: at least one face is required, got rowwise=False and columnwise=False"
        )
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    if context.groups is not None:
        rows = x.shape[-2]
    quantizer.check_matrix(rows, columns, str(context), rowwise=rowwise, columnwise=columnwise)
    dtype = dtype or x.dtype
    with torch.no_grad():
        faces = quantizer.faces(
            x.detach(), rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context
        )
        row, column = face_tensors(faces, x.shape, dtype)
        return HybridTensor(_owned(row), _owned(column))


def face_tensors(
    faces: Faces, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
) -> tuple[FaceTensor | None, FaceTensor | None]:
    """Return both faces as tensors of ``shape`` with nominal ``dtype``."""
    return face_tensor(faces[0], -1, shape, dtype), face_tensor(faces[1], 0, shape, dtype)


def persistent_weight(
    values: Tensor,
    config: HybridConfig,
    trainable: bool,
    layer: LayerState,
    section: Section | None = None,
    first: int | None = None,
) -> HybridTensor:
    """Quantize plain values to a persistent weight; ``trainable`` keeps them until an optimizer takes them."""
    groups = Groups(values.shape[0], first=first or 0) if values.dim() == 3 else None
    context = Context("weight", layer.tensors(), section=section, groups=groups)
    made = quantize_weight(config, values, context, layer)
    weight = HybridTensor(made.rowwise, made.columnwise, config)
    weight.layer, weight.record.section, weight.record.first = layer, section, first
    if trainable:
        weight.record.values = HighPrecisionValues(values, follows=True)
    return weight


def quantize_weight(
    config: HybridConfig,
    values: Tensor,
    context: Context,
    layer: LayerState | StateTensors | None,
    dtype: torch.dtype | None = None,
) -> HybridTensor:
    """Quantize a layer's weight as it is stored, of a stack each matrix; without a columnwise face that each step
    makes of the rowwise one."""
    dtype, values = dtype or values.dtype, weight_values(config, values)
    turns = layer is not None and bool(layer.transposed)
    made = quantize(
        config.weight,
        values.transpose(-2, -1) if turns else values,
        columnwise=not config.weight.draws_from_rowwise,
        dtype=dtype,
        context=context,
    )
    if not turns:
        return made
    row, column = (
        None if face is None else turned(face) for face in (made.columnwise, made.rowwise)
    )
    return HybridTensor(row, column)


def update_(
    quantizer: Quantizer, dst: HybridTensor, x: Tensor, *, context: Context = ALONE
) -> HybridTensor:
    """Quantize ``x`` into ``dst``, in place: every face that ``dst`` has is refreshed, none is added or dropped.

    Raises:
        TypeError: If ``dst`` is no HybridTensor, ``x`` no dense floating-point tensor, or ``context`` no Context.
        ValueError: If the shapes differ, or a face of ``dst`` is not in this quantizer's format.
    """
    who = f"{type(quantizer).__name__}.update_"
    if not isinstance(dst, HybridTensor):
        raise wrong(who, "a HybridTensor", dst, "use quantize()")
    x = _plain(who, x)
    require_context(who, context)
    if x.shape != dst.shape:
        raise ValueError(f"{who}: the shape {tuple(dst.shape)} is required, got {tuple(x.shape)}")
    if x.is_meta and not dst.is_meta:
        raise ValueError(f"{who}: a tensor with values is required, got one on the meta device")
    with torch.no_grad():
        target, x = _as_stored(dst, x.detach())
        if not _cast_into(quantizer, target, x, context):
            rowwise, columnwise = dst.rowwise is not None, dst.columnwise is not None
            faces = quantizer.faces(
                x, rowwise=rowwise, columnwise=columnwise, dtype=dst.dtype, context=context
            )
            overwrite_(who, target, faces)
    return dst


def _as_stored(dst: HybridTensor, x: Tensor) -> tuple[HybridTensor, Tensor]:
    """Return a tensor and values for it as faces hold them: what a flattened view is of is a matrix, or a stack."""
    faces = (face for face in (dst.rowwise, dst.columnwise) if isinstance(face, QuantizedTensor))
    face = next(faces, None)
    if face is None or x.dim() > 1:
        return dst, x
    size = (*face.qdata.shape[:-2], -1, face.matrix_shape[1])
    return dst.detach().view(size), x.reshape(size)


def _cast_into(quantizer: Quantizer, dst: HybridTensor, x: Tensor, context: Context) -> bool:
    """Cast ``x`` into the faces of ``dst``; return False if one cast is not enough, or their memory is unsuitable."""
    if is_traced() or context.groups is not None:
        return False
    rowwise, columnwise = dst.rowwise is not None, dst.columnwise is not None
    plan = cast_plan(quantizer, rowwise, columnwise, dst.dtype, context, x.device)
    if plan is None:
        return False
    request = plan.request
    out = [*_tensors(dst.rowwise, request.row, -1), *_tensors(dst.columnwise, request.column, 0)]
    matrix = tokens(x)
    if not ops.can_hold(out, matrix, request):
        return False
    inputs = plan.inputs(matrix, context)
    ops.prepare(matrix, request, inputs).run_into(matrix, out, inputs)
    return True


def _tensors(face: FaceTensor | None, cast: Cast | None, axis: int) -> list[Tensor]:
    """Return the tensors of a face that a cast can overwrite, or none."""
    if not isinstance(face, QuantizedTensor) or cast is None or face.cuts_group:
        return []
    return flatten(face)[0] if (face.format, face.axis) == (cast.format, axis) else []


def overwrite_(who: str, dst: HybridTensor, faces: Faces) -> None:
    """Copy new faces over all of ``dst``; raise ValueError before any copy if a face does not match."""
    fresh = face_tensors(faces, dst.shape, dst.dtype)
    pairs = [
        (d, f) for d, f in zip((dst.rowwise, dst.columnwise), fresh, strict=True) if d is not None
    ]
    # All checks before the first copy, so that an error leaves the tensor as it was.
    for old, new in pairs:
        _check_refreshable(f"{who}{of_layers(dst)}", old, new)
    for old, new in pairs:
        for target, source in zip(flatten(old)[0], flatten(new)[0], strict=True):  # type: ignore[arg-type]
            target.copy_(source)
    mark_overwritten(dst)


def mark_overwritten(dst: HybridTensor) -> None:
    """Increment autograd's version counters of the faces, which operators below ``__torch_dispatch__`` do not."""
    # Backward then raises for whoever saved the faces, as for any tensor that is written in place.
    plain = [tensor for tensor in flatten(dst)[0] if not tensor.is_inference()]
    increment_version(plain)


def refresh_(weight: HybridTensor, values: Tensor) -> None:
    """Quantize new values into a persistent weight by its recipe; collective for a sharded weight."""
    refresh_all_([(weight, values)])


@compiled_in_callers_only
def refresh_all_(pairs: list[tuple[HybridTensor, Tensor]]) -> None:
    """Quantize new values into several weights, and requantize those with a common scale; see ``refresh_``."""
    pairs = _with_siblings(pairs)
    hooks = HybridTensor.fsdp_hooks
    # Local shards are quantized there, by collectives; what comes back is not sharded.
    unsharded = pairs if hooks is None else hooks.refresh(pairs)
    for scale, members in by_scale(unsharded, lambda pair: pair[0]):
        # Before the casts below, which read the common scale.
        scale.measure([weight_values(part.recipe, values) for part, values in members])
    for weight, values in unsharded:
        target, fresh = _as_stored(weight, weight_values(weight.recipe, values))
        context = target.context
        if weight.is_transposed:
            target, fresh = target.detach().transpose(-2, -1), fresh.transpose(-2, -1)
        update_(weight.recipe.weight, target, fresh, context=context)
    for weight, values in pairs:
        weight.high_precision.mark_quantized(values, weight.taken)


def _with_siblings(pairs: list[tuple[HybridTensor, Tensor]]) -> list[tuple[HybridTensor, Tensor]]:
    """Add weights that share a common scale; raise if one has no values, or a graph or a part is written."""
    given = {id(weight.record) for weight, _ in pairs}
    found = list(pairs)
    for weight, _ in pairs:
        layer = weight.record.layer
        if isinstance(layer, StateTensors) and layer.common_amax is not None:
            raise NotImplementedError(
                "common_scale: compiled code writes a persistent weight, whose siblings it does not know; "
                "leave this write out of torch.compile"
            )
        scale = getattr(layer, "common", None)
        if scale is None or not measures_tensor(weight.recipe.weight):
            continue
        if weight.taken is not whole:
            raise NotImplementedError(
                "common_scale: a view of a persistent weight is written, whose common scale follows from all "
                "of it; write the weight"
            )
        for sibling in scale.parts:
            if id(sibling.record) not in given:
                given.add(id(sibling.record))
                found.append((sibling, _values_of(sibling)))
    return found


def _values_of(sibling: HybridTensor) -> Tensor:
    """Return the high-precision values of a weight whose common scale changes."""
    values = sibling.high_precision.current
    if values is None:
        raise RuntimeError(
            f"common_scale: {layer_of(sibling.state)} has a common scale with a weight that is written, and no values "
            "in high precision to be quantized from again; load such weights before quantize_, or step them through "
            "hybridtensor.optim.MasterWeights"
        )
    return values


def take_values_(weight: HybridTensor, value: Tensor, values: Tensor) -> None:
    """Replace a persistent weight's faces by those of ``values``, or share those of ``value`` with the same recipe."""
    config, follows, rounded, lost = weight.recipe, True, False, False
    if isinstance(value, HybridTensor) and value.config == config and _has_faces_of(value, weight):
        made, follows = value, value.high_precision.follows
        rounded, lost = value.known_values is None, value.high_precision.lost
    else:
        made = quantize_weight(config, values, weight.context, weight.record.layer)
        made.config = config
    before, known = weight.record, weight.record.values
    # Aliases of the former faces keep copies of the values that these were made from.
    # Before ``replaced``, which empties ``known`` and writes the new values into the master.
    copied = None if known is None else known.copied(torch.clone, _all, same=True)
    replaced = None
    if known is not None:
        replaced = known.replaced(values, follows=follows, rounded=rounded, lost=lost)
    Tensor.data.__set__(weight, made)  # type: ignore[attr-defined]  # see MasterWeight.take_memory
    weight.rowwise, weight.columnwise = made.rowwise, made.columnwise
    weight.taken, weight.swapped = whole, False
    weight.record = before.successor()
    before.values, weight.record.values = copied, replaced


def _all(values: Tensor) -> Tensor:
    """Return a view of all present values that does not keep the original alive by itself."""
    return values


def _has_faces_of(value: HybridTensor, weight: HybridTensor) -> bool:
    """Return whether ``value`` is no view, and has the same faces as ``weight``."""
    mine = [getattr(weight, name) is None for name in weight.inner_names]
    return (
        value.taken is whole
        and not value.swapped
        and mine == [getattr(value, name) is None for name in value.inner_names]
    )


def _plain(who: str, x: Tensor) -> Tensor:
    """Return ``x`` as a plain tensor; raise TypeError if it has no high-precision values."""
    if isinstance(x, MasterWeight):
        return x.plain
    if isinstance(x, WrapperTensor):
        raise TypeError(
            f"{who}: a tensor in high precision is required, got {x!r}; call dequantize() on it"
        )
    require_float(who, x)
    return x


def _check_refreshable(who: str, old: FaceTensor, new: FaceTensor | None) -> None:
    """Raise ValueError unless ``new`` can overwrite ``old``."""
    sources = [face.source if isinstance(face, IdentityTensor) else face for face in (old, new)]
    kinds = [(type(s), str(getattr(s, "format", None)), getattr(s, "axis", None)) for s in sources]
    if type(old) is not type(new) or kinds[0] != kinds[1]:
        raise ValueError(
            f"{who}: a face of this quantizer's making is required, got {old!r}, it makes {new!r}"
        )
    if isinstance(sources[0], QuantizedTensor) and sources[0].cuts_group:
        raise ValueError(
            f"{who}: {old!r} is a slice through a scale group; update the whole tensor"
        )


def _owned(face: FaceTensor | None) -> FaceTensor | None:
    """Return a face that does not alias the quantized tensor."""
    if isinstance(face, IdentityTensor) and not isinstance(face.source, QuantizedTensor):
        return IdentityTensor(face.source.clone(memory_format=torch.contiguous_format))
    return face


Quantizer.quantize = quantize
Quantizer.update_ = update_
