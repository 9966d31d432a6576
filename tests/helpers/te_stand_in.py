"""A stand-in for TransformerEngine where it cannot be installed: names, classes and signatures of its version 2.20.

Only what a factory of quantizers is made of; nothing quantizes.
"""

import dataclasses
import enum
import sys
import types


class DType(enum.IntEnum):
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
    kFloat4E2M1 = 10  # noqa: N815


class Format(enum.Enum):
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


class QuantizerRequest:
    pass


@dataclasses.dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: object = "max"
    scaling_factor_compute_algo: object = None
    reduce_amax: bool = True


class Quantizer:
    """Keeps the arguments that it was made with, except those that are defaults."""

    def keep(self, **arguments):
        self.arguments = arguments

    def __repr__(self):
        told = ", ".join(f"{name}={getattr(value, 'name', value)}" for name, value in self.arguments.items())
        return f"{type(self).__name__}({told})"


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(
        self, fp8_dtype, device, *, rowwise=True, columnwise=True, use_existing_amax=False, with_amax_reduction=False,
        amax_reduction_group=None, force_pow_2_scales=False, amax_epsilon=0.0, scale=None, amax=None,
    ):  # fmt: skip
        self.keep(dtype=fp8_dtype, pow2=force_pow_2_scales)


class Float8BlockQuantizer(Quantizer):
    def __init__(
        self, fp8_dtype, *, rowwise, columnwise, amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=2
    ):
        self.keep(dtype=fp8_dtype, pow2=force_pow_2_scales, dim=block_scaling_dim)


class MXFP8Quantizer(Quantizer):
    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True, with_2d_quantization=False):
        self.keep(dtype=fp8_dtype, two_d=with_2d_quantization)


class NVFP4Quantizer(Quantizer):
    def __init__(
        self, fp4_dtype=DType.kFloat4E2M1, rowwise=True, columnwise=True, with_amax_reduction=False,
        amax_reduction_group=None, with_rht=False, with_post_rht_amax=False, with_2d_quantization=False,
        stochastic_rounding=False, row_scaled_nvfp4=False, nvfp4_use_4over6=False, nvfp4_e4m3_max=448,
        nvfp4_4over6_err_mode="MAE", with_random_sign_mask=True,
    ):  # fmt: skip
        if with_rht != with_post_rht_amax:
            raise ValueError("the amax of what is rotated is that after the rotation")
        if nvfp4_use_4over6 and with_rht:
            raise ValueError("four over six is not for what is rotated")
        chosen = {"most": nvfp4_e4m3_max, "error": nvfp4_4over6_err_mode} if nvfp4_use_4over6 else {}
        self.keep(rht=with_rht, two_d=with_2d_quantization, random=stochastic_rounding, rows=row_scaled_nvfp4, **chosen)


class IdentityQuantizer(Quantizer):
    def __init__(self, *, dtype=None, rowwise=True, columnwise=True):
        self.keep()


class HybridQuantizer(Quantizer):
    def __init__(self, *, rowwise_quantizer, columnwise_quantizer, columnwise_source="original"):
        for child in (rowwise_quantizer, columnwise_quantizer):
            if not isinstance(child, Quantizer):
                raise TypeError("HybridQuantizer requires concrete Quantizer instances")
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError("HybridQuantizer requires distinct instances")
        self.keep(row=rowwise_quantizer, column=columnwise_quantizer, source=columnwise_source)


MODULES = {
    "common.recipe": (Format,),
    "pytorch.constants": (DType,),
    "pytorch.quantization": (DelayedScalingRequest, QuantizerRequest, QuantizerRole),
    "pytorch.tensor.float8_tensor": (Float8CurrentScalingQuantizer,),
    "pytorch.tensor.float8_blockwise_tensor": (Float8BlockQuantizer,),
    "pytorch.tensor.mxfp8_tensor": (MXFP8Quantizer,),
    "pytorch.tensor.nvfp4_tensor": (NVFP4Quantizer,),
    "pytorch.tensor.hybrid_tensor": (HybridQuantizer,),
    "pytorch.tensor.identity_tensor": (IdentityQuantizer,),
}


def install(monkeypatch):
    """Put the stand-in in the place of the package until the test ends."""
    root = "transformer_engine"
    for path, things in {"": (), "common": (), "pytorch": (), "pytorch.tensor": (), **MODULES}.items():
        module = types.ModuleType(f"{root}.{path}".rstrip("."))
        module.__path__ = []
        for thing in things:
            setattr(module, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)
    monkeypatch.delitem(sys.modules, "hybridtensor.integrations.transformer_engine", raising=False)
