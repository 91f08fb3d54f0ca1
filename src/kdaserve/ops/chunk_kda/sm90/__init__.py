"""Prefill on Hopper, in two Gluon kernels that work as those of the Triton backend do and hand over the same records.

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
from kdaserve.ops.chunk_kda.sm90.space import HEADER, RECORD, K
from kdaserve.ops.forms import Form
from kdaserve.ops.jit import prefill
from kdaserve.ops.jit.chunking import bounded, forms_by_sequences, processor, units
from kdaserve.ops.jit.launch import dense, gate_name
from kdaserve.ops.prefill import PrefillCall

PROGRAMS, REGISTERS = 3, 168
"""Programs of `prepare` on a multiprocessor, and the registers a thread that this leaves."""
SHORT = 4
"""Turns of `prepare` up to which the chain is launched before it ends: 2 µs fewer. With many turns the halves of V then read records at different
times, and so from memory twice: 64 heads of 8192 tokens take 0.61 ms instead of 0.56."""


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `chunk_kda`."""
    if call.sizes["T"] == 0:  # of nothing there is no tensor map
        return portable.run(call)
    unseen = call.layout.once(_unseen, lambda: _unseen(call))

    def fits(name: str, x: Tensor | None) -> bool:
        return x is None or (name not in unseen and x.data_ptr() % 16 == 0)

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


def seen(x: Tensor) -> bool:
    """Whether the kernels can read or write `x` `[B, T, heads, K]` if it starts at a multiple of 16 bytes: rows that do, in the order of a matrix."""
    return x.stride(1) <= portable.FARTHEST and tokens(x) is not None


def _unseen(call: PrefillCall) -> frozenset[str]:
    """Names of the tensors that the kernels cannot read or write where they are, at any address."""
    return frozenset(name for name in ("q", "k", "v", "g", "out") if (x := getattr(call, name)) is not None and not seen(x))


def _waits(call: PrefillCall, sequences: int) -> bool:
    """Whether programs of so many sequences like those of `call` wait for others to end: then the longest start first."""
    return sequences > 1 and call.cu_seqlens is not None and sequences * call.sizes["HV"] * (K.value // R.value) > processor(call.q.device)[0]


class Launches:
    """What runs calls of one layout."""

    def __init__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        N, HV = call.sizes["N"], call.sizes["HV"]
        self._records = records = units(call) * HV
        self._workspace = [((records, HEADER.value), torch.float32), ((records * RECORD.value, K.value), torch.bfloat16)]
        self._order = ((N,), torch.int32) if _waits(call, N) else None
        workspace, order = self._room(o.device)
        pointers = portable.prepare_pointers(call, o, workspace)
        dependent = records <= SHORT * PROGRAMS * processor(o.device)[0]
        self._prepare = prepare(
            pointers, order, records, N,
            GATE=gate_name(call), L2NORM=call.use_qk_l2norm_in_kernel, BETA_RAW=call.beta_is_raw, WIDE=not bounded(call),
            maxnreg=REGISTERS,
        )  # fmt: skip
        header, tiles = workspace
        others = self._others(call, h, snapshots)
        self._chain = chain(tiles, header, call.v, o, call.initial_state, dense(call.cu_seqlens), others, order=order, dependent=dependent)

    def __call__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        """Launches the kernels."""
        (header, tiles), order = self._room(o.device)
        pointers = portable.prepare_pointers(call, o, [header, tiles])
        if self._records:
            self._prepare(prepare_tensors(pointers, order), call.scale, call.lower_bound or 0.0)
        others = self._others(call, h, snapshots)
        tensors = chain_tensors(tiles, header, call.v, o, call.initial_state, dense(call.cu_seqlens), others, order)
        self._chain(tensors, 0 if snapshots is None else len(snapshots[0]))

    def _room(self, device: torch.device) -> tuple[list[Tensor], Tensor | None]:
        """Headers and tiles of the records; the order of the sequences, where there is one."""
        workspace = [torch.empty(size, dtype=dtype, device=device) for size, dtype in self._workspace]
        return workspace, None if self._order is None else torch.empty(self._order[0], dtype=self._order[1], device=device)

    @staticmethod
    def _others(call: PrefillCall, h: Tensor | None, snapshots: prefill.Snapshots) -> list[Tensor | None]:
        return [dense(call.initial_state_indices), *prefill.state_pointers(call, h, snapshots)]
