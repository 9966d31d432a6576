"""All that was watched of a run: what reports are made of, and what is saved."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hybridtensor.arguments import require_file, require_kind
from hybridtensor.printed import Printed, add_row, as_text, named_table
from hybridtensor.untrusted.files import read_json
from hybridtensor.version import __version__
from hybridtensor.watching.records import FaceRow, ProductRow, Sample, badness
from hybridtensor.watching.statistics import NAMES, OPTIONAL, PRODUCT_NAMES

if TYPE_CHECKING:
    from rich.table import Table

_Json: TypeAlias = dict[str, Any]  # of a file, before it is checked
_VERSION = 1
_LIMIT = 1 << 32  # some hundred bytes per face or product of a step that was measured
_NOT_FINITE = ("nan", "inf", "-inf")
_SHOWN = 15  # rows of the table, of two lines


@dataclass(frozen=True, repr=False)
class Recording(Printed):
    """The measurements of a watched run.

    Attributes:
        every: One step of this many was measured.
        recipes: The recipe of each layer.
        machine: Device and versions.
        losses: Step and loss of each recorded loss.
        samples: The steps that were measured.
    """

    every: int
    recipes: dict[str, str]
    machine: dict[str, str]
    losses: tuple[tuple[int, float], ...]
    samples: tuple[Sample, ...]

    def save(self, path: str | Path) -> Path:
        """Save as JSON and return the path, whose folder is made if it is missing."""
        path = require_file("Recording.save", path)
        found = {
            "version": _VERSION,
            "every": self.every,
            "recipes": self.recipes,
            "machine": self.machine,
            "losses": [[step, plain(loss)] for step, loss in self.losses],
            "samples": [as_dict(sample) for sample in self.samples],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Load a recording that ``save`` wrote; raise ValueError if it is damaged or no regular file."""
        require_kind("Recording.load", "a path", path, (str, Path))
        try:
            file = Path(path).resolve()
            found = read_json(file.parent, file.name, _LIMIT)
            if _int(found["version"]) != _VERSION:
                raise ValueError(f"version {_VERSION} is required, got {found['version']}")
            losses = tuple((_int(step), _float(loss)) for step, loss in _pairs(found["losses"]))
            samples = tuple(_sample(one) for one in found["samples"])
            recipes, machine = (
                {_string(a): _string(b) for a, b in found[name].items()}
                for name in ("recipes", "machine")
            )
            return cls(_int(found["every"], at_least=1), recipes, machine, losses, samples)
        except (
            AttributeError,
            KeyError,
            OSError,
            OverflowError,  # an infinite step, or a number that no float holds
            RuntimeError,  # links in a circle
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"Recording.load: what Recording.save wrote is required, got {path}: {error}"
            ) from error

    def __rich__(self) -> Table:
        names = ("sqnr", "underflows%", "overflows%", "wasted_blocks%", "cur_amax")
        table = named_table("layer\nface, format")
        for name in names:
            table.add_column(re.sub("(?<=[a-z])(?=flows)|_", "\n", name), no_wrap=True)
        if not self.samples:
            table.title = "Nothing was measured yet"
            return table
        last = self.samples[-1]
        faces = sorted(last.faces, key=lambda row: badness(row.statistics["sqnr"]))
        table.title = (
            f"Step {last.step}: the {min(_SHOWN, len(faces))} noisiest of {len(faces)} faces"
        )
        for row in faces[:_SHOWN]:
            numbers = [f"{row.statistics[name]:.3g}" for name in names]
            add_row(table, f"{row.where}\n{row.operand} {row.format}", *numbers)
        worst = min(last.products, key=lambda row: badness(row.statistics["cosine"]), default=None)
        if worst is not None:
            cosine = worst.statistics["cosine"]
            table.caption = as_text(
                f"smallest cosine of a product: {cosine:.6f}, {worst.where} {worst.product}",
                style="table.caption",
            )
        return table


def as_dict(sample: Sample) -> dict[str, object]:
    """Return a sample as JSON, with non-finite numbers as strings."""
    rows = {
        name: [plain(asdict(row)) for row in getattr(sample, name)]
        for name in ("faces", "products")
    }
    return {"step": sample.step, **rows, "order": sample.order, "unseen": sample.unseen}


def plain(value: object) -> object:
    """Replace non-finite numbers by strings."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def machine() -> dict[str, str]:
    """Return device and versions as text."""
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return {"device": device, "torch": torch.__version__, "hybridtensor": __version__}


def _sample(found: _Json) -> Sample:
    faces = tuple(
        FaceRow(**_fields(row, NAMES, ("layer", "operand", "format"))) for row in found["faces"]
    )
    products = tuple(
        ProductRow(
            **_fields(row, PRODUCT_NAMES, ("layer", "product")) | {"formats": _pair(row["formats"])}
        )
        for row in found["products"]
    )
    order, unseen = (
        tuple((_string(a), _string(b)) for a, b in _pairs(found[name]))
        for name in ("order", "unseen")
    )
    return Sample(_int(found["step"]), faces, products, order, unseen)


def _fields(row: _Json, names: Iterable[str], strings: tuple[str, ...]) -> _Json:
    """Return the typed fields of a row of faces or products; ``strings`` are those that are text."""
    known = row["statistics"]
    statistics = {
        name: _float(known[name]) for name in names if name not in OPTIONAL or name in known
    }
    experts = tuple((_int(expert), _float(number)) for expert, number in _pairs(row["experts"]))
    checked = {name: _string(row[name]) for name in strings}
    return row | checked | {"step": _int(row["step"]), "statistics": statistics, "experts": experts}


def _pair(value: object) -> tuple[str, str]:
    """Return the formats of a product, two strings; raise TypeError otherwise."""
    ((left, right),) = _pairs([value])
    return _string(left), _string(right)


def _pairs(value: object) -> list[tuple[object, object]]:
    """Return a list of pairs; raise TypeError for anything else."""
    if not isinstance(value, list) or not all(
        isinstance(one, list) and len(one) == 2 for one in value
    ):
        raise TypeError(f"a list of pairs is required, got {value!r:.80}")
    return [(a, b) for a, b in value]


def _int(value: object, at_least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"an integer is required, got {value!r:.80}")
    if value < at_least:
        raise ValueError(f"an integer from {at_least} on is required, got {value}")
    return value


def _float(value: object) -> float:
    """Return a number, also one that ``plain`` encoded because it is not finite; raise TypeError otherwise."""
    if value not in _NOT_FINITE and (
        not isinstance(value, (int, float)) or isinstance(value, bool)
    ):
        raise TypeError(f"a number is required, got {value!r:.80}")
    return float(value)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a string is required, got {value!r:.80}")
    return value
