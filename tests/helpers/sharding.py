"""Models that FSDP2 shards, their unsharded twins, and steps of both that are compared bit for bit."""

import functools

import torch
import torch.distributed as dist
from any_layer import ANY_LAYER
from processes import generator, here
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

import hybridtensor as ht
from hybridtensor.distributed.fsdp.payload import Sending, layout_of
from hybridtensor.dtensor import local
from hybridtensor.subclasses.structure import flatten

RECIPES = sorted(ANY_LAYER)


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def make(spec, *, width=64, hidden=128, blocks=2, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, hidden) for _ in range(blocks)))
    return ht.quantize_(model.to(dtype), spec)


def with_weight(**faces):
    """A config whose weight has quantizers that no named recipe gives it."""
    identity = ht.IdentityQuantizer()
    return ht.HybridConfig(input=identity, weight=ht.HybridQuantizer(**faces), grad_output=identity)


def shard(model, mesh, **options):
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step, *, tokens=64, width=64):
    return torch.randn(tokens, width, generator=generator(step))


def mesh_of(rank, size):
    """The first ranks, or this rank alone."""
    return init_device_mesh(here(), (size,)) if size > 1 else alone(rank)


@functools.cache
def own_group(rank):
    return [dist.new_group([r]) for r in range(dist.get_world_size())][rank]


def of_first_rank(rank, function, *args):
    """Return on every rank what a function returns on the first one, where it need not run on all. Tensors of the first
    rank's GPU are copied to that of each rank.
    """
    found = [function(*args) if rank == 0 else None]
    dist.broadcast_object_list(found)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cuda() if tensor.is_cuda else tensor, found[0])


def alone(rank):
    return DeviceMesh.from_group(own_group(rank), here())


def own(parameter):
    """This rank's part of a parameter or gradient, plain."""
    values = local(parameter)
    return (values.master if isinstance(values, ht.MasterWeight) else values).detach()


def whole(parameter):
    """All of a sharded parameter or gradient, plain."""
    if parameter is None:
        return None
    values = own(parameter)
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    ).full_tensor()


def same_bits(a, b):
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)


def assert_faces_equal(mine, expected):
    for one, other in zip(flatten(mine)[0], flatten(expected)[0], strict=True):
        assert same_bits(one, other)


def train(rank, model, twin, *, steps=2, cls=torch.optim.AdamW, lr=0.05, grad_input=False):
    """Train both on the same batch, sharded over ranks or whole, and compare after every step: the second one has what
    the first one wrote, as have all others."""
    optimizers = [cls(m.parameters(), lr=lr) for m in (model, twin)]
    for _ in training(rank, model, twin, optimizers, steps=steps, grad_input=grad_input):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert same_bits(own(p), split_like(own(q), p))


def training(rank, model, twin, optimizers, *, steps=2, grad_input=False):
    """Train both on the same batch, compare losses and gradients, and yield after every step.

    Every rank sees the whole batch, so that the mean of the gradients is that of the twin, and compares its own part.
    """
    same_draws(rank, model, twin)
    for step in range(steps):
        losses = []
        for m, o in zip((model, twin), optimizers, strict=True):
            o.zero_grad()
            loss = m(batch(step).requires_grad_(grad_input)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert same_bits(*losses), (step, losses)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                part = split_like(q.grad, p.grad)
                torch.testing.assert_close(own(p.grad), part, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
                local(p.grad).copy_(part)  # the mean over ranks rounds; the rest is exact
        for m, o in zip((model, twin), optimizers, strict=True):
            o.step()
            ht.step_(m)
        yield


def same_after_changes(model, twin, recipes):
    """Compare what both return without gradients after each change of their recipe."""
    for recipe in recipes:
        outs = []
        for m in (model, twin):
            ht.set_config_(m, recipe)
            with torch.no_grad():
                outs.append(m(batch(0)))
        assert same_bits(*outs), recipe


def same_draws(rank, model, twin):
    """Have every rank round the same gradients with the same random numbers, as if it were the only one."""
    if any(p.config.stochastic for p in twin.parameters() if isinstance(p, (ht.MasterWeight, ht.HybridTensor))):
        for m in (model, twin):
            ht.set_data_parallel_group_(m, own_group(rank))


def split_like(values, sharded):
    """This rank's part of values that all ranks have, without sending any; on the CPU where FSDP2 offloads it."""
    if not isinstance(sharded, DTensor):
        return values
    part = distribute_tensor(values, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return local(part).to(local(sharded).device)


def bytes_per_rank(plan, rowwise, columnwise, dtype=torch.bfloat16, master=torch.float32):
    """Bytes that a rank sends for the faces asked for; dtypes of the computation and of the weight."""
    sent = plan.sends(rowwise, columnwise)
    if sent == ("whole",):
        return plan.rows * plan.columns * plan.whole_dtype(dtype, master).itemsize
    return layout_of((Sending(plan, sent, dtype),)).nbytes
