"""Chunks in which a few channels decay too widely for factors from the middle of a half, in the Hopper prepare kernel: those channels pair by pair.

They are taken out of the operands of the usual products. Then, one channel after the other, every thread adds the channel's part to the products that
it holds: for each pair of tokens its own factor, which is <= 1 whatever the decay is. Where many channels are wide, levels are faster (`levels`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kdaserve.ops.chunk_kda.sm90.decay import BS, add, ex2, gate
from kdaserve.ops.chunk_kda.sm90.layouts import BOX_ROWS, EVERY_WARP, HALVES, LINE, PAIRS, PLAIN, C, here
from kdaserve.ops.chunk_kda.sm90.levels import WIDEST
from kdaserve.ops.chunk_kda.sm90.space import K

FEW = gl.constexpr(8)
"""Channels. Levels are predicted to take about as long as twenty."""
NOTHING = gl.constexpr(-127.0)
"""A log2 decay of one token after which `ex2` leaves nothing. More makes no difference, and cut off there sums of 64 are off by 6e-4 at most: a third
of what rounding to bf16 costs."""


@gluon.jit
def wide_channels(sWidest):
    """Of each channel its number where it is wide, else -1, in EVERY_WARP."""
    b_widest = sWidest._reinterpret(gl.float32, [K], LINE).load(EVERY_WARP)
    return gl.where(b_widest > WIDEST, gl.arange(0, K, EVERY_WARP), -1)


@gluon.jit
def take_out(sWidest, sKQ, sC, sX):
    """Sets the wide channels of the operands to zero."""
    for s in range(2):
        m_c = (sWidest._reinterpret(gl.float32, [2, BS], LINE).index(s).load(gl.SliceLayout(0, BOX_ROWS)) <= WIDEST)[None, :]
        clear(sKQ.index(s), m_c)
        clear(sKQ.index(2 + s), m_c)
        clear(sC.index(s), m_c)
        clear(sX.index(s), m_c)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def clear(sTile, m_c):
    """Sets a tile to zero but for the channels of a mask."""
    b_x = sTile.load(BOX_ROWS)
    sTile.store(gl.where(m_c, b_x, gl.zeros_like(b_x)))


@gluon.jit
def channel_of(p_q, p_k, p_g, p_bias, o_q, o_k, o_g, c):
    """q, k, gate logits and bias of a channel; of the first one if c is -1."""
    c = gl.maximum(c, 0)
    bias = 0.0
    if p_bias is not None:
        bias = gl.load(p_bias + c).to(gl.float32)
    return gl.load(p_q + (o_q + c)), gl.load(p_k + (o_k + c)), gl.load(p_g + (o_g + c)), bias


@gluon.jit
def store_line(sX, b_x):
    """A number a token to `[half, token]`."""
    sX._reinterpret(gl.float32, [C], LINE).store(b_x)


@gluon.jit
def load_first(sX, LAYOUT: gl.constexpr):
    """Those of the first half, by column."""
    return sX._reinterpret(gl.float32, [2, 32], LINE).index(0).load(LAYOUT)[None, :][None, :, :]


@gluon.jit
def add_pairs(
    b_A, b_Ax, b_qk, b_qkx, sNorm, sNormQ, sWidest, p_q, p_k, p_g, p_bias, p_tiles, q_t, k_t, g_t, rows, inner, outer, GATE: gl.constexpr
):  # fmt: skip
    """Adds the part of the wide channels to E6 and to the q.k of E10, and writes kd, qd and ke of those channels to the record.

    Args:
        b_A, b_Ax, b_qk, b_qkx: `[half, row, column]`, the rows of a half with its own columns and, of the second half, with those of the first. Where
            the row comes before the column, and in what else nobody reads, anything may come out, infinities too.
    """
    ROW: gl.constexpr = gl.SliceLayout(2, HALVES)
    OWN: gl.constexpr = gl.SliceLayout(1, HALVES)
    FIRST: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, HALVES))
    se = gl.allocate_shared_memory(gl.float32, [2, 32], PLAIN)
    sk = gl.allocate_shared_memory(gl.float32, [2, 32], PLAIN)
    sq = gl.allocate_shared_memory(gl.float32, [2, 32], PLAIN)
    o_t = gl.arange(0, C, PAIRS) + here()
    o_r = gl.minimum(o_t, rows - 1)
    b_wide = wide_channels(sWidest)
    c = gl.max(b_wide, 0)
    q, k, x, bias = channel_of(p_q, p_k, p_g, p_bias, o_r * q_t, o_r * k_t, o_r * g_t, c)
    while c >= 0:
        b_q = q.to(gl.float32) * sNormQ.load(PAIRS)
        b_k = k.to(gl.float32) * sNorm.load(PAIRS)
        b_g = gate(x.to(gl.float32) * inner + bias * inner, outer, gl.where(o_t < rows, 1.0, 0.0), GATE)
        b_g = gl.where(b_g < NOTHING, NOTHING, b_g)  # and a NaN stays one
        p_c = p_tiles + (o_t * K + c)
        b_wide = gl.where(b_wide < c, b_wide, -1)
        c = gl.max(b_wide, 0)
        q, k, x, bias = channel_of(p_q, p_k, p_g, p_bias, o_r * q_t, o_r * k_t, o_r * g_t, c)  # on its way while this one is computed
        b_e = gl.associative_scan(b_g, 0, add)  # E5
        b_factor = ex2(b_e)
        gl.store(p_c, (b_k * b_factor).to(gl.bfloat16))
        gl.store(p_c + C * K, (b_q * b_factor).to(gl.bfloat16))
        gl.store(p_c + 2 * C * K, (b_k * ex2(gl.sum(b_g, 0) - b_e)).to(gl.bfloat16))
        gl.thread_barrier()  # the channel before is read
        store_line(se, b_e)
        store_line(sk, b_k)
        store_line(sq, b_q)
        gl.thread_barrier()
        r_e = se.load(ROW)[:, :, None]
        r_k = sk.load(ROW)[:, :, None]
        r_q = sq.load(ROW)[:, :, None]
        b_C = ex2(r_e - se.load(OWN)[:, None, :]) * sk.load(OWN)[:, None, :]
        b_A += r_k * b_C
        b_qk += r_q * b_C
        b_C = ex2(r_e - load_first(se, FIRST)) * load_first(sk, FIRST)
        b_Ax += r_k * b_C
        b_qkx += r_q * b_C
    return b_A, b_Ax, b_qk, b_qkx
