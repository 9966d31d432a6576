"""TransformerEngine: a config of this library as the quantizers of its ``CustomRecipe``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

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
from hybridtensor.recipes import from_name
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS, Faces
from hybridtensor.selection import matching
from hybridtensor.state import ROLES
from hybridtensor.torchao_compat import FqnToConfig

_WHO = "qfactory"
_FP8 = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}


def qfactory(recipe: str | HybridConfig | FqnToConfig) -> Callable[[Any], Any]:
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
    require_kind(_WHO, "a recipe's name, HybridConfig or FqnToConfig", recipe, (str, HybridConfig, FqnToConfig))
    rules = dict(recipe.fqn_to_config) if isinstance(recipe, FqnToConfig) else {"_default": recipe}
    configs = {key: from_name(rule) if isinstance(rule, str) else rule for key, rule in rules.items()}
    for config in configs.values():
        _check(config)

    def factory(role: Any) -> Any:
        if role is None or role.module_type not in ("linear", "grouped_linear") or role.tensor_type not in ROLES:
            return IdentityQuantizer()
        config = configs.get(next(iter(matching(configs, role.name)), "_default"))
        return IdentityQuantizer() if config is None else _made(role.tensor_type, config)

    return factory


def _made(role: str, config: HybridConfig) -> Any:
    """Return TransformerEngine's quantizer of an operand, a new one each time: they have state."""
    quantizer = getattr(config, role)
    if isinstance(quantizer, ours.DelayedFloat8Quantizer):
        grad: Any = config.grad_output
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


def _one(quantizer: ours.Quantizer) -> Any:
    """Return TransformerEngine's quantizer of one format."""
    if isinstance(quantizer, ours.IdentityQuantizer):
        return IdentityQuantizer()
    if isinstance(quantizer, ours.NVFP4Quantizer):
        return nvfp4_tensor.NVFP4Quantizer(
            with_rht=quantizer.hadamard,
            with_post_rht_amax=quantizer.hadamard,
            with_2d_quantization=quantizer.two_d,
            stochastic_rounding=quantizer.stochastic,
            row_scaled_nvfp4=quantizer.row_scaled,
        )
    known: Any = quantizer
    dtype = _FP8[known.dtype]
    if isinstance(quantizer, ours.MXFP8Quantizer):
        return mxfp8_tensor.MXFP8Quantizer(dtype, **({"with_2d_quantization": True} if known.two_d else {}))
    if known.granularity == "tensor":
        return float8_tensor.Float8CurrentScalingQuantizer(
            dtype, torch.device("cuda"), force_pow_2_scales=known.pow2_scale
        )
    return blockwise.Float8BlockQuantizer(
        dtype, rowwise=True, columnwise=True, force_pow_2_scales=known.pow2_scale,
        block_scaling_dim=1 if known.block == "1x128" else 2,
    )  # fmt: skip


def _check(config: HybridConfig) -> None:
    """Raise NotImplementedError if TransformerEngine cannot do what a config says."""
    faces = Faces.of_roles({role: getattr(config, role) for role in ROLES})
    hybrids = {role for role in ROLES if isinstance(getattr(config, role), ours.HybridQuantizer)}
    for (role, direction), face in faces.quantizers.items():
        _check_face(face, role, direction, in_hybrid=role in hybrids)
    for gemm in GEMMS:
        left, right = (faces.quantizers[operand] for operand in gemm[1:])
        formats = [str(fmt) for fmt in config.formats(gemm)]
        if _family(left) != _family(right):
            raise _unable(f"operands of one kind in {gemm.name}", " by ".join(formats), "give both the same format")
        if all("e5m2" in name for name in formats):
            raise _unable(f"an E4M3 operand in {gemm.name}", "E5M2 by E5M2", "make one of them E4M3")
        if all("128x128" in name for name in formats):
            raise _unable(f"a 1x128 operand in {gemm.name}", "128x128 by 128x128", "make one of them 1x128")
    for flag, advice in (("fast_accum", "drop it"), ("bf16_weight_values", "give its layers bf16 weights and drop it")):
        if getattr(config, flag):
            raise _unable("a config without policies of our own products", flag, advice)


def _check_face(face: Any, role: str, direction: str, *, in_hybrid: bool) -> None:
    """Raise NotImplementedError if TransformerEngine cannot make one face of an operand."""
    where = f"{role}.{direction}"
    if getattr(face, "granularity", "") == "row":
        raise _unable(f"a scale per tensor or block in {where}", "one per row", "use fp8, fp8_block or mxfp8")
    if isinstance(face, ours.DelayedFloat8Quantizer):
        if in_hybrid:
            raise _unable(f"current scaling in {where}", "delayed scaling of one direction", "use fp8 there")
        if role != "grad_output" and face.dtype != "e4m3":
            raise _unable(f"delayed scaling to E4M3 in {where}", face.dtype, "drop its dtype")
    if isinstance(face, ours.NVFP4Quantizer):
        if face.hadamard and direction == "rowwise":
            raise _unable(f"rotation of columnwise faces only in {where}", "hadamard", "rotate both of grad_weight")
        if face.row_scaled and (direction == "columnwise" or face.stochastic or face.hadamard):
            raise _unable(f"rows scaled in the forward only in {where}", str(face), "drop row_scaled there")


def _family(face: ours.Quantizer) -> str:
    """Return what both operands of a product must have in common."""
    if isinstance(face, ours.Float8Quantizer) and face.granularity == "block":
        return "block"
    return type(face).__name__.removeprefix("Delayed")  # scales per tensor, wherever they come from


def _unable(required: str, got: str, advice: str) -> NotImplementedError:
    return NotImplementedError(f"{_WHO}: TransformerEngine has {required}, got {got}; {advice}")
