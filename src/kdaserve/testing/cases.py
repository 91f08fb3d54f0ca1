"""Named shapes, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kdaserve.contract import CHUNK
from kdaserve.plan import chunks_of
from kdaserve.testing.inputs import prefill_inputs


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillCase:
    """A prefill step as an engine makes it: bf16 or fp32 inputs, bounded gate, L2 norm and raw beta inside, fp32 pool.

    Attributes:
        name: what benchmarks and results call it.
        lengths: tokens of each packed sequence.
        heads: H = HV.
        dtype: of the inputs.
        head_dim: K = V.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    dtype: torch.dtype = torch.float32
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes that must move: inputs read once, output written once, each sequence's state read and written."""
        tokens = self.tokens * self.heads * (5 * self.head_dim + 1) * self.dtype.itemsize
        return tokens + 2 * len(self.lengths) * self.heads * self.head_dim**2 * 4

    @property
    def flops(self) -> float:
        """Floating-point operations of the chunked form (E5 to E11): products only, in chunks of 64 tokens."""
        C, D = CHUNK, self.head_dim
        inside = 2 * C * C * D * 2 / 2 + C**3 / 3  # A and q.k, lower halves; the inverse
        solve = 2 * C * C * D * 2 / 2  # w and u
        chain = 2 * C * D * D * 3 + 2 * C * C * D / 2  # w S, q S, k v'; (q.k) v'
        return sum(chunks_of(n) for n in self.lengths) * self.heads * (inside + solve + chain)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of `chunk_kda`."""
        return prefill_inputs(
            self.lengths,
            heads=self.heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            dtype=self.dtype,
            beta_is_raw=True,
            device=device,
            seed=seed,
        )


CPU_PREFILL = (
    PrefillCase("h8_2k", (2048,), 8),
    PrefillCase("h8_short", (7, 64, 65, 130, 33, 1, 255, 90), 8),
    PrefillCase("h2_64", (64,), 2),
)
