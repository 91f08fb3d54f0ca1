"""E7 of the two halves of a chunk in the Hopper prepare kernel, in registers but for what goes from a warp to the next."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from kdaserve.ops.chunk_kda.sm90.layouts import HALVES, C

BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0]], [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 16, 2, 16],
    )
)  # fmt: skip
"""The same numbers as `[block of 16 rows, row, block of 16 columns, column]`; nothing moves."""
BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
"""Products of blocks `[4, 16, 16]`, a block a warp."""
LEFT = gl.constexpr(gl.DotOperandLayout(0, BLOCK, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, BLOCK, 2))
EARLIER = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1, 0], [0, 0, 8, 0], [0, 0, 0, 8]], [[0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        [[0, 1, 0, 0], [1, 0, 0, 0]], [], [2, 2, 16, 16],
    )
)  # fmt: skip
"""Right operands as `[pair of blocks, which of the pair, row, column]`."""


@gluon.jit
def inverse16(D):
    """E7 of the four diagonal blocks `[4, 16, 16]`, a warp each, nothing leaves its registers: blocks of 2, 4, 8, 16.

    The transposed inverse is carried along: a transposed accumulator is what the right operand of the matrix units looks like.
    """
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCK)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, BLOCK)))[None, :][None, :, :]
    Dt = gl.convert_layout(gl.permute(D, (0, 2, 1)), BLOCK)
    one = gl.where(i == j, 1.0, 0.0)
    pair = (i ^ j) == 1
    M = one - gl.where(pair, D, 0.0)
    Mt = one - gl.where(pair, Dt, 0.0)
    zero = gl.zeros([4, 16, 16], gl.float32, BLOCK)
    for level in gl.static_range(1, 4):
        pick = ((i >> level) ^ (j >> level)) == 1
        A = gl.where(pick, D, 0.0).to(gl.float16)
        At = gl.where(pick, Dt, 0.0).to(gl.float16)
        Mh = M.to(gl.float16)
        Mth = Mt.to(gl.float16)
        P = mma_v2(gl.convert_layout(Mh, LEFT), gl.convert_layout(gl.permute(At, (0, 2, 1)), RIGHT), zero)
        M -= mma_v2(gl.convert_layout(P.to(gl.float16), LEFT), gl.convert_layout(gl.permute(Mth, (0, 2, 1)), RIGHT), zero)
        if level < 3:
            Pt = mma_v2(gl.convert_layout(Mth, LEFT), gl.convert_layout(gl.permute(A, (0, 2, 1)), RIGHT), zero)
            Mt -= mma_v2(gl.convert_layout(Pt.to(gl.float16), LEFT), gl.convert_layout(gl.permute(Mh, (0, 2, 1)), RIGHT), zero)
    return M


@gluon.jit
def inverse32(b_A, sE):
    """E7 of the two halves, `[half, row, column]`: two blocks of 16 each, [[M1, 0], [-M2 A21 M1, M2]], the product in the warp of the second."""
    b_A = gl.convert_layout(gl.reshape(gl.reshape(b_A, [C, 32]), [4, 16, 2, 16]), BLOCKS)
    i_b = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, BLOCKS))))[:, None][:, :, None][:, :, :, None]
    j_b = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, BLOCKS))))[None, :][:, None, :], 3)
    own = (i_b & 1) == j_b
    b_D = gl.convert_layout(gl.sum(gl.where(own, b_A, 0.0), 2), BLOCK)
    b_left = gl.convert_layout(gl.sum(gl.where(own, 0.0, b_A), 2), BLOCK)  # of an odd diagonal block
    b_M = inverse16(b_D)
    b_Mh = b_M.to(gl.float16)
    sE.store(gl.reshape(b_Mh, [2, 2, 16, 16]))
    zero = gl.zeros([4, 16, 16], gl.float32, BLOCK)
    b_left = mma_v2(gl.convert_layout(b_Mh, LEFT), gl.convert_layout(b_left.to(gl.float16), RIGHT), zero)
    b_E = sE.slice(0, 1, dim=1).load(EARLIER) + gl.zeros([2, 2, 16, 16], gl.float16, EARLIER)
    b_left = mma_v2(gl.convert_layout(b_left.to(gl.float16), LEFT), gl.convert_layout(gl.reshape(b_E, [4, 16, 16]), RIGHT), zero)
    FLAT: gl.constexpr = gl.SliceLayout(2, BLOCKS)
    b_M = gl.convert_layout(b_M, FLAT)[:, :, None, :]
    b_left = gl.convert_layout(b_left, FLAT)[:, :, None, :]
    b_M = gl.where(own, b_M, gl.where((i_b & 1) == 1, -b_left, 0.0))
    return gl.convert_layout(gl.reshape(gl.reshape(b_M, [C, 32]), [2, 32, 32]), HALVES)
