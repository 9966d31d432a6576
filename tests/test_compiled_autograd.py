"""Compiled autograd of layers that ran in eager code: the bits of a plain backward."""

import pytest
import torch
from tiers import covered
from torch import nn
from torch._dynamo import compiled_autograd

import hybridtensor as ht
from hybridtensor.testing import random_tensor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # graph breaks
RECIPES = ["bf16", "fp8", "fp8_delayed", "nvfp4"]
BETWEEN = [nn.SiLU, nn.Identity]  # the gradient of a layer goes to another one


class Eager(nn.Linear):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


def steps(device, layer, recipe, backward, persistent=False, between=nn.SiLU):
    """Return losses and gradients of two steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(layer(64, 128), between(), nn.Linear(128, 64)).to(device, torch.bfloat16)
    ht.quantize_(net, recipe, persistent=persistent)
    found = []
    for i in range(2):
        x = random_tensor(32, 64, seed=i, device=device).requires_grad_()
        found += [backward(net, x), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]
        net.zero_grad()
        ht.step_(net)
    return found


def plain(net, x):
    loss = net(x).float().square().mean()
    loss.backward()
    return loss.detach()


def compiled_backward(net, x):
    loss = net(x).float().square().mean()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    return loss.detach()


def compiled_step(net, x):
    with torch._dynamo.config.patch(compiled_autograd=True):
        return torch.compile(plain, backend="aot_eager")(net, x)


@pytest.mark.parametrize(
    ("recipe", "persistent", "between"),
    [
        *covered(RECIPES[:1], [False], BETWEEN),  # there are no faces to keep
        *covered(RECIPES[1:], [False, True], BETWEEN),
    ],
)
def test_a_backward_that_is_compiled_alone(device, recipe, persistent, between):
    expected = steps(device, nn.Linear, recipe, plain, persistent, between)
    found = steps(device, nn.Linear, recipe, compiled_backward, persistent, between)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_with_a_layer_between_graphs(device, recipe):
    assert all(map(torch.equal, steps(device, Eager, recipe, plain), steps(device, Eager, recipe, compiled_step)))


def test_step_after_says_that_compiled_autograd_does_not_tell_where_a_backward_ends():
    """Where optimizers step in hooks of gradients, a step ends with the backward."""
    net = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)), "fp8_delayed")
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
    after = ht.step_after(list(optimizers.values()), net)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    net(torch.ones(32, 64)).sum().backward()
    with pytest.raises(
        NotImplementedError, match="step_after: an optimizer steps in a hook of gradients under compiled"
    ):
        compiled_backward(net, torch.ones(32, 64))
    after.remove()
    net.zero_grad()
    compiled_backward(net, torch.ones(32, 64))
    ht.step_(net)
