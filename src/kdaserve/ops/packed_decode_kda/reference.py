"""The judge of decode: E1 to E4 in float64."""

from __future__ import annotations

from kdaserve.ops.chunk_kda.reference import token
from kdaserve.ops.gate import activate
from kdaserve.ops.packed_decode_kda.api import DecodeCall


def run(call: DecodeCall) -> None:
    """Runs a decode call; see `packed_decode_kda`."""
    HV, K = call.sizes["HV"], call.sizes["K"]
    q, k, v = (x.double() for x in call.qkv())
    q, k, g, beta = activate(call, q, k, call.a.double().unflatten(-1, (HV, K)), call.b.double())
    call.out.zero_()
    for row, slot in enumerate(call.ssm_state_indices.tolist()):
        if slot >= 0:
            S, o = token(call.initial_state[slot].double(), q[row], k[row], v[row], g[row], beta[row], call.scale)
            call.initial_state[slot] = S.to(call.initial_state.dtype)
            call.out[row, 0] = o.to(call.out.dtype)
