"""Print ``explain``: equal layers are one line."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from hybridtensor.costs import TABLES, CostTable
from hybridtensor.explanation.folding import fold, in_short
from hybridtensor.explanation.rows import GemmRow, LayerRow, Rows
from hybridtensor.explanation.totals import (
    predicted,
    saved_by,
    saved_bytes,
    shares,
)
from hybridtensor.printed import add_row, as_text, named_table

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

_WIDEST = 80  # columns of a screen


def tables(found: Rows) -> Group:
    """Return the renderables of an explanation, for ``rich`` to print."""
    from rich.console import Group

    names = [row.layer for row in found.layers] + [name for name, _ in found.skipped]
    parts: list[RenderableType] = [*_quantized(found, names)]
    parts += _rows(
        "Gathered by FSDP2",
        ("layer", "before forward", "before backward", "why"),
        found.gathers,
        names,
    )
    modules = [row.module for row in found.sequence]
    headers = ("module", "tensor", "before forward", "in backward", "why")
    parts += _rows("Gathered by sequence parallelism", headers, found.sequence, modules)
    if found.shared:
        folded = in_short(found.shared, names)
        parts.append(
            f"Quantized anew at each use, as someone else holds memory of the weight: {folded}"
        )
    parts += _left_alone(found, names)
    parts += _totals(found) if found.layers else []
    parts.append(str(found.coverage).capitalize())
    return Group(
        *(as_text(part) if isinstance(part, str) else part for part in parts[not parts[0] :])
    )


def _title(words: str) -> Iterable[RenderableType]:
    yield from ("", as_text(words, style="bold"))


def _quantized(found: Rows, names: list[str]) -> Iterable[RenderableType]:
    """Yield the layers grouped by equal products, and these products."""
    products: dict[str, list[GemmRow]] = {}
    for row in found.rows:
        products.setdefault(row.layer, []).append(row)
    groups: dict[Hashable, list[LayerRow]] = {}
    for layer in found.layers:
        said = tuple(
            (row.gemm, row.left, row.right, row.backend, row.reason)
            for row in products[layer.layer]
        )
        groups.setdefault((said, str(layer.config)), []).append(layer)
    for layers in groups.values():
        yield from _title(f"Quantized layers: {layers[0].config}")
        made = named_table("layer", "weight", "saved B/token", right=1, edge=False)
        alike = ((layer.layer, (layer.shape, saved_by(layer))) for layer in layers)
        for called, _, (shape, saved) in fold(alike, names):
            add_row(made, called, "x".join(map(str, shape)), f"{saved:.0f}")
        yield made
        yield _products(products[layers[0].layer])
    yield from map(as_text, dict.fromkeys(f"{row.backend}: {row.reason}" for row in found.rows))
    scales = dict.fromkeys(layer.common_scale for layer in found.layers if layer.common_scale)
    with_others = (
        (first, tuple(name.rpartition(".")[2] for name in others)) for first, *others in scales
    )
    for called, _, cls in fold(
        ((layer.layer, layer.own_forward) for layer in found.layers if layer.own_forward), names
    ):
        yield as_text(
            f"Quantized only if its own forward multiplies by the weight itself: {called} ({cls}); check(model, batch) "
            "runs it and tells"
        )
    for called, _, others in fold(with_others, names):
        yield as_text(f"One scale in common: {called} with {', '.join(others)}")


def _products(rows: Iterable[GemmRow]) -> RenderableType:
    made = named_table("product", "left operand", "right operand", "backend", edge=False)
    for row in rows:
        add_row(
            made, row.gemm, row.left.replace(": ", "\n"), row.right.replace(": ", "\n"), row.backend
        )
    return made


def _rows(
    title: str, headers: Iterable[str], rows: Iterable[object], names: list[str]
) -> list[RenderableType]:
    """Return a table of records that begin with a name, or nothing without records."""
    cells = [tuple(map(str, vars(row).values())) for row in rows]
    if not cells:
        return []
    made = named_table(*headers, edge=False)
    for called, _, rest in fold(((name, tuple(rest)) for name, *rest in cells), names):
        add_row(made, called, *rest)
    return [*_title(title), made]


def _left_alone(found: Rows, names: list[str]) -> Iterable[RenderableType]:
    if found.skipped:
        yield from _title("Left in high precision")
        made = named_table("layer", "why", edge=False)
        folds = fold(found.skipped, names)
        for reason in dict.fromkeys(one.said for one in folds):
            for i, one in enumerate(one for one in folds if one.said == reason):
                add_row(made, one.called, "the same" if i else reason)
        yield made
    others = [matrix for matrix in found.coverage.plain if not matrix.deliberate]
    if others:
        yield from _title("Large matrices that no recipe reaches")
        made = named_table("parameter", "shape", "why", edge=False)
        said = ((matrix.name, (matrix.shape, matrix.why)) for matrix in others)
        for called, _, (shape, why) in fold(said, (matrix.name for matrix in others)):
            add_row(made, called, str(list(shape)), why)
        yield made


def _totals(found: Rows) -> Iterable[RenderableType]:
    yield from _title("In total")
    made = named_table("format", "parameters", "FLOPs", right=2, edge=False)
    for word, share in shares(found).items():
        add_row(made, word, f"{share.parameters:.1%}", f"{share.products:.1%}")
    yield made
    yield from _speeds(found)
    kept, plain = saved_bytes(found.layers)
    dtypes = ", ".join(
        dict.fromkeys(str(layer.dtype).removeprefix("torch.") for layer in found.layers)
    )
    yield (
        f"Inputs kept for backward: {kept / 1e3:.1f} kB per token, {kept / max(plain, 1):.2f} of plain layers' "
        f"{plain / 1e3:.1f} ({dtypes})"
    )


def _speeds(found: Rows) -> Iterable[str]:
    """Yield predicted speeds by all tables that cover layers of these sizes, two to a line where they fit."""
    by_part: dict[str, list[str]] = {}
    for table in TABLES.values():
        prediction = predicted(found, table)
        if prediction is not None:
            part = f", without {prediction.unknown:.1%} narrower than {table.least_features}"
            speeds = by_part.setdefault(part if prediction.unknown else "", [])
            speeds.append(_speed(found, table, prediction.speed))
    for part, speeds in by_part.items():
        yield f"Predicted speed of matrix products over BF16{part}:"
        line = ""
        for speed in speeds:
            if line and ";" not in line + speed and len(line) + len(speed) < _WIDEST - 4:
                line += f", {speed}"
            else:
                yield from [f"  {line}"] if line else []
                line = speed
        yield f"  {line}"


def _speed(found: Rows, table: CostTable, speed: float) -> str:
    """Return the predicted speed by a table, and which formats its device emulates."""
    used = shares(found)
    emulated = [
        row.word for row in table.rows if not row.native and used.get(row.word, (0, 0))[1] > 0
    ]
    note = f"; emulated there: {', '.join(emulated)}" if emulated else ""
    return f"{speed:.2f}x on {table}{note}"
