"""How much noise each format makes in each product of a model, and how much that matters.

Noise is measured on stretches of the operands, in all formats from one forward and backward per batch. What
it matters follows from how much of the residual stream, or of the gradient, a product makes:

| product | noise counts by |
|---|---|
| ``output`` | the share that its block adds to the stream |
| ``grad_input`` | the share that its block adds to the stream's gradient, times that of weight gradients before it |
| ``grad_weight`` | its share of the weight gradients |

all as sums of squares. A sum of these is the error of a recipe: about the relative squared error of the
stream and of all weight gradients together. Noise of different products is taken as independent.

Shape letters: ``T`` tokens, ``N, K`` a weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridtensor.distributed.fsdp.hooks import part_of
from hybridtensor.formats import IDENTITY
from hybridtensor.layers import Layer, layers_of
from hybridtensor.quantizers import Quantizer
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS, Gemm
from hybridtensor.state import Context
from hybridtensor.subclasses import is_converted
from hybridtensor.watching.statistics import measure_product
from hybridtensor.watching.statistics import part_of as stretch_of

_ROWS = 256  # of each operand in a product that is measured
_SIGNAL, _NOISE = 0, 2  # in the numbers of a product


class Product(NamedTuple):
    """One product of one layer.

    Attributes:
        layer: Fully qualified name.
        gemm: ``output``, ``grad_input`` or ``grad_weight``.
        operations: Multiplications of it, over all batches.
        weight: What its noise counts by.
        noise: Relative squared error of the product, by format; without those that the layer's sizes do
            not fit.
    """

    layer: str
    gemm: str
    operations: float
    weight: float
    noise: dict[str, float]

    def error(self, fmt: str) -> float:
        """Return what a format adds to the error of a recipe."""
        return self.weight * self.noise[fmt]


class _Layer:
    """What is known of a layer while the model runs."""

    def __init__(
        self, layer: Layer, block: nn.Module | None, configs: dict[str, HybridConfig]
    ) -> None:
        self.layer, self.block = layer, block
        self.configs = {fmt: config for fmt, config in configs.items() if _fits(layer, config)}
        self.order = -1  # in forward
        self.operations = dict.fromkeys((gemm.name for gemm in GEMMS), 0.0)
        self.gradient = 0.0  # sum of squares of the weight's gradient
        self.input: Tensor | None = None
        self.sums: dict[tuple[str, str], Tensor] = {}


class _Block:
    """What a block adds to the stream: sums of squares, float64."""

    def __init__(self) -> None:
        self.stream = self.added = self.gradient = self.gradient_added = 0.0
        self.came: Tensor | None = None

    def forward_share(self) -> float:
        """Return the share of the stream behind the block that the block added; 1 where there is no stream."""
        return min(self.added / self.stream, 1.0) if self.stream else 1.0

    def backward_share(self) -> float:
        """Return the same of the gradient before the block."""
        return min(self.gradient_added / self.gradient, 1.0) if self.gradient else 1.0


def measure(
    model: nn.Module,
    batches: Sequence[Any],
    formats: Iterable[str],
    run: Callable[[nn.Module, Any], Tensor],
) -> list[Product]:
    """Return the products of all linear layers that ``quantize_`` would convert, in the order of the forward.

    Args:
        model: In high precision, or converted: it runs as it is.
        batches: What it is run with.
        formats: Specs that are measured.
        run: Returns the loss of a batch.

    Raises:
        ValueError: If a loss depends on no parameter.
        NotImplementedError: If the model is sharded.
    """
    configs = {fmt: HybridConfig.parse(fmt) for fmt in formats}
    plain = getattr(model, "_orig_mod", model)  # of torch.compile, whose names nobody quantizes by
    layers = [
        _Layer(layer, _block_of(plain, layer), configs)
        for layer in layers_of(plain)
        if _is_wanted(layer)
    ]
    sharded = next(
        (one.layer.name for one in layers if isinstance(one.layer.weight, DTensor)), None
    )
    if sharded is not None:
        raise NotImplementedError(
            f"advise: a model that no ranks share is required, got {sharded} as a DTensor; advise before "
            "fully_shard and parallelize_module"
        )
    blocks = {one.block: _Block() for one in layers if one.block is not None}
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in grads:
        parameter.grad = None  # else backward adds to what is there
    try:
        with _hooked(layers, blocks):
            for batch in batches:
                value = run(model, batch)
                if not value.requires_grad:
                    raise ValueError(
                        "advise: a loss that depends on parameters with gradients is required, got one that does not"
                    )
                value.backward()
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
    return _products(layers, blocks)


def _is_wanted(layer: Layer) -> bool:
    return not layer.is_stack and layer.why_skipped() is None and isinstance(layer.weight, Tensor)


def _block_of(model: nn.Module, layer: Layer) -> nn.Module | None:
    """Return the outermost member of a list of modules that holds a layer: a block with a residual stream around
    it.
    """
    parent: nn.Module = model
    for name in layer.name.split("."):
        child = parent._modules.get(name)
        if child is None:
            return None
        if (
            isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
            and child is not layer.module
        ):
            return child
        parent = child
    return None


@contextlib.contextmanager
def _hooked(layers: list[_Layer], blocks: dict[nn.Module, _Block]) -> Iterator[None]:
    """Have layers and blocks measured while the model runs, eagerly."""
    order = iter(range(10**9))
    with contextlib.ExitStack() as stack:
        for one in layers:
            hook = one.layer.module.register_forward_hook(_measuring(one, order), with_kwargs=True)
            stack.callback(hook.remove)
        for module, block in blocks.items():
            for hook in (
                module.register_forward_pre_hook(_coming(block), with_kwargs=True),
                module.register_forward_hook(_leaving(block)),
            ):
                stack.callback(hook.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        yield


def _measuring(one: _Layer, order: Iterator[int]) -> Callable[..., None]:
    """Return a hook that measures the products of a layer: that of forward, and those of backward when its gradient
    is there.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else kwargs["input"]
        x = given.detach().reshape(-1, given.shape[-1])
        weight = _values(one.layer)
        one.order = next(order) if one.order < 0 else one.order
        with torch.no_grad():
            _add(one, "output", {"input": x, "weight": weight})
        if output.requires_grad:
            needs = given.requires_grad, one.layer.weight.requires_grad
            output.register_hook(lambda grad: _backward(one, x, weight, grad, needs))

    return hook


@torch.no_grad()
def _backward(
    one: _Layer, x: Tensor, weight: Tensor, grad: Tensor, needs: tuple[bool, bool]
) -> None:
    """Measure the products of backward that run: for an input, and for a weight that asks for a gradient."""
    grad = grad.reshape(-1, grad.shape[-1])
    if needs[0]:
        _add(one, "grad_input", {"grad_output": grad, "weight": weight})
    if needs[1]:
        _add(one, "grad_weight", {"grad_output": grad, "input": x})
        one.gradient += float((grad.float().t() @ x.float()).square().sum())


def _add(one: _Layer, name: str, operands: dict[str, Tensor]) -> None:
    """Add up the noise that each format makes in a product, and its operations."""
    tokens = operands.get("input", operands.get("grad_output"))
    one.operations[name] += (0 if tokens is None else tokens.shape[0]) * one.layer.weight.numel()
    gemm = next(gemm for gemm in GEMMS if gemm.name == name)
    for fmt, config in one.configs.items():
        if config.formats(gemm) == (IDENTITY, IDENTITY):
            continue
        parts = [_part(config, gemm, i, operands) for i in (0, 1)]
        found = measure_product(parts[0], parts[1]).square()
        known = one.sums.get((name, fmt))
        one.sums[name, fmt] = found if known is None else known + found


def _part(config: HybridConfig, gemm: Gemm, index: int, operands: dict[str, Tensor]) -> Any:
    """Return a stretch of an operand and its face."""
    role, direction = (gemm.left, gemm.right)[index]
    quantizer: Quantizer = getattr(config, role)
    values, columnwise = operands[role], direction == "columnwise"
    faces = quantizer.faces(
        values,
        rowwise=not columnwise,
        columnwise=columnwise,
        dtype=values.dtype,
        context=Context(role, record=False),
    )
    face = faces[1 if columnwise else 0]
    if face is None:
        raise ValueError(f"advise: {quantizer} made no {direction} face of {role}")
    matrix = values.t() if columnwise else values
    count = min(_ROWS, matrix.shape[0])
    return stretch_of(face, matrix[:count], 0, count)


def _coming(block: _Block) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        block.came = given if given is not None and given.is_floating_point() else None

    return hook


def _leaving(block: _Block) -> Callable[..., None]:
    """Return a hook that measures what a block adds to the stream, and in backward to its gradient."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        came, block.came = block.came, None
        left = output[0] if isinstance(output, (tuple, list)) else output
        if came is None or not isinstance(left, Tensor) or left.shape != came.shape:
            return  # no stream goes around it
        with torch.no_grad():
            block.added += float((left - came).float().square().sum())
            block.stream += float(left.float().square().sum())
        if not (left.requires_grad and came.requires_grad):
            return
        behind: list[Tensor] = []
        left.register_hook(lambda grad: behind.append(grad.detach()))

        def before(grad: Tensor) -> None:
            if behind:
                block.gradient_added += float((grad - behind[0]).float().square().sum())
                block.gradient += float(grad.float().square().sum())

        came.register_hook(before)

    return hook


def _values(layer: Layer) -> Tensor:
    """Return the values of a layer's weight."""
    part = part_of(layer.weight)
    values: Tensor = part.dequantize() if is_converted(part) else part
    return values.detach()


def _fits(layer: Layer, config: HybridConfig) -> bool:
    """Return whether a layer's weight is of whole blocks."""
    try:
        config.check_sizes(*layer.size(tuple(layer.weight.shape)), layer.name)
    except ValueError:
        return False
    return True


def _products(layers: list[_Layer], blocks: dict[nn.Module, _Block]) -> list[Product]:
    ran = sorted((one for one in layers if one.order >= 0), key=lambda one: one.order)
    whole = sum(one.gradient for one in ran) or 1.0
    before, made = 0.0, []
    for one in ran:
        block = None if one.block is None else blocks[one.block]
        weights = {
            "output": 1.0 if block is None else block.forward_share(),
            "grad_input": (1.0 if block is None else block.backward_share()) * before / whole,
            "grad_weight": one.gradient / whole,
        }
        before += one.gradient
        for gemm, weight in weights.items():
            noise = {fmt: _relative(one.sums.get((gemm, fmt))) for fmt in one.configs}
            made.append(Product(one.layer.name, gemm, one.operations[gemm], weight, noise))
    return made


def _relative(sums: Tensor | None) -> float:
    """Return the noise of a product over its signal; of one that did not run, or not quantized, 0."""
    if sums is None:
        return 0.0
    found = sums.tolist()
    return (
        float("inf") if found[_NOISE] != found[_NOISE] else found[_NOISE] / (found[_SIGNAL] or 1.0)
    )
