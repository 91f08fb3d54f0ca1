"""Who is measured: our backends and public peers, as one table each, behind one interface."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kdaserve import calls, dispatch
from kdaserve.errors import KdaError
from kdaserve.plan import plan_prefill

Arguments = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A call on tensors of its own, ready to be made again and again.

    Attributes:
        call: what is timed.
        reset: puts back what the call writes.
        read: from what the call returned, the output and the states of `slots_of`, in that order.
        with_pool: the same call on another pool; None for a function without one.
    """

    call: Callable[[], Any]
    reset: Callable[[], None]
    read: Callable[[Any], tuple[Tensor, Tensor]]
    with_pool: Callable[[Tensor], Any] | None = None


class UnableError(Exception):
    """A provider does not run here, or not this call; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Provider:
    """Something that computes an op.

    Attributes:
        name: of the backend or of the peer.
        peer: whether it is someone else's.
        prepare: makes a run from the arguments of our op; raises `UnableError`.
    """

    name: str
    peer: bool
    prepare: Callable[[Arguments], Run]


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A function of another library: where it is, and how our arguments become its own."""

    name: str
    op: str
    module: str
    function: str
    adapter: Callable[[Callable[..., Any], Arguments], Run]

    def prepare(self, arguments: Arguments) -> Run:
        """See `Provider`."""
        try:
            function = getattr(importlib.import_module(self.module), self.function)
        except ImportError as missing:
            raise UnableError(f"not installed: {missing}") from missing
        return self.adapter(function, arguments)


def slots_of(arguments: Arguments) -> Tensor:
    """The slots whose states a call writes: of its sequences or requests, then of its snapshots."""
    if "ssm_state_indices" in arguments:
        return arguments["ssm_state_indices"].long()
    own, snapshots = arguments["initial_state_indices"].long(), arguments.get("snapshots")
    return own if snapshots is None else torch.cat([own, snapshots.slot.to(own.device)])


def in_pool(function: Callable[..., Any], arguments: Arguments) -> Run:
    """A function that takes our keywords and updates the pool in place. It may write over `v`, as SGLang's do."""
    written = {name: arguments[name].clone() for name in ("initial_state", "v", "out") if name in arguments}
    rest = {name: value for name, value in arguments.items() if name not in written}
    slots = slots_of(arguments)

    def reset() -> None:
        for name, tensor in written.items():
            tensor.copy_(arguments[name])

    def read(result: Any) -> tuple[Tensor, Tensor]:
        return result[0] if isinstance(result, tuple) else result, written["initial_state"][slots]

    def with_pool(pool: Tensor) -> Any:
        return function(**{**rest, **written, "initial_state": pool})

    return Run(functools.partial(function, **rest, **written), reset, read, with_pool)


def sglang_prefill(function: Callable[..., Any], arguments: Arguments) -> Run:
    """SGLang's prefill: our contract, without snapshots. It gets beta with the sigmoid taken, which spares it a launch."""
    if "snapshots" in arguments:
        raise UnableError("saves no snapshots")
    changed = {name: value for name, value in arguments.items() if name != "beta_is_raw"}
    return in_pool(function, changed | {"beta": arguments["beta"].float().sigmoid()})


def fla_prefill(function: Callable[..., Any], arguments: Arguments) -> Run:
    """Flash Linear Attention: states in and out as tensors of their own, one for each sequence; beta as for SGLang."""
    if "snapshots" in arguments:
        raise UnableError("saves no snapshots")
    bounded, cu_seqlens = arguments["lower_bound"] is not None, arguments["cu_seqlens"].long()
    packed = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens.cpu()} if len(cu_seqlens) > 2 else {}
    call = functools.partial(
        function,
        **{name: arguments[name] for name in ("q", "k", "v", "g", "A_log", "dt_bias", "use_qk_l2norm_in_kernel", "lower_bound")},
        beta=arguments["beta"].float().sigmoid().to(arguments["beta"].dtype),
        initial_state=arguments["initial_state"][slots_of(arguments)],
        output_final_state=True,
        use_gate_in_kernel=True,
        safe_gate=bounded,
        state_v_first=True,
        **packed,
    )
    return Run(torch.inference_mode()(call), lambda: None, lambda result: result[:2])


_SGLANG = "sglang.kernels.ops.attention"
PEERS: tuple[Peer, ...] = (
    Peer("fla", "chunk_kda", "fla.ops.kda", "chunk_kda", fla_prefill),
    Peer("sgl_triton", "chunk_kda", f"{_SGLANG}.fla.kda", "chunk_kda", sglang_prefill),
    Peer("sgl_helion", "chunk_kda", f"{_SGLANG}.helion.kda_prefill", "chunk_kda", sglang_prefill),
    Peer("sgl_triton", "packed_decode_kda", f"{_SGLANG}.fla.fused_recurrent", "fused_recurrent_kda_packed_decode", in_pool),
    Peer("sgl_helion", "packed_decode_kda", f"{_SGLANG}.helion.kda_decode", "helion_fused_recurrent_kda_packed_decode", in_pool),
)
"""Public implementations that are measured where they are installed."""


def peer_names() -> list[str]:
    """Names in `PEERS`, each once."""
    return list(dict.fromkeys(peer.name for peer in PEERS))


def automatic_backends(op: str, device: torch.device) -> list[str]:
    """The backends that can run here and that ``backend="auto"`` may pick for an op on a device."""
    return [b.name for b in dispatch.BACKENDS if op in b.ops and device.type in b.automatic and b.unavailable() is None]


def providers(op: str, backends: list[str], peers: list[str]) -> list[Provider]:
    """Our backends and the peers of an op, by name."""
    ours = [Provider(name, False, functools.partial(_our_run, op, name)) for name in backends]
    return ours + [Provider(peer.name, True, peer.prepare) for peer in PEERS if peer.op == op and peer.name in peers]


def _our_run(op: str, backend: str, arguments: Arguments) -> Run:
    """A backend, with the plan that the layers of a step share."""
    if op == "chunk_kda":
        cu_seqlens = arguments["cu_seqlens"]
        arguments = {**arguments, "plan": plan_prefill(cu_seqlens)}
    try:
        dispatch.choose(calls.checked_call(op, arguments), backend)
    except KdaError as refused:
        raise UnableError(str(refused)) from refused
    return in_pool(functools.partial(calls.OPS[op], backend=backend), arguments)


def exact_results(op: str, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Output and states of the recurrence in float64, from the same inputs."""
    wide = ("q", "k", "v", "g", "beta", "initial_state", "mixed_qkv", "a", "b", "out")
    exact = {name: value.double() if name in wide else value for name, value in arguments.items()}
    run = _our_run(op, "reference", exact)
    return run.read(run.call())
