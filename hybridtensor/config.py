"""The recipe of a linear layer: a quantizer per role, how to write it as a string, and what makes it valid."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hybridtensor.formats import Format, nearest
from hybridtensor.ops.scaled_mm import check_multipliable
from hybridtensor.quantizers import Float8Quantizer, HybridQuantizer, IdentityQuantizer, Quantizer
from hybridtensor.torchao_compat import ALLOWED_AO_MODULES, AOBaseConfig, config_to_dict


class Gemm(NamedTuple):
    """One matrix product of a linear layer: its name and, per operand, the role and the direction of the face."""

    name: str
    left: tuple[str, str]
    right: tuple[str, str]


GEMMS = (
    Gemm("output", ("input", "rowwise"), ("weight", "rowwise")),
    Gemm("grad_input", ("grad_output", "rowwise"), ("weight", "columnwise")),
    Gemm("grad_weight", ("grad_output", "columnwise"), ("input", "columnwise")),
)
ROLES = ("input", "weight", "grad_output")

_WORDS: dict[str, Callable[[str], Quantizer]] = {
    "bf16": lambda role: IdentityQuantizer(),
    "fp8": lambda role: Float8Quantizer(dtype="e5m2" if role == "grad_output" else "e4m3"),
    "fp8_rowwise": lambda role: Float8Quantizer(granularity="row"),
}
_MODIFIERS = {
    "high_precision": ("backward_override", "high_precision"),
    "dequantized": ("backward_override", "dequantized"),
    "save_original_input": ("save_original_input", True),
}


@dataclass(frozen=True)
class QuantizerRole:
    """What a quantizer is for; the argument of a factory.

    Attributes:
        module_type: ``"linear"``.
        tensor_type: ``"input"``, ``"weight"`` or ``"grad_output"``.
        name: Fully qualified name of the module, ``""`` for the root.
    """

    module_type: str
    tensor_type: str
    name: str


@dataclass(frozen=True)
class HybridConfig(AOBaseConfig):  # type: ignore[misc]
    """The recipe of a linear layer: which quantizer makes the faces of each of its three operands.

    The three products and the faces that they multiply::

        output      = input.rowwise          @ weight.rowwise.T
        grad_input  = grad_output.rowwise    @ weight.columnwise
        grad_weight = grad_output.columnwise.T @ input.columnwise

    Args:
        input: Quantizer of the input.
        weight: Quantizer of the weight.
        grad_output: Quantizer of the output's gradient.
        backward_override: A backward in high precision: ``"high_precision"``, of the original operands, or
            ``"dequantized"``, of the operands as the forward saw them, so that the gradient is that of the quantized
            function. Shorthand: it rewrites the three roles, and stays here for printing.
        save_original_input: Keep the input itself for backward and make its columnwise face there; the bits are the
            same. Saves memory where the producer of the input keeps it anyway. Implied by ``"high_precision"``.

    Raises:
        TypeError: If a role is not a quantizer.
        ValueError: If a product is not defined, or the policies contradict each other.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    backward_override: str | None = None
    save_original_input: bool = False

    def __post_init__(self) -> None:
        for role in ROLES:
            if not isinstance(getattr(self, role), Quantizer):
                raise TypeError(
                    f"HybridConfig: a quantizer is required for {role}, got {getattr(self, role)!r}; "
                    "use IdentityQuantizer() for high precision"
                )
        self._apply_override()
        if self.save_original_input and not self.input.repeatable:
            warnings.warn(
                f"HybridConfig: save_original_input needs an input quantizer that repeats itself, got {self.input}; "
                "the quantized input is saved instead",
                stacklevel=3,
            )
            object.__setattr__(self, "save_original_input", False)
        for gemm in GEMMS:
            try:
                check_multipliable(*self.formats(gemm))
            except ValueError as error:
                operands = " by ".join(f"{role}.{direction}" for role, direction in gemm[1:])
                raise ValueError(f"HybridConfig: {gemm.name} multiplies {operands}: {error}") from None

    def _apply_override(self) -> None:
        """Rewrite the roles as ``backward_override`` says; doing it twice changes nothing."""
        override = self.backward_override
        if override is None:
            return
        sources = {"high_precision": "original", "dequantized": "rowwise_dequantized"}
        if override not in sources:
            raise ValueError(
                f"HybridConfig: unknown backward_override {override!r}; {nearest(str(override), sources)} or None"
            )
        if override == "dequantized" and self.save_original_input:
            raise ValueError(
                "HybridConfig: save_original_input keeps what backward_override='dequantized' must not use; drop one"
            )
        for role in ("input", "weight"):
            quantizer = getattr(self, role)
            row = quantizer.rowwise if isinstance(quantizer, HybridQuantizer) else quantizer
            object.__setattr__(self, role, HybridQuantizer(row, IdentityQuantizer(), sources[override]))
        object.__setattr__(self, "grad_output", IdentityQuantizer())
        object.__setattr__(self, "save_original_input", override == "high_precision")

    @classmethod
    def by_gemm(
        cls,
        *,
        output: str | Quantizer,
        grad_input: str | Quantizer,
        grad_weight: str | Quantizer,
        backward_override: str | None = None,
        save_original_input: bool = False,
    ) -> HybridConfig:
        """Build a config from the format of each product: a word such as ``"fp8"``, or a quantizer for both operands.

        Raises:
            ValueError: If a word is unknown.
        """
        chosen = {"output": output, "grad_input": grad_input, "grad_weight": grad_weight}
        faces: dict[tuple[str, str], Quantizer] = {}
        for gemm in GEMMS:
            for role, direction in gemm[1:]:
                given = chosen[gemm.name]
                faces[role, direction] = _from_word(given, role) if isinstance(given, str) else given
        roles = {role: _merge(faces[role, "rowwise"], faces[role, "columnwise"]) for role in ROLES}
        return cls(**roles, backward_override=backward_override, save_original_input=save_original_input)

    @classmethod
    def parse(cls, spec: str) -> HybridConfig:
        """Build a config from a string.

        ``"fp8"`` is one format for all three products, ``"fp8/fp8_rowwise/bf16"`` one each for output, grad_input and
        grad_weight. Formats: ``bf16`` (none), ``fp8`` (per tensor; E4M3, gradients E5M2), ``fp8_rowwise`` (E4M3).
        Modifiers follow after ``+``: ``high_precision`` and ``dequantized`` (the backward overrides),
        ``save_original_input``.

        Raises:
            TypeError: If ``spec`` is not a string.
            ValueError: If it has an unknown word, with the nearest known one.
        """
        if not isinstance(spec, str):
            raise TypeError(f"HybridConfig.parse: a string is required, got {type(spec).__name__}")
        products, *modifiers = (part.strip() for part in spec.split("+"))
        words = [word.strip() for word in products.split("/")]
        if len(words) not in (1, 3):
            raise ValueError(
                "HybridConfig.parse: one format, or three for output/grad_input/grad_weight, are required, "
                f"got {spec!r}"
            )
        options = {}
        for modifier in modifiers:
            if modifier not in _MODIFIERS:
                raise ValueError(f"HybridConfig.parse: unknown modifier {modifier!r}; {nearest(modifier, _MODIFIERS)}")
            name, value = _MODIFIERS[modifier]
            if name in options:
                raise ValueError(f"HybridConfig.parse: one {name} is possible, got several in {spec!r}")
            options[name] = value
        output, grad_input, grad_weight = words * 3 if len(words) == 1 else words
        return cls.by_gemm(output=output, grad_input=grad_input, grad_weight=grad_weight, **options)  # type: ignore[arg-type]

    def formats(self, gemm: Gemm) -> tuple[Format, Format]:
        """Return the formats that ``gemm`` multiplies, left and right."""
        left, right = (getattr(getattr(self, role), f"{direction}_format") for role, direction in gemm[1:])
        return left, right

    def __str__(self) -> str:
        """Return a spec that ``parse`` reads back, or the full constructor where no spec says it."""
        for spec in self._specs():
            try:
                if HybridConfig.parse(spec) == self:
                    return spec
            except ValueError:
                continue
        return repr(self)

    def _specs(self) -> Iterator[str]:
        """Yield the specs that could describe this config."""
        suffix = "+save_original_input" if self.save_original_input else ""
        if self.backward_override is not None:
            suffix = f"+{self.backward_override}"
            yield from (word + suffix for word in _WORDS)
            return
        per_gemm = []
        for gemm in GEMMS:
            made = [_face_quantizer(getattr(self, role), direction) for role, direction in gemm[1:]]
            roles = [role for role, _ in gemm[1:]]
            per_gemm.append([w for w, make in _WORDS.items() if [make(role) for role in roles] == made])
        yield from (word + suffix for word in _WORDS if all(word in words for words in per_gemm))
        if all(per_gemm):
            yield "/".join(words[0] for words in per_gemm) + suffix

    def fingerprint(self) -> str:
        """Return a stable hash of the config, 16 hex digits: equal configs have equal ones, in every process."""
        text = json.dumps(config_to_dict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _stable_hash_for_caching(self) -> str:
        """Let torch.compile's caches key on the value of this config."""
        return self.fingerprint()


def _from_word(word: str, role: str) -> Quantizer:
    if word not in _WORDS:
        raise ValueError(f"HybridConfig: unknown format {word!r}; {nearest(word, _WORDS)}")
    return _WORDS[word](role)


def _merge(rowwise: Quantizer, columnwise: Quantizer) -> Quantizer:
    return rowwise if rowwise == columnwise else HybridQuantizer(rowwise, columnwise)


def _face_quantizer(quantizer: Quantizer, direction: str) -> Quantizer | None:
    """Return the plain quantizer behind one face, or None where the face is not made from the original."""
    if not isinstance(quantizer, HybridQuantizer):
        return quantizer
    if direction == "columnwise" and quantizer.columnwise_source != "original":
        return None
    child: Quantizer = getattr(quantizer, direction)
    return child


def from_factory(factory: Callable[[QuantizerRole], Quantizer], name: str) -> HybridConfig:
    """Ask a factory for the three quantizers of the layer called ``name``.

    Raises:
        TypeError: If it returns anything but a quantizer.
        RuntimeError: If it raises, with the role that it raised for.
    """
    made: dict[str, Any] = {}
    for role in (QuantizerRole("linear", tensor_type, name) for tensor_type in ROLES):
        try:
            made[role.tensor_type] = factory(role)
        except Exception as error:
            raise RuntimeError(f"quantizer factory: {factory!r} raised for {role}: {error}") from error
        if not isinstance(made[role.tensor_type], Quantizer):
            raise TypeError(
                f"quantizer factory: a quantizer is required, {factory!r} returned {made[role.tensor_type]!r} for "
                f"{role}; return IdentityQuantizer() for high precision"
            )
    return HybridConfig(**made)


ALLOWED_AO_MODULES.add("hybridtensor")
torch.serialization.add_safe_globals([HybridConfig])
