"""How much noise each format makes in the products of one layer, of stretches of their operands."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hybridtensor.formats import IDENTITY
from hybridtensor.layers import Layer
from hybridtensor.ops import Face
from hybridtensor.quantizers import Quantizer
from hybridtensor.quantizers.base import one_face
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS, Gemm
from hybridtensor.state import Context, StateTensors
from hybridtensor.watching.statistics import Part, measure_product
from hybridtensor.watching.statistics import part_of as stretch_of

_ROWS = 256  # of each operand in a product that is measured
_SIGNAL, _NOISE = 0, 2  # in the numbers of a product


class Noise:
    """Quantization noise of one layer's products, measured while the model runs.

    Args:
        layer: The layer.
        configs: Recipes by format; those that the layer's sizes do not fit are left out.

    Attributes:
        layer: The same.
        formats: Those that are measured.
        order: Index of the layer in the order of first outputs; -1 before.
        operations: Multiplications of each product.
        gradient: Sum of squares of the weight's gradient.
    """

    def __init__(self, layer: Layer, configs: Mapping[str, HybridConfig]) -> None:
        self.layer = layer
        self._configs = {fmt: config for fmt, config in configs.items() if _fits(layer, config)}
        self.formats = tuple(self._configs)
        self.order = -1
        self.operations = dict.fromkeys((gemm.name for gemm in GEMMS), 0.0)
        self.gradient = 0.0
        self._size = math.prod(layer.weight.shape[-2:])
        self._sums: dict[tuple[str, str], Tensor] = {}

    def begin(self, order: Iterator[int]) -> None:
        """Record that the layer's output is computed."""
        if self.order < 0:
            self.order = next(order)

    @torch.no_grad()
    def add(self, name: str, operands: Mapping[str, Tensor]) -> None:
        """Add the noise of each format in a product of ``operands`` by role: ``[tokens, features]``, a weight ``[N,
        K]``."""
        rows = next(values.shape[0] for role, values in operands.items() if role != "weight")
        self.operations[name] += rows * self._size
        gemm = next(gemm for gemm in GEMMS if gemm.name == name)
        for fmt, config in self._configs.items():
            if config.formats(gemm) == (IDENTITY, IDENTITY):
                continue
            state = one_draw(config, operands[gemm.left[0]].device)
            parts = [_part(config, gemm, i, operands, state) for i in (0, 1)]
            found = measure_product(parts[0], parts[1]).square()
            known = self._sums.get((name, fmt))
            self._sums[name, fmt] = found if known is None else known + found
        if name == "grad_weight":
            grad, x = operands["grad_output"].float(), operands["input"].float()
            self.gradient += float((grad.t() @ x).square().sum())

    def has_signal(self) -> bool:
        """Return whether any product that was measured is not all zeros; True if none was."""
        signals = [float(found[_SIGNAL]) for found in self._sums.values()]
        return not signals or any(signal != 0 for signal in signals)

    def relative(self, gemm: str, fmt: str) -> float:
        """Return the noise of a product over its signal; of one that did not run, or not quantized, 0."""
        sums = self._sums.get((gemm, fmt))
        if sums is None:
            return 0.0
        found = sums.tolist()
        return math.inf if math.isnan(found[_NOISE]) else found[_NOISE] / (found[_SIGNAL] or 1.0)


def one_draw(config: HybridConfig, device: torch.device) -> StateTensors | None:
    """Return the state that both operands of a product draw their signs from; None if nothing is drawn."""
    if not config.stochastic:
        return None
    return StateTensors(torch.randint(2**63 - 1, (2,), device=device), None, None)


def _part(
    config: HybridConfig,
    gemm: Gemm,
    index: int,
    operands: Mapping[str, Tensor],
    state: StateTensors | None,
) -> Part:
    """Slice a stretch out of an operand, with the face that the product reads."""
    role, direction = (gemm.left, gemm.right)[index]
    face, matrix = operand_of(config, role, direction, operands[role], state)
    count = min(_ROWS, matrix.shape[0])
    return stretch_of(face, matrix[:count], 0, count)


def operand_of(
    config: HybridConfig, role: str, direction: str, values: Tensor, state: StateTensors | None
) -> tuple[Face, Tensor]:
    """Return the face that a product reads of ``values``, and these as the product has them, ``[M, K]``."""
    quantizer: Quantizer = getattr(config, role)
    context = Context(role, state, record=False)
    face = one_face(quantizer, values, direction, values.dtype, context)
    return face, values.t() if direction == "columnwise" else values


@contextlib.contextmanager
def hooked(
    layers: Iterable[Noise], hook_of: Callable[[Noise], Callable[..., object]]
) -> Iterator[None]:
    """Run a forward hook of each layer, which gets keyword arguments, too."""
    with contextlib.ExitStack() as stack:
        for one in layers:
            hook = one.layer.module.register_forward_hook(hook_of(one), with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _fits(layer: Layer, config: HybridConfig) -> bool:
    """Return whether a layer's weight is of whole blocks."""
    try:
        config.check_sizes(*layer.size(tuple(layer.weight.shape)), layer.name)
    except ValueError:
        return False
    return True
