"""How the threads of the Hopper kernels share a chunk's matrices among them, and how these lie in shared memory: layouts that several parts use."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kdaserve.ops.jit.states import C

VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
EVERY_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""Of 128 numbers, which each warp has."""
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
"""Products `[64, 32]` of the asynchronous matrix units."""
HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 16, 0], [1, 0, 0]],
        [],
        [2, 32, 32],
    )
)
"""The same numbers as `[half, row, column]`; nothing moves."""
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
"""Rows of 128, 16 bytes a thread."""
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Of boxes of 64 columns in 16 bits."""
BOX_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Rows of a box, 16 bytes a thread."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def here():
    """Zero, which the compiler does not know: what depends on it is computed here, though the same was computed before, and waits in no register."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def by_halves(x):
    """A product `[64, 32]` as `[half, row, column]`."""
    return gl.convert_layout(gl.reshape(x, [2, 32, 32]), HALVES)


@gluon.jit
def half_row_col():
    """Indices of a tensor in HALVES."""
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))[:, None][:, :, None]
    row = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :][:, :, None]
    col = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(0, HALVES)))[None, :][None, :, :]
    return half, row, col


@gluon.jit
def side_by_side(left, right):
    """[64, 64] of two [2, 32, 32]."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 1, 3, 2)), [C, C])


@gluon.jit
def mask_rows(sX, left):
    """Sets the rows of a tile from `left` on to zero."""
    b_x = sX.load(BOX_ROWS)
    m_x = (gl.arange(0, C, layout=gl.SliceLayout(1, BOX_ROWS)) < left)[:, None]
    sX.store(gl.where(m_x, b_x, gl.zeros_like(b_x)))
