"""The workspace between the two Hopper kernels: the tiles of the Triton backend's records at K = V = 128, seen as rows of 128 numbers."""

from triton.experimental.gluon import language as gl

from kdaserve.ops.chunk_kda.triton.space import tiles

K = gl.constexpr(128)
"""Channels of a key, and of a value."""
RECORD = gl.constexpr(tiles(128) // 128)
"""Rows of a record's tiles."""
