"""TransformerEngine beside this library, where it is installed: its linear layers, and its casts.

It has recipes of the same numerics: current scales per tensor, delayed ones, and blocks of 1x128 and 128x128.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NAME = "TransformerEngine"
RECIPES = {
    f"{NAME} current": "Float8CurrentScaling",
    f"{NAME} delayed": "DelayedScaling",
    f"{NAME} block": "Float8BlockScaling",
}


def is_installed() -> bool:
    """Return whether it is there, with a GPU that it runs on."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def names() -> list[str]:
    """Return the names of its recipes, none where it is not installed."""
    return list(RECIPES) if is_installed() else []


def autocast(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which its layers compute by a recipe."""
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as te

    return te.autocast(enabled=True, recipe=getattr(recipes, RECIPES[name])())  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Its linear layer with the weight of a plain one, in a context of its own.

    Args:
        plain: The layer, bias-free.
        name: One of ``RECIPES``; None if the context is around the model.
    """

    def __init__(self, plain: nn.Linear, name: str | None = None) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        shape, weight = (plain.in_features, plain.out_features), plain.weight
        self.inner = te.Linear(*shape, bias=False, params_dtype=weight.dtype, device=weight.device)
        self.inner.weight.data.copy_(weight.data)
        self.name = name

    @property
    def weight(self) -> nn.Parameter:
        """The weight in high precision."""
        return self.inner.weight  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        with contextlib.nullcontext() if self.name is None else autocast(self.name):
            return self.inner(x)  # type: ignore[no-any-return]


def fuse(model: nn.Module) -> None:
    """Put its modules of a norm and what follows it into blocks of ``llama``, with its packed layers."""
    import transformer_engine.pytorch as te

    for block in model:
        dim, given = block.norm1.weight.shape[0], {"bias": False, "normalization": "RMSNorm", "eps": 1e-5}
        given |= {"params_dtype": block.norm1.weight.dtype, "device": block.norm1.weight.device}
        attention = block.attention
        attention.qkv = te.LayerNormLinear(dim, sum(attention.sizes), **given)
        attention.names = ["qkv"]
        attention.out = Layer(attention.out)
        block.mlp = te.LayerNormMLP(dim, block.mlp.down_proj.in_features, activation="swiglu", **given)
        block.mlp.names = []
        block.norm1 = block.norm2 = nn.Identity()  # which its modules contain


def layers(plain: nn.Linear) -> dict[str, nn.Module]:
    """Return a copy of a layer for each recipe, none where it is not installed."""
    return {name: Layer(plain, name) for name in names()}


def convert(model: nn.Module) -> None:
    """Put its layers in place of all linear ones; ``autocast`` is to be around the model."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Layer(child))


def casts() -> dict[str, Callable[[Tensor], object]]:
    """Return what makes both faces of a matrix, by the name that ``cast.py`` has for it."""
    if not is_installed():
        return {}
    from transformer_engine.pytorch.quantization import QuantizerRole

    from hybridtensor.integrations.transformer_engine import qfactory

    made = {
        "per tensor, current": ("fp8", "input"),
        "1x128": ("fp8_block", "input"),
        "128x128": ("fp8_block", "weight"),
    }
    return {name: qfactory(recipe)(QuantizerRole("linear", role, "")) for name, (recipe, role) in made.items()}
