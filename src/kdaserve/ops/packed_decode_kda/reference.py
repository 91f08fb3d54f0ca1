"""The judge of decode: E1 to E4 in float64."""

from __future__ import annotations

import torch

from kdaserve.ops.chunk_kda.reference import token
from kdaserve.ops.decode import DecodeCall
from kdaserve.ops.gate import activate


def run(call: DecodeCall) -> None:
    """Runs a decode call; see `packed_decode_kda`."""
    HV, K = call.sizes["HV"], call.sizes["K"]
    q, k, v = (x.double() for x in call.qkv())
    q, k, g, beta = activate(call, q, k, call.a.double().unflatten(-1, (HV, K)), call.b.double())
    slots = call.ssm_state_indices.tolist()
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    call.out.zero_()
    if rows:
        used = torch.tensor([slots[row] for row in rows], device=q.device)
        S = call.initial_state.index_select(0, used).double()
        S, o = token(S, q[rows], k[rows], v[rows], g[rows], beta[rows], call.scale)
        call.initial_state.index_copy_(0, used, S.to(call.initial_state.dtype))
        call.out[rows] = o[:, None].to(call.out.dtype)
