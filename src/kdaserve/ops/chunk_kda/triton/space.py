"""The workspace between the two kernels: one record a chunk and head, found on the device from `cu_seqlens` without a prefix sum or a sync.

A *unit* is a chunk of 64 tokens of one sequence. Sequence n owns the units from cu_seqlens[n] // 64 + n on: that leaves room for all its chunks,
whatever the lengths before it are, so that T // 64 + N units suffice; some stay empty.

A record is a header in fp32, the decay of the chunk `[BK]` and a mark, and tiles in the operand dtype: k decayed from the chunk's start `[C, BK]`, q
likewise, k decayed to the chunk's end, and side by side the q.k of E10 and M beta `[C, 2 C]`. All headers stand before all tiles.
"""

import triton
import triton.language as tl

from kdaserve.ops.jit.states import C

MARK = tl.constexpr(32)
"""Floats that the mark takes, so that the next header starts at a multiple of 128 bytes."""


@triton.constexpr_function
def header(BK):
    """Floats of a header."""
    return BK + MARK


@triton.constexpr_function
def tiles(BK):
    """Elements of the tiles of a record."""
    return C * (3 * BK + 2 * C)


@triton.jit
def first_unit(p_cu, n):
    """The unit of the first chunk of sequence n."""
    return (tl.load(p_cu + n) // C).to(tl.int32) + n


@triton.jit
def sequence_of(p_cu, N, unit):
    """The last sequence whose first unit is not behind `unit`, by bisection."""
    low = 0
    high = N
    while low + 1 < high:
        middle = (low + high) // 2
        if first_unit(p_cu, middle) <= unit:
            low = middle
        else:
            high = middle
    return low
