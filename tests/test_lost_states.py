"""A state must not stand still in silence: a module takes over the weight of a converted layer, which is dropped, or a
model is copied."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hybridtensor as ht

WIDTH = 32


class Taking(nn.Module):
    """Has the weight of a layer, and not the layer."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Keeping(Taking):
    """Has the layer, too."""

    def __init__(self, layer):
        super().__init__(layer)
        self.layer = layer


class OfPart(Taking):
    """Has a parameter of its own with the same memory."""

    def __init__(self, layer):
        super().__init__(layer)
        self.weight = nn.Parameter(layer.weight.detach())


class Kind(nn.Linear):
    """Another class of linear layers."""

    def __init__(self, layer):
        super().__init__(WIDTH, WIDTH)
        self.weight, self.bias = layer.weight, layer.bias


def model_of(recipe, kind, replaced=1, persistent=False):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    ht.quantize_(model, recipe, persistent=persistent)
    for index in (2, 0)[:replaced]:
        model[index] = kind(model[index])
    return model


def train(model, steps, compiled=False, advance=True):
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-3)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(steps):
        run(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if advance:
            ht.step_(model)


LOST = r"step_: (0|2)\.weight is the weight of a converted layer \((0|2)\) that is not in the model.*keep the layer"


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("kind", [Taking, OfPart, Kind])
@pytest.mark.parametrize(
    ("replaced", "persistent", "compiled"), [(1, False, False), (2, True, False), (2, False, True)]
)
def test_a_state_that_nothing_advances_raises(recipe, kind, replaced, persistent, compiled, fresh_compiler):
    model = model_of(recipe, kind, replaced, persistent)
    with pytest.raises(RuntimeError, match=LOST):
        train(model, 3, compiled)


def test_it_raises_if_the_layer_lives_elsewhere():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    ht.quantize_(model, "fp8_delayed")
    train(model, 4)
    layer, model[2] = model[2], Taking(model[2])
    with pytest.raises(RuntimeError, match=LOST):
        train(model, 3)
    assert layer.quantization_state.steps == 4


def test_it_raises_without_step_too():
    """No layer with state is left in the model."""
    with pytest.raises(RuntimeError, match=LOST):
        train(model_of("fp8_delayed", Taking, replaced=2), 4, advance=False)


@pytest.mark.parametrize(("recipe", "kind"), [("fp8_delayed", Keeping), ("fp8", Taking), ("bf16", Kind)])
def test_a_state_in_the_model_or_none_is_fine(recipe, kind):
    train(model_of(recipe, kind, replaced=2), 5)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Taking, OfPart, Kind])
def test_another_recipe_is_refused_where_a_weight_would_keep_its_own(kind, persistent):
    model = model_of("fp8", kind, persistent=persistent)
    with pytest.raises(ValueError, match=r"set_config_: 2\.weight is the weight of a converted layer that is not in"):
        ht.set_config_(model, "bf16")
    ht.set_config_(model_of("fp8", Keeping, persistent=persistent), "bf16")


def test_a_weight_shared_with_another_model_goes_by_that_one():
    first, second = (ht.quantize_(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "fp8_delayed") for _ in range(2))
    second[0].weight = first[0].weight
    x = torch.randn(16, WIDTH)
    for _ in range(6):
        for model in (second, first):
            model(x).square().mean().backward()
        ht.step_(second)
        ht.step_(first)
    assert first[0].quantization_state.amax_history.ne(0).any()


def test_it_raises_where_a_module_comes_later():
    """No layer of the model comes or goes."""
    model = ht.quantize_(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "fp8_delayed")
    train(model, 4)
    model.append(Taking(ht.quantize_(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "fp8_delayed")[0]))
    with pytest.raises(RuntimeError, match=r"step_: 1\.weight is the weight of a converted layer \(0\) that is not in"):
        train(model, 3)


@pytest.mark.filterwarnings("ignore:MasterWeights. faces alone")  # each ``train`` makes an optimizer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize(("recipe", "persistent"), [("fp8_delayed", False), ("fp8_delayed", True), ("nvfp4", False)])
def test_a_copied_model_that_nothing_advances_raises(recipe, persistent, copied):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model = copied(ht.quantize_(model, recipe, persistent=persistent))
    train(model, 4)
    with pytest.raises(RuntimeError, match=r"step_: the recipe of layer 0, of a copied model.*took 3 steps without"):
        train(model, 3, advance=False)
    train(copied(ht.set_config_(model, "fp8")), 4, advance=False)


@pytest.mark.parametrize(
    ("before", "after", "changed", "advanced"),
    [("fp8_delayed", "fp8", 2, None), ("mxfp8", "fp8_delayed", 3, 4)],  # one step without is forgiven
)
def test_steps_of_a_copy_count_only_while_its_recipe_has_state(before, after, changed, advanced):
    """From step ``changed`` on it has another recipe, and from ``advanced`` on its state advances."""
    model = copy.deepcopy(ht.quantize_(nn.Sequential(nn.Linear(WIDTH, WIDTH)), before))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(8):
        if step == changed:
            ht.set_config_(model, after)
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if advanced is not None and step >= advanced:
            ht.step_(model)


def test_a_model_that_runs_with_the_parameters_of_a_copy_raises():
    """The amaxes are those of the copy, whose weights are used."""
    model = ht.quantize_(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "fp8_delayed")
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-3)

    def steps(advanced):
        for _ in range(4):
            torch.func.functional_call(
                model, dict(other.named_parameters()), (torch.randn(16, WIDTH),)
            ).sum().backward()
            optimizer.step()
            ht.step_(advanced)

    steps(other)
    assert other[0].quantization_state.encode_scale.ne(1).any()
    with pytest.raises(RuntimeError, match="step_: the recipe of layer 0, of a copied model"):
        steps(model)
