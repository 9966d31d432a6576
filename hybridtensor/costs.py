"""What a product costs by its formats: tables of times relative to the same product in BF16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from hybridtensor import ops
from hybridtensor.arguments import (
    nearest,
    place,
    require_choice,
    require_flag,
    require_int,
    require_items,
    require_kind,
    require_number,
    require_text,
    shown,
)
from hybridtensor.formats import Format
from hybridtensor.ops.native_mm import native_kind
from hybridtensor.ops.scaled_mm import check_multipliable
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS
from hybridtensor.state import Context

__all__ = ["TABLES", "CostTable", "Row", "cost", "measure", "table", "word_of"]

MIXED = "mixed"
"""The word for formats that no hardware multiplies with each other."""
KNOWN = ("bf16", "fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", MIXED)
"""All words of tables."""


@dataclass(frozen=True)
class Row:
    """Time of one kind of product, relative to BF16.

    ::

        e4m3 = ht.formats.FP8_E4M3_TENSOR
        row = ht.costs.table("h200").row((e4m3, e4m3))
        print(row.time, row.native, row.source)

    Args:
        word: ``bf16``, ``fp8``, ``fp8_rowwise``, ``fp8_block``, ``mxfp8`` or ``nvfp4``, as specs have it; or
            ``mixed``, of formats that no hardware multiplies with each other.
        time: Time of one product relative to the same product in BF16.
        native: Whether the device multiplies the formats itself; else values are multiplied in BF16 or FP32.
        source: Where the time comes from.

    Raises:
        TypeError: If one is of the wrong kind.
        ValueError: If the word is unknown, or the time negative.
    """

    word: str
    time: float
    native: bool
    source: str

    def __post_init__(self) -> None:
        require_choice("Row", "word", self.word, KNOWN)
        require_number("Row", time=self.time)
        require_flag("Row", native=self.native)
        require_text("Row", source=self.source)


@dataclass(frozen=True)
class CostTable:
    """Times of products on one device, relative to BF16.

    ::

        table = ht.costs.table("h200")
        print(table.cost((ht.formats.FP8_E4M3_TENSOR, ht.formats.FP8_E4M3_TENSOR)))

    Args:
        name: Key of ``table``, or the device's name.
        device: The device.
        how: ``measured`` or ``published``.
        counts_casts: Whether times include quantizing the operands.
        rows: One per word.
        least_features: Times are those of layers with as many features in and out, or more; of smaller ones nothing
            is known.

    Raises:
        TypeError: If one is of the wrong kind.
        ValueError: If ``how`` is another word, or features are negative.
    """

    name: str
    device: str
    how: str
    counts_casts: bool
    rows: tuple[Row, ...]
    least_features: int = 0

    def __post_init__(self) -> None:
        require_text("CostTable", name=self.name, device=self.device)
        require_choice("CostTable", "how", self.how, ("measured", "published"))
        require_flag("CostTable", counts_casts=self.counts_casts)
        for row in require_items("CostTable", "a list of rows", self.rows):
            require_kind("CostTable", "a Row", row, Row)
        require_int("CostTable", at_least=0, least_features=self.least_features)

    def row(self, formats: Iterable[Format]) -> Row:
        """Return the row of a product.

        Args:
            formats: Formats of the left and right operand, as ``HybridConfig.formats`` returns them.

        Raises:
            TypeError: If they are no two formats.
            ValueError: If their product is not defined, or the table has no row for it.
        """
        word = word_of(formats)
        for row in self.rows:
            if row.word == word:
                return row
        known = ", ".join(row.word for row in self.rows)
        raise ValueError(
            f"CostTable.row: a table with a row for {word} is required, got {self.name} with {known}"
        )

    def cost(self, formats: Iterable[Format]) -> float:
        """Return the time of a product over that of the same product in BF16; see ``row``."""
        return self.row(formats).time

    def __str__(self) -> str:
        note = "" if self.counts_casts else ", casts not counted"
        return f"{self.name} ({self.how}{note})"


def _measured(name: str, device: str, results: str, times: dict[str, float]) -> CostTable:
    """Return the table of a Hopper GPU, which has no products of MXFP8 and NVFP4."""
    source = (
        "geometric mean of five layers, forward and backward with casts, eager: "
        f"benchmarks/results/{results}"
    )
    native = ("bf16", "fp8", "fp8_rowwise", "fp8_block")
    rows = [Row(word, times[word], word in native, source) for word in times]
    mixed = Row(MIXED, times["mxfp8"], False, f"as mxfp8, which is emulated there, too: {source}")
    return CostTable(name, device, "measured", True, (*rows, mixed), _LEAST_FEATURES)


_B200 = "NVIDIA HGX B200 data sheet, dense peak of one GPU: BF16 2.25, FP8 4.5, FP4 9 PFLOPS"
_LEAST_FEATURES = 4096
"""Of the layers that were measured; that large ones come near peak rates is known of no smaller ones, either."""
_EMULATED = "values are multiplied in BF16: its rate at best; " + _B200

TABLES = MappingProxyType(
    {
        "h200": _measured(
            "h200",
            "NVIDIA H200",
            "linear_nvidia_h200.json",
            {
                "bf16": 1.0,
                "fp8": 0.623,
                "fp8_rowwise": 0.638,
                "fp8_block": 0.712,
                "mxfp8": 1.063,
                "nvfp4": 1.259,
            },
        ),
        "h100": _measured(
            "h100",
            "NVIDIA H100 80GB HBM3",
            "linear_nvidia_h100_80gb_hbm3.json",
            {
                "bf16": 1.0,
                "fp8": 0.652,
                "fp8_rowwise": 0.684,
                "fp8_block": 0.741,
                "mxfp8": 1.088,
                "nvfp4": 1.302,
            },
        ),
        "b200": CostTable(
            "b200",
            "NVIDIA B200",
            "published",
            False,
            (
                Row("bf16", 1.0, True, _B200),
                Row("fp8", 0.5, True, _B200),
                Row("fp8_rowwise", 0.5, True, _B200),
                # torch multiplies by scales of 1x128 and 128x128 on Hopper only
                Row("fp8_block", 1.0, False, _EMULATED),
                Row("mxfp8", 0.5, True, _B200),
                Row("nvfp4", 0.25, True, _B200),
                Row(MIXED, 1.0, False, _EMULATED),
            ),
            _LEAST_FEATURES,
        ),
    }
)
"""The named tables."""


def word_of(formats: Iterable[Format]) -> str:
    """Return the word by which tables know a product; see ``Row``.

    ::

        ht.costs.word_of((ht.formats.NVFP4, ht.formats.NVFP4))  # "nvfp4"

    Args:
        formats: Formats of the left and right operand.

    Raises:
        TypeError: If they are no two formats.
        ValueError: If their product is not defined.
    """
    pair = require_items("costs", "the formats of both operands", formats)
    if len(pair) != 2 or not all(isinstance(fmt, Format) for fmt in pair):
        raise TypeError(
            f"costs: the formats of both operands are required, got {len(pair)} items; give what "
            "HybridConfig.formats returns"
        )
    left, right = pair
    check_multipliable(left, right)
    if left.is_identity and right.is_identity:
        return "bf16"
    kind = native_kind(left, right)
    return MIXED if kind is None else kind.word


def table(device: str) -> CostTable:
    """Return the table called ``device``: ``"h200"`` and ``"h100"`` (measured), ``"b200"`` (published peak rates).

    ::

        for row in ht.costs.table("b200").rows:
            print(row.word, row.time)

    Raises:
        ValueError: If there is none, with the nearest, and how to measure one.
    """
    if not isinstance(device, str) or device not in TABLES:
        raise ValueError(
            f"costs.table: unknown table of costs {shown(device)}; {nearest(str(device), TABLES)}; on a machine "
            "with that device costs.measure() makes its table, which is taken wherever a name is"
        )
    return TABLES[device]


def cost(formats: Iterable[Format], device: str | CostTable = "h200") -> float:
    """Return the time of a product over that of the same product in BF16.

    ::

        ht.costs.cost((ht.formats.MXFP8_E4M3, ht.formats.MXFP8_E4M3), "b200")

    Args:
        formats: Formats of the left and right operand, as ``HybridConfig.formats`` returns them.
        device: The name of a table, or a table such as ``measure`` returns.

    Raises:
        TypeError: If they are no two formats.
        ValueError: If there is no such table, or the formats' product is not defined.
    """
    return (device if isinstance(device, CostTable) else table(device)).cost(formats)


def measure(
    device: str | torch.device = "cuda",
    *,
    tokens: int = 8192,
    out_features: int = 8192,
    in_features: int = 8192,
    repeats: int = 10,
) -> CostTable:
    """Return the table of a device of this machine, measured now.

    ::

        advice = ht.advise(model, batches, hardware=ht.costs.measure("cuda"))

    A time is that of the casts and the three products of a linear layer in bfloat16 (whose weight is quantized each
    time), the median over repetitions. Sizes are multiples of 128, and best large: small products cost what launching
    them costs. Torch's generators are restored.

    Args:
        device: Where.
        tokens: Rows of the input.
        out_features: Of the layer.
        in_features: Of the layer.
        repeats: Measurements of each.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a size is no multiple of 128, there are no repeats, there is no such device, or it
            computes nothing (meta).
    """
    where = place("costs.measure", device)
    sizes = {"tokens": tokens, "out_features": out_features, "in_features": in_features}
    require_int("costs.measure", at_least=1, repeats=repeats, **sizes)
    for what, size in sizes.items():
        if size % 128:
            raise ValueError(
                f"costs.measure: a multiple of 128 is required as {what}, got {size}; round it up"
            )
    name = _name_of(where)
    shapes = {"input": (tokens, in_features), "grad_output": (tokens, out_features)}
    shapes["weight"] = (out_features, in_features)
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        operands = {
            role: torch.randn(shape, device=where).bfloat16() for role, shape in shapes.items()
        }
        times = _times({word: _layer(word, operands) for word in KNOWN[:-1]}, where, repeats)
    source = f"casts and products of {tokens} x {out_features} x {in_features}, torch {torch.__version__}"
    rows = [
        Row(word, times[word] / times["bf16"], _is_native(word, where), source)
        for word in KNOWN[:-1]
    ]
    emulated = max([1.0, *(row.time for row in rows if row.word == "mxfp8" and not row.native)])
    rows.append(
        Row(MIXED, emulated, False, f"that of mxfp8 where it is emulated, else BF16's; {source}")
    )
    least = min(out_features, in_features)
    return CostTable(name, name, "measured", True, tuple(rows), least)


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "costs.measure: torch finds no CUDA device; name another device, such as 'cpu'"
            )
        return torch.cuda.get_device_name(device)
    if device.type == "meta":
        raise ValueError(
            "costs.measure: a device that computes is required, got meta; name another, such as 'cpu'"
        )
    return device.type


def _layer(word: str, operands: dict[str, Tensor]) -> Callable[[], None]:
    """Return a function that casts the operands of a layer with recipe ``word`` and multiplies them."""
    config = HybridConfig.parse(word)

    def run() -> None:
        faces: dict[tuple[str, str], ops.Face] = {}
        for role, x in operands.items():
            quantizer, context = getattr(config, role), Context(role)
            made = quantizer.faces(x, rowwise=True, columnwise=True, dtype=x.dtype, context=context)
            faces |= zip(((role, "rowwise"), (role, "columnwise")), made, strict=True)
        for gemm in GEMMS:
            ops.product(faces[gemm.left], faces[gemm.right], out_dtype=torch.bfloat16)

    return run


def _is_native(word: str, device: torch.device) -> bool:
    """Return whether the device multiplies the formats of all three products natively."""
    config = HybridConfig.parse(word)
    backends = (ops.select_backend(*config.formats(gemm), torch.bfloat16, device) for gemm in GEMMS)
    return all(backend.name != "emulated" for backend in backends)


def _times(
    calls: dict[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Return the median milliseconds of calls timed in turns, so that clock drift affects all equally."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            milliseconds = _time(call, device)
            if repeat:  # the first one compiles kernels
                taken[name].append(milliseconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)  # not that of the current device
    torch.cuda.synchronize(device)
    start.record(stream)
    call()
    stop.record(stream)
    stop.synchronize()
    return float(start.elapsed_time(stop))
