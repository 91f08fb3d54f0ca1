"""The plan of a prefill step: where its sequences and chunks lie. Made once a step, shared by all layers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kdaserve import guards
from kdaserve.contract import CHUNK, INDICES
from kdaserve.errors import error
from kdaserve.schedule import Group, schedule


@dataclasses.dataclass(frozen=True, eq=False)
class PrefillPlan:
    """Chunk tables of one step, on the device of the call.

    Attributes:
        lengths: tokens of each sequence, on the host; zero is allowed.
        cu_seqlens: `[N+1]` int32, packed boundaries.
        chunk_offsets: `[N+1]` int32, chunks of all earlier sequences.
        chunk_indices: `[NT, 2]` int32, (sequence, chunk within it) of every chunk.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    chunk_offsets: Tensor
    chunk_indices: Tensor
    _schedules: dict[tuple[int, int], tuple[Group, ...]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lengths)

    def schedule(self, step: int, units_per_block: int) -> tuple[Group, ...]:
        """See `kdaserve.schedule`; made at the first call, for all layers."""
        key = step, units_per_block
        if key not in self._schedules:
            with torch.inference_mode(False):  # kept: an inference tensor could not serve a call that autograd records
                self._schedules[key] = schedule(self.lengths, step, units_per_block, self.cu_seqlens.device)
        return self._schedules[key]


def plan_prefill(cu_seqlens: Tensor | None = None, *, lengths: Sequence[int] | None = None, device: torch.device | str | None = None) -> PrefillPlan:
    """Makes the chunk tables of a prefill step.

    Args:
        cu_seqlens: `[N+1]` int32 or int64 packed boundaries. On a GPU reading them is the one device-to-host sync of the step.
        lengths: tokens of each sequence on the host, instead of `cu_seqlens`: no sync. For batched input `[T] * B`.
        device: where the tables go; default the device of `cu_seqlens`, or the CPU.

    Returns:
        A plan to pass as ``plan=`` to every layer's call of the step.

    Raises:
        ContractError: KDA126 when not exactly one of the two is given, or a length is negative or no integer.
        ValuesError: KDA303 when `cu_seqlens` does not start at 0 or decreases.

    Example:
        >>> plan_prefill(lengths=[130, 0, 64]).chunk_offsets.tolist()
        [0, 3, 3, 4]
    """
    if (cu_seqlens is None) == (lengths is None):
        raise error("KDA126", problem="give `cu_seqlens` or `lengths`, and not both")
    if cu_seqlens is not None:
        if not guards.is_tensor(cu_seqlens) or cu_seqlens.dtype not in INDICES or cu_seqlens.ndim != 1 or not len(cu_seqlens):
            hint = "; for a list of lengths write `lengths=`" if isinstance(cu_seqlens, (list, tuple)) else ""
            raise error("KDA126", problem=f"`cu_seqlens` must be a one-dimensional int32 or int64 tensor with at least one entry{hint}")
        if not guards.has_storage(cu_seqlens):
            raise error("KDA126", problem="`cu_seqlens` is on the meta device and holds no boundaries")
        host = sequence_lengths("plan_prefill", cu_seqlens)
        device = cu_seqlens.device if device is None else device
    else:
        assert lengths is not None
        if not isinstance(lengths, Sequence):
            raise error("KDA126", problem=f"`lengths` must be a list of whole numbers, got {type(lengths).__name__}")
        for n in lengths:
            if isinstance(n, bool) or not isinstance(n, int) or n < 0:
                raise error("KDA126", problem=f"`lengths` holds {n!r}; a length is a whole number >= 0")
        host = tuple(lengths)
    try:
        return _tables(host, torch.device("cpu" if device is None else device))
    except RuntimeError as unknown:
        raise error("KDA126", problem=f"`device` is {device!r}: {str(unknown).splitlines()[0]}") from unknown


def sequence_lengths(op: str, cu_seqlens: Tensor, rows: int | None = None) -> tuple[int, ...]:
    """Lengths on the host (a sync on a GPU); KDA303 when the boundaries are out of order or pass `rows`."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise error("KDA303", op=op, problem=f"starts at {bounds[0]}, not at 0")
    lengths = tuple(b - a for a, b in itertools.pairwise(bounds))
    for n, length in enumerate(lengths):
        if length < 0:
            raise error("KDA303", op=op, problem=f"decreases from {bounds[n]} to {bounds[n + 1]} at entry {n + 1}")
    if rows is not None and bounds[-1] > rows:
        raise error("KDA303", op=op, problem=f"ends at {bounds[-1]}, the tensors have {rows} rows")
    return lengths


def chunks_of(length: int) -> int:
    """Number of chunks of a sequence."""
    return -(-length // CHUNK)


def _tables(lengths: tuple[int, ...], device: torch.device) -> PrefillPlan:
    def running_sum(values: Sequence[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(values)], dtype=torch.int32, device=device)

    counts = [chunks_of(n) for n in lengths]
    chunks = [(n, c) for n, count in enumerate(counts) for c in range(count)]
    with torch.inference_mode(False):
        indices = torch.tensor(chunks, dtype=torch.int32, device=device).view(-1, 2)
        return PrefillPlan(lengths, running_sum(lengths), running_sum(counts), indices)
