"""Chunks in which a few channels decay too widely for factors from the middle of a half, in the Hopper prepare kernel: those channels pair by pair.

They are taken out of the operands of the usual products. Then, one channel after the other, every thread adds the channel's part to the products that
it holds: for each pair of tokens its own factor, which is <= 1 whatever the decay is. Where many channels are wide, levels are faster (`levels`).

A token's log decay is the sum of a multiple of 2 ** -8, of which sums are exact, and of a rest that is less than that: nothing cancels in differences
of sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kdaserve.ops.chunk_kda.sm90.decay import BS, add, ex2, gate
from kdaserve.ops.chunk_kda.sm90.layouts import BOX_ROWS, HALVES, LINE, PAIRS, PLAIN, C, here
from kdaserve.ops.chunk_kda.sm90.levels import WIDEST
from kdaserve.ops.chunk_kda.sm90.space import K

FEW = gl.constexpr(8)
"""Channels. Levels take about as long as twenty."""
EVERY = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""Of all channels, in every warp."""
NOTHING = gl.constexpr(-200.0)
"""A log2 decay of one token after which nothing is left: more makes no difference, and sums of 64 stay exact."""
STEPS = gl.constexpr(1.5 * 2**15)
"""What is added to this is rounded to a multiple of 2 ** -8."""


@gluon.jit
def wide_channels(sWidest):
    """Of each channel its number where it is wide, else -1, in EVERY."""
    b_widest = sWidest._reinterpret(gl.float32, [K], LINE).load(EVERY)
    return gl.where(b_widest > WIDEST, gl.arange(0, K, EVERY), -1)


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
def factors(r_high, r_low, c_high, c_low):
    """2 ** what is between the sums of rows and columns, or 1 where the row comes before."""
    return ex2(gl.minimum((r_high - c_high) + (r_low - c_low), 0.0))


@gluon.jit
def add_pairs(
    b_A, b_Ax, b_qk, b_qkx, sE, sNorm, sNormQ, sWidest, p_q, p_k, p_g, p_bias, p_kd, q_t, k_t, g_t, rows, inner, outer, GATE: gl.constexpr
):  # fmt: skip
    """Adds the part of the wide channels to E6 and to the q.k of E10, and writes kd, qd and ke of those channels to the record.

    Args:
        b_A, b_Ax, b_qk, b_qkx: `[half, row, column]`, the rows of a half with its own columns and, of the second half, with those of the first.
        sE: `[4, 64]` fp32, for what belongs to a channel.
    """
    ROW: gl.constexpr = gl.SliceLayout(2, HALVES)
    OWN: gl.constexpr = gl.SliceLayout(1, HALVES)
    FIRST: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, HALVES))
    sHalves = sE._reinterpret(gl.float32, [4, 2, 32], PLAIN)
    sFirst = sE._reinterpret(gl.float32, [8, 32], LINE)
    o_t = gl.arange(0, C, PAIRS) + here()
    o_r = gl.minimum(o_t, rows - 1)
    b_wide = wide_channels(sWidest)
    c = gl.max(b_wide, 0)
    while c >= 0:
        b_x = gl.load(p_g + (o_r * g_t + c)).to(gl.float32) * inner
        if p_bias is not None:
            b_x += gl.load(p_bias + c).to(gl.float32) * inner
        b_k = gl.load(p_k + (o_r * k_t + c)).to(gl.float32) * sNorm.load(PAIRS)
        b_q = gl.load(p_q + (o_r * q_t + c)).to(gl.float32) * sNormQ.load(PAIRS)
        b_g = gate(b_x, outer, gl.where(o_t < rows, 1.0, 0.0), GATE)
        b_g = gl.where(b_g < NOTHING, NOTHING, b_g)  # and a NaN stays one
        b_high = (b_g + STEPS) - STEPS
        b_low = b_g - b_high
        all_high = gl.sum(b_high, 0)
        all_low = gl.sum(b_low, 0)
        b_high = gl.associative_scan(b_high, 0, add)  # E5
        b_low = gl.associative_scan(b_low, 0, add)
        b_factor = ex2(b_high + b_low)
        p_c = p_kd + (o_t * K + c)
        gl.store(p_c, (b_k * b_factor).to(gl.bfloat16))
        gl.store(p_c + C * K, (b_q * b_factor).to(gl.bfloat16))
        gl.store(p_c + 2 * C * K, (b_k * ex2((all_high - b_high) + (all_low - b_low))).to(gl.bfloat16))
        gl.thread_barrier()  # the channel before is read
        sE.index(0).store(b_high)
        sE.index(1).store(b_low)
        sE.index(2).store(b_k)
        sE.index(3).store(b_q)
        gl.thread_barrier()
        r_high = sHalves.index(0).load(ROW)[:, :, None]
        r_low = sHalves.index(1).load(ROW)[:, :, None]
        r_k = sHalves.index(2).load(ROW)[:, :, None]
        r_q = sHalves.index(3).load(ROW)[:, :, None]
        b_C = factors(r_high, r_low, sHalves.index(0).load(OWN)[:, None, :], sHalves.index(1).load(OWN)[:, None, :])
        b_C *= sHalves.index(2).load(OWN)[:, None, :]
        b_A += r_k * b_C
        b_qk += r_q * b_C
        b_C = factors(r_high, r_low, sFirst.index(0).load(FIRST)[None, :][None, :, :], sFirst.index(2).load(FIRST)[None, :][None, :, :])
        b_C *= sFirst.index(4).load(FIRST)[None, :][None, :, :]
        b_Ax += r_k * b_C
        b_qkx += r_q * b_C
        b_wide = gl.where(b_wide < c, b_wide, -1)
        c = gl.max(b_wide, 0)
    return b_A, b_Ax, b_qk, b_qkx
