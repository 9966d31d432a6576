"""Eager code between the graphs of a compiled function uses a model, and models that ran compiled are pickled."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hybridtensor as ht

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
USES = {
    "untyped_storage": lambda net: [p.untyped_storage() for p in net.parameters()],
    "state_dict": lambda net: torch.save(net.state_dict(), io.BytesIO()),
    "torch.save": lambda net: torch.save(net, io.BytesIO()),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "AveragedModel": AveragedModel,
}


def make(recipe, persistent=False):
    torch.manual_seed(0)
    torch._dynamo.reset()
    return ht.quantize_(nn.Sequential(nn.Linear(64, 64)).bfloat16(), recipe, persistent=persistent)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Dynamo, which says that the function breaks the graph
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_between_two_graphs(use, persistent):
    if use is AveragedModel and persistent:
        pytest.skip("persistent weights have no average")
    net = make("fp8", persistent)

    def between():
        torch._dynamo.graph_break()
        use(net)

    @torch.compile(backend="aot_eager")
    def forward(x):
        y = net(x)
        torch._dynamo.graph_break()
        between()
        return y

    y = forward(X)
    assert torch.equal(y, net(X))
    y.sum().backward()


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "fp8/bf16/bf16"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_model_that_was_compiled_can_be_pickled(recipe, persistent):
    net = make(recipe, persistent)
    torch.compile(net, backend="aot_eager")(X)
    assert torch.equal(pickle.loads(pickle.dumps(net))(X), net(X))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), net(X))
