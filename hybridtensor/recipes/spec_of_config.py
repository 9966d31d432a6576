"""The spec of a config's fields: the difference between a face and what a word means for it names the modifiers."""

from __future__ import annotations

import dataclasses

from hybridtensor.quantizers import Quantizer
from hybridtensor.recipes.spec import (
    GEMM_OF,
    GEMMS,
    MODIFIERS,
    WORDS,
    Faces,
    Gemm,
    OfRowwise,
    Option,
    Spec,
)


def derive(faces: Faces, backward_override: str | None, flags: dict[str, bool]) -> Spec | None:
    """Return the only candidate spec of a config's fields, or None; the caller checks that it parses to the config."""
    gemms = GEMMS if backward_override is None else GEMMS[:1]  # the override replaced the others
    words, named = [], set()
    for gemm in gemms:
        found = _word_for(gemm, faces)
        if found is None:
            return None
        words.append(found[0])
        named |= found[1]
    policies = []
    if backward_override is not None:
        words, policies = words * 3, [backward_override]
        flags = {**flags, "save_original_input": False}  # which the override implies, or not
    else:
        named |= _sources(faces)
    policies += [name for name, is_set in flags.items() if is_set]
    output, grad_input, grad_weight = words
    named = _widened(named)
    modifiers = tuple(name for name in MODIFIERS if name in named)
    return Spec((output, grad_input, grad_weight), modifiers, tuple(policies))


def _word_for(gemm: Gemm, faces: Faces) -> tuple[str, set[str]] | None:
    """Return a product's word, or that of each operand, and the modifiers by which its faces differ from it."""
    left, right = (_words_for(*operand, faces.quantizers[operand]) for operand in gemm[1:])
    for word in left:
        if word in right:
            return word, left[word] | right[word]
    if not left or not right:
        return None
    first, second = next(iter(left)), next(iter(right))
    return f"{first}:{second}", left[first] | right[second]


def _words_for(role: str, direction: str, face: Quantizer) -> dict[str, set[str]]:
    """Return the words that a face can have, each with the modifiers by which it differs."""
    found = {word: _differences(word, role, direction, face) for word in WORDS}
    return {word: named for word, named in found.items() if named is not None}


def _differences(word: str, role: str, direction: str, face: Quantizer) -> set[str] | None:
    """Return the modifiers that change a face from ``word`` to ``face``; None if there are none."""
    meant = WORDS[word](role, GEMM_OF[role, direction])
    if type(meant) is not type(face):
        return None
    named = set()
    fields = [known.name for known in dataclasses.fields(meant)]
    for name in sorted(fields, key=lambda name: name not in _DECIDING):
        value = getattr(face, name)
        if getattr(meant, name) == value:
            continue
        settings = _options(role, direction, meant, name, value)
        if settings is None:
            return None
        for setting in settings:
            meant = setting[1].changed(meant)
            named.add(setting[0])
    return named


_DECIDING = {
    option.field
    for option in MODIFIERS.values()
    if isinstance(option, Option) and len(option.resets) > 1
}
"""Fields that are looked at first, because options that set them reset others."""


def _options(
    role: str, direction: str, meant: Quantizer, name: str, value: object
) -> list[tuple[str, Option]] | None:
    """Return the modifiers that set a face's field to ``value``, or None."""
    for modifier, option in MODIFIERS.items():
        if not isinstance(option, Option) or not option.concerns(role, direction, meant):
            continue
        if (option.field, option.value) != (name, value):
            continue
        if option.refines in (None, getattr(meant, name)):
            return [(modifier, option)]
        before = _options(role, direction, meant, name, option.refines)
        if before is not None:
            return [*before, (modifier, option)]
    return None


def _widened(named: set[str]) -> set[str]:
    """Replace several modifiers by one that has all their roles."""
    for name, wide in MODIFIERS.items():
        if not isinstance(wide, Option):
            continue
        parts = {
            part
            for part in named
            if isinstance(option := MODIFIERS[part], Option)
            and part != name
            and dataclasses.replace(option, roles=wide.roles) == wide
        }
        roles = {role for part in parts for role in getattr(MODIFIERS[part], "roles", ())}
        if parts and roles == set(wide.roles):
            named = (named - parts) | {name}
    return named


def _sources(faces: Faces) -> set[str]:
    """Return the modifier for the fewest roles that requantizes these columnwise faces, if any."""
    found = [
        (len(modifier.roles), name)
        for name, modifier in MODIFIERS.items()
        if isinstance(modifier, OfRowwise) and faces.of_rowwise <= set(modifier.roles)
    ]
    return {min(found)[1]} if faces.of_rowwise and found else set()
