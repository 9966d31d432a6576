"""NVFP4 whose blocks map their amax to 6 or 4: against an oracle in numpy and ml_dtypes, and what it promises.

Comparisons are of bits. ``test_quantize.py`` compares kernels with the definition.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from casting import cast_of, interpreted, quantize
from fp4_oracles import E2M1, E4M3, F32, error_of, four_over_six_oracle, nearly_tied
from hypothesis import given
from hypothesis import strategies as st
from kernels import require_kernels
from tiers import examples, in_turn

from hybridtensor import HybridConfig, NVFP4Quantizer
from hybridtensor.formats import get_format
from hybridtensor.kernels import four_over_six
from hybridtensor.kernels.groups import Matrix
from hybridtensor.ops.cast.tiles import KernelFace, Tiling, computed, tile_of
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.references.hadamard import rotate
from hybridtensor.ops.references.nvfp4 import quantize as reference
from hybridtensor.ops.references.nvfp4 import unpack
from hybridtensor.testing import edge_tensor, random_tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = ["", "_16x16", "_row_scaled", "_hadamard", "_row_scaled_hadamard"]
CASES = [(kind, metric, most) for kind in KINDS for metric in ("mae", "mse") for most in (256, 448)]


def cast_to(kind, metric, most):
    return cast_of(f"nvfp4{kind}{'_max256' if most == 256 else ''}", rule=metric)


def check(x, kind, metric, most, *, columnwise=False):
    """Compare a face with the oracle, and return which blocks chose 4."""
    cast = cast_to(kind, metric, most)
    fmt = cast.format
    face = {"column" if columnwise else "row": cast}
    qdata, scale, level = quantize(x, **face)
    if not torch.cuda.is_available():
        for made, expected in zip(interpreted(x, **face), (qdata, scale, level), strict=True):
            np.testing.assert_array_equal(made.view(torch.uint8).numpy(), expected.view(torch.uint8).numpy())
    matrix = x.t() if columnwise else x
    codes, scales, levels, fours = four_over_six_oracle(
        rotate(matrix) if fmt.hadamard else matrix, metric=metric, scale_max=most, block=fmt.block,
        row_scaled=fmt.tensor_block == (1, None), transposed=columnwise,
    )  # fmt: skip
    np.testing.assert_array_equal(level.cpu().numpy(), levels)
    np.testing.assert_array_equal(scale.cpu().view(torch.uint8).numpy(), scales)
    np.testing.assert_array_equal(unpack(qdata).cpu().numpy(), codes)
    return fours


def mixed(rows, columns):
    """Return blocks of 16x16 with one large value, with many, and of all magnitudes."""
    x = torch.randn(rows, columns)
    for i, (top, left) in enumerate(np.ndindex(rows // 16, columns // 16)):
        block = x[16 * top : 16 * top + 16, 16 * left : 16 * left + 16]
        if i % 3 == 0:
            block.copy_(block.sign() * (1 - torch.rand(16, 16) / (2 + i)))
        block *= 2.0 ** (i % 5)
    return x


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, DTYPES), ids=str)
def test_equals_the_oracle(case, dtype, device):
    x = mixed(64, 96).to(dtype).to(device)
    for columnwise in (False, True):
        fours = check(x, *case, columnwise=columnwise)
        assert 0 < fours.sum() < fours.size, "both are chosen"


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, DTYPES), ids=str)
def test_edge_values_equal_the_oracle(case, dtype, device):
    edges = edge_tensor(dtype, device).repeat(2, 3)[:32, :48].contiguous()
    finite = edges.nan_to_num(nan=1.0, posinf=1.0, neginf=-1.0)
    for x in (edges, torch.where(edges.isinf(), 0, edges), finite, finite[:16, :16], torch.zeros_like(edges)):
        for columnwise in (False, True):
            check(x, *case, columnwise=columnwise)


@pytest.mark.parametrize("metric", ["mae", "mse"])
def test_scales_over_every_exponent(metric, device):
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    below, above = (torch.nextafter(powers, torch.full_like(powers, end)) for end in (0.0, 3e38))
    amax = torch.cat([powers, below, above]).clamp(max=3.3e38)[:, None]
    spread = torch.ldexp(torch.ones(32), -(torch.arange(32) // 4)) * torch.linspace(1, -0.3, 32)
    check((amax * spread).to(device), "_row_scaled", metric, 256)


@pytest.mark.parametrize("metric", ["mae", "mse"])
@pytest.mark.parametrize("side", [1, 16])
def test_errors_are_added_up_in_order(metric, side, device):
    x = nearly_tied(32 * side, 64, side).to(device)
    kind = "_16x16" if side > 1 else ""
    fours = check(x, kind, metric, 256)
    assert 0.02 < fours.mean() < 0.9, "the order decides"
    if side > 1:
        check(x, kind, metric, 256, columnwise=True)


def on_the_edge(cast, rows, columns):
    """Return two matrices that hardly differ, of blocks that choose otherwise in most of them: found by halving."""
    a, b = 6 * torch.rand(2, rows, columns) - 3
    side = cast.format.block[0]
    a[::side, ::16] = b[::side, ::16] = 3.0
    a[0, 0] = b[0, 0] = 777.7

    def between(bits):
        t = bits.view(torch.float32).repeat_interleave(side, 0).repeat_interleave(16, 1)
        return a + t * (b - a)

    def chosen(x):
        return reference(x, cast.format, rule=cast.rule)[1].view(torch.uint8)

    low, high = (torch.full((rows // side, columns // 16), end).view(torch.int32) for end in (0.0, 1.0))
    for _ in range(30):
        middle = (low + high) // 2
        same = chosen(between(middle)) == chosen(a)
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    assert (chosen(between(low)) != chosen(between(high))).float().mean() > 0.25
    return between(low), between(high)


@pytest.mark.parametrize("metric", ["mae", "mse"])
@pytest.mark.parametrize("kind", ["", "_row_scaled", "_16x16"])
def test_the_last_bits_of_errors_decide(metric, kind, device):
    """Blocks between two that choose otherwise, so near to where the choice changes as fp32 allows."""
    cast = cast_to(kind, metric, 256)
    for x in on_the_edge(cast, 48, 128 if cast.format.block[0] > 1 else 64):
        check(x.to(device), kind, metric, 256)
        if kind == "_16x16":
            check(x.to(device), kind, metric, 256, columnwise=True)


@pytest.mark.parametrize("metric", ["mae", "mse"])
def test_scales_around_the_smallest(metric, device):
    """Which round to nothing for 6 but not for 4, and by up to a half."""
    amax = torch.linspace(0.5, 4, 96)[:, None] * 6 * 2.0**-9
    x = amax * torch.cat([torch.ones(96, 1), 2 * torch.rand(96, 31) - 1], 1)
    x[0, 0] = 1536.0
    check(x.to(device), "", metric, 256)
    check(x.repeat(1, 3).t().contiguous().to(device), "", metric, 256, columnwise=True)


@pytest.mark.parametrize("metric", ["mae", "mse"])
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-34, 2.0**-29, 2.0**29, 2.0**34, 2.0**60])
def test_tensors_of_all_magnitudes(scale, metric, device):
    """Squares of errors leave fp32, or nearly so."""
    check(scale * mixed(16, 64).to(device), "", metric, 256)


@pytest.mark.parametrize("side", [1, 16])
def test_what_is_tied_needs_no_sum_in_order(side, monkeypatch, device):
    """Zeros, blocks that are exact with either scale, and ones that become the same; what does need it is seen."""
    require_kernels(device)
    if device != "cpu":
        pytest.skip("only the interpreter shows which functions of a kernel run")
    seen, errors = [], four_over_six._errors
    monkeypatch.setattr(four_over_six, "_errors", lambda *args: seen.append(1) or errors(*args))
    cast = cast_to("_16x16" if side > 1 else "", "mae", 256)
    x = torch.zeros(64, 64)
    x[::2, 4::16], x[1::2, 6::16] = 6.0, -3.1
    x[::side, 16:32] = 0
    x[32:, 32:] = 0
    x[0, 0] = 777.7
    interpreted(x, row=cast)
    assert not seen
    interpreted(on_the_edge(cast, 64, 64)[0], row=cast)
    assert seen


def test_a_tie_keeps_six(device):
    """Blocks of ``6 s``, ``3 s`` and ``1.5 s`` are exact either way, with scales ``s`` and ``1.5 s``."""
    x = torch.zeros(1, 32)
    x[0, 0] = 1536.0  # the amax of the tensor: what is encoded is what is there
    x[0, 16:22] = torch.tensor([6.0, -3.0, 1.5, 0.0, -6.0, 3.0]) * 8
    for metric in ("mae", "mse"):
        _, scale, level = quantize(x.to(device), row=cast_to("", metric, 256))
        assert level.item() == 1536
        assert scale.float().tolist() == [[256, 8]]


def test_four_wins_where_its_steps_are_finer(device):
    """5 lies between 4 and 6; with a scale of 1.5 it is between 4.5 and 6, and 4.5 is on the grid, too."""
    x = torch.zeros(1, 32)
    x[0, 0] = 1536.0
    x[0, 16:19] = torch.tensor([6.0, 5.0, 4.5])
    for metric in ("mae", "mse"):
        fmt = cast_to("", metric, 256).format
        made = quantize(x.to(device), row=cast_to("", metric, 256))
        assert made[1].float().tolist() == [[256, 1.5]]
        values = dequantize(*made, format=fmt, dtype=torch.float32)
        assert values[0, 16:19].tolist() == [6, 4.5, 4.5]


def test_metrics_differ_where_one_large_error_stands_against_many_small_ones(device):
    x = random_tensor(64, 256, device=device)
    of_mae, of_mse = (quantize(x, row=cast_to("", metric, 256))[1] for metric in ("mae", "mse"))
    assert 0 < (of_mae.float() != of_mse.float()).sum() < of_mae.numel() / 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_block_has_more_error_than_plain_nvfp4(case, device):
    """With the same scale for the tensor; plain NVFP4 rounds the scale of few blocks otherwise, which are left out."""
    _, metric, most = case
    cast = cast_to(*case)
    x = mixed(64, 128).bfloat16().to(device)
    chosen, plain = (quantize(x, row=c) for c in (cast, cast._replace(rule="")))
    fmt = cast.format
    values = (rotate(x) if fmt.hadamard else x).float().cpu().numpy()
    shape = np.array(chosen[1].shape)
    less = compared = 0
    for i, j in np.ndindex(*shape):
        rows, columns = (slice(size * n, size * (n + 1)) for size, n in zip(fmt.block, (i, j), strict=True))
        part, level = values[rows, columns], F32(chosen[2][i if len(chosen[2]) > 1 else 0].item())
        errors = []
        for qdata, scale, _ in (chosen, plain):
            elements = unpack(qdata)[rows, columns].cpu().numpy().astype(np.uint8)
            of_block = scale.view(torch.uint8)[i, j].cpu().numpy().view(E4M3)
            errors.append(error_of(decoded(elements), of_block, part, level, metric, most))
        wanted = F32(F32(np.abs(part).max() / F32(6)) * F32(F32(6 * most) / level)).astype(E4M3)
        if wanted == plain[1].view(torch.uint8)[i, j].cpu().numpy().view(E4M3):
            compared += 1
            assert errors[0] <= errors[1]
            less += errors[0] < errors[1]
    assert compared > 0.9 * shape.prod()
    assert less > 0.1 * compared


def decoded(codes):
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
    return (np.where(codes & 8, -1, 1).astype(F32) * grid[codes & 7]).astype(E2M1)


@pytest.mark.parametrize("metric", ["mae", "mse"])
def test_both_faces_of_square_blocks_have_one_choice(metric, device):
    """Their errors are added up by the rows of the tensor, also where the columnwise face is made alone."""
    x = mixed(160, 96).bfloat16().to(device)
    cast = cast_to("_16x16", metric, 256)
    row, column = quantize(x, row=cast)[:2], quantize(x, column=cast)[:2]
    assert torch.equal(row[1].view(torch.uint8).t(), column[1].view(torch.uint8))
    assert torch.equal(unpack(row[0]).t(), unpack(column[0]))


def test_nan_and_inf_are_those_of_nvfp4(device):
    x = random_tensor(32, 64, device=device)
    x[3, 20], x[7, 40] = float("nan"), float("inf")
    for kind in ("", "_row_scaled", "_16x16"):
        cast = cast_to(kind, "mae", 256)
        chosen, plain = quantize(x, row=cast), quantize(x, row=cast._replace(rule=""))
        assert torch.equal(chosen[1].float().isnan(), plain[1].float().isnan())
        assert torch.equal(chosen[2], plain[2])
        values = [dequantize(*made, format=cast.format, dtype=torch.float32) for made in (chosen, plain)]
        assert values[0][7, 40] == values[1][7, 40] == values[1][7].nan_to_num().max() > 0


@examples(25)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16),
    st.sampled_from(CASES), st.sampled_from(DTYPES),
)  # fmt: skip
def test_finite_in_gives_finite_out_as_the_oracle_says(values, case, dtype):
    x = torch.tensor([values]).to(dtype)
    if x.isfinite().all() and case[0] != "_16x16":
        check(x, *case)
        cast = cast_to(*case)
        assert dequantize(*quantize(x, row=cast), format=cast.format, dtype=dtype).isfinite().all()


def test_a_quantizer_says_what_it_makes():
    chosen = NVFP4Quantizer(four_over_six="mae")
    assert chosen.scale_max == 256
    assert chosen.format is get_format("nvfp4_max256")
    assert NVFP4Quantizer(four_over_six="mse", scale_max=448).format is NVFP4Quantizer().format
    assert NVFP4Quantizer(scale_max=256).format is chosen.format
    assert NVFP4Quantizer() == NVFP4Quantizer(scale_max=448)
    with pytest.raises(ValueError, match=r"compares the errors of rounding to nearest, got rounding='stochastic'; use"):
        NVFP4Quantizer(four_over_six="mae", rounding="stochastic")
    with pytest.raises(ValueError, match=r"unknown four_over_six 'MAE'; .*known: mae, mse"):
        NVFP4Quantizer(four_over_six="MAE")
    with pytest.raises(ValueError, match="448 or 256 is required as scale_max, got 300"):
        NVFP4Quantizer(scale_max=300)


@pytest.mark.parametrize(
    ("cast", "says"),
    [
        (cast_of("nvfp4", rule="even"), "no rule or one of mae, mse is required for nvfp4, got 'even'"),
        (cast_of("mxfp4", rule="mae"), "no rule or one of even, floor is required for mxfp4, got 'mae'"),
        (cast_of("mxfp8_e4m3", rule="floor"), "no rule is required for mxfp8_e4m3, got 'floor'"),
        (cast_of("nvfp4", rule="mae", stream=4), "rounding to nearest is required for nvfp4 with rule 'mae', got str"),
    ],
    ids=str,
)
def test_a_rule_belongs_to_a_format(cast, says, device):
    with pytest.raises(ValueError, match=says):
        quantize(torch.zeros(32, 32, device=device), row=cast)


def test_quantizers_of_before_are_the_same():
    """Pickles without the fields, and fingerprints that checkpoints and caches of graphs hold."""
    fields = {"row_scaled": False, "two_d": True, "hadamard": False, "rounding": "nearest", "seed": 0}
    old = NVFP4Quantizer.__new__(NVFP4Quantizer)
    old.__setstate__(fields)
    assert old == NVFP4Quantizer(two_d=True)
    assert old.format is get_format("nvfp4_16x16")
    assert HybridConfig.parse("nvfp4").fingerprint() == "55014d03187e6166"
    specs = "nvfp4", "nvfp4+four_over_six", "nvfp4+four_over_six+four_over_six_448"
    assert len({HybridConfig.parse(spec).fingerprint() for spec in specs}) == 3


def test_less_error_than_nvfp4_of_normal_values(device):
    """On normally distributed values the squared error falls by at least a tenth with squared errors compared."""
    x = torch.randn(256, 256, device=device).bfloat16()
    errors = []
    for quantizer in (NVFP4Quantizer(), NVFP4Quantizer(four_over_six="mse")):
        errors.append((quantizer.quantize(x).rowwise.dequantize().float() - x.float()).square().sum().item())
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("other", ["fp8_e4m3_tensor", "fp8_e4m3_1x128", "nvfp4_hadamard"])
def test_launches_that_compare_errors_round_each_product_and_sum(other):
    """A fused multiply-add rounds once: on a GPU another scale would be chosen where errors are nearly equal."""
    plain, chosen = KernelFace.of(cast_of(other)), KernelFace.of(cast_to("", "mse", 256))
    matrix = Matrix(None, 256, 1, 256, 256)
    for row, column, fuses in ((plain, chosen, False), (chosen, KernelFace.of(None), False), (plain, plain, True)):
        for tile in (tile_of(row, column, False), computed(tile_of(row, column, True))):
            options = Tiling.of(tile, matrix, torch.bfloat16, draws=False).options
            assert options.get("enable_fp_fusion", True) is fuses


def test_ml_dtypes_rounds_to_the_even_code():
    """What the oracle relies on."""
    values = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32).astype(ml_dtypes.float4_e2m1fn)
    assert values.astype(F32).tolist() == [0, 1, 1, 2, 2, 4, 4]
