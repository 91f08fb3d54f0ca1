"""One token of many (sequence, head) pairs in PyTorch; what the `torch` backends of decode and `recurrent_kda` run."""

from __future__ import annotations

import torch
from torch import Tensor


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """E1 to E4, reading the state once.

    Args:
        S: `[m, V, K]`; q, k, g `[m, K]`, g a log decay; v `[m, V]`; beta `[m, 1]`.

    Returns:
        The new state and the output `[m, V]`.
    """
    # A weak decay is subtracted, S + S (exp(g) - 1): rounding exp(g) itself would lose the same amount at every token, and over thousands of
    # tokens it shows in the state.
    weak = g > -0.5
    change = torch.where(weak, g.expm1(), g.exp())
    S = torch.addcmul(S * weak[:, None, :], S, change[:, None, :])  # E1
    # Both reads in one product: a product with a single column takes another path on a CPU when m = 1, with other bits.
    read_k, read_q = (S @ torch.stack([k, q], -1)).unbind(-1)
    r = beta * (v - read_k)  # E2
    o = scale * (read_q + r * (k * q).sum(-1, keepdim=True))  # E4, with E3 put in
    return torch.addcmul(S, r[:, :, None], k[:, None, :]), o  # E3
