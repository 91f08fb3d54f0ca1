"""Token by token in plain PyTorch, all sequences and heads side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from kdaserve.ops.prefill import PrefillCall
from kdaserve.ops.states import States
from kdaserve.ops.step import step
from kdaserve.ops.tokens import new_output, scatter, token_inputs

TOKENS_PER_BLOCK = 4096  # inputs prepared together: 2 MB a tensor and head at K = 128


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `recurrent_kda`."""
    plan, dtype, HV = call.host_plan(), call.compute_dtype, call.sizes["HV"]
    states, out = States(call, dtype), new_output(call, plan)
    for group in plan.schedule(1, TOKENS_PER_BLOCK):
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
        states.boundary(max(plan.lengths[n] for n in group.sequences), group.sequences, 0, S)
    return out, states.commit()
