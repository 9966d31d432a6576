"""What a model may be trained by: a recipe, a variant that is more than a recipe, or a recipe for each layer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchao.core.config import config_from_dict
from torchao.quantization import FqnToConfig

import hybridtensor as ht
from hybridtensor import HybridConfig
from hybridtensor.recipes.spec import GEMMS

BASELINE = "bf16"
REPLICAS = ("bf16_disturbed", "bf16_disturbed_again")

Recipe = HybridConfig | FqnToConfig
Stages = dict[int, Recipe]
"""The recipe from each step on; none at all for the plain model."""


@dataclass(frozen=True)
class Candidate:
    """What a model is trained by.

    Attributes:
        name: In tables and names of files.
        spec: What it is, in short.
        build: Makes the stages for a model and a number of steps.
        disturbed: By which draw every initial weight is changed by about a millionth of itself; 0 is by none.
    """

    name: str
    spec: str
    build: Callable[[nn.Module, int], Stages]
    disturbed: int = 0

    def fingerprint(self, model: nn.Module, steps: int) -> str:
        """Return 16 hex digits that change when what the model is trained by changes."""
        stages = self.build(model, steps)
        if set(stages) == {0} and isinstance(stages[0], HybridConfig) and not self.disturbed:
            return stages[0].fingerprint()
        said = {step: _told(recipe) for step, recipe in stages.items()}
        all_of_it = [said, self.disturbed > 0, *range(1, self.disturbed)]
        return hashlib.sha256(json.dumps(all_of_it, sort_keys=True).encode()).hexdigest()[:16]

    def allowance(self, model: nn.Module, steps: int) -> float:
        """Return the percentage by which the loss may exceed BF16's: 1 with a product in FP4, else 0.25."""
        configs = [config for recipe in self.build(model, steps).values() for config in _configs(recipe)]
        elements = {fmt.element for config in configs for gemm in GEMMS for fmt in config.formats(gemm)}
        return 1.0 if torch.float4_e2m1fn_x2 in elements else 0.25


def _told(recipe: Recipe) -> object:
    if isinstance(recipe, HybridConfig):
        return recipe.fingerprint()
    return {layer: rule and rule.fingerprint() for layer, rule in recipe.fqn_to_config.items()}


def _configs(recipe: Recipe) -> Iterable[HybridConfig]:
    of_layers = [recipe] if isinstance(recipe, HybridConfig) else recipe.fqn_to_config.values()
    return [config for config in of_layers if config is not None]


def last_tenth_in_bf16(model: nn.Module, steps: int) -> Stages:
    """Train in NVFP4, but the last tenth of the steps in BF16, forward and backward."""
    schedule = ht.recipes.schedule({0: "nvfp4", steps - steps // 10: BASELINE})
    return dict(zip(schedule.starts, schedule.configs, strict=True))


def edges_in_bf16(model: nn.Module, steps: int) -> Stages:
    """Train in NVFP4, but the first and the last block in BF16."""
    plain = tuple(f"{name}." for name in (*ht.recipes.edge_blocks(model), "lm_head"))
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = ht.recipes.from_name("nvfp4")
    return {0: FqnToConfig({name: None if f"{name}.".startswith(plain) else config for name in layers})}


VARIANTS = {
    variant.name: variant
    for variant in (
        *(
            Candidate(name, "bf16, initial weights changed by a millionth", lambda model, steps: {}, draw)
            for draw, name in enumerate(REPLICAS, 1)
        ),
        Candidate("nvfp4_last_tenth_bf16", "nvfp4, the last tenth of the steps bf16", last_tenth_in_bf16),
        Candidate("nvfp4_edge_blocks_bf16", "nvfp4, the first and the last block bf16", edges_in_bf16),
    )
}
"""What is more than a recipe, by name."""


def candidate(text: str) -> Candidate:
    """Return what ``text`` names: a variant, a recipe by name or spec, or ``name=path.json`` with a config for each
    layer, as ``torchao.core.config.config_to_dict`` writes it.

    Raises:
        ValueError: If there is no such recipe, or the file holds no ``FqnToConfig``.
    """
    name, _, path = text.partition("=")
    if path:
        recipe = read_assignment(Path(path))
        return Candidate(
            name, f"a recipe for each of {len(recipe.fqn_to_config)} layers", lambda model, steps: {0: recipe}
        )
    if name in VARIANTS:
        return VARIANTS[name]
    config = ht.recipes.from_name(name)
    return Candidate(name, str(config), lambda model, steps: {} if name == BASELINE else {0: config})


def fingerprints(names: Iterable[str], model: nn.Module, steps: int) -> dict[str, str]:
    """Return what the recipes of some names are today; those of assignments nobody knows by their names."""
    found = {}
    for name in names:
        with contextlib.suppress(ValueError):
            found[name] = candidate(name).fingerprint(model, steps)
    return found


def read_assignment(path: Path) -> FqnToConfig:
    """Return the recipe of each layer from a file.

    Raises:
        ValueError: If it is none.
    """
    try:
        recipe = config_from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: a file with a recipe for each layer is required, got {error}") from None
    if not isinstance(recipe, FqnToConfig):
        raise ValueError(f"{path}: a recipe for each layer (FqnToConfig) is required, got {type(recipe).__name__}")
    return recipe
