"""Layers whose weight others read and no product multiplies: they run unquantized, and are named once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht

X = torch.randn(32, 64)


class Parent(nn.Module):
    """Calls one layer, and uses the weight of another one by ``use``."""

    def __init__(self, use):
        super().__init__()
        self.own, self.read, self.use = nn.Linear(64, 64), nn.Linear(64, 64), use

    def forward(self, x):
        return self.use(self, self.own(x))


READERS = {
    "aten.mul": lambda m, x: F.linear(x, m.read.weight * 1.0),
    "aten.add": lambda m, x: F.linear(x, m.read.weight + torch.ones(64, 64), m.read.bias),
    "aten.linalg_vector_norm": lambda m, x: F.linear(x, m.own.weight * m.read.weight.norm()),
    "aten._foreach_mul": lambda m, x: F.linear(x, torch._foreach_mul([m.read.weight], 2.0)[0]),
    "a product of two weights": lambda m, x: x @ (m.read.weight @ m.own.weight),
    "aten.mv": lambda m, x: torch.mv(m.read.weight, x[0]),
    "aten.dot": lambda m, x: torch.dot(x[0], m.read.weight[0]),
    "aten.mul.Tensor": lambda m, x: torch.linalg.vecdot(x[:, None], m.read.weight),
}
OTHERS = {
    "multiplied by its parent": lambda m, x: F.linear(x, m.read.weight) + m.read.weight.norm(),
    "multiplied without a gradient": lambda m, x: m.read(X) * m.read.weight.norm() * x,
    "not used": lambda m, x: x,
    "detached": lambda m, x: x + m.read.weight.detach().norm(),
    "a view of what was detached": lambda m, x: x + m.read.weight.detach()[0].norm() + m.read.weight.data.t().norm(),
    "read without gradients": lambda m, x: x + torch.no_grad()(lambda: m.read.weight.norm())(),
    "asked for its shape": lambda m, x: x + torch.zeros_like(m.read.weight)[0],
    "an embedding": lambda m, x: x + F.embedding(torch.tensor([1]), m.read.weight),
}


def train(model, steps=3, call=None):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    ht.step_after(optimizer, model)
    for _ in range(steps):
        (call or model)(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def converted(use, recipe="fp8", frozen=False):
    model = ht.quantize_(nn.Sequential(Parent(use)), recipe)
    model[0].read.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("reader", "recipe"),
    list(zip(READERS, ["fp8", "nvfp4", "fp8_delayed", "fp8", "mxfp8", "fp8", "mxfp8", "nvfp4"], strict=True)),
)
def test_a_weight_that_a_parent_reads(reader, recipe, frozen):
    with pytest.warns(UserWarning, match=r"layer 0\.read: its weight was read as values") as told:
        train(converted(READERS[reader], recipe, frozen))
    (one,) = told
    assert f"({reader}" in str(one.message)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("use", OTHERS)
def test_nothing_is_said_of_a_weight_that_is(use, frozen):
    train(converted(OTHERS[use], frozen=frozen))  # warnings are errors here


def test_each_model_speaks_of_its_own_layers():
    model, other = converted(READERS["aten.mul"]), converted(OTHERS["not used"])
    model(X).sum().backward()
    train(other)
    with pytest.warns(UserWarning, match=r"layer 0\.read"):
        train(model, steps=1)


def test_without_step():
    """A recipe without state needs no ``step_``."""
    model = converted(READERS["aten.mul"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(X).sum().backward()
    with pytest.warns(UserWarning, match=r"layer 0\.read"):
        optimizer.step()


def test_a_copy_of_a_model_is_another_one():
    model = converted(READERS["aten.mul"])
    with pytest.warns(UserWarning, match=r"layer 0\.read"):
        train(model)
    again = copy.deepcopy(model)
    train(again)  # it was said of the layers that were copied


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    model = converted(READERS["aten.mul"])
    x = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match=r"layer 0\.read") as told:
        train(model, call=lambda _: checkpoint(model, x, use_reentrant=use_reentrant))
    assert len(told) == 1


class Rotating(nn.Module):
    """As HRA of PEFT."""

    def __init__(self):
        super().__init__()
        self.base_layer, self.rotation = nn.Linear(64, 64), nn.Parameter(torch.eye(64))

    def forward(self, x):
        return F.linear(x, torch.mm(self.base_layer.weight.data, self.rotation))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forward_that_multiplies_by_a_product_of_the_data(persistent):
    model = ht.quantize_(nn.Sequential(Rotating()), "fp8", persistent=persistent)
    model[0].base_layer.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"layer 0\.base_layer: its weight was read as values \(mm\)"):
        train(model)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
@pytest.mark.parametrize("reader", READERS)
def test_a_weight_that_compiled_code_reads(reader, recipe, frozen):
    torch._dynamo.reset()
    model = converted(READERS[reader], recipe, frozen)
    with pytest.warns(UserWarning, match=r"layer 0\.read: its weight was read as values .* in compiled code") as told:
        train(model, call=torch.compile(model, backend="aot_eager"))
    assert len(told) == 1


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("use", OTHERS)
def test_nothing_is_said_of_a_weight_that_compiled_code(use, frozen):
    torch._dynamo.reset()
    model = converted(OTHERS[use], frozen=frozen)
    train(model, call=torch.compile(model, backend="aot_eager"))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by Dynamo itself
def test_compiled_code_that_multiplies_what_others_read():
    """The graph of one of two equal layers is run for both: what eager code reads may have been multiplied there."""
    torch._dynamo.reset()
    model = ht.quantize_(nn.Sequential(*(Parent(OTHERS["multiplied by its parent"]) for _ in range(2))), "fp8")
    for parent in model:
        parent.compile(backend="aot_eager")
    train(model, call=lambda x: model(x.clone().requires_grad_()) * model[1].read.weight.norm())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by Dynamo itself
def test_equal_layers_share_a_graph():
    torch._dynamo.reset()
    graphs = CompileCounter()
    model = ht.quantize_(nn.Sequential(*(Parent(READERS["aten.mul"]) for _ in range(3))), "fp8")
    for parent in model:
        parent.compile(backend=graphs)
    with pytest.warns(UserWarning, match=r"layer 0\.read") as told:
        train(model, call=lambda x: model(x.clone().requires_grad_()))
    assert len(told) == graphs.frame_count == 1


class Experts(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.weight, self.use, self.num_experts = nn.Parameter(torch.randn(2, 64, 64) / 8), use, 2

    def forward(self, x):
        return self.use(self.weight, x)


def test_experts_of_which_a_program_takes_one():
    """A product with ``w[e]`` of a stack is one of its layer."""
    train(ht.quantize_(nn.Sequential(Experts(lambda w, x: F.linear(x, w[0]))), "fp8_rowwise"), steps=1)


COPIES = {
    "aten.mul": lambda w, x: w[0] * 1.0,
    "aten.embedding": lambda w, x: F.embedding(torch.zeros(1, dtype=torch.long), w.flatten(1)).view(64, 64),
    "aten.gather": lambda w, x: torch.take_along_dim(w, torch.zeros(1, 64, 64, dtype=torch.long), 0)[0],
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reader", COPIES)
def test_experts_of_which_a_program_copies_one(reader, compiled):
    torch._dynamo.reset()
    copied = Experts(lambda w, x: F.linear(x, COPIES[reader](w, x)))
    model = ht.quantize_(nn.Sequential(copied), "fp8_rowwise")
    with pytest.warns(UserWarning, match=rf"layer 0\.weight: its weight was read as values \({reader}"):
        train(model, steps=1, call=torch.compile(model, backend="aot_eager") if compiled else None)
