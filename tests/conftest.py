"""Fixtures for all tests: devices, CPU first; deterministic seeds."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiers
import torch
from processes import compile_without_measuring, seed_the_cpu_only, seldom_collect_garbage

# Where tests share what takes long to start or compile: each in one worker; of a folder, each file, if there are many
TOGETHER = (
    "tests/distributed/", "tests/test_convergence.py", "tests/test_advise.py", "tests/test_advise_benchmark.py",
    "tests/test_compile_graphs.py", "tests/models/test_sharded.py",
)  # fmt: skip
FEW_WORKERS = 4
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


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that was compiled before, and nothing for what comes after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _little_garbage(request: pytest.FixtureRequest) -> None:
    """Where tests collect garbage, they need not go through what was there before them: a second each time."""
    if hasattr(request.module, "gc"):
        gc.collect()
        gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the long tier: all combinations, many examples")


def pytest_configure(config: pytest.Config) -> None:
    tiers.LONG = config.getoption("--long")
    if config.getoption("numprocesses", None):  # workers run the tests
        # More threads of them, and of what they start, wait for each other, and spin meanwhile
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
        return
    seldom_collect_garbage()
    seed_the_cpu_only()
    compile_without_measuring()
    torch.set_num_threads(1 if hasattr(config, "workerinput") else 2)


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not go through it again and again. Loggers of torch's parts go
    by that of torch: pytest gives each that does not six times per test a handler, and takes it away.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.handlers, logger.propagate = [], True
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--long"):
        terminalreporter.write_line("the long tier was left out: --long runs all combinations and many more examples")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out tests one by one, but for those that stay together.

    What pytest-xdist has for it, marks, version 3.8 forgets with pytest 9.2.
    """
    many = (config.getoption("numprocesses", None) or 0) > FEW_WORKERS

    class Scheduler(importlib.import_module("xdist.scheduler").LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if not nodeid.startswith(TOGETHER):
                return nodeid
            return nodeid.partition("::")[0] if many else next(filter(nodeid.startswith, TOGETHER))

    return Scheduler(config, log)
