"""torchtitan's mixture of experts, as it is written: router, dispatcher and experts.

Oracle: the same module whose grouped products are a loop over linear layers, bitwise; on two ranks the same module on
one, but for the order of sums.
"""

import copy
import warnings

import processes
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hybridtensor as ht
from hybridtensor.subclasses import MasterWeight

moe = pytest.importorskip("torchtitan.models.common.moe", reason="needs torchtitan: make test-frameworks")
dispatching = pytest.importorskip("torchtitan.models.common.token_dispatcher", reason="needs torchtitan")
torchtitan_utils = pytest.importorskip("torchtitan.distributed.utils", reason="needs torchtitan")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
EXPERTS, DIM, HIDDEN = 4, 64, 128


def make(dispatcher=dispatching.LocalTokenDispatcher):
    gate = moe.Linear.Config(in_features=DIM, out_features=EXPERTS)
    routed = moe.RoutedExperts.Config(
        inner_experts=moe.GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS),
        token_dispatcher=dispatcher.Config(num_experts=EXPERTS, top_k=2),
    )
    router = moe.TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=2)
    made = moe.MoE.Config(num_experts=EXPERTS, routed_experts=routed, router=router).build()
    torch.manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    made.expert_bias_E.zero_()
    return made


def one_by_one(self, *, A, B_t, offs):  # noqa: N803  (torchtitan's names)
    """Multiply each group with its expert as a linear layer would."""
    weight, ends = B_t.transpose(-2, -1), offs.tolist()
    return torch.cat([F.linear(A[i:j], weight[e]) for e, (i, j) in enumerate(zip([0, *ends], ends, strict=False))])


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_rowwise", "nvfp4_row_scaled_fwd_mxfp8_bwd"])
def test_experts_are_quantized_as_linear_layers(recipe, monkeypatch):
    model = ht.quantize_(make(), ht.recipes.by_type(grouped_linear=recipe))
    experts = model.routed_experts.inner_experts
    assert all(isinstance(p, MasterWeight) for p in experts.parameters())
    assert not isinstance(model.router.gate.weight, MasterWeight)
    results = []
    for loop in (False, True):
        if loop:
            monkeypatch.setattr(moe.GroupedExperts, "_grouped_mm", one_by_one)
        x = torch.randn(2, 48, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        results.append([y.detach(), *(p.grad for p in experts.parameters())])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def on_two_ranks(rank):
    """Experts spread over the ranks of an all-to-all, whose tokens torchtitan exchanges."""
    warnings.simplefilter("ignore")  # of torchtitan
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    plain, one = make(dispatching.AllToAllTokenDispatcher), make()
    one.load_state_dict(plain.state_dict())
    recipe = ht.recipes.by_type(grouped_linear="mxfp8")
    many = ht.quantize_(copy.deepcopy(plain), recipe)
    ht.quantize_(one, recipe)
    experts = many.routed_experts.inner_experts
    for name, parameter in list(experts.named_parameters()):
        cut = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(cut))
    many.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    x = torch.randn(2, 48, DIM, generator=torch.Generator().manual_seed(1))
    torchtitan_utils.set_spmd_backend("default")  # a mesh that the dispatcher was given
    y = one(x)
    mine = many(x[rank : rank + 1])
    torch.testing.assert_close(mine, y[rank : rank + 1])
    mine.sum().backward()
    y.sum().backward()
    whole = one.routed_experts.inner_experts.w1_EFD.grad
    torch.testing.assert_close(experts.w1_EFD.grad.to_local(), whole.chunk(2)[rank], rtol=2**-7, atol=1e-3)


def test_on_two_ranks(tmp_path):
    processes.run(on_two_ranks, 2, tmp_path)
