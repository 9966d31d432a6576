"""How delayed scales follow from amaxes, and to which tensor they belong.

A scale is named by its *slot*: a role, or a role and a direction, and of experts a number: ``input``,
``weight_rowwise``, ``weight[3]``.

Shape letters: ``L`` history length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ROLES = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class DelayedRule:
    """How a delayed scale follows from the amaxes of past steps.

    Attributes:
        largest: Largest magnitude of an element.
        margin: Powers of two to stay below it.
        history_length: Steps that count.
        algorithm: ``"max"`` of the history, or its ``"most_recent"`` entry.
    """

    largest: float
    margin: int
    history_length: int
    algorithm: str

    def encode_scale(self, history: Tensor) -> Tensor:
        """Return the scale that follows from a history ``[L]``, fp32; 1 where it has no finite amax but 0."""
        amax = history[-1] if self.algorithm == "most_recent" else history.amax()
        scale = (torch.full_like(amax, self.target) / amax).clamp(
            max=torch.finfo(torch.float32).max
        )
        return torch.where((amax > 0) & (amax < torch.inf), scale, torch.ones_like(scale))

    def continued(self, before: DelayedRule, scale: Tensor, history: Tensor, length: int) -> Tensor:
        """Return a history ``[length]`` with the amaxes of this rule's steps, from the scale and history of another."""
        kept, made = history[-self.history_length :], history.new_zeros(length)
        made[length - len(kept) :] = kept
        if before.history_length == 1:
            # Such a history is empty after each step: the scale alone tells of the last amax.
            made[-1] = torch.where(scale == 1, 0.0, before.target / scale)
        return made

    @property
    def target(self) -> float:
        """The magnitude that an amax is scaled to."""
        return self.largest * 2.0**-self.margin


class StatefulQuantizer(Protocol):
    """The interface of quantizers that a layer's state uses."""

    @property
    def stochastic(self) -> bool:
        """Whether it rounds at random."""

    def delayed_rules(self, slot: str) -> dict[str, DelayedRule]:
        """Return the rules of its delayed scales, by slot."""


def in_words(slots: Iterable[str], rules: Iterable[DelayedRule]) -> list[str]:
    """Return each delayed scale with its rule, for errors and printing."""
    return [f"{slot}: {rule}" for slot, rule in zip(slots, rules, strict=True)]


def same_tensor(slot: str) -> list[str]:
    """Return slots of the same tensor, nearest first: it has one scale for both directions, or one each."""
    of_tensor, bracket, expert = slot.partition("[")
    role = next(role for role in ROLES if of_tensor.startswith(role))
    names = [of_tensor, role, f"{role}_rowwise", f"{role}_columnwise"]
    return [f"{name}{bracket}{expert}" for name in dict.fromkeys(names)]


def required(tensor: Tensor | None) -> Tensor:
    """Return a tensor that must not be None."""
    if tensor is None:
        raise ValueError("LayerState: the recipe of this layer has no delayed scales")
    return tensor
