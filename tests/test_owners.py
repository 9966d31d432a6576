"""Weights that came from another layer go by the state of the layer that has them.

Oracle: the model that is converted anew and loads the state dict, bit for bit.
"""

import copy
import pickle

import pytest
import torch
from experts import ENDS, Experts, offsets
from tiers import covered
from torch import nn

import hybridtensor as ht
from hybridtensor.testing import random_tensor

X = random_tensor(16, 64, dtype=torch.float32, seed=1)


def made(recipe, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    return ht.quantize_(net, recipe, **options)


def train(net, steps=3, of=lambda net: net(X * 10)):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        of(net).square().mean().backward()
        optimizer.step()
        ht.step_(net)
        optimizer.zero_grad()
    return net


def exchange(first, second, name="weight"):
    one, other = getattr(first, name), getattr(second, name)
    setattr(first, name, other)
    setattr(second, name, one)


def swap(first, second, name="weight"):
    torch.utils.swap_tensors(getattr(first, name), getattr(second, name))


def of_resumed(net, fresh):
    fresh.load_state_dict(copy.deepcopy(net.state_dict()))
    return fresh


@pytest.mark.parametrize("move", [swap, exchange])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4", "fp8_delayed+keep_faces"])
def test_layers_that_exchange_weights(recipe, move):
    net = train(made(recipe))
    move(net[0], net[1])
    other = of_resumed(net, made(recipe))
    assert torch.equal(net(X), other(X))
    for mine, theirs in zip(train(net).state_dict().values(), train(other).state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8"])
def test_averages_that_are_swapped_in_and_out(recipe):
    """The average's own state never stepped: its scales are those of a model that begins."""
    net = made(recipe)
    average = copy.deepcopy(net)
    train(net, 5)
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
            mine.copy_(theirs)
        expected = net(X)
        for _ in range(2):
            for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
                torch.utils.swap_tensors(mine, theirs)
            assert torch.equal(net(X), expected)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "copied",
    [lambda net: net, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))],
    ids=["same", "copied", "unpickled"],
)
def test_a_weight_of_several_layers_has_the_state_of_the_first(first, copied):
    """Whichever runs first, also in a copy; the other one's stays as it was."""
    net = made("fp8_delayed")
    net[1].weight = net[0].weight
    net = copied(net)
    net[first](X)
    train(net)
    assert net[0].weight.layer is net[0].quantization_state
    assert [bool(layer.quantization_state.amax_history.any()) for layer in net] == [True, False]


def test_a_weight_of_another_recipe_keeps_it():
    net, other = train(made("fp8_delayed")), made("fp8")
    state = net[0].weight.layer
    other[0].weight = net[0].weight
    expected = net[0](X)
    assert torch.equal(other[0](X), expected)
    assert other[0].weight.layer is state


@pytest.mark.parametrize("move", [swap, exchange])
def test_experts_that_exchange_weights(move):
    def model():
        torch.manual_seed(0)
        return ht.quantize_(nn.ModuleList([Experts(), Experts()]).bfloat16(), "fp8_delayed")

    def outputs(net):
        x = random_tensor(ENDS[0][-1], net[0].w1.shape[2], dtype=torch.bfloat16, seed=2)
        return sum(each(x * (1 + 9 * index), offsets(ENDS[0])) for index, each in enumerate(net))

    net = train(model(), of=outputs)
    for name in ("w1", "w2", "w3"):
        move(net[0], net[1], name)
    assert torch.equal(outputs(net), outputs(of_resumed(net, model())))


@pytest.mark.parametrize("move", [swap, exchange, lambda a, b: setattr(a, "weight", nn.Parameter(b.weight.clone()))])
def test_a_layer_with_a_weight_of_another_one_gets_another_recipe(move):
    """Alone, before its first forward with it."""
    net = made("fp8_delayed")
    move(net[0], net[1])
    ht.set_config_(net[0], "fp8")
    other = made("fp8_delayed")
    ht.set_config_(other[0], "fp8")
    other = of_resumed(net, other)
    for mine, theirs in zip(train(net).state_dict().values(), train(other).state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("chosen", [[0], [1], [0, 1]])
@pytest.mark.parametrize("persistent", [False, True])
def test_layers_that_were_tied_later_get_another_recipe(chosen, persistent):
    """Whichever is given one: they have one weight."""
    net = made("fp8_delayed", persistent=persistent)
    net[1].weight = net[0].weight
    for index in chosen:
        ht.set_config_(net[index], "fp8_delayed/fp8_delayed/mxfp8")
    twin = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    twin[1].weight = twin[0].weight
    with torch.no_grad():
        twin[0].weight.copy_(net[0].weight.dequantize())
    twin = ht.quantize_(twin, "fp8_delayed/fp8_delayed/mxfp8", persistent=persistent)
    assert torch.equal(net(X), twin(X))
    (first,), (other,) = (torch.autograd.grad(each(X).square().sum(), each[0].weight) for each in (net, twin))
    assert torch.equal(first, other)


def give_a_copy(first, second, name="weight"):
    setattr(first, name, nn.Parameter(getattr(second, name).detach().clone()))


@pytest.mark.parametrize("after", [False, True], ids=["before the first graph", "after it"])
@pytest.mark.parametrize(
    ("recipe", "move", "persistent"),
    covered(["fp8_delayed", "nvfp4", "fp8_delayed+keep_faces"], [swap, exchange, give_a_copy], [False, True]),
)
def test_compiled_layers_whose_weights_moved_are_the_eager_ones(recipe, move, persistent, after, fresh_compiler):
    """A graph runs no forward of a layer, which would see that its weight came from another one."""
    found, persistent = [], persistent and "keep" not in recipe
    for compiled in (False, True):
        net = train(made(recipe, persistent=persistent), 2, of=lambda net: net[0](X) + net[1](X * 100))
        run = torch.compile(net, backend="aot_eager") if compiled else net
        if after:
            train(net, 1, of=lambda _, run=run: run(X))
        move(net[0], net[1])
        train(net, 2, of=lambda _, run=run: run(X))
        found.append(net.state_dict())
    for mine, theirs in zip(*(state.values() for state in found), strict=True):
        assert torch.equal(mine, theirs)


def test_compiled_experts_whose_weights_moved_are_the_eager_ones(fresh_compiler):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = ht.quantize_(nn.ModuleList([Experts(), Experts()]).bfloat16(), "fp8_delayed")
        x = random_tensor(ENDS[0][-1], net[0].w1.shape[2], dtype=torch.bfloat16, seed=2)
        runs = [torch.compile(each, backend="aot_eager") if compiled else each for each in net]

        def outputs(_, runs=runs, x=x):
            return sum(run(x * (1 + 9 * index), offsets(ENDS[0])) for index, run in enumerate(runs))

        train(net, 2, of=outputs)
        for name in ("w1", "w2", "w3"):
            exchange(net[0], net[1], name)
        train(net, 2, of=outputs)
        found.append(net.state_dict())
    for mine, theirs in zip(*(state.values() for state in found), strict=True):
        assert torch.equal(mine, theirs)


class Reader(nn.Module):
    """Multiplies by the weights of its layers itself."""

    def __init__(self, multiply):
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.multiply = multiply

    def forward(self, x):
        return self.multiply(torch.tanh(self.multiply(x, self.first.weight)), self.second.weight)


@pytest.mark.parametrize(
    ("move", "multiply", "compiled"),
    covered([swap, exchange, give_a_copy], [nn.functional.linear, lambda x, w: x @ w.t()], [False, True]),
)
def test_weights_that_moved_between_layers_whose_module_multiplies(move, multiply, compiled, fresh_compiler):
    def new():
        torch.manual_seed(0)
        return ht.quantize_(Reader(multiply), "fp8_delayed")

    net = train(new(), of=lambda net: net(X * 100))
    move(net.first, net.second)
    other = of_resumed(net, new())
    run = torch.compile(net, backend="aot_eager") if compiled else net
    train(net, of=lambda _: run(X * 100))
    train(other, of=lambda net: net(X * 100))
    for mine, theirs in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("make", [lambda w: w.detach().clone(), torch.empty_like])
def test_a_layer_that_begins_with_a_copy_has_a_state_of_its_own(make, recipe, dropped):
    """As if the values came from elsewhere, whether or not the layer is there that has the weight."""
    found = []
    for of_weight in (make, lambda w: torch.empty(w.shape)):
        net = train(made(recipe))
        torch.manual_seed(1)
        layer = nn.Linear(64, 64, bias=False)
        layer.weight = nn.Parameter(of_weight(net[0].weight))
        nn.init.normal_(layer.weight)
        if dropped:
            del net[0]
        net.append(layer)
        found.append(train(ht.quantize_(net, recipe)).state_dict())
    for mine, theirs in zip(*(state.values() for state in found), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("make", [lambda w: w.detach().clone(), torch.empty_like])
def test_experts_that_begin_with_copies_have_states_of_their_own(make):
    net = ht.quantize_(nn.ModuleList([Experts()]), "fp8_delayed")
    net.append(Experts())
    for name in ("w1", "w2", "w3"):
        setattr(net[1], name, nn.Parameter(make(getattr(net[0], name))))
    ht.quantize_(net, "fp8_delayed")
    assert len({id(each) for each in net.modules() if type(each).__name__ == "LayerState"}) == 6


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("move", [lambda w: w, lambda w: nn.Parameter(w.detach())])
def test_another_layer_goes_on_with_the_weight_of_one_that_is_gone(move, copied):
    """Also where that one got it as a copy."""
    net = made("fp8_delayed")
    if copied:
        give_a_copy(*net)
    train(net)
    state, layer = net[0].quantization_state, nn.Linear(64, 64, bias=False)
    layer.weight = move(net[0].weight)
    net[0] = layer
    assert ht.quantize_(net, "fp8_delayed")[0].quantization_state is state
