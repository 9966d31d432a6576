"""Install a wheel into an empty environment, and use it there: ``try_wheel.py WHEEL CONSTRAINTS``.

The environment has torch, and what torch itself requires, from the one that runs this (by links), as it is large; all
else that the wheel requires is installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

USE = """
import pathlib, sys
import torch
import hybridtensor as ht
if not pathlib.Path(ht.__file__).is_relative_to(sys.prefix):
    sys.exit(f"another hybridtensor was imported: {ht.__file__}")
torch.manual_seed(0)
model = ht.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)), "fp8/mxfp8/bf16")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x, losses = torch.randn(32, 64), []
for _ in range(5):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if losses[-1] >= losses[0]:
    sys.exit(f"the loss does not fall: {losses}")
ht.explain(model)
print("works", ht.__version__, losses)
"""


def main() -> None:
    """Do it all."""
    wheel, constraints = (Path(argument).resolve() for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        environment, links = Path(folder, "environment"), Path(folder, "links")
        venv.create(environment, with_pip=True)
        links.mkdir()
        link("torch", links, set())
        (packages,) = environment.glob("lib/*/site-packages")
        (packages / "torch.pth").write_text(f"{links}\n")
        python, script = environment / "bin" / "python", environment / "bin" / "hybridtensor"
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, wheel]
        subprocess.run(install, check=True, env=own)
        subprocess.run([python, "-m", "pip", "check"], check=True, env=own)
        warnings = ["-W", "error", "-W", "ignore:Failed to initialize NumPy"]  # which torch does without
        for command in ([python, *warnings, "-c", USE], [script, "--version"], [script, "explain", "fp8"]):
            subprocess.run(command, check=True, cwd=folder, env=own)


def link(name: str, links: Path, seen: set[str]) -> None:
    """Link the files of a package, and of those that it requires on this machine."""
    if name in seen:
        return
    seen.add(name)
    distribution = importlib.metadata.distribution(name)
    tops = {Path(str(file)).parts[0] for file in distribution.files or () if ".." not in Path(str(file)).parts}
    for top in tops - {"__pycache__"}:
        target, place = Path(str(distribution.locate_file(top))), links / top
        if target.exists() and not place.exists():
            place.symlink_to(target)
    for requirement in distribution.requires or ():
        if "extra ==" not in requirement:
            required = re.split(r"[^\w.-]", requirement)[0]
            try:
                link(required, links, seen)
            except importlib.metadata.PackageNotFoundError:
                continue  # of another platform


if __name__ == "__main__":
    main()
