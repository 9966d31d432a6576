"""Quantizers: which faces, from what, with which bits; in place; every shape."""

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
import tiers
import torch
from fp4_oracles import four_over_six_oracle, mxfp4_oracle
from hypothesis import given
from hypothesis import strategies as st
from tiers import by_group, covered, examples

from hybridtensor import (
    Context,
    DelayedFloat8Quantizer,
    Float8Quantizer,
    HybridQuantizer,
    HybridTensor,
    IdentityQuantizer,
    IdentityTensor,
    LayerState,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from hybridtensor import QuantizedTensor as Leaf
from hybridtensor.ops.references.hadamard import rotate
from hybridtensor.ops.references.nvfp4 import unpack
from hybridtensor.subclasses.structure import flatten
from hybridtensor.testing import edge_tensor, float8_oracle, mx_oracle, nvfp4_oracle, random_tensor

PLAIN = [
    Float8Quantizer(granularity=g, dtype=d, pow2_scale=p)
    for g, d, p in itertools.product(("tensor", "row"), ("e4m3", "e5m2"), (False, True))
]
BLOCKS = [
    Float8Quantizer(granularity="block", dtype=d, pow2_scale=p, block=b)
    for b, d, p in itertools.product(((1, 128), "128x128"), ("e4m3", "e5m2"), (False, True))
]
MX = [MXFP8Quantizer(dtype=d, two_d=t) for d, t in itertools.product(("e4m3", "e5m2"), (False, True))]
MX4 = [
    MXFP4Quantizer(), MXFP4Quantizer(scale_rounding="even"), MXFP4Quantizer(two_d=True, scale_rounding="floor"),
    MXFP4Quantizer(hadamard=True), MXFP4Quantizer(two_d=True),
]  # fmt: skip
NVFP4 = [
    NVFP4Quantizer(), NVFP4Quantizer(two_d=True), NVFP4Quantizer(row_scaled=True), NVFP4Quantizer(hadamard=True),
    NVFP4Quantizer(row_scaled=True, hadamard=True),
]  # fmt: skip
CHOSEN = [
    NVFP4Quantizer(four_over_six="mae"), NVFP4Quantizer(two_d=True, four_over_six="mse"),
    NVFP4Quantizer(hadamard=True, four_over_six="mse"), NVFP4Quantizer(two_d=True, four_over_six="mae", scale_max=448),
    NVFP4Quantizer(row_scaled=True, four_over_six="mae", scale_max=448),
]  # fmt: skip
IDENTITY = IdentityQuantizer()
SOURCES = ("original", "rowwise_dequantized")
SOME = [PLAIN[0], PLAIN[3], PLAIN[4], PLAIN[6], IDENTITY, BLOCKS[1], BLOCKS[4], MX[0], MX[3], *NVFP4[:4]]
# Per tensor, per row, high precision, fp32 and power-of-two scales of blocks, MX, NVFP4
FAMILIES = [SOME[:2], SOME[2:4], [IDENTITY], SOME[5:7], SOME[7:9], SOME[9:]]


def hybrids():
    """Return hybrids of every two families with both sources; in the long tier of every two quantizers."""
    if tiers.LONG:
        return [HybridQuantizer(*chosen) for chosen in itertools.product(SOME, SOME, SOURCES)]
    rows, columns = ([itertools.cycle(family) for family in FAMILIES] for _ in range(2))
    return [HybridQuantizer(next(a), next(b), source) for a, b, source in covered(rows, columns, SOURCES)]


HYBRIDS = hybrids()
SHAPES = [(12,), (6, 10), (2, 3, 10), (2, 2, 3, 10), (1, 16), (16, 1), (0, 8), (8, 0), (2, 0, 8)]


def encoded(quantizer, matrix, transposed=False):
    """Return codes, one per byte, scales and tensor scales of a matrix along its last dimension, by the oracles.

    ``transposed`` says that it is the transpose of what is quantized.
    """
    if isinstance(quantizer, Float8Quantizer):
        granularity = quantizer.block or quantizer.granularity
        return *float8_oracle(
            matrix, dtype=quantizer.dtype, granularity=granularity, pow2_scale=quantizer.pow2_scale
        ), None
    if isinstance(quantizer, MXFP8Quantizer):
        return *mx_oracle(matrix, dtype=quantizer.dtype, block=quantizer.format.block), None
    matrix = rotate(matrix) if quantizer.hadamard else matrix
    if isinstance(quantizer, MXFP4Quantizer):
        rule, block = quantizer.scale_rounding, quantizer.format.block
        return *mxfp4_oracle(matrix, scale_rounding=rule, block=block), None
    if quantizer.four_over_six is not None:
        options = {"block": quantizer.format.block, "row_scaled": quantizer.row_scaled, "transposed": transposed}
        metric, most = quantizer.four_over_six, quantizer.scale_max
        return four_over_six_oracle(matrix, metric=metric, scale_max=most, **options)[:3]
    return nvfp4_oracle(matrix, block=quantizer.format.block, row_scaled=quantizer.row_scaled)


def check_face(face, quantizer, matrix):
    codes, scale, tensor_scale = encoded(quantizer, matrix, face.axis == 0)
    got = unpack(face.qdata) if face.format.elements_per_byte > 1 else face.qdata.view(torch.uint8)
    np.testing.assert_array_equal(got.cpu().numpy(), codes)
    of_face = face.scale if face.scale.dtype == torch.float32 else face.scale.view(torch.uint8)
    np.testing.assert_array_equal(of_face.cpu().numpy(), scale)
    assert (face.tensor_scale is None) == (tensor_scale is None)
    if tensor_scale is not None:
        np.testing.assert_array_equal(face.tensor_scale.cpu().numpy(), tensor_scale)


def name(quantizer):
    if not isinstance(quantizer, Quantizer):
        return str(quantizer)
    if isinstance(quantizer, HybridQuantizer):
        return f"{name(quantizer.rowwise)}|{name(quantizer.columnwise)}|{quantizer.columnwise_source}"
    rule = getattr(quantizer, "rule", "")
    pow2 = "_pow2" if getattr(quantizer, "pow2_scale", False) else ""
    return f"{quantizer.rowwise_format}{pow2}{f'_{rule}' if rule else ''}"


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


@pytest.mark.parametrize(
    ("quantizer", "shape", "dtype"),
    by_group([PLAIN[:2], PLAIN[2:4], PLAIN[4:6], PLAIN[6:]], SHAPES, [torch.bfloat16, torch.float16, torch.float32]),
    ids=name,
)
def test_both_faces_equal_the_oracle(quantizer, shape, dtype, device):
    x = random_tensor(*shape, dtype=dtype, device=device)
    h = quantizer.quantize(x)
    matrix = x.reshape(int(np.prod(shape[:-1])), shape[-1])
    assert (h.shape, h.dtype, h.device) == (x.shape, x.dtype, x.device)
    for face, values, axis in ((h.rowwise, matrix, -1), (h.columnwise, matrix.t(), 0)):
        assert face.axis == axis
        check_face(face, quantizer, values)
        assert face.dequantize().shape == x.shape


@pytest.mark.parametrize(
    ("quantizer", "shape", "dtype"),
    by_group(
        [BLOCKS[:4], BLOCKS[4:], MX, MX4, NVFP4, CHOSEN],
        [(64, 96), (2, 32, 64), (2, 2, 16, 32), (0, 64), (2, 0, 64), (32, 0)],
        [torch.bfloat16, torch.float32],
    ),
    ids=name,
)
def test_both_faces_of_blocks_equal_the_oracle(quantizer, shape, dtype, device):
    x = random_tensor(*shape, dtype=dtype, device=device)
    h = quantizer.quantize(x)
    matrix = x.reshape(int(np.prod(shape[:-1])), shape[-1])
    for face, values in ((h.rowwise, matrix), (h.columnwise, matrix.t())):
        check_face(face, quantizer, values)
        assert face.dequantize().shape == x.shape


@pytest.mark.parametrize("quantizer", BLOCKS, ids=name)
def test_partial_blocks_equal_the_oracle(quantizer, device):
    for shape in ((1, 1), (130, 200), (129, 128), (3, 5, 7)):
        x = random_tensor(*shape, device=device)
        h, matrix = quantizer.quantize(x), x.reshape(-1, shape[-1])
        check_face(h.rowwise, quantizer, matrix)
        check_face(h.columnwise, quantizer, matrix.t())


@pytest.mark.parametrize(
    "quantizer", [q for q in [*BLOCKS, *MX, *MX4, *NVFP4, *CHOSEN] if q.format.is_square], ids=name
)
def test_square_blocks_make_one_face_the_transpose_of_the_other(quantizer, device):
    h = quantizer.quantize(random_tensor(64, 96, device=device))
    assert torch.equal(h.rowwise.dequantize(), h.columnwise.dequantize())


@pytest.mark.parametrize("quantizer", PLAIN, ids=name)
def test_edge_tensor_equals_the_oracle_in_both_directions(quantizer, device):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = edge_tensor(dtype, device)
        h = quantizer.quantize(x)
        for face, values in ((h.rowwise, x), (h.columnwise, x.t())):
            check_face(face, quantizer, values)


@pytest.mark.parametrize(
    "quantizer", [*PLAIN, IDENTITY, *BLOCKS, *MX, *NVFP4, *CHOSEN[:3], *MX4[:3], *HYBRIDS], ids=name
)
class TestFaces:
    def test_a_face_does_not_depend_on_the_other(self, quantizer, device):
        x = example(quantizer, device=device)
        both = quantizer.quantize(x)
        row, column = quantizer.quantize(x, columnwise=False), quantizer.quantize(x, rowwise=False)
        assert row.columnwise is None
        assert column.rowwise is None
        assert same(HybridTensor(row.rowwise, column.columnwise), both)

    def test_quantizing_twice_gives_the_same_bits(self, quantizer, device):
        x = example(quantizer, device=device)
        assert quantizer.repeatable
        assert same(quantizer.quantize(x), quantizer.quantize(x.clone()))

    def test_strides_do_not_matter(self, quantizer, device):
        x = random_tensor(64, 96, device=device)
        for view in (x.t(), x[::2], x[:, ::3], x.flip(0)):
            assert same(quantizer.quantize(view), quantizer.quantize(view.contiguous()))
        batch = random_tensor(4, 8, 32, device=device).transpose(0, 1)
        assert same(quantizer.quantize(batch), quantizer.quantize(batch.contiguous()))

    def test_the_result_shares_nothing_and_has_no_gradient(self, quantizer, device):
        x = example(quantizer, device=device).requires_grad_()
        h = quantizer.quantize(x)
        before = h.dequantize().clone()
        assert not h.requires_grad
        with torch.no_grad():
            x.zero_()
        assert torch.equal(h.dequantize(), before)

    @pytest.mark.parametrize("which", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "row", "column"])
    def test_update_refreshes_every_face_in_place(self, quantizer, which, device):
        old, new = (example(quantizer, device=device, seed=seed) for seed in (1, 2))
        h = quantizer.quantize(old, **which)
        faces, addresses = (h.rowwise, h.columnwise), [t.data_ptr() for t in flatten(h)[0]]
        assert quantizer.update_(h, new) is h
        assert all(a is b for a, b in zip((h.rowwise, h.columnwise), faces, strict=True))
        assert [t.data_ptr() for t in flatten(h)[0]] == addresses
        assert same(h, quantizer.quantize(new, **which))

    def test_empty(self, quantizer, device):
        h = quantizer.quantize(torch.empty(0, 32, device=device))
        assert h.dequantize().shape == (0, 32)

    def test_is_a_value(self, quantizer, device):
        again = pickle.loads(pickle.dumps(quantizer))
        assert again == quantizer
        assert hash(again) == hash(quantizer)
        with pytest.raises(dataclasses.FrozenInstanceError):
            quantizer.repeatable_ = False


@pytest.mark.parametrize("quantizer", [q for q in HYBRIDS if q.columnwise_source == "rowwise_dequantized"], ids=name)
def test_rowwise_dequantized_equals_doing_it_by_hand(quantizer, device):
    for dtype in (torch.bfloat16, torch.float32):
        x = example(quantizer, dtype=dtype, device=device)
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


@pytest.mark.parametrize("quantizer", [*PLAIN, *BLOCKS, *MX, *NVFP4], ids=name)
def test_a_hybrid_of_two_equal_formats_equals_the_plain_one(quantizer):
    x = example(quantizer)
    assert same(HybridQuantizer(quantizer, quantizer).quantize(x), quantizer.quantize(x))


BY_ROWS = [PLAIN[4], BLOCKS[1], MX[0], NVFP4[2], NVFP4[4]]  # no rowwise scale spans two rows
ANY_SIDE = [*BLOCKS, *MX, MX4[0], MX4[2]]  # scales span a block at most


@pytest.mark.parametrize("quantizer", BY_ROWS, ids=name)
def test_shards_of_rows_equal_the_whole(quantizer):
    x = random_tensor(8, 128)
    whole = quantizer.quantize(x, columnwise=False).rowwise
    parts = [quantizer.quantize(part, columnwise=False).rowwise for part in x.split(3)]
    assert concatenated(parts, 0, whole)


@pytest.mark.parametrize("quantizer", ANY_SIDE, ids=name)
def test_shards_of_whole_blocks_equal_the_whole(quantizer):
    x = random_tensor(256, 384)
    whole = quantizer.quantize(x)
    for dim in (0, 1):
        parts = [quantizer.quantize(part) for part in x.split(128, dim)]
        assert concatenated([p.rowwise for p in parts], dim, whole.rowwise)
        assert concatenated([p.columnwise for p in parts], 1 - dim, whole.columnwise)


@pytest.mark.parametrize("quantizer", [PLAIN[0], NVFP4[0], NVFP4[1]], ids=name)
def test_shards_with_the_same_amax_equal_the_whole(quantizer):
    x = torch.randn(64, 32).bfloat16()
    x[::16, 0] = 7.0
    whole = quantizer.quantize(x).rowwise
    parts = [quantizer.quantize(part).rowwise for part in x.split(16)]
    assert torch.equal(torch.cat([p.qdata.view(torch.uint8) for p in parts]), whole.qdata.view(torch.uint8))


def payload(tensor):
    """Return bytes, or four of them as an integer."""
    return tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int32)


def concatenated(parts, dim, whole):
    """Whether the payloads of ``parts`` along ``dim`` are those of ``whole``, bit for bit."""
    for attribute in ("qdata", "scale", "tensor_scale"):
        if getattr(whole, attribute) is not None:
            pieces = [payload(getattr(part, attribute)) for part in parts]
            if not torch.equal(torch.cat(pieces, dim), payload(getattr(whole, attribute))):
                return False
    return True


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

        def faces(self, x, *, rowwise, columnwise, dtype, context):
            return IDENTITY.faces(x * 0.5, rowwise=rowwise, columnwise=columnwise, dtype=dtype)

    x = random_tensor(6, 10)
    h = HybridQuantizer(Float8Quantizer(), Halves()).quantize(x)
    assert torch.equal(h.columnwise.dequantize(), x * 0.5)


def test_a_quantizer_that_leaves_a_face_out_is_named():
    class Forgetful(Quantizer):
        rowwise_format = columnwise_format = IDENTITY.rowwise_format

        def faces(self, x, *, rowwise, columnwise, dtype, context):
            return None, None

    with pytest.raises(ValueError, match=r"Forgetful\(\): faces\(\) made no columnwise face; have it return"):
        HybridQuantizer(Float8Quantizer(), Forgetful()).quantize(random_tensor(6, 10))


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_amaxes_of_a_context_that_do_not_fit_are_refused(granularity, device):
    quantizer, x = Float8Quantizer(granularity=granularity), random_tensor(32, 64, device=device)
    for size, dtype in ((2, torch.float32), (1, torch.float64), (32, torch.float64)):
        context = Context(amaxes=(torch.ones(size, dtype=dtype, device=device), None))
        with pytest.raises(ValueError, match="quantize: row_amax in float32 of shape"):
            quantizer.faces(x, rowwise=True, columnwise=False, dtype=x.dtype, context=context)


def test_a_request_whose_source_is_another_face_is_refused(device):
    class Mixed(Float8Quantizer):
        def request(self, **options):
            made = super().request(**options)
            return made._replace(source=made.row._replace(pow2_scale=True))

    with pytest.raises(ValueError, match="a columnwise face of the rowwise one is required"):
        Mixed().quantize(random_tensor(32, 64, device=device))


class TestStochasticRounding:
    QUANTIZER = NVFP4Quantizer(rounding="stochastic")

    def test_on_its_own_it_draws_from_torchs_generator(self, device):
        x = random_tensor(32, 64, device=device)
        torch.manual_seed(3)
        first, second = self.QUANTIZER.quantize(x), self.QUANTIZER.quantize(x)
        torch.manual_seed(3)
        assert same(self.QUANTIZER.quantize(x), first)
        assert not same(first, second)
        assert not self.QUANTIZER.repeatable

    def test_two_faces_never_share_draws(self, device):
        """In square blocks both faces round the same numbers under the same scales: only the draws can differ."""
        quantizer = NVFP4Quantizer(rounding="stochastic", two_d=True)
        state = LayerState.of({"input": quantizer}, device=device).tensors()
        h = quantizer.quantize(torch.randn(64, 64, device=device).bfloat16(), context=Context("input", state))
        assert torch.equal(h.rowwise.scale.float(), h.columnwise.scale.float().t())
        differ = unpack(h.rowwise.qdata) != unpack(h.columnwise.qdata).t()
        assert differ.float().mean() > 0.1

    def test_layer_role_face_seed_and_step_choose_the_draws(self):
        x = random_tensor(32, 64)
        made = []
        for layer, role, seed, steps in [
            ("a", "input", 0, 0), ("b", "input", 0, 0), ("a", "weight", 0, 0), ("a", "grad_output", 0, 0),
            ("a", "input", 1, 0), ("a", "input", 0, 1),
        ]:  # fmt: skip
            quantizer = NVFP4Quantizer(rounding="stochastic", seed=seed)
            state = LayerState.of({role: quantizer}, name=layer)
            state.rounding[1] += steps
            made += [face.qdata for face in faces_of(quantizer.quantize(x, context=Context(role, state.tensors())))]
            again = quantizer.quantize(x, context=Context(role, state.tensors()))
            assert torch.equal(again.rowwise.qdata, made[-2])
        shapes = [q if q.shape == made[0].shape else None for q in made]
        for i, a in enumerate(shapes):
            assert all(b is None or a is None or not torch.equal(a, b) for b in shapes[:i])


@examples(15)
@given(
    st.sampled_from([*PLAIN, *BLOCKS, *MX, *MX4, *NVFP4, *CHOSEN]),
    st.integers(0, 255),
    st.integers(0, 383),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
)
def test_nan_and_inf_stay_inside_their_scale_group(quantizer, row, column, bad):
    x = random_tensor(256, 384)
    x[row, column] = 0.0  # no amax, so that the clean tensor has the scales of the rest
    if quantizer.rowwise_format.hadamard:  # which spreads it over 16 values along either axis
        x[row // 16 * 16 :, column // 16 * 16 :][:16, :16] = 0.0
    clean = faces_of(quantizer.quantize(x))
    x[row, column] = bad
    two_level = quantizer.rowwise_format.tensor_block is not None
    for face, before in zip(faces_of(quantizer.quantize(x)), clean, strict=True):
        values, expected = face.dequantize(), before.dequantize()
        groups = [face.format.block] + [face.format.tensor_block] * (two_level and bad == bad)
        touched = torch.zeros_like(values, dtype=torch.bool)
        for block in groups:  # an Inf is also what the tensor scale sees; a NaN is not
            touched[group_of(block, (row, column), face.axis)] = True
        assert torch.equal(values[~touched], expected[~touched])
        if bad == bad:  # an Inf is the largest value; rotated back from the largest scale of MXFP4, values overflow
            rotated_mx = quantizer.rowwise_format.hadamard and not two_level
            assert (values[~touched] if rotated_mx else values).isfinite().all()
        elif quantizer.rowwise_format.elements_per_byte > 1:
            assert torch.equal(values.isnan(), touched)  # FP4 has no NaN: the block has
        else:
            assert values.isnan().nonzero().tolist() == [[row, column]]


def group_of(block, position, axis):
    """Return the slices of the block that holds an element; ``block`` is ``(across, along)`` the contraction axis."""
    extents = block if axis == -1 else block[::-1]
    starts = [None if extent is None else p // extent * extent for p, extent in zip(position, extents, strict=True)]
    return tuple(slice(None) if s is None else slice(s, s + e) for s, e in zip(starts, extents, strict=True))


def faces_of(h):
    return [h.rowwise, h.columnwise]


def example(quantizer, dtype=torch.bfloat16, device="cpu", seed=0):
    """Return a matrix that the formats can cut: small where they can."""
    ragged = quantizer.rowwise_format.ragged and quantizer.columnwise_format.ragged
    return random_tensor(*((6, 10) if ragged else (32, 64)), dtype=dtype, device=device, seed=seed)


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
        with pytest.raises(TypeError, match="a HybridTensor is required, got a tensor"):
            PLAIN[0].update_(torch.zeros(2, 3), torch.zeros(2, 3))
        with pytest.raises(ValueError, match=r"shape \(2, 3\) is required, got \(3, 2\)"):
            PLAIN[0].update_(h, torch.zeros(3, 2))
        with pytest.raises(ValueError, match="of this quantizer's making"):
            PLAIN[6].update_(h, torch.zeros(2, 3))
        with pytest.raises(ValueError, match="slice through a scale group"):
            PLAIN[0].update_(h[:1], torch.zeros(1, 3))

    def test_what_cannot_be_cut_into_blocks(self):
        with pytest.raises(
            ValueError, match=r"input: the rowwise face in mxfp8_e4m3 needs a multiple of 32 along the c"
        ):
            MX[0].quantize(torch.zeros(32, 40))
        with pytest.raises(
            ValueError, match=r"input: the columnwise face in nvfp4_hadamard needs a multiple of 16 .*pad"
        ):
            NVFP4[3].quantize(torch.zeros(7, 16))  # fewer rows than one rotation
        assert NVFP4[3].quantize(torch.zeros(7, 16), columnwise=False).columnwise is None
        with pytest.raises(
            ValueError, match=r"layer mlp\.up, weight: the rowwise face in nvfp4_16x16 needs .* other axis"
        ):
            NVFP4[1].quantize(torch.zeros(8, 16), context=Context("weight", LayerState("mlp.up").tensors()))

    def test_weights_are_whole_blocks_and_tokens_any_number(self):
        x, made = torch.zeros(40, 64), {"rowwise": True, "columnwise": True, "dtype": torch.float32}
        for quantizer in (MX[0], NVFP4[1]):
            for role in ("input", "grad_output"):
                quantizer.faces(x, context=Context(role), **made)
                with pytest.raises(ValueError, match=rf"{role}: the rowwise face in \w+ needs .* contraction"):
                    quantizer.faces(x.t(), context=Context(role), **made)
            with pytest.raises(ValueError, match=r"weight: the \w+ face in \w+ needs a multiple of"):
                quantizer.faces(x, context=Context("weight"), **made)

    def test_delayed_scaling_without_state(self):
        with pytest.raises(
            ValueError, match="has no layer's state to take its scale from; convert a model with quantize_"
        ):
            DelayedFloat8Quantizer().quantize(torch.zeros(2, 2))
        state = LayerState.of({"weight": DelayedFloat8Quantizer()})
        with pytest.raises(ValueError, match="no delayed scale 'input'"):
            DelayedFloat8Quantizer().quantize(torch.zeros(2, 2), context=Context("input", state.tensors()))
        with pytest.raises(ValueError, match="no counter for stochastic rounding"):
            NVFP4Quantizer(rounding="stochastic").quantize(
                torch.zeros(16, 16), context=Context("input", state.tensors())
            )

    def test_unknown_words(self):
        with pytest.raises(ValueError, match="unknown granularity 'rows'; did you mean 'row'"):
            Float8Quantizer(granularity="rows")
        with pytest.raises(ValueError, match="unknown dtype 'e4m4'; did you mean 'e4m3'"):
            Float8Quantizer(dtype="e4m4")
        with pytest.raises(TypeError, match="pow2_scale is True or False"):
            Float8Quantizer(pow2_scale="yes")
        with pytest.raises(ValueError, match="did you mean 'rowwise_dequantized'"):
            HybridQuantizer(PLAIN[0], IDENTITY, "dequantized_rowwise")
        with pytest.raises(ValueError, match="unknown granularity 'blocks'; did you mean 'block'"):
            Float8Quantizer(granularity="blocks")
        with pytest.raises(ValueError, match="unknown block '64x64'"):
            Float8Quantizer(granularity="block", block=(64, 64))
        with pytest.raises(ValueError, match="block is for granularity 'block', got '1x128' with 'row'"):
            Float8Quantizer(granularity="row", block=(1, 128))
        with pytest.raises(ValueError, match="MXFP8Quantizer: unknown dtype 'e3m4'"):
            MXFP8Quantizer(dtype="e3m4")
        with pytest.raises(TypeError, match="MXFP8Quantizer: two_d is True or False"):
            MXFP8Quantizer(two_d=1)
        with pytest.raises(ValueError, match="unknown rounding 'random'"):
            NVFP4Quantizer(rounding="random")
        with pytest.raises(ValueError, match="a seed from 0 to 536870911 is required, got -1"):
            NVFP4Quantizer(seed=-1)
        with pytest.raises(TypeError, match=r"an integer as seed is required, got 0.5"):
            NVFP4Quantizer(seed=0.5)
        for option in ("row_scaled", "hadamard"):
            with pytest.raises(ValueError, match=rf"two_d makes both faces from 16x16 blocks, {option} works along"):
                NVFP4Quantizer(two_d=True, **{option: True})
        with pytest.raises(ValueError, match="a history_length of at least 1 is required, got 0"):
            DelayedFloat8Quantizer(history_length=0)
        with pytest.raises(ValueError, match="a margin from -64 to 64 is required, got 200"):
            DelayedFloat8Quantizer(margin=200)
        with pytest.raises(ValueError, match="unknown algorithm 'maximum'; did you mean 'max'"):
            DelayedFloat8Quantizer(algorithm="maximum")
        with pytest.raises(TypeError, match=r"an integer as margin is required, got 0.5"):
            DelayedFloat8Quantizer(margin=0.5)
        for child in (None, "fp8", HYBRIDS[0]):
            with pytest.raises(TypeError, match="quantizer of one format is required for columnwise"):
                HybridQuantizer(PLAIN[0], child)
