"""A conversion that fails, in whatever way, leaves the model as it was.

Oracle: attributes of all modules, states and weights, with what is in their dictionaries, and the bytes of tensors.
"""

import contextlib
import itertools
import weakref
from collections import OrderedDict

import pytest
import tiers
import torch
from checkpointing import bits
from torch import nn

import hybridtensor as ht
from hybridtensor import convert, layers
from hybridtensor.layers import layers_of
from hybridtensor.subclasses import is_converted
from hybridtensor.testing import random_tensor

STARTS = {
    "plain": None, "master": {"recipe": "fp8"}, "delayed": {"recipe": "fp8_delayed"},
    "persistent": {"recipe": "fp8_delayed", "persistent": True},
    "common": {"recipe": "fp8", "common_scale": [("0", "1")]},
    "persistent common": {"recipe": "fp8", "common_scale": [("0", "1")], "persistent": True},
}  # fmt: skip


class Refusing(nn.Linear):
    """A layer that refuses one thing."""

    refused: str | None = None

    def __setattr__(self, name, value):
        if name == self.refused:
            raise AttributeError(f"no {name}")
        super().__setattr__(name, value)

    def register_state_dict_post_hook(self, hook):
        if self.refused == "hooks":
            raise RuntimeError("no hooks")
        return super().register_state_dict_post_hook(hook)


class Net(nn.Sequential):
    """Layers that share an input, which ``quantize_`` notes in hooks of their caller."""

    def __init__(self, last=32):
        super().__init__(nn.Linear(32, 32), nn.Linear(32, 32), Refusing(32, last))
        self.register_forward_pre_hook(lambda module, args: None)


def net(start, **options):
    torch.manual_seed(0)
    model = Net(**options)
    if STARTS[start] is not None:
        ht.quantize_(model, **STARTS[start])
    if start != "plain":
        model(random_tensor(32, 32, dtype=torch.float32)).square().sum().backward()
        model.zero_grad()
        ht.step_(model)
    return model


def everything(model):
    """Return what a conversion could change, in a form that compares by identity and by bytes."""
    parts = [p for p in model.parameters() if is_converted(p)]
    states = [layer.recipe.state for layer in layers_of(model) if layer.recipe is not None]
    scales = [state.common for state in states if state.common is not None]
    found = {}
    for i, holder in enumerate([*model.modules(), *states, *scales, *parts]):
        for name, value in vars(holder).items():
            inner = list(value.items()) if type(value) in (dict, OrderedDict) else value
            found[i, name] = id(value), sorted(inner) if type(value) is set else inner
    values = [p.high_precision for p in parts if isinstance(p, ht.HybridTensor)]
    slots = [(v.original, v.follows, v.loaded) for v in values]
    amaxes = [scale.amax.tolist() for scale in scales if scale.amax is not None]
    lineages = [state.lineage for state in states]
    kinds = [(name, type(p), id(p), p.grad) for name, p in model.named_parameters()]
    return kinds, list(model.state_dict()), bits(model), found, slots, amaxes, lineages


def same(model, before):
    for ours, theirs in zip(everything(model), before, strict=True):
        assert flat(ours) == flat(theirs)


def flat(value):
    """Have tensors compared by identity; ``bits`` has what they hold."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, dict):
        return {key: flat(one) for key, one in value.items()}
    return [flat(one) for one in value] if isinstance(value, (list, tuple)) else value


def live_graph(model):
    return model[2](torch.ones(16, 32, requires_grad=True))


def refuse(what):
    return lambda model: vars(model[2]).update(refused=what)


def double(model):
    model[2].weight = nn.Parameter(torch.ones(32, 32, dtype=torch.float64))


WAYS = {
    "a graph": (live_graph, {}, RuntimeError, "2: the weight is referenced by a live graph"),
    "a weak reference": (lambda m: weakref.ref(m[2].weight), {}, RuntimeError, "2: the weight is referenced"),
    "no forward": (refuse("forward"), {}, AttributeError, "no forward"),
    "no state": (refuse("quantization_state"), {}, AttributeError, "no quantization_state"),
    "no hooks": (refuse("hooks"), {}, RuntimeError, "no hooks"),
    "another dtype": (double, {}, TypeError, "layer 2: its weight is in torch.float64"),
    "a buffer of that name": (
        lambda m: m[2].register_buffer("quantization_state", torch.ones(1)), {}, ValueError,
        "layer 2: its attribute quantization_state is a Tensor, where the state of quantizers belongs",
    ),
    "a size": (lambda _: None, {"last": 24}, ValueError, "2"),
}  # fmt: skip


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_last_layer_that_cannot_be_converted(way, persistent):
    spoil, options, kind, told = WAYS[way]
    model = net("plain", **options)
    held = spoil(model)
    before = everything(model)
    with pytest.raises(kind, match=told):
        ht.quantize_(model, "mxfp8" if way == "a size" else "fp8_delayed", persistent=persistent)
    same(model, before)
    del held


def test_a_factory_that_refuses_the_last_layer():
    def factory(role):
        if role.name == "2":
            raise KeyError("no recipe")
        return ht.Float8Quantizer()

    model = net("plain")
    before = everything(model)
    with pytest.raises(RuntimeError, match=r"raised for .*name='2'.*no recipe"):
        ht.quantize_(model, factory)
    same(model, before)


STEPS = (
    "swap", "keep_recipe_", "give_plain_values_", "apply_in_place_", "share_between_layers_of",
    "persistent_weight", "refresh_all_", "measure_common_scales", "quantize_weight", "mark_left_alone",
)  # fmt: skip


def fail_at(patch, number):
    """Have the ``number``-th step of a conversion raise: a swap, which fails whole, before; others once they ran."""
    seen = []

    def failing(name, original):
        def run(*args, **kwargs):
            seen.append(name)
            fails = len(seen) == number
            result = None if fails and name == "swap" else original(*args, **kwargs)
            if fails:
                raise MemoryError(name)
            return result

        return run

    for name in STEPS:
        patch.setattr(convert, name, failing(name, getattr(convert, name)))
    for name in ("set_recipe", "set_stack_recipe"):
        patch.setattr(layers, name, failing(name, getattr(layers, name)))
    require = ht.state.LayerState.require
    patch.setattr(ht.state.LayerState, "require", failing("require", require))
    return seen


def changes(start):
    """Yield ways to convert a model again."""
    persistent = "persistent" in start
    yield lambda model: ht.quantize_(model, "nvfp4", persistent=persistent)
    yield lambda model: ht.quantize_(model, "fp8", persistent=True, common_scale=[("1", "2")])
    yield lambda model: ht.quantize_(model, "nvfp4", persistent=persistent, filter_fn=lambda _, name: name == "1")
    if start != "plain":
        yield lambda model: ht.set_config_(model, "nvfp4")


@pytest.mark.parametrize("start", STARTS)
def test_a_step_that_fails_wherever_it_is(start, monkeypatch):
    for change in changes(start):
        for number in itertools.count(1, 1 if tiers.LONG else 2):
            model = net(start)
            before = everything(model)
            with monkeypatch.context() as patch:
                fail_at(patch, number)
                with contextlib.suppress(MemoryError):
                    change(model)
                    break
            same(model, before)
        assert number > 4
