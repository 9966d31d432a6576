"""Accelerate: convert before it wraps or shards, and advance state after the steps that count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from hybridtensor.arguments import require_kind, reusable
from hybridtensor.convert import quantize_
from hybridtensor.selection import Recipe, choose
from hybridtensor.state.step import step_after


def prepare(
    accelerator: Accelerator, *objects: object, recipe: Recipe, keep_bf16: Iterable[str] = ()
) -> Any:
    """Do what ``accelerator.prepare(*objects)`` does with a model that ``recipe`` quantizes.

    ::

        model, optimizer, data = prepare(accelerator, model, optimizer, data, recipe="fp8_delayed")

    The model is converted first, because FSDP2 shards what it is given. Then state advances
    whenever the optimizer really steps: not while gradients accumulate, nor when a gradient scaler
    skips a step. With several optimizers it advances when all of them have stepped.

    Args:
        accelerator: One of any distributed type that ``quantize_`` works with: none, DDP, FSDP2.
        objects: What ``accelerator.prepare`` takes, with exactly one model.
        recipe: As for ``quantize_``.
        keep_bf16: As for ``quantize_``.

    Returns:
        What ``accelerator.prepare`` returns.

    Raises:
        TypeError: If the first argument is no accelerator.
        ValueError: If there is not one model, or as ``quantize_`` does.
        NotImplementedError: If rank 0 alone is to load a model whose recipe keeps state.
    """
    require_kind("prepare", "an Accelerator", accelerator, Accelerator)
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    if len(models) != 1:
        raise ValueError(
            f"prepare: one model is required, got {len(models)}; prepare each with its own optimizers"
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    kept = reusable({"keep_bf16": keep_bf16})["keep_bf16"]
    plan = choose(models[0], recipe, keep_bf16=kept)
    has_state = any(config.delayed_rules() or config.stochastic_roles for _, config in plan)
    if getattr(plugin, "cpu_ram_efficient_loading", False) and has_state:
        raise NotImplementedError(
            "prepare: cpu_ram_efficient_loading=False is required for recipes with state, got True; "
            "Accelerate takes every buffer for a part of a sharded parameter there"
        )
    quantize_(models[0], recipe, keep_bf16=kept)
    prepared = accelerator.prepare(*objects)
    everything = (prepared,) if len(objects) == 1 else prepared
    # Accelerate wraps an optimizer in one that is asked to step for every microbatch: the inner one counts.
    stepping: list[Any] = [thing for thing in everything if isinstance(thing, Optimizer)]
    if stepping:
        inner = [optimizer.optimizer for optimizer in stepping]
        step_after(inner, next(t for t in everything if isinstance(t, nn.Module)))
    return prepared
