"""Gate, norm and one token of the recurrence, for every Helion kernel: plain functions, which Helion traces into the kernel that calls them.

Log decays are in base 2 here, as `exp2` takes them.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from kdaserve.contract import L2_EPS

LOG2_E = 1.4426950408889634
WEAK = -0.5 * LOG2_E
SOFTPLUS = (
    -0.004680075217038393,
    0.02863931842148304,
    -0.08217469602833257,
    0.152977854013443,
    -0.22081270813941956,
    0.28386369347572327,
    -0.360012024641037,
    0.4808497130870819,
    -0.7213461399078369,
    1.4426950216293335,
)
"""``log2(1 + u) / u`` on [0, 1], within 5e-9."""
EXP2 = (
    0.00012439535930752754,
    0.001310003804974258,
    0.009609455242753029,
    0.05550263449549675,
    0.24022641777992249,
    0.6931471824645996,
)
"""``(2 ** x - 1) / x`` on [-0.72, 0], within 1.4e-9."""


def address(start: Tensor | int, offsets: Tensor) -> Tensor:
    """Where a tile lies in a flat tensor: `start`, of 64 bits, plus offsets of 32, which take half the registers.

    The cast is not for show: in PyTorch a number takes the dtype of the tensor it is added to.
    """
    return start + offsets.to(torch.int64)


def polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Highest degree first."""
    p = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        p = p * x + coefficient
    return p


def product(a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
    """``a @ b``, added to `acc`, in fp32."""
    return hl.dot(a, b, out_dtype=torch.float32) if acc is None else hl.dot(a, b, acc=acc)


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))`` in two special-function results; a division takes several more."""
    root = torch.rsqrt(1.0 + torch.exp2(-LOG2_E * x))
    return root * root


def log2_softplus(x: Tensor) -> Tensor:
    """``log2(1 + exp(x))``, with the relative error of ``exp(x)``: 2e-7 near 0, 2e-6 at x = -28.

    ``max(x, 0) + log(1 + u)`` with ``u = exp(-|x|)``; a logarithm of ``1 + u`` itself would lose a weak decay: at x = -10 one part in 700.
    """
    u = torch.exp2(-LOG2_E * torch.abs(x))
    return LOG2_E * torch.where(x > 0.0, x, 0.0) + polynomial(u, SOFTPLUS) * u


def log2_decay(x: Tensor, a: Tensor | float, lower_bound: float, gate: str) -> Tensor:
    """Log decay a token, base 2, <= 0.

    `x` is the gate logit with its bias added, `a` is exp(A_log); with the gate ``"none"`` `x` is the log decay itself, natural log.
    """
    if gate == "softplus":
        return -a * log2_softplus(x)  # G1
    if gate == "bounded":
        return (lower_bound * LOG2_E) * sigmoid(a * x)  # G2
    return x * LOG2_E


def decayed(S: Tensor, g: Tensor, kept: bool) -> Tensor:
    """E1: the state `[BV, BK]` after the decay `g` `[BK]`, in base 2.

    A weak decay is subtracted, S + S (exp(g) - 1): rounding exp(g) itself would lose the same amount at every token, and over thousands of tokens
    it shows in the state. `kept` says that the state stays in fp32; in a 16-bit pool the next rounding is larger, and one operation an element less
    matters there.
    """
    if not kept:
        return S * torch.exp2(g)[None, :]  # E1
    weak = (g > WEAK) & (g <= 0.0)
    change = torch.where(weak, polynomial(g, EXP2) * g, torch.exp2(g))
    keep = torch.where(weak, 1.0, 0.0)
    return S * keep[None, :] + S * change[None, :]  # E1


def token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, l2norm: bool, kept: bool) -> tuple[Tensor, Tensor]:
    """One token on the state `[BV, BK]`: the new state and the output `[BV]`.

    q and k come as they are and the norms are put in behind the products, so that all reductions stand side by side: one after the other each is
    five shuffles that nothing hides when few programs run.
    """
    S = decayed(S, g, kept)
    Sk = (S * k[None, :]).sum(1)
    Sq = (S * q[None, :]).sum(1)
    kq = (k * q).sum(0)
    q_norm: Tensor | float = scale
    if l2norm:
        k_norm = torch.rsqrt((k * k).sum(0) + L2_EPS)
        q_norm = scale * torch.rsqrt((q * q).sum(0) + L2_EPS)
        r = (beta * k_norm) * (v - k_norm * Sk)  # E2
    else:
        r = beta * (v - Sk)  # E2
    S = S + r[:, None] * k[None, :]  # E3
    return S, q_norm * (Sq + r * kq)  # E4, with E3 put in
