"""How much noise each format makes in each product of a model, and how much that matters.

Noise is measured on stretches of the operands, in all formats from one forward and backward per batch. How much it
matters compared with that of others follows from how much of the residual stream, or of the gradient, a product makes:

| product | noise counts by |
|---|---|
| ``output`` | the share that its block adds to the stream |
| ``grad_input`` | the share that its block adds to the stream's gradient, times that of weight gradients before it |
| ``grad_weight`` | its share of the weight gradients |

all as sums of squares. How much of the first two arrives in gradients is measured, too: see ``calibration``. A sum
of these is the error of a recipe: about the relative squared error of the gradients of all weights. Noise of different
products is taken as independent.

Linear layers are measured in hooks; experts where their products are observed, each as a linear layer of its own.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridtensor.advising.calibration import gradient_errors, values_of
from hybridtensor.advising.experts import is_measurable, told_products
from hybridtensor.advising.noise import Noise, hooked
from hybridtensor.advising.stream import Block, block_of, measured_blocks
from hybridtensor.arguments import require_float, require_memory
from hybridtensor.check import restored
from hybridtensor.layers import Layer, layers_of
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS
from hybridtensor.selection import is_quantized
from hybridtensor.subclasses.op_table import Args, Kwargs

Batch = TypeVar("Batch")


class Product(NamedTuple):
    """A product of a layer, its share of the cost, and the noise of each format in it; ``tied_to`` is the first layer
    with the same weight, if there are several."""

    layer: str
    gemm: str
    operations: float
    weight: float
    noise: dict[str, float]
    tied_to: str | None = None

    def error(self, fmt: str) -> float:
        """Return this product's share of the recipe's error with one format; infinite if that overflows."""
        noise = self.noise[fmt]
        return noise if math.isinf(noise) else self.weight * noise


def measure(
    model: nn.Module,
    batches: Sequence[Batch],
    formats: Iterable[str],
    run: Callable[[nn.Module, Batch], Tensor],
) -> list[Product]:
    """Return the products of all layers that ``quantize_`` would convert, in the order of the forward.

    Args:
        model: In high precision: it runs as it is.
        batches: Inputs of the model.
        formats: Specs that are measured.
        run: Returns the loss of a batch.

    Raises:
        TypeError: If a weight is not bf16, fp16 or fp32.
        ValueError: If a layer is quantized or on the meta device, a loss depends on no parameter, it or a gradient is
            not finite, or what a layer multiplies is all zeros.
        NotImplementedError: If the model is sharded, or multiplies experts in ways that are not intercepted.
    """
    configs = {fmt: HybridConfig.parse(fmt) for fmt in formats}
    plain = getattr(model, "_orig_mod", model)  # of torch.compile, whose names nobody quantizes by
    wanted = [layer for layer in layers_of(plain) if _is_wanted(layer)]
    _require_plain(wanted)
    layers = [Noise(layer, configs) for layer in wanted]
    within = {one: block_of(plain, one.layer) for one in layers}
    # Layers number themselves when they run first: the order of modules need not be that of the
    # forward.
    order = iter(range(10**9))
    with contextlib.ExitStack() as stack:
        modules = dict.fromkeys(module for module in within.values() if module is not None)
        blocks = stack.enter_context(measured_blocks(modules))
        linears = [one for one in layers if not one.layer.is_stack]
        stack.enter_context(hooked(linears, functools.partial(_measuring, order)))
        stack.enter_context(_as_it_is(plain, batches))
        stacks = [one for one in layers if one.layer.is_stack]
        for batch in batches:
            with told_products(stacks, order):
                _run(model, batch, run)
    _require_signal(layers)
    products = _products({one: None if m is None else blocks[m] for one, m in within.items()})
    with _as_it_is(plain, batches):
        return _calibrated(products, model, layers, configs, lambda: _run(model, batches[0], run))


def _calibrated(
    products: list[Product],
    model: nn.Module,
    layers: Sequence[Noise],
    configs: Mapping[str, HybridConfig],
    run: Callable[[], None],
) -> list[Product]:
    """Scale the predicted errors to those measured in gradients, with the least noisy format that fits all linear
    layers."""
    linears = [one for one in layers if not one.layer.is_stack and one.order >= 0]
    fitting = [fmt for fmt in configs if all(fmt in one.formats for one in linears)]
    names = {one.layer.name for one in linears}

    def predicted(fmt: str, gemm: str) -> float:
        return sum(p.error(fmt) for p in products if p.gemm == gemm and p.layer in names)

    quantized = [fmt for fmt in fitting if 0 < predicted(fmt, "output") < math.inf]
    if not quantized:
        return products
    # Noise adds up as the prediction assumes only where it is small.
    fmt = min(quantized, key=lambda fmt: predicted(fmt, "output"))
    found = gradient_errors(model, linears, configs[fmt], run)
    factors = {
        gemm: error / predicted(fmt, gemm)
        for gemm, error in found.items()
        if 0 < predicted(fmt, gemm) < math.inf and 0 < error < math.inf
    }
    return [p._replace(weight=p.weight * factors.get(p.gemm, 1.0)) for p in products]


def _is_wanted(layer: Layer) -> bool:
    if layer.why_skipped() is not None or not isinstance(layer.weight, Tensor):
        return False
    return not layer.is_stack or is_measurable(layer.weight)


def _require_plain(layers: Iterable[Layer]) -> None:
    """Raise NotImplementedError for a weight that ranks share, ValueError for one that is quantized or has no
    values, TypeError for one of another dtype than layers have."""
    for layer in layers:
        name, weight = layer.name or "<root>", layer.weight
        if isinstance(weight, DTensor):
            raise NotImplementedError(
                f"advise: {name} is a DTensor; advise before fully_shard and parallelize_module"
            )
        # Its gradients have the noise of its recipe, which would count as that of the formats to measure
        config = None if layer.recipe is None else layer.recipe.config
        if config is not None and any(is_quantized(config.formats(gemm)) for gemm in GEMMS):
            raise ValueError(
                f"advise: a model in high precision is required, got {name} with the recipe {config}; make it plain "
                "first (plain_), or give it the recipe bf16 (set_config_)"
            )
        require_memory("advise", f"the weight of {name}", weight)
        require_float(f"advise: the weight of {name}", weight)


def _require_signal(layers: Iterable[Noise]) -> None:
    """Raise ValueError where there is nothing that formats could be wrong about, or nothing that is right."""
    ran = [one for one in layers if one.order >= 0]
    silent = [one.layer.name or "<root>" for one in ran if not one.has_signal()]
    if silent:
        raise ValueError(
            f"advise: the products of {', '.join(silent)} are all zeros; give batches like those of training, "
            "and weights after some steps"
        )
    broken = [one.layer.name or "<root>" for one in ran if not math.isfinite(one.gradient)]
    if broken:
        raise ValueError(
            f"advise: the gradients of {', '.join(broken)} are not finite; give batches and a loss like those of "
            "training"
        )
    trained = [one for one in ran if one.operations["grad_weight"]]
    if trained and all(one.gradient == 0 for one in trained):
        raise ValueError(
            "advise: the gradients of every layer are zero; give batches and a loss like those of training"
        )


def _run(model: nn.Module, batch: Batch, run: Callable[[nn.Module, Batch], Tensor]) -> None:
    value = run(model, batch)
    if not value.requires_grad:
        raise ValueError(
            "advise: the loss depends on no parameter that requires a gradient; return one that does"
        )
    if not bool(value.isfinite().all()):
        raise ValueError(
            f"advise: the loss is {float(value.detach())}; give batches like those of training, and a model "
            "that has not diverged"
        )
    value.backward()


@contextlib.contextmanager
def _as_it_is(model: nn.Module, batches: object) -> Iterator[None]:
    """Run a model eagerly, with gradients, and restore what that changes."""
    with torch.compiler.set_stance("force_eager"), torch.enable_grad(), restored(model, batches):
        yield


def _measuring(order: Iterator[int], one: Noise) -> Callable[..., None]:
    """Return a forward hook that measures the layer's product, and in backward those of its gradients."""

    def hook(module: nn.Module, args: Args, kwargs: Kwargs, output: Tensor) -> None:
        given = args[0] if args else kwargs["input"]
        x = given.detach().reshape(-1, given.shape[-1])
        weight = values_of(one)
        one.begin(order)
        one.add("output", {"input": x, "weight": weight})
        if output.requires_grad:
            needs = given.requires_grad, one.layer.weight.requires_grad
            output.register_hook(lambda grad: _backward(one, x, weight, grad, needs))

    return hook


def _backward(
    one: Noise, x: Tensor, weight: Tensor, grad: Tensor, needs: tuple[bool, bool]
) -> None:
    """Measure the products of backward that run: for an input, and for a weight that asks for a gradient."""
    grad = grad.reshape(-1, grad.shape[-1])
    if needs[0]:
        one.add("grad_input", {"grad_output": grad, "weight": weight})
    if needs[1]:
        one.add("grad_weight", {"grad_output": grad, "input": x})


def _products(layers: dict[Noise, Block | None]) -> list[Product]:
    ran = sorted((one for one in layers if one.order >= 0), key=lambda one: one.order)
    whole = sum(one.gradient for one in ran) or 1.0
    before, made, owners = 0.0, [], dict[nn.Parameter, str]()
    for one in ran:
        name, held = one.layer.name, one.layer.module._parameters.get(one.layer.parameter)
        tied_to = None if held is None else owners.setdefault(held, name)
        block = layers[one]
        weights = {
            "output": 1.0 if block is None else block.forward_share(),
            "grad_input": (1.0 if block is None else block.backward_share()) * before / whole,
            "grad_weight": one.gradient / whole,
        }
        # After use: noise in a layer's ``grad_input`` reaches the layers before it, not its own
        # weight.
        before += one.gradient
        for gemm, weight in weights.items():
            noise = {fmt: one.relative(gemm, fmt) for fmt in one.formats}
            made.append(Product(name, gemm, one.operations[gemm], weight, noise, tied_to))
    return made
