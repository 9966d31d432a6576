"""The kernels of MS-EDEN. Oracles: its definition, and one in numpy that shares no code. Comparisons are of bits.

The kernels run on a GPU, and without one in Triton's interpreter.
"""

import importlib
import warnings

import numpy as np
import pytest
import tiers
import torch
from casting import cast_of, inputs_of, request_of
from fp4_oracles import eden_oracle
from kernels import require_kernels

from hybridtensor.formats import NVFP4_EDEN
from hybridtensor.ops import CastInputs, CastRequest
from hybridtensor.ops.cast.composed import FaceByFace
from hybridtensor.ops.cast.definition import reference_cast, tensors_of
from hybridtensor.ops.cast.kernel import KernelCast, cast_on_gpu
from hybridtensor.ops.cast.multi_tensor import quantize_all
from hybridtensor.ops.cast.operator import CastInGraph, OperatorCast
from hybridtensor.ops.cast.request import to_measure
from hybridtensor.ops.dequantize import dequantize_cuda, dequantize_reference
from hybridtensor.ops.prologue import Gated
from hybridtensor.ops.references import eden, philox
from hybridtensor.ops.references.nvfp4 import unpack
from hybridtensor.ops.scaled_mm import select_backend
from hybridtensor.ops.swiglu import swiglu_cuda
from hybridtensor.testing import edge_tensor, random_tensor

KEY, STEP, STREAM = -0x123456789ABCDEF, 5, 12
EDEN = cast_of("nvfp4_eden", stream=STREAM)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FEW = DTYPES if tiers.LONG or torch.cuda.is_available() else DTYPES[:1]


@pytest.fixture(autouse=True)
def _kernels(device):
    """Without numpy's word on overflows in the interpreter, which are meant."""
    require_kernels(device)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield


def rounding_of(device, key=KEY, step=STEP):
    return torch.tensor([key, step], device=device)


def run(x, request, inputs, out=None):
    """Return the tensors that the kernels make."""
    cast = cast_on_gpu(x, request, inputs)
    assert isinstance(cast, (KernelCast, FaceByFace))
    if out is not None:
        cast.run_into(x, out, inputs)
        return out
    return tensors_of(cast.run(x, inputs))


def bits(tensor):
    """Return the bits; of scales that are NaN without the sign, which differs between devices."""
    found = tensor.cpu().contiguous().view(torch.uint8 if tensor.itemsize == 1 else torch.int32)
    return torch.where(tensor.cpu().isnan(), 0x7F, found) if tensor.dtype == torch.float8_e4m3fn else found


def assert_same(found, expected):
    assert len(found) == len(expected)
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        different = (bits(got) != bits(want)).nonzero()
        assert different.numel() == 0, f"tensor {i}: {len(different)} differ, first {different[0].tolist()}"


def on_cpu(inputs):
    return CastInputs(*(part.cpu() if isinstance(part, torch.Tensor) else part for part in inputs))


def check(x, *, row=None, column=None, source=None, dtype=None, key=KEY, step=STEP, **inputs):
    """Compare with the definition on a CPU."""
    inputs = inputs_of(rounding=rounding_of(x.device, key, step), **inputs)
    request = request_of(row, column, source, dtype or x.dtype)
    assert_same(run(x, request, inputs), tensors_of(reference_cast(request).run(x.cpu(), on_cpu(inputs))))


def spread_out(*shape, dtype, device):
    """Return values of many magnitudes, in which no two blocks have one scale."""
    return (torch.randn(*shape) * torch.exp2(torch.randint(-6, 7, shape))).to(dtype).to(device)


@pytest.mark.parametrize("dtype", FEW, ids=str)
class TestFaces:
    def test_each_alone_and_both(self, dtype, device):
        x = spread_out(128, 256, dtype=dtype, device=device)
        check(x, row=EDEN)
        check(x, column=EDEN)
        check(x, row=EDEN, column=EDEN.for_columnwise())

    def test_the_oracle(self, dtype, device):
        """Of random values, small ones, none, and those of a part of a tensor."""
        x = spread_out(128, 256, dtype=dtype, device=device)
        x[5] = 0
        x[6] *= 2.0**-9
        for matrix, columnwise, first_row in (
            (x[:8], False, 0), (x[:, :8], True, 0), (x[:8], False, 24), (x[:, :5], True, 24),
            (torch.zeros_like(x[:2]), False, 0),
        ):  # fmt: skip
            request = CastRequest(None, EDEN) if columnwise else CastRequest(EDEN)
            inputs = inputs_of(rounding=rounding_of(device), first_row=first_row)
            qdata, scale, level = run(matrix, request, inputs)
            codes, scales, of_tensor, halves = eden_oracle(
                matrix.t() if columnwise else matrix, key=KEY, step=STEP, stream=STREAM, first_row=first_row,
                transposed=columnwise,
            )  # fmt: skip
            np.testing.assert_array_equal(level.flatten().cpu().numpy(), np.array([of_tensor, *halves], np.float32))
            np.testing.assert_array_equal(scale.float().cpu().numpy(), scales)
            np.testing.assert_array_equal(unpack(qdata).cpu().numpy(), codes)

    def test_any_number_of_rows_and_columns(self, dtype, device):
        """Of tokens the columnwise face is that of the matrix with rows of zeros below; of features any number."""
        for rows in (1, 40, 129):
            check(spread_out(rows, 128, dtype=dtype, device=device), row=EDEN, column=EDEN.for_columnwise())
        for rows, columns in ((128, 37), (70, 200), (3, 8)):
            check(spread_out(rows, columns, dtype=dtype, device=device), column=EDEN, first_row=11)

    def test_any_strides(self, dtype, device):
        x = spread_out(128, 256, dtype=dtype, device=device)
        for view in (x.t(), x[::4], x[1:40, :128], x[:8, 3:131], x[:8].flip(0)):
            check(view, row=EDEN, column=EDEN.for_columnwise())

    def test_edge_values(self, dtype, device):
        edges = edge_tensor(dtype, device).flatten()
        x = spread_out(128, 128, dtype=dtype, device=device)
        x[64:, : min(128, edges.numel())] = edges[:128]
        for given in (x, torch.where(x.isinf(), 0, x), torch.where(x.isfinite(), x, 0)):
            check(given, row=EDEN, column=EDEN.for_columnwise())
        largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
        for value in (0.0, -0.0, float("nan"), float("-inf"), smallest / 4, largest, -largest):
            check(torch.full((128, 128), value, dtype=dtype, device=device), row=EDEN, column=EDEN.for_columnwise())
        signs = torch.randint(0, 2, (128, 128), device=device) * 2 - 1
        check((signs * largest).to(dtype), row=EDEN, column=EDEN.for_columnwise())
        check((signs * smallest / 8).to(dtype), row=EDEN, column=EDEN.for_columnwise())


def test_scales_of_every_magnitude(device):
    """Of blocks from 256 down to none, in tensors of every magnitude."""
    x = torch.randn(64, 256, device=device) * torch.logspace(0, -9, 64, device=device)[:, None]
    for factor in (1.0, 2.0**-130, 2.0**-100, 2.0**100):
        check(x * factor, row=EDEN, column=EDEN.for_columnwise())


@pytest.mark.parametrize(("seed", "row"), [(10, 5681), (13, 7946), (14, 2525), (20, 3828)])
def test_sums_are_added_in_order(seed, row, device):
    """Rows of which a scale, between two of E4M3, is rounded to the other one if halves are not added, but neighbours
    first (seeds 10, 13, 20), or one value after the other (10, 14, 20), or a product before it is rounded (10).
    """
    x = torch.randn(8192, 128, generator=torch.Generator().manual_seed(seed))[row : row + 1]
    check(x.to(device), row=EDEN)


@pytest.mark.gpu
def test_many_scales_are_those_of_the_definition(device):
    """Of millions of scales each order of sums rounds some to another neighbour."""
    if device == "cpu":
        pytest.skip("takes minutes on a CPU")
    x, request = torch.randn(4096, 8192, device=device).bfloat16(), CastRequest(EDEN, EDEN.for_columnwise())
    inputs = inputs_of(rounding=rounding_of(device))
    for given in (x, x.float()):
        assert_same(run(given, request, inputs), tensors_of(reference_cast(request).run(given, inputs)))


def test_values_that_round_to_nothing_and_to_subnormal_scales(device):
    x = torch.randn(32, 128, device=device) * torch.exp2(-torch.arange(128.0, device=device) / 8)
    halves = philox.sign_halves(rounding_of("cpu"), STREAM)
    rotated_back = eden.rotate_back(x.cpu(), halves).to(device)  # what is rotated to x
    check(rotated_back, row=EDEN)
    check(rotated_back.t(), column=EDEN)


@pytest.mark.parametrize("amax", [0.0, 1e-3, 3.0, 1e4, 2.0**-140, 1e38, float("inf")])
def test_a_given_amax(amax, device):
    """That of a whole tensor, or of anything: what is beyond has the largest scale."""
    x = spread_out(130, 128, dtype=torch.float32, device=device)
    given = torch.tensor([amax], device=device)
    check(x, row=EDEN, column=EDEN.for_columnwise(), row_amax=given, column_amax=given * 2)
    check(x, row=EDEN, row_amax=given)
    check(x, row=EDEN, column=EDEN.for_columnwise(), column_amax=given)


def test_draws_are_those_of_key_step_and_stream(device):
    x = spread_out(128, 128, dtype=torch.bfloat16, device=device)
    for key, step, stream in (
        (0, 0, 0), (1, 2**32 - 1, 6), (-1, 2**32 + 3, 8 * (2**29 - 1)), (2**63 - 1, 1, 2**31 - 2), (-(2**63), -1, 20),
    ):  # fmt: skip
        cast = EDEN._replace(stream=stream)
        check(x, row=cast, column=cast.for_columnwise(), key=key, step=step)
    check(x, row=EDEN, column=EDEN._replace(stream=STREAM + 8))  # signs of their own


def test_a_part_draws_what_the_whole_would(device):
    for first_row in (1, 24, 2**25 + 3, 2**30):
        x = spread_out(128, 128, dtype=torch.bfloat16, device=device)
        check(x, row=EDEN, column=EDEN.for_columnwise(), first_row=first_row)
        check(x[:, :37], column=EDEN, first_row=first_row)


OTHERS = [
    cast_of("nvfp4"),
    cast_of("nvfp4_row_scaled"),
    cast_of("nvfp4_16x16"),
    cast_of("nvfp4_hadamard", stream=STREAM + 2),
    cast_of("nvfp4_max256", rule="mse"),
    cast_of("fp8_e4m3_tensor"),
    cast_of("fp8_e4m3_row"),
    cast_of("fp8_e4m3_128x128"),
    cast_of("mxfp8_e4m3"),
    cast_of("mxfp4"),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_pairs_with_another_format(other, device):
    """The other face of a matrix, and what one is made of, with NaN and Inf among the values."""
    x = spread_out(40, 128, dtype=torch.bfloat16, device=device)
    ways = [
        {"row": other, "column": EDEN},
        {"row": EDEN, "column": other},
    ]
    if CastRequest(None, EDEN, other).has_kernels:
        ways += [
            {"row": other, "column": EDEN, "source": other},
            {"column": EDEN, "source": other, "dtype": torch.float32},
        ]
    if device == "cuda" and not tiers.LONG:  # where kernels are compiled
        ways = ways[OTHERS.index(other) % 2 :: 2]
    for _ in range(2):
        for way in ways:
            check(x, **way)
        x[3, 127], x[30, 7] = float("nan"), float("inf")


def test_what_is_rotated_under_drawn_signs_is_cast_by_no_kernel_again(device):
    for request in (CastRequest(None, EDEN.for_columnwise(), EDEN), CastRequest(None, cast_of("mxfp8_e4m3"), EDEN)):
        assert not request.has_kernels


def test_into_faces_that_are_there(device):
    x, request = spread_out(128, 256, dtype=torch.bfloat16, device=device), CastRequest(EDEN, EDEN.for_columnwise())
    inputs = inputs_of(rounding=rounding_of(device))
    made = run(x, request, inputs)
    out = [torch.empty_like(tensor) for tensor in made]
    assert_same(run(x, request, inputs, out), made)


def test_a_place_in_a_graph(device):
    x, request = spread_out(128, 256, dtype=torch.bfloat16, device=device), CastRequest(EDEN, EDEN.for_columnwise())
    place, rounding = CastInGraph(), rounding_of(device)
    seen = x if device == "cuda" else x.as_subclass(OnGpu)
    for _ in range(2):
        expected = run(x, request, inputs_of(rounding=rounding))
        made = [torch.zeros_like(tensor) for tensor in expected]
        place(seen, made, str(request), None, None, rounding, 0)
        assert_same(made, expected)


class OnGpu(torch.Tensor):
    """A tensor that is taken for one of a GPU, so that kernels cast it: on a CPU in the interpreter."""

    is_cuda = True


def test_computed_matrices(device):
    x, up = (random_tensor(40, 128, seed=i, device=device) for i in range(2))
    request = CastRequest(EDEN, EDEN.for_columnwise())
    found = run(x, request, inputs_of(rounding=rounding_of(device))._replace(prologue=Gated(up)))
    assert_same(found, run(swiglu_cuda(x, up)[0], request, inputs_of(rounding=rounding_of(device))))


def test_matrices_are_cast_one_by_one(device):
    """Each with signs of its own."""
    xs = [spread_out(*shape, dtype=torch.bfloat16, device=device) for shape in ((48, 128), (128, 384), (160, 256))]
    request = CastRequest(EDEN, EDEN.for_columnwise())
    inputs = [inputs_of(rounding=rounding_of(device, KEY + i), first_row=3 * i) for i in range(3)]
    for x, given, faces in zip(xs, inputs, quantize_all(xs, request, inputs), strict=True):
        assert_same(tensors_of(faces), tensors_of(reference_cast(request).run(x.cpu(), on_cpu(given))))


def test_only_a_face_without_drawn_signs_is_measured_before(device):
    """Operators measure without random numbers, also where kernels are compiled for batches of other lengths."""
    x = spread_out(128, 256, dtype=torch.bfloat16, device=device)
    nvfp4, drawn = cast_of("nvfp4"), inputs_of(rounding=rounding_of(device))
    for view in (x, x[:, :128], x[:100]):
        for row, column in ((nvfp4, EDEN), (EDEN, nvfp4)):
            request, expected = CastRequest(row, column), view.float().abs().amax().view(1)
            assert torch.equal(cast_on_gpu(view, request, drawn).measure(view)[row is EDEN], expected)
            assert torch.equal(OperatorCast(request).measure(view)[row is EDEN], expected)
            assert to_measure(request) == (CastRequest(row) if row is nvfp4 else CastRequest(None, column))
    for measure in (lambda cast: cast.measure(x), lambda cast: cast.measure_into(x, torch.zeros(1, device=device))):
        with pytest.raises(ValueError, match=r"measure: .*of which no signs are drawn, are required, got nvfp4_eden"):
            measure(cast_on_gpu(x, CastRequest(EDEN), drawn))
    assert to_measure(CastRequest(EDEN, EDEN)) is None


def test_a_cast_that_draws_nothing_is_an_error(device):
    x = torch.randn(4, 128, device=device)
    for cast, rounding in ((EDEN._replace(stream=-1), rounding_of(device)), (EDEN, None)):
        for _ in range(2):
            with pytest.raises(ValueError, match="random numbers are required for nvfp4_eden"):
                run(x, CastRequest(cast), inputs_of(rounding=rounding))


def values_of(tensors, dtype, whole, device):
    on_device = [tensor.to(device) for tensor in tensors]
    on_device[1] = on_device[1].t().contiguous().t()
    return dequantize_cuda(*on_device, "nvfp4_eden", dtype, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_values_back_as_defined(dtype, device):
    x = spread_out(70, 384, dtype=torch.float32, device="cpu")
    rounding = rounding_of("cpu")
    x[3, 130] = float("nan")
    for factor in (1.0, 2.0**-128, 2.0**110):
        made = tensors_of(reference_cast(CastRequest(EDEN)).run(x * factor, inputs_of(rounding=rounding)))
        for level in (made[2][0].item(), float("inf"), 3e38, 2.0**-126):
            made[2][0] = level
            for whole in (True, False):
                expected = dequantize_reference(*made, "nvfp4_eden", dtype, whole)
                got = values_of(made, dtype, whole, device).cpu()
                assert got.dtype == dtype
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
                assert torch.equal(got.signbit() | got.isnan(), expected.signbit() | expected.isnan())


def test_it_is_read_by_a_kernel(device, monkeypatch):
    """And the definition only where that is all there is: in float64, and of what kernels cannot read."""
    inputs = inputs_of(rounding=rounding_of("cpu"))
    made = tensors_of(reference_cast(CastRequest(EDEN)).run(torch.randn(4, 128), inputs))
    monkeypatch.setattr(importlib.import_module("hybridtensor.ops.dequantize"), "dequantize_reference", None)
    values_of(made, torch.bfloat16, True, device)
    with pytest.raises(TypeError, match="not callable"):
        values_of(made, torch.float64, True, device)


def test_products_take_no_kernel_that_forgets_the_signs():
    assert NVFP4_EDEN.has_kernels
    for device in ("cpu", "cuda"):
        assert select_backend(NVFP4_EDEN, NVFP4_EDEN, torch.bfloat16, torch.device(device)).name == "emulated"
