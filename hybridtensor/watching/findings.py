"""What stands out in a recording, in words that link to the rows of its tables."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtensor.watching.expected import ONE_BIT
from hybridtensor.watching.judging import Judged, nearest
from hybridtensor.watching.markup import decibel, decibels, escape
from hybridtensor.watching.recording import Recording
from hybridtensor.watching.records import badness
from hybridtensor.watching.remedies import remedy

MOST = 12  # findings that are written out


def standing_out(found: Sequence[Judged]) -> list[Judged]:
    """Sort findings: not finite, below their threshold (farthest first), with a row below it, formerly below it."""
    ranked = []
    for one in found:
        if not one.is_finite:
            ranked.append((0, 0.0, one))
        elif one.margin < 0:
            ranked.append((1, one.margin, one))
        elif one.row_margin < 0:
            ranked.append((2, one.row_margin, one))
        elif one.below:
            ranked.append((3, badness(one.worst.statistics["sqnr"]), one))
    return [one for *_, one in sorted(ranked, key=lambda rank: rank[:2])]


def findings(recording: Recording, found: Sequence[Judged]) -> str:
    """Render what stands out, or by how much nothing does."""
    out = standing_out(found)
    shown = "".join(
        f"<li>{link(one)} ({escape(one.row.told_formats)}): {escape(sentence(one))} "
        f"<em>Try {escape(remedy(one, recording.recipes.get(one.row.layer, '')))}.</em></li>"
        for one in out[:MOST]
    )
    text = f"<ul>{shown}</ul>" if out else f"<p>{_nothing(found)}</p>"
    if len(out) > MOST:
        text += f"<p>And {len(out) - MOST} more, which the tables have.</p>"
    return f"{text}<p class=quiet>{escape(_thresholds(found))}</p>"


def link(one: Judged) -> str:
    """Return a link to the row of a finding, escaped."""
    return f"<a href='#{one.anchor}'>{escape(f'{one.row.where} {one.row.name}')}</a>"


def sentence(one: Judged) -> str:
    """Format how something stands out: by how much, against which threshold, in how many steps."""
    if not one.is_finite:
        return f"not finite in step {one.row.step}, the last in which it was measured."
    often = f"in {one.below} of {len(one.rows)} sampled steps"
    if one.not_finite is not None:
        return (
            f"not finite in step {one.not_finite.step}, {often}; no longer in the last one, with "
            f"{decibels(one.sqnr)}."
        )
    against = f"the threshold of {decibel(one.threshold)} dB (expected: {decibel(one.expected)} dB, {one.source})"
    if one.margin < 0:
        text = f"{decibel(one.sqnr)} dB, {-one.margin:.1f} dB below {against}, {often}."
    elif one.row_margin < 0:
        text = (
            f"{decibel(one.sqnr)} dB overall hide a row of {decibel(one.row_sqnr)} dB, {-one.row_margin:.1f} dB "
            f"below the threshold of {decibel(one.row_threshold)} dB (expected of the noisiest row: "
            f"{decibel(one.expected_row)} dB, {one.source})."
        )
    else:
        text = (
            f"{decibel(one.worst.statistics['sqnr'])} dB in step {one.worst.step}, below {against}, {often}; "
            f"no longer in the last one, with {decibel(one.sqnr)} dB."
        )
    return text + _causes(one)


def _causes(one: Judged) -> str:
    """Format other symptoms: underflow, overflow, unused range."""
    numbers = one.row.statistics
    details = [
        f"{numbers[name]:.3g} % of {words}"
        for name, words in (
            ("underflows%", "its values became zero"),
            ("overflows%", "its values overflowed"),
            ("wasted_blocks%", "its blocks have a scale that is too large"),
        )
        if numbers.get(name, 0.0) > 0
    ]
    if one.margin < 0 and one.row_sqnr is not None and one.row_margin < one.margin:
        details.append(f"its noisiest row has {decibel(one.row_sqnr)} dB")
    return f" {'; '.join(details)[0].upper()}{'; '.join(details)[1:]}." if details else ""


def _nothing(found: Sequence[Judged]) -> str:
    compared = [one for one in found if one.threshold is not None]
    if not compared:
        return "Nothing stands out: there is nothing to compare with."
    closest = min(compared, key=nearest)
    text = (
        f"Nothing stands out. The nearest to its threshold is {link(closest)}: {decibel(closest.sqnr)} dB, "
        f"{closest.margin:.1f} dB above {decibel(closest.threshold)} dB"
    )
    if nearest(closest) < closest.margin:
        text += f", its noisiest row {closest.row_margin:.1f} dB above"
    return f"{text}."


def _thresholds(found: Sequence[Judged]) -> str:
    """Format where the thresholds come from."""
    text = (
        f"A threshold is {ONE_BIT:.1f} dB, one bit of mantissa, below what is expected: less is no better than the "
        "same format with one bit less. Expected is the SQNR of normally distributed values, which this version has "
        "cast to the same format with the same rounding (docs/numerics.md defines the bits); in a product the noise "
        "of both operands adds up. A row is compared with the noisiest of 1,024 rows of 64 such values."
    )
    if any("median" in one.source for one in found):
        text += " Of formats that are not known here the median of the same recording is taken."
    unknown = sum(one.expected is None for one in found)
    if unknown:
        text += f" {unknown} faces or products have no threshold: their formats are not known here, and rare."
    faces = [one for one in found if one.is_face]
    if any(one.row_sqnr is None for one in faces):
        text += (
            " This recording has no SQNR per row, which earlier versions did not record: an outlier may vanish in "
            "the mean. The tables have each face's worst step instead."
        )
    return text
