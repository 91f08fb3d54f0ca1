"""Any call, on any backend, against the fp64 reference: outputs token by token, states after every 64 tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kdaserve import calls, dispatch
from kdaserve.contract import CHUNK
from kdaserve.errors import error
from kdaserve.ops.prefill import PrefillCall
from kdaserve.snapshots import Snapshots

DEFAULT_TOLERANCE = 1e-3
"""Relative, for float32 results: what equal keys may cost. Lower dtypes add the spacing of their numbers."""
ROUNDED_OPERANDS = {"output": 4 * torch.finfo(torch.bfloat16).eps, "state": torch.finfo(torch.bfloat16).eps}
"""Added where a backend rounds to bf16 what it multiplies: twice and more what was seen, 1.4e-2 of what is usual in outputs, 2e-3 in states."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """How far a backend is from the reference.

    Attributes:
        backend: the backend that ran.
        output, state: largest relative deviation of an output row and of a head's state after 64 tokens or at the end.
    """

    backend: str
    output: float
    state: float


def verify_call(op: str, arguments: Mapping[str, Any], backend: str = "auto", tolerance: float | None = None) -> Verified:
    """Runs a call on `backend` and on the fp64 reference, on copies, and compares them.

    Args:
        op, arguments: as for `explain_choice`. Nothing of `arguments` is written.
        backend: what to verify.
        tolerance: relative; default 1e-3, more for bf16 and fp16 outputs and pools, and 3.1e-2 (states: 7.8e-3) more where `chunk_kda` multiplies in
            16 bits. A row counts as no smaller than a hundredth of what is usual in its sequence and head; an output of products in 16
            bits as no smaller than that: it may be a small difference of large numbers.

    Returns:
        The largest deviations.

    Raises:
        ValuesError: KDA309, naming the first sequence, head and token that is too far off.
        KdaError: whatever the call itself raises with ``check="values"``.
    """
    call = calls.checked_call(op, {**arguments, "check": "values"})
    chosen = dispatch.choose(call, backend)
    name = chosen.name

    @torch.no_grad()
    def rows(backend: str, pool_dtype: torch.dtype | None) -> tuple[_Rows, _Rows]:
        run = functools.partial(calls.OPS[op], backend=backend)
        if isinstance(call, PrefillCall):
            return _run_prefill(arguments, run, call.host_plan().lengths, pool_dtype)
        return _run_decode(arguments, run, pool_dtype)

    actual, expected = rows(name, None), rows("reference", torch.float64)
    rounded = op == "chunk_kda" and chosen.rounds and actual[0].values.dtype.itemsize == 2
    worst = []
    for what, a, e in zip(("output", "state"), actual, expected, strict=True):
        usual = DEFAULT_TOLERANCE + _spacing(a.values.dtype) + (ROUNDED_OPERANDS[what] if rounded else 0.0)
        allowed = usual if tolerance is None else tolerance
        deviation = a.deviation_from(e, 1.0 if rounded and what == "output" else 0.01)
        bad = ~(deviation <= allowed)  # NaN is bad
        if bad.any():
            row, head = bad.nonzero()[0].tolist()
            details = {"what": what, "deviation": f"{deviation[row, head].item():.2e}", "tolerance": f"{allowed:.1e}"}
            raise error("KDA309", op=op, backend=name, where=f"{a.places[row]}, head {head}", **details)
        worst.append(deviation.max().item() if deviation.numel() else 0.0)
    return Verified(name, *worst)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """`values` `[rows, HV, ...]` in the order they came about, what to call each row, and the sequence that it is compared in."""

    values: Tensor
    places: list[str]
    sequence: list[int]

    def deviation_from(self, expected: _Rows, least: float) -> Tensor:
        """`[rows, HV]`: distance of each row, relative to its expected size but at least to `least` of what is usual in its sequence and head."""
        e = expected.values.double().flatten(2)
        gap = (self.values.double().flatten(2) - e).norm(dim=-1)
        size = e.norm(dim=-1)
        of = torch.tensor(self.sequence, dtype=torch.long, device=size.device)
        total = size.new_zeros(max(self.sequence, default=0) + 1, size.shape[1]).index_add_(0, of, size)
        usual = total[of] / of.bincount()[of][:, None]
        return gap / size.maximum(usual * least).clamp_min(torch.finfo(torch.float32).tiny)


def _run_prefill(call: Mapping[str, Any], run: Callable[..., Any], lengths: tuple[int, ...], pool_dtype: torch.dtype | None) -> tuple[_Rows, _Rows]:
    replaced = ("backend", "check", "track_state", "track_chunk_idx", "snapshots", "out")
    changed = {name: value for name, value in call.items() if name not in replaced}
    steps = range(0, max(lengths, default=0), CHUNK)
    boundaries = [(n, min(t + CHUNK, length)) for t in steps for n, length in enumerate(lengths) if t < length]
    pool, changed["initial_state_indices"] = _used_slots(call["initial_state"], call["initial_state_indices"])
    slots = list(range(len(pool), len(pool) + len(boundaries)))
    changed["initial_state"] = torch.cat([pool, pool.new_zeros(len(slots), *pool.shape[1:])]).to(pool_dtype or pool.dtype)
    changed["snapshots"] = Snapshots([n for n, _ in boundaries], [t for _, t in boundaries], slots)
    changed["output_intermediate_states"] = False
    o = run(**changed)
    tokens = [f"sequence {n}, token {t}" for n, length in enumerate(lengths) for t in range(length)]
    states = [f"sequence {n}, after {t} tokens" for n, t in boundaries]
    of = [n for n, length in enumerate(lengths) for _ in range(length)]
    return _Rows(o.flatten(0, 1)[: len(tokens)], tokens, of), _Rows(changed["initial_state"][slots], states, [n for n, _ in boundaries])


def _run_decode(call: Mapping[str, Any], run: Callable[..., Any], pool_dtype: torch.dtype | None) -> tuple[_Rows, _Rows]:
    changed = {name: value for name, value in call.items() if name not in ("backend", "check")}
    pool, changed["ssm_state_indices"] = _used_slots(call["initial_state"], call["ssm_state_indices"])
    changed["initial_state"], changed["out"] = pool.to(pool_dtype or pool.dtype, copy=True), torch.empty_like(call["out"])
    out, pool = run(**changed)
    slots = call["ssm_state_indices"].tolist()
    states = [f"request {row}, slot {slot}" for row, slot in enumerate(slots) if slot >= 0]
    rows = [f"request {row}" for row in range(len(slots))]
    return _Rows(out[:, 0], rows, [0] * len(rows)), _Rows(pool, states, [0] * len(states))  # what is usual is so among all requests


def _used_slots(pool: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The slots that `indices` name, in their order, as a pool of its own, and the indices into it; padding stays padding."""
    used = indices >= 0
    return pool.detach()[indices[used].long()], torch.where(used, used.cumsum(0) - 1, -1)


def _spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
