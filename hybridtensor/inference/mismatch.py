"""``mismatch``: the difference between an inference engine's forward and the trained one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridtensor.arguments import (
    require_choice,
    require_flag,
    require_int,
    require_items,
    require_module,
    wrong,
)
from hybridtensor.check import restored
from hybridtensor.inference.engine_mode import (
    RULES,
    Engine,
    EngineWeight,
    engine_weight,
    put_weights,
)
from hybridtensor.inference.layouts import AUTO, require_layout
from hybridtensor.inference.tensors import Wanted, tensors_for
from hybridtensor.inference.weights import Exported, exported, named
from hybridtensor.layers import evaluating
from hybridtensor.plain import plain_
from hybridtensor.printed import Printed, add_row, named_table
from hybridtensor.ranks import TIMEOUT, is_sharded

if TYPE_CHECKING:
    from rich.table import Table

_WHO = "mismatch"


@dataclass(frozen=True)
class LayerMismatch:
    """Outputs of one module, given the inputs that it had in training.

    Attributes:
        layer: Fully qualified name.
        layouts: Of its weights.
        activation: The engine's rule for its inputs, "static" where their scales are stored, or "none".
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


@dataclass(frozen=True, repr=False)
class Mismatch(Printed):
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
        table = named_table(
            "layer", "layout", "inputs", "bits", "value", "share",
            title="Engine against training",
            caption=f"outputs {self.value:.3g}, KL {self.kl:.3g}, k3 {self.k3:.3g}, "
            f"ratios {self.ratio[0]:.4f} to {self.ratio[1]:.4f}, effective samples {self.effective:.1%}",
        )  # fmt: skip
        for one in self.layers:
            add_row(
                table,
                one.layer,
                one.layouts,
                one.activation,
                str(one.bits),
                f"{one.value:.3g}",
                f"{one.share:.1%}",
            )
        return table


@torch.no_grad()
def mismatch(
    model: nn.Module,
    batch: object,
    layout: str = AUTO,
    activation: str | None = None,
    *,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    static_inputs: bool = False,
    seed: int = 0,
) -> Mismatch:
    """Compare the trained forward with that of an emulated engine, which has only the exported tensors.

    ::

        print(ht.mismatch(model, batch))

    torch and compressed-tensors decode these tensors, and products are torch's; the engine has no high-precision
    weights of converted layers. Each converted module is compared with the input that it gets in training, the whole
    model by its outputs. If the engine quantizes inputs as the recipe does, both have the same bits on a CPU, except
    for NVFP4, whose three scales are multiplied in another order.

    Args:
        model: A model after ``quantize_``, not sharded; run in evaluation mode, and as it was afterwards.
        batch: Arguments of the model: a tensor, a tuple, or a dictionary of keyword arguments.
        layout: See ``inference_tensors``.
        activation: How the engine quantizes inputs: in E4M3 per ``"tensor"``, per ``"token"`` or per ``"1x128"``, as
            MXFP8 ``"1x32"``, as NVFP4 ``"1x16"``. None is the recipe's rule, if it is one of these.
        tensors: Tensors of the engine, named as by ``inference_tensors(model, layout, experts="stacked")``; by default
            those that are exported now. Static scales of inputs among them are used, and so are norms, biases and all
            else in high precision; what is not among them is the model's.
        static_inputs: Whether the engine uses the delayed scales of inputs, as after an export with
            ``static_inputs=True``; otherwise it measures inputs.
        seed: Seed for sampling the tokens whose probability ratios are computed.

    Raises:
        ImportError: If compressed-tensors is not installed, and needed for NVFP4.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a weight has no layout, a tensor is missing, no engine quantizes inputs as the recipe does,
            there are no static scales to export, or outputs are not logits.
        NotImplementedError: If the model is sharded.
    """
    require_int(_WHO, at_least=0, seed=seed)
    _check(model, layout, activation, tensors is not None, static_inputs)
    found = [one for one in exported(_WHO, model, layout) if one.layout is not None]
    wanted = Wanted(layout, "stacked", static_inputs=static_inputs)
    known = _by_name(tensors_for(_WHO, model, TIMEOUT, wanted) if tensors is None else tensors)
    with evaluating(model), restored(model, batch):
        with restored(model, batch):  # the engine begins with the same buffers and random numbers
            ran, trained = _recorded(model, batch, found)
        engine = _plain_copy(model)
        if tensors is not None:
            _put_plain(engine, known, {one.name for one in found})
        weights = {one.name: engine_weight(_WHO, one, known, activation) for one in found}
        # With NaN as converted weights: what the engine's mode does not multiply shows.
        mode = put_weights(engine, weights)
        modules = [(engine.get_submodule(name), calls, some) for name, calls, some in ran]
        layers = [_compared(module, mode, calls, some, weights) for module, calls, some in modules]
        with mode:
            got = _called(engine, batch)
    return Mismatch(tuple(layers), *_of_logits(_logits(trained), _logits(got), seed))


def _plain_copy(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        # A copy has no masters, which ``plain_`` warns of; an engine gets other weights anyway.
        warnings.filterwarnings("ignore", "plain_: ")
        return plain_(copy.deepcopy(model))


def _put_plain(engine: nn.Module, known: Mapping[str, Tensor], converted: set[str]) -> None:
    """Write an engine's tensors into the parameters and buffers that no recipe quantizes, such as norms and biases."""
    for name, value in named(engine):
        if name in converted or name not in known:
            continue
        if known[name].shape != value.shape:
            raise ValueError(
                f"{_WHO}: {name} of {list(value.shape)} is required among the tensors, got {list(known[name].shape)}; "
                "pass what inference_tensors gives"
            )
        value.detach().copy_(known[name])


def _check(
    model: nn.Module, layout: str, activation: str | None, has_tensors: bool, static_inputs: bool
) -> None:
    require_module(_WHO, model)
    require_layout(_WHO, layout)
    require_flag(_WHO, static_inputs=static_inputs)
    if static_inputs and (has_tensors or activation not in (None, "tensor")):
        raise ValueError(
            f"{_WHO}: static_inputs without tensors and without another rule than activation='tensor' is required, got "
            "both; tensors that inference_tensors(..., static_inputs=True) gives have the scales"
        )
    if activation is not None:
        require_choice(_WHO, "activation", activation, RULES)
    if is_sharded(model):
        raise NotImplementedError(
            f"{_WHO}: the model is sharded over ranks; load what was exported in one process, and compare there"
        )


def _by_name(tensors: object) -> dict[str, Tensor]:
    required = "pairs of names and tensors"
    pairs = require_items(_WHO, required, tensors, "pass what inference_tensors gives")
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise wrong(_WHO, required, pair, "pass what inference_tensors gives")
    return dict(pairs)


def _called(model: nn.Module, batch: object) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


_Calls = list[tuple[tuple[object, ...], dict[str, object], object]]


def _recorded(
    model: nn.Module, batch: object, found: list[Exported]
) -> tuple[list[tuple[str, _Calls, list[Exported]]], object]:
    """Return the calls of every module that has converted weights, with these, and the outputs."""
    names = {id(module): name for name, module in model.named_modules()}
    of: dict[str, list[Exported]] = {}
    for one in found:
        if one.layer is not None:
            of.setdefault(names[id(one.layer.module)], []).append(one)
    calls: dict[str, _Calls] = {name: [] for name in of}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            # Copies: what follows may write in place, as activations do.
            lambda module, *call, name=name: calls[name].append(
                tree_map_only(Tensor, torch.clone, call)
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


def _compared(
    module: nn.Module,
    mode: Engine,
    calls: _Calls,
    some: list[Exported],
    weights: dict[str, EngineWeight],
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
    rules = dict.fromkeys(weights[one.name].input_format for one in some)
    name = next(
        one.layer.name if not one.layer.is_stack else one.name.rpartition(".")[0]
        for one in some
        if one.layer
    )
    return LayerMismatch(name, layouts, "/".join(rules), bits, value, differing / max(total, 1))


def _tensors(output: object) -> list[Tensor]:
    """Return the floating-point tensors of a module's output, which may have others, such as the experts chosen."""
    some = output if isinstance(output, (tuple, list)) else (output,)
    return [one for one in some if isinstance(one, Tensor) and one.is_floating_point()]


def _ulps(one: Tensor, other: Tensor) -> Tensor:
    """Return how many numbers of their dtype lie between two, int64."""
    whole = {2: torch.int16, 4: torch.int32}[one.itemsize]
    lowest = torch.iinfo(whole).min
    places = []
    for tensor in (one, other):
        # As integers the bits of negative numbers fall towards zero: they are mirrored, so that -0 is 0, and its
        # neighbour -1.
        bits = tensor.contiguous().view(whole).long()
        places.append(torch.where(bits < 0, lowest - bits, bits))
    return (places[0] - places[1]).abs()


def _logits(output: object) -> Tensor:
    logits = getattr(output, "logits", output)
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() < 1:
        raise ValueError(
            f"{_WHO}: a tensor of logits is required as the model's output, got {type(output).__name__}"
        )
    if not logits.numel():
        raise ValueError(
            f"{_WHO}: logits of one position at least are required, got {list(logits.shape)}; pass another batch"
        )
    return logits


def _of_logits(
    trained: Tensor, engine: Tensor, seed: int
) -> tuple[float, float, float, tuple[float, float], float]:
    for whose, logits in (("training", trained), ("the engine", engine)):
        if not bool(logits.isfinite().all()):
            raise ValueError(
                f"{_WHO}: finite outputs are required, got NaN or Inf of {whose}; the engine has NaN where something "
                "reads a converted weight's values, which check(model, *batch) names"
            )
    value = float((trained.double() - engine.double()).abs().max())
    p, q = (x.double().reshape(-1, x.shape[-1]).log_softmax(-1).cpu() for x in (trained, engine))
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    drawn = torch.multinomial(q.exp(), 1, generator=torch.Generator().manual_seed(seed))
    log_ratio = (p - q).gather(-1, drawn).flatten()
    r = log_ratio.exp()
    # Unbiased as the mean of -log r is, but mostly of less variance, and never negative: J.
    # Schulman, "Approximating KL divergence".
    k3 = float((r - 1 - log_ratio).mean())
    effective = float(r.sum() ** 2 / (r.numel() * r.square().sum()))
    return value, kl, k3, (float(r.min()), float(r.max())), effective
