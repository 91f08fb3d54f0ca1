"""Calls beside each other and again and again give the same bits (S10, S16): on two streams, on a late stream, a thousand times,
on a GPU that others use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conftest import Call, Target
from gpu import assert_same_results, call_with_states, differ, results
from helpers import DECODE, NAN

pytestmark = pytest.mark.gpu

LONG: dict[str, Any] = {"heads": 4, "k_dim": 128, "v_dim": 128, "dtype": torch.bfloat16}
SHORT: dict[str, Any] = {"heads": 2, "v_heads": 4, "k_dim": 64, "v_dim": 64, "dtype": torch.bfloat16}
MILLISECOND = 1_000_000
"""About so many cycles of the clock by which `torch.cuda._sleep` counts."""
OTHERS = 4
BUSY = """
import torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("busy", flush=True)
while True:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""


def two_calls(op: str, device: str) -> list[Call]:
    """Two that have nothing in common but their kernels, each busy for longer than the host takes to launch it."""
    if op == DECODE:
        return [call_with_states(op, [1] * (150 + 50 * seed), device, seed, **LONG) for seed in (0, 1)]
    scale = 1 if op == "recurrent_kda" else 4
    return [call_with_states(op, [n * scale for n in ([200, 70, 129], [64, 150])[seed]], device, seed, **LONG) for seed in (0, 1)]


def test_two_streams_at_once(serving_target: Target, every_op: str):
    calls = two_calls(every_op, serving_target.device)
    alone = [results(serving_target, every_op, call) for call in calls]
    wrong = [torch.zeros((), dtype=torch.bool, device=serving_target.device) for _ in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(100):
        for call, expected, stream, flag in zip(calls, alone, streams, wrong, strict=True):
            with torch.cuda.stream(stream):
                flag |= differ(results(serving_target, every_op, call), expected)
    torch.cuda.synchronize()
    assert not any(wrong), f"{every_op} beside another call: other bits on stream {[bool(flag) for flag in wrong].index(True)}"


def test_a_stream_whose_inputs_come_late(serving_target: Target, every_op: str):
    """Whatever does not wait for that stream reads NaN, or an output that is not there yet."""
    call = call_with_states(every_op, [70, 0, 130], serving_target.device, **SHORT)
    expected = results(serving_target, every_op, call)
    stream = torch.cuda.Stream()
    late = {name: torch.full_like(x, NAN) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in call.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20 * MILLISECOND)
        for name, x in late.items():
            if x is not call[name]:
                x.copy_(call[name])
        found = {name: x.clone() for name, x in results(serving_target, every_op, late).items()}
    stream.synchronize()
    assert_same_results(found, expected, "on a stream of its own")


@pytest.mark.parametrize("sequences", [3, 12, 70])
def test_a_thousand_times_the_same_bits(serving_target: Target, every_op: str, sequences: int):
    """Short sequences, whose programs start and end side by side; each time after other work, so that they meet in other ways."""
    lengths = [(37 * n) % 131 for n in range(sequences)]
    call = call_with_states(every_op, lengths, serving_target.device, **SHORT)
    expected = results(serving_target, every_op, call)
    wrong = torch.zeros((), dtype=torch.bool, device=serving_target.device)
    busy, side = torch.zeros(2**22, device=serving_target.device), torch.cuda.Stream()
    torch.cuda.synchronize()
    for repetition in range(1000):
        with torch.cuda.stream(side):
            busy[: 2 ** (repetition % 23)] += 1
        wrong |= differ(results(serving_target, every_op, call), expected)
    torch.cuda.synchronize()
    assert not wrong, f"{every_op}: other bits in one of 1000 runs"


@pytest.fixture
def others() -> Iterator[None]:
    """Processes that are busy on the GPU, which it is taken from and given back to, wherever a kernel is."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) for _ in range(OTHERS)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "busy\n"
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.usefixtures("others")
def test_a_gpu_that_others_use(serving_target: Target):
    calls = {op: call_with_states(op, [(37 * n) % 131 for n in range(70)], serving_target.device, **SHORT) for op in serving_target.row.ops}
    for op, call in calls.items():
        expected = results(serving_target, op, call)
        wrong = torch.zeros((), dtype=torch.int32, device=serving_target.device)
        for _ in range(2000):
            wrong += differ(results(serving_target, op, call), expected)
        assert wrong == 0, f"{op}: other bits in {int(wrong)} of 2000 runs"
