"""The Hadamard rotation against scipy's definition of the matrix in float64, and against itself."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from hybridtensor.ops.references.hadamard import SIGNS, rotate, rotate_back
from hybridtensor.testing import random_tensor


def matrix():
    """Build ``diag(signs) @ H16 / 4`` by Sylvester's doubling."""
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    return np.diag(SIGNS) @ h / 4


def test_the_matrix_is_orthogonal():
    np.testing.assert_array_equal(matrix() @ matrix().T, np.eye(16))


def test_unit_vectors_give_the_matrix(device):
    rotated = rotate(torch.eye(16, device=device)).cpu().double().numpy()
    np.testing.assert_array_equal(rotated, matrix())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equals_float64_up_to_one_rounding(dtype, device):
    x = random_tensor(24, 64, dtype=dtype, device=device)
    exact = (x.cpu().double().numpy().reshape(24, 4, 16) @ matrix()).reshape(24, 64)
    got = rotate(x).cpu().double().numpy()
    magnitude = (np.abs(x.cpu().double().numpy()).reshape(24, 4, 16) @ np.abs(matrix())).reshape(24, 64)
    # bf16 keeps 8 bits: its unit roundoff is 2^-8; four additions in fp32 lose 4 * 2^-24 of the sum of magnitudes
    assert (np.abs(got - exact) <= 2.0**-8 * np.abs(exact) + 5 * 2.0**-24 * magnitude).all()


def test_small_integers_are_exact_and_come_back(device):
    x = torch.randint(-7, 8, (8, 32), device=device).float() * 4
    assert torch.equal(rotate_back(rotate(x)), x)


def test_rotating_back_undoes_rotating_up_to_rounding(device):
    x = random_tensor(16, 48, device=device)
    back = rotate_back(rotate(x))
    norm = x.float().unflatten(1, (3, 16)).norm(dim=2, keepdim=True)
    error = (back - x.float()).unflatten(1, (3, 16)).norm(dim=2, keepdim=True)
    assert (error <= 2.0**-8 * norm).all()  # orthogonal: the error is that of one rounding to bf16


def test_the_matrix_is_torchaos(device):
    """Its product in bf16 rounds the same sums once, in another order: rarely one unit in the last place apart."""
    utils = pytest.importorskip(
        "torchao.prototype.moe_training.nvfp4_training.hadamard_utils", reason="torchao 0.17 does not have it"
    )
    theirs = utils.get_rht_matrix(SIGNS, device, torch.bfloat16, 16)
    np.testing.assert_array_equal(theirs.cpu().double().numpy(), matrix())
    x = random_tensor(64, 64, device=device)
    ours, other = rotate(x), (x.reshape(-1, 16) @ theirs).reshape(64, 64)
    assert (ours == other).float().mean() > 0.99
    assert ((ours.float() - other.float()).abs() <= 2.0**-7 * ours.float().abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_largest_values_saturate(dtype, device):
    largest = torch.finfo(dtype).max
    rows = torch.from_numpy(np.sign(matrix().T)).to(dtype) * largest  # each row adds up in one place
    rotated = rotate(rows.to(device)).float()
    assert torch.equal(rotated, torch.eye(16, device=device) * torch.finfo(torch.bfloat16).max)


@examples(20)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16))
def test_finite_stays_finite(values):
    assert rotate(torch.tensor([values])).isfinite().all()


def test_inf_and_nan_fill_their_group_and_no_other(device):
    x = random_tensor(3, 48, device=device)
    clean = rotate(x)
    x[0, 3], x[1, 20], x[1, 21], x[2, 40], x[2, 41] = (float(v) for v in ("inf", "inf", "-inf", "inf", "nan"))
    rotated = rotate(x)
    assert rotated[0, :16].isinf().all()
    assert rotated[1, 16:32].isinf().all()
    assert rotated[2, 32:].isnan().all()
    for row, groups in ((0, (1, 2)), (1, (0, 2)), (2, (0, 1))):
        for i in groups:
            assert torch.equal(rotated[row, 16 * i : 16 * i + 16], clean[row, 16 * i : 16 * i + 16])


def test_the_product_of_rotated_operands_is_the_product(device):
    a, b = (torch.randint(-8, 9, (n, 32), device=device).float() for n in (5, 7))
    exact = a.double() @ b.double().t()
    assert torch.equal(rotate(4 * a).double() @ rotate(4 * b).double().t(), 16 * exact)
