"""Any call, on any backend, against the fp64 reference: outputs token by token, states after every 64 tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kdaserve import dispatch
from kdaserve.contract import CHUNK
from kdaserve.errors import error
from kdaserve.ops.chunk_kda.api import chunk_kda
from kdaserve.ops.packed_decode_kda.api import packed_decode_kda
from kdaserve.ops.recurrent_kda.api import recurrent_kda
from kdaserve.plan import sequence_lengths
from kdaserve.snapshots import Snapshots

FUNCTIONS: dict[str, Callable[..., Any]] = {"chunk_kda": chunk_kda, "recurrent_kda": recurrent_kda, "packed_decode_kda": packed_decode_kda}
DEFAULT_TOLERANCE = 1e-3
"""Relative, for float32 results: what equal keys may cost. Lower dtypes add the spacing of their numbers."""


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
        tolerance: relative; default 1e-3, more for bf16 and fp16 outputs and pools.

    Returns:
        The largest deviations.

    Raises:
        ValuesError: KDA309, naming the first sequence, head and token that is too far off.
        KdaError: whatever the call itself raises with ``check="values"``.
    """
    call = dispatch.checked_call(op, {**arguments, "check": "values"})
    name = dispatch.choose(call, backend).name
    run = _run_decode if op == "packed_decode_kda" else _run_prefill
    actual, expected = run(op, arguments, name, None), run(op, arguments, "reference", torch.float64)
    worst = []
    for what, a, e in zip(("output", "state"), actual, expected, strict=True):
        allowed = DEFAULT_TOLERANCE + _spacing(a.values.dtype) if tolerance is None else tolerance
        deviation = a.deviation_from(e)
        bad = ~(deviation <= allowed)  # NaN is bad
        if bad.any():
            row, head = bad.nonzero()[0].tolist()
            details = {"what": what, "deviation": f"{deviation[row, head].item():.2e}", "tolerance": f"{allowed:.1e}"}
            raise error("KDA309", op=op, backend=name, where=f"{a.places[row]}, head {head}", **details)
        worst.append(deviation.max().item() if deviation.numel() else 0.0)
    return Verified(name, *worst)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """`values` `[rows, HV, ...]` in the order they came about, and what to call each row."""

    values: Tensor
    places: list[str]

    def deviation_from(self, expected: _Rows) -> Tensor:
        """`[rows, HV]`: distance of each row, relative to its expected size but at least a hundredth of the head's usual size."""
        e = expected.values.double().flatten(2)
        gap = (self.values.double().flatten(2) - e).norm(dim=-1)
        size = e.norm(dim=-1)
        usual = size.mean(0, keepdim=True) if len(size) else size
        return gap / size.maximum(usual / 100).clamp_min(torch.finfo(torch.float32).tiny)


def _run_prefill(op: str, arguments: Mapping[str, Any], backend: str, pool_dtype: torch.dtype | None) -> tuple[_Rows, _Rows]:
    replaced = ("backend", "check", "track_state", "track_chunk_idx", "snapshots", "out")
    call = {name: value for name, value in arguments.items() if name not in replaced}
    q, pool = call["q"], call["initial_state"]
    lengths = _lengths(op, call)
    steps = range(0, max(lengths, default=0), CHUNK)
    boundaries = [(n, min(t + CHUNK, length)) for t in steps for n, length in enumerate(lengths) if t < length]
    extra = pool.new_zeros(len(boundaries), *pool.shape[1:])
    call["initial_state"] = torch.cat([pool.detach(), extra]).to(pool_dtype or pool.dtype)
    rows = range(pool.shape[0], pool.shape[0] + len(boundaries))
    call["snapshots"] = Snapshots([n for n, _ in boundaries], [t for _, t in boundaries], list(rows))
    call["output_intermediate_states"] = False
    with torch.no_grad():
        o = FUNCTIONS[op](**call, backend=backend)
    assert isinstance(o, Tensor)
    batched = q.shape[0] > 1
    o = o.flatten(0, 1) if batched else o[0, : sum(lengths)]
    tokens = [f"sequence {n}, token {t}" for n, length in enumerate(lengths) for t in range(length)]
    states = [f"sequence {n}, after {t} tokens" for n, t in boundaries]
    return _Rows(o, tokens), _Rows(call["initial_state"][list(rows)], states)


def _run_decode(op: str, arguments: Mapping[str, Any], backend: str, pool_dtype: torch.dtype | None) -> tuple[_Rows, _Rows]:
    call = {name: value for name, value in arguments.items() if name not in ("backend", "check")}
    pool = call["initial_state"].detach()
    call["initial_state"], call["out"] = pool.to(pool_dtype or pool.dtype, copy=True), torch.empty_like(call["out"])
    with torch.no_grad():
        out, pool = FUNCTIONS[op](**call, backend=backend)
    slots = call["ssm_state_indices"].tolist()
    used = [row for row, slot in enumerate(slots) if slot >= 0]
    states = pool[[slots[row] for row in used]]
    return _Rows(out[:, 0], [f"request {row}" for row in range(len(slots))]), _Rows(states, [f"request {row}, slot {slots[row]}" for row in used])


def _lengths(op: str, call: Mapping[str, Any]) -> tuple[int, ...]:
    B, T = call["q"].shape[:2]
    if call.get("plan") is not None:
        return call["plan"].lengths
    if call.get("cu_seqlens") is not None:
        return sequence_lengths(op, call["cu_seqlens"], T)
    return (T,) * B


def _spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
