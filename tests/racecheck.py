"""A warp-specialised kernel without shared memory of its own, for NVIDIA's racecheck, which finds fault with it if its warps meet (docs/facts.md):

compute-sanitizer --tool racecheck python3 tests/racecheck.py
compute-sanitizer --tool racecheck python3 tests/racecheck.py barrier
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def many(p, MEET: gl.constexpr):
    o = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    if MEET:
        gl.thread_barrier()
    gl.store(p + o, o)


@gluon.jit
def one(p, MEET: gl.constexpr):
    o = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(p + 128 + o, o)


@gluon.jit
def kernel(p, MEET: gl.constexpr):
    gl.warp_specialize([(many, (p, MEET)), (one, (p, MEET))], [1], [24])


if __name__ == "__main__":
    x = torch.zeros(160, dtype=torch.int32, device="cuda")
    kernel[(1,)](x, "barrier" in sys.argv, num_warps=4)
    assert int(x.sum()) == 128 * 127 // 2 + 32 * 31 // 2
