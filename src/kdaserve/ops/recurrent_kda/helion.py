"""Token by token in one Helion kernel: a program holds some rows of a head's state in registers from its sequence's first token to the last."""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from kdaserve.contract import CHUNK
from kdaserve.ops.forms import Form, in_any_memory
from kdaserve.ops.helion.launch import Launch, Variant, flat, kernel
from kdaserve.ops.helion.math import log2_decay, sigmoid, token
from kdaserve.ops.helion.states import ENTRIES, saved
from kdaserve.ops.jit.launch import dense, gate_name, padded, rows_of_state, strides
from kdaserve.ops.jit.prefill import dtypes_of, snapshots_of
from kdaserve.ops.prefill import PrefillCall
from kdaserve.ops.tokens import new_states, output

ROWS = 8
"""Rows of the state a program at K = 128, with one warp: 32 numbers a thread, and 16 programs a head to fill the GPU."""
PADDING = 16
"""Padding rows zeroed at once."""


@kernel("q", "k", "g", "dt_bias", "pool", "track", own=["h"], num_warps=1)
def recurrent_kda_kernel(
    q, k, v, g, beta, A_log, dt_bias, pool, index, cu_seqlens, out, h, chunk_offsets, track, track_chunk, sequence, tokens, slots,
    N: int, T: int, pool_stride: int, track_stride: int, M: int, scale: float, lower_bound: float,
    C: hl.constexpr, GROUP: hl.constexpr, HV: hl.constexpr, K: hl.constexpr, V: hl.constexpr, BK: hl.constexpr, BV: hl.constexpr,
    PADDING: hl.constexpr, GATE: hl.constexpr, L2NORM: hl.constexpr, BETA_RAW: hl.constexpr, ENTRIES: hl.constexpr,
):  # fmt: skip
    """One program a sequence, head and slice of V. With `out` = `v` it reads every value of its slice before it writes there."""
    for i_v, i_h, i_n in hl.grid([(V + BV - 1) // BV, HV, N]):
        o_k = hl.arange(BK)
        o_v = i_v * BV + hl.arange(BV)
        m_k = o_k < K
        m_v = o_v < V
        i_hk = i_h // GROUP
        if cu_seqlens is not None:
            i_b = 0
            start = hl.load(cu_seqlens, [i_n]).to(torch.int64)
            length = hl.load(cu_seqlens, [i_n + 1]).to(torch.int64) - start
            # S4: the programs of all sequences share the rows that no sequence has.
            i_row = hl.load(cu_seqlens, [N]).to(torch.int64) + i_n * PADDING
            while i_row < T:
                t_o = i_row + hl.arange(PADDING)
                hl.store(out, [0, t_o, i_h, o_v], hl.zeros([PADDING, BV], dtype=out.dtype), extra_mask=(t_o < T)[:, None] & m_v[None, :])
                i_row = i_row + N * PADDING
        else:
            i_b = i_n
            start = hl.zeros([], dtype=torch.int64)
            length = start + T
        chunks = (length + (C - 1)) // C
        m_S = m_v[:, None] & m_k[None, :]
        o_S = o_v[:, None] * K + o_k[None, :] + i_h * (V * K)
        slot = hl.load(index, [i_n]).to(torch.int64)
        o_slot = slot * pool_stride + o_S
        S = hl.load(pool, [o_slot], extra_mask=m_S & (slot >= 0)).to(torch.float32)
        rate = hl.full([], 1.0, dtype=torch.float32)
        if GATE != "none":
            rate = torch.exp(hl.load(A_log, [i_h]))
        bias = hl.zeros([BK], dtype=torch.float32)
        if dt_bias is not None:
            bias = hl.load(dt_bias, [i_h * K + o_k], extra_mask=m_k)
        tracked = hl.zeros([], dtype=torch.int64) - 1
        if track is not None:
            tracked = hl.load(track_chunk, [i_n]).to(torch.int64)
        if h is not None:
            o_h = hl.load(chunk_offsets, [i_n]).to(torch.int64) * (HV * V * K) + o_S
        next_save = hl.zeros([], dtype=torch.int64)  # the first boundary looks for snapshots
        for i_c in hl.grid(chunks):
            if h is not None:
                hl.store(h, [o_h + i_c * (HV * V * K)], S.to(h.dtype), extra_mask=m_S)
            if track is not None:
                hl.store(track, [i_n * track_stride + o_S], S, extra_mask=m_S & (tracked == i_c))
            if slots is not None:
                if next_save == i_c:
                    next_save = chunks
                    for i_m in hl.grid((M + ENTRIES - 1) // ENTRIES):
                        o_m = i_m * ENTRIES + hl.arange(ENTRIES)
                        at, to = saved(sequence, tokens, slots, o_m, M, i_n)
                        next_save = torch.minimum(next_save, torch.amin(torch.where((to >= 0) & (at > i_c), at, chunks), 0))
                        to = torch.where(at == i_c, to, -1)
                        place = torch.amax(to, 0)
                        while place >= 0:
                            hl.store(pool, [place * pool_stride + o_S], S.to(pool.dtype), extra_mask=m_S)
                            to = torch.where(to < place, to, -1)
                            place = torch.amax(to, 0)
            left = torch.minimum(length - i_c * C, hl.full([], C, dtype=torch.int64))
            for i_t in hl.grid(left):
                t = start + i_c * C + i_t
                b_q = hl.load(q, [i_b, t, i_hk, o_k], extra_mask=m_k).to(torch.float32)
                b_k = hl.load(k, [i_b, t, i_hk, o_k], extra_mask=m_k).to(torch.float32)
                x = hl.load(g, [i_b, t, i_h, o_k], extra_mask=m_k).to(torch.float32)
                b_v = hl.load(v, [i_b, t, i_h, o_v], extra_mask=m_v).to(torch.float32)
                b_beta = hl.load(beta, [i_b, t, i_h]).to(torch.float32)
                if BETA_RAW:
                    b_beta = sigmoid(b_beta)
                b_g = log2_decay(x + bias, rate, lower_bound, GATE)
                S, b_o = token(S, b_q, b_k, b_v, b_g, b_beta, scale, L2NORM, True)
                hl.store(out, [i_b, t, i_h, o_v], b_o.to(out.dtype), extra_mask=m_v)
        if slots is not None:
            for i_e in hl.grid((M + ENTRIES - 1) // ENTRIES):
                o_m = i_e * ENTRIES + hl.arange(ENTRIES)
                at, to = saved(sequence, tokens, slots, o_m, M, i_n)
                to = torch.where(at == chunks, to, -1)
                place = torch.amax(to, 0)
                while place >= 0:
                    hl.store(pool, [place * pool_stride + o_S], S.to(pool.dtype), extra_mask=m_S)
                    to = torch.where(to < place, to, -1)
                    place = torch.amax(to, 0)
        hl.store(pool, [o_slot], S.to(pool.dtype), extra_mask=m_S & (slot >= 0) & (length > 0))


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `recurrent_kda`."""
    out, h, snapshots = output(call), new_states(call), snapshots_of(call)
    if call.sizes["N"] == 0:
        return out.zero_(), h
    tensors = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "g": call.g,
        "beta": call.beta,
        "A_log": dense(call.A_log),
        "dt_bias": dense(call.dt_bias),
        "pool": call.initial_state,
        "index": dense(call.initial_state_indices),
        "cu_seqlens": dense(call.cu_seqlens),
        "out": out,
        "h": h,
        "chunk_offsets": None if h is None else call.host_plan().chunk_offsets,
        "track": call.track_state,
        "track_chunk": dense(call.track_chunk_idx),
        **dict(zip(("sequence", "tokens", "slots"), snapshots or (None, None, None), strict=True)),
    }
    launch = call.layout.once((recurrent_kda_kernel, dtypes_of(snapshots)), lambda: _prepare(call, tensors))
    launch(tuple(tensors.values()), 0 if snapshots is None else len(snapshots[0]), call.scale, call.lower_bound or 0.0)
    return out, h


def forms(call: PrefillCall) -> list[Form]:
    """See `kdaserve.ops.forms`."""
    return in_any_memory([1])


def compiled() -> int:
    """See `kdaserve.ops.forms`."""
    return len(recurrent_kda_kernel.compiled)


def _prepare(call: PrefillCall, tensors: dict[str, Tensor | None]) -> Launch:
    N, T, H, HV, K, V = (call.sizes[s] for s in ("N", "T", "H", "HV", "K", "V"))
    constants = {
        "C": CHUNK, "GROUP": HV // H, "HV": HV, "K": K, "V": V, "BK": padded(K), "BV": rows_of_state(ROWS, K, V), "PADDING": PADDING,
        "GATE": gate_name(call), "L2NORM": call.use_qk_l2norm_in_kernel, "BETA_RAW": call.beta_is_raw, "ENTRIES": ENTRIES,
    }  # fmt: skip
    pool_stride, track_stride = *strides(call.initial_state, 1), *strides(call.track_state, 1)
    numbers = {"N": N, "T": T, "pool_stride": pool_stride, "track_stride": track_stride, "M": 0, "scale": call.scale}
    return Launch(
        recurrent_kda_kernel,
        {**tensors, "pool": flat(call.initial_state), "track": flat(call.track_state), "h": flat(tensors["h"])},
        {**numbers, "lower_bound": call.lower_bound or 0.0},
        ("M", "scale", "lower_bound"),
        Variant(constants, {"num_warps": 1}),
    )
