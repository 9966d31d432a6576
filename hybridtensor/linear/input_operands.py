"""Operands that inputs are, by where their columnwise face is until backward; see ``operands``.

| class | from |
|---|---|
| ``Operand`` | faces that exist after forward: cast now, shared, or those of an input that was quantized before |
| ``SavedInput`` | an input in high precision that is saved for backward, which makes its columnwise face |
| ``ShardedInput`` | an input whose tokens are on several ranks; backward gathers the columnwise face |

An input is saved if the recipe says so, or if backward has it anyway: what attention returned, and in a graph of
``torch.compile`` also what a norm or an activation returned, which a compiler recomputes from what their own backward
needs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hybridtensor.linear.operands import QUANTIZED, Needs, Operand, Weight, as_matrix
from hybridtensor.linear.sharing import SharedCast, shared_cast
from hybridtensor.ops import Face, after
from hybridtensor.ops.amaxes import AmaxRecord, RecordedAmax
from hybridtensor.ops.library import is_traced, saved_tensors_hooks
from hybridtensor.ops.order import can_recompute, is_in_region, prefer_recompute
from hybridtensor.quantizers import HybridQuantizer, IdentityQuantizer, Quantizer
from hybridtensor.quantizers.base import one_face
from hybridtensor.quantizers.plans import recorded_in_backward
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context, LayerState
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.faces import columnwise_face, rowwise_face
from hybridtensor.subclasses.observing import may_hold_values
from hybridtensor.subclasses.operators.matmul import take_face
from hybridtensor.subclasses.sharded_face import ShardedFace, SharedFace


class SavedInput(Operand):
    """A high-precision input, saved as it is: backward quantizes its columnwise face.

    ::

        config = ht.HybridConfig.parse("fp8+save_original_input")
        saved = ht.linear.input_operand(x, x, weight, config, needs, context)
    """

    __slots__ = ("_config", "_context", "_dtype", "_recomputed", "_sharing", "_x")

    def __init__(
        self,
        row: Face | None,
        x: Tensor,
        config: HybridConfig,
        dtype: torch.dtype,
        context: Context,
        sharing: SharedFace,
        recomputed: bool,
        amax_record: RecordedAmax,
    ) -> None:
        super().__init__(row, None, amax_record)
        self._x: Tensor | None = x
        self._config, self._dtype, self._context = config, dtype, context
        self._sharing, self._recomputed = sharing, recomputed

    def save(self) -> list[Tensor]:
        x, self._x, self._row = self._x, None, None
        if x is None:
            return []
        self._sharing.layers += 1
        if self._recomputed:
            prefer_recompute(x)
        return [x]

    def columnwise(self, saved: list[Tensor], after: Tensor | None = None) -> Face:
        return self._sharing.take(functools.partial(self._quantized, saved[0], after))

    def _quantized(self, x: Tensor, after: Tensor | None) -> Face:
        values = False, may_hold_values(self._dtype, self._context.groups)
        context = self._context._replace(after=after, values=values, direct=False)
        context = context.in_backward()
        return one_face(self._config.input, x, "columnwise", self._dtype, context)


class ShardedInput(Operand):
    """An input whose columnwise face is sharded until backward: only the local part is saved."""

    __slots__ = ("_config", "_context", "_dtype", "_quantize", "_sequence", "_shape", "_sharing")

    def __init__(
        self,
        row: Face | None,
        face: ShardedFace,
        config: HybridConfig,
        dtype: torch.dtype,
        context: Context,
        amax_record: RecordedAmax,
    ) -> None:
        super().__init__(row, columnwise_face(face.source, dtype, "grad_weight"), amax_record)
        self._sequence, self._quantize, self._sharing = face.sequence, face.quantize, face.sharing
        self._shape = face.source.shape
        self._config, self._dtype, self._context = config, dtype, context

    def save(self) -> list[Tensor]:
        self._sharing.layers += 1
        return super().save()

    def begin(self, saved: list[Tensor], grad: Tensor) -> None:
        if is_traced():
            # Else a partitioner does the gather in forward, and saves what it gave.
            saved = [after(tensor, grad) for tensor in saved]
        self._start(saved)

    def _start(self, saved: list[Tensor]) -> None:
        shared = self._sharing
        if shared.face is None and shared.parts is None:
            # Siblings wait for one gather, which the first of them starts.
            shared.parts = self._sequence.start(super().columnwise(saved), "columnwise")

    def columnwise(self, saved: list[Tensor], after: Tensor | None = None) -> Face:
        self._start(saved)
        return self._sharing.take(functools.partial(self._gathered, super().columnwise(saved)))

    def _gathered(self, part: Face) -> Face:
        """Return the gathered columnwise face, or quantize it from gathered values."""
        parts = self._sharing.parts or []
        whole = self._sequence.finish(part, "columnwise", parts, self._shape)
        if not self._quantize:
            return whole
        context = self._context._replace(direct=False).in_backward()
        return one_face(self._config.input, whole.qdata, "columnwise", self._dtype, context)


def input_operand(
    input: Tensor,
    cast_from: Tensor,
    weight: Weight,
    config: HybridConfig,
    needs: Needs,
    context: Context,
) -> Operand:
    """Return the operand of a plain or quantized ``input``, which was cast from ``cast_from``.

    The rowwise face is read by one product only: ``context.values`` says whether it may hold dequantized values.

    ::

        context = ht.Context("input", weight.state)
        left = ht.linear.input_operand(x, x, weight, weight.config, needs, context)
    """
    if isinstance(input, QUANTIZED):
        return _quantized_operand(input, needs, config, context)
    dtype = input.dtype
    # What another operation saves anyway costs no memory. Faces of all inputs are 1.2 GiB in six compiled blocks of
    # 8192 tokens.
    free = needs.weight and _backward_has(cast_from, input, config, context)
    saved = free or (needs.weight and config.save_original_input)
    columnwise = needs.weight and not saved
    how = (config.input, columnwise, dtype)
    if config.input.repeatable:
        shared = shared_cast(cast_from, weight.record, how, context)
    elif config.input.stochastic:  # each layer has random numbers of its own
        shared = SharedCast()
    else:
        shared = _shared_by_scales(cast_from, weight, how, context)
    if shared.faces is None:
        of_forward = recorded_in_backward(context, config.input) if saved else context
        if shared.amax_record is not None and of_forward.state is not None:
            state = of_forward.state._replace(amax=shared.amax_record)
            of_forward = of_forward._replace(state=state)
        shared.faces = config.input.faces(
            input.detach(), rowwise=True, columnwise=columnwise, dtype=dtype, context=of_forward
        )
    row, column = shared.faces
    if saved:
        sharing = shared.columnwise = shared.columnwise or SharedFace()
        return SavedInput(row, input, config, dtype, context, sharing, free, shared.amax_record)
    return Operand(row, column, shared.amax_record)


def _shared_by_scales(
    input: Tensor, weight: Weight, how: tuple[object, ...], context: Context
) -> SharedCast:
    """Return the cast that layers with equal delayed scales share of an input, or a new one; each layer commits its
    amaxes."""
    state, layer = context.state, weight.record.layer
    if state is None or not isinstance(layer, LayerState) or context.groups is not None:
        return SharedCast()
    record = state.step_record if context.record else None
    if record is not None and not isinstance(record, AmaxRecord):
        return SharedCast()  # a graph
    lineage = layer.lineage
    if lineage is None:
        shared = SharedCast()
    else:
        how = *how, lineage, state.slots, record is None
        shared = shared_cast(input, weight.record, how, context)
    if shared.faces is None and record is not None and state.encode_scale is not None:
        shared.amax_record = record.provisional()
    return shared


def _backward_has(input: Tensor, x: Tensor, config: HybridConfig, context: Context) -> bool:
    """Return whether backward saves an input anyway; in eager code never under saved-tensor hooks, which would pack
    it twice."""
    if input.grad_fn is None or config.keep_faces == "always":
        return False
    # In a graph nothing writes the state before backward (torch raises), so that scales in it are still those of
    # forward.
    traced = not context.direct and is_traced()
    node = _behind(input.grad_fn, _PASSED_IN_GRAPHS if traced else _VIEWS)
    if node is None:
        return False
    # Under autocast ``x`` is a copy of ``input``, which attention does not keep.
    of_attention = node.name().startswith(_ATTENTION)
    if not traced and not (of_attention and x is input):
        return False
    if not _can_be_saved(config.input, state_holds=traced):
        return False
    if traced:
        return not is_in_region(x) if of_attention else _keeps_inputs(node) and can_recompute(x)
    return not saved_tensors_hooks(False)


@functools.lru_cache(maxsize=256)
def _can_be_saved(quantizer: Quantizer, *, state_holds: bool) -> bool:
    """Return whether the columnwise face can be recomputed from the tensor; with ``state_holds`` also by delayed
    scales."""
    own, source = quantizer, "original"
    if isinstance(quantizer, HybridQuantizer):
        own, source = quantizer.columnwise, quantizer.columnwise_source
    if isinstance(own, IdentityQuantizer) or source != "original" or own.stochastic:
        return False
    return own.repeatable or state_holds


def _behind(node: Node | None, passed: frozenset[str]) -> Node | None:
    """Return the first autograd node that is neither in ``passed`` nor a multiplication by a number."""
    while node is not None:
        name = node.name()
        if name not in passed:
            return node
        inputs = [before for before, _ in node.next_functions if before is not None]
        if name in _PRODUCTS and len(inputs) > 1:
            return node
        node = inputs[0] if inputs else None
    return None


def _keeps_inputs(node: Node) -> bool:
    """Return whether an operation's own backward saves its whole input."""
    return node.name() in _KEEP_INPUTS or node.name() in _PRODUCTS


# Names that torch generates and promises nobody: where one changes, faces are saved again, which costs memory only.
def _nodes(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward0" for name in names)


_ATTENTION = "ScaledDotProduct"
_VIEWS = _nodes("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute")
_PRODUCTS = _nodes("Mul", "Div")
_PASSED_IN_GRAPHS = _VIEWS | _PRODUCTS | _nodes("ToCopy", "Clone")
_KEEP_INPUTS = _nodes(
    *("Silu", "Gelu", "Glu", "Mish", "Hardswish", "Pow"), *("NativeLayerNorm", "FusedRmsNorm")
)


def _quantized_operand(
    input: Tensor, needs: Needs, config: HybridConfig, context: Context
) -> Operand:
    """Return the operand of an already quantized tensor; raise ValueError if a needed face is absent."""
    dtype, face = input.dtype, take_face(input, "rowwise", name="input", gemm="output")
    row = rowwise_face(as_matrix(face), dtype, "output")
    amax_record = input.record.amaxes if isinstance(input, HybridTensor) else None
    if context.groups is not None:
        return _of_tokens(input, row._replace(groups=context.groups), needs, config, context)
    if not needs.weight:
        return Operand(row, None, amax_record)
    column = take_face(input, "columnwise", name="input", gemm="grad_weight")
    if isinstance(column, ShardedFace):
        return ShardedInput(row, column, config, dtype, context, amax_record)
    return Operand(row, columnwise_face(as_matrix(column), dtype, "grad_weight"), amax_record)


def _of_tokens(
    input: Tensor, row: Face, needs: Needs, config: HybridConfig, context: Context
) -> Operand:
    """Return the operand of grouped tokens quantized by row; raise ValueError unless the columnwise face is
    requantized from it."""
    quantizer = config.input
    if not needs.weight:
        return Operand(row, None)
    only_row = isinstance(input, HybridTensor) and input.columnwise is None
    if (
        not only_row
        or not isinstance(quantizer, HybridQuantizer)
        or quantizer.columnwise_source == "original"
    ):
        raise ValueError(
            f"grad_weight: {input!r} cannot give the columnwise face of tokens of experts that {config} "
            "needs; give the layer the tokens themselves"
        )
    return Operand(row, quantizer.derive_columnwise(row, input.dtype, context))
