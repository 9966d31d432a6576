"""The way back: plain models of the same parameters, and state dicts that plain models load strictly."""

import copy

import pytest
import torch
from any_layer import ANY_LAYER
from saving import through_a_file
from torch import nn

import hybridtensor as ht
from hybridtensor.plain import high_precision_values

X = torch.randn(32, 128, generator=torch.Generator().manual_seed(4))


def model(recipe=None, persistent=False, dtype=torch.float32):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 128), nn.LayerNorm(128)).to(dtype)
    return made if recipe is None else ht.quantize_(made, recipe, persistent=persistent)


def train(net, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()
        ht.step_(net)


def assert_is_plain(net):
    reference = model()
    assert all(type(p) is nn.Parameter for p in net.parameters())
    assert list(net.state_dict()) == list(reference.state_dict())
    tables = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    for module in net.modules():
        assert not any(getattr(module, name) for name in tables), module
        assert not [name for name in module.__dict__ if "hybridtensor" in name]
    assert {name for name, _ in net.named_modules()} == {name for name, _ in reference.named_modules()}


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
@pytest.mark.parametrize("recipe", ANY_LAYER)
def test_the_same_parameters_plain_again(recipe, persistent):
    net, reference = model(recipe, persistent), model()
    before = list(net.parameters())
    seen = []
    net[0].weight.register_hook(seen.append)
    net(X).sum().backward()
    gradients = [p.grad for p in before]
    assert ht.plain_(net) is net
    assert all(a is b for a, b in zip(net.parameters(), before, strict=True))
    assert all(p.grad is g for p, g in zip(before, gradients, strict=True))
    assert_is_plain(net)
    assert torch.equal(net(X), reference(X))  # untrained: the values that were converted
    net(X).sum().backward()
    assert len(seen) == 2


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
def test_values_are_those_that_were_trained_and_optimizers_go_on(persistent):
    net = model("fp8_delayed", persistent)
    make = ht.optim.MasterWeights if persistent else lambda cls, parameters, **kw: cls(parameters, **kw)
    optimizer = make(torch.optim.AdamW, net.parameters(), lr=0.01)
    train(net, optimizer)
    if persistent:
        expected = [net[i].weight.high_precision.current.clone() for i in (0, 2)]
    else:
        expected = [net[i].weight.dequantize().clone() for i in (0, 2)]
    ht.plain_(net)
    assert all(torch.equal(net[i].weight, values) for i, values in zip((0, 2), expected, strict=True))
    if not persistent:
        state = optimizer.state[net[0].weight]["exp_avg"].clone()
        train(net, optimizer, 1)
        assert not torch.equal(optimizer.state[net[0].weight]["exp_avg"], state)
        assert not torch.equal(net[0].weight, expected[0])
    else:
        with pytest.raises(TypeError, match="became Parameter; make the optimizer anew"):
            train(net, optimizer, 1)


def test_faces_alone_give_what_they_hold():
    net = model("mxfp8", persistent=True).requires_grad_(False)
    net[0].weight.high_precision.release_original()
    expected = net[0].weight.dequantize()
    ht.plain_(net, torch.bfloat16)
    assert net[0].weight.dtype == torch.bfloat16
    assert not net[0].weight.requires_grad
    assert torch.equal(net[0].weight, expected.bfloat16())
    assert net[3].weight.dtype == torch.float32


def test_tied_weights_and_embeddings():
    embedding, head = nn.Embedding(128, 64), nn.Linear(64, 128, bias=False)
    head.weight = embedding.weight
    net = nn.Sequential(embedding, head)
    ht.quantize_(net, "fp8")
    ht.plain_(net)
    assert net[0].weight is net[1].weight
    assert type(net[0].weight) is nn.Parameter
    assert not net[0]._state_dict_hooks
    net(torch.tensor([3])).sum().backward()


def test_what_needs_plain_tensors_works_after_it():
    """Tracing, exporting, transforms, and converting again."""
    net = ht.plain_(model("fp8"))
    assert torch.equal(torch.vmap(net)(X), model()(X).view(32, 128))
    assert torch.equal(torch.jit.trace(net, X)(X), net(X))
    exported = torch.export.export(net, (X,)).module()
    assert torch.equal(exported(X), net(X))
    again, fresh = ht.quantize_(copy.deepcopy(net), "mxfp8"), model("mxfp8")
    assert torch.equal(again(X), fresh(X))


def test_a_weight_that_is_referenced_is_not_swapped():
    net = model("fp8")
    view = net[0].weight.t()
    with pytest.raises(RuntimeError, match="plain_: the weight is referenced by a live graph or a weak reference"):
        ht.plain_(net)
    del view


def test_bad_input():
    with pytest.raises(TypeError, match="plain_: a module is required, got Tensor"):
        ht.plain_(torch.ones(3))
    with pytest.raises(TypeError, match=r"plain_: a floating-point dtype is required, got torch\.int8"):
        ht.plain_(model("fp8"), torch.int8)
    with pytest.raises(TypeError, match="plain_state_dict: a module is required, got str"):
        ht.plain_state_dict("model")
    plain = model()
    assert ht.plain_(plain) is plain


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
@pytest.mark.parametrize("recipe", ANY_LAYER)
def test_a_state_dict_for_plain_models(recipe, persistent):
    net = model(recipe, persistent)
    net(X)
    state = ht.plain_state_dict(net)
    assert all(type(value) is torch.Tensor for value in state.values())
    target = model()
    for p in target.parameters():
        nn.init.zeros_(p)
    target.load_state_dict(state, strict=True)
    assert torch.equal(target(X), model()(X))
    if not persistent:
        assert state["0.weight"].data_ptr() == net[0].weight.data_ptr()


def test_a_state_dict_of_persistent_weights_is_exact_and_gives_values_to_savers():
    """What asks for memory, as safetensors and save_pretrained do, finds that of the values."""
    safetensors = pytest.importorskip("safetensors.torch")
    net = model("fp8", persistent=True)
    for state in (net.state_dict(), {name: t.clone() for name, t in net.state_dict().items()}):
        loaded = safetensors.load(safetensors.save(state))
        assert torch.equal(loaded["0.weight"], ht.plain_state_dict(net)["0.weight"])
        assert state["0.weight"].untyped_storage().nbytes() == 128 * 128 * 4
    state = net.state_dict()
    with torch.no_grad():
        net[0].weight.copy_(torch.ones(128, 128))
    assert torch.equal(safetensors.load(safetensors.save(state))["0.weight"], torch.ones(128, 128))
    other = model("fp8", persistent=True)
    other.load_state_dict(through_a_file(copy.deepcopy(net.state_dict()), weights_only=True))
    assert torch.equal(other[0].weight, net[0].weight)
    with pytest.raises(RuntimeError, match="a wrapper has no memory of its own to read"):
        net[0].weight.untyped_storage().data_ptr()


def test_what_the_caller_left_out_is_forgotten():
    net = ht.plain_(ht.quantize_(model(), "fp8", keep_bf16=["2"]))
    assert_is_plain(net)
    assert ht.check(net, X).untouched == ("0", "2")


class TestAllOrNothing:
    """A model that cannot be plain stays what it was, in every layer: the last one is at fault."""

    @staticmethod
    def parts(net):
        """Return what every parameter is, and its gradient."""
        return [(type(p), p.dtype, p.grad, p.requires_grad, dict(p.__dict__)) for p in net.parameters()]

    def stays(self, net, raises, *arguments):
        before, expected = self.parts(net), net(X)
        seen = []
        hook = net[0].weight.register_hook(seen.append)
        with raises:
            ht.plain_(net, *arguments)
        assert self.parts(net) == before
        expected.sum().backward()  # the graph from before
        assert torch.equal(net(X), expected)
        net(X).sum().backward()
        assert len(seen) == 2
        hook.remove()

    @pytest.fixture(params=[False, True], ids=["master", "persistent"])
    def net(self, request):
        net = model("fp8", request.param)
        net(X).sum().backward()
        return net

    def test_a_gradient_in_another_dtype(self, net):
        """torch refuses it once the weight is another: the gradient was gone then, and the weight plain."""
        net[0].weight.grad = None
        says = r"gradient of 2\.weight is in torch\.float32, and its weight would be in torch\.bfloat16; call zero_"
        self.stays(net, pytest.raises(ValueError, match=says), torch.bfloat16)
        net.zero_grad()
        assert ht.plain_(net, torch.bfloat16)[2].weight.dtype == torch.bfloat16

    def test_a_weight_that_is_referenced(self, net):
        view = net[2].weight.t()
        self.stays(net, pytest.raises(RuntimeError, match="plain_: the weight is referenced by a live graph"))
        del view

    def test_a_swap_that_fails_nevertheless(self, net, monkeypatch):
        swap, seen = torch.utils.swap_tensors, []

        def failing(one, other):
            seen.append(one)
            if len(seen) == 2:
                raise RuntimeError("no")
            swap(one, other)

        monkeypatch.setattr(torch.utils, "swap_tensors", failing)
        hooked = []
        net[0].weight.register_hook(hooked.append)
        before, expected = self.parts(net), net(X).detach()
        with pytest.raises(RuntimeError, match=r"plain_: the weight is referenced .* \(no\)"):
            ht.plain_(net)
        assert [one is net[i].weight for one, i in zip(seen, (0, 2, 0), strict=True)] == [True] * 3
        assert self.parts(net) == before
        assert torch.equal(net(X), expected)
        net(X).sum().backward()
        assert len(hooked) == 1

    def test_values_that_cannot_be_made(self, net, monkeypatch):
        last = net[2].weight

        def failing(weight):
            if weight is last:
                raise RuntimeError("out of memory")
            return high_precision_values(weight)

        monkeypatch.setattr("hybridtensor.plain.high_precision_values", failing)
        self.stays(net, pytest.raises(RuntimeError, match="out of memory"))
