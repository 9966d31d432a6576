"""``hybridtensor explain SPEC``: what a recipe does to a layer, or to a model of transformers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from torch import nn

from hybridtensor.commands.common import (
    add_json,
    config_of,
    print_json,
    transformers,
)
from hybridtensor.convert import quantize_
from hybridtensor.explain import explain
from hybridtensor.export import DTYPES


def add(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``explain``."""
    add_json(command)
    command.add_argument("spec", help="a recipe's name or spec, as for quantize_")
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--size", default="4096x4096", help="of the layer, OUTxIN (default: %(default)s)"
    )
    what.add_argument(
        "--model", type=Path, help="a folder with config.json of transformers, in place of a layer"
    )
    command.add_argument(
        "--dtype", default="bf16", choices=list(DTYPES), help="of weights (default: %(default)s)"
    )


def run(given: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    dtype = DTYPES[given.dtype]
    with torch.device("meta"):
        model = _layer(given.size, dtype) if given.model is None else _model(given.model, dtype)
    found = explain(quantize_(model, given.spec), show=not given.json)
    if given.json:
        print_json(found.to_dict())
    return 0


def _layer(size: str, dtype: torch.dtype) -> nn.Module:
    read = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size)
    if read is None:
        raise ValueError(f"--size is OUTxIN, such as 4096x14336, got {size!r}")
    out_features, in_features = map(int, read.groups())
    return nn.ModuleDict({"linear": nn.Linear(in_features, out_features, bias=False, dtype=dtype)})


def _model(folder: Path, dtype: torch.dtype) -> nn.Module:
    models = transformers().AutoModelForCausalLM
    model: nn.Module = models.from_config(config_of(folder), dtype=dtype)
    return model
