"""Chunks in which many channels decay too widely for factors from the middle of a half, in the Hopper prepare kernel: a branch of its own.

At a level two tokens of one block of 2 ** level tokens, one in either half, meet where the halves touch: the row's is decayed from there, the other
to there, by factors <= 1 whatever the decay is. Levels go down from 6, the chunk, until no token is further than WIDEST from the middle of its block:
then all pairs of a block meet at its middle, with factors of both signs. At level 0 a block is a token. All this follows from the chunk alone.

Sums of log decays are products with matrices of 0 and 1, as in the Triton backend: nothing cancels in them. A token's log decay enters all of them as
the same two bf16 numbers, exact to 2 ** -17. What a level needs lies where the operands of the usual products would. `here` keeps token numbers out
of the registers of the usual way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kdaserve.ops.chunk_kda.sm90.decay import BS, ex2, gate, wide
from kdaserve.ops.chunk_kda.sm90.layouts import ACC, BOX_ROWS, TILE, C, here
from kdaserve.ops.chunk_kda.sm90.space import K
from kdaserve.ops.jit import chunking

WIDEST = gl.constexpr(chunking.WIDEST)
"""The log2 decay between a token and the middle of its block up to which factors are formed there: they hold 2 ** 124 times a normed key."""
WHOLE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Products `[64, 64]`: of tokens and the channels of a slice."""
PICKS = gl.constexpr(gl.DotOperandLayout(0, WHOLE, 2))
TOKEN = gl.constexpr(gl.SliceLayout(1, WHOLE))


@gluon.jit
def store_slice(s, p_q, p_k, p_g, p_bias, q_t, k_t, g_t, rows, inner, outer, sq, sk, sHigh, sLow, GATE: gl.constexpr):
    """A slice's q and k as they are, and its log decays as two numbers that add up to each."""
    o_t = gl.arange(0, C, gl.SliceLayout(1, BOX_ROWS))[:, None] + here()
    o_c = s * BS + gl.arange(0, BS, gl.SliceLayout(0, BOX_ROWS))
    b_bias = gl.zeros([BS], gl.float32, gl.SliceLayout(0, BOX_ROWS))
    if p_bias is not None:
        b_bias = gl.load(p_bias + o_c).to(gl.float32) * inner
    o_c = o_c[None, :]
    o_r = gl.minimum(o_t, rows - 1)
    sk.store(gl.load(p_k + (o_r * k_t + o_c)))
    sq.store(gl.load(p_q + (o_r * q_t + o_c)))
    b_x = wide(gl.load(p_g + (o_r * g_t + o_c))) * inner + b_bias[None, :]
    b_g = gate(b_x, outer, gl.where(o_t < rows, 1.0, 0.0), GATE)
    b_high = b_g.to(gl.bfloat16)
    sHigh.store(b_high)
    sLow.store((b_g - b_high.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def sums(first, end, sHigh, sLow):
    """E5: for each token the sum of the log decays from `first` to before `end`."""
    o_j = gl.arange(0, C, gl.SliceLayout(0, PICKS))[None, :] + here()
    b_pick = gl.where((o_j >= first) & (o_j < end), 1.0, 0.0).to(gl.bfloat16)
    b_sum = warpgroup_mma(b_pick, sHigh, gl.zeros([C, BS], gl.float32, WHOLE), use_acc=False, is_async=True)
    b_sum = warpgroup_mma(b_pick, sLow, b_sum, is_async=True)
    return warpgroup_mma_wait(0, deps=(b_sum,))


@gluon.jit
def store_rows(sRk, sRq, sk, sq, k_norm, q_norm, b_row):
    """The keys and queries times 2 ** b_row."""
    b_factor = ex2(b_row)
    sRk.store((sk.load(WHOLE).to(gl.float32) * k_norm * b_factor).to(gl.bfloat16))
    sRq.store((sq.load(WHOLE).to(gl.float32) * q_norm * b_factor).to(gl.bfloat16))


@gluon.jit
def store_columns(sC, sk, k_norm, b_col):
    """The keys times 2 ** b_col."""
    sC.store((sk.load(WHOLE).to(gl.float32) * k_norm * ex2(b_col)).to(gl.bfloat16))


@gluon.jit
def add_rows(x1, x2, sR, sC, m_1, m_2):
    """Adds the products of all rows with both halves of the columns, where the masks are."""
    zero = gl.zeros([C, 32], gl.float32, ACC)
    more1 = warpgroup_mma(sR, sC.slice(0, 32, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
    more2 = warpgroup_mma(sR, sC.slice(32, 32, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
    more1, more2 = warpgroup_mma_wait(0, deps=(more1, more2))
    return x1 + gl.where(m_1, more1, 0.0), x2 + gl.where(m_2, more2, 0.0)


@gluon.jit
def add_met(k1, k2, q1, q2, sRk, sRq, sC, level, narrow):
    """Adds E6 and the q.k of E10 of the pairs that meet at this level."""
    row = gl.arange(0, C, gl.SliceLayout(1, ACC))[:, None] + here()
    col = gl.arange(0, 32, gl.SliceLayout(0, ACC))[None, :] + here()
    least = gl.where(narrow, 0, (1 << level) >> 1)
    apart1 = row ^ col
    apart2 = row ^ (col + 32)
    m_1 = (apart1 >= least) & (apart1 < (1 << level))
    m_2 = (apart2 >= least) & (apart2 < (1 << level))
    k1, k2 = add_rows(k1, k2, sRk, sC, m_1, m_2)
    q1, q2 = add_rows(q1, q2, sRq, sC, m_1, m_2)
    gl.thread_barrier()  # no product reads the tiles any more
    return k1, k2, q1, q2


@gluon.jit
def copy_out(sTile, p_tile):
    """A slice of 64 rows of the record."""
    o_r = gl.arange(0, C, gl.SliceLayout(1, BOX_ROWS))
    o_c = gl.arange(0, BS, gl.SliceLayout(0, BOX_ROWS))
    gl.store(p_tile + o_r[:, None] * K + o_c[None, :], sTile.load(BOX_ROWS))


@gluon.jit
def meet_by_levels(
    p_q, p_k, p_g, p_bias, p_tiles, q_t, k_t, g_t, sNorm, sNormQ, rows, inner, outer, sKQ, sG, sX, GATE: gl.constexpr
):  # fmt: skip
    """The products that `finish` takes, each `[64, 32]`, for any decay, and kd, qd and ke to the record; the decay of the chunk is there.

    Args:
        sKQ, sG, sX: memory that nothing reads any more.
    """
    k_norm = sNorm.load(TOKEN)[:, None]
    q_norm = sNormQ.load(TOKEN)[:, None]
    sHigh = sX.index(0)
    sLow = sX.index(1)
    sk = sG.index(0)._reinterpret(p_k.dtype.element_ty, [C, BS], TILE)
    sq = sG.index(1)._reinterpret(p_q.dtype.element_ty, [C, BS], TILE)
    sRk = sKQ.index(0)
    sRq = sKQ.index(2)
    k1 = gl.zeros([C, 32], gl.float32, ACC)
    k2 = k1
    q1 = k1
    q2 = k1
    for s in range(2):
        gl.thread_barrier()
        store_slice(s, p_q, p_k, p_g, p_bias, q_t, k_t, g_t, rows, inner, outer, sq, sk, sHigh, sLow, GATE)
        fence_async_shared()
        gl.thread_barrier()
        level = 6
        while level >= 0:
            token = gl.arange(0, C, gl.SliceLayout(1, PICKS))[:, None] + here()
            half = (1 << level) >> 1
            first = (2 * token >> level << level) >> 1
            second = (token & half) != 0
            b_e = sums(gl.where(second, first, token + 1), gl.where(second, token + 1, first + half), sHigh, sLow)
            narrow = gl.max(gl.max(-b_e, 1), 0) <= WIDEST
            token = gl.arange(0, C, TOKEN)[:, None] + here()
            b_e *= gl.where(narrow & ((token & half) == 0), -1.0, 1.0)
            store_rows(sRk, sRq, sk, sq, k_norm, q_norm, b_e)
            if narrow:
                store_columns(sKQ.index(1), sk, k_norm, -b_e)
            fence_async_shared()
            gl.thread_barrier()
            k1, k2, q1, q2 = add_met(k1, k2, q1, q2, sRk, sRq, sKQ.index(gl.where(narrow, 1, 0)), level, narrow)
            level = gl.where(narrow, -1, level - 1)
        token = gl.arange(0, C, gl.SliceLayout(1, PICKS))[:, None] + here()
        store_rows(sRk, sRq, sk, sq, k_norm, q_norm, sums(0, token + 1, sHigh, sLow))
        fence_async_shared()
        gl.thread_barrier()
        store_columns(sKQ.index(1), sk, k_norm, sums(token + 1, C, sHigh, sLow))
        fence_async_shared()
        gl.thread_barrier()
        copy_out(sRk, p_tiles + s * BS)
        copy_out(sRq, p_tiles + C * K + s * BS)
        copy_out(sKQ.index(1), p_tiles + 2 * C * K + s * BS)
    return k1, k2, k1 + 0.0, q1, q2, q1 + 0.0  # as the same numbers twice they would cost registers where both ways meet
