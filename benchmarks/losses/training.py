"""One training run of a byte-level transformer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import hybridtensor as ht
from losses.recipes import Candidate
from losses.text import Batches

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
from model import SIZES, Size, Transformer

MODELS = {
    "tiny": dataclasses.replace(SIZES["tiny"], layers=3),  # one is between the first and the last
    "113M": Size(dim=1536, layers=4, heads=24, context=256, batch=128, learning_rate=5e-4),
}
WARM_UP, VALIDATION_BATCHES = 100, 16
SET_UP_STEPS = 5  # in which code is compiled: speeds are of those after them
HELD_OUT_SEED = 2**40  # no run's


class OutOfTime(Exception):  # noqa: N818
    """A run would end too late."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What two runs must share to be compared.

    Attributes:
        model: One of ``MODELS``.
        steps: How many.
        tokens: Of a step.
        compiled: Whether blocks are.
        text: Digest of the text.
    """

    model: str
    steps: int
    tokens: int
    compiled: bool
    text: str

    @property
    def size(self) -> Size:
        """The model's shape, and that of a batch."""
        size = MODELS[self.model]
        return dataclasses.replace(size, batch=self.tokens // size.context)

    @property
    def digest(self) -> str:
        """Six hex digits, for names of files."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:6]

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then a cosine down to a tenth."""
        peak, warm_up = MODELS[self.model].learning_rate, min(WARM_UP, self.steps // 4 + 1)
        if step < warm_up:
            return peak * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


class Outcome(NamedTuple):
    """What a run gave.

    Attributes:
        losses: Of each step, nats per byte.
        norms: Of each step's gradient, before clipping.
        validation: Loss on held-out text.
        set_up_seconds: Of the first steps, with the making of the model.
        seconds: Of the whole run.
        tokens_per_second: After the first steps.
    """

    losses: list[float]
    norms: list[float]
    validation: float
    set_up_seconds: float
    seconds: float
    tokens_per_second: float


class Learner:
    """A model that is converted and compiled once, and begins again for every run."""

    def __init__(self, candidate: Candidate, plan: Plan, device: str) -> None:
        self.size, self.device, self.disturbed = plan.size, device, candidate.disturbed
        self.model = plain_model(self.size, 0, device)
        self.stages = candidate.build(self.model, plan.steps)
        if self.stages:
            ht.quantize_(self.model, self.stages[0])
        if plan.compiled:
            for block in self.model.blocks:
                block.compile(dynamic=False)

    def begin(self, seed: int) -> nn.Module:
        """Return the model with the initial weights of a seed; its recipe remembers nothing of runs before."""
        self.enter(0)
        fresh = plain_model(self.size, seed, self.device)
        if self.disturbed:
            disturb(fresh, seed, self.disturbed)
        self.model.load_state_dict(fresh.state_dict())
        return self.model

    def enter(self, step: int) -> None:
        """Change the recipe, if another one begins with this step."""
        if len(self.stages) > 1 and step in self.stages:
            ht.set_config_(self.model, self.stages[step])


class _Clock:
    """When a run will end, looked at a few times in a run."""

    def __init__(self, steps: int, until: float) -> None:
        self.steps, self.until = steps, until
        self.first = SET_UP_STEPS if steps > SET_UP_STEPS else 0
        self.began, self.set_up = time.perf_counter(), 0.0

    def elapsed(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self.began

    def seconds_per_step(self, done: int) -> float:
        """Return what a step takes, after those in which code is compiled."""
        return (self.elapsed() - self.set_up) / (done - self.first)

    def is_due(self, step: int) -> bool:
        """Return whether to look: after the first steps, and after every tenth of all."""
        done = step + 1
        return done == self.first or (done > self.first and done % -(-self.steps // 10) == 0)

    def note(self, step: int) -> None:
        """Look, all steps so far being done.

        Raises:
            OutOfTime: If the run would end too late.
        """
        done, ends = step + 1, time.time()
        if done == self.first:
            self.set_up = self.elapsed()
        else:
            ends += (self.steps - done) * self.seconds_per_step(done)
        if ends > self.until:
            raise OutOfTime


class Trainer:
    """What a process keeps between its runs: the text on the device, and a model for each recipe.

    Args:
        plan: Of all runs.
        folder: Where the text is.
        device: Where they run.
    """

    def __init__(self, plan: Plan, folder: Path, device: str) -> None:
        size = plan.size
        self.plan, self.device = plan, device
        self.train_text, self.held_out = (
            Batches(folder / f"{part}.bin", size.batch, size.context, device) for part in ("train", "validation")
        )
        self._learners: dict[str, Learner] = {}

    def knows(self, name: str) -> bool:
        """Return whether a recipe has been trained by before: its model is there, compiled."""
        return name in self._learners

    def model(self, candidate: Candidate) -> nn.Module:
        """Return the model of a recipe as the last run left it."""
        return self._learners[candidate.name].model

    def train(self, candidate: Candidate, seed: int, until: float = math.inf) -> Outcome:
        """Train once.

        Args:
            candidate: What by.
            seed: Of initial weights and batches.
            until: When to give up, by ``time.time()``.

        Raises:
            OutOfTime: If the run would end later.
        """
        clock = _Clock(self.plan.steps, until)
        if not self.knows(candidate.name):
            torch._dynamo.reset()  # each recipe compiles as in a process of its own
            self._learners[candidate.name] = Learner(candidate, self.plan, self.device)
        learner = self._learners[candidate.name]
        model = learner.begin(seed)
        losses, norms = torch.zeros(2, self.plan.steps, device=self.device)
        with contextlib.closing(self._steps(learner, seed)) as steps:
            for step, (loss, norm) in enumerate(steps):
                losses[step], norms[step] = loss, norm
                if clock.is_due(step):
                    loss.item()  # waits for the device
                    clock.note(step)
        values = losses.tolist()
        speed = self.plan.tokens / clock.seconds_per_step(self.plan.steps)
        validation = self._validate(model)
        return Outcome(values, norms.tolist(), validation, clock.set_up, clock.elapsed(), speed)

    def _steps(self, learner: Learner, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Train, and yield loss and norm of the gradient of each step; nothing waits for the device."""
        model = learner.model
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        try:
            for step, batch in enumerate(self.train_text.draw(seed, self.plan.steps)):
                learner.enter(step)
                for group in optimizer.param_groups:
                    group["lr"] = self.plan.rate(step)
                loss = loss_of(model, batch)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                ht.step_(model)
                yield loss.detach(), norm.detach()
        finally:
            optimizer.zero_grad()

    def _validate(self, model: nn.Module) -> float:
        """Return the loss on held-out text, the same for all runs; by the code that training compiled."""
        batches = self.held_out.draw(HELD_OUT_SEED, VALIDATION_BATCHES)
        return float(torch.stack([loss_of(model, batch).detach() for batch in batches]).mean())


def plain_model(size: Size, seed: int, device: str) -> nn.Module:
    """Return a model with the initial weights of a seed."""
    torch.manual_seed(seed)
    with torch.device(device):
        return Transformer(size)


@torch.no_grad()
def disturb(model: nn.Module, seed: int, draw: int) -> None:
    """Change every weight by about a millionth of itself; each ``draw``, from 1 on, differently."""
    torch.manual_seed(seed + draw * 2**20)  # not that of the weights
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss in nats per byte, computed in bfloat16 from fp32 weights."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        loss: Tensor = model(*batch)
    return loss
