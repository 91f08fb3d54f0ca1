"""The states that a prefill kernel hands out at the boundaries between chunks (S11), without a plan on the host."""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from kdaserve.contract import CHUNK

ENTRIES = 256
"""Snapshots looked at together."""


def saved(sequence: Tensor, tokens: Tensor, slots: Tensor, o_m: Tensor, M: int, i_n: int) -> tuple[Tensor, Tensor]:
    """For snapshots `o_m`: the boundary, in chunks, and the slot, or -1 where another sequence than `i_n` is saved."""
    there = o_m < M
    to = hl.load(slots, [o_m], extra_mask=there).to(torch.int64)
    at = (hl.load(tokens, [o_m], extra_mask=there).to(torch.int64) + (CHUNK - 1)) >> (CHUNK.bit_length() - 1)
    return at, torch.where(there & (hl.load(sequence, [o_m], extra_mask=there) == i_n), to, -1)
