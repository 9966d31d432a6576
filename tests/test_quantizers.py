"""Quantizers: which faces, from what, with which bits; in place; every shape."""

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
import torch

from hybridtensor import Float8Quantizer, HybridQuantizer, HybridTensor, IdentityQuantizer, IdentityTensor, Quantizer
from hybridtensor import QuantizedTensor as Leaf
from hybridtensor.testing import edge_tensor, float8_oracle, random_tensor

PLAIN = [
    Float8Quantizer(granularity=g, dtype=d, pow2_scale=p)
    for g, d, p in itertools.product(("tensor", "row"), ("e4m3", "e5m2"), (False, True))
]
IDENTITY = IdentityQuantizer()
SOURCES = ("original", "rowwise_dequantized")
SOME = [PLAIN[0], PLAIN[3], PLAIN[4], PLAIN[6], IDENTITY]
HYBRIDS = [HybridQuantizer(a, b, source) for a, b, source in itertools.product(SOME, SOME, SOURCES)]
SHAPES = [(12,), (6, 10), (2, 3, 10), (2, 2, 3, 10), (1, 16), (16, 1), (0, 8), (8, 0), (2, 0, 8)]


def name(quantizer):
    if isinstance(quantizer, HybridQuantizer):
        return f"{name(quantizer.rowwise)}|{name(quantizer.columnwise)}|{quantizer.columnwise_source}"
    return str(quantizer.rowwise_format) + ("_pow2" if getattr(quantizer, "pow2_scale", False) else "")


def same(a: HybridTensor, b: HybridTensor) -> bool:
    """Bitwise, by value where an identity face may be stored in two ways."""
    for mine, theirs in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise)):
        if (mine is None) != (theirs is None):
            return False
        if isinstance(mine, IdentityTensor):
            if not torch.equal(mine.dequantize(), theirs.dequantize()):
                return False
        elif mine is not None and not torch.equal(mine, theirs):
            return False
    return True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quantizer", PLAIN, ids=name)
def test_both_faces_equal_the_oracle(quantizer, shape, dtype, device):
    x = random_tensor(*shape, dtype=dtype, device=device)
    h = quantizer.quantize(x)
    matrix = x.reshape(int(np.prod(shape[:-1])), shape[-1])
    assert (h.shape, h.dtype, h.device) == (x.shape, x.dtype, x.device)
    options = {"dtype": quantizer.dtype, "granularity": quantizer.granularity, "pow2_scale": quantizer.pow2_scale}
    for face, values, axis in ((h.rowwise, matrix, -1), (h.columnwise, matrix.t(), 0)):
        codes, scale = float8_oracle(values, **options)
        assert face.axis == axis
        np.testing.assert_array_equal(face.qdata.cpu().view(torch.uint8).numpy(), codes)
        np.testing.assert_array_equal(face.scale.cpu().numpy(), scale)
        assert face.dequantize().shape == x.shape


@pytest.mark.parametrize("quantizer", PLAIN, ids=name)
def test_edge_tensor_equals_the_oracle_in_both_directions(quantizer, device):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = edge_tensor(dtype, device)
        h = quantizer.quantize(x)
        options = {"dtype": quantizer.dtype, "granularity": quantizer.granularity, "pow2_scale": quantizer.pow2_scale}
        for face, values in ((h.rowwise, x), (h.columnwise, x.t())):
            codes, scale = float8_oracle(values, **options)
            np.testing.assert_array_equal(face.qdata.cpu().view(torch.uint8).numpy(), codes)
            np.testing.assert_array_equal(face.scale.cpu().numpy(), scale)


@pytest.mark.parametrize("quantizer", [*PLAIN, IDENTITY, *HYBRIDS], ids=name)
class TestFaces:
    def test_a_face_does_not_depend_on_the_other(self, quantizer, device):
        x = random_tensor(6, 10, device=device)
        both = quantizer.quantize(x)
        row, column = quantizer.quantize(x, columnwise=False), quantizer.quantize(x, rowwise=False)
        assert row.columnwise is None
        assert column.rowwise is None
        assert same(HybridTensor(row.rowwise, column.columnwise), both)

    def test_quantizing_twice_gives_the_same_bits(self, quantizer, device):
        x = random_tensor(6, 10, device=device)
        assert quantizer.repeatable
        assert same(quantizer.quantize(x), quantizer.quantize(x.clone()))

    def test_strides_do_not_matter(self, quantizer, device):
        x = random_tensor(10, 12, device=device)
        for view in (x.t(), x[::2], x[:, ::3], x.flip(0)):
            assert same(quantizer.quantize(view), quantizer.quantize(view.contiguous()))
        batch = random_tensor(3, 4, 10, device=device).transpose(0, 1)
        assert same(quantizer.quantize(batch), quantizer.quantize(batch.contiguous()))

    def test_the_result_shares_nothing_and_has_no_gradient(self, quantizer, device):
        x = random_tensor(6, 10, device=device).requires_grad_()
        h = quantizer.quantize(x)
        before = h.dequantize().clone()
        assert not h.requires_grad
        with torch.no_grad():
            x.zero_()
        assert torch.equal(h.dequantize(), before)

    @pytest.mark.parametrize("which", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "row", "column"])
    def test_update_refreshes_every_face_in_place(self, quantizer, which, device):
        old, new = random_tensor(6, 10, device=device, seed=1), random_tensor(6, 10, device=device, seed=2)
        h = quantizer.quantize(old, **which)
        faces, address = (h.rowwise, h.columnwise), h.data_ptr()
        assert quantizer.update_(h, new) is h
        assert all(a is b for a, b in zip((h.rowwise, h.columnwise), faces, strict=True))
        assert h.data_ptr() == address
        assert same(h, quantizer.quantize(new, **which))

    def test_empty(self, quantizer, device):
        h = quantizer.quantize(torch.empty(0, 8, device=device))
        assert h.dequantize().shape == (0, 8)

    def test_is_a_value(self, quantizer, device):
        again = pickle.loads(pickle.dumps(quantizer))
        assert again == quantizer
        assert hash(again) == hash(quantizer)
        with pytest.raises(dataclasses.FrozenInstanceError):
            quantizer.repeatable_ = False


@pytest.mark.parametrize("quantizer", [q for q in HYBRIDS if q.columnwise_source == "rowwise_dequantized"], ids=name)
def test_rowwise_dequantized_equals_doing_it_by_hand(quantizer, device):
    for dtype in (torch.bfloat16, torch.float32):
        x = random_tensor(6, 10, dtype=dtype, device=device)
        seen = quantizer.rowwise.quantize(x).rowwise.dequantize()
        assert seen.dtype == dtype
        by_hand = quantizer.columnwise.quantize(seen).columnwise
        got = quantizer.quantize(x).columnwise
        if isinstance(got, IdentityTensor):
            assert torch.equal(got.dequantize(), by_hand.dequantize())
        else:
            assert torch.equal(got, by_hand)


def test_a_dequantized_identity_face_stores_nothing():
    h = HybridQuantizer(Float8Quantizer(), IDENTITY, "rowwise_dequantized").quantize(random_tensor(6, 10))
    assert isinstance(h.columnwise.source, Leaf)
    assert h.columnwise.source.qdata.data_ptr() == h.rowwise.qdata.data_ptr()
    assert h.columnwise.source is not h.rowwise


@pytest.mark.parametrize("quantizer", PLAIN, ids=name)
def test_a_hybrid_of_two_equal_formats_equals_the_plain_one(quantizer):
    x = random_tensor(6, 10)
    assert same(HybridQuantizer(quantizer, quantizer).quantize(x), quantizer.quantize(x))


def test_per_row_shards_equal_the_whole():
    x, quantizer = random_tensor(8, 10), Float8Quantizer(granularity="row")
    whole = quantizer.quantize(x).rowwise
    parts = [quantizer.quantize(part).rowwise for part in x.split(3)]
    assert torch.equal(torch.cat([p.qdata.view(torch.uint8) for p in parts]), whole.qdata.view(torch.uint8))
    assert torch.equal(torch.cat([p.scale for p in parts]), whole.scale)


def test_the_nominal_dtype_may_differ_from_the_input():
    x = random_tensor(6, 10, dtype=torch.float32)
    h = Float8Quantizer().quantize(x, dtype=torch.bfloat16)
    assert h.dtype == h.rowwise.dtype == h.dequantize().dtype == torch.bfloat16
    full = Float8Quantizer().quantize(x)
    assert torch.equal(h.rowwise.qdata.view(torch.uint8), full.rowwise.qdata.view(torch.uint8))
    assert torch.equal(IDENTITY.quantize(x, dtype=torch.bfloat16).dequantize(), x.bfloat16())


def test_a_quantizer_of_ones_own_takes_part():
    class Halves(Quantizer):
        """Identity faces of half the values."""

        rowwise_format = columnwise_format = IDENTITY.rowwise_format

        def faces(self, x, *, rowwise, columnwise, dtype):
            return IDENTITY.faces(x * 0.5, rowwise=rowwise, columnwise=columnwise, dtype=dtype)

    x = random_tensor(6, 10)
    h = HybridQuantizer(Float8Quantizer(), Halves()).quantize(x)
    assert torch.equal(h.columnwise.dequantize(), x * 0.5)


class TestBadInput:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float64], ids=str)
    @pytest.mark.parametrize("quantizer", [PLAIN[0], IDENTITY, HYBRIDS[1]], ids=name)
    def test_dtype(self, quantizer, dtype):
        with pytest.raises(TypeError, match=rf"{type(quantizer).__name__}: bfloat16, float16 or float32 .*got {dtype}"):
            quantizer.quantize(torch.zeros(2, 2, dtype=dtype))

    def test_quantized_twice(self):
        h = PLAIN[0].quantize(torch.ones(2, 3))
        with pytest.raises(TypeError, match=r"in high precision is required, got HybridTensor.*call dequantize\(\)"):
            PLAIN[0].quantize(h)

    def test_rank(self):
        for shape in ((), (1, 1, 1, 1, 1)):
            with pytest.raises(ValueError, match="one to four dimensions"):
                PLAIN[0].quantize(torch.zeros(shape))

    def test_no_face(self):
        with pytest.raises(ValueError, match="at least one face"):
            PLAIN[0].quantize(torch.zeros(2, 2), rowwise=False, columnwise=False)

    def test_not_a_tensor(self):
        with pytest.raises(TypeError, match="a tensor is required, got list"):
            PLAIN[0].quantize([1.0])

    def test_update(self):
        h = PLAIN[0].quantize(torch.zeros(2, 3))
        with pytest.raises(TypeError, match="a HybridTensor is required, got Tensor"):
            PLAIN[0].update_(torch.zeros(2, 3), torch.zeros(2, 3))
        with pytest.raises(ValueError, match=r"shape \(2, 3\) is required, got \(3, 2\)"):
            PLAIN[0].update_(h, torch.zeros(3, 2))
        with pytest.raises(ValueError, match="of this quantizer's making"):
            PLAIN[6].update_(h, torch.zeros(2, 3))
        with pytest.raises(ValueError, match="slice through a scale group"):
            PLAIN[0].update_(h[:1], torch.zeros(1, 3))

    def test_unknown_words(self):
        with pytest.raises(ValueError, match="unknown granularity 'rows'; did you mean 'row'"):
            Float8Quantizer(granularity="rows")
        with pytest.raises(ValueError, match="unknown dtype 'e4m4'; did you mean 'e4m3'"):
            Float8Quantizer(dtype="e4m4")
        with pytest.raises(TypeError, match="pow2_scale must be a bool"):
            Float8Quantizer(pow2_scale="yes")
        with pytest.raises(ValueError, match="did you mean 'rowwise_dequantized'"):
            HybridQuantizer(PLAIN[0], IDENTITY, "dequantized_rowwise")
        for child in (None, "fp8", HYBRIDS[0]):
            with pytest.raises(TypeError, match="quantizer of one format is required for columnwise"):
                HybridQuantizer(PLAIN[0], child)
