"""Between packed tokens and the blocks that the PyTorch backends work on."""

from __future__ import annotations

import torch
from torch import Tensor

from kdaserve.ops.gate import activate
from kdaserve.ops.prefill import PrefillCall
from kdaserve.plan import PrefillPlan
from kdaserve.schedule import Block


def token_inputs(call: PrefillCall, block: Block, step: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, log decay and beta of a block, activated, zero where no token is: each `[units * HV, step, channels]`, contiguous."""

    def rows(x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return x[0].index_select(0, block.rows).to(dtype)
        T = call.sizes["T"]
        return x[block.rows // T, block.rows % T].to(dtype)

    def units(x: Tensor) -> Tensor:
        if block.valid is not None:
            x = torch.where(block.valid, x, 0)
        return x.unflatten(0, (-1, step)).transpose(1, 2).flatten(0, 1).contiguous()

    q, k, g, beta = activate(call, *(rows(x) for x in (call.q, call.k, call.g, call.beta)))
    return units(q), units(k), units(rows(call.v)), units(g), units(beta[..., None])


def scatter(o: Tensor, block: Block, units: Tensor) -> None:
    """Writes `units` `[units, HV, step, V]` to their rows of `o` `[B, T, HV, V]`."""
    tokens = units.transpose(1, 2).flatten(0, 1).to(o.dtype)
    rows = block.rows
    if block.valid is not None:
        kept = block.valid.flatten()
        tokens, rows = tokens[kept], rows[kept]
    if o.shape[0] == 1:
        o[0].index_copy_(0, rows, tokens)
    else:
        o[rows // o.shape[1], rows % o.shape[1]] = tokens


def output(call: PrefillCall) -> Tensor:
    """Where a call's output goes; nothing is written."""
    return torch.empty_like(call.v, memory_format=torch.contiguous_format) if call.out is None else call.out


def new_output(call: PrefillCall, plan: PrefillPlan) -> Tensor:
    """The output of a call, zero at rows that no sequence covers (S4)."""
    o = output(call)
    if plan.tokens < o.shape[0] * o.shape[1]:
        o[:, plan.tokens :] = 0  # padding stands at the end of packed input only
    return o


def new_states(call: PrefillCall) -> Tensor | None:
    """Room for the states at the start of every chunk, `[B, NT, HV, V, K]` in k's dtype, if the call asks for them (S11)."""
    if not call.output_intermediate_states:
        return None
    B, chunks = call.sizes["B"], len(call.host_plan().chunk_indices)
    return call.k.new_empty(B, chunks // max(B, 1), *call.initial_state.shape[1:])
