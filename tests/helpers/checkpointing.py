"""Small models whose training does not repeat by accident, for the tests of checkpoints."""

import torch
from processes import generator
from torch import nn

import hybridtensor as ht
from hybridtensor.subclasses.structure import flatten


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
    return {name: t.contiguous().reshape(-1).view(torch.uint8).tolist() for name, t in found.items()}
