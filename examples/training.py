"""Train one model by one recipe: loop, checkpoint, what is saved for backward."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from data import Bytes
from model import Size, Transformer
from ranks import Rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.testing import SavedTensors, saved_by, saved_for_backward

BASELINE = "bf16"
VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Plan:
    """Everything that a run depends on beside its recipe."""

    size: Size
    steps: int
    seed: int
    device: str
    learning_rate: float
    compile: bool
    rank: Rank = Rank()  # noqa: RUF009  a frozen value

    def rate(self, step: int) -> float:
        """Return the learning rate: a tenth of the steps up, then a cosine down to a tenth."""
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


@dataclass
class Result:
    """What a run gave."""

    recipe: str
    config: str
    fingerprint: str | None
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    tokens_per_second: float = 0.0
    activation_bytes: int = 0
    linear_input_bytes: int = 0
    saved_weights: str | None = None


class Run:
    """A model, its optimizer and its text; ``measure`` counts what is saved for backward before it is sharded."""

    def __init__(self, recipe: str, plan: Plan, data: Bytes, *, measure: bool = False) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.data = plan, data
        model = Transformer(plan.size).to(plan.device)
        config = None
        if recipe != BASELINE:
            ht.quantize_(model, recipe)  # one of two lines about quantization
            config = ht.recipes.from_name(recipe)
        self.result = Result(recipe, str(config or BASELINE), config.fingerprint() if config else None)
        self.model = model
        if measure:
            self.measure_saved()
        if plan.compile and plan.rank.sharded:  # FSDP2 gathers between the blocks
            for block in model.blocks:
                block.compile()
        plan.rank.shard(model, torch.device(plan.device))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95))
        self.forward: Callable[..., Tensor] = torch.compile(model) if plan.compile and not plan.rank.sharded else model

    def loss(self, batch: tuple[Tensor, Tensor], forward: Callable[..., Tensor] | None = None) -> Tensor:
        """Return the loss of this rank's rows of one batch, computed in bfloat16 from fp32 weights."""
        tokens, targets = (self.plan.rank.part(t).to(self.plan.device, non_blocking=True) for t in batch)
        with torch.autocast(torch.device(self.plan.device).type, torch.bfloat16):
            return (forward or self.forward)(tokens, targets)

    def train(self, first: int, last: int, report: Callable[[int, float, float], None]) -> None:
        """Run steps ``first`` to ``last``, exclusive; ``report`` gets step, loss and tokens per second."""
        started, size = time.perf_counter(), self.plan.size
        for step in range(first, last):
            for group in self.optimizer.param_groups:
                group["lr"] = self.plan.rate(step)
            self.optimizer.zero_grad()
            loss = self.loss(self.data.training_batch(step))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            ht.step_(self.model)  # for recipes with state: delayed scaling, random rounding
            self.result.losses.append(self.plan.rank.mean(loss))
            rate = (step + 1 - first) * size.batch * size.context / (time.perf_counter() - started)
            report(step, self.result.losses[-1], rate)

    @torch.no_grad()
    def validate(self, step: int) -> float:
        """Return the validation loss in nats per byte, and note it."""
        batches = self.data.validation_batches(VALIDATION_BATCHES)
        loss = sum(self.plan.rank.mean(self.loss(batch)) for batch in batches) / len(batches)
        self.result.validation.append((step, loss))
        return loss

    def measure_saved(self) -> None:
        """Count the activation bytes that one forward pass saves: in all, and for the inputs of linear layers."""
        batch = self.data.training_batch(0)
        self.loss(batch, self.model)  # fills the weights' caches
        with saved_for_backward() as saved:
            self.loss(batch, self.model)
        self.result.activation_bytes = self._activations(saved).nbytes(without=self.model.parameters())
        with saved_by(m for block in self.model.blocks for m in block.modules() if isinstance(m, nn.Linear)) as saved:
            self.loss(batch, self.model)
        self.result.linear_input_bytes = self._activations(saved).nbytes(without=self.model.parameters())

    def _activations(self, saved: SavedTensors) -> SavedTensors:
        """Leave out autocast's bf16 copies of weights."""
        return SavedTensors([t for t in saved.tensors if not _is_cast_of_leaf(t)])

    def save(self, directory: Path, step: int) -> None:
        """Write a checkpoint: plain tensors, which a model without quantization could load too."""
        checkpoint.save(directory, step, {"model": self.model, "optimizer": self.optimizer})
        self.result.saved_weights = self.digest()

    def load(self, directory: Path) -> int:
        """Read a checkpoint that any number of ranks wrote, and return its step."""
        return checkpoint.load(directory, {"model": self.model, "optimizer": self.optimizer})

    @torch.no_grad()
    def digest(self) -> str:
        """Return a digest of weights and quantization state, the same on any number of ranks if their bits are."""
        digest = hashlib.sha256()
        for name, value in checkpoint.plain(self.model.state_dict()).items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(name.encode() + whole.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()


def _is_cast_of_leaf(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter, seen through casts and transposes only."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("ToCopyBackward0", "TBackward0"):
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"
