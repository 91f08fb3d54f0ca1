"""States of a prefill: where they come from and where they go (S1, S2, S3, S11), for the backends written in PyTorch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kdaserve.contract import CHUNK
from kdaserve.ops.prefill import PrefillCall
from kdaserve.plan import chunks_of


class States:
    """Reads initial states and collects the ones to hand out; the pool is written once, by `commit`, after all reads."""

    def __init__(self, call: PrefillCall, dtype: torch.dtype) -> None:
        plan = call.host_plan()
        self._call, self._dtype = call, dtype
        self._slots = call.initial_state_indices.tolist()
        self._chunks = [chunks_of(n) for n in plan.lengths]
        self._offsets = [0, *accumulate(self._chunks)]
        self._slots_to_write: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._tracked: set[tuple[int, int]] = set()
        self._pool_writes: list[tuple[list[int], Tensor]] = []
        self._track_writes: list[tuple[list[int], Tensor]] = []
        for n, slot in enumerate(self._slots):
            if slot >= 0 and self._chunks[n]:
                self._slots_to_write[n, self._chunks[n]].append(slot)
        if call.snapshots is not None:
            for n, tokens, slot in call.snapshots.entries():
                self._slots_to_write[n, chunks_of(tokens)].append(slot)
        if call.track_chunk_idx is not None:
            self._tracked = {(n, c) for n, c in enumerate(call.track_chunk_idx.tolist()) if c >= 0}
        self.h: Tensor | None = None
        if call.output_intermediate_states:
            self.h = call.k.new_empty(self._offsets[-1], *call.initial_state.shape[1:])
        for n in [n for n, chunks in enumerate(self._chunks) if not chunks and (n, 0) in self._slots_to_write]:
            self._keep(0, [n], self.initial([n]))

    def initial(self, sequences: Sequence[int]) -> Tensor:
        """`[n, HV, V, K]`: the states that `sequences` start from; zero for padding."""
        pool, named = self._call.initial_state, [self._slots[n] for n in sequences]
        if max(named) < 0:
            return pool.new_zeros(len(named), *pool.shape[1:], dtype=self._dtype)
        slots = torch.tensor(named, device=pool.device)
        S = pool.index_select(0, slots.clamp_min(0)).to(self._dtype)
        return S.masked_fill((slots < 0)[:, None, None, None], 0)

    def boundary(self, tokens: int, sequences: Sequence[int], running: int, S: Tensor) -> Tensor:
        """Keeps what the call asks for of `S` `[n, HV, V, K]`, the states of the first n `sequences` after so many tokens.

        The first `running` of them go on; the others have ended. Returns the states of those that go on.
        """
        if running < len(S):
            self._keep(chunks_of(tokens), sequences[running : len(S)], S[running:])
            S = S[:running]
        if tokens % CHUNK == 0:
            self._keep(tokens // CHUNK, sequences[:running], S)
        return S

    def _keep(self, chunks: int, sequences: Sequence[int], S: Tensor) -> None:
        self._keep_slots(chunks, sequences, S)
        self._keep_tracked(chunks, sequences, S)
        if self.h is not None:
            chosen = [i for i, n in enumerate(sequences) if chunks < self._chunks[n]]
            if chosen:
                self.h[[self._offsets[sequences[i]] + chunks for i in chosen]] = S[chosen].to(self.h.dtype)

    def _keep_slots(self, chunks: int, sequences: Sequence[int], S: Tensor) -> None:
        chosen = [(i, slot) for i, n in enumerate(sequences) for slot in self._slots_to_write.get((n, chunks), ())]
        if chosen:
            self._pool_writes.append(([slot for _, slot in chosen], S[[i for i, _ in chosen]]))

    def _keep_tracked(self, chunks: int, sequences: Sequence[int], S: Tensor) -> None:
        chosen = [i for i, n in enumerate(sequences) if (n, chunks) in self._tracked]
        if chosen:
            self._track_writes.append(([sequences[i] for i in chosen], S[chosen]))

    def commit(self) -> Tensor | None:
        """Writes the slots and tracked states; returns `h` `[B, NT, HV, V, K]` if asked for."""
        _write(self._call.initial_state, self._pool_writes)
        if self._call.track_state is not None:
            _write(self._call.track_state, self._track_writes)
        if self.h is None:
            return None
        B = self._call.sizes["B"]
        return self.h.unflatten(0, (B, len(self.h) // max(B, 1)))


def _write(target: Tensor, writes: list[tuple[list[int], Tensor]]) -> None:
    if writes:
        rows = torch.tensor([row for rows, _ in writes for row in rows], device=target.device)
        target.index_copy_(0, rows, torch.cat([S for _, S in writes]).to(target.dtype))
