"""The workspace between the two kernels: one record a chunk and head, found on the device from `cu_seqlens` without a prefix sum or a sync.

A *unit* is a chunk of 64 tokens of one sequence. Sequence n owns the units from cu_seqlens[n] // 64 + n on: that leaves room for all its chunks,
whatever the lengths before it are, so that T // 64 + N units suffice; some stay empty.

A record holds the decay of the chunk `[BK]` and a mark, both fp32, and in the operand dtype: k decayed from the chunk's start `[C, BK]`, q likewise,
k decayed to the chunk's end, the q.k of E10 `[C, C]` and M beta `[C, C]`.
"""

import triton
import triton.language as tl

from kdaserve.ops.jit.states import C

MARK = tl.constexpr(32)
"""Floats that the mark takes, so that what follows starts at a multiple of 128 bytes."""


@triton.constexpr_function
def size(BK, OP):
    """Floats of a record."""
    return BK + MARK + C * (3 * BK + 2 * C) * OP.primitive_bitwidth // 32


@triton.jit
def places(p_space, record, BK: tl.constexpr, OP: tl.constexpr):
    """Where decay, mark and the first of the tiles of a record are."""
    p_decay = p_space + record * size(BK, OP)
    p_mark = p_decay + BK
    return p_decay, p_mark, (p_mark + MARK).to(tl.pointer_type(OP), bitcast=True)


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
