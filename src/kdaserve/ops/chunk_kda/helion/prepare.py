"""Prefill, first kernel: what a chunk can compute without knowing the state it starts from. One program a chunk and head.

Two tokens of one half of a chunk meet at the half's middle: the row's factor is exp2 of the log decay between the middle and the row, the column's
the reverse. Both stay within 2 ** +-124 while no 16 tokens decay by more than that; for the bounded gate with lower_bound >= -5 this always holds.
Tokens of different halves meet at the boundary, where both factors are <= 1.

Where keys repeat, the chunk is written in another basis, in which E9 to E11 keep their form; the `triton` backend's prepare kernel explains it.
"""

import helion.language as hl
import torch

from kdaserve.contract import L2_EPS
from kdaserve.ops.chunk_kda.helion.tiles import (
    decays,
    differences,
    first_unit,
    inverse,
    key_differences,
    last_repeated,
    meet,
    meet_by_levels,
    picks,
    repetitions,
    sums,
    write_strengths,
)
from kdaserve.ops.helion.launch import kernel
from kdaserve.ops.helion.math import address, product
from kdaserve.ops.jit.chunking import OFTEN, WIDEST


@kernel("q", "k", "g", "dt_bias", "o", own=["rows", "pairs", "decay", "mark"])
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, o, rows, pairs, decay, mark, N: int, T: int, HV: int, units: int, scale: float, lower_bound: float,
    C: hl.constexpr, GROUP: hl.constexpr, K: hl.constexpr, V: hl.constexpr, BK: hl.constexpr, BV: hl.constexpr, BS: hl.constexpr,
    GATE: hl.constexpr, L2NORM: hl.constexpr, BETA_RAW: hl.constexpr, WIDE: hl.constexpr, PARTS: hl.constexpr, OP: hl.constexpr, MERGE: hl.constexpr,
):  # fmt: skip
    """E5 to E7, the decayed q and k, and the q.k of E10 of one chunk and head, into its record of the workspace.

    WIDE says what becomes of halves whose decay is wider than WIDEST: "never" means there are none; "marked" marks the chunk; "only" computes
    the marked chunks again, by levels. (In one kernel the levels would make every chunk spill registers.)
    """
    HALF = C // 2
    for i_h, i_u in hl.grid([HV, units]):
        record = i_u * HV + i_h
        if cu_seqlens is not None:
            end = hl.load(cu_seqlens, [N]).to(torch.int64)
            if WIDE != "only":
                if i_u * C + C > end:  # S4
                    for i_r in hl.grid(C // 8):
                        t_o = i_u * C + i_r * 8 + hl.arange(8)
                        o_v = hl.arange(BV)
                        m_o = ((t_o >= end) & (t_o < T))[:, None] & (o_v < V)[None, :]
                        hl.store(o, [0, t_o, i_h, o_v], hl.zeros([8, BV], dtype=o.dtype), extra_mask=m_o)
            i_n = hl.zeros([], dtype=torch.int64)
            after = hl.zeros([], dtype=torch.int64) + N
            while i_n + 1 < after:
                middle = (i_n + after) >> 1
                behind = first_unit(hl.load(cu_seqlens, [middle]).to(torch.int64), middle) <= i_u
                i_n = torch.where(behind, middle, i_n)
                after = torch.where(behind, after, middle)
            start = hl.load(cu_seqlens, [i_n]).to(torch.int64)
            skipped = (i_u - first_unit(start, i_n)) * C
            n_rows = hl.load(cu_seqlens, [i_n + 1]).to(torch.int64) - start - skipped
            start = start + skipped
            i_b = 0
        else:
            chunks = (T + C - 1) // C
            i_b = i_u // chunks
            start = hl.zeros([], dtype=torch.int64) + (i_u - i_b * chunks) * C
            n_rows = T - start
        live = n_rows > 0
        if WIDE == "only":
            live = live & (hl.load(mark, [record]) > 0.0)
        if live:
            i_hk = i_h // GROUP
            o_rows = record * (3 * C * BK)
            o_pairs = record * (2 * C * C)
            o_r = hl.arange(HALF)
            o_s = hl.arange(BS)
            m_1 = o_r < n_rows
            m_2 = o_r + HALF < n_rows
            t_1 = start + o_r
            t_2 = start + HALF + o_r
            q_norm1 = hl.full([HALF], 1.0, dtype=torch.float32) * scale
            q_norm2 = q_norm1
            k_norm1 = hl.full([HALF], 1.0, dtype=torch.float32)
            k_norm2 = k_norm1
            if L2NORM:
                b_q1 = hl.zeros([HALF, BS], dtype=torch.float32)
                b_q2 = hl.zeros([HALF, BS], dtype=torch.float32)
                b_k1 = hl.zeros([HALF, BS], dtype=torch.float32)
                b_k2 = hl.zeros([HALF, BS], dtype=torch.float32)
                for i_k in hl.static_range(BK // BS):
                    o_k = i_k * BS + o_s
                    m_1k = m_1[:, None] & (o_k < K)[None, :]
                    m_2k = m_2[:, None] & (o_k < K)[None, :]
                    x = hl.load(q, [i_b, t_1, i_hk, o_k], extra_mask=m_1k).to(torch.float32)
                    b_q1 = b_q1 + x * x
                    x = hl.load(q, [i_b, t_2, i_hk, o_k], extra_mask=m_2k).to(torch.float32)
                    b_q2 = b_q2 + x * x
                    x = hl.load(k, [i_b, t_1, i_hk, o_k], extra_mask=m_1k).to(torch.float32)
                    b_k1 = b_k1 + x * x
                    x = hl.load(k, [i_b, t_2, i_hk, o_k], extra_mask=m_2k).to(torch.float32)
                    b_k2 = b_k2 + x * x
                q_norm1 = q_norm1 * torch.rsqrt(b_q1.sum(1) + L2_EPS)
                q_norm2 = q_norm2 * torch.rsqrt(b_q2.sum(1) + L2_EPS)
                k_norm1 = torch.rsqrt(b_k1.sum(1) + L2_EPS)
                k_norm2 = torch.rsqrt(b_k2.sum(1) + L2_EPS)
            a = hl.full([], 1.0, dtype=torch.float32)
            if GATE != "none":
                a = torch.exp(hl.load(A_log, [i_h]))
            around, before, later, every = picks()
            A11 = hl.zeros([HALF, HALF], dtype=torch.float32)
            A21 = hl.zeros([HALF, HALF], dtype=torch.float32)
            A22 = hl.zeros([HALF, HALF], dtype=torch.float32)
            qk11 = hl.zeros([HALF, HALF], dtype=torch.float32)
            qk21 = hl.zeros([HALF, HALF], dtype=torch.float32)
            qk22 = hl.zeros([HALF, HALF], dtype=torch.float32)
            widest = hl.zeros([HALF, BS], dtype=torch.float32)
            for i_k in hl.grid(BK // BS):
                o_k = i_k * BS + o_s
                m_1k = m_1[:, None] & (o_k < K)[None, :]
                m_2k = m_2[:, None] & (o_k < K)[None, :]
                o_1 = (o_r[:, None] * BK + o_k[None, :]).to(torch.int32)
                o_2 = o_1 + HALF * BK
                g1 = decays(g, dt_bias, i_b, t_1, i_h, o_k, m_1k, K, a, lower_bound, GATE, PARTS)
                g2 = decays(g, dt_bias, i_b, t_2, i_h, o_k, m_2k, K, a, lower_bound, GATE, PARTS)

                b_k = hl.load(k, [i_b, t_1, i_hk, o_k], extra_mask=m_1k).to(torch.float32) * k_norm1[:, None]
                b_q = hl.load(q, [i_b, t_1, i_hk, o_k], extra_mask=m_1k).to(torch.float32) * q_norm1[:, None]
                if WIDE == "only":
                    A11, qk11 = meet_by_levels(b_k, b_q, g1, A11, qk11, OP)
                else:
                    e = sums(around, g1)
                    A11, qk11 = meet(b_k, b_q, e, A11, qk11, OP)
                    if WIDE == "marked":
                        widest = torch.maximum(widest, torch.abs(e))
                factor = torch.exp2(sums(before, g1))
                hl.store(rows, [address(o_rows + C * BK, o_1)], (b_q * factor).to(OP))
                hl.store(rows, [address(o_rows, o_1)], (b_k * factor).to(OP))
                e = sums(later, g1)
                cols = (b_k * torch.exp2(e)).to(OP).T
                hl.store(rows, [address(o_rows + 2 * C * BK, o_1)], (b_k * torch.exp2(e + sums(every, g2))).to(OP))

                b_k = hl.load(k, [i_b, t_2, i_hk, o_k], extra_mask=m_2k).to(torch.float32) * k_norm2[:, None]
                b_q = hl.load(q, [i_b, t_2, i_hk, o_k], extra_mask=m_2k).to(torch.float32) * q_norm2[:, None]
                e = sums(before, g2)
                factor = torch.exp2(e)
                A21 = product((b_k * factor).to(OP), cols, A21)  # E6
                qk21 = product((b_q * factor).to(OP), cols, qk21)
                factor = torch.exp2(e + sums(every, g1))
                hl.store(rows, [address(o_rows + C * BK, o_2)], (b_q * factor).to(OP))
                hl.store(rows, [address(o_rows, o_2)], (b_k * factor).to(OP))
                hl.store(decay, [record * BK + 0 * o_r[:, None] + o_k[None, :]], factor, extra_mask=o_r[:, None] == HALF - 1)
                hl.store(rows, [address(o_rows + 2 * C * BK, o_2)], (b_k * torch.exp2(sums(later, g2))).to(OP))
                if WIDE == "only":
                    A22, qk22 = meet_by_levels(b_k, b_q, g2, A22, qk22, OP)
                else:
                    e = sums(around, g2)
                    A22, qk22 = meet(b_k, b_q, e, A22, qk22, OP)
                    if WIDE == "marked":
                        widest = torch.maximum(widest, torch.abs(e))
            if WIDE == "marked":
                hl.store(mark, [record], torch.where(torch.amax(torch.amax(widest, 1), 0) > WIDEST, 1.0, 0.0))

            # The same tokens in other words: equal ones would go through the loop in registers (docs/facts.md).
            t_1 = start + torch.where(m_1, o_r, 0)
            t_2 = start + HALF + torch.where(m_2, o_r, 0)
            row = o_r[:, None]
            col = o_r[None, :]
            beta1 = write_strengths(beta, i_b, t_1, i_h, m_1, BETA_RAW)
            beta2 = write_strengths(beta, i_b, t_2, i_h, m_2, BETA_RAW)
            last11, last21, last22 = last_repeated(A11, A21, A22, L2NORM)
            A11 = torch.where(row > col, A11 * beta1[:, None], 0.0)
            A21 = A21 * beta2[:, None]
            A22 = torch.where(row > col, A22 * beta2[:, None], 0.0)
            qk11 = torch.where(row >= col, qk11, 0.0)
            qk22 = torch.where(row >= col, qk22, 0.0)
            repeats = ((last11 >= 0).to(torch.int32) + (last21 >= 0).to(torch.int32) + (last22 >= 0).to(torch.int32)).sum(0)
            if (repeats * OFTEN >= n_rows) | (repeats * OFTEN >= C):
                for i_s in hl.grid(BK // BS):
                    o_k = i_s * BS + o_s
                    m_1k = m_1[:, None] & (o_k < K)[None, :]
                    m_2k = m_2[:, None] & (o_k < K)[None, :]
                    o_1 = (o_r[:, None] * BK + o_k[None, :]).to(torch.int32)
                    g1 = decays(g, dt_bias, i_b, t_1, i_h, o_k, m_1k, K, a, lower_bound, GATE, PARTS)
                    g2 = decays(g, dt_bias, i_b, t_2, i_h, o_k, m_2k, K, a, lower_bound, GATE, PARTS)
                    k1 = hl.load(k, [i_b, t_1, i_hk, o_k], extra_mask=m_1k).to(torch.float32) * k_norm1[:, None]
                    k2 = hl.load(k, [i_b, t_2, i_hk, o_k], extra_mask=m_2k).to(torch.float32) * k_norm2[:, None]
                    k1 = k1 * torch.exp2(sums(later, g1) + sums(every, g2))
                    k2 = k2 * torch.exp2(sums(later, g2))
                    k1, k2 = key_differences(k1, k2, repetitions(last11, last21, last22), PARTS)
                    hl.store(rows, [address(o_rows + 2 * C * BK, o_1)], k1.to(OP))
                    hl.store(rows, [address(o_rows + 2 * C * BK, o_1 + HALF * BK)], k2.to(OP))
                N11, N21, N22 = repetitions(last11, last21, last22)
                qk11, qk21, qk22 = differences((qk11, qk21, qk22), (N11, N21, N22), PARTS)
                A11, A21, A22 = differences((A11, A21, A22), (N11, N21, N22), PARTS)
                A11 = A11 - N11
                A21 = A21 - N21
                A22 = A22 - N22
            none = hl.zeros([HALF, HALF], dtype=OP)
            o_11 = (row * C + col).to(torch.int32)
            o_21 = o_11 + HALF * C
            hl.store(pairs, [address(o_pairs, o_11)], qk11.to(OP))
            hl.store(pairs, [address(o_pairs + HALF, o_11)], none)
            hl.store(pairs, [address(o_pairs, o_21)], qk21.to(OP))
            hl.store(pairs, [address(o_pairs + HALF, o_21)], qk22.to(OP))
            # Read again: kept through the branch they would be spilled.
            beta1 = write_strengths(beta, i_b, t_1, i_h, m_1, BETA_RAW)
            beta2 = write_strengths(beta, i_b, t_2, i_h, m_2, BETA_RAW)
            M11 = inverse(A11, MERGE)  # E7
            M22 = inverse(A22, MERGE)
            M21 = product(product(M22.to(MERGE), A21.to(MERGE)).to(MERGE), M11.to(MERGE))
            hl.store(pairs, [address(o_pairs + C * C, o_11)], (M11 * beta1[None, :]).to(OP))
            hl.store(pairs, [address(o_pairs + C * C + HALF, o_11)], none)
            hl.store(pairs, [address(o_pairs + C * C, o_21)], (-M21 * beta1[None, :]).to(OP))
            hl.store(pairs, [address(o_pairs + C * C + HALF, o_21)], (M22 * beta2[None, :]).to(OP))
