"""Prefill on Hopper, first kernel: what a chunk can compute without knowing the state it starts from. One program, four warps, a chunk and head.

A record is the decay of the chunk, 128 numbers in fp32, and tiles of bf16 rows of 128: k decayed from the chunk's start (64 rows), q likewise (64),
k decayed to the chunk's end (64), and 64 rows of which the left half is the q.k of E10 and the right half M beta.

**Where tokens meet.** A chunk of 64 tokens is four quarters. Tokens of a half meet at its middle: with e the log decay from there to the token, the
row's factor is 2 ** e and the column's 2 ** -e. Both stay within 2 ** +-124 while no 16 tokens decay by more than that; for the bounded gate with
lower_bound >= -5 this always holds; where it does not, a few channels are computed pair by pair (`pairs`), many by levels (`levels`). All else
follows from these two by factors <= 1 of a channel: kd and qd are the rows times the decay from the chunk's start to the middle, ke is the column
times the decay from the middle to the end, and tokens of different halves meet at the middle of the second one, where the rows are the same and the
columns get smaller still.

**Who has what.** In the part that is done element by element (`decay`) a warp has a quarter of the tokens; from the products on it has 16 rows of the
chunk, and E7 (`inverse`) begins with four blocks of 16, one a warp, in registers. Where keys repeat, the chunk is written in another basis
(`repeats`), a branch of its own that takes no registers from other chunks.

**What is where.** q, k and g come by TMA. Each thread puts the operands of the products where its inputs were, so three programs fit on a
multiprocessor: they wait in turns.

Keys are expected to be normed, or to be no longer than that: E7 rounds A and M to fp16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, warpgroup_mma, warpgroup_mma_wait

from kdaserve.ops.chunk_kda.sm90.decay import BS, CHANNELS, LOG2_E, TB, TOKENS, decay_slice, ex2, gate_factors, norms, tokens_of
from kdaserve.ops.chunk_kda.sm90.inputs import beta_of, box, copy_slices, load_beta, mask_chunk
from kdaserve.ops.chunk_kda.sm90.inverse import inverse32
from kdaserve.ops.chunk_kda.sm90.layouts import ACC, HALVES, LINE, LINES, PAIRS, PLAIN, TILE, VECTOR, C, by_halves, half_row_col, side_by_side
from kdaserve.ops.chunk_kda.sm90.levels import meet_by_levels
from kdaserve.ops.chunk_kda.sm90.pairs import FEW, add_pairs, take_out, wide_channels
from kdaserve.ops.chunk_kda.sm90.places import chunk_of, side_jobs
from kdaserve.ops.chunk_kda.sm90.repeats import NEAR, OFTEN, without_repetitions
from kdaserve.ops.chunk_kda.sm90.space import RECORD, K
from kdaserve.ops.jit.launch import kernel

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
"""Products `[32, 32]` of the last step of E7."""


@gluon.jit
def meet(sKQ, sC, sX):
    """E6 and the q.k of E10."""
    zero = gl.zeros([C, 32], gl.float32, ACC)
    k1, k2, kx, q1, q2, qx = meet_slice(0, sKQ, sC, sX, zero, zero, zero, zero, zero, zero, True)
    k1, k2, kx, q1, q2, qx = meet_slice(1, sKQ, sC, sX, k1, k2, kx, q1, q2, qx, False)
    return warpgroup_mma_wait(0, deps=(k1, k2, kx, q1, q2, qx))


@gluon.jit
def meet_slice(s, sKQ, sC, sX, k1, k2, kx, q1, q2, qx, FIRST: gl.constexpr):
    """E6 and the q.k of E10 of a slice, started: all rows with the columns of the first half, of the second, and of the first in the second."""
    sRk = sKQ.index(s)
    sRq = sKQ.index(2 + s)
    c1 = sC.index(s).slice(0, 32, dim=0).permute((1, 0))
    c2 = sC.index(s).slice(32, 32, dim=0).permute((1, 0))
    cx = sX.index(s).slice(0, 32, dim=0).permute((1, 0))
    k1 = warpgroup_mma(sRk, c1, k1, use_acc=not FIRST, is_async=True)  # E6
    k2 = warpgroup_mma(sRk, c2, k2, use_acc=not FIRST, is_async=True)
    kx = warpgroup_mma(sRk, cx, kx, use_acc=not FIRST, is_async=True)
    q1 = warpgroup_mma(sRq, c1, q1, use_acc=not FIRST, is_async=True)  # E10
    q2 = warpgroup_mma(sRq, c2, q2, use_acc=not FIRST, is_async=True)
    qx = warpgroup_mma(sRq, cx, qx, use_acc=not FIRST, is_async=True)
    return k1, k2, kx, q1, q2, qx


@gluon.jit
def finish(
    k1, k2, kx, q1, q2, qx, few, sNear, sNorm, sNormQ, sBeta, sWidest, sS, rows, p_q, p_k, p_g, p_bias, p_tiles, q_t, k_t, g_t,
    inner, outer, GATE: gl.constexpr, L2NORM: gl.constexpr, BETA_RAW: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The q.k of E10 and E7, M beta: to memory. The six products `[64, 32]` hold row r of the chunk in row r; sS is where they had their operands."""
    half, row, col = half_row_col()
    b_A = gl.where(half == 0, by_halves(k1), by_halves(k2))
    b_Ax = by_halves(kx)
    b_qk = gl.where(half == 0, by_halves(q1), by_halves(q2))
    b_qkx = by_halves(qx)
    if WIDE:
        if few:
            b_A, b_Ax, b_qk, b_qkx = add_pairs(
                b_A, b_Ax, b_qk, b_qkx, sNorm, sNormQ, sWidest, p_q, p_k, p_g, p_bias, p_tiles, q_t, k_t, g_t, rows, inner, outer, GATE
            )  # fmt: skip
    p_ke = p_tiles + 2 * C * K
    b_square = gl.full([2, 32], 1.0, gl.float32, gl.SliceLayout(2, HALVES))
    if not L2NORM:
        b_square = gl.sum(gl.where(row == col, b_A, 0.0), 2)
    b_most = gl.max(gl.maximum(gl.where(row > col, b_A, 0.0), gl.where(half == 1, b_Ax, 0.0)), 2)
    sNear.store((b_most > NEAR * b_square).to(gl.int32))
    gl.thread_barrier()  # and no product reads its operands any more, whose memory is used again from here on
    repetitions = gl.sum(sNear._reinterpret(gl.int32, [C], LINE).load(PAIRS), 0)
    b_qk = gl.where(row >= col, b_qk, 0.0)
    beta_row = beta_of(sBeta.load(gl.SliceLayout(2, HALVES)), BETA_RAW)[:, :, None]
    beta_col = beta_of(sBeta.load(gl.SliceLayout(1, HALVES)), BETA_RAW)[:, None, :]
    beta_first = beta_of(sBeta._reinterpret(sBeta.dtype, [2, 32], LINE).index(0).load(gl.SliceLayout(0, PRODUCT)), BETA_RAW)[None, :]
    if repetitions * OFTEN >= rows:
        b_A, b_Ax, b_qk, b_qkx = without_repetitions(
            b_A, b_Ax, b_qk, b_qkx, b_square, beta_row, sNear, sNorm, p_k, p_g, p_bias, p_ke, k_t, g_t, rows, inner, outer, sS, GATE
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


@kernel(own=["p_q", "p_k", "p_g", "p_dt_bias", "p_o", "p_decay", "p_tiles"], jit=gluon.jit)  # what is not aligned is copied
def prepare_kernel(
    d_q, d_k, d_g, p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_o, p_decay, p_tiles, p_order,
    q_t: gl.int64, q_h: gl.int32, k_t: gl.int64, k_h: gl.int32, g_t: gl.int64, g_h: gl.int32, o_t: gl.int64, o_h: gl.int64,
    q_b: gl.int32, k_b: gl.int32, g_b: gl.int32, beta_b: gl.int64, beta_t: gl.int64, beta_h: gl.int64,
    N: gl.int32, T: gl.int32, H: gl.int32, HV: gl.int32, scale: gl.float32, lower_bound: gl.float32,
    GATE: gl.constexpr, L2NORM: gl.constexpr, BETA_RAW: gl.constexpr, WIDE: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """E5 to E7, the decayed q and k, and the q.k of E10 of one chunk and head, into its record; the order of the sequences, longest first.

    Token t of batch entry b is row b q_b + t of `d_q`, head h starts at column h q_h; likewise `d_k` and `d_g`.

    Args:
        p_q, p_k, p_g: the same memory, rows q_t, k_t, g_t apart. Where keys repeat k and g are read again there, in wide chunks all three.
        p_decay, p_tiles: record unit * HV + h, that is `[records, 128]` fp32 and `[records * 256, 128]` bf16.
        p_order: `[N]` int32, or None; p_o: output whose padding is to be zeroed, or None. Without p_cu neither is touched.
        WIDE: halves may decay too widely.
    """
    # The next kernel of the stream may start when all programs of this one have.
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    record = gl.program_id(0)
    i_h = record % HV
    i_hk = i_h // (HV // H)
    i_b, start, rows = chunk_of(p_cu, record // HV, N, T)
    sKQ = gl.allocate_shared_memory(gl.bfloat16, [4, C, BS], TILE)
    sG = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if rows > 0:
        mbarrier.init(full, count=1)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.expect(full, 6 * C * BS * 2)
        copy_slices(d_k, i_b * k_b + start, i_hk * (k_h * UNIT), sKQ, 0, full)
        copy_slices(d_q, i_b * q_b + start, i_hk * (q_h * UNIT), sKQ, 2, full)
        copy_slices(d_g, i_b * g_b + start, i_h * (g_h * UNIT), sG, 0, full)
    if p_cu is not None:
        side_jobs(p_cu, p_order, p_o, record, o_t * UNIT, o_h * UNIT, N, T, HV)
    if rows <= 0:
        return
    p_decay += record.to(gl.int64) * K
    p_tiles += record.to(gl.int64) * (RECORD * K)
    p_q += (i_b * q_b + start) * q_t * UNIT + i_hk * (q_h * UNIT)
    p_k += (i_b * k_b + start) * k_t * UNIT + i_hk * (k_h * UNIT)
    p_g += (i_b * g_b + start) * g_t * UNIT + i_h * (g_h * UNIT)
    # Used only behind the wait for the copies, so that their ways from memory overlap.
    b_beta = load_beta(p_beta + i_b * beta_b + start * beta_t + i_h * beta_h, beta_t, rows, BETA_RAW)
    if GATE != "none":
        log_a = gl.load(p_A_log + i_h)
    p_bias = p_dt_bias
    if p_bias is not None:
        p_bias += i_h * K
        b_bias = gl.load(p_bias + gl.arange(0, K, VECTOR))
    sNear = gl.allocate_shared_memory(gl.int32, [2, 32], PLAIN)
    sNorm = gl.allocate_shared_memory(gl.float32, [C], LINE)
    sBeta = gl.allocate_shared_memory(p_beta.dtype.element_ty, [2, 32], PLAIN)
    i_t = gl.arange(0, 4, gl.SliceLayout(1, TOKENS))[:, None] * 16 + gl.arange(0, 4, gl.SliceLayout(0, TOKENS))[None, :] * TB
    o_c = gl.arange(0, BS, CHANNELS)[None, :][None, :, :]
    mbarrier.wait(full, 0)
    if rows < C:
        mask_chunk(sKQ, sG, rows)
    k_norms = norms(box(sKQ, 0, d_k.dtype), box(sKQ, 1, d_k.dtype), i_t, rows, 1.0, L2NORM)
    q_norms = norms(box(sKQ, 2, d_q.dtype), box(sKQ, 3, d_q.dtype), i_t, rows, scale, L2NORM)
    sNorm.store(tokens_of(k_norms))
    sNormQ = gl.allocate_shared_memory(gl.float32, [C], LINE)
    sWidest = gl.allocate_shared_memory(gl.float32, [2, 1, BS], PLAIN)
    if WIDE:
        sNormQ.store(tokens_of(q_norms))
    sBeta._reinterpret(sBeta.dtype, [C], LINE).store(b_beta)
    sBias = p_bias
    if p_bias is not None:
        sBias = gl.allocate_shared_memory(gl.float32, [2, BS], LINE)
        sBias._reinterpret(gl.float32, [K], LINE).store(b_bias.to(gl.float32))
    sX = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    a = 1.0
    if GATE != "none":
        a = ex2(log_a.to(gl.float32) * LOG2_E)
    inner, outer = gate_factors(a, lower_bound, GATE)
    for s in range(2):  # a loop: written out, the code would be twice as long
        decay_slice(
            s, box(sKQ, s, d_k.dtype), box(sKQ, 2 + s, d_q.dtype), box(sG, s, d_g.dtype), sX.index(s),
            sBias, p_tiles, p_decay, k_norms, q_norms, inner, outer, i_t, o_c, rows, sWidest.index(s), GATE, WIDE,
        )  # fmt: skip
    fence_async_shared()
    gl.thread_barrier()
    few = False
    if WIDE:
        wide = gl.sum((wide_channels(sWidest) >= 0).to(gl.int32), 0)
        few = (wide > 0) & (wide <= FEW)
        if few:
            take_out(sWidest, sKQ, sG, sX)
        if wide <= FEW:
            k1, k2, kx, q1, q2, qx = meet(sKQ, sG, sX)
        else:
            k1, k2, kx, q1, q2, qx = meet_by_levels(
                p_q, p_k, p_g, p_bias, p_tiles, q_t * UNIT, k_t * UNIT, g_t * UNIT, sNorm, sNormQ, rows, inner, outer, sKQ, sG, sX, GATE
            )  # fmt: skip
    else:
        k1, k2, kx, q1, q2, qx = meet(sKQ, sG, sX)
    sG._keep_alive()
    sX._keep_alive()
    finish(
        k1, k2, kx, q1, q2, qx, few, sNear, sNorm, sNormQ, sBeta, sWidest, sKQ._reinterpret(gl.float32, [C, K], PLAIN), rows,
        p_q, p_k, p_g, p_bias, p_tiles, q_t * UNIT, k_t * UNIT, g_t * UNIT, inner, outer, GATE, L2NORM, BETA_RAW, WIDE,
    )  # fmt: skip
    # What else lies where a barrier was changes when the GPU is taken from a program and given back (docs/facts.md).
    full._keep_alive()
    sKQ._keep_alive()
    sNear._keep_alive()
    sNorm._keep_alive()
    sBeta._keep_alive()
    if WIDE:
        sNormQ._keep_alive()
        sWidest._keep_alive()
