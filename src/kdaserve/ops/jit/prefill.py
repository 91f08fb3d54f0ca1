"""What the kernels of both prefill ops make of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kdaserve.ops.jit.launch import dense
from kdaserve.ops.prefill import PrefillCall
from kdaserve.ops.tokens import new_states, output

Snapshots = tuple[Tensor, Tensor, Tensor] | None


class Launches(Protocol):
    """Runs all calls of one layout and kind."""

    def __call__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: Snapshots) -> None:
        """Writes `o`, `h`, and what else the call names."""


def run(
    call: PrefillCall, make: Callable[..., Launches], *kind: Any, fits: Callable[[Tensor], bool] = lambda o: True
) -> tuple[Tensor, Tensor | None]:
    """Runs a call by what `make(call, o, h, snapshots)` gives, which is made once for its layout, its options and `kind`.

    Args:
        fits: whether an output that the caller gives can be written where it is; if not it is copied there.
    """
    out, h, snapshots = output(call), new_states(call), snapshots_of(call)
    if call.sizes["N"] == 0:
        return out.zero_(), h
    o = out if call.out is None or fits(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
    launches = call.layout.once((make, kind, o is out, dtypes_of(snapshots)), lambda: make(call, o, h, snapshots))
    launches(call, o, h, snapshots)
    if o is not out:
        out.copy_(o)
    return out, h


def state_pointers(call: PrefillCall, h: Tensor | None, snapshots: Snapshots) -> list[Tensor | None]:
    """What pointers to states handed out stand for: h, its offsets, `track_state`, its chunks; sequence, tokens and slot of the snapshots."""
    offsets = None if h is None else call.host_plan().chunk_offsets
    return [h, offsets, call.track_state, dense(call.track_chunk_idx), *(snapshots or (None, None, None))]


def snapshots_of(call: PrefillCall) -> Snapshots:
    """Sequence, tokens and slot of the snapshots of a call, on its device; None where it has none, so that kernels are compiled without them."""
    return call.snapshots.on(call.q.device, call.op) if call.snapshots is not None and len(call.snapshots.slot) else None


def dtypes_of(snapshots: Snapshots) -> tuple[torch.dtype, ...] | None:
    """Dtypes of the tensors of snapshots, None where there are none: what of them is no part of the layout."""
    return None if snapshots is None else tuple(x.dtype for x in snapshots)
