"""The order in which the PyTorch backends work through a packed step: groups of sequences, blocks of steps.

A step is a fixed number of tokens (a chunk, or one token). Sequences of a group are sorted by length, longest first, so that the ones still
running at a step are a prefix. A block holds as many whole steps as fit in the cache; within it, units are ordered by step, then sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kdaserve.ops.gate import activate
from kdaserve.ops.prefill import PrefillCall


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Block:
    """Some steps of a group.

    Attributes:
        first_step: number of its first step.
        running: for each step, how many sequences of the group still run.
        rows: `[units * step]` int64, token row of every place; places past a sequence's end repeat its last row.
        valid: `[units * step, 1, 1]` bool, False at those places; None when there are none.
    """

    first_step: int
    running: tuple[int, ...]
    rows: Tensor
    valid: Tensor | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Group:
    """Sequences that run side by side, longest first."""

    sequences: tuple[int, ...]
    blocks: tuple[Block, ...]


@functools.lru_cache(maxsize=64)
def schedule(lengths: tuple[int, ...], step: int, units_per_block: int, device: torch.device) -> tuple[Group, ...]:
    """Groups for sequences of these `lengths`, `step` tokens a step, about `units_per_block` (sequence, step) pairs a block."""
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    order = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    groups = []
    for i in range(0, len(order), units_per_block):
        sequences = tuple(order[i : i + units_per_block])
        steps = [-(-lengths[n] // step) for n in sequences]
        blocks, first = [], 0
        while first < steps[0]:
            running: list[int] = []
            while first + len(running) < steps[0]:
                n = sum(s > first + len(running) for s in steps)
                if running and sum(running) + n > units_per_block:
                    break
                running.append(n)
            spans = [(starts[n], lengths[n], first + j) for j, count in enumerate(running) for n in sequences[:count]]
            blocks.append(_block(first, tuple(running), spans, step, device))
            first += len(running)
        groups.append(Group(sequences, tuple(blocks)))
    return tuple(groups)


def _block(first: int, running: tuple[int, ...], spans: list[tuple[int, int, int]], step: int, device: torch.device) -> Block:
    start, length, index = (torch.tensor(column) for column in zip(*spans, strict=True))
    tokens = index[:, None] * step + torch.arange(step)
    valid = tokens < length[:, None]
    rows = start[:, None] + tokens.minimum(length[:, None] - 1)
    return Block(first, running, rows.flatten().to(device), None if valid.all() else valid.view(-1, 1, 1).to(device))


def token_inputs(call: PrefillCall, block: Block, step: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, log decay and beta of a block, activated, zero where no token is: each `[units * HV, step, channels]`, contiguous."""

    def rows(x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return x[0].index_select(0, block.rows).to(dtype)
        T = call.sizes["T"]
        return x[block.rows // T, block.rows % T].to(dtype)

    def units(x: Tensor) -> Tensor:
        if block.valid is not None:
            x = torch.where(block.valid, x, 0)
        return x.unflatten(0, (-1, step)).transpose(1, 2).flatten(0, 1).contiguous()

    q, k, g, beta = activate(call, *(rows(x) for x in (call.q, call.k, call.g, call.beta)))
    return units(q), units(k), units(rows(call.v)), units(g), units(beta[..., None])


def scatter(o: Tensor, block: Block, units: Tensor) -> None:
    """Writes `units` `[units, HV, step, V]` to their rows of `o` `[B, T, HV, V]`."""
    tokens = units.transpose(1, 2).flatten(0, 1).to(o.dtype)
    rows = block.rows
    if block.valid is not None:
        kept = block.valid.flatten()
        tokens, rows = tokens[kept], rows[kept]
    if o.shape[0] == 1:
        o[0].index_copy_(0, rows, tokens)
    else:
        o[rows // o.shape[1], rows % o.shape[1]] = tokens


def new_output(call: PrefillCall, lengths: Sequence[int]) -> Tensor:
    """Where a call's output goes, zero at rows that no sequence covers (S4)."""
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format) if call.out is None else call.out
    if sum(lengths) < o.shape[0] * o.shape[1]:
        o[:, sum(lengths) :] = 0  # padding stands at the end of packed input only
    return o


def differentiates(call: PrefillCall) -> bool:
    """Whether autograd records this call."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors.values())
