"""How far what an engine computes is from what was trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridtensor import formats
from hybridtensor.arguments import require_choice, require_int, require_items, require_module, wrong
from hybridtensor.distributed.checkpoint.plain import named_parameters
from hybridtensor.distributed.checkpoint.ranks import is_sharded
from hybridtensor.formats import Format
from hybridtensor.inference.engine import (
    Decoded,
    decoded_input,
    decoded_weight,
    product,
    rule,
)
from hybridtensor.inference.layouts import AUTO, Packed, require_layout
from hybridtensor.inference.stored import SUFFIXES
from hybridtensor.inference.tensors import inference_tensors
from hybridtensor.inference.weights import Exported, exported
from hybridtensor.plain import plain_
from hybridtensor.quantizers import OneFormatQuantizer

if TYPE_CHECKING:
    from rich.table import Table

RULES = ("tensor", "token", "1x128", "1x32", "1x16")
_WHO = "mismatch"
_OF_FORMAT: dict[Format, str | None] = {
    formats.FP8_E4M3_TENSOR: "tensor",
    formats.FP8_E4M3_ROW: "token",
    formats.FP8_E4M3_1X128: "1x128",
    formats.FP8_E4M3_1X128_FP32_SCALE: "1x128",
    formats.MXFP8_E4M3: "1x32",
    formats.NVFP4: "1x16",
    formats.IDENTITY: None,
}


@dataclass(frozen=True)
class LayerMismatch:
    """Outputs of one module, given the inputs that it had in training.

    Attributes:
        layer: Fully qualified name.
        layouts: Of its weights.
        activation: The engine's rule for its inputs, or "none".
        bits: Largest difference, in units in the last place of the output's dtype.
        value: Largest difference.
        share: Share of the outputs that differ.
    """

    layer: str
    layouts: str
    activation: str
    bits: int
    value: float
    share: float


@dataclass(frozen=True)
class Mismatch:
    """What ``mismatch`` found.

    Attributes:
        layers: Each converted module.
        value: Largest difference of the model's outputs, which all layers' add up to.
        kl: Mean of KL(training || engine) over positions, in nats, outputs taken as logits.
        k3: Mean of ``r - 1 - log r`` over sampled tokens, which estimates KL(engine || training).
        ratio: Smallest and largest ``r``, the probability in training over that in the engine, of
            tokens that the engine samples.
        effective: Share of the samples that importance weights ``r`` leave: ``sum(r)^2 / (n sum(r^2))``.
    """

    layers: tuple[LayerMismatch, ...]
    value: float
    kl: float
    k3: float
    ratio: tuple[float, float]
    effective: float

    @property
    def is_zero(self) -> bool:
        """Whether the engine computes the same bits."""
        return self.value == 0 and all(layer.bits == 0 for layer in self.layers)

    def __rich__(self) -> Table:
        """Render as a table."""
        from rich import box
        from rich.table import Table

        table = Table(
            "layer", "layout", "inputs", "bits", "value", "share", box=box.SIMPLE_HEAD,
            title="Engine against training",
            caption=f"outputs {self.value:.3g}, KL {self.kl:.3g}, k3 {self.k3:.3g}, "
            f"ratios {self.ratio[0]:.4f} to {self.ratio[1]:.4f}, effective samples {self.effective:.1%}",
        )  # fmt: skip
        for one in self.layers:
            table.add_row(
                one.layer,
                one.layouts,
                one.activation,
                str(one.bits),
                f"{one.value:.3g}",
                f"{one.share:.1%}",
            )
        return table


class _Weight(NamedTuple):
    """A weight of the engine.

    Attributes:
        matrices: One, or one for each expert.
        is_stack: Whether it is of experts.
        inputs: How its inputs are quantized, or None.
    """

    matrices: list[Decoded]
    is_stack: bool
    inputs: OneFormatQuantizer | None

    def linear(self, x: Tensor, bias: Tensor | None, expert: int = 0) -> Tensor:
        """Return the product of tokens of any shape with one matrix."""
        flat = x.reshape(-1, x.shape[-1])
        given = Decoded(flat.float()) if self.inputs is None else decoded_input(flat, self.inputs)
        out = product(given, self.matrices[expert], bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])


class _Engine(TorchFunctionMode):
    """Computes products with the weights of a model by the engine's.

    Args:
        weights: By the address of the parameters in whose place they are.
    """

    def __init__(self, weights: dict[int, _Weight]) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [self._weights.get(_address(arg)) for arg in args if isinstance(arg, Tensor)]
        weight = next((one for one in found if one is not None), None)
        if weight is None or func not in _PRODUCTS:
            return func(*args, **kwargs)
        return _PRODUCTS[func](weight, *args, **kwargs)


def _linear(weight: _Weight, x: Tensor, at: Tensor, bias: Tensor | None = None) -> Tensor:
    expert = at.storage_offset() // at.numel() if weight.is_stack else 0
    return weight.linear(x, bias, expert)


def _grouped(
    weight: _Weight, x: Tensor, at: Tensor, offs: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the products of tokens sorted by expert; rows of none are zeros."""
    out = x.new_zeros(*x.shape[:-1], weight.matrices[0].elements.shape[0])
    if offs is None:
        for e in range(len(weight.matrices)):
            out[e] = weight.linear(x[e], None, e)
        return out
    begin = 0
    for e, end in enumerate(offs.tolist()):
        if end > begin:
            out[begin:end] = weight.linear(x[begin:end], None, e)
        begin = end
    return out


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch._grouped_mm: _grouped,
    torch.bmm: lambda weight, x, at: _grouped(weight, x, at),
}
if hasattr(F, "grouped_mm"):
    _PRODUCTS[F.grouped_mm] = _grouped


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else 0


@torch.no_grad()
def mismatch(
    model: nn.Module,
    batch: Any,
    layout: str = AUTO,
    activation: str | None = None,
    *,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    seed: int = 0,
) -> Mismatch:
    """Run the forward that is trained, and the one of an engine that has the exported tensors.

    The engine's is built on these tensors, what torch and compressed-tensors decode of them, and
    torch's products; high-precision weights of converted layers are not there. Each converted module
    is compared given its input in training, the whole model by its outputs. Where an engine has the
    recipe's rule for inputs, both have the same bits on a CPU, but for NVFP4: its three scales are
    multiplied in another order.

    Args:
        model: A model after ``quantize_``, not sharded. It is run in evaluation mode.
        batch: What it is called with: a tensor, a tuple of arguments, or a dictionary of them.
        layout: See ``inference_tensors``.
        activation: How the engine quantizes inputs: in E4M3 per ``"tensor"``, per ``"token"`` or per
            ``"1x128"``, as MXFP8 ``"1x32"``, as NVFP4 ``"1x16"``; None is as the recipe, where that is
            one of these.
        tensors: What the engine has, if not what is exported now: as ``inference_tensors(model,
            layout, experts="stacked")`` names it.
        seed: Of the tokens that are sampled for ratios.

    Raises:
        ImportError: If compressed-tensors is not installed, and needed for NVFP4.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a weight has no layout, a tensor is missing, the recipe's rule for inputs is no
            engine's, or outputs are no logits.
        NotImplementedError: If the model is sharded.
    """
    require_module(_WHO, model)
    require_layout(_WHO, layout)
    require_int(_WHO, at_least=0, seed=seed)
    if activation is not None:
        require_choice(_WHO, "activation", activation, RULES)
    if is_sharded(model):
        raise NotImplementedError(
            f"{_WHO}: a model that is not sharded is required, got one with DTensors; load what was "
            "exported in one process, and compare there"
        )
    found = [one for one in exported(_WHO, model, layout) if one.layout is not None]
    sent = inference_tensors(model, layout, experts="stacked") if tensors is None else tensors
    known = _by_name(sent)
    with _evaluating(model):
        ran, trained = _recorded(model, batch, found)
        engine = plain_(copy.deepcopy(model))
        weights = {one.name: _weight(one, known, activation) for one in found}
        mode = _Engine(_put(engine, weights))
        layers = [
            _compared(engine.get_submodule(name), mode, calls, some, weights)
            for name, calls, some in ran
        ]
        with mode:
            got = _called(engine, batch)
    return Mismatch(tuple(layers), *_of_logits(_logits(trained), _logits(got), seed))


def _by_name(tensors: object) -> dict[str, Tensor]:
    """Return pairs of names and tensors as a dictionary."""
    required = "pairs of names and tensors"
    pairs = require_items(_WHO, required, tensors, "pass what inference_tensors gives")
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise wrong(_WHO, required, pair, "pass what inference_tensors gives")
    return dict(pairs)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode."""
    was = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was.items():
            module.training = training


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


_Calls = list[tuple[tuple[Any, ...], dict[str, Any], Any]]


def _recorded(
    model: nn.Module, batch: Any, found: list[Exported]
) -> tuple[list[tuple[str, _Calls, list[Exported]]], Any]:
    """Return the calls of every module that has converted weights, with these, and the outputs."""
    names = {id(module): name for name, module in model.named_modules()}
    of: dict[str, list[Exported]] = {}
    for one in found:
        if one.layer is not None:
            of.setdefault(names[id(one.layer.module)], []).append(one)
    calls: dict[str, _Calls] = {name: [] for name in of}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, kwargs, output, name=name: calls[name].append(
                (args, kwargs, output)
            ),
            with_kwargs=True,
        )
        for name in of
    ]
    try:
        outputs = _called(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [(name, calls[name], some) for name, some in of.items()], outputs


def _weight(one: Exported, known: dict[str, Tensor], activation: str | None) -> _Weight:
    """Return a weight as the engine has it."""
    config = one.part.recipe
    name = activation
    if activation is None and one.layout is not None and not one.layout.stored_as:
        name = "1x128"  # whatever the recipe: its configuration says so
    elif activation is None:
        fmt = config.input.rowwise_format
        if fmt not in _OF_FORMAT:
            raise ValueError(
                f"{_WHO}: {one.name}: inputs that an engine quantizes alike are required, got {fmt}; name the "
                f"engine's rule: activation= one of {', '.join(RULES)}"
            )
        name = _OF_FORMAT[fmt]
    pow2 = one.layout is not None and "scale_fmt" in one.layout.settings
    inputs = None if name is None else rule(name, pow2)
    if one.value.dim() == 3:
        stack = _packed(one.name, one.name, known)
        count = one.value.shape[0]
        matrices = [decoded_weight({k: part[e] for k, part in stack.items()}) for e in range(count)]
        return _Weight(matrices, True, inputs)
    return _Weight(
        [decoded_weight(_packed(one.name, one.name.removesuffix("weight"), known))], False, inputs
    )


def _packed(name: str, prefix: str, known: dict[str, Tensor]) -> Packed:
    """Return the tensors of a weight, by what their names end in."""
    if prefix.endswith((".", "")) and prefix != name:
        found = {suffix: known[prefix + suffix] for suffix in SUFFIXES if prefix + suffix in known}
    else:
        endings = {
            "_scale_inv": "weight_scale_inv",
            "_scale": "weight_scale",
            "_global_scale": "weight_global_scale",
        }
        found = {
            suffix: known[name + end] for end, suffix in endings.items() if name + end in known
        }
        if name in known:
            found["weight_packed" if "weight_global_scale" in found else "weight"] = known[name]
    if not any(key in found for key in ("weight", "weight_packed")) or len(found) < 2:
        raise ValueError(
            f"{_WHO}: elements and scales of {name} are required among the tensors, got {list(found)}"
        )
    return found


def _put(engine: nn.Module, weights: dict[str, _Weight]) -> dict[int, _Weight]:
    """Take the values of converted weights away, and return those of the engine by address."""
    placed = {}
    parameters = dict(named_parameters(engine))
    for name, weight in weights.items():
        parameters[name].fill_(float("nan"))  # whatever reads them shows
        placed[_address(parameters[name])] = weight
    return placed


def _compared(
    module: nn.Module,
    mode: _Engine,
    calls: _Calls,
    some: list[Exported],
    weights: dict[str, _Weight],
) -> LayerMismatch:
    """Return how a module's outputs differ, given the inputs that it had."""
    bits, value, differing, total = 0, 0.0, 0, 0
    for args, kwargs, expected in calls:
        with mode:
            got = module(*args, **kwargs)
        for mine, theirs in zip(_tensors(got), _tensors(expected), strict=True):
            apart = _ulps(mine, theirs)
            bits = max(bits, int(apart.max()) if apart.numel() else 0)
            difference = (mine.double() - theirs.double()).abs()
            value = max(value, float(difference.max()) if difference.numel() else 0.0)
            differing, total = differing + int((apart != 0).sum()), total + apart.numel()
    layouts = "/".join(dict.fromkeys(one.layout.name for one in some if one.layout is not None))
    rules = dict.fromkeys(_told(weights[one.name].inputs) for one in some)
    name = next(
        one.layer.name if not one.layer.is_stack else one.name.rpartition(".")[0]
        for one in some
        if one.layer
    )
    return LayerMismatch(name, layouts, "/".join(rules), bits, value, differing / max(total, 1))


def _told(inputs: OneFormatQuantizer | None) -> str:
    return "none" if inputs is None else str(inputs.format)


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return (
        [one for one in output if isinstance(one, Tensor)]
        if isinstance(output, (tuple, list))
        else []
    )


def _ulps(one: Tensor, other: Tensor) -> Tensor:
    """Return how many numbers of their dtype lie between two, int64."""
    whole = {2: torch.int16, 4: torch.int32}[one.itemsize]
    lowest = torch.iinfo(whole).min
    places = []
    for tensor in (one, other):
        bits = tensor.contiguous().view(whole).long()
        places.append(torch.where(bits < 0, lowest - bits, bits))
    return (places[0] - places[1]).abs()


def _logits(output: Any) -> Tensor:
    """Return the logits of a model's output."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() < 1:
        raise ValueError(
            f"{_WHO}: a tensor of logits is required as the model's output, got {type(output).__name__}"
        )
    return logits


def _of_logits(
    trained: Tensor, engine: Tensor, seed: int
) -> tuple[float, float, float, tuple[float, float], float]:
    """Return the last fields of ``Mismatch``."""
    for whose, logits in (("training", trained), ("the engine", engine)):
        if not bool(logits.isfinite().all()):
            raise ValueError(
                f"{_WHO}: finite outputs are required, got NaN or Inf of {whose}; the engine has NaN where something "
                "reads a converted weight's values, which check(model, *batch) names"
            )
    value = float((trained.double() - engine.double()).abs().max())
    p, q = (x.double().flatten(0, -2).log_softmax(-1).cpu() for x in (trained, engine))
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    drawn = torch.multinomial(q.exp(), 1, generator=torch.Generator().manual_seed(seed))
    log_ratio = (p - q).gather(-1, drawn).flatten()
    r = log_ratio.exp()
    k3 = float((r - 1 - log_ratio).mean())
    effective = float(r.sum() ** 2 / (r.numel() * r.square().sum()))
    return value, kl, k3, (float(r.min()), float(r.max())), effective
