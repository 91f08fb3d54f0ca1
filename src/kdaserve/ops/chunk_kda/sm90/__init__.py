"""Prefill on Hopper, in two Gluon kernels that work as those of the Triton backend do and hand over the same records.

What is rare is left to that backend's kernel: chunks that decay too widely.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kdaserve.ops.chunk_kda import triton as portable
from kdaserve.ops.chunk_kda.sm90.chain import R, chain_kernel
from kdaserve.ops.chunk_kda.sm90.launch import chain, chain_tensors, tokens
from kdaserve.ops.chunk_kda.sm90.prepare import HEADER, ROWS, K, prepare_kernel
from kdaserve.ops.chunk_kda.triton.config import processor
from kdaserve.ops.forms import Form, in_any_memory
from kdaserve.ops.jit import prefill
from kdaserve.ops.jit.launch import UNIT, Launch, dense, gate_name, strides
from kdaserve.ops.prefill import PrefillCall


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `chunk_kda`."""
    copied = {name: x.clone(memory_format=torch.contiguous_format) for name in ("q", "k", "v", "g") if not fits(x := getattr(call, name))}
    if copied:
        call = dataclasses.replace(call, **copied)
    return prefill.run(call, Launches, portable.bounded(call), *copied, fits=fits)


def forms(call: PrefillCall) -> list[Form]:
    """See `kdaserve.ops.forms`."""
    fewest = {_waits(call, n): n for n in range(processor(call.q.device)[0] // call.sizes["HV"] + 1, 0, -1)}
    return in_any_memory(fewest.values())


def compiled() -> int:
    """See `kdaserve.ops.forms`."""
    return len(prepare_kernel.compiled) + len(chain_kernel.compiled) + portable.compiled()


def fits(x: Tensor) -> bool:
    """Whether the kernels can read or write `x` `[B, T, heads, K]` where it is: rows at multiples of 16 bytes, in the order of a matrix."""
    return x.data_ptr() % 16 == 0 and x.stride(1) <= portable.FARTHEST and tokens(x) is not None


def _waits(call: PrefillCall, sequences: int) -> bool:
    """Whether programs of so many sequences like those of `call` wait for others to end: then the longest start first."""
    return sequences > 1 and call.cu_seqlens is not None and sequences * call.sizes["HV"] * (K.value // R.value) > processor(call.q.device)[0]


class Launches:
    """What runs calls of one layout."""

    def __init__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        N, T, H, HV = (call.sizes[s] for s in ("N", "T", "H", "HV"))
        records = portable.units(call) * HV
        self._workspace = [((records, HEADER.value), torch.float32), ((records * ROWS.value, K.value), torch.bfloat16)]
        self._order = ((N,), torch.int32) if _waits(call, N) else None
        workspace, order = self._room(0)
        pointers = portable.prepare_pointers(call, o, workspace)
        qkg = [stride for x in pointers[:3] for stride in strides(x, 3)]
        self._prepares = [
            Launch(
                prepare_kernel, records, [*pointers, order], (*qkg, *strides(o, 3)[1:]), (*strides(call.beta, 3), N, T, H, HV),
                GATE=gate_name(call), L2NORM=call.use_qk_l2norm_in_kernel, BETA_RAW=call.beta_is_raw, MARKED=not portable.bounded(call), PDL=True,
                num_warps=4, maxnreg=168,
            )
        ]  # fmt: skip
