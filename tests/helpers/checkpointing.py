"""Small models whose training does not repeat by accident, for the tests of checkpoints."""

import torch
from any_layer import ANY_LAYER
from processes import generator
from torch import nn

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.subclasses.structure import flatten
from hybridtensor.untrusted.files import digest_file
from hybridtensor.untrusted.manifest import Manifest

ALL = tuple(ANY_LAYER)
# Of each way to hold a weight one: not at all, per tensor, delayed, per row, in blocks of each kind, in one face
HELD = (
    "bf16", "fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "nvfp4_1d_weight",
    "high_precision_fwd_mxfp8_bwd",
)  # fmt: skip
STATES = ("fp8", "fp8_delayed", "nvfp4")
"""Of master weights only the state differs by recipe: none, scales, counters."""


def make(spec, persistent=False, seed=0, rate=0.01):
    """Return a model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    if spec is not None:
        ht.quantize_(model, spec, persistent=persistent)
    if persistent:
        return model, ht.optim.MasterWeights(torch.optim.AdamW, model.parameters(), lr=rate)
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def train(model, optimizer, first, last):
    """Run steps ``first`` to ``last``, exclusive, each with its own data; return the losses."""
    losses = []
    for step in range(first, last):
        x = torch.randn(32, 32, generator=generator(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        ht.step_(model)
        losses.append(loss.item())
    return losses


def bits(model, optimizer=None):
    """Return everything that a model and its optimizer hold, as bytes by name."""
    found = {}
    for name, value in model.state_dict().items():
        for i, tensor in enumerate(flatten(value)[0]):
            found[f"{name}.{i}"] = tensor
    inner = getattr(optimizer, "inner", optimizer)
    for i, state in enumerate([] if inner is None else inner.state.values()):
        found.update({f"{i}.{key}": value for key, value in state.items()})
    if isinstance(optimizer, ht.optim.MasterWeights):
        found.update({f"master.{i}": master.detach() for i, master in enumerate(optimizer.masters().values())})
    return {name: t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for name, t in found.items()}


def trained(spec="fp8", persistent=False, steps=2):
    """Return a model and its optimizer after some steps."""
    model, optimizer = make(spec, persistent)
    train(model, optimizer, 0, steps)
    return model, optimizer


def saved(path, *steps, spec="fp8", persistent=False, **options):
    """Save some steps of a run, and return the bits of each."""
    model, optimizer = make(spec, persistent)
    found, done = {}, 0
    for step in steps:
        train(model, optimizer, done, step)
        done = step
        checkpoint.save(path, step, {"model": model, "optimizer": optimizer}, **options)
        found[step] = bits(model, optimizer)
    return found


def load(path, spec="fp8", persistent=False, **options):
    """Load into a fresh run; return the step and its bits."""
    model, optimizer = make(spec, persistent, seed=1)
    step = checkpoint.load(path, {"model": model, "optimizer": optimizer}, **options)
    return step, bits(model, optimizer)


def folder(path, step):
    """Return the folder of a step."""
    return path / f"step_{step:08d}"


def flip(path, at=None):
    """Change a bit of a file, in its middle if nothing else is said."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def forge(path, name, data):
    """Put other bytes into a step, and make its manifest agree."""
    (path / name).write_bytes(data)
    manifest = Manifest.read(path)
    manifest.files[name] = digest_file(path / name)
    (path / "manifest.json").write_text(manifest.to_json())


class Held:
    """Something with a state."""

    def __init__(self, held):
        self.held = held

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        self.held = state
