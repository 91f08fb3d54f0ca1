"""The states that a prefill kernel hands out at the boundaries between chunks (S11), without a plan on the host."""

import triton
import triton.language as tl

from kdaserve import contract

C = tl.constexpr(contract.CHUNK)
"""Tokens of a chunk."""
NEVER = tl.constexpr(2147483647)  # a boundary that no sequence reaches
ENTRIES = tl.constexpr(256)  # snapshots looked at together


@triton.jit
def save_snapshots(b_S, boundary, i_n, o_S, m_S, p_pool, pool_s, p_sequence, p_tokens, p_slot, M):
    """Saves the state of sequence `i_n` to the slot of every snapshot at this boundary; the next boundary that has one, or `NEVER`.

    Entries are read again at each boundary that has a snapshot, so that the loop over chunks holds one number and not all of them. A boundary of
    -1, with any state, finds the first.

    Args:
        b_S: `[BV, BK]`, fp32; o_S, m_S: where it lies in a slot, and which of it exists.
        boundary: chunks before it; the end of the sequence has all of them before it, the last one whole or not.
        p_pool: the head's part of slot 0; p_sequence, p_tokens, p_slot `[M]`: the snapshots.
    """
    i_next = NEVER
    for i_m in range(0, M, ENTRIES):
        o_m = i_m + tl.arange(0, ENTRIES)
        m_m = o_m < M
        b_slot = tl.load(p_slot + o_m, mask=m_m, other=-1).to(tl.int64)
        b_boundary = ((tl.load(p_tokens + o_m, mask=m_m, other=0) + C - 1) // C).to(tl.int32)
        m_mine = (tl.load(p_sequence + o_m, mask=m_m, other=-1) == i_n) & (b_slot >= 0)
        i_next = tl.minimum(i_next, tl.min(tl.where(m_mine & (b_boundary > boundary), b_boundary, NEVER), 0))
        b_hit = tl.where(m_mine & (b_boundary == boundary), b_slot, -1)
        slot = tl.max(b_hit, 0)
        while slot >= 0:
            tl.store(p_pool + slot * pool_s + o_S, b_S.to(p_pool.dtype.element_ty), mask=m_S)
            b_hit = tl.where(b_hit < slot, b_hit, -1)
            slot = tl.max(b_hit, 0)
    return i_next


@triton.jit
def save_states(b_S, boundary, i_snapshot, i_track, i_n, o_S, m_S, p_pool, pool_s, p_track, p_sequence, p_tokens, p_slot, M):
    """What a call asks for of the state at a boundary; costs nothing where it asks for nothing. Returns the next snapshot's boundary.

    Args:
        i_snapshot: the next boundary with a snapshot, from `save_snapshots`; i_track: the boundary to track, negative for none.
        p_track: the part of `track_state` of this sequence and head, or None; p_slot: None without snapshots. Others as in `save_snapshots`.
    """
    if p_track is not None:
        if boundary == i_track:
            tl.store(p_track + o_S, b_S, mask=m_S)
    if p_slot is not None:
        if boundary == i_snapshot:
            i_snapshot = save_snapshots(b_S, boundary, i_n, o_S, m_S, p_pool, pool_s, p_sequence, p_tokens, p_slot, M)
    return i_snapshot
