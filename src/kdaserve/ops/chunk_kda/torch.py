"""Chunked prefill in plain PyTorch: all chunks of a block at once (prepare), then chunk after chunk (chain)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kdaserve.contract import CHUNK
from kdaserve.ops.prefill import PrefillCall
from kdaserve.ops.states import States
from kdaserve.ops.tokens import new_output, scatter, token_inputs
from kdaserve.plan import PrefillPlan
from kdaserve.schedule import Block


class Prepared(NamedTuple):
    """What the chain needs of every (chunk, head), `[units * HV, ...]`."""

    u: Tensor  # [C, V]
    w: Tensor  # [C, K], negated
    q: Tensor  # [C, K], scaled and decayed from the chunk's start
    qk: Tensor  # [C, C], the products inside the chunk
    k: Tensor  # [C, K], decayed to the chunk's end
    decay: Tensor  # [1, K], of the whole chunk


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `chunk_kda`."""
    plan, dtype = call.host_plan(), call.compute_dtype
    states, out = States(call, dtype), new_output(call, plan)
    for group in plan.schedule(CHUNK, _chunks_per_block(call, plan)):
        S = states.initial(group.sequences)
        for block in group.blocks:
            S, o = _chain(_prepare(call, block, dtype), block, group.sequences, S, states)
            scatter(out, block, o)
        states.boundary(max(plan.lengths[n] for n in group.sequences), group.sequences, 0, S)
    return out, states.commit()


def _chunks_per_block(call: PrefillCall, plan: PrefillPlan) -> int:
    """How many (sequence, chunk) pairs are prepared together."""
    if call.needs_grad:  # all: the backward pass needs them anyway, and every block would cost it a gradient of full size
        return plan.tokens
    # On a CPU 32 chunks and heads, 1 MB a tensor at K = 128, stay in the cache (docs/design/torch-backend.md); elsewhere few launches count.
    triples = 32 if call.layout.device.type == "cpu" else 4096
    return triples // call.sizes["HV"]


def _prepare(call: PrefillCall, block: Block, dtype: torch.dtype) -> Prepared:
    """E5 to E8 and the inner products of E10, for all chunks of a block."""
    q, k, v, g, beta = token_inputs(call, block, CHUNK, dtype)
    q = q * call.scale
    kb = -beta * k
    M, qk, start, end = _by_doubling(q, k, kb, g)
    return Prepared(M @ (beta * v), M @ (kb * start), q * start, qk, k * end, _decay(_total(g)))  # E8


def _by_doubling(q: Tensor, k: Tensor, kb: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """E5 to E7 and the products q.k of E10, from segments of one token to the whole chunk.

    Two neighbouring segments meet at an anchor: rows of the second decay from it, columns of the first decay to it. Both factors are <= 1 and
    depend on the tokens between alone, so nothing overflows or cancels, however strong or mixed the decay is. They and the inverse of a
    segment follow from those of its two halves.

    Args:
        q, k: `[m, C, K]`; kb: -beta * k; g: log decay a token.

    Returns:
        M `[m, C, C]` (E7), qk `[m, C, C]`, the decay from the chunk's start to each token and from each token to the chunk's end `[m, C, K]`.
    """
    m, C, K = q.shape
    rows = torch.stack([kb, q], 2)
    M, qk = torch.ones_like(g[..., :1, None]), (q * k).sum(-1)[..., None, None]
    start, end = _decay(g), torch.ones_like(g)
    s = 1
    while s < C:
        pairs = C // (2 * s)
        from_anchor, to_anchor = start.view(m, pairs, 2, s, K), end.view(m, pairs, 2, s, K)
        second = rows.view(m, pairs, 2, s, 2, K)[:, :, 1] * from_anchor[:, :, 1, :, None]
        first = k.view(m, pairs, 2, s, K)[:, :, 0] * to_anchor[:, :, 0]
        products = (second.reshape(m * pairs, 2 * s, K) @ first.reshape(m * pairs, s, K).mT).view(m * pairs, s, 2, s)  # E6
        M1, M2 = M.view(m * pairs, 2, s, s).unbind(1)
        M = _lower(M1, M2 @ products[:, :, 0] @ M1, M2).view(m, pairs, 2 * s, 2 * s)  # E7
        qk1, qk2 = qk.view(m * pairs, 2, s, s).unbind(1)
        qk = _lower(qk1, products[:, :, 1], qk2).view(m, pairs, 2 * s, 2 * s)
        whole = from_anchor[:, :, :, -1:]  # E5, as products
        start = _normal(from_anchor * F.pad(whole[:, :, :1], (0, 0, 0, 0, 1, 0), value=1.0))
        end = _normal(to_anchor * F.pad(whole[:, :, 1:], (0, 0, 0, 0, 0, 1), value=1.0))
        s *= 2
    return M[:, 0], qk[:, 0], start.view(m, C, K), end.view(m, C, K)


def _lower(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The block matrix [[a, 0], [b, c]]."""
    return torch.cat([F.pad(a, (0, a.shape[-1])), torch.cat([b, c], -1)], -2)


def _total(g: Tensor) -> Tensor:
    """`[m, C, K]` summed over C, in pairs: the decay of the state is rounded once a chunk, not once a token."""
    while g.shape[1] > 1:
        g = g[:, ::2] + g[:, 1::2]
    return g


def _decay(g: Tensor) -> Tensor:
    """exp(g) for g <= 0; exactly zero below the smallest normal number, since a CPU takes several times longer for subnormal results."""
    return F.threshold(g, math.log(torch.finfo(g.dtype).tiny), -torch.inf).exp_()


def _normal(x: Tensor) -> Tensor:
    """`x` >= 0 with subnormal numbers set to zero, as `_decay` does: many CPUs are slow with them in products."""
    return F.threshold(x, torch.finfo(x.dtype).tiny, 0.0)


def _chain(p: Prepared, block: Block, sequences: tuple[int, ...], S: Tensor, states: States) -> tuple[Tensor, Tensor]:
    """E9 to E11 over the steps of a block; S `[n, HV, V, K]` are the sequences that run at its first step."""
    HV, outputs, start = S.shape[1], [], 0
    for j, running in enumerate(block.running):
        S = states.boundary((block.first_step + j) * CHUNK, sequences, running, S)
        units = slice(start * HV, (start + running) * HV)
        u, w, q, qk, k, decay = (x[units] for x in p)
        flat = S.flatten(0, 1)
        r = torch.baddbmm(u, w, flat.mT)  # E9
        outputs.append(torch.baddbmm(q @ flat.mT, qk, r))  # E10
        S = torch.baddbmm(flat * decay, r.mT, k).view_as(S)  # E11
        start += running
    return S, torch.cat(outputs).unflatten(0, (-1, HV))
