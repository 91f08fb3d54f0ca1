"""What the machine can do at best, measured in the same run, and the state it is in."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kdaserve.bench.timing import ahead, eager

COPIED = {"cpu": 2**27, "cuda": 2**31}
"""Bytes of the tensor whose copy gives the bandwidth: far more than a cache holds."""
PRODUCT = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices whose product gives the rate."""
COMMIT = "KDASERVE_COMMIT"
"""Environment variable that names the commit where the source is no git checkout."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Best rates of a device.

    Attributes:
        bandwidth: bytes a second of a large copy, read and written.
        product_rate: floating-point operations a second of a large matrix product in the dtype of the inputs.
    """

    bandwidth: float
    product_rate: float

    def floor_ms(self, nbytes: float, flops: float) -> float:
        """Milliseconds that nothing which moves so many bytes and does so many operations can undercut."""
        return 1e3 * max(nbytes / self.bandwidth, flops / self.product_rate)


def measure_limits(device: torch.device, dtype: torch.dtype, rounds: int | None = None) -> Limits:
    """Times a large copy and a large product."""
    return Limits(2 * COPIED[device.type] / _copy_seconds(device, rounds), product_rate(device, dtype, rounds))


def product_rate(device: torch.device, dtype: torch.dtype, rounds: int | None = None) -> float:
    """Floating-point operations a second of a matrix product."""
    n = PRODUCT[device.type]
    a, b, c = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(3))
    return 2 * n**3 / _seconds(lambda: torch.mm(a, b, out=c), device, rounds)


def _copy_seconds(device: torch.device, rounds: int | None) -> float:
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source), device, rounds)


def _seconds(call: Callable[[], Tensor], device: torch.device, rounds: int | None) -> float:
    times = ahead(call, lambda: None, device, rounds) if device.type == "cuda" else eager(call, lambda: None, device, rounds).elapsed
    return times.median / 1e3


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def clock_mhz(device: torch.device) -> int | None:
    """The clock of the GPU's multiprocessors now, as nvidia-smi tells it; None where it does not."""
    if device.type != "cuda":
        return None
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={gpu}"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def commit() -> str:
    """The commit of the checkout this runs from, with + when it has changes; outside one what `COMMIT` says, or "unknown"."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get(COMMIT, "unknown")
