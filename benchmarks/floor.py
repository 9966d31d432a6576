"""The least that an eager FP8 layer can take: this package's launches and torch's products, and nothing is asked.

No check of arguments, writes, modes, streams or layouts, no sharing, no state: what a step of the package takes beyond
it is what these cost. Weights are quantized after each step, several in one launch, and both faces stay until the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridtensor import ops
from hybridtensor.ops import NO_INPUTS, CastInputs, CastRequest, Face
from hybridtensor.ops.zeros import zero
from hybridtensor.quantizers.plans import cast_plan
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import Context

_TOGETHER = 14  # weights that are quantized at once
_BF16 = torch.bfloat16


def _request(role: str, device: torch.device) -> CastRequest:
    config = HybridConfig.parse("fp8")
    quantizer = {"input": config.input, "weight": config.weight, "grad_output": config.grad_output}[role]
    plan = cast_plan(quantizer, True, True, _BF16, Context(role), device)
    if plan is None:
        raise ValueError(f"floor: one cast for both faces is required, got several for {role}")
    return plan.run_request


class _Cast:
    """A measurement and a cast into both faces, whose arguments are there but for the addresses."""

    def __init__(self, x: Tensor, request: CastRequest) -> None:
        cast: Any = ops.prepare(x, request, direct=True)
        cast.run(x, NO_INPUTS)  # which compiles
        task, self._device = cast.task, x.device
        self._measure, self._cast, self._size = cast._measurement._launch, cast.cast._launch, x.numel()
        self._layouts = [layout for output in task.outputs for layout in output.layouts]
        self._lies, self._numbers = task.matrix[1:], cast.cast._numbers
        self._strides = [output.scale_strides for output in task.outputs]

    def __call__(self, x: Tensor) -> list[Tensor]:
        row, row_scale, column, column_scale = made = [
            torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
            for shape, strides, dtype in self._layouts
        ]
        at, amax = x.data_ptr(), zero(x).data_ptr()
        self._measure.start(at, amax, self._size)
        of_row = row.data_ptr(), row_scale.data_ptr(), *self._strides[0], at, amax
        of_column = column.data_ptr(), column_scale.data_ptr(), *self._strides[1], at, amax
        self._cast.start((at, *self._lies), of_row, of_column, (at, at, at), 0, *self._numbers)
        return made


_casts: dict[tuple[torch.Size, str], _Cast] = {}


def _cast(x: Tensor, role: str) -> list[Tensor]:
    cast = _casts.get((x.shape, role))
    if cast is None:
        cast = _casts[x.shape, role] = _Cast(x, _request(role, x.device))
    return cast(x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, faces: tuple[Face, Face]) -> Tensor:
        ctx.shape, (of_row, of_column) = x.shape, faces
        row, scale, column, column_scale = _cast(x.reshape(-1, x.shape[-1]), "input")
        out = torch._scaled_mm(row, of_row.qdata.t(), scale, of_row.scale, out_dtype=_BF16, use_fast_accum=True)  # type: ignore[arg-type]
        ctx.save_for_backward(column, column_scale, of_column.qdata, of_column.scale)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        row, scale, column, column_scale = _cast(grad, "grad_output")
        grad_input = torch._scaled_mm(row, weight.t(), scale, weight_scale, out_dtype=_BF16)
        grad_weight = torch._scaled_mm(column, x.t(), column_scale, x_scale, out_dtype=_BF16)
        return grad_input.view(ctx.shape), grad_weight, None


class Layer(nn.Linear):
    """A bias-free linear layer, after ``convert``."""

    faces: tuple[Face, Face]

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, in BF16."""
        return _Linear.apply(input, self.weight, self.faces)  # type: ignore[no-any-return, no-untyped-call]


def convert(module: nn.Module) -> Callable[[], None]:
    """Make the linear layers of ``module`` such layers; return what quantizes their weights after each step."""
    layers: list[Any] = [layer for layer in module.modules() if type(layer) is nn.Linear]
    for layer in layers:
        layer.__class__ = Layer

    @torch.no_grad()
    def refresh() -> None:
        for begin in range(0, len(layers), _TOGETHER):
            some = layers[begin : begin + _TOGETHER]
            weights = [layer.weight.detach() for layer in some]
            request = _request("weight", weights[0].device)
            amaxes = ops.measure_all(weights, request)
            inputs = [CastInputs(row_amax=row, column_amax=column) for row, column in amaxes]
            for layer, faces in zip(some, ops.quantize_all(weights, request, inputs), strict=True):
                layer.faces = faces

    refresh()
    return refresh
