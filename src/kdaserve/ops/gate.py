"""The formulas that turn raw projections into gates and normed keys: G1, G2 and the L2 norm, in plain torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kdaserve.contract import L2_EPS


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Log decay a token, natural log, <= 0.

    Args:
        g: `[..., HV, K]` raw gate logits, or the log decay itself when `A_log` is None; in the dtype to compute in.
        A_log: `[HV]`; `dt_bias`: `[HV*K]`, head-major, or None for no bias.
        lower_bound: None for the softplus gate, else the bound of the bounded gate.

    Returns:
        `[..., HV, K]` in the dtype of `g`.
    """
    if A_log is None:
        return g
    a = A_log.to(g.dtype).exp()[:, None]
    x = g if dt_bias is None else g + dt_bias.to(g.dtype).view(g.shape[-2:])
    if lower_bound is None:
        return -a * softplus(x)  # G1
    return lower_bound * sigmoid(a * x)  # G2


# On a CPU `torch.sigmoid` and `softplus` treat the last elements of a thread's share one by one, with other bits than whole vectors have; `exp`
# and `log1p` do not. The functions below are made of the latter, so that a token's gate does not depend on what else is in the batch (S10).


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``; constant below -80, where it is under 2e-35, so that its gradient stays finite."""
    return torch.reciprocal(1 + torch.exp(-x.clamp_min(-80)))


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``; x itself above 20."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp_max(20))))


def l2_norm(x: Tensor) -> Tensor:
    """`x` over its Euclidean norm along the last dimension, with 1e-6 added to the sum of squares."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class Activation(Protocol):
    """The fields of a call that say how its inputs are activated."""

    dt_bias: Tensor | None
    lower_bound: float | None
    use_qk_l2norm_in_kernel: bool
    beta_is_raw: bool

    @property
    def A_log(self) -> Tensor | None:
        """Gate parameter, None when g is the log decay already."""


def activate(call: Activation, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a call's raw inputs stand for, in the dtype they come in.

    Args:
        q, k: `[..., H, K]`; g: `[..., HV, K]`; beta: `[..., HV]`.

    Returns:
        q and k, normed if asked for, `[..., HV, K]`: each query/key head serves HV / H value heads; the log decay; beta.
    """
    if call.use_qk_l2norm_in_kernel:
        q, k = l2_norm(q), l2_norm(k)
    groups = g.shape[-2] // q.shape[-2]
    if groups > 1:
        q, k = q.repeat_interleave(groups, -2), k.repeat_interleave(groups, -2)
    g = log_decay(g, call.A_log, call.dt_bias, call.lower_bound)
    return q, k, g, sigmoid(beta) if call.beta_is_raw else beta
