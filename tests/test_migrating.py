"""What ``docs/migrating.md`` says of torchao's recipes: its own configs are the oracle."""

import re
from pathlib import Path

import pytest
import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import ScalingGranularity, ScalingType

import hybridtensor as ht
from hybridtensor.recipes.spec import GEMMS, Faces

PAGE = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text()
TABLES = {
    name: re.findall(r"^\| (.*?) \| `([^`]*)` \|$", text.partition("\n\n")[0], re.MULTILINE)
    for name, text in re.findall(r"<!-- table: (from \w+) -->\n(.*?\n\n)", PAGE, re.DOTALL)
}
ROWS = [(name, *row) for name, rows in TABLES.items() for row in rows]
OPERANDS = {  # of each product, by torchao's names
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight_for_grad_input"),
    "grad_weight": ("grad_output_for_grad_weight", "input_for_grad_weight"),
}
GRANULARITIES = {ScalingGranularity.TENSORWISE: "tensor", ScalingGranularity.AXISWISE: "row"}
ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def test_there_are_rows():
    assert {name: len(rows) for name, rows in TABLES.items()} == {"from torchao": 8, "from TransformerEngine": 13}


@pytest.mark.parametrize(("table", "theirs", "spec"), ROWS, ids=lambda text: text)
def test_specs_are_known(table, theirs, spec):
    assert str(ht.HybridConfig.parse(spec)) == spec


def spec_of(recipe):
    return next(spec for theirs, spec in TABLES["from torchao"] if f"recipe `{recipe}`" in theirs)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_of_torchao_have_these_formats(recipe):
    theirs, config = Float8LinearConfig.from_recipe_name(recipe), ht.HybridConfig.parse(spec_of(recipe))
    faces = Faces.of_config(config).quantizers
    for gemm in GEMMS:
        for name, fmt, operand in zip(OPERANDS[gemm.name], config.formats(gemm), gemm[1:], strict=True):
            cast = getattr(theirs, f"cast_config_{name}")
            if cast.scaling_type is ScalingType.DISABLED:
                assert fmt.is_identity
                continue
            expected = f"fp8_{ELEMENTS[cast.target_dtype]}_{GRANULARITIES[cast.scaling_granularity]}"
            assert (fmt.name, faces[operand].pow2_scale) == (expected, theirs.round_scales_to_power_of_2), name
    assert theirs.gemm_config_output.use_fast_accum
    fast = {theirs.gemm_config_grad_input.use_fast_accum, theirs.gemm_config_grad_weight.use_fast_accum}
    assert fast == {config.fast_accum}
