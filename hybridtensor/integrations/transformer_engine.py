"""TransformerEngine: a config of this library as the quantizers of its ``CustomRecipe``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformer_engine.common.recipe import Format
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import DelayedScalingRequest
from transformer_engine.pytorch.tensor import float8_blockwise_tensor as blockwise
from transformer_engine.pytorch.tensor import float8_tensor, mxfp8_tensor, nvfp4_tensor
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from hybridtensor import quantizers as ours
from hybridtensor.arguments import require_kind
from hybridtensor.integrations.te_limits import check
from hybridtensor.recipes import from_name
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.selection import matching
from hybridtensor.state import ROLES
from hybridtensor.torchao_compat import FqnToConfig

if TYPE_CHECKING:
    from transformer_engine.pytorch.quantization import QuantizerRole

_WHO = "qfactory"
_FP8 = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}


def qfactory(recipe: str | HybridConfig | FqnToConfig) -> Callable[[QuantizerRole | None], object]:
    """Return the factory of quantizers that has TransformerEngine's layers follow ``recipe``.

    ::

        with te.autocast(recipe=CustomRecipe(qfactory=qfactory("nvfp4_fwd_mxfp8_bwd"))):
            output = model(input)

    Its random rounding draws other numbers, and knows no ``seed``; everything else has our bits.
    What is no operand of a linear layer stays in high precision.

    Args:
        recipe: A name or spec, a config, or one per layer: names and ``re:`` patterns are compared
            with the ``name`` that a layer of TransformerEngine was given.

    Raises:
        TypeError: If the recipe is of another kind.
        ValueError: If it is unknown.
        NotImplementedError: If TransformerEngine has no such quantizer or product.
    """
    require_kind(
        _WHO,
        "a recipe's name, HybridConfig or FqnToConfig",
        recipe,
        (str, HybridConfig, FqnToConfig),
    )
    rules: dict[str, object] = {"_default": recipe}
    if isinstance(recipe, FqnToConfig):
        rules = dict(recipe.fqn_to_config)
    configs = {key: _read(rule) for key, rule in rules.items()}

    def factory(role: QuantizerRole | None) -> object:
        if (
            role is None
            or role.module_type not in ("linear", "grouped_linear")
            or role.tensor_type not in ROLES
        ):
            return IdentityQuantizer()
        config = configs.get(next(iter(matching(configs, role.name)), "_default"))
        return IdentityQuantizer() if config is None else _made(role.tensor_type, config)

    return factory


def _read(rule: object) -> HybridConfig | None:
    """Return the config of a layer, after checking that TransformerEngine has all of it."""
    require_kind(_WHO, "a recipe's name, a config or None", rule, (str, HybridConfig, type(None)))
    config = from_name(rule) if isinstance(rule, str) else rule
    if not isinstance(config, HybridConfig):
        return None
    check(config)
    return config


def _made(role: str, config: HybridConfig) -> object:
    """Return TransformerEngine's quantizer of an operand, a new one each time: they have state."""
    quantizer = getattr(config, role)
    # TransformerEngine holds scales and histories itself: it is asked for a quantizer, not given
    # one.
    if isinstance(quantizer, ours.DelayedFloat8Quantizer):
        grad = config.grad_output
        return DelayedScalingRequest(
            fp8_format=Format.HYBRID if getattr(grad, "dtype", "") == "e5m2" else Format.E4M3,
            margin=quantizer.margin,
            amax_history_len=quantizer.history_length,
            amax_compute_algo=quantizer.algorithm,
        )
    if not isinstance(quantizer, ours.HybridQuantizer):
        return _one(quantizer)
    row, column = quantizer.rowwise, quantizer.columnwise
    if _rotated(row) == column and quantizer.columnwise_source == "original":
        return _one(column)  # with rotation, the rowwise face has none
    return HybridQuantizer(
        rowwise_quantizer=_one(row),
        columnwise_quantizer=_one(column),
        columnwise_source=quantizer.columnwise_source,
    )


def _rotated(quantizer: ours.Quantizer) -> ours.Quantizer | None:
    """Return an NVFP4 quantizer after it is given the rotation; None of others."""
    if not isinstance(quantizer, ours.NVFP4Quantizer) or quantizer.hadamard or quantizer.two_d:
        return None
    return dataclasses.replace(quantizer, hadamard=True)


def _four_over_six(quantizer: ours.NVFP4Quantizer) -> dict[str, object]:
    """Return the options of TransformerEngine's quantizer, which earlier versions lack, where they are needed."""
    if quantizer.four_over_six is None:
        return {}
    return {
        "nvfp4_use_4over6": True,
        "nvfp4_e4m3_max": quantizer.scale_max,
        "nvfp4_4over6_err_mode": quantizer.four_over_six.upper(),
    }


def _one(quantizer: ours.Quantizer) -> object:
    if isinstance(quantizer, ours.IdentityQuantizer):
        return IdentityQuantizer()
    if isinstance(quantizer, ours.NVFP4Quantizer):
        return nvfp4_tensor.NVFP4Quantizer(
            with_rht=quantizer.hadamard,
            with_post_rht_amax=quantizer.hadamard,
            with_2d_quantization=quantizer.two_d,
            stochastic_rounding=quantizer.stochastic,
            row_scaled_nvfp4=quantizer.row_scaled,
            **_four_over_six(quantizer),
        )
    known: Any = quantizer
    dtype = _FP8[known.dtype]
    if isinstance(quantizer, ours.MXFP8Quantizer):
        return mxfp8_tensor.MXFP8Quantizer(
            dtype, **({"with_2d_quantization": True} if known.two_d else {})
        )
    if known.granularity == "tensor":
        return float8_tensor.Float8CurrentScalingQuantizer(
            dtype, torch.device("cuda"), force_pow_2_scales=known.pow2_scale
        )
    return blockwise.Float8BlockQuantizer(
        dtype, rowwise=True, columnwise=True, force_pow_2_scales=known.pow2_scale,
        block_scaling_dim=1 if known.block == "1x128" else 2,
    )  # fmt: skip
