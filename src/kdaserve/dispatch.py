"""The backend table: what there is, what can run here, what takes a call, and which one `auto` picks."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from kdaserve.errors import KdaError, error

OPS = ("chunk_kda", "recurrent_kda", "packed_decode_kda")


class Call(Protocol):
    """What dispatch needs to know of a checked call; each op has its own record."""

    op: str
    sizes: Mapping[str, int]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the call by name; the first one tells its device and dtype."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One row of the table. Importing the row imports nothing of the backend."""

    name: str
    role: str
    module: str
    """Module of an op, with ``{op}`` to fill in; it has ``run(call)``."""
    automatic: bool
    """Whether ``backend="auto"`` may pick it."""
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    gradients: bool
    unavailable: Callable[[], str | None] = lambda: None
    """The reason why it cannot run on this machine, or None."""

    def refusal(self, call: Call) -> dict[str, str] | None:
        """None when it takes the call, else what is required, supported and missing."""
        tensors = call.tensors
        first = next(iter(tensors.values()))
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
        missing = []
        if first.device.type not in self.devices:
            missing.append(f"device {first.device.type}")
        missing += [f"{name} in {str(t.dtype)[6:]}" for name, t in tensors.items() if t.is_floating_point() and t.dtype not in self.dtypes]
        if needs_grad and not self.gradients:
            missing.append("gradients")
        if not missing:
            return None
        required = f"device {first.device.type}, {str(first.dtype)[6:]} inputs{', gradients' if needs_grad else ''}"
        supported = f"devices {', '.join(self.devices)}; {', '.join(str(d)[6:] for d in self.dtypes)}{'; gradients' if self.gradients else ''}"
        return {"required": required, "supported": supported, "missing": ", ".join(missing)}


_ANY_DEVICE = ("cpu", "cuda", "xpu", "mps")
_ALL_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="torch",
        role="chunked, in plain PyTorch; the default without a GPU backend; differentiable",
        module="kdaserve.ops.{op}.torch",
        automatic=True,
        devices=_ANY_DEVICE,
        dtypes=_ALL_FLOATS,
        gradients=True,
    ),
    Backend(
        name="reference",
        role="the recurrence in float64, token by token; the judge, not for serving",
        module="kdaserve.ops.{op}.reference",
        automatic=False,
        devices=("cpu", "cuda", "xpu"),
        dtypes=_ALL_FLOATS,
        gradients=True,
    ),
)
"""Best first: ``auto`` takes the first automatic row that can run here and takes the call."""


@dataclasses.dataclass(frozen=True, slots=True)
class BackendStatus:
    """Whether a backend can run on this machine.

    Attributes:
        name, role: from the table.
        available: whether it can run here.
        reason: why not, or an empty string.
        automatic: whether ``backend="auto"`` may pick it.
    """

    name: str
    role: str
    available: bool
    reason: str
    automatic: bool


def backends() -> tuple[BackendStatus, ...]:
    """All backends, best first, and whether each can run on this machine."""

    def status(b: Backend) -> BackendStatus:
        reason = b.unavailable()
        return BackendStatus(b.name, b.role, reason is None, reason or "", b.automatic)

    return tuple(status(b) for b in BACKENDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What a call would run on.

    Attributes:
        backend: the name of the chosen backend.
        reasons: for every backend, why it was chosen or passed over.
    """

    backend: str
    reasons: dict[str, str]


def choose(call: Call, name: str) -> Backend:
    """The backend that runs `call`: the one named, never another (S20), or with ``"auto"`` the best that takes it.

    Raises: KDA201 (no such backend), KDA202 (cannot run here), KDA203 (does not take the call), KDA204 (none takes it).
    """
    if name == "auto":
        return _choose_automatically(call)[0]
    backend = next((b for b in BACKENDS if b.name == name), None)
    if backend is None:
        raise error("KDA201", op=call.op, got=repr(name), known=", ".join(["auto", *(b.name for b in BACKENDS)]))
    reason = backend.unavailable()
    if reason is not None:
        raise error("KDA202", op=call.op, backend=name, reason=reason)
    refusal = backend.refusal(call)
    if refusal is not None:
        raise error("KDA203", op=call.op, backend=name, **refusal)
    return backend


def _choose_automatically(call: Call) -> tuple[Backend, dict[str, str]]:
    chosen, reasons = None, {}
    for backend in BACKENDS:
        if not backend.automatic:
            reasons[backend.name] = "runs only when named"
        elif (unavailable := backend.unavailable()) is not None:
            reasons[backend.name] = f"cannot run here: {unavailable}"
        elif (refusal := backend.refusal(call)) is not None:
            reasons[backend.name] = f"does not take {refusal['missing']}"
        elif chosen is None:
            chosen = backend
            reasons[backend.name] = "the best that takes the call"
        else:
            reasons[backend.name] = f"takes the call; {chosen.name} is better"
    if chosen is None:
        raise error("KDA204", op=call.op, reasons="; ".join(f"{name} {why}" for name, why in reasons.items()))
    return chosen, reasons


def execute(call: Call, name: str) -> Any:
    """Runs `call` on the backend that `choose` gives; anything it raises that is not ours becomes KDA501."""
    backend = choose(call, name)
    run = importlib.import_module(backend.module.format(op=call.op)).run
    try:
        return run(call)
    except (KdaError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as cause:
        raise error("KDA501", op=call.op, backend=backend.name, cause=f"{type(cause).__name__}: {cause}") from cause


def explain_choice(op: str, arguments: Mapping[str, Any]) -> Choice:
    """Which backend a call would run on, and why not the others. Runs nothing.

    Args:
        op: ``"chunk_kda"``, ``"recurrent_kda"`` or ``"packed_decode_kda"``.
        arguments: keyword arguments of that op, ``backend`` included if it is not ``"auto"``.

    Raises:
        The errors that the call itself would raise, and KDA125 for an unknown op.
    """
    call = checked_call(op, arguments)
    name = arguments.get("backend", "auto")
    if name != "auto":
        return Choice(choose(call, name).name, {name: "asked for by name"})
    backend, reasons = _choose_automatically(call)
    return Choice(backend.name, reasons)


def checked_call(op: str, arguments: Mapping[str, Any]) -> Call:
    """The checked record of a call of `op` given by its keyword arguments; KDA125 for an unknown op."""
    if op not in OPS:
        raise error("KDA125", op="kdaserve", option="op", got=repr(op), expected=", ".join(OPS))
    api = importlib.import_module(f"kdaserve.ops.{op}.api")
    bound = inspect.signature(getattr(api, op)).bind(**arguments)
    bound.apply_defaults()
    return api.checked_call(bound.arguments)
