"""Prefill on Hopper, in two Gluon kernels that work as those of the Triton backend do and hand over the same tiles.

Calls without a token are left to that backend.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kdaserve.ops.chunk_kda import triton as portable
from kdaserve.ops.chunk_kda.sm90.chain import R, chain_kernel
from kdaserve.ops.chunk_kda.sm90.launch import chain, chain_tensors, prepare, prepare_tensors, tokens
from kdaserve.ops.chunk_kda.sm90.prepare import prepare_kernel
from kdaserve.ops.chunk_kda.sm90.space import RECORD, K
from kdaserve.ops.forms import Form
from kdaserve.ops.jit import prefill
from kdaserve.ops.jit.chunking import bounded, forms_by_sequences, processor, units
from kdaserve.ops.jit.launch import dense, gate_name
from kdaserve.ops.prefill import PrefillCall

PROGRAMS, REGISTERS = 3, 168
"""Programs of `prepare` on a multiprocessor, and the registers a thread that this leaves."""
SHORT = 4
"""Turns of `prepare` up to which the chain is launched before it ends: 2 µs fewer. With many turns the halves of V then read records at different
times, and so from memory twice: 64 heads of 8192 tokens took 0.61 ms instead of 0.56 (2026-11-30)."""


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `chunk_kda`."""
    if call.sizes["T"] == 0:  # of nothing there is no tensor map
        return portable.run(call)
    elsewhere = call.layout.once(_elsewhere, lambda: _elsewhere(call))

    def fits(name: str, x: Tensor | None) -> bool:
        return x is None or (name not in elsewhere and x.data_ptr() % 16 == 0)

    copied = [name for name in ("q", "k", "v", "g", "dt_bias") if not fits(name, getattr(call, name))]
    if copied:
        call = dataclasses.replace(call, **{name: getattr(call, name).clone(memory_format=torch.contiguous_format) for name in copied})
    return prefill.run(call, Launches, *copied, fits=lambda out: fits("out", out))


def forms(call: PrefillCall) -> list[Form]:
    """See `kdaserve.ops.forms`."""
    return forms_by_sequences(call, lambda sequences: _waits(call, sequences))


def compiled() -> int:
    """See `kdaserve.ops.forms`."""
    return len(prepare_kernel.compiled) + len(chain_kernel.compiled) + portable.compiled()


def _elsewhere(call: PrefillCall) -> frozenset[str]:
    """Names of the tensors that no tensor map can show, at any address: they are copied."""
    given = {name: x for name in ("q", "k", "v", "g", "out") if (x := getattr(call, name)) is not None}
    return frozenset(name for name, x in given.items() if tokens(x) is None)


def _waits(call: PrefillCall, sequences: int) -> bool:
    """Whether programs of so many sequences like those of `call` wait for others to end: then the longest start first."""
    return sequences > 1 and call.cu_seqlens is not None and sequences * call.sizes["HV"] * (K.value // R.value) > processor(call.q.device)[0]


class Launches:
    """What runs calls of one layout."""

    def __init__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        N, HV = call.sizes["N"], call.sizes["HV"]
        records = units(call) * HV
        overlapping = records <= SHORT * PROGRAMS * processor(o.device)[0]
        self._sizes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((records, K.value), torch.float32),
            ((records * RECORD.value, K.value), torch.bfloat16),
            *([((N,), torch.int32)] if _waits(call, N) else []),
        ]
        space = [o.new_empty(1, dtype=dtype).expand(size) for size, dtype in self._sizes]  # so many rows, and no memory
        (inputs, order), others = self._inputs(call, o, h, snapshots, space)
        self._prepare = prepare(
            inputs, order, records, N,
            GATE=gate_name(call), L2NORM=call.use_qk_l2norm_in_kernel, BETA_RAW=call.beta_is_raw, WIDE=not bounded(call), maxnreg=REGISTERS,
        )  # fmt: skip
        self._chain = chain(*others, overlapping=overlapping)

    def __call__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        """Launches the kernels. Nothing comes between the two: the chain waits for `prepare`, but not for what else it reads."""
        space = [torch.empty(size, dtype=dtype, device=o.device) for size, dtype in self._sizes]
        inputs, others = self._inputs(call, o, h, snapshots, space)
        self._prepare(prepare_tensors(*inputs), call.scale, call.lower_bound or 0.0)
        self._chain(chain_tensors(*others), 0 if snapshots is None else len(snapshots[0]))

    @staticmethod
    def _inputs(call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots, space: list[Tensor]) -> tuple[tuple, tuple]:
        """What `prepare_tensors` and `chain_tensors` take; `space`: decays and tiles of the records, and the order of sequences, if there is one."""
        decays, tiles, order = (*space, None)[:3]
        cu_seqlens, states = dense(call.cu_seqlens), prefill.state_pointers(call, h, snapshots)
        inputs = [call.q, call.k, call.g, call.beta, dense(call.A_log), dense(call.dt_bias), cu_seqlens, o, decays, tiles]
        others = [dense(call.initial_state_indices), *states]
        return (inputs, order), (tiles, decays, call.v, o, call.initial_state, cu_seqlens, others, order)
