"""Products of MS-EDEN faces of groups of tokens and of stacks.

Oracle: products of values, in float64. The kernels run on a GPU, and without one in Triton's interpreter.
"""

import warnings

import numpy as np
import pytest
import torch
from casting import cast_of, request_of
from kernels import require_kernels
from loops import DRAWS, assert_unbiased

from hybridtensor.formats import get_format
from hybridtensor.ops import CastInputs, CastRequest, Groups, grouped_kernel
from hybridtensor.ops.cast.definition import reference_cast
from hybridtensor.ops.dequantize import dequantize, dequantize_cuda, dequantize_reference
from hybridtensor.ops.face import Face, columnwise_of
from hybridtensor.ops.grouped_cast import quantize_groups
from hybridtensor.ops.grouped_mm import by_kernels, grouped_product
from hybridtensor.ops.grouped_mm import reference as product_reference
from hybridtensor.ops.groups import cut_columns, cut_rows, each_group, matrix_of

KEY, STEP, STREAM = -0x123456789ABCDEF, 5, 12
EDEN = cast_of("nvfp4_eden", stream=STREAM)
OTHER = cast_of("nvfp4_max256", rule="mse")
FORMAT = get_format("nvfp4_eden")
T, K, N, E = 330, 256, 128, 4
ENDS = [(5, 70, 70, 300), (0, 0, 129, 330), (0, 0, 0, 0)]


def inputs_of(device, step=STEP, key=KEY):
    return CastInputs(rounding=torch.tensor([key, step], device=device))


def groups_of(ends, device):
    return Groups(len(ends), torch.tensor(ends, dtype=torch.int32, device=device), 128)


@pytest.fixture
def small_tiles(device, monkeypatch):
    """In the interpreter tiles are as small as blocks allow."""
    require_kernels(device)
    if device == "cpu":
        for dtype in grouped_kernel.TILES:
            monkeypatch.setitem(grouped_kernel.TILES, dtype, grouped_kernel.ProductTile(32, 32, 64, 8, 4, 1))


def operands(device, ends, step=STEP, other_step=STEP):
    """Return the operands of the three products, and matrices that they are made of."""
    generator = torch.Generator().manual_seed(4)
    x, g, w = (torch.randn(*shape, generator=generator).bfloat16().to(device) for shape in ((T, K), (T, N), (E, N, K)))
    groups, stack = groups_of(ends, device), Groups(E)
    one, other = inputs_of(device, step), inputs_of(device, other_step)
    of_x = quantize_groups(x, groups, CastRequest(EDEN, EDEN.for_columnwise()), one)
    of_g = quantize_groups(
        g, groups, CastRequest(EDEN._replace(stream=STREAM + 2), EDEN._replace(stream=STREAM + 3)), other
    )
    of_w = quantize_groups(w, stack, CastRequest(EDEN, EDEN.for_columnwise()), one)
    return [(of_g[0], of_w[1]), (of_g[1], of_x[1])], (x, g, w)


def tensors_of(x):
    return reference_cast(CastRequest(EDEN)).run(x, inputs_of(x.device))[0].tensors()


def values(face):
    return dequantize(*face.tensors(), format=FORMAT, dtype=torch.float64)


@pytest.mark.parametrize("ends", ENDS)
def test_products_are_those_of_values(ends, device, small_tiles):
    """Without rotating back; of groups without tokens, and tokens without group, zeros."""
    pairs, _ = operands(device, ends)
    for number, (left, right) in enumerate(pairs):
        with np.errstate(all="ignore"):
            made = by_kernels(left, right, left.groups, torch.float32, False)
        defined = product_reference(left, right, left.groups, torch.float32, False)
        covered = torch.zeros_like(defined, dtype=torch.bool)
        for group in each_group(left.groups, T):
            if number == 0:
                at = slice(group.start, group.stop)
                expected = values(cut_rows(left, group)) @ values(matrix_of(right, group.number)).t()
            else:
                at = group.number
                expected = values(cut_columns(left, group)) @ values(cut_columns(right, group)).t()
            covered[at] = group.stop > group.start
            for found in (made, defined):
                torch.testing.assert_close(found[at].double(), expected, rtol=1e-5, atol=1e-3)
        for found in (made, defined):
            assert not found[~covered].any()


def test_a_product_of_groups_is_unbiased(device):
    """Against the exact products, by the error of a mean that is measured beside it."""
    ends = (70, 70, 330, 330)
    totals, squares = [0.0, 0.0], [0.0, 0.0]
    for step in range(DRAWS):
        pairs, (x, g, w) = operands(device, ends, step, step)
        for i, (left, right) in enumerate(pairs):
            found = grouped_product(left, right, torch.float32, False).double()
            totals[i], squares[i] = totals[i] + found, squares[i] + found**2
    parts = list(zip((0, *ends[:-1]), ends, strict=True))
    exact = [
        torch.cat([g[a:b].double() @ w[e].double() for e, (a, b) in enumerate(parts)]),
        torch.stack([g[a:b].double().t() @ x[a:b].double() for a, b in parts]),
    ]
    assert_unbiased(totals, squares, exact)


@pytest.mark.parametrize("other", [{"step": STEP + 1}, {"key": KEY + 1}])
def test_a_product_under_other_signs_is_nan(other, device, small_tiles):
    ends = ENDS[0]
    pairs, (_, g, _) = operands(device, ends)
    drawn = inputs_of(device, **other)
    of_g = quantize_groups(g, groups_of(ends, device), CastRequest(EDEN, EDEN.for_columnwise()), drawn)
    for number, (left, (_, right)) in enumerate(zip(of_g, pairs, strict=True)):
        for run in (by_kernels, product_reference):
            with np.errstate(all="ignore"):
                found = run(left, right, left.groups, torch.float32, False)
            for group in each_group(left.groups, T):
                if group.stop > group.start:
                    assert found[slice(group.start, group.stop) if number == 0 else group.number].isnan().all()
    with np.errstate(all="ignore"):
        found = by_kernels(of_g[0], pairs[0][1], of_g[0].groups, torch.float32, False)
    assert not found[ends[-1] :].any()


def test_only_groups_under_other_signs_are_nan(device, small_tiles):
    """However few of them differ."""
    ends = ENDS[0]
    for number, (left, right) in enumerate(operands(device, ends)[0]):
        level = left.tensor_scale.clone()
        level[1, 8] = (level[1, 8].int() ^ 4).float()
        for run in (by_kernels, product_reference):
            with np.errstate(all="ignore"):
                found = run(left._replace(tensor_scale=level), right, left.groups, torch.float32, False)
            found = found[: ends[-1]] if number == 0 else found.flatten(1)
            wrong = found.isnan().all(1)
            assert torch.equal(wrong, found.isnan().any(1))
            expected = [5 <= i < 70 for i in range(ends[-1])] if number == 0 else [False, True, False, False]
            assert wrong.tolist() == expected


def test_kernels_read_a_tensor_scale_per_row_before_the_signs(device):
    """As rows of several groups have them, which are dequantized together."""
    require_kernels(device)
    qdata, scale, level = tensors_of(torch.randn(70, 384, device=device))
    levels = level[:1] * torch.arange(1.0, 71.0, device=device)[:, None]
    levels = torch.cat((levels, level[1:]))
    expected = dequantize_reference(*(part.cpu() for part in (qdata, scale, levels)), "nvfp4_eden", torch.float32)
    got = dequantize_cuda(qdata, scale, levels, "nvfp4_eden", torch.float32).cpu()
    assert torch.equal(got, expected)
    row = dequantize_reference(
        qdata[9:10], scale[9:10], torch.cat((levels[9:10], level[1:])), "nvfp4_eden", torch.float32
    )
    assert torch.equal(got[9:10], row.cpu())


@pytest.mark.parametrize("kind", ["identity", "fp8_e4m3_row"])
def test_what_it_holds_is_multiplied_with_other_formats(kind, device, small_tiles):
    """As a columnwise face in high precision: each group under its own tensor scale."""
    groups = groups_of(ENDS[0], device)
    x = torch.cat([torch.randn(100, K, device=device).bfloat16() * 8.0**e for e in range(4)])[:T]
    held, _ = quantize_groups(x, groups, CastRequest(EDEN), inputs_of(device))
    left = columnwise_of(held, torch.bfloat16)
    if kind == "identity":
        right = columnwise_of(Face(x, None, None, get_format("identity"), groups=groups), torch.bfloat16)
    else:
        right = quantize_groups(x, groups, request_of(None, cast_of(kind), None, None), CastInputs())[1]
    expected = product_reference(left, right, groups, torch.bfloat16, False)
    assert torch.equal(grouped_product(left, right, torch.bfloat16, False), expected)
    with np.errstate(all="ignore"):
        found = by_kernels(left, right, groups, torch.bfloat16, False)
    assert (found.double() - expected.double()).abs().max() <= 2**-7 * expected.double().abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU is waited for")
def test_nothing_waits_for_the_device():
    """Neither a cast nor a product: no tensor's value comes to the host."""
    x, groups = torch.randn(T, K, device="cuda").bfloat16(), groups_of(ENDS[0], "cuda")
    pairs, _ = operands("cuda", ENDS[0])
    runs = [lambda left=left, right=right: grouped_product(left, right, torch.bfloat16, False) for left, right in pairs]
    for request in (CastRequest(EDEN, EDEN.for_columnwise()), CastRequest(OTHER, EDEN, OTHER)):
        inputs = inputs_of("cuda")
        runs.append(lambda request=request, inputs=inputs: quantize_groups(x, groups, request, inputs))
    for run in runs:
        run()
    with warnings.catch_warnings():  # torch says that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        for run in runs:
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
