"""The linear: three products, who needs a gradient, shapes, dtypes, modes.

Oracles: float64 products of the dequantized faces within the derived bound; ``F.linear`` and its autograd, bitwise,
where a product is in high precision.
"""

import copy
import gc
import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiers import covered, in_turn
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor import HybridConfig
from hybridtensor.linear import linear
from hybridtensor.ops.cast.definition import ReferenceCast
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.testing import product_bound, random_tensor

HOPPER_ACCUMULATE = 2.0**-13
WORDS = ("bf16", "fp8", "fp8_rowwise")
MIXES = ["/".join(words) for words in itertools.product(WORDS, repeat=3)]
SPECS = [*WORDS, "fp8/fp8_rowwise/bf16", "fp8_rowwise/bf16/fp8", "bf16/fp8/fp8_rowwise", "fp8+high_precision",
         "fp8+dequantized", "fp8_rowwise+dequantized", "fp8+save_original_input"]  # fmt: skip
BY_OPERAND = ["fp8:fp8_rowwise/bf16:fp8/fp8_rowwise:bf16", "bf16:mxfp8/bf16/fp8", "bf16:mxfp4+dequantized",
              "fp8_block:mxfp4/fp8_block/fp8_block+rowwise_dequantized_weight"]  # fmt: skip
SHAPES = [(32,), (5, 32), (2, 5, 32), (2, 3, 5, 32), (2, 3, 1, 4, 32), (1, 32), (0, 32), (2, 0, 32)]


def layer(spec, k=32, n=48, *, bias=False, dtype=torch.bfloat16, device="cpu", persistent=False):
    """Return a converted layer and a plain one with the same parameters."""
    plain = nn.Linear(k, n, bias=bias, dtype=dtype, device=device)
    with torch.no_grad():
        plain.weight.copy_(random_tensor(n, k, dtype=dtype, seed=7))
    converted = nn.Linear(k, n, bias=bias, dtype=dtype, device=device)
    converted.load_state_dict(plain.state_dict())
    ht.quantize_(converted, spec, persistent=persistent)
    return converted, plain


def run(module, x, g):
    """Return output and gradients of input, weight and bias."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(g)
    return y.detach(), x.grad, module.weight.grad, None if module.bias is None else module.bias.grad


def faces_used(config, x, w, g):
    """Return, per product, the exact values of both operands, float64, as matrices ready to multiply."""
    x, w, g = config.input.quantize(x), config.weight.quantize(w), config.grad_output.quantize(g)

    def exact(face):
        kept = face.dtype if isinstance(face, ht.IdentityTensor) else torch.float32
        values = face.dequantize(kept).double()
        return values.reshape(-1, values.shape[-1])

    return (
        (exact(x.rowwise), exact(w.rowwise).t()),
        (exact(g.rowwise), exact(w.columnwise)),
        (exact(g.columnwise).t(), exact(x.columnwise)),
    )


@pytest.mark.parametrize(("spec", "persistent"), in_turn(sorted({*MIXES, *SPECS, *BY_OPERAND}), [False, True]), ids=str)
def test_three_products_against_float64(spec, persistent, device):
    converted, plain = layer(spec, device=device, persistent=persistent)
    x = random_tensor(2, 12, 32, device=device, seed=1)
    g = random_tensor(2, 12, 48, device=device, seed=2)
    config = HybridConfig.parse(spec)
    operands = faces_used(config, x, plain.weight.detach(), g)
    accumulate = 2.0**-24 if device == "cpu" else HOPPER_ACCUMULATE
    for got, (left, right) in zip(run(converted, x, g)[:3], operands, strict=True):
        bound = product_bound(left, right, torch.bfloat16, accumulate=accumulate)
        error = (got.reshape(left.shape[0], -1).double() - left @ right).abs()
        assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("spec", MIXES)
def test_each_product_depends_only_on_its_own_format(spec, device):
    """With one product changed to another format, the other two are bitwise what they were."""
    x, g = random_tensor(24, 32, device=device, seed=1), random_tensor(24, 48, device=device, seed=2)
    words = spec.split("/")
    before = run(layer(spec, device=device)[0], x, g)[:3]
    for changed in range(3):
        other = [w if i != changed else WORDS[(WORDS.index(w) + 1) % 3] for i, w in enumerate(words)]
        after = run(layer("/".join(other), device=device)[0], x, g)[:3]
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert same == [i != changed for i in range(3)]


@pytest.mark.parametrize(
    ("shape", "bias", "dtype", "contiguous"),
    covered(SHAPES, [False, True], [torch.bfloat16, torch.float16, torch.float32], [True, False]),
    ids=str,
)
def test_bf16_recipe_is_bitwise_the_plain_module(shape, bias, dtype, contiguous, device):
    converted, plain = layer("bf16", bias=bias, dtype=dtype, device=device)
    x = random_tensor(*shape, dtype=dtype, device=device, seed=1)
    g = random_tensor(*shape[:-1], 48, dtype=dtype, device=device, seed=2)
    if not contiguous and len(shape) > 2:
        x, g = x.transpose(0, 1), g.transpose(0, 1)
    for got, expected in zip(run(converted, x, g), run(plain, x, g), strict=True):
        assert (got is None) == (expected is None)
        assert got is None or (torch.equal(got, expected) and got.shape == expected.shape)


@pytest.mark.parametrize("frozen", ["", "bias", "weight"])
@pytest.mark.parametrize("spec", ["bf16", "fp8", "fp8_delayed"])
def test_gradients_are_accumulated_in_the_order_of_the_plain_model(spec, frozen):
    """Data parallelism packs them by it, and sums more than two ranks by where they are in a bucket."""

    def order(model):
        found = []
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and name.endswith(frozen)))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))
        model(random_tensor(8, 64).requires_grad_()).sum().backward()
        return found

    layers = [nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False), nn.Linear(64, 64)]
    plain = nn.Sequential(*layers).bfloat16()
    assert order(ht.quantize_(copy.deepcopy(plain), spec)) == order(plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_recipe_is_bitwise_the_plain_module_on_strided_batches_in_every_mode(mode, frozen, autocast, device):
    """torch multiplies them as one matrix if the weight requires a gradient, also where none is computed."""
    converted, plain = layer("bf16", k=384, n=256, bias=True, dtype=torch.float32, device=device)
    batches = random_tensor(2, 17, 384, dtype=torch.float32, device=device, seed=1)
    for module in (converted, plain):
        module.weight.requires_grad_(not frozen)
    for x in (batches[:, :1], batches.transpose(0, 1), batches[:, :16].unflatten(1, (4, 4)).transpose(1, 2)):
        with mode(), torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            assert torch.equal(converted(x), plain(x))


@pytest.mark.parametrize("word", ["fp8", "fp8_rowwise"])
def test_high_precision_products_among_others_are_bitwise_plain(word, device):
    x, g = random_tensor(24, 32, device=device, seed=1), random_tensor(24, 48, device=device, seed=2)
    expected = run(layer("bf16", device=device)[1], x, g)
    for position in range(3):
        words = [word] * 3
        words[position] = "bf16"
        got = run(layer("/".join(words), device=device)[0], x, g)
        assert torch.equal(got[position], expected[position])


@pytest.mark.parametrize(("shape", "spec", "bias"), covered(SHAPES, SPECS, [False, True]), ids=str)
def test_shapes(shape, spec, bias, device):
    """Every rank gives what the flattened input gives; nothing breaks on zero tokens."""
    converted, _ = layer(spec, bias=bias, device=device)
    x, g = random_tensor(*shape, device=device, seed=1), random_tensor(*shape[:-1], 48, device=device, seed=2)
    got = run(converted, x, g)
    tokens = x.shape[:-1].numel()
    flat = run(converted, x.reshape(tokens, 32), g.reshape(tokens, 48))
    assert got[0].shape == (*shape[:-1], 48)
    assert got[1].shape == shape
    for a, b in zip(got, flat, strict=True):
        assert a is None or torch.equal(a.reshape(-1), b.reshape(-1))
    if 0 in shape:
        assert got[2].eq(0).all()


@pytest.mark.parametrize(
    ("spec", "features", "tokens"), covered(SPECS, [(1, 1), (7, 5), (17, 48), (32, 20), (40, 33)], [1, 3, 16]), ids=str
)
def test_sizes_that_hardware_would_pad(spec, features, tokens, device):
    k, n = features
    converted, plain = layer(spec, k, n, bias=True, device=device)
    x, g = random_tensor(tokens, k, device=device, seed=1), random_tensor(tokens, n, device=device, seed=2)
    got = run(converted, x, g)
    operands = faces_used(HybridConfig.parse(spec), x, plain.weight.detach(), g)
    accumulate = 2.0**-24 if device == "cpu" else HOPPER_ACCUMULATE
    for position, (left, right) in enumerate(operands):
        extra = plain.bias.detach().double() if position == 0 else 0.0
        bound = product_bound(left, right, torch.bfloat16, accumulate=accumulate, summands=1)
        bound = 2 * bound + 2.0**-7 * (extra.abs() if position == 0 else 0.0)
        assert ((got[position].double() - left @ right - extra).abs() <= bound).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("x_grad", "w_grad", "b_grad"), list(itertools.product([True, False], repeat=3)))
def test_frozen_operands(spec, x_grad, w_grad, b_grad, device):
    """A gradient that nobody needs is not computed, and the others are what they are when all are needed."""
    converted, _ = layer(spec, bias=True, device=device)
    x, g = random_tensor(6, 32, device=device, seed=1), random_tensor(6, 48, device=device, seed=2)
    full = run(converted, x, g)
    converted.zero_grad()
    x = x.clone().requires_grad_(x_grad)
    converted.weight.requires_grad_(w_grad)
    converted.bias.requires_grad_(b_grad)
    y = converted(x)
    assert torch.equal(y, full[0])
    assert y.requires_grad == (x_grad or w_grad or b_grad)
    if y.requires_grad:
        y.backward(g)
    grads = (x.grad, converted.weight.grad, converted.bias.grad)
    for got, expected, needed in zip(grads, full[1:], (x_grad, w_grad, b_grad), strict=True):
        assert (got is not None) == needed
        assert got is None or torch.equal(got, expected)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(spec, mode, device):
    converted, _ = layer(spec, bias=True, device=device)
    x = random_tensor(2, 6, 32, device=device)
    expected = converted(x).detach()
    with mode():
        y = converted(x)
    assert torch.equal(y, expected)
    assert not y.requires_grad
    converted(x.clone().requires_grad_()).sum().backward()  # and training still works after


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(spec, autocast, x_dtype, device):
    converted, plain = layer(spec, bias=True, dtype=torch.float32, device=device)
    x = random_tensor(6, 32, dtype=x_dtype, device=device, seed=1).requires_grad_()
    with torch.autocast(device, autocast):
        y, expected = converted(x), plain(x)
    assert y.dtype == expected.dtype == autocast
    y.backward(random_tensor(6, 48, dtype=autocast, device=device, seed=2))
    assert x.grad.dtype == x_dtype
    assert converted.weight.grad.dtype == converted.bias.grad.dtype == torch.float32
    if spec == "bf16":
        assert torch.equal(y, expected)
    else:
        torch.testing.assert_close(y, expected, rtol=0.2, atol=0.1 * expected.abs().max().item())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("spec", "persistent"), [("bf16", False), ("fp8", False), ("fp8", True)])
def test_models_in_float64_raise_also_under_autocast(spec, persistent, autocast):
    """Autocast leaves float64 as it is: a plain model gives float64, which no product of ours computes."""
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 16)), spec, persistent=persistent).double()
    x = torch.randn(4, 32, dtype=torch.float64)
    expected = pytest.raises(TypeError, match=r"got the weight of layer 0 in torch\.float64; cast the model")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), expected:
        model(x)


@pytest.mark.parametrize("spec", ["bf16", "fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_signs_that_torch_has_not_changed_yet(spec, device, monkeypatch):
    """Memory of the imaginary part of a conjugate, and of its gradient, has the other sign, which kernels would read.

    Oracle: the same layer, whose input and gradient are computed before.
    """
    seen, run = [], ReferenceCast.run

    def observed(self, x, inputs):
        seen.append(x.is_neg())
        return run(self, x, inputs)

    monkeypatch.setattr(ReferenceCast, "run", observed)  # a CPU's cast looks through the sign
    random = torch.randn(32, 128, 2, generator=torch.Generator().manual_seed(0)).to(device)
    found, negated = [], []
    for computed in (torch.resolve_neg, lambda x: x):
        torch.manual_seed(0)
        layer = ht.quantize_(nn.Linear(128, 64).to(device), spec)
        leaf = random.clone().requires_grad_()
        x = computed(torch.view_as_complex(leaf).conj().imag)
        y = layer(x)
        y.register_hook(lambda grad: negated.append(grad.is_neg()))
        y.register_hook(computed)
        z = torch.complex(torch.zeros_like(y), y).conj()
        torch.fft.ifft(z).abs().sum().backward()
        found.append([y, leaf.grad, layer.weight.grad, layer.bias.grad])
    assert x.is_neg()
    assert all(negated)
    assert all(map(torch.equal, *found))
    assert not any(seen)


@pytest.mark.parametrize("spec", ["fp8", "fp8_delayed", "mxfp8", "nvfp4", "fp8_block+fp32_scale", "mxfp8+dequantized"])
def test_meta_tensors_give_shapes(spec):
    """Which autocast has no word for; also inside of it on another device."""
    converted, _ = layer(spec, 64, 96, bias=True, device="meta")
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast):
            made = run(converted, *(torch.zeros(5, n, dtype=torch.bfloat16, device="meta") for n in (64, 96)))
        assert [(tuple(t.shape), t.device.type) for t in made] == [
            ((5, 96), "meta"), ((5, 64), "meta"), ((96, 64), "meta"), ((96,), "meta"),
        ]  # fmt: skip


def test_autocast_quantizes_the_weight_from_its_full_precision():
    """Not from its bf16 rounding: there is one rounding between the master and the codes."""
    converted, plain = layer("fp8", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        converted(random_tensor(4, 32))
    row, _ = converted.weight.faces(rowwise=True, columnwise=False, dtype=torch.bfloat16)
    expected = ht.Float8Quantizer().quantize(plain.weight.detach(), dtype=torch.bfloat16).rowwise
    assert torch.equal(row.qdata.float(), expected.qdata.float())
    assert torch.equal(row.scale, expected.scale)


@pytest.mark.parametrize("spec", ["fp8", "fp8_rowwise", "bf16"])
@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
def test_every_way_to_write_the_product(spec, persistent):
    """``@``, mm, matmul and addmm with a weight of ours are the same linear, with all three products quantized."""
    converted, _ = layer(spec, bias=True, persistent=persistent)
    w, b = converted.weight, converted.bias
    x, g = random_tensor(6, 32, seed=1), random_tensor(6, 48, seed=2)

    def grads(function):
        leaf = x.clone().requires_grad_()
        w.grad = b.grad = None
        y = function(leaf)
        y.backward(g)
        return y.detach(), leaf.grad, w.grad

    expected = grads(lambda x: F.linear(x, w))
    for function in (
        lambda x: x @ w.t(), lambda x: torch.mm(x, w.t()), lambda x: x.mm(w.T), lambda x: torch.matmul(x, w.mT),
        lambda x: x.matmul(w.transpose(0, 1)), lambda x: (w @ x.t()).t(), lambda x: linear(x, w),
    ):  # fmt: skip
        for got, value in zip(grads(function), expected, strict=True):
            assert torch.equal(got, value)
    with_bias = grads(lambda x: F.linear(x, w, b))[0]
    assert torch.equal(grads(lambda x: torch.addmm(b, x, w.t()))[0], with_bias)
    scaled = grads(lambda x: torch.addmm(b, x, w.t(), beta=2, alpha=0.5))[0]
    assert torch.equal(scaled, 2 * b + 0.5 * expected[0])
    unread = torch.full_like(g, torch.nan)
    assert torch.equal(grads(lambda x: torch.addmm(unread, x, w.t(), beta=0))[0], expected[0])
    batched = (x.view(2, 3, 32) @ w.t()).view(6, 48)
    assert torch.equal(batched, expected[0])


@pytest.mark.parametrize("size", [(), (1,), (1, 1), (48,), (6, 1), (6, 48)], ids=str)
def test_addmm_adds_what_torch_broadcasts(size, device):
    """The sum is that of the product alone, rounded in fp32; the gradient that of the plain broadcast."""
    converted, _ = layer("fp8", dtype=torch.float32, device=device)
    w, x = converted.weight, random_tensor(6, 32, dtype=torch.float32, device=device)
    added = torch.linspace(-2, 2, 288, device=device)[: math.prod(size)].view(size).requires_grad_()
    out = torch.addmm(added, x, w.t())
    torch.testing.assert_close(out, x @ w.t() + added, rtol=1e-6, atol=1e-6)
    out.sum().backward()
    assert added.grad.shape == size
    assert (added.grad == 6 * 48 / added.numel()).all()


@pytest.mark.parametrize("shape", [(6, 32), (32,)], ids=["tokens", "one token"])
@pytest.mark.parametrize("how", [lambda x, w: x @ w[5], lambda x, w: x @ w.unbind()[5], lambda x, w: w[5] @ x.t()])
def test_a_row_of_a_weight_is_a_layer_with_one_feature(how, shape):
    converted, _ = layer("fp8")
    w, x, found = converted.weight, random_tensor(*shape, seed=1), []
    for multiply in (how, lambda x, w: F.linear(x, w[5:6])[..., 0]):
        w.grad, leaf = None, x.clone().requires_grad_()
        y = multiply(leaf, w)
        y.sum().backward()
        found.append((y.detach(), leaf.grad, w.grad))
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


def test_an_input_quantized_before_is_used_as_it_is():
    converted, _ = layer("fp8")
    x, g = random_tensor(6, 32, seed=1), random_tensor(6, 48, seed=2)
    y, _, w_grad, _ = run(converted, x, g)
    converted.zero_grad()
    again = converted(ht.Float8Quantizer().quantize(x))
    again.backward(g)
    assert torch.equal(again, y)
    assert torch.equal(converted.weight.grad, w_grad)
    rows_only = ht.Float8Quantizer().quantize(x, columnwise=False)
    with pytest.raises(ValueError, match="grad_weight: input has no columnwise face"):
        converted(rows_only)
    with torch.no_grad():
        assert torch.equal(converted(rows_only), y)


@pytest.mark.parametrize("spec", SPECS)
def test_a_face_as_input(spec):
    """An identity face serves both directions; a quantized one only its own, which is enough without gradients."""
    converted, _ = layer(spec)
    x, g = random_tensor(6, 32, seed=1), random_tensor(6, 48, seed=2)
    hybrid = converted.weight.config.input.quantize(x)
    with torch.no_grad():
        assert torch.equal(converted(hybrid.rowwise), converted(x))
    if isinstance(hybrid.rowwise, ht.IdentityTensor):
        converted(hybrid.rowwise).backward(g)
    else:
        with pytest.raises(ValueError, match="grad_weight: a columnwise face is required as right operand"):
            converted(hybrid.rowwise)


@pytest.mark.parametrize("spec", SPECS)
def test_a_quantized_batch_keeps_its_shape(spec):
    converted, _ = layer(spec)
    x = random_tensor(2, 3, 32, seed=1)
    hybrid = converted.weight.config.input.quantize(x)
    with torch.no_grad():
        assert torch.equal(converted(hybrid), converted(x))


class Casts:
    """Counts how often faces of a layer's weight are made."""

    def __init__(self, converted, monkeypatch):
        self.made, cls = [], type(converted.weight.config.weight)
        original = cls.faces

        def counting(quantizer, x, **kwargs):
            if x is converted.weight.plain:
                self.made.append("both" if kwargs["rowwise"] and kwargs["columnwise"] else "one")
            return original(quantizer, x, **kwargs)

        monkeypatch.setattr(cls, "faces", counting)

    def take(self):
        made, self.made = self.made, []
        return made


def written(converted):
    with torch.no_grad():
        converted.weight.mul_(0.5)


@pytest.mark.parametrize("spec", SPECS)
def test_gradient_accumulation_quantizes_the_weight_once(spec, monkeypatch):
    converted, _ = layer(spec)
    casts = Casts(converted, monkeypatch)
    for made in (["one", "one", "both"], ["both"], ["both"]):  # the first step learns that it goes on
        for _ in range(4):
            run(converted, random_tensor(6, 32), random_tensor(6, 48))
        assert casts.take() == made
        written(converted)


def test_faces_go_once_nothing_needs_them(monkeypatch):
    """But for a weight that is used again before it is written: it is not quantized twice."""
    converted, _ = layer("fp8")
    casts = Casts(converted, monkeypatch)

    def step(microbatches):
        for _ in range(microbatches):
            run(converted, random_tensor(6, 32), random_tensor(6, 48))
        kept = len(converted.weight.record.face_cache.faces())
        written(converted)
        assert not converted.weight.record.face_cache.faces()
        return len(casts.take()), kept

    assert step(1) == (2, 0)
    assert step(1) == (2, 0)
    assert step(3) == (3, 2)  # found at the second
    assert step(3) == (1, 0)  # the third is known to be the last
    assert step(4) == (2, 2)  # there may be more
    assert step(1) == (1, 2)
    assert step(1) == (2, 0)


def test_weights_that_nothing_writes_keep_their_faces(monkeypatch):
    converted, _ = layer("fp8")
    converted.weight.requires_grad_(False)
    casts = Casts(converted, monkeypatch)
    for _ in range(5):
        converted(random_tensor(6, 32).requires_grad_()).backward(random_tensor(6, 48))
    assert casts.take() == ["one", "one", "both"]
    with torch.no_grad():
        for _ in range(5):
            converted(random_tensor(6, 32))
    assert casts.take() == []


@pytest.mark.parametrize(("keep", "plain", "twice", "recomputed"), [
    ("auto", [0, 0], [2, 2], [0, 0]), ("always", [2, 2], [2, 2], [2, 2]), ("never", [0, 0], [0, 0], [0, 0]),
])  # fmt: skip
def test_how_long_faces_live(keep, plain, twice, recomputed):
    """How many are kept after the first forward of the third step, and after its backward."""
    assert held_faces(keep) == plain
    assert held_faces(keep, microbatches=2) == twice
    assert held_faces(keep, call=lambda module, x: checkpoint(module, x, use_reentrant=False)) == recomputed


def held_faces(keep, microbatches=1, call=lambda module, x: module(x)):
    converted = ht.quantize_(nn.Linear(32, 48, bias=False).bfloat16(), "fp8_rowwise", keep_faces=keep)
    held = []
    for _ in range(3):
        counts = []
        for _ in range(microbatches):
            y = call(converted, random_tensor(6, 32).requires_grad_())
            counts.append(len(converted.weight.record.face_cache.faces()))
            y.backward(random_tensor(6, 48))
            counts.append(len(converted.weight.record.face_cache.faces()))
        held = counts[:2]
        written(converted)
    return held


@pytest.mark.parametrize("keep", ["auto", "always", "never"])
@pytest.mark.parametrize("spec", [*SPECS, "nvfp4", "mxfp8/nvfp4/bf16"])
def test_how_long_faces_live_changes_no_bit(spec, keep, device):
    """Against faces that were always made together: two steps of two microbatches, the second recomputed."""

    def gradients(policy):
        torch.manual_seed(0)
        model = ht.quantize_(nn.Linear(64, 96, bias=False).to(device, torch.bfloat16), spec, keep_faces=policy)
        found = []
        for step in range(2):
            x, g = (random_tensor(32, n, seed=step, device=device) for n in (64, 96))
            for call in (model, lambda x, module=model: checkpoint(module, x, use_reentrant=False)):
                x = x.detach().requires_grad_()
                call(x).backward(g)
                found.append(x.grad)
            found.append(model.weight.grad.clone())
            written(model)
            ht.step_(model)
        return found

    policy = keep if ht.HybridConfig.parse(spec).weight != ht.IdentityQuantizer() else None
    for got, expected in zip(gradients(policy), gradients(policy and "always"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("spec", ["fp8", "fp8_rowwise", "fp8_delayed", "nvfp4", "fp8+dequantized"])
def test_a_weight_is_measured_once(spec, device, monkeypatch):
    """Backward scales the face that it makes by what forward measured."""
    converted = ht.quantize_(nn.Linear(64, 96, bias=False).to(device, torch.bfloat16), spec)
    found, original = [], MasterWeight.quantized

    def noting(weight, *args, **kwargs):
        found.append(kwargs["context"].amaxes)
        return original(weight, *args, **kwargs)

    monkeypatch.setattr(MasterWeight, "quantized", noting)
    run(converted, random_tensor(32, 64, device=device), random_tensor(32, 96, device=device))
    (row, column), again = found[0], found[-1]
    if spec in ("fp8", "fp8_rowwise", "nvfp4"):
        assert again[1] is column
        plain = converted.weight.plain.float().abs()
        assert torch.equal(row, plain.amax(1) if spec == "fp8_rowwise" else plain.amax().view(1))
        assert torch.equal(column, plain.amax(0) if spec == "fp8_rowwise" else plain.amax().view(1))
    elif spec == "fp8+dequantized":
        assert torch.equal(row, converted.weight.plain.float().abs().amax().view(1))
    else:
        assert row is None


def test_evaluation_between_steps_keeps_no_face_for_training():
    """But a rowwise one for itself, from its second batch on."""
    converted, _ = layer("fp8")
    record = converted.weight.record
    run(converted, random_tensor(6, 32), random_tensor(6, 48))
    written(converted)
    held = []
    with torch.no_grad():
        for _ in range(3):
            converted(random_tensor(6, 32))
            held.append(len(record.face_cache.faces()))
    for _ in range(2):
        y = converted(random_tensor(6, 32).requires_grad_())
        held.append(len(record.face_cache.faces()))
        y.backward(random_tensor(6, 48))
        held.append(len(record.face_cache.faces()))
        written(converted)
    assert held == [0, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("before", "after"), [
    ("fp8_delayed", "fp8"), ("fp8", "fp8_delayed"), ("fp8_delayed+rowwise_dequantized_weight", "fp8_delayed"),
    ("fp8_rowwise", "mxfp8"),
])  # fmt: skip
def test_a_backward_has_the_recipe_of_its_forward(before, after):
    x, g = random_tensor(32, 32, seed=1), random_tensor(32, 64, seed=2)
    grads = []
    for spec in (None, after):
        torch.manual_seed(0)
        module = ht.quantize_(nn.Linear(32, 64, bias=False).bfloat16(), before)
        run(module, x, g)
        ht.step_(module)
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        if spec is not None:
            ht.set_config_(module, spec)
        y.backward(g)
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("spec", ["fp8_delayed", "fp8_delayed+dequantized"])
def test_scales_that_change_before_backward_are_told(spec):
    module = ht.quantize_(nn.Linear(32, 64).bfloat16(), spec)
    module.weight.requires_grad_(False)
    y = module(random_tensor(32, 32).requires_grad_())
    ht.step_(module)
    with pytest.raises(
        RuntimeError, match="the scales of the weight of a layer changed between its forward and backward"
    ):
        y.sum().backward()


def test_a_frozen_weight_that_is_made_plain_before_backward_is_told():
    module = ht.quantize_(nn.Linear(32, 64).bfloat16(), "fp8")
    module.weight.requires_grad_(False)
    y = module(random_tensor(32, 32).requires_grad_())
    ht.plain_(module)
    with pytest.raises(RuntimeError, match="written or replaced between its forward and backward"):
        y.sum().backward()


def test_what_compiled_code_wrote_before_is_no_write_since():
    """An alias that outlives a compiled optimizer's step takes note of it when it is used."""
    module, _ = layer("fp8")
    weight = module.weight
    alias = weight.detach()
    torch.autograd.graph.increment_version(weight)  # as compiled code does
    y = module(random_tensor(6, 32).requires_grad_())
    F.linear(random_tensor(6, 32), alias)
    y.sum().backward()


def test_a_loss_that_lives_on_holds_no_weight():
    """As autograd lets go of what it saved; a frozen weight has nothing else in the graph that holds it."""
    module, _ = layer("fp8")
    module.weight.requires_grad_(False)
    values = weakref.ref(module.weight.plain)
    loss = module(random_tensor(6, 32).requires_grad_()).sum()
    loss.backward()
    del module
    gc.collect()
    assert values() is None
    assert loss.grad_fn is not None


def test_a_rotated_face_of_a_weight_is_scaled_by_what_was_rotated(device):
    """Forward does not measure that; backward does."""
    rotated = ht.NVFP4Quantizer(hadamard=True)
    hybrid = ht.HybridQuantizer(ht.NVFP4Quantizer(), rotated)
    grads = []
    for keep in ("always", "never"):
        config = HybridConfig(
            ht.NVFP4Quantizer(), hybrid, ht.HybridQuantizer(rotated, ht.NVFP4Quantizer()), keep_faces=keep
        )
        torch.manual_seed(0)
        module = ht.quantize_(nn.Linear(64, 64, bias=False).to(device, torch.bfloat16), config)
        with torch.no_grad():
            module.weight[3, 5] = 9.0  # the rotation spreads it
        grads.append(run(module, random_tensor(32, 64, device=device), random_tensor(32, 64, seed=2, device=device))[1])
    assert torch.equal(*grads)


def test_a_second_backward_needs_a_graph_that_is_retained():
    module, _ = layer("fp8")
    x = random_tensor(6, 32).requires_grad_()
    y = module(x)
    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.sum().backward()
    assert torch.equal(x.grad, first)
    with pytest.raises(RuntimeError, match=r"second time|through a freed graph"):
        y.sum().backward()


@pytest.mark.parametrize("spec", ["fp8", "fp8+keep_faces", "fp8+free_faces"])
def test_a_weight_that_is_written_before_backward_is_told(spec):
    converted, _ = layer(spec)
    y = converted(random_tensor(6, 32).requires_grad_())
    written(converted)
    with pytest.raises(
        RuntimeError, match="grad_input: the weight of a layer was written or replaced between its forward and backward"
    ):
        y.backward(random_tensor(6, 48))


@pytest.mark.parametrize(
    "order", ["train eval train", "eval train eval", "train train eval", "infer train infer train"]
)
@pytest.mark.parametrize("spec", SPECS)
def test_train_and_eval_in_any_order_never_see_a_stale_face(spec, order):
    converted, _ = layer(spec)
    x, g = random_tensor(6, 32, seed=1), random_tensor(6, 48, seed=2)
    for step, phase in enumerate(order.split()):
        with torch.no_grad():
            converted.weight.copy_(random_tensor(48, 32, seed=step))
        fresh, _ = layer(spec)
        with torch.no_grad():
            fresh.weight.copy_(random_tensor(48, 32, seed=step))
        if phase == "train":
            for got, expected in zip(run(converted, x, g)[:3], run(fresh, x, g)[:3], strict=True):
                assert torch.equal(got, expected)
        else:
            with torch.no_grad() if phase == "eval" else torch.inference_mode():
                assert torch.equal(converted(x), fresh(x))


@pytest.mark.parametrize("spec", ["fp8+pow2_scale", "fp8_rowwise_hp_grad_weight", "fp8_delayed"])
def test_what_layers_remember_of_amaxes_changes_nothing(spec, device):
    """Magnitudes that stay, rise and fall from step to step; the twin forgets after each."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 96, bias=False), nn.GELU(), nn.Linear(96, 32)]
        models.append(ht.quantize_(nn.Sequential(*layers).to(device, torch.bfloat16), spec))
    for step in range(8):
        x = random_tensor(48, 64, seed=step % 3, device=device) * 2.0 ** (step // 2)
        for forgets, model in enumerate(models):
            model(x).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad.sign() * 2.0 ** -(step % 3 + 5))
            model.zero_grad()
            ht.step_(model)
            if forgets:
                for p in model.parameters():
                    getattr(getattr(p, "layer", None), "hints", {}).clear()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert torch.equal(getattr(p, "master", p), getattr(q, "master", q))
    remembered = set(models[0][0].weight.layer.hints)
    assert remembered == ({"input", "weight", "grad_output"} if spec == "fp8+pow2_scale" else set())


def test_low_precision_really_runs():
    """The operators are called, and the result differs from BF16: a test that a silent fallback would fail."""
    calls = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "hybridtensor":
                calls.append(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    converted, plain = layer("fp8")
    x, g = random_tensor(6, 32, seed=1), random_tensor(6, 48, seed=2)
    expected = run(plain, x, g)
    with Spy():
        got = run(converted, x, g)
    assert calls.count("scaled_mm") == 3
    assert calls.count("quantize") == 4  # the input, the gradient and each face of the weight
    assert all(not torch.equal(a, b) for a, b in zip(got[:3], expected[:3], strict=True))


@pytest.mark.parametrize("spec", ["fp8", "bf16", "fp8_delayed", "fp8+dequantized"])
@pytest.mark.parametrize("reduce", [torch.Tensor.sum, lambda y: y.float().square().sum()], ids=["sum", "square"])
def test_double_backward_is_refused(reduce, spec):
    """Also of a sum, whose gradient has none itself: the weight's part of a penalty would be lost."""
    converted, _ = layer(spec)
    x = random_tensor(6, 32).requires_grad_()
    with pytest.raises(
        NotImplementedError,
        match=r"create_graph=True differentiates gradients of a layer again, whose quantized products have",
    ):
        torch.autograd.grad(reduce(converted(x)), x, create_graph=True)


@pytest.mark.parametrize("spec", ["fp8", "fp8_rowwise", "fp8_delayed", "nvfp4", "fp8_high_precision_backward"])
def test_gradients_of_several_outputs_at_once_are_refused(spec, device):
    layer = ht.quantize_(nn.Linear(64, 32).to(device, torch.bfloat16), spec)
    x = random_tensor(32, 64, device=device).requires_grad_()
    y = layer(x)
    with pytest.raises(
        NotImplementedError, match=r"gradients of a layer at once, .* torch.autograd.grad once for each"
    ):
        torch.autograd.grad(y, x, torch.stack([y.detach()] * 3), is_grads_batched=True)


def test_gradients_of_several_outputs_at_once_in_high_precision(device):
    """Oracle: one after the other."""
    layer = ht.quantize_(nn.Linear(64, 32).to(device, torch.bfloat16), "bf16")
    x = random_tensor(32, 64, device=device).requires_grad_()
    y, grads = layer(x), random_tensor(3, 32, 32, seed=2, device=device)
    leaves = [x, layer.weight, layer.bias]
    made = torch.autograd.grad(y, leaves, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        for got, want in zip(made, torch.autograd.grad(y, leaves, grad, retain_graph=True), strict=True):
            torch.testing.assert_close(got[i], want)


def test_products_of_vectors_and_hessians_are_refused():
    converted, _ = layer("fp8", dtype=torch.float32)
    x = random_tensor(6, 32, dtype=torch.float32)
    for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            product(lambda x: F.silu(converted(F.silu(x))).sum(), x, torch.ones_like(x))


def test_gradients_that_depend_on_nothing_with_a_gradient_are_as_the_plain_layers():
    converted, plain = layer("fp8")
    converted.requires_grad_(False)
    plain.requires_grad_(False)
    x = random_tensor(6, 32).requires_grad_()
    for module in (converted, plain):
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        assert not grad.requires_grad


class ByHand(torch.autograd.Function):
    """A linear layer as some write it, for what they do beside it in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@pytest.mark.parametrize("persistent", [False, True])
def test_products_in_the_backward_of_a_function_are_refused(persistent):
    """They would be quantized as outputs, and the weight's gradient not at all."""
    converted, _ = layer("fp8", persistent=persistent)
    y = ByHand.apply(random_tensor(6, 32).requires_grad_(), converted.weight)
    with pytest.raises(
        NotImplementedError, match="the backward of an autograd function multiplies by the weight of a layer itself"
    ):
        y.sum().backward()
    with torch.no_grad():  # elsewhere it is what it looks like
        assert (random_tensor(6, 48) @ converted.weight).shape == (6, 32)


def test_a_forward_without_gradients_may_run_in_a_backward():
    """As of a teacher in a checkpointed block."""
    converted, _ = layer("fp8")
    x, seen = random_tensor(6, 32).requires_grad_(), []

    def look(grad):
        with torch.no_grad():
            seen.append(converted(x))

    y = converted(x)
    y.register_hook(look)
    y.sum().backward()
    assert torch.equal(seen[0], y)


class TestBadInput:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
    def test_dtype(self, dtype):
        converted, _ = layer("fp8")
        with pytest.raises(TypeError, match=f"floating-point input is required, got {dtype}"):
            converted(torch.zeros(4, 32, dtype=dtype))

    def test_mixed_dtypes(self):
        converted, _ = layer("fp8", bias=True)
        with pytest.raises(ValueError, match=r"got input in torch\.float32 for a weight in torch\.bfloat16"):
            converted(torch.zeros(4, 32))
        with pytest.raises(ValueError, match=r"got bias in torch\.float32"):
            F.linear(torch.zeros(4, 32).bfloat16(), converted.weight, torch.zeros(48))

    @pytest.mark.parametrize("shape", [(), (33,), (4, 31)], ids=str)
    def test_shape(self, shape):
        converted, _ = layer("fp8")
        with pytest.raises((ValueError, IndexError), match="input whose last dimension has 32 features"):
            converted(torch.zeros(shape, dtype=torch.bfloat16))

    def test_devices(self):
        converted, _ = layer("fp8")
        with pytest.raises(ValueError, match="operands on one device are required, got input on meta"):
            converted(torch.zeros(4, 32, dtype=torch.bfloat16, device="meta"))

    def test_missing_face_of_a_persistent_weight(self):
        converted, _ = layer("fp8", persistent=True)
        faces = converted.weight.detach()
        weight = nn.Parameter(HybridTensor(faces.rowwise, None, faces.config), requires_grad=False)
        x = random_tensor(4, 32)
        F.linear(x, weight)
        with pytest.raises(ValueError, match="grad_input: weight has no columnwise face"):
            F.linear(x.requires_grad_(), weight)

    def test_weights_that_are_no_matrix(self):
        weight = MasterWeight(torch.zeros(2, 3, 4), HybridConfig.parse("fp8"))
        with pytest.raises(ValueError, match="a matrix is required as weight"):
            F.linear(torch.zeros(2, 4), weight)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 5), (2, 3, 5)], ids=str)
def test_a_weight_on_the_left(shape, persistent):
    """``W @ X`` is ``(X.T @ W.T).T``, with its gradients and, as of plain tensors, contiguous."""
    converted, _ = layer("fp8", persistent=persistent)
    for multiply in (torch.matmul, lambda w, x: w @ x, lambda w, x: x.__rmatmul__(w)):
        found = []
        for of_linear in (False, True):
            x = (
                random_tensor(*shape[:-1], 32, *shape[-1:], dtype=torch.bfloat16)
                if shape
                else torch.ones(32).bfloat16()
            )
            x.requires_grad_()
            converted.zero_grad()
            if of_linear:
                y = F.linear(x.mT, converted.weight).mT if shape else F.linear(x, converted.weight)
            else:
                y = multiply(converted.weight, x)
                assert y.is_contiguous()
            y.square().sum().backward()
            found.append((y, x.grad, converted.weight.grad))
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: torch.einsum("ti,oi->to", x, w),
        lambda x, w: torch.tensordot(x, w, ([1], [1])),
        torch.inner,
        lambda x, w: torch.linalg.multi_dot([x, w.t()]),
        lambda x, w: torch.addmv(torch.zeros(48).bfloat16(), w, x[0]),
        lambda x, w: torch.baddbmm(torch.zeros(1).bfloat16(), x[None], w.t()[None] if w.config is None else w),
    ],
    ids=["einsum", "tensordot", "inner", "multi_dot", "addmv", "baddbmm"],
)
def test_products_that_are_not_quantized_raise(product, persistent):
    converted, _ = layer("fp8", persistent=persistent)
    with pytest.raises(
        NotImplementedError, match=r"this product with the weight of a layer is not quantized; use F\.linear"
    ):
        product(random_tensor(4, 32), converted.weight)


A, B = random_tensor(48, 4, seed=1), random_tensor(4, 32, seed=2)
SUMS = {
    "addmm": lambda w: torch.addmm(w, A, B, beta=0.5, alpha=2),
    "addmm by name": lambda w: torch.addmm(mat2=B, mat1=A, input=w),
    "method": lambda w: w.addmm(A, B),
    "transposed": lambda w: torch.addmm(w.t(), B.t(), A.t()),
    "baddbmm": lambda w: torch.baddbmm(w[None], A[None], B[None], alpha=0.5),
    "addbmm": lambda w: torch.addbmm(w, A[None], B[None]),
    "addmv": lambda w: torch.addmv(w[0], B.t(), A[0]),
    "addr": lambda w: torch.addr(w, A[:, 0], B[0]),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_weight_that_a_product_is_added_to_is_read(name):
    """PEFT computes ``W + B @ A`` of experts so: the values, with gradients, bit for bit."""
    converted, _ = layer("fp8")
    plain = converted.weight.dequantize().detach().clone().requires_grad_()
    expected, found = SUMS[name](plain), SUMS[name](converted.weight)
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert torch.equal(converted.weight.grad, plain.grad)
    if name in ("baddbmm", "addmv"):  # persistent matrices have no such views
        return
    persistent, _ = layer("fp8", persistent=True)
    assert torch.equal(SUMS[name](persistent.weight.data), SUMS[name](persistent.weight.original))
    with pytest.raises(NotImplementedError, match="would compute with the values of a weight that is persistent"):
        SUMS[name](persistent.weight)


@pytest.mark.parametrize("name", ["addmm", "addbmm"])
def test_a_sum_that_would_be_written_into_a_weight_says_so(name):
    """It is no product of the weight."""
    converted, _ = layer("fp8")
    data, (a, b) = converted.weight.data, (A, B) if name == "addmm" else (A[None], B[None])
    with pytest.raises(NotImplementedError, match=rf"aten\.{name}\.out is not an operation"):
        getattr(torch, name)(data, a, b, out=data)


ANALYSES = {
    "svd_lowrank": lambda w: torch.svd_lowrank(w, 4, niter=2)[1],
    "pca_lowrank": lambda w: torch.pca_lowrank(w, 4)[1],
    "matrix_power": lambda w: torch.linalg.matrix_power(w[:32], 3),
    "cdist": lambda w: torch.cdist(w, w),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_analyses_that_torch_composes_of_products_read_a_weight(name):
    """PEFT initializes adapters by singular vectors (``pissa_niter_4``)."""
    found = []
    for persistent in (False, True):
        made, _ = layer("fp8", persistent=persistent)
        weight = made.float().weight if not persistent else made.weight.data.float()
        for tensor in (weight, weight.original if persistent else weight.dequantize()):
            torch.manual_seed(0)
            found.append(ANALYSES[name](tensor))
        assert type(found[-2]) is torch.Tensor
        assert torch.equal(found[-2], found[-1])


@pytest.mark.parametrize("spec", ["fp8", "bf16", "bf16/mxfp8/fp8", "high_precision_fwd_mxfp8_bwd"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_written_in_place(spec, shape):
    """As plain modules' outputs are: activations in place, residuals that are added to them."""
    for bias, frozen, strided in itertools.product((True, False), repeat=3):
        converted, _ = layer(spec, n=64, bias=bias)
        converted.weight.requires_grad_(not frozen)
        x = random_tensor(*shape[:-1], 32).requires_grad_() if len(shape) > 1 else torch.ones(32).bfloat16()
        if strided and len(shape) > 2:
            x = x.detach().transpose(0, 1).contiguous().transpose(0, 1)
        expected = (converted(x) + 1).relu()
        y = converted(x)
        y += 1
        F.relu(y, inplace=True)
        assert torch.equal(y, expected)
        if y.requires_grad:
            y.sum().backward()


@pytest.mark.parametrize("cached", [False, True])
def test_a_layer_that_runs_twice_under_autocast_adds_its_gradients_in_its_own_dtype(cached):
    """Autocast caches the cast of a plain weight, through which the sum of both gradients is rounded."""
    converted, plain = layer("bf16", dtype=torch.float32)
    for one in (converted, plain):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            loss = sum(one(random_tensor(5, 32, seed=seed, dtype=torch.float32)).square().sum() for seed in (0, 1))
        loss.backward()
    assert torch.equal(converted.weight.grad, plain.weight.grad) is not cached
    rounded = converted.weight.grad.bfloat16().float()
    assert not cached or bool(((plain.weight.grad - rounded).abs() <= rounded.abs() * 2.0**-7).all())
