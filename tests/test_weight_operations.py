"""Every operation on every form of a weight, of one table. Oracle: the first product of the table, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from any_layer import ANY_LAYER
from torch import nn
from weight_operations import BATCHES, COPIES, PRODUCTS, WRITES, data, difference, layer, run

import hybridtensor as ht

FORMS = pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
STORED = pytest.mark.parametrize("stored", PRODUCTS)
pytestmark = pytest.mark.filterwarnings("ignore:.*persistent weights whose values are bfloat16:UserWarning")


@FORMS
@STORED
def test_products_agree(stored, persistent, device):
    x, grad = data(device)
    for products in (PRODUCTS[stored], BATCHES.get(stored, {})):
        found = {
            name: run(layer(stored, product, persistent=persistent, device=device), x, grad)
            for name, product in products.items()
        }
        if found:
            first = next(iter(found.values()))
            wrong = {name: difference(one, first) for name, one in found.items()}
            assert not any(wrong.values()), wrong


@FORMS
def test_layouts_agree(persistent, device):
    """A matrix is quantized alike however it is stored, alone and in a stack."""
    x, grad = data(device)
    found = {
        stored: run(layer(stored, next(iter(products.values())), persistent=persistent, device=device), x, grad)
        for stored, products in PRODUCTS.items()
    }
    assert not difference(found["[in, out]"], found["[out, in]"])
    assert not difference(found["[E, in, out]"], found["[E, out, in]"])
    one, all_ = found["[out, in]"], found["[E, out, in]"]
    assert torch.equal(one[0][:32], all_[0][:32])  # the tokens of the first expert
    assert torch.equal(one[1][:32], all_[1][:32])


@pytest.mark.parametrize(
    ("recipe", "out"), [*((name, 128) for name in ANY_LAYER), ("fp8+high_precision", 1), ("fp8+dequantized", 1)]
)
def test_a_persistent_weight_in_the_other_layout_is_quantized_as_the_recipe_says_or_raises(recipe, out, device):
    """As tied autoencoders use it. Oracle: the weight in high precision, which each product quantizes."""
    config = ht.recipes.from_name(recipe)
    alike = not isinstance(config.weight, ht.HybridQuantizer)  # a quantizer for each face
    found = []
    for persistent in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, out)).to(device, torch.bfloat16)
        ht.quantize_(model, config, persistent=persistent, filter_fn=lambda module, name: True)
        x = torch.randn(32, out, device=device, dtype=torch.bfloat16)
        if persistent and not alike:
            with pytest.raises(NotImplementedError, match=r"weight of layer 0 is persistent .* in the other layout"):
                F.linear(x, model[0].weight.t())
            return
        found.append(F.linear(x, model[0].weight.t()))
    assert torch.equal(*found)


@FORMS
@STORED
@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_next_product(name, stored, persistent, device):
    """Oracle: a layer that is converted with the values written before."""
    x, grad = data(device)
    product = next(iter(PRODUCTS[stored].values()))
    model, plain = (layer(stored, product, recipe=r, device=device) for r in ("mxfp8", "bf16"))
    if persistent:
        model = layer(stored, product, persistent=True, device=device)
    run(model, x, grad)
    with torch.no_grad():
        WRITES[name](next(model.parameters()))
        WRITES[name](next(plain.parameters()))
    expected = layer(stored, product, device=device)
    with torch.no_grad():
        next(expected.parameters()).copy_(next(plain.parameters()).dequantize())
    assert not difference(run(model, x, grad), run(expected, x, grad))


@FORMS
@STORED
@pytest.mark.parametrize("name", COPIES)
def test_copies_compute_the_same(name, stored, persistent, device):
    x, grad = data(device)
    model = layer(stored, next(iter(PRODUCTS[stored].values())), persistent=persistent, device=device)
    expected = run(model, x, grad)
    model[0].product = None  # a function of a table cannot be pickled
    made = COPIES[name](model[0])
    model[0] = made
    made.product = next(iter(PRODUCTS[stored].values()))
    found = run(model, x, grad)
    assert not difference(found, expected)
