"""The cast with a given scale against ml_dtypes, and the amax that it measures."""

import ml_dtypes
import numpy as np
import pytest
import torch
from casting import float8_cast

from hybridtensor import formats
from hybridtensor.testing import edge_tensor, random_tensor

ELEMENTS = {formats.FP8_E4M3_TENSOR: ml_dtypes.float8_e4m3fn, formats.FP8_E5M2_TENSOR: ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("factor", [1.0, 3.7, 2.0**-20, 2.0**30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", ELEMENTS, ids=str)
def test_equals_ml_dtypes(fmt, dtype, factor, device):
    for x in (random_tensor(20, 30, dtype=dtype, device=device), edge_tensor(dtype, device).t()):
        amaxes = torch.tensor([0.0, 2.0**-149, 5.0], device=device)
        codes, scale = float8_cast(x, torch.tensor([7.0, factor], device=device), amaxes, 1, fmt)
        values = x.cpu().float().numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            expected = np.clip(values * np.float32(factor), -fmt.max, fmt.max).astype(ELEMENTS[fmt]).view(np.uint8)
        expected = np.where(np.isnan(values), 0x7F, expected)
        np.testing.assert_array_equal(codes.cpu().view(torch.uint8).numpy(), expected)
        assert scale.item() == np.float32(1) / np.float32(factor)
        assert amaxes.tolist() == [0.0, np.nanmax(np.abs(values)), 5.0]


def test_empty(device):
    factors, amaxes = torch.tensor([2.0], device=device), torch.tensor([3.0], device=device)
    codes, scale = float8_cast(torch.empty(0, 8, device=device), factors, amaxes, 0, formats.FP8_E5M2_TENSOR)
    assert codes.shape == (0, 8)
    assert (scale.item(), amaxes.item()) == (0.5, 3.0)


def test_notes_do_not_depend_on_order_or_repetition(device):
    factors, parts = torch.tensor([1.0], device=device), random_tensor(4, 6, 10, device=device)
    notes = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 2, 3, 0]):
        amaxes = torch.zeros(1, device=device)
        for i in order:
            float8_cast(parts[i], factors, amaxes, 0, formats.FP8_E4M3_TENSOR)
        notes.append(amaxes.item())
    assert set(notes) == {parts.abs().max().item()}


def test_a_note_does_not_count_as_a_write(device):
    """Compiled graphs save the notes for backward, and FSDP2 quantizes weights between forward and backward."""
    amaxes = torch.zeros(2, device=device)
    float8_cast(torch.ones(4, 4, device=device), torch.ones(2, device=device), amaxes, 1, formats.FP8_E4M3_TENSOR)
    assert amaxes.tolist() == [0.0, 1.0]
    assert amaxes._version == 0
