"""What the Triton kernels of both prefill ops make of a call."""

from __future__ import annotations

from torch import Tensor

from kdaserve.ops.jit.launch import gate_name
from kdaserve.ops.prefill import PrefillCall


def snapshots_of(call: PrefillCall) -> tuple[Tensor, Tensor, Tensor] | None:
    """Sequence, tokens and slot of the snapshots of a call, on its device; None where it has none, so that kernels are compiled without them."""
    return call.snapshots.on(call.q.device) if call.snapshots is not None and len(call.snapshots.slot) else None


def options(call: PrefillCall, h: Tensor | None, snapshots: tuple[Tensor, ...] | None) -> tuple:
    """What sets the launches of calls of one layout apart."""
    dtypes = None if snapshots is None else tuple(x.dtype for x in snapshots)
    return gate_name(call), call.use_qk_l2norm_in_kernel, call.beta_is_raw, h is None, dtypes
