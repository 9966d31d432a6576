"""Context parallel: ranks that share sequences train the bits of one process with the same attention."""

import pytest
import torch
import torch.distributed as dist
from sharding import own, same_bits, shard, split_like
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import hybridtensor as ht
from hybridtensor.dtensor import local

WIDTH, TOKENS = 128, 256


class Attention(nn.Module):
    """A residual block of causal attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def make(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).bfloat16()
    return model if recipe is None else ht.quantize_(model, recipe)


def sequences(step):
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator("cuda").manual_seed(step)).bfloat16()


def loss_of(model, step, mesh=None):
    """Return the mean loss over all ranks, after backward."""
    x = sequences(step)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # one that torch's ring attention knows
        if mesh is None:
            loss = model(x).float().square().mean()
            loss.backward()
        else:
            with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
                loss = model(x).float().square().mean()
                loss.backward()
    return loss.detach()


def trains(rank, recipes, is_compiled):
    """Compare FSDP2 with a twin that every rank has whole, whose gradients are averaged by hand; both are split."""
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
    for recipe in recipes:
        model, twin, single = shard(make(recipe), mesh), make(recipe), make(recipe)
        if recipe is not None:
            ht.set_mesh_(model, mesh)
        if is_compiled:
            for block in model:
                block.compile()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin)]
        for step in range(2):
            losses = [loss_of(m, step, mesh) for m in (model, twin)]
            if not is_compiled:
                assert same_bits(*losses), (step, losses)
            torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
            if (
                step == 0
            ):  # one process that has all of the sequences; attention that is put together rounds differently
                mean = losses[0].clone()
                dist.all_reduce(mean, dist.ReduceOp.AVG)
                torch.testing.assert_close(mean, loss_of(single, step), rtol=1e-2, atol=0)
            for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
                dist.all_reduce(q[1].grad, dist.ReduceOp.AVG)
                part = split_like(q[1].grad, p.grad)
                torch.testing.assert_close(own(p.grad), part, rtol=1e-2, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
                local(p.grad).copy_(part)
            for m, optimizer in zip((model, twin), optimizers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                if recipe is not None:
                    ht.step_(m)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert same_bits(own(p), split_like(own(q), p))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_training(two, is_compiled):
    if two.device == "cpu":
        pytest.skip("torch's ring attention has kernels of GPUs only")
    two.run(trains, [None, "bf16", "fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"], is_compiled)
