"""Prefill in two Triton kernels: `prepare`, for all chunks and heads at once, and `chain`, chunk after chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdaserve.ops.chunk_kda.triton import config
from kdaserve.ops.chunk_kda.triton.chain import chain_kernel
from kdaserve.ops.chunk_kda.triton.prepare import prepare_kernel
from kdaserve.ops.chunk_kda.triton.space import header, tiles
from kdaserve.ops.forms import Form
from kdaserve.ops.jit import chunking, prefill
from kdaserve.ops.jit.launch import Launch, dense, gate_name, padded, strides
from kdaserve.ops.jit.states import C
from kdaserve.ops.prefill import PrefillCall

FARTHEST = 2**31 // C.value
"""Elements from token to token up to which the 32-bit offsets of `prepare` reach all of a chunk."""
TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `chunk_kda`."""
    return prefill.run(call, Launches, fits=lambda o: o.stride(-1) == 1)


def forms(call: PrefillCall) -> list[Form]:
    """See `kdaserve.ops.forms`."""
    return chunking.chain_forms(call, config.operands(call.q.dtype, call.use_qk_l2norm_in_kernel).dtype)


def compiled() -> int:
    """See `kdaserve.ops.forms`."""
    return len(prepare_kernel.compiled) + len(chain_kernel.compiled)


def _prepare_pointers(call: PrefillCall, o: Tensor, workspace: list[Tensor]) -> list[Tensor | None]:
    """What the pointers of `prepare` stand for."""
    q, k, g = (x if x.stride(1) <= FARTHEST else x.contiguous() for x in (call.q, call.k, call.g))
    return [q, k, g, call.beta, dense(call.A_log), dense(call.dt_bias), dense(call.cu_seqlens), o, *workspace]


def _prepare(call: PrefillCall, o: Tensor, pointers: list[Tensor | None], wide: str, form: config.Operands) -> Launch:
    """The launch of `prepare` for calls of this layout."""
    N, T, H, HV, K, V = (call.sizes[s] for s in ("N", "T", "H", "HV", "K", "V"))
    kernel = config.PREPARE_WIDE if wide == "only" else config.PREPARE
    qkg = [stride for x in pointers[:3] for stride in strides(x, 3)]
    return Launch(
        prepare_kernel, chunking.units(call) * HV, pointers, (*qkg, *strides(o, 3)[1:]), (*strides(call.beta, 3), N, T, H, HV),
        K=K, V=V, BK=padded(K), BV=padded(V), BS=min(kernel.slice, padded(K)),
        GATE=gate_name(call), L2NORM=call.use_qk_l2norm_in_kernel, BETA_RAW=call.beta_is_raw,
        WIDE=wide, PARTS=form.parts, OP=TL[form.dtype], PRECISION=form.precision, MERGE=TL[form.merge], MERGE_PRECISION=form.merge_precision,
        num_warps=kernel.warps, num_stages=kernel.stages,
    )  # fmt: skip


class Launches:
    """What runs calls of one layout."""

    def __init__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        T, N, HV, K, V = (call.sizes[s] for s in ("T", "N", "HV", "K", "V"))
        form = config.operands(call.q.dtype, call.use_qk_l2norm_in_kernel)
        BK, records = padded(K), chunking.units(call) * HV
        self._workspace = [((records, header(BK)), torch.float32), ((records, tiles(BK)), form.dtype)]
        nothing = [o.new_empty(0, dtype=dtype) for _, dtype in self._workspace]
        pointers = _prepare_pointers(call, o, nothing)
        passes = ("never",) if chunking.bounded(call) else ("marked", "only")
        self._prepares = [_prepare(call, o, pointers, wide, form) for wide in passes if records]
        chain = chunking.chain_of(call, N, form.dtype)
        self._chain = Launch(
            chain_kernel, N * HV * triton.cdiv(V, chain.slice), self._chain_pointers(call, o, h, snapshots, nothing),
            strides(call.v, 3) + strides(o, 3) + strides(call.initial_state, 1) + strides(call.track_state, 1), (T, HV),
            K=K, V=V, BK=BK, BV=chain.slice, TRANSPOSED=chain.transposed, STAGES=chain.stages, OP=TL[form.dtype], PRECISION=form.precision,
            num_warps=chunking.CHAIN_WARPS,
        )  # fmt: skip

    def __call__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        """Launches the kernels."""
        workspace = [torch.empty(size, dtype=dtype, device=o.device) for size, dtype in self._workspace]
        pointers = _prepare_pointers(call, o, workspace)
        for launch in self._prepares:
            launch(pointers, call.scale, call.lower_bound or 0.0)
        self._chain(self._chain_pointers(call, o, h, snapshots, workspace), 0 if snapshots is None else len(snapshots[0]))

    @staticmethod
    def _chain_pointers(call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots, workspace: list[Tensor]) -> list[Tensor | None]:
        states = prefill.state_pointers(call, h, snapshots)
        return [*workspace, call.v, o, call.initial_state, dense(call.initial_state_indices), dense(call.cu_seqlens), *states]
