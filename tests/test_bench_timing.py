"""What times calls: order of events, not durations; on a GPU also that replays, memory and failed captures are told right."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from commands import run
from kdaserve.bench import limits
from kdaserve.bench.timing import FEWEST, MOST, Times, eager, extra_memory, replayed, settle, take_turns
from kdaserve.testing.cases import DecodeCase, PrefillCase

CPU = torch.device("cpu")


def test_percentiles() -> None:
    assert Times.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Times(2.0, 3.5, 5.0)
    assert Times.of([7.0, 7.0]) == Times(7.0, 7.0, 7.0)
    assert Times(2.0, 4.0, 8.0).divided(4) == Times(0.5, 1.0, 2.0)


@pytest.mark.parametrize("rounds", [3, 10])
def test_every_timed_call_finds_its_inputs_put_back(rounds: int) -> None:
    events: list[str] = []
    eager(lambda: events.append("call"), lambda: events.append("reset"), CPU, rounds)
    timed = events[events.index("reset") :]
    assert timed == ["reset", "call"] * rounds
    assert len(events) > len(timed), "a warm-up"


def test_rounds_without_a_number_are_bounded() -> None:
    events: list[str] = []
    eager(lambda: events.append("call"), lambda: events.append("reset"), CPU)
    assert FEWEST <= events.count("reset") <= MOST


def test_calls_take_turns() -> None:
    events: list[str] = []
    times = take_turns({name: lambda name=name: events.append(name) for name in "ab"}, 4)
    assert times.keys() == {"a", "b"}
    assert "".join(events) == "aabb" + "ab" * 4


def test_a_cpu_has_no_graphs_and_nobody_counts_its_memory() -> None:
    with pytest.raises(RuntimeError, match="no CUDA graphs on cpu"):
        replayed(lambda: None, lambda: None, CPU)
    assert extra_memory(lambda: torch.zeros(10), CPU) is None
    assert limits.clock_mhz(CPU) is None
    assert limits.device_name(CPU) == "cpu"


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    machine = limits.Limits(bandwidth=1e9, product_rate=1e12)
    assert machine.floor_ms(2e9, 1e12) == pytest.approx(2000)
    assert machine.floor_ms(1e9, 3e12) == pytest.approx(3000)


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda")


@pytest.mark.gpu
def test_a_replay_computes_what_the_call_computes(cuda: torch.device) -> None:
    x, counter = torch.ones(2**20, device=cuda), torch.zeros(1, device=cuda, dtype=torch.int64)
    y = torch.zeros_like(x)

    def call() -> None:
        torch.mul(x, 2, out=y)
        counter.add_(1)

    times = replayed(call, y.zero_, cuda, rounds=5)
    settle(cuda)
    assert 0 < times.p20 <= times.median <= times.p80
    assert counter.item() > 5
    assert y.min().item() == y.max().item() == 2


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_device_fit_for_use(cuda: torch.device) -> None:
    x = torch.ones(10, device=cuda)
    with pytest.raises(Exception, match="captur"):
        replayed(lambda: x.sum().item(), lambda: None, cuda, rounds=3)
    settle(cuda)
    assert eager(lambda: x.sum().item(), lambda: None, cuda, rounds=3).host > 0
    assert replayed(lambda: x.add_(1), lambda: None, cuda, rounds=3).median > 0


@pytest.mark.gpu
def test_memory_at_its_peak(cuda: torch.device) -> None:
    def call() -> torch.Tensor:
        first = torch.empty(2**24, dtype=torch.uint8, device=cuda)
        second = torch.empty(2**24, dtype=torch.uint8, device=cuda)
        del first
        return second

    assert extra_memory(call, cuda) == 2**25


@pytest.mark.gpu
def test_limits_of_a_gpu(cuda: torch.device) -> None:
    found = limits.measure_limits(cuda, torch.bfloat16, rounds=5)
    assert found.bandwidth > 0
    assert found.product_rate > 0
    clock = limits.clock_mhz(cuda)
    assert clock is None or clock > 0


@pytest.mark.gpu
@pytest.mark.parametrize("command", ["prefill", "decode"])
def test_a_gpu_is_measured(command: str, narrow_plain_terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = sys.modules["kdaserve.cli.bench"]
    few = {"prefill": (PrefillCase("tiny", (70, 5), 2, torch.bfloat16),), "decode": (DecodeCase(3, 2),)}[command]
    monkeypatch.setattr(cli, f"GPU_{command.upper()}", few)
    found = json.loads(run("bench", command, few[0].name, "--json", "--peer", "none").stdout)
    assert found
    for row in found:
        assert row["device"] == torch.cuda.get_device_name()
        assert row["extra_bytes"] >= 0
        assert row["eager_ms"] > 0
        assert row["queued_ms"] > 0
        assert row["host_ms"] > 0
        assert ("graph_ms" in row) != ("graph_reason" in row)
