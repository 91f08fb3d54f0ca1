"""The judge of the judge: E1 to E4 in float64, one sequence at a time in token order. It shares no code with the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

L2_EPS = 1e-6


def every_64(length: int) -> Iterable[int]:
    """The start of every chunk."""
    return range(0, length + 1, 64)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a prefill must give, in float64 on the CPU.

    Attributes:
        o: `[B, T, HV, V]`, zero at padding rows.
        added: `[B, T, HV, V]`, the root of the sum of the squares of what is added up to o: its size, but where o is a small difference.
        lengths: tokens of each sequence.
        states: for each sequence `[HV, V, K]` by the number of tokens it has seen; the length is always among them.
    """

    o: Tensor
    added: Tensor
    lengths: list[int]
    states: list[dict[int, Tensor]]


def prefill(call: dict[str, Any], ask: Callable[[int], Iterable[int]] = every_64) -> Expected:
    """The result of `chunk_kda(**call)`; `ask` gives the token counts of a sequence of some length whose states are wanted."""
    q, k, v, g, beta, pool = (wide(call[name]) for name in ("q", "k", "v", "g", "beta", "initial_state"))
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    cu_seqlens, plan = call.get("cu_seqlens"), call.get("plan")
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        lengths = [b - a for a, b in pairwise(bounds)]
    else:
        lengths = [T] * B if plan is None else list(plan.lengths)
    scale = K**-0.5 if call.get("scale") is None else call["scale"]
    o, added = torch.zeros(2, B * T, HV, V, dtype=torch.float64)
    states, start = [], 0
    for length, slot in zip(lengths, call["initial_state_indices"].tolist(), strict=True):
        batch, first = (start // T, start % T) if length else (0, 0)
        raw = (x[batch, first : first + length] for x in (q, k, v, g, beta))
        S = torch.zeros(HV, V, K, dtype=torch.float64) if slot < 0 else pool[slot]
        tokens = activated(call, *raw, beta_is_raw=call.get("beta_is_raw", False))
        o[start : start + length], added[start : start + length], kept = recurrence(*tokens, S, scale, {*ask(length), length})
        states.append(kept)
        start += length
    return Expected(o.view(B, T, HV, V), added.view(B, T, HV, V), lengths, states)


def decode(call: dict[str, Any]) -> tuple[Tensor, dict[int, Tensor]]:
    """The output `[B, 1, HV, V]` of `packed_decode_kda(**call)` and the new state `[HV, V, K]` by slot."""
    packed, a, b, pool = (wide(call[name]) for name in ("mixed_qkv", "a", "b", "initial_state"))
    HV, V, K = pool.shape[1:]
    H = (packed.shape[1] - HV * V) // (2 * K)
    scale = K**-0.5 if call["scale"] is None else call["scale"]
    o, states = torch.zeros(len(packed), 1, HV, V, dtype=torch.float64), {}
    for row, slot in enumerate(call["ssm_state_indices"].tolist()):
        if slot >= 0:
            q, k, v = packed[row : row + 1].split([H * K, H * K, HV * V], 1)
            raw = q.view(1, H, K), k.view(1, H, K), v.view(1, HV, V), a[row].view(1, HV, K), b[row].view(1, HV)
            o[row], _, kept = recurrence(*activated(call, *raw, beta_is_raw=True), pool[slot], scale, {1})
            states[slot] = kept[1]
    return o, states


def wide(x: Tensor) -> Tensor:
    """A copy in float64 on the CPU."""
    return x.detach().cpu().double().clone()


def activated(call: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, beta_is_raw: bool) -> tuple[Tensor, ...]:
    """Raw inputs of one sequence, `[T, heads, channels]`, as what E1 to E4 take, all with HV heads."""
    if call.get("use_qk_l2norm_in_kernel", False):
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + L2_EPS)
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + L2_EPS)
    HV = v.shape[1]
    served_by = torch.arange(HV) // (HV // q.shape[1])  # query/key head of each value head
    A_log, dt_bias, bound = call.get("A_log"), call.get("dt_bias"), call.get("lower_bound")
    if A_log is not None:
        a = torch.exp(wide(A_log))[None, :, None]
        x = g if dt_bias is None else g + wide(dt_bias).view(1, *g.shape[1:])
        g = -a * torch.logaddexp(x, torch.zeros_like(x)) if bound is None else bound / (1 + torch.exp(-a * x))
    return q[:, served_by], k[:, served_by], v, g, 1 / (1 + torch.exp(-beta)) if beta_is_raw else beta


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, scale: float, ask: Iterable[int]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """One sequence: q, k, g `[T, HV, K]`, v `[T, HV, V]`, beta `[T, HV]`, S `[HV, V, K]`; `Expected.o` and `added`, and the states asked for."""
    S = S.transpose(1, 2).clone()  # [HV, K, V], as the equations have it
    o, added, states, ask = torch.zeros_like(v), torch.zeros_like(v), {}, set(ask)
    for t in range(len(q) + 1):
        if t in ask:
            states[t] = S.transpose(1, 2).clone()
        if t < len(q):
            S = torch.exp(g[t])[:, :, None] * S  # E1
            r = v[t] - (S * k[t][:, :, None]).sum(1)  # E2
            S = S + beta[t][:, None, None] * k[t][:, :, None] * r[:, None, :]  # E3
            terms = scale * S * q[t][:, :, None]
            o[t], added[t] = terms.sum(1), terms.norm(dim=1)  # E4
    return o, added, states
