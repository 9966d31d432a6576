"""Every operation on every form of a weight, where ranks share it. Oracle: the same layer alone, bit for bit.

Each rank has the same batch, so that means over two ranks are exact.
"""

import copy
import itertools

import pytest
import tiers
import torch
import torch.nn.functional as F
from processes import here
from sharding import mesh_of
from tiers import covered, few
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from weight_operations import BATCHES, ENDS, PRODUCTS, WRITES, data, difference, layer, run

from hybridtensor import quantize_
from hybridtensor.distributed import ExpertParallel

REFUSED = [("[in, out]", True)]  # a shard of a persistent weight would be cut inside of its blocks
FORMS = pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
STORED = pytest.mark.parametrize("stored", PRODUCTS)
pytestmark = pytest.mark.filterwarnings("ignore:.*persistent weights whose values are bfloat16:UserWarning")


def root_group(model, rank):
    """One FSDP2 group, of the root: its weights stay gathered from forward to backward."""
    fully_shard(model, mesh=mesh_of(rank, 2))


def inner_group(model, rank):
    """A group of its own, whose weight is gathered again for backward."""
    fully_shard(model[0], mesh=mesh_of(rank, 2), reshard_after_forward=True)
    fully_shard(model, mesh=mesh_of(rank, 2))


GROUPS = [root_group, inner_group]


def every_product(rank, stored, group, persistent):
    if (stored, persistent) in REFUSED:
        model = layer(stored, PRODUCTS[stored]["addmm"], persistent=True, device=here())
        with pytest.raises(ValueError, match=r"a persistent weight .* is stored \[in, out\]"):
            group(model, rank)
        return
    x, grad = data(here())
    wrong = {}
    for name, product in {**PRODUCTS[stored], **BATCHES.get(stored, {})}.items():
        one, many = (layer(stored, product, persistent=persistent, device=here()) for _ in range(2))
        group(many, rank)
        expected = run(one, x, grad)
        for step in ("first", "second"):
            if found := difference(run(many, x, grad), expected):
                wrong[f"{name}, {step} step"] = found
    assert not wrong, wrong


@pytest.mark.parametrize(("group", "stored", "persistent"), covered(GROUPS, [*PRODUCTS], [False, True]))
def test_products_of_gathered_weights(two, group, stored, persistent):
    two.run(every_product, stored, group, persistent)


def every_write(rank, stored, group, persistent, names):
    x, grad = data(here())
    wrong = {}
    product = next(iter(PRODUCTS[stored].values()))
    for name in names:
        write = WRITES[name]
        one, many = (layer(stored, product, persistent=persistent, device=here()) for _ in range(2))
        group(many, rank)
        run(many, x, grad)  # the other one has never been quantized before
        for model in (one, many):
            with torch.no_grad():
                write(next(model.parameters()))
        if found := difference(run(many, x, grad), run(one, x, grad)):
            wrong[name] = found
        mine, (expected,) = next(many.parameters()).full_tensor(), one.parameters()
        if not torch.equal(torch.as_tensor(mine), expected.dequantize() if not persistent else expected.original):
            wrong[f"full_tensor() after {name}"] = "values"
    assert not wrong, wrong


def writes_of(stored, persistent):
    """Return every other write: both forms of a layout share them, another layout has them the other way round."""
    if tiers.LONG or (stored, True) in REFUSED:
        return list(WRITES)
    return list(WRITES)[(list(PRODUCTS).index(stored) + persistent) % 2 :: 2]


def test_every_write_meets_every_layout_and_every_form():
    forms = [form for form in itertools.product(PRODUCTS, [False, True]) if form not in REFUSED]
    met = {(name, value) for form in forms for name in writes_of(*form) for value in form}
    assert met == set(itertools.product(WRITES, [*PRODUCTS, False, True]))


@FORMS
@STORED
@pytest.mark.parametrize("group", few(GROUPS[::-1], 1), ids=lambda group: group.__name__)
def test_writes_of_shards(two, group, stored, persistent):
    if (stored, persistent) in REFUSED:
        pytest.skip("refused, as test_products_of_gathered_weights shows")
    two.run(every_write, stored, group, persistent, writes_of(stored, persistent))


def on_parts(rank, persistent):
    """Tensor parallelism: the output features are cut, tokens and inputs are on every rank.

    DTensor switches torch functions off, so that only ``F.linear`` finds the weight: other products are refused.
    """
    mesh, (x, grad), wrong = init_device_mesh(here(), (2,), mesh_dim_names=("tp",)), data(here()), {}
    for name, product in PRODUCTS["[out, in]"].items():
        one, many = (layer("[out, in]", product, persistent=persistent, device=here()) for _ in range(2))
        parallelize_module(many, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
        if not name.startswith(("F.linear", "of a view", "in place")):
            with pytest.raises(NotImplementedError, match=r"call F\.linear"):
                run(many, x, grad)
            continue
        (y, dx, dw), expected = run(many, x, grad), run(one, x, grad)
        if not torch.equal(y, expected[0]) or not torch.equal(dw, expected[2]):
            wrong[name] = "output or grad_weight"
        if not (dx - expected[1]).norm() <= 2**-6 * expected[1].norm():  # a sum over ranks, in another order
            wrong[name] = "grad_input"
    assert not wrong, wrong


@FORMS
def test_products_of_parts(two, persistent):
    two.run(on_parts, persistent)


def on_experts(rank, stored, persistent):
    """Expert parallelism: each rank has half of the experts, and gets their tokens of both."""
    mesh, (x, grad), wrong = init_device_mesh(here(), (2,), mesh_dim_names=("ep",)), data(here()), {}
    ends = torch.tensor(ENDS, dtype=torch.int32, device=here())
    for name, product in PRODUCTS[stored].items():
        one, many = (layer(stored, product, persistent=persistent, device=here()) for _ in range(2))
        parallelize_module(many, mesh, {"0": ExpertParallel(ends=True)})
        expected = run(one, x, grad)
        found = run(many, x, grad, ends)
        if not torch.equal(found[0], expected[0]) or not torch.equal(found[1], expected[1]):
            wrong[name] = "output or grad_input"
        twice = 2 * expected[2]  # both ranks' tokens, whose blocks are others
        if not (found[2] - twice).norm() <= 2**-4 * twice.norm():
            wrong[name] = "grad_weight"
    assert not wrong, wrong


@FORMS
@pytest.mark.parametrize("stored", ["[E, out, in]", "[E, in, out]"])
def test_products_of_experts_on_ranks(two, stored, persistent):
    two.run(on_experts, stored, persistent)


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.read = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return F.linear(self.own(x), (self.read.weight * 1.0).full_tensor())


def read_by_a_parent(rank):
    """Values of a part of a weight, which its layer never multiplies."""
    model = Parent().to(here())
    parallelize_module(model, init_device_mesh(here(), (2,)), {"read": ColwiseParallel()})
    quantize_(model, "fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)  # which torch refuses of both kinds
    model(torch.ones(32, 64, device=here())).sum().backward()
    with pytest.warns(UserWarning, match=r"layer read: its weight was read as values \(aten\.mul"):
        optimizer.step()


def test_parts_that_are_read_as_values(two):
    two.run(read_by_a_parent)


class Gathering(nn.Linear):
    """A layer whose parameters are shards, which a property gathers, as SimpleFSDP of torchtitan has it."""

    def _gathered(self, name):
        whole = self._parameters[name].redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    weight = property(lambda self: self._gathered("weight"))
    bias = property(lambda self: self._gathered("bias"))


def gathered_by_a_property(rank, recipe, before):
    """Bitwise the whole layer: outputs, gradients of inputs, and on equal tokens that of the weight, twice."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32).to(here()), torch.randn(16, 64, device=here())
    whole = quantize_(copy.deepcopy(layer), recipe)
    if before:
        quantize_(layer, recipe)
    for name, parameter in list(layer.named_parameters()):
        shards = distribute_tensor(parameter, init_device_mesh(here(), (2,)), [Shard(0)])
        layer.register_parameter(name, nn.Parameter(shards))
    layer.__class__ = Gathering
    if not before:
        quantize_(layer, recipe)
    found = []
    for one in (layer, whole):
        input = x.clone().requires_grad_()
        y = one(input)
        y.square().sum().backward()
        found.append((y.detach(), input.grad))
    assert all(map(torch.equal, *found))
    assert torch.equal(layer._parameters["weight"].grad.full_tensor(), 2 * whole.weight.grad)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_delayed"])
@pytest.mark.parametrize("before", [True, False])
def test_shards_that_a_property_gathers(two, recipe, before):
    two.run(gathered_by_a_property, recipe, before)
