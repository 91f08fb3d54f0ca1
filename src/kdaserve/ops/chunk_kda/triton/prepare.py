"""Prefill, first kernel: what a chunk can compute without knowing the state it starts from. One program a chunk and head.

A chunk of 64 tokens is two halves of 32. Two tokens of one half meet at the half's middle: the row's factor is exp2 of the log decay between
the middle and the row, the column's the reverse. Both stay within 2 ** +-124 while no 16 tokens decay by more than that; for the bounded gate with
lower_bound >= -5 this always holds. Tokens of different halves meet at the boundary, where both factors are <= 1.

Sums of log decays are products with matrices of 0 and 1, on the matrix units: nothing cancels in them. A token's log decay g enters all of them as
the same two bf16 numbers, exact to 2 ** -17, which changes exp(g) <= 1 by 3e-6 at most; three, exact to fp32, where the inputs are not bf16.

Keys that repeat make v' of E9 differences of values, which E10 and E11 add up again; the rounding of their operands then outgrows the sums, in the
state without end. Where they do, the chunk is written in another basis. Let N pick for each token the last one before it whose key it repeats. With
u = (I - N)^-1 v', the sums of v' over a token and those it repeats, E9 to E11 keep their form:

    u = ((I + beta A) (I - N))^-1 beta (v - ..),    o = .. + (q.k) (I - N) u,    S = .. + u^T (I - N)^T k

and what enters the products is u, which is a value, and differences of keys, which are small.
"""

import triton
import triton.language as tl

from kdaserve.ops.chunk_kda.triton.space import first_unit, header, sequence_of, tiles
from kdaserve.ops.jit import chunking
from kdaserve.ops.jit.launch import kernel
from kdaserve.ops.jit.math import L2_EPS, log2_decay, sigmoid
from kdaserve.ops.jit.states import C

HALF = tl.constexpr(32)
WIDEST = tl.constexpr(chunking.WIDEST)
"""The log2 decay between a token and the middle of its half up to which factors are formed there: they hold 2 ** 124 times a normed key."""
NEAR = tl.constexpr(chunking.NEAR)
OFTEN = tl.constexpr(chunking.OFTEN)


@triton.jit
def inside(m_rows, o_k, K: tl.constexpr, BK: tl.constexpr):
    """Mask of rows and channels; of rows alone where every channel exists."""
    m_inside = m_rows[:, None]
    if K != BK:
        m_inside = m_inside & (o_k < K)[None, :]
    return m_inside


@triton.jit
def token_decay(b_x, m_x, a, lower_bound, GATE: tl.constexpr):
    """Log decay of the tokens there are, in base 2. No result sees the bound of -1e6; sums need it to stay finite."""
    b_g = log2_decay(b_x, a, lower_bound, GATE)
    if GATE != "bounded":
        b_g = tl.where(b_g < -1e6, -1e6, b_g)
    return tl.where(m_x, b_g, 0.0)


@triton.jit
def cut(b_x):
    """The leading eight bits of fp32 numbers, exact in bf16."""
    return (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def split(b_x, PARTS: tl.constexpr):
    """b_x as operands of `sums`, PARTS bf16 numbers that add up to it; itself where matrix units take fp32 (in the interpreter, PARTS = 1)."""
    if PARTS == 1:
        return b_x, b_x, b_x
    b_high = cut(b_x)
    b_rest = b_x - b_high
    b_mid = cut(b_rest) if PARTS == 3 else b_rest
    return b_high.to(tl.bfloat16), b_mid.to(tl.bfloat16), (b_rest - b_mid).to(tl.bfloat16)


@triton.jit
def sums(b_pick, b_high, b_mid, b_low, PARTS: tl.constexpr):
    """E5: for each row the sum over the tokens that b_pick picks."""
    b_sum = tl.dot(b_pick, b_high)
    if PARTS >= 2:
        b_sum = tl.dot(b_pick, b_mid, acc=b_sum)
    if PARTS == 3:
        b_sum = tl.dot(b_pick, b_low, acc=b_sum)
    return b_sum


@triton.jit
def meet_by_levels(b_q, b_k, b_high, b_mid, b_low, b_A, b_qk, PARTS: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """E6 and the q.k of E10 inside a half, for any decay: neighbouring segments of s tokens meet where they touch, all factors <= 1.

    s goes from 16 down to 1; where no 8 tokens decay by more than WIDEST, pairs inside 16 tokens meet at their middle instead.
    """
    row = tl.arange(0, HALF)[:, None]
    col = tl.arange(0, HALF)[None, :]
    together = (row // 16) == (col // 16)
    late = (col % 16) >= 8
    b_around = tl.where(together & late & (col <= row), 1.0, 0.0) - tl.where(together & ~late & (col > row), 1.0, 0.0)
    b_e = sums(b_around.to(b_high.dtype), b_high, b_mid, b_low, PARTS)
    narrow = tl.max(tl.max(tl.abs(b_e), 1), 0) <= WIDEST
    if narrow:
        b_factor = tl.exp2(b_e)
        b_cols = tl.trans((b_k * tl.exp2(-b_e)).to(OP))
        b_A += tl.where(together, tl.dot((b_k * b_factor).to(OP), b_cols, input_precision=PRECISION), 0.0)
        b_qk += tl.where(together, tl.dot((b_q * b_factor).to(OP), b_cols, input_precision=PRECISION), 0.0)
    else:
        b_A += tl.where(row == col, tl.sum(b_k * b_k, 1)[:, None], 0.0)
        b_qk += tl.where(row == col, tl.sum(b_q * b_k, 1)[:, None], 0.0)
    for level in range(tl.where(narrow, 4, 0), 5):
        second = ((row >> level) & 1) == 1
        pick = ((row >> level) == (col >> level)) & ((second & (col <= row)) | (~second & (col > row)))
        b_factor = tl.exp2(sums(tl.where(pick, 1.0, 0.0).to(b_high.dtype), b_high, b_mid, b_low, PARTS))
        b_rows = (b_k * b_factor).to(OP)
        b_cols = tl.trans(b_rows)
        meet = (((row >> level) ^ (col >> level)) == 1) & (row > col)
        b_A += tl.where(meet, tl.dot(b_rows, b_cols, input_precision=PRECISION), 0.0)
        b_qk += tl.where(meet, tl.dot((b_q * b_factor).to(OP), b_cols, input_precision=PRECISION), 0.0)
    return b_A, b_qk


@triton.jit
def meet(
    b_q, b_k, b_around, b_high, b_mid, b_low, b_A, b_qk, b_widest,
    WIDE: tl.constexpr, PARTS: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """E6 and the q.k of E10 inside a half: pairs meet at its middle, or with WIDE = "only" by levels. b_widest keeps the widest decays seen."""
    if WIDE == "only":
        b_A, b_qk = meet_by_levels(b_q, b_k, b_high, b_mid, b_low, b_A, b_qk, PARTS, OP, PRECISION)
    else:
        b_e = sums(b_around, b_high, b_mid, b_low, PARTS)
        if WIDE == "marked":
            b_widest = tl.maximum(b_widest, tl.abs(b_e))
        b_factor = tl.exp2(b_e)
        b_cols = tl.trans((b_k * tl.exp2(-b_e)).to(OP))
        b_A = tl.dot((b_k * b_factor).to(OP), b_cols, acc=b_A, input_precision=PRECISION)  # E6
        b_qk = tl.dot((b_q * b_factor).to(OP), b_cols, acc=b_qk, input_precision=PRECISION)
    return b_A, b_qk, b_widest


@triton.jit
def inverse(b_A, MERGE: tl.constexpr, PRECISION: tl.constexpr):
    """E7 of a half: from blocks of 2 to the whole by halves, [[M1, 0], [-M2 A21 M1, M2]]."""
    row = tl.arange(0, HALF)[:, None]
    col = tl.arange(0, HALF)[None, :]
    b_M = tl.where(row == col, 1.0, tl.where((row ^ col) == 1, -b_A, 0.0))
    for level in tl.static_range(1, 5):
        b_A21 = tl.where(((row >> level) ^ (col >> level)) == 1, b_A, 0.0).to(MERGE)
        b_half = b_M.to(MERGE)
        b_M -= tl.dot(tl.dot(b_half, b_A21, input_precision=PRECISION).to(MERGE), b_half, input_precision=PRECISION)
    return b_M


@triton.jit
def squares(b_A, L2NORM: tl.constexpr):
    """Of the keys of a half."""
    row = tl.arange(0, HALF)
    return tl.full([HALF], 1.0, tl.float32) if L2NORM else tl.sum(tl.where(row[:, None] == row[None, :], b_A, 0.0), 1)


@triton.jit
def repeated(b_A, m_earlier, b_square):
    """Of each row the last column that it repeats, -1 if none."""
    m_near = m_earlier & (b_A > NEAR * b_square[:, None])
    return tl.max(tl.where(m_near, tl.arange(0, HALF)[None, :], -1), 1)


@triton.jit
def picks(b_last, PARTS: tl.constexpr):
    """A quarter of N, as an operand."""
    return tl.where(tl.arange(0, HALF)[None, :] == b_last[:, None], 1.0, 0.0).to(tl.float32 if PARTS == 1 else tl.bfloat16)


@triton.jit
def store_halves(p_x, b_x11, b_x21, b_x22, OP: tl.constexpr):
    """Stores a lower triangular tile `[C, C]`, in rows of 2 C."""
    o_11 = tl.arange(0, HALF)[:, None] * (2 * C) + tl.arange(0, HALF)[None, :]
    tl.store(p_x + o_11, b_x11.to(OP))
    tl.store(p_x + o_11 + HALF, tl.zeros([HALF, HALF], OP))
    tl.store(p_x + o_11 + HALF * 2 * C, b_x21.to(OP))
    tl.store(p_x + o_11 + HALF * 2 * C + HALF, b_x22.to(OP))


@triton.jit
def picked(b_X, b_n, PARTS: tl.constexpr):
    """X N, that is `sums` from the other side."""
    b_high, b_mid, b_low = split(b_X, PARTS)
    return tl.trans(sums(tl.trans(b_n), tl.trans(b_high), tl.trans(b_mid), tl.trans(b_low), PARTS))


@triton.jit
def differences(b_X11, b_X21, b_X22, b_n11, b_n21, b_n22, PARTS: tl.constexpr):
    """X (I - N) of a lower triangular X."""
    b_Y11 = b_X11 - picked(b_X11, b_n11, PARTS)
    b_Y21 = b_X21 - picked(b_X21, b_n11, PARTS) - picked(b_X22, b_n21, PARTS)
    b_Y22 = b_X22 - picked(b_X22, b_n22, PARTS)
    return b_Y11, b_Y21, b_Y22


@triton.jit
def store_key_differences(
    p_k, p_g, p_bias, p_ke, o_k, o_g, half_k, half_g, rows, k_norm1, k_norm2, a, lower_bound, b_last11, b_last21, b_last22,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, GATE: tl.constexpr, PARTS: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """(I - N)^T k, decayed to the chunk's end.

    Args:
        o_k, o_g: where the first BS channels of the first half lie; half_k, half_g: how far the second half is from the first.
    """
    o_r = tl.arange(0, HALF)
    o_s = tl.arange(0, BS)
    o_1 = o_r[:, None] * BK + o_s[None, :]
    PICK: tl.constexpr = tl.float32 if PARTS == 1 else tl.bfloat16
    b_after = tl.where(o_r[None, :] > o_r[:, None], 1.0, 0.0).to(PICK)
    b_all = tl.full([HALF, HALF], 1.0, PICK)
    b_n11 = tl.trans(picks(b_last11, PARTS))
    b_n21 = tl.trans(picks(b_last21, PARTS))
    b_n22 = tl.trans(picks(b_last22, PARTS))
    for i_k in range(0, BK, BS):
        m_1s = inside(o_r < rows, o_s + i_k, K, BK)
        m_2s = inside(o_r + HALF < rows, o_s + i_k, K, BK)
        b_x1 = tl.load(p_g + i_k + o_g, mask=m_1s, other=0.0).to(tl.float32)
        b_x2 = tl.load(p_g + i_k + half_g + o_g, mask=m_2s, other=0.0).to(tl.float32)
        if p_bias is not None:
            b_bias = tl.load(p_bias + i_k + o_s, mask=o_s + i_k < K, other=0.0).to(tl.float32)[None, :]
            b_x1 += b_bias
            b_x2 += b_bias
        b_high1, b_mid1, b_low1 = split(token_decay(b_x1, m_1s, a, lower_bound, GATE), PARTS)
        b_high2, b_mid2, b_low2 = split(token_decay(b_x2, m_2s, a, lower_bound, GATE), PARTS)
        b_e1 = sums(b_after, b_high1, b_mid1, b_low1, PARTS) + sums(b_all, b_high2, b_mid2, b_low2, PARTS)
        b_e2 = sums(b_after, b_high2, b_mid2, b_low2, PARTS)
        b_k1 = tl.load(p_k + i_k + o_k, mask=m_1s, other=0.0).to(tl.float32) * k_norm1[:, None] * tl.exp2(b_e1)
        b_k2 = tl.load(p_k + i_k + half_k + o_k, mask=m_2s, other=0.0).to(tl.float32) * k_norm2[:, None] * tl.exp2(b_e2)
        b_high1, b_mid1, b_low1 = split(b_k1, PARTS)
        b_high2, b_mid2, b_low2 = split(b_k2, PARTS)
        b_k1 -= sums(b_n11, b_high1, b_mid1, b_low1, PARTS) + sums(b_n21, b_high2, b_mid2, b_low2, PARTS)
        b_k2 -= sums(b_n22, b_high2, b_mid2, b_low2, PARTS)
        tl.store(p_ke + i_k + o_1, b_k1.to(OP))
        tl.store(p_ke + i_k + o_1 + HALF * BK, b_k2.to(OP))


@triton.jit
def zero_padding(p_o, o_t, first, end, T, V: tl.constexpr, BV: tl.constexpr):
    """S4: zeros in those of the 64 output rows from `first` on that no sequence covers; eight at a time, to take no shared memory."""
    o_v = tl.arange(0, BV)
    for i_r in range(0, C, 8):
        o_r = first + i_r + tl.arange(0, 8)
        p_row = p_o + o_r.to(tl.int64)[:, None] * o_t + o_v[None, :]
        tl.store(p_row, tl.zeros([8, BV], p_o.dtype.element_ty), mask=((o_r >= end) & (o_r < T))[:, None] & (o_v < V)[None, :])


@kernel("p_q", "p_k", "p_g", "p_dt_bias", "p_o", own=["p_header", "p_tiles"])
def prepare_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_o, p_header, p_tiles,
    q_b: tl.int64, q_t: tl.int32, q_h: tl.int64, k_b: tl.int64, k_t: tl.int32, k_h: tl.int64, g_b: tl.int64, g_t: tl.int32, g_h: tl.int64,
    o_t: tl.int64, o_h: tl.int64, beta_b: tl.int64, beta_t: tl.int64, beta_h: tl.int64,
    N: tl.int32, T: tl.int32, H: tl.int32, HV: tl.int32, scale: tl.float32, lower_bound: tl.float32,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_RAW: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
    MERGE: tl.constexpr, MERGE_PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """E5 to E7, the decayed q and k, and the q.k of E10 of one chunk and head, into its record of the workspace.

    WIDE says what becomes of halves whose decay is wider than WIDEST: "never" means there are none; "marked" marks the chunk; "only" computes
    the marked chunks again, by levels. (In one kernel the levels would make every chunk spill registers.)
    """
    pid = tl.program_id(0)
    i_h = pid % HV
    i_u = pid // HV
    record = (i_u * HV + i_h).to(tl.int64)
    p_decay = p_header + record * header(BK)
    p_wide = p_decay + BK
    p_kd = p_tiles + record * tiles(BK)
    if WIDE == "only":
        if tl.load(p_wide) == 0:
            return
    if p_cu is not None:
        end = tl.load(p_cu + N).to(tl.int64)
        if (i_u * C + C > end) & (WIDE != "only"):
            zero_padding(p_o + i_h * o_h * UNIT, o_t * UNIT, i_u * C, end, T, V, BV)
        i_n = sequence_of(p_cu, N, i_u)
        i_b = 0
        i_c = i_u - first_unit(p_cu, i_n)
        start = tl.load(p_cu + i_n).to(tl.int64)
        rows = (tl.load(p_cu + i_n + 1).to(tl.int64) - start).to(tl.int32) - i_c * C
        start += i_c * C
    else:
        chunks = (T + C - 1) // C
        i_b = i_u // chunks
        i_c = i_u % chunks
        start = (i_c * C).to(tl.int64)
        rows = T - i_c * C
    if rows <= 0:
        if WIDE == "marked":
            tl.store(p_wide, 0.0)
        return
    i_hk = i_h // (HV // H)
    q_t *= UNIT
    k_t *= UNIT
    g_t *= UNIT
    p_q += i_b * q_b * UNIT + start * q_t + i_hk * q_h * UNIT
    p_k += i_b * k_b * UNIT + start * k_t + i_hk * k_h * UNIT
    p_g += i_b * g_b * UNIT + start * g_t + i_h * g_h * UNIT
    p_beta += i_b * beta_b + start * beta_t + i_h * beta_h
    p_qd = p_kd + C * BK
    p_ke = p_qd + C * BK
    p_qk = p_ke + C * BK
    p_M = p_qk + C
    p_bias = p_dt_bias
    if p_bias is not None:
        p_bias += i_h * K

    o_r = tl.arange(0, HALF)
    o_s = tl.arange(0, BS)
    row = o_r[:, None]
    col = o_r[None, :]
    m_1 = o_r < rows
    m_2 = o_r + HALF < rows
    o_q = row * q_t + o_s[None, :]
    o_k = row * k_t + o_s[None, :]
    o_g = row * g_t + o_s[None, :]
    q_norm1 = tl.zeros([HALF], tl.float32) + scale
    q_norm2 = q_norm1
    k_norm1 = tl.full([HALF], 1.0, tl.float32)
    k_norm2 = k_norm1
    if L2NORM:
        b_q1 = tl.zeros([HALF, BS], tl.float32)
        b_q2 = tl.zeros([HALF, BS], tl.float32)
        b_k1 = tl.zeros([HALF, BS], tl.float32)
        b_k2 = tl.zeros([HALF, BS], tl.float32)
        for i_k in tl.static_range(0, BK, BS):
            m_1s = inside(m_1, o_s + i_k, K, BK)
            m_2s = inside(m_2, o_s + i_k, K, BK)
            b_x = tl.load(p_q + i_k + o_q, mask=m_1s, other=0.0).to(tl.float32)
            b_q1 += b_x * b_x
            b_x = tl.load(p_q + i_k + HALF * q_t + o_q, mask=m_2s, other=0.0).to(tl.float32)
            b_q2 += b_x * b_x
            b_x = tl.load(p_k + i_k + o_k, mask=m_1s, other=0.0).to(tl.float32)
            b_k1 += b_x * b_x
            b_x = tl.load(p_k + i_k + HALF * k_t + o_k, mask=m_2s, other=0.0).to(tl.float32)
            b_k2 += b_x * b_x
        q_norm1 *= tl.rsqrt(tl.sum(b_q1, 1) + L2_EPS)
        q_norm2 *= tl.rsqrt(tl.sum(b_q2, 1) + L2_EPS)
        k_norm1 = tl.rsqrt(tl.sum(b_k1, 1) + L2_EPS)
        k_norm2 = tl.rsqrt(tl.sum(b_k2, 1) + L2_EPS)

    PICK: tl.constexpr = tl.float32 if PARTS == 1 else tl.bfloat16
    late = col >= HALF // 2
    b_around = (tl.where(late & (col <= row), 1.0, 0.0) - tl.where(~late & (col > row), 1.0, 0.0)).to(PICK)  # from the middle of a half to the token
    b_before = tl.where(col <= row, 1.0, 0.0).to(PICK)
    b_after = tl.where(col > row, 1.0, 0.0).to(PICK)
    b_all = tl.full([HALF, HALF], 1.0, PICK)
    a = 1.0
    if GATE != "none":
        a = tl.exp(tl.load(p_A_log + i_h).to(tl.float32))
    b_A11 = tl.zeros([HALF, HALF], tl.float32)
    b_A21 = tl.zeros([HALF, HALF], tl.float32)
    b_A22 = tl.zeros([HALF, HALF], tl.float32)
    b_qk11 = tl.zeros([HALF, HALF], tl.float32)
    b_qk21 = tl.zeros([HALF, HALF], tl.float32)
    b_qk22 = tl.zeros([HALF, HALF], tl.float32)
    b_widest = tl.zeros([HALF, BS], tl.float32)
    o_1 = row * BK + o_s[None, :]
    o_2 = o_1 + HALF * BK
    for i_k in range(0, BK, BS):
        m_1s = inside(m_1, o_s + i_k, K, BK)
        m_2s = inside(m_2, o_s + i_k, K, BK)
        b_x1 = tl.load(p_g + i_k + o_g, mask=m_1s, other=0.0).to(tl.float32)
        b_x2 = tl.load(p_g + i_k + HALF * g_t + o_g, mask=m_2s, other=0.0).to(tl.float32)
        if p_bias is not None:
            b_bias = tl.load(p_bias + i_k + o_s, mask=o_s + i_k < K, other=0.0).to(tl.float32)[None, :]
            b_x1 += b_bias
            b_x2 += b_bias
        b_high1, b_mid1, b_low1 = split(token_decay(b_x1, m_1s, a, lower_bound, GATE), PARTS)
        b_high2, b_mid2, b_low2 = split(token_decay(b_x2, m_2s, a, lower_bound, GATE), PARTS)

        b_k = tl.load(p_k + i_k + o_k, mask=m_1s, other=0.0).to(tl.float32) * k_norm1[:, None]
        b_q = tl.load(p_q + i_k + o_q, mask=m_1s, other=0.0).to(tl.float32) * q_norm1[:, None]
        b_A11, b_qk11, b_widest = meet(
            b_q, b_k, b_around, b_high1, b_mid1, b_low1, b_A11, b_qk11, b_widest, WIDE, PARTS, OP, PRECISION
        )  # fmt: skip
        b_factor = tl.exp2(sums(b_before, b_high1, b_mid1, b_low1, PARTS))
        tl.store(p_qd + i_k + o_1, (b_q * b_factor).to(OP))
        tl.store(p_kd + i_k + o_1, (b_k * b_factor).to(OP))
        b_e = sums(b_after, b_high1, b_mid1, b_low1, PARTS)
        b_cols = tl.trans((b_k * tl.exp2(b_e)).to(OP))
        b_e += sums(b_all, b_high2, b_mid2, b_low2, PARTS)
        tl.store(p_ke + i_k + o_1, (b_k * tl.exp2(b_e)).to(OP))

        b_k = tl.load(p_k + i_k + HALF * k_t + o_k, mask=m_2s, other=0.0).to(tl.float32) * k_norm2[:, None]
        b_q = tl.load(p_q + i_k + HALF * q_t + o_q, mask=m_2s, other=0.0).to(tl.float32) * q_norm2[:, None]
        b_e = sums(b_before, b_high2, b_mid2, b_low2, PARTS)
        b_factor = tl.exp2(b_e)
        b_A21 = tl.dot((b_k * b_factor).to(OP), b_cols, acc=b_A21, input_precision=PRECISION)  # E6
        b_qk21 = tl.dot((b_q * b_factor).to(OP), b_cols, acc=b_qk21, input_precision=PRECISION)
        b_factor = tl.exp2(b_e + sums(b_all, b_high1, b_mid1, b_low1, PARTS))
        tl.store(p_qd + i_k + o_2, (b_q * b_factor).to(OP))
        tl.store(p_kd + i_k + o_2, (b_k * b_factor).to(OP))
        tl.store(p_decay + i_k + 0 * row + o_s[None, :], b_factor, mask=row == HALF - 1)
        tl.store(p_ke + i_k + o_2, (b_k * tl.exp2(sums(b_after, b_high2, b_mid2, b_low2, PARTS))).to(OP))
        b_A22, b_qk22, b_widest = meet(
            b_q, b_k, b_around, b_high2, b_mid2, b_low2, b_A22, b_qk22, b_widest, WIDE, PARTS, OP, PRECISION
        )  # fmt: skip
    if WIDE == "marked":
        tl.store(p_wide, (tl.max(tl.max(b_widest, 1), 0) > WIDEST).to(tl.float32))

    b_beta1 = tl.load(p_beta + o_r * beta_t, mask=m_1, other=0.0).to(tl.float32)
    b_beta2 = tl.load(p_beta + (o_r + HALF) * beta_t, mask=m_2, other=0.0).to(tl.float32)
    if BETA_RAW:
        b_beta1 = tl.where(m_1, sigmoid(b_beta1), 0.0)
        b_beta2 = tl.where(m_2, sigmoid(b_beta2), 0.0)
    b_square1 = squares(b_A11, L2NORM)
    b_square2 = squares(b_A22, L2NORM)
    b_last11 = repeated(b_A11, row > col, b_square1)
    b_last22 = repeated(b_A22, row > col, b_square2)
    b_last21 = tl.where(b_last22 < 0, repeated(b_A21, row >= 0, b_square2), -1)
    repeats = tl.sum((b_last11 >= 0).to(tl.int32) + (b_last21 >= 0).to(tl.int32) + (b_last22 >= 0).to(tl.int32), 0)
    b_A11 = tl.where(row > col, b_A11, 0.0) * b_beta1[:, None]
    b_A21 = b_A21 * b_beta2[:, None]
    b_A22 = tl.where(row > col, b_A22, 0.0) * b_beta2[:, None]
    b_qk11 = tl.where(row >= col, b_qk11, 0.0)
    b_qk22 = tl.where(row >= col, b_qk22, 0.0)
    store_halves(p_qk, b_qk11, b_qk21, b_qk22, OP)
    many_repeat = repeats * OFTEN >= tl.minimum(rows, C)
    if many_repeat:
        b_n11 = picks(b_last11, PARTS)
        b_n21 = picks(b_last21, PARTS)
        b_n22 = picks(b_last22, PARTS)
        b_qk11, b_qk21, b_qk22 = differences(b_qk11, b_qk21, b_qk22, b_n11, b_n21, b_n22, PARTS)
        store_halves(p_qk, b_qk11, b_qk21, b_qk22, OP)
        b_A11, b_A21, b_A22 = differences(b_A11, b_A21, b_A22, b_n11, b_n21, b_n22, PARTS)
        b_A11 -= b_n11
        b_A21 -= b_n21
        b_A22 -= b_n22
    b_M11 = inverse(b_A11, MERGE, MERGE_PRECISION)  # E7
    b_M22 = inverse(b_A22, MERGE, MERGE_PRECISION)
    b_M21 = tl.dot(b_M22.to(MERGE), b_A21.to(MERGE), input_precision=MERGE_PRECISION).to(MERGE)
    b_M21 = -tl.dot(b_M21, b_M11.to(MERGE), input_precision=MERGE_PRECISION)
    store_halves(p_M, b_M11 * b_beta1[None, :], b_M21 * b_beta1[None, :], b_M22 * b_beta2[None, :], OP)
    if many_repeat:
        store_key_differences(
            p_k, p_g, p_bias, p_ke, o_k, o_g, HALF * k_t, HALF * g_t, rows, k_norm1, k_norm2, a, lower_bound, b_last11, b_last21, b_last22,
            K, BK, BS, GATE, PARTS, OP,
        )  # fmt: skip
