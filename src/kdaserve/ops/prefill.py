"""What `chunk_kda` and `recurrent_kda` share: one signature, one set of checks, one record that backends run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kdaserve import contract, dispatch, guards, values
from kdaserve.errors import error
from kdaserve.plan import PrefillPlan, plan_prefill, sequence_lengths
from kdaserve.snapshots import Snapshots


@dataclasses.dataclass(slots=True, kw_only=True)
class PrefillCall(contract.CheckedCall):
    """A checked prefill call; the fields are the arguments of `chunk_kda` with defaults filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    initial_state_indices: Tensor
    cu_seqlens: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float | None
    output_intermediate_states: bool
    beta_is_raw: bool
    track_state: Tensor | None
    track_chunk_idx: Tensor | None
    snapshots: Snapshots | None
    plan: PrefillPlan | None
    out: Tensor | None

    def host_plan(self) -> PrefillPlan:
        """The plan given, or one made from `cu_seqlens` (a sync when they are on a GPU)."""
        if self.plan is None:
            B, T = self.sizes["B"], self.sizes["T"]
            lengths = [T] * B if self.cu_seqlens is None else sequence_lengths(self.op, self.cu_seqlens, T)
            self.plan = plan_prefill(lengths=lengths, device=self.q.device)
        return self.plan


def run(call: PrefillCall, backend: str) -> Tensor | tuple[Tensor, Tensor]:
    """Runs a checked prefill call on the backend that `dispatch.choose` gives."""
    o, h = dispatch.execute(call, backend)
    return (o, h) if call.output_intermediate_states else o


def checked_call(op: str, arguments: Mapping[str, Any]) -> PrefillCall:
    """The checked record of a call given by all its arguments; raises before anything is written (S19)."""
    if arguments["initial_state"] is None or arguments["initial_state_indices"] is None:
        missing = [f"`{name}`" for name in ("initial_state", "initial_state_indices") if arguments[name] is None]
        raise error("KDA101", op=op, missing=" and ".join(missing) + (" is None" if len(missing) == 1 else " are None"))
    _check_pairs(op, arguments)
    plan, q = arguments["plan"], arguments["q"]
    if plan is not None and guards.has_ndim(q, 4):
        _check_plan(op, plan, q, arguments["initial_state_indices"])
        if arguments["cu_seqlens"] is None and q.shape[0] == 1:
            arguments = {**arguments, "cu_seqlens": plan.cu_seqlens}
    call = contract.checked_record(PrefillCall, op, arguments)
    values.check_prefill_indices(call, sync=arguments["check"] == "values")
    if arguments["check"] == "values" and call.layout.device.type != "meta":  # no values there; dispatch refuses the device
        values.check_prefill_data(call)
    return call


def _check_pairs(op: str, arguments: Mapping[str, Any]) -> None:
    pair = ("track_state", "track_chunk_idx")
    for present, missing in (pair, pair[::-1]):
        if arguments[present] is not None and arguments[missing] is None:
            raise error("KDA118", op=op, present=present, missing=missing)
    for name, kind in (("snapshots", Snapshots), ("plan", PrefillPlan)):
        if arguments[name] is not None and not isinstance(arguments[name], kind):
            got = type(arguments[name]).__name__
            raise error("KDA108", op=op, argument=name, expected=f"a kdaserve.{kind.__name__} or None", got=got)


def _check_plan(op: str, plan: PrefillPlan, q: Tensor, indices: Any) -> None:
    B, T, *_ = q.shape
    sequences = indices.shape[0] if guards.has_ndim(indices, 1) else B
    if len(plan.lengths) != sequences:
        problem = f"it has {len(plan.lengths)} sequences, the call has {sequences}"
    elif B > 1 and any(n != T for n in plan.lengths):
        problem = f"batched input needs lengths of {T} for all {B} sequences, it has {list(plan.lengths)}"
    elif plan.tokens > B * T:
        problem = f"it has {plan.tokens} tokens, q has {B * T} rows"
    elif plan.cu_seqlens.device != q.device:
        problem = f"its tables are on {plan.cu_seqlens.device}, q is on {q.device}"
    else:
        return
    raise error("KDA120", op=op, problem=problem)
