"""HybridTensor: construction, precision, serialization, flattening."""

import copy
import io
import pickle

import pytest
import torch
from processes import call_program
from torch import nn

import hybridtensor as ht
from hybridtensor import (
    Float8Quantizer,
    HybridConfig,
    HybridQuantizer,
    HybridTensor,
    IdentityQuantizer,
    IdentityTensor,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from hybridtensor.subclasses.structure import flatten, unflatten
from hybridtensor.testing import random_tensor

E4M3, E5M2, ROW = Float8Quantizer(), Float8Quantizer(dtype="e5m2"), Float8Quantizer(granularity="row")
QUANTIZERS = [E4M3, ROW, HybridQuantizer(ROW, E5M2), HybridQuantizer(E4M3, IdentityQuantizer(), "rowwise_dequantized")]


def test_dequantize_takes_the_more_precise_face():
    x = random_tensor(8, 16)
    for quantizer, expected in (
        (HybridQuantizer(E4M3, IdentityQuantizer()), "columnwise"),
        (HybridQuantizer(E5M2, E4M3), "columnwise"),
        (HybridQuantizer(E4M3, E5M2), "rowwise"),
        (HybridQuantizer(E4M3, ROW), "columnwise"),
        (HybridQuantizer(ROW, E4M3), "rowwise"),
        (E4M3, "rowwise"),
    ):
        h = quantizer.quantize(x)
        assert torch.equal(h.dequantize(), getattr(h, expected).dequantize()), quantizer
    assert torch.equal(HybridQuantizer(E4M3, IdentityQuantizer()).quantize(x).dequantize(), x)
    assert E4M3.quantize(x).dequantize(torch.float32).dtype == torch.float32


def test_faces_must_belong_together():
    x, y = E4M3.quantize(random_tensor(4, 8)), E4M3.quantize(random_tensor(4, 16))
    with pytest.raises(ValueError, match=r"faces of one shape are required, got rowwise .*\[4, 8\].*\[4, 16\]"):
        HybridTensor(x.rowwise, y.columnwise)
    with pytest.raises(ValueError, match="faces of one dtype"):
        HybridTensor(x.rowwise, x.columnwise.to(torch.float32))
    with pytest.raises(ValueError, match="at least one face"):
        HybridTensor(None, None)


COPIES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "to": lambda x: x.to(torch.float32),
    "empty_like": torch.empty_like,
    "new_zeros": lambda x: x.new_zeros((64, 32)),
    "copy_": lambda x: torch.empty_like(x).copy_(x),
    "view": lambda x: x.view(4, 8, 32),
    "slice": lambda x: x[16:],
    "detach": torch.detach,
}


@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("format", [E4M3, ROW, MXFP8Quantizer(), NVFP4Quantizer()], ids=str)
def test_what_one_face_is_of_the_other_it_stays(format, name, turned):
    """One memory, and so one write, for a face that gives back what the other one holds."""
    x = HybridQuantizer(format, IdentityQuantizer(), "rowwise_dequantized").quantize(random_tensor(32, 32))
    made = COPIES[name](x.t() if turned and name not in ("view", "slice") else x)
    quantized, other = made.rowwise, made.columnwise
    if isinstance(quantized, IdentityTensor):
        quantized, other = other, quantized
    for inner in quantized.inner_names:
        mine, theirs = getattr(quantized, inner), getattr(other.source, inner)
        assert (mine is None) == (theirs is None)
        assert mine is None or mine.data_ptr() == theirs.data_ptr()


def test_faces_of_memories_of_their_own_are_copied_apart():
    x = HybridQuantizer(E4M3, IdentityQuantizer(), "rowwise_dequantized").quantize(random_tensor(32, 32))
    x = HybridTensor(x.rowwise, IdentityTensor(E5M2.quantize(random_tensor(32, 32, seed=1)).rowwise))
    assert torch.equal(x.clone(), x)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("which", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "row", "column"])
class TestRoundTrips:
    def test_flatten(self, quantizer, which):
        x = quantizer.quantize(random_tensor(2, 3, 8), **which)
        plain, structure = flatten(x)
        assert all(type(t) is torch.Tensor for t in plain)
        assert hash(structure) == hash(flatten(quantizer.quantize(random_tensor(2, 3, 8, seed=1), **which))[1])
        assert torch.equal(unflatten(plain, structure), x)
        names, metadata = x.__tensor_flatten__()
        inner = {name: getattr(x, name) for name in names}
        assert torch.equal(HybridTensor.__tensor_unflatten__(inner, metadata, x.size(), x.stride()), x)

    def test_pickle_and_torch_save(self, quantizer, which):
        x = quantizer.quantize(random_tensor(6, 8), **which)
        assert torch.equal(pickle.loads(pickle.dumps(x)), x)
        for weights_only in (True, False):
            buffer = io.BytesIO()
            torch.save({"x": x, "xt": x.t()}, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=weights_only)
            assert torch.equal(loaded["x"], x)
            assert torch.equal(loaded["xt"], x.t())
            assert loaded["xt"].stride() == x.t().stride()


def test_weights_only_load_works_in_a_process_that_only_imports_us(tmp_path):
    weight = E4M3.quantize(random_tensor(6, 8))
    weight = HybridTensor(weight.rowwise, weight.columnwise, HybridConfig.parse("fp8+dequantized"))
    torch.save({"w": weight}, tmp_path / "w.pt")
    program = (
        f"import torch, hybridtensor; w = torch.load({str(tmp_path / 'w.pt')!r}, weights_only=True)['w']; "
        "print(type(w).__name__, w.config, w.dequantize().float().sum().item().hex())"
    )
    assert call_program(program).split() == [
        "HybridTensor",
        "fp8+dequantized",
        weight.dequantize().float().sum().item().hex(),
    ]


def test_a_wrapper_reports_the_plain_tensors_shape_and_strides():
    x = random_tensor(6, 8)
    h = E4M3.quantize(x)
    assert (h.shape, h.stride(), h.dtype, h.device) == (x.shape, x.stride(), x.dtype, x.device)
    assert h.t().stride() == x.t().stride()
    assert not h.requires_grad
    assert "rowwise=fp8_e4m3_tensor" in repr(h)
    assert "columnwise" in repr(h.columnwise)


@pytest.mark.parametrize(
    ("error", "cut"),
    [
        (ValueError, lambda w: w[:9]),
        (NotImplementedError, lambda w: w[0]),
        (NotImplementedError, lambda w: w.view(-1, 8)),
        (TypeError, lambda w: w.int()),
    ],
    ids=["slice", "select", "view", "to"],
)
def test_errors_of_faces_name_the_layer(error, cut):
    net = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8_block", persistent=True)
    with pytest.raises(error, match="layer 0"):
        cut(net[0].weight)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(64, 128), (128, 64)])
def test_initializers_of_persistent_weights(recipe, shape):
    layer = ht.quantize_(nn.Sequential(nn.Linear(*shape, bias=False)), recipe, persistent=True)[0]
    nn.init.orthogonal_(layer.weight)
    values = layer.weight.high_precision.current.double()
    few = values if shape[0] < shape[1] else values.t()
    torch.testing.assert_close(few.t() @ few, torch.eye(64, dtype=torch.float64), atol=1e-5, rtol=0)
    nn.init.trunc_normal_(layer.weight.data, a=-1.0, b=1.0)
    values = layer.weight.high_precision.current
    assert 0.9 < values.abs().max() <= 1.0
    made = ht.quantize_(nn.Sequential(nn.Linear(*shape, bias=False)), recipe, persistent=True)[0]
    made.weight.detach().copy_(values)
    assert torch.equal(made.weight.dequantize(), layer.weight.dequantize())


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
@pytest.mark.parametrize(
    "read",
    [
        nn.utils.parametrizations.spectral_norm,
        lambda layer: torch.linalg.matrix_norm(layer.weight),
        pytest.param(
            lambda layer: nn.init.trunc_normal_(layer.weight),
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="torch's reads nothing before 2.12"),
        ),
    ],
)
def test_the_error_of_reading_a_persistent_parameter_says_what_can_be_read(recipe, read):
    layer = ht.quantize_(nn.Sequential(nn.Linear(64, 128)), recipe, persistent=True)[0]
    with pytest.raises(NotImplementedError, match=r"layer 0: .* read its data, .* without persistent=True"):
        read(layer)
