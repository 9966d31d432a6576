"""Storing tiles of faces: elements of every format, several in a word, and scales of blocks.

Legend: as in ``quantize``.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.numbers import e2m1_codes, e2m1_words, fp8_codes, fp8_words, pack


@triton.jit
def stored(entries, STEP: tl.constexpr):
    """Return the number of stored entries along the contraction; a tile holds zeros beyond the matrix."""
    if STEP > 1:
        return tl.cdiv(entries, STEP) * STEP
    else:
        return entries


@triton.jit
def store_scales(out, values, place, P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr):
    """Store the scales of a tile, one per ``SIDE x LENGTH`` entries, with strides: blocks need not be row by row."""
    i = place.other // SIDE + tl.arange(0, P // SIDE)[:, None]
    j = place.along // LENGTH + tl.arange(0, Q // LENGTH)[None, :]
    mask = (i < tl.cdiv(place.OTHER, SIDE)) & (j < tl.cdiv(place.ALONG, LENGTH))
    offsets = i.to(tl.int64) * out.stride_other + j.to(tl.int64) * out.stride_along
    tl.store(out.scales + offsets, values, mask=mask)


@triton.jit
def store_tile(target, codes, place, PER: tl.constexpr, TILE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """Store numbers with ``PER`` elements each, of a tile."""
    i = tl.arange(0, P)[:, None]
    j = tl.arange(0, Q // PER)[None, :]
    width = place.pitch // PER
    start = place.other.to(tl.int64) * width + place.along // PER
    # No eviction hint on the stores: evicted first, they cost a cast 4 %.
    offsets = (i.to(tl.int64) * width if TILE.wide else i * width) + j
    if TILE.even:
        tl.store(target + start + offsets, codes.to(target.dtype.element_ty))
    else:
        # No word lies half inside: ``pack`` is asked for only where rows of elements are whole words.
        mask = (i < place.OTHER - place.other) & (j < (place.ALONG - place.along) // PER)
        tl.store(target + start + offsets, codes.to(target.dtype.element_ty), mask=mask)


@triton.jit
def store_fp8(target, y, place, FACE: tl.constexpr, TILE: tl.constexpr, HW: tl.constexpr,
               P: tl.constexpr, Q: tl.constexpr):  # fmt: skip
    """Round a tile to FP8 and store it, four elements at once where they pack."""
    if FACE.pack:
        words = target.to(tl.pointer_type(tl.int32))
        store_tile(words, fp8_words(y, P, Q, FACE.e5m2, HW), place, 4, TILE, P, Q)
    else:
        store_tile(target, fp8_codes(y, FACE.e5m2, HW), place, 1, TILE, P, Q)


@triton.jit
def store_fp4(target, y, uniform, place, FACE: tl.constexpr, TILE: tl.constexpr, HW: tl.constexpr,
               P: tl.constexpr, Q: tl.constexpr):  # fmt: skip
    """Round a tile to E2M1 and store it, eight elements at once where they pack."""
    words = target.to(tl.pointer_type(tl.int32))
    if FACE.pack and not FACE.stochastic:
        store_tile(words, e2m1_words(y, P, Q, HW), place, 8, TILE, P, Q)
    elif FACE.pack:
        codes = e2m1_codes(y, uniform, True)
        store_tile(words, pack(codes, P, Q, 4, 32), place, 8, TILE, P, Q)
    else:
        codes = e2m1_codes(y, uniform, FACE.stochastic)
        store_tile(target, pack(codes, P, Q, 4, 8), place, 2, TILE, P, Q)
