"""The product of faces against float64, with derived bounds, and against torch's own scaled product."""

import itertools

import pytest
import torch

from hybridtensor import formats
from hybridtensor.formats import IDENTITY, Format
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.float8_quantize import float8_quantize
from hybridtensor.ops.scaled_mm import Backend, scaled_mm, select_backend
from hybridtensor.testing import product_bound, random_tensor

TENSOR, ROW = formats.FP8_E4M3_TENSOR, formats.FP8_E4M3_ROW
GRAD, GRAD_ROW = formats.FP8_E5M2_TENSOR, formats.FP8_E5M2_ROW
BLOCKED = Format("test_blocked_1x8", torch.float8_e4m3fn, 448.0, block=(1, 8), scale_dtype=torch.float32)
formats.register_format(BLOCKED)
ROTATED = formats.register_format(
    Format("test_rotated", torch.float8_e4m3fn, 448.0, (1, None), torch.float32, hadamard=True)
)

# Hopper's FP8 tensor cores add products aligned to 13 fraction bits or so before promoting to fp32.
HOPPER_ACCUMULATE = 2.0**-13

PAIRS = [
    (TENSOR, TENSOR), (GRAD, TENSOR), (TENSOR, GRAD), (GRAD, GRAD), (ROW, ROW), (GRAD_ROW, ROW), (TENSOR, ROW),
    (ROW, IDENTITY), (IDENTITY, TENSOR), (BLOCKED, BLOCKED), (BLOCKED, ROW),
]  # fmt: skip


def face(x, fmt):
    """Return the operand ``(data, scale, tensor_scale, format)`` of a matrix, and its exact values in float64."""
    if fmt.is_identity:
        return (x, None, None, fmt), x.double()
    if fmt is BLOCKED:
        blocks = x.float().reshape(-1, 8)
        codes, scale = float8_quantize(blocks, ROW, pow2_scale=True)
        data, scale = codes.reshape(x.shape), scale.reshape(x.shape[0], -1)
    else:
        data, scale = float8_quantize(x, fmt)
    factors = scale.double().repeat_interleave(8, 1) if fmt is BLOCKED else scale.double()
    return (data, scale, None, fmt), data.double() * factors


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("left", "right"), PAIRS, ids=lambda f: str(f))
@pytest.mark.parametrize("shape", [(32, 48, 64), (5, 7, 24), (1, 1, 8), (33, 16, 40)], ids=str)
def test_is_within_the_bound_of_float64(shape, left, right, out_dtype, device):
    m, n, k = shape
    a, exact_a = face(random_tensor(m, k, device=device, seed=1), left)
    b, exact_b = face(random_tensor(n, k, device=device, seed=2), right)
    bias = random_tensor(n, device=device, seed=3)
    backend = select_backend(left, right, out_dtype, torch.device(device))
    accumulate = HOPPER_ACCUMULATE if backend.name == "native" else 2.0**-24
    for given in (None, bias):
        got = scaled_mm(a, b, bias=given, out_dtype=out_dtype)
        extended_a, extended_b = exact_a, exact_b.t()
        if given is not None:
            extended_a = torch.cat([exact_a, torch.ones_like(exact_a[:, :1])], dim=1)
            extended_b = torch.cat([exact_b.t(), given.double()[None]], dim=0)
        bound = product_bound(extended_a, extended_b, out_dtype, accumulate=accumulate, summands=1)
        if backend.name == "native" and given is not None:
            bound *= 2  # the bias may be added after rounding
        exact = extended_a @ extended_b
        in_range = exact.abs() + bound < torch.finfo(out_dtype).max
        error = (got.double() - exact).abs()
        assert got.dtype == out_dtype
        assert (error <= bound)[in_range].all(), (error / bound)[in_range].max()
        assert in_range.any()


@pytest.mark.parametrize("fmt", [TENSOR, ROW], ids=str)
def test_small_integers_multiply_exactly(fmt, device):
    """Codes that are small integers, with scale 1, have sums that fp32 holds: the product must be exact."""
    a = torch.randint(-8, 9, (17, 40)).to(torch.float8_e4m3fn).to(device)
    b = torch.randint(-8, 9, (23, 40)).to(torch.float8_e4m3fn).to(device)
    scales = [torch.ones(fmt.scale_shape(*t.shape), device=device) for t in (a, b)]
    got = scaled_mm((a, scales[0], None, fmt), (b, scales[1], None, fmt), out_dtype=torch.bfloat16)
    exact = (a.double() @ b.double().t()).to(torch.bfloat16)
    assert torch.equal(got, exact)


@pytest.mark.parametrize("fmt", [TENSOR, ROW], ids=str)
def test_agrees_with_torch_scaled_mm(fmt, device):
    if fmt is ROW and device == "cpu" and torch.__version__ < "2.13":
        pytest.skip("torch's CPU product with a scale per row is newer")
    a, exact_a = face(random_tensor(32, 64, device=device, seed=1), fmt)
    b, exact_b = face(random_tensor(48, 64, device=device, seed=2), fmt)
    got = scaled_mm(a, b, out_dtype=torch.bfloat16)
    theirs = torch._scaled_mm(a[0], b[0].t(), a[1], b[1].t(), out_dtype=torch.bfloat16)
    bound = product_bound(exact_a, exact_b.t(), torch.bfloat16, accumulate=HOPPER_ACCUMULATE)
    assert ((got.double() - theirs.double()).abs() <= 2 * bound).all()


def test_a_huge_and_a_tiny_scale_do_not_overflow(device):
    a, exact_a = face(torch.full((4, 16), 1e38, device=device), TENSOR)
    b, exact_b = face(torch.full((4, 16), 1e-38, device=device), TENSOR)
    got = scaled_mm(a, b, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), exact_a @ exact_b.t(), rtol=1e-6, atol=0)


def test_a_tensor_scale_multiplies_the_product(device):
    a, _ = face(random_tensor(8, 16, device=device), TENSOR)
    b, _ = face(random_tensor(4, 16, device=device), ROW)
    plain = scaled_mm(a, b, out_dtype=torch.float32)
    doubled = scaled_mm((*a[:2], torch.full((1, 1), 2.0, device=device), TENSOR), b, out_dtype=torch.float32)
    assert torch.equal(doubled, 2 * plain)


@pytest.mark.parametrize("shape", [(0, 8, 16), (8, 0, 16), (8, 8, 0)], ids=str)
def test_empty_gives_zeros_or_the_bias(shape, device):
    m, n, k = shape
    a, _ = face(torch.empty(m, k, device=device), TENSOR)
    b, _ = face(torch.empty(n, k, device=device), TENSOR)
    bias = torch.arange(n, device=device, dtype=torch.bfloat16)
    assert torch.equal(scaled_mm(a, b, out_dtype=torch.bfloat16), torch.zeros(m, n, device=device).bfloat16())
    assert torch.equal(scaled_mm(a, b, bias=bias, out_dtype=torch.bfloat16), bias.expand(m, n))


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("left", "right"), [(TENSOR, TENSOR), (GRAD, TENSOR), (TENSOR, GRAD), (ROW, ROW),
                                             (GRAD_ROW, ROW), (ROW, GRAD_ROW)], ids=str)  # fmt: skip
@pytest.mark.skipif(not torch.cuda.is_available(), reason="native products need a CUDA device")
def test_native_products_run_and_padding_is_exact(left, right, out_dtype):
    """Every pair that is called native multiplies, at sizes cuBLASLt takes and at sizes that need padding."""
    device = torch.device("cuda")
    for m, n, k, fast in itertools.product((64, 37, 1), (64, 50, 1), (64, 70, 16), (True, False)):
        a, exact_a = face(random_tensor(m, k, device=device, seed=1), left)
        b, exact_b = face(random_tensor(n, k, device=device, seed=2), right)
        if select_backend(left, right, out_dtype, device).name == "native":
            a = (a[0].t().contiguous().t().contiguous() if m > 1 else a[0].t().contiguous().t(), *a[1:])  # stride 1
            got = scaled_mm(a, b, out_dtype=out_dtype, fast_accum=fast)
            bound = product_bound(exact_a, exact_b.t(), out_dtype, accumulate=HOPPER_ACCUMULATE)
            exact = exact_a @ exact_b.t()
            in_range = exact.abs() + bound < torch.finfo(out_dtype).max
            assert ((got.double() - exact).abs() <= bound)[in_range].all()


def test_backend_is_decided_in_one_place():
    cpu = torch.device("cpu")
    assert select_backend(IDENTITY, IDENTITY, torch.bfloat16, cpu).name == "high precision"
    assert select_backend(IDENTITY, TENSOR, torch.bfloat16, cpu) == Backend(
        "emulated", "one operand is in high precision"
    )
    assert select_backend(TENSOR, TENSOR, torch.bfloat16, cpu) == Backend("emulated", "no FP8 matrix units on cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks for the device's capability")
@pytest.mark.gpu
def test_backend_on_a_gpu():
    gpu = torch.device("cuda")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("Hopper or newer is required")
    assert select_backend(TENSOR, TENSOR, torch.bfloat16, gpu).name == "native"
    assert select_backend(ROW, ROW, torch.bfloat16, gpu).name == "native"
    assert "E5M2" in select_backend(GRAD, GRAD, torch.bfloat16, gpu).reason
    assert "bfloat16 only" in select_backend(ROW, ROW, torch.float32, gpu).reason
    assert "no hardware product" in select_backend(ROW, TENSOR, torch.bfloat16, gpu).reason


@pytest.mark.parametrize("fmt", [TENSOR, ROW], ids=str)
def test_operator_is_well_registered(fmt, device):
    a, _ = face(random_tensor(16, 32, device=device), fmt)
    b, _ = face(random_tensor(16, 32, device=device), fmt)
    arguments = (*a[:3], fmt.name, *b[:3], fmt.name, None, torch.bfloat16, False)
    # torch's schema check multiplies the inputs, which FP8 tensors cannot do on the CPU
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.hybridtensor.scaled_mm.default, arguments, test_utils=checks)


def test_autocast_does_not_reach_the_accumulator():
    a, _ = face(random_tensor(16, 64), TENSOR)
    b, _ = face(random_tensor(16, 64), TENSOR)
    expected = scaled_mm(a, b, out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = scaled_mm(a, b, out_dtype=torch.float32)
    assert torch.equal(got, expected)


def test_a_rotated_and_an_unrotated_operand_are_refused():
    a, _ = face(random_tensor(8, 16), ROW)
    with pytest.raises(ValueError, match="same Hadamard basis, got test_rotated and fp8_e4m3_row"):
        scaled_mm((*a[:3], ROTATED), a, out_dtype=torch.bfloat16)


def test_operands_that_do_not_fit_are_refused():
    a, _ = face(random_tensor(8, 16), TENSOR)
    b, _ = face(random_tensor(8, 24), TENSOR)
    with pytest.raises(ValueError, match="contraction sizes must match"):
        scaled_mm(a, b, out_dtype=torch.bfloat16)
    elsewhere = (a[0].to("meta"), a[1].to("meta"), None, TENSOR)
    with pytest.raises(ValueError, match="one device are required, got cpu, meta"):
        scaled_mm(a, elsewhere, out_dtype=torch.bfloat16)
    assert dequantize(*a[:3], format=TENSOR, dtype=torch.float32).shape == (8, 16)
