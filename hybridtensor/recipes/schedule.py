"""Which recipe is for which step of a run, and which blocks of a model are left alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from hybridtensor.arguments import require_int, require_kind, require_module, shown
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.named import from_name


def edge_blocks(model: nn.Module, *, first: int = 1, last: int = 1) -> list[str]:
    """Return the names of the first and last blocks of ``model``, for ``quantize_(keep_bf16=...)``.

    ::

        ht.quantize_(model, "nvfp4", keep_bf16=ht.recipes.edge_blocks(model, first=1, last=1))

    Args:
        model: A model whose blocks are in one ``nn.ModuleList``: the longest of those that are in no other one,
            as a list of experts is.
        first: Blocks at the beginning.
        last: Blocks at the end.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If there is no such list, it has not more blocks than that, or a number is negative.
    """
    require_module("edge_blocks", model)
    require_int("edge_blocks", at_least=0, first=first, last=last)
    lists: list[tuple[str, nn.ModuleList]] = []
    inside: set[nn.Module] = set()
    for at, module in model.named_modules():  # outer modules first
        if isinstance(module, nn.ModuleList) and module not in inside:
            lists.append((at, module))
            inside.update(module.modules())
    if not lists:
        raise ValueError("edge_blocks: the model has no nn.ModuleList of blocks; name the layers")
    name, blocks = max(lists, key=lambda item: len(item[1]))
    number = len(blocks)
    if first + last >= number:
        raise ValueError(
            f"edge_blocks: fewer blocks than the {number} of {name or type(model).__name__!r} are required, "
            f"got first={first}, last={last}"
        )
    chosen = itertools.chain(range(first), range(number - last, number))
    return [f"{name}.{index}" if name else str(index) for index in chosen]


@dataclass(frozen=True)
class Schedule:
    """Which recipe a run uses from which step on; made by ``schedule``.

    ::

        plan = ht.recipes.schedule({0: "nvfp4", 900: "bf16"})
        print(plan.starts, plan.at(950))

    Attributes:
        starts: First step of each recipe, ascending from 0.
        configs: The recipes.
    """

    starts: tuple[int, ...]
    configs: tuple[HybridConfig, ...]

    def __post_init__(self) -> None:
        require_kind("Schedule", "a tuple of steps", self.starts, tuple, "call schedule")
        require_kind("Schedule", "a tuple of configs", self.configs, tuple, "call schedule")

    def at(self, step: int) -> HybridConfig:
        """Return the recipe of a step.

        Raises:
            TypeError: If the step is no integer.
            ValueError: If it is negative.
        """
        require_int("Schedule.at", at_least=0, step=step)
        started = zip(self.starts, self.configs, strict=True)
        return [config for start, config in started if start <= step][-1]


def schedule(recipes: Mapping[int, str | HybridConfig]) -> Schedule:
    """Return a schedule from ``{first step: recipe}``.

    Hand ``schedule.at(step)`` to ``set_config_`` in every step. A call looks at every layer and compares recipes
    between ranks; if that takes too long, call it at ``schedule.starts``, and once where a run resumes. NVFP4, then a
    BF16 forward with NVFP4 gradients for the last tenth::

        plan = ht.recipes.schedule({0: "nvfp4", int(0.9 * steps): "bf16/nvfp4/nvfp4"})
        for step in range(steps):
            ht.set_config_(model, plan.at(step))

    Raises:
        TypeError: If ``recipes`` is not a dictionary of recipes.
        ValueError: If no recipe starts at step 0, or a step is not a number from 0 on.
    """
    require_kind("schedule", "a dictionary of recipes by first step", recipes, Mapping)
    bad = [s for s in recipes if not isinstance(s, int) or isinstance(s, bool) or s < 0]
    if bad or 0 not in recipes:
        raise ValueError(
            f"schedule: steps from 0 on, 0 among them, are required, got {shown(list(recipes))}"
        )
    starts = tuple(sorted(recipes))
    chosen = [recipes[start] for start in starts]
    for recipe in chosen:
        require_kind("schedule", "a recipe name or HybridConfig", recipe, (str, HybridConfig))
    return Schedule(starts, tuple(from_name(c) if isinstance(c, str) else c for c in chosen))
