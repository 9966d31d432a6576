"""Random training programs: what people write with quantized models, drawn from a seed.

A program runs *as written*, and *conservatively*: eager, nothing shared, no face kept, nothing checkpointed, no hooks
on saved tensors. Both give the same bits, or a mechanism that should only save time or memory changed a number.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from any_layer import ANY_LAYER
from experts import Mixture
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht

WIDTH = 64
RECIPES = [
    *ANY_LAYER, "fp8_delayed+most_recent", "fp8/fp8_rowwise/bf16", "bf16/mxfp8/fp8", "fp8+save_original_input",
    "fp8_delayed/bf16/fp8", "fp8_delayed+dequantized", "nvfp4+four_over_six", "mxfp4",
]  # fmt: skip
# Ranks round their own rows at random.
ROUNDED_ALIKE = [name for name in RECIPES if not ht.recipes.from_name(name).stochastic]
SCALED_BY_AMAX = ["fp8", "nvfp4"]  # weights of several layers may have a common scale


class Mlp(nn.Module):
    """A gated unit, whose siblings share their input."""

    def __init__(self, bias, inplace):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=bias) for _ in range(2))
        self.down, self.inplace = nn.Linear(2 * WIDTH, WIDTH, bias=bias), inplace

    def forward(self, x):
        gate = F.relu(self.gate(x), inplace=True) if self.inplace else F.silu(self.gate(x))
        return self.down(gate * self.up(x))


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x):
        heads = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, bias):
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture = Mixture(count=4, width=WIDTH, hidden=WIDTH)

    def forward(self, x):
        return self.mixture(x.flatten(0, 1)).view(x.shape)


class Block(nn.Module):
    """A module in a residual stream."""

    def __init__(self, inner, norm):
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Stack(nn.Sequential):
    """Blocks, each of which may be checkpointed."""

    reentrant = None

    def forward(self, x):
        for block in self:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@dataclass
class Program:
    """What a seed says.

    Attributes:
        seed: The seed.
        recipe: What the model is quantized by.
        kinds: Of its blocks.
        options: What surrounds it, by name.
        events: What happens in each step, by name.
    """

    seed: int
    recipe: str
    kinds: list[tuple[str, bool, bool]]
    options: dict[str, object]
    events: list[list[str]] = field(default_factory=list)

    @classmethod
    def draw(cls, seed, *, ranks=1, steps=3):
        """Return the program of a seed; with fewer steps its last ones are left out."""
        rng = random.Random(seed)
        recipe = rng.choice(RECIPES if ranks == 1 else ROUNDED_ALIKE)
        blocks = ["mlp", "attention", "linear", "tied"] + ["experts"] * (ranks == 1)
        kinds = [(rng.choice(blocks), rng.random() < 0.5, rng.random() < 0.5) for _ in range(rng.randint(1, 3))]
        options = {
            "dtype": rng.choice([torch.bfloat16, torch.float32]),
            # what routes tokens in fp32 is summed up in another order where torch compiles it
            "compiled": rng.random() < 0.25 and "experts" not in [kind for kind, *_ in kinds],
            "checkpointed": rng.choice([None, None, None, True, False]),  # use_reentrant
            "copied": rng.random() < 0.25,
            "frozen": rng.random() < 0.25,
            "persistent": ranks == 1 and rng.random() < 0.3,
            "common_scale": recipe in SCALED_BY_AMAX and ranks == 1 and rng.random() < 0.5,
            "tokens": rng.choice([32, 17, 64]),
            "small": rng.random() < 0.3,
            "optimizer": rng.choice(["sgd", "adamw", "foreach"]),
            "filled": rng.random() < 0.2,
        }
        events = [
            [name for name, chance in EVENTS.items() if rng.random() < chance and (ranks == 1 or name in ON_RANKS)]
            for _ in range(3)
        ]
        return cls(seed, recipe, kinds, options, events[:steps])

    @property
    def features(self):
        """What is drawn, as pairs of names and values, without order and number."""
        kinds = {("block", kind) for kind, _, _ in self.kinds}
        events = {("event", name) for names in self.events for name in names}
        return kinds | events | {("recipe", self.recipe), *((name, str(value)) for name, value in self.options.items())}

    def __str__(self):
        chosen = ", ".join(f"{k}={v}" for k, v in self.options.items() if v)
        return f"seed {self.seed}: {self.recipe}; {self.kinds}; {chosen}; {self.events}"


EVENTS = {
    "microbatches": 0.4, "evaluation": 0.3, "evaluation with gradients": 0.2, "average": 0.2, "load": 0.15,
    "change": 0.15, "skip": 0.1,
}  # fmt: skip
ON_RANKS = ("microbatches", "evaluation")


def build(program, device):
    """Return the model of a program."""
    torch.manual_seed(program.seed)
    made = []
    for kind, bias, flag in program.kinds:
        inner = {
            "mlp": lambda bias=bias, flag=flag: Mlp(bias, flag), "attention": lambda bias=bias: Attention(bias),
            "linear": lambda bias=bias: nn.Linear(WIDTH, WIDTH, bias=bias), "tied": lambda bias=bias: Tied(bias),
            "experts": Routed,
        }[kind]()  # fmt: skip
        made.append(Block(inner, nn.RMSNorm(WIDTH) if flag else nn.LayerNorm(WIDTH)))
    model = Stack(*made).to(device, program.options["dtype"])
    if program.options["frozen"]:
        for p in made[0].parameters():
            p.requires_grad_(False)
    return model


def common_scales(program):
    """Return the siblings whose weights have a common scale."""
    groups = {"mlp": ("gate", "up"), "attention": ("q", "k", "v")}
    found = []
    for index, (kind, _, _) in enumerate(program.kinds):
        found += [[f"{index}.inner.{name}" for name in groups[kind]]] if kind in groups else []
    return found


def config_of(program, recipe, conservative):
    """Return the config of a recipe; conservatively no face of a high-precision weight is kept."""
    config = ht.recipes.from_name(recipe)
    formats = config.weight.rowwise_format, config.weight.columnwise_format
    if not conservative or program.options["persistent"] or all(fmt.is_identity for fmt in formats):
        return config
    return dataclasses.replace(config, keep_faces="never")


def inputs(program, step, part, device):
    generator = torch.Generator().manual_seed(1000 * program.seed + 10 * step + part)
    x = torch.randn(2, program.options["tokens"], WIDTH, generator=generator)
    return x.to(device, program.options["dtype"])


class Run:
    """A program that runs.

    Args:
        program: The program.
        conservative: Whether it runs conservatively.
        device: Where.
        wrap: What is done to the quantized model, such as ``fully_shard``.
    """

    def __init__(self, program, *, conservative, device="cpu", wrap=None):
        self.program, self.conservative, self.device = program, conservative, device
        options = program.options
        self.model = build(program, device)
        groups = common_scales(program) if options["common_scale"] else ()
        config = config_of(program, program.recipe, conservative)
        ht.quantize_(self.model, config, persistent=bool(options["persistent"]), common_scale=groups)
        if wrap is not None:
            wrap(self.model)
        if options["compiled"] and not conservative:
            torch._dynamo.reset()
            for block in self.model:
                block.compile(backend="aot_eager")
        self.optimizer = self._optimizer()
        self.average = None

    def _optimizer(self):
        kind = self.program.options["optimizer"]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        trained = trained or [nn.Parameter(torch.zeros(1, device=self.device))]
        options = {"lr": 1e-2, "foreach": kind == "foreach"}
        optimizer = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
        if self.program.options["persistent"]:
            return ht.optim.MasterWeights(optimizer, trained, **options)
        return optimizer(trained, **options)

    def forward(self, x):
        """Run the model as the program says."""
        self.model.reentrant = None if self.conservative else self.program.options["checkpointed"]
        try:
            return self.model(x)
        finally:
            self.model.reentrant = None

    def around(self):
        """Return the context of each forward."""
        stack = contextlib.ExitStack()
        if self.conservative:
            stack.enter_context(ht.share_inputs(False))
        elif self.program.options["copied"]:
            stack.enter_context(saved_tensors_hooks(lambda t: t.clone(), lambda t: t))
        return stack

    def steps(self):
        """Run all steps, and return what they computed."""
        found = []
        for step, events in enumerate(self.program.events):
            found += self.step(step, events)
        found += [value.clone() for value in ht.plain_state_dict(self.model).values()]
        return found + [buffer.clone() for buffer in self.model.buffers()]

    def step(self, step, events):
        """Run one step, and return losses and gradients."""
        found = []
        if "load" in events:
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        if "change" in events and not self.program.options["common_scale"]:
            recipe = random.Random(self.program.seed + step).choice(RECIPES)
            ht.set_config_(self.model, config_of(self.program, recipe, self.conservative))
        for part in range(3 if "microbatches" in events else 1):
            x = inputs(self.program, step, part, self.device).requires_grad_()
            with self.around():
                y = self.forward(x)
            (y.float().square().mean() * (1e-6 if self.program.options["small"] else 1.0)).backward()
            found += [y.detach().clone(), x.grad.clone()]
            if "evaluation" in events:
                found.append(self.evaluated(step))
            if "evaluation with gradients" in events:
                with self.around():
                    found.append(
                        self.forward(100 * inputs(self.program, step, 8, self.device).requires_grad_()).detach()
                    )
        found += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        if "skip" not in events:
            self.optimizer.step()
        ht.step_(self.model, skipped="skip" in events)
        self.optimizer.zero_grad()
        if "average" in events:
            self.swap_average(found, step)
        return found

    def evaluated(self, step):
        """Return an output of evaluation."""
        with torch.no_grad():
            return self.model(inputs(self.program, step, 9, self.device)).clone()

    def swap_average(self, found, step):
        """Evaluate with averaged weights, and go on with those of training."""
        values = {name: v.clone() for name, v in ht.plain_state_dict(self.model).items() if v.is_floating_point()}
        if self.average is None:
            self.average = values
            return
        for name, value in values.items():
            if name in self.average and self.average[name].shape == value.shape:
                self.average[name].lerp_(value.to(self.average[name].dtype), 0.5)
        if self.program.options["persistent"]:
            return
        trained = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.average[name])
            found.append(self.evaluated(step))
            for name, p in self.model.named_parameters():
                p.copy_(trained[name])


@contextlib.contextmanager
def filled():
    """Fill memory that nobody wrote with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def difference(program, device="cpu", wrap=None):
    """Return where the two runs of a program differ, or None."""
    with filled() if program.options["filled"] else contextlib.nullcontext():
        ours = Run(program, conservative=False, device=device, wrap=wrap).steps()
    expected = Run(program, conservative=True, device=device).steps()
    if len(ours) != len(expected):
        return f"{len(ours)} results, conservatively {len(expected)}"
    for index, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        if not torch.equal(mine.nan_to_num(nan=123.0), theirs.nan_to_num(nan=123.0)):
            return f"result {index} of {len(ours)} differs in {int((mine != theirs).sum())} of {mine.numel()} elements"
    return None
