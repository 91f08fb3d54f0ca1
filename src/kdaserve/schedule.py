"""The order in which the PyTorch backends work through a packed step: groups of sequences, blocks of steps.

A step is a fixed number of tokens (a chunk, or one token). Sequences of a group are sorted by length, longest first, so that the ones still
running at a step are a prefix. A block holds as many whole steps as fit in the cache; within it, units are ordered by step, then sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor


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


def schedule(lengths: tuple[int, ...], step: int, units_per_block: int, device: torch.device) -> tuple[Group, ...]:
    """Groups for sequences of these `lengths`, `step` tokens a step, about `units_per_block` (sequence, step) pairs a block."""
    starts = [0, *accumulate(lengths)]
    order = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    groups = []
    for i in range(0, len(order), max(1, units_per_block)):
        sequences = tuple(order[i : i + max(1, units_per_block)])
        steps = [-(-lengths[n] // step) for n in sequences]
        blocks = []
        for first, running in _blocks(steps, units_per_block):
            units = [(starts[n], lengths[n], first + j) for j, count in enumerate(running) for n in sequences[:count]]
            blocks.append(_block(first, tuple(running), units, step, device))
        groups.append(Group(sequences, tuple(blocks)))
    return tuple(groups)


def _blocks(steps: list[int], units_per_block: int) -> Iterator[tuple[int, list[int]]]:
    """(first step, number of running sequences for each step) of every block, for sequences of so many steps, longest first."""
    first, running, units, count = 0, list[int](), 0, len(steps)
    for step in range(steps[0]):
        while steps[count - 1] <= step:
            count -= 1
        if running and units + count > units_per_block:
            yield first, running
            first, running, units = step, [], 0
        running.append(count)
        units += count
    yield first, running


def _block(first: int, running: tuple[int, ...], units: list[tuple[int, int, int]], step: int, device: torch.device) -> Block:
    start, length, index = torch.tensor(units, device="cpu").unbind(1)
    tokens = index[:, None] * step + torch.arange(step, device="cpu")
    valid = tokens < length[:, None]
    rows = start[:, None] + tokens.minimum(length[:, None] - 1)
    return Block(first, running, rows.flatten().to(device), None if valid.all() else valid.view(-1, 1, 1).to(device))
