"""Recomputation and offload of what a linear saves: gradients are bitwise those without."""

import copy
import functools

import pytest
import torch
from graphs import Graphs
from tiers import covered
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hybridtensor as ht
from hybridtensor.testing import random_tensor

QUANTIZE, SCALED_MM = torch.ops.hybridtensor.quantize.default, torch.ops.hybridtensor.scaled_mm.default
NAMED = {"quantize": [QUANTIZE], "scaled_mm": [SCALED_MM], "both": [QUANTIZE, SCALED_MM]}
SPECS = ["bf16", "fp8", "fp8_rowwise", "fp8+high_precision", "fp8+dequantized", "fp8+save_original_input"]


def make(spec, persistent=False, device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).to(device, torch.bfloat16)
    return ht.quantize_(model, spec, persistent=persistent)


def gradients(model, run, device):
    model = copy.deepcopy(model)
    x = random_tensor(2, 16, 32, device=device).requires_grad_()
    y = run(model, x)
    y.backward(random_tensor(2, 16, 32, device=device, seed=1))
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def _policy(named, then, context, op, *args, **kwargs):
    return then if op in named else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model, x, named=(SCALED_MM,), then=CheckpointPolicy.MUST_SAVE):
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, named, then))
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


@pytest.mark.parametrize(("spec", "way", "persistent"), covered(SPECS, [*WAYS], [False, True]), ids=str)
def test_gradients_are_bitwise_those_without(spec, way, persistent, device):
    model = make(spec, persistent, device)
    expected = gradients(model, lambda model, x: model(x), device)
    for got, value in zip(gradients(model, WAYS[way], device), expected, strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize("spec", ["fp8_delayed", "fp8_delayed/bf16/fp8"])
@pytest.mark.parametrize("way", ["selective", "non_reentrant", "nested"])
def test_steps_with_delayed_scales(spec, way, device):
    """From the second step on, records of amaxes take memory that is spare: both passes call the same operators."""
    nets, losses = (make(spec, device=device), make(spec, device=device)), []
    for net, run in zip(nets, (WAYS[way], lambda model, x: model(x)), strict=True):
        optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), []
        for step in range(3):
            loss = run(net, random_tensor(2, 16, 32, seed=step, device=device).requires_grad_()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ht.step_(net)
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]


class Spy(torch.utils._python_dispatch.TorchDispatchMode):
    """Records which operators run."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("spec", "named", "then"),
    covered(
        ["fp8_delayed", "nvfp4", "fp8+dequantized"],
        [*NAMED],
        [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE],
    ),
    ids=lambda value: getattr(value, "name", value),
)
class TestPoliciesThatNameOurOperators:
    """In two layers, forward quantizes two inputs and two weights; ``saved`` says which of it is not done again."""

    def test_gradients_are_bitwise_those_without(self, spec, named, then, device):
        model = make(spec, device=device)
        run = functools.partial(selective, named=NAMED[named], then=then)
        expected = gradients(model, lambda model, x: model(x), device)
        for way in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
            for got, value in zip(gradients(model, way, device), expected, strict=True):
                assert torch.equal(got, value)
        torch._dynamo.reset()

    def test_what_is_saved_is_not_done_again(self, spec, named, then):
        counts = []
        for run in (lambda model, x: model(x), functools.partial(selective, named=NAMED[named], then=then)):
            with Spy() as spy:
                gradients(make(spec), run, "cpu")
            counts.append([spy.calls.count(op) for op in (QUANTIZE, SCALED_MM)])
        saved = NAMED[named] if then is CheckpointPolicy.MUST_SAVE else []
        again = [0 if QUANTIZE in saved else 4, 0 if SCALED_MM in saved else 2]
        assert counts[1] == [plain + more for plain, more in zip(counts[0], again, strict=True)]

    def test_what_is_saved_is_not_in_the_compiled_backward(self, spec, named, then):
        graphs = Graphs()
        run = torch.compile(
            functools.partial(selective, named=NAMED[named], then=then), fullgraph=True, backend=graphs.backend()
        )
        gradients(make(spec), run, "cpu")
        torch._dynamo.reset()
        saved = NAMED[named] if then is CheckpointPolicy.MUST_SAVE else []
        of_weights, of_gradients = [2, 0], [0, 0] if spec == "fp8+dequantized" else [2, 4]  # or in high precision
        product = 0 if SCALED_MM in saved else 1  # nothing needs the last output
        again = [0 if QUANTIZE in saved else 2 + product, product]
        for op, *counts in zip((QUANTIZE, SCALED_MM), of_weights, of_gradients, again, strict=True):
            assert graphs.count("backward", op) == sum(counts)


def test_offload_moves_fp8_bytes():
    moved = []
    pack = lambda t: moved.append(t) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        make("fp8")(random_tensor(2, 6, 32).requires_grad_())
    kinds = {t.dtype for t in moved if type(t) is torch.Tensor and t.numel() > 1 and t.shape != (2, 6, 64)}
    assert kinds == {torch.float8_e4m3fn}
