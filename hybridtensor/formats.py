"""Number formats as data: one frozen record per format, everything else derived from it.

A face of a tensor is a matrix of elements, ``[other, contraction]`` with the contraction axis last, and a matrix of
scales, one per *block* of elements. ``Format.block`` gives the extent of a block along those two axes; ``None`` means
the whole axis. One scale per tensor is therefore ``(None, None)``, one per row ``(1, None)``, 1x128 ``(1, 128)``.

A new format is a new record here, a reference function and a kernel in ``ops`` and ``kernels``, and a quantizer.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """How the elements and scales of one face are stored.

    Attributes:
        name: Unique key in the registry, and what errors and tables print.
        element: Dtype of the stored elements; ``None`` for the identity format, which stores the tensor's own dtype.
        max: Largest finite magnitude of an element.
        block: Extent of a scale block along ``(other, contraction)``; ``None`` is the whole axis.
        scale_dtype: Dtype of the scales. ``value = element * scale`` (times the tensor scale, where there is one).
        elements_per_byte: 2 where two elements share a byte, else 1 (meaningless for the identity format).
        hadamard: Whether elements are stored after a Hadamard rotation of the contraction axis.
    """

    name: str
    element: torch.dtype | None
    max: float
    block: tuple[int | None, int | None] = (None, None)
    scale_dtype: torch.dtype | None = None
    elements_per_byte: int = 1
    hadamard: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether faces of this format hold the high-precision values themselves."""
        return self.element is None

    def scale_shape(self, other: int, contraction: int) -> tuple[int, int]:
        """Return the shape of the scale matrix of an ``[other, contraction]`` face."""
        across, along = self.block
        return _num_blocks(other, across), _num_blocks(contraction, along)

    def bytes_per_row(self, contraction: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the bytes that one row of ``contraction`` elements takes, block scales included.

        Args:
            contraction: Elements in the row.
            dtype: High-precision dtype, used by the identity format.
        """
        if self.element is None:
            return contraction * dtype.itemsize
        across, along = self.block
        scale_bytes = self.scale_dtype.itemsize if self.scale_dtype is not None else 0
        scales = 0.0 if across is None else _num_blocks(contraction, along) / across
        return contraction / self.elements_per_byte * self.element.itemsize + scales * scale_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return get_format, (self.name,)

    def __str__(self) -> str:
        return self.name


def _num_blocks(extent: int, block: int | None) -> int:
    return 1 if block is None else -(-extent // block)


_REGISTRY: dict[str, Format] = {}


def register_format(fmt: Format) -> Format:
    """Add ``fmt`` to the registry and return it.

    Raises:
        ValueError: If another record has that name.
    """
    known = _REGISTRY.setdefault(fmt.name, fmt)
    if known != fmt:
        raise ValueError(f"register_format: names are unique, got a second {fmt.name!r}; choose another name")
    return known


def get_format(name: str) -> Format:
    """Return the record called ``name``.

    Raises:
        ValueError: If there is none.
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        raise ValueError(f"get_format: unknown format {name!r}; {nearest(name, _REGISTRY)}") from None


def nearest(word: str, known: object) -> str:
    """Return advice for a misspelt word: the nearest of the ``known`` ones, and the whole list."""
    words = [str(k) for k in known]  # type: ignore[attr-defined]
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(words)}"


E4M3_MAX = 448.0
E5M2_MAX = 57344.0

IDENTITY = register_format(Format("identity", element=None, max=float("inf")))


def _float8(kind: str, granularity: str, block: tuple[int | None, int | None]) -> Format:
    element, largest = {
        "e4m3": (torch.float8_e4m3fn, E4M3_MAX),
        "e5m2": (torch.float8_e5m2, E5M2_MAX),
    }[kind]
    name = f"fp8_{kind}_{granularity}"
    return register_format(Format(name, element, largest, block=block, scale_dtype=torch.float32))


FP8_E4M3_TENSOR = _float8("e4m3", "tensor", (None, None))
FP8_E5M2_TENSOR = _float8("e5m2", "tensor", (None, None))
FP8_E4M3_ROW = _float8("e4m3", "row", (1, None))
FP8_E5M2_ROW = _float8("e5m2", "row", (1, None))

torch.serialization.add_safe_globals([get_format])
