"""Experts that are spread over ranks: tokens go to the ranks of their experts, and come back.

Shape letters: ``R`` ranks, ``E`` experts, ``e = E / R`` of a rank, ``T`` tokens that this rank routed,
``t`` tokens of this rank's experts, ``K`` features.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from hybridtensor.arguments import require_flag, require_text
from hybridtensor.distributed.sequence.styles import mark
from hybridtensor.dtensor import local
from hybridtensor.linear.grouped import first_expert
from hybridtensor.ops import Face
from hybridtensor.ops.autograd import Function
from hybridtensor.ops.face import bytewise
from hybridtensor.ops.library import autocasts, outside_graphs
from hybridtensor.ops.scaled_mm import rowwise_values
from hybridtensor.quantizers import OneFormatQuantizer, Quantizer
from hybridtensor.quantizers.base import one_face
from hybridtensor.quantizers.hybrid import of_direction
from hybridtensor.recipes.named import from_name
from hybridtensor.subclasses import HybridTensor, is_converted
from hybridtensor.subclasses.faces import face_tensor

c10d = torch.ops._c10d_functional

Send = Callable[[Tensor], Tensor]
"""Sends rows along a route, in one direction."""


class Route(NamedTuple):
    """Which tokens go where."""

    sent: list[int]
    received: list[int]
    order: Tensor
    counts: Tensor
    group: str

    @classmethod
    def of(cls, counts: Tensor, group: dist.ProcessGroup, experts: int, rows: int) -> Route:
        """Return the route of tokens sorted by expert, of which each expert has ``counts``.

        Waits for the counts of all ranks: collectives take sizes that the host knows.

        Args:
            counts: int64.
            group: The ranks.
            experts: ``E``, a multiple of ``R``.
            rows: ``T``.

        Raises:
            ValueError: On all ranks, if one has another number of counts, negative ones, or more than it has tokens.
        """
        ranks = dist.get_world_size(group)
        every = experts // ranks
        good = (
            counts.shape == (experts,) and bool((counts >= 0).all()) and int(counts.sum()) <= rows
        )
        # A rank with wrong counts takes part in the exchange, too: the others would wait for it, and so learn of it.
        mine = counts if good else counts.new_full((experts,), -1)
        come = _exchanged(mine.contiguous(), [every] * ranks, [every] * ranks, group.group_name)
        sums = torch.stack([mine.view(ranks, every).sum(1), come.view(ranks, every).sum(1)])
        sent, received = sums.tolist()
        if min(received) < 0:
            got = f"{counts.tolist()} of {rows}" if not good else "others on another rank"
            raise ValueError(
                f"ExpertParallel: tokens of each of {experts} experts, none negative and no more than there "
                f"are, are required, got {got}"
            )
        numbers = torch.arange(every, device=counts.device).repeat(ranks)
        # Tokens come rank by rank, sorted by expert in each; a stable sort keeps the order of ranks within an expert.
        order = numbers.repeat_interleave(come).argsort(stable=True)
        return cls(sent, received, order, come.view(ranks, every).sum(0), group.group_name)

    def there(self, tensor: Tensor) -> Tensor:
        """Return rows of tokens where their experts are, sorted by expert."""
        return _exchanged(tensor, self.sent, self.received, self.group)[self.order]

    def back(self, tensor: Tensor) -> Tensor:
        """Return rows of tokens where they were routed."""
        by_rank = torch.empty_like(tensor)
        by_rank[self.order] = tensor
        return _exchanged(by_rank, self.received, self.sent, self.group)


def _exchanged(tensor: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    made = c10d.all_to_all_single(tensor.contiguous(), received, sent, group)
    arrived: Tensor = c10d.wait_tensor(made)
    return arrived


def _moved(tensor: Tensor, send: Send, quantizer: Quantizer | None) -> Tensor:
    """Send rows, quantized if a quantizer is given."""
    if quantizer is None:
        return send(tensor)
    return rowwise_values(_moved_face(tensor, send, quantizer), tensor.dtype)


def _moved_face(tensor: Tensor, send: Send, quantizer: Quantizer) -> Face:
    """Return the rowwise face of rows that were sent; each row has its own scales."""
    face = one_face(quantizer, tensor, "rowwise", tensor.dtype)
    arrived = []
    for index, one in enumerate(face.tensors()):
        whole = send(bytewise(one))  # gloo does not send FP8
        if index == 1 and face.format.block[1] is not None:  # scales lie block by block
            whole = whole.t().contiguous().t()
        arrived.append(whole.view(one.dtype))
    return Face.of(arrived, face.kind)


class _Ctx(FunctionCtx):
    """What forward saves for backward: how the gradient is sent, and its quantizer."""

    how: tuple[Send, Quantizer | None]


class _Move(Function):
    """Autograd function that sends rows to their experts or back, maybe as quantized faces; the gradient goes the
    other way."""

    @staticmethod
    def forward(
        ctx: _Ctx,
        tensor: Tensor,
        send: Send,
        send_back: Send,
        quantizer: Quantizer | None,
        of_gradient: Quantizer | None,
        as_faces: bool,
    ) -> Tensor:
        ctx.how = send_back, of_gradient
        if quantizer is None or not as_faces:
            return _moved(tensor, send, quantizer)
        face = _moved_face(tensor, send, quantizer)
        size = (face.qdata.shape[0], tensor.shape[1])
        return HybridTensor(face_tensor(face, -1, size, tensor.dtype), None)

    @staticmethod
    def backward(ctx: _Ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grad_output.contiguous(), *ctx.how), None, None, None, None, None


class ExpertParallel(ParallelStyle):
    """Experts that are spread over the ranks of a mesh, for ``parallelize_module``.

    ::

        ht.quantize_(model, "mxfp8+rowwise_dequantized")
        parallelize_module(model, mesh["ep"], {"experts": ht.distributed.ExpertParallel()})

    The module's forward takes tokens ``[T, K]`` sorted by expert, and how many each expert has, ``[E]``; it returns a
    row for each. Its parameters whose first extent is ``E`` are sharded along it, and are the local parts while it
    runs. Each rank calls it with the tokens that it routed, and counts of all experts, and gets their outputs; the
    module sees those of its own experts. Under ``torch.compile`` experts run between two graphs.

    Args:
        dispatch: ``"faces"``: tokens are sent as the rowwise face that products read, where its scales
            are within a token and the recipe makes the columnwise face of it; elsewhere, and for
            ``"bf16"``, as values. ``explain`` says which, and why.
        combine: How outputs are sent back: ``"bf16"``, as values; or a format with scales within a
            token, such as ``"mxfp8"``.
        gradients: The same of both gradients in backward.
        ends: The module takes offsets where each expert's tokens end, int32, in place of counts.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a word is unknown, or a format's scales are not within a token.
    """

    def __init__(
        self,
        *,
        dispatch: str = "faces",
        combine: str = "bf16",
        gradients: str = "bf16",
        ends: bool = False,
    ) -> None:
        super().__init__()
        require_text("ExpertParallel", dispatch=dispatch, combine=combine, gradients=gradients)
        require_flag("ExpertParallel", ends=ends)
        if dispatch not in ("faces", "bf16"):
            raise ValueError(
                f"ExpertParallel: 'faces' or 'bf16' is required as dispatch, got {dispatch!r}"
            )
        self.dispatch, self.ends = dispatch, ends
        self.combine = _quantizer_of("combine", combine)
        self.gradients = _quantizer_of("gradients", gradients)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mark(module, self, device_mesh)
        count = _experts_of(module)
        if count % device_mesh.size():
            raise ValueError(
                f"ExpertParallel: {count} experts cannot be spread evenly over {device_mesh.size()} ranks; "
                "use another mesh"
            )
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.dim() and parameter.shape[0] == count:
                cut = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
                part = local(cut)
                if is_converted(part):
                    part.record.first = first_expert(cut)
                module.register_parameter(
                    name, nn.Parameter(cut, requires_grad=parameter.requires_grad)
                )
        if not any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            raise ValueError(
                f"ExpertParallel: parameters whose first extent is num_experts ({count}) are required, got "
                f"none in {type(module).__name__}"
            )
        module.forward = _Forward(self, module, device_mesh)
        return module


def dispatch_sends(style: ExpertParallel, module: nn.Module) -> tuple[str, str]:
    """Describe what dispatch sends, and why in high precision; the second text is empty if it is quantized."""
    quantizer, reason = _input_quantizer(style, module)
    return ("values", reason) if quantizer is None else (f"rowwise, {quantizer.rowwise_format}", "")


def _input_quantizer(style: ExpertParallel, module: nn.Module) -> tuple[Quantizer | None, str]:
    """Return the quantizer of dispatched tokens, or None and the reason why they are sent in high precision."""
    if style.dispatch != "faces":
        return None, "dispatch='bf16'"
    parts = [local(p) for p in module._parameters.values() if p is not None]
    weights = [part for part in parts if part.dim() == 3]
    found = [part.config for part in weights if is_converted(part) and part.config is not None]
    if not found or len(found) < len(weights) or any(config != found[0] for config in found):
        return None, "its experts have different recipes, or none"
    return _of_rows(found[0].input)


def _of_rows(quantizer: Quantizer) -> tuple[Quantizer | None, str]:
    """Return the quantizer of inputs if rows can be sent quantized, or None and why not."""
    row = of_direction(quantizer, "rowwise")
    if quantizer.rowwise_format.is_identity:
        return None, "the rowwise face is in high precision"
    if not isinstance(row, OneFormatQuantizer) or not _within_rows(row):
        return None, f"{row.rowwise_format}: its scales, or draws, are not those of a token"
    if not quantizer.derives_columnwise:
        return None, "the columnwise face is made of the original tokens"
    return quantizer, ""


def _within_rows(quantizer: Quantizer) -> bool:
    """Return whether a format has scales within each row."""
    fmt = quantizer.rowwise_format
    level = (1, None) if fmt.tensor_block is None else fmt.tensor_block
    alone = not quantizer.stochastic and not quantizer.delayed_rules("input")
    return fmt.block[0] == 1 and level[0] == 1 and alone


def _quantizer_of(what: str, word: str) -> Quantizer | None:
    """Return the quantizer named by a word, or None for high precision."""
    if word == "bf16":
        return None
    quantizer = from_name(word).input
    if not _within_rows(quantizer):
        raise ValueError(
            f"ExpertParallel: 'bf16', or a format with scales within a token, is required as {what}, got {word!r}"
        )
    return quantizer


def _experts_of(module: nn.Module) -> int:
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or count < 1:
        raise TypeError(
            f"ExpertParallel: a module with num_experts is required, got {type(module).__name__}"
        )
    return count


class _Forward:
    """Replacement of the experts' forward under expert parallelism."""

    def __init__(self, style: ExpertParallel, module: nn.Module, mesh: DeviceMesh) -> None:
        self._style, self._module, self._mesh = style, module, mesh
        self._inner = module.__dict__.get("forward")

    # The host reads counts of all ranks, at which a graph would break anyway: in the middle, and with
    # guards on parameters that stand here only while experts run
    @outside_graphs("experts on several ranks run between graphs")
    def __call__(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Dispatch tokens, run the experts, and combine their outputs."""
        style, module = self._style, self._module
        of_gradient = style.gradients
        with torch.no_grad():
            if style.ends:
                counts = counts.diff(prepend=counts.new_zeros(1))
            count = _experts_of(module)
            route = Route.of(counts.long(), self._mesh.get_group(), count, tokens.shape[0])
        if autocasts(tokens.device.type):  # as the experts would
            tokens = tokens.to(torch.get_autocast_dtype(tokens.device.type))
        routed = sum(route.sent)
        quantizer, reason = _input_quantizer(style, module)
        if quantizer is None:
            _tell_once(module, reason)
        there, back = route.there, route.back
        mine = _Move.apply(tokens[:routed], there, back, quantizer, of_gradient, True)
        given = route.counts
        if style.ends:
            given = given.cumsum(0, dtype=torch.int32)
        with _local_parts(module):
            out = self._run(mine, given)
        y = _Move.apply(out, back, there, style.combine, of_gradient, False)
        rest = tokens.shape[0] - routed
        return torch.cat([y, y.new_zeros(rest, y.shape[1])]) if rest else y

    def _run(self, tokens: Tensor, counts: Tensor) -> Tensor:
        if self._inner is not None:
            out: Tensor = self._inner(tokens, counts)
        else:
            out = type(self._module).forward(self._module, tokens, counts)
        return out


@contextlib.contextmanager
def _local_parts(module: nn.Module) -> Iterator[None]:
    """Replace a module's DTensor parameters by their local tensors while it runs, with gradients."""
    # The private table: a module's attribute would refuse what is no parameter
    before = dict(module._parameters)
    for name, parameter in before.items():
        if isinstance(parameter, DTensor):
            # without a gradient there is nothing to place, in inference mode no view
            grad = torch.is_grad_enabled()
            module._parameters[name] = parameter.to_local() if grad else local(parameter)
    try:
        yield
    finally:
        module._parameters.update(before)


def _tell_once(module: nn.Module, reason: str) -> None:
    """Log why tokens are sent in high precision, at the first call."""
    if not module.__dict__.get("_hybridtensor_told"):
        module.__dict__["_hybridtensor_told"] = True
        _logger.info("%s: tokens are sent as values: %s", type(module).__name__, reason)


_logger = logging.getLogger("hybridtensor")
