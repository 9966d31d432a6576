"""What the seam of the linear is for: other layers use its operands and products as they are.

A grouped linear over a list of weights, and a linear whose input a fused norm quantizes, each in under 60
lines that use no private name of this package. Oracle: a converted ``nn.Linear`` per group, or after a plain
norm; equal bit for bit.
"""

import copy
import inspect

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor.linear import Backward, Needs, Operand, input_operand, linear, output, weight_operand
from hybridtensor.state import Context

RECIPES = ["fp8", "mxfp8+dequantized", "fp8+save_original_input", "fp8_delayed"]
SIZES = [32, 0, 65, 7, 96]


class Grouped(torch.autograd.Function):
    """Multiply groups of rows by a weight each: ``x [T, K]``, weights ``[N, K]``."""

    @staticmethod
    def forward(ctx, x, sizes, *weights):
        needs = Needs(ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:]), False)
        outs, ctx.groups, saved = [], [], []
        for rows, weight in zip(x.split(sizes), weights, strict=True):
            context = Context("input", weight.state)
            left = input_operand(rows, rows, weight, weight.config, needs, context)
            right = weight_operand(weight, needs, x.dtype, context, weight.context)
            outs.append(output(left.rowwise(), right.rowwise(), None, x.dtype, direct=False))
            backward, tensors = Backward.save(left, right, weight.config, needs, context)
            ctx.groups.append((backward, len(tensors)))
            saved += tensors
        ctx.save_for_backward(*saved)
        ctx.sizes = sizes
        return torch.cat(outs)

    @staticmethod
    def backward(ctx, grad_output):
        saved, of_rows, of_weights = list(ctx.saved_tensors), [], []
        for grad, (backward, count) in zip(grad_output.split(ctx.sizes), ctx.groups, strict=True):
            grads = backward.gradients(grad, saved[:count])
            saved = saved[count:]
            of_rows.append(grads.input)
            of_weights.append(grads.weight)
        return torch.cat(of_rows), None, *of_weights


def grouped_linear(x, weights, sizes):
    """Return the products of groups of rows with a weight each."""
    return Grouped.apply(x, sizes, *weights)


class NormThatQuantizes(torch.autograd.Function):
    """Normalize rows and quantize them, as one kernel would; the faces are handed over."""

    @staticmethod
    def forward(ctx, x, config, state, handed):
        scale = x.float().square().mean(dim=-1, keepdim=True).add(1e-6).rsqrt()
        y = (x.float() * scale).to(x.dtype)
        columnwise = not config.save_original_input
        context = Context("input", state)
        made = {"rowwise": True, "columnwise": columnwise, "dtype": y.dtype, "context": context}
        handed += config.input.faces(y, **made)
        ctx.save_for_backward(x, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        y = x.float() * scale
        inner = (grad.float() * y).mean(dim=-1, keepdim=True)
        return ((grad.float() - y * inner) * scale).to(grad.dtype), None, None, None


def norm_then_linear(x, weight):
    """Return the linear layer of the normalized ``x``, quantized where it is made."""
    config, handed = weight.config, []
    y = NormThatQuantizes.apply(x, config, weight.state, handed)
    row, column = handed
    if config.save_original_input:  # its columnwise face is made in backward, of what is kept
        context = Context("input", weight.state)
        made = {"rowwise": False, "columnwise": True, "dtype": y.dtype, "context": context}
        column = config.input.faces(y.detach(), **made)[1]
    return linear(y, weight, operand=Operand(row, column))


def layers(recipe, count, device, *, out=64):
    """Return converted layers, and copies of them."""
    torch.manual_seed(0)
    made = nn.ModuleList(nn.Linear(128, out, bias=False) for _ in range(count)).to(device, torch.bfloat16)
    ht.quantize_(made, recipe)
    return made, copy.deepcopy(made)


def end_step_alike(*runs, grad):
    """Go back from output, input and layers of two runs, and end the step: gradients and states are the same."""
    ended = []
    for out, x, modules in runs:
        out.backward(grad)
        gradients = [x.grad, *(layer.weight.grad for layer in modules)]
        ht.step_(modules)
        modules.zero_grad()
        ended.append([*gradients, *(t for layer in modules for t in layer.state_dict().values())])
    assert all(torch.equal(x, y) for x, y in zip(*ended, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_grouped_linear(recipe, device):
    ours, theirs = layers(recipe, len(SIZES), device)
    for step in range(2):
        a = torch.randn(sum(SIZES), 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        grad = torch.randn(sum(SIZES), 64, device=device, dtype=torch.bfloat16)
        got = grouped_linear(a, [layer.weight for layer in ours], SIZES)
        expected = torch.cat([layer(rows) for layer, rows in zip(theirs, b.split(SIZES), strict=True)])
        assert torch.equal(got, expected), step
        end_step_alike((got, a, ours), (expected, b, theirs), grad=grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_norm_that_hands_over_its_faces(recipe, device):
    ours, theirs = layers(recipe, 1, device)
    for step in range(2):
        a = torch.randn(4, 32, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        got = norm_then_linear(a, ours[0].weight)
        nothing = ht.recipes.bf16()
        expected = theirs[0](NormThatQuantizes.apply(b, nothing, None, []))
        assert torch.equal(got, expected), step
        end_step_alike((got, a, ours), (expected, b, theirs), grad=torch.randn_like(got))


PARTS = {"grouped": (Grouped, grouped_linear), "norm": (NormThatQuantizes, norm_then_linear)}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_each_is_short_and_uses_no_private_name(parts):
    lines = [line for part in parts for line in inspect.getsource(part).splitlines()]
    assert len(lines) < 60
    assert all(len(line) <= 100 for line in lines)
