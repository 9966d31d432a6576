"""Training of real architectures: near the plain model, or bitwise the same where nothing is quantized."""

import io
import re

import pytest
import torch
from real_models import FORWARD, GRADIENT, ROWS, assert_same, distance, given, is_same, loss_of, run

import hybridtensor as ht
from hybridtensor.layers import SKIPPED_NAMES, layers_of
from hybridtensor.subclasses import is_converted

pytestmark = [  # of the packages, which call what others deprecated
    pytest.mark.filterwarnings(f"ignore:::{package}") for package in ("transformers", "timm", "diffusers", "torchao")
]
EVERY = pytest.mark.parametrize("row", ROWS, ids=str)
FORMATS = pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])


@EVERY
def test_high_precision_is_bitwise_the_plain_model(row):
    """The recipe that quantizes nothing runs the same three products as the others, of the same operands."""
    expected = run(row.make(), row)
    model = ht.quantize_(row.make(), "bf16")
    assert_same(run(model, row), expected)


@EVERY
@FORMATS
def test_steps_are_near_those_of_the_plain_model(row, recipe):
    plain, plain_grads = run(row.make(), row)
    model = ht.quantize_(row.make(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run(model, row)
    ht.step_(model)  # delayed scales follow from the first step, in which they are 1
    loss, grads = run(model, row)
    assert {n for n, g in grads.items() if g is None} == {n for n, g in plain_grads.items() if g is None}
    assert abs(loss - plain) <= FORWARD * abs(plain)
    converted = {n: plain_grads[n] for n, p in model.named_parameters() if is_converted(p) and p.grad is not None}
    assert 0 < distance(grads, converted) <= GRADIENT
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    ht.step_(model)
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters() if name in converted)
    second, _ = run(model, row)
    assert second.isfinite()
    assert second != loss


@EVERY
def test_nothing_is_silently_plain(row):
    """What stays in high precision is what the row lists, and output heads and routers."""
    model = ht.quantize_(row.make(), "fp8")
    found = ht.check(model, **row.call(), loss=loss_of)
    assert not found.unused
    assert all(product.expected for product in found.products)
    assert all("embedding" in read.reader for read in found.reads), found.reads
    skipped = dict(ht.explain(model, show=False).skipped)
    left = [m.name for m in found.coverage.plain if m.why not in SKIPPED_NAMES.values()]
    unknown = [name for name in left if not any(re.search(pattern, name) for pattern in row.plain)]
    assert not unknown, [m for m in found.coverage.plain if m.name in unknown]
    idle = [pattern for pattern in row.plain if not any(re.search(pattern, name) for name in left)]
    assert not idle, (idle, left)
    for layer in layers_of(model):
        is_listed = layer.is_stack or any(re.search(pattern, layer.name) for pattern in row.plain)
        assert layer.recipe is not None or is_listed or skipped[layer.name] in SKIPPED_NAMES.values(), layer.name


def start_checkpointing(model):
    """Turn activation checkpointing on as the model's library does; skip the test where there is none."""
    if hasattr(model, "gradient_checkpointing_enable") and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    elif getattr(model, "_supports_gradient_checkpointing", False):
        model.enable_gradient_checkpointing()
    else:
        pytest.skip(f"{type(model).__name__} has no activation checkpointing")


@EVERY
@FORMATS
def test_activation_checkpointing_changes_no_bit(row, recipe):
    """More than it changes of the plain model: T5's adds gradients up in another order."""
    expected, plain = run(ht.quantize_(row.make(), recipe), row), run(row.make(), row)
    model, other = ht.quantize_(row.make(), recipe), row.make()
    start_checkpointing(model)
    start_checkpointing(other)
    forwards = []
    for layer in layers_of(model):
        if layer.recipe is not None:
            layer.module.register_forward_hook(lambda module, *_: forwards.append(module))
    found = run(model, row)
    if is_same(run(other, row), plain):
        assert_same(found, expected)
    else:  # what the last bit of a sum changes of what is rounded after it
        assert torch.equal(found[0], expected[0])
        assert distance(found[1], given(expected[1])) <= 2**-8
    assert len(forwards) > len(set(forwards)), "nothing was computed again"


@EVERY
@FORMATS
def test_a_state_dict_is_loaded_into_another_model(row, recipe):
    """Weights and state: the step after loading is bitwise the step that would have followed."""
    model = ht.quantize_(row.make(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run(model, row)
    optimizer.step()
    ht.step_(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    other = ht.quantize_(row.make(seed=1), recipe)
    assert not torch.equal(run(other, row)[0], run(model, row)[0])
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same(run(other, row), run(model, row))


@pytest.mark.parametrize(("row", "implementation"), [(row, way) for row in ROWS for way in row.experts], ids=str)
def test_experts_that_are_chosen(row, implementation):
    """Two of four for each token, so that groups differ: bitwise the plain model, and quantized."""
    changes = {"experts_implementation": implementation, "num_experts_per_tok": 2}
    expected = run(row.make(**changes), row)
    assert_same(run(ht.quantize_(row.make(**changes), "bf16"), row), expected)
    model = ht.quantize_(row.make(**changes), "fp8")
    assert abs(run(model, row)[0] - expected[0]) <= FORWARD * expected[0]
    found = ht.check(model, **row.call())
    experts = {product.layer for product in found.products if "experts" in product.layer}
    assert len(experts) >= 2
    assert all(product.expected for product in found.products)


@pytest.mark.parametrize("row", [row for row in ROWS if len(row.experts) > 1], ids=str)
def test_both_ways_to_multiply_experts_are_one_model(row):
    """They add up the outputs of the experts of a token in another order, in bf16, with at most 2^-8 of error each."""
    losses = [run(ht.quantize_(row.make(experts_implementation=way), "fp8"), row)[0] for way in row.experts]
    assert abs(losses[0] - losses[1]) <= 2**-8 * losses[0]
