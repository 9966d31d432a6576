"""Quantizing into existing tensors. Oracle: ``quantize``, which ``test_quantize`` compares with the definitions."""

import pytest
import tiers
import torch
from casting import inputs_of, quantize, quantize_into, request_of

from hybridtensor import ops
from hybridtensor.formats import FP8_E4M3_1X128, FP8_E4M3_ROW
from hybridtensor.ops import Cast, empty_face
from hybridtensor.testing import random_tensor
from tests.ops.test_quantize import CASTS, WAYS, bits, in_kinds, interpreted, state


def by_kernels(x, out, *, row=None, column=None, source=None, dtype=None, **given):
    """Quantize with the kernels, on a CPU."""
    interpreted(x, row=row, column=column, source=source, dtype=dtype, out=out, first_row=0, **given)


@pytest.fixture(params=["operator", "kernels"])
def into(request, device):
    """What quantizes into existing tensors: the operator, or on a CPU the kernels in Triton's interpreter."""
    if request.param == "kernels" and device != "cpu":
        pytest.skip("the operator runs the kernels here")
    return quantize_into if request.param == "operator" else by_kernels


def prepared(x, row, column):
    """Return tensors for the faces, of other contents."""
    rows, columns = x.shape
    faces = [] if row is None else [empty_face(row.format, rows, columns, x.device)]
    faces += [] if column is None else [empty_face(column.format, columns, rows, x.device)]
    out = [tensor for face in faces for tensor in face.tensors()]
    for t in out:
        (t.view(torch.uint8) if t.itemsize == 1 else t).fill_(85)
    return out


def check(into, x, row, column, source=None):
    given, expected_given = state(x.device), state(x.device)
    out = prepared(x, row, column)
    before = [(t.data_ptr(), t._version) for t in out]
    into(x, out, row=row, column=column, source=source, **given)
    expected = quantize(x, row=row, column=column, source=source, **expected_given)
    assert [t.data_ptr() for t in out] == [address for address, _ in before]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(out, expected, strict=True))
    assert torch.equal(given["amax_record"], expected_given["amax_record"])
    if into is quantize_into:
        assert all(t._version > version for t, (_, version) in zip(out, before, strict=True))


@pytest.mark.parametrize(("row", "column", "way"), in_kinds(WAYS), ids=str)
def test_the_faces_are_those_of_quantize(row, column, way, into, device):
    x = random_tensor(64, 160, device=device)
    kept, source = [(row, None), (row, row), (None, row)][way]
    check(into, x, kept, column.for_columnwise(), source=source)


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_one_face_and_empty_ones(cast, into, device):
    x = random_tensor(32, 64, device=device)
    check(into, x, cast, None)
    check(into, x, None, cast.for_columnwise())
    check(into, x.t(), cast, cast.for_columnwise())
    check(into, x[:0], cast, cast.for_columnwise())


@pytest.mark.parametrize(("row", "column", "way"), in_kinds(WAYS)[::3], ids=str)
def test_a_prepared_cast_writes_what_its_tensors_hold_by_now(row, column, way, device):
    for source in [(None,), (row,), (None, row)][way]:
        x, given = random_tensor(64, 160, device=device), state(device)
        out, dtype = prepared(x, row, column), torch.bfloat16
        inputs = inputs_of(**given)
        prepared_cast = ops.prepare(x, request_of(row, column.for_columnwise(), source, dtype), inputs)
        for step in range(3):
            x.copy_(random_tensor(64, 160, seed=step, device=device) * 10.0 ** (1 - step))
            given["encode_scale"].mul_(1.5)
            given["rounding"][1] += 1
            before, expected_given = [t._version for t in out], {name: t.clone() for name, t in given.items()}
            prepared_cast.run_into(x, out, inputs)
            expected = quantize(
                x, row=row, column=column.for_columnwise(), source=source, dtype=dtype, **expected_given
            )
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(out, expected, strict=True))
            assert torch.equal(given["amax_record"], expected_given["amax_record"])
            assert all(t._version > version for t, version in zip(out, before, strict=True))


ROW, COLUMN = Cast(FP8_E4M3_ROW), Cast(FP8_E4M3_1X128)


def spoiled(x, change):
    """Return tensors for the faces, one of them not as ``quantize`` makes it."""
    out = prepared(x, ROW, COLUMN)
    elements = out[0]
    changes = {
        "missing": out[:-1],
        "shape": [elements[:-1], *out[1:]],
        "dtype": [elements.view(torch.uint8), *out[1:]],
        "strides": [elements.t().contiguous().t(), *out[1:]],
        "strides of scales": [*out[:3], out[3].contiguous()],
        "device": [elements.to("meta"), *out[1:]],
        "address": [
            torch.empty(elements.numel() + 1, dtype=elements.dtype, device=x.device)[1:].view(x.shape),
            *out[1:],
        ],
        "memory of each other": [*out[:2], elements.flatten().view(out[2].shape), out[3]],
        "memory of the matrix": [x.view(torch.float8_e4m3fn).flatten()[: x.numel()].view(x.shape), *out[1:]],
    }
    return changes[change]


@pytest.mark.parametrize(
    "change",
    ["missing", "shape", "dtype", "strides", "strides of scales", "device", "address", "memory of each other",
     "memory of the matrix"],
)  # fmt: skip
def test_other_tensors_are_refused_untouched(change, device):
    x = random_tensor(256, 256, device=device)
    out = spoiled(x, change)
    kept, values = [t.clone() for t in out], x.clone()
    with pytest.raises(ValueError, match="quantize_into: plain tensors of their own memory"):
        quantize_into(x, out, row=ROW, column=COLUMN)
    assert torch.equal(x, values)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(out, kept, strict=True) if not a.is_meta)


def test_nothing_is_written_when_state_is_missing(device):
    x = random_tensor(64, 96, device=device)
    out = prepared(x, ROW, CASTS[2])
    kept = [t.clone() for t in out]
    with pytest.raises(ValueError, match=r"delayed scales are required for .*, got none"):
        quantize_into(x, out, row=ROW, column=CASTS[2])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(out, kept, strict=True))


def test_compiled(device):
    """A compiled graph writes into its inputs, and reads of what it wrote come after."""

    @torch.compile(fullgraph=True, backend="inductor" if tiers.LONG or device == "cuda" else "aot_eager")
    def refreshed(x, out):
        quantize_into(x, out, row=ROW, column=COLUMN, source=ROW)
        return out[1] * 2, x + 1

    x = random_tensor(64, 256, device=device)
    out = prepared(x, ROW, COLUMN)
    expected = quantize(x, row=ROW, column=COLUMN, source=ROW)
    doubled, after = refreshed(x, out)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(out, expected, strict=True))
    assert torch.equal(doubled, expected[1] * 2)
    assert torch.equal(after, x + 1)
