"""Scaling, adding and rounding a sum. Oracle: numpy's fp32 arithmetic, one operation after the other."""

import importlib

import numpy as np
import pytest
import torch
from kernels import require_kernels
from recorder import recorded
from tiers import covered

from hybridtensor.ops.epilogue import scale_and_round, scale_and_round_cuda
from hybridtensor.testing import random_tensor

SHAPES = [(1, 1), (5, 7), (64, 1024), (9, 1030)]
FACTORS = {None: (None, None), "one": (1, 1), "left": (1, None), "rows": ("m", None), "columns": (None, "n"),
           "both": ("m", "n"), "mixed": ("m", 1)}  # fmt: skip


def factor(extent, m, n, dim, device):
    if extent is None:
        return None
    count = {"m": m, "n": n, 1: 1}[extent]
    values = torch.rand(count, generator=torch.Generator().manual_seed(dim)).to(device) + 0.3
    return values[:, None] if dim == 0 else values[None, :]


@pytest.mark.parametrize(
    ("name", "dtype", "with_bias", "kernel"),
    covered(
        [*FACTORS],
        [torch.bfloat16, torch.float16, torch.float32],
        [None, torch.bfloat16, torch.float32],
        [True, False],
    ),
    ids=str,
)
def test_rounds_each_operation_to_fp32_and_the_result_once(name, dtype, with_bias, kernel, device):
    run = scale_and_round_cuda if kernel else scale_and_round  # which a CPU computes by the definition
    if kernel:
        require_kernels(device)
    else:
        device = "cpu"
    for m, n in SHAPES:
        total = random_tensor(m, n + 3, dtype=torch.float32, device=device)[:, :n]
        left, right = (factor(e, m, n, dim, device) for dim, e in enumerate(FACTORS[name]))
        bias = None if with_bias is None else random_tensor(n, dtype=with_bias, device=device, seed=5)
        expected = total.cpu().numpy().copy()
        if name is not None:
            scale = np.float32(1)
            for one in (left, right):
                scale = scale if one is None else scale * one.cpu().numpy()
            expected = expected * scale
        if bias is not None:
            expected = expected + bias.float().cpu().numpy()
        got = run(total.clone(), left, right, bias, dtype)
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert torch.equal(got.cpu(), torch.from_numpy(expected).to(dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy, in Triton's interpreter
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "definition"])
def test_factors_beyond_fp32_make_no_nan_of_zero(kernel, device):
    run = scale_and_round_cuda if kernel else scale_and_round
    if kernel:
        require_kernels(device)
    else:
        device = "cpu"
    total = torch.tensor([[0.0, 1.0], [-1.0, float("nan")]], device=device)
    huge = torch.full((1, 1), 2.0**100, device=device)
    got = run(total, huge, huge, None, torch.float32).cpu()
    largest = torch.finfo(torch.float32).max
    assert torch.equal(got.nan_to_num(7.0), torch.tensor([[0.0, largest], [-largest, 7.0]]))


def test_a_launch_is_kept_for_arguments_of_one_kind_only(monkeypatch):
    """Triton compiles for strides and addresses that are multiples of 16: others need a launch of their own."""
    module = importlib.import_module("hybridtensor.ops.epilogue")
    made = recorded(monkeypatch, module)
    module._launch.cache_clear()
    wide, bias, one = torch.zeros(8, 64), torch.zeros(51), torch.ones(1, 1)
    left = wide[:, :50]
    for total, given in ((left, bias[:50]), (left.clone(), bias[:50]), (wide[:, 1:51], bias[:50]), (left, bias[1:])):
        for _ in range(2):
            scale_and_round_cuda(total, one, None, given, torch.bfloat16)
    module._launch.cache_clear()
    assert len(made) == 4


def test_a_sum_of_other_strides(device):
    """The definition, also on a GPU."""
    total, bias = random_tensor(5, 7, dtype=torch.float32, device=device).t(), random_tensor(5, device=device, seed=5)
    expected = total.cpu().numpy() * np.float32(0.75) + bias.float().cpu().numpy()
    factor = torch.full((1, 1), 0.75, device=device)
    got = scale_and_round(total.clone(memory_format=torch.preserve_format), factor, None, bias, torch.float32)
    assert torch.equal(got.cpu(), torch.from_numpy(expected))


def test_nothing_to_do_and_empty(device):
    total = random_tensor(3, 4, dtype=torch.float32, device=device)
    assert torch.equal(scale_and_round(total, None, None, None, torch.bfloat16), total.bfloat16())
    one = torch.ones(1, 1, device=device)
    assert scale_and_round(total[:0], one, one, None, torch.bfloat16).shape == (0, 4)
