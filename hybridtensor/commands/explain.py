"""``hybridtensor explain SPEC``: what a recipe does to a layer, or to a model of transformers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from torch import nn

from hybridtensor.commands.common import (
    DTYPES,
    Parsers,
    add_command,
    config_of,
    print_json,
    transformers,
)
from hybridtensor.convert import quantize_
from hybridtensor.explain import explain


def add(parsers: Parsers) -> None:
    parser = add_command(parsers, "explain", _run, "tell what a recipe does", as_json=True)
    parser.add_argument("spec", help="a recipe's name or spec, as for quantize_")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--size", default="4096x4096", help="of the layer, OUTxIN (default: %(default)s)"
    )
    what.add_argument(
        "--model", type=Path, help="a folder with config.json of transformers, in place of a layer"
    )
    parser.add_argument(
        "--dtype", default="bf16", choices=list(DTYPES), help="of weights (default: %(default)s)"
    )


def _run(given: argparse.Namespace) -> int:
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
