"""How much quantization noise in outputs, and in input gradients, arrives in the gradients of all parameters.

Shares of the residual stream rank the products. How much of their noise arrives in gradients depends on all later
layers, so it is measured: one batch runs unchanged, once with quantized outputs, and once with quantized gradients of
inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtensor import ops
from hybridtensor.advising.noise import Noise, hooked, one_draw, operand_of
from hybridtensor.distributed.fsdp.hooks import part_of
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS, Gemm
from hybridtensor.subclasses import is_converted
from hybridtensor.subclasses.op_table import Args, Kwargs


def gradient_errors(
    model: nn.Module, layers: Sequence[Noise], config: HybridConfig, run: Callable[[], None]
) -> dict[str, float]:
    """Return the relative squared error of all parameter gradients when only ``output`` or only ``grad_input`` is
    quantized."""
    exact = _gradients(model, run)
    signal = sum(float(g.float().square().sum()) for g in exact.values())
    found = {}
    for name, inject in (("output", _outputs), ("grad_input", _input_gradients)):
        with hooked(layers, functools.partial(inject, config)):
            made = _gradients(model, run)
        noise = sum(
            float((made[p] - g).float().square().sum()) for p, g in exact.items() if p in made
        )
        found[name] = noise / signal if signal else 0.0
    return found


def _gradients(model: nn.Module, run: Callable[[], None]) -> dict[nn.Parameter, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    # each run draws from the state that it finds: dropout is the same in all of them
    with torch.random.fork_rng(sorted({d.index for d in devices})):
        run()
    return {p: p.grad.detach() for p in model.parameters() if p.grad is not None}


def _outputs(config: HybridConfig, one: Noise) -> Callable[..., Tensor]:
    """Return a forward hook that replaces a layer's output by that of the quantized product."""

    def hook(module: nn.Module, args: Args, kwargs: Kwargs, out: Tensor) -> Tensor:
        x = (args[0] if args else kwargs["input"]).detach().to(out.dtype)
        error = _error(GEMMS[0], config, {"input": x, "weight": values_of(one).to(out.dtype)})
        return out + error.view(out.shape)

    return hook


def _input_gradients(config: HybridConfig, one: Noise) -> Callable[..., None]:
    """Return a forward hook that has backward replace the gradient of a layer's input by that of the quantized
    product."""

    def with_error(grad: Tensor, of_output: Tensor) -> Tensor:
        operands = {"grad_output": of_output, "weight": values_of(one).to(of_output.dtype)}
        return grad + _error(GEMMS[1], config, operands).view(grad.shape).to(grad.dtype)

    def hook(module: nn.Module, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        if not (out.requires_grad and x.requires_grad):
            return
        behind: list[Tensor] = []
        out.register_hook(lambda grad: behind.append(grad.detach()))
        # the error adds to the gradients of whatever else reads the input
        x.register_hook(lambda grad: with_error(grad, behind.pop()) if behind else None)

    return hook


@torch.no_grad()
def _error(gemm: Gemm, config: HybridConfig, operands: dict[str, Tensor]) -> Tensor:
    """Return a quantized product less the exact one, ``[tokens, features]``."""
    state = one_draw(config, operands[gemm.left[0]].device)
    flat = {role: values.reshape(-1, values.shape[-1]) for role, values in operands.items()}
    pairs = [operand_of(config, *operand, flat[operand[0]], state) for operand in gemm[1:]]
    faces, plain = zip(*pairs, strict=True)
    with torch.autocast(plain[0].device.type, enabled=False):
        product = ops.product(faces[0], faces[1], out_dtype=plain[0].dtype)
        return product - F.linear(plain[0], plain[1])


def values_of(one: Noise) -> Tensor:
    """Return the high-precision weight of a linear layer, ``[out, in]``."""
    part = part_of(one.layer.weight)
    values: Tensor = part.dequantize() if is_converted(part) else part
    return values.detach().t() if one.layer.transposed else values.detach()
