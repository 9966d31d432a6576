"""Casting a list of matrices with two launches.

Oracle: each matrix by its definition, which other files compare with implementations of their own. The kernels run on a
GPU, and without one in Triton's interpreter.
"""

import gc
import weakref

import numpy as np
import pytest
import tiers
import torch
from casting import OF_EACH_KIND as CASTS
from casting import bits, cast_of
from kernels import require_kernels

from hybridtensor.ops import NO_INPUTS, CastInputs, CastRequest, prepare
from hybridtensor.ops.amaxes import AmaxRecord
from hybridtensor.ops.cast import list_operator, multi_tensor, operator
from hybridtensor.ops.cast.definition import reference_cast, tensors_of
from hybridtensor.ops.cast.kernel import cast_on_gpu
from hybridtensor.ops.cast.multi_tensor import PreparedList, measure_all, quantize_all
from hybridtensor.ops.cast.prepared import request_layouts
from hybridtensor.testing import edge_tensor, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy, in Triton's interpreter

SHAPES = [(48, 128), (128, 256), (16, 128), (160, 128)]


@pytest.fixture
def by_kernels(device, monkeypatch):
    """Cast by the kernels: on a CPU in the interpreter."""
    require_kernels(device)
    if device == "cpu":

        def split(xs, request):
            return [i for i, x in enumerate(xs) if multi_tensor.is_whole(x)], [
                i for i, x in enumerate(xs) if not multi_tensor.is_whole(x)
            ]

        monkeypatch.setattr(multi_tensor, "_split", split)
    return device


def matrices(device, dtype=torch.bfloat16):
    made = [random_tensor(*shape, dtype=dtype, device=device) * 3**i for i, shape in enumerate(SHAPES)]
    edges = edge_tensor(dtype, device=device).flatten().repeat(20)[: 64 * 128].view(64, 128)
    return [*made, edges]


def inputs_of(request, x, index, amaxes):
    """Return what the cast of a matrix needs: tensors of its own."""
    row, column = request[:2]
    asked = [cast for cast in (row, column) if cast is not None]
    device = x.device
    return CastInputs(
        encode_scale=torch.arange(1.0, 9.0, device=device) * (index + 1) if any(c.slot >= 0 for c in asked) else None,
        amax_record=torch.zeros(8, device=device) if any(c.slot >= 0 for c in asked) else None,
        rounding=torch.tensor([-12345678912345 + index, 7], device=device),
        first_row=3 * index,
        row_amax=amaxes[0] if row is not None and row.amax_per is not None else None,
        column_amax=amaxes[1] if column is not None and column.amax_per is not None else None,
    )


def same(face, other):
    if face is None or other is None:
        assert face is other
        return
    assert face.format is other.format
    assert face.dequantized_rowwise == other.dequantized_rowwise
    for mine, theirs in zip(face.tensors(), other.tensors(), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        if mine.dtype == torch.bfloat16:  # values, of which NaN has many
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert torch.equal(bits(mine), bits(theirs))


def check(xs, request):
    """Compare with the definitions, bit for bit: amaxes, faces, and what is recorded."""
    measured = [cast for cast in request[:2] if cast is not None and cast.amax_per is not None]
    amaxes = [(None, None)] * len(xs)
    with np.errstate(all="ignore"):
        if measured:
            amaxes = measure_all(xs, request)
        inputs = [inputs_of(request, x, i, amaxes[i]) for i, x in enumerate(xs)]
        got = quantize_all(xs, request, inputs)
    assert len(got) == len(xs)
    for i, x in enumerate(xs):
        alone = inputs[i]._replace(row_amax=None, column_amax=None)
        if alone.amax_record is not None:
            alone = alone._replace(amax_record=torch.zeros_like(alone.amax_record))
        expected = reference_cast(request).run(x, alone)
        for face, other in zip(got[i], expected, strict=True):
            same(face, other)
        if alone.amax_record is not None:
            assert torch.equal(inputs[i].amax_record, alone.amax_record)


@pytest.mark.parametrize("way", ["both", "row", "column"])
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_each_as_if_alone(by_kernels, cast, way):
    row = cast if way != "column" else None
    column = cast.for_columnwise() if way != "row" else None
    check(matrices(by_kernels), CastRequest(row, column))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(by_kernels, dtype):
    check(matrices(by_kernels, dtype), CastRequest(cast_of("fp8_e4m3_tensor"), cast_of("mxfp8_e4m3")))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_values(by_kernels, name):
    """Faces that only products read may be values."""
    cast = cast_of(name).for_values()
    check(matrices(by_kernels), CastRequest(cast, cast.for_columnwise()))


def test_matrices_that_kernels_cannot_read_are_cast_alone(by_kernels):
    xs = matrices(by_kernels)
    odd = torch.randn(8, 128, dtype=torch.bfloat16, device=by_kernels)
    transposed = torch.randn(128, 48, dtype=torch.bfloat16, device=by_kernels).t()
    shifted = torch.randn(16 * 128 + 8, dtype=torch.bfloat16, device=by_kernels)[8:].view(16, 128)
    assert not any(map(multi_tensor.is_whole, (odd, transposed, shifted)))
    cast = cast_of("fp8_e4m3_tensor")
    check([odd, *xs[:2], transposed, shifted, *xs[2:]], CastRequest(cast, cast))


def rooms(xs, request):
    """Return tensors for the faces of each matrix, all in one buffer, and the buffer."""
    layouts = [request_layouts(request, *x.shape) for x in xs]
    sizes = [[-(-layout.empty("cpu").nbytes // 16) * 16 for layout in each] for each in layouts]
    flat = torch.full((sum(map(sum, sizes)),), 255, dtype=torch.uint8, device=xs[0].device)
    outs, begin = [], 0
    for each, of_each in zip(layouts, sizes, strict=True):
        outs.append([])
        for layout, size in zip(each, of_each, strict=True):
            count = layout.shape[0] * layout.shape[1] * layout.dtype.itemsize
            typed = flat[begin : begin + count].view(layout.dtype)
            outs[-1].append(typed.as_strided(layout.shape, layout.strides))
            begin += size
    return outs, flat


@pytest.mark.parametrize("given", [True, False], ids=["given", "measured"])
@pytest.mark.parametrize("way", ["both", "row", "column"])
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_into_tensors_that_stay(by_kernels, cast, way, given):
    """Twice, since the second time is prepared by the first; matrices that kernels do not read are among them."""
    row = cast if way != "column" else None
    column = cast.for_columnwise() if way != "row" else None
    request = CastRequest(row, column)
    odd = torch.randn(144, 128, dtype=torch.bfloat16, device=by_kernels)[:, :128].t().contiguous().t()
    xs = [*matrices(by_kernels)[:3], odd]
    if by_kernels == "cpu" and not given and way != "both":
        xs = [xs[0], xs[3]]  # in the interpreter
    outs, _ = rooms(xs, request)
    measures = any(c is not None and c.amax_per is not None for c in request[:2])
    if given and (not measures or cast.format.hadamard):
        pytest.skip("nobody gives an amax: it is not measured, or of what is rotated")
    amaxes = measure_all(xs, request) if given else [(None, None)] * len(xs)
    inputs = [inputs_of(request, x, i, amaxes[i]) for i, x in enumerate(xs)]
    casts = [prepare(x, request, mine) for x, mine in zip(xs, inputs, strict=True)]
    made = PreparedList(xs, casts, outs, inputs)
    for factor in (1, 1) if given else (1, 3):
        for x, mine in zip(xs, inputs, strict=True):
            x.mul_(factor)
            if mine.amax_record is not None:
                mine.amax_record.zero_()
        with np.errstate(all="ignore"):
            made.run(xs)
        for i, x in enumerate(xs):
            alone = inputs[i]._replace(row_amax=None, column_amax=None)
            if alone.amax_record is not None:
                alone = alone._replace(amax_record=torch.zeros_like(alone.amax_record))
            expected = [t for f in reference_cast(request).run(x, alone) if f is not None for t in f.tensors()]
            for mine, theirs in zip(outs[i], expected, strict=True):
                assert torch.equal(bits(mine), bits(theirs))
            if alone.amax_record is not None:
                assert torch.equal(inputs[i].amax_record, alone.amax_record)


def test_is_worked_out_once(by_kernels, monkeypatch):
    """The same matrices, with inputs at the same distances, use the same table."""
    xs, cast = matrices(by_kernels), cast_of("fp8_e4m3_tensor")
    monkeypatch.setattr(multi_tensor, "_LISTS", type(multi_tensor._LISTS)(9))
    request = CastRequest(cast)
    for _ in range(3):
        xs[0].mul_(2)
        amaxes = measure_all(xs[:4], request)
        quantize_all(xs[:4], request, [CastInputs(row_amax=row) for row, _ in amaxes])
    assert len(multi_tensor._LISTS) == 2
    quantize_all(xs[1:4], request, [CastInputs(row_amax=row) for row, _ in amaxes[1:]])
    assert len(multi_tensor._LISTS) == 3


def test_strides_are_told_apart(by_kernels):
    """Views of the same places and shapes whose rows are elsewhere."""
    wide = torch.randn(2, 32, 256, dtype=torch.bfloat16, device=by_kernels)
    request = CastRequest(cast_of("mxfp8_e4m3"))
    for xs in ([w[:, :128] for w in wide], [w.view(-1)[: 32 * 128].view(32, 128) for w in wide]):
        got = quantize_all(xs, request, [NO_INPUTS] * 2)
        for x, (face, _) in zip(xs, got, strict=True):
            same(face, reference_cast(request).run(x, NO_INPUTS)[0])


def test_inputs_of_other_kinds_are_refused(by_kernels):
    xs, cast = matrices(by_kernels), cast_of("fp8_e4m3_tensor")
    amax = torch.ones(1, device=by_kernels)
    for given in ([None, amax], [amax, None]):
        with pytest.raises(ValueError, match="inputs of the same kinds"):
            quantize_all(xs[:2], CastRequest(cast), [CastInputs(row_amax=row) for row in given])


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e4m3_row", "nvfp4", "mxfp8_e4m3"])
@pytest.mark.parametrize("amaxes", ["none", "together", "apart"])
@pytest.mark.filterwarnings("ignore:divide by zero")  # numpy, in Triton's interpreter
def test_the_operator_of_graphs_takes_amaxes_or_measures(name, amaxes, by_kernels):
    xs, request = matrices(by_kernels), CastRequest(cast_of(name), cast_of(name))
    measures = request.row.amax_per is not None
    rows, columns = [], []
    if measures and amaxes != "none":
        pairs = measure_all(xs, request)
        rows, columns = map(list, zip(*pairs, strict=True))
        if amaxes == "apart":
            rows, columns = ([amax.clone() for amax in given] for given in (rows, columns))
    with torch.device("meta"):  # a default device, as there is one while a CUDA graph is recorded
        made = list_operator.quantized(xs, str(request), [], [], rows, columns)
    expected = [t for x in xs for t in torch.ops.hybridtensor.quantize(x, str(request), None, None, None, 0)]
    for got, want in zip(made, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:overflow")
def test_the_operator_of_graphs_records_amaxes(by_kernels):
    xs, request = matrices(by_kernels), CastRequest(cast_of("fp8_e5m2_tensor", slot=1))
    scales = [torch.full((3,), 2.0**i, device=by_kernels) for i in range(len(xs))]
    made = list_operator.quantized(xs, str(request), scales, [], [], [], None, 3)
    again = list_operator.quantized(xs, str(request), scales, [AmaxRecord(3, xs[0].device).address for _ in xs], [], [])
    for i, (x, scale) in enumerate(zip(xs, scales, strict=True)):
        codes, decode, noted = made[3 * i : 3 * i + 3]
        expected = torch.ops.hybridtensor.quantize(x, str(request), scale, None, None, 0, num_amaxes=3)
        for got, want in zip((codes, decode, noted), expected, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(again[2 * i].view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e4m3_row", "mxfp8_e4m3"])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow")  # numpy, in Triton's interpreter
def test_one_place_of_a_graph_casts_the_weights_of_equal_blocks(name, by_kernels, monkeypatch):
    """Each block by its own addresses; amaxes lie together or apart, elsewhere in each call, or are missing."""
    request = CastRequest(cast_of(name), cast_of(name))
    prepared, split_and_launch = [], multi_tensor.split_and_launch
    monkeypatch.setattr(list_operator, "split_and_launch", lambda *of: prepared.append(of) or split_and_launch(*of))
    blocks = [matrices(by_kernels)[:4] for _ in range(2)]
    for xs in blocks:  # first in every call
        xs[0].mul_(3)
    measure, quantize = list_operator.MeasureAllInGraph(), list_operator.QuantizeAllInGraph()
    apart = {}
    steps = ["together", "together", "apart", "none", "none", "apart", "together"]
    for step, amaxes in enumerate(steps):
        prepared.clear()
        for xs in blocks:
            torch._foreach_mul_(xs, 1.0 + step)
            shapes, rows, columns = list_operator.shapes_of(xs), [], []
            written = list_operator.amaxes_written(shapes, request)
            (measured,) = written.empty(xs[0].device)
            measure(xs, measured, str(request))
            if amaxes != "none" and request.row.amax_per is not None:
                views = written.views([measured])
                if amaxes == "apart":  # at the same addresses in each call, as far apart as chance has it
                    kept = apart.setdefault(id(xs), [[torch.ones_like(view) for view in of] for of in views])
                    for of, own in zip(views, kept, strict=True):
                        torch._foreach_copy_(own, of)
                    views = kept
                rows, columns = [of[0] for of in views], [of[-1] for of in views]
            written = list_operator.faces_written(shapes, request)
            out = written.empty(xs[0].device)
            quantize(xs, out, str(request), [], [], rows, columns)
            for x, faces in zip(xs, written.views(out), strict=True):
                expected = torch.ops.hybridtensor.quantize(x, str(request), None, None, None, 0)
                for got, want in zip(faces, expected, strict=True):
                    assert torch.equal(bits(got), bits(want))
        # What lies apart is copied in each call; the rest is found by its addresses.
        assert not prepared or amaxes not in steps[:step] or (amaxes == "apart" and rows)


@pytest.mark.filterwarnings("ignore:overflow")
def test_one_place_of_a_graph_records_amaxes_anew_in_each_call(by_kernels):
    xs, request = matrices(by_kernels), CastRequest(cast_of("fp8_e5m2_tensor", slot=1))
    scales, place = (
        [torch.full((3,), 2.0**i, device=by_kernels) for i in range(len(xs))],
        list_operator.QuantizeAllInGraph(),
    )
    written = list_operator.faces_written(list_operator.shapes_of(xs), request, 3)
    for factor in (1.0, 0.5):  # a smaller amax, too
        torch._foreach_mul_(xs, factor)
        out = written.empty(xs[0].device)
        place(xs, out, str(request), scales, [], [], [], None, 3)
        for x, scale, made in zip(xs, scales, written.views(out), strict=True):
            expected = torch.ops.hybridtensor.quantize(x, str(request), scale, None, None, 0, num_amaxes=3)
            for got, want in zip(made, expected, strict=True):
                assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("cast", ["mxfp8_e4m3", "fp8_e4m3_128x128_fp32_scale", None])
@pytest.mark.parametrize("swapped", [False, True])
def test_the_operator_of_graphs_measures_either_face(by_kernels, cast, swapped):
    """Of two faces one is scaled by the amax of the matrix: the one amax that is returned."""
    casts = [None if cast is None else cast_of(cast), cast_of("fp8_e4m3_tensor")]
    xs, request = matrices(by_kernels), CastRequest(*(casts[::-1] if swapped else casts))
    xs.append(torch.cat([xs[0], xs[0] * 3], 1)[:, 128:])  # strided: measured by tiles
    expected = [reference_cast(request).measure(x)[0].item() for x in xs]
    assert [amax.item() for amax in list_operator.measured(xs, str(request))] == expected
    for x, amax in zip(xs, expected, strict=True):
        assert [found.item() for found in operator._measure_on_a_gpu(x, str(request))] == [amax]


UNROUNDED = [cast for cast in CASTS if cast.stream < 0]


def columns_of(row):
    """Return a cast of each kind that graphs measure alike, in turn."""
    kinds = {}
    for cast in UNROUNDED:
        kind = cast.amax_per, cast.slot >= 0, cast.format.tensor_block is not None
        kinds.setdefault(kind, []).append(cast)
    turn = UNROUNDED.index(row)
    return UNROUNDED if tiers.LONG else [casts[turn % len(casts)] for casts in kinds.values()]


def test_every_format_is_the_columnwise_one_of_some_pair():
    assert {str(column) for row in UNROUNDED for column in columns_of(row)} == set(map(str, UNROUNDED))


@pytest.mark.parametrize("row", UNROUNDED, ids=str)
@pytest.mark.filterwarnings("ignore")  # numpy, in Triton's interpreter
def test_the_operators_of_graphs_cast_faces_of_any_two_formats(row, by_kernels, monkeypatch):
    """As a graph does: measured one by one or together, then cast by what was measured."""
    monkeypatch.setattr(operator, "MEASURE", operator._measure_on_a_gpu)  # by kernels, in the interpreter, too
    xs = matrices(by_kernels)[:2]
    for column in columns_of(row):
        request, rows, columns = CastRequest(row, column), [], []
        if row.amax_per is not None or column.amax_per is not None:
            operators = operator.OperatorCast(request)
            rows, columns = map(list, zip(*map(operators.measure, xs), strict=True))
            rows, columns = rows if row.amax_per is not None else [], columns if column.amax_per is not None else []
            together = list_operator.measured(xs, operators._measured)
            for i, amaxes in enumerate(zip(*(each for each in (rows, columns) if each), strict=True)):
                of_matrix = together[i * len(together) // 2 : (i + 1) * len(together) // 2]
                assert torch.equal(of_matrix[0 if rows else -1], amaxes[0])
                assert torch.equal(of_matrix[-1 if columns else 0], amaxes[-1])
        delayed = row.slot >= 0 or column.slot >= 0
        scales = [torch.arange(1.0, 9.0, device=by_kernels) * 3**i for i in range(2)] if delayed else []
        made = list_operator.quantized(xs, str(request), scales, [], rows, columns, None, 8 * delayed)
        for i, x in enumerate(xs):
            given = CastInputs(scales[i], torch.zeros(8, device=by_kernels)) if delayed else NO_INPUTS
            faces = tensors_of(reference_cast(request).run(x, given))
            expected = [*faces, given.amax_record] if delayed else faces
            of_matrix = made[i * len(made) // 2 : (i + 1) * len(made) // 2]
            for got, want in zip(of_matrix, expected, strict=True):
                assert torch.equal(bits(got), bits(want)), (row, column)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_face_with_a_delayed_scale_is_not_measured(by_kernels, swapped, monkeypatch):
    """Graphs measure without delayed scales, which nothing but the other face needs."""
    casts = [cast_of("fp8_e4m3_tensor", slot=1), cast_of("fp8_e4m3_tensor")]
    request = CastRequest(*(casts[::-1] if swapped else casts))
    monkeypatch.setattr(operator, "MEASURE", operator._measure_on_a_gpu)  # by kernels, in the interpreter, too
    for x in matrices(by_kernels):
        expected = reference_cast(CastRequest(casts[1])).measure(x)[0]
        measured = operator.OperatorCast(request).measure(x)
        assert torch.equal(measured[0 if swapped else 1], expected)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_matrix_that_is_measured_alone_needs_no_delayed_scale(by_kernels, swapped, monkeypatch):
    """In a bucket of weights, one of which the kernels of lists cannot read."""
    casts = [cast_of("fp8_e4m3_tensor", slot=1), cast_of("fp8_e4m3_tensor")]
    request = CastRequest(*(casts[::-1] if swapped else casts))
    monkeypatch.setattr(multi_tensor, "cast_alone", cast_on_gpu)  # by kernels, in the interpreter, too
    xs = [*matrices(by_kernels), random_tensor(40, 72, device=by_kernels)]
    for x, found in zip(xs, measure_all(xs, request), strict=True):
        assert torch.equal(found[0 if swapped else 1], reference_cast(CastRequest(casts[1])).measure(x)[0])


def test_tables_of_cuda_graphs_stay(by_kernels, monkeypatch):
    """A replay reads the table of its launch again; a full cache frees the others."""
    xs, request = matrices(by_kernels)[:4], CastRequest(cast_of("mxfp8_e4m3"))
    monkeypatch.setattr(multi_tensor, "_LISTS", type(multi_tensor._LISTS)(2))
    quantize_all(xs, request, [NO_INPUTS] * 4)
    (split,) = multi_tensor._LISTS._droppable.values()
    tables = weakref.ref(split.launch.table), weakref.ref(split.launch.owners)
    del split
    with monkeypatch.context() as patch:
        patch.setattr("hybridtensor.ops.cache.is_captured", lambda: True)
        quantize_all(xs, request, [NO_INPUTS] * 4)
    for kept in (xs[1:], xs[2:], xs[:3], xs[:2], xs[1:3]):
        quantize_all(kept, request, [NO_INPUTS] * len(kept))
    assert len(multi_tensor._LISTS) <= 3
    gc.collect()
    assert all(table() is not None for table in tables)
    before = len(multi_tensor._LISTS)
    quantize_all(xs, request, [NO_INPUTS] * 4)  # eagerly, by the same table
    assert len(multi_tensor._LISTS) == before
