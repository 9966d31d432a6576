"""Training steps of models of Transformers, each recipe in turns with BF16: wall, host and kernel time, any batch.

Each step is waited for; "in a row" none is but the last. With ``--least`` each step has another length. Dynamo's limits
are the default ones, and an optimizer writes the weights in each step. With torchrun the layers are FSDP2 groups:
``torchrun --nproc-per-node=2 benchmarks/models.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import te_peer
import torch
import torch.distributed as dist
from common import RESULTS, report
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import hybridtensor as ht

VOCABULARY = 32768
DENSE = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCABULARY}
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, **DENSE}
FOUR = {**LLAMA, "num_hidden_layers": 4, "pad_token_id": 0}
EXPERTS = {"experts_implementation": "grouped_mm"}
MODELS = {
    "Llama 1.2 B": ("Llama", LLAMA),
    "Llama, 8 blocks of 8 B": ("Llama", {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    }),
    "Qwen3-MoE": ("Qwen3Moe", {
        **LLAMA, "intermediate_size": 6144, "num_hidden_layers": 6, "moe_intermediate_size": 1408, "num_experts": 16,
        "num_experts_per_tok": 4, **EXPERTS,
    }),
    "Qwen3, 4 blocks": ("Qwen3", FOUR),
    "Gemma 2, 4 blocks": ("Gemma2", FOUR),
    "Phi-3, 4 blocks": ("Phi3", FOUR),
    "OLMo 2, 4 blocks": ("Olmo2", FOUR),
    "Command R, 4 blocks": ("Cohere", FOUR),
    "Mixtral, 4 blocks": ("Mixtral", {
        **FOUR, "intermediate_size": 4096, "num_local_experts": 8, "num_experts_per_tok": 2, **EXPERTS,
    }),
    "GPT-OSS, 4 blocks": ("GptOss", {
        **FOUR, "intermediate_size": 2048, "num_local_experts": 16, "num_experts_per_tok": 4,
        "layer_types": ["full_attention"] * 4, **EXPERTS,
    }),
    "DeepSeek-V3, 4 blocks": ("DeepseekV3", {
        **FOUR, "num_key_value_heads": 32, "q_lora_rank": 512, "kv_lora_rank": 512, "moe_intermediate_size": 1024,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        **EXPERTS,
    }),
    "tiny": ("Llama", {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 128,
    }),
}  # fmt: skip
MODES = ["eager", "blocks", "whole", "reduce-overhead", "captured"]
"""How the model is compiled: not, block by block, as one graph, or with CUDA graphs; on one GPU also eager steps, with
that of the optimizer, in one CUDA graph. (Transformers' attention guards on captures: blocks would compile in one.)"""
RECIPES = ["fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "torchao tensorwise", *te_peer.names()]
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ITSELF = "BF16"


class Case(NamedTuple):
    """What is trained.

    Attributes:
        model: One of ``MODELS``.
        tokens: In a step.
        mode: One of ``MODES``.
        device: Of this rank.
        least: Of tokens in a step, which has another length each time up to ``tokens``; 0 is always ``tokens``.
        sequence: Tokens of the longest sequence: attention, the same in each recipe, takes longer with longer ones.
    """

    model: str
    tokens: int
    mode: str
    device: torch.device
    least: int = 0
    sequence: int = 2048

    def lengths(self) -> Iterator[int]:
        """Yield the tokens of each step, the same in every run."""
        drawn = random.Random(0)
        while True:
            yield drawn.randint(self.least, self.tokens) if self.least else self.tokens


class Training:
    """A model with its optimizer.

    Args:
        case: What is trained.
        recipe: A recipe, or a peer's name, or ``ITSELF``.

    Attributes:
        first_steps: Seconds that the first four steps took.
        step: Trains one step.
    """

    def __init__(self, case: Case, recipe: str) -> None:
        import transformers

        kind, size = MODELS[case.model]
        config = getattr(transformers, f"{kind}Config")(**size, max_position_embeddings=max(case.tokens, 2048))
        torch.manual_seed(0)
        # Its own classes: what one model compiles must not count against Dynamo's limit of graphs of another.
        classes = importlib.reload(sys.modules[getattr(transformers, f"{kind}ForCausalLM").__module__])
        with case.device:
            self._model = getattr(classes, f"{kind}ForCausalLM")(config)
        if not dist.is_initialized():
            self._model.bfloat16()
        self._recipe, self._advance = recipe, convert(self._model.model, recipe)
        compiling = {"mode": "reduce-overhead"} if case.mode == "reduce-overhead" else {}
        for block in self._model.model.layers:
            if case.mode == "blocks":
                block.compile(dynamic=True if case.least else None)
            if dist.is_initialized():
                fully_shard(block, mp_policy=POLICY)
        if dist.is_initialized():
            fully_shard(self._model, mp_policy=POLICY)
            if recipe != ITSELF and not is_of_a_peer(recipe):
                ht.distributed.expect_recompute_(self._model, False)
        if case.mode in ("whole", "reduce-overhead"):
            self._model.model.compile(**compiling)
        fused, captured = case.device.type == "cuda", case.mode == "captured"
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=fused, capturable=captured)
        longest = case.tokens if case.least else min(case.tokens, case.sequence)
        self._ids = torch.randint(config.vocab_size, (case.tokens // longest, longest), device=case.device)
        self._lengths = case.lengths()
        begin, side = time.perf_counter(), torch.cuda.Stream() if captured else None
        with torch.cuda.stream(side):  # where torch asks for steps before a capture
            for _ in range(4):
                self._train()
        wait(case.device)
        self.first_steps = time.perf_counter() - begin
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._train()
        self.step: Callable[[], None] = graph.replay if captured else self._train

    def _train(self) -> None:
        """Train one step."""
        peer = self._recipe in te_peer.RECIPES
        with te_peer.autocast(self._recipe) if peer else contextlib.nullcontext():
            ids = self._ids[:, : next(self._lengths)]
            loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._advance is not None:
            self._advance()


def is_of_a_peer(recipe: str) -> bool:
    """Return whether a recipe is another library's."""
    return recipe in te_peer.RECIPES or recipe.startswith("torchao")


def convert(model: nn.Module, recipe: str) -> Callable[[], object] | None:
    """Convert a decoder; return what is called after each step of the optimizer, if anything is."""
    if recipe in te_peer.RECIPES:
        te_peer.convert(model)
    elif recipe.startswith("torchao"):
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

        gathers = dist.is_initialized() and recipe.endswith("tensorwise")
        config = Float8LinearConfig.from_recipe_name(recipe.split()[1])
        if gathers:
            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        routers = lambda module, name: "gate." not in f"{name}."  # noqa: E731
        convert_to_float8_training(model, config=config, module_filter_fn=routers)
        if gathers:
            return lambda: precompute_float8_dynamic_scale_for_fsdp(model)
    elif recipe != ITSELF:
        ht.quantize_(model, recipe)
        return lambda: ht.step_(model)
    return None


def wait(device: torch.device) -> None:
    """Wait for the device, and for other ranks."""
    if dist.is_initialized():
        dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return how long a step takes, and its host."""
    wait(device)
    begin = time.perf_counter()
    step()
    host = time.perf_counter()
    wait(device)
    return 1e3 * (time.perf_counter() - begin), 1e3 * (host - begin)


def in_a_row(step: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Return the milliseconds of a step among several that nobody waits between."""

    def several() -> None:
        for _ in range(repeats):
            step()

    return milliseconds(several, device)[0] / repeats


def kernels(step: Callable[[], None], device: torch.device) -> tuple[float, int]:
    """Return the milliseconds of a step's kernels, and how many there are."""
    if device.type != "cuda":
        return float("nan"), 0
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        wait(device)
    of_device = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    return sum(event.device_time_total for event in of_device) / 1e3, len(of_device)


def measure(case: Case, recipe: str, repeats: int) -> dict[str, Any]:
    """Return one row: a recipe in turns with BF16."""
    torch._dynamo.reset()  # else graphs of recipes before count against the limits of this one
    made = {name: Training(case, name) for name in (ITSELF, recipe)}
    gc.collect()  # the compiler's garbage, which Python would collect in some step, in 0.3 s
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _ in range(repeats):
        for name, training in made.items():
            torch.compiler.cudagraph_mark_step_begin()
            times[name].append(milliseconds(training.step, case.device))
    wall, host = ({n: statistics.median(t[i] for t in times[n]) for n in made} for i in (0, 1))
    rows = {name: in_a_row(training.step, repeats, case.device) for name, training in made.items()}
    of_kernels, launches = kernels(made[recipe].step, case.device)
    row = {
        "model": case.model, "tokens": case.tokens, "sequence": min(case.tokens, case.sequence), "mode": case.mode,
        "recipe": recipe, "bf16 ms": wall[ITSELF], "ms": wall[recipe], "of bf16": wall[ITSELF] / wall[recipe],
        "bf16 host ms": host[ITSELF], "host ms": host[recipe], "longest ms": max(wall for wall, _ in times[recipe]),
        "of bf16 in a row": rows[ITSELF] / rows[recipe], "kernels ms": of_kernels, "launches": launches,
        "first 4 steps s": made[recipe].first_steps, "bf16 first s": made[ITSELF].first_steps,
    }  # fmt: skip
    if case.device.type == "cuda" and case.mode != "captured":  # whose memory is allocated once
        row |= {f"{name} peak GiB": peak_of(made, key) for name, key in (("bf16", ITSELF), ("", recipe))}
    return row


def peak_of(made: dict[str, Training], name: str) -> float:
    """Return the peak memory of a step in GiB, without the other model's."""
    others = sum(
        t.nbytes for key, other in made.items() if key != name for t in tensors_of(other) if t.device.type == "cuda"
    )
    torch.cuda.reset_peak_memory_stats()
    made[name].step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - others) / 2**30


def tensors_of(training: Training) -> list[torch.Tensor]:
    """Return parameters and states of the optimizer, this rank's parts."""
    states = training._optimizer.state.values()
    found = [*training._model.parameters(), *(v for s in states for v in s.values() if isinstance(v, torch.Tensor))]
    return [t.to_local() if hasattr(t, "to_local") else t for t in found]


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--out", default=RESULTS, type=type(RESULTS), help="folder for the JSON file")
    parser.add_argument("--models", help="of them, separated by ';'", default=";".join(list(MODELS)[:3]))
    parser.add_argument("--tokens", help="separated by ','", default="2048,8192,32768")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of the longest sequence, unless --least")
    parser.add_argument("--least", type=int, default=0, help="tokens; each step has another length up to --tokens then")
    parser.add_argument("--modes", help="separated by ','", default="")
    parser.add_argument("--recipes", help="separated by ','", default=",".join(RECIPES))
    return parser.parse_args()


def main() -> None:
    """Measure all cases."""
    asked, ranks = options(), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(asked.device)
    if ranks > 1:
        device = torch.device(asked.device, int(os.environ["LOCAL_RANK"])) if asked.device == "cuda" else device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows = []
    for model in asked.models.split(";"):
        for tokens in map(int, asked.tokens.split(",")):
            for mode in asked.modes.split(",") if asked.modes else MODES[: None if ranks == 1 else 4]:
                for recipe in asked.recipes.split(","):
                    gc.collect()
                    case = Case(model, tokens, mode, device, asked.least, asked.sequence)
                    rows.append(measure(case, recipe, asked.repeats))
                    if not dist.is_initialized() or dist.get_rank() == 0:
                        print(rows[-1], flush=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        name = "lengths" if asked.least else "models"
        report(name if ranks == 1 else f"{name}_{ranks}_ranks", rows, asked)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
