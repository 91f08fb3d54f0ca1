"""Prefill in two Triton kernels: `prepare`, for all chunks and heads at once, and `chain`, chunk after chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdaserve.ops.chunk_kda.triton import config
from kdaserve.ops.chunk_kda.triton.chain import chain_kernel
from kdaserve.ops.chunk_kda.triton.prepare import HALF, WIDEST, prepare_kernel
from kdaserve.ops.chunk_kda.triton.space import header, tiles
from kdaserve.ops.forms import Form, in_any_memory
from kdaserve.ops.jit.launch import Launch, dense, gate_name, padded, strides
from kdaserve.ops.jit.math import LOG2_E
from kdaserve.ops.jit.prefill import options, snapshots_of
from kdaserve.ops.jit.states import C
from kdaserve.ops.prefill import PrefillCall
from kdaserve.ops.tokens import new_states, output

LEAST_BOUND = -WIDEST.value / (HALF.value // 2 * LOG2_E.value)
"""The bounded gate cannot decay the 16 tokens to the middle of a half by more than `prepare` forms factors for, down to this `lower_bound`."""
FARTHEST = 2**31 // C.value
"""Elements from token to token up to which the 32-bit offsets of `prepare` reach all of a chunk."""
TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `chunk_kda`."""
    out, h, snapshots = output(call), new_states(call), snapshots_of(call)
    if call.sizes["N"] == 0:
        return out.zero_(), h
    o = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    bounded = call.lower_bound is not None and call.lower_bound >= LEAST_BOUND
    key = (Launches, bounded, *options(call, h, snapshots))
    launches = call.layout.prepared.get(key)
    if launches is None:
        launches = call.layout.prepared[key] = Launches(call, o, h, snapshots, bounded)
    launches.run(call, o, h, snapshots)
    if o is not out:
        out.copy_(o)
    return out, h


def forms(call: PrefillCall) -> list[Form]:
    """See `kdaserve.ops.forms`."""
    HV, processors = call.sizes["HV"], config.processor(call.q.device)[0]
    # With more pairs of sequence and head than processors every slice is too small.
    fewest = {_chain(call, n): n for n in range(processors // HV + 1, 0, -1)}
    return in_any_memory(fewest.values())


def compiled() -> int:
    """See `kdaserve.ops.forms`."""
    return len(prepare_kernel.compiled) + len(chain_kernel.compiled)


def _chain(call: PrefillCall, sequences: int) -> config.Chain:
    """The form of the chain kernel for so many sequences like those of `call`."""
    HV, K, V = (call.sizes[s] for s in ("HV", "K", "V"))
    products = config.operands(call.q.dtype, call.use_qk_l2norm_in_kernel)
    saves = call.output_intermediate_states or call.track_state is not None or snapshots_of(call) is not None
    return config.chain(sequences * HV, K, V, products, saves, *config.processor(call.q.device))


class Launches:
    """What runs calls of one layout."""

    def __init__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: tuple[Tensor, ...] | None, bounded: bool) -> None:
        B, T, N, H, HV, K, V = (call.sizes[s] for s in ("B", "T", "N", "H", "HV", "K", "V"))
        form = config.operands(call.q.dtype, call.use_qk_l2norm_in_kernel)
        BK, BV = padded(K), padded(V)
        units = T // C.value + N if call.cu_seqlens is not None else B * triton.cdiv(T, C.value)
        self._workspace = [((units * HV, header(BK)), torch.float32), ((units * HV, tiles(BK)), form.dtype)]
        tensors = self._tensors(call, o, h, snapshots, *(o.new_empty(0, dtype=dtype) for _, dtype in self._workspace))
        qkg = [stride for x in tensors[0][:3] for stride in strides(x, 3)]
        shared = {"OP": TL[form.dtype], "PRECISION": form.precision}

        def prepare(wide: str, kernel: config.Prepare) -> Launch:
            return Launch(
                prepare_kernel, units * HV, tensors[0], (*qkg, *strides(o, 3)[1:]), (*strides(call.beta, 3), N, T, H, HV),
                K=K, V=V, BK=BK, BV=BV, BS=min(kernel.slice, BK),
                GATE=gate_name(call), L2NORM=call.use_qk_l2norm_in_kernel, BETA_RAW=call.beta_is_raw,
                WIDE=wide, PARTS=form.parts, **shared, MERGE=TL[form.merge], MERGE_PRECISION=form.merge_precision,
                num_warps=kernel.warps, num_stages=kernel.stages,
            )  # fmt: skip

        self._prepares = [prepare("never", config.PREPARE)] if bounded else [prepare("marked", config.PREPARE), prepare("only", config.PREPARE_WIDE)]
        chain = _chain(call, N)
        self._chain = Launch(
            chain_kernel, N * HV * triton.cdiv(V, chain.slice), tensors[1],
            strides(call.v, 3) + strides(o, 3) + strides(call.initial_state, 1) + strides(call.track_state, 1), (T, HV),
            K=K, V=V, BK=BK, BV=chain.slice, TRANSPOSED=chain.transposed, STAGES=chain.stages, **shared, num_warps=config.CHAIN_WARPS,
        )  # fmt: skip

    def run(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: tuple[Tensor, ...] | None) -> None:
        """Launches the kernels."""
        workspace = [torch.empty(size, dtype=dtype, device=o.device) for size, dtype in self._workspace]
        prepare, chain = self._tensors(call, o, h, snapshots, *workspace)
        for launch in self._prepares if len(workspace[0]) else ():
            launch(prepare, call.scale, call.lower_bound or 0.0)
        self._chain(chain, 0 if snapshots is None else len(snapshots[0]))

    @staticmethod
    def _tensors(
        call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: tuple[Tensor, ...] | None, header: Tensor, tiles: Tensor
    ) -> tuple[list, list]:
        """What the pointers of the two kernels stand for."""
        cu_seqlens, offsets = dense(call.cu_seqlens), None if h is None else call.host_plan().chunk_offsets
        gate = dense(call.A_log), dense(call.dt_bias)
        q, k, g = (x if x.stride(1) <= FARTHEST else x.contiguous() for x in (call.q, call.k, call.g))
        prepare = [q, k, g, call.beta, *gate, cu_seqlens, o, header, tiles]
        states = [call.initial_state, dense(call.initial_state_indices), cu_seqlens, h, offsets, call.track_state, dense(call.track_chunk_idx)]
        return prepare, [header, tiles, call.v, o, *states, *(snapshots or (None, None, None))]
