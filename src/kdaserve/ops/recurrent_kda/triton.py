"""Token by token in one Triton kernel: a program holds some rows of a head's state in registers from its sequence's first token to the last."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kdaserve.ops.forms import Form, in_any_memory
from kdaserve.ops.jit import prefill
from kdaserve.ops.jit.launch import Launch, dense, gate_name, kernel, padded, rows_of_state, strides
from kdaserve.ops.jit.math import log2_decay, sigmoid, token
from kdaserve.ops.jit.states import C, save_snapshots, save_states
from kdaserve.ops.prefill import PrefillCall

ROWS = 8
"""Rows of the state a program at K = 128, with one warp: 32 numbers a thread, and 16 programs a head to fill the GPU."""
PADDING = 16
"""Padding rows zeroed at once."""


@kernel("p_q", "p_k", "p_g", "p_dt_bias", "p_pool", "p_track", own=["p_h"])
def recurrent_kda_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_pool, p_index, p_cu_seqlens, p_out, p_h, p_chunk_offsets, p_track, p_track_chunk,
    p_sequence, p_tokens, p_slot,
    q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, k_b: tl.int64, k_t: tl.int64, k_h: tl.int64, g_b: tl.int64, g_t: tl.int64, g_h: tl.int64,
    pool_s: tl.int64, track_s: tl.int64, v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, beta_b: tl.int64, beta_t: tl.int64, beta_h: tl.int64,
    out_b: tl.int64, out_t: tl.int64, out_h: tl.int64, out_v: tl.int64, N: tl.int32, T: tl.int64, M: tl.int32, scale: tl.float32,
    lower_bound: tl.float32,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PADDING: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_RAW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One program a sequence, head and slice of V. With `out` = `v` it reads every value of its slice before it writes there."""
    i_program = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = i_program % NV
    i_h = i_program // NV % HV
    i_n = i_program // NV // HV
    i_hk = i_h // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    p_out += i_h * out_h + o_v * out_v
    if p_cu_seqlens is not None:
        start = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(p_cu_seqlens + i_n + 1).to(tl.int64) - start).to(tl.int32)
        # S4: the programs of all sequences share the rows that no sequence has.
        i_row = tl.load(p_cu_seqlens + N).to(tl.int64) + i_n * PADDING
        while i_row < T:
            o_t = i_row + tl.arange(0, PADDING)
            m_o = (o_t < T)[:, None] & m_v[None, :]
            tl.store(p_out[None, :] + o_t[:, None] * out_t, tl.zeros([PADDING, BV], p_out.dtype.element_ty), mask=m_o)
            i_row += N * PADDING
    else:
        i_b = i_n.to(tl.int64)
        start = tl.zeros([], tl.int64)
        length = T.to(tl.int32)
        p_q += i_b * q_b * UNIT
        p_k += i_b * k_b * UNIT
        p_g += i_b * g_b * UNIT
        p_v += i_b * v_b
        p_beta += i_b * beta_b
        p_out += i_b * out_b
    p_q += start * q_t * UNIT + i_hk * q_h * UNIT + o_k
    p_k += start * k_t * UNIT + i_hk * k_h * UNIT + o_k
    p_g += start * g_t * UNIT + i_h * g_h * UNIT + o_k
    p_v += start * v_t + i_h * v_h + o_v
    p_beta += start * beta_t + i_h * beta_h
    p_out += start * out_t

    o_S = o_v[:, None] * K + o_k[None, :]
    m_S = m_v[:, None] & m_k[None, :]
    p_pool += i_h * (V * K)
    slot = tl.load(p_index + i_n).to(tl.int64)
    b_S = tl.load(p_pool + slot * pool_s * UNIT + o_S, mask=m_S & (slot >= 0), other=0.0).to(tl.float32)
    if GATE != "none":
        a = tl.exp(tl.load(p_A_log + i_h))
    else:
        a = 0.0
    if p_dt_bias is not None:
        b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0)
    i_track = -1
    if p_track is not None:
        p_track += i_n.to(tl.int64) * track_s * UNIT + i_h * (V * K)
        if length > 0:  # a sequence without tokens has no chunk
            i_track = tl.load(p_track_chunk + i_n).to(tl.int32)
    if p_h is not None:
        p_h += (tl.load(p_chunk_offsets + i_n).to(tl.int64) * HV + i_h) * (V * K)
    i_snapshot = -1
    if p_slot is not None:
        i_snapshot = save_snapshots(b_S, -1, i_n, o_S, m_S, p_pool, pool_s * UNIT, p_sequence, p_tokens, p_slot, M)

    # What a token needs is asked for while the one before it is computed.
    m_next = m_k & (length > 0)
    b_q = tl.load(p_q, mask=m_next, other=0.0)
    b_k = tl.load(p_k, mask=m_next, other=0.0)
    b_x = tl.load(p_g, mask=m_next, other=0.0)
    b_v = tl.load(p_v, mask=m_v & (length > 0), other=0.0)
    b_beta = tl.load(p_beta, mask=length > 0, other=0.0)
    chunks = (length + C - 1) // C
    for i_c in range(chunks):
        if p_h is not None:
            tl.store(p_h + o_S, b_S.to(p_h.dtype.element_ty), mask=m_S)
            p_h += HV * V * K
        i_snapshot = save_states(b_S, i_c, i_snapshot, i_track, i_n, o_S, m_S, p_pool, pool_s * UNIT, p_track, p_sequence, p_tokens, p_slot, M)
        left = length - i_c * C
        for i_t in range(tl.minimum(left, C)):
            b_qt = b_q.to(tl.float32)
            b_kt = b_k.to(tl.float32)
            b_vt = b_v.to(tl.float32)
            b_g = b_x.to(tl.float32)
            beta = b_beta.to(tl.float32)
            p_q += q_t * UNIT
            p_k += k_t * UNIT
            p_g += g_t * UNIT
            p_v += v_t
            p_beta += beta_t
            more = i_t + 1 < left
            b_q = tl.load(p_q, mask=m_k & more, other=0.0)
            b_k = tl.load(p_k, mask=m_k & more, other=0.0)
            b_x = tl.load(p_g, mask=m_k & more, other=0.0)
            b_v = tl.load(p_v, mask=m_v & more, other=0.0)
            b_beta = tl.load(p_beta, mask=more, other=0.0)
            if BETA_RAW:
                beta = sigmoid(beta)
            if p_dt_bias is not None:
                b_g += b_bias
            b_g = log2_decay(b_g, a, lower_bound, GATE)
            b_S, b_o = token(b_S, b_qt, b_kt, b_vt, b_g, beta, scale, L2NORM, KEPT=True)
            tl.store(p_out, b_o.to(p_out.dtype.element_ty), mask=m_v)
            p_out += out_t
    save_states(b_S, chunks, i_snapshot, i_track, i_n, o_S, m_S, p_pool, pool_s * UNIT, p_track, p_sequence, p_tokens, p_slot, M)
    tl.store(p_pool + slot * pool_s * UNIT + o_S, b_S.to(p_pool.dtype.element_ty), mask=m_S & (slot >= 0) & (length > 0))


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `recurrent_kda`."""
    return prefill.run(call, Recurrence)


def forms(call: PrefillCall) -> list[Form]:
    """See `kdaserve.ops.forms`."""
    return in_any_memory([1])


def compiled() -> int:
    """See `kdaserve.ops.forms`."""
    return len(recurrent_kda_kernel.compiled)


class Recurrence:
    """What runs calls of one layout."""

    def __init__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        N, T, H, HV, K, V = (call.sizes[s] for s in ("N", "T", "H", "HV", "K", "V"))
        BK = padded(K)
        BV = rows_of_state(ROWS, K, V)
        wide = (strides(call.q, 3), strides(call.k, 3), strides(call.g, 3), strides(call.initial_state, 1), strides(call.track_state, 1))
        narrow = (strides(call.v, 3), strides(call.beta, 3), strides(o, 4))
        self._launch = Launch(
            recurrent_kda_kernel, N * HV * triton.cdiv(V, BV), self._pointers(call, o, h, snapshots), sum(wide, ()), (*sum(narrow, ()), N, T),
            H=H, HV=HV, K=K, V=V, BK=BK, BV=BV, PADDING=PADDING,
            GATE=gate_name(call), L2NORM=call.use_qk_l2norm_in_kernel, BETA_RAW=call.beta_is_raw, num_warps=1,
        )  # fmt: skip

    def __call__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        """Launches the kernel."""
        snapshot_count = 0 if snapshots is None else len(snapshots[0])
        self._launch(self._pointers(call, o, h, snapshots), snapshot_count, call.scale, call.lower_bound or 0.0)

    @staticmethod
    def _pointers(call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> list[Tensor | None]:
        gate, pool = (dense(call.A_log), dense(call.dt_bias)), (call.initial_state, dense(call.initial_state_indices))
        tokens = (call.q, call.k, call.v, call.g, call.beta)
        return [*tokens, *gate, *pool, dense(call.cu_seqlens), o, *prefill.state_pointers(call, h, snapshots)]
