"""The operator that makes both faces in one go.

Oracle: the definitions of the single faces (which other files compare with implementations of their own), put
together by hand. The kernels run on a GPU, and without one in Triton's interpreter, where they round by themselves.
"""

import itertools
import threading

import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
from casting import by_kernels, cast_of, inputs_of, interpreted, measure, quantize, request_of
from fp4_oracles import nearly_tied
from kernels import require_kernels
from tiers import by_group, covered, in_turn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtensor import ops
from hybridtensor.ops import CastRequest, Hint, zeros
from hybridtensor.ops.cast import kernel, launches, measurement, operator
from hybridtensor.ops.cast.operator import CastInGraph
from hybridtensor.ops.cast.request import parse_request
from hybridtensor.ops.dequantize import dequantize_cuda, dequantize_reference
from hybridtensor.ops.references import float8, mx, nvfp4
from hybridtensor.ops.references.blocks import amaxes_of_rows, block_amax
from hybridtensor.testing import edge_tensor, random_tensor

CASTS = [
    cast_of("fp8_e4m3_tensor"),
    cast_of("fp8_e5m2_tensor", pow2_scale=True),
    cast_of("fp8_e4m3_tensor", slot=1),
    cast_of("fp8_e4m3_row"),
    cast_of("fp8_e5m2_row", pow2_scale=True),
    cast_of("fp8_e4m3_1x128"),
    cast_of("fp8_e5m2_1x128_fp32_scale"),
    cast_of("fp8_e4m3_128x128"),
    cast_of("fp8_e5m2_128x128_fp32_scale"),
    cast_of("mxfp8_e4m3"),
    cast_of("mxfp8_e5m2"),
    cast_of("mxfp8_e4m3_32x32"),
    cast_of("nvfp4"),
    cast_of("nvfp4", stream=10),
    cast_of("nvfp4_16x16"),
    cast_of("nvfp4_hadamard", stream=12),
    cast_of("nvfp4_row_scaled"),
    cast_of("nvfp4_row_scaled_hadamard"),
    cast_of("nvfp4_hadamard_max256", rule="mae"),
    cast_of("nvfp4_16x16_max256", rule="mse"),
    cast_of("nvfp4_row_scaled", rule="mse"),
    cast_of("mxfp4", rule="even", stream=14),
    cast_of("mxfp4_32x32"),
    cast_of("mxfp4_hadamard", rule="floor"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FIRST_ROW = 32
# Casts that the kernels treat alike: per tensor, per row, in blocks of two kinds, MX, NVFP4 of two kinds,
# and with a choice of scales, MXFP4
KINDS = [CASTS[begin:end] for begin, end in itertools.pairwise((0, 3, 5, 7, 9, 12, 15, 18, 21, 24))]
WAYS = (0, 1, 2)


@pytest.fixture(params=["operator", "kernels"])
def run(request, device):
    """What quantizes: the operator, or on a CPU the kernels in Triton's interpreter."""
    if request.param == "operator":
        return quantize
    if device != "cpu":
        pytest.skip("the operator runs the kernels here")
    return interpreted


def state(device):
    """Return encode scales, noted amaxes and a random counter."""
    factors = torch.tensor([1.0, 37.5], device=device)
    amaxes = torch.tensor([2.0**100, 0.5], device=device)
    return {
        "encode_scale": factors,
        "amax_record": amaxes,
        "rounding": torch.tensor([-12345678912345, 7], device=device),
    }


def face(x, cast, given, transposed=False):
    """Return one face by the definitions."""
    fmt = cast.format
    matrix = x.t() if transposed else x
    if fmt.tensor_block is not None:
        rounding = given["rounding"] if cast.stream >= 0 else None
        return list(
            nvfp4.quantize(matrix, fmt, nvfp4.Draws(rounding, cast.stream, FIRST_ROW, transposed), rule=cast.rule)
        )
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        rounding = given["rounding"] if cast.stream >= 0 else None
        return list(mx.quantize(matrix, fmt, nvfp4.Draws(rounding, cast.stream, FIRST_ROW, transposed), cast.rule))
    if cast.slot >= 0:
        return list(float8.cast(matrix, fmt, given["encode_scale"], given["amax_record"], cast.slot))
    return list(float8.quantize(matrix, fmt, cast.pow2_scale))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8 if tensor.itemsize == 1 else torch.int32)


def check(run, x, row=None, column=None, source=None, dtype=None):
    """Compare what runs with the definitions, bit for bit, and the amaxes that it notes."""
    given, expected_given = state(x.device), state(x.device)
    got = run(x, row=row, column=column, source=source, dtype=dtype, first_row=FIRST_ROW, **given)
    expected = [] if row is None else face(x, row, expected_given)
    if column is not None and not column.format.ragged:
        x = F.pad(x, (0, 0, 0, -x.shape[0] % column.format.block[1]))  # whole blocks: the definition
    if source is not None:
        seen = face(x, source, expected_given)
        values = dequantize_reference(seen[0], seen[1], [*seen, None][2], source.format.name, dtype or x.dtype)
        expected += face(values, column, expected_given, transposed=True)
    elif column is not None:
        expected += face(x, column, expected_given, transposed=True)
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        a, b = (
            t.view(torch.uint8) if t.itemsize == 1 else t.view(torch.int32) for t in (a.contiguous(), b.contiguous())
        )
        different = (a != b).nonzero()
        assert different.numel() == 0, f"tensor {i}: {len(different)} differ, first {different[0].tolist()}"
    assert torch.equal(given["amax_record"], expected_given["amax_record"])


@pytest.mark.parametrize(("cast", "dtype"), by_group(KINDS, DTYPES), ids=str)
def test_each_face_alone_and_both(cast, dtype, run, device):
    """In the interpreter many tiles of one dtype: where they lie and what they hold are apart in the kernels."""
    many = dtype == torch.bfloat16 or run is not interpreted
    x = random_tensor(*((160, 160) if many else (64, 96)), dtype=dtype, device=device)
    other = cast.for_columnwise()
    check(run, x, row=cast)
    check(run, x, column=other)
    check(run, x, row=cast, column=other)


@pytest.mark.parametrize("rule", ["mae", "mse"])
@pytest.mark.parametrize("name", ["nvfp4_max256", "nvfp4_16x16_max256"])
def test_errors_are_added_up_in_order(name, rule, run, device):
    """Where two scales are as good as each other, the order of a sum's terms decides."""
    cast = cast_of(name, rule=rule)
    side = 128 if tiers.LONG or run is not interpreted else 64
    x = nearly_tied(side, side, cast.format.block[0]).to(device)
    check(run, x, row=cast, column=cast.for_columnwise())
    check(run, x.t(), row=cast, column=cast.for_columnwise())


@pytest.mark.parametrize("cast", CASTS if tiers.LONG else [kind[0] for kind in KINDS], ids=str)
def test_whole_tiles(cast, run, device):
    check(run, random_tensor(256, 384, device=device), row=cast, column=cast.for_columnwise())


def in_kinds(*factors):
    """Return pairs of casts with other factors: every two kinds and factors once, or in the long tier all there are."""
    if tiers.LONG:
        return [*itertools.product(CASTS, CASTS, *factors)]
    rows, columns = ([itertools.cycle(kind) for kind in KINDS] for _ in range(2))
    return [(next(row), next(column), *others) for row, column, *others in covered(rows, columns, *factors)]


def check_pair(run, x, row, column, way, dtype):
    """Cast both faces of the matrix, or the columnwise one of what the rowwise one holds, which is kept or not."""
    column = column.for_columnwise()
    if way == 0:
        check(run, x.to(dtype), row=row, column=column)
    else:
        check(run, x, row=row if way == 1 else None, column=column, source=row, dtype=dtype)


@pytest.mark.parametrize(("row", "column", "way"), in_kinds(WAYS), ids=str)
def test_every_pair_and_columnwise_of_what_the_rowwise_face_holds(row, column, way):
    """Every pair of kinds, every kind in every way; in the long tier every pair of casts in every way."""
    x = random_tensor(64, 160, dtype=torch.float32)
    check_pair(interpreted if not torch.cuda.is_available() else quantize, x, row, column, way, torch.bfloat16)


def test_a_source_is_the_rowwise_cast(run, device):
    x = random_tensor(64, 160, device=device)
    with pytest.raises(ValueError, match="a columnwise face of the rowwise one is required"):
        run(x, row=CASTS[0], column=cast_of("mxfp8_e4m3"), source=CASTS[3])


def edge_cases(dtype, device):
    """Yield matrices of whole blocks: one of every edge value, then without Inf, and of one kind of value only."""
    edges = edge_tensor(dtype, device).repeat(2, 3)[:32, :64].contiguous()
    yield edges
    yield torch.where(edges.isinf(), 0, edges)
    yield torch.where(edges.isfinite(), edges, 0)
    for value in (0.0, -0.0, float("nan"), float("-inf"), 2.0**-140, torch.finfo(dtype).max):
        yield torch.full_like(edges, value)
    x = random_tensor(32, 64, dtype=torch.float32)
    x *= torch.exp2(torch.arange(64.0) - 32) * torch.exp2(3 * torch.arange(32.0) - 48)[:, None]
    yield x.to(dtype).to(device)
    for shift in (-30, 30):
        yield (x * 2.0**shift).to(dtype).to(device)


@pytest.mark.parametrize(("cast", "dtype"), by_group(KINDS, DTYPES), ids=str)
def test_edge_values(cast, dtype, run, device):
    for x in edge_cases(dtype, device):
        check(run, x, row=cast, column=cast.for_columnwise())


HELD = [(x, values) for x in DTYPES for values in DTYPES if x in (values, torch.float32)]


@pytest.mark.parametrize(("source", "column", "way", "held"), in_kinds(WAYS, HELD), ids=str)
def test_pairs_at_the_edges(source, column, way, held, run, device):
    """Both faces of a matrix, and the columnwise one of what the rowwise one holds, in every dtype of both."""
    dtype, values = held
    for i, x in enumerate(
        [random_tensor(64, 160, dtype=torch.float32, device=device).to(dtype), *edge_cases(*held[:1], device)]
    ):
        every = 4 if tiers.LONG else 6
        if run is interpreted and i % every != CASTS.index(source) % every:
            continue  # it takes its time
        check_pair(run, x, source, column, way, values)


@pytest.mark.parametrize(
    ("column", "source"),
    by_group([k for k in KINDS if k[0].format.block[1] is None or k[0].format.tensor_block], [*CASTS[:3], CASTS[12]]),
    ids=str,
)
def test_amaxes_of_what_the_rowwise_face_holds(source, column, run, device):
    """Also where the largest value shares a block with a NaN, and where one amax tells the other."""
    hidden = random_tensor(32, 64, dtype=torch.float32, device=device)
    hidden[3, 16:18] = torch.tensor([float("nan"), 1000.0])
    for i, x in enumerate([hidden, *edge_cases(torch.float32, device)]):
        if run is not interpreted or i == 0 or (i + CASTS.index(column)) % 3 == 0:  # in turn: it takes its time
            check(run, x, column=column.for_columnwise(), source=source, dtype=torch.float16)


RAGGED = [(1, 130), (131, 1), (129, 130), (3, 5)]


@pytest.mark.parametrize(("source", "column", "turn"), in_kinds(range(len(RAGGED))), ids=str)
def test_ragged_columnwise_of_what_the_rowwise_face_holds(source, column, turn, run, device):
    """Of shapes that are no whole tiles, nor whole blocks where the formats allow it."""
    ragged = source.format.ragged and column.format.ragged
    rows, columns = RAGGED[turn] if ragged else [(64, 96), (96, 160)][turn % 2]
    x = random_tensor(rows, columns, device=device)
    check(run, x, row=source if turn % 2 else None, column=column.for_columnwise(), source=source)


TOKENS = (1, 7, 17, 30, 33, 80, 129)
FEATURES = 96


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_any_number_of_rows(cast, run, device):
    """The columnwise face is that of the matrix with rows of zeros below; the rowwise one keeps its rows."""
    for rows in TOKENS[CASTS.index(cast) % 2 :: 1 if tiers.LONG else 2]:
        x = random_tensor(rows, FEATURES, device=device, seed=rows)
        for row in (None, cast):
            check(run, x, row=row, column=cast.for_columnwise())


@pytest.mark.parametrize(("row", "column", "way"), in_kinds(WAYS), ids=str)
def test_any_number_of_rows_of_every_pair(row, column, way, run, device):
    """Also of what the rowwise face holds, where a scale block of its own ends among the zeros."""
    if device == "cuda" and way and not tiers.LONG:
        pytest.skip("one way of each pair of kinds where kernels are compiled; --long runs all")
    rows = TOKENS[(2 * CASTS.index(row) + CASTS.index(column) + way) % len(TOKENS)]  # in turn
    x = random_tensor(rows, FEATURES, dtype=torch.float32, device=device)
    check_pair(run, x, row, column, way, torch.bfloat16)
    x[rows // 2, 5::32] = float("nan")
    x[rows - 1, 3::64] = float("inf")
    check_pair(run, x, row, column, way, torch.bfloat16)


@pytest.mark.parametrize("column", [kind[0]._replace(stream=-1) for kind in KINDS], ids=str)
def test_known_amaxes_of_any_number_of_rows(column, run, device):
    """What the rowwise face is scaled by is known, per tensor and per row."""
    for rows, source in itertools.product((1, 17), (CASTS[0], CASTS[3])):
        x = random_tensor(rows, FEATURES, device=device)
        amax, missing = 2 * known(x, source), -rows % 128
        whole_amax = F.pad(amax, (0, missing)) if source.amax_per == "row" else amax
        whole = F.pad(x, (0, 0, 0, missing))
        got = run(x, column=column, source=source, row_amax=amax)
        expected = run(whole, column=column, source=source, row_amax=whole_amax)
        assert all(torch.equal(bits(a), bits(beginning(b, a))) for a, b in zip(got, expected, strict=True))


def beginning(whole, part):
    """Return as much of a tensor as there is of a part of it."""
    return whole[: part.shape[0], : part.shape[1]]


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are made."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.nbytes += 0 if func.is_view or not isinstance(made, torch.Tensor) else made.nbytes
        return made


class NoLaunch:
    """Launches nothing: the interpreter makes copies of its own."""

    take, is_compiled = staticmethod(torch.Tensor.data_ptr), True

    def __init__(self, *_, **__):
        pass

    def start(self, *_):
        pass


@pytest.fixture
def no_launches(monkeypatch):
    monkeypatch.setattr(launches, "Launch", NoLaunch)
    monkeypatch.setattr(measurement, "Launch", NoLaunch)
    monkeypatch.setattr(kernel, "_CASTS", {})


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("column", [CASTS[0], CASTS[3], CASTS[5], CASTS[12]], ids=str)
@pytest.mark.parametrize("source", [CASTS[0], CASTS[2], CASTS[7], CASTS[12]], ids=str)
def test_what_the_rowwise_face_holds_is_never_written(source, column):
    """Nothing is allocated but faces and amaxes."""
    x = random_tensor(512, 512)
    with Allocations() as seen:
        made = by_kernels(x, CastRequest(None, column, source, x.dtype), inputs_of(torch.ones(2)))
    assert seen.nbytes <= sum(t.nbytes for t in made) + 4 * (512 + 512 + 2)


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_layouts(cast, run, device):
    """Transposed, strided, offset and batched views, ragged and empty shapes."""
    x = random_tensor(128, 128, device=device)
    ragged = cast.format.ragged
    views = [
        x.t(),
        x[::2, :64],
        x[16:48, 64:],
        x.as_strided((64, 64), (130, 2)),
        x.flatten()[1 : 1 + 32 * 96].view(32, 96),
    ]
    shapes = [(0, 32), (32, 0)] + ([(1, 1), (1, 130), (131, 1), (129, 257), (3, 5), (255, 3)] if ragged else [])
    for view in [*views, *(random_tensor(*shape, device=device) for shape in shapes)]:
        check(run, view, row=cast, column=cast.for_columnwise())


MEASURED = [cast for cast in CASTS if cast.amax_per is not None and not cast.format.hadamard and cast.stream < 0]


def known(x, cast, transposed=False):
    """Return the amaxes that a face of ``x`` is scaled by."""
    return block_amax(x.t() if transposed else x, (1 if cast.amax_per == "row" else None, None)).view(-1)


@pytest.mark.parametrize(("row", "column", "aligned"), covered(MEASURED, MEASURED, [True, False]), ids=str)
def test_a_part_gets_the_scales_of_the_whole(row, column, aligned, run, device):
    """Oracle: the same rows of the whole, quantized."""
    x = random_tensor(96, 64, device=device, dtype=torch.float32) * torch.arange(96, device=device)[:, None]
    part = x[32:64]
    row_amax, column_amax = known(part if row.amax_per == "row" else x, row), known(x, column, True)
    if not aligned:
        row_amax, column_amax = (torch.cat([a[:1], a])[1:] for a in (row_amax, column_amax))
    got = run(part, row=row, column=column, row_amax=row_amax, column_amax=column_amax)
    expected = [third(t, 0) for t in quantize(x, row=row)] + [third(t, 1) for t in quantize(x, column=column)]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


def third(tensor, dim):
    """Return the second third of what differs along an axis."""
    extent = tensor.shape[dim]
    return tensor if extent == 1 else tensor.narrow(dim, extent // 3, extent // 3)


@pytest.mark.parametrize(("column", "source"), in_turn(MEASURED, [CASTS[0], CASTS[5]]), ids=str)
def test_known_amaxes_of_what_the_rowwise_face_holds(source, column, run, device):
    x = random_tensor(64, 128, device=device)
    row_amax = known(x, source) * 4 if source.amax_per is not None else None
    values = [*quantize(x, row=source, row_amax=row_amax), None][:3]
    values = dequantize_reference(*values, source.format.name, x.dtype)
    column_amax = known(values, column, True) * 2
    got = run(x, column=column, source=source, row_amax=row_amax, column_amax=column_amax)
    expected = quantize(values, column=column, column_amax=column_amax)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


OF_TRANSPOSE = [cast for cast in CASTS if cast.stream < 0 and not (cast.rule and cast.format.is_square)]


@pytest.mark.parametrize("cast", OF_TRANSPOSE, ids=str)
def test_what_is_stored_transposed_is_not_copied(cast, run, device, monkeypatch):
    """As weights of GPT-2 are: the faces of the transpose are cast, and swapped."""
    monkeypatch.setattr(kernel, "_readable_copy", lambda x: pytest.fail("copied"))
    x = random_tensor(64, 128, device=device).t()
    for row, column in ((cast, None), (None, cast), (cast, cast)):
        check(run, x, row=row, column=column)
    if cast in MEASURED:
        amaxes = {"row_amax": known(x, cast) * 2, "column_amax": known(x, cast, True) * 4}
        expected = run(x.contiguous(), row=cast, column=cast, **amaxes)
        got = run(x, row=cast, column=cast, **amaxes)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


PER_TENSOR = [cast for cast in CASTS if cast.amax_per == "tensor" and not cast.format.hadamard]
VALUES = [cast.for_values() for cast in PER_TENSOR if cast.format.values is not None][:2]


@pytest.mark.parametrize(
    ("row", "column", "dtype", "rows"),
    in_turn(
        [*PER_TENSOR, *VALUES, None],
        [cast.for_columnwise() for cast in PER_TENSOR[::-1]],
        [torch.bfloat16, torch.float32, torch.float16],
        [2080, 2, 96, 2080],
    ),
    ids=str,
)
def test_amaxes_of_rows_give_the_scale_of_the_tensor(row, column, dtype, rows, run, device):
    """Oracle: the definition, which measures. The largest is in the last row; a NaN does not count."""
    x = random_tensor(rows, 64, device=device, dtype=dtype)
    x[-1, 5] = 2 * x.abs().max()
    if row not in VALUES:  # bf16 has many NaN
        x[0, 3] = float("nan")
    rounding = torch.tensor([3, 4], device=device)
    amaxes = amaxes_of_rows(x)
    given = {"row_amax": None if row is None else amaxes, "column_amax": amaxes}
    got = run(x, row=row, column=column, rounding=rounding, **given)
    expected = quantize(x, row=row, column=column, rounding=rounding)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


PER_ROW = [cast for cast in MEASURED if cast.amax_per == "row"]


@pytest.mark.parametrize(("row", "dtype"), in_turn(PER_ROW, [torch.bfloat16, torch.float16, torch.float32]), ids=str)
def test_amaxes_of_rows_in_the_dtype_of_the_matrix_give_scales_per_row(row, dtype, run, device):
    """Oracle: the definition, which measures."""
    x = random_tensor(96, 64, device=device, dtype=dtype) * torch.arange(96, device=device)[:, None].to(dtype)
    x[0, 3] = float("nan")
    amaxes = amaxes_of_rows(x)
    assert amaxes.dtype == dtype
    expected = quantize(x, row=row)
    for given in (amaxes, amaxes.float(), torch.cat([amaxes[:1], amaxes])[1:]):
        got = run(x, row=row, row_amax=given)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))
    with pytest.raises(ValueError, match=r"row_amax in float32 of shape \(96,\) is required"):
        run(x, row=row, row_amax=amaxes.double())


def test_amaxes_of_rows_are_of_what_is_cast():
    """Rotated values, those that the rowwise face holds, and other dtypes have other amaxes."""
    x, e4m3 = random_tensor(32, 32), cast_of("fp8_e4m3_tensor")
    amaxes = amaxes_of_rows(x)
    for faces, given in (
        ({"row": cast_of("nvfp4_hadamard")}, {"row_amax": amaxes}),
        ({"column": e4m3, "source": cast_of("mxfp8_e4m3")}, {"column_amax": amaxes}),
        ({"column": e4m3, "source": e4m3}, {"row_amax": amaxes}),
        ({"row": e4m3}, {"row_amax": amaxes.double()}),
        ({"row": e4m3}, {"row_amax": amaxes[1:]}),
    ):
        with pytest.raises(ValueError, match=r"quantize: (row|column)_amax in float32 of shape \(1,\) is required for"):
            quantize(x, **faces, **given)


def test_known_amaxes_have_to_fit():
    x, amax = random_tensor(32, 32), torch.ones(1)
    for cast, name, given, shape in (
        (cast_of("mxfp8_e4m3"), "row_amax", amax, "None"),
        (cast_of("fp8_e4m3_tensor", slot=0), "column_amax", amax, "None"),
        (cast_of("fp8_e4m3_row"), "column_amax", amax, r"\(32,\)"),
        (cast_of("fp8_e4m3_tensor"), "row_amax", torch.ones(1, 1), r"\(1,\)"),
        (None, "row_amax", amax, "None"),
    ):
        faces = {"row" if name == "row_amax" else "column": cast, "encode_scale": amax}
        with pytest.raises(ValueError, match=f"quantize: {name} in float32 of shape {shape} is required for"):
            quantize(x, **faces, **{name: given})


E4M3, E5M2 = (cast_of(f"fp8_{element}_tensor", pow2_scale=True) for element in ("e4m3", "e5m2"))


@pytest.mark.parametrize("faces", [(E4M3, E4M3), (E5M2, E5M2), (E4M3, None), (None, E5M2)], ids=str)
def test_a_hint_never_changes_the_result(faces, run, device):
    """Whatever the tensor before was like, and wherever scales change: among them zeros, NaN and Inf."""
    hint, (row, column) = Hint(), faces
    factors = ((0, 1.0), (1, 1.0), (2, 3.0), (2, 3.5), (3, 2.0**-20), (4, 0.0), (5, 1.0), (5, 2.0**90), (6, 1.0))
    sequence = [random_tensor(64, 96, seed=seed, device=device) * factor for seed, factor in factors]
    for special in (float("nan"), float("inf")):
        sequence.append(sequence[0].index_fill(0, torch.tensor([3, 50], device=device), special))
    sequence += [
        edge_tensor(torch.bfloat16, device),
        sequence[0],
        sequence[0].t(),
        sequence[0][:31, :45],
        sequence[0][:0],
    ]
    for x in sequence:
        got, expected = (run(x, row=row, column=column, hint=h) for h in (hint, None))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


def test_a_hint_is_taken_where_there_is_one_scale_that_is_a_power_of_two(device):
    quantizing = interpreted if device == "cpu" else quantize
    x = random_tensor(64, 128, device=device)
    for row, column, given, taken in (
        (E4M3, E4M3, {}, True),
        (E4M3, None, {}, True),
        (E4M3, E5M2, {}, False),
        (cast_of("fp8_e4m3_tensor"), None, {}, False),
        (cast_of("fp8_e5m2_row", pow2_scale=True), None, {}, False),
        (E4M3, None, {"row_amax": torch.ones(1, device=device)}, False),
    ):
        hint = Hint()
        for _ in range(2):
            quantizing(x, row=row, column=column, hint=hint, **given)
            assert (hint.amax is not None) == taken
        if taken:
            expected = measure(x, row=E4M3)[0]
            assert torch.equal(hint.amax, expected)
            first = hint.amax
            quantizing(x * 8, row=row, column=column, hint=hint)
            assert hint.amax is not first
            assert torch.equal(hint.amax, expected * 8)


@pytest.mark.parametrize("view", ["whole", "strided", "empty"])
def test_measure_is_what_casts_scale_by(view, device):
    x = edge_tensor(torch.float32, device)
    x = {"whole": x, "strided": x.t()[::2], "empty": x[:0]}[view]
    tensor, per_row = cast_of("fp8_e4m3_tensor"), cast_of("fp8_e4m3_row")
    for row, column in [*itertools.product((None, tensor, per_row), repeat=2)][1:]:
        got = measure(x, row=row, column=column)
        for amax, cast, transposed in zip(got, (row, column), (False, True), strict=True):
            assert cast is None or torch.equal(amax, known(x, cast, transposed))


@pytest.mark.parametrize("view", ["whole", "strided", "empty"])
def test_a_measurer_writes_what_measure_returns(view, device):
    whole = random_tensor(96, 160, dtype=torch.float32, device=device)
    x = {"whole": whole, "strided": whole.t()[::2], "empty": whole[:0]}[view]
    for cast, way in itertools.product((cast_of("fp8_e4m3_tensor"), cast_of("fp8_e4m3_row")), ("row", "column")):
        expected = measure(x, **{way: cast})[way == "column"]
        for begin in (0, 4):
            out = torch.zeros(len(expected) + 8, device=device)
            prepared = ops.prepare(x, request_of(**{way: cast}))
            for factor in (1.0, 0.25):  # smaller, too: nothing is left of what was there
                whole.mul_(factor)
                out.zero_()
                prepared.measure_into(x, out[begin : begin + len(expected)])
                assert torch.equal(out[begin : begin + len(expected)], expected * factor)
                assert not out[:begin].any()
                assert not out[begin + len(expected) :].any()
            whole.div_(0.25)


def test_casts_are_text_and_back():
    for row, column, _ in in_kinds(WAYS):
        for request in (CastRequest(row, column), CastRequest(None, column, row, torch.float32), CastRequest(row)):
            assert parse_request(str(request)) == request


def test_a_delayed_cast_needs_factors(run, device):
    given = state(device) | {"encode_scale": None, "first_row": 0}
    with pytest.raises(ValueError, match=r"delayed scales are required for .*, got none"):
        run(torch.ones(2, 2, device=device), row=cast_of("fp8_e4m3_tensor", slot=0), **given)


def values_by_kernel(codes, scale, level, name, dtype, whole):
    """Dequantize with the kernel: on a CPU in the interpreter."""
    require_kernels(codes.device.type)
    with np.errstate(all="ignore"):
        return dequantize_cuda(codes, scale, level, name, dtype, whole)


@pytest.mark.parametrize(("cast", "dtype"), in_turn([c for c in CASTS if c.slot < 0 and c.stream < 0], DTYPES), ids=str)
def test_the_kernel_gives_values_back_as_defined(cast, dtype, device):
    shapes = [(64, 256), (96, 320)] + ([(3, 5), (131, 1)] if cast.format.ragged else [])
    given = [random_tensor(*shape, device=device) for shape in shapes]
    for i, x in enumerate([*given, *edge_cases(torch.float32, device), *edge_cases(torch.float16, device)]):
        made = face(x, cast, state(device))
        for layout in (made[1], made[1].t().contiguous().t())[: 2 if i < len(given) else 1]:
            for whole in (True, False) if i < len(given) else (i % 2 == 0,):
                operands = (made[0], layout, [*made, None][2], cast.format.name, dtype, whole)
                expected = dequantize_reference(*operands)
                got = values_by_kernel(*operands)
                assert got.dtype == dtype
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
                assert torch.equal(got.signbit() | got.isnan(), expected.signbit() | expected.isnan())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cast", [cast_of("fp8_e4m3_tensor", slot=0), cast_of("mxfp8_e4m3"), cast_of("fp8_e4m3_1x128")], ids=str
)
def test_more_elements_than_32_bits_count(cast, device):
    """Oracle: the cast of what is repeated."""
    if device == "cpu":
        pytest.skip("takes minutes on a CPU")
    part, copies = random_tensor(128, 2**14, dtype=torch.bfloat16, seed=3).to(device), 2**10 + 1
    x = part.repeat(copies, 1)
    given = {"encode_scale": torch.ones(1, device=device)}
    made, expected = (quantize(t, row=cast, column=cast, **given) for t in (x, part))
    rows, columns = (t.view(torch.uint8) for t in (made[0], made[2]))
    assert x.numel() > 2**31
    assert rows.view(copies, *part.shape).eq(expected[0].view(torch.uint8)).all()
    assert columns.view(columns.shape[0], copies, 128).eq(expected[2].view(torch.uint8)[:, None]).all()
    if cast.format.name != "fp8_e4m3_tensor":
        assert made[1][-128:].eq(expected[1]).all()
        assert made[3][:, -expected[3].shape[1] :].eq(expected[3]).all()


def test_threads_get_zeros_of_their_own(monkeypatch):
    """Amaxes that kernels raise, at addresses that they are compiled for."""
    monkeypatch.setattr(zeros, "_READY", {})
    device, taken = torch.device("cpu"), []

    def take():
        taken.extend([zeros.one_of(device, 0) for _ in range(2000)])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({zero.data_ptr() for zero in taken}) == len(taken) == 8000
    assert all(zero.data_ptr() % 16 == 0 for zero in taken)
    assert torch.cat(taken).eq(0).all()
    assert zeros.one_of(device, 1).data_ptr() not in {zero.data_ptr() for zero in taken}


def test_operators_return_amaxes_in_memory_of_their_own(device, monkeypatch):
    """Graphs compare where a tensor begins in its storage, and hooks that offload saved tensors copy whole storages."""
    monkeypatch.setattr(zeros, "_READY", {})
    x, request = random_tensor(64, 64, device=device), str(CastRequest(CASTS[0], CASTS[0]))
    for _ in range(2):
        made = torch.ops.hybridtensor.measure(x, request)
        assert [(t.storage_offset(), t.untyped_storage().nbytes()) for t in made] == [(0, 4)]
    # Below autograd, as in an operator, a view is not marked as one.
    zero = torch.empty(0).set_(torch.zeros(16).untyped_storage(), 4, (1,), (1,))
    assert operator._distinct((zero, zero), parse_request(request))[0].untyped_storage().nbytes() == 4


class OnGpu(torch.Tensor):
    """A tensor that is taken for one of a GPU, so that kernels cast it: on a CPU in the interpreter."""

    is_cuda = True


@pytest.mark.parametrize("pitches", [(64, 128), (128, 64), (192, 128)])
def test_one_place_in_a_graph_casts_views_of_any_pitch(pitches, device):
    """Strides are dynamic in a graph, too: of two matrices of one shape each is read as it lies."""
    require_kernels(device)
    place, request = CastInGraph(), str(CastRequest(cast_of("mxfp8_e4m3")))
    for seed, pitch in enumerate(pitches):
        x = random_tensor(64, pitch, device=device, seed=seed)[:, :64]
        expected = torch.ops.hybridtensor.quantize(x, request, None, None, None, 0)
        made = [torch.zeros_like(tensor) for tensor in expected]
        place(x if device == "cuda" else x.as_subclass(OnGpu), made, request, None, None, None, 0)
        for got, want in zip(made, expected, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert place.strides == (pitch, 1)
