"""New values for existing faces: the cast writes into them, and makes no others.

Oracle: quantizing the new values, which other tests compare with the formats' definitions.
"""

import pytest
import tiers
import torch
from any_layer import ANY_LAYER
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hybridtensor as ht
from hybridtensor import (
    Context,
    DelayedFloat8Quantizer,
    Float8Quantizer,
    HybridQuantizer,
    HybridTensor,
    IdentityQuantizer,
    LayerState,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
)
from hybridtensor.subclasses.quantizing import refresh_
from hybridtensor.subclasses.structure import flatten
from hybridtensor.testing import random_tensor

ROWS, COLUMNS = 96, 160
QUANTIZERS = {
    "row": Float8Quantizer(granularity="row"),
    "block": Float8Quantizer(granularity="block"),
    "square block": Float8Quantizer(granularity="block", block="128x128"),
    "square MX": MXFP8Quantizer(two_d=True),
    "two formats": HybridQuantizer(NVFP4Quantizer(), MXFP8Quantizer()),
    "of rowwise": HybridQuantizer(MXFP8Quantizer(), Float8Quantizer(), "rowwise_dequantized"),
    "random": NVFP4Quantizer(rounding="stochastic", hadamard=True),
    "delayed": HybridQuantizer(DelayedFloat8Quantizer(), DelayedFloat8Quantizer(dtype="e5m2"), "rowwise_dequantized"),
}
IN_PART = {
    "identity row": HybridQuantizer(IdentityQuantizer(), MXFP8Quantizer()),
    "identity of rowwise": HybridQuantizer(MXFP8Quantizer(), IdentityQuantizer(), "rowwise_dequantized"),
    "identity": IdentityQuantizer(),
}


class Calls(TorchDispatchMode):
    """Operators that are called, and copies into tensors as large as elements."""

    def __init__(self):
        super().__init__()
        self.names, self.copies = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        self.copies += func is torch.ops.aten.copy_.default and args[0].numel() >= ROWS * COLUMNS // 2
        return func(*args, **(kwargs or {}))

    @property
    def wrote_straight(self):
        return "hybridtensor::quantize_into" in self.names and "hybridtensor::quantize" not in self.names


def values(device, seed, dtype=torch.bfloat16):
    return random_tensor(ROWS, COLUMNS, device=device, seed=seed, dtype=dtype)


def context(quantizer, device, seed=0):
    """Return a layer's state; equal ones draw equal numbers."""
    state = LayerState.of({"weight": quantizer}).to(device)
    return Context("weight", state.tensors())


def tensors(h):
    return [t for face in (h.rowwise, h.columnwise) if face is not None for t in flatten(face)[0]]


def same_bits(a, b):
    raw = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def check(h, quantizer, x, expected):
    """Refresh ``h``, and compare it with ``expected``; return what was called."""
    kept = [(t, t.data_ptr(), t._version) for t in tensors(h)]
    with Calls() as calls:
        assert quantizer.update_(h, x, context=context(quantizer, x.device)) is h
    assert all(t is old for t, (old, _, _) in zip(tensors(h), kept, strict=True))
    assert all(t.data_ptr() == address and t._version > version for t, address, version in kept)
    assert all(same_bits(a, b) for a, b in zip(tensors(h), tensors(expected), strict=True))
    return calls


@pytest.mark.parametrize("which", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "row", "column"])
@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_the_cast_writes_into_the_faces(quantizer, which, device):
    old, new = values(device, 1), values(device, 2)
    h, expected = (quantizer.quantize(x, **which, context=context(quantizer, device)) for x in (old, new))
    calls = check(h, quantizer, new, expected)
    assert calls.wrote_straight
    assert not calls.copies


@pytest.mark.parametrize("quantizer", IN_PART.values(), ids=IN_PART)
def test_faces_in_high_precision_are_copied_into(quantizer, device):
    old, new = values(device, 1), values(device, 2)
    check(quantizer.quantize(old), quantizer, new, quantizer.quantize(new))


@pytest.mark.parametrize("recipe", sorted(ANY_LAYER))
def test_the_weight_of_every_recipe(recipe, device):
    def persistent(x):
        model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16, device=device))
        with torch.no_grad():
            model[0].weight.copy_(x)
        return ht.quantize_(model, recipe, persistent=True)[0].weight

    new = values(device, 2)
    weight, expected = persistent(values(device, 1)), persistent(new)
    quantizer = weight.config.weight
    if quantizer.stochastic:
        pytest.skip("weights are rounded to nearest in every recipe; of others, draws would have to be repeated")
    kept = [(t, t.data_ptr(), t._version) for t in tensors(weight)]
    with Calls() as calls:
        refresh_(weight, new)
    assert all(t.data_ptr() == address and t._version > version for t, address, version in kept)
    assert all(same_bits(a, b) for a, b in zip(tensors(weight), tensors(expected), strict=True))
    in_formats = all(
        isinstance(face, QuantizedTensor) for face in (weight.rowwise, weight.columnwise) if face is not None
    )
    assert calls.wrote_straight == in_formats


def with_faces(h, row, column):
    """Return a tensor like ``h`` whose elements are others."""

    def make(face, data):
        return None if face is None else face.map_inner(lambda t: data if t is face.qdata else t)

    return HybridTensor(make(h.rowwise, row), make(h.columnwise, column))


def test_one_face_is_a_view_of_the_other(device):
    quantizer = QUANTIZERS["square MX"]
    old, new = values(device, 1), values(device, 2)
    h, expected = quantizer.quantize(old), quantizer.quantize(new)
    shared = with_faces(h, h.rowwise.qdata, h.rowwise.qdata.t())
    assert not check(shared, quantizer, new, expected).wrote_straight


def test_the_new_values_lie_in_the_faces(device):
    """They are read before they are overwritten."""
    quantizer = QUANTIZERS["row"]
    new = values(device, 2)
    h, expected = quantizer.quantize(values(device, 1)), quantizer.quantize(new)
    memory = torch.empty(2 * ROWS * COLUMNS, dtype=torch.uint8, device=device)
    x = memory.view(torch.bfloat16).view(ROWS, COLUMNS).copy_(new)
    of_row, of_column = (half.view(torch.float8_e4m3fn) for half in memory.chunk(2))
    inside = with_faces(h, of_row.view(ROWS, COLUMNS), of_column.view(COLUMNS, ROWS))
    assert not check(inside, quantizer, x, expected).wrote_straight


@pytest.mark.parametrize("change", ["strides", "address"])
def test_faces_that_kernels_do_not_write_are_copied_into(change, device):
    quantizer = QUANTIZERS["block"]
    old, new = values(device, 1), values(device, 2)
    h, expected = quantizer.quantize(old), quantizer.quantize(new)
    rows, data = h.rowwise, h.rowwise.qdata
    if change == "strides":
        data = data.t().contiguous().t()
    else:
        data = torch.empty(data.numel() + 1, dtype=data.dtype, device=device)[1:].view(data.shape)
    assert not check(with_faces(h, data, h.columnwise.qdata), quantizer, new, expected).wrote_straight
    assert rows.format == h.rowwise.format


def test_a_refused_update_leaves_every_byte(device):
    """Another format, a slice through a scale group, a state that is missing, and shapes that cannot be blocks."""
    x = values(device, 1)
    h = Float8Quantizer().quantize(x)
    part = Float8Quantizer().quantize(x, columnwise=False)[:32]
    mixed = HybridTensor(h.rowwise, MXFP8Quantizer().quantize(x).columnwise)
    kept = [(t, t.clone()) for t in (*tensors(h), *tensors(mixed), *tensors(part))]
    for dst, quantizer, new in (
        (h, MXFP8Quantizer(), x), (mixed, Float8Quantizer(), x), (part, Float8Quantizer(), x[:32]),
        (h, DelayedFloat8Quantizer(), x), (h, NVFP4Quantizer(), x),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"required|slice through|to take its scale from"):
            quantizer.update_(dst, new + 1)
    assert all(same_bits(t, before) for t, before in kept)


def test_compiled(device):
    quantizer = QUANTIZERS["of rowwise"]
    old, new = values(device, 1), values(device, 2)
    h, expected = quantizer.quantize(old), quantizer.quantize(new)
    torch.compile(quantizer.update_, backend="inductor" if tiers.LONG else "aot_eager")(h, new)
    assert all(same_bits(a, b) for a, b in zip(tensors(h), tensors(expected), strict=True))


def test_under_inference_mode(device):
    quantizer = QUANTIZERS["block"]
    with torch.inference_mode():
        h = quantizer.quantize(values(device, 1))
        quantizer.update_(h, values(device, 2))
    assert all(same_bits(a, b) for a, b in zip(tensors(h), tensors(quantizer.quantize(values(device, 2))), strict=True))


def test_a_refused_copy_leaves_every_byte():
    """A row has a scale of its own, and the columns' scales are those of all rows."""
    first, second = (QUANTIZERS["row"].quantize(random_tensor(64, 32, seed=seed)) for seed in (1, 2))
    kept = [(t, t.clone()) for t in tensors(first)]
    with pytest.raises(ValueError, match="a slice through a scale group"):
        first[:32].copy_(second[:32])
    assert all(torch.equal(t.view(torch.uint8), before.view(torch.uint8)) for t, before in kept)


def test_a_write_into_a_part_of_a_scale_group_of_a_weight_names_the_layer():
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8", persistent=True)
    for part in (model[0].weight.detach()[3:7], model[0].weight.data[3:7]):
        with pytest.raises(ValueError, match=r"update_ of layer 0: .* is a slice through a scale group; update"):
            part.mul_(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_persistent_weight_copies_from_every_dtype(dtype):
    layer = ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8", persistent=True)[0]
    values = (random_tensor(32, 32) * 8).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(values)
        found = layer.weight.dequantize()
        layer.weight.copy_(values.float())
    assert found.any()
    assert torch.equal(found, layer.weight.dequantize())
