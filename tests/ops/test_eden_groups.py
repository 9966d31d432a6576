"""MS-EDEN of groups of tokens and of stacks.

Oracle: the definition of single matrices, each with its amax, which test_eden compares with numpy. The kernels run on a
GPU, and without one in Triton's interpreter.
"""

import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
from casting import bits, cast_of, quantize
from kernels import require_kernels

from hybridtensor.formats import get_format
from hybridtensor.ops import CastInputs, CastRequest, Groups
from hybridtensor.ops.cast import grouped as grouped_casts
from hybridtensor.ops.cast.grouped import grouped_cast
from hybridtensor.ops.cast.kernel import cast_on_gpu
from hybridtensor.ops.grouped_cast import by_kernels as cast_by_kernels
from hybridtensor.ops.grouped_cast import quantize_groups, reference
from hybridtensor.ops.groups import cut_columns, cut_rows, each_group, matrix_of, rows_of_none

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy, in Triton's interpreter

KEY, STEP, STREAM = -0x123456789ABCDEF, 5, 12
EDEN = cast_of("nvfp4_eden", stream=STREAM)
FORMAT = get_format("nvfp4_eden")
K, N, E = 256, 128, 4
# In the interpreter less of everything, but groups of no rows, few, a tile, and more than a tile
T, ENDS = (
    (330, [(5, 70, 70, 300), (0, 0, 129, 330), (0, 0, 0, 0), (330, 330, 330, 330), (128, 256, 257, 320)])
    if tiers.LONG or torch.cuda.is_available()
    else (170, [(5, 6, 6, 140), (0, 0, 129, 170), (0, 0, 0, 0), (170, 170, 170, 170), (128, 129, 129, 160)])
)


def inputs_of(device, step=STEP, first_row=0, key=KEY):
    return CastInputs(rounding=torch.tensor([key, step], device=device), first_row=first_row)


def spread_out(*shape, device, dtype=torch.bfloat16):
    """Return values of many magnitudes, of matrices of different ones."""
    return (torch.randn(*shape) * torch.exp2(torch.randint(-6, 7, shape))).to(dtype).to(device)


def groups_of(ends, device, step=128):
    return Groups(len(ends), torch.tensor(ends, dtype=torch.int32, device=device), step)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        if got.dtype == torch.float8_e4m3fn:  # a NaN has no sign
            got, want = (torch.where(part.isnan(), 0x7F, part.view(torch.uint8)) for part in (got, want))
        assert torch.equal(bits(got), bits(want))


def of_one(x, *, columnwise, first_row, step=STEP):
    """Return the face of a single matrix."""
    made = {"column" if columnwise else "row": EDEN}
    return quantize(x, **made, rounding=torch.tensor([KEY, step], device=x.device), first_row=first_row)


@pytest.mark.parametrize("ends", ENDS)
def test_a_group_is_cast_as_if_it_were_alone(ends, device):
    """The rows of none behind the last one are zeros."""
    x, groups = spread_out(T, 128, device=device), groups_of(ends, device)
    row, column = quantize_groups(x, groups, CastRequest(EDEN, EDEN), inputs_of(device, first_row=3))
    assert row.tensor_scale.shape == column.tensor_scale.shape == (E, 9, 1)
    found = each_group(groups, T)
    for group in found:
        own = x[group.start : group.stop]
        padded = F.pad(own, (0, 0, 0, group.size - own.shape[0]))
        whole = group._replace(stop=group.start + group.size)
        given = {"first_row": 3 + group.start}
        if own.numel():
            assert_same_values(cut_rows(row, group), of_one(own, columnwise=False, **given))
        assert_same_values(cut_columns(column, whole), of_one(padded, columnwise=True, **given))
    rest = rows_of_none(groups, found, T)
    assert not (row.qdata[rest.start :] & 0x77).any()  # but for signs
    assert not (column.qdata[:, rest.padded // 2 :] & 0x77).any()


def assert_same_values(face, tensors):
    for got, want in zip(face.tensors(), tensors, strict=True):
        assert got.shape == want.shape
        assert torch.equal(got.float(), want.float())


def test_a_matrix_of_a_stack_is_cast_as_if_it_were_alone(device):
    """And draws by its rows among all: the second half of the experts draws what it would with the first one."""
    w = torch.stack([spread_out(128, K, device=device) * 4.0**e for e in range(E)])
    faces = quantize_groups(w, Groups(E), CastRequest(EDEN, EDEN), inputs_of(device))
    half = quantize_groups(w[2:], Groups(2, first=2), CastRequest(EDEN, EDEN), inputs_of(device, first_row=256))
    for columnwise, face, of_half in zip((False, True), faces, half, strict=True):
        for e in range(E):
            one = of_one(w[e], columnwise=columnwise, first_row=128 * e)
            assert_same_values(matrix_of(face, e), one)
            if e >= 2:
                assert_same_values(matrix_of(of_half, e - 2), one)


def check(x, groups, request, *, first_row=3, noted=False):
    """Compare the kernels with the definition, bit for bit."""
    require_kernels(x.device.type)
    assert request.has_kernels
    mine, theirs = (inputs_of(x.device, first_row=first_row) for _ in range(2))
    if noted:
        scales = torch.arange(1.0, 9.0, device=x.device)
        mine, theirs = (
            inputs._replace(encode_scale=scales, amax_record=torch.zeros(8, device=x.device))
            for inputs in (mine, theirs)
        )
    with np.errstate(all="ignore"):
        got = grouped_cast(x, groups, request, mine)
    assert_same(got, reference(x, groups, request, theirs))
    if noted:
        assert torch.equal(mine.amax_record, theirs.amax_record)


OTHERS = [
    cast_of("nvfp4"),
    cast_of("nvfp4_max256", rule="mse"),
    cast_of("nvfp4_row_scaled"),
    cast_of("nvfp4_16x16"),
    cast_of("mxfp8_e4m3"),
    cast_of("fp8_e4m3_row"),
    cast_of("fp8_e4m3_tensor", slot=1),
]


def requests_of(other):
    """Return both faces under drawn signs, one beside another format, and one made of it."""
    return [
        CastRequest(EDEN, EDEN.for_columnwise()),
        CastRequest(other, EDEN),
        CastRequest(EDEN, other),
        CastRequest(other, EDEN, other, torch.bfloat16),
        CastRequest(None, EDEN, other, torch.float32),
    ]


@pytest.mark.parametrize("index", range(len(OTHERS)), ids=[str(other) for other in OTHERS])
def test_kernels_cast_tokens_as_defined(index, device):
    """Groups of any sizes, empty ones, rows of none, and tiles that end with them."""
    x, other = spread_out(T, K, device=device), OTHERS[index]
    x[3, 7], x[150, 130], x[-1, 0] = float("nan"), float("inf"), float("nan")
    ways = [(request, ends) for request in requests_of(other) for ends in ENDS]
    every = 3 if tiers.LONG else 9  # in the interpreter, in turn: it takes its time
    for number, (request, ends) in enumerate(ways):
        if device != "cpu" or number % every == index % every:
            matrix = x[:, ::2] if number % 2 else x if device != "cpu" or tiers.LONG else x[:, 64:192]
            check(matrix, groups_of(ends, device, (128, 256)[number % 2]), request, noted=other.slot >= 0)


@pytest.mark.parametrize("index", tiers.few(range(len(OTHERS)), 3))
def test_kernels_cast_stacks_as_defined(index, device):
    """Also of matrices that lie transposed, as experts ``[E, in, out]`` do."""
    w = torch.stack([spread_out(128, K, device=device) * 4.0**e for e in range(3)])
    turned = w.transpose(-2, -1).contiguous().transpose(-2, -1)
    for number, request in enumerate(requests_of(OTHERS[index])):
        if device != "cpu" or tiers.LONG or number % 3 == index % 3:
            for matrix in (w, turned):
                check(matrix, Groups(3), request, noted=OTHERS[index].slot >= 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernels_cast_other_dtypes(dtype, device):
    x = spread_out(40, 144, device=device, dtype=dtype)[:, 8:136]  # rows begin at no multiple of 16 elements
    check(x, groups_of((7, 33), device), CastRequest(EDEN, EDEN.for_columnwise()))
    check(x, groups_of((7, 33), device), CastRequest(OTHERS[0], EDEN, OTHERS[0], torch.float32))


def test_many_groups(device):
    sizes = torch.tensor([0, 1, 0, 16, 129, 3, 0, 0, 40, 5, 0], device=device)
    ends = tuple(sizes.cumsum(0).tolist())
    check(spread_out(200, 128, device=device), groups_of(ends, device), CastRequest(EDEN, EDEN.for_columnwise()))


@pytest.mark.parametrize("wide", ["fp8_e4m3_128x128", "nvfp4_eden"])
def test_what_no_kernel_casts_is_cast_by_the_definition(wide, device):
    source = EDEN if wide == "nvfp4_eden" else cast_of(wide)
    request, x = CastRequest(None, EDEN.for_columnwise(), source), spread_out(130, 128, device=device)
    groups = groups_of((5, 100), device)
    assert not request.has_kernels
    assert_same(
        cast_by_kernels(x, groups, request, inputs_of(device)), reference(x, groups, request, inputs_of(device))
    )


def test_faces_of_groups_have_tiles_that_faces_of_one_matrix_have(device):
    """Tiles of 128 x 128 had other bits at each launch (H100, Triton 3.6)."""
    require_kernels(device)
    x, groups = spread_out(128, 128, device=device), groups_of((128,), device)
    for request in (CastRequest(EDEN), CastRequest(None, EDEN), CastRequest(OTHERS[0], EDEN, OTHERS[0])):
        with np.errstate(all="ignore"):
            grouped_cast(x, groups, request, inputs_of(device))
        (mine,) = (
            cast for key, cast in grouped_casts._CASTS.items() if key.request == request and key.shape == x.shape
        )
        one, several = cast_on_gpu(x, request, inputs_of(device)).task.tiling, mine._task.tiling
        assert (one.constants.BM, one.constants.BK, one.options) == (
            several.constants.BM, several.constants.BK, several.options,
        )  # fmt: skip


@pytest.mark.parametrize("request_", [CastRequest(EDEN._replace(stream=-1)), CastRequest(EDEN)], ids=str)
def test_a_cast_that_draws_nothing_is_an_error(request_, device):
    require_kernels(device)
    x = spread_out(40, 128, device=device)
    inputs = inputs_of(device) if request_.row.stream < 0 else CastInputs()
    for run in (grouped_cast, quantize_groups):
        with pytest.raises(ValueError, match="random numbers are required for nvfp4_eden"):
            run(x, groups_of((5, 40), device), request_, inputs)


def test_a_step_that_cuts_what_is_rotated_is_an_error(device):
    x, groups = spread_out(40, 128, device=device), groups_of((5, 40), device, 64)
    with pytest.raises(ValueError, match="a step that is a multiple of 128 is required for nvfp4_eden, got 64"):
        quantize_groups(x, groups, CastRequest(None, EDEN), inputs_of(device))
    quantize_groups(x, groups, CastRequest(EDEN), inputs_of(device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes on a CPU")
def test_many_groups_have_the_bits_of_the_definition_at_every_launch():
    x = torch.randn(8192, 2048, device="cuda").bfloat16()
    groups = groups_of((1000, 1000, 3001, 5000, 8100), "cuda")
    other = OTHERS[1]
    for request in (CastRequest(EDEN, EDEN.for_columnwise()), CastRequest(other, EDEN, other, torch.bfloat16)):
        expected = reference(x, groups, request, inputs_of("cuda"))
        for _ in range(20):
            assert_same(grouped_cast(x, groups, request, inputs_of("cuda")), expected)
