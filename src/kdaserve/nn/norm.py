"""Root-mean-square norms, computed in at least fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kdaserve.ops.gate import sigmoid


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension.

    Args:
        size: length of the last dimension.
        eps: added to the mean square.

    Call:
        ``x [..., size]`` in any floating dtype; the result has the shape and dtype of `x`.
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same shape and dtype."""
        return self._normed(x).to(x.dtype)

    def _normed(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


class GatedRMSNorm(RMSNorm):
    """``x / rms(x) * weight * sigmoid(gate)``: what a KDA layer does to the output of each head.

    Call:
        ``x`` and ``gate`` `[..., size]`; the result has the shape and dtype of `x`.
    """

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """`x` and `gate` `[..., size]` to the same shape and the dtype of `x`."""
        normed = self._normed(x)
        return (normed * sigmoid(gate.to(normed.dtype))).to(x.dtype)
