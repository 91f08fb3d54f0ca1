"""Prefill, second kernel: chunk after chunk through the state. One program a sequence, head and slice of V."""

import triton
import triton.language as tl

from kdaserve.ops.chunk_kda.triton.space import first_unit, header, tiles
from kdaserve.ops.jit.launch import kernel
from kdaserve.ops.jit.states import NEVER, C, save_snapshots, save_states


@triton.jit
def read(b_rows, b_state, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """What rows `[C, K]` read from a state."""
    if TRANSPOSED:
        return tl.dot(b_state, tl.trans(b_rows), input_precision=PRECISION)
    else:
        return tl.dot(b_rows, b_state, input_precision=PRECISION)


@triton.jit
def through_chunk(b_S, b_state, b_r, b_qd, b_ke, b_qk, b_M, b_decay, TRANSPOSED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """E9 to E11 of one chunk; b_r is v - (k exp G) S, b_state the state as an operand, and beta is in b_M.

    v' enters its products as two bf16 numbers. With equal keys its rows are differences that add up again in E10 and E11, and so would the
    rounding of one: 2.6e-2 of the output.
    """
    b_o = read(b_qd, b_state, TRANSPOSED, PRECISION)
    if TRANSPOSED:
        b_S = b_S * b_decay[None, :]
        b_r = tl.dot(b_r, tl.trans(b_M), input_precision=PRECISION)  # E9
        b_high = b_r.to(OP)
        b_o = tl.dot(b_high, tl.trans(b_qk), acc=b_o, input_precision=PRECISION)  # E10
        b_S = tl.dot(b_high, b_ke, acc=b_S, input_precision=PRECISION)  # E11
        if OP == tl.bfloat16:
            b_low = (b_r - b_high.to(tl.float32)).to(OP)
            b_o = tl.dot(b_low, tl.trans(b_qk), acc=b_o)
            b_S = tl.dot(b_low, b_ke, acc=b_S)
    else:
        b_S = b_S * b_decay[:, None]
        b_r = tl.dot(b_M, b_r, input_precision=PRECISION)  # E9
        b_high = b_r.to(OP)
        b_o = tl.dot(b_qk, b_high, acc=b_o, input_precision=PRECISION)  # E10
        b_S = tl.dot(tl.trans(b_ke), b_high, acc=b_S, input_precision=PRECISION)  # E11
        if OP == tl.bfloat16:
            b_low = (b_r - b_high.to(tl.float32)).to(OP)
            b_o = tl.dot(b_qk, b_low, acc=b_o)
            b_S = tl.dot(tl.trans(b_ke), b_low, acc=b_S)
    return b_S, b_o


@triton.jit
def across(o_row, o_col, TRANSPOSED: tl.constexpr):
    """Two index vectors as they lie in a tile [rows, cols], or in its transpose."""
    if TRANSPOSED:
        return o_row[None, :], o_col[:, None]
    else:
        return o_row[:, None], o_col[None, :]


@kernel("p_v", "p_o", "p_pool", "p_track", own=["p_header", "p_tiles", "p_h"])
def chain_kernel(
    p_header, p_tiles, p_v, p_o, p_pool, p_index, p_cu, p_h, p_chunk_offsets, p_track, p_track_chunk, p_sequence, p_tokens, p_slot,
    v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, o_b: tl.int64, o_t: tl.int64, o_h: tl.int64,
    pool_s: tl.int64, track_s: tl.int64, T: tl.int32, HV: tl.int32, M: tl.int32,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TRANSPOSED: tl.constexpr, STAGES: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """E8 to E11 of all chunks of a sequence, the output written on the way, and the states at the boundaries that the call asks for.

    TRANSPOSED holds the state as [BV, BK], the left operand of its products, which stays in registers; that takes a slice of 64 to fill the
    matrix units. Otherwise it is [BK, BV], the right operand, which goes through shared memory.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = pid // NV % HV
    i_n = pid // NV // HV
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    i_v = i_v * BV + tl.arange(0, BV)
    s_k, s_v = across(o_k, i_v, TRANSPOSED)
    t_c, t_v = across(o_c, i_v, TRANSPOSED)
    m_S = (s_k < K) & (s_v < V)
    o_S = s_v * K + s_k
    if p_cu is not None:
        start = tl.load(p_cu + i_n).to(tl.int64)
        length = (tl.load(p_cu + i_n + 1).to(tl.int64) - start).to(tl.int32)
        unit = first_unit(p_cu, i_n)
    else:
        start = tl.zeros([], tl.int64)
        length = T
        unit = i_n * ((T + C - 1) // C)
        p_v += i_n * v_b * UNIT
        p_o += i_n * o_b * UNIT
    chunks = (length + C - 1) // C
    pool_s *= UNIT
    slot = tl.load(p_index + i_n).to(tl.int64)
    p_pool += i_h * (V * K)
    b_S = tl.zeros([BV, BK] if TRANSPOSED else [BK, BV], tl.float32)
    if slot >= 0:
        b_S = tl.load(p_pool + slot * pool_s + o_S, mask=m_S, other=0.0).to(tl.float32)
    if p_h is not None:
        p_h += tl.load(p_chunk_offsets + i_n).to(tl.int64) * (HV * V * K) + i_h * (V * K)
    tracked = -1
    if p_track is not None:
        tracked = tl.load(p_track_chunk + i_n).to(tl.int32)
        p_track += i_n * track_s * UNIT + i_h * (V * K)
    next_save = NEVER
    if p_slot is not None:
        next_save = save_snapshots(b_S, -1, i_n, o_S, m_S, p_pool, pool_s, p_sequence, p_tokens, p_slot, M)
    record = (unit * HV + i_h).to(tl.int64)
    p_header += record * header(BK)
    p_tiles += record * tiles(BK)
    v_t *= UNIT
    p_v += start * v_t + i_h * v_h * UNIT
    o_t *= UNIT
    p_o += start * o_t + i_h * o_h * UNIT
    o_ck = o_c[:, None] * BK + o_k[None, :]
    o_cc = o_c[:, None] * (2 * C) + o_c[None, :] + 3 * C * BK
    for i_c in tl.range(0, chunks, num_stages=STAGES):
        next_save = save_states(b_S, i_c, next_save, tracked, i_n, o_S, m_S, p_pool, pool_s, p_track, p_sequence, p_tokens, p_slot, M)
        m_o = (t_c < length - i_c * C) & (t_v < V)
        b_kd = tl.load(p_tiles + o_ck)
        b_v = tl.load(p_v + t_c * v_t + t_v, mask=m_o, other=0.0)
        b_M = tl.load(p_tiles + C + o_cc)
        b_qd = tl.load(p_tiles + C * BK + o_ck)
        b_qk = tl.load(p_tiles + o_cc)
        b_ke = tl.load(p_tiles + 2 * C * BK + o_ck)
        b_decay = tl.load(p_header + o_k)
        b_state = b_S.to(OP)
        b_read = read(b_kd, b_state, TRANSPOSED, PRECISION)
        if p_h is not None:  # not before the product, which would then read a state whose writes not all threads have made visible (docs/facts.md)
            tl.store(p_h + o_S, b_S.to(p_h.dtype.element_ty), mask=m_S)
            p_h += HV * V * K
        b_r = (b_v.to(tl.float32) - b_read).to(OP)  # E8, with E9 put around it: w and u are never formed
        b_S, b_o = through_chunk(b_S, b_state, b_r, b_qd, b_ke, b_qk, b_M, b_decay, TRANSPOSED, OP, PRECISION)
        tl.store(p_o + t_c * o_t + t_v, b_o.to(p_o.dtype.element_ty), mask=m_o)
        p_v += C * v_t
        p_o += C * o_t
        p_header += HV * header(BK)
        p_tiles += HV * tiles(BK)
    save_states(b_S, chunks, next_save, -1, i_n, o_S, m_S, p_pool, pool_s, p_track, p_sequence, p_tokens, p_slot, M)
    if (slot >= 0) & (length > 0):
        tl.store(p_pool + slot * pool_s + o_S, b_S.to(p_pool.dtype.element_ty), mask=m_S)
