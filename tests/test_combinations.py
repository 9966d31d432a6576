"""What runs around a model, together: compiling, checkpointing, offloading, autocast, with every recipe.

Oracle: the same steps eagerly, without checkpointing and offloading, bit for bit.
"""

import contextlib
import functools

import programs
import pytest
import torch
from programs import RECIPES, WIDTH, Attention, Block, Mlp, Routed, Stack
from tiers import LONG, by_group, few
from torch import nn
from torch.autograd.graph import save_on_cpu

import hybridtensor as ht

COMPILED = [False, True]
CHECKPOINTED = [None, True, False]  # use_reentrant
OFFLOADED = [None, "save_on_cpu", "offload_activations"]
AUTOCAST = [False, True]
GROUPS = [RECIPES[i::10] for i in range(10)]  # of three recipes each at most, which take turns
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not support reentrant:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor:UserWarning"
    ),  # Dynamo's, of what follows a break
]


def small():
    return Stack(Block(Attention(True), nn.RMSNorm(WIDTH)), Block(Mlp(False, False), nn.LayerNorm(WIDTH)))


def steps(recipe, device, compiled=False, checkpointed=None, offloaded=None, autocast=False, make=small, width=WIDTH):
    """Return losses, gradients and state of a few steps with small losses."""
    torch.manual_seed(0)
    model = make()
    ht.quantize_(model.to(device, torch.float32 if autocast else torch.bfloat16), recipe)
    model.reentrant = checkpointed
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-2), []
    if compiled:
        torch._dynamo.reset()
        for block in model:
            block.compile(backend="aot_eager")
    around = {
        None: contextlib.nullcontext,
        "save_on_cpu": save_on_cpu,
        "offload_activations": lambda: ht.offload.offload_activations(model, keep_last=0, min_bytes=0),
    }[offloaded]
    for step in range(3 if LONG else 2):
        x = torch.randn(2, 24, width, generator=torch.Generator().manual_seed(step))
        x = x.to(device, next(model.parameters()).dtype).requires_grad_()
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast), around():
            y = model(x)
        (y.float().square().mean() * 1e-3).backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
    return found + [buffer.clone() for buffer in model.buffers()]


expected = functools.cache(steps)


@pytest.mark.parametrize(
    ("recipe", "compiled", "checkpointed", "offloaded", "autocast"),
    by_group(GROUPS, COMPILED, CHECKPOINTED, OFFLOADED, AUTOCAST),
)
def test_together(recipe, compiled, checkpointed, offloaded, autocast, device):
    found = steps(recipe, device, compiled, checkpointed, offloaded, autocast)
    oracle = expected(recipe, device, autocast=autocast)
    assert [i for i, (a, b) in enumerate(zip(found, oracle, strict=True)) if not torch.equal(a, b)] == []


def wide():
    """With experts, of layers whose outputs are multiples of what is rotated together."""
    return Stack(*(Block(inner, nn.RMSNorm(programs.WIDTH)) for inner in (Mlp(False, False), Routed())))


@pytest.mark.parametrize(
    ("compiled", "checkpointed", "offloaded"),
    [  # each takes its time
        (True, True, "offload_activations"),
        (False, False, "save_on_cpu"),
        *few([(True, None, "offload_activations"), (True, True, None)], 0),
    ],
)
def test_signs_of_each_step_together(compiled, checkpointed, offloaded, device, monkeypatch):
    """Without autocast, under which such experts do not run."""
    monkeypatch.setattr(programs, "WIDTH", 128)
    found = steps("quartet2", device, compiled, checkpointed, offloaded, make=wide, width=128)
    oracle = expected("quartet2", device, make=wide, width=128)
    assert [i for i, (a, b) in enumerate(zip(found, oracle, strict=True)) if not torch.equal(a, b)] == []
