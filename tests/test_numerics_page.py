"""``docs/numerics.md``: every statement, computed apart from the library and compared bit for bit.

A test names the statements that it is for; a statement without one fails. Elements are encoded
and decoded by ml_dtypes, all else is numpy in fp32.
"""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from fp4_oracles import eden_oracle
from torch import nn

import hybridtensor as ht
from hybridtensor import formats
from hybridtensor.testing import random_tensor

PAGE = (Path(__file__).parent.parent / "docs" / "numerics.md").read_text()
F32 = np.float32
FP32_MAX = np.finfo(F32).max
E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
ELEMENT = {"e4m3": E4M3, "e5m2": E5M2}
WHOLE = 2**31
INF, NAN = float("inf"), float("nan")
DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "E2M1": torch.float4_e2m1fn_x2}
SCALES = {"fp32": torch.float32, "E8M0": torch.float8_e8m0fnu, "E4M3": torch.float8_e4m3fn}

FP8 = {
    f"{kind}-{name}-{'pow2' if pow2 else 'fp32'}": ht.Float8Quantizer(
        granularity=name if "x" not in name else "block",
        dtype=kind,
        block=name if "x" in name else None,
        pow2_scale=pow2,
    )
    for kind in ("e4m3", "e5m2")
    for name in ("tensor", "row", "1x128", "128x128")
    for pow2 in (False, True)
}
OTHERS = {
    "mxfp8": ht.MXFP8Quantizer(),
    "mxfp8-e5m2": ht.MXFP8Quantizer(dtype="e5m2"),
    "mxfp8-2d": ht.MXFP8Quantizer(two_d=True),
    "mxfp4": ht.MXFP4Quantizer(),
    "mxfp4-2d": ht.MXFP4Quantizer(two_d=True, scale_rounding="even"),
    "mxfp4-rotated": ht.MXFP4Quantizer(hadamard=True),
    "nvfp4": ht.NVFP4Quantizer(),
    "nvfp4-row": ht.NVFP4Quantizer(row_scaled=True),
    "nvfp4-2d": ht.NVFP4Quantizer(two_d=True),
    "nvfp4-rotated": ht.NVFP4Quantizer(hadamard=True),
    "nvfp4-chosen": ht.NVFP4Quantizer(four_over_six="mae"),
    "nvfp4-2d-chosen": ht.NVFP4Quantizer(two_d=True, four_over_six="mse"),
}
EVERY = FP8 | OTHERS
_STATEMENTS = {}


def states(*statements):
    """Note the statements that a test is for."""

    def note(test):
        for statement in statements:
            _STATEMENTS.setdefault(statement, []).append(test.__name__)
        return test

    return note


def every(quantizers):
    """Run a test with every quantizer of a dictionary."""
    return pytest.mark.parametrize("quantizer", quantizers.values(), ids=quantizers.keys())


def raw(tensor):
    """Return the bytes of a tensor."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # whatever its strides are
    return plain.view(torch.uint8)


def same(a, b):
    """Whether two tensors are the same bits in the same shape."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def same_faces(a, b):
    """Whether two faces are the same bits."""
    levels = [face.tensor_scale for face in (a, b)]
    equal_levels = levels[0] is None if levels[1] is None else same(*levels)
    return same(a.qdata, b.qdata) and same(a.scale, b.scale) and equal_levels


def rowwise(quantizer, x, context=None):
    """Return the rowwise face."""
    options = {} if context is None else {"context": context}
    return quantizer.quantize(x, columnwise=False, **options).rowwise


def codes(face):
    """Return the codes of FP8 elements, or of FP4 ones, one per byte."""
    data = raw(face.qdata).numpy()
    if face.format.elements_per_byte == 1:
        return data
    return np.stack((data & 15, data >> 4), axis=-1).reshape(len(data), -1)


def encoded(values, kind):
    """Return the codes of fp32 values in an element, saturating."""
    largest = LARGEST.get(kind, 6.0)
    return np.clip(values, -largest, largest).astype(ELEMENT.get(kind, E2M1)).view(np.uint8)


def decoded(face):
    """Return the elements of a face in fp32."""
    kinds = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.float4_e2m1fn_x2: E2M1}
    return codes(face).view(kinds[face.format.element]).astype(F32)


def scales(face):
    """Return the scales of a face, one per element, in fp32."""
    found = face.scale.float().numpy()
    for axis, extent in enumerate(face.format.block):
        if extent is not None:
            found = found.repeat(extent, axis=axis)
    shape = codes(face).shape
    return np.broadcast_to(found[: shape[0], : shape[1]], shape)


def groups(shape, block):
    """Yield the slices of the scale groups of a matrix, and where their scales are."""
    extents = [min(b or WHOLE, n) for b, n in zip(block, shape, strict=True)]
    for i, row in enumerate(range(0, shape[0], extents[0])):
        for j, column in enumerate(range(0, shape[1], extents[1])):
            yield (slice(row, row + extents[0]), slice(column, column + extents[1])), (i, j)


def matrix(rows=64, columns=64, seed=0, dtype=torch.bfloat16):
    return random_tensor(rows, columns, seed=seed, dtype=dtype)


def amax_of(values):
    return np.nanmax(np.abs(values))


def test_every_statement_has_a_test_and_every_test_a_statement():
    assert set(re.findall(r"^\*\*(\d+\.\d+)\*\*", PAGE, re.MULTILINE)) == set(_STATEMENTS)


class TestFaces:
    @states("1.1")
    def test_the_table_is_the_registry(self):
        rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE, re.MULTILINE)
        records = [value for value in vars(formats).values() if isinstance(value, formats.Format)]
        assert {name for name, _ in rows} == {f.name for f in records} - {"identity"}
        for name, cells in rows:
            fmt = formats.get_format(name)
            stripped = [cell.strip() for cell in cells.split("|")]
            element, largest, block, scale, pow2, partial, level = stripped
            extents = tuple(None if e == "whole" else int(e) for e in block.split(" x "))
            assert (fmt.element, fmt.max) == (DTYPES[element], float(largest))
            assert (fmt.block, fmt.scale_dtype) == (extents, SCALES[scale])
            assert (fmt.pow2_scale, fmt.ragged) == (pow2 == "yes", partial == "yes")
            levels = {"none": None, "per tensor": (None, None), "per row": (1, None)}
            assert fmt.tensor_block == levels[level]

    @states("1.2")
    @every(EVERY)
    def test_shapes(self, quantizer):
        made = quantizer.quantize(random_tensor(4, 8, 64))
        for face, other, contraction in ((made.rowwise, 32, 64), (made.columnwise, 64, 32)):
            fmt = face.format
            assert face.qdata.is_contiguous()
            assert face.qdata.shape == (other, contraction // (2 if "fp4" in fmt.name else 1))
            extents = zip((other, contraction), fmt.block, strict=True)
            assert list(face.scale.shape) == [-(-n // (b or n)) for n, b in extents]
            if "nvfp4" in fmt.name:
                assert face.tensor_scale.shape == (other if "row_scaled" in fmt.name else 1, 1)
            else:
                assert face.tensor_scale is None

    @states("1.3")
    @every(EVERY)
    def test_the_columnwise_face_is_that_of_the_transpose(self, quantizer):
        x = matrix()
        made = quantizer.quantize(x)
        assert same_faces(made.columnwise, quantizer.quantize(x.t()).rowwise)
        block = made.rowwise.format.block
        if block[0] == block[1] and made.rowwise.format.name != "nvfp4":  # square
            assert np.array_equal(codes(made.columnwise), codes(made.rowwise).T)
            assert same(made.columnwise.scale, made.rowwise.scale.t())

    @states("1.4")
    @every(EVERY)
    def test_a_face_does_not_depend_on_the_other(self, quantizer):
        x = matrix()
        both = quantizer.quantize(x)
        assert same_faces(both.rowwise, quantizer.quantize(x, columnwise=False).rowwise)
        assert same_faces(both.columnwise, quantizer.quantize(x, rowwise=False).columnwise)

    @states("1.5")
    @every(EVERY)
    def test_empty_and_ragged(self, quantizer):
        made = quantizer.quantize(torch.zeros(0, 64))
        assert made.rowwise.qdata.shape[0] == made.columnwise.qdata.numel() == 0
        assert made.rowwise.dequantize().shape == made.columnwise.dequantize().shape == (0, 64)
        if quantizer in OTHERS.values():
            with pytest.raises(ValueError, match="multiple of"):
                quantizer.quantize(torch.zeros(64, 40), columnwise=False)
        else:
            quantizer.quantize(torch.zeros(3, 5))

    @states("1.6")
    @every(OTHERS)
    @pytest.mark.parametrize("tokens", [1, 7, 30, 33])
    def test_tokens_that_do_not_fill_a_block(self, quantizer, tokens):
        x = matrix()[:tokens]
        across, along = quantizer.format.block
        below = x.new_zeros(-tokens % along, x.shape[1])
        whole = quantizer.quantize(torch.cat([x, below]))
        row, column = quantizer.faces(x, rowwise=True, columnwise=True, dtype=x.dtype)
        assert same_faces(column, whole.columnwise)
        assert same(row.qdata, whole.rowwise.qdata[:tokens])
        assert same(row.scale, whole.rowwise.scale[: -(-tokens // across)])
        levels = row.tensor_scale, whole.rowwise.tensor_scale
        assert levels[0] is None or same(levels[0], levels[1][: len(levels[0])])


class TestElements:
    @states("2.1", "2.4")
    @pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
    def test_fp8_rounds_to_nearest_even_and_zeros_keep_their_sign(self, kind):
        x = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
        x = x[x.abs() <= LARGEST[kind]].view(1, -1)  # the largest is among them: scale 1
        face = rowwise(ht.Float8Quantizer(dtype=kind), x)
        assert face.scale.item() == 1
        assert np.array_equal(codes(face), encoded(x.float().numpy(), kind))
        for zero, code in ((0.0, 0), (-0.0, 0x80), (-(2.0**-40), 0x80)):
            where = (x == zero) & (torch.signbit(x) == np.signbit(zero))
            assert set(codes(face)[where.numpy()]) == {code}

    @states("2.2")
    @pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
    def test_fp8_saturates(self, kind):
        quantizer = ht.DelayedFloat8Quantizer(dtype=kind)
        state = ht.LayerState.of({"input": quantizer})
        x = torch.tensor([[1e30, -1e30, INF, -INF, NAN, LARGEST[kind] * 1.01]])
        face = rowwise(quantizer, x, ht.Context("input", state.tensors()))
        wanted = np.array([[1, -1, 1, -1, NAN, 1]], dtype=F32) * F32(LARGEST[kind])
        np.testing.assert_array_equal(decoded(face), wanted)

    @states("2.3", "2.4", "2.5")
    def test_e2m1_rounds_to_the_even_code_and_packs_the_first_low(self):
        x = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
        x = x[x.abs() <= 6]
        x = torch.cat([x, x.new_zeros(-len(x) % 15)]).view(-1, 15)
        x = torch.cat([x, torch.full((len(x), 1), 6.0)], dim=1)  # block scale 1
        level = torch.full((1, 16), 2688.0)  # tensor scale 1
        face = rowwise(ht.NVFP4Quantizer(), torch.cat([x, level]).bfloat16())
        assert (face.scale[:-1].float() == 1).all()
        values = x.float().numpy()
        assert np.array_equal(codes(face)[:-1], encoded(values, "e2m1"))
        m = np.abs(values)
        up_to = [m <= 0.25, m < 0.75, m <= 1.25, m < 1.75, m <= 2.5, m < 3.5, m <= 5, m <= 6]
        wanted = np.select(up_to, [0, 0.5, 1, 1.5, 2, 3, 4, 6], NAN)
        assert np.array_equal(np.abs(decoded(face)[:-1]), wanted)
        assert set(codes(face)[:-1][(values < 0) & (values >= -0.25)]) == {8}
        assert set(codes(face)[:-1][np.signbit(values) & (values == 0)]) == {8}
        pair = rowwise(ht.NVFP4Quantizer(), torch.tensor([[6.0, -3.0] * 8]))
        assert set(raw(pair.qdata).flatten().tolist()) == {0b1101_0111}


class TestCurrentScaling:
    @states("3.1", "3.2", "3.6", "9.1")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @every(FP8)
    def test_scales_and_elements(self, quantizer, dtype):
        x = matrix(150, 200, dtype=dtype)
        face = rowwise(quantizer, x)
        values, found = x.float().numpy(), face.scale.numpy()
        for group, place in groups(values.shape, face.format.block):
            encode = F32(LARGEST[quantizer.dtype]) / amax_of(values[group])
            if quantizer.pow2_scale:
                encode = (encode.view(np.uint32) & np.uint32(0xFF800000)).view(F32)
            assert found[place] == F32(1) / encode
            wanted = encoded(values[group] * encode, quantizer.dtype)
            assert np.array_equal(codes(face)[group], wanted)
        wanted = torch.from_numpy(decoded(face) * scales(face)).to(dtype)
        assert same(face.dequantize(), wanted)
        assert same(face.dequantize(torch.float32), torch.from_numpy(decoded(face) * scales(face)))

    @states("3.3", "3.4")
    @pytest.mark.parametrize("granularity", ["row", "1x128"])
    def test_zero_inf_and_nan(self, granularity):
        quantizer = FP8[f"e4m3-{granularity}-fp32"]
        x = torch.ones(4, 128)
        x[0], x[1, 3], x[2, 5] = 0, -INF, NAN
        face = rowwise(quantizer, x)
        assert face.scale[:2].tolist() == [[1], [1]]
        assert (decoded(face)[0] == 0).all()
        assert decoded(face)[1, 3] == -448
        assert np.isnan(decoded(face)[2, 5])
        plain = rowwise(quantizer, torch.ones(4, 128))
        assert same(face.scale[2:], plain.scale[2:])
        found, wanted = (np.delete(codes(f)[2:], 5, 1) for f in (face, plain))
        assert np.array_equal(found, wanted)

    @states("3.5")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @every({name: q for name, q in FP8.items() if name.startswith("e5m2")})
    def test_scales_beyond_fp32(self, quantizer, dtype):
        tiny = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}[dtype]
        face = rowwise(quantizer, torch.full((1, 128), tiny, dtype=dtype))
        with np.errstate(over="ignore"):
            encode = F32(57344) / F32(tiny)
        if np.isinf(encode):
            encode = F32(torch.finfo(dtype).max) if quantizer.block else FP32_MAX
        else:
            assert dtype == torch.float16
        if quantizer.pow2_scale:
            encode = (encode.view(np.uint32) & np.uint32(0xFF800000)).view(F32)
        assert face.scale.item() == F32(1) / encode
        assert face.dequantize().isfinite().all()


class TestDelayedScaling:
    @states("4.1")
    def test_a_cast_uses_and_notes(self):
        quantizer = ht.DelayedFloat8Quantizer()
        state = ht.LayerState.of({"input": quantizer})
        assert (state.encode_scale.tolist(), state.amax_history.abs().max()) == ([1], 0)
        state.encode_scale.fill_(3.0)
        for largest, seen in ((2.0, 2.0), (5.0, 5.0), (4.0, 5.0)):
            x = torch.linspace(-largest, largest / 2, 64).view(4, 16)
            face = rowwise(quantizer, x, ht.Context("input", state.tensors()))
            assert face.scale.item() == F32(1) / F32(3)
            assert np.array_equal(codes(face), encoded(x.numpy() * F32(3), "e4m3"))
            assert state.amax.item() == seen

    @states("4.2", "4.3")
    @pytest.mark.parametrize("algorithm", ["max", "most_recent"])
    @pytest.mark.parametrize("length", [1, 2, 3])
    @pytest.mark.parametrize("margin", [0, 2])
    def test_a_step(self, algorithm, length, margin):
        quantizer = ht.DelayedFloat8Quantizer("e5m2", margin, length, algorithm)
        state = ht.LayerState.of({"input": quantizer})
        history, encode = [F32(0)] * length, F32(1)
        for amax in (3.0, 7.0, 0.0, 0.1, INF, 5.0, 2.0**-149, 1.0, 0.0, 9.0, 2.0):
            state.amax.fill_(amax)
            ht.step_(state)
            if amax:
                moved = [*history[1:], F32(amax)]
                counts = moved[-1] if algorithm == "most_recent" else max(moved)
                history = [F32(0), *moved[1:]]
                if np.isfinite(counts):
                    with np.errstate(over="ignore"):
                        encode = min(F32(57344 * 2.0**-margin) / counts, FP32_MAX)
            assert state.encode_scale.tolist() == [encode]
            assert state.amax_history[0].tolist() == history
            assert state.amax.item() == 0


class TestMXFP8:
    @states("5.1", "5.2")
    @pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
    def test_scales_and_elements(self, kind):
        x = torch.arange(2**15).to(torch.uint16).view(torch.bfloat16)
        x = x[x.isfinite()][1:]
        x = torch.stack([x, -x / 3, x / 7, 0 * x], dim=1).repeat(1, 8)  # every amax there is
        face = rowwise(ht.MXFP8Quantizer(dtype=kind), x)
        values = x.float().numpy()
        wanted = np.abs(values).max(axis=1, keepdims=True) * (F32(1) / F32(LARGEST[kind]))
        fraction, exponent = np.frexp(wanted.astype(np.float64))
        power = np.clip(np.where(fraction == 0.5, exponent - 1, exponent), -127, 127)
        found = raw(face.scale).numpy()
        assert np.array_equal(found, (power + 127).astype(np.uint8))
        scaled = (values / np.exp2(power.astype(np.float64))).astype(F32)
        assert np.array_equal(codes(face), encoded(scaled, kind))
        assert (np.abs(scaled) <= LARGEST[kind]).all()

    @states("5.3", "5.4")
    def test_zero_inf_and_nan(self):
        x = torch.ones(4, 32)
        x[0], x[1, 3], x[2, 5] = 0, INF, NAN
        face, plain = (rowwise(ht.MXFP8Quantizer(), t) for t in (x, torch.ones(4, 32)))
        assert raw(face.scale).flatten().tolist()[:2] == [0, 254]
        assert (decoded(face)[0] == 0).all()
        assert decoded(face)[1, 3] == 448
        assert np.isnan(decoded(face)[2, 5])
        assert np.array_equal(np.delete(codes(face)[2:], 5, 1), np.delete(codes(plain)[2:], 5, 1))
        assert same(face.scale[2:], plain.scale[2:])


class TestMXFP4:
    @states("5.5", "5.6")
    @pytest.mark.parametrize("rule", ["rceil", "even", "floor"])
    def test_scales_and_elements(self, rule):
        x = torch.arange(2**15).to(torch.uint16).view(torch.bfloat16)
        x = x[x.isfinite()][1:]
        x = torch.stack([x, -x / 3, x / 7, 0 * x], dim=1).repeat(1, 8)  # every amax there is
        face = rowwise(ht.MXFP4Quantizer(scale_rounding=rule), x)
        values = x.float().numpy()
        amax = np.abs(values).max(axis=1, keepdims=True)
        if rule == "rceil":
            fraction, exponent = np.frexp((amax * (F32(1) / F32(6))).astype(np.float64))
            power = np.where(fraction == 0.5, exponent - 1, exponent)
        else:
            fraction, exponent = np.frexp(amax.astype(np.float64))  # from 0.5 on
            power = exponent - 3 + (fraction >= 0.875 if rule == "even" else 0)
        power = np.clip(power, -127, 127)
        assert np.array_equal(raw(face.scale).numpy(), (power + 127).astype(np.uint8))
        scaled = (values / np.exp2(power.astype(np.float64))).astype(F32)
        assert np.array_equal(codes(face), encoded(scaled, "e2m1"))
        assert (np.abs(scaled) <= {"rceil": 6, "even": 7, "floor": 8}[rule]).all()

    @states("5.6", "5.7")
    def test_zero_inf_and_nan(self):
        for rule, of_inf in (("rceil", 254), ("even", 253), ("floor", 253)):
            x = torch.ones(3, 64)
            x[0], x[1, 3], x[2, 5] = 0, INF, NAN
            face = rowwise(ht.MXFP4Quantizer(scale_rounding=rule), x)
            assert raw(face.scale).tolist() == [[0, 0], [of_inf, 125], [255, 125]]
            assert decoded(face)[1, 3] == 6
            assert not codes(face)[2, :32].any()
            assert face.dequantize()[2, :32].isnan().all()
            assert (face.dequantize()[1:, 32:] == 1).all()


def nvfp4(values, block=(1, 16), most=2688):
    """Return tensor scale, block scales and what is rounded to elements, by statement 6.1."""
    level = amax_of(values)
    with np.errstate(over="ignore", divide="ignore"):
        encode = min(F32(most) / level, FP32_MAX)
        per_amax = encode * (F32(1) / F32(6))
        scaled = np.zeros_like(values)
        found = {}
        for group, place in groups(values.shape, block):
            scale = F32(min(amax_of(values[group]) * per_amax, F32(448)).astype(E4M3))
            found[place] = scale
            scaled[group] = values[group] * min(F32(1) / (scale * (F32(1) / encode)), FP32_MAX)
    return level, found, scaled


class TestNVFP4:
    @states("6.1", "6.6")
    @pytest.mark.parametrize("two_d", [False, True])
    @pytest.mark.parametrize("magnitude", [1.0, 2.0**-30, 2.0**40])
    def test_scales_and_elements(self, two_d, magnitude):
        x = matrix(48, 64, dtype=torch.float32) * magnitude
        face = rowwise(ht.NVFP4Quantizer(two_d=two_d), x)
        level, found, scaled = nvfp4(x.numpy(), face.format.block)
        assert face.tensor_scale.item() == level
        assert all(face.scale[place].float().item() == scale for place, scale in found.items())
        assert np.array_equal(codes(face), encoded(scaled, "e2m1"))

    @states("6.1")
    def test_a_sixth_is_rounded_before_it_multiplies(self):
        """Amaxes at a tie of two E4M3 scales, where dividing by six would give the other one."""
        drawn = np.random.default_rng(0).uniform(1, 2, 4000).astype(F32)
        encode = F32(2688) / drawn
        close = F32(17) / (encode / F32(6))  # between the scales 16 and 18
        rounded, divided = (close * f for f in (encode * (F32(1) / F32(6)), encode / F32(6)))
        differ = rounded.astype(E4M3) != divided.astype(E4M3)
        assert differ.sum() > 10
        x = np.zeros((differ.sum(), 32), dtype=F32)
        x[:, 0], x[:, 16] = drawn[differ], close[differ]
        face = rowwise(ht.NVFP4Quantizer(row_scaled=True), torch.from_numpy(x))
        wanted = rounded[differ].astype(E4M3).astype(F32)
        assert np.array_equal(face.scale[:, 1].float().numpy(), wanted)

    @states("6.2", "6.3")
    def test_zero_and_inf(self):
        x = torch.zeros(2, 32)
        face = rowwise(ht.NVFP4Quantizer(), x)
        assert face.tensor_scale.item() == 2688
        assert not codes(face).any()
        assert not raw(face.scale).any()
        x[0, 3], x[1, :16] = INF, 6.0
        face = rowwise(ht.NVFP4Quantizer(), x)
        assert face.tensor_scale.item() == 2688
        assert face.scale[1].float().tolist() == [1, 0]
        assert (decoded(face)[1, :16] == 6).all()

    @states("6.4")
    def test_nan(self):
        x = matrix(16, 64, dtype=torch.float32)
        x[3, 40] = x[3, 41]
        hurt = x.clone()
        hurt[3, 40] = NAN
        face, plain = (rowwise(ht.NVFP4Quantizer(), t) for t in (hurt, x))
        assert torch.isnan(face.scale.float()).nonzero().tolist() == [[3, 2]]
        values, wanted = face.dequantize(), plain.dequantize()
        assert values[3, 32:48].isnan().all()
        others = torch.ones(16, 64, dtype=torch.bool)
        others[3, 32:48] = False
        assert torch.equal(values[others], wanted[others])
        assert same(face.tensor_scale, plain.tensor_scale)

    @states("6.5")
    def test_a_row_has_the_bits_that_it_has_alone(self):
        x = matrix()
        face = rowwise(ht.NVFP4Quantizer(row_scaled=True), x)
        for i in (0, 17, 47):
            alone = rowwise(ht.NVFP4Quantizer(), x[i : i + 1])
            assert same(face.qdata[i : i + 1], alone.qdata)
            assert same(face.scale[i : i + 1], alone.scale)
            assert same(face.tensor_scale[i : i + 1], alone.tensor_scale)

    @states("6.7")
    def test_scales_up_to_256(self):
        x = matrix(48, 64, dtype=torch.float32)
        _, found, scaled = nvfp4(x.numpy(), most=1536)
        face = rowwise(ht.NVFP4Quantizer(scale_max=256), x)
        assert face.format is formats.NVFP4_MAX256
        assert all(face.scale[place].float().item() == scale for place, scale in found.items())
        assert np.array_equal(codes(face), encoded(scaled, "e2m1"))
        assert rowwise(ht.NVFP4Quantizer(scale_max=256), torch.zeros(2, 32)).tensor_scale.item() == 1536

    @states("6.8", "6.9")
    @pytest.mark.parametrize("two_d", [False, True])
    @pytest.mark.parametrize("metric", ["mae", "mse"])
    @pytest.mark.parametrize("most", [256, 448])
    def test_four_over_six(self, two_d, metric, most):
        x = matrix(48, 64, dtype=torch.float32)
        x[:, :32] = x[:, :32].sign() * (1 - torch.rand(48, 32) / 3)  # where 4 is often better
        x[5, 3] = NAN
        values = x.numpy()
        made = ht.NVFP4Quantizer(two_d=two_d, four_over_six=metric, scale_max=most).quantize(x)
        level, unit, fours = amax_of(values), F32(6 * most), 0
        encode = min(unit / level, FP32_MAX)
        for group, place in groups(values.shape, made.rowwise.format.block):
            base, clean = amax_of(values[group]) / F32(6) * encode, np.nan_to_num(values[group])
            tried = []
            for wanted in (base, base * F32(1.5)):
                scale = min(wanted, F32(448)).astype(E4M3).astype(F32)
                elements = encoded(clean * min(F32(1) / (scale * (F32(1) / encode)), FP32_MAX), "e2m1")
                d = elements.view(E2M1).astype(F32) * scale * level / unit - clean
                sums = (np.abs(d) if metric == "mae" else d * d).cumsum(axis=1)[:, -1]  # one after the other
                while len(sums) > 1:
                    sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
                tried.append((sums[0], scale, elements))
            four = bool(tried[1][0] < tried[0][0])
            _, scale, elements = tried[four]
            fours += four
            has_nan = np.isnan(values[group]).any()
            assert has_nan or made.rowwise.scale[place].float().item() == scale
            assert np.array_equal(codes(made.rowwise)[group], elements)
        assert fours > 2
        if two_d:
            assert same(made.columnwise.scale.t(), made.rowwise.scale)

    @states("9.2")
    @pytest.mark.parametrize("magnitude", [1.0, 2.0**120])
    def test_dequantizing(self, magnitude):
        face = rowwise(ht.NVFP4Quantizer(), matrix(48, 64, dtype=torch.float32) * magnitude)
        with np.errstate(over="ignore"):
            small = face.tensor_scale.numpy() / F32(magnitude)  # a power of two changes no rounding
            combined = (scales(face) * small) * (F32(1) / F32(2688))
            values = decoded(face) * combined * F32(magnitude)
        assert np.array_equal(face.dequantize().numpy(), values)


SIGNS = np.array([1 if sign == "+" else -1 for sign in "+++-+------+-+--"], dtype=F32)


def rotated(values):
    """Return a matrix whose groups of 16 are rotated, by statement 7.1, as bf16."""
    out = values.reshape(len(values), -1, 16) * SIGNS
    for stride in (1, 2, 4, 8):
        pairs = out.reshape(*out.shape[:2], -1, 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack((low + high, low - high), axis=-2).reshape(out.shape)
    return torch.from_numpy((out * F32(0.25)).reshape(values.shape)).bfloat16()


class TestRotation:
    @states("7.1")
    def test_the_face_is_that_of_the_rotated_tensor(self):
        signs = " ".join("+" if sign > 0 else "-" for sign in SIGNS)
        assert f"`{signs}`" in " ".join(PAGE.split())
        x = matrix()
        wanted = rotated(x.float().numpy())
        face = rowwise(ht.NVFP4Quantizer(hadamard=True), x)
        assert same_faces(face, rowwise(ht.NVFP4Quantizer(), wanted))
        hadamard = np.array([[(-1) ** bin(i & j).count("1") for i in range(16)] for j in range(16)])
        exact = x.double().numpy().reshape(64, -1, 16) @ (np.diag(SIGNS) @ hadamard / 4)
        bound = 2.0**-8 * np.abs(exact) + 2.0**-20 * np.abs(x.double().numpy()).max()
        assert (np.abs(wanted.double().numpy().reshape(exact.shape) - exact) <= bound).all()

    @states("7.2")
    def test_dequantizing_rotates_back(self):
        x = matrix()
        face = rowwise(ht.NVFP4Quantizer(hadamard=True), x)
        there = rowwise(ht.NVFP4Quantizer(), rotated(x.float().numpy()))
        there = there.dequantize(torch.float32).double()
        hadamard = np.array([[(-1) ** bin(i & j).count("1") for i in range(16)] for j in range(16)])
        back = there.numpy().reshape(64, -1, 16) @ (hadamard / 4 @ np.diag(SIGNS))
        found = face.dequantize(torch.float32).double().numpy().reshape(back.shape)
        bound = 5 * 2.0**-24 * np.abs(there.numpy().reshape(back.shape)).sum(axis=-1, keepdims=True)
        assert (np.abs(found - back) <= bound).all()
        y = matrix(seed=1)
        product = rotated(x.float().numpy()).double() @ rotated(y.float().numpy()).double().t()
        plain = x.double() @ y.double().t()
        size = x.double().norm(dim=1)[:, None] * y.double().norm(dim=1)
        assert ((product - plain).abs() <= 2.0**-7 * size).all()

    @states("7.3")
    def test_it_saturates(self):
        largest = torch.finfo(torch.bfloat16).max
        x = torch.full((1, 16), largest, dtype=torch.bfloat16) * torch.from_numpy(SIGNS).bfloat16()
        face = rowwise(ht.NVFP4Quantizer(hadamard=True), x)  # one of 16 is four times the largest
        assert face.tensor_scale.item() == largest
        x = torch.ones(1, 32, dtype=torch.bfloat16)
        x[0, 3] = INF
        face = rowwise(ht.NVFP4Quantizer(hadamard=True), x)
        assert (np.abs(decoded(face)[0, :16]) == 6).all()
        x[0, 3] = NAN
        face = rowwise(ht.NVFP4Quantizer(hadamard=True), x)
        assert face.scale[0].isnan().tolist() == [True, False]


def philox(key, counter):
    """Return the four words of Philox-4x32-10, in Python's integers."""
    c, k = list(counter), [key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c[0], c[2] = (second >> 32) ^ c[1] ^ k[0], (first >> 32) ^ c[3] ^ k[1]
        c[1], c[3] = second & 0xFFFFFFFF, first & 0xFFFFFFFF
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def draws(rows, columns, key, step, stream):
    """Return the numbers of a matrix by statement 8.2."""
    halves = []
    for call in range(rows * columns // 8):
        for word in philox(key, (call & 0xFFFFFFFF, call >> 32, step, stream)):
            halves += [word & 0xFFFF, word >> 16]
    return ((np.array(halves) + 0.5) / 65536).astype(F32).reshape(rows, columns)


def rounded(scaled, u):
    """Return codes by statement 8.1."""
    magnitude = np.minimum(np.abs(scaled), F32(6))
    step = np.where(magnitude < 2, F32(0.5), np.where(magnitude < 4, F32(1), F32(2)))
    return encoded(np.copysign(np.floor(magnitude / step + u) * step, scaled), "e2m1")


class TestRandomRounding:
    SEED = 3
    QUANTIZER = ht.NVFP4Quantizer(rounding="stochastic", seed=SEED)

    def state(self, quantizer=QUANTIZER, name="layer"):
        state = ht.LayerState.of({"grad_output": quantizer}, name=name)
        return ht.step_(ht.step_(state))

    @states("8.1", "8.2", "8.3")
    @pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
    def test_draws(self, role):
        of_random123 = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # its test vector
        assert philox(0, (0, 0, 0, 0)) == of_random123
        state, x = self.state(), matrix(16, 32, dtype=torch.float32)
        key, step = state.rounding.tolist()
        assert step == 2
        made = self.QUANTIZER.quantize(x, context=ht.Context(role, state.tensors()))
        stream = 8 * self.SEED + 2 * ["input", "weight", "grad_output"].index(role)
        for face, values, turn, direction in (
            (made.rowwise, x.numpy(), lambda u: u, 0),
            (made.columnwise, np.ascontiguousarray(x.numpy().T), np.transpose, 1),
        ):
            u = turn(draws(16, 32, key, step, stream + direction))
            assert np.array_equal(codes(face), rounded(nvfp4(values)[2], u))

    @states("8.1", "8.2")
    def test_an_element_goes_up_from_where_the_draw_says(self):
        state = self.state()
        u = draws(16, 32, *state.rounding.tolist(), 8 * self.SEED + 4)
        for below, code in ((0, 1), (2.0**-18, 0)):
            x = F32(0.5) * (1 - u - F32(below))
            x[:, ::16], x[0, 0] = 6, 2688  # scales 1
            context = ht.Context("grad_output", state.tensors())
            face = rowwise(self.QUANTIZER, torch.from_numpy(x), context)
            found = codes(face)[1:].reshape(-1, 16)[:, 1:]
            assert set(found.flatten()) == {code}

    @states("8.1")
    def test_the_mean_is_kept_and_the_grid_stays(self):
        x = torch.full((1024, 16), 0.3)
        x[:, 0], x[0, 0] = 6.0, 2688.0  # scales 1
        x[:, 1:8] = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, 3.0, -4.0])
        face = rowwise(self.QUANTIZER, x, ht.Context("grad_output", self.state().tensors()))
        assert np.array_equal(decoded(face)[1:, :8], x.numpy()[1:, :8])
        drawn = decoded(face)[1:, 8:]
        assert set(drawn.flatten()) == {0, 0.5}
        deviation = 0.5 * np.sqrt(0.6 * 0.4 / drawn.size)
        assert abs(drawn.mean() - 0.3) < 5 * deviation

    @states("8.1")
    def test_what_is_beyond_the_grid_loses_its_mean(self):
        x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
        face = rowwise(self.QUANTIZER, x, ht.Context("grad_output", self.state().tensors()))
        scale = (face.scale.double() * face.tensor_scale.double() / 2688).repeat_interleave(16, dim=1).numpy()
        beyond = np.abs(x.numpy()) > 6 * scale
        assert abs(beyond.mean() - 0.035) < 0.001
        assert (np.abs(decoded(face)[beyond]) == 6).all()
        clipped = x.double().numpy().clip(-6 * scale, 6 * scale)
        lost = 1 - (clipped * x.numpy()).sum() / (x.numpy() ** 2).sum()
        assert abs(lost - 0.0034) < 0.0001
        held = (decoded(face) * scale * x.numpy()).sum() / (x.numpy() ** 2).sum()
        noise = np.linalg.norm((decoded(face) * scale - clipped) * x.numpy()) / (x.numpy() ** 2).sum()
        assert abs(1 - held - lost) < 5 * noise

    @states("8.3")
    def test_a_part_draws_what_the_whole_would(self):
        quantizer = ht.NVFP4Quantizer(row_scaled=True, rounding="stochastic")
        tensors, x = self.state(quantizer).tensors(), matrix(32, 64)
        whole = rowwise(quantizer, x, ht.Context("grad_output", tensors))
        part = rowwise(quantizer, x[20:], ht.Context("grad_output", tensors, first_row=20))
        assert same(part.qdata, whole.qdata[20:])
        other = rowwise(quantizer, x[20:], ht.Context("grad_output", tensors, first_row=0))
        assert not same(part.qdata, other.qdata)

    @states("8.3")
    def test_rows_of_zeros_are_counted_on(self):
        quantizer = ht.NVFP4Quantizer(hadamard=True, rounding="stochastic")
        tensors, x = self.state(quantizer).tensors(), matrix(48, 64)[:35]
        context = ht.Context("grad_output", tensors, first_row=35)
        whole = quantizer.quantize(torch.cat([x, x.new_zeros(13, 64)]), context=context)
        column = quantizer.faces(x, rowwise=False, columnwise=True, dtype=x.dtype, context=context)[1]
        assert same_faces(column, whole.columnwise)
        assert decoded(column)[:, 35:].any()

    @states("8.4")
    def test_without_a_layer(self):
        found = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            found.append(rowwise(self.QUANTIZER, matrix()).qdata)
        assert same(found[0], found[1])
        assert not same(found[0], found[2])
        keys = [self.state(name=name).rounding[0].item() for name in ("a", "a", "b")]
        assert keys[0] == keys[1] != keys[2]


class TestRoundingThroughScales:
    SEED = 2
    QUANTIZER = ht.NVFP4Quantizer(rounding="eden", seed=SEED)

    def context(self, role="grad_output", **options):
        state = ht.LayerState.of({"grad_output": self.QUANTIZER}, name="layer")
        return ht.Context(role, ht.step_(state).tensors(), **options)

    @states("8.5", "8.6", "8.7")
    @pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
    def test_bits(self, role):
        context = self.context(role)
        key, step = context.state.rounding.tolist()
        x = matrix(128, 256)
        x[3] *= 2.0**-12
        made = self.QUANTIZER.quantize(x, context=context)
        stream = 8 * self.SEED + 2 * ["input", "weight", "grad_output"].index(role)
        for face, turned, direction in ((made.rowwise, False, 0), (made.columnwise, True, 1)):
            found = eden_oracle(
                x.t() if turned else x, key=key, step=step, stream=stream + direction, transposed=turned
            )
            assert np.array_equal(codes(face), found[0])
            assert np.array_equal(face.scale.float().numpy(), found[1])
            assert np.array_equal(face.tensor_scale.numpy()[:, 0], np.array([found[2], *found[3]], F32))
        zeros = rowwise(self.QUANTIZER, torch.zeros(2, 128), context)
        assert zeros.tensor_scale[0].item() == 1

    @states("8.8")
    def test_values(self):
        x = matrix(64, 256, dtype=torch.float32)
        x[:, 128:] *= 2.0**-24
        x[0, 0] = 4.0
        face = rowwise(self.QUANTIZER, x, self.context())
        level, halves = face.tensor_scale[0].numpy(), face.tensor_scale[1:, 0].tolist()
        held = decoded(face) * (face.scale.float().numpy() * level).repeat(16, axis=1)
        signs = np.array([-1 if int(halves[i // 16]) >> i % 16 & 1 else 1 for i in range(128)])
        hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128)
        values = (held.reshape(64, 2, 128).astype(np.float64) @ hadamard * signs).reshape(64, 256)
        np.testing.assert_allclose(face.dequantize().float().numpy(), values, rtol=1e-5, atol=1e-5)
        assert not values[:, 128:].any()
        assert 0.08 < np.linalg.norm(values - x.numpy()) / np.linalg.norm(x.numpy()) < 0.12

    @states("8.8")
    @pytest.mark.parametrize(
        ("count", "others", "least", "most"),
        [(2, 0, 0.035, 0.055), (5, 0, 0.035, 0.055), (16, 0, 0, 0.01), (1, 0.0075, 0.015, 0.035)],
    )
    def test_the_mean_of_few_values(self, count, others, least, most):
        """Over rows of normally distributed values in root mean square, and the worst, less the error of the draws."""
        generator, draws = torch.Generator().manual_seed(count), 100
        x = others * torch.randn(256, 128, generator=generator)
        for row in x:
            row[torch.randperm(128, generator=generator)[:count]] = torch.randn(count, generator=generator)
        torch.manual_seed(0)
        held = torch.stack([rowwise(self.QUANTIZER, x).dequantize(torch.float64) for _ in range(draws)])
        squares = (held.mean(0) - x).square().sum(1) - held.var(0).sum(1) / draws
        relative = squares / x.square().sum(1)
        assert least < relative.mean().clamp(min=1e-9).sqrt() < most
        assert relative.max() < 0.145**2

    @states("8.9")
    @pytest.mark.parametrize("wrong", [NAN, INF])
    def test_not_finite(self, wrong):
        x = matrix(4, 256)
        x[1, 130] = wrong
        face = rowwise(self.QUANTIZER, x, self.context())
        assert face.scale.isnan().sum() == face.scale[1, 8:].isnan().sum() == 8
        assert face.tensor_scale.isfinite().all()

    @states("8.10")
    def test_products(self):
        x, alike = matrix(16, 128), self.context("weight")
        made = [rowwise(self.QUANTIZER, x, context) for context in (self.context(), alike, ht.Context())]
        same_signs, others = (made[0] @ face.t() for face in made[1:])
        assert (same_signs.float() - (x @ x.t()).float()).norm() < 0.2 * (x @ x.t()).float().norm()
        assert others.isnan().all()
        with pytest.raises(ValueError, match="same Hadamard basis"):
            made[0] @ rowwise(ht.NVFP4Quantizer(hadamard=True), x).t()


class TestDequantizing:
    @states("9.3")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @every(EVERY)
    def test_what_was_finite_stays_finite(self, quantizer, dtype):
        x = matrix(32, 32, dtype=torch.float32)
        x = (x / x.abs().max()).to(dtype) * torch.finfo(dtype).max
        assert x.isfinite().all()
        for target in (dtype, torch.bfloat16):
            if torch.finfo(target).max >= torch.finfo(dtype).max:
                assert rowwise(quantizer, x).dequantize(target).isfinite().all()


class TestProducts:
    @states("10.1")
    @pytest.mark.parametrize(
        ("spec", "factors"),
        [
            ("fp8", (0.7, 1.3)),
            ("fp8_rowwise", (0.7, 1.3)),
            ("fp8_block+fp32_scale", (0.7, 1.3)),
            ("fp8_block", (0.5, 4)),
            ("mxfp8", (0.5, 4)),
        ],
    )
    def test_an_emulated_product_is_exact_until_it_is_scaled(self, spec, factors):
        """Small whole numbers, so that every sum is exact in any order, and a factor on top."""
        config = ht.HybridConfig.parse(spec)
        drawn = torch.Generator().manual_seed(0)
        x, w = (torch.randint(-7, 8, (n, 256), generator=drawn).float() for n in (64, 32))
        x[:, ::32], w[:, ::32] = 448, 448  # the amax of every group
        x, w = x * factors[0], w * factors[1]
        layer = nn.Linear(256, 32)
        with torch.no_grad():
            layer.weight.copy_(w)
        found = ht.quantize_(layer, spec)(x).detach()
        left, right = rowwise(config.input, x), rowwise(config.weight, w)
        bias = layer.bias.detach().numpy()
        if left.format.pow2_scale:
            values = [decoded(f).astype(np.float64) * scales(f) for f in (left, right)]
            exact = values[0] @ values[1].T
            assert np.array_equal(exact.astype(F32), exact)  # the sum fits fp32
            wanted = exact.astype(F32) + bias
        else:
            wanted = np.zeros((64, 32), dtype=F32)
            for start in range(0, 256, 128 if left.format.block[1] else 256):
                stop = start + (128 if left.format.block[1] else 256)
                elements = [decoded(f)[:, start:stop].astype(np.float64) for f in (left, right)]
                factor = scales(left)[:, start, None] * scales(right)[None, :, start]
                wanted += (elements[0] @ elements[1].T).astype(F32) * factor
            wanted += bias
        assert np.array_equal(found.numpy(), wanted)

    @states("10.1")
    def test_scales_are_multiplied_with_each_other_first(self):
        layer = nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            layer.weight.fill_(2.0**-120)
        ht.quantize_(layer, "fp8")
        y = layer(torch.full((16, 16), 2.0**120))
        assert torch.allclose(y, torch.full((16, 16), 16.0), rtol=2.0**-4)

    @states("10.2")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_high_precision_is_that_of_linear(self, dtype):
        layer = nn.Linear(64, 48, dtype=dtype)
        x = matrix(dtype=dtype)
        wanted = layer(x)
        assert torch.equal(ht.quantize_(layer, "bf16")(x), wanted)

    @states("10.3")
    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
    @pytest.mark.parametrize("spec", ["fp8", "mxfp8", "nvfp4"])
    def test_an_empty_contraction(self, spec):
        layer = ht.quantize_(nn.Linear(0, 32), spec)
        with torch.no_grad():
            layer.bias.copy_(torch.arange(32.0))
        assert torch.equal(layer(torch.zeros(32, 0)), torch.arange(32.0).expand(32, 32))
