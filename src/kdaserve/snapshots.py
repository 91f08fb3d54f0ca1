"""Which states a prefill saves on its way, for prefix caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kdaserve import guards
from kdaserve.contract import INDICES
from kdaserve.errors import dtype_name, error


@dataclasses.dataclass(frozen=True, init=False, repr=False, eq=False)
class Snapshots:
    """Save the state after `tokens[i]` tokens of sequence `sequence[i]` into slot `slot[i]` of the pool.

    Args:
        sequence: `[M]` number of the sequence in the call.
        tokens: `[M]` tokens of that sequence after which to save: a multiple of 64 up to its length, or the length itself.
            0 saves the state the sequence starts from.
        slot: `[M]` slot to write, in the pool's dtype; negative = unused entry (for calls of fixed capacity). It must not be the slot of a
            sequence of the same call, nor be named twice.

    Each is a list of integers or an int32 or int64 tensor; several entries may name one sequence. Ranges are checked when the entries are
    on the host, and with ``check="values"`` anywhere. In a CUDA graph they must be tensors on the device, which each replay reads anew.

    Raises:
        ContractError: KDA119 when the three differ in length or hold anything but integers.

    Example:
        >>> Snapshots(sequence=[0, 0], tokens=[64, 128], slot=[5, 6])
        Snapshots(sequence=[0, 0], tokens=[64, 128], slot=[5, 6])
    """

    sequence: Tensor
    tokens: Tensor
    slot: Tensor
    _copies: dict[tuple[str, torch.device], tuple[Tensor, Tensor]]

    def __init__(self, sequence: Sequence[int] | Tensor, tokens: Sequence[int] | Tensor, slot: Sequence[int] | Tensor) -> None:
        for name, values in (("sequence", sequence), ("tokens", tokens), ("slot", slot)):
            object.__setattr__(self, name, _integers(name, values))
        object.__setattr__(self, "_copies", {})
        if not len(self.sequence) == len(self.tokens) == len(self.slot):
            counts = f"{len(self.sequence)}, {len(self.tokens)} and {len(self.slot)}"
            raise error("KDA119", problem=f"`sequence`, `tokens` and `slot` have {counts} entries; one of each makes a snapshot")

    @property
    def on_host(self) -> bool:
        """Whether reading the entries costs no device sync."""
        return all(t.device.type == "cpu" for t in (self.sequence, self.tokens, self.slot))

    def on(self, device: torch.device, op: str) -> tuple[Tensor, Tensor, Tensor]:
        """`sequence`, `tokens` and `slot`, dense, on the device of a call; what is on the host is copied there once, and again only if it changed.

        Raises: KDA107 when they are on another device, or on the host while a CUDA graph is captured, whose copy would not follow.
        """
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        for name in ("sequence", "tokens", "slot"):
            found = getattr(self, name).device
            if found != device and (captured or found.type != "cpu"):
                raise error("KDA107", op=op, argument=f"snapshots.{name}", got=found, expected=device, source="q")
        return self._on("sequence", device), self._on("tokens", device), self._on("slot", device)

    def _on(self, name: str, device: torch.device) -> Tensor:
        values: Tensor = getattr(self, name)
        if values.device == device:
            return values.contiguous()
        known = self._copies.get((name, device))
        if known is None or not torch.equal(known[0], values):
            known = self._copies[name, device] = values.clone(), values.to(device).contiguous()
        if device.type == "cuda":  # made on the stream of the first call; memory is not given away while this one still reads it
            known[1].record_stream(torch.cuda.current_stream(device))
        return known[1]

    def rows(self) -> list[tuple[int, int, int]]:
        """All entries as (sequence, tokens, slot), unused ones too; a sync when they are on a GPU."""
        return list(zip(self.sequence.tolist(), self.tokens.tolist(), self.slot.tolist(), strict=True))

    def entries(self) -> list[tuple[int, int, int]]:
        """The used entries among `rows`."""
        return [row for row in self.rows() if row[2] >= 0]

    def __repr__(self) -> str:
        return f"Snapshots(sequence={self.sequence.tolist()}, tokens={self.tokens.tolist()}, slot={self.slot.tolist()})"


def _integers(name: str, values: Sequence[int] | Tensor) -> Tensor:
    if isinstance(values, Tensor):
        if not guards.has_storage(values) or values.dtype not in INDICES or values.ndim != 1:
            got = f"{values.ndim}D {dtype_name(values.dtype)} on {values.device}"
            raise error("KDA119", problem=f"`{name}` must be a dense one-dimensional int32 or int64 tensor with values, got {got}")
        return values
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise error("KDA119", problem=f"`{name}` must be a list of integers or an integer tensor, got {values!r}")
    if any(abs(v) >= 2**63 for v in values):
        raise error("KDA119", problem=f"`{name}` holds a number that is no int64: {list(values)}")
    return torch.tensor(values, dtype=torch.int64, device="cpu")
