"""Where samples go: files of JSON lines, TensorBoard, W&B, loggers of Lightning, functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hybridtensor.arguments import require_file, wrong
from hybridtensor.watching.recording import as_dict
from hybridtensor.watching.records import Sample

Sink = Callable[[Sample], object]


def sink_of(target: object) -> Sink:
    """Return a function that writes samples to a path (JSON lines), logger or function; raise TypeError otherwise,
    ValueError for a path that is no file's."""
    if isinstance(target, (str, Path)):
        return _to_file(require_file("watch", target))
    if hasattr(target, "add_scalar"):
        return lambda sample: [
            target.add_scalar(name, value, sample.step) for name, value in sample.scalars().items()
        ]
    if hasattr(target, "log_metrics"):
        return lambda sample: target.log_metrics(sample.scalars(), step=sample.step)
    if hasattr(target, "log"):
        # W&B drops what is logged for a step behind the present one: the step is a number beside the others
        return lambda sample: target.log({**sample.scalars(), "hybridtensor/step": sample.step})
    if callable(target):
        return target
    raise wrong("watch", "a path, a writer, a logger or a function as sink", target)


def _to_file(path: Path) -> Sink:
    def append(sample: Sample) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(as_dict(sample)) + "\n")

    return append
