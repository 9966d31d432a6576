"""Run a model once and report each layer's three products, and which other operators read its weight."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions
from torch.utils._pytree import tree_leaves

from hybridtensor.arguments import own_loss, require_flag, require_loss, require_module, wrong
from hybridtensor.dtensor import local
from hybridtensor.explanation.checked import Check, ProductRow, ReadRow
from hybridtensor.formats import Format
from hybridtensor.layers import layers_of, weights_of_absent_layers
from hybridtensor.ops import Face
from hybridtensor.ops.scaled_mm import select_backend
from hybridtensor.recipes.spec import GEMMS
from hybridtensor.selection import coverage, is_left_alone
from hybridtensor.state import LayerState
from hybridtensor.state.recording import without_recording
from hybridtensor.state.training import layer_states
from hybridtensor.subclasses.observing import NO_VALUES, Observer, observers
from hybridtensor.subclasses.owners import LayerRecipe

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


class _Recorder(Observer):
    """Observer of one run of a model.

    Attributes:
        products: How often a product ran, by layer, product, left and right format.
        reads: How often weights were read, by layer, operator and module.
        operations: Floating-point operations of quantized products.
        inside: Names of the modules whose forwards run, the outermost first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.products: Counter[tuple[int, str, Format, Format, str]] = Counter()
        self.reads: Counter[tuple[int, str, str]] = Counter()
        self.operations = 0
        self.inside: list[str] = []
        self._names = {id(module): name for name, module in model.named_modules()}

    def observe_product(
        self, layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype
    ) -> None:
        a, b = left.held_format, right.held_format
        backend = select_backend(a, b, dtype, left.qdata.device)
        self.products[id(layer), gemm, a, b, backend.name] += 1
        if not (a.is_identity and b.is_identity):
            rows, columns = left.qdata.shape[0], right.qdata.shape[-2]
            extent = left.qdata.shape[1] * left.format.elements_per_byte
            self.operations += 2 * rows * columns * extent

    def observe_read(self, layer: object, reader: str) -> None:
        if not any(name in reader for name in NO_VALUES):
            self.reads[id(layer), reader, self.inside[-1] if self.inside else ""] += 1

    def enter(self, module: nn.Module, args: object) -> None:
        self.inside.append(self._names.get(id(module), type(module).__name__))

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        if self.inside:
            self.inside.pop()


def check(
    model: nn.Module,
    *args: object,
    loss: Callable[[Any], Tensor] | None = None,
    strict: bool = False,
    show: bool = False,
    **kwargs: object,
) -> Check:
    """Run one forward and backward, and report for each layer the formats of its products, the operators that read
    its weight in high precision, and whether it ran.

    ::

        print(ht.check(model, batch, loss=lambda output: output.square().mean()))

    Afterwards gradients, buffers, attributes of modules with buffers, state of quantizers and random generators are
    restored. Hooks on accumulated gradients, such as those of optimizers that step in backward, do not run. Compiled
    parts run eagerly. Under FSDP2 all ranks must call it.

    Args:
        model: A model, converted or not, compiled, sharded or not.
        args: Passed to ``model``.
        loss: Function from the model's output to a scalar; by default the output's attribute or entry ``loss``, or,
            if that is no scalar with a gradient, the mean square of all its floating-point tensors.
        strict: Raise if the result has ``problems``: products that did not run, or not by the recipe; weights read as
            values; layers that are plain although nothing excluded them.
        show: Print tables (needs ``rich``).
        kwargs: Passed to ``model``.

    Returns:
        What ran.

    Raises:
        TypeError: If an argument is of the wrong kind.
        RuntimeError: If ``strict`` and something is not quantized.
    """
    _check_arguments(model, loss, strict, show)
    plain = getattr(model, "_orig_mod", model)  # of torch.compile
    recorder, uncounted = _Recorder(plain), set[str]()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # torch's own, of the counter's hooks
        warnings.filterwarnings("ignore", "Using `torch.compile.* when there are global hooks")
        stack.enter_context(restored(plain, (args, kwargs)))
        stack.enter_context(_observed(plain, recorder))
        counter = stack.enter_context(_flop_counter(uncounted))
        out = model(*args, **kwargs)
        value = _loss(out, loss)
        if value is not None and value.requires_grad:
            value.backward()
    found = _report(plain, recorder, counter.get_total_flops(), uncounted)
    if show:
        from rich.console import Console

        Console().print(found)
    if strict and found.problems:
        raise RuntimeError("check: not everything is quantized:\n  " + "\n  ".join(found.problems))
    return found


def _check_arguments(model: object, loss: object, strict: object, show: object) -> None:
    require_module("check", model)
    if loss is not None and (not callable(loss) or isinstance(loss, type)):
        raise wrong("check", "a function as loss", loss)
    require_flag("check", strict=strict, show=show)


def _flop_counter(uncounted: set[str]) -> FlopCounterMode:
    """Return torch's FLOP counter; operators whose formulas raise are added to ``uncounted`` and count as 0."""
    from torch.utils.flop_counter import FlopCounterMode  # when first used: it takes long to import

    counter = FlopCounterMode(display=False)
    counter.flop_registry = {
        operator: _noting_errors(formula, str(operator), uncounted)
        for operator, formula in counter.flop_registry.items()
    }
    return counter


def _noting_errors(
    formula: Callable[..., object], name: str, uncounted: set[str]
) -> Callable[..., object]:
    def count(*args: object, **kwargs: object) -> object:
        try:
            return formula(*args, **kwargs)
        except Exception:  # anyone may have written it, and what runs is none of its business
            uncounted.add(name)
            return 0

    return count


@contextlib.contextmanager
def _observed(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Run everything eagerly, with gradients and with ``recorder`` as the observer."""
    hooks = []
    for module in model.modules():
        # First before a forward, and in any case after it: entries and exits come in pairs,
        # whatever other hooks raise or return.
        hooks.append(module.register_forward_pre_hook(recorder.enter, prepend=True))
        hooks.append(module.register_forward_hook(recorder.leave, always_call=True))
    observers.append(recorder)
    try:
        stance = torch.compiler.set_stance("force_eager")
        with stance, torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        observers.remove(recorder)
        for hook in hooks:
            hook.remove()


def _loss(out: object, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """Return the scalar to differentiate, or None if nothing can be."""
    if loss is not None:
        return require_loss("check", loss(out), "return one, such as a mean")
    own = own_loss(out)
    if isinstance(own, Tensor) and own.numel() == 1 and own.requires_grad:
        return own
    tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    means = [t.float().square().mean() for t in tensors]
    return torch.stack(means).sum() if means else None


@contextlib.contextmanager
def restored(model: nn.Module, given: object) -> Iterator[None]:
    """Restore gradients, buffers and attributes beside them, amaxes and torch's generators after a forward and
    backward."""
    leaves = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    owners = [*model.parameters(), *(t for t in leaves if t.is_leaf and t.requires_grad)]
    grads = [(owner, owner.grad) for owner in owners]
    # The private table, whose entries go: the attribute itself only adds to what autograd knows.
    tables = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    hooks = [dict(table) for table in tables]
    buffers = [(b, b.clone()) for b in map(_written, model.buffers())]
    states = [(s, s.recorded, s.unrecorded) for s in layer_states(model)]
    # What a forward assigns: buffers, and the numbers by which it knows what they hold. Modules without buffers note
    # what happens once, as DistributedDataParallel does of its first forward, and lazy layers of their features.
    modules = [m for m in model.modules() if m._buffers and not isinstance(m, LayerState)]
    assigned = [(table, dict(table)) for m in modules for table in (vars(m), m._buffers)]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with (
        torch.random.fork_rng(sorted(d for d in devices if d is not None)),
        without_recording(model),
        # A backward may read them whose forward ran before
        preserve_versions(tuple(b for b, _ in buffers if not b.is_inference())),
    ):
        for owner, _ in grads:
            owner.grad = None
        for table in tables:
            table.clear()
        try:
            yield
        finally:
            for table, registered in zip(tables, hooks, strict=True):
                table.update(registered)
            for owner, grad in grads:
                owner.grad = grad
            for names, values in assigned:
                # An attribute that became a parameter or a module is one
                names.update({name: values[name] for name in names.keys() & values.keys()})
            with torch.no_grad():
                for buffer, before in buffers:
                    with torch.inference_mode(buffer.is_inference()):
                        buffer.copy_(before)
            for state, recorded, unrecorded in states:
                state.recorded, state.unrecorded = recorded, unrecorded


def _written(buffer: Tensor) -> Tensor:
    """Return a buffer's local tensor; of an expanded one a view with each element once.

    Torch writes in place only where no two elements have the same memory.
    """
    own = local(buffer)
    if own.layout == torch.strided:
        for dim, stride in enumerate(own.stride()):
            own = own.narrow(dim, 0, 1) if stride == 0 and own.shape[dim] > 1 else own
    return own


def _report(model: nn.Module, recorder: _Recorder, total: int, uncounted: set[str]) -> Check:
    layers: dict[int, list[str]] = {}
    configs, untouched, converted = {}, [], list[tuple[str, LayerRecipe]]()
    every = list(layers_of(model))
    for one in every:
        recipe = one.recipe
        if recipe is not None:
            converted.append((one.name or "<root>", recipe))
        elif one.why_skipped() is None and not is_left_alone(one):
            untouched.append(one.name or "<root>")
    converted += weights_of_absent_layers(model, every)
    for name, recipe in converted:
        layers.setdefault(id(recipe.state), []).append(name)
        configs[id(recipe.state)] = recipe.config
    products = []
    for key, names in layers.items():
        for gemm in GEMMS:
            expected = configs[key].formats(gemm)
            for (layer, ran, left, right, backend), times in recorder.products.items():
                if (layer, ran) == (key, gemm.name):
                    row = (", ".join(names), ran, str(left), str(right), backend, times)
                    products.append(ProductRow(*row, (left, right) == tuple(expected)))
    # A layer that was pruned or parametrized multiplies what is computed of its weight.
    computed = {
        id(one.recipe.state)
        for one in every
        if one.recipe is not None and one.parameter not in one.module._parameters
    }
    reads = tuple(
        ReadRow(", ".join(layers[layer]), reader, inside, times)
        for (layer, reader, inside), times in recorder.reads.items()
        if layer in layers and layer not in computed
    )
    ran_at_all = {layer for layer, *_ in recorder.products}
    unused = tuple(", ".join(names) for layer, names in layers.items() if layer not in ran_at_all)
    share = recorder.operations / total if total else 0.0
    return Check(
        tuple(products),
        reads,
        unused,
        coverage(model),
        min(share, 1.0),
        tuple(sorted(uncounted)),
        tuple(untouched),
    )
