"""The operator that casts groups of tokens, and stacks, each as if it were alone.

Oracle: its definition, a loop over the definitions of single faces, which other files compare with implementations of
their own. The kernels run on a GPU, and without one in Triton's interpreter.
"""

import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
from casting import OF_EACH_KIND as CASTS
from casting import bits, cast_of
from fp4_oracles import nearly_tied
from kernels import require_kernels

from hybridtensor.ops import CastInputs, CastRequest, Groups
from hybridtensor.ops.cast.grouped import amaxes_of_faces, grouped_cast, grouped_measure
from hybridtensor.ops.grouped_cast import by_kernels, measure_stack, quantize_groups, reference
from hybridtensor.ops.groups import padded_rows
from hybridtensor.testing import edge_tensor, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy, in Triton's interpreter

ENDS = [(5, 70, 70, 200), (0, 0, 130, 190), (0, 0, 0, 0), (200, 200, 200, 200), (64, 128, 192, 200)]


def state(device):
    return {
        "encode_scale": torch.arange(1.0, 9.0, device=device),
        "amax_record": torch.zeros(8, device=device),
        "rounding": torch.tensor([-12345678912345, 7], device=device),
    }


def check(x, groups, request):
    """Compare the kernels with the definition, bit for bit, and the amaxes that they note."""
    mine, theirs = state(x.device), state(x.device)
    with np.errstate(all="ignore"):
        got = grouped_cast(x, groups, request, CastInputs(**mine, first_row=3))
    expected = reference(x, groups, request, CastInputs(**theirs, first_row=3))
    assert len(got) == len(expected)
    for tensor, other in zip(got, expected, strict=True):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(bits(tensor), bits(other))
    assert torch.equal(mine["amax_record"], theirs["amax_record"])


def requests(cast, other):
    """Return every way to make one or both faces."""
    column = other.for_columnwise()
    return [
        CastRequest(cast, cast.for_columnwise()),
        CastRequest(cast, column),
        CastRequest(cast),
        CastRequest(None, column),
        CastRequest(cast, column, cast, torch.bfloat16),
        CastRequest(None, column, cast, torch.bfloat16),
    ]


@pytest.mark.parametrize("index", range(len(CASTS)), ids=[str(cast) for cast in CASTS])
def test_tokens(device, index):
    """Groups of any sizes, empty ones, rows of none, and tiles that end with them."""
    require_kernels(device)
    wide = random_tensor(200, 160, dtype=torch.bfloat16, seed=1, device=device)
    others = CASTS[(index + 1) % len(CASTS)], CASTS[(index + 4) % len(CASTS)]
    ways = [(request, ends) for other in others for request in requests(CASTS[index], other) for ends in ENDS]
    every = 7 if tiers.LONG else 23  # in the interpreter, in turn: it takes its time
    for number, (request, ends) in enumerate(ways):
        if device != "cpu" or number % every == index % every:
            x = wide[:, : (160, 96)[number % 2]]
            check(x, Groups(4, torch.tensor(ends, dtype=torch.int32, device=device), 128), request)


@pytest.mark.parametrize("index", range(len(CASTS)), ids=[str(cast) for cast in CASTS])
def test_stacks(device, index):
    """Also of matrices that lie transposed, as experts ``[E, in, out]`` do."""
    require_kernels(device)
    columns = 128 if device == "cpu" and not tiers.LONG else 256
    w = torch.stack([random_tensor(128, columns, dtype=torch.bfloat16, seed=seed, device=device) for seed in range(2)])
    turned = w.transpose(-2, -1).contiguous().transpose(-2, -1)
    for number, request in enumerate(requests(CASTS[index], CASTS[(index + 3) % len(CASTS)])):
        if device != "cpu" or number % 3 == index % 3:
            check(w, Groups(2), request)
            check(turned, Groups(2), request)


@pytest.mark.parametrize("rule", ["mae", "mse"])
def test_errors_of_matrices_that_lie_transposed_are_added_up_in_order(device, rule):
    """Where two scales are as good as each other, the order of a sum's terms decides."""
    require_kernels(device)
    cast = cast_of("nvfp4_16x16_max256", rule=rule)
    tied = torch.stack([nearly_tied(64, 64, 16)] * 2).to(device)
    check(tied.transpose(-2, -1), Groups(2), CastRequest(cast, cast))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_and_edges(device, dtype):
    """NaN, Inf and the smallest numbers; rows that begin at no multiple of 16."""
    require_kernels(device)
    x = F.pad(edge_tensor(dtype, device), (0, 100, 0, 78), value=1.5)
    ends = torch.tensor((7, 33, 90), dtype=torch.int32, device=device)
    for cast in CASTS[:8:2]:
        check(x, Groups(3, ends, 32 if "mx" in str(cast) else 128), CastRequest(cast, cast.for_columnwise()))
    wide = random_tensor(96, 144, dtype=dtype, seed=2, device=device)[:, 8:136]
    check(wide, Groups(3, ends, 16), CastRequest(CASTS[1], CASTS[1]))


def test_steps_and_many_groups(device):
    """Steps as small as products need, and more groups than tiles."""
    require_kernels(device)
    x = random_tensor(150, 64, dtype=torch.bfloat16, seed=4, device=device)
    sizes = torch.tensor([0, 1, 0, 16, 17, 3, 0, 0, 40, 5] * 2 + [0], device=device)
    ends = sizes.cumsum(0).clamp(max=150).int()
    for cast, step in (
        (CASTS[1], 16),
        (CASTS[5], 32),
        (CASTS[6], 16),
        (CASTS[11], 16),
        (CASTS[12], 32),
        (CASTS[13], 32),
    ):
        check(x, Groups(21, ends, step), CastRequest(cast, cast.for_columnwise()))


def test_offsets_beyond_the_rows_are_cut(device):
    """Kernels stay in their memory whatever the offsets are; the CPU says what is wrong with them."""
    require_kernels(device)
    x = random_tensor(64, 64, dtype=torch.bfloat16, seed=4, device=device)
    wrong, cut = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in ((-5, 40, 10, 99), (0, 40, 40, 64)))
    request = CastRequest(CASTS[1], CASTS[1])
    with np.errstate(all="ignore"):
        faces = [grouped_cast(x, Groups(4, ends, 16), request, CastInputs()) for ends in (wrong, cut)]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*faces, strict=True))


@pytest.mark.parametrize("cast", [CASTS[0], CASTS[1], CASTS[6]], ids=str)
def test_of_nothing(device, cast):
    """Also on a GPU, where offsets are not looked at."""
    ends = torch.zeros(3, dtype=torch.int32, device=device)
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    groups, request = Groups(3, ends, 16), CastRequest(cast, cast)
    faces = quantize_groups(x, groups, request, CastInputs())
    assert faces[0].qdata.shape == (0, 64 // cast.format.elements_per_byte)
    definition = reference(x, groups, request, CastInputs())
    unseen = by_kernels(x, groups._replace(ends=ends + 5), request, CastInputs())
    for made in ([tensor for face in faces for tensor in face.tensors()], unseen):
        for got, expected in zip(made, definition, strict=True):
            assert torch.equal(bits(got), bits(expected))
    assert faces[1].qdata.shape == (64, padded_rows(0, groups) // cast.format.elements_per_byte)


def test_stacks_whose_blocks_are_padded(device):
    """Matrices that lie transposed, of rows that are not whole blocks."""
    require_kernels(device)
    turned = random_tensor(2 * 64, 40, dtype=torch.bfloat16, seed=1, device=device).view(2, 64, 40).transpose(-2, -1)
    check(turned, Groups(2), CastRequest(None, CASTS[5]))
    check(turned, Groups(2), CastRequest(CASTS[5]))


def test_steps_that_kernels_do_not_take(device):
    require_kernels(device)
    x = torch.ones(8, 64, dtype=torch.bfloat16, device=device)
    groups = Groups(1, torch.tensor([8], dtype=torch.int32, device=device), 8)
    with pytest.raises(ValueError, match="a step that is a multiple of 16 is required, got 8"):
        grouped_cast(x, groups, CastRequest(CASTS[1]), CastInputs())


MEASURED = [
    (cast_of("fp8_e4m3_tensor"), cast_of("fp8_e5m2_tensor")),
    (cast_of("fp8_e4m3_row"), cast_of("fp8_e4m3_row")),
    (cast_of("fp8_e4m3_row"), cast_of("fp8_e4m3_tensor")),
    (cast_of("fp8_e4m3_tensor"), None),
    (None, cast_of("fp8_e4m3_row")),
    (cast_of("nvfp4"), cast_of("nvfp4_row_scaled")),
]


@pytest.mark.parametrize("index", range(len(MEASURED)), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_amaxes_of_stacks(device, index, dtype):
    """Of each matrix and its rows and columns, in one pass; faces that are scaled by them are those of a cast alone.

    Oracle: torch's maximum of magnitudes; extents that are no multiples of tiles, matrices that lie transposed, and
    rows that kernels cannot read.
    """
    require_kernels(device)
    row, column = MEASURED[index]
    request = CastRequest(row, None if column is None else column.for_columnwise())
    wide = torch.stack([random_tensor(80, 144, dtype=dtype, seed=seed, device=device) for seed in range(3)])
    wide[1, 7, 3] = float("nan")  # does not count
    turned = wide.transpose(-2, -1).contiguous().transpose(-2, -1)
    for x in (wide, turned, wide[:, 1:, :128]):
        counting = torch.where(x.isnan(), 0, x).abs().float()
        of_row, of_column = measure_stack(x, request)
        with np.errstate(all="ignore"):
            kernels = amaxes_of_faces(grouped_measure(x, request), x.shape, request)
        for cast, *found, axis in ((row, of_row, kernels[0], 2), (column, of_column, kernels[1], 1)):
            for got in found:
                assert (got is None) == (cast is None)
                if cast is not None:
                    known = counting.amax(axis) if cast.amax_per == "row" else counting.amax((1, 2))
                    assert torch.equal(got, known.flatten())
        shown = torch.ops.hybridtensor.measure_stack(x, str(request))
        parts = [of_row] if of_row is of_column else [amax for amax in (of_row, of_column) if amax is not None]
        assert torch.equal(shown, torch.cat(parts))
        for one in (request, CastRequest(request.row), CastRequest(None, request.column)):
            if one.row is one.column is None:
                continue
            given = CastInputs(
                row_amax=of_row if one.row is not None else None,
                column_amax=of_column if one.column is not None else None,
            )
            with np.errstate(all="ignore"):
                got, alone = grouped_cast(x, Groups(3), one, given), reference(x, Groups(3), one, CastInputs())
            for tensor, other in zip(got, alone, strict=True):
                assert torch.equal(bits(tensor), bits(other))
            again = reference(x, Groups(3), one, given)
            assert all(torch.equal(bits(tensor), bits(other)) for tensor, other in zip(again, alone, strict=True))


def test_amaxes_that_no_stack_has(device):
    x = random_tensor(64, 128, dtype=torch.bfloat16, seed=1, device=device)
    stack, row = torch.stack([x, x]), CastRequest(cast_of("fp8_e4m3_row"))
    ends = torch.tensor([30, 64], dtype=torch.int32, device=device)
    amax = torch.ones(128, device=device)
    quantize_groups(stack, Groups(2), row, CastInputs(row_amax=amax))
    for what, groups, request, given in (
        (stack, Groups(2), row, amax[:64]),
        (stack, Groups(2), CastRequest(cast_of("mxfp8_e4m3")), amax),
        (stack, Groups(2), CastRequest(cast_of("fp8_e4m3_tensor")), amax[:1]),
        (x, Groups(2, ends, 128), row, amax[:64]),
    ):
        with pytest.raises(ValueError, match="measure_stack"):
            quantize_groups(what, groups, request, CastInputs(row_amax=given))
