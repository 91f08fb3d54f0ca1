"""Gate, norm and one token of the recurrence, for every Triton kernel. Log decays are in base 2 here, as `exp2` takes them."""

import triton
import triton.language as tl

from kdaserve import contract

LOG2_E = tl.constexpr(1.4426950408889634)
L2_EPS = tl.constexpr(contract.L2_EPS)
WEAK = tl.constexpr(-0.7213475204444817)  # -0.5 in natural log


@triton.jit
def sigmoid(b_x):
    """``1 / (1 + exp(-x))`` in two special-function results; a division takes several more."""
    b_root = tl.math.rsqrt(1.0 + tl.exp2(-LOG2_E * b_x))
    return b_root * b_root


@triton.jit
def log2_softplus(b_x):
    """``log2(1 + exp(x))``, with the relative error of ``exp(x)``: 2e-7 near 0, 2e-6 at x = -28.

    ``max(x, 0) + log(1 + u)`` with ``u = exp(-|x|)`` in (0, 1], where a polynomial of degree 10 is off by 5e-9 of it. A logarithm of ``1 + u`` itself
    would lose a weak decay: at x = -10 one part in 700.
    """
    b_u = tl.exp2(-LOG2_E * tl.abs(b_x))
    b_p = -0.004680075217038393 * b_u + 0.02863931842148304
    b_p = b_p * b_u - 0.08217469602823257
    b_p = b_p * b_u + 0.152977854013443
    b_p = b_p * b_u - 0.22081270813941956
    b_p = b_p * b_u + 0.28386369347572327
    b_p = b_p * b_u - 0.360012024641037
    b_p = b_p * b_u + 0.4808497130870819
    b_p = b_p * b_u - 0.7213461399078369
    b_p = b_p * b_u + 1.4426950216293335
    return LOG2_E * tl.maximum(b_x, 0.0) + b_p * b_u


@triton.jit
def log2_decay(b_x, a, lower_bound, GATE: tl.constexpr):
    """Log decay a token, base 2, <= 0.

    `b_x` is the gate logit with its bias added, `a` is exp(A_log); with the gate ``"none"`` `b_x` is the log decay itself, natural log.
    """
    if GATE == "softplus":
        b_g = -a * log2_softplus(b_x)  # G1
    elif GATE == "bounded":
        b_g = (lower_bound * LOG2_E) * sigmoid(a * b_x)  # G2
    else:
        b_g = b_x * LOG2_E
    return b_g


@triton.jit
def decayed(b_S, b_g, KEPT: tl.constexpr):
    """E1: the state `[BV, BK]` after the decay `b_g` `[BK]`, in base 2.

    A weak decay is subtracted, S + S (exp(g) - 1): rounding exp(g) itself would lose the same amount at every token, and over thousands of tokens
    it shows in the state. The difference is a polynomial of degree 6, off by 1.4e-9 of itself. KEPT says that the state stays in fp32; in a
    16-bit pool the next rounding is larger, and one operation an element less matters there.
    """
    if not KEPT:
        return b_S * tl.exp2(b_g)[None, :]  # E1
    b_p = 0.00012439535930752754 * b_g + 0.001310003804974258
    b_p = b_p * b_g + 0.009609455242753029
    b_p = b_p * b_g + 0.05550263449549675
    b_p = b_p * b_g + 0.24022641777992249
    b_p = b_p * b_g + 0.6931471824645996
    m_weak = (b_g > WEAK) & (b_g <= 0.0)
    b_change = tl.where(m_weak, b_p * b_g, tl.exp2(b_g))
    b_keep = tl.where(m_weak, 1.0, 0.0)
    return b_S * b_keep[None, :] + b_S * b_change[None, :]  # E1


@triton.jit
def token(b_S, b_q, b_k, b_v, b_g, beta, scale, L2NORM: tl.constexpr, KEPT: tl.constexpr):
    """One token on the state `[BV, BK]`: the new state and the output `[BV]`.

    q and k come as they are and the norms are put in behind the products, so that all reductions stand side by side: one after the other each is
    five shuffles that nothing hides when few programs run.
    """
    b_S = decayed(b_S, b_g, KEPT)
    b_Sk = tl.sum(b_S * b_k[None, :], 1)
    b_Sq = tl.sum(b_S * b_q[None, :], 1)
    kq = tl.sum(b_k * b_q, 0)
    if L2NORM:
        k_norm = tl.math.rsqrt(tl.sum(b_k * b_k, 0) + L2_EPS)
        q_norm = scale * tl.math.rsqrt(tl.sum(b_q * b_q, 0) + L2_EPS)
        b_r = (beta * k_norm) * (b_v - k_norm * b_Sk)  # E2
    else:
        q_norm = scale
        b_r = beta * (b_v - b_Sk)  # E2
    b_S += b_r[:, None] * b_k[None, :]  # E3
    return b_S, q_norm * (b_Sq + b_r * kq)  # E4, with E3 put in
