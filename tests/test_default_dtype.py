"""Torch's default dtype, which training frameworks set while they build and run models, changes nothing."""

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor import recipes


@pytest.fixture
def default():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def trained(recipe, common, before=lambda: None):
    """Two steps of a model that is converted and run after ``before`` was called."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(128, 128, dtype=torch.bfloat16) for name in ("gate", "up")})
    rows = torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16()
    before()
    ht.quantize_(model, recipe, common_scale=[("gate", "up")] if common else (), filter_fn=lambda *_: True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x in rows:
        (model["gate"](x) * model["up"](x)).float().square().mean().backward()
        optimizer.step()
        ht.step_(model)
    torch.set_default_dtype(torch.float32)
    return model.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("recipe", "common"), [*((name, False) for name in recipes.RECIPES), ("fp8", True), ("nvfp4", True)]
)
def test_no_bit_depends_on_it(recipe, common, dtype, default):
    expected, got = trained(recipe, common), trained(recipe, common, lambda: default(dtype))
    assert expected.keys() == got.keys()
    for name, value in got.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name
