"""Random bits: the published test vectors, independence of the split, and uniformity with a stated false-alarm rate."""

import pytest
import torch

from hybridtensor.ops.references.philox import philox, uniform16

ONES = 0xFFFFFFFF
# Random123, kat_vectors: philox4x32-10
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(low, high):
    value = low | high << 32
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS, ids=["zeros", "ones", "pi"])
def test_published_vectors(counter, key, expected, device):
    words = philox(torch.tensor(signed(*key), device=device), tuple(torch.tensor([c], device=device) for c in counter))
    assert tuple(int(w) for w in words) == expected


def state(key=12345, step=7, device="cpu"):
    return torch.tensor([key, step], device=device)


@pytest.mark.parametrize(("rows", "columns"), [(12, 16), (9, 5), (1, 3), (7, 1)], ids=str)
def test_a_shard_draws_what_the_whole_would(rows, columns, device):
    whole = uniform16(rows, columns, rounding=state(device=device), stream=3, first_row=0)
    for first in range(rows):
        for last in range(first, rows + 1):
            part = uniform16(last - first, columns, rounding=state(device=device), stream=3, first_row=first)
            assert torch.equal(part, whole[first:last])


def test_devices_agree(device):
    there = uniform16(8, 24, rounding=state(device=device), stream=1, first_row=5)
    assert torch.equal(there.cpu(), uniform16(8, 24, rounding=state(), stream=1, first_row=5))


def test_key_step_and_stream_each_change_everything():
    draws = [
        uniform16(64, 64, rounding=state(key, step), stream=stream, first_row=0)
        for key, step, stream in [(1, 0, 0), (2, 0, 0), (1 + 2**40, 0, 0), (1, 1, 0), (1, 0, 1), (-1, 0, 0)]
    ]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            # 4096 draws of 2^16 values agree 1/16 times on average; 8 or more happen with probability below 1e-14
            assert (a == b).sum() < 8


def test_draws_are_uniform():
    """Mean and bin counts within six standard deviations: false alarms in fewer than one of 10^6 runs."""
    u = uniform16(512, 512, rounding=state(), stream=0, first_row=0)
    n = u.numel()
    assert 0 < u.min() <= u.max() < 1
    assert abs(u.double().mean() - 0.5) < 6 * (1 / 12 / n) ** 0.5
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - n / 64).abs() < 6 * (n / 64) ** 0.5).all()
    pairs = (u.flatten()[:-1] - 0.5) * (u.flatten()[1:] - 0.5)
    assert abs(pairs.double().mean()) < 6 / 12 / n**0.5


def test_large_indices_do_not_wrap():
    """Element indices beyond 2^32 still differ: the counter has 64 bits for them."""
    near = uniform16(1, 64, rounding=state(), stream=0, first_row=0)
    far = uniform16(1, 64, rounding=state(), stream=0, first_row=2**32 * 8 // 64)
    assert not torch.equal(near, far)
