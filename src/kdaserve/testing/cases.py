"""Named shapes, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from kdaserve.contract import CHUNK
from kdaserve.plan import chunks_of
from kdaserve.snapshots import Snapshots
from kdaserve.testing.inputs import Gate, decode_inputs, prefill_inputs

STATE_SCALE = 0.1
"""Standard deviation of the states that a case starts from."""
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillCase:
    """A prefill step as an engine makes it: gate, L2 norm and sigmoid of beta inside the call, states in a pool.

    Attributes:
        name: what benchmarks and results call it.
        lengths: tokens of each packed sequence.
        heads: H = HV.
        dtype: of the inputs.
        head_dim: K = V.
        pool_dtype: of the states.
        gate: as for `prefill_inputs`.
        snapshot_every: save a state at every multiple of this many tokens of each sequence; 0 saves none.
        variant: "plain", or which entry of `VARIANTS` it is of the case of this name.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    dtype: torch.dtype = torch.float32
    head_dim: int = 128
    pool_dtype: torch.dtype = torch.float32
    gate: Gate = "bounded"
    snapshot_every: int = 0
    variant: str = "plain"

    @property
    def op(self) -> str:
        """The op it calls."""
        return "chunk_kda"

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes that must move: inputs read once, output written once, each sequence's state read and written, each snapshot written."""
        tokens = self.tokens * self.heads * (5 * self.head_dim + 1) * self.dtype.itemsize
        return tokens + (2 * self.sequences + len(self._snapshots())) * self.heads * self.head_dim**2 * self.pool_dtype.itemsize

    @property
    def flops(self) -> float:
        """Floating-point operations of the chunked form (E5 to E11): products only, in chunks of 64 tokens."""
        C, D = CHUNK, self.head_dim
        inside = 2 * C * C * D * 2 / 2 + C**3 / 3  # A and q.k, lower halves; the inverse
        solve = 2 * C * C * D * 2 / 2  # w and u
        chain = 2 * C * D * D * 3 + 2 * C * C * D / 2  # w S, q S, k v'; (q.k) v'
        return sum(chunks_of(n) for n in self.lengths) * self.heads * (inside + solve + chain)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of `chunk_kda`; snapshots are on the device too."""
        saved = self._snapshots()
        call = prefill_inputs(
            self.lengths,
            heads=self.heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            dtype=self.dtype,
            pool_dtype=self.pool_dtype,
            gate=self.gate,
            beta_is_raw=True,
            slots=self.sequences + 2 + len(saved),
            state_scale=STATE_SCALE,
            device=device,
            seed=seed,
        )
        if self.snapshot_every:
            used = set(call["initial_state_indices"].tolist())
            free = (slot for slot in range(len(call["initial_state"])) if slot not in used)
            entries = [(n, t, slot) for (n, t), slot in zip(saved, free, strict=False)]
            call["snapshots"] = Snapshots(*torch.tensor(entries, dtype=torch.int64, device=device).view(-1, 3).unbind(1))
        return call

    def shortened(self, tokens: int) -> PrefillCase:
        """The case itself when it has at most so many tokens, else with its longest sequences cut to their share of them."""
        if self.tokens <= tokens:
            return self
        share = max(1, tokens // self.sequences)
        return dataclasses.replace(self, lengths=tuple(min(n, share) for n in self.lengths))

    def varied(self, variant: str) -> PrefillCase:
        """The same case with what `VARIANTS` changes."""
        return dataclasses.replace(self, variant=variant, **VARIANTS[variant])

    def _snapshots(self) -> list[tuple[int, int]]:
        """(sequence, tokens) of every state to save."""
        step = self.snapshot_every
        return [(n, t) for n, length in enumerate(self.lengths) for t in range(step, length + 1, step)] if step else []


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeCase:
    """A decode step: one token for each of `batch` requests, from the fused projection.

    Attributes:
        batch: requests.
        heads, dtype, head_dim, pool_dtype: as for `PrefillCase`.
    """

    batch: int
    heads: int
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    pool_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """What benchmarks and results call it."""
        return f"h{self.heads}_b{self.batch}_{_SHORT[self.pool_dtype]}"

    @property
    def variant(self) -> str:
        """A decode case has no variants."""
        return "plain"

    @property
    def op(self) -> str:
        """The op it calls."""
        return "packed_decode_kda"

    @property
    def sequences(self) -> int:
        """Number of requests."""
        return self.batch

    @property
    def tokens(self) -> int:
        """One for each request."""
        return self.batch

    @property
    def nbytes(self) -> int:
        """Bytes of the states, each read and written once: nearly all that moves."""
        return 2 * self.batch * self.heads * self.head_dim**2 * self.pool_dtype.itemsize

    @property
    def flops(self) -> float:
        """Floating-point operations of E1 to E4."""
        return 7.0 * self.batch * self.heads * self.head_dim**2

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of `packed_decode_kda`."""
        return decode_inputs(
            self.batch,
            heads=self.heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            dtype=self.dtype,
            pool_dtype=self.pool_dtype,
            slots=self.batch + 8,
            state_scale=STATE_SCALE,
            device=device,
            seed=seed,
        )

    def shortened(self, tokens: int) -> DecodeCase:
        """The case itself, or with at most so many requests."""
        return dataclasses.replace(self, batch=min(self.batch, tokens))


Case = PrefillCase | DecodeCase

VARIANTS: dict[str, dict[str, Any]] = {
    "unbounded": {"gate": "softplus"},
    "snapshots": {"snapshot_every": 512},
    "bf16_pool": {"pool_dtype": torch.bfloat16},
}
"""What a variant of a prefill case changes."""


def grid(heads: Iterable[int], lengths: Iterable[int], sequences: Iterable[int], dtype: torch.dtype) -> tuple[PrefillCase, ...]:
    """A prefill case for every combination."""
    return tuple(PrefillCase(f"h{H}_{N}x{T}", (T,) * N, H, dtype) for H, N, T in itertools.product(heads, sequences, lengths))


_SHORT_LENGTHS = (7, 64, 65, 130, 33, 1, 255, 90)
_MIX = (1300, 547, 2048, 963, 271, 3063)
_GPU_SHAPES: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("h64_8k", (8192,), 64),
    ("h64_mix", _MIX, 64),
    ("h96_8k", (8192,), 96),
    ("h96_8x1k", (1024,) * 8, 96),
    ("h32_8k", (8192,), 32),
    ("h32_short", _SHORT_LENGTHS, 32),
    ("h12_8k", (8192,), 12),
    ("h12_mix", _MIX, 12),
    ("h12_512", (512,), 12),
    ("h12_64", (64,), 12),
    ("h12_64x128", (128,) * 64, 12),
    ("h12_64k", (65536,), 12),
    ("h8_32k", (32768,), 8),
)

CPU_PREFILL = (
    PrefillCase("h8_2k", (2048,), 8),
    PrefillCase("h8_short", _SHORT_LENGTHS, 8),
    PrefillCase("h2_64", (64,), 2),
)
GPU_PREFILL = tuple(PrefillCase(name, lengths, heads, torch.bfloat16) for name, lengths, heads in _GPU_SHAPES)
CPU_DECODE = tuple(DecodeCase(batch, 8, torch.float32) for batch in (1, 8))
GPU_DECODE = tuple(
    DecodeCase(batch, heads, pool_dtype=pool)
    for pool, heads, batch in itertools.product((torch.float32, torch.bfloat16), (12, 32, 64), (1, 8, 32, 128, 256))
)
