"""Models cut by tensor parallelism, and twins that do by hand what each rank does."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import generator, here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridtensor as ht

WIDTH, HIDDEN, TOKENS = 64, 128, 64

# Whose scales a cut does not change: blocks along a row and square ones, and rows where only the other side is cut
SAME_WEIGHT_GRADIENTS = [
    "bf16", "mxfp8", "fp8_rowwise", "fp8_delayed", "fp8_block", "fp8_high_precision_backward",
    "fp8_rowwise_hp_grad_weight",
]  # fmt: skip


class MLP(nn.Module):
    """Column parallel twice, of one input, then row parallel."""

    def __init__(self, bias=False, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.up, self.side = (nn.Linear(width, hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return self.down(F.relu(self.up(x)) * self.side(x))


def make(bias=False, dtype=torch.bfloat16, **sizes):
    torch.manual_seed(0)
    return MLP(bias, **sizes).to(dtype)


def plan(**down):
    return {"up": ColwiseParallel(), "side": ColwiseParallel(), "down": RowwiseParallel(**down)}


def tp_mesh(size=2):
    return init_device_mesh(here(), (size,), mesh_dim_names=("tp",))


def cut(recipe, mesh, *, first="quantize", bias=False, persistent=False, styles=None, dtype=torch.bfloat16):
    """Return a model that was quantized and cut, in either order."""
    model = make(bias, dtype)

    def quantize():
        ht.quantize_(model, recipe, persistent=persistent)

    def parallelize():
        parallelize_module(model, mesh, plan() if styles is None else styles)

    for act in (quantize, parallelize) if first == "quantize" else (parallelize, quantize):
        act()
    return ht.set_mesh_(model, mesh)


def data(seed, *shape, dtype=torch.bfloat16):
    shape = shape or (TOKENS, WIDTH)
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def step(model, x, grad):
    """Return the output, the input's gradient and those of the parameters, whole."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(grad)
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    return y.detach(), x.grad, grads


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Halves(nn.Module):
    """What each of ``size`` ranks computes, one after the other on one device: layers of their own."""

    def __init__(self, recipe, size=2, bias=False, dtype=torch.bfloat16):
        super().__init__()
        model = make(bias, dtype)
        self.parts = nn.ModuleList()
        for rank in range(size):
            part = MLP(bias, hidden=HIDDEN // size).to(dtype)
            with torch.no_grad():
                for name in ("up", "side"):
                    for mine, whole_ in zip(
                        getattr(part, name).parameters(), getattr(model, name).parameters(), strict=True
                    ):
                        mine.copy_(whole_.chunk(size)[rank])
                part.down.weight.copy_(model.down.weight.chunk(size, dim=1)[rank])
                if bias:
                    part.down.bias.copy_(model.down.bias / size)
            self.parts.append(ht.quantize_(part, recipe))

    def forward(self, x):
        left, right = x * 1, x * 1  # gradients are added over ranks first, then those of the two layers
        return sum(part.down(F.relu(part.up(left)) * part.side(right)) for part in self.parts)

    def gradients(self):
        """Return the gradients of the whole parameters."""
        found = {}
        for name in ("up.weight", "side.weight", "up.bias", "side.bias"):
            parts = [dict(part.named_parameters()).get(name) for part in self.parts]
            if parts[0] is not None:
                found[name] = torch.cat([p.grad for p in parts])
        found["down.weight"] = torch.cat([part.down.weight.grad for part in self.parts], dim=1)
        if self.parts[0].down.bias is not None:
            found["down.bias"] = self.parts[0].down.bias.grad
        return found


def everywhere(text):
    """Return what all ranks say."""
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, text)
    return told
