"""The kernels of delayed scaling: amaxes are recorded, and the scales of all layers follow from them in one launch."""

import triton
import triton.language as tl

from hybridtensor.kernels.numbers import FP32_MAX
from hybridtensor.kernels.tiles import record_amax


@triton.jit
def update_kernel(slots, targets, amaxes, REDUCED: tl.constexpr, BLOCK: tl.constexpr):
    """Update one scale.

    Args:
        slots: int64 ``[scales, 6]``: the addresses of the step's amax, of the encode scale and of the history, the
            entries of the history, how many of them count, and whether only the last one does.
        targets: fp32 ``[scales]``, what an amax is scaled to.
        amaxes: fp32 ``[scales]``, the amaxes of the step where they were ``REDUCED`` over ranks.
    """
    slot = tl.program_id(0)
    row = slots + slot * 6
    amax = tl.load(row).to(tl.pointer_type(tl.float32))
    scale = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    history = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    entries, counting, newest = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    if REDUCED:
        last = tl.load(amaxes + slot)
    else:
        last = tl.load(amax)
    # Zero: the layer did not run, or saw zeros only. Its scale and history stay.
    if last != 0:
        i = tl.arange(0, BLOCK)
        rolled = tl.load(history + i + 1, mask=i + 1 < entries, other=0.0)
        rolled = tl.where(i == entries - 1, last, rolled)
        largest = tl.where(newest != 0, last, tl.max(rolled, 0))
        # After an Inf the scale stays; the history has it all the same.
        if largest < float("inf"):
            tl.store(scale, tl.minimum(tl.div_rn(tl.load(targets + slot), largest), FP32_MAX))
        tl.debug_barrier()  # all entries are read before any is written
        # What has come into the first place counted above once more, and is cleared.
        tl.store(history + i, tl.where(i > entries - counting, rolled, 0.0), mask=i < entries)
    # The next step records from zero.
    tl.store(amax, 0.0)


@triton.jit
def raise_kernel(address, amaxes, size, BLOCK: tl.constexpr, HAS_AMAXES: tl.constexpr):
    """Raise a record to amaxes, if there are any, and as many numbers behind it to 1.

    Args:
        address: int64 ``[1]``, the address of the record, fp32 ``[2 * size]``; 0 where nothing is recorded.
        amaxes: fp32 ``[size]``; without, any address.
        size: How many numbers the record has.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = (i >= size).to(tl.float32)
    if HAS_AMAXES:
        amax = tl.load(amaxes + i, mask=i < size, other=1.0)
    record_amax(address, i, amax, i < 2 * size)
