"""What ``check`` found, as records, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridtensor.explanation.folding import fold
from hybridtensor.printed import Printed, add_row, as_text, named_table
from hybridtensor.selection import Coverage

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

_SHOWN = 10  # sentences about what is not quantized


@dataclass(frozen=True)
class ProductRow:
    """A product of a layer as it ran.

    Attributes:
        layer: Fully qualified name; tied layers have all their names, one after the other.
        gemm: ``output``, ``grad_input`` or ``grad_weight``.
        left: Format of the left operand's face.
        right: Format of the right operand's face.
        backend: ``native``, ``emulated`` or ``high precision``.
        times: Number of calls.
        expected: Whether it ran as the recipe says.
    """

    layer: str
    gemm: str
    left: str
    right: str
    backend: str
    times: int
    expected: bool


@dataclass(frozen=True)
class ReadRow:
    """Values of a weight that were read in high precision.

    Attributes:
        layer: Fully qualified name.
        reader: Operator that read them.
        inside: Module in whose forward it ran, or "".
        times: Number of calls.
    """

    layer: str
    reader: str
    inside: str
    times: int


@dataclass(frozen=True, repr=False)
class Check(Printed):
    """The result of ``check``.

    Attributes:
        products: Products that ran.
        reads: Operators that read weights in high precision.
        unused: Converted layers of which no product ran.
        coverage: Quantized share of the model, and the large matrices that are plain.
        flops: Share of the floating-point operations of all products that ran quantized.
        uncounted: Operators that are not in ``flops``, as torch's formula for them raised.
        untouched: Layers that are neither converted nor left alone on purpose: ``quantize_`` never saw them.
    """

    products: tuple[ProductRow, ...]
    reads: tuple[ReadRow, ...]
    unused: tuple[str, ...]
    coverage: Coverage
    flops: float
    uncounted: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """A sentence for each thing that is unexpectedly not quantized."""
        found = [
            f"{row.layer}: {row.gemm} ran as {row.left} by {row.right} ({row.backend}), not by the recipe"
            for row in self.products
            if not row.expected
        ]
        for read in self.reads:
            if not read.reader.startswith(("embedding", "aten.embedding")):
                inside = f" in {read.inside}" if read.inside else ""
                found.append(
                    f"{read.layer}: its weight was read as values by {read.reader}{inside}"
                )
        found += [f"{layer}: none of its products ran" for layer in self.unused]
        found += [
            f"{layer}: not quantized, and quantize_ never saw it; quantize the whole model, or name the layer in "
            "keep_bf16"
            for layer in self.untouched
        ]
        return found + [
            f"{matrix.name} {list(matrix.shape)}: {matrix.why}"
            for matrix in self.coverage.plain
            if not matrix.deliberate
        ]

    def __rich__(self) -> Group:
        from rich.console import Group

        headers = ("layer", "products", "operands", "backend", "times")
        ran = named_table(*headers, title="Products that ran")
        by_layer: dict[str, dict[tuple[str, str, str], list[str]]] = {}
        for row in self.products:
            what = (f"{row.left} x {row.right}", row.backend, str(row.times))
            by_layer.setdefault(row.layer, {}).setdefault(what, []).append(row.gemm)
        said = [
            (layer, tuple((", ".join(gemms), *what) for what, gemms in rows.items()))
            for layer, rows in by_layer.items()
        ]
        for alike in fold(said, by_layer):
            for i, cells in enumerate(alike.said):
                add_row(ran, "" if i else alike.called, *cells)
        parts: list[RenderableType] = [ran]
        if problems := self.problems:
            rest = (
                [f"and {len(problems) - _SHOWN} more: .problems"] if len(problems) > _SHOWN else []
            )
            parts.append(as_text("\n".join(["Not quantized:", *problems[:_SHOWN], *rest])))
        without = f" without {', '.join(self.uncounted)}" if self.uncounted else ""
        share = f"{self.coverage}; {self.flops:.1%} of the operations of this run".capitalize()
        parts.append(as_text(share + without))
        return Group(*parts)
