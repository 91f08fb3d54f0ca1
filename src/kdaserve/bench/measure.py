"""The two passes over the cases: check (and by that compile) everything, then time it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kdaserve.bench.limits import Limits, clock_mhz, device_name, measure_limits
from kdaserve.bench.providers import Arguments, Provider, Run, UnableError, exact_results
from kdaserve.bench.timing import Times, ahead, eager, extra_memory, replayed, settle
from kdaserve.errors import dtype_name, error
from kdaserve.testing.cases import Case
from kdaserve.testing.compare import relative_error

OUTPUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-3}
STATE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-3}
"""Relative: what our backends may be off by, in the output by its dtype, in states by the coarser of those of the inputs and of the pool."""
COLD_BYTES = 2**30
"""Pools of a decode graph together: many times the L2 cache, as the layers of a model are."""
MOST_POOLS = 96

Row = dict[str, Any]
Step = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """What the first pass found of a provider on a case.

    Attributes:
        output, state: relative errors against the float64 recurrence.
        reason: why it did not run, or an empty string.
    """

    output: float = math.nan
    state: float = math.nan
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, and where.

    Attributes:
        name: of the benchmark; stands in every row.
        cases, providers: what to run; all cases are of one op.
        device: where.
        checked_tokens: larger cases are checked on as many tokens.
        rounds: timed repetitions; None takes as many as fit a fixed time.
        step: told what comes next.
    """

    name: str
    cases: Sequence[Case]
    providers: Sequence[Provider]
    device: torch.device
    checked_tokens: int
    rounds: int | None = None
    step: Step = lambda _: None

    @property
    def steps(self) -> int:
        """How many times `step` is called."""
        return len(self.cases) * (len(self.providers) + 2) + 1

    @torch.no_grad()
    def check(self) -> list[list[Checked]]:
        """For each case, for each provider: its errors, or why it does not run. By this everything is compiled.

        Raises:
            ValuesError: KDA309 when a backend of ours is too far off.
            KdaError: whatever a backend of ours raises.
        """
        return [self._check(case) for case in self.cases]

    def untimed_rows(self, checked: Sequence[Sequence[Checked]]) -> list[Row]:
        """The rows of all cases, with errors and without times."""
        found = zip(self.cases, checked, strict=True)
        return [self._untimed(case, provider, check) for case, of_case in found for provider, check in zip(self.providers, of_case, strict=True)]

    @torch.no_grad()
    def rows(self, checked: Sequence[Sequence[Checked]]) -> Iterator[list[Row]]:
        """For each case the rows of its providers, as soon as they are measured. A variant must come after its plain case."""
        self.step("timing a copy and a product")
        limits = {dtype: measure_limits(self.device, dtype, self.rounds) for dtype in {case.dtype for case in self.cases}}
        plain: dict[tuple[str, str], Row] = {}
        for case, found in zip(self.cases, checked, strict=True):
            self.step(f"timing {_title(case)}")
            rows = [self._measured(case, provider, check, limits[case.dtype]) for provider, check in zip(self.providers, found, strict=True)]
            _compare_with_peers(rows)
            clock = clock_mhz(self.device)  # once a case: asking takes longer than many a case
            for row in rows:
                if "not_run" not in row:
                    row["sm_mhz"] = clock
                if case.variant == "plain":
                    plain[case.name, row["provider"]] = row
                elif "not_run" not in row | plain[case.name, row["provider"]]:
                    row["ratio_to_plain"] = _ratio(row, plain[case.name, row["provider"]])
            yield rows

    def _check(self, case: Case) -> list[Checked]:
        short = case.shortened(self.checked_tokens)
        self.step(f"checking {_title(case)}: the reference")
        arguments = short.inputs(self.device)
        expected = exact_results(case.op, arguments)
        return [self._compared(case, provider, arguments, expected) for provider in self.providers]

    def _compared(self, case: Case, provider: Provider, arguments: Arguments, expected: tuple[Tensor, Tensor]) -> Checked:
        self.step(f"checking and compiling {_title(case)}: {provider.name}")
        with _failing_is_told(provider) as failure:
            run = provider.prepare(arguments)
            output, state = (relative_error(a, e) for a, e in zip(run.read(run.call()), expected, strict=True))
            if not provider.peer:
                _refuse(case, provider, "output", output, OUTPUT_TOLERANCE[case.dtype])
                _refuse(case, provider, "state", state, max(STATE_TOLERANCE[case.dtype], STATE_TOLERANCE[case.pool_dtype]))
            return Checked(output, state)
        return Checked(reason=failure[0])

    def _untimed(self, case: Case, provider: Provider, checked: Checked) -> Row:
        """What was measured, and its errors or why it did not run."""
        row: Row = {"bench": self.name, "case": case.name, "variant": case.variant, "provider": provider.name, "peer": provider.peer}
        row |= {"heads": case.heads, "sequences": case.sequences, "tokens": case.tokens}
        row |= {"dtype": dtype_name(case.dtype), "pool_dtype": dtype_name(case.pool_dtype), "device": device_name(self.device)}
        if checked.reason:
            return {**row, "not_run": checked.reason}
        errors = {"err_o": _number(checked.output), "err_s": _number(checked.state)}
        return {**row, **errors, "checked_tokens": case.shortened(self.checked_tokens).tokens}

    def _measured(self, case: Case, provider: Provider, checked: Checked, limits: Limits) -> Row:
        row = self._untimed(case, provider, checked)
        if checked.reason:
            return row
        with _failing_is_told(provider) as failure:
            arguments = case.inputs(self.device)
            floor = limits.floor_ms(case.nbytes, case.flops)
            figures = self._timed(case, provider.prepare(arguments), arguments)
            figures |= {"bytes": case.nbytes, "flops": case.flops, "floor_ms": _rounded(floor), "share_of_floor": _rounded(floor / best_ms(figures))}
            figures |= {"copy_gb_s": _rounded(limits.bandwidth / 1e9), "product_tflop_s": _rounded(limits.product_rate / 1e12)}
            return {**row, **figures}
        return {**row, "not_run": failure[0]}

    def _timed(self, case: Case, run: Run, arguments: Arguments) -> Row:
        """Milliseconds and bytes of a run."""
        once = eager(run.call, run.reset, self.device, self.rounds)
        row: Row = {**_three("eager", once.elapsed), "host_ms": _rounded(once.host)}
        if self.device.type == "cuda":
            row |= _three("queued", ahead(run.call, run.reset, self.device, self.rounds))
        extra = extra_memory(run.call, self.device)
        if extra is not None:
            given = sum(value.nbytes for value in arguments.values() if isinstance(value, Tensor))
            row |= {"extra_bytes": extra, "extra_ratio": _rounded(extra / given)}
        try:
            times = self._replayed(case, run, arguments["initial_state"])
        except Exception as uncaptured:
            row["graph_reason"] = told(uncaptured)
            settle(self.device)
        else:
            row |= _three("graph", times)
        return row

    def _replayed(self, case: Case, run: Run, pool: Tensor) -> Times:
        if case.op != "packed_decode_kda":
            return replayed(run.call, run.reset, self.device, self.rounds)
        with_pool = run.with_pool
        assert with_pool is not None
        count = max(2, min(MOST_POOLS, COLD_BYTES // pool.nbytes)) if self.device.type == "cuda" else 1
        pools = [pool.clone() for _ in range(count)]
        return replayed(lambda: [with_pool(p) for p in pools], lambda: None, self.device, self.rounds).divided(count)


def best_ms(row: Row) -> float:
    """Milliseconds by graph replay, or of an eager call where there is no replay."""
    return row["graph_ms"] if "graph_ms" in row else row["eager_ms"]


def told(failure: BaseException) -> str:
    """A failure in one line."""
    lines = str(failure).splitlines()
    return f"{type(failure).__name__}: {lines[0][:160]}" if lines else type(failure).__name__


@contextlib.contextmanager
def _failing_is_told(provider: Provider) -> Iterator[list[str]]:
    """Takes what a provider may fail with, and says it: anything for a peer; for ours that it does not take the call, or want of memory."""
    failure: list[str] = []
    try:
        yield failure
    except UnableError as unable:
        failure.append(str(unable))
    except (torch.OutOfMemoryError, MemoryError) as full:
        failure.append(told(full))
    except Exception as failed:
        if not provider.peer:
            raise
        failure.append(told(failed))


def _refuse(case: Case, provider: Provider, what: str, deviation: float, allowed: float) -> None:
    """KDA309 when a backend of ours is too far off."""
    if not deviation <= allowed:  # NaN is too far
        details = {"what": what, "deviation": f"{deviation:.2e}", "tolerance": f"{allowed:.1e}", "where": f"case {_title(case)}"}
        raise error("KDA309", op=case.op, backend=provider.name, **details)


def _compare_with_peers(rows: list[Row]) -> None:
    """Adds to the rows of our backends how many times as long each peer takes, and the best of them."""
    peers = {row["provider"]: row for row in rows if row["peer"] and "not_run" not in row}
    for row in rows:
        if not row["peer"] and "not_run" not in row and peers:
            ratios = {name: _ratio(peer, row) for name, peer in peers.items()}
            row |= {"ratio_to": ratios, "ratio_to_best_peer": min(ratios.values())}


def _ratio(row: Row, base: Row) -> float:
    """Time of `row` over that of `base`: of replays where both have them, else of eager calls."""
    how = "graph_ms" if "graph_ms" in row and "graph_ms" in base else "eager_ms"
    return _rounded(row[how] / base[how])


def _title(case: Case) -> str:
    return case.name if case.variant == "plain" else f"{case.name} {case.variant}"


def _three(how: str, times: Times) -> Row:
    return {f"{how}_ms": _rounded(times.median), f"{how}_p20": _rounded(times.p20), f"{how}_p80": _rounded(times.p80)}


def _rounded(value: float) -> float:
    """To five significant digits."""
    return float(f"{value:.5g}")


def _number(value: float) -> float | str:
    """The number, or its name where JSON has none."""
    return _rounded(value) if math.isfinite(value) else str(value)
