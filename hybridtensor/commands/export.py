"""``hybridtensor export SOURCE FOLDER --recipe fp8_block``: weights as inference engines load them.

SOURCE is a folder that transformers loads, or one of ``hybridtensor.distributed.checkpoint`` (then ``--config`` names
a folder with the model's ``config.json``).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from torch import nn

from hybridtensor.commands.common import config_of, transformers
from hybridtensor.convert import quantize_
from hybridtensor.distributed import checkpoint
from hybridtensor.export import DTYPES
from hybridtensor.inference import LAYOUTS, export_pretrained
from hybridtensor.recipes import by_type

_BESIDE = (
    "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "generation_config.json", "*.jinja", "*.model",
)  # fmt: skip

_OF_A_RUN = ("config", "entry", "step", "persistent", "static_inputs")
"""Options that say something of a run's checkpoints."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    command.add_argument(
        "source", type=Path, help="transformers' folder, or a run's folder of checkpoints"
    )
    command.add_argument("folder", type=Path, help="which is not there yet")
    command.add_argument(
        "--recipe", required=True, help="a recipe's name or spec, as for quantize_"
    )
    command.add_argument("--experts-recipe", help="that of experts, if it is another one")
    command.add_argument(
        "--keep-bf16", nargs="+", default=[], help="layers to leave alone, as for quantize_"
    )
    command.add_argument(
        "--layout",
        default="auto",
        choices=["auto", *LAYOUTS],
        help="of what is written; with hf_mxfp4 the recipe is for experts alone",
    )
    command.add_argument("--experts", default="separate", choices=["separate", "stacked"])
    command.add_argument("--config", type=Path, help="folder of config.json, of a run's model")
    command.add_argument(
        "--entry", help="what checkpoints of the run call the model (default: model)"
    )
    command.add_argument("--step", type=int, help="of the run; by default the newest that is whole")
    command.add_argument(
        "--dtype",
        default="bf16",
        choices=list(DTYPES),
        help="of the weights before they are quantized",
    )
    command.add_argument(
        "--persistent", action="store_true", help="the run trained persistent weights"
    )
    command.add_argument(
        "--static-inputs",
        action="store_true",
        help="store the delayed scales of inputs that the run learned; else engines measure inputs",
    )


def run(given: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    _check(given)
    models = transformers().AutoModelForCausalLM
    dtype = DTYPES[given.dtype]
    if _is_run(given.source):
        if given.config is None:
            raise ValueError(
                f"--config is required, a folder with config.json, for the checkpoints in {given.source}"
            )
        model = _converted(models.from_config(config_of(given.config), dtype=dtype), given)
        state: dict[str, object] = {given.entry or "model": model}
        checkpoint.load(given.source, state, step=given.step)
        beside = given.config
    else:
        loaded = models.from_pretrained(given.source, dtype=dtype)
        model, beside = _converted(loaded, given), given.source
    folder = export_pretrained(
        model, given.folder, given.layout, experts=given.experts, static_inputs=given.static_inputs
    )
    for pattern in _BESIDE:
        for file in beside.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
    print(folder)
    return 0


def _check(given: argparse.Namespace) -> None:
    """Raise ValueError for impossible folders, before anything is loaded."""
    if not given.source.is_dir():
        raise ValueError(
            f"a folder that transformers loads, or one of a run's checkpoints, is required, got {given.source}"
        )
    if given.folder.exists() or not given.folder.parent.is_dir():
        raise ValueError(
            f"a new folder whose parent is there is required, got {given.folder}; name another"
        )
    # By identity: the step 0 equals False
    extra = [
        o for o in _OF_A_RUN if not any(vars(given)[o] is left_out for left_out in (None, False))
    ]
    if extra and not _is_run(given.source):
        option = "--" + extra[0].replace("_", "-")
        raise ValueError(f"{option} requires a run's checkpoints, got {given.source}; leave it out")


def _is_run(folder: Path) -> bool:
    return any(folder.glob("step_*"))


def _converted(model: nn.Module, given: argparse.Namespace) -> nn.Module:
    layout = LAYOUTS.get(given.layout)
    chosen = _is_stack if layout is not None and layout.whole_stacks else None
    recipe = given.recipe
    if given.experts_recipe is not None:
        recipe = by_type(linear=recipe, grouped_linear=given.experts_recipe)
    return quantize_(
        model, recipe, filter_fn=chosen, keep_bf16=given.keep_bf16, persistent=given.persistent
    )


def _is_stack(module: nn.Module, name: str) -> bool:
    """Tell whether a name is that of a stack of experts, not of a layer."""
    weight = getattr(module, name.rpartition(".")[2], None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 3
