"""Recomputation and offload of what a linear saves: gradients are bitwise those without."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hybridtensor as ht
from hybridtensor.testing import random_tensor

SPECS = ["bf16", "fp8", "fp8_rowwise", "fp8+high_precision", "fp8+dequantized", "fp8+save_original_input"]


def make(spec, persistent=False, device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).to(device, torch.bfloat16)
    return ht.quantize_(model, spec, persistent=persistent)


def gradients(model, run, device):
    model = copy.deepcopy(model)
    x = random_tensor(2, 6, 32, device=device).requires_grad_()
    y = run(model, x)
    y.backward(random_tensor(2, 6, 32, device=device, seed=1))
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def selective(model, x):
    def policy(context, op, *args, **kwargs):
        save = op is torch.ops.hybridtensor.scaled_mm.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


def offloaded(model, x):
    with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
        return model(x)


WAYS = {
    "non_reentrant": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "selective": selective,
    "save_on_cpu": offloaded,
    "nested": lambda model, x: checkpoint(offloaded, model, x, use_reentrant=False),
}


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_bitwise_those_without(spec, way, persistent, device):
    model = make(spec, persistent, device)
    expected = gradients(model, lambda model, x: model(x), device)
    for got, value in zip(gradients(model, WAYS[way], device), expected, strict=True):
        assert torch.equal(got, value)


def test_selective_checkpointing_does_not_repeat_what_the_policy_saves():
    calls = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    def count(run):
        calls.clear()
        with Spy():
            gradients(make("fp8"), run, "cpu")
        return calls.count(torch.ops.hybridtensor.scaled_mm.default)

    assert count(lambda model, x: model(x)) == 6
    assert count(WAYS["non_reentrant"]) == 8
    assert count(selective) == 6


def test_offload_moves_fp8_bytes():
    moved = []
    pack = lambda t: moved.append(t) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        make("fp8")(random_tensor(2, 6, 32).requires_grad_())
    kinds = {t.dtype for t in moved if type(t) is torch.Tensor and t.numel() > 1 and t.shape != (2, 6, 64)}
    assert kinds == {torch.float8_e4m3fn}
