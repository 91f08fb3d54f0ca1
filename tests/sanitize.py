"""Small calls of every op, to run under NVIDIA's compute-sanitizer, which takes fifty times as long:

    compute-sanitizer --tool memcheck python3 tests/sanitize.py
    compute-sanitizer --tool racecheck python3 tests/sanitize.py

Without a GPU the kernels run in Triton's interpreter, which checks the calls but no memory.
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # every tensor an allocation of its own, whose ends memcheck knows

from collections.abc import Callable
from typing import Any

import torch

from conftest import Call, Target, serving_targets
from gpu import DATA, decay_in_places
from helpers import DECODE, NAN
from kdaserve import plan_prefill
from kdaserve.testing import decode_inputs, prefill_inputs
from test_gpu_forms import moved
from test_pool_semantics import with_tail
from test_prefill_semantics import observed

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def prefills(target: Target) -> list[Call]:
    """Gates, dimensions, heads, states handed out, padding rows and sequences, empty sequences, any memory; in the one size if there is one."""
    device, dim = target.device, target.row.dim

    def made(inputs: Callable[..., Call], lengths: list[int], dtype: torch.dtype = BF16, dims: tuple[int, int] = (16, 16), **options: Any) -> Call:
        k_dim, v_dim = dims if dim is None else (dim, dim)
        return inputs(lengths, dtype=dtype if dim is None else BF16, k_dim=k_dim, v_dim=v_dim, device=device, **options)

    calls = [
        made(prefill_inputs, [70], heads=1),
        made(observed, [65, 0, 3], dims=(64, 48), heads=1, v_heads=2),
        made(observed, [0, 5, 64, 0], FP32, (48, 64), pool_dtype=BF16, gate="softplus", beta_is_raw=True),
        made(observed, [66, 1], FP16, (32, 16), heads=1, pool_dtype=FP16, gate="none"),
        made(prefill_inputs, [0, 0]),
        made(prefill_inputs, [33, 33], batched=True, heads=1, v_heads=3),
        made(prefill_inputs, [3] * 40, heads=1),
        made(prefill_inputs, [40, 2], dims=(128, 128), heads=1, gate="softplus"),
    ]
    for call, gate in ((calls[2], "softplus"), (calls[3], "none"), (calls[7], "softplus")):
        call["g"] = decay_in_places(call["g"], gate)
    for call in (calls[1], calls[4]):
        call |= {name: with_tail(call[name], 9) for name in DATA}
    for call in (calls[1], calls[6]):
        call["initial_state_indices"][::2] = -1
    calls[5]["plan"] = plan_prefill(lengths=[33, 33], device=device)
    calls.append(calls[3] | moved(calls[3], (*DATA, "dt_bias"), ("initial_state", "track_state")))
    return calls


def decodes(device: str) -> list[Call]:
    """Both gates, the tiles of few and of many requests, padding, any memory."""
    calls = [
        decode_inputs(3, heads=1, v_heads=2, k_dim=64, v_dim=48, dtype=BF16, device=device),
        decode_inputs(70, heads=1, dtype=BF16, pool_dtype=BF16, lower_bound=None, device=device),
        decode_inputs(2, k_dim=48, v_dim=64, dtype=FP16, pool_dtype=FP16, device=device),
    ]
    for call in calls[:2]:
        call["ssm_state_indices"][1] = -1
        call["mixed_qkv"][1] = NAN
    calls.append(calls[2] | moved(calls[2], ("mixed_qkv", "a", "b", "dt_bias", "out"), ("initial_state",)))
    return calls


def run(target: Target) -> int:
    """Runs all calls; how many."""
    jobs = [(op, call) for op in ("chunk_kda", "recurrent_kda") for call in prefills(target)]
    jobs += [(DECODE, call) for call in decodes(target.device)]
    jobs = [(op, call) for op, call in jobs if op in target.row.ops]
    for op, call in jobs:
        target.run(op, call)
    return len(jobs)


if __name__ == "__main__":
    on = "cuda" if torch.cuda.is_available() else "cpu"
    count = sum(run(target) for target in serving_targets(on))
    if on == "cuda":
        torch.cuda.synchronize()
    print(f"{count} calls on {on}")
