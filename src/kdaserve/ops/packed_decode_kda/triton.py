"""Packed decode in one Triton kernel: a program reads some rows of a head's state once, and writes them once."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from kdaserve.ops.decode import DecodeCall
from kdaserve.ops.forms import Form, in_any_memory
from kdaserve.ops.jit.launch import Launch, gate_name, kernel, padded, rows_of_state, strides
from kdaserve.ops.jit.math import log2_decay, sigmoid, token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How the state of a head is cut at K = 128; smaller K takes more rows, larger K fewer."""

    rows: int
    warps: int = 1
    """More than one sum the keys across warps, in another order: a request's bits would depend on the grid (S10)."""


TILES: tuple[tuple[int, Tile, Tile], ...] = (
    # (request, head) pairs at most; tile of an fp32 pool, of a 16-bit pool.
    # Few programs: the time is that of one of them, so each has fewer loads to wait for. H200, 12 heads, B = 1: 2.8 us, with 8 rows 3.4 us.
    (64, Tile(rows=4), Tile(rows=8)),
    # H200, microseconds with 4, 8 and 16 rows of an fp32 pool: 15.6, 15.5, 16.9 (12 heads, B = 32); 55.1, 54.8, 56.6 (12 heads, B = 128).
    # With 8, 16 and 32 rows of a bf16 pool: 9.4, 10.1, 9.1 (12 heads, B = 32); 77.4, 79.8, 74.2 (32, 128); 293, 303, 274 (64, 256).
    (2**62, Tile(rows=8), Tile(rows=32)),
)


@kernel("p_qkv", "p_a", "p_dt_bias", "p_pool")
def packed_decode_kda_kernel(
    p_qkv, p_a, p_b, p_A_log, p_dt_bias, p_pool, p_out, p_index,
    qkv_b: tl.int64, a_b: tl.int64, pool_s: tl.int64, b_b: tl.int64, out_b: tl.int64, out_h: tl.int64, out_v: tl.int64, scale: tl.float32,
    lower_bound: tl.float32,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
    L2NORM: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One program a request, head and slice of V."""
    i_program = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = i_program % NV
    i_h = i_program // NV % HV
    i_b = (i_program // NV // HV).to(tl.int64)
    i_hk = i_h // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    # The slot takes a trip to memory before the state can be asked for, so all else is asked for in between; padding is a mask, since nothing
    # behind a branch on the slot could be asked for before it is known.
    slot = tl.load(p_index + i_b).to(tl.int64)
    p_qkv += i_b * qkv_b * UNIT
    b_q = tl.load(p_qkv + i_hk * K + o_k, mask=m_k, other=0.0)
    b_k = tl.load(p_qkv + (H + i_hk) * K + o_k, mask=m_k, other=0.0)
    b_v = tl.load(p_qkv + 2 * H * K + i_h * V + o_v, mask=m_v, other=0.0)
    b_g = tl.load(p_a + i_b * a_b * UNIT + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    beta = tl.load(p_b + i_b * b_b + i_h).to(tl.float32)
    a = tl.load(p_A_log + i_h)
    if p_dt_bias is not None:
        b_g += tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0)
    used = slot >= 0
    m_S = (m_v & used)[:, None] & m_k[None, :]
    p_S = p_pool + slot * pool_s * UNIT + i_h * (V * K) + o_v[:, None] * K + o_k[None, :]
    b_S = tl.load(p_S, mask=m_S, other=0.0).to(tl.float32)
    b_g = log2_decay(b_g, tl.exp(a), lower_bound, GATE)
    KEPT: tl.constexpr = p_pool.dtype.element_ty == tl.float32
    b_S, b_o = token(b_S, b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32), b_g, sigmoid(beta), scale, L2NORM, KEPT)
    tl.store(p_S, b_S.to(p_pool.dtype.element_ty), mask=m_S)
    b_o = tl.where(used, b_o, 0.0)  # S2
    tl.store(p_out + i_b * out_b + i_h * out_h + o_v * out_v, b_o.to(p_out.dtype.element_ty), mask=m_v)


def run(call: DecodeCall) -> None:
    """Runs a decode call; see `packed_decode_kda`."""
    bias, index = call.dt_bias, call.ssm_state_indices.contiguous()
    tensors = (
        call.mixed_qkv,
        call.a,
        call.b,
        call.A_log.contiguous(),
        None if bias is None else bias.contiguous(),
        call.initial_state,
        call.out,
        index,
    )
    launch = call.layout.once(packed_decode_kda_kernel, lambda: _prepare(call, tensors))
    launch(tensors, call.scale, call.lower_bound or 0.0)


def forms(call: DecodeCall) -> list[Form]:
    """See `kdaserve.ops.forms`."""
    HV, itemsize = call.sizes["HV"], call.initial_state.element_size()
    candidates = [1, *(most // HV + 1 for most, _, _ in TILES[:-1])]
    return in_any_memory({tile(B * HV, itemsize): B for B in reversed(candidates)}.values())


def compiled() -> int:
    """See `kdaserve.ops.forms`."""
    return len(packed_decode_kda_kernel.compiled)


def tile(pairs: int, itemsize: int) -> Tile:
    """How to cut the states of so many (request, head) pairs, of elements of `itemsize` bytes."""
    fp32, short = next(tiles for most, *tiles in TILES if pairs <= most)
    return fp32 if itemsize == 4 else short


def _prepare(call: DecodeCall, tensors: tuple[torch.Tensor | None, ...], chosen: Tile | None = None) -> Launch:
    B, H, HV, K, V = (call.sizes[s] for s in ("B", "H", "HV", "K", "V"))
    BK = padded(K)
    # An empty batch compiles as one request does, so that it needs no form of its own.
    chosen = chosen or tile(max(B, 1) * HV, call.initial_state.element_size())
    BV = rows_of_state(chosen.rows, K, V)
    rows = strides(call.mixed_qkv, 1) + strides(call.a, 1) + strides(call.initial_state, 1)
    return Launch(
        packed_decode_kda_kernel,
        B * HV * triton.cdiv(V, BV),
        tensors,
        rows,
        strides(call.b, 1) + strides(call.out, 1) + call.out.stride()[2:],
        H=H,
        HV=HV,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        GATE=gate_name(call),
        L2NORM=call.use_qk_l2norm_in_kernel,
        num_warps=chosen.warps,
    )
