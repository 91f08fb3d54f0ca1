"""The workspace between the two Hopper kernels: the records of the Triton backend at K = V = 128, its tiles seen as rows of 128 numbers."""

from triton.experimental.gluon import language as gl

from kdaserve.ops.chunk_kda.triton.space import header, tiles

K = gl.constexpr(128)
"""Channels of a key, and of a value."""
HEADER = gl.constexpr(header(128))
"""Floats of a record's header."""
RECORD = gl.constexpr(tiles(128) // 128)
"""Rows of a record's tiles."""
