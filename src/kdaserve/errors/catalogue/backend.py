"""Errors of choosing a backend (KDA201 to KDA204)."""

from kdaserve.errors.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        code="KDA201",
        title="Unknown backend",
        raises="BackendError",
        message="{op}: there is no backend {got}. Known names: {known}.",
        fix="pass one of {known}; `kdaserve.backends()` tells which can run here.",
        meaning="""The name given as `backend` is none of the table. A similar name is not guessed, because a named backend is
a promise: it runs, or the call raises.""",
        trigger="`backend` is neither 'auto' nor the name of a backend.",
        situations=(
            "The name is misspelt, has capitals, or is that of another library's kernel.",
            "A configuration was written for a version of the library with more backends.",
            "A boolean or None is passed to mean the default; the default is 'auto'.",
        ),
        solutions=(
            "Leave `backend` out, or pass 'auto', to get the best that takes the call.",
            "List the names with `kdaserve env` or `kdaserve.backends()`.",
        ),
        before="""\
backend = "pytorch"
kdaserve.chunk_kda(**prefill_inputs(lengths=[51]), backend=backend)""",
        after="""\
backend = "torch"
kdaserve.chunk_kda(**prefill_inputs(lengths=[51]), backend=backend)""",
        validation="""\
known = ["auto", *(status.name for status in kdaserve.backends())]
assert kdaserve.guards.is_one_of(backend, known)""",
        guard="is_one_of",
        prevention=("Offer the names from `kdaserve.backends()` as the choices of the engine's option, so that start-up refuses others.",),
        related=("KDA125", "KDA202", "KDA203"),
    ),
    Entry(
        code="KDA202",
        title="Backend cannot run on this machine",
        raises="BackendError",
        message="{op}: the backend {backend} cannot run on this machine: {reason}.",
        fix="install or provide what is missing, or pass `backend='auto'` to take the best that can run here.",
        meaning="""The backend exists, but this machine lacks something it needs: a GPU of some kind, a driver, or a package. A
named backend never falls back to another, so that a measurement or a deployment cannot run on a slower one unnoticed.""",
        trigger="`backend` names a backend whose requirements are not met here.",
        situations=(
            "A configuration of a GPU server is used on a laptop or in CI without a GPU.",
            "The container lacks the package, or has a version that is too old for the GPU.",
            "CUDA_VISIBLE_DEVICES is empty, or the driver does not fit the CUDA version of torch.",
            "The backend needs a newer GPU generation than the one in this node of a mixed cluster.",
        ),
        solutions=(
            "Run `kdaserve env`: it lists all backends with the reason for each that cannot run.",
            "Install the missing package in the version that the reason asks for.",
            "Use `backend='auto'` where the same configuration must run on different machines.",
        ),
        before="""\
import dataclasses
from unittest.mock import patch

from kdaserve import dispatch

backend = "torch"
broken = dataclasses.replace(dispatch.BACKENDS[0], name=backend, unavailable=lambda: "there is no GPU")
with patch.object(dispatch, "BACKENDS", (broken,)):  # such a machine
    statuses = kdaserve.backends()
    kdaserve.chunk_kda(**prefill_inputs(lengths=[51]), backend=backend)""",
        after="""\
statuses = kdaserve.backends()
backend = next(status.name for status in statuses if status.available)
kdaserve.chunk_kda(**prefill_inputs(lengths=[51]), backend="auto")""",
        validation="""\
available = [status.name for status in statuses if status.available]
assert kdaserve.guards.is_one_of(backend, available)""",
        guard="is_one_of",
        prevention=(
            "Check `kdaserve.backends()` when the server starts and refuse to start without the backend that was asked for.",
            "Pin the versions of torch, driver and compiler packages in the container.",
        ),
        related=("KDA201", "KDA203", "KDA204"),
    ),
    Entry(
        code="KDA203",
        title="Named backend does not take this call",
        raises="BackendError",
        message="{op}: the backend {backend} does not take this call. Required: {required}. Supported: {supported}. Missing: {missing}.",
        fix="change the call so that it does not need {missing}, or pass `backend='auto'`.",
        meaning="""The backend can run here, but not this call: its device, a dtype, a size or gradients are outside of what it
supports. The message lists what the call requires, what the backend supports and what is missing. A named backend never falls
back.""",
        trigger="`backend` names a backend, and the call needs something that this backend does not support.",
        situations=(
            "A fast serving backend is named while gradients are enabled and a tensor requires one.",
            "float64 tensors of a numerical check are passed to a GPU backend.",
            "Tensors are still on the CPU, or on the meta device, when the backend needs them on a GPU.",
            "A model has head dimensions that the specialised kernel was not built for.",
        ),
        solutions=(
            "Ask `kdaserve.explain_choice(op, arguments)` which backends take the call and why the others do not.",
            "Serve under `torch.inference_mode()`, so that no gradients are needed.",
            "Convert dtypes or move tensors as the message says, or use `backend='auto'`.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
kdaserve.chunk_kda(**call, backend="torch")""",
        after="""\
call = prefill_inputs(lengths=[51])
print(kdaserve.explain_choice("chunk_kda", call).reasons)
kdaserve.chunk_kda(**call, backend="torch")""",
        validation='assert kdaserve.guards.has_storage(call["q"], call["initial_state"])',
        guard="has_storage",
        prevention=(
            "Run one call of every kind (prefill, decode, graph, gradients) when the server starts.",
            "Name a backend only where it matters which one runs; elsewhere leave the choice to 'auto'.",
        ),
        related=("KDA105", "KDA111", "KDA202", "KDA204"),
    ),
    Entry(
        code="KDA204",
        title="No backend takes this call",
        raises="BackendError",
        message="{op}: no backend takes this call: {reasons}.",
        fix="change what the reasons name; most often the tensors belong on a CPU or a GPU.",
        meaning="""The call fits the contract, but none of the backends that 'auto' may choose can run it here. The message
gives the reason of each. `reference` is left out by 'auto'; it runs only when it is named.""",
        trigger="`backend='auto'`, and every automatic backend refuses the call or cannot run on this machine.",
        situations=(
            "The model was built on the meta device, and its weights or the pool were never filled.",
            "Tensors are on a device type that no backend knows.",
            "A shape-only dry run, such as memory planning, calls the kernel with fake tensors.",
        ),
        solutions=(
            "Materialise the model: `model.to_empty(device=...)`, then load the checkpoint.",
            "In a dry run take the output shape from v, `torch.empty_like(v)`, and do not call the kernel.",
            "Name `backend='reference'` if a slow, exact result is all that is wanted.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51], device="cpu")
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.has_storage(call["q"], call["initial_state"])',
        guard="has_storage",
        prevention=("After loading, assert that no parameter and no buffer is left on the meta device.",),
        related=("KDA107", "KDA202", "KDA203"),
    ),
)
