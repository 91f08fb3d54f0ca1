"""Packed decode in plain PyTorch."""

from __future__ import annotations

import torch

from kdaserve.ops.decode import DecodeCall
from kdaserve.ops.gate import activate
from kdaserve.ops.step import step


def run(call: DecodeCall) -> None:
    """Runs a decode call; see `packed_decode_kda`."""
    HV, K, scale, pool = call.sizes["HV"], call.sizes["K"], call.scale, call.initial_state
    rows = (call.ssm_state_indices >= 0).nonzero()[:, 0]
    slots = call.ssm_state_indices[rows].long()
    dtype = call.compute_dtype
    q, k, v = (x[rows].to(dtype) for x in call.qkv())
    q, k, g, beta = activate(call, q, k, call.a[rows].to(dtype).unflatten(-1, (HV, K)), call.b[rows].to(dtype))
    S = pool.index_select(0, slots).to(dtype)
    S_new, o = step(S.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), g.flatten(0, 1), beta.view(-1, 1), scale)
    out = torch.zeros_like(call.out).index_copy(0, rows, o.view_as(v)[:, None].to(call.out.dtype))
    call.out[:0].copy_(out[:0])  # if autograd does not let us write `out`, it says so here, before the pool is written
    pool.index_copy_(0, slots, S_new.view_as(S).to(pool.dtype))
    call.out.copy_(out)
