"""The spec of a recipe, a string such as ``"nvfp4/fp8/bf16+one_d"``: how it is read and written.

Words:

- A *word* names a format (``fp8``). It means a quantizer for each face of the product it is for; two words
  (``fp8_block:mxfp4``) are one for the left operand and one for the right one.
- A *modifier* changes some of these quantizers (``pow2_scale``), or what faces are made from (``rowwise_dequantized``).
- A *policy* sets a field of the config (``dequantized``).

Words become faces, to which the modifiers apply; then the two faces of each role are merged. ``spec_of_config`` goes
the other way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridtensor.arguments import nearest, require_kind
from hybridtensor.quantizers import (
    DelayedFloat8Quantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from hybridtensor.quantizers.hybrid import of_direction
from hybridtensor.recipe_table import TABLE
from hybridtensor.state import ROLES

DIRECTIONS = ("rowwise", "columnwise")
OF_ROWWISE = "rowwise_dequantized"


class Gemm(NamedTuple):
    """A matrix product of a linear layer: name, and role and direction of both operands."""

    name: str
    left: tuple[str, str]
    right: tuple[str, str]


GEMMS = (
    Gemm("output", ("input", "rowwise"), ("weight", "rowwise")),
    Gemm("grad_input", ("grad_output", "rowwise"), ("weight", "columnwise")),
    Gemm("grad_weight", ("grad_output", "columnwise"), ("input", "columnwise")),
)
GEMM_OF = {operand: gemm.name for gemm in GEMMS for operand in gemm[1:]}

Word = Callable[[str, str], Quantizer]
"""Gives the quantizer of a role's face in a product."""


def _nvfp4(role: str, gemm: str) -> Quantizer:
    """Return the quantizer of NVIDIA's recipe: 2-D weights, rotation in grad_weight, stochastic gradients."""
    return NVFP4Quantizer(
        two_d=role == "weight",
        hadamard=gemm == "grad_weight",
        rounding="stochastic" if role == "grad_output" else "nearest",
    )


def _mxfp4(role: str, gemm: str) -> Quantizer:
    """Return a quantizer with rotation in grad_weight and stochastically rounded gradients, as of NVFP4."""
    return MXFP4Quantizer(
        hadamard=gemm == "grad_weight",
        rounding="stochastic" if role == "grad_output" else "nearest",
    )


def _element(role: str) -> str:
    return "e5m2" if role == "grad_output" else "e4m3"


def _block(role: str) -> str:
    return "128x128" if role == "weight" else "1x128"


WORDS: Mapping[str, Word] = MappingProxyType(
    {
        "bf16": lambda role, gemm: IdentityQuantizer(),
        "fp8": lambda role, gemm: Float8Quantizer(dtype=_element(role)),
        "fp8_rowwise": lambda role, gemm: Float8Quantizer(granularity="row"),
        "fp8_block": lambda role, gemm: Float8Quantizer(granularity="block", block=_block(role)),
        "fp8_delayed": lambda role, gemm: DelayedFloat8Quantizer(dtype=_element(role)),
        "mxfp8": lambda role, gemm: MXFP8Quantizer(),
        "mxfp4": _mxfp4,
        "nvfp4": _nvfp4,
    }
)
POLICIES: Mapping[str, tuple[str, str | bool]] = MappingProxyType(
    {
        "high_precision": ("backward_override", "high_precision"),
        "dequantized": ("backward_override", "dequantized"),
        "save_original_input": ("save_original_input", True),
        "fast_accum": ("fast_accum", True),
        "bf16_weight_values": ("bf16_weight_values", True),
        "keep_faces": ("keep_faces", "always"),
        "free_faces": ("keep_faces", "never"),
    }
)
FLAGS = MappingProxyType(
    {name: to for name, to in POLICIES.items() if to[0] != "backward_override"}
)


@dataclass
class Faces:
    """The quantizer of each face by role and direction, and the roles whose columnwise face is requantized."""

    quantizers: dict[tuple[str, str], Quantizer]
    of_rowwise: set[str] = field(default_factory=set)

    @classmethod
    def of_words(cls, words: Iterable[str | Quantizer]) -> Faces:
        """Return the faces of three words (or quantizers); raise ValueError for an unknown word."""
        quantizers = {}
        for gemm, word in zip(GEMMS, words, strict=True):
            for operand, of_operand in zip(gemm[1:], _by_operand(word), strict=True):
                quantizers[operand] = _quantizer(of_operand, operand[0], gemm.name)
        return cls(quantizers)

    @classmethod
    def of_config(cls, config: Any) -> Faces:
        faces = cls({})
        for role in ROLES:
            quantizer: Quantizer = getattr(config, role)
            for direction in DIRECTIONS:
                faces.quantizers[role, direction] = of_direction(quantizer, direction)
            if quantizer.derives_columnwise:
                faces.of_rowwise.add(role)
        return faces

    def by_role(self) -> dict[str, Any]:
        """Return the quantizer of each role, plain where both faces agree."""
        made = {}
        for role in ROLES:
            row, column = (self.quantizers[role, direction] for direction in DIRECTIONS)
            source = OF_ROWWISE if role in self.of_rowwise else "original"
            made[role] = simplified(HybridQuantizer(row, column, source))
        return made


def _by_operand(word: str | Quantizer) -> list[str | Quantizer]:
    """Split ``left:right`` into the words of both operands; one word is for both."""
    words: list[str | Quantizer] = [word]
    if isinstance(word, str):
        words = [one.strip() for one in word.split(":")]
    if len(words) > 2:
        raise ValueError(
            f"HybridConfig: {word!r} has {len(words)} formats, but a product has two operands; give one "
            "for both, or left:right"
        )
    return words if len(words) == 2 else words * 2


def _quantizer(word: str | Quantizer, role: str, gemm: str) -> Quantizer:
    if not isinstance(word, str):
        require_kind("HybridConfig", f"a format or a quantizer for {gemm}", word, Quantizer)
        return word
    if word not in WORDS:
        if spec := next((row.spec for row in TABLE if row.name == word), None):
            raise ValueError(
                f"HybridConfig: a format is required, got the recipe {word!r}, which is used alone "
                f"(recipes.from_name); to change it, start from its spec, {spec!r}"
            )
        raise ValueError(f"HybridConfig: unknown format {word!r}; {nearest(word, WORDS)}")
    return WORDS[word](role, gemm)


@dataclass(frozen=True)
class Option:
    """A modifier that sets one field of the quantizers of some kinds, in some roles and directions.

    Attributes:
        kinds: Classes of the quantizers.
        field: Name of the field.
        value: What it is set to.
        roles: Where.
        directions: In which faces.
        refines: The value that it replaces, which another modifier sets; None replaces any.
        resets: Fields that are as by default with it, because their defaults depend on this one, or it takes
            their place.
        products: In the operands of which products.
    """

    kinds: tuple[type[Quantizer], ...]
    field: str
    value: str | bool | int
    roles: tuple[str, ...] = ROLES
    directions: tuple[str, ...] = DIRECTIONS
    refines: str | int | None = None
    resets: tuple[str, ...] = ()
    products: tuple[str, ...] = tuple(gemm.name for gemm in GEMMS)

    def concerns(self, role: str, direction: str, quantizer: Quantizer) -> bool:
        """Return whether this option applies to a face's quantizer."""
        in_scope = role in self.roles and direction in self.directions
        in_scope = in_scope and GEMM_OF[role, direction] in self.products
        return in_scope and type(quantizer) in self.kinds

    def apply(self, faces: Faces) -> None:
        for (role, direction), quantizer in faces.quantizers.items():
            if self.concerns(role, direction, quantizer):
                faces.quantizers[role, direction] = self.changed(quantizer)

    def changed(self, quantizer: Quantizer) -> Quantizer:
        """Return the quantizer with the field set, or unchanged if it lacks the value that this refines."""
        if self.refines is not None and getattr(quantizer, self.field) != self.refines:
            return quantizer
        defaults = {known.name: known.default for known in dataclasses.fields(quantizer)}
        fields = {**{name: defaults[name] for name in self.resets}, self.field: self.value}
        return dataclasses.replace(quantizer, **fields)


@dataclass(frozen=True)
class OfRowwise:
    """A modifier that requantizes columnwise faces from the rowwise data, in some roles."""

    roles: tuple[str, ...]

    def apply(self, faces: Faces) -> None:
        faces.of_rowwise.update(self.roles)


Modifier = Option | OfRowwise
"""The effect of a word after ``+``, by ``apply``."""


def _four_over_six(*roles: str) -> Option:
    return Option((NVFP4Quantizer,), "four_over_six", "mae", roles, resets=("scale_max",))


MODIFIERS: Mapping[str, Modifier] = MappingProxyType(
    {
        "pow2_scale": Option((Float8Quantizer,), "pow2_scale", True),
        "fp32_scale": Option((Float8Quantizer,), "pow2_scale", False),
        "e4m3_grad": Option(
            (Float8Quantizer, DelayedFloat8Quantizer), "dtype", "e4m3", ("grad_output",)
        ),
        "most_recent": Option((DelayedFloat8Quantizer,), "algorithm", "most_recent"),
        "mx_two_d": Option((MXFP8Quantizer, MXFP4Quantizer), "two_d", True, ("weight",)),
        "mx_e5m2_grad": Option((MXFP8Quantizer,), "dtype", "e5m2", ("grad_output",)),
        "mx_even": Option((MXFP4Quantizer,), "scale_rounding", "even"),
        "mx_floor": Option((MXFP4Quantizer,), "scale_rounding", "floor"),
        "one_d": Option((NVFP4Quantizer,), "two_d", False, ("weight",)),
        "nearest": Option((NVFP4Quantizer, MXFP4Quantizer), "rounding", "nearest"),
        "no_hadamard": Option((NVFP4Quantizer, MXFP4Quantizer), "hadamard", False),
        "row_scaled_input": Option((NVFP4Quantizer,), "row_scaled", True, ("input",), ("rowwise",)),
        "four_over_six_weight": _four_over_six("weight"),
        "four_over_six_input": _four_over_six("input"),
        "four_over_six": _four_over_six("input", "weight"),
        "four_over_six_mse": Option((NVFP4Quantizer,), "four_over_six", "mse", refines="mae"),
        "four_over_six_448": Option((NVFP4Quantizer,), "scale_max", 448, refines=256),
        "eden": Option(
            (NVFP4Quantizer,),
            "rounding",
            "eden",
            resets=("two_d", "hadamard", "row_scaled", "four_over_six", "scale_max"),
            products=("grad_input", "grad_weight"),
        ),
        "rowwise_dequantized": OfRowwise(("input", "weight")),
        "rowwise_dequantized_weight": OfRowwise(("weight",)),
    }
)


@dataclass(frozen=True)
class Spec:
    """A parsed spec: a word per product, modifiers in the order of application, and policies."""

    words: tuple[str, str, str]
    modifiers: tuple[str, ...]
    policies: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Spec:
        require_kind("HybridConfig.parse", "a string", text, str)
        products, *after = (part.strip() for part in text.split("+"))
        words = [word.strip() for word in products.split("/")]
        if len(words) not in (1, 3):
            raise ValueError(
                "HybridConfig.parse: one format, or three for output/grad_input/grad_weight, are "
                f"required, got {text!r}"
            )
        policies = _policies(after, text)
        overridden = any(POLICIES[policy][0] == "backward_override" for policy in policies)
        if overridden and words[1:] not in ([], words[:1] * 2, ["bf16"] * 2):
            raise ValueError(
                "HybridConfig.parse: a backward override replaces the formats of grad_input and "
                f"grad_weight, got {text!r}; name the format of output only"
            )
        output, grad_input, grad_weight = words if len(words) == 3 else words * 3
        modifiers = tuple(name for name in after if name in MODIFIERS)
        return cls((output, grad_input, grad_weight), modifiers, policies)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``HybridConfig``; raise ValueError for an unknown format."""
        faces = Faces.of_words(self.words)
        for name in sorted(self.modifiers, key=_turn):
            MODIFIERS[name].apply(faces)
        return {**faces.by_role(), **dict(POLICIES[policy] for policy in self.policies)}

    def shorter(self) -> Iterator[tuple[str, Spec]]:
        """Yield each modifier and policy, and this spec without it."""
        names = self.modifiers
        for i, name in enumerate(names):
            yield name, dataclasses.replace(self, modifiers=names[:i] + names[i + 1 :])
        names = self.policies
        for i, name in enumerate(names):
            yield name, dataclasses.replace(self, policies=names[:i] + names[i + 1 :])

    def __str__(self) -> str:
        words = self.words[:1] if len(set(self.words)) == 1 else self.words
        return "+".join(["/".join(words), *self.modifiers, *self.policies])


def _turn(modifier: str) -> int:
    """Return a modifier's position in the order of application, independent of where it is written."""
    option = MODIFIERS[modifier]
    if not isinstance(option, Option):
        return 0
    return 2 if len(option.resets) > 1 else int(option.refines is not None)


def _policies(names: list[str], text: str) -> tuple[str, ...]:
    """Return the policies among modifiers, after checking that all are known."""
    policies: dict[str, str] = {}
    for name in names:
        if name in MODIFIERS:
            continue
        if name not in POLICIES:
            known = [*POLICIES, *MODIFIERS]
            raise ValueError(
                f"HybridConfig.parse: unknown modifier {name!r}; {nearest(name, known)}"
            )
        policy = POLICIES[name][0]
        if policy in policies:
            raise ValueError(
                f"HybridConfig.parse: one {policy} is possible, got several in {text!r}"
            )
        policies[policy] = name
    return tuple(policies.values())


def simplified(quantizer: Quantizer) -> Quantizer:
    """Return the shortest quantizer of the same faces; see ``HybridQuantizer.simplified``."""
    return quantizer.simplified() if isinstance(quantizer, HybridQuantizer) else quantizer
