"""Faults of this library (KDA501)."""

from kdaserve.errors.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        code="KDA501",
        title="A backend failed: a fault of this library",
        raises="InternalError",
        message="{op}: the backend {backend} failed on a call that passed all checks: {cause}. This is a fault of kdaserve.",
        fix="save the call with `kdaserve.testing.save_call` and report it; until then another backend may run it.",
        meaning="""The call fits the contract and the backend said that it takes it, yet it raised an error of its own. Either
a check is missing or the backend is wrong. The pool may hold the old or a partly written state of the sequences of this call,
so their requests should be run again from their prompts.""",
        trigger="A backend raises anything but an error of this catalogue or an out-of-memory error.",
        situations=(
            "A combination of shapes, dtypes and options that no test covers.",
            "A compiler or driver version with a fault, met on the first call of a new shape.",
            "An earlier, asynchronous fault on the GPU that surfaces in this call; `CUDA_LAUNCH_BLOCKING=1` tells.",
        ),
        solutions=(
            "Make the call again from a fresh state, and save it first: `kdaserve.testing.save_call(path, op, arguments)`.",
            "Report it with the two files that this writes, the full traceback (the cause is chained) and the output of `kdaserve env`.",
            "Keep serving with another backend from `kdaserve.backends()`; `torch` takes the whole contract.",
            "Look for the first bad input with `check='values'`.",
        ),
        before="""\
from unittest.mock import patch

call, problem = prefill_inputs(lengths=[51]), None
with patch("kdaserve.ops.chunk_kda.torch.run", side_effect=ZeroDivisionError("injected")):
    try:
        kdaserve.chunk_kda(**call, backend="torch")
    except kdaserve.KdaError as raised:
        problem = raised
        raise""",
        after="""\
import tempfile

call, problem = prefill_inputs(lengths=[51]), None
path = kdaserve.testing.save_call(f"{tempfile.mkdtemp()}/call", "chunk_kda", call)
try:
    kdaserve.chunk_kda(**call, backend="torch")
except kdaserve.InternalError as raised:
    problem = raised
    print(f"please report {path} with {raised}")""",
        validation="assert problem is None or kdaserve.guards.is_callers_mistake(problem)",
        guard="is_callers_mistake",
        prevention=(
            "Run every shape and option that will be served once at start-up, and compare with `backend='reference'`.",
            "Pin driver, torch and compiler versions, and run the library's tests on a new combination before it serves.",
        ),
        related=("KDA130", "KDA203", "KDA309"),
    ),
)
