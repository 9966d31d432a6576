"""What of a recording stands out: each face and product as last measured, against a threshold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from hybridtensor.watching.expected import ONE_BIT, expected_of_face, expected_of_product
from hybridtensor.watching.recording import Recording
from hybridtensor.watching.records import FaceRow, Row, badness

_FEWEST = 3  # others of a format, of which a median says what is usual


class Judged(NamedTuple):
    """A face or a product of a layer, and how it compares with what is expected of its format."""

    rows: Sequence[Row]  # of the sampled steps
    anchor: str
    expected: float | None
    expected_row: float | None
    source: str

    @property
    def row(self) -> Row:
        """As last measured."""
        return self.rows[-1]

    @property
    def worst(self) -> Row:
        """As measured in its worst step."""
        return min(self.rows, key=_badness)

    @property
    def below(self) -> int:
        """The number of steps in which its SQNR was below the threshold, or its numbers not finite."""
        threshold = -math.inf if self.threshold is None else self.threshold
        return sum(row.statistics["sqnr"] < threshold or not _is_finite(row) for row in self.rows)

    @property
    def is_face(self) -> bool:
        """Whether it is a face, and no product."""
        return isinstance(self.row, FaceRow)

    @property
    def kind(self) -> str:
        return "face" if self.is_face else "product"

    @property
    def sqnr(self) -> float:
        return self.row.statistics["sqnr"]

    @property
    def row_sqnr(self) -> float | None:
        return self.row.statistics.get("row_sqnr")

    @property
    def threshold(self) -> float | None:
        """SQNR below which a finding stands out: one mantissa bit less than expected."""
        return None if self.expected is None else self.expected - ONE_BIT

    @property
    def row_threshold(self) -> float | None:
        return None if self.expected_row is None else self.expected_row - ONE_BIT

    @property
    def margin(self) -> float:
        """How far its SQNR is above the threshold, dB; NaN if it is not finite or nothing is known."""
        return math.nan if self.threshold is None else self.sqnr - self.threshold

    @property
    def row_margin(self) -> float:
        if self.row_threshold is None or self.row_sqnr is None:
            return math.nan
        return self.row_sqnr - self.row_threshold

    @property
    def is_finite(self) -> bool:
        """Whether its numbers say nothing of NaN or Inf."""
        return _is_finite(self.row)

    @property
    def not_finite(self) -> Row | None:
        """What to tell as not finite: the last step, or the worst one if the last is above its thresholds."""
        told = self.worst if self.is_finite and nearest(self) >= 0 else self.row
        return None if _is_finite(told) else told


def _is_finite(row: Row) -> bool:
    return not math.isnan(row.statistics["sqnr"]) and not row.statistics.get("nonfinite", 0.0)


def _badness(row: Row) -> float:
    """Return a sort key for the steps of one face or product, worst first."""
    return badness(row.statistics["sqnr"]) if _is_finite(row) else -math.inf


def nearest(one: Judged) -> float:
    """Return the distance of the mean or the noisiest row to its threshold, the smaller; infinite without one."""
    margins = (one.margin, one.row_margin, math.inf)
    return min(margin for margin in margins if not math.isnan(margin))


def judged(recording: Recording) -> list[Judged]:
    """Compare all faces and products of a recording with expected SQNRs, faces first."""
    found: list[Judged] = []
    for kind in ("faces", "products"):
        places: dict[tuple[str, str], list[Row]] = {}
        for sample in recording.samples:
            for row in getattr(sample, kind):
                places.setdefault((row.layer, row.name), []).append(row)
        found += [_judged(recording, rows, i) for i, rows in enumerate(places.values())]
    groups = _groups(found)
    return [_compared(one, groups) for one in found]


def _judged(recording: Recording, rows: Sequence[Row], number: int) -> Judged:
    """Compare one face or product with what is expected of normally distributed values."""
    last = rows[-1]
    recipe = recording.recipes.get(last.layer, "")
    if isinstance(last, FaceRow):
        sqnr, row_sqnr = expected_of_face(recipe, last.operand, last.format) or (None, None)
        source = "of normally distributed values in this format"
        return Judged(rows, f"face-{number}", sqnr, row_sqnr, source)
    of_product = expected_of_product(recipe, last.product, last.formats)
    source = "of operands with the noise of normally distributed values in their formats"
    return Judged(rows, f"product-{number}", of_product, None, source)


def _groups(found: Sequence[Judged]) -> dict[tuple[str, str], list[Judged]]:
    """Group unknown formats that have enough rows for a median."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for one in found:
        if one.expected is None and math.isfinite(one.sqnr):
            groups.setdefault(_group(one), []).append(one)
    return {key: group for key, group in groups.items() if len(group) >= _FEWEST}


def _group(one: Judged) -> tuple[str, str]:
    """Return the comparison group of an unknown format: faces of it, or the same product of these formats."""
    return ("face" if one.is_face else one.row.name), one.row.told_formats


def _compared(one: Judged, groups: dict[tuple[str, str], list[Judged]]) -> Judged:
    """Compare unknown formats with the recording's own median."""
    if one.expected is not None:
        return one
    group = groups.get(_group(one))
    if group is None:
        return one._replace(source="")
    rows = [each.row_sqnr for each in group if each.row_sqnr is not None]
    return one._replace(
        expected=statistics.median(each.sqnr for each in group),
        expected_row=statistics.median(rows) if rows else None,
        source=f"the median of {len(group)} in this recording",
    )
