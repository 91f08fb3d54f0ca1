"""Prefill, second kernel: chunk after chunk through the state. One program a sequence, head and slice of V."""

import helion.language as hl
import torch

from kdaserve.ops.chunk_kda.helion.tiles import across, first_unit, read, through_chunk, turned
from kdaserve.ops.helion.launch import kernel
from kdaserve.ops.helion.math import address
from kdaserve.ops.helion.states import saved


@kernel("v", "o", "pool", "track", own=["rows", "pairs", "decay", "h"])
def chain_kernel(
    rows, pairs, decay, v, o, pool, index, cu_seqlens, h, chunk_offsets, track, track_chunk, sequence, tokens, slots,
    N: int, T: int, HV: int, pool_stride: int, track_stride: int, M: int,
    C: hl.constexpr, K: hl.constexpr, V: hl.constexpr, BK: hl.constexpr, BV: hl.constexpr, TRANSPOSED: hl.constexpr, ENTRIES: hl.constexpr,
    OP: hl.constexpr,
):  # fmt: skip
    """E8 to E11 of all chunks of a sequence, the output written on the way, and the states at the boundaries that the call asks for.

    TRANSPOSED holds the state as [BV, BK], the left operand of its products, which stays in registers; that takes a slice of 64 to fill the
    matrix units. Otherwise it is [BK, BV], the right operand, which goes through shared memory.
    """
    for i_v, i_h, i_n in hl.grid([(V + BV - 1) // BV, HV, N]):
        o_c = hl.arange(C)
        o_k = hl.arange(BK)
        o_v = i_v * BV + hl.arange(BV)
        if TRANSPOSED:
            m_S = (o_v < V)[:, None] & (o_k < K)[None, :]
            o_S = (o_v[:, None] * K + o_k[None, :]).to(torch.int32)  # half the registers of 64 bits
        else:
            m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
            o_S = (o_v[None, :] * K + o_k[:, None]).to(torch.int32)
        o_head = i_h * (V * K)
        o_ck = (o_c[:, None] * BK + o_k[None, :]).to(torch.int32)
        o_cc = (o_c[:, None] * C + hl.arange(C)[None, :]).to(torch.int32)
        if cu_seqlens is not None:
            i_b = 0
            start = hl.load(cu_seqlens, [i_n]).to(torch.int64)
            length = hl.load(cu_seqlens, [i_n + 1]).to(torch.int64) - start
            unit = first_unit(start, i_n)
        else:
            i_b = i_n
            start = hl.zeros([], dtype=torch.int64)
            length = start + T
            unit = start + i_n * ((T + C - 1) // C)
        chunks = (length + (C - 1)) // C
        slot = hl.load(index, [i_n]).to(torch.int64)
        o_slot = slot * pool_stride + o_head
        S = hl.load(pool, [address(o_slot, o_S)], extra_mask=m_S & (slot >= 0)).to(torch.float32)
        tracked = hl.zeros([], dtype=torch.int64) - 1
        if track is not None:
            tracked = hl.load(track_chunk, [i_n]).to(torch.int64)
        if h is not None:
            o_h = hl.load(chunk_offsets, [i_n]).to(torch.int64) * (HV * (V * K)) + o_head
        next_save = hl.zeros([], dtype=torch.int64)  # the first boundary looks for snapshots
        # Triton does not copy the decay ahead, as it does the tiles; so it is asked for a chunk early.
        s_k = across(o_k, TRANSPOSED)
        next_decay = hl.load(decay, [(unit * HV + i_h) * BK + s_k], extra_mask=(s_k >= 0) & (chunks > 0))
        for i_c in hl.grid(chunks):
            if track is not None:
                hl.store(track, [address(i_n * track_stride + o_head, o_S)], S, extra_mask=m_S & (tracked == i_c))
            if slots is not None:
                if next_save == i_c:
                    next_save = chunks
                    for i_m in hl.grid((M + ENTRIES - 1) // ENTRIES):
                        o_m = i_m * ENTRIES + hl.arange(ENTRIES)
                        at, to = saved(sequence, tokens, slots, o_m, M, i_n)
                        next_save = torch.minimum(next_save, torch.amin(torch.where((to >= 0) & (at > i_c), at, chunks), 0))
                        to = torch.where(at == i_c, to, -1)
                        place = torch.amax(to, 0)
                        while place >= 0:
                            hl.store(pool, [address(place * pool_stride + o_head, o_S)], S.to(pool.dtype), extra_mask=m_S)
                            to = torch.where(to < place, to, -1)
                            place = torch.amax(to, 0)
            record = (unit + i_c) * HV + i_h
            o_t = start + i_c * C + o_c
            m_o = (o_c < length - i_c * C)[:, None] & (o_v < V)[None, :]
            kd = hl.load(rows, [address(record * (3 * C * BK), o_ck)])
            x = hl.load(v, [i_b, o_t, i_h, o_v], extra_mask=m_o).to(torch.float32)
            b_M = hl.load(pairs, [address(record * (2 * C * C) + C * C, o_cc)])
            qd = hl.load(rows, [address(record * (3 * C * BK) + C * BK, o_ck)])
            qk = hl.load(pairs, [address(record * (2 * C * C), o_cc)])
            ke = hl.load(rows, [address(record * (3 * C * BK) + 2 * C * BK, o_ck)])
            b_decay = next_decay
            next_decay = hl.load(decay, [(record + HV) * BK + s_k], extra_mask=(s_k >= 0) & (i_c + 1 < chunks))
            state = S.to(OP)
            known = read(kd, state, TRANSPOSED)
            if h is not None:  # not before the product, which would then read a state whose writes not all threads have made visible (docs/facts.md)
                hl.store(h, [address(o_h + i_c * (HV * (V * K)), o_S)], S.to(h.dtype), extra_mask=m_S)
            r = (turned(x, TRANSPOSED) - known).to(OP)  # E8, with E9 put around it: w and u are never formed
            S, b_o = through_chunk(S, state, r, qd, ke, qk, b_M, b_decay, TRANSPOSED, OP)
            hl.store(o, [i_b, o_t, i_h, o_v], turned(b_o, TRANSPOSED).to(o.dtype), extra_mask=m_o)
        if slots is not None:
            for i_e in hl.grid((M + ENTRIES - 1) // ENTRIES):
                o_m = i_e * ENTRIES + hl.arange(ENTRIES)
                at, to = saved(sequence, tokens, slots, o_m, M, i_n)
                to = torch.where(at == chunks, to, -1)
                place = torch.amax(to, 0)
                while place >= 0:
                    hl.store(pool, [address(place * pool_stride + o_head, o_S)], S.to(pool.dtype), extra_mask=m_S)
                    to = torch.where(to < place, to, -1)
                    place = torch.amax(to, 0)
        hl.store(pool, [address(o_slot, o_S)], S.to(pool.dtype), extra_mask=m_S & (slot >= 0) & (length > 0))
