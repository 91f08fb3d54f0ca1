"""What a decode call is: its checks, and the record that backends run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kdaserve import contract, values

OP = "packed_decode_kda"


@dataclasses.dataclass(slots=True, kw_only=True)
class DecodeCall(contract.CheckedCall):
    """A checked decode call; the fields are the arguments of `packed_decode_kda` with defaults filled in."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor | None
    initial_state: Tensor
    out: Tensor
    ssm_state_indices: Tensor
    lower_bound: float | None
    beta_is_raw: bool = True

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k `[B, H, K]` and v `[B, HV, V]`, views of `mixed_qkv`."""
        H, HV, K, V = (self.sizes[s] for s in ("H", "HV", "K", "V"))
        q, k, v = self.mixed_qkv.split([H * K, H * K, HV * V], -1)
        return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def checked_call(arguments: Mapping[str, Any]) -> DecodeCall:
    """The checked record of a call given by all its arguments; raises before anything is written (S19)."""
    call = contract.checked_record(DecodeCall, OP, arguments)
    values.check_decode_indices(call, sync=arguments["check"] == "values")
    if arguments["check"] == "values" and call.layout.device.type != "meta":  # no values there; dispatch refuses the device
        values.check_decode_data(call)
    return call
