"""``hybridtensor doctor``: what this machine runs natively, the versions, and known problems."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import shutil
import subprocess
import textwrap
from dataclasses import asdict, dataclass

import torch

from hybridtensor.commands.common import add_json, print_json
from hybridtensor.ops import select_backend
from hybridtensor.recipes.named import RECIPES
from hybridtensor.recipes.spec import GEMMS

_PACKAGES = ("hybridtensor", "torch", "triton", "torchao", "rich", "safetensors", "transformers")
_TESTED = ((2, 11), (2, 13))
"""The first and the last torch that the tests have run with."""
_TESTED_ON_CUDA = (2, 11)
"""The last one with a GPU."""
_TESTED_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Machine:
    """Versions of Python, packages and drivers, and the GPU; None for what is missing."""

    versions: dict[str, str | None]
    device: str
    capability: tuple[int, int] | None
    cuda: str | None
    is_rocm: bool
    driver: str | None


def add(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    add_json(command)


def run(given: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    machine = this_machine()
    device = torch.device("cpu" if machine.capability is None else "cuda")
    found, runs = problems(machine), backends(device)
    if given.json:
        print_json(
            {**asdict(machine), "recipes": runs, "problems": found, "remarks": remarks(runs)}
        )
        return 1 if found else 0
    for name, version in machine.versions.items():
        print(f"{name:14}{version or 'missing'}")
    capability = "" if machine.capability is None else f", compute capability {machine.capability}"
    print(f"{'device':14}{machine.device}{capability}")
    print(f"{'driver':14}{machine.driver or 'none'}, torch built for {machine.cuda or 'CPUs'}")
    print("\nHow the products of recipes run, in bfloat16 (output, grad_input, grad_weight):")
    for name, of_products in runs.items():
        shown = of_products[0] if len(set(of_products)) == 1 else ", ".join(of_products)
        print(f"  {name:41}{shown}")
    print("\nKnown problems:" if found else "\nNo known problems.")
    for problem in found:
        print(f"  {problem}")
    for line in remarks(runs):
        print(f"\n{line}")
    return 1 if found else 0


def remarks(runs: dict[str, list[str]]) -> list[str]:
    """Return the remark on what is emulated on this device, if anything is."""
    emulated = [name for name, of_products in runs.items() if "emulated" in of_products]
    if not emulated:
        return []
    if any("native" in of_products for of_products in runs.values()):
        what = f"Emulated on this device, in the products marked so: {', '.join(emulated)}."
    else:
        what = "No product runs natively on this device: all are emulated."
    meaning = (
        "Operands are quantized bit for bit as for a native product and multiplied in high precision, "
        "which is exact but slower than plain layers."
    )
    return [textwrap.fill(f"{what} {meaning}", 105)]


def this_machine() -> Machine:
    """Look up the versions, the device and the driver of this machine."""
    has_gpu = torch.cuda.is_available()
    return Machine(
        {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        torch.cuda.get_device_name() if has_gpu else "cpu",
        torch.cuda.get_device_capability() if has_gpu else None,
        torch.version.hip or torch.version.cuda,
        torch.version.hip is not None,
        _driver() if has_gpu else None,
    )


def _version(package: str) -> str | None:
    if package == "torch":  # with what it is built for
        return str(torch.__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Nightly builds of Triton have another name
        return _version("pytorch-triton") if package == "triton" else None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    output = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    return output[0] if output else None


def backends(device: torch.device) -> dict[str, list[str]]:
    """Return how the three products of each named recipe run on a device."""
    return {
        name: [select_backend(*make().formats(gemm), torch.bfloat16, device).name for gemm in GEMMS]
        for name, make in RECIPES.items()
    }


def problems(machine: Machine) -> list[str]:
    """List what is known to fail on a machine, or was never tried."""
    found = []
    torch_version = _numbers(machine.versions["torch"])
    first, last = _TESTED
    if not first <= torch_version <= last:
        found.append(
            f"torch {machine.versions['torch']}: tests run with {_told(first)} to {_told(last)}; install one of these"
        )
    torchao = machine.versions["torchao"]
    if torchao is None or _numbers(torchao) < (0, 17):
        found.append(f"torchao {torchao or 'is missing'}: 0.17 or later is required; install it")
    if machine.capability is None:
        return found
    if machine.is_rocm:
        found.append("an AMD GPU: this library never ran on one; its products are emulated there")
        return found
    if torch_version > _TESTED_ON_CUDA:
        found.append(
            f"torch {machine.versions['torch']} with a GPU: with GPUs only {_told(_TESTED_ON_CUDA)} was ever run; run "
            "the tests (make test-gpu) before you rely on it"
        )
    if machine.versions["triton"] is None:
        found.append(
            "triton is missing: casts on a GPU are Triton kernels; install the one of your torch"
        )
    if machine.capability != _TESTED_CAPABILITY:
        found.append(
            f"compute capability {machine.capability}: only Hopper's {_TESTED_CAPABILITY} was ever run; run the tests "
            "(make test-gpu) before you rely on it"
        )
    return found


def _numbers(version: str | None) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _told(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
