"""The rule of dispatch: ``mm(a, b)`` multiplies ``a.rowwise`` by ``b.columnwise``, in every mix of operands.

Oracle: float64 products of the dequantized faces, within the derived bound.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hybridtensor as ht
from hybridtensor import Float8Quantizer, HybridQuantizer, HybridTensor, IdentityQuantizer
from hybridtensor.testing import product_bound, random_tensor

TENSOR, ROW, IDENTITY = Float8Quantizer(), Float8Quantizer(granularity="row"), IdentityQuantizer()
DEQUANTIZED = HybridQuantizer(TENSOR, IDENTITY, "rowwise_dequantized")
HOPPER_ACCUMULATE = 2.0**-13


def operand(kind, x, side):
    """Return ``x`` as an operand of a kind, and the exact values that a product with it on that side uses."""
    if kind == "plain":
        return x, x.double()
    quantizer = {"identity": IDENTITY, "leaf": ROW, "tensor": TENSOR, "row": ROW, "dequantized": DEQUANTIZED}[kind]
    hybrid = quantizer.quantize(x)
    face = hybrid.rowwise if side == "left" else hybrid.columnwise
    exact = face.dequantize(torch.float32 if kind not in ("identity", "dequantized") else None).double()
    if kind == "dequantized" and side == "left":
        exact = face.dequantize(torch.float32).double()
    return (face if kind == "leaf" else hybrid), exact


KINDS = ["plain", "identity", "leaf", "tensor", "row", "dequantized"]


@pytest.mark.parametrize(("left", "right"), list(itertools.product(KINDS, KINDS)))
def test_every_mix_of_operands(left, right, device):
    a, exact_a = operand(left, random_tensor(16, 32, device=device, seed=1), "left")
    b, exact_b = operand(right, random_tensor(32, 48, device=device, seed=2), "right")
    bias = random_tensor(48, device=device)
    accumulate = 2.0**-24 if device == "cpu" else HOPPER_ACCUMULATE
    bound = product_bound(exact_a, exact_b, torch.bfloat16, accumulate=accumulate, summands=1)
    for got in (torch.mm(a, b), a @ b, a.mm(b), torch.matmul(a, b)):
        assert type(got) is torch.Tensor
        assert ((got.double() - exact_a @ exact_b).abs() <= bound).all()
    with_bias = torch.addmm(bias, a, b).double()
    assert ((with_bias - exact_a @ exact_b - bias.double()).abs() <= 2 * bound + 2**-7 * bias.double().abs()).all()
    if (left, right) != ("plain", "plain"):
        assert torch.equal(torch.addmm(bias, a, b, beta=2, alpha=3), 2 * bias + 3 * torch.mm(a, b))
        assert torch.equal(torch.addmm(bias * torch.nan, a, b, beta=0), torch.mm(a, b))


def test_identity_products_are_bitwise_plain_ones(device):
    a, b = random_tensor(5, 16, device=device, seed=1), random_tensor(16, 7, device=device, seed=2)
    bias = random_tensor(7, device=device)
    x, y = IDENTITY.quantize(a), IDENTITY.quantize(b)
    assert torch.equal(x @ y, a @ b)
    assert torch.equal(torch.addmm(bias, x, y), torch.addmm(bias, a, b))


def test_t_swaps_the_faces():
    x = HybridQuantizer(ROW, Float8Quantizer(dtype="e5m2")).quantize(random_tensor(6, 8))
    y = x.t()
    assert y.shape == (8, 6)
    assert y.rowwise.format == x.columnwise.format
    assert y.rowwise.axis == -1
    assert torch.equal(y.rowwise, x.columnwise.t())
    assert torch.equal(y.columnwise, x.rowwise.t())
    assert torch.equal(y.t(), x)


def test_the_three_products_of_a_linear_use_the_faces_of_the_rule():
    """Give each face its own values, so that a product with the wrong face cannot go unnoticed."""

    def two_faced(seed, *shape):
        row = IDENTITY.quantize(random_tensor(*shape, seed=seed), columnwise=False).rowwise
        column = IDENTITY.quantize(random_tensor(*shape, seed=seed + 100), rowwise=False).columnwise
        return HybridTensor(row, column), row.dequantize(), column.dequantize()

    x, x_row, x_column = two_faced(1, 4, 8)
    w, w_row, w_column = two_faced(2, 6, 8)
    g, g_row, g_column = two_faced(3, 4, 6)
    assert torch.equal(torch.mm(x, w.t()), x_row @ w_row.t())
    assert torch.equal(torch.mm(g, w), g_row @ w_column)
    assert torch.equal(torch.mm(g.t(), x), g_column.t() @ x_column)


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8)], ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_f_linear_with_quantized_input_or_weight(shape, mode):
    x, w, bias = random_tensor(*shape, seed=1), random_tensor(6, 8, seed=2), random_tensor(6, seed=3)
    with mode():
        for a, b in ((ROW.quantize(x), w), (x, ROW.quantize(w)), (ROW.quantize(x), ROW.quantize(w))):
            got = F.linear(a, b, bias)
            exact = [t.rowwise.dequantize(torch.float32) if isinstance(t, HybridTensor) else t.float() for t in (a, b)]
            expected = F.linear(*exact, bias.float()).bfloat16()
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())


def test_gradients_flow_to_plain_operands_through_the_other_face():
    x = random_tensor(4, 8, seed=1).requires_grad_()
    w = HybridQuantizer(ROW, TENSOR).quantize(random_tensor(6, 8, seed=2))
    g = random_tensor(4, 6, seed=3)
    F.linear(x, w).backward(g)
    expected = torch.mm(g, w)
    assert torch.equal(x.grad, expected)
    plain = random_tensor(6, 8, seed=2).requires_grad_()
    h = HybridQuantizer(ROW, TENSOR).quantize(x.detach())
    F.linear(h, plain).backward(g)
    assert torch.equal(plain.grad, torch.mm(g.t(), h))


def test_a_missing_face_is_named():
    x, w = ROW.quantize(random_tensor(4, 8), columnwise=False), ROW.quantize(random_tensor(6, 8), columnwise=False)
    torch.mm(x, w.t())
    with pytest.raises(ValueError, match=r"mm: the right operand has no columnwise face.*columnwise=True"):
        torch.mm(random_tensor(4, 6), w)


def test_leaves_of_the_wrong_direction_are_refused():
    x = ROW.quantize(random_tensor(8, 8))
    with pytest.raises(ValueError, match="rowwise face is required as left operand, got a columnwise"):
        torch.mm(x.columnwise, x.columnwise)
    with pytest.raises(ValueError, match="columnwise face is required as right operand, got a rowwise"):
        torch.mm(x.rowwise, x.rowwise)


def test_operands_that_do_not_go_together_are_refused():
    x = TENSOR.quantize(random_tensor(4, 8))
    with pytest.raises(ValueError, match="operands of one dtype are required"):
        torch.mm(x, torch.zeros(8, 4))
    with pytest.raises(ValueError, match="one contraction size is required"):
        torch.mm(x, TENSOR.quantize(random_tensor(4, 8)))
    with pytest.raises(NotImplementedError, match="the summand is not a plain tensor"):
        torch.addmm(x, x, x.t())
    flat = TENSOR.quantize(random_tensor(2, 2, 8)).view(-1, 8)
    assert torch.mm(flat, flat.t()).shape == (4, 4)


@pytest.mark.parametrize(
    ("shape", "dtype", "beta"),
    [((32,), torch.float32, 1), ((32,), torch.float32, 0), ((16, 32), torch.float64, 2), ((31,), torch.bfloat16, 0),
     ((31,), torch.bfloat16, 1), ((2, 16, 32), torch.bfloat16, 1), ((1,), torch.bfloat16, 1),
     ((16, 1), torch.bfloat16, 1)],
    ids=str,
)  # fmt: skip
def test_summands_are_taken_and_refused_as_torch_does(shape, dtype, beta):
    x, columns = random_tensor(16, 64), random_tensor(64, 32)
    face = Float8Quantizer().quantize(columns)
    summand = torch.ones(shape, dtype=dtype)
    try:
        torch.addmm(summand, x, columns, beta=beta)
    except RuntimeError:
        with pytest.raises((RuntimeError, ValueError), match=r"summand of the operands' dtype|expand"):
            torch.addmm(summand, x, face, beta=beta)
    else:
        product = torch.addmm(summand, x, face, beta=beta)
        rounded_twice = summand + torch.mm(x, face)
        once = torch.addmm(torch.ones(32, dtype=dtype), x, face)
        assert torch.equal(product, once if summand.dim() < 2 else rounded_twice)


def test_a_bias_of_another_dtype_is_refused_in_inference_mode_as_torch_does():
    x, face = random_tensor(16, 64), Float8Quantizer().quantize(random_tensor(32, 64))
    with torch.inference_mode(), pytest.raises(ValueError, match="linear: a summand of the operands' dtype"):
        torch.nn.functional.linear(x, face, torch.ones(32))


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
def test_transforms_of_torch_func_are_refused(persistent):
    """Below autograd a backward would not be that of the recipe."""
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8", persistent=persistent)
    x = torch.randn(8, 32)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    with pytest.raises(
        NotImplementedError, match=r"no rule for torch\.func transforms .* call plain_ on a copy of the model"
    ):
        torch.func.grad(loss)(dict(model.named_parameters()))
    with torch.inference_mode():
        assert model(x).shape == (8, 32)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_products_that_no_layer_sees_are_refused(mode):
    """They would multiply an input in high precision."""
    layer = ht.quantize_(nn.Linear(8, 6, dtype=torch.bfloat16), "fp8", persistent=True)
    x, weight = random_tensor(4, 8), layer.weight.detach()
    with mode(), torch._C.DisableTorchFunctionSubclass():
        for multiply in (
            lambda: torch.mm(x, weight.t()),
            lambda: torch.addmm(layer.bias.detach(), x, weight.t()),
            lambda: F.linear(x, weight),
        ):
            with pytest.raises(NotImplementedError, match="a product below autograd with the weight of a layer"):
                multiply()
