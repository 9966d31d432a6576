"""What is saved for backward, and the two backward overrides against their definitions.

Bytes are counted through saved-tensor hooks; gradients are compared bitwise.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from faces import tensor_faces
from torch import nn

import hybridtensor as ht
from hybridtensor import Float8Quantizer, HybridConfig, HybridQuantizer, IdentityQuantizer
from hybridtensor.subclasses.structure import flatten
from hybridtensor.testing import random_tensor, saved_for_backward

M, K, N = 64, 32, 48
SCALE = 4  # bytes of one fp32 scale
NEEDS = list(itertools.product([True, False], repeat=2))
E4M3, ROW, IDENTITY = Float8Quantizer(), Float8Quantizer(granularity="row"), IdentityQuantizer()


def make(spec, *, bias=False, persistent=False, device="cpu"):
    module = nn.Linear(K, N, bias=bias, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        module.weight.copy_(random_tensor(N, K, seed=7))
    ht.quantize_(module, spec, persistent=persistent)
    return module


def forward_saved(module, x, x_grad, w_grad):
    """Run forward; return the bytes saved beyond what the parameter (and its cache) holds, and the tensors."""
    x = x.detach().requires_grad_(x_grad)
    module.weight.requires_grad_(w_grad)
    module(x.detach())  # fill the weight's cache
    with saved_for_backward() as saved:
        y = module(x)
    return saved.nbytes(without=[module.weight]), saved, x, y


# bytes of the input that a layer keeps if its weight needs a gradient
INPUT_BYTES = {
    "bf16": 2 * M * K,
    "fp8": M * K + SCALE,
    "fp8_rowwise": M * K + K * SCALE,
    "fp8/fp8/bf16": 2 * M * K,
    "bf16/bf16/fp8": M * K + SCALE,
    "fp8_rowwise/fp8/bf16": 2 * M * K,
    "fp8+high_precision": 2 * M * K,
    "fp8+dequantized": M * K + SCALE,
    "fp8_rowwise+dequantized": M * K + M * SCALE,
    "fp8+save_original_input": 2 * M * K,
}


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
@pytest.mark.parametrize(("x_grad", "w_grad"), NEEDS)
@pytest.mark.parametrize("spec", INPUT_BYTES)
def test_saved_bytes(spec, x_grad, w_grad, persistent, device):
    """Nothing for an operand whose gradient nobody needs; the weight costs nothing beyond its faces."""
    module = make(spec, persistent=persistent, device=device)
    nbytes, saved, _, _ = forward_saved(module, random_tensor(M, K, device=device), x_grad, w_grad)
    assert nbytes == (INPUT_BYTES[spec] if w_grad else 0)
    assert all(type(t) is torch.Tensor for t in saved.tensors)
    if not x_grad and not w_grad:
        assert saved.tensors == []


@pytest.mark.parametrize("spec", ["fp8", "fp8_rowwise", "fp8+dequantized"])
def test_a_persistent_weight_under_autocast_is_not_copied(spec):
    module = nn.Linear(K, N, bias=False)
    ht.quantize_(module, spec, persistent=True)
    with torch.autocast("cpu", torch.bfloat16), saved_for_backward() as saved:
        y = module(random_tensor(M, K).requires_grad_())
    assert y.dtype == torch.bfloat16
    assert saved.nbytes(without=[module.weight]) == INPUT_BYTES[spec]


@pytest.mark.parametrize("spec", INPUT_BYTES)
def test_bias_saves_nothing(spec):
    module, plain = make(spec, bias=True), make(spec)
    x = random_tensor(M, K)
    assert forward_saved(module, x, True, True)[0] == forward_saved(plain, x, True, True)[0]


@pytest.mark.parametrize("spec", ["fp8+high_precision", "fp8+save_original_input"])
def test_the_original_input_is_saved_as_an_alias(spec):
    _, saved, x, _ = forward_saved(make(spec), random_tensor(M, K), True, True)
    assert x.data_ptr() in [t.data_ptr() for t in saved.tensors]


@pytest.mark.parametrize("spec", ["fp8+dequantized", "fp8_rowwise+dequantized"])
def test_dequantized_saves_rowwise_bytes_and_makes_no_columnwise_ones(spec):
    module = make(spec)
    _, saved, x, _ = forward_saved(module, random_tensor(M, K), True, True)
    row = module.weight.config.input.rowwise.quantize(x, columnwise=False).rowwise
    assert torch.equal(saved.tensors[0].view(torch.uint8), row.qdata.view(torch.uint8))
    assert torch.equal(saved.tensors[1], row.scale)
    face, column = tensor_faces(module.weight, dtype=torch.bfloat16)
    assert column.source.qdata.data_ptr() == face.qdata.data_ptr()
    held = {t.untyped_storage().data_ptr() for f in (face, column) for t in flatten(f)[0]}
    assert len(held) == 2  # one code matrix, one scale


def test_an_fp8_linear_saves_about_half_of_bf16():
    x = random_tensor(M, K)
    half = forward_saved(make("fp8"), x, True, True)[0] / forward_saved(make("bf16"), x, True, True)[0]
    assert half <= 0.51


def test_explain_tells_the_bytes_that_are_saved():
    for spec, expected in INPUT_BYTES.items():
        module = make(spec)
        row = ht.explain(module, show=False).rows[-1]
        shared = expected - row.saved_bytes_per_token * M
        assert row.gemm == "grad_weight"
        assert 0 <= shared <= K * SCALE  # scales that all tokens share


def gradients(function, x, w, g):
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    function(x, w).backward(g)
    return x.grad, w.grad


@pytest.mark.parametrize("shape", [(M, K), (2, M // 2, K)], ids=str)
@pytest.mark.parametrize("word", ["fp8", "fp8_rowwise"])
def test_dequantized_is_the_gradient_of_a_bf16_linear_of_the_dequantized_operands(word, shape, device):
    module = make(f"{word}+dequantized", device=device)
    x, g = random_tensor(*shape, device=device, seed=1), random_tensor(*shape[:-1], N, device=device, seed=2)
    config = module.weight.config
    seen_x = config.input.rowwise.quantize(x).rowwise.dequantize()
    seen_w = config.weight.rowwise.quantize(module.weight.master).rowwise.dequantize()
    expected = gradients(F.linear, seen_x, seen_w, g)
    leaf = x.clone().requires_grad_()
    module(leaf).backward(g)
    assert torch.equal(leaf.grad, expected[0])
    assert torch.equal(module.weight.grad, expected[1])


@pytest.mark.parametrize("shape", [(M, K), (2, M // 2, K)], ids=str)
@pytest.mark.parametrize("word", ["fp8", "fp8_rowwise"])
def test_high_precision_is_the_gradient_of_the_bf16_linear_of_the_original_operands(word, shape, device):
    module = make(f"{word}+high_precision", device=device)
    x, g = random_tensor(*shape, device=device, seed=1), random_tensor(*shape[:-1], N, device=device, seed=2)
    expected = gradients(F.linear, x, module.weight.master, g)
    leaf = x.clone().requires_grad_()
    module(leaf).backward(g)
    assert torch.equal(leaf.grad, expected[0])
    assert torch.equal(module.weight.grad, expected[1])


@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
@pytest.mark.parametrize("word", ["fp8", "fp8_rowwise"])
def test_overrides_are_the_faces_they_stand_for(word, override):
    """Writing the faces out gives the same bits as the shorthand, and the forward is that of the plain recipe."""
    x, g = random_tensor(M, K, seed=1), random_tensor(M, N, seed=2)
    row = E4M3 if word == "fp8" else ROW
    source = "rowwise_dequantized" if override == "dequantized" else "original"
    spelled = HybridQuantizer(row, IDENTITY, source)
    results = []
    for spec in (f"{word}+{override}", HybridConfig(input=spelled, weight=spelled, grad_output=IDENTITY)):
        module, leaf = make(spec), x.clone().requires_grad_()
        y = module(leaf)
        y.backward(g)
        results.append((y.detach(), leaf.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(results[0][0], make(word)(x).detach())


@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
def test_overrides_never_quantize_a_gradient(override, monkeypatch):
    module, x = make(f"fp8+{override}"), random_tensor(M, K).requires_grad_()
    y = module(x)

    original = Float8Quantizer.faces

    def of_the_weight_only(*args, **kwargs):
        assert kwargs["context"].role == "weight", "quantized in backward"
        return original(*args, **kwargs)

    monkeypatch.setattr(Float8Quantizer, "faces", of_the_weight_only)
    y.backward(random_tensor(M, N))


@pytest.mark.parametrize(
    "quantizer",
    [E4M3, ROW, HybridQuantizer(E4M3, ROW), HybridQuantizer(ROW, E4M3, "rowwise_dequantized"),
     HybridQuantizer(E4M3, IDENTITY)],
    ids=["tensor", "row", "tensor|row", "row|tensor of rowwise", "tensor|identity"],
)  # fmt: skip
def test_save_original_input_does_not_change_a_bit(quantizer, device):
    x, g = random_tensor(2, M // 2, K, device=device, seed=1), random_tensor(2, M // 2, N, device=device, seed=2)
    grad_output = HybridQuantizer(E4M3, quantizer.columnwise if isinstance(quantizer, HybridQuantizer) else quantizer)
    results = []
    for keep in (False, True):
        config = HybridConfig(input=quantizer, weight=E4M3, grad_output=grad_output, save_original_input=keep)
        module, leaf = make(config, device=device), x.clone().requires_grad_()
        y = module(leaf)
        y.backward(g)
        results.append((y.detach(), leaf.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
