"""Packed decode in one Helion kernel: a program reads some rows of a head's state once, and writes them once."""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from kdaserve.ops.decode import DecodeCall
from kdaserve.ops.forms import Form, in_any_memory
from kdaserve.ops.helion.launch import Launch, Variant, flat, kernel
from kdaserve.ops.helion.math import log2_decay, sigmoid, token
from kdaserve.ops.jit.launch import dense, gate_name, padded, rows_of_state, strides


@kernel("mixed_qkv", "a", "dt_bias", "pool", num_warps=1)
def packed_decode_kda_kernel(
    mixed_qkv, a, b, A_log, dt_bias, pool, out, index, B: int, pool_stride: int, scale: float, lower_bound: float,
    H: hl.constexpr, HV: hl.constexpr, K: hl.constexpr, V: hl.constexpr, BK: hl.constexpr, BV: hl.constexpr, GATE: hl.constexpr,
    L2NORM: hl.constexpr,
):  # fmt: skip
    """One program a request, head and slice of V."""
    for i_v, i_h, i_b in hl.grid([(V + BV - 1) // BV, HV, B]):
        o_k = hl.arange(BK)
        o_v = i_v * BV + hl.arange(BV)
        m_k = o_k < K
        m_v = o_v < V
        # The slot takes a trip to memory before the state can be asked for, so all else is asked for in between; padding is a mask, since nothing
        # behind a branch on the slot could be asked for before it is known.
        slot = hl.load(index, [i_b]).to(torch.int64)
        i_hk = i_h // (HV // H)
        q = hl.load(mixed_qkv, [i_b, i_hk * K + o_k], extra_mask=m_k)
        k = hl.load(mixed_qkv, [i_b, (H + i_hk) * K + o_k], extra_mask=m_k)
        v = hl.load(mixed_qkv, [i_b, 2 * H * K + i_h * V + o_v], extra_mask=m_v)
        g = hl.load(a, [i_b, i_h * K + o_k], extra_mask=m_k).to(torch.float32)
        beta = hl.load(b, [i_b, i_h]).to(torch.float32)
        rate = hl.load(A_log, [i_h])
        if dt_bias is not None:
            g = g + hl.load(dt_bias, [i_h * K + o_k], extra_mask=m_k)
        used = slot >= 0
        m_S = (m_v[:, None] & used) & m_k[None, :]
        o_S = slot * pool_stride + i_h * (V * K) + (o_v[:, None] * K + o_k[None, :])
        S = hl.load(pool, [o_S], extra_mask=m_S).to(torch.float32)
        g = log2_decay(g, torch.exp(rate), lower_bound, GATE)
        S, o = token(S, q.to(torch.float32), k.to(torch.float32), v.to(torch.float32), g, sigmoid(beta), scale, L2NORM, pool.dtype == torch.float32)
        hl.store(pool, [o_S], S.to(pool.dtype), extra_mask=m_S)
        hl.store(out, [i_b, i_h, o_v], torch.where(used, o, 0.0).to(out.dtype), extra_mask=m_v)  # S2


ROWS = ((64, 4, 8), (2**62, 8, 32))
"""(request, head) pairs at most; rows of the state a program takes at K = 128, of an fp32 pool and of a 16-bit pool.

The kernel is that of `triton`, nearly instruction for instruction, and the measurements stand there. One warp, always: more sum the keys across
warps, in another order, and a request's bits would depend on the grid (S10).
"""


def run(call: DecodeCall) -> None:
    """Runs a decode call; see `packed_decode_kda`."""
    tensors = (
        call.mixed_qkv,
        call.a,
        call.b,
        dense(call.A_log),
        dense(call.dt_bias),
        call.initial_state,
        call.out,
        dense(call.ssm_state_indices),
    )
    launch = call.layout.once(packed_decode_kda_kernel, lambda: _prepare(call, tensors))
    launch(tensors, call.scale, call.lower_bound or 0.0)


def forms(call: DecodeCall) -> list[Form]:
    """See `kdaserve.ops.forms`."""
    HV, itemsize = call.sizes["HV"], call.initial_state.element_size()
    candidates = [1, *(most // HV + 1 for most, _, _ in ROWS[:-1])]
    return in_any_memory({rows(B * HV, itemsize): B for B in reversed(candidates)}.values())


def compiled() -> int:
    """See `kdaserve.ops.forms`."""
    return len(packed_decode_kda_kernel.compiled)


def rows(pairs: int, itemsize: int) -> int:
    """Rows of the state a program, for so many (request, head) pairs and a pool of elements of `itemsize` bytes."""
    fp32, short = next(rows for most, *rows in ROWS if pairs <= most)
    return fp32 if itemsize == 4 else short


def _prepare(call: DecodeCall, tensors: tuple[Tensor | None, ...]) -> Launch:
    B, H, HV, K, V = (call.sizes[s] for s in ("B", "H", "HV", "K", "V"))
    pool, out = call.initial_state, call.out
    # An empty batch compiles as one request does, so that it needs no form of its own.
    BV = rows_of_state(rows(max(B, 1) * HV, pool.element_size()), K, V)
    named = dict(zip(("mixed_qkv", "a", "b", "A_log", "dt_bias", "pool", "out", "index"), tensors, strict=True))
    constants = {"H": H, "HV": HV, "K": K, "V": V, "BK": padded(K), "BV": BV, "GATE": gate_name(call), "L2NORM": call.use_qk_l2norm_in_kernel}
    return Launch(
        packed_decode_kda_kernel,
        {**named, "pool": flat(pool), "out": out[:, 0]},
        {"B": B, "pool_stride": strides(pool, 1)[0], "scale": call.scale, "lower_bound": call.lower_bound or 0.0},
        ("scale", "lower_bound"),
        Variant(constants, {"num_warps": 1}),
    )
