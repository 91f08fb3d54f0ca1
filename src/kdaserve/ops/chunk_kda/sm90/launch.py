"""How the Hopper kernels see tensors through tensor maps, and how they are launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kdaserve.ops.chunk_kda.sm90.chain import LINE, C, R, chain_kernel
from kdaserve.ops.chunk_kda.sm90.layouts import TILE
from kdaserve.ops.chunk_kda.sm90.prepare import prepare_kernel
from kdaserve.ops.chunk_kda.sm90.space import RECORD, K
from kdaserve.ops.jit.launch import Launch, Matrix, strides

REACH = 2**31
"""Rows and columns of a matrix stay below: copies take coordinates of 32 bits."""
FARTHEST = 2**40
"""Bytes from row to row stay below."""


def tokens(x: Tensor) -> Matrix | None:
    """`x` `[B, T, heads, K]` in 16 bits as a matrix with a row a token, for boxes of a chunk and 64 channels; None where a tensor map cannot show it.

    It takes heads side by side in a row, entries of the batch a multiple of the row stride apart, and multiples of 16 bytes throughout. That the
    address is one is not looked at: it may change where the layout stays.
    """
    return _matrix(x.shape, x.stride(), x.element_size())


@functools.lru_cache(4096)
def _matrix(shape: tuple[int, int, int, int], stride: tuple[int, int, int, int], itemsize: int) -> Matrix | None:
    B, T, heads, dim = shape
    columns = (heads - 1) * stride[2] + dim if heads > 1 else dim
    token = stride[1] if T > 1 else stride[0] if B > 1 else -(-columns // 8) * 8
    batch = stride[0] if B > 1 else 0
    if itemsize != 2 or stride[3] != 1 or min(shape) == 0:
        return None
    if token < columns or token % 8 or token * itemsize >= FARTHEST or (heads > 1 and (stride[2] < dim or stride[2] % 8)) or batch % token:
        return None
    rows = (B - 1) * (batch // token) + T
    return Matrix(rows, columns, token, (C.value, R.value), TILE.value) if max(rows, columns) + C.value < REACH else None


def prepare(pointers: Sequence[Tensor | None], order: Tensor | None, records: int, sequences: int, **constants: Any) -> Launch:
    """The launch of `prepare_kernel` for tensors of this layout; what it is called with is `prepare_tensors` of the same, scale, and lower bound.

    Args:
        pointers: q, k `[B, T, H, 128]` and g `[B, T, HV, 128]`, as `tokens` takes them, beta, A_log, dt_bias, cu_seqlens, o, decays and tiles.
        order: see `prepare_kernel`; constants: the kernel's but `UNIT`, and Triton's options.
    """
    q, k, g, beta, *_, o, _, _ = pointers
    assert q is not None
    assert g is not None
    maps = [_shown(x) for x in (q, k, g)]
    heads = [strides(x, 3)[2] for x in (q, k, g)]
    return Launch(
        prepare_kernel, records, prepare_tensors(pointers, order),
        (*[number for seen, head in zip(maps, heads, strict=True) for number in (seen.stride, head)], *strides(o, 3)[1:]),
        (*[strides(x, 1)[0] // seen.stride for x, seen in zip((q, k, g), maps, strict=True)], *strides(beta, 3),
         sequences, q.shape[1], q.shape[2], g.shape[2]),
        maps=maps, num_warps=4, **constants,
    )  # fmt: skip


def prepare_tensors(pointers: Sequence[Tensor | None], order: Tensor | None) -> list[Tensor | None]:
    """What the tensor maps and pointers of `prepare_kernel` stand for."""
    return [*pointers[:3], *pointers, order]


def chain(
    records: Tensor, decays: Tensor, v: Tensor, o: Tensor, pool: Tensor, cu_seqlens: Tensor | None, others: Sequence[Tensor | None],
    order: Tensor | None = None, *, overlapping: bool = True,
) -> Launch:  # fmt: skip
    """The launch of `chain_kernel` for tensors of this layout; what it is called with is `chain_tensors` of the same, and the number of snapshots.

    Args:
        records: `[n * 256, 128]` bf16; decays: `[n, 128]` fp32; see `chain_kernel`.
        v, o: `[B, T, HV, 128]`, as `tokens` takes them, bf16 or fp16; their addresses multiples of 16 bytes.
        pool: `[slots, HV, 128, 128]`, slots at any stride; others: as in `chain_tensors`.
        order: `[N]` int32, the sequence of each program; None = as they come.
        overlapping: the chain may start while the kernel before it in the stream, which must be `prepare`, still runs.
    """
    B, T, HV, _ = v.shape
    map_v, map_o = _shown(v), _shown(o)
    assert len(records) < REACH, "so many records are out of reach"
    N = len(cu_seqlens) - 1 if cu_seqlens is not None else B
    tensors = chain_tensors(records, decays, v, o, pool, cu_seqlens, others, order)
    track, slots = others[3], others[7]
    v_b, o_b = (strides(x, 1)[0] // seen.stride for x, seen in ((v, map_v), (o, map_o)))
    tiles, decays_map = (
        Matrix(len(records), K.value, K.value, (RECORD.value, 64), TILE.value),
        Matrix(len(decays), K.value, K.value, (1, K.value), LINE),
    )
    return Launch(
        chain_kernel, N * HV * (K.value // R.value), tensors,
        (map_o.stride, strides(o, 3)[2], *strides(pool, 1), *strides(track, 1)), (v_b, strides(v, 3)[2], o_b, map_o.rows, T, HV),
        maps=(tiles, decays_map, map_v, map_o),
        SOON=slots is None,  # with snapshots to look for there are no registers left for it
        overlapping=overlapping, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _shown(x: Tensor | None) -> Matrix:
    matrix = None if x is None else tokens(x)
    assert matrix is not None, "tensors are copied where a tensor map cannot show them"
    return matrix


def chain_tensors(
    records: Tensor, decays: Tensor, v: Tensor, o: Tensor, pool: Tensor, cu_seqlens: Tensor | None, others: Sequence[Tensor | None],
    order: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """What the tensor maps and pointers of `chain_kernel` stand for.

    `others` are `initial_state_indices`, `h`, `chunk_offsets`, `track_state`, `track_chunk_idx`, and of the snapshots sequence, tokens and slot.
    """
    index, h, chunk_offsets, track, track_chunk, *snapshots = others
    return [records, decays, v, o, o, pool, index, cu_seqlens, order, h, chunk_offsets, track, track_chunk, *snapshots]
