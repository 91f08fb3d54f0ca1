"""Token by token in plain PyTorch, all sequences and heads side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from kdaserve.ops.prefill import PrefillCall, compute_dtype
from kdaserve.ops.schedule import new_output, scatter, schedule, token_inputs
from kdaserve.ops.states import States
from kdaserve.ops.step import step

UNITS_PER_BLOCK = 4096  # (sequence, token) pairs whose inputs are prepared together


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `recurrent_kda`."""
    dtype, lengths, HV = compute_dtype(call), call.host_plan().lengths, call.sizes["HV"]
    states, out = States(call, dtype), new_output(call, lengths)
    for group in schedule(lengths, 1, UNITS_PER_BLOCK, call.q.device):
        S = states.initial(group.sequences)
        for block in group.blocks:
            heads = [running * HV for running in block.running]
            tokens = zip(*(x[:, 0].split(heads) for x in token_inputs(call, block, 1, dtype)), strict=True)
            outputs = []
            for j, (running, (q, k, v, g, beta)) in enumerate(zip(block.running, tokens, strict=True)):
                S = states.boundary(block.first_step + j, group.sequences, running, S)
                S, o = (x.unflatten(0, (-1, HV)) for x in step(S.flatten(0, 1), q, k, v, g, beta, call.scale))
                outputs.append(o)
            scatter(out, block, torch.cat(outputs)[:, :, None])
        states.boundary(max(lengths[n] for n in group.sequences), group.sequences, 0, S)
    return out, states.commit()
