"""The calls that a model given by the arguments of `kdaserve.warmup` may make: any lengths, batches, strides and alignments."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import kdaserve
from conftest import Call
from kdaserve import Snapshots

LENGTHS = (1, 63, 64, 65, 5000)
"""What every layout of every prefill op sees; further lengths are drawn."""
BATCHES = (1, 2, 3, 4, 5, 6, 11, 12, 17, 33, 64)
MOST_TOKENS = 20_000
ALIGNED = ((0, 0, 0), (8, 0, 1), (0, 8, 0), (16, 16, 3))
MEMORIES = (*ALIGNED, (3, 0, 0), (8, 1, 0), (5, 2, 2), (16, 3, 1))
"""Columns of a row that belong to other tensors, columns before the tensor, rows of a batch row that belong to others; `ALIGNED`
is what vector loads can read."""


class Served:
    """Draws calls of a model."""

    def __init__(self, settings: dict[str, Any], seed: int = 0) -> None:
        defaults = {name: p.default for name, p in inspect.signature(kdaserve.warmup).parameters.items()}
        self.given = {**defaults, **settings}
        self.H = self.given["heads"]
        self.HV = self.given["v_heads"] or self.H
        self.K, self.V = self.given["k_dim"], self.given["v_dim"]
        self.random = random.Random(seed)
        self.memories = MEMORIES

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Calls of all ops: every length of `LENGTHS`, every batch of `BATCHES`, drawn lengths, all kinds of memory; decode batches 0 to 64."""
        for op, call in self._calls():
            yield op, call()
            self.memories = self.random.choice((ALIGNED, MEMORIES))

    def _calls(self) -> Iterator[tuple[str, Callable[[], Call]]]:
        for op in self.given["ops"]:
            if op == "packed_decode_kda":
                yield from ((op, functools.partial(self.decode, B)) for B in range(65))
                continue
            for layout in self.given["layouts"]:
                for lengths in self.lengths(layout):
                    yield op, functools.partial(self.prefill, lengths, layout == "packed")

    def lengths(self, layout: str) -> Iterator[list[int]]:
        for length in LENGTHS:
            for N in self.random.sample(BATCHES, 3):
                yield [length] * min(N, MOST_TOKENS // length)
        for N in BATCHES * 3:
            most = MOST_TOKENS // N
            if layout == "batched":
                yield [self.random.randint(1, min(5000, most))] * N
            else:
                yield [self.random.choice((0, 1, 64, self.random.randint(1, min(5000, most)))) for _ in range(N)]

    def prefill(self, lengths: Sequence[int], packed: bool) -> Call:
        N, H, HV, K, V = len(lengths), self.H, self.HV, self.K, self.V
        rows = (1, sum(lengths) + self.random.randint(0, 2)) if packed else (N, lengths[0])
        widths = [H * K, H * K, HV * V]
        q, k, v = self.cut(*rows, sum(widths), dtype=self.given["dtype"]).split(widths, -1)
        longer = rows[0], rows[1] + self.random.randint(0, 3)
        call: Call = {
            "q": q.unflatten(-1, (H, K)),
            "k": k.unflatten(-1, (H, K)),
            "v": v.unflatten(-1, (HV, V)),
            "g": self.cut(*longer, HV * K, dtype=self.given["g_dtype"] or self.given["dtype"]).unflatten(-1, (HV, K)),
            "beta": self.cut(*longer, HV, dtype=self.given["beta_dtype"] or self.given["dtype"]),
            "use_qk_l2norm_in_kernel": self.given["use_qk_l2norm_in_kernel"],
            "beta_is_raw": self.given["beta_is_raw"],
            **(self.gate() if self.given["A_log"] else {}),
            **self.states(N, slots=3 * N),
        }
        call["initial_state_indices"] = self.integers([n if self.random.random() < 0.8 else -1 for n in range(N)])
        if packed and self.random.random() < 0.5:
            call["cu_seqlens"] = self.integers([sum(lengths[:n]) for n in range(N + 1)])
        elif packed and torch.int32 in self.given["index_dtypes"]:
            call["plan"] = kdaserve.plan_prefill(lengths=lengths, device=self.given["device"])
        elif packed:
            call["cu_seqlens"] = self.integers([sum(lengths[:n]) for n in range(N + 1)])
        if self.given["output_intermediate_states"] and self.random.random() < 0.5:
            call["output_intermediate_states"] = True
        if self.given["track_state"] and self.random.random() < 0.5:
            call["track_state"] = self.cut(N, HV * V * K, dtype=torch.float32).unflatten(-1, (HV, V, K))
            call["track_chunk_idx"] = self.integers([0 if length and self.random.random() < 0.8 else -1 for length in lengths])
        if self.given["snapshots"] and self.random.random() < 0.5:
            call["snapshots"] = self.snapshots(lengths)
        if self.random.random() < 0.3:
            call["out"] = v.unflatten(-1, (HV, V))
        return call

    def snapshots(self, lengths: Sequence[int]) -> Snapshots:
        N = len(lengths)
        chosen = self.random.sample(range(N), self.random.randint(1, N))
        entries = chosen, [self.random.choice((0, lengths[n] // 64 * 64, lengths[n])) for n in chosen], [N + n for n in chosen]
        if torch.int64 in self.given["index_dtypes"] and self.random.random() < 0.5:
            return Snapshots(*entries)
        dtype = self.random.choice(self.given["index_dtypes"])
        return Snapshots(*(torch.tensor(values, dtype=dtype, device=self.given["device"]) for values in entries))

    def decode(self, B: int) -> Call:
        H, HV, K, V = self.H, self.HV, self.K, self.V
        return {
            "mixed_qkv": self.cut(B, 2 * H * K + HV * V, dtype=self.given["dtype"]),
            "a": self.cut(B, HV * K, dtype=self.given["g_dtype"] or self.given["dtype"]),
            "b": self.cut(B, HV, dtype=self.given["beta_dtype"] or self.given["dtype"]),
            "scale": self.random.choice((None, 1.0)),
            "out": torch.zeros(B, 1, HV, V, dtype=self.given["dtype"], device=self.given["device"]),
            "use_qk_l2norm_in_kernel": self.given["use_qk_l2norm_in_kernel"],
            "ssm_state_indices": self.integers([n if self.random.random() < 0.8 else -1 for n in range(B)]),
            **self.gate(),
            **self.states(B, slots=B + 1),
        }

    def states(self, N: int, slots: int) -> Call:
        pool = self.cut(slots, self.HV * self.V * self.K, dtype=self.given["pool_dtype"])
        return {"initial_state": pool.unflatten(-1, (self.HV, self.V, self.K))}

    def gate(self) -> Call:
        bias = self.cut(self.HV * self.K, dtype=torch.float32) if self.given["dt_bias"] else None
        return {"A_log": self.cut(self.HV, dtype=torch.float32), "dt_bias": bias, "lower_bound": self.given["lower_bound"]}

    def cut(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor somewhere in a larger one."""
        columns, offset, rows = self.random.choice(self.memories)
        room = [*shape[:-1], offset + shape[-1] + columns]
        if len(shape) == 3:
            room[1] += rows
        buffer = torch.empty(room, dtype=dtype, device=self.given["device"])[..., offset : offset + shape[-1]]
        return buffer[:, : shape[1]] if len(shape) == 3 else buffer

    def integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=self.random.choice(self.given["index_dtypes"]), device=self.given["device"])
