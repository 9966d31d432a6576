"""Inference mode, in which torch hands composite operators to a class whole.

Oracle: the same under no_grad, bit for bit, where torch decomposes them.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hybridtensor as ht
from hybridtensor.testing import random_tensor

PRODUCTS = {
    "linear": lambda w, x: F.linear(x, w),
    "T": lambda w, x: x @ w.T,
    "narrow": lambda w, x: F.linear(x, w.narrow(0, 0, 64)),
    "chunk": lambda w, x: torch.cat([F.linear(x, part) for part in w.chunk(2)], -1),
    "to": lambda w, x: F.linear(x, w.to(x.dtype)),
    "reshape": lambda w, x: F.linear(x, w.reshape(2, -1, 128).flatten(0, 1)),
}
READS = {
    "float": lambda w: w.float(),
    "norm": lambda w: w.float().norm(),
    "reshape": lambda w: w.reshape(-1),
    "flatten": lambda w: w.flatten(),
    "cpu": lambda w: w.cpu(),
    "bfloat16": lambda w: w.to(torch.bfloat16),
    "type_as": lambda w: w.type_as(torch.ones(1, dtype=torch.float64)),
}


def layer(product, recipe, persistent):
    class Layer(nn.Linear):
        def forward(self, x):
            return PRODUCTS[product](self.weight, x)

    torch.manual_seed(0)
    return ht.quantize_(nn.Sequential(Layer(128, 128, bias=False)), recipe, persistent=persistent)


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_those_without_gradients(product, recipe, persistent):
    x, outputs = random_tensor(8, 128, dtype=torch.float32, seed=1), []
    for mode in (torch.no_grad, torch.inference_mode):
        net = layer(product, recipe, persistent)
        try:
            with mode():
                outputs.append(net(x).clone())
        except (NotImplementedError, ValueError) as error:  # what the class refuses in either mode
            outputs.append(str(error))
    expected, got = outputs
    if isinstance(expected, str):
        assert got == expected
        return
    assert torch.equal(got, expected)
    assert not torch.equal(got, F.linear(x, layer(product, recipe, False)[0].weight.dequantize())[:, : got.shape[1]])


@pytest.mark.parametrize("read", READS)
def test_reads_of_masters_are_those_without_gradients(read):
    values = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = READS[read](layer("linear", "fp8", False)[0].weight)
            values.append(found.dequantize() if hasattr(found, "dequantize") else found)
    assert torch.equal(*(value.clone() for value in values))


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("how", ["copied", "converted", "assigned", "cast"])
def test_models_that_are_made_in_it_run(how, recipe):
    """And, but for those made of tensors that are its own, train outside of it."""
    x = random_tensor(8, 64, dtype=torch.float32, seed=1)

    def plain():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    expected = ht.quantize_(plain(), recipe)
    net = plain() if how == "converted" else ht.quantize_(plain(), recipe)
    with torch.inference_mode():
        if how == "copied":
            net = copy.deepcopy(net)
        elif how == "converted":
            ht.quantize_(net, recipe)
        elif how == "assigned":
            net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
        else:
            net.to(torch.bfloat16).to(torch.float32)
            expected.to(torch.bfloat16).to(torch.float32)
        inside = net(x), net(x)
    with torch.no_grad():
        outside = net(x)
        for got in (*inside, outside):
            assert torch.equal(got, expected(x))


@torch.inference_mode()
def test_linear_takes_inputs_whose_tokens_are_apart():
    weight = ht.Float8Quantizer().quantize(random_tensor(64, 128))
    x = random_tensor(4, 6, 128).transpose(0, 1)
    assert torch.equal(F.linear(x, weight), F.linear(x.contiguous(), weight))
