"""Prefill on Hopper, first kernel: what a chunk can compute without knowing the state it starts from. One program, four warps, a chunk and head.

A record is a header of fp32 numbers `[160]`, the decay of the chunk in the first 128, and tiles of bf16 rows of 128: k decayed from the chunk's start
(64 rows), q likewise (64), k decayed to the chunk's end (64), and 64 rows of which the left half is the q.k of E10 and the right half M beta.

**Where tokens meet.** A chunk of 64 tokens is four quarters. Tokens of a half meet at its middle: with e the log decay from there to the token, the
row's factor is 2 ** e and the column's 2 ** -e. Both stay within 2 ** +-124 while no 16 tokens decay by more than that; for the bounded gate with
lower_bound >= -5 this always holds; where it does not, tokens meet by levels (`levels`). All else follows from these two by factors <= 1 of a
channel: kd and qd are the rows times the decay from the chunk's start to the middle, ke is the column times the decay from the middle to the end,
and tokens of different halves meet at the middle of the second one, where the rows are the same and the columns get smaller still.

**Who has what.** In the part that is done element by element (`decay`) a warp has a quarter of the tokens; from the products on it has 16 rows of the
chunk, and E7 (`inverse`) begins with four blocks of 16, one a warp, in registers. Where keys repeat, the chunk is written in another basis
(`repeats`), a branch of its own that takes no registers from other chunks.

Keys are expected to be normed, or to be no longer than that: E7 rounds A and M to fp16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mma_v2, warpgroup_mma, warpgroup_mma_wait

from kdaserve.ops.chunk_kda.sm90.decay import BS, CHANNELS, LOG2_E, OWN, TB, TILE, TOKENS, decay_slice, ex2, gate_factors, load_rows, norms, rcp
from kdaserve.ops.chunk_kda.sm90.inverse import inverse32
from kdaserve.ops.chunk_kda.sm90.layouts import ACC, HALVES, LINE, LINES, PAIRS, PLAIN, VECTOR, C, by_halves, half_row_col, side_by_side
from kdaserve.ops.chunk_kda.sm90.levels import WIDEST, meet_by_levels
from kdaserve.ops.chunk_kda.sm90.repeats import NEAR, without_repetitions
from kdaserve.ops.chunk_kda.sm90.space import HEADER, RECORD, K
from kdaserve.ops.jit.launch import kernel

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
"""Products `[32, 32]` of the last step of E7."""


# Places


@gluon.jit
def first_unit(p_cu, n):
    """The unit, that is chunk of a sequence, with which sequence n begins: there is room for all chunks before it, whatever the lengths."""
    return (gl.load(p_cu + n) // C).to(gl.int32) + n


@gluon.jit
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


@gluon.jit
def rank_sequence(p_cu, p_order, n, N):
    """Writes n where it stands among the sequences, the longest first: a chain that begins late must not be a long one."""
    o_n = gl.arange(0, 256, PAIRS)
    length = gl.load(p_cu + n + 1) - gl.load(p_cu + n)
    before = 0
    for i_n in range(0, N, 256):
        m_n = i_n + o_n < N
        other = gl.load(p_cu + i_n + o_n + 1, mask=m_n, other=0) - gl.load(p_cu + i_n + o_n, mask=m_n, other=0)
        m_n = m_n & ((other > length) | ((other == length) & (i_n + o_n < n)))
        before += gl.sum(m_n.to(gl.int32), 0)
    gl.store(p_order + before, n)


@gluon.jit
def zero_padding(p_o, o_t, first, end, T):
    """S4: zeros in those of the 64 output rows from `first` on that no sequence covers."""
    o_v = gl.arange(0, K, gl.SliceLayout(0, LINES))
    o_r0 = gl.arange(0, 8, gl.SliceLayout(1, LINES))
    for i_r in range(0, C, 8):
        o_r = first + i_r + o_r0
        p_row = p_o + o_r.to(gl.int64)[:, None] * o_t + o_v[None, :]
        gl.store(p_row, gl.zeros([8, K], p_o.dtype.element_ty, LINES), mask=((o_r >= end) & (o_r < T))[:, None] & (o_v >= 0)[None, :])


@gluon.jit
def prefetch_rows(p, stride, rows):
    """Brings 64 rows of a slice into the first cache."""
    o_r = gl.arange(0, C, VECTOR)
    address = (p + gl.minimum(o_r, rows - 1) * stride).to(gl.int64)
    gl.inline_asm_elementwise("{ prefetch.global.L1 [$1]; mov.b32 $0, 0; }", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


# Products


@gluon.jit
def meet(sRk, sRq, sC, sX):
    """E6 and the q.k of E10."""
    zero = gl.zeros([C, 32], gl.float32, ACC)
    k1, k2, kx, q1, q2, qx = meet_slice(sRk.index(0), sRq.index(0), sC.index(0), sX.index(0), zero, zero, zero, zero, zero, zero, True)
    k1, k2, kx, q1, q2, qx = meet_slice(sRk.index(1), sRq.index(1), sC.index(1), sX.index(1), k1, k2, kx, q1, q2, qx, False)
    return warpgroup_mma_wait(0, deps=(k1, k2, kx, q1, q2, qx))


@gluon.jit
def meet_slice(sRk, sRq, sC, sX, k1, k2, kx, q1, q2, qx, FIRST: gl.constexpr):
    """E6 and the q.k of E10 of a slice, started: all rows with the columns of the first half, of the second, and of the first in the second."""
    c1 = sC.slice(0, 32, dim=0).permute((1, 0))
    c2 = sC.slice(32, 32, dim=0).permute((1, 0))
    cx = sX.slice(0, 32, dim=0).permute((1, 0))
    k1 = warpgroup_mma(sRk, c1, k1, use_acc=not FIRST, is_async=True)  # E6
    k2 = warpgroup_mma(sRk, c2, k2, use_acc=not FIRST, is_async=True)
    kx = warpgroup_mma(sRk, cx, kx, use_acc=not FIRST, is_async=True)
    q1 = warpgroup_mma(sRq, c1, q1, use_acc=not FIRST, is_async=True)  # E10
    q2 = warpgroup_mma(sRq, c2, q2, use_acc=not FIRST, is_async=True)
    qx = warpgroup_mma(sRq, cx, qx, use_acc=not FIRST, is_async=True)
    return k1, k2, kx, q1, q2, qx


@gluon.jit
def load_beta(p_beta, beta_t, o_t, rows, BETA_RAW: gl.constexpr):
    """Of the tokens o_t, zero behind the sequence."""
    b_beta = gl.load(p_beta + gl.minimum(o_t, rows - 1) * beta_t).to(gl.float32)
    if BETA_RAW:
        b_beta = rcp(1.0 + ex2(-LOG2_E * b_beta))
    return gl.where(o_t < rows, b_beta, 0.0)


@gluon.jit
def tokens_of_halves(LAYOUT: gl.constexpr):
    """The token numbers `[2, 32]`."""
    return gl.arange(0, 2, gl.SliceLayout(1, LAYOUT))[:, None] * 32 + gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def finish(
    k1, k2, kx, q1, q2, qx, sNear, sNorm, p_beta, beta_t, rows, p_k, p_g, p_bias, p_ke, k_t, g_t, inner, outer,
    GATE: gl.constexpr, L2NORM: gl.constexpr, BETA_RAW: gl.constexpr,
):  # fmt: skip
    """The q.k of E10 and E7, M beta: to memory. The six products `[64, 32]` hold row r of the chunk in row r."""
    half, row, col = half_row_col()
    b_A = gl.where(half == 0, by_halves(k1), by_halves(k2))
    b_Ax = by_halves(kx)
    b_square = gl.full([2, 32], 1.0, gl.float32, gl.SliceLayout(2, HALVES))
    if not L2NORM:
        b_square = gl.sum(gl.where(row == col, b_A, 0.0), 2)
    b_most = gl.max(gl.maximum(gl.where(row > col, b_A, 0.0), gl.where(half == 1, b_Ax, 0.0)), 2)
    sNear.store((b_most > NEAR * b_square).to(gl.int32))
    gl.thread_barrier()  # and no product reads its operands any more, whose memory is used again from here on
    repetitions = gl.sum(sNear._reinterpret(gl.int32, [C], LINE).load(PAIRS), 0)
    b_qk = gl.where(row >= col, gl.where(half == 0, by_halves(q1), by_halves(q2)), 0.0)
    b_qkx = by_halves(qx)
    beta_row = load_beta(p_beta, beta_t, tokens_of_halves(gl.SliceLayout(2, HALVES)), rows, BETA_RAW)[:, :, None]
    beta_col = load_beta(p_beta, beta_t, tokens_of_halves(gl.SliceLayout(1, HALVES)), rows, BETA_RAW)[:, None, :]
    beta_first = load_beta(p_beta, beta_t, gl.arange(0, 32, gl.SliceLayout(0, PRODUCT)), rows, BETA_RAW)[None, :]
    if repetitions * 8 >= rows:
        b_A, b_Ax, b_qk, b_qkx = without_repetitions(
            b_A, b_Ax, b_qk, b_qkx, b_square, beta_row, sNear, sNorm, p_k, p_g, p_bias, p_ke, k_t, g_t, rows, inner, outer, GATE
        )  # fmt: skip
    else:
        b_A = gl.where(row > col, b_A, 0.0) * beta_row
        b_Ax = b_Ax * beta_row

    SMALL: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    sM = gl.allocate_shared_memory(gl.float16, [C, 32], SMALL)
    sA = gl.allocate_shared_memory(gl.float16, [C, 32], SMALL)
    sE = gl.allocate_shared_memory(gl.float16, [2, 2, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    sO = gl.allocate_shared_memory(gl.bfloat16, [C, 2 * C], TILE)
    sA.store(gl.reshape(b_Ax.to(gl.float16), [C, 32]))
    b_left = gl.where(half == 0, b_qk, b_qkx)
    sO.slice(0, C, dim=1).store(side_by_side(b_left.to(gl.bfloat16), gl.where(half == 0, 0.0, b_qk).to(gl.bfloat16)))
    b_M = inverse32(b_A, sE)  # E7
    sM.store(gl.reshape(b_M.to(gl.float16), [C, 32]))
    b_M = b_M * beta_col
    sO.slice(C, C, dim=1).store(side_by_side(gl.where(half == 0, b_M, 0.0).to(gl.bfloat16), gl.where(half == 0, 0.0, b_M).to(gl.bfloat16)))
    gl.thread_barrier()
    OP0: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    OP1: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    zero = gl.zeros([32, 32], gl.float32, PRODUCT)
    b_T = mma_v2(sM.slice(32, 32, dim=0).load(OP0), sA.slice(32, 32, dim=0).load(OP1), zero)
    b_T = mma_v2(gl.convert_layout(b_T.to(gl.float16), OP0), sM.slice(0, 32, dim=0).load(OP1), zero)
    sO.slice(32, 32, dim=0).slice(C, 32, dim=1).store((-b_T * beta_first).to(gl.bfloat16))
    gl.thread_barrier()
    o_r = gl.arange(0, C, gl.SliceLayout(1, LINES))
    o_c = gl.arange(0, 2 * C, gl.SliceLayout(0, LINES))
    gl.store(p_ke + (o_r[:, None] + C) * K + o_c[None, :], sO.load(LINES))


@kernel(own=["p_q", "p_k", "p_g", "p_dt_bias", "p_o", "p_header", "p_tiles"], jit=gluon.jit)  # copied where they are not aligned
def prepare_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_o, p_header, p_tiles, p_order,
    q_b: gl.int64, q_t: gl.int32, q_h: gl.int64, k_b: gl.int64, k_t: gl.int32, k_h: gl.int64, g_b: gl.int64, g_t: gl.int32, g_h: gl.int64,
    o_t: gl.int64, o_h: gl.int64, beta_b: gl.int64, beta_t: gl.int64, beta_h: gl.int64,
    N: gl.int32, T: gl.int32, H: gl.int32, HV: gl.int32, scale: gl.float32, lower_bound: gl.float32,
    GATE: gl.constexpr, L2NORM: gl.constexpr, BETA_RAW: gl.constexpr, WIDE: gl.constexpr, PDL: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """E5 to E7, the decayed q and k, and the q.k of E10 of one chunk and head, into its record; the order of the sequences, longest first.

    Args:
        p_header, p_tiles: record unit * HV + h, that is `[records, 160]` fp32 and `[records * 256, 128]` bf16.
        p_order: `[N]` int32, or None; p_o: output whose padding is to be zeroed, or None. Without p_cu neither is touched.
        WIDE: halves may decay too widely.
        PDL: the next kernel of the stream may start when all programs of this one have.
    """
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    pid = gl.program_id(0)
    i_h = pid % HV
    i_u = pid // HV
    record = (i_u * HV + i_h).to(gl.int64)
    p_header += record * HEADER
    p_tiles += record * (RECORD * K)
    if p_cu is not None:
        end = gl.load(p_cu + N).to(gl.int64)
        if p_order is not None:
            n = gl.num_programs(0) - 1 - pid  # the last units are often empty
            if n < N:
                rank_sequence(p_cu, p_order, n, N)
        if p_o is not None:
            if i_u * C + C > end:
                zero_padding(p_o + i_h * o_h * UNIT, o_t * UNIT, i_u * C, end, T)
        i_n = sequence_of(p_cu, N, i_u)
        i_b = 0
        i_c = i_u - first_unit(p_cu, i_n)
        start = gl.load(p_cu + i_n).to(gl.int64)
        rows = (gl.load(p_cu + i_n + 1).to(gl.int64) - start).to(gl.int32) - i_c * C
        start += i_c * C
    else:
        chunks = (T + C - 1) // C
        end = T
        i_b = i_u // chunks
        i_c = i_u % chunks
        start = (i_c * C).to(gl.int64)
        rows = T - i_c * C
    if rows <= 0:
        return
    rows = gl.minimum(rows, C)
    share = HV // H
    i_hk = i_h // share
    q_t *= UNIT
    k_t *= UNIT
    g_t *= UNIT
    p_q += i_b * q_b * UNIT + start * q_t + i_hk * q_h * UNIT
    p_k += i_b * k_b * UNIT + start * k_t + i_hk * k_h * UNIT
    p_g += i_b * g_b * UNIT + start * g_t + i_h * g_h * UNIT
    p_beta += i_b * beta_b + start * beta_t + i_h * beta_h
    p_bias = p_dt_bias
    if p_bias is not None:
        p_bias += i_h * K

    i_t = gl.arange(0, 4, gl.SliceLayout(1, TOKENS))[:, None] * 16 + gl.arange(0, 4, gl.SliceLayout(0, TOKENS))[None, :] * TB
    o_c = gl.arange(0, BS, CHANNELS)[None, :][None, :, :]
    prefetch_rows(p_g, g_t, rows)
    prefetch_rows(p_g + BS, g_t, rows)
    a = 1.0
    if GATE != "none":
        a = ex2(gl.load(p_A_log + i_h).to(gl.float32) * LOG2_E)
    inner, outer = gate_factors(a, lower_bound, GATE)
    k_norms, q_norms = norms(p_k, p_q, k_t, q_t, i_t, o_c, rows, scale, L2NORM)

    sNear = gl.allocate_shared_memory(gl.int32, [2, 32], PLAIN)
    sNorm = gl.allocate_shared_memory(gl.float32, [TB, 4, 4], PLAIN)
    for i in gl.static_range(TB):
        sNorm.index(i).store(k_norms[i])
    sRk = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    sRq = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    sC = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    sX = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    b_widest = gl.zeros([1, BS], gl.float32, OWN)
    for s in range(2):  # a loop: written out, the code would be twice as long and slower
        o_s = s * BS + o_c
        xs = load_rows(p_g, g_t, i_t, o_s, rows)
        b_widest = decay_slice(
            s, xs, p_k, p_q, p_bias, p_tiles, p_header, k_t, q_t, k_norms, q_norms, inner, outer, i_t, o_s, rows, sRk, sRq, sC, sX, b_widest, GATE
        )  # fmt: skip
    fence_async_shared()
    gl.thread_barrier()
    if not WIDE:
        k1, k2, kx, q1, q2, qx = meet(sRk, sRq, sC, sX)
    elif gl.max(gl.max(b_widest, 1), 0) > WIDEST:
        k1, k2, kx, q1, q2, qx = meet_by_levels(
            p_q, p_k, p_g, p_bias, p_tiles, q_t, k_t, g_t, k_norms, q_norms, rows, inner, outer, sRk, sRq, sC, sX, GATE
        )  # fmt: skip
    else:
        k1, k2, kx, q1, q2, qx = meet(sRk, sRq, sC, sX)
    sRk._keep_alive()
    sRq._keep_alive()
    sC._keep_alive()
    sX._keep_alive()
    finish(
        k1, k2, kx, q1, q2, qx, sNear, sNorm, p_beta, beta_t, rows, p_k, p_g, p_bias, p_tiles + 2 * C * K, k_t, g_t, inner, outer,
        GATE, L2NORM, BETA_RAW,
    )  # fmt: skip
    sNear._keep_alive()
    sNorm._keep_alive()
