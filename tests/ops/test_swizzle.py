"""The scale layout of Blackwell's matrix units against the formula of its documentation, and against torchao's."""

import pytest
import torch
from torchao.prototype.mx_formats.utils import to_blocked

from hybridtensor.ops.swizzle import swizzle_32_4_4


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (1, 1), (130, 5), (127, 8), (300, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn], ids=str)
def test_every_scale_is_where_the_formula_says(shape, dtype):
    rows, columns = shape
    scale = (torch.arange(rows * columns) % 251 + 1).to(torch.uint8).view(rows, columns)
    got = swizzle_32_4_4(scale.view(dtype))
    assert got.dtype == dtype
    tiles_down, tiles_across = -(-rows // 128), -(-columns // 4)
    assert got.numel() == tiles_down * 128 * tiles_across * 4
    expected = torch.zeros(got.numel(), dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * tiles_across + c // 4
            inner = (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            expected[tile * 512 + inner] = scale[r, c]
    assert torch.equal(got.view(torch.uint8), expected)
    assert torch.equal(got.view(torch.uint8), to_blocked(scale).flatten())
