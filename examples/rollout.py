"""Policy gradients with a sampler of its own: what it costs if that computes another function than training does.

    python examples/rollout.py

A small policy learns to continue sequences by a rule. Tokens are drawn by a sampler that stands for an inference
engine: it has nothing but the tensors that ``hybridtensor.inference_tensors`` gives, and its own products in FP8 by
row. For every token, training works out the probability anew; what lies between is the mismatch that importance
sampling would have to correct, and here is not corrected. On a CPU, in some minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridtensor as ht

VOCABULARY, WIDTH, HIDDEN, CONTEXT = 32, 64, 256, 2
BATCH, LENGTH = 64, 16
LAYOUT = "ct_fp8_row"
_EXPLORE = 0.03  # weight of the entropy, without which a policy settles on few tokens
# What is trained, and whose weights the sampler has
RUNS = [
    ("bf16", "bf16 export, quantized"),
    ("fp8_rowwise", "bf16 export, quantized"),
    ("fp8_rowwise+bf16_weight_values", "bf16 export, quantized"),
    ("fp8_rowwise", "own export"),
    ("fp8_rowwise+dequantized", "own export"),
]


class Policy(nn.Module):
    """Logits of the next token, from the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(CONTEXT * WIDTH, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, last: Tensor) -> Tensor:
        """Map tokens ``[batch, CONTEXT]`` to logits ``[batch, VOCABULARY]``."""
        x = self.embed(last).flatten(1).bfloat16()  # what engines have of embeddings
        return self.out(F.gelu(self.middle(F.gelu(self.up(x)))))


class Sampler:
    """An engine: weights in FP8 with a scale per row, inputs quantized per token, sums in fp32."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors}

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return the product of tokens with one layer's weight."""
        weight, scale, bias = (self.tensors[f"{name}.{part}"] for part in ("weight", "weight_scale", "bias"))
        amax = x.float().abs().amax(-1, keepdim=True)
        encode = torch.where(amax > 0, torch.full_like(amax, 448) / amax, 1.0)  # 448 / amax is 448 * (1 / amax)
        codes = (x.float() * encode).clamp(-448, 448).to(torch.float8_e4m3fn)
        total = codes.float() @ weight.float().t()
        return (total * (encode.reciprocal() * scale.t()) + bias).bfloat16()

    def logits(self, last: Tensor) -> Tensor:
        """Return what ``Policy.forward`` does."""
        x = self.tensors["embed.weight"][last].flatten(1)
        return self.linear("out", F.gelu(self.linear("middle", F.gelu(self.linear("up", x)))))


def weights(policy: Policy, whose: str) -> Iterable[tuple[str, Tensor]]:
    """Return what is sent to the sampler."""
    if whose == "own export":
        return ht.inference_tensors(policy, LAYOUT)
    plain = ht.plain_(copy.deepcopy(policy)).bfloat16()
    return ht.inference_tensors(ht.quantize_(plain, "fp8_rowwise"), LAYOUT)


def rewards(tokens: Tensor) -> Tensor:
    """Return 1 where a token follows from the two before it, ``[batch, LENGTH]``."""
    before, last = tokens[:, :-CONTEXT], tokens[:, 1:-1]
    return (tokens[:, CONTEXT:] == (3 * last + before) % VOCABULARY).float()


def rollout(sampler: Sampler, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sampled tokens ``[batch, CONTEXT + LENGTH]``, and the log-probability of each ``[batch, LENGTH]``."""
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=generator)
    found = []
    for _ in range(LENGTH):
        log_p = sampler.logits(tokens[:, -CONTEXT:]).float().log_softmax(-1)
        drawn = torch.multinomial(log_p.exp(), 1, generator=generator)
        found.append(log_p.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], 1)
    return tokens, torch.cat(found, 1)


def train(recipe: str, whose: str, steps: int) -> dict[str, Any]:
    """Train a policy, and return what it reached and how far the sampler was from it."""
    torch.manual_seed(0)
    policy = Policy()
    if recipe != "bf16":
        ht.quantize_(policy, recipe)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    k3, largest, reached = [], 0.0, []
    for _ in range(steps):
        with torch.no_grad():
            tokens, sampled = rollout(Sampler(weights(policy, whose)), generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # in batches as the sampler's: sums in the same order
            steps_of = [policy(tokens[:, t : t + CONTEXT]) for t in range(LENGTH)]
        drawn = tokens[:, CONTEXT:, None]
        log_all = torch.stack(steps_of, 1).float().log_softmax(-1)
        log_p = log_all.gather(2, drawn).squeeze(2)
        log_ratio = (log_p.detach() - sampled).double()
        k3.append((log_ratio.exp() - 1 - log_ratio).mean().item())
        largest = max(largest, log_ratio.abs().max().item())
        reward = rewards(tokens)
        reached.append(reward.mean().item())
        entropy = -(log_all.exp() * log_all).sum(-1).mean()
        loss = -((reward - reward.mean()) * log_p).mean() - _EXPLORE * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = reached[-max(steps // 10, 1) :]
    return {
        "training": recipe,
        "sampler": whose,
        "k3": sum(k3) / steps,
        "largest |log ratio|": largest,
        "reward": sum(last) / len(last),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    rows = []
    for recipe, whose in RUNS:
        rows.append(train(recipe, whose, options.steps))
        print("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else value for key, value in rows[-1].items()))
    if options.out is not None:
        environment = {"device": "cpu", "torch": torch.__version__, "steps": options.steps}
        options.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
