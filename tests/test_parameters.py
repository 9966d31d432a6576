"""What libraries do to parameters. Oracle: the same done to a plain model's, and what the layer computes then."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import hybridtensor as ht
from hybridtensor.subclasses import is_converted
from hybridtensor.testing import random_tensor

FORMS = [False, True]  # persistent


def layer(persistent=False, recipe="fp8", **options):
    torch.manual_seed(0)
    made = nn.Linear(64, 64, **options)
    return ht.quantize_(made, recipe, persistent=persistent, name="layer")


def model(persistent=False, recipe="fp8"):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    return ht.quantize_(made, recipe, persistent=persistent)


X = random_tensor(32, 64, dtype=torch.float32)


def held(net):
    """Keep what DistributedDataParallel keeps: the gradient accumulators of parameters, and the parameters."""
    return [(p, p.view_as(p).grad_fn.next_functions[0][0]) for p in net.parameters()]


class TestConversion:
    """``module.to`` and its like convert weights in place, whoever refers to them."""

    @pytest.mark.parametrize("persistent", FORMS)
    def test_while_gradient_accumulators_live(self, persistent):
        """As after training under DistributedDataParallel."""
        net = model(persistent)
        expected, holders, parameters = net(X), held(net), list(net.parameters())
        converted = net.double().float().cpu()
        assert all(a is b for a, b in zip(converted.parameters(), parameters, strict=True))
        assert all(is_converted(p) for p in parameters if p.dim() == 2)
        assert torch.equal(net(X), expected)
        net(X).sum().backward()
        assert all(p.grad is not None for p in parameters)
        assert holders

    @pytest.mark.parametrize("persistent", FORMS)
    def test_dtypes_gradients_and_attributes(self, persistent):
        net = model(persistent)
        net(X).sum().backward()
        net[0].weight.tag = "mine"
        held(net)
        gradients = [p.grad.clone() for p in net.parameters()]
        net.bfloat16()
        for p, grad in zip(net.parameters(), gradients, strict=True):
            assert p.dtype == p.grad.dtype == torch.bfloat16
            assert torch.equal(p.grad, grad.bfloat16())
        assert net[0].weight.tag == "mine"
        assert net(X.bfloat16()).dtype == torch.bfloat16

    @pytest.mark.parametrize("persistent", FORMS)
    def test_masters_stay(self, persistent):
        """Converting to another dtype rounds what the model holds, and not an optimizer's masters."""
        net, twin = model(persistent), model(persistent)
        optimizers = [
            ht.optim.MasterWeights(torch.optim.SGD, m.parameters(), lr=0.1)
            if persistent
            else torch.optim.SGD(m.parameters(), lr=0.1)
            for m in (net, twin)
        ]
        net.double().float()
        for m, optimizer in zip((net, twin), optimizers, strict=True):
            m(X).square().mean().backward()
            optimizer.step()
        assert torch.equal(net(X), twin(X))

    @pytest.mark.parametrize("persistent", FORMS)
    def test_tied_weights_stay_tied(self, persistent):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
                self.head.weight = self.embedding.weight

        net = ht.quantize_(Tied(), "fp8", persistent=persistent)
        held(net)
        net.bfloat16()
        assert net.head.weight is net.embedding.weight
        assert net.embedding(torch.tensor([1])).dtype == torch.bfloat16

    @pytest.mark.parametrize("persistent", FORMS)
    def test_to_empty(self, persistent):
        source = model(persistent)
        net = copy.deepcopy(source)
        held(net)
        net.to_empty(device="meta")
        assert net[0].weight.is_meta
        net.to_empty(device="cpu").load_state_dict(source.state_dict())
        assert torch.equal(net(X), source(X))

    def test_a_delayed_recipe_keeps_its_state(self):
        net, twin = model(recipe="fp8_delayed"), model(recipe="fp8_delayed")
        held(net)
        net.double().float()
        for _ in range(2):
            for m in (net, twin):
                m(X).sum().backward()
                ht.step_(m)
        assert torch.equal(net(X), twin(X))

    @pytest.mark.parametrize("persistent", FORMS)
    def test_copies_convert_themselves(self, persistent):
        net = model(persistent)
        for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            made.bfloat16()
            assert made[0].weight.dtype == torch.bfloat16
            assert net[0].weight.dtype == torch.float32

    def test_plain_models_convert_as_before(self):
        net = ht.plain_(model())
        assert all("_apply" not in m.__dict__ for m in net.modules())
        assert type(net.bfloat16()[0].weight) is nn.Parameter

    def test_a_conversion_to_values(self):
        net = model()
        net._apply(lambda t: torch.zeros(t.shape))
        assert not net(X).any()
        assert is_converted(net[0].weight)


class TestReplacement:
    """Parameters that are made of parameters."""

    @pytest.mark.parametrize("persistent", FORMS)
    def test_type_of_a_parameter(self, persistent):
        """As Accelerate's ``set_module_tensor_to_device`` makes parameters."""
        net = layer(persistent)
        expected = net(X)
        made = type(net.weight)(net.weight, requires_grad=False)
        assert type(made) is type(net.weight)
        assert isinstance(made, nn.Parameter)
        assert not made.requires_grad
        net._parameters["weight"] = made
        assert torch.equal(net(X), expected)
        values = net.weight.dequantize()
        net._parameters["weight"] = type(net.weight)(values, requires_grad=True).to("cpu")
        assert type(net.weight) is nn.Parameter
        assert net.weight.requires_grad
        assert torch.equal(net(X), expected)  # the layer quantizes by its recipe
        with pytest.raises(TypeError, match="experts cannot be offloaded by replacing their parameters"):
            type(made)(torch.ones(2, 8, 8), requires_grad=True)

    @pytest.mark.parametrize("persistent", FORMS)
    @pytest.mark.parametrize("make", [nn.Parameter, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)),
                                      lambda p: nn.Parameter(p.detach().clone()), lambda p: nn.Parameter(p.data)],
                             ids=["Parameter", "deepcopy", "pickle", "clone", "data"])  # fmt: skip
    def test_parameters_of_parameters(self, persistent, make):
        net = layer(persistent)
        expected = net(X)
        net.weight = make(net.weight)
        assert is_converted(net.weight)
        assert isinstance(net.weight, nn.Parameter)
        assert torch.equal(net(X), expected)

    @pytest.mark.parametrize("persistent", FORMS)
    def test_swapped(self, persistent):
        first, second = layer(persistent), layer(persistent)
        second.load_state_dict({name: 2 * value for name, value in first.state_dict().items()} if not persistent else
                               ht.plain_state_dict(first))  # fmt: skip
        expected = [second(X), first(X)]
        torch.utils.swap_tensors(first.weight, second.weight)
        torch.utils.swap_tensors(first.bias, second.bias)
        assert [torch.equal(m(X), y) for m, y in zip((first, second), expected, strict=True)] == [True, True]

    @pytest.mark.parametrize("persistent", FORMS)
    @pytest.mark.parametrize("swap", [False, True])
    @pytest.mark.parametrize("assign", [False, True])
    def test_filtered_state_dicts(self, persistent, swap, assign):
        """Of one layer, by prefix, in another order, without biases; as files hold them."""
        source, net = model(persistent), model(persistent)
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        state = {n: v for n, v in reversed(source.state_dict().items()) if n.startswith("0.")}
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            found = net.load_state_dict(torch.load(file, weights_only=True), strict=False, assign=assign)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
        assert found.missing_keys == ["2.weight", "2.bias"]
        assert is_converted(net[0].weight)
        assert torch.equal(net[0](X), source[0](X))
        assert not net[2](torch.ones(1, 128)).any()

    @pytest.mark.parametrize("persistent", FORMS)
    def test_functional_call(self, persistent):
        """Other tensors for one call, quantized by the layer's recipe: weights of ours, and plain ones."""
        net, other = layer(persistent), layer(persistent)
        with torch.no_grad():
            other.weight.mul_(2)
        call = torch.func.functional_call
        assert torch.equal(call(net, dict(other.named_parameters()), (X,)), other(X))
        values = {"weight": other.weight.dequantize(), "bias": other.bias}
        assert torch.equal(call(net, values, (X,)), other(X))

    def test_parametrized(self):
        class Twice(nn.Module):
            def forward(self, weight):
                return 2 * weight

        net, twin = layer(), layer()
        parametrize.register_parametrization(net, "weight", Twice())
        with torch.no_grad():
            twin.weight.mul_(2)
        assert torch.equal(net(X), twin(X))
        net(X).sum().backward()
        twin(X).sum().backward()
        assert torch.equal(net.parametrizations.weight.original.grad, 2 * twin.weight.grad)
        parametrize.remove_parametrizations(net, "weight")
        assert torch.equal(net(X), twin(X))
        persistent = layer(True)
        told = r"HybridTensor of layer layer: .* would compute with the values of a weight that is persistent"
        with pytest.raises(NotImplementedError, match=told):
            parametrize.register_parametrization(persistent, "weight", Twice())
