"""The backend table: what there is, what can run here, what takes a call, and which one `auto` picks."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from kdaserve import guards
from kdaserve.contract import FLOATS, CheckedCall
from kdaserve.errors import KdaError, dtype_name, error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs kernels in its interpreter, on the CPU: for tests, since it takes seconds for what a GPU does in microseconds."""


Capability = tuple[int, int]
AMPERE_AND_NEWER: tuple[Capability, Capability] = (8, 0), (99, 9)
HOPPER: tuple[Capability, Capability] = (9, 0), (9, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One row of the table. Importing the row imports nothing of the backend."""

    name: str
    role: str
    module: str
    """Module of an op, with ``{op}`` to fill in; it has ``run(call)`` and, where something compiles, what `ops.forms` describes."""
    automatic: tuple[str, ...]
    """Devices on which ``backend="auto"`` may pick it."""
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    gradients: bool
    ops: tuple[str, ...] = ("chunk_kda", "recurrent_kda", "packed_decode_kda")
    dim: int | None = None
    """What K and V must both be; None for any."""
    short: tuple[str, ...] = ()
    """Names of the tensors that it takes in 16 bits only."""
    normed: bool = False
    """Whether it takes only calls with `use_qk_l2norm_in_kernel`."""
    capabilities: tuple[Capability, Capability] | None = None
    """The least and the greatest compute capability of an NVIDIA GPU that it runs on; None for any."""
    unavailable: Callable[[], str | None] = lambda: None
    """The reason why it cannot run on this machine, or None."""
    rounds: bool = False
    """Whether `chunk_kda` rounds to 16 bits what it multiplies, where inputs have 16 bits."""
    in_triton: bool = False
    """Whether its kernels run on the CPU instead while Triton interprets."""

    @property
    def devices_here(self) -> tuple[str, ...]:
        """The devices that it takes in this process."""
        return ("cpu",) if self.in_triton and INTERPRETED else self.devices

    def implementation(self, op: str) -> ModuleType:
        """Its module of an op, imported when first asked for."""
        return _module(self.module.format(op=op))

    def refusal(self, call: CheckedCall) -> dict[str, str] | None:
        """None when it takes the call, else what is required, supported and missing."""
        key = self.name, call.needs_grad
        if key not in call.layout.refusals:
            call.layout.refusals[key] = self._refusal(call)
        return call.layout.refusals[key]

    def _takes(self, name: str, dtype: torch.dtype) -> bool:
        return dtype in self.dtypes and (name not in self.short or dtype.itemsize == 2)

    def _refusal(self, call: CheckedCall) -> dict[str, str] | None:
        op, layout = call.op, call.layout
        wanted = ["gradients"] if call.needs_grad else []
        sizes = {} if self.dim is None else {name: layout.sizes[name] for name in ("K", "V")}
        missing = [] if op in self.ops else [op]
        missing += [] if layout.device.type in self.devices_here else [f"device {layout.device.type}"]
        missing += _other_gpu(layout.device, self.capabilities)
        missing += [f"{name} in {dtype_name(dtype)}" for name, dtype in layout.dtypes.items() if not self._takes(name, dtype)]
        missing += [f"{name} = {size}" for name, size in sizes.items() if size != self.dim]
        missing += [] if self.gradients else wanted
        missing += ["use_qk_l2norm_in_kernel=False"] if self.normed and not call.use_qk_l2norm_in_kernel else []
        if not missing:
            return None
        dtypes = ", ".join(dict.fromkeys(dtype_name(dtype) for dtype in layout.dtypes.values()))
        taken = [f"devices {', '.join(self.devices_here)}", ", ".join(dtype_name(dtype) for dtype in self.dtypes)]
        taken += ([] if self.dim is None else [f"K = V = {self.dim}"]) + (["gradients"] if self.gradients else [])
        taken += [f"compute capability {_shown(*self.capabilities)}"] if self.capabilities else []
        taken += [f"{', '.join(self.short)} in 16 bits"] if self.short else []
        taken += ["use_qk_l2norm_in_kernel=True"] if self.normed else []
        taken += [] if op in self.ops else [", ".join(self.ops)]
        return {
            "required": "; ".join([f"device {layout.device.type}", dtypes, *(f"{name} = {size}" for name, size in sizes.items()), *wanted]),
            "supported": "; ".join(taken),
            "missing": ", ".join(missing),
        }


def _shown(least: Capability, greatest: Capability) -> str:
    """A range of compute capabilities."""
    return ".".join(map(str, least)) + ("" if least == greatest else " or newer")


def _other_gpu(device: torch.device, capabilities: tuple[Capability, Capability] | None) -> list[str]:
    """What of a device is outside of a range of compute capabilities, if anything is. Other vendors have none."""
    if capabilities is None or device.type != "cuda" or torch.version.hip is not None:
        return []
    found = torch.cuda.get_device_capability(device)
    return [] if capabilities[0] <= found <= capabilities[1] else [f"compute capability {_shown(found, found)} of {device}"]


def _no_gpu(capabilities: tuple[Capability, Capability]) -> str | None:
    """Why no GPU of this machine has a compute capability in a range, or None. The GPU of a call is looked at when it comes (`Backend.refusal`)."""
    others = [_other_gpu(torch.device("cuda", i), capabilities) for i in range(torch.cuda.device_count())]
    if not all(others):
        return None
    return f"it needs compute capability {_shown(*capabilities)}, there is {', '.join(text for other in others for text in other) or 'no GPU'}"


_module = functools.cache(importlib.import_module)


@functools.cache
def _triton_unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'kdaserve[triton]'"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "torch finds no GPU (with TRITON_INTERPRET=1 in the environment the kernels run in Triton's interpreter, slowly)"
    return _no_gpu(AMPERE_AND_NEWER)


@functools.cache
def _sm90_unavailable() -> str | None:
    reason = _triton_unavailable()
    if reason is not None:
        return reason
    if INTERPRETED:
        return "Triton interprets, and its interpreter does not run Gluon"
    import triton

    if not triton.__version__.startswith("3.6."):
        return f"it needs triton 3.6, there is {triton.__version__}"
    return "it needs an NVIDIA GPU" if torch.version.hip is not None else _no_gpu(HOPPER)


UNKNOWN = "of unknown version"
OLDEST_HELION = (1, 4)


def installed_version(package: str) -> str:
    """The version of a package as its metadata tell, which a copied folder has not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


@functools.cache
def _helion_unavailable() -> str | None:
    if importlib.util.find_spec("helion") is None:
        return "helion is not installed: pip install 'kdaserve[helion]'"
    if (reason := _triton_unavailable()) is not None:
        return reason
    found = installed_version("helion")
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < OLDEST_HELION and found != UNKNOWN:
        return f"it needs helion {'.'.join(map(str, OLDEST_HELION))}, installed is {found}"
    try:
        importlib.import_module("helion")
    except Exception as cause:
        installed = ", ".join(f"{name} {installed_version(name)}" for name in ("helion", "torch", "triton"))
        return f"{installed} do not work together: {type(cause).__name__}: {cause}"
    return None


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="sm90",
        role="two Gluon kernels a prefill, for Hopper",
        module="kdaserve.ops.{op}.sm90",
        automatic=("cuda",),
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        gradients=False,
        rounds=True,
        ops=("chunk_kda",),
        dim=128,
        short=("q", "k", "v", "g"),
        normed=True,
        capabilities=HOPPER,
        unavailable=_sm90_unavailable,
    ),
    Backend(
        name="triton",
        role="two Triton kernels a prefill, one a decode; the portable GPU path",
        module="kdaserve.ops.{op}.triton",
        automatic=("cuda",),
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        gradients=False,
        rounds=True,
        capabilities=AMPERE_AND_NEWER,
        unavailable=_triton_unavailable,
        in_triton=True,
    ),
    Backend(
        name="helion",
        role="the kernels of `triton` in Helion, PyTorch-like; to read and to retune",
        module="kdaserve.ops.{op}.helion",
        automatic=(),
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        gradients=False,
        rounds=True,
        capabilities=AMPERE_AND_NEWER,
        unavailable=_helion_unavailable,
        in_triton=True,
    ),
    Backend(
        name="torch",
        role="chunked, in plain PyTorch; the default on a CPU; differentiable",
        module="kdaserve.ops.{op}.torch",
        automatic=("cpu", "cuda"),
        devices=("cpu", "cuda"),
        dtypes=FLOATS,
        gradients=True,
    ),
    Backend(
        name="reference",
        role="the recurrence in float64, token by token; the judge, not for serving",
        module="kdaserve.ops.{op}.reference",
        automatic=(),
        devices=("cpu", "cuda"),
        dtypes=FLOATS,
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
        automatic: devices on which ``backend="auto"`` may pick it.
    """

    name: str
    role: str
    available: bool
    reason: str
    automatic: tuple[str, ...]


def backends() -> tuple[BackendStatus, ...]:
    """All backends, best first, and whether each can run on this machine."""

    def status(b: Backend) -> BackendStatus:
        reason = b.unavailable()
        return BackendStatus(b.name, b.role, reason is None, reason or "", b.automatic)

    return tuple(status(b) for b in BACKENDS)


def choose(call: CheckedCall, name: str) -> Backend:
    """The backend that runs `call`: the one named, never another (S20), or with ``"auto"`` the best that takes it.

    Raises: KDA201 (no such backend), KDA202 (cannot run here), KDA203 (does not take the call), KDA204 (none takes it).
    """
    if guards.is_one_of(name, ("auto",)):
        for backend in BACKENDS:
            if call.layout.device.type in backend.automatic and backend.unavailable() is None and backend.refusal(call) is None:
                return backend
        raise error("KDA204", op=call.op, reasons="; ".join(f"{b} {why}" for b, why in reasons(call, None).items()))
    named = next((backend for backend in BACKENDS if isinstance(name, str) and backend.name == name), None)
    if named is None:
        raise error("KDA201", op=call.op, got=repr(name), known=", ".join(["auto", *(backend.name for backend in BACKENDS)]))
    reason = named.unavailable()
    if reason is not None:
        raise error("KDA202", op=call.op, backend=name, reason=reason)
    refusal = named.refusal(call)
    if refusal is not None:
        raise error("KDA203", op=call.op, backend=name, **refusal)
    return named


def reasons(call: CheckedCall, chosen: str | None) -> dict[str, str]:
    """For every backend, why `auto` picks it or passes it over."""
    found = {}
    for backend in BACKENDS:
        if backend.name == chosen:
            found[backend.name] = "the best that takes the call"
        elif not backend.automatic:
            found[backend.name] = "runs only when named"
        elif (unavailable := backend.unavailable()) is not None:
            found[backend.name] = f"cannot run here: {unavailable}"
        elif (refusal := backend.refusal(call)) is not None:
            found[backend.name] = f"does not take {refusal['missing']}"
        elif call.layout.device.type not in backend.automatic:
            found[backend.name] = f"runs on {call.layout.device.type} only when named"
        else:
            found[backend.name] = f"takes the call; {chosen} is better"
    return found


def execute(call: CheckedCall, name: str) -> Any:
    """Runs `call` on the backend that `choose` gives; anything it raises that is not ours, nor want of memory, becomes KDA501."""
    backend = choose(call, name)
    device = call.layout.device.type
    run = backend.implementation(call.op).run
    try:
        if torch.is_autocast_enabled(device):  # S12: it would round the state's arithmetic
            with torch.autocast(device, enabled=False):
                result = run(call)
        else:
            result = run(call)
    except (KdaError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as cause:
        if "can't allocate memory" in str(cause):  # what a CPU's allocator says, in a plain RuntimeError
            raise
        if "modified inplace" in str(cause):  # a view that autograd does not let us write, which only it can know
            raise error("KDA122", op=call.op, argument="` or `".join(call.layout.written)) from cause
        raise error("KDA501", op=call.op, backend=backend.name, cause=f"{type(cause).__name__}: {cause}") from cause
    if not backend.gradients:  # its kernels write past autograd, which must know of it: what an earlier product saved for its gradient is gone
        for name in call.layout.written:
            written = getattr(call, name)
            if not written.is_inference():
                torch.autograd.graph.increment_version(written)
    return result
