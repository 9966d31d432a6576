"""Export weights for inference engines: ``python -m hybridtensor export SOURCE FOLDER --recipe fp8_block``.

SOURCE is a folder that transformers loads, or one of ``hybridtensor.distributed.checkpoint`` (then ``--config`` names
a folder with the model's ``config.json``). Exits with 0, or with 1 and what is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridtensor.convert import quantize_
from hybridtensor.distributed import checkpoint
from hybridtensor.inference import LAYOUTS, export_pretrained

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BESIDE = (
    "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "generation_config.json", "*.jinja", "*.model",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    given = _parser().parse_args(arguments)
    try:
        print(_export(given))
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"hybridtensor export: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hybridtensor", description=(__doc__ or "").splitlines()[0]
    )
    export = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "export", help="write weights as inference engines load them"
    )
    export.add_argument(
        "source", type=Path, help="transformers' folder, or a run's folder of checkpoints"
    )
    export.add_argument("folder", type=Path, help="which is not there yet")
    export.add_argument("--recipe", required=True, help="a recipe's name or spec, as for quantize_")
    export.add_argument("--layout", default="auto", choices=["auto", *LAYOUTS])
    export.add_argument("--experts", default="separate", choices=["separate", "stacked"])
    export.add_argument("--config", type=Path, help="folder of config.json, of a run's model")
    export.add_argument(
        "--entry", default="model", help="what checkpoints of the run call the model"
    )
    export.add_argument("--step", type=int, help="of the run; by default the newest that is whole")
    export.add_argument(
        "--dtype",
        default="bf16",
        choices=list(_DTYPES),
        help="of the weights before they are quantized",
    )
    export.add_argument(
        "--persistent", action="store_true", help="the run trained persistent weights"
    )
    return parser


def _export(given: argparse.Namespace) -> Path:
    """Do what was asked, and return the folder."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "the package transformers is required; pip install hybridtensor[inference]"
        ) from error
    dtype = _DTYPES[given.dtype]
    if any(given.source.glob("step_*")):
        if given.config is None:
            raise ValueError(
                f"--config is required, a folder with config.json, for the checkpoints in {given.source}"
            )
        config = transformers.AutoConfig.from_pretrained(given.config)
        models: Any = transformers.AutoModelForCausalLM
        model = _converted(models.from_config(config, dtype=dtype), given)
        state: dict[str, Any] = {given.entry: model}
        checkpoint.load(given.source, state, step=given.step)
        beside = given.config
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(given.source, dtype=dtype)
        model, beside = _converted(loaded, given), given.source
    folder = export_pretrained(model, given.folder, given.layout, experts=given.experts)
    for pattern in _BESIDE:
        for file in beside.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
    return folder


def _converted(model: nn.Module, given: argparse.Namespace) -> nn.Module:
    return quantize_(model, given.recipe, persistent=given.persistent)


if __name__ == "__main__":
    sys.exit(main())
