"""The description of a cast, ``CastRequest``, and its tensors besides the matrix, ``CastInputs``."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format, format_of_face
from hybridtensor.ops.amaxes import RecordedAmax, ReturnedAmaxes
from hybridtensor.ops.prologue import Prologue


class Cast(NamedTuple):
    """How to quantize one face.

    Attributes:
        format: Format of the face.
        pow2_scale: Whether current scaling rounds encode scales down to powers of two, for formats that do not always.
        slot: Index of the delayed scale; -1 measures the tensor instead.
        stream: Stream of random numbers for stochastic rounding; -1 rounds to nearest, and is not allowed for formats
            with drawn signs.
        rule: Rule for block scales, for formats with several. NVFP4: ``"mae"`` or ``"mse"`` map the amax of a block
            to 6 or to 4, whichever has the smaller error. MXFP4: ``"even"`` or ``"floor"`` round the exponent.
            ``""`` is the format's default.
    """

    format: Format
    pow2_scale: bool = False
    slot: int = -1
    stream: int = -1
    rule: str = ""

    @property
    def amax_per(self) -> str | None:
        """What must have an amax before the cast: each ``"row"``, the ``"tensor"``, or None if nothing."""
        fmt = self.format.base
        block = fmt.block if fmt.tensor_block is None else fmt.tensor_block
        if fmt.tensor_block is None and (self.slot >= 0 or block[1] is not None):
            return None
        return "tensor" if block[0] is None else "row"

    def for_columnwise(self) -> Cast:
        """Return the cast of the columnwise face, with random numbers of its own."""
        return self if self.stream < 0 else self._replace(stream=self.stream + 1)

    def for_values(self) -> Cast:
        """Return the cast to the format's dequantized ``values``; unchanged if it has none."""
        return self if self.format.values is None else self._replace(format=self.format.values)

    def for_qdata(self) -> Cast:
        """Return the cast to quantized data and scales, in place of one to ``values``."""
        return self if self.format.values_of is None else self._replace(format=self.format.base)

    def __str__(self) -> str:
        return f"{self.format.name};{int(self.pow2_scale)};{self.slot};{self.stream};{self.rule}"


class CastRequest(NamedTuple):
    """The faces to make from a matrix.

    Attributes:
        row: Cast of the rowwise face, or None.
        column: Cast of the columnwise face, or None.
        source: Cast of a rowwise face that is dequantized to ``dtype``, and from which the columnwise face is
            quantized. None quantizes the columnwise face from the matrix itself.
        dtype: Dtype of the dequantized ``source``; None is that of the matrix.
    """

    row: Cast | None
    column: Cast | None = None
    source: Cast | None = None
    dtype: torch.dtype | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether kernels make these faces; see ``Format.has_kernels``. There are none for a source with drawn signs,
        nor for a face with drawn signs from a source whose blocks have more than 32 columns."""
        if self.source is not None and self.source.format.drawn_signs:
            return False
        # Both would need tiles of 128 x 128, for which kernels gave different bits in each launch (H100, Triton 3.6)
        if self.source is not None and self.draws_signs and (self.source.format.block[1] or 0) > 32:
            return False
        return all(cast is None or cast.format.has_kernels for cast in self[:3])

    @property
    def draws_signs(self) -> bool:
        """Whether signs are drawn for a face; see ``Format.drawn_signs``."""
        return any(cast is not None and cast.format.drawn_signs for cast in self[:2])

    @property
    def is_face_by_face(self) -> bool:
        """Whether the two faces need one launch each: if signs are drawn."""
        return self.draws_signs and self.source is None and None not in self[:2]

    @property
    def suits_lists(self) -> bool:
        """Whether one launch can cast a list of matrices: no ``source``, and no amax of rotated values."""
        return self.source is None and not any(
            cast.amax_per is not None and cast.format.hadamard
            for cast in (self.row, self.column)
            if cast is not None
        )

    @property
    def num_row_tensors(self) -> int:
        """Number of tensors of the rowwise face, which come first where both faces' are in one list."""
        return 0 if self.row is None else self.row.format.num_tensors

    def __str__(self) -> str:
        casts = (str(cast or "") for cast in self[:3])
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return "|".join([*casts, dtype])


# Operators get their request as text, in every call.
@functools.lru_cache(maxsize=1024)
def parse_request(text: str) -> CastRequest:
    """Return the request that ``str(request)`` wrote."""
    row, column, source, dtype = text.split("|")
    return CastRequest(
        _parse(row), _parse(column), _parse(source), getattr(torch, dtype) if dtype else None
    )


def _parse(text: str) -> Cast | None:
    if not text:
        return None
    name, pow2_scale, slot, stream, rule = text.split(";")
    return Cast(format_of_face(name), pow2_scale == "1", int(slot), int(stream), rule)


class Hint:
    """The amax of the last tensor of a kind, for power-of-two scales.

    A cast assumes that the scale is the same; if so, it reads its tensor once instead of twice. It never changes a
    result, and is not saved.

    Attributes:
        amax: fp32 ``[1]``, or None.
        stream: The CUDA stream that wrote it.
    """

    __slots__ = ("amax", "stream")

    def __init__(self) -> None:
        self.amax: Tensor | None = None
        self.stream = 0

    def last(self, device: torch.device, stream: int) -> Tensor | None:
        """Return the amax if it is valid on that device and stream, else None."""
        # What another stream measures may not be written yet. Then the cast reads its tensor twice,
        # as without a hint.
        amax = self.amax
        return (
            amax if amax is not None and amax.device == device and self.stream == stream else None
        )


class CastInputs(NamedTuple):
    """The tensors that a cast needs beside the matrix ``[M, K]``.

    Attributes:
        encode_scale: Delayed encode scales of a layer, fp32 ``[S]``, or None.
        amax_record: Record of amaxes, updated by a maximum at the slots of the casts: fp32 ``[S]``, in place; its
            address, int64 ``[1]``; in a graph ``ReturnedAmaxes``, which collect amaxes that the cast returns; or None.
            An Inf counts, NaN elements do not.
        rounding: Key and step of stochastic rounding, int64 ``[2]``, or None.
        first_row: Index of the matrix's first row in the whole tensor, for stochastic rounding.
        row_amax: Amaxes for the scales of the rowwise face (or ``source``) instead of measured ones, for a matrix that
            is a part of a tensor, or was measured before: fp32 ``[1]``, or ``[M]`` for a scale per row, which may be in
            the dtype of the matrix, too; or None. For a scale per tensor also those of the rows, ``[M]`` in the dtype
            of the matrix, of which the largest counts, without ``source`` and rotation.
        column_amax: The same for the columnwise face, ``[1]``, ``[K]`` for a scale per row of it, or ``[M]``.
        hint: Amax of the last matrix of this kind; see ``Hint``.
        after: Tensor that a graph must compute before this cast; its values are not read. See ``ops.order``.
        prologue: Computation of the matrix inside the cast kernel; None if the matrix is in memory.
    """

    encode_scale: Tensor | None = None
    amax_record: RecordedAmax = None
    rounding: Tensor | None = None
    first_row: int = 0
    row_amax: Tensor | None = None
    column_amax: Tensor | None = None
    hint: Hint | None = None
    after: Tensor | None = None
    prologue: Prologue | None = None

    @property
    def record(self) -> Tensor | None:
        """``amax_record`` as a kernel or the definition writes it."""
        return None if isinstance(self.amax_record, ReturnedAmaxes) else self.amax_record


NO_INPUTS = CastInputs()


def to_measure(request: CastRequest, given: CastInputs = NO_INPUTS) -> CastRequest | None:
    """Return the request for the faces of the matrix whose amaxes are not given, or None if none is missing.

    Faces whose signs each cast draws are left out: their amax is known once these are drawn, and a measurement draws
    nothing.
    """
    row, column = request.row or request.source, request.column if request.source is None else None
    row, column = (
        None
        if cast is None or cast.amax_per is None or cast.format.drawn_signs or amax is not None
        else cast
        for cast, amax in ((row, given.row_amax), (column, given.column_amax))
    )
    return None if row is column is None else CastRequest(row, column)


def check_inputs(x: Tensor, request: CastRequest, inputs: CastInputs) -> None:
    """Raise ValueError unless the inputs match the request."""
    row, column, source, _ = request
    if source is not None and row is not None and row.for_qdata() != source:
        raise ValueError(
            f"quantize: a columnwise face of the rowwise one is required, got source {source} of {row}"
        )
    if inputs.row_amax is not None:
        _check_amax(x, row or source, inputs.row_amax, x.shape[0], source is not None, "row_amax")
    if inputs.column_amax is not None:
        _check_amax(x, column, inputs.column_amax, x.shape[1], source is not None, "column_amax")
    if inputs.encode_scale is None:
        for cast in (row, column, source):
            if cast is not None and cast.slot >= 0:
                raise ValueError(
                    f"quantize: delayed scales are required for {cast}, got none; pass encode_scale"
                )


def check_draws(request: CastRequest, inputs: CastInputs) -> None:
    """Raise ValueError if a format draws signs and the cast has no random numbers."""
    for cast in request[:3]:
        if cast is None or not cast.format.drawn_signs:
            continue
        if cast.stream < 0 or inputs.rounding is None:
            raise ValueError(
                f"quantize: random numbers are required for {cast.format}, whose signs and scales are drawn, got a "
                "cast without a stream, or no key; use NVFP4Quantizer(rounding='eden')"
            )


def check_rules(request: CastRequest) -> None:
    """Raise ValueError unless the requested rules exist for the formats."""
    for cast in request[:3]:
        if cast is not None and cast.rule:
            _check_rule(cast)


def _check_rule(cast: Cast) -> None:
    fmt, known = cast.format.base, ""
    if fmt.tensor_block is not None and not fmt.drawn_signs:
        known = "mae, mse"
    elif fmt.elements_per_byte > 1 and fmt.tensor_block is None:
        known = "even, floor"
    if cast.rule not in known.split(", "):
        rules = f"no rule or one of {known}" if known else "no rule"
        raise ValueError(f"quantize: {rules} is required for {fmt}, got {cast.rule!r}")
    if cast.stream >= 0 and fmt.tensor_block is not None:
        raise ValueError(
            f"quantize: rounding to nearest is required for {fmt} with rule {cast.rule!r}, got stream {cast.stream}"
        )


def _check_amax(
    x: Tensor, cast: Cast | None, amax: Tensor, rows: int, has_source: bool, name: str
) -> None:
    """Raise ValueError unless a cast can be scaled by ``amax``."""
    per = None if cast is None else cast.amax_per
    shape = None if per is None else (rows if per == "row" else 1,)
    dtypes = (torch.float32, x.dtype) if per == "row" else (torch.float32,)
    if tuple(amax.shape) == shape and amax.dtype in dtypes:
        return
    of_rows = amax.shape == x.shape[:1] and amax.dtype == x.dtype
    if per != "tensor" or has_source or not of_rows or (cast and cast.format.hadamard):
        raise ValueError(
            f"quantize: {name} in float32 of shape {shape} is required for {cast}, got {amax.dtype} of "
            f"{tuple(amax.shape)}"
        )
