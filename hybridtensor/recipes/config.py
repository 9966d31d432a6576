"""The recipe of a linear layer: a quantizer per role, and what makes it valid."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridtensor.arguments import require_choice, require_flag, require_kind, require_text, shown
from hybridtensor.formats import Format
from hybridtensor.ops.native_mm import has_fast_accum
from hybridtensor.ops.scaled_mm import check_multipliable
from hybridtensor.quantizers import HybridQuantizer, IdentityQuantizer, Quantizer
from hybridtensor.quantizers.hybrid import of_direction
from hybridtensor.recipes.spec import FLAGS, GEMMS, Faces, Gemm, Spec, simplified
from hybridtensor.recipes.spec_of_config import derive
from hybridtensor.state import ROLES, DelayedRule
from hybridtensor.torchao_compat import AOBaseConfig, config_to_dict

KEEP_FACES = ("auto", "always", "never")
"""How long faces of weights live; see ``HybridConfig``."""


@dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a quantizer is for; the argument of a quantizer factory.

    ::

        def factory(role: ht.QuantizerRole) -> ht.Quantizer:
            return ht.MXFP8Quantizer("e5m2" if role.tensor_type == "grad_output" else "e4m3")

        ht.quantize_(model, factory)

    Attributes:
        module_type: ``"linear"``, or ``"grouped_linear"`` for one of several experts.
        tensor_type: ``"input"``, ``"weight"`` or ``"grad_output"``.
        name: Fully qualified name of the module, ``""`` for the root; of an expert that of the
            parameter, with a number: ``"experts.w1[3]"``.
    """

    module_type: str
    tensor_type: str
    name: str

    def __post_init__(self) -> None:
        require_choice(
            "QuantizerRole", "module_type", self.module_type, ("linear", "grouped_linear")
        )
        require_choice("QuantizerRole", "tensor_type", self.tensor_type, ROLES)
        require_text("QuantizerRole", name=self.name)


@dataclass(frozen=True)
class HybridConfig(AOBaseConfig):
    """The recipe of a linear layer: which quantizer makes the faces of each of its three operands.

    ::

        mxfp8, values = ht.MXFP8Quantizer(), ht.IdentityQuantizer()
        ht.quantize_(model, ht.HybridConfig(input=mxfp8, weight=mxfp8, grad_output=values))

    The three products and the faces that they multiply::

        output      = input.rowwise          @ weight.rowwise.T
        grad_input  = grad_output.rowwise    @ weight.columnwise
        grad_weight = grad_output.columnwise.T @ input.columnwise

    Args:
        input: Quantizer of the input.
        weight: Quantizer of the weight.
        grad_output: Quantizer of the output's gradient.
        backward_override: A backward in high precision: ``"high_precision"``, of the original operands, or
            ``"dequantized"``, of the forward's dequantized operands, so that the gradient is that of the quantized
            function. It is a shorthand that rewrites the three quantizers, and is stored only for printing.
        save_original_input: Save the input itself for backward and make its columnwise face there; the bits are the
            same, except for roundings that a compiler skips. Saves memory if the operation that produced the input
            saves it anyway. Implied by ``"high_precision"``.
        fast_accum: Accumulate the two backward products in the matrix units of a Hopper GPU, as in the forward. This is
            faster, but sums have fewer bits than fp32 (about 13 below the largest term): long sums of one sign lose
            accuracy. Only for FP8 with scales per tensor or per row; results on a CPU do not change.
        bf16_weight_values: Round weights to bf16 before they are quantized, also fp32 masters: the faces are then those
            of the model's bf16 export, which inference engines quantize.
        keep_faces: How long faces that can be recomputed are cached; no bit depends on it, except for roundings that a
            compiler skips. Faces of high-precision weights: with ``"auto"`` until the last backward of a step if
            several forwards use a weight, as with accumulated gradients; otherwise forward makes the rowwise face and
            frees it, and backward the columnwise one. ``"always"``: until the next write. ``"never"``: no longer than
            one use. In graphs of ``torch.compile`` they never outlive a backward, and ``"always"`` only means that
            forward makes both. The columnwise face of an input that backward has anyway (attention's output; in a graph
            also that of a norm or an activation) is made in backward, or with ``"always"`` in forward.

    Raises:
        TypeError: If a role is not a quantizer.
        ValueError: If a product is not defined, or the policies contradict each other.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    backward_override: str | None = None
    save_original_input: bool = False
    fast_accum: bool = False
    bf16_weight_values: bool = False
    keep_faces: str = "auto"

    def __post_init__(self) -> None:
        for role in ROLES:
            if not isinstance(getattr(self, role), Quantizer):
                raise TypeError(
                    f"HybridConfig: a quantizer is required for {role}, got "
                    f"{shown(getattr(self, role))}; use IdentityQuantizer() for high precision"
                )
        require_flag(
            "HybridConfig",
            save_original_input=self.save_original_input,
            fast_accum=self.fast_accum,
            bf16_weight_values=self.bf16_weight_values,
        )
        self._apply_override()
        for role in ROLES:
            # One recipe, one object's value, however it was written: fingerprints in checkpoints
            # and guards of compiled graphs compare configs.
            object.__setattr__(self, role, simplified(getattr(self, role)))
        self._check_repeatable()
        for gemm in GEMMS:
            try:
                check_multipliable(*self.formats(gemm))
            except ValueError as error:
                operands = " by ".join(f"{role}.{direction}" for role, direction in gemm[1:])
                raise ValueError(
                    f"HybridConfig: {gemm.name} multiplies {operands}: {error}"
                ) from None
            self._check_signs(gemm)
        self._check_fast_accum()
        require_choice("HybridConfig", "keep_faces", self.keep_faces, KEEP_FACES)
        for field, is_set in (
            ("bf16_weight_values", self.bf16_weight_values),
            ("keep_faces", self.keep_faces != KEEP_FACES[0]),
        ):
            if is_set and self.weight == IdentityQuantizer():
                raise ValueError(
                    f"HybridConfig: {field} is for weights that are quantized, got none; drop it"
                )

    def _apply_override(self) -> None:
        """Rewrite the roles by ``backward_override``; idempotent."""
        override = self.backward_override
        if override is None:
            return
        sources = {"high_precision": "original", "dequantized": "rowwise_dequantized"}
        require_choice("HybridConfig", "backward_override", override, sources)
        if override == "dequantized" and self.save_original_input:
            raise ValueError(
                "HybridConfig: save_original_input keeps what backward_override='dequantized' must "
                "not use; drop one"
            )
        for role in ("input", "weight"):
            quantizer = getattr(self, role)
            row = of_direction(quantizer, "rowwise")
            overridden = HybridQuantizer(row, IdentityQuantizer(), sources[override])
            object.__setattr__(self, role, overridden)
        object.__setattr__(self, "grad_output", IdentityQuantizer())
        object.__setattr__(self, "save_original_input", override == "high_precision")

    def _check_repeatable(self) -> None:
        """Reject or drop ``save_original_input`` where the input's face cannot be recomputed."""
        if not self.save_original_input or _columnwise_repeatable(self.input):
            return
        if self.input.stochastic:
            raise ValueError(
                "HybridConfig: save_original_input promises the bits that saving the quantized "
                f"input gives, got an input that is rounded at random, {self.input}; drop one of "
                "them"
            )
        warnings.warn(
            "HybridConfig: save_original_input needs an input quantizer that repeats itself, got "
            f"{self.input}; the quantized input is saved instead",
            stacklevel=4,
        )
        object.__setattr__(self, "save_original_input", False)

    def _check_signs(self, gemm: Gemm) -> None:
        """Reject operands rotated under different signs, which would not cancel."""
        if not self.formats(gemm)[0].drawn_signs:
            return
        faces = Faces.of_config(self).quantizers
        seeds = [getattr(faces[operand], "seed", None) for operand in gemm[1:]]
        if seeds[0] != seeds[1]:
            operands = " by ".join(f"{role}.{direction}" for role, direction in gemm[1:])
            raise ValueError(
                f"HybridConfig: {gemm.name} multiplies {operands}: one seed for both is required, whose signs a "
                f"rotation has in both, got {seeds[0]} and {seeds[1]}; give both the same"
            )

    def _check_fast_accum(self) -> None:
        """Reject ``fast_accum`` where no product of backward supports it."""
        if self.fast_accum and not any(has_fast_accum(*self.formats(gemm)) for gemm in GEMMS[1:]):
            raise ValueError(
                "HybridConfig: fast_accum is for products of backward in FP8 per tensor or per "
                f"row, got {', '.join(_told_formats(self, gemm) for gemm in GEMMS[1:])}; drop it"
            )

    def delayed_rules(self) -> dict[str, DelayedRule]:
        """Return the delayed scales of a layer with this recipe, by slot."""
        rules = (getattr(self, role).delayed_rules(role) for role in ROLES)
        return {slot: rule for of_role in rules for slot, rule in of_role.items()}

    @property
    def stochastic(self) -> bool:
        """Whether anything is rounded at random."""
        return bool(self.stochastic_roles)

    @property
    def stochastic_roles(self) -> list[str]:
        """The roles whose tensors are rounded at random."""
        return [role for role in ROLES if getattr(self, role).stochastic]

    @classmethod
    def by_gemm(
        cls,
        *,
        output: str | Quantizer,
        grad_input: str | Quantizer,
        grad_weight: str | Quantizer,
        backward_override: str | None = None,
        save_original_input: bool = False,
        fast_accum: bool = False,
        bf16_weight_values: bool = False,
        keep_faces: str = "auto",
    ) -> HybridConfig:
        """Build a config from the format of each product.

        Args:
            output: A word such as ``"fp8"``, or a quantizer for both operands.
            grad_input: As ``output``.
            grad_weight: As ``output``.
            backward_override: See the class.
            save_original_input: See the class.
            fast_accum: See the class.
            bf16_weight_values: See the class.
            keep_faces: See the class.

        Raises:
            ValueError: If a word is unknown.
        """
        roles = Faces.of_words((output, grad_input, grad_weight)).by_role()
        return cls(
            **roles,
            backward_override=backward_override,
            save_original_input=save_original_input,
            fast_accum=fast_accum,
            bf16_weight_values=bf16_weight_values,
            keep_faces=keep_faces,
        )

    @classmethod
    def parse(cls, spec: str) -> HybridConfig:
        """Build a config from a string.

        ``"fp8"`` is one format for all three products, ``"fp8/fp8_rowwise/bf16"`` one each for
        output, grad_input and grad_weight, ``"fp8_block:mxfp4"`` one for each operand of a product
        (input:weight, grad_output:weight, grad_output:input). Formats: ``bf16`` (none), ``fp8`` (per tensor; E4M3,
        gradients E5M2), ``fp8_rowwise`` (E4M3), ``fp8_block`` (E4M3, 1x128, weights 128x128),
        ``fp8_delayed`` (per tensor, as ``fp8``), ``mxfp8`` (E4M3), ``mxfp4`` and ``nvfp4`` (weights 16x16,
        Hadamard rotation in grad_weight, gradients rounded stochastically, the latter two in ``mxfp4``, too).

        Modifiers follow after ``+``. Policies: ``high_precision`` and ``dequantized`` (the backward overrides),
        ``save_original_input``, ``fast_accum``, ``bf16_weight_values``, ``keep_faces`` and ``free_faces`` (always,
        never). Options: ``pow2_scale``, ``fp32_scale`` (of current scaling), ``e4m3_grad`` (gradients of ``fp8`` and
        ``fp8_delayed``), ``most_recent`` (delayed scaling), ``mx_two_d`` (32x32 weights), ``mx_e5m2_grad``,
        ``mx_even``, ``mx_floor`` (exponents of MXFP4), ``one_d`` (NVFP4 weights), ``nearest`` (rounding),
        ``no_hadamard``, ``row_scaled_input`` (NVFP4 input in the forward), ``four_over_six`` (of two scales per NVFP4
        block of weights and inputs the better one), ``four_over_six_weight``, ``four_over_six_input`` (of one of them),
        ``four_over_six_mse``, ``four_over_six_448`` (its options), ``eden`` (MS-EDEN in NVFP4 products of
        backward), ``rowwise_dequantized`` (columnwise faces of input and weight from what the forward saw),
        ``rowwise_dequantized_weight`` (of the weight only).

        Raises:
            TypeError: If ``spec`` is not a string.
            ValueError: If it has an unknown word, with the nearest known one, or a modifier that changes nothing.
        """
        read = Spec.parse(spec)
        config = cls(**read.arguments())
        for modifier, without in read.shorter():
            if config == cls._meant_by(without):
                raise ValueError(
                    f"HybridConfig.parse: {modifier!r} changes nothing in {spec!r}; drop it"
                )
        return config

    @classmethod
    def _meant_by(cls, spec: Spec) -> HybridConfig | None:
        try:
            with warnings.catch_warnings(action="ignore"):
                return cls(**spec.arguments())
        except ValueError:
            return None

    def check_sizes(self, out_features: int, in_features: int, who: str) -> None:
        """Raise ValueError if what is known of a layer's operands cannot be cut into the blocks of their formats.

        Args:
            out_features: Of the layer, or of a rank's part of it.
            in_features: Likewise.
            who: Begins the message.
        """
        operands = {
            "input": (None, in_features),
            "weight": (out_features, in_features),
            "grad_output": (None, out_features),
        }
        for role, (rows, columns) in operands.items():
            quantizer: Quantizer = getattr(self, role)
            quantizer.check_matrix(rows, columns, f"{who}, {role}")

    def formats(self, gemm: Gemm) -> tuple[Format, Format]:
        """Return the formats that ``gemm`` multiplies, left and right.

        Raises:
            TypeError: If ``gemm`` is none of ``recipes.spec.GEMMS``.
        """
        require_kind("HybridConfig.formats", "one of recipes.spec.GEMMS", gemm, Gemm)
        left, right = (
            getattr(getattr(self, role), f"{direction}_format") for role, direction in gemm[1:]
        )
        return left, right

    # Nothing in it changes, so that it is its own copy: guards of compiled graphs compare those in every call.
    def __copy__(self) -> HybridConfig:
        return self

    def __deepcopy__(self, memo: object) -> HybridConfig:
        return self

    def __str__(self) -> str:
        """Return a spec that ``parse`` reads back, or the constructor where no spec says it."""
        return _spec_of(self) or repr(self)

    def fingerprint(self) -> str:
        """Return 16 hex digits that equal configs share, in every process and version."""
        # Without fields that were added and say nothing new: checkpoints of before have this
        # fingerprint.
        text = json.dumps(_without_added(config_to_dict(self)), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _stable_hash_for_caching(self) -> str:
        """Return a stable hash for torch.compile's caches."""
        return self.fingerprint()


_ADDED: dict[str, dict[str, object]] = {
    "HybridConfig": {"fast_accum": False, "bf16_weight_values": False, "keep_faces": "auto"},
    "NVFP4Quantizer": {"four_over_six": None, "scale_max": 448},
}
"""Fields that were added to classes, and what values mean that there is nothing new."""


def _without_added(content: dict[str, Any]) -> dict[str, Any]:
    added = _ADDED.get(content["_type"], {})
    data = {
        name: _without_added(value) if isinstance(value, dict) and "_type" in value else value
        for name, value in content["_data"].items()
        if name not in added or value != added[name]
    }
    return {**content, "_data": data}


def weight_values(config: HybridConfig, values: Tensor) -> Tensor:
    """Return the weight values that are quantized: ``values``, or their rounding to bf16."""
    return values.to(torch.bfloat16) if config.bf16_weight_values else values


def _told_formats(config: HybridConfig, gemm: Gemm) -> str:
    return f"{gemm.name} of " + " and ".join(str(fmt) for fmt in config.formats(gemm))


def _columnwise_repeatable(quantizer: Quantizer) -> bool:
    """Return whether the columnwise face can be recomputed with the same bits."""
    if quantizer.derives_columnwise:
        return quantizer.repeatable
    return of_direction(quantizer, "columnwise").repeatable


@functools.lru_cache(maxsize=256)
def _spec_of(config: HybridConfig) -> str | None:
    """Return the shortest spec that parses to ``config``, or None."""
    flags = {name: getattr(config, field) == value for name, (field, value) in FLAGS.items()}
    spec = derive(Faces.of_config(config), config.backward_override, flags)
    if spec is None:
        return None
    try:
        return str(spec) if HybridConfig.parse(str(spec)) == config else None
    except ValueError:  # the faces name modifiers that contradict each other
        return None
