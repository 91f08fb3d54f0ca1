"""Kimi Delta Attention kernels for serving: prefill and decode over indexed state pools."""

from kdaserve import guards
from kdaserve.calls import Choice, explain_choice
from kdaserve.dispatch import BackendStatus, backends
from kdaserve.errors import (
    BackendError,
    ContractError,
    ContractTypeError,
    InternalError,
    KdaError,
    PoolError,
    TuningError,
    ValuesError,
    explain,
)
from kdaserve.ops.chunk_kda.api import chunk_kda
from kdaserve.ops.packed_decode_kda.api import packed_decode_kda
from kdaserve.ops.recurrent_kda.api import recurrent_kda
from kdaserve.plan import PrefillPlan, plan_prefill
from kdaserve.pool import StatePool
from kdaserve.snapshots import Snapshots
from kdaserve.warm import WarmupReport, warmup

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "BackendStatus",
    "Choice",
    "ContractError",
    "ContractTypeError",
    "InternalError",
    "KdaError",
    "PoolError",
    "PrefillPlan",
    "Snapshots",
    "StatePool",
    "TuningError",
    "ValuesError",
    "WarmupReport",
    "backends",
    "chunk_kda",
    "explain",
    "explain_choice",
    "guards",
    "packed_decode_kda",
    "plan_prefill",
    "recurrent_kda",
    "warmup",
]
