"""The judge: E1 to E4 token by token in float64; and the chunked form E5 to E11, stated once for readers and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kdaserve.ops.gate import activate
from kdaserve.ops.prefill import PrefillCall
from kdaserve.ops.states import States
from kdaserve.ops.tokens import new_output


def token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One token.

    Args:
        S: `[..., V, K]` state, as the pool holds it; q, k, g `[..., K]`; v `[..., V]`; beta `[...]`; g is a log decay.

    Returns:
        The new state and the output `[..., V]`.
    """
    S = S * g.exp()[..., None, :]  # E1
    r = v - (S @ k[..., None])[..., 0]  # E2
    S = S + beta[..., None, None] * r[..., :, None] * k[..., None, :]  # E3
    return S, scale * (S @ q[..., None])[..., 0]  # E4


def chunk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """C tokens at once: the same result as C times `token`.

    Args:
        S: `[..., V, K]`; q, k, g `[..., C, K]`; v `[..., C, V]`; beta `[..., C]`.

    Returns:
        The new state and the outputs `[..., C, V]`.
    """
    C = q.shape[-2]
    G = g.cumsum(-2)  # E5
    lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    span = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(~lower[..., None], -torch.inf).exp()
    A = beta[..., None] * torch.einsum("...ik,...ijk,...jk->...ij", k, span, k).tril(-1)  # E6
    M = torch.linalg.inv(torch.eye(C, dtype=q.dtype, device=q.device) + A)  # E7
    w, u = M @ (beta[..., None] * k * G.exp()), M @ (beta[..., None] * v)  # E8
    r = u - w @ S.mT  # E9
    o = scale * ((q * G.exp()) @ S.mT + torch.einsum("...ik,...ijk,...jk->...ij", q, span, k) @ r)  # E10
    last = G[..., -1:, :]
    return last.exp() * S + r.mT @ (k * (last - G).exp()), o  # E11


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `chunk_kda`."""
    states = States(call, torch.float64)
    plan = call.host_plan()
    B, T = call.sizes["B"], call.sizes["T"]
    rows = torch.arange(B * T, device=call.q.device)[: plan.tokens]
    q, k, v, g, beta = (x[rows // T, rows % T].double() for x in (call.q, call.k, call.v, call.g, call.beta))
    q, k, g, beta = activate(call, q, k, g, beta)
    outputs, t = [v.new_empty(0, *v.shape[1:])], 0
    for n, length in enumerate(plan.lengths):
        S = states.initial([n])
        for i in range(length):
            S = states.boundary(i, [n], 1, S)
            S, o = token(S, q[t], k[t], v[t], g[t], beta[t], call.scale)
            outputs.append(o)
            t += 1
        if length:
            states.boundary(length, [n], 0, S)
    out = new_output(call, plan)
    out[rows // T, rows % T] = torch.cat(outputs).to(out.dtype)
    return out, states.commit()
