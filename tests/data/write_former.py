"""Write ``former.tar.xz``: checkpoints of a former version, for ``test_former_checkpoints``.

Commit 9101479 wrote it: ``PYTHONPATH=<a checkout of it> python tests/data/write_former.py``. Two
models of one layer, after two steps: between them they have delayed scales, a random counter, a
weight in high precision, a persistent one, and its master.
"""

import pickle
import tarfile
import tempfile
from pathlib import Path

import torch
from torch import nn

import hybridtensor as ht
from hybridtensor.distributed import checkpoint

ARCHIVE = Path(__file__).parent / "former.tar.xz"
RECIPES = {
    "persistent": ht.recipes.fp8_delayed(history_length=4),
    "master": ht.HybridConfig.parse("fp8_delayed/nvfp4/nvfp4+most_recent"),
}


def build(kind):
    """Return a model and its optimizer."""
    torch.manual_seed(0)
    config = RECIPES[kind]
    if kind == "master":  # short histories, for small files
        short = ht.DelayedFloat8Quantizer(history_length=2)
        forward = {}
        for role in ("input", "weight"):
            forward[role] = ht.HybridQuantizer(short, getattr(config, role).columnwise)
        config = ht.HybridConfig(**forward, grad_output=config.grad_output)
    model = nn.Sequential(nn.Linear(32, 16, bias=False, dtype=torch.bfloat16))
    ht.quantize_(model, config, persistent=kind == "persistent")
    if kind == "persistent":
        made = ht.optim.MasterWeights
        return model, made(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch():
    """Return an input and a gradient."""
    drawn = torch.Generator().manual_seed(1)
    return (torch.randn(16, n, generator=drawn).bfloat16() for n in (32, 16))


def trained(model, optimizer):
    """Return all that a step of training leaves behind, tensors that anyone can read."""
    x, g = batch()
    x.requires_grad_()
    optimizer.zero_grad()
    y = model(x)
    y.backward(g)
    optimizer.step()
    ht.step_(model)
    weight = model[0].weight.detach().dequantize()
    return [y.detach(), x.grad, weight, *(buffer.clone() for buffer in model.buffers())]


def write(folder):
    """Write the files into a folder."""
    for kind in RECIPES:
        model, optimizer = build(kind)
        for _ in range(2):
            trained(model, optimizer)
        state = {"model": model, "optimizer": optimizer}
        if kind == "master":
            state["copy"] = {"of": model.state_dict()}  # as data, not as a module
        checkpoint.save(folder / kind, 2, state)
        torch.save(model.state_dict(), folder / f"{kind}_state.pt")
        (folder / f"{kind}.pickle").write_bytes(pickle.dumps((model, optimizer.state_dict())))
        torch.save(trained(model, optimizer), folder / f"{kind}_expected.pt")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, tarfile.open(ARCHIVE, "w:xz") as archive:
        write(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            archive.add(path, path.name)
