"""What the Hopper prepare kernel reads of a chunk: q, k and g by TMA, in boxes of 64 tokens and a slice of 64 channels; beta."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from kdaserve.ops.chunk_kda.sm90.decay import BS, LOG2_E, ex2, rcp
from kdaserve.ops.chunk_kda.sm90.layouts import TILE, VECTOR, C, mask_rows


@gluon.jit
def box(sBoxes, i, DTYPE: gl.constexpr):
    """Box i, as numbers of a type of 16 bits."""
    return sBoxes.index(i)._reinterpret(DTYPE, [C, BS], TILE)


@gluon.jit
def copy_slices(d_x, row, column, sBoxes, i, full):
    """Starts the copies of a chunk and head, its first token in `row`, its first channel in `column`, to boxes i and i + 1, a slice each."""
    for s in gl.static_range(2):
        tma.async_copy_global_to_shared(d_x, [row, column + s * BS], full, box(sBoxes, i + s, d_x.dtype))


@gluon.jit
def mask_chunk(sKQ, sG, rows):
    """Zeros behind the sequence, where the boxes have tokens of the next one."""
    for i in range(4):
        mask_rows(sKQ.index(i), rows)
    for i in range(2):
        mask_rows(sG.index(i), rows)
    gl.thread_barrier()


@gluon.jit
def load_beta(p_beta, beta_t, rows, BETA_RAW: gl.constexpr):
    """Of the 64 tokens as it comes; behind the sequence what becomes zero. Nothing is computed, so that nothing waits for it."""
    o_t = gl.arange(0, C, VECTOR)
    nothing = float("-inf") if BETA_RAW else 0.0
    return gl.load(p_beta + o_t * beta_t, mask=o_t < rows, other=nothing)


@gluon.jit
def beta_of(b_beta, BETA_RAW: gl.constexpr):
    """Beta of what has been loaded."""
    b_beta = b_beta.to(gl.float32)
    if BETA_RAW:
        b_beta = rcp(1.0 + ex2(-LOG2_E * b_beta))
    return b_beta
