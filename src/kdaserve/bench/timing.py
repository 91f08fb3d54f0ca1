"""How long a call takes, and how much memory: on a CPU, and on a GPU as issued by the host and as replayed from a CUDA graph."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

WARM_UP = 3
FLUSHED = 2**28
"""Bytes written before each timed call of a GPU, so that it finds nothing in the L2 cache; some five times what that holds."""
BUDGET_MS = 150.0
FEWEST, MOST = 10, 200
"""Without a number of rounds: as many as take about `BUDGET_MS`, within these."""

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds: median, 20th and 80th percentile."""

    p20: float
    median: float
    p80: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Times:
        """Of at least two measured times."""
        fifths = statistics.quantiles(times, n=5, method="inclusive")
        return cls(fifths[0], statistics.median(times), fifths[3])

    def divided(self, n: int) -> Times:
        """The times of one of `n` equal parts."""
        return Times(self.p20 / n, self.median / n, self.p80 / n)


@dataclasses.dataclass(frozen=True, slots=True)
class Eager:
    """A call issued by the host.

    Attributes:
        elapsed: until the device is done. The device is idle when the host begins, so the work of the host before the first launch counts.
        host: until the call returns to the host, the median in milliseconds.
    """

    elapsed: Times
    host: float


def take_turns(calls: dict[str, Call], rounds: int) -> dict[str, Times]:
    """CPU calls; they take turns, so that what else the machine does hits all alike."""
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: Times.of(ts) for name, ts in times.items()}


def eager(call: Call, reset: Call, device: torch.device, rounds: int | None = None) -> Eager:
    """Times a call as the host issues it; `reset` puts back what it writes, untimed."""
    hosts, elapsed = [], []
    for _ in _rounds(call, device, rounds):
        reset()
        _flush(device)
        clock = _Clock(device)
        clock.start()
        begin = time.perf_counter()
        call()
        hosts.append(1e3 * (time.perf_counter() - begin))
        elapsed.append(clock.stop())
    return Eager(Times.of(elapsed), statistics.median(hosts))


def replayed(call: Call, reset: Call, device: torch.device, rounds: int | None = None) -> Times:
    """Times replays of a CUDA graph of the call: device time alone.

    Raises:
        RuntimeError: where there are no CUDA graphs, or the call cannot be captured.
    """
    if device.type != "cuda":
        raise RuntimeError(f"no CUDA graphs on {device.type}")
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        return ahead(graph.replay, reset, device, rounds)


def ahead(call: Call, reset: Call, device: torch.device, rounds: int | None = None) -> Times:
    """Times a call that waits on a GPU behind the flush: device time alone, if the host needs less than that takes."""
    events = []
    for _ in _rounds(call, device, rounds):
        reset()
        _flush(device, wait=False)
        events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        events[-1][0].record()
        call()
        events[-1][1].record()
    settle(device)
    return Times.of([start.elapsed_time(end) for start, end in events])


def extra_memory(call: Call, device: torch.device) -> int | None:
    """Bytes that a call allocates at its peak, its output among them; None where nobody counts."""
    if device.type != "cuda":
        return None
    settle(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    settle(device)
    return torch.cuda.max_memory_allocated(device) - before


def settle(device: torch.device) -> None:
    """Waits for a device to be done; after a capture that failed it is then fit for use again."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Clock:
    """Milliseconds from `start` to the end of what the device was given before `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._begin = 0.0

    def start(self) -> None:
        if self._events:
            self._events[0].record()
        self._begin = time.perf_counter()

    def stop(self) -> float:
        if not self._events:
            return 1e3 * (time.perf_counter() - self._begin)
        self._events[1].record()
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1])


def _rounds(call: Call, device: torch.device, rounds: int | None) -> Iterator[int]:
    """Warms up, then counts the rounds."""
    for _ in range(WARM_UP):
        call()
    if rounds is None:
        clock = _Clock(device)
        clock.start()
        call()
        rounds = min(MOST, max(FEWEST, int(BUDGET_MS / max(clock.stop(), 1e-6))))
    return iter(range(rounds))


def _flush(device: torch.device, wait: bool = True) -> None:
    if device.type == "cuda":
        _scratch(device).zero_()
        if wait:
            settle(device)


@functools.cache
def _scratch(device: torch.device) -> torch.Tensor:
    return torch.empty(FLUSHED, dtype=torch.uint8, device=device)
