"""Transposing a face that came in parts.

Oracle: ``.t().contiguous()`` for bytes; for half bytes numpy, one element per byte. The kernel runs on a GPU, and
without one in Triton's interpreter.
"""

import importlib

import numpy as np
import pytest
import torch
from kernels import require_kernels

from hybridtensor.ops import transpose
from hybridtensor.ops.transpose import transpose_cuda

MODULE = importlib.import_module("hybridtensor.ops.transpose")
SHAPES = [
    (1, 128, 128), (2, 256, 128), (1, 256, 384),  # whole tiles
    (1, 1, 16), (1, 1, 300), (3, 2, 16), (4, 16, 16), (2, 300, 20), (4, 130, 140), (1, 50, 1000), (2, 8, 264),
    (1, 7, 32), (3, 5, 64), (5, 133, 48), (2, 131, 36), (1, 257, 132),  # odd rows: several parts share bytes
    (1, 1, 1), (2, 3, 5), (1, 64, 127), (7, 10, 2),  # rows that are not whole words
    (0, 4, 8), (2, 0, 8), (2, 4, 0),
]  # fmt: skip


@pytest.fixture(params=["operator", "kernel"])
def run(request, device):
    """What transposes: the operator, or on a CPU the kernel in Triton's interpreter."""
    if request.param == "operator":
        return transpose
    if device != "cpu":
        pytest.skip("the operator runs the kernel here")
    require_kernels("cpu")
    return lambda parts, *, column, row=None, bits=8: transpose_cuda(parts, bits, column, row)


def in_a_frame(shape, device, before=16):
    """Return a contiguous tensor of ones in the middle of a larger one, and the larger one."""
    frame = torch.ones(before + int(np.prod(shape)) + 64, dtype=torch.uint8, device=device)
    return frame[before : before + int(np.prod(shape))].view(shape), frame


def transposed(whole, bits):
    """Return the transpose of a matrix of bytes or half bytes."""
    if bits == 8:
        return whole.t().contiguous()
    codes = whole.cpu().numpy()
    codes = np.stack([codes % 16, codes // 16], -1).reshape(codes.shape[0], 2 * codes.shape[1]).T
    return torch.from_numpy(codes[:, 0::2] + 16 * codes[:, 1::2]).to(whole.device)


def check(run, parts, bits, *, copied=True, offsets=(16, 16)):
    """Transpose parts; everything must be right inside the results and untouched around them."""
    num_parts, rows, width = parts.shape
    whole, per = parts.reshape(num_parts * rows, width), 8 // bits
    column, column_frame = in_a_frame((width * per, num_parts * rows // per), parts.device, offsets[0])
    row, row_frame = in_a_frame(whole.shape, parts.device, offsets[1])
    expected, before = transposed(whole, bits), parts.clone()
    for _ in range(2):  # the second time by the plan of the first
        column.fill_(1), row.fill_(1)
        run(parts, column=column, row=row if copied else None, bits=bits)
        assert torch.equal(column, expected)
        assert torch.equal(row, whole if copied else torch.ones_like(row))
    assert torch.equal(parts, before)
    for frame, inside, start in ((column_frame, column, offsets[0]), (row_frame, row, offsets[1])):
        assert frame[:start].eq(1).all()
        assert frame[start + inside.numel() :].eq(1).all()


def random_bytes(*shape, device):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_transpose_of_the_parts_below_each_other(shape, bits, run, device):
    if bits == 4 and shape[0] * shape[1] % 2:
        shape = (shape[0], shape[1] + 1, shape[2])
    check(run, random_bytes(*shape, device=device), bits)
    check(run, random_bytes(*shape, device=device), bits, copied=False)


@pytest.mark.parametrize("bits", [8, 4])
def test_every_byte_comes_through_in_every_place(bits, run, device):
    places = torch.arange(256, device=device)
    check(run, (places[:, None] + places).to(torch.uint8)[None], bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_sources_may_have_any_strides(bits, run, device):
    received = random_bytes(3, 4096, device=device)
    check(run, received[:, 32 : 32 + 40 * 48].unflatten(1, (40, 48)), bits)  # as ranks send it
    check(run, random_bytes(2, 40, 96, device=device)[:, :, 16:64], bits)
    check(run, random_bytes(2, 80, 48, device=device)[:, ::2], bits)
    check(run, random_bytes(2, 40, 96, device=device)[:, :, ::2], bits)
    check(run, random_bytes(48, 40, 2, device=device).permute(2, 1, 0), bits)
    check(run, random_bytes(1, 1, 48, device=device).expand(4, 6, 48), bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_addresses_need_no_alignment(bits, run, device):
    """Also not where the same shapes came aligned before."""
    flat = random_bytes(2 * 40 * 48 + 16, device=device)
    for source, column, row in [
        (0, 16, 16),
        (8, 24, 24),
        (4, 16, 20),
        (1, 17, 17),
        (0, 18, 16),
        (0, 16, 17),
        (0, 8, 4),
    ]:
        parts = flat[source : source + 2 * 40 * 48].view(2, 40, 48)
        check(run, parts, bits, offsets=(column, row))
        check(run, parts, bits, offsets=(column, row), copied=False)


@pytest.mark.parametrize("copied", [True, False])
def test_prepared_tensors_may_get_other_memory(copied, device, monkeypatch):
    """FSDP2 frees and allocates it between gathers, here with another alignment each time.

    A GPU refuses vectors at other addresses; the interpreter reads them.
    """
    parts, column, row = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(3))

    def replace(offset):
        flat = random_bytes(2 * 40 * 48 + 16, device=device)
        parts.set_(flat.untyped_storage(), offset, (2, 40, 48), (40 * 48, 48, 1))
        for target, shape in ((column, (48, 80)), (row, (80, 48))):
            memory = torch.zeros(80 * 48 + 16, dtype=torch.uint8, device=device).untyped_storage()
            target.set_(memory, offset, shape, (shape[1], 1))

    if device == "cpu":  # by the kernel, in the interpreter
        require_kernels("cpu")
        monkeypatch.setattr(MODULE, "_is_direct", lambda parts: True)
    replace(0)
    prepared = MODULE.prepare_transpose(parts, column=column, row=row if copied else None)
    for offset in (0, 4, 0, 1, 8, 4):
        replace(offset)
        prepared()
        whole = parts.reshape(80, 48)
        assert torch.equal(column, whole.t())
        assert torch.equal(row, whole if copied else torch.zeros_like(whole))


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_may_be_far_apart(bits, run, device):
    """Offsets beyond 32 bits; what lies between the rows is never touched."""
    far = 2**24 + 16
    parts = torch.empty(130 * far, dtype=torch.uint8, device=device).view(1, 130, far)[:, :, :32]
    parts.copy_(random_bytes(1, 130, 32, device=device))
    check(run, parts, bits)


def test_the_kernel_runs_wherever_rows_are_whole_words(monkeypatch, run, device):
    def refuse(*_):
        raise AssertionError("the definition ran")

    if run is transpose and device == "cpu":
        pytest.skip("the definition is what runs here")
    monkeypatch.setattr(MODULE, "transpose_reference", refuse)
    for bits, shape in ((8, (2, 5, 16)), (8, (1, 3, 4)), (4, (2, 6, 8)), (4, (2, 5, 16))):
        check(run, random_bytes(*shape, device=device), bits)
    with pytest.raises(AssertionError, match="the definition ran"):
        check(run, random_bytes(2, 5, 6, device=device), 8)


@pytest.mark.parametrize("shape", [(2, 8, 16), (2, 3, 5)], ids=str)
def test_results_have_a_new_version(shape, run, device):
    """Autograd notices that a tensor that it saved was written."""
    parts = random_bytes(*shape, device=device)
    row, column = torch.empty_like(parts).flatten(0, 1), torch.empty_like(parts).flatten(0, 1).t().contiguous()
    versions = row._version, column._version
    run(parts, column=column, row=row)
    assert row._version > versions[0]
    assert column._version > versions[1]


GOOD = torch.zeros(2, 4, 8, dtype=torch.uint8)
COLUMN, ROW = torch.zeros(8, 8, dtype=torch.uint8), torch.zeros(8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "message", "arguments"),
    [
        (ValueError, r"elements of 8 or 4 bits are required, got 6", {"bits": 6}),
        (TypeError, r"parts in uint8 is required, got torch\.int8; view", {"parts": GOOD.view(torch.int8)}),
        (TypeError, r"column in uint8 is required, got torch\.float32", {"column": COLUMN.float()}),
        (TypeError, r"a tensor is required as row, got list; pass", {"row": [1]}),
        (ValueError, r"parts of 3 dimensions are required, got \(8, 8\); unsqueeze", {"parts": ROW}),
        (ValueError, r"even number of rows .* is required, got 3; pad", {"parts": GOOD[:1, :3], "bits": 4}),
        (ValueError, r"column contiguous of shape \(16, 4\) is required, got \(8, 8\)", {"bits": 4}),
        (ValueError, r"row contiguous of shape \(8, 8\) is required, got \(4, 8\)", {"row": ROW[:4]}),
        (ValueError, r"is required, got \(8, 8\) with strides \(1, 8\); allocate", {"column": COLUMN.t()}),
        (ValueError, r"column on cpu is required, as the tensor, got meta", {"column": COLUMN.to("meta")}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(kind, message, arguments):
    with pytest.raises(kind, match=f"^transpose: .*{message}"):
        transpose(**{"parts": GOOD, "column": COLUMN, "row": ROW, **arguments})
