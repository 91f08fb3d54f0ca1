"""What every test file shares: the backends under test, their tolerances, and one check of a whole prefill call.

A new backend needs a row in `kdaserve.dispatch.BACKENDS` and rows in `TOLERANCES` below; the suite then runs over it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import kdaserve
import oracle
from kdaserve import dispatch
from kdaserve.testing import assert_close, assert_same_bits, prefill_inputs, relative_error

hypothesis.settings.register_profile("kdaserve", derandomize=True, deadline=None, max_examples=40, database=None)
hypothesis.settings.load_profile("kdaserve")

Call = dict[str, Any]


def pytest_configure() -> None:
    """Nearly all tensors here are tiny: a second thread only waits, and on a busy machine waits long. `threads` gives more."""
    torch.set_num_threads(1)
    _round_in_the_interpreter()


PARAMETERS_INTERPRETED = {
    "triton": {"chunk_kda": 2, "recurrent_kda": 1, "packed_decode_kda": 2, None: 2},
    "helion": {"chunk_kda": 1, "recurrent_kda": 0, "packed_decode_kda": 2, None: 1},
}
"""How many sets of parameters of a test Triton's interpreter runs, by backend and op: it takes seconds for what a GPU, where all run, does in
microseconds, and Helion takes seconds more to generate what is interpreted."""
CONTRACT = ("test_prefill_semantics.py", "test_warmup.py")
"""Files of which the interpreter runs one set of parameters of every test, with every op."""
ENTIRE = "test_helion.py"
"""All of it is run."""


def is_long(item: pytest.Item) -> bool:
    """Whether a test is marked `long`, or is run forty times by hypothesis."""
    return item.get_closest_marker("long") is not None or getattr(getattr(item, "function", None), "is_hypothesis_test", False)


def targets_of(item: pytest.Item) -> list[Target]:
    """What a test runs on."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return [value for value in parameters.values() if isinstance(value, Target)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out ops that a backend does not have, and what would take the interpreter too long: long tests, and most parameters of others, evenly."""
    groups: dict[tuple, list[pytest.Item]] = defaultdict(list)
    taken_out: set[pytest.Item] = set()
    for item in items:
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        targets, op = targets_of(item), parameters.get("op") or parameters.get("every_op")
        interpreted = [target for target in targets if target.interpreted]
        if op is not None and any(op not in target.row.ops for target in targets):
            taken_out.add(item)
        elif interpreted and item.path.name != ENTIRE:
            groups[item.nodeid.split("[")[0], op, interpreted[0]].append(item)
    for (_, op, target), group in groups.items():
        short = [item for item in group if not is_long(item)]
        count = PARAMETERS_INTERPRETED[target.backend][op] or int(group[0].path.name in CONTRACT)
        kept = {short[i * (len(short) - 1) // max(count - 1, 1)] for i in range(count)} if short else set()
        taken_out |= set(group) - kept
    config.hook.pytest_deselected(items=list(taken_out))
    items[:] = [item for item in items if item not in taken_out]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # slow ones first: nobody waits for the last worker


def _round_in_the_interpreter() -> None:
    """Triton's interpreter cuts fp32 off to bf16, which doubles the error; here it rounds, as a GPU does."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, wanted: Any) -> Any:
        types = source.dtype.scalar.name, wanted.scalar.name
        if types != ("fp32", "bf16"):
            return cast(self, source, wanted)
        data = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
        return interpreter.TensorHandle(data, wanted.scalar)

    interpreter.InterpreterBuilder.cast_impl = rounded


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Relative errors of a backend's arithmetic against the float64 recurrence."""

    arithmetic: float
    correlated: float
    """The same when all keys are (nearly) equal, so that large numbers cancel."""
    carried: float
    """Of two runs of one backend, one of which rounded its state to a float32 pool on the way."""


ROUNDINGS = 2.0
"""A stored result may be off by this many times the error of rounding the expected result to its dtype."""

LOW = (torch.float32, torch.bfloat16, torch.float16)
FP32 = Tolerance(3e-5, 1e-3, 3e-5)
"""Arithmetic in float32."""
BF16 = Tolerance(1e-2, 2e-2, 1e-2)
"""Products of operands in bf16: 3.7e-3 on usual inputs, up to 9e-3 where there is a single token: in a model of the roundings, of 18,000."""
TOLERANCES: dict[tuple[str, torch.dtype], Tolerance] = {
    **{("reference", dtype): Tolerance(1e-12, 1e-10, 1e-6) for dtype in (*LOW, torch.float64)},
    **{("torch", dtype): FP32 for dtype in LOW},
    **{(backend, dtype): FP32 for backend in ("triton", "helion") for dtype in LOW},
    **{("sm90", dtype): BF16 for dtype in (torch.bfloat16, torch.float16)},
    ("torch", torch.float64): Tolerance(1e-12, 1e-10, 1e-6),
}
"""By backend and dtype of the inputs."""

ROUNDED_PRODUCTS: dict[tuple[str, str, torch.dtype], Tolerance] = {
    **{(backend, "cuda", torch.bfloat16): BF16 for backend in ("triton", "helion")},
    # Operands of 11 bits: 1.9e-3 on usual inputs.
    **{(backend, "cuda", torch.float16): Tolerance(4e-3, 1e-2, 4e-3) for backend in ("triton", "helion")},
}
"""By backend, device and dtype of the inputs, in place of the row above: of `chunk_kda` where the matrix units round what they multiply."""

NOT_BITWISE = {("reference", "cpu"), ("reference", "cuda"), ("torch", "cuda")}
"""Where S9 and S10 do not hold to the bit: `reference` keeps its state in float64; on a GPU the matrix library picks its algorithm by size."""

NOT_CAPTURABLE = {("reference", "cuda"), ("torch", "cuda")}
"""Whose calls no CUDA graph can record (S16): they read lengths and slots on the host."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A backend on a device: what a test runs."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs its kernels."""
        return dispatch.INTERPRETED and self.row.in_triton

    def run(self, op: str, call: Call, **changes: Any) -> Any:
        """The result of an op on this backend; a test ends where a backend that is built for some calls does not take this one."""
        try:
            return getattr(kdaserve, op)(**{**call, **changes}, backend=self.backend)
        except kdaserve.BackendError as refused:
            if refused.code != "KDA203" or self.is_built_for(op, {**call, **changes}):
                raise
            pytest.skip(str(refused))

    def is_built_for(self, op: str, call: Call) -> bool:
        """Whether a backend must take a call; one for a single size, which `inputs_that_it_takes` gives it, need not take the rest."""
        row = self.row
        if row.dim is None:
            return True
        learns = any(x.requires_grad for x in call.values() if isinstance(x, Tensor))
        return op in row.ops and call["q"].element_size() == 2 and bool(call.get("use_qk_l2norm_in_kernel")) and not learns

    @property
    def row(self) -> dispatch.Backend:
        """What the table says of the backend."""
        return next(row for row in dispatch.BACKENDS if row.name == self.backend)

    @property
    def compiles(self) -> bool:
        """Whether a compiler, which takes seconds, makes its kernels for every form of a call."""
        return self.device == "cuda" and hasattr(self.row.implementation("chunk_kda"), "compiled")

    def with_op(self, op: str) -> Target:
        """What runs an op beside its prefills: itself, or what `auto` picks for an op that it does not have."""
        able = [row for row in dispatch.BACKENDS if op in row.ops]
        return self if self.row in able else Target(next(row.name for row in able if self.device in row.automatic), self.device)

    @property
    def usual(self) -> torch.dtype:
        """The dtype of inputs where a test asks for none."""
        return torch.bfloat16 if self.row.short else torch.float32

    def arithmetic(self, inputs: torch.dtype | None = None, op: str | None = None) -> Tolerance:
        """Errors of `op` on inputs of a dtype, or the largest of all ops."""
        inputs = inputs or self.usual
        rounded = ROUNDED_PRODUCTS.get((self.backend, self.device, inputs))
        return TOLERANCES[self.backend, inputs] if rounded is None or op not in (None, "chunk_kda") else rounded

    def tolerance(self, expected: Tensor, inputs: torch.dtype | None, stored: torch.dtype, correlated: bool = False, op: str | None = None) -> float:
        """How far a result of `op` in dtype `stored`, computed from `inputs`, may be from `expected`."""
        row = self.arithmetic(inputs, op)
        rounding = relative_error(expected.to(stored), expected)
        return max(row.correlated if correlated else row.arithmetic, ROUNDINGS * rounding)

    def assert_close(
        self,
        actual: Tensor,
        expected: Tensor,
        what: str,
        inputs: torch.dtype | None = None,
        correlated: bool = False,
        op: str | None = None,
        added: Tensor | None = None,
    ) -> None:
        """Fails unless `actual` is as close to the float64 `expected` of the oracle as this backend must be.

        With `added`, see `oracle.Expected`, as close as if `expected` were no smaller: the output of one token that is a small difference of large
        numbers has their errors, and in numbers of its own size these have no bound.
        """
        tolerance = self.tolerance(expected, inputs, actual.dtype, correlated, op)
        if added is not None and expected.any():
            tolerance *= max(1.0, (added.norm() / expected.norm()).item())
        assert_close(actual.cpu(), expected, tolerance, f"{self}: {what}")

    def assert_agree(self, actual: Tensor, other: Tensor, what: str, inputs: torch.dtype | None = None, stored: torch.dtype | None = None) -> None:
        """Fails unless two runs agree, one of which stored its state on the way: it rounds to `stored` once more than the other."""
        tolerance = max(self.arithmetic(inputs).carried, torch.finfo(stored or actual.dtype).eps)
        assert_close(actual, other, tolerance, f"{self}: {what}")

    def assert_same(self, actual: Tensor, expected: Tensor, what: str) -> None:
        """Fails unless two results of this backend have the same bits, or are close where it keeps no bits."""
        if (self.backend, self.device) in NOT_BITWISE:
            self.assert_agree(actual, expected, what)
        else:
            assert_same_bits(actual, expected, f"{self}: {what}")

    def check_prefill(
        self, op: str, call: Call, ask: Callable[[int], Iterable[int]] = oracle.every_64, correlated: bool = False, **changes: Any
    ) -> Any:
        """Runs a prefill and checks all of it against the oracle.

        Checked are the output, the final states, `h`, tracked states and snapshots; every pool row that is not named, every track row with -1
        and every input must keep its bits. Outputs of sequences are compared one by one.
        """
        call = {**call, **changes}
        expected = oracle.prefill(call, ask)
        before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
        result = self.run(op, call)
        o, h = result if call.get("output_intermediate_states") else (result, None)
        inputs = call["q"].dtype

        def close(actual: Tensor, wanted: Tensor, what: str, added: Tensor | None = None) -> None:
            self.assert_close(actual, wanted, f"{op}: {what}", inputs, correlated, op, added)

        assert o.dtype == inputs
        for what, rows, wanted, added in sequences(o, expected):
            close(rows, wanted, f"output of {what}", added)
        assert_same_bits(o.flatten(0, 1)[sum(expected.lengths) :], torch.zeros_like(o.flatten(0, 1)[sum(expected.lengths) :]), "padding rows of o")
        if h is not None:
            assert h.dtype == call["k"].dtype
            wanted = [states[t] for n, states in enumerate(expected.states) for t in range(0, expected.lengths[n], 64)]
            shape = (o.shape[0], -1 if wanted else 0, *call["initial_state"].shape[1:])
            close(h, torch.stack(wanted).view(shape) if wanted else torch.zeros(0).view(shape), "h")
        self._check_pool(call, expected, before["initial_state"], close)
        self._check_tracked(call, expected, before, close)
        written = {"initial_state", "track_state", "out"}
        for name in before.keys() - written - ({"v"} if call.get("out") is call["v"] else set()):
            assert_same_bits(call[name], before[name], f"{op}: input {name}")
        return result

    def _check_pool(self, call: Call, expected: oracle.Expected, before: Tensor, close: Callable[[Tensor, Tensor, str], None]) -> None:
        pool, written = call["initial_state"], set()
        for n, slot in enumerate(call["initial_state_indices"].tolist()):
            if slot >= 0 and expected.lengths[n]:
                close(pool[slot], expected.states[n][expected.lengths[n]], f"state of sequence {n} in slot {slot}")
                written.add(slot)
        snapshots = call.get("snapshots")
        for n, tokens, slot in snapshots.entries() if snapshots is not None else ():
            close(pool[slot], expected.states[n][tokens], f"snapshot of sequence {n} after {tokens} tokens")
            written.add(slot)
        kept = [slot for slot in range(len(pool)) if slot not in written]
        assert_same_bits(pool[kept], before[kept], f"{self}: pool rows that no one named")

    def _check_tracked(self, call: Call, expected: oracle.Expected, before: Call, close: Callable[[Tensor, Tensor, str], None]) -> None:
        for n, chunk in enumerate(call["track_chunk_idx"].tolist() if call.get("track_chunk_idx") is not None else ()):
            if chunk >= 0:
                close(call["track_state"][n], expected.states[n][64 * chunk], f"tracked state of sequence {n}, chunk {chunk}")
            else:
                assert_same_bits(call["track_state"][n], before["track_state"][n], f"{self}: track row {n} with -1")

    def check_decode(self, call: Call, **changes: Any) -> Tensor:
        """Runs a decode and checks output and states against the oracle, and the bits of all that is not written."""
        call = {**call, **changes}
        expected, states = oracle.decode(call)
        before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
        out, pool = self.run("packed_decode_kda", call)
        assert out is call["out"]
        assert pool is call["initial_state"]
        self.assert_close(out, expected, "decode output", call["mixed_qkv"].dtype, op="packed_decode_kda")
        for row, slot in enumerate(call["ssm_state_indices"].tolist()):
            if slot < 0:
                assert_same_bits(out[row], torch.zeros_like(out[row]), f"{self}: output of padding row {row}")
            else:
                self.assert_close(pool[slot], states[slot], f"state in slot {slot}", call["mixed_qkv"].dtype, op="packed_decode_kda")
        kept = [slot for slot in range(len(pool)) if slot not in states]
        assert_same_bits(pool[kept], before["initial_state"][kept], f"{self}: pool rows that no one named")
        for name in before.keys() - {"initial_state", "out"}:
            assert_same_bits(call[name], before[name], f"{self}: input {name}")
        return out


def sequences(o: Tensor, expected: oracle.Expected) -> Iterable[tuple[str, Tensor, Tensor, Tensor]]:
    """Output rows of every sequence that has some, beside the expected ones and what these are added up from."""
    start, rows, wanted, added = 0, o.flatten(0, 1), expected.o.flatten(0, 1), expected.added.flatten(0, 1)
    for n, length in enumerate(expected.lengths):
        if length:
            mine = slice(start, start + length)
            yield f"sequence {n} of {length} tokens", rows[mine], wanted[mine], added[mine]
        start += length


def _targets(fits: Callable[[dispatch.Backend, str], bool] = lambda b, device: True) -> list[Any]:
    available = {status.name for status in kdaserve.backends() if status.available}
    rows = [b for b in dispatch.BACKENDS if b.name in available]
    marks = {"cpu": (), "cuda": (pytest.mark.gpu,)}
    return [pytest.param(Target(b.name, d), id=f"{b.name}-{d}", marks=marks[d]) for d in marks for b in rows if d in b.devices_here and fits(b, d)]


def serving_targets(device: str) -> list[Target]:
    """Every backend on a device whose calls a CUDA graph can record there, or could on a GPU."""
    return [param.values[0] for param in _targets(lambda b, d: d == device and (b.name, "cuda") not in NOT_CAPTURABLE)]


@pytest.fixture(scope="session", params=_targets())
def target(request: pytest.FixtureRequest) -> Target:
    """Every backend on every device where it can run."""
    return request.param


@pytest.fixture(scope="session", params=_targets(lambda b, _: torch.float64 in b.dtypes))
def target64(request: pytest.FixtureRequest) -> Target:
    """Every backend that takes float64."""
    return request.param


@pytest.fixture(scope="session", params=_targets(lambda b, device: (b.name, device) not in NOT_BITWISE))
def bitwise_target(request: pytest.FixtureRequest) -> Target:
    """Every backend that S9 and S10 hold to equal bits."""
    return request.param


@pytest.fixture(scope="session", params=[pytest.param(target, id=str(target), marks=pytest.mark.gpu) for target in serving_targets("cuda")])
def serving_target(request: pytest.FixtureRequest) -> Target:
    """Every backend that an engine can serve with on a GPU, inside CUDA graphs."""
    return request.param


@pytest.fixture(scope="session", params=_targets(lambda b, _: b.gradients))
def learner(request: pytest.FixtureRequest) -> Target:
    """Every backend that gives gradients."""
    return request.param


@pytest.fixture(autouse=True)
def inputs_that_it_takes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives tests of a backend that is built for one size inputs of that size, whatever they ask for, and bf16 ones in place of fp32."""
    make = prefill_inputs
    for dim in {target.row.dim for target in targets_of(request.node)} - {None}:

        def fitting(*lengths: Any, dim: int = dim, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
            options |= {"k_dim": dim, "v_dim": dim, "dtype": torch.bfloat16 if dtype == torch.float32 else dtype}
            return make(*lengths, **options)

        for module in [module for module in list(sys.modules.values()) if getattr(module, "prefill_inputs", None) is make]:
            monkeypatch.setattr(module, "prefill_inputs", fitting)


@pytest.fixture(scope="session", params=["chunk_kda", "recurrent_kda"])
def op(request: pytest.FixtureRequest) -> str:
    """Both prefill ops: one contract, two algorithms."""
    return request.param


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors live in tests that run on no particular backend."""
    return request.param


@pytest.fixture
def narrow_plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns and no colours, whatever the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads of a CPU a test may use."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.fixture(params=["chunk_kda", "recurrent_kda", "packed_decode_kda"])
def every_op(request: pytest.FixtureRequest) -> str:
    """All three ops."""
    return request.param
