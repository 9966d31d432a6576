"""Every operator of the namespace is well registered: schema, fake and autograd, for fixed and for any shapes."""

import functools

import pytest
import tiers
import torch

import hybridtensor  # noqa: F401
from hybridtensor.formats import (
    FP8_E4M3_1X128,
    FP8_E4M3_ROW,
    FP8_E4M3_TENSOR,
    FP8_E5M2_TENSOR,
    IDENTITY,
    MXFP8_E4M3,
    NVFP4,
    NVFP4_16X16,
    NVFP4_HADAMARD,
    NVFP4_ROW_SCALED,
)
from hybridtensor.ops import NO_INPUTS, Cast, CastRequest
from hybridtensor.ops.amaxes import AmaxRecord, nowhere
from hybridtensor.ops.cast import list_operator
from hybridtensor.ops.cast.definition import reference_cast
from hybridtensor.ops.dequantize import dequantize_reference
from hybridtensor.testing import random_tensor

OPS = torch.ops.hybridtensor
FORMATS = [
    FP8_E4M3_TENSOR, FP8_E5M2_TENSOR, FP8_E4M3_ROW, FP8_E4M3_1X128, MXFP8_E4M3, NVFP4, NVFP4_16X16, NVFP4_ROW_SCALED,
    NVFP4_HADAMARD,
]  # fmt: skip
DELAYED, RANDOM = Cast(FP8_E4M3_TENSOR, slot=1), Cast(NVFP4, stream=2)
CASTS = [*(Cast(fmt) for fmt in FORMATS), DELAYED, RANDOM]


def matrix(device, seed=0, rows=32):
    return random_tensor(rows, 64, device=device, seed=seed)


def two(device):
    """Return matrices of two shapes."""
    return [matrix(device), matrix(device, 1, rows=64)]


def quantize(device, row, column=None, source=None, rows=32):
    """Return arguments of ``quantize``."""
    request = str(CastRequest(row, column, source, None if source is None else torch.bfloat16))
    state = torch.ones(3, device=device), torch.zeros(3, device=device), torch.tensor([5, 7], device=device), 0
    return matrix(device, rows=rows), request, *state


def quantize_into(device, row, column=None, source=None, rows=32):
    """Return arguments of ``quantize_into``."""
    x, *arguments = quantize(device, row, column, source, rows)
    return x, OPS.quantize(x, *arguments), *arguments


def all_into(device, written, *casts, **options):
    """Return the first arguments of an operator of lists: matrices, what it writes, the request."""
    xs, request = two(device), CastRequest(*casts)
    buffers = [
        buffer.zero_() for buffer in written(list_operator.shapes_of(xs), request, **options).empty(xs[0].device)
    ]
    return xs, buffers[0] if written is list_operator.amaxes_written else buffers, str(request)


def face(fmt, device, seed=0):
    """Return what an operand is to the operators: its tensors and its format."""
    if fmt.is_identity:
        return [matrix(device, seed)], fmt.name
    return OPS.quantize(matrix(device, seed), str(CastRequest(Cast(fmt))), None, None, None, 0), fmt.name


def dequantized(fmt, device):
    """Return arguments of ``dequantize``."""
    tensors, name = face(fmt, device)
    return *tensors, *[None] * (3 - len(tensors)), name, torch.bfloat16


def of_rows(device, rows):
    """Return arguments of ``scaled_mm`` of two formats, of which one stores more zeros."""
    columns = (None, None, None, 0)
    operands = []
    for seed, fmt in enumerate((NVFP4, MXFP8_E4M3)):
        x = matrix(device, seed, rows)
        operands += [OPS.quantize(x, str(CastRequest(None, Cast(fmt))), *columns), fmt.name]
    return *operands, None, torch.bfloat16, False


def scaled_mm(device, left, right, columns=32, bias=False, out_dtype=torch.bfloat16):
    """Return arguments of ``scaled_mm``."""
    added = random_tensor(columns, device=device, dtype=out_dtype) if bias else None
    (elements, *scales), name = face(right, device, 1)
    return *face(left, device), [elements[:columns], *scales], name, added, out_dtype, False


def transpose(device, bits, copied=True):
    """Return arguments of ``transpose``."""
    parts = torch.arange(2 * 6 * 20, device=device).to(torch.uint8).view(2, 6, 20)
    column = torch.zeros(20 * 8 // bits, 12 * bits // 8, dtype=torch.uint8, device=device)
    return parts, bits, column, torch.zeros_like(parts).flatten(0, 1) if copied else None


ENDS = (5, 5, 37)


def ends(device):
    return torch.tensor(ENDS, dtype=torch.int32, device=device)


def quantize_groups(device, row, column, source=None, stack=False, step=128):
    """Return arguments of ``quantize_groups``."""
    delayed = torch.full((6,), 2.0, device=device), torch.zeros(6, device=device)
    rounding = torch.tensor([7, 1], device=device)
    x = torch.stack([matrix(device, seed) for seed in range(3)]) if stack else matrix(device, rows=40)
    groups = (None if stack else ends(device), 3, step)
    return x, *groups, str(CastRequest(row, column, source)), *delayed, rounding, 0


def grouped_mm(device, fmt, of_tokens):
    """Return arguments of ``grouped_mm`` of tokens and a stack, or of two columnwise faces of tokens."""
    if fmt is IDENTITY:
        left = right = [matrix(device, rows=40)]
        right = right if of_tokens else [torch.stack([matrix(device)] * 3)]
        text = f"{fmt}|bfloat16" if of_tokens else f"{fmt}|"
        return left, text, right, text, ends(device), 3, 128, torch.bfloat16, False
    cast = Cast(fmt)
    if of_tokens:
        left = right = OPS.quantize_groups(*quantize_groups(device, None, cast))
    else:
        left = OPS.quantize_groups(*quantize_groups(device, cast, None))
        right = OPS.quantize_groups(*quantize_groups(device, cast, None, stack=True))
    return left, f"{fmt}|", right, f"{fmt}|", ends(device), 3, 128, torch.bfloat16, False


@functools.cache
def record(device):
    """Return a record of amaxes."""
    return AmaxRecord(3, torch.device(device))


SAMPLES = {
    "quantize_groups": {
        **{f"{cast}": lambda device, cast=cast: quantize_groups(device, cast, cast.for_columnwise()) for cast in CASTS},
        **{
            f"stack, {cast}": lambda device, cast=cast: quantize_groups(device, cast, cast.for_columnwise(), stack=True)
            for cast in CASTS
        },
        "columnwise of rowwise": lambda device: quantize_groups(device, Cast(NVFP4), Cast(MXFP8_E4M3), Cast(NVFP4)),
    },
    "grouped_mm": {
        f"{fmt}, {of_tokens}": lambda device, fmt=fmt, of_tokens=of_tokens: grouped_mm(device, fmt, of_tokens)
        for fmt in (IDENTITY, FP8_E4M3_ROW, FP8_E4M3_TENSOR, MXFP8_E4M3, NVFP4)
        for of_tokens in (False, True)
    },
    "quantize": {
        **{f"{cast}": lambda device, cast=cast: quantize(device, cast, cast.for_columnwise()) for cast in CASTS},
        "transposed": lambda device: (matrix(device).t(), *quantize(device, Cast(FP8_E4M3_ROW))[1:]),
        "rowwise only": lambda device: quantize(device, Cast(MXFP8_E4M3)),
        "columnwise only": lambda device: quantize(device, None, Cast(NVFP4_HADAMARD)),
        "columnwise of rowwise": lambda device: quantize(device, Cast(NVFP4), Cast(MXFP8_E4M3), Cast(NVFP4)),
        "rows that fill no block": lambda device: quantize(device, Cast(NVFP4), Cast(MXFP8_E4M3), rows=39),
    },
    "quantize_into": {
        **{f"{cast}": lambda device, cast=cast: quantize_into(device, cast, cast.for_columnwise()) for cast in CASTS},
        "columnwise of rowwise": lambda device: quantize_into(device, Cast(NVFP4), Cast(MXFP8_E4M3), Cast(NVFP4)),
        "rows that fill no block": lambda device: quantize_into(device, Cast(NVFP4), Cast(MXFP8_E4M3), rows=39),
    },
    "dequantize": {f"{fmt}": lambda device, fmt=fmt: dequantized(fmt, device) for fmt in FORMATS},
    "scaled_mm": {
        **{f"{fmt}": lambda device, fmt=fmt: scaled_mm(device, fmt, fmt) for fmt in FORMATS},
        "a width to pad": lambda device: scaled_mm(device, FP8_E4M3_TENSOR, FP8_E4M3_TENSOR, columns=24),
        "two formats": lambda device: scaled_mm(device, NVFP4, MXFP8_E4M3),
        "two lengths": lambda device: of_rows(device, 39),
        "high precision": lambda device: scaled_mm(device, IDENTITY, FP8_E4M3_ROW),
        "bias": lambda device: scaled_mm(device, FP8_E4M3_TENSOR, FP8_E5M2_TENSOR, bias=True, out_dtype=torch.float32),
    },
    "transpose": {
        "bytes": lambda device: transpose(device, 8),
        "half bytes": lambda device: transpose(device, 4),
        "the transpose only": lambda device: transpose(device, 8, copied=False),
    },
    "measure": {
        "one amax": lambda device: (matrix(device), str(CastRequest(Cast(FP8_E4M3_TENSOR), Cast(FP8_E4M3_TENSOR)))),
        "rows and columns": lambda device: (matrix(device), str(CastRequest(Cast(FP8_E4M3_ROW), Cast(FP8_E4M3_ROW)))),
    },
    "measure_stack": {
        f"{fmt}": lambda device, fmt=fmt: (
            torch.stack([matrix(device, seed) for seed in range(3)]),
            str(CastRequest(Cast(fmt), Cast(fmt))),
        )
        for fmt in (FP8_E4M3_TENSOR, FP8_E4M3_ROW)
    },
    "measure_all_into": {
        f"{fmt}": lambda device, fmt=fmt: all_into(device, list_operator.amaxes_written, Cast(fmt), Cast(fmt))
        for fmt in (FP8_E4M3_TENSOR, FP8_E4M3_ROW)
    },
    "quantize_all_into": {
        "given amaxes": lambda device: (
            *all_into(device, list_operator.faces_written, Cast(FP8_E4M3_TENSOR)),
            [],
            [],
            [torch.ones(1, device=device)] * 2,
            [],
        ),
        "measured": lambda device: (*all_into(device, list_operator.faces_written, Cast(FP8_E4M3_ROW)), [], [], [], []),
        "delayed": lambda device: (
            *all_into(device, list_operator.faces_written, DELAYED, num_amaxes=3),
            [torch.ones(3, device=device)] * 2,
            [],
            [],
            [],
            None,
            3,
        ),
        "blocks": lambda device: (
            *all_into(device, list_operator.faces_written, None, Cast(MXFP8_E4M3)),
            [],
            [],
            [],
            [],
        ),
    },
    "swiglu": {
        "rows": lambda device: (matrix(device), matrix(device), False),
        "strided": lambda device: (*matrix(device).chunk(2, dim=1), False),
        "measured": lambda device: (matrix(device), matrix(device), True),
    },
    "rms_norm": {
        "measured": lambda device: (matrix(device), matrix(device)[0], 1e-5, True),
        "rows": lambda device: (matrix(device), matrix(device)[0], 1e-5, False),
    },
    "rms_norm_factors": {"rows": lambda device: (matrix(device), 1e-5)},
    "rms_norm_backward": {
        "rows": lambda device: (matrix(device), matrix(device), matrix(device)[0], torch.ones(32, device=device)),
    },
    "swiglu_backward": {
        "two": lambda device: (matrix(device), matrix(device), matrix(device), False, False),
        "two, measured": lambda device: (matrix(device), matrix(device), matrix(device), False, True),
        "packed": lambda device: (matrix(device), *matrix(device).repeat(1, 2).chunk(2, dim=1), True, False),
        "packed, measured": lambda device: (matrix(device), matrix(device), matrix(device), True, True),
    },
    "commit": {
        "a record": lambda device: (record(device).address, [torch.ones(3, device=device)] * 2, matrix(device), 3),
        "no amaxes": lambda device: (record(device).address, [], matrix(device), 3),
        "nowhere": lambda device: (nowhere(torch.device(device)), [torch.ones(3, device=device)], matrix(device), 3),
    },
    "without_gradient": {"of two": lambda device: (matrix(device), [matrix(device), matrix(device)])},
    "after": {"bytes": lambda device: (torch.ones(4, 8, dtype=torch.uint8, device=device), matrix(device))},
}


def test_every_operator_has_samples():
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("hybridtensor::"))
    assert {name.partition("::")[2] for name in names} - {"no_gradient"} == set(SAMPLES)  # which only raises


@pytest.mark.parametrize(
    ("name", "sample"),
    [pytest.param(name, sample, id=f"{name}-{sample}") for name in SAMPLES for sample in SAMPLES[name]],
)
def test_operator_is_well_registered(name, sample, device):
    arguments = SAMPLES[name][sample](device)
    # torch's check of the schema multiplies the inputs, which FP8 tensors cannot do on the CPU; and it would find the
    # note of an amax, about which the schema is silent on purpose
    tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
    fp8 = any(t.is_floating_point() and t.dtype.itemsize == 1 for t in tensors)
    skip = fp8 or any(str(DELAYED) in a for a in arguments if isinstance(a, str))
    checks = ["test_autograd_registration", "test_faketensor", *([] if skip else ["test_schema"])]
    if tiers.LONG or sample == next(iter(SAMPLES[name])):  # test_compile has graphs of all formats
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=checks)


def by_name(name, arguments):
    """Return an operator, what it takes by position, and by its name what may be left out."""
    operator = getattr(OPS, name).default
    optional = [one for one in operator._schema.arguments if one.has_default_value()]
    count = len(operator._schema.arguments) - len(optional)
    given = dict(zip((one.name for one in optional), arguments[count:], strict=False))
    return operator, arguments[:count], {one.name: one.default_value for one in optional} | given


@pytest.mark.filterwarnings("default")  # compiling for a GPU, torch warns of its own settings
def test_inductor_calls_every_operator_as_the_dispatcher_does(device):
    """With arguments by name, too, which the dispatcher passes by position."""
    names = [name for name in SAMPLES if not getattr(OPS, name).default._schema.is_mutable]
    calls = [by_name(name, next(iter(SAMPLES[name].values()))(device)) for name in names]

    def call_all():
        return [operator(*arguments, **options) for operator, arguments, options in calls]

    torch._dynamo.reset()
    for name, got, want in zip(names, torch.compile(call_all, fullgraph=True)(), call_all(), strict=True):
        for one, other in zip(*map(torch.utils._pytree.tree_leaves, (got, want)), strict=True):
            assert torch.equal(one.float(), other.float()), name


@pytest.mark.parametrize("plain", [0, 1])
def test_a_face_beside_a_rotated_one_has_an_amax_of_its_own(plain, device):
    x, casts = matrix(device), [Cast(NVFP4_HADAMARD), Cast(NVFP4_HADAMARD)]
    casts[plain] = Cast(NVFP4)
    made = OPS.measure(x, str(CastRequest(*casts)))
    assert len(made) == 2
    assert torch.equal(made[plain], x.abs().amax().float().view(1))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_default_device_does_not_matter(fmt):
    """A constant that it put on a GPU would be read back, which waits for the device and breaks a CUDA graph."""
    x, request = matrix("cpu"), CastRequest(Cast(fmt))
    made = reference_cast(request).run(x, NO_INPUTS)[0].tensors()
    arguments = (*made, *[None] * (3 - len(made)), fmt.name, torch.float32)
    expected = dequantize_reference(*arguments)
    with torch.device("meta"):  # as the definitions are called on a GPU, not through the dispatcher
        again = reference_cast(request).run(x, NO_INPUTS)[0].tensors()
        assert all(torch.equal(got.float(), t.float()) for got, t in zip(again, made, strict=True))
        assert torch.equal(dequantize_reference(*arguments), expected)
