"""What ``watch`` has to find out, in float64 from elements, scales and values that a test keeps itself."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import hybridtensor as ht
from hybridtensor.ops.references.hadamard import rotate
from hybridtensor.quantizers import tokens

FACES = [
    f"{role}.{direction}" for role in ("input", "weight", "grad_output") for direction in ("rowwise", "columnwise")
]
PRODUCTS = {"output": (0, 2), "grad_input": (4, 3), "grad_weight": (5, 1)}


def train_watched(data, model, steps, watched=None, forward=None, optimizer=None, first=0):
    """Train with what ``data(seed, device)`` returns, and note the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    for seed in range(first, first + steps):
        x = data(seed, next(model.parameters()).device)
        loss = (model if forward is None else forward)(x).square().mean()
        if watched is not None:
            watched.note(loss)
        loss.backward()
        optimizer.step()
        ht.step_(model)
        optimizer.zero_grad()


class KeptFaces:
    """Observer that keeps copies of the faces of one layer."""

    def __init__(self, state):
        self.state, self.faces = state, {}

    def observe_operand(self, *_):
        pass

    def observe_product(self, layer, gemm, left, right, dtype):
        if layer is self.state:
            for name, face in zip(PRODUCTS[gemm], (left, right), strict=True):
                copied = [tensor.to("cpu", copy=True) for tensor in face.tensors()]
                self.faces[FACES[name]] = face._replace(
                    **dict(zip(("qdata", "scale", "tensor_scale"), copied, strict=False))
                )

    def observe_read(self, *_):
        pass


def expected(face, values, columnwise, amax=None):
    """Of a face, in float64 from its elements and scales; and the values that it gives back.

    Args:
        face: Kept.
        values: What it was made from.
        columnwise: Whether it is the columnwise one.
        amax: Of all values, if there are more.
    """
    amax = float(values.abs().max()) if amax is None else amax
    fmt = face.format
    x = values.t() if columnwise and face.dequantized_rowwise is None else values
    if fmt.hadamard:
        x = rotated(x)
    x = x.double()
    elements = face.qdata.double() if fmt.elements_per_byte == 1 else e2m1(face.qdata)
    scales = face.scale.double()
    if face.tensor_scale is not None:
        scales = scales * face.tensor_scale.double() / (1536 if "max256" in fmt.name else 2688)
    rows, columns = ((b or extent) for b, extent in zip(fmt.block, elements.shape, strict=True))
    unit = scales.repeat_interleave(rows, 0)[: elements.shape[0]].repeat_interleave(columns, 1)[:, : elements.shape[1]]
    got, unit = (elements * unit)[:, : x.shape[1]], unit[:, : x.shape[1]]
    largest = {"e4m3": (448, 464), "e5m2": (57344, 61440), "e2m1": (6, 7)}[
        "e5m2" if "e5m2" in fmt.name else "e2m1" if fmt.elements_per_byte == 2 else "e4m3"
    ]
    wasted, blocks = 0, 0
    for i, j in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], columns)):
        cut = slice(i, i + rows), slice(j, j + columns)
        blocks += 1
        of_block = x[cut].abs().max()
        wasted += bool(0 < of_block <= largest[0] / 2 * unit[cut].max() * (1 - 1e-7))
    return {
        "sqnr": 10 * math.log10(x.square().sum() / (x - got).square().sum()),
        "underflows%": 100 * float(((got == 0).sum() - (x == 0).sum()) / x.numel()),
        "overflows%": 100 * float((x.abs() > unit * largest[1] * (1 + 1e-6)).double().mean()),
        "mse": float((x - got).square().mean()),
        "cur_amax": amax,
        "dynamic_range": math.log2(amax / float(x[x != 0].abs().min())),
        "scale_inv_min": float(scales.min()),
        "scale_inv_max": float(scales.max()),
        "wasted_blocks%": 100 * wasted / blocks,
        "nonfinite": 0.0,
    }, (got.t() if columnwise and face.dequantized_rowwise is not None else got)


def rotated(x):
    """The last axis is filled up with zeros to whole groups."""
    return rotate(F.pad(x, (0, -x.shape[1] % 16)).to(torch.bfloat16))


def e2m1(qdata):
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    codes = torch.stack([qdata & 15, qdata >> 4], -1).flatten(1)
    return values[codes.long()]


def assert_numbers(kept, values, faces, products, amaxes=None):
    """The numbers of a layer are those of float64.

    Args:
        kept: Faces, by name.
        values: Of the operands, by role.
        faces: Rows of its faces that ``watch`` gave, by operand.
        products: Numbers of its products.
        amaxes: Of all values, by role, if there are more.
    """
    exact, held = {}, {}
    for name, face in kept.items():
        role, direction = name.split(".")
        columnwise, known = direction == "columnwise", tokens(values[role])
        exact[name] = known.double().t() if columnwise else known.double()
        if face.scale is None:
            assert name not in faces
            held[name] = exact[name]
            continue
        wanted, held[name] = expected(face, known, columnwise, None if amaxes is None else amaxes[role])
        if face.format.hadamard:
            exact[name] = rotated(exact[name]).double()
        assert faces[name].format in (str(face.format), f"{face.format}, dequantized")
        for statistic, value in wanted.items():
            # sums in float64 of values that fp32 holds exactly, or with one rounding of a scale
            assert faces[name].statistics[statistic] == pytest.approx(value, rel=2e-5, abs=1e-9), (name, statistic)
    for gemm, (left, right) in PRODUCTS.items():
        a, b = FACES[left], FACES[right]
        wanted, got = exact[a] @ exact[b].t(), held[a] @ held[b].t()
        cosine = float((wanted * got).sum() / wanted.norm() / got.norm())
        assert products[gemm]["cosine"] == pytest.approx(cosine, rel=1e-7)
        noise = float((wanted - got).norm())
        if noise:
            assert products[gemm]["sqnr"] == pytest.approx(20 * math.log10(float(wanted.norm()) / noise), rel=1e-4)
