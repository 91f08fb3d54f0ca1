"""Keys that repeat, in the Hopper prepare kernel: the chunk in another basis, as docs/design/triton-backend.md explains.

N picks for each token the last one before it whose key it repeats; q.k becomes (q.k) (I - N), the matrix to invert (I + beta A) (I - N), and ke
becomes (I - N)^T ke. All numbers go through shared memory, so that this takes no registers from chunks without repetitions.
"""
# ruff: noqa: RUF005 (kernels add tuples: their compiler does not unpack them)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kdaserve.ops.chunk_kda.sm90.decay import ex2, gate
from kdaserve.ops.chunk_kda.sm90.layouts import ACC, LINE, LINES, VECTOR, C, by_halves, half_row_col, side_by_side
from kdaserve.ops.chunk_kda.sm90.space import K
from kdaserve.ops.jit import chunking

NEAR = gl.constexpr(chunking.NEAR)
OFTEN = gl.constexpr(chunking.OFTEN)


@gluon.jit
def token_of(sToken, t):
    """One of 64 numbers, a scalar."""
    return gl.max(sToken._reinterpret(sToken.dtype, [C, 1], LINE).index(t).load(VECTOR), 0)


@gluon.jit
def row_of(sS, t):
    """Row t of `[C, K]`."""
    return sS._reinterpret(gl.float32, [C, K], LINE).index(t)


@gluon.jit
def store_columns(sS, first_row, left, right, half):
    """A lower triangular matrix of two `[half, row, column]`, the rows of all with the first columns and with the second; column t to row t of sS."""
    both = side_by_side(left, gl.where(half == 1, right, 0.0))
    sS.slice(first_row, C, dim=1).permute((1, 0)).store(both)


@gluon.jit
def load_columns(sS, first_row):
    """The reverse of `store_columns`."""
    sS = sS.slice(first_row, C, dim=1)
    left = by_halves(sS.slice(0, 32, dim=0).permute((1, 0)).load(ACC))
    right = by_halves(sS.slice(32, 32, dim=0).permute((1, 0)).load(ACC))
    return left, right


@gluon.jit
def store_keys(sS, sNorm, p_k, p_g, p_bias, k_t, g_t, rows, inner, outer, GATE: gl.constexpr):
    """The keys decayed to the chunk's end, in fp32, token t to row t of sS; from the last token on, a channel a thread."""
    o_c = gl.arange(0, K, VECTOR)
    b_bias = gl.zeros([K], gl.float32, VECTOR)
    if p_bias is not None:
        b_bias = gl.load(p_bias + o_c).to(gl.float32) * inner
    b_e = gl.zeros([K], gl.float32, VECTOR)
    for i_t in range(0, C, 8):
        ks = ()
        xs = ()
        for i in gl.static_range(8):
            t = gl.minimum(C - 1 - i_t - i, rows - 1)
            ks = ks + (gl.load(p_k + t * k_t + o_c),)
            xs = xs + (gl.load(p_g + t * g_t + o_c),)
        for i in gl.static_range(8):
            t = C - 1 - i_t - i
            norm = token_of(sNorm, t)
            row_of(sS, t).store(ks[i].to(gl.float32) * norm * ex2(b_e))
            b_e += gate(xs[i].to(gl.float32) * inner + b_bias, outer, gl.where(t < rows, 1.0, 0.0), GATE)


@gluon.jit
def subtract_repeated(sS, sLast):
    """Takes row t of sS from row last(t), token after token, which makes (X (I - N))^T of X^T. No thread needs another's numbers.

    Row t is subtracted before anything is subtracted from it: what repeats it comes later.
    """
    for t in range(1, C):
        last = token_of(sLast, t)
        if last >= 0:
            row_of(sS, last).store(row_of(sS, last).load(VECTOR) - row_of(sS, t).load(VECTOR))


@gluon.jit
def last_repeated(b_k, b_kx, b_square):
    """Of each row the last column of the chunk that it repeats, -1 if none, `[half, row]`."""
    half, row, col = half_row_col()
    b_near = NEAR * b_square[:, :, None]
    b_last = gl.where((row > col) & (b_k > b_near), col + 32 * half, -1)
    b_lastx = gl.where((half == 1) & (b_kx > b_near), col, -1)
    return gl.max(gl.maximum(b_last, b_lastx), 2)


@gluon.jit
def without_repetitions(
    b_k, b_kx, b_q, b_qx, b_square, beta_row, sLast, sNorm, p_k, p_g, p_bias, p_ke, k_t, g_t, rows, inner, outer, sS,
    GATE: gl.constexpr,
):  # fmt: skip
    """The chunk in the other basis: q.k (I - N), (I + beta A) (I - N) - I, and to memory (I - N)^T ke.

    Args:
        sS: `[64, 128]` fp32, for ke first and then for the others.
        b_k, b_kx: A before beta, rows of a half with its own columns and of the second half with the columns of the first; b_q, b_qx: q.k likewise.
    """
    half, row, col = half_row_col()
    b_last = last_repeated(b_k, b_kx, b_square)
    sLast.store(b_last)
    store_keys(sS, sNorm, p_k, p_g, p_bias, k_t, g_t, rows, inner, outer, GATE)
    gl.thread_barrier()
    subtract_repeated(sS, sLast)
    gl.thread_barrier()
    o_r = gl.arange(0, C, gl.SliceLayout(1, LINES))
    o_c = gl.arange(0, K, gl.SliceLayout(0, LINES))
    gl.store(p_ke + o_r[:, None] * K + o_c[None, :], sS.load(LINES).to(gl.bfloat16))
    gl.thread_barrier()
    b_k = gl.where(row > col, b_k * beta_row, 0.0)
    store_columns(sS, 0, gl.where(half == 0, b_k, b_kx * beta_row), b_k, half)
    store_columns(sS, C, gl.where(half == 0, b_q, b_qx), b_q, half)
    gl.thread_barrier()
    subtract_repeated(sS, sLast)
    gl.thread_barrier()
    b_last = b_last[:, :, None]
    left, right = load_columns(sS, 0)
    b_k = gl.where(half == 0, left, right) - gl.where(b_last == col + 32 * half, 1.0, 0.0)
    b_kx = left - gl.where(b_last == col, 1.0, 0.0)
    left, right = load_columns(sS, C)
    return b_k, b_kx, gl.where(half == 0, left, right), left
