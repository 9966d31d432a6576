"""Fixtures for all tests: devices, CPU first; deterministic seeds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))  # type: ignore[arg-type]
else:
    spec = importlib.util.spec_from_file_location("interpreter", Path(__file__).with_name("interpreter.py"))
    interpreter = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(interpreter)  # type: ignore[union-attr]
    interpreter.use()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device of this machine; the CUDA tests carry the ``gpu`` marker."""
    return str(request.param)


@pytest.fixture
def default_device(device: str) -> Iterator[None]:
    """What is made without naming a device is on ``device``."""
    with torch.device(device):
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1 if hasattr(config, "workerinput") else 2)
