"""Casting a matrix into both faces: useful bytes per second (input once, every output once) over a device copy's.

Beside TransformerEngine's casts, where it is installed.

A second table is of the transposition of gathered faces, whose parts came from 8 ranks, beside torch's own operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import te_peer
import torch
from common import arguments, report, time_alternating
from torch import Tensor

from hybridtensor.formats import get_format
from hybridtensor.ops import Cast, CastInputs, CastRequest, Faces, Hint, quantize, quantize_into, transpose
from hybridtensor.ops.references.nvfp4 import pack, unpack

SHAPES = {"cuda": [(16384, 8192), (16384, 4096), (8192, 28672)], "cpu": [(512, 1024)]}
RANKS = 8  # that sent a gathered face
FACES = {
    "per tensor, scale given": (
        Cast(get_format("fp8_e4m3_tensor"), slot=0),
        Cast(get_format("fp8_e4m3_tensor"), slot=0),
    ),
    "per tensor, current": (Cast(get_format("fp8_e4m3_tensor")), Cast(get_format("fp8_e4m3_tensor"))),
    "1x128": (Cast(get_format("fp8_e4m3_1x128")), Cast(get_format("fp8_e4m3_1x128"))),
    "128x128": (Cast(get_format("fp8_e4m3_128x128")), Cast(get_format("fp8_e4m3_128x128"))),
    "per row and per column": (Cast(get_format("fp8_e4m3_row")), Cast(get_format("fp8_e4m3_row"))),
    "MXFP8": (Cast(get_format("mxfp8_e4m3")), Cast(get_format("mxfp8_e4m3"))),
    "NVFP4 row, MXFP8 column": (Cast(get_format("nvfp4")), Cast(get_format("mxfp8_e4m3"))),
    "NVFP4, Hadamard on the column": (Cast(get_format("nvfp4")), Cast(get_format("nvfp4_hadamard"))),
    "NVFP4, Hadamard, rounded at random": (
        Cast(get_format("nvfp4_hadamard"), stream=0),
        Cast(get_format("nvfp4_hadamard"), stream=1),
    ),
    "NVFP4, MS-EDEN": (Cast(get_format("nvfp4_eden"), stream=0), Cast(get_format("nvfp4_eden"), stream=1)),
    "NVFP4": (Cast(get_format("nvfp4")), Cast(get_format("nvfp4"))),
    "NVFP4, four over six": (
        Cast(get_format("nvfp4_max256"), rule="mae"),
        Cast(get_format("nvfp4_max256"), rule="mae"),
    ),
    "MXFP4": (Cast(get_format("mxfp4")), Cast(get_format("mxfp4"))),
    # What emulated products read: bf16 values in place of elements and scales
    "MXFP8, as values": (Cast(get_format("mxfp8_e4m3")).for_values(), Cast(get_format("mxfp8_e4m3")).for_values()),
    "MXFP4, as values": (Cast(get_format("mxfp4")).for_values(), Cast(get_format("mxfp4")).for_values()),
    "MXFP8, as values, row only": (Cast(get_format("mxfp8_e4m3")).for_values(), None),
    "MXFP4, as values, row only": (Cast(get_format("mxfp4")).for_values(), None),
    "1x128, row only": (Cast(get_format("fp8_e4m3_1x128")), None),
    "1x128, column only": (None, Cast(get_format("fp8_e4m3_1x128"))),
}
OF_ROWWISE = {
    "128x128, 1x128 of it": (Cast(get_format("fp8_e4m3_128x128")), Cast(get_format("fp8_e4m3_1x128"))),
    "per tensor, per tensor of it": (Cast(get_format("fp8_e4m3_tensor")), Cast(get_format("fp8_e4m3_tensor"))),
    "NVFP4, MXFP8 of it": (Cast(get_format("nvfp4")), Cast(get_format("mxfp8_e4m3"))),
    "MXFP8, per column of it": (Cast(get_format("mxfp8_e4m3")), Cast(get_format("fp8_e4m3_row"))),
}
INTO = ("1x128", "128x128", "MXFP8")
BY_HINT = {"per tensor, power of two, as the last time": True, "per tensor, power of two, another one": False}


def cast(x: Tensor, row: Cast | None, column: Cast | None, scales: Tensor) -> Callable[[], Faces]:
    """Return what casts ``x``."""
    rounding = torch.zeros(2, dtype=torch.int64, device=x.device)
    request, inputs = CastRequest(row, column), CastInputs(encode_scale=scales, rounding=rounding)
    return lambda: quantize(x, request, inputs)


def tensors_of(faces: Faces) -> list[Tensor]:
    """Return the tensors of both faces."""
    return [tensor for face in faces if face is not None for tensor in face.tensors()]


def cast_into(x: Tensor, row: Cast | None, column: Cast | None) -> Callable[[], Faces]:
    """Return what casts ``x`` into faces that are there."""
    request = CastRequest(row, column)
    faces = quantize(x, request)
    out = tensors_of(faces)

    def run() -> Faces:
        quantize_into(x, out, request)
        return faces

    return run


def cast_by_hint(x: Tensor, holds: bool) -> Callable[[], Faces]:
    """Return what casts ``x`` as a layer does in every step, with the scale of the step before or with another one."""
    face, other = Cast(get_format("fp8_e4m3_tensor"), pow2_scale=True), torch.full((1,), 1e3, device=x.device)
    hint, request = Hint(), CastRequest(face, face)
    inputs = CastInputs(hint=hint)
    quantize(x, request, inputs)

    def run() -> Faces:
        if not holds:
            hint.amax = other
        return quantize(x, request, inputs)

    return run


def cast_of_rowwise(x: Tensor, row: Cast, column: Cast) -> Callable[[], Faces]:
    """Return what casts ``x``, the columnwise face from what the rowwise one holds."""
    request = CastRequest(row, column, row)
    return lambda: quantize(x, request)


def measure(shape: tuple[int, int], device: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per pair of faces for one shape."""
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    scales, copied = torch.ones(1, device=device), torch.empty_like(x)
    variants = {name: cast(x, *faces, scales) for name, faces in FACES.items()}
    variants |= {name: cast_by_hint(x, holds) for name, holds in BY_HINT.items()}
    variants |= {name: cast_of_rowwise(x, *faces) for name, faces in OF_ROWWISE.items()}
    variants |= {f"{name}, into existing faces": cast_into(x, *FACES[name]) for name in INTO}
    theirs = {name: functools.partial(quantizer, x) for name, quantizer in te_peer.casts().items()}
    others = {f"{name}, {te_peer.NAME}": run for name, run in theirs.items()}
    times = time_alternating({"copy": lambda: copied.copy_(x), **variants, **others}, device, repeats)
    copy_speed = 2 * x.nbytes / times["copy"]
    rows = [{"shape": "x".join(map(str, shape)), "faces": "copy", "ms": times["copy"], "of copy": 1.0}]
    for name in [*variants, *others]:
        useful = x.nbytes + sum(t.nbytes for t in tensors_of(variants[name.removesuffix(f", {te_peer.NAME}")]()))
        rows.append({**rows[0], "faces": name, "ms": times[name], "of copy": useful / times[name] / copy_speed})
    return rows


def transpositions(shape: tuple[int, int], bits: int, device: str) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return what transposes a face of ``shape`` elements, and its useful bytes."""
    (rows, columns), per = shape, 8 // bits
    sent = torch.randint(0, 256, (RANKS, rows * columns // per // RANKS + 16), dtype=torch.uint8, device=device)
    parts = sent[:, :-16].unflatten(1, (rows // RANKS, columns // per))  # 16 bytes of scales follow each
    row = parts.flatten(0, 1).clone()
    column = row.new_empty(columns, rows // per)
    return {
        "both faces": (3 * row.nbytes, lambda: transpose(parts, column=column, row=row, bits=bits)),
        "columnwise face": (2 * row.nbytes, lambda: transpose(parts, column=column, bits=bits)),
        "columnwise face by torch": (
            2 * row.nbytes, (lambda: row.t().contiguous()) if bits == 8 else lambda: pack(unpack(row).t()),
        ),
    }  # fmt: skip


def measure_transpositions(shape: tuple[int, int], device: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per width of elements and way to transpose them for one shape."""
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    copied = torch.empty_like(x)
    variants = {
        f"{bits} bits, {name}": variant
        for bits in (8, 4)
        for name, variant in transpositions(shape, bits, device).items()
    }
    runs = {name: run for name, (_, run) in variants.items()}
    times = time_alternating({"copy": lambda: copied.copy_(x), **runs}, device, repeats)
    copy_speed = 2 * x.nbytes / times["copy"]
    rows = [{"shape": "x".join(map(str, shape)), "gathered": "copy", "ms": times["copy"], "of copy": 1.0}]
    for name, (useful, _) in variants.items():
        rows.append({**rows[0], "gathered": name, "ms": times[name], "of copy": useful / times[name] / copy_speed})
    return rows


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    shapes = SHAPES[torch.device(options.device).type]
    for name, measured in (("cast", measure), ("transpose", measure_transpositions)):
        report(name, [row for s in shapes for row in measured(s, options.device, options.repeats)], options)
