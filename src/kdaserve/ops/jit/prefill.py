"""What the kernels of both prefill ops make of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kdaserve.ops.jit.launch import dense, gate_name
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
    """Runs a call by what `make(call, o, h, snapshots)` gives, which is made once for its layout and `kind`.

    Args:
        fits: whether the output can be written where it belongs; if not it is copied there.
    """
    out, h, snapshots = output(call), new_states(call), snapshots_of(call)
    if call.sizes["N"] == 0:
        return out.zero_(), h
    o = out if fits(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
    key = (make, kind, o is out, *options(call, h, snapshots))
    launches = call.layout.prepared.get(key)
    if launches is None:
        launches = call.layout.prepared[key] = make(call, o, h, snapshots)
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
    return call.snapshots.on(call.q.device) if call.snapshots is not None and len(call.snapshots.slot) else None


def options(call: PrefillCall, h: Tensor | None, snapshots: Snapshots) -> tuple:
    """What sets the launches of calls of one layout apart."""
    dtypes = None if snapshots is None else tuple(x.dtype for x in snapshots)
    return gate_name(call), call.use_qk_l2norm_in_kernel, call.beta_is_raw, h is None, dtypes
