"""What a format is, and the registry of formats; those that come with the package are in ``formats``, by which
everything here is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hybridtensor.arguments import (
    nearest,
    require_dtype,
    require_flag,
    require_int,
    require_kind,
    require_number,
    require_text,
    wrong,
)

ROTATED_WITH_SIGNS = 128
"""How many values are rotated together where signs are drawn."""


class _OnePerValue(type):
    """Gives one record per value, so that comparing records by identity compares them by value."""

    def __call__(cls, *args: Any, **kwargs: object) -> Format:
        # Dynamo builds a record that it passes on from its fields, numbers that differed from call to call as
        # proxies; it has guarded the name, which finds the record.
        if any(isinstance(value, torch.fx.Proxy) for value in tree_leaves(args)):
            return format_of_face(args[0])
        made = super().__call__(*args, **kwargs)
        fields = tuple(getattr(made, field.name) for field in dataclasses.fields(made))
        return _RECORDS.setdefault(fields, made)


_RECORDS: dict[tuple[object, ...], Format] = {}
_SEPARATORS = ";|"  # of casts as text


@dataclass(frozen=True, eq=False)
class Format(metaclass=_OnePerValue):
    """How the elements and scales of one face are stored. Records with equal fields are one object.

    ::

        fmt = ht.MXFP8Quantizer().rowwise_format
        print(fmt.name, fmt.element, fmt.block, fmt.scale_shape(64, 128))

    Attributes:
        name: Unique key in the registry, and what errors and tables print.
        element: Dtype of the elements; ``None`` for the identity format, which stores the tensor's own dtype.
        max: Largest finite magnitude of an element.
        block: Extent of a scale block along ``(other, contraction)``; ``None`` is the whole axis.
        scale_dtype: Dtype of the scales. ``value = element * scale`` in one-level formats.
        pow2_scale: Whether every scale is a power of two, so that ``element * scale`` is exact in bfloat16.
        ragged: Whether the last block of an axis may be partial; otherwise axes are multiples of
            the block, or what is stored is: see ``stored``.
        elements_per_byte: 2 where two elements share a byte, else 1 (meaningless for the identity format).
        hadamard: Whether elements are stored after a Hadamard rotation of the contraction axis.
        drawn_signs: Whether that rotation is of 128 values instead of 16, under signs that are drawn for each cast
            and stored behind the tensor scale.
        tensor_block: Extent of what shares a tensor scale, as ``block``; ``None`` for one-level formats.
        tensor_scale_max: In two-level formats the value that the tensor scale, an amax, maps to:
            ``value = element * scale * tensor_scale / tensor_scale_max``.
        values_of: Name of the format whose elements, times their block scales, this one's elements are; see ``values``.
    """

    name: str
    element: torch.dtype | None
    max: float
    block: tuple[int | None, int | None] = (None, None)
    scale_dtype: torch.dtype | None = None
    pow2_scale: bool = False
    ragged: bool = True
    elements_per_byte: int = 1
    hadamard: bool = False
    tensor_block: tuple[int | None, int | None] | None = None
    tensor_scale_max: float = 1.0
    values_of: str | None = None
    drawn_signs: bool = False

    def __post_init__(self) -> None:
        who = "Format"
        require_text(who, name=self.name)
        if self.values_of is not None:
            require_text(who, values_of=self.values_of)
        require_number(who, max=self.max, tensor_scale_max=self.tensor_scale_max)
        for dtype in (self.element, self.scale_dtype):
            require_kind(who, "a dtype or None", dtype, (torch.dtype, type(None)))
        _check_block(who, self.block)
        if self.tensor_block is not None:
            _check_block(who, self.tensor_block)
        require_flag(who, pow2_scale=self.pow2_scale, ragged=self.ragged, hadamard=self.hadamard)
        require_flag(who, drawn_signs=self.drawn_signs)
        if self.drawn_signs and not (self.hadamard and self.tensor_block == (None, None)):
            raise ValueError(
                f"{who}: a rotation and one tensor scale, behind which its signs lie, are required with drawn_signs, "
                f"got hadamard={self.hadamard}, tensor_block={self.tensor_block}"
            )
        require_int(who, at_least=1, elements_per_byte=self.elements_per_byte)
        if self.elements_per_byte > 2:
            raise ValueError(
                f"{who}: 1 or 2 elements per byte are required, got {self.elements_per_byte}"
            )
        self._check_max()

    def _check_max(self) -> None:
        """Raise ValueError unless there is an element of the largest value."""
        largest = float("inf")
        if self.element == torch.float4_e2m1fn_x2:
            largest = 6.0  # which ``torch.finfo`` does not know
        elif self.element is not None and self.element.is_floating_point:
            largest = torch.finfo(self.element).max
        if not 0 < self.max <= largest:
            raise ValueError(
                f"Format: a max above 0 and at most {largest}, the largest element of {self.element}, is required for "
                f"{self.name}, got {self.max}"
            )

    @functools.cached_property
    def is_identity(self) -> bool:
        """Whether faces of this format hold the high-precision values themselves."""
        return self.element is None

    @functools.cached_property
    def storage(self) -> torch.dtype | None:
        """Dtype of ``qdata``: bytes where elements are packed, else that of the elements."""
        return torch.uint8 if self.elements_per_byte > 1 else self.element

    @functools.cached_property
    def is_square(self) -> bool:
        """Whether blocks are square: one face is then the transpose of the other."""
        across, along = self.block
        return across == along and (
            self.tensor_block is None or self.tensor_block[0] == self.tensor_block[1]
        )

    @functools.cached_property
    def scale_fits(self) -> bool:
        """Whether element times block scale is exact in bfloat16: a power of two, or E4M3 times E2M1."""
        return self.block[1] is not None and (
            self.pow2_scale or self.scale_dtype == torch.float8_e4m3fn
        )

    @functools.cached_property
    def rotated(self) -> int:
        """How many values along the contraction are rotated together; 0 without a rotation."""
        if not self.hadamard:
            return 0
        return ROTATED_WITH_SIGNS if self.drawn_signs else 16

    @functools.cached_property
    def values(self) -> Format | None:
        """Format of what a product computes with where the device multiplies no such elements: elements times
        block scales, in bfloat16, and one factor of the whole sum in place of tensor scales. None where block
        scales do not go into the elements, or the hardware multiplies by them (FP8 in blocks).
        """
        if not self.scale_fits or self.scale_dtype == torch.float32 or self.drawn_signs:
            return None  # values would not tell their signs
        return Format(
            f"{self.name}_values",
            torch.bfloat16,
            torch.finfo(torch.bfloat16).max,
            self.tensor_block or (None, None),
            None if self.tensor_block is None else torch.float32,
            hadamard=self.hadamard,
            values_of=self.name,
        )

    @functools.cached_property
    def base(self) -> Format:
        """Format that these are the values of, or this one."""
        return self if self.values_of is None else get_format(self.values_of)

    @functools.cached_property
    def has_kernels(self) -> bool:
        """Whether there are kernels for it: all of it but the name is as in a record that comes with the package.
        Anything else is cast, read and multiplied by its definition, on GPUs, too.
        """
        return _without_name(self.base) in _WITH_KERNELS

    @functools.cached_property
    def num_tensors(self) -> int:
        """How many tensors a face consists of: elements, scales, tensor scales."""
        return 1 + (self.scale_dtype is not None) + (self.tensor_block is not None)

    @functools.cached_property
    def scales_partial_sums(self) -> bool:
        """Whether scales vary along the contraction and do not fit into elements: products apply them in between."""
        return self.element is not None and self.block[1] is not None and not self.scale_fits

    @property
    def mantissa_bits(self) -> int:
        """Explicit mantissa bits of an element; 1 for E2M1, which ``torch.finfo`` does not know."""
        if self.element is None or self.elements_per_byte > 1:
            return 52 if self.element is None else 1
        return 1 - math.frexp(torch.finfo(self.element).eps)[1]

    @functools.cached_property
    def step(self) -> int:
        """What a face stores along the contraction is a multiple of this: of the block where that
        may not be partial, else of 1. Values are as many as the elements: a rotation spreads each over a block.
        """
        if self.values_of is not None:
            return self.base.step
        if self.drawn_signs:
            return ROTATED_WITH_SIGNS
        along = self.block[1]
        return 1 if self.ragged or along is None else along

    def stored(self, contraction: int) -> int:
        """Return the number of stored entries along the contraction: whole steps, zero-padded."""
        step = self.step
        return contraction if step == 1 else (contraction + step - 1) // step * step

    def check_shape(self, other: int, contraction: int) -> None:
        """Raise ValueError unless an ``[other, contraction]`` face can be cut into blocks."""
        blocks = (self.block[0], self.step if self.drawn_signs else self.block[1])
        for name, extent, block in zip(
            ("other", "contraction"), (other, contraction), blocks, strict=True
        ):
            if block is not None and not self.ragged and extent % block:
                raise ValueError(
                    f"{self.name} needs a multiple of {block} along the {name} axis, got {extent} "
                    f"of [{other}, {contraction}]; pad the tensor, or use another format for this product"
                )

    def scale_shape(self, other: int, contraction: int) -> tuple[int, int]:
        """Return the shape of the scale matrix of an ``[other, contraction]`` face."""
        across, along = self.block
        return _num_blocks(other, across), _num_blocks(contraction, along)

    def tensor_scale_shape(self, other: int, contraction: int) -> tuple[int, int] | None:
        """Return the shape of the tensor scale of an ``[other, contraction]`` face, or None.

        Behind it lie the signs of a rotation whose signs are drawn, 16 bits in each number.
        """
        if self.tensor_block is None:
            return None
        if self.drawn_signs:
            return 1 + ROTATED_WITH_SIGNS // 16, 1
        across, along = self.tensor_block
        return _num_blocks(other, across), _num_blocks(contraction, along)

    def bytes_per_row(self, contraction: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the bytes that one row of ``contraction`` elements takes, block scales included.

        Args:
            contraction: Elements in the row.
            dtype: High-precision dtype, used by the identity format.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If there are fewer than no elements.
        """
        require_int("Format.bytes_per_row", at_least=0, contraction=contraction)
        require_dtype("Format.bytes_per_row", dtype)
        if self.element is None:
            return contraction * dtype.itemsize
        across, along = self.block
        scale_bytes = self.scale_dtype.itemsize if self.scale_dtype is not None else 0
        scales = 0.0 if across is None else _num_blocks(contraction, along) / across
        tensor_scale = 4 if self.tensor_block is not None and self.tensor_block[0] == 1 else 0
        return contraction / self.elements_per_byte + scales * scale_bytes + tensor_scale

    def __copy__(self) -> Format:
        return self

    def __deepcopy__(self, memo: object) -> Format:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a registered record by its name; raise ValueError for one that is not registered."""
        if _find(self.name) is not self:
            raise ValueError(
                f"pickle: format {self.name!r} is not registered; call register_format first"
            )
        return format_of_face, (self.name,)

    def __str__(self) -> str:
        return self.name


def _check_block(who: str, block: object) -> None:
    """Raise unless ``block`` is an extent or None along two axes."""
    if not isinstance(block, tuple) or len(block) != 2:
        raise wrong(who, "a block of two extents", block)
    require_int(who, at_least=1, **{f"extent_{i}": n for i, n in enumerate(block) if n is not None})


def _num_blocks(extent: int, block: int | None) -> int:
    return 1 if block is None else -(-extent // block)


def _without_name(fmt: Format) -> tuple[object, ...]:
    """Return the fields that define elements and scales, without the names."""
    names = ("name", "values_of")
    return tuple(
        getattr(fmt, field.name) for field in dataclasses.fields(fmt) if field.name not in names
    )


REGISTRY: dict[str, Format] = {}
_WITH_KERNELS: set[tuple[object, ...]] = set()  # what ``kernels`` are written for


def register_format(fmt: Format) -> Format:
    """Add ``fmt`` to the registry and return it.

    ::

        mine = dataclasses.replace(ht.formats.MXFP8_E4M3, name="mxfp8_blocks_of_64", block=(1, 64))
        ht.formats.register_format(mine)

    Args:
        fmt: The record; one that is registered already is returned as it is.

    Raises:
        TypeError: If it is no ``Format``.
        ValueError: If its name is empty, has a separator of casts as text, or is another format's.
    """
    require_kind("register_format", "a Format", fmt, Format)
    if not fmt.name or set(fmt.name) & set(_SEPARATORS):
        raise ValueError(
            f"register_format: a name without {' and '.join(_SEPARATORS)} is required, got {fmt.name!r}; choose "
            "another name"
        )
    records = [fmt] if fmt.values is None else [fmt, fmt.values]
    for record in records:
        if _find(record.name) not in (None, record):
            raise ValueError(
                f"register_format: names are unique, got a second {record.name!r}; choose another name"
            )
    REGISTRY[fmt.name] = fmt
    for record in records:
        work_out(record)
    return fmt


def work_out(record: object) -> None:
    """Compute all cached properties of a record now: Dynamo cannot enter their lock on Python 3.11."""
    kind: Any = type(record)
    for name in _cached_properties(kind):
        getattr(record, name)


@functools.cache
def _cached_properties(kind: type) -> list[str]:
    names = [name for one in kind.__mro__ for name in vars(one)]
    return [name for name in names if isinstance(getattr(kind, name), functools.cached_property)]


def _find(name: str) -> Format | None:
    if name in REGISTRY:
        return REGISTRY[name]
    base = REGISTRY.get(name.removesuffix("_values"))
    return None if base is None or base.name == name else base.values


def format_of_face(name: str) -> Format:
    """Return the record called ``name``, dequantized ones (``values``) included; raise ValueError if there is none."""
    return _find(name) or get_format(name)


def get_format(name: str) -> Format:
    """Return the record called ``name``.

    ::

        fmt = ht.formats.get_format("mxfp8_e4m3")

    Raises:
        TypeError: If the name is no string.
        ValueError: If there is none.
    """
    known = REGISTRY.get(name) if isinstance(name, str) else None
    if known is None:
        require_text("get_format", name=name)
        raise ValueError(f"get_format: unknown format {name!r}; {nearest(name, REGISTRY)}")
    return known


def with_kernels(fmt: Format) -> Format:
    """Register a format that kernels cast."""
    _WITH_KERNELS.add(_without_name(fmt))
    return register_format(fmt)


# by which pickles name them, and lists of what ``torch.load`` may call
for _public in (Format, format_of_face, get_format):
    _public.__module__ = "hybridtensor.formats"
