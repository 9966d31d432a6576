"""``rms_norm``. Oracle: the definition in float64, and torch's own function where one is asked for."""

import pytest
import torch
import torch.nn.functional as F
from kernels import require_kernels
from torch import nn

import hybridtensor as ht
from hybridtensor.ops import norm
from hybridtensor.testing import random_tensor, saved_for_backward

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 16), (5, 33), (2, 3, 128), (300, 1024), (3, 4096)]
EPS = 1e-5


def operands(shape, dtype, device):
    """Return the input, the weight and the gradient of what is returned."""
    x, grad = (random_tensor(*shape, seed=i, device=device).clamp(-8, 8).to(dtype) for i in range(2))
    return x, 1 + random_tensor(1, shape[-1], seed=2, device=device)[0].to(dtype) / 8, grad


def gradients(function, x, weight, grad):
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    y = function(x, weight)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


def exactly(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def assert_near(made, x, weight, grad):
    """Compare with float64: half a step of the dtype from the one rounding, and a sum of fp32 in front of it.

    An fp32 sum of n terms, taken pairwise or in n / 64 steps by 64 lanes, is off by at most (n / 64 + 6) steps of
    its terms' magnitudes, of which the mean square and the inner product have n features, the weight's gradient n rows.
    """
    dtype, (rows, columns) = x.dtype, (x[..., 0].numel(), x.shape[-1])
    x, weight, grad = (t.double() for t in (x, weight, grad))
    expected = gradients(exactly, x, weight, grad)
    half, ulp = torch.finfo(dtype).eps / 2, 2.0**-24
    of_sum = (columns / 64 + 16) * ulp
    value = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    factor = (value / x).nan_to_num(nan=0.0).abs().amax(-1, keepdim=True)
    of_x = factor * ((grad * weight).abs() + value.abs() * (grad * weight * value).abs().mean(-1, keepdim=True))
    of_weight = (grad * value).abs().flatten(0, -2).sum(0) * (rows / 64 + 16 + columns / 64) * ulp
    allowed = [
        (half + of_sum) * expected[0].abs(), half * expected[1].abs() + 4 * of_sum * of_x,
        half * expected[2].abs() + of_weight,
    ]  # fmt: skip
    for got, want, most in zip(made, expected, allowed, strict=True):
        assert got.dtype == dtype
        smallest = torch.finfo(dtype).smallest_normal  # below it steps do not shrink
        worst = ((got.double() - want).abs() - most - smallest).max()
        assert worst <= 0, f"{worst:.3g} more than allowed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, dtype, device):
    given = operands(shape, dtype, device)
    assert_near(gradients(lambda x, w: ht.rms_norm(x, w, EPS), *given), *given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 33), (70, 1024)], ids=str)
def test_kernels_against_float64(shape, dtype, device):
    require_kernels(device)
    x, weight, grad = given = operands(shape, dtype, device)
    y, factor, amax = norm.norm_cuda(x, weight, EPS, True)
    assert_near([y, *norm.norm_backward_cuda(grad, x, weight, factor)], *given)
    assert amax.item() == y.float().abs().max().item()
    assert torch.equal(norm.norm_factors_cuda(x, EPS), factor)
    taken = torch.tensor(EPS, dtype=torch.float32).item()  # as a kernel takes it
    assert torch.equal(norm.factors(x, taken), factor)


def test_strided_rows_and_too_many_columns(device):
    x, weight, grad = operands((6, 64), torch.bfloat16, device)
    for view in (x[:, :32], x[:, ::2], x[:3].t()[:32]):
        of_view = weight[: view.shape[1]]
        upstream = grad.flatten()[: view.numel()].view(view.shape)
        made = gradients(lambda a, w: ht.rms_norm(a, w, EPS), view, of_view, upstream)
        again = gradients(lambda a, w: ht.rms_norm(a, w, EPS), view.contiguous(), of_view, upstream)
        assert all(map(torch.equal, made, again))
    wide = torch.ones(2, norm.MOST_COLUMNS + 1, device=device)
    assert torch.equal(ht.rms_norm(wide, None, EPS), F.rms_norm(wide, wide.shape[-1:], None, EPS))


def test_no_weight_and_no_eps(device):
    x, _, _ = operands((8, 64), torch.bfloat16, device)
    ones = torch.ones(64, dtype=torch.bfloat16, device=device)
    expected = ht.rms_norm(x, ones, torch.finfo(torch.float32).eps)
    assert torch.equal(ht.rms_norm(x), expected)
    torch.testing.assert_close(ht.rms_norm(x), F.rms_norm(x, (64,)), rtol=2**-7, atol=0)


def test_definition_and_kernel_have_one_eps(monkeypatch):
    """Kernels take fp32; 1e-5 is none."""
    seen, definition = [], norm.rms_norm
    monkeypatch.setattr(norm, "rms_norm", lambda *given: seen.append(given[2]) or definition(*given))
    ht.rms_norm(torch.ones(2, 8), None, 1e-5)
    assert seen == [torch.tensor(1e-5, dtype=torch.float32).item()] != [1e-5]


def test_no_rows(device):
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.ones(64, dtype=torch.bfloat16, device=device, requires_grad=True)
    ht.rms_norm(x, weight).sum().backward()
    assert x.grad.shape == (0, 64)
    assert not weight.grad.any()


def test_only_the_input_and_factors_are_saved():
    x, weight, _ = operands((64, 256), torch.bfloat16, "cpu")
    with saved_for_backward() as saved:
        ht.rms_norm(x.requires_grad_(), weight.requires_grad_(), EPS)
    assert saved.nbytes() == x.nbytes + weight.nbytes + 64 * 4


def test_gradients_of_gradients():
    x, weight, _ = operands((4, 8), torch.float32, "cpu")
    x, weight = (t.double().float().requires_grad_() for t in (x, weight))

    def second(function, *given):
        first = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    expected = second(exactly, *(t.detach().double().requires_grad_() for t in (x, weight)))
    for got, want in zip(second(lambda a, w: ht.rms_norm(a, w, EPS), x, weight), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_one_gradient_alone():
    x, weight, grad = operands((4, 8), torch.bfloat16, "cpu")
    ht.rms_norm(x.requires_grad_(), weight, EPS).backward(grad)
    assert weight.grad is None
    of_x = x.grad.clone()
    x.grad = None
    ht.rms_norm(x, weight.requires_grad_(), EPS).backward(grad)
    assert torch.equal(x.grad, of_x)


@pytest.mark.filterwarnings("default")
def test_in_graphs_and_transforms_it_is_torchs():
    x, weight, _ = operands((4, 32), torch.float32, "cpu")
    expected = F.rms_norm(x, (32,), weight, EPS)
    compiled = torch.compile(ht.rms_norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, EPS), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.func.vmap(lambda row: ht.rms_norm(row, weight, EPS))(x), expected)
    torch._dynamo.reset()


def test_in_place_of_a_module(device):
    torch.manual_seed(0)
    layer = nn.RMSNorm(256, eps=EPS).to(device, torch.bfloat16)
    x = random_tensor(32, 256, device=device)
    torch.testing.assert_close(ht.rms_norm(x, layer.weight, layer.eps), layer(x), rtol=2**-7, atol=0)


@pytest.mark.parametrize("shape", [(32, 256), (2, 16, 256)])
def test_what_is_returned_is_written_in_place(shape):
    x = random_tensor(*shape).requires_grad_()
    y = ht.rms_norm(x)
    y += 1
    assert torch.equal(y, ht.rms_norm(x) + 1)
    y.sum().backward()


@pytest.mark.parametrize(
    ("x", "weight", "error", "told"),
    [
        (torch.ones(2, 8), torch.ones(4), ValueError, r"a weight of 8 elements.* is required, got .*\[4\]"),
        (torch.ones(2, 8), torch.ones(8).bfloat16(), ValueError, "torch.bfloat16 .* for torch.float32"),
        (torch.ones(()), None, ValueError, "got a scalar"),
        (torch.ones(2, dtype=torch.int32), None, TypeError, "x: bfloat16, float16 or float32"),
        (torch.ones(2, 8), "x", TypeError, "weight: a tensor is required"),
    ],
)
def test_wrong_use(x, weight, error, told):
    with pytest.raises(error, match=told):
        ht.rms_norm(x, weight)
