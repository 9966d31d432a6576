"""Wrong kinds of arguments of what is public in the integrations end in clear errors; see ``wrong_use``."""

import importlib
import importlib.util

import pytest
import te_stand_in
import torch
import wrong_use
from torch import nn
from valid_calls import EVERYTHING, row

MODULES = ("accelerate", "lightning", "torchtitan", "transformer_engine", "transformers")


def module_of(name, monkeypatch):
    """Return an integration, with the stand-in where there is no TransformerEngine."""
    if name == "transformer_engine":
        te_stand_in.install(monkeypatch)
    elif importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: make test-integrations")
    return importlib.import_module(f"hybridtensor.integrations.{name}")


def rows(name, module):
    """Return a valid call of everything public in an integration."""
    if name == "accelerate":
        accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
        return {
            "prepare": row(
                lambda accelerator, model, recipe, keep_bf16: module.prepare(
                    accelerator, model, recipe=recipe, keep_bf16=keep_bf16
                ),
                accelerator=accelerator, model=lambda: nn.Linear(32, 32), recipe="fp8", keep_bf16=(),
            )
        }  # fmt: skip
    if name == "lightning":
        # a recipe is read when there is a module
        return {
            "HybridPrecision": row(module.HybridPrecision, {"recipe": EVERYTHING}, recipe="fp8", precision="32-true")
        }
    if name == "torchtitan":
        spec = importlib.import_module("torchtitan.models.llama3").model_registry("debugmodel")
        return {
            "quantized": row(module.quantized, {"recipe": EVERYTHING}, spec=spec, recipe="fp8"),
            "advancing": row(module.advancing, spec=spec),
        }
    if name == "transformer_engine":
        return {"qfactory": row(module.qfactory, recipe="fp8")}
    return {
        "HybridTensorConfig": row(module.HybridTensorConfig, recipe="fp8", keep_bf16=()),
        "StepCallback": row(module.StepCallback, {"watched": "None"}, watched=None),
    }


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", MODULES)
def test_every_wrong_kind_of_argument_is_a_clear_error(name, monkeypatch):
    table = rows(name, module_of(name, monkeypatch))
    monkeypatch.setattr(wrong_use, "ROWS", table)
    torch.manual_seed(0)
    for of_one in table.values():
        assert wrong_use.result_of(lambda of_one=of_one: wrong_use.call_with(of_one)) == "accepted"
    wrong = [str(outcome) for outcome in wrong_use.outcomes() if not outcome.is_right]
    assert not wrong, "\n".join(wrong)
