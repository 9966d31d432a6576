"""``hybridtensor doctor`` tells what a machine has, and what is wrong with it."""

import dataclasses
import json

import pytest
import torch

from hybridtensor.__main__ import main
from hybridtensor.commands import doctor
from hybridtensor.commands.doctor import Machine, problems
from hybridtensor.recipes import RECIPES

VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6.0", "torchao": "0.18.0"}
HOPPER = Machine(VERSIONS, "NVIDIA H200", (9, 0), "13.0", False, "580.1")


def test_the_machine_that_figures_are_of_has_no_problems():
    assert problems(HOPPER) == []


@pytest.mark.parametrize(
    ("versions", "changed", "told"),
    [
        ({"torch": "2.10.1"}, {}, "torch 2.10.1: tests run with 2.11 to 2.13"),
        ({"torch": "2.14.0a0+git"}, {"capability": None}, "torch 2.14.0a0+git: tests run with 2.11 to 2.13"),
        ({"torch": "2.13.0+cu130"}, {}, "torch 2.13.0+cu130 with a GPU: with GPUs only 2.11 was ever run"),
        ({"triton": None}, {}, "triton is missing"),
        ({"torchao": "0.16.0"}, {}, "torchao 0.16.0: 0.17 or later is required"),
        ({"torchao": "0.16rc1"}, {}, "torchao 0.16rc1: 0.17 or later is required"),
        ({"torchao": None}, {}, "torchao is missing: 0.17 or later is required"),
        ({}, {"capability": (10, 0)}, "compute capability (10, 0): only Hopper's (9, 0) was ever run"),
        ({}, {"is_rocm": True}, "an AMD GPU: this library never ran on one"),
    ],
)
def test_what_is_wrong_is_told(versions, changed, told):
    found = problems(dataclasses.replace(HOPPER, versions=VERSIONS | versions, **changed))
    assert len(found) == 1
    assert found[0].startswith(told)


def test_a_cpu_needs_no_triton():
    machine = dataclasses.replace(HOPPER, versions=VERSIONS | {"torch": "2.13.0", "triton": None}, capability=None)
    assert problems(machine) == []


def test_what_runs_and_the_versions_are_told(capsys):
    machine = doctor.this_machine()
    assert main(["doctor"]) == (1 if problems(machine) else 0)
    printed = capsys.readouterr().out
    for words in (torch.__version__, *RECIPES):
        assert words in printed
    assert ("Known problems:" in printed) == bool(problems(machine))


def test_problems_are_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "this_machine", lambda: Machine(VERSIONS | {"torch": "2.9.0"}, "cpu", None, None, False, None)
    )
    assert main(["doctor"]) == 1
    assert "Known problems:\n  torch 2.9.0: tests run with" in capsys.readouterr().out


def test_that_everything_is_emulated_is_told(monkeypatch, capsys):
    cpu = Machine(VERSIONS, "cpu", None, None, False, None)
    monkeypatch.setattr(doctor, "this_machine", lambda: cpu)
    assert main(["doctor"]) == 0
    told = " ".join(capsys.readouterr().out.partition("No known problems.")[2].split())
    assert told.startswith("No product runs natively on this device: all are emulated.")
    for words in ("bit for bit as for a native product", "slower than plain layers"):
        assert words in told
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["remarks"] == doctor.remarks(doctor.backends(torch.device("cpu")))
    runs = {"bf16": ["high precision"] * 3, "fp8": ["native"] * 3}
    assert doctor.remarks(runs) == []
    mixed = ["emulated", "high precision", "high precision"]
    (told,) = doctor.remarks(runs | {"nvfp4": ["emulated"] * 3, "nvfp4_dequantized_backward": mixed})
    assert " ".join(told.split()).startswith(
        "Emulated on this device, in the products marked so: nvfp4, nvfp4_dequantized_backward. Operands are quantized"
    )


def test_data(capsys):
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["recipes"]) == set(RECIPES)
    assert found["recipes"]["bf16"] == ["high precision"] * 3
    if not torch.cuda.is_available():
        assert found["device"] == "cpu"
        assert found["recipes"]["fp8_rowwise_hp_grad_weight"] == ["emulated", "emulated", "high precision"]
